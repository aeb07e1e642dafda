"""The database file: permissions, refusals, other programs, full disks, damage."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from crow.domain.entries import Assistant, NewEntry, Remark, TurnEnd, User
from crow.domain.errors import LeafMoved, SessionBusy, StoreTooNew, StoreUnavailable
from crow.domain.messages import Text
from crow.store.admin import SessionFilter
from crow.store.owner import Owner, open_stores
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.connection import pragma
from crow.store.sqlite.file import JournalMode
from crow.store.sqlite.migrations import APPLICATION_ID, FILES, VERSION, migrate, schema
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, converse, history, ids, new_session, result, said

PROJECT = Path(__file__).parents[3]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def wal_bytes(store: SqliteStore) -> int:
    return Path(f"{store.database.path}-wal").stat().st_size


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file as another program would."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        yield connection


async def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    with anyio.fail_after(60):
        return await anyio.run_process([sys.executable, "-c", code, *arguments], check=False, cwd=PROJECT)


# files


@pytest.mark.parametrize("version", [(3, 34, 1), (3, 35, 5), (3, 36, 0)])
async def test_a_version_of_sqlite_that_fails_later_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    if version >= (3, 36):
        await (await SqliteStore.open(tmp_path / "crow.db")).close()
        return
    with pytest.raises(StoreUnavailable, match=r"crow needs 3\.36 or newer"):
        await SqliteStore.open(tmp_path / "crow.db")
    assert not (tmp_path / "crow.db").exists()


async def test_new_files_and_directories_are_private_to_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "data" / "crow" / "crow.db"
    before = os.umask(0)
    try:
        store = await SqliteStore.open(path)
        await store.create_session(new_session())
        made = {name.name: mode_of(name) for name in path.parent.iterdir()}
        directories = [mode_of(directory) for directory in (path.parent, path.parent.parent)]
        await store.close()
    finally:
        os.umask(before)
    assert directories == [0o700, 0o700]
    assert made.pop("crow.db.lock", 0o600) == 0o600
    assert made == {"crow.db": 0o600, "crow.db-wal": 0o600, "crow.db-shm": 0o600}


async def test_a_database_that_others_can_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    await (await SqliteStore.open(path)).close()
    path.chmod(0o644)
    await (await SqliteStore.open(path)).close()
    assert mode_of(path) == 0o600


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
async def test_the_journal_mode_is_as_requested_and_closing_leaves_one_file(
    tmp_path: Path, journal_mode: JournalMode
) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db", journal_mode=journal_mode)
    await store.create_session(new_session())
    with raw(tmp_path / "crow.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (journal_mode,)
    await store.close()
    assert set(os.listdir(tmp_path)) - {"crow.db.lock"} == {"crow.db"}


async def test_a_write_during_closing_is_refused_with_the_path(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.close)
        await anyio.lowlevel.checkpoint()
        with pytest.raises(StoreUnavailable, match="is closed"):
            await store.create_session(new_session())


async def test_commits_are_flushed_and_only_the_store_makes_checkpoints(sqlite_store: SqliteStore) -> None:
    pragmas = (
        "synchronous",
        "wal_autocheckpoint",
        "journal_size_limit",
        "auto_vacuum",
        "application_id",
        "user_version",
    )
    values = await sqlite_store.database.write(
        lambda sql: [sql.execute(f"PRAGMA {pragma}").fetchone()[0] for pragma in pragmas]
    )
    assert values == [2, 0, 64 * 1024 * 1024, 2, APPLICATION_ID, VERSION]


async def test_the_wal_is_emptied_when_it_is_large_and_on_idle(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    sizes = []
    for _ in range(6):
        await add(sqlite_store, "s1", result(1, os.urandom(2_000_000).hex()))
        sizes.append(wal_bytes(sqlite_store))
    assert 0 in sizes
    assert max(sizes) < 24_000_000
    await add(sqlite_store, "s1", said("more"))
    assert wal_bytes(sqlite_store) > 0
    await sqlite_store.tidy()
    assert wal_bytes(sqlite_store) == 0


async def test_another_reader_delays_a_checkpoint_but_no_commit(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    with raw(sqlite_store.database.path) as reader, anyio.fail_after(60):
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        await add(sqlite_store, "s1", said("x"))
        await sqlite_store.tidy()
        assert wal_bytes(sqlite_store) > 0
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (0,)
        reader.execute("COMMIT")
        assert reader.execute("SELECT count(*) FROM entries").fetchone() == (1,)


async def test_tidying_frees_the_space_of_a_deleted_session(sqlite_store: SqliteStore) -> None:
    path = sqlite_store.database.path
    await sqlite_store.create_session(new_session())
    await sqlite_store.tidy()
    before = path.stat().st_size
    for index in range(3):
        await add(sqlite_store, "s1", result(1, os.urandom(100_000).hex()), said(f"words {index} " * 4_500))
    await sqlite_store.delete_session("s1")
    await sqlite_store.tidy()
    assert path.stat().st_size < before + 100_000
    with raw(path) as connection:
        tables = ("sessions", "entries", "blobs", "blob_refs", "inbox", "drafts", "moves", "conversations")
        assert [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables] == [0] * len(
            tables
        )
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
        blocks = connection.execute("SELECT block FROM entries_fts_data").fetchall()
        assert b"wor" not in b"".join(row[0] for row in blocks)


@pytest.mark.parametrize("odd", ["", "\0", "\ud800", '"\\\n\u2028'], ids=["plain", "nul", "surrogate", "escaped"])
@pytest.mark.parametrize("twigs", [8, 8_000], ids=["short", "long"])
async def test_a_deleted_message_leaves_nothing_in_the_index(sqlite_store: SqliteStore, odd: str, twigs: int) -> None:
    words = f"a {odd} nest " + "of twigs " * twigs + "kittiwake"
    await sqlite_store.create_session(new_session())
    await sqlite_store.take_turn("s1", "u1", leaf=None, parts=(Text(text="Is this"), Text(text=words), Text(text="?")))
    await add(sqlite_store, "s1", said(words), said(""))
    assert len(await sqlite_store.search("kittiwake")) == (0 if odd == "\0" else 2)  # SQLite reads up to a NUL
    await sqlite_store.delete_session("s1")
    await sqlite_store.tidy()
    with raw(sqlite_store.database.path) as connection:
        connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
        assert connection.execute("SELECT count(*) FROM entries_fts_docsize").fetchone() == (0,)
        index = connection.execute("SELECT block FROM entries_fts_data").fetchall()
        assert b"kit" not in b"".join(row[0] for row in index)


async def test_a_shared_blob_is_stored_once_and_kept_until_its_last_entry_goes(sqlite_store: SqliteStore) -> None:
    for name in ("s1", "s2"):
        await sqlite_store.create_session(new_session(name))
        await add(sqlite_store, name, result(1, "x" * 100_000))
    with raw(sqlite_store.database.path) as connection:
        count = "SELECT (SELECT count(*) FROM blobs), (SELECT count(*) FROM blob_refs)"
        assert connection.execute(count).fetchone() == (1, 2)
        await sqlite_store.delete_session("s1")
        await sqlite_store.tidy()
        assert connection.execute(count).fetchone() == (1, 1)
        assert (await history(sqlite_store, "s2"))[0].body == result(1, "x" * 100_000)
        await sqlite_store.delete_session("s2")
        await sqlite_store.tidy()
        assert connection.execute(count).fetchone() == (0, 0)


async def test_entries_that_a_session_moves_to_during_tidying_are_kept(sqlite_store: SqliteStore) -> None:
    source = await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "shared", "private")
    await sqlite_store.create_session(new_session("f1", conversation=source.conversation, leaf=entries[2].id))
    await sqlite_store.delete_session("s1")
    found = await sqlite_store.next_removal()
    assert found is not None
    assert found.entries == tuple(reversed(ids(entries[3:])))
    await sqlite_store.move_leaf("f1", leaf=entries[2].id, to=entries[4].id, reason="tree")
    assert not await sqlite_store.remove_entries(found, found.entries)
    assert not await sqlite_store.remove_sessions(found)
    await sqlite_store.tidy()
    assert [entry.id for entry in entries if await sqlite_store.entry(entry.id)] == ids(entries[:5])


# leases


async def test_a_turn_on_another_host_is_busy_until_its_lease_expires(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    elsewhere = await SqliteStore.open(path, owner=str(replace(Owner.current(), host="elsewhere", pid=7)))
    store = await SqliteStore.open(path)
    await elsewhere.create_session(new_session())
    user = await begin(elsewhere, "s1", "hi")
    open_stores.discard(elsewhere.owner)  # as if it ran in a process that this one knows nothing of

    def grow_old() -> None:
        with raw(path) as connection:
            connection.execute("UPDATE sessions SET lease_ms = lease_ms - 61000")

    grow_old()
    await elsewhere.save_draft("s1", after_leaf=user.id, turn=1, message_id="a", text="slowly", thought="")
    with pytest.raises(SessionBusy, match="process 7 on elsewhere is running a turn"):
        await store.take_turn("s1", None, leaf=user.id)
    grow_old()
    await elsewhere.renew_lease("s1")
    await store.renew_lease("s1")
    with pytest.raises(SessionBusy, match="process 7 on elsewhere is running a turn"):
        await store.take_turn("s1", None, leaf=user.id)
    grow_old()
    await store.renew_lease("s1")
    assert [type(entry.body) for entry in (await store.open_session("s1")).entries] == [User, Assistant, TurnEnd]
    with pytest.raises(LeafMoved):
        await elsewhere.append("s1", leaf=user.id, turn=1, entries=[NewEntry(body=said("too late"))])
    await elsewhere.close()
    await store.close()


# refusals


async def test_a_newer_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    await (await SqliteStore.open(path)).close()
    with raw(path) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 7}")
    before = path.read_bytes()
    with pytest.raises(
        StoreTooNew, match=re.escape(f"{path} was written by a newer crow: its schema is version {VERSION + 7}")
    ):
        await SqliteStore.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"This is no database, however long it may be. " * 100, "is not a crow database"),
        (None, "is the database of another program"),
    ],
)
async def test_a_file_of_another_program_is_refused_and_not_changed(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "crow.db"
    if content is None:
        with raw(path) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match=f"{re.escape(str(path))} {words}.*CROW_HOME"):
        await SqliteStore.open(path)
    assert path.read_bytes() == before


async def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    path.touch()
    store = await SqliteStore.open(path)
    assert (await store.create_session(new_session())).id == "s1"
    await store.close()


@pytest.mark.parametrize("name", ["file/crow.db", "directory"])
async def test_an_unusable_path_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreUnavailable, match=rf"{re.escape(str(tmp_path / name))} cannot be .*CROW_HOME"):
        await SqliteStore.open(tmp_path / name)


async def test_an_unwritable_directory_is_named_in_the_error() -> None:
    with pytest.raises(StoreUnavailable, match=r"/proc/crow/crow.db cannot be created at /proc/crow .*CROW_HOME"):
        await SqliteStore.open(Path("/proc/crow/crow.db"))


async def test_a_write_that_waits_too_long_fails_and_the_next_one_works(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db", busy_timeout_s=0.05)
    await store.create_session(new_session())
    with raw(tmp_path / "crow.db") as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"crow.db is locked by another program \(waited 0.05 s\)"):
            await add(store, "s1", said("x"))
        assert (await store.session("s1")).leaf is None
        other.execute("ROLLBACK")
    await add(store, "s1", said("x"))
    await store.close()


async def test_a_full_disk_loses_only_the_failed_step(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    (kept,) = await add(sqlite_store, "s1", said("kept"))

    def limit_pages(sql: sqlite3.Connection, more: int) -> None:
        (pages,) = sql.execute("PRAGMA page_count").fetchone()
        sql.execute(f"PRAGMA max_page_count = {pages + more}").fetchone()

    await sqlite_store.database.write(lambda sql: limit_pages(sql, 1))
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        await add(sqlite_store, "s1", result(1, "x" * 1_000_000))
    await sqlite_store.database.write(lambda sql: limit_pages(sql, 1_000_000))
    assert await history(sqlite_store, "s1") == (kept,)
    await add(sqlite_store, "s1", result(1, "x" * 1_000_000))


async def test_a_bug_in_a_statement_raises_unchanged_and_leaves_no_transaction(sqlite_store: SqliteStore) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await sqlite_store.database.write(lambda sql: sql.execute("INSERT INTO nowhere VALUES (1)"))
    await sqlite_store.create_session(new_session())


async def test_the_reader_cannot_write(sqlite_store: SqliteStore) -> None:
    with pytest.raises(StoreUnavailable, match="is not writable"):
        await sqlite_store.database.read(lambda sql: sql.execute("DELETE FROM sessions"))


# damage


async def test_a_damaged_entry_is_replaced_by_an_explanation(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    entries = await converse(sqlite_store, "s1", "one", "two")
    with raw(sqlite_store.database.path) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute("UPDATE entries SET body = CAST(x'ff7b' AS TEXT) WHERE id = ?", (entries[1].id,))
        connection.execute("UPDATE entries SET kind = 'hologram', checksum = NULL WHERE id = ?", (entries[2].id,))
        read = await history(sqlite_store, "s1")
        assert connection.execute("SELECT id, content FROM messages ORDER BY id").fetchall() == [
            (entries[0].id, "one"),
            (entries[1].id, None),
            (entries[3].id, "two"),
            (entries[4].id, "TWO"),
        ]
    assert ids(read) == ids(entries)
    assert (read[0], read[3:]) == (entries[0], entries[3:])
    damaged, unknown = read[1].body, read[2].body
    assert isinstance(damaged, Assistant)
    assert damaged.text.startswith(f"[Entry {entries[1].id} (assistant) could not be read: it is damaged: ")
    assert unknown == Remark(
        text=f"Entry {entries[2].id} (hologram) could not be read: its kind 'hologram' is unknown to this version.",
        message_id=f"unreadable-{entries[2].id}",
    )
    assert (await sqlite_store.tail("s1")).entries == read
    assert [hit.entry for hit in await sqlite_store.search("tw")] == [entries[4].id, entries[3].id]
    await converse(sqlite_store, "s1", "three")


async def test_damaged_columns_of_a_session_read_as_empty(sqlite_store: SqliteStore) -> None:
    row = await sqlite_store.create_session(new_session())
    with raw(sqlite_store.database.path) as connection:
        connection.execute("UPDATE sessions SET permissions = '[1, {', config = 'null', metadata = ''")
    assert await sqlite_store.session("s1") == row


@pytest.mark.parametrize("damaged", [2**60, -5, "x", b"\0"])
async def test_an_impossible_time_hides_no_session(sqlite_store: SqliteStore, damaged: object) -> None:
    await sqlite_store.create_session(new_session(title="Needle"))
    (*_, newest) = await converse(sqlite_store, "s1", "one")
    with closing(sqlite3.connect(sqlite_store.database.path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER entries_never_change")
        connection.execute("UPDATE sessions SET created_ms = ?1, updated_ms = ?1", (damaged,))
        connection.execute("UPDATE entries SET created_ms = ? WHERE id = ?", (damaged, newest.id))
    (row,) = (await sqlite_store.sessions()).rows
    assert (row.created_ms, row.updated_ms) == (0, 0)
    (directory,) = await sqlite_store.directories()
    assert directory.updated_ms == 0
    (listed,) = await SessionAdmin(sqlite_store).listed(SessionFilter())
    assert listed.used_ms == 0
    (hit,) = await sqlite_store.search("Needle")
    assert hit.created_ms == 0


async def test_a_damaged_page_is_reported_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await SqliteStore.open(path)
    await store.create_session(new_session())
    await add(store, "s1", *(said(f"words {index} " * 50) for index in range(100)))
    await store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match=r"crow\.db is damaged .*run crow doctor --repair"):
        await SqliteStore.open(path)


# the schema


def test_the_published_schema_is_the_one_that_the_migrations_make() -> None:
    assert (PROJECT / "crow" / "store" / "sqlite" / "migrations" / "newest.sql").read_text() == schema()


def test_every_migration_file_is_listed_in_order() -> None:
    directory = PROJECT / "crow" / "store" / "sqlite" / "migrations"
    assert tuple(sorted(path.name for path in directory.glob("*.sql"))) == (*FILES, "newest.sql")


def test_a_new_database_is_the_one_that_the_migrations_make_step_by_step() -> None:
    with closing(sqlite3.connect(":memory:")) as new, closing(sqlite3.connect(":memory:")) as old:
        for connection in (new, old):
            connection.isolation_level = None
        migrate(new)
        for version in range(1, VERSION + 1):
            migrate(old, version)
        assert list(new.iterdump()) == list(old.iterdump())
        for value in ("application_id", "user_version"):
            assert pragma(new, value) == pragma(old, value) != 0
        assert pragma(new, "user_version") == VERSION


async def test_entries_cannot_be_changed_and_follow_their_parent(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    (entry,) = await add(sqlite_store, "s1", said("x"))
    with raw(sqlite_store.database.path) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="entries never change"):
            connection.execute("UPDATE entries SET body = '{}'")
        with pytest.raises(sqlite3.IntegrityError, match="parent < id"):
            connection.execute(
                "INSERT INTO entries (conversation, session, parent, turn, kind, body, created_ms)"
                " VALUES (1, 's1', ?, 1, 'remark', '{}', 0)",
                (entry.id + 5,),
            )


# processes


async def test_a_process_that_does_not_close_the_store_exits_silently(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore

async def main():
    store = await SqliteStore.open(Path(sys.argv[1]))
    await store.create_session(NewSession(id="s1", cwd="/", model="m", mode="ask"))
    await store.session("s1")
    print("done", flush=True)

asyncio.run(main())
"""
    ended = await run_python(code, str(tmp_path / "crow.db"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"done\n", b"")
    store = await SqliteStore.open(tmp_path / "crow.db")
    assert (await store.session("s1")).cwd == "/"
    await store.close()


async def test_the_store_imports_no_model_protocol_or_tool_sdk() -> None:
    code = """
import sys
import crow.store.sqlite.store
print([name for name in ("openai", "mcp", "acp", "pydantic", "httpx", "importlib.resources") if name in sys.modules])
"""
    ended = await run_python(code)
    assert ended.stdout == b"[]\n"


async def test_closing_gives_up_on_a_write_that_waits_for_another_program(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db", busy_timeout_s=300)
    await store.create_session(new_session())
    errors: list[str] = []

    async def write() -> None:
        try:
            await store.append("s1", leaf=None, turn=0, entries=[NewEntry(body=said("x"))])
        except StoreUnavailable as error:
            errors.append(str(error))

    with raw(tmp_path / "crow.db") as other, anyio.fail_after(60):
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await anyio.wait_all_tasks_blocked()
            await store.close()
    assert len(errors) == 1
    assert "is locked by another program" in errors[0]


async def test_a_queued_write_is_finished_before_the_store_closes(sqlite_store: SqliteStore) -> None:
    await sqlite_store.create_session(new_session())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add, sqlite_store, "s1", said("x"))
        await anyio.wait_all_tasks_blocked()
        await sqlite_store.close()
    with raw(sqlite_store.database.path) as connection:
        assert connection.execute("SELECT kind FROM entries").fetchall() == [("assistant",)]
