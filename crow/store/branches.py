"""Where a session has stood: its moves, the outline of all its branches, what a move leaves behind.

Strategy: every branch that a session left was left by a move, so the ends of its branches are where moves began and
where it stands now. Two paths part where their falling sequences of ids first agree. Only the outline reads more than
the way between two entries, and of that only ids, kinds and first words. Reads only.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from crow.domain.entries import Entry, File
from crow.store import Move, Outline, Point, Tip
from crow.store.paths import path_ids
from crow.store.rows import ENTRY_COLUMNS, ENTRY_SOURCE, entry_of, loader, session_row

__all__ = ["file_changes", "left_behind", "moves", "outline"]

_MOVES = 10_000
_CHARS = 200
_BATCH = 500
_SAID = ("user", "assistant", "tool", "skill")


def moves(connection: sqlite3.Connection, session_id: str) -> tuple[Move, ...]:
    """The newest ten thousand, newest first."""
    rows = connection.execute(
        "SELECT from_leaf, to_leaf, reason, created_ms FROM moves WHERE session = ? ORDER BY id DESC LIMIT ?",
        (session_id, _MOVES),
    )
    return tuple(Move(from_leaf=row[0], to_leaf=row[1], reason=row[2], created_ms=row[3]) for row in rows)


def left_behind(
    connection: sqlite3.Connection, leaf: int | None, to: int | None, kinds: Collection[str]
) -> tuple[Entry, ...]:
    """Entries of these kinds on the path of `leaf` and not on that of `to`, oldest first."""
    return _entries(
        connection,
        "e.id IN (SELECT value FROM json_each(:ids)) AND e.kind IN (SELECT value FROM json_each(:kinds))",
        {"ids": json.dumps(_left_ids(connection, leaf, to)), "kinds": json.dumps(sorted(kinds))},
    )


def file_changes(connection: sqlite3.Connection, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
    """As `left_behind`: file entries, and the results of their calls.

    File entries that older versions stored do not say whether they were recorded here; they were, unless the
    conversation was imported.
    """
    found = _entries(
        connection,
        "e.id IN (SELECT value FROM json_each(:ids)) AND (e.kind = 'file' OR e.kind = 'tool' AND"
        " (e.call_entry, e.call_index) IN (SELECT f.call_entry, f.call_index FROM entries f"
        " WHERE f.kind = 'file' AND f.id IN (SELECT value FROM json_each(:ids))))",
        {"ids": json.dumps(_left_ids(connection, leaf, to))},
    )
    imports = "SELECT 1 FROM imports WHERE conversation = (SELECT conversation FROM entries WHERE id = ?)"
    if connection.execute(imports, (leaf,)).fetchone() is not None:
        return found
    return tuple(
        replace(entry, body=replace(entry.body, recorded_here=True)) if isinstance(entry.body, File) else entry
        for entry in found
    )


def outline(connection: sqlite3.Connection, session_id: str) -> Outline:
    """Prompts, labels and checkpoints of all branches, and where these end.

    :raises ~crow.domain.errors.NoSuchSession: no such session.
    """
    leaf = session_row(connection, session_id).leaf
    left = connection.execute(
        "SELECT from_leaf, max(id) FROM moves WHERE session = ? AND from_leaf IS NOT NULL GROUP BY from_leaf"
        " ORDER BY 2 DESC",
        (session_id,),
    ).fetchall()
    ends = dict.fromkeys([*([] if leaf is None else [leaf]), *(row[0] for row in left)])
    tree = connection.execute(
        "WITH RECURSIVE reached (id, parent, kind) AS ("
        " SELECT id, parent, kind FROM entries WHERE id IN (SELECT value FROM json_each(?))"
        " UNION SELECT e.id, e.parent, e.kind FROM reached JOIN entries e ON e.id = reached.parent)"
        " SELECT id, parent, kind FROM reached ORDER BY id",
        (json.dumps(list(ends)),),
    ).fetchall()
    labels = _labels(connection, [row[0] for row in tree if row[2] == "note"])
    point_at: dict[int | None, int | None] = {None: None}
    said_at: dict[int | None, int | None] = {None: None}
    inner: set[int | None] = set()
    found: list[tuple[int, int | None, str]] = []
    for entry_id, parent, kind in tree:
        point_at[entry_id], said_at[entry_id] = point_at.get(parent), said_at.get(parent)
        if kind in _SAID:
            inner.add(said_at[entry_id])
            said_at[entry_id] = entry_id
        if kind in ("user", "checkpoint") or entry_id in labels:
            found.append((entry_id, parent, kind))
            point_at[entry_id] = entry_id
    tips = [Tip(entry=leaf, point=point_at.get(leaf), is_current=True)]
    shown = {said_at.get(leaf)}
    for end in ends:
        said = said_at.get(end)
        if said is not None and said not in inner and said not in shown:
            shown.add(said)
            tips.append(Tip(entry=end, point=point_at.get(end), is_current=False))
    return Outline(points=_points(connection, found, labels, point_at), tips=tuple(tips))


def _points(
    connection: sqlite3.Connection,
    found: Sequence[tuple[int, int | None, str]],
    labels: dict[int, str],
    point_at: dict[int | None, int | None],
) -> tuple[Point, ...]:
    words = _words(connection, [entry_id for entry_id, _, kind in found if kind == "user"])
    return tuple(
        Point(
            entry=entry_id,
            before=parent,
            previous=point_at.get(parent),
            kind="prompt" if kind == "user" else "checkpoint" if kind == "checkpoint" else "label",
            text=labels.get(entry_id) or words.get(entry_id) or "",
        )
        for entry_id, parent, kind in found
    )


def _words(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, str]:
    """How prompts begin. Ids are listed: for ids that a subquery gives, the view would read every entry there is."""
    words: dict[int, str] = {}
    for start in range(0, len(ids), _BATCH):
        some = ids[start : start + _BATCH]
        marks = ", ".join("?" * len(some))
        rows = connection.execute(f"SELECT id, substr(text, 1, {_CHARS}) FROM searchable WHERE id IN ({marks})", some)
        words.update((entry_id, text or "") for entry_id, text in rows)
    return words


def _labels(connection: sqlite3.Connection, notes: Iterable[int]) -> dict[int, str]:
    rows = connection.execute(
        "SELECT id, json_extract(body, '$.value') FROM entry_bodies WHERE id IN (SELECT value FROM json_each(?))"
        " AND json_extract(body, '$.about') = 'label'",
        (json.dumps(list(notes)),),
    )
    return {entry_id: str(value) for entry_id, value in rows}


def _left_ids(connection: sqlite3.Connection, leaf: int | None, to: int | None) -> list[int]:
    """What only the first of two paths has, newest first; reads no further than where they part."""
    mine, theirs = path_ids(connection, leaf), path_ids(connection, to)
    ids: list[int] = []
    here, there = next(mine, None), next(theirs, None)
    while here is not None and here != there:
        if there is not None and there > here:
            there = next(theirs, None)
        else:
            ids.append(here)
            here = next(mine, None)
    return ids


def _entries(connection: sqlite3.Connection, where: str, values: dict[str, str]) -> tuple[Entry, ...]:
    load = loader(connection)
    rows = connection.execute(f"SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE} WHERE {where} ORDER BY e.id", values)
    return tuple(entry_of(row, load) for row in rows)
