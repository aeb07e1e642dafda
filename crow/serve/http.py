"""The HTTP endpoints: `/acp` for clients, shared pages, and `/healthz`, `/readyz` and `/metrics` for operators."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket
from uvicorn.protocols.utils import ClientDisconnected
from websockets.frames import CloseCode

from crow.domain.errors import StoreError
from crow.domain.text import on_one_line
from crow.export.links import PATH, PageLinks
from crow.frontend.cursors import CURSOR_KEY
from crow.frontend.requests import OPENING
from crow.protocol import Handler
from crow.protocol.connection import MODELS, EditorConnection
from crow.protocol.errors import request_error
from crow.protocol.frames import INTERNAL_ERROR
from crow.serve.browser import cookie_token
from crow.serve.listen import client_address, is_known_host, is_known_origin, is_own_origin
from crow.serve.metrics import CONTENT_TYPE, MetricFamily, Metrics, gauge, process_metrics
from crow.serve.tokens import Authenticator, BadToken, Grant, TooManyFailures
from crow.serve.websocket import (
    ConnectionEnd,
    ConnectionLimits,
    PendingHandshakes,
    Traffic,
    WebSocketTransport,
)
from crow.store import AccessStore
from crow.tools.limits import FairLimiter
from crow.version import __version__

_CONNECTION_ID = "acp-connection-id"
"""The header in which the server sends the id of a new connection. A client that connects again sends the id of its
earlier connection in the same header, to keep that id."""

_CURSORS = "crow-cursors"
"""The header with which a client asks for cursors. A client that forwards the `initialize` of an editor sends this
header, because not every editor asks for cursors itself."""

_REMEMBERED_S = 300.0
"""After a connection ends, the client can connect again with the same connection id for this many seconds."""

_MAX_REMEMBERED = 10_000
_RETRY_AFTER_S = 5
_SHOWN_CHARS = 200

_MIN_HANDSHAKES = 64
"""The smallest limit for the number of connections that have not sent a complete HTTP request. The limit is a quarter
of `max_connections` if that is more."""

_PROMPTING = frozenset({"session/prompt", "_session/steering"})
_START_WORK = OPENING | _PROMPTING
"""Methods that start new work. While the server shuts down, it refuses these methods."""

_TAKES_TURNS = OPENING | {"session/list", "session/delete"}
"""Methods that keep the server and its store busy. Their requests wait for a slot, so a client that sends thousands of
them delays no other client. None of these methods waits for a person."""

_MAX_REQUESTS, MAX_REQUESTS_EACH = 64, 8
"""At most this many requests with methods in `_TAKES_TURNS` run at once, in all and for each principal."""

_PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Robots-Tag": "noindex, nofollow, noarchive",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""The headers of shared pages. The address of a page must not leave the reader's browser, because anybody who has the
address can read the page."""

_UPGRADE_REQUIRED = (
    "This server speaks the Agent Client Protocol over WebSocket only. Connect to this URL with a WebSocket client. "
    "The HTTP profile of the protocol needs HTTP/2, which this server does not offer.\n"
)

logger = logging.getLogger(__name__)


class Refused(Exception):
    """The error for an HTTP request that the server refuses. Its message tells the client why."""

    def __init__(self, status: int, message: str, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status."""
        self.reason = reason
        """A label for the reason in metrics and logs, such as `token`."""
        self.retry_after_s = retry_after_s

    def response(self) -> Response:
        """Return the HTTP response for this refusal."""
        headers = {"WWW-Authenticate": 'Bearer realm="crow"'} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return PlainTextResponse(f"{self}\n", status_code=self.status, headers=headers)


class AccessControl(Protocol):
    """Decides who may connect."""

    async def admit(self, token: str | None, address: str) -> Grant | None:
        """Check a bearer token, and return the grant that it gives. Return None if this server needs no tokens.

        :raises Refused: the token is missing, wrong or cannot be checked.
        """
        ...

    def connected(self, grant: Grant | None, close: Callable[[str], None]) -> AbstractContextManager[object]:
        """Return a context manager to enter when the connection begins and to exit when it ends. If the grant ends
        earlier than the connection, `close` is called with the reason."""
        ...


class TokenAccess:
    """Checks bearer tokens."""

    def __init__(
        self, authenticator: Authenticator, store: AccessStore, *, is_required: bool, is_resident: bool = False
    ) -> None:
        self._authenticator = authenticator
        self._store = store
        self._is_resident = is_resident
        """Whether this is the server of one user. Its clients never need a token, because that user may read the whole
        store without the server."""
        self.is_required = is_required
        """Whether clients need a token. If this is false at the start, they need one only after the first token has
        been added. `needs_tokens` updates this value from the store."""

    async def needs_tokens(self) -> bool:
        """Return whether clients need a token. :raises StoreError: the store cannot be read."""
        if not self.is_required and not self._is_resident:
            # Revoked tokens count too: if they did not, revoking the last token would open the server to everybody.
            self.is_required = bool(await self._store.tokens())
        return self.is_required

    async def admit(self, token: str | None, address: str) -> Grant | None:
        """See `AccessControl`."""
        try:
            return await self._authenticator.authenticate(token, address) if await self.needs_tokens() else None
        except BadToken as error:
            raise Refused(401, str(error), "token") from error
        except TooManyFailures as error:
            raise Refused(429, str(error), "failures", retry_after_s=error.retry_after_s) from error
        except StoreError as error:
            logger.warning("Tokens cannot be checked: %s", error)
            problem = "The server cannot read its database now, so it cannot check tokens. Try again in a moment."
            raise Refused(503, problem, "store", retry_after_s=_RETRY_AFTER_S) from error

    def connected(self, grant: Grant | None, close: Callable[[str], None]) -> AbstractContextManager[object]:
        """See `AccessControl`."""
        return nullcontext() if grant is None else self._authenticator.connected(grant, close)


class ServedConnection(EditorConnection):
    """The connection of one client. While the server shuts down, the connection refuses requests that start new
    work."""

    def __init__(
        self, transport: WebSocketTransport, service: AcpService, *, holder: object = None, wants_cursors: bool = False
    ) -> None:
        super().__init__(transport, ends_on_signals=False)
        self._service = service
        self._holder = holder
        """Whose slots the requests take: the principal or, without tokens, the connection."""
        self._wants_cursors = wants_cursors

    async def run(self, handle: Handler) -> None:
        """See `ClientConnection`."""
        await super().run(partial(self._handle, handle))

    async def _handle(self, handle: Handler, method: str, params: Any, is_notification: bool) -> Any:
        if is_notification:
            return await handle(method, params, is_notification)
        service = self._service
        if method == "initialize" and self._wants_cursors:
            _ask_for_cursors(params)
        # Unknown methods share one label, because a client could invent any number of method names.
        service.metrics.requests.add(method=method if method in MODELS else "other")
        if service.is_draining and method in _START_WORK:
            problem = "This server is shutting down. Connect again in a moment and repeat this request."
            raise request_error(INTERNAL_ERROR, problem, reason="draining")
        if method in _TAKES_TURNS:
            async with service.slots.slot(self._holder):
                return await handle(method, params, is_notification)
        if method not in _PROMPTING:
            return await handle(method, params, is_notification)
        service.prompts += 1
        try:
            return await handle(method, params, is_notification)
        finally:
            service.prompts -= 1


def _ask_for_cursors(params: dict[str, Any]) -> None:
    """Change the parameters of `initialize` so that they ask for cursors, even if the editor did not ask."""
    key = "capabilities" if params.get("protocolVersion") == 2 else "clientCapabilities"
    offered = params.get(key)
    offered = {} if offered is None else offered
    if isinstance(offered, dict):
        meta = offered.get("_meta")
        params[key] = offered | {"_meta": (meta if isinstance(meta, dict) else {}) | {CURSOR_KEY: True}}


@dataclass(slots=True, eq=False)
class _ConnectedClient:
    """A connected client."""

    id: str
    """The id of the connection."""
    address: str
    """The address that it connects from."""
    principal: str | None
    """Its user. None on a server without tokens."""
    transport: WebSocketTransport
    """The WebSocket to the client."""
    since: float
    """The monotonic time at which the client connected, in seconds."""


_ServeClient = Callable[[ServedConnection, str, Grant | None], Awaitable[None]]
"""A function that serves a connection until the client is gone. Its arguments are the connection, the connection's id,
and the grant of the client's token."""


class AcpService:
    """Accepts clients, checks their tokens, and keeps a list of the connected clients."""

    def __init__(
        self,
        serve: _ServeClient,
        *,
        access: AccessControl,
        limits: ConnectionLimits,
        max_connections: int,
        max_connections_each: int,
        origins: Iterable[str] = (),
        hosts: Iterable[str] = (),
        operators: Iterable[str] = (),
        gauges: Callable[[], Iterable[MetricFamily]] = tuple,
        check_ready: Callable[[], Awaitable[str]],
        metrics: Metrics | None = None,
        more_routes: Sequence[Route] = (),
        links: PageLinks | None = None,
        has_session: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """`links` are the shared pages. Anybody who has the address of a page may read it, as long as `has_session`
        finds the session of the page."""
        self._serve = serve
        self._more_routes = tuple(more_routes)
        """The routes of the page for browsers and of pairing. Empty if this server has no page."""
        self._links = links
        self._has_session = has_session
        self._access = access
        self._limits = limits
        self._max_connections = max_connections
        self._max_connections_each = max_connections_each
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._operators = frozenset(operators)
        self._gauges = gauges
        self._check_ready = check_ready
        self._remembered: dict[str, tuple[str | None, float]] = {}
        """For each ended connection, by its id: its principal, and the monotonic time until which that principal may
        use the id again."""
        self.metrics = metrics or Metrics()
        self._traffic = Traffic()
        self.handshakes = PendingHandshakes(places=max(_MIN_HANDSHAKES, max_connections // 4), limits=limits)
        self.clients: dict[str, _ConnectedClient] = {}
        self.slots = FairLimiter(_MAX_REQUESTS, each=MAX_REQUESTS_EACH)
        self.prompts = 0
        """The number of prompt requests that have no response yet."""
        self.is_draining = False

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            WebSocketRoute("/acp", self._acp),
            Route("/acp", _refuse_http, methods=["GET", "POST", "DELETE", "HEAD"]),
            Route("/healthz", _healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics),
            *self._more_routes,
            Route(f"{PATH}{{address}}", self._page),
        ]
        return partial(self._check_host, Starlette(routes=routes))

    def close_all(self, end: ConnectionEnd) -> None:
        """End each connection after the messages that wait for its client have been sent."""
        for client in self.clients.values():
            client.transport.finish(end)

    async def _check_host(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request to any endpoint if its Host header does not name this server."""
        if scope["type"] in {"http", "websocket"}:
            hosts = Headers(scope=scope).getlist("host")
            if not is_known_host(hosts, self._hosts):
                problem = (
                    f'"{_shown(hosts)}" is not a name of this server. The operator can add the name to serve.hosts.'
                )
                refused = Refused(403, problem, "host")
                self._note_refused(refused, client_address(HTTPConnection(scope)))
                if scope["type"] == "websocket":
                    await WebSocket(scope, receive, send).send_denial_response(refused.response())
                else:
                    await refused.response()(scope, receive, send)
                return
        await app(scope, receive, send)

    async def _acp(self, websocket: WebSocket) -> None:
        address = client_address(websocket)
        try:
            grant = await self._admit(websocket, address)
        except Refused as refused:
            self._note_refused(refused, address)
            await websocket.send_denial_response(refused.response())
            return
        principal = None if grant is None else grant.principal
        id_ = self._connection_id(websocket.headers.get(_CONNECTION_ID), principal)
        # There is no await between the check of the limits and this line, so no other client can take the place.
        headers = [(_CONNECTION_ID.encode(), id_.encode()), (b"crow-version", __version__.encode())]
        transport = WebSocketTransport(websocket, self._limits, self._traffic)
        client = _ConnectedClient(id_, address, principal, transport, time.monotonic())
        self.clients[id_] = client
        details: dict[str, object] = {"connection": id_, "address": address, "principal": principal}
        self.metrics.connections.add()
        try:
            await websocket.accept(headers=headers)
            logger.info("A client has connected", extra=details)
            with self._access.connected(
                grant, lambda why: transport.drop(ConnectionEnd(CloseCode.POLICY_VIOLATION, why, "revoked"))
            ):
                wants_cursors = websocket.headers.get(_CURSORS) is not None
                holder = principal or id_
                connection = ServedConnection(transport, self, holder=holder, wants_cursors=wants_cursors)
                await self._serve(connection, id_, grant)
        except ClientDisconnected:
            transport.lose()
        finally:
            if self.clients.get(id_) is client:
                del self.clients[id_]
            self._remember(id_, principal)
            self.metrics.ended.add(reason=transport.end.reason)
            seconds = round(time.monotonic() - client.since, 3)
            why = {"reason": transport.end.reason, "seconds": seconds}
            logger.info("A client has disconnected", extra=details | why)

    async def _admit(self, websocket: WebSocket, address: str) -> Grant | None:
        """Return the grant of the client's token, or None on a server without tokens. :raises Refused: the client may
        not connect now."""
        origins = websocket.headers.getlist("origin")
        if not is_known_origin(origins, self._origins) and not is_own_origin(websocket):
            problem = (
                f'Web pages of "{_shown(origins)}" may not connect. The operator of this server can add the origin to '
                "serve.origins."
            )
            raise Refused(403, problem, "origin")
        if self.is_draining:
            problem = "This server is shutting down. Connect again in a moment."
            raise Refused(503, problem, "draining", retry_after_s=_RETRY_AFTER_S)
        token = _bearer_token(websocket.headers) or cookie_token(websocket)
        grant = await self._access.admit(token, address)
        principal = None if grant is None else grant.principal
        # If the client connects again, its old connection will be ended, so the old connection does not count.
        old = (websocket.headers.get(_CONNECTION_ID), principal)
        others = [client for client in self.clients.values() if (client.id, client.principal) != old]
        if len(others) >= self._max_connections:
            problem = (
                f"{self._max_connections} clients are connected, and this server allows no more. Connect again later."
            )
            raise Refused(503, problem, "full", retry_after_s=_RETRY_AFTER_S)
        if grant is not None:
            connected = sum(client.principal == principal for client in others)
            if connected >= self._max_connections_each:
                problem = f"You have {connected} connections, and this server allows no more. Close one of them."
                raise Refused(503, problem, "full_each", retry_after_s=_RETRY_AFTER_S)
        return grant

    def _connection_id(self, wanted: str | None, principal: str | None) -> str:
        """Return the id for the new connection. If the server remembers an earlier connection of this principal with
        the id `wanted`, return `wanted`. Otherwise return a new id."""
        client = self.clients.get(wanted or "")
        if client is not None and client.principal == principal:
            # The old connection of the client is broken, and the server has not noticed it yet.
            client.transport.drop(
                ConnectionEnd(CloseCode.POLICY_VIOLATION, "This client has connected again.", "replaced")
            )
            return client.id
        owner, until = self._remembered.get(wanted or "", (None, 0.0))
        if wanted is not None and client is None and until > time.monotonic() and owner == principal:
            return wanted
        return str(uuid.uuid4())

    def _remember(self, id_: str, principal: str | None) -> None:
        now = time.monotonic()
        self._remembered.pop(id_, None)
        self._remembered[id_] = (principal, now + _REMEMBERED_S)
        while self._remembered:
            oldest = next(iter(self._remembered))
            if self._remembered[oldest][1] > now and len(self._remembered) <= _MAX_REMEMBERED:
                break
            del self._remembered[oldest]

    async def _readyz(self, _request: Request) -> Response:
        problem = "draining" if self.is_draining else await self._check_ready()
        body = {"status": "ready"} if not problem else {"status": "not ready", "problem": problem}
        return JSONResponse(body, status_code=503 if problem else 200)

    async def _page(self, request: Request) -> Response:
        """Return the page of a link. A link that has ended gets the same response as a link that never existed."""
        found = None if self._links is None else await self._links.find(request.path_params["address"])
        if found is None or self._links is None or self._has_session is None:
            return PlainTextResponse("There is no such page.\n", status_code=404, headers=_PAGE_HEADERS)
        link, file = found
        try:
            is_there = await self._has_session(link.session)
        except StoreError as error:
            logger.warning("A page cannot be shown: %s", error)
            return _no_database().response()
        if not is_there:
            await self._links.remove(link)
            return PlainTextResponse("There is no such page.\n", status_code=404, headers=_PAGE_HEADERS)
        headers = {**_PAGE_HEADERS, "Content-Security-Policy": link.policy}
        return FileResponse(file, media_type="text/html; charset=utf-8", headers=headers)

    async def _metrics(self, request: Request) -> Response:
        address = client_address(request)
        try:
            self._check_operator(await self._access.admit(_bearer_token(request.headers), address))
        except Refused as refused:
            self._note_refused(refused, address)
            return refused.response()
        return Response(self.metrics.render(self._all_gauges()), media_type=CONTENT_TYPE)

    def _check_operator(self, grant: Grant | None) -> None:
        """Check that the client may read the metrics, which cover the work of all principals.

        :raises Refused: the principal is not an operator.
        """
        if grant is not None and grant.principal not in self._operators:
            problem = f"{grant.principal} may not read the metrics, because serve.operators does not list this name."
            raise Refused(403, problem, "operator")

    def _all_gauges(self) -> Iterable[MetricFamily]:
        yield gauge("crow_build_info", "The version of crow.", 1, version=__version__)
        yield gauge("crow_connections", "Clients that are connected.", len(self.clients))
        buffered = sum(client.transport.buffered_bytes for client in self.clients.values())
        yield gauge("crow_buffered_bytes", "Bytes that wait for clients to read them.", buffered)
        yield gauge("crow_draining", "1 while the server shuts down.", self.is_draining)
        expired = MetricFamily(
            "crow_handshakes_expired_total", "counter", "Connections closed before a complete request."
        )
        expired.add(self.handshakes.expired)
        yield expired
        messages = MetricFamily("crow_messages_total", "counter", "Messages, by direction.")
        messages.add(self._traffic.messages_in, direction="in")
        messages.add(self._traffic.messages_out, direction="out")
        yield messages
        sizes = MetricFamily("crow_message_bytes_total", "counter", "Bytes of messages, by direction.")
        sizes.add(self._traffic.bytes_in, direction="in")
        sizes.add(self._traffic.bytes_out, direction="out")
        yield sizes
        yield gauge("crow_prompts", "Prompts without a response yet.", self.prompts)
        yield from self._gauges()
        yield from process_metrics()

    def _note_refused(self, refused: Refused, address: str) -> None:
        self.metrics.refused.add(reason=refused.reason)
        details = {"status": refused.status, "reason": refused.reason, "address": address}
        logger.info("A connection was refused", extra=details)


class WaitingService:
    """Answers in place of `AcpService` as long as the server's database cannot be reached."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.handshakes = PendingHandshakes(places=_MIN_HANDSHAKES, limits=limits)

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            WebSocketRoute("/acp", self._refuse_client),
            Route("/healthz", _healthz),
            Route("/readyz", self._readyz),
            Route("/{path:path}", self._refuse),
        ]
        return Starlette(routes=routes)

    async def _refuse_client(self, websocket: WebSocket) -> None:
        await websocket.send_denial_response(_no_database().response())

    async def _refuse(self, _request: Request) -> Response:
        return _no_database().response()

    async def _readyz(self, _request: Request) -> Response:
        problem = "the database cannot be reached; see the log"
        return JSONResponse({"status": "not ready", "problem": problem}, status_code=503)


def _no_database() -> Refused:
    problem = "The server waits for its database. Try again in a moment."
    return Refused(503, problem, "store", retry_after_s=_RETRY_AFTER_S)


SHUTDOWN = ConnectionEnd(CloseCode.GOING_AWAY, "This server is shutting down. Connect again in a moment.", "shutdown")


async def _refuse_http(_request: Request) -> Response:
    return PlainTextResponse(_UPGRADE_REQUIRED, status_code=426, headers={"Upgrade": "websocket"})


async def _healthz(_request: Request) -> Response:
    return PlainTextResponse("ok\n")


def _shown(values: Sequence[str]) -> str:
    """Return the values of a refused header as text that is safe to show in the response and in a terminal."""
    return on_one_line(", ".join(values)[:_SHOWN_CHARS])


def _bearer_token(headers: Headers) -> str | None:
    """Return the token in the Authorization header, or None."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None
