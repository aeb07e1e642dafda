"""Reading through what the full-text index does not hold: calls, results, summaries, crow's own words.

Strategy: walk a path from its leaf and look into each such entry until enough is found or a few megabytes are read, and
say where that was. Terms are literal, in any script and case, as in `search`. Reads only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from itertools import islice

from crow.domain.entries import Assistant, Checkpoint, Command, Entry, Reminder, Skill, ToolResult
from crow.store import Scan
from crow.store.paths import entries_of, path_ids
from crow.store.rows import session_row
from crow.store.search import hit_of, patterns_of, terms_of

__all__ = ["scan"]

_MOST_CHARACTERS = 8 * 1024 * 1024
_MOST_ENTRIES = 20_000
_BATCH = 64


def scan(connection: sqlite3.Connection, query: str, *, session_id: str, limit: int, without: Collection[str]) -> Scan:
    """What holds all terms of `query` on the path of the session, newest first; `without` names tools to pass over.

    :raises ~crow.domain.errors.NoSuchSession: no such session.
    """
    leaf = session_row(connection, session_id).leaf
    terms = terms_of(query)
    if not terms or limit < 1:
        return Scan(hits=(), stopped_at=None)
    patterns = patterns_of(terms)
    hits = []
    read = 0
    path = path_ids(connection, leaf)
    for entry, kind in _unindexed(connection, islice(path, _MOST_ENTRIES)):
        text = _text_of(entry, without)
        read += len(text)
        if all(pattern.search(text) for pattern in patterns):
            hits.append(hit_of(entry.id, session_id, kind, entry.created_ms, text, patterns))
        if len(hits) >= limit or read > _MOST_CHARACTERS:
            return Scan(hits=tuple(hits), stopped_at=entry.id)
    return Scan(hits=tuple(hits), stopped_at=next(path, None))


def _unindexed(connection: sqlite3.Connection, path: Iterator[int]) -> Iterator[tuple[Entry, str]]:
    """Entries with words that only a scan can find, newest first, with their kinds."""
    kinds = "('assistant', 'tool', 'checkpoint', 'skill', 'reminder', 'command')"
    while batch := tuple(islice(path, _BATCH)):
        marks = ", ".join("?" * len(batch))
        rows = connection.execute(
            f"SELECT id, kind FROM entries WHERE id IN ({marks}) AND kind IN {kinds} ORDER BY id DESC",  # noqa: S608
            batch,
        ).fetchall()
        for entry_id, kind in rows:
            (entry,), _ = entries_of(connection, (entry_id,))
            yield entry, kind


def _text_of(entry: Entry, without: Collection[str]) -> str:
    match entry.body:
        case Assistant(calls=calls):
            return "\n".join(f"{call.name} {call.arguments}" for call in calls if call.name not in without)
        case ToolResult(name=name, text=text):
            return "" if name in without else f"{name}\n{text}"
        case Checkpoint(summary=text) | Reminder(text=text) | Skill(text=text):
            return text
        case Command(text=text, answer=answer):
            return f"{text}\n{answer}"
        case _:
            return ""
