"""Encodes requests of Anthropic's Messages API.

Each request starts with the blocks of the previous one. Only the marks that ask the endpoint to cache the prompt move:
they stand after the system prompt, after the newest message, and after the message that was the newest in the previous
request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias, assert_never

from crow.domain import messages as domain
from crow.llm import Request
from crow.llm.content import EMPTY_TEXT, GO_ON, NO_OUTPUT, json_bytes, result_content, user_content
from crow.llm.dialect import Dialect
from crow.llm.encoder import Encoder
from crow.llm.items import Item, PlainText, items_of
from crow.llm.messages import schema
from crow.llm.messages.claude import claude, thinking_members

_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
_MARK = b',"cache_control":{"type":"ephemeral"}'
_END = b"}]}"
"""Every message ends with these bytes. A cache mark is put in front of them."""

_BYTES_PER_TOKEN = 4
"""An estimate, which converts the minimum length of a cached prompt from tokens to bytes."""

_THINKING_FORMS = frozenset({"adaptive_thinking", "thinking_budget", "thinking_off", "effort", "thinking_display"})
"""Parts of a request that say how much the model should think, and that an endpoint may refuse one by one."""

_Role: TypeAlias = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The blocks of a message in the form in which they are sent."""

    message: domain.Message
    role: _Role
    blocks: bytes
    starts_with_thought: bool = False
    """Whether the first block is a thought."""
    ended: bytes | None = None
    """If the endpoint paused in this answer, the blocks without those calls of the server's own tools that have no
    result. They replace `blocks` if the next message does not continue the answer. None if there was no pause."""


class MessagesEncoder(Encoder[_Encoded]):
    """Encodes requests; see :class:`crow.llm.encoder.Encoder`. Requests without a limit get one that the model accepts,
    because this API requires one."""

    member = "messages"
    fixed_members = frozenset({"messages", "system", "tools", "stream"})

    def __init__(self) -> None:
        super().__init__()
        self._sequence = _Sequence()
        self._system = _System()

    def _sent(self) -> list[bytes]:
        """Return the bytes of the system prompt and of each message in order, without cache marks."""
        return [*filter(None, [self._system.block]), *self._sequence.sent()[0]]

    def _head(self, request: Request, *, limit: int | None) -> dict[str, object]:
        dialect, model = self._dialect, self._model
        limit = limit or default_limit(model)
        is_streamed = dialect.streams and "stream" not in dialect.left_out
        head: dict[str, object] = {"model": model, "max_tokens": limit, "stream": is_streamed}
        if "thought_level" not in dialect.left_out:
            refused, may_think = dialect.left_out & _THINKING_FORMS, _may_think(self._encoded)
            level = request.thought_level
            head.update(thinking_members(level, model, limit=limit, refused=refused, may_think=may_think))
        if choice := _tool_choice(request, dialect):
            head["tool_choice"] = choice
        return head

    def _conversation(self) -> tuple[bytes, list[bytes]]:
        messages, marked = self._sequence.sent()
        if "cache_marker" in self._dialect.left_out:
            return self._system.sent, messages
        minimum = claude(self._model).min_cached_tokens * _BYTES_PER_TOKEN
        size = len(self._system.sent) + self._tools_size
        system = self._system.marked if size >= minimum else self._system.sent
        enough = next(
            (at for at, total in enumerate(accumulate(map(len, messages), initial=size)) if total >= minimum), None
        )
        for at in marked:
            if enough is not None and at + 1 >= enough:
                messages[at] = messages[at][: -len(_END)] + _MARK + _END
        return system, messages

    def _read(self, messages: tuple[domain.Message, ...]) -> None:
        text = ""
        if messages and isinstance(first := messages[0], domain.SystemMessage):
            text, messages = first.text, messages[1:]
        if text != self._system.text:
            self._system = _System(text)
        super()._read(messages)

    def _restart(self) -> None:
        self._sequence = _Sequence()

    def _add(self, encoded: _Encoded) -> None:
        self._sequence.add(encoded)

    def _encode(self, message: domain.Message) -> _Encoded:
        return _encode(message, endpoint=self._endpoint, dialect=self._dialect)

    def _tool(self, spec: domain.ToolSpec) -> dict[str, object]:
        return schema.tool(spec)


def default_limit(model: str) -> int:
    """Return the output limit in tokens of requests for which no limit is set."""
    return claude(model).max_output_tokens


class _System:
    """The system prompt as it is sent: the bytes of its block, and the member of the request with and without a cache
    mark."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.block = json_bytes(_text(text)) if text.strip() else b""
        self.sent = b',"system":[' + self.block + b"]" if self.block else b""
        self.marked = b',"system":[' + self.block[:-1] + _MARK + b"}]" if self.block else b""


class _Sequence:
    """Collects messages in the order in which they are sent. Consecutive tool results become one message."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._roles: list[_Role] = []
        self._is_after_result = False
        self._paused: _Encoded | None = None

    def add(self, encoded: _Encoded) -> None:
        """Add the next message."""
        is_result = isinstance(encoded.message, domain.ToolMessage)
        if is_result and self._is_after_result:
            self._sent[-1] = self._sent[-1].removesuffix(b"]}") + b"," + encoded.blocks + b"]}"
            return
        if encoded.role == "assistant":
            if self._paused is None and (not self._roles or self._roles[-1] == "assistant"):
                self._append("user", json_bytes(_text(GO_ON if self._roles else EMPTY_TEXT)))
        elif self._paused is not None and self._paused.ended is not None:
            self._sent[-1] = _message("assistant", self._paused.ended)
        self._append(encoded.role, encoded.blocks)
        self._is_after_result = is_result
        self._paused = encoded if encoded.ended is not None else None

    def _append(self, role: _Role, blocks: bytes) -> None:
        self._roles.append(role)
        self._sent.append(_message(role, blocks))

    def sent(self) -> tuple[list[bytes], list[int]]:
        """Return all messages so far, and the positions of those that may have a cache mark: the newest message, and
        the newest message of the previous request, up to which the endpoint has cached the prompt. The conversation
        ends with a message of the user, unless the model paused in its answer: newer models do not continue other
        answers."""
        sent, at = list(self._sent), len(self._roles) - 1
        if at < 0 or (self._roles[at] == "assistant" and self._paused is None):
            sent.append(_message("user", json_bytes(_text(GO_ON if sent else EMPTY_TEXT))))
        while at >= 0 and self._roles[at] == "user":
            at -= 1
        while at >= 0 and self._roles[at] == "assistant":
            at -= 1
        return sent, [*([at] if at >= 0 else []), len(sent) - 1]


def _message(role: _Role, blocks: bytes) -> bytes:
    return b'{"role":"' + role.encode() + b'","content":[' + blocks + b"]}"


def _may_think(encoded: Sequence[_Encoded]) -> bool:
    """Return whether the model may think with a budget of tokens: at the start of a turn, or if the turn began with a
    thought. Endpoints refuse thoughts in the middle of a turn that began without one."""
    first: _Encoded | None = None
    for at in range(len(encoded) - 1, -1, -1):
        each = encoded[at]
        if each.role == "assistant":
            first = each
        elif not any(isinstance(near.message, domain.ToolMessage) for near in encoded[max(0, at - 1) : at + 1]):
            break  # text that directly follows results does not begin a new turn
    return first is None or first.starts_with_thought


def _tool_choice(request: Request, dialect: Dialect) -> dict[str, object]:
    if not request.tools or "tool_choice" in dialect.left_out:
        return {}
    if request.tool_choice == "none":
        return {"type": "none"}
    is_single = dialect.parallel_calls is False and "parallel_tool_calls" not in dialect.left_out
    return {"type": "auto", "disable_parallel_tool_use": True} if is_single else {}


def _encode(message: domain.Message, *, endpoint: str, dialect: Dialect) -> _Encoded:
    match message:
        case domain.SystemMessage(text=text):
            return _Encoded(message, "user", json_bytes(_text(text)))
        case domain.UserMessage(parts=parts):
            return _Encoded(message, "user", b",".join(map(json_bytes, _user_blocks(parts, dialect))))
        case domain.ToolMessage():
            return _Encoded(message, "user", json_bytes(_result(message, dialect)))
        case domain.AssistantMessage():
            blocks = _assistant_blocks(message, endpoint=endpoint, dialect=dialect)
            is_own = message.is_paused and (message.endpoint, message.wire) == (endpoint, "messages")
            starts_with_thought = blocks[0]["type"] in _THOUGHTS
            sent = b",".join(map(json_bytes, blocks if is_own or message.calls else _ended(blocks)))
            ended = b",".join(map(json_bytes, _ended(blocks))) if is_own else None
            return _Encoded(message, "assistant", sent, starts_with_thought, ended)
        case _ as never:
            assert_never(never)


def _user_blocks(parts: Sequence[domain.Part], dialect: Dialect) -> list[dict[str, object]]:
    return [_user_block(each) for each in user_content(parts, dialect)]


def _user_block(each: str | domain.Image | domain.File) -> dict[str, object]:
    if isinstance(each, str):
        return _text(each)
    return _image(each) if isinstance(each, domain.Image) else _file(each)


def _result(message: domain.ToolMessage, dialect: Dialect) -> dict[str, object]:
    text, images, files = result_content(message, dialect)
    content = [_text(text if text.strip() else NO_OUTPUT)] if text.strip() or not (images or files) else []
    content += [*map(_image, images), *map(_file, files)]
    call_id = schema.call_id(message.call_id)
    result: dict[str, object] = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    # A result that is marked as failed may contain only text.
    is_marked = message.is_error and not (images or files)
    if is_marked and dialect.marks_failures and "is_error" not in dialect.left_out:
        result["is_error"] = True
    return result


def _assistant_blocks(message: domain.AssistantMessage, *, endpoint: str, dialect: Dialect) -> list[dict[str, object]]:
    """Return the blocks of an answer. If the answer came from this endpoint, return the blocks that it sent, in their
    order."""
    items = items_of(message, endpoint=endpoint, wire="messages", text_of=_text_of)
    if items is None or "opaque" in dialect.left_out:
        items = (*((PlainText(text=message.text),) if message.text.strip() else ()), *message.calls)
    blocks = [block for item in items if (block := _own_block(item, message)) is not None]
    if "earlier_thoughts" in dialect.left_out and message.is_before_break:
        blocks = [block for block in blocks if block["type"] not in _THOUGHTS]
    return _with_end(blocks)


def _with_end(blocks: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the blocks. Add a text if there are none or the last one is a thought, because endpoints refuse such an
    answer."""
    return [*blocks, _text(EMPTY_TEXT)] if not blocks or blocks[-1]["type"] in _THOUGHTS else blocks


def _ended(blocks: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the blocks of an answer that is not continued, without the calls of the server's own tools that have no
    result, because the endpoint would refuse such calls."""
    finished = {str(block.get("tool_use_id")) for block in blocks}
    return _with_end([block for block in blocks if not _is_server_call(block) or str(block.get("id")) in finished])


def _is_server_call(block: Mapping[str, object]) -> bool:
    """Return whether the block is a call of a tool that the server runs itself. Such a call has no result yet if the
    same answer also calls tools of crow: the server runs its own tools only after it has got the results of crow's
    tools."""
    return str(block["type"]).endswith("_tool_use")


def _own_block(item: Item | PlainText | domain.ToolCall, message: domain.AssistantMessage) -> dict[str, object] | None:
    match item:
        case PlainText(text=text):
            return _text(text)
        case domain.ToolCall():
            return _call(item)
        case Item(data=data, call=int(number)):
            return {**data, **_call(message.calls[number])}
        case Item(data=data):
            if data.get("type") == "text" and not (_text_of(data) or "").strip():
                return None  # Anthropic sends blocks with blank or empty text, but does not accept them
            required = ("thinking", "signature") if data.get("type") == "thinking" else ()
            return {**data, **{key: "" for key in required if key not in data}}
        case _ as never:
            assert_never(never)


def _text_of(data: domain.JsonObject) -> str | None:
    text = data.get("text")
    return text if data.get("type") == "text" and isinstance(text, str) else None


def _call(call: domain.ToolCall) -> dict[str, object]:
    try:
        arguments = json.loads(call.arguments, parse_constant=lambda _name: None)  # JSON has no NaN
    except (ValueError, RecursionError):
        arguments = {}
    return {
        "type": "tool_use",
        "id": schema.call_id(call.id),
        "name": schema.name(call.name),
        "input": arguments if isinstance(arguments, dict) else {},
    }


def _image(image: domain.Image) -> dict[str, object]:
    """Return the block of an image. An image of a type that this API does not accept becomes a text."""
    kind = "image/jpeg" if image.mime_type == "image/jpg" else image.mime_type
    if kind not in _IMAGES:
        return _text(f"[An image was left out: its type {kind} is not supported.]")
    source = {"type": "base64", "media_type": kind, "data": image.data}
    return {"type": "image", "source": source}


def _file(file: domain.File) -> dict[str, object]:
    source = {"type": "base64", "media_type": file.mime_type, "data": file.data}
    return {"type": "document", "source": source, "title": file.name}


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
