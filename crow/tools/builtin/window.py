"""Lines of a file that is too large to hold: any of them, in bounded memory.

Strategy: pieces of the file are fed in order; lines before the wanted ones are only counted, of the wanted ones no more
is kept than is shown. Pure; who reads the pieces, and how the lines are worded, is others' affair.
"""

from __future__ import annotations

__all__ = ["Row", "Window"]


class Row:
    """The beginning of a line. `left_out`: how many bytes of it were not kept."""

    def __init__(self) -> None:
        self.left_out = 0
        self._start = bytearray()

    def __len__(self) -> int:
        return len(self._start)

    def add(self, piece: bytes, most_bytes: int) -> None:
        """A further piece of the line, as far as there is room."""
        kept = piece[: max(0, most_bytes - len(self._start))]
        self._start += kept
        self.left_out += len(piece) - len(kept)

    def text(self) -> str:
        """What was kept, without a carriage return at its end; half a character there becomes U+FFFD."""
        return self._start.decode("utf-8", "replace").removesuffix("\r")


class Window:
    """The lines from `first` on (from 1): at most `limit`, of each `row_bytes`, and of all `most_bytes` or little more.

    `rows` are the lines so far. `has_more`: others follow. `lines`: how many there were up to the last one fed.
    """

    def __init__(self, *, first: int, limit: int, row_bytes: int, most_bytes: int) -> None:
        self.rows: list[Row] = []
        self.has_more = False
        self._missing = first - 1
        self._skipped = 0
        self._skipped_is_open = False
        self._limit = limit
        self._row_bytes = row_bytes
        self._room = most_bytes
        self._is_open = False

    @property
    def lines(self) -> int:
        """How many lines there were, the shown ones among them."""
        return self._skipped + len(self.rows) + (self._skipped_is_open and not self.rows)

    def feed(self, data: bytes) -> bool:
        """Take the next piece of the file; whether a further one is wanted."""
        at = self._skip(data) if self._missing else 0
        while at < len(data):
            if not self._is_open:
                if len(self.rows) == self._limit or (self.rows and self._room <= 0):
                    self.has_more = True
                    return False
                self.rows.append(Row())
            newline = data.find(b"\n", at)
            end = newline if newline >= 0 else len(data)
            row = self.rows[-1]
            self._room += len(row)
            row.add(data[at:end], self._row_bytes)
            self._room -= len(row)
            self._is_open = newline < 0
            at = end + 1
        return True

    def _skip(self, data: bytes) -> int:
        """Where the first wanted line begins in `data`, or its length."""
        count = data.count(b"\n")
        if count < self._missing:
            self._missing -= count
            self._skipped += count
            self._skipped_is_open = not data.endswith(b"\n")
            return len(data)
        rest = data.split(b"\n", self._missing)[-1]
        self._skipped += self._missing
        self._missing, self._skipped_is_open = 0, False
        return len(data) - len(rest)
