"""Any endpoint that speaks OpenAI's chat completions: the model that crow is for.

Strategy: the `openai` client makes the connections and headers; bodies are encoded by `encode`, answers are read as raw
bytes by `sse` and `parser`, both for speed and because typed layers trust what the wire says. A part of a request that
the endpoint refuses by name is left out from then on, and remembered. The only home of `openai` and its HTTP client.
"""

from __future__ import annotations

import difflib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.to_thread
import httpcore2  # noqa: F401 - httpx2 would import it with the first request, in the event loop
import httpx2
import openai

from crow import __version__
from crow.domain.errors import (
    AuthError,
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
from crow.llm.dialect import dialect_of, most_output_tokens, refused_part
from crow.llm.encode import Encoder
from crow.llm.endpoint import Endpoint, Timeouts, is_local
from crow.llm.exchange import Exchange, Pace, Response
from crow.llm.failures import Complaint, Origin, complaint_of_response, failure, retry_after_s

__all__ = ["ChatCompletions"]

_MOST_ADAPTATIONS = 8
_MOST_ENCODERS = 64
_MODELS_WAIT_S = 3.0
_CLOSE_S = 1.0
_KEEPALIVE_S = 30.0
_NO_KEY = "none"
"""What is sent to endpoints that need no key: the client library insists on one."""


class _Refused(Exception):
    """An HTTP error status, not yet judged."""

    def __init__(self, complaint: Complaint, *, wait_s: float | None) -> None:
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
        pace: Pace | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._pace = pace or Pace()
        self._dialect = dialect_of(endpoint.base_url, takes_images=endpoint.takes_images)
        self._learned_window: int | None = None
        self._window_bound: int | None = None
        self._most_output: int | None = None
        self._is_loaded = memory is None
        self._encoders: OrderedDict[str, Encoder] = OrderedDict()
        self._client: openai.AsyncOpenAI | None = None
        self._opening = anyio.Lock()
        if learned is not None:
            self._take(learned)

    @property
    def info(self) -> ModelInfo:
        """What is known now: the configured window, else the learned one, bounded by what an overflow said."""
        windows = (self._endpoint.context_window or self._learned_window, self._window_bound)
        limits = (self._endpoint.max_output_tokens, self._most_output)
        return self._endpoint.info(
            window=min((window for window in windows if window is not None), default=None),
            max_output_tokens=min((limit for limit in limits if limit is not None), default=None),
            takes_images=self._dialect.takes_images,
        )

    @property
    def origin(self) -> Origin:
        """The endpoint and model for the words of errors; user names and queries of the URL are left out."""
        parts = urlsplit(self._endpoint.base_url)
        host = parts.netloc.rpartition("@")[2]
        shown = urlunsplit((parts.scheme, host, parts.path, "", ""))
        return Origin(endpoint=shown, model=self._endpoint.model)

    @property
    def timeouts(self) -> Timeouts:
        """As configured."""
        return self._endpoint.timeouts

    def check(self) -> None:
        """Whether a request can be made at all; see :meth:`crow.llm.Model.check`."""
        self._endpoint.check()

    def stream(self, request: Request) -> Exchange:
        """Send `request` when entered and read; leaving the block closes the connection."""
        return Exchange(self, request, pace=self._pace)

    async def close(self) -> None:
        """Close connections. Bounded; safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await client.close()

    async def models(self) -> tuple[str, ...]:
        """The names that the endpoint offers. :raises ~crow.domain.errors.ModelError:"""
        try:
            client = await self._opened()
            response = await client.get("/models", cast_to=httpx2.Response)
            body = json.loads(response.content)
        except openai.APIStatusError as error:
            raise failure(complaint_of_response(error.status_code, error.response.content), self.origin) from None
        except openai.OpenAIError as error:
            raise self._connection_error(error) from None
        except ValueError:
            raise ProtocolError(f"{self.origin.endpoint}/models is no JSON.") from None
        listed = body.get("data", body.get("models")) if isinstance(body, Mapping) else body
        names = (
            each.get("id") or each.get("name") if isinstance(each, Mapping) else each
            for each in (listed if isinstance(listed, list) else ())
        )
        return tuple(name for name in names if isinstance(name, str))

    async def send(self, request: Request) -> Response:
        """Send it, leaving out what the endpoint refuses by name. :raises ~crow.domain.errors.ModelError:"""
        self.check()
        await self._load()
        for _ in range(_MOST_ADAPTATIONS):
            limit = self._output_limit(request)
            body = self._encoder(request.cache_key).body(
                request,
                model=self._endpoint.model,
                endpoint=self._endpoint.name,
                dialect=self._dialect,
                limit=limit,
            )
            try:
                return await self._post(body)
            except _Refused as refused:
                if not await self._adapted(refused.complaint, limit):
                    raise await self._judged(refused) from None
        raise ProtocolError(f"{self.origin.endpoint} refused {_MOST_ADAPTATIONS} forms of the request, one by one.")

    async def heard(self, answer: Answer) -> None:
        """A learned window that an answer disproves is forgotten."""
        used = answer.usage.input_tokens if answer.usage is not None else None
        known = self._window_bound or self._learned_window
        if used is not None and known is not None and used > known:
            self._window_bound = self._learned_window = None
            await self._learn({"context_window": None})

    async def failed(self, error: ModelError) -> None:
        """Keep the window that an overflow told; take the key out of the words."""
        if isinstance(error, ContextOverflow) and error.limit is not None:
            self._window_bound = error.limit
            await self._learn({"context_window": error.limit})
        words = str(error)
        for secret in (self._endpoint.api_key, *(value for _, value in self._endpoint.headers)):
            if secret and len(secret) >= 6:
                words = words.replace(secret, "[secret]")
        if words != str(error):
            error.args = (words,)

    async def _opened(self) -> openai.AsyncOpenAI:
        async with self._opening:
            if self._client is None:
                # Certificates are read from disk, for 20 ms.
                self._client = await anyio.to_thread.run_sync(self._open)
            return self._client

    def _open(self) -> openai.AsyncOpenAI:
        endpoint = self._endpoint
        is_plain_local = is_local(endpoint.base_url) and endpoint.base_url.startswith("http:")
        return openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key or _NO_KEY,
            max_retries=0,
            default_headers={
                "User-Agent": f"crow/{__version__}",
                # Compression would hold back the first words of an answer.
                "Accept-Encoding": "identity",
                **dict(endpoint.headers),
            },
            http_client=openai.DefaultAsyncHttpx2Client(
                # Reads are timed by the exchange, which knows what it waits for.
                timeout=httpx2.Timeout(None, connect=endpoint.timeouts.connect_s),
                limits=httpx2.Limits(max_keepalive_connections=20, keepalive_expiry=_KEEPALIVE_S),
                # A proxy is not the way to this machine, and plain HTTP needs no certificates.
                trust_env=not is_plain_local,
                verify=not is_plain_local,
            ),
        )

    async def _post(self, body: bytes) -> _HttpBody:
        streamed: bool = True
        try:
            client = await self._opened()
            response = await client.post("/chat/completions", cast_to=httpx2.Response, content=body, stream=streamed)
        except openai.APIStatusError as error:
            wait_s = retry_after_s(error.response.headers, now_s=time.time())
            raise _Refused(complaint_of_response(error.status_code, error.response.content), wait_s=wait_s) from None
        except openai.OpenAIError as error:
            raise self._connection_error(error) from None
        assert isinstance(response, httpx2.Response)
        return _HttpBody(response, self.origin)

    def _connection_error(self, error: openai.OpenAIError) -> ModelError:
        who = self.origin.endpoint
        cause = error.__cause__
        reason = str(cause) or type(cause).__name__ if cause is not None else str(error)
        if isinstance(error, openai.APITimeoutError):
            return ModelTimeout(f"No connection to {who} within {self.timeouts.connect_s:g} s.")
        if isinstance(error, openai.APIConnectionError):
            hint = (
                " Is the server running?" if is_local(self._endpoint.base_url) else " Check the network and base URL."
            )
            return NetworkError(f"No connection to {who}: {reason}.{hint}")
        return ProtocolError(f"{who} answered in a way that cannot be read: {reason}")

    def _output_limit(self, request: Request) -> int | None:
        limits = (request.max_output_tokens or self._endpoint.max_output_tokens, self._most_output)
        return min((limit for limit in limits if limit is not None), default=None)

    async def _adapted(self, complaint: Complaint, limit: int | None) -> bool:
        """Whether the next request will differ in what was refused."""
        error = failure(complaint, self.origin)
        if isinstance(error, (AuthError, QuotaExceeded, RateLimited)):
            return False
        most = most_output_tokens(complaint)
        if most is not None and limit is not None and most < limit:
            self._most_output = most
            await self._learn({"max_output_tokens": most})
            return True
        part = None if isinstance(error, ContextOverflow) else refused_part(complaint, self._dialect)
        if part is None:
            return False
        self._dialect = self._dialect.refusing(part)
        await self._learn({"refused": list(self._dialect.refused)})
        return True

    async def _judged(self, refused: _Refused) -> ModelError:
        error = failure(refused.complaint, self.origin, wait_s=refused.wait_s)
        if isinstance(error, ModelNotFound):
            offered: tuple[str, ...] = ()
            with anyio.move_on_after(_MODELS_WAIT_S):
                try:
                    offered = await self.models()
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

    async def _load(self) -> None:
        if not self._is_loaded and self._memory is not None:
            self._take(await self._memory.learned(self._endpoint.base_url, self._endpoint.model))

    def _take(self, facts: Mapping[str, object]) -> None:
        self._is_loaded = True
        window, most, refused = facts.get("context_window"), facts.get("max_output_tokens"), facts.get("refused")
        self._learned_window = window if isinstance(window, int) and window > 0 else None
        self._most_output = most if isinstance(most, int) and most > 0 else None
        if isinstance(refused, (list, tuple)):
            self._dialect = self._dialect.refusing_all(part for part in refused if isinstance(part, str))

    async def _learn(self, facts: Mapping[str, object]) -> None:
        if self._memory is not None:
            await self._memory.learn(self._endpoint.base_url, self._endpoint.model, facts)


class _HttpBody:
    """The body of an open response."""

    def __init__(self, response: httpx2.Response, origin: Origin) -> None:
        self._response = response
        self._origin = origin
        self._pieces: AsyncIterator[bytes] = response.aiter_bytes()

    async def read(self) -> bytes:
        try:
            while True:
                piece = await anext(self._pieces, None)
                if piece is None:
                    return b""
                if piece:
                    return piece
        except httpx2.DecodingError as error:
            raise ProtocolError(f"{self._origin.endpoint} sent a body that cannot be decompressed: {error}") from None
        except (httpx2.RequestError, httpx2.StreamError, OSError, anyio.EndOfStream) as error:
            raise NetworkError(
                f"The connection to {self._origin.endpoint} broke: {error or type(error).__name__}."
            ) from None

    async def close(self) -> None:
        await self._response.aclose()
