"""A command line, as far as a rule may judge it without running it.

Strategy: two readings that err on opposite sides. `simple_words` gives the words of a line that is one plain command
and nothing else: whatever a shell could make more of (operators, substitutions, redirections, expansions, further
lines) gives None, so that a rule that allows never covers more than it says. `mentions` finds words anywhere in a
line, in quotes and behind operators, so that a rule that denies covers rather too much. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["mentions", "simple_words"]

ACTIVE = frozenset(";&|<>()$`\n\r\0*?[]{}!#~^")
"""What a shell may make something of outside of quotes. A word with one of them is more than it shows."""

ACTIVE_IN_QUOTES = frozenset("$`\\!\0")
BLANKS = frozenset(" \t")
SEPARATORS = re.compile(r"[\s;&|<>()`{}$'\"\\]+")


def simple_words(line: str) -> tuple[str, ...] | None:
    """The words of a single plain command, quotes removed; None for any other line."""
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(line):
        char = line[at]
        if char in BLANKS:
            if word is not None:
                words.append(word)
            word = None
            at += 1
        elif char in "'\"":
            end = line.find(char, at + 1)
            inside = line[at + 1 : end]
            if end < 0 or "\n" in inside or "\0" in inside or (char == '"' and ACTIVE_IN_QUOTES & set(inside)):
                return None
            word = (word or "") + inside
            at = end + 1
        elif char in ACTIVE or char == "\\" or (char.isspace() or not char.isprintable()):
            return None
        else:
            word = (word or "") + char
            at += 1
    return tuple(words if word is None else [*words, word])


def mentions(line: str, words: Sequence[str]) -> bool:
    """Whether `words` stand next to each other anywhere in the line; a program also by its path."""
    if not words:
        return True
    for pieces in (SEPARATORS.split(line), SEPARATORS.split(re.sub(r"['\"\\]", "", line))):
        named = [piece.rpartition("/")[2] for piece in pieces]
        for start in range(len(pieces) - len(words) + 1):
            rest = list(words[1:])
            if words[0] in (pieces[start], named[start]) and pieces[start + 1 : start + len(words)] == rest:
                return True
    return False
