"""Finds, removes, exports and imports stored sessions for the command line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from crow.domain.entries import Entry
from crow.domain.errors import ArgumentError, SessionBusy, StoreUnavailable
from crow.store import GROUPS, Group, Scope, UsageTotal
from crow.store.admin import (
    Backup,
    ConversationState,
    Damage,
    DiskUse,
    ImportDefaults,
    Imported,
    SessionFilter,
    SessionMatch,
    UnusedSession,
    best_matches,
)
from crow.store.owner import readable
from crow.store.portable import ExportFile
from crow.store.postgres.database import Sql, UsesDatabase, snapshot, transaction
from crow.store.postgres.sessions import hide_sessions
from crow.store.postgres.store import PostgresStore
from crow.store.postgres.transfer import (
    Importer,
    choose,
    conversation_state,
    family,
    next_entries,
)
from crow.store.rows import (
    IS_REQUEST,
    SESSION_COLUMNS,
    SUM_COLUMNS,
    SUM_COUNT,
    plain,
    plain_or_none,
    session_of,
    usage_totals,
)
from crow.store.search import LAST_MS
from crow.store.shared_admin import Listing, SharedAdmin, counted_tags, subagents_by_root, taken_by
from crow.store.transfer import ExportSelection, SessionTaken, by_conversation

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_T = TypeVar("_T")

_EXPORT_BATCH = 1_024
_TAKEN_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""The pauses before an import tries again to use an id that another process is importing or removing."""
_QUARTER_MS = 15 * 60 * 1000

_USED_MS = (
    "greatest(s.created_ms, coalesce((SELECT e.created_ms FROM crow.entries e WHERE e.id = s.newest_entry), 0))"
    " AS used_ms"
)
_COLUMNS = ", ".join(f"s.{name.strip()}" for name in SESSION_COLUMNS.split(","))
_IS_RUNNING = "(s.state = 'running' AND crow.is_alive(s.owner))"
_UNUSED = f"""
    SELECT * FROM (
        SELECT s.id, s.cwd, s.title, {_USED_MS}, s.entries, s.archived FROM crow.sessions s
        WHERE s.parent_id IS NULL AND s.deleted_ms IS NULL AND NOT {_IS_RUNNING}
    ) AS u WHERE used_ms < $1 AND ($2::text IS NULL OR cwd = $2) ORDER BY used_ms, id
"""
"""Selects the sessions that were last used before $1 and run no turn, in the directory $2 or in all."""
_LISTED = f"""
    SELECT * FROM (
        SELECT {_COLUMNS}, {_USED_MS} FROM crow.sessions s
        WHERE s.has_prompt AND s.parent_id IS NULL AND s.deleted_ms IS NULL AND s.archived = $1
        AND ($2::text IS NULL OR position(lower($2) IN lower(s.model)) > 0 OR EXISTS (
            SELECT 1 FROM crow.entries e WHERE e.session = s.id AND e.conversation = s.conversation
            AND position(lower($2) IN lower(e.model)) > 0
        ))
        AND ($3::text[] IS NULL OR s.cwd = ANY ($3))
    ) AS l WHERE used_ms >= $4 AND used_ms < $5 ORDER BY used_ms DESC, newest_entry DESC, id
"""
_SUBAGENTS = f"""
    WITH RECURSIVE family (id, root) AS (
        SELECT id, id FROM crow.sessions WHERE id = ANY ($1::text[])
        UNION SELECT s.id, family.root FROM family JOIN crow.sessions s ON s.parent_id = family.id
    )
    SELECT {_COLUMNS}, {_USED_MS}, family.root FROM crow.sessions s JOIN family USING (id)
    WHERE s.id <> family.root AND s.deleted_ms IS NULL ORDER BY s.number
"""
_TOTALS = f"""
    SELECT {SUM_COLUMNS}, {{columns}}
    FROM crow.entries e
    LEFT JOIN crow.sessions s ON s.id = e.session AND s.conversation = e.conversation AND s.deleted_ms IS NULL
    LEFT JOIN crow.sessions p ON p.id = s.parent_id AND p.deleted_ms IS NULL
    WHERE {IS_REQUEST}
    AND e.conversation IN (SELECT conversation FROM crow.sessions WHERE deleted_ms IS NULL)
    AND ($1::text IS NULL OR coalesce(p.cwd, s.cwd) = $1)
    AND ($2::text IS NULL OR position(lower($2) IN lower(e.model)) > 0) AND e.created_ms >= $3 AND e.created_ms < $4
    GROUP BY {{groups}}
"""
_GROUP_COLUMNS = {
    "title": "coalesce(p.title, s.title)",
    "session": "coalesce(p.id, s.id, '')",
    "model": "e.model",
    "day": f"e.created_ms / {_QUARTER_MS}",
}
_MATCHES = """
    SELECT id, title, CASE WHEN id = $1 THEN 0 WHEN alias = $1 AND principal IS NULL THEN 1 ELSE 2 END AS rank
    FROM crow.sessions
    WHERE deleted_ms IS NULL AND $1 <> ''
    AND (starts_with(id, $1) OR (alias = $1 AND principal IS NULL) OR title = $1)
    ORDER BY rank, newest_entry DESC, id
"""
_USED = """
    SELECT s.conversation, s.id FROM crow.sessions s WHERE s.deleted_ms IS NULL AND (
        s.has_prompt OR s.parent_id IS NOT NULL OR s.leaf IS NOT NULL OR s.newest_entry > 0 OR s.alias IS NOT NULL
        OR s.title IS NOT NULL OR s.metadata <> '{}' OR EXISTS (SELECT 1 FROM crow.sessions c WHERE c.parent_id = s.id)
        OR EXISTS (SELECT 1 FROM crow.inbox i WHERE i.session = s.id)
        OR EXISTS (SELECT 1 FROM crow.moves m WHERE m.session = s.id)
    ) ORDER BY s.conversation, s.number
"""
"""Selects all sessions that were ever used. The others are empty."""


class PostgresAdmin(UsesDatabase, SharedAdmin):
    """Administers the sessions of an open store."""

    def __init__(self, store: PostgresStore) -> None:
        super().__init__(store.database, store.owner)
        self.store = store

    @snapshot
    async def matches(self, sql: Sql, name: str) -> tuple[SessionMatch, ...]:
        rows = await sql.fetch(_MATCHES, plain(name))
        return best_matches([(rank, SessionMatch(id=id_, title=title)) for id_, title, rank in rows])

    @snapshot
    async def ids(self, sql: Sql) -> tuple[str, ...]:
        rows = await sql.fetch("SELECT id FROM crow.sessions WHERE deleted_ms IS NULL ORDER BY id")
        return tuple(row[0] for row in rows)

    @snapshot
    async def written_after(self, sql: Sql, entry: int) -> dict[str, int]:
        query = (
            "SELECT id, newest_entry FROM crow.sessions WHERE newest_entry > $1 AND deleted_ms IS NULL ORDER BY 2, 1"
        )
        return {row[0]: row[1] for row in await sql.fetch(query, entry)}

    @snapshot
    async def listing(self, sql: Sql, chosen: SessionFilter, limit: int | None) -> Listing:
        values = await sql.fetch(
            _LISTED,
            chosen.archived,
            plain_or_none(chosen.model),
            None if chosen.directories is None else [plain(directory) for directory in chosen.directories],
            -LAST_MS if chosen.since_ms is None else chosen.since_ms,
            LAST_MS if chosen.before_ms is None else chosen.before_ms,
        )
        found = ((session_of(tuple(row)), used_ms) for *row, used_ms in values)
        rows = taken_by(chosen, found, limit)
        below = await sql.fetch(_SUBAGENTS, [row.id for row, _ in rows])
        subagents = ((session_of(tuple(row)), used_ms, root) for *row, used_ms, root in below)
        return Listing(rows=rows, subagents=subagents_by_root(subagents))

    @snapshot
    async def totals(self, sql: Sql, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
        # A day depends on the time zone of this machine. So the server returns sums for quarters of an hour, because in
        # every zone a day begins with such a quarter.
        keys = [group for group in GROUPS if group in by]  # the day is last
        names = [*(["title"] if "session" in keys else []), *keys]
        columns = [_GROUP_COLUMNS[name] for name in names]
        rows = await sql.fetch(
            _TOTALS.format(columns=", ".join(columns) or "NULL", groups=", ".join(columns) or "()"),
            plain_or_none(scope.cwd),
            plain_or_none(scope.model),
            -LAST_MS if scope.since_ms is None else scope.since_ms,
            LAST_MS if scope.before_ms is None else scope.before_ms,
        )
        sums: dict[tuple[Any, ...], list[Any]] = {}
        for row in rows:
            group = list(row[SUM_COUNT : SUM_COUNT + len(names)])
            if "day" in names:
                moment = datetime.fromtimestamp(group[-1] * _QUARTER_MS / 1000)  # noqa: DTZ006  days are local
                group[-1] = f"{moment:%Y-%m-%d}"
            known = sums.setdefault(tuple(group), [None] * SUM_COUNT)
            for number, value in enumerate(row[:SUM_COUNT]):
                if value is not None:
                    known[number] = (known[number] or 0) + value
        return usage_totals(((*total, *group) for group, total in sums.items()), names)

    @snapshot
    async def disk_use(self, sql: Sql) -> tuple[DiskUse, ...]:
        rows = await sql.fetch(
            "SELECT kind, count(*), coalesce(sum(octet_length(body)), 0) FROM crow.entries GROUP BY 1 ORDER BY 3 DESC"
        )
        uses = [DiskUse(what=f"entries: {kind}", number=number, bytes=int(size)) for kind, number, size in rows]
        number, size = await sql.fetchrow("SELECT count(*), coalesce(sum(size), 0) FROM crow.blobs")
        uses.append(DiskUse(what="blobs: outputs, files, images, prompts", number=number, bytes=int(size)))
        shared = await sql.fetchval(
            "SELECT coalesce(sum(b.size), 0) FROM crow.blob_refs r JOIN crow.blobs b ON b.hash = r.blob"
        )
        uses.append(DiskUse(what="  not stored again because it is equal", number=None, bytes=int(shared - size)))
        for table, what in (("texts", "search index"), ("drafts", "drafts"), ("inbox", "inbox")):
            number, size = await sql.fetchrow(
                f"SELECT count(*), pg_total_relation_size('crow.{table}') FROM crow.{table}"
            )
            uses.append(DiskUse(what=what, number=number, bytes=size))
        number, size = await sql.fetchrow(
            "SELECT count(*), coalesce(sum(octet_length(e.body)), 0) FROM crow.entries e JOIN crow.sessions s"
            " ON s.id = e.session AND s.conversation = e.conversation WHERE s.deleted_ms IS NOT NULL"
        )
        uses.append(DiskUse(what="entries of deleted sessions, not removed yet", number=number, bytes=int(size)))
        size = await sql.fetchval("SELECT pg_database_size(current_database())")
        uses.append(DiskUse(what="the whole database", number=None, bytes=size))
        return tuple(uses)

    @snapshot
    async def count_tags(self, sql: Sql) -> Mapping[str, int]:
        rows = await sql.fetch("SELECT metadata FROM crow.sessions WHERE deleted_ms IS NULL AND metadata <> '{}'")
        return counted_tags(rows)

    @snapshot
    async def directories(self, sql: Sql) -> tuple[str, ...]:
        rows = await sql.fetch("SELECT DISTINCT cwd FROM crow.sessions WHERE deleted_ms IS NULL")
        return tuple(row[0] for row in rows)

    @snapshot
    async def unused_since(self, sql: Sql, before_ms: int, cwd: str | None = None) -> tuple[UnusedSession, ...]:
        return await _unused_since(sql, before_ms, cwd)

    @transaction
    async def hide_unused(self, sql: Sql, before_ms: int, cwd: str | None) -> tuple[UnusedSession, ...]:
        old = await _unused_since(sql, before_ms, cwd)
        await hide_sessions(sql, [session.id for session in old])
        return old

    @transaction
    async def hide(self, sql: Sql, ids: Sequence[str]) -> None:
        rows = await sql.fetch(
            "SELECT id, owner, state FROM crow.sessions WHERE id = ANY ($1::text[]) AND deleted_ms IS NULL"
            " ORDER BY number FOR UPDATE",
            [plain(session_id) for session_id in ids],
        )
        for session_id, owner, state in rows:
            if state == "running" and await sql.fetchval("SELECT crow.is_alive($1)", owner):
                raise SessionBusy(session_id, readable(owner))
        await hide_sessions(sql, [row[0] for row in rows])

    @snapshot
    async def family(self, sql: Sql, ids: Sequence[str] | None) -> Mapping[int, tuple[str, ...]]:
        return await family(sql, ids)

    @snapshot
    async def selection(
        self, sql: Sql, conversation: int, sessions: Sequence[str], known: frozenset[str]
    ) -> ExportSelection:
        return await choose(sql, conversation, sessions, known)

    @snapshot
    async def next_entries(self, sql: Sql, selected: ExportSelection, start: int) -> tuple[Sequence[Entry], int]:
        return await next_entries(sql, selected, start, _EXPORT_BATCH)

    @snapshot
    async def conversations(self, sql: Sql) -> Mapping[int, tuple[str, ...]]:
        return by_conversation(await sql.fetch(_USED))

    @snapshot
    async def conversation_state(self, sql: Sql, ids: Sequence[str]) -> ConversationState:
        return await conversation_state(sql, ids)

    async def import_file(self, path: Path, defaults: ImportDefaults) -> tuple[Imported, ...]:
        await self.store.tidy()  # frees the ids of deleted sessions
        file = await anyio.to_thread.run_sync(lambda: ExportFile(path, relatives=defaults.relatives))
        try:
            importers = [Importer(file, block, defaults) for block in await anyio.to_thread.run_sync(file.check)]
            new: list[Importer] = []
            for importer in importers:
                if await self._begin(importer):
                    new.append(importer)
                    while (piece := await anyio.to_thread.run_sync(importer.next_piece)) is not None:
                        await self._write(partial(importer.add, here=self.owner, piece=piece))
            await self._show(new)
        except BaseException:
            # If this fails, another store removes the data after this store has ended.
            with anyio.CancelScope(shield=True):
                await self._abandon()
            raise
        finally:
            await anyio.to_thread.run_sync(file.close)
        return tuple(importer.outcome(is_new=importer in new) for importer in importers)

    async def damage(self) -> Damage:
        return Damage()

    async def size(self) -> int | None:
        return None

    async def back_up(self, path: Path) -> Backup:
        raise ArgumentError(
            f"Only SQLite files can be copied with this command. Use pg_dump: pg_dump --format custom --schema crow"
            f" --file {path} URL"
        )

    @transaction
    async def _write(self, sql: Sql, work: Callable[[Sql], Awaitable[_T]]) -> _T:
        return await work(sql)

    async def _begin(self, importer: Importer) -> bool:
        for wait_s in _TAKEN_WAITS_S:  # the server needs a moment to notice that a process was killed
            try:
                return await self._write(partial(importer.begin, here=self.owner))
            except SessionTaken:
                await anyio.sleep(wait_s)
                await self.store.tidy()
        return await self._write(partial(importer.begin, here=self.owner))

    @transaction
    async def _show(self, sql: Sql, imports: Sequence[Importer]) -> None:
        for one in imports:
            await one.show(sql)

    async def _abandon(self) -> None:
        """Give up this store's imports, so that `tidy` removes the data that they wrote."""
        query = "UPDATE crow.sessions SET state = 'idle', owner = '' WHERE owner = $1 AND deleted_ms IS NOT NULL"
        with suppress(StoreUnavailable):
            await self._write(lambda sql: sql.execute(query, self.owner))


async def _unused_since(sql: Sql, before_ms: int, cwd: str | None) -> tuple[UnusedSession, ...]:
    rows = await sql.fetch(_UNUSED, before_ms, plain_or_none(cwd))
    return tuple(UnusedSession(**dict(row)) for row in rows)
