"""The kinds of entries that make up a stored conversation.

An entry has a body and a position in the tree. Each kind of entry has its own body class. Ids are integers from the
store and increase along every path. A tool call is identified by the entry id of its assistant message and by its index
in that message, because the ids that providers send are not unique.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.domain.messages import (
    FinishReason,
    Image,
    JsonObject,
    Part,
    SentRequest,
    ToolCall,
    ToolSpec,
    Usage,
    WireName,
)
from crow.domain.text import safe

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled"]
"""Why a turn ended, in the words of ACP. A `TurnEnd` can also have one of two other reasons: `interrupted` and
`error`."""

CallKind: TypeAlias = Literal["read", "edit", "delete", "move", "search", "execute", "think", "fetch", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRef:
    """A reference to a tool call."""

    assistant: int
    """The entry id of the call's assistant message."""
    index: int
    """The index of the call in that message."""

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
    """A place in a file."""

    path: str
    """An absolute path."""
    line: int | None = None
    """Counts from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """A change to one file."""

    path: str
    """An absolute path."""
    old_text: str | None
    """The whole text before the change, or None if the file is new."""
    new_text: str
    """The whole text after the change."""


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
    """The system message and tool specs. Crow sends them unchanged until another prompt entry replaces them."""

    system: str
    tools: tuple[ToolSpec, ...]
    cwd: str
    """The working directory that the prompt was built for."""
    model: str
    """The model that the prompt was built for."""
    recorded_here: bool = False
    """False for an imported entry. Crow never sends such an entry, because the next turn begins with a new prompt
    entry."""
    reason: str = ""
    """Tells the user why the entry was written, such as `the model changed from a to b`. Empty if an older version
    stored the entry, or if the entry was stored with a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptName:
    """The name that a client gave to a prompt. A prompt with the same name in the same session is a repeat."""

    id: str
    """The client's id for the prompt, unique in the session."""
    digest: str
    """The sha256 (hex) of the prompt as it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A prompt from the user."""

    parts: tuple[Part, ...]
    message_id: str
    cut: int | None = None
    """If set, the model sees at most this many characters. Long parts are then shortened to their beginning and end."""
    name: PromptName | None = None
    """None if the client gave the prompt no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """A model response with all its calls, stored before any of the calls runs."""

    text: str
    """If `finish` is `interrupted`, the part of the response that was shown."""
    message_id: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: FinishReason = "stop"
    """`interrupted` if the stream broke or was cancelled, or if crow died."""
    opaque: JsonObject = field(default_factory=dict)
    """See `AssistantMessage.opaque`."""
    reasoning_field: str | None = None
    """See `Answer.reasoning_field`."""
    endpoint: str = ""
    """The base URL and the model name, separated by a space."""
    announcements: tuple[Announcement, ...] = ()
    """How the calls were shown, in call order. Empty if no call was shown, or if an older version stored the entry."""
    cut: int | None = None
    """If set, the model sees the arguments of all calls shortened to about this many characters in total. The calls
    themselves run with the complete arguments."""
    wire: WireName = "chat"
    """The API through which the answer came. The opaque fields are sent back only through this API."""
    sent: SentRequest | None = None
    """The request that this response answers. None if an older version stored the entry, if crow died before the end of
    the answer, or if the model is built in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Records that a call starts to run."""

    call: CallRef
    why: str
    """Why the call was allowed, such as `reads inside the workspace are free` or `allow once by the user`."""
    announcement: Announcement | None = None
    """None if the assistant entry already contains the announcement of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that a built-in tool changed, or all files that a command changed."""

    call: CallRef
    path: str
    before: bytes | None
    """The content before the change, or None if the file did not exist."""
    after_hash: str
    """The sha256 (hex) of the new content, or empty if the tool removed the file."""
    mode: int | None = None
    """The permission bits before the change. None if there was no file, or if an older version stored this entry."""
    recorded_here: bool = False
    """False for an imported entry, whose content is never restored."""
    change_set: str = ""
    """If set, a command changed any number of files in the directory `path`. This is the name of the change set that
    can undo it; the change set is on the disk of the machine where the command ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file in a tool result, for the user."""

    name: str
    uri: str | None = None
    """Where the file is, if `data` is empty."""
    mime_type: str | None = None
    data: str = ""
    """The content of the file in base64."""
    for_model: bool = False
    """Whether the model gets the file, if it accepts files. Otherwise the model gets only a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call."""

    call: CallRef
    name: str
    text: str
    """The complete text, even if `cut` is set."""
    is_error: bool = False
    duration_ms: int = 0
    """Wall time."""
    announcement: Announcement
    cut: int | None = None
    """If set, the model sees only this many characters from the beginning and the end of `text`."""
    images: tuple[Image, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    plan: tuple[PlanItem, ...] | None = None
    """The new plan. Only `update_plan` sets it."""
    raw_output: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A user message that a checkpoint keeps word for word."""

    entry: int
    """The id of the message's entry."""
    text: str
    """Shortened if the message is too long for the space that it may fill in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSkill:
    """A skill that was loaded before a checkpoint."""

    entry: int
    """The id of the entry that loaded it."""
    name: str
    text: str
    """Shortened if the checkpoint has too little room for the whole skill. Empty if there is no room for any of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    """A file in use, with the text that it had when the checkpoint was stored."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The result of a compaction: what the model sees instead of the covered entries."""

    compaction_id: str
    """The id that the client was given for this compaction."""
    summary: str
    """The text that replaces the covered entries, under fixed headings."""
    first_kept: int | None
    """The id of the first entry that is not covered. If None, all entries before the checkpoint are covered."""
    pins: tuple[Pin, ...] = ()
    """Messages of the user that the model still sees."""
    files_read: tuple[str, ...] = ()
    """The paths that the covered calls read."""
    files_modified: tuple[str, ...] = ()
    """The paths that the covered calls changed."""
    mode: str = ""
    """The mode at the end of the covered entries. Empty if it was never changed."""
    plan: tuple[PlanItem, ...] = ()
    """The plan at the end of the covered entries."""
    reason: Literal["threshold", "overflow", "command", "model", "early"] = "threshold"
    """Why the context was compacted. See :data:`crow.agent.compaction.Reason`."""
    method: Literal["prefix", "serialised", "fallback", "hook", "unread"] = "fallback"
    """How the summary was made. `prefix`: the model got the conversation as it was, and an instruction. `serialised`:
    the model got a shortened transcript. `fallback`: without a model. `hook`: by a hook of the user. `unread` is never
    stored: it stands for entries that are too long to be read."""
    tokens_before: int = 0
    """The estimated size of the whole request before the compaction."""
    tokens_after: int = 0
    """The estimated size of the whole request after the compaction."""
    model_calls: int = 0
    """How many requests the summary took."""
    lists_cut: int | None = None
    """If set, the model sees at most this many characters of the plan and the lists of files, newest files first."""
    skills: tuple[KeptSkill, ...] = ()
    """Loaded skills that the model still sees."""
    first_covered: int | None = None
    """The id of the first covered entry."""
    last_covered: int | None = None
    """The id of the last covered entry."""
    files_shown: tuple[ShownFile, ...] = ()
    """Files in use, with their text."""
    threshold: int | None = None
    """The size, in tokens, at which crow compacts by itself. None if an older version stored the entry."""
    window: int | None = None
    """The model's context window in tokens. None if an older version stored the entry."""
    focus: str = ""
    """What the user or the model asked the summary to favour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Hides tool outputs from the model."""

    before: int
    """The mask applies to all entries with an id below this one."""
    exceptions: tuple[int, ...] = ()
    """The ids of entries that the mask does not hide."""
    tokens_before: int = 0
    """The estimated size of the whole request before the mask."""
    tokens_after: int = 0
    """The estimated size of the whole request with the mask."""
    reason: Literal["", "threshold", "overflow", "command", "model", "early"] = ""
    """See `Checkpoint.reason`. Empty if an older version stored the entry."""
    threshold: int | None = None
    """See `Checkpoint.threshold`."""
    window: int | None = None
    """See `Checkpoint.window`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Revokes the checkpoint or mask with this entry id, or unloads a skill."""

    entry: int
    skill: str = ""
    """If set, the skill with this name is unloaded, however often it was loaded before. `entry` is then the id of the
    entry that loaded it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Holds the usage and cost of a model request whose answer is not stored as an `Assistant` entry."""

    purpose: Literal["answer", "summary", "title", "sampling"]
    """What crow asked for. `answer`: an answer that never came (the request failed, was sent again, or was cancelled
    before any text). `summary`: a summary of the conversation. `title`: a title of the session. `sampling`: an answer
    for an MCP server."""
    sent: SentRequest | None = None
    """See `Assistant.sent`."""


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
    """A label, or a change to the session that takes effect at this entry."""

    about: Literal["model", "thought_level", "mode", "label", "dialect"]
    value: str
    """The new value. The thought level "" stands for the endpoint's default. For `dialect`, the value names the parts
    of messages that the endpoint refused. After this entry, crow leaves these parts out."""
    previous: str = ""
    """For `model` and `thought_level`, the value before the change. Going back to an earlier entry restores it."""
    entry: int | None = None
    """For `label`, the id of the entry that gets the label. If None, it is the note itself. If 0, the label with this
    name is removed."""


LABEL_CHARS = 60
"""The maximum length of a label."""


def is_label(name: str) -> bool:
    """Return whether `name` can be a label: visible, not too long, and not like the number of a prompt or entry."""
    return 0 < len(name) <= LABEL_CHARS and safe(name) == name and not name.startswith("#") and not name.isdecimal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """An entry that a hook or crow stored."""

    namespace: str
    """The owner of the entry. Crow does not interpret this name. Crow's own entries have the namespace `crow`. They
    say which work in the background has ended, or what became of a patch that was interrupted."""
    text: str = ""
    is_shown: bool = False
    """If set, the user sees `text`."""
    for_model: bool = False
    """If set, the model sees `text`."""
    message_id: str = ""
    data: JsonObject = field(default_factory=dict)
    """Stored with the entry. Neither the user nor the model sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The turn is over."""

    stop: StopReason | Literal["interrupted", "error"]
    detail: str = ""
    """The error message, or empty."""


TurnBody: TypeAlias = Prompt | User | Assistant | Started | File | ToolResult | TurnEnd
ContextBody: TypeAlias = Checkpoint | Mask | Restore | Skill | Reminder | Custom
SessionBody: TypeAlias = Remark | Command | Note | ModelRequest
Body: TypeAlias = TurnBody | ContextBody | SessionBody

BREAKS = (Checkpoint, Mask, Restore, Prompt)
"""After an entry of these kinds, a request does not begin with the whole previous request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """An entry that is about to be stored."""

    body: Body
    model: str = ""
    """The model that produced this entry. Empty if none did."""
    usage: Usage | None = None
    cost: float | None = None
    """In US dollars. None if it is unknown."""
    estimate: int | None = None
    """An estimated size in tokens. For an answer, it is the size of the answered request. For a prompt, a result or a
    system message, it is the size of the message, and the store fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored, immutable entry."""

    id: int
    conversation: int
    session: str
    parent: int | None
    """The id of the entry before this one, or None at a root."""
    turn: int
    body: Body
    model: str = ""
    usage: Usage | None = None
    cost: float | None = None
    estimate: int | None = None
    created_ms: int = 0
    """A Unix time in milliseconds, for display, search and statistics."""
