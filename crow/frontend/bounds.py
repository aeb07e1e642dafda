"""How much of a thing is put on one line to the client.

Strategy: sizes are bytes as JSON on the wire, escapes included. What is too long is shown head and tail with a marker
that says so; the whole stays in the session's log. Large changes of files become their changed regions. Pure.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "DIFF_BYTES",
    "INPUT_BYTES",
    "LINE_BYTES",
    "OUTPUT_BYTES",
    "PART_BYTES",
    "PIECE_BYTES",
    "TEXT_BYTES",
    "Region",
    "bounded",
    "changed_regions",
    "head_and_tail",
    "pieces",
    "weight",
]

LINE_BYTES = 1_000_000
"""No line of ours is longer: the sum of the parts of any update stays below."""

TEXT_BYTES = 50_000
OUTPUT_BYTES = 100_000
INPUT_BYTES = 150_000
DIFF_BYTES = 400_000
PIECE_BYTES = 400_000

PART_BYTES = 900_000
"""What one value that can be neither cut nor divided may weigh, with room for what goes around it."""

_CONTEXT_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A changed stretch of a file with its surroundings: first lines (from 1) and texts, before and after."""

    old_line: int
    new_line: int
    old_text: str
    new_text: str


def weight(value: object) -> int:
    """Bytes of `value` as JSON on the wire."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def head_and_tail(text: str, limit: int = TEXT_BYTES) -> str:
    """`text`, or its beginning and end around a marker when it is heavier than `limit` bytes."""
    if _fits(text, limit):
        return text
    keep = min(limit, len(text))
    while True:
        head, tail = text[: keep // 2], text[len(text) - keep // 2 :]
        left_out = len(text) - len(head) - len(tail)
        shown = f"{head}\n[… {left_out:,} characters are not shown here …]\n{tail}"
        if weight(shown) <= limit or keep < 2:
            return shown
        keep = keep * 3 // 4


def pieces(text: str, limit: int = PIECE_BYTES) -> list[str]:
    """`text` in parts of at most `limit` bytes each; together they are the text."""
    if _fits(text, limit):
        return [text] if text else []
    step = max(1, (limit - 2) // 6)
    return [text[at : at + step] for at in range(0, len(text), step)]


def bounded(value: object, limit: int) -> object:
    """JSON `value`, its long strings cut head and tail and its long lists shortened until it weighs at most `limit`."""
    most_items = 10_000
    for longest in (limit // 2, 20_000, 5_000, 1_000, 200):
        if _fits(value, limit):
            return value
        value = _shortened(value, longest, most_items)
        most_items //= 4
    return value if _fits(value, limit) else {"note": "too large to show here"}


def changed_regions(old: str, new: str) -> tuple[Region, ...]:
    """Where `new` differs from `old`, each with three lines around it; linear in their length."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    spans: list[tuple[int, int, int, int]] = []
    for start, end, new_start, new_end in _changes(before, after):
        lead = min(_CONTEXT_LINES, start, new_start)
        trail = min(_CONTEXT_LINES, len(before) - end, len(after) - new_end)
        span = (start - lead, end + trail, new_start - lead, new_end + trail)
        if spans and (span[0] <= spans[-1][1] or span[2] <= spans[-1][3]):
            span = (spans[-1][0], span[1], spans[-1][2], span[3])
            spans.pop()
        spans.append(span)
    return tuple(
        Region(
            old_line=start + 1,
            new_line=new_start + 1,
            old_text="".join(before[start:end]),
            new_text="".join(after[new_start:new_end]),
        )
        for start, end, new_start, new_end in spans
    )


def _fits(value: object, limit: int) -> bool:
    """Whether `value` weighs at most `limit`; the exact count, which costs, is made only where it can matter."""
    if isinstance(value, str) and 6 * len(value) + 2 <= limit:
        return True
    return _least(value, limit) <= limit and weight(value) <= limit


def _least(value: object, enough: int) -> int:
    """Bytes that `value` weighs at the very least; counting stops above `enough`."""
    match value:
        case str():
            return len(value)
        case dict() | list() | tuple():
            least = 0
            for item in value.values() if isinstance(value, dict) else value:
                least += 2 + _least(item, enough)
                if least > enough:
                    break
            return least
        case _:
            return 0


def _shortened(value: object, longest: int, most_items: int) -> object:
    match value:
        case str():
            return head_and_tail(value, longest)
        case dict():
            return {key: _shortened(item, longest, most_items) for key, item in list(value.items())[:most_items]}
        case list() | tuple():
            return [_shortened(item, longest, most_items) for item in value[:most_items]]
        case _:
            return value


def _changes(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """The stretches `a[i:j]` that became `b[k:l]`, in order."""
    changes = []
    i = k = 0
    for at, new_at, size in [*_matches(a, b), (len(a), len(b), 0)]:
        if i < at or k < new_at:
            changes.append((i, at, k, new_at))
        i, k = at + size, new_at + size
    return changes


def _matches(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int, int]]:
    """Runs of equal lines (start in a, start in b, length), in order: the common head and tail, and between them
    those around lines that stand exactly once on either side."""
    shorter = min(len(a), len(b))
    head = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    tail = next((n for n in range(shorter - head) if a[-1 - n] != b[-1 - n]), shorter - head)
    a_end, b_end = len(a) - tail, len(b) - tail
    runs = [(0, 0, head)] if head else []
    i = k = head
    for at, new_at in _anchors(a, b, head, a_end, b_end):
        if at < i or new_at < k:
            continue
        start, new_start = at, new_at
        while start > i and new_start > k and a[start - 1] == b[new_start - 1]:
            start, new_start = start - 1, new_start - 1
        end, new_end = at + 1, new_at + 1
        while end < a_end and new_end < b_end and a[end] == b[new_end]:
            end, new_end = end + 1, new_end + 1
        runs.append((start, new_start, end - start))
        i, k = end, new_end
    return [*runs, (a_end, b_end, tail)] if tail else runs


def _anchors(a: Sequence[str], b: Sequence[str], start: int, a_end: int, b_end: int) -> list[tuple[int, int]]:
    """Pairs of equal lines that are unique in both, the longest choice of them that rises on both sides."""
    once_in_a = Counter(a[start:a_end])
    once_in_b = Counter(b[start:b_end])
    place = {line: n for n, line in enumerate(b[start:b_end], start) if once_in_b[line] == 1}
    pairs = [(n, place[a[n]]) for n in range(start, a_end) if once_in_a[a[n]] == 1 and a[n] in place]
    # Patience: each pile's top is the smallest end of a rising sequence of that length.
    tops: list[int] = []
    piles: list[int] = []
    before: list[int] = []
    for index, (_, new_at) in enumerate(pairs):
        pile = bisect_left(tops, new_at)
        before.append(piles[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(new_at)
            piles.append(index)
        else:
            tops[pile], piles[pile] = new_at, index
    chosen: list[tuple[int, int]] = []
    index = piles[-1] if piles else -1
    while index >= 0:
        chosen.append(pairs[index])
        index = before[index]
    return chosen[::-1]
