"""Says in words why the database cannot be used, and what the user can do about it.

SQLite often names only a class of errors, such as "unable to open database file". So this module asks the operating
system for the reason.
"""

from __future__ import annotations

import errno
import importlib
import os
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from crow.domain.errors import StoreUnavailable

FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""The exceptions that SQLite's functions raise. Invalid names or sizes in a damaged file cause the last two."""

REPAIR = "Quit every crow, then run crow doctor --repair: it keeps a copy and rebuilds as much as possible."
"""Advice for a damaged database."""

_ELSEWHERE = "set CROW_HOME to another directory"

_ADVICE: Mapping[int, str] = {
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE),
        "Too many files are open. Close sessions or other programs, or raise the limit (ulimit -n), then try again",
    ),
    errno.ENOSPC: "The disk is full. Free some space, or remove files if df -i shows no free inodes, then try again",
    errno.EDQUOT: "Your disk quota is used up. Free some space, then try again",
    errno.EROFS: f"The disk is mounted read-only. Mount it writable, or {_ELSEWHERE}",
    errno.EIO: f"The disk reports an error. Check it, or {_ELSEWHERE}",
    errno.ENOMEM: "The system is out of memory. End other programs, then try again",
    **dict.fromkeys(
        (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP),
        f"The file system there has no file locks. Mount it with locks, or {_ELSEWHERE} on a local disk",
    ),
}
"""Maps error numbers to what the user can do."""

fcntl: Any = None
with suppress(ImportError):  # not available on Windows
    fcntl = importlib.import_module("fcntl")


def unusable(path: Path, what: str, error: OSError) -> StoreUnavailable:
    """Return an error whose message begins with `path` and `what`, such as "cannot be opened", and says what the user
    can do."""
    code = error.errno or 0
    advice = _ADVICE.get(code, f"Make its directory writable, or {_ELSEWHERE}")
    return StoreUnavailable(f"{path} {what} ({os.strerror(code) if code else error}). {advice}.")


def explain(error: Exception, path: Path, waited_s: float) -> Exception:
    """Return a `StoreUnavailable` that tells the user what to do about `error`, which is one of `FAILURES`. If `error`
    can only come from a bug in crow, return `error` itself."""
    code = getattr(error, "sqlite_errorcode", None)
    match None if code is None else code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_PROTOCOL:
            return locked(path, waited_s)
        case sqlite3.SQLITE_FULL:
            words = "cannot grow: the disk is full. Free some space, then try again"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            words = f"is not writable ({error}). Make the file and its directory writable, or {_ELSEWHERE}"
        case sqlite3.SQLITE_CANTOPEN:
            if (reason := _obstacle(path)) is not None:
                return unusable(path, "cannot be opened", reason)
            words = f"cannot be opened ({error}). Make the file readable and writable, or {_ELSEWHERE}"
        case sqlite3.SQLITE_NOTADB:
            words = (
                f"is not a crow database ({error}). If it was one, quit every crow and run crow doctor --repair."
                f" Otherwise move it away, or {_ELSEWHERE}"
            )
        case sqlite3.SQLITE_CORRUPT:
            words = f"is damaged ({error}). {REPAIR}"
        case None if isinstance(error, MemoryError):  # a damaged size can require any amount of memory
            words = (
                f"needs more memory than crow gets, or is damaged. End other programs; if that does not help: {REPAIR}"
            )
        case None if not isinstance(error, sqlite3.Error) or "decode to UTF-8" in str(error):
            words = f"is damaged ({str(error) or type(error).__name__}). {REPAIR}"
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_NOMEM | sqlite3.SQLITE_TOOBIG | sqlite3.SQLITE_NOLFS:
            if (reason := _missing_locks(path)) is not None and code in _LOCK_FAILURES:
                return unusable(path, "cannot be locked", reason)
            words = f"cannot be read or written ({error}). Check the disk, or {_ELSEWHERE}"
        case _:
            return error
    return StoreUnavailable(f"{path} {words.rstrip('.')}.")


_LOCK_FAILURES = (sqlite3.SQLITE_IOERR_LOCK, sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_IOERR_SHMLOCK)


def locked(path: Path, waited_s: float) -> StoreUnavailable:
    """Return the error for a database that could not be locked within `waited_s` seconds."""
    if (reason := _missing_locks(path)) is not None:
        return unusable(path, "cannot be locked", reason)
    return StoreUnavailable(
        f"{path} is locked by another program (waited {waited_s:g} s). End that program, then try again."
    )


def _obstacle(path: Path) -> OSError | None:
    """Return the system's error for a new file beside `path`, or None if such a file can be made."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".crow-"):
            return None
    except OSError as error:
        return error if error.errno in _ADVICE else None


def _missing_locks(path: Path) -> OSError | None:
    """Return the system's error for a lock on a new file beside `path`, or None if locks are supported there. Where
    they are not, SQLite reports that another program holds the lock."""
    if fcntl is None:
        return None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".crow-") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP) else None
    return None
