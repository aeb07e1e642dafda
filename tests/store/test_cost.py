"""Operations that cost the same in a small and in a large database, counted in steps of SQLite's virtual machine."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from crow.domain.entries import NewEntry
from crow.store import NewSession, SessionChanges
from crow.store.sqlite.sessions import Removal
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse, new_session, said

Operation = Callable[[SqliteStore, Removal], Awaitable[object]]


def fill(sql: sqlite3.Connection, entries: int) -> None:
    """So many entries on one path, and as many sessions with titles."""
    for number in range(1, entries + 1):
        sql.execute(
            "INSERT INTO sessions (id, conversation, leaf, cwd, title, model, mode, created_ms, updated_ms)"
            " VALUES (?, 1, ?, '/', 'T', 'm', 'ask', 0, 0)",
            (f"s{number}", entries if number == 1 else None),
        )
        sql.execute(
            "INSERT INTO entries (conversation, session, parent, turn, kind, body, created_ms)"
            " VALUES (1, 's1', ?, 1, ?, '{\"text\": \"words\"}', 0)",
            (number - 1 or None, "assistant" if number % 10 else "user"),
        )
    sql.execute("UPDATE sessions SET has_prompt = 1, newest_entry = number")
    sql.execute("UPDATE sessions SET conversation = number WHERE number > 1")
    sql.execute("INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE text <> ''")


OPERATIONS: dict[str, Operation] = {
    "create a session": lambda store, _: store.create_session(
        NewSession(id="new", cwd="/", model="m", mode="ask", title="N")
    ),
    "set a title": lambda store, _: store.update_session("s7", SessionChanges(title="Other")),
    "look up an alias": lambda store, _: store.session_by_alias("cli:default"),
    "list sessions": lambda store, _: store.sessions(limit=5),
    "list sessions of a directory": lambda store, _: store.sessions(cwd="/", limit=5),
    "append a message": lambda store, _: store.append("s7", leaf=None, turn=1, entries=[NewEntry(body=said("a b"))]),
    "append a message with a NUL": lambda store, _: store.append(
        "s7", leaf=None, turn=1, entries=[NewEntry(body=said("a \0 b"))]
    ),
    "read what a move leaves behind": lambda store, _: store.entries_beyond(45, 42, ("user",)),
    "remove entries": lambda store, removal: store.remove_entries(removal, removal.entries),
    "fork a session": lambda store, _: store.fork_session("s1", "f", entry=None, cwd="/", additional_directories=()),
}


async def steps(path: Path, entries: int, operation: Operation) -> int:
    """How many steps the operation takes in a database of that size, in tens."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return 0

    store = await SqliteStore.open(path)
    try:
        await store.database.write(lambda sql: fill(sql, entries))
        await store.create_session(new_session("deleted"))
        await converse(store, "deleted", "gone")
        await store.delete_session("deleted")
        removal = await store.next_removal()
        assert removal is not None
        await store.database.write(lambda sql: sql.set_progress_handler(tick, 10))
        await store.database.read(lambda sql: sql.set_progress_handler(tick, 10))
        count = 0
        await operation(store, removal)
        return count
    finally:
        await store.close()


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_costs_the_same_in_a_database_ten_times_as_large(tmp_path: Path, name: str) -> None:
    small = await steps(tmp_path / "small.db", 300, OPERATIONS[name])
    large = await steps(tmp_path / "large.db", 3_000, OPERATIONS[name])
    assert large <= small * 1.5 + 10
