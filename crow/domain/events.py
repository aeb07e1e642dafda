"""Events of a session, for its clients, and questions to the user.

When an `EntryStored` event is sent, its entry is already on disk. The other events are not stored. The frontend turns
events into protocol updates. A replay of the stored entries gives the same updates, except for notices and the like,
which are not part of the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.entries import Announcement, CallRef, Entry, PlanItem, StopReason
from crow.domain.messages import JsonObject, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStored:
    """An entry is on disk."""

    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShown:
    """A piece of the answer's text."""

    message_id: str
    """The assistant entry that is stored at the end of the answer has the same message id."""
    offset: int
    """The number of characters of the answer's text before this piece."""
    text: str
    after: int | None = None
    """The id of the session's newest entry when this piece was shown. Set by :class:`crow.agent.feed.Feed`, so that a
    client that joins later gets pieces and entries in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtShown:
    """A piece of the model's reasoning."""

    message_id: str
    offset: int
    """The number of characters of the reasoning before this piece."""
    text: str
    after: int | None = None
    """The id of the session's newest entry when this piece was shown. Set by :class:`crow.agent.feed.Feed`, so that a
    client that joins later gets pieces and entries in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnnounced:
    """A call is about to run, and the client may show it. The answer with the call is already stored."""

    call: CallRef
    name: str
    arguments: str
    """A JSON object as text."""
    announcement: Announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProgressed:
    """A running call has new output."""

    call: CallRef
    text: str
    """The whole output so far, not an addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """An announced call ended without a stored result: it was cancelled or not run."""

    call: CallRef
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMeasured:
    """The size of the context and the cost of the session so far."""

    used: int
    """The number of tokens in use."""
    size: int
    """The size of the context window in tokens."""
    cost: float | None = None
    """In US dollars. None if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionChanged:
    """A compaction began or ended."""

    compaction_id: str
    status: Literal["in_progress", "completed", "failed", "cancelled"]
    detail: str = ""
    """The summary, or the reason for a failure."""
    is_command: bool = False
    """Whether a slash command asked for the compaction. The command's answer then says how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryShown:
    """A piece of the summary that a compaction is writing."""

    compaction_id: str
    text: str
    """If empty, discard the pieces so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeShown:
    """A message for the user that is not part of the history, for example about a retry or a slow server."""

    severity: Literal["info", "warning", "error"]
    title: str
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged:
    """The session moved to another entry, which may have another plan. A plan that a tool call changes is part of the
    call's stored result."""

    plan: tuple[PlanItem, ...]
    """The plan at that entry. Empty if the entry has no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TitleChanged:
    """The session has a new title. None clears it."""

    title: str | None


SessionChange: TypeAlias = Literal["created", "renamed", "archived", "unarchived", "deleted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionListChanged:
    """The list of the user's sessions has changed. Every client of the user gets this event through one of the sessions
    that it has open."""

    session_id: str
    """The session that was created or changed."""
    change: SessionChange
    title: str | None = None
    """The title of that session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChanged:
    """The session has a new permission mode."""

    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsChanged:
    """A config option changed. The frontend then sends the complete list of options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandsChanged:
    """The list of slash commands changed. The frontend then sends the complete list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentChanged:
    """A subagent of this session was announced, or its state has changed."""

    session_id: str
    title: str | None = None
    """Set if this event announces the subagent."""
    state: Literal["running", "requires_action", "idle", "unknown"] | None = None
    """None if the state did not change."""
    stop: str = ""
    """Why an idle subagent stopped: a stop reason of the protocol, or `interrupted`, or `error`, or empty if
    unknown."""
    detail: str = ""
    """The error message."""
    usage: Usage | None = None
    """The token counts of the subagent's last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentLinked:
    """The running call with this id is carried out by a subagent."""

    call_id: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMessage:
    """A message from one session to another. The client shows the message in one of these two sessions or in both, with
    the same message id."""

    message_id: str
    sender: str
    """The id of the session that sends the message."""
    recipient: str
    """The id of the session that gets the message."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBegan:
    """A turn began, here or in another process."""

    message_id: str
    """The message id of the turn's prompt. Empty if it is unknown."""
    stored: Entry | None = None
    """The entry of the prompt. None if it is not stored yet: a command is stored when its turn ends, and a prompt to
    which servers add content is stored once they have done so."""
    typed: str | None = None
    """The slash command that the user typed, or None if the prompt is not a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """A turn ended, here or in another process."""

    message_id: str
    """The message id of the turn's prompt. Empty if it is unknown."""
    stop: StopReason = "end_turn"
    """Why the turn ended, if it did not fail."""
    error: Exception | None = None
    """Why the turn failed, or None."""


TurnEvent: TypeAlias = (
    TurnBegan | TurnEnded | EntryStored | TextShown | ThoughtShown | CallAnnounced | CallProgressed | CallEnded
)
ContextEvent: TypeAlias = ContextMeasured | CompactionChanged | SummaryShown
SettingEvent: TypeAlias = ModeChanged | OptionsChanged | CommandsChanged
SessionEvent: TypeAlias = NoticeShown | PlanChanged | TitleChanged | SessionListChanged | SettingEvent
SubagentEvent: TypeAlias = SubagentChanged | SubagentLinked | SessionMessage
Event: TypeAlias = TurnEvent | ContextEvent | SessionEvent | SubagentEvent

ElicitationKind: TypeAlias = Literal["form", "url"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuestion:
    """A form for the user to fill in. Never ask for secrets in a form; use a `UrlQuestion`."""

    message: str
    schema: JsonObject
    """A flat JSON Schema object."""
    call: CallRef | None = None
    """The running call that asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlQuestion:
    """A page for the user to visit."""

    message: str
    url: str
    id: str
    """Passed to `Client.finish_question` when the page is no longer needed."""
    call: CallRef | None = None


Elicitation: TypeAlias = FormQuestion | UrlQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class ElicitationAnswer:
    """The user's answer."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, str | int | float | bool | list[str]] = field(default_factory=dict)
    """The values of an accepted form."""
