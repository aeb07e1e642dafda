"""Rows of the tables as values.

One damaged byte costs one entry and never a session: what cannot be trusted is replaced by words that say so, for the
user and for the model; the bytes stay as they are.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from collections.abc import Sequence
from typing import Any

from crow.domain.entries import Announcement, Assistant, Body, CallRef, Entry, Remark, ToolResult, User
from crow.domain.errors import NoSuchSession
from crow.domain.messages import Text, Usage
from crow.store import SessionRow
from crow.store.codec import Unreadable, decode, from_json
from crow.store.connection import REPAIR
from crow.store.fields import Load
from crow.store.owner import readable

__all__ = [
    "ENTRY_COLUMNS",
    "ENTRY_SOURCE",
    "SESSION_COLUMNS",
    "body_of",
    "checksum",
    "entry_of",
    "loader",
    "missing_entry",
    "session_of",
    "session_row",
]

SESSION_COLUMNS = (
    "id, conversation, leaf, cwd, model, mode, title, title_by_user, additional_directories, permissions, config,"
    " metadata, calibration, parent_id, forked_from, alias, state, owner, entries, tokens_in, tokens_out,"
    " tokens_cached, cost, newest_entry, has_prompt, created_ms, updated_ms, archived"
)
"""What `session_of` takes, of `sessions`."""

ENTRY_COLUMNS = (
    "e.id, e.conversation, e.session, e.parent, e.turn, e.kind, coalesce(CAST(e.body AS BLOB), b.data), e.model,"
    " e.input_tokens, e.output_tokens, e.cached_tokens, e.reasoning_tokens, e.cost, e.estimate, e.created_ms,"
    " e.body_blob, e.call_entry, e.call_index, e.checksum"
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


def checksum(body: bytes, columns: Sequence[object]) -> int:
    """What tells whether an entry is still what was written.

    `body` is its JSON, or the hash of the blob that holds it; `columns` are conversation, session, parent, turn, kind,
    model, call_entry, call_index, the four counts of tokens, cost, estimate and created_ms.
    """
    return zlib.crc32(body, zlib.crc32(ascii(tuple(columns)).encode()))


def entry_of(row: Sequence[Any], load: Load) -> Entry:
    """The entry of a row of `ENTRY_COLUMNS`; words stand for a body that is damaged or unknown."""
    try:
        body = body_of(row, load)
    except Unreadable as error:
        return _stand_in(row, f"Entry {row[0]} ({row[5]}) could not be read: {error}.")
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


def body_of(row: Sequence[Any], load: Load) -> Body:
    """The body of a row of `ENTRY_COLUMNS`.

    :raises Unreadable: it is damaged, or of a kind that this version does not know.
    """
    data, blob, written = row[6], row[15], row[18]
    if written is not None:
        columns = (*row[1:6], row[7], *row[16:18], *row[8:15])
        if checksum(data or b"" if blob is None else str(blob).encode(), columns) != written:
            raise Unreadable("it is damaged: its checksum is wrong")
    if blob is not None:
        if data is None:
            raise Unreadable(f"blob {blob:.12}, which holds it, is missing")
        _check_blob(blob, bytes(data))
    return decode(row[5], data, load)


def missing_entry(entry_id: int, conversation: int, session: str = "") -> Entry:
    """Words in the place of an entry that its child, or its session, names, but that is not there."""
    words = f"Entry {entry_id} is missing from the database, and with it all before it. {REPAIR}"
    return Entry(
        id=entry_id,
        conversation=conversation,
        session=session,
        parent=None,
        turn=0,
        body=Remark(text=words, message_id=_stand_in_id(entry_id)),
    )


def loader(connection: sqlite3.Connection) -> Load:
    """Reads blobs by hash.

    :raises Unreadable: a blob is not what its hash says.
    """

    def load(name: str) -> bytes | None:
        row = connection.execute("SELECT data FROM blobs WHERE hash = ?", (name,)).fetchone()
        if row is None:
            return None
        data = bytes(row[0])
        _check_blob(name, data)
        return data

    return load


def _stand_in(row: Sequence[Any], words: str) -> Entry:
    """An entry in the place of one that cannot be read. It says so to the user, and to the model where that one had a
    part in the conversation."""
    name, kind, call_entry, call_index = _stand_in_id(row[0]), row[5], row[16], row[17]
    body: Body = Remark(text=words, message_id=name)
    if kind == "user":
        body = User(parts=(Text(text=f"[{words}]"),), message_id=name)
    elif kind == "assistant":
        body = Assistant(text=f"[{words}]", message_id=name)
    elif kind == "tool" and isinstance(call_entry, int) and isinstance(call_index, int):
        call = CallRef(assistant=call_entry, index=call_index)
        body = ToolResult(
            call=call, name="", text=f"[{words}]", is_error=True, announcement=Announcement(title="(damaged)")
        )
    return Entry(
        id=row[0],
        conversation=row[1],
        session=row[2],
        parent=row[3] if isinstance(row[3], int) else None,
        turn=row[4] if isinstance(row[4], int) else 0,
        body=body,
    )


def _stand_in_id(entry_id: int) -> str:
    return f"unreadable-{entry_id}"


def _check_blob(name: str, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != name:
        raise Unreadable(f"blob {name:.12} is damaged: its sha256 is wrong")


def _usage_of(
    input_tokens: int | None, output_tokens: int | None, cached: int | None, reasoning: int | None
) -> Usage | None:
    if input_tokens is None and output_tokens is None and cached is None and reasoning is None:
        return None
    return Usage(
        input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached, reasoning_tokens=reasoning
    )
