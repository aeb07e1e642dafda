"""Administration of stored sessions: find, sum up, remove by age, back up."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.month import live
from crow.domain.entries import NewEntry
from crow.domain.errors import ArgumentError, NoSuchSession, SessionBusy, StoreUnavailable
from crow.domain.messages import Usage
from crow.store import Scope, SessionChanges, UsageTotal
from crow.store.admin import UnusedSession
from crow.store.owner import Owner
from crow.store.sqlite import file
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, make_older, new_session, result, row_ids, said
from tests.support.fork_server import command

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


@pytest.fixture
def upkeep(sqlite_store: SqliteStore) -> SessionAdmin:
    return SessionAdmin(sqlite_store)


def age(path: Path, session: str, days: int) -> None:
    """Make a session and its entries older: only a test may."""
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        for table, key in (("entries", "session"), ("sessions", "id")):
            connection.execute(
                f"UPDATE {table} SET created_ms = created_ms - ? WHERE {key} = ?", (days * DAY_MS, session)
            )
        connection.execute("UPDATE entries SET checksum = NULL")
        connection.execute(
            "CREATE TRIGGER entries_never_change BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        connection.commit()


def now_ms() -> int:
    return round(datetime.now(UTC).timestamp() * 1000)


# empty sessions


def make_openings_older(path: Path, ms: int) -> None:
    with closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        connection.execute("UPDATE openings SET opened_ms = opened_ms - ?", (ms,))


async def test_an_empty_session_waits_an_hour_for_a_client_that_prompts_from_another_process(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    first, last = [await SqliteStore.open(path) for _ in range(2)]
    await first.create_session(new_session())
    await first.close()
    make_openings_older(path, 3_000_000)
    await last.tidy()
    assert (await last.session("s1")).id == "s1"
    make_openings_older(path, 600_000)
    await last.tidy()
    with pytest.raises(NoSuchSession):
        await last.session("s1")
    await last.close()


async def test_an_empty_session_is_removed_once_no_store_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    first, second, last = [await SqliteStore.open(path) for _ in range(3)]
    for store, name in ((first, "s1"), (second, "s2")):
        await store.create_session(new_session(name))
    await first.fork_session("s1", "f1", entry=None, cwd="/repo", additional_directories=())
    await second.open_session("s1")
    await last.tidy()
    await first.close()
    make_openings_older(path, HOUR_MS)
    await last.tidy()
    assert [(await last.session(name)).id for name in ("s1", "s2")] == ["s1", "s2"]
    with pytest.raises(NoSuchSession):
        await last.open_session("f1")
    await converse(second, "s2", "one")
    await second.close()
    make_openings_older(path, HOUR_MS)
    await last.tidy()
    with pytest.raises(NoSuchSession):
        await last.open_session("s1")
    assert (await last.session("s2")).has_prompt
    await last.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM conversations").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM openings").fetchone() == (0,)


async def make_move(store: SqliteStore) -> None:
    (*_, last) = await converse(store, "s1", "one")
    await store.move_leaf("s1", leaf=last.id, to=None, reason="clear")


async def make_draft(store: SqliteStore) -> None:
    start = await store.take_turn("s1", None, leaf=None)
    await store.save_draft("s1", after_leaf=None, turn=start.turn, message_id="m", text="x", thought="")


KEPT: dict[str, Callable[[SqliteStore], Awaitable[object]]] = {
    "a queued prompt": lambda store: store.enqueue("s1", (), "u1"),
    "a draft": make_draft,
    "a claimed turn": lambda store: store.take_turn("s1", None, leaf=None),
    "a title": lambda store: store.update_session("s1", SessionChanges(title="T")),
    "an alias": lambda store: store.update_session("s1", SessionChanges(alias="work")),
    "metadata": lambda store: store.merge_metadata("s1", {"tags": ["x"]}),
    "a rule": lambda store: store.update_session("s1", SessionChanges(permissions=({"tool": "shell"},))),
    "the archive": lambda store: store.update_session("s1", SessionChanges(archived=True)),
    "a cleared conversation": make_move,
}


@pytest.mark.parametrize("reason", KEPT)
async def test_a_session_that_anything_came_to_is_kept(sqlite_store: SqliteStore, tmp_path: Path, reason: str) -> None:
    other = await SqliteStore.open(tmp_path / "crow.db")
    await other.create_session(new_session())
    await KEPT[reason](other)
    await other.close()
    await sqlite_store.tidy()
    assert (await sqlite_store.session("s1")).id == "s1"


@pytest.mark.parametrize(("place", "age_days", "is_kept"), [("boot", 1, True), ("host", 1, True), ("host", 8, False)])
async def test_a_store_that_cannot_be_looked_up_has_its_sessions_open_for_a_week(
    sqlite_store: SqliteStore, tmp_path: Path, place: str, age_days: int, is_kept: bool
) -> None:
    owner = str(replace(Owner.current(), **{place: "elsewhere"}))  # type: ignore[arg-type]
    far = await SqliteStore.open(tmp_path / "crow.db", owner=owner)
    await far.create_session(new_session())
    await far.close()
    make_openings_older(tmp_path / "crow.db", age_days * DAY_MS)
    await sqlite_store.tidy()
    with nullcontext() if is_kept else pytest.raises(NoSuchSession):
        await sqlite_store.session("s1")


async def test_a_migration_gives_up_only_old_empty_sessions(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    for name in ("old", "new", "used"):
        await store.create_session(new_session(name))
    await converse(store, "used", "one")
    await store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE sessions SET updated_ms = updated_ms - ? WHERE id <> 'new'", (8 * DAY_MS,))
    make_older(path, 6)
    store = await SqliteStore.open(path)
    await store.tidy()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT id FROM sessions ORDER BY id").fetchall() == [("new",), ("used",)]
    await store.close()


# names


async def test_a_session_is_found_by_id_alias_or_unique_prefix(sqlite_store: SqliteStore, upkeep: SessionAdmin) -> None:
    for name in ("a1b2", "a1c3", "a1", "zz"):
        await sqlite_store.create_session(new_session(name))
    await sqlite_store.update_session("zz", SessionChanges(alias="cli:default"))
    for name, found in (("a1b2", "a1b2"), ("a1", "a1"), ("a1b", "a1b2"), ("cli:default", "zz"), ("z", "zz")):
        assert await upkeep.find(name) == found
    for name, words in (
        ("a", '"a" may mean 3 sessions: a1, a1b2, a1c3. Give more of the id.'),
        ("b", 'No session "b". Run "crow sessions" to list them.'),
        ("", 'No session "". Run "crow sessions" to list them.'),
        ("%", 'No session "%". Run "crow sessions" to list them.'),
    ):
        with pytest.raises(ArgumentError) as refused:
            await upkeep.find(name)
        assert str(refused.value) == words
    await sqlite_store.delete_session("zz")
    with pytest.raises(ArgumentError):
        await upkeep.find("zz")


# search


async def test_search_filters_by_directory_model_and_date(
    sqlite_store: SqliteStore, upkeep: SessionAdmin, tmp_path: Path
) -> None:
    for name, cwd in (("s1", "/one"), ("s2", "/two")):
        await sqlite_store.create_session(new_session(name, cwd=cwd))
        row = await sqlite_store.session(name)
        entries = [NewEntry(body=said(f"needle {name}"), model=f"Model-{name}")]
        await sqlite_store.append(name, leaf=row.leaf, turn=1, entries=entries)
    await sqlite_store.create_session(new_session("s3", cwd="/two", title="needle"))
    age(tmp_path / "crow.db", "s1", 10)
    week = now_ms() - 7 * DAY_MS

    async def found(scope: Scope, query: str = "needle") -> list[str]:
        return [hit.session for hit in await sqlite_store.search(query, scope=scope)]

    assert await found(Scope()) == ["s3", "s2", "s1"]
    assert await found(Scope(cwd="/two")) == ["s3", "s2"]
    assert await found(Scope(model="MODEL-s2")) == ["s2"]
    assert await found(Scope(since_ms=week)) == ["s3", "s2"]
    assert await found(Scope(before_ms=week)) == ["s1"]
    assert await found(Scope(before_ms=week), "ne") == ["s1"]
    assert await found(Scope(cwd="/one", model="s2")) == []


@pytest.mark.parametrize(
    "word", ["漢字", "Почини", "ПОЧИНИ", "🎉", "ok", '"q', "AND", "a*b", "-x", "c:d", "(", "^a", "'"]
)
async def test_search_treats_no_character_as_an_operator(sqlite_store: SqliteStore, word: str) -> None:
    await sqlite_store.create_session(new_session())
    await add(sqlite_store, "s1", said("nothing of that kind"))
    (entry,) = await add(sqlite_store, "s1", said(f"before Почини {word} after"))
    assert [hit.entry for hit in await sqlite_store.search(word)] == [entry.id]


# totals


async def test_usage_shared_by_forks_counts_once_and_subagents_count_for_their_parent(
    sqlite_store: SqliteStore, upkeep: SessionAdmin, tmp_path: Path
) -> None:
    async def ask(session: str, tokens: int, model: str, cost: float | None) -> int:
        row = await sqlite_store.session(session)
        usage = Usage(input_tokens=tokens, output_tokens=1, cached_tokens=2)
        new = NewEntry(body=said(f"x{tokens}"), model=model, usage=usage, cost=cost)
        return (await sqlite_store.append(session, leaf=row.leaf, turn=1, entries=[new]))[0].id

    source = await sqlite_store.create_session(new_session("s1", title="One"))
    leaf = await ask("s1", 100, "m1", 0.5)
    for fork in ("f1", "f2"):
        await sqlite_store.create_session(new_session(fork, conversation=source.conversation, leaf=leaf, title=fork))
    await ask("f1", 10, "m2", None)
    await sqlite_store.create_session(new_session("sub", parent_id="s1"))
    await ask("sub", 1000, "m2", 0.25)
    repeated = NewEntry(body=result(leaf), model="m1", usage=Usage(input_tokens=1000, output_tokens=1), cost=0.25)
    await sqlite_store.append("s1", leaf=leaf, turn=1, entries=[repeated])
    age(tmp_path / "crow.db", "f1", 10)

    def total(requests: int, tokens_in: int, cost: float | None, **more: Any) -> UsageTotal:
        return UsageTotal(
            requests=requests,
            tokens_in=tokens_in,
            tokens_out=requests,
            tokens_cached=2 * requests,
            cost=cost,
            **more,
        )

    assert await upkeep.totals((), Scope()) == (total(3, 1110, 0.75),)
    assert await upkeep.totals(("session",), Scope()) == (
        total(2, 1100, 0.75, session="s1", title="One"),
        total(1, 10, None, session="f1", title="f1"),
    )
    assert await upkeep.totals(("model",), Scope()) == (
        total(2, 1010, 0.25, model="m2"),
        total(1, 100, 0.5, model="m1"),
    )
    days = await upkeep.totals(("day",), Scope())
    assert [(day.requests, day.tokens_in) for day in days] == [(1, 10), (2, 1100)]
    assert [day.day for day in days] == sorted(str(day.day) for day in days)
    assert [row.model for row in await upkeep.totals(("model",), Scope(since_ms=now_ms() - DAY_MS))] == ["m2", "m1"]
    # what a deleted session left in a fork belongs to nobody, and is not lost
    await upkeep.remove(["s1"])
    assert await upkeep.totals(("session",), Scope()) == (
        total(1, 100, 0.5, session=""),
        total(1, 10, None, session="f1", title="f1"),
    )


# removal


async def test_pruning_removes_exactly_the_listed_sessions(
    sqlite_store: SqliteStore, upkeep: SessionAdmin, tmp_path: Path
) -> None:
    for name, cwd in (("old", "/one"), ("older", "/two"), ("new", "/one"), ("running", "/one"), ("empty", "/one")):
        await sqlite_store.create_session(new_session(name, cwd=cwd, title=f"Title {name}"))
    for name in ("old", "older", "new"):
        await converse(sqlite_store, name, f"prompt {name}")
    await begin(sqlite_store, "running", "still at it")
    old = await sqlite_store.session("old")
    await sqlite_store.create_session(new_session("fork", conversation=old.conversation, leaf=old.leaf))
    await sqlite_store.create_session(new_session("sub", parent_id="old"))
    for name, days in (("old", 40), ("older", 50), ("running", 60), ("empty", 35)):
        age(tmp_path / "crow.db", name, days)
    await sqlite_store.update_session("old", SessionChanges(title="renamed today", archived=True))
    before_ms = now_ms() - 30 * DAY_MS
    kept = {name: b"".join([line async for line in upkeep.export([name])]) for name in ("new", "fork")}
    listed = await upkeep.unused_since(before_ms)
    assert [one.id for one in listed] == ["older", "old", "empty"]
    used_ms = listed[0].used_ms
    assert listed[0] == UnusedSession(
        id="older", cwd="/two", title="Title older", used_ms=used_ms, entries=3, archived=False
    )
    assert [one.id for one in await upkeep.unused_since(before_ms, "/two")] == ["older"]
    assert await upkeep.prune(before_ms) == listed
    assert await upkeep.ids() == ("fork", "new", "running")
    assert {name: b"".join([line async for line in upkeep.export([name])]) for name in kept} == kept
    with closing(sqlite3.connect(tmp_path / "crow.db")) as connection:
        (writers,) = connection.execute("SELECT group_concat(DISTINCT session) FROM entries").fetchone()
    assert set(writers.split(",")) == {"old", "new", "running"}, "the fork needs what the old one wrote"
    assert await upkeep.prune(before_ms) == ()


async def test_removing_a_running_session_fails_and_removes_none(
    sqlite_store: SqliteStore, upkeep: SessionAdmin
) -> None:
    for name in ("s1", "s2"):
        await sqlite_store.create_session(new_session(name))
    await begin(sqlite_store, "s2", "hi")
    with pytest.raises(SessionBusy, match="Session s2 is busy: process"):
        await upkeep.remove(["s1", "s2"])
    assert await upkeep.ids() == ("s1", "s2")
    await upkeep.remove(["s1"])
    assert await upkeep.ids() == ("s2",)


# backup

WRITER = """
import asyncio, sys
from pathlib import Path
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse, new_session
async def main():
    store = await SqliteStore.open(Path(sys.argv[1]))
    await store.create_session(new_session("busy"))
    number = 0
    while True:
        await converse(store, "busy", f"prompt {number} " + "x" * 20_000)
        number += 1
        print(number, flush=True)
asyncio.run(main())
"""


def start_writer(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*command(WRITER), str(path)], stdout=subprocess.PIPE)


def names_in(path: Path, pattern: str) -> set[str]:
    return {found.name for found in path.glob(pattern)}


async def test_a_backup_is_consistent_while_another_process_writes(
    sqlite_store: SqliteStore, upkeep: SessionAdmin, tmp_path: Path
) -> None:
    await sqlite_store.create_session(new_session())
    await converse(sqlite_store, "s1", "one")
    writer = start_writer(tmp_path / "crow.db")
    assert writer.stdout is not None
    try:
        for number in range(3):
            writer.stdout.readline()  # it has written since the last one
            done = await upkeep.back_up(tmp_path / f"backup{number}.db")
            assert (done.path, done.sessions) == (str(tmp_path / f"backup{number}.db"), 2)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert names_in(tmp_path, "backup*") == {"backup0.db", "backup1.db", "backup2.db"}
    assert (tmp_path / "backup0.db").stat().st_mode & 0o777 == 0o600
    copy = await SqliteStore.open(tmp_path / "backup2.db")
    try:
        assert row_ids((await copy.sessions()).rows) == ["busy", "s1"]
        entries = [entry async for batch in copy.history("busy") for entry in batch]
        assert len(entries) >= 3
        assert [entry.parent for entry in entries[1:]] == [entry.id for entry in entries[:-1]]
    finally:
        await copy.close()


async def test_a_backup_never_overwrites_and_names_a_missing_directory(upkeep: SessionAdmin, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    for path, words in (("mine", "exists already"), ("no/where.db", "cannot be created: No such file or directory")):
        with pytest.raises(ArgumentError, match=words):
            await upkeep.back_up(tmp_path / path)
    assert (tmp_path / "mine").read_text() == "precious"
    assert names_in(tmp_path, "*part*") == set()


async def test_a_damaged_database_is_not_backed_up(sqlite_store: SqliteStore, tmp_path: Path) -> None:
    await sqlite_store.create_session(new_session())
    for number in range(30):
        await converse(sqlite_store, "s1", f"prompt {number} " + "x" * 3_000)
    await sqlite_store.close()
    file = tmp_path / "crow.db"
    data = bytearray(file.read_bytes())
    page = max(at for at in range(4096, len(data), 4096) if data[at] == 0x0D and data[at + 4] > 1)  # a leaf with cells
    data[page + 8 : page + 64] = b"\xff" * 56
    file.write_bytes(bytes(data))
    store = await SqliteStore.open(file)
    try:
        with pytest.raises(StoreUnavailable, match="fails SQLite's integrity check"):
            await SessionAdmin(store).back_up(tmp_path / "backup.db")
    finally:
        await store.close()
    assert names_in(tmp_path, "backup*") == set()


async def test_space_is_given_back_in_few_steps_and_with_a_small_log(
    sqlite_store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, limit = 500, 256 * 1024
    monkeypatch.setattr(file, "_CHECKPOINT_BYTES", limit)
    await sqlite_store.create_session(new_session())
    await sqlite_store.create_session(new_session("kept"))
    texts = [f"{number}".ljust(50_000, "x") for number in range(200)]
    for text in texts:
        await add(sqlite_store, "s1", result(1, text))
    (kept,) = await add(sqlite_store, "kept", result(1, texts[7]))
    path = sqlite_store.database.path
    log = Path(f"{path}-wal")
    await sqlite_store.tidy()
    before = path.stat().st_size
    steps, logs = list[str](), list[int]()

    def trace(statement: str) -> None:
        steps.extend([statement] if "incremental_vacuum" in statement else ())
        logs.extend([log.stat().st_size] if steps else ())

    await sqlite_store.database.write(lambda connection: connection.set_trace_callback(trace))
    await sqlite_store.delete_session("s1")
    await sqlite_store.tidy()
    assert before > 10_000_000
    assert path.stat().st_size + logs[-1] < before / 5
    assert 1 < len(steps) <= before // (pages * 4_096) + 2
    assert max(logs) < limit + 2 * pages * 4_096
    assert await sqlite_store.entry(kept.id) == kept


async def test_giving_back_space_waits_for_another_program(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    await add(sqlite_store, "s1", result(1, "x" * 1_000_000))
    await sqlite_store.delete_session("s1")
    await sqlite_store.remove_deleted()
    tries = 0
    other = sqlite3.connect(sqlite_store.database.path, isolation_level=None, check_same_thread=False)

    def trace(statement: str) -> None:
        nonlocal tries
        tries += "incremental_vacuum" in statement
        if tries == 2 and other.in_transaction:
            other.execute("ROLLBACK")

    with closing(other):
        await sqlite_store.database.write(lambda connection: connection.set_trace_callback(trace))
        other.execute("BEGIN IMMEDIATE")
        await sqlite_store.database.compact()
        assert other.execute("PRAGMA freelist_count").fetchone() == (0,)


async def test_a_leftover_that_cannot_be_removed_does_not_end_the_upkeep(
    sqlite_store: SqliteStore, tmp_path: Path
) -> None:
    (tmp_path / "crow.db.repair-1").mkdir()
    await sqlite_store.create_session(new_session())
    await sqlite_store.delete_session("s1")
    await sqlite_store.tidy()
    assert await sqlite_store.next_removal() is None


@pytest.mark.long
async def test_the_database_stays_small_while_sessions_come_and_go(tmp_path: Path) -> None:
    """`python -m benchmarks.month` does this for a month."""
    sizes = await live(tmp_path / "crow.db", days=3, sessions=4, mean=6_000)
    for size in sizes:
        assert (size.free, size.drafts, size.log) == (0, 0, 0)
        assert size.files <= 1.3 * size.content + 300_000  # tables and indexes have at least one page each
