"""MCP over the standard streams of a child process, as the transport that `mcp.Client` takes.

Strategy: the child leads a process group and is ended in well under a second: its input closed, 100 ms, SIGTERM,
300 ms, SIGKILL; whatever it started ends with it, also when it ends by itself. Messages to it are queued without
waiting, so that a child that does not read can hold up nobody. What it prints between messages is ignored, what it
says on standard error is logged and its last words kept. It gets a minimal environment and none of crow's keys.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import anyio
import mcp_types as mcp
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from crow.tools import StdioServer
from crow.tools.process import HiddenKeys, KeySource, Process, child_environment, start

__all__ = ["ServerProcess"]

logger = logging.getLogger(__name__)

CLOSE_S = 0.1
TERM_S = 0.3
LINE_BYTES = 32_000_000
QUEUED_BYTES = 4_000_000
UNREAD_BYTES = 64_000_000
LAST_WORDS_CHARS = 2_000
LOGGED_LINES = 1_000
INHERITED = (
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("NODE_EXTRA_CA_CERTS", "SSL_CERT_DIR", "SSL_CERT_FILE"),
    *("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "all_proxy", "https_proxy", "http_proxy", "no_proxy"),
)


class ServerProcess:
    """An MCP server as a child process, which does not get the `keys`. Enter and leave it in one task; once only.

    `closed` is set when the child has ended or closed its output, or broke the protocol; `reason` then says why.
    """

    def __init__(self, server: StdioServer, cwd: Path, keys: KeySource = HiddenKeys) -> None:
        self.closed = anyio.Event()
        self.reason = ""
        self._server = server
        self._cwd = cwd
        self._keys = keys
        self._process: Process | None = None
        self._stack = AsyncExitStack()
        self._partial = bytearray()
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._taken_bytes = 0
        self._paused = False
        self._arrived = anyio.Event()
        self._errors = bytearray()
        self._error_lines = 0

    @property
    def last_words(self) -> str:
        """The end of what the server wrote to standard error."""
        return self._errors.decode("utf-8", "replace").strip()[-LAST_WORDS_CHARS:]

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, None while it runs or if it never did."""
        return None if self._process is None else self._process.returncode

    async def __aenter__(
        self,
    ) -> tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]:
        """Start the server. :raises OSError: it cannot be started. :raises ValueError: a NUL in its command."""
        self._process = process = await start(
            [self._server.command, *self._server.args],
            cwd=self._cwd,
            env=child_environment(self._keys(), only=INHERITED, more=dict(self._server.env)),
            on_output=self._take_output,
            on_errors=self._take_errors,
            takes_input=True,
        )
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)
        for stream in (to_client, from_server, to_server, from_client):
            self._stack.callback(stream.close)
        self._stack.push_async_callback(self._end)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._deliver, to_client)
        tasks.start_soon(self._send, process, from_client)
        tasks.start_soon(self._watch_process, process)
        tasks.start_soon(self._watch_output, process)
        return from_server, to_server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server, within half a second."""
        await self._stack.__aexit__(kind, error, trace)

    async def _end(self) -> None:
        assert self._process is not None
        self._process.close_input()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_S):
                await self._process.exited.wait()
            await self._process.end(TERM_S)

    async def _watch_process(self, process: Process) -> None:
        """Notice the end of the process, even if somebody it started holds its output open."""
        await process.exited.wait()
        seen = -1
        while self._paused or self._taken_bytes > seen:  # what it still said comes first
            seen = self._taken_bytes
            with anyio.move_on_after(CLOSE_S):
                await process.output_ended.wait()
                break
        code = process.returncode
        assert code is not None
        self._close(f"it ended with exit code {code}" if code >= 0 else f"it was ended by signal {-code}")

    async def _watch_output(self, process: Process) -> None:
        await process.output_ended.wait()
        with anyio.move_on_after(CLOSE_S):
            await process.exited.wait()
            return
        self._close("it closed its output")

    def _close(self, reason: str) -> None:
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()
            self._arrived.set()

    async def _send(self, process: Process, messages: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with messages:
            async for message in messages:
                if self.closed.is_set():
                    return
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                if process.write(line.encode("utf-8", "replace") + b"\n") > UNREAD_BYTES:
                    self._close(f"it left {UNREAD_BYTES:,} bytes of requests unread")

    async def _deliver(self, client: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        async with client:
            while self._lines or not self.closed.is_set():
                if not self._lines:
                    self._arrived = anyio.Event()
                    await self._arrived.wait()
                    continue
                message = message_in(self._lines.popleft())
                if message is not None:
                    try:
                        await client.send(message)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return  # the client is gone
                self._resume_when_drained()

    def _take_output(self, data: bytes) -> None:
        """Split what arrives into lines; a reader that falls behind stops the server from writing on."""
        self._taken_bytes += len(data)
        newline = data.find(b"\n")
        if newline < 0:
            self._partial += data
        else:
            *lines, rest = (bytes(self._partial) + data).split(b"\n") if self._partial else data.split(b"\n")
            self._partial = bytearray(rest)
            self._lines.extend(lines)
            self._queued_bytes += sum(map(len, lines))
            self._arrived.set()
        if len(self._partial) > LINE_BYTES:
            self._partial.clear()
            self._close(f"it sent a line of more than {LINE_BYTES:,} bytes")
        if self._queued_bytes > QUEUED_BYTES and not self._paused and self._process is not None:
            self._paused = True
            self._process.pause()

    def _resume_when_drained(self) -> None:
        if not self._lines:
            self._queued_bytes = 0
            if self._paused and self._process is not None:
                self._paused = False
                self._process.resume()

    def _take_errors(self, data: bytes) -> None:
        self._errors += data
        del self._errors[: -4 * LAST_WORDS_CHARS]
        for line in data.decode("utf-8", "replace").splitlines():
            self._error_lines += 1
            if self._error_lines <= LOGGED_LINES:
                logger.info("%s: %s", self._server.name, line[:LAST_WORDS_CHARS])
            elif self._error_lines == LOGGED_LINES + 1:
                logger.info("%s: further lines are not logged", self._server.name)


def message_in(line: bytes) -> SessionMessage | None:
    """The message in a line, None for what is none."""
    if not line.strip():
        return None
    try:
        return SessionMessage(mcp.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        logger.debug("no JSON-RPC message: %r", line[:LAST_WORDS_CHARS])
        return None
