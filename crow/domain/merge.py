"""Merges two versions of a text line by line, given the text that both were made from."""

from __future__ import annotations

from collections.abc import Sequence

from crow.domain.diff import equal_lines


def merged_text(base: bytes, theirs: bytes, own: bytes) -> bytes | None:
    """Return a text with the changes of both versions. Return None if the versions change the same or adjoining lines
    of `base` in different ways, or if one of the texts is binary."""
    if own == theirs or base == own:
        return theirs
    if base == theirs:
        return own
    if b"\0" in base + theirs + own:
        return None
    # Split the bytes: `str.splitlines` also splits at characters such as \x85, a byte that occurs within UTF-8.
    before, left, right = (
        [line.decode("latin-1") for line in text.splitlines(keepends=True)] for text in (base, theirs, own)
    )
    merged: list[str] = []
    at = at_left = at_right = 0
    in_left, in_right = _places(before, left), _places(before, right)
    for line in [*(n for n in range(len(before)) if in_left[n] >= 0 and in_right[n] >= 0), len(before)]:
        end_left = in_left[line] if line < len(before) else len(left)
        end_right = in_right[line] if line < len(before) else len(right)
        old, one, other = before[at:line], left[at_left:end_left], right[at_right:end_right]
        if one == other or other == old:
            merged += one
        elif one == old:
            merged += other
        else:
            return None
        if line < len(before):
            merged.append(before[line])
        at, at_left, at_right = line + 1, end_left + 1, end_right + 1
    return "".join(merged).encode("latin-1")


def _places(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """Return for each line of `before` the index of the same line in `after`, or -1 if it was changed or removed."""
    found = [-1] * len(before)
    for start, new_start, size in equal_lines(before, after):
        for offset in range(size):
            found[start + offset] = new_start + offset
    return found
