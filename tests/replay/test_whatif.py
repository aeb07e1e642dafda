"""What would have been sent with another model or policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crow.agent.compaction.budget import CompactionPolicy
from crow.domain.entries import Checkpoint, Prompt, TurnEnd, User
from crow.domain.messages import Text
from crow.replay.whatif import Change, what_if
from crow.store.sqlite.store import SqliteStore
from tests.replay.harness import INFO
from tests.store.scenes import add, new_session, said

WORDS = "Twigs and string. " * 300


async def tokens(database: Path, summary: str) -> list[tuple[int, str]]:
    """The tokens and compactions of a session that was compacted early in the log, and is compacted late now."""
    store = await SqliteStore.open(database)
    try:
        await store.create_session(new_session())
        await store.take_turn("s1", "m0", leaf=None, parts=(Text(text="Build a nest."),))
        await add(store, "s1", Prompt(system="You build.", tools=(), cwd="/repo", model="m"), said("Where?"))
        await add(store, "s1", Checkpoint(compaction_id="c", summary=summary, first_kept=None))
        for number in range(12):
            prompt = User(parts=(Text(text=f"{number} {WORDS}"),), message_id=f"m{number + 1}")
            await add(store, "s1", prompt, said(f"Answer {number}."))
        await add(store, "s1", TurnEnd(stop="end_turn"), release=True)
        change = Change(info=replace(INFO, context_window=20_000), policy=CompactionPolicy())
        return [(each.tokens, each.compaction) async for each in what_if(store, "s1", change)]
    finally:
        await store.close()


async def test_a_compaction_gets_no_summary_from_an_earlier_place_of_the_log(tmp_path: Path) -> None:
    short = await tokens(tmp_path / "short.db", "A nest.")
    assert any(compaction == "summary" for _, compaction in short)
    assert short == await tokens(tmp_path / "long.db", "A nest of twigs. " * 60)
