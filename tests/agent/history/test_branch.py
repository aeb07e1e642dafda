"""Tests how a branch copes with deleted sessions, slow clients and a failing store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from crow.agent.history.branch import Branch
from crow.domain.entries import ModelRequest, NewEntry, Reminder, TurnEnd
from crow.domain.errors import StoreUnreachable
from crow.domain.events import EntryStored, Event
from crow.domain.messages import Text
from crow.store import NewSession
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker
from tests.support.memory_store import MemoryStore
from tests.support.postgres import new_database

SESSION = NewSession(id="s1", cwd="/repo", model="scripted", mode="ask")
USER = (Text(text="hello"),)
NOTES = [NewEntry(body=Reminder(text=word)) for word in ("one", "two", "three")]
REQUEST = NewEntry(body=ModelRequest(purpose="summary"))


class SilentEditor(NoteTaker):
    """Does not read: each event is queued, and then there is never room again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = anyio.Event()

    async def publish(self, event: Event) -> None:
        await super().publish(event)
        if isinstance(event, EntryStored):
            self.is_full.set()
            await anyio.sleep_forever()

    def texts(self) -> list[str]:
        return [note.text for note in self.stored(Reminder)]


class Unsteady(MemoryStore):
    """A store whose server cannot be reached for the methods in `refused`."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: Sequence[str] = ()

    def _check(self, name: str) -> None:
        if name in self.refused:
            raise StoreUnreachable("The connection is broken.")

    async def drop_prompt(self, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        self._check("drop_prompt")


@asynccontextmanager
async def sqlite(directory: Path) -> AsyncIterator[SqliteStore]:
    """A store with the session `s1`."""
    store = await SqliteStore.open(directory / "crow.db")
    try:
        await store.create_session(SESSION)
        yield store
    finally:
        await store.close()


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
    async with sqlite(tmp_path) as store:
        branch = Branch(store, NoteTaker(), await store.open_session("s1"))
        branch.store_with_next([REQUEST])
        await store.delete_session("s1")
        await branch.close()


async def test_a_cancelled_record_publishes_everything_that_it_stored(tmp_path: Path) -> None:
    async with sqlite(tmp_path) as store:
        editor = SilentEditor()
        branch = Branch(store, editor, await store.open_session("s1"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(branch.record, NOTES)
            await editor.is_full.wait()
            tasks.cancel_scope.cancel()
        assert editor.texts() == ["one", "two", "three"]


async def test_the_end_of_a_turn_is_published_to_an_editor_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.agent.history.branch.END_S", 0.1)
    async with sqlite(tmp_path) as store:
        editor = SilentEditor()
        branch = Branch(store, editor, await store.open_session("s1"))
        await branch.claim("m", parts=USER)
        branch.store_at_end(NOTES)
        await branch.end_turn(TurnEnd(stop="end_turn"))
        assert (editor.texts(), len(editor.stored(TurnEnd))) == (["one", "two", "three"], 1)


async def test_a_turn_has_ended_although_a_prompt_could_not_be_removed() -> None:
    store, client = Unsteady(), NoteTaker()
    branch = Branch(store, client, store.create("s1"))
    await branch.claim("m", parts=USER)
    store.refused = ("drop_prompt",)
    await branch.reject_prompt("waiting")
    await branch.end_turn(TurnEnd(stop="end_turn"))
    assert (len(client.stored(TurnEnd)), branch.claimed_to, branch.is_settled) == (1, None, False)
    store.refused = ()
    await branch.settle()
    assert branch.is_settled
