"""Fits the change of an edit into lines of a file that differ from the edit's old text.

The old text and the file's lines are the same once they are folded (see :mod:`crow.tools.builtin.folding`): they differ
only in white space and look-alike characters. Where old and new text are the same, the file keeps its own characters.
New lines get an indentation that is derived from the lines that the old text and the file share. If this would be a
guess, :class:`Unclear` is raised, and the caller refuses the edit.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import accumulate, pairwise

from crow.tools.builtin.folding import fold, look_alikes_in, places_of
from crow.tools.builtin.mismatch import NEW, OLD

_MAX_COMPARED = 4_000_000
"""Old and new text are compared line by line, or word by word, only if the product of their numbers of lines or words
is at most this."""

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


def merged_lines(old: Sequence[str], actual: Sequence[str], new: Sequence[str], indents: Indents) -> list[str]:
    """Apply the change from `old` to `new` to `actual`, which has as many lines as `old`."""
    bare_old, bare_new = [line.rstrip() for line in old], [line.rstrip() for line in new]
    if len(old) * len(new) > _MAX_COMPARED:
        steps = [("replace", 0, len(old), 0, len(new))]
    else:
        steps = list(SequenceMatcher(None, bare_old, bare_new, autojunk=False).get_opcodes())
    merged: list[str] = []
    for step, old_from, old_to, new_from, new_to in steps:
        if step == "equal":
            merged += actual[old_from:old_to]
        elif step == "replace" and old_to - old_from == new_to - new_from:
            merged += map(indents.merged, old[old_from:old_to], actual[old_from:old_to], new[new_from:new_to])
        else:
            merged += map(indents.placed, new[new_from:new_to])
    return merged


class Unclear(Exception):
    """The edit cannot be made without a guess. The message says why."""


class Indents:
    """Converts the indentation of old_text and new_text to the indentation of the file.

    If lines of old_text have an indentation, it becomes the indentation of the same lines in the file. An indentation
    that only new_text has is derived from these pairs: it is shifted by the same text, or scaled in the same ratio,
    such as between tabs and spaces.
    """

    def __init__(self, pairs: dict[str, str], unit: int) -> None:
        """`pairs` maps the indentations of the lines of old_text to those of the same lines in the file. `unit` is the
        width of one level of indentation in the file."""
        self._pairs = pairs
        self._unit = unit

    @classmethod
    def between(cls, old: Sequence[str], actual: Sequence[str], *, skips_first: bool, unit: int) -> Indents | None:
        """Return the conversion of the indentation of `old` to that of `actual`, or None if no conversion keeps the
        nesting. `unit` is the width of one level of indentation in the file."""
        pairs: dict[str, str] = {}
        for number, (mine, theirs) in enumerate(zip(old, actual, strict=True)):
            if mine.strip() and not (skips_first and number == 0):
                indent = _indent_of(theirs)
                if not indent.isascii():  # odd spaces are not copied to other lines
                    indent = "".join(each if each.isascii() else " " for each in indent)
                if pairs.setdefault(_indent_of(mine), indent) != indent:
                    return None
        widths = sorted((_width(mine), _width(theirs)) for mine, theirs in pairs.items())
        is_nested_alike = all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(widths))
        return cls(pairs, unit) if is_nested_alike or len(pairs) < 2 else None

    @property
    def changes(self) -> bool:
        """Whether any line is indented differently."""
        return any(mine != theirs for mine, theirs in self._pairs.items())

    def placed(self, line: str) -> str:
        """Return a line of the edit's new text with the indentation that the file uses."""
        if not line.strip():
            return line
        indent = _indent_of(line)
        return self._of(indent) + line[len(indent) :]

    def merged(self, old: str, actual: str, new: str) -> str:
        """Return the line `actual` of the file with the change from `old` to `new`."""
        if not new.strip():
            return new
        if not old.strip():
            return self.placed(new)
        old_body, actual_body, new_body = (line.strip() for line in (old, actual, new))
        body = new_body if old_body == actual_body else _merged_body(old_body, actual_body, new_body)
        end = new[len(new.rstrip()) :]
        return (_indent_of(actual) if _indent_of(new) == _indent_of(old) else self._of(_indent_of(new))) + body + end

    def _of(self, indent: str) -> str:
        """Return the indentation in the file for `indent` in new_text."""
        if not self.changes:
            return indent
        if (known := self._pairs.get(indent)) is not None:
            return known
        found = [each for each in (self._shifted(indent), self._scaled(indent)) if each is not None]
        if len(set(found)) > 1:  # keep the ones that fit the levels of the file
            widths = {_width(theirs) for theirs in self._pairs.values()}
            found = [each for each in found if any((_width(each) - width) % self._unit == 0 for width in widths)]
        if not found:
            raise Unclear(
                f"the indentation {indent!r} of a new line has no counterpart in the old lines, which are indented "
                "differently from the file"
            )
        return found[0]

    def _shifted(self, indent: str) -> str | None:
        """If all lines of the file are indented by the same text more, or less, than those of old_text, return `indent`
        with this text added or removed. Otherwise return None."""
        shifts = set()
        for mine, theirs in self._pairs.items():
            if theirs.endswith(mine):
                shifts.add(("", theirs.removesuffix(mine)))
            elif mine.endswith(theirs):
                shifts.add((mine.removesuffix(theirs), ""))
            else:
                return None
        if len(shifts) != 1:
            return None
        removed, added = shifts.pop()
        return added + indent[len(removed) :] if indent.startswith(removed) else None

    def _scaled(self, indent: str) -> str | None:
        """Convert between tabs and spaces, or between widths of indentation, in the ratio of the known lines. Return
        None if they have no common ratio."""
        known = {mine: theirs for mine, theirs in self._pairs.items() if mine or theirs}
        units = {character for theirs in known.values() for character in theirs}
        own = {character for mine in (*known, indent) for character in mine}
        if len(units) != 1 or len(own) > 1:
            return None
        points = sorted((len(mine), len(theirs)) for mine, theirs in self._pairs.items())
        points = points if len(points) > 1 else [(0, 0), *points]
        (x0, y0), (x1, y1) = points[0], points[-1]
        if x0 == x1:
            return None
        slope = Fraction(y1 - y0, x1 - x0)
        if any(y != y0 + slope * (x - x0) for x, y in points):
            return None
        width = y0 + slope * (len(indent) - x0)
        return units.pop() * int(width) if width.denominator == 1 and width >= 0 else None


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _width(indent: str) -> int:
    return len(indent.expandtabs(8))


def _merged_body(old: str, actual: str, new: str) -> str:
    """Apply the change from `old` to `new` to `actual`, which differs from `old` in white space and look-alikes."""
    old_places, actual_places = places_of(old), places_of(actual)
    old_tokens, new_tokens = (_TOKEN.findall(text) for text in (old, new))
    if old_places is None or actual_places is None or len(old_tokens) * len(new_tokens) > _MAX_COMPARED:
        raise Unclear("a line of the file differs in characters that look alike")

    def index_of(place: int) -> int:
        """Return the index of the first character at or after `place` in `old`, among the characters that are
        compared."""
        index = bisect_left(old_places, place)
        is_between = index < len(old_places) and not fold(old[place : old_places[index]])
        # One character of the file may stand for several of old_text. It cannot be kept in part.
        if not is_between or (index and actual_places[index] == actual_places[index - 1]):
            raise Unclear("the edit would keep only a part of a character that the file spells differently")
        return index

    def counterpart(start: int, end: int) -> str:
        return actual[actual_places[index_of(start)] : actual_places[index_of(end)]]

    starts = [0, *accumulate(map(len, old_tokens))]
    merged = []
    for step, old_from, old_to, new_from, new_to in SequenceMatcher(
        None, old_tokens, new_tokens, autojunk=False
    ).get_opcodes():
        if step == "equal":
            merged.append(counterpart(starts[old_from], starts[old_to]))
        else:
            merged += new_tokens[new_from:new_to]
    return "".join(merged)


def describe_difference(
    old: Sequence[str], actual: Sequence[str], indents: Indents, *, what: str = OLD, made: str = NEW
) -> str:
    """Say how `old` differs from `actual`."""
    names = look_alikes_in("\n".join(actual), "\n".join(old))
    how = f"white space and look-alikes: the file has {names}" if names else "white space"
    return f"{what} differed only in {how}" + (f"; {made} was indented to match" if indents.changes else "")
