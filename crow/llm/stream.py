"""One request to an endpoint, from sending it to its complete answer.

Until a part of the answer is shown, transient failures are retried after a randomised delay. From then on, every
failure is raised, and `partial` returns the text that was shown.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import anyio

from crow.domain import errors
from crow.domain.messages import Answer, SentRequest
from crow.llm import Attempt, Delta, Retrying
from crow.llm.endpoint import EndpointTimeouts
from crow.llm.errors import ErrorBody, Origin
from crow.llm.parser import AnswerParser, Piece
from crow.llm.sse import MAX_EVENT_BYTES, EventTooLarge, SseDecoder

MAX_ADAPTATIONS = 8
MAX_BYTES = 1_000_000_000
"""Limits the number of bytes read for one answer, because a server may send empty events forever."""
_MAX_TRIES = 4
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 60.0
_DRAIN_TIMEOUT_S = 0.02
_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryTiming:
    """The functions that time retries."""

    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    """Waits for a number of seconds."""
    chance: Callable[[], float] = random.random
    """Returns a random number from 0 to 1."""


class ResponseBody(Protocol):
    """The open body of a successful response."""

    async def read(self) -> bytes:
        """Return the next bytes, or no bytes at the end.

        :raises ~crow.domain.errors.ModelError: the connection broke.
        """

    async def close(self) -> None:
        """Close the connection. If the body was read to its end, the connection may be kept and used again."""


class RequestTransport(Protocol):
    """Sends one request to an endpoint, in several attempts if need be."""

    timeouts: EndpointTimeouts

    @property
    def origin(self) -> Origin:
        """The endpoint and model, as error messages name them."""

    async def send(self) -> ResponseBody:
        """Send the request without the parts that the endpoint refuses.

        :raises ~crow.domain.errors.ModelError: the request failed.
        """

    def sent(self) -> SentRequest | None:
        """Return the record of how the request was last sent, or None if nothing was sent. Making the record of a long
        request may take milliseconds, unless this was done while the model was thinking."""

    def parser(self) -> AnswerParser:
        """Return a new parser for the answer to the request as it was last sent."""

    def adapt(self, body: ErrorBody) -> bool:
        """Change the next attempt so that the error in `body` does not occur again: leave out the part that the error
        names, or lower the output limit. Return False if there is nothing to change."""

    async def accept(self) -> None:
        """Learn what the endpoint supports from the form in which it accepted the request."""

    async def learn_from(self, answer: Answer) -> None:
        """Learn facts about the endpoint from a complete answer. Includes `accept`."""

    def redact(self, error: errors.ModelError) -> None:
        """Remove secrets from the message of an error."""


class AnswerStream:
    """A running request; see :class:`crow.llm.Stream`. The task that reads it must also close it."""

    def __init__(self, transport: RequestTransport, *, timing: RetryTiming) -> None:
        self._transport = transport
        self._timing = timing
        self._parser = transport.parser()
        self._answer: Answer | None = None
        self._failed: list[Attempt] = []
        self._is_accepted = False
        self._deltas = self._run()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas

    async def aclose(self) -> None:
        """End the request and close its connection."""
        await self._deltas.aclose()

    @property
    def answer(self) -> Answer:
        """The whole answer.

        :raises RuntimeError: the iteration has not ended yet.
        """
        if self._answer is None:
            raise RuntimeError("the answer is not complete yet")
        return self._answer

    def partial(self) -> Answer:
        """Return the text and the thought that were yielded so far."""
        return self._parser.partial()

    def attempts(self) -> tuple[Attempt, ...]:
        """Return the attempts that the endpoint accepted. An attempt is left out if the endpoint sent nothing but an
        error for it."""
        if self._answer is not None:
            return (*self._failed, Attempt(usage=self._answer.usage, sent=self._transport.sent()))
        return (*self._failed, self._attempted()) if self._is_accepted else tuple(self._failed)

    def _attempted(self) -> Attempt:
        """Return the attempt whose answer was last read."""
        return replace(self._parser.attempt(), sent=self._transport.sent())

    def _end_attempt(self, error: errors.ModelError) -> None:
        """Count the failed attempt among `attempts`, unless the endpoint sent nothing but an error."""
        is_broken = isinstance(error, (errors.NetworkError, errors.ModelTimeout))
        if self._is_accepted and (is_broken or self._parser.has_begun):
            self._failed.append(self._attempted())
        self._is_accepted = False

    async def _run(self) -> AsyncGenerator[Delta, None]:
        tries = adaptations = 0
        while True:
            try:
                async with aclosing(self._attempt()) as deltas:
                    async for delta in deltas:
                        yield delta
                answer = self._parser.finish()
            except errors.ModelError as error:
                parser = self._parser
                partial = parser.partial()
                self._end_attempt(error)
                is_shown = bool(partial.text or partial.thought)
                # Even a response with a success status may contain an error that refuses a part of the request.
                if not is_shown and parser.error_body is not None and adaptations < MAX_ADAPTATIONS:
                    adaptations += 1
                    if self._transport.adapt(parser.error_body):
                        self._parser = self._transport.parser()
                        continue
                tries += 1
                self._transport.redact(error)
                wait_s = _retry_wait_s(error, tries, chance=self._timing.chance())
                if wait_s is None or is_shown:
                    if is_shown:
                        await self._transport.accept()
                    for piece in parser.flush():
                        yield piece
                    raise
                reason = str(error)
            else:
                await self._transport.learn_from(answer)
                self._answer = answer
                return
            self._parser = self._transport.parser()
            yield Retrying(reason=reason, wait_s=wait_s)
            await self._timing.sleep(wait_s)

    async def _attempt(self) -> AsyncGenerator[Piece, None]:
        who, first_byte_s = self._transport.origin.endpoint, self._transport.timeouts.first_byte_s
        response: ResponseBody | None = None
        with anyio.move_on_after(first_byte_s):
            response = await self._transport.send()
        if response is None:
            raise errors.ModelTimeout(f"{who} did not answer within {first_byte_s:g} s.")
        self._is_accepted = True
        # `send` may have changed the wire of the request.
        self._parser = parser = self._transport.parser()
        try:
            decoder = SseDecoder(parser.kind)
            head: bytearray | None = bytearray()  # the bytes before the first event
            received = 0
            while not parser.is_done:
                if not (data := await self._read(response, parser)):
                    break
                received += len(data)
                if received > MAX_BYTES:
                    raise errors.AnswerTooLong(
                        f"{who} sent more than {MAX_BYTES:,} bytes for one answer, so crow stopped reading. Check "
                        "the server's log: the model may be repeating itself."
                    )
                events = decoder.feed(data)
                if head is not None and not events:
                    head += data
                    if len(head) > MAX_EVENT_BYTES:
                        raise EventTooLarge(parser.kind)
                else:
                    head = None
                for piece in parser.feed(events):
                    yield piece
            for piece in self._last(parser, decoder, head):
                yield piece
            if parser.is_done:
                # The rest of the body has usually arrived already. Reading it allows the connection to be used again.
                # The answer is complete, so a fault in the rest does not matter.
                with suppress(errors.ModelError), anyio.move_on_after(_DRAIN_TIMEOUT_S):
                    while await response.read():
                        pass
        finally:
            # Close at once, also on cancellation, so that the endpoint stops generating.
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await response.close()

    async def _read(self, response: ResponseBody, parser: AnswerParser) -> bytes:
        """Return the next bytes, or no bytes if nothing more is expected.

        :raises ~crow.domain.errors.ModelError: the connection broke, or nothing arrived in time.
        """
        timeouts = self._transport.timeouts
        # Some endpoints send an event at once, and then nothing while the model thinks.
        wait_s = timeouts.idle_s if parser.has_content else timeouts.first_byte_s
        if parser.is_finished:
            with suppress(errors.ModelError), anyio.move_on_after(timeouts.grace_s):
                return await response.read()
            return b""
        with anyio.move_on_after(wait_s):
            return await response.read()
        who = self._transport.origin.endpoint
        raise errors.ModelTimeout(f"{who} sent nothing for {wait_s:g} s, so the answer was abandoned.")

    def _last(self, parser: AnswerParser, decoder: SseDecoder, head: bytearray | None) -> list[Piece]:
        """Return the pieces at the end of the body: those of an event without its final blank line, or those of a whole
        body that is not an event stream. `head` contains the bytes before the first event. It is None if an event has
        arrived."""
        events = decoder.finish()
        if head is not None and not events:
            # The bytes are split, because `str.splitlines` also splits at U+2028, which a JSON string may contain.
            lines = (line for line in head.splitlines() if not line.startswith(b":"))
            text = b"\n".join(lines).strip().decode("utf-8", "replace")
            if not text:
                who = self._transport.origin.endpoint
                raise errors.ProtocolError(
                    f"{who} sent an empty response. Check the server's log: the request may be too long."
                )
            return [*parser.feed([text]), *parser.flush()]
        # An incomplete event is not valid JSON. The error is dropped here: `finish` reports that the answer broke off.
        with suppress(errors.ProtocolError):
            return [*parser.feed(events), *parser.flush()]
        return parser.flush()


def _retry_wait_s(error: errors.ModelError, tries: int, *, chance: float) -> float | None:
    """Return the seconds to wait after attempt number `tries`, or None if the error must be raised."""
    asked_s: float | None = None
    max_tries = _MAX_TRIES
    match error:
        case errors.RateLimited() | errors.Overloaded():
            asked_s = error.retry_after_s
        case errors.NetworkError():
            pass
        case errors.ModelTimeout() | errors.ProtocolError():
            max_tries = 2
        case _:
            return None
    if tries >= max_tries or (asked_s is not None and asked_s > _MAX_WAIT_S):
        return None
    backoff_s = min(8.0, _FIRST_WAIT_S * 2.0 ** (tries - 1)) * (0.75 + 0.5 * chance)
    return backoff_s if asked_s is None else asked_s + 0.25 * chance
