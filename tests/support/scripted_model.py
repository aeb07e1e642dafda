"""A model that gives scripted answers and records its requests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from crow.domain.errors import ModelError
from crow.domain.messages import Answer, FinishReason, ToolCall, Usage
from crow.domain.tokens import estimate_text
from crow.llm import Attempt, Delta, ModelInfo, Request, TextDelta, ThoughtDelta

__all__ = ["Say", "ScriptedModel", "ScriptedStream", "call"]


def call(name: str, call_id: str = "c1", /, **arguments: object) -> ToolCall:
    """A tool call with these arguments."""
    return ToolCall(id=call_id, name=name, arguments=json.dumps(arguments))


@dataclass(frozen=True, kw_only=True)
class Say:
    """One answer: pieces of text, then calls. With `hold` it sets `reached` after the text and waits for `hold`; with
    `error` it then fails."""

    text: Sequence[str] = ()
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: ModelError | None = None
    hold: anyio.Event | None = None
    reached: anyio.Event = field(default_factory=anyio.Event)


class ScriptedStream:
    """See :class:`crow.llm.Stream`."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._given: list[str] = []
        self._answer: Answer | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        say = self._say
        if say.thought:
            yield ThoughtDelta(text=say.thought)
        for piece in say.text:
            self._given.append(piece)
            yield TextDelta(text=piece)
            await anyio.lowlevel.checkpoint()
        say.reached.set()
        if say.hold is not None:
            await say.hold.wait()
        if say.error is not None:
            raise say.error
        self._answer = Answer(
            text="".join(say.text),
            thought=say.thought,
            calls=say.calls,
            finish=say.finish or ("tool_calls" if say.calls else "stop"),
            usage=say.usage,
        )

    @property
    def answer(self) -> Answer:
        if self._answer is None:
            raise RuntimeError("the stream has not ended")
        return self._answer

    def partial(self) -> Answer:
        return Answer(text="".join(self._given), thought=self._say.thought, finish="interrupted")

    def attempts(self) -> tuple[Attempt, ...]:
        return (Attempt(usage=self._say.usage, output_tokens=estimate_text("".join(self._given))),)


class ScriptedModel:
    """Gives its answers in order; one request too many fails the test."""

    def __init__(self, *answers: Say, info: ModelInfo | None = None) -> None:
        self.requests: list[Request] = []
        self.closed_streams = 0
        self._answers = list(answers)
        self._info = info or ModelInfo(name="scripted", endpoint="test scripted", context_window=128_000)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def check(self) -> None:
        """Always ready."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[ScriptedStream]:
        self.requests.append(request)
        assert self._answers, f"request {len(self.requests)} is one more than the script has answers"
        try:
            yield ScriptedStream(self._answers.pop(0))
        finally:
            self.closed_streams += 1

    async def close(self) -> None:
        """Nothing to close."""
