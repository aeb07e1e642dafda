"""Sends the requests of a login, and only to addresses that the MCP server may name.

An MCP server says where its authorization server is. A server on the internet must not lead crow into a private
network, and a server in a private network must not lead crow to programs on this machine. So each host is resolved
once, its addresses are checked, and the connection goes to one of them. Answers are limited in size and time.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpx2

from crow.domain.errors import ArgumentError, ToolServerError
from crow.domain.text import safe
from crow.tools.mcp.calls import is_this_machine
from crow.tools.urls import PORTS, is_address, normalize_url
from crow.tools.web import is_public
from crow.version import __version__

T = TypeVar("T")
_MAX_ANSWER_BYTES = 1_000_000
_TIMEOUT_S = 20.0
_SHOWN_CHARS = 200
_PUBLIC, _PRIVATE, _LOCAL, _NEVER = range(4)
"""How close an address is to this machine: on the internet, in a private network, or on the machine itself. An MCP
server may name only addresses that are at most as close as its own. It may never name a `_NEVER` address."""


class LoginClient:
    """The HTTP client for the login to one MCP server.

    `issuer` is the URL of the authorization server in the user's settings, or empty. The user has chosen this URL and
    that of the MCP server, so both may have any address. All other URLs come from the MCP server and are checked.
    """

    def __init__(self, server_url: str, issuer: str = "") -> None:
        self._server_url = server_url
        self._own = {_origin(url) for url in (server_url, issuer) if url}

    async def send(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request without following redirects, and read the whole answer.

        :raises ToolServerError: the URL is not allowed, the host cannot be reached, or its answer is too large.
        """
        url = str(request.url)
        place = plain_url(url)
        request.headers.setdefault("User-Agent", f"crow/{__version__}")
        request.headers["Accept"] = "application/json"
        try:
            with anyio.fail_after(_TIMEOUT_S):
                addresses = await self.check(url)
                transport = _PinnedTransport(addresses, is_tls=request.url.scheme != "http") if addresses else None
                # in a thread, because it reads the system's certificates
                client = await anyio.to_thread.run_sync(lambda: _make_client(transport))
                async with client:
                    answer = await client.send(request, stream=True, follow_redirects=False)
                    try:
                        return await _read_whole(answer, place)
                    finally:
                        await answer.aclose()
        except TimeoutError:
            raise ToolServerError(f"{place} did not answer within {_TIMEOUT_S:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ToolServerError(f"{place} cannot be reached: {safe(reason)[:_SHOWN_CHARS]}") from None

    async def check(self, url: str) -> Sequence[str]:
        """Check that crow, or the user's browser, may open `url`. Return the addresses to connect to. There are none if
        a proxy makes the connection.

        :raises ToolServerError: `url` is not allowed.
        """
        words = f"its login leads to {plain_url(url)}"
        try:
            parts = urlsplit(normalize_url(url))
        except ArgumentError:
            raise ToolServerError(f"{words}, which is not an http or https URL") from None
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        is_own = _origin(url) in self._own
        if parts.scheme == "http" and not is_own and not is_this_machine(host):
            raise ToolServerError(f"{words}, which is not encrypted; expected an https URL")
        is_proxied = _has_proxy(parts.scheme, host)
        try:
            addresses = await _resolve(host, port)
        except OSError:
            if is_proxied:
                return ()
            raise ToolServerError(f"{words}, but the host {safe(host)} was not found") from None
        if not is_own:
            limit = await self._closeness_of_server()
            for address in addresses:
                if _closeness(address) > limit:
                    kind = "on this machine" if _closeness(address) == _LOCAL else "in a private network"
                    raise ToolServerError(
                        f"{words}. That address is {kind} ({address}), but the MCP server's "
                        "address is not. If you trust the authorization server there, set oauth_issuer to its URL"
                    )
        return () if is_proxied else addresses

    async def _closeness_of_server(self) -> int:
        """Return how close the MCP server is to this machine. If its host has several addresses, the farthest counts.
        If the host cannot be resolved, return `_PUBLIC`."""
        parts = urlsplit(self._server_url)
        with suppress(OSError, ValueError):
            found = await _resolve(parts.hostname or "", parts.port or PORTS[parts.scheme])
            return min(*map(_closeness, found), _LOCAL)
        return _PUBLIC


async def finish(work: Callable[[], Awaitable[T]], grace_s: float) -> T:
    """Run `work` and return its result. If the caller is cancelled meanwhile, `work` has `grace_s` more seconds to end
    before the cancellation takes effect."""
    scope = anyio.CancelScope(shield=True)
    found: list[T] = []
    failure: Exception | None = None

    async def limit() -> None:
        try:
            await anyio.sleep_forever()
        finally:  # the caller was cancelled, or `work` has ended
            scope.deadline = anyio.current_time() + grace_s

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limit)
        with scope:
            try:
                found.append(await work())
            except Exception as error:  # noqa: BLE001 - raised below, outside the task group that would wrap it
                failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return found[0]


class _PinnedTransport(httpx2.AsyncBaseTransport):
    """Connects to the first of some addresses that takes the connection, and does not resolve the host again. TLS still
    checks the host's name. Certificates are read only for TLS: it takes 50 ms."""

    def __init__(self, addresses: Sequence[str], *, is_tls: bool) -> None:
        self._addresses = addresses
        self._inner = httpx2.AsyncHTTPTransport(verify=is_tls)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request to the first address that can be reached."""
        *others, last = self._addresses
        for address in others:  # localhost, for example, is often both ::1 and 127.0.0.1
            with suppress(httpx2.ConnectError):
                return await self._send(request, address)
        return await self._send(request, last)

    async def _send(self, request: httpx2.Request, address: str) -> httpx2.Response:
        host = request.url.host
        pinned = httpx2.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, **({} if is_address(host) else {"sni_hostname": host})},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


def _make_client(transport: httpx2.AsyncBaseTransport | None) -> httpx2.AsyncClient:
    # if no transport is given, the client uses the proxies in the environment
    return httpx2.AsyncClient(transport=transport, timeout=_TIMEOUT_S)


async def _read_whole(answer: httpx2.Response, place: str) -> httpx2.Response:
    """Read the whole answer. Compressed answers are refused: crow does not ask for them, and a few bytes could expand
    to gigabytes."""
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise ToolServerError(f"{place} sent a compressed answer, which crow did not ask for")
    data = bytearray()
    async for piece in answer.aiter_raw():
        data += piece
        if len(data) > _MAX_ANSWER_BYTES:
            raise ToolServerError(f"{place} sent more than {_MAX_ANSWER_BYTES:,} bytes")
    headers = [(key, value) for key, value in answer.headers.multi_items() if key.lower() != "transfer-encoding"]
    whole = httpx2.Response(answer.status_code, headers=headers, content=bytes(data), request=answer.request)
    whole.next_request = answer.next_request
    return whole


async def _resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. :raises OSError: there is no such host."""
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError from None
    return [str(entry[4][0]) for entry in found]


def _closeness(text: str) -> int:
    """Return how close an address is to this machine: `_PUBLIC`, `_PRIVATE`, `_LOCAL`, or `_NEVER` for an address that
    no MCP server may name."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    if address.is_loopback or (mapped is not None and mapped.is_loopback):
        return _LOCAL
    # cloud providers serve the machine's credentials at a link-local address
    if any(one.is_link_local or one.is_multicast or one.is_unspecified for one in (address, mapped) if one is not None):
        return _NEVER
    return _PUBLIC if is_public(text) else _PRIVATE


def _has_proxy(scheme: str, host: str) -> bool:
    """Return whether the environment sends requests for this host through a proxy."""
    proxies = urllib.request.getproxies()
    return bool(proxies.get(scheme) or proxies.get("all")) and not urllib.request.proxy_bypass(host)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return the scheme, host and port of a URL; empty values if the URL is invalid."""
    parts = urlsplit(url)
    with suppress(ValueError):
        return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
    return "", None, None


def plain_url(url: str) -> str:
    """Return a URL for a message: without user name, password, query and fragment, which may hold secrets."""
    cut = url.partition("?")[0].partition("#")[0]
    scheme, slashes, rest = cut.partition("://")
    place, slash, path = rest.partition("/")
    return safe(f"{scheme}{slashes}{place.rpartition('@')[2]}{slash}{path}")[:_SHOWN_CHARS]
