"""Starts `crow serve` and connects to it, for all tests of servers.

`ServerProcess` is the process; `WebSocketClient` is a client of it that checks every message, like `CrowProcess`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed

from acp_check.schema import SchemaChecker, Violation
from tests.support import fork_server
from tests.support.acp_client import WAIT_S, Answer, CrowProcess
from tests.support.house_rules import HouseRules
from tests.support.order import OrderChecker

PIPE = asyncio.subprocess.PIPE


class ServerProcess:
    """A running `crow serve`. Use as `async with ServerProcess(...) as server`: leaving stops it with SIGTERM.

    `options` are added to the command line; without `--listen` the server chooses a free port on 127.0.0.1. On leaving,
    the server must have ended with 0 and logged no error, unless `is_checked` is False. `program` is a module of the
    tests that runs crow; it gets `before` as its first arguments.
    """

    def __init__(
        self,
        *options: str,
        env: Mapping[str, str],
        cwd: Path,
        argv: Sequence[str] | None = None,
        program: str = "",
        before: Sequence[str] = (),
    ) -> None:
        listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
        self.arguments = (*before, "serve", *listen, *options)
        self._argv, self._env, self._cwd, self._program = argv, env, cwd, program
        self.logged: list[dict[str, Any]] = []
        """The log, one object for each line."""
        self.is_checked = True
        self.is_started = True
        """Whether entering the context waits until the server serves clients."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.process: asyncio.subprocess.Process | fork_server.ForkedProcess
        if self._argv is None and sys.platform == "linux":
            self.process = await fork_server.start(
                self.arguments, env=self._env, cwd=self._cwd, limit=1 << 24, program=self._program or "crow.cli"
            )
        else:
            argv = [*(self._argv or (sys.executable, "-m", self._program or "crow")), *self.arguments]
            self.process = await asyncio.create_subprocess_exec(
                *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=dict(self._env), cwd=self._cwd, limit=1 << 24
            )
        self._reader = asyncio.create_task(self._read_log())
        if self.is_started:
            self.address = str((await self.wait_for_log("The server listens"))["address"])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process.returncode is None:
                self.send_signal(signal.SIGCONT)
                self.send_signal(signal.SIGTERM)
            with anyio.move_on_after(WAIT_S, shield=True) as scope:
                await self.wait()
            if scope.cancelled_caught:
                self.process.kill()
                raise AssertionError("The server did not end after SIGTERM") from error
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            if isinstance(self.process, fork_server.ForkedProcess):
                self.process.close()
        if kind is None and self.is_checked:
            errors = [line for line in self.logged if line["level"] in {"error", "critical"}]
            if errors or self.process.returncode != 0:
                raise AssertionError(f"The server ended with {self.process.returncode} and logged {errors}")

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def base_url(self) -> str:
        """The URL of the HTTP endpoints. Only for TCP."""
        return self.address.replace("ws", "http", 1).removesuffix("/acp")

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.base_url.rpartition(":")[2])

    def client(
        self, *, headers: Mapping[str, str] | None = None, answers: Mapping[str, Answer] | None = None, **options: Any
    ) -> WebSocketClient:
        """A client of this server that is not connected yet. `options` are those of `websockets.connect`."""
        return WebSocketClient(self.address, headers=headers, answers=answers, **options)

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        """The response to a GET request, over TCP or the Unix socket."""
        is_unix = self.address.startswith("unix:")
        transport = httpx2.AsyncHTTPTransport(uds=self.address.removeprefix("unix:")) if is_unix else None
        async with httpx2.AsyncClient(transport=transport, trust_env=False, timeout=WAIT_S) as http:
            return await http.get(("http://localhost" if is_unix else self.base_url) + path, headers=headers)

    async def metrics(self) -> dict[str, float]:
        """All samples of /metrics, by name and labels, such as `crow_connections` or `x_total{reason="y"}`."""
        lines = (await self.get("/metrics")).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def wait_for_log(self, message: str, **fields: Any) -> dict[str, Any]:
        """Waits for a line of the log with this message and these fields; returns it."""
        with anyio.fail_after(WAIT_S):
            while True:
                for line in self.logged:
                    if line["message"] == message and fields.items() <= line.items():
                        return line
                if self._reader.done():
                    raise AssertionError(f"The server ended before it logged {message!r}: {self.logged}")
                self._changed.clear()
                await self._changed.wait()

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    async def wait(self) -> int:
        """Waits for the exit and returns its code."""
        await self.process.wait()
        await asyncio.wait([self._reader])
        return self.process.returncode or 0

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        try:
            while line := await self.process.stderr.readline():
                try:
                    self.logged.append(json.loads(line))
                except ValueError:
                    self.logged.append({"level": "error", "message": line.decode(errors="replace")})
                self._changed.set()
        finally:
            self._changed.set()


class WebSocketClient(CrowProcess):
    """A client of a server, with the methods of `CrowProcess` that do not concern a process. It checks every message.

    `address` is the `ws://` or `wss://` URL or `unix:PATH`. The connection may be left to end in any way.
    """

    def __init__(
        self,
        address: str,
        *,
        headers: Mapping[str, str] | None = None,
        answers: Mapping[str, Answer] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(None, env={}, cwd=Path(), answers=answers)
        self.follows_order = True
        """Whether messages must come in the order that a client without others sees. Set it to False for one that
        watches the turns of others."""
        self._address = address
        self._options = {"compression": None, "max_size": None, "proxy": None, "additional_headers": headers} | options

    async def __aenter__(self) -> Self:
        if self._address.startswith("unix:"):
            del self._options["proxy"]
            self.socket: ClientConnection = await unix_connect(
                self._address.removeprefix("unix:"), "ws://localhost/acp", **self._options
            )
        else:
            self.socket = await connect(self._address, **self._options)
        self._readers = [asyncio.create_task(self._read_socket())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.socket.close()
        for task in (*self._answering, *self._readers):
            task.cancel()
        await asyncio.gather(*self._answering, *self._readers, return_exceptions=True)
        if kind is None:
            self.check()

    @property
    def connection_id(self) -> str:
        """The id that the server has given this connection."""
        assert self.socket.response is not None
        return self.socket.response.headers["Acp-Connection-Id"]

    @property
    def returncode(self) -> int | None:
        """The code of the close frame; None while the connection is open."""
        return self.socket.close_code

    def check(self) -> None:
        """Checks everything received so far. :raises Violation: an invalid message."""
        if self._faults:
            raise Violation("\n".join(self._faults))

    def _rules(self) -> tuple[SchemaChecker | OrderChecker | HouseRules, ...]:
        return super()._rules() if self.follows_order else (self._schema, self._house)

    async def closed(self) -> tuple[int | None, str | None]:
        """Waits until the server closes the connection; returns the code and the reason."""
        with anyio.fail_after(WAIT_S):
            await self.socket.wait_closed()
            await asyncio.wait(self._readers)
        return self.socket.close_code, self.socket.close_reason

    async def send_raw(self, data: bytes) -> None:
        """Sends each line as a text frame, without checking or logging it."""
        with anyio.fail_after(WAIT_S):
            for line in data.splitlines():
                await self.socket.send(line, text=True)

    def break_off(self) -> None:
        """Ends the TCP connection at once, without a close frame."""
        self.socket.transport.abort()

    async def _read_socket(self) -> None:
        try:
            while True:
                frame = await self.socket.recv(decode=False)
                self._take(frame + b"\n")
                self._arrived.set()
        except ConnectionClosed:
            pass
        finally:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ConnectionError("The connection ended before the answer came"))
            self._arrived.set()


def server_environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a server with the offline model and its own CROW_HOME."""
    return {"PATH": os.environ["PATH"], "CROW_HOME": str(home), "CROW_MODEL": "offline", **more}
