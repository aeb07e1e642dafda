"""How the PostgreSQL store reads paths: in runs, in batches ahead of the caller, and from a conversation's root."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from crow.domain.entries import Entry, ToolResult
from crow.domain.errors import NoSuchSession
from crow.store import Store
from crow.store.postgres import paths
from crow.store.postgres.paths import load_tail, path_ids, select_excerpts
from crow.store.postgres.store import PostgresStore
from tests.store.scenes import add, begin, converse, history, ids, new_session, result
from tests.support.amounts import some
from tests.support.postgres import new_database


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with new_database() as made:
        yield made


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    opened = await PostgresStore.open(url)
    yield opened
    await opened.close()


@pytest.fixture
async def sql(url: str, store: Store) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"HISTORY_BATCH": 4, "_LONGEST_RUN": 8, "_MOST_LEFT": 2, "FIRST_BATCH": 2, "PATH_BATCH": 5, "_PIECE": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(paths, name, size)


async def wander(store: Store, seed: int) -> list[str]:
    """Write with several sessions in one conversation, which leave branches and go back to them. Their ids."""
    randomness = random.Random(seed)
    sessions, written = ["s0"], list[Entry]()
    await store.create_session(new_session("s0"))
    for step in range(24):
        session = randomness.choice(sessions)
        written += await converse(store, session, *(f"{step}-{turn}" for turn in range(randomness.choice((1, 1, 5)))))
        goal = randomness.choice(written)
        match randomness.randrange(4):
            case 0:
                row = await store.session(session)
                await store.move_leaf(session, leaf=row.leaf, to=goal.id, reason="undo")
            case 1 if len(sessions) < 4:
                sessions.append(f"s{len(sessions)}")
                await store.fork_session(session, sessions[-1], entry=goal.id, cwd="/", additional_directories=())
    return sessions


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("seed", some(range(4), 2))
async def test_runs_and_parents_lead_to_the_same_path(store: PostgresStore, sql: Any, seed: int) -> None:
    sessions = await wander(store, seed)
    parents = dict(await sql.fetch("SELECT id, parent FROM crow.entries"))
    assert len(sessions) > 1
    for session in sessions:
        expected, leaf = list[int](), (await store.session(session)).leaf
        while leaf is not None:
            expected.insert(0, leaf)
            leaf = parents[leaf]
        assert ids(await history(store, session)) == expected
        short = [entry.id async for batch in store.history(session, result_bytes=lambda _: 100) for entry in batch]
        assert short == expected


@pytest.mark.usefixtures("small_batches")
async def test_a_history_whose_entries_are_removed_meanwhile_ends_and_repeats_nothing(
    store: PostgresStore, sql: Any
) -> None:
    await store.create_session(new_session())
    everything = ids(await converse(store, "s1", *map(str, range(10))))
    found = list[int]()
    with anyio.fail_after(60):
        async for batch in store.history("s1"):
            found += ids(batch)
            if len(found) == 2:
                await sql.execute("DELETE FROM crow.entries WHERE id = ANY ($1::bigint[])", everything[9:16])
    assert found == sorted(set(found))
    assert {*everything[:9], *everything[16:]} - set(found) == set()


async def test_results_with_the_same_text_have_the_same_excerpt(store: PostgresStore) -> None:
    await store.create_session(new_session())
    user = await begin(store, "s1", "go")
    texts = ("short", "a" * 60_000, "b" * 90_000, "a" * 60_000)
    await add(store, "s1", *(result(user.id, text, index=index) for index, text in enumerate(texts)), release=True)
    entries = [entry async for batch in store.history("s1", result_bytes=lambda _: 1_000) for entry in batch]
    found = [entry.body.text for entry in entries if isinstance(entry.body, ToolResult)]
    assert [text[0] + text[-1] for text in found] == ["st", "aa", "bb", "aa"]
    assert max(map(len, found)) < 2_000
    assert found[1].replace("call_1_1", "call_1_3") == found[3]


async def test_opening_and_reading_a_session_asks_the_server_for_no_types(url: str) -> None:
    """On each new connection, asyncpg looks up every type that it does not know. That takes as long as a load."""
    store = await PostgresStore.open(url)
    try:
        await store.create_session(new_session())
        user = await begin(store, "s1", "go")
        await add(store, "s1", result(user.id, "a" * 60_000), release=True)
    finally:
        await store.close()
    store, statements = await PostgresStore.open(url), list[str]()
    try:
        async with store.database.transaction(is_read=True) as sql:
            sql.add_query_logger(lambda record: statements.append(record.query))
            backend = await sql.fetchval("SELECT pg_backend_pid()")
            await load_tail(sql, "s1")
            await select_excerpts(sql, await path_ids(sql, user.id + 1), 1_000)
            assert backend == await sql.fetchval("SELECT pg_backend_pid()")
    finally:
        await store.close()
    assert len(statements) > 5
    assert not [statement for statement in statements if "pg_type" in statement]


async def test_the_root_of_a_conversation_is_found_without_reading_its_entries(store: PostgresStore, sql: Any) -> None:
    await store.create_session(new_session())
    first, *_ = await converse(store, "s1", *map(str, range(100)))
    row = await store.fork_session("s1", "s2", entry=None, cwd="/", additional_directories=())
    await converse(store, "s2", "more")
    assert await sql.fetchval(paths._ROOT, row.conversation) == first.id
    await sql.execute("SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off")
    plan = json.loads(await sql.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {paths._ROOT}", row.conversation))
    assert 0 < rows_read(plan[0]["Plan"]) < 10


def rows_read(plan: dict[str, Any]) -> int:
    """How many rows the scans of a plan have read."""
    read = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) if plan.get("Relation Name") else 0
    return int(read * plan["Actual Loops"]) + sum(map(rows_read, plan.get("Plans", ())))


async def test_watching_an_id_that_cannot_exist_keeps_the_connection_with_the_lock(store: PostgresStore) -> None:
    connection = await store.database.presence.locked()
    for _ in range(20):
        with pytest.raises(NoSuchSession):
            await anext(store.watch("a\0b"))
    for _ in range(20):  # the connection may fail only now
        await store.database.presence.locked()
        await store.session_by_alias("x")
    assert await store.database.presence.locked() is connection
