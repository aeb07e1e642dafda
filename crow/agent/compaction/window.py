"""The context window of a model: as declared, lowered by what its endpoint has shown.

Strategy: what was learned is one fact of the endpoint, kept across sessions and processes, bound to what was declared
when it was learned: a new declaration makes it void, and so does an answer to a longer request. Knows the memory as a
protocol only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crow.domain.errors import ContextOverflow
    from crow.llm import EndpointMemory, ModelInfo

__all__ = ["DEFAULT_WINDOW", "Window", "window_of"]

DEFAULT_WINDOW = 128_000
"""Tokens assumed of a model whose window nobody has told."""

FACT = "window"


def window_of(info: ModelInfo, facts: Mapping[str, object], *, declared: int | None = None) -> int:
    """Tokens that a request to the model and its answer may have together, `facts` being known of its endpoint.

    `declared`: what was declared before the model itself found out more.
    """
    known = declared_window(info, facts)
    fact = facts.get(FACT)
    if not isinstance(fact, dict) or fact.get("declared") not in (known, declared):
        return known
    tokens = fact.get("tokens")
    return min(known, tokens) if isinstance(tokens, int) and tokens > 0 else known


class Window:
    """What is known of the window of one model. Without a `memory`, nothing outlasts this object."""

    def __init__(self, memory: EndpointMemory | None = None) -> None:
        self._memory = memory
        self._facts: Mapping[str, object] = {}
        self._declared: int | None = None
        self._endpoint = ""

    async def look_up(self, info: ModelInfo) -> None:
        """Read what was learned of the model before."""
        if self._memory is not None:
            self._facts = await self._memory.learned(*endpoint_and_model(info))
        self._endpoint, self._declared = info.endpoint, declared_window(info, self._facts)

    def is_of(self, info: ModelInfo) -> bool:
        """Whether it has looked up this model, declared as it is now."""
        return (self._endpoint, self._declared) == (info.endpoint, declared_window(info, self._facts))

    def tokens(self, info: ModelInfo) -> int:
        """The window as it is taken now."""
        if info.endpoint != self._endpoint:
            return window_of(info, {})
        return window_of(info, self._facts, declared=self._declared)

    async def refused(self, info: ModelInfo, error: ContextOverflow, used: int) -> None:
        """A request of `used` tokens was too long: the limit that the endpoint states, else nine tenths of what it
        refused."""
        window = self.tokens(info)
        await self.lower(info, min(window, error.limit) if error.limit else min(window, error.size or used) * 9 // 10)

    async def lower(self, info: ModelInfo, tokens: int) -> None:
        """The window is `tokens`, or less."""
        if info.endpoint != self._endpoint:
            await self.look_up(info)
        await self._learn(info, {"declared": self._declared, "tokens": tokens})

    async def answered(self, info: ModelInfo, tokens: int) -> None:
        """A request of `tokens` was answered: a learned window below that was wrong."""
        if FACT in self._facts and self._facts[FACT] is not None and self.tokens(info) < tokens:
            await self._learn(info, None)

    async def _learn(self, info: ModelInfo, fact: object) -> None:
        self._facts = {**self._facts, FACT: fact}
        if self._memory is not None:
            await self._memory.learn(*endpoint_and_model(info), {FACT: fact})


def declared_window(info: ModelInfo, facts: Mapping[str, object]) -> int:
    """As configured, else as the endpoint told once, else a guess."""
    told = facts.get("context_window")
    return info.context_window or (told if isinstance(told, int) and told > 0 else DEFAULT_WINDOW)


def endpoint_and_model(info: ModelInfo) -> tuple[str, str]:
    """The two halves of `ModelInfo.endpoint`: base URL and model."""
    base_url, _, model = info.endpoint.partition(" ")
    return base_url, model
