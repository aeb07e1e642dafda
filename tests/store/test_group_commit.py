"""Writes that share a commit, and the order in which their tasks go on."""

from __future__ import annotations

import asyncio
import sqlite3

import anyio
import anyio.lowlevel
import pytest

from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.connection import FairWakeup
from crow.store.sqlite.store import SqliteStore


def insert(sql: sqlite3.Connection, name: str) -> str:
    sql.execute("INSERT INTO endpoints(base_url, model, learned) SELECT ?, '', count(*) FROM endpoints", (name,))
    return name


async def inserted(store: SqliteStore) -> list[str]:
    query = "SELECT base_url FROM endpoints ORDER BY 0 + learned"
    return [name for (name,) in await store.database.read(lambda sql: sql.execute(query).fetchall())]


async def write_all(store: SqliteStore, names: list[str], *, failing: str = "", ending: str = "") -> dict[str, object]:
    """Write all names at once; each one's result or error. `ending` makes SQLite end the transaction."""
    outcomes: dict[str, object] = {}

    def work(sql: sqlite3.Connection, name: str) -> str:
        insert(sql, name)
        if name == failing:
            raise LookupError(name)
        if name == ending:
            sql.execute("ROLLBACK")
            raise sqlite3.OperationalError("the transaction is over")
        return name

    async def write(name: str) -> None:
        try:
            outcomes[name] = await store.database.write(lambda sql: work(sql, name))
        except Exception as error:  # noqa: BLE001
            outcomes[name] = error

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(write, name)
    return outcomes


async def test_concurrent_writes_share_commits_and_keep_their_order(sqlite_store: SqliteStore) -> None:
    names = [f"n{number:02}" for number in range(64)]
    statements: list[str] = []
    await sqlite_store.database.write(lambda sql: sql.set_trace_callback(statements.append))
    statements.clear()
    assert await write_all(sqlite_store, names) == {name: name for name in names}
    assert await inserted(sqlite_store) == names
    assert 1 <= statements.count("COMMIT") <= 8


async def test_a_write_that_fails_among_others_is_rolled_back_alone(sqlite_store: SqliteStore) -> None:
    outcomes = await write_all(sqlite_store, ["a", "b", "c", "d"], failing="c")
    assert [outcomes[name] for name in "abd"] == ["a", "b", "d"]
    assert isinstance(outcomes["c"], LookupError)
    assert await inserted(sqlite_store) == ["a", "b", "d"]


async def test_when_sqlite_ends_the_transaction_no_caller_gets_a_result(sqlite_store: SqliteStore) -> None:
    outcomes = await write_all(sqlite_store, ["a", "b", "c", "d"], ending="c")
    stored = await inserted(sqlite_store)
    assert "c" not in stored
    assert {name for name, outcome in outcomes.items() if outcome == name} == set(stored)
    assert await write_all(sqlite_store, ["e"]) == {"e": "e"}


async def test_a_closed_store_refuses_to_write(sqlite_store: SqliteStore) -> None:
    await sqlite_store.close()
    with pytest.raises(StoreUnavailable):
        await sqlite_store.database.write(lambda sql: insert(sql, "late"))


class PassCounter:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()

    def _tick(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)


async def test_waiting_tasks_go_on_one_per_pass_of_the_loop_in_order_of_arrival() -> None:
    wakeup, passes, done = FairWakeup(), PassCounter(), list[tuple[int, int]]()

    async def go(number: int) -> None:
        await wakeup.wait()
        done.append((number, passes.count))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(go, number)
    passes.stop()
    assert [number for number, _ in done] == list(range(20))
    assert len({at for _, at in done}) == 20


async def test_a_single_task_does_not_wait_and_a_cancelled_one_blocks_nobody() -> None:
    wakeup, passes = FairWakeup(), PassCounter()
    await wakeup.wait()
    assert passes.count == 0
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wakeup.wait()
    await wakeup.wait()
    while passes.count < 4:
        await anyio.lowlevel.checkpoint()
    count = passes.count
    await wakeup.wait()
    assert passes.count == count
    passes.stop()
