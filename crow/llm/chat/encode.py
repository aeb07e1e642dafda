"""Encodes requests of Chat Completions.

Since tool results can contain only text, the images and files of consecutive results are sent in a user message after
these results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from crow.domain import messages as domain
from crow.llm import Request, ThoughtLevel
from crow.llm.content import (
    EMPTY_TEXT,
    GO_ON,
    NO_OUTPUT,
    data_url,
    is_paused,
    json_bytes,
    result_content,
    user_content,
)
from crow.llm.dialect import Dialect, Thinking
from crow.llm.encoder import Encoder

_OWN_KEYS = frozenset({"role", "content", "tool_calls", "id", "type", "function", "name", "arguments"})
_CACHES_ON_REQUEST = re.compile(r"claude|anthropic", re.IGNORECASE)
"""Matches the names of models that cache a prompt only if the request contains a cache marker."""
_GO_ON = json_bytes({"role": "user", "content": GO_ON})


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A message in the form in which it is sent."""

    message: domain.Message
    sent: bytes
    attached: tuple[bytes, ...] = ()
    """The images and files of a tool result. They are sent in a user message after this result and the results that
    directly follow it."""
    calls: tuple[bytes, ...] = ()
    """If the endpoint accepts only one call per message, this has one message for each call after the first. Each
    message is inserted before the result of its call."""


class ChatEncoder(Encoder[_Encoded]):
    """Encodes requests; see :class:`crow.llm.encoder.Encoder`."""

    member = "messages"
    fixed_members = frozenset({"messages", "tools", "stream"})

    def __init__(self) -> None:
        super().__init__()
        self._sequence = _Sequence()

    def _head(self, request: Request, *, limit: int | None) -> dict[str, object]:
        dialect, model = self._dialect, self._model
        head: dict[str, object] = {"model": model, "stream": dialect.streams}
        if dialect.usage_option:
            head["stream_options"] = {"include_usage": True}
        if limit is not None and dialect.limit_field is not None:
            head[dialect.limit_field] = limit
        if dialect.cache == "key" and request.cache_key:
            head["prompt_cache_key"] = request.cache_key
        is_marked = dialect.cache == "marker" and _CACHES_ON_REQUEST.search(model) is not None
        if is_marked:
            head["cache_control"] = {"type": "ephemeral"}
        if request.thought_level is not None and dialect.thinking is not None:
            head.update(_thinking(request.thought_level, dialect.thinking))
        # With a cache marker, a change of `tool_choice` would invalidate the cached messages.
        if request.tools and request.tool_choice == "none" and dialect.tool_choice and not is_marked:
            head["tool_choice"] = "none"
        if request.tools and dialect.parallel_calls is not None:
            head["parallel_tool_calls"] = dialect.parallel_calls
        return head

    def _sent(self) -> list[bytes]:
        return self._sequence.sent()

    def _restart(self) -> None:
        self._sequence = _Sequence()

    def _add(self, encoded: _Encoded) -> None:
        self._sequence.add(encoded)

    def _encode(self, message: domain.Message) -> _Encoded:
        return _encode(message, endpoint=self._endpoint, dialect=self._dialect)

    def _tool(self, spec: domain.ToolSpec) -> dict[str, object]:
        function = {"name": spec.name, "description": spec.description, "parameters": spec.input_schema}
        return {"type": "function", "function": function}


class _Sequence:
    """Collects messages in the order in which they are sent. The images and files of consecutive tool results come
    directly after these results."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._attached: list[bytes] = []
        self._calls: tuple[bytes, ...] = ()
        self._last: domain.Message | None = None

    def add(self, encoded: _Encoded) -> None:
        """Add the next message."""
        is_result = isinstance(encoded.message, domain.ToolMessage)
        if self._calls and is_result and isinstance(self._last, domain.ToolMessage):
            self._sent.append(self._calls[0])
            self._calls = self._calls[1:]
        self._calls = encoded.calls or self._calls
        if self._attached and not is_result:
            self._sent = self.sent()
            self._attached = []
            if isinstance(encoded.message, domain.UserMessage):
                self._sent.append(json_bytes({"role": "assistant", "content": "Seen."}))
        elif is_paused(self._last) and isinstance(encoded.message, domain.AssistantMessage):
            self._sent.append(_GO_ON)
        self._last = encoded.message
        self._sent.append(encoded.sent)
        self._attached.extend(encoded.attached)

    def sent(self) -> list[bytes]:
        """Return all messages so far. If they end with tool results that have images or files, a message with these
        follows."""
        if is_paused(self._last):
            return [*self._sent, _GO_ON]
        if not self._attached:
            return list(self._sent)
        what = "Images and files" if any(each.startswith(b'{"type":"file"') for each in self._attached) else "Images"
        intro = json_bytes({"type": "text", "text": f"{what} of the tool results above:"})
        return [*self._sent, b'{"role":"user","content":[' + b",".join((intro, *self._attached)) + b"]}"]


def _thinking(level: ThoughtLevel, thinking: Thinking) -> dict[str, object]:
    """Return the request members that ask for this thought level."""
    is_on = level != "off"
    switch: dict[str, object] = {"thinking": {"type": "enabled" if is_on else "disabled"}}
    match thinking:
        case "effort":
            return {"reasoning_effort": level if is_on else "none"}
        case "reasoning":
            return {"reasoning": {"effort": level} if is_on else {"enabled": False}}
        case "switch":
            return switch
        case "switch_effort":
            return switch | ({"reasoning_effort": "high"} if level == "high" else {})
        case "enable_thinking":
            return {"enable_thinking": is_on}
        case _ as never:
            assert_never(never)


def _encode(message: domain.Message, *, endpoint: str, dialect: Dialect) -> _Encoded:
    match message:
        case domain.SystemMessage(text=text):
            sent = json_bytes({"role": dialect.system_role, "content": text})
            if dialect.system_role == "user":
                # Chat templates without a system role require that user and assistant messages alternate.
                sent += b"," + json_bytes({"role": "assistant", "content": "Understood."})
            return _Encoded(message, sent)
        case domain.UserMessage(parts=parts):
            return _Encoded(message, json_bytes({"role": "user", "content": _user_content(parts, dialect)}))
        case domain.AssistantMessage():
            alone = [message]
            if dialect.parallel_calls is False and len(message.calls) > 1:
                alone = [replace(message, calls=(call,)) for call in message.calls]
                alone[1:] = [replace(each, text="", thought="", opaque={}) for each in alone[1:]]
            first, *rest = (json_bytes(_assistant(each, endpoint=endpoint, dialect=dialect)) for each in alone)
            return _Encoded(message, first, calls=tuple(rest))
        case domain.ToolMessage(call_id=call_id):
            text, images, files = result_content(message, dialect)
            attached = (*map(_image, images), *map(_file, files))
            result = {"role": "tool", "tool_call_id": call_id, "content": text if text.strip() else NO_OUTPUT}
            return _Encoded(message, json_bytes(result), tuple(map(json_bytes, attached)))
        case _ as never:
            assert_never(never)


def _user_content(parts: Sequence[domain.Part], dialect: Dialect) -> object:
    """Return one string if all parts can be written as text, else the list of parts."""
    content = user_content(parts, dialect)
    if len(content) == 1 and isinstance(content[0], str):
        return content[0]
    return [_user_block(each) for each in content]


def _user_block(each: str | domain.Image | domain.File) -> dict[str, object]:
    if isinstance(each, str):
        return {"type": "text", "text": each}
    return _image(each) if isinstance(each, domain.Image) else _file(each)


def _assistant(message: domain.AssistantMessage, *, endpoint: str, dialect: Dialect) -> dict[str, object]:
    is_own = message.endpoint == endpoint and message.wire == "chat"
    sent: dict[str, object] = {"role": "assistant"}
    if message.text.strip() or not message.calls:
        sent["content"] = message.text if message.text.strip() else EMPTY_TEXT
    elif dialect.empty_content != "omitted":
        sent["content"] = None if dialect.empty_content == "null" else " "
    field = message.reasoning_field if message.reasoning_field not in _OWN_KEYS | {"reasoning_details"} else None
    if dialect.reasoning == "always":
        sent[field or "reasoning_content"] = message.thought
    elif dialect.reasoning == "own" and is_own and field is not None:
        sent[field] = message.thought
    with_extra = is_own and dialect.opaque
    if with_extra:
        sent.update({key: value for key, value in message.opaque.items() if key not in sent and key not in _OWN_KEYS})
    if message.calls:
        sent["tool_calls"] = [_call(call, with_extra=with_extra) for call in message.calls]
    return sent


def _call(call: domain.ToolCall, *, with_extra: bool) -> dict[str, object]:
    function: dict[str, object] = {"name": call.name, "arguments": call.arguments}
    sent: dict[str, object] = {"id": call.id, "type": "function", "function": function}
    if with_extra:
        inner = call.extra.get("function")
        for target, members in ((sent, call.extra), (function, inner if isinstance(inner, Mapping) else {})):
            target.update({key: value for key, value in members.items() if key not in _OWN_KEYS})
    return sent


def _image(image: domain.Image) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def _file(file: domain.File) -> dict[str, object]:
    return {"type": "file", "file": {"filename": file.name, "file_data": data_url(file)}}
