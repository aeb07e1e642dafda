"""Creates, lists, changes, forks, hides and removes sessions.

A deleted session is hidden, and `tidy` removes its data later. A session that is not deleted needs the entries that it
wrote and the entries on its current and former paths. `tidy` removes the entries that none of these sessions needs. The
search for these entries may take a while, so it holds no write lock. Then the entries are removed newest first, a few
at a time. If a session of the conversation changes meanwhile, or the process is killed, the next `tidy` removes the
rest.

The hidden sessions of an interrupted import are removed like deleted sessions. The hidden sessions of a running import
have a living owner, and are not removed.

Editors create sessions that nobody uses. `tidy` removes such a session if it is still empty, no store has the session
open any more, and it was opened more than an hour ago.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from crow.domain.messages import JsonObject
from crow.store import Directory, NewSession, SessionChanges, SessionPage, SessionRow
from crow.store.codec import merged_metadata
from crow.store.owner import is_alive
from crow.store.rows import SESSION_COLUMNS, cursor_after, parse_cursor, plain, plain_or_none, possible_time, session_of
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
from crow.store.sqlite.connection import insert
from crow.store.sqlite.database import UsesDatabase, now_ms, snapshot, transaction
from crow.store.sqlite.paths import has_user, marks, session_row, session_values

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_ENTRIES_PER_REMOVAL = 50
_INDEX_PAGES = 200
_MIN_AGE_MS = 3_600_000
"""An empty session stays for this long after it was last opened: a client may create it with one process, and prompt it
with another."""
_OPEN_MS = 7 * 86_400_000
"""Crow cannot find out whether a store on another machine or in another container still has a session open. For this
time after the opening, crow assumes that the session is still open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The data to remove from a conversation."""

    conversation: int
    living: str
    """A text that describes the conversation's sessions and their leaves. When `_living` returns a different text, the
    removal is out of date."""
    entries: tuple[int, ...]
    """Sorted newest first."""


class SessionMethods(UsesDatabase):
    """Methods of the store for sessions as a whole, and for removing their data."""

    owner: str

    @transaction(raise_if_moved=True)
    def create_session(self, sql: Connection, new: NewSession) -> SessionRow:
        _insert_session(sql, new)
        self._note_opening(sql, new.id)
        return session_row(sql, new.id)

    @transaction(raise_if_moved=True)
    def fork_session(
        self,
        sql: Connection,
        session_id: str,
        new_id: str,
        *,
        entry: int | None,
        cwd: str,
        additional_directories: tuple[str, ...],
        metadata: JsonObject | None = None,
        principal: str | None = None,
    ) -> SessionRow:
        row = session_row(sql, session_id)
        principal = row.principal if principal is None else plain(principal)
        query = "SELECT title FROM sessions WHERE conversation = ? AND principal IS ?"
        titles = sql.execute(query, (row.conversation, principal))
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
        _insert_session(sql, fork)
        sql.execute("UPDATE sessions SET calibration = ? WHERE id = ?", (row.calibration, new_id))
        self._note_opening(sql, new_id)
        return session_row(sql, new_id)

    @snapshot(raise_if_moved=True)
    def session_by_alias(self, sql: Connection, alias: str, *, principal: str | None = None) -> SessionRow | None:
        query = f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {_HAS_ALIAS} AND deleted_ms IS NULL"
        row = sql.execute(query, {"alias": plain(alias), "principal": plain_or_none(principal)}).fetchone()
        return session_of(row) if row else None

    @transaction()
    def move_alias(self, sql: Connection, session_id: str, to: str) -> None:
        stored, _ = session_row(sql, session_id).alias, session_row(sql, to)
        alias = check_alias_to_move(session_id, stored)
        change_session(sql, session_id, SessionChanges(alias=None))
        change_session(sql, to, SessionChanges(alias=alias))

    @snapshot(raise_if_moved=True)
    def sessions(
        self,
        sql: Connection,
        *,
        cwd: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
        archived: bool | None = False,
        seen_by: str | None = None,
    ) -> SessionPage:
        check_page_limit(limit)
        where = "has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL"
        values: dict[str, object] = {"limit": limit + 1}
        if archived is not None:
            where += " AND archived = :archived"
            values["archived"] = archived
        if cwd is not None:
            where += " AND cwd = :cwd"
            values["cwd"] = plain(cwd)
        if cursor is not None:
            where += " AND (newest_entry, id) < (:newest, :after)"
            values["newest"], values["after"] = parse_cursor(cursor)
        order = "ORDER BY newest_entry DESC, id DESC"
        numbers = f"SELECT number FROM sessions WHERE {where} {order} LIMIT :limit"
        if seen_by is not None:
            # Both parts of the UNION search by index: CROSS JOIN makes SQLite read `shares` first. Sessions of other
            # principals are not read, so the time does not depend on them.
            values["seen_by"] = seen_by
            numbers = (
                f"SELECT number FROM (SELECT number FROM sessions WHERE principal = :seen_by AND {where} {order}"
                " LIMIT :limit) UNION SELECT s.number FROM shares h CROSS JOIN sessions s ON s.id = h.session"
                f" WHERE h.principal = :seen_by AND {where}"
            )
        # An index may be damaged. So it is used only to find the rows. The ids, with which clients open sessions, are
        # read from the rows themselves.
        query = f"SELECT deleted_ms, {SESSION_COLUMNS} FROM sessions WHERE number IN ({numbers}) {order} LIMIT :limit"
        rows = sql.execute(query, values).fetchall()
        found = tuple(session_of(row) for deleted_ms, *row in rows[:limit] if deleted_ms is None)
        return SessionPage(rows=found, cursor=cursor_after(found[-1]) if len(rows) > limit else None)

    @snapshot(raise_if_moved=True)
    def subagents(self, sql: Connection, session_id: str) -> tuple[SessionRow, ...]:
        rows = sql.execute(
            f"SELECT {SESSION_COLUMNS} FROM sessions WHERE parent_id = ? AND deleted_ms IS NULL"
            " ORDER BY created_ms, newest_entry, id",
            (session_id,),
        ).fetchall()
        return tuple(map(session_of, rows))

    @snapshot(raise_if_moved=True)
    def directories(self, sql: Connection, *, limit: int = 200, seen_by: str | None = None) -> tuple[Directory, ...]:
        rows = sql.execute(
            "SELECT cwd, count(*), max(updated_ms) FROM sessions WHERE has_prompt = 1 AND parent_id IS NULL"
            " AND deleted_ms IS NULL AND archived = 0 AND (:seen_by IS NULL OR principal = :seen_by"
            " OR id IN (SELECT session FROM shares WHERE principal = :seen_by))"
            " GROUP BY cwd ORDER BY max(newest_entry) DESC, cwd LIMIT :limit",
            {"seen_by": seen_by, "limit": limit},
        ).fetchall()
        return tuple(Directory(cwd=cwd, sessions=number, updated_ms=possible_time(ms)) for cwd, number, ms in rows)

    @snapshot(raise_if_moved=True)
    def is_known_directory(self, sql: Connection, paths: Sequence[str], *, principal: str | None = None) -> bool:
        query = (
            "SELECT 1 FROM sessions WHERE cwd IN (SELECT value FROM json_each(:paths)) AND has_prompt = 1"
            " AND parent_id IS NULL AND deleted_ms IS NULL AND conversation NOT IN (SELECT conversation FROM imports)"
            " AND (:principal IS NULL OR principal = :principal) LIMIT 1"
        )
        values = {"paths": json.dumps([plain(path) for path in paths]), "principal": principal}
        return sql.execute(query, values).fetchone() is not None

    @transaction()
    def update_session(self, sql: Connection, session_id: str, changes: SessionChanges) -> SessionRow:
        session_row(sql, session_id)
        change_session(sql, session_id, changes)
        return session_row(sql, session_id)

    @transaction()
    def merge_metadata(self, sql: Connection, session_id: str, patch: JsonObject) -> SessionRow:
        row = session_row(sql, session_id)
        metadata = merged_metadata(row.metadata, patch)
        if metadata != row.metadata:
            change_session(sql, session_id, SessionChanges(metadata=metadata))
        return session_row(sql, session_id)

    @transaction(raise_if_moved=True)
    def hide(self, sql: Connection, session_id: str) -> None:
        hide_session(sql, session_id)

    @transaction()
    def record_opening(self, sql: Connection, session_id: str) -> None:
        session_row(sql, session_id)
        self._note_opening(sql, session_id)

    def _note_opening(self, sql: Connection, session_id: str) -> None:
        """If the session is empty, record that this store has opened it. The record keeps `tidy` from removing the
        session."""
        if _is_empty(sql, session_id):
            sql.execute(
                "INSERT INTO openings (session, owner, opened_ms) VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET opened_ms = excluded.opened_ms",
                (session_id, self.owner, now_ms()),
            )

    @snapshot()
    def _has_closed(self, sql: Connection) -> bool:
        return bool(_closed_openings(sql))

    @transaction()
    def _remove_empty(self, sql: Connection) -> None:
        """Remove the empty sessions that no store has open any more. Empty sessions have no entries, texts or blobs to
        remove."""
        for session_id in _closed_openings(sql):
            if _is_empty(sql, session_id):
                (conversation,) = session_values(sql, session_id, "conversation")
                sql.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
                sql.execute(_DELETE_CONVERSATION, {"id": conversation})
            sql.execute("DELETE FROM openings WHERE session = ?", (session_id,))

    async def remove_deleted(self) -> None:
        """Remove the data of deleted sessions in small batches. Also remove the empty sessions that nobody uses."""
        if not self.database.is_read_only and await self._has_closed():
            await self._remove_empty()
        has_removed = False
        while (removal := await self.next_removal()) is not None:
            has_removed = True
            if not await self._remove(removal):
                break  # another process changed the data meanwhile; the next `tidy` continues
        is_first = True
        while has_removed:
            has_removed = await self._merge_index(is_first)
            is_first = False

    async def _remove(self, removal: Removal) -> bool:
        for start in range(0, len(removal.entries), _ENTRIES_PER_REMOVAL):
            if not await self.remove_entries(removal, removal.entries[start : start + _ENTRIES_PER_REMOVAL]):
                return False
        return await self.remove_sessions(removal)

    @snapshot()
    def next_removal(self, sql: Connection) -> Removal | None:
        """Return the next removal, or None if no deleted session is left."""
        now = now_ms()
        hidden = sql.execute(
            "SELECT conversation, owner, lease_ms FROM sessions WHERE deleted_ms IS NOT NULL ORDER BY conversation"
        )
        pending = next(
            (
                found
                for found, owner, lease_ms in hidden
                if not owner or not is_alive(owner, lease_age_ms=now - possible_time(lease_ms))
            ),
            None,
        )
        hidden.close()  # usually only one of perhaps thousands of rows was read
        if pending is None:
            return None
        entries = tuple(row[0] for row in sql.execute(_UNNEEDED, {"conversation": pending}))
        return Removal(conversation=pending, living=_living(sql, pending), entries=entries)

    @transaction()
    def remove_entries(self, sql: Connection, removal: Removal, ids: Sequence[int]) -> bool:
        """Remove some of the entries, their blobs and their texts in the index. If `removal` is out of date, return
        false and remove nothing."""
        if _living(sql, removal.conversation) != removal.living:
            return False
        # The index stores no texts. To remove an entry from it, SQLite needs the entry's text, so the entry must still
        # exist. The query lists each id, because with a subquery the view would read all entries.
        sql.execute(
            "INSERT INTO entries_fts (entries_fts, rowid, text) SELECT 'delete', id, text FROM searchable"
            f" WHERE id IN ({marks(ids)}) AND text <> ''",
            tuple(ids),
        )
        chosen = (json.dumps(list(ids)),)
        blobs = sql.execute(
            "SELECT DISTINCT blob FROM blob_refs WHERE entry IN (SELECT value FROM json_each(?))", chosen
        ).fetchall()
        sql.execute("DELETE FROM blob_refs WHERE entry IN (SELECT value FROM json_each(?))", chosen)
        sql.executemany(
            "DELETE FROM blobs WHERE hash = ? AND NOT EXISTS (SELECT 1 FROM blob_refs WHERE blob = hash)", blobs
        )
        sql.execute("DELETE FROM entries WHERE id IN (SELECT value FROM json_each(?))", chosen)
        return True

    @transaction()
    def remove_sessions(self, sql: Connection, removal: Removal) -> bool:
        """Remove the deleted sessions of a conversation. Call this after all their entries were removed. If no other
        session is left in the conversation, remove the conversation too. If `removal` is out of date, return false and
        remove nothing."""
        conversation = removal.conversation
        if _living(sql, conversation) != removal.living:
            return False
        query = "SELECT id FROM sessions WHERE conversation = ? AND deleted_ms IS NOT NULL"
        for (session_id,) in sql.execute(query, (conversation,)).fetchall():
            set_title(sql, session_id, None)
            for table in ("inbox", "drafts", "moves", "prompts"):
                sql.execute(f"DELETE FROM {table} WHERE session = ?", (session_id,))
            sql.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
        sql.execute(_DELETE_CONVERSATION, {"id": conversation})
        return True

    @transaction()
    def _merge_index(self, sql: Connection, is_first: bool) -> bool:
        """Rewrite a part of the full-text index, so that the words of removed entries disappear from the file.

        With `is_first`, start a merge of the whole index. Later calls continue that merge. Return whether there may be
        more to merge.
        """
        pages = -_INDEX_PAGES if is_first else _INDEX_PAGES
        before = sql.total_changes
        sql.execute("INSERT INTO entries_fts (entries_fts, rank) VALUES ('merge', ?)", (pages,))
        return sql.total_changes - before > 1


def _is_empty(sql: Connection, session_id: str) -> bool:
    """Return whether the session has never been used: nothing was stored in it or for it, such as a prompt, an alias, a
    title or imported data."""
    return sql.execute(_EMPTY, {"id": session_id}).fetchone() is not None


def _closed_openings(sql: Connection) -> list[str]:
    """Return the sessions in `openings` that are no longer empty, and those that no store has open any more and that
    were not opened lately."""
    now, is_open = now_ms(), dict[str, bool]()
    for session_id, owner, opened_ms in sql.execute("SELECT session, owner, opened_ms FROM openings").fetchall():
        age_ms = now - possible_time(opened_ms)
        # `_OPEN_MS` is longer than the lease of a turn, because nothing renews the record of an opening.
        has_open = bool(owner) and is_alive(owner, lease_age_ms=age_ms - _OPEN_MS)
        is_open[session_id] = is_open.get(session_id, False) or has_open or 0 <= age_ms < _MIN_AGE_MS
    return [session_id for session_id, has_open in is_open.items() if not has_open or not _is_empty(sql, session_id)]


def change_session(sql: Connection, session_id: str, changes: SessionChanges) -> None:
    """Set columns of an existing row, and keys of its configuration. See `changed_columns`.

    :raises ArgumentError: the alias belongs to another session.
    """
    is_title_by_user, config, principal = session_values(sql, session_id, "title_by_user, config, principal")
    changed = changed_columns(changes, is_title_by_user=bool(is_title_by_user), config=config)
    if not changed:
        return
    if changed.get("alias") is not None:
        _check_alias(sql, changed["alias"], session_id, principal)
    if "title" in changed:
        set_title(sql, session_id, changed["title"])
    values = {**changed, "updated_ms": now_ms()} if is_update(changed) else changed
    assignments = ", ".join(f"{name} = ?" for name in values)
    sql.execute(f"UPDATE sessions SET {assignments} WHERE id = ?", (*values.values(), session_id))


def set_title(sql: Connection, session_id: str, title: str | None) -> None:
    """Set the title in the row and in the full-text index. The index stores no texts. Therefore the old title is read
    first, and its words are removed from the index."""
    # The query names the id, because with a subquery the view would read all entries.
    row = sql.execute("SELECT -number FROM sessions WHERE id = ?", (session_id,)).fetchone()
    indexed = "SELECT id, text FROM searchable WHERE id = ? AND text <> ''"
    sql.execute(f"INSERT INTO entries_fts (entries_fts, rowid, text) SELECT 'delete', id, text FROM ({indexed})", row)
    sql.execute("UPDATE sessions SET title = ? WHERE id = ?", (title, session_id))
    sql.execute(f"INSERT INTO entries_fts (rowid, text) {indexed}", row)


def hide_session(sql: Connection, session_id: str) -> None:
    """Mark a session and its subagents as deleted, and free the alias."""
    sql.execute(
        "WITH RECURSIVE family (id) AS"
        " (SELECT ? UNION SELECT s.id FROM sessions s JOIN family ON s.parent_id = family.id)"
        " UPDATE sessions SET deleted_ms = ?, alias = NULL, state = 'idle', owner = ''"
        " WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL",
        (session_id, now_ms()),
    )


def _insert_session(sql: Connection, new: NewSession) -> None:
    """:raises ArgumentError: the id or the alias is taken, or the fork's leaf is not in its conversation.
    :raises NoSuchSession: the parent of a subagent does not exist, or is deleted.
    """
    check_new_id(new.id)
    if sql.execute("SELECT 1 FROM sessions WHERE id = ?", (new.id,)).fetchone():
        raise id_taken(new.id)
    principal = plain_or_none(new.principal)
    if new.parent_id is not None:
        (principal,) = session_values(sql, new.parent_id, "principal")
    if new.alias is not None:
        _check_alias(sql, plain(new.alias), new.id, principal)
    now, turn, has_prompt, conversation = now_ms(), 0, False, new.conversation
    if conversation is None:
        conversation = insert(sql, "conversations", {"created_ms": now})
    if new.leaf is not None:
        query = "SELECT turn FROM entries WHERE id = ? AND conversation = ?"
        found = sql.execute(query, (new.leaf, conversation)).fetchone() if is_entry_id(new.leaf) else None
        if found is None:
            raise not_in_conversation(new.leaf, conversation)
        turn, has_prompt = found[0], has_user(sql, new.leaf)
    columns = columns_of_new(
        new, conversation=conversation, principal=principal, turn=turn, has_prompt=has_prompt, now_ms=now
    )
    insert(sql, "sessions", columns | {"title": None})
    if new.parent_id is not None:
        sql.execute(
            "INSERT INTO shares (principal, session, access, created_ms)"
            " SELECT principal, ?, access, created_ms FROM shares WHERE session = ?",
            (new.id, new.parent_id),
        )
    if columns["title"] is not None:
        set_title(sql, new.id, columns["title"])


def _check_alias(sql: Connection, alias: str, session_id: str, principal: str | None) -> None:
    values = {"alias": alias, "id": session_id, "principal": principal}
    other = sql.execute(f"SELECT id FROM sessions WHERE {_HAS_ALIAS} AND id <> :id", values).fetchone()
    if other:
        raise alias_taken(alias, other[0])


def _living(sql: Connection, conversation: int) -> str:
    """Return a text that describes the sessions of a conversation. The text changes whenever a session is added, moved
    or deleted, or gets another leaf."""
    rows = sql.execute(
        "SELECT s.id, s.leaf, s.deleted_ms, (SELECT max(m.id) FROM moves m WHERE m.session = s.id) FROM sessions s"
        " WHERE s.conversation = ? ORDER BY s.number",
        (conversation,),
    ).fetchall()
    return repr(rows)


_HAS_ALIAS = "coalesce(principal, '') = coalesce(:principal, '') AND alias = :alias"

_EMPTY = """
    SELECT 1 FROM sessions s
    WHERE s.id = :id AND s.leaf IS NULL AND s.has_prompt = 0 AND s.entries = 0 AND s.newest_entry = 0
    AND s.state = 'idle' AND s.parent_id IS NULL AND s.alias IS NULL AND s.title IS NULL AND s.metadata = '{}'
    AND s.permissions = '[]' AND s.archived = 0 AND s.deleted_ms IS NULL
    AND NOT EXISTS (SELECT 1 FROM entries WHERE session = s.id)
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE session = s.id)
    AND NOT EXISTS (SELECT 1 FROM drafts WHERE session = s.id)
    AND NOT EXISTS (SELECT 1 FROM moves WHERE session = s.id)
    AND NOT EXISTS (SELECT 1 FROM imports WHERE conversation = s.conversation)
"""

_DELETE_CONVERSATION = """
    DELETE FROM conversations WHERE id = :id AND NOT EXISTS (SELECT 1 FROM sessions WHERE conversation = :id)
"""

_UNNEEDED = """
    WITH RECURSIVE
    living (id, leaf) AS (
        SELECT id, leaf FROM sessions WHERE conversation = :conversation AND deleted_ms IS NULL
    ),
    needed (id) AS (
        SELECT leaf FROM living
        UNION SELECT e.id FROM living JOIN entries e ON e.session = living.id
        UNION SELECT m.from_leaf FROM living JOIN moves m ON m.session = living.id
        UNION SELECT m.to_leaf FROM living JOIN moves m ON m.session = living.id
        UNION SELECT e.parent FROM needed JOIN entries e ON e.id = needed.id
    )
    SELECT id FROM entries
    WHERE conversation = :conversation AND id NOT IN (SELECT id FROM needed WHERE id IS NOT NULL)
    ORDER BY id DESC
"""
