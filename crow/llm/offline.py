"""The built-in model: no network, no language model, the same answer every time.

Strategy: `rules` decides what to answer from the messages alone; this file streams it in small pieces, as a model
would, so that everything around it (drafts, cancelling, kills, compaction) can be seen and tested without an endpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType

import anyio
import anyio.lowlevel

from crow.domain.messages import Answer, ToolCall, Usage
from crow.domain.tokens import estimate_message, estimate_text, estimate_tools
from crow.llm import Delta, ModelInfo, Request, TextDelta, ThoughtDelta
from crow.llm.rules import Reply, reply_to

__all__ = ["OfflineModel"]

_WINDOW = 32_768
_PIECE = re.compile(r"\s*\S+\s?|\s+")


class OfflineModel:
    """See :class:`crow.llm.Model`. `piece_delay_s` is waited after each word, `slow_delay_s` after each number of a
    count; 0 only lets others run."""

    def __init__(
        self,
        *,
        context_window: int | None = None,
        piece_delay_s: float = 0.005,
        slow_delay_s: float = 0.05,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._info = ModelInfo(
            name="offline",
            endpoint="offline offline",
            context_window=context_window or _WINDOW,
            is_window_configured=context_window is not None,
            takes_images=False,
        )
        self._piece_delay_s = piece_delay_s
        self._slow_delay_s = slow_delay_s
        self._sleep = sleep

    @property
    def info(self) -> ModelInfo:
        """Fixed."""
        return self._info

    def check(self) -> None:
        """Nothing is needed."""

    def stream(self, request: Request) -> OfflineStream:
        """The reply to `request`, in pieces."""
        return OfflineStream(request, self._pause)

    async def close(self) -> None:
        """Nothing is open."""

    async def _pause(self, is_slow: bool) -> None:
        delay_s = self._slow_delay_s if is_slow else self._piece_delay_s
        if delay_s > 0:
            await self._sleep(delay_s)
        else:
            await anyio.lowlevel.checkpoint()


class OfflineStream:
    """See :class:`crow.llm.Stream`."""

    def __init__(self, request: Request, pause: Callable[[bool], Awaitable[None]]) -> None:
        self._request = request
        self._pause = pause
        self._text: list[str] = []
        self._thought: list[str] = []
        self._answer: Answer | None = None
        self._deltas = self._run()

    async def __aenter__(self) -> OfflineStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._deltas.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    @property
    def answer(self) -> Answer:
        """The whole answer. :raises RuntimeError: before the iteration ended."""
        if self._answer is None:
            raise RuntimeError("the answer is not whole yet")
        return self._answer

    def partial(self) -> Answer:
        """What was given out so far."""
        return Answer(text="".join(self._text), thought="".join(self._thought), finish="interrupted")

    async def _run(self) -> AsyncGenerator[Delta, None]:
        request = self._request
        offered = [tool.name for tool in request.tools]
        reply = reply_to(request.messages, offered, may_call=request.tool_choice == "auto")
        for piece in _PIECE.findall(reply.thought):
            self._thought.append(piece)
            yield ThoughtDelta(text=piece)
            await self._pause(False)
        pieces = _PIECE.findall(reply.text)
        most = request.max_output_tokens
        is_cut = most is not None and len(pieces) > most
        for piece in pieces[:most]:
            self._text.append(piece)
            yield TextDelta(text=piece)
            await self._pause(reply.is_slow)
        self._answer = _answer(request, reply, "".join(self._text), is_cut=is_cut)


def _answer(request: Request, reply: Reply, text: str, *, is_cut: bool) -> Answer:
    calls: tuple[ToolCall, ...] = ()
    if reply.call is not None and not is_cut:
        name, arguments = reply.call
        # Nine characters, and new with every message that came before.
        call_id = f"off{len(request.messages):06d}"
        calls = (ToolCall(id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=False)),)
    sent = sum(map(estimate_message, request.messages)) + estimate_tools(request.tools)
    made = estimate_text(text) + sum(estimate_text(call.arguments) for call in calls)
    return Answer(
        text=text,
        thought=reply.thought,
        calls=calls,
        finish="length" if is_cut else "tool_calls" if calls else "stop",
        usage=Usage(input_tokens=max(1, sent), output_tokens=max(1, made), cached_tokens=0),
    )
