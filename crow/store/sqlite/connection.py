"""One SQLite connection in a thread of its own, where a function runs as a whole.

Strategy: aiosqlite makes one thread hop per statement, lets tasks interleave between them, and leaves a transaction
open when a task is cancelled there. So a function that runs any number of statements is handed over as if it were
one statement: `sqlite3` lets a connection class be given (`factory`), and aiosqlite runs on whatever its connector
makes. A function that was handed over is finished, whatever happens to the task that waits for it; the thread's queue
is the lock. `explained` puts errors into sentences; what only a fault of ours can cause stays as it is. Knows neither
tables nor transactions.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeAlias, TypeVar

import aiosqlite
import anyio

from crow.domain.errors import StoreUnavailable
from crow.store.codec import mend

__all__ = [
    "FAILURES",
    "REPAIR",
    "FairWakeup",
    "FileConnection",
    "FileGone",
    "FileId",
    "FileLock",
    "GroupCommit",
    "LockTimeout",
    "SqliteConnection",
    "WriteJob",
    "do_each",
    "explained",
    "file_id",
    "locked",
]

T = TypeVar("T")

FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""What SQLite's functions raise; the last two where a damaged file has odd names or sizes."""

REPAIR = "Close every crow, then run crow doctor --repair: it keeps a copy and rebuilds what can be rebuilt."
"""What to do about damage."""

_ATTEMPTS = 5

_FUNCTION = "-- a function, given as the only parameter"


class SqliteConnection:
    """A connection to the database at `path`, in autocommit mode. Closed by whoever opened it."""

    def __init__(self, path: Path, connection: aiosqlite.Connection) -> None:
        self.path = path
        self._connection = connection
        self._is_closed = False

    @classmethod
    async def open(
        cls, path: Path, *, prepare: Callable[[], None], busy_timeout_s: float, how: str = "mode=rw"
    ) -> SqliteConnection:
        """Connect to a file that exists, after `prepare` was called in a thread; `how` is the query of SQLite's URI.

        :raises StoreUnavailable: it cannot be opened; what `prepare` raises is passed on.
        """
        connection, failures = await _in_daemon_thread(lambda: _make(path, prepare, busy_timeout_s, how))
        await connection
        opened = cls(path, connection)
        if failures:
            await opened.close()
            raise explained(failures[0], path, busy_timeout_s) from failures[0]
        return opened

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """What `function` gives, called with the connection in its thread.

        Errors are raised as they come. Cancelled: a function that is under way, or waits for the thread, still runs.

        :raises StoreUnavailable: the connection is closed.
        """
        if self._is_closed:
            raise StoreUnavailable(f"{self.path} is closed.")
        (outcome,) = await self._connection.execute_fetchall(_FUNCTION, (function,))
        result: T = outcome  # type: ignore[assignment]  # what `_Outcome.fetchall` gave
        return result

    async def close(self) -> None:
        """Finish what waits, then close; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            await self._connection.close()


def explained(error: Exception, path: Path, busy_timeout_s: float) -> Exception:
    """One of `FAILURES` in words a person can act on; `error` itself if no circumstance but a fault of ours explains
    it."""
    code = getattr(error, "sqlite_errorcode", None)
    elsewhere = "set CROW_HOME to another directory"
    match None if code is None else code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_PROTOCOL:
            return locked(path, busy_timeout_s)
        case sqlite3.SQLITE_FULL:
            words = "cannot grow: the disk is full. Free some space, then try again"
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            words = f"cannot be written ({error}). Make the file and its directory writable, or {elsewhere}"
        case sqlite3.SQLITE_CANTOPEN:
            words = f"cannot be opened ({error}). Make it a file that you can read and write, or {elsewhere}"
        case sqlite3.SQLITE_NOTADB:
            words = (
                f"is no crow database ({error}). If it was one, close every crow and run crow doctor --repair; else"
                f" move it away, or {elsewhere}"
            )
        case sqlite3.SQLITE_CORRUPT:
            words = f"is damaged ({error}). {REPAIR}"
        case None if not isinstance(error, sqlite3.Error) or "decode to UTF-8" in str(error):
            words = f"is damaged ({str(error) or type(error).__name__}). {REPAIR}"
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_NOMEM | sqlite3.SQLITE_TOOBIG | sqlite3.SQLITE_NOLFS:
            words = f"cannot be read or written ({error}). Check the disk, or {elsewhere}"
        case _:
            return error
    return StoreUnavailable(f"{path} {words.rstrip('.')}.")


class _Outcome(sqlite3.Cursor):
    """What a function gave, as the only row."""

    outcome: object = None

    def fetchall(self) -> list[Any]:
        return [self.outcome]


class FileGone(Exception):
    """The path of a database names another file than the one that is open, or none. Caught in the store."""


class FileConnection(sqlite3.Connection):
    """Executes statements, and functions in the place of statements. `file` is the file that is open; None: unknown."""

    file: FileId | None = None

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql is _FUNCTION:
            answer = _Outcome(self)
            answer.outcome = parameters[0](self)
            return answer
        try:
            return super().execute(sql, parameters)
        except UnicodeEncodeError:  # a lone surrogate, in an id to look up as well as in a value to store
            return super().execute(sql, _mended(parameters))


def _mended(parameters: Any) -> Any:
    if isinstance(parameters, dict):
        return {name: mend(value) if isinstance(value, str) else value for name, value in parameters.items()}
    return [mend(value) if isinstance(value, str) else value for value in parameters]


def _make(
    path: Path, prepare: Callable[[], None], busy_timeout_s: float, how: str
) -> tuple[aiosqlite.Connection, list[sqlite3.Error]]:
    """A connection to be awaited, and where it then puts the error if it could not connect.

    aiosqlite does not wait for the thread of a connection that failed to open; so it is not told, and closed instead.
    """
    prepare()
    failures: list[sqlite3.Error] = []

    def connect() -> sqlite3.Connection:
        try:
            return _connected(path, busy_timeout_s, how)
        except sqlite3.Error as error:
            failures.append(error)
            return sqlite3.connect(":memory:")

    return aiosqlite.Connection(connect, iter_chunk_size=64), failures


def _connected(path: Path, busy_timeout_s: float, how: str) -> FileConnection:
    uri = f"{path.absolute().as_uri()}?{how}"
    for _ in range(_ATTEMPTS):
        before = file_id(path)
        made = sqlite3.connect(uri, uri=True, timeout=busy_timeout_s, isolation_level=None, factory=FileConnection)
        made.file = file_id(path)
        if made.file == before:
            return made
        made.close()  # it was replaced in this very moment: which of the two is open?
    raise sqlite3.OperationalError(f"{path} is replaced again and again")


async def _in_daemon_thread(make: Callable[[], T]) -> T:
    """What `make` gives, called in a daemon thread.

    A thread takes that flag from the one that creates it, and aiosqlite creates its thread here; else a store that
    was not closed would hang the exit of the process.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if made.done():
            return
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(result)  # type: ignore[arg-type]  # no error: it is a T

    def work() -> None:
        result, error = None, None
        try:
            result = make()
        except BaseException as raised:  # noqa: BLE001  # whatever it is, the task that waits must hear of it
            error = raised
        loop.call_soon_threadsafe(settle, result, error)

    Thread(target=work, name="crow-store-open", daemon=True).start()
    return await made


# FROM store.lock: Waiting for other processes: a lock beside the database, and how long to be patient.
#
# Strategy: `flock` on a file of its own, tried again and again, since a wait inside the system could be ended neither
# by
# a deadline nor by the store's closing. It blocks: only ever used in the writer's thread. Where a system has no such
# locks, SQLite's own must do. Knows no SQL.


logger = logging.getLogger(__name__)

_CLOSING_PATIENCE_S = 0.4
"""Well above what processes that take turns keep each other waiting, and within what an editor grants to an exit."""


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


class LockTimeout:
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

    def __init__(self, path: Path, patience: LockTimeout) -> None:
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


# FROM store.together: Transactions that wait for the disk at the same moment, made one.
#
# Strategy: a flush costs the same for one change as for a hundred, and the changes of sixty sessions that stream
# would
# queue for it. So a piece of work waits in a list; whichever reaches the writer's thread first takes all that wait
# there
# into its transaction, each inside a savepoint of its own, so that the failure of one stays its own. They are written
# together or not at all. Their tasks, which then wake together, go on one by one: sixty that each compute a
# millisecond
# would keep everything else waiting for sixty. Knows no tables.


class WriteJob(Generic[T]):
    """A function that wants a transaction, and later what it gave or why it failed."""

    def __init__(self, function: Callable[[sqlite3.Connection], T]) -> None:
        self._function = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_done = False

    def do(self, connection: sqlite3.Connection) -> None:
        """Call the function. What it raises is raised here and by `result`."""
        try:
            self._result = self._function(connection)
        except BaseException as error:
            self.fail(error)
            raise
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Nothing of it was written; a reason of its own counts for more."""
        self._error = self._error or error
        self.is_done = True

    def result(self) -> T:
        """What the function gave. Only when it is done."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # done without an error: it is a T


class GroupCommit:
    """The work that waits for the next transaction. Added to in the event loop, taken in the writer's thread."""

    def __init__(self) -> None:
        self._waiting: deque[WriteJob[object]] = deque()

    def add(self, function: Callable[[sqlite3.Connection], T]) -> WriteJob[T]:
        """Let `function` wait."""
        work = WriteJob(function)
        self._waiting.append(work)  # type: ignore[arg-type]  # whoever takes it passes its result on to nobody
        return work

    def take(self) -> tuple[WriteJob[object], ...]:
        """All that waits, in the order it came."""
        return tuple(self._waiting.popleft() for _ in range(len(self._waiting)))


class FairWakeup:
    """Lets one task through in each pass of the event loop, in the order they came. One that comes alone need not
    wait."""

    def __init__(self) -> None:
        self._waiting: deque[anyio.Event] = deque()
        self._is_taken = False

    async def through(self) -> None:
        """Return when it is this task's turn."""
        if self._is_taken:
            mine = anyio.Event()
            self._waiting.append(mine)
            await mine.wait()
        else:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft().set()
            asyncio.get_running_loop().call_soon(self._next)


def do_each(connection: sqlite3.Connection, works: tuple[WriteJob[object], ...]) -> None:
    """Do all of them inside the open transaction.

    :raises Exception: nothing can be written: the only work failed, or SQLite itself ended the transaction.
    """
    if len(works) == 1:
        works[0].do(connection)
        return
    for work in works:
        connection.execute("SAVEPOINT work")
        try:
            work.do(connection)
        except Exception:  # whose it is hears of it
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
