"""Reads entries, paths through the tree of entries, and branches."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from bisect import bisect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from crow.domain.entries import CallRef, Entry, ToolResult
from crow.domain.errors import NoSuchSession
from crow.store import Move, Outline, SessionRow, Tail
from crow.store.excerpts import bytes_per_end, excerpt_of_ends, longest_whole, text_blob_of
from crow.store.paths import (
    FIRST_BATCH,
    HISTORY_BATCH,
    MOST_MOVES,
    PATH_BATCH,
    PATH_BATCH_BYTES,
    PROMPT_CHARACTERS,
    RESULT_BYTES,
    TailPath,
    compacted_in,
    newest_checkpoint,
    outline_of,
    recorded_here,
    with_excerpt,
)
from crow.store.postgres.database import Sql, UsesDatabase, array_of, snapshot
from crow.store.rows import SESSION_COLUMNS, EntryRow, body_of, columns_of, entry_of, is_plain, session_of
from crow.store.session_rules import LARGEST_ID, is_entry_id
from crow.store.watching import News, Piece, SessionRead, follow

# ruff: noqa: S608  # statements are put together from constants; values are parameters


@dataclass(slots=True)
class _StoredRow(EntryRow):
    """A row of `_ENTRY_SOURCE`. Entries have no checksums here, because PostgreSQL checks its pages itself."""

    has_blobs: bool
    """Whether the body refers to blobs."""


_BODY = "coalesce(convert_to(e.body, 'UTF8'), b.data)"
_HAS_BLOBS = "EXISTS (SELECT 1 FROM crow.blob_refs r WHERE r.entry = e.id)"
_ENTRY_COLUMNS = columns_of(_StoredRow, body=_BODY, has_blobs=_HAS_BLOBS)

_ENTRY_SOURCE = "crow.entries e LEFT JOIN crow.blobs b ON b.hash = e.body_blob"

_MOST_STEPS = 2**31 - 1
"""The largest number of steps for `_PATH`, which counts them as an `integer`. No path is that long."""

_LONGEST_RUN = 16_384
"""The first batch of `_RUN` has `HISTORY_BATCH` entries. Each further batch is four times as large as the one before,
up to this number of entries."""

_AHEAD = 2
"""This many batches of excerpts are read while the caller works on another one."""

_PIECE = 16
"""A history is yielded in pieces of this many entries. Other tasks run in between."""

_MOST_LEFT = 8
"""If at most one in this many of the entries that `_RUN` selected is on the path, the rest of the path is read from
parent to parent."""

_PATH = """
    WITH RECURSIVE path (id, parent, kind, steps) AS (
        SELECT id, parent, kind, 1 FROM crow.entries WHERE id = $1
        UNION ALL
        SELECT e.id, e.parent, e.kind, steps + 1 FROM path JOIN crow.entries e ON e.id = path.parent WHERE steps < $2
    )
    SELECT id, parent FROM path
"""

_PATHS = """
    WITH RECURSIVE path (session, id, parent, kind) AS (
        SELECT s.id, e.id, e.parent, e.kind FROM crow.sessions s JOIN crow.entries e ON e.id = s.leaf
        WHERE s.id = ANY ($1::text[])
        UNION ALL
        SELECT path.session, e.id, e.parent, e.kind FROM path JOIN crow.entries e ON e.id = path.parent
    )
"""
"""Begins a query that reads the paths of several sessions at once."""

_RUN = """
    SELECT coalesce(string_agg(int8send(id) || int8send(coalesce(parent, 0)), ''), '') FROM (
        SELECT id, parent FROM crow.entries
        WHERE conversation = (SELECT conversation FROM crow.entries WHERE id = $1)
            AND session = (SELECT session FROM crow.entries WHERE id = $1) AND id <= $1
        ORDER BY id DESC LIMIT $2
    ) e
"""
"""Selects the id and the parent of the entry $1 and of the entries that the same session wrote before it, newest first,
at most $2 entries. The result is one byte string of 64-bit numbers. Reading the entries as rows would take ten times as
long."""

_ROOT = """
    WITH RECURSIVE first (session, id) AS (
        (SELECT session, id FROM crow.entries WHERE conversation = $1 ORDER BY session, id LIMIT 1)
        UNION ALL
        SELECT n.session, n.id FROM first CROSS JOIN LATERAL (
            SELECT session, id FROM crow.entries WHERE conversation = $1 AND session > first.session
            ORDER BY session, id LIMIT 1
        ) n
    )
    SELECT min(id) FROM first
"""
"""Selects the oldest entry of the conversation $1. It reads only the first entry of each session from the index. A
plain `min(id)` with this condition would read all entries of the conversation."""

_LEFT_BEHIND = """
    WITH RECURSIVE walk (a, b, dropped) AS (
        SELECT $1::bigint, $2::bigint, NULL::bigint
        UNION ALL
        SELECT
            CASE WHEN w.b IS NULL OR w.a > w.b THEN e.parent ELSE w.a END,
            CASE WHEN w.b IS NULL OR w.a > w.b THEN w.b ELSE e.parent END,
            CASE WHEN w.b IS NULL OR w.a > w.b THEN w.a END
        FROM walk w LEFT JOIN crow.entries e ON e.id = CASE WHEN w.b IS NULL OR w.a > w.b THEN w.a ELSE w.b END
        WHERE w.a IS NOT NULL AND w.a IS DISTINCT FROM w.b
    )
    SELECT dropped FROM walk WHERE dropped IS NOT NULL
"""
"""Selects the ids on the path to $1 that are not on the path to $2. The recursion begins with the entries $1 and $2.
Each step replaces the newer of the two entries with its parent, until both are the same entry."""


_REFERRED = "ARRAY (SELECT r.blob FROM crow.blob_refs r WHERE r.entry = ANY ($1::text::bigint[]))"
"""The names of the blobs to which the entries $1 refer."""

_TEXT_SIZES = """
    SELECT e.id, coalesce(octet_length(e.body), 0) + CASE
        WHEN e.kind = 'tool' THEN coalesce((
            SELECT sum(b.size) FROM crow.blob_refs r JOIN crow.blobs b ON b.hash = r.blob WHERE r.entry = e.id
        ), 0)
        ELSE coalesce((SELECT b.size FROM crow.blobs b WHERE b.hash = e.body_blob), 0)
    END
    FROM crow.entries e WHERE e.id = ANY ($1::text::bigint[])
"""
"""Selects the sizes of entries in bytes. Blobs that are not the body itself, such as images, count only for tool
results."""


class PathMethods(UsesDatabase):
    """Methods of the store that read paths and branches."""

    @snapshot
    async def session(self, sql: Sql, session_id: str) -> SessionRow:
        return await session_row(sql, session_id)

    @snapshot
    async def tail(self, sql: Sql, session_id: str) -> Tail:
        return await load_tail(sql, session_id)

    async def history(
        self, session_id: str, *, result_bytes: Callable[[int], int | None] | None = None
    ) -> AsyncIterator[Sequence[Entry]]:
        path = await self._whole_path(session_id)
        most_bytes = None if result_bytes is None else result_bytes(len(path))
        reading = deque[asyncio.Task[Sequence[Entry]]]()
        begun, size = 0, FIRST_BATCH

        def begin(most: int) -> None:
            """Start to read further batches, until `most` of them are being read. So the server reads while the caller
            works on the batch before."""
            nonlocal begun, size
            while begun < len(path) and len(reading) < most:
                reading.append(asyncio.create_task(self._batch(list(path[begun : begun + size]), most_bytes)))
                begun, size = begun + size, min(2 * size, PATH_BATCH)

        begin(1)
        try:
            while reading:
                entries = await reading[0]
                reading.popleft()
                if most_bytes is None and entries:  # `first_entries` may have left out the last entries
                    begun = bisect(path, entries[-1].id)
                begin(1 if most_bytes is None else _AHEAD)
                for piece in range(0, len(entries), _PIECE):
                    yield entries[piece : piece + _PIECE]
                    await asyncio.sleep(0)
        finally:
            for task in reading:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*reading, return_exceptions=True)

    @snapshot
    async def _whole_path(self, sql: Sql, session_id: str) -> array[int]:
        """Return the ids on the session's path, oldest first."""
        leaf = (await session_row(sql, session_id)).leaf
        found = array("q")  # 8 bytes per id: a path may have a hundred thousand entries
        size, is_dense = HISTORY_BATCH, True
        while leaf is not None:
            if is_dense:
                ids, leaf, is_dense = await _run_batch(sql, leaf, size)
            else:
                ids, leaf = await _path_batch(sql, leaf, HISTORY_BATCH)
            found.extend(ids)
            size = min(4 * size, _LONGEST_RUN)
        found.reverse()
        return found

    @snapshot
    async def _batch(self, sql: Sql, ids: Sequence[int], most_bytes: int | None) -> tuple[Entry, ...]:
        """Return the entries with these ids. With `most_bytes`, the text of each tool result is shortened to about this
        many bytes. Without it, entries are returned whole, but the last ones may be left out (see `first_entries`)."""
        return await (first_entries(sql, ids) if most_bytes is None else select_excerpts(sql, ids, most_bytes))

    @snapshot
    async def entry(self, sql: Sql, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        if not is_entry_id(entry_id):
            return None
        if session_id is not None and not await is_on_path(sql, (await session_row(sql, session_id)).leaf, entry_id):
            return None
        return next(iter(await select_entries(sql, [entry_id])), None)

    @snapshot
    async def result(self, sql: Sql, session_id: str, call: CallRef) -> Entry | None:
        conversation = (await session_row(sql, session_id)).conversation
        if not (is_entry_id(call.assistant) and 0 <= call.index <= LARGEST_ID):
            return None
        query = (
            "SELECT id FROM crow.entries WHERE kind = 'tool' AND call_entry = $1 AND call_index = $2"
            " AND conversation = $3 ORDER BY id LIMIT 1"
        )
        found = await sql.fetchval(query, call.assistant, call.index, conversation)
        return None if found is None else next(iter(await select_entries(sql, [found])), None)

    async def watch(self, session_id: str, *, after: int = 0) -> AsyncGenerator[News, None]:
        if not is_plain(session_id):  # with such an id, `Presence` would lose its connection and the lock
            raise NoSuchSession(session_id)
        with self.database.presence.watching(session_id) as changed:

            async def look(after: int, piece: int) -> SessionRead:
                changed.clear()
                return await self._look(session_id, after, piece)

            async for news in follow(look, changed.wait, lambda: self.database.is_closed, after=after):
                yield news

    @snapshot
    async def _look(self, sql: Sql, session_id: str, after: int, piece: int) -> SessionRead:
        more = "owner, CASE WHEN state = 'running' AND cancelled_epoch = epoch THEN turn END"
        *values, owner, cancelled_turn = await session_values(sql, session_id, f"{SESSION_COLUMNS}, {more}")
        row = session_of(values)
        ids: list[int] = []
        if row.newest_entry > after:
            query = (
                "SELECT id FROM crow.entries WHERE conversation = $1 AND session = $2 AND id > $3 ORDER BY id LIMIT $4"
            )
            found = await sql.fetch(query, row.conversation, session_id, after, PATH_BATCH)
            ids = [entry_id for (entry_id,) in found]
        entries = await first_entries(sql, ids) if ids else ()
        pieces: Sequence[Any] = ()
        if row.state == "running":
            pieces = await sql.fetch(
                "SELECT seq, message_id, CASE WHEN seq > $3 THEN piece END FROM crow.drafts"
                " WHERE session = $1 AND after_leaf IS NOT DISTINCT FROM $2 ORDER BY seq",
                session_id,
                row.leaf,
                piece,
            )
        is_elsewhere = row.state == "running" and owner != self.owner
        return SessionRead(
            row=row,
            entries=entries,
            has_more=len(entries) < len(ids) or len(ids) == PATH_BATCH,
            pieces=[Piece(seq, name, *json.loads(text)) for seq, name, text in pieces if text is not None],
            has_draft=bool(pieces),
            is_elsewhere=is_elsewhere,
            is_orphaned=is_elsewhere and not await sql.fetchval("SELECT crow.is_alive($1)", owner),
            cancelled_turn=cancelled_turn,
        )

    @snapshot
    async def count_messages(self, sql: Sql, session_ids: Sequence[str]) -> dict[str, int]:
        query = f"{_PATHS} SELECT session, count(*) FROM path WHERE kind IN ('user', 'assistant') GROUP BY session"
        rows = await sql.fetch(query, list(filter(is_plain, session_ids)))
        return {**dict.fromkeys(session_ids, 0), **dict(rows)}

    @snapshot
    async def compacted(self, sql: Sql, session_ids: Sequence[str]) -> frozenset[str]:
        query = f"{_PATHS} SELECT session, id, kind FROM path WHERE kind IN ('checkpoint', 'mask', 'restore')"
        rows = await sql.fetch(query, list(filter(is_plain, session_ids)))
        return compacted_in(rows, await select_entries(sql, [row[1] for row in rows if row[2] == "restore"]))

    @snapshot
    async def moves(self, sql: Sql, session_id: str) -> tuple[Move, ...]:
        if not is_plain(session_id):
            return ()
        query = (
            "SELECT from_leaf, to_leaf, reason, created_ms FROM crow.moves WHERE session = $1 ORDER BY id DESC LIMIT $2"
        )
        return tuple(Move(**dict(row)) for row in await sql.fetch(query, session_id, MOST_MOVES))

    @snapshot
    async def entries_beyond(
        self, sql: Sql, leaf: int | None, to: int | None, kinds: Collection[str]
    ) -> tuple[Entry, ...]:
        query = f"SELECT id FROM crow.entries WHERE kind = ANY ($3::text[]) AND id IN ({_LEFT_BEHIND})"
        return await select_entries(sql, [row[0] for row in await sql.fetch(query, leaf, to, sorted(kinds))])

    @snapshot
    async def file_changes(self, sql: Sql, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        ids = [row[0] for row in await sql.fetch(_LEFT_BEHIND, leaf, to)]
        query = (
            "SELECT id FROM crow.entries WHERE id = ANY ($1::text::bigint[]) AND (kind = 'file' OR kind = 'tool' AND"
            " (call_entry, call_index) IN (SELECT f.call_entry, f.call_index FROM crow.entries f"
            " WHERE f.kind = 'file' AND f.id = ANY ($1::text::bigint[])))"
        )
        found = await select_entries(sql, [row[0] for row in await sql.fetch(query, array_of(ids))])
        imported = (
            "SELECT EXISTS (SELECT 1 FROM crow.imports i JOIN crow.entries e ON e.conversation = i.conversation"
            " WHERE e.id = $1)"
        )
        return found if await sql.fetchval(imported, leaf) else recorded_here(found)

    @snapshot
    async def outline(self, sql: Sql, session_id: str) -> Outline:
        leaf = (await session_row(sql, session_id)).leaf
        left = await sql.fetch(
            "SELECT from_leaf FROM crow.moves WHERE session = $1 AND from_leaf IS NOT NULL GROUP BY from_leaf"
            " ORDER BY max(id) DESC",
            session_id,
        )
        ends = dict.fromkeys([*([] if leaf is None else [leaf]), *(row[0] for row in left)])
        tree = await sql.fetch(
            "WITH RECURSIVE reached (id, parent, kind) AS ("
            " SELECT id, parent, kind FROM crow.entries WHERE id = ANY ($1::text::bigint[])"
            " UNION SELECT e.id, e.parent, e.kind FROM reached JOIN crow.entries e ON e.id = reached.parent)"
            " SELECT id, parent, kind FROM reached ORDER BY id",
            array_of(ends),
        )
        notes = [entry_id for entry_id, _, kind in tree if kind == "note"]
        prompts = [entry_id for entry_id, _, kind in tree if kind == "user"]
        texts = await _bodies(sql, [*notes, *prompts])
        labels = {
            note: (str(body.get("value")), entry if isinstance(entry := body.get("entry"), int) else None)
            for note in notes
            if (body := texts[note]).get("about") == "label"
        }
        return outline_of(
            [tuple(row) for row in tree],
            tuple(ends),
            leaf,
            labels,
            {name: _prompt_text(texts[name]) for name in prompts},
        )


async def session_row(sql: Sql, session_id: str) -> SessionRow:
    """Return the row of a session.

    :raises NoSuchSession: the session does not exist, or is deleted.
    """
    return session_of(await session_values(sql, session_id, SESSION_COLUMNS))


async def session_values(sql: Sql, session_id: str, columns: str, *, lock: bool = False) -> tuple[Any, ...]:
    """Return columns of a session's row. With `lock`, no other transaction can change the row before this transaction
    ends.

    :raises NoSuchSession: the session does not exist, or is deleted.
    """
    query = f"SELECT {columns} FROM crow.sessions WHERE id = $1 AND deleted_ms IS NULL{' FOR UPDATE' if lock else ''}"
    row = await sql.fetchrow(query, session_id) if is_plain(session_id) else None
    if row is None:
        raise NoSuchSession(session_id)
    return tuple(row)


async def check_session(sql: Sql, session_id: str, *, lock: bool = False) -> None:
    """Check that a session exists; see `session_values`."""
    await session_values(sql, session_id, "1", lock=lock)


async def load_tail(sql: Sql, session_id: str) -> Tail:
    """Return the session's row, and its path from the first entry that the newest valid checkpoint keeps."""
    row = await session_row(sql, session_id)
    path = TailPath()
    start = row.leaf
    while start is not None:
        ids, start = await _path_batch(sql, start, PATH_BATCH)
        if not await _add_to_tail(sql, path, ids):
            break
    if path.cut is not None:
        checkpoint = await _newest_checkpoint(sql, path.cut, path.restored)
        user = await newest_of_kind(sql, path.cut.id, "user") if path.lacks_user else None
        root = await sql.fetchval(_ROOT, row.conversation) or path.cut.id
        named = {entry.id: entry for entry in await select_entries(sql, [one for one in (checkpoint, user) if one])}
        entries = path.entries_after_cut(root, *(named.get(one or 0) for one in (checkpoint, user)))
        return Tail(row=row, entries=entries)
    newest_prompt = await newest_of_kind(sql, path.before, "prompt") if path.lacks_prompt else None
    prompt = () if newest_prompt is None else await select_entries(sql, [newest_prompt])
    return Tail(row=row, entries=(*prompt, *path.entries()))


async def _add_to_tail(sql: Sql, path: TailPath, ids: Sequence[int]) -> bool:
    """Add the entries with these ids, which are sorted newest first. Return false if an entry was not added, because
    the tail is complete. A tool result that does not fit into the tail any more is shortened."""
    sizes = {entry_id: int(size) for entry_id, size in await sql.fetch(_TEXT_SIZES, array_of(ids))}
    done = 0
    while done < len(ids):
        chosen, total = list[int](), 0
        for entry_id in ids[done:]:
            chosen.append(entry_id)
            total += sizes.get(entry_id, 0)
            if total > min(PATH_BATCH_BYTES, path.room):
                break
        done += len(chosen)
        for entry in await select_entries(sql, chosen, newest_first=True):
            size = sizes.get(entry.id, 0)
            if isinstance(entry.body, ToolResult) and size > path.room:
                is_added = path.add(with_excerpt(entry, RESULT_BYTES), RESULT_BYTES)
            else:
                is_added = path.add(entry, size)
            if not is_added:
                return False
    return True


async def _newest_checkpoint(sql: Sql, last: Entry, restored: Collection[int]) -> int | None:
    """Return the id of the newest valid checkpoint on the path that ends at `last`."""
    rows = await sql.fetch(
        "SELECT id FROM crow.entries WHERE kind = 'checkpoint' AND id <= $1 AND conversation = $2",
        last.id,
        last.conversation,
    )
    found = {row[0] for row in rows}
    if not found:  # the usual case, in which the path need not be read
        return None
    restores = await sql.fetch(
        "SELECT id, (body::json ->> 'entry')::bigint FROM crow.entries WHERE conversation = $1 AND kind = 'restore'",
        last.conversation,
    )
    ids = await path_ids(sql, last.id)
    return newest_checkpoint(ids, found, {row[0]: row[1] for row in restores}, restored)


async def _run_batch(sql: Sql, start: int, size: int) -> tuple[list[int], int | None, bool]:
    """Read a part of the path to the entry `start`, from the last `size` entries that the session of `start` wrote up
    to `start`. Return three values: the ids that are on the path, newest first; the id from which to continue, or None
    at the end of the path; and whether to read the next part in the same way. If only few of the entries were on the
    path, it is faster to go from parent to parent, as `_path_batch` does."""
    numbers = array("q", await sql.fetchval(_RUN, start, size))
    if sys.byteorder == "little":
        numbers.byteswap()
    ids: list[int] = []
    wanted = start
    for entry_id, parent in zip(numbers[::2], numbers[1::2], strict=True):
        if entry_id < wanted:  # the parent is not in this run
            break
        if entry_id == wanted:
            ids.append(entry_id)
            wanted = parent  # 0 at the first entry of the conversation
            if not wanted:
                break
    entries = len(numbers) // 2
    return ids, (wanted or None) if ids else None, len(ids) * _MOST_LEFT > entries


async def _path_batch(sql: Sql, start: int, limit: int) -> tuple[list[int], int | None]:
    """Return up to `limit` ids of the path that ends at `start`, newest first. Also return the id from which to
    continue, or None at the end of the path."""
    rows = sorted(await sql.fetch(_PATH, start, limit), reverse=True)
    return [row[0] for row in rows], rows[-1][1] if rows else None


async def path_ids(sql: Sql, leaf: int | None) -> list[int]:
    """Return all ids of the path that ends at `leaf`, newest first."""
    return [row[0] for row in sorted(await sql.fetch(_PATH, leaf, _MOST_STEPS), reverse=True)]


async def is_on_path(sql: Sql, leaf: int | None, entry_id: int) -> bool:
    """Return whether the entry is on the path that ends at `leaf`."""
    query = (
        "WITH RECURSIVE path (id, parent) AS ("
        " SELECT id, parent FROM crow.entries WHERE id = $1 AND id >= $2"
        " UNION ALL SELECT e.id, e.parent FROM path JOIN crow.entries e ON e.id = path.parent WHERE e.id >= $2)"
        " SELECT EXISTS (SELECT 1 FROM path WHERE id = $2)"
    )
    return bool(await sql.fetchval(query, leaf, entry_id))


async def newest_of_kind(sql: Sql, start: int | None, kind: str) -> int | None:
    """Return the id of the newest entry of this kind on the path that ends at `start`."""
    query = (
        "WITH RECURSIVE path (id, parent, kind) AS ("
        " SELECT id, parent, kind FROM crow.entries WHERE id = $1"
        " UNION ALL SELECT e.id, e.parent, e.kind FROM path JOIN crow.entries e ON e.id = path.parent"
        " WHERE path.kind <> $2)"
        " SELECT id FROM path WHERE kind = $2"
    )
    found: int | None = await sql.fetchval(query, start, kind)
    return found


async def select_entries(sql: Sql, ids: Sequence[int], *, newest_first: bool = False) -> tuple[Entry, ...]:
    """Return the entries with these ids: newest first if `newest_first` is true, otherwise oldest first."""
    if not ids:
        return ()
    query = f"SELECT {_ENTRY_COLUMNS} FROM {_ENTRY_SOURCE} WHERE e.id = ANY ($1::text::bigint[])"
    query += f" ORDER BY e.id{' DESC' if newest_first else ''}"
    rows = [_StoredRow(*row) for row in await sql.fetch(query, array_of(ids))]
    data: dict[str, bytes] = {}
    if with_blobs := [row.id for row in rows if row.has_blobs]:
        query = f"SELECT hash, data FROM crow.blobs WHERE hash = ANY ({_REFERRED})"
        data = {name: bytes(content) for name, content in await sql.fetch(query, array_of(with_blobs))}
    return tuple(entry_of(row, partial(body_of, row, row.body, data.get)) for row in rows)


async def select_excerpts(sql: Sql, ids: Sequence[int], most_bytes: int) -> tuple[Entry, ...]:
    """Return the entries with these ids, oldest first. The texts of tool results have at most about `most_bytes` bytes.
    Only the beginning and the end of a longer text are read."""
    query = f"SELECT {_ENTRY_COLUMNS} FROM {_ENTRY_SOURCE} WHERE e.id = ANY ($1::text::bigint[]) ORDER BY e.id"
    rows = [_StoredRow(*row) for row in await sql.fetch(query, array_of(ids))]
    texts = {row.id: name for row in rows if row.kind == "tool" and (name := text_blob_of(row.body or b"")) is not None}
    refers = [row.id for row in rows if row.has_blobs]
    data, ends = await _blobs_and_ends(sql, refers, list(texts.values()), most_bytes)
    found: list[Entry] = []
    for row in rows:
        text = texts.get(row.id, "")
        own = {text: excerpt_of_ends(*ends[text], f"call_{row.call_entry}_{row.call_index}")} if text in ends else {}
        needs_whole: list[str] = []

        def load(name: str, own: Mapping[str, bytes] = own, needs_whole: list[str] = needs_whole) -> bytes | None:
            if name in ends and name not in own:
                needs_whole.append(name)
            return own.get(name, data.get(name))

        entry = entry_of(row, partial(body_of, row, row.body, load))
        if needs_whole:  # for example, a diff of the entry has the long text of another entry
            (entry,) = await select_entries(sql, [row.id])
        found.append(with_excerpt(entry, most_bytes))
    return tuple(found)


async def _blobs_and_ends(
    sql: Sql, ids: Sequence[int], texts: Sequence[str], most_bytes: int
) -> tuple[dict[str, bytes], dict[str, tuple[bytes, bytes, int]]]:
    """Read the blobs to which these entries refer, and return two mappings from hashes. For each long blob among
    `texts` (hashes), the second mapping has its beginning, its end and its size. The first mapping has the contents of
    all other blobs."""
    if not ids:
        return {}, {}
    rows = await sql.fetch(
        "SELECT hash, size, NOT is_long, CASE WHEN is_long THEN substring(data FROM 1 FOR $3) ELSE data END,"
        " CASE WHEN is_long THEN substring(data FROM (size - $3 + 1)::int) END"
        " FROM (SELECT *, hash = ANY ($2::text[]) AND size > $4 AS is_long FROM crow.blobs"
        f" WHERE hash = ANY ({_REFERRED})) AS b",
        *(array_of(ids), texts, bytes_per_end(most_bytes), longest_whole(most_bytes)),
    )
    data = {name: bytes(content) for name, _, is_whole, content, _ in rows if is_whole}
    ends = {name: (bytes(head), bytes(tail), size) for name, size, is_whole, head, tail in rows if not is_whole}
    return data, ends


async def first_entries(sql: Sql, ids: Sequence[int], *, newest_first: bool = False) -> tuple[Entry, ...]:
    """Return entries with these ids, oldest first, or newest first if `newest_first` is true. Stop after about 4 MiB of
    stored bodies and blobs, but return at least one entry if there is one."""
    sizes = await sql.fetch(
        "SELECT e.id, coalesce(octet_length(e.body), 0) + coalesce((SELECT sum(b.size) FROM crow.blob_refs r"
        " JOIN crow.blobs b ON b.hash = r.blob WHERE r.entry = e.id), 0) FROM crow.entries e"
        f" WHERE e.id = ANY ($1::text::bigint[]) ORDER BY e.id{' DESC' if newest_first else ''}",
        array_of(ids),
    )
    chosen: list[int] = []
    total = 0
    for entry_id, size in sizes:
        chosen.append(entry_id)
        total += int(size)
        if total > PATH_BATCH_BYTES:
            break
    return await select_entries(sql, chosen, newest_first=newest_first)


async def _bodies(sql: Sql, ids: Sequence[int]) -> Mapping[int, Mapping[str, Any]]:
    """Map entries to their bodies as JSON objects."""
    query = f"SELECT e.id, {_BODY} FROM {_ENTRY_SOURCE} WHERE e.id = ANY ($1::text::bigint[])"
    return {entry_id: json.loads(body or b"{}") for entry_id, body in await sql.fetch(query, array_of(ids))}


def _prompt_text(body: Mapping[str, Any]) -> str:
    return "\n".join(str(part["text"]) for part in body.get("parts", ()) if part.get("type") == "text")[
        :PROMPT_CHARACTERS
    ]
