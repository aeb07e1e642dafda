"""What the system refuses is said in words that help."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from crow.store.sqlite.failures import unusable
from tests.support.fork_server import run_script

STORE = """
import asyncio, sys
from pathlib import Path
from crow.domain.errors import StoreError
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import converse, new_session
from tests.support.failing_calls import fail

async def main(path):
    store = await SqliteStore.open(path, busy_timeout_s=0.1)
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    await store.close()
    fail(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    try:
        store = await SqliteStore.open(path, busy_timeout_s=0.1)
        print(store.warning)
        await converse(store, "s1", "two")
    except StoreError as error:
        print(error)

asyncio.run(main(Path(sys.argv[1])))
"""


def words(path: Path, call: str, bits: int, error: int) -> str:
    """What a store says when it is opened and written while a system call fails."""
    return run_script(STORE, str(path), call, str(bits), str(error)).stdout.decode().strip()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system calls are made to fail by seccomp")


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_disk_without_locks_is_not_another_program(tmp_path: Path, error: int) -> None:
    said = words(tmp_path / "crow.db", "fcntl", 0b100, error)  # F_SETLK is 6
    assert "locked by another program" not in said
    assert f"{tmp_path / 'crow.db'} cannot be locked ({os.strerror(error)}). The file system there has no" in said
    assert "set CROW_HOME to another directory on a local disk." in said


def test_a_disk_without_inodes_is_called_full(tmp_path: Path) -> None:
    said = words(tmp_path / "crow.db", "openat", os.O_CREAT, errno.ENOSPC)
    assert "Make the file readable" not in said
    assert "(No space left on device). The disk is full. Free some space, or remove files if df -i shows no" in said


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EMFILE, r"cannot be opened \(Too many open files\)\. Too many files are open\. Close sessions or other"),
        (errno.ENFILE, r"Too many files are open\. Close sessions"),
        (errno.EDQUOT, r"Your disk quota is used up\. Free some space"),
        (errno.EROFS, r"The disk is mounted read-only\. Mount it writable, or set CROW_HOME"),
        (errno.EACCES, r"\(Permission denied\)\. Make its directory writable, or set CROW_HOME"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_each_error_of_the_system_has_its_own_advice(code: int, advice: str) -> None:
    refused = unusable(Path("/x/crow.db.lock"), "cannot be opened", OSError(code, os.strerror(code)))
    with pytest.raises(type(refused), match=advice):
        raise refused


SHORTAGE = """
import asyncio, sqlite3, sys
from contextlib import closing
from pathlib import Path
from crow.domain.errors import StoreError
from crow.store.sqlite.store import SqliteStore
from tests.store.scenes import begin, converse, history, new_session

async def main(path):
    store = await SqliteStore.open(path)
    await store.create_session(new_session())
    await converse(store, "s1", "one")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA hard_heap_limit = 3000000")  # of this process
    try:
        await begin(store, "s1", "x" * 8_000_000)
    except StoreError as error:
        print(error)
    print(len(await history(store, "s1")))
    await converse(store, "s1", "two")
    print(len(await history(store, "s1")))
    await store.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_lack_of_memory_is_not_called_damage_alone(tmp_path: Path) -> None:
    path = tmp_path / "crow.db"
    said = run_script(SHORTAGE, str(path)).stdout.decode()
    words, before, after = said.splitlines()
    assert words.startswith(f"{path} needs more memory than crow gets, or is damaged. End other programs; if that")
    assert (before, after) == ("3", "6"), "the store works again"
