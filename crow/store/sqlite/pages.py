"""Reads rows straight from the pages of a damaged SQLite file.

SQLite finds a row through the header, the schema and the pages above the row's page. If one of these is damaged, SQLite
cannot read the rows below it. SQLite's shell can recover such rows with `.recover`, but Python's `sqlite3` cannot. This
module reads each page independently, so only the rows on a damaged page are lost. The layout of pages is described in
SQLite's documentation of the database file format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

Value: TypeAlias = int | float | str | bytes | None

_MAGIC = b"SQLite format 3\0"
_DEFAULT_PAGE_BYTES = 4096
_TABLE_LEAF, _TABLE_INTERIOR, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x05, 0x0A, 0x02
_KINDS = frozenset({_TABLE_LEAF, _TABLE_INTERIOR, _INDEX_LEAF, _INDEX_INTERIOR})
_LIKELY_KINDS = {kind ^ 1 << bit: kind for kind in (_INDEX_LEAF, _TABLE_LEAF) for bit in range(1, 8)}
"""Maps damaged page types to the leaf type that differs from them in one bit. Zero is not among the damaged types,
because unused and overflow pages begin with it."""

_MOST_CUT_OFF = 1000
"""If the header says that more than this many times the existing pages are missing, the header is damaged."""

_MAX_COLUMNS = 200
_MAX_ROW_BYTES = 1_000_000_000


class Undecodable(str):
    """A text that was stored with bytes that are not valid UTF-8. In the text, these bytes are replaced."""

    raw: bytes
    """The stored bytes of the whole text."""


def text_of(data: bytes) -> str:
    """Return the text that is stored as these bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        text = Undecodable(data.decode("utf-8", "replace"))
        text.raw = data
        return text


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row of a table or of an index."""

    rowid: int | None
    """None for a row of an index."""
    values: tuple[Value, ...]
    is_whole: bool = True
    """False if at least one value is missing because its page cannot be reached."""


@dataclass
class Pages:
    """The pages of a database file without a write-ahead log."""

    file: bytes | memoryview

    def rows(self) -> Iterator[PageRow]:
        """Return every row of every table and index, from all pages that are in use."""
        for number in range(1, self.count + 1):
            if number not in self.free:
                yield from self._rows_on(number)

    def tree(self, root: int) -> Iterator[PageRow]:
        """Return the rows of the table or index with this root page. Pages that cannot be reached are left out."""
        waiting, visited = [root], {0}
        while waiting:
            number = waiting.pop()
            if number not in visited:
                visited.add(number)
                yield from self._rows_on(number)
                waiting += self._children(number)

    @cached_property
    def roots(self) -> Mapping[str, int]:
        """Maps the names of tables and indexes to their root pages. Names that cannot be read are left out.

        If the schema's own root is damaged, all pages are searched for the rows of the schema.
        """
        found = dict(map(_root, filter(_is_of_schema, self.tree(1))))
        return found if found else dict(map(_root, filter(_is_of_schema, self.rows())))

    @cached_property
    def page_bytes(self) -> int:
        """The size of a page in bytes."""
        (size,) = struct.unpack(">H", self._header[16:18]) if self._header else (0,)
        size = 65536 if size == 1 else size
        if size < 512 or size & (size - 1):
            return _DEFAULT_PAGE_BYTES
        (pages,) = struct.unpack(">I", self._header[28:32])
        # If only the default page size fits the size of the file, the page size in the header is damaged.
        fits_default = pages * _DEFAULT_PAGE_BYTES == len(self.file) != pages * size
        return _DEFAULT_PAGE_BYTES if fits_default else int(size)

    @cached_property
    def count(self) -> int:
        """The number of pages. The last one may be cut off."""
        in_file = -(-len(self.file) // self.page_bytes)
        if self._header and self._header[24:28] == self._header[92:96]:
            (in_header,) = struct.unpack(">I", self._header[28:32])
            # A number in the header that is less than half of the number of pages in the file is damaged. If it is only
            # a little smaller, the pages beyond it are left over from a vacuum.
            return in_header if in_file // 2 < in_header < in_file else in_file
        return in_file

    @property
    def cut_off(self) -> int:
        """The number of pages that are missing at the end of the file."""
        if self._header and self._header[24:28] == self._header[92:96]:
            (in_header,) = struct.unpack(">I", self._header[28:32])
            missing = int(in_header) - len(self.file) // self.page_bytes
            return missing if 0 < missing < _MOST_CUT_OFF * self.count else 0
        return 0

    @cached_property
    def free(self) -> frozenset[int]:
        """The numbers of unused pages. They come from the freelist, or, if the freelist is damaged, from the map of
        page types."""
        listed = self._freelist()
        if listed is not None:
            return listed
        return frozenset(number for number in range(1, self.count + 1) if self._is_marked_free(number))

    @cached_property
    def _header(self) -> bytes:
        """The header of the file. If the header is damaged, the result is empty."""
        header = bytes(self.file[:100])
        return header if header.startswith(_MAGIC) and len(header) == 100 else b""

    @cached_property
    def _usable(self) -> int:
        """The number of bytes in a page that can hold data."""
        return self.page_bytes - (self._header[20] if self._header and self._header[20] < 32 else 0)

    def _page(self, number: int) -> bytes:
        """Return the bytes of a page, or no bytes if there is no such page."""
        start = (number - 1) * self.page_bytes
        return bytes(self.file[start : start + self.page_bytes]) if 0 < number <= self.count else b""

    def _freelist(self) -> frozenset[int] | None:
        if not self._header:
            return None
        trunk, expected = struct.unpack(">II", self._header[32:40])
        found: set[int] = set()
        while trunk:
            page = self._page(trunk)
            if not page or trunk in found:
                return None
            found.add(trunk)
            trunk, leaves = struct.unpack(">II", page[:8])
            if leaves > self._usable // 4 - 2:
                return None
            found.update(struct.unpack(f">{leaves}I", page[8 : 8 + 4 * leaves]))
        return frozenset(found) if len(found) == expected and max(found, default=0) <= self.count else None

    def _is_marked_free(self, number: int) -> bool:
        """Return whether the page is marked as free in the map of page types. A database with auto_vacuum has such a
        map."""
        entries = self._usable // 5
        map_page = (number - 2) // (entries + 1) * (entries + 1) + 2
        at = (number - map_page - 1) * 5
        return number > 2 and at >= 0 and self._page(map_page)[at : at + 1] == b"\x02"

    def _cells(self, number: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Return the type of a page, its bytes, and the offsets of its cells."""
        page, start = self._page(number), 100 if number == 1 else 0
        if len(page) < start + 12:
            return 0, page, ()
        kind = page[start] if page[start] in _KINDS else _LIKELY_KINDS.get(page[start], 0)
        (cells,) = struct.unpack(">H", page[start + 3 : start + 5])
        at = start + (8 if kind in (_TABLE_LEAF, _INDEX_LEAF) else 12)
        if at + 2 * cells > self._usable:
            return 0, page, ()
        return kind, page, struct.unpack(f">{cells}H", page[at : at + 2 * cells])

    def _children(self, number: int) -> list[int]:
        kind, page, cells = self._cells(number)
        if kind not in (_TABLE_INTERIOR, _INDEX_INTERIOR):
            return []
        places = [(100 if number == 1 else 0) + 8, *cells]
        return [int.from_bytes(page[at : at + 4], "big") for at in places]

    def _rows_on(self, number: int) -> Iterator[PageRow]:
        kind, page, cells = self._cells(number)
        if kind in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR):
            for at in cells:
                try:
                    yield self._row(kind, page, at)
                except (ValueError, IndexError, struct.error):
                    continue

    def _row(self, kind: int, page: bytes, at: int) -> PageRow:
        """:raises ValueError, IndexError, struct.error: there is no row at this offset."""
        if kind == _INDEX_INTERIOR:
            at += 4
        size, at = _varint(page, at)
        rowid: int | None = None
        if kind == _TABLE_LEAF:
            value, at = _varint(page, at)
            rowid = value - (1 << 64) if value >= 1 << 63 else value
        if not 0 < size <= _MAX_ROW_BYTES:
            raise ValueError(size)
        payload = self._payload(page, at, size, is_table=kind == _TABLE_LEAF)
        is_whole = len(payload) == size
        return PageRow(rowid, _values(payload, is_whole=is_whole), is_whole)

    def _payload(self, page: bytes, at: int, size: int, *, is_table: bool) -> bytes:
        """Return the bytes of a row, from its page and its overflow pages. If an overflow page cannot be reached,
        return the bytes on the pages before it."""
        most = self._usable - 35 if is_table else (self._usable - 12) * 64 // 255 - 23
        least = (self._usable - 12) * 32 // 255 - 23
        local = size if size <= most else least + (size - least) % (self._usable - 4)
        local = least if local > most else local
        if at + local + (4 if local < size else 0) > min(self._usable, len(page)):
            raise ValueError(at)
        parts, missing, link = [page[at : at + local]], size - local, page[at + local : at + local + 4]
        visited: set[int] = set()
        while missing > 0:
            number = int.from_bytes(link, "big")
            overflow = self._page(number)
            if not overflow or number in visited or number in self.free:
                break
            visited.add(number)
            parts.append(overflow[4 : min(self._usable, 4 + missing)])
            if len(overflow) < self.page_bytes:  # the file ends here
                break
            missing -= len(parts[-1])
            link = overflow[:4]
        return b"".join(parts)


def _is_of_schema(row: PageRow) -> bool:
    """Return whether this is the row of a table or an index in the schema."""
    match row.values:
        case ("table" | "index", str(), str(), int() as root, str() | None) if root > 0:
            return row.rowid is not None
    return False


def _root(row: PageRow) -> tuple[str, int]:
    name, root = row.values[1], row.values[3]
    assert isinstance(name, str)
    assert isinstance(root, int)
    return name, root


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer that is stored in one to nine bytes, and the offset of the next byte.

    :raises IndexError: the data ends before the end of the integer.
    """
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | data[at], at + 1


_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
"""The sizes of values in bytes, indexed by type number. Type numbers of 12 and above stand for blobs and texts, and are
not in this list. SQLite does not use 10 and 11."""


def _values(payload: bytes, *, is_whole: bool) -> tuple[Value, ...]:
    """Return the values of a record.

    :raises ValueError, IndexError: this is not a record.
    """
    head, at = _varint(payload, 0)
    kinds = []
    while at < head:
        kind, at = _varint(payload, at)
        kinds.append(kind)
    if at != head or not 0 < len(kinds) <= _MAX_COLUMNS:
        raise ValueError(head)
    values: list[Value] = []
    for kind in kinds:
        size = (kind - 12) // 2 if kind >= 12 else _SIZES[kind]
        data = payload[at : at + size]
        if len(data) < size and not is_whole:
            return tuple(values)
        at += size
        values.append(_value(kind, data))
    if is_whole and at != len(payload):
        raise ValueError(at)
    return tuple(values)


def _value(kind: int, data: bytes) -> Value:
    match kind:
        case 0:
            return None
        case 7:
            number: float = struct.unpack(">d", data)[0]
            return number
        case 8 | 9:
            return kind - 8
        case _ if kind >= 12:
            return text_of(data) if kind % 2 else data
        case _:
            return int.from_bytes(data, "big", signed=True)
