"""Clients without the capability for compactions read that a summary is being written, and how that ended: once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio

from tests.support.compaction import SUMMARY
from tests.support.scripted_model import Say
from tests.support.shared_host import Watcher, shared

BEGUN = "(Writing a summary of the conversation so far.)"
CURSORS: dict[str, Any] = {"_meta": {"acp/cursor": True}}


def count(client: Watcher, words: str, since: int = 0) -> int:
    return sum(words in repr(update) for update in client.kinds_and_texts()[since:])


async def test_clients_that_come_while_a_summary_is_written_read_it_once(tmp_path: Path) -> None:
    hold = anyio.Event()
    says = [Say(text=["a" * 6_000]) for _ in range(3)]
    async with shared(tmp_path, *says, Say(text=[SUMMARY], hold=hold)) as on:
        first = await on.client(capabilities=CURSORS)
        session = await first.new()
        for _ in says:
            await first.prompt(session, "q" * 6_000)
        compacting = asyncio.create_task(first.prompt(session, "/compact"))
        await first.until_kind("agent_message_chunk", BEGUN)
        cursor = next(each["_meta"]["acp/cursor"] for each in reversed(first.updates) if "_meta" in each)

        second, third = await on.client(), await on.client(capabilities={"session": {"compaction": {}}})
        await second.open("session/load", session)
        await third.open("session/load", session)
        assert (count(second, BEGUN), count(third, BEGUN)) == (1, 0)
        assert count(third, "'status': 'in_progress'") == 1
        back = await on.client(capabilities=CURSORS)
        await back.open("session/resume", session, _meta={"acp/cursor": cursor})
        hold.set()
        await compacting
        for client in (first, second, back):
            await client.until_kind("agent_message_chunk", "Compacted to a summary")
        await third.until(lambda updates: "'status': 'completed'" in repr(updates))
        assert [count(each, BEGUN) for each in (first, second, third, back)] == [1, 1, 0, 0]
        assert [count(each, "Compacted to a summary") for each in (first, second, back)] == [1, 1, 1]
        since = len(second.updates)
        await second.open("session/load", session)
        assert (count(second, BEGUN, since), count(second, "Compacted to a summary", since)) == (0, 1)
