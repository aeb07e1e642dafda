"""The entries of a conversation: everything that is ever stored of it.

Strategy: one frozen body per kind; an entry is a body with its place in the tree. Ids are the store's integers and
increase along every path. A tool call is named by the entry of its assistant message and its index there, since the
ids that providers send are not unique. Nothing here knows SQL, the protocol or a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.messages import FinishReason, Image, JsonObject, Part, ToolCall, ToolSpec, Usage

__all__ = [
    "Announcement",
    "Assistant",
    "Attachment",
    "Body",
    "CallKind",
    "CallRef",
    "Checkpoint",
    "Command",
    "Diff",
    "Entry",
    "File",
    "KeptSkill",
    "Location",
    "Mask",
    "NewEntry",
    "Note",
    "Pin",
    "PlanItem",
    "Prompt",
    "Remark",
    "Reminder",
    "Restore",
    "Skill",
    "Started",
    "StopReason",
    "ToolResult",
    "TurnEnd",
    "User",
]

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]
"""How a turn ended, as ACP names it. A `TurnEnd` may also say `interrupted` or `error`."""

CallKind: TypeAlias = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRef:
    """Which call: the entry id of its assistant message and the index among its calls."""

    assistant: int
    index: int

    @property
    def call_id(self) -> str:
        """The id that the client sees: unique in the database, the same live and in replay."""
        return f"call_{self.assistant}_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """An absolute path and a line, from 1."""

    path: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """A change of one file: absolute path, whole text before (None: a new file) and after."""

    path: str
    old_text: str | None
    new_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """How a call is shown before it runs, and in replay."""

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
    """System message and tool specs, reused byte for byte until the next break. `cwd` and `model` it was made for."""

    system: str
    tools: tuple[ToolSpec, ...]
    cwd: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A prompt of the user. `cut`: when set, the model sees only so many characters, head and tail."""

    parts: tuple[Part, ...]
    message_id: str
    cut: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """A model response with all its calls, stored before any of them runs.

    `finish` is `interrupted` when the stream broke, was cancelled, or its process died; then `text` is what was shown.
    `endpoint` is the base URL and model that answered, `base_url model`. `announcements` say how the calls were shown,
    in their order; there are none where nothing was shown, and in entries of older versions.
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
    """The call begins to run now; `why` it was allowed (`mode ask: reads are free`, `allowed once by the user`...).

    `announcement` is None where the call's assistant entry has it.
    """

    call: CallRef
    why: str
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """What a file held before a built-in tool changed it: `before` is None if it did not exist.

    `after_hash` is the sha256 (hex) of what the tool wrote; empty if it removed the file. `recorded_here`: crow stored
    this as it happened; an imported entry only claims that it did, and is never put back.
    """

    call: CallRef
    path: str
    before: bytes | None
    after_hash: str
    recorded_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Something that a result brings for the user, and the model is only told of in words: `data` (base64) where it
    came along, else what `uri` leads to. `name` is for people."""

    name: str
    uri: str | None = None
    mime_type: str | None = None
    data: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call gave. `text` is whole; the model sees `cut` characters of it when set, head and tail.

    `plan` is set by `update_plan` alone. `duration_ms` is wall time from started to result.
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
    """A user message kept verbatim in a checkpoint: `text` as the model sees it, cut to its share if it was larger."""

    entry: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSkill:
    """A skill that was given before a checkpoint: `text` is cut to its share, empty if there was no room for it."""

    entry: int
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a compaction writes.

    Entries of the path before `first_kept` are covered: the model sees `summary`, `pins`, `skills` and the files
    instead; `first_covered` and `last_covered` are the ids at their ends. `first_kept` None means that nothing
    before the checkpoint is kept. Token numbers are estimates of the whole request. `method` says how the summary was
    made. `lists_cut`: when set, the model sees at most so many characters of the plan and the lists of files, newest
    first.
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
    """Tool outputs of entries with an id below `before` are hidden from the model, but for those in `exceptions`."""

    before: int
    exceptions: tuple[int, ...] = ()
    tokens_before: int = 0
    tokens_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The checkpoint or mask with this entry id no longer counts."""

    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A skill's text, given to the model on demand."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reminder:
    """crow's words to the model; not shown."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """crow's words to the user; the model does not see them."""

    text: str
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A slash command as typed, and its answer; replayed, not given to the model."""

    text: str
    answer: str
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A fact about the session from here on."""

    about: Literal["model", "mode", "title", "label"]
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The turn is over. `detail`: the error's words, or empty."""

    stop: StopReason | Literal["interrupted", "error"]
    detail: str = ""


Body: TypeAlias = (
    Prompt
    | User
    | Assistant
    | Started
    | File
    | ToolResult
    | Checkpoint
    | Mask
    | Restore
    | Skill
    | Reminder
    | Remark
    | Command
    | Note
    | TurnEnd
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """A body that is about to be stored, with what is known beside it.

    `model` names who produced or was asked; `estimate` is tokens of the whole request it answers, as estimated.
    """

    body: Body
    model: str = ""
    usage: Usage | None = None
    cost: float | None = None
    estimate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored, immutable node. `parent` is None at a root; `created_ms` is Unix time, for people only."""

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
