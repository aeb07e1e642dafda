"""A client's connection to `crow serve`. If the connection breaks, it is restored.

The bridge of `crow acp --connect` runs in a thread and carries the messages. The server may be hostile. So crow drops
messages that are too large or have an unexpected form, and answers no requests of the server except questions to the
user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any, Protocol

from crow.bridge import USERS_FAULT, UnusableServer, server_at
from crow.bridge.loop import Bridge, Times
from crow.bridge.websocket import Address
from crow.domain.errors import CrowError, UserError
from crow.frontend.methods import PROTOCOL_VERSION
from crow.protocol import frames
from crow.protocol.frames import INTERNAL_ERROR, INVALID_PARAMS, FrameError, RequestError
from crow.protocol.transport import Observer
from crow.terminal.connection import Params, TerminalClient, ask_client, error_object
from crow.version import __version__

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""The size of the largest message that is read. Crow's own messages are below 1 MiB."""

_MAX_WAITING_MESSAGES = 100
_MAX_QUESTIONS = 50
_LEAVE_S = 2.0

_UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that code may raise when it reads a message that has an unexpected form."""


class RemoteClient(TerminalClient, Protocol):
    """A client that is connected to `crow serve`."""

    def connection_changed(self) -> None:
        """React to a change of :attr:`RemoteConnection.is_connected`."""
        ...

    async def warn(self, words: str) -> None:
        """Show a warning about the server."""
        ...


class ChatTimes(Times):
    """In a chat, the user sees that the connection is broken, and decides how long to wait."""

    give_up = 7 * 86_400.0


@asynccontextmanager
async def connect_to(
    address: str,
    token_file: str | None,
    client: RemoteClient,
    *,
    capabilities: Mapping[str, Any],
    observe: Observer | None = None,
    times: Times,
) -> AsyncIterator[RemoteConnection]:
    """Connect to the server at `address`, and initialize the connection. `times` says when crow gives up. At the end
    of the block, leave the server; its sessions and turns go on.

    :raises ~crow.domain.errors.CrowError: the address or the token cannot be used, or the server cannot be reached, or
        it does not follow the protocol.
    """
    try:
        place, token = server_at(address, token_file)
    except UnusableServer as error:
        raise UserError(str(error)) from None
    main = asyncio.current_task()
    assert main is not None
    async with _bridged(place, token, client, observe, times) as connection:
        leave = asyncio.create_task(connection.ended.wait())
        leave.add_done_callback(lambda task: task.cancelled() or main.cancel())
        try:
            params = {
                "protocolVersion": PROTOCOL_VERSION,
                "clientCapabilities": dict(capabilities),
                "clientInfo": {"name": "crow", "version": __version__},
            }
            try:
                await connection.call("initialize", params)
            except RequestError as error:
                raise connection.failure or CrowError(str(error)) from None
            yield connection
        except asyncio.CancelledError:
            if not connection.ended.is_set():
                raise
            main.uncancel()
            raise connection.failure or CrowError(f"The connection to {address} has ended.") from None
        except _UNEXPECTED as error:
            logger.exception("The server's answer could not be used")
            raise CrowError(f"{address} sent an answer that crow does not understand.") from error
        finally:
            leave.cancel()


@asynccontextmanager
async def _bridged(
    place: Address, token: str, client: RemoteClient, observe: Observer | None, times: Times
) -> AsyncIterator[RemoteConnection]:
    """Run a bridge in a thread, and read the messages that it passes on."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    sink = os.dup(theirs.fileno())  # `poll` needs a descriptor of its own for each direction

    def changed() -> None:
        with suppress(RuntimeError):  # the chat has ended
            loop.call_soon_threadsafe(client.connection_changed)

    bridge = Bridge(place, token=token, source=theirs.fileno(), sink=sink, on_change=changed)
    bridge.times = times
    reader, writer = await asyncio.open_connection(sock=ours)
    connection = RemoteConnection(client, bridge, writer, observe)
    connection.cwd = os.getcwd() if place.is_loopback else None

    def carry() -> None:
        try:
            bridge.run()
        finally:
            theirs.close()
            os.close(sink)

    thread = threading.Thread(target=carry, name="bridge", daemon=True)
    thread.start()
    tasks = [asyncio.create_task(each) for each in (connection.read(reader), connection.dispatch())]
    try:
        yield connection
    finally:
        connection.withdraw_all()
        bridge.stop()
        await asyncio.shield(asyncio.to_thread(thread.join, _LEAVE_S))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()


class RemoteConnection:
    """The client's end of the connection. :func:`connect_to` makes it."""

    def __init__(
        self, client: RemoteClient, bridge: Bridge, writer: asyncio.StreamWriter, observe: Observer | None
    ) -> None:
        self._client = client
        self._bridge = bridge
        self._writer = writer
        self._observe = observe
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._arrived: asyncio.Queue[frames.Message | FrameError | None] = asyncio.Queue(_MAX_WAITING_MESSAGES)
        self._questions: dict[int | str, asyncio.Task[None]] = {}
        self._withdrawn: set[int | str] = set()
        """The ids of questions that were withdrawn while they were in `_arrived`."""
        self._has_complained = False
        self._failure: BaseException | None = None
        self.cwd: str | None = None
        """See :class:`crow.terminal.connection.Connection`."""
        self.ended = asyncio.Event()
        """This event is set when the connection has ended for good."""

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached now. If not, crow connects again, and messages to the
        server wait."""
        return self._bridge.is_connected

    @property
    def failure(self) -> BaseException | None:
        """Why the connection has ended for good, or None."""
        if self._failure is None and (exit_code := self._bridge.exit_code):
            return (UserError if exit_code == USERS_FAULT else CrowError)(self._bridge.problem)
        return self._failure

    async def call(self, method: str, params: Params) -> Any:
        """See :class:`crow.terminal.connection.Connection`."""
        if self.ended.is_set():
            raise self.failure or ConnectionError("The connection is closed.")
        request_id = next(self._ids)
        response = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._send({"id": request_id, "method": method, "params": params})
        try:
            return await response
        except asyncio.CancelledError:
            self._send({"method": "$/cancel_request", "params": {"requestId": request_id}})
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def cancel(self, session_id: str) -> None:
        """See :class:`crow.terminal.connection.Connection`."""
        self._send({"method": "session/cancel", "params": {"sessionId": session_id}})

    def _send(self, message: frames.Message) -> None:
        line = frames.encode({"jsonrpc": "2.0", **message})
        if self._observe is not None:
            self._observe("in", line)
        self._writer.write(line)

    # Messages of the server.

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read the messages that the bridge passes on, until the bridge ends."""
        splitter = frames.LineSplitter(_MAX_MESSAGE_BYTES)
        while data := await reader.read(1 << 18):
            for line in splitter.feed(data):
                if self._observe is not None and isinstance(line, bytes):
                    self._observe("out", line + b"\n")
                message = frames.parse(line) if isinstance(line, bytes) else line
                match message:
                    case {"method": "$/cancel_request", "params": {"requestId": int() | str() as question_id}}:
                        self._withdraw(question_id)
                    case dict() | FrameError():
                        await self._arrived.put(message)
        self.withdraw_all()
        await self._arrived.put(None)

    async def dispatch(self) -> None:
        """Handle the server's messages in order, but without waiting for the user's answers to questions."""
        try:
            while (message := await self._arrived.get()) is not None:
                await self._handle(message)
                if self._arrived.empty():
                    self._withdrawn.clear()
                await asyncio.sleep(0)  # let the task that the message has started run first
        finally:
            self.ended.set()
            for response in self._waiting.values():
                if not response.done():
                    response.set_exception(self.failure or ConnectionError("The connection is closed."))

    async def _handle(self, message: frames.Message | FrameError) -> None:
        match message:
            case {"method": "session/update", "params": params}:
                try:
                    await self._client.update(params)
                except _UNEXPECTED as error:
                    logger.warning("An update could not be shown", exc_info=error)
                    await self._complain()
            case {"method": method, "id": question_id, "params": params}:
                if question_id in self._withdrawn:
                    self._withdrawn.discard(question_id)
                elif question_id not in self._questions and len(self._questions) < _MAX_QUESTIONS:
                    task = asyncio.create_task(self._answer(question_id, method, params))
                    self._questions[question_id] = task
            case {"id": int(request_id)} if (response := self._waiting.get(request_id)) and not response.done():
                match message:
                    case {"result": dict(result)}:
                        response.set_result(result)
                    case {"error": {"code": code, "message": words, **more}}:
                        response.set_exception(RequestError(code, words, more.get("data")))
                    case _:
                        response.set_exception(RequestError(INTERNAL_ERROR, "The server's answer has no result."))
            case FrameError():
                logger.warning("A message of the server is dropped: %s", message.message)
                await self._complain()

    async def _answer(self, question_id: int | str, method: str, params: Params) -> None:
        try:
            answer = {"result": await ask_client(self._client, method, params)}
        except RequestError as error:
            answer = {"error": error_object(error)}
        except _UNEXPECTED as error:
            logger.warning("A question could not be asked", exc_info=error)
            await self._complain()
            answer = {"error": error_object(RequestError(INVALID_PARAMS, "The question cannot be shown."))}
        except OSError as error:  # the terminal is gone
            self._end_with(error)
            return
        finally:
            self._questions.pop(question_id, None)
        self._send({"id": question_id, **answer})

    def _withdraw(self, question_id: int | str) -> None:
        if question_id in self._questions:
            self._questions[question_id].cancel()
        elif not self._arrived.empty() and len(self._withdrawn) < _MAX_WAITING_MESSAGES:
            self._withdrawn.add(question_id)  # the question may still be in `_arrived`; if not, it was answered

    def withdraw_all(self) -> None:
        """Withdraw all questions that the user has not answered."""
        for task in self._questions.values():
            task.cancel()

    async def _complain(self) -> None:
        if not self._has_complained:
            self._has_complained = True
            await self._client.warn("The server sent a message that crow does not understand. It is not shown.")

    def _end_with(self, error: BaseException) -> None:
        self._failure = error
        self._bridge.stop()
