"""Reads the branches that a session has left."""

from __future__ import annotations

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
            left = await store.left_behind(move.from_leaf, row.leaf, KINDS.values())
            known |= {entry.id for entry in left} | {move.from_leaf}
            if left:
                yield left
