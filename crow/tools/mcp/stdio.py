"""Runs an MCP server as a child process and exchanges messages with it over its standard streams.

A server starts in an empty directory of its own, not in the workspace: programs such as `python -m` and `npx` run code
that they find in the directory where they start.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import anyio
import anyio.lowlevel
import anyio.to_thread
import mcp_types as mcp
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from crow.domain.errors import ToolServerError
from crow.programs import trusted_path
from crow.tools import Workspace
from crow.tools.process import HiddenKeys, KeySource, Process, child_environment, start
from crow.tools.servers import THE_WORKSPACE, StdioServer
from crow.tools.temporary import TemporaryDirectory

logger = logging.getLogger(__name__)

CLOSE_S = 0.1
"""A server has this many seconds to end after its input is closed. Then it gets SIGTERM."""
_TERM_S = 0.3
"""A server has this many seconds to end after SIGTERM. Then it gets SIGKILL."""
_EXIT_S = 2.0
"""A server that has closed its output has this many seconds to end, so that its exit code can be reported."""
LINE_BYTES = 32_000_000
"""The maximum size of one message of a server."""
QUEUED_BYTES = 4_000_000
"""While more bytes than this wait to be processed, crow does not read from the server."""
UNREAD_BYTES = 64_000_000
"""If a server leaves more bytes of requests unread than this, its connection is closed."""
LAST_WORDS_CHARS = 2_000
LOGGED_LINES = 1_000
"""Of one process, at most this many lines of standard error are logged. The same holds for its log messages."""
_ID_BYTES = 2_000
"""The id of an unreadable message is searched in this many bytes at its beginning and at its end."""
_SCALAR = re.compile(rb'"(id|method)"\s*:\s*("[^"\\]{1,200}"|-?\d{1,18})')
_MEMBER = rb'\s*"\w{1,40}"\s*:\s*(?:"[^"\\]{0,200}"|-?\d{1,18})\s*'
_SCALARS_BEFORE = re.compile(rb"\s*\{(?:" + _MEMBER + rb",)+")
_SCALARS_AFTER = re.compile(rb"(?:," + _MEMBER + rb")+\}\s*\Z")
"""`_SCALARS_BEFORE` matches the members of a message that come before all objects and lists, and `_SCALARS_AFTER`
matches those that come after them. `_SCALAR` finds the id and the method in these members."""

_INHERITED = (
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    *("NODE_EXTRA_CA_CERTS", "SSL_CERT_DIR", "SSL_CERT_FILE"),
    *("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "all_proxy", "https_proxy", "http_proxy", "no_proxy"),
)


@dataclass(eq=False)
class ServerProcess:
    """An MCP server as a child process: a transport for `mcp.Client`. Enter and leave it in the same task, and only
    once.

    The child gets a minimal environment. Its PATH contains no relative directories and no directories of the workspace.
    It starts in an empty directory, which is removed when the context is left.

    The child leads a process group. When the context is left, the child's input is closed. After `CLOSE_S`, the whole
    group and all processes that have left the group get SIGTERM. After a further `_TERM_S`, they get SIGKILL. Lines of
    the child's output that are not messages are ignored. Its standard error is logged.
    """

    server: StdioServer
    workspace: Workspace
    keys: KeySource = HiddenKeys
    """Secrets that the child's environment does not contain."""
    places: Sequence[Path] = ()
    """The directory where the child starts is made in one of these, outside the workspace if possible, because `npx`
    looks for programs in all parents of the directory where it starts."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set when the child has ended, closed its output or broken the protocol."""
    reason: str = ""
    """Why `closed` is set, in words."""
    _private: TemporaryDirectory | None = None
    """The directory that was made for the child. None before that."""
    _process: Process | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Ends the child and removes its directory."""
    _partial: bytearray = field(default_factory=bytearray)
    """The beginning of a line whose end has not arrived."""
    _lines: deque[bytes] = field(default_factory=deque)
    """The whole lines that wait to be processed."""
    _queued_bytes: int = 0
    """The bytes that arrived as whole lines since `_lines` was last empty."""
    _received_bytes: int = 0
    """All bytes of output that have arrived."""
    _is_paused: bool = False
    """Whether crow has stopped reading the output: see `QUEUED_BYTES`."""
    _arrived: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is a new line, or the server is closed."""
    _errors: bytearray = field(default_factory=bytearray)
    """The end of what the child wrote to standard error."""
    _error_lines: int = 0

    @property
    def last_words(self) -> str:
        """The last text that the server wrote to standard error."""
        return self._errors.decode("utf-8", "replace").strip()[-LAST_WORDS_CHARS:]

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the process. None while the process runs, or
        if it was never started."""
        return None if self._process is None else self._process.returncode

    async def __aenter__(
        self,
    ) -> tuple[ObjectReceiveStream[SessionMessage | Exception], ObjectSendStream[SessionMessage]]:
        """Start the server.

        :raises OSError: the server cannot be started.
        :raises ValueError: the command contains a NUL.
        :raises ~crow.domain.errors.ToolServerError: the command is a relative path, or the server cannot be confined.
        """
        command, cwd = self.server.command, str(self.workspace.cwd)
        if os.path.dirname(command) and not os.path.isabs(command):
            raise ToolServerError(
                f"its command is {command}; expected an absolute path or the name of a program on PATH"
            )
        argv = [command, *(arg.replace(THE_WORKSPACE, cwd) for arg in self.server.args)]
        self._stack.push_async_callback(self._remove_directory)
        self._private = await anyio.to_thread.run_sync(_make_directory, self._trusted_places())
        try:
            self._process = await self._start(argv, self._environment(cwd), self._private.path / "temporary")
        except FileNotFoundError as error:
            await self._stack.aclose()
            if os.path.dirname(command):
                raise
            raise ToolServerError(f"{command} is not on PATH (directories of the workspace do not count)") from error
        except BaseException:
            await self._stack.aclose()
            raise
        self._stack.push_async_callback(self._end, self._process)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._watch_process, self._process)
        tasks.start_soon(self._watch_output, self._process)
        return _Incoming(self), _Outgoing(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server, within half a second."""
        await self._stack.__aexit__(kind, error, trace)

    async def receive(self) -> SessionMessage:
        """Return the next message. :raises anyio.EndOfStream: the server is closed."""
        await anyio.lowlevel.checkpoint()  # a server that floods must not block the event loop
        while True:
            while self._lines:
                message = self._parse(self._lines.popleft())
                if not self._lines:
                    self._resume()
                if message is not None:
                    return message
            if self.closed.is_set():
                raise anyio.EndOfStream
            self._arrived = anyio.Event()
            await self._arrived.wait()

    def _parse(self, line: bytes) -> SessionMessage | None:
        """Return the message in a line, or None if there is none for the client. If a request cannot be read, answer it
        with an error. If a response cannot be read, return an error response instead. Otherwise one side would wait for
        ever."""
        try:
            return _parse_message(line)
        except ValueError as error:
            logger.debug("no JSON-RPC message: %r", line[:LAST_WORDS_CHARS])
            response, is_request = _unreadable_message(line, error)
        if response is not None and is_request:
            with suppress(anyio.BrokenResourceError):
                self.send(SessionMessage(response))
        return None if response is None or is_request else SessionMessage(response)

    def send(self, message: SessionMessage) -> None:
        """Queue a message without waiting, so that a server that does not read its input cannot block the sender.

        :raises anyio.BrokenResourceError: the server is closed.
        """
        if self._process is None or self.closed.is_set():
            raise anyio.BrokenResourceError
        line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        if self._process.write(line.encode("utf-8", "replace") + b"\n") > UNREAD_BYTES:
            self._close(f"it left {UNREAD_BYTES:,} bytes of requests unread")

    def _trusted_places(self) -> list[Path]:
        """Return those of `places` that are outside the workspace; none if the server runs in a sandbox."""
        # A sandbox may hide these places. A directory in /tmp is safe there, because the sandbox shows an empty /tmp.
        if self.server.sandbox is not None:
            return []
        return [place for place in self.places if not self.workspace.contains(Path(os.path.realpath(place)))]

    def _environment(self, cwd: str) -> Mapping[str, str]:
        """Return the child's variables. `cwd` is the session's working directory."""
        path = {"PATH": trusted_path(self.workspace.contains)}
        own = {name: value.replace(THE_WORKSPACE, cwd) for name, value in self.server.env}
        return child_environment(self.keys(), only=_INHERITED, more=path | own)

    async def _start(self, argv: list[str], env: Mapping[str, str], directory: Path) -> Process:
        if self.server.sandbox is None:
            return await start(
                argv,
                cwd=directory / "work",
                env=env,
                on_output=self._on_output,
                on_errors=self._on_errors,
                takes_input=True,
            )
        try:
            return await self.workspace.start_confined(
                argv,
                access=self.server.sandbox,
                cwd=directory / "work",
                directory=directory,
                env=env,
                on_output=self._on_output,
                on_errors=self._on_errors,
            )
        except PermissionError as error:
            raise ToolServerError(
                f'it was not started, because its setting sandbox = "{self.server.sandbox}" cannot be enforced: '
                f"{error.strerror} Remove the setting to run the server unconfined."
            ) from error

    async def _remove_directory(self) -> None:
        if self._private is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._private.remove)

    async def _end(self, process: Process) -> None:
        process.close_input()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_S):
                await process.exited.wait()
            if self.server.sandbox is None:
                await process.end(_TERM_S)
            else:
                await self.workspace.end_confined(process, _TERM_S)

    async def _watch_process(self, process: Process) -> None:
        """Notice the end of the process, even if one of its children keeps the output open."""
        await process.exited.wait()
        before = -1
        while self._is_paused or self._received_bytes > before:  # first read the rest of the output
            before = self._received_bytes
            with anyio.move_on_after(CLOSE_S):
                await process.output_ended.wait()
                break
        code = process.returncode
        assert code is not None
        self._close(f"it ended with exit code {code}" if code >= 0 else f"it was ended by signal {-code}")

    async def _watch_output(self, process: Process) -> None:
        await process.output_ended.wait()
        with anyio.move_on_after(_EXIT_S):
            await process.exited.wait()
            return
        self._close("it closed its output")

    def _close(self, reason: str) -> None:
        """Record that the server can no longer be used. Only the first reason counts."""
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()
            self._arrived.set()

    def _on_output(self, data: bytes) -> None:
        """Split output into lines. Stop reading from the server while too much output waits to be processed."""
        self._received_bytes += len(data)
        first, *others = data.split(b"\n")
        self._partial += first
        if others:
            lines = [bytes(self._partial), *others[:-1]]
            self._partial = bytearray(others[-1])
            self._lines.extend(lines)
            self._queued_bytes += sum(len(line) + 1 for line in lines)
            self._arrived.set()
        if len(self._partial) > LINE_BYTES:
            self._partial.clear()
            self._close(f"it sent a line of more than {LINE_BYTES:,} bytes")
        if self._queued_bytes > QUEUED_BYTES and not self._is_paused and self._process is not None:
            self._is_paused = True
            self._process.read_output(False)

    def _resume(self) -> None:
        self._queued_bytes = 0
        if self._is_paused and self._process is not None:
            self._is_paused = False
            self._process.read_output(True)

    def _on_errors(self, data: bytes) -> None:
        self._errors += data
        del self._errors[: -4 * LAST_WORDS_CHARS]
        for line in data.decode("utf-8", "replace").splitlines():
            self._error_lines += 1
            if self._error_lines <= LOGGED_LINES:
                logger.info("%s: %s", self.server.name, line[:LAST_WORDS_CHARS])
            elif self._error_lines == LOGGED_LINES + 1:
                logger.info("%s: further lines are not logged", self.server.name)


def _make_directory(places: Sequence[Path]) -> TemporaryDirectory:
    """Make a directory that only this user can access. It is made in the first of the `places` where that works, or
    else in the system's directory for temporary files. The new directory contains an empty directory `temporary/work`,
    in which a server starts.

    A sandbox may mount `temporary` on /tmp. In that case, other directories that are mounted below /tmp appear in
    `temporary`, but `temporary/work` stays empty.
    """
    for place in (*places, None):
        try:
            if place is not None:
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            private = TemporaryDirectory.create("server", place)
            break
        except OSError:
            if place is None:
                raise
    (private.path / "temporary" / "work").mkdir(mode=0o700, parents=True)
    return private


class _Incoming(ObjectReceiveStream[SessionMessage | Exception]):
    """The messages of a server, as a stream for `mcp.Client`."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def receive(self) -> SessionMessage:
        return await self._server.receive()

    async def aclose(self) -> None:
        """Do nothing: the `ServerProcess` ends the process when its context is left."""


class _Outgoing(ObjectSendStream[SessionMessage]):
    """The messages to a server, as a stream for `mcp.Client`."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    async def send(self, item: SessionMessage) -> None:
        await anyio.lowlevel.checkpoint()
        self._server.send(item)

    async def aclose(self) -> None:
        """Do nothing: the `ServerProcess` ends the process when its context is left."""


def _parse_message(line: bytes) -> SessionMessage | None:
    """Return the message in a line; None if there is none. :raises ValueError: the line is not a valid JSON-RPC
    message."""
    return SessionMessage(mcp.jsonrpc_message_adapter.validate_json(line, by_name=False)) if line.strip() else None


def _unreadable_message(line: bytes, error: ValueError) -> tuple[mcp.JSONRPCError | None, bool]:
    """Return the error response to an unreadable message, and whether that message is a request of the server.

    For example, a message is unreadable if it nests too deeply. Its id can be found only if it comes before or after
    all objects and lists, as it does in all usual messages. If no id is found, the response is None.
    """
    members: dict[bytes, bytes] = {}
    for part in (_SCALARS_BEFORE.match(line[:_ID_BYTES]), _SCALARS_AFTER.search(line[-_ID_BYTES:])):
        members |= dict(_SCALAR.findall(part[0])) if part is not None else {}
    text = members.get(b"id")
    if text is None:
        return None, False
    request_id = text[1:-1].decode("utf-8", "replace") if text.startswith(b'"') else int(text)
    reason = (
        error.errors(include_url=False, include_input=False)[0]["msg"] if isinstance(error, ValidationError) else ""
    )
    data = mcp.ErrorData(code=mcp.PARSE_ERROR, message=reason or "it is not valid")
    return mcp.JSONRPCError(jsonrpc="2.0", id=request_id, error=data), b"method" in members
