"""The connection to an external MCP server: starts it, watches it, and starts it again after a failure."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import anyio.to_thread
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.shared.exceptions import MCPError
from pydantic import FileUrl

from crow.domain.errors import ToolServerError
from crow.domain.text import on_one_line, shorten
from crow.tools import ElicitationHandler, ServerStatus, Workspace
from crow.tools.mcp.auth import ServerAuth, may_log_in
from crow.tools.mcp.calls import describe_error, encodable
from crow.tools.mcp.http import http_transport
from crow.tools.mcp.listing import filter_invalid_tools
from crow.tools.mcp.logins import LoginFolder
from crow.tools.mcp.offers import Offers
from crow.tools.mcp.questions import ServerQuestions
from crow.tools.mcp.stdio import LAST_WORDS_CHARS, LOGGED_LINES, ServerProcess
from crow.tools.process import KeySource
from crow.tools.sampling import Sampler
from crow.tools.servers import HttpServer, LoginAsker, StdioServer

logger = logging.getLogger(__name__)

OnChange = Callable[[], Awaitable[None]]
"""Called when a server is ready, has failed, or has changed its tools or prompts."""

BACKOFF_S = 1.0
"""The first wait before a failed server is started again. It doubles with each failure, up to `_MAX_BACKOFF_S`."""
_MAX_BACKOFF_S = 300.0
_STEADY_S = 60.0
"""After a server has worked for this many seconds, its next failure counts as its first one."""
_REASON_CHARS = 4_000
_PROBE_S = 1.0
"""How long an HTTP server may take to answer the probe for the newer protocol."""

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


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ServerSetup:
    """The arguments of a :class:`ServerConnection`."""

    server: StdioServer | HttpServer
    prefix: str
    """The names of the server's tools and prompts begin with it."""
    workspace: Workspace
    keys: KeySource
    """The secrets that the server does not get. They are masked in its messages."""
    start_timeout_s: float
    call_timeout_s: float
    on_change: OnChange | None = None
    elicitation: ElicitationHandler | None = None
    """Asks the user the server's questions. If None, they are declined."""
    sampler: Sampler | None = None
    """If None, the server cannot use the model."""
    places: Sequence[Path] = ()
    """A server without a sandbox starts in its own directory below one of these."""
    logins: LoginFolder | None = None
    """Keeps the logins to servers. If None, crow does not log in."""
    asker: LoginAsker | None = None
    """Asks the user to log in, even if there is a login already. If None, the editor asks the user, but only if there
    is no valid login."""


# The states of a connection:
#   Starting → Ready, or Failed if the server cannot start.
#   Ready → Ending → Failed if the server is lost, or Ready → Starting by `restart`, which does not wait for the end.
#   Failed → Starting by `revive`, and Ending → Starting by `restart`.
# After `stop`, the connection stays in its last state.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Starting:
    """Crow is connecting to the server."""

    failure: str = ""
    """Why the server failed before. Empty if it did not fail, or if it is started again on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """The server takes requests."""

    client: Client
    """The library's client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """The connection is being closed, because the server was lost or crow ends. Its tools are still offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """The server could not start, or ended."""

    failure: str
    """Why."""
    retry_at: float
    """The monotonic time in seconds from which `revive` starts the server again."""


_State: TypeAlias = _Starting | _Ready | _Ending | _Failed


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    """One attempt to connect, and the connection if the attempt succeeds."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancels the attempt, or later the connection. Its deadline is the end of the time for the start. While an HTTP
    server is probed, it is the end of the shorter time for the probe. A ready server has no deadline."""
    has_answered: bool = False
    """Whether the server has answered the probe, with a message or by asking for a login."""
    is_initialized: bool = False
    """Whether the handshake has succeeded."""
    process: ServerProcess | None = None
    """The server's process, if crow starts it."""
    logged: int = 0
    """The number of the server's log messages."""
    lost: anyio.Event = field(default_factory=anyio.Event)
    """Set when a failed request shows that the server is gone."""
    lost_words: str = ""
    """The error of the request that has set `lost`."""


@dataclass(slots=True, kw_only=True)
class _Failures:
    """How often a server has failed, and how long crow waits before it starts the server again.

    The wait grows with each failure. There is no wait after the first failure of a server that has been ready before.
    After a server has worked for `_STEADY_S`, its next failure counts as the first one again.
    """

    was_ready: bool = False
    """Whether the server has ever been ready."""
    losses: int = 0
    """How often the server was ready and then failed."""
    loss: str = ""
    """The reason for the latest of these failures."""
    _in_a_row: int = 0
    """How many failures came one after the other, without `_STEADY_S` of work between them."""
    _ready_at: float = math.inf
    """The monotonic time in seconds at which the running server became ready; infinite if it is not ready yet."""

    def note_start(self) -> None:
        """Note that the server is being started."""
        self._ready_at = math.inf

    def note_ready(self) -> None:
        """Note that the server is ready."""
        self.was_ready, self._ready_at = True, time.monotonic()

    def note_failure(self) -> float:
        """Note that the server has failed. Return how many seconds to wait before it is started again."""
        lived_s = time.monotonic() - self._ready_at
        self._in_a_row = 1 if lived_s > _STEADY_S else self._in_a_row + 1
        free = 1 if self.was_ready else 0
        if self._in_a_row <= free:
            return 0.0
        return min(BACKOFF_S * 2.0 ** min(self._in_a_row - 1 - free, 20), _MAX_BACKOFF_S)

    def note_loss(self, reason: str) -> None:
        """Note the reason for a failure, if the server was ready before."""
        if self._ready_at < math.inf:
            self.losses, self.loss = self.losses + 1, reason


class ServerConnection:
    """The connection to an MCP server, in one of the states above. `serve` runs as its own task, which owns the
    library's client. All other methods may be called from any task.

    A failed server is started again when it is needed, but not sooner than :class:`_Failures` says.
    """

    def __init__(self, setup: ServerSetup) -> None:
        self.setup = setup
        self.settled = anyio.Event()
        """Set while the server is ready or has failed. Each start replaces this event with a new one."""
        self.offers = Offers(setup.server.name, setup.prefix, setup.server.options, self._tell_change)
        self.questions = ServerQuestions(
            setup.server,
            setup.prefix,
            setup.keys,
            setup.elicitation,
            setup.sampler,
            is_starting=lambda: not isinstance(self._state, _Ready),
            may_log_in=not setup.workspace.is_bounded,
        )
        self._state: _State = _Starting()
        self._attempt = _Attempt()
        self._failures = _Failures()
        self._stopping = anyio.Event()
        """Set by `stop`."""
        self._restarting = anyio.Event()
        """Set by `restart` while the server is ready. Each start replaces this event."""
        self._wanted = anyio.Event()
        """Set when a failed server must start again. Each start replaces this event."""
        self._asks_again = False
        """Set if `restart` has withdrawn the question for a login, so the start fails. Crow then starts the server
        again at once, which asks the question again."""
        self._auth: ServerAuth | None = None
        if setup.logins is not None and isinstance(setup.server, HttpServer) and may_log_in(setup.server):
            self._auth = ServerAuth(
                server=setup.server,
                logins=setup.logins,
                asker=setup.asker or self.questions,
                hold=self._without_deadline,
                forces_login=setup.asker is not None,
            )

    @property
    def name(self) -> str:
        """The server's name."""
        return self.setup.server.name

    @property
    def client(self) -> Client | None:
        """The library's client while the server is ready."""
        return self._state.client if isinstance(self._state, _Ready) else None

    @property
    def is_ready(self) -> bool:
        """Whether the server's tools are offered: it is ready, or its connection is being closed."""
        return isinstance(self._state, _Ready | _Ending)

    @property
    def was_ready(self) -> bool:
        """Whether the server has ever been ready."""
        return self._failures.was_ready

    @property
    def failure(self) -> str:
        """Why the server failed. It stays set while the server starts again."""
        return self._state.failure if isinstance(self._state, _Starting | _Failed) else ""

    @property
    def login_problem(self) -> str:
        """Why crow could not log in to the server. Empty if it could, or did not have to."""
        return "" if self._auth is None else self._auth.problem

    def status(self) -> ServerStatus:
        """Return the current state of the server. `resources` is not set: see `ExternalServer.status`."""
        return ServerStatus(
            name=self.name,
            state="ready" if self.is_ready else "failed" if isinstance(self._state, _Failed) else "starting",
            detail=self.failure,
            tools=len(self.offers.tools) if self.is_ready else 0,
            losses=self._failures.losses,
            loss=self._failures.loss,
        )

    async def serve(self) -> None:
        """Start the server, and again after `restart` and `revive`, until `stop`. A failure of the server raises no
        exception."""
        while not self._stopping.is_set():
            self._wanted, self._restarting = anyio.Event(), anyio.Event()
            self._failures.note_start()
            deadline = anyio.current_time() + self.setup.start_timeout_s
            try:
                await self._connect_in_any_version(deadline)
            except Exception as error:  # noqa: BLE001 - no failure of a server may end the session
                if self._asks_again and self._auth is not None:
                    self._asks_again = False
                    self._auth.reset()  # it has taken the withdrawn question for a refusal by the user
                    continue
                if self._restarting.is_set():
                    continue
                await self._fail(self.describe_end(error))
                await self._wanted.wait()

    def stop(self) -> None:
        """End `serve`. If the server is still starting, the start is cancelled."""
        self._stopping.set()
        self._wanted.set()
        if not self.settled.is_set():
            self._attempt.scope.cancel()

    def revive(self, *, at_once: bool = False) -> bool:
        """Start a failed server again. Return whether it starts now.

        A server that failed too recently or is misconfigured starts only if `at_once` is set.
        """
        if not isinstance(self._state, _Failed) or self._stopping.is_set():
            return False
        if not at_once and (self.setup.server.options.problem or time.monotonic() < self._state.retry_at):
            return False
        self._state = _Starting(failure=self._state.failure)
        self.settled = anyio.Event()
        self._wanted.set()
        return True

    def restart(self) -> None:
        """Start the server again, whatever its state. If the server is waiting for a login, the user is asked to log in
        again."""
        if self._auth is not None:
            self._auth.reset()
        if self.questions.withdraw_login():
            self._asks_again = True
        elif self.is_ready:
            self.settled = anyio.Event()
            self._state = _Starting()
            self._restarting.set()
        else:
            self.revive(at_once=True)

    def lose(self, words: str) -> None:
        """End the connection, because a failed request has shown that the server is gone. `words` is the error of the
        request. Do nothing for a server with a process: its process tells when it has ended."""
        if isinstance(self.setup.server, HttpServer):
            self._attempt.lost_words = words
            self._attempt.lost.set()

    async def listed(self) -> None:
        """Wait until the server either has failed, or is ready and has listed its resources."""
        await self.settled.wait()
        if self.is_ready:
            await self.offers.resources_known.wait()

    async def available(self) -> bool:
        """Wait until the server has started; if it has failed, start it again. Return whether it is ready."""
        await self.settled.wait()
        if self.revive():
            await self.settled.wait()
        return self.is_ready

    def describe_end(self, error: BaseException) -> str:
        """Return why the server failed. If the server's process has ended, the reason says how the process ended,
        because that is more useful than the error of the broken connection."""
        if self.login_problem:
            return self.login_problem
        process = self._attempt.process
        if process is not None and process.closed.is_set():
            return process.reason + (f'; it last said "{process.last_words}"' if process.last_words else "")
        return describe_error(error)

    async def _connect_in_any_version(self, deadline: float) -> None:
        """Connect with a version of the protocol that the server speaks, and stay connected.

        In the mode `auto`, the library probes for the newer protocol, and tries the old handshake if the server
        refuses the probe. In the mode `legacy`, it tries only the old handshake.

        HTTP servers are probed first, because old servers refuse the probe at once. If a server does not answer the
        probe within `_PROBE_S` or closes the connection, crow tries the old handshake. With other transports, crow
        tries the old handshake first, because many old programs never answer a probe. Newer programs refuse the old
        handshake, and then crow sends the probe.

        :raises Exception: the server failed.
        """
        if isinstance(self.setup.server, HttpServer) and self.setup.server.transport == "http":
            try:
                return await self._connect("auto", deadline, answer_s=min(_PROBE_S, self.setup.start_timeout_s / 4))
            except Exception as error:
                if self._attempt.has_answered:
                    raise
                logger.info("MCP server %s did not answer the probe: %s", self.name, describe_error(error))
        try:
            await self._connect("legacy", deadline)
        except Exception as error:
            if self._attempt.is_initialized or not _refused_handshake(error):
                raise
            await self._connect("auto", deadline)

    async def _connect(self, mode: Literal["legacy", "auto"], deadline: float, *, answer_s: float = math.inf) -> None:
        """Connect and stay connected until `stop` or `restart`.

        The server must send its first message within `answer_s`, and be ready by `deadline`.

        :raises Exception: the server failed.
        """
        self._attempt = attempt = _Attempt()
        setup = self.setup
        if self._stopping.is_set() or setup.server.options.problem:
            raise ToolServerError("stopped" if self._stopping.is_set() else setup.server.options.problem)

        def on_message() -> None:
            if not attempt.has_answered:
                attempt.has_answered = True
                attempt.scope.deadline = max(attempt.scope.deadline, deadline)

        attempt.scope.deadline = min(anyio.current_time() + answer_s, deadline)
        with attempt.scope:
            async with AsyncExitStack() as stack:
                opened = await self._open(attempt, stack)
                transport = filter_invalid_tools(opened, self.name, on_message, self.offers.note_invalid)
                client = Client(
                    transport,
                    mode=mode,
                    cache=None,
                    read_timeout_seconds=setup.call_timeout_s,
                    message_handler=self._on_message,
                    logging_callback=self._on_log,
                    log_level=next((name for name, level in _LOG_LEVELS.items() if logger.isEnabledFor(level)), None),
                    elicitation_callback=self.questions.on_elicitation,
                    sampling_callback=None if setup.sampler is None else self.questions.on_sampling,
                    # a server elsewhere has no use for the paths of this machine
                    list_roots_callback=self._list_roots if isinstance(setup.server, StdioServer) else None,
                )
                await stack.enter_async_context(client)
                attempt.is_initialized = True
                await self.offers.begin(client)
                attempt.scope.deadline = math.inf
                self._failures.note_ready()
                try:
                    await self._settle(_Ready(client=client))
                    await self._stay(attempt, client)
                finally:
                    if isinstance(self._state, _Ready):
                        self._state = _Ending()
                    self.offers.resources_known.set()
        if attempt.scope.cancelled_caught:
            limit_s = setup.start_timeout_s if attempt.has_answered else min(answer_s, setup.start_timeout_s)
            raise ToolServerError("stopped" if self._stopping.is_set() else f"it did not answer within {limit_s:g} s")

    async def _open(self, attempt: _Attempt, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        """Return the transport to the server."""
        match self.setup.server:
            case StdioServer() as server:
                attempt.process = ServerProcess(server, self.setup.workspace, self.setup.keys, self.setup.places)
                return attempt.process
            case HttpServer() as server:
                return await http_transport(server, self._auth, stack)

    async def _stay(self, attempt: _Attempt, client: Client) -> None:
        """Keep the listings up to date until `stop` or `restart`. :raises Exception: the server ended."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.offers.follow, client)
            closed = attempt.process.closed if attempt.process is not None else anyio.Event()
            await _first_of(self._stopping, self._restarting, attempt.lost, closed)
            if not self._stopping.is_set() and not self._restarting.is_set():
                raise ToolServerError("it ended" if closed.is_set() else attempt.lost_words)
            tasks.cancel_scope.cancel()

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp.ElicitCompleteNotification):
            await self.questions.finish_page(message.params.elicitation_id)
        self.offers.note(message)

    async def _on_log(self, params: mcp.LoggingMessageNotificationParams) -> None:
        """Write a log message of the server to crow's log."""
        level = _LOG_LEVELS[params.level]
        if not logger.isEnabledFor(level):
            return
        self._attempt.logged += 1
        if self._attempt.logged <= LOGGED_LINES:
            data = params.data if isinstance(params.data, str) else json.dumps(params.data, ensure_ascii=False)
            text = f"{params.logger}: {data}" if params.logger else data
            text = on_one_line(self.setup.keys().mask(encodable(text)))
            logger.log(level, "%s: %s", self.name, text[:LAST_WORDS_CHARS])
        elif self._attempt.logged == LOGGED_LINES + 1:
            logger.info("%s: further log messages are left out", self.name)

    async def _settle(self, state: _Ready | _Failed) -> None:
        self._state = state
        self.settled.set()
        await self._tell_change()

    async def _tell_change(self) -> None:
        if self.setup.on_change is not None and not self._stopping.is_set():
            await self.setup.on_change()

    async def _fail(self, reason: str) -> None:
        reason = shorten(self.setup.keys().mask(reason), _REASON_CHARS)
        wait_s = self._failures.note_failure()
        if self.login_problem:  # the user may log in elsewhere at any time, and such a server costs nothing to try
            wait_s = 0.0
        if not self._stopping.is_set():
            logger.warning("MCP server %s: %s", self.name, reason)
            self._failures.note_loss(reason)
        words = " ".join(reason.split())  # on one line, so that a server cannot forge further ones
        await self._settle(_Failed(failure=words, retry_at=time.monotonic() + wait_s))

    @contextmanager
    def _without_deadline(self, has_answered: bool) -> Iterator[None]:
        """Suspend the time limits for the server's start while crow gets a token.

        If the server `has_answered` that it needs a token, it gets the whole time for its start again afterwards.
        Otherwise it gets the time that was left.
        """
        is_starting, attempt = isinstance(self._state, _Starting), self._attempt
        left_s = self.setup.start_timeout_s if has_answered else attempt.scope.deadline - anyio.current_time()
        if is_starting:
            attempt.has_answered |= has_answered
            attempt.scope.deadline = math.inf
        try:
            yield
        finally:
            if is_starting and isinstance(self._state, _Starting):
                attempt.scope.deadline = anyio.current_time() + left_s

    async def _list_roots(self, context: ClientRequestContext) -> mcp.ListRootsResult:  # noqa: ARG002
        """Tell the server where the workspace is."""
        return mcp.ListRootsResult(roots=[_root_of(directory) for directory in self.setup.workspace.directories])


def _root_of(directory: Path) -> mcp.Root:
    """Return a directory of the workspace as MCP names it."""
    return mcp.Root(uri=FileUrl(directory.as_uri()), name=encodable(directory.name) or None)


def _refused_handshake(error: BaseException) -> bool:
    """Return whether this error can be the refusal of the old handshake by a server that speaks only the newer
    protocol."""
    match error:
        case BaseExceptionGroup(exceptions=exceptions):
            return any(map(_refused_handshake, exceptions))
        case MCPError():
            return error.code in _REFUSED_HANDSHAKE
        # raised by the library if the server answers with a protocol version that has no handshake
        case RuntimeError():
            return True
    return False


async def _first_of(*events: anyio.Event) -> None:
    """Wait until one of the events is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
