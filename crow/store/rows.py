"""Rows of the tables as values.

Strategy: one list of columns and one function for each of the two kinds of row that leave the store, sessions and
entries. A body that cannot be read becomes a remark that says so, in its place in the path, so that one damaged byte
costs one entry and never a session: the model does not see it, the user does, and the bytes stay as they are.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from crow.domain.entries import Body, Entry, Remark
from crow.domain.errors import NoSuchSession
from crow.domain.messages import Usage
from crow.store import SessionRow
from crow.store.codec import Unreadable, decode, from_json
from crow.store.fields import Load
from crow.store.owner import readable

__all__ = ["ENTRY_COLUMNS", "ENTRY_SOURCE", "SESSION_COLUMNS", "entry_of", "loader", "session_of", "session_row"]

SESSION_COLUMNS = (
    "id, conversation, leaf, cwd, model, mode, title, title_by_user, additional_directories, permissions, config,"
    " metadata, calibration, parent_id, forked_from, alias, state, owner, entries, tokens_in, tokens_out,"
    " tokens_cached, cost, newest_entry, has_prompt, created_ms, updated_ms, archived"
)
"""What `session_of` takes, of `sessions`."""

ENTRY_COLUMNS = (
    "e.id, e.conversation, e.session, e.parent, e.turn, e.kind, coalesce(CAST(e.body AS BLOB), b.data), e.model,"
    " e.input_tokens, e.output_tokens, e.cached_tokens, e.reasoning_tokens, e.cost, e.estimate, e.created_ms"
)
"""What `entry_of` takes, of `ENTRY_SOURCE`; the body as bytes, since damaged text would fail the whole query."""

ENTRY_SOURCE = "entries e LEFT JOIN blobs b ON b.hash = e.body_blob"


def session_row(connection: sqlite3.Connection, session_id: str) -> SessionRow:
    """The row of a session.

    :raises NoSuchSession: there is none, or it is deleted.
    """
    row = connection.execute(
        f"SELECT {SESSION_COLUMNS} FROM sessions WHERE id = ? AND deleted_ms IS NULL",
        (session_id,),
    ).fetchone()
    if row is None:
        raise NoSuchSession(session_id)
    return session_of(row)


def session_of(row: Sequence[Any]) -> SessionRow:
    """The session of a row of `SESSION_COLUMNS`; damaged JSON columns read as empty."""
    return SessionRow(
        id=row[0],
        conversation=row[1],
        leaf=row[2],
        cwd=row[3],
        model=row[4],
        mode=row[5],
        title=row[6],
        title_by_user=bool(row[7]),
        additional_directories=tuple(item for item in from_json(row[8], []) if isinstance(item, str)),
        permissions=tuple(item for item in from_json(row[9], []) if isinstance(item, dict)),
        config=from_json(row[10], {}),
        metadata=from_json(row[11], {}),
        calibration=row[12],
        parent_id=row[13],
        forked_from=row[14],
        alias=row[15],
        state=row[16],
        owner=readable(row[17]) if row[17] else "",
        entries=row[18],
        tokens_in=row[19],
        tokens_out=row[20],
        tokens_cached=row[21],
        cost=row[22],
        newest_entry=row[23],
        has_prompt=bool(row[24]),
        created_ms=row[25],
        updated_ms=row[26],
        archived=bool(row[27]),
    )


def entry_of(row: Sequence[Any], load: Load) -> Entry:
    """The entry of a row of `ENTRY_COLUMNS`."""
    body: Body
    try:
        body = decode(row[5], row[6], load)
    except Unreadable as error:
        body = Remark(text=f"Entry {row[0]} ({row[5]}) could not be read: {error}.", message_id=f"unreadable-{row[0]}")
    return Entry(
        id=row[0],
        conversation=row[1],
        session=row[2],
        parent=row[3],
        turn=row[4],
        body=body,
        model=row[7],
        usage=_usage_of(*row[8:12]),
        cost=row[12],
        estimate=row[13],
        created_ms=row[14],
    )


def loader(connection: sqlite3.Connection) -> Load:
    """Reads blobs by hash."""

    def load(name: str) -> bytes | None:
        row = connection.execute("SELECT data FROM blobs WHERE hash = ?", (name,)).fetchone()
        return bytes(row[0]) if row else None

    return load


def _usage_of(
    input_tokens: int | None, output_tokens: int | None, cached: int | None, reasoning: int | None
) -> Usage | None:
    if input_tokens is None and output_tokens is None and cached is None and reasoning is None:
        return None
    return Usage(
        input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached, reasoning_tokens=reasoning
    )
