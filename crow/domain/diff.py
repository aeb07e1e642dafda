"""Line diffs of two texts, in nearly linear time.

This is a patience diff. difflib takes quadratic time, which is too long for the large files that are compared here.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple

_CONTEXT_LINES = 3
_MAX_QUADRATIC = 40_000
"""Two blocks of lines are compared by `difflib` only if the product of their numbers of lines is at most this."""


@dataclass(frozen=True, slots=True)
class DiffHunk:
    """A changed region of a file, with the unchanged lines around it."""

    old_line: int
    """The number of the first line before the change, counted from 1."""
    new_line: int
    """The number of the first line after the change, counted from 1."""
    old_text: str
    """The text of the region before the change."""
    new_text: str
    """The text of the region after the change."""


def changed_regions(old: str, new: str) -> tuple[DiffHunk, ...]:
    """Return the regions in which `new` differs from `old`, each with three lines of context."""
    before, after = _lines(old), _lines(new)
    spans: list[tuple[int, int, int, int]] = []
    i = k = 0
    for at, new_at, size in [*equal_lines(before, after), (len(before), len(after), 0)]:
        if i < at or k < new_at:
            lead = min(_CONTEXT_LINES, i, k)
            trail = min(_CONTEXT_LINES, len(before) - at, len(after) - new_at)
            span = (i - lead, at + trail, k - lead, new_at + trail)
            if spans and (span[0] <= spans[-1][1] or span[2] <= spans[-1][3]):
                last = spans.pop()
                span = (last[0], span[1], last[2], span[3])
            spans.append(span)
        i, k = at + size, new_at + size
    return tuple(
        DiffHunk(start + 1, new_start + 1, "".join(before[start:end]), "".join(after[new_start:new_end]))
        for start, end, new_start, new_end in spans
    )


def _lines(text: str) -> list[str]:
    """Return the lines of a text with their ends. Only a newline ends a line, as in editors: `str.splitlines` also
    splits at form feeds and at other characters that may stand within a line."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def equal_lines(a: Sequence[str], b: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield blocks of equal lines in order, as (start in a, start in b, length).

    The first block is the common head, and the last is the common tail. Each other block contains a line that occurs
    exactly once in `a` and once in `b`, not counting the head and the tail.
    """
    shorter = min(len(a), len(b))
    head = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    tail = next((n for n in range(shorter - head) if a[-1 - n] != b[-1 - n]), shorter - head)
    a_end, b_end = len(a) - tail, len(b) - tail
    yield 0, 0, head
    i = k = head
    for at, new_at in _anchors(a[head:a_end], b[head:b_end]):
        start, new_start = at + head, new_at + head
        if start < i or new_start < k:
            continue
        while start > i and new_start > k and a[start - 1] == b[new_start - 1]:
            start, new_start = start - 1, new_start - 1
        size = 1
        while start + size < a_end and new_start + size < b_end and a[start + size] == b[new_start + size]:
            size += 1
        yield start, new_start, size
        i, k = start + size, new_start + size
    yield a_end, b_end, tail


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Find equal lines that occur exactly once in each text, as pairs (index in a, index in b).

    Return the longest sequence of such pairs in which both indexes increase.
    """
    in_a, in_b = Counter(a), Counter(b)
    place = {line: n for n, line in enumerate(b) if in_b[line] == 1}
    pairs = [(n, place[line]) for n, line in enumerate(a) if in_a[line] == 1 and line in place]
    ends: list[int] = []  # for each length, the smallest index in b at which a sequence of that length ends
    sequences: list[Any] = []  # for each length, that sequence as (last index in a, last index in b, rest)
    for at, new_at in pairs:
        length = bisect_left(ends, new_at)
        sequence = (at, new_at, sequences[length - 1] if length else None)
        ends[length : length + 1], sequences[length : length + 1] = [new_at], [sequence]
    chosen, rest = [], sequences[-1] if sequences else None
    while rest is not None:
        at, new_at, rest = rest
        chosen.append((at, new_at))
    return chosen[::-1]


class DiffLine(NamedTuple):
    """One line of a diff."""

    mark: Literal[" ", "-", "+", "@"]
    """Marks an unchanged, removed or added line, or the header of a hunk."""
    text: str
    """The line without its line end."""


def diff_lines(old: str, new: str) -> list[DiffLine]:
    """Return the lines of a unified diff from `old` to `new`. The list is empty if both texts are equal. If only the
    end of a line has changed, the line is removed and added."""
    lines: list[DiffLine] = []
    for hunk in changed_regions(old, new):
        before, after = _lines(hunk.old_text), _lines(hunk.new_text)
        place = f"-{hunk.old_line},{len(before)} +{hunk.new_line},{len(after)}"
        lines.append(DiffLine("@", f"@@ {place} @@"))
        i = k = 0
        for at, new_at, size in [*equal_lines(before, after), (len(before), len(after), 0)]:
            lines += _replaced(before[i:at], after[k:new_at])
            lines += _marked(" ", before[at : at + size])
            i, k = at + size, new_at + size
    return lines


def diff_text(old: str, new: str) -> str:
    """Return a unified diff from `old` to `new`, without the names of files. The result is empty if both texts are
    equal."""
    return "\n".join(line.text if line.mark == "@" else line.mark + line.text for line in diff_lines(old, new))


def _replaced(before: Sequence[str], after: Sequence[str]) -> Iterator[DiffLine]:
    """Yield the diff of a block of changed lines. If the block is long, the diff removes all old lines and adds all new
    lines."""
    blocks = [(len(before), len(after), 0)]
    if 0 < len(before) * len(after) <= _MAX_QUADRATIC:
        matcher = SequenceMatcher(None, before, after, autojunk=False)
        blocks = [(block.a, block.b, block.size) for block in matcher.get_matching_blocks()]
    i = k = 0
    for at, new_at, size in blocks:
        yield from _marked("-", before[i:at])
        yield from _marked("+", after[k:new_at])
        yield from _marked(" ", before[at : at + size])
        i, k = at + size, new_at + size


def _marked(mark: Literal[" ", "-", "+"], lines: Iterable[str]) -> Iterator[DiffLine]:
    return (DiffLine(mark, line.removesuffix("\n").removesuffix("\r")) for line in lines)
