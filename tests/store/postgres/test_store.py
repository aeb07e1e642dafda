"""What only the PostgreSQL store promises: migrations, take-over, fencing, broken connections, and equal searches."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import asyncpg
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.entries import Assistant, Entry, NewEntry, TurnEnd, User
from crow.domain.errors import ArgumentError, LeafMoved, NoSuchSession, SessionBusy, StoreTooNew, StoreUnavailable
from crow.domain.messages import Image, Text, Usage
from crow.store import Scope, SessionChanges, Store
from crow.store.owner import Owner
from crow.store.paths import with_excerpt
from crow.store.postgres import database, presence
from crow.store.postgres.database import database_name
from crow.store.postgres.migrations import VERSION
from crow.store.postgres.store import PostgresStore
from crow.store.search import hit_of, patterns_of
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, history, ids, new_session, result, said
from tests.support.amounts import examples
from tests.support.postgres import Pooler, Wire, new_database, server_url

PROJECT = Path(__file__).parents[3]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with new_database() as made:
        yield made


async def run(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


# migrations and URLs


@pytest.fixture
async def empty() -> AsyncIterator[str]:
    """A database without crow's schema."""
    async with new_database(is_empty=True) as made:
        yield made


async def test_stores_that_open_a_new_database_at_once_migrate_it_once(empty: str) -> None:
    opened: list[PostgresStore] = []

    async def open_one() -> None:
        opened.append(await PostgresStore.open(empty))

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(open_one)
    connection = await asyncpg.connect(empty)
    versions = [row[0] for row in await connection.fetch("SELECT version FROM crow.migrations ORDER BY 1")]
    await connection.close()
    assert versions == list(range(1, VERSION + 1))
    await opened[0].create_session(new_session())
    assert [(await store.session("s1")).id for store in opened] == ["s1"] * 6
    for store in opened:
        await store.close()


async def test_a_database_of_a_newer_crow_is_refused_by_name(url: str) -> None:
    await run(url, f"INSERT INTO crow.migrations VALUES ({VERSION + 1}, 'later.sql')")
    with pytest.raises(StoreTooNew, match=f"PostgreSQL database crow_.* has version {VERSION + 1} of crow's schema"):
        await PostgresStore.open(url)


async def test_a_user_without_the_right_to_change_the_schema_can_use_it(url: str) -> None:
    role = url.rpartition("/crow_")[2].partition("?")[0][:16]
    await run(
        url,
        f"CREATE ROLE u{role} LOGIN; GRANT USAGE ON SCHEMA crow TO u{role};"
        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA crow TO u{role};"
        f" GRANT USAGE ON ALL SEQUENCES IN SCHEMA crow TO u{role};",
    )
    store = await PostgresStore.open(url.replace("://postgres:@", f"://u{role}@"))
    try:
        await store.create_session(new_session())
        entries = await converse(store, "s1", "hello")
        assert await history(store, "s1") == entries
    finally:
        await store.close()
        await run(url, f"DROP OWNED BY u{role}; DROP ROLE u{role}")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("mysql://root:secret@h/x", 'begins with "mysql:"'),
        ("postgresql://u:secret@h:port/x", "is not valid"),
        ("", 'begins with ":"'),
    ],
)
async def test_a_wrong_url_is_refused_without_its_password(wrong: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as refused:
        await PostgresStore.open(wrong)
    assert "secret" not in str(refused.value)


async def test_a_server_that_cannot_be_reached_is_named_without_the_password() -> None:
    wrong = "postgresql://me:secret@127.0.0.1:1/team"
    with pytest.raises(StoreUnavailable, match=r"PostgreSQL database team on 127\.0\.0\.1:1 cannot be used") as refused:
        await PostgresStore.open(wrong)
    assert "secret" not in str(refused.value)
    assert database_name(wrong) == "PostgreSQL database team on 127.0.0.1:1"


# owners

OVER = "UPDATE crow.owners SET signed_ms = signed_ms - 20000"
"""Makes the leases of all owners end now. Each owner renews its own in a few seconds."""

OWNER = """
import asyncio, sys
from crow.domain.entries import *
from crow.domain.errors import *
from crow.domain.messages import *
from crow.store.postgres.store import PostgresStore

async def main(url):
    store = await PostgresStore.open(url)
    await store.enqueue("s1", (Text(text="hi"),), "u")
    start = await store.take_turn("s1", "u", leaf=None)
    leaf = start.entries[-1].id
    await store.save_draft("s1", after_leaf=leaf, turn=start.turn, message_id="a", text="half an ans", thought="")
    print("running", flush=True)
    sys.stdin.readline()
    try:
        late = [NewEntry(body=Assistant(text="late", message_id="a"))]
        await store.append("s1", leaf=int(sys.argv[2]) or leaf, turn=start.turn, entries=late)
        print("stored", flush=True)
    except (LeafMoved, SessionBusy) as error:
        print(type(error).__name__, flush=True)
    try:
        await store.save_draft("s1", after_leaf=leaf, turn=start.turn, message_id="a", text="more", thought="")
        print("stored", flush=True)
    except (LeafMoved, SessionBusy) as error:
        print(type(error).__name__, flush=True)
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


def owner_process(url: str, leaf: int = 0) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, url, str(leaf)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


async def test_a_killed_owner_is_dead_as_soon_as_its_connection_ends(url: str) -> None:
    store = await PostgresStore.open(url)
    await store.create_session(new_session())
    process = owner_process(url)
    await store.enqueue("s1", (Text(text="next"),), "u2")
    with pytest.raises(SessionBusy, match=f"process {process.pid} on "):
        await store.take_turn("s1", "u2", leaf=None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    while True:
        try:
            start = await store.take_turn("s1", "u2", leaf=None)
            break
        except SessionBusy:
            await anyio.lowlevel.checkpoint()
    kept = [entry.body for entry in start.entries]
    assert kept[0] == Assistant(text="half an ans", message_id="a", finish="interrupted")
    assert [type(body) for body in kept] == [Assistant, TurnEnd, User]
    await store.close()


async def test_an_owner_whose_lease_ran_out_writes_nothing_after_it_was_taken_over(url: str) -> None:
    store = await PostgresStore.open(url)
    await store.create_session(new_session())
    process = owner_process(url)
    process.send_signal(signal.SIGSTOP)
    await run(url, OVER)
    repaired = await store.open_session("s1")
    assert [type(entry.body) for entry in repaired.entries] == [User, Assistant, TurnEnd]
    assert repaired.row.state == "idle"
    process.send_signal(signal.SIGCONT)
    told, _ = process.communicate("go\n")
    assert told.splitlines() == ["LeafMoved", "LeafMoved"]
    assert await store.open_session("s1") == repaired
    await store.close()


async def test_an_owner_that_is_frozen_inside_a_transaction_keeps_nobody_from_taking_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_IDLE_TIMEOUT_S", 0.2)
    frozen, other = await PostgresStore.open(url), await PostgresStore.open(url)
    await frozen.create_session(new_session())
    await run(url, OVER)

    async def freeze_and_wake() -> None:
        async with frozen.database.transaction(is_read=False) as sql:
            await sql.execute("SELECT 1 FROM crow.sessions FOR UPDATE")
            taken.append(await begin(other, "s1", "hi"))
            await sql.execute("UPDATE crow.sessions SET title = 'late'")

    taken: list[Entry] = []
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await freeze_and_wake()
    row = await other.session("s1")
    assert (row.leaf, row.title) == (taken[0].id, None)
    await frozen.close()
    await other.close()


async def test_an_empty_session_of_a_dead_store_can_be_used_by_others_for_a_week(url: str) -> None:
    first, second = await PostgresStore.open(url), await PostgresStore.open(url)
    for name in ("s1", "s2"):
        await first.create_session(new_session(name))
    await run(url, OVER)
    await first.close()
    await run(url, "UPDATE crow.openings SET opened_ms = opened_ms - 8 * 86400000 WHERE session = 's2'")
    await second.tidy()
    assert (await second.open_session("s1")).row.id == "s1"
    with pytest.raises(NoSuchSession):
        await second.open_session("s2")
    await second.close()


FIRST_WAITS = """
CREATE OR REPLACE FUNCTION crow.is_alive(store text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_lock(43) THEN PERFORM pg_advisory_xact_lock_shared(42); END IF;
    RETURN true;
END
$$
"""


async def test_a_turn_that_begins_while_its_session_is_opened_keeps_its_claim(url: str) -> None:
    store, other = await PostgresStore.open(url), await PostgresStore.open(url)
    await store.create_session(new_session())
    await other.enqueue("s1", (), "u1")  # the owner of this prompt is looked at
    await run(url, FIRST_WAITS)
    gate = await asyncpg.connect(url)
    await gate.execute("SELECT pg_advisory_lock(42)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.open_session, "s1")
        while not await gate.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
            await anyio.lowlevel.checkpoint()
        user = await begin(store, "s1", "hi")
        await gate.execute("SELECT pg_advisory_unlock(42)")
    await gate.close()
    await store.save_draft("s1", after_leaf=user.id, turn=1, message_id="m", text="so far", thought="")
    assert (await store.open_session("s1")).row.leaf == user.id
    await other.close()
    await store.close()


async def test_a_late_answer_about_the_end_of_a_turn_does_not_end_the_next_turn(url: str) -> None:
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        user = await begin(store, "s1", "hi")
        gate = await asyncpg.connect(url)
        locked = gate.transaction()
        await locked.start()
        await gate.execute("SELECT 1 FROM crow.sessions FOR UPDATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(add, store, "s1", TurnEnd(stop="end_turn"), turn=user.turn, release=True))
            while not await gate.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await anyio.lowlevel.checkpoint()
            wire.hold()
            await locked.commit()
            while await gate.fetchval("SELECT state FROM crow.sessions") == "running":
                await anyio.lowlevel.checkpoint()
            following = await begin(store, "s1", "next")
            wire.release()
        await draft(store, following, "so far")
        assert (await store.open_session("s1")).row.leaf == following.id
        await gate.close()
        await store.close()


async def test_an_old_owner_is_refused_even_if_it_knows_the_newest_leaf(url: str) -> None:
    first, second = await PostgresStore.open(url), await PostgresStore.open(url)
    await first.create_session(new_session())
    user = await begin(first, "s1", "hi")
    await run(url, OVER)
    tail = await second.open_session("s1")
    late = [NewEntry(body=said("late"))]
    for changes in (None, SessionChanges(mode="auto")):
        with pytest.raises(LeafMoved, match="took over session s1"):
            await first.append("s1", leaf=tail.row.leaf, turn=user.turn, entries=late, changes=changes)
    with pytest.raises(LeafMoved, match="took over session s1"):
        await draft(first, user, "late")
    await first.renew_lease("s1")
    assert await second.open_session("s1") == tail
    assert await first.open_session("s1") == tail
    (note,) = await add(first, "s1", said("after it was opened again"))
    assert (await second.tail("s1")).row.leaf == note.id
    await converse(first, "s1", "a new claim may write again")
    await first.close()
    await second.close()


async def draft(store: Store, user: Entry, text: str) -> None:
    await store.save_draft(user.session, after_leaf=user.id, turn=user.turn, message_id="a", text=text, thought="")


async def test_what_an_owner_sent_before_it_was_taken_over_is_not_written_when_it_arrives(url: str) -> None:
    async with Wire.open(url) as wire:
        first, second = await PostgresStore.open(wire.url), await PostgresStore.open(url)
        await first.create_session(new_session())
        user = await begin(first, "s1", "hi")
        await draft(first, user, "so far")
        refused: list[str] = []

        async def late(work: Awaitable[object]) -> None:
            with pytest.raises((LeafMoved, SessionBusy, StoreUnavailable)) as error:
                await work
            refused.append(error.type.__name__)

        entries = [NewEntry(body=said("late"))]
        async with anyio.create_task_group() as tasks:
            wire.hold(new=True)
            tasks.start_soon(late, first.append("s1", leaf=user.id, turn=user.turn, entries=entries))
            tasks.start_soon(late, draft(first, user, " and more"))
            tasks.start_soon(late, first.move_leaf("s1", leaf=user.id, to=None, reason="undo"))
            await run(url, OVER)
            taken = await begin(second, "s1", "next")
            wire.release()
        assert len(refused) == 3
        path = await history(second, "s1")
        assert [type(entry.body) for entry in path] == [User, Assistant, TurnEnd, User]
        assert path[1].body == Assistant(text="so far", message_id="a", finish="interrupted")
        assert path[-1] == taken
        await add(second, "s1", said("done"), turn=taken.turn, release=True)
        await first.close()
        await second.close()


@pytest.mark.long
async def test_a_store_whose_connections_hang_takes_its_lock_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SIGN_S", 0.05)
    monkeypatch.setattr(presence, "_ANSWER_TIMEOUT_S", 0.5)
    async with Wire.open(url) as wire:
        first, second = await PostgresStore.open(wire.url), await PostgresStore.open(url)
        await first.create_session(new_session())
        user = await begin(first, "s1", "hi")
        admin = await asyncpg.connect(url)
        lock = int.from_bytes(bytes.fromhex(Owner.parse(first.owner).token), "big")  # type: ignore[union-attr]
        holder = (
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'"
            f" AND classid = {lock >> 32} AND objid = {lock % 2**32}"
        )
        before = await admin.fetchval(holder)
        wire.hold()
        with anyio.fail_after(60):
            while await admin.fetchval(holder) in (before, None):
                await anyio.lowlevel.checkpoint()
        with pytest.raises(SessionBusy):
            await begin(second, "s1", "next")
        (answer,) = await first.append("s1", leaf=user.id, turn=user.turn, entries=[NewEntry(body=said("on"))])
        assert (await second.session("s1")).leaf == answer.id
        await admin.close()
        await first.close()
        await second.close()


async def test_a_cancellation_names_the_turn_that_it_ends(url: str) -> None:
    runner, other = await PostgresStore.open(url), await PostgresStore.open(url)
    await runner.create_session(new_session())
    user = await begin(runner, "s1", "one")
    assert not await runner.cancel_turn("s1")  # its own turn
    assert await other.cancel_turn("s1")
    async with aclosing(runner.watch("s1")) as news:
        assert (await anext(news)).cancelled_turn == user.turn
    await add(runner, "s1", TurnEnd(stop="cancelled"), turn=user.turn, release=True)
    assert not await other.cancel_turn("s1")
    await begin(runner, "s1", "two")
    async with aclosing(runner.watch("s1")) as news:
        assert (await anext(news)).cancelled_turn is None
    for store in (runner, other):
        await store.close()


async def test_watchers_go_on_after_their_connections_ended_and_see_what_nobody_announced(url: str) -> None:
    writer, watcher = await PostgresStore.open(url), await PostgresStore.open(url)
    await writer.create_session(new_session())
    async with aclosing(watcher.watch("s1")) as news:
        await anext(news)
        await run(
            server_url(), f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name_in(url)}'"
        )
        entries = await converse(writer, "s1", "hello")
        found: list[Entry] = []
        with anyio.fail_after(60):
            while tuple(found) != entries:
                found += (await anext(news)).entries
            await run(url, "UPDATE crow.sessions SET title = 'silent', updated_ms = updated_ms + 1")
            while (await anext(news)).row.title != "silent":
                pass
    await writer.close()
    await watcher.close()


async def test_a_store_goes_on_after_the_server_ended_its_connections(url: str) -> None:
    store, other = await PostgresStore.open(url), await PostgresStore.open(url)
    await store.create_session(new_session())
    before = await converse(store, "s1", "before")
    await run(server_url(), f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name_in(url)}'")
    after = await converse(store, "s1", "after")
    assert await history(store, "s1") == (*before, *after)
    await begin(store, "s1", "running")
    with pytest.raises(SessionBusy):
        await begin(other, "s1", "too")
    await store.close()
    await other.close()


async def test_a_turn_waits_for_a_server_that_restarts(url: str) -> None:
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        user = await begin(store, "s1", "hi")
        done: list[Entry] = []

        async def answer() -> None:
            new = [NewEntry(body=said("after the restart"))]
            done.extend(await store.append("s1", leaf=user.id, turn=user.turn, entries=new))

        wire.refuses = True
        wire.cut()
        await wire.refused.wait()
        wire.refused.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer)
            await wire.refused.wait()
            assert done == []
            wire.refuses = False
        assert [entry.body for entry in done] == [said("after the restart")]
        wire.refuses = True
        wire.cut()
        store.hurry()
        await store.close()
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        await PostgresStore.open(wire.url)


async def test_a_write_that_a_hanging_server_holds_up_fails_soon_when_the_process_ends(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "CLOSING_TIMEOUT_S", 0.05)
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        user = await begin(store, "s1", "hi")
        wire.hold(new=True)
        errors: list[str] = []

        async def append() -> None:
            try:
                await store.append("s1", leaf=user.id, turn=user.turn, entries=[NewEntry(body=said("lost"))])
            except StoreUnavailable as error:
                errors.append(str(error))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(append)
                await wire.holds.wait()
                store.hurry()
        assert "It did not answer in time" in errors[0]
        wire.release()
        await store.close()


def name_in(url: str) -> str:
    return url.rpartition("/crow_")[2].partition("?")[0].join(("crow_", ""))


async def test_a_cancelled_read_is_rolled_back_before_its_connection_is_used_again(url: str) -> None:
    store, complaints = await PostgresStore.open(url), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def read(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with store.database.transaction(is_read=True) as sql:
            await sql.execute("SELECT 1")
            task_status.started()
            await sql.execute("SELECT pg_sleep(60)")

    async with anyio.create_task_group() as tasks:
        await tasks.start(read)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    await store.create_session(new_session())
    await store.close()
    assert complaints == []


async def test_a_server_of_the_tests_needs_no_file_that_others_may_move(url: str) -> None:
    if "CROW_TEST_DATABASE_URL" in os.environ:
        pytest.skip("the server is not one of the tests")
    connection = await asyncpg.connect(url)
    data = await connection.fetchval("SHOW data_directory")
    query = "SELECT setting FROM pg_config WHERE name = ANY ($1)"
    places = [place for (place,) in await connection.fetch(query, ["BINDIR", "PKGLIBDIR", "SHAREDIR"])]
    await connection.close()
    assert len(places) == 3
    assert [place for place in places if not Path(place).is_relative_to(data)] == []


async def test_a_read_that_is_cancelled_while_it_begins_is_rolled_back(url: str) -> None:
    complaints = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        wire.hold()
        reading = asyncio.create_task(store.session("s1"))
        with anyio.fail_after(60):
            await wire.holds.wait()  # the statement that begins the transaction
        reading.cancel()
        wire.release()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await store.session("s1")).id == "s1"
        await store.close()
    assert complaints == []


async def test_a_cancelled_write_leaves_no_transaction_open(url: str) -> None:
    store = await PostgresStore.open(url)
    await store.create_session(new_session())
    for step in range(30):
        with anyio.move_on_after(step / 2_000):
            await add(store, "s1", said(f"step {step}"))
    path = await history(store, "s1")
    assert [entry.parent for entry in path] == [None, *ids(path)][: len(path)]
    connection = await asyncpg.connect(url)
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    assert await connection.fetchval(query) == 0
    await connection.close()
    await converse(store, "s1", "and on it goes")
    await store.close()


async def test_an_append_that_the_server_chose_to_end_a_deadlock_is_tried_again(url: str) -> None:
    store = await PostgresStore.open(url)
    for session in (new_session(), new_session("sub", parent_id="s1")):
        await store.create_session(session)
    other = await asyncpg.connect(url)
    await other.execute("SET deadlock_timeout = '1h'")  # so the server ends the store's statement, not this one
    counted = [NewEntry(body=said("from the subagent"), usage=Usage(input_tokens=3))]
    async with anyio.create_task_group() as tasks, other.transaction():
        await other.execute("UPDATE crow.sessions SET title = 'T' WHERE id = 's1'")
        tasks.start_soon(partial(store.append, "sub", leaf=None, turn=0, entries=counted))
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        while await other.fetchval(waiting) == 0:
            await other.execute("SELECT pg_stat_clear_snapshot()")
        await other.execute("UPDATE crow.sessions SET title = 'T' WHERE id = 'sub'")
    assert [entry.body for entry in await history(store, "sub")] == [said("from the subagent")]
    assert ((await store.session("s1")).tokens_in, (await store.session("sub")).tokens_in) == (3, 3)
    await other.close()
    await store.close()


async def test_concurrent_appends_share_commits_and_one_that_fails_fails_alone(url: str) -> None:
    store = await PostgresStore.open(url)
    outcomes: dict[int, object] = {}

    async def call(number: int) -> None:
        try:
            outcomes[number] = await store.database.call("SELECT 1 / $1::int, txid_current()", number)
        except StoreUnavailable as error:
            outcomes[number] = str(error)

    for first in (1, 0):
        outcomes.clear()
        async with anyio.create_task_group() as tasks:
            for number in range(first, 64):
                tasks.start_soon(call, number)
        transactions = {row[1] for row in outcomes.values() if isinstance(row, asyncpg.Record)}
        if first == 1:
            assert len(transactions) <= 4
        else:
            assert [number for number, row in outcomes.items() if isinstance(row, str)] == [0]
            assert "division by zero" in str(outcomes[0])
        assert outcomes.keys() == set(range(first, 64))
    await store.close()


# poolers


@pytest.mark.long
async def test_turns_run_behind_a_pooler_that_gives_each_transaction_another_connection(url: str) -> None:
    async with Pooler.open(url) as pooler:
        first, second = [await PostgresStore.open(pooler.url, lock_url=url) for _ in range(2)]
        names = [f"s{number}" for number in range(8)]
        for name in names:
            await first.create_session(new_session(name))
        told: dict[str, tuple[Entry, ...]] = {}

        async def talk(name: str) -> None:
            told[name] = await converse(first, name, *(f"{name} {turn}" for turn in range(4)))

        async with anyio.create_task_group() as tasks, aclosing(second.watch("s3")) as news:
            for name in names:
                tasks.start_soon(talk, name)
            found: list[Entry] = []
            with anyio.fail_after(60):
                while len(found) < 12:
                    found += (await anext(news)).entries
        assert tuple(found) == told["s3"]
        for name in names:
            assert await history(second, name) == told[name]
        running = await begin(first, "s0", "running")
        await draft(first, running, "half")
        with pytest.raises(SessionBusy):
            await begin(second, "s0", "too")
        await first.close()
        tail = await second.open_session("s0")
        assert tail.row.state == "idle"
        assert Assistant(text="half", message_id="a", finish="interrupted") in [entry.body for entry in tail.entries]
        assert len(await second.search("s3 2")) == 2
        await second.fork_session("s3", "f", entry=None, cwd="/repo", additional_directories=())
        await second.delete_session("s3")
        await second.tidy()
        assert [entry.id for entry in await history(second, "f")] == ids(told["s3"])
        assert pooler.transactions > 100
        await second.close()


async def test_a_pooler_alone_is_refused_with_words_that_help(url: str) -> None:
    async with Pooler.open(url, connections=1) as pooler:
        with pytest.raises(StoreUnavailable, match=r"is a pooler; crow also needs .* database\.direct_url"):
            await PostgresStore.open(pooler.url)


# search

CORPUS = (
    'Straße "quoted" AND (braces) 漢字かな',
    "100% of the under_scores and back\\slashes",
    "ÉCOLE école Ünïcode ПРИВЕТ привет",
    "needle in hay " * 40,
    "emoji \U0001f600 and a tab\there",
    "read crow/store/sqlite/paths.py:104 and fix it",
)

QUERIES = (
    *("straße", "QUOTED", "AND (braces)", "漢字", "字かな", "字 quo", "100%", "under_scores", "back\\slashes", "r_s"),
    *("École", "привет", "ПРИВЕТ", "needle hay", "needle absent", "emoji", "\U0001f600", "paths.py:104", "a", "xyz"),
    *('quoted" OR "absent', "%%%", "___", "*", "\0", "", "tab here", "de"),
)


async def test_both_engines_find_the_same(url: str, sqlite_store: SqliteStore) -> None:
    postgres = await PostgresStore.open(url)
    stores: tuple[Store, ...] = (postgres, sqlite_store)
    for store in stores:
        for number, text in enumerate(CORPUS):
            await store.create_session(new_session(f"s{number}", cwd=f"/{number % 2}", title=text[:40]))
            await converse(store, f"s{number}", text)
    for query in QUERIES:
        for session_id in (None, "s0", "s3"):
            found = []
            for store in stores:
                hits = await store.search(query, session_id=session_id, limit=100)
                found.append(sorted((hit.session, hit.kind, hit.entry, hit.snippet) for hit in hits))
            assert found[0] == found[1], json.dumps([query, session_id])
    await postgres.close()


TEXTS_WITH_NEEDLE = (
    "İ" * 300 + "a NEEDLE in İİİ " + "hay " * 100,
    "nul \0 and \\u0000 and \\\\u0000\0\0 before the needle \0 \\0 after",
    "A" * 79 + "needle" + "b" * 80,
    "A" * 80 + "needle" + "b" * 81,
    '"quotes", \\back\\slashes\\\\, \n new\tlines and needle \U0001f600' * 9,
    "x" * 9_000 + " Needle " + "\\" * 40_000,
)


@pytest.mark.parametrize("is_prompt", [True, False])
async def test_snippets_are_cut_by_the_server_as_they_are_from_the_whole_text(url: str, *, is_prompt: bool) -> None:
    store = await PostgresStore.open(url)
    for number, text in enumerate(TEXTS_WITH_NEEDLE):
        await store.create_session(new_session(f"s{number}"))
        parts = (Text(text=text[:99]), Image(data="aGk=", mime_type="image/png"), Text(text=text[99:]))
        body = User(parts=parts, message_id="m") if is_prompt else Assistant(text=text, message_id="m")
        (stored,) = await add(store, f"s{number}", body)
        whole = f"{text[:99]}\n{text[99:]}" if is_prompt else text
        kind = "user" if is_prompt else "assistant"
        expected = hit_of(
            stored.id, f"s{number}", kind, stored.created_ms, whole.replace("\0", " "), patterns_of(["needle"])
        )
        assert await store.search("needle", session_id=f"s{number}") == (expected,)
        assert "needle" in expected.snippet.lower()
    await store.close()


async def test_a_search_receives_only_the_text_around_the_match(url: str) -> None:
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        text = f"{'hay ' * 250_000}Needle{' hay' * 250_000}"
        await add(store, "s1", User(parts=(Text(text=text),), message_id="m"))
        received = wire.received
        (found,) = await store.search("needle")
        (newest,) = await store.search("", scope=Scope(since_ms=1))
        assert wire.received - received < 20_000
        assert found.snippet == f"…{'hay ' * 20}Needle{' hay' * 20}…"
        assert newest.snippet == f"{('hay ' * 20).strip()}…"
        await store.close()


@pytest.mark.long
async def test_a_scan_receives_long_results_one_after_the_other(url: str) -> None:
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        (answer,) = await add(store, "s1", said("two calls"))
        for number in range(8):
            await add(store, "s1", result(answer.id, f"needle {number} {'hay ' * 1_250_000}", index=number))
        received = wire.received
        scanned = await store.scan("needle", session_id="s1", limit=1)
        assert [hit.snippet[:18] for hit in scanned.hits] == ["read_file needle 7"]
        assert wire.received - received < 6_000_000
        await store.close()


async def test_a_replay_receives_only_the_ends_of_long_results(url: str) -> None:
    async with Wire.open(url) as wire:
        store = await PostgresStore.open(wire.url)
        await store.create_session(new_session())
        for number in range(40):
            (answer,) = await add(store, "s1", said(f"look {number}", calls=1))
            await add(store, "s1", result(answer.id, f"first {number} {'twig ' * 60_000} last {number}"))
        received = wire.received
        batches = [batch async for batch in store.history("s1", result_bytes=lambda _: 500)]
        assert wire.received - received < 40 * 12_000
        whole = [batch async for batch in store.history("s1")]
        await store.close()
    shown = [entry for batch in batches for entry in batch]
    stored = [entry for batch in whole for entry in batch]
    assert shown == [with_excerpt(entry, 500) for entry in stored]


LETTERS = st.sampled_from(
    ["a", "B", "ab", "É", "é", "ß", "字", "漢字", "_", "%", "\\", '"', "*", " ", " ", "\n", "1", "İ", "ſ"]
)
WORDS = st.lists(LETTERS, min_size=1, max_size=12).map("".join)


@asynccontextmanager
async def both_engines(directory: Path) -> AsyncIterator[tuple[Store, ...]]:
    async with new_database() as url:
        postgres, sqlite = await PostgresStore.open(url), await SqliteStore.open(directory / "crow.db")
        try:
            yield postgres, sqlite
        finally:
            await postgres.close()
            await sqlite.close()


@pytest.mark.long
def test_both_engines_find_the_same_in_any_text(tmp_path: Path) -> None:
    names = count()
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(both_engines(tmp_path)) as stores:

        @settings(max_examples=examples(8), database=None, deadline=None)
        @given(texts=st.lists(WORDS, min_size=1, max_size=4), queries=st.lists(WORDS, min_size=4, max_size=8))
        def compare(texts: list[str], queries: list[str]) -> None:
            portal.call(compare_searches, stores, names, texts, queries)

        compare()


async def compare_searches(
    stores: Sequence[Store], names: Iterator[int], texts: Sequence[str], queries: Sequence[str]
) -> None:
    for text in texts:
        number = next(names)
        name = f"s{number}"
        for store in stores:
            await store.create_session(
                replace(new_session(name, cwd=f"/{number % 3}", title=text), model=f"Model-{number % 2}")
            )
            (answer,) = await add(store, name, said(text))
            await add(store, name, result(answer.id, text))
    for query in (*queries, *texts):
        for scope in (Scope(), Scope(cwd="/1"), Scope(model="model-0"), Scope(before_ms=1)):
            found = [await _found(store, query, name, scope) for store in stores]
            assert found[0] == found[1], (query, scope)


async def _found(store: Store, query: str, name: str, scope: Scope) -> object:
    hits = await store.search(query, scope=scope, limit=10_000)
    scanned = await store.scan(query, session_id=name, scope=scope)
    return sorted((hit.session, hit.kind, hit.entry) for hit in (*hits, *scanned.hits))


async def test_a_store_takes_back_a_turn_that_it_claimed_without_hearing_of_it(url: str) -> None:
    store = await PostgresStore.open(url)
    await store.create_session(new_session())
    user = await begin(store, "s1", "hi")
    with pytest.raises(SessionBusy):  # it runs a turn
        await store.take_turn("s1", "p2", leaf=user.id, parts=(Text(text="again"),))
    await add(store, "s1", TurnEnd(stop="end_turn"), turn=user.turn, release=True)
    lost = await store.take_turn("s1", "p2", leaf=(await store.session("s1")).leaf, parts=(Text(text="lost"),))
    store._epochs.clear()  # the connection broke before the server's answer came
    start = await store.take_turn("s1", "p3", leaf=lost.entries[-1].id, parts=(Text(text="again"),))
    assert [type(entry.body) for entry in start.entries] == [TurnEnd, User]
    store._epochs.clear()
    assert (await store.open_session("s1")).row.state == "idle"
    await store.close()
