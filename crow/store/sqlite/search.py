"""Full text over what users and the model said, and over titles.

Strategy: every term is quoted, so that no character of a query is an operator. The trigram index finds terms of three
characters and more in any script, without regard to case; shorter ones are looked for in the text itself, of what the
index gave, of all messages, or of the newest few thousand entries of a session's path. Titles come first, then entries,
newest first; both the index and a path give ids in falling order, so their intersection reads no further than it must.
Reads only.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, TypeAlias

from crow.domain.entries import Assistant, Checkpoint, Command, Entry, Reminder, Skill, ToolResult
from crow.store import Hit, Scan, Scope
from crow.store.sqlite.paths import damage, entries_of, is_on_path, path_ids, session_row

__all__ = ["GROUPS", "Group", "UsageTotal", "hit_of", "patterns_of", "scan", "search", "terms_of", "totals"]

# ruff: noqa: S608  # statements are put together from constants; values are parameters


_SCAN = 5_000
_AROUND = 80
_INDEXED_CHARACTERS = 3


def search(
    connection: sqlite3.Connection, query: str, *, session_id: str | None, scope: Scope, limit: int
) -> tuple[Hit, ...]:
    """What holds all terms of `query`; with `session_id`, only its title and the entries of its path.

    :raises ~crow.domain.errors.NoSuchSession: no such session.
    """
    leaf = session_row(connection, session_id).leaf if session_id is not None else None
    terms = terms_of(query)
    if not terms:
        return ()
    match = " ".join('"' + term.replace('"', '""') + '"' for term in terms if len(term) >= _INDEXED_CHARACTERS)
    patterns = patterns_of(terms)
    # The index and `re` may fold a rare letter differently: what the index found is not asked for again.
    unsure = [pattern for pattern, term in zip(patterns, terms, strict=True) if len(term) < _INDEXED_CHARACTERS]
    if session_id is None:
        ids = _indexed(connection, match) if match else _messages(connection)
    else:
        path = path_ids(connection, leaf)
        ids = _common(_indexed(connection, match), path) if match else islice(path, _SCAN)
    found = chain(_titles(connection, match, session_id, scope), _texts(connection, ids, session_id, scope))
    hits = (hit_of(*one, patterns) for one in found if all(p.search(one[4]) for p in unsure))
    return tuple(islice(hits, max(limit, 0)))


def terms_of(query: str) -> list[str]:
    """The words that a text must hold, each as it is: no character is an operator."""
    return query.replace("\0", " ").split()


def patterns_of(terms: Sequence[str]) -> list[re.Pattern[str]]:
    """Finds each term, in any case."""
    return [re.compile(re.escape(term), re.IGNORECASE) for term in terms]


_Found = tuple[int, str, str, int, str]
"""Entry, session, kind, created_ms, text."""


def _titles(connection: sqlite3.Connection, match: str, session_id: str | None, scope: Scope) -> Iterator[_Found]:
    chosen = "number IN (SELECT -rowid FROM entries_fts WHERE entries_fts MATCH :match AND rowid < 0)" if match else "1"
    yield from connection.execute(
        f"SELECT newest_entry, id, 'title', updated_ms, title FROM sessions WHERE {chosen} AND title IS NOT NULL"
        " AND deleted_ms IS NULL AND (:session IS NULL OR id = :session)"
        " AND (:cwd IS NULL OR cwd = :cwd) AND (:model IS NULL OR instr(lower(model), lower(:model)) > 0)"
        " AND (:since IS NULL OR updated_ms >= :since) AND (:before IS NULL OR created_ms < :before)"
        " ORDER BY newest_entry DESC",
        {"match": match, "session": session_id, **_parameters(scope)},
    )


def _texts(
    connection: sqlite3.Connection, ids: Iterator[int], session_id: str | None, scope: Scope
) -> Iterator[_Found]:
    parameters = _parameters(scope)
    for entry_id in ids:
        row = connection.execute(
            "SELECT e.conversation, e.session, s.id IS NOT NULL, e.kind, e.created_ms, t.text FROM searchable t"
            " JOIN entries e ON e.id = t.id LEFT JOIN sessions s ON s.id = e.session"
            # an imported session may have the id of a deleted one, whose entries live on in a fork
            " AND s.conversation = e.conversation AND s.deleted_ms IS NULL"
            " WHERE t.id = :id AND t.text <> '' AND (:cwd IS NULL OR coalesce(s.cwd, :cwd) = :cwd)"
            " AND (:model IS NULL OR instr(lower(e.model), lower(:model)) > 0)"
            " AND (:since IS NULL OR e.created_ms >= :since) AND (:before IS NULL OR e.created_ms < :before)",
            {"id": entry_id, **parameters},
        ).fetchone()
        if row is None:
            continue
        conversation, writer, is_writer_there, kind, created_ms, text = row
        if why := damage(connection, entry_id):
            text = f"[Entry {entry_id} ({kind}) could not be read: {why}.]"
        session = writer if is_writer_there else session_id or _reader_of(connection, conversation, entry_id, scope.cwd)
        if session is not None:
            yield entry_id, session, kind, created_ms, text


def _parameters(scope: Scope) -> dict[str, object]:
    return {"cwd": scope.cwd, "model": scope.model, "since": scope.since_ms, "before": scope.before_ms}


def _reader_of(connection: sqlite3.Connection, conversation: int, entry_id: int, cwd: str | None) -> str | None:
    """The oldest session (of a directory) whose path holds an entry of a deleted one; None if there is none."""
    rows = connection.execute(
        "SELECT id, leaf FROM sessions WHERE conversation = ? AND deleted_ms IS NULL AND coalesce(?, cwd) = cwd"
        " ORDER BY number",
        (conversation, cwd),
    ).fetchall()
    return next((str(session_id) for session_id, leaf in rows if is_on_path(connection, leaf, entry_id)), None)


def _indexed(connection: sqlite3.Connection, match: str) -> Iterator[int]:
    """Entries that the index has, newest first."""
    rows = connection.execute(
        "SELECT rowid FROM entries_fts WHERE entries_fts MATCH ? AND rowid > 0 ORDER BY rowid DESC", (match,)
    )
    return (row[0] for row in rows)


def _messages(connection: sqlite3.Connection) -> Iterator[int]:
    """All messages, newest first."""
    rows = connection.execute("SELECT id FROM entries WHERE kind IN ('user', 'assistant') ORDER BY id DESC")
    return (row[0] for row in rows)


def _common(left: Iterator[int], right: Iterator[int]) -> Iterator[int]:
    """What two falling sequences share."""
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        if a == b:
            yield a
            a, b = next(left, None), next(right, None)
        elif a > b:
            a = next(left, None)
        else:
            b = next(right, None)


def hit_of(entry: int, session: str, kind: str, created_ms: int, text: str, patterns: Sequence[re.Pattern[str]]) -> Hit:
    """A hit, with the place of the first pattern that is found in `text`."""
    place = next((found for pattern in patterns if (found := pattern.search(text))), None)
    start = max(0, place.start() - _AROUND) if place else 0
    end = min(len(text), (place.end() if place else 0) + _AROUND)
    snippet = " ".join(text[start:end].split())
    return Hit(
        entry=entry,
        session=session,
        kind=kind,
        snippet=f"{'…' if start else ''}{snippet}{'…' if end < len(text) else ''}",
        created_ms=created_ms,
    )


# FROM store.scan: Reading through what the full-text index does not hold: calls, results, summaries, crow's own
# words.
#
# Strategy: walk a path from its leaf and look into each such entry until enough is found or a few megabytes are read,
# and
# say where that was. Terms are literal, in any script and case, as in `search`. Reads only.


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
            f"SELECT id, kind FROM entries WHERE id IN ({marks}) AND kind IN {kinds} ORDER BY id DESC",
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


# FROM store.totals: What was used: tokens and cost, by session, model and day.
#
# Strategy: sums over entries, each of which exists once however many forks share it, so that nothing is counted
# twice;
# the result of a task, which repeats what its sub-agent used, is left out. What a session used is what it wrote
# itself
# and what its sub-agents did; what only deleted sessions had is gone at once. Days are those of the local clock.
# Reads
# only.


# ruff: noqa: S608  # statements are put together from constants; values are parameters


Group: TypeAlias = Literal["session", "model", "day"]

GROUPS: tuple[Group, ...] = ("session", "model", "day")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotal:
    """A sum. `session` (its id), `model` and `day` (`2026-11-20`) are None where the sum is over all of them; `session`
    is empty for what deleted sessions left in forks. `cost` in US dollars, None if no price was known."""

    session: str | None = None
    title: str | None = None
    model: str | None = None
    day: str | None = None
    requests: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost: float | None


def totals(connection: sqlite3.Connection, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
    """Sums by the groups in `by`, which may be none: then one sum of all. Days ascend, else the largest come first."""
    chosen = {
        "session": ("session", "coalesce(p.id, s.id, '')"),
        "model": ("model", "e.model"),
        "day": ("day", "date(e.created_ms / 1000, 'unixepoch', 'localtime')"),
    }
    keys = [chosen[group] for group in GROUPS if group in by]
    columns = ", ".join(f"{sql} AS g_{name}" for name, sql in keys)
    names = ", ".join(f"g_{name}" for name, _ in keys)
    order = "g_day, 3 DESC" if "day" in by else "sum(e.input_tokens) DESC"
    rows = connection.execute(
        f"SELECT coalesce(p.title, s.title), count(*), coalesce(sum(e.input_tokens), 0),"
        " coalesce(sum(e.output_tokens), 0), coalesce(sum(e.cached_tokens), 0), sum(e.cost)"
        f"{', ' + columns if columns else ''}"
        " FROM entries e LEFT JOIN sessions s ON s.id = e.session AND s.conversation = e.conversation"
        " AND s.deleted_ms IS NULL"
        " LEFT JOIN sessions p ON p.id = s.parent_id AND p.deleted_ms IS NULL"
        " WHERE e.kind <> 'tool' AND e.conversation IN (SELECT conversation FROM sessions WHERE deleted_ms IS NULL)"
        " AND (e.input_tokens IS NOT NULL OR e.output_tokens IS NOT NULL OR e.cost IS NOT NULL)"
        " AND (:cwd IS NULL OR coalesce(p.cwd, s.cwd) = :cwd)"
        " AND (:model IS NULL OR instr(lower(e.model), lower(:model)) > 0)"
        " AND (:since IS NULL OR e.created_ms >= :since) AND (:before IS NULL OR e.created_ms < :before)"
        f"{f' GROUP BY {names} ORDER BY {order}' if names else ''}",
        {"cwd": scope.cwd, "model": scope.model, "since": scope.since_ms, "before": scope.before_ms},
    )
    found = []
    for title, requests, tokens_in, tokens_out, tokens_cached, cost, *groups in rows:
        values = dict(zip((name for name, _ in keys), groups, strict=True))
        found.append(
            UsageTotal(
                **values,
                title=title if "session" in values else None,
                requests=requests,
                tokens_in=tokens_in,
                tokens_out=tokens_out,
                tokens_cached=tokens_cached,
                cost=cost,
            )
        )
    return tuple(found)
