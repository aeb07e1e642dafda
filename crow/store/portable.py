"""The exchange format: conversations as lines of JSON, for other machines and other programs.

Strategy: a header, then conversations one after another, then an end that proves that all of it is there. Of a
conversation come its sessions, its entries in order, each blob before the first entry that names it, and the moves.
Entries are numbered from 1 in each conversation, so that a file says nothing of the database it came from and is the
same, byte for byte, after an import and an export. Mode, model, permissions, configuration and alias of a session are
no part of it. Each record is a dataclass here; `schemas/export.schema.json` is made from them. Knows no SQL.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from crow.domain.entries import Body, Checkpoint, File, Mask, Pin, Restore, Started, ToolResult
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject, Usage
from crow.store.codec import Load, Unreadable, decode_value, dump, mend

__all__ = [
    "FORMAT",
    "RECORDS",
    "BlobRecord",
    "Block",
    "ConversationRecord",
    "End",
    "EntryRecord",
    "ExportFile",
    "Header",
    "MoveRecord",
    "Record",
    "SessionRecord",
    "blob_data",
    "blob_record",
    "line_of",
    "parse_line",
    "renumbered",
]

FORMAT = 1
"""The version of the format; a reader refuses a greater one."""

_LARGEST = 2**53
_MOST_TOKENS = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line. `format` is the version of the format."""

    format: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRecord:
    """A conversation begins: its sessions, entries and moves follow. Times are Unix milliseconds."""

    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session: a pointer into its conversation.

    `leaf` is the entry it stands on, `turn` the number of its newest turn. `parent_id` (of a sub-agent) and
    `forked_from` name sessions of the same file. `listed` is false for one without a prompt.
    """

    id: str
    cwd: str
    title: str | None
    title_by_user: bool
    parent_id: str | None
    forked_from: str | None
    leaf: int | None
    turn: int
    listed: bool
    archived: bool
    created_ms: int
    updated_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRecord:
    """Bytes that bodies name by their sha256 (hex): as text where they are UTF-8, else as base64."""

    sha256: str
    text: str | None
    base64: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """A node of the conversation's tree. `id` counts from 1, `parent` is less than it, or null at a root.

    `session` wrote it; null if that one is not in the file. `model` is the model that answered or was asked, `cost` in
    US dollars, `estimate` in tokens. `body` has the shape that `kind` says; entries are named by their `id`, 0 names
    none.
    """

    id: int
    parent: int | None
    session: str | None
    turn: int
    model: str
    usage: Usage | None
    cost: float | None
    estimate: int | None
    created_ms: int
    kind: str
    body: JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """A session was made to stand elsewhere: undo, rewind, refusal."""

    session: str
    from_leaf: int | None
    to_leaf: int | None
    reason: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last line: how many lines come before it, and the sha256 (hex) of their bytes; null is not checked."""

    lines: int
    sha256: str | None


Record: TypeAlias = Header | ConversationRecord | SessionRecord | BlobRecord | EntryRecord | MoveRecord | End

RECORDS: Mapping[str, type[Record]] = {
    "crow": Header,
    "conversation": ConversationRecord,
    "session": SessionRecord,
    "blob": BlobRecord,
    "entry": EntryRecord,
    "move": MoveRecord,
    "end": End,
}
"""The record of each `type`."""

_TYPES = {record: name for name, record in RECORDS.items()}


def line_of(record: Record, *, body: str | None = None) -> bytes:
    """The record as a line; `body` is the JSON of an entry's body, taken as it is."""
    values = {field.name: _written(getattr(record, field.name)) for field in fields(record)}
    if body is None:
        return f"{dump({'type': _TYPES[type(record)], **values})[0]}\n".encode()
    del values["body"]
    head = dump({"type": _TYPES[type(record)], **values})[0]
    return f'{head[:-1]},"body":{body}}}\n'.encode()


def parse_line(line: bytes) -> Record:
    """The record of a line.

    :raises Unreadable: it is none, or not one of this format.
    """
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Unreadable("it holds half of a surrogate pair, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is no JSON: {error}") from error
    kind = value.get("type") if type(value) is dict else None
    record = RECORDS.get(kind) if type(kind) is str else None
    if record is None:
        raise Unreadable(f"its type is {_shown(kind)}; expected one of {', '.join(RECORDS)}")
    values: dict[str, Any] = {}
    for name, check in _CHECKS[record].items():
        if name not in value:
            raise Unreadable(f"{kind}: {name} is missing")
        try:
            values[name] = check(value[name])
        except Unreadable as error:
            raise Unreadable(f"{kind}: {name} is {_shown(value[name])}; expected {error}") from error
    return record(**values)


def blob_record(name: str, data: bytes) -> BlobRecord:
    """The record of the blob `data` with the hash `name`."""
    try:
        return BlobRecord(sha256=name, text=data.decode(), base64=None)
    except UnicodeDecodeError:
        return BlobRecord(sha256=name, text=None, base64=base64.b64encode(data).decode())


def blob_data(record: BlobRecord) -> bytes:
    """What a blob holds.

    :raises Unreadable: it is not what its hash says.
    """
    if (record.text is None) == (record.base64 is None):
        raise Unreadable("blob: expected either text or base64")
    try:
        data = record.text.encode() if record.text is not None else base64.b64decode(record.base64 or "", validate=True)
    except binascii.Error as error:
        raise Unreadable(f"blob: base64 is damaged: {error}") from error
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise Unreadable(f"blob: its content does not have the sha256 {record.sha256:.80}; it is damaged")
    return data


def renumbered(body: Body, named: Callable[[int], int], bound: Callable[[int], int]) -> Body:
    """`body` with other entry ids: `named` translates the id of an entry, `bound` an id that others are compared to.

    What happened on this machine is not what happened on another: a file entry is `recorded_here` no longer.
    """
    match body:
        case File():
            call = replace(body.call, assistant=named(body.call.assistant))
            return replace(body, call=call, recorded_here=False)
        case Started() | ToolResult():
            return replace(body, call=replace(body.call, assistant=named(body.call.assistant)))
        case Checkpoint():
            first = body.first_kept
            return replace(
                body,
                first_kept=None if first is None else bound(first),
                pins=tuple(_renumbered_pin(pin, named(pin.entry)) for pin in body.pins),
            )
        case Mask():
            return replace(body, before=bound(body.before), exceptions=tuple(map(named, body.exceptions)))
        case Restore():
            return replace(body, entry=named(body.entry))
        case _:
            return body


def _renumbered_pin(pin: Pin, entry: int) -> Pin:
    """The line that stands for what was cut of a pin names the entry too."""
    text = re.sub(rf"\brecall with entry {pin.entry} gives\b", f"recall with entry {entry} gives", pin.text)
    return Pin(entry=entry, text=text)


def _written(value: object) -> object:
    if isinstance(value, Usage):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value


def _shown(value: object) -> str:
    return mend(f"{json.dumps(value, ensure_ascii=False):.60}")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")


Check: TypeAlias = Callable[[Any], Any]


def _of(*types: type, words: str) -> Check:
    def check(value: Any) -> Any:
        if type(value) not in types:
            raise Unreadable(words)
        return value

    return check


def _number(least: int, *, most: int = _LARGEST, words: str) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Unreadable(words)
        return value

    return check


def _maybe(inner: Check) -> Check:
    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return check


def _cost(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Unreadable("a number")
    return float(value)


def _usage(value: Any) -> Usage:
    names = [field.name for field in fields(Usage)]
    if type(value) is not dict or not all(name in value for name in names):
        raise Unreadable(f"an object with {', '.join(names)}")
    return Usage(**{name: _maybe(_TOKENS)(value[name]) for name in names})


_TEXT = _of(str, words="a text")
_BOOL = _of(bool, words="true or false")
_NUMBER = _number(1, words="an entry's number, from 1")
_COUNT = _number(0, words="a whole number from 0")
_TOKENS = _number(-_MOST_TOKENS, most=_MOST_TOKENS, words="a number of tokens")

_CHECKS: Mapping[type[Record], Mapping[str, Check]] = {
    Header: {"format": _NUMBER},
    ConversationRecord: {"created_ms": _COUNT},
    SessionRecord: {
        "id": _TEXT,
        "cwd": _TEXT,
        "title": _maybe(_TEXT),
        "title_by_user": _BOOL,
        "parent_id": _maybe(_TEXT),
        "forked_from": _maybe(_TEXT),
        "leaf": _maybe(_NUMBER),
        "turn": _COUNT,
        "listed": _BOOL,
        "archived": _BOOL,
        "created_ms": _COUNT,
        "updated_ms": _COUNT,
    },
    BlobRecord: {"sha256": _TEXT, "text": _maybe(_TEXT), "base64": _maybe(_TEXT)},
    EntryRecord: {
        "id": _NUMBER,
        "parent": _maybe(_NUMBER),
        "session": _maybe(_TEXT),
        "turn": _COUNT,
        "model": _TEXT,
        "usage": _maybe(_usage),
        "cost": _maybe(_cost),
        "estimate": _maybe(_TOKENS),
        "created_ms": _COUNT,
        "kind": _TEXT,
        "body": _of(dict, words="an object"),
    },
    MoveRecord: {
        "session": _TEXT,
        "from_leaf": _maybe(_NUMBER),
        "to_leaf": _maybe(_NUMBER),
        "reason": _TEXT,
        "created_ms": _COUNT,
    },
    End: {"lines": _COUNT, "sha256": _maybe(_TEXT)},
}


# FROM store.export_file: A file of the exchange format, read line by line.
#
# Strategy: `check` reads all of it and holds every line to its place: an entry after its parent, a session before its
# entries, a blob before the body that names it, an end that proves the rest; so that whatever is read again later is
# known to be whole. A file is only ever read. Blobs are looked up in it by their places, not kept in memory. Knows no
# SQL.


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
