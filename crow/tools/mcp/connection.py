"""One external MCP server of a session: started, listed, named when it fails, and started again.

Strategy: one task owns the library's client from entering to leaving it, as that demands; calls come from any task.
The server gets one deadline for starting, whatever it does with it. The handshake that every server knows comes
first, since the newer probe makes an old server cost ten seconds; only one that refuses it is asked the new way.
Whatever a server provokes is its own failure, kept as a sentence; at its next use it is started anew, at once after a
good life, later and later after a bad one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
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
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from crow.domain.errors import ToolServerError
from crow.domain.messages import Part
from crow.tools import (
    ElicitationHandler,
    HttpServer,
    McpServer,
    OnOutput,
    Outcome,
    ServerPrompt,
    ServerStatus,
    StdioServer,
)
from crow.tools.mcp.calls import ServerCalls, sentence
from crow.tools.mcp.listing import ExternalTool, filter_invalid_tools, listed
from crow.tools.mcp.prompts import PromptList
from crow.tools.mcp.stdio import ServerProcess
from crow.tools.process import KeySource

__all__ = ["OnChange", "ServerConnection"]

logger = logging.getLogger(__name__)

OnChange = Callable[[], Awaitable[None]]
"""Told when a server became ready, failed or changed its tools; ask `servers()` and `specs()` what is so now."""

HTTP_S = 30.0
HTTP_READ_S = 300.0
BACKOFF_S = 1.0
BACKOFF_MOST_S = 300.0
STEADY_S = 60.0
LISTEN_AGAIN_S = 1.0
REFUSED_HANDSHAKE = frozenset(
    # -32020 and on: codes that only the newer protocol defines, such as -32020 for headers that the handshake lacks
    (mcp.METHOD_NOT_FOUND, mcp.INVALID_REQUEST, mcp.INVALID_PARAMS, *range(-32099, mcp.HEADER_MISMATCH + 1))
)
"""Errors by which a server that speaks only the newer protocol answers `initialize`."""


class ServerConnection:
    """A server. `serve` is its task; everything else may be called from others."""

    def __init__(
        self,
        server: McpServer,
        *,
        prefix: str,
        cwd: Path,
        keys: KeySource,
        start_timeout_s: float,
        call_timeout_s: float,
        on_change: OnChange | None,
        asker: ElicitationHandler | None = None,
    ) -> None:
        self.name = server.name
        self.prefix = prefix
        self.tools: tuple[ExternalTool, ...] = ()
        """The newest known tools, kept when the server is gone."""
        self.shelf = PromptList(server.name, prefix, on_change)
        self.settled = anyio.Event()
        """Set while the server is ready or has failed; another event with each start."""
        self.was_ready = False
        options = server.options
        self._server = server
        self._options = options
        self._cwd = cwd
        self._keys = keys
        self._start_timeout_s = options.start_timeout_s or start_timeout_s
        self._call_timeout_s = options.call_timeout_s or call_timeout_s
        self._on_change = on_change
        self._asker = asker
        self._state: Literal["starting", "ready", "failed"] = "starting"
        self._detail = ""
        self._client: Client | None = None
        self._greeted = False
        self._transport: ServerProcess | None = None
        self._starting = anyio.CancelScope()
        self._stopping = anyio.Event()
        self._listing_changed = anyio.Event()
        self._wanted = anyio.Event()
        self._restarting = anyio.Event()
        self._lost = anyio.Event()
        self._lost_words = ""
        self._calls = ServerCalls(
            server.name,
            prefix,
            timeout_s=self._call_timeout_s,
            asker=asker,
            failed=self._notice_loss,
            ending=self._words,
        )
        self._failures = 0
        self._losses = 0
        self._loss = ""
        self._ready_at = math.inf
        self._retry_at = -math.inf

    @property
    def status(self) -> ServerStatus:
        """How the server is."""
        tools = len(self.tools) if self._state == "ready" else 0
        return ServerStatus(
            name=self.name,
            state=self._state,
            detail=self._detail,
            tools=tools,
            losses=self._losses,
            loss=self._loss,
        )

    def stop(self) -> None:
        """Let `serve` end; a server that is still starting is given up at once."""
        self._stopping.set()
        self._wanted.set()
        if not self.settled.is_set():
            self._starting.cancel()

    def revive(self, *, at_once: bool = False) -> bool:
        """Start a failed server again, unless it failed too recently and not `at_once`; whether it is starting now."""
        if self._state != "failed" or self._stopping.is_set():
            return False
        if not at_once and (self._options.problem or time.monotonic() < self._retry_at):
            return False
        self._state = "starting"
        self.settled = anyio.Event()
        self._wanted.set()
        return True

    def restart(self) -> None:
        """Start the server again, whatever it does now."""
        if self._state == "ready":
            self.settled = anyio.Event()
            self._state = "starting"
            self._restarting.set()
        else:
            self.revive(at_once=True)

    async def available(self) -> bool:
        """Whether the server is there for a call, once it has started; one that has failed is started again."""
        await self.settled.wait()
        if self.revive():
            await self.settled.wait()
        return self._state == "ready"

    async def serve(self) -> None:
        """Start the server and keep it until `stop`; never raises for what the server does."""
        while not self._stopping.is_set():
            self._wanted, self._restarting, self._lost = anyio.Event(), anyio.Event(), anyio.Event()
            try:
                await self._live()
            except Exception as error:  # noqa: BLE001 - a stranger's failure, whatever it is, must stay the stranger's
                await self._fail(self._words(error))
                await self._wanted.wait()

    async def _live(self) -> None:
        """One life of the server. :raises Exception: it failed, in whatever way."""
        if self._options.problem:
            raise ToolServerError(self._options.problem)
        self._ready_at = math.inf
        self._greeted = False
        deadline = anyio.current_time() + self._start_timeout_s
        try:
            await self._serve("legacy", deadline)
        except Exception as error:
            if self._greeted or not refused_handshake(error):
                raise
            await self._serve("auto", deadline)

    async def _serve(self, mode: Literal["legacy", "auto"], deadline: float) -> None:
        if self._stopping.is_set():
            raise ToolServerError("stopped")
        with anyio.CancelScope(deadline=deadline) as self._starting:
            async with AsyncExitStack() as stack:
                client = Client(
                    filter_invalid_tools(await self._open(stack), self._dropped),
                    mode=mode,
                    cache=None,
                    read_timeout_seconds=self._call_timeout_s,
                    message_handler=self._hear,
                    elicitation_callback=self._calls.elicit,
                )
                await stack.enter_async_context(client)
                self._greeted = True
                self.tools = await self._list(client)
                self._starting.deadline = math.inf
                self._client = client
                self.was_ready, self._ready_at = True, time.monotonic()
                self.shelf.begin()
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
                self._transport = ServerProcess(self._server, self._cwd, self._keys)
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
        """Keep the listing up to date until `stop` or `restart`. :raises ToolServerError: the server ended."""
        closed = self._transport.closed if self._transport is not None else anyio.Event()
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.shelf.keep, client)
            if listens(client):
                tasks.start_soon(self._listen, client)
            try:
                await self._attend_until(closed, client)
            except Exception as error:  # noqa: BLE001 - raised below, outside the task group that would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _attend_until(self, closed: anyio.Event, client: Client) -> None:
        while True:
            await first_of(self._stopping, self._restarting, self._lost, closed, self._listing_changed)
            if self._stopping.is_set() or self._restarting.is_set():
                return
            if closed.is_set():
                raise ToolServerError("it ended")
            if self._lost.is_set():
                raise ToolServerError(self._lost_words)
            self._listing_changed = anyio.Event()
            self.tools = await self._list(client)
            await self._settle("ready", "")

    async def _listen(self, client: Client) -> None:
        """Hear of changes of the listing from a server that speaks the newer protocol."""
        while True:
            try:
                async with client.listen(tools_list_changed=True, prompts_list_changed=True) as changes:
                    async for _ in changes:
                        self._listing_changed.set()
                        self.shelf.change()
            except SubscriptionLost:
                await anyio.sleep(LISTEN_AGAIN_S)
                self._listing_changed.set()  # it may have changed meanwhile
                self.shelf.change()
            except (MCPError, TimeoutError, RuntimeError) as error:
                logger.info("MCP server %s tells no changes: %s", self.name, sentence(error))
                return
            else:
                return

    def _dropped(self, tool: str, fault: str) -> None:
        logger.warning("MCP server %s: tool %s is left out: %s", self.name, tool, fault)

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp.ToolListChangedNotification):
            self._listing_changed.set()
        if isinstance(message, mcp.PromptListChangedNotification):
            self.shelf.change()
        if isinstance(message, mcp.ElicitCompleteNotification) and self._asker is not None:
            await self._asker.elicited(message.params.elicitation_id)

    async def _list(self, client: Client) -> tuple[ExternalTool, ...]:
        return await listed(client, self.prefix, self._options)

    async def _settle(self, state: Literal["ready", "failed"], detail: str) -> None:
        self._state, self._detail = state, detail
        self.settled.set()
        if self._on_change is not None and not self._stopping.is_set():
            await self._on_change()

    async def _fail(self, detail: str) -> None:
        lived_s = time.monotonic() - self._ready_at
        self._failures = 1 if lived_s > STEADY_S else self._failures + 1
        spared = 1 if self.was_ready else 0  # the first death of a server that has worked costs no waiting
        wait_s = 0.0 if self._failures <= spared else BACKOFF_S * 2.0 ** min(self._failures - 1 - spared, 20)
        self._retry_at = time.monotonic() + min(wait_s, BACKOFF_MOST_S)
        if not self._stopping.is_set():
            logger.warning("MCP server %s: %s", self.name, detail)
            if self._ready_at < math.inf:
                self._losses, self._loss = self._losses + 1, detail
        await self._settle("failed", detail)

    def _words(self, error: BaseException) -> str:
        """Why the server failed: its end says more than the broken connection."""
        transport = self._transport
        if transport is not None and transport.closed.is_set():
            said = f'; it last said "{transport.last_words}"' if transport.last_words else ""
            return transport.reason + said
        return sentence(error)

    async def call(
        self, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str = ""
    ) -> Outcome:
        """Call a tool; a failure is an outcome that names the server."""
        await self.available()
        client = self._client
        if client is None:
            return self._calls.failure(f"is not available: {self._detail or 'it was stopped'}")
        return await self._calls.call(client, tool, arguments, on_output, call_id)

    async def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts of the server, once it has started and said what it has."""
        if not await self.available():
            return ()
        with anyio.move_on_after(self._start_timeout_s):
            await self.shelf.known.wait()
        return tuple(self.shelf.listed)

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :meth:`crow.tools.ServerPrompts.fill`."""
        client = self._client
        if client is None:
            raise ToolServerError(f"MCP server {self.name} is not available: {self._detail or 'it was stopped'}")
        return await self.shelf.fill(client, prompt, arguments)

    def _notice_loss(self, error: MCPError) -> None:
        """An HTTP server has no process to watch: that it is gone, or has forgotten the session, shows at a call."""
        gone = error.code == mcp.CONNECTION_CLOSED or error.message == "Session terminated"
        if isinstance(self._server, HttpServer) and gone:
            self._lost_words = sentence(error)
            self._lost.set()


def refused_handshake(error: BaseException) -> bool:
    """Whether a server that speaks only the newer protocol may have answered the handshake so."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return any(map(refused_handshake, exceptions))
        case MCPError():
            return error.code in REFUSED_HANDSHAKE
        case RuntimeError():  # the library's, where a server answers with a version that has no handshake
            return True
    return False


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of the events is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)


def listens(client: Client) -> bool:
    """Whether the server tells changes of its listings the newer way, on a stream of their own."""
    told = (client.server_capabilities.tools, client.server_capabilities.prompts)
    changing = any(listing is not None and listing.list_changed for listing in told)
    return client.protocol_version in MODERN_PROTOCOL_VERSIONS and changing
