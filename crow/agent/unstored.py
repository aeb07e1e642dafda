"""The end of a turn that could not be stored when it came.

Every end is kept here first and let go when it is on disk. A disk that is full, or a database that another program
holds, therefore costs the prompt its answer and the session nothing: the end is tried again before the next claim, when
the session is loaded, and now and then while idle. A session that closes before that leaves it to the store, which
keeps it for whoever opens the session next in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import anyio

from crow.agent.branch import Branch
from crow.domain.entries import Entry, NewEntry
from crow.domain.errors import LeafMoved, NoSuchSession, SessionBusy, StoreError
from crow.domain.events import EntryStored
from crow.store import Store

__all__ = ["Unstored"]

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""How long to leave the store alone, while idle, before what it refused is tried again."""


class Unstored:
    """What the store still owes one session: the end of its last turn, and prompts that were answered by an error."""

    def __init__(self, store: Store, branch: Branch) -> None:
        self._store = store
        self._branch = branch
        self._end: tuple[NewEntry, ...] = ()
        self._unwanted: list[str] = []
        self._tried_at = 0.0
        self._settling = anyio.Lock(fast_acquire=True)

    def __bool__(self) -> bool:
        return bool(self._end or self._unwanted)

    def keep(self, end: Sequence[NewEntry]) -> None:
        """The running turn ends with these entries."""
        self._end = tuple(end)

    async def settle(self) -> None:
        """Store what is kept and give the turn back.

        :raises ~crow.domain.errors.StoreError: it still cannot be; it stays kept.
        """
        async with self._settling:
            self._tried_at = time.monotonic()
            stored: tuple[Entry, ...] = ()
            if self._end:
                try:
                    stored = await self._branch.store_only(self._end, release=True)
                except (LeafMoved, SessionBusy, NoSuchSession):
                    logger.exception("Session %s was changed by others during its turn", self._branch.row.id)
                self._end = ()
            while self._unwanted:
                await self._store.drop_prompt(self._branch.row.id, self._unwanted[0])
                del self._unwanted[0]
        for entry in stored:
            await self._branch.publish(EntryStored(entry=entry))

    async def settle_if_possible(self) -> None:
        """The same; what still cannot be stored stays kept."""
        try:
            await self.settle()
        except StoreError as error:
            logger.warning("Session %s: the end of a turn waits to be stored: %s", self._branch.row.id, error)

    async def drop_prompt(self, message_id: str) -> None:
        """Take a prompt out of the inbox, now or later: its sender was told that it does not run."""
        self._unwanted.append(message_id)
        if not self._end:
            await self.settle_if_possible()

    async def close(self) -> None:
        """The session closes: the last attempt, unless one has just failed."""
        if self and time.monotonic() - self._tried_at > 1:
            await self.settle_if_possible()
        if self._end:
            branch = self._branch
            self._store.disown(branch.row.id, leaf=branch.leaf, turn=branch.turn, end=self._end)
