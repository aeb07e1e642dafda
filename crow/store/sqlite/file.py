"""One open database file: its lock, its transactions and its write-ahead log (WAL).

SQLite before 3.51.3 can corrupt the WAL when one connection resets the log while another commits. Therefore only this
module makes checkpoints, and with SQLite before 3.51.3 every write holds a file lock. Apart from `__init__`, every
method gets a connection to the file and runs in the thread of that connection.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.connection import (
    FileGone,
    FileId,
    FileLock,
    LockTimeout,
    WriteJob,
    file_id,
    pragma,
    read_leniently,
    run_jobs,
)
from crow.store.sqlite.migrations import VERSION, migrate
from crow.store.sqlite.opening import one_snapshot, schema_version
from crow.store.sqlite.rescue import rescue

_T = TypeVar("_T")

JournalMode = Literal["wal", "delete"]

logger = logging.getLogger(__name__)

_CHECKPOINT_BYTES = 16 * 1024 * 1024
_JOURNAL_LIMIT_BYTES = 64 * 1024 * 1024
_BUSY_STEP_S = 0.05
_VACUUM_PAGES = 500

_HAS_WAL_RESET_BUG = sqlite3.sqlite_version_info < (3, 51, 3)


class DatabaseFile:
    """A database file that is open. If the file is deleted or replaced, the methods raise `FileGone`, and the
    `Database` continues with another object of this class."""

    def __init__(self, path: Path, opened: FileId | None, timeout: LockTimeout) -> None:
        """`opened` identifies the open file. It is None for a file that is only read, because such a file stays
        readable even if it is deleted or replaced."""
        self.path = path
        self.jobs: deque[WriteJob[Any]] = deque()
        """The writes that wait for the next call of `commit`."""
        self.journal_mode = ""
        """SQLite's journal mode. Empty until `set_up` has run, and in a file that is only read."""
        self.warning = ""
        """A message for the user, or empty if all is well."""
        self._opened = opened
        self._timeout = timeout
        self._lock = FileLock(path, timeout)
        self._wal_index: FileId | None = None
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES

    def check_in_place(self) -> None:
        """:raises FileGone: the path no longer names the open file."""
        if self._opened is not None and file_id(self.path) != self._opened:
            raise FileGone

    def set_up(self, connection: sqlite3.Connection, wanted: JournalMode) -> None:
        """Check the file before changing anything in it. Then migrate and configure it. `wanted` is the journal mode to
        use if SQLite can use it here.

        :raises StoreTooNew: a newer crow wrote the file.
        :raises StoreUnavailable: the file belongs to another program, or cannot be locked.
        """
        _set_busy_timeout(connection, self._timeout.timeout_s)
        version = schema_version(connection, self.path)
        journal_mode = str(pragma(connection, "journal_mode"))
        if version < VERSION or journal_mode != wanted:
            with self._lock.held():
                if schema_version(connection, self.path) == 0:
                    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
                    connection.execute("PRAGMA synchronous = NORMAL")  # an empty database cannot lose anything
                journal_mode = str(pragma(connection, f"journal_mode = {wanted}"))
                migrate(connection)
        if wanted == "wal" and journal_mode != "wal":
            self.warning = (
                f"SQLite cannot use a write-ahead log at {self.path} (a network disk?). Crow works there, but more"
                " slowly, and only one machine may use it at a time. Preferably, set CROW_HOME to a directory on a"
                " local disk."
            )
            logger.warning("%s Using journal mode %s.", self.warning, journal_mode)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_LIMIT_BYTES}")
        _set_busy_timeout(connection, _BUSY_STEP_S)
        self.journal_mode = journal_mode
        self._wal_index = file_id(f"{self.path}-shm") if journal_mode == "wal" else None

    def read(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call `work` on one snapshot of the database."""
        self.check_in_place()
        with one_snapshot(connection):
            if self.journal_mode != "wal":  # without a WAL a writer blocks readers
                self._patiently(connection.execute, "SELECT 1 FROM sqlite_master")
            return read_leniently(connection, work)

    def commit(self, connection: sqlite3.Connection, job: WriteJob[_T]) -> _T:
        """Run all waiting jobs in one transaction, and return the result of `job`. If another call has already run
        `job`, only return the result.

        A flush to disk takes the same time for one change as for a hundred. Therefore jobs share a transaction;
        otherwise each streaming session would wait for a flush of its own.
        """
        if not job.is_done:
            jobs = [self.jobs.popleft() for _ in range(len(self.jobs))]
            failure: Exception | None = None
            try:
                self._run_together(connection, jobs)
            except Exception as error:  # noqa: BLE001  each job's caller gets it
                failure = error
            for one in jobs:
                one.error, one.is_done = one.error or failure, True
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]  # it was set, because there was no error

    def checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move the content of the WAL into the database as far as readers permit."""
        if self.journal_mode == "wal" and self._wal_bytes() > 0:
            with self._writing():
                self._empty_wal(connection)

    def vacuum(self, connection: sqlite3.Connection) -> bool:
        """Give some free pages back to the file system. Return whether there may be more free pages."""
        with self._writing():
            before: int = pragma(connection, "freelist_count")
            # `execute` would stop after one page. The pragma returns rows without columns, and Python treats such a row
            # as the end.
            self._patiently(connection.executescript, f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            if self.journal_mode == "wal" and self._wal_bytes() > self._checkpoint_at_bytes:
                self._empty_wal(connection)  # each moved page makes the WAL grow
            return before > int(pragma(connection, "freelist_count")) > 0

    def move(self, connection: sqlite3.Connection) -> tuple[Path, str]:
        """Copy the open file to a new one, because the path no longer names it. See `rescue` for the result."""
        assert self._opened is not None, "FileGone is raised only if the open file is known"
        return rescue(connection, self.path, self._opened, shared=self._wal_index, writing=self._writing)

    def close(self, connection: sqlite3.Connection) -> None:
        """Make a checkpoint and close the connection, both under the lock. Closing needs the lock, because SQLite makes
        a checkpoint when the last connection to a database is closed."""
        try:
            if self.journal_mode == "wal":
                with self._writing():
                    self._empty_wal(connection)
                    connection.close()
        except StoreUnavailable as error:
            logger.info("closing without a checkpoint: %s", error)

    def _run_together(self, connection: sqlite3.Connection, jobs: list[WriteJob[Any]]) -> None:
        self.check_in_place()  # before the lock, because the directory of the lock file may be gone too
        with self._writing():
            self._patiently(connection.execute, "BEGIN IMMEDIATE")
            try:
                self.check_in_place()
                run_jobs(connection, jobs)
                self._patiently(connection.execute, "COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            if self.journal_mode == "wal" and self._wal_bytes() > self._checkpoint_at_bytes:
                self._empty_wal(connection)

    def _patiently(self, execute: Callable[[str], sqlite3.Cursor], statement: str) -> None:
        """Execute a statement that other programs may block. Wait in short steps: SQLite's own wait would not end when
        the store closes."""
        since = time.monotonic()
        while True:
            try:
                execute(statement).close()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or self._timeout.is_over(since):
                    raise
            else:
                return

    def _writing(self) -> AbstractContextManager[None]:
        return self._lock.held() if _HAS_WAL_RESET_BUG else nullcontext()

    def _empty_wal(self, connection: sqlite3.Connection) -> None:
        """Make a checkpoint. A failure is only logged, because the preceding transaction is already on disk."""
        try:
            _set_busy_timeout(connection, 0)
            is_busy = bool(pragma(connection, "wal_checkpoint(TRUNCATE)"))
        except sqlite3.Error as error:
            logger.warning("%s: the checkpoint failed (%s); the WAL keeps growing", self.path, error)
            is_busy = True
        finally:
            _set_busy_timeout(connection, _BUSY_STEP_S)
        # While another connection reads, the WAL cannot be emptied. The next attempt is due when the WAL has grown by
        # another `_CHECKPOINT_BYTES`.
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES + (self._wal_bytes() if is_busy else 0)

    def _wal_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0


def _set_busy_timeout(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
