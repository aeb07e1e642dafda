"""A cancel at any moment stores one end with exactly the text that was shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from crow.agent.sessions.session import Session
from crow.agent.turns import stream as draft
from crow.domain.entries import Assistant, TurnEnd
from crow.domain.errors import AuthError, CrowError, ModelError, NetworkError
from crow.domain.events import Event, ThoughtShown
from crow.domain.messages import ToolCall
from crow.llm import Delta, Request, TextDelta, ThoughtDelta
from tests.agent.harness import NoteTaker, Opened, Tool, opened, text
from tests.support.amounts import some
from tests.support.scripted_model import Say, ScriptedModel, ScriptedStream, call

AT_ONCE = -1
"""Cancel just before the stream goes on."""


class SlowClient(NoteTaker):
    """An editor that makes whoever tells it something wait."""

    async def publish(self, event: Event) -> None:
        await super().publish(event)
        await passes(3)


async def passes(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def cancelled_prompt(run: Opened, say: Say, *, after: int) -> str:
    """Prompt, let the stream go on when it holds, and cancel `after` passes of the event loop later: how it ended."""
    assert say.hold is not None
    ended: list[str] = []

    async def prompt() -> None:
        try:
            ended.append(await run.session.prompt(text("Hi")))
        except CrowError:
            ended.append("error")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prompt)
        await say.reached.wait()
        if after == AT_ONCE:
            run.session.cancel()
        say.hold.set()
        await passes(after)
        run.session.cancel()
    return ended[0]


async def quickly() -> str:
    return "done"


@pytest.mark.long
@pytest.mark.parametrize("client", [NoteTaker, SlowClient])
@pytest.mark.parametrize(
    "error", [None, NetworkError("The connection broke."), AuthError("The key is wrong.")], ids=["whole", "broke", "no"]
)
@pytest.mark.parametrize("calls", [(), (call("look"),)], ids=["text", "calls"])
async def test_a_cancel_at_any_moment_stores_the_shown_text_once_and_answers_like_the_stored_end(
    tmp_path: Path, client: type[NoteTaker], error: ModelError | None, calls: tuple[ToolCall, ...]
) -> None:
    moments = range(AT_ONCE, 24, 2) if client is NoteTaker else range(0, 24, 2)
    for after in some(moments, 3, first=(len(calls) + (error is not None)) % 3):
        say = Say(text=["some ", "words"], thought="hm", calls=calls, error=error, hold=anyio.Event())
        model = ScriptedModel(say, Say(text=["more"]), Say(text=["more"]))
        directory = tmp_path / str(after)
        directory.mkdir()
        async with opened(directory, model, tools={"look": Tool("read", quickly)}, client=client()) as run:
            answered = await cancelled_prompt(run, say, after=after)
            bodies = [entry.body for entry in await run.log()]
            ends = [body for body in bodies if isinstance(body, TurnEnd)]
            said = [body for body in bodies if isinstance(body, Assistant)]
            thoughts = "".join(event.text for event in run.client.events if isinstance(event, ThoughtShown))
        assert [end.stop for end in ends] == [answered], after
        assert "".join(body.text for body in said) == run.client.shown(), after
        assert "".join(body.thought for body in said) == thoughts, after
        assert len({body.message_id for body in said}) == len(said), after


@pytest.mark.parametrize("goes_on", ["ends", "breaks"])
async def test_a_stream_that_ends_at_the_moment_of_the_cancel_is_cancelled(tmp_path: Path, goes_on: str) -> None:
    error = NetworkError("The connection broke.") if goes_on == "breaks" else None
    say = Say(text=["some words"], error=error, hold=anyio.Event())
    async with opened(tmp_path, ScriptedModel(say)) as run:
        assert await cancelled_prompt(run, say, after=0) == "cancelled"
        assert await run.kinds() == ["User", "Assistant", "TurnEnd"]


class SlowToClose(ScriptedModel):
    """Its connection takes until `let_go` to be closed."""

    def __init__(self, *answers: Say) -> None:
        super().__init__(*answers)
        self.let_go = anyio.Event()

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        async with super().stream(request) as stream:
            try:
                yield stream
            finally:
                with anyio.CancelScope(shield=True):
                    await self.let_go.wait()


@pytest.mark.parametrize("closes", [False, True], ids=["cancel", "close"])
async def test_a_cancelled_turn_is_stored_while_its_connection_closes(tmp_path: Path, closes: bool) -> None:
    say = Say(text=["some ", "words"], hold=anyio.Event())
    model = SlowToClose(say)
    answers: list[str] = []

    async def prompt(session: Session) -> None:
        answers.append(await session.prompt(text("Hi")))

    async with opened(tmp_path, model) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(prompt, run.session)
        await say.reached.wait()
        while run.client.shown() != "some words":
            await anyio.lowlevel.checkpoint()
        if closes:
            tasks.start_soon(run.session.close)
        else:
            run.session.cancel()
            run.session.cancel()
        try:
            with anyio.fail_after(60):
                while not run.client.stored(TurnEnd):
                    await anyio.lowlevel.checkpoint()
            await passes(20)
            assert answers == []
            assert await run.kinds() == ["User", "Assistant", "TurnEnd"]
            assert (await run.store.session("s1")).state == "idle"
        finally:
            model.let_go.set()
    assert answers == ["cancelled"]


class InHand(ScriptedModel):
    """Has shown a first piece; the next one is there when the event is set."""

    def __init__(self, event: anyio.Event) -> None:
        super().__init__()
        self.event = event

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        yield StreamInHand(self.event)


class StreamInHand(ScriptedStream):
    def __init__(self, event: anyio.Event) -> None:
        super().__init__(Say())
        self.event = event

    async def __aiter__(self) -> AsyncIterator[Delta]:
        yield ThoughtDelta(text="hm")
        yield TextDelta(text="some ")
        await self.event.wait()
        yield ThoughtDelta(text="well")
        yield TextDelta(text="words")
        await anyio.sleep_forever()


async def test_text_read_at_the_moment_of_the_cancel_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in what is being stored."""
    monkeypatch.setattr(draft, "_PIECE_WAIT_S", 0.0)
    event = anyio.Event()
    async with opened(tmp_path, InHand(event)) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.session.prompt, text("Hi"))
            while run.client.shown() != "some ":
                await anyio.lowlevel.checkpoint()
            event.set()
            run.session.cancel()
        said = [entry.body for entry in await run.log() if isinstance(entry.body, Assistant)]
        thoughts = "".join(event.text for event in run.client.events if isinstance(event, ThoughtShown))
    assert [(body.text, body.thought) for body in said] == [(run.client.shown(), thoughts)] == [("some ", "hm")]
