"""Two servers on one PostgreSQL database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.acp_client import RpcError
from tests.support.postgres import new_database
from tests.support.server import ServerProcess, WebSocketClient, server_environment

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def nodes(directory: Path) -> AsyncIterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers, each with a CROW_HOME of its own."""
    async with new_database() as url, AsyncExitStack() as running:
        made = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            (directory / name / "config.toml").write_text(f'[serve]\nnode = "{name}"\n')
            more = {"CROW_DATABASE_URL": url, "CROW_SANDBOX": "off"}
            server = ServerProcess(env=server_environment(directory / name, **more), cwd=directory)
            made.append(await running.enter_async_context(server))
        yield made[0], made[1]


async def never(_params: dict[str, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def connected(running: AsyncExitStack, node: ServerProcess, **options: Any) -> WebSocketClient:
    client = await running.enter_async_context(node.client(**options))
    client.follows_order = False
    await client.initialize()
    return client


async def test_a_node_takes_over_from_a_killed_one(tmp_path: Path, place: Path) -> None:
    async with nodes(tmp_path) as (one, two), AsyncExitStack() as running:
        ann = await connected(running, one, answers={"session/request_permission": never})
        bob = await connected(running, two)
        session = await ann.new_session(place)
        await ann.prompt(session, "hello there")
        await bob.load_session(session, place)
        before = bob.text(session)
        assert before == ann.text(session)
        turn = await ann.start_prompt(session, "write notes.txt: twigs")
        await ann.wait_for(lambda message: message.get("method") == "session/request_permission")
        await bob.wait_for_update("tool_call", status="pending")  # what one asks is asked of the clients of one only
        waiting = await bob.start_prompt(session, "hello again")
        listed = [(await each.request("session/list", {}))["sessions"] for each in (ann, bob)]
        assert listed[0] == listed[1]
        assert listed[0][0]["_meta"]["crow"]["node"] == "one"
        one.is_checked = False
        one.process.kill()
        assert await waiting.result() == {"stopReason": "end_turn"}
        with pytest.raises((ConnectionError, RpcError)):
            await turn.result()
        await bob.wait_for_update("tool_call_update", status="failed")
        assert "ended in the middle of this turn" in bob.text(session)
        assert not (place / "notes.txt").exists()
        # The interrupted turn and its end come before the prompt that took over; a new client sees the same.
        carl = await connected(running, two)
        await carl.load_session(session, place)
        assert carl.text(session) == bob.text(session)
        prompts = ["hello there", "write notes.txt: twigs", "hello again"]
        assert carl.text(session, "user_message_chunk") == "".join(prompts)
