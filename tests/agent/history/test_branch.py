"""Tests how a branch copes with deleted sessions, slow clients and a failing store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.agent.history.branch import Branch
from crow.domain.entries import Checkpoint, Entry, ModelRequest, NewEntry, Note, Reminder, Restore, TurnEnd
from crow.domain.errors import StoreUnavailable, StoreUnreachable
from crow.domain.events import EntryStored, Event
from crow.domain.messages import JsonObject, Text
from crow.store import NewSession, SessionChanges, SessionRow, Tail
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from crow.store.watching import News
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
    """A store whose server cannot be reached for the methods in `refused`. Each append sets them to
    `refused_after_append`."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: Sequence[str] = ()
        self.refused_after_append: Sequence[str] = ()
        self.gate: anyio.Event | None = None
        """The next read of a row takes until this is set."""
        self.is_held = anyio.Event()

    def _check(self, name: str) -> None:
        if name in self.refused:
            raise StoreUnreachable("The connection is broken.")

    async def drop_prompt(self, session_id: str, message_id: str, *, is_cancelled: bool = False) -> None:
        self._check("drop_prompt")

    async def append(self, session_id: str, **arguments: Any) -> tuple[Entry, ...]:
        stored = await super().append(session_id, **arguments)
        self.refused = self.refused_after_append
        return stored

    async def session(self, session_id: str) -> SessionRow:
        self._check("session")
        row = await super().session(session_id)
        gate, self.gate = self.gate, None
        if gate is not None:
            self.is_held.set()
            await gate.wait()
        return row

    async def tail(self, session_id: str) -> Tail:
        self._check("tail")
        return await super().tail(session_id)


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
    store.refused = store.refused_after_append = ("drop_prompt",)
    await branch.reject_prompt("waiting")
    await branch.end_turn(TurnEnd(stop="end_turn"))
    assert (len(client.stored(TurnEnd)), branch.claimed_to, branch.is_settled) == (1, None, False)
    store.refused = store.refused_after_append = ()
    await branch.settle()
    assert branch.is_settled


async def test_entries_are_published_although_the_row_cannot_be_read_after_they_were_stored() -> None:
    store, client = Unsteady(), NoteTaker()
    branch = Branch(store, client, store.create("s1"))
    store.refused_after_append = ("session", "tail")
    mode = NewEntry(body=Note(about="mode", value="plan"))
    config: JsonObject = {"auto_compact": False}
    await branch.record([mode], changes=SessionChanges(mode="plan", config=config))
    assert client.stored(Note) == [mode.body]
    assert (branch.row.mode, branch.row.config) == ("plan", config)
    await branch.end_turn(TurnEnd(stop="end_turn"))
    assert (len(client.stored(TurnEnd)), branch.is_settled) == (1, True)
    store.refused = store.refused_after_append = ()
    await store.update_session("s1", SessionChanges(title="Set elsewhere"))
    await branch.record([mode])
    assert branch.row == await store.session("s1")


async def test_the_path_is_read_by_the_next_turn_if_it_could_not_be_read_after_a_restore() -> None:
    store, client = Unsteady(), NoteTaker()
    store.create("s1")
    await Branch(store, client, await store.tail("s1")).record(NOTES)
    summary = NewEntry(body=Checkpoint(compaction_id="c", summary="so far", first_kept=None))
    await Branch(store, client, await store.tail("s1")).record([summary])
    branch = Branch(store, client, await store.tail("s1"))
    store.refused_after_append = ("tail",)
    await branch.record([NewEntry(body=Restore(entry=branch.entries[-1].id))])
    assert len(client.stored(Restore)) == 1
    store.refused = store.refused_after_append = ()
    assert not await branch.claim("m", parts=USER)
    assert tuple(branch.entries) == store.path("s1")


async def test_a_turn_whose_end_has_to_wait_too_long_fails_until_the_end_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("crow.agent.history.branch.END_S", 0.01)
    store, client = Unsteady(), NoteTaker()
    branch = Branch(store, client, store.create("s1"))
    await branch.claim("m", parts=USER)
    store.gate = gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(branch.refresh_cost)
        await store.is_held.wait()
        with pytest.raises(StoreUnavailable, match="Session s1: the end of the turn could not be stored"):
            await branch.end_turn(TurnEnd(stop="end_turn"))
        assert not branch.is_settled
        gate.set()
    await branch.settle()
    assert (len(client.stored(TurnEnd)), branch.is_settled) == (1, True)


async def test_metadata_that_is_set_while_the_branch_reads_its_row_stays_set() -> None:
    store = Unsteady()
    branch = Branch(store, NoteTaker(), store.create("s1"))
    branch.be_followed()
    renamed = await store.update_session("s1", SessionChanges(title="Set elsewhere"))
    news = News(row=renamed, entries=(), draft=None, is_elsewhere=False, is_orphaned=False, cancelled_turn=None)
    store.gate = gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(branch.follow, news)
        await store.is_held.wait()
        tasks.start_soon(branch.merge_metadata, {"color": "red"})
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert (branch.row.title, branch.row.metadata) == ("Set elsewhere", {"color": "red"})
