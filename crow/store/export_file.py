"""A file of the exchange format, read line by line.

Strategy: `check` reads all of it and holds every line to its place: an entry after its parent, a session before its
entries, a blob before the body that names it, an end that proves the rest; so that whatever is read again later is
known to be whole. A file is only ever read. Blobs are looked up in it by their places, not kept in memory. Knows no
SQL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from crow.domain.entries import Body, File, Started, ToolResult
from crow.domain.errors import ArgumentError
from crow.store.codec import Unreadable, decode_value
from crow.store.exchange import (
    FORMAT,
    BlobRecord,
    ConversationRecord,
    End,
    EntryRecord,
    Header,
    MoveRecord,
    Record,
    SessionRecord,
    blob_data,
    parse_line,
)
from crow.store.fields import Load

__all__ = ["Block", "ExportFile"]

_LONGEST_LINE = 1024 * 1024 * 1024
_LONGEST_HEADER = 1024
_MOST_CALLS = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A conversation in a file: where its lines begin, how many, their hash, its sessions and number of entries."""

    offset: int
    line: int
    lines: int
    hash: str
    sessions: tuple[str, ...]
    entries: int


class ExportFile:
    """A file that `export` wrote. Closed by whoever opened it."""

    def __init__(self, path: Path) -> None:
        """:raises ArgumentError: it cannot be read."""
        self.path = path
        self._blobs: dict[str, int] = {}
        try:
            self._file: BinaryIO = path.open("rb")
            self._again: BinaryIO = path.open("rb")
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from error

    def close(self) -> None:
        """Close it."""
        self._file.close()
        self._again.close()

    def check(self) -> tuple[Block, ...]:
        """Read all of it.

        :raises ArgumentError: some line cannot be taken; it names the line and says why.
        """
        number = 1
        blocks: list[_Checked] = []
        taken: set[str] = set()
        whole = hashlib.sha256()
        try:
            self._file.seek(0)
            line = self._next_line(_LONGEST_HEADER, "no crow export")
            _check_header(line)
            while True:
                whole.update(line)
                number += 1
                offset = self._file.tell()
                line = self._next_line(_LONGEST_LINE, "too long for a line of an export")
                record = parse_line(line)
                if isinstance(record, End):
                    _check_end(record, number - 1, whole.hexdigest(), self._file.read(1))
                    break
                if isinstance(record, ConversationRecord):
                    self._end_block(blocks)
                    blocks.append(_Checked(offset, number, taken))
                _check_begun(blocks)
                blocks[-1].add(line, number, record, self._load, offset, self._blobs)
            self._end_block(blocks)
            for block in blocks:
                block.check_relatives(taken)
        except _Misplaced as error:
            raise ArgumentError(f"{self.path}, line {error.line}: {error}. Nothing was imported.") from error
        except Unreadable as error:
            raise ArgumentError(f"{self.path}, line {number}: {error}. Nothing was imported.") from error
        except OSError as error:
            raise ArgumentError(f"{self.path} cannot be read: {error.strerror}. Nothing was imported.") from error
        return tuple(block.finished() for block in blocks)

    def records(self, block: Block) -> Iterator[tuple[Record, Body | None]]:
        """The records of a block that was checked, an entry with its body (numbered as in the file).

        :raises ArgumentError: the file was changed since.
        """
        self._blobs.clear()
        self._file.seek(block.offset)
        found = hashlib.sha256()
        try:
            for _ in range(block.lines):
                offset = self._file.tell()
                line = self._file.readline()
                found.update(line)
                record = parse_line(line)
                if isinstance(record, BlobRecord):
                    self._blobs[record.sha256] = offset
                yield record, _body(record, self._load) if isinstance(record, EntryRecord) else None
        except Unreadable as error:
            raise ArgumentError(f"{self.path} was changed while it was imported; import it again.") from error
        if found.hexdigest() != block.hash:
            raise ArgumentError(f"{self.path} was changed while it was imported; import it again.")

    def _end_block(self, blocks: Sequence[_Checked]) -> None:
        if blocks:
            blocks[-1].check_end()
        self._blobs.clear()

    def _next_line(self, longest: int, words: str) -> bytes:
        line = self._file.readline(longest + 1)
        if len(line) > longest:
            raise Unreadable(f"it is {words}")
        if not line.endswith(b"\n"):
            raise Unreadable("the file ends here, before its last line" if line or self._file.tell() else "it is empty")
        return line

    def _load(self, name: str) -> bytes | None:
        offset = self._blobs.get(name)
        if offset is None:
            return None
        self._again.seek(offset)
        record = parse_line(self._again.readline())
        return blob_data(record) if isinstance(record, BlobRecord) else None


class _Misplaced(Unreadable):
    """What only shows at the end of a conversation, about an earlier line."""

    def __init__(self, line: int, words: str) -> None:
        super().__init__(words)
        self.line = line


class _Checked:
    """A conversation as far as it was read: whether each record is in its place."""

    def __init__(self, offset: int, line: int, taken: set[str]) -> None:
        self._offset = offset
        self._line = line
        self._lines = 0
        self._taken = taken
        self._hash = hashlib.sha256()
        self._has_moves = False
        self._entries = 0
        self._leaves: list[tuple[int, str, int]] = []
        self._relatives: list[tuple[int, str, str]] = []
        self.sessions: list[str] = []

    def add(self, line: bytes, number: int, record: Record, load: Load, offset: int, blobs: dict[str, int]) -> None:
        """:raises Unreadable: it has no place here."""
        self._hash.update(line)
        self._lines += 1
        match record:
            case SessionRecord():
                self._add_session(record, number)
            case BlobRecord():
                blob_data(record)
                blobs[record.sha256] = offset
            case EntryRecord():
                self._add_entry(record)
                _body(record, load)
            case MoveRecord():
                self._has_moves = True
                self._check_writer("move", record.session)
                for name, leaf in (("from_leaf", record.from_leaf), ("to_leaf", record.to_leaf)):
                    if leaf is not None and leaf > self._entries:
                        raise Unreadable(f"move: {name} is {leaf}, but the conversation has {self._entries} entries")
            case Header():
                raise Unreadable("a second header; expected a conversation, one of its records, or the end")
            case _:
                pass

    def check_end(self) -> None:
        """:raises Unreadable: something is missing."""
        if not self.sessions:
            raise _Misplaced(self._line, "conversation: it has no session")
        for line, session, leaf in self._leaves:
            if leaf > self._entries:
                words = f'session "{session}": leaf is {leaf}, but the conversation has {self._entries} entries'
                raise _Misplaced(line, words)

    def check_relatives(self, sessions: Collection[str]) -> None:
        """:raises Unreadable: a session names one that is not in the file: it might be one of the reader's own."""
        for line, session, kin in self._relatives:
            if kin not in sessions:
                raise _Misplaced(
                    line, f'session "{session}": parent_id or forked_from is "{kin:.80}", not of this file'
                )

    def finished(self) -> Block:
        """The block."""
        return Block(
            offset=self._offset,
            line=self._line,
            lines=self._lines,
            hash=self._hash.hexdigest(),
            sessions=tuple(self.sessions),
            entries=self._entries,
        )

    def _add_session(self, record: SessionRecord, number: int) -> None:
        if self._entries or self._has_moves:
            raise Unreadable("session: it comes after an entry; expected it before")
        if not record.id or record.id in self._taken:
            raise Unreadable(f'session: id is "{record.id:.80}"; expected one that no other session of the file has')
        self.sessions.append(record.id)
        self._taken.add(record.id)
        self._relatives += [
            (number, record.id, kin) for kin in (record.parent_id, record.forked_from) if kin is not None
        ]
        if record.leaf is not None:
            self._leaves.append((number, record.id, record.leaf))

    def _add_entry(self, record: EntryRecord) -> None:
        if self._has_moves:
            raise Unreadable("entry: it comes after a move; expected it before")
        if record.id != self._entries + 1:
            raise Unreadable(f"entry: id is {record.id}; expected {self._entries + 1}, the next number")
        if record.parent is not None and record.parent >= record.id:
            raise Unreadable(f"entry: parent is {record.parent}; expected an entry before {record.id}, or null")
        if record.session is not None:
            self._check_writer("entry", record.session)
        self._entries = record.id

    def _check_writer(self, kind: str, session: str) -> None:
        if session not in self.sessions:
            raise Unreadable(f'{kind}: session is "{session:.80}", which is no session of this conversation')


def _check_header(line: bytes) -> None:
    try:
        record = parse_line(line)
    except Unreadable:
        record = None
    if not isinstance(record, Header):
        raise Unreadable('it is no crow export; expected {"type":"crow","format":1}')
    if record.format > FORMAT:
        raise Unreadable(f"format is {record.format}; this crow knows {FORMAT}: upgrade it")


def _check_begun(blocks: Sequence[_Checked]) -> None:
    if not blocks:
        raise Unreadable("it comes before any conversation")


def _check_end(end: End, lines: int, digest: str, rest: bytes) -> None:
    if end.lines != lines:
        raise Unreadable(f"end: lines is {end.lines}, but {lines} come before it: some are missing, or were added")
    if end.sha256 is not None and end.sha256 != digest:
        raise Unreadable(
            "end: sha256 is not that of the lines before it: the file is damaged or was edited (if you edited it, make"
            " sha256 null)"
        )
    if rest:
        raise Unreadable("end: something comes after it; expected the end of the file")


def _body(record: EntryRecord, load: Load) -> Body:
    """:raises Unreadable: it is damaged, or from a newer version."""
    try:
        body = decode_value(record.kind, dict(record.body), load)
    except Unreadable as error:
        raise Unreadable(f"entry {record.id} ({record.kind:.80}): {error}") from error
    if isinstance(body, Started | File | ToolResult) and not 0 <= body.call.index < _MOST_CALLS:
        raise Unreadable(f"entry {record.id}: call.index is {body.call.index}; expected the index of a call, from 0")
    return body
