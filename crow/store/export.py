"""Sessions out of the database, as lines of the exchange format.

Strategy: which entries belong to the chosen sessions is found by one query per conversation: their paths, whatever they
wrote, and every place they ever stood on, with all that lies before; the branches of other sessions stay behind. Then
entries are read in batches of bounded size, so that memory does not grow with the session and no read stays open.
What runs at the moment (waiting prompts, a stream that is not stored yet) is no part of it. Reads only.
"""

# ruff: noqa: S608  # statements are put together from constants; values are parameters

from __future__ import annotations

import hashlib
import json
import sqlite3
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from crow.domain.entries import Entry
from crow.domain.errors import StoreUnavailable
from crow.store.codec import encode
from crow.store.exchange import (
    FORMAT,
    ConversationRecord,
    End,
    EntryRecord,
    Header,
    MoveRecord,
    SessionRecord,
    blob_record,
    line_of,
    renumbered,
)
from crow.store.paths import entries_of
from crow.store.rows import missing_entry

__all__ = ["Chosen", "Lines", "choose", "family", "next_entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is exported of a conversation: `head` and `moves` are ready, `ids` are its entries, ascending.

    Those of them in `missing` are named by others, but are not in the database, which is damaged.
    """

    conversation: int
    head: tuple[ConversationRecord | SessionRecord, ...]
    moves: tuple[MoveRecord, ...]
    ids: array[int]
    missing: frozenset[int]
    sessions: frozenset[str]


class Lines:
    """Turns what was read into the lines of one file, and ends it."""

    def __init__(self) -> None:
        self._count = 0
        self._hash = hashlib.sha256()
        self._blobs: set[str] = set()

    def header(self) -> bytes:
        """The first line."""
        return self._counted(line_of(Header(format=FORMAT)))

    def head(self, chosen: Chosen) -> bytes:
        """A conversation begins."""
        self._blobs = set()
        return b"".join(self._counted(line_of(record)) for record in chosen.head)

    def entries(self, chosen: Chosen, entries: Sequence[Entry]) -> Iterator[bytes]:
        """Some of its entries, with the blobs that were not there before."""
        for entry in entries:
            body = encode(
                renumbered(entry.body, lambda name: _number(chosen.ids, name), lambda name: _bound(chosen.ids, name))
            )
            text = body.text if body.spilled is None else body.blobs[body.spilled].decode()
            assert text is not None
            for name, data in body.blobs.items():
                if name != body.spilled and name not in self._blobs:
                    self._blobs.add(name)
                    yield self._counted(line_of(blob_record(name, data)))
            record = EntryRecord(
                id=_number(chosen.ids, entry.id),
                parent=None if entry.parent is None or entry.parent >= entry.id else _number(chosen.ids, entry.parent),
                session=entry.session if entry.session in chosen.sessions else None,
                turn=entry.turn,
                model=entry.model,
                usage=entry.usage,
                cost=entry.cost,
                estimate=entry.estimate,
                created_ms=entry.created_ms,
                kind=body.kind,
                body={},
            )
            yield self._counted(line_of(record, body=text))

    def moves(self, chosen: Chosen) -> bytes:
        """The conversation ends."""
        return b"".join(self._counted(line_of(record)) for record in chosen.moves)

    def end(self) -> bytes:
        """The last line."""
        return line_of(End(lines=self._count, sha256=self._hash.hexdigest()))

    def _counted(self, line: bytes) -> bytes:
        self._count += 1
        self._hash.update(line)
        return line


def family(connection: sqlite3.Connection, ids: Sequence[str] | None) -> dict[int, tuple[str, ...]]:
    """The chosen sessions and their sub-agents, by conversation; None chooses every one that is listed."""
    start = "SELECT value FROM json_each(:ids)"
    if ids is None:
        start = "SELECT id FROM sessions WHERE has_prompt = 1 AND parent_id IS NULL"
    rows = connection.execute(
        f"WITH RECURSIVE family (id) AS ({start}"
        " UNION SELECT s.id FROM family JOIN sessions s ON s.parent_id = family.id)"
        " SELECT conversation, id FROM sessions WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL"
        " ORDER BY conversation, number",
        {"ids": json.dumps(ids)},
    )
    found: dict[int, tuple[str, ...]] = {}
    for conversation, session_id in rows:
        found[conversation] = (*found.get(conversation, ()), session_id)
    return found


def choose(connection: sqlite3.Connection, conversation: int, sessions: Sequence[str], known: frozenset[str]) -> Chosen:
    """What is exported for `sessions` of `conversation`; `known` are the sessions of the whole file."""
    chosen = {"conversation": conversation, "ids": json.dumps(sessions)}
    ids, missing = _entry_ids(connection, chosen)
    query = "SELECT created_ms FROM conversations WHERE id = ?"
    (created_ms,) = connection.execute(query, (conversation,)).fetchone() or (0,)
    rows = connection.execute(
        "SELECT id, cwd, title, title_by_user, parent_id, forked_from, leaf, turn, has_prompt, archived, created_ms,"
        " updated_ms FROM sessions WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY number",
        chosen,
    )
    names = [field.name for field in fields(SessionRecord)]
    records = []
    for row in rows:
        values = dict(zip(names, row, strict=True))
        for name in ("title_by_user", "listed", "archived"):
            values[name] = bool(values[name])
        for name in ("parent_id", "forked_from"):
            values[name] = values[name] if values[name] in known else None
        values["leaf"] = _maybe_number(ids, values["leaf"])
        records.append(SessionRecord(**values))
    moves = connection.execute(
        "SELECT session, from_leaf, to_leaf, reason, created_ms FROM moves"
        " WHERE session IN (SELECT value FROM json_each(:ids)) ORDER BY id",
        chosen,
    )
    return Chosen(
        conversation=conversation,
        head=(ConversationRecord(created_ms=created_ms), *records),
        moves=tuple(
            MoveRecord(
                session=session,
                from_leaf=_maybe_number(ids, from_leaf),
                to_leaf=_maybe_number(ids, to_leaf),
                reason=reason,
                created_ms=created_ms,
            )
            for session, from_leaf, to_leaf, reason, created_ms in moves
        ),
        ids=ids,
        missing=missing,
        sessions=frozenset(sessions),
    )


def next_entries(connection: sqlite3.Connection, chosen: Chosen, start: int, most: int) -> tuple[list[Entry], int]:
    """Some of the entries from `chosen.ids[start]` on, and how many of the ids that took; words stand for those that
    are missing.

    :raises StoreUnavailable: one was deleted meanwhile.
    """
    ids = chosen.ids[start : start + most]
    found, taken = entries_of(connection, ids)
    absent = set(ids[:taken]).difference(entry.id for entry in found)
    if not absent <= chosen.missing:  # deleted, or on a damaged page that only an index led to
        (living,) = connection.execute(
            "SELECT count(*) FROM sessions WHERE id IN (SELECT value FROM json_each(?)) AND deleted_ms IS NULL",
            (json.dumps(sorted(chosen.sessions)),),
        ).fetchone()
        if living < len(chosen.sessions):
            raise StoreUnavailable("The session was deleted while it was exported. The file is not whole.")
    entries = [*found, *(missing_entry(entry_id, chosen.conversation) for entry_id in absent)]
    return sorted(entries, key=lambda entry: entry.id), taken


def _entry_ids(connection: sqlite3.Connection, chosen: dict[str, object]) -> tuple[array[int], frozenset[int]]:
    """The ids of what is exported, ascending, and which of them others name though they are not there."""
    rows = connection.execute("SELECT leaf FROM sessions WHERE id IN (SELECT value FROM json_each(:ids))", chosen)
    named = {leaf for (leaf,) in rows}
    there = array("q")
    for entry_id, parent in connection.execute(_NEEDED, chosen):
        there.append(entry_id)
        if isinstance(parent, int) and not _number(there, parent):
            named.add(parent)
    missing = frozenset(one for one in named if isinstance(one, int) and one > 0 and not _number(there, one))
    return array("q", sorted([*there, *missing])) if missing else there, missing


def _maybe_number(ids: array[int], entry: int | None) -> int | None:
    return None if entry is None else _number(ids, entry) or None


def _number(ids: array[int], entry: int) -> int:
    """The number of an entry in the file, 0 if it is not there."""
    at = bisect_left(ids, entry)
    return at + 1 if at < len(ids) and ids[at] == entry else 0


def _bound(ids: array[int], entry: int) -> int:
    """The number from which on entries have at least this id."""
    return bisect_left(ids, entry) + 1


_NEEDED = """
    WITH RECURSIVE
    chosen (id) AS (SELECT value FROM json_each(:ids)),
    needed (id) AS (
        SELECT leaf FROM sessions WHERE id IN (SELECT id FROM chosen)
        UNION SELECT e.id FROM chosen JOIN entries e ON e.session = chosen.id
        UNION SELECT m.from_leaf FROM chosen JOIN moves m ON m.session = chosen.id
        UNION SELECT m.to_leaf FROM chosen JOIN moves m ON m.session = chosen.id
        UNION SELECT e.parent FROM needed JOIN entries e ON e.id = needed.id
    )
    SELECT id, parent FROM entries
    WHERE +conversation = :conversation AND id IN (SELECT id FROM needed WHERE id IS NOT NULL)
    ORDER BY id
"""
# `+` keeps the index by conversation out of it: where that is damaged, what it lacks would be left out without a word.
