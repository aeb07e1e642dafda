"""Limits the sizes of texts and other values that are sent to a client. All sizes are in bytes of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

LINE_BYTES = 1_000_000
"""The maximum size of a line that crow sends. The limits for the parts of an update add up to less than this size."""

TEXT_BYTES = 50_000
"""The limit for a text for which no other limit is given."""

PIECE_BYTES = 400_000
"""A text with more bytes than this is split into several updates or content blocks."""

PART_BYTES = 900_000
"""The size limit of a value that can be neither cut nor split. The limit leaves room for the rest of the line."""


def json_bytes(value: object) -> int:
    """Return the number of bytes that `value` takes as JSON when it is sent."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def limit_text(text: str, limit: int = TEXT_BYTES) -> str:
    """Return `text` if it takes at most `limit` bytes of JSON. Otherwise return its beginning, a marker and its
    end."""
    return cut(text, limit)[0]


def cut(text: str, limit: int, change: Callable[[str], str] = str) -> tuple[str, int]:
    """Return `(shown, omitted)`. `shown` is `change(text)` if that takes at most `limit` bytes of JSON. Otherwise, it
    is `change` applied to the beginning of `text`, a marker and the end of `text`. `omitted` is the number of
    characters of `text` that were left out."""
    if len(text) <= limit and _fits(shown := change(text), limit):
        return shown, 0
    keep = min(limit, len(text))
    while True:
        shown, omitted = head_and_tail(text, keep)
        shown = change(shown)
        size = json_bytes(shown)
        if keep < 2 or size <= limit:
            return shown, omitted
        keep = min(keep * limit // size, keep - 1) * 15 // 16


def head_and_tail(text: str, keep: int) -> tuple[str, int]:
    """Return `text` if it has at most `keep` characters. Otherwise return its beginning, a marker and its end, where
    beginning and end together have `keep` characters. Also return the number of characters that were left out."""
    if len(text) <= keep:
        return text, 0
    head, tail = text[: keep // 2], text[len(text) - keep // 2 :]
    omitted = len(text) - len(head) - len(tail)
    return f"{head}\n[… {omitted:,} characters are not shown here …]\n{tail}", omitted


def split_text(text: str, limit: int = PIECE_BYTES) -> list[str]:
    """Split `text` into pieces of at most `limit` bytes of JSON each. An empty text has no pieces."""
    if _fits(text, limit):
        return [text] if text else []
    step = max(1, (limit - 2) // 6)  # a character takes at most six bytes
    return [text[at : at + step] for at in range(0, len(text), step)]


def limit_json(value: object, limit: int) -> object:
    """Return a JSON value, with long strings and lists shortened so that it takes at most `limit` bytes."""
    max_items = 10_000
    for max_bytes in (limit // 2, 20_000, 5_000, 1_000, 200):
        if _fits(value, limit):
            return value
        value = _shorten(value, max_bytes, max_items)
        max_items //= 4
    return value if _fits(value, limit) else {"note": "too large to show here"}


def _fits(value: object, limit: int) -> bool:
    """Whether `value` takes at most `limit` bytes of JSON. Encoding a large value takes long, so it is encoded only if
    the number of its characters does not give the answer."""
    if isinstance(value, str) and 6 * len(value) + 2 <= limit:
        return True
    if isinstance(value, dict) and _most_bytes(value) <= limit:
        return True
    return _chars(value) <= limit and json_bytes(value) <= limit


def _most_bytes(value: dict[str, object]) -> float:
    """Return an upper bound for the size of an object as JSON, without encoding the object. Return infinity if a
    value is not a string, null, a boolean or a small whole number."""
    total = 2
    for key, item in value.items():
        if isinstance(item, str):
            total += 6 * len(item)
        elif item is not None and not (isinstance(item, int) and -(2**63) <= item < 2**63):
            return math.inf
        total += 6 * len(key) + 30
    return total


def _chars(value: object) -> int:
    """Return a lower bound of the size of `value`: the number of characters in all its strings. Keys are not
    counted."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_chars, items))


def _shorten(value: object, max_bytes: int, max_items: int) -> object:
    match value:
        case str():
            return limit_text(value, max_bytes)
        case dict():
            return {key: _shorten(item, max_bytes, max_items) for key, item in list(value.items())[:max_items]}
        case list() | tuple():
            return [_shorten(item, max_bytes, max_items) for item in value[:max_items]]
        case _:
            return value
