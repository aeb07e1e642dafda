"""Checks a database, and rebuilds one that is damaged.

All work is done on copies: the file as it was is kept beside the one that takes its place.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crow.domain.errors import ArgumentError, StoreTooNew, StoreUnavailable
from crow.store.codec import Unreadable
from crow.store.sqlite.connection import FAILURES, FileLock, LockTimeout, fcntl
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION, is_schema_damaged, migrate
from crow.store.sqlite.paths import ENTRY_COLUMNS, ENTRY_SOURCE, body_of, loader
from crow.store.sqlite.recovery import index_words, recover

__all__ = ["Repaired", "damaged_entries", "problems", "repair"]

# ruff: noqa: S608  # statements are put together from constants; values are parameters


_MOST_PROBLEMS = 20
_CHUNK_BYTES = 1024 * 1024
_SHARED_LOCK = (0x40000002, 510)
"""Where everybody who has a SQLite file open holds a lock: first byte, number of bytes."""

_WORDS = "the full-text index"

_OF_INDEXES = re.compile(rf"row \d+ missing from index|wrong # of entries in index|non-unique entry in index|{_WORDS}")
"""Problems that building the indexes anew mends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What `repair` found and did.

    `outcome`: the file was "whole", its indexes were "rebuilt", or its rows were "recovered" into a new file. `copy` is
    the file as it was, None if it was whole. `problems` are SQLite's words for what was wrong, `lost` what could not be
    recovered.
    """

    outcome: Literal["whole", "rebuilt", "recovered"]
    copy: Path | None
    problems: tuple[str, ...]
    lost: tuple[str, ...]
    sessions: int
    entries: int


def problems(connection: sqlite3.Connection) -> tuple[str, ...]:
    """What is wrong with the file; reads all of it but what texts mean. Empty: nothing."""
    try:
        found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MOST_PROBLEMS})")]
    except FAILURES as error:
        return (str(error) or type(error).__name__,)
    if found != ["ok"]:
        return tuple(line for words in found for line in words.splitlines() if not line.startswith("***"))
    if is_schema_damaged(connection):
        return ("the schema is not crow's",)
    (only_reads,) = connection.execute("PRAGMA query_only").fetchone()
    connection.execute("PRAGMA query_only = OFF")  # else no temporary table can be made
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, entries_fts, row)")
        connection.execute("SELECT count(*) FROM temp.words").fetchone()
        connection.execute("DROP TABLE temp.words")
    except FAILURES as error:
        return (f"{_WORDS}: {error}",)
    finally:
        connection.execute(f"PRAGMA query_only = {only_reads}")
    return _missing(connection)


def damaged_entries(connection: sqlite3.Connection) -> tuple[str, ...]:
    """The entries that cannot be read, each with the reason."""
    load = loader(connection)
    found = []
    for row in connection.execute(f"SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE} ORDER BY e.id"):
        try:
            body_of(row, load)
        except Unreadable as error:
            found.append(f"entry {row[0]} ({row[5]}) of session {row[2] or 'unknown'}: {error}")
    return tuple(found)


def repair(path: Path) -> Repaired:
    """Check the database at `path`. If it is damaged, keep a copy of it, and put a new one in its place with all that
    can be recovered.

    :raises ArgumentError: there is none, or somebody has it open.
    :raises StoreTooNew: a newer crow wrote it.
    :raises StoreUnavailable: there is no room for copies, or nothing of crow in the file.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    kept = path.with_name(f"{path.stem}-damaged-{stamp}{path.suffix}")
    work = path.with_name(f"{path.name}.repair-{os.getpid()}")
    try:
        with _alone(path) as file, FileLock(path, LockTimeout(0)).held():
            try:
                _copy(file, path, kept)
                _copy(file, path, work)
                return _repair(path, kept, work)
            except BaseException:
                _remove(kept)  # the file is as it was
                raise
            finally:
                _remove(work)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be repaired: {error.strerror} ({error.filename}).") from error


def _repair(path: Path, kept: Path, work: Path) -> Repaired:
    found = _check(work)
    lost: tuple[str, ...] = ()
    outcome: Literal["whole", "rebuilt", "recovered"] = "whole"
    if found:
        outcome = "rebuilt"
        if _has_damaged_rows(work, found) or not _rebuild_indexes(work) or _check(work):
            _remove(work)
            outcome, lost = "recovered", recover(kept, work)
            if still := _check(work):
                raise StoreUnavailable(f"{path} could not be repaired ({still[0]}). It was left as it is.")
    with closing(sqlite3.connect(work, isolation_level=None)) as connection:
        (sessions,) = connection.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        lost = (*lost, *damaged_entries(connection))
    if outcome == "whole":
        _remove(kept)
    else:
        _remove(path, ("-wal", "-shm", "-journal"))
        os.replace(work, path)
    return Repaired(
        outcome=outcome,
        copy=None if outcome == "whole" else kept,
        problems=found,
        lost=lost,
        sessions=sessions,
        entries=entries,
    )


@contextmanager
def _alone(path: Path) -> Iterator[int]:
    """The file, held so that nobody else has it open with SQLite.

    Nothing else of this process may open it meanwhile: the system would drop the lock when that is closed.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise ArgumentError(f"There is nothing to repair: {path} does not exist.") from None
    try:
        if fcntl is not None:
            first, length = _SHARED_LOCK
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, first)
            except (BlockingIOError, PermissionError):
                raise ArgumentError(
                    f"{path} is open in another process. Close every crow (your editors), then run this again."
                ) from None
        yield file
    finally:
        os.close(file)


def _copy(file: int, path: Path, target: Path) -> None:
    """Copy the database, which is open as `file`, and its write-ahead log."""
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
        os.lseek(file, 0, os.SEEK_SET)
        while data := os.read(file, _CHUNK_BYTES):
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())
    for suffix in ("-wal", "-journal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}{suffix}", f"{target}{suffix}")


def _remove(path: Path, suffixes: Sequence[str] = ("", "-wal", "-shm", "-journal")) -> None:
    for suffix in suffixes:
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def _check(path: Path) -> tuple[str, ...]:
    """As `problems`, of a copy that may be written.

    :raises StoreTooNew: a newer crow wrote it. :raises StoreUnavailable: another program wrote it.
    """
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application_id == APPLICATION_ID and version > VERSION:
                raise StoreTooNew(f"The database was written by a newer crow (schema {version}). Upgrade crow.")
            if application_id != APPLICATION_ID:
                return ("the header is not that of a crow database",)
            migrate(connection)
            found = problems(connection)
            if found:
                return found
            try:
                connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
            except FAILURES as error:
                return (f"{_WORDS}: {error}",)
            return ()
    except FAILURES as error:
        return (str(error) or type(error).__name__,)


def _missing(connection: sqlite3.Connection) -> tuple[str, ...]:
    """The first entries that are named by others, or by sessions, but are not there."""
    rows = connection.execute(
        "SELECT parent FROM entries e WHERE parent IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM entries p WHERE p.id = e.parent)"
        " UNION SELECT leaf FROM sessions s WHERE leaf IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM entries p WHERE p.id = s.leaf) LIMIT ?",
        (_MOST_PROBLEMS,),
    )
    conversations = connection.execute(
        "SELECT conversation FROM sessions WHERE conversation NOT IN (SELECT id FROM conversations) LIMIT ?",
        (_MOST_PROBLEMS,),
    )
    return (
        *(f"entry {entry_id} is missing" for (entry_id,) in rows),
        *(f"conversation {conversation} is missing" for (conversation,) in conversations),
    )


def _has_damaged_rows(path: Path, found: Sequence[str]) -> bool:
    """Whether more than indexes is damaged."""
    if not all(map(_OF_INDEXES.match, found)):
        return True
    if all(line.startswith(_WORDS) for line in found):
        return False
    # Where an index and a row differ, the row may be the damaged one.
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return bool(damaged_entries(connection))


def _rebuild_indexes(path: Path) -> bool:
    """Build all indexes anew; whether that worked."""
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("REINDEX")
            index_words(connection)
    except FAILURES:
        return False
    return True
