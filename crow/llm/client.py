"""A model at any endpoint that speaks one of the wires.

The `openai` package provides the HTTP client and the headers of an account. The wire's encoder writes request bodies,
and `sse` and the wire's parser read answers from raw bytes, because the typed layers of the package are slower and
assume that endpoints send valid data. If an endpoint refuses a part of a request by name, or a whole wire, crow
remembers this and leaves it out of later requests.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, lru_cache, partial
from urllib.parse import urlencode, urlsplit

import anyio
import anyio.to_thread
import httpcore2  # noqa: F401 - otherwise httpx2 imports this in the event loop, with the first request
import httpx2
import openai

from crow.domain import errors
from crow.domain.messages import Answer, SentRequest, WireName
from crow.domain.trace_context import current_trace_context
from crow.llm import EndpointMemory, ModelInfo, Request
from crow.llm.dialect import Dialect, is_wire, wire_part
from crow.llm.endpoint import Endpoint, is_local
from crow.llm.errors import (
    ErrorBody,
    Origin,
    max_output_tokens,
    model_error,
    parse_error_response,
    refused_part,
    refuses_wire,
    retry_after_s,
)
from crow.llm.facts import OUTPUT_LIMIT, utc_today
from crow.llm.models import EndpointFacts, Offered, RequestForm, last_of_page, read_listing
from crow.llm.parser import AnswerParser
from crow.llm.sent import sent_request
from crow.llm.stream import MAX_ADAPTATIONS, AnswerStream, RetryTiming
from crow.llm.wires import AnyEncoder, wire_named
from crow.version import __version__

_MAX_ENCODERS = 64
"""At most this many sessions keep their encoded messages. For each further one, the least recently used is dropped."""

_MAX_BUFFERED_BYTES = 256 * 1024
"""While more bytes of an answer than this wait to be parsed, crow reads no more from the connection."""

_MAX_ERROR_BYTES = 256 * 1024
_ERROR_S = 10.0
"""The body of an HTTP error is read up to this many bytes and seconds."""

MAX_LISTING_BYTES = 32 * 1024 * 1024
LISTING_S = 30.0
"""The list of models may have at most this many bytes, and take this many seconds, with all its pages."""

MAX_LISTING_PAGES = 100
"""Crow reads at most this many pages of the list of models, and ignores further ones."""

_BACKGROUND_LISTING_S = 1.5
"""The limit if the list of models is read after an answer, to learn the context window."""

_SUGGESTIONS_S = 3.0
"""The limit if it is read to suggest other models in an error message."""

_CLOSE_TIMEOUT_S = 1.0
_KEEPALIVE_S = 30.0
_MIN_SECRET_CHARS = 6
"""Shorter header values, such as `true`, are not masked in error messages: they may occur there as ordinary words."""
_THINKS_S = 0.05
"""The digest of a request is computed this many seconds after the request was built, while the model thinks. If the
answer is complete earlier, the digest is computed then."""
_CONNECT_ERRORS = (httpx2.RequestError, ssl.SSLError, anyio.EndOfStream)
"""Errors that a failed connection raises. The HTTP client does not wrap all of them in its own error types."""

_KEY_HEADER_ONLY = frozenset({"api.anthropic.com"})
"""Hosts that take a key only in the wire's own header."""

_OPENAI_HOST = "api.openai.com"
"""OpenAI's own host. Subdomains of it serve other regions."""

_NO_KEY = "none"
"""Takes the place of the key at endpoints that need none, because the client library requires a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    """The connections to an endpoint."""

    http: httpx2.AsyncClient
    """The HTTP client. It owns the connections."""
    headers: httpx2.Headers
    """The headers of all requests. See `EndpointClient._headers` for those of one wire."""


class EndpointClient:
    """One model at one endpoint; see :class:`crow.llm.Model`. Sessions share this object. It connects to the endpoint
    when the first request is sent.

    `learned` contains the facts that are already stored in `memory`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        memory: EndpointMemory | None = None,
        learned: Mapping[str, object] | None = None,
        timing: RetryTiming | None = None,
        today: Callable[[], date] = utc_today,
    ) -> None:
        self._endpoint = endpoint
        self._timing = timing or RetryTiming()
        self._facts = EndpointFacts(endpoint, memory, learned or {}, today=today)
        self._listing: asyncio.Task[None] | None = None
        # Returns the encoder of the session that has this cache key.
        self._encoder = lru_cache(_MAX_ENCODERS)(lambda _cache_key, wire: wire_named(wire).encoder())
        self._client: _Client | None = None
        self._opening = anyio.Lock()
        self.timeouts = endpoint.timeouts

    @property
    def info(self) -> ModelInfo:
        """The facts that crow knows about the model now. A configured context window takes precedence over a listed
        one."""
        return self._facts.info

    @property
    def origin(self) -> Origin:
        """The endpoint and model for error messages."""
        endpoint, wire = self._endpoint, self._facts.info.wire
        return Origin(endpoint=endpoint.base_url, model=endpoint.model, wire=wire, key_hint=endpoint.key_hint)

    def check(self) -> None:
        """See :meth:`crow.llm.Model.check`."""
        self._endpoint.check()

    def stream(self, request: Request) -> AbstractAsyncContextManager[AnswerStream]:
        """Return a stream with the answer to `request`. The request is sent when the stream is first read. Leaving the
        context manager closes the connection."""
        if request.thought_level is None and self._endpoint.thought_level is not None:
            request = replace(request, thought_level=self._endpoint.thought_level)
        return aclosing(AnswerStream(_EndpointTransport(self, request), request, timing=self._timing))

    async def close(self) -> None:
        """Close the connections within a limited time. `close` may be called more than once."""
        client, self._client = self._client, None
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            if self._listing is not None and self._listing.cancel():
                await asyncio.wait([self._listing])
            if client is not None:
                await client.http.aclose()

    async def models(self) -> tuple[Offered, ...]:
        """Return the models that the endpoint lists.

        :raises ~crow.domain.errors.ModelError: the list cannot be read.
        """
        try:
            offered = await self._list()
        except errors.ModelError as error:
            self.redact(error)
            raise
        await self._facts.set_listed(next((each for each in offered if each.name == self._endpoint.model), None))
        return offered

    async def _list(self) -> tuple[Offered, ...]:
        """Return the list of models, read with the headers of the first wire that can be used for it."""
        first, *others = self._endpoint.dialect.wires
        try:
            return await self._list_as(first)
        except errors.AuthError:
            # Anthropic's endpoints take the key only in the header `x-api-key`.
            if "messages" not in others:
                raise
        return await self._list_as("messages")

    async def _list_as(self, wire: WireName) -> tuple[Offered, ...]:
        """Return the list of models, read with the headers of a wire. Anthropic sends the list in pages of 20 models,
        unless a request asks for more."""
        who, query, room = self.origin.endpoint, "", MAX_LISTING_BYTES
        found: dict[str, Offered] = {}
        with anyio.move_on_after(LISTING_S):
            for _ in range(MAX_LISTING_PAGES):
                content = await self._get_models(wire, query, max_bytes=room)
                room -= len(content)
                if room <= 0:
                    raise errors.ProtocolError(f"{who}/models is longer than {MAX_LISTING_BYTES:,} bytes.")
                try:
                    body = json.loads(content)
                    offered = read_listing(body)
                except (ValueError, RecursionError):
                    raise errors.ProtocolError(f"{who}/models is not JSON.") from None
                if offered is None:
                    raise errors.ProtocolError(f"{who}/models is not a list of models.")
                known = len(found)
                for each in offered:
                    found.setdefault(each.name, each)
                last = last_of_page(body)
                # An endpoint that ignores the query sends its first page again.
                if last is None or len(found) == known:
                    break
                query = f"?{urlencode({'limit': 1000, 'after_id': last})}"
            return tuple(found.values())
        raise errors.ModelTimeout(f"{who}/models did not answer within {LISTING_S:g} s.")

    async def _get_models(self, wire: WireName, query: str, *, max_bytes: int) -> bytes:
        """Return one page of the list of models, cut after `max_bytes`. `query` is empty for the first page.

        :raises ~crow.domain.errors.ModelError: the endpoint cannot be reached, or answered with an error.
        """
        client = await self._open()
        url = f"{self._endpoint.base_url.rstrip('/')}/models{query}"
        request = client.http.build_request("GET", url, headers=self._headers(client, wire))
        try:
            response = await client.http.send(request, stream=True)
            try:
                content = await _read_start(response, math.inf, max_bytes)
            finally:
                await response.aclose()
        except _CONNECT_ERRORS as error:
            raise self._connection_error(error) from None
        if not response.is_success:
            raise model_error(parse_error_response(response.status_code, content), self.origin)
        return content

    async def form_for(self, request: Request) -> RequestForm:
        """Return the form in which to send `request`, based on what crow knows about the endpoint now."""
        await self._facts.refresh()
        return self._facts.form(request.cache_key, has_tools=bool(request.tools))

    def parser(self, request: Request, form: RequestForm | None) -> AnswerParser:
        """Return a parser for the answer to `request`, which was sent in the given form."""
        wire = self._facts.info.wire if form is None else form.dialect.wire
        return wire_named(wire).parser(request.tools, origin=replace(self.origin, wire=wire))

    async def send(self, request: Request, form: RequestForm) -> _HttpBody:
        """Send `request` in the given form. If the endpoint refuses a part of it, change the form and send it again.

        :raises ~crow.domain.errors.ModelError: the request failed.
        """
        self.check()
        words = ""
        for _ in range(MAX_ADAPTATIONS):
            dialect = form.dialect
            wire, limit = dialect.wire, self._limit(request, dialect.wire, form.max_output)
            body = self._body(self._encoder(request.cache_key, wire), request, dialect, limit)
            endpoint, extra = self._endpoint.name, self._endpoint.extra_body
            describe = cache(
                partial(sent_request, body, request, endpoint=endpoint, dialect=dialect, limit=limit, extra=extra)
            )
            asyncio.get_running_loop().call_later(_THINKS_S, describe)
            response = await self._post(body, wire)
            if isinstance(response, _HttpBody):
                response.describe = describe
                return response
            if not await self.adapt(request, form, response):
                if form.moved is not None and refuses_wire(response, wire):
                    # No wire works. The refusal of the first wire says most about the reason.
                    response, wire = form.moved
                error = await self._error_of(response, wire)
                if isinstance(error, errors.ContextOverflow):
                    # The endpoint complained only about the length, so crow treats the rest of the form as accepted.
                    # But the endpoint may check the length first, so this proves nothing about the tested parts.
                    form.tested.clear()
                    await self.accept(request, form)
                raise error
            words = response.shown
        who = self.origin.endpoint
        raise errors.ProtocolError(f"{who} refused the request in {MAX_ADAPTATIONS} forms. The last reason: {words}.")

    def _body(self, encoder: AnyEncoder, request: Request, dialect: Dialect, limit: int | None) -> bytes:
        """Return the bytes of `request`. `limit` is the output limit to send."""
        endpoint = self._endpoint
        return encoder.body(
            request,
            model=endpoint.model,
            endpoint=endpoint.name,
            dialect=dialect,
            limit=limit,
            extra=endpoint.extra_body,
        )

    def _limit(self, request: Request, wire: WireName, known: int | None) -> int | None:
        """Return the output limit to send. `known` is the largest limit that the endpoint is known to accept."""
        wanted = request.max_output_tokens or self._endpoint.max_output_tokens
        return self._facts.output_limit(wanted or wire_named(wire).default_limit(self._endpoint.model), known)

    async def adapt(self, request: Request, form: RequestForm, body: ErrorBody) -> bool:
        """Change `form` after the refusal in `body`, so that the request can be sent again. Try in this order: use the
        next wire if this wire was refused; lower the output limit; leave out the part that the refusal names; if it is
        a bad request that names none, see `RequestForm.revert`. If all wires were refused, return to the first wire
        that was refused, and leave out the part that its refusal named. Return False if the request cannot be sent
        again: nothing can be changed, or the key, the quota or the rate limit is the reason."""
        error = model_error(body, self.origin)
        if isinstance(error, (errors.AuthError, errors.QuotaExceeded, errors.RateLimited)):
            return False
        dialect, words = form.dialect, self._without_secrets(body.shown)
        is_wire_refused = refuses_wire(body, dialect.wire)
        if is_wire_refused and len(dialect.wires) > 1 and not form.is_back:
            form.moved = form.moved or (body, dialect.wire)
            self._facts.refuse(form, wire_part(dialect.wire), words)
            return True
        accepted, limit = max_output_tokens(body), self._limit(request, dialect.wire, form.max_output)
        if accepted is not None and limit is not None and accepted < limit:
            self._facts.refuse(form, OUTPUT_LIMIT, words, limit=accepted)
            return True
        part = None if isinstance(error, errors.ContextOverflow) else refused_part(body, form.dialect)
        if part is not None:
            self._facts.refuse(form, part, words)
            return True
        if isinstance(error, errors.BadRequest) and form.revert(body.searched):
            return True
        first = form.go_back() if is_wire_refused else None
        part = refused_part(first, form.dialect) if first is not None else None
        if first is not None and part is not None:
            self._facts.refuse(form, part, self._without_secrets(first.shown))
        return part is not None

    async def accept(self, request: Request, form: RequestForm) -> None:
        """Learn from the fact that the endpoint accepted `request` in this form: it refuses the parts that crow left
        out after a refusal, and accepts the parts that crow sent as a test."""

        def shows(part: str) -> bool:
            if is_wire(part):
                return bool(request.tools)
            sent, without = form.dialect, form.dialect_without(part)
            limit = form.known[part].limit
            if limit is not None:
                wanted = self._limit(request, sent.wire, form.max_output)
                return wanted is not None and wanted > limit
            encoder, wanted = wire_named(sent.wire).encoder, self._limit(request, sent.wire, None)
            return self._body(encoder(), request, sent, wanted) != self._body(encoder(), request, without, wanted)

        await self._facts.settle(form, shows)

    async def learn_from(self, answer: Answer) -> None:
        """Record which kinds of token counts the endpoint reports. Unless the user has configured the context window,
        read the list of models in the background if it was never read, and now and then while the window fills up."""
        wants_listing = await self._facts.add_usage(answer.usage)
        may_list = self._listing is None or (self._listing.done() and self._facts.is_listed)
        if wants_listing and may_list:
            # The answer does not wait for this task. `close` cancels the task.
            self._listing = asyncio.create_task(self._read_listing())

    async def settled(self) -> None:
        """Wait for the background task that reads the list of models, if there is one."""
        if self._listing is not None:
            await asyncio.wait([self._listing])

    async def _read_listing(self) -> None:
        with anyio.move_on_after(_BACKGROUND_LISTING_S), suppress(errors.ModelError):
            await self.models()

    def redact(self, error: errors.ModelError) -> None:
        """Remove secrets from the message of `error`."""
        if (words := self._without_secrets(str(error))) != str(error):
            error.args = (words,)

    def _without_secrets(self, words: str) -> str:
        """Return `words` with the key and the values of the user's headers masked. An endpoint may repeat them."""
        values = [value for _, value in self._endpoint.headers]
        auth = [value for name, value in self._endpoint.headers if "auth" in name.lower() and value.strip()]
        tokens = [value.split()[-1] for value in auth]  # TOKEN in `Bearer TOKEN`
        for secret in (self._endpoint.api_key, *values, *tokens):
            if secret and len(secret) >= _MIN_SECRET_CHARS:
                words = words.replace(secret, "[secret]")
        return words

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
                # `AnswerStream` limits how long reads may take.
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
                f"The proxy for {self.origin.endpoint} cannot be used: {reason}. Set proxy in config.toml, or "
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
                # This host takes any other value of `Authorization` for the token of a login.
                headers.pop("Authorization", None)
        return headers

    async def _post(self, body: bytes, wire: WireName) -> _HttpBody | ErrorBody:
        """Send `body`. Return the open response body, or the content of an HTTP error."""
        client, endpoint = await self._open(), self._endpoint
        base_url = (wire == "messages" and endpoint.messages_url) or endpoint.base_url
        url = base_url.rstrip("/") + wire_named(wire).path
        request = client.http.build_request("POST", url, content=body, headers=self._headers(client, wire))
        try:
            response = await client.http.send(request, stream=True)
            if response.is_success:
                return _HttpBody(response, self.origin)
            try:
                content = await _read_start(response, min(_ERROR_S, self.timeouts.idle_s), _MAX_ERROR_BYTES)
            finally:
                await response.aclose()
        except _CONNECT_ERRORS as error:
            raise self._connection_error(error) from None
        refusal = parse_error_response(response.status_code, content)
        wait_s = retry_after_s(response.headers, now_s=time.time(), status=response.status_code)
        return replace(refusal, wait_s=wait_s)

    def _connection_error(self, error: BaseException) -> errors.ModelError:
        who = self.origin.endpoint
        if isinstance(error, httpx2.TimeoutException):
            return errors.ModelTimeout(f"No connection to {who} within {self.timeouts.connect_s:g} s.")
        hint = " Check the network, the base URL and the proxy, if you use one."
        if is_local(self._endpoint.base_url):
            hint = " Is the server running?"
        reason = str(error).rstrip(".") or type(error).__name__
        return errors.NetworkError(f"No connection to {who}: {reason}.{hint}")

    async def _error_of(self, body: ErrorBody, wire: WireName) -> errors.ModelError:
        """Return the error to raise. If the endpoint does not serve the model, the message suggests other models."""
        error = model_error(body, replace(self.origin, wire=wire))
        if not isinstance(error, errors.ModelNotFound):
            return error
        names: tuple[str, ...] = ()
        with anyio.move_on_after(_SUGGESTIONS_S), suppress(errors.ModelError):
            names = tuple(each.name for each in await self.models())
        near = difflib.get_close_matches(self._endpoint.model, names, n=3, cutoff=0.4) or names[:5]
        return errors.ModelNotFound(f"{error} It offers {', '.join(near)}.") if near else error


class _EndpointTransport:
    """Sends one request of a :class:`AnswerStream`; see :class:`crow.llm.stream.RequestTransport`."""

    def __init__(self, model: EndpointClient, request: Request) -> None:
        self.timeouts = model.timeouts
        self._model = model
        self._request = request
        self._form: RequestForm | None = None
        self._describe: Callable[[], SentRequest] | None = None

    @property
    def origin(self) -> Origin:
        return self._model.origin

    async def send(self, request: Request) -> _HttpBody:
        if self._form is None:
            self._form = await self._model.form_for(request)
        response = await self._model.send(request, self._form)
        self._describe = response.describe
        return response

    def sent(self) -> SentRequest | None:
        return self._describe() if self._describe is not None else None

    def parser(self, request: Request) -> AnswerParser:
        return self._model.parser(request, self._form)

    async def adapt(self, request: Request, body: ErrorBody) -> bool:
        return self._form is not None and await self._model.adapt(request, self._form, body)

    async def accept(self) -> None:
        if self._form is not None:
            await self._model.accept(self._request, self._form)

    async def learn_from(self, answer: Answer) -> None:
        await self.accept()
        await self._model.learn_from(answer)

    def redact(self, error: errors.ModelError) -> None:
        self._model.redact(error)


async def _read_start(response: httpx2.Response, timeout_s: float, max_bytes: int) -> bytes:
    """Return the body of a response, or as much of it as arrives within `timeout_s` seconds, cut after `max_bytes`."""
    body = bytearray()
    with anyio.move_on_after(timeout_s):
        async with aclosing(response.aiter_bytes()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) >= max_bytes:
                    break
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


class _HttpBody:
    """The body of an open response; see :class:`crow.llm.stream.ResponseBody`.

    A background task reads the body, so that each `read` returns everything that has arrived. Servers send each token
    as a separate chunk, and reading many chunks at once is cheaper than reading them one by one.
    """

    def __init__(self, response: httpx2.Response, origin: Origin) -> None:
        self._response = response
        self._origin = origin
        self._arrived: list[bytes] = []
        """The pieces that were received and not read yet."""
        self._arrived_bytes = 0
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._reader = asyncio.create_task(self._read_all())
        self.describe: Callable[[], SentRequest] | None = None
        """Returns how the request was sent."""

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
        who, arrived = self._origin.endpoint, self._arrived
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
