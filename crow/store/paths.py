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

from crow.domain.entries import Checkpoint, Entry, Prompt, Restore
from crow.store import Tail
from crow.store.rows import ENTRY_COLUMNS, ENTRY_SOURCE, entry_of, loader, session_row

__all__ = ["count_messages", "entries_of", "entry", "has_user", "ids_before", "is_on_path", "path_ids", "tail"]

_BATCH = 256
_BATCH_BYTES = 4 * 1024 * 1024

_WALK = """
    WITH RECURSIVE path (id, parent, steps) AS (
        SELECT id, parent, 1 FROM entries WHERE id = :start
        UNION ALL
        SELECT e.id, e.parent, steps + 1 FROM path JOIN entries e ON e.id = path.parent WHERE steps < :limit
    )
"""


def tail(connection: sqlite3.Connection, session_id: str) -> Tail:
    """The row, and the path from what the newest counting checkpoint keeps; the whole path without one."""
    row = session_row(connection, session_id)
    newest_first: list[Entry] = []
    restored: set[int] = set()
    first_kept: int | None = None
    has_prompt = False
    for entry in _entries(connection, row.leaf):
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
        ids, leaf = ids_before(connection, leaf, _BATCH)
        yield from ids


def ids_before(connection: sqlite3.Connection, start: int, limit: int) -> tuple[list[int], int | None]:
    """Up to `limit` ids of the path that ends at `start`, newest first, and where to go on; None after the root."""
    rows = connection.execute(f"{_WALK} SELECT id, parent FROM path", {"start": start, "limit": limit}).fetchall()
    return [row[0] for row in rows], rows[-1][1] if rows else None


def is_on_path(connection: sqlite3.Connection, leaf: int | None, entry_id: int) -> bool:
    """Whether the path that ends at `leaf` holds the entry."""
    return next((found for found in path_ids(connection, leaf) if found <= entry_id), None) == entry_id


def has_user(connection: sqlite3.Connection, leaf: int) -> bool:
    """Whether the path that ends at `leaf` holds a user's message."""
    return _newest_of_kind(connection, leaf, "user") is not None


def count_messages(connection: sqlite3.Connection, session_ids: Sequence[str]) -> dict[str, int]:
    """How many prompts and answers are on the path of each session; about 2 µs an entry."""
    rows = connection.execute(
        "WITH RECURSIVE path (session, parent, kind) AS ("
        " SELECT s.id, e.parent, e.kind FROM sessions s JOIN entries e ON e.id = s.leaf"
        " WHERE s.id IN (SELECT value FROM json_each(?))"
        " UNION ALL SELECT path.session, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent)"
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


def _entries(connection: sqlite3.Connection, start: int | None) -> Iterator[Entry]:
    """The path that ends at `start`, newest first."""
    load = loader(connection)
    while start is not None:
        rows = connection.execute(
            f"{_WALK} SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE}"
            " WHERE e.id IN (SELECT id FROM path) ORDER BY e.id DESC",
            {"start": start, "limit": _BATCH},
        ).fetchall()
        for row in rows:
            yield entry_of(row, load)
        start = rows[-1][3] if rows else None


def _newest_of_kind(connection: sqlite3.Connection, start: int | None, kind: str) -> Entry | None:
    while start is not None:
        rows = connection.execute(
            f"{_WALK} SELECT path.id, path.parent, e.kind FROM path JOIN entries e ON e.id = path.id",
            {"start": start, "limit": _BATCH},
        ).fetchall()
        for entry_id, _, found in rows:
            if found == kind:
                return entry(connection, entry_id)
        start = rows[-1][1] if rows else None
    return None
