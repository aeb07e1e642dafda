"""Cutting long text so that beginning and end stay and what is missing is said.

Strategy: `head_and_tail` cuts a text that is already whole; `OutputBuffer` keeps a bounded head and tail of a text that is
still arriving, in linear time. Both leave a marker with the number of characters and lines left out. Pure; how large
a budget should be is the caller's affair.
"""

from __future__ import annotations

from collections import deque

__all__ = ["OutputBuffer", "head_and_tail"]

LINE_SHARE = 4  # a cut moves to a line's end if that costs at most a quarter of its half


def head_and_tail(text: str, budget_chars: int, where: str) -> str:
    """`text` in at most `budget_chars` characters, marker included; unchanged when it fits.

    `where` tells how to get the rest ("the whole is in entry 12: use recall"), or is empty. A budget smaller than the
    marker gives the marker alone.
    """
    if len(text) <= budget_chars:
        return text
    reserved = len(marker(len(text), text.count("\n"), where))
    room = max(0, budget_chars - reserved)
    start = head_end(text, (room + 1) // 2)
    stop = tail_start(text, len(text) - room // 2)
    left_out = text[start:stop]
    return text[:start] + marker(len(left_out), left_out.count("\n"), where) + text[stop:]


def marker(chars: int, lines: int, where: str) -> str:
    """The words that stand in place of what was left out."""
    size = f"{chars:,} characters" + (f" in {lines:,} lines" if lines else "")
    return f"\n[... {size} left out{'; ' + where if where else ''} ...]\n"


def head_end(text: str, wanted: int) -> int:
    """The end of the head: `wanted`, or a little less to end a line and to keep surrogate pairs together."""
    line_end = text.rfind("\n", wanted - wanted // LINE_SHARE, wanted) + 1
    if line_end:
        return line_end
    return wanted - 1 if splits_pair(text, wanted) else wanted


def tail_start(text: str, wanted: int) -> int:
    """The start of the tail: `wanted`, or a little more to begin a line and to keep surrogate pairs together."""
    line_start = text.find("\n", wanted - 1, wanted + (len(text) - wanted) // LINE_SHARE) + 1
    if line_start and wanted:
        return line_start
    return wanted + 1 if splits_pair(text, wanted) else wanted


def splits_pair(text: str, at: int) -> bool:
    """Whether a cut before index `at` would part a high surrogate from its low one."""
    return 0 < at < len(text) and "\ud800" <= text[at - 1] <= "\udbff" and "\udc00" <= text[at] <= "\udfff"


class OutputBuffer:
    """The first and last characters of a text that arrives in pieces; `limit_chars` in all."""

    def __init__(self, limit_chars: int) -> None:
        self._half = limit_chars // 2
        self._head: list[str] = []
        self._head_chars = 0
        self._tail: deque[str] = deque()
        self._tail_chars = 0
        self._dropped_chars = 0
        self._dropped_lines = 0
        self.total_chars = 0
        """How many characters have arrived in all."""

    def feed(self, piece: str) -> None:
        """Add the next piece."""
        self.total_chars += len(piece)
        if self._head_chars < self._half:
            fitting = piece[: self._half - self._head_chars]
            self._head.append(fitting)
            self._head_chars += len(fitting)
            piece = piece[len(fitting) :]
        if not piece:
            return
        self._tail.append(piece)
        self._tail_chars += len(piece)
        while self._tail_chars - len(self._tail[0]) >= self._half:
            self._drop(self._tail.popleft())

    def _drop(self, piece: str) -> None:
        self._tail_chars -= len(piece)
        self._dropped_chars += len(piece)
        self._dropped_lines += piece.count("\n")

    def text(self) -> str:
        """Everything, or head, marker and tail."""
        tail = "".join(self._tail)
        extra = len(tail) - self._half if self._dropped_chars else 0
        if extra > 0:  # the oldest piece is only partly within the limit
            self._tail = deque([tail[extra:]])
            self._drop(tail[:extra])
            tail = tail[extra:]
        middle = marker(self._dropped_chars, self._dropped_lines, "") if self._dropped_chars else ""
        return "".join(self._head) + middle + tail

    def newest(self, limit_chars: int) -> str:
        """The last `limit_chars` characters or so, with a marker before them if anything came earlier."""
        if self.total_chars <= limit_chars:
            return self.text()
        pieces: list[str] = []
        missing = limit_chars
        for source in (self._tail, self._head):
            for piece in reversed(source):
                if missing <= 0:
                    break
                pieces.append(piece[-missing:])
                missing -= len(piece)
        text = "".join(reversed(pieces))
        return f"[... {self.total_chars - len(text):,} characters before this ...]\n{text}"
