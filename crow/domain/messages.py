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
    """Whether a JSON value nests deeper than `MAX_DEPTH`. This function uses no recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [item for parent in containers for item in (parent.values() if isinstance(parent, dict) else parent)]
        if not level:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image. `data` is base64, and `mime_type` is, for example, `image/png`."""

    data: str
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


Part: TypeAlias = Text | Image | Resource | Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeform:
    """The input of a tool that takes plain text instead of a JSON object."""

    syntax: Literal["text", "lark", "regex"] = "text"
    """How `grammar` is written. `text` means that the tool takes any text."""
    grammar: str = ""
    """The grammar that the text follows. It is empty if `syntax` is `text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as offered to the model. `name` matches `^[A-Za-z0-9_-]{1,64}$`, and `input_schema` is a JSON Schema."""

    name: str
    description: str
    input_schema: JsonObject
    freeform: Freeform | None = None
    """Set if the model may write the input as plain text. `input_schema` then has exactly one property, a string, which
    is this text. A wire without such tools offers the tool with this schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call by a model.

    `arguments` is always a valid JSON object as text, because every later request repeats the arguments. If `fault` is
    set, the call cannot run. `fault` tells the model why, and `raw` is the text of the arguments as crow received it.
    `extra` has the unknown keys of the provider's call object. Crow sends them back unchanged.
    """

    id: str
    name: str
    arguments: str
    fault: str | None = None
    raw: str | None = None
    extra: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request, or their sums over several requests. None means unknown, not zero.

    `input_tokens` includes `cached_tokens`, which were read from the provider's cache, and `cache_write_tokens`, which
    were written to it. `output_tokens` includes `reasoning_tokens`. If the endpoint did not report the count of the
    input or of the output, crow estimates this count and sets `is_input_estimated` or `is_output_estimated`.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    cache_write_tokens: int | None = None
    is_input_estimated: bool = False
    is_output_estimated: bool = False

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
"""The form of requests and answers: OpenAI's Chat Completions, OpenAI's Responses, or Anthropic's Messages."""

FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "refusal", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One complete model response.

    `opaque` has provider fields that are sent back unchanged, such as `reasoning_details`. `reasoning_field` is the
    name of the provider's field that contained `thought`, or None if there was no such field. `wire` is the form in
    which the answer came.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: FinishReason = "stop"
    usage: Usage | None = None
    opaque: JsonObject = field(default_factory=dict)
    reasoning_field: str | None = None
    wire: WireName = "chat"


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
    """A message from the model. The `opaque` fields are sent only to the `endpoint` that they came from, and only on
    the same `wire`."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    opaque: JsonObject = field(default_factory=dict)
    reasoning_field: str | None = None
    endpoint: str = ""
    wire: WireName = "chat"
    is_before_break: bool = False
    """Whether the message has opaque fields and was made before a break: the system message, the tools or earlier
    messages may no longer be those that the model had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMessage:
    """The result of the call with this id. Results follow their assistant message in call order."""

    call_id: str
    text: str
    images: tuple[Image, ...] = ()


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
