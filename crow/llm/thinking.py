"""Reasoning written into the answer itself, as `<think>...</think>` at its start.

Strategy: a small state machine over pieces, which holds back only what may still become a tag. A tag counts at the
start of the answer alone; spoken of later it is text. An answer that holds only the closing tag cannot be told apart
while it streams: `split_headless` does it at the end, and only where it is plain.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["ThinkSplitter", "split_headless"]

_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
_MOST_BLANKS = 4096
_LONE_CLOSE = re.compile(r"</think>[ \t]*(?:\r?\n|$)")


class ThinkSplitter:
    """Feed pieces of the content; each call gives the thought and the text that are certain now.

    Blanks before the first word of a thought or of an answer after one are dropped; blanks at the very start of the
    answer wait for its first word.
    """

    __slots__ = ("_close", "_held", "_spoken", "_state", "found")

    def __init__(self) -> None:
        self._state: Literal["start", "thought", "after", "text"] = "start"
        self._held = ""
        self._close = ""
        self._spoken = False
        self.found = False

    @property
    def in_text(self) -> bool:
        """Whether whatever comes now is text, so that nothing needs to be looked at."""
        return self._state == "text"

    def feed(self, piece: str) -> tuple[str, str]:
        """`(thought, text)`, either may be empty."""
        if self.in_text:
            return "", piece
        thought: list[str] = []
        self._held += piece
        while self._read_thought(thought) if self._state == "thought" else self._read_start():
            pass
        if not self.in_text:
            return "".join(thought), ""
        text, self._held = self._held, ""
        return "".join(thought), text

    def finish(self) -> tuple[str, str]:
        """What was held back: an unfinished tag is what it says; blanks alone are nothing."""
        held, self._held = self._held, ""
        if not held.strip():
            return "", ""
        return (held, "") if self._state == "thought" else ("", held)

    def _read_start(self) -> bool:
        """Decide what the answer starts with; True if that is a thought."""
        begun = self._held.lstrip()
        if not begun:
            if self._state == "after":
                self._held = ""
            if len(self._held) < _MOST_BLANKS:
                return False
        for opening, closing in _TAGS:
            if begun.startswith(opening):
                self._state, self._close, self._held = "thought", closing, begun[len(opening) :]
                self._spoken = False
                self.found = True
                return True
        if begun and any(opening.startswith(begun) for opening, _ in _TAGS):
            return False
        if self._state == "after":
            self._held = begun
        self._state = "text"
        return False

    def _read_thought(self, thought: list[str]) -> bool:
        """Move the certain part of the thought out; True once its end has come."""
        if not self._spoken:
            self._held = self._held.lstrip()
        end = self._held.find(self._close)
        if end >= 0:
            thought.append(self._held[:end])
            self._held = self._held[end + len(self._close) :]
            self._state = "after"
            return True
        keep = _overlap(self._held, self._close)
        cut = len(self._held) - keep
        thought.append(self._held[:cut])
        self._spoken = self._spoken or cut > 0
        self._held = self._held[cut:]
        return False


def split_headless(text: str) -> tuple[str, str] | None:
    """`(thought, answer)` of a text whose reasoning has only its closing tag, None if that is not plain.

    Plain means: the first `</think>` ends its line, no opening tag and no code comes before it, and an answer follows.
    """
    match = _LONE_CLOSE.search(text)
    if match is None:
        return None
    before, after = text[: match.start()], text[match.end() :]
    if "<think" in before or "`" in before or "</think>" in before or "</think>" in after or not after.strip():
        return None
    return before.strip(), after.lstrip()


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
