"""Stores turns: queued prompts, claims, appended entries, drafts, and repair after a crash.

Each claim of a turn (`take_turn`) raises the session's epoch. So does the end of a dead owner's turn, in `repair` or in
the next claim. While an owner is frozen or cut off, another store may take over its turn. Then the epoch that the owner
knows is too old, and the owner cannot write any more.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crow.domain.entries import Body, Entry, NewEntry, PromptName, User
from crow.domain.errors import LeafMoved, NoSuchSession, SessionBusy
from crow.domain.messages import Part, Usage
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
from crow.store.codec import Encoded, decode_parts, encode, encode_parts, mend, to_json
from crow.store.owner import dead_twin, readable
from crow.store.postgres.database import Database, Sql, folded, snapshot, transaction
from crow.store.postgres.paths import PathMethods, check_session, load_tail, session_row, session_values
from crow.store.postgres.prompts import add_name, begin_command, find_prompt, forget_waiting, note_entries, waiting_name
from crow.store.postgres.sessions import change_session
from crow.store.prompts import named_prompt_in
from crow.store.rows import SessionCounts, entry_values, is_plain, plain, sized, storable, storable_cost, storable_usage
from crow.store.search import searchable_text
from crow.store.session_rules import is_entry_id, not_in_session
from crow.store.shared_store import SharedStore

logger = logging.getLogger(__name__)

_LARGEST_INT = 2**31
# The functions are in migrations/0001_initial.sql.
_APPEND = "SELECT * FROM crow.append($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
_ADD = "SELECT crow.add_entries($1, $2, $3, $4, $5, $6, $7, $8)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """A chain of entries to insert: each entry becomes the parent of the next one. All sequences have an item for each
    entry, or for each blob."""

    entries: Sequence[NewEntry]
    bodies: Sequence[Body]
    """The bodies as later reads will return them."""
    usages: Sequence[Usage | None]
    """The usage of each entry as later reads will return it."""
    turns: Sequence[int]
    """The turn of each entry."""
    rows: str
    """The rows of the entries, as JSON."""
    counts: SessionCounts
    """The sums that the entries add to the row of their session."""
    hashes: Sequence[str]
    """The hash of each blob."""
    datas: Sequence[bytes]
    """The content of each blob."""
    numbers: Sequence[int]
    """For each blob, the number (from 1) of the entry that refers to it."""

    @property
    def added(self) -> tuple[object, ...]:
        """The arguments `counts`, `price` and `prompted` of the functions in the schema. They are the sums that the
        entries add to the row of their session."""
        return list(self.counts.storable().values()), self.counts.cost, self.counts.has_prompt

    def stored(
        self, ids: Sequence[int], *, conversation: int, session: str, parent: int | None, now_ms: int
    ) -> list[Entry]:
        """Return the entries as later calls will read them. `ids` are the ids of the entries, and `parent` is the
        parent of the first one."""
        parents = [parent, *ids]
        return [
            Entry(
                id=entry_id,
                conversation=conversation,
                session=session,
                parent=parents[index],
                turn=self.turns[index],
                body=self.bodies[index],
                model=plain(self.entries[index].model),
                usage=self.usages[index],
                cost=storable_cost(self.entries[index].cost),
                estimate=self.entries[index].estimate,
                created_ms=now_ms,
            )
            for index, entry_id in enumerate(ids)
        ]


def _chain(entries: Sequence[tuple[NewEntry, int]]) -> _Chain:
    """Encode entries, each paired with its turn, for `_APPEND` or `_ADD`."""
    encoded = [encode(new.body) for new, _ in entries]
    usages = [storable_usage(new.usage) for new, _ in entries]
    counts = SessionCounts()
    for (new, _), usage in zip(entries, usages, strict=True):
        counts.add(new, usage)
    blobs = [(name, data, number) for number, one in enumerate(encoded, start=1) for name, data in one.blobs.items()]
    return _Chain(
        entries=[new for new, _ in entries],
        bodies=[one.body for one in encoded],
        usages=usages,
        turns=[turn for _, turn in entries],
        rows=json.dumps(
            [_row(new, one, usage, turn) for (new, turn), one, usage in zip(entries, encoded, usages, strict=True)]
        ),
        counts=counts,
        hashes=[name for name, _, _ in blobs],
        datas=[data for _, data, _ in blobs],
        numbers=[number for _, _, number in blobs],
    )


class TurnMethods(PathMethods, SharedStore):
    """Methods of the store that run turns.

    A session is idle, or its turn is

    - running: its owner lives. If this store is the owner, `_epochs` has the epoch of the claim.
    - disowned: this store owns it, but could not store its end, and gave it up with `disown`. The end is in
      `unstored_ends` until `open_session` or `take_turn` has stored it, or has ended the turn without it.
    - dead: its owner does not live any more, or this store owns it but does not know its epoch. `repair` or the next
      claim ends it.
    """

    def __init__(self, database: Database, owner: str) -> None:
        PathMethods.__init__(self, database, owner)
        SharedStore.__init__(self)
        self._epochs: dict[str, int] = {}
        """Maps each session whose turn this store runs to the epoch of the claim."""

    @snapshot
    async def tail_without_repair(self, sql: Sql, session_id: str) -> Tail | None:
        state = await self._state(sql, session_id)
        if session_id in self.unstored_ends or state.needs_repair:
            return None
        known = self._epochs.get(session_id, state.epoch)
        if known < state.epoch or (known == state.epoch and not state.is_owned):
            # The turn has ended, perhaps after another store took it over. So forget its epoch, with which this store
            # could not even add notes. (A known epoch later than that of the state belongs to a turn that this store
            # has claimed since the state was read.)
            self._epochs.pop(session_id, None)
        return replace(await load_tail(sql, session_id), waiting=state.waiting)

    @snapshot
    async def unstored_end(self, sql: Sql, session_id: str) -> tuple[Entry, ...]:
        state = await self._state(sql, session_id)
        if not state.needs_repair:
            return ()
        row = await session_row(sql, session_id)
        return preview(await _closing(sql, state), row, now_ms=state.now_ms)

    @transaction
    async def repair(self, sql: Sql, session_id: str) -> None:
        await self._store_end(sql, session_id)
        state = await self._state(sql, session_id, lock=True)
        if state.needs_repair:
            await _close_turn(sql, state)

    async def _state(self, sql: Sql, session_id: str, *, lock: bool = False) -> _SessionState:
        """Return the state of a session. If this store owns a turn but does not know the turn's epoch, the server's
        reply to the store's claim was lost. In this case nobody runs the turn, so the owner counts as dead."""
        state = await _SessionState.read(sql, session_id, self.owner, lock=lock)
        if state.is_owned and state.epoch != self._epochs.get(session_id):
            state.is_owner_alive = False
        return state

    @transaction
    async def enqueue(
        self, sql: Sql, session_id: str, parts: Sequence[Part], message_id: str, *, name: PromptName | None = None
    ) -> None:
        await check_session(sql, session_id, lock=name is not None)
        if name is not None:
            await add_name(sql, session_id, name, message_id)
        await sql.execute(
            "INSERT INTO crow.inbox (session, owner, message_id, parts, created_ms)"
            " VALUES ($1, $2, $3, $4, crow.now_ms())",
            session_id,
            self.owner,
            plain(message_id),
            encode_parts(parts),
        )

    @transaction
    async def replace_queued(self, sql: Sql, session_id: str, parts: Sequence[Part], message_id: str) -> None:
        query = "UPDATE crow.inbox SET parts = $3 WHERE session = $1 AND message_id = $2"
        await sql.execute(query, plain(session_id), plain(message_id), encode_parts(parts))

    @snapshot
    async def queued(self, sql: Sql, session_id: str) -> tuple[QueuedPrompt, ...]:
        await check_session(sql, session_id)
        rows = await sql.fetch("SELECT parts, message_id FROM crow.inbox WHERE session = $1 ORDER BY seq", session_id)
        return tuple(QueuedPrompt(parts=decode_parts(parts), message_id=message_id) for parts, message_id in rows)

    @transaction
    async def drop_prompt(self, sql: Sql, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        query = "DELETE FROM crow.inbox WHERE session = $1 AND message_id = $2"
        await sql.execute(query, plain(session_id), plain(message_id))
        if not is_cancelled:
            await forget_waiting(sql, session_id, message_id)

    @snapshot
    async def named_prompt(self, sql: Sql, session_id: str, name: PromptName) -> NamedPrompt | None:
        return await find_prompt(sql, session_id, name, self.owner)

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
        async with self.repair_lock(session_id):
            start, epoch = await self._claim(session_id, message_id, leaf, parts, cut, name, command_id)
            self.unstored_ends.pop(session_id, None)
            self._epochs[session_id] = epoch
        self.on_stored(session_id)
        return start

    @transaction
    async def _claim(
        self,
        sql: Sql,
        session_id: str,
        message_id: str | None,
        leaf: int | None,
        parts: Sequence[Part] | None,
        cut: int | None,
        name: PromptName | None,
        command_id: str,
    ) -> tuple[TurnStart, int]:
        await self._store_end(sql, session_id)
        state = await self._state(sql, session_id, lock=True)
        if name is not None and (message_id is None or parts is not None):
            await add_name(sql, session_id, name, message_id or command_id)
        if state.is_running and state.is_owner_alive:
            raise SessionBusy(session_id, readable(state.owner))
        was_moved = state.leaf != leaf
        entries = await _close_turn(sql, state)
        state.turn += 1
        if message_id is not None:
            if parts is None:
                name = await waiting_name(sql, session_id, message_id)
                query = "DELETE FROM crow.inbox WHERE session = $1 AND message_id = $2 RETURNING parts"
                row = await sql.fetchrow(query, session_id, plain(message_id))
                if row is None:
                    raise no_longer_queued(session_id, message_id)
                parts = decode_parts(row[0])
            user = User(parts=tuple(parts), message_id=message_id, cut=cut, name=name)
            entries += await state.add(sql, [(sized(NewEntry(body=user, model=state.model)), state.turn)])
        elif name is not None:
            await begin_command(sql, state.conversation, session_id, command_id, turn=state.turn)
        epoch = await sql.fetchval(
            "UPDATE crow.sessions SET state = 'running', owner = $2, turn = $4, epoch = epoch + 1,"
            " updated_ms = $3 WHERE id = $1 RETURNING epoch",
            session_id,
            self.owner,
            state.now_ms,
            state.turn,
        )
        return TurnStart(turn=state.turn, entries=tuple(entries), moved=was_moved), epoch

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
        new = _chain([(sized(entry), turn) for entry in entries])
        if not is_plain(session_id):
            raise NoSuchSession(session_id)
        epoch = self._epochs.get(session_id)
        arguments = self._append_arguments(session_id, leaf, new, release=release)
        if changes is None and not any(named_prompt_in(body) for body in new.bodies):
            stored = _stored(session_id, leaf, new, await self.database.call(_APPEND, *arguments))
            self.database.presence.changed(session_id)
        else:
            stored = await self._append_with_changes(session_id, leaf, new, arguments, changes)
        if release and self._epochs.get(session_id) == epoch:  # otherwise, this store has already claimed the next turn
            self._epochs.pop(session_id, None)
        self.on_stored(session_id)
        return stored

    @transaction
    async def _append_with_changes(
        self,
        sql: Sql,
        session_id: str,
        leaf: int | None,
        new: _Chain,
        arguments: Sequence[object],
        changes: SessionChanges | None,
    ) -> tuple[Entry, ...]:
        stored = _stored(session_id, leaf, new, await sql.fetchrow(_APPEND, *arguments))
        await _note_entries(sql, stored)
        if changes is not None:
            await change_session(sql, session_id, changes)
        return stored

    def _append_arguments(self, session_id: str, leaf: int | None, new: _Chain, *, release: bool) -> tuple[object, ...]:
        bodies = [entry.body for entry in new.entries]
        prompts = [plain(message_id) for message_id in taken_from_inbox(bodies)]
        is_draft_over = release or ends_draft(bodies)
        return (
            *(session_id, self.owner, self._epochs.get(session_id), leaf, new.rows, *new.added, release),
            *(is_draft_over, prompts, new.hashes, new.datas, new.numbers),
        )

    def disown(self, session_id: str, *, leaf: int | None, turn: int, end: Sequence[NewEntry]) -> None:
        self.unstored_ends[session_id] = leaf, _chain([(sized(entry), turn) for entry in end])

    async def _store_end(self, sql: Sql, session_id: str) -> None:
        """Store the last entries of a disowned turn. If they cannot be stored, change the turn's owner to one that
        counts as dead."""
        unstored = self.unstored_ends.get(session_id)
        if unstored is None:
            return
        leaf, end = unstored
        try:
            row = await sql.fetchrow(_APPEND, *self._append_arguments(session_id, leaf, end, release=True))
            await _note_entries(sql, _stored(session_id, leaf, end, row))
        except (LeafMoved, SessionBusy, NoSuchSession):
            query = "UPDATE crow.sessions SET owner = $3 WHERE id = $1 AND owner = $2"
            await sql.execute(query, session_id, self.owner, dead_twin(self.owner))

    @transaction
    async def cancel_turn(self, sql: Sql, session_id: str) -> bool:
        await check_session(sql, session_id)
        query = (
            "UPDATE crow.sessions SET cancelled_epoch = epoch WHERE id = $1 AND state = 'running' AND owner <> $2"
            " RETURNING id"
        )
        return await sql.fetchval(query, session_id, self.owner) is not None

    async def renew_lease(self, session_id: str) -> None:
        """Do nothing. The store has one lease for all its turns, which `Presence` renews."""

    @transaction
    async def save_draft(
        self, sql: Sql, session_id: str, *, after_leaf: int | None, turn: int, message_id: str, text: str, thought: str
    ) -> None:
        added = await sql.fetchval(
            "INSERT INTO crow.drafts (session, after_leaf, turn, message_id, piece, created_ms)"
            " SELECT id, $2, $3, $4, $5, crow.now_ms() FROM crow.sessions"
            " WHERE id = $1 AND deleted_ms IS NULL AND owner = $7 AND epoch = $6 RETURNING seq",
            plain(session_id),
            after_leaf,
            turn,
            plain(message_id),
            to_json([mend(text), mend(thought)]),
            self._epochs.get(session_id),
            self.owner,
        )
        if added is None:
            await check_session(sql, session_id)
            raise_refusal("fenced", session_id)

    @transaction
    async def move_leaf(self, sql: Sql, session_id: str, *, leaf: int | None, to: int | None, reason: str) -> None:
        state = await _SessionState.read(sql, session_id, self.owner, lock=True)
        if state.is_running and state.owner != self.owner:
            raise_refusal("busy" if state.is_owner_alive else "interrupted", session_id, owner=state.owner)
        if state.is_running and state.epoch != self._epochs.get(session_id, state.epoch):
            raise_refusal("fenced", session_id)
        if state.leaf != leaf:
            raise_refusal("moved", session_id, leaf=leaf, current=state.leaf)
        if to is not None:
            query = "SELECT 1 FROM crow.entries WHERE id = $1 AND conversation = $2"
            if not (is_entry_id(to) and await sql.fetchval(query, to, state.conversation)):
                raise not_in_session(to, session_id)
        await sql.execute(
            "INSERT INTO crow.moves (session, from_leaf, to_leaf, reason, created_ms) VALUES ($1, $2, $3, $4, $5)",
            session_id,
            leaf,
            to,
            plain(reason),
            state.now_ms,
        )
        await sql.execute(
            "UPDATE crow.sessions SET leaf = $2, updated_ms = $3 WHERE id = $1", session_id, to, state.now_ms
        )


@dataclass(slots=True, kw_only=True)
class _SessionState:
    """A session's row inside a transaction."""

    session_id: str
    conversation: int
    leaf: int | None
    turn: int
    is_running: bool
    owner: str
    """The store that runs the turn, or empty if no turn runs."""
    epoch: int
    """Raised by each claim of a turn, and by the end of a dead turn. A store with an older epoch may not write."""
    model: str
    parent_id: str | None
    now_ms: int
    """The server's time, in Unix milliseconds."""
    is_owner_alive: bool
    is_owned: bool
    """Whether this store is the owner."""
    orphans: Sequence[InboxItem] = ()
    """The queued prompts of dead stores."""
    waiting: tuple[QueuedPrompt, ...] = ()
    """Texts about background work that wait in the inbox for the model. Texts from other living stores are left out."""

    @classmethod
    async def read(cls, sql: Sql, session_id: str, owner: str, *, lock: bool = False) -> _SessionState:
        """Read the row. `owner` identifies this store. With `lock`, no other transaction can change the row before this
        transaction ends.

        :raises NoSuchSession: the session does not exist, or is deleted.
        """
        columns = "conversation, leaf, turn, state, owner, epoch, model, parent_id"
        row = await session_values(sql, session_id, columns, lock=lock)
        now_ms, is_owner_alive = await sql.fetchrow(
            "SELECT crow.now_ms(), $1 = 'running' AND ($2 = $3 OR crow.is_alive($2))", row[3], row[4], owner
        )
        found = await sql.fetch(
            "SELECT seq, owner, parts, message_id FROM crow.inbox WHERE session = $1 AND (owner = $2"
            " OR NOT crow.is_alive(owner)) ORDER BY seq",
            session_id,
            owner,
        )
        inbox = [InboxItem(*item) for item in found]
        return cls(
            session_id=session_id,
            conversation=row[0],
            leaf=row[1],
            turn=row[2],
            is_running=row[3] == "running",
            owner=row[4],
            epoch=row[5],
            model=row[6],
            parent_id=row[7],
            now_ms=now_ms,
            is_owner_alive=is_owner_alive,
            is_owned=row[4] == owner,
            orphans=orphans(inbox, owner),
            waiting=waiting_news(inbox),
        )

    @property
    def needs_repair(self) -> bool:
        """Whether a dead owner left a turn or a queued prompt behind, and no living owner runs a turn."""
        return not self.is_owner_alive if self.is_running else bool(self.orphans)

    async def add(self, sql: Sql, entries: Sequence[tuple[NewEntry, int]]) -> list[Entry]:
        """Insert the entries as a chain below the leaf. The last of them becomes the leaf. Return the inserted
        entries."""
        new = _chain(entries)
        ids = await sql.fetchval(
            _ADD,
            *(self.conversation, self.session_id, self.leaf, self.now_ms, new.rows, new.hashes, new.datas, new.numbers),
        )
        stored = new.stored(
            ids, conversation=self.conversation, session=self.session_id, parent=self.leaf, now_ms=self.now_ms
        )
        self.leaf = ids[-1]
        await sql.execute(
            "SELECT crow.move_to_end(s, $2, $3, $4, $5, $6, false) FROM crow.sessions s WHERE s.id = $1",
            *(self.session_id, ids, self.now_ms, *new.added),
        )
        await _note_entries(sql, stored)
        return stored


async def _close_turn(sql: Sql, state: _SessionState) -> list[Entry]:
    """Close the turn and the queued prompts of dead owners, and make the session idle. Return the entries that were
    appended."""
    if not state.is_running and not state.orphans:
        return []
    added = await _closing(sql, state)
    state.turn += len(state.orphans)
    await sql.execute("DELETE FROM crow.inbox WHERE seq = ANY($1)", [item.seq for item in state.orphans])
    await sql.execute("DELETE FROM crow.drafts WHERE session = $1", state.session_id)
    entries = await state.add(sql, added) if added else []
    await sql.execute(
        "UPDATE crow.sessions SET state = 'idle', owner = '', epoch = epoch + 1, turn = $2 WHERE id = $1",
        state.session_id,
        state.turn,
    )
    return entries


async def _closing(sql: Sql, state: _SessionState) -> list[tuple[NewEntry, int]]:
    """Return the entries that close the turn and the queued prompts of dead owners, each with its turn."""
    left = [(item, await waiting_name(sql, state.session_id, item.message_id)) for item in state.orphans]
    dead = await _dead_turn(sql, state) if state.is_running else None
    return closing_entries(dead, left, turn=state.turn, model=state.model)


async def _note_entries(sql: Sql, stored: Sequence[Entry]) -> None:
    await note_entries(sql, [(entry.session, entry.body, entry.turn, entry.id) for entry in stored])


async def _dead_turn(sql: Sql, state: _SessionState) -> DeadTurn:
    pieces = await sql.fetch(
        "SELECT message_id, piece FROM crow.drafts WHERE session = $1 AND after_leaf IS NOT DISTINCT FROM $2"
        " ORDER BY seq",
        state.session_id,
        state.leaf,
    )
    previous = await sql.fetchrow(
        "SELECT model, input_tokens::numeric + output_tokens FROM crow.entries WHERE session = $1 AND conversation = $2"
        " AND kind = 'assistant' ORDER BY id DESC LIMIT 1",
        state.session_id,
        state.conversation,
    )
    last = await sql.fetchrow("SELECT kind, turn FROM crow.entries WHERE id = $1", state.leaf)
    return DeadTurn(
        owner=state.owner,
        pieces=[DraftPiece(message_id, *json.loads(piece)) for message_id, piece in pieces],
        previous=previous and (previous[0], None if previous[1] is None else storable(int(previous[1]))),
        has_end=last is not None and tuple(last) == ("turn_end", state.turn),
    )


def _stored(session_id: str, leaf: int | None, new: _Chain, row: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Return the appended entries.

    :raises NoSuchSession: the session does not exist, or is deleted.
    :raises SessionBusy: another living store runs a turn.
    :raises LeafMoved: the session has another leaf, or was taken over.
    """
    if row["outcome"] != "ok":
        raise_refusal(row["outcome"], session_id, leaf=leaf, current=row["was_leaf"], owner=row["was_owner"])
    values = {"conversation": row["in_conversation"], "session": session_id, "now_ms": row["at_ms"]}
    return tuple(new.stored(row["ids"], parent=row["was_leaf"], **values))


def _row(new: NewEntry, encoded: Encoded, usage: Usage | None, turn: int) -> dict[str, object]:
    """Return an entry in the form that the SQL function `crow.add_entries` expects in its JSON argument."""
    row = {"turn": turn, **entry_values(new, encoded, usage)}
    if row["cost"] is not None and math.isinf(row["cost"]):  # JSON has no infinity, but PostgreSQL converts this string
        row["cost"] = str(row["cost"])
    text = searchable_text(encoded.body)
    if text:
        row["folded"] = folded(text)
        row["trigrams"] = f"{{{','.join(map(str, trigrams(folded(text))))}}}"
    return row


def trigrams(text: str) -> list[int]:
    """Return one number for each distinct sequence of three characters in a folded text. The numbers are sorted and fit
    into 32 bits."""
    found = {text[start : start + 3] for start in range(len(text) - 2)}
    return sorted({zlib.crc32(three.encode()) - _LARGEST_INT for three in found})
