"""Checks the values in the rows of a database, and mends those that can only come from damage.

Entries and blobs have checksums. Other rows have none, but many of their values are stored more than once: indexes
repeat columns of the rows, and entries name the session that wrote them. If these copies differ, the most frequent
value wins. Ids are never made up. Each change is described for the user.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from crow.store.sqlite.failures import FAILURES
from crow.store.sqlite.pages import Pages, Undecodable, Value, text_of
from crow.store.sqlite.paths import CHECKED_COLUMNS, StoredRow, checksum, unreadable_entries

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_SHOWN_CHARS = 80
_LATEST_MS = 2**43
"""No time that crow stores is later than this (the year 2248, in Unix milliseconds)."""

_LARGEST_COUNT = 2**62
_SHORTEST_WORDS = 3
"""The search index cannot find a text with fewer characters than this."""

_JSON_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("additional_directories", "permissions", "parts"), list),
    **dict.fromkeys(("config", "metadata", "learned"), dict),
}
_FLAGS = frozenset({"title_by_user", "has_prompt", "archived"})
_WORDS: Mapping[str, frozenset[str]] = {
    "state": frozenset({"idle", "running"}),
    "access": frozenset({"read", "write"}),
}
_HASH = re.compile("[0-9a-f]{64}")

_SMALL_TABLES = ("conversations", "inbox", "drafts", "moves", "imports")
"""Tables besides `sessions` whose damaged values are mended. Each has an integer key."""

_GRANTS = {
    "endpoints": "what was learned about an endpoint",
    "openings": "the record of an opened session",
    "shares": "a share of a session; share it again",
    "tokens": "a token for crow serve; add it again",
}
"""Maps each table whose damaged rows are removed to a description of such a row, for the user."""

_DEFAULTS: Mapping[str, object] = {"cwd": "/", "mode": "ask", "calibration": 1.0, "reason": "undo"}

_SESSION_INDEXES: Mapping[str, tuple[str, ...]] = {
    "sqlite_autoindex_sessions_1": ("id",),
    "sessions_listed": ("archived", "newest_entry", "id"),
    "sessions_listed_by_cwd": ("cwd", "archived", "newest_entry", "id"),
    "sessions_of_principal": ("principal", "archived", "newest_entry", "id"),
    "sessions_by_parent": ("parent_id",),
    "sessions_by_conversation": ("conversation",),
    "sessions_by_alias": ("principal", "alias"),
    "sessions_deleted": ("conversation",),
}
"""Maps indexes of `sessions` to the columns that they repeat."""

_INDEXES: Mapping[str, int] = {
    **{name: len(columns) + 1 for name, columns in _SESSION_INDEXES.items()},
    "entries_by_conversation": 3,
    "entries_by_session": 2,
    "entries_results": 3,
    "inbox_by_session": 2,
    "drafts_by_session": 2,
    "moves_by_session": 2,
    "imports_by_hash": 2,
}
"""Maps each index to its number of columns, including the key of the row."""

_Column: TypeAlias = tuple[str, bool]
"""The type of a column, and whether it must have a value."""

_Votes: TypeAlias = dict[str, Counter[Value]]


class Witnesses:
    """The copies of row values that are in the indexes of a database file."""

    def __init__(self, pages: Pages) -> None:
        self._rows = {name: tuple(self._read(pages, name, columns)) for name, columns in _INDEXES.items()}
        self.sessions: dict[int, _Votes] = defaultdict(lambda: defaultdict(Counter))
        """Maps the number of each session to its columns, and each column to the values that indexes have for it. Each
        value comes with the number of indexes that have it."""
        self.deleted: set[int] = set()
        """The numbers of sessions that an index lists as deleted."""
        self.listed: set[int] = set()
        """The numbers of sessions that an index lists as not deleted."""
        for index, columns in _SESSION_INDEXES.items():
            for *values, number in self.rows(index):
                if index == "sessions_deleted":
                    self.deleted.add(number)
                if index == "sessions_listed":
                    self.listed.add(number)
                for column, value in zip(columns, values, strict=True):
                    if not isinstance(value, Undecodable):  # the index of aliases has "" for the local user
                        self.sessions[number][column][None if column == "principal" and not value else value] += 1

    def _read(self, pages: Pages, index: str, columns: int) -> Iterator[tuple[Any, ...]]:
        root = pages.roots.get(index)
        for row in pages.tree(root) if root else ():
            if len(row.values) == columns and isinstance(row.values[-1], int):
                yield row.values

    def rows(self, index: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows of an index. Rows on pages that cannot be reached are left out. The last column of an index
        row is the key of the row in the table."""
        return self._rows.get(index, ())

    def entries(self) -> Mapping[int, Mapping[str, Value]]:
        """Map the id of each entry to the values that the indexes have for its columns."""
        found: dict[int, dict[str, Value]] = defaultdict(dict)
        for conversation, parent, entry in self.rows("entries_by_conversation"):
            found[entry] |= {"conversation": conversation, "parent": parent}
        for session, entry in self.rows("entries_by_session"):
            found[entry]["session"] = session
        for call_entry, call_index, entry in self.rows("entries_results"):
            found[entry] |= {"call_entry": call_entry, "call_index": call_index}
        return found

    def value(self, number: int, column: str) -> Any:
        """Return the value that most indexes have for a session's column, or None if no index has one."""
        votes = self.sessions[number].get(column)
        return votes.most_common(1)[0][0] if votes else None


def damaged_cells(sql: sqlite3.Connection) -> tuple[str, ...]:
    """Return a line for each value in `sessions` and the tables of `_SMALL_TABLES` and `_GRANTS` that can only come
    from damage."""
    found = []
    for table in ("sessions", *_SMALL_TABLES, *_GRANTS):
        columns = _columns(sql, table)
        for number, (_, row) in enumerate(_rows(sql, table), start=1):
            found += [f"row {number} of {table}: {name} is {_shown(row[name])}" for name in _wrong(columns, row)]
    return tuple(found)


def mend_cells(sql: sqlite3.Connection, witnesses: Witnesses) -> list[str]:
    """Replace the damaged values in `sessions` and `_SMALL_TABLES`, and delete the damaged rows of the tables in
    `_GRANTS`. Return a line for each change."""
    changes = _mend_sessions(sql, witnesses)
    for table in _SMALL_TABLES:
        columns = _columns(sql, table)
        owners = {key: session for session, key in witnesses.rows(f"{table}_by_session")}
        for key, row in _rows(sql, table):
            values = {name: _default(columns[name], name, row[name]) for name in _wrong(columns, row)}
            if "session" in row and not _is_session(sql, row["session"]) and _is_session(sql, owners.get(key)):
                values["session"] = owners[key]
            changes += _change(sql, table, key, row, values, f"row {key} of {table}")
    for table, words in _GRANTS.items():
        columns = _columns(sql, table)
        for _, row in _rows(sql, table):
            if _wrong(columns, row):
                names = [name for name in row if not isinstance(row[name], Undecodable)]
                sql.execute(
                    f"DELETE FROM {table} WHERE {' AND '.join(f'{name} IS ?' for name in names)}",
                    [row[name] for name in names],
                )
                changes.append(f"a damaged row was removed: {words}")
    return changes


def doubtful_titles(sql: sqlite3.Connection) -> list[str]:
    """Return a line for each session whose title differs from the one in the search index."""
    doubtful = []
    for number, row in _rows(sql, "sessions"):
        title = row["title"]
        if isinstance(title, str) and len(title) >= _SHORTEST_WORDS and not {"\0", "\ufffd"} & {*title}:
            phrase = '"' + title.replace('"', '""') + '"'
            query = "SELECT 1 FROM entries_fts WHERE entries_fts MATCH ? AND rowid = ?"
            with suppress(*FAILURES):
                if not sql.execute(query, (phrase, -number)).fetchone():
                    doubtful.append(
                        f"session {row['id']}: its title {_shown(title)} may be damaged: the search index has other"
                        " words for it. It was not changed"
                    )
    return doubtful


def mend_entries(sql: sqlite3.Connection, indexed: Mapping[int, Mapping[str, Value]]) -> list[str]:
    """Replace columns of damaged entries by the values that the indexes have for them. `indexed` is the result of
    `Witnesses.entries`. The bodies of the entries are not changed. Return a line for each change."""
    changes = list[str]()
    for row in [row for row, _ in unreadable_entries(sql)]:
        values = _restored_columns(row, indexed.get(row.id, {}))
        changes += [
            f"entry {row.id}: its {name} was {_shown(getattr(row, name))} and is now {_shown(value)}"
            for name, value in values.items()
        ]
        if values:
            sql.execute(
                f"UPDATE entries SET {', '.join(f'{name} = ?' for name in values)} WHERE id = ?",
                (*values.values(), row.id),
            )
    return changes


def _restored_columns(row: StoredRow, indexed: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values from `indexed` (those that the indexes have for a damaged entry) that differ from the row. If
    the checksum is right without them, return none. If it becomes right with a single one of them, return only that
    one. Otherwise return all of them."""
    differing = {name: value for name, value in indexed.items() if getattr(row, name) != value}
    subsets = [{}, *({name: value} for name, value in differing.items()), differing]
    for values in subsets if row.checksum is not None else ():
        columns = tuple(values.get(name, getattr(row, name)) for name in CHECKED_COLUMNS)
        sealed = bytes(row.body or b"") if row.body_blob is None else str(row.body_blob).encode()
        if checksum(sealed, columns) == row.checksum:
            return dict(values)
    return differing


@contextmanager
def entries_may_change(sql: sqlite3.Connection) -> Iterator[None]:
    """Drop the trigger that forbids changes of entries, until the context ends."""
    query = "SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name = 'entries_never_change'"
    (trigger,) = sql.execute(query).fetchone()
    sql.execute("DROP TRIGGER entries_never_change")
    try:
        yield
    finally:
        sql.execute(trigger)


def _mend_sessions(sql: sqlite3.Connection, witnesses: Witnesses) -> list[str]:
    changes, columns = list[str](), _columns(sql, "sessions")
    for number, row in _rows(sql, "sessions"):
        wrong = _wrong(columns, row)
        values: dict[str, Any] = {}
        votes = witnesses.sessions.get(number, {})
        for name in row:
            own = None if name in wrong else row[name]
            if len({*votes.get(name, ()), *(() if name in wrong else (own,))}) > 1 or (name in wrong and name in votes):
                values[name] = _elected(sql, name, row, votes[name], is_wrong=name in wrong)
            elif name in wrong:
                values[name] = _computed(sql, columns[name], name, row)
        if row["deleted_ms"] is not None and number in witnesses.listed and number not in witnesses.deleted:
            values["deleted_ms"] = None
        values = {name: value for name, value in values.items() if name in wrong or value != row[name]}
        session = values.get("id", row["id"])
        changes += _change(sql, "sessions", number, row, values, f"session {session}")
    return changes


def _elected(
    sql: sqlite3.Connection, name: str, row: Mapping[str, Any], votes: Counter[Value], *, is_wrong: bool
) -> Any:
    """Return the most frequent value of a session's column. `votes` has the values from the indexes. The row's own
    value counts as one more vote, unless it `is_wrong`. In a tie, the value with which most other rows agree wins. If
    that is a tie as well, the row's own value wins."""
    own = row[name]
    counts = Counter(votes)
    if not is_wrong:
        counts[own] += 1
    most = max(counts.values())
    best = [value for value, count in counts.items() if count == most]
    if len(best) > 1:
        more = {value: _witnesses_beside(sql, name, row, value) for value in best}
        best = [value for value in best if more[value] == max(more.values())]
    return own if own in best and not is_wrong else best[0]


def _witnesses_beside(sql: sqlite3.Connection, name: str, row: Mapping[str, Any], value: Value) -> int:
    """Return how many other rows agree with `value` as the value of a session's column `name`."""
    match name:
        case "id":
            query = (
                "SELECT (SELECT count(*) FROM entries NOT INDEXED"
                " WHERE session = :value AND conversation = :conversation)"
                " + (SELECT count(*) FROM moves NOT INDEXED WHERE session = :value)"
                " + (SELECT count(*) FROM sessions NOT INDEXED WHERE parent_id = :value OR forked_from = :value)"
            )
        case "conversation":
            query = "SELECT count(*) FROM entries NOT INDEXED WHERE session = :id AND conversation = :value"
        case "cwd":
            query = (
                "SELECT count(*) FROM entry_bodies WHERE session = :id AND kind = 'prompt'"
                " AND json_extract(body, '$.cwd') = :value"
            )
        case "parent_id":
            query = "SELECT count(*) FROM sessions NOT INDEXED WHERE +id = :value"
        case "newest_entry":
            query = "SELECT count(*) FROM entries WHERE id = :value AND session = :id"
        case _:
            return 0
    values = {"value": value, "id": row["id"], "conversation": row["conversation"]}
    return int(sql.execute(query, values).fetchone()[0])


def is_possible_time(value: object) -> bool:
    """Return whether this can be a Unix time in milliseconds."""
    return isinstance(value, int) and 0 <= value < _LATEST_MS


_OF_ENTRIES: Mapping[str, str] = {
    "conversation": "SELECT max(conversation) FROM entries NOT INDEXED WHERE session = :id",
    "leaf": "SELECT max(id) FROM entries WHERE session = :id AND conversation = :conversation",
    "newest_entry": "SELECT coalesce(max(id), 0) FROM entries WHERE session = :id",
    "entries": "SELECT count(*) FROM entries WHERE session = :id",
    "turn": "SELECT coalesce(max(turn), 0) FROM entries WHERE session = :id",
    "model": "SELECT coalesce((SELECT model FROM entries WHERE session = :id AND model <> '' ORDER BY id DESC), '')",
    "has_prompt": "SELECT EXISTS (SELECT 1 FROM entries WHERE session = :id AND kind = 'user')",
    "created_ms": "SELECT coalesce(min(created_ms), 0) FROM entries WHERE session = :id",
    "updated_ms": "SELECT coalesce(max(created_ms), 0) FROM entries WHERE session = :id",
    "cost": "SELECT total(cost) FROM entries WHERE session = :id AND kind <> 'tool'",
    "cwd": (
        "SELECT json_extract(body, '$.cwd') FROM entry_bodies WHERE session = :id AND kind = 'prompt'"
        " ORDER BY id DESC LIMIT 1"
    ),
    **{
        f"tokens_{name}": f"SELECT coalesce(sum({column}), 0) FROM entries WHERE session = :id AND kind <> 'tool'"
        for name, column in (("in", "input_tokens"), ("out", "output_tokens"), ("cached", "cached_tokens"))
    },
}
"""Maps columns of a session to queries that compute their values from the session's entries."""


def _computed(sql: sqlite3.Connection, column: _Column, name: str, row: Mapping[str, Any]) -> Any:
    """Return a new value for a damaged column of a session for which no index has a value. It is computed from the
    session's entries if that is possible."""
    if name in _OF_ENTRIES:
        found = sql.execute(_OF_ENTRIES[name], {"id": row["id"], "conversation": row["conversation"]}).fetchone()
        if found is not None and found[0] is not None and _is_possible(name, found[0], *column):
            return found[0]
    return _default(column, name, row[name])


def _default(column: _Column, name: str, value: object) -> Any:
    """Return the value to store in place of a damaged one: the text with its invalid bytes replaced, or a default for
    the column."""
    kind, is_needed = column
    if isinstance(value, Undecodable) and name not in _JSON_TYPES:
        return str(value)
    if name in _JSON_TYPES:
        return "[]" if _JSON_TYPES[name] is list else "{}"
    if name in _WORDS:
        return min(_WORDS[name])
    if not is_needed:
        return None
    return _DEFAULTS.get(name, "" if kind == "TEXT" else 0)


def _change(
    sql: sqlite3.Connection, table: str, key: int, row: Mapping[str, Any], values: Mapping[str, Any], what: str
) -> list[str]:
    """Store values in a row. Return a line for each of them."""
    keys = {"sessions": "number", "conversations": "id", "moves": "id", "imports": "conversation"}
    changes = []
    for name, value in values.items():
        try:
            sql.execute(f"UPDATE {table} SET {name} = ? WHERE {keys.get(table, 'seq')} = ?", (value, key))
        except sqlite3.IntegrityError:
            changes.append(f"{what}: its {name} {_shown(row[name])} may be damaged. It was not changed")
        else:
            changes.append(f"{what}: its {name} was {_shown(row[name])} and is now {_shown(value)}")
    return changes


def _wrong(columns: Mapping[str, _Column], row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row whose values can only come from damage."""
    return [name for name, value in row.items() if not _is_possible(name, value, *columns[name])]


def _is_possible(name: str, value: object, kind: str, is_needed: bool) -> bool:
    if value is None:
        return not is_needed
    if isinstance(value, Undecodable):
        return False
    match kind:
        case "TEXT" if not isinstance(value, str):
            return False
        case "INTEGER" if not isinstance(value, int):
            return False
        case "REAL":
            return isinstance(value, float | int) and math.isfinite(value) and (name != "calibration" or value > 0)
    if isinstance(value, int):
        if name in _FLAGS:
            return value in (0, 1)
        if name.endswith("_ms"):
            return (0 if name != "deleted_ms" else 1) <= value < _LATEST_MS
        return (1 if name in ("conversation", "leaf", "from_leaf", "to_leaf") else 0) <= value < _LARGEST_COUNT
    if isinstance(value, str):
        if name in _JSON_TYPES:
            with suppress(ValueError, RecursionError):
                return isinstance(json.loads(value), _JSON_TYPES[name])
            return False
        if name == "hash":
            return _HASH.fullmatch(value) is not None
        return value in _WORDS.get(name, (value,)) and (value != "" or name not in ("id", "session"))
    return True


def _columns(sql: sqlite3.Connection, table: str) -> Mapping[str, _Column]:
    """Return the type of each column of a table, and whether it must have a value."""
    return {
        name: (kind, bool(not_null or is_key))
        for _, name, kind, not_null, _, is_key in sql.execute(f"PRAGMA table_info({table})")
    }


def _rows(sql: sqlite3.Connection, table: str) -> list[tuple[int, dict[str, Any]]]:
    """Return, for each row of a table, the integer key and the values of the other columns. In a table without an
    integer key, all columns are among the values, and the key is 0."""
    info = list(sql.execute(f"PRAGMA table_info({table})"))
    integer_keys = [name for _, name, kind, _, _, is_key in info if is_key and kind == "INTEGER"]
    key = integer_keys[0] if integer_keys else "0"
    names = [name for _, name, *_ in info if name != key]
    factory, sql.text_factory = sql.text_factory, text_of
    try:
        found = sql.execute(f"SELECT {key}, {', '.join(names)} FROM {table} NOT INDEXED").fetchall()
    finally:
        sql.text_factory = factory
    return [(number, dict(zip(names, values, strict=True))) for number, *values in found]


def _is_session(sql: sqlite3.Connection, session: object) -> bool:
    return (
        isinstance(session, str)
        and sql.execute("SELECT 1 FROM sessions WHERE id = ?", (session,)).fetchone() is not None
    )


def _shown(value: object) -> str:
    """Return a value as it is shown in a line: quoted, without control characters, and shortened."""
    value = value.raw if isinstance(value, Undecodable) else value
    shown = ascii(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in shown)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 3]}..."
