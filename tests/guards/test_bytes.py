"""A request encodes only messages that are new since the last one."""

from __future__ import annotations

from typing import Any

from crow.domain.conversation import Projection
from crow.domain.entries import Body, Entry, Prompt
from crow.domain.messages import Message, ToolSpec
from crow.llm import Request
from crow.llm.chat.encode import ChatEncoder as Encoder
from crow.llm.dialect import Dialect
from tests.guards.long import WORDS, turn

HERE = "test scripted"
TOOLS = (ToolSpec(name="look", description=WORDS, input_schema={"type": "object"}),)


class Conversation:
    """A growing projection and the encoder of its requests."""

    def __init__(self) -> None:
        self.projection = Projection()
        self.encoder = Encoder()
        self.sent: list[bytes] = []
        self.leaf = 0
        self.add(Prompt(system=WORDS, tools=TOOLS, cwd="/", model="m"))

    def add(self, body: Body) -> None:
        self.leaf += 1
        self.projection.add(
            Entry(id=self.leaf, conversation=1, session="s", parent=self.leaf - 1 or None, turn=1, body=body)
        )

    def request(self) -> int:
        """The number of bytes that the next request encodes."""
        sent = self.encoder.messages(self.projection.context().messages, endpoint=HERE, dialect=Dialect())
        fresh = sum(len(new) for new, old in zip(sent, self.sent, strict=False) if new is not old)
        fresh += sum(map(len, sent[len(self.sent) :]))
        self.sent = sent
        return fresh

    def take_turn(self) -> list[int]:
        """Add a turn with one call; the bytes encoded for each of its two requests."""
        user, asked, result, answer, end = turn(7, self.leaf)
        self.add(user)
        fresh = [self.request()]
        self.add(asked)
        self.add(result)
        fresh.append(self.request())
        self.add(answer)
        self.add(end)
        return fresh


def test_a_request_encodes_only_new_messages() -> None:
    conversation = Conversation()
    conversation.take_turn()
    early = conversation.take_turn()
    for _ in range(500):
        conversation.take_turn()
    late = conversation.take_turn()
    assert [abs(after - before) < 40 for before, after in zip(early, late, strict=True)] == [True, True], (early, late)
    assert sum(late) < 4 * len(WORDS) * 3
    assert len(conversation.sent) > 2_000


class Schema(dict[str, Any]):
    """Counts how often it was encoded."""

    encoded = 0

    def items(self) -> Any:
        self.encoded += 1
        return super().items()


def test_the_tools_are_encoded_once() -> None:
    schema = Schema(type="object")
    tools = (ToolSpec(name="look", description=WORDS, input_schema=schema),)
    conversation, messages = Conversation(), list[Message]()
    for _ in range(5):
        conversation.take_turn()
        messages = list(conversation.projection.context().messages)
        request = Request(messages=tuple(messages), tools=tools)
        conversation.encoder.body(request, model="m", endpoint=HERE, dialect=Dialect(), limit=None)
    assert schema.encoded == 1
