"""How long an endpoint asks to wait, in its headers or in its words. Pure."""

from __future__ import annotations

import email.utils
import math
import re
from collections.abc import Mapping
from datetime import datetime
from functools import reduce

__all__ = ["retry_after_s", "wait_in"]

_AMOUNT = r"\d++(?:\.\d++)?\s*+(?:milliseconds?|minutes?|mins?|seconds?|secs?|hours?|days?|ms|[smhd])?(?![a-z])"
_WAIT_WORDS = re.compile(
    r"(?:try again (?:in|after)|retry[ -]?after:?|retry in|retrydelay|wait(?: for)?)\W{0,5}"
    rf"((?:{_AMOUNT}[ ,]*)+|\d+:\d\d(?::\d\d)?)",
    re.IGNORECASE,
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|milli|s|m|h|d)?", re.IGNORECASE)
_SPAN_S = {"ms": 0.001, "milli": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}
_WHOLE_SPAN = re.compile(rf"(?:{_AMOUNT}\s*)+", re.IGNORECASE)
_AFTER_1973 = 1e8
"""A number of seconds that is larger names a moment."""


def retry_after_s(headers: Mapping[str, str], *, now_s: float) -> float | None:
    """Seconds to wait by the headers (keys in lower case); `now_s` is Unix time, for those that name a moment."""
    milliseconds = _number(headers.get("retry-after-ms", "").strip())
    if milliseconds is not None:
        return max(0.0, milliseconds / 1000)
    asked = _span(headers.get("retry-after", "").strip(), now_s)
    if asked is not None:
        return asked
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
    return _seconds(match.group(1)) if match is not None else None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _span(text: str, now_s: float) -> float | None:
    """`1s`, `6m0s`, `120`; or a moment: Unix time in seconds or milliseconds, a date of HTTP or of ISO 8601."""
    number = _number(text)
    if number is not None:
        if number > 1000 * _AFTER_1973 and number > 100 * now_s:
            number /= 1000
        return max(0.0, number - now_s if number > max(_AFTER_1973, now_s / 2) else number)
    if _WHOLE_SPAN.fullmatch(text):
        return _seconds(text)
    moment = _moment(text)
    return max(0.0, moment - now_s) if moment is not None else None


def _moment(text: str) -> float | None:
    """A date as Unix time."""
    try:
        named = email.utils.parsedate_tz(text)
        return float(email.utils.mktime_tz(named)) if named is not None else _iso(text)
    except (ValueError, OverflowError):
        return None


def _iso(text: str) -> float | None:
    moment = datetime.fromisoformat(text) if text else None
    return moment.timestamp() if moment is not None and moment.tzinfo is not None else None


def _seconds(text: str) -> float:
    """The sum of the amounts; `1:30` is minutes and seconds."""
    if ":" in text:
        return float(reduce(lambda so_far, part: so_far * 60 + int(part), text.split(":"), 0))
    return sum(float(amount) * _SPAN_S[unit.lower()] for amount, unit in _SPAN.findall(text))
