"""Opens, migrates and locks the database file, and runs transactions on it.

One connection writes and a second one only reads, so lists and replays never wait for a write. SQLite before 3.51.3 can
corrupt the write-ahead log (WAL) when one connection resets the log while another commits. Therefore only this module
makes checkpoints, and with SQLite before 3.51.3 every write holds a file lock. The file is opened only through SQLite.
If the process opened and closed the file in any other way, the system would drop SQLite's own locks.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from traceback import clear_frames
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from crow.domain.errors import StoreTooNew, StoreUnavailable
from crow.store.sqlite.connection import (
    FairWakeup,
    FileGone,
    FileId,
    FileLock,
    LockTimeout,
    SqliteConnection,
    WriteJob,
    check_not_in_repair,
    file_id,
    make_directory,
    pragma,
    read_leniently,
    remove_unfinished_repairs,
    run_jobs,
)
from crow.store.sqlite.failures import FAILURES, REPAIR, explain, unusable
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION, is_schema_damaged, migrate
from crow.store.sqlite.rescue import rescue

_P = ParamSpec("_P")
_S = TypeVar("_S", bound="UsesDatabase")
_T = TypeVar("_T")
Method = Callable[Concatenate[_S, sqlite3.Connection, _P], _T]
AsyncMethod = Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]]

JournalMode = Literal["wal", "delete"]

logger = logging.getLogger(__name__)

_CHECKPOINT_BYTES = 16 * 1024 * 1024
_JOURNAL_LIMIT_BYTES = 64 * 1024 * 1024
_CLOSE_S = 5.0
_BUSY_STEP_S = 0.05
_VACUUM_PAGES = 500
_OLDEST_SQLITE = (3, 36, 0)
"""Older versions have no RETURNING, or give wrong results in the view `session_list`."""

_HAS_WAL_RESET_BUG = sqlite3.sqlite_version_info < (3, 51, 3)


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


class UsesDatabase:
    """Base of the classes whose methods run inside the database's transactions."""

    def __init__(self, database: Database) -> None:
        self.database = database


def transaction(*, raise_if_moved: bool = False) -> Callable[[Method[_S, _P, _T]], AsyncMethod[_S, _P, _T]]:
    """Return a decorator that makes a method async and runs it in a write transaction (`Database.write`).

    The method gets the transaction's connection as its first argument. Callers leave that argument out.
    """
    return _runs_in(Database.write, raise_if_moved)


def snapshot(*, raise_if_moved: bool = False) -> Callable[[Method[_S, _P, _T]], AsyncMethod[_S, _P, _T]]:
    """Return a decorator like that of `transaction`, for a method that only reads. The method runs on one snapshot of
    the database (`Database.read`)."""
    return _runs_in(Database.read, raise_if_moved)


def _runs_in(
    run: Callable[..., Coroutine[Any, Any, Any]], raise_if_moved: bool
) -> Callable[[Method[_S, _P, _T]], AsyncMethod[_S, _P, _T]]:
    def decorate(method: Method[_S, _P, _T]) -> AsyncMethod[_S, _P, _T]:
        @wraps(method)
        async def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            result: _T = await run(
                self.database, lambda sql: method(self, sql, *args, **kwargs), raise_if_moved=raise_if_moved
            )
            return result

        return call

    return decorate


class Database:
    """A SQLite file and the connections to it.

    Normally, the file is open for writing. If it could not be opened for writing, it is open only for reading
    (`is_read_only`), and each write first tries again to open it for writing. `close` ends both states for good.

    If the open file is deleted or replaced, its content is copied to a new file, and the connections continue with the
    new file. Then the next call with `raise_if_moved` raises an error that tells the user what happened. Calls without
    `raise_if_moved` do not raise this error.
    """

    _writer: SqliteConnection

    def __init__(self, path: Path, *, journal_mode: JournalMode, busy_timeout_s: float) -> None:
        self.path = path
        self.journal_mode = ""
        self.warning = ""
        """A message for the user, or empty if all is well."""
        self.foreign_version = 0
        """A number that changes when another process writes to the file. Each write transaction updates it."""
        self.lock_timeout = LockTimeout(busy_timeout_s)
        self._connect = partial(SqliteConnection.open, busy_timeout_s=busy_timeout_s)
        self._wanted_journal_mode = journal_mode
        self._reader: SqliteConnection | None = None
        self._reader_lock = anyio.Lock()
        self._lock = FileLock(path, self.lock_timeout)
        self._wal_index: FileId | None = None
        self._checkpoint_at_bytes = _CHECKPOINT_BYTES
        self._jobs: deque[WriteJob[Any]] = deque()
        self._wakeup = FairWakeup()
        self._is_closed = False
        # `_exchange` is held while the connections are replaced. `_exchanges` counts the replacements.
        self._exchange = anyio.Lock(fast_acquire=True)
        self._exchanges = 0
        self._notice = ""
        """What happened to the file. It is empty after the user was told."""
        self._replaced = ""
        """What happened to the file, while another file has the path. Otherwise empty."""
        self._read_only = ""
        """Why nothing can be stored, or empty while writing works."""
        self._read_only_copy: Path | None = None
        self._stays_read_only = False

    @classmethod
    async def open(cls, path: Path, *, journal_mode: JournalMode, busy_timeout_s: float) -> Database:
        """Open the file and migrate it. If there is no file, create one. If the file is not writable, open it for
        reading only.

        :raises StoreUnavailable: the file cannot be created or read, or belongs to another program.
        :raises StoreTooNew: a newer crow wrote the file.
        """
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise StoreUnavailable(f"SQLite {sqlite3.sqlite_version} is too old; crow needs 3.36 or newer.")
        database = cls(path, journal_mode=journal_mode, busy_timeout_s=busy_timeout_s)
        try:
            await database._open_to_write()
        except StoreUnavailable as refused:
            if not _is_unwritable(refused):
                raise
            try:
                await database._open_to_read()
            except StoreUnavailable:
                raise refused from refused.__cause__
            database._read_only = database.warning = _words_of(refused)
        return database

    @classmethod
    async def open_to_read(cls, path: Path, *, busy_timeout_s: float) -> Database:
        """Open an existing file only for reading, and do not migrate it. Other processes may write to the file at the
        same time.

        :raises StoreUnavailable: there is no such file, it cannot be read, it belongs to another program, or an older
            crow wrote it.
        :raises StoreTooNew: a newer crow wrote the file.
        """
        if not await anyio.Path(path).is_file():
            raise StoreUnavailable(f"There is no database at {path}. Crow creates one when the first session starts.")
        database = cls(path, journal_mode="wal", busy_timeout_s=busy_timeout_s)
        database._stays_read_only = True
        database._read_only = f"{path} was opened only for reading."
        try:
            reader = database._connect(path, prepare=partial(check_not_in_repair, path), mode="mode=ro")
            await database._set_up_writer(reader, partial(_check_readable, path=path))
        except StoreUnavailable as refused:
            if not _is_unwritable(refused):
                raise
            try:
                await database._open_to_read()
            except StoreUnavailable:
                raise refused from refused.__cause__
        return database

    @property
    def is_read_only(self) -> bool:
        """Whether writing is impossible, because the file was opened only for reading or could not be opened for
        writing."""
        return bool(self._read_only)

    async def write(self, work: Callable[[sqlite3.Connection], _T], *, raise_if_moved: bool = False) -> _T:
        """Call `work` in a transaction. When `write` returns, the changes are on disk. Concurrent calls may share a
        commit.

        An error in `work` rolls back its changes. A call that is cancelled before it begins writes nothing. A call that
        is cancelled later still finishes and returns its result. (A task that was cancelled with `asyncio.Task.cancel`
        does not receive the result.)

        :raises StoreUnavailable: the file cannot be written. With `raise_if_moved`, this error also comes from the
            first call after the file was deleted, and from every call after another file has taken its place.
        """
        await checkpoint_if_cancelled()
        self._check_open()
        with anyio.CancelScope(shield=True):
            while True:
                await self._exchange_done()
                if raise_if_moved and (self._notice or self._replaced):
                    notice, self._notice = self._replaced or self._notice, ""
                    raise StoreUnavailable(notice)
                if self._read_only:
                    await self._retry_to_write()
                exchanges, job = self._exchanges, WriteJob(work)
                try:
                    self._jobs.append(job)
                    result = await self._run(self._writer, partial(self._commit, job=job))
                    break
                except FileGone:
                    await self._move(exchanges)
            await self._wakeup.wait()
        return result  # not inside the `with`: type checkers assume that a cancel scope may swallow errors

    async def read(self, work: Callable[[sqlite3.Connection], _T], *, raise_if_moved: bool = False) -> _T:
        """Call `work` on one snapshot of the database.

        :raises StoreUnavailable: the file cannot be read. With `raise_if_moved`, this error also comes from a call that
            finds that the file was deleted, and from every call after another file has taken its place.
        """
        while True:
            await self._exchange_done()
            if raise_if_moved and self._replaced:
                raise StoreUnavailable(self._replaced)
            exchanges = self._exchanges
            try:
                reader = await self._open_reader()
                return await self._run(reader, lambda connection: self._read(connection, work))
            except FileGone:
                with anyio.CancelScope(shield=True):
                    await self._move(exchanges)
                if raise_if_moved and self._notice:
                    raise StoreUnavailable(self._notice) from None

    async def call(self, function: Callable[[], _T]) -> _T:
        """Call a blocking function in the writer's thread, outside the event loop."""
        return await self._run(self._writer, lambda _: function())

    async def compact(self) -> None:
        """Give free pages back to the file system. Move the content of the WAL into the database as far as readers
        permit."""
        await self._run(self._writer, lambda _: remove_unfinished_repairs(self.path))
        while await self._run(self._writer, self._vacuum):
            pass
        await self._run(self._writer, self._checkpoint)

    async def close(self) -> None:
        """Finish queued work and close both connections. This takes a few seconds at most. A second call has no
        effect."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lock_timeout.end()
        with anyio.move_on_after(_CLOSE_S, shield=True) as scope:
            async with self._exchange:
                await self._close_connections()
        if scope.cancelled_caught:
            logger.warning("%s: closing took longer than %g s and was abandoned", self.path, _CLOSE_S)

    async def _close_connections(self) -> None:
        try:
            if self._reader is not None:
                await self._reader.close()
            await self._writer.run(self._before_close)
        finally:
            await self._writer.close()
            await self._remove_copy()

    async def _open_to_write(self) -> None:
        """:raises StoreUnavailable: the file cannot be created, opened or written."""
        await self._set_up_writer(self._connect(self.path, prepare=lambda: _prepare(self.path)), self._set_up)

    async def _open_to_read(self) -> None:
        """Open a file that is not writable. If it cannot be opened, open a copy of the file in the temporary directory.

        :raises StoreUnavailable: the file cannot be read.
        """
        for mode in await anyio.to_thread.run_sync(_read_modes, self.path):
            try:
                await self._set_up_writer(self._connect(self.path, mode=mode), partial(_check_version, path=self.path))
            except StoreUnavailable as error:
                logger.info("%s cannot be read with %s: %s", self.path, mode, error)
            else:
                return
        directory = Path(await anyio.to_thread.run_sync(tempfile.mkdtemp, None, "crow-"))
        copy = directory / self.path.name
        try:
            await self._set_up_writer(self._connect(copy, prepare=lambda: _copy_files(self.path, copy)), migrate)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._read_only_copy = directory

    async def _set_up_writer(
        self, connecting: Awaitable[SqliteConnection], set_up: Callable[[sqlite3.Connection], None]
    ) -> None:
        """Connect the writer, then call `set_up`. If `set_up` fails, close the connection."""
        writer = await connecting
        try:
            await self._run(writer, set_up)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await writer.close()
            raise
        self._writer = writer

    async def _retry_to_write(self) -> None:
        """Try again to open the file for writing.

        :raises StoreUnavailable: the file is still not writable.
        """
        async with self._exchange:
            if not self._read_only:
                return
            if self._stays_read_only:
                raise StoreUnavailable(self._read_only)
            reading = self._writer
            try:
                await self._open_to_write()
            except StoreUnavailable as refused:
                self._read_only = self.warning = _words_of(refused)  # the reason may have changed
                raise StoreUnavailable(self._read_only) from refused
            self._read_only = self.warning = ""
            self._exchanges += 1
            await reading.close()
            await self._remove_copy()

    async def _remove_copy(self) -> None:
        directory, self._read_only_copy = self._read_only_copy, None
        if directory is not None:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, directory, ignore_errors=True))

    async def _open_reader(self) -> SqliteConnection:
        """Return the reader. A new session reads nothing, so the reader is opened when it is first needed.

        Without a WAL, return the writer instead: two connections would keep each other waiting. On a disk without
        working file locks, one connection could even mistake the other's journal for the journal of a dead process, and
        roll back the other's changes.
        """
        if self.journal_mode != "wal":
            return self._writer
        if self._reader is not None:
            return self._reader
        async with self._reader_lock:
            if self._reader is None:
                self._check_open()
                reader = await self._connect(self.path, prepare=self._check_in_place)
                if reader.file != self._writer.file:
                    await reader.close()
                    raise FileGone
                self._reader = reader
                await self._run(reader, lambda connection: connection.execute("PRAGMA query_only = ON").close())
            return self._reader

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self.path} is closed.")

    async def _run(self, connection: SqliteConnection, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call `work` on the connection. If SQLite fails, raise an error with a message for the user."""
        self._check_open()
        try:
            return await connection.run(work)
        except FAILURES as error:
            explanation = explain(error, self.path, self.lock_timeout.timeout_s)
            if explanation is not error:
                raise explanation from error
            if await connection.run(_has_damaged_schema):
                raise StoreUnavailable(f"{self.path} is damaged ({error}). {REPAIR}") from error
            raise

    async def _exchange_done(self) -> None:
        if self._exchange.locked():
            async with self._exchange:
                pass

    async def _move(self, exchanges: int) -> None:
        """Copy the open file and continue with the copy. If `_exchanges` no longer equals `exchanges`, another call has
        already replaced the connections, so do nothing.

        :raises StoreUnavailable: no copy can be made.
        """
        async with self._exchange:
            if self._exchanges != exchanges:
                return
            file = self._writer.file
            assert file is not None, "FileGone is raised only if the writer's file is known"
            path, words = await self._writer.run(
                partial(rescue, path=self.path, opened=file, shared=self._wal_index, writing=self._writing)
            )
            if words:
                logger.error("%s", words)
                self._notice = words
            writer = await self._connect(path)
            for connection in (self._writer, self._reader):
                if connection is not None:
                    await connection.close()  # queued work raises FileGone; its callers repeat it on the new file
            self._lock = FileLock(path, self.lock_timeout)
            self._replaced = "" if path == self.path else words
            self.path, self._writer, self._reader = path, writer, None
            self._exchanges += 1
            self._checkpoint_at_bytes = _CHECKPOINT_BYTES
            await self._run(writer, self._set_up)

    # The methods below run in the connections' threads.

    def _check_in_place(self) -> None:
        """:raises FileGone: the path no longer names the open file."""
        if not self._read_only and file_id(self.path) != self._writer.file:
            raise FileGone

    def _set_up(self, connection: sqlite3.Connection) -> None:
        """Check the file before changing anything in it. Then migrate and configure it."""
        wanted = self._wanted_journal_mode
        _set_busy_timeout(connection, self.lock_timeout.timeout_s)
        version = _schema_version(connection, self.path)
        journal_mode = str(pragma(connection, "journal_mode"))
        if version < VERSION or journal_mode != wanted:
            with self._lock.held():
                if _schema_version(connection, self.path) == 0:
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

    def _commit(self, connection: sqlite3.Connection, job: WriteJob[_T]) -> _T:
        """Run all waiting jobs in one transaction, and return the result of `job`. If another call has already run
        `job`, only return the result.

        A flush to disk takes the same time for one change as for a hundred. Therefore jobs share a transaction;
        otherwise each streaming session would wait for a flush of its own.
        """
        if not job.is_done:
            jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
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

    def _run_together(self, connection: sqlite3.Connection, jobs: list[WriteJob[Any]]) -> None:
        self._check_in_place()  # before the lock, because the directory of the lock file may be gone too
        with self._writing():
            self._patiently(connection.execute, "BEGIN IMMEDIATE")
            try:
                self._check_in_place()
                self.foreign_version = pragma(connection, "data_version")
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
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or self.lock_timeout.is_over(since):
                    raise
            else:
                return

    def _read(self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
        self._check_in_place()
        with _one_snapshot(connection):
            if self.journal_mode != "wal":  # without a WAL a writer blocks readers
                self._patiently(connection.execute, "SELECT 1 FROM sqlite_master")
            return read_leniently(connection, work)

    def _writing(self) -> AbstractContextManager[None]:
        return self._lock.held() if _HAS_WAL_RESET_BUG else nullcontext()

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        if self.journal_mode == "wal" and self._wal_bytes() > 0:
            with self._writing():
                self._empty_wal(connection)

    def _vacuum(self, connection: sqlite3.Connection) -> bool:
        """Give some free pages back to the file system. Return whether there may be more free pages."""
        with self._writing():
            before: int = pragma(connection, "freelist_count")
            # `execute` would stop after one page. The pragma returns rows without columns, and Python treats such a row
            # as the end.
            self._patiently(connection.executescript, f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            if self.journal_mode == "wal" and self._wal_bytes() > self._checkpoint_at_bytes:
                self._empty_wal(connection)  # each moved page makes the WAL grow
            return before > int(pragma(connection, "freelist_count")) > 0

    def _before_close(self, connection: sqlite3.Connection) -> None:
        """Make a checkpoint and close the connection, both under the lock. Closing needs the lock, because SQLite makes
        a checkpoint when the last connection to a database is closed."""
        try:
            if self.journal_mode == "wal":
                with self._writing():
                    self._empty_wal(connection)
                    connection.close()
        except StoreUnavailable as error:
            logger.info("closing without a checkpoint: %s", error)
        finally:
            if self._replaced:  # this process works on a copy of its own, whose lock file nobody else uses
                Path(f"{self.path}.lock").unlink(missing_ok=True)

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


@contextmanager
def _one_snapshot(connection: sqlite3.Connection) -> Iterator[None]:
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


def _set_busy_timeout(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def _has_damaged_schema(connection: sqlite3.Connection) -> bool:
    try:
        return bool(pragma(connection, "user_version") == VERSION and is_schema_damaged(connection))
    except FAILURES:
        return True


def _schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's version, or 0 for an empty file.

    :raises StoreTooNew: a newer crow wrote the file.
    :raises StoreUnavailable: the file belongs to another program.
    """
    with _one_snapshot(connection):
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


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    """:raises StoreUnavailable: the version of the schema is not `VERSION`, so it would have to be migrated first."""
    if (version := _schema_version(connection, path)) != VERSION:
        raise StoreUnavailable(f"its schema is version {version}, not {VERSION}")


def _check_readable(connection: sqlite3.Connection, path: Path) -> None:
    """:raises StoreUnavailable: the version of the schema is not `VERSION`, so it would have to be migrated first."""
    if (version := _schema_version(connection, path)) != VERSION:
        raise StoreUnavailable(
            f"{path} has schema version {version}, but this command reads only version {VERSION}. Run crow sessions"
            " once to migrate the file."
        )


def _prepare(path: Path) -> None:
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


def _words_of(refused: StoreUnavailable) -> str:
    return f"{refused} Until that is fixed, nothing can be stored; stored sessions can be read."


def _is_unwritable(refused: StoreUnavailable) -> bool:
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


def _read_modes(path: Path) -> tuple[str, ...]:
    """Return the URI queries to try, best first, when opening a file that is not writable."""
    if not path.is_file() or not path.stat().st_size:
        return ()
    wal = Path(f"{path}-wal")
    if not wal.exists():
        return ("mode=ro&immutable=1",)  # no other process has the file open
    return ("mode=ro", "mode=ro&immutable=1") if not wal.stat().st_size else ("mode=ro",)


def _copy_files(path: Path, copy: Path) -> None:
    """:raises StoreUnavailable: the files cannot be read, or there is no room for a copy."""
    try:
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be copied to {copy} ({error.strerror}).") from error
