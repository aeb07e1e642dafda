"""The branch a session stands on: its tail in memory, and the only way to add to it.

Strategy: entries are recorded first (one transaction, compare-and-set on the leaf, under one lock), then added to the
projection, then published; so whatever the client or the model hears of is on disk. Loaded once, extended by the same
function that stores. Knows neither the protocol nor SQL.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from crow.agent import Client
from crow.domain.conversation import Context, Projection
from crow.domain.entries import Entry, NewEntry, PlanItem, Prompt, User
from crow.domain.events import EntryStored, Event
from crow.domain.messages import Part, Text
from crow.store import SessionChanges, SessionRow, Store, Tail, TurnStart

__all__ = ["Branch"]


class Branch:
    """A session's path, from the newest counting checkpoint to the leaf."""

    def __init__(self, store: Store, client: Client, tail: Tail) -> None:
        self._store = store
        self._client = client
        self._lock = anyio.Lock(fast_acquire=True)
        self.turn = 0
        self._stand_on(tail)

    def _stand_on(self, tail: Tail) -> None:
        self.row: SessionRow = tail.row
        self.leaf = tail.row.leaf
        """The entry the session stands on, whose tail is in memory, wherever others may have moved the stored one."""
        self._projection = Projection(tail.entries)

    @property
    def entries(self) -> Sequence[Entry]:
        """The tail, oldest first; not to be changed."""
        return self._projection.entries

    def context(self) -> Context:
        """What the model would see now."""
        return self._projection.context()

    @property
    def projection(self) -> Projection:
        """What the model sees, and what is in force; not to be changed."""
        return self._projection

    @property
    def prompt(self) -> Prompt | None:
        """The prompt entry in force."""
        return self._projection.prompt

    @property
    def plan(self) -> tuple[PlanItem, ...]:
        """The newest plan."""
        return self._projection.plan

    def newest_user(self) -> Entry | None:
        """The newest prompt that is in memory."""
        return next((entry for entry in reversed(self.entries) if isinstance(entry.body, User)), None)

    def newest_user_text(self) -> str:
        """The text of the newest prompt; "" if there is none."""
        entry = self.newest_user()
        if entry is None or not isinstance(entry.body, User):
            return ""
        return "\n".join(part.text for part in entry.body.parts if isinstance(part, Text))

    async def publish(self, event: Event) -> None:
        """Tell the client."""
        await self._client.publish(event)

    async def record(
        self, entries: Sequence[NewEntry], *, changes: SessionChanges | None = None, release: bool = False
    ) -> tuple[Entry, ...]:
        """Store `entries` under the leaf, then tell the client. See :meth:`crow.store.Store.append` for errors.

        `release` gives the turn back.
        """
        stored = await self.store_only(entries, changes=changes, release=release)
        for entry in stored:
            await self.publish(EntryStored(entry=entry))
        return stored

    async def store_only(
        self, entries: Sequence[NewEntry], *, changes: SessionChanges | None = None, release: bool = False
    ) -> tuple[Entry, ...]:
        """Store `entries` under the leaf without telling the client."""
        async with self._lock:
            with anyio.CancelScope(shield=True):  # what the log holds and what is known of it stay the same
                stored = await self._store.append(
                    self.row.id,
                    leaf=self.leaf,
                    turn=self.turn,
                    entries=entries,
                    changes=changes,
                    release=release,
                )
                self._extend(stored)
                if not self._projection.complete:  # a restore needs entries that were not kept in memory
                    self._stand_on(await self._store.tail(self.row.id))
                if changes is not None:
                    self.row = await self._store.session(self.row.id)
            return stored

    async def claim(
        self, message_id: str | None, *, parts: Sequence[Part] | None = None, cut: int | None = None
    ) -> TurnStart:
        """Take the turn; a leaf that others moved is followed. See :meth:`crow.store.Store.take_turn`."""
        async with self._lock:
            start = await self._store.take_turn(self.row.id, message_id, parts=parts, leaf=self.leaf, cut=cut)
            self.turn = start.turn
            if start.moved:
                self._stand_on(await self._store.tail(self.row.id))
            else:
                self._extend(start.entries)
            return start

    async def change(self, changes: SessionChanges) -> None:
        """Touch the session's row only."""
        self.row = await self._store.update_session(self.row.id, changes)

    async def move(self, to: int | None, reason: str) -> None:
        """Stand on another entry of the conversation (None: before all), recorded under `reason`."""
        async with self._lock:
            with anyio.CancelScope(shield=True):  # where the store stands is where this stands
                await self._store.move_leaf(self.row.id, leaf=self.leaf, to=to, reason=reason)
                self._stand_on(await self._store.tail(self.row.id))

    async def step_back(self) -> None:
        """Move the leaf before the turn that just ended; its entries stay in the log as a branch of their own."""
        first = next((entry for entry in self.entries if entry.turn == self.turn), None)
        if first is not None:
            await self.move(first.parent, "refusal")

    async def save_draft(self, *, message_id: str, text: str, thought: str) -> None:
        """Keep a piece of the running stream."""
        await self._store.save_draft(
            self.row.id, after_leaf=self.leaf, turn=self.turn, message_id=message_id, text=text, thought=thought
        )

    def _extend(self, stored: Sequence[Entry]) -> None:
        for entry in stored:
            self._projection.add(entry)
        if stored:
            self.leaf = stored[-1].id
