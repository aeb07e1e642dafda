"""Checks a database file before it is used, and prepares a file that does not exist yet or is not writable."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import clear_frames

from crow.domain.errors import StoreTooNew, StoreUnavailable
from crow.store.sqlite.connection import check_not_in_repair, make_directory, pragma
from crow.store.sqlite.failures import FAILURES, unusable
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION, is_schema_damaged

_OLDEST_SQLITE = (3, 36, 0)
"""Older versions have no RETURNING, or give wrong results in the view `session_list`."""


def check_sqlite() -> None:
    """:raises StoreUnavailable: this version of SQLite is too old."""
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise StoreUnavailable(f"SQLite {sqlite3.sqlite_version} is too old; crow needs 3.36 or newer.")


def prepare(path: Path) -> None:
    """Make the directory (0700) and an empty file (0600), because SQLite would create a file that everybody can read.

    :raises StoreUnavailable: the directory or the file cannot be created, or the file is not writable.
    """
    check_not_in_repair(path)
    try:
        make_directory(path.parent)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if path.is_file() and not os.access(path, os.W_OK):
            raise StoreUnavailable(
                f"{path} is not writable. Make the file and its directory writable, or set CROW_HOME to another"
                " directory."
            ) from PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mode = path.stat().st_mode
        if mode & 0o077 and path.is_file():
            path.chmod(mode & 0o700)
    except OSError as error:
        raise unusable(path, f"cannot be created at {error.filename}", error) from error


def is_unwritable(refused: StoreUnavailable) -> bool:
    """Return whether the error says that the file could not be opened because the file, its directory or its disk is
    not writable."""
    code = getattr(refused.__cause__, "sqlite_errorcode", 0) & 0xFF
    return isinstance(refused.__cause__, OSError) or code in (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
    )


def read_modes(path: Path) -> tuple[str, ...]:
    """Return the URI queries to try, best first, when opening a file that is not writable."""
    if not path.is_file() or not path.stat().st_size:
        return ()
    wal = Path(f"{path}-wal")
    if not wal.exists():
        return ("mode=ro&immutable=1",)  # no other process has the file open
    return ("mode=ro", "mode=ro&immutable=1") if not wal.stat().st_size else ("mode=ro",)


def copy_to_read(path: Path, copy: Path) -> None:
    """Copy a database that is not writable, and its write-ahead log.

    :raises StoreUnavailable: the files cannot be read, or there is no room for a copy.
    """
    try:
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be copied to {copy} ({error.strerror}).") from error


def schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version, or 0 for an empty file.

    :raises StoreTooNew: a newer crow wrote the file.
    :raises StoreUnavailable: the file belongs to another program.
    """
    with one_snapshot(connection):
        version: int = pragma(connection, "user_version")
        application_id = pragma(connection, "application_id")
        (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (version or objects) and application_id != APPLICATION_ID:
        raise StoreUnavailable(
            f"{path} is the database of another program. Move it away, or set CROW_HOME to another directory."
        )
    if version > VERSION:
        raise StoreTooNew(
            f"{path} was written by a newer crow: its schema is version {version}, but this crow only knows {VERSION}."
            " Upgrade crow, or set CROW_HOME to another directory."
        )
    return version


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """:raises StoreUnavailable: the version of the schema is not `VERSION`, so it would have to be migrated first."""
    if (version := schema_version(connection, path)) != VERSION:
        raise StoreUnavailable(
            f"{path} has schema version {version}, but this command reads only version {VERSION}. Run crow sessions"
            " once to migrate the file."
        )


def has_damaged_schema(connection: sqlite3.Connection) -> bool:
    """Return whether a part of the schema is missing or altered, or cannot be read. The file must have been
    migrated."""
    try:
        return bool(pragma(connection, "user_version") == VERSION and is_schema_damaged(connection))
    except FAILURES:
        return True


@contextmanager
def one_snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Let all statements of the `with` block read the same state of the database."""
    connection.execute("BEGIN")
    try:
        yield
    except BaseException as error:
        # The error keeps the local variables of functions that have failed. A cursor among them would keep this
        # snapshot open even after the rollback, and all later reads of this connection would see the old state.
        clear_frames(error.__traceback__)
        raise
    finally:
        if connection.in_transaction:  # after some errors, SQLite has already ended the transaction
            connection.execute("ROLLBACK")
