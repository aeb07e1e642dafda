"""Removes text that a resumed answer repeats: the end of the old text at the start of the new one.

While what came so far stands somewhere in the old text it may still grow into a repetition of its end, so it is held
back; with the first character that does not fit, the longest repetition is known. A repetition must be one that does
not come about by chance: "hel" and "lo" share a letter and mean "hello". The result is the same for any split.
"""

from __future__ import annotations

__all__ = ["Overlap", "without_overlap"]

LEAST_CHARS = 3
"""A shorter repetition is taken for text that goes on."""

SURE_CHARS = 8
"""From this length on a repetition may begin within a word, or behind blanks that the old text does not have."""

MOST_CHARS = 64_000
"""How far back the old text is looked at."""


class Overlap:
    """Feed the pieces of the new text; each call gives what is certainly new. `before` is the old text."""

    def __init__(self, before: str) -> None:
        self._before = before[-MOST_CHARS:]
        self._held = ""
        self._decided = not before

    def feed(self, piece: str) -> str:
        """What of the text so far is new and not yet given, perhaps nothing."""
        if self._decided:
            return piece
        self._held += piece
        if self._may_grow():
            return ""
        return self._decide()

    def finish(self) -> str:
        """The text has ended: what was held back and is no repetition."""
        return "" if self._decided else self._decide()

    def _may_grow(self) -> bool:
        """Whether a longer repetition than any so far is possible: what came stands in the old text before its end."""
        return any(0 <= self._before.find(text) < len(self._before) - len(text) for text in self._readings())

    def _readings(self) -> tuple[str, ...]:
        """The new text as it is, and without the blanks at its start."""
        bare = self._held.lstrip()
        return (self._held,) if bare == self._held else (self._held, bare)

    def _decide(self) -> str:
        self._decided = True
        held, self._held = self._held, ""
        return held[_repeated(self._before, held) :]


def without_overlap(before: str, text: str) -> str:
    """`text` as it goes on from `before`."""
    overlap = Overlap(before)
    return overlap.feed(text) + overlap.finish()


def _repeated(before: str, text: str) -> int:
    """How many characters at the start of `text` repeat the end of `before`."""
    whole = _longest(before, text, least=LEAST_CHARS)
    blanks = len(text) - len(text.lstrip())
    if whole or not blanks:
        return whole
    bare = _longest(before, text[blanks:], least=SURE_CHARS)
    return blanks + bare if bare else 0


def _longest(before: str, text: str, *, least: int) -> int:
    says_something = next((at for at, character in enumerate(text) if character.isalnum()), len(text)) + 1
    for length in range(min(len(before), len(text)), max(least, says_something) - 1, -1):
        if before.endswith(text[:length]) and _is_meant(before, text[:length]):
            return length
    return 0


def _is_meant(before: str, repeated: str) -> bool:
    """Whether a repetition begins where one would begin."""
    start = len(before) - len(repeated)
    is_within_word = start > 0 and before[start - 1].isalnum() and repeated[0].isalnum()
    return len(repeated) >= SURE_CHARS or not is_within_word
