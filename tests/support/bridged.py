"""An editor that reaches a server through a bridge, which runs in a thread of the test."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any, Self

import anyio

from crow.bridge.loop import Bridge, Times
from crow.bridge.websocket import Address

WAIT_S = 60.0
Message = dict[str, Any]


class QuickTimes(Times):
    """Shorter delays, and no end without a server unless a test sets one."""

    first_delay, longest_delay = 0.001, 0.02
    ping, pong = 0.3, 2.0
    ask_again = 0.3


class BridgedEditor:
    """Writes lines to a bridge and reads its lines."""

    def __init__(self, address: str | Path, *, token: str = "", times: type[Times] = QuickTimes) -> None:
        self._address, self._token, self._times = str(address), token, times
        self.log: list[Message] = []
        self.lines: list[bytes] = []
        self.answers_asks = True
        self._ids = itertools.count(1)
        self._waiting: dict[Any, asyncio.Future[Message]] = {}
        self._arrived = asyncio.Event()
        self.exit_code: int | None = None

    async def __aenter__(self) -> Self:
        source, self._stdin = os.pipe()
        stdout, sink = os.pipe()
        self._fds = [source, sink, stdout]
        self.bridge = Bridge(Address(self._address), token=self._token, source=source, sink=sink)
        self.bridge.times = self._times()
        loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()

        def run() -> None:
            try:
                self.exit_code = self.bridge.run()
            finally:
                loop.call_soon_threadsafe(self._ended.set)

        self._thread = threading.Thread(target=run, daemon=True)
        self._reader = asyncio.StreamReader(limit=1 << 27)
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), os.fdopen(stdout, "rb", 0)
        )
        self._reading = asyncio.create_task(self._read())
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close_stdin()
        await self.ended()
        self._thread.join(WAIT_S)
        for fd in self._fds[:2]:
            os.close(fd)
        await self._reading
        self._transport.close()

    def pause(self) -> None:
        """Read no more output of the bridge, until `resume`."""
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read the output again."""
        self._transport.resume_reading()

    def close_stdin(self) -> None:
        """End the input of the bridge."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def ended(self) -> int | None:
        """Wait for the end of the bridge; its exit code."""
        with anyio.fail_after(WAIT_S):
            await self._ended.wait()
        return self.exit_code

    async def raw(self, data: bytes) -> None:
        """Write bytes."""
        await asyncio.to_thread(_write_all, self._stdin, data)

    async def send(self, message: Message) -> None:
        """Write a message."""
        await self.raw(json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n")

    async def start(self, method: str, **params: Any) -> asyncio.Future[Message]:
        """Send a request; the future is its answer."""
        request_id = next(self._ids)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        await self.send({"id": request_id, "method": method, "params": params})
        return future

    async def request(self, method: str, **params: Any) -> Message:
        """Send a request and wait for the whole answer."""
        with anyio.fail_after(WAIT_S):
            return await (await self.start(method, **params))

    async def new_session(self, cwd: str | Path = "/") -> str:
        """Initialize, and open a session."""
        assert "result" in await self.request("initialize", protocolVersion=1)
        answer = await self.request("session/new", cwd=str(cwd), mcpServers=[])
        return str(answer["result"]["sessionId"])

    async def start_prompt(self, session: str, text: str) -> asyncio.Future[Message]:
        """Send a prompt."""
        return await self.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": text}])

    async def prompt(self, session: str, text: str) -> Message:
        """Send a prompt and wait for the answer."""
        with anyio.fail_after(WAIT_S):
            return await (await self.start_prompt(session, text))

    def text(self, session: str) -> str:
        """What the session's agent said."""
        chunks = [update for update in self.updates(session) if update["sessionUpdate"] == "agent_message_chunk"]
        return "".join(chunk["content"]["text"] for chunk in chunks)

    async def new_session_v2(self, cwd: str | Path) -> str:
        """Agree on version 2, and open a session."""
        info = {"name": "t", "version": "0"}
        agreed = await self.request("initialize", protocolVersion=2, info=info, capabilities={})
        assert agreed["result"]["protocolVersion"] == 2
        answer = await self.request("session/new", cwd=str(cwd), mcpServers=[])
        return str(answer["result"]["sessionId"])

    def updates(self, session: str, *, since: int = 0) -> list[Message]:
        """The updates of a session."""
        return [
            message["params"]["update"]
            for message in self.log[since:]
            if message.get("method") == "session/update" and message["params"]["sessionId"] == session
        ]

    async def turn_end(self, session: str, message_id: str) -> Message:
        """In version 2: the state after the turn of a prompt."""

        def found() -> Message | None:
            updates = self.updates(session)
            shown = [at for at, update in enumerate(updates) if update.get("messageId") == message_id]
            after = updates[shown[-1] :] if shown else []
            return next((each for each in after if each.get("state") == "idle" and "stopReason" in each), None)

        await self.until(found)
        return found() or {}

    def asks(self) -> list[Message]:
        """The permission requests that were shown."""
        return [message for message in self.log if message.get("method") == "session/request_permission"]

    async def until(self, wanted: Any) -> None:
        """Wait until `wanted()` is true; it is asked again after each line."""
        with anyio.fail_after(WAIT_S):
            while not wanted():
                self._arrived.clear()
                await self._arrived.wait()

    async def _read(self) -> None:
        while line := await self._reader.readline():
            assert line.endswith(b"\n")
            self.lines.append(line[:-1])
            message = json.loads(line)
            self.log.append(message)
            if "method" not in message:
                future = self._waiting.pop(message.get("id"), None)
                if future is not None:
                    future.set_result(message)
            elif message["method"] == "session/request_permission" and self.answers_asks:
                outcome = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
                await self.send({"id": message["id"], "result": outcome})
            self._arrived.set()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
