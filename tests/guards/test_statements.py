"""The cost of a turn in statements and flushes does not grow with the session."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import anyio

from crow.agent.compaction.budget import CompactionPolicy
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import Tool, opened, text
from tests.guards.long import SESSION, grow
from tests.store.scenes import new_session
from tests.support.scripted_model import Say, ScriptedModel, call

TURN = {"select": 4, "insert": 6, "update": 4, "delete": 3}
"""Statements of a turn that calls nothing, by verb."""

TURN_COMMITS = 4
"""The turn is taken with its prompt; the first piece is saved; the answer is stored; the end is stored. What is saved
while something is stored may share its flush."""

STEP = {"select": 2, "insert": 4, "update": 3, "delete": 1}
"""What each step with one call that only reads adds."""

STEP_COMMITS = 2
"""The answer with its call is stored; that the call started, with its result."""

STEPS = 5


@dataclass(frozen=True)
class Cost:
    """Statements by verb, flushes, and steps of SQLite's machine in tens."""

    statements: Counter[str]
    commits: int
    steps: int

    def beyond(self, other: Cost, times: int) -> Cost:
        """What each of so many things costs that are here and not in `other`."""
        more = self.statements - other.statements
        each = Counter({verb: count // times for verb, count in more.items()})
        return Cost(each, (self.commits - other.commits) // times, (self.steps - other.steps) // times)


class Watched:
    """What a store's connections do from here on."""

    def __init__(self) -> None:
        self._statements: list[str] = []
        self._steps = 0

    def watch(self, connection: sqlite3.Connection) -> None:
        """Watch this one too."""
        connection.set_trace_callback(self._statements.append)
        connection.set_progress_handler(self._tick, 10)

    def cost(self) -> Cost:
        """Since the last time. What begins and ends transactions is no statement here, only a COMMIT is a flush."""
        verbs = Counter(statement.split()[0].lower() for statement in self._statements)
        cost = Cost(Counter({verb: verbs[verb] for verb in TURN}), verbs["commit"], self._steps)
        self._statements.clear()
        self._steps = 0
        return cost

    def _tick(self) -> int:
        self._steps += 1
        return 0


async def watched(store: SqliteStore) -> Watched:
    """Whatever the store does from here on."""
    watching, database = Watched(), store.database
    for connection in (database._writer, await database._open_reader()):
        await connection.run(watching.watch)
    return watching


async def look(**_: object) -> str:
    return "seen"


async def costs(directory: Path, entries: int) -> tuple[Cost, Cost]:
    """Of a turn that calls nothing, and of a step with a call, in a session of so many entries."""
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
        watching = await watched(store)

        async def save(name: str) -> None:
            await store.save_draft(name, after_leaf=None, turn=1, message_id="m", text="words", thought="")

        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(save, name)
        assert watching.cost().commits <= 8
    finally:
        await store.close()
