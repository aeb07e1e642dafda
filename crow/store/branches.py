"""Reads the branches of a session."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence

from crow.domain.entries import Entry
from crow.store import Store
from crow.store.codec import KINDS


async def left_branches(store: Store, session_id: str) -> AsyncIterator[Sequence[Entry]]:
    """Yield the branches that are not part of another one, newest first. A branch has the entries between the path to
    the session's leaf and its end, oldest first. Two branches may share entries."""
    row, known = await store.session(session_id), set[int | None]((None,))
    for move in await store.moves(session_id):
        if move.from_leaf not in known:
            left = await store.entries_beyond(move.from_leaf, row.leaf, KINDS.values())
            known |= {entry.id for entry in left} | {move.from_leaf}
            if left:
                yield left


async def own_entries(store: Store, session_id: str, *, result_bytes: int | None = None) -> AsyncIterator[Entry]:
    """Yield the entries that the session itself has stored, on all branches, in the order in which it stored them."""
    left: dict[int, Entry] = {}
    async for branch in left_branches(store, session_id):
        left |= {entry.id: entry for entry in branch if entry.session == session_id}
    waiting = deque(left[entry_id] for entry_id in sorted(left))
    async for batch in store.history(session_id, result_bytes=lambda _: result_bytes):
        for entry in batch:
            while waiting and waiting[0].id < entry.id:
                yield waiting.popleft()
            if entry.session == session_id:
                yield entry
    for entry in waiting:
        yield entry
