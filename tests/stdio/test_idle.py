"""The idle process tidies the store."""

from __future__ import annotations

from pathlib import Path

import anyio

from tests.stdio.conftest import StartCrow
from tests.stdio.test_turns import opened

AT_ONCE = """
from crow.agent.idle import IdleTimer
IdleTimer.__init__.__kwdefaults__["after_s"] = 0.0
"""
"""Lets a process count as idle as soon as a turn has ended."""


async def test_the_wal_is_emptied_when_no_turn_runs(crow: StartCrow, home: Path, place: Path) -> None:
    wal = anyio.Path(home / "crow.db-wal")
    async with crow(before=AT_ONCE) as agent:
        session = await opened(agent, place)
        assert (await wal.stat()).st_size > 0
        await agent.prompt(session, "say hello")
        with anyio.fail_after(60):  # no message says when it is done
            while (await wal.stat()).st_size > 0:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert await agent.prompt(session, "say more") == {"stopReason": "end_turn"}
