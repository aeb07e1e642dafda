"""The HTTP connections to one endpoint.

The `openai` package provides the HTTP client and the headers of an account. Crow sends the bytes that a wire's encoder
wrote, and reads raw bytes: the typed layers of the package are slower and assume that endpoints send valid data.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import httpcore2  # noqa: F401 - otherwise the HTTP client imports it, which delays the first request by 40 ms
import httpx2
import openai

from crow.domain import errors
from crow.domain.messages import WireName
from crow.domain.trace_context import current_trace_context
from crow.llm.endpoint import Endpoint, is_local
from crow.llm.errors import ErrorBody, parse_error_response, retry_after_s
from crow.llm.wires import wire_named
from crow.version import __version__

_MAX_BUFFERED_BYTES = 256 * 1024
"""If more bytes of an answer than this wait to be parsed, crow pauses reading from the connection."""

_MAX_ERROR_BYTES = 256 * 1024
_ERROR_S = 10.0
"""The body of an HTTP error is read up to this many bytes and seconds."""

_KEEPALIVE_S = 30.0

_KEY_HEADER_ONLY = frozenset({"api.anthropic.com"})
"""Hosts that take a key only in the wire's own header."""

_OPENAI_HOST = "api.openai.com"
"""OpenAI's own host. Subdomains of it serve other regions."""

_NO_KEY = "none"
"""Takes the place of the key at endpoints that need none, because the client library requires a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    """An open HTTP client."""

    http: httpx2.AsyncClient
    """Owns the connections."""
    headers: httpx2.Headers
    """The headers of all requests. `EndpointConnection._headers` adds those of a wire."""


class EndpointConnection:
    """Sends HTTP requests to an endpoint. It connects when the first request is sent."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client: _Client | None = None
        self._opening = anyio.Lock()

    async def post(self, body: bytes, wire: WireName) -> HttpBody | ErrorBody:
        """Send the body of a request on this wire. Return the open response body, or the content of an HTTP error.

        :raises ~crow.domain.errors.NetworkError: the endpoint cannot be reached.
        :raises ~crow.domain.errors.ModelTimeout: it cannot be reached in time.
        """
        endpoint = self._endpoint
        base_url = (wire == "messages" and endpoint.messages_url) or endpoint.base_url
        with self._connection_errors():
            response = await self._send("POST", base_url.rstrip("/") + wire_named(wire).path, wire, body)
            if response.is_success:
                return HttpBody(response, endpoint.base_url)
            content = await _read_start(response, min(_ERROR_S, endpoint.timeouts.idle_s), _MAX_ERROR_BYTES)
        refusal = parse_error_response(response.status_code, content)
        wait_s = retry_after_s(response.headers, now_s=time.time(), status=response.status_code)
        return replace(refusal, wait_s=wait_s)

    async def get_models(self, wire: WireName, query: str, *, max_bytes: int) -> bytes | ErrorBody:
        """Return the answer to `GET /models`, cut after `max_bytes`, or the content of an HTTP error. The request has
        the headers of this wire. For errors, see `post`."""
        with self._connection_errors():
            url = f"{self._endpoint.base_url.rstrip('/')}/models{query}"
            response = await self._send("GET", url, wire)
            content = await _read_start(response, math.inf, max_bytes)
        return content if response.is_success else parse_error_response(response.status_code, content)

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.http.aclose()

    async def _send(self, method: str, url: str, wire: WireName, body: bytes | None = None) -> httpx2.Response:
        """Send a request with the headers of this wire. Return the response, whose body is still to be read."""
        client = await self._open()
        request = client.http.build_request(method, url, content=body, headers=self._headers(client, wire))
        return await client.http.send(request, stream=True)

    async def _open(self) -> _Client:
        async with self._opening:
            if self._client is None:
                # Creating the client reads certificates from disk, which takes 20 ms.
                self._client = await anyio.to_thread.run_sync(self._make_client)
            return self._client

    def _make_client(self) -> _Client:
        endpoint = self._endpoint
        is_plain_local = is_local(endpoint.base_url) and endpoint.base_url.startswith("http:")
        endpoint.check_headers()
        try:
            http = openai.DefaultAsyncHttpx2Client(
                # `crow.llm.stream.AnswerStream` limits how long reads may take.
                timeout=httpx2.Timeout(None, connect=endpoint.timeouts.connect_s),
                limits=httpx2.Limits(max_keepalive_connections=20, keepalive_expiry=_KEEPALIVE_S),
                # Requests to this machine must not go through a proxy from the environment, and plain HTTP needs no
                # certificates.
                trust_env=not is_plain_local,
                proxy=endpoint.proxy,
                verify=_certificates(endpoint.ca_file) if endpoint.ca_file is not None else not is_plain_local,
            )
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            # An ImportError means a SOCKS proxy. Some users have one in ALL_PROXY for other programs.
            reason = "it is a SOCKS proxy" if isinstance(error, ImportError) else str(error).rstrip(".")
            raise errors.ConfigError(
                f"The proxy for {endpoint.base_url} cannot be used: {reason}. Set proxy in config.toml, or "
                "HTTPS_PROXY and ALL_PROXY in the environment, to the URL of an HTTP proxy, such as "
                "http://127.0.0.1:3128."
            ) from error
        headers = self._account_headers(http)
        headers.update({"Accept": "application/json", "Content-Type": "application/json"})
        # Compression would delay the first words of an answer.
        headers.update({"User-Agent": f"crow/{__version__}", "Accept-Encoding": "identity"})
        headers.update(dict(endpoint.headers))
        if not endpoint.sends_authorization:
            del headers["Authorization"]
        return _Client(http=http, headers=headers)

    def _account_headers(self, http: httpx2.AsyncClient) -> httpx2.Headers:
        """Return the headers that identify the user's account: the key and, at OpenAI's own host, the organization and
        the project, which the `openai` package reads from environment variables. Other companies must not get them."""
        endpoint = self._endpoint
        api = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key or _NO_KEY, http_client=http)
        # The package's other headers describe the user's system. To find their values, it would start `uname`.
        headers = httpx2.Headers(api.auth_headers)
        if f".{urlsplit(endpoint.base_url).hostname}".endswith(f".{_OPENAI_HOST}"):
            account = {"OpenAI-Organization": api.organization, "OpenAI-Project": api.project}
            headers.update({name: value for name, value in account.items() if value})
        return headers

    def _headers(self, client: _Client, name: WireName) -> httpx2.Headers:
        """Return the headers of a request on this wire, with the trace context of the client's request. Headers that
        the user has configured take precedence."""
        endpoint, wire, headers = self._endpoint, wire_named(name), client.headers.copy()
        for header, value in (*wire.headers.items(), *current_trace_context().items()):
            headers.setdefault(header, value)
        if wire.key_header is not None and endpoint.api_key:
            headers.setdefault(wire.key_header, endpoint.api_key)
            has_own = any(each.lower() == "authorization" for each, _ in endpoint.headers)
            if urlsplit(endpoint.base_url).hostname in _KEY_HEADER_ONLY and not has_own:
                # This host would take a key in `Authorization` for the token of a login.
                headers.pop("Authorization", None)
        return headers

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Convert the errors of a failed connection. :raises ~crow.domain.errors.ModelError: in their place."""
        who = self._endpoint.base_url
        try:
            yield
        except httpx2.TimeoutException:
            timeout_s = self._endpoint.timeouts.connect_s
            raise errors.ModelTimeout(f"No connection to {who} within {timeout_s:g} s.") from None
        except httpx2.InvalidURL as error:
            raise errors.ConfigError(f'The base URL "{who}" cannot be used: {str(error).rstrip(".")}.') from None
        except (httpx2.RequestError, ssl.SSLError, anyio.EndOfStream) as error:  # the client does not wrap all of them
            hint = " Check the network, the base URL and the proxy, if you use one."
            if is_local(who):
                hint = " Is the server running?"
            reason = str(error).rstrip(".") or type(error).__name__
            raise errors.NetworkError(f"No connection to {who}: {reason}.{hint}") from None


async def _read_start(response: httpx2.Response, timeout_s: float, max_bytes: int) -> bytes:
    """Return the body of a response, or as much of it as arrives within `timeout_s` seconds, cut after `max_bytes`.
    Close the response."""
    body = bytearray()
    try:
        with anyio.move_on_after(timeout_s):
            async with aclosing(response.aiter_bytes()) as pieces:
                async for piece in pieces:
                    body += piece
                    if len(body) >= max_bytes:
                        break
    finally:
        await response.aclose()
    return bytes(body[:max_bytes])


def _certificates(file: str) -> ssl.SSLContext:
    """Return an SSL context that trusts the certificate authorities in `file` and the usual ones.

    :raises ~crow.domain.errors.ConfigError: `file` cannot be read.
    """
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(cafile=file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise errors.ConfigError(
            f"The CA file {file} cannot be used: {reason}. Use a file that contains PEM certificates."
        ) from error
    return context


class HttpBody:
    """The body of an open response; see :class:`crow.llm.stream.ResponseBody`.

    A background task reads the body, so that each `read` returns everything that has arrived. Servers send each token
    as a separate chunk, and reading many chunks at once is cheaper than reading them one by one.
    """

    def __init__(self, response: httpx2.Response, sender: str) -> None:
        self._response = response
        self._sender = sender
        """The endpoint's URL."""
        self._arrived: list[bytes] = []
        """The pieces that were received and not read yet."""
        self._arrived_bytes = 0
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._reader = asyncio.create_task(self._read_all())

    async def read(self) -> bytes:
        """Wait for at least one byte, and return all bytes that have arrived since the last call. At the end of the
        body, return `b""`."""
        while not self._arrived and not self._reader.done():
            self._has_news.clear()
            await self._has_news.wait()
        if not self._arrived:
            self._reader.result()  # raises the error that ended the reading
        data = b"".join(self._arrived)
        self._arrived.clear()
        self._arrived_bytes = 0
        self._has_room.set()
        return data

    async def close(self) -> None:
        """Close the connection."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._response.aclose()

    async def _read_all(self) -> None:
        """Read the response to its end.

        :raises ~crow.domain.errors.ModelError: the connection broke, or the body cannot be decompressed.
        """
        who, arrived = self._sender, self._arrived
        try:
            # Only a compressed body needs the library's decoders.
            is_plain = "Content-Encoding" not in self._response.headers
            async with aclosing(self._response.aiter_raw() if is_plain else self._response.aiter_bytes()) as pieces:
                async for piece in pieces:
                    if not arrived:
                        self._has_news.set()
                    arrived.append(piece)
                    self._arrived_bytes += len(piece)
                    if self._arrived_bytes > _MAX_BUFFERED_BYTES:
                        self._has_room.clear()
                        await self._has_room.wait()
        except httpx2.DecodingError as error:
            raise errors.ProtocolError(f"{who} sent a body that cannot be decompressed: {error}") from None
        except (httpx2.RequestError, httpx2.StreamError, OSError, anyio.EndOfStream) as error:
            raise errors.NetworkError(f"The connection to {who} broke: {error or type(error).__name__}.") from None
        finally:
            self._has_news.set()
