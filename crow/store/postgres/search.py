"""Searches sessions and sums up their usage.

A text matches a word if it contains the word, in any script and case. The numbers of a word's trigrams lead to the
texts that may contain it; then the texts themselves are compared. Results are titles first, then entries, newest first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from crow.domain.entries import Entry
from crow.store import Hit, Scan, Scope, UsageTotal
from crow.store.postgres.append import trigrams
from crow.store.postgres.database import Sql, UsesDatabase, folded, plain, snapshot
from crow.store.postgres.paths import is_on_path, path_ids, select_entries, session_row
from crow.store.rows import IS_REQUEST, SUM_COLUMNS, SUM_NAMES
from crow.store.search import (
    LAST_MS,
    SCAN_BATCH,
    SCAN_CHARACTERS,
    SCAN_ENTRIES,
    SCANNED_KINDS,
    hit_of,
    patterns_of,
    searchable_text,
    unindexed_text,
)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_BATCH = 64

_IN_SCOPE = (
    "($1::text IS NULL OR position(lower($1) IN lower(e.model)) > 0) AND e.created_ms >= $2 AND e.created_ms < $3"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    words: Sequence[str]
    likes: Sequence[str]
    trigrams: Sequence[int]
    scope: Scope
    seen_by: str | None

    @property
    def limits(self) -> tuple[str | None, int, int]:
        since, before, model = self.scope.since_ms, self.scope.before_ms, self.scope.model
        return (
            None if model is None else plain(model),
            -LAST_MS if since is None else since,
            LAST_MS if before is None else before,
        )


class SearchMethods(UsesDatabase):
    """Methods of the store that search and sum up."""

    @snapshot
    async def search(
        self,
        sql: Sql,
        query: str,
        *,
        session_id: str | None = None,
        scope: Scope | None = None,
        limit: int = 20,
        seen_by: str | None = None,
    ) -> tuple[Hit, ...]:
        leaf = (await session_row(sql, session_id)).leaf if session_id is not None else None
        words, scope = folded(query).split(), scope or Scope()
        if (not words and scope.since_ms is None and scope.before_ms is None) or limit < 1:
            return ()
        asked = _Query(
            words=words,
            likes=[f"%{_escaped(word)}%" for word in words],
            trigrams=sorted({number for word in words for number in trigrams(word)}),
            scope=scope,
            seen_by=None if seen_by is None else plain(seen_by),
        )
        patterns = patterns_of(words)
        hits = [hit_of(*row, patterns) for row in (await _titles(sql, asked, session_id, limit) if words else ())]
        path = None if session_id is None else await path_ids(sql, leaf)
        last = 2**63 - 1
        while len(hits) < limit:
            rows = await _entries(sql, asked, path, last)
            if not rows:
                break
            last = rows[-1][0]
            entries = {entry.id: entry for entry in await select_entries(sql, [row[0] for row in rows])}
            for entry_id, conversation, session, is_there in rows:
                found = session if is_there else session_id
                found = found or await _session_with(sql, conversation, entry_id, asked)
                if found is not None and len(hits) < limit:
                    entry = entries[entry_id]
                    text = searchable_text(entry.body)
                    hits.append(hit_of(entry_id, found, _kind(entry), entry.created_ms, text, patterns))
        return tuple(hits[:limit])

    @snapshot
    async def scan(
        self,
        sql: Sql,
        query: str,
        *,
        session_id: str,
        scope: Scope | None = None,
        limit: int = 20,
        without: Collection[str] = frozenset(),
    ) -> Scan:
        leaf = (await session_row(sql, session_id)).leaf
        patterns, scope = patterns_of(query.replace("\0", " ").split()), scope or Scope()
        if not patterns or limit < 1:
            return Scan(hits=(), stopped_at=None)
        path = await path_ids(sql, leaf)
        scanned, rest = path[:SCAN_ENTRIES], path[SCAN_ENTRIES:]
        hits: list[Hit] = []
        characters = 0
        for start in range(0, len(scanned), SCAN_BATCH):
            rows = await sql.fetch(
                "SELECT id, kind FROM crow.entries WHERE id = ANY ($1::bigint[]) AND kind = ANY ($2::text[])"
                " AND created_ms >= $3 AND created_ms < $4",
                scanned[start : start + SCAN_BATCH],
                SCANNED_KINDS,
                scope.since_ms or 0,
                LAST_MS if scope.before_ms is None else scope.before_ms,
            )
            kinds = dict(rows)
            for entry in reversed(await select_entries(sql, list(kinds))):
                text = unindexed_text(entry, without)
                characters += len(text)
                if all(pattern.search(text) for pattern in patterns):
                    hits.append(hit_of(entry.id, session_id, kinds[entry.id], entry.created_ms, text, patterns))
                if len(hits) >= limit or characters > SCAN_CHARACTERS:
                    return Scan(hits=tuple(hits), stopped_at=entry.id)
        return Scan(hits=tuple(hits), stopped_at=rest[0] if rest else None)

    @snapshot
    async def usage_by_model(self, sql: Sql, session_id: str) -> tuple[UsageTotal, ...]:
        rows = await sql.fetch(
            f"SELECT {SUM_COLUMNS}, e.model FROM crow.entries e WHERE {IS_REQUEST} AND (e.session, e.conversation) IN"
            " (SELECT id, conversation FROM crow.sessions WHERE (id = $1 OR parent_id = $1) AND deleted_ms IS NULL)"
            " GROUP BY e.model ORDER BY sum(e.input_tokens) DESC NULLS LAST",
            plain(session_id),
        )
        return tuple(
            UsageTotal(**dict(zip(SUM_NAMES, (*(int(count) for count in row[:7]), row[7]), strict=True)), model=row[8])
            for row in rows
        )


async def _titles(
    sql: Sql, asked: _Query, session_id: str | None, limit: int
) -> Sequence[tuple[int, str, str, int, str]]:
    rows = await sql.fetch(
        "SELECT newest_entry, id, 'title', updated_ms, title FROM crow.sessions"
        " WHERE folded_title LIKE ALL ($1::text[]) AND deleted_ms IS NULL AND ($2::text IS NULL OR id = $2)"
        " AND ($3::text IS NULL OR cwd = $3) AND ($4::text IS NULL OR position(lower($4) IN lower(model)) > 0)"
        " AND updated_ms >= $5 AND created_ms < $6 AND crow.sees($8::text, principal, id)"
        " ORDER BY newest_entry DESC LIMIT $7",
        asked.likes,
        session_id,
        None if asked.scope.cwd is None else plain(asked.scope.cwd),
        *asked.limits,
        limit,
        asked.seen_by,
    )
    return [tuple(row) for row in rows]


async def _entries(
    sql: Sql, asked: _Query, path: Sequence[int] | None, before: int
) -> Sequence[tuple[int, int, str, bool]]:
    """Return the newest entries below `before` that match, each with its conversation, its session, and whether that
    session is still there and may be seen."""
    match = (
        "EXISTS (SELECT 1 FROM crow.texts t WHERE t.entry = e.id)"
        if not asked.words
        else (
            "e.id IN (SELECT t.entry FROM crow.texts t WHERE t.trigrams @> $8::int[]"
            " AND t.folded LIKE ALL ($9::text[]))"
        )
    )
    values = (asked.trigrams, asked.likes) if asked.words else ()
    rows = await sql.fetch(
        "SELECT e.id, e.conversation, e.session, s.id IS NOT NULL FROM crow.entries e"
        # An imported session may have the same id as a deleted one whose entries are still used by a fork.
        " LEFT JOIN crow.sessions s ON s.id = e.session AND s.conversation = e.conversation AND s.deleted_ms IS NULL"
        " AND crow.sees($7::text, s.principal, s.id)"
        f" WHERE {match} AND ($7::text IS NULL OR EXISTS (SELECT 1 FROM crow.sessions v"
        " WHERE v.conversation = e.conversation AND v.deleted_ms IS NULL AND crow.sees($7::text, v.principal, v.id)))"
        f" AND {_IN_SCOPE} AND ($4::text IS NULL OR coalesce(s.cwd, $4) = $4)"
        f" AND ($5::bigint[] IS NULL OR e.id = ANY ($5)) AND e.id < $6 ORDER BY e.id DESC LIMIT {_BATCH}",
        *asked.limits,
        None if asked.scope.cwd is None else plain(asked.scope.cwd),
        path,
        before,
        asked.seen_by,
        *values,
    )
    return [tuple(row) for row in rows]


async def _session_with(sql: Sql, conversation: int, entry_id: int, asked: _Query) -> str | None:
    """Find a session for an entry whose own session was deleted or is hidden: the oldest one that still has the entry
    on its path. With `cwd`, only sessions of that directory count."""
    cwd = asked.scope.cwd
    rows = await sql.fetch(
        "SELECT id, leaf FROM crow.sessions WHERE conversation = $1 AND deleted_ms IS NULL"
        " AND ($2::text IS NULL OR cwd = $2) AND crow.sees($3::text, principal, id) ORDER BY number",
        conversation,
        None if cwd is None else plain(cwd),
        asked.seen_by,
    )
    for session_id, leaf in rows:
        if await is_on_path(sql, leaf, entry_id):
            return str(session_id)
    return None


def _kind(entry: Entry) -> str:
    return type(entry.body).__name__.lower()  # only prompts (user) and answers (assistant) are searched


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
