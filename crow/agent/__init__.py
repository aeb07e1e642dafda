"""The agent: sessions, turns, compaction, the system message, permissions.

This file has what every part of the agent uses: the client as a protocol, its questions and answers, and new ids.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from crow.domain.entries import CallRef, NewEntry, Remark
from crow.domain.events import Elicitation, ElicitationAnswer, ElicitationKind, Event
from crow.tools import PlannedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionQuestion:
    """A question to the user: may an announced call run?"""

    call: CallRef
    name: str
    arguments: str
    plan: PlannedCall
    always: str
    """The calls that the answer "always allow" would cover, in words. If empty, that answer is not offered."""
    never: str = ""
    """The calls that the answer "always reject" would cover, in words. If empty, that answer is not offered."""
    reason: str = ""
    """Why crow asks. Empty if the mode and the call make that clear."""
    offers_writes: bool = False
    """The user may also allow all commands that are confined to `write` access."""
    below: str = ""
    """The folder below which the user may also let every change made by commands take effect. Empty if that answer is
    not offered."""
    registries: str = ""
    """The names of the project's package registries, all of which the user may also allow at once. Empty if that answer
    is not offered."""
    rule: str = ""
    """A rule that the user could add to the settings to allow the call. Empty if no rule can allow the call."""
    changes: str = ""
    """The changes that a server has made to its tool since the user allowed the tool, as a diff."""


PermissionAnswer: TypeAlias = Literal[
    "allow_once",
    "allow_always",
    "allow_writes",
    "allow_below",
    "allow_registries",
    "reject_once",
    "reject_always",
    "cancelled",
    "cannot_ask",
    "unanswered",
]


class Publisher(Protocol):
    """Receives the events of one session."""

    async def publish(self, event: Event) -> None:
        """Queue an event, and return when there is room for the next one. The event is queued before the first wait,
        so cancellation does not lose it. Raise no error if the editor has disconnected."""


class Client(Publisher, Protocol):
    """The connection of one session to the editor."""

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """Ask the user and return the answer. If the answer is invalid, return `reject_once`. If the editor fails,
        return `cannot_ask`. After a timeout, return `unanswered`."""

    @property
    def takes_notices(self) -> bool:
        """Whether the editor shows notices (`NoticeShown`). If it does not, crow stores notices in the history."""

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """The kinds of questions that `elicit` supports."""

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """Ask the user, without a time limit. If the editor fails or sends an invalid answer, return `cancel`."""

    async def finish_question(self, question_id: str) -> None:
        """Tell the editor that the page of a `UrlQuestion` is no longer needed."""

    @property
    def shows_subagents(self) -> bool:
        """Whether the editor shows each subagent as a session of its own."""

    def open_subagent(self, session_id: str) -> Client:
        """Return the client that the subagent `session_id` uses to reach the editor. Call this only if
        `shows_subagents` is true."""

    def close_subagent(self, session_id: str) -> None:
        """Forget a subagent whose work has ended."""


def new_session_id() -> str:
    """Return a random id for a session."""
    return f"crow-{secrets.token_hex(12)}"


def new_message_id() -> str:
    """Return a random id for a message. When a session is replayed, its messages keep their ids."""
    return f"msg_{secrets.token_hex(12)}"


def new_remark(text: str) -> NewEntry:
    """Return a history entry with a remark by crow. The user sees the remark; the model does not."""
    return NewEntry(body=Remark(text=text, message_id=new_message_id()))
