"""Messages in the order that every endpoint accepts.

Strategy: rows grow at the end only; roles are made to alternate where they are pushed, and each call of a step is
answered where the step is rendered, so no caller can build an invalid request. Knows messages and ids, not entries.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from crow.domain.entries import CallRef
from crow.domain.messages import (
    AssistantMessage,
    Message,
    Part,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from crow.domain.rendering import EFFECTS_UNKNOWN, NO_ANSWER, NO_QUESTION, NOT_RUN
from crow.domain.tokens import estimate_message

__all__ = ["Rows", "Step"]

Openness: TypeAlias = Literal["closed", "words", "user"]
"""Whether the last message still takes parts: no, it holds crow's words only, or it holds a prompt."""


class Rows:
    """Messages that form a valid request at any time, each with its origin and estimate."""

    __slots__ = ("estimates", "messages", "openness", "origins", "turn")

    def __init__(self, system: SystemMessage) -> None:
        self.messages: list[Message] = [system]
        self.origins: list[int] = [0]
        self.estimates: list[int] = [estimate_message(system)]
        self.openness: Openness = "closed"
        self.turn = 0

    def copy(self) -> Rows:
        other = Rows.__new__(Rows)
        other.messages, other.origins, other.estimates = self.messages[:], self.origins[:], self.estimates[:]
        other.openness, other.turn = self.openness, self.turn
        return other

    def set_system(self, system: SystemMessage) -> None:
        self.messages[0], self.estimates[0] = system, estimate_message(system)

    def push(self, message: Message, origin: int) -> None:
        """Add a message, with a fixed line before it where the roles would not alternate."""
        last = self.messages[-1]
        if isinstance(message, UserMessage) and isinstance(last, UserMessage):
            self._append(AssistantMessage(text=NO_ANSWER), origin)
        elif isinstance(message, AssistantMessage) and isinstance(last, (SystemMessage, AssistantMessage)):
            self._append(UserMessage(parts=(Text(text=NO_QUESTION),)), origin)
        self._append(message, origin)
        self.openness = "closed"

    def say(self, parts: tuple[Part, ...], origin: int, turn: int, kind: Literal["words", "user"]) -> None:
        """Add to the user role: crow's words join a prompt of their turn, and a prompt joins words before it."""
        last = self.messages[-1]
        joins = self.openness == "words" or (self.openness == "user" and kind == "words" and turn == self.turn)
        if joins and isinstance(last, UserMessage):
            whole = UserMessage(parts=(*last.parts, *parts))
            self.messages[-1], self.estimates[-1] = whole, estimate_message(whole)
            kind = "user" if self.openness == "user" else kind
        else:
            self.push(UserMessage(parts=parts), origin)
        self.openness, self.turn = kind, turn

    def close(self) -> None:
        """Nothing may join the last message any more."""
        self.openness = "closed"

    def _append(self, message: Message, origin: int) -> None:
        self.messages.append(message)
        self.origins.append(origin)
        self.estimates.append(estimate_message(message))


class Step:
    """An assistant message whose results still come in, in any order."""

    __slots__ = ("calls", "entry", "results", "started", "words")

    def __init__(self, entry: int, calls: tuple[ToolCall, ...]) -> None:
        self.entry = entry
        self.calls = calls
        self.results: dict[int, tuple[int, ToolMessage]] = {}
        self.started: set[int] = set()
        self.words: list[tuple[Part, int, int]] = []

    def holds(self, call: CallRef) -> bool:
        return call.assistant == self.entry and 0 <= call.index < len(self.calls)

    def render_into(self, rows: Rows) -> None:
        """Every call answered in call order, then what crow said meanwhile."""
        for index, call in enumerate(self.calls):
            if index in self.results:
                origin, message = self.results[index]
            else:
                text = EFFECTS_UNKNOWN if index in self.started else NOT_RUN
                origin, message = self.entry, ToolMessage(call_id=call.id, text=text)
            rows.push(message, origin)
        for part, origin, turn in self.words:
            rows.say((part,), origin, turn, "words")
