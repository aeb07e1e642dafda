"""Lets an endpoint that is scripted in chat completions speak Responses and Messages too.

A request on another wire is read as if it had come as a chat completion, and the reply is written on its wire.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["as_chat", "sent_as"]

PATHS = {"/responses": "responses", "/messages": "messages"}


def as_chat(body: Mapping[str, Any], wire: str) -> dict[str, Any]:
    """A request as a chat completion: the messages, the tools by name, and the other members as they are."""
    tools = [{"type": "function", "function": {**tool, "parameters": _schema(tool)}} for tool in body.get("tools", ())]
    found: dict[str, Any] = {**body, "messages": list(_from_items(body) if wire == "responses" else _from_blocks(body))}
    return found | ({"tools": tools} if tools else {})


def _schema(tool: Mapping[str, Any]) -> object:
    return tool.get("parameters") or tool.get("input_schema")


def _from_items(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    text: str | None = None
    for item in [*body["input"], {"type": "end"}]:
        kind, role = item["type"], item.get("role")
        if kind in {"function_call", "custom_tool_call"}:
            function = {"name": item["name"], "arguments": item.get("arguments", item.get("input"))}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "message" and role == "assistant":
            text = (text or "") + _text(item["content"])
        elif kind not in {"message", "end"} and not kind.endswith("_output"):
            continue
        else:
            if text is not None or calls:
                yield {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
                text, calls = None, []
            if kind == "message":
                yield {"role": role, "content": _text(item["content"])}
            elif kind != "end":
                yield {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}


def _from_blocks(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if body.get("system"):
        yield {"role": "system", "content": _text(body["system"])}
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = _text([block for block in blocks if block["type"] == "text"])
        if message["role"] == "assistant":
            calls = [
                {
                    "id": each["id"],
                    "type": "function",
                    "function": {"name": each["name"], "arguments": json.dumps(each["input"])},
                }
                for each in blocks
                if each["type"] == "tool_use"
            ]
            yield {"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {})
            continue
        for block in blocks:
            if block["type"] == "tool_result":
                yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content", ""))}
        if any(block["type"] in {"text", "image"} for block in blocks):
            yield {"role": "user", "content": text}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content if isinstance(part, Mapping))


def sent_as(steps: Sequence[Any] | Iterator[Any], wire: str) -> Iterator[Any]:
    """The steps of a reply with the bytes of a chat completion written on another wire."""
    writer = _Responses() if wire == "responses" else _Messages()
    for step in steps:
        if isinstance(step, bytes):
            yield _written(writer, step)
        elif isinstance(step, tuple):
            yield tuple(each for each in (_written(writer, piece) for piece in step) if each)
        else:
            yield step


def _written(writer: _Writer, step: bytes) -> bytes:
    datas = [line[6:] for line in step.decode().split("\n") if line.startswith("data: ")]
    if not datas:
        return step
    events = [event for data in datas for event in writer.read(data)]
    return "".join(
        f"event: {each['type']}\ndata: {json.dumps(each, ensure_ascii=False)}\n\n" for each in events
    ).encode()


class _Writer:
    """Writes the chunks of a chat completion as events of another wire."""

    def __init__(self) -> None:
        self.kind = ""
        self.place = -1
        self.finish: str | None = None
        self.usage: dict[str, Any] | None = None
        self.has_begun = False
        self.calls: dict[int, int] = {}

    def read(self, data: str) -> Iterator[dict[str, Any]]:
        if data == "[DONE]":
            yield from self.close()
            yield from self.end()
            return
        chunk = json.loads(data)
        if "error" in chunk:
            error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": chunk["error"]}
            yield {"type": "error", "error": error}
            return
        if not self.has_begun:
            self.has_begun = True
            yield from self.begin()
        if chunk.get("usage"):
            self.usage = chunk["usage"]
            yield from self.report()
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content"):
                yield from self.piece("thought", thought)
            if text := delta.get("content"):
                yield from self.piece("text", text)
            for call in delta.get("tool_calls") or ():
                yield from self.call(call)
            self.finish = choice.get("finish_reason") or self.finish

    def piece(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self.kind != kind:
            yield from self.close()
            self.kind = kind
            self.place += 1
            yield from self.open({})
        yield from self.add(text)

    def call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        index, function = call.get("index", 0), call["function"]
        if index not in self.calls:
            yield from self.close()
            self.kind = "call"
            self.place += 1
            self.calls[index] = self.place
            yield from self.open({"id": call["id"], "name": function["name"]})
        if function.get("arguments"):
            yield from self.add(function["arguments"])

    def report(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def begin(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def open(self, call: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def add(self, piece: str) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def close(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def end(self) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class _Responses(_Writer):
    """Items, with an encrypted copy of each thought."""

    def __init__(self) -> None:
        super().__init__()
        self.item: dict[str, Any] = {}
        self.made = ""

    def counts(self) -> dict[str, Any]:
        names = {
            "prompt_tokens": "input_tokens",
            "completion_tokens": "output_tokens",
            "prompt_tokens_details": "input_tokens_details",
            "completion_tokens_details": "output_tokens_details",
        }
        return {names.get(name, name): value for name, value in (self.usage or {}).items()}

    def report(self) -> Iterator[dict[str, Any]]:
        yield {"type": "response.in_progress", "response": {"status": "in_progress", "usage": self.counts()}}

    def begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}}

    def open(self, call: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        self.made = ""
        at = self.place
        match self.kind:
            case "thought":
                self.item = {"id": f"rs_{at}", "type": "reasoning", "summary": []}
            case "text":
                self.item = {"id": f"msg_{at}", "type": "message", "role": "assistant", "status": "in_progress"}
            case _:
                of = {"call_id": call["id"], "name": call["name"], "arguments": ""}
                self.item = {"id": f"fc_{at}", "type": "function_call", "status": "in_progress", **of}
        yield {"type": "response.output_item.added", "output_index": at, "item": self.item}

    def add(self, piece: str) -> Iterator[dict[str, Any]]:
        self.made += piece
        names = {"thought": "reasoning_summary_text", "text": "output_text", "call": "function_call_arguments"}
        indexes: dict[str, dict[str, Any]] = {"thought": {"summary_index": 0}, "text": {"content_index": 0}}
        where = {"item_id": self.item["id"], "output_index": self.place, **indexes.get(self.kind, {})}
        yield {"type": f"response.{names[self.kind]}.delta", **where, "delta": piece}

    def close(self) -> Iterator[dict[str, Any]]:
        if not self.kind:
            return
        own: dict[str, dict[str, Any]] = {
            "thought": {
                "summary": [{"type": "summary_text", "text": self.made}],
                "encrypted_content": f"sealed {self.made}",
            },
            "text": {
                "status": "completed",
                "content": [{"type": "output_text", "text": self.made, "annotations": []}],
            },
            "call": {"status": "completed", "arguments": self.made},
        }
        item = {**self.item, **own[self.kind]}
        yield {"type": "response.output_item.done", "output_index": self.place, "item": item}
        self.kind = ""

    def end(self) -> Iterator[dict[str, Any]]:
        reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self.finish or "")
        status = "completed" if reason is None else "incomplete"
        response: dict[str, Any] = {"id": "resp_1", "status": status, "output": []}
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if self.usage is not None:
            response["usage"] = self.counts()
        yield {"type": f"response.{status}", "response": response}


class _Messages(_Writer):
    """Blocks, with a signature for each thought."""

    def report(self) -> Iterator[dict[str, Any]]:
        usage = self.usage or {}
        details = usage.get("prompt_tokens_details") or {}
        counts = {"input_tokens": usage.get("prompt_tokens"), "output_tokens": usage.get("completion_tokens")}
        for name, own in (
            ("cached_tokens", "cache_read_input_tokens"),
            ("cache_write_tokens", "cache_creation_input_tokens"),
        ):
            if name in details:
                counts[own] = details[name]
                counts["input_tokens"] -= details[name]
        counts["output_tokens_details"] = usage.get("completion_tokens_details")
        yield {"type": "message_delta", "delta": {}, "usage": counts}

    def begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": {"id": "msg_1", "role": "assistant", "content": []}}

    def open(self, call: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        blocks: dict[str, dict[str, Any]] = {
            "thought": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
            "call": {"type": "tool_use", "id": call.get("id"), "name": call.get("name"), "input": {}},
        }
        block = blocks[self.kind]
        yield {"type": "content_block_start", "index": self.place, "content_block": block}

    def add(self, piece: str) -> Iterator[dict[str, Any]]:
        deltas: dict[str, dict[str, Any]] = {
            "thought": {"type": "thinking_delta", "thinking": piece},
            "text": {"type": "text_delta", "text": piece},
            "call": {"type": "input_json_delta", "partial_json": piece},
        }
        yield {"type": "content_block_delta", "index": self.place, "delta": deltas[self.kind]}

    def close(self) -> Iterator[dict[str, Any]]:
        if self.kind == "thought":
            delta = {"type": "signature_delta", "signature": f"signed {self.place}"}
            yield {"type": "content_block_delta", "index": self.place, "delta": delta}
        if self.kind:
            yield {"type": "content_block_stop", "index": self.place}
        self.kind = ""

    def end(self) -> Iterator[dict[str, Any]]:
        reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
        yield {"type": "message_delta", "delta": {"stop_reason": reasons.get(self.finish or "stop")}}
        yield {"type": "message_stop"}
