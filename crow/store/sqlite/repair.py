"""Checks a database and repairs a damaged one.

All work is done on copies. The damaged file is kept beside the one that replaces it.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
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

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_MAX_PROBLEMS = 20
_CHUNK_BYTES = 1024 * 1024
_SHARED_LOCK = (0x40000002, 510)
"""The bytes of a file that every SQLite connection to it locks: first byte, number of bytes."""

_FULL_TEXT = "the full-text index"

_INDEX_PROBLEM = re.compile(
    rf"row \d+ missing from index|wrong # of entries in index|non-unique entry in index|{_FULL_TEXT}"
)
"""Problems that rebuilding the indexes solves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What `repair` found and did.

    `outcome`: the file was "whole", its indexes were "rebuilt", or its rows were "recovered" into a new file. `copy` is
    the damaged file, None if the file was whole. `problems` are SQLite's words, `lost` what could not be recovered.
    """

    outcome: Literal["whole", "rebuilt", "recovered"]
    copy: Path | None
    problems: tuple[str, ...]
    lost: tuple[str, ...]
    sessions: int
    entries: int


def repair(path: Path) -> Repaired:
    """Check the database at `path`. If it is damaged, keep it under another name and put a repaired one in its place.

    :raises ArgumentError: the file does not exist, or is open elsewhere.
    :raises StoreTooNew: a newer crow wrote it.
    :raises StoreUnavailable: there is no room for copies, or nothing of crow in the file.
    """
    kept = path.with_name(f"{path.stem}-damaged-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}")
    work = path.with_name(f"{path.name}.repair-{os.getpid()}")
    try:
        with _exclusive(path) as file, FileLock(path, LockTimeout(0)).held():
            try:
                _copy(file, path, kept)
                return _repair(path, kept, work)
            except BaseException:
                _remove(kept)  # the file is unchanged
                raise
            finally:
                _remove(work)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be repaired: {error.strerror} ({error.filename}).") from error


def problems(connection: sqlite3.Connection) -> tuple[str, ...]:
    """What is wrong with the file, apart from the content of entries; empty if nothing."""
    try:
        found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})")]
    except FAILURES as error:
        return (str(error) or type(error).__name__,)
    if found != ["ok"]:
        return tuple(line for words in found for line in words.splitlines() if not line.startswith("***"))
    if is_schema_damaged(connection):
        return ("the schema is not crow's",)
    (query_only,) = connection.execute("PRAGMA query_only").fetchone()
    connection.execute("PRAGMA query_only = OFF")  # to make a temporary table
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, entries_fts, row)")
        connection.execute("SELECT count(*) FROM temp.words").fetchone()
        connection.execute("DROP TABLE temp.words")
    except FAILURES as error:
        return (f"{_FULL_TEXT}: {error}",)
    finally:
        connection.execute(f"PRAGMA query_only = {query_only}")
    missing = connection.execute(
        "SELECT 'entry ' || parent FROM entries WHERE parent NOT IN (SELECT id FROM entries)"
        " UNION SELECT 'entry ' || leaf FROM sessions WHERE leaf NOT IN (SELECT id FROM entries)"
        " UNION SELECT 'conversation ' || conversation FROM sessions"
        " WHERE conversation NOT IN (SELECT id FROM conversations) LIMIT ?",
        (_MAX_PROBLEMS,),
    )
    return tuple(f"{what} is missing" for (what,) in missing)


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


def _repair(path: Path, kept: Path, work: Path) -> Repaired:
    """Repair `kept` in `work`, and put the result at `path` if there was something to repair."""
    outcome: Literal["whole", "rebuilt", "recovered"] = "whole"
    lost: tuple[str, ...] = ()
    _duplicate(kept, work)
    found = _check(work)
    if found:
        outcome = "rebuilt"
        if not _rebuild_indexes(work, found):
            outcome = "recovered"
            lost = _recover(kept, work)
            if remaining := _check(work):
                raise StoreUnavailable(f"{path} could not be repaired ({remaining[0]}). It was left as it is.")
    with closing(sqlite3.connect(work, isolation_level=None)) as connection:
        (sessions,) = connection.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        lost = (*lost, *damaged_entries(connection))
    if found:
        _remove(path, suffixes=("-wal", "-shm", "-journal"))
        os.replace(work, path)
    else:
        _remove(kept)
    return Repaired(
        outcome=outcome,
        copy=kept if found else None,
        problems=found,
        lost=lost,
        sessions=sessions,
        entries=entries,
    )


def _check(path: Path) -> tuple[str, ...]:
    """As `problems`, for a copy that may be changed.

    :raises StoreTooNew: a newer crow wrote it.
    """
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if application_id != APPLICATION_ID:
                return ("the header is not that of a crow database",)
            if version > VERSION:
                raise StoreTooNew(f"The database was written by a newer crow (schema {version}). Upgrade crow.")
            migrate(connection)
            if found := problems(connection):
                return found
            try:
                connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
            except FAILURES as error:
                return (f"{_FULL_TEXT}: {error}",)
            return ()
    except FAILURES as error:
        return (str(error) or type(error).__name__,)


def _rebuild_indexes(path: Path, found: tuple[str, ...]) -> bool:
    """Rebuild the indexes if only they are damaged; returns whether the database is whole now."""
    if not all(map(_INDEX_PROBLEM.match, found)):
        return False
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if damaged_entries(connection):  # where an index and a row differ, the row may be the damaged one
                return False
            connection.execute("REINDEX")
            index_words(connection)
    except FAILURES:
        return False
    return not _check(path)


def _recover(kept: Path, work: Path) -> tuple[str, ...]:
    """Recover the rows of `kept` into `work`; returns what was lost."""
    source = work.with_name(f"{work.name}.source")
    _remove(work)
    try:
        _duplicate(kept, source)
        return recover(source, work)
    finally:
        _remove(source)


@contextmanager
def _exclusive(path: Path) -> Iterator[int]:
    """Open the file while no other process has it open in SQLite.

    Nothing else in this process may open it meanwhile: the system would drop the lock when that is closed.
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
    """Copy the database, which is open as `file`, with its write-ahead log or journal."""
    created = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(created, "wb") as copy, open(file, "rb", closefd=False) as source:
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
        copy.flush()
        os.fsync(created)
    for suffix in ("-wal", "-journal"):
        with suppress(FileNotFoundError):
            shutil.copy(f"{path}{suffix}", f"{target}{suffix}")


def _duplicate(kept: Path, target: Path) -> None:
    for suffix in ("", "-wal", "-journal"):
        with suppress(FileNotFoundError):
            shutil.copy(f"{kept}{suffix}", f"{target}{suffix}")


def _remove(path: Path, *, suffixes: tuple[str, ...] = ("", "-wal", "-shm", "-journal")) -> None:
    for suffix in suffixes:
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
