"""Any endpoint that speaks OpenAI's chat completions: the model that crow is for.

Strategy: the `openai` client says what headers there are and asks for models; bodies are encoded by `encode`, sent over
the same HTTP client as they are, and answers are read as raw bytes by `sse` and `parser`, both for speed and because
typed layers trust what the wire says. A part of a request that the endpoint refuses by name is left out from then on,
and remembered. The only home of `openai` and its HTTP client.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.to_thread
import httpcore2  # noqa: F401 - httpx2 would import it with the first request, in the event loop
import httpx2
import openai
from openai import RequestOptions

from crow import __version__
from crow.domain.errors import (
    AuthError,
    ConfigError,
    ContextOverflow,
    ModelError,
    ModelNotFound,
    ModelTimeout,
    NetworkError,
    ProtocolError,
    QuotaExceeded,
    RateLimited,
)
from crow.domain.messages import Answer
from crow.llm import EndpointMemory, ModelInfo, Request
from crow.llm.dialect import most_output_tokens, refused_part
from crow.llm.encode import Encoder
from crow.llm.endpoint import Endpoint, EndpointTimeouts, is_local
from crow.llm.errors import ErrorBody, Origin, model_error, parse_error_response, retry_after_s
from crow.llm.models import Learned, Offered, read_listing
from crow.llm.stream import MOST_ADAPTATIONS, ChatStream, Response, RetryTiming

__all__ = ["ChatCompletions"]

_MOST_ENCODERS = 64
_MODELS_WAIT_S = 3.0
_LISTING_WAIT_S = 1.5
_CLOSE_S = 1.0
_KEEPALIVE_S = 30.0
_MOST_ARRIVED = 256 * 1024
"""Bytes that wait to be read; beyond them the server has to wait."""
_TELLTALES = ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async", "Retry-Count")
_UNTOLD: RequestOptions = {"headers": {f"X-Stainless-{about}": openai.omit for about in _TELLTALES}}
"""Without what the client library would tell the endpoint of this machine and Python."""

_CONNECTING = (httpx2.RequestError, ssl.SSLError, anyio.EndOfStream)
"""What comes of a connection that cannot be made or breaks; not all of it is made the HTTP client's own error."""

_NO_KEY = "none"
"""What is sent to endpoints that need no key: the client library insists on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Client:
    """The client of an endpoint, and what each of its requests is made of."""

    api: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    template: httpx2.Request
    """A request without a body: merging all defaults anew for each one would cost it a tenth of a millisecond."""

    def request(self, body: bytes) -> httpx2.Request:
        """The request for a chat completion."""
        made = self.template
        return httpx2.Request(made.method, made.url, headers=made.headers, content=body, extensions=made.extensions)


class _Refused(Exception):
    """An HTTP error status, not yet judged."""

    def __init__(self, complaint: ErrorBody, *, wait_s: float | None) -> None:
        super().__init__(complaint.message)
        self.complaint = complaint
        self.wait_s = wait_s


class ChatCompletions:
    """One model at one endpoint; see :class:`crow.llm.Model`. Shared by sessions; opened lazily by its first request.

    `learned` is what `memory` knows already; when not given it is asked for before the first request.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        memory: EndpointMemory | None = None,
        learned: Mapping[str, object] | None = None,
        pace: RetryTiming | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._pace = pace or RetryTiming()
        self._learned = Learned(endpoint, memory, learned)
        self._looking: asyncio.Task[None] | None = None
        self._encoders: OrderedDict[str, Encoder] = OrderedDict()
        self._client: _Client | None = None
        self._opening = anyio.Lock()

    @property
    def info(self) -> ModelInfo:
        """What is known now: the configured window, else the one that the endpoint lists."""
        return self._learned.info

    @property
    def origin(self) -> Origin:
        """The endpoint and model for the words of errors; user names and queries of the URL are left out."""
        parts = urlsplit(self._endpoint.base_url)
        host = parts.netloc.rpartition("@")[2]
        shown = urlunsplit((parts.scheme, host, parts.path, "", ""))
        return Origin(endpoint=shown, model=self._endpoint.model)

    @property
    def timeouts(self) -> EndpointTimeouts:
        """As configured."""
        return self._endpoint.timeouts

    def check(self) -> None:
        """Whether a request can be made at all; see :meth:`crow.llm.Model.check`."""
        self._endpoint.check()

    def stream(self, request: Request) -> ChatStream:
        """Send `request` when entered and read; leaving the block closes the connection."""
        return ChatStream(self, request, pace=self._pace)

    async def close(self) -> None:
        """Close connections. Bounded; safe to call twice."""
        client, self._client = self._client, None
        with anyio.move_on_after(_CLOSE_S, shield=True):
            if self._looking is not None and self._looking.cancel():
                await asyncio.wait([self._looking])
            if client is not None:
                await client.api.close()

    async def models(self) -> tuple[Offered, ...]:
        """What the endpoint offers. :raises ~crow.domain.errors.ModelError:"""
        try:
            offered = await self._list()
        except ModelError as error:
            await self.failed(error)
            raise
        await self._learned.listed(next((each for each in offered if each.name == self._endpoint.model), None))
        return offered

    async def _list(self) -> tuple[Offered, ...]:
        who = self.origin.endpoint
        try:
            api = (await self._opened()).api
            response = await api.get("/models", cast_to=httpx2.Response, options=_UNTOLD)
            offered = read_listing(json.loads(response.content))
        except openai.APIStatusError as error:
            raise model_error(parse_error_response(error.status_code, error.response.content), self.origin) from None
        except openai.APIConnectionError as error:
            raise self._connection_error(error.__cause__ or error) from None
        except openai.OpenAIError as error:
            raise ProtocolError(f"{who} answered in a way that cannot be read: {error}") from None
        except ValueError:
            raise ProtocolError(f"{who}/models is no JSON.") from None
        if offered is None:
            raise ProtocolError(f"{who}/models is no list of models.")
        return offered

    async def send(self, request: Request) -> Response:
        """Send it, leaving out what the endpoint refuses by name. :raises ~crow.domain.errors.ModelError:"""
        self.check()
        await self._learned.load()
        if request.thought_level is None and self._endpoint.thought_level is not None:
            request = replace(request, thought_level=self._endpoint.thought_level)
        for _ in range(MOST_ADAPTATIONS):
            body = self._encoder(request.cache_key).body(
                request,
                model=self._endpoint.model,
                endpoint=self._endpoint.name,
                dialect=self._learned.dialect,
                limit=self._learned.output_limit(request.max_output_tokens),
                extra=self._endpoint.extra_body,
            )
            try:
                return await self._post(body)
            except _Refused as refused:
                if not await self.adapted(request, refused.complaint):
                    raise await self._judged(refused) from None
        raise ProtocolError(f"{self.origin.endpoint} refused {MOST_ADAPTATIONS} forms of the request, one by one.")

    async def adapted(self, request: Request, complaint: ErrorBody) -> bool:
        """Whether the next request will differ in what was refused."""
        error = model_error(complaint, self.origin)
        if isinstance(error, (AuthError, QuotaExceeded, RateLimited)):
            return False
        most, limit = most_output_tokens(complaint), self._learned.output_limit(request.max_output_tokens)
        if most is not None and limit is not None and most < limit:
            await self._learned.takes_at_most(most)
            return True
        part = None if isinstance(error, ContextOverflow) else refused_part(complaint, self._learned.dialect)
        if part is not None:
            await self._learned.refuses(part)
        return part is not None

    async def heard(self, answer: Answer) -> None:
        """What the answer teaches; where the window is not known, or filling up, the list of models is read."""
        await self._learned.answered(answer.usage)
        may_look = self._looking is None or (self._looking.done() and self._learned.is_listed)
        if may_look and self._learned.wants_listing(answer.usage):
            # A task of its own, ended by `close`: the answer does not wait for what matters to the next request.
            self._looking = asyncio.create_task(self._look())

    async def settled(self) -> None:
        """Wait until the list of models was read, if it is being read."""
        if self._looking is not None:
            await asyncio.wait([self._looking])

    async def _look(self) -> None:
        with anyio.move_on_after(_LISTING_WAIT_S), suppress(ModelError):
            await self.models()

    async def failed(self, error: ModelError) -> None:
        """Take secrets out of the words."""
        words = str(error)
        for secret in (self._endpoint.api_key, *(value for _, value in self._endpoint.headers)):
            if secret and len(secret) >= 6:
                words = words.replace(secret, "[secret]")
        if words != str(error):
            error.args = (words,)

    async def _opened(self) -> _Client:
        if self._client is not None:
            return self._client
        async with self._opening:
            if self._client is None:
                # Certificates are read from disk, for 20 ms.
                self._client = await anyio.to_thread.run_sync(self._open)
            return self._client

    def _open(self) -> _Client:
        endpoint = self._endpoint
        is_plain_local = is_local(endpoint.base_url) and endpoint.base_url.startswith("http:")
        http = openai.DefaultAsyncHttpx2Client(
            # Reads are timed by the exchange, which knows what it waits for.
            timeout=httpx2.Timeout(None, connect=endpoint.timeouts.connect_s),
            limits=httpx2.Limits(max_keepalive_connections=20, keepalive_expiry=_KEEPALIVE_S),
            # A proxy of the environment is not the way to this machine, and plain HTTP needs no certificates.
            trust_env=not is_plain_local,
            proxy=endpoint.proxy,
            verify=_certificates(endpoint.ca_file) if endpoint.ca_file is not None else not is_plain_local,
        )
        client = openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key or _NO_KEY,
            max_retries=0,
            default_headers={
                "User-Agent": f"crow/{__version__}",
                # Compression would hold back the first words of an answer.
                "Accept-Encoding": "identity",
                **dict(endpoint.headers),
            },
            http_client=http,
        )
        url = f"{str(client.base_url).rstrip('/')}/chat/completions"
        request = http.build_request("POST", url, headers=_headers(client))
        del request.headers["Content-Length"]
        return _Client(api=client, http=http, template=request)

    async def _post(self, body: bytes) -> _HttpBody:
        client = await self._opened()
        try:
            response = await client.http.send(client.request(body), stream=True)
            if response.is_success:
                return _HttpBody(response, self.origin)
            try:
                complaint = parse_error_response(response.status_code, await response.aread())
            finally:
                await response.aclose()
        except _CONNECTING as error:
            raise self._connection_error(error) from None
        raise _Refused(complaint, wait_s=retry_after_s(response.headers, now_s=time.time()))

    def _connection_error(self, error: BaseException) -> ModelError:
        who = self.origin.endpoint
        if isinstance(error, httpx2.TimeoutException):
            return ModelTimeout(f"No connection to {who} within {self.timeouts.connect_s:g} s.")
        hint = " Is the server running?" if is_local(self._endpoint.base_url) else " Check the network and base URL."
        return NetworkError(f"No connection to {who}: {error or type(error).__name__}.{hint}")

    async def _judged(self, refused: _Refused) -> ModelError:
        error = model_error(refused.complaint, self.origin, wait_s=refused.wait_s)
        if isinstance(error, ModelNotFound):
            offered: tuple[str, ...] = ()
            with anyio.move_on_after(_MODELS_WAIT_S):
                try:
                    offered = tuple(each.name for each in await self.models())
                except ModelError:
                    offered = ()
            near = difflib.get_close_matches(self._endpoint.model, offered, n=3, cutoff=0.4) or offered[:5]
            if near:
                return ModelNotFound(f"{error} It offers {', '.join(near)}.")
        return error

    def _encoder(self, cache_key: str) -> Encoder:
        encoder = self._encoders.pop(cache_key, None) or Encoder()
        self._encoders[cache_key] = encoder
        if len(self._encoders) > _MOST_ENCODERS:
            self._encoders.popitem(last=False)
        return encoder


def _headers(client: openai.AsyncOpenAI) -> httpx2.Headers:
    """What `client` would send with each request, but for what it would tell of this machine."""
    headers = httpx2.Headers(client.auth_headers)
    for name, value in client.default_headers.items():
        if isinstance(value, str) and not name.startswith("X-Stainless-"):
            headers[name] = value
    return headers


def _certificates(file: str) -> ssl.SSLContext:
    """The authorities in `file`, and the usual ones. :raises ~crow.domain.errors.ConfigError: it cannot be read."""
    try:
        context = ssl.create_default_context()
        context.load_verify_locations(cafile=file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"The CA file {file} cannot be used: {reason}. Name a file of PEM certificates.") from error
    return context


class _HttpBody:
    """The body of an open response. A task reads it, so that all that has arrived is given out together.

    Servers send each token as a chunk of its own; what is done for each read is then done for many of them at once.
    """

    def __init__(self, response: httpx2.Response, origin: Origin) -> None:
        self._response = response
        self._origin = origin
        self._arrived: list[bytes] = []
        self._arrived_bytes = 0
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._reader = asyncio.create_task(self._read_all())

    async def read(self) -> bytes:
        """See :class:`crow.llm.stream.Response`."""
        while not self._arrived and not self._reader.done():
            self._has_news.clear()
            await self._has_news.wait()
        if not self._arrived:
            self._reader.result()  # raises what ended the reading
        data = b"".join(self._arrived)
        self._arrived.clear()
        self._arrived_bytes = 0
        self._has_room.set()
        return data

    async def close(self) -> None:
        """See :class:`crow.llm.stream.Response`."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._response.aclose()

    async def _read_all(self) -> None:
        """Read to the end. :raises ~crow.domain.errors.ModelError: the connection broke."""
        who, arrived = self._origin.endpoint, self._arrived
        try:
            async with aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    if not arrived:
                        self._has_news.set()
                    arrived.append(piece)
                    self._arrived_bytes += len(piece)
                    if self._arrived_bytes > _MOST_ARRIVED:
                        self._has_room.clear()
                        await self._has_room.wait()
        except httpx2.DecodingError as error:
            raise ProtocolError(f"{who} sent a body that cannot be decompressed: {error}") from None
        except (httpx2.RequestError, httpx2.StreamError, OSError, anyio.EndOfStream) as error:
            raise NetworkError(f"The connection to {who} broke: {error or type(error).__name__}.") from None
        finally:
            self._has_news.set()

    def _pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes; only one that is compressed has to pass the library's decoders."""
        is_plain = "Content-Encoding" not in self._response.headers
        return self._response.aiter_raw() if is_plain else self._response.aiter_bytes()
