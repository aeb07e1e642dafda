"""Checks a database and repairs a damaged one.

A repair works on copies. The damaged file is kept beside the file that replaces it. If rebuilding the indexes is not
enough, the readable rows are copied into a new database. The rows are read directly from the pages, without the schema.
The indexes show which rows are lost.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from crow.domain.entries import ToolResult
from crow.domain.errors import ArgumentError, StoreTooNew, StoreUnavailable
from crow.store.codec import KINDS, Unreadable, encode, stand_in
from crow.store.sqlite.compression import content_of, members_of
from crow.store.sqlite.connection import FAILURES, FileLock, LockTimeout, copy_files, fcntl, pragma, remove_files
from crow.store.sqlite.migrations import APPLICATION_ID, VERSION, is_schema_damaged, migrate
from crow.store.sqlite.pages import PageRow, Pages, Value
from crow.store.sqlite.paths import CHECKED_COLUMNS, checksum, unreadable_entries

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_MAX_PROBLEMS = 20
_CHUNK_BYTES = 1024 * 1024
_SHARED_LOCK = (0x40000002, 510)
"""The range of bytes that every SQLite connection locks in a database file: first byte, number of bytes."""

_FULL_TEXT = "the full-text index"

_INDEX_PROBLEM = re.compile(
    rf"row \d+ missing from index|wrong # of entries in index|non-unique entry in index|{_FULL_TEXT}"
)
"""Matches problems that can be solved by rebuilding the indexes."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """The result of `repair`.

    `outcome` is "whole" if the file was undamaged, "rebuilt" if its indexes were rebuilt, or "recovered" if its rows
    were copied into a new file. `copy` is the path at which the damaged file was kept, or None if the file was
    undamaged. `problems` are SQLite's
    messages, and `lost` lists the data that could not be recovered.
    """

    outcome: Literal["whole", "rebuilt", "recovered"]
    copy: Path | None
    problems: tuple[str, ...]
    lost: tuple[str, ...]
    sessions: int
    entries: int


def repair(path: Path) -> Repaired:
    """Check the database at `path`. If the database is damaged, keep it under another name, and put a repaired database
    at `path`.

    :raises ArgumentError: the file does not exist, or another process has it open.
    :raises StoreTooNew: a newer crow wrote the database.
    :raises StoreUnavailable: there is no room for copies, or the file contains no crow data.
    """
    stem = f"{path.stem}-damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (path.with_name(f"{stem}{number}{path.suffix}") for number in ("", *range(-2, -100, -1)))
    kept = next(name for name in names if not name.exists())
    work = path.with_name(f"{path.name}.repair-{os.getpid()}")
    try:
        with _exclusive(path) as file, FileLock(path, LockTimeout(0)).held():
            try:
                _copy(file, path, kept)
                return _repair(path, kept, work)
            except BaseException:
                remove_files(kept)  # the damaged file is still in place, so its copy is not needed
                raise
            finally:
                remove_files(work)
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be repaired: {error.strerror} ({error.filename}).") from error


def problems(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return descriptions of the damage to the database, or none if it is whole. The content of entries is not
    checked."""
    try:
        found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})")]
    except FAILURES as error:
        return (str(error) or type(error).__name__,)
    if found != ["ok"]:
        return tuple(line for words in found for line in words.splitlines() if not line.startswith("***"))
    if is_schema_damaged(connection):
        return ("the schema is not crow's",)
    query_only = pragma(connection, "query_only")
    connection.execute("PRAGMA query_only = OFF")  # the check makes a temporary table
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, entries_fts, row)")
        connection.execute("SELECT count(*) FROM temp.words").fetchone()
        connection.execute("DROP TABLE temp.words")
    except FAILURES as error:
        return (f"{_FULL_TEXT}: {error}",)
    finally:
        connection.execute(f"PRAGMA query_only = {query_only}")
    missing = connection.execute(
        "SELECT 'entry ' || parent FROM entries WHERE parent NOT IN (SELECT id FROM entries)"
        " UNION SELECT 'entry ' || leaf FROM sessions WHERE leaf NOT IN (SELECT id FROM entries)"
        " UNION SELECT 'conversation ' || conversation FROM sessions"
        " WHERE conversation NOT IN (SELECT id FROM conversations) LIMIT ?",
        (_MAX_PROBLEMS,),
    )
    return tuple(f"{what} is missing" for (what,) in missing)


def damaged_entries(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return the entries that cannot be read, each with the reason."""
    return tuple(
        f"entry {row.id} ({row.kind}) of session {row.session or 'unknown'}: {error}"
        for row, error in unreadable_entries(connection)
    )


def _repair(path: Path, kept: Path, work: Path) -> Repaired:
    """Copy `kept` to `work`, and repair the copy. If anything had to be repaired, move the copy to `path`."""
    outcome: Literal["whole", "rebuilt", "recovered"] = "whole"
    lost: tuple[str, ...] = ()
    copy_files(kept, work)
    found = _check(work)
    if found:
        outcome = "rebuilt"
        if not _rebuild_indexes(work, found):
            outcome = "recovered"
            source = work.with_name(f"{work.name}.source")
            remove_files(work)
            try:
                copy_files(kept, source)
                lost = _recover(source, work)
            finally:
                remove_files(source)
            if remaining := _check(work):
                raise StoreUnavailable(f"{path} could not be repaired ({remaining[0]}). The file was not changed.")
    with closing(sqlite3.connect(work, isolation_level=None)) as connection:
        (sessions,) = connection.execute("SELECT count(*) FROM sessions WHERE deleted_ms IS NULL").fetchone()
        (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        lost = (*lost, *damaged_entries(connection))
    if found:
        remove_files(path, suffixes=("-wal", "-shm", "-journal"))
        os.replace(work, path)
    else:
        remove_files(kept)
    return Repaired(
        outcome=outcome, copy=kept if found else None, problems=found, lost=lost, sessions=sessions, entries=entries
    )


def _check(path: Path) -> tuple[str, ...]:
    """Migrate this copy of the database, and return descriptions of the damage to it.

    :raises StoreTooNew: a newer crow wrote the database.
    """
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if pragma(connection, "application_id") != APPLICATION_ID:
                return ("the header does not belong to a crow database",)
            if (version := pragma(connection, "user_version")) > VERSION:
                raise StoreTooNew(f"The database was written by a newer crow (schema {version}). Upgrade crow.")
            migrate(connection)
            if found := problems(connection):
                return found
            try:
                connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('integrity-check')")
            except FAILURES as error:
                return (f"{_FULL_TEXT}: {error}",)
            return ()
    except FAILURES as error:
        return (str(error) or type(error).__name__,)


def _rebuild_indexes(path: Path, found: tuple[str, ...]) -> bool:
    """Rebuild the indexes if nothing else is damaged. Return whether the database is whole now."""
    if not all(map(_INDEX_PROBLEM.match, found)):
        return False
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if damaged_entries(connection):  # an index may differ from a row because the row is damaged
                return False
            connection.execute("REINDEX")
            _index_words(connection)
    except FAILURES:
        return False
    return not _check(path)


@contextmanager
def _exclusive(path: Path) -> Iterator[int]:
    """Open and lock the file, and yield its descriptor. Until the context ends, nothing else in this process may open
    the file, because the system drops the lock when the process closes any other handle to the file.

    :raises ArgumentError: the file does not exist, or another process has it open.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise ArgumentError(f"There is nothing to repair: {path} does not exist.") from None
    try:
        if fcntl is not None:
            first, length = _SHARED_LOCK
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, first)
            except (BlockingIOError, PermissionError):
                raise ArgumentError(
                    f"{path} is open in another process. Quit every editor that runs crow, then run this again."
                ) from None
        yield file
    finally:
        os.close(file)


def _copy(file: int, path: Path, target: Path) -> None:
    """Copy the database, together with its write-ahead log or journal. `file` is the database's open descriptor."""
    created = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(created, "wb") as copy, open(file, "rb", closefd=False) as source:
        shutil.copyfileobj(source, copy, _CHUNK_BYTES)
        copy.flush()
        os.fsync(created)
    copy_files(path, target, suffixes=("-wal", "-journal"))


def _recover(source: Path, target: Path) -> tuple[str, ...]:
    """Make a database at `target` from the rows of `source`, and return descriptions of the lost data.

    SQLite first moves the content of the write-ahead log into `source`.

    :raises StoreUnavailable: `source` contains no crow rows.
    """
    if not source.stat().st_size:
        raise StoreUnavailable("The database file is empty, so it was left as it is.")
    # When this connection is closed, SQLite copies the log into the file, even if SQLite cannot read the file.
    with suppress(*FAILURES), closing(sqlite3.connect(source)) as connection:
        connection.execute("SELECT * FROM sqlite_master").fetchall()
    lost = ["everything in the write-ahead log"] if Path(f"{source}-wal").exists() else []
    with source.open("rb") as file, closing(sqlite3.connect(target, isolation_level=None)) as connection:
        os.chmod(target, 0o600)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        migrate(connection)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            connection.execute("BEGIN")
            lost += _Recovery(Pages(view), connection).run()
            connection.execute("COMMIT")
        if not connection.execute("SELECT 1 FROM entries UNION SELECT 1 FROM sessions").fetchone():
            raise StoreUnavailable("The file contains no crow data, so it was left as it is.")
        connection.execute("PRAGMA journal_mode = WAL")
    return tuple(lost)


def _index_words(connection: sqlite3.Connection) -> None:
    """Rebuild the full-text index from the view `searchable`. FTS5's own `rebuild` command cannot read from this
    view."""
    connection.execute("INSERT INTO entries_fts (entries_fts) VALUES ('delete-all')")
    connection.execute("INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE text <> ''")


class _Recovery:
    """Copies rows from the pages of a damaged database into a new one."""

    def __init__(self, pages: Pages, new: sqlite3.Connection) -> None:
        self._pages = pages
        self._new = new
        self._types = {table: _column_types(new, table) for table in _TABLES}
        self._damaged: dict[int, tuple[Value, ...]] = {}
        """Maps the ids of damaged entries to their rows. Rows in which the conversation or the parent cannot be read
        are left out."""
        self._lost: list[str] = []

    def run(self) -> list[str]:
        """Copy all rows, and return descriptions of the lost data."""
        for row in self._pages.rows():
            self._copy(row)
        self._list_lost_rows()
        self._replace_lost_entries()
        self._restore_sessions()
        self._refer_to_blobs()
        self._make_consistent()
        return self._lost

    def _copy(self, row: PageRow) -> None:
        """Insert a row into the table whose columns match the row. A row that is damaged or matches no table is not
        inserted."""
        match row.values:
            case (str() as table, int() as number) if table in _TABLES and 0 < number < _LARGEST_ID:
                self._reserve_ids(table, number)
            case (str() as base_url, str() as model, str() as learned) if "://" in base_url and learned[:1] == "{":
                self._insert("endpoints", {"base_url": base_url, "model": model, "learned": learned})
        for table, types in self._types.items():
            if not _fits(row, types):
                continue
            least = _OLD_COLUMNS.get(table, len(types))
            values: dict[str, Any] = dict(zip(types, row.values, strict=False))
            if not row.is_whole or len(values) < least:
                is_intact = False
            elif table == "blobs":
                is_intact = _mend_size(values)
            else:
                is_intact = table != "entries" or _has_valid_checksum(values)
            if is_intact:
                if row.values[0] is None:
                    values[next(iter(types))] = row.rowid
                self._insert(table, values)
                return
            if table == "entries" and row.rowid is not None and len(values) >= _PLACE_COLUMNS:
                self._damaged[row.rowid] = row.values

    def _insert(self, table: str, values: Mapping[str, Any]) -> None:
        with suppress(sqlite3.IntegrityError):  # a row that violates a constraint of its table is damaged
            self._new.execute(
                f"INSERT OR IGNORE INTO {table} ({', '.join(values)}) VALUES (:{', :'.join(values)})", values
            )

    def _reserve_ids(self, table: str, number: int) -> None:
        """Make sure that new rows get ids above this number, because no id may be used twice."""
        query = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = ?"
        if not self._new.execute(query, (number, table)).rowcount:
            self._new.execute("INSERT INTO sqlite_sequence (seq, name) VALUES (?, ?)", (number, table))

    def _index(self, name: str, columns: int) -> Iterator[tuple[Any, ...]]:
        """Return the rows of an index. Rows on pages that cannot be reached are left out. The last column of an index
        row is the key of the row in the table."""
        root = self._pages.roots.get(name)
        for row in self._pages.tree(root) if root else ():
            if len(row.values) == columns and isinstance(row.values[-1], int):
                yield row.values

    def _list_lost_rows(self) -> None:
        """Record the lost rows of small tables. A row is lost if it is named in an index but is not in the table."""
        for table, index, key, words in _SMALL_TABLES:
            for value, number in self._index(index, 2):
                if not self._new.execute(f"SELECT 1 FROM {table} WHERE {key} = ?", (number,)).fetchone():
                    self._lost.append(f"{words} {value}")

    def _replace_lost_entries(self) -> None:
        """Insert a message in place of each lost entry, so that paths stay connected."""
        writers = {entry: session for session, entry in self._index("entries_by_session", 2)}
        calls = {entry: (assistant, index) for assistant, index, entry in self._index("entries_results", 3)}
        # A damaged index page may name entries that never existed. So an entry counts only if two indexes name it.
        places: dict[int, tuple[int, int | None]] = {
            entry: (conversation, parent)
            for conversation, parent, entry in self._index("entries_by_conversation", 3)
            if entry in writers and isinstance(conversation, int) and isinstance(parent, int | None)
        }
        for entry, (_, conversation, session, parent, *_) in self._damaged.items():
            assert isinstance(conversation, int)
            assert isinstance(parent, int | None)
            places.setdefault(entry, (conversation, parent))
            writers.setdefault(entry, session)
        named = self._new.execute(
            "WITH named (entry, conversation) AS ("
            " SELECT parent, conversation FROM entries UNION SELECT leaf, conversation FROM sessions)"
            " SELECT *, (SELECT max(id) FROM entries e WHERE e.conversation = named.conversation AND e.id < entry)"
            " FROM named WHERE entry IS NOT NULL"
        )
        for entry, conversation, before in named:
            places.setdefault(entry, (conversation, before))
        existing = {entry for (entry,) in self._new.execute("SELECT id FROM entries")}
        for entry in sorted(places.keys() - existing):
            self._replace_entry(entry, *places[entry], session=writers.get(entry), call=calls.get(entry))

    def _replace_entry(
        self, entry: int, conversation: int, parent: int | None, *, session: object, call: tuple[object, object] | None
    ) -> None:
        """Insert a message in place of one lost entry. Turn, model and time come from the entry's parent or child, and
        so does the session if `session` is not a string."""
        beside = self._new.execute(
            "SELECT session, turn, model, created_ms FROM entries WHERE id = ? OR parent = ? ORDER BY id DESC LIMIT 1",
            (parent, entry),
        ).fetchone() or ("", 0, "", 0)
        words = f"Entry {entry} was lost when the database was damaged."
        body = stand_in("tool", words, message_id=f"lost-{entry}", title="(lost)", call=call or ())
        columns: dict[str, Any] = dict.fromkeys(CHECKED_COLUMNS)
        columns.update(zip(("session", "turn", "model", "created_ms"), beside, strict=True))
        columns["conversation"] = conversation
        columns["parent"] = parent if parent is None or parent < entry else None
        columns["kind"] = KINDS[type(body)]
        if isinstance(session, str):
            columns["session"] = session
        if isinstance(body, ToolResult):
            columns["call_entry"], columns["call_index"] = body.call.assistant, body.call.index
        text = encode(body).text or ""
        sealed = checksum(text.encode(), tuple(columns.values()))
        self._insert("entries", {"id": entry, "body": text, "checksum": sealed, **columns})
        self._lost.append(f"entry {entry} of session {columns['session'] or 'unknown'}")

    def _restore_sessions(self) -> None:
        """Recreate lost session rows from indexes and entries."""
        existing = {number for (number,) in self._new.execute("SELECT number FROM sessions")}
        deleted = {number for _, number in self._index("sessions_deleted", 2)}
        conversations = {number: conversation for conversation, number in self._index("sessions_by_conversation", 2)}
        parents = {number: parent for parent, number in self._index("sessions_by_parent", 2)}
        aliases = {number: alias for alias, number in self._index("sqlite_autoindex_sessions_2", 2)}
        listed = {number: row for *row, _, number in self._index("sessions_listed_by_cwd", 5)}
        for session, number in self._index("sqlite_autoindex_sessions_1", 2):
            if number in conversations.keys() - existing - deleted:
                cwd, archived, leaf = listed.get(number, (None, 0, None))
                values = {"number": number, "parent_id": parents.get(number), "alias": aliases.get(number)}
                self._restore_session(session, conversations[number], leaf, cwd, {**values, "archived": archived})
        orphans = self._new.execute(
            "SELECT max(session), conversation FROM entries WHERE session <> '' AND conversation NOT IN"
            " (SELECT conversation FROM sessions) GROUP BY conversation"
        ).fetchall()
        for session, conversation in orphans:
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
        self._lost.append(
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
        """Remove rows that belong to no session or entry, add missing conversations, and rebuild the search index."""
        self._new.execute("DELETE FROM blobs WHERE hash NOT IN (SELECT blob FROM blob_refs)")
        for table in ("inbox", "drafts", "moves"):
            self._new.execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions)")
        self._new.execute(  # names of prompts that still waited are lost; such a prompt can be sent again
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
            self._lost.append("all shares, and all tokens for crow serve; share the sessions and add tokens again")
        _index_words(self._new)


def _mend_size(blob: dict[str, Any]) -> bool:
    """Set the size of a blob to the size of its content. Return false if the content is damaged."""
    try:
        blob["size"] = len(content_of(blob["hash"], blob["size"], blob["data"]))
    except Unreadable:
        return False
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


def _fits(row: PageRow, types: Mapping[str, tuple[type, ...]]) -> bool:
    """Whether the values of a row have the types of these columns. Values at the end of the row may be missing."""
    if row.rowid is None or row.rowid < 1 or not 1 < len(row.values) <= len(types):
        return False
    return all(isinstance(value, allowed) for value, allowed in zip(row.values, types.values(), strict=False))


def _has_valid_checksum(values: Mapping[str, Any]) -> bool:
    """Whether the checksum of an entry is right. Entries from schema versions before 5 have no checksum and pass."""
    body = values["body"] if values["body_blob"] is None else values["body_blob"]
    columns = {name: values.get(name) for name in CHECKED_COLUMNS}
    if columns["cost"] is not None:  # SQLite stores 1.0 as 1
        columns["cost"] = float(columns["cost"])
    return values.get("checksum") in (None, checksum(str(body).encode(), tuple(columns.values())))
