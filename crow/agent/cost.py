"""What a request cost. Knows token counts and prices, nothing of who asks."""

from __future__ import annotations

from crow.domain.messages import Usage
from crow.llm import ModelInfo

__all__ = ["cost_of"]


def cost_of(usage: Usage | None, info: ModelInfo) -> float | None:
    """USD for one request; None when usage or prices are unknown."""
    if usage is None or info.input_price is None or info.output_price is None:
        return None
    cached = usage.cached_tokens or 0
    cached_price = info.input_price if info.cached_price is None else info.cached_price
    fresh = max(0, (usage.input_tokens or 0) - cached)
    return (fresh * info.input_price + cached * cached_price + (usage.output_tokens or 0) * info.output_price) / 1e6
