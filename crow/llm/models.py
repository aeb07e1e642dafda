"""What an endpoint says of the models it offers: the answer to `GET /models`, in the shapes that servers give it.

Strategy: names and whatever is stated of each in a known place; the smallest of several windows counts, since it is
what one request may have. The size that a model was trained with says nothing of how it is served. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from crow.domain.errors import StoreError
from crow.domain.messages import Usage
from crow.llm import EndpointMemory, ModelInfo
from crow.llm.dialect import Dialect, dialect_of
from crow.llm.endpoint import Endpoint

__all__ = ["Learned", "Offered", "read_listing"]

_WINDOWS = (
    ("loaded_context_length",),  # LM Studio: as loaded, beside the largest possible
    ("max_model_len",),  # vLLM, SGLang
    ("meta", "n_ctx"),  # llama.cpp: as started
    ("context_length",),  # OpenRouter, Together, Moonshot
    ("top_provider", "context_length"),  # OpenRouter: the provider that is asked first
    ("context_window",),  # Groq
    ("max_context_length",),  # Mistral, LM Studio
    ("max_input_tokens",),  # LiteLLM
    ("inputTokenLimit",),  # Gemini's own form
)
_OUTPUTS = (("top_provider", "max_completion_tokens"), ("max_completion_tokens",), ("outputTokenLimit",))
_LEAST_WINDOW = 256
_NAME_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A model on offer. Sizes in tokens, prices in USD per million tokens; None: not stated."""

    name: str
    context_window: int | None = None
    max_output_tokens: int | None = None
    takes_images: bool | None = None
    input_price: float | None = None
    cached_price: float | None = None
    output_price: float | None = None


def read_listing(body: object) -> tuple[Offered, ...] | None:
    """The models that `body` lists, in its order; None if it is no listing."""
    listed = body.get("data", body.get("models")) if isinstance(body, Mapping) else body
    if not isinstance(listed, list):
        return None
    return tuple(offered for item in listed if (offered := _offered(item)) is not None)


def _offered(item: object) -> Offered | None:
    if isinstance(item, str):
        return Offered(name=item) if 0 < len(item) <= _NAME_CHARS else None
    if not isinstance(item, Mapping):
        return None
    name = item.get("id") or item.get("name") or item.get("model")
    if not isinstance(name, str) or len(name) > _NAME_CHARS:
        return None
    windows = list(_numbers(item, _WINDOWS[:3])) or list(_numbers(item, _WINDOWS[3:]))
    modalities = _at(item, ("architecture", "input_modalities"))
    return Offered(
        name=name,
        context_window=min(windows, default=None),
        max_output_tokens=min(_numbers(item, _OUTPUTS), default=None),
        takes_images="image" in modalities if isinstance(modalities, list) else None,
        input_price=_price(item, "prompt"),
        cached_price=_price(item, "input_cache_read"),
        output_price=_price(item, "completion"),
    )


def _numbers(item: Mapping[str, object], places: tuple[tuple[str, ...], ...]) -> Iterator[int]:
    for place in places:
        value = _at(item, place)
        if isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST_WINDOW:
            yield value


def _price(item: Mapping[str, object], key: str) -> float | None:
    """OpenRouter states USD per token, as text."""
    value = _at(item, ("pricing", key))
    try:
        price = float(value) if isinstance(value, (str, int, float)) else -1.0
    except ValueError:
        return None
    return round(price * 1e6, 6) if 0 <= price < 1 else None


def _at(item: Mapping[str, object], place: tuple[str, ...]) -> object:
    value: object = item
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


# FROM llm.learned: What is known of an endpoint beyond its configuration: listed by it or taught by its refusals.
#
# A configured window wins over one that the endpoint lists. What changes is written to the memory at once. What
# overflow
# errors teach of the window belongs to the agent, which knows what was sent.


logger = logging.getLogger(__name__)

LISTING_EVERY = 50
"""Answers that fill half of the window, until its size is looked up again."""


class Learned:
    """The facts about one model at one endpoint. `facts` is what `memory` knows; when None, `load` asks for it."""

    def __init__(self, endpoint: Endpoint, memory: EndpointMemory | None, facts: Mapping[str, object] | None) -> None:
        self._endpoint = endpoint
        self._memory = memory
        self._told: Offered | None = None
        self._most_output: int | None = None
        self._filled = 0
        self._is_loaded = memory is None
        self._info: ModelInfo | None = None
        self._known: tuple[object, ...] = ()
        self.dialect: Dialect = dialect_of(endpoint)
        if facts is not None:
            self._take(facts)

    @property
    def is_listed(self) -> bool:
        """Whether the endpoint's list of models was ever read."""
        return self._told is not None

    def wants_listing(self, usage: Usage | None) -> bool:
        """Whether the endpoint's list of models should be read after an answer: it could tell a window that is not
        known, or the answer fills half of the one that it told, and the server may have another by now."""
        if self._endpoint.context_window is not None:
            return False
        if self._told is None:
            return True
        window = self._told.context_window
        if window is None or usage is None or (usage.input_tokens or 0) * 2 < window:
            return False
        self._filled += 1
        return self._filled % LISTING_EVERY == 1

    @property
    def info(self) -> ModelInfo:
        """What is known now."""
        known = (self.dialect, self._told, self._most_output)
        if self._info is None or any(now is not then for now, then in zip(known, self._known, strict=True)):
            self._known, self._info = known, self._make_info()
        return self._info

    def _make_info(self) -> ModelInfo:
        endpoint, told = self._endpoint, self._told or Offered(name=self._endpoint.model)
        takes_images = self.dialect.takes_images and told.takes_images is not False
        info = endpoint.info(
            window=endpoint.context_window or told.context_window,
            max_output_tokens=self.output_limit(None),
            takes_images=takes_images,
        )
        if info.input_price is not None or info.output_price is not None:
            return info
        return replace(
            info, input_price=told.input_price, cached_price=told.cached_price, output_price=told.output_price
        )

    def output_limit(self, wanted: int | None) -> int | None:
        """The limit to send where `wanted` is asked for (None: what is configured); None to send none."""
        wanted = wanted or self._endpoint.max_output_tokens
        told = self._told.max_output_tokens if self._told is not None and wanted is not None else None
        return _least(wanted, told, self._most_output)

    async def load(self) -> None:
        """Ask the memory, unless its facts are here."""
        if not self._is_loaded and self._memory is not None:
            self._take(await self._memory.learned(self._endpoint.base_url, self._endpoint.model))

    async def refuses(self, part: str) -> None:
        """The endpoint does not take a part of a request."""
        self.dialect = self.dialect.refusing(part)
        await self._keep({"refused": list(self.dialect.refused)})

    async def takes_at_most(self, output_tokens: int) -> None:
        """The endpoint refused a larger output limit."""
        self._most_output = output_tokens
        await self._keep({"max_output_tokens": output_tokens})

    async def answered(self, usage: Usage | None) -> None:
        """A listed window that an answer disproves is forgotten."""
        used = usage.input_tokens if usage is not None else None
        if used is None:
            return
        if self._told is not None and self._told.context_window is not None and used > self._told.context_window:
            self._told = replace(self._told, context_window=None)
            await self._keep({"listed": _facts(self._told)})

    async def listed(self, offered: Offered | None) -> None:
        """The endpoint's list of models was read; `offered` is ours in it, None if it is not there."""
        self._told = offered or Offered(name=self._endpoint.model)
        await self._keep({"listed": _facts(self._told)})

    def _take(self, facts: Mapping[str, object]) -> None:
        self._is_loaded = True
        self._most_output = _size(facts.get("max_output_tokens"))
        refused, listed = facts.get("refused"), facts.get("listed")
        if isinstance(refused, (list, tuple)):
            self.dialect = self.dialect.refusing_all(part for part in refused if isinstance(part, str))
        if isinstance(listed, Mapping):
            images = listed.get("takes_images")
            self._told = Offered(
                name=self._endpoint.model,
                context_window=_size(listed.get("context_window")),
                max_output_tokens=_size(listed.get("max_output_tokens")),
                takes_images=images if isinstance(images, bool) else None,
                input_price=_learned_price(listed.get("input_price")),
                cached_price=_learned_price(listed.get("cached_price")),
                output_price=_learned_price(listed.get("output_price")),
            )

    async def _keep(self, facts: Mapping[str, object]) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(self._endpoint.base_url, self._endpoint.model, facts)
        except StoreError as error:  # it is learned again another time; an answer is worth more than what it taught
            logger.warning("What %s taught could not be kept: %s", self._endpoint.base_url, error)


def _facts(offered: Offered) -> dict[str, object]:
    stated = {
        "context_window": offered.context_window,
        "max_output_tokens": offered.max_output_tokens,
        "takes_images": offered.takes_images,
        "input_price": offered.input_price,
        "cached_price": offered.cached_price,
        "output_price": offered.output_price,
    }
    return {key: value for key, value in stated.items() if value is not None}


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _learned_price(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None
