"""The properties of each Claude model, read from the model's name.

Anthropic's Messages API has changed with its models: how a request asks for thinking, whether thinking can be turned
off, how long a prompt must be to be cached, and how long an answer may be. Endpoints that serve Claude under another
name, and other models behind this API, get the form that most of them understand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from crow.llm import ThoughtLevel

_NAME = re.compile(
    r"claude[-_.]?(?:"
    r"(?P<major>\d)(?:[-._](?P<minor>\d))?(?![\da-z])(?:[-_.](?P<line>[a-z]+))?"
    r"|(?P<line_before>[a-z]+)(?:[-_.]?v?(?P<major_after>\d)(?:[-._]?(?P<minor_after>\d{1,2})(?![\da-z])|(?!\d)))?)",
    re.IGNORECASE,
)
"""The version stands before the line (`claude-3-5-haiku`), after it (`claude-opus-4-1`, `claude-sonnet4`, `claude-v2`),
or alone (`claude-2.1`). A date is not a version."""

_ALWAYS_THINK = frozenset({"fable", "mythos"})
"""The lines of models whose thinking cannot be turned off."""

_NEWEST = (99, 0)
"""The version of a name without a version, such as `claude-mythos-preview`."""

_BUDGETS: Mapping[ThoughtLevel, int] = {"low": 2_048, "medium": 8_192, "high": 24_576}
"""The thinking budgets in tokens, by thought level, for models that think with a budget."""

_MIN_BUDGET = 1_024
"""The API refuses smaller budgets. This many tokens are also left for the answer itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claude:
    """The properties of one model that decide about the form of requests."""

    thinking: Literal["adaptive", "budget", "none"]
    """`adaptive`: the model decides how much it thinks, guided by an effort. `budget`: the request limits the
    tokens."""
    off: Literal["disabled", "between_tools", "omitted", "never"]
    """How a request turns thinking off. `disabled`, `between_tools`: with this word in `thinking.type`; with
    `between_tools`, the model still writes short notes between tool calls. `omitted`: by saying nothing about thinking.
    `never`: thinking cannot be turned off."""
    thinks_by_default: bool
    """Whether the model thinks if a request says nothing about thinking."""
    min_cached_tokens: int
    """Shorter prompts are not cached."""
    max_output_tokens: int
    """The output limit of requests for which no limit is set."""


_OTHER = Claude(
    thinking="budget", off="disabled", thinks_by_default=False, min_cached_tokens=1_024, max_output_tokens=8_192
)
"""Models that are not named after Claude."""


@lru_cache(64)
def claude(model: str) -> Claude:
    """Return the properties of the model with this name."""
    found = _NAME.search(model)
    if found is None:
        return _OTHER
    line, version = (found["line"] or found["line_before"] or "").lower(), _version(found)
    return Claude(
        thinking="adaptive" if version >= (4, 6) else "budget" if version >= (3, 7) else "none",
        off=_off(line, version),
        thinks_by_default=version >= (5, 0) or line in _ALWAYS_THINK,
        min_cached_tokens=_min_cached(line, version),
        max_output_tokens=_max_output(line, version),
    )


def _version(found: re.Match[str]) -> tuple[int, int]:
    major = found["major"] or found["major_after"]
    if major is None:
        return _NEWEST
    return int(major), int(found["minor"] or found["minor_after"] or 0)


def _off(line: str, version: tuple[int, int]) -> Literal["disabled", "between_tools", "omitted", "never"]:
    if line in _ALWAYS_THINK or (line == "opus" and version >= (5, 5)):
        return "never"
    if version < (4, 6):
        return "omitted"
    return "between_tools" if line == "sonnet" and version >= (5, 5) else "disabled"


def _min_cached(line: str, version: tuple[int, int]) -> int:
    """Return the minimum length, in tokens, of a prompt that the model caches. If it differs between Anthropic's
    platforms, return the smallest: a cache marker in a prompt that is too short costs nothing."""
    if (line == "haiku" and version == (4, 5)) or (line == "opus" and (4, 5) <= version <= (4, 6)):
        return 4_096
    if (line == "opus" and version == (4, 7)) or (line == "haiku" and version < (4, 5)):
        return 2_048
    has_low_minimum = line in _ALWAYS_THINK or version >= ((5, 5) if line in {"sonnet", "haiku"} else (5, 0))
    return 512 if has_low_minimum else 1_024


def _max_output(line: str, version: tuple[int, int]) -> int:
    if version >= (4, 5) or (line == "sonnet" and version >= (3, 7)):
        return 64_000
    if version >= (4, 0):
        return 32_000
    return 8_192 if version >= (3, 5) else 4_096


def thinking_members(
    level: ThoughtLevel | None, model: str, *, limit: int, refused: frozenset[str], may_think: bool
) -> dict[str, object]:
    """Return the request members that ask for this thought level. `limit` is the output limit in tokens.

    `refused` has the forms that the endpoint refuses, from among `adaptive_thinking`, `thinking_budget`,
    `thinking_off`, `effort` and `thinking_display`. `may_think` is False in the middle of a tool loop without thoughts:
    models with a budget cannot begin to think there.
    """
    known = claude(model)
    form = known.thinking
    if form == "adaptive" and "adaptive_thinking" in refused:
        form = "budget"
    if form == "budget" and "thinking_budget" in refused:
        form = "none" if "adaptive_thinking" in refused else "adaptive"
    shown = {} if "thinking_display" in refused else {"display": "summarized"}
    adaptive: dict[str, object] = {"thinking": {"type": "adaptive", **shown}}
    if level is None:
        # Newer models think anyway, but send their thoughts only on request.
        return adaptive if form == "adaptive" and known.thinks_by_default and shown else {}
    if level == "off":
        if known.off == "never" or "thinking_off" in refused:
            return {} if form != "adaptive" or "effort" in refused else {"output_config": {"effort": "low"}}
        return {} if known.off == "omitted" else {"thinking": {"type": known.off}}
    if form == "adaptive":
        return adaptive if "effort" in refused else {**adaptive, "output_config": {"effort": level}}
    budget = min(_BUDGETS[level], limit - _MIN_BUDGET)
    if form == "none" or budget < _MIN_BUDGET or not may_think:
        return {}
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}
