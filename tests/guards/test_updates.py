"""The number of updates of a stream: few for fast tokens, one each for slow ones."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from crow.agent.turns import stream as drafts
from crow.agent.turns.stream import AnswerDraft
from crow.domain.events import Event, TextShown
from crow.domain.messages import Answer
from crow.llm.chat.parser import ChatParser
from crow.llm.endpoint import EndpointTimeouts
from crow.llm.errors import ErrorBody, Origin
from crow.llm.stream import AnswerStream, RetryTiming
from tests.support.fake_endpoint import chunk, sse

TOKENS = 20_000
READ_BYTES = 16 * 1024


class Shown:
    """The parts of a branch that a draft needs."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.saves = 0
        self.shown = anyio.Event()

    async def publish(self, event: Event) -> None:
        assert isinstance(event, TextShown)
        self.pieces.append(event.text)
        self.shown.set()

    async def save_draft(self, **_: object) -> None:
        self.saves += 1


class Body:
    """A response body in reads as large as the client library's. With `gaps` it has one token per read, and each read
    waits until the last token was shown."""

    def __init__(self, reads: list[bytes], gaps: Shown | None) -> None:
        self._reads = iter(reads)
        self._gaps = gaps
        self._first = True

    async def read(self) -> bytes:
        if self._gaps is not None and not self._first:
            await self._gaps.shown.wait()
            self._gaps.shown = anyio.Event()
        self._first = False
        return next(self._reads, b"")

    async def close(self) -> None:
        """Nothing to close."""


class Way:
    """A connection to an endpoint that answers with `body`."""

    origin = Origin()
    timeouts = EndpointTimeouts()

    def __init__(self, body: Body) -> None:
        self._body = body

    async def send(self) -> Body:
        return self._body

    def sent(self) -> None:
        """No bytes are sent."""

    def parser(self) -> ChatParser:
        return ChatParser()

    def adapt(self, _complaint: ErrorBody) -> bool:
        return False

    async def accept(self) -> None:
        """Learns nothing."""

    async def learn_from(self, answer: Answer) -> None:
        """Learns nothing."""

    def redact(self, error: Exception) -> None:
        raise error


async def followed(reads: list[bytes], shown: Shown, *, gaps: bool = False) -> Answer:
    """The answer, after all of it was shown."""
    line = Way(Body(reads, shown if gaps else None))
    async with aclosing(AnswerStream(line, timing=RetryTiming())) as stream:
        return await AnswerDraft(shown, "m").follow(stream)  # type: ignore[arg-type]


def tokens(count: int) -> list[bytes]:
    return [sse(chunk({"content": f"t{number} "}), done=False) for number in range(count)]


END = sse(chunk(finish="stop"))


async def test_twenty_thousand_tokens_in_a_burst_become_few_updates_and_saves() -> None:
    stream = b"".join([*tokens(TOKENS), END])
    reads = [stream[at : at + READ_BYTES] for at in range(0, len(stream), READ_BYTES)]
    shown = Shown()
    answer = await followed(reads, shown)
    assert "".join(shown.pieces) == answer.text == "".join(f"t{number} " for number in range(TOKENS))
    assert len(shown.pieces) <= len(reads) / 2
    assert shown.saves <= 5


async def test_slow_tokens_become_one_update_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "_PIECE_WAIT_S", 0.0)
    shown = Shown()
    answer = await followed([*tokens(50), END], shown, gaps=True)
    assert shown.pieces == [f"t{number} " for number in range(50)]
    assert answer.text == "".join(shown.pieces)
