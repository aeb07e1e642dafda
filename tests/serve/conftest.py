"""One server for the tests of a module, and one in this process whose limits a test chooses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.routing import Route

from crow.serve.http import AcpService, ServedConnection
from crow.serve.server import uvicorn_server
from crow.serve.tokens import Grant
from crow.serve.websocket import ConnectionLimits
from crow.settings.values import ServeSettings
from tests.support.server import ServerProcess, server_environment


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The module's server and its tests share an event loop."""
    return "asyncio"


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    """A server with the offline model, shared by the tests of a module."""
    home = tmp_path_factory.mktemp("server")
    async with ServerProcess(env=server_environment(home / "home", CROW_SANDBOX="off"), cwd=home) as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A workspace with a file."""
    directory = tmp_path / "work"
    directory.mkdir()
    (directory / "README.md").write_text("# Nest\nTwigs and string.\n")
    return directory


class Everybody:
    """Lets everybody connect. A token is the name of the principal."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []
        self.is_open = asyncio.Event()
        """While this event is not set, everybody waits."""
        self.is_open.set()

    async def admit(self, token: str | None, address: str) -> Grant | None:
        """See `AccessControl`."""
        self.asked.append(token)
        await self.is_open.wait()
        return Grant(principal=token, token_id=token) if token else None

    def connected(self, grant: Grant | None, close: Callable[[str], None]) -> AbstractContextManager[object]:
        """See `AccessControl`."""
        return nullcontext()


class Service:
    """A service in this process. It answers `echo` with its parameters, and `flood` with that many notifications. It
    answers `session/new` when `may_open` is set."""

    def __init__(
        self, limits: ConnectionLimits, *, max_connections: int = 50, more_routes: Sequence[Route] = ()
    ) -> None:
        self.limits = limits
        self.methods: list[str] = []
        self.access = Everybody()
        self.opening: list[str] = []
        """The `cwd` of each `session/new` that has begun."""
        self.may_open = asyncio.Event()
        self.acp = AcpService(
            self._serve,
            access=self.access,
            limits=limits,
            max_connections=max_connections,
            max_connections_each=max_connections,
            check_ready=self._problem,
            more_routes=more_routes,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Listens on 127.0.0.1 and yields the port."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
            http = uvicorn_server(self.acp, ServeSettings(), self.limits, {})
            running = asyncio.create_task(http.serve([listener]))
            await http.has_started()
            try:
                yield port
            finally:
                http.should_exit = True
                with anyio.CancelScope(shield=True):
                    await running

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Waits for something that this process does."""
        with anyio.fail_after(60):
            while not is_true():  # noqa: ASYNC110
                await anyio.sleep(0.005)

    async def _serve(self, connection: ServedConnection, id_: str, _grant: Grant | None) -> None:

        async def handle(method: str, params: Any, is_notification: bool) -> Any:
            self.methods.append(method)
            if method == "session/new":
                self.opening.append(params["cwd"])
                await self.may_open.wait()
            if method == "flood":
                for _ in range(params["count"]):
                    if params["waits"]:
                        await connection.notify("filler", {"text": "x" * params["size"]})
                    else:
                        params_of = {"text": "x" * params["size"]}
                        (client,) = (each for each in self.acp.clients.values() if each.id == id_)
                        client.transport.post({"jsonrpc": "2.0", "method": "filler", "params": params_of})
            return dict(params)

        await connection.run(handle)
        await connection.end()

    async def _problem(self) -> str:
        return ""
