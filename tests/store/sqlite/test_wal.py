"""A damaged write-ahead log is read as far as its frames surely follow one another."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from crow.store.sqlite.wal import WriteAheadLog

PAGE_BYTES = 4096
FRAME_BYTES = 24 + PAGE_BYTES
HEADER_BYTES = 32


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that never moves the log into the file by itself."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        yield connection


def insert(connection: sqlite3.Connection, *numbers: int) -> None:
    """Store each number in a transaction of its own. Two rows fill a page."""
    for number in numbers:
        connection.execute("INSERT INTO rows VALUES (?, ?)", (number, f"{number} " * 500))


def crash(path: Path, copy: Path) -> Path:
    """Copy the file and its log, as if the programs that have them open were killed."""
    shutil.copy(path, copy)
    shutil.copy(f"{path}-wal", f"{copy}-wal")
    return copy


def make(path: Path) -> None:
    with opened(path) as connection:
        connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, text TEXT)")


def flip(path: Path, at: int, *, count: int = 1) -> None:
    """Flip a bit in each of `count` bytes of the log."""
    log = bytearray(Path(f"{path}-wal").read_bytes())
    for place in range(at, at + count):
        log[place] ^= 4
    Path(f"{path}-wal").write_bytes(log)


def log_of(path: Path) -> WriteAheadLog:
    return WriteAheadLog(Path(f"{path}-wal").read_bytes(), PAGE_BYTES)


def numbers_after_apply(path: Path) -> list[int]:
    """The rows after the log was written into the file. The file is whole."""
    log_of(path).apply(path)
    Path(f"{path}-wal").unlink()
    return numbers(path)


def numbers(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [number for (number,) in connection.execute("SELECT number FROM rows ORDER BY number")]


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("at", [1, 6, 9, 14, 17, 21])
def test_the_newest_frames_are_chosen_if_the_header_is_damaged(tmp_path: Path, at: int, is_checkpointed: bool) -> None:
    path = tmp_path / "file.db"
    make(path)
    with opened(path) as connection:
        insert(connection, *range(1, 31))
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        insert(connection, 31)
        if is_checkpointed:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        copy = crash(path, tmp_path / "copy.db")
    flip(copy, at)
    log = log_of(copy)
    assert (len(log.data) - HEADER_BYTES) // FRAME_BYTES > 2 * len(log.frames) > 0
    assert log.damaged == 1
    assert numbers_after_apply(copy) == list(range(1, 32))


def test_old_frames_are_not_chosen_if_the_first_new_frame_is_damaged_too(tmp_path: Path) -> None:
    path = tmp_path / "file.db"
    make(path)
    with opened(path) as connection:
        insert(connection, *range(1, 31))
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        insert(connection, 31)
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        copy = crash(path, tmp_path / "copy.db")
    flip(copy, 16, count=8)
    flip(copy, HEADER_BYTES + 24 + 1_000, count=512)
    assert numbers_after_apply(copy) == list(range(1, 32))


@pytest.mark.parametrize("kept", [10, 25])
def test_frames_that_later_commits_have_replaced_are_not_applied(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "file.db"
    make(path)
    with opened(path) as connection:
        insert(connection, *range(1, 31))
        copy = crash(path, tmp_path / "copy.db")
    frame = next(  # the last frame of the transaction after `kept` rows
        number
        for number, frame in enumerate(log_of(copy).frames)
        if sum(bool(before.database_pages) for before in log_of(copy).frames[: number + 1]) == kept + 1
    )
    flip(copy, HEADER_BYTES + frame * FRAME_BYTES + 24 + 2_000)
    with opened(copy) as connection:
        before = [number for (number,) in connection.execute("SELECT number FROM rows ORDER BY number")]
        insert(connection, 1_000, 1_001)
        again = crash(copy, tmp_path / "again.db")
    assert before[-1] < 30
    log = log_of(again)
    assert log.damaged == 0
    assert log.unused > 0
    assert numbers_after_apply(again) == [*before, 1_000, 1_001]


@pytest.mark.parametrize("place", [2, 6, 10, 17, 21, 24, 24 + 2_003, 24 + PAGE_BYTES - 1])
def test_frames_after_a_damaged_word_are_applied(tmp_path: Path, place: int) -> None:
    """Also if the damaged frame begins a transaction, where left-over frames would begin, too."""
    path = tmp_path / "file.db"
    make(path)
    with opened(path) as connection:
        insert(connection, *range(1, 31))
        copy = crash(path, tmp_path / "copy.db")
    whole = log_of(copy).frames
    first = next(number for number in range(20, len(whole)) if whole[number - 1].database_pages)
    flip(copy, HEADER_BYTES + first * FRAME_BYTES + place)
    log = log_of(copy)
    assert len(log.frames) == len(whole)
    assert log.damaged in (1, 2)  # a frame after a damaged checksum cannot be checked
    assert log.unused == 0
