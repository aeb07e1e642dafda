"""Connections to PostgreSQL, and transactions on them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import anyio
import asyncpg
from anyio.lowlevel import checkpoint_if_cancelled

from crow.domain.errors import ArgumentError, CrowError, StoreUnavailable, StoreUnreachable
from crow.store.codec import mend
from crow.store.postgres.migrations import check_readable, migrate
from crow.store.postgres.presence import CLOSING_TIMEOUT_S, CONNECT_TIMEOUT_S, FAILURES, KEEPALIVES, LOST, Presence

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="UsesDatabase")

Sql: TypeAlias = Any
"""An asyncpg connection inside a transaction."""

_SCHEMES = ("postgresql", "postgres")
_MOST_CONNECTIONS = 8
_STATEMENT_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 10.0
"""The server ends a transaction that receives no statement for this long. Without this limit, a frozen process could
keep rows locked after the end of its lease, and no other store could take over its turns."""
_ATTEMPTS = 3
_RESTART_S = 10.0
"""Statements wait this long for a server that restarts."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_MOST_COMMITS = 2
"""`Database.call` runs at most this many transactions at the same time."""
_MOST_SHARING = 128
"""At most this many calls share a transaction."""
_NOT_NOW = (
    *(asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError),
    asyncpg.TooManyConnectionsError,
)
"""Errors of a server that starts, stops or has too many clients."""
_AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""Errors after which the same transaction is tried again."""


def database_name(url: str) -> str:
    """Return the name of the database at `url` for messages, without user and password.

    :raises ArgumentError: `url` is not the URL of a PostgreSQL database.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # the text of the original error may contain a part of the password
        raise ArgumentError(
            "The database URL is not valid. Either the part after the host is not a port, or the user or password has"
            f" a character that is not allowed there: write @ as %40 and / as %2F. {_EXAMPLE}"
        ) from None
    if parts.scheme not in _SCHEMES:
        raise ArgumentError(f'The database URL begins with "{parts.scheme}:". {_EXAMPLE}')
    host = parts.hostname or parse_qs(parts.query).get("host", ["localhost"])[0]
    return f"PostgreSQL database {unquote(parts.path.lstrip('/')) or 'postgres'} on {host}{f':{port}' if port else ''}"


_EXAMPLE = "Expected a URL such as postgresql://crow@db.example/crow."


class Database:
    """A pool of connections for statements, and a separate connection for the store's presence. Whoever opens it must
    close it."""

    def __init__(self, name: str, presence: Presence, pool: Any, *, is_pooled: bool) -> None:
        self.name = name
        """The name of the database in messages."""
        self.presence = presence
        self._pool = pool
        self._is_pooled = is_pooled
        """Whether statements go through a pooler in transaction mode, such as PgBouncer. In this case, no prepared
        statement is used after the transaction that prepared it."""
        self._calls: deque[_Call] = deque()
        """The calls that have not begun."""
        self._commits: set[asyncio.Task[None]] = set()
        """The tasks that run calls."""
        self._is_closed = False
        self._was_reached = False
        """Whether a connection was ever made. Only then is it worth waiting for the server."""
        self.is_read_only = False
        """Whether the database was opened only for reading."""
        self.timeout_s = _STATEMENT_TIMEOUT_S
        """The time limit of each transaction, in seconds."""
        self._time_limits: set[asyncio.Timeout] = set()
        """The time limits of the transactions that run now."""

    @classmethod
    async def open(
        cls, url: str, *, owner: str, lock: int, lock_url: str | None = None, to_read: bool = False
    ) -> Database:
        """Connect, migrate the schema, and take the advisory lock number `lock` for the store `owner`. If `url` is the
        URL of a pooler, `lock_url` must be the URL of the server itself. With `to_read`, nothing is migrated, locked or
        written.

        :raises ArgumentError: a URL is not valid.
        :raises StoreUnavailable: the server cannot be reached, or refuses the request.
        :raises StoreTooNew: a newer crow migrated the database.
        """
        name, is_pooled = database_name(url), lock_url is not None
        if lock_url is not None:
            database_name(lock_url)
        options: dict[str, Any] = {"statement_cache_size": 0}  # through a pooler, prepared statements fail
        if not is_pooled:
            idle_ms = f"{_IDLE_TIMEOUT_S * 1000:.0f}"
            options = {"server_settings": {"idle_in_transaction_session_timeout": idle_ms, **KEEPALIVES}}
        try:
            pool = asyncpg.create_pool(
                url,
                min_size=0,
                max_size=_MOST_CONNECTIONS,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=_STATEMENT_TIMEOUT_S,
                reset=_roll_back,
                **options,
            )
        except ValueError as error:  # asyncpg has checked the options in the URL
            raise ArgumentError(f"The URL of the {name} is not valid: {error}") from None
        # If the presence loses its connection, the connections of the pool may be broken, too.
        presence = Presence(lock_url or url, owner, lock, when_lost=pool.expire_connections)
        database = cls(name, presence, pool, is_pooled=is_pooled)
        try:
            with database.failures():
                await pool
                if to_read:
                    database.is_read_only = True
                    async with database.transaction(is_read=True) as sql:
                        await check_readable(sql, name)
                else:
                    await migrate(await database.presence.locked(), name)
                    await database.presence.start()
        except BaseException:
            await database.close()
            raise
        return database

    def failures(self) -> _Failures:
        """Return a context manager that raises StoreUnavailable for failures of the server."""
        return _Failures(self)

    @asynccontextmanager
    async def transaction(self, *, is_read: bool) -> AsyncIterator[Sql]:
        """Run the block in a transaction, and yield the transaction's connection. A read transaction sees the database
        as it was at one moment. If the connection is already broken when the transaction begins, another connection is
        used. If it breaks later, the transaction fails."""
        # A task can be cancelled during BEGIN. A transaction object of asyncpg could not be rolled back then, so this
        # method sends the statements itself.
        begin = "BEGIN ISOLATION LEVEL " + ("REPEATABLE READ READ ONLY" if is_read else "READ COMMITTED")
        for attempt in range(_ATTEMPTS):
            connection = await self._acquire(writes=not is_read)
            try:
                try:
                    try:
                        await connection.execute(begin)
                    except LOST:
                        with suppress(asyncpg.InterfaceError):  # it may already be closed
                            connection.terminate()
                        if attempt + 1 == _ATTEMPTS or self._is_closed:
                            raise
                        continue
                    yield connection
                    await connection.execute("COMMIT")
                except BaseException:
                    with anyio.CancelScope(shield=True):
                        await _roll_back_or_end(connection)
                    raise
                return
            finally:
                await self._release(connection)

    async def call(self, statement: str, *values: object) -> Any:
        """Run one statement that writes, and return its only row. Statements of several callers may share a commit.
        Once a statement has begun, it runs to its end even if the caller is cancelled.

        :raises StoreUnavailable: the server cannot be reached, or refuses the request.
        """
        await checkpoint_if_cancelled()
        call = _Call(statement, values, asyncio.get_running_loop().create_future())
        with anyio.CancelScope(shield=True), self.failures():
            self._calls.append(call)
            if len(self._commits) < _MOST_COMMITS:
                task = asyncio.create_task(self._commit(), name="crow: commit to PostgreSQL")
                self._commits.add(task)
                task.add_done_callback(self._commits.discard)
            try:
                return await asyncio.shield(call.row)
            except asyncio.CancelledError:  # from Task.cancel, against which a scope does not shield
                if call in self._calls:
                    self._calls.remove(call)
                else:
                    # Wait, because the caller's next statement must see the changes of this one.
                    await asyncio.wait([call.row])
                    call.row.exception()
                raise

    async def _commit(self) -> None:
        """Run the waiting calls until none is left. Each transaction runs as many of them as possible."""
        while self._calls:
            calls = [self._calls.popleft() for _ in range(min(len(self._calls), _MOST_SHARING))]
            # All stores lock rows in the same order, which prevents deadlocks.
            calls.sort(key=lambda call: str(call.values[0]))
            try:
                async with self.time_limit():
                    rows = await self._run(calls)
            except (asyncpg.PostgresError, asyncpg.InternalClientError) as error:
                if len(calls) == 1 and not isinstance(error, _AGAIN):
                    calls[0].row.set_exception(error)
                else:  # the server has rolled back all calls
                    if isinstance(error, _AGAIN):
                        await asyncio.sleep(_SHORTEST_PAUSE_S)  # so that the other transaction gets its locks first
                    for call in calls:
                        await self._run_alone(call)
            except BaseException as error:
                for call in calls:
                    call.row.set_exception(error)
                if not isinstance(error, Exception):
                    raise
            else:
                for call, row in zip(calls, rows, strict=True):
                    call.row.set_result(row)

    async def _run_alone(self, call: _Call) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                async with self.time_limit():
                    (row,) = await self._run([call])
            except Exception as error:  # noqa: BLE001  the caller gets it
                if not isinstance(error, _AGAIN) or attempt + 1 == _ATTEMPTS:
                    call.row.set_exception(error)
                    return
                await asyncio.sleep(_SHORTEST_PAUSE_S * 2**attempt)
            else:
                call.row.set_result(row)
                return

    async def _run(self, calls: Sequence[_Call]) -> Sequence[Any]:
        """Run several calls of the same statement in one transaction and one round trip. Return one row for each
        call."""
        values = [call.values for call in calls]
        if self._is_pooled:  # outside a transaction, a pooler may use several connections for one statement
            async with self.transaction(is_read=False) as sql:
                rows: Sequence[Any] = await sql.fetchmany(calls[0].statement, values)
                return rows
        connection = await self._acquire(writes=True)
        try:
            return list(await connection.fetchmany(calls[0].statement, values))
        finally:
            await self._release(connection)

    async def _release(self, connection: Any) -> None:
        """Give a connection back to the pool. If the connection is broken, the pool closes it."""
        with anyio.CancelScope(shield=True), suppress(*LOST):
            await self._pool.release(connection, timeout=CLOSING_TIMEOUT_S)

    async def _acquire(self, *, writes: bool) -> Any:
        """Return a connection of the pool. If the server could be reached before and cannot be reached now, try again
        for a few seconds."""
        clock, pause_s = asyncio.get_running_loop().time, _SHORTEST_PAUSE_S
        until = clock() + min(_RESTART_S, self.timeout_s)
        while True:
            try:
                if writes:
                    await self._check_lock()
                connection = await self._pool.acquire()
            except LOST:
                if self._is_closed or not self._was_reached or clock() + pause_s > until:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._was_reached = True
                return connection

    async def _check_lock(self) -> None:
        if self.is_read_only:
            raise StoreUnavailable(f"The {self.name} was opened only for reading.")
        if not self.presence.is_locked:
            if self._is_closed:
                raise StoreUnavailable(f"The {self.name} is closed.")
            await self.presence.locked()

    @asynccontextmanager
    async def time_limit(self) -> AsyncIterator[None]:
        """Limit the time of a block to `timeout_s`. :raises TimeoutError: the block took longer."""
        async with asyncio.timeout(self.timeout_s) as limit:
            self._time_limits.add(limit)
            try:
                yield
            finally:
                self._time_limits.discard(limit)

    def hurry(self) -> None:
        """Shorten the time limits of current and later transactions, because the process is about to end."""
        self.timeout_s = CLOSING_TIMEOUT_S
        end = asyncio.get_running_loop().time() + CLOSING_TIMEOUT_S
        for limit in self._time_limits:
            if not limit.expired():
                limit.reschedule(min(end, limit.when() or end))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    async def close(self) -> None:
        """Close all connections, within a few seconds."""
        self._is_closed = True
        if self._commits:
            await asyncio.wait(self._commits, timeout=CLOSING_TIMEOUT_S)
        await self.presence.close()
        try:
            await asyncio.wait_for(self._pool.close(), CLOSING_TIMEOUT_S)
        except FAILURES:
            self._pool.terminate()


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A statement that waits for its transaction. See `Database.call`."""

    statement: str
    values: Sequence[object]
    row: asyncio.Future[Any]
    """Gets the row that the statement returns, or its error."""


class _Failures:
    """See `Database.failures`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        if self._database.is_closed:
            raise StoreUnavailable(f"The {self._database.name} is closed.")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, FAILURES) and not isinstance(error, CrowError):
            if self._database.is_closed:
                raise StoreUnavailable(f"The {self._database.name} is closed.") from error
            words = str(error) or ("It did not answer in time." if isinstance(error, TimeoutError) else repr(error))
            if isinstance(error, asyncpg.InternalClientError):  # see LOST
                words = "The connection has just ended."
            if isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in words:
                words += ". This is a pooler; crow also needs the URL of the server itself, as database.direct_url"
            if isinstance(error, FileNotFoundError):
                words = (
                    "No such file: either the server's socket, or a file that the URL names as sslrootcert, sslcert or"
                    " sslkey."
                )
            kind = StoreUnreachable if _may_pass(error) else StoreUnavailable
            raise kind(f"The {self._database.name} cannot be used: {words}") from error


def _may_pass(error: BaseException) -> bool:
    """Return whether an error means that the server cannot be reached now. Such an error may pass without a change of
    the settings."""
    if isinstance(error, (ssl.SSLError, asyncpg.ProtocolViolationError)):
        return False
    return isinstance(error, (OSError, TimeoutError, asyncpg.PostgresConnectionError, *_NOT_NOW))


class UsesDatabase:
    """Base of the classes that have the store's methods."""

    def __init__(self, database: Database, owner: str) -> None:
        self.database = database
        self.owner = owner
        """The name of this store in the database. See :class:`crow.store.owner.Owner`."""


def _operation(
    is_read: bool,
) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Callable[..., Coroutine[Any, Any, Any]]]:
    """Return the decorator `snapshot` if `is_read` is true, otherwise the decorator `transaction`."""

    def decorate(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        changes_session = "session_id" in tuple(inspect.signature(method).parameters)[:3]

        @functools.wraps(method)
        async def run(self: UsesDatabase, *arguments: Any, **options: Any) -> Any:
            if is_read:
                return await attempts(self, *arguments, **options)
            await checkpoint_if_cancelled()
            result = await attempts(self, *arguments, **options)
            if changes_session:
                self.database.presence.changed(arguments[0])
            return result

        async def attempts(self: UsesDatabase, *arguments: Any, **options: Any) -> Any:
            for attempt in range(_ATTEMPTS):
                try:
                    # A write that has begun is not cancelled, so that the caller knows what was stored.
                    with anyio.CancelScope(shield=not is_read), self.database.failures():
                        async with (
                            self.database.time_limit(),
                            self.database.transaction(is_read=is_read) as sql,
                        ):
                            return await method(self, sql, *arguments, **options)
                except StoreUnavailable as error:
                    # The server has rolled the transaction back, so nothing is written twice.
                    if not isinstance(error.__cause__, _AGAIN) or attempt + 1 == _ATTEMPTS:
                        raise
            raise AssertionError("the last attempt returns or raises")

        return run

    return decorate


def transaction(
    method: Callable[Concatenate[_S, Sql, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]]:
    """Decorate a method so that it runs in a write transaction. The method's second parameter is the connection.
    Callers leave this parameter out. If the third parameter is `session_id`, watchers of that session are notified."""
    return _operation(False)(method)


def snapshot(
    method: Callable[Concatenate[_S, Sql, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]]:
    """Decorate a method so that it runs in a read transaction. The method's second parameter is the connection. Callers
    leave this parameter out."""
    return _operation(True)(method)


async def _roll_back_or_end(connection: Any) -> None:
    """Roll a transaction back. If the rollback fails, close the connection, so that the server rolls the transaction
    back."""
    try:
        async with asyncio.timeout(CLOSING_TIMEOUT_S):
            # Even if asyncpg knows of no transaction: the server may not have answered a cancelled BEGIN yet.
            await connection.execute("ROLLBACK")
    except LOST:
        with suppress(asyncpg.InterfaceError):  # it may already be closed
            connection.terminate()


async def _roll_back(connection: Any) -> None:
    """End a transaction that a cancelled task has left open. The pool calls this before another task gets the
    connection."""
    if connection.is_in_transaction():
        await connection.execute("ROLLBACK")


def array_of(numbers: Iterable[int]) -> str:
    """Return the value of a parameter that a statement reads as `$1::text::bigint[]`.

    asyncpg would ask the server for the type of a parameter `$1::bigint[]`. That takes about 25 ms on each new
    connection. All other statements that open a session take as long together.
    """
    return f"{{{','.join(map(str, numbers))}}}"


def folded(text: str) -> str:
    """Return `text` as the search compares it: in lower case, with spaces in place of NUL."""
    return mend(text).replace("\0", " ").lower()
