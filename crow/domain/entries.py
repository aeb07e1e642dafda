"""The kinds of entries that make up a stored conversation.

An entry has a body and a position in the tree. Each kind of entry has its own body class. Ids are integers from the
store and increase along every path. A tool call is identified by the entry id of its assistant message and by its index
in that message, because the ids that providers send are not unique.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.messages import FinishReason, Image, JsonObject, Part, ToolCall, ToolSpec, Usage

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]
"""Why a turn ended, in the words of ACP. A `TurnEnd` can also have one of two other reasons: `interrupted` and
`error`."""

CallKind: TypeAlias = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRef:
    """A tool call: the entry id of its assistant message, and the call's index in that message."""

    assistant: int
    index: int

    @property
    def call_id(self) -> str:
        """The call's id for the client. It is unique in the database, and a replay uses the same id."""
        return f"call_{self.assistant}_{self.index}"

    @classmethod
    def parse(cls, call_id: str) -> CallRef | None:
        """Return the call that the client knows as `call_id`, or None if `call_id` is not the id of a call."""
        match call_id.split("_"):
            case ["call", assistant, index] if all(
                0 < len(part) < 19 and part.isdecimal() for part in (assistant, index)
            ):
                call = cls(assistant=int(assistant), index=int(index))
                return call if call.call_id == call_id else None
            case _:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """An absolute path, and a line number that counts from 1."""

    path: str
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """A change to one file: its absolute path, and its whole text before and after. `old_text` is None if the file is
    new."""

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
    """The system message and tool specs, built for `cwd` and `model`. Crow sends them unchanged until another prompt
    entry replaces them.

    `recorded_here` is false for an imported entry. Crow never sends such an entry, because the next turn begins with a
    new prompt entry. `reason` tells the user why the entry was written, such as `the model changed from a to b`.
    `reason` is empty if an older version stored the entry, or if the entry was stored with a checkpoint.
    """

    system: str
    tools: tuple[ToolSpec, ...]
    cwd: str
    model: str
    recorded_here: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptName:
    """The name that a client gave to a prompt. A prompt with the same name in the same session is a repeat."""

    id: str
    """The client's id for the prompt, unique in the session."""
    digest: str
    """The sha256 (hex) of the prompt as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A prompt from the user. If `cut` is set, the model sees at most that many characters. Long parts are then
    shortened to their beginning and end."""

    parts: tuple[Part, ...]
    message_id: str
    cut: int | None = None
    name: PromptName | None = None
    """None if the client gave the prompt no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """A model response with all its calls, stored before any of the calls runs.

    `finish` is `interrupted` if the stream broke or was cancelled, or if crow died. In that case, `text` is the part
    that was shown. `endpoint` is the base URL and the model name, separated by a space. `announcements` says how the
    calls were shown, in call order. It is empty if no call was shown, or if an older version stored the entry. If `cut`
    is set, the model sees the arguments of all calls shortened to about that many characters in total. The calls
    themselves run with the complete arguments.
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
    cut: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Records that a call starts to run. `why` says why the call was allowed, such as `reads inside the workspace are
    free` or `allow once by the user`.

    `announcement` is None if the assistant entry already contains the announcement of the call.
    """

    call: CallRef
    why: str
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that a built-in tool changed. `before` is its content before the change, or None if the file did not
    exist.

    `after_hash` is the sha256 (hex) of the new content, or empty if the tool removed the file. `recorded_here` is false
    for an imported entry, whose content is never restored.
    """

    call: CallRef
    path: str
    before: bytes | None
    after_hash: str
    recorded_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file in a tool result. The user gets the file, but the model gets only a description of the file. Either `data`
    (base64) or `uri` is set."""

    name: str
    uri: str | None = None
    mime_type: str | None = None
    data: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call. `text` is always complete. If `cut` is set, the model sees only that many characters from
    the beginning and the end of `text`.

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
    """A user message that a checkpoint keeps word for word. `text` is shortened if the message is too long for the
    space that it may fill in the checkpoint."""

    entry: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSkill:
    """A skill that was loaded before a checkpoint. `text` is shortened if the checkpoint has too little room for the
    whole skill. It is empty if there is no room for any of it."""

    entry: int
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    """A file in use, with the text that it had when the checkpoint was stored."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The result of a compaction.

    The checkpoint covers the entries from `first_covered` to `last_covered`. These are all entries before `first_kept`,
    or all entries before the checkpoint if `first_kept` is None. Instead of the covered entries, the model sees
    `summary`, `pins`, `skills`, `files_shown` and the lists of files. `tokens_before` and `tokens_after` are estimates
    for the whole request. If `lists_cut` is set, the model sees at most that
    many characters of the plan and the lists of files, newest files first.
    """

    compaction_id: str
    summary: str
    first_kept: int | None
    pins: tuple[Pin, ...] = ()
    files_read: tuple[str, ...] = ()
    files_modified: tuple[str, ...] = ()
    mode: str = ""
    plan: tuple[PlanItem, ...] = ()
    reason: Literal["threshold", "overflow", "command", "model", "early"] = "threshold"
    method: Literal["prefix", "serialised", "fallback", "hook", "unread"] = "fallback"
    """How the summary was made. `unread` is never stored: it stands for entries that are too long to be read."""
    tokens_before: int = 0
    tokens_after: int = 0
    model_calls: int = 0
    lists_cut: int | None = None
    skills: tuple[KeptSkill, ...] = ()
    first_covered: int | None = None
    last_covered: int | None = None
    files_shown: tuple[ShownFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Hides tool outputs from the model. The mask applies to all entries with an id below `before`, except the entries
    in `exceptions`."""

    before: int
    exceptions: tuple[int, ...] = ()
    tokens_before: int = 0
    tokens_after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Revokes the checkpoint or mask with this entry id."""

    entry: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Holds the usage and cost of a model request whose answer is not stored as an `Assistant` entry.

    The `purpose` says what crow asked for. `answer`: an answer that never came (the request failed, was sent again, or
    was cancelled before any text). `summary`: a summary of the conversation. `title`: a title of the session.
    `sampling`: an answer for an MCP server.
    """

    purpose: Literal["answer", "summary", "title", "sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """A skill that the model loaded."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reminder:
    """Text from crow that only the model sees."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Text from crow that only the user sees."""

    text: str
    message_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A slash command as the user typed it, and its answer. The model sees neither of them."""

    text: str
    answer: str
    message_id: str
    name: PromptName | None = None
    """See `User.name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A label, or a change to the session that applies from this entry on.

    For `model` and `thought_level`, `previous` is the value before the change. The thought level "" stands for the
    endpoint's default. Going back to an earlier entry restores `previous`. For `dialect`, `value` names the parts of
    messages that the endpoint refused. Crow leaves these parts out from now on.
    """

    about: Literal["model", "thought_level", "mode", "label", "dialect"]
    value: str
    previous: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """An entry that a hook or crow stored. `namespace` names the owner of the entry, and crow does not interpret this
    name. Crow's own entries have the namespace `crow`. They tell the model which work in the background has ended.

    If `is_shown` is set, the user sees `text`. If `for_model` is set, the model sees `text`. `data` is only stored.
    """

    namespace: str
    text: str = ""
    is_shown: bool = False
    for_model: bool = False
    message_id: str = ""
    data: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The turn is over. `detail` is the error message, or empty."""

    stop: StopReason | Literal["interrupted", "error"]
    detail: str = ""


TurnBody: TypeAlias = Prompt | User | Assistant | Started | File | ToolResult | TurnEnd
ContextBody: TypeAlias = Checkpoint | Mask | Restore | Skill | Reminder | Custom
SessionBody: TypeAlias = Remark | Command | Note | ModelRequest
Body: TypeAlias = TurnBody | ContextBody | SessionBody


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """An entry that is about to be stored.

    `model` is the model that the request was sent to. `estimate` is the estimated size of that request, in tokens.
    """

    body: Body
    model: str = ""
    usage: Usage | None = None
    cost: float | None = None
    estimate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored, immutable entry. `parent` is the id of the entry before this one, or None at a root. `created_ms` is a
    Unix time in milliseconds, for display, search and statistics."""

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
