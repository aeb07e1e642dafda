"""Serves ACP over one connection: carries out each request, and turns errors into error responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import anyio.abc

from crow.domain.errors import NO_MEMORY, CrowError, StoreError, lacks_memory
from crow.domain.trace_context import use_trace_context
from crow.frontend.host import ServerDependencies, SessionHost
from crow.frontend.methods import CheckParams, Methods
from crow.frontend.requester import Requester
from crow.frontend.requests import OPENING, Requests
from crow.frontend.sessions import ConnectionSessions
from crow.protocol import ClientConnection, RequestParams
from crow.protocol.errors import ID_BYTES, error_response, request_error
from crow.protocol.frames import INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, RequestError
from crow.protocol.params import trace_context
from crow.protocol.sizes import limit_text

logger = logging.getLogger(__name__)

_WARM_AFTER_S = 0.2

CHECK_SHARES_S = 2.0
"""The number of seconds between two checks of whether a client may still see its sessions. A client that loses
access to a session still gets updates until the next check."""

_CLOSE_S = 0.8
"""The time limit in seconds for closing all sessions and the store. Work that is not finished by then is cancelled."""

_UNSTABLE = frozenset(
    {
        *("session/archive", "session/unarchive", "session/set_title", "session/status"),
        *("auth/status", "providers/list", "providers/set", "providers/disable"),
    }
)
"""Requests that are not part of the stable protocol. The response to `initialize` offers them, so crow refuses them
before `initialize`."""

Negotiate: TypeAlias = Callable[[Methods], object]
"""A function that adds the methods of other versions to those of version 1. `initialize` chooses the version."""


async def serve(
    connection: ClientConnection,
    dependencies: ServerDependencies,
    *,
    host: SessionHost | None = None,
    requester: Requester | None = None,
    is_warmed: bool = True,
    check: CheckParams | None = None,
    negotiate: Negotiate | None = None,
) -> None:
    """Serve a connection until the client is gone or the connection is stopped. After that, close the sessions and the
    store within `_CLOSE_S` seconds.

    If `host` is given, it is a lasting host: its sessions and its store stay open after the connection has ended. In
    this case, `requester` describes the user of the connection. Without such a host, each session runs in this
    function's task group, so it outlives the request that opens it.

    With `is_warmed`, crow prepares for the first prompt while the client sends nothing. A client that sends a prompt at
    once does not need this. `check` checks the parameters of requests; a client in this process needs no check. Without
    `negotiate`, the client can use only version 1 of the protocol.
    """
    if host is not None:
        await _serve_lasting(connection, host, requester, check, negotiate)
        return
    async with anyio.create_task_group() as tasks:
        host = SessionHost(dependencies, tasks)
        agent = _AcpAgent(host, connection, tasks, check=check, negotiate=negotiate)
        tasks.start_soon(host.idle.run)
        if is_warmed:
            tasks.start_soon(agent.warm_when_quiet)
        try:
            await connection.run(agent.handle)
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await agent.close()
            tasks.cancel_scope.cancel()
    await connection.end()


async def _serve_lasting(
    connection: ClientConnection,
    host: SessionHost,
    requester: Requester | None,
    check: CheckParams | None,
    negotiate: Negotiate | None,
) -> None:
    async with anyio.create_task_group() as tasks:
        agent = _AcpAgent(host, connection, tasks, requester, check=check, negotiate=negotiate)
        if requester is not None and not requester.may_configure:
            tasks.start_soon(agent.check_shares)
        try:
            await connection.run(agent.handle)
        finally:
            agent.leave()
            tasks.cancel_scope.cancel()
    await connection.end()


class _AcpAgent:
    """Answers the requests of one connection."""

    def __init__(
        self,
        host: SessionHost,
        connection: ClientConnection,
        tasks: anyio.abc.TaskGroup,
        requester: Requester | None = None,
        *,
        check: CheckParams | None = None,
        negotiate: Negotiate | None = None,
    ) -> None:
        self._host = host
        self._connection = connection
        self._sessions = ConnectionSessions(host, connection, tasks, requester)
        self._requests = Requests()
        self._methods = Methods(host, connection, tasks, self._sessions, self._requests, check)
        if negotiate is not None:
            negotiate(self._methods)
        self._is_initialized = False
        self._last_message_at = asyncio.get_running_loop().time()

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """Answer a request or act on a notification. :raises RequestError: the error response to send."""
        self._last_message_at = asyncio.get_running_loop().time()
        table = self._methods.table
        if is_notification:
            match method, params:
                case "session/cancel", _:
                    await table.cancel(params.get("sessionId"))
                case "$/cancel_request", {"requestId": int() | str() as request_id} if not isinstance(request_id, bool):
                    self._requests.cancel(request_id)
            return None
        if table.check is not None:
            table.check(method, params)
        if method not in table.requests:
            raise RequestError(METHOD_NOT_FOUND, "Method not found", {"method": limit_text(method, ID_BYTES)})
        if method.startswith("providers/") and not self._sessions.requester.may_configure:
            raise RequestError(METHOD_NOT_FOUND, "Method not found", {"method": method})
        if method in _UNSTABLE and not self._is_initialized:
            raise request_error(INVALID_REQUEST, f"{method} came before initialize; send initialize first.")
        use_trace_context(trace_context(params))
        try:
            check = self._sessions.requester.check_params
            if check is not None and method != "initialize":
                await check(method, params, await self._sessions.store.get())
            return await self._answer(method, params)
        except CrowError as error:
            response = error_response(error)
            if self._sessions.caps.shows_error_objects:
                response = RequestError(INTERNAL_ERROR, str(response), response.data)
            raise response from error
        except RequestError:
            raise
        except Exception as error:
            logger.exception("%s failed", method)
            words = NO_MEMORY if lacks_memory(error) else f"Internal error in {method}."
            hint = self._host.dependencies.log_hint
            raise request_error(INTERNAL_ERROR, f"{words} {hint}") from error

    async def _answer(self, method: str, params: RequestParams) -> dict[str, Any]:
        self._host.reload_settings()
        self._connection.after_response(self._methods.tell_auth_status)
        if method in OPENING:
            self._methods.refuse_logged_out()
        answer = await self._requests.answer(method, params, self._methods.table.requests[method])
        self._is_initialized = self._is_initialized or method == "initialize"
        return answer

    async def warm_when_quiet(self) -> None:
        """Wait until the client has sent nothing for `_WARM_AFTER_S`, then import the packages that the first prompt
        needs. If crow did not wait, the imports would delay responses."""
        loop = asyncio.get_running_loop()
        while (quiet_s := loop.time() - self._last_message_at) < _WARM_AFTER_S:  # noqa: ASYNC110 - no event marks silence
            await anyio.sleep(_WARM_AFTER_S - quiet_s)
        await self._host.warm()

    async def close(self) -> None:
        """Close every session and the store. Unfinished prompts end with `cancelled`, and other unfinished requests
        with an error."""
        self._host.hurry()
        await self._requests.drain()
        await self._host.close_all()
        await self._requests.prompts_answered()

    async def check_shares(self) -> None:
        """Check every `CHECK_SHARES_S` seconds whether the user of this connection may still see the connection's
        sessions."""
        while True:
            await anyio.sleep(CHECK_SHARES_S)
            try:
                await self._sessions.check_again()
            except StoreError as error:
                logger.warning("Crow could not check which sessions are shared: %s", error)

    def leave(self) -> None:
        """Leave all sessions of this connection. Running requests other than prompts end with an error."""
        self._requests.cancel_all()
        self._sessions.detach_all()
