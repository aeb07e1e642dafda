"""Stores a receipt with the end of each turn that changed files."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from crow.agent import new_message_id
from crow.agent.history.branch import Branch
from crow.agent.subagents.subagents import Subagents
from crow.agent.turns.adapters import SessionSettings
from crow.domain.entries import Assistant, Custom, Entry, NewEntry
from crow.domain.errors import StoreError
from crow.domain.receipts import KINDS, NAMESPACE, receipt_of
from crow.domain.text import quote
from crow.store import Store

logger = logging.getLogger(__name__)

_READ_S = 2.0
"""If reading the log takes longer than this many seconds, the turn gets no receipt."""


class TurnReceipts:
    """Makes the receipts of a session's turns. `begin` must be called when a turn begins."""

    def __init__(self, branch: Branch, store: Store, subagents: Subagents) -> None:
        self._branch = branch
        self._store = store
        self._subagents = subagents
        self._since = branch.leaf or 0
        """The id of the newest entry at the end of the last turn that ran calls. Subagents may have stored entries
        since then."""
        self._began = self._since
        """The id of the newest entry when the turn began."""

    def begin(self) -> None:
        """Remember the newest entry, because the turn's own entries come after it."""
        self._began = self._branch.leaf or 0

    async def of_turn(self, settings: SessionSettings) -> tuple[NewEntry, ...]:
        """Return the entry with the turn's receipt. Return nothing if the turn changed no files, or if the log cannot
        be read now."""
        since, self._since = self._since, self._branch.leaf or 0
        try:
            with anyio.move_on_after(_READ_S, shield=True) as scope:
                own = await self._own_entries()
                others = await self._entries_of_subagents(own, since)
        except StoreError as error:
            logger.warning("Session %s: no receipt, because the log cannot be read: %s", self._branch.row.id, error)
            return ()
        if scope.cancelled_caught:
            return ()
        running = [
            f"the subagent {quote(each.branch.row.title or task_id)} still runs"
            for task_id, each in self._subagents.running.items()
        ]
        receipt = receipt_of((*own, *others), cwd=self._branch.row.cwd, named=settings.checks, running=running)
        if receipt is None:
            return ()
        body = Custom(
            namespace=NAMESPACE,
            text=receipt.text,
            is_shown=settings.shows_receipts,
            message_id=new_message_id(),
            data=receipt.as_json(),
        )
        return (NewEntry(body=body),)

    async def _own_entries(self) -> Sequence[Entry]:
        """Return the entries of the turn. After a compaction in the turn, only the store still has all of them."""
        entries = self._branch.entries
        if entries and entries[0].id <= self._began:
            return self._branch.projection.entries_after(self._began)
        return await self._store.entries_beyond(self._branch.leaf, self._began, KINDS)

    async def _entries_of_subagents(self, own: Sequence[Entry], since: int) -> Sequence[Entry]:
        """Return the entries after the entry `since` that subagents have stored."""
        answers = (entry.body for entry in own if isinstance(entry.body, Assistant))
        if not self._subagents.running and not any(call.name == "task" for answer in answers for call in answer.calls):
            return ()
        found: list[Entry] = []
        for row in await self._store.subagents(self._branch.row.id):
            if (row.leaf or 0) > since:
                found += await self._store.entries_beyond(row.leaf, None, KINDS)
        return [entry for entry in found if entry.id > since]
