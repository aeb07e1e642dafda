"""Keeps the beginning and the end of long output."""

from __future__ import annotations

from collections import deque
from itertools import chain

END_OF_MARKER = " characters before this ...]\n"


class OutputBuffer:
    """Keeps the beginning and the end of a text that arrives in pieces: at most `limit_chars` characters, half of them
    for the beginning. Until a piece is dropped, the text may be longer than that by less than one piece. The time is
    proportional to the length of the text."""

    def __init__(self, limit_chars: int) -> None:
        self._half = limit_chars // 2
        self.clear()

    def clear(self) -> None:
        """Forget everything and start again."""
        self._head: list[str] = []
        self._head_chars = 0
        self._tail: deque[str] = deque()
        self._tail_chars = 0
        self._dropped_chars = 0
        self._dropped_lines = 0
        self.total_chars = 0
        """How many characters have arrived."""

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
        """Return the whole text. If a part of its middle was dropped, a marker takes its place."""
        excess = self._tail_chars - self._half if self._dropped_chars else 0
        if excess > 0:  # drop the part of the oldest piece that is beyond the limit
            tail = "".join(self._tail)
            self._tail = deque([tail[excess:]])
            self._drop(tail[:excess])
        marker = ""
        if self._dropped_chars:
            lines = f" in {self._dropped_lines:,} lines" if self._dropped_lines else ""
            marker = f"\n[... {self._dropped_chars:,} characters{lines} left out ...]\n"
        return "".join((*self._head, marker, *self._tail))

    def newest(self, limit_chars: int) -> str:
        """Return approximately the last `limit_chars` characters. If more characters came before them, the text begins
        with a marker."""
        if self.total_chars <= limit_chars:
            return self.text()
        pieces: list[str] = []
        missing = limit_chars
        for piece in chain(reversed(self._tail), reversed(self._head)):  # joining all pieces would take much more time
            if missing <= 0:
                break
            pieces.append(piece[-missing:])
            missing -= len(piece)
        end = "".join(reversed(pieces))
        return f"[... {self.total_chars - len(end):,}{END_OF_MARKER}{end}"
