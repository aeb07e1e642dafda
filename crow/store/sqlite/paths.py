"""Reads entries, paths through the tree of entries, and branches.

A path is read from its leaf towards the root in batches, and only as far as needed. So the time to load a session
depends on the distance to its newest checkpoint. Ids increase along a path, so sorting by id gives the path's order.

A damaged byte affects one entry, never a whole session. If an entry cannot be read, the user and the model see a text
in its place that says what happened. The stored bytes stay as they are.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import attrgetter
from sqlite3 import Connection
from typing import Any

from crow.domain.entries import Body, CallRef, Entry, Remark
from crow.domain.errors import NoSuchSession
from crow.store import Move, Outline, SessionRow, Tail
from crow.store.codec import Load, Unreadable
from crow.store.excerpts import SHARED_TEXT, bytes_per_end, excerpt_of_ends, longest_whole, text_blob_of
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
from crow.store.rows import (
    SESSION_COLUMNS,
    EntryRow,
    body_of,
    columns_of,
    entry_of,
    possible_time,
    session_of,
)
from crow.store.session_rules import LARGEST_ID, is_entry_id
from crow.store.sqlite.compression import content_of, decompressed, ends_of_blob
from crow.store.sqlite.database import UsesDatabase, snapshot
from crow.store.sqlite.failures import REPAIR

# ruff: noqa: S608  # statements are put together from constants; values are parameters

CHECKED_COLUMNS = (
    *("conversation", "session", "parent", "turn", "kind", "model", "call_entry", "call_index"),
    *("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "cost", "estimate", "created_ms"),
    *("cache_write_tokens", "estimated"),
)
"""The columns that the checksum of an entry covers, in this order. The last two columns are NULL in old entries. If one
of these two is NULL, the checksum does not cover it."""

_checked_values = attrgetter(*CHECKED_COLUMNS)


@dataclass(slots=True)
class StoredRow(EntryRow):
    """A row of `_ENTRY_SOURCE`."""

    checksum: int | None
    size: int | None
    """The size of the blob's content, if the body is stored as a blob. Then `body` may be compressed."""


_ENTRY_COLUMNS = columns_of(StoredRow, body="coalesce(CAST(e.body AS BLOB), b.data)", size="b.size")
"""The body is read as bytes, because one damaged text would make the whole query fail."""

_ENTRY_SOURCE = "entries e LEFT JOIN blobs b ON b.hash = e.body_blob"

_PROMPTS_PER_QUERY = 500

# The parent in a damaged row can be any value. So a parent is followed only if it is an older entry. `_PATH` also
# requires the same conversation.
_PATH = """
    WITH RECURSIVE path (id, parent, kind, conversation, steps) AS (
        SELECT id, parent, kind, conversation, 1 FROM entries
        WHERE id = :start AND conversation = coalesce(:conversation, conversation)
        UNION ALL
        SELECT e.id, e.parent, e.kind, e.conversation, steps + 1 FROM path JOIN entries e ON e.id = path.parent
        WHERE steps < :limit AND e.id < path.id AND e.conversation = path.conversation
    )
    SELECT id, parent, kind FROM path
"""

_PATHS = """
    WITH RECURSIVE path (session, id, parent, kind) AS (
        SELECT s.id, e.id, e.parent, e.kind FROM sessions s JOIN entries e ON e.id = s.leaf
        WHERE s.id IN (SELECT value FROM json_each(?))
        UNION ALL
        SELECT path.session, e.id, e.parent, e.kind FROM path JOIN entries e ON e.id = path.parent
        WHERE e.id < path.id
    )
"""
"""Begins a query that reads the paths of several sessions at once."""


class PathMethods(UsesDatabase):
    """Methods of the store that read paths and branches."""

    @snapshot()
    def session(self, sql: Connection, session_id: str) -> SessionRow:
        return session_row(sql, session_id)

    @snapshot()
    def tail(self, sql: Connection, session_id: str) -> Tail:
        return load_tail(sql, session_id)

    async def history(
        self, session_id: str, *, result_bytes: Callable[[int], int | None] | None = None
    ) -> AsyncIterator[Sequence[Entry]]:
        row = await self.session(session_id)
        ids, missing = await self.database.read(partial(_whole_path, row=row))
        ids.reverse()
        if missing is not None:
            yield (missing_entry(missing, row.conversation, session_id),)
        most_bytes = None if result_bytes is None else result_bytes(len(ids))
        done, size = 0, FIRST_BATCH
        while done < len(ids):
            read = partial(entries_of, ids=ids[done : done + size], result_bytes=most_bytes)
            entries, taken = await self.database.read(read)
            before = ids[done - 1] if done else None
            yield _checked(entries, ids[done : done + taken], before, row)
            done += taken
            size = min(2 * size, PATH_BATCH)

    @snapshot()
    def entry(self, sql: Connection, entry_id: int, *, session_id: str | None = None) -> Entry | None:
        if not is_entry_id(entry_id):
            return None
        if session_id is not None and not is_on_path(sql, session_row(sql, session_id).leaf, entry_id):
            return None
        return next(_select_entries(sql, "e.id = ?", (entry_id,)), None)

    @snapshot()
    def result(self, sql: Connection, session_id: str, call: CallRef) -> Entry | None:
        conversation = session_row(sql, session_id).conversation
        if not (is_entry_id(call.assistant) and 0 <= call.index <= LARGEST_ID):
            return None
        where = "e.kind = 'tool' AND e.call_entry = ? AND e.call_index = ? AND e.conversation = ?"
        return next(_select_entries(sql, where, (call.assistant, call.index, conversation)), None)

    @snapshot()
    def count_messages(self, sql: Connection, session_ids: Sequence[str]) -> dict[str, int]:
        # This takes about 2 µs per entry.
        query = f"{_PATHS} SELECT session, count(*) FROM path WHERE kind IN ('user', 'assistant') GROUP BY session"
        rows = sql.execute(query, (json.dumps(list(session_ids)),))
        return {**dict.fromkeys(session_ids, 0), **dict(rows.fetchall())}

    @snapshot()
    def compacted(self, sql: Connection, session_ids: Sequence[str]) -> frozenset[str]:
        query = f"{_PATHS} SELECT session, id, kind FROM path WHERE kind IN ('checkpoint', 'mask', 'restore')"
        rows = sql.execute(query, (json.dumps(list(session_ids)),)).fetchall()
        restores = json.dumps([entry_id for _, entry_id, kind in rows if kind == "restore"])
        return compacted_in(rows, _select_entries(sql, "e.id IN (SELECT value FROM json_each(?))", (restores,)))

    @snapshot()
    def moves(self, sql: Connection, session_id: str) -> tuple[Move, ...]:
        rows = sql.execute(
            "SELECT from_leaf, to_leaf, CAST(reason AS TEXT), created_ms FROM moves WHERE session = ?"
            " AND typeof(from_leaf) IN ('integer', 'null') AND typeof(to_leaf) IN ('integer', 'null')"
            " ORDER BY id DESC LIMIT ?",  # a damaged row can have values of any type
            (session_id, MOST_MOVES),
        )
        return tuple(
            Move(from_leaf=row[0], to_leaf=row[1], reason=row[2], created_ms=possible_time(row[3])) for row in rows
        )

    @snapshot()
    def entries_beyond(
        self, sql: Connection, leaf: int | None, to: int | None, kinds: Collection[str]
    ) -> tuple[Entry, ...]:
        where = "e.id IN (SELECT value FROM json_each(?)) AND e.kind IN (SELECT value FROM json_each(?))"
        values = (json.dumps(_ids_beyond(sql, leaf, to)), json.dumps(sorted(kinds)))
        return tuple(_select_entries(sql, where, values))

    @snapshot()
    def file_changes(self, sql: Connection, leaf: int | None, to: int | None) -> tuple[Entry, ...]:
        where = (
            "e.id IN (SELECT value FROM json_each(:ids)) AND (e.kind = 'file' OR e.kind = 'tool' AND"
            " (e.call_entry, e.call_index) IN (SELECT f.call_entry, f.call_index FROM entries f"
            " WHERE f.kind = 'file' AND f.id IN (SELECT value FROM json_each(:ids))))"
        )
        found = tuple(_select_entries(sql, where, {"ids": json.dumps(_ids_beyond(sql, leaf, to))}))
        imported = "SELECT 1 FROM imports WHERE conversation = (SELECT conversation FROM entries WHERE id = ?)"
        if sql.execute(imported, (leaf,)).fetchone():
            return found
        return recorded_here(found)

    @snapshot()
    def outline(self, sql: Connection, session_id: str) -> Outline:
        # A session leaves a branch only by a move. So a branch ends either at the session's leaf or at an entry from
        # which the session was moved.
        leaf = session_row(sql, session_id).leaf
        left = sql.execute(
            "SELECT from_leaf, max(id) FROM moves WHERE session = ? AND typeof(from_leaf) = 'integer'"
            " GROUP BY from_leaf ORDER BY 2 DESC",
            (session_id,),
        ).fetchall()
        ends = dict.fromkeys([*([] if leaf is None else [leaf]), *(row[0] for row in left)])
        tree = sql.execute(
            "WITH RECURSIVE reached (id, parent, kind) AS ("
            " SELECT id, parent, kind FROM entries WHERE id IN (SELECT value FROM json_each(?))"
            " UNION SELECT e.id, e.parent, e.kind FROM reached JOIN entries e ON e.id = reached.parent)"
            " SELECT id, parent, kind FROM reached ORDER BY id",
            (json.dumps(list(ends)),),
        ).fetchall()
        labels = _labels(sql, [entry_id for entry_id, _, kind in tree if kind == "note"])
        prompts = _prompts(sql, [entry_id for entry_id, _, kind in tree if kind == "user"])
        return outline_of(tree, tuple(ends), leaf, labels, prompts)


def session_row(sql: Connection, session_id: str) -> SessionRow:
    """:raises NoSuchSession: the session does not exist, or is deleted."""
    return session_of(session_values(sql, session_id, SESSION_COLUMNS))


def session_values(sql: Connection, session_id: str, columns: str) -> Sequence[Any]:
    """Return columns of a session's row.

    :raises NoSuchSession: the session does not exist, or is deleted.
    """
    # If an index is damaged, look for the row without it. The `+` is there because old versions of SQLite use the index
    # of the primary key in spite of NOT INDEXED.
    for source in ("sessions WHERE id", "sessions NOT INDEXED WHERE +id"):
        query = f"SELECT {columns} FROM {source} = ? AND deleted_ms IS NULL"
        row: Sequence[Any] | None = sql.execute(query, (session_id,)).fetchone()
        if row is not None:
            return row
    raise NoSuchSession(session_id)


def load_tail(sql: Connection, session_id: str) -> Tail:
    """Return the session's row, and its path from the first entry that the newest valid checkpoint keeps."""
    row = session_row(sql, session_id)
    path = TailPath()
    for read in _path_readers(sql, row):
        if not path.add(*read(path.room)):
            break
    if path.cut is not None:
        checkpoint = _newest_checkpoint(sql, path.cut, path.restored)
        user = _newest_of_kind(sql, path.cut.id, "user") if path.lacks_user else None
        query = "SELECT min(id) FROM entries WHERE conversation = ? AND parent IS NULL"
        (root,) = sql.execute(query, (row.conversation,)).fetchone()
        named = [None if one is None else _select_one(sql, one) for one in (checkpoint, user)]
        return Tail(row=row, entries=path.entries_after_cut(root or path.cut.id, *named))
    newest_prompt = _newest_of_kind(sql, path.before, "prompt") if path.lacks_prompt else None
    prompt = () if newest_prompt is None else _select_entries(sql, "e.id = ?", (newest_prompt,))
    return Tail(row=row, entries=(*prompt, *path.entries()))


def path_ids(sql: Connection, leaf: int | None) -> Iterator[int]:
    """Return the ids of the path that ends at `leaf`, newest first."""
    return (entry_id for rows, _ in _path_batches(sql, leaf) for entry_id, _, _ in rows)


def message_ids(sql: Connection, leaf: int | None) -> Iterator[int]:
    """Return the ids of the prompts and answers on the path that ends at `leaf`, newest first."""
    rows = (row for batch, _ in _path_batches(sql, leaf) for row in batch)
    return (entry_id for entry_id, _, kind in rows if kind in ("user", "assistant"))


def common_ids(left: Iterator[int], right: Iterator[int]) -> Iterator[int]:
    """Return the ids that are in both of two descending sequences."""
    other = next(right, None)
    for entry_id in left:
        while other is not None and other > entry_id:
            other = next(right, None)
        if other is None:
            return
        if other == entry_id:
            yield entry_id


def is_on_path(sql: Connection, leaf: int | None, entry_id: int) -> bool:
    """Return whether the entry is on the path that ends at `leaf`."""
    return next((found for found in path_ids(sql, leaf) if found <= entry_id), None) == entry_id


def has_user(sql: Connection, leaf: int) -> bool:
    """Return whether a prompt is on the path that ends at `leaf`."""
    return _newest_of_kind(sql, leaf, "user") is not None


def entries_of(
    sql: Connection, ids: Sequence[int], *, result_bytes: int | None = None
) -> tuple[tuple[Entry, ...], int]:
    """Read the entries of the first `ids`, up to 256 ids or about 4 MiB in one call. Return these entries, and how many
    of the `ids` were read. The `ids` must be in ascending order.

    With `result_bytes`, the text of a tool result has at most about that many bytes. Longer texts become excerpts.
    """
    wanted = list(ids[:PATH_BATCH])
    load = _loader(sql)
    found: list[Entry] = []
    size = 0

    def load_and_count(name: str) -> bytes | None:
        nonlocal size
        data = load(name)
        size += len(data or b"")
        return data

    rows = sql.execute(
        f"SELECT {_ENTRY_COLUMNS} FROM {_ENTRY_SOURCE} WHERE e.id IN (SELECT value FROM json_each(?)) ORDER BY e.id",
        (json.dumps(wanted),),
    )
    for values in rows:
        row = StoredRow(*values)
        if result_bytes is not None:
            found.append(_entry_with_excerpt(sql, row, load_and_count, result_bytes))
        else:
            found.append(entry_of(row, partial(_body_of, row, load_and_count)))
        if row.body is not None:
            size += max(len(row.body), row.size if isinstance(row.size, int) else 0)
        if size > PATH_BATCH_BYTES:
            rows.close()
            return tuple(found), wanted.index(row.id) + 1
    return tuple(found), len(wanted)


def _entry_with_excerpt(sql: Connection, row: StoredRow, load: Load, most_bytes: int) -> Entry:
    """Return the entry in a row. If it is a tool result, its text has at most about `most_bytes` bytes."""
    if row.kind == "tool" and (name := text_blob_of(row.body or b"")) is not None:
        call_id = f"call_{row.call_entry}_{row.call_index}"
        load = partial(_load_excerpt, sql, load, name, most_bytes, call_id)
    return with_excerpt(entry_of(row, partial(_body_of, row, load)), most_bytes)


def _load_excerpt(sql: Connection, load: Load, text: str, most_bytes: int, call_id: str, name: str) -> bytes | None:
    """Return the content of the blob `name`. If `name` equals `text` and the content is long, return only an
    excerpt."""
    row = sql.execute("SELECT rowid, size FROM blobs WHERE hash = ?", (name,)).fetchone() if name == text else None
    rowid, size = row or (0, None)
    if isinstance(size, int) and size > longest_whole(most_bytes):
        with suppress(Unreadable):
            head, tail = ends_of_blob(sql, rowid, size, bytes_per_end(most_bytes))
            return excerpt_of_ends(head, tail, size, call_id)
    return load(name)


def _checked(entries: Sequence[Entry], expected: Sequence[int], before: int | None, row: SessionRow) -> Sequence[Entry]:
    """Return `entries`, with remarks where entries are missing or may be missing. `expected` are the ids in this part
    of the path. `before` is the id of the entry before this part.

    The path was read from an index. If the index is damaged, the path may be wrong.
    """
    found = {entry.id: entry for entry in entries}
    checked: list[Entry] = []
    for entry_id in expected:
        entry = found.get(entry_id)
        if entry is None:
            checked.append(missing_entry(entry_id, row.conversation, row.id, is_alone=True))
        elif before is not None and entry.parent != before:
            words = f"Entries before entry {entry_id} may be missing here: the database is damaged. {REPAIR}"
            checked += [replace(entry, body=Remark(text=words, message_id=f"misplaced-{entry_id}")), entry]
        else:
            checked.append(entry)
        before = entry_id
    return checked


def _whole_path(sql: Connection, row: SessionRow) -> tuple[array[int], int | None]:
    """Return the ids on the session's path, newest first. Also return the id of the missing entry at which the path
    stops, or None if no entry is missing.

    All parents in the conversation are read from an index with one query, because a query for each step takes ten times
    as long. If a parent is not in the index, it is looked up in the table.
    """
    found = array("q")  # 8 bytes per id: a path may have a hundred thousand entries
    wanted = row.leaf
    # The `+` makes SQLite use the index, and not the table with its large rows.
    rows = sql.execute(
        "SELECT id, parent FROM entries WHERE conversation = ? AND +id <= ? ORDER BY +id DESC",
        (row.conversation, 0 if wanted is None else wanted),
    )
    for entry_id, parent in rows:
        if wanted is None or entry_id < wanted:
            break
        if entry_id == wanted:
            found.append(entry_id)
            if parent is not None and not (isinstance(parent, int) and 0 < parent < entry_id):
                return found, entry_id - 1  # damaged; see `_path_rows`
            wanted = parent
    rows.close()
    missing = None
    while wanted is not None:
        batch, wanted, missing = _path_rows(sql, wanted, row.conversation, limit=HISTORY_BATCH)
        found.extend(one[0] for one in batch)
    return found, missing


def unreadable_entries(
    sql: Connection, where: str = "true", values: Sequence[object] = ()
) -> Iterator[tuple[StoredRow, Unreadable]]:
    """Yield the row of each entry that cannot be read, with the reason."""
    load = _loader(sql)
    for found in sql.execute(f"SELECT {_ENTRY_COLUMNS} FROM {_ENTRY_SOURCE} WHERE {where} ORDER BY e.id", values):
        row = StoredRow(*found)
        try:
            _body_of(row, load)
        except Unreadable as error:
            yield row, error


def _body_of(row: StoredRow, load: Load) -> Body:
    """:raises Unreadable: the body is damaged, or this version does not know its kind."""
    if row.checksum is not None:
        sealed = row.body or b"" if row.body_blob is None else str(row.body_blob).encode()
        if checksum(sealed, _checked_values(row)) != row.checksum:
            raise Unreadable("it is damaged: its checksum is wrong")
    data = row.body
    if row.body_blob is not None and data is not None:
        data = decompressed(row.size, bytes(data))
    return body_of(row, data, load)


def checksum(body: bytes, values: Sequence[object]) -> int:
    """Return the checksum of an entry. `body` is the JSON of the entry's body or, if that JSON is stored as a blob, the
    blob's hash. `values` are the values of `CHECKED_COLUMNS`."""
    # The last two columns came later. Older checksums do not cover them.
    columns = tuple(values[:-2]) + tuple([value for value in values[-2:] if value is not None])
    return zlib.crc32(body, zlib.crc32(ascii(columns).encode()))


def _loader(sql: Connection) -> Load:
    """Return a function that reads a blob by its hash. The function raises `Unreadable` if the blob is damaged."""

    def load(name: str) -> bytes | None:
        row = sql.execute("SELECT size, data FROM blobs WHERE hash = ?", (name,)).fetchone()
        return None if row is None else content_of(name, row[0], bytes(row[1]))

    return load


def missing_entry(entry_id: int, conversation: int, session: str = "", *, is_alone: bool = False) -> Entry:
    """Return a remark to show in place of a missing entry. Another entry or a session refers to that entry. `is_alone`
    is true if the entries before the missing entry are known."""
    more = "" if is_alone else ", and so is everything before it"
    words = f"Entry {entry_id} is missing from the database{more}. {REPAIR}"
    body = Remark(text=words, message_id=f"unreadable-{entry_id}")
    return Entry(id=entry_id, conversation=conversation, session=session, parent=None, turn=0, body=body)


_PathRows = tuple[list[tuple[int, int | None, str]], int | None, int | None]


def _path_rows(sql: Connection, start: int, conversation: int | None = None, *, limit: int = PATH_BATCH) -> _PathRows:
    """Return the id, parent and kind of up to `limit` entries of the path that ends at `start`, newest first.

    The second value is the id from which to continue, or None if there is nothing more to read. The third value is the
    id of the next entry if that entry is missing, otherwise None.
    """
    rows = sql.execute(_PATH, {"start": start, "limit": limit, "conversation": conversation}).fetchall()
    if not rows:
        return rows, None, start
    entry_id, parent, _ = rows[-1]
    if parent is None:
        return rows, None, None
    if not isinstance(parent, int) or not 0 < parent < entry_id:
        return rows, None, entry_id - 1
    return (rows, parent, None) if len(rows) == limit else (rows, None, parent)


def _path_batches(
    sql: Connection, start: int | None, conversation: int | None = None
) -> Iterator[tuple[list[tuple[int, int | None, str]], int | None]]:
    """Yield batches of a path, newest first, each with a second value. If the path stops after the batch because an
    entry is missing, the second value is that entry's id, otherwise None."""
    while start is not None:
        rows, start, missing = _path_rows(sql, start, conversation)
        yield rows, missing


_Reader = Callable[[int], tuple[Entry, int]]
"""Reads an entry. The argument is the number of bytes that may be read. The results are the entry, and the number of
bytes of its texts."""


def _path_readers(sql: Connection, row: SessionRow) -> Iterator[_Reader]:
    """Yield a reader for each entry of the session's path, newest first."""
    load = _loader(sql)
    for rows, missing in _path_batches(sql, row.leaf, row.conversation):
        ids = json.dumps([entry_id for entry_id, _, _ in rows])
        found = sql.execute(
            f"SELECT {_ENTRY_COLUMNS} FROM {_ENTRY_SOURCE}"
            " WHERE e.id IN (SELECT value FROM json_each(?)) ORDER BY e.id DESC",
            (ids,),
        )
        for values in found:
            yield partial(_read_within, sql, StoredRow(*values), load)
        if missing is not None:
            yield partial(_read_missing, missing_entry(missing, row.conversation, row.id))


def _read_missing(entry: Entry, _: int) -> tuple[Entry, int]:
    return entry, 0


def _read_within(sql: Connection, row: StoredRow, load: Load, room: int) -> tuple[Entry, int]:
    """Return the entry in a row, and the number of bytes of its texts. A tool result with more than `room` bytes is
    shortened."""
    size = max(len(row.body or b""), row.size if isinstance(row.size, int) else 0)
    if row.kind == "tool":
        if (shared := SHARED_TEXT.search(row.body or b"")) is not None:
            stored = sql.execute("SELECT size FROM blobs WHERE hash = ?", (shared[1].decode(),)).fetchone()
            size += stored[0] if stored and isinstance(stored[0], int) else 0
        if size > room:
            return _entry_with_excerpt(sql, row, load, RESULT_BYTES), RESULT_BYTES
    return entry_of(row, partial(_body_of, row, load)), size


def _newest_checkpoint(sql: Connection, last: Entry, restored: Collection[int]) -> int | None:
    """Return the id of the newest valid checkpoint on the path that ends at `last`."""
    # The `+` makes SQLite use the index of compactions. It does not have the conversation, but it is short.
    rows = sql.execute(
        "SELECT id FROM entries WHERE kind IN ('checkpoint', 'mask') AND kind = 'checkpoint' AND +id <= ?"
        " AND +conversation = ?",
        (last.id, last.conversation),
    )
    found = {entry_id for (entry_id,) in rows}
    if not found:  # the usual case, in which reading the path would be a waste
        return None
    restores = sql.execute(
        "SELECT id, iif(json_valid(body), json_extract(body, '$.entry'), NULL) FROM entries"
        " WHERE conversation = ? AND kind = 'restore'",
        (last.conversation,),
    )
    return newest_checkpoint(path_ids(sql, last.id), found, dict(restores.fetchall()), restored)


def _select_one(sql: Connection, entry_id: int) -> Entry | None:
    return next(_select_entries(sql, "e.id = ?", (entry_id,)), None)


def _newest_of_kind(sql: Connection, start: int | None, kind: str) -> int | None:
    """Return the id of the newest entry of this kind on the path that ends at `start`."""
    rows = (row for rows, _ in _path_batches(sql, start) for row in rows)
    return next((entry_id for entry_id, _, found in rows if found == kind), None)


def _ids_beyond(sql: Connection, leaf: int | None, to: int | None) -> list[int]:
    """Return the ids that are on the path to `leaf` but not on the path to `to`, newest first. Both paths are read only
    up to the entry where they meet."""
    meeting = next(common_ids(path_ids(sql, leaf), path_ids(sql, to)), None)
    return list(takewhile(lambda entry_id: entry_id != meeting, path_ids(sql, leaf)))


def _prompts(sql: Connection, ids: Sequence[int]) -> dict[int, str]:
    """Map the entry ids of prompts to the beginnings of their texts."""
    prompts: dict[int, str] = {}
    for start in range(0, len(ids), _PROMPTS_PER_QUERY):
        some = ids[start : start + _PROMPTS_PER_QUERY]
        # List each id in the query: with ids from a subquery, the view would read all entries.
        query = f"SELECT id, substr(text, 1, {PROMPT_CHARACTERS}) FROM searchable WHERE id IN ({marks(some)})"
        prompts.update((entry_id, text or "") for entry_id, text in sql.execute(query, some))
    return prompts


def marks(values: Sequence[object]) -> str:
    """Return placeholders for these values, separated by commas."""
    return ", ".join("?" * len(values))


def _labels(sql: Connection, notes: Iterable[int]) -> dict[int, tuple[str, int | None]]:
    rows = sql.execute(
        "SELECT id, json_extract(body, '$.value'), json_extract(body, '$.entry') FROM entry_bodies"
        " WHERE id IN (SELECT value FROM json_each(?)) AND json_extract(body, '$.about') = 'label'",
        (json.dumps(list(notes)),),
    )
    return {note: (str(value), entry if isinstance(entry, int) else None) for note, value, entry in rows}


def _select_entries(sql: Connection, where: str, values: Any) -> Iterator[Entry]:
    load = _loader(sql)
    query = f"SELECT {_ENTRY_COLUMNS} FROM {_ENTRY_SOURCE} WHERE {where} ORDER BY e.id"
    for found in sql.execute(query, values).fetchall():
        row = StoredRow(*found)
        yield entry_of(row, partial(_body_of, row, load))
