"""Brings what can be read of a damaged database into a new one.

The rows are read from the pages themselves, however these hang together. Indexes tell of rows that are lost.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from crow.domain.entries import Announcement, Body, CallRef, Remark, ToolResult
from crow.domain.errors import StoreUnavailable
from crow.store.codec import KINDS, encode
from crow.store.sqlite.migrations import migrate
from crow.store.sqlite.pages import PageRow, Pages, Value, wal_pages
from crow.store.sqlite.paths import checksum

__all__ = ["index_words", "recover"]

# ruff: noqa: S608  # statements are put together from constants; values are parameters


_TITLE_CHARS = 80
_LARGEST_ID = 2**48
"""Larger ones can only be damaged."""

_BLOB_NAME = re.compile(rb'\{"blob":"([0-9a-f]{64})"')


def recover(source: Path, target: Path) -> tuple[str, ...]:
    """Make a database at `target` of the rows in `source`; what could not be recovered.

    :raises StoreUnavailable: there is nothing of crow in it.
    """
    wal = Path(f"{source}-wal")
    newer, size = wal_pages(wal.read_bytes()) if wal.exists() else ({}, None)
    with source.open("rb") as file, closing(sqlite3.connect(target, isolation_level=None)) as connection:
        os.chmod(target, 0o600)
        if not os.fstat(file.fileno()).st_size:
            raise StoreUnavailable(f"{source} is empty.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            migrate(connection)
            connection.execute("BEGIN")
            recovery = _Recovery(Pages(view, newer, size), connection)
            lost = recovery.run()
            connection.execute("COMMIT")
        if not recovery.has_found:
            raise StoreUnavailable("There is nothing of crow in the file, so it was left as it is.")
        connection.execute("PRAGMA journal_mode = WAL")
    return lost


def index_words(connection: sqlite3.Connection) -> None:
    """Build the full-text index anew. FTS5's own `rebuild` cannot read from a view of this kind."""
    connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('delete-all')")
    connection.execute("INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE text <> ''")


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    types: tuple[type, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where an entry belongs."""

    conversation: int
    session: str
    parent: int | None
    turn: int


class _Recovery:
    """Brings the rows that are found on the pages of a damaged database into a new one."""

    def __init__(self, pages: Pages, new: sqlite3.Connection) -> None:
        self._pages = pages
        self._new = new
        self._tables = {name: _columns(new, name) for name in _TABLES}
        self._lost: list[str] = []
        self._sequences: dict[str, int] = {}
        self._cut: dict[int, tuple[Value, ...]] = {}
        self._doubtful: dict[int, dict[str, Any]] = {}
        self.has_found = False

    def run(self) -> tuple[str, ...]:
        """Do all of it; what could not be recovered."""
        for row in self._pages.table_rows():
            self._take(row)
        for row in self._pages.index_rows():
            self._take_endpoint(row)
        self._name_lost_rows()
        self._fill_gaps()
        self._restore_sessions()
        self._refer_to_blobs()
        self._tidy()
        return tuple(self._lost)

    def _take(self, row: PageRow) -> None:
        """Insert a row where it belongs, if it belongs anywhere."""
        match row.values:
            case (str() as table, int() as number) if table in self._tables and 0 < number < _LARGEST_ID:
                self._sequences[table] = number
        for name, columns in self._tables.items():
            if not _fits(row, columns):
                continue
            if not row.is_whole or len(row.values) < _LEAST_COLUMNS.get(name, len(columns)):
                if name == "entries" and row.rowid is not None and len(row.values) >= _PLACE_COLUMNS:
                    self._cut[row.rowid] = row.values
                continue
            values = {column.name: value for column, value in zip(columns, row.values, strict=False)}
            if columns[0].name != "hash":
                values[columns[0].name] = row.rowid
            if name == "entries" and row.rowid is not None and not _is_as_written(values):
                self._doubtful[row.rowid] = values
                return
            if name == "blobs" and not _is_blob(values):
                return  # left out, so that the same content, when it is stored again, is whole
            self._insert(name, values)
            return

    def _take_endpoint(self, row: PageRow) -> None:
        match row.values:
            case (str() as base_url, str() as model, str() as learned) if "://" in base_url and learned[:1] == "{":
                self._insert("endpoints", {"base_url": base_url, "model": model, "learned": learned})

    def _insert(self, table: str, values: Mapping[str, Any]) -> None:
        marks = ", ".join("?" * len(values))
        with suppress(sqlite3.IntegrityError):  # a row that breaks the rules of its table was damaged
            done = self._new.execute(
                f"INSERT OR IGNORE INTO {table} ({', '.join(values)}) VALUES ({marks})",
                tuple(values.values()),
            )
            self.has_found = self.has_found or (done.rowcount > 0 and table in ("entries", "sessions"))

    def _index(self, name: str, columns: int) -> Iterator[tuple[Value, ...]]:
        """The rows of an index, as far as it can be reached; the last of so many columns is the key of a row."""
        root = self._pages.roots.get(name)
        for row in self._pages.index(root) if root else ():
            if len(row.values) == columns and isinstance(row.values[-1], int):
                yield row.values

    def _name_lost_rows(self) -> None:
        """Name what is lost of small tables: rows that their index knows of."""
        for table, index, key, what in _SMALL_TABLES:
            for named, number in self._index(index, 2):
                if not self._new.execute(f"SELECT 1 FROM {table} WHERE {key} = ?", (number,)).fetchone():
                    self._lost.append(f"{what} {named!s}")

    def _fill_gaps(self) -> None:
        """Put words in the place of lost entries, so that paths stay whole; or the entry itself, where its content was
        kept apart."""
        writers = {entry: writer for writer, entry in self._index("entries_by_session", 2)}
        places: dict[int, tuple[int, int | None]] = {}
        for values in self._index("entries_by_conversation", 3):
            match values:
                case (int(conversation), int() | None as parent, int(entry_id)) if entry_id in writers:
                    places[entry_id] = (conversation, parent)
        for entry_id, values in self._cut.items():
            places.setdefault(entry_id, (_int(values[1]) or 0, _int(values[3])))
        for entry_id, row in self._doubtful.items():
            known, writer = places.get(entry_id), writers.get(entry_id)
            if known in (None, (row["conversation"], row["parent"])) and writer in (None, row["session"]):
                self._insert("entries", row)  # as it is: whoever reads it is told
        calls = {entry: (at, index) for at, index, entry in self._index("entries_results", 3)}
        there = {entry_id for (entry_id,) in self._new.execute("SELECT id FROM entries")}
        results = self._results({entry: call for entry, call in calls.items() if entry not in there})
        named = {
            entry_id: (conversation, None)
            for entry_id, conversation in self._new.execute(
                "SELECT parent, conversation FROM entries WHERE parent IS NOT NULL"
                " UNION SELECT leaf, conversation FROM sessions WHERE leaf IS NOT NULL"
            )
            if entry_id not in places
        }
        for entry_id in sorted((places.keys() | named.keys()) - there):
            if entry_id in places:
                conversation, parent = places[entry_id]
            else:
                conversation, parent = named[entry_id][0], self._newest_before(entry_id, named[entry_id][0])
            if parent is not None and parent >= entry_id:
                parent = None
            session, turn = self._company(entry_id, parent, writers.get(entry_id))
            place = _Place(conversation=conversation, session=session, parent=parent, turn=turn)
            if entry_id in results:
                name, text = results[entry_id]
                self._put(entry_id, place, kind="tool", text=text, blob=name)
                continue
            body = _words(entry_id, calls.get(entry_id))
            self._put(entry_id, place, kind=KINDS[type(body)], text=encode(body).text or "", blob=None)
            self._lost.append(f"entry {entry_id} of session {session or 'unknown'}")

    def _results(self, calls: Mapping[Value, tuple[Value, Value]]) -> dict[Value, tuple[str, str]]:
        """The results of lost entries that were kept as blobs: hash and JSON."""
        found: dict[Value, tuple[str, str]] = {}
        for name, entry_id in self._index("blob_refs", 2):
            if entry_id in calls and entry_id not in found:
                row = self._new.execute("SELECT data FROM blobs WHERE hash = ?", (name,)).fetchone()
                if row and _is_result(row[0], calls[entry_id]):
                    found[entry_id] = str(name), row[0].decode()
        return found

    def _newest_before(self, entry_id: int, conversation: int) -> int | None:
        row = self._new.execute(
            "SELECT max(id) FROM entries WHERE conversation = ? AND id < ?", (conversation, entry_id)
        ).fetchone()
        return _int(row[0])

    def _company(self, entry_id: int, parent: int | None, writer: Value) -> tuple[str, int]:
        """Session and turn of a lost entry: its own where it is known, else those of its neighbours."""
        values = self._cut.get(entry_id)
        if values is not None:
            return str(values[2]), _int(values[4]) or 0
        look_up = "SELECT session, turn, kind FROM entries WHERE"
        before = self._new.execute(f"{look_up} id = ?", (parent,)).fetchone()
        behind = self._new.execute(f"{look_up} parent = ? ORDER BY id LIMIT 1", (entry_id,)).fetchone()
        near = before if before and (before[2] != "turn_end" or not behind) else behind
        session, turn, _ = near or ("", 0, "")
        return writer if isinstance(writer, str) else session, turn

    def _put(self, entry_id: int, place: _Place, *, kind: str, text: str, blob: str | None) -> None:
        """Insert an entry whose body has this JSON; `blob` is the hash of it where it is kept apart."""
        row = self._new.execute("SELECT created_ms, model FROM entries WHERE id = ?", (place.parent,)).fetchone()
        created_ms, model = row or (0, "")
        call = json.loads(text).get("call") if kind == "tool" else None
        named = (call["assistant"], call["index"]) if isinstance(call, dict) else (None, None)
        columns = (
            place.conversation,
            place.session,
            place.parent,
            place.turn,
            kind,
            model,
            *named,
            *(None,) * 6,
            created_ms,
        )
        values = {
            "id": entry_id,
            "body": text if blob is None else None,
            "body_blob": blob,
            "checksum": checksum((text if blob is None else blob).encode(), columns),
        }
        self._insert("entries", values | dict(zip(_ENTRY_COLUMNS, columns, strict=True)))

    def _restore_sessions(self) -> None:
        """Make the rows of lost sessions again, from indexes and from what was said in them."""
        there = {number for (number,) in self._new.execute("SELECT number FROM sessions")}
        gone = {number for *_, number in self._index("sessions_deleted", 2)}
        conversations = {number: conversation for conversation, number in self._index("sessions_by_conversation", 2)}
        lost = {
            number: session
            for session, number in self._index("sqlite_autoindex_sessions_1", 2)
            if isinstance(number, int) and isinstance(session, str) and number in conversations.keys() - there - gone
        }
        parents = {number: parent for parent, number in self._index("sessions_by_parent", 2)}
        aliases = {number: alias for alias, number in self._index("sqlite_autoindex_sessions_2", 2)}
        listed = {number: (newest, archived) for archived, newest, _, number in self._index("sessions_listed", 4)}
        places = {number: cwd for cwd, _, _, _, number in self._index("sessions_listed_by_cwd", 5)}
        for number, session in lost.items():
            newest, archived = listed.get(number, (None, 0))
            self._make_session(
                number,
                session,
                conversation=_int(conversations.get(number)),
                newest=_int(newest),
                values={
                    "archived": archived or 0,
                    "parent_id": parents.get(number),
                    "alias": aliases.get(number),
                    "cwd": places.get(number),
                },
            )
        orphans = self._new.execute(
            "SELECT conversation, max(session) FROM entries WHERE session <> '' AND conversation NOT IN"
            " (SELECT conversation FROM sessions) GROUP BY conversation"
        ).fetchall()
        for conversation, session in orphans:
            self._make_session(None, session, conversation=conversation, newest=None, values={})

    def _make_session(
        self, number: int | None, session: str, *, conversation: int | None, newest: int | None, values: dict[str, Any]
    ) -> None:
        written = self._new.execute(
            "SELECT max(id), max(turn), count(*), max(conversation), min(created_ms), max(created_ms),"
            " total(input_tokens), total(output_tokens), total(cached_tokens), total(cost) FROM entries"
            " WHERE session = ? AND conversation = coalesce(?, conversation)",
            (session, conversation),
        ).fetchone()
        leaf, turn, entries, found, created_ms, updated_ms, *used = written
        conversation, leaf = conversation or found, newest or leaf
        if conversation is None:
            self._lost.append(f"session {session}")
            return
        prompt = self._body("max", "prompt", conversation, leaf)
        self._insert(
            "sessions",
            {
                "number": number,
                "id": session,
                "conversation": conversation,
                "leaf": leaf,
                "model": str(prompt.get("model") or ""),
                "mode": "ask",
                "title": _title(self._body("min", "user", conversation, leaf)),
                "entries": entries,
                "newest_entry": leaf or 0,
                "has_prompt": self._has_user(conversation),
                "turn": turn or 0,
                "created_ms": created_ms or 0,
                "updated_ms": updated_ms or 0,
                "tokens_in": int(used[0]),
                "tokens_out": int(used[1]),
                "tokens_cached": int(used[2]),
                "cost": used[3],
                **values,
                "cwd": values.get("cwd") or str(prompt.get("cwd") or "/"),
            },
        )
        self._lost.append(f"the row of session {session}, made again: its title, mode and permissions are new")

    def _has_user(self, conversation: int) -> bool:
        query = "SELECT 1 FROM entries WHERE conversation = ? AND kind = 'user'"
        return self._new.execute(query, (conversation,)).fetchone() is not None

    def _body(self, which: Literal["min", "max"], kind: str, conversation: int, leaf: int | None) -> Mapping[str, Any]:
        """The first or last body of a kind in the conversation, up to `leaf`; empty if there is none."""
        row = self._new.execute(
            "SELECT CAST(coalesce(e.body, b.data) AS TEXT) FROM entries e LEFT JOIN blobs b ON b.hash = e.body_blob"
            f" WHERE e.id = (SELECT {which}(id) FROM entries"
            " WHERE conversation = ? AND kind = ? AND id <= coalesce(?, id))",
            (conversation, kind, leaf),
        ).fetchone()
        try:
            value = json.loads(row[0]) if row and row[0] else {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _refer_to_blobs(self) -> None:
        rows = self._new.execute(
            "SELECT e.id, e.body_blob, coalesce(CAST(e.body AS BLOB), b.data) FROM entries e"
            " LEFT JOIN blobs b ON b.hash = e.body_blob"
        )
        for entry_id, spilled, body in rows:
            names = {name.decode() for name in _BLOB_NAME.findall(body or b"")} | {spilled} - {None}
            self._new.executemany(
                "INSERT OR IGNORE INTO blob_refs (blob, entry) SELECT hash, ? FROM blobs WHERE hash = ?",
                [(entry_id, name) for name in names],
            )

    def _tidy(self) -> None:
        """Make the whole consistent: nothing that refers to nothing, counters, the full-text index."""
        run = self._new.execute
        run("DELETE FROM blobs WHERE hash NOT IN (SELECT blob FROM blob_refs)")
        for table in ("inbox", "drafts", "moves"):
            run(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions)")
        run(
            "INSERT OR IGNORE INTO conversations (id, created_ms) SELECT conversation, min(created_ms) FROM"
            " (SELECT conversation, created_ms FROM entries UNION ALL SELECT conversation, created_ms FROM sessions)"
            " GROUP BY conversation"
        )
        for table, number in self._sequences.items():  # an id is never used twice
            if not run("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?", (number, table)).rowcount:
                run("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, number))
        index_words(self._new)


_TABLES = ("conversations", "sessions", "entries", "inbox", "drafts", "moves", "blobs", "imports")

_LEAST_COLUMNS = {"entries": 18}
"""Columns that a row of the first version has, where later ones have more."""

_PLACE_COLUMNS = 5
"""The first columns of an entry say where it belongs: id, conversation, session, parent, turn."""

_SMALL_TABLES = (
    ("inbox", "inbox_by_session", "seq", "a prompt that waited in session"),
    ("drafts", "drafts_by_session", "seq", "a piece of an answer that was being written in session"),
    ("moves", "moves_by_session", "id", "where a move stood in session"),
    ("imports", "imports_by_hash", "conversation", "where an import came from, with the sha256"),
)
"""Table, an index on it, its key, and how a lost row is named; the index begins with what that ends with."""

_ENTRY_COLUMNS = (
    "conversation",
    "session",
    "parent",
    "turn",
    "kind",
    "model",
    "call_entry",
    "call_index",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "cost",
    "estimate",
    "created_ms",
)

_TYPES: Mapping[str, tuple[type, ...]] = {"INTEGER": (int,), "TEXT": (str,), "REAL": (float, int), "BLOB": (bytes,)}


def _columns(connection: sqlite3.Connection, table: str) -> tuple[_Column, ...]:
    """The columns of a table, with the types that a record may have there."""
    return tuple(
        _Column(name, _TYPES[kind] if not_null and not key else (*_TYPES[kind], type(None)))
        for _, name, kind, not_null, _, key in connection.execute(f"PRAGMA table_info({table})")
    )


def _fits(row: PageRow, columns: Sequence[_Column]) -> bool:
    """Whether a row can be one of the table; of one that is cut, as far as it goes."""
    if row.rowid is None or row.rowid < 1 or not 1 < len(row.values) <= len(columns):
        return False
    is_aliased = columns[0].name != "hash"
    if is_aliased and row.values[0] is not None:
        return False
    return all(isinstance(value, column.types) for value, column in zip(row.values, columns, strict=False))


def _is_as_written(values: Mapping[str, Any]) -> bool:
    """Whether an entry is not known to be damaged."""
    body = values["body"] if values["body_blob"] is None else values["body_blob"]
    columns = [values[name] for name in _ENTRY_COLUMNS]
    columns[_ENTRY_COLUMNS.index("cost")] = None if values["cost"] is None else float(values["cost"])
    return values.get("checksum") in (None, checksum(str(body).encode(), columns))


def _is_blob(values: Mapping[str, Any]) -> bool:
    return bool(hashlib.sha256(values["data"]).hexdigest() == values["hash"])


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _is_result(data: bytes, call: tuple[Value, Value]) -> bool:
    """Whether a blob is the body of the result of this call."""
    try:
        value = json.loads(data)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(ToolResult)}:
        return False
    return bool(value["call"] == {"assistant": call[0], "index": call[1]})


def _words(entry_id: int, call: tuple[Value, Value] | None) -> Body:
    """What stands in the place of a lost entry."""
    words = f"Entry {entry_id} was lost when the database was damaged."
    match call:
        case (int(assistant), int(index)):
            return ToolResult(
                call=CallRef(assistant=assistant, index=index),
                name="",
                text=f"[{words}]",
                is_error=True,
                announcement=Announcement(title="(lost)"),
            )
    return Remark(text=words, message_id=f"lost-{entry_id}")


def _title(prompt: Mapping[str, Any]) -> str | None:
    """A title as the first line of a prompt gives it."""
    parts = prompt.get("parts")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    lines = [line.strip() for text in texts if isinstance(text, str) for line in text.splitlines() if line.strip()]
    return lines[0][:_TITLE_CHARS] if lines else None
