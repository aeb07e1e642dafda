"""Waiting for other processes: a lock beside the database, and how long to be patient.

Strategy: `flock` on a file of its own, tried again and again, since a wait inside the system could be ended neither by
a deadline nor by the store's closing. It blocks: only ever used in the writer's thread. Where a system has no such
locks, SQLite's own must do. Knows no SQL.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from crow.domain.errors import StoreUnavailable

__all__ = ["FileId", "FileLock", "Patience", "file_id", "locked"]

logger = logging.getLogger(__name__)

_CLOSING_PATIENCE_S = 0.4
"""Well above what processes that take turns keep each other waiting, and within what an editor grants to an exit."""

_ATTEMPTS = 5

fcntl: Any = None
with suppress(ImportError):  # Windows
    fcntl = importlib.import_module("fcntl")


FileId: TypeAlias = tuple[int, int]
"""Device and inode."""


def file_id(path: Path | str) -> FileId | None:
    """The file that `path` names; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Patience:
    """How long to wait for others: `timeout_s` each time, but no longer than a moment once the process ends."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends_at = math.inf

    def end(self) -> None:
        """The process ends, or the store closes; only the first time counts."""
        self._ends_at = min(self._ends_at, time.monotonic() + _CLOSING_PATIENCE_S)

    def is_over(self, since: float) -> bool:
        """Whether a wait that began at `since` (`time.monotonic`) has been long enough."""
        return time.monotonic() > min(since + self.timeout_s, self._ends_at)


class FileLock:
    """An advisory lock beside the database, held by one writer of all processes at a time. Used in one thread."""

    def __init__(self, path: Path, patience: Patience) -> None:
        self._path = path
        self._patience = patience
        self._file: int | None = None
        self._is_supported = fcntl is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock, hold it, give it back.

        :raises StoreUnavailable: it cannot be made, or somebody else held it for too long.
        """
        file = self._open()
        if self._is_supported:
            self._acquire(file)
            for _ in range(_ATTEMPTS):
                if self._is_there(file):
                    break
                self.close()  # somebody deleted it: others lock the file that comes after it
                file = self._open()
                self._acquire(file)
        try:
            yield
        finally:
            if self._is_supported:
                fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close its file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _is_there(self, file: int) -> bool:
        """Whether the path still names the file that is open, or cannot name any."""
        opened, found = os.fstat(file), file_id(f"{self._path}.lock")
        return found == (opened.st_dev, opened.st_ino) or (found is None and not self._path.parent.is_dir())

    def _open(self) -> int:
        path = f"{self._path}.lock"
        try:
            if self._file is None:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreUnavailable(
                f"{path} cannot be opened ({error.strerror}). Make its directory writable, or set CROW_HOME to"
                " another directory."
            ) from error
        return self._file

    def _acquire(self, file: int) -> None:
        since = time.monotonic()
        pause_s = 0.0002
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._patience.is_over(since):
                    raise locked(self._path, self._patience.timeout_s) from None
            except OSError as error:
                self._is_supported = False
                logger.warning("%s: there are no file locks here (%s)", self._path, error.strerror)
                return
            else:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.005)


def locked(path: Path, waited_s: float) -> StoreUnavailable:
    """The error of a wait that took too long."""
    return StoreUnavailable(
        f"{path} is locked by another program (waited {waited_s:g} s). End that program, then try again."
    )
