"""How vendors call the end of an answer, and what each of their words means to us. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from crow.domain.messages import FinishReason

__all__ = ["Ending", "ending_of", "finish_word"]

Ending: TypeAlias = FinishReason | Literal["failed", "too_long", "malformed"]
"""What an end means: one of our finish reasons, or that there is no answer."""

_WORDS: tuple[tuple[Ending, str], ...] = (
    ("stop", "stop end_turn eos eos_token end stop_sequence complete completed"),
    ("stop", "tool_calls function_call tool_use tool_call tool-calls"),
    ("length", "length max_tokens max_output_tokens max_completion_tokens max_length model_length incomplete"),
    ("refusal", "content_filter content-filter sensitive refusal safety recitation blocklist spii image_safety"),
    ("refusal", "prohibited_content guardrail_intervened content_filtered error_toxic language"),
    ("failed", "error abort aborted network_error insufficient_system_resource cancelled canceled failed"),
    ("too_long", "model_context_window_exceeded context_window_exceeded context_length_exceeded"),
)
_ENDINGS: dict[str, Ending] = {word: ending for ending, words in _WORDS for word in words.split()}
_FAMILIES: tuple[tuple[Ending, re.Pattern[str]], ...] = (
    ("malformed", re.compile(r"malformed")),
    ("failed", re.compile(r"(?:_|\b)error\b|timeout|timed_out|overloaded|failure|unavailable")),
    ("refusal", re.compile(r"content_?filter|moderation|prohibited|safety")),
    ("length", re.compile(r"max_?(?:new_|output_|completion_)?(?:tokens|length|output)|(?:length|token|output)_limit")),
    ("length", re.compile(r"\Acontext_length\Z")),
)
_DRESS = re.compile(r"\A(?:finish_?reason[._:])|[\"'\s]+", re.IGNORECASE)


def finish_word(value: object) -> str | None:
    """The word in a `finish_reason`, in lower case; None where it says nothing yet."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = value.get("type") or value.get("reason")
    if not isinstance(value, str):
        return None
    word = _DRESS.sub("", value).lower()
    return None if word in {"", "null", "none"} else word


def ending_of(word: str) -> Ending:
    """What `word` means; an unknown one is `stop`, which asks for an answer to be there."""
    known = _ENDINGS.get(word)
    if known is not None:
        return known
    return next((ending for ending, family in _FAMILIES if family.search(word)), "stop")
