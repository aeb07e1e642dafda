"""Saves the database when its file is deleted or replaced while crow runs."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.connection import FileId, file_id, make_directory
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION

__all__ = ["Rescue", "rescue"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """Where all that was stored is now. `words` tell the user what happened; empty: nothing was lost or moved.

    `is_in_place` is false if another file has taken the database's path: then `path` is a copy beside it.
    """

    path: Path
    words: str
    is_in_place: bool


def rescue(
    connection: sqlite3.Connection,
    path: Path,
    opened: FileId,
    *,
    shared: FileId | None,
    writing: Callable[[], AbstractContextManager[None]],
) -> Rescue:
    """Copy what `connection` holds open to a new file: to `path` where nothing is, else to one beside it.

    `opened` is the file that is open, and `shared` its index of the write-ahead log (`-shm`), None without one;
    `writing` surrounds what writes.

    :raises StoreUnavailable: no copy could be made; `connection` still holds everything.
    """
    what = "deleted" if file_id(path) is None else "replaced by another file"
    try:
        make_directory(path.parent)
        with writing():
            _let_go_of_log(connection, path, shared)
            for _ in range(_ATTEMPTS):
                found = file_id(path)
                if found == opened or (found is not None and _holds_all(path, connection)):
                    logger.warning("%s was %s, and is there again with all that it held", path, what)
                    return Rescue(path=path, words="", is_in_place=True)
                target = path if found is None else _beside(path)
                if _copy(connection, target):
                    return _done(path, target)
    except (OSError, sqlite3.Error, StoreUnavailable) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreUnavailable(
            f"{path} was {what} while crow was running, and what it held cannot be written to a new file ({reason})."
            " This crow still has all of it: do not close it. Free some space, or make the directory writable, then"
            " send this again."
        ) from error
    raise StoreUnavailable(f"{path} was {what} while crow was running, and others keep writing to it. Send this again.")


def _done(path: Path, target: Path) -> Rescue:
    if target == path:
        words = (
            f"{path} was deleted while crow was running. Crow has put it back with everything in it, from the file that"
            " it still held open. Send this again."
        )
        return Rescue(path=path, words=words, is_in_place=True)
    words = (
        f"{path} was replaced by another file while crow was running. Crow leaves that file alone; everything stored"
        f" until now is in {target}. To go on with it, close every crow and move it to {path}. To use the new file,"
        " restart crow."
    )
    return Rescue(path=target, words=words, is_in_place=False)


def _let_go_of_log(connection: sqlite3.Connection, path: Path, shared: FileId | None) -> None:
    """Leave no write-ahead log under the path's name: SQLite would take it for that of the file that comes next."""
    if shared is None or file_id(f"{path}-shm") != shared:
        return
    with suppress(sqlite3.Error):  # somebody reads: the log is unlinked all the same, and open here
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def _copy(connection: sqlite3.Connection, target: Path) -> bool:
    """Copy the database to `target`, which must not exist; false, and nothing is done, if it does, or if somebody wrote
    meanwhile."""
    make_directory(target.parent)
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    with suppress(FileNotFoundError):
        part.unlink()
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        version = _data_version(connection)
        with closing(sqlite3.connect(part, isolation_level=None)) as copy:
            connection.backup(copy)
        connection.execute("BEGIN IMMEDIATE")  # nobody who has the file open writes to it from here on
        try:
            return _data_version(connection) == version and _give_name(part, target)
        finally:
            connection.execute("ROLLBACK")
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                os.unlink(f"{part}{suffix}")


def _give_name(part: Path, target: Path) -> bool:
    """Name a file, but never instead of another."""
    try:
        os.link(part, target)
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        os.replace(part, target)
    return True


def _holds_all(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether the database at `path` has every session that `connection` has, as far as they go there: another crow
    has put it back, say."""
    query = (
        "SELECT s.id, s.conversation, e.id, e.parent, e.kind, e.created_ms, e.body, e.body_blob"
        " FROM sessions s LEFT JOIN entries e ON e.id = s.leaf WHERE s.deleted_ms IS NULL"
    )
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=1)) as other:
            other.execute("PRAGMA query_only = ON")
            (application_id,) = other.execute("PRAGMA application_id").fetchone()
            (version,) = other.execute("PRAGMA user_version").fetchone()
            if (application_id, version) != (APPLICATION_ID, VERSION):
                return False
            for row in connection.execute(query):
                session, conversation, *leaf = row
                found = other.execute("SELECT conversation FROM sessions WHERE id = ?", (session,)).fetchone()
                if found != (conversation,):
                    return False
                same = "SELECT id, parent, kind, created_ms, body, body_blob FROM entries WHERE id = ?"
                if leaf[0] is not None and list(other.execute(same, (leaf[0],)).fetchone() or ()) != leaf:
                    return False
    except sqlite3.Error:
        return False
    return True


def _data_version(connection: sqlite3.Connection) -> int:
    """Another number whenever another connection has written."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def _beside(path: Path) -> Path:
    """A name beside `path` that no file has."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{path.stem}-rescued-{stamp}{suffix}{path.suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(path.with_name(name) for name in names if not path.with_name(name).exists())
