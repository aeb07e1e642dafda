"""Follows a session in the database file, even if another process changes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from sqlite3 import Connection

import anyio

from crow.store.owner import is_alive
from crow.store.paths import PATH_BATCH
from crow.store.rows import SESSION_COLUMNS, possible_time, session_of
from crow.store.sqlite.connection import pragma
from crow.store.sqlite.database import UsesDatabase, now_ms, snapshot
from crow.store.sqlite.paths import entries_of, session_values
from crow.store.watching import News, Piece, SessionRead, follow

_POLL_S = 0.05
_POLLS_PER_READ = 10
"""After this many polls, the session is read even if the file has not changed. Otherwise the death of an owner would
not be noticed, because it does not change the file."""


class WatchMethods(UsesDatabase):
    """Methods of the store that follow a session."""

    owner: str

    async def watch(self, session_id: str, *, after: int = 0) -> AsyncGenerator[News, None]:
        # SQLite does not notify other processes of changes. A query for changes takes about 0.1 ms.
        version = (-1, -1)

        async def read(after: int, piece: int) -> SessionRead:
            nonlocal version
            found, version = await self._read(session_id, after, piece)
            return found

        async def wait() -> None:
            for _ in range(_POLLS_PER_READ):
                await anyio.sleep(_POLL_S)
                if await self._version() != version:
                    return

        async for news in follow(read, wait, lambda: self.database.is_closed, after=after):
            yield news

    @snapshot()
    def _version(self, sql: Connection) -> tuple[int, int]:
        return _version_of(sql)

    @snapshot()
    def _read(self, sql: Connection, session_id: str, after: int, piece: int) -> tuple[SessionRead, tuple[int, int]]:
        """Return the changes of a session, and the result of `_version_of`. `after` is the id of the last known entry,
        and `piece` the number of the last known piece of the draft."""
        *values, owner, lease_ms = session_values(sql, session_id, f"{SESSION_COLUMNS}, owner, lease_ms")
        row = session_of(values)
        # An imported session may have the id of a deleted session whose entries are still part of a fork.
        query = "SELECT id FROM entries WHERE session = ? AND +conversation = ? AND id > ? ORDER BY id LIMIT ?"
        ids = [entry_id for (entry_id,) in sql.execute(query, (session_id, row.conversation, after, PATH_BATCH))]
        entries, taken = entries_of(sql, ids)
        pieces = sql.execute(
            "SELECT seq, CAST(message_id AS TEXT), iif(seq > ?3, CAST(text AS TEXT), ''),"
            " iif(seq > ?3, CAST(thought AS TEXT), '') FROM drafts"
            " WHERE session = ?1 AND after_leaf IS ?2 ORDER BY seq",
            (session_id, row.leaf, piece),
        ).fetchall()
        is_running = row.state == "running"
        found = SessionRead(
            row=row,
            entries=entries,
            has_more=taken < len(ids) or len(ids) == PATH_BATCH,
            pieces=[Piece(*one) for one in pieces if one[0] > piece],
            has_draft=bool(pieces),
            is_elsewhere=is_running and owner != self.owner,
            is_orphaned=is_running and not is_alive(owner, lease_age_ms=now_ms() - possible_time(lease_ms)),
            cancelled_turn=None,
        )
        return found, _version_of(sql)


def _version_of(sql: Connection) -> tuple[int, int]:
    """Return numbers that change when this or another connection changes the file."""
    return pragma(sql, "data_version"), sql.total_changes
