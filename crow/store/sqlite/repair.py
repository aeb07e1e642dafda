"""Checks a database and repairs a damaged one.

A repair works on copies. The damaged file is kept beside the file that replaces it. If SQLite can read all rows, wrong
values are mended and the indexes rebuilt. Otherwise, the readable rows are copied into a new database (`recovery.py`).
If a repair was killed, the next repair puts the result of the killed one in place if that result was complete, and
removes it otherwise.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from crow.domain.errors import ArgumentError, StoreTooNew, StoreUnavailable
from crow.store.sqlite.cells import (
    Witnesses,
    damaged_cells,
    doubtful_titles,
    entries_may_change,
    mend_cells,
    mend_entries,
)
from crow.store.sqlite.connection import (
    FileLock,
    LockTimeout,
    copy_files,
    pragma,
    remove_files,
    remove_unfinished_repairs,
    repaired_name,
)
from crow.store.sqlite.failures import FAILURES, fcntl
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION, has_this_schema, is_schema_damaged, migrate
from crow.store.sqlite.pages import Pages
from crow.store.sqlite.paths import unreadable_entries
from crow.store.sqlite.recovery import Recovery, index_words
from crow.store.sqlite.wal import WriteAheadLog

_MAX_PROBLEMS = 20
_CHUNK_BYTES = 1024 * 1024
_HEADER_BYTES = 100
_SHARED_LOCK = (0x40000002, 510)
"""The range of bytes that every SQLite connection locks in a database file: first byte, number of bytes."""

_FULL_TEXT = "the full-text index"
_LARGEST_ROWID = 2**63 - 1
_VERSION_NUMBER = "the schema's version in the header"
_VERSIONS_AHEAD = 16
"""If the header's version is this much newer than `VERSION`, but the schema is that of `VERSION`, the header is
damaged. A crow that is only a little newer may have changed the meaning of rows without changing the schema."""

_MENDABLE = re.compile(
    rf"row \d+ missing from index|wrong # of entries in index|non-unique entry in index|{_FULL_TEXT}|{_VERSION_NUMBER}"
    r"|row \d+ of \w+: |(NULL|NUMERIC|TEXT|non-\w+) value in \w+\.|CHECK constraint failed in \w+"
)
"""Matches problems that can be solved by mending values and rebuilding the indexes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """The result of `repair`."""

    outcome: Literal["whole", "mended", "recovered"]
    """"whole" if the file was undamaged, "mended" if values and indexes in it were mended, or "recovered" if its rows
    were copied into a new file."""
    copy: Path | None
    """The path at which the damaged file was kept, or None if the file was undamaged."""
    problems: tuple[str, ...]
    """SQLite's messages."""
    changes: tuple[str, ...]
    """Each value that was replaced."""
    lost: tuple[str, ...]
    """The data that could not be recovered."""
    sessions: int
    entries: int


def repair(path: Path) -> Repaired:
    """Check the database at `path`. If the database is damaged, keep it under another name, and put a repaired database
    at `path`.

    :raises ArgumentError: the file does not exist, or another process has it open.
    :raises StoreTooNew: a newer crow wrote the database.
    :raises StoreUnavailable: there is no room for copies, or the file contains no crow data.
    """
    work = path.with_name(f"{path.name}.repair-{os.getpid()}")
    try:
        if (result := repaired_name(path)).exists():  # a repair was killed while it put its result in place
            with _exclusive(path), FileLock(path, LockTimeout(0)).held():
                _put_in_place(result, path)
        with _exclusive(path) as file, FileLock(path, LockTimeout(0)).held():
            remove_unfinished_repairs(path)
            kept = _free_name(path)
            created = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _copy(file, path, created, kept)
                return _repair(path, kept, work)
            except BaseException:
                # As soon as the complete result exists, files of the damaged database may be gone.
                if not repaired_name(path).exists():
                    remove_files(kept)
                raise
            finally:
                remove_files(work)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be repaired: {error.strerror} ({error.filename}).") from error


def _free_name(path: Path) -> Path:
    """Return a path for the damaged file. Call this under the lock, because another repair may take the name."""
    stem = f"{path.stem}-damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (path.with_name(f"{stem}{number}{path.suffix}") for number in ("", *range(-2, -100, -1)))
    return next(name for name in names if not name.exists())


def problems(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return descriptions of the damage to the database, or none if it is whole. The content of entries is not
    checked."""
    try:
        found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})")]
    except FAILURES as error:
        return (str(error) or type(error).__name__,)
    if found != ["ok"]:
        return tuple(line for words in found for line in words.splitlines() if not line.startswith("***"))
    if is_schema_damaged(connection):
        return ("the schema is not crow's",)
    if wrong := damaged_cells(connection):
        return wrong
    query_only = pragma(connection, "query_only")
    connection.execute("PRAGMA query_only = OFF")  # the check makes a temporary table
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
    """Return the entries that cannot be read, each with the reason."""
    return tuple(
        f"entry {row.id} ({row.kind}) of session {row.session or 'unknown'}: {error}"
        for row, error in unreadable_entries(connection)
    )


def _repair(path: Path, kept: Path, work: Path) -> Repaired:
    """Copy `kept` to `work`, and repair the copy. If anything had to be repaired, move the copy to `path`."""
    outcome: Literal["whole", "mended", "recovered"] = "whole"
    changes: list[str] = []
    lost: list[str] = []
    copy_files(kept, work)
    log = _log_of(kept)
    found: tuple[str, ...] = ()
    if log is not None and (log.damaged or log.unused):
        if log.damaged:
            found = (f"{log.damaged} of {len(log.frames)} frames in the write-ahead log are damaged",)
            what = f"changes that were only in {log.damaged} damaged frames of the write-ahead log, if there were any"
            lost.append(what)
        if log.unused:
            found += (f"the last {log.unused} frames in the write-ahead log do not continue the frames before them",)
            lost.append(
                f"changes in the last {log.unused} frames of the write-ahead log, which are old or follow a damaged"
                " frame. They are kept beside the copy"
            )
        log.apply(work)
        remove_files(work, suffixes=("-wal",))
    checked = _check(work)
    found += checked
    if found:
        outcome = "mended"
        # Even if only the log was damaged (`checked` is empty), `_mend` checks values and rebuilds indexes, because a
        # damaged frame may have left an older page. The outcome is "mended" then, because the new file has the log.
        mended = _mend(work, checked)
        if mended is not None:
            changes = mended
        else:
            outcome = "recovered"
            changes, more = _recover_copy(kept, work, log)
            lost += more
        if remaining := _check(work):
            raise StoreUnavailable(f"{path} could not be repaired ({remaining[0]}). The file was not changed.")
    with closing(sqlite3.connect(work, isolation_level=None)) as connection:
        (sessions,) = connection.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        lost += damaged_entries(connection)
    if found:
        os.replace(work, repaired_name(path))
        _put_in_place(repaired_name(path), path)
    else:
        remove_files(kept)
    return Repaired(
        outcome=outcome,
        copy=kept if found else None,
        problems=found,
        changes=tuple(changes),
        lost=tuple(lost),
        sessions=sessions,
        entries=entries,
    )


def _put_in_place(result: Path, path: Path) -> None:
    """Move the complete result of a repair to `path`. As long as `result` exists, no crow opens the file at `path`,
    whose log may be gone already."""
    with result.open("rb") as file:
        os.fsync(file.fileno())
    remove_files(path, suffixes=("-wal", "-shm", "-journal"))
    os.replace(result, path)


def _log_of(path: Path) -> WriteAheadLog | None:
    """Return the write-ahead log beside a copy of the database, or None if there is none."""
    try:
        data = Path(f"{path}-wal").read_bytes()
    except FileNotFoundError:
        return None
    with path.open("rb") as file:
        return WriteAheadLog(data, Pages(file.read(_HEADER_BYTES)).page_bytes) if data else None


def _check(path: Path) -> tuple[str, ...]:
    """Migrate this copy of the database, and return descriptions of the damage to it.

    :raises StoreTooNew: a newer crow wrote the database.
    """
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if pragma(connection, "application_id") != APPLICATION_ID:
                return ("the header does not belong to a crow database",)
            version = pragma(connection, "user_version")
            if version - VERSION >= _VERSIONS_AHEAD and has_this_schema(connection):
                connection.execute(f"PRAGMA user_version = {VERSION}")
                return (f"{_VERSION_NUMBER} is {version}, but the schema is that of version {VERSION}",)
            if version > VERSION:
                raise StoreTooNew(f"The database was written by a newer crow (schema {version}). Upgrade crow.")
            migrate(connection)
            if found := problems(connection):
                return found
            try:
                connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
                # A change reads more than this check does. So make a change, too, and roll it back.
                connection.execute("BEGIN")
                connection.execute("INSERT INTO entries_fts (rowid, text) VALUES (?, 'any text')", (_LARGEST_ROWID,))
                connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('optimize')")
                connection.execute("ROLLBACK")
            except FAILURES as error:
                return (f"{_FULL_TEXT}: {error}",)
            return ()
    except FAILURES as error:
        return (str(error) or type(error).__name__,)


def _mend(path: Path, found: Sequence[str]) -> list[str] | None:
    """If SQLite can read all rows, mend damaged values, rebuild the indexes, and return the changes. Otherwise return
    None."""
    if not all(map(_MENDABLE.match, found)):
        return None
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            witnesses = Witnesses(Pages(view))
            entries = witnesses.entries()
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")
            if {entry for (entry,) in connection.execute("SELECT id FROM entries NOT INDEXED")} != entries.keys():
                return None  # an id in the table or an index is damaged
            connection.execute("BEGIN")
            with entries_may_change(connection):
                changes = mend_entries(connection, entries)
            changes += [*mend_cells(connection, witnesses), *doubtful_titles(connection)]
            connection.execute("COMMIT")
            connection.execute("REINDEX")
            index_words(connection)
    except FAILURES:
        return None
    return None if _check(path) else changes


@contextmanager
def _exclusive(path: Path) -> Iterator[int]:
    """Open and lock the file, and yield its descriptor. Until the context ends, nothing else in this process may open
    the file, because the system drops the lock when the process closes any other handle to the file.

    :raises ArgumentError: the file does not exist, or another process has it open.
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
                    f"{path} is open in another process. Quit every editor that runs crow, then run this again."
                ) from None
        yield file
    finally:
        os.close(file)


def _copy(file: int, path: Path, created: int, target: Path) -> None:
    """Copy the database, together with its write-ahead log or journal. `file` is the database's open descriptor, and
    `created` that of the new file at `target`. This closes `created`."""
    with open(created, "wb") as copy, open(file, "rb", closefd=False) as source:
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
        copy.flush()
        os.fsync(created)
    copy_files(path, target, suffixes=("-wal", "-journal"))


def _recover_copy(kept: Path, work: Path, log: WriteAheadLog | None) -> tuple[list[str], list[str]]:
    """Make a database at `work` from the rows of `kept` and its log. Return descriptions of the changes and of the lost
    data.

    If the file is whole without its log, but with the log would lose or change entries, the log belongs to another
    file. In that case, use the file without the log.
    """
    source = work.with_name(f"{work.name}.source")
    remove_files(work)
    try:
        _fold(kept, source, log)
        if log is None:
            return _recover(source, work)
        without_log = work.with_name(f"{work.name}.alone")
        try:
            copy_files(kept, without_log, suffixes=("", "-journal"))
            is_whole = not _check(without_log)
            try:
                changes, lost = _recover(source, work)
            except StoreUnavailable:
                if not is_whole:
                    raise
                os.replace(without_log, work)
                return [], [_foreign(log)]
            if is_whole and _hides_entries(work, without_log):
                remove_files(work)
                os.replace(without_log, work)
                return [], [_foreign(log)]
            return changes, lost
        finally:
            remove_files(without_log)
    finally:
        remove_files(source)


def _foreign(log: WriteAheadLog) -> str:
    return (
        f"the write-ahead log beside the file ({len(log.frames)} frames): it does not belong to this file. It is kept"
        " beside the copy"
    )


def _hides_entries(path: Path, other: Path) -> bool:
    """Return whether an entry of the database `other` is not in the database at `path`, or differs."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS other", (str(other),))
        query = (
            "SELECT 1 FROM other.entries o LEFT JOIN main.entries e ON e.id = o.id AND e.checksum IS o.checksum"
            " WHERE e.id IS NULL LIMIT 1"
        )
        return connection.execute(query).fetchone() is not None


def _fold(kept: Path, source: Path, log: WriteAheadLog | None) -> None:
    """Copy the database to `source`, with the content of its log or journal."""
    copy_files(kept, source, suffixes=("", "-journal"))
    if log is not None:
        log.apply(source)
    if Path(f"{source}-journal").exists():  # SQLite applies the journal when it opens the file
        with suppress(*FAILURES), closing(sqlite3.connect(source)) as connection:
            connection.execute("SELECT * FROM sqlite_master").fetchall()


def _recover(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Make a database at `target` from the rows of `source`. Return descriptions of the changes and of the lost data.

    :raises StoreUnavailable: `source` contains no crow rows.
    """
    if not source.stat().st_size:
        raise StoreUnavailable("The database file is empty, so it was left as it is.")
    with source.open("rb") as file, closing(sqlite3.connect(target, isolation_level=None)) as connection:
        os.chmod(target, 0o600)
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        migrate(connection)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            connection.execute("BEGIN")
            recovery = Recovery(Pages(view), connection)
            recovery.run()
            connection.execute("COMMIT")
        if not connection.execute("SELECT 1 FROM entries UNION SELECT 1 FROM sessions").fetchone():
            raise StoreUnavailable("The file contains no crow data, so it was left as it is.")
        connection.execute("PRAGMA journal_mode = WAL")
    return recovery.changes, recovery.lost
