"""Reads the spending of sessions from the log, through the store's interface."""

from __future__ import annotations

from collections.abc import Iterable

from crow.domain.spending import RESULT_BYTES, Spending
from crow.store import Store
from crow.store.codec import KINDS


async def session_spending(store: Store, session_id: str) -> Spending:
    """Return what a session and its subagents spent, on all branches."""
    ids = [session_id, *(row.id for row in await store.subagents(session_id))]
    spending = Spending(sessions=frozenset(ids))
    await add_sessions(store, ids, spending)
    return spending


async def add_sessions(store: Store, ids: Iterable[str], spending: Spending) -> None:
    """Add the entries on all branches of these sessions, each entry once."""
    for session_id in ids:
        row = await store.session(session_id)
        moves = {move.to_leaf: move.reason for move in await store.moves(session_id)}
        spending.begin(moves)
        async for batch in store.history(session_id, result_bytes=lambda _: RESULT_BYTES):
            for entry in batch:
                spending.add(entry)
        for tip in (await store.outline(session_id)).tips:
            if not tip.is_current:
                spending.begin()
                for entry in await store.left_behind(tip.entry, row.leaf, KINDS.values()):
                    spending.add(entry)
    spending.finish()
