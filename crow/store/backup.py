"""A copy of the database while it is in use.

Strategy: SQLite's own online backup, in one step and so of one snapshot, into a file of another name beside the wanted
one; then `PRAGMA integrity_check` of the copy, and only a copy that passes takes the wanted name. Others go on reading
and writing meanwhile. The copy is a single file that needs no WAL.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from crow.domain.errors import ArgumentError, StoreUnavailable
from crow.store.connection import REPAIR

__all__ = ["Backup", "back_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A verified copy: where, how large, how many sessions and entries are in it."""

    path: str
    bytes: int
    sessions: int
    entries: int


def back_up(connection: sqlite3.Connection, path: Path) -> Backup:
    """Copy the database to `path`, which must not exist.

    :raises ArgumentError: it exists, or cannot be made.
    :raises StoreUnavailable: the copy is damaged: so is the database.
    """
    if path.exists() or path.is_symlink():
        raise ArgumentError(f"{path} exists already. Name a file that does not, so that no backup is overwritten.")
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            sessions, entries = _copy(connection, part, path)
            part.rename(path)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be made: {error.strerror}.") from error
    return Backup(path=str(path), bytes=path.stat().st_size, sessions=sessions, entries=entries)


def _copy(connection: sqlite3.Connection, part: Path, path: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(part, isolation_level=None)) as copy:
        try:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.Error as error:
            raise _unfinished(error, path) from error
        problems = _problems_of(copy)
        if problems != ["ok"]:
            raise StoreUnavailable(
                f"{path} was not made: the copy fails SQLite's integrity check ({'; '.join(problems)}), so the database"
                f" itself is damaged. {REPAIR}"
            )
        (sessions,) = copy.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = copy.execute("SELECT count(*) FROM entries").fetchone()
    return sessions, entries


def _problems_of(copy: sqlite3.Connection) -> list[str]:
    """What SQLite says of the copy: `["ok"]`, or what is wrong."""
    try:
        return [row[0] for row in copy.execute("PRAGMA integrity_check(3)")]
    except sqlite3.DatabaseError as error:
        return [str(error)]


def _unfinished(error: sqlite3.Error, path: Path) -> StoreUnavailable:
    return StoreUnavailable(f"{path} was not made: {error}. Check the disks, then try again.")
