"""One request to an endpoint, from its sending to its whole answer.

An attempt reads bytes, and only single reads are timed; deltas of one read are handed on together. What is transient
is tried again, with jitter, as long as nothing of the answer was given out; afterwards it is raised, and `partial`
keeps what was shown.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import anyio

from crow.domain.errors import (
    AnswerTooLong,
    ModelError,
    ModelTimeout,
    NetworkError,
    Overloaded,
    ProtocolError,
    RateLimited,
)
from crow.domain.messages import Answer
from crow.llm import Delta, Request, Retrying
from crow.llm.endpoint import EndpointTimeouts
from crow.llm.errors import ErrorBody, Origin, page_title
from crow.llm.parser import Piece, StreamParser
from crow.llm.sse import MAX_EVENT_BYTES, EventTooLarge, SseDecoder

__all__ = ["MOST_ADAPTATIONS", "ChatStream", "Line", "Response", "RetryTiming", "retry_wait_s"]

MOST_TRIES = 4
MOST_ADAPTATIONS = 8
LONGEST_WAIT_S = 60.0
MOST_BYTES = 1_000_000_000
"""How much is read for one answer, whatever it holds: a server may send empty events for ever."""
_DRAIN_S = 0.02
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryTiming:
    """How retries wait: `sleep` takes seconds, `chance` gives numbers from 0 to 1."""

    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    chance: Callable[[], float] = random.random


class Response(Protocol):
    """The open body of a successful response."""

    async def read(self) -> bytes:
        """The next bytes, empty at the end. :raises ~crow.domain.errors.ModelError: the connection broke."""
        ...

    async def close(self) -> None:
        """Close the connection, unless the body was read to its end."""
        ...


class Line(Protocol):
    """The way to an endpoint."""

    @property
    def origin(self) -> Origin:
        """Who is asked."""
        ...

    @property
    def timeouts(self) -> EndpointTimeouts:
        """How long to wait."""
        ...

    async def send(self, request: Request) -> Response:
        """Send it; refusals that can be adapted to were. :raises ~crow.domain.errors.ModelError:"""
        ...

    async def adapted(self, request: Request, complaint: ErrorBody) -> bool:
        """Whether `request` will be sent in another form, now that the endpoint complained of it."""
        ...

    async def heard(self, answer: Answer) -> None:
        """The answer is whole."""
        ...

    async def failed(self, error: ModelError) -> None:
        """An attempt failed; its words are made fit to be shown."""
        ...


class ChatStream:
    """A running request; see :class:`crow.llm.Stream`. Entered and read by one task."""

    def __init__(self, line: Line, request: Request, *, pace: RetryTiming) -> None:
        self._line = line
        self._request = request
        self._pace = pace
        self._parser: StreamParser | None = None
        self._answer: Answer | None = None
        self._adaptations = 0
        self._deltas = self._run()

    async def __aenter__(self) -> ChatStream:
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
        return self._parser.partial() if self._parser is not None else Answer(finish="interrupted")

    async def _run(self) -> AsyncGenerator[Delta, None]:
        tries = 0
        while True:
            tries += 1
            self._parser = parser = StreamParser(self._request.tools, origin=self._line.origin)
            try:
                async with aclosing(self._attempt(parser)) as deltas:
                    async for delta in deltas:
                        yield delta
                answer = parser.finish()
            except ModelError as error:
                shown = parser.partial()
                if not (shown.text or shown.thought) and await self._adapted(parser):
                    tries -= 1
                    continue
                await self._line.failed(error)
                wait_s = retry_wait_s(error, tries, chance=self._pace.chance())
                if wait_s is None or shown.text or shown.thought:
                    for piece in parser.flush():
                        yield piece
                    raise
                reason = str(error)
            else:
                await self._line.heard(answer)
                self._answer = answer
                return
            yield Retrying(reason=reason, wait_s=wait_s)
            await self._pace.sleep(wait_s)

    async def _adapted(self, parser: StreamParser) -> bool:
        """Whether the error of a response that began well was a part of the request, which is now left out."""
        if parser.complaint is None or self._adaptations >= MOST_ADAPTATIONS:
            return False
        self._adaptations += 1
        return await self._line.adapted(self._request, parser.complaint)

    async def _attempt(self, parser: StreamParser) -> AsyncGenerator[Piece, None]:
        response = await self._send()
        try:
            decoder = SseDecoder()
            head: bytearray | None = bytearray()
            received = 0
            while not parser.is_done:
                data = await self._read(response, parser, is_first=head is not None)
                if not data:
                    break
                received += len(data)
                if received > MOST_BYTES:
                    raise AnswerTooLong(
                        f"{self._line.origin.endpoint} sent more than {MOST_BYTES:,} bytes for one answer, so it was "
                        "stopped there. Look at its log: it may be sending the same thing again and again."
                    )
                events = decoder.feed(data)
                if head is not None:
                    head = _longer(head, data) if not events else None
                for piece in parser.feed(events):
                    yield piece
            for piece in self._last(parser, decoder, head):
                yield piece
            if parser.is_done:
                await _drain(response)
        finally:
            # Cancelled or not, the endpoint must hear at once that nobody listens any more.
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await response.close()

    async def _send(self) -> Response:
        wait_s = self._line.timeouts.first_byte_s
        with anyio.move_on_after(wait_s):
            return await self._line.send(self._request)
        raise ModelTimeout(f"{self._line.origin.endpoint} did not answer within {wait_s:g} s.")

    async def _read(self, response: Response, parser: StreamParser, *, is_first: bool) -> bytes:
        """The next bytes, empty when nothing more will count. :raises ~crow.domain.errors.ModelError:"""
        timeouts = self._line.timeouts
        wait_s = timeouts.first_byte_s if is_first else timeouts.idle_s
        if parser.is_finished:
            wait_s = timeouts.grace_s
        try:
            with anyio.move_on_after(wait_s):
                return await response.read()
        except NetworkError:
            if not parser.is_finished:
                raise
            return b""
        if parser.is_finished:
            return b""
        raise ModelTimeout(f"{self._line.origin.endpoint} sent nothing for {wait_s:g} s; the answer was given up.")

    def _last(self, parser: StreamParser, decoder: SseDecoder, head: bytearray | None) -> list[Piece]:
        """The end of the bytes: an event without its blank line, or a body that was no stream at all."""
        events = decoder.finish()
        if head is not None and not events:
            return [*parser.feed(_unframed(bytes(head), self._line.origin)), *parser.flush()]
        # Half an event is no JSON: that the answer broke off is said by `finish`.
        with suppress(ProtocolError):
            return [*parser.feed(events), *parser.flush()]
        return parser.flush()


def retry_wait_s(error: ModelError, tries: int, *, chance: float) -> float | None:
    """Seconds to wait after the try number `tries`, None if the error is to be raised."""
    asked_s: float | None = None
    match error:
        case RateLimited(retry_after_s=asked) | Overloaded(retry_after_s=asked):
            asked_s, most = asked, MOST_TRIES
        case NetworkError():
            most = MOST_TRIES
        case ModelTimeout() | ProtocolError():
            most = 2
        case _:
            return None
    if tries >= most or (asked_s is not None and asked_s > LONGEST_WAIT_S):
        return None
    backoff_s = min(8.0, 0.5 * 2.0 ** (tries - 1)) * (0.75 + 0.5 * chance)
    return backoff_s if asked_s is None else asked_s + 0.25 * chance


def _longer(head: bytearray, data: bytes) -> bytearray:
    if len(head) + len(data) > MAX_EVENT_BYTES:
        raise EventTooLarge(
            f"The endpoint sent more than {MAX_EVENT_BYTES:,} bytes without one event, which is no chat completion. "
            "Check the base URL and the server's log."
        )
    head += data
    return head


def _unframed(body: bytes, origin: Origin) -> list[str]:
    """The JSON texts of a body that is no event stream: one completion, or one chunk a line.

    :raises ~crow.domain.errors.ProtocolError: it is none of them.
    """
    lines = body.decode("utf-8", "replace").removeprefix("\ufeff").splitlines()
    text = "\n".join(line for line in lines if not line.startswith(":")).strip()
    who = origin.endpoint
    if not text:
        raise ProtocolError(f"{who} answered with nothing at all. Look at its log; is the request too long for it?")
    title = page_title(text)
    if title is not None:
        raise ProtocolError(
            f'{who} answered with a web page ("{title}") instead of a chat completion. Check the base URL; it usually '
            "ends in /v1."
        )
    whole = [text] if _is_json(text) else [line for line in text.splitlines() if line.strip()]
    if not all(line.lstrip().startswith(("{", "[")) and _is_json(line) for line in whole):
        raise ProtocolError(f"{who} answered with something else than a chat completion: {text[:200]}")
    return whole


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


async def _drain(response: Response) -> None:
    """Read the end of the body, which mostly is there already: the connection can then be used again."""
    try:
        with anyio.move_on_after(_DRAIN_S):
            while await response.read():
                pass
    except NetworkError:
        return
