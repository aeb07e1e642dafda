"""Lone halves of UTF-16 pairs, which some endpoints stream: joined when the other half comes, else U+FFFD.

Strategy: JSON may spell half a pair (`\\ud83d`), Python keeps it, and every strict reader after us refuses it; so it is
mended where text enters and, once more, where requests leave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

__all__ = ["Joiner", "mended", "mended_members"]

_SURROGATE = re.compile("[\ud800-\udfff]")


def mended(text: str) -> str:
    """`text` with adjacent halves joined and lone ones replaced by U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def mended_members(members: Mapping[str, object]) -> dict[str, object]:
    """As `mended`, for everything in an object of JSON. What no JSON text can hold is left out."""
    kept: dict[str, object] = {}
    for key, value in members.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            continue
        kept[mended(key)] = value if text.isascii() else json.loads(mended(text))
    return kept


class Joiner:
    """Mends a text that arrives in pieces: a high half at the end of one piece waits for the next."""

    __slots__ = ("_high",)

    def __init__(self) -> None:
        self._high = ""

    @property
    def is_waiting(self) -> bool:
        """Whether a high half waits for its low one."""
        return bool(self._high)

    def feed(self, piece: str) -> str:
        """What of the text can be given out now."""
        if not self._high and piece.isascii():
            return piece
        piece = self._high + piece
        self._high = ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            self._high = piece[-1]
            piece = piece[:-1]
        return mended(piece)

    def finish(self) -> str:
        """What waited in vain."""
        high, self._high = self._high, ""
        return mended(high)
