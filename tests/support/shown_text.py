"""Streams of bytes as a model, and checks that shown text is stored, replayed and sent back."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel

from crow.agent.turns.stream import AnswerDraft
from crow.domain.conversation import Projection
from crow.domain.entries import Assistant, Entry
from crow.domain.errors import CrowError, ModelError, NetworkError
from crow.domain.events import Event, TextShown, ThoughtShown
from crow.domain.messages import Answer, AssistantMessage, ToolSpec
from crow.domain.rendering import NO_ANSWER, interrupted_text
from crow.llm import ModelInfo, Request
from crow.llm.chat.encode import ChatEncoder as Encoder
from crow.llm.chat.parser import ChatParser
from crow.llm.dialect import Dialect
from crow.llm.endpoint import EndpointTimeouts
from crow.llm.errors import ErrorBody, Origin
from crow.llm.stream import AnswerStream, RetryTiming
from tests.agent.harness import NoteTaker, Opened, Tool, opened, text
from tests.support import fake_endpoint as fake
from tests.support.views import read_log, texts

__all__ = ["Stream", "check_draft", "check_session", "pieces_of"]

INFO = ModelInfo(name="streamed", endpoint="test streamed", context_window=400_000)
DONE = fake.sse(fake.chunk({"content": "Done."}), fake.chunk(finish="stop"))


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The pieces of one response. If `is_cut` is set, the connection breaks after them."""

    pieces: Sequence[bytes]
    is_cut: bool = False


class StreamBody:
    """See :class:`crow.llm.stream.ResponseBody`."""

    def __init__(self, stream: Stream) -> None:
        self._pieces = list(stream.pieces)
        self._is_cut = stream.is_cut

    async def read(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while self._pieces:
            if piece := self._pieces.pop(0):
                return piece
        if self._is_cut:
            raise NetworkError("The connection broke.")
        return b""

    async def close(self) -> None:
        """Nothing to close."""


class StreamTransport:
    """Answers with the given streams in order, then with `DONE`."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.tools: tuple[ToolSpec, ...] = ()
        self.timeouts = EndpointTimeouts()
        self.origin = Origin()

    async def send(self) -> StreamBody:
        return StreamBody(self.streams.pop(0) if self.streams else Stream(pieces=[DONE]))

    def sent(self) -> None:
        """No bytes are sent."""

    def parser(self) -> ChatParser:
        return ChatParser(self.tools, origin=self.origin)

    def adapt(self, body: ErrorBody) -> bool:
        return False

    async def accept(self) -> None:
        """Nothing is learned."""

    async def learn_from(self, answer: Answer) -> None:
        """Nothing is learned."""

    def redact(self, error: ModelError) -> None:
        """There are no secrets."""


class StreamedModel:
    """A model whose answers come from bytes. Its transport has `tools` in place of those of the request."""

    def __init__(self) -> None:
        self.info = INFO
        self.transport = StreamTransport()

    def check(self) -> None:
        """Always ready."""

    def stream(self, request: Request) -> AbstractAsyncContextManager[AnswerStream]:
        return aclosing(AnswerStream(self.transport, timing=RetryTiming(sleep=no_sleep)))

    async def close(self) -> None:
        """Nothing to close."""


async def no_sleep(_: float) -> None:
    await anyio.lowlevel.checkpoint()


class UnevenClient(NoteTaker):
    """A client that is sometimes slow. It cancels when it has been shown `cancel_after` more pieces."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.run: Opened | None = None
        self.cancel_after: int | None = None

    async def publish(self, event: Event) -> None:
        await super().publish(event)
        for _ in range(self.chance.choice([0, 0, 1, 5, 20])):
            await anyio.lowlevel.checkpoint()
        if self.cancel_after is not None and isinstance(event, (TextShown, ThoughtShown)):
            self.cancel_after -= 1
            if self.cancel_after < 0 and self.run is not None:
                self.cancel_after = None
                self.run.session.cancel()


def pieces_of(stream: bytes, chance: random.Random, most: int = 12) -> list[bytes]:
    """Cut a stream at random places."""
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(most)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def joined(events: Sequence[Event], kind: type[TextShown] | type[ThoughtShown]) -> dict[str, str]:
    """The text of all events of a kind, by message."""
    found: dict[str, str] = defaultdict(str)
    for event in events:
        if isinstance(event, kind):
            found[event.message_id] += event.text
    return dict(found)


async def check_session(
    directory: Path, streams: Sequence[tuple[bytes, tuple[ToolSpec, ...]]], chance: random.Random
) -> None:
    """Prompt a session once for each stream, and check after each turn that shown text is stored, replayed and sent
    back. Some streams break off and are continued, some turns are cancelled."""

    async def work(**_: object) -> str:
        return "ok"

    names = {tool.name for _, tools in streams for tool in tools}
    model, client = StreamedModel(), UnevenClient(chance)
    tools: Mapping[str, Tool] = {name: Tool("read", work) for name in sorted(names)}
    async with opened(directory, model, tools=tools, client=client, mode="auto") as run:
        client.run = run
        for stream, offered in streams:
            model.transport.tools = offered
            client.events.clear()
            client.cancel_after = chance.choice([None, None, 0, 1, 3])
            model.transport.streams = script(stream, chance)
            stop = "error"
            with suppress(CrowError):
                stop = await run.session.prompt(text("Go on."))
            if stop != "refusal":  # ACP drops a refused prompt, so its branch is left
                check_log(await run.log(), client.events)


def script(stream: bytes, chance: random.Random) -> list[Stream]:
    """The responses for one prompt: the stream, whole or cut, then perhaps one that continues or repeats it."""
    if chance.random() < 0.4:
        return [Stream(pieces=pieces_of(stream, chance))]
    at = chance.randrange(len(stream) + 1)
    rest = stream[stream.rfind(b"\n\n", 0, at) + 2 :] if chance.random() < 0.5 else stream
    first = Stream(pieces=pieces_of(stream[:at], chance), is_cut=True)
    return [first, Stream(pieces=pieces_of(rest, chance), is_cut=chance.random() < 0.2)]


def check_log(log: Sequence[Entry], events: Sequence[Event]) -> None:
    """What was shown in the newest turn is stored, and what is stored is replayed and sent back."""
    stored = {entry.body.message_id: entry.body for entry in log if isinstance(entry.body, Assistant)}
    live, thoughts = joined(events, TextShown), joined(events, ThoughtShown)
    assert live == {each: stored[each].text for each in live}
    assert thoughts == {each: stored[each].thought for each in thoughts}
    newest = {each.body.message_id for each in log if isinstance(each.body, Assistant) and each.turn == log[-1].turn}
    assert {each for each in newest if stored[each].text} == set(live)
    later = read_log(log)
    assert texts(later, "agent_thought_chunk") == {
        f"{each}_thought": body.thought for each, body in stored.items() if body.thought
    }
    replayed = texts(later)
    expected = {each: shown_later(body) for each, body in stored.items() if body.text.strip()}
    assert {each: text for each, text in replayed.items() if each in expected} == expected
    projection = Projection(log)  # without the entries that a compaction covers
    context = projection.context()
    sent = {
        origin: message.text
        for origin, message in zip(context.origins, context.messages, strict=True)
        if isinstance(message, AssistantMessage) and message.text not in ("", NO_ANSWER)
    }
    for message in context.messages[-4:]:
        if isinstance(message, AssistantMessage) and message.text.strip():
            (raw,) = Encoder().messages((message,), endpoint=INFO.endpoint, dialect=Dialect())
            assert json.loads(raw)["content"] == message.text
    kept = {entry.id: entry.body for entry in projection.entries if isinstance(entry.body, Assistant)}
    assert sent == {each: shown_later(body) for each, body in kept.items() if body.text.strip()}


def shown_later(body: Assistant) -> str:
    """The text of an answer in a replay and in later requests. An interrupted one says so."""
    return interrupted_text(body) if body.finish == "interrupted" else body.text


class DraftBranch:
    """What a draft needs of a branch."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def publish(self, event: Event) -> None:
        self.events.append(event)

    async def save_draft(self, *, message_id: str, text: str, thought: str) -> None:
        """Nothing is saved."""


async def check_draft(stream: Stream, tools: tuple[ToolSpec, ...], *, before: str = "") -> str:
    """Show one response. The shown text must be that of the answer, or of the draft if there is no answer. Return
    it."""
    model, branch = StreamedModel(), DraftBranch()
    model.transport.tools = tools
    model.transport.streams = [stream] * 4
    draft = AnswerDraft(branch, "m", before=before)  # type: ignore[arg-type]  # it has what a draft calls
    kept: tuple[str, str] | None = None
    request = Request(messages=())
    with suppress(ModelError):
        async with model.stream(request) as running:
            answer = await draft.follow(running)
            kept = (answer.text, answer.thought)
    shown = joined(branch.events, TextShown).get("m", ""), joined(branch.events, ThoughtShown).get("m", "")
    assert shown == (draft.text, draft.thought)
    assert kept in (None, shown)
    return shown[0]
