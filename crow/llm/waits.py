"""How long an endpoint asks to wait, in its headers or in its words. Pure."""

from __future__ import annotations

import email.utils
import math
import re
from collections.abc import Mapping

__all__ = ["retry_after_s", "wait_in"]

_WAIT_WORDS = re.compile(
    r"(?:try again in|retry (?:after|in)|retrydelay\W{1,5})\s*(\d+(?:\.\d+)?)\s*(ms|milliseconds?|m(?:in\w*)?\b|s)?",
    re.IGNORECASE,
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SPAN_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Seconds to wait by the headers (keys in lower case); `now_s` is Unix time, for those that name a moment."""
    for key, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(key, "").strip()
        seconds = _number(value)
        if seconds is not None:
            return max(0.0, seconds * scale)
        if value and key == "retry-after":
            moment = email.utils.parsedate_tz(value)
            if moment is not None:
                return max(0.0, email.utils.mktime_tz(moment) - now_s)
    waits = [
        wait
        for key, value in headers.items()
        if key.startswith("x-ratelimit-reset") and (wait := _span(value.strip(), now_s)) is not None
    ]
    # Of several limits the one that resets last may be the one that was hit, or one that is far from it.
    return min(waits) if waits else None


def wait_in(words: str) -> float | None:
    """The seconds that `words` ask to wait, None if they ask for none."""
    match = _WAIT_WORDS.search(words)
    if match is None:
        return None
    unit = (match.group(2) or "s").lower()
    scale = 0.001 if unit.startswith(("ms", "milli")) else 60.0 if unit.startswith("m") else 1.0
    return float(match.group(1)) * scale


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _span(text: str, now_s: float) -> float | None:
    """`1s`, `6m0s`, `120`, or a Unix time in seconds or milliseconds."""
    try:
        number: float | None = float(text)
    except ValueError:
        number = None
    if number is not None:
        if number > 1e11:
            number /= 1000
        return max(0.0, number - now_s if number > 1e9 else number)
    pieces = _SPAN.findall(text)
    return sum(float(amount) * _SPAN_S[unit] for amount, unit in pieces) if pieces else None
