"""A real HTTP server on loopback that speaks chat completions from a script, and other wires if a test wants them.

A reply is a list of bytes and steps between them (wait, cut, hang), so a test can write down any dialect and any
fault. The server records every request. It runs in the loop of an async test (`async with FakeEndpoint()`) or in
its own thread (`with FakeEndpoint.in_thread()`), for tests that drive a process.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Self

from tests.support.wires import PATHS, as_chat, sent_as

__all__ = [
    "CUT",
    "HANG",
    "FakeEndpoint",
    "Gate",
    "Recorded",
    "Reply",
    "body",
    "calls",
    "chunk",
    "failing",
    "sse",
    "text",
    "usage",
]

SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
JSON = {"Content-Type": "application/json"}


class Gate:
    """A place in a reply where the server stops until the test opens it. Works across threads."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        """Let the reply continue."""
        with self._lock:
            self._open.set()
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)

    def wait_reached(self, timeout_s: float = 10) -> bool:
        """Block the test's thread until the server has reached the gate."""
        return self._reached.wait(timeout_s)

    async def reached(self) -> None:
        """Wait in the server's loop until the server has reached the gate."""
        await asyncio.get_running_loop().run_in_executor(None, self._reached.wait, 10)

    async def pass_through(self) -> None:
        """Called by the server: stop here until the gate is open."""
        event = asyncio.Event()
        with self._lock:
            self._waiters.append((asyncio.get_running_loop(), event))
            if self._open.is_set():
                event.set()
        self._reached.set()
        await event.wait()


class _Step:
    """A step other than bytes."""


CUT = _Step()
"""Close the connection here, in the middle of the body."""

HANG = _Step()
"""Send nothing more until the client disconnects."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One HTTP response. `steps` may be endless: the server writes bytes (one chunk each; a tuple of bytes in one
    write), waits for that many seconds at a number, stops at gates, and ends at `CUT` and `HANG`."""

    steps: Iterable[bytes | tuple[bytes, ...] | float | Gate | _Step] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: SSE)


@dataclass(kw_only=True)
class Recorded:
    """One request. `left` is set if the client closed the connection before the reply ended."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def wire(self) -> str:
        """The wire of the request."""
        return PATHS.get(self.path[self.path.rfind("/") :], "chat")

    @property
    def body(self) -> Any:
        """The JSON body of the request. A request on another wire is shown as a chat completion."""
        body = self.sent
        return body if body is None or self.wire == "chat" else as_chat(body, self.wire)

    @property
    def sent(self) -> Any:
        """The JSON body as it was sent."""
        return json.loads(self.raw) if self.raw else None


def sse(*events: object, done: bool = True) -> bytes:
    """Server-sent events as bytes: a string is sent as it is, anything else is encoded as JSON."""
    datas = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    return "".join(f"data: {data}\n\n" for data in [*datas, *(["[DONE]"] if done else [])]).encode()


def chunk(delta: Mapping[str, object] | None = None, *, finish: str | None = None, **more: object) -> dict[str, object]:
    """A chat completion chunk with one choice."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "fake-model",
        "choices": [{"index": 0, "delta": dict(delta or {}), "finish_reason": finish}],
        **more,
    }


def usage(sent: int = 10, made: int = 5) -> dict[str, object]:
    """The chunk that reports token counts."""
    return {"choices": [], "usage": {"prompt_tokens": sent, "completion_tokens": made, "total_tokens": sent + made}}


def text(*pieces: str, between: Sequence[float | Gate] = (), finish: str = "stop") -> Reply:
    """A plain answer; `between[i]` is waited for after piece number i."""
    steps: list[bytes | float | Gate | _Step] = [sse(chunk({"role": "assistant", "content": ""}), done=False)]
    for position, piece in enumerate(pieces):
        steps.append(sse(chunk({"content": piece}), done=False))
        steps.extend(between[position : position + 1])
    return Reply(steps=(*steps, sse(chunk(finish=finish), usage())))


def calls(*named: tuple[str, Mapping[str, object]], say: str = "", prefix: str = "call") -> Reply:
    """An answer that calls tools, each call in a single chunk."""
    fragments = [
        {
            "index": index,
            "id": f"{prefix}{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(named)
    ]
    chunks: list[object] = [chunk({"role": "assistant", "content": say or None})]
    chunks += [chunk({"tool_calls": [fragment]}) for fragment in fragments]
    return Reply(steps=(sse(*chunks, chunk(finish="tool_calls"), usage()),))


def failing(status: int, message: str = "", *, headers: Mapping[str, str] | None = None, **error: object) -> Reply:
    """An HTTP error in OpenAI's form."""
    content = json.dumps({"error": {"message": message, **error}}).encode()
    return Reply(steps=(content,), status=status, headers={**JSON, **(headers or {})})


def body(content: bytes, *, content_type: str = "application/json", status: int = 200) -> Reply:
    """A reply with any body."""
    return Reply(steps=(content,), status=status, headers={"Content-Type": content_type})


class FakeEndpoint:
    """Answers chat completions with the scripted replies in order, then with `otherwise`.

    A script entry may be a function of the request. `GET /models` lists `models`, which are names or whole items.
    `wires` are the wires that it serves; replies are translated to them.
    """

    def __init__(self, *, otherwise: Reply | Callable[[Recorded], Reply] | None = None) -> None:
        self.requests: list[Recorded] = []
        self.connections = 0
        self.models: list[str | Mapping[str, object]] = ["fake-model"]
        self.listing = asyncio.Event()
        """Whether `GET /models` is answered. Clear it to hold the answers."""
        self.listing.set()
        self.base_url = ""
        self.wires: tuple[str, ...] = ("chat",)
        self._script: list[Reply | Callable[[Recorded], Reply]] = []
        self._otherwise = otherwise or text("Hello", " there", ".")
        self._tasks: set[asyncio.Task[None]] = set()

    def script(self, *replies: Reply | Callable[[Recorded], Reply]) -> None:
        """Add replies to the next requests."""
        self._script.extend(replies)

    def clear_script(self) -> None:
        """Remove the replies for which no request has come."""
        self._script.clear()

    def answer_with(self, reply: Reply | Callable[[Recorded], Reply]) -> None:
        """Replace the reply that is sent after the script."""
        self._otherwise = reply

    @property
    def asked(self) -> list[Recorded]:
        """The requests to a model so far, on the wires that the endpoint serves."""
        return [each for each in self.requests if self._serves(each)]

    def _serves(self, request: Recorded) -> bool:
        return request.path.endswith(("/chat/completions", *PATHS)) and request.wire in self.wires

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self._accept), "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @classmethod
    @contextmanager
    def in_thread(cls, *, otherwise: Reply | Callable[[Recorded], Reply] | None = None) -> Iterator[FakeEndpoint]:
        """Run the server in its own thread and loop."""
        endpoint = cls(otherwise=otherwise)
        ready, stop = threading.Event(), Gate()

        async def serve() -> None:
            async with endpoint:
                ready.set()
                await stop.pass_through()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(60)
        try:
            yield endpoint
        finally:
            stop.open()
            thread.join(60)

    @property
    def open_connections(self) -> int:
        """The number of connections that are open now."""
        return len(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                if not await self._answer(request, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _answer(self, request: Recorded, writer: asyncio.StreamWriter) -> bool:
        """Send the reply. Returns false if the connection is closed."""
        if request.path.endswith("/models"):
            await self.listing.wait()
        reply = self._reply(request)
        async with _watching(request, writer):
            phrase = HTTPStatus(reply.status).phrase if reply.status != 529 else "Overloaded"  # Anthropic's own
            head = f"HTTP/1.1 {reply.status} {phrase}\r\n"
            headers = {**reply.headers, "Transfer-Encoding": "chunked"}
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(head.encode() + b"\r\n")
            for step in reply.steps:
                match step:
                    case b"":
                        pass
                    case bytes() | tuple():
                        chunks = (step,) if isinstance(step, bytes) else step
                        writer.write(b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks))
                        await writer.drain()
                    case Gate():
                        await step.pass_through()
                    case float() | int():
                        await asyncio.sleep(step)
                    case _ if step is CUT:
                        writer.transport.abort()
                        return False
                    case _:
                        await asyncio.Event().wait()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return True

    def _reply(self, request: Recorded) -> Reply:
        if request.path.endswith("/models"):
            items = [{"id": each, "object": "model"} if isinstance(each, str) else each for each in self.models]
            return body(json.dumps({"object": "list", "data": items}).encode())
        if not self._serves(request):
            return failing(404, "Not found")
        reply = self._script.pop(0) if self._script else self._otherwise
        reply = reply(request) if callable(reply) else reply
        if request.wire == "chat" or reply.headers is not SSE:
            return reply
        return replace(reply, steps=sent_as(iter(reply.steps), request.wire))


class _Connection(asyncio.StreamReaderProtocol):
    """Notices when the client disconnects, even if nothing reads."""

    def __init__(self, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.gone = asyncio.Event()
        super().__init__(asyncio.StreamReader(limit=2**20), accept)

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


@asynccontextmanager
async def _watching(request: Recorded, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """End the block when the client disconnects."""
    connection, owner = writer.transport.get_protocol(), asyncio.current_task()
    assert isinstance(connection, _Connection)
    assert owner is not None

    async def watch() -> None:
        await connection.gone.wait()
        request.left.set()
        owner.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except ConnectionError:
        request.left.set()
        raise
    finally:
        watcher.cancel()


async def _read_request(reader: asyncio.StreamReader) -> Recorded | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Recorded(method=method, path=path, headers=headers, raw=raw)
