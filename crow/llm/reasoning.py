"""Reasoning beside the answer, in every field that it comes in, and content in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

__all__ = ["ReasoningDetails", "content_pieces", "details_text", "thought_of"]

_FIELDS = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "thought")
_THOUGHTS = frozenset({"thinking", "reasoning", "thought", "reasoning_text"})
_GROWING = frozenset({"text", "summary", "data"})


def thought_of(delta: Mapping[str, object]) -> tuple[str | None, str]:
    """`(field, piece)`: the first field with something in it; else the first that is there with '' in it."""
    present: str | None = None
    for field in _FIELDS:
        value = delta.get(field)
        if value is None:
            continue
        piece = value if isinstance(value, str) else _text_of(value)
        if piece:
            return field, piece
        if isinstance(value, str) and present is None:
            present = field
    return present, ""


def content_pieces(content: object) -> Iterator[tuple[Literal["thought", "text"], str]]:
    """The pieces of a content that is a list of parts, or one part."""
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, str):
            yield "text", part
        elif isinstance(part, Mapping):
            kind = part.get("type")
            if isinstance(kind, str) and kind in _THOUGHTS:
                yield "thought", _text_of(part)
            else:
                yield "text", _text_of(part)


def details_text(details: object) -> str:
    """What of `reasoning_details` can be read: texts and summaries, not what is encrypted."""
    if not isinstance(details, list):
        return ""
    pieces = (
        item.get("text") or item.get("summary")
        for item in details
        if isinstance(item, Mapping) and item.get("type") != "reasoning.encrypted"
    )
    return "".join(piece for piece in pieces if isinstance(piece, str))


class ReasoningDetails:
    """`reasoning_details` of a stream, put together as they are to be sent back. `size`: characters in them."""

    def __init__(self) -> None:
        self._items: list[dict[str, object]] = []
        self._growing: dict[str, list[str]] = {}
        self.size = 0

    def add(self, details: object) -> None:
        """Take the list of one delta: an item goes on where the last one has its index and type."""
        for item in details if isinstance(details, list) else ():
            if not isinstance(item, Mapping):
                continue
            last = self._items[-1] if self._items else None
            if last is None or any(last.get(key) != item.get(key) for key in ("index", "type")) or "index" not in item:
                self._join()
                self._items.append(last := {})
            for key, value in item.items():
                self.size += len(key) + len(str(value))
                if key in _GROWING and isinstance(value, str):
                    last.setdefault(key, "")
                    self._growing.setdefault(key, []).append(value)
                elif value is not None or key not in last:
                    last[key] = value

    def opaque(self) -> dict[str, object]:
        """The field to send back, empty if there was none."""
        self._join()
        return {"reasoning_details": self._items} if self._items else {}

    def _join(self) -> None:
        """Put the pieces of the last item together."""
        for key, pieces in self._growing.items():
            self._items[-1][key] = "".join(pieces)
        self._growing = {}


def _text_of(value: object) -> str:
    """The text of a part, of a list of parts, or of what is nested in one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_text_of(item) for item in value)
    if isinstance(value, Mapping):
        for key in ("text", "thinking", "reasoning", "content", "summary"):
            if value.get(key):
                return _text_of(value[key])
    return ""
