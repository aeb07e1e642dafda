"""Transactions that share a flush."""

from __future__ import annotations

import sqlite3

import anyio
import pytest

from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.store import SqliteStore


def note(sql: sqlite3.Connection, name: str) -> str:
    sql.execute("INSERT INTO endpoints(base_url, model, learned) SELECT ?, '', count(*) FROM endpoints", (name,))
    return name


async def noted(store: SqliteStore) -> list[str]:
    rows = await store.database.read(
        lambda sql: sql.execute("SELECT base_url FROM endpoints ORDER BY 0 + learned").fetchall()
    )
    return [name for (name,) in rows]


async def written(store: SqliteStore, names: list[str], *, failing: str = "", ending: str = "") -> dict[str, object]:
    """What each write gave or raised, all of them asked for while the writer's thread is busy."""
    outcomes: dict[str, object] = {}

    def work(sql: sqlite3.Connection, name: str) -> str:
        result = note(sql, name)
        if name == failing:
            raise LookupError(name)
        if name == ending:
            sql.execute("ROLLBACK")
            raise sqlite3.OperationalError("the transaction is over")
        return result

    async def write(name: str) -> None:
        try:
            outcomes[name] = await store.database.write(lambda sql: work(sql, name))
        except Exception as error:  # noqa: BLE001
            outcomes[name] = error

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(write, name)
    return outcomes


async def commits(store: SqliteStore) -> list[str]:
    """Every COMMIT from now on."""
    seen: list[str] = []

    def watch(sql: sqlite3.Connection) -> None:
        sql.set_trace_callback(lambda statement: seen.append(statement) if statement == "COMMIT" else None)

    await store.database.write(watch)
    return seen


async def test_writes_that_wait_together_share_a_commit_and_keep_their_order(sqlite_store: SqliteStore) -> None:
    names = [f"n{number:02}" for number in range(64)]
    seen = await commits(sqlite_store)
    assert await written(sqlite_store, names) == {name: name for name in names}
    assert await noted(sqlite_store) == names
    assert 1 <= len(seen) <= 8


async def test_a_write_that_fails_among_others_is_rolled_back_alone(sqlite_store: SqliteStore) -> None:
    outcomes = await written(sqlite_store, ["a", "b", "c", "d"], failing="c")
    assert [outcomes[name] for name in "abd"] == ["a", "b", "d"]
    assert isinstance(outcomes["c"], LookupError)
    assert await noted(sqlite_store) == ["a", "b", "d"]


async def test_when_sqlite_ends_the_transaction_nobody_is_told_that_it_was_written(sqlite_store: SqliteStore) -> None:
    outcomes = await written(sqlite_store, ["a", "b", "c", "d"], ending="c")
    there = await noted(sqlite_store)
    assert "c" not in there
    assert {name for name, outcome in outcomes.items() if outcome == name} == set(there)
    assert await written(sqlite_store, ["e"]) == {"e": "e"}


async def test_a_store_that_is_closed_refuses_and_writes_nothing(sqlite_store: SqliteStore) -> None:
    await sqlite_store.close()
    with pytest.raises(StoreUnavailable):
        await sqlite_store.database.write(lambda sql: note(sql, "late"))
