"""Reads a damaged write-ahead log (WAL).

SQLite stops reading a log at the first frame whose checksum is wrong, and so drops everything after a damaged byte. The
checksum of each frame continues the checksum of the frame before it. So the frames after a damaged frame can still be
checked, starting from the checksum that is stored in the damaged frame. The layout is documented on SQLite's page about
its write-ahead log format.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_HEADER_BYTES, _FRAME_BYTES = 32, 24
_MAGIC = 0x377F0682
"""The number at the start of a log. Its last bit is set if the log's checksums are big-endian."""

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """A page in the log."""

    page: int
    database_pages: int
    """In the last frame of a transaction, the size of the database after the transaction. Otherwise 0."""
    at: int
    """Offset of the page's bytes in the log."""
    is_intact: bool


@dataclass
class WriteAheadLog:
    """The bytes of a log."""

    data: bytes
    page_bytes: int
    """The size of the database's pages."""

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of the committed transactions, including those that SQLite does not read because an earlier frame
        is damaged."""
        found = list(self._frames())
        ends = [number for number, frame in enumerate(found) if frame.is_intact and frame.database_pages]
        return tuple(found[: ends[-1] + 1]) if ends else ()

    @property
    def damaged(self) -> int:
        """The number of damaged frames in `frames`. A damaged header of the log counts as one more."""
        has_header = bool(self.frames) and self._header is None
        return has_header + sum(not frame.is_intact for frame in self.frames)

    def apply(self, path: Path) -> None:
        """Write the pages of the intact frames into the database at `path`."""
        if not self.frames:
            return
        with path.open("r+b") as file:
            for frame in self.frames:
                if frame.is_intact:
                    file.seek((frame.page - 1) * self.page_bytes)
                    file.write(memoryview(self.data)[frame.at : frame.at + self.page_bytes])
            file.truncate(self.frames[-1].database_pages * self.page_bytes)

    @cached_property
    def _header(self) -> tuple[int, bytes, tuple[int, int]] | None:
        """The first number, the salts and the checksum in the header, or None if the header is damaged."""
        if len(self.data) < _HEADER_BYTES:
            return None
        magic, _, _, _, _, _, *stored = struct.unpack(">8I", self.data[:_HEADER_BYTES])
        if magic & ~1 != _MAGIC or _checksum(self.data[:24], (0, 0), is_big=bool(magic & 1)) != tuple(stored):
            return None
        return magic, self.data[16:24], (stored[0], stored[1])

    def _frames(self) -> Iterator[Frame]:
        step = _FRAME_BYTES + self.page_bytes
        starts = range(_HEADER_BYTES, len(self.data) - step + 1, step)
        salts = Counter(self.data[at + 8 : at + 16] for at in starts)
        if not starts:
            return
        header = self._header
        # SQLite overwrites an old log from the start, with new salts. Frames with the old salts may remain at the end.
        salt = header[1] if header else salts.most_common(1)[0][0]
        orders = [bool(header[0] & 1)] if header else [False, True]
        before = header[2] if header else None
        last = max((at for at in starts if self.data[at + 8 : at + 16] == salt), default=-1)
        for at in starts:
            if at > last:
                return
            page, database_pages = struct.unpack(">2I", self.data[at : at + 8])
            stored = struct.unpack(">2I", self.data[at + 16 : at + 24])
            summed = self.data[at : at + 8] + self.data[at + _FRAME_BYTES : at + step]
            is_intact = (
                before is not None
                and page > 0
                and self.data[at + 8 : at + 16] == salt
                and any(_checksum(summed, before, is_big=order) == stored for order in orders)
            )
            yield Frame(page, database_pages, at + _FRAME_BYTES, is_intact)
            before = (stored[0], stored[1])


def _checksum(data: bytes, before: tuple[int, int], *, is_big: bool) -> tuple[int, int]:
    """Return SQLite's checksum of `data`, which continues the checksum `before`."""
    one, two = before
    words = struct.unpack(f"{'>' if is_big else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        one = one + even + two & _MASK
        two = two + odd + one & _MASK
    return one, two
