"""Runs the server: opens its sockets, handles signals, shuts it down and starts its log."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.routing import Route

from crow import adapters
from crow.app import Wiring
from crow.domain.errors import ConfigError, NoSuchSession, StoreError
from crow.export.links import PageLinks
from crow.frontend.agent import Negotiate
from crow.frontend.agent import serve as serve_connection
from crow.frontend.host import SessionHost, share_host
from crow.frontend.requester import Requester
from crow.frontend.v2 import VersionTwo
from crow.log import log_as_json
from crow.protocol.connection import check_parameters
from crow.serve import listen
from crow.serve.browser import page_routes
from crow.serve.http import SHUTDOWN, AccessControl, AcpService, ServedConnection, TokenAccess, WaitingService
from crow.serve.metrics import MetricFamily, Metrics, gauge, metered
from crow.serve.policy import ServePolicy, check_server
from crow.serve.tokens import Authenticator, Grant, is_valid
from crow.serve.waiting import open_when_reachable
from crow.serve.websocket import ConnectionLimits, HttpProtocol, SocketProtocol
from crow.settings import Loaded
from crow.settings.values import ServeSettings
from crow.store import Store
from crow.store.principals import PrincipalStore, session_view
from crow.version import __version__

CLOSE_S = 5.0
"""After the drain, crow cancels the turns that still run. These turns have this many seconds to end. Then clients have
the same time again to read their remaining messages."""

_POLL_S = 0.02
_IDLE_CHECK_S = 10.0

_READY_REUSED_S = 1.0
"""The endpoint /readyz checks the store at most once in this many seconds. Between two checks, it repeats its last
answer."""

_READY_TIMEOUT_S = 3.0
"""The store has this many seconds to answer a check by /readyz."""

_REQUEST_HEAD_BYTES = 16 * 1024

logger = logging.getLogger(__name__)


async def serve(
    loaded: Loaded,
    reload: Callable[[], Loaded],
    *,
    offers_v2: bool = False,
    is_resident: bool = False,
    limits: ConnectionLimits | None = None,
    on_listening: Callable[[str], object] = lambda _address: None,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and return the exit code.

    `on_listening` gets each address as soon as clients can connect to it. If `is_resident` is true, the server serves
    only this user. Such a server ends when it has had no client and no running turn for `serve.idle_timeout_s` seconds.

    :raises ConfigError: the server cannot listen on its address, or the settings do not separate its users from each
        other.
    """
    if loaded.problem is not None:
        raise loaded.problem
    _start_server_log(loaded)
    try:
        await _serve(
            loaded,
            reload,
            offers_v2=offers_v2,
            is_resident=is_resident,
            limits=limits or ConnectionLimits(),
            tell=on_listening,
        )
    except BaseExceptionGroup as group:  # task groups wrap every exception in a group
        raise _only_error(group) from None
    logger.info("The server has ended")
    return 0


async def _serve(
    loaded: Loaded,
    reload: Callable[[], Loaded],
    *,
    offers_v2: bool,
    is_resident: bool,
    limits: ConnectionLimits,
    tell: Callable[[str], object],
) -> None:
    settings = loaded.settings.serve
    tls = {} if is_resident else tls_options(settings, loaded.paths.config_file.parent)
    with listen.listening(listen.parse_address(settings.listen)) as sockets, _ended_by_signals() as signals:
        raise_file_limit()
        adapters.protect_process(loaded)
        wiring = Wiring(loaded, reload=reload)
        open_store = wiring.dependencies().open_store
        store: Store | None
        if is_resident:  # no wait for the database: the client that starts this server reports the error
            store = await open_store()
        else:
            store = await open_when_reachable(
                open_store, partial(_waiting_room, sockets, settings, limits, tls), signals
            )
        if store is not None:
            is_private = listen.is_private(sockets)
            async with (
                adapters.orphans_ended(),
                _open_server(
                    *(wiring, store, settings, limits),
                    is_private=is_private,
                    is_resident=is_resident,
                    offers_v2=offers_v2,
                ) as server,
                anyio.create_task_group() as tasks,
            ):
                http = uvicorn_server(server.service, settings, limits, tls, is_resident=is_resident)
                tasks.start_soon(http.serve, sockets)
                await http.has_started()
                for each in sockets:
                    address = listen.address_of(each, is_tls=bool(tls))
                    logger.info("The server listens", extra={"address": address, "version": __version__})
                    tell(address)
                listen.notify_systemd("READY=1\nSTATUS=")
                tasks.start_soon(server.warm)
                tasks.start_soon(_keep_running, server.authenticator.run)
                if is_resident and settings.idle_timeout_s:
                    tasks.start_soon(server.end_when_idle, settings.idle_timeout_s, signals)
                await signals.get()
                listen.notify_systemd("STOPPING=1")
                await server.drain(settings.drain_timeout_s, signals)
                http.should_exit = True
                await http.has_ended()
                tasks.cancel_scope.cancel()
        await wiring.close()


@asynccontextmanager
async def _waiting_room(
    sockets: Sequence[socket.socket], settings: ServeSettings, limits: ConnectionLimits, tls: dict[str, Any]
) -> AsyncIterator[None]:
    """During the block, tell clients that the server is not ready yet. The sockets stay open after the block, so the
    system holds the connections of clients until the server itself accepts them."""
    http = uvicorn_server(WaitingService(limits), settings, limits, tls)
    copies = [each.dup() for each in sockets]  # uvicorn closes them
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(http.serve, copies)
        await http.has_started()
        for each in sockets:
            logger.info(
                "The server listens and is not ready", extra={"address": listen.address_of(each, is_tls=bool(tls))}
            )
        # Without this, systemd would consider the service failed, although a restart would not help.
        listen.notify_systemd("READY=1\nSTATUS=Waiting for the database")
        try:
            yield
        finally:
            http.should_exit = True
    for each in copies:
        each.close()


def _only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the only error in the group. If the group holds several errors, return the group."""
    while len(group.exceptions) == 1:
        (error,) = group.exceptions
        if not isinstance(error, BaseExceptionGroup):
            return error
        group = error
    return group


class _Server:
    """The server in this process. It accepts clients, and all clients share one session host."""

    def __init__(
        self,
        host: SessionHost,
        authenticator: Authenticator,
        access: AccessControl,
        settings: ServeSettings,
        limits: ConnectionLimits,
        *,
        is_confining: bool,
        offers_v2: bool,
        metrics: Metrics,
        routes: Sequence[Route] = (),
        links: PageLinks | None = None,
    ) -> None:
        self._host = host
        self._settings = settings
        self._is_confining = is_confining
        self.authenticator = authenticator
        self._negotiate: Negotiate | None = VersionTwo if offers_v2 else None
        self._checked: tuple[float, str] = (0.0, "")
        self.service = AcpService(
            self._serve,
            access=access,
            more_routes=routes,
            limits=limits,
            max_connections=settings.max_connections,
            max_connections_each=settings.max_connections_each,
            origins=settings.origins,
            hosts=settings.hosts,
            operators=settings.operators,
            gauges=self._gauges,
            check_ready=self._problem,
            metrics=metrics,
            links=links,
            has_session=self._has_session,
        )

    async def _has_session(self, session_id: str) -> bool:
        try:
            return (await (await self._host.store()).session(session_id)).id == session_id
        except NoSuchSession:
            return False

    async def warm(self) -> None:
        """Import the packages that the first prompt needs."""
        await self._host.warm()

    @property
    def _busy_sessions(self) -> int:
        """The number of sessions that run a turn or have a subagent running in the background."""
        return sum(hosted.session.busy for hosted in self._host.open.values())

    async def end_when_idle(self, timeout_s: float, signals: asyncio.Queue[int]) -> None:
        """Wait until there has been no client and no running turn for `timeout_s`, then end the server as SIGTERM
        would."""
        used_at = time.monotonic()
        while (idle_s := time.monotonic() - used_at) < timeout_s:
            await anyio.sleep(min(timeout_s - idle_s, _IDLE_CHECK_S))
            if self.service.clients or self._busy_sessions:
                used_at = time.monotonic()
        logger.info("Nobody has used the server", extra={"seconds": round(idle_s)})
        signals.put_nowait(signal.SIGTERM)

    async def drain(self, timeout_s: float, signals: asyncio.Queue[int]) -> None:
        """Shut the server down: wait for running turns, cancel the turns that do not end in time, and disconnect the
        clients.

        The turns have `timeout_s` seconds to end. A further signal ends this wait at once.
        """
        service = self.service
        service.is_draining = True
        logger.info("The server drains", extra={"clients": len(service.clients), "sessions": self._busy_sessions})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_then_cancel, signals.get, tasks.cancel_scope)
            await self._work_ends(timeout_s)
            tasks.cancel_scope.cancel()
        if self._busy_sessions:
            logger.warning("Running turns are cancelled", extra={"sessions": self._busy_sessions})
            for hosted in self._host.open.values():
                hosted.session.cancel()
            await self._work_ends(CLOSE_S)
        service.close_all(SHUTDOWN)
        with anyio.move_on_after(CLOSE_S):
            while service.clients:  # noqa: ASYNC110 - they end in any order
                await anyio.sleep(_POLL_S)

    async def _work_ends(self, timeout_s: float) -> None:
        with anyio.move_on_after(timeout_s):
            while self._busy_sessions or self.service.prompts:  # noqa: ASYNC110 - turns end in many places
                await anyio.sleep(_POLL_S)

    async def _serve(self, connection: ServedConnection, connection_id: str, grant: Grant | None) -> None:
        requester = self._requester(grant, connection_id)
        await serve_connection(
            connection,
            self._host.dependencies,
            host=self._host,
            requester=requester,
            check=check_parameters,
            negotiate=self._negotiate,
        )

    def _requester(self, grant: Grant | None, connection_id: str) -> Requester:
        """Return the rights of a client. On a server without tokens, a client may do everything."""
        if grant is None:
            return Requester(connection_id=connection_id)
        policy = ServePolicy(self._settings, grant.principal, is_confining=self._is_confining)
        return Requester(
            connection_id=connection_id,
            view=partial(PrincipalStore, principal=grant.principal),
            check=policy.check,
            check_params=policy.check_params,
            may_configure=False,
        )

    async def _problem(self) -> str:
        """Return the reason why the server is not ready, or an empty string if the server is ready."""
        asked_at, problem = self._checked
        if time.monotonic() - asked_at < _READY_REUSED_S:
            return problem
        problem = ""
        try:
            with anyio.fail_after(_READY_TIMEOUT_S):
                await (await self._host.store()).session_by_alias("readyz")
        except TimeoutError:
            problem = f"the store has not answered for {_READY_TIMEOUT_S:g} s"
        except StoreError as error:
            logger.warning("The store cannot be used: %s", error)
            problem = "the store cannot be used; see the log"
        self._checked = (time.monotonic(), problem)
        return problem

    def _gauges(self) -> Iterable[MetricFamily]:
        sessions = [hosted.session for hosted in self._host.open.values()]
        yield gauge("crow_sessions_open", "Sessions that are open.", len(sessions))
        yield gauge("crow_sessions_busy", "Sessions that run a turn or a subagent.", self._busy_sessions)
        waiting = sum(len(session.queue.waiting) for session in sessions)
        yield gauge("crow_prompts_waiting", "Prompts that wait for an earlier one of their session.", waiting)


@asynccontextmanager
async def _open_server(
    wiring: Wiring,
    opened: Store,
    settings: ServeSettings,
    limits: ConnectionLimits,
    *,
    is_private: bool,
    is_resident: bool,
    offers_v2: bool,
) -> AsyncIterator[_Server]:
    """Open the session host with an open store, and close both at the end.

    `is_private` means that only programs on this machine can connect. If `is_private` is false, every client needs a
    token. If `is_resident` is true, the server serves one user, who sees every session of the store, just as with `crow
    acp`.

    :raises ConfigError: clients need a token, and no token exists.
    :raises StoreError: the store cannot be used.
    """
    metrics = Metrics()
    dependencies = wiring.dependencies()

    async def open_metered() -> Store:
        return metered(opened, metrics)

    async with share_host(replace(dependencies, open_store=open_metered), session_view=session_view) as host:
        store = await host.store()  # the host closes it
        if not is_private:
            now_ms = time.time_ns() // 1_000_000
            if not any(is_valid(token, now_ms) for token in await store.tokens()):
                raise ConfigError(
                    f"crow serve --listen {settings.listen} would let other machines connect, and no token exists. Add "
                    'one with "crow serve token add NAME", or listen on 127.0.0.1 or on a Unix socket.'
                )
        authenticator = Authenticator(store)
        access = TokenAccess(authenticator, store, is_required=not is_private, is_resident=is_resident)
        wiring.is_bounded = lambda: access.is_required
        sandbox = await wiring.sandbox_status()
        if await access.needs_tokens():
            check_server(settings, dependencies.mode, sandbox)
        yield _Server(
            host,
            authenticator,
            access,
            settings,
            limits,
            is_confining=bool(sandbox.name),
            offers_v2=offers_v2,
            metrics=metrics,
            routes=() if is_resident else page_routes(authenticator, access.needs_tokens),
            links=host.adapters.links,
        )


class _UvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers of its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._started = asyncio.Event()
        self._ended = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing. Crow handles the signals itself, because `_Server.drain` must run before uvicorn stops."""
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Start accepting connections."""
        await super().startup(sockets)
        self._started.set()

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Close the connections that are still open."""
        await super().shutdown(sockets)
        self._ended.set()

    async def has_started(self) -> None:
        """Wait until the server accepts connections."""
        await self._started.wait()

    async def has_ended(self) -> None:
        """Wait until all connections are closed."""
        await self._ended.wait()


def uvicorn_server(
    service: AcpService | WaitingService,
    settings: ServeSettings,
    limits: ConnectionLimits,
    tls: dict[str, Any],
    *,
    is_resident: bool = False,
) -> _UvicornServer:
    """Return the HTTP server, which is not started yet."""
    http: Any = partial(HttpProtocol, service.handshakes, only_this_user=is_resident)
    ws: Any = partial(SocketProtocol, limits)
    config = uvicorn.Config(
        service.app(),
        http=http,
        ws=ws,
        ws_max_size=limits.message_bytes,
        ws_ping_interval=limits.ping_s,
        ws_ping_timeout=None,  # SocketProtocol decides when a client is silent
        ws_per_message_deflate=False,  # compression takes 300 kB per connection, and lets small frames become huge
        h11_max_incomplete_event_size=_REQUEST_HEAD_BYTES,
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_graceful_shutdown=int(CLOSE_S),
        loop="asyncio",
        **tls,
    )
    return _UvicornServer(config)


def tls_options(settings: ServeSettings, folder: Path) -> dict[str, Any]:
    """Return uvicorn's options for TLS, or an empty dict if the settings name no certificate.

    :raises ConfigError: the certificate or its key cannot be used.
    """
    if settings.tls_cert is None and settings.tls_key is None:
        return {}
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("crow serve needs both a certificate and its key: --tls-cert FILE --tls-key FILE.")
    cert, key = folder / settings.tls_cert, folder / settings.tls_key
    return {"ssl_context_factory": listen.tls_context(cert, key)}


def _start_server_log(loaded: Loaded) -> None:
    """Start a log in JSON. The level is `info` if the user has not set `log.level`."""
    level = "info" if loaded.sources["log.level"] == "default" else loaded.settings.log.level
    file = loaded.settings.serve.log_file
    path = None if file is None else loaded.paths.config_file.parent / file
    log_as_json(path, level, loaded.settings.secrets())


def raise_file_limit() -> None:
    """Raise the limit for open files as far as the system permits, because each client needs an open file."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has no such module

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _ended_by_signals() -> Iterator[asyncio.Queue[int]]:
    """Yield a queue that gets each SIGTERM, SIGINT and SIGHUP. Inside the block, these signals do not end the
    process."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _keep_running(run: Callable[[], Awaitable[None]], *, pause_s: float = 1.0) -> None:
    """Call `run` again and again until this task is cancelled. Wait `pause_s` seconds after each call. Log any error of
    `run`."""
    while True:
        try:
            await run()
        except Exception:
            logger.exception("A task of the server failed; it starts again")
        await anyio.sleep(pause_s)


async def _then_cancel(wait: Callable[[], Any], scope: anyio.CancelScope) -> None:
    await wait()
    scope.cancel()
