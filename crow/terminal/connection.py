"""A client's connection to the front end in the same process. Messages are passed on as objects, not as a byte
stream."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal, Protocol

import anyio

from crow import adapters
from crow.app import Wiring, recording
from crow.domain.errors import CrowError, UserError
from crow.frontend.agent import serve
from crow.frontend.methods import PROTOCOL_VERSION
from crow.protocol import Handler, RequestParams, frames
from crow.protocol.errors import AUTH_REQUIRED, RESOURCE_NOT_FOUND
from crow.protocol.frames import INVALID_PARAMS, METHOD_NOT_FOUND, RequestError
from crow.protocol.transport import Observer
from crow.settings import Loaded
from crow.store import Store
from crow.version import __version__

logger = logging.getLogger(__name__)

Params = Mapping[str, Any]


class TerminalClient(Protocol):
    """The methods with which a client handles the front end's messages.

    When a turn calls one of these methods, it waits until the method returns. Therefore, the updates of a session
    arrive in order, and all updates of a turn arrive before the response to the turn's prompt. If a method raises an
    exception, the connection ends, and the client's waiting requests raise the same exception.
    """

    async def update(self, params: Params) -> None:
        """Show a `session/update`. `params` contains `sessionId` and `update`."""
        ...

    async def ask_permission(self, params: Params) -> dict[str, Any]:
        """Answer `session/request_permission`. If the turn is cancelled, this call is cancelled too."""
        ...

    async def elicit(self, params: Params) -> dict[str, Any]:
        """Answer `elicitation/create`. This method is called only if the client's `capabilities` offer elicitation."""
        ...


class Connection(Protocol):
    """A client's connection to a front end, in this process or elsewhere."""

    @property
    def cwd(self) -> str | None:
        """The workspace of new sessions if the user names none. None if the front end runs on another machine."""
        ...

    async def call(self, method: str, params: Params) -> Any:
        """Send a request and return the result. If this call is cancelled, the front end is asked to cancel the
        request.

        :raises RequestError: the response is an error. :raises ConnectionError: the connection has ended.
        """
        ...

    async def cancel(self, session_id: str) -> None:
        """Cancel the session's turn. The response to its prompt then has the stop reason `cancelled`."""
        ...


async def ask_client(client: TerminalClient, method: str, params: Params) -> dict[str, Any]:
    """Let the client handle a request of the front end, and return the client's answer. Only questions to the user are
    answered.

    :raises RequestError: the front end may not send this request.
    """
    match method:
        case "session/request_permission":
            return await client.ask_permission(params)
        case "elicitation/create":
            return await client.elicit(params)
    raise RequestError(METHOD_NOT_FOUND, "Method not found", {"method": method})


@asynccontextmanager
async def connect(
    loaded: Loaded,
    client: TerminalClient,
    *,
    reload: Callable[[], Loaded] | None = None,
    capabilities: Mapping[str, Any] | None = None,
    is_warmed: bool = True,
) -> AsyncIterator[TerminalConnection]:
    """Start the front end in this process, initialize it, and close it at the end.

    If `is_warmed` is true, crow prepares for the first prompt while it has no request to handle, as it does for an
    editor. At the end of the block, running turns are cancelled. Then everything is stored and closed within a second.
    """
    adapters.protect_process(loaded)
    with recording(loaded) as recorder:
        wiring = Wiring(loaded, reload=reload, recorder=recorder)
        connection = TerminalConnection(client, lambda: wiring.store, observe=recorder)
        async with adapters.orphans_ended():
            serving = asyncio.create_task(serve(connection, wiring.dependencies(), is_warmed=is_warmed))
            serving.add_done_callback(connection.close)
            try:
                await connection.started.wait()
                params = {
                    "protocolVersion": PROTOCOL_VERSION,
                    "clientCapabilities": dict(capabilities or {}),
                    "clientInfo": {"name": "crow", "version": __version__},
                }
                await connection.call("initialize", params)
                yield connection
            finally:
                connection.stop()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([serving])
                    await wiring.close()
        serving.result()


class TerminalConnection:
    """Both ends of the connection. For the front end, it is a :class:`crow.protocol.ClientConnection`. For the
    client, it has the methods that send requests. :func:`connect` creates the connection."""

    def __init__(self, client: TerminalClient, store: Callable[[], Store], *, observe: Observer | None = None) -> None:
        self._client = client
        self._store = store
        self._observe = observe
        self._questions = count()
        self._handle: Handler | None = None
        self._ids = count(1)
        self._waiting: dict[asyncio.Task[None], asyncio.Future[Any]] = {}
        self._after_response: dict[asyncio.Task[Any] | None, list[Callable[[], object]]] = {}
        self._stopped = anyio.Event()
        self._failure: BaseException | None = None
        self.started = anyio.Event()
        """This event is set as soon as the front end accepts requests, or when it fails."""

    # The client's side.

    @property
    def cwd(self) -> str:
        """See `Connection`."""
        return os.getcwd()

    @property
    def store(self) -> Store:
        """The front end's store. Use it only for reading, and only after a session was opened."""
        return self._store()

    async def call(self, method: str, params: Params) -> Any:
        """See `Connection`."""
        request_id = next(self._ids)
        message = frames.parse(frames.encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}))
        assert isinstance(message, dict), "a client in this process sends valid messages"
        if self._handle is None or self._stopped.is_set():
            raise self._failure or ConnectionError("The connection is closed.")
        self._record("in", message)
        response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._answer(method, RequestParams(message["params"], request_id), response))
        self._waiting[task] = response
        task.add_done_callback(self._forget)
        try:
            return await response
        except asyncio.CancelledError:
            await self._send("$/cancel_request", {"requestId": request_id})
            raise

    async def cancel(self, session_id: str) -> None:
        """See `Connection`."""
        await self._send("session/cancel", {"sessionId": session_id})

    async def _send(self, method: str, params: Params) -> None:
        """Send a notification."""
        if self._handle is not None:
            self._record("in", {"method": method, "params": params})
            await self._handle(method, params, True)

    def close(self, serving: asyncio.Task[None]) -> None:
        """Mark the connection as closed, because the front end has ended. Requests that are still waiting fail."""
        if not serving.cancelled():
            self._failure = self._failure or serving.exception()
        self.started.set()
        self._stopped.set()
        for response in self._waiting.values():
            self._fail(response)

    async def _answer(self, method: str, params: RequestParams, response: asyncio.Future[Any]) -> None:
        assert self._handle is not None, "the request was accepted"
        try:
            result = await self._handle(method, params, False)
        except RequestError as error:
            self._record("out", {"id": params.request_id, "error": error_object(error)})
            if not response.done():
                response.set_exception(error)
            return
        self._record("out", {"id": params.request_id, "result": result})
        if not response.done():
            response.set_result(result)
        await asyncio.sleep(0)  # let the client get its response before the actions run
        for action in self._after_response.pop(asyncio.current_task(), ()):
            action()

    def _forget(self, task: asyncio.Task[None]) -> None:
        response = self._waiting.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A request failed", exc_info=error)
        self._fail(response)

    def _fail(self, response: asyncio.Future[Any]) -> None:
        if not response.done():
            response.set_exception(self._failure or ConnectionError("The connection is closed."))

    # The front end's side; see ClientConnection.

    async def run(self, handle: Handler) -> None:
        """See `ClientConnection`. The method returns when `stop` is called."""
        self._handle = handle
        self.started.set()
        await self._stopped.wait()

    async def end(self) -> None:
        """See `ClientConnection`."""
        tasks = tuple(self._waiting)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def stop(self, reason: str = "") -> None:  # noqa: ARG002 - the process ends anyway
        """End the connection, so that the front end closes everything. See `ClientConnection`."""
        self._stopped.set()

    @property
    def is_patient(self) -> bool:
        """See `ClientConnection`. A client in this process reads at once."""
        return True

    def after_response(self, action: Callable[[], object]) -> None:
        """See `ClientConnection`."""
        self._after_response.setdefault(asyncio.current_task(), []).append(action)

    async def request(self, method: str, params: dict[str, Any]) -> Any:
        """See `ClientConnection`."""
        request_id = f"terminal-{next(self._questions)}"
        self._record("out", {"id": request_id, "method": method, "params": params})
        try:
            answer = await self._ask(method, params)
        except RequestError as error:
            self._record("in", {"id": request_id, "error": error_object(error)})
            raise
        except asyncio.CancelledError:
            self._record("out", {"method": "$/cancel_request", "params": {"requestId": request_id}})
            raise
        self._record("in", {"id": request_id, "result": answer})
        return answer

    async def notify(self, method: str, params: dict[str, Any]) -> None:
        """See `ClientConnection`. Once the client has failed, it gets no further updates."""
        self._record("out", {"method": method, "params": params})
        if method == "session/update" and self._failure is None:
            try:
                await self._client.update(params)
            except Exception as error:  # noqa: BLE001 - the client failed, for example because stdout is closed
                self._end_with(error)

    async def _ask(self, method: str, params: Params) -> dict[str, Any]:
        """Let the client handle a request of the front end, and return the client's answer."""
        if self._failure is not None:
            raise ConnectionError("The client has failed.")
        try:
            return await ask_client(self._client, method, params)
        except RequestError:
            raise
        except Exception as error:
            self._end_with(error)
            raise ConnectionError("The client has failed.") from error

    def _record(self, direction: Literal["in", "out"], message: Params) -> None:
        """Encode a message as a line of JSON, as a byte stream would carry it, and pass the line to `observe`."""
        if self._observe is not None:
            self._observe(direction, frames.encode({"jsonrpc": "2.0", **message}))

    def _end_with(self, error: Exception) -> None:
        self._failure = error
        for response in self._waiting.values():
            self._fail(response)
        self.stop()


async def session_ids(loaded: Loaded) -> tuple[str, ...]:
    """Return the ids of all stored sessions."""
    store = await adapters.open_store(loaded)
    try:
        return await adapters.open_admin(store).ids()
    finally:
        await store.close()


def error_object(error: RequestError) -> dict[str, Any]:
    """Return the error of a response."""
    data = {} if error.data is None else {"data": error.data}
    return {"code": error.code, "message": str(error), **data}


def error_of(error: RequestError) -> CrowError:
    """Return the error of the command line for a failed request: a `UserError` if the user can fix the cause, otherwise
    a `CrowError`."""
    is_users = error.code in (AUTH_REQUIRED, RESOURCE_NOT_FOUND, INVALID_PARAMS)
    return (UserError if is_users else CrowError)(str(error))
