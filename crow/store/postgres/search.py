"""Searches sessions and sums up their usage.

A text matches a word if it contains the word, in any script. Case does not matter. The index finds the texts that have
all trigrams of a word. Then each of these texts is compared with the word. Matching titles come before matching
entries. Both are sorted, newest first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from crow.store import Hit, ScanResult, Scope, UsageTotal
from crow.store.postgres.append import trigrams
from crow.store.postgres.database import Sql, UsesDatabase, folded, snapshot
from crow.store.postgres.paths import first_entries, is_on_path, path_ids, session_row
from crow.store.rows import IS_REQUEST, SUM_COLUMNS, plain, plain_or_none, usage_totals
from crow.store.search import (
    LAST_MS,
    SCAN_BATCH,
    SCAN_ENTRIES,
    SCANNED_KINDS,
    SNIPPET_MARGIN,
    Scan,
    hit_of,
    patterns_of,
    snippet_of,
)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_BATCH = 64

_IN_SCOPE = (
    "($1::text IS NULL OR position(lower($1) IN lower(e.model)) > 0) AND e.created_ms >= $2 AND e.created_ms < $3"
)


_SNIPPETS = r"""
    SELECT e.id, e.kind, e.created_ms, w.start, substring(x.text, w.start + 1, p.place + $4 - w.start), length(x.text)
    FROM crow.entries e JOIN crow.texts t ON t.entry = e.id LEFT JOIN crow.blobs b ON b.hash = e.body_blob
    CROSS JOIN LATERAL (SELECT coalesce(e.body, crow.text_of(b.data)) AS json OFFSET 0) r
    CROSS JOIN LATERAL (
        SELECT crow.body_of(
            CASE WHEN strpos(r.json, '\u0000') = 0 THEN r.json
            ELSE replace(
                regexp_replace(r.json, '(?<!\\)((?:\\\\)*)\\u0000', '\1 ', 'g'), '\u0000', '\\u00750000'
            ) END, NULL
        ) AS body OFFSET 0
    ) j
    CROSS JOIN LATERAL (
        SELECT coalesce(
            CASE WHEN e.kind <> 'user' THEN j.body ->> 'text'
            WHEN json_typeof(j.body -> 'parts') = 'array' THEN (
                SELECT string_agg(part ->> 'text', E'\n') FROM json_array_elements(j.body -> 'parts') AS p (part)
                WHERE part ->> 'type' = 'text'
            ) END, t.folded
        ) AS text OFFSET 0
    ) x
    CROSS JOIN LATERAL (SELECT greatest(strpos(t.folded, $2) - 1, 0) AS folded_place OFFSET 0) f
    CROSS JOIN LATERAL (
        SELECT f.folded_place - CASE WHEN strpos(x.text, 'İ') = 0 THEN 0 ELSE (
            f.folded_place + 1 - length(replace(left(replace(x.text, 'İ', 'İİ'), f.folded_place), 'İ', ''))
        ) / 2 END AS place OFFSET 0
    ) p
    CROSS JOIN LATERAL (SELECT greatest(p.place - $3, 0) AS start) w
    WHERE e.id = ANY ($1::bigint[]) ORDER BY e.id DESC
"""
"""Selects the parts of texts that become snippets.

The subqueries `r` to `w` compute, one after the other: the stored JSON; the value of this JSON; the text; the index of
the word $2 in the folded text; the index of the word in the text; the start of the part. If a body is damaged, the
folded text replaces the text. Folding turns İ into two characters, and every other character into one.

A text of PostgreSQL cannot hold NUL, so a space replaces each NUL. The text itself may contain the six characters of
the JSON escape for NUL. Their u is escaped, so that `crow.body_of` does not change them. `OFFSET 0` keeps PostgreSQL
from computing the same expression several times.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """A search in the form that the statements need."""

    words: Sequence[str]
    """The words to find, folded."""
    likes: Sequence[str]
    """A pattern for LIKE for each word."""
    trigrams: Sequence[int]
    """The numbers of all trigrams in the words."""
    scope: Scope
    seen_by: str | None
    """If it is given, only sessions that this principal may read are searched."""

    @property
    def limits(self) -> tuple[str | None, int, int]:
        since, before, model = self.scope.since_ms, self.scope.before_ms, self.scope.model
        return (
            plain_or_none(model),
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
            seen_by=plain_or_none(seen_by),
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
            sessions: dict[int, str] = {}
            for entry_id, conversation, session, is_there in rows:
                found = session if is_there else session_id
                found = found or await _session_with(sql, conversation, entry_id, asked)
                if found is not None:
                    sessions[entry_id] = found
                if len(hits) + len(sessions) == limit:
                    break
            hits += await _hits(sql, sessions, words[0] if words else None)
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
    ) -> ScanResult:
        leaf = (await session_row(sql, session_id)).leaf
        patterns, scope = patterns_of(query.replace("\0", " ").split()), scope or Scope()
        if not patterns or limit < 1:
            return ScanResult(hits=(), stopped_at=None)
        path = await path_ids(sql, leaf)
        scanned, rest = path[:SCAN_ENTRIES], path[SCAN_ENTRIES:]
        scan = Scan(session_id, patterns, limit=limit, without=without)
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
            unread = sorted(kinds, reverse=True)
            while unread:
                entries = await first_entries(sql, unread, newest_first=True)
                unread = unread[len(entries) :]
                for entry in entries:
                    if scan.add(entry, kinds[entry.id]):
                        return ScanResult(hits=tuple(scan.hits), stopped_at=entry.id)
        return ScanResult(hits=tuple(scan.hits), stopped_at=rest[0] if rest else None)

    @snapshot
    async def usage_by_model(self, sql: Sql, session_id: str) -> tuple[UsageTotal, ...]:
        rows = await sql.fetch(
            f"SELECT {SUM_COLUMNS}, e.model FROM crow.entries e WHERE {IS_REQUEST} AND (e.session, e.conversation) IN"
            " (SELECT id, conversation FROM crow.sessions WHERE (id = $1 OR parent_id = $1) AND deleted_ms IS NULL)"
            " GROUP BY e.model",
            plain(session_id),
        )
        return usage_totals(rows, ["model"])


async def _titles(
    sql: Sql, asked: _Query, session_id: str | None, limit: int
) -> Sequence[tuple[int, str, str, int, str]]:
    rows = await sql.fetch(
        "SELECT newest_entry, id, 'title', updated_ms, title FROM crow.sessions"
        " WHERE folded_title LIKE ALL ($1::text[]) AND deleted_ms IS NULL AND ($2::text IS NULL OR id = $2)"
        " AND ($3::text IS NULL OR cwd = $3) AND ($4::text IS NULL OR position(lower($4) IN lower(model)) > 0)"
        " AND updated_ms >= $5 AND created_ms < $6 AND crow.sees($8::text, principal, id)"
        " ORDER BY newest_entry DESC, id DESC LIMIT $7",
        asked.likes,
        session_id,
        plain_or_none(asked.scope.cwd),
        *asked.limits,
        limit,
        asked.seen_by,
    )
    return [tuple(row) for row in rows]


async def _entries(
    sql: Sql, asked: _Query, path: Sequence[int] | None, before: int
) -> Sequence[tuple[int, int, str, bool]]:
    """Return the newest entries with ids below `before` that match. For each entry, return its id, its conversation and
    its session. Also return whether this session exists and may be seen by the principal."""
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
        # An imported session may have the id of a deleted session whose entries are still part of a fork.
        " LEFT JOIN crow.sessions s ON s.id = e.session AND s.conversation = e.conversation AND s.deleted_ms IS NULL"
        " AND crow.sees($7::text, s.principal, s.id)"
        f" WHERE {match} AND ($7::text IS NULL OR EXISTS (SELECT 1 FROM crow.sessions v"
        " WHERE v.conversation = e.conversation AND v.deleted_ms IS NULL AND crow.sees($7::text, v.principal, v.id)))"
        f" AND {_IN_SCOPE} AND ($4::text IS NULL OR coalesce(s.cwd, $4) = $4)"
        f" AND ($5::bigint[] IS NULL OR e.id = ANY ($5)) AND e.id < $6 ORDER BY e.id DESC LIMIT {_BATCH}",
        *asked.limits,
        plain_or_none(asked.scope.cwd),
        path,
        before,
        asked.seen_by,
        *values,
    )
    return [tuple(row) for row in rows]


async def _hits(sql: Sql, sessions: Mapping[int, str], word: str | None) -> list[Hit]:
    """Return a hit for each entry in `sessions`, newest first. `sessions` maps entries to the sessions that their hits
    name. Only the part of each text around the first occurrence of the folded `word` is read. If `word` is None, only
    the beginning of each text is read."""
    size = SNIPPET_MARGIN if word is None else len(word) + SNIPPET_MARGIN
    rows = await sql.fetch(_SNIPPETS, list(sessions), word, SNIPPET_MARGIN, size)
    return [
        Hit(
            entry=entry_id,
            session=sessions[entry_id],
            kind=kind,
            snippet=snippet_of(part, start=start, length=length),
            created_ms=created_ms,
        )
        for entry_id, kind, created_ms, start, part, length in rows
    ]


async def _session_with(sql: Sql, conversation: int, entry_id: int, asked: _Query) -> str | None:
    """Return the oldest session that has the entry on its path. Call this for an entry whose own session was deleted or
    is hidden from the principal. If the scope of the search has a `cwd`, only sessions in this directory count."""
    cwd = asked.scope.cwd
    rows = await sql.fetch(
        "SELECT id, leaf FROM crow.sessions WHERE conversation = $1 AND deleted_ms IS NULL"
        " AND ($2::text IS NULL OR cwd = $2) AND crow.sees($3::text, principal, id) ORDER BY number",
        conversation,
        plain_or_none(cwd),
        asked.seen_by,
    )
    for session_id, leaf in rows:
        if await is_on_path(sql, leaf, entry_id):
            return str(session_id)
    return None


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
