"""Connects to crow: over WebSocket to a server, or over stdio to a crow of its own. Connects again by itself."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol

from acp.connection import Connection
from acp.exceptions import RequestError
from acp.transports import spawn_stdio_transport
from acp.ws.client import create_websocket_stream

from crow_channels import __version__
from crow_channels.config import Config, Principal
from crow_channels.errors import LinkLost

logger = logging.getLogger(__name__)

_CONNECT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 15.0
_LINE_BYTES = 64 * 1024 * 1024
_REQUEST_ID = "crow-channels/requestId"

_INITIALIZE = {
    "protocolVersion": 1,
    "clientInfo": {"name": "crow-channels", "version": __version__},
    "clientCapabilities": {"_meta": {"acp/cursor": True}, "elicitation": {"form": {}}},
}


class Listener(Protocol):
    """Gets what the server sends about one session."""

    def update(self, params: Mapping[str, Any]) -> None:
        """Take a `session/update`."""
        ...

    async def ask(self, method: str, params: Mapping[str, Any]) -> Any:
        """Answer a request of the server. Cancelled if the server no longer wants the answer."""
        ...


class _Transport(Protocol):
    async def send(self, message: dict[str, Any]) -> None: ...

    async def receive(self) -> dict[str, Any] | None: ...

    async def close(self) -> None: ...


class _Lines:
    """The messages of a child process, one on each line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        await self._writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    async def close(self) -> None:
        self._writer.close()


class _Watched:
    """A transport that tells when it ends, and gives the id of each request to the one who answers it."""

    def __init__(self, transport: _Transport, lost: asyncio.Event) -> None:
        self._transport, self._lost = transport, lost

    async def send(self, message: dict[str, Any]) -> None:
        try:
            await self._transport.send(message)
        except Exception as error:
            self._lost.set()
            raise ConnectionError(str(error)) from error

    async def receive(self) -> dict[str, Any] | None:
        try:
            message = await self._transport.receive()
        except Exception:  # noqa: BLE001  # whatever it was, the connection is of no use any more
            message = None
        if not isinstance(message, dict):
            self._lost.set()
            return None
        params = message.get("params")
        if "method" in message and "id" in message and isinstance(params, dict):
            message["params"] = params | {_REQUEST_ID: message["id"]}
        return message

    async def close(self) -> None:
        await self._transport.close()


class Link:
    """One connection. `request` and `notify` raise `LinkLost` once it has broken."""

    def __init__(self, stack: AsyncExitStack, transport: _Transport, lost: asyncio.Event) -> None:
        self.listeners: dict[str, Listener] = {}
        """Who gets what the server sends, by session."""
        self.lost = lost
        """Set when the connection has broken."""
        self.has_cursors = False
        """Whether the server can send what was missed after a place in the session."""
        self._stack = stack
        self._asked: dict[object, asyncio.Task[Any]] = {}
        self._connection = Connection(self._handle, _Watched(transport, lost))

    async def initialize(self) -> None:
        """Introduce this client. :raises LinkLost: the server does not speak the protocol as crow does."""
        async with asyncio.timeout(_CONNECT_S):
            answer = await self.request("initialize", _INITIALIZE)
        meta = answer.get("_meta") or {}
        if "promptId" not in (meta.get("crow") or {}):
            raise LinkLost("The server does not recognise repeated prompts. It must be crow, and not an old one.")
        self.has_cursors = "acp/cursor" in meta

    async def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """Send a request and return the result. :raises RequestError: the server answered with an error."""
        waiting = asyncio.ensure_future(self._connection.send_request(method, dict(params)))
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait((waiting, lost), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise LinkLost("The connection to crow broke.")
            try:
                return waiting.result()
            except (ConnectionError, asyncio.CancelledError) as error:
                raise LinkLost("The connection to crow broke.") from error
        finally:
            for task in (waiting, lost):
                task.cancel()
            await asyncio.gather(waiting, lost, return_exceptions=True)

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a notification."""
        try:
            await self._connection.send_notification(method, dict(params))
        except ConnectionError as error:
            raise LinkLost("The connection to crow broke.") from error

    async def close(self) -> None:
        """Close the connection."""
        self.lost.set()
        with suppress(Exception):
            await self._connection.close()
        with suppress(Exception):
            await self._stack.aclose()

    async def _handle(self, method: str, params: Any, is_notification: bool) -> Any:
        if not isinstance(params, dict):
            return None
        listener = self.listeners.get(str(params.get("sessionId")))
        if is_notification:
            if method == "session/update" and listener is not None:
                listener.update(params)
            elif method == "$/cancel_request" and (task := self._asked.get(params.get("requestId"))) is not None:
                task.cancel()
            return None
        if method not in ("session/request_permission", "elicitation/create"):
            raise RequestError.method_not_found(method)
        request_id = params.pop(_REQUEST_ID)
        return await self._ask(request_id, listener.ask(method, params) if listener is not None else _never())

    async def _ask(self, request_id: object, answer: Awaitable[Any]) -> Any:
        self._asked[request_id] = task = asyncio.ensure_future(answer)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self.lost.is_set() or (current := asyncio.current_task()) is None or current.cancelling():
                raise
            raise RequestError(-32800, "The request was cancelled.") from None
        finally:
            del self._asked[request_id]


async def _never() -> None:
    """Wait for ever. A question of somebody else's turn is for somebody else's client; a refusal might count."""
    await asyncio.get_running_loop().create_future()


class Links:
    """The connections of all principals, one for each."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._links: dict[str, Link] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str) -> Link:
        """Return the connection of a principal. Waits until the server can be reached."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            pause_s = _FIRST_PAUSE_S
            while True:
                link = self._links.get(name)
                if link is not None and not link.lost.is_set():
                    return link
                if link is not None:
                    await link.close()
                    del self._links[name]
                try:
                    self._links[name] = await self._connect(self._config.principals[name])
                    logger.info("Connected to crow as %s", name)
                    continue
                except Exception as error:  # noqa: BLE001  # a refused token, a missing program, an error of a library
                    logger.warning("Crow cannot be reached as %s: %s", name, str(error) or type(error).__name__)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1))  # noqa: S311  # no secret
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Close all connections."""
        for link in tuple(self._links.values()):
            await link.close()

    async def _connect(self, principal: Principal) -> Link:
        stack, lost = AsyncExitStack(), asyncio.Event()
        try:
            transport: _Transport
            if self._config.url:
                headers = {"Authorization": f"Bearer {principal.token}"} if principal.token else {}
                async with asyncio.timeout(_CONNECT_S):
                    transport = await create_websocket_stream(self._config.url, headers=headers)
            else:
                environment = {k: v for k, v in os.environ.items() if k not in self._config.secret_variables}
                command, *arguments = self._config.command
                reader, writer, _ = await stack.enter_async_context(
                    spawn_stdio_transport(command, *arguments, env=environment, stderr=None, limit=_LINE_BYTES)
                )
                transport = _Lines(reader, writer)
            link = Link(stack, transport, lost)
        except BaseException:
            await stack.aclose()
            raise
        try:
            await link.initialize()
        except BaseException:
            await link.close()
            raise
        return link
