"""Checks messages in the form of OpenAI's chat completions API, and returns their contents as values."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from crow.domain.errors import ArgumentError
from crow.domain.messages import (
    PDF_BYTES,
    File,
    FinishReason,
    Image,
    JsonObject,
    Part,
    Text,
    ToolCall,
    Usage,
    is_too_deep,
)
from crow.domain.text import describe
from crow.llm.usage import read_usage

_MAX_CHARS = 32_000_000
"""The limit for the texts of one message, in characters."""

_DATA_URL = re.compile(r"data:([a-z]+/[\w.+-]{1,60});base64,", re.ASCII)
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REASONING = ("reasoning_content", "reasoning")
_FINISHES: Mapping[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "content_filter": "refusal",
    "refusal": "refusal",
}
"""Maps the finish reasons in OpenAI's form to those of crow. An answer may have no others."""
_BAD_ARGUMENTS = "The arguments are not a JSON object."


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The model, the tokens and the cost of the request for an answer."""

    model: str = ""
    """Empty for the model of the session."""
    usage: Usage | None = None
    """None if the tokens are unknown."""
    cost: float | None = None
    """US dollars, or None if the cost is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemText:
    """A system message."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserParts:
    """A prompt."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParts:
    """An answer of a model."""

    text: str
    thought: str
    reasoning_field: str | None
    """The member of the message that has the thought, or None if there is no thought."""
    calls: tuple[ToolCall, ...]
    finish: FinishReason
    spent: Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultParts:
    """The result of a tool call."""

    place: str
    """The name of the message in error messages, such as `messages[2]`."""
    call_id: str
    text: str
    images: tuple[Image, ...]
    is_error: bool


ReadMessage: TypeAlias = SystemText | UserParts | AnswerParts | ResultParts


def read_message(message: object, place: str = "message") -> ReadMessage:
    """Check a message, and return what it contains. An object of the package `openai` is read as the JSON object that
    it stands for. `place` is the name of the message in error messages, such as `messages[2]`.

    :raises ~crow.domain.errors.ArgumentError: the message is not valid. The error names the member and its value.
    """
    members = _plain(message)
    if not isinstance(members, Mapping):
        raise _refusal(place, message, 'a message such as {"role": "user", "content": "hello"}')
    if is_too_deep(dict(members)):
        raise ArgumentError(f"{place} is nested too deeply.")
    match members.get("role"):
        case "system" | "developer":
            return SystemText(text=_text(members, place))
        case "user":
            parts = _parts(members.get("content"), f"{place}.content")
            if not any(part.text.strip() if isinstance(part, Text) else True for part in parts):
                raise _refusal(f"{place}.content", members.get("content"), "at least one visible character")
            return UserParts(parts=parts)
        case "assistant":
            return _answer(members, place)
        case "tool":
            parts = _parts(members.get("content"), f"{place}.content")
            call_id, is_error = members.get("tool_call_id"), members.get("is_error", False)
            if not isinstance(call_id, str) or not call_id:
                raise _refusal(f"{place}.tool_call_id", call_id, "the id of a call")
            if not isinstance(is_error, bool):
                raise _refusal(f"{place}.is_error", is_error, "true or false")
            return ResultParts(
                place=place,
                call_id=call_id,
                text="\n".join(part.text for part in parts if isinstance(part, Text)),
                images=tuple(part for part in parts if isinstance(part, Image)),
                is_error=is_error,
            )
        case role:
            raise _refusal(f"{place}.role", role, "system, developer, user, assistant or tool")


def _plain(value: object) -> object:
    """Return an object of the package `openai` as the JSON value that it stands for, and any other value unchanged."""
    dump = getattr(value, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else value


def read_spent(usage: object, model: object, cost: object, place: str = "message") -> Spent:
    """Check tokens, model and cost of a request. :raises ~crow.domain.errors.ArgumentError: a value is not valid."""
    if model is not None and (not isinstance(model, str) or len(model) > 200 or not model.isprintable()):
        raise _refusal(f"{place}.model", model, "a name of at most 200 visible characters")
    if cost is not None and (isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < 1e9):
        raise _refusal(f"{place}.cost", cost, "US dollars, such as 0.0125")
    counts = usage if isinstance(usage, Usage) else read_usage(_plain(usage))
    if usage is not None and counts is None:
        expected = 'token counts such as {"prompt_tokens": 812, "completion_tokens": 40}'
        raise _refusal(f"{place}.usage", _plain(usage), expected)
    return Spent(model=model or "", usage=counts, cost=None if cost is None else float(cost))


def _answer(members: Mapping[str, Any], place: str) -> AnswerParts:
    calls = _calls(members.get("tool_calls"), f"{place}.tool_calls")
    text = _text(members, place, is_optional=True) or _string(members, "refusal", place)
    field = next((name for name in _REASONING if members.get(name)), None)
    finish = members.get("finish_reason")
    if finish is not None and (not isinstance(finish, str) or finish not in _FINISHES):
        raise _refusal(f"{place}.finish_reason", finish, ", ".join(_FINISHES))
    thought = "" if field is None else _string(members, field, place)
    if not (text.strip() or calls or thought.strip()):
        raise _refusal(f"{place}.content", members.get("content"), "text, or tool_calls beside it")
    if members.get("refusal") and finish is None:
        finish = "refusal"
    return AnswerParts(
        text=text,
        thought=thought,
        reasoning_field=field,
        calls=calls,
        finish="tool_calls" if calls and finish in (None, "stop") else _FINISHES[finish or "stop"],
        spent=read_spent(members.get("usage"), members.get("model"), members.get("cost"), place),
    )


def _calls(value: object, place: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _refusal(place, value, "a list of tool calls")
    calls: dict[str, ToolCall] = {}
    for index, item in enumerate(value):
        at, call = f"{place}[{index}]", _plain(item)
        if not isinstance(call, Mapping):
            raise _refusal(at, call, "a tool call")
        if call.get("type", "function") != "function":
            raise _refusal(f"{at}.type", call["type"], '"function"')
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise _refusal(f"{at}.function", function, "an object with name and arguments")
        call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
        if not isinstance(call_id, str) or not 0 < len(call_id) <= 200 or not call_id.isprintable():
            raise _refusal(f"{at}.id", call_id, "an id of at most 200 visible characters")
        if call_id in calls:
            raise _refusal(f"{at}.id", call_id, "an id that no other call of the message has")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise _refusal(f"{at}.function.name", name, "at most 64 letters, digits, _ and -")
        if not isinstance(arguments, str):
            raise _refusal(f"{at}.function.arguments", arguments, "JSON as a string")
        _check_size(arguments, f"{at}.function.arguments")
        if _is_object(arguments):
            calls[call_id] = ToolCall(id=call_id, name=name, arguments=arguments)
        else:  # every later request repeats the arguments, so they must be valid
            calls[call_id] = ToolCall(id=call_id, name=name, arguments="{}", fault=_BAD_ARGUMENTS, raw=arguments)
    return tuple(calls.values())


def _is_object(text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not is_too_deep(value)


def _text(members: Mapping[str, Any], place: str, *, is_optional: bool = False) -> str:
    content = members.get("content")
    if content is None and is_optional:
        return ""
    parts = _parts(content, f"{place}.content")
    others = [part for part in parts if not isinstance(part, Text)]
    if others:
        raise _refusal(f"{place}.content", type(others[0]).__name__.lower(), "only text in a message with this role")
    return "\n".join(part.text for part in parts if isinstance(part, Text))


def _parts(content: object, place: str) -> tuple[Part, ...]:
    if isinstance(content, str):
        _check_size(content, place)
        return (Text(text=content),)
    if not isinstance(content, list | tuple):
        raise _refusal(place, content, "text or a list of parts")
    return tuple(_part(_plain(part), f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> Part:
    if not isinstance(part, Mapping):
        raise _refusal(place, part, 'a part such as {"type": "text", "text": "hello"}')
    match part.get("type"):
        case "text" | "refusal" as kind:
            return Text(text=_string(part, kind, place, is_required=True))
        case "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            mime_type, data = _data_of(url, f"{place}.image_url.url")
            if not mime_type.startswith("image/"):
                raise _refusal(f"{place}.image_url.url", url, "an image, such as data:image/png;base64,...")
            return Image(data=data, mime_type=mime_type)
        case "file":
            file = part.get("file")
            inner: JsonObject = file if isinstance(file, Mapping) else {}
            mime_type, data = _data_of(inner.get("file_data"), f"{place}.file.file_data")
            if len(data) > PDF_BYTES * 4 // 3 + 4:
                raise ArgumentError(f"{place}.file.file_data is too large; at most {PDF_BYTES:,} bytes fit.")
            name = inner.get("filename")
            return File(name=name if isinstance(name, str) and name else "file", data=data, mime_type=mime_type)
        case kind:
            raise _refusal(f"{place}.type", kind, "text, image_url or file")


def _data_of(url: object, place: str) -> tuple[str, str]:
    """Return the type and the base64 text of a data URL."""
    found = _DATA_URL.match(url) if isinstance(url, str) else None
    if found is None:
        raise _refusal(place, url, "a data: URL with base64, because sessions keep content and not links")
    text = cast(str, url)[found.end() :]
    _check_size(text, place)
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(place, url, "valid base64 after the comma") from error
    return found[1], text


def _string(members: Mapping[str, Any], name: str, place: str, *, is_required: bool = False) -> str:
    value = members.get(name)
    if value is None and not is_required:
        return ""
    if not isinstance(value, str):
        raise _refusal(f"{place}.{name}", value, "text")
    _check_size(value, f"{place}.{name}")
    return value


def _check_size(text: str, place: str) -> None:
    if len(text) > _MAX_CHARS:
        raise ArgumentError(f"{place} has {len(text):,} characters; at most {_MAX_CHARS:,} fit.")


def _refusal(place: str, value: object, expected: str) -> ArgumentError:
    shown = describe(f"{value:.200}" if isinstance(value, str) else value)
    return ArgumentError(f"{place} is {shown}; expected {expected}.")
