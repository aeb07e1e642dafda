"""One external MCP server of a session: started, listed, called, and named when it fails.

Strategy: one task owns the library's client from entering to leaving it, as that demands; calls come from any task.
The server gets one deadline for starting, whatever it does with it. The handshake that every server knows comes
first, since the newer probe makes an old server cost ten seconds; only one that refuses it is asked the new way.
Whatever a server provokes is its own failure, kept as a sentence.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import httpx2
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from crow.domain.errors import ToolServerError
from crow.domain.messages import ToolSpec
from crow.tools import HttpServer, McpServer, OnOutput, Outcome, ServerStatus, StdioServer
from crow.tools.mcp_names import tool_names
from crow.tools.mcp_results import outcome_of, sentence
from crow.tools.mcp_stdio import StdioTransport

__all__ = ["Connection", "ExternalTool", "OnChange"]

logger = logging.getLogger(__name__)

OnChange = Callable[[], Awaitable[None]]
"""Told when a server became ready, failed or changed its tools; ask `servers()` and `specs()` what is so now."""

HTTP_S = 30.0
HTTP_READ_S = 300.0
PAGES = 50
DESCRIPTION_CHARS = 8_000
PROGRESS_LINES = 100
PROGRESS_EVERY_S = 0.1
REFUSED_HANDSHAKE = (mcp.METHOD_NOT_FOUND, mcp.UNSUPPORTED_PROTOCOL_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTool:
    """A tool of a server: `name` is the server's own, `spec.name` the model's, `title` for people."""

    name: str
    title: str
    spec: ToolSpec


class Connection:
    """A server. `serve` is its task; everything else may be called from others."""

    def __init__(
        self,
        server: McpServer,
        *,
        prefix: str,
        cwd: Path,
        start_timeout_s: float,
        call_timeout_s: float,
        on_change: OnChange | None,
    ) -> None:
        self.name = server.name
        self.prefix = prefix
        self.tools: tuple[ExternalTool, ...] = ()
        """The newest known tools, kept when the server is gone."""
        self.settled = anyio.Event()
        """Set once the server is ready or has failed."""
        self._server = server
        self._cwd = cwd
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._on_change = on_change
        self._state: Literal["starting", "ready", "failed"] = "starting"
        self._detail = ""
        self._client: Client | None = None
        self._transport: StdioTransport | None = None
        self._starting = anyio.CancelScope()
        self._stopping = anyio.Event()
        self._listing_changed = anyio.Event()

    @property
    def status(self) -> ServerStatus:
        """How the server is."""
        tools = len(self.tools) if self._state == "ready" else 0
        return ServerStatus(name=self.name, state=self._state, detail=self._detail, tools=tools)

    def stop(self) -> None:
        """Let `serve` end; a server that is still starting is given up at once."""
        self._stopping.set()
        if not self.settled.is_set():
            self._starting.cancel()

    async def serve(self) -> None:
        """Start the server and keep it until `stop`; never raises for what the server does."""
        deadline = anyio.current_time() + self._start_timeout_s
        try:
            try:
                await self._serve("legacy", deadline)
            except Exception as error:
                if self.settled.is_set() or not refused_handshake(error):
                    raise
                await self._serve("auto", deadline)
        except Exception as error:  # noqa: BLE001 - a stranger's failure, whatever it is, must stay the stranger's
            await self._fail(self._words(error))

    async def _serve(self, mode: Literal["legacy", "auto"], deadline: float) -> None:
        if self._stopping.is_set():
            raise ToolServerError("stopped")
        with anyio.CancelScope(deadline=deadline) as self._starting:
            async with AsyncExitStack() as stack:
                transport = await self._open(stack)
                client = Client(
                    transport,
                    mode=mode,
                    cache=None,
                    read_timeout_seconds=self._call_timeout_s,
                    message_handler=self._hear,
                )
                await stack.enter_async_context(client)
                self.tools = await self._list(client)
                self._starting.deadline = math.inf
                self._client = client
                await self._settle("ready", "")
                try:
                    await self._attend(client)
                finally:
                    self._client = None
        if self._starting.cancelled_caught:
            stopped = self._stopping.is_set()
            raise ToolServerError("stopped" if stopped else f"it did not answer within {self._start_timeout_s:g} s")

    async def _open(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        match self._server:
            case StdioServer():
                self._transport = StdioTransport(self._server, self._cwd)
                return self._transport
            case HttpServer(transport="sse"):
                return sse_client(
                    self._server.url,
                    headers=dict(self._server.headers),
                    timeout=HTTP_S,
                    sse_read_timeout=HTTP_READ_S,
                )
            case HttpServer():
                make = partial(
                    httpx2.AsyncClient,
                    headers=dict(self._server.headers),
                    timeout=httpx2.Timeout(HTTP_S, read=HTTP_READ_S),
                )
                # it reads the certificates of the system: 25 ms in which nothing else would happen
                http = await stack.enter_async_context(await anyio.to_thread.run_sync(make))
                return streamable_http_client(self._server.url, http_client=http)

    async def _attend(self, client: Client) -> None:
        """Keep the listing up to date until `stop`. :raises ToolServerError: the server ended."""
        closed = self._transport.closed if self._transport is not None else anyio.Event()
        while True:
            await first_of(self._stopping, closed, self._listing_changed)
            if self._stopping.is_set():
                return
            if closed.is_set():
                raise ToolServerError("it ended")
            self._listing_changed = anyio.Event()
            self.tools = await self._list(client)
            await self._settle("ready", "")

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp.ToolListChangedNotification):
            self._listing_changed.set()

    async def _list(self, client: Client) -> tuple[ExternalTool, ...]:
        tools: dict[str, mcp.Tool] = {}
        cursor: str | None = None
        for _ in range(PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                tools.setdefault(tool.name, tool)
            cursor = page.next_cursor
            if cursor is None:
                break
        names = tool_names(self.prefix, tuple(tools))
        return tuple(external(tool, name) for tool, name in zip(tools.values(), names, strict=True))

    async def _settle(self, state: Literal["ready", "failed"], detail: str) -> None:
        self._state, self._detail = state, detail
        self.settled.set()
        if self._on_change is not None and not self._stopping.is_set():
            await self._on_change()

    async def _fail(self, detail: str) -> None:
        if not self._stopping.is_set():
            logger.warning("MCP server %s: %s", self.name, detail)
        await self._settle("failed", detail)

    def _words(self, error: BaseException) -> str:
        """Why the server failed: its end says more than the broken connection."""
        transport = self._transport
        if transport is not None and transport.closed.is_set():
            said = f'; it last said "{transport.last_words}"' if transport.last_words else ""
            return transport.reason + said
        return sentence(error)

    async def call(self, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput) -> Outcome:
        """Call a tool; a failure is an outcome that names the server."""
        await self.settled.wait()
        client = self._client
        if client is None:
            return self._failed(f"is not available: {self._detail or 'it was stopped'}")
        try:
            result = await client.call_tool(tool.name, dict(arguments), progress_callback=progress_shown(on_output))
        except MCPError as error:
            return self._failed(self._call_words(tool, error))
        except Exception as error:  # noqa: BLE001 - whatever a stranger's answer provokes in the library
            return self._failed(f"gave {tool.name} an answer that cannot be used: {sentence(error)}")
        return outcome_of(result)

    def _call_words(self, tool: ExternalTool, error: MCPError) -> str:
        if error.code == mcp.REQUEST_TIMEOUT:
            return f"did not answer {tool.name} within {self._call_timeout_s:g} s"
        if error.code == mcp.CONNECTION_CLOSED:
            return f"ended during {tool.name}: {self._words(error)}"
        return f"refused {tool.name}: {sentence(error)}"

    def _failed(self, words: str) -> Outcome:
        return Outcome(text=f"MCP server {self.name} {words}", is_error=True)


def refused_handshake(error: BaseException) -> bool:
    """Whether a server speaks only the newer protocol, which has no handshake."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return any(map(refused_handshake, exceptions))
        case MCPError():
            return error.code in REFUSED_HANDSHAKE
    return False


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of the events is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


def external(tool: mcp.Tool, name: str) -> ExternalTool:
    """A tool as the model gets it; providers want an object with properties even where there is no argument."""
    schema = {"properties": {}, **tool.input_schema, "type": "object"}
    description = (tool.description or tool.title or tool.name)[:DESCRIPTION_CHARS]
    title = tool.title or (tool.annotations.title if tool.annotations else None) or tool.name
    return ExternalTool(
        name=tool.name, title=title, spec=ToolSpec(name=name, description=description, input_schema=schema)
    )


def progress_shown(on_output: OnOutput) -> ProgressFnT:
    """Progress of a call as lines of output, the newest ones, at most ten times a second."""
    lines: list[str] = []
    shown_at = -math.inf

    async def report(progress: float, total: float | None, message: str | None) -> None:
        nonlocal shown_at
        share = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        lines.append(f"{share} {message}" if message else share)
        del lines[:-PROGRESS_LINES]
        if time.monotonic() - shown_at >= PROGRESS_EVERY_S:
            shown_at = time.monotonic()
            await on_output("\n".join(lines))

    return report
