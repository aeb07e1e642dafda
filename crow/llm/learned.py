"""What is known of an endpoint beyond its configuration: listed by it or taught by its refusals.

A configured window wins over one that the endpoint lists. What changes is written to the memory at once. What overflow
errors teach of the window belongs to the agent, which knows what was sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from crow.domain.errors import StoreError
from crow.domain.messages import Usage
from crow.llm import EndpointMemory, ModelInfo
from crow.llm.dialect import Dialect, dialect_of
from crow.llm.endpoint import Endpoint
from crow.llm.listing import Offered

__all__ = ["Learned"]

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
                input_price=_price(listed.get("input_price")),
                cached_price=_price(listed.get("cached_price")),
                output_price=_price(listed.get("output_price")),
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


def _price(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None
