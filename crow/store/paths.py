"""Paths through the tree of entries: the tail that the model needs, and the whole history.

Strategy: walk from the leaf to the root by parents, in batches, and stop as soon as what is wanted is in hand, so that
the cost follows the distance to the newest checkpoint and not the length of the session. Ids increase along a path, so
order needs no other column. Reads only.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from crow.domain.entries import Checkpoint, Entry, Prompt, Restore
from crow.store import SessionRow, Tail
from crow.store.codec import Unreadable
from crow.store.rows import ENTRY_COLUMNS, ENTRY_SOURCE, body_of, entry_of, loader, missing_entry, session_row

__all__ = [
    "count_messages",
    "damage",
    "entries_of",
    "entry",
    "has_user",
    "ids_before",
    "is_on_path",
    "path_ids",
    "tail",
]

_BATCH = 256
_BATCH_BYTES = 4 * 1024 * 1024

# A damaged parent may name anything: only an older entry of the same conversation is followed.
_WALK = """
    WITH RECURSIVE path (id, parent, conversation, steps) AS (
        SELECT id, parent, conversation, 1 FROM entries
        WHERE id = :start AND conversation = coalesce(:conversation, conversation)
        UNION ALL
        SELECT e.id, e.parent, e.conversation, steps + 1 FROM path JOIN entries e ON e.id = path.parent
        WHERE steps < :limit AND e.id < path.id AND e.conversation = path.conversation
    )
"""


def tail(connection: sqlite3.Connection, session_id: str) -> Tail:
    """The row, and the path from what the newest counting checkpoint keeps; the whole path without one."""
    row = session_row(connection, session_id)
    newest_first: list[Entry] = []
    restored: set[int] = set()
    first_kept: int | None = None
    has_prompt = False
    for entry in _entries(connection, row):
        if first_kept is not None and entry.id < first_kept:
            break
        newest_first.append(entry)
        match entry.body:
            case Prompt():
                has_prompt = True
            case Restore(entry=named):
                restored.add(named)
            case Checkpoint(first_kept=kept) if first_kept is None and entry.id not in restored:
                # A checkpoint keeps nothing that comes after it: a larger id could only be a damaged one.
                first_kept = entry.id if kept is None else min(kept, entry.id)
            case _:
                pass
    if newest_first and not has_prompt:
        prompt = _newest_of_kind(connection, newest_first[-1].parent, "prompt")
        if prompt is not None:
            newest_first.append(prompt)
    return Tail(row=row, entries=tuple(reversed(newest_first)))


def path_ids(connection: sqlite3.Connection, leaf: int | None) -> Iterator[int]:
    """The ids of the path that ends at `leaf`, newest first."""
    while leaf is not None:
        ids, leaf, _ = ids_before(connection, leaf, _BATCH)
        yield from ids


def ids_before(
    connection: sqlite3.Connection, start: int, limit: int, *, conversation: int | None = None
) -> tuple[list[int], int | None, int | None]:
    """Up to `limit` ids of the path that ends at `start`, newest first; where to go on, None at the end; and the entry
    that should come there but is missing, None if the end is the root."""
    rows = connection.execute(
        f"{_WALK} SELECT id, parent FROM path", {"start": start, "limit": limit, "conversation": conversation}
    ).fetchall()
    return [row[0] for row in rows], *_next(start, rows, limit)


def is_on_path(connection: sqlite3.Connection, leaf: int | None, entry_id: int) -> bool:
    """Whether the path that ends at `leaf` holds the entry."""
    return next((found for found in path_ids(connection, leaf) if found <= entry_id), None) == entry_id


def has_user(connection: sqlite3.Connection, leaf: int) -> bool:
    """Whether the path that ends at `leaf` holds a user's message."""
    return _newest_of_kind(connection, leaf, "user") is not None


def count_messages(connection: sqlite3.Connection, session_ids: Sequence[str]) -> dict[str, int]:
    """How many prompts and answers are on the path of each session; about 2 µs an entry."""
    rows = connection.execute(
        "WITH RECURSIVE path (session, id, parent, kind) AS ("
        " SELECT s.id, e.id, e.parent, e.kind FROM sessions s JOIN entries e ON e.id = s.leaf"
        " WHERE s.id IN (SELECT value FROM json_each(?))"
        " UNION ALL SELECT path.session, e.id, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent"
        " WHERE e.id < path.id)"  # a damaged parent may name anything
        " SELECT session, count(*) FROM path WHERE kind IN ('user', 'assistant') GROUP BY session",
        (json.dumps(list(session_ids)),),
    )
    return {**dict.fromkeys(session_ids, 0), **dict(rows.fetchall())}


def entries_of(connection: sqlite3.Connection, ids: Sequence[int]) -> tuple[tuple[Entry, ...], int]:
    """The first of the entries with `ids` (ascending), bounded in number and bytes, and how many ids that took."""
    wanted = list(ids[:_BATCH])
    load = loader(connection)
    found: list[Entry] = []
    size = 0

    def weighed(name: str) -> bytes | None:
        nonlocal size
        data = load(name)
        size += len(data or b"")
        return data

    rows = connection.execute(
        f"SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE} WHERE e.id IN (SELECT value FROM json_each(?)) ORDER BY e.id",
        (json.dumps(wanted),),
    )
    for row in rows:
        found.append(entry_of(row, weighed))
        size += len(row[6] or b"")
        if size > _BATCH_BYTES:
            rows.close()
            return tuple(found), wanted.index(row[0]) + 1
    return tuple(found), len(wanted)


def entry(connection: sqlite3.Connection, entry_id: int) -> Entry | None:
    """One entry."""
    row = connection.execute(
        f"SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE} WHERE e.id = ?",
        (entry_id,),
    ).fetchone()
    return entry_of(row, loader(connection)) if row else None


def damage(connection: sqlite3.Connection, entry_id: int) -> str:
    """Why an entry cannot be read; empty if it can, or if there is none."""
    row = connection.execute(f"SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE} WHERE e.id = ?", (entry_id,)).fetchone()
    try:
        if row is not None:
            body_of(row, loader(connection))
    except Unreadable as error:
        return str(error)
    return ""


def _entries(connection: sqlite3.Connection, row: SessionRow) -> Iterator[Entry]:
    """The path of the session, newest first. Words stand for what is missing at its end."""
    load = loader(connection)
    start = row.leaf
    while start is not None:
        rows = connection.execute(
            f"{_WALK} SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE}"
            " WHERE e.id IN (SELECT id FROM path) ORDER BY e.id DESC",
            {"start": start, "limit": _BATCH, "conversation": row.conversation},
        ).fetchall()
        for one in rows:
            yield entry_of(one, load)
        start, missing = _next(start, rows, _BATCH, parent_at=3)
        if missing is not None:
            yield missing_entry(missing, row.conversation, row.id)


def _newest_of_kind(connection: sqlite3.Connection, start: int | None, kind: str) -> Entry | None:
    while start is not None:
        rows = connection.execute(
            f"{_WALK} SELECT path.id, path.parent, e.kind FROM path JOIN entries e ON e.id = path.id",
            {"start": start, "limit": _BATCH, "conversation": None},
        ).fetchall()
        for entry_id, _, found in rows:
            if found == kind:
                return entry(connection, entry_id)
        start, _ = _next(start, rows, _BATCH)
    return None


def _next(
    start: int, rows: Sequence[Sequence[Any]], limit: int, *, parent_at: int = 1
) -> tuple[int | None, int | None]:
    """Where a walk from `start` goes on that gave `rows`, which begin with an id; and what is missing: see
    `ids_before`."""
    if not rows:
        return None, start
    entry_id, parent = rows[-1][0], rows[-1][parent_at]
    if parent is None:
        return None, None
    if not isinstance(parent, int) or not 0 < parent < entry_id:
        return None, entry_id - 1
    return (parent, None) if len(rows) == limit else (None, parent)
