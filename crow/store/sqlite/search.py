"""Searches sessions and sums up their usage.

The full-text index has the trigrams of titles, prompts and answers, so it finds words of at least three characters in
any script. For shorter words, the texts themselves are searched. If the query also has a longer word, only the texts
with this longer word are searched. Otherwise all messages are searched, or all messages on the path of one session.
Titles come before entries, and within both the newest results come first. The index and a path both return ids in
descending order, so a search for ids that are in both reads no further than needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from sqlite3 import Connection

from crow.domain.entries import Entry
from crow.store import GROUPS, Group, Hit, ScanResult, Scope, UsageTotal
from crow.store.rows import IS_REQUEST, SUM_COLUMNS, usage_totals
from crow.store.search import (
    LAST_MS,
    SCAN_BATCH,
    SCAN_ENTRIES,
    SCANNED_KINDS,
    Scan,
    hit_of,
    patterns_of,
)
from crow.store.sqlite.database import UsesDatabase, snapshot
from crow.store.sqlite.paths import (
    common_ids,
    entries_of,
    is_on_path,
    marks,
    message_ids,
    path_ids,
    session_row,
    unreadable_entries,
)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_GROUP_COLUMNS = {
    "session": "coalesce(p.id, s.id, '')",
    "model": "e.model",
    "day": "date(e.created_ms / 1000, 'unixepoch', 'localtime')",
}

_INDEXED_CHARACTERS = 3

_Found = tuple[int, str, str, int, str]
"""A found entry: its id, session, kind, created_ms and text."""


class SearchMethods(UsesDatabase):
    """Methods of the store that search."""

    @snapshot()
    def search(
        self,
        sql: Connection,
        query: str,
        *,
        session_id: str | None = None,
        scope: Scope | None = None,
        limit: int = 20,
        seen_by: str | None = None,
    ) -> tuple[Hit, ...]:
        leaf = session_row(sql, session_id).leaf if session_id is not None else None
        words, scope = query.replace("\0", " ").split(), scope or Scope()
        if not words and scope.since_ms is None and scope.before_ms is None:
            return ()
        # Words are in quotation marks, so that no character acts as an operator.
        match = " ".join('"' + word.replace('"', '""') + '"' for word in words if len(word) >= _INDEXED_CHARACTERS)
        patterns = patterns_of(words)
        # For a few rare letters, the index and `re` differ about upper and lower case. So words that matched in the
        # index are not checked again with `re`.
        unchecked = [pattern for pattern, word in zip(patterns, words, strict=True) if len(word) < _INDEXED_CHARACTERS]
        limits = {**asdict(scope), "seen_by": seen_by}
        if session_id is None:
            ids = _indexed(sql, match, limits) if match else _all_messages(sql, limits)
        else:
            ids = message_ids(sql, leaf)
            ids = common_ids(_indexed(sql, match, limits), ids) if match else ids
        titles = _titles(sql, match, session_id, limits) if words else ()
        found = chain(titles, _texts(sql, ids, session_id, limits))
        hits = (hit_of(*one, patterns) for one in found if all(pattern.search(one[4]) for pattern in unchecked))
        return tuple(islice(hits, max(limit, 0)))

    @snapshot()
    def scan(
        self,
        sql: Connection,
        query: str,
        *,
        session_id: str,
        scope: Scope | None = None,
        limit: int = 20,
        without: Collection[str] = frozenset(),
    ) -> ScanResult:
        leaf = session_row(sql, session_id).leaf
        patterns = patterns_of(query.replace("\0", " ").split())
        if not patterns or limit < 1:
            return ScanResult(hits=(), stopped_at=None)
        scan = Scan(session_id, patterns, limit=limit, without=without)
        path = path_ids(sql, leaf)
        for entry, kind in _unindexed(sql, islice(path, SCAN_ENTRIES), scope or Scope()):
            if scan.add(entry, kind):
                return ScanResult(hits=tuple(scan.hits), stopped_at=entry.id)
        return ScanResult(hits=tuple(scan.hits), stopped_at=next(path, None))


class UsageMethods(UsesDatabase):
    """Methods that sum up usage."""

    @snapshot()
    def totals(self, sql: Connection, by: Sequence[Group], scope: Scope) -> tuple[UsageTotal, ...]:
        """See :meth:`crow.store.admin.Admin.totals`."""
        keys = [group for group in GROUPS if group in by]
        columns = "".join(f", {_GROUP_COLUMNS[key]} AS g_{key}" for key in keys)
        names: list[str] = [*keys]
        if "session" in keys:
            names.append("title")
            columns += ", coalesce(p.title, s.title)"
        grouping = f"GROUP BY {', '.join(f'g_{key}' for key in keys)}" if keys else ""
        rows = sql.execute(
            f"SELECT {SUM_COLUMNS}{columns}"
            " FROM entries e LEFT JOIN sessions s ON s.id = e.session AND s.conversation = e.conversation"
            " AND s.deleted_ms IS NULL"
            " LEFT JOIN sessions p ON p.id = s.parent_id AND p.deleted_ms IS NULL"
            f" WHERE {IS_REQUEST} AND e.conversation IN (SELECT conversation FROM sessions WHERE deleted_ms IS NULL)"
            f" AND (:cwd IS NULL OR coalesce(p.cwd, s.cwd) = :cwd) AND {_IN_SCOPE} {grouping}",
            asdict(scope),
        )
        return usage_totals(rows, names)

    @snapshot()
    def usage_by_model(self, sql: Connection, session_id: str) -> tuple[UsageTotal, ...]:
        rows = sql.execute(
            f"SELECT {SUM_COLUMNS}, e.model FROM entries e WHERE {IS_REQUEST} AND (e.session, e.conversation) IN"
            " (SELECT id, conversation FROM sessions WHERE (id = :id OR parent_id = :id) AND deleted_ms IS NULL)"
            " GROUP BY e.model",
            {"id": session_id},
        )
        return usage_totals(rows, ["model"])


_IN_SCOPE = (
    "(:model IS NULL OR instr(folded(e.model), folded(:model)) > 0)"
    " AND (:since_ms IS NULL OR e.created_ms >= :since_ms) AND (:before_ms IS NULL OR e.created_ms < :before_ms)"
)


def seen_in(table: str) -> str:
    """Return an SQL condition for the sessions in this table. The condition is true if the principal `:seen_by` may see
    the session, or if `:seen_by` is NULL."""
    return (
        f"(:seen_by IS NULL OR {table}.principal = :seen_by OR EXISTS"
        f" (SELECT 1 FROM shares WHERE shares.principal = :seen_by AND shares.session = {table}.id))"
    )


# This condition skips conversations in which the principal sees no session. It does not skip single sessions, because a
# fork that the principal sees may contain their entries.
_MAYBE_SEEN = (
    "(:seen_by IS NULL OR EXISTS (SELECT 1 FROM sessions v WHERE v.conversation = e.conversation"
    f" AND v.deleted_ms IS NULL AND {seen_in('v')}))"
)

# This condition skips entries of other directories without reading their texts. It does not skip entries of deleted
# sessions, because forks may still contain them.
_MAYBE_IN_DIRECTORY = (
    "(:cwd IS NULL OR NOT EXISTS (SELECT 1 FROM sessions o WHERE o.id = e.session AND o.conversation = e.conversation"
    " AND o.deleted_ms IS NULL AND o.cwd <> :cwd))"
)


def _titles(sql: Connection, match: str, session_id: str | None, limits: dict[str, object]) -> Iterator[_Found]:
    chosen = "number IN (SELECT -rowid FROM entries_fts WHERE entries_fts MATCH :match AND rowid < 0)" if match else "1"
    yield from sql.execute(
        f"SELECT newest_entry, id, 'title', updated_ms, title FROM sessions WHERE {chosen} AND typeof(title) = 'text'"
        " AND deleted_ms IS NULL AND (:session IS NULL OR id = :session)"
        " AND (:cwd IS NULL OR cwd = :cwd) AND (:model IS NULL OR instr(folded(model), folded(:model)) > 0)"
        " AND (:since_ms IS NULL OR updated_ms >= :since_ms) AND (:before_ms IS NULL OR created_ms < :before_ms)"
        f" AND {seen_in('sessions')} ORDER BY newest_entry DESC, id DESC",
        {"match": match, "session": session_id, **limits},
    )


def _texts(sql: Connection, ids: Iterator[int], session_id: str | None, limits: dict[str, object]) -> Iterator[_Found]:
    for entry_id in ids:
        row = sql.execute(
            "SELECT e.conversation, e.session, s.id IS NOT NULL, e.kind, e.created_ms, t.text FROM searchable t"
            " JOIN entries e ON e.id = t.id LEFT JOIN sessions s ON s.id = e.session"
            # An imported session may have the id of a deleted session whose entries are still part of a fork.
            f" AND s.conversation = e.conversation AND s.deleted_ms IS NULL AND {seen_in('s')}"
            " WHERE t.id = :id AND t.text <> '' AND (:cwd IS NULL OR coalesce(s.cwd, :cwd) = :cwd)"
            f" AND {_IN_SCOPE}",
            {"id": entry_id, **limits},
        ).fetchone()
        if row is None:
            continue
        conversation, session, is_there, kind, created_ms, text = row
        for _, reason in unreadable_entries(sql, "e.id = ?", (entry_id,)):
            text = f"[Entry {entry_id} ({kind}) could not be read: {reason}.]"
        if not is_there:
            session = session_id or _session_with(sql, conversation, entry_id, limits)
        if session is not None:
            yield entry_id, session, kind, created_ms, text


def _session_with(sql: Connection, conversation: int, entry_id: int, limits: Mapping[str, object]) -> str | None:
    """Return the id of the oldest session that has the entry on its path. Use this for an entry whose own session was
    deleted or is hidden from the principal. If `limits` has a `cwd`, only sessions of that directory count."""
    rows = sql.execute(
        "SELECT id, leaf FROM sessions WHERE conversation = :conversation AND deleted_ms IS NULL"
        f" AND coalesce(:cwd, cwd) = cwd AND {seen_in('sessions')} ORDER BY number",
        {"conversation": conversation, **limits},
    ).fetchall()
    return next((str(session_id) for session_id, leaf in rows if is_on_path(sql, leaf, entry_id)), None)


def _indexed(sql: Connection, match: str, limits: Mapping[str, object]) -> Iterator[int]:
    """Return the ids of the entries whose indexed text matches, newest first."""
    query = (
        "SELECT f.rowid FROM entries_fts f JOIN entries e ON e.id = f.rowid"
        f" WHERE entries_fts MATCH :match AND f.rowid > 0 AND {_MAYBE_IN_DIRECTORY} AND {_MAYBE_SEEN}"
        " ORDER BY f.rowid DESC"
    )
    return (row[0] for row in sql.execute(query, {"match": match, **limits}))


def _all_messages(sql: Connection, limits: Mapping[str, object]) -> Iterator[int]:
    query = (
        f"SELECT e.id FROM entries e WHERE e.kind IN ('user', 'assistant') AND {_MAYBE_IN_DIRECTORY} AND {_MAYBE_SEEN}"
        f" AND {_IN_SCOPE} ORDER BY e.id DESC"
    )
    return (row[0] for row in sql.execute(query, limits))


def _unindexed(sql: Connection, path: Iterator[int], scope: Scope) -> Iterator[tuple[Entry, str]]:
    """Yield the entries whose text is not in the index, newest first. Each entry is paired with its kind."""
    times = (scope.since_ms or 0, LAST_MS if scope.before_ms is None else scope.before_ms)
    while batch := tuple(islice(path, SCAN_BATCH)):
        query = (
            f"SELECT id, kind FROM entries WHERE id IN ({marks(batch)}) AND kind IN ({marks(SCANNED_KINDS)})"
            " AND created_ms >= ? AND created_ms < ? ORDER BY id DESC"
        )
        for entry_id, kind in sql.execute(query, (*batch, *SCANNED_KINDS, *times)).fetchall():
            (entry,), _ = entries_of(sql, (entry_id,))
            yield entry, kind
