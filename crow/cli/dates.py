"""Times as a person types them: a day, a time, or how long ago.

Strategy: everything becomes Unix milliseconds, by the local clock. A day stands for its beginning.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from crow.domain.errors import ArgumentError

__all__ = ["ago_ms", "day_ms"]

_DAYS = {"d": 1, "w": 7}
_AGE = re.compile(r"([0-9]{1,6})(h|d|w|m|y)")


def day_ms(option: str, text: str, *, days_later: int = 0) -> int:
    """When the day or time `text` begins, or so many days after a bare day does.

    :raises ArgumentError: it is none.
    """
    try:
        moment = datetime.fromisoformat(text).astimezone()
        if len(text) <= len("2026-11-01"):
            moment = (datetime.fromisoformat(text) + timedelta(days=days_later)).astimezone()
        return round(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise ArgumentError(f'{option} is "{text}"; expected a date such as 2026-11-01.') from error


def ago_ms(option: str, text: str, *, now: datetime) -> int:
    """The time before which things are older than `text`: `12h`, `30d`, `8w`, `6m`, `2y`, or a date.

    :raises ArgumentError: it is none.
    """
    match = _AGE.fullmatch(text)
    try:
        if match is None:
            return day_ms(option, text)
        number, unit = int(match[1]), match[2]
        if unit == "h":
            moment = now - timedelta(hours=number)
        elif unit in _DAYS:
            moment = now - timedelta(days=number * _DAYS[unit])
        else:
            moment = _months_before(now, number * (12 if unit == "y" else 1))
        return max(0, round(moment.timestamp() * 1000))
    except (ArgumentError, ValueError, OverflowError, OSError) as error:
        raise ArgumentError(
            f'{option} is "{text}"; expected an age such as 12h, 30d, 8w, 6m or 2y, or a date such as 2026-11-01.'
        ) from error


def _months_before(now: datetime, months: int) -> datetime:
    """The same day of an earlier month, or its last one."""
    year, month = divmod(now.year * 12 + now.month - 1 - months, 12)
    for day in range(now.day, now.day - 4, -1):
        try:
            return now.replace(year=year, month=month + 1, day=day)
        except ValueError:
            continue
    raise ValueError("before the first year")
