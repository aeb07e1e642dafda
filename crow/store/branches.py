"""Reads the branches of a session."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence

from crow.domain.entries import Entry
from crow.store import Store
from crow.store.codec import KINDS


async def left_branches(store: Store, session_id: str) -> AsyncIterator[Sequence[Entry]]:
    """Yield the branches that the session has left. The branch with the newest end comes first. A branch has the
    entries that are on the path to the branch's end but not on the path to the session's leaf, oldest first. No branch
    is the beginning of another, but two branches may share their first entries."""
    row, known = await store.session(session_id), set[int]()
    ends = {move.from_leaf for move in await store.moves(session_id) if move.from_leaf is not None}
    for end in sorted(ends, reverse=True):  # so an end in the middle of a branch comes after that branch
        if end not in known:
            branch = await store.entries_beyond(end, row.leaf, KINDS.values())
            known.update(entry.id for entry in branch)
            if branch:
                yield branch


async def own_entries(store: Store, session_id: str, *, result_bytes: int | None = None) -> AsyncIterator[Entry]:
    """Yield the entries that the session itself has stored, on all branches, in the order in which it stored them.
    Entries of the session from which it was forked are left out. For `result_bytes`, see `LogStore.history`; results on
    branches that the session has left always come whole."""
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
