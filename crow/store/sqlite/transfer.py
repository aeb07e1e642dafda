"""Copies sessions from the database into an export file, and from such a file into the database."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import NoReturn

from crow.domain.entries import Entry, NewEntry, PromptName
from crow.domain.errors import NoSuchSession
from crow.store import portable
from crow.store.admin import FORMER_OWNER, ConversationState, ImportDefaults, SessionExtras
from crow.store.owner import is_alive, readable
from crow.store.portable import Block, ExportFile, MoveRecord, SessionRecord
from crow.store.rows import SESSION_COLUMNS, possible_count, possible_time, session_of
from crow.store.sqlite.append import SessionState
from crow.store.sqlite.connection import insert
from crow.store.sqlite.database import now_ms
from crow.store.sqlite.paths import entries_of, has_user, missing_entry
from crow.store.sqlite.prompts import add_name
from crow.store.sqlite.sessions import set_title
from crow.store.transfer import (
    EXTRA_COLUMNS,
    WRITTEN_LATER,
    ConversationImport,
    ExportedSessionDeleted,
    ExportSelection,
    ImportRemoved,
    Piece,
    SessionTaken,
    by_conversation,
    number_of,
)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_COPIED = ("id", "cwd", "title", "title_by_user", "archived", "created_ms", "updated_ms")
"""Fields of a session that have the same value in its row and in its record."""

_NEEDED = """
    WITH RECURSIVE
    chosen (id) AS (SELECT value FROM json_each(:ids)),
    needed (id) AS (
        SELECT leaf FROM sessions WHERE id IN (SELECT id FROM chosen)
        UNION SELECT e.id FROM chosen JOIN entries e ON e.session = chosen.id
        UNION SELECT m.from_leaf FROM chosen JOIN moves m ON m.session = chosen.id
        UNION SELECT m.to_leaf FROM chosen JOIN moves m ON m.session = chosen.id
        UNION SELECT e.parent FROM needed JOIN entries e ON e.id = needed.id
    )
    SELECT id, parent FROM entries
    WHERE +conversation = :conversation AND id IN (SELECT id FROM needed WHERE id IS NOT NULL)
    ORDER BY id
"""
# The `+` keeps SQLite from using the index by conversation. With a damaged index, entries could be missing without an
# error.


def family(connection: sqlite3.Connection, ids: Sequence[str] | None) -> dict[int, tuple[str, ...]]:
    """Return the chosen sessions and their subagents, grouped by conversation. If `ids` is None, all sessions
    that `crow sessions` lists are chosen."""
    start = "SELECT value FROM json_each(:ids)"
    if ids is None:
        start = "SELECT id FROM sessions WHERE has_prompt = 1 AND parent_id IS NULL"
    rows = connection.execute(
        f"WITH RECURSIVE family (id) AS ({start}"
        " UNION SELECT s.id FROM family JOIN sessions s ON s.parent_id = family.id)"
        " SELECT conversation, id FROM sessions WHERE id IN (SELECT id FROM family) AND deleted_ms IS NULL"
        " ORDER BY conversation, number",
        {"ids": json.dumps(ids)},
    )
    return by_conversation(rows)


def choose(
    connection: sqlite3.Connection, conversation: int, sessions: Sequence[str], known: frozenset[str]
) -> ExportSelection:
    """Return the export selection for the `sessions` of a conversation. `known` are the ids of all sessions in the
    export file."""
    chosen = {"conversation": conversation, "ids": json.dumps(sessions)}
    ids, missing = _entry_ids(connection, chosen)
    query = "SELECT created_ms FROM conversations WHERE id = ?"
    (created_ms,) = connection.execute(query, (conversation,)).fetchone() or (0,)
    records, moves = [], []
    query = (
        f"SELECT {SESSION_COLUMNS}, turn FROM sessions WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY number"
    )
    for *columns, turn in connection.execute(query, chosen):
        row = session_of(columns)
        record = SessionRecord(
            **{name: getattr(row, name) for name in _COPIED},
            parent_id=row.parent_id if row.parent_id in known else None,
            forked_from=row.forked_from if row.forked_from in known else None,
            leaf=_maybe_number(ids, row.leaf),
            turn=possible_count(turn),
            listed=row.has_prompt,
        )
        records.append(record)
    query = (
        "SELECT session, from_leaf, to_leaf, CAST(reason AS TEXT), created_ms FROM moves"
        " WHERE session IN (SELECT value FROM json_each(:ids)) ORDER BY id"
    )
    for session, from_leaf, to_leaf, reason, move_ms in connection.execute(query, chosen):
        move = MoveRecord(
            session=session,
            from_leaf=_maybe_number(ids, from_leaf),
            to_leaf=_maybe_number(ids, to_leaf),
            reason=reason,
            created_ms=possible_time(move_ms),
        )
        moves.append(move)
    return ExportSelection(
        conversation=conversation,
        head=(portable.ConversationRecord(created_ms=created_ms), *records),
        moves=tuple(moves),
        ids=ids,
        missing=missing,
        sessions=frozenset(sessions),
    )


def next_entries(
    connection: sqlite3.Connection, chosen: ExportSelection, start: int, most: int
) -> tuple[list[Entry], int]:
    """Return the entries for at most `most` ids, beginning with `chosen.ids[start]`. Also return the number of ids that
    were read.

    A remark replaces each missing entry.

    :raises ExportedSessionDeleted: a session was deleted meanwhile.
    """
    ids = chosen.ids[start : start + most]
    found, taken = entries_of(connection, ids)
    absent = set(ids[:taken]).difference(entry.id for entry in found)
    if not absent <= chosen.missing:  # deleted meanwhile, or on a damaged page to which only an index refers
        (living,) = connection.execute(
            "SELECT count(*) FROM sessions WHERE id IN (SELECT value FROM json_each(?)) AND deleted_ms IS NULL",
            (json.dumps(sorted(chosen.sessions)),),
        ).fetchone()
        if living < len(chosen.sessions):
            raise ExportedSessionDeleted(chosen.sessions)
    entries = [*found, *(missing_entry(entry_id, chosen.conversation) for entry_id in absent)]
    return sorted(entries, key=lambda entry: entry.id), taken


def _entry_ids(connection: sqlite3.Connection, chosen: dict[str, object]) -> tuple[array[int], frozenset[int]]:
    """Return the ids of the exported entries in ascending order. Also return the set of missing ids among them. An id
    is missing if other rows refer to it, but the database has no entry with this id."""
    rows = connection.execute("SELECT leaf FROM sessions WHERE id IN (SELECT value FROM json_each(:ids))", chosen)
    named = {leaf for (leaf,) in rows}
    found = array("q")
    for entry_id, parent in connection.execute(_NEEDED, chosen):
        found.append(entry_id)
        if isinstance(parent, int) and not number_of(found, parent):
            named.add(parent)
    missing = frozenset(one for one in named if isinstance(one, int) and one > 0 and not number_of(found, one))
    return array("q", sorted([*found, *missing])) if missing else found, missing


def _maybe_number(ids: array[int], entry: object) -> int | None:
    """Return the number of an entry in the file, or None if the entry is not exported or the value is not an id."""
    return number_of(ids, entry) or None if isinstance(entry, int) else None


class Importer(ConversationImport):
    """Imports one conversation of a file. Call `begin`, pass each `next_piece` to `add`, then call `show`.

    Each call is a small transaction, so that other processes can write in between. Until `show` is called, the sessions
    are hidden like deleted ones, and this store owns them as if it were running a turn in each. If the process dies,
    `tidy` removes the hidden sessions.
    """

    def __init__(self, file: ExportFile, block: Block, defaults: ImportDefaults) -> None:
        super().__init__(file, block, defaults)
        self._base = 0
        """Entry number n of the conversation gets the id `_base` + n. `begin` reserves these ids."""
        self._conversation = 0
        self._rows: Sequence[SessionRecord] = ()
        self._states: dict[str | None, SessionState] = {}

    def begin(self, connection: sqlite3.Connection, here: str, *, now_ms: int) -> bool:
        """Insert the conversation and its hidden sessions. If the conversation was imported before or one of its
        sessions exists, return false and write nothing.

        :raises SessionTaken: another process is importing or removing one of the sessions now.
        """
        if _exists(connection, self.block):
            self.is_same = _was_imported(connection, self.block)
            return False
        self._base = _reserve_ids(connection, self.block.entries)
        conversation, self._rows = self.read_head()
        self._conversation = insert(connection, "conversations", {"created_ms": conversation.created_ms})
        connection.execute(
            "INSERT OR REPLACE INTO imports (conversation, hash, created_ms) VALUES (?, ?, ?)",
            (self._conversation, self.block.hash, now_ms),
        )
        for record in self._rows:
            self._add_session(connection, record)
        # This state takes the entries whose session is not in the file. They are not included in the counters of any
        # session.
        self._states[None] = SessionState(connection, self._rows[0].id, now_ms=0)
        self._states[None].session_id = ""
        connection.execute(
            "UPDATE sessions SET deleted_ms = ?, state = 'running', owner = ?, lease_ms = ? WHERE conversation = ?",
            (now_ms, here, now_ms, self._conversation),
        )
        return True

    def add(self, connection: sqlite3.Connection, here: str, piece: Piece, *, now_ms: int) -> None:
        """Write a piece.

        :raises ImportRemoved: other processes counted this process as dead and removed the data that it had written.
        """
        found = connection.execute(
            "UPDATE sessions SET lease_ms = ? WHERE conversation = ? AND owner = ?", (now_ms, self._conversation, here)
        )
        if not found.rowcount:
            raise ImportRemoved
        for one in piece:
            if isinstance(one, MoveRecord):
                leaves = {"from_leaf": self.entry_id(one.from_leaf), "to_leaf": self.entry_id(one.to_leaf)}
                insert(connection, "moves", {**asdict(one), **leaves})
                continue
            record, stored = one
            state = self._states[record.session]
            state.leaf, state.now_ms = self.entry_id(record.parent), record.created_ms
            new = NewEntry(
                body=stored.body, model=record.model, usage=record.usage, cost=record.cost, estimate=record.estimate
            )
            state.add(new, turn=record.turn, encoded=stored, entry_id=self._base + record.id)

    def show(self, connection: sqlite3.Connection) -> None:
        """Make the sessions visible, after the whole file was imported."""
        for record in self._rows:
            self._states[record.id].save()
            leaf = self.entry_id(record.leaf)
            listed = record.listed
            # Another program may have written the file, with a wrong `listed`. So also look for a prompt.
            if record.id not in self.defaults.extras:
                listed = listed or (leaf is not None and has_user(connection, leaf))
            connection.execute(
                "UPDATE sessions SET leaf = ?, newest_entry = max(newest_entry, ?), has_prompt = ?, updated_ms = ?,"
                " deleted_ms = NULL WHERE id = ?",
                (leaf, leaf or 0, listed, record.updated_ms, record.id),
            )
            if record.id in self.defaults.extras:
                _set_extras(connection, record.id, leaf, self.defaults.extras[record.id])

    def _add_session(self, connection: sqlite3.Connection, record: SessionRecord) -> None:
        values = {
            **{field.name: getattr(record, field.name) for field in fields(record) if field.name not in WRITTEN_LATER},
            "conversation": self._conversation,
            "model": self.defaults.model,
            "mode": self.defaults.mode,
        }
        insert(connection, "sessions", values)
        if (title := self.title_of(record)) is not None:
            set_title(connection, record.id, title)
        self._states[record.id] = SessionState(connection, record.id, now_ms=record.updated_ms)

    def entry_id(self, number: int | None) -> int | None:
        return self._base + number if number is not None and 1 <= number <= self.block.entries else None

    def bound(self, number: int) -> int:
        return self._base + max(1, min(number, self.block.entries + 1))


def _set_extras(connection: sqlite3.Connection, session_id: str, leaf: int | None, extras: SessionExtras) -> None:
    """Write the data that an export does not contain. If another session already has the alias, the alias stays with
    that session."""
    connection.execute(
        f"UPDATE sessions SET {', '.join(f'{name} = ?' for name in EXTRA_COLUMNS)}, state = ?, owner = ? WHERE id = ?",
        (
            *(getattr(extras, name) for name in EXTRA_COLUMNS),
            *(("running", FORMER_OWNER) if extras.is_running else ("idle", "")),
            session_id,
        ),
    )
    connection.execute("UPDATE OR IGNORE sessions SET alias = ? WHERE id = ?", (extras.alias, session_id))
    for principal, access, created_ms in extras.shares:
        values = {"principal": principal, "access": access, "created_ms": created_ms}
        insert(connection, "shares", {"session": session_id, **values})
    for message_id, parts, created_ms, name, digest in extras.inbox:
        values = {"message_id": message_id, "parts": parts, "created_ms": created_ms}
        insert(connection, "inbox", {"session": session_id, "owner": FORMER_OWNER, **values})
        if name is not None and digest is not None:
            add_name(connection, session_id, PromptName(id=name, digest=digest), message_id)
    for turn, message_id, text, thought, created_ms in extras.draft:
        values = {"turn": turn, "message_id": message_id, "text": text, "thought": thought, "created_ms": created_ms}
        insert(connection, "drafts", {"session": session_id, "after_leaf": leaf, **values})


def conversation_state(connection: sqlite3.Connection, ids: Sequence[str]) -> ConversationState:
    """Return the data that a copy of these sessions needs in addition to an export."""
    extras: dict[str, SessionExtras] = {}
    users: list[str] = []
    stamps: list[object] = []
    now = now_ms()
    for session_id in ids:
        alias, model, mode, directories, config, metadata, calibration, principal, *rest = connection.execute(
            "SELECT alias, model, mode, additional_directories, config, metadata, calibration, principal, state, owner,"
            " lease_ms, leaf, turn, newest_entry, updated_ms FROM sessions WHERE id = ? AND deleted_ms IS NULL",
            (session_id,),
        ).fetchone() or _no_session(session_id)
        state, owner, lease_ms, leaf = rest[0], rest[1], possible_time(rest[2]), rest[3]
        inbox = connection.execute(
            "SELECT i.message_id, i.parts, i.created_ms, p.name, p.digest, i.owner FROM inbox i LEFT JOIN prompts p"
            " ON p.session = i.session AND p.message_id = i.message_id AND p.turn IS NULL"
            " WHERE i.session = ? ORDER BY i.seq",
            (session_id,),
        ).fetchall()
        shares = connection.execute(
            "SELECT principal, access, created_ms FROM shares WHERE session = ? ORDER BY principal", (session_id,)
        ).fetchall()
        draft = connection.execute(
            "SELECT turn, message_id, text, thought, created_ms FROM drafts WHERE session = ? AND after_leaf IS ?"
            " ORDER BY seq",
            (session_id, leaf),
        ).fetchall()
        owners = [(owner, lease_ms)] if state == "running" else []
        owners += [(sender, max(possible_time(sent_ms), lease_ms)) for _, _, sent_ms, _, _, sender in inbox]
        users += [readable(one) for one, sign_ms in owners if is_alive(one, lease_age_ms=now - sign_ms)]
        stamps.append((alias, metadata, config, rest, len(inbox), len(draft), shares))
        extras[session_id] = SessionExtras(
            alias=alias,
            model=model,
            mode=mode,
            additional_directories=directories,
            config=config,
            metadata=metadata,
            calibration=calibration,
            principal=principal,
            is_running=state == "running",
            shares=tuple(shares),
            inbox=tuple(tuple(one[:-1]) for one in inbox),
            draft=tuple(draft),
        )
    return ConversationState(extras=extras, users=tuple(dict.fromkeys(users)), stamp=repr(stamps))


def _no_session(session_id: str) -> NoReturn:
    raise NoSuchSession(session_id)


def show(connection: sqlite3.Connection, imports: Sequence[Importer]) -> None:
    """Make all imported sessions visible, in one transaction."""
    for one in imports:
        one.show(connection)


def abandon(connection: sqlite3.Connection, here: str) -> None:
    """Give up the imports of the owner `here`, so that `tidy` removes the data that the imports have written."""
    connection.execute(
        "UPDATE sessions SET state = 'idle', owner = '' WHERE owner = ? AND deleted_ms IS NOT NULL", (here,)
    )


def _exists(connection: sqlite3.Connection, block: Block) -> bool:
    """Return whether the conversation was imported before, or one of its sessions exists.

    If the imported sessions were deleted, the conversation counts as not imported, even if forks of them still exist.
    """
    exists = _was_imported(connection, block)
    for name in block.sessions:
        row = connection.execute("SELECT deleted_ms IS NULL FROM sessions WHERE id = ?", (name,)).fetchone()
        if row == (0,) and not exists:
            raise SessionTaken(name)
        exists = exists or row is not None
    return exists


def _was_imported(connection: sqlite3.Connection, block: Block) -> bool:
    same = connection.execute(
        "SELECT 1 FROM imports i JOIN sessions s ON s.conversation = i.conversation AND s.deleted_ms IS NULL"
        " WHERE i.hash = ? AND s.forked_from IS NULL",
        (block.hash,),
    ).fetchone()
    return same is not None


def _reserve_ids(connection: sqlite3.Connection, entries: int) -> int:
    """Reserve ids for this number of entries. Return the id just before the first reserved id."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'entries'").fetchone()
    if row is None:
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('entries', ?)", (entries,))
        return 0
    connection.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'entries'", (entries,))
    return int(row[0])
