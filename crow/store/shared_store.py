"""The methods of `Store` that are the same for both engines."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from crow.domain.errors import StoreUnavailable
from crow.store import Tail

logger = logging.getLogger(__name__)


class SharedStore(ABC):
    """Opens and deletes sessions, and keeps the ends of turns that could not be stored. Each abstract method is one
    transaction."""

    def __init__(self) -> None:
        self.on_stored: Callable[[str], object] = lambda _: None
        """Called with the id of a session after this store has stored entries of the session or has deleted the
        session."""
        self.unstored_ends: dict[str, Any] = {}
        """Maps each session whose turn `disown` gave up to the entries that could not be stored, in the form that the
        engine needs. The next `repair` or claim of the session stores these entries, or ends the turn without them. As
        soon as it has succeeded, `open_session` or `take_turn` removes them."""
        self._repair_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def repair_lock(self, session_id: str) -> asyncio.Lock:
        """Return the lock that `open_session` holds while it repairs a session, and `take_turn` while it claims a turn.

        A repair that ran before this store knows the result of a claim would take the new turn for the disowned one, or
        for one whose claim failed.
        """
        return self._repair_locks.setdefault(session_id, asyncio.Lock())

    @property
    @abstractmethod
    def is_read_only(self) -> bool:
        """Whether the database cannot be written now."""

    @abstractmethod
    async def tail(self, session_id: str) -> Tail:
        """See `LogStore.tail`."""

    @abstractmethod
    async def tail_without_repair(self, session_id: str) -> Tail | None:
        """Return what `LogStore.open_session` returns, or None if the session must be repaired first."""

    @abstractmethod
    async def repair(self, session_id: str) -> None:
        """Close the turn and the queued prompts that dead owners have left behind."""

    @abstractmethod
    async def record_opening(self, session_id: str) -> None:
        """If the session is empty, record that this store has opened it, so that `tidy` does not remove the session.

        :raises ~crow.domain.errors.NoSuchSession: another process has just removed the session.
        """

    @abstractmethod
    async def hide(self, session_id: str) -> None:
        """Mark a session and its subagents as deleted. An unknown id is ignored."""

    async def open_session(self, session_id: str) -> Tail:
        """See `LogStore.open_session`."""
        tail = await self.tail_without_repair(session_id)
        if tail is None and not self.is_read_only:
            try:
                async with self.repair_lock(session_id):
                    await self.repair(session_id)
                    self.on_stored(session_id)
                    self.unstored_ends.pop(session_id, None)
                tail = await self.tail_without_repair(session_id)
            except StoreUnavailable as error:  # for example a full disk: the session can still be read
                logger.warning("Session %s was opened without repair: %s", session_id, error)
        tail = tail or await self.tail(session_id)
        if tail.row.leaf is None and not self.is_read_only:
            try:
                await self.record_opening(session_id)
            except StoreUnavailable as error:
                logger.warning("Session %s is open, but crow could not record that: %s", session_id, error)
        return tail

    async def delete_session(self, session_id: str) -> None:
        """See `SessionStore.delete_session`."""
        await self.hide(session_id)
        self.on_stored(session_id)
