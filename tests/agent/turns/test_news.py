"""The model is told each thing exactly once, even if the store refuses it or the turn is cancelled meanwhile."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from crow.agent.history.branch import Branch
from crow.agent.turns.inbox import Inbox
from crow.agent.turns.news import News
from crow.agent.turns.prompt import Briefing
from crow.domain.entries import Body, Custom, Entry, Reminder, User
from crow.domain.errors import StoreUnavailable
from crow.domain.events import Event
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore
from tests.agent.harness import NoteTaker, text
from tests.support.memory_store import MemoryStore

STEERED = User(parts=text("and this"), message_id="m2")
STEERED_LATER = User(parts=text("and that"), message_id="m3")


class CancellingClient(NoteTaker):
    """Cancels `scope` when it gets an event, before it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = anyio.CancelScope()

    async def publish(self, event: Event) -> None:
        self.scope.cancel()
        await super().publish(event)
        await anyio.lowlevel.checkpoint()


def bodies(entries: tuple[Entry, ...], kind: type[Body]) -> list[Body]:
    return [entry.body for entry in entries if isinstance(entry.body, kind)]


async def test_a_steered_prompt_that_the_store_refused_is_stored_with_the_end_of_the_turn() -> None:
    store = MemoryStore()
    branch = Branch(store, NoteTaker(), store.create("s1"))
    news = News(branch, Briefing(branch), None)
    news.steer(STEERED)
    store.fails = StoreUnavailable("crow.db is locked by another program")
    with pytest.raises(StoreUnavailable):
        await news.deliver()
    assert [new.body for new in news.take_steered()] == [STEERED]


async def test_steered_prompts_are_stored_and_told_once_if_the_turn_is_cancelled_while_clients_are_told() -> None:
    store, client = MemoryStore(), CancellingClient()
    branch = Branch(store, client, store.create("s1"))
    news = News(branch, Briefing(branch), None)
    news.steer(STEERED)
    news.steer(STEERED_LATER)
    with client.scope:
        await news.deliver()
    assert bodies(store.path("s1"), User) == client.stored(User) == [STEERED, STEERED_LATER]
    assert news.take_steered() == []


async def test_a_reminder_that_the_store_refused_is_due_again() -> None:
    store = MemoryStore()
    branch = Branch(store, NoteTaker(), store.create("s1"))
    briefing = Briefing(branch)
    briefing.learn({"date": "Monday"})
    news = News(branch, briefing, None)
    store.fails = StoreUnavailable("crow.db is locked by another program")
    with pytest.raises(StoreUnavailable):
        await news.remind()
    store.fails = None
    await news.remind()
    await news.remind()
    assert len(bodies(store.path("s1"), Reminder)) == 1


async def test_the_end_of_background_work_is_told_once_if_the_turn_is_cancelled_meanwhile(tmp_path: Path) -> None:
    store, client = await SqliteStore.open(tmp_path / "crow.db"), CancellingClient()
    try:
        await store.create_session(NewSession(id="s1", cwd=str(tmp_path), model="m", mode="ask"))
        branch = Branch(store, client, await store.open_session("s1"))
        async with anyio.create_task_group() as tasks:
            inbox = Inbox(branch, store, (), tasks=tasks, has_turn=lambda: True)
            await inbox.add("call_1_0", "It has ended.", title="Ended")
            with client.scope:
                await inbox.deliver()
            assert not inbox.has_news
            await inbox.deliver()
        told = [entry.body async for batch in store.history("s1") for entry in batch]
        assert [body.text for body in told if isinstance(body, Custom)] == ["It has ended."]
    finally:
        await store.close()
