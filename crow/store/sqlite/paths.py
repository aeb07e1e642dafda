"""Rows of the tables as values.

One damaged byte costs one entry and never a session: what cannot be trusted is replaced by words that say so, for the
user and for the model; the bytes stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from crow.domain.entries import (
    Announcement,
    Assistant,
    Body,
    CallRef,
    Checkpoint,
    Entry,
    File,
    Prompt,
    Remark,
    Restore,
    ToolResult,
    User,
)
from crow.domain.errors import NoSuchSession
from crow.domain.messages import Text, Usage
from crow.store import BranchPoint, BranchTip, Move, Outline, SessionRow, Tail
from crow.store.codec import Load, Unreadable, decode, from_json
from crow.store.sqlite.connection import REPAIR
from crow.store.sqlite.lease import readable

__all__ = [
    "ENTRY_COLUMNS",
    "ENTRY_SOURCE",
    "SESSION_COLUMNS",
    "body_of",
    "checksum",
    "count_messages",
    "damage",
    "entries_of",
    "entry",
    "entry_of",
    "file_changes",
    "has_user",
    "ids_before",
    "is_on_path",
    "left_behind",
    "loader",
    "missing_entry",
    "moves",
    "outline",
    "path_ids",
    "session_of",
    "session_row",
    "tail",
]

# ruff: noqa: S608  # statements are put together from constants; values are parameters


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


# FROM store.paths: Paths through the tree of entries: the tail that the model needs, and the whole history.
#
# Strategy: walk from the leaf to the root by parents, in batches, and stop as soon as what is wanted is in hand, so
# that
# the cost follows the distance to the newest checkpoint and not the length of the session. Ids increase along a path,
# so
# order needs no other column. Reads only.


# ruff: noqa: S608  # statements are put together from constants; values are parameters


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


# FROM store.branches: Where a session has stood: its moves, the outline of all its branches, what a move leaves
# behind.
#
# Strategy: every branch that a session left was left by a move, so the ends of its branches are where moves began and
# where it stands now. Two paths part where their falling sequences of ids first agree. Only the outline reads more
# than
# the way between two entries, and of that only ids, kinds and first words. Reads only.


# ruff: noqa: S608  # statements are put together from constants; values are parameters


_MOVES = 10_000
_CHARS = 200
_BRANCHES_BATCH = 500
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
    return _branches_entries(
        connection,
        "e.id IN (SELECT value FROM json_each(:ids)) AND e.kind IN (SELECT value FROM json_each(:kinds))",
        {"ids": json.dumps(_left_ids(connection, leaf, to)), "kinds": json.dumps(sorted(kinds))},
    )


def file_changes(connection: sqlite3.Connection, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
    """As `left_behind`: file entries, and the results of their calls.

    File entries that older versions stored do not say whether they were recorded here; they were, unless the
    conversation was imported.
    """
    found = _branches_entries(
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
    tips = [BranchTip(entry=leaf, point=point_at.get(leaf), is_current=True)]
    shown = {said_at.get(leaf)}
    for end in ends:
        said = said_at.get(end)
        if said is not None and said not in inner and said not in shown:
            shown.add(said)
            tips.append(BranchTip(entry=end, point=point_at.get(end), is_current=False))
    return Outline(points=_points(connection, found, labels, point_at), tips=tuple(tips))


def _points(
    connection: sqlite3.Connection,
    found: Sequence[tuple[int, int | None, str]],
    labels: dict[int, str],
    point_at: dict[int | None, int | None],
) -> tuple[BranchPoint, ...]:
    words = _words(connection, [entry_id for entry_id, _, kind in found if kind == "user"])
    return tuple(
        BranchPoint(
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
    for start in range(0, len(ids), _BRANCHES_BATCH):
        some = ids[start : start + _BRANCHES_BATCH]
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


def _branches_entries(connection: sqlite3.Connection, where: str, values: dict[str, str]) -> tuple[Entry, ...]:
    load = loader(connection)
    rows = connection.execute(f"SELECT {ENTRY_COLUMNS} FROM {ENTRY_SOURCE} WHERE {where} ORDER BY e.id", values)
    return tuple(entry_of(row, load) for row in rows)
