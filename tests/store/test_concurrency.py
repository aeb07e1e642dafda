"""Cancelled tasks, concurrent stores and processes, killed processes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from crow.domain.entries import Assistant, Entry, NewEntry, TurnEnd, User
from crow.domain.errors import LeafMoved, StoreUnavailable
from crow.store import SessionChanges, Store
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from tests.store.conftest import AnyStores
from tests.store.scenes import add, begin, bodies, converse, history, ids, new_session, said
from tests.support import fork_server
from tests.support.amounts import some
from tests.support.postgres import new_database

ROUNDS = 6
STEP = [NewEntry(body=said("step", calls=1)), NewEntry(body=TurnEnd(stop="end_turn"))]


async def settle(store: Store) -> None:
    """Wait until every write that was begun has ended: writes run one after another."""
    await store.update_session("s1", SessionChanges())


# cancellation


async def test_an_append_cancelled_natively_is_complete_or_absent(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    outcomes = set()
    for moment in range(25):
        leaf = (await store.session("s1")).leaf
        task = asyncio.ensure_future(store.append("s1", leaf=leaf, turn=1, entries=STEP))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        await settle(store)
        written = ids(await history(store, "s1"))
        new = [entry for entry in written if entry > (leaf or 0)]
        assert len(new) in (0, 2)
        assert (await store.session("s1")).leaf == (new[-1] if new else leaf)
        if not isinstance(outcome, BaseException):
            assert ids(outcome) == new
        outcomes.add((type(outcome).__name__, len(new)))
    assert ("CancelledError", 0) in outcomes
    assert ("CancelledError", 2) in outcomes


async def test_an_append_cancelled_by_its_scope_returns_what_it_wrote(stores: AnyStores) -> None:
    store = await stores.open()
    await store.create_session(new_session())
    outcomes = set()
    for moment in range(25):
        leaf = (await store.session("s1")).leaf
        stored: tuple[Entry, ...] = ()

        async def work(scope: anyio.CancelScope, leaf: int | None = leaf) -> None:
            nonlocal stored
            with scope:
                stored = await store.append("s1", leaf=leaf, turn=1, entries=STEP)

        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(work, scope)
            for _ in range(moment):
                await asyncio.sleep(0)
            scope.cancel()
        new = [entry for entry in ids(await history(store, "s1")) if entry > (leaf or 0)]
        assert ids(stored) == new
        outcomes.add(len(new))
    assert outcomes == {0, 2}


@pytest.mark.parametrize("native", [False, True])
async def test_cancelling_a_queued_write_blocks_nothing(sqlite_store: SqliteStore, native: bool) -> None:
    await sqlite_store.create_session(new_session())
    gate = threading.Event()
    returned: list[int] = []

    async def append() -> None:
        returned.extend(ids(await sqlite_store.append("s1", leaf=None, turn=1, entries=STEP)))

    with anyio.fail_after(60):
        held = asyncio.ensure_future(sqlite_store.database.call(lambda: gate.wait(60)))
        if native:
            task = asyncio.ensure_future(append())
            await anyio.wait_all_tasks_blocked()
            task.cancel()
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(append)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
                gate.set()
        await held
        await settle(sqlite_store)
        written = ids(await history(sqlite_store, "s1"))
    assert len(written) == 2
    assert returned == ([] if native else written)


async def test_a_cancelled_read_leaves_no_snapshot_open(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    await converse(sqlite_store, "s1", "hi")
    for moment in range(15):
        task = asyncio.ensure_future(sqlite_store.tail("s1"))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await sqlite_store.session("s1")
    await sqlite_store.tidy()
    wal = Path(f"{sqlite_store.database.path}-wal")
    assert wal.stat().st_size == 0  # noqa: ASYNC240


# several stores


async def test_interleaved_appends_of_two_stores_lose_nothing(stores: AnyStores) -> None:
    # On a busy machine either store may lose the race for the lock many times in a row.
    first, second = await stores.open(busy_timeout_s=300), await stores.open(busy_timeout_s=300)
    await first.create_session(new_session())
    stored: list[int] = []
    refused = 0

    async def write(store: Store, name: str) -> None:
        nonlocal refused
        leaf, done = None, 0
        while done < ROUNDS:
            try:
                entries = await store.append(
                    "s1", leaf=leaf, turn=0, entries=[NewEntry(body=said(f"{name}{done}")), NewEntry(body=said("and"))]
                )
            except LeafMoved:
                refused += 1
                leaf = (await store.session("s1")).leaf
            else:
                stored.extend(ids(entries))
                leaf, done = entries[-1].id, done + 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, first, "x")
        tasks.start_soon(write, second, "y")
    path = await history(first, "s1")
    assert ids(path) == sorted(stored)
    assert [entry.parent for entry in path] == [None, *ids(path)[:-1]]
    for name in "xy":
        texts = [body.text for body in await bodies(second, "s1") if isinstance(body, Assistant)]
        said_by = [text for text in texts if text.startswith(name)]
        assert said_by == [f"{name}{index}" for index in range(ROUNDS)]
    assert refused > 0
    assert (await second.session("s1")).entries == 4 * ROUNDS


async def test_one_of_two_concurrent_claims_wins(stores: AnyStores) -> None:
    first, second = await stores.open(), await stores.open()
    await first.create_session(new_session())
    winners: list[Store] = []
    losers: list[str] = []

    async def claim(store: Store) -> None:
        try:
            await begin(store, "s1", "hi")
        except Exception as error:  # noqa: BLE001  the names of what is raised are compared below
            losers.append(type(error).__name__)
        else:
            winners.append(store)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claim, first)
        tasks.start_soon(claim, second)
    assert (len(winners), losers) == (1, ["SessionBusy"])
    assert len(await history(first, "s1")) == 1


@pytest.mark.parametrize("has_bug", [False, True])
async def test_writers_wait_for_the_file_lock_where_sqlite_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bug: bool
) -> None:
    monkeypatch.setattr("crow.store.sqlite.file._HAS_WAL_RESET_BUG", has_bug)
    store = await SqliteStore.open(tmp_path / "crow.db", busy_timeout_s=0.05)
    with (tmp_path / "crow.db.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if has_bug:
            with pytest.raises(StoreUnavailable, match="is locked by another program"):
                await store.create_session(new_session())
        else:
            await store.create_session(new_session())
    await store.create_session(new_session("s2"))
    await add(store, "s2", said("x"))
    await store.close()


# several processes

CHILD = """
import asyncio, json, sys
from pathlib import Path
from crow.domain.entries import *
from crow.domain.errors import *
from crow.domain.messages import *
from crow.store import *
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore

async def open_store(target):
    return await (PostgresStore.open(target) if "://" in target else SqliteStore.open(Path(target)))

def tell(**what):
    print(json.dumps(what), flush=True)

def said(text):
    return NewEntry(body=Assistant(text=text, message_id="m" + text))
"""

RACE = f"""{CHILD}
async def main(path, name):
    store = await SqliteStore.open(Path(path), busy_timeout_s=300)
    try:
        await store.create_session(NewSession(id="shared", cwd="/", model="m", mode="ask"))
    except ArgumentError:
        pass
    await store.create_session(NewSession(id=name, cwd="/", model="m", mode="ask"))
    leaf, done, own = None, 0, None
    while done < {ROUNDS}:
        try:
            stored = await store.append("shared", leaf=leaf, turn=0, entries=[said(name + str(done))])
            leaf, done = stored[-1].id, done + 1
            own = (await store.append(name, leaf=own, turn=0, entries=[said("own")]))[-1].id
        except LeafMoved:
            leaf = (await store.tail("shared")).row.leaf
        if done % 3 == 0:
            path = [entry async for batch in store.history("shared") for entry in batch]
            assert [entry.parent for entry in path] == [None, *(entry.id for entry in path[:-1])]
            await store.sessions()
            await store.search(name + "0")
    await store.close()
    tell(done=done)

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main(*sys.argv[1:]))
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*fork_server.command(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def check(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
    return connection


def test_four_processes_open_a_new_file_at_once_and_write_to_one_session(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    children = [child(RACE, str(path), f"p{index}") for index in range(4)]
    for one in children:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in children:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    told = [json.loads(one.communicate(timeout=300)[0]) for one in children]
    assert [one.returncode for one in children] == [0] * 4
    assert told == [{"done": ROUNDS}] * 4
    with closing(check(path)) as connection:
        rows = connection.execute(
            "SELECT id, parent, content FROM messages WHERE session = 'shared' ORDER BY id"
        ).fetchall()
        assert [row[1] for row in rows] == [None, *(row[0] for row in rows[:-1])]
        assert sorted(row[2] for row in rows) == sorted(
            f"p{process}{index}" for process in range(4) for index in range(ROUNDS)
        )
        assert connection.execute("SELECT count(*) FROM messages WHERE content = 'own'").fetchone() == (4 * ROUNDS,)


KILLED = f"""{CHILD}
async def main(path):
    store = await open_store(path)
    tail = await store.open_session("s1")
    leaf = tail.row.leaf
    tell(ready=True)
    number = 0
    while True:
        number += 1
        await store.enqueue("s1", (Text(text=f"prompt {{number}}"),), "u")
        start = await store.take_turn("s1", "u", leaf=leaf)
        leaf = start.entries[-1].id
        tell(stored=leaf)
        for piece in range(3):
            text = f"piece {{piece}} "
            await store.save_draft("s1", after_leaf=leaf, turn=start.turn, message_id="a", text=text, thought="")
            tell(draft=text, after=leaf)
        answer = [said("answer " * 50), NewEntry(body=Skill(name="s", text="x" * 40_000))]
        for entries, release in ((answer, False), ([NewEntry(body=TurnEnd(stop="end_turn"))], True)):
            stored = await store.append("s1", leaf=leaf, turn=start.turn, entries=entries, release=release)
            leaf = stored[-1].id
            for entry in stored:
                tell(stored=entry.id)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("lines", some([2, 5, 6, 33, 80], 2))
async def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "crow.db"
    await killed_after(lines, str(path), lambda: SqliteStore.open(path))
    check(path).close()


@pytest.mark.long
@pytest.mark.parametrize("lines", some([2, 5, 6, 33, 80], 2))
async def test_a_killed_process_loses_nothing_that_postgres_acknowledged(lines: int) -> None:
    async with new_database() as url:
        await killed_after(lines, url, lambda: PostgresStore.open(url))


async def killed_after(lines: int, target: str, open_store: Callable[[], Awaitable[Store]]) -> None:
    """Kill a process after it has reported some writes, then check that another one finds them all."""
    store = await open_store()
    await store.create_session(new_session())
    await store.close()
    process = child(KILLED, target)
    assert process.stdout is not None
    told = [json.loads(process.stdout.readline()) for _ in range(lines)]
    with process:
        process.send_signal(signal.SIGKILL)
        told += [json.loads(line) for line in process.stdout if line.endswith("}\n")]

    store = await open_store()
    tail = await store.open_session("s1")
    while tail.row.state == "running":  # a server may need a moment to notice that the connection ended
        tail = await store.open_session("s1")
    path_ids = ids(await history(store, "s1"))
    assert {one["stored"] for one in told if "stored" in one} <= set(path_ids)
    last = told[-1]
    if "draft" in last:
        after = await store.entry(path_ids[path_ids.index(last["after"]) + 1])
        assert after is not None
        assert isinstance(after.body, Assistant)
        assert last["draft"] in after.body.text or after.body.text.startswith("answer")
    ended = [body for body in await bodies(store, "s1") if isinstance(body, User | TurnEnd)]
    assert [type(body) for body in ended] == [User, TurnEnd] * (len(ended) // 2)
    assert await store.open_session("s1") == tail
    await converse(store, "s1", "and on it goes")
    await store.close()
