"""A connection with which a store shows that it is alive, and with which it notifies other stores.

A store that runs turns is alive while it holds an advisory lock and renews its lease. The lease is measured by the
clock of the database server. When a store is killed, its connection and its lock end immediately. When a store is
frozen or cut off from the server, it does not renew its lease, and the lease ends.

A NOTIFY in every write would make all writers wait for each other. So this module collects the names of changed
sessions, and sends them with one statement at most every 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import asyncpg

logger = logging.getLogger(__name__)

SIGN_S = 4.0
"""The interval in seconds at which a store renews its lease. The lease lasts 20 seconds, see the function crow.is_alive
in migrations/0001_initial.sql."""

CONNECT_TIMEOUT_S = 10.0
CLOSING_TIMEOUT_S = 3.0
LOST = (
    *(asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError, TimeoutError),
    *(asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError),
    asyncpg.InternalClientError,  # the server had already ended the connection when the statement was sent
)
"""The errors that asyncpg raises if a connection breaks or cannot be made."""

FAILURES = (asyncpg.PostgresError, *LOST)
"""The errors of a server, and of connections to it."""

_NOTIFY_S = 0.02
_LOOK_S = 0.5
"""The interval at which watched sessions are read, in case a notification was lost."""
_ANSWER_TIMEOUT_S = 5.0
_PAYLOAD_BYTES = 7_900  # PostgreSQL allows 8,000
_CHANNEL = "crow"

KEEPALIVES = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "3"}
"""Settings with which a server closes a connection after 11 seconds (5 + 3 * 2) without a sign of life from the
client's machine."""

_SETTINGS = {
    "application_name": "crow",
    "synchronous_commit": "off",  # leases and notifications need not survive a crash of the server
    **KEEPALIVES,
}

_END_OLD = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
    WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted AND objsubid = 1 AND pid <> pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (classid::bigint << 32) | objid::bigint = $1
"""
"""Ends an older connection of this store that is broken but still holds the lock $1, because the server has not noticed
yet that the connection is broken."""

_SIGN = """
    INSERT INTO crow.owners (owner, signed_ms) VALUES ($1, crow.now_ms())
    ON CONFLICT (owner) DO UPDATE SET signed_ms = excluded.signed_ms
"""
"""Renews the lease of the store $1."""

_LOOK = """
    WITH seen AS MATERIALIZED (
        SELECT id, state, owner, epoch, leaf, newest_entry, updated_ms, deleted_ms, cancelled_epoch FROM crow.sessions
        WHERE id = ANY ($1::text[])
    ), dead AS MATERIALIZED (
        SELECT owner FROM (SELECT DISTINCT owner FROM seen WHERE state = 'running' AND owner <> $2) AS o
        WHERE NOT crow.is_alive(owner)
    )
    SELECT seen.*, state = 'running' AND owner IN (SELECT owner FROM dead) FROM seen
"""
"""Selects the state of the sessions $1, and whether each has a turn whose owner is dead. $2 is this store."""


class Presence:
    """Holds a lock for a store, and notifies watchers of changed sessions.

    Call `locked`, then `start`. Whoever calls `start` must call `close`.
    """

    def __init__(self, url: str, owner: str, lock: int, *, when_lost: Callable[[], Awaitable[object]]) -> None:
        self._url = url
        self._owner = owner
        """The store that holds the lock."""
        self._lock = lock
        """The number of the lock."""
        self._when_lost = when_lost
        """Called when the server stops answering."""
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._changed: set[str] = set()
        """The sessions that changed since the last notification."""
        self._watches: dict[str, set[asyncio.Event]] = {}
        """The events of the watchers of each session."""
        self._seen: dict[str, Sequence[object]] = {}
        """Maps each watched session to the row that `_LOOK` last returned for it."""
        self._is_listening = False
        """Whether the current connection gets notifications."""

    @property
    def is_locked(self) -> bool:
        """Whether the store holds its lock. If the connection breaks, the result stays true until this process notices
        the break."""
        return self._connection is not None and not self._connection.is_closed()

    async def locked(self) -> Any:
        """Return the connection that holds the lock. If the connection is broken, make a new one."""
        async with self._connecting:
            if not self.is_locked:
                self._connection = await self._connect()
                self._is_listening = False
            return self._connection

    async def _connect(self) -> Any:
        connection = await asyncpg.connect(
            self._url, timeout=CONNECT_TIMEOUT_S, command_timeout=CONNECT_TIMEOUT_S, server_settings=_SETTINGS
        )
        try:
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", self._lock):
                await connection.fetch(_END_OLD, self._lock)
                await connection.execute(f"SELECT pg_advisory_lock({self._lock})")
            if await connection.fetchval("SELECT to_regclass('crow.owners')") is not None:
                await connection.execute(_SIGN, self._owner)
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(lambda _: self._wakeup.set())
        return connection

    async def start(self) -> None:
        """Start the task that renews the lease and notifies other stores."""
        await (await self.locked()).execute(_SIGN, self._owner)
        self._task = asyncio.create_task(self._run(), name="crow: presence in PostgreSQL")

    def changed(self, session_id: str) -> None:
        """Notify the watchers of a session, in this store and in others, that the session has changed."""
        if self._task is None:
            return
        self._changed.add(session_id)
        for event in self._watches.get(session_id, ()):
            event.set()
        if len(self._changed) == 1:
            self._wakeup.set()

    @contextmanager
    def watching(self, session_id: str) -> Iterator[asyncio.Event]:
        """Return a context manager with an event that is set when the session may have changed."""
        event = asyncio.Event()
        self._watches.setdefault(session_id, set()).add(event)
        self._wakeup.set()
        try:
            yield event
        finally:
            self._watches[session_id].discard(event)
            if not self._watches[session_id]:
                del self._watches[session_id]
                self._seen.pop(session_id, None)

    async def close(self) -> None:
        """Close the connection, which ends the lock. This takes a few seconds at most."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=CLOSING_TIMEOUT_S)
        for event in [event for events in self._watches.values() for event in events]:
            event.set()
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed():
            return
        try:
            if task is not None:
                async with asyncio.timeout(CLOSING_TIMEOUT_S):
                    await self._notify(connection)
                    await connection.execute("DELETE FROM crow.owners WHERE owner = $1", self._owner)
            await connection.close(timeout=CLOSING_TIMEOUT_S)
        except FAILURES:
            connection.terminate()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        sign_at = look_at = 0.0
        is_failing = False
        while True:
            self._wakeup.clear()
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S + CONNECT_TIMEOUT_S):
                    connection = await self.locked()
                    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                        await self._notify(connection)
                        if clock() >= sign_at:
                            await connection.execute(_SIGN, self._owner)
                            sign_at = clock() + SIGN_S
                        if self._watches and (not self._is_listening or clock() >= look_at):
                            await self._look(connection)
                            look_at = clock() + _LOOK_S
            except Exception as error:  # noqa: BLE001  if this task ended, the store would lose its turns
                if not is_failing:
                    logger.warning("PostgreSQL does not answer the connection that holds crow's lock: %r", error)
                is_failing = True
                if self.is_locked:
                    self._connection.terminate()
                    await self._when_lost()
                await asyncio.sleep(_LOOK_S)
                continue
            is_failing = False
            await asyncio.sleep(_NOTIFY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout((_LOOK_S if self._watches else SIGN_S) - _NOTIFY_S):
                    await self._wakeup.wait()

    async def _notify(self, connection: Any) -> None:
        changed, self._changed = self._changed, set()
        payloads = list(_payloads(sorted(changed)))
        if not payloads:
            return
        try:
            await connection.execute("SELECT pg_notify($1, p) FROM unnest($2::text[]) AS p", _CHANNEL, payloads)
        except BaseException:
            self._changed |= changed
            raise

    async def _look(self, connection: Any) -> None:
        """Notify the watchers of sessions that changed without a NOTIFY reaching this store. The writer may have been
        killed before it sent the NOTIFY, or the NOTIFY may have been lost with a connection."""
        if not self._is_listening:
            await connection.add_listener(_CHANNEL, self._heard)
            self._is_listening = True
            for event in [event for events in self._watches.values() for event in events]:
                event.set()
        for row in await connection.fetch(_LOOK, list(self._watches), self._owner):
            name, seen = str(row[0]), tuple(row)
            # The first look also sets the events, because the session may have changed since the watcher read it.
            if self._seen.get(name) != seen:
                for event in self._watches.get(name, ()):
                    event.set()
            if name in self._watches:
                self._seen[name] = seen

    def _heard(self, _: object, __: int, ___: str, payload: str) -> None:
        """Notify the watchers of the sessions that a notification names."""
        try:
            names = json.loads(payload)
        except ValueError:
            return  # another program uses this channel
        for name in names if isinstance(names, list) else ():
            for event in self._watches.get(name, ()) if isinstance(name, str) else ():
                event.set()


def _payloads(names: Sequence[str]) -> Iterator[str]:
    """Divide the names into JSON arrays, and yield them. Each array has as many names as fit into one notification."""
    part: list[str] = []
    size = 2
    for name in names:
        needed = len(json.dumps(name)) + 2
        if part and size + needed > _PAYLOAD_BYTES:
            yield json.dumps(part)
            part, size = [], 2
        if needed + 2 <= _PAYLOAD_BYTES:  # watchers of a longer name notice the change after `_LOOK_S`
            part.append(name)
            size += needed
    if part:
        yield json.dumps(part)
