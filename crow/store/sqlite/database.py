"""The SQLite database of a store: its connections, and its reads and writes.

One connection writes and a second one only reads, so lists and replays never wait for a write. The file is opened only
through SQLite. If the process opened and closed the file in any other way, the system would drop SQLite's own locks.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from crow.domain.errors import StoreUnavailable
from crow.store.sqlite.connection import (
    FairWakeup,
    FileGone,
    LockTimeout,
    SqliteConnection,
    WriteJob,
    check_not_in_repair,
    remove_unfinished_repairs,
)
from crow.store.sqlite.failures import FAILURES, REPAIR, explain
from crow.store.sqlite.file import DatabaseFile, JournalMode
from crow.store.sqlite.migrations import migrate
from crow.store.sqlite.opening import (
    check_sqlite,
    check_version,
    copy_to_read,
    has_damaged_schema,
    is_unwritable,
    prepare,
    read_modes,
)

_P = ParamSpec("_P")
_S = TypeVar("_S", bound="UsesDatabase")
_T = TypeVar("_T")
Method = Callable[Concatenate[_S, sqlite3.Connection, _P], _T]
AsyncMethod = Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]]

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0


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


class State(Enum):
    """The use that a `Database` can make of its file."""

    WRITABLE = "writable"
    """The normal state."""
    UNWRITABLE = "unwritable"
    """The file could not be opened for writing, so it is open only for reading. Each write first tries again to open it
    for writing; if that succeeds, the state becomes WRITABLE."""
    READ_ONLY = "read only"
    """`open_to_read` has opened the file. Each write fails."""
    MOVED = "moved"
    """Another file has taken the place of the open one. The content of the open file was copied to a new file in the
    same directory, which is used from now on. Calls with `raise_if_moved` fail."""


class Database:
    """A SQLite file and the connections to it.

    `open` leads to the state WRITABLE or UNWRITABLE, and `open_to_read` to READ_ONLY. If the open file is deleted while
    the state is WRITABLE, a read or write copies its content to a new file at the same path, and continues there. The
    state stays WRITABLE, and the next write with `raise_if_moved` raises an error that tells the user what happened. If
    another file has the path, the copy gets another name, and the state becomes MOVED. After `close`, each call fails.
    """

    _writer: SqliteConnection

    def __init__(self, path: Path, *, journal_mode: JournalMode, busy_timeout_s: float) -> None:
        self.lock_timeout = LockTimeout(busy_timeout_s)
        self._connect = partial(SqliteConnection.open, busy_timeout_s=busy_timeout_s)
        self._wanted_journal_mode = journal_mode
        self._file = DatabaseFile(path, None, self.lock_timeout)
        self._reader: SqliteConnection | None = None
        self._reader_lock = anyio.Lock()
        self._wakeup = FairWakeup()
        self._exchange = anyio.Lock(fast_acquire=True)
        """Held while the file and its connections are replaced."""
        self._is_closed = False
        self._state = State.WRITABLE
        self._words = ""
        """Why the state is UNWRITABLE, READ_ONLY or MOVED."""
        self._notice = ""
        """What happened to the file, if it was deleted. Empty after the user was told."""
        self._read_only_copy: Path | None = None
        """The temporary directory with the copy that is open, if the file itself could not be opened."""

    @classmethod
    async def open(cls, path: Path, *, journal_mode: JournalMode, busy_timeout_s: float) -> Database:
        """Open the file and migrate it. If there is no file, create one. If the file is not writable, open it for
        reading only.

        :raises StoreUnavailable: the file cannot be created or read, or belongs to another program.
        :raises StoreTooNew: a newer crow wrote the file.
        """
        check_sqlite()
        database = cls(path, journal_mode=journal_mode, busy_timeout_s=busy_timeout_s)
        try:
            await database._open_to_write()
        except StoreUnavailable as refused:
            await database._open_unwritable(refused)
            database._set_unwritable(refused)
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
        database._state, database._words = State.READ_ONLY, f"{path} was opened only for reading."
        try:
            writer = await database._connect(path, prepare=partial(check_not_in_repair, path), mode="mode=ro")
            await database._use(writer, database._file, partial(check_version, path=path))
        except StoreUnavailable as refused:
            await database._open_unwritable(refused)
        return database

    @property
    def path(self) -> Path:
        """The path of the open file. In the state MOVED, this is the path of the copy."""
        return self._file.path

    @property
    def journal_mode(self) -> str:
        """SQLite's journal mode, or empty if the file is open only for reading."""
        return self._file.journal_mode

    @property
    def warning(self) -> str:
        """A message for the user, or empty if all is well."""
        return self._words if self._state is State.UNWRITABLE else self._file.warning

    @property
    def is_read_only(self) -> bool:
        """Whether writing is impossible, because the file was opened only for reading or could not be opened for
        writing."""
        return self._state in (State.UNWRITABLE, State.READ_ONLY)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    async def write(self, work: Callable[[sqlite3.Connection], _T], *, raise_if_moved: bool = False) -> _T:
        """Call `work` in a transaction. When `write` returns, the changes are on disk. Concurrent calls may share a
        commit.

        An error in `work` rolls back its changes. A call that is cancelled before it begins writes nothing. A call that
        is cancelled later still finishes and returns its result. (A task that was cancelled with `asyncio.Task.cancel`
        does not receive the result.)

        :raises StoreUnavailable: the file cannot be written. With `raise_if_moved`, this error also comes from the
            first call after the file was deleted, and from every call in the state MOVED.
        """
        await checkpoint_if_cancelled()
        self._check_open()
        with anyio.CancelScope(shield=True):
            while True:
                await self._exchange_done()
                if raise_if_moved and (self._notice or self._state is State.MOVED):
                    words, self._notice = self._words or self._notice, ""
                    raise StoreUnavailable(words)
                if self.is_read_only:
                    await self._retry_to_write()
                file, job = self._file, WriteJob(work)
                try:
                    file.jobs.append(job)
                    result = await self._run(self._writer, partial(file.commit, job=job))
                    break
                except FileGone:
                    await self._move(file)
            await self._wakeup.wait()
        return result  # not inside the `with`: type checkers assume that a cancel scope may swallow errors

    async def read(self, work: Callable[[sqlite3.Connection], _T], *, raise_if_moved: bool = False) -> _T:
        """Call `work` on one snapshot of the database.

        :raises StoreUnavailable: the file cannot be read. With `raise_if_moved`, this error also comes from a call that
            finds that the file was deleted, and from every call in the state MOVED.
        """
        while True:
            await self._exchange_done()
            if raise_if_moved and self._state is State.MOVED:
                raise StoreUnavailable(self._words)
            file = self._file
            try:
                reader = await self._open_reader()
                return await self._run(reader, partial(file.read, work=work))
            except FileGone:
                with anyio.CancelScope(shield=True):
                    await self._move(file)
                if raise_if_moved and self._notice:
                    raise StoreUnavailable(self._notice) from None

    async def call(self, function: Callable[[], _T]) -> _T:
        """Call a blocking function in the writer's thread, outside the event loop."""
        return await self._run(self._writer, lambda _: function())

    async def compact(self) -> None:
        """Give free pages back to the file system. Move the content of the WAL into the database as far as readers
        permit."""
        await self._run(self._writer, lambda _: remove_unfinished_repairs(self.path))
        while await self._run(self._writer, self._file.vacuum):
            pass
        await self._run(self._writer, self._file.checkpoint)

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
            await self._writer.run(self._file.close)
        finally:
            await self._writer.close()
            await self._remove_copy()
            if self._state is State.MOVED:  # nobody else uses the lock file of the copy
                await anyio.Path(f"{self.path}.lock").unlink(missing_ok=True)

    async def _open_to_write(self) -> None:
        """:raises StoreUnavailable: the file cannot be created, opened or written."""
        writer = await self._connect(self.path, prepare=lambda: prepare(self.path))
        file = DatabaseFile(self.path, writer.file, self.lock_timeout)
        await self._use(writer, file, partial(file.set_up, wanted=self._wanted_journal_mode))

    async def _open_unwritable(self, refused: StoreUnavailable) -> None:
        """Open a file that is not writable, after an attempt to open it has failed with the error `refused`. If the
        file itself cannot be opened, open a copy of it in the temporary directory.

        :raises StoreUnavailable: the file cannot be read, or `refused` has another reason.
        """
        if not is_unwritable(refused):
            raise refused
        try:
            for mode in await anyio.to_thread.run_sync(read_modes, self.path):
                try:
                    reader = await self._connect(self.path, mode=mode)
                    await self._use(reader, self._file, partial(check_version, path=self.path))
                except StoreUnavailable as error:
                    logger.info("%s cannot be read with %s: %s", self.path, mode, error)
                else:
                    return
            await self._open_copy()
        except StoreUnavailable:
            raise refused from refused.__cause__

    async def _open_copy(self) -> None:
        directory = Path(await anyio.to_thread.run_sync(tempfile.mkdtemp, None, "crow-"))
        copy = directory / self.path.name
        try:
            reader = await self._connect(copy, prepare=lambda: copy_to_read(self.path, copy))
            await self._use(reader, self._file, migrate)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._read_only_copy = directory

    async def _use(
        self, writer: SqliteConnection, file: DatabaseFile, set_up: Callable[[sqlite3.Connection], None]
    ) -> None:
        """Call `set_up` with the new connection, and use it and its file from now on. If `set_up` fails, close the
        connection."""
        try:
            await self._run(writer, set_up)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await writer.close()
            raise
        self._writer, self._file = writer, file

    def _set_unwritable(self, refused: StoreUnavailable) -> None:
        self._state = State.UNWRITABLE
        self._words = f"{refused} Until that is fixed, nothing can be stored; stored sessions can be read."

    async def _retry_to_write(self) -> None:
        """Try again to open the file for writing.

        :raises StoreUnavailable: the file is still not writable.
        """
        async with self._exchange:
            if self._state is State.READ_ONLY:
                raise StoreUnavailable(self._words)
            if self._state is not State.UNWRITABLE:
                return
            reading = self._writer
            try:
                await self._open_to_write()
            except StoreUnavailable as refused:
                self._set_unwritable(refused)  # the reason may have changed
                raise StoreUnavailable(self._words) from refused
            self._state, self._words = State.WRITABLE, ""
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
                reader = await self._connect(self.path, prepare=self._file.check_in_place)
                if reader.file != self._writer.file:
                    await reader.close()
                    raise FileGone
                self._reader = reader
                await self._run(reader, lambda connection: connection.execute("PRAGMA query_only = ON").close())
            return self._reader

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
            if await connection.run(has_damaged_schema):
                raise StoreUnavailable(f"{self.path} is damaged ({error}). {REPAIR}") from error
            raise

    async def _exchange_done(self) -> None:
        if self._exchange.locked():
            async with self._exchange:
                pass

    async def _move(self, file: DatabaseFile) -> None:
        """Copy the open file and continue with the copy. If `file` is no longer the open file, another call has done
        that already.

        :raises StoreUnavailable: no copy can be made.
        """
        async with self._exchange:
            if self._file is not file:
                return
            path, words = await self._writer.run(file.move)
            if words:
                logger.error("%s", words)
                self._notice = words
            writer = await self._connect(path)
            # Close the old connections before the copy is set up, because SQLite deletes the WAL at the path of a file
            # that it closes. Writes that still wait for the old connection raise FileGone, and are repeated on the new
            # file.
            for connection in (self._writer, self._reader):
                if connection is not None:
                    await connection.close()
            self._file = DatabaseFile(path, writer.file, self.lock_timeout)
            self._writer, self._reader = writer, None
            if path != file.path:
                self._state, self._words = State.MOVED, words
            await self._run(writer, partial(self._file.set_up, wanted=self._wanted_journal_mode))
