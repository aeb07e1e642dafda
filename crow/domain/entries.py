"""The entries of a conversation, which are all that is stored of it.

An entry consists of a body, with one class per kind, and its position in the tree. Ids are the store's integers and
increase along every path. A tool call is identified by the entry of its assistant message and by its index in that
message, because the ids that providers send are not unique.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.messages import FinishReason, Image, JsonObject, Part, ToolCall, ToolSpec, Usage

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]
"""Why a turn ended, in ACP's words. A `TurnEnd` may also be `interrupted` or `error`."""

CallKind: TypeAlias = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRef:
    """A tool call: the entry id of its assistant message, and the call's index in that message."""

    assistant: int
    index: int

    @property
    def call_id(self) -> str:
        """The id for the client: unique in the database, the same live and in replay."""
        return f"call_{self.assistant}_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """An absolute path and a line number from 1."""

    path: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """A change of one file: absolute path, whole text before (None: it is new) and after."""

    path: str
    old_text: str | None
    new_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """How a call is shown before it runs and in replay."""

    title: str
    kind: CallKind = "other"
    locations: tuple[Location, ...] = ()
    diffs: tuple[Diff, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanItem:
    """One line of the plan."""

    content: str
    status: Literal["pending", "in_progress", "completed"] = "pending"
    priority: Literal["high", "medium", "low"] = "medium"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The system message and tool specs, which are sent unchanged until the next break. They were made for this `cwd`
    and `model`. `recorded_here` is false for an imported entry, which is never sent: a turn begins with a new one."""

    system: str
    tools: tuple[ToolSpec, ...]
    cwd: str
    model: str
    recorded_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A prompt of the user. If `cut` is set, the model sees only that many characters, from head and tail."""

    parts: tuple[Part, ...]
    message_id: str
    cut: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """A model response with all its calls, stored before any of them runs.

    `finish` is `interrupted` if the stream broke, was cancelled, or its process died. Then `text` is the part that was
    shown. `endpoint` is `base_url model`. `announcements` say how the calls were shown, in order. They are empty if
    nothing was shown, and in entries of older versions.
    """

    text: str
    message_id: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: FinishReason = "stop"
    opaque: JsonObject = field(default_factory=dict)
    reasoning_field: str | None = None
    endpoint: str = ""
    announcements: tuple[Announcement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The call starts to run. `why` says why it was allowed, such as `reads inside the workspace are free` or `allow
    once by the user`.

    `announcement` is None if the assistant entry has it.
    """

    call: CallRef
    why: str
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """The content of a file before a built-in tool changed it; None: it did not exist.

    `after_hash` is the sha256 (hex) of the new content, empty if the tool removed the file. `recorded_here` is false
    for an imported entry, whose content is never restored.
    """

    call: CallRef
    path: str
    before: bytes | None
    after_hash: str
    recorded_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file in a result, for the user; the model gets a description. Either `data` (base64) or `uri` is set."""

    name: str
    uri: str | None = None
    mime_type: str | None = None
    data: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call. `text` is complete. If `cut` is set, the model sees only that many characters, from head
    and tail.

    Only `update_plan` sets `plan`. `duration_ms` is wall time.
    """

    call: CallRef
    name: str
    text: str
    is_error: bool = False
    duration_ms: int = 0
    announcement: Announcement
    cut: int | None = None
    images: tuple[Image, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    plan: tuple[PlanItem, ...] | None = None
    raw_output: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A user message in a checkpoint, word for word. `text` is cut if the message was longer than its share of the
    budget."""

    entry: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSkill:
    """A skill that was loaded before a checkpoint. `text` is cut to its share of the budget, and empty if there is no
    room for it."""

    entry: int
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The result of a compaction.

    The checkpoint covers the entries before `first_kept` (None: all before the checkpoint), from `first_covered` to
    `last_covered`. The model sees `summary`, `pins`, `skills` and the files instead of them. Token numbers are
    estimates of the whole request. `method` says how the summary was made. If `lists_cut` is set, the model sees only
    that many characters of the plan and the lists of files, newest first.
    """

    compaction_id: str
    summary: str
    first_kept: int | None
    pins: tuple[Pin, ...] = ()
    files_read: tuple[str, ...] = ()
    files_modified: tuple[str, ...] = ()
    mode: str = ""
    plan: tuple[PlanItem, ...] = ()
    reason: Literal["threshold", "overflow", "command", "model"] = "threshold"
    method: Literal["prefix", "serialised", "fallback", "hook"] = "fallback"
    tokens_before: int = 0
    tokens_after: int = 0
    model_calls: int = 0
    lists_cut: int | None = None
    skills: tuple[KeptSkill, ...] = ()
    first_covered: int | None = None
    last_covered: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Hides tool outputs of entries with an id below `before` from the model, except those in `exceptions`."""

    before: int
    exceptions: tuple[int, ...] = ()
    tokens_before: int = 0
    tokens_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Revokes the checkpoint or mask with this entry id."""

    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A skill that the model loaded."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reminder:
    """Text from crow for the model; not shown."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Text from crow for the user; not given to the model."""

    text: str
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A slash command as typed, with its answer; not given to the model."""

    text: str
    answer: str
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A change of the session that applies from this entry on."""

    about: Literal["model", "mode", "title", "label"]
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The turn is over. `detail` is the error message, or empty."""

    stop: StopReason | Literal["interrupted", "error"]
    detail: str = ""


TurnBody: TypeAlias = Prompt | User | Assistant | Started | File | ToolResult | TurnEnd
ContextBody: TypeAlias = Checkpoint | Mask | Restore | Skill | Reminder
SessionBody: TypeAlias = Remark | Command | Note
Body: TypeAlias = TurnBody | ContextBody | SessionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """An entry that is about to be stored.

    `model` is the model that the request went to. `estimate` is the estimated size of the request, in tokens.
    """

    body: Body
    model: str = ""
    usage: Usage | None = None
    cost: float | None = None
    estimate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored, immutable entry. `parent` is None at a root. `created_ms` is Unix time, for people only."""

    id: int
    conversation: int
    session: str
    parent: int | None
    turn: int
    body: Body
    model: str = ""
    usage: Usage | None = None
    cost: float | None = None
    estimate: int | None = None
    created_ms: int = 0
