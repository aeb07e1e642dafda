"""Encodes requests as the bytes that are sent.

Each message is encoded once and its bytes are cached, so that the next request only has to join them. The bytes of a
message depend only on the message, the dialect and the endpoint. Therefore, as long as messages are only appended, each
request starts with the messages of the previous one. Since tool results can contain only text, the images of
consecutive results are sent in a user message after these results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from crow.domain import messages as domain
from crow.llm import Request, ThoughtLevel
from crow.llm.content import EMPTY_TEXT, NO_OUTPUT, json_bytes, left_out, user_content
from crow.llm.dialect import Dialect, Thinking

_FIXED_MEMBERS = frozenset({"messages", "tools", "stream"})
_OWN_KEYS = frozenset({"role", "content", "tool_calls", "id", "type", "function", "name", "arguments"})
_CACHES_ON_REQUEST = re.compile(r"claude|anthropic", re.IGNORECASE)
"""Matches the names of models that cache a prompt only if the request contains a cache marker."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A message in the form in which it is sent. `images` are the images of a tool result. They are sent in a user
    message after this result and the results that directly follow it. If an endpoint accepts only one call per message,
    `calls` contains a message for each call after the first. Each of these messages is inserted before the result of
    its call."""

    message: domain.Message
    sent: bytes
    images: tuple[bytes, ...] = ()
    calls: tuple[bytes, ...] = ()


class Encoder:
    """Encodes the requests of one session to one endpoint. Caches the encoded messages of the last request."""

    def __init__(self) -> None:
        self._messages: tuple[domain.Message, ...] = ()
        self._encoded: list[_Encoded] = []
        self._sequence = _Sequence()
        self._for: tuple[Dialect, str] | None = None
        self._tools: tuple[domain.ToolSpec, ...] = ()
        self._tools_sent = b""

    def body(
        self,
        request: Request,
        *,
        model: str,
        endpoint: str,
        dialect: Dialect,
        limit: int | None,
        extra: Mapping[str, object] | None = None,
    ) -> bytes:
        """Return the request body. `endpoint` names the receiver: opaque members of an answer are sent back only to the
        endpoint that they came from. `limit` is the output limit in tokens, or None to send no limit. Members of
        `extra` replace crow's own members of the same name, except those in `_FIXED_MEMBERS`."""
        if self._for != (dialect, endpoint):
            self._for = (dialect, endpoint)
            self._messages, self._encoded = (), []
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
        head.update({key: value for key, value in (extra or {}).items() if key not in _FIXED_MEMBERS})
        pieces = [json_bytes(head)[:-1]]
        if request.tools:
            if not self._tools_sent or (request.tools is not self._tools and request.tools != self._tools):
                self._tools = request.tools
                self._tools_sent = b",".join(json_bytes(_tool(tool)) for tool in request.tools)
            pieces.append(b',"tools":[' + self._tools_sent + b"]")
        messages = self.messages(request.messages, endpoint=endpoint, dialect=dialect)
        # With a single join, a long conversation is copied only once.
        messages[0] = b"".join((*pieces, b',"messages":[', messages[0]))
        messages[-1] += b"]}"
        return b",".join(messages)

    def messages(self, messages: Sequence[domain.Message], *, endpoint: str, dialect: Dialect) -> list[bytes]:
        """Return the bytes of each message in order, including messages that the encoder inserts between them."""
        messages = tuple(messages)
        old: Sequence[_Encoded] = ()
        if not self._messages or self._messages != messages[: len(self._messages)]:
            self._messages, self._sequence = (), _Sequence()
            old, self._encoded = self._encoded, []
        for position in range(len(self._messages), len(messages)):
            message = messages[position]
            known = old[position] if position < len(old) else None
            if known is None or (known.message is not message and known.message != message):
                known = _encode(message, endpoint=endpoint, dialect=dialect)
            self._encoded.append(known)
            self._sequence.add(known)
        self._messages = messages
        return self._sequence.sent()


class _Sequence:
    """Collects messages in the order in which they are sent. The images of consecutive tool results come directly after
    these results."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._images: list[bytes] = []
        self._calls: tuple[bytes, ...] = ()
        self._is_after_result = False

    def add(self, each: _Encoded) -> None:
        """Add the next message."""
        is_result = isinstance(each.message, domain.ToolMessage)
        if self._calls and is_result and self._is_after_result:
            self._sent.append(self._calls[0])
            self._calls = self._calls[1:]
        self._calls = each.calls or self._calls
        self._is_after_result = is_result
        if self._images and not is_result:
            self._sent = self.sent()
            self._images = []
            if isinstance(each.message, domain.UserMessage):
                self._sent.append(json_bytes({"role": "assistant", "content": "Seen."}))
        self._sent.append(each.sent)
        self._images.extend(each.images)

    def sent(self) -> list[bytes]:
        """Return all messages so far. If they end with tool results that have images, a message with these images
        follows."""
        if not self._images:
            return list(self._sent)
        intro = json_bytes({"type": "text", "text": "Images of the tool results above:"})
        return [*self._sent, b'{"role":"user","content":[' + b",".join((intro, *self._images)) + b"]}"]


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
        case domain.ToolMessage(call_id=call_id, text=text, images=images):
            if not dialect.takes_images:
                text = "\n".join((text, *map(left_out, images)))
                images = ()
            result = {"role": "tool", "tool_call_id": call_id, "content": text if text.strip() else NO_OUTPUT}
            return _Encoded(message, json_bytes(result), tuple(json_bytes(_image(image)) for image in images))
        case _ as never:
            assert_never(never)


def _user_content(parts: Sequence[domain.Part], dialect: Dialect) -> object:
    """Return one string if all parts can be written as text, else the list of parts."""
    content = user_content(parts, takes_images=dialect.takes_images)
    if len(content) == 1 and isinstance(content[0], str):
        return content[0]
    return [{"type": "text", "text": each} if isinstance(each, str) else _image(each) for each in content]


def _assistant(message: domain.AssistantMessage, *, endpoint: str, dialect: Dialect) -> dict[str, object]:
    is_own = message.endpoint == endpoint and message.wire == "chat"
    sent: dict[str, object] = {"role": "assistant"}
    if message.text.strip() or not message.calls:
        sent["content"] = message.text if message.text.strip() else EMPTY_TEXT
    elif dialect.empty_content != "omitted":
        sent["content"] = None if dialect.empty_content == "null" else " "
    field = message.reasoning_field if message.reasoning_field not in {"content", "reasoning_details"} else None
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


def _tool(tool: domain.ToolSpec) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _image(image: domain.Image) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:{image.mime_type};base64,{image.data}"}}
