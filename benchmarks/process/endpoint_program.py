"""A model endpoint for benchmarks that streams tokens, calls tools or hangs, and notes the times.

A prompt describes the answer as JSON after the word `bench` (see `Script`); requests share no state. Each request
prints a line of JSON when it arrives and one when its answer ends. Times are those of `time.monotonic`, the same
clock in every process. It uses only the standard library, in its own process, so it shares no interpreter with the
client. Given a directory, it writes the body of each request there as `ID.json`. Requests below `/responses` are
answered in the Responses API, which codex needs, all others as chat completions.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Script", "token"]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BLOCK = 80
"""Deltas in one chunk at full speed, about 16 KB, unless the script says otherwise."""

FIRST_AFTER_S = 0.002
"""Seconds between the head and the first delta, so the first one leaves alone."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The answer to one prompt: `calls` calls of `tool`, one per request, with the call's number for `{i}` in
    `arguments`; then `tokens` deltas of one token, `rate` per second, each in its own chunk (0: at full speed,
    `block` deltas per chunk). With `hang` nothing follows the head."""

    tokens: int = 3
    rate: float = 0
    block: int = BLOCK
    calls: int = 0
    tool: str = ""
    arguments: str = ""
    hang: bool = False


def token(number: int) -> str:
    """The text of one delta."""
    return f"t{number} "


def event(delta: dict[str, Any] | None, *, finish: str | None = None, usage: bool = False) -> bytes:
    body: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "fake-model"}
    body["choices"] = [] if usage else [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    if usage:
        body["usage"] = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


KNOWN = [event({"content": token(number)}) for number in range(20_000)]
END = event(None, finish="stop") + event(None, usage=True) + b"data: [DONE]\n\n"
CALLED = event(None, finish="tool_calls") + event(None, usage=True) + b"data: [DONE]\n\n"


def named_event(kind: str, **body: Any) -> bytes:
    """One event of the Responses API."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n".encode()


class Chat:
    """An answer as chat completions."""

    def __init__(self, number: int) -> None:
        self.number = number

    def head(self, _is_text: bool) -> bytes:
        return event({"role": "assistant", "content": ""})

    def deltas(self, numbers: Sequence[int]) -> bytes:
        return b"".join(KNOWN[number] for number in numbers)

    def call(self, name: str, arguments: str) -> bytes:
        call = {"name": name, "arguments": arguments}
        function = {"index": 0, "id": f"call_{self.number}", "type": "function", "function": call}
        return event({"tool_calls": [function]}) + CALLED

    def end(self, _tokens: int) -> bytes:
        return END


class Responses:
    """The same in the Responses API."""

    def __init__(self, number: int) -> None:
        self.response: dict[str, Any] = {"id": f"resp_{number}", "object": "response", "model": "fake-model"}
        self.message: dict[str, Any] = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
        self.number = number

    def head(self, is_text: bool) -> bytes:
        head = named_event("response.created", response=self.response | {"status": "in_progress", "output": []})
        if is_text:
            item = self.message | {"status": "in_progress", "content": []}
            head += named_event("response.output_item.added", output_index=0, item=item)
        return head

    def deltas(self, numbers: Sequence[int]) -> bytes:
        where = {"item_id": self.message["id"], "output_index": 0, "content_index": 0}
        return b"".join(named_event("response.output_text.delta", **where, delta=token(number)) for number in numbers)

    def call(self, name: str, arguments: str) -> bytes:
        call = {"type": "function_call", "id": f"fc_{self.number}", "call_id": f"call_{self.number}", "name": name}
        return self._last(call | {"arguments": arguments, "status": "completed"})

    def end(self, tokens: int) -> bytes:
        text = {"type": "output_text", "text": "".join(map(token, range(tokens))), "annotations": []}
        return self._last(self.message | {"status": "completed", "content": [text]})

    def _last(self, item: dict[str, Any]) -> bytes:
        usage = {"input_tokens": 1000, "output_tokens": 10, "total_tokens": 1010}
        done = self.response | {"status": "completed", "output": [item], "usage": usage}
        return named_event("response.output_item.done", output_index=0, item=item) + named_event(
            "response.completed", response=done
        )


def words(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def scripted(body: dict[str, Any]) -> tuple[Script, int, int]:
    """The newest prompt's script, the number of results since, and the length of the newest result."""
    results, newest = 0, 0
    for message in reversed(body["messages"] if "messages" in body else body["input"]):
        kind = message.get("role", message.get("type"))
        if kind in ("tool", "function_call_output"):
            newest = newest or len(words(message.get("content", message.get("output"))))
            results += 1
        found = re.search(r"bench (\{.*\})", words(message.get("content"))) if kind == "user" else None
        if found:
            return Script(**json.loads(found[1])), results, newest
    return Script(), results, newest


@dataclass
class Noted:
    """One request: when its first byte arrived, when the first and last delta left, and the largest gap between two
    deltas. `tools` is the number of tools that it offers."""

    id: int
    asked: float
    bytes: int = 0
    tools: int = 0
    result_chars: int = 0
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0
    left: bool = False
    state: str = field(default="asked")


def tell(noted: Noted) -> None:
    sys.stdout.write(json.dumps(noted.__dict__) + "\n")
    sys.stdout.flush()


class Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    count = 0

    def __init__(self) -> None:
        self._buffer = b""
        self._asked = 0.0
        self._task: asyncio.Task[None] | None = None
        self._noted: Noted | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._task is not None and not self._task.done() and self._noted is not None:
            self._task.cancel()
            self._noted.left, self._noted.last, self._noted.state = True, time.monotonic(), "done"
            tell(self._noted)

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self._asked = time.monotonic()
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        if not mark or len(rest) < size:
            return
        self._buffer = rest[size:]
        if head.startswith(b"GET"):
            listed = json.dumps({"object": "list", "data": [{"id": "fake-model", "object": "model"}]}).encode()
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(listed), listed)
            )
            return
        Connection.count += 1
        self._noted = noted = Noted(id=Connection.count, asked=self._asked, bytes=size)
        tell(noted)
        answer = Responses(noted.id) if b"/responses " in head.partition(b"\r\n")[0] else Chat(noted.id)
        if len(sys.argv) > 1:
            Path(sys.argv[1], f"{noted.id}.json").write_bytes(rest[:size])
        self._task = asyncio.get_running_loop().create_task(self._answer(json.loads(rest[:size]), noted, answer))

    async def _answer(self, body: dict[str, Any], noted: Noted, answer: Chat | Responses) -> None:
        script, results, noted.result_chars = scripted(body)
        noted.tools = len(body.get("tools") or ())
        self._transport.write(HEAD + framed(answer.head(results >= script.calls)))
        if script.hang:
            await asyncio.Event().wait()
        if results < script.calls:
            end = answer.call(script.tool, script.arguments.replace("{i}", str(results + 1)))
            noted.first = time.monotonic()
        else:
            await asyncio.sleep(FIRST_AFTER_S)
            await self._stream(script, noted, answer)
            end = answer.end(script.tokens)
        noted.last, noted.state = time.monotonic(), "done"
        self._transport.write(framed(end) + b"0\r\n\r\n")
        tell(noted)

    async def _stream(self, script: Script, noted: Noted, answer: Chat | Responses) -> None:
        noted.first = before = time.monotonic()
        step = 1 if script.rate else script.block
        for at in range(0, script.tokens, step):
            if script.rate:
                await asyncio.sleep(noted.first + at / script.rate - time.monotonic())
            else:
                await self._writable.wait()
            now = time.monotonic()
            noted.gap, before = max(noted.gap, now - before), now
            self._transport.write(framed(answer.deltas(range(at, min(at + step, script.tokens)))))


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
