"""Copies the rows of a damaged database into a new one.

The rows are read directly from the pages, without the schema. The indexes show which rows are lost, and which
conversation or session each belonged to. Each lost row to which an index or another row refers is listed. Other lost
rows are only counted.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from types import NoneType
from typing import Any

from crow.domain.entries import ToolResult
from crow.store.codec import KINDS, Unreadable, encode, stand_in
from crow.store.sqlite.cells import Witnesses, entries_may_change, is_possible_time, mend_cells, mend_entries
from crow.store.sqlite.compression import content_of, decompressed, members_of
from crow.store.sqlite.pages import PageRow, Pages, Undecodable
from crow.store.sqlite.paths import CHECKED_COLUMNS, checksum

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_TITLE_CHARS = 80
_LARGEST_ID = 2**48
"""Ids above this number can only come from damage."""

_BLOB_NAME = re.compile(rb'\{"blob":"([0-9a-f]{64})"')

_TABLES = ("conversations", "sessions", "entries", "inbox", "drafts", "moves", "blobs", "imports")

_OLD_COLUMNS = {"entries": 18, "sessions": 35}
"""Maps tables to their numbers of columns in version 1. Rows that version 1 wrote do not have the columns that later
versions added."""

_PLACE_COLUMNS = 5
"""The number of columns at the beginning of an entry's row that say where the entry belongs: id, conversation, session,
parent, turn."""

_SUMS = ("turn", "entries", "created_ms", "updated_ms", "tokens_in", "tokens_out", "tokens_cached", "cost")
"""Columns of a session that can be computed from its entries."""

_SMALL_TABLES = (
    ("inbox", "inbox_by_session", "seq", "a queued prompt of session"),
    ("drafts", "drafts_by_session", "seq", "a piece of an unfinished answer of session"),
    ("moves", "moves_by_session", "id", "a move in the history of session"),
    ("imports", "imports_by_hash", "conversation", "the record of an import with the sha256"),
)
"""Each item is a table, an index on the table, the table's key, and the beginning of the message about a lost row. The
message ends with the value in the first column of the index."""

_TYPES: Mapping[str, tuple[type, ...]] = {"INTEGER": (int,), "TEXT": (str,), "REAL": (float, int), "BLOB": (bytes,)}


_MOST_UNFIT = 6
"""A row with the right number of columns still counts as a row of `entries` or `sessions` if at most this many values
have a wrong type."""


def index_words(connection: sqlite3.Connection) -> None:
    """Rebuild the full-text index from the view `searchable`. FTS5's own `rebuild` command cannot read from this
    view."""
    connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('delete-all')")
    connection.execute("INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE text <> ''")


class Recovery:
    """Copies rows from the pages of a damaged database into a new one."""

    def __init__(self, pages: Pages, new: sqlite3.Connection) -> None:
        self.changes: list[str] = []
        """After `run`: a line for each row whose values were changed."""
        self.lost: list[str] = []
        """After `run`: a line for each thing that is missing."""
        self._pages = pages
        self._new = new
        self._witnesses = Witnesses(pages)
        self._types = {table: _column_types(new, table) for table in _TABLES}
        self._damaged: dict[int, PageRow] = {}
        """Maps the ids of damaged entries to their rows."""

        self._indexed = self._witnesses.entries()
        self._misplaced: list[dict[str, Any]] = []
        """Entries that the indexes do not have under the ids of their rows. The rest of each row is intact, but its
        checksum does not cover the id."""

    def run(self) -> None:
        """Copy all rows."""
        for row in self._pages.rows():
            self._copy(row)
        self._insert_misplaced_entries()
        self._insert_damaged_entries()
        self.changes += mend_cells(self._new, self._witnesses)
        self._list_lost_rows()
        while self._replace_lost_entries():  # the parent of a lost entry may be lost, too
            pass
        self._restore_sessions()
        self._refer_to_blobs()
        self._make_consistent()
        self._count_lost_rows()

    def _copy(self, row: PageRow) -> None:
        """Insert a row into the table whose columns match the row. A row that is damaged or matches no table is not
        inserted. Damaged and misplaced entries are kept for later steps."""
        match row.values:
            case (str() as table, int() as number) if table in _TABLES and 0 < number < _LARGEST_ID:
                self._reserve_ids(table, number)
            case (str() as base_url, str() as model, str() as learned) if "://" in base_url and learned[:1] == "{":
                self._insert("endpoints", {"base_url": base_url, "model": model, "learned": learned})
        for table, types in self._types.items():
            unfit = _unfit(row, types)
            if unfit is None or len(unfit) > (_MOST_UNFIT if table in _OLD_COLUMNS else 0):
                continue
            least = _OLD_COLUMNS.get(table, len(types))
            values: dict[str, Any] = dict(zip(types, row.values, strict=False))
            if not row.is_whole or len(values) < least:
                is_intact = False
            elif table == "blobs":
                is_intact = _mend_blob(values)
            else:
                is_intact = table != "entries" or (not unfit and _has_valid_checksum(values))
            if is_intact:
                # Store a value of a wrong type as a blob. No column here may hold a blob, so `mend_cells` replaces it.
                values |= {name: str(values[name]).encode() for name in unfit}
                if row.values[0] is None:
                    values[next(iter(types))] = row.rowid
                if table == "entries" and not self._is_place_known(values):
                    self._misplaced.append(values)
                else:
                    self._insert(table, values)
                return
            has_place = len(values) >= (least if unfit else _PLACE_COLUMNS)
            if table == "entries" and row.rowid is not None and has_place:
                self._damaged[row.rowid] = row

    def _insert(self, table: str, values: Mapping[str, Any]) -> None:
        """Insert a row. Texts that are not valid UTF-8 are stored with their original bytes. A row that violates a
        constraint of its table is damaged, and is left out."""
        marks = ", ".join(
            f"CAST(:{name} AS TEXT)" if isinstance(value, Undecodable) else f":{name}" for name, value in values.items()
        )
        raw = {name: value.raw if isinstance(value, Undecodable) else value for name, value in values.items()}
        with suppress(sqlite3.IntegrityError):
            self._new.execute(f"INSERT OR IGNORE INTO {table} ({', '.join(values)}) VALUES ({marks})", raw)

    def _reserve_ids(self, table: str, number: int) -> None:
        """Make sure that new rows get ids above this number, because no id may be used twice."""
        query = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?"
        if not self._new.execute(query, (number, table)).rowcount:
            self._new.execute("INSERT INTO sqlite_sequence (seq, name) VALUES (?, ?)", (number, table))

    def _is_place_known(self, entry: Mapping[str, Any]) -> bool:
        """Return whether the indexes have an entry with this id, conversation, parent and session. If the indexes have
        no entries at all, return true."""
        known = self._indexed.get(entry["id"])
        if known is None:
            return not self._indexed
        return all(known.get(name, entry[name]) == entry[name] for name in ("conversation", "parent", "session"))

    def _insert_misplaced_entries(self) -> None:
        """Insert the entries in `_misplaced`. If the indexes have exactly one missing entry with the same conversation,
        parent and session, the entry gets the id of that one. Otherwise it keeps the id of its row."""
        existing = {entry for (entry,) in self._new.execute("SELECT id FROM entries")} | self._damaged.keys()
        for values in self._misplaced:
            place = {name: values[name] for name in ("conversation", "parent", "session")}
            fitting = [
                entry
                for entry, known in self._indexed.items()
                if entry not in existing and place.items() <= known.items()
            ]
            if len(fitting) == 1:
                self.changes.append(f"entry {fitting[0]}: its id was {values['id']} and is now {fitting[0]}")
                values["id"] = fitting[0]
            existing.add(values["id"])
            self._insert("entries", values)

    def _insert_damaged_entries(self) -> None:
        """Insert the damaged entries with the stored bytes of their bodies. Other columns with values of a wrong type
        get defaults, and then the values that the indexes have. Rows that were cut off are not inserted."""
        types = self._types["entries"]
        for entry, row in sorted(self._damaged.items()):
            unfit = _unfit(row, types)
            if unfit is None or not row.is_whole:
                continue
            values: dict[str, Any] = dict(zip(types, row.values, strict=False)) | dict.fromkeys(unfit)
            values |= {"id": entry, "checksum": values.get("checksum", -1)}
            values |= {name: 0 for name in ("conversation", "turn") if values[name] is None}
            values["created_ms"] = values["created_ms"] if is_possible_time(values["created_ms"]) else 0
            values |= {name: "" for name in ("session", "kind", "model") if values[name] is None}
            if values["body"] is None and values["body_blob"] is None:
                values["body"] = ""
            if isinstance(values["parent"], int) and not 0 < values["parent"] < entry:
                values["parent"] = None
            if values["checksum"] is None:
                values["checksum"] = -1
            self._insert("entries", values)
        with entries_may_change(self._new):
            self.changes += mend_entries(self._new, self._indexed)
        self._new.execute("DELETE FROM entries WHERE conversation = 0")  # nothing says where they belong

    def _list_lost_rows(self) -> None:
        """Record the lost rows of `_SMALL_TABLES`: those that an index names, but that are not in the table."""
        for table, index, key, words in _SMALL_TABLES:
            for value, number in self._witnesses.rows(index):
                if not self._new.execute(f"SELECT 1 FROM {table} WHERE {key} = ?", (number,)).fetchone():
                    self.lost.append(f"{words} {value}")

    def _replace_lost_entries(self) -> int:
        """Insert a message in place of each lost entry to which an index or another row refers, so that paths stay
        connected. Return the number of these entries."""
        calls = {entry: (assistant, index) for assistant, index, entry in self._witnesses.rows("entries_results")}
        writers: dict[int, Any] = {}
        places: dict[int, tuple[int, int | None]] = {}
        # A damaged index page may name entries that never existed. So an entry counts only if two indexes name it.
        for entry, values in self._indexed.items():
            conversation, parent = values.get("conversation"), values.get("parent")
            if "session" in values and isinstance(conversation, int) and isinstance(parent, int | None):
                places[entry], writers[entry] = (conversation, parent), values["session"]
        for entry, row in self._damaged.items():
            conversation, session, parent = row.values[1:4]
            if isinstance(conversation, int) and isinstance(parent, int | None):
                places.setdefault(entry, (conversation, parent))
                writers.setdefault(entry, session)
        existing = {entry for (entry,) in self._new.execute("SELECT id FROM entries")}
        named = self._new.execute(
            "SELECT parent, conversation FROM entries UNION SELECT leaf, conversation FROM sessions"
        ).fetchall()
        for entry, conversation in named:
            if entry is not None and entry not in existing and entry not in places:
                places[entry] = (conversation, self._entry_before(entry, conversation))
        missing = sorted(places.keys() - existing)
        for entry in missing:
            self._replace_entry(entry, *places[entry], session=writers.get(entry), call=calls.get(entry))
        return len(missing)

    def _entry_before(self, entry: int, conversation: int) -> int | None:
        """Return the id of the entry that probably came before the lost entry `entry`: the newest older entry of the
        conversation. If another entry already follows that one, return None, so that the lost entry begins a new
        branch."""
        row = self._new.execute(
            "SELECT e.id, EXISTS (SELECT 1 FROM entries n WHERE n.parent = e.id AND n.conversation = e.conversation)"
            " FROM entries e WHERE e.conversation = ? AND e.id < ? ORDER BY e.id DESC LIMIT 1",
            (conversation, entry),
        ).fetchone()
        return row[0] if row and not row[1] else None

    def _replace_entry(
        self, entry: int, conversation: int, parent: int | None, *, session: object, call: tuple[object, object] | None
    ) -> None:
        """Insert a message in place of one lost entry. Turn, model and time come from the entry's parent or child, and
        so does the session if `session` is not a string."""
        beside = self._new.execute(
            "SELECT session, turn, model, created_ms FROM entries WHERE id = ? OR parent = ? ORDER BY id DESC LIMIT 1",
            (parent, entry),
        ).fetchone() or ("", 0, "", 0)
        parent = parent if parent is None or 0 < parent < entry else None
        words = f"Entry {entry} was lost when the database was damaged."
        if parent is None:
            words += " If there was anything before it, that was lost, too: this branch starts here."
        elif parent < entry - 1 and session is None:
            words += f" Between entry {parent} and this one, more may have been lost."
        body = stand_in("tool", words, message_id=f"lost-{entry}", title="(lost)", call=call or ())
        columns: dict[str, Any] = dict.fromkeys(CHECKED_COLUMNS)
        columns.update(zip(("session", "turn", "model", "created_ms"), beside, strict=True))
        columns |= {"conversation": conversation, "parent": parent, "kind": KINDS[type(body)]}
        if isinstance(session, str) and not isinstance(session, Undecodable):
            columns["session"] = session
        if isinstance(body, ToolResult):
            columns["call_entry"], columns["call_index"] = body.call.assistant, body.call.index
        text = encode(body).text or ""
        sealed = checksum(text.encode(), tuple(columns.values()))
        self._insert("entries", {"id": entry, "body": text, "checksum": sealed, **columns})
        self.lost.append(f"entry {entry} of session {columns['session'] or 'unknown'}")

    def _restore_sessions(self) -> None:
        """Recreate lost session rows from indexes and entries."""
        existing = {number for (number,) in self._new.execute("SELECT number FROM sessions")}
        value = self._witnesses.value
        for session, number in self._witnesses.rows("sqlite_autoindex_sessions_1"):
            conversation = value(number, "conversation")
            if number in existing or number in self._witnesses.deleted or not isinstance(conversation, int):
                continue
            names = ("parent_id", "alias", "principal")
            values = {"number": number, "archived": value(number, "archived") or 0}
            values |= {name: value(number, name) for name in names}
            self._restore_session(session, conversation, value(number, "newest_entry"), value(number, "cwd"), values)
        # Other sessions are lost from the table and the indexes, and only their entries name them. Such a session is
        # needed only if no other session leads to these entries.
        orphans = self._new.execute(
            "SELECT session, conversation, max(id) AS newest FROM entries WHERE session <> ''"
            " AND session NOT IN (SELECT id FROM sessions) GROUP BY session, conversation ORDER BY newest DESC"
        ).fetchall()
        for session, conversation, newest in orphans:
            query = (
                "SELECT 1 WHERE EXISTS (SELECT 1 FROM sessions WHERE conversation = :conversation)"
                " AND (EXISTS (SELECT 1 FROM entries WHERE parent = :newest AND conversation = :conversation)"
                " OR EXISTS (SELECT 1 FROM sessions WHERE leaf = :newest)"
                " OR EXISTS (SELECT 1 FROM moves WHERE :newest IN (from_leaf, to_leaf)))"
            )
            if not self._new.execute(query, {"conversation": conversation, "newest": newest}).fetchone():
                self._restore_session(session, conversation, None, None, {})

    def _restore_session(
        self, session: str, conversation: int, leaf: int | None, cwd: str | None, values: Mapping[str, Any]
    ) -> None:
        query = self._new.execute
        newest, *sums = query(
            "SELECT max(id), coalesce(max(turn), 0), count(*), coalesce(min(created_ms), 0),"
            " coalesce(max(created_ms), 0), total(input_tokens), total(output_tokens), total(cached_tokens),"
            " total(cost) FROM entries WHERE session = ? AND conversation = ?",
            (session, conversation),
        ).fetchone()
        leaf = leaf or newest
        model, prompt_cwd = query(
            "SELECT json_extract(body, '$.model'), json_extract(body, '$.cwd') FROM entry_bodies"
            " WHERE conversation = ? AND kind = 'prompt' AND id <= ? ORDER BY id DESC LIMIT 1",
            (conversation, leaf),
        ).fetchone() or ("", None)
        prompt = query(
            "SELECT content FROM messages WHERE conversation = ? AND role = 'user' ORDER BY id LIMIT 1", (conversation,)
        ).fetchone()
        lines = [line.strip() for line in str(prompt[0] or "").splitlines() if line.strip()] if prompt else []
        self._insert(
            "sessions",
            {
                **values,
                **dict(zip(_SUMS, sums, strict=True)),
                "id": session,
                "conversation": conversation,
                "leaf": leaf,
                "cwd": cwd or str(prompt_cwd or "/"),
                "model": str(model or ""),
                "mode": "ask",
                "title": lines[0][:_TITLE_CHARS] if lines else None,
                "newest_entry": leaf or 0,
                "has_prompt": prompt is not None,
            },
        )
        self.lost.append(
            f'the row of session {session}; the session now has a new title, mode "ask" and no permissions'
        )

    def _refer_to_blobs(self) -> None:
        rows = self._new.execute(
            "SELECT e.id, e.kind, e.body_blob, coalesce(CAST(e.body AS BLOB), b.data), b.size FROM entries e"
            " LEFT JOIN blobs b ON b.hash = e.body_blob"
        )
        for entry, kind, spilled, data, size in rows:
            # Only intact blobs are in the new database.
            body = data if spilled is None or data is None else content_of(spilled, size, data)
            if body is not data and kind == "tool":
                self._insert("compressed_bodies", {"blob": spilled, "body": members_of(body)})
            names = {name.decode() for name in _BLOB_NAME.findall(body or b"")} | {spilled}
            self._new.executemany(
                "INSERT OR IGNORE INTO blob_refs (blob, entry) SELECT hash, ? FROM blobs WHERE hash = ?",
                [(entry, name) for name in names],
            )

    def _make_consistent(self) -> None:
        """Remove rows that belong to no session or entry, restore the names of prompts, add missing conversations, and
        rebuild the search index."""
        self._new.execute("DELETE FROM blobs WHERE hash NOT IN (SELECT blob FROM blob_refs)")
        for table, _, _, words in _SMALL_TABLES[:3]:
            query = f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions) RETURNING session"
            self.lost += [f"{words} {session}" for (session,) in self._new.execute(query).fetchall()]
        self._new.execute(  # the names of queued prompts are lost, so such a prompt can be sent again
            "INSERT OR IGNORE INTO prompts (session, name, digest, message_id, turn, entry)"
            " SELECT session, json_extract(body, '$.name.id'), json_extract(body, '$.name.digest'),"
            " json_extract(body, '$.message_id'), turn, id FROM entry_bodies WHERE kind IN ('user', 'command')"
            " AND json_type(body, '$.name.id') = 'text' ORDER BY id"
        )
        self._new.execute(
            "INSERT OR IGNORE INTO conversations (id, created_ms) SELECT conversation, min(created_ms) FROM"
            " (SELECT conversation, created_ms FROM entries UNION ALL SELECT conversation, created_ms FROM sessions)"
            " GROUP BY conversation"
        )
        # Shares and tokens are not read from damaged pages, because old pages may have some that were revoked.
        if self._new.execute("SELECT 1 FROM sessions WHERE principal IS NOT NULL").fetchone():
            self.lost.append("all shares, and all tokens for crow serve; share the sessions and add tokens again")
        index_words(self._new)

    def _count_lost_rows(self) -> None:
        """Record the numbers of lost rows to which nothing refers: entries that a session's row counts, and sessions on
        the pages that were cut off."""
        query = (
            "SELECT id, entries, entries - (SELECT count(*) FROM entries e WHERE e.session = s.id) AS missing"
            " FROM sessions s WHERE missing > 0 AND entries < ?"
        )
        for session, number, missing in self._new.execute(query, (_LARGEST_ID,)):
            self.lost.append(f"{missing} more of the {number} entries that session {session} wrote")
        if self._pages.cut_off:
            (sessions,) = self._new.execute(
                "SELECT max(seq) - (SELECT count(*) FROM sessions) FROM sqlite_sequence WHERE name = 'sessions'"
            ).fetchone()
            words = f"everything on the last {self._pages.cut_off} pages: the file was cut off"
            more = f"; up to {sessions} more sessions, unless they had been deleted before" if sessions else ""
            self.lost.append(words + more)


def _mend_blob(blob: dict[str, Any]) -> bool:
    """Set the size of a blob to the size of its content, and its name to the hash of its content. If the stored name
    differs from the hash in more than one character, the content is damaged: return false. A blob whose name no entry
    uses is removed later."""
    try:
        blob["size"] = len(content_of(blob["hash"], blob["size"], blob["data"]))
    except Unreadable:
        content = decompressed(blob["size"], blob["data"])
        name = hashlib.sha256(content).hexdigest()
        if sum(one != other for one, other in zip(name, blob["hash"], strict=False)) > 1:
            return False
        blob |= {"hash": name, "size": len(content)}
    return True


def _column_types(connection: sqlite3.Connection, table: str) -> dict[str, tuple[type, ...]]:
    """Return each column of a table with the types that its values may have."""
    types: dict[str, tuple[type, ...]] = {}
    for _, name, kind, not_null, _, is_key in connection.execute(f"PRAGMA table_info({table})"):
        if is_key and kind == "INTEGER":
            types[name] = (NoneType,)  # SQLite stores this column only as the rowid
        else:
            types[name] = _TYPES[kind] if not_null or is_key else (*_TYPES[kind], NoneType)
    return types


def _unfit(row: PageRow, types: Mapping[str, tuple[type, ...]]) -> list[str] | None:
    """Return the columns whose values in a row do not have a type that `types` allows. Return None if this cannot be a
    row of a table with these columns. Values at the end of the row may be missing."""
    if row.rowid is None or row.rowid < 1 or not 1 < len(row.values) <= len(types):
        return None
    if row.values[0] is not None and NoneType in next(iter(types.values())):
        return None
    pairs = zip(types.items(), row.values, strict=False)
    return [name for (name, allowed), value in pairs if not isinstance(value, allowed)]


def _has_valid_checksum(values: Mapping[str, Any]) -> bool:
    """Return whether the checksum of an entry is right. Entries from schema versions before 5 have no checksum and
    pass."""
    body = values["body"] if values["body_blob"] is None else values["body_blob"]
    columns = {name: values.get(name) for name in CHECKED_COLUMNS}
    if columns["cost"] is not None:  # SQLite stores 1.0 as 1
        columns["cost"] = float(columns["cost"])
    return values.get("checksum") in (None, checksum(str(body).encode(), tuple(columns.values())))
