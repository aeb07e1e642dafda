"""Reads a damaged write-ahead log (WAL).

SQLite stops reading a log at the first frame whose checksum is wrong, and so drops everything after a damaged byte. The
checksum of each frame continues the checksum of the frame before it. So the frames after a damaged frame can still be
checked, starting from the checksum that is stored in the damaged frame. The layout is documented on SQLite's page about
its write-ahead log format.

Not every frame that continues the frame before it may be applied. Frames of two kinds are left over from earlier:

- When the log was restarted, SQLite overwrites it from its start. The frames behind the new ones have older salts.
- When SQLite has dropped the frames after a damaged one, it writes the next commits in their place. The dropped frames
  behind the new ones have the same salts, and still continue each other. But the first of them does not continue the
  last new one, which ends a transaction.
"""

from __future__ import annotations

import struct
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
    may_be_old: bool
    """Whether it follows the end of a transaction, but does not continue it, and this is not only because one word (4
    bytes) is damaged. Such a frame and all frames after it may be left over from before the frames before it."""


@dataclass
class WriteAheadLog:
    """The bytes of a log."""

    data: bytes
    page_bytes: int
    """The size of the database's pages."""

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The frames of the committed transactions, including those that SQLite does not read because an earlier frame
        is damaged, but without frames that may be left over from before."""
        first_old = next((number for number, frame in enumerate(self._all) if frame.may_be_old), None)
        return _up_to_last_commit(self._all[:first_old])

    @property
    def unused(self) -> int:
        """The number of frames of committed transactions that are not in `frames`, because they may be left over from
        before."""
        return len(_up_to_last_commit(self._all)) - len(self.frames)

    @property
    def damaged(self) -> int:
        """The number of damaged frames in `frames`. A damaged header of the log counts as one more."""
        is_header_damaged = bool(self.frames) and self._header is None
        return is_header_damaged + sum(not frame.is_intact for frame in self.frames)

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
    def _header(self) -> tuple[bool, bytes] | None:
        """Whether the log's checksums are big-endian, and the salts of its frames. None if the header is damaged."""
        if len(self.data) < _HEADER_BYTES:
            return None
        magic, _, _, _, _, _, *stored = struct.unpack(">8I", self.data[:_HEADER_BYTES])
        if magic & ~1 != _MAGIC or _checksum(self.data[:24], (0, 0), is_big=bool(magic & 1)) != tuple(stored):
            return None
        return bool(magic & 1), self.data[16:24]

    @cached_property
    def _all(self) -> tuple[Frame, ...]:
        """The frames up to the last one that has the log's salts."""
        return tuple(self._frames())

    def _frames(self) -> Iterator[Frame]:
        step = _FRAME_BYTES + self.page_bytes
        starts = range(_HEADER_BYTES, len(self.data) - step + 1, step)
        salts = self._newest_salts(starts)
        last = max((at for at in starts if self._salts_at(at) == salts), default=-1)
        is_after_commit = False
        for at in starts:
            if at > last:
                return
            page, database_pages = struct.unpack(">2I", self.data[at : at + 8])
            differences = self._differences(at)
            is_intact = page > 0 and self._salts_at(at) == salts and (0, 0) in differences
            is_one_word = any(_is_one_word(*difference, step // 4) for difference in differences)
            yield Frame(page, database_pages, at + _FRAME_BYTES, is_intact, is_after_commit and not is_one_word)
            is_after_commit = is_intact and database_pages > 0

    def _newest_salts(self, starts: range) -> bytes:
        """Return the salts of the frames that were written since the log was restarted last.

        If the header is damaged, these are the first salts that are surely not damaged themselves: the header has them
        too, or their frame is intact, or they follow the salts of an older frame. (A restart raises the first salt by
        one, and replaces the second one by a random number.)
        """
        if self._header is not None:
            return self._header[1]
        following = {self._first_salt(at) + 1 & _MASK for at in starts}
        for at in starts:
            salts = self._salts_at(at)
            if salts == self.data[16:24] or self._first_salt(at) in following or (0, 0) in self._differences(at):
                return salts
        return b""

    def _salts_at(self, at: int) -> bytes:
        return self.data[at + 8 : at + 16]

    def _first_salt(self, at: int) -> int:
        return int.from_bytes(self.data[at + 8 : at + 12], "big")

    def _differences(self, at: int) -> list[tuple[int, int]]:
        """Return the stored checksum of the frame at `at` minus its real checksum, for each possible byte order. The
        checksum continues the stored checksum of the frame before, or of the header, which may be intact even if other
        bytes of the header are not."""
        end = at + _FRAME_BYTES + self.page_bytes
        before_at = 24 if at == _HEADER_BYTES else at - self.page_bytes - 8
        before = struct.unpack(">2I", self.data[before_at : before_at + 8])
        one, two = struct.unpack(">2I", self.data[at + 16 : at + 24])
        summed = self.data[at : at + 8] + self.data[at + _FRAME_BYTES : end]
        orders = [False, True] if self._header is None else [self._header[0]]
        sums = [_checksum(summed, before, is_big=is_big) for is_big in orders]
        return [(one - first & _MASK, two - second & _MASK) for first, second in sums]


def _up_to_last_commit(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    ends = [number for number, frame in enumerate(frames) if frame.is_intact and frame.database_pages]
    return frames[: ends[-1] + 1] if ends else ()


def _is_one_word(one: int, two: int, words: int) -> bool:
    """Return whether a change of a single word explains the difference (`one`, `two`) of two checksums over at most
    `words` words.

    If a word of the checksum itself was changed, one of the two numbers is 0. If the n-th last word of the data was
    changed by d, the difference is d times two successive Fibonacci numbers, because each further step adds the two
    numbers. So take such steps back, until the first number is 0. For two unrelated checksums of a page of 4096 bytes,
    the chance that it becomes 0 is one in four million.
    """
    one, two = two, one + two & _MASK  # a step on, where a changed first number has become (0, d)
    for _ in range(words + 1):
        if one == 0:
            return True
        one, two = two - one & _MASK, one
    return False


def _checksum(data: bytes, before: tuple[int, int], *, is_big: bool) -> tuple[int, int]:
    """Return SQLite's checksum of `data`, which continues the checksum `before`."""
    one, two = before
    words = struct.unpack(f"{'>' if is_big else '<'}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        one = one + even + two & _MASK
        two = two + odd + one & _MASK
    return one, two
