"""Folds lines, so that they can be compared without regard to white space and look-alike characters."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

LOOK_ALIKES = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′´", "'"),
        **dict.fromkeys("“”„‟″", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", ""),
        "…": "...",
    }
)
_WORD = re.compile(r"\w")
_MAX_NAMED = 3


def fold(line: str) -> str:
    """Return a line in the form in which lines are compared: without white space around it, with single spaces in it,
    and with a plain character for each look-alike."""
    if not line.isascii():
        line = unicodedata.normalize("NFC", line.translate(LOOK_ALIKES))
    return " ".join(line.split())


def places_of(line: str) -> list[int] | None:
    """Return the index in `line` at which each character of `fold(line)` begins, followed by the index after the last
    one. Return None if a character of `fold(line)` cannot be found in `line` with certainty."""
    folded: list[str] = []
    places: list[int] = []
    at = end = 0
    while at < len(line):
        after = at + 1
        while after < len(line) and _continues(line[after]):
            after += 1
        for character in unicodedata.normalize("NFC", line[at:after].translate(LOOK_ALIKES)):
            if not character.isspace():
                folded.append(character)
                places.append(at)
                end = after
            elif folded and folded[-1] != " ":
                folded.append(" ")
                places.append(at)
        at = after
    if folded and folded[-1] == " ":
        folded.pop()
        places.pop()
    return [*places, end] if "".join(folded) == fold(line) else None


def _continues(character: str) -> bool:
    """Return whether a character belongs to the one before it. Combining marks, the later parts of a Korean syllable
    and invisible characters do."""
    is_jamo = "\u1160" <= character <= "\u11ff"
    return unicodedata.combining(character) != 0 or is_jamo or LOOK_ALIKES.get(ord(character)) == ""


class Lines:
    """The lines of a text, unchanged and folded."""

    def __init__(self, text: str) -> None:
        # Not splitlines, which also splits at other characters, such as form feeds.
        pieces = text.split("\n")
        self.contents = [piece.removesuffix("\r") for piece in pieces]
        """The lines without their line ends. The last one is empty if the text ends with a line end."""
        self.ends = ["\r\n" if piece.endswith("\r") else "\n" for piece in pieces[:-1]] + [""]
        if pieces[-1].endswith("\r"):  # a lone CR at the very end is part of the line
            self.contents[-1] = pieces[-1]
        self.folded = [fold(line) for line in self.contents]
        self._joined = "\n".join(self.folded)
        self._starts = [0, *accumulate(len(line) + 1 for line in self.folded)]
        self._known: tuple[int, list[int] | None] | None = None

    @cached_property
    def unit(self) -> int:
        """The width of one level of indentation in columns: the most frequent step between a line and the next one that
        is indented deeper; 1 if there is none."""
        widths = [indent_width(line) for line in self.contents if line.strip()]
        steps = Counter(other - one for one, other in pairwise(widths) if other > one)
        return steps.most_common(1)[0][0] if steps else 1

    def find(self, wanted: Sequence[str]) -> Iterator[Place]:
        """Yield the places whose folded text is `wanted`, a list of folded lines. A place may begin or end within a
        line, but not within a word."""
        joined = "\n".join(wanted)
        at = self._joined.find(joined)
        while at >= 0:
            place = self._place(at, at + len(joined))
            if place is not None:
                yield place
            at = self._joined.find(joined, at + 1)

    def _place(self, start: int, end: int) -> Place | None:
        if _cuts_word(self._joined, start) or _cuts_word(self._joined, end):
            return None
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, end) - 1
        from_column, to_column = start - self._starts[first], end - self._starts[last]
        is_whole_start, is_whole_end = from_column == 0, to_column == len(self.folded[last])
        left = None if is_whole_start else self._places_in(first)
        right = None if is_whole_end else self._places_in(last)
        if (left is None and not is_whole_start) or (right is None and not is_whole_end):
            return None
        return Place(
            first=first,
            last=last,
            start=0 if left is None else left[from_column],
            end=len(self.contents[last]) if right is None else right[to_column],
            is_whole_start=is_whole_start,
            is_whole_end=is_whole_end,
        )

    def _places_in(self, line: int) -> list[int] | None:
        # Keep the places of the latest line, because `find` may ask for those of a very long line thousands of times.
        if self._known is None or self._known[0] != line:
            self._known = (line, places_of(self.contents[line]))
        return self._known[1]

    def at(self, place: Place) -> list[str]:
        """Return the lines of a place, without the parts of the first and the last line that do not belong to it."""
        lines = self.contents[place.first : place.last + 1]
        lines[-1] = lines[-1][: place.end]
        lines[0] = lines[0][place.start :]
        return lines


def indent_width(line: str) -> int:
    """Return how far a line is indented. A tab leads to the next multiple of 8."""
    return len(line[: len(line) - len(line.lstrip())].expandtabs(8))


def _cuts_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and _WORD.match(text[at - 1]) is not None and _WORD.match(text[at]) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A part of a text."""

    first: int
    """The index of the first line."""
    last: int
    """The index of the last line."""
    start: int
    """Where the place begins in the first line."""
    end: int
    """Where the place ends in the last line."""
    is_whole_start: bool
    """Whether the place begins at the beginning of its first line."""
    is_whole_end: bool
    """Whether the place ends at the end of its last line."""


def is_look_alike(character: str) -> bool:
    """Return whether a character looks like a plain one, or like a space, or is invisible."""
    return ord(character) in LOOK_ALIKES or (character.isspace() and not character.isascii())


def look_alikes_in(text: str, plain: str) -> str:
    """Name the look-alike characters that `text` has and `plain` does not have, such as `U+2019 RIGHT SINGLE QUOTATION
    MARK`. At most three are named."""
    special = {each for each in text if is_look_alike(each)}
    found = sorted(special - set(plain))
    names = [f"U+{ord(each):04X} {unicodedata.name(each, '')}".rstrip() for each in found[:_MAX_NAMED]]
    return ", ".join(names) + (" ..." if len(found) > _MAX_NAMED else "")
