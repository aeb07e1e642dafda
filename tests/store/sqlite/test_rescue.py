"""The database's file is deleted or replaced while stores have it open."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from crow.domain.errors import StoreUnavailable
from crow.domain.messages import Text
from crow.store.sqlite.connection import FileLock, LockTimeout
from crow.store.sqlite.file import JournalMode
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import add, begin, bodies, converse, history, new_session, said
from tests.support.disks import DROP

DELETED = "crow.db was deleted while crow was running. Crow still had it open and has restored it"
REPLACED = "crow.db was replaced by another file while crow was running. Crow leaves that file alone"


def delete(path: Path, *suffixes: str) -> None:
    """Delete the database; all of its files, or those with these suffixes."""
    for suffix in suffixes or ("", "-wal", "-shm", ".lock"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def replace_by(path: Path, other: Path) -> bytes:
    """Put another file in the place of the database; what it holds."""
    content = other.read_bytes()
    other.rename(path)
    return content


async def made(path: Path, *sessions: str, journal_mode: JournalMode = "wal") -> SqliteStore:
    """A store with a turn in each of these sessions."""
    store = await SqliteStore.open(path, journal_mode=journal_mode)
    for name in sessions:
        await store.create_session(new_session(name))
        await converse(store, name, f"hello from {name}")
    return store


async def said_in(path: Path, session: str) -> str:
    """The whole history in the file, as another process would read it."""
    store = await SqliteStore.open(path)
    try:
        return str(await bodies(store, session))
    finally:
        await store.close()


def names_in(directory: Path) -> set[str]:
    """The files in it, but those that only hold locks."""
    return {file.name for file in directory.iterdir() if file.suffix != ".lock"}


def rescued(path: Path) -> Path:
    """The one copy beside the database."""
    (found,) = path.parent.glob("crow-rescued-*.db")
    return found


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
@pytest.mark.parametrize("suffixes", [(), ("",)], ids=["all files", "the file alone"])
async def test_a_deleted_file_is_restored_and_the_next_request_says_so_once(
    tmp_path: Path, journal_mode: JournalMode, suffixes: tuple[str, ...]
) -> None:
    path = tmp_path / "data" / "crow.db"
    store = await made(path, "s1", journal_mode=journal_mode)
    leaf = (await store.session("s1")).leaf
    delete(path, *suffixes)
    with pytest.raises(StoreUnavailable, match=DELETED):
        await store.take_turn("s1", "u1", leaf=leaf, parts=(Text(text="go on"),))
    assert path.stat().st_mode & 0o777 == 0o600
    await converse(store, "s1", "go on")
    assert "HELLO FROM S1" in await said_in(path, "s1")
    await store.close()
    assert "GO ON" in await said_in(path, "s1")
    assert names_in(path.parent) == {"crow.db"}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_deleted_directory_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "data" / "crow.db"
    store = await made(path, "s1")
    shutil.rmtree(path.parent)
    with pytest.raises(StoreUnavailable, match=DELETED):
        await store.sessions()
    assert [row.id for row in (await store.sessions()).rows] == ["s1"]
    await store.close()
    assert "HELLO FROM S1" in await said_in(path, "s1")


async def test_lists_loads_and_the_next_prompt_report_the_deletion(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await made(path, "s1")
    delete(path)
    with pytest.raises(StoreUnavailable, match=DELETED):
        await store.sessions()
    assert (await store.open_session("s1")).row.id == "s1"
    delete(path)
    with pytest.raises(StoreUnavailable, match=DELETED):
        await store.open_session("s1")
    leaf = (await store.session("s1")).leaf
    with pytest.raises(StoreUnavailable, match=DELETED):
        await store.take_turn("s1", None, leaf=leaf)
    await store.take_turn("s1", None, leaf=leaf)
    await store.close()


async def test_a_running_turn_continues_in_the_restored_file(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    store = await made(path, "s1")
    user = await begin(store, "s1", "work")
    delete(path)
    await store.save_draft("s1", after_leaf=user.id, turn=user.turn, message_id="m", text="I wo", thought="")
    delete(path)
    await add(store, "s1", said("I worked"), turn=user.turn, release=True)
    with pytest.raises(StoreUnavailable, match=DELETED):
        await store.create_session(new_session("s2"))
    await store.create_session(new_session("s2"))
    await store.close()
    assert "I worked" in await said_in(path, "s1")


@pytest.mark.parametrize("what", ["an empty file", "another program's file", "a new database", "an older copy"])
async def test_a_replacing_file_is_left_alone_and_the_database_is_copied_beside_it(tmp_path: Path, what: str) -> None:
    path, other = tmp_path / "crow.db", tmp_path / "other"
    store = await made(path, "s1")
    match what:
        case "an empty file":
            other.touch()
        case "another program's file":
            other.write_bytes(b"My thesis. " * 1_000)
        case "a new database":
            await (await made(other, "s2")).close()
        case "an older copy":
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(other)) as target:
                source.backup(target)
    await converse(store, "s1", "newest words")
    user = await begin(store, "s1", "work")
    content = replace_by(path, other)
    await add(store, "s1", said("I worked"), turn=user.turn, release=True)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=REPLACED):
            await store.take_turn("s1", None, leaf=None)
        with pytest.raises(StoreUnavailable, match=REPLACED):
            await store.sessions()
        with pytest.raises(StoreUnavailable, match=re.escape(str(rescued(path)))):
            await store.open_session("s1")
    await store.close()
    assert path.read_bytes() == content
    assert names_in(tmp_path) == {"crow.db", rescued(path).name}
    assert not rescued(path).with_name(f"{rescued(path).name}.lock").exists()
    rescued(path).rename(path)
    whole = await said_in(path, "s1")
    assert "NEWEST WORDS" in whole
    assert "I worked" in whole


async def test_two_stores_on_a_deleted_file_continue_in_one_restored_file(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    first, second = await made(path, "s1"), await made(path, "s2")
    delete(path)
    with pytest.raises(StoreUnavailable, match=DELETED):
        await begin(first, "s1", "one")
    await converse(first, "s1", "one")
    await converse(second, "s2", "two")
    assert {row.id for row in (await second.sessions()).rows} == {"s1", "s2"}
    await first.close()
    await second.close()
    assert "ONE" in await said_in(path, "s1")
    assert "TWO" in await said_in(path, "s2")
    assert names_in(tmp_path) == {"crow.db"}


OTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
print(connection.execute("SELECT count(*) FROM endpoints").fetchone()[0], flush=True)
for line in sys.stdin:
    connection.execute("INSERT INTO endpoints (base_url, model) VALUES (?, '')", (line.strip(),))
    print("written", flush=True)
"""


class Other:
    """A process that has the file open, and writes when it is told to."""

    def __init__(self, path: Path) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", OTHER, str(path)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def write(self, words: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(words, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "written\n"

    def end(self) -> None:
        self.process.communicate(timeout=60)


async def test_a_write_of_another_process_during_the_copy_is_copied_too(tmp_path: Path) -> None:
    """The other one has not noticed yet, and commits between the copy and its getting the name."""
    path = tmp_path / "crow.db"
    store = await made(path, "s1")
    other, statements = Other(path), list[str]()

    def trace(statement: str) -> None:
        statements.append(statement)
        if statement == "BEGIN IMMEDIATE" and statements.count(statement) == 1:  # right after the copy
            other.write("late")

    await store.database.write(lambda connection: connection.set_trace_callback(trace))
    delete(path)
    try:
        with pytest.raises(StoreUnavailable, match=DELETED):
            await store.sessions()
    finally:
        other.end()
    await store.close()
    assert statements.count("PRAGMA data_version") == 4
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT base_url FROM endpoints").fetchall() == [("late",)]


async def test_a_new_database_of_another_crow_is_not_damaged_by_a_store_on_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    old = await made(path, "s1")
    delete(path)
    new = await made(path, "s2")
    await old.close()
    await converse(new, "s2", "still here")
    assert "STILL HERE" in await said_in(path, "s2")
    await new.close()
    assert "STILL HERE" in await said_in(path, "s2")


async def test_concurrent_writes_go_to_the_restored_file(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    names = [f"s{number}" for number in range(20)]
    store = await made(path, *names)
    leaves = {name: (await begin(store, name, "go")).id for name in names}
    delete(path)

    async def save(name: str) -> None:
        await store.save_draft(name, after_leaf=leaves[name], turn=2, message_id="m", text=name, thought="")
        assert (await store.session(name)).leaf == leaves[name]

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(save, name)
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert {row[0] for row in connection.execute("SELECT text FROM drafts")} == set(names)


async def test_if_no_file_can_be_created_the_store_stays_open_until_one_can(tmp_path: Path) -> None:
    """In a process without the privileges of root, since root may write anywhere."""
    path = tmp_path / "data" / "crow.db"
    await (await made(path, "s1")).close()
    code = f"""
import asyncio, ctypes, os, shutil, sys
from pathlib import Path
prctl = ctypes.CDLL(None).prctl
{DROP}
from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse

async def main(path):
    store = await SqliteStore.open(path)
    await converse(store, "s1", "newest")
    for suffix in ("", "-wal", "-shm"):
        os.unlink(f"{{path}}{{suffix}}")
    path.parent.chmod(0o500)
    for _ in range(2):
        try:
            await store.sessions()
        except StoreUnavailable as error:
            print(error)
    path.parent.chmod(0o700)
    try:
        await store.sessions()
    except StoreUnavailable as error:
        print(error)
    await store.close()

asyncio.run(main(Path(sys.argv[1])))
"""
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {code!r}, *sys.argv[1:]])"
    drop = f"import ctypes; prctl = ctypes.CDLL(None).prctl; {DROP}; exec({code!r})"
    done = await anyio.run_process(
        [sys.executable, "-c", drop, str(path)], cwd=Path(__file__).parents[3], env=os.environ | {"PYTHONPATH": "."}
    )
    first, second, third = done.stdout.decode().splitlines()
    assert first == second
    assert first.startswith(f"{path} was deleted while crow was running, and its content cannot be written to a new")
    assert "do not quit it" in first
    assert DELETED in third
    assert "NEWEST" in await said_in(path, "s1")


async def test_a_deleted_lock_file_is_restored_and_held_by_one_store_at_a_time(tmp_path: Path) -> None:
    first, second = await made(tmp_path / "crow.db", "s1"), await made(tmp_path / "crow.db", "s2")
    delete(tmp_path / "crow.db", ".lock")
    for store, name in ((first, "s1"), (second, "s2"), (first, "s1")):
        await converse(store, name, f"words of {name}")
    lock, other = (FileLock(tmp_path / "crow.db", LockTimeout(0)) for _ in range(2))
    with lock.held(), pytest.raises(StoreUnavailable, match="is locked by another program"), other.held():
        pass
    await first.close()
    await second.close()
    third = await SqliteStore.open(tmp_path / "crow.db")
    assert len(await history(third, "s1")) == 9
    await third.close()
