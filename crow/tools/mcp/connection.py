"""The connection to an external MCP server: starts it, calls its tools, and restarts it after a failure."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import anyio
import anyio.to_thread
import httpx2
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import FileUrl

from crow.domain.errors import ToolServerError
from crow.domain.events import UrlQuestion
from crow.domain.messages import Part
from crow.domain.rendering import on_one_line
from crow.domain.trace_context import current_trace_context
from crow.tools import (
    ElicitationHandler,
    HttpServer,
    LoginAsker,
    LoginQuestion,
    OnOutput,
    Outcome,
    ServerPrompt,
    ServerStatus,
    StdioServer,
    Workspace,
)
from crow.tools.limits import FairLimiter
from crow.tools.mcp.auth import ServerAuth, may_log_in
from crow.tools.mcp.calls import (
    ask_user,
    describe_error,
    encodable,
    outcome_of,
    parse_call_id,
    parts_of,
    report_progress,
)
from crow.tools.mcp.listing import ExternalTool, filter_invalid_tools, list_prompts, list_tools
from crow.tools.mcp.logins import LoginFolder
from crow.tools.mcp.stdio import LAST_WORDS_CHARS, LOGGED_LINES, ServerProcess
from crow.tools.process import KeySource

logger = logging.getLogger(__name__)

OnChange = Callable[[], Awaitable[None]]
"""Called when a server is ready, has failed, or has changed its tools or prompts."""

HTTP_S = 30.0
HTTP_READ_S = 300.0
MAX_CALLS = 32
"""How many calls of one server run at once; the others wait in order."""

BACKOFF_S = 1.0
MAX_BACKOFF_S = 300.0
STEADY_S = 60.0
LISTEN_AGAIN_S = 1.0
PROBE_S = 1.0
FINISH_S = 0.3
LOG_LEVELS: Mapping[mcp.LoggingLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
    "alert": logging.ERROR,
    "emergency": logging.ERROR,
}
REFUSED_HANDSHAKE = frozenset(
    # only the newer protocol defines the codes from -32099 to -32020; for example, -32020 means missing headers
    (mcp.METHOD_NOT_FOUND, mcp.INVALID_REQUEST, mcp.INVALID_PARAMS, *range(-32099, mcp.HEADER_MISMATCH + 1))
)
"""The error codes with which servers that speak only the newer protocol answer `initialize`."""


@dataclass(eq=False, kw_only=True)
class ServerConnection:
    """An MCP server. `serve` runs as its own task, which owns the library's client; all other methods may be called
    from any task.

    A failed server is restarted when it is needed again: at once if it had worked for `STEADY_S`, otherwise after a
    delay that grows with each failure.
    """

    server: StdioServer | HttpServer
    prefix: str
    workspace: Workspace
    keys: KeySource
    start_timeout_s: float
    call_timeout_s: float
    on_change: OnChange | None
    elicitation: ElicitationHandler | None = None
    places: Sequence[Path] = ()
    logins: LoginFolder | None = None
    asker: LoginAsker | None = None
    """Asks the user to log in, whether or not there is a login. If None, the editor asks, and only without a login."""
    tools: tuple[ExternalTool, ...] = ()
    """The tools that the server listed last, kept after the server is gone."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Maps each invalid tool of the server to what is wrong with it."""
    prompts: Mapping[ServerPrompt, str] = field(default_factory=dict)
    """Maps each prompt that the server listed last to the server's own name for it."""
    settled: anyio.Event = field(default_factory=anyio.Event)
    """Set while the server is ready or has failed. Each start replaces this event with a new one."""
    was_ready: bool = False
    _state: Literal["starting", "ready", "failed"] = "starting"
    _detail: str = ""
    _client: Client | None = None
    _is_initialized: bool = False
    _has_answered: bool = False
    _process: ServerProcess | None = None
    _auth: ServerAuth | None = None
    _starting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _stopping: anyio.Event = field(default_factory=anyio.Event)
    _restarting: anyio.Event = field(default_factory=anyio.Event)
    _wanted: anyio.Event = field(default_factory=anyio.Event)
    _lost: anyio.Event = field(default_factory=anyio.Event)
    _lost_words: str = ""
    _tools_changed: anyio.Event = field(default_factory=anyio.Event)
    _prompts_changed: anyio.Event = field(default_factory=anyio.Event)
    _prompts_known: anyio.Event = field(default_factory=anyio.Event)
    _slots: FairLimiter = field(default_factory=lambda: FairLimiter(MAX_CALLS))
    _running: list[str] = field(default_factory=list)
    _questions: dict[anyio.CancelScope, str] = field(default_factory=dict)
    _asked: int = 0
    _login_question: anyio.CancelScope | None = None
    """Set while the server cannot start before the user has logged in."""
    _asks_again: bool = False
    _logged: int = 0
    _failures: int = 0
    _losses: int = 0
    _loss: str = ""
    _ready_at: float = math.inf
    _retry_at: float = -math.inf

    def __post_init__(self) -> None:
        if self.logins is not None and isinstance(self.server, HttpServer) and may_log_in(self.server):
            self._auth = ServerAuth(
                server=self.server,
                logins=self.logins,
                asker=self.asker or self,
                hold=self._without_deadline,
                forces_login=self.asker is not None,
            )

    @property
    def name(self) -> str:
        """The server's name."""
        return self.server.name

    @property
    def client(self) -> Client | None:
        """The library's client while the server is ready."""
        return self._client

    @property
    def status(self) -> ServerStatus:
        """The state of the server now."""
        return ServerStatus(
            name=self.name,
            state=self._state,
            detail=self._detail,
            tools=len(self.tools) if self._state == "ready" else 0,
            losses=self._losses,
            loss=self._loss,
        )

    # The life of the server

    async def serve(self) -> None:
        """Start the server and keep it running until `stop`. Failures of the server are never raised."""
        while not self._stopping.is_set():
            self._wanted, self._restarting, self._lost = anyio.Event(), anyio.Event(), anyio.Event()
            self._ready_at, self._is_initialized = math.inf, False
            deadline = anyio.current_time() + self.start_timeout_s
            try:
                await self._connect_in_any_version(deadline)
            except Exception as error:  # noqa: BLE001 - no failure of a server may end the session
                if self._asks_again and self._auth is not None:
                    self._asks_again = False
                    self._auth.reset()
                    continue
                await self._fail(self._describe_end(error))
                await self._wanted.wait()

    def stop(self) -> None:
        """End `serve`. If the server is still starting, the start is cancelled."""
        self._stopping.set()
        self._wanted.set()
        if not self.settled.is_set():
            self._starting.cancel()

    def revive(self, *, at_once: bool = False) -> bool:
        """Start a failed server again. Return whether it starts now.

        A server that failed too recently or is misconfigured starts only if `at_once` is set.
        """
        if self._state != "failed" or self._stopping.is_set():
            return False
        if not at_once and (self.server.options.problem or time.monotonic() < self._retry_at):
            return False
        self._state = "starting"
        self.settled = anyio.Event()
        self._wanted.set()
        return True

    def restart(self) -> None:
        """Start the server again, whatever its state. If it waits for a login, the user is asked again."""
        if self._auth is not None:
            self._auth.reset()
        if self._login_question is not None:
            self._asks_again = True
            self._login_question.cancel()
        elif self._state == "ready":
            self.settled = anyio.Event()
            self._state = "starting"
            self._restarting.set()
        else:
            self.revive(at_once=True)

    async def available(self) -> bool:
        """Wait until the server has started; if it has failed, start it again. Return whether it is ready."""
        await self.settled.wait()
        if self.revive():
            await self.settled.wait()
        return self._state == "ready"

    async def _connect_in_any_version(self, deadline: float) -> None:
        """Connect with a version of the protocol that the server speaks, and stay connected.

        HTTP servers are probed for the newer protocol first: old ones refuse the probe at once. If a server leaves the
        probe unanswered for `PROBE_S` or closes the connection, the old handshake follows. For other transports the old
        handshake comes first, because many old programs ignore a probe, and newer programs refuse the old handshake.

        :raises Exception: the server failed.
        """
        if isinstance(self.server, HttpServer) and self.server.transport == "http":
            try:
                return await self._connect("auto", deadline, answer_s=min(PROBE_S, self.start_timeout_s / 4))
            except Exception as error:
                if self._has_answered:
                    raise
                logger.info("MCP server %s did not answer the probe: %s", self.name, describe_error(error))
        try:
            await self._connect("legacy", deadline)
        except Exception as error:
            if self._is_initialized or not refused_handshake(error):
                raise
            await self._connect("auto", deadline)

    async def _connect(self, mode: Literal["legacy", "auto"], deadline: float, *, answer_s: float = math.inf) -> None:
        """Connect and stay connected until `stop` or `restart`.

        The server must send its first message within `answer_s`, and be ready at `deadline`.

        :raises Exception: the server failed.
        """
        self._has_answered, self._logged = False, 0
        if self._stopping.is_set() or self.server.options.problem:
            raise ToolServerError("stopped" if self._stopping.is_set() else self.server.options.problem)

        def on_message() -> None:
            if not self._has_answered:
                self._has_answered = True
                self._starting.deadline = deadline

        answered_by = min(anyio.current_time() + answer_s, deadline)
        with anyio.CancelScope(deadline=answered_by) as self._starting:
            async with AsyncExitStack() as stack:
                transport = filter_invalid_tools(
                    await self._open(stack), self.name, on_message, self.left_out.__setitem__
                )
                client = Client(
                    transport,
                    mode=mode,
                    cache=None,
                    read_timeout_seconds=self.call_timeout_s,
                    message_handler=self._on_message,
                    logging_callback=self._on_log,
                    log_level=next((name for name, level in LOG_LEVELS.items() if logger.isEnabledFor(level)), None),
                    elicitation_callback=self._on_question,
                    # a server elsewhere has no use for the paths of this machine
                    list_roots_callback=self._list_roots if isinstance(self.server, StdioServer) else None,
                )
                await stack.enter_async_context(client)
                self._is_initialized = True
                self.tools = await list_tools(client, self.prefix, self.server.options)
                self._starting.deadline = math.inf
                self._client = client
                self.was_ready, self._ready_at = True, time.monotonic()
                self._prompts_known = anyio.Event()
                await self._settle("ready", "")
                try:
                    await self._follow(client)
                finally:
                    self._client = None
        if self._starting.cancelled_caught:
            stopped = self._stopping.is_set()
            raise ToolServerError("stopped" if stopped else f"it did not answer within {self.start_timeout_s:g} s")

    async def _open(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        """The transport to the server."""
        match self.server:
            case StdioServer() as server:
                self._process = ServerProcess(server, self.workspace, self.keys, self.places)
                return self._process
            case HttpServer(transport="sse", url=url, headers=headers):
                return sse_client(
                    url, headers=dict(headers), timeout=HTTP_S, sse_read_timeout=HTTP_READ_S, auth=self._auth
                )
            case HttpServer(url=url, headers=headers):
                timeout = httpx2.Timeout(HTTP_S, read=HTTP_READ_S)
                make = partial(httpx2.AsyncClient, headers=dict(headers), timeout=timeout, auth=self._auth)
                # making the client reads the system's certificates, which would block the event loop for 25 ms
                http = await stack.enter_async_context(await anyio.to_thread.run_sync(make))
                return streamable_http_client(url, http_client=http)

    async def _follow(self, client: Client) -> None:
        """Keep the listings up to date until `stop` or `restart`. :raises Exception: the server ended."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_prompts, client)
            if sends_changes(client):
                tasks.start_soon(self._listen, client)
            await self._follow_tools(client)
            tasks.cancel_scope.cancel()

    async def _follow_tools(self, client: Client) -> None:
        closed = self._process.closed if self._process is not None else anyio.Event()
        while True:
            await first_of(self._stopping, self._restarting, self._lost, closed, self._tools_changed)
            if self._stopping.is_set() or self._restarting.is_set():
                return
            if closed.is_set():
                raise ToolServerError("it ended")
            if self._lost.is_set():
                raise ToolServerError(self._lost_words)
            self._tools_changed = anyio.Event()
            self.tools = await list_tools(client, self.prefix, self.server.options)
            await self._settle("ready", "")

    async def _follow_prompts(self, client: Client) -> None:
        while True:
            self._prompts_changed = anyio.Event()
            found = await list_prompts(client, self.name, self.prefix)
            self._prompts_known.set()
            if found != self.prompts:
                self.prompts = found
                if self.on_change is not None:
                    await self.on_change()
            await self._prompts_changed.wait()

    async def _listen(self, client: Client) -> None:
        """Listen for changes of the listings. A server with the newer protocol sends them on a separate stream."""
        while True:
            try:
                async with client.listen(tools_list_changed=True, prompts_list_changed=True) as changes:
                    async for _ in changes:
                        self._tools_changed.set()
                        self._prompts_changed.set()
            except SubscriptionLost:
                await anyio.sleep(LISTEN_AGAIN_S)
                self._tools_changed.set()  # the listings may have changed while the stream was lost
                self._prompts_changed.set()
            except (MCPError, TimeoutError, RuntimeError) as error:
                logger.info(
                    "MCP server %s does not report changes of its listings: %s", self.name, describe_error(error)
                )
                return
            else:
                return

    async def _on_message(self, message: IncomingMessage) -> None:
        match message:
            case mcp.ToolListChangedNotification():
                self._tools_changed.set()
            case mcp.PromptListChangedNotification():
                self._prompts_changed.set()
            case mcp.ElicitCompleteNotification() if self.elicitation is not None:
                await self.elicitation.finish_question(message.params.elicitation_id)
            case _:
                pass

    async def _on_log(self, params: mcp.LoggingMessageNotificationParams) -> None:
        """Write a log message of the server to crow's log."""
        level = LOG_LEVELS[params.level]
        if not logger.isEnabledFor(level):
            return
        self._logged += 1
        if self._logged <= LOGGED_LINES:
            data = params.data if isinstance(params.data, str) else json.dumps(params.data, ensure_ascii=False)
            text = f"{params.logger}: {data}" if params.logger else data
            text = on_one_line(self.keys().mask(encodable(text)))
            logger.log(level, "%s: %s", self.name, text[:LAST_WORDS_CHARS])
        elif self._logged == LOGGED_LINES + 1:
            logger.info("%s: further log messages are left out", self.name)

    async def _settle(self, state: Literal["ready", "failed"], detail: str) -> None:
        self._state, self._detail = state, detail
        self.settled.set()
        if self.on_change is not None and not self._stopping.is_set():
            await self.on_change()

    async def _fail(self, detail: str) -> None:
        detail = self.keys().mask(detail)
        lived_s = time.monotonic() - self._ready_at
        self._failures = 1 if lived_s > STEADY_S else self._failures + 1
        # a server that has worked before is restarted without a delay after its first failure
        free = 1 if self.was_ready else 0
        # the user may log in elsewhere at any time, and a server that asks for a login costs nothing to try
        has_login_problem = self._auth is not None and bool(self._auth.problem)
        wait_s = (
            0.0
            if self._failures <= free or has_login_problem
            else BACKOFF_S * 2.0 ** min(self._failures - 1 - free, 20)
        )
        self._retry_at = time.monotonic() + min(wait_s, MAX_BACKOFF_S)
        if not self._stopping.is_set():
            logger.warning("MCP server %s: %s", self.name, detail)
            if self._ready_at < math.inf:
                self._losses, self._loss = self._losses + 1, detail
        await self._settle("failed", detail)

    def _describe_end(self, error: BaseException) -> str:
        """Why the server failed. If its process has ended, the reason for that says more than the error of the
        broken connection."""
        if self._auth is not None and self._auth.problem:
            return self._auth.problem
        process = self._process
        if process is not None and process.closed.is_set():
            return process.reason + (f'; it last said "{process.last_words}"' if process.last_words else "")
        return describe_error(error)

    # Its tools and prompts

    async def call(
        self, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str = ""
    ) -> Outcome:
        """Call a tool; a failure is an outcome that names the server."""
        await self.available()
        async with self._slots.slot():
            return await self._call(tool, arguments, on_output, call_id)

    async def _call(
        self, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str
    ) -> Outcome:
        if self._client is None:
            return self._failure(f"is not available: {self._detail or 'it was stopped'}")
        self._running.append(call_id)
        try:
            progress = report_progress(on_output)
            result = await self._client.call_tool(
                tool.name, dict(arguments), progress_callback=progress, meta=trace_meta()
            )
        except MCPError as error:
            return self._failure(self._describe_refusal(tool, error))
        except Exception as error:  # noqa: BLE001 - the library may raise any error for a bad answer
            return self._failure(f"returned an unusable result for {tool.name}: {describe_error(error)}")
        finally:
            self._running.remove(call_id)
            for scope, asked_by in self._questions.items():
                if not self._running or (asked_by and asked_by == call_id):
                    scope.cancel()  # nobody needs the answer to this question any more
        return outcome_of(result)

    async def list_prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts of the server, once it has started and listed them."""
        if not await self.available():
            return ()
        with anyio.move_on_after(self.start_timeout_s):
            await self._prompts_known.wait()
        return tuple(self.prompts)

    async def fill_prompt(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :meth:`crow.tools.ServerPrompts.fill`."""
        if self._client is None:
            raise ToolServerError(f"MCP server {self.name} is not available: {self._detail or 'it was stopped'}")
        failed = f"`/{prompt.name}` could not be used: MCP server {self.name}"
        if prompt not in self.prompts:
            raise ToolServerError(f"{failed} no longer has this prompt.")
        try:
            filled = await self._client.get_prompt(self.prompts[prompt], dict(arguments), meta=trace_meta())
        except Exception as error:  # the library may raise any error for a bad answer
            raise ToolServerError(f"{failed} did not return the prompt: {describe_error(error)}") from error
        if not (parts := parts_of(filled)):
            raise ToolServerError(f"{failed} returned an empty prompt.")
        return parts

    async def _on_question(
        self,
        context: ClientRequestContext,  # noqa: ARG002 (the library's signature)
        params: mcp.ElicitRequestParams,
    ) -> mcp.ElicitResult | mcp.ErrorData:
        """Pass a question of the server to the user. If exactly one call is running, the question is attributed to that
        call."""
        call_id = self._running[0] if len(self._running) == 1 else ""
        self._asked += 1
        with anyio.CancelScope() as scope:
            if self._running:
                self._questions[scope] = call_id
            try:
                return await ask_user(self.elicitation, self.name, params, call_id, f"{self.prefix}-{self._asked}")
            finally:
                self._questions.pop(scope, None)
        return mcp.ElicitResult(action="cancel")

    @property
    def can_ask(self) -> bool:
        """See :class:`crow.tools.LoginAsker`."""
        return self.elicitation is not None and "url" in self.elicitation.question_kinds

    async def ask(self, question: LoginQuestion) -> Literal["accept", "decline", "gone"]:
        """Ask the user, through the editor, to log in. See :class:`crow.tools.LoginAsker`."""
        assert self.elicitation is not None, "asked only if `can_ask`"
        call_id = self._running[0] if len(self._running) == 1 else ""
        self._asked += 1
        page = UrlQuestion(
            message=(
                f"{self.name}: this MCP server ({question.server_host}) asks you to log in.\n\n"
                f"This opens a page on {question.place}."
            ),
            url=question.page,
            id=f"{self.prefix}-{self._asked}",
            call=parse_call_id(call_id),
        )
        with anyio.CancelScope() as scope:
            if self._running:
                self._questions[scope] = call_id
            elif self._client is None:
                self._login_question = scope
            try:
                answer = await self.elicitation.elicit(page)
                if answer.action != "accept":
                    return "decline"
                await question.wait()
                return "accept"
            finally:
                self._questions.pop(scope, None)
                self._login_question = None
                with anyio.move_on_after(FINISH_S, shield=True):
                    await self.elicitation.finish_question(page.id)
        return "gone"

    @contextmanager
    def _without_deadline(self) -> Iterator[None]:
        """Let the server take any time to start while the user logs in."""
        is_starting = self._state == "starting" and self._client is None
        if is_starting:
            self._has_answered = True
            self._starting.deadline = math.inf
        try:
            yield
        finally:
            if is_starting and self._client is None:
                self._starting.deadline = anyio.current_time() + self.start_timeout_s

    async def _list_roots(self, context: ClientRequestContext) -> mcp.ListRootsResult:  # noqa: ARG002
        """Tell the server where the workspace is."""
        return mcp.ListRootsResult(roots=[root_of(directory) for directory in self.workspace.directories])

    def _failure(self, words: str) -> Outcome:
        return Outcome(text=f"MCP server {self.name} {words}", is_error=True)

    def _describe_refusal(self, tool: ExternalTool, error: MCPError) -> str:
        gone = error.code == mcp.CONNECTION_CLOSED
        if isinstance(self.server, HttpServer) and (gone or error.message == "Session terminated"):
            # An HTTP server has no process to watch: only a failed call shows that the server is gone or has forgotten
            # the session.
            self._lost_words = describe_error(error)
            self._lost.set()
        if self._auth is not None and self._auth.problem:
            return f"refused {tool.name}: {self._auth.problem}"
        if error.code == mcp.REQUEST_TIMEOUT:
            return f"did not answer the call of {tool.name} within {self.call_timeout_s:g} s"
        if error.code == mcp.PARSE_ERROR:
            return f"returned an unreadable result for {tool.name}: {describe_error(error)}"
        if gone:
            return f"ended during {tool.name}: {self._describe_end(error)}"
        return f"refused {tool.name}: {describe_error(error)}"


def trace_meta() -> mcp.RequestParamsMeta | None:
    """The `_meta` of a call: the trace context of the client's prompt."""
    return cast("mcp.RequestParamsMeta", current_trace_context()) or None


def root_of(directory: Path) -> mcp.Root:
    """A directory of the workspace as MCP names it."""
    return mcp.Root(uri=FileUrl(directory.as_uri()), name=encodable(directory.name) or None)


def refused_handshake(error: BaseException) -> bool:
    """Whether this error can be the answer to the handshake of a server that speaks only the newer protocol."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return any(map(refused_handshake, exceptions))
        case MCPError():
            return error.code in REFUSED_HANDSHAKE
        # raised by the library if the server answers with a protocol version that has no handshake
        case RuntimeError():
            return True
    return False


def sends_changes(client: Client) -> bool:
    """Whether the server reports changes of its listings as in the newer protocol, on a separate stream."""
    capabilities = (client.server_capabilities.tools, client.server_capabilities.prompts)
    is_changing = any(listing is not None and listing.list_changed for listing in capabilities)
    return client.protocol_version in MODERN_PROTOCOL_VERSIONS and is_changing


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of the events is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
