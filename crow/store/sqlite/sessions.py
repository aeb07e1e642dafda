"""The rows of sessions: made, listed, changed, hidden.

Strategy: a session is a row that points into a conversation; a fork is one more row. Lists are one walk along an index,
continued by a cursor that names the last row shown. Deleting only hides; `removal` does the rest. Knows no turns.
"""

from __future__ import annotations

import base64
import re
import sqlite3
from collections.abc import Mapping
from dataclasses import fields

from crow.domain.errors import ArgumentError
from crow.store import UNCHANGED, NewSession, SessionChanges, SessionPage, SessionRow
from crow.store.codec import from_json, to_json
from crow.store.sqlite.paths import SESSION_COLUMNS, has_user, session_of, session_row

__all__ = [
    "change_session",
    "create_session",
    "delete_session",
    "fork_session",
    "learn",
    "learned",
    "list_sessions",
    "move_alias",
    "named",
    "set_title",
]

# ruff: noqa: S608  # statements are put together from constants; values are parameters


_FORK = re.compile(r" \(fork ([0-9]{1,9})\)$")
_JSON_COLUMNS = frozenset({"additional_directories", "permissions", "config", "metadata"})


def create_session(connection: sqlite3.Connection, new: NewSession, *, now_ms: int) -> SessionRow:
    """:raises ArgumentError: the id or the alias is taken, or the fork's leaf is not in its conversation."""
    if connection.execute("SELECT 1 FROM sessions WHERE id = ?", (new.id,)).fetchone():
        raise ArgumentError(f"Session id {new.id} is taken; ids are never used twice.")
    if new.alias is not None:
        _check_alias(connection, new.alias, new.id)
    turn, has_prompt, conversation = 0, False, new.conversation
    if conversation is None:
        conversation = connection.execute("INSERT INTO conversations (created_ms) VALUES (?)", (now_ms,)).lastrowid
    if new.leaf is not None:
        found = connection.execute("SELECT conversation, turn FROM entries WHERE id = ?", (new.leaf,)).fetchone()
        if found is None or found[0] != conversation:
            raise ArgumentError(f"Entry {new.leaf} is not in conversation {conversation}; fork from one that is.")
        turn, has_prompt = found[1], has_user(connection, new.leaf)
    connection.execute(
        "INSERT INTO sessions (id, conversation, leaf, forked_from, parent_id, cwd, additional_directories, model,"
        " mode, config, alias, turn, has_prompt, newest_entry, created_ms, updated_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            new.id,
            conversation,
            new.leaf,
            new.forked_from,
            new.parent_id,
            new.cwd,
            to_json(new.additional_directories),
            new.model,
            new.mode,
            to_json(new.config),
            new.alias,
            turn,
            has_prompt,
            new.leaf or 0,
            now_ms,
            now_ms,
        ),
    )
    if new.title is not None:
        set_title(connection, new.id, new.title)
    return session_row(connection, new.id)


def fork_session(
    connection: sqlite3.Connection,
    session_id: str,
    new_id: str,
    *,
    entry: int | None,
    cwd: str,
    additional_directories: tuple[str, ...],
    now_ms: int,
) -> SessionRow:
    """One more row on the same conversation; what was learned of the endpoint goes with it."""
    row = session_row(connection, session_id)
    new = NewSession(
        id=new_id,
        cwd=cwd,
        model=row.model,
        mode=row.mode,
        additional_directories=additional_directories,
        config=row.config,
        forked_from=session_id,
        conversation=row.conversation,
        leaf=row.leaf if entry is None else entry,
        title=_fork_title(connection, row),
    )
    create_session(connection, new, now_ms=now_ms)
    connection.execute(
        "UPDATE sessions SET calibration = ?, metadata = ? WHERE id = ?",
        (row.calibration, to_json(row.metadata), new_id),
    )
    return session_row(connection, new_id)


def named(connection: sqlite3.Connection, alias: str) -> SessionRow | None:
    """The session that has the alias."""
    row = connection.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE alias = ? AND deleted_ms IS NULL", (alias,)
    ).fetchone()
    return session_of(row) if row else None


def move_alias(connection: sqlite3.Connection, session_id: str, to: str, *, now_ms: int) -> None:
    """:raises ArgumentError: the session has no alias."""
    alias, _ = session_row(connection, session_id).alias, session_row(connection, to)
    if alias is None:
        raise ArgumentError(f"Session {session_id} has no alias any more; it was moved or taken away meanwhile.")
    change_session(connection, session_id, SessionChanges(alias=None), now_ms=now_ms)
    change_session(connection, to, SessionChanges(alias=alias), now_ms=now_ms)


def list_sessions(
    connection: sqlite3.Connection, *, cwd: str | None, cursor: str | None, limit: int, archived: bool
) -> SessionPage:
    """:raises ArgumentError: a cursor that is not from here, or a limit below 1."""
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
    rows = connection.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {where} ORDER BY newest_entry DESC, id DESC LIMIT ?",
        (*values, limit + 1),
    ).fetchall()
    found = tuple(session_of(row) for row in rows[:limit])
    return SessionPage(rows=found, cursor=_cursor(found[-1]) if len(rows) > limit else None)


def change_session(connection: sqlite3.Connection, session_id: str, changes: SessionChanges, *, now_ms: int) -> None:
    """Set columns of a row that exists.

    :raises ArgumentError: the alias is another session's.
    """
    values = {field.name: getattr(changes, field.name) for field in fields(changes)}
    values = {name: value for name, value in values.items() if value is not UNCHANGED}
    if not values:
        return
    alias = values.get("alias")
    if alias is not None:
        _check_alias(connection, alias, session_id)
    if "title" in values:
        set_title(connection, session_id, values.pop("title"))
    values = {name: to_json(value) if name in _JSON_COLUMNS else value for name, value in values.items()}
    assignments = ", ".join(f"{name} = ?" for name in (*values, "updated_ms"))
    connection.execute(f"UPDATE sessions SET {assignments} WHERE id = ?", (*values.values(), now_ms, session_id))


def delete_session(connection: sqlite3.Connection, session_id: str, *, now_ms: int) -> None:
    """Hide it and its sub-agents; the alias is free again."""
    connection.execute(
        "WITH RECURSIVE family (id) AS"
        " (SELECT ? UNION SELECT s.id FROM sessions s JOIN family ON s.parent_id = family.id)"
        " UPDATE sessions SET deleted_ms = ?, alias = NULL, state = 'idle', owner = ''"
        " WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL",
        (session_id, now_ms),
    )


def set_title(connection: sqlite3.Connection, session_id: str, title: str | None) -> None:
    """Set the title, and say so to the full-text index: what it had, what it has."""
    # The view is asked for one known id: for one that a subquery gives it would read every entry there is.
    row = connection.execute("SELECT -number FROM sessions WHERE id = ?", (session_id,)).fetchone()
    indexed = "SELECT id, text FROM searchable WHERE id = ? AND text <> ''"
    connection.execute(
        f"INSERT INTO entries_fts (entries_fts, rowid, text) SELECT 'delete', id, text FROM ({indexed})", row
    )
    connection.execute("UPDATE sessions SET title = ? WHERE id = ?", (title, session_id))
    connection.execute(f"INSERT INTO entries_fts (rowid, text) {indexed}", row)


def _check_alias(connection: sqlite3.Connection, alias: str, session_id: str) -> None:
    other = connection.execute("SELECT id FROM sessions WHERE alias = ? AND id <> ?", (alias, session_id)).fetchone()
    if other:
        raise ArgumentError(f'Alias "{alias}" is the one of session {other[0]}; choose another.')


def _fork_title(connection: sqlite3.Connection, row: SessionRow) -> str | None:
    """The title with the next free number; None for a session without one."""
    if row.title is None:
        return None
    base = _FORK.sub("", row.title)
    taken = [0]
    for (title,) in connection.execute("SELECT title FROM sessions WHERE conversation = ?", (row.conversation,)):
        found = _FORK.search(title or "")
        if found and title[: found.start()] == base:
            taken.append(int(found[1]))
    return f"{base} (fork {max(taken) + 1})"


def _cursor(row: SessionRow) -> str:
    return base64.urlsafe_b64encode(f"{row.newest_entry}:{row.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[int, str]:
    try:
        newest, separator, session_id = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(":")
        if separator and 0 <= int(newest) < 2**63:
            return int(newest), session_id
    except ValueError:
        pass
    raise ArgumentError(f'cursor is "{cursor}", which no list gave; leave it out to start from the newest session.')


# FROM store.endpoints: What was learned about endpoints: one JSON object for each base URL and model.


def learned(connection: sqlite3.Connection, base_url: str, model: str) -> Mapping[str, object]:
    """The facts; empty if there are none."""
    row = connection.execute(
        "SELECT learned FROM endpoints WHERE base_url = ? AND model = ?", (base_url, model)
    ).fetchone()
    facts: Mapping[str, object] = from_json(row[0], {}) if row else {}
    return facts


def learn(connection: sqlite3.Connection, base_url: str, model: str, facts: Mapping[str, object]) -> None:
    """Merge `facts`; a key replaces the one there was."""
    connection.execute(
        "INSERT INTO endpoints (base_url, model, learned) VALUES (?, ?, ?)"
        " ON CONFLICT (base_url, model) DO UPDATE SET learned = excluded.learned",
        (base_url, model, to_json({**learned(connection, base_url, model), **facts})),
    )
