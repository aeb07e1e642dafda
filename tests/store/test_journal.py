"""The WAL: when it is emptied, and what happens where there can be none."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, converse, history, new_session, result, said
from tests.support.disks import without_shared_memory

READS: dict[str, Callable[[SqliteStore], Awaitable[Any]]] = {
    "session": lambda store: store.session("s1"),
    "sessions": lambda store: store.sessions(limit=1),
    "tail": lambda store: store.tail("s1"),
    "open_session": lambda store: store.open_session("s1"),
    "entry": lambda store: store.entry(1),
    "queued": lambda store: store.queued("s1"),
    "search": lambda store: store.search("hel"),
    "search in a session": lambda store: store.search("hel", session_id="s1", limit=1),
    "learned": lambda store: store.learned("http://127.0.0.1", "m"),
    "history": lambda store: history(store, "s1"),
    "one batch of a history": lambda store: anext(store.history("s1")),
}


def emptied(path: Path) -> bool:
    """Whether the WAL could be emptied: nobody reads an older state."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
        other.execute("INSERT OR REPLACE INTO endpoints VALUES ('http://elsewhere', 'm', '{}')")
        busy, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return bool(busy == 0)


@pytest.mark.long
@pytest.mark.parametrize("name", READS)
async def test_no_read_transaction_outlives_its_call(sqlite_store: SqliteStore, name: str) -> None:
    await sqlite_store.create_session(new_session())
    await converse(sqlite_store, "s1", *("hello" for _ in range(3)))
    await add(sqlite_store, "s1", result(1, "x" * 5_000_000), said("more"))
    await READS[name](sqlite_store)
    assert emptied(sqlite_store.database.path)


async def test_a_read_that_fails_leaves_no_transaction_either(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    with pytest.raises(sqlite3.OperationalError, match="no such column"):
        await sqlite_store.database.read(lambda sql: sql.execute("SELECT missing FROM sessions"))
    assert emptied(sqlite_store.database.path)


async def test_without_a_wal_the_store_works_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "crow.db"
    without_shared_memory(monkeypatch)
    store = await SqliteStore.open(path)
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one", "two")
    await store.tidy()
    assert await history(store, "s1") == entries
    assert store.database.journal_mode == "delete"
    await store.close()
    assert store.warning.startswith(f"SQLite cannot use a write-ahead log at {path} (a network disk?).")
    assert f"{store.warning} Using journal mode delete." in caplog.text
    assert "crow.db-wal" not in os.listdir(tmp_path)
    monkeypatch.undo()
    again = await SqliteStore.open(path)
    assert (again.database.journal_mode, again.warning, await history(again, "s1")) == ("wal", "", entries)
    await again.close()


async def test_a_database_with_a_wal_is_read_only_where_no_wal_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    await store.create_session(new_session())
    entries = await converse(store, "s1", "one")
    await store.close()
    before = path.read_bytes()
    without_shared_memory(monkeypatch)
    store = await SqliteStore.open(path)
    assert await history(store, "s1") == entries
    with pytest.raises(StoreUnavailable, match=r"crow\.db cannot be opened .*CROW_HOME.* nothing can be stored"):
        await store.create_session(new_session("s2"))
    await store.close()
    assert path.read_bytes() == before
