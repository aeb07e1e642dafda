"""The connection to an external MCP server: starts it, calls its tools, and restarts it after a failure."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import anyio
import anyio.to_thread
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.client.subscriptions import PromptsListChanged, ResourcesListChanged, SubscriptionLost, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import FileUrl

from crow.domain.entries import Announcement, CallKind
from crow.domain.errors import ToolServerError
from crow.domain.messages import Part
from crow.domain.rendering import in_title
from crow.domain.text import on_one_line
from crow.domain.trace_context import current_trace_context
from crow.tools import ElicitationHandler, OnOutput, Outcome, ServerStatus, Workspace
from crow.tools.limits import FairLimiter
from crow.tools.mcp.auth import ServerAuth, may_log_in
from crow.tools.mcp.calls import (
    describe_error,
    encodable,
    outcome_of,
    parts_of,
    report_progress,
)
from crow.tools.mcp.http import http_transport
from crow.tools.mcp.listing import (
    Changes,
    ExternalTool,
    filter_invalid_tools,
    is_offered,
    list_prompts,
    list_tools,
    matches,
    output_fault,
)
from crow.tools.mcp.logins import LoginFolder
from crow.tools.mcp.questions import ServerQuestions
from crow.tools.mcp.resources import ExternalResource, completions_of, list_resources, outcome_of_resource
from crow.tools.mcp.sampling import RunningCall
from crow.tools.mcp.stdio import LAST_WORDS_CHARS, LOGGED_LINES, ServerProcess
from crow.tools.process import KeySource
from crow.tools.sampling import Sampler
from crow.tools.servers import HttpServer, LoginAsker, ServerPrompt, StdioServer

logger = logging.getLogger(__name__)

OnChange = Callable[[], Awaitable[None]]
"""Called when a server is ready, has failed, or has changed its tools or prompts."""

_MAX_CALLS = 32
"""At most this many calls of one server run at once. Further calls wait in order."""

BACKOFF_S = 1.0
_MAX_BACKOFF_S = 300.0
_STEADY_S = 60.0
_LISTEN_AGAIN_S = 1.0
_PROBE_S = 1.0
_READ_RESOURCE = "read_resource"
"""The user's settings treat reading resources as a tool of the server. This is the name of that tool."""

_LOG_LEVELS: Mapping[mcp.LoggingLevel, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.ERROR,
    "alert": logging.ERROR,
    "emergency": logging.ERROR,
}
_REFUSED_HANDSHAKE = frozenset(
    # only the newer protocol defines the codes from -32099 to -32020; for example, -32020 means missing headers
    (mcp.METHOD_NOT_FOUND, mcp.INVALID_REQUEST, mcp.INVALID_PARAMS, *range(-32099, mcp.HEADER_MISMATCH + 1))
)
"""A server that speaks only the newer protocol answers `initialize` with one of these error codes."""


@dataclass(eq=False, kw_only=True)
class ServerConnection:
    """The connection to an MCP server. `serve` runs as its own task, which owns the library's client. All other methods
    may be called from any task.

    A failed server is restarted when it is needed again, but only after a delay that grows with each failure. There is
    no delay after the first failure of a server that has been ready before. After a server has worked for `_STEADY_S`,
    its next failure counts as the first one again.
    """

    server: StdioServer | HttpServer
    prefix: str
    workspace: Workspace
    keys: KeySource
    start_timeout_s: float
    call_timeout_s: float
    on_change: OnChange | None
    elicitation: ElicitationHandler | None = None
    sampler: Sampler | None = None
    places: Sequence[Path] = ()
    logins: LoginFolder | None = None
    asker: LoginAsker | None = None
    """Asks the user to log in, even if there is a login already. If None, the editor asks the user, but only if there
    is no valid login."""
    tools: tuple[ExternalTool, ...] = ()
    """The tools that the server listed last. They are kept after the server has ended."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Maps each invalid tool of the server to a text that says what is wrong with it."""
    prompts: Mapping[ServerPrompt, str] = field(default_factory=dict)
    """Maps each prompt that the server listed last to the server's own name for this prompt."""
    resources: tuple[ExternalResource, ...] = ()
    """The resources and templates that the server listed last. They are kept after the server has ended."""
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
    _tools_changed: Changes = field(default_factory=Changes)
    _prompts_changed: Changes = field(default_factory=Changes)
    _resources_changed: Changes = field(default_factory=Changes)
    _prompts_known: anyio.Event = field(default_factory=anyio.Event)
    _resources_known: anyio.Event = field(default_factory=anyio.Event)
    _slots: FairLimiter = field(default_factory=lambda: FairLimiter(_MAX_CALLS))
    _questions: ServerQuestions = field(init=False)
    _asks_again: bool = False
    _logged: int = 0
    _failures: int = 0
    _losses: int = 0
    _loss: str = ""
    _ready_at: float = math.inf
    _retry_at: float = -math.inf

    def __post_init__(self) -> None:
        self._questions = ServerQuestions(
            self.server,
            self.prefix,
            self.keys,
            self.elicitation,
            self.sampler,
            is_starting=lambda: self._client is None,
            may_log_in=not self.workspace.is_bounded,
        )
        if self.logins is not None and isinstance(self.server, HttpServer) and may_log_in(self.server):
            self._auth = ServerAuth(
                server=self.server,
                logins=self.logins,
                asker=self.asker or self._questions,
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
            resources=len(self.resources) if self.offers_resources else 0,
            losses=self._losses,
            loss=self._loss,
        )

    # The life of the server

    async def serve(self) -> None:
        """Start the server and keep it running until `stop`. A failure of the server raises no exception."""
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
        """Start the server again, whatever its state. If the server is waiting for a login, the user is asked to log in
        again."""
        if self._auth is not None:
            self._auth.reset()
        if self._questions.withdraw_login():
            self._asks_again = True
        elif self._state == "ready":
            self.settled = anyio.Event()
            self._state = "starting"
            self._restarting.set()
        else:
            self.revive(at_once=True)

    @property
    def offers_resources(self) -> bool:
        """Whether the server is ready and has resources that may be read."""
        return self._state == "ready" and bool(self.resources) and self.may_be_read

    @property
    def may_be_read(self) -> bool:
        """Whether the user's settings let the model read resources of this server."""
        return is_offered(_READ_RESOURCE, self.server.options)

    @property
    def is_reading_read_only(self) -> bool:
        """Whether the user's settings declare that reading resources of this server changes nothing."""
        return matches(_READ_RESOURCE, self.server.options.read_only)

    async def listed(self) -> None:
        """Wait until the server either has failed, or is ready and has listed its resources."""
        await self.settled.wait()
        if self._state == "ready":
            await self._resources_known.wait()

    async def available(self) -> bool:
        """Wait until the server has started; if it has failed, start it again. Return whether it is ready."""
        await self.settled.wait()
        if self.revive():
            await self.settled.wait()
        return self._state == "ready"

    async def _connect_in_any_version(self, deadline: float) -> None:
        """Connect with a version of the protocol that the server speaks, and stay connected.

        HTTP servers are first probed for the newer protocol, because old servers refuse the probe at once. If a server
        does not answer the probe within `_PROBE_S` or closes the connection, crow tries the old handshake. With other
        transports, crow tries the old handshake first, because many old programs never answer a probe. Newer programs
        refuse the old handshake, and then crow sends the probe.

        :raises Exception: the server failed.
        """
        if isinstance(self.server, HttpServer) and self.server.transport == "http":
            try:
                return await self._connect("auto", deadline, answer_s=min(_PROBE_S, self.start_timeout_s / 4))
            except Exception as error:
                if self._has_answered:
                    raise
                logger.info("MCP server %s did not answer the probe: %s", self.name, describe_error(error))
        try:
            await self._connect("legacy", deadline)
        except Exception as error:
            if self._is_initialized or not _refused_handshake(error):
                raise
            await self._connect("auto", deadline)

    async def _connect(self, mode: Literal["legacy", "auto"], deadline: float, *, answer_s: float = math.inf) -> None:
        """Connect and stay connected until `stop` or `restart`.

        The server must send its first message within `answer_s`, and be ready by `deadline`.

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
                    log_level=next((name for name, level in _LOG_LEVELS.items() if logger.isEnabledFor(level)), None),
                    elicitation_callback=self._questions.on_elicitation,
                    sampling_callback=None if self.sampler is None else self._questions.on_sampling,
                    # a server elsewhere has no use for the paths of this machine
                    list_roots_callback=self._list_roots if isinstance(self.server, StdioServer) else None,
                )
                await stack.enter_async_context(client)
                self._is_initialized = True
                self.tools = await list_tools(client, self.prefix, self.server.options)
                self._starting.deadline = math.inf
                self._client = client
                self.was_ready, self._ready_at = True, time.monotonic()
                self._prompts_known, self._resources_known = anyio.Event(), anyio.Event()
                await self._settle("ready", "")
                try:
                    await self._follow(client)
                finally:
                    self._client = None
                    self._resources_known.set()
        if self._starting.cancelled_caught:
            stopped = self._stopping.is_set()
            raise ToolServerError("stopped" if stopped else f"it did not answer within {self.start_timeout_s:g} s")

    async def _open(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        """The transport to the server."""
        match self.server:
            case StdioServer() as server:
                self._process = ServerProcess(server, self.workspace, self.keys, self.places)
                return self._process
            case HttpServer() as server:
                return await http_transport(server, self._auth, stack)

    async def _follow(self, client: Client) -> None:
        """Keep the listings up to date until `stop` or `restart`. :raises Exception: the server ended."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_resources, client)
            tasks.start_soon(self._follow_prompts, client)
            tasks.start_soon(self._follow_tools, client)
            if _sends_changes(client):
                tasks.start_soon(self._listen, client)
            closed = self._process.closed if self._process is not None else anyio.Event()
            await _first_of(self._stopping, self._restarting, self._lost, closed)
            if not self._stopping.is_set() and not self._restarting.is_set():
                raise ToolServerError("it ended" if closed.is_set() else self._lost_words)
            tasks.cancel_scope.cancel()

    async def _follow_tools(self, client: Client) -> None:
        while True:
            await self._tools_changed.next()
            found = await list_tools(client, self.prefix, self.server.options)
            if found != self.tools:
                self.tools = found
                await self._settle("ready", "")

    async def _follow_prompts(self, client: Client) -> None:
        while True:
            found = await list_prompts(client, self.name, self.prefix)
            self._prompts_known.set()
            if found != self.prompts:
                self.prompts = found
                if self.on_change is not None:
                    await self.on_change()
            await self._prompts_changed.next()

    async def _follow_resources(self, client: Client) -> None:
        while True:
            self.resources = await list_resources(client, self.name)
            self._resources_known.set()
            await self._resources_changed.next()

    async def _listen(self, client: Client) -> None:
        """Listen for changes of the listings. A server with the newer protocol reports these changes on a separate
        stream."""
        while True:
            try:
                async with client.listen(
                    tools_list_changed=True, prompts_list_changed=True, resources_list_changed=True
                ) as changes:
                    async for change in changes:
                        match change:
                            case ToolsListChanged():
                                self._tools_changed.report()
                            case PromptsListChanged():
                                self._prompts_changed.report()
                            case ResourcesListChanged():
                                self._resources_changed.report()
                            case _:
                                pass
            except SubscriptionLost:
                await anyio.sleep(_LISTEN_AGAIN_S)
                for listing in (self._tools_changed, self._prompts_changed, self._resources_changed):
                    listing.report()  # the listing may have changed while the stream was lost
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
                self._tools_changed.report()
            case mcp.PromptListChangedNotification():
                self._prompts_changed.report()
            case mcp.ResourceListChangedNotification():
                self._resources_changed.report()
            case mcp.ElicitCompleteNotification() if self.elicitation is not None:
                await self.elicitation.finish_question(message.params.elicitation_id)
            case _:
                pass

    async def _on_log(self, params: mcp.LoggingMessageNotificationParams) -> None:
        """Write a log message of the server to crow's log."""
        level = _LOG_LEVELS[params.level]
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
        self._state, self._detail = state, " ".join(detail.split())  # a server must not begin a line of its own
        self.settled.set()
        if self.on_change is not None and not self._stopping.is_set():
            await self.on_change()

    async def _fail(self, detail: str) -> None:
        detail = self.keys().mask(detail)
        lived_s = time.monotonic() - self._ready_at
        self._failures = 1 if lived_s > _STEADY_S else self._failures + 1
        # a server that has worked before is restarted without a delay after its first failure
        free = 1 if self.was_ready else 0
        # the user may log in elsewhere at any time, and a server that asks for a login costs nothing to try
        has_login_problem = self._auth is not None and bool(self._auth.problem)
        wait_s = (
            0.0
            if self._failures <= free or has_login_problem
            else BACKOFF_S * 2.0 ** min(self._failures - 1 - free, 20)
        )
        self._retry_at = time.monotonic() + min(wait_s, _MAX_BACKOFF_S)
        if not self._stopping.is_set():
            logger.warning("MCP server %s: %s", self.name, detail)
            if self._ready_at < math.inf:
                self._losses, self._loss = self._losses + 1, detail
        await self._settle("failed", detail)

    def _describe_end(self, error: BaseException) -> str:
        """Return why the server failed. If the server's process has ended, the reason says how the process ended,
        because that is more useful than the error of the broken connection."""
        if self._auth is not None and self._auth.problem:
            return self._auth.problem
        process = self._process
        if process is not None and process.closed.is_set():
            return process.reason + (f'; it last said "{process.last_words}"' if process.last_words else "")
        return describe_error(error)

    # Its tools, resources and prompts

    def announce(self, subject: str, kind: CallKind = "other") -> Announcement:
        """Return the announcement that tells the user about a call."""
        return Announcement(title=self.keys().mask(f"{self.name}: {in_title(subject)}"), kind=kind)

    async def call(
        self, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str = ""
    ) -> Outcome:
        """Call a tool. A failure is returned as an outcome that names the server."""

        async def send(client: Client) -> Outcome:
            progress = report_progress(on_output)
            result = await client.call_tool(tool.name, dict(arguments), progress_callback=progress, meta=_trace_meta())
            if (fault := output_fault(tool, result)) is not None:
                raise ToolServerError(f"its structured content does not fit its schema: {fault}")
            return outcome_of(result)

        running = RunningCall.of(call_id, tool.spec.name, arguments, self.announce(tool.title))
        return await self._run(running, tool.name, send)

    async def read_resource(self, uri: str, call_id: str = "") -> Outcome:
        """Read a resource. A failure is returned as an outcome that names the server."""

        async def send(client: Client) -> Outcome:
            return outcome_of_resource(uri, await client.read_resource(uri, meta=_trace_meta()))

        arguments = {"server": self.prefix, "uri": uri}
        running = RunningCall.of(call_id, _READ_RESOURCE, arguments, self.announce(uri, "read"))
        return await self._run(running, on_one_line(uri), send)

    async def complete(self, template: str, variable: str, value: str) -> Outcome:
        """Ask the server for values of a variable of a template. A failure is returned as an outcome that names the
        server."""

        async def send(client: Client) -> Outcome:
            if client.server_capabilities.completions is None:
                return self._failure("suggests no values for templates; fill in the template without it")
            ref = mcp.ResourceTemplateReference(uri=template)
            result = await client.complete(ref, {"name": variable, "value": value})
            return Outcome(text=encodable(completions_of(result, variable)))

        running = RunningCall.of("", _READ_RESOURCE, {}, self.announce(template, "read"))
        return await self._run(running, on_one_line(template), send)

    async def _run(self, running: RunningCall, what: str, send: Callable[[Client], Awaitable[Outcome]]) -> Outcome:
        """Send a request as soon as a slot is free. `what` is the name of the requested tool or resource for error
        messages. A failure is returned as an outcome."""
        await self.available()
        async with self._slots.slot():
            if self._client is None:
                return self._failure(f"is not available: {self._detail or 'it was stopped'}")
            with self._questions.running(running):
                try:
                    return await send(self._client)
                except MCPError as error:
                    return self._failure(self._describe_refusal(what, error))
                except Exception as error:  # noqa: BLE001 - the library may raise any error for a bad answer
                    return self._failure(f"returned an unusable result for {what}: {describe_error(error)}")

    async def list_prompts(self) -> tuple[ServerPrompt, ...]:
        """Wait until the server has started and listed its prompts, and return them."""
        if not await self.available():
            return ()
        with anyio.move_on_after(self.start_timeout_s):
            await self._prompts_known.wait()
        return tuple(self.prompts)

    async def fill_prompt(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :meth:`crow.tools.servers.ServerPrompts.fill`."""
        if self._client is None:
            raise ToolServerError(f"MCP server {self.name} is not available: {self._detail or 'it was stopped'}")
        failed = f"`/{prompt.name}` could not be used: MCP server {self.name}"
        if prompt not in self.prompts:
            raise ToolServerError(f"{failed} no longer has this prompt.")
        try:
            filled = await self._client.get_prompt(self.prompts[prompt], dict(arguments), meta=_trace_meta())
        except Exception as error:  # the library may raise any error for a bad answer
            raise ToolServerError(f"{failed} did not return the prompt: {describe_error(error)}") from error
        if not (parts := parts_of(filled)):
            raise ToolServerError(f"{failed} returned an empty prompt.")
        return parts

    @contextmanager
    def _without_deadline(self) -> Iterator[None]:
        """Suspend the time limit for the server's start while the user logs in."""
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
        return mcp.ListRootsResult(roots=[_root_of(directory) for directory in self.workspace.directories])

    def _failure(self, words: str) -> Outcome:
        return Outcome(text=f"MCP server {self.name} {words}", is_error=True)

    def _describe_refusal(self, what: str, error: MCPError) -> str:
        gone = error.code == mcp.CONNECTION_CLOSED
        if isinstance(self.server, HttpServer) and (gone or error.message == "Session terminated"):
            # An HTTP server has no process to watch: only a failed call shows that the server is gone or has forgotten
            # the session.
            self._lost_words = describe_error(error)
            self._lost.set()
        if self._auth is not None and self._auth.problem:
            return f"refused {what}: {self._auth.problem}"
        if error.code == mcp.REQUEST_TIMEOUT:
            return f"did not answer the call of {what} within {self.call_timeout_s:g} s"
        if error.code == mcp.PARSE_ERROR:
            return f"returned an unreadable result for {what}: {describe_error(error)}"
        if gone:
            return f"ended during {what}: {self._describe_end(error)}"
        return f"refused {what}: {describe_error(error)}"


def _trace_meta() -> mcp.RequestParamsMeta | None:
    """The `_meta` of a call, which holds the trace context of the client's prompt; None if there is no trace
    context."""
    return cast("mcp.RequestParamsMeta", current_trace_context()) or None


def _root_of(directory: Path) -> mcp.Root:
    """A directory of the workspace as MCP names it."""
    return mcp.Root(uri=FileUrl(directory.as_uri()), name=encodable(directory.name) or None)


def _refused_handshake(error: BaseException) -> bool:
    """Whether this error can be the refusal of the old handshake by a server that speaks only the newer protocol."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return any(map(_refused_handshake, exceptions))
        case MCPError():
            return error.code in _REFUSED_HANDSHAKE
        # raised by the library if the server answers with a protocol version that has no handshake
        case RuntimeError():
            return True
    return False


def _sends_changes(client: Client) -> bool:
    """Whether the server reports changes of its listings on a separate stream, as the newer protocol provides."""
    offered = client.server_capabilities
    capabilities = (offered.tools, offered.prompts, offered.resources)
    is_changing = any(listing is not None and listing.list_changed for listing in capabilities)
    return client.protocol_version in MODERN_PROTOCOL_VERSIONS and is_changing


async def _first_of(*events: anyio.Event) -> None:
    """Wait until one of the events is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
