"""Connections to SQLite that run in threads, file locks, and writes that share a transaction."""

from __future__ import annotations

import asyncio
import glob
import logging
import math
import os
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeAlias, TypeVar

import aiosqlite
import anyio

from crow.domain.errors import StoreUnavailable
from crow.store.codec import mend
from crow.store.sqlite.failures import FAILURES, explain, fcntl, locked, unusable

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

_ATTEMPTS = 5

_CLOSING_TIMEOUT_S = 0.4
"""How long to wait for a lock when the process ends. Even when several processes write in turn, each holds the lock for
less time than this. Editors give crow more time than this to exit."""

FileId: TypeAlias = tuple[int, int]
"""Device and inode."""


def file_id(path: Path | str) -> FileId | None:
    """Identify the file at `path`. Return None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, accessible only to their owner. Existing directories are not changed.

    :raises OSError: the directory cannot be created.
    """
    if not path.is_dir():
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)


def copy_files(source: Path, target: Path, *, suffixes: Sequence[str] = ("", "-wal", "-journal")) -> None:
    """Copy a database, and its write-ahead log and journal if they exist.

    :raises OSError: a file cannot be copied.
    """
    for suffix in suffixes:
        with suppress(FileNotFoundError):
            shutil.copy(f"{source}{suffix}", f"{target}{suffix}")


def remove_files(path: Path, *, suffixes: Sequence[str] = ("", "-wal", "-shm", "-journal")) -> None:
    """Remove a database and the files that SQLite keeps beside it.

    :raises OSError: a file cannot be removed.
    """
    for suffix in suffixes:
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def repaired_name(path: Path) -> Path:
    """Return the path at which a repair keeps its complete result until that result replaces the database at `path`."""
    return path.with_name(f"{path.name}.repaired")


def check_not_in_repair(path: Path) -> None:
    """:raises StoreUnavailable: a repair of the database was killed while it put its result in place."""
    if repaired_name(path).exists():
        raise StoreUnavailable(
            f"A repair of {path} was interrupted. Run crow doctor --repair: it puts the repaired file in place."
        )


def remove_unfinished_repairs(path: Path) -> None:
    """Remove the files of repairs that were killed before their result was complete. Call this while the database is
    open or locked, so that no repair runs. A file that cannot be removed stays, because it does no harm."""
    if fcntl is not None:
        for file in path.parent.glob(f"{glob.escape(path.name)}.repair-*"):
            with suppress(OSError):
                file.unlink()


def pragma(connection: sqlite3.Connection, statement: str) -> Any:
    """Run a pragma and return the first value of its result."""
    return connection.execute(f"PRAGMA {statement}").fetchone()[0]


def insert(connection: sqlite3.Connection, table: str, values: Mapping[str, object]) -> int:
    """Insert a row and return its rowid."""
    statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES (:{', :'.join(values)})"  # noqa: S608  constants
    rowid = connection.execute(statement, values).lastrowid
    assert rowid is not None
    return rowid


def read_leniently(
    connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T], *, undo: str = "SELECT 1"
) -> _T:
    """Call `work`. If it reads a text that is not valid UTF-8, execute `undo` and call it again. From then on, invalid
    bytes in the texts that this connection reads are replaced. So one damaged text does not hide other rows, and
    reading an undamaged file takes no extra time."""
    try:
        return work(connection)
    except (sqlite3.OperationalError, UnicodeDecodeError) as error:
        if connection.text_factory is not str or "decode" not in str(error):
            raise
        # Log only the error's text: a log record that holds the error would keep the statement open, and with it a lock
        # on the file.
        logger.warning("the database has a damaged text (%s); replacing its invalid bytes", str(error))
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        connection.execute(undo)
        return work(connection)


class FileGone(Exception):
    """The database's path no longer names the open file. Callers of the store never get this error."""


class SqliteConnection:
    """A connection in autocommit mode that runs whole functions in its thread. Whoever opens it must close it.

    aiosqlite runs one statement at a time. Between two statements of one task, another task may use the connection, and
    a cancelled task leaves its transaction open. In this class, a function runs all its statements without
    interruption. A function that has started always finishes, and only then does the next function start.

    For this, `commit` of the connection (see `_FunctionConnection`) runs a function. aiosqlite calls it in the
    connection's thread, like every method of the connection.
    """

    def __init__(self, path: Path, connection: aiosqlite.Connection, opened: OpenedFile) -> None:
        self.path = path
        self.file = opened.file
        """Identifies the open file, or None if the file is unknown."""
        self._functions = opened.connection.functions
        self._connection = connection
        self._is_closed = False

    @classmethod
    async def open(
        cls, path: Path, *, busy_timeout_s: float, prepare: Callable[[], None] = lambda: None, mode: str = "mode=rw"
    ) -> SqliteConnection:
        """Start the thread, call `prepare` in it, then open an existing file. `mode` is the query part of SQLite's URI.

        :raises StoreUnavailable: the file cannot be opened.
        :raises Exception: whatever `prepare` raises.
        """
        outcome: list[OpenedFile | Exception] = []

        def connect() -> sqlite3.Connection:
            try:
                prepare()
                outcome.append(opened := _connect(path, busy_timeout_s, mode))
            except Exception as error:  # noqa: BLE001  raised below
                # aiosqlite does not wait for the thread of a connection that fails to open. So open something else in
                # its place, and close it below.
                outcome.append(error)
                return sqlite3.connect(":memory:")
            return opened.connection

        connection = await (await _in_daemon_thread(connect))
        opened = outcome[0]
        if isinstance(opened, Exception):
            await connection.close()
            if isinstance(opened, FAILURES):
                raise explain(opened, path, busy_timeout_s) from opened
            raise opened
        return cls(path, connection, opened)

    async def run(self, function: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call `function` in the connection's thread, with the connection as its argument, and return the result. If
        `function` raises an error, so does this call.

        A function that is queued or running continues even if the caller is cancelled.

        :raises StoreUnavailable: the connection is closed.
        """
        if self._is_closed:
            raise StoreUnavailable(f"{self.path} is closed.")
        results: list[_T] = []
        self._functions.append(lambda connection: results.append(function(connection)))
        await self._connection.commit()
        return results[0]

    async def close(self) -> None:
        """Finish queued functions, then close the connection. A second call has no effect."""
        if not self._is_closed:
            self._is_closed = True
            await self._connection.close()


class _FunctionConnection(sqlite3.Connection):
    """A connection in autocommit mode. Its `commit` runs the function that has waited longest. That function begins and
    commits its own transactions with statements."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.functions: deque[Callable[[sqlite3.Connection], object]] = deque()
        """The functions that wait, one for each coming call of `commit`."""

    def commit(self) -> None:
        self.functions.popleft()(self)

    def execute(self, statement: Any, parameters: Any = (), /) -> sqlite3.Cursor:
        try:
            return super().execute(statement, parameters)
        except UnicodeEncodeError:  # a value or an id has a lone surrogate
            return super().execute(statement, _mend_parameters(parameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """A connection and the file that it has opened."""

    connection: _FunctionConnection
    file: FileId | None
    """None if the file is unknown."""


def _mend_parameters(parameters: Any) -> Any:
    if isinstance(parameters, dict):
        return {name: mend(value) if isinstance(value, str) else value for name, value in parameters.items()}
    return [mend(value) if isinstance(value, str) else value for value in parameters]


def _connect(path: Path, busy_timeout_s: float, mode: str) -> OpenedFile:
    uri = f"{path.absolute().as_uri()}?{mode}"
    for _ in range(_ATTEMPTS):
        before = file_id(path)
        connection = sqlite3.connect(
            uri, uri=True, timeout=busy_timeout_s, isolation_level=None, factory=_FunctionConnection
        )
        if file_id(path) == before:
            # SQLite's own function `lower` knows only the letters from A to Z.
            connection.create_function("folded", 1, lambda text: str(text).lower(), deterministic=True)
            return OpenedFile(connection=connection, file=before)
        connection.close()  # the file was replaced meanwhile, so either of the two files may be open
    raise sqlite3.OperationalError(f"other programs keep replacing {path}")


async def _in_daemon_thread(connect: Callable[[], sqlite3.Connection]) -> aiosqlite.Connection:
    """Create a connection whose thread is a daemon. A daemon thread does not keep the process alive if nobody closes
    the store.

    aiosqlite does not make its thread a daemon. But a thread that was created by a daemon thread is a daemon too.
    """
    created: Future[aiosqlite.Connection] = Future()
    created.set_running_or_notify_cancel()  # from now on, the future cannot be cancelled, so `set_result` cannot fail

    def create() -> None:
        try:
            created.set_result(aiosqlite.Connection(connect, iter_chunk_size=64))
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            created.set_exception(error)

    Thread(target=create, name="crow-store-open", daemon=True).start()
    return await asyncio.wrap_future(created)


class LockTimeout:
    """Limits each wait for other processes. After `end` is called, all waits are short."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """The limit of each wait."""
        self._ends_at = math.inf

    def end(self) -> None:
        """Shorten all waits, including the current ones. Call this when the process ends or the store closes. Only the
        first call has an effect."""
        self._ends_at = min(self._ends_at, time.monotonic() + _CLOSING_TIMEOUT_S)

    def is_over(self, since: float) -> bool:
        """Return whether a wait that began at `since` (a value of `time.monotonic`) must end."""
        return time.monotonic() > min(since + self.timeout_s, self._ends_at)


class FileLock:
    """An advisory lock on a file beside the database. Only one writer at a time holds the lock. Waiting for the lock
    blocks the thread. Only one thread may use an object of this class.

    The lock is polled, because a blocking `flock` would not stop at a deadline or when the store closes. If the system
    does not support such locks, only SQLite's own locks protect the database.
    """

    def __init__(self, path: Path, timeout: LockTimeout) -> None:
        self._database = path
        self._path = Path(f"{path}.lock")
        self._timeout = timeout
        self._is_supported = fcntl is not None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquire the lock, and hold it until the `with` block ends.

        :raises StoreUnavailable: the lock file cannot be created, or another process held the lock for too long.
        """
        # If the lock file was deleted meanwhile, other processes use a new lock file. Lock that file instead.
        while not self._is_there(file := self._acquired()):
            os.close(file)
        try:
            yield
        finally:
            os.close(file)  # releases the lock

    def _is_there(self, file: int) -> bool:
        """Return whether the path still names the open lock file. This is also true if the file's directory no longer
        exists."""
        opened, found = os.fstat(file), file_id(self._path)
        return found == (opened.st_dev, opened.st_ino) or (found is None and not self._path.parent.is_dir())

    def _acquired(self) -> int:
        """Open and lock the lock file."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise unusable(self._path, "cannot be opened", error) from error
        try:
            self._wait_for(file)
        except BaseException:
            os.close(file)
            raise
        return file

    def _wait_for(self, file: int) -> None:
        since = time.monotonic()
        pause_s = 0.0002
        while self._is_supported:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._timeout.is_over(since):
                    raise locked(self._database, self._timeout.timeout_s) from None
            except OSError as error:
                self._is_supported = False
                logger.warning("%s: file locks do not work here (%s)", self._path, error.strerror)
            else:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.005)


@dataclass(slots=True)
class WriteJob(Generic[_T]):
    """A function to run in a write transaction."""

    function: Callable[[sqlite3.Connection], _T]
    result: _T | None = None
    """Set after the function returned."""
    error: Exception | None = None
    """Set after the function failed."""
    is_done: bool = False


def run_jobs(connection: sqlite3.Connection, jobs: Sequence[WriteJob[Any]]) -> None:
    """Run all jobs inside the open transaction. If a job fails, only the changes of this job are rolled back.

    :raises Exception: a job failed, and SQLite ended the transaction.
    """
    for job in jobs:
        connection.execute("SAVEPOINT job")
        try:
            job.result = read_leniently(connection, job.function, undo="ROLLBACK TO job")
        except Exception as error:
            job.error = error
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")


class FairWakeup:
    """Resumes one waiting task in each pass of the event loop. The task that has waited longest comes first.

    When sixty sessions share a commit, all their tasks could resume in the same pass. If each of them computed for a
    millisecond, all other tasks would wait for sixty milliseconds. A task that waits alone is not delayed.
    """

    def __init__(self) -> None:
        self._waiting: deque[anyio.Event] = deque()
        self._is_taken = False

    async def wait(self) -> None:
        """Wait until it is this task's turn."""
        if self._is_taken:
            event = anyio.Event()
            self._waiting.append(event)
            await event.wait()
        else:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft().set()
            asyncio.get_running_loop().call_soon(self._next)
