"""What endpoints reveal about their models, in the answer to `GET /models` and in refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from crow.domain.errors import StoreError
from crow.domain.messages import Usage
from crow.llm import EndpointMemory, ModelInfo, ModelLimits
from crow.llm.endpoint import Endpoint

logger = logging.getLogger(__name__)

# If several windows are stated, the smallest is used, because a single request may not exceed it. The window that a
# model was trained with (llama.cpp's `n_ctx_train`) is ignored: it does not tell how the model is served.
_LOADED_WINDOWS = (
    ("loaded_context_length",),  # LM Studio
    ("max_model_len",),  # vLLM, SGLang
    ("meta", "n_ctx"),  # llama.cpp
)
_POSSIBLE_WINDOWS = (
    ("context_length",),  # OpenRouter, Together, Moonshot
    ("top_provider", "context_length"),  # OpenRouter, for its preferred provider
    ("context_window",),  # Groq
    ("max_context_length",),  # Mistral, LM Studio
    ("max_input_tokens",),  # LiteLLM
    ("inputTokenLimit",),  # Gemini's native API
)
_OUTPUTS = (("top_provider", "max_completion_tokens"), ("max_completion_tokens",), ("outputTokenLimit",))
_MIN_WINDOW = 256
_MAX_WINDOW = 1_000_000_000
_MAX_NAME_CHARS = 200
_LISTING_INTERVAL = 50
"""Of the answers that fill at least half of the context window, one in this many makes crow read the list of models."""


_PRICES = ("input_price", "cached_price", "cache_write_price", "output_price")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(ModelLimits):
    """A model that an endpoint lists."""

    name: str


def read_listing(body: object) -> tuple[Offered, ...] | None:
    """Return the models that `body` lists, in the same order. Return None if `body` is not a list of models."""
    listed = body.get("data", body.get("models")) if isinstance(body, Mapping) else body
    if not isinstance(listed, list):
        return None
    return tuple(offered for item in listed if (offered := _offered(item)) is not None)


def _offered(item: object) -> Offered | None:
    if isinstance(item, str):
        item = {"id": item}
    name = item.get("id") or item.get("name") or item.get("model") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:
        return None
    windows = list(_sizes(item, _LOADED_WINDOWS)) or list(_sizes(item, _POSSIBLE_WINDOWS))
    return Offered(
        name=name,
        context_window=min(windows, default=None),
        max_output_tokens=min(_sizes(item, _OUTPUTS), default=None),
        input_price=_price(item, "prompt"),
        cached_price=_price(item, "input_cache_read"),
        cache_write_price=_price(item, "input_cache_write"),
        output_price=_price(item, "completion"),
    )


def _sizes(item: Mapping[str, object], places: tuple[tuple[str, ...], ...]) -> Iterator[int]:
    for place in places:
        size = _number(_value_at(item, place))
        if size is not None and _MIN_WINDOW <= size <= _MAX_WINDOW:
            yield int(size)


def _price(item: Mapping[str, object], key: str) -> float | None:
    """Return the price in USD per million tokens. OpenRouter states USD per token, as text."""
    price = _number(_value_at(item, ("pricing", key)))
    return round(price * 1e6, 6) if price is not None and 0 <= price < 1 else None


def _number(value: object) -> float | None:
    """Return a number that an endpoint stated, perhaps as text. Return None for anything else."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_possible(name: str, value: object) -> bool:
    """Whether a stored value can be the limit or price of this name."""
    if name in _PRICES:
        price = None if isinstance(value, str) else _number(value)
        return price is not None and price >= 0
    return type(value) is int and 0 < value <= _MAX_WINDOW


def _value_at(item: Mapping[str, object], place: tuple[str, ...]) -> object:
    value: object = item
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def facts_of(offered: Offered) -> Mapping[str, object]:
    """Return what to store about a listed model."""
    stated = {key: value for key, value in asdict(offered).items() if key != "name" and value is not None}
    return {"listed": stated}


class EndpointFacts:
    """What crow knows about one model at one endpoint in addition to its configuration.

    `learned` contains the facts that `memory` had stored when this process began. Changes are written to `memory` at
    once. A configured context window takes precedence over a listed one. Overflow errors are handled by the
    agent and not here, because the agent knows what was sent.
    """

    def __init__(self, endpoint: Endpoint, memory: EndpointMemory | None, learned: Mapping[str, object]) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._info: ModelInfo | None = None  # None: must be computed again
        self._listed: Offered | None = None
        self._filled = 0
        limit, refused, listed = (learned.get(key) for key in ("max_output_tokens", "refused", "listed"))
        self._max_output = limit if type(limit) is int and 0 < limit <= _MAX_WINDOW else None
        self.dialect = endpoint.dialect
        for part in refused if isinstance(refused, (list, tuple)) else ():
            if isinstance(part, str):
                self.dialect = self.dialect.refusing(part)
        if isinstance(listed, Mapping):
            known = {each.name: listed.get(each.name) for each in fields(ModelLimits)}
            limits: dict[str, Any] = {key: value for key, value in known.items() if _is_possible(key, value)}
            self._listed = Offered(name=endpoint.model, **limits)

    @property
    def is_listed(self) -> bool:
        """Whether the endpoint's list of models was ever read."""
        return self._listed is not None

    @property
    def info(self) -> ModelInfo:
        """The configured model. Unknown limits and prices are taken from the endpoint's list of models."""
        if self._info is None:
            self._info = self._current_info()
        return self._info

    def _current_info(self) -> ModelInfo:
        info, listed = self._endpoint.info, self._listed
        window = info.context_window or (listed.context_window if listed is not None else None)
        info = replace(
            info,
            context_window=window,
            max_output_tokens=self.output_limit(None),
            refused=self.dialect.refused_in_messages,
        )
        if listed is None or info.input_price is not None or info.output_price is not None:
            return info
        prices = {key: getattr(listed, key) for key in _PRICES}
        return replace(info, **prices)

    def output_limit(self, wanted: int | None) -> int | None:
        """Return the output limit to send, or None to send no limit. This is `wanted`, or the configured limit if
        `wanted` is None, but never more than the endpoint accepts."""
        wanted = wanted or self._endpoint.max_output_tokens
        listed = self._listed.max_output_tokens if self._listed is not None and wanted is not None else None
        return min((limit for limit in (wanted, listed, self._max_output) if limit is not None), default=None)

    async def add_refusal(self, part: str) -> None:
        """Note that the endpoint refused a part of a request."""
        self.dialect, self._info = self.dialect.refusing(part), None
        await self._store({"refused": list(self.dialect.refused)})

    async def set_max_output(self, tokens: int) -> None:
        """Note that the endpoint refused an output limit above `tokens`."""
        self._max_output, self._info = tokens, None
        await self._store({"max_output_tokens": tokens})

    async def set_listed(self, offered: Offered | None) -> None:
        """Note what the endpoint's list of models says about this model. If `offered` is None, the list does not
        contain the model."""
        self._listed, self._info = offered or Offered(name=self._endpoint.model), None
        await self._store(facts_of(self._listed))

    async def add_usage(self, usage: Usage | None) -> bool:
        """Forget the listed context window if a request was longer. Return whether to read the list of models: it was
        never read, or the window is filling up and the server may have changed its size."""
        used = (usage.input_tokens or 0) if usage is not None else 0
        window = self._listed.context_window if self._listed is not None else None
        if self._listed is not None and window is not None and used > window:
            await self.set_listed(replace(self._listed, context_window=None))
            window = None
        if self._endpoint.context_window is not None:
            return False
        if self._listed is None:
            return True
        if window is None or used * 2 < window:
            return False
        self._filled += 1
        return self._filled % _LISTING_INTERVAL == 1

    async def _store(self, facts: Mapping[str, object]) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(self._endpoint.base_url, self._endpoint.model, facts)
        except StoreError as error:  # the answer is more important than storing what was learned from it
            logger.warning("Facts about %s could not be stored: %s", self._endpoint.base_url, error)
