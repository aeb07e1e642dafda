"""What a person, a model and a tool say to each other.

Strategy: plain frozen values, the same ones from the editor's prompt to the bytes of a request. Nothing here
knows how a message is stored, streamed or encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = [
    "Answer",
    "AssistantMessage",
    "FinishReason",
    "Image",
    "JsonObject",
    "Link",
    "Message",
    "Part",
    "Resource",
    "SystemMessage",
    "Text",
    "ToolCall",
    "ToolMessage",
    "ToolSpec",
    "Usage",
    "UserMessage",
]

JsonObject: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture; `data` is base64, `mime_type` such as `image/png`."""

    data: str
    mime_type: str
    uri: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A file or document whose text came with the prompt."""

    uri: str
    text: str
    mime_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A file or document that the prompt only names."""

    uri: str
    name: str
    mime_type: str | None = None


Part: TypeAlias = Text | Image | Resource | Link


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool as offered to the model; `name` matches `^[A-Za-z0-9_-]{1,64}$`, `input_schema` is JSON Schema."""

    name: str
    description: str
    input_schema: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as it was understood from the stream.

    `arguments` is always the JSON text of an object: it goes back to the provider in every later request.
    `fault`, when set, says to the model why the call cannot be run; `raw` then keeps what was really received.
    `extra` holds unknown keys of the provider's call object, to be sent back unchanged.
    """

    id: str
    name: str
    arguments: str
    fault: str | None = None
    raw: str | None = None
    extra: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts that a provider reported for one request; None is unknown, not zero.

    `input_tokens` includes the cached ones, `output_tokens` the reasoning ones.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "refusal", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One whole model response.

    `opaque` holds provider fields to send back as they came (`reasoning_details` and the like);
    `reasoning_field` is the name under which the thought arrived, None if there was none.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: FinishReason = "stop"
    usage: Usage | None = None
    opaque: JsonObject = field(default_factory=dict)
    reasoning_field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemMessage:
    """The one system message, at index 0."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage:
    """What the user (or crow, in a reminder) says to the model."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """What the model said; `endpoint` names who said it, as `opaque` fields are only for that endpoint."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    opaque: JsonObject = field(default_factory=dict)
    reasoning_field: str | None = None
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMessage:
    """The result of the call with `call_id`, directly after its assistant message, in call order."""

    call_id: str
    text: str
    images: tuple[Image, ...] = ()


Message: TypeAlias = SystemMessage | UserMessage | AssistantMessage | ToolMessage
