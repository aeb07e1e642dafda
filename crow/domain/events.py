"""What happens in a session, as it is told to the client.

Strategy: an event is durable (`EntryStored`: it is in the log already) or passing (everything else: a delta, a
progress). The frontend turns each into protocol updates; replay turns stored entries into the same updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.entries import Announcement, CallRef, Entry, PlanItem
from crow.domain.messages import JsonObject

__all__ = [
    "CallAnnounced",
    "CallEnded",
    "CallProgressed",
    "CommandsChanged",
    "CompactionChanged",
    "ContextMeasured",
    "Elicitation",
    "ElicitationAnswer",
    "ElicitationKind",
    "EntryStored",
    "Event",
    "FormQuestion",
    "ModeChanged",
    "NoticeShown",
    "OptionsChanged",
    "PlanChanged",
    "SummaryShown",
    "TextShown",
    "ThoughtShown",
    "TitleChanged",
    "UrlQuestion",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStored:
    """An entry is on disk."""

    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShown:
    """A piece of the answer; `message_id` is that of the assistant entry to come."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtShown:
    """A piece of the model's reasoning."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnnounced:
    """A call of the step just stored is pending; `arguments` is the JSON text of an object."""

    call: CallRef
    name: str
    arguments: str
    announcement: Announcement


@dataclass(frozen=True, slots=True, kw_only=True)
class CallProgressed:
    """Output of a running call so far: `text` is the whole retained output, not an addition."""

    call: CallRef
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """An announced call ended without a stored result: cancelled, not run."""

    call: CallRef
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMeasured:
    """How full the context is, in tokens, and what the session cost so far (USD, None if unknown)."""

    used: int
    size: int
    cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionChanged:
    """A compaction began or ended. `detail`: the summary when completed, the reason when failed."""

    compaction_id: str
    status: Literal["in_progress", "completed", "failed", "cancelled"]
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryShown:
    """A piece of the summary that a compaction is writing; empty: what was shown of it so far does not count."""

    compaction_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeShown:
    """Something the user should know now, not part of the history (a retry, a slow server)."""

    severity: Literal["info", "warning", "error"]
    title: str
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged:
    """The plan is another because the session stands elsewhere now; empty: there is none."""

    plan: tuple[PlanItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TitleChanged:
    """The session's title; None clears it."""

    title: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChanged:
    """The permission mode."""

    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionsChanged:
    """A config option changed; the frontend sends the complete list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandsChanged:
    """The list of slash commands changed; the frontend sends the complete list."""


Event: TypeAlias = (
    EntryStored
    | TextShown
    | ThoughtShown
    | CallAnnounced
    | CallProgressed
    | CallEnded
    | ContextMeasured
    | CompactionChanged
    | SummaryShown
    | NoticeShown
    | PlanChanged
    | TitleChanged
    | ModeChanged
    | OptionsChanged
    | CommandsChanged
)


# FROM domain.elicitation: A question to the user beyond a yes or no, asked by a tool server or by crow, and its
# answer.
#
# Strategy: a form or an address to visit; the answer is accepted with values, declined, or dismissed. Secrets are
# asked
# for by address alone, never by form. Knows neither the protocol nor who asks.


ElicitationKind: TypeAlias = Literal["form", "url"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormQuestion:
    """Fields to fill in: `schema` is a flat JSON Schema object. `call`: the running call that it belongs to."""

    message: str
    schema: JsonObject
    call: CallRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlQuestion:
    """A page to visit; `id` names the question when it is over, see `Client.elicited`."""

    message: str
    url: str
    id: str
    call: CallRef | None = None


Elicitation: TypeAlias = FormQuestion | UrlQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class ElicitationAnswer:
    """What the user did; `content` holds the values of an accepted form."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, str | int | float | bool | list[str]] = field(default_factory=dict)
