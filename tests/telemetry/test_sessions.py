"""The traces of random sessions: live, and as an export."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from crow.domain.entries import Checkpoint, Mask, ModelRequest, NewEntry, Started, TurnEnd
from crow.domain.messages import Usage
from crow.replay.case import with_subagents
from crow.store import Store
from crow.store.sqlite.store import SqliteStore
from crow.telemetry.live import Sender, TracedStore, traced
from crow.telemetry.otlp import otlp_line, otlp_lines
from crow.telemetry.spans import spans_of
from crow.telemetry.turns import Turn
from tests.store.conftest import sqlite_store
from tests.store.scenes import begin, new_session, result, said
from tests.support.collector import Got
from tests.support.conventions import ledger_of, problems_of, read_otlp

__all__ = ["sqlite_store"]

SESSIONS = int(os.environ.get("SOAK_SESSIONS", "15"))
ENDPOINTS = ("http://127.0.0.1:8080/v1 m1", "https://api.anthropic.com/v1 claude-sonnet-5", "", "http://[::1 broken")
STOPS = ("end_turn", "end_turn", "end_turn", "cancelled", "error", "interrupted")
TOOLS = ("read_file", "nest__echo", "task", "no such\ntool " * 90)


class Kept(Sender):
    """Keeps the turns that would be sent."""

    def __init__(self) -> None:
        super().__init__(lambda: None, None)  # type: ignore[arg-type,return-value]
        self.turns: list[Turn] = []

    def put(self, turn: Turn) -> None:
        self.turns.append(turn)

    def spans(self) -> list[Got]:
        found = (spans_of(turn) for turn in self.turns)
        return read_otlp(otlp_line(spans) for spans in found if spans)


class Driver:
    """Runs random turns."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.prompts = 0

    def usage(self) -> Usage | None:
        sent = self.rng.choice((None, self.rng.randrange(5_000)))
        cached = None if sent is None else self.rng.choice((None, self.rng.randrange(sent + 1)))
        made = self.rng.choice((None, self.rng.randrange(500)))
        return self.rng.choice((None, Usage(input_tokens=sent, output_tokens=made, cached_tokens=cached)))

    async def turn(self, session_id: str, *, task: str | None = None) -> None:
        """Run a turn. If `task` is set, one of its calls may be carried out by this subagent."""
        self.prompts += 1
        start = await begin(self.store, session_id, f"p{self.prompts}")
        leaf, turn, rng = start.id, start.turn, self.rng
        for _ in range(rng.randrange(1, 4)):
            calls = rng.randrange(3)
            answer = replace(said("look", calls=calls), endpoint=rng.choice(ENDPOINTS))
            failed = [self._entry(ModelRequest(purpose="answer"))] * (rng.random() < 0.2)
            *_, stored = await self.store.append(
                session_id, leaf=leaf, turn=turn, entries=[*failed, self._entry(answer)]
            )
            leaf = stored.id
            for index in range(calls):
                leaf = await self._call(session_id, (leaf, turn), stored.id, index, task)
            if rng.random() < 0.2:
                before = Mask(before=leaf) if rng.random() < 0.3 else _CHECKPOINT
                more = [self._entry(ModelRequest(purpose="summary")), NewEntry(body=before)]
                leaf = (await self.store.append(session_id, leaf=leaf, turn=turn, entries=more))[-1].id
        end = NewEntry(body=TurnEnd(stop=rng.choice(STOPS)))  # type: ignore[arg-type]
        (stored,) = await self.store.append(session_id, leaf=leaf, turn=turn, entries=[end], release=True)
        if rng.random() < 0.2:
            title = self._entry(ModelRequest(purpose="title"))
            await self.store.append(session_id, leaf=stored.id, turn=turn, entries=[title])

    async def _call(self, session_id: str, place: tuple[int, int], answer: int, index: int, task: str | None) -> int:
        """Run a call, which may have no result. Return the newest entry."""
        (leaf, turn), done = place, result(answer, index=index)
        name = "task" if task else self.rng.choice(TOOLS)
        started = NewEntry(body=Started(call=done.call, why="mode auto"))
        leaf = (await self.store.append(session_id, leaf=leaf, turn=turn, entries=[started]))[-1].id
        is_background = self.rng.random() < 0.3
        if task and not is_background:
            await self.turn(task)
        if self.rng.random() < 0.9:
            data = {"task": task} if name == "task" and task else {}
            duration = self.rng.randrange(50)
            done = replace(done, name=name, is_error=self.rng.random() < 0.2, raw_output=data, duration_ms=duration)
            entry = NewEntry(body=done, usage=self.usage())
            leaf = (await self.store.append(session_id, leaf=leaf, turn=turn, entries=[entry]))[-1].id
        if task and is_background:
            await self.turn(task)
        return leaf

    def _entry(self, body: object) -> NewEntry:
        return NewEntry(body=body, model="m1", usage=self.usage(), cost=self.rng.choice((None, 0.5)))  # type: ignore[arg-type]


_CHECKPOINT = Checkpoint(compaction_id="c", summary="so far", first_kept=None)


@pytest.mark.long
async def test_the_traces_of_random_sessions_are_complete_and_the_same_live_and_later(
    sqlite_store: SqliteStore,
) -> None:
    """Each token of the ledger is in one span, each span has what the conventions require, and its parent exists."""
    for number in range(SESSIONS):
        kept = Kept()
        store = traced(sqlite_store, kept)
        driver = Driver(store, number)
        session_id, task = f"s{number}", f"task{number}"
        for new in (new_session(session_id), new_session(task, parent_id=session_id)):
            await store.create_session(new)
            await store.open_session(new.id)
        for _ in range(driver.rng.randrange(1, 4)):
            await driver.turn(session_id, task=driver.rng.choice((None, task)))
        tail = await store.tail(session_id)
        if driver.rng.random() < 0.5:  # the undone turns were paid for, too
            await store.move_leaf(session_id, leaf=tail.row.leaf, to=tail.entries[0].id, reason="undo")
            await driver.turn(session_id)
        sessions = await with_subagents(store, session_id)
        lines = [line async for line in otlp_lines(store, sessions, None)]
        found = read_otlp(lines)
        assert problems_of(found) == []
        totals = await store.usage_by_model(session_id)
        assert ledger_of(found) == tuple(
            sum(getattr(total, name) or 0 for total in totals) for name in ("tokens_in", "tokens_out", "tokens_cached")
        )
        assert [line async for line in otlp_lines(store, sessions, None)] == lines
        assert sorted(kept.spans(), key=_place) == sorted(found, key=_place)
        assert isinstance(store, TracedStore)


def _place(span: Got) -> tuple[str, str]:
    return (span.trace, span.span)
