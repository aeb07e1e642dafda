"""A store that refuses writes for a while: the session recovers and loses nothing that was shown."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import anyio
import pytest

from crow.domain.entries import Assistant, NewEntry, Note, TurnEnd
from crow.domain.errors import LeafMoved, StoreUnavailable
from crow.domain.events import EntryStored, Event
from crow.store import Tail
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker, Opened, opened, text
from tests.support.scripted_model import Say, ScriptedModel

LOCKED = r"crow\.db is locked by another program"


@contextmanager
def locked(run: Opened) -> Iterator[None]:
    """Another program holds the database; the store waits for it a moment only."""
    database = run.store.database
    database.lock_timeout.timeout_s = 0.01
    with closing(sqlite3.connect(database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def shown_and_saved(run: Opened, words: str) -> None:
    """Wait until the client was shown these words, and the draft holds the first of them."""
    drafted = "SELECT count(*) FROM drafts"
    while run.client.shown() != words or (  # noqa: ASYNC110
        await run.store.database.read(lambda sql: sql.execute(drafted).fetchone()) == (0,)
    ):
        await anyio.sleep(0.001)


async def state(run: Opened) -> str:
    return (await run.store.session("s1")).state


async def ends(run: Opened) -> list[tuple[str, str]]:
    """Every answer with how it finished, every turn's end with why."""
    found = []
    for entry in await run.log():
        match entry.body:
            case Assistant(text=words, finish=finish):
                found.append((words, str(finish)))
            case TurnEnd(stop=stop):
                found.append(("end", stop))
            case _:
                pass
    return found


async def test_an_end_that_the_store_refused_is_stored_before_the_next_turn(tmp_path: Path) -> None:
    hold = anyio.Event()
    say = Say(text=["shown ", "all of it"], hold=hold)
    async with opened(tmp_path, ScriptedModel(say, Say(text=["on it goes"]))) as run:

        async def fail() -> None:
            with pytest.raises(StoreUnavailable, match=LOCKED):
                await run.session.prompt(text("first"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await shown_and_saved(run, "".join(say.text))
            with locked(run):
                hold.set()
                while run.session.busy:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                with pytest.raises(StoreUnavailable, match=LOCKED):
                    await run.session.prompt(text("too early"))
                assert await state(run) == "running"
        assert await run.session.prompt(text("second")) == "end_turn"
        assert await ends(run) == [
            ("shown all of it", "stop"),
            ("end", "error"),
            ("on it goes", "stop"),
            ("end", "end_turn"),
        ]
        assert await run.kinds() == ["User", "Assistant", "TurnEnd", "User", "Assistant", "TurnEnd"]


async def test_a_turn_can_be_cancelled_while_the_store_refuses_everything(tmp_path: Path) -> None:
    say = Say(text=["shown"], hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(say, Say(text=["on it goes"]))) as run:
        answers: list[str] = []

        async def prompt() -> None:
            answers.append(await run.session.prompt(text("first")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await shown_and_saved(run, "".join(say.text))
            with locked(run):
                run.session.cancel()
                while not answers:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
        assert answers == ["cancelled"]
        assert await run.session.prompt(text("second")) == "end_turn"
        assert (await ends(run))[:2] == [("shown", "interrupted"), ("end", "cancelled")]


async def test_a_refused_end_is_stored_while_the_session_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crow.agent.sessions.session.RETRY_S", 0.01)
    say = Say(text=["shown"], hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(say)) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("first"))
            await shown_and_saved(run, "".join(say.text))
            with locked(run):
                run.session.cancel()
                while run.session.busy:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
        while await state(run) != "idle":  # noqa: ASYNC110
            await anyio.sleep(0.001)
        assert await ends(run) == [("shown", "interrupted"), ("end", "cancelled")]


async def test_a_refused_end_of_a_closed_session_is_stored_when_it_is_opened_again(
    tmp_path: Path,
) -> None:
    say = Say(text=["shown"], hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(say)) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("first"))
            await shown_and_saved(run, "".join(say.text))
            with locked(run):
                await run.session.close()
                assert (
                    await run.store.open_session("s1")
                ).row.state == "running"  # it opens, though nothing can be stored
        tail = await run.store.open_session("s1")
        assert tail.row.state == "idle"
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]
        assert await ends(run) == [("shown", "interrupted"), ("end", "cancelled")]
        assert await run.store.open_session("s1") == tail


async def test_the_last_shown_text_survives_a_close_before_the_store_took_it(
    tmp_path: Path,
) -> None:
    hold = anyio.Event()
    say = Say(text=["shown ", "and never saved as a draft"], hold=hold)
    async with opened(tmp_path, ScriptedModel(say)) as run:

        async def fail() -> None:
            with pytest.raises(StoreUnavailable, match=LOCKED):
                await run.session.prompt(text("first"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await shown_and_saved(run, "".join(say.text))
            with locked(run):
                hold.set()
                while run.session.busy:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                await run.session.close()
        tail = await run.store.open_session("s1")
        assert await ends(run) == [("shown and never saved as a draft", "stop"), ("end", "error")]
        start = await run.store.take_turn("s1", None, leaf=tail.row.leaf)
        assert (start.moved, start.entries) == (False, ())


async def test_a_turn_that_was_claimed_but_cannot_be_read_is_ended_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["answered"]))) as run:
        async with closing_store(run) as other:  # another process adds an entry
            row = await other.session("s1")
            await other.append("s1", leaf=row.leaf, turn=0, entries=[NewEntry(body=Note(about="label", value="x"))])

        async def unreadable(session_id: str) -> Tail:
            raise StoreUnavailable("The disk cannot be read.")

        with monkeypatch.context() as patch:
            patch.setattr(run.store, "tail", unreadable)
            with pytest.raises(StoreUnavailable, match="cannot be read"):
                await run.session.prompt(text("first"))
        assert await run.session.prompt(text("second")) == "end_turn"
        assert await ends(run) == [("end", "interrupted"), ("answered", "stop"), ("end", "end_turn")]


async def test_a_prompt_whose_end_is_not_stored_since_another_process_moved_the_session_fails(tmp_path: Path) -> None:
    class Mover(NoteTaker):
        async def publish(self, event: Event) -> None:
            await super().publish(event)
            if isinstance(event, EntryStored) and isinstance(event.entry.body, Assistant):
                with closing(sqlite3.connect(run.store.database.path, isolation_level=None)) as other:
                    other.execute("UPDATE sessions SET leaf = NULL")

    async with opened(tmp_path, ScriptedModel(Say(text=["shown"])), client=Mover()) as run:
        with pytest.raises(LeafMoved, match="Another process changed session s1"):
            await run.session.prompt(text("first"))


@asynccontextmanager
async def closing_store(run: Opened) -> AsyncIterator[SqliteStore]:
    """Another store of the same database."""
    store = await SqliteStore.open(run.store.database.path)
    try:
        yield store
    finally:
        await store.close()
