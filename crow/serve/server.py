"""Runs the server: sockets, signals, draining, and what it logs."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import uvicorn

from crow import __version__, adapters
from crow.app import Wiring
from crow.domain.errors import ConfigError
from crow.frontend.agent import AcpAgent
from crow.frontend.agent import serve as serve_connection
from crow.frontend.v2 import NegotiatingAgent
from crow.log import log_as_json
from crow.serve import listen
from crow.serve.http import SHUTDOWN, Grant, AcpService, NoAccessControl, ServedConnection
from crow.serve.metrics import Family, metered
from crow.serve.websocket import ConnectionLimits, HttpProtocol, SocketProtocol
from crow.settings import Loaded
from crow.settings.values import ServeSettings
from crow.store import Store

CLOSE_S = 5.0
"""How long clients get to read what waits for them, after the drain."""

REQUEST_HEAD_BYTES = 16 * 1024

logger = logging.getLogger(__name__)


async def serve(
    loaded: Loaded,
    reload: Callable[[], Loaded],
    *,
    offers_v2: bool = False,
    limits: ConnectionLimits | None = None,
    on_listening: Callable[[str], object] = lambda _address: None,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and return the exit code.

    `on_listening` gets each address when the server can be reached there.

    :raises ConfigError: the server cannot listen as the settings say.
    """
    if loaded.problem is not None:
        raise loaded.problem
    settings = loaded.settings.serve
    start_server_log(loaded)
    limits = limits or ConnectionLimits()
    tls = tls_options(settings, loaded.paths.config_file.parent)
    with listen.listening(listen.parse_address(settings.listen)) as sockets:
        if not listen.is_private(sockets):
            raise ConfigError(
                f"crow serve --listen {settings.listen} would let other machines connect, and no token exists. Listen "
                "on 127.0.0.1 or on a Unix socket."
            )
        raise_file_limit()
        adapters.protect_process(loaded)
        async with adapters.orphans_ended():
            server = Server(loaded, reload, limits=limits, offers_v2=offers_v2)
            http = uvicorn_server(server.service, settings, limits, tls)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(http.serve, sockets)
                with ended_by_signals() as signals:
                    await http.has_started()
                    for each in sockets:
                        address = listen.describe(each, is_tls=bool(tls))
                        logger.info("The server listens", extra={"address": address, "version": __version__})
                        on_listening(address)
                    listen.notify_systemd("READY=1")
                    await signals.get()
                    listen.notify_systemd("STOPPING=1")
                    await server.drain(settings.drain_timeout_s, signals)
                    http.should_exit = True
            await server.close()
    logger.info("The server has ended")
    return 0


class Server:
    """What the process serves to all clients."""

    def __init__(
        self, loaded: Loaded, reload: Callable[[], Loaded], *, limits: ConnectionLimits, offers_v2: bool
    ) -> None:
        self._loaded = loaded
        self._reload = reload
        self._agent_type: type[AcpAgent] = NegotiatingAgent if offers_v2 else AcpAgent
        settings = loaded.settings.serve
        self.service = AcpService(
            self._serve,
            access=NoAccessControl(),
            limits=limits,
            max_connections=settings.max_connections,
            max_connections_each=settings.max_connections_each,
            origins=settings.origins,
            hosts=settings.hosts,
            gauges=self._gauges,
            check_ready=self._problem,
        )

    async def drain(self, timeout_s: float, signals: asyncio.Queue[int]) -> None:
        """Lets running turns end; then tells the clients, cancels what still runs, and stores it. The next signal ends
        the wait."""
        service = self.service
        service.is_draining = True
        logger.info("The server drains", extra={"clients": len(service.clients), "prompts": service.prompts})
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_then_cancel, signals.get, tasks.cancel_scope)
                while service.prompts:  # noqa: ASYNC110 - turns end in many places
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
        if service.prompts:
            logger.warning("Running turns are cancelled", extra={"prompts": service.prompts})
        service.close_all(SHUTDOWN)
        with anyio.move_on_after(CLOSE_S):
            while service.clients:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def close(self) -> None:
        """Closes the models."""

    async def _serve(self, connection: ServedConnection, connection_id: str, grant: Grant | None) -> None:
        wiring = Wiring(self._loaded, reload=self._reload)
        dependencies = wiring.dependencies()
        open_store = dependencies.open_store

        async def open_metered() -> Store:
            return metered(await open_store(), self.service.metrics)

        try:
            await serve_connection(
                connection, replace(dependencies, open_store=open_metered), agent_type=self._agent_type
            )
        finally:
            await wiring.close()

    async def _problem(self) -> str:
        return ""

    def _gauges(self) -> Iterable[Family]:
        return ()


class UvicornServer(uvicorn.Server):
    """uvicorn, without its own signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the drain begins before uvicorn stops."""
        yield

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Starts to accept connections."""
        await super().startup(sockets)
        self._started.set()

    async def has_started(self) -> None:
        """Returns when connections are accepted."""
        await self._started.wait()


def uvicorn_server(
    service: AcpService, settings: ServeSettings, limits: ConnectionLimits, tls: dict[str, Any]
) -> UvicornServer:
    """The HTTP server."""
    http: Any = partial(HttpProtocol, service.handshakes)
    ws: Any = partial(SocketProtocol, limits)
    config = uvicorn.Config(
        service.app(),
        http=http,
        ws=ws,
        ws_max_size=limits.message_bytes,
        ws_ping_interval=limits.ping_s,
        ws_ping_timeout=None,  # SocketProtocol decides when a client is silent
        ws_per_message_deflate=False,  # small frames could inflate to large messages, and each connection needs 300 kB
        h11_max_incomplete_event_size=REQUEST_HEAD_BYTES,
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
    return UvicornServer(config)


def tls_options(settings: ServeSettings, folder: Path) -> dict[str, Any]:
    """The options of uvicorn for TLS; empty without a certificate. :raises ConfigError: it cannot be used."""
    if settings.tls_cert is None and settings.tls_key is None:
        return {}
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("crow serve needs both a certificate and its key: --tls-cert FILE --tls-key FILE.")
    cert, key = folder / settings.tls_cert, folder / settings.tls_key
    return {"ssl_context_factory": listen.tls_context(cert, key)}


def start_server_log(loaded: Loaded) -> None:
    """Logs as JSON, at `info` unless the user chose a level."""
    level = "info" if loaded.sources["log.level"] == "default" else loaded.settings.log.level
    file = loaded.settings.serve.log_file
    path = None if file is None else loaded.paths.config_file.parent / file
    log_as_json(path, level, loaded.settings.secrets())


def raise_file_limit() -> None:
    """Allows as many open files as the system permits: each client needs one."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has no such module

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def ended_by_signals() -> Iterator[asyncio.Queue[int]]:
    """Puts each SIGTERM, SIGINT and SIGHUP into a queue, instead of ending the process."""
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


async def _then_cancel(wait: Callable[[], Any], scope: anyio.CancelScope) -> None:
    await wait()
    scope.cancel()
