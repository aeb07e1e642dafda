"""A model at any endpoint that speaks one of the wires.

The wire's encoder writes the body of a request, `EndpointConnection` sends it, and `AnswerStream` reads the answer. If
an endpoint refuses a part of a request by name, or a whole wire, crow remembers this and sends later requests without
that part or on another wire.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from datetime import date
from functools import cache, lru_cache, partial
from urllib.parse import urlencode

import anyio

from crow.domain import errors
from crow.domain.messages import Answer, SentRequest, WireName
from crow.llm import EndpointMemory, ModelInfo, Request
from crow.llm.connection import EndpointConnection, HttpBody
from crow.llm.dialect import Dialect, is_wire, wire_part
from crow.llm.endpoint import Endpoint
from crow.llm.errors import ErrorBody, Origin, max_output_tokens, model_error, refused_part, refuses_wire
from crow.llm.facts import OUTPUT_LIMIT, utc_today
from crow.llm.form import RequestForm
from crow.llm.learning import EndpointFacts
from crow.llm.listing import Offered, last_of_page, read_listing
from crow.llm.parser import AnswerParser
from crow.llm.sent import sent_request
from crow.llm.stream import MAX_ADAPTATIONS, AnswerStream, RetryTiming
from crow.llm.wires import AnyEncoder, wire_named

_MAX_ENCODERS = 64
"""At most this many sessions keep their encoded messages. For each further session, the messages of the least recently
used one are dropped."""

MAX_LISTING_BYTES = 32 * 1024 * 1024
LISTING_S = 30.0
"""All pages of the list of models together may have at most this many bytes, and take at most this many seconds."""

MAX_LISTING_PAGES = 100
"""Crow reads at most this many pages of the list of models, and ignores further ones."""

_BACKGROUND_LISTING_S = 1.5
"""The limit if the list of models is read after an answer, to learn the context window."""

_SUGGESTIONS_S = 3.0
"""The limit if the list is read to suggest other models in an error message."""

_CLOSE_TIMEOUT_S = 1.0
_MIN_SECRET_CHARS = 6
"""Shorter header values, such as `true`, are not masked in error messages: they may occur there as ordinary words."""

_DIGEST_AFTER_S = 0.05
"""The digest of a request is computed this many seconds after the request was built, while the model thinks. If the
answer is complete earlier, the digest is computed then."""


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
        self.endpoint = endpoint
        self.facts = EndpointFacts(endpoint, memory, learned or {}, today=today)
        self.connection = EndpointConnection(endpoint)
        # Returns the encoder of the session that has this cache key.
        self.encoder = lru_cache(_MAX_ENCODERS)(lambda _cache_key, wire: wire_named(wire).encoder())
        self._timing = timing or RetryTiming()
        self._listing: asyncio.Task[None] | None = None
        """The task that reads the list of models in the background. It may have ended."""
        self._streams = 0
        """The number of open streams."""
        self._is_retired = False

    @property
    def info(self) -> ModelInfo:
        """The facts that crow knows about the model now. A configured context window takes precedence over a listed
        one."""
        return self.facts.info

    @property
    def origin(self) -> Origin:
        """The endpoint and model for error messages."""
        endpoint, wire = self.endpoint, self.facts.info.wire
        return Origin(endpoint=endpoint.base_url, model=endpoint.model, wire=wire, key_hint=endpoint.key_hint)

    def check(self) -> None:
        """See :meth:`crow.llm.Model.check`."""
        self.endpoint.check()

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AnswerStream]:
        """Return a stream with the answer to `request`. The request is sent when the stream is first read. Leaving the
        context manager closes the connection."""
        if request.thought_level is None and self.endpoint.thought_level is not None:
            request = replace(request, thought_level=self.endpoint.thought_level)
        self._streams += 1
        try:
            async with aclosing(AnswerStream(_EndpointTransport(self, request), timing=self._timing)) as stream:
                yield stream
        finally:
            self._streams -= 1
            if self._is_retired and not self._streams:
                await self.close()

    async def retire(self) -> None:
        """Close the connections as soon as no stream is open. A running turn may still use the model: a later stream
        opens a connection of its own."""
        self._is_retired = True
        if not self._streams:
            await self.close()

    async def close(self) -> None:
        """Close the connections within a limited time. `close` may be called more than once."""
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            if self._listing is not None and self._listing.cancel():
                await asyncio.wait([self._listing])
            await self.connection.close()

    async def models(self) -> tuple[Offered, ...]:
        """Return the models that the endpoint lists.

        :raises ~crow.domain.errors.ModelError: the list cannot be read.
        """
        try:
            offered = await self._list()
        except errors.ModelError as error:
            self.redact(error)
            raise
        await self.facts.set_listed(next((each for each in offered if each.name == self.endpoint.model), None))
        return offered

    async def _list(self) -> tuple[Offered, ...]:
        """Return the list of models. It is read with the headers of the first wire. If the endpoint refuses these and
        may speak Messages, the list is read with the headers of Messages."""
        first, *others = self.endpoint.dialect.wires
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
                content = await self.connection.get_models(wire, query, max_bytes=room)
                if isinstance(content, ErrorBody):
                    raise model_error(content, self.origin)
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

    async def learn_from(self, answer: Answer) -> None:
        """Record which kinds of token counts the endpoint reports. Unless the user has configured the context window,
        read the list of models in the background if it was never read, and now and then while the window fills up."""
        wants_listing = await self.facts.add_usage(answer.usage)
        may_list = self._listing is None or (self._listing.done() and self.facts.is_listed)
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
        if (words := self.without_secrets(str(error))) != str(error):
            error.args = (words,)

    def without_secrets(self, words: str) -> str:
        """Return `words` with the key and the values of the user's headers masked. An endpoint may repeat them."""
        values = [value for _, value in self.endpoint.headers]
        auth = [value for name, value in self.endpoint.headers if "auth" in name.lower() and value.strip()]
        tokens = [value.split()[-1] for value in auth]  # TOKEN in `Bearer TOKEN`
        for secret in (self.endpoint.api_key, *values, *tokens):
            if secret and len(secret) >= _MIN_SECRET_CHARS:
                words = words.replace(secret, "[secret]")
        return words


class _EndpointTransport:
    """Sends one request in the form that the endpoint accepts; see :class:`crow.llm.stream.RequestTransport`."""

    def __init__(self, model: EndpointClient, request: Request) -> None:
        self.timeouts = model.endpoint.timeouts
        self._model = model
        self._endpoint = model.endpoint
        self._facts = model.facts
        self._request = request
        self._form: RequestForm | None = None
        """The form of the request. None until it is sent for the first time."""
        self._describe: Callable[[], SentRequest] | None = None
        """Returns the record of the request as it was last sent. None until the endpoint has accepted the request."""

    @property
    def origin(self) -> Origin:
        return self._model.origin

    def parser(self) -> AnswerParser:
        wire = self._facts.info.wire if self._form is None else self._form.dialect.wire
        return wire_named(wire).parser(self._request.tools, origin=replace(self.origin, wire=wire))

    def sent(self) -> SentRequest | None:
        return self._describe() if self._describe is not None else None

    def redact(self, error: errors.ModelError) -> None:
        self._model.redact(error)

    async def send(self) -> HttpBody:
        """See `RequestTransport`. If the endpoint refuses a part of the request, change its form and send it again."""
        self._model.check()
        if self._form is None:
            await self._facts.refresh()
            self._form = self._facts.form(self._request.cache_key, has_tools=bool(self._request.tools))
        form, words = self._form, ""
        for _ in range(MAX_ADAPTATIONS):
            dialect = form.dialect
            wire, limit = dialect.wire, self._limit(dialect.wire, form.max_output)
            body = self._body(self._model.encoder(self._request.cache_key, wire), dialect, limit)
            endpoint, extra = self._endpoint.name, self._endpoint.extra_body
            describe = cache(
                partial(sent_request, body, self._request, endpoint=endpoint, dialect=dialect, limit=limit, extra=extra)
            )
            asyncio.get_running_loop().call_later(_DIGEST_AFTER_S, describe)
            response = await self._model.connection.post(body, wire)
            if isinstance(response, HttpBody):
                self._describe = describe
                return response
            if not self.adapt(response):
                if form.moved is not None and refuses_wire(response, wire):
                    # No wire works. The refusal of the first wire says most about the reason.
                    response, wire = form.moved
                error = await self._error_of(response, wire)
                if isinstance(error, errors.ContextOverflow):
                    # The endpoint complained only about the length, so crow treats the rest of the form as accepted.
                    # But the endpoint may check the length first, so this proves nothing about the tested parts.
                    form.tested.clear()
                    await self.accept()
                raise error
            words = response.shown
        who = self.origin.endpoint
        raise errors.ProtocolError(f"{who} refused the request in {MAX_ADAPTATIONS} forms. The last reason: {words}.")

    def adapt(self, body: ErrorBody) -> bool:
        """Change the form after the refusal in `body`, so that the request can be sent again. Try in this order: use
        the next wire if this wire was refused; lower the output limit; leave out the part that the refusal names; if it
        is a bad request that names none, see `RequestForm.revert`. If all wires were refused, return to the first wire
        that was refused, and leave out the part that its refusal named. Return False if the request cannot be sent
        again: nothing can be changed, or the key, the quota or the rate limit is the reason."""
        error, form = model_error(body, self.origin), self._form
        if form is None or isinstance(error, (errors.AuthError, errors.QuotaExceeded, errors.RateLimited)):
            return False
        dialect, words = form.dialect, self._model.without_secrets(body.shown)
        is_wire_refused = refuses_wire(body, dialect.wire)
        if is_wire_refused and len(dialect.wires) > 1 and not form.is_back:
            form.moved = form.moved or (body, dialect.wire)
            self._facts.refuse(form, wire_part(dialect.wire), words)
            return True
        accepted, limit = max_output_tokens(body), self._limit(dialect.wire, form.max_output)
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
            self._facts.refuse(form, part, self._model.without_secrets(first.shown))
        return part is not None

    async def accept(self) -> None:
        """Learn from the fact that the endpoint accepted the request in this form: it refuses the parts that crow left
        out after a refusal, and accepts the parts that crow sent as a test."""
        form = self._form
        if form is None:
            return

        def shows(part: str) -> bool:
            if is_wire(part):
                return bool(self._request.tools)
            sent, without = form.dialect, form.dialect_without(part)
            limit = form.known[part].limit
            if limit is not None:
                wanted = self._limit(sent.wire, form.max_output)
                return wanted is not None and wanted > limit
            encoder, wanted = wire_named(sent.wire).encoder, self._limit(sent.wire, None)
            return self._body(encoder(), sent, wanted) != self._body(encoder(), without, wanted)

        await self._facts.settle(form, shows)

    async def learn_from(self, answer: Answer) -> None:
        await self.accept()
        await self._model.learn_from(answer)

    def _body(self, encoder: AnyEncoder, dialect: Dialect, limit: int | None) -> bytes:
        """Return the bytes of the request. `limit` is the output limit to send."""
        endpoint = self._endpoint
        return encoder.body(
            self._request,
            model=endpoint.model,
            endpoint=endpoint.name,
            dialect=dialect,
            limit=limit,
            extra=endpoint.extra_body,
        )

    def _limit(self, wire: WireName, known: int | None) -> int | None:
        """Return the output limit to send. `known` is the largest limit that the endpoint is known to accept."""
        wanted = self._request.max_output_tokens or self._endpoint.max_output_tokens
        return self._facts.output_limit(wanted or wire_named(wire).default_limit(self._endpoint.model), known)

    async def _error_of(self, body: ErrorBody, wire: WireName) -> errors.ModelError:
        """Return the error to raise. If the endpoint does not serve the model, the message suggests other models."""
        error = model_error(body, replace(self.origin, wire=wire))
        if not isinstance(error, errors.ModelNotFound):
            return error
        names: tuple[str, ...] = ()
        with anyio.move_on_after(_SUGGESTIONS_S), suppress(errors.ModelError):
            names = tuple(each.name for each in await self._model.models())
        near = difflib.get_close_matches(self._endpoint.model, names, n=3, cutoff=0.4) or names[:5]
        return errors.ModelNotFound(f"{error} It offers {', '.join(near)}.") if near else error
