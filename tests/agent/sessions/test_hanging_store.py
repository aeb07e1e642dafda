"""A database that does not answer for a while: requests are answered in time, and nothing that was stored is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.domain.entries import Assistant, ToolResult, TurnEnd
from crow.domain.errors import StoreUnavailable
from crow.domain.events import EntryStored, Event, TurnEnded
from tests.agent.harness import NoteTaker, Tool, opened, text
from tests.support.postgres import Wire, new_database
from tests.support.scripted_model import Say, ScriptedModel, call


@dataclass(frozen=True)
class Place:
    """A database that can hang."""

    url: str
    """Empty for an SQLite file."""
    hang: Callable[[], None]
    """From now on, it does not answer."""
    recover: Callable[[], None]


@pytest.fixture(params=["sqlite", "postgres"])
async def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    def wait_at_most(seconds: float) -> None:
        monkeypatch.setattr("crow.agent.sessions.prompt_turn.END_S", seconds)

    async with _on_postgres() if request.param == "postgres" else _on_sqlite(monkeypatch) as made:

        def hang() -> None:
            wait_at_most(0.05)
            made.hang()

        def recover() -> None:
            wait_at_most(600)
            made.recover()

        yield Place(made.url, hang, recover)
        made.recover()


@asynccontextmanager
async def _on_postgres() -> AsyncIterator[Place]:
    async with new_database() as url, Wire.open(url) as wire:
        yield Place(wire.url, lambda: wire.hold(new=True), wire.release)


@asynccontextmanager
async def _on_sqlite(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """The file system answers no question about the file of the database."""
    answers = threading.Event()
    answers.set()
    stat = os.stat

    def slow_stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("crow.db"):
            answers.wait()
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", slow_stat)
    yield Place("", answers.clear, answers.set)


class EndsNoted(NoteTaker):
    """Notes how each turn ended, and runs `on_answer` when an answer is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[str] = []
        self.on_answer: Callable[[], None] = lambda: None

    async def publish(self, event: Event) -> None:
        await super().publish(event)
        if isinstance(event, TurnEnded):
            self.ends.append("error" if event.error else event.stop)
        if isinstance(event, EntryStored) and isinstance(event.entry.body, Assistant):
            self.on_answer()


async def test_cancelled_prompts_are_answered_while_the_database_hangs_and_end_when_it_answers(
    tmp_path: Path, place: Place
) -> None:
    held, hangs = anyio.Event(), anyio.Event()

    async def look() -> str:
        place.hang()
        hangs.set()
        return "seen"

    tools = {"look": Tool("read", look)}
    say = Say(calls=(call("look"),), hold=held)
    model, client = ScriptedModel(say, Say(text=["again"])), EndsNoted()
    async with opened(tmp_path, model, tools=tools, client=client, database_url=place.url) as run:
        answers: list[str] = []

        async def prompt(words: str) -> None:
            answers.append(await run.session.prompt(text(words)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt, "first")
            await say.reached.wait()
            tasks.start_soon(prompt, "behind it")
            while not await run.store.queued("s1"):  # noqa: ASYNC110
                await anyio.sleep(0.001)
            held.set()
            await hangs.wait()
            await anyio.wait_all_tasks_blocked()  # the result is being stored
            run.session.cancel()
        assert (answers, client.ends) == (["cancelled", "cancelled"], ["cancelled"])
        with pytest.raises(StoreUnavailable, match="The last turn of session s1 has not ended yet"):
            await run.session.prompt(text("too early"))
        place.recover()
        while run.session.is_running:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        assert await run.session.prompt(text("second")) == "end_turn"
        stored = [entry.body for entry in await run.log()]
        assert [body.text for body in stored if isinstance(body, ToolResult)] == ["seen"]
        assert [body.stop for body in stored if isinstance(body, TurnEnd)] == ["cancelled", "cancelled", "end_turn"]
        assert client.ends == ["cancelled", "cancelled", "end_turn"]


async def test_a_turn_whose_end_the_database_holds_up_fails_with_words_and_ends_when_it_answers(
    tmp_path: Path, place: Place
) -> None:
    model, client = ScriptedModel(Say(text=["done"]), Say(text=["again"])), EndsNoted()
    async with opened(tmp_path, model, client=client, database_url=place.url) as run:
        client.on_answer = place.hang
        with pytest.raises(StoreUnavailable, match="Crow ends it as soon as the database answers"):
            await run.session.prompt(text("first"))
        assert client.ends == ["error"]
        client.on_answer = lambda: None
        place.recover()
        while run.session.is_running:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        assert await run.session.prompt(text("second")) == "end_turn"
        stored = [entry.body for entry in await run.log()]
        assert [body.stop for body in stored if isinstance(body, TurnEnd)] == ["end_turn", "end_turn"]


async def test_a_prompt_is_answered_when_it_is_cancelled_while_its_turn_waits_for_the_database(
    tmp_path: Path, place: Place
) -> None:
    async with opened(tmp_path, ScriptedModel(Say(text=["again"])), database_url=place.url) as run:
        place.hang()
        answers: list[str] = []

        async def prompt() -> None:
            answers.append(await run.session.prompt(text("first")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prompt)
            await anyio.wait_all_tasks_blocked()
            run.session.cancel()
        assert answers == ["cancelled"]
        place.recover()
        while run.session.is_running:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        assert await run.session.prompt(text("second")) == "end_turn"
        stored = [entry.body for entry in await run.log()]
        assert [body.stop for body in stored if isinstance(body, TurnEnd)] == ["cancelled", "end_turn"]
