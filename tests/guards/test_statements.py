"""A turn's SQL statements and flushes do not grow with the session."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from crow.agent.compaction.budget import CompactionPolicy
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import Tool, opened, text
from tests.guards.long import SESSION, grow
from tests.store.scenes import new_session
from tests.support.scripted_model import Say, ScriptedModel, call

TURN = {"select": 5, "insert": 6, "update": 4, "delete": 3}
"""SQL statements of a turn without calls, by verb."""

TURN_COMMITS = 4
"""Flushes: the prompt with the start of the turn, the first draft, the answer, the end. A draft may share a flush."""

STEP = {"select": 2, "insert": 4, "update": 3, "delete": 1}
"""SQL statements that each step with one reading call adds."""

STEP_COMMITS = 2
"""Flushes: the answer with its call; the start of the call with its result."""

STEPS = 5


@dataclass(frozen=True)
class Cost:
    """SQL statements by verb, flushes, and tens of steps of SQLite's virtual machine."""

    statements: Counter[str]
    commits: int
    steps: int

    def beyond(self, other: Cost, times: int) -> Cost:
        """The cost that this one has beyond `other`, divided by `times`."""
        more = self.statements - other.statements
        each = Counter({verb: count // times for verb, count in more.items()})
        return Cost(each, (self.commits - other.commits) // times, (self.steps - other.steps) // times)


class Watched:
    """Counts the work of a store's connections."""

    def __init__(self) -> None:
        self._statements: list[str] = []
        self._steps = 0

    def watch(self, connection: sqlite3.Connection) -> None:
        """Watch this connection too."""
        connection.set_trace_callback(self._statements.append)
        connection.set_progress_handler(self._tick, 10)

    def cost(self) -> Cost:
        """The cost since the last call. BEGIN and COMMIT do not count as statements; a COMMIT counts as a flush."""
        verbs = Counter(statement.split()[0].lower() for statement in self._statements)
        cost = Cost(Counter({verb: verbs[verb] for verb in TURN}), verbs["commit"], self._steps)
        self._statements.clear()
        self._steps = 0
        return cost

    def _tick(self) -> int:
        self._steps += 1
        return 0


async def watched(store: SqliteStore) -> Watched:
    """Counts the work of the store from now on."""
    watching, database = Watched(), store.database
    for connection in (database._writer, await database._open_reader()):
        await connection.run(watching.watch)
    return watching


async def look(**_: object) -> str:
    return "seen"


async def costs(directory: Path, entries: int) -> tuple[Cost, Cost]:
    """The cost of a turn without calls and of a step with a call, in a session of this many entries."""
    await grow(directory / "crow.db", entries)
    calls = [Say(calls=(call("look", f"c{number}", at=number),)) for number in range(STEPS)]
    model = ScriptedModel(Say(text=["warm"]), Say(text=["plain"]), *calls, Say(text=["seen"]))
    tools, settings = {"look": Tool("read", look)}, CompactionPolicy(auto=False)
    async with opened(directory, model, tools=tools, mode="auto", session_id=SESSION, compaction=settings) as session:
        await session.session.prompt(text("first"))
        watching = await watched(session.store)
        await session.session.prompt(text("a turn"))
        turn = watching.cost()
        await session.session.prompt(text("a turn with calls"))
        return turn, watching.cost().beyond(turn, STEPS)


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.long
async def test_a_turn_needs_the_same_statements_at_entry_100_and_at_10_000(tmp_path: Path) -> None:
    turn, step = await costs(made(tmp_path / "short"), 100)
    assert turn.statements <= Counter(TURN)
    assert step.statements <= Counter(STEP)
    long_turn, long_step = await costs(made(tmp_path / "long"), 10_000)
    assert (long_turn.statements, long_step.statements) == (turn.statements, step.statements)
    assert max(turn.commits, long_turn.commits) <= TURN_COMMITS
    assert max(step.commits, long_step.commits) <= STEP_COMMITS
    assert long_turn.steps <= turn.steps * 1.2 + 10
    assert long_step.steps <= step.steps * 1.2 + 10


async def test_sessions_that_save_at_the_same_moment_share_flushes(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        names = [f"s{number}" for number in range(64)]
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(store.create_session, new_session(name))
        for name in names:
            await store.take_turn(name, None, leaf=None)
        watching = await watched(store)

        async def save(name: str) -> None:
            await store.save_draft(name, after_leaf=None, turn=1, message_id="m", text="words", thought="")

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(save, name)
        assert watching.cost().commits <= 8
    finally:
        await store.close()
