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
import sqlite3
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import aiosqlite

from crow.domain.errors import StoreUnavailable
from crow.store.fields import mend
from crow.store.lock import FileId, file_id, locked

__all__ = ["FAILURES", "REPAIR", "Connection", "FileConnection", "FileGone", "explained"]

T = TypeVar("T")

FAILURES = (sqlite3.Error, UnicodeDecodeError, MemoryError)
"""What SQLite's functions raise; the last two where a damaged file has odd names or sizes."""

REPAIR = "Close every crow, then run crow doctor --repair: it keeps a copy and rebuilds what can be rebuilt."
"""What to do about damage."""

_ATTEMPTS = 5

_FUNCTION = "-- a function, given as the only parameter"


class Connection:
    """A connection to the database at `path`, in autocommit mode. Closed by whoever opened it."""

    def __init__(self, path: Path, connection: aiosqlite.Connection) -> None:
        self.path = path
        self._connection = connection
        self._is_closed = False

    @classmethod
    async def open(
        cls, path: Path, *, prepare: Callable[[], None], busy_timeout_s: float, how: str = "mode=rw"
    ) -> Connection:
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
