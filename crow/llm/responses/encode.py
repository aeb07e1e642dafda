"""Encodes requests to Responses.

Crow keeps the log itself and lets the endpoint store nothing, so each request contains the whole conversation. The
endpoint sends its reasoning encrypted, and crow sends it back to the same endpoint with the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from crow.domain import messages as domain
from crow.llm import Request
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
from crow.llm.dialect import Dialect
from crow.llm.encoder import Encoder
from crow.llm.items import Item, PlainText, items_of

_TAKES_BREAKPOINTS = re.compile(r"\bgpt-(?:5\.(?:[6-9]|\d\d)|[6-9]|\d\d)")
"""Matches the names of models that accept explicit cache breakpoints."""

_STRICT_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "description"),
        *("title", "$defs", "$ref", "pattern", "format", "minimum", "maximum", "minItems", "maxItems"),
    }
)
"""The JSON Schema keywords that strict function tools may have."""
_MAX_STRICT_DEPTH = 5
_GO_ON = json_bytes({"type": "message", "role": "user", "content": GO_ON})


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A message in the form in which it is sent."""

    message: domain.Message
    sent: bytes
    custom: frozenset[str]
    """The ids of those calls of the last answer that are sent as custom calls. Their results have another form."""


class ResponsesEncoder(Encoder[_Encoded]):
    """Encodes requests; see :class:`crow.llm.encoder.Encoder`."""

    member = "input"
    fixed_members = frozenset(
        {"input", "tools", "stream", "store", "previous_response_id", "conversation", "background"}
    )

    def __init__(self) -> None:
        super().__init__()
        self._items: list[bytes] = []
        self._last: domain.Message | None = None
        self._marks_system = False

    def _use(self, *, model: str, endpoint: str, dialect: Dialect) -> None:
        super()._use(model=model, endpoint=endpoint, dialect=dialect)
        marks_system = dialect.cache == "key" and _TAKES_BREAKPOINTS.search(model) is not None
        marks_system = marks_system and "cache_retention" not in dialect.left_out
        if self._marks_system != marks_system:
            self._marks_system = marks_system
            self._forget()

    def _head(self, request: Request, *, limit: int | None) -> dict[str, object]:
        return _head(request, model=self._model, dialect=self._dialect, limit=limit)

    def _sent(self) -> list[bytes]:
        return [*self._items, _GO_ON] if is_paused(self._last) else list(self._items)

    def _restart(self) -> None:
        self._items, self._last = [], None

    def _add(self, encoded: _Encoded) -> None:
        if is_paused(self._last) and isinstance(encoded.message, domain.AssistantMessage):
            self._items.append(_GO_ON)
        self._last = encoded.message
        self._items.append(encoded.sent)

    def _tool(self, spec: domain.ToolSpec) -> dict[str, object]:
        return _tool(spec, self._dialect)

    def _is_known(self, known: _Encoded, message: domain.Message) -> bool:
        return known.custom == self._custom_before(message) and super()._is_known(known, message)

    def _custom_before(self, message: domain.Message) -> frozenset[str]:
        """Return the ids of the calls of the last answer, up to this message, that are sent as custom calls."""
        if isinstance(message, domain.AssistantMessage):
            return _custom_calls(message, self._endpoint, self._dialect)
        return self._encoded[-1].custom if self._encoded else frozenset()

    def _encode(self, message: domain.Message) -> _Encoded:
        custom = self._custom_before(message)
        return _Encoded(message, self._bytes(message, custom), custom)

    def _bytes(self, message: domain.Message, custom: frozenset[str]) -> bytes:
        dialect = self._dialect
        match message:
            case domain.SystemMessage(text=text):
                content: object = text
                if self._marks_system:
                    mark = {"mode": "explicit"}
                    content = [{"type": "input_text", "text": text, "prompt_cache_breakpoint": mark}]
                sent = json_bytes({"type": "message", "role": dialect.system_role, "content": content})
                if dialect.system_role == "user":
                    sent += b"," + json_bytes(_assistant_text("Understood."))
                return sent
            case domain.UserMessage(parts=parts):
                pieces = user_content(parts, dialect)
                is_text = len(pieces) == 1 and isinstance(pieces[0], str)
                user: object = pieces[0] if is_text else [_user_item(each) for each in pieces]
                return json_bytes({"type": "message", "role": "user", "content": user})
            case domain.AssistantMessage():
                return b",".join(map(json_bytes, _assistant(message, endpoint=self._endpoint, dialect=dialect)))
            case domain.ToolMessage(call_id=call_id):
                kind = "custom_tool_call_output" if call_id in custom else "function_call_output"
                return json_bytes({"type": kind, "call_id": call_id, "output": _output(message, dialect)})
            case _ as never:
                assert_never(never)


def _head(request: Request, *, model: str, dialect: Dialect, limit: int | None) -> dict[str, object]:
    """Return the members before the tools and the conversation."""
    out = dialect.left_out
    head: dict[str, object] = {"model": model, "stream": "stream" not in out and dialect.streams}
    if "store" not in out:
        head["store"] = False
    if "include" not in out and "opaque" not in out:
        head["include"] = ["reasoning.encrypted_content"]
    reasoning: dict[str, object] = {}
    if request.thought_level is not None and "thought_level" not in out:
        reasoning["effort"] = "none" if request.thought_level == "off" else request.thought_level
    if "summary" not in out and request.thought_level != "off":
        reasoning["summary"] = "auto"
    if reasoning:
        head["reasoning"] = reasoning
    if limit is not None and "output_limit" not in out:
        head["max_output_tokens"] = limit
    if dialect.cache == "key" and request.cache_key and "prompt_cache_key" not in out:
        head["prompt_cache_key"] = request.cache_key
    if request.tools and request.tool_choice == "none" and "tool_choice" not in out:
        head["tool_choice"] = "none"
    if request.tools and dialect.parallel_calls is not None and "parallel_tool_calls" not in out:
        head["parallel_tool_calls"] = dialect.parallel_calls
    return head


def _assistant(message: domain.AssistantMessage, *, endpoint: str, dialect: Dialect) -> list[dict[str, object]]:
    """Return the items of an answer."""
    items = _own_items(message, endpoint, dialect)
    if items is None:
        plain = [_assistant_text(message.text)] if message.text.strip() or not message.calls else []
        return [*plain, *map(_call, message.calls)]
    sent: list[dict[str, object]] = []
    for item in items:
        match item:
            case PlainText(text=text):
                sent.append(_assistant_text(text))
            case domain.ToolCall():
                sent.append(_call(item))
            case Item(data=data, call=None):
                if data.get("type") != "reasoning" or data.get("encrypted_content") or data.get("content"):
                    # Reasoning without its content is left out: the endpoint would look for it in its own store.
                    sent.append(dict(data))
            case Item(data=data, call=index):
                sent.append(_own_call(data, message.calls[index or 0], dialect))
    return sent or [_assistant_text(message.text)]


def _own_items(
    message: domain.AssistantMessage, endpoint: str, dialect: Dialect
) -> tuple[Item | PlainText | domain.ToolCall, ...] | None:
    if "opaque" in dialect.left_out:
        return None
    return items_of(message, endpoint=endpoint, wire="responses", text_of=_text_of)


def _text_of(data: Mapping[str, object]) -> str | None:
    """Return the text of a message item, or None for other items."""
    if data.get("type") != "message":
        return None
    content = data.get("content")
    texts = [content] if isinstance(content, str) else []
    for part in content if isinstance(content, (list, tuple)) else ():
        text = (part.get("text") or part.get("refusal")) if isinstance(part, Mapping) else None
        texts += [text] if isinstance(text, str) else []
    return "".join(texts)


def _own_call(data: Mapping[str, object], call: domain.ToolCall, dialect: Dialect) -> dict[str, object]:
    """Return a call in the form in which the endpoint sent it, with the call's id, name and arguments put back."""
    if data.get("type") != "custom_tool_call":
        return {**data, "call_id": call.id, "name": call.name, "arguments": call.arguments}
    if "custom_tools" in dialect.left_out:
        return _call(call)
    try:
        members = json.loads(call.arguments)
    except (ValueError, RecursionError):  # the stored call is damaged
        members = None
    inputs = [value for value in members.values() if isinstance(value, str)] if isinstance(members, dict) else []
    text = inputs[0] if len(inputs) == 1 else call.arguments
    return {**data, "call_id": call.id, "name": call.name, "input": text}


def _custom_calls(message: domain.AssistantMessage, endpoint: str, dialect: Dialect) -> frozenset[str]:
    """Return the ids of the calls that are sent as custom calls."""
    if not message.calls or not message.opaque or "custom_tools" in dialect.left_out:
        return frozenset()
    return frozenset(
        message.calls[item.call].id
        for item in _own_items(message, endpoint, dialect) or ()
        if isinstance(item, Item) and item.call is not None and item.data.get("type") == "custom_tool_call"
    )


def _assistant_text(text: str) -> dict[str, object]:
    return {"type": "message", "role": "assistant", "content": text if text.strip() else EMPTY_TEXT}


def _call(call: domain.ToolCall) -> dict[str, object]:
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _output(message: domain.ToolMessage, dialect: Dialect) -> object:
    """Return the result of a call: a text, or a list if it has images or files."""
    text, images, files = result_content(message, dialect)
    text = text if text.strip() else NO_OUTPUT
    if not (images or files):
        return text
    return [{"type": "input_text", "text": text}, *map(_image, images), *map(_file, files)]


def _user_item(each: str | domain.Image | domain.File) -> dict[str, object]:
    if isinstance(each, str):
        return {"type": "input_text", "text": each}
    return _image(each) if isinstance(each, domain.Image) else _file(each)


def _image(image: domain.Image) -> dict[str, object]:
    return {"type": "input_image", "image_url": data_url(image), "detail": "auto"}


def _file(file: domain.File) -> dict[str, object]:
    return {"type": "input_file", "filename": file.name, "file_data": data_url(file)}


def _tool(tool: domain.ToolSpec, dialect: Dialect) -> dict[str, object]:
    if tool.freeform is not None and "custom_tools" not in dialect.left_out:
        form: dict[str, object] = {"type": "text"}
        if tool.freeform.syntax != "text":
            form = {"type": "grammar", "syntax": tool.freeform.syntax, "definition": tool.freeform.grammar}
        return {"type": "custom", "name": tool.name, "description": tool.description, "format": form}
    sent: dict[str, object] = {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    if "strict" not in dialect.left_out:
        # If this member is missing, the endpoint may change a schema to make it strict.
        sent["strict"] = is_strict(tool.input_schema)
    return sent


def is_strict(schema: object, depth: int = 0) -> bool:
    """Return whether a JSON Schema meets the rules for strict function tools: each object lists all its properties as
    required and forbids others."""
    if not isinstance(schema, Mapping) or depth > _MAX_STRICT_DEPTH or not schema.keys() <= _STRICT_KEYS:
        return False
    kinds = schema.get("type")
    if depth == 0 and kinds != "object":
        return False
    if kinds == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        required = schema.get("required", ())
        if schema.get("additionalProperties") is not False or not isinstance(properties, Mapping):
            return False
        if not isinstance(required, (list, tuple)) or set(required) != set(properties):
            return False
        if not all(is_strict(each, depth + 1) for each in properties.values()):
            return False
    elif not {"type", "enum", "const", "anyOf", "$ref"} & schema.keys():
        return False
    inner = [*_values(schema.get("$defs")), *_listed(schema.get("anyOf"))]
    if kinds == "array" or "items" in schema:
        inner.append(schema.get("items"))
    return all(is_strict(each, depth + 1) for each in inner)


def _values(members: object) -> list[object]:
    return list(members.values()) if isinstance(members, Mapping) else []


def _listed(items: object) -> list[object]:
    return list(items) if isinstance(items, (list, tuple)) else []
