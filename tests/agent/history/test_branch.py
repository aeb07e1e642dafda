"""Tests how a branch copes with deleted sessions, slow clients and a failing store."""

from __future__ import annotations

from pathlib import Path

from crow.agent.history.branch import Branch
from crow.domain.entries import ModelRequest, NewEntry, TurnEnd
from crow.domain.messages import Text
from crow.store import NewSession
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker
from tests.support.postgres import new_database

SESSION = NewSession(id="s1", cwd="/repo", model="scripted", mode="ask")
USER = (Text(text="hello"),)
REQUEST = NewEntry(body=ModelRequest(purpose="summary"))


async def test_a_session_that_another_process_deletes_during_a_turn_settles() -> None:
    async with new_database() as url:
        store, other = await PostgresStore.open(url), await PostgresStore.open(url)
        try:
            await store.create_session(SESSION)
            branch = Branch(store, NoteTaker(), await store.open_session("s1"))
            branch.be_followed()
            await branch.claim("m", parts=USER)
            await other.delete_session("s1")
            await branch.end_turn(TurnEnd(stop="end_turn"))
            assert (branch.is_settled, branch.claimed_to) == (True, None)
            await branch.close()
        finally:
            await store.close()
            await other.close()


async def test_a_deleted_session_closes_though_usage_was_not_stored(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "crow.db")
    try:
        await store.create_session(SESSION)
        branch = Branch(store, NoteTaker(), await store.open_session("s1"))
        branch.store_with_next([REQUEST])
        await store.delete_session("s1")
        await branch.close()
    finally:
        await store.close()
