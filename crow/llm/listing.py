"""What an endpoint says of the models it offers: the answer to `GET /models`, in the shapes that servers give it.

Strategy: names and whatever is stated of each in a known place; the smallest of several windows counts, since it is
what one request may have. The size that a model was trained with says nothing of how it is served. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Offered", "read_listing"]

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
