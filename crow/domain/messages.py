"""Messages between user, model and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

JsonObject: TypeAlias = Mapping[str, object]

MAX_DEPTH = 200
"""The maximum nesting depth of objects and arrays in JSON from other programs. The limit is far above the depth of any
real value, and far below Python's recursion limit."""


def is_too_deep(value: object) -> bool:
    """Return whether a JSON value nests deeper than `MAX_DEPTH`. This function uses no recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [item for parent in containers for item in (parent.values() if isinstance(parent, dict) else parent)]
        if not level:
            return False
    return True


PDF_BYTES = 10_000_000
"""Larger PDFs are not sent to models."""

PDF_START = b"%PDF-"
PDF_TYPE = "application/pdf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image."""

    data: str
    """The image in base64."""
    mime_type: str
    """For example, `image/png`."""
    uri: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that some models can read, such as a PDF."""

    name: str
    data: str
    """The content in base64."""
    mime_type: str
    uri: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A file or document with its text."""

    uri: str
    text: str
    mime_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A file or document without its text."""

    uri: str
    name: str
    mime_type: str | None = None


Part: TypeAlias = Text | Image | File | Resource | Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeform:
    """The input of a tool that takes plain text instead of a JSON object."""

    syntax: Literal["text", "lark", "regex"] = "text"
    """How `grammar` is written. `text` means that the tool takes any text."""
    grammar: str = ""
    """The grammar that the text follows. It is empty if `syntax` is `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as offered to the model."""

    name: str
    """Matches `^[A-Za-z0-9_-]{1,64}$`."""
    description: str
    input_schema: JsonObject
    """A JSON Schema."""
    freeform: Freeform | None = None
    """Set if the model may write the input as plain text. `input_schema` then has exactly one property, a string, which
    is this text. An API without such tools gets the tool with this schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call by a model."""

    id: str
    name: str
    arguments: str
    """Always a valid JSON object as text, because every later request repeats the arguments."""
    fault: str | None = None
    """If set, the call cannot run, and this text tells the model why."""
    raw: str | None = None
    """If `fault` is set, the text of the arguments as crow received it."""
    extra: JsonObject = field(default_factory=dict)
    """The unknown keys of the provider's call object. Crow sends them back unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request, or their sums over several requests. None means unknown, not zero."""

    input_tokens: int | None = None
    """Includes `cached_tokens` and `cache_write_tokens`."""
    output_tokens: int | None = None
    """Includes `reasoning_tokens`."""
    cached_tokens: int | None = None
    """Tokens that were read from the provider's cache."""
    reasoning_tokens: int | None = None
    cache_write_tokens: int | None = None
    """Tokens that were written to the provider's cache."""
    is_input_estimated: bool = False
    """The endpoint did not report the count of the input, so crow estimated it."""
    is_output_estimated: bool = False
    """The endpoint did not report the count of the output, so crow estimated it."""

    @property
    def is_estimated(self) -> bool:
        """Whether crow estimated the input or the output."""
        return self.is_input_estimated or self.is_output_estimated

    def __add__(self, other: Usage) -> Usage:
        """Add two usages. A count that is unknown in both stays unknown."""
        return Usage(
            input_tokens=_sum(self.input_tokens, other.input_tokens),
            output_tokens=_sum(self.output_tokens, other.output_tokens),
            cached_tokens=_sum(self.cached_tokens, other.cached_tokens),
            reasoning_tokens=_sum(self.reasoning_tokens, other.reasoning_tokens),
            cache_write_tokens=_sum(self.cache_write_tokens, other.cache_write_tokens),
            is_input_estimated=self.is_input_estimated or other.is_input_estimated,
            is_output_estimated=self.is_output_estimated or other.is_output_estimated,
        )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None and other is None else (one or 0) + (other or 0)


WireName: TypeAlias = Literal["chat", "responses", "messages"]
"""The API of an endpoint: OpenAI's Chat Completions, OpenAI's Responses, or Anthropic's Messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """How a request was sent. With it, the request can be built again from the log and compared."""

    digest: str
    """The beginning of the sha256 (hex) of the bytes."""
    size: int
    """The number of bytes."""
    checks: str = ""
    """CRC-32 sums of the beginning of the request: up to each of its last messages, and up to some earlier positions.
    Each is written as `DISTANCE.SUM` in hex: the number of bytes from the position to the end, and the sum."""
    endpoint: str = ""
    """The base URL and the model name, separated by a space."""
    dialect: JsonObject = field(default_factory=dict)
    """The members of the endpoint's dialect that are not the default."""
    limit: int | None = None
    """The output limit in tokens, or None if none was sent."""
    thought_level: str = ""
    """Empty if the request stated none."""
    extra: str = ""
    """A digest of the members that the user adds to every request, or empty if there are none."""
    limits: JsonObject = field(default_factory=dict)
    """The figures that decided whether crow compacted the context; see `crow.agent.compaction.budget.Gauge.recorded`.
    Empty if an older version stored the request."""
    version: str = ""
    """The version of crow that sent the request."""
    is_case: bool = False
    """The values are not those of the request that was sent, but of the redacted request in a case file."""


FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "refusal", "interrupted", "paused"]
"""`paused`: the endpoint runs tools of its own, and continues the answer when crow sends the answer back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One complete model response."""

    text: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: FinishReason = "stop"
    usage: Usage | None = None
    opaque: JsonObject = field(default_factory=dict)
    """Provider fields that are sent back unchanged, such as `reasoning_details`."""
    reasoning_field: str | None = None
    """The name of the provider's field that contained `thought`, or None if there was no such field."""
    wire: WireName = "chat"
    """The API through which the answer came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMessage:
    """The only system message, at index 0."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage:
    """A message from the user, or a reminder from crow."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """A message from the model."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    opaque: JsonObject = field(default_factory=dict)
    """Provider fields that are sent back unchanged, and only to the same `endpoint`."""
    reasoning_field: str | None = None
    endpoint: str = ""
    """The endpoint that the `opaque` fields came from."""
    wire: WireName = "chat"
    """The API through which the answer came. The `opaque` fields are sent back only through this API."""
    is_before_break: bool = False
    """Whether the message has opaque fields and was made before a break. The model may have had another system message,
    other tools or other earlier messages then."""
    is_paused: bool = False
    """Whether the answer is unfinished. The next message continues it. If there is no next message, the endpoint will
    continue it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMessage:
    """The result of a call. Results follow their assistant message in call order."""

    call_id: str
    """The model's id of the call."""
    text: str
    images: tuple[Image, ...] = ()
    files: tuple[File, ...] = ()
    is_error: bool = False
    """Whether the call failed, was refused, or did not run to its end."""


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
