"""Creates, lists, changes, forks, hides and removes sessions."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.store import Directory, NewSession, SessionChanges, SessionPage, SessionRow
from crow.store.codec import merged_metadata
from crow.store.postgres.database import Sql, UsesDatabase, folded, snapshot, transaction
from crow.store.postgres.paths import check_session, newest_of_kind, session_row, session_values
from crow.store.rows import SESSION_COLUMNS, cursor_after, parse_cursor, plain, plain_or_none, session_of
from crow.store.session_rules import (
    alias_taken,
    changed_columns,
    check_alias_to_move,
    check_new_id,
    check_page_limit,
    columns_of_new,
    fork_of,
    id_taken,
    is_entry_id,
    is_update,
    not_in_conversation,
)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_ENTRIES_PER_REMOVAL = 500
_OPEN_MS = 7 * 86_400_000
"""An empty session is removed this long after it was last opened."""


class SessionMethods(UsesDatabase):
    """Methods of the store for sessions as a whole, and for removing their data."""

    @transaction
    async def create_session(self, sql: Sql, new: NewSession) -> SessionRow:
        await _insert_session(sql, new)
        await self._note_opening(sql, new.id)
        return await session_row(sql, new.id)

    @transaction
    async def fork_session(
        self,
        sql: Sql,
        session_id: str,
        new_id: str,
        *,
        entry: int | None,
        cwd: str,
        additional_directories: tuple[str, ...],
        metadata: JsonObject | None = None,
        principal: str | None = None,
    ) -> SessionRow:
        await check_session(sql, session_id, lock=True)
        row = await session_row(sql, session_id)
        principal = row.principal if principal is None else plain(principal)
        query = "SELECT title FROM crow.sessions WHERE conversation = $1 AND principal IS NOT DISTINCT FROM $2"
        titles = await sql.fetch(query, row.conversation, principal)
        fork = fork_of(
            row,
            new_id,
            entry=entry,
            cwd=cwd,
            additional_directories=additional_directories,
            metadata=metadata,
            principal=principal,
            titles=[title for (title,) in titles],
        )
        await _insert_session(sql, fork)
        await sql.execute("UPDATE crow.sessions SET calibration = $1 WHERE id = $2", row.calibration, new_id)
        await self._note_opening(sql, new_id)
        return await session_row(sql, new_id)

    @snapshot
    async def session_by_alias(self, sql: Sql, alias: str, *, principal: str | None = None) -> SessionRow | None:
        query = f"SELECT {SESSION_COLUMNS} FROM crow.sessions WHERE {_HAS_ALIAS} AND deleted_ms IS NULL"
        row = await sql.fetchrow(query, plain(principal or ""), plain(alias))
        return session_of(tuple(row)) if row else None

    @transaction
    async def move_alias(self, sql: Sql, session_id: str, to: str) -> None:
        (stored,) = await session_values(sql, session_id, "alias", lock=True)
        await check_session(sql, to)
        alias = check_alias_to_move(session_id, stored)
        await change_session(sql, session_id, SessionChanges(alias=None))
        await change_session(sql, to, SessionChanges(alias=alias))

    @snapshot
    async def sessions(
        self,
        sql: Sql,
        *,
        cwd: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
        archived: bool | None = False,
        seen_by: str | None = None,
    ) -> SessionPage:
        check_page_limit(limit)
        newest, after = (None, None) if cursor is None else parse_cursor(cursor)
        listed = (
            f"SELECT {SESSION_COLUMNS} FROM crow.sessions WHERE has_prompt AND parent_id IS NULL AND deleted_ms IS NULL"
            f" AND archived {'IN (true, false)' if archived is None else f'= {bool(archived)}'}"
            " AND ($1::text IS NULL OR cwd = $1)"
        )
        if seen_by is not None:  # two indexes find these sessions, so those of other principals are not read
            listed += (
                " AND number IN (SELECT number FROM crow.sessions WHERE principal = $5 AND deleted_ms IS NULL UNION ALL"
                " SELECT s.number FROM crow.shares h JOIN crow.sessions s ON s.id = h.session WHERE h.principal = $5)"
            )
        rows = await sql.fetch(
            f"({listed} AND listed IS NOT NULL AND ($2::bigint IS NULL OR (listed, id) < ($2, $3::text))"
            " ORDER BY listed DESC, id DESC LIMIT $4) UNION ALL"
            f" ({listed} AND listed IS NULL AND ($2::bigint IS NULL OR (newest_entry, id) < ($2, $3::text)))"
            " ORDER BY newest_entry DESC, id DESC LIMIT $4",
            plain_or_none(cwd),
            newest,
            plain_or_none(after),
            limit + 1,
            *(() if seen_by is None else (plain(seen_by),)),
        )
        found = tuple(session_of(tuple(row)) for row in rows[:limit])
        return SessionPage(rows=found, cursor=cursor_after(found[-1]) if len(rows) > limit else None)

    @snapshot
    async def subagents(self, sql: Sql, session_id: str) -> tuple[SessionRow, ...]:
        rows = await sql.fetch(
            f"SELECT {SESSION_COLUMNS} FROM crow.sessions WHERE parent_id = $1 AND deleted_ms IS NULL"
            " ORDER BY created_ms, newest_entry, id",
            plain(session_id),
        )
        return tuple(session_of(tuple(row)) for row in rows)

    @snapshot
    async def directories(self, sql: Sql, *, limit: int = 200, seen_by: str | None = None) -> tuple[Directory, ...]:
        rows = await sql.fetch(
            "SELECT cwd, count(*), max(updated_ms) FROM crow.sessions WHERE has_prompt AND parent_id IS NULL"
            " AND deleted_ms IS NULL AND NOT archived AND ($1::text IS NULL OR principal = $1"
            " OR id IN (SELECT session FROM crow.shares WHERE principal = $1))"
            ' GROUP BY cwd ORDER BY max(newest_entry) DESC, cwd COLLATE "C" LIMIT $2',
            plain_or_none(seen_by),
            limit,
        )
        return tuple(Directory(cwd=cwd, sessions=number, updated_ms=ms) for cwd, number, ms in rows)

    @snapshot
    async def is_known_directory(self, sql: Sql, paths: Sequence[str], *, principal: str | None = None) -> bool:
        query = (
            "SELECT EXISTS (SELECT 1 FROM crow.sessions s WHERE cwd = ANY ($1::text[]) AND has_prompt"
            " AND parent_id IS NULL AND deleted_ms IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM crow.imports i WHERE i.conversation = s.conversation)"
            " AND ($2::text IS NULL OR principal = $2))"
        )
        owner = plain_or_none(principal)
        return bool(await sql.fetchval(query, [plain(path) for path in paths], owner))

    @transaction
    async def update_session(self, sql: Sql, session_id: str, changes: SessionChanges) -> SessionRow:
        await check_session(sql, session_id, lock=True)
        await change_session(sql, session_id, changes)
        return await session_row(sql, session_id)

    @transaction
    async def merge_metadata(self, sql: Sql, session_id: str, patch: JsonObject) -> SessionRow:
        await check_session(sql, session_id, lock=True)
        row = await session_row(sql, session_id)
        metadata = merged_metadata(row.metadata, patch)
        if metadata != row.metadata:
            await change_session(sql, session_id, SessionChanges(metadata=metadata))
        return await session_row(sql, session_id)

    @transaction
    async def hide(self, sql: Sql, session_id: str) -> None:
        await hide_sessions(sql, [plain(session_id)])

    @transaction
    async def record_opening(self, sql: Sql, session_id: str) -> None:
        await check_session(sql, session_id)
        await self._note_opening(sql, session_id)

    async def _note_opening(self, sql: Sql, session_id: str) -> None:
        """If the session is empty, record that this store has opened it, so that `tidy` does not remove the session."""
        await sql.execute(
            "INSERT INTO crow.openings SELECT s.id, $2, crow.now_ms() FROM crow.sessions s"
            f" WHERE s.id = $1 AND {_EMPTY}"
            " ON CONFLICT (session, owner) DO UPDATE SET opened_ms = excluded.opened_ms",
            session_id,
            self.owner,
        )

    async def tidy(self) -> None:
        await self._remove_empty()
        while (conversation := await self._next_removal()) is not None:
            while await self._remove_some(conversation):
                pass

    @transaction
    async def _remove_empty(self, sql: Sql) -> None:
        """Remove each empty session that no living store has open and that was last opened more than a week ago.
        Sessions are kept for this week because, after the death of a store, a client may continue its session in
        another store. Empty sessions have no entries, texts or blobs."""
        closed = await sql.fetch(
            "SELECT s.number, s.id, s.conversation FROM crow.sessions s"
            " WHERE s.id IN (SELECT session FROM crow.openings GROUP BY session"
            " HAVING max(opened_ms) < crow.now_ms() - $1 AND NOT bool_or(crow.is_alive(owner)))"
            f" AND {_EMPTY} FOR UPDATE SKIP LOCKED",
            _OPEN_MS,
        )
        await sql.execute("DELETE FROM crow.sessions WHERE number = ANY ($1::bigint[])", [row[0] for row in closed])
        await sql.execute(_DELETE_CONVERSATIONS, [row[2] for row in closed])
        await sql.execute(
            "DELETE FROM crow.openings o WHERE NOT EXISTS"
            f" (SELECT 1 FROM crow.sessions s WHERE s.id = o.session AND {_EMPTY})"
        )
        await sql.execute("DELETE FROM crow.owners WHERE NOT crow.is_alive(owner)")

    @transaction
    async def _next_removal(self, sql: Sql) -> int | None:
        """Return the conversation of a deleted session, or None if there is no deleted session."""
        found: int | None = await sql.fetchval(
            "SELECT conversation FROM crow.sessions WHERE deleted_ms IS NOT NULL"
            " AND NOT crow.is_alive(owner) ORDER BY conversation LIMIT 1"
        )
        return found

    @transaction
    async def _remove_some(self, sql: Sql, conversation: int) -> bool:
        """Remove some entries that only deleted sessions need, newest first. If no such entries are left, remove the
        deleted sessions. Return whether entries were removed. This call locks the conversation's sessions, so that no
        session can begin to need one of the entries meanwhile."""
        await sql.execute("SELECT 1 FROM crow.conversations WHERE id = $1 FOR UPDATE", conversation)
        await sql.fetch("SELECT 1 FROM crow.sessions WHERE conversation = $1 ORDER BY number FOR UPDATE", conversation)
        rows = await sql.fetch(_UNNEEDED, conversation, _ENTRIES_PER_REMOVAL)
        if rows:
            ids = [row[0] for row in rows]
            blobs = await sql.fetch("DELETE FROM crow.blob_refs WHERE entry = ANY ($1::bigint[]) RETURNING blob", ids)
            await sql.execute("DELETE FROM crow.texts WHERE entry = ANY ($1::bigint[])", ids)
            await sql.execute("DELETE FROM crow.entries WHERE id = ANY ($1::bigint[])", ids)
            names = sorted({row[0] for row in blobs})
            # Lock the rows first, because a transaction that refers to one of these blobs may be about to commit.
            await sql.fetch("SELECT 1 FROM crow.blobs WHERE hash = ANY ($1::text[]) ORDER BY hash FOR UPDATE", names)
            await sql.execute(
                "DELETE FROM crow.blobs b WHERE hash = ANY ($1::text[])"
                " AND NOT EXISTS (SELECT 1 FROM crow.blob_refs r WHERE r.blob = b.hash)",
                names,
            )
            return True
        gone = await sql.fetch(
            "DELETE FROM crow.sessions WHERE conversation = $1 AND deleted_ms IS NOT NULL RETURNING id", conversation
        )
        for table in ("inbox", "drafts", "moves", "openings", "prompts"):
            await sql.execute(f"DELETE FROM crow.{table} WHERE session = ANY ($1::text[])", [row[0] for row in gone])
        await sql.execute(_DELETE_CONVERSATIONS, [conversation])
        return False


async def hide_sessions(sql: Sql, ids: Sequence[str]) -> None:
    """Mark sessions and their subagents as deleted, and free their aliases."""
    await sql.execute(
        "WITH RECURSIVE family (id) AS (SELECT id FROM crow.sessions WHERE id = ANY ($1::text[])"
        " UNION SELECT s.id FROM crow.sessions s JOIN family ON s.parent_id = family.id)"
        " UPDATE crow.sessions SET deleted_ms = crow.now_ms(), alias = NULL, state = 'idle', owner = '',"
        " epoch = epoch + 1 WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL",
        ids,
    )


async def change_session(sql: Sql, session_id: str, changes: SessionChanges) -> None:
    """Set columns of an existing row, and keys of its configuration. See `changed_columns`.

    :raises ArgumentError: the alias belongs to another session.
    """
    is_title_by_user, config, principal = await session_values(sql, session_id, "title_by_user, config, principal")
    changed = changed_columns(changes, is_title_by_user=is_title_by_user, config=config)
    if not changed:
        return
    alias = changed.get("alias")
    if alias is not None:
        await _check_alias(sql, alias, session_id, principal)
    values = {**changed, "folded_title": _folded_title(changes["title"])} if "title" in changed else changed
    assignments = ", ".join(f"{name} = ${number}" for number, name in enumerate(values, start=2))
    if is_update(changed):
        assignments += ", updated_ms = crow.now_ms()"
    try:
        await sql.execute(
            f"UPDATE crow.sessions SET {assignments} WHERE id = $1",
            session_id,
            *values.values(),
        )
    except asyncpg.UniqueViolationError:
        raise ArgumentError(f'Alias "{alias}" was just given to another session; choose another alias.') from None


async def _insert_session(sql: Sql, new: NewSession) -> None:
    """Insert a session.

    :raises ArgumentError: the id or the alias is taken, or the fork's leaf is not in its conversation.
    :raises NoSuchSession: the parent of a subagent does not exist, or is deleted.
    """
    check_new_id(new.id)
    if await sql.fetchval("SELECT 1 FROM crow.sessions WHERE id = $1", new.id):
        raise id_taken(new.id)
    principal = plain_or_none(new.principal)
    if new.parent_id is not None:
        (principal,) = await session_values(sql, new.parent_id, "principal", lock=True)
    if new.alias is not None:
        await _check_alias(sql, plain(new.alias), new.id, principal)
    now, turn, has_prompt, conversation = await sql.fetchval("SELECT crow.now_ms()"), 0, False, new.conversation
    if conversation is None:
        query = "INSERT INTO crow.conversations (created_ms) VALUES ($1) RETURNING id"
        conversation = await sql.fetchval(query, now)
    if new.leaf is not None:
        # Either a removal in this conversation waits until this session exists, or this session waits for the removal.
        await sql.execute("SELECT 1 FROM crow.conversations WHERE id = $1 FOR SHARE", conversation)
        query = "SELECT turn FROM crow.entries WHERE id = $1 AND conversation = $2"
        found = await sql.fetchval(query, new.leaf, conversation) if is_entry_id(new.leaf) else None
        if found is None:
            raise not_in_conversation(new.leaf, conversation)
        turn, has_prompt = found, await newest_of_kind(sql, new.leaf, "user") is not None
    row = columns_of_new(
        new, conversation=conversation, principal=principal, turn=turn, has_prompt=has_prompt, now_ms=now
    ) | {"folded_title": _folded_title(new.title)}
    marks = ", ".join(f"${number}" for number in range(1, len(row) + 1))
    try:
        await sql.execute(f"INSERT INTO crow.sessions ({', '.join(row)}) VALUES ({marks})", *row.values())
    except asyncpg.UniqueViolationError as error:
        what = "alias" if "alias" in str(error.constraint_name) else "id"
        raise ArgumentError(f"The {what} of session {new.id} was just taken; choose another {what}.") from None
    if new.parent_id is not None:
        await sql.execute(
            "INSERT INTO crow.shares (principal, session, access, created_ms)"
            " SELECT principal, $1, access, created_ms FROM crow.shares WHERE session = $2",
            new.id,
            plain(new.parent_id),
        )


async def _check_alias(sql: Sql, alias: str, session_id: str, principal: str | None) -> None:
    query = f"SELECT id FROM crow.sessions WHERE {_HAS_ALIAS} AND id <> $3"
    other = await sql.fetchval(query, principal or "", alias, session_id)
    if other:
        raise alias_taken(alias, other)


def _folded_title(title: str | None) -> str | None:
    return None if title is None else folded(title)


_HAS_ALIAS = "coalesce(principal, '') = $1 AND alias = $2"

_EMPTY = """
    s.leaf IS NULL AND NOT s.has_prompt AND s.entries = 0 AND s.newest_entry = 0
    AND s.state = 'idle' AND s.parent_id IS NULL AND s.alias IS NULL AND s.title IS NULL AND s.metadata = '{}'
    AND s.permissions = '[]' AND NOT s.archived AND s.deleted_ms IS NULL
    AND NOT EXISTS (SELECT 1 FROM crow.entries x WHERE x.conversation = s.conversation AND x.session = s.id)
    AND NOT EXISTS (SELECT 1 FROM crow.inbox x WHERE x.session = s.id)
    AND NOT EXISTS (SELECT 1 FROM crow.drafts x WHERE x.session = s.id)
    AND NOT EXISTS (SELECT 1 FROM crow.moves x WHERE x.session = s.id)
    AND NOT EXISTS (SELECT 1 FROM crow.imports x WHERE x.conversation = s.conversation)
"""
"""The condition that a session `s` has never been used: nothing was stored in it or for it, such as a prompt, an alias,
a title or imported data."""

_DELETE_CONVERSATIONS = """
    DELETE FROM crow.conversations c WHERE c.id = ANY ($1::bigint[])
    AND NOT EXISTS (SELECT 1 FROM crow.sessions s WHERE s.conversation = c.id)
"""

_UNNEEDED = """
    WITH RECURSIVE
    living (id, leaf) AS (
        SELECT id, leaf FROM crow.sessions WHERE conversation = $1 AND deleted_ms IS NULL
    ),
    kept (id) AS (
        SELECT leaf FROM living
        UNION SELECT e.id FROM living JOIN crow.entries e ON e.session = living.id AND e.conversation = $1
        UNION SELECT m.from_leaf FROM living JOIN crow.moves m ON m.session = living.id
        UNION SELECT m.to_leaf FROM living JOIN crow.moves m ON m.session = living.id
    ),
    needed (id) AS (
        SELECT id FROM kept
        UNION SELECT e.parent FROM needed JOIN crow.entries e ON e.id = needed.id
    )
    SELECT id FROM crow.entries
    WHERE conversation = $1 AND id NOT IN (SELECT id FROM needed WHERE id IS NOT NULL)
    ORDER BY id DESC LIMIT $2
"""
"""Selects the newest entries of the conversation $1 that are needed only by deleted sessions, at most $2."""
