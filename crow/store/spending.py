"""Reads the spending of sessions from the log, through the store's interface."""

from __future__ import annotations

from collections.abc import Iterable

from crow.domain.spending import RESULT_BYTES, Spending
from crow.store import Store
from crow.store.branches import left_branches


async def session_spending(store: Store, session_id: str) -> Spending:
    """Return what a session and its subagents spent, on all branches."""
    spending = Spending()
    await add_session(store, session_id, spending)
    return spending


async def add_session(store: Store, session_id: str, spending: Spending) -> None:
    """Add the entries that a session and its subagents have stored, on all branches."""
    ids = [session_id, *(row.id for row in await store.subagents(session_id))]
    spending.sessions = frozenset(ids)
    await add_sessions(store, ids, spending)


async def add_sessions(store: Store, ids: Iterable[str], spending: Spending) -> None:
    """Add the entries on all branches of these sessions, each entry once."""
    for session_id in ids:
        moves = reversed(await store.moves(session_id))  # oldest first, so that the last move to an entry counts
        spending.begin({move.to_leaf: move.reason for move in moves})
        async for batch in store.history(session_id, result_bytes=lambda _: RESULT_BYTES):
            for entry in batch:
                spending.add(entry)
        async for left in left_branches(store, session_id):
            spending.begin()
            for entry in left:
                spending.add(entry)
    spending.finish()
