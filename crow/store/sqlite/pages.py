"""Reads rows out of the pages of a SQLite file that SQLite itself may refuse to read.

The format is the documented one of SQLite 3. Nothing here trusts a byte: what makes no sense is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

__all__ = ["PageRow", "Pages", "Value", "wal_pages"]

Value: TypeAlias = int | float | str | bytes | None

_MAGIC = b"SQLite format 3\0"
_PAGE_BYTES = 4096
"""What SQLite makes by default: crow asks for nothing else."""

_TABLE_LEAF, _TABLE_INTERIOR, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x05, 0x0A, 0x02
_PTRMAP_FREE = 2
_MOST_COLUMNS = 200
_MOST_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row of a table or of an index, where `rowid` is None. `is_whole` is false where further values lay on pages
    that cannot be reached."""

    page: int
    rowid: int | None
    values: tuple[Value, ...]
    is_whole: bool = True


@dataclass
class Pages:
    """The pages of a database: those of `file`, replaced by those of its write-ahead log (`wal_pages`).

    `size` is the number of pages that the log gives, None without one.
    """

    file: bytes | memoryview
    newer: Mapping[int, bytes] = field(default_factory=dict)
    size: int | None = None

    @cached_property
    def _header(self) -> bytes:
        """The header of the file; empty if it is damaged."""
        header = bytes(self.newer.get(1, self.file[:100])[:100])
        return header if header.startswith(_MAGIC) and len(header) == 100 else b""

    @cached_property
    def page_bytes(self) -> int:
        """The size of a page."""
        if self._header:
            (size,) = struct.unpack(">H", self._header[16:18])
            size = 65536 if size == 1 else size
            if size >= 512 and size & (size - 1) == 0:
                return int(size)
        return _PAGE_BYTES

    @cached_property
    def _usable(self) -> int:
        """Bytes of a page that hold data."""
        return self.page_bytes - (self._header[20] if self._header and self._header[20] < 32 else 0)

    @cached_property
    def count(self) -> int:
        """How many pages there are."""
        if self.size is not None:
            return self.size
        there = len(self.file) // self.page_bytes
        if self._header and self._header[24:28] == self._header[92:96]:
            (told,) = struct.unpack(">I", self._header[28:32])
            return min(told, there) if told else there
        return there

    def page(self, number: int) -> bytes:
        """The bytes of a page; none if there is no such page."""
        if not 0 < number <= self.count:
            return b""
        if number in self.newer:
            return self.newer[number]
        start = (number - 1) * self.page_bytes
        return bytes(self.file[start : start + self.page_bytes])

    def table_rows(self) -> Iterator[PageRow]:
        """Every row of every table with rowids, from all pages in use, however they hang together."""
        for number in range(1, self.count + 1):
            if number not in self.free:
                yield from self._leaf_rows(number, _TABLE_LEAF)

    def index_rows(self) -> Iterator[PageRow]:
        """The same for indexes, and tables without rowids."""
        for number in range(1, self.count + 1):
            if number not in self.free:
                yield from self._leaf_rows(number, _INDEX_LEAF)
                yield from self._leaf_rows(number, _INDEX_INTERIOR)

    def index(self, root: int) -> Iterator[PageRow]:
        """The rows of the index with this root, from the pages of it that can be reached."""
        waiting, seen = [root], {0}
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            yield from self._leaf_rows(number, _INDEX_LEAF)
            yield from self._leaf_rows(number, _INDEX_INTERIOR)
            waiting += self._children(number)

    @cached_property
    def roots(self) -> Mapping[str, int]:
        """The root pages of tables and indexes by name, as far as the schema can be read."""
        found: dict[str, int] = {}
        waiting, seen = [1], {0}
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            for row in self._leaf_rows(number, _TABLE_LEAF):
                if len(row.values) == 5 and isinstance(row.values[1], str) and isinstance(row.values[3], int):
                    found[row.values[1]] = row.values[3]
            waiting += self._children(number)
        return found

    @cached_property
    def free(self) -> frozenset[int]:
        """Pages that hold nothing: as the list of them says, or if that is broken, the map of what each page is for."""
        listed = self._freelist()
        if listed is not None:
            return listed
        return frozenset(number for number in range(1, self.count + 1) if self._use(number) == _PTRMAP_FREE)

    def _freelist(self) -> frozenset[int] | None:
        if not self._header:
            return None
        trunk, expected = struct.unpack(">II", self._header[32:40])
        found: set[int] = set()
        while trunk:
            page = self.page(trunk)
            if not page or trunk in found:
                return None
            found.add(trunk)
            trunk, leaves = struct.unpack(">II", page[:8])
            if leaves > self._usable // 4 - 2:
                return None
            found.update(struct.unpack(f">{leaves}I", page[8 : 8 + 4 * leaves]))
        if len(found) != expected or any(number > self.count for number in found):
            return None
        return frozenset(found)

    def _use(self, number: int) -> int:
        """What the map of a database that can shrink says of a page; 0 if nothing."""
        each = self._usable // 5
        at = (number - 2) // (each + 1) * (each + 1) + 2
        place = (number - at - 1) * 5
        page = self.page(at)
        return page[place] if number > 2 and place >= 0 and len(page) > place else 0

    def _cells(self, number: int) -> tuple[int, bytes, Sequence[int]]:
        """The kind of a page, its bytes, and where its cells begin."""
        page = self.page(number)
        start = 100 if number == 1 else 0
        if len(page) < start + 12:
            return 0, page, ()
        kind = page[start]
        (cells,) = struct.unpack(">H", page[start + 3 : start + 5])
        at = start + (8 if kind in (_TABLE_LEAF, _INDEX_LEAF) else 12)
        if at + 2 * cells > self._usable:
            return 0, page, ()
        return kind, page, struct.unpack(f">{cells}H", page[at : at + 2 * cells])

    def _children(self, number: int) -> list[int]:
        kind, page, cells = self._cells(number)
        if kind not in (_TABLE_INTERIOR, _INDEX_INTERIOR):
            return []
        start = 100 if number == 1 else 0
        children = [struct.unpack(">I", page[start + 8 : start + 12])[0]]
        children += [struct.unpack(">I", page[at : at + 4])[0] for at in cells if at + 4 <= len(page)]
        return [child for child in children if 0 < child <= self.count]

    def _leaf_rows(self, number: int, wanted: int) -> Iterator[PageRow]:
        kind, page, cells = self._cells(number)
        if kind != wanted:
            return
        for at in cells:
            try:
                yield self._row(number, kind, page, at)
            except (ValueError, IndexError, struct.error):
                continue

    def _row(self, number: int, kind: int, page: bytes, at: int) -> PageRow:
        """:raises ValueError: there is no row. :raises IndexError: the same."""
        if kind == _INDEX_INTERIOR:
            at += 4
        size, at = _varint(page, at)
        rowid: int | None = None
        if kind == _TABLE_LEAF:
            value, at = _varint(page, at)
            rowid = value - (1 << 64) if value >= 1 << 63 else value
        if not 0 < size <= _MOST_BYTES:
            raise ValueError(size)
        payload = self._payload(page, at, size, is_table=kind == _TABLE_LEAF)
        values = _values(payload, is_whole=len(payload) == size)
        return PageRow(number, rowid, values, is_whole=len(payload) == size)

    def _payload(self, page: bytes, at: int, size: int, *, is_table: bool) -> bytes:
        """The bytes of a row: those on its page, and those on the pages that follow, as far as they can be reached."""
        most = self._usable - 35 if is_table else (self._usable - 12) * 64 // 255 - 23
        if size <= most:
            if at + size > self._usable:
                raise ValueError(at)
            return page[at : at + size]
        least = (self._usable - 12) * 32 // 255 - 23
        local = least + (size - least) % (self._usable - 4)
        local = least if local > most else local
        if at + local + 4 > self._usable:
            raise ValueError(at)
        parts, left = [page[at : at + local]], size - local
        (following,) = struct.unpack(">I", page[at + local : at + local + 4])
        seen: set[int] = set()
        while left > 0:
            overflow = self.page(following)
            if not overflow or following in seen or following in self.free:
                break
            seen.add(following)
            parts.append(overflow[4 : min(self._usable, 4 + left)])
            left -= len(parts[-1])
            (following,) = struct.unpack(">I", overflow[:4])
        return b"".join(parts)


def wal_pages(wal: bytes) -> tuple[Mapping[int, bytes], int | None]:
    """The pages of a write-ahead log that were committed, the newest of each, and the number of pages of the database
    then; None if nothing was."""
    if len(wal) < 32:
        return {}, None
    magic, _, page_bytes = struct.unpack(">III", wal[:12])
    if magic & ~1 != 0x377F0682 or page_bytes < 512:
        return {}, None
    words = ">" if magic & 1 else "<"
    salts, sums = wal[16:24], _sums(words, wal[:24], (0, 0))
    if sums != struct.unpack(">II", wal[24:32]):
        return {}, None
    committed: dict[int, bytes] = {}
    waiting: dict[int, bytes] = {}
    size: int | None = None
    for at in range(32, len(wal) - 24 - page_bytes + 1, 24 + page_bytes):
        head, page = wal[at : at + 24], wal[at + 24 : at + 24 + page_bytes]
        number, commit, *expected = struct.unpack(">II8xII", head)
        sums = _sums(words, page, _sums(words, head[:8], sums))
        if head[8:16] != salts or sums != tuple(expected):
            break
        waiting[number] = page
        if commit:
            committed |= waiting
            waiting, size = {}, commit
    return committed, size


def _sums(words: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """The checksum of the write-ahead log, gone on with."""
    first, second = sums
    numbers = struct.unpack(f"{words}{len(data) // 4}I", data)
    for even, odd in zip(numbers[::2], numbers[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends. :raises IndexError: it does not end."""
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | data[at], at + 1


def _values(payload: bytes, *, is_whole: bool) -> tuple[Value, ...]:
    """The values of a record. :raises ValueError: it is none. :raises IndexError: the same."""
    head, at = _varint(payload, 0)
    kinds = []
    while at < head:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    if at != head or not 0 < len(kinds) <= _MOST_COLUMNS:
        raise ValueError(head)
    values: list[Value] = []
    for kind in kinds:
        size = _SIZES[kind] if kind < 12 else (kind - 12) // 2
        data = payload[at : at + size]
        if len(data) < size and is_whole:
            raise ValueError(kind)
        at += size
        if len(data) < size:
            break
        values.append(_value(kind, data))
    if is_whole and at != len(payload):
        raise ValueError(at)
    return tuple(values)


_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0, -1, -1)


def _value(kind: int, data: bytes) -> Value:
    """:raises ValueError: no value is of this kind."""
    if kind >= 12:
        return data.decode("utf-8", "replace") if kind % 2 else data
    match kind:
        case 0:
            return None
        case 7:
            number: float = struct.unpack(">d", data)[0]
            return number
        case 8 | 9:
            return kind - 8
        case 10 | 11:
            raise ValueError(kind)
        case _:
            return int.from_bytes(data, "big", signed=True)
