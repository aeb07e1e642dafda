"""Creates, lists, changes, forks and hides sessions."""

from __future__ import annotations

import base64
import re
from dataclasses import fields
from sqlite3 import Connection

from crow.domain.errors import ArgumentError
from crow.store import NewSession, SessionChanges, SessionPage, SessionRow
from crow.store.codec import to_json
from crow.store.sqlite.database import UsesDatabase, now_ms, snapshot, transaction
from crow.store.sqlite.paths import SESSION_COLUMNS, has_user, session_of, session_row

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_FORK_TITLE = re.compile(r" \(fork ([0-9]{1,9})\)$")
_JSON_COLUMNS = frozenset({"additional_directories", "permissions", "config", "metadata"})


class SessionMethods(UsesDatabase):
    """Methods of the store for sessions as a whole."""

    @transaction(raise_if_moved=True)
    def create_session(self, sql: Connection, new: NewSession) -> SessionRow:
        _insert_session(sql, new)
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
    ) -> SessionRow:
        row = session_row(sql, session_id)
        fork = NewSession(
            id=new_id,
            cwd=cwd,
            model=row.model,
            mode=row.mode,
            additional_directories=additional_directories,
            config=row.config,
            forked_from=session_id,
            conversation=row.conversation,
            leaf=row.leaf if entry is None else entry,
            title=_fork_title(sql, row),
        )
        _insert_session(sql, fork)
        sql.execute(
            "UPDATE sessions SET calibration = ?, metadata = ? WHERE id = ?",
            (row.calibration, to_json(row.metadata), new_id),
        )
        return session_row(sql, new_id)

    @snapshot(raise_if_moved=True)
    def named(self, sql: Connection, alias: str) -> SessionRow | None:
        query = f"SELECT {SESSION_COLUMNS} FROM sessions WHERE alias = ? AND deleted_ms IS NULL"
        row = sql.execute(query, (alias,)).fetchone()
        return session_of(row) if row else None

    @transaction()
    def move_alias(self, sql: Connection, session_id: str, to: str) -> None:
        alias, _ = session_row(sql, session_id).alias, session_row(sql, to)
        if alias is None:
            raise ArgumentError(f"Session {session_id} has no alias any more; it was moved or removed meanwhile.")
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
        archived: bool = False,
    ) -> SessionPage:
        if limit < 1:
            raise ArgumentError(f"limit is {limit}; expected 1 or more.")
        where = "has_prompt = 1 AND parent_id IS NULL AND deleted_ms IS NULL AND archived = ?"
        values: list[object] = [archived]
        if cwd is not None:
            where += " AND cwd = ?"
            values.append(cwd)
        if cursor is not None:
            where += " AND (newest_entry, id) < (?, ?)"
            values.extend(_parse_cursor(cursor))
        rows = sql.execute(
            f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {where} ORDER BY newest_entry DESC, id DESC LIMIT ?",
            (*values, limit + 1),
        ).fetchall()
        found = tuple(session_of(row) for row in rows[:limit])
        return SessionPage(rows=found, cursor=_cursor_after(found[-1]) if len(rows) > limit else None)

    @transaction()
    def update_session(self, sql: Connection, session_id: str, changes: SessionChanges) -> SessionRow:
        session_row(sql, session_id)
        change_session(sql, session_id, changes)
        return session_row(sql, session_id)

    @transaction(raise_if_moved=True)
    def delete_session(self, sql: Connection, session_id: str) -> None:
        hide_session(sql, session_id)


def change_session(sql: Connection, session_id: str, changes: SessionChanges) -> None:
    """Set columns of an existing row.

    :raises ArgumentError: the alias belongs to another session.
    """
    if not changes:
        return
    alias = changes.get("alias")
    if alias is not None:
        _check_alias(sql, alias, session_id)
    if "title" in changes:
        set_title(sql, session_id, changes["title"])
    values = {name: to_json(value) if name in _JSON_COLUMNS else value for name, value in changes.items()}
    values["updated_ms"] = now_ms()
    assignments = ", ".join(f"{name} = ?" for name in values)
    sql.execute(f"UPDATE sessions SET {assignments} WHERE id = ?", (*values.values(), session_id))


def set_title(sql: Connection, session_id: str, title: str | None) -> None:
    """Set the title, in the full-text index too. The index stores no text, so it must be told the old title."""
    # The view is asked for one known id: with an id from a subquery it would read all entries.
    row = sql.execute("SELECT -number FROM sessions WHERE id = ?", (session_id,)).fetchone()
    indexed = "SELECT id, text FROM searchable WHERE id = ? AND text <> ''"
    sql.execute(f"INSERT INTO entries_fts (entries_fts, rowid, text) SELECT 'delete', id, text FROM ({indexed})", row)
    sql.execute("UPDATE sessions SET title = ? WHERE id = ?", (title, session_id))
    sql.execute(f"INSERT INTO entries_fts (rowid, text) {indexed}", row)


def hide_session(sql: Connection, session_id: str) -> None:
    """Mark a session and its sub-agents as deleted, and free the alias."""
    sql.execute(
        "WITH RECURSIVE family (id) AS"
        " (SELECT ? UNION SELECT s.id FROM sessions s JOIN family ON s.parent_id = family.id)"
        " UPDATE sessions SET deleted_ms = ?, alias = NULL, state = 'idle', owner = ''"
        " WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL",
        (session_id, now_ms()),
    )


def _insert_session(sql: Connection, new: NewSession) -> None:
    """:raises ArgumentError: the id or the alias is taken, or the fork's leaf is not in its conversation."""
    if sql.execute("SELECT 1 FROM sessions WHERE id = ?", (new.id,)).fetchone():
        raise ArgumentError(f"Session id {new.id} is taken; ids are never used twice.")
    if new.alias is not None:
        _check_alias(sql, new.alias, new.id)
    now, turn, has_prompt, conversation = now_ms(), 0, False, new.conversation
    if conversation is None:
        conversation = sql.execute("INSERT INTO conversations (created_ms) VALUES (?)", (now,)).lastrowid
    if new.leaf is not None:
        found = sql.execute("SELECT conversation, turn FROM entries WHERE id = ?", (new.leaf,)).fetchone()
        if found is None or found[0] != conversation:
            raise ArgumentError(f"Entry {new.leaf} is not in conversation {conversation}; fork from one that is.")
        turn, has_prompt = found[1], has_user(sql, new.leaf)
    row = {field.name: getattr(new, field.name) for field in fields(new) if field.name != "title"} | {
        "conversation": conversation,
        "additional_directories": to_json(new.additional_directories),
        "config": to_json(new.config),
        "turn": turn,
        "has_prompt": has_prompt,
        "newest_entry": new.leaf or 0,
        "created_ms": now,
        "updated_ms": now,
    }
    sql.execute(f"INSERT INTO sessions ({', '.join(row)}) VALUES (:{', :'.join(row)})", row)
    if new.title is not None:
        set_title(sql, new.id, new.title)


def _check_alias(sql: Connection, alias: str, session_id: str) -> None:
    other = sql.execute("SELECT id FROM sessions WHERE alias = ? AND id <> ?", (alias, session_id)).fetchone()
    if other:
        raise ArgumentError(f'Alias "{alias}" belongs to session {other[0]}; choose another.')


def _fork_title(sql: Connection, row: SessionRow) -> str | None:
    """The title with the next free number; None for a session without a title."""
    if row.title is None:
        return None
    base = _FORK_TITLE.sub("", row.title)
    taken = [0]
    for (title,) in sql.execute("SELECT title FROM sessions WHERE conversation = ?", (row.conversation,)):
        found = _FORK_TITLE.search(title or "")
        if found and title[: found.start()] == base:
            taken.append(int(found[1]))
    return f"{base} (fork {max(taken) + 1})"


def _cursor_after(row: SessionRow) -> str:
    return base64.urlsafe_b64encode(f"{row.newest_entry}:{row.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[int, str]:
    try:
        newest, separator, session_id = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(":")
        if separator and 0 <= int(newest) < 2**63:
            return int(newest), session_id
    except ValueError:
        pass
    raise ArgumentError(f'cursor is "{cursor}", but no list gave it; leave it out to start from the newest session.')
