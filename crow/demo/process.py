"""A real crow process, as an editor holds one: started, spoken to line by line, killed.

Strategy: one task does everything. A request is written, then lines are read until its answer comes; what arrives in
between (updates, questions) is handed to a listener. No protocol library and nothing of the agent: only pipes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from crow.domain.errors import CrowError

__all__ = ["CrowProcess", "DemoFailed", "Json", "Listener", "start_crow"]

Json: TypeAlias = dict[str, Any]

_LONGEST_LINE = 32 * 1024 * 1024


class DemoFailed(CrowError):
    """A step did not do what it should."""


class Listener(Protocol):
    """Whoever watches a session."""

    def update(self, update: Json) -> None:
        """Something happened in the session: the `update` of a `session/update`."""
        ...

    def permission(self, question: Json) -> str | None:
        """crow asks whether a call may run; returns the id of an option, None for cancelled."""
        ...


@asynccontextmanager
async def start_crow(listener: Listener, environment: Mapping[str, str], stderr: Path) -> AsyncIterator[CrowProcess]:
    """Run `crow acp`; on leaving, its stdin is closed and it is given 5 s to end before it is killed.

    What it prints on stderr is added to the file `stderr`.
    """
    with stderr.open("ab") as errors:
        process = await anyio.open_process(
            [sys.executable, "-m", "crow", "acp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
    crow = CrowProcess(process, listener, stderr)
    try:
        yield crow
        if not crow.was_killed:
            await crow.end()
    finally:
        with anyio.CancelScope(shield=True):
            await crow.kill()


class CrowProcess:
    """One running process."""

    def __init__(self, process: Process, listener: Listener, stderr: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._listener = listener
        self._stderr = stderr
        self._requests = 0
        self.was_killed = False

    async def request(
        self, method: str, params: Json, *, timeout_s: float, stop: Callable[[], bool] | None = None
    ) -> Json | None:
        """Send a request and return its result; None if `stop` said so after some line before the answer came.

        :raises DemoFailed: an error as answer, no answer within `timeout_s`, or the end of the process.
        """
        self._requests += 1
        request_id = self._requests
        await self._send({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
        try:
            with anyio.fail_after(timeout_s):
                while True:
                    message = await self._receive(method)
                    if message.get("id") == request_id and "method" not in message:
                        return _result(method, message)
                    await self._handle(message)
                    if stop is not None and stop():
                        return None
        except TimeoutError:
            raise DemoFailed(f"{method}: no answer within {timeout_s:g} s{self._last_words()}") from None

    def listen(self, listener: Listener) -> None:
        """Hand what comes from now on to another listener."""
        self._listener = listener

    async def kill(self) -> None:
        """End it as `kill -9` does, if it still runs."""
        self.was_killed = True
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._process.aclose()

    async def end(self) -> None:
        """Close its stdin and wait until it has ended by itself. :raises DemoFailed: it did not, or not well."""
        if self._process.returncode is None:
            await self._stdin.aclose()
        with anyio.move_on_after(5) as limit:
            await self._process.wait()
        if limit.cancelled_caught:
            raise DemoFailed(f"crow did not end within 5 s of the end of its input{self._last_words()}")
        if self._process.returncode != 0:
            raise DemoFailed(f"crow ended with exit code {self._process.returncode}{self._last_words()}")

    async def _send(self, message: Json) -> None:
        try:
            await self._stdin.send(json.dumps(message).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            raise DemoFailed(f"crow ended before {message.get('method', 'an answer')}{self._last_words()}") from None

    async def _receive(self, waiting_for: str) -> Json:
        try:
            line = await self._lines.receive_until(b"\n", _LONGEST_LINE)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            raise DemoFailed(f"crow ended during {waiting_for}{self._last_words()}") from None
        try:
            message = json.loads(line)
        except ValueError:
            raise DemoFailed(f"crow wrote a line that is no JSON: {line[:200]!r}") from None
        if not isinstance(message, dict):
            raise DemoFailed(f"crow wrote a line that is no message: {line[:200]!r}")
        return message

    async def _handle(self, message: Json) -> None:
        match message:
            case {"method": "session/update", "params": {"update": dict(update)}}:
                self._listener.update(update)
            case {"method": "session/request_permission", "id": request_id, "params": dict(question)}:
                option = self._listener.permission(question)
                outcome = {"outcome": "cancelled"} if option is None else {"outcome": "selected", "optionId": option}
                await self._send({"jsonrpc": "2.0", "id": request_id, "result": {"outcome": outcome}})
            case {"method": str(method), "id": request_id}:
                error = {"code": -32601, "message": f"The demo has no {method}"}
                await self._send({"jsonrpc": "2.0", "id": request_id, "error": error})
            case _:
                pass  # a notification that this client does not know

    def _last_words(self) -> str:
        words = self._stderr.read_text("utf-8", "replace").strip() if self._stderr.exists() else ""
        return f"; it said: {words[-2000:]}" if words else ""


def _result(method: str, message: Json) -> Json:
    match message:
        case {"error": {"message": str(words), "code": code}}:
            raise DemoFailed(f"{method}: {words} ({code})")
        case {"result": dict(result)}:
            return result
        case {"result": None}:
            return {}
        case _:
            raise DemoFailed(f"{method}: an answer that is none: {json.dumps(message)[:500]}")
