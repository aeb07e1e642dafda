"""Reads the list of models that an endpoint sends for `GET /models`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from crow.llm import THOUGHT_LEVELS, ModelLimits, ThoughtLevel
from crow.llm.facts import MAX_TOKENS, is_possible_limit

PRICES = ("input_price", "cached_price", "cache_write_price", "output_price")
"""The fields of `ModelLimits` that hold prices."""

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
    ("max_input_tokens",),  # LiteLLM, Anthropic
    ("inputTokenLimit",),  # Gemini's native API
)
_OUTPUTS = (("top_provider", "max_completion_tokens"), ("max_completion_tokens",), ("outputTokenLimit",))
_THINKS = (
    ("supports_reasoning",),  # LiteLLM, Moonshot
    ("capabilities", "reasoning"),  # Mistral
)
_MIN_WINDOW = 256
_MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(ModelLimits):
    """A model that an endpoint lists."""

    name: str
    thought_levels: tuple[ThoughtLevel, ...] | None = None
    """The thought levels that the model takes. None if the list does not say."""


def read_listing(body: object) -> tuple[Offered, ...] | None:
    """Return the models that `body` lists, in the order of the list. Return None if `body` is not a list of models."""
    listed = body.get("data", body.get("models")) if isinstance(body, Mapping) else body
    if not isinstance(listed, list):
        return None
    return tuple(offered for item in listed if (offered := _offered(item)) is not None)


def last_of_page(body: object) -> str | None:
    """Return the id of the last model in `body`, one page of Anthropic's list, or None if no other page follows."""
    if not isinstance(body, Mapping) or body.get("has_more") is not True:
        return None
    last = body.get("last_id")
    return last if isinstance(last, str) and 0 < len(last) <= _MAX_NAME_CHARS else None


def _offered(item: object) -> Offered | None:
    if isinstance(item, str):
        item = {"id": item}
    name = item.get("id") or item.get("name") or item.get("model") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(name, str) or len(name) > _MAX_NAME_CHARS:
        return None
    windows = list(_sizes(item, _LOADED_WINDOWS)) or list(_sizes(item, _POSSIBLE_WINDOWS))
    outputs = _OUTPUTS if item.get("type") != "model" else (*_OUTPUTS, ("max_tokens",))  # Anthropic
    return Offered(
        name=name,
        context_window=min(windows, default=None),
        max_output_tokens=min(_sizes(item, outputs), default=None),
        input_price=_price(item, "prompt"),
        cached_price=_price(item, "input_cache_read"),
        cache_write_price=_price(item, "input_cache_write"),
        output_price=_price(item, "completion"),
        thought_levels=_thought_levels(item),
    )


def _thought_levels(item: Mapping[str, object]) -> tuple[ThoughtLevel, ...] | None:
    """Return the thought levels that a listed model takes. Return an empty tuple if the model does not think, and None
    if the list does not say."""
    thinks = _value_at(item, ("capabilities", "thinking", "supported"))  # Anthropic
    if thinks is True:
        effort = _value_at(item, ("capabilities", "effort"))
        has_budget = _value_at(item, ("capabilities", "thinking", "types", "enabled", "supported")) is not False
        if has_budget or not isinstance(effort, Mapping):
            return THOUGHT_LEVELS
        return tuple(
            level for level in THOUGHT_LEVELS if level == "off" or _value_at(effort, (level, "supported")) is not False
        )
    reasoning = item.get("reasoning")
    if isinstance(reasoning, Mapping):  # OpenRouter
        efforts, is_mandatory = reasoning.get("supported_efforts"), reasoning.get("mandatory") is True
        taken = efforts if isinstance(efforts, list) else THOUGHT_LEVELS
        return tuple(level for level in THOUGHT_LEVELS if (not is_mandatory if level == "off" else level in taken))
    parameters = item.get("supported_parameters")  # OpenRouter
    if isinstance(parameters, list):
        return THOUGHT_LEVELS if "reasoning" in parameters or "reasoning_effort" in parameters else ()
    flags = (thinks, *(_value_at(item, place) for place in _THINKS))
    return () if False in (flag for flag in flags if isinstance(flag, bool)) else None


def _sizes(item: Mapping[str, object], places: tuple[tuple[str, ...], ...]) -> Iterator[int]:
    for place in places:
        size = _number(_value_at(item, place))
        if size is not None and _MIN_WINDOW <= size <= MAX_TOKENS:
            yield int(size)


def _price(item: Mapping[str, object], key: str) -> float | None:
    """Return the price in USD per million tokens. OpenRouter states USD per token, as text."""
    price = _number(_value_at(item, ("pricing", key)))
    return round(price * 1e6, 6) if price is not None and 0 <= price < 1 else None


def _number(value: object) -> float | None:
    """Read a value that an endpoint stated as a number, or as text such as "0.5". Return None for anything else."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_possible(name: str, value: object) -> bool:
    """Return whether `value` is a possible value of the limit or price `name`."""
    if name in PRICES:
        price = None if isinstance(value, str) else _number(value)
        return price is not None and price >= 0
    return is_possible_limit(value)


def _value_at(item: Mapping[str, object], place: tuple[str, ...]) -> object:
    value: object = item
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def facts_of(offered: Offered) -> Mapping[str, object]:
    """Return the facts to store about a listed model."""
    stated = {key: value for key, value in asdict(offered).items() if key != "name" and value is not None}
    return {"listed": stated}


def learned_listing(facts: Mapping[str, object], model: str) -> Offered | None:
    """Return the listed model that the stored `facts` describe. Return None if the list was never read."""
    listed = facts.get("listed")
    if not isinstance(listed, Mapping):
        return None
    known = {each.name: listed.get(each.name) for each in fields(ModelLimits)}
    limits: dict[str, Any] = {key: value for key, value in known.items() if _is_possible(key, value)}
    levels = listed.get("thought_levels")
    taken = None
    if isinstance(levels, (list, tuple)):
        taken = tuple(level for level in THOUGHT_LEVELS if level in levels)
    return Offered(name=model, thought_levels=taken, **limits)
