"""The ACP server: one connection over stdio, from the first line to the last.

Strategy: the SDK's `Connection` reads messages from crow's transport and gives each request a task; the method table
answers it. Sessions are tasks of one task group here, not of the requests that made them. EOF, SIGTERM, SIGINT and a
vanished editor end it the same way: cancel turns, close sessions, close the store, all bounded. Knows no method.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio
import anyio.abc
from acp import RequestError
from acp.connection import Connection

from crow.frontend.frames import INVALID_REQUEST, FrameError, Message, RequestId
from crow.store import Store

if TYPE_CHECKING:
    from crow.agent import Adapters
    from crow.tools import McpServer, Workspace

__all__ = [
    "Ask",
    "ClientConnection",
    "EditorTimeouts",
    "Handler",
    "RequestParams",
    "ServerDependencies",
    "refusal_words",
    "serve",
]

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


class ClientConnection:
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
            await self._transport.send(FrameError(code=INVALID_REQUEST, words=words).response())

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

    def attach(self, connection: Connection, wire: ClientConnection, tasks: anyio.abc.TaskGroup) -> None:
        """Called once before the first message."""
        ...

    async def close(self) -> None:
        """Close every session and the store; bounded by the caller."""
        ...


async def serve(transport: Transport, handler: Handler, started: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Serve until stdin ends or a signal asks to stop. `started` runs beside it and may take its time."""
    wire = ClientConnection(transport)
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


# FROM frontend.kit: What the composition root gives the front end: functions and settings, so that it needs to know
# no adapter.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDependencies:
    """`open_store` raises StoreError; `check` raises AuthError or ConfigError when no prompt could be answered, and
    costs nothing. `renewed` gives another of these when the user has changed their settings since, None when they have
    not, and costs hardly more. `models` are the names offered, `model` is the default, empty if none is set;
    `more_models` asks the endpoint for further ones, bounded in time, and gives none where it fails. `auto_compact` is
    whether sessions compact by themselves unless they were told otherwise, `editor_terminals` whether commands run in
    the editor's terminals, `hidden_variables` which variables these commands must not see, `timeouts` how long the
    editor and its user may take for an answer. `servers` are the user's own, for every session. `log_hint` says where
    the log is. `warm_up` imports, off the event loop, what a prompt needs; `trim` gives memory back that lies free, and
    blocks meanwhile.
    """

    version: str
    open_store: Callable[[], Awaitable[Store]]
    adapters: Callable[[Store], Adapters]
    workspace: Callable[[str, Sequence[str]], Workspace]
    check: Callable[[], None]
    warm_up: Callable[[], Awaitable[None]]
    trim: Callable[[], None]
    more_models: Callable[[], Awaitable[Sequence[str]]]
    renewed: Callable[[], ServerDependencies | None]
    models: Sequence[str]
    model: str
    mode: str
    auto_compact: bool
    editor_terminals: bool
    timeouts: EditorTimeouts
    log_hint: str
    hidden_variables: Callable[[], Sequence[str]] = tuple
    servers: Sequence[McpServer] = ()


# FROM frontend.asking: What all requests to the editor share: how one is sent, how long its answer may take, and what
# a refusal says.


Ask: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Sends a request to the editor and gives its result. Raises RequestError for its error, ConnectionError without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditorTimeouts:
    """How long an answer may take, in seconds: `editor_s` one of the editor itself, about a file or a terminal;
    `user_s` one that a person gives: nobody waits for ever, and a lunch break is no answer."""

    editor_s: float = 30.0
    user_s: float = 24 * 3600.0


def refusal_words(error: RequestError) -> str:
    """What the editor says: some put the sentence into `data`, under a message that says nothing."""
    match error.data:
        case {"details": str(words)} | {"error": str(words)} | str(words) if words:
            return words
        case _:
            return str(error)
