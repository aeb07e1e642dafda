"""Old sessions: found by a part of their id, listed by age, removed on request.

Strategy: the age of a session is the time of the newest entry it stands on or wrote, or of its making if that is later;
what only touches its row (a title, archiving) makes it no younger. What is listed and what is removed come from one
statement. A session in which a living process runs a turn is never removed. Nothing here happens by itself.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from crow.domain.errors import ArgumentError, SessionBusy
from crow.store.owner import is_alive, readable
from crow.store.sessions import delete_session

__all__ = ["Old", "find", "prune", "remove", "session_ids", "unused_since"]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """A session that was not used for long; times are Unix milliseconds. `title` None: none, or no prompt yet."""

    id: str
    cwd: str
    title: str | None
    used_ms: int
    entries: int
    archived: bool


def find(connection: sqlite3.Connection, name: str) -> str:
    """The id of the session with this id or alias, or else the one whose id begins so.

    :raises ArgumentError: none, or several.
    """
    rows = connection.execute(
        "SELECT id FROM sessions WHERE deleted_ms IS NULL AND (id = :name OR alias = :name) ORDER BY id <> :name",
        {"name": name},
    ).fetchall()
    if not rows and name:
        rows = connection.execute(
            "SELECT id FROM sessions WHERE deleted_ms IS NULL AND substr(id, 1, length(:name)) = :name"
            " ORDER BY newest_entry DESC, id",
            {"name": name},
        ).fetchall()
        if len(rows) > 1:
            shown = ", ".join(row[0] for row in rows[:_SHOWN]) + (", ..." if len(rows) > _SHOWN else "")
            raise ArgumentError(f'"{name}" begins the ids of {len(rows)} sessions: {shown}. Give more of the id.')
    if not rows:
        raise ArgumentError(f'No session "{name}". Run "crow sessions" to list them.')
    return str(rows[0][0])


def session_ids(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Every id, sub-agents included, in order."""
    return tuple(row[0] for row in connection.execute("SELECT id FROM sessions WHERE deleted_ms IS NULL ORDER BY id"))


def unused_since(connection: sqlite3.Connection, before_ms: int, cwd: str | None, *, now_ms: int) -> tuple[Old, ...]:
    """Sessions last used before that time, oldest first; with `cwd`, those of that directory."""
    rows = connection.execute(
        f"SELECT * FROM ({_USED}) WHERE used_ms < :before AND (:cwd IS NULL OR cwd = :cwd) ORDER BY used_ms, id",
        {"before": before_ms, "cwd": cwd},
    ).fetchall()
    return tuple(
        Old(id=name, cwd=directory, title=title, used_ms=used_ms, entries=entries, archived=bool(archived))
        for name, directory, title, used_ms, entries, archived, state, owner, lease_ms in rows
        if not _is_running(state, owner, lease_ms, now_ms=now_ms)
    )


def prune(connection: sqlite3.Connection, before_ms: int, cwd: str | None, *, now_ms: int) -> tuple[Old, ...]:
    """Hide what `unused_since` lists, with its sub-agents."""
    old = unused_since(connection, before_ms, cwd, now_ms=now_ms)
    for session in old:
        delete_session(connection, session.id, now_ms=now_ms)
    return old


def remove(connection: sqlite3.Connection, ids: Sequence[str], *, now_ms: int) -> None:
    """Hide sessions, with their sub-agents.

    :raises SessionBusy: a living process runs a turn in one; none is hidden.
    """
    for session_id in ids:
        row = connection.execute("SELECT state, owner, lease_ms FROM sessions WHERE id = ?", (session_id,)).fetchone()
        if row is not None and _is_running(*row, now_ms=now_ms):
            raise SessionBusy(session_id, readable(row[1]))
        delete_session(connection, session_id, now_ms=now_ms)


def _is_running(state: str, owner: str, lease_ms: int, *, now_ms: int) -> bool:
    return state == "running" and is_alive(owner, lease_age_ms=now_ms - lease_ms)


_USED = """
    SELECT id, cwd, title, max(created_ms, coalesce(
        (SELECT e.created_ms FROM entries e WHERE e.id = sessions.newest_entry), 0)) AS used_ms,
        entries, archived, state, owner, lease_ms
    FROM sessions WHERE parent_id IS NULL AND deleted_ms IS NULL
"""
