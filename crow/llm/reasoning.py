"""Reasoning beside the answer, in every field that it comes in, and content in parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

__all__ = ["ReasoningDetails", "ThinkSplitter", "content_pieces", "details_text", "thought_of"]

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


# FROM llm.thinking: Reasoning written into the answer itself, as `<think>...</think>` at its start.
#
# Only what may still become a tag is held back. A tag counts at the start of the answer alone; spoken of later it is
# text, and so is a closing tag without an opening one: what stands before it was shown already, and the templates of
# the
# models that write such answers cut it off themselves. Tokens that some formats put around the answer fall away.


_THINK_ENDS = ("</think>", "</thinking>")
_TAGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<think>", _THINK_ENDS),
    ("<thinking>", _THINK_ENDS),
    ("<thought>", ("</thought>",)),
    ("<reasoning>", ("</reasoning>",)),
    ("<mm:think>", ("</mm:think>",)),
    ("<seed:think>", ("</seed:think>",)),
    ("[think]", ("[/think]",)),
    ("◁think▷", ("◁/think▷",)),
    ("<|channel|>analysis<|message|>", ("<|end|>",)),
    ("<|channel>thought\n", ("<channel|>",)),
    ("<|start_thinking|>", ("<|end_thinking|>",)),
    ("<|begin_of_thought|>", ("<|end_of_thought|>",)),
)
"""What opens a thought, and what ends it; in lower case, since models write either."""

_DRESS = (
    # A thought came in its own field, its closing tag did not.
    *_THINK_ENDS,
    "<|start|>assistant",
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|start_response|>",
    "<|begin_of_solution|>",
)
"""What stands before an answer and is none of it."""

_BEGINNINGS = (*(opening for opening, _ in _TAGS), *_DRESS)
_LONGEST = max(map(len, _BEGINNINGS))
_MOST_BLANKS = 4096
_PIECE_CHARS = 16_384
"""What is read at once: each tag that is read copies what follows it."""


class ThinkSplitter:
    """Feed pieces of the content; each call gives the thought and the text that are certain now.

    Blanks before the first word of a thought or of an answer after one are dropped; blanks at the very start of the
    answer wait for its first word. `found`: there was a thought; `is_dressed`: tokens were left out before the answer.
    """

    __slots__ = ("_ends", "_held", "_spoken", "_state", "found", "is_dressed")

    def __init__(self) -> None:
        self._state: Literal["start", "thought", "after", "text"] = "start"
        self._held = ""
        self._ends: tuple[str, ...] = ()
        self._spoken = False
        self.found = False
        self.is_dressed = False

    @property
    def held(self) -> str:
        """What waits to be decided."""
        return self._held

    @property
    def in_text(self) -> bool:
        """Whether whatever comes now is text, so that nothing needs to be looked at."""
        return self._state == "text"

    def feed(self, piece: str) -> tuple[str, str]:
        """`(thought, text)`, either may be empty."""
        if self.in_text:
            return "", piece
        thought: list[str] = []
        for start in range(0, len(piece), _PIECE_CHARS):
            self._held += piece[start : start + _PIECE_CHARS]
            while self._read_thought(thought) if self._state == "thought" else self._read_start():
                pass
            if self.in_text:
                text, self._held = self._held + piece[start + _PIECE_CHARS :], ""
                return "".join(thought), text
        return "".join(thought), ""

    def finish(self) -> tuple[str, str]:
        """What was held back: an unfinished tag is what it says; blanks alone are nothing."""
        held, self._held = self._held, ""
        if not held.strip():
            return "", ""
        return (held, "") if self._state == "thought" else ("", held)

    def _read_start(self) -> bool:
        """Decide what the answer starts with; True if there is more to be decided."""
        begun = self._held.lstrip()
        if not begun:
            if self._state == "after":
                self._held = ""
            if len(self._held) < _MOST_BLANKS:
                return False
        head = begun[:_LONGEST].lower()
        for opening, ends in _TAGS:
            if head.startswith(opening):
                self._state, self._ends, self._held = "thought", ends, begun[len(opening) :]
                self._spoken = False
                self.found = True
                return True
        for dress in _DRESS:
            if head.startswith(dress):
                self._state, self._held = "after", begun[len(dress) :]
                self.is_dressed = True
                return True
        if begun and any(beginning.startswith(head) for beginning in _BEGINNINGS):
            return False
        if self._state == "after":
            self._held = begun
        self._state = "text"
        return False

    def _read_thought(self, thought: list[str]) -> bool:
        """Move the certain part of the thought out; True once its end has come."""
        if not self._spoken:
            self._held = self._held.lstrip()
        end = _END_OF[self._ends].search(self._held)
        if end is not None:
            thought.append(self._held[: end.start()])
            self._held = self._held[end.end() :]
            self._state = "after"
            return True
        keep = max(_overlap(self._held, each) for each in self._ends)
        cut = len(self._held) - keep
        thought.append(self._held[:cut])
        self._spoken = self._spoken or cut > 0
        self._held = self._held[cut:]
        return False


_END_OF = {ends: re.compile("|".join(map(re.escape, ends)), re.IGNORECASE) for _, ends in _TAGS}


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`, whatever their case."""
    tail = text[1 - len(tag) :]
    for length in range(len(tail), 0, -1):
        if tail[-length:].lower() == tag[:length]:
            return length
    return 0
