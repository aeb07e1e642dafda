"""What does not depend on how much there is: counted in steps of SQLite's machine, not in time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

import pytest

from crow.store import NewSession
from crow.store.sqlite import maintenance as removal
from crow.store.sqlite import sessions
from crow.store.sqlite.migrations import migrate
from crow.store.sqlite.paths import left_behind

WriteJob = Callable[[sqlite3.Connection], object]


def full(entries: int) -> sqlite3.Connection:
    """A database with so many entries on one path, and as many sessions with titles."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    for number in range(1, entries + 1):
        connection.execute(
            "INSERT INTO sessions (id, conversation, leaf, cwd, title, model, mode, created_ms, updated_ms)"
            " VALUES (?, 1, ?, '/', 'T', 'm', 'ask', 0, 0)",
            (f"s{number}", entries),
        )
        connection.execute(
            "INSERT INTO entries (conversation, session, parent, turn, kind, body, created_ms)"
            " VALUES (1, 's1', ?, 1, ?, '{\"text\": \"words\"}', 0)",
            (number - 1 or None, "assistant" if number % 10 else "user"),
        )
    connection.execute("UPDATE sessions SET conversation = number WHERE number > 1")
    connection.execute("INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE text <> ''")
    return connection


@pytest.fixture(scope="module")
def sizes() -> Iterator[tuple[sqlite3.Connection, sqlite3.Connection]]:
    """A small database and one that is ten times as large."""
    small, large = full(300), full(3_000)
    yield small, large
    small.close()
    large.close()


def steps(connection: sqlite3.Connection, work: WriteJob) -> int:
    """How many steps of the machine `work` takes, in tens."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return 0

    connection.set_progress_handler(tick, 10)
    try:
        work(connection)
    finally:
        connection.set_progress_handler(None, 0)
    return count


def fork(connection: sqlite3.Connection) -> object:
    return sessions.fork_session(connection, "s1", "fork", entry=None, cwd="/", additional_directories=(), now_ms=0)


def index_words(connection: sqlite3.Connection) -> object:
    return connection.execute("SELECT id, text FROM searchable WHERE id = ? AND text <> ''", (40,)).fetchall()


def forget_entries(connection: sqlite3.Connection) -> object:
    found = removal.Removal(conversation=2, living=removal._living(connection, 2), entries=())
    return removal.remove_entries(connection, found, [3, 2])


WORKS: dict[str, WriteJob] = {
    "a session made": lambda sql: sessions.create_session(
        sql, NewSession(id="new", cwd="/", model="m", mode="ask", title="N"), now_ms=0
    ),
    "a title set": lambda sql: sessions.set_title(sql, "s7", "Other"),
    "an alias looked up": lambda sql: sessions.named(sql, "cli:default"),
    "an entry's words indexed": index_words,
    "what a move leaves": lambda sql: left_behind(sql, 45, 42, ("user",)),
    "entries removed": forget_entries,
    "a fork": fork,
}


@pytest.mark.parametrize("name", WORKS)
def test_the_work_is_the_same_in_a_small_and_in_a_large_database(
    sizes: tuple[sqlite3.Connection, sqlite3.Connection], name: str
) -> None:
    small, large = sizes
    assert steps(large, WORKS[name]) <= steps(small, WORKS[name]) * 1.5 + 10
