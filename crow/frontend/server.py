"""The ACP server: one connection over stdio, from the first line to the last.

Strategy: the SDK's `Connection` reads messages from crow's transport and gives each request a task; the method table
answers it. Sessions are tasks of one task group here, not of the requests that made them. EOF, SIGTERM, SIGINT and a
vanished editor end it the same way: cancel turns, close sessions, close the store, all bounded. Knows no method.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import anyio
import anyio.abc
from acp.connection import Connection

from crow.frontend.frames import INVALID_REQUEST, Fault, Message, RequestId

__all__ = ["Handler", "RequestParams", "Wire", "serve"]

CLOSE_S = 0.8


class Transport(Protocol):
    """What the SDK's connection reads from and writes to."""

    async def receive(self) -> Message | None: ...
    async def send(self, message: Message) -> None: ...
    async def close(self) -> None: ...
    def stop(self) -> None: ...


class RequestParams(dict[str, Any]):
    """The parameters of a request, with its id: of a request, the SDK's connection hands on nothing else."""

    __slots__ = ("request_id",)

    def __init__(self, params: dict[str, Any], request_id: RequestId) -> None:
        super().__init__(params)
        self.request_id = request_id


class Wire:
    """The transport as the connection and the method table share it: it knows which requests are open, and when a
    response has left.

    A request's handler and the sending of its response run in one task, which names the response here.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._open: set[RequestId] = set()
        self._after: dict[asyncio.Task[Any] | None, list[Callable[[], None]]] = {}
        self._asking: dict[asyncio.Task[Any] | None, int | str] = {}

    def after_response(self, action: Callable[[], None]) -> None:
        """Do `action` as soon as the response of the request that runs in this task has been written."""
        self._after.setdefault(asyncio.current_task(), []).append(action)

    def asked(self) -> int | str | None:
        """The id of the request that this task sent last and still waits for."""
        return self._asking.pop(asyncio.current_task(), None)

    def stop(self) -> None:
        """Act as if stdin had ended."""
        self._transport.stop()

    async def receive(self) -> Message | None:
        """See the SDK's `Transport`. A request under an id that still waits for its answer is refused under none:
        two answers to one id could not be told apart."""
        while True:
            message = await self._transport.receive()
            if message is None or "method" not in message or "id" not in message:
                return message
            request_id = message["id"]
            if request_id not in self._open:
                self._open.add(request_id)
                return message | {"params": RequestParams(message["params"], request_id)}
            words = "The request's id is that of another request, which is not answered yet; give each its own."
            await self._transport.send(Fault(code=INVALID_REQUEST, words=words).response())

    async def send(self, message: Message) -> None:
        """See the SDK's `Transport`."""
        task = asyncio.current_task()
        if "method" in message and "id" in message:
            self._asking[task] = message["id"]
        elif "method" not in message:
            self._open.discard(message["id"])
        await self._transport.send(message)
        if "method" not in message:
            for action in self._after.pop(task, ()):
                action()

    async def close(self) -> None:
        """See the SDK's `Transport`."""
        await self._transport.close()


class Handler(Protocol):
    """The method table."""

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """Answer one request, or act on one notification. :raises RequestError:"""
        ...

    def attach(self, connection: Connection, wire: Wire, tasks: anyio.abc.TaskGroup) -> None:
        """Called once before the first message."""
        ...

    async def close(self) -> None:
        """Close every session and the store; bounded by the caller."""
        ...


async def serve(transport: Transport, handler: Handler, started: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Serve until stdin ends or a signal asks to stop. `started` runs beside it and may take its time."""
    wire = Wire(transport)
    connection = Connection(handler.handle, wire, listening=False)
    loop = asyncio.get_running_loop()
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            with suppress(NotImplementedError):  # Windows loops take no signal handlers
                loop.add_signal_handler(getattr(signal, name), wire.stop)
    async with anyio.create_task_group() as tasks:
        handler.attach(connection, wire, tasks)
        tasks.start_soon(started)
        try:
            await connection.main_loop()
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await handler.close()
            tasks.cancel_scope.cancel()
    await connection.close()
