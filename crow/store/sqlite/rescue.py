"""Saves the database when its file is deleted or replaced while crow runs."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

from crow.domain.errors import StoreUnavailable
from crow.store.files import move_to_new
from crow.store.sqlite.connection import FileId, file_id, make_directory, pragma, remove_files
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION

logger = logging.getLogger(__name__)

_ATTEMPTS = 10


def rescue(
    connection: sqlite3.Connection,
    path: Path,
    opened: FileId,
    *,
    shared: FileId | None,
    writing: Callable[[], AbstractContextManager[None]],
) -> tuple[Path, str]:
    """Copy the open database to a new file: to `path` if no file is there, otherwise to a file beside `path`.

    Return the path of the file that now has the data, and a message for the user. The message is empty if another
    process has already restored the file. `opened` identifies the open file. `shared` identifies the index of the
    file's write-ahead log (`-shm`), and is None if there is no log. All writes happen inside the context manager that
    `writing` returns.

    :raises StoreUnavailable: no copy could be made; `connection` still has all the data.
    """
    what = "deleted" if file_id(path) is None else "replaced by another file"
    try:
        make_directory(path.parent)
        with writing():
            _detach_log(connection, path, shared)
            for attempt in range(_ATTEMPTS):
                found = file_id(path)
                if found == opened or (found is not None and _holds_all(path, connection)):
                    logger.warning("%s was %s, but another process has restored it with all its content", path, what)
                    return path, ""
                if found is None and _copy(connection, path):
                    words = (
                        f"{path} was deleted while crow was running. Crow still had it open and has restored it with"
                        " all its content. Try again."
                    )
                    return path, words
                copy = _name_beside(path, attempt)
                if found is not None and _copy(connection, copy):
                    words = (
                        f"{path} was replaced by another file while crow was running. Crow leaves that file alone;"
                        f" everything stored until now is in {copy}. To continue with that copy, quit every crow and"
                        f" move it to {path}. To use the new file, restart crow."
                    )
                    return copy, words
    except (OSError, sqlite3.Error, StoreUnavailable) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreUnavailable(
            f"{path} was {what} while crow was running, and its content cannot be written to a new file ({reason})."
            " This crow process still has everything: do not quit it. Free some space, or make the directory writable,"
            " then try again."
        ) from error
    raise StoreUnavailable(f"{path} was {what} while crow was running, and other programs keep changing it. Try again.")


def _detach_log(connection: sqlite3.Connection, path: Path, shared: FileId | None) -> None:
    """Remove the files of the write-ahead log, because SQLite would otherwise apply the log to the next file at this
    path. The open connection can still read the log."""
    if shared is None or file_id(f"{path}-shm") != shared:
        return
    # A checkpoint fails while another connection reads. Then this connection still reads the log, even after the log
    # file was removed.
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    remove_files(path, suffixes=("-wal", "-shm"))


def _copy(connection: sqlite3.Connection, target: Path) -> bool:
    """Copy the database to `target`. If `target` exists, or another process writes to the database during the copy,
    return false and leave everything unchanged."""
    make_directory(target.parent)
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        version = _data_version(connection)
        with closing(sqlite3.connect(part, isolation_level=None)) as copy:
            connection.backup(copy)
        connection.execute("BEGIN IMMEDIATE")  # from here on, no other process writes to the open file
        try:
            return _data_version(connection) == version and move_to_new(part, target)
        finally:
            connection.execute("ROLLBACK")
    finally:
        remove_files(part)


def _holds_all(path: Path, connection: sqlite3.Connection) -> bool:
    """Return whether the database at `path` has every session of `connection`, with the same leaf. If so, another crow
    process has already restored the database."""
    query = (
        "SELECT s.id, s.conversation, e.id, e.parent, e.kind, e.created_ms, e.body, e.body_blob"
        " FROM sessions s LEFT JOIN entries e ON e.id = s.leaf WHERE s.deleted_ms IS NULL"
    )
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as other:
            other.execute("PRAGMA query_only = ON")
            if (pragma(other, "application_id"), pragma(other, "user_version")) != (APPLICATION_ID, VERSION):
                return False
            for session, conversation, *leaf in connection.execute(query):
                found = other.execute("SELECT conversation FROM sessions WHERE id = ?", (session,)).fetchone()
                if found != (conversation,):
                    return False
                same = "SELECT id, parent, kind, created_ms, body, body_blob FROM entries WHERE id = ?"
                if leaf[0] is not None and other.execute(same, (leaf[0],)).fetchone() != tuple(leaf):
                    return False
    except sqlite3.Error:
        return False
    return True


def _data_version(connection: sqlite3.Connection) -> int:
    """Return a number that changes whenever another connection writes to the database."""
    return int(pragma(connection, "data_version"))


def _name_beside(path: Path, attempt: int) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = f"-{attempt + 1}" if attempt else ""
    return path.with_name(f"{path.stem}-rescued-{stamp}{number}{path.suffix}")
