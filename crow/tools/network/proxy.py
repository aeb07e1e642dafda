"""The HTTP proxy through which a confined command reaches the hosts that the user has allowed.

A `CONNECT` tunnel carries only TLS, and each ClientHello in it must name the host of the request. A plain request is
parsed, and sent again over a new connection, so that a command cannot reach one host through another. Crow resolves the
names of hosts itself, and connects only to addresses that it has checked. The proxy cannot see what is inside TLS,
except for hosts for which the user has a credential: it answers in place of such a host, with a certificate of its own,
and adds the credential to the requests.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import anyio
import anyio.abc
import h11
from anyio.streams.tls import TLSStream

from crow.domain.errors import ArgumentError, ConfigError
from crow.domain.text import safe
from crow.tools.network import Clock, Host
from crow.tools.network.credentials import Added, Credential, Credentials, problem_of
from crow.tools.network.gate import Gate
from crow.tools.network.hosts import parse_host
from crow.tools.network.masking import Masked
from crow.tools.network.records import ClientRecords
from crow.tools.network.uses import use_of
from crow.tools.web import checked_address

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""How many connections of a command are served at once. Others wait."""
_MAX_HEAD = 32_768
"""The maximum number of bytes in the head of a request or response."""
_HEAD_S = 30.0
"""A command has this many seconds to send the head of a request, or to begin TLS."""
_CONNECT_S = 30.0
_ACCEPT_AGAIN_S = 0.1
"""The pause after a connection could not be accepted, for example because crow has too many open files."""
_IDLE_S = 600.0
"""A connection is closed if no bytes arrive for this many seconds."""
_CHUNK = 65_536
_HTTP_PORT, _HTTPS_PORT = 80, 443
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"te"),
        *(b"trailer", b"transfer-encoding", b"content-length", b"upgrade", b"http2-settings", b"expect", b"host"),
        b"alt-svc",
    )
)
"""Headers that are not passed on, because they are about one connection. `_framing` adds the header about the length of
the body again, and `_forward` adds Host."""
_NOT_WITH_CREDENTIAL = frozenset(
    (
        *(b"cookie", b"accept-encoding", b"range", b"if-range", b"forwarded", b"x-original-url", b"x-rewrite-url"),
        *(b"x-http-method", b"x-http-method-override", b"x-method-override", b"x-forwarded-host"),
    )
)
"""Headers of requests that are not passed on together with a credential. They could make a server do something other
than what the request line says, or show the credential in a form that crow does not recognise."""
_READING = frozenset((b"GET", b"HEAD"))
_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"PROPFIND", b"REPORT"))

Resolve = Callable[[str, int, bool], Awaitable[str]]
_Headers = Sequence[tuple[bytes, bytes]]


async def resolve_host(name: str, port: int, allow_private: bool) -> str:
    """Return an address of a host to which crow may connect. :raises ~crow.domain.errors.ArgumentError: there is
    none."""
    remedy = f"the user can allow it with a rule such as network({name}) in config.toml under [permissions]"
    return await checked_address(name, port, allow_private=allow_private, remedy=remedy)


class Proxy:
    """The :class:`crow.tools.network.CommandNetwork` of one command. `gate` decides which hosts the command may
    reach."""

    def __init__(self, gate: Gate, resolve: Resolve = resolve_host) -> None:
        self._gate = gate
        self._resolve = resolve
        self._slots = anyio.Semaphore(MAX_CONNECTIONS)

    @asynccontextmanager
    async def serving(self, listener: socket.socket, clock: Clock, credentials: Credentials) -> AsyncIterator[None]:
        """See :class:`crow.tools.network.CommandNetwork`."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._accept, listener, clock, credentials)
            try:
                yield
            except Exception as error:  # noqa: BLE001  # the task group would wrap the error in an ExceptionGroup
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _accept(self, listener: socket.socket, clock: Clock, credentials: Credentials) -> None:
        async with (
            await anyio.abc.SocketListener.from_socket(listener) as accepting,
            anyio.create_task_group() as tasks,
        ):
            while True:
                await self._slots.acquire()  # wait here, before an accepted connection takes one of crow's open files
                try:
                    stream = await accepting.accept()
                except OSError as error:
                    self._slots.release()
                    logger.warning("A connection of a command cannot be accepted yet: %s", error)
                    await anyio.sleep(_ACCEPT_AGAIN_S)
                else:
                    tasks.start_soon(self._serve, stream, clock, credentials)

    async def _serve(self, stream: anyio.abc.SocketStream, clock: Clock, credentials: Credentials) -> None:
        try:
            async with stream:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                    await _ProxyConnection(self._gate, self._resolve, clock, stream, credentials).serve()
        finally:
            self._slots.release()


class _Refused(Exception):
    """The proxy refuses a request."""

    def __init__(self, status: int, host: Host | str, reason: str) -> None:
        """`status` is the HTTP status of the answer, and `reason` is for the model. `host` is the host to which the
        request goes, or a part of the request's text if the request names no valid host."""
        super().__init__(reason)
        self.status = status
        self.host = host
        self.reason = reason


class _Connection:
    """One connection on which a command sends HTTP requests: to the proxy itself, or, inside TLS, to a host in whose
    place the proxy answers."""

    _default_port: int
    """The port that URLs and the header Host may leave out."""
    _kept_back: frozenset[bytes] = frozenset()
    """The names of response headers that the command does not get."""

    def __init__(self, gate: Gate, resolve: Resolve, clock: Clock, stream: anyio.abc.ByteStream) -> None:
        self._gate = gate
        self._resolve = resolve
        self._clock = clock
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)

    async def serve(self) -> None:
        """Serve requests until the connection ends."""
        try:
            while True:
                with anyio.move_on_after(_HEAD_S) as waiting:
                    request = await self._next()
                if waiting.cancelled_caught or not isinstance(request, h11.Request):
                    return
                _check_version(request)
                if not await self._handle(request):
                    return
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                    return
                self._http.start_next_cycle()
        except _Refused as refused:
            self._gate.refuse(refused.host, refused.reason)
            await self._answer(refused.status, refused.reason)
        except h11.RemoteProtocolError as error:
            await self._answer(error.error_status_hint, f"this is not a request to a proxy: {error}")
        except h11.LocalProtocolError as error:
            logger.info("A connection of a command ended: %s", error)

    async def _handle(self, request: h11.Request) -> bool:
        """Answer a request. Return whether another request may follow. :raises _Refused: the request is refused."""
        raise NotImplementedError

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event that the command sends. Wait until there is one."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await _receive(self._stream))
        return event

    async def _send(self, event: h11.Event) -> None:
        """Send an event to the command."""
        data = self._http.send(event)
        if data:
            await self._stream.send(data)

    async def _answer(self, status: int, reason: str) -> None:
        """Answer a request with an error, unless a response has begun or the command is gone."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"crow: {safe(reason)}\n".encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        with suppress(h11.LocalProtocolError, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await self._send(
                h11.Response(status_code=status, reason=b"Refused by crow", headers=[*headers, ("Connection", "close")])
            )
            await self._send(h11.Data(data=body))
            await self._send(h11.EndOfMessage())

    async def _reach(self, host: Host, *, allow_private: bool) -> anyio.abc.SocketStream:
        """Connect to a host that the command may reach. :raises _Refused: this is not possible."""
        try:
            with anyio.fail_after(_CONNECT_S):
                address = await self._resolve(host.name, host.port, allow_private)
                return await anyio.connect_tcp(address, host.port)
        except ArgumentError as error:
            raise _Refused(403 if "private" in str(error) else 502, host, str(error)) from None
        except OSError as error:
            raise _Refused(502, host, f"no connection: {error.strerror or error}") from None

    async def _forward(
        self,
        request: h11.Request,
        host: Host,
        target: bytes,
        upstream: anyio.abc.ByteStream,
        *,
        headers: _Headers,
        masked: Masked,
    ) -> None:
        """Send a request with these headers to its host over `upstream`, and the masked response to the command."""
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        name = f"[{host.name}]" if ":" in host.name else host.name
        place = name if host.port == self._default_port else f"{name}:{host.port}"
        every = [(b"Host", place.encode()), *headers, (b"Connection", b"close"), *_framing(request.headers)]
        await upstream.send(http.send(h11.Request(method=request.method, target=target, headers=every)) or b"")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_body, http, upstream)
            try:
                await self._send_response(http, upstream, request.method, masked)
            except h11.ProtocolError:
                await self._answer(502, f"{host} did not answer with HTTP")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                logger.info("The connection to %s ended: %s", host, error)
            tasks.cancel_scope.cancel()

    async def _send_body(self, http: h11.Connection, upstream: anyio.abc.ByteStream) -> None:
        """Send the body of the command's request to the host. End without an error if the command or the host is
        gone."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, h11.ProtocolError, OSError):
            while True:
                event = await self._next()
                if isinstance(event, h11.Data):
                    await upstream.send(http.send(h11.Data(data=event.data)) or b"")
                elif isinstance(event, h11.EndOfMessage):
                    await upstream.send(http.send(h11.EndOfMessage()) or b"")
                    return
                else:
                    return

    async def _send_response(
        self, http: h11.Connection, upstream: anyio.abc.ByteStream, method: bytes, masked: Masked
    ) -> None:
        """Send the response of the host to the command, without informational responses. `method` is that of the
        request."""
        while True:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await _receive(upstream))
            match event:
                case h11.InformationalResponse():
                    continue
                case h11.Response():
                    self._note_status(event.status_code)
                    has_body = method != b"HEAD" and event.status_code not in (204, 304)
                    passed = [pair for pair in _passed_on(event.headers) if pair[0] not in self._kept_back]
                    headers = [(name, masked.whole(value)) for name, value in passed]
                    headers += _framing(event.headers) if has_body or method == b"HEAD" else []
                    reason = masked.whole(bytes(event.reason))
                    await self._send(h11.Response(status_code=event.status_code, reason=reason, headers=headers))
                case h11.Data():
                    await self._send(h11.Data(data=masked.feed(bytes(event.data))))
                case h11.EndOfMessage():
                    await self._send(h11.Data(data=masked.end()))
                    await self._send(h11.EndOfMessage())
                    return
                case _:
                    return

    def _note_status(self, status: int) -> None:
        """Called with the status of each response."""


class _ProxyConnection(_Connection):
    """One connection of a command with the proxy."""

    _default_port = _HTTP_PORT

    def __init__(
        self, gate: Gate, resolve: Resolve, clock: Clock, stream: anyio.abc.SocketStream, credentials: Credentials
    ) -> None:
        super().__init__(gate, resolve, clock, stream)
        self._socket = stream
        self._credentials = credentials

    async def _handle(self, request: h11.Request) -> bool:
        if request.method != b"CONNECT":
            await self._forward_plain(request)
            return True
        host = _parsed(request.target)
        _check_host_header(request.headers, host, _HTTPS_PORT)
        credential = self._credentials.find(host)
        if credential is None:
            await self._tunnel(host)
        else:
            await self._intercept(credential)
        return False

    async def _connect(self, host: Host, *, is_plain: bool, method: bytes = b"") -> anyio.abc.SocketStream:
        """Connect to a host, if the command may reach it. `is_plain` says that the request is not inside TLS; its
        method is then `method`. :raises _Refused: the command may not reach the host, or the connection fails."""
        verdict = await self._gate.verdict(host, self._clock)
        if verdict.refusal:
            raise _Refused(403, host, verdict.refusal)
        if is_plain and verdict.is_read_only and method not in _READING:
            raise _Refused(403, host, _only_reading(method))
        return await self._reach(host, allow_private=verdict.is_named)

    async def _tunnel(self, host: Host) -> None:
        """Carry TLS between the command and a host. :raises _Refused: see `_connect`."""
        upstream = await self._connect(host, is_plain=False)
        async with upstream:
            await self._stream.send(_ESTABLISHED)
            records = ClientRecords(host.name)
            early = self._http.trailing_data[0]
            try:
                await _relay(self._socket, upstream, records, early)
            except ArgumentError as error:
                self._gate.refuse(host, str(error))

    async def _forward_plain(self, request: h11.Request) -> None:
        """Send a plain request to its host, and the response back."""
        host, target = _target(request)
        _check_host_header(request.headers, host, _HTTP_PORT)
        _check_framing(request.headers)
        async with await self._connect(host, is_plain=True, method=request.method) as upstream:
            headers = _passed_on(request.headers)
            await self._forward(request, host, target, upstream, headers=headers, masked=Masked())

    async def _intercept(self, credential: Credential) -> None:
        """Answer a command in place of a host for which the user has a credential. The user is asked later, when a
        request shows what the command wants to do there."""
        if self._http.trailing_data[0]:
            raise _Refused(400, credential.host, "TLS began before the proxy had answered")
        try:
            own, checking = await self._credentials.contexts(credential)
        except OSError as error:
            raise _Refused(
                502, credential.host, f"the ca_file of its credential cannot be used: {error.strerror}"
            ) from None
        await self._stream.send(_ESTABLISHED)
        try:
            with anyio.fail_after(_HEAD_S):
                inner = await TLSStream.wrap(self._stream, server_side=True, ssl_context=own, standard_compatible=False)
        except (ssl.SSLError, anyio.EndOfStream, anyio.BrokenResourceError, TimeoutError) as error:
            self._gate.refuse(credential.host, _failed_handshake(error))
            return
        async with inner:
            await _CredentialConnection(self, inner, credential, self._credentials, checking).serve()


class _CredentialConnection(_Connection):
    """One TLS connection of a command to the proxy, which answers in place of the host of a credential."""

    _default_port = _HTTPS_PORT

    def __init__(
        self,
        outer: _ProxyConnection,
        stream: anyio.abc.ByteStream,
        credential: Credential,
        credentials: Credentials,
        checking: ssl.SSLContext,
    ) -> None:
        """`checking` is the TLS context that checks the host's own certificate."""
        super().__init__(outer._gate, outer._resolve, outer._clock, stream)  # noqa: SLF001 (the same base class)
        self._credential = credential
        self._credentials = credentials
        self._checking = checking
        self._is_added = False
        """Whether crow adds the credential to the current request. False if the command sets the header itself."""

    async def _handle(self, request: h11.Request) -> bool:
        host, text = self._credential.host, request.target.decode("ascii", "replace")
        if request.method not in _METHODS:
            raise _Refused(405, host, "the proxy knows no such method")
        if not text.startswith("/") or "#" in text or not text.isascii():
            raise _Refused(400, host, "this is not the path of a request")
        _check_host_header(request.headers, host, _HTTPS_PORT)
        _check_framing(request.headers)
        header = self._credential.header.encode()
        self._is_added = all(name != header.lower() for name, _ in request.headers)
        await self._check_use(request, text)
        added = await self._added() if self._is_added else Added(b"", ())
        dropped = _NOT_WITH_CREDENTIAL if self._is_added else frozenset[bytes]()
        # a cookie could be used later in place of the credential
        self._kept_back = frozenset({b"set-cookie"}) if self._is_added else frozenset()
        headers = [(name, value) for name, value in _passed_on(request.headers) if name not in dropped]
        if self._is_added:
            headers += [(header, added.value), (b"Accept-Encoding", b"identity")]
        async with await self._reach(host, allow_private=True) as plain:
            try:
                with anyio.fail_after(_CONNECT_S):
                    upstream = await TLSStream.wrap(
                        plain, hostname=host.name, ssl_context=self._checking, standard_compatible=False
                    )
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", None) or error.reason or "no TLS"
                raise _Refused(502, host, f"its certificate or connection is not valid: {reason}") from None
            except (anyio.EndOfStream, anyio.BrokenResourceError, TimeoutError):
                raise _Refused(502, host, "it does not answer with TLS") from None
            masked = Masked(added.secrets)
            await self._forward(request, host, request.target, upstream, headers=headers, masked=masked)
        return True

    async def _check_use(self, request: h11.Request, target: str) -> None:
        """Check that the command may send this request. :raises _Refused: it may not."""
        host, use = self._credential.host, None
        if self._is_added:
            try:
                use = use_of(host, request.method, target, list(request.headers))
            except ArgumentError as error:
                raise _Refused(400, host, str(error)) from None
            if use.place and self._credential.access == "read":
                raise _Refused(403, host, "the user's credential for it is only for reading")
            use = replace(use, is_allowed=self._credential.access == "write")
        verdict = await self._gate.verdict(host, self._clock, use)
        if verdict.refusal:
            raise _Refused(403, host, verdict.refusal)
        if verdict.is_read_only and request.method not in _READING:
            raise _Refused(403, host, _only_reading(request.method))

    async def _added(self) -> Added:
        """Return the header to add. :raises _Refused: the credential cannot be read."""
        try:
            return await self._credentials.added(self._credential)
        except ConfigError as error:
            logger.warning("There is no credential for %s: %s", self._credential.host, problem_of(error))
            reason = f"the user's credential for it cannot be read: {problem_of(error)}; `crow doctor` says more"
            raise _Refused(502, self._credential.host, reason) from None

    def _note_status(self, status: int) -> None:
        if status == 401 and self._is_added:
            self._credentials.forget(self._credential)
            self._gate.refuse(self._credential.host, "it did not accept the user's credential (status 401)")


def _only_reading(method: bytes) -> str:
    return f"only GET and HEAD are allowed, not {method.decode('ascii', 'replace')[:20]}"


def _failed_handshake(error: Exception) -> str:
    """Return why a command did not begin TLS with the proxy, in words for the model."""
    reason = getattr(error, "reason", None) or ""
    if "UNKNOWN_CA" in reason or "CERTIFICATE_UNKNOWN" in reason or "BAD_CERTIFICATE" in reason:
        return (
            "the program does not trust the certificate with which crow adds the user's credential; it may ignore "
            "$SSL_CERT_FILE"
        )
    cause = reason or "it ended the connection"
    return f"the program did not begin TLS with HTTP/1.1 and the name of exactly this host: {cause}"


def _check_version(request: h11.Request) -> None:
    """Check the HTTP version of a request. :raises _Refused: it is neither 1.0 nor 1.1."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise _Refused(505, "request", "the proxy speaks HTTP/1.1")


def _parsed(target: bytes) -> Host:
    """Return the host of a CONNECT request. :raises _Refused: there is none."""
    text = target.decode("ascii", "replace")
    try:
        return parse_host(text)
    except ArgumentError as error:
        raise _Refused(400, safe(text[:100]), str(error)) from None


def _target(request: h11.Request) -> tuple[Host, bytes]:
    """Return the host of a plain request, and the request target to send to this host. :raises _Refused: the request is
    not for a proxy, or not plain."""
    text = request.target.decode("ascii", "replace")
    shown = safe(text[:100])
    if request.method not in _METHODS:
        raise _Refused(405, shown, "the proxy knows no such method")
    if not text.lower().startswith("http://"):
        raise _Refused(400, shown, "plain requests need a whole http URL; https uses CONNECT")
    authority, slash, path = text[len("http://") :].partition("/")
    if not slash and "?" in authority:
        raise _Refused(400, shown, "the URL has no path")
    if "#" in text or not text.isascii():
        raise _Refused(400, shown, "this is not a URL of a request")
    try:
        return parse_host(authority, _HTTP_PORT), f"/{path}".encode("ascii")
    except ArgumentError as error:
        raise _Refused(400, shown, str(error)) from None


def _check_host_header(headers: _Headers, host: Host, port: int) -> None:
    """Check that the header Host names the host of the request. :raises _Refused: it does not."""
    given = [value for name, value in headers if name == b"host"]
    try:
        is_same = len(given) == 1 and parse_host(given[0].decode("ascii", "replace"), port) == host
    except ArgumentError:
        is_same = False
    if not is_same and (given or port == _HTTP_PORT):
        raise _Refused(400, host, "the header Host names another host")


def _check_framing(headers: _Headers) -> None:
    """Check that a request states its length only once, because servers may otherwise disagree about where it ends.

    :raises _Refused: the request states its length twice.
    """
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if (lengths and codings) or len(lengths) > 1 or len(codings) > 1:
        raise _Refused(400, "request", "the request states its length twice")


def _framing(headers: _Headers) -> list[tuple[bytes, bytes]]:
    """Return the header that says how long the body is; none if the message has no such header."""
    for name, value in headers:
        if name == b"transfer-encoding":
            return [(b"Transfer-Encoding", b"chunked")]
        if name == b"content-length":
            return [(b"Content-Length", value)]
    return []


def _passed_on(headers: _Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers without those that are about one connection: the ones in `_HOP_BY_HOP`, and the ones that the
    header Connection names."""
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]


async def _receive(stream: anyio.abc.ByteStream) -> bytes:
    """Return the next bytes. Return none at the end of the stream, or if none arrive for `_IDLE_S`."""
    try:
        with anyio.fail_after(_IDLE_S):
            return await stream.receive(_CHUNK)
    except (anyio.EndOfStream, TimeoutError):
        return b""


async def _relay(
    client: anyio.abc.SocketStream, server: anyio.abc.SocketStream, records: ClientRecords, early: bytes
) -> None:
    """Carry bytes in both directions, until the server has sent everything, one side is gone, or no bytes have passed
    in either direction for `_IDLE_S`.

    :raises ~crow.domain.errors.ArgumentError: the client sent something that may not be forwarded.
    """
    refusal: ArgumentError | None = None

    async def next_from(stream: anyio.abc.SocketStream) -> bytes:
        tasks.cancel_scope.deadline = anyio.current_time() + _IDLE_S
        with suppress(anyio.EndOfStream):
            return await stream.receive(_CHUNK)
        return b""

    async def send_on() -> None:
        nonlocal refusal
        try:
            data = early or await _first(client)
            while data:
                if passed := records.feed(data):
                    await server.send(passed)
                data = await next_from(client)
            await server.send_eof()
        except ArgumentError as error:
            refusal = error
            tasks.cancel_scope.cancel()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_on)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            while data := await next_from(server):
                await client.send(data)
            await client.send_eof()
        tasks.cancel_scope.cancel()
    if refusal is not None:
        raise refusal


async def _first(client: anyio.abc.SocketStream) -> bytes:
    """Return the first bytes of a tunnel; none if they do not arrive within `_HEAD_S`."""
    with anyio.move_on_after(_HEAD_S):
        return await _receive(client)
    return b""
