"""The branch that a session is on: its entries in memory, and the only way to add entries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import anyio

from crow.agent import Publisher
from crow.agent.history.sent_parts import SentParts
from crow.agent.history.told import Told
from crow.domain.conversation import Context, Projection
from crow.domain.entries import (
    Assistant,
    Entry,
    ModelRequest,
    NewEntry,
    Note,
    PromptName,
    ToolResult,
    TurnEnd,
)
from crow.domain.errors import LeafMoved, NoSuchSession, SessionBusy, StoreError, StoreUnavailable
from crow.domain.events import EntryStored, Event
from crow.domain.messages import JsonObject, Part, Usage
from crow.llm import THOUGHT_LEVELS, ThoughtLevel
from crow.store import BranchStore, SessionChanges, SessionRow, Tail
from crow.store.codec import changed_config
from crow.store.watching import News

logger = logging.getLogger(__name__)

END_S = 5.0
"""The end of a turn is stored and published within this many seconds, or else `settle` has to be called again."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """Things that are not stored yet."""

    end: tuple[NewEntry, ...] = ()
    """The entries that end the turn."""
    requests: tuple[NewEntry, ...] = ()
    """Entries about requests to models (`ModelRequest`), which are stored together with the next other entries."""
    rejected: list[tuple[str, bool]] = field(default_factory=list)
    """The message ids of prompts to remove from the inbox, and whether each was cancelled."""
    tried_at: float = 0.0
    """The monotonic time in seconds at which crow last tried to store the end."""
    refusal: StoreError | None = None
    """Why the last end of a turn was not stored, if another process has changed the session."""


@dataclass(slots=True, kw_only=True)
class _Others:
    """Knowledge about other processes that work on the session."""

    own: set[int] | None = None
    """The ids of entries that this process stored and `Branch.follow` has not received yet. None if the branch is not
    followed."""
    known_to: int = 0
    """The id of the newest entry of the session, on any path, that this process knows."""
    have_taken_over: bool = False
    """Whether another process has taken over a turn of this process, and its entries are not in the projection yet."""


@dataclass(slots=True)
class TurnUsage:
    """The usage of the requests of a turn."""

    turn: Usage | None = None
    """The usage of all requests of this turn and of its subagents. None if there were no requests."""
    _idle: Usage | None = None
    """The usage of requests since the last turn. It counts for the next turn."""

    def add(self, usage: Usage) -> None:
        """Add `usage` to the sum of this turn."""
        self.turn = usage if self.turn is None else self.turn + usage

    def add_idle(self, usage: Usage) -> None:
        """Add `usage` to the sum of the next turn. Call this if no turn runs."""
        self._idle = usage if self._idle is None else self._idle + usage

    def begin_turn(self) -> None:
        """Begin a new sum, which starts with the usage since the last turn."""
        self.turn, self._idle = self._idle, None


class Branch:
    """A session's path, from the newest valid checkpoint to the leaf.

    An entry is stored first, then added to the projection, then published, so the client and the model never see an
    entry that is not on disk. The store refuses entries if another process has moved the leaf.

    A branch has three states:

    - Idle: no turn runs here, and `claimed_to` is None. `follow` takes over the entries of other processes.
    - In a turn: from `claim` until the end of the turn is stored. `follow` only reports the entries of other processes.
    - Unsettled: `end_turn` could not store the end of the turn, which stays in memory. `settle` tries again.

    If another process has taken over the turn, the store refuses the end of the turn. The branch then becomes idle, and
    the next `follow` reads the path again.
    """

    def __init__(self, store: BranchStore, publisher: Publisher, tail: Tail) -> None:
        self._store = store
        self._publisher = publisher
        self._lock = anyio.Lock(fast_acquire=True)
        self._pending = _Pending()
        self._others = _Others()
        self.usage = TurnUsage()
        self.answers = 0
        """How many answers of the model came since this object was made, including those that a compaction has
        replaced."""
        self.claimed_to: int | None = None
        """While this process runs a turn: the id of the entry that was the session's newest when the turn was claimed.
        Otherwise None."""
        self.must_catch_up = False
        """Whether, when the turn was claimed, other processes had stored entries that this process had not published
        yet."""
        self.on_release: Callable[[], object] = lambda: None
        """Called when the turn has been released."""
        self.turn = tail.entries[-1].turn if tail.entries else 0
        self.told = Told.of(tail.row)
        """What the clients were last told of the session's row."""
        self._must_reload = False
        """Whether the store failed when it was read after an append."""
        self.sent_parts = SentParts(tail.row.id)
        """How earlier messages were sent to each endpoint."""
        self._stand_on(tail)

    def _stand_on(self, tail: Tail) -> None:
        """Replace everything in memory by a tail that was just read from the store."""
        self.row = tail.row
        self.leaf = tail.row.leaf
        """The newest entry in memory. Another process may have moved the stored leaf."""
        self.projection = Projection(tail.entries)
        self._must_reload = False
        self._others.have_taken_over = False
        self._others.known_to = max(self._others.known_to, tail.row.newest_entry, self.leaf or 0)

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries of the projection, oldest first. Callers must not change the sequence."""
        return self.projection.entries

    def context(self) -> Context:
        """Return the context that the model would get now."""
        return self.projection.context()

    @property
    def thought_level(self) -> ThoughtLevel | None:
        """The thought level that the user chose for the session. None means that the endpoint's configuration
        decides."""
        return next((level for level in THOUGHT_LEVELS if level == self.row.config.get("thought_level")), None)

    async def publish(self, event: Event) -> None:
        """Send an event to the client."""
        self.told.note(event, self.row)
        await self._publisher.publish(event)

    async def record(self, entries: Sequence[NewEntry], *, changes: SessionChanges | None = None) -> tuple[Entry, ...]:
        """Store `entries` under the leaf, together with `changes` to the session's row, then publish the entries.

        :raises ~crow.domain.errors.StoreError: see :meth:`crow.store.Store.append`.
        """
        stored = await self.store_only(entries, changes=changes)
        await self.publish_stored(stored)
        return stored

    async def store_only(
        self, entries: Sequence[NewEntry], *, changes: SessionChanges | None = None
    ) -> tuple[Entry, ...]:
        """Store `entries` under the leaf without publishing them."""
        async with self._lock:
            return await self._append(entries, changes=changes)

    async def _append(
        self, entries: Sequence[NewEntry], *, changes: SessionChanges | None = None, release: bool = False
    ) -> tuple[Entry, ...]:
        with anyio.CancelScope(shield=True):  # the entries in memory must match the database
            requests = self._pending.requests
            stored = await self._store.append(
                self.row.id,
                leaf=self.leaf,
                turn=self.turn,
                entries=[*requests, *entries],
                changes=changes,
                release=release,
            )
            self._pending.requests = self._pending.requests[len(requests) :]
            self._extend(stored)
            self._note_own(stored)
            self._count(stored)
            if release:
                self._release()
            await self._read_rest(changes)
        return stored[max(0, len(stored) - len(entries)) :]

    async def _read_rest(self, changes: SessionChanges | None) -> None:
        """Read what an append with `changes` has changed besides its entries. If this fails, the next append or claim
        reads it, because the caller still has to publish the entries."""
        if changes is not None:
            config = changed_config(self.row.config, changes.get("config", {}))
            self.row = replace(self.row, **(changes | SessionChanges(config=config)))
        try:
            # After a restore, some needed entries are not in memory.
            if self._must_reload or not self.projection.complete:
                self._stand_on(await self._store.tail(self.row.id))
            elif changes is not None:
                self.row = await self._store.session(self.row.id)
        except (StoreError, NoSuchSession) as error:
            self._must_reload = True
            logger.warning("Session %s cannot be read now; crow will try again: %s", self.row.id, error)

    def _count(self, stored: Sequence[Entry]) -> None:
        """Add the usage of the `stored` entries to the turn's sum, and their cost to the session's row."""
        for entry in stored:
            if isinstance(entry.body, ToolResult):  # the result of a task repeats the usage of its subagent
                continue
            is_of_turn = not (isinstance(entry.body, ModelRequest) and entry.body.purpose == "title")
            if entry.usage is not None and is_of_turn:
                (self.usage.add_idle if self.claimed_to is None else self.usage.add)(entry.usage)
            if entry.cost:
                self.row = replace(self.row, cost=self.row.cost + entry.cost)

    async def refresh_cost(self) -> None:
        """Read the session's cost from the store again, because a subagent may have increased it.

        :raises ~crow.domain.errors.StoreError: it could not be read.
        """
        async with self._lock:
            self.row = replace(self.row, cost=(await self._store.session(self.row.id)).cost)

    def store_with_next(self, requests: Sequence[NewEntry]) -> None:
        """Store these request entries together with the next entries of the branch, or with the end of the turn."""
        self._pending.requests += tuple(requests)

    async def store_requests(self) -> None:
        """Store the pending request entries now, between two turns. The next turn also counts their usage.

        :raises ~crow.domain.errors.StoreError: they could not be stored. They stay pending.
        """
        async with self._lock:
            if self._pending.requests and not self._pending.end:
                await self._append(())

    def _extend(self, stored: Sequence[Entry]) -> None:
        for entry in stored:
            self.projection.add(entry)
            self.answers += isinstance(entry.body, Assistant)
            self.leaf = entry.id
            self._others.known_to = max(self._others.known_to, entry.id)

    async def publish_stored(self, stored: Sequence[Entry]) -> None:
        """Publish all these entries, even if the caller is cancelled. Cancellation only ends the waits for slow
        clients."""
        cancelled: BaseException | None = None
        for entry in stored:
            try:
                await self.publish(EntryStored(entry=entry))
            except anyio.get_cancelled_exc_class() as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def claim(
        self,
        message_id: str | None,
        *,
        parts: Sequence[Part] | None = None,
        cut: int | None = None,
        name: PromptName | None = None,
        command_id: str = "",
    ) -> bool:
        """Claim the session's turn; see :meth:`crow.store.Store.take_turn`. Return True if another process has moved
        the session's leaf."""
        async with self._lock:
            start = await self._store.take_turn(
                self.row.id, message_id, parts=parts, leaf=self.leaf, cut=cut, name=name, command_id=command_id
            )
            self.turn, known = start.turn, self.leaf
            self.usage.begin_turn()
            # The entries before the prompt end the turn of a process that died. Followers publish them.
            repaired = start.entries if message_id is None else start.entries[:-1]
            self._note_own(start.entries[len(repaired) :])
            self.must_catch_up = start.moved or bool(repaired)
            if not (start.moved or self._must_reload):
                self._extend(start.entries)
                self.claimed_to = self._others.known_to
                return False
            try:
                self._stand_on(await self._store.tail(self.row.id))
            except StoreError:  # otherwise, nobody would end the claimed turn
                leaf = start.entries[-1].id if start.entries else known
                interrupted = NewEntry(body=TurnEnd(stop="interrupted"))
                self._store.disown(self.row.id, leaf=leaf, turn=start.turn, end=[interrupted])
                raise
            self.claimed_to = self._others.known_to
            # Do not tell the user if another process only added notes (such as a new thought level) and request counts.
            return start.moved and not self._has_only_notes_since(known, {entry.id for entry in start.entries})

    def _has_only_notes_since(self, leaf: int | None, own: Collection[int]) -> bool:
        """Return whether the entry `leaf` is still on the path, and is followed only by notes, request entries and the
        entries with the ids `own`."""
        added = [entry.body for entry in self.entries if leaf is not None and entry.id > leaf and entry.id not in own]
        has_leaf = any(entry.id == leaf for entry in self.entries)
        return has_leaf and all(isinstance(body, Note | ModelRequest) for body in added)

    def be_followed(self) -> None:
        """Prepare for `follow`. Call this before the first call of `follow`."""
        self._others.own = set()

    async def follow(self, news: News) -> tuple[Entry, ...]:
        """Take over what other processes have changed. The caller passes every `News` of
        :class:`crow.store.watching.Watcher`, in order. Return the entries in `news` that other processes stored.

        :raises ~crow.domain.errors.NoSuchSession: the session was deleted.
        """
        assert self._others.own is not None, "be_followed was called"
        async with self._lock:
            before = self.row
            foreign = tuple(entry for entry in news.entries if entry.id not in self._others.own)
            is_other = news.row.leaf != self.leaf or _settings_of(news.row) != _settings_of(self.row)
            if foreign or is_other or self._others.have_taken_over:
                # The row in the news may be older than what this process has done since.
                self.row = await self._store.session(self.row.id)
                try:
                    if self.claimed_to is None and self._others.have_taken_over:
                        await self._reload()
                    elif self.claimed_to is None:
                        await self._advance([entry for entry in foreign if entry.id > self._others.known_to])
                except BaseException:  # the same news come again
                    self.row = before
                    raise
            self._others.own.difference_update(entry.id for entry in news.entries)
        return foreign

    async def _advance(self, entries: Sequence[Entry]) -> None:
        """Move to the session's current leaf. `entries` are new entries by other processes. A later call may bring
        further entries."""
        for entry in entries:
            if entry.parent != self.leaf:
                break
            self._extend([entry])
            self.turn = max(self.turn, entry.turn)
        has_gap = bool(entries) and self.leaf != entries[-1].id
        has_moved = self.row.leaf != self.leaf and self.row.newest_entry <= self._others.known_to
        if has_gap or has_moved or not self.projection.complete:
            await self._reload()

    async def _reload(self) -> None:
        """Read the session's current path from the store."""
        self._stand_on(await self._store.tail(self.row.id))
        self.turn = max(self.turn, self.entries[-1].turn if self.entries else 0)

    def _note_own(self, stored: Sequence[Entry]) -> None:
        if self._others.own is not None:
            self._others.own.update(entry.id for entry in stored)

    def _release(self) -> None:
        self.claimed_to = None
        self.on_release()

    def store_at_end(self, entries: Sequence[NewEntry]) -> None:
        """Store these entries in the transaction that ends the turn."""
        self._pending.end += tuple(entries)

    async def end_turn(self, end: TurnEnd) -> None:
        """Store the end of the turn and release the turn. Cancellation does not interrupt this.

        :raises ~crow.domain.errors.StoreError: the end could not be stored. It stays pending, and `settle` tries again,
            unless another process has changed the session.
        """
        self.store_at_end([NewEntry(body=end)])
        self._pending.refusal = None
        with anyio.move_on_after(END_S, shield=True):
            try:
                await self.settle()
            except StoreError as error:
                if self._pending.end:
                    raise
                logger.warning("Session %s: crow will try again to remove a prompt: %s", self.row.id, error)
        if self._pending.refusal is not None:
            raise self._pending.refusal
        if self._pending.end:
            words = f"the end of the turn could not be stored within {END_S:.0f} s. Crow will try again."
            raise StoreUnavailable(f"Session {self.row.id}: {words}")

    async def reject_prompt(self, message_id: str, *, is_cancelled: bool = False) -> None:
        """Remove a prompt from the inbox because its sender got an error, or because it was cancelled there. If the
        prompt cannot be removed now, `settle` removes it later."""
        self._pending.rejected.append((message_id, is_cancelled))
        if not self._pending.end:
            await self.try_to_settle()

    @property
    def is_settled(self) -> bool:
        """Whether everything that `store_at_end` and `reject_prompt` asked for has been stored."""
        return not (self._pending.end or self._pending.rejected)

    async def settle(self) -> None:
        """Store the pending end of the turn, and release the turn.

        :raises ~crow.domain.errors.StoreError: the store could not store everything. The rest stays pending.
        """
        stored: Sequence[Entry] = ()
        try:
            async with self._lock:
                self._pending.tried_at = time.monotonic()
                if self._pending.end:
                    stored = await self._store_end()
                while self._pending.rejected:
                    message_id, is_cancelled = self._pending.rejected[0]
                    await self._store.drop_prompt(self.row.id, message_id, is_cancelled=is_cancelled)
                    del self._pending.rejected[0]
        finally:  # the end is published even if a prompt could not be removed
            await self.publish_stored(stored)

    async def _store_end(self) -> Sequence[Entry]:
        """Store the pending end of the turn, and return its entries. If another process has changed or deleted the
        session, release the turn and return nothing."""
        try:
            stored = await self._append(self._pending.end, release=True)
        except (LeafMoved, SessionBusy, NoSuchSession) as error:
            logger.exception("Session %s was changed elsewhere during its turn", self.row.id)
            self._pending.refusal = error if isinstance(error, StoreError) else None
            self._others.have_taken_over = self._others.own is not None
            self._release()
            end, self._pending.end = self._pending.end, ()
            # Other processes wait for the end of this turn, unless the session was deleted.
            if self._others.own is not None and not isinstance(error, NoSuchSession):
                self._store.disown(self.row.id, leaf=self.leaf, turn=self.turn, end=end)
                with suppress(StoreError, NoSuchSession):
                    await self._store.open_session(self.row.id)  # this repairs the session: it ends the turn
            return ()
        self._pending.end = ()
        return stored

    async def try_to_settle(self) -> None:
        """Call `settle` if it has something to store, but only log a failure."""
        try:
            if not self.is_settled:
                await self.settle()
        except StoreError as error:
            logger.warning(
                "Session %s: could not store the end of the turn; crow will try again: %s", self.row.id, error
            )

    async def close(self) -> None:
        """Try once more to settle. If the end of the turn is still not stored, the store keeps it, and tries again when
        the session is opened next."""
        if not self.is_settled and time.monotonic() - self._pending.tried_at > 1:
            await self.try_to_settle()
        if self._pending.requests and not self._pending.end:
            await self._store_last_requests()
        if self._pending.end:
            end = (*self._pending.requests, *self._pending.end)
            self._store.disown(self.row.id, leaf=self.leaf, turn=self.turn, end=end)

    async def _store_last_requests(self) -> None:
        """Store the pending request entries under the session's current leaf, even if another process has moved that
        leaf."""
        try:
            try:
                await self.store_requests()
            except LeafMoved:  # another process continued the session
                self._stand_on(await self._store.tail(self.row.id))
                await self.store_requests()
        except (StoreError, NoSuchSession) as error:
            logger.warning("Session %s: the usage of a summary could not be stored: %s", self.row.id, error)

    async def change(self, changes: SessionChanges) -> None:
        """Change only the session's row."""
        async with self._lock:  # other methods that wait for the store replace the row, too
            self.row = await self._store.update_session(self.row.id, changes)

    async def change_rules(
        self, change: Callable[[Sequence[JsonObject]], Sequence[JsonObject]]
    ) -> tuple[JsonObject, ...]:
        """Call `change` with the stored permission rules of the session, store its result, and return it. Changes that
        begin at the same moment are made one after the other, so none is lost."""
        async with self._lock:
            row = await self._store.session(self.row.id)
            rules = tuple(change(row.permissions))
            if rules != row.permissions:
                row = await self._store.update_session(self.row.id, SessionChanges(permissions=rules))
            self.row = replace(self.row, permissions=row.permissions)
        return rules

    async def merge_metadata(self, patch: JsonObject) -> None:
        """Merge `patch` into the session's metadata. A member that is null in `patch` is removed.

        :raises ~crow.domain.errors.ArgumentError: the result is too large or too deep.
        """
        async with self._lock:
            row = await self._store.merge_metadata(self.row.id, patch)
            self.row = replace(self.row, metadata=row.metadata)

    async def move(self, to: int | None, reason: str) -> None:
        """Move the leaf to the entry `to` of the conversation, or before the first entry if `to` is None. `reason` is
        recorded."""
        async with self._lock:
            with anyio.CancelScope(shield=True):  # the leaf in memory must match the database
                await self._store.move_leaf(self.row.id, leaf=self.leaf, to=to, reason=reason)
                self._stand_on(await self._store.tail(self.row.id))

    async def save_draft(self, *, message_id: str, text: str, thought: str) -> None:
        """Save the next pieces of the answer that is being streamed, so that a crash does not lose them."""
        await self._store.save_draft(
            self.row.id, after_leaf=self.leaf, turn=self.turn, message_id=message_id, text=text, thought=thought
        )


def _settings_of(row: SessionRow) -> tuple[object, ...]:
    """Return the parts of a session's row that users set."""
    return row.title, row.mode, row.model, row.config, row.metadata, row.permissions, row.alias, row.archived
