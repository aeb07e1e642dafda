"""Joins or replaces lone UTF-16 surrogates, which some endpoints stream.

JSON may spell half of a pair (`\\ud83d`) and Python keeps it, but strict readers refuse it. So it is replaced where
text enters, and again where requests leave.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_lone(text: str) -> str:
    """`text` with adjacent halves joined and lone ones replaced by U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def replace_lone_in(members: Mapping[str, object]) -> dict[str, object]:
    """As `replace_lone`, for all texts in a JSON object. Members that JSON cannot hold are left out."""
    clean: dict[str, object] = {}
    for key, value in members.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            continue
        clean[replace_lone(key)] = value if text.isascii() else json.loads(replace_lone(text))
    return clean


class SurrogateJoiner:
    """Cleans a text that arrives in pieces: a high half at the end of one piece waits for the next."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-16-le")("replace")

    def feed(self, piece: str) -> str:
        """The text that can be shown now."""
        if piece.isascii() and not self._decoder.getstate()[0]:
            return piece
        return self._decoder.decode(piece.encode("utf-16-le", "surrogatepass"))

    def finish(self) -> str:
        """The replacement of a half that still waits."""
        return self._decoder.decode(b"", final=True)
