"""Stores turns: queued prompts, claims, appended entries, drafts, and repair after a crash.

A session runs one turn at a time. The session's row names the store that runs the turn. That store is the owner of the
session. A store can claim a session if the session is idle or its owner is dead. If the owner is dead, the claim first
closes the owner's turn: it appends the draft as an interrupted answer, and then the end of the turn. If the dead owner
had queued prompts, the claim also appends each prompt, followed by the end of a turn that never ran. Stored entries do
not change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from sqlite3 import Connection
from typing import TypeAlias

from crow.domain.entries import Body, Entry, NewEntry, PromptName, User
from crow.domain.errors import LeafMoved, NoSuchSession, SessionBusy, StoreUnavailable
from crow.domain.messages import Part
from crow.store import NamedPrompt, QueuedPrompt, SessionChanges, Tail, TurnStart
from crow.store.claim import (
    DeadTurn,
    DraftPiece,
    InboxItem,
    closing_entries,
    ends_draft,
    no_longer_queued,
    orphans,
    preview,
    raise_refusal,
    taken_from_inbox,
    waiting_news,
)
from crow.store.codec import Encoded, decode_parts, encode, encode_parts, mend
from crow.store.owner import dead_twin, is_alive, readable
from crow.store.rows import (
    COUNTERS,
    SessionCounts,
    entry_values,
    plain,
    possible_count,
    possible_time,
    sized,
    storable_usage,
)
from crow.store.search import searchable_text
from crow.store.session_rules import is_entry_id, not_in_session
from crow.store.shared_store import SharedStore
from crow.store.sqlite.connection import insert
from crow.store.sqlite.database import Database, now_ms, snapshot, transaction
from crow.store.sqlite.failures import REPAIR
from crow.store.sqlite.paths import CHECKED_COLUMNS, PathMethods, checksum, load_tail, session_row, session_values
from crow.store.sqlite.prompts import add_name, begin_command, find_prompt, forget_waiting, note_entry, waiting_name
from crow.store.sqlite.sessions import change_session

logger = logging.getLogger(__name__)

# ruff: noqa: S608  # statements are put together from constants; values are parameters

_EncodedEntries: TypeAlias = Sequence[tuple[NewEntry, Encoded]]

_TOKEN_COUNTERS = ("tokens_in", "tokens_out", "tokens_cached")


def _additions(columns: Sequence[str]) -> str:
    """Return assignments that add a parameter to each of these columns. SQLite turns a sum of more than 64 bits into a
    real number, and the cast turns that into the nearest number that the column can hold."""
    return ", ".join(f"{name} = CAST({name} + :{name} AS INTEGER)" for name in columns)


_ADD_USAGE = f"UPDATE sessions SET cost = cost + :cost, {_additions(_TOKEN_COUNTERS)} WHERE id = :id"
"""Adds the usage of a subagent to the session that started it."""

_STATE_COLUMNS = (
    "conversation, leaf, turn, state, owner, lease_ms, model, parent_id,"
    " max(coalesce((SELECT max(id) FROM entries), 0),"
    " coalesce((SELECT CAST(seq AS INTEGER) FROM sqlite_sequence WHERE name = 'entries'), 0))"
)
"""The columns of a session that `SessionState` reads. The last one is an id that the next entry's id will exceed."""

_SAVE = (
    "UPDATE sessions SET leaf = :leaf, turn = :turn, state = :state, owner = :owner, lease_ms = :lease_ms,"
    " updated_ms = :now_ms, newest_entry = coalesce(:newest, newest_entry), has_prompt = has_prompt OR :has_prompt,"
    f" cost = cost + :cost, {_additions(COUNTERS)} WHERE id = :id"
)


_STORE_BLOB = "INSERT INTO blobs (hash, size, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"

_STORE_BODY = (
    "INSERT INTO blobs (hash, size, data) VALUES (?, ?, ?)"
    " ON CONFLICT DO UPDATE SET data = excluded.data WHERE length(data) < size"
)
"""Stores the blob of a body. If the blob is already stored in compressed form, the plain form replaces it, because the
views read most bodies as text."""


class TurnMethods(PathMethods, SharedStore):
    """Methods of the store that run turns."""

    def __init__(self, database: Database, owner: str) -> None:
        PathMethods.__init__(self, database)
        SharedStore.__init__(self)
        self.owner = owner
        """Identifies this store in rows."""

    @snapshot(raise_if_moved=True)
    def tail_without_repair(self, sql: Connection, session_id: str) -> Tail | None:
        state = SessionState(sql, session_id, now_ms=now_ms())
        if session_id in self.unstored_ends or _needs_repair(state, self.owner):
            return None
        return replace(load_tail(sql, session_id), waiting=waiting_news(state.inbox(self.owner)))

    @snapshot()
    def unstored_end(self, sql: Connection, session_id: str) -> tuple[Entry, ...]:
        state = SessionState(sql, session_id, now_ms=now_ms())
        if not _needs_repair(state, self.owner):
            return ()
        closing, _ = _closing(state, self.owner)
        return preview(closing, session_row(sql, session_id), now_ms=state.now_ms)

    @transaction()
    def repair(self, sql: Connection, session_id: str) -> None:
        self._store_end(sql, session_id)
        state = SessionState(sql, session_id, now_ms=now_ms())
        if _needs_repair(state, self.owner):
            _close_turn(state, self.owner)
            state.save()

    @transaction(raise_if_moved=True)
    def enqueue(
        self,
        sql: Connection,
        session_id: str,
        parts: Sequence[Part],
        message_id: str,
        *,
        name: PromptName | None = None,
    ) -> None:
        session_row(sql, session_id)
        if name is not None:
            add_name(sql, session_id, name, message_id)
        values = {"session": session_id, "owner": self.owner, "message_id": message_id, "created_ms": now_ms()}
        insert(sql, "inbox", values | {"parts": encode_parts(parts)})

    @transaction()
    def replace_queued(self, sql: Connection, session_id: str, parts: Sequence[Part], message_id: str) -> None:
        values = (encode_parts(parts), session_id, message_id)
        sql.execute("UPDATE inbox SET parts = ? WHERE session = ? AND message_id = ?", values)

    @snapshot()
    def queued(self, sql: Connection, session_id: str) -> tuple[QueuedPrompt, ...]:
        session_row(sql, session_id)
        query = "SELECT parts, CAST(message_id AS TEXT) FROM inbox WHERE session = ? ORDER BY seq"
        rows = sql.execute(query, (session_id,)).fetchall()
        return tuple(QueuedPrompt(parts=decode_parts(parts), message_id=message_id) for parts, message_id in rows)

    @snapshot()
    def named_prompt(self, sql: Connection, session_id: str, name: PromptName) -> NamedPrompt | None:
        session_row(sql, session_id)
        return find_prompt(sql, session_id, name, self.owner)

    @transaction()
    def drop_prompt(self, sql: Connection, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        _drop_prompt(sql, session_id, message_id)
        if not is_cancelled:
            forget_waiting(sql, session_id, message_id)

    async def take_turn(
        self,
        session_id: str,
        message_id: str | None,
        *,
        leaf: int | None,
        parts: Sequence[Part] | None = None,
        cut: int | None = None,
        name: PromptName | None = None,
        command_id: str = "",
    ) -> TurnStart:
        def claim(sql: Connection) -> TurnStart:
            self._store_end(sql, session_id)
            state = SessionState(sql, session_id, now_ms=now_ms())
            if name is not None and (message_id is None or parts is not None):
                add_name(sql, session_id, name, message_id or command_id)
            if state.state == "running" and (state.owner == self.owner or state.is_owner_alive):
                raise SessionBusy(session_id, readable(state.owner))
            was_moved = state.leaf != leaf
            entries = _close_turn(state, self.owner)
            state.turn += 1
            if message_id is not None:
                given = name if parts is not None else waiting_name(sql, session_id, message_id)
                prompt = tuple(_dequeue(sql, session_id, message_id) if parts is None else parts)
                user = User(parts=prompt, message_id=message_id, cut=cut, name=given)
                entries.append(state.add(sized(NewEntry(body=user, model=state.model)), turn=state.turn))
            elif name is not None:
                begin_command(sql, session_id, command_id, turn=state.turn)
            state.state, state.owner = "running", self.owner
            state.save()
            return TurnStart(turn=state.turn, entries=tuple(entries), moved=was_moved)

        async with self.repair_lock(session_id):
            start = await self.database.write(claim, raise_if_moved=True)
            self.on_stored(session_id)
            self.unstored_ends.pop(session_id, None)
        return start

    async def append(
        self,
        session_id: str,
        *,
        leaf: int | None,
        turn: int,
        entries: Sequence[NewEntry],
        release: bool = False,
        changes: SessionChanges | None = None,
    ) -> tuple[Entry, ...]:
        # Encode before the transaction begins, to keep other writers waiting for a shorter time.
        encoded = [(sized(entry), encode(entry.body)) for entry in entries]

        def append(sql: Connection) -> tuple[Entry, ...]:
            stored = self._append(sql, session_id, leaf=leaf, turn=turn, entries=encoded, release=release)
            if changes is not None:
                change_session(sql, session_id, changes)
            return stored

        entries_stored = await self.database.write(append)
        self.on_stored(session_id)
        return entries_stored

    def _append(
        self, sql: Connection, session_id: str, *, leaf: int | None, turn: int, entries: _EncodedEntries, release: bool
    ) -> tuple[Entry, ...]:
        state = SessionState(sql, session_id, now_ms=now_ms())
        _check_writable(state, self.owner, leaf)
        stored = tuple(state.add(new, turn=turn, encoded=encoded) for new, encoded in entries)
        bodies = [entry.body for entry in stored]
        for message_id in taken_from_inbox(bodies):
            _drop_prompt(sql, session_id, message_id)
        if release or ends_draft(bodies):
            state.drop_draft()
        else:  # the answer is still streaming, and its draft now follows these entries
            sql.execute(
                "UPDATE drafts SET after_leaf = ? WHERE session = ? AND after_leaf IS ?", (state.leaf, session_id, leaf)
            )
        if release:
            state.state, state.owner = "idle", ""
        state.save()
        return stored

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        entries = [(sized(entry), encode(entry.body)) for entry in end]
        self.unstored_ends[session_id] = partial(
            self._append, session_id=session_id, leaf=leaf, turn=turn, entries=entries, release=True
        )

    def _store_end(self, sql: Connection, session_id: str) -> None:
        """Store the last entries of a turn that was given up by `disown`. If the entries cannot be stored, replace the
        turn's owner by one that counts as dead."""
        store_end = self.unstored_ends.get(session_id)
        if store_end is None:
            return
        try:
            store_end(sql)
        except (LeafMoved, SessionBusy, NoSuchSession):
            dead = dead_twin(self.owner)
            sql.execute("UPDATE sessions SET owner = ? WHERE id = ? AND owner = ?", (dead, session_id, self.owner))

    @snapshot()
    def cancel_turn(self, sql: Connection, session_id: str) -> bool:
        session_values(sql, session_id, "1")
        return False  # processes that share a file cannot send requests to each other

    @transaction()
    def renew_lease(self, sql: Connection, session_id: str) -> None:
        self._renew_lease(sql, session_id)

    def _renew_lease(self, sql: Connection, session_id: str) -> None:
        sql.execute("UPDATE sessions SET lease_ms = ? WHERE id = ? AND owner = ?", (now_ms(), session_id, self.owner))

    async def save_draft(
        self, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        values = (after_leaf, turn, message_id, text, thought, now_ms(), session_id, self.owner)

        def save(sql: Connection) -> None:
            self._renew_lease(sql, session_id)
            inserted = sql.execute(
                "INSERT INTO drafts (session, after_leaf, turn, message_id, text, thought, created_ms)"
                " SELECT id, ?, ?, ?, ?, ?, ? FROM sessions WHERE id = ? AND owner = ? AND deleted_ms IS NULL",
                values,
            )
            if not inserted.rowcount:
                session_values(sql, session_id, "1")
                raise_refusal("fenced", session_id)

        await self.database.write(save)

    @transaction()
    def move_leaf(self, sql: Connection, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        state = SessionState(sql, session_id, now_ms=now_ms())
        _check_writable(state, self.owner, leaf)
        if to is not None:
            query = "SELECT 1 FROM entries WHERE id = ? AND conversation = ?"
            if not (is_entry_id(to) and sql.execute(query, (to, state.conversation)).fetchone()):
                raise not_in_session(to, session_id)
        move = {"session": session_id, "from_leaf": leaf, "to_leaf": to, "created_ms": state.now_ms}
        insert(sql, "moves", move | {"reason": plain(reason)})
        state.leaf = to
        state.save()


class SessionState:
    """A session's row inside a transaction. `add` appends an entry to the session's path, and `save` writes the
    row. Callers may set `leaf`, `turn`, `state` and `owner`.

    Every entry is inserted through this class, so the entry's blobs, its full text and the session's counters are
    always stored together with the entry.
    """

    def __init__(self, sql: Connection, session_id: str, *, now_ms: int) -> None:
        """:raises NoSuchSession: the session does not exist, or is deleted.
        :raises StoreUnavailable: the row is damaged, so that no entry can be appended.
        """
        row = session_values(sql, session_id, _STATE_COLUMNS)
        # The next entry gets an id above row[8], and the leaf is its parent. An entry must have a higher id than its
        # parent, so the leaf must not be above row[8]. It is not checked whether the leaf's entry still exists.
        if not (isinstance(row[0], int) and (row[1] is None or (isinstance(row[1], int) and 0 < row[1] <= row[8]))):
            raise StoreUnavailable(f"The row of session {session_id} is damaged. {REPAIR}")
        self.sql = sql
        self.session_id = session_id
        self.now_ms = now_ms
        self.conversation: int = row[0]
        self.leaf: int | None = row[1]
        self.turn = possible_count(row[2])
        self.state: str = row[3]
        self.owner: str = row[4]
        """The store that runs the turn, or empty if no turn runs."""
        self._lease_ms = possible_time(row[5])
        """The owner's last sign of life, in Unix milliseconds."""
        self.model = row[6] if isinstance(row[6], str) else ""
        self._parent_id: str | None = row[7]
        self._inbox: list[InboxItem] | None = None
        self._counts = SessionCounts()
        self._newest: int | None = None

    @property
    def is_owner_alive(self) -> bool:
        """Whether the store that owns the turn can still continue the turn."""
        return is_alive(self.owner, lease_age_ms=self.now_ms - self._lease_ms)

    def add(self, new: NewEntry, *, turn: int, encoded: Encoded | None = None, entry_id: int | None = None) -> Entry:
        """Insert an entry under the leaf and make it the leaf. Return the entry.

        `encoded` is the encoded body if it is known already. `entry_id` is the entry's id if one was reserved.
        """
        stored = encoded or encode(new.body)
        usage = storable_usage(new.usage)
        body = stored.spilled if stored.text is None else stored.text
        assert body is not None
        columns = {
            "id": entry_id,
            "conversation": self.conversation,
            "session": mend(self.session_id),
            "parent": self.leaf,
            "turn": turn,
            **entry_values(new, stored, usage),
            "created_ms": self.now_ms,
        }
        columns["checksum"] = checksum(body.encode(), [columns[name] for name in CHECKED_COLUMNS])
        entry_id = insert(self.sql, "entries", columns)
        for name, data in stored.blobs.items():
            self.sql.execute(_STORE_BODY if name == stored.spilled else _STORE_BLOB, (name, len(data), data))
            self.sql.execute("INSERT INTO blob_refs (blob, entry) VALUES (?, ?)", (name, entry_id))
        self._index(entry_id, stored.body)
        if self.session_id:
            note_entry(self.sql, self.session_id, stored.body, turn=turn, entry=entry_id)
        self.leaf = self._newest = entry_id
        self._counts.add(new, usage)
        same = ("conversation", "parent", "turn", "model", "cost", "estimate", "created_ms")
        values = {name: columns[name] for name in same}
        return Entry(id=entry_id, session=self.session_id, body=stored.body, usage=usage, **values)

    def inbox(self, owner: str) -> list[InboxItem]:
        """Return the items of the inbox that `owner` or a dead owner has put there, in order. Only the first call reads
        the inbox from the database."""
        if self._inbox is None:
            query = (
                "SELECT seq, CAST(owner AS TEXT), CAST(parts AS TEXT), CAST(message_id AS TEXT), created_ms FROM inbox"
                " WHERE session = ? ORDER BY seq"  # the columns are cast because damaged ones can have any type
            )
            self._inbox = [
                InboxItem(*item)
                for *item, created_ms in self.sql.execute(query, (self.session_id,))
                if item[1] == owner or not self._is_sender_alive(item[1], created_ms)
            ]
        return self._inbox

    def _is_sender_alive(self, sender: str, created_ms: object) -> bool:
        return is_alive(sender, lease_age_ms=self.now_ms - max(possible_time(created_ms), self._lease_ms))

    def drop_draft(self) -> None:
        """Delete the draft, because the whole answer was stored or the turn has ended."""
        self.sql.execute("DELETE FROM drafts WHERE session = ?", (self.session_id,))

    def save(self) -> None:
        """Write the row."""
        values = {
            "id": self.session_id,
            "leaf": self.leaf,
            "turn": self.turn,
            "state": self.state,
            "owner": self.owner,
            "lease_ms": self.now_ms if self.owner else 0,
            "now_ms": self.now_ms,
            "newest": self._newest,
            "has_prompt": self._counts.has_prompt,
            "cost": self._counts.cost,
        }
        added = self._counts.storable()
        self.sql.execute(_SAVE, values | added)
        usage = {"cost": self._counts.cost, **{name: added[name] for name in _TOKEN_COUNTERS}}
        if self._parent_id is not None and any(usage.values()):
            self.sql.execute(_ADD_USAGE, {"id": self._parent_id, **usage})

    def _index(self, entry_id: int, body: Body) -> None:
        """Add the entry to the full-text index. The indexed text is the same as in the view `searchable`."""
        text = searchable_text(body)
        if "\0" in text:  # SQLite's JSON functions treat NUL as the end of the text
            self.sql.execute(
                "INSERT INTO entries_fts (rowid, text) SELECT id, text FROM searchable WHERE id = ? AND text <> ''",
                (entry_id,),
            )
        elif text:
            self.sql.execute("INSERT INTO entries_fts (rowid, text) VALUES (?, ?)", (entry_id, text))


def _drop_prompt(sql: Connection, session_id: str, message_id: str) -> None:
    sql.execute("DELETE FROM inbox WHERE session = ? AND message_id = ?", (session_id, message_id))


def _dequeue(sql: Connection, session_id: str, message_id: str) -> tuple[Part, ...]:
    """Remove a prompt from the inbox and return its parts.

    :raises ArgumentError: the prompt is not in the inbox.
    """
    query = "SELECT parts FROM inbox WHERE session = ? AND message_id = ?"
    row = sql.execute(query, (session_id, message_id)).fetchone()
    if row is None:
        raise no_longer_queued(session_id, message_id)
    _drop_prompt(sql, session_id, message_id)
    return decode_parts(row[0])


def _check_writable(state: SessionState, owner: str, leaf: int | None) -> None:
    """:raises SessionBusy: another living store runs a turn.
    :raises LeafMoved: the session has another leaf, or a dead owner left a turn that must be repaired first.
    """
    if state.state == "running" and state.owner != owner:
        raise_refusal("busy" if state.is_owner_alive else "interrupted", state.session_id, owner=state.owner)
    if state.leaf != leaf:
        raise_refusal("moved", state.session_id, leaf=leaf, current=state.leaf)


def _needs_repair(state: SessionState, owner: str) -> bool:
    """Return whether a dead owner left a turn or a queued prompt behind. While a living owner runs a turn, the session
    needs no repair."""
    if state.state == "running":
        return state.owner != owner and not state.is_owner_alive
    return bool(orphans(state.inbox(owner), owner))


def _close_turn(state: SessionState, owner: str) -> list[Entry]:
    """Close the turn and the queued prompts of dead owners, and make the session idle. Return the entries that were
    appended."""
    closing, left = _closing(state, owner)
    entries = [state.add(new, turn=turn) for new, turn in closing]
    state.turn += len(left)
    state.sql.executemany("DELETE FROM inbox WHERE seq = ?", [(item.seq,) for item in left])
    state.drop_draft()
    state.state, state.owner = "idle", ""
    return entries


def _closing(state: SessionState, owner: str) -> tuple[list[tuple[NewEntry, int]], Sequence[InboxItem]]:
    """Return the entries that close the turn and the queued prompts of dead owners, each with its turn. Also return the
    items of these prompts."""
    items = orphans(state.inbox(owner), owner)
    left = [(item, waiting_name(state.sql, state.session_id, item.message_id)) for item in items]
    dead = _dead_turn(state) if state.state == "running" else None
    return closing_entries(dead, left, turn=state.turn, model=state.model), items


def _dead_turn(state: SessionState) -> DeadTurn:
    pieces = state.sql.execute(
        "SELECT CAST(message_id AS TEXT), CAST(text AS TEXT), CAST(thought AS TEXT) FROM drafts"
        " WHERE session = ? AND after_leaf IS ? ORDER BY seq",
        (state.session_id, state.leaf),
    ).fetchall()
    previous = state.sql.execute(
        "SELECT model, input_tokens + output_tokens FROM entries WHERE session = ? AND conversation = ?"
        " AND kind = 'assistant' ORDER BY id DESC LIMIT 1",
        (state.session_id, state.conversation),
    ).fetchone()
    last = state.sql.execute("SELECT kind, turn FROM entries WHERE id = ?", (state.leaf,)).fetchone()
    return DeadTurn(
        owner=state.owner,
        pieces=[DraftPiece(*piece) for piece in pieces],
        previous=previous and (str(previous[0]), previous[1]),
        has_end=last == ("turn_end", state.turn),
    )
