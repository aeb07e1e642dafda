"""The export format: conversations as lines of JSON, for other machines and other programs.

A file consists of a header, the conversations one after another, and a last line with the sha256 of all lines before
it. A conversation consists of its sessions, its entries in order, and its moves. Each blob comes before the first entry
that names it. Entries are numbered from 1 in each conversation. So if a conversation is exported, imported and exported
again, both exports have the same bytes. A session's mode, model, permissions, configuration and alias are not exported.
`schemas/export.schema.json` is generated from the records here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeAlias
from unicodedata import category

from crow.domain.entries import Body, Checkpoint, File, Mask, Note, Pin, Prompt, Restore, Started, ToolResult
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject, Usage
from crow.domain.text import safe
from crow.store import codec
from crow.store.codec import Blobs, Load, Unreadable, decode_value, dump, expect, show

FORMAT = 1
"""The version of the format. Files with a higher version are refused."""

_MAX_LINE_BYTES = 1024 * 1024 * 1024
_MAX_HEADER_BYTES = 1024
_MAX_CALLS = 2**31
_MAX_DEPTH = 200
_MAX_ID_CHARS = 200
_MAX_NAME_CHARS = 1_000
_MAX_PATH_CHARS = 4_096
_MAX_TITLE_CHARS = 200
_PLAIN_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@+-]{{0,{_MAX_ID_CHARS - 1}}}")
"""Matches ids that have no special meaning in a shell or for an option parser."""
_ABSOLUTE = re.compile(r"/|[A-Za-z]:[\\/]|\\\\")
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Matches strings and brackets in JSON. A string without an end matches up to the end of the line, so that no part of
the line is scanned twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line."""

    format: int
    """The version of the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRecord:
    """The beginning of a conversation. The conversation's sessions, entries and moves follow. Times are Unix
    milliseconds."""

    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """A session, which points to an entry of its conversation."""

    id: str
    cwd: str
    title: str | None
    title_by_user: bool
    parent_id: str | None
    """For a subagent: the id of a session in the same file."""
    forked_from: str | None
    """For a fork: the id of a session in the same file."""
    leaf: int | None
    """The id of the entry to which the session points."""
    turn: int
    """The number of the session's newest turn."""
    listed: bool
    """False for a session without a prompt."""
    archived: bool
    created_ms: int
    updated_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRecord:
    """Bytes that bodies of entries refer to by their sha256 (hex)."""

    sha256: str
    text: str | None
    """The bytes, if they are valid UTF-8."""
    base64: str | None
    """The bytes, if they are not valid UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord:
    """A node of the conversation's tree."""

    id: int
    """Counts from 1."""
    parent: int | None
    """A smaller id, or null for a root."""
    session: str | None
    """The session that wrote the entry, or null if that session is not in the file."""
    turn: int
    model: str
    """For an answer, the model that wrote it. For a prompt, the model to which the prompt was sent."""
    usage: Usage | None
    cost: float | None
    """In US dollars."""
    estimate: int | None
    """In tokens."""
    created_ms: int
    kind: str
    body: JsonObject
    """Its shape depends on `kind`. A body refers to other entries by their `id`, where 0 means no entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """A move of a session to another entry, for example by undo, rewind or a refusal."""

    session: str
    from_leaf: int | None
    to_leaf: int | None
    reason: str
    created_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last line."""

    lines: int
    """The number of the lines before this one."""
    sha256: str | None
    """The hash (hex) of the bytes of the lines before this one. If it is null, the hash is not checked."""


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
"""Maps the value of `type` in a line to the class of its record."""

_ENTRY_START = b'{"type":"entry",'
_USUAL_STARTS = (_ENTRY_START, b'{"type":"blob",')
"""Most lines of a file that crow wrote begin with one of these."""

_TIME = expect(
    "a time in milliseconds before the year 10000",
    lambda value: type(value) is int and 0 <= value < 253_402_300_800_000,
)
_ID = expect(
    f"1 to {_MAX_ID_CHARS} characters: ASCII letters, digits and . _ : @ + -, beginning with a letter or digit",
    lambda value: type(value) is str and _PLAIN_ID.fullmatch(value) is not None,
)
_DIRECTORY = expect(
    f"an absolute path of at most {_MAX_PATH_CHARS:,} characters, without control characters",
    lambda value: (
        type(value) is str
        and len(value) <= _MAX_PATH_CHARS
        and _ABSOLUTE.match(value) is not None
        and not any(category(character) == "Cc" for character in value)
    ),
)
_NAME = expect(
    f"a string of at most {_MAX_NAME_CHARS:,} characters",
    lambda value: type(value) is str and len(value) <= _MAX_NAME_CHARS,
)
_COUNT = expect("a whole number, 0 or greater", lambda value: type(value) is int and 0 <= value <= 2**53)
_TOKENS = expect("a number of tokens", lambda value: type(value) is int and -(2**63) < value < 2**63)

_SPECIAL: Mapping[type, Mapping[str, codec.Field]] = {
    ConversationRecord: {"created_ms": _TIME},
    SessionRecord: {"id": _ID, "cwd": _DIRECTORY, "created_ms": _TIME, "updated_ms": _TIME},
    EntryRecord: {
        "usage": codec.optional(codec.record(Usage, integer=_TOKENS)),
        "estimate": codec.optional(_TOKENS),
        "model": _NAME,
        "created_ms": _TIME,
    },
    MoveRecord: {"reason": _NAME, "created_ms": _TIME},
}
_SHAPES: Mapping[type, tuple[str, codec.Record]] = {
    record: (name, codec.record(record, integer=_COUNT, **_SPECIAL.get(record, {}))) for name, record in RECORDS.items()
}
"""Maps each record class to its `type`, and to the functions that write and read such a record."""


def line_of(record: Record, *, body: str | None = None) -> bytes:
    """Return the record as a line. If `body` is given, it is the JSON of an entry's body, and is written unchanged
    instead of the body in the record."""
    name, shape = _SHAPES[type(record)]
    values = {"type": name, **shape.encode(record, Blobs())}
    if body is None:
        return f"{dump(values)[0]}\n".encode()
    del values["body"]
    return f'{dump(values)[0][:-1]},"body":{body}}}\n'.encode()


def _parse_line(line: bytes) -> Record:
    """Return the record in a line.

    :raises Unreadable: the line is not a record of this format.
    """
    if _depth(line) > _MAX_DEPTH:
        raise Unreadable(f"it has more than {_MAX_DEPTH} levels of nested values")
    try:
        value = _DECODER.decode(line.decode())
        if b"\\u" in line and (b"\\ud" in line or b"\\uD" in line):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Unreadable("it has half of a surrogate pair, so it is not valid text") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON: {error}") from error
    name = value.get("type") if type(value) is dict else None
    if type(name) is not str or name not in RECORDS:
        raise Unreadable(f"its type is {show(name)}; expected one of {', '.join(RECORDS)}")
    try:
        record: Record = _SHAPES[RECORDS[name]][1].decode(value, lambda _: None)
    except Unreadable as error:
        raise Unreadable(f"{name}: {error}") from error
    return record


def blob_record(name: str, data: bytes) -> BlobRecord:
    """Return the record for the blob `data` with the hash `name`."""
    try:
        return BlobRecord(sha256=name, text=data.decode(), base64=None)
    except UnicodeDecodeError:
        return BlobRecord(sha256=name, text=None, base64=base64.b64encode(data).decode())


def _blob_data(record: BlobRecord) -> bytes:
    """Return the content of a blob.

    :raises Unreadable: the content does not match the hash.
    """
    if (record.text is None) == (record.base64 is None):
        raise Unreadable("blob: expected either text or base64")
    try:
        data = record.text.encode() if record.text is not None else base64.b64decode(record.base64 or "", validate=True)
    except binascii.Error as error:
        raise Unreadable(f"blob: base64 is damaged: {error}") from error
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise Unreadable(f"blob: its content is damaged: its sha256 is not {record.sha256:.80}")
    return data


def renumbered(body: Body, named: Callable[[int], int], bound: Callable[[int], int]) -> Body:
    """Return `body` with other entry ids. `named` translates the id of an entry, and returns 0 if the target has no
    such entry. `bound` translates an id that only marks a limit, such as `first_kept`.

    In file and prompt entries, `recorded_here` becomes false, because the entries may be read on another machine.
    """
    match body:
        case Started() | File() | ToolResult():
            body = replace(body, call=replace(body.call, assistant=named(body.call.assistant)))
            return replace(body, recorded_here=False) if isinstance(body, File) else body
        case Prompt():
            return replace(body, recorded_here=False)
        case Checkpoint():
            first = body.first_kept
            return replace(
                body,
                first_kept=None if first is None else bound(first),
                pins=tuple(_renumbered_pin(pin, named(pin.entry)) for pin in body.pins),
                skills=tuple(replace(skill, entry=named(skill.entry)) for skill in body.skills),
            )
        case Mask():
            return replace(body, before=bound(body.before), exceptions=tuple(map(named, body.exceptions)))
        case Restore():
            return replace(body, entry=named(body.entry))
        case Note(entry=int(entry)) if entry:
            return replace(body, entry=named(entry) or None)  # 0 would remove the label
        case _:
            return body


def _renumbered_pin(pin: Pin, entry: int) -> Pin:
    """Return the pin with `entry` as its entry id. A shortened text of a pin has a marker that contains the pin's old
    id. The id in this marker is changed, too."""
    text = re.sub(rf"\brecall with entry {pin.entry} gives\b", f"recall with entry {entry} gives", pin.text)
    return Pin(entry=entry, text=text)


def clean_title(title: str) -> str | None:
    """Return an imported title as one short line, without control characters and other invisible characters. Return
    None if nothing is left."""
    visible = "".join(" " if character.isspace() else character for character in title[: 20 * _MAX_TITLE_CHARS])
    line = " ".join("".join(char for char in visible if category(char)[0] != "C").split())
    return line[:_MAX_TITLE_CHARS].rstrip() or None


def _depth(line: bytes) -> int:
    """Return how deep values are nested in a line of JSON. To save time, return 0 if the line has too few brackets to
    exceed the limit."""
    if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
        return 0
    depth = deepest = 0
    for found in _STRUCTURE.finditer(line):
        if found[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif found[0] in (b"]", b"}"):
            depth -= 1
    return deepest


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class InvalidExport(Exception):
    """A record is not valid, or not in a permitted position. `ExportFile.check` raises an error that names the record's
    line."""


class ExportFile:
    """A file of exported conversations. Blobs are not kept in memory, but read from the file again when they are
    needed.

    Whoever opens the file must close it.
    """

    def __init__(self, path: Path, *, relatives: Collection[str] = ()) -> None:
        """`relatives` are sessions outside of the file that sessions in the file may name as parent or as origin of a
        fork.

        :raises ArgumentError: the file cannot be read.
        """
        self.path = path
        self._relatives = relatives
        self._blobs: dict[str, int] = {}
        """Maps the hash of each blob of the current conversation to the offset of its line."""
        self._file = _open_regular(path)
        self._blob_file = _open_regular(path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._blob_file.close()

    def check(self) -> tuple[Block, ...]:
        """Read the whole file, and check that every record is valid and in a permitted position.

        :raises ArgumentError: a record is not valid or not in a permitted position; the message names the line and the
            reason.
        """
        number = 1
        blocks: list[Block] = []
        sessions: set[str] = set()
        whole = hashlib.sha256()
        try:
            self._file.seek(0)
            line = self._next_line(_MAX_HEADER_BYTES, "not a crow export")
            _check_header(line)
            while True:
                whole.update(line)
                number += 1
                offset = self._file.tell()
                line = self._next_line(_MAX_LINE_BYTES, "too long for a line of an export")
                record = _parse_line(line)
                if isinstance(record, End | ConversationRecord):
                    if blocks:
                        blocks[-1].check_end()
                    self._blobs.clear()
                if isinstance(record, End):
                    _check_end(record, number - 1, whole.hexdigest(), self._file.read(1))
                    break
                if isinstance(record, ConversationRecord):
                    blocks.append(Block(offset, number, sessions))
                if isinstance(record, BlobRecord):
                    self._blobs[record.sha256] = offset
                _last(blocks).add(line, number, record, self._load)
            for block in blocks:
                block.check_relatives(self._relatives)
        except Unreadable as error:
            number = error.line if isinstance(error, _MisplacedError) else number
            raise ArgumentError(f"{self.path}, line {number}: {safe(str(error))}. Nothing was imported.") from error
        except OSError as error:
            raise ArgumentError(f"{self.path} cannot be read: {error.strerror}. Nothing was imported.") from error
        return tuple(blocks)

    def scan(self) -> tuple[Block, ...]:
        """Return the conversations. Check the sha256 of the file, and check all records except entries and blobs, which
        the method `records` checks.

        :raises ArgumentError: as for `check`.
        """
        try:
            return self._scan()
        except (Unreadable, OSError):
            return self.check()  # raises an error that names the line

    def _scan(self) -> tuple[Block, ...]:
        blocks: list[Block] = []
        sessions: set[str] = set()
        whole = hashlib.sha256()
        self._file.seek(0)
        line = self._next_line(_MAX_HEADER_BYTES, "not a crow export")
        _check_header(line)
        for number in itertools.count(2):
            whole.update(line)
            offset = self._file.tell()
            line = self._next_line(_MAX_LINE_BYTES, "too long for a line of an export")
            if line.startswith(_USUAL_STARTS):
                _last(blocks).count(line)
                continue
            record = _parse_line(line)
            if isinstance(record, End | ConversationRecord) and blocks:
                blocks[-1].check_end()
            if isinstance(record, End):
                _check_end(record, number - 1, whole.hexdigest(), self._file.read(1))
                break
            if isinstance(record, ConversationRecord):
                blocks.append(Block(offset, number, sessions))
            if isinstance(record, EntryRecord | BlobRecord):
                raise Unreadable("written by another program")
            _last(blocks).add(line, number, record, self._load)
        for block in blocks:
            block.check_relatives(self._relatives)
        return tuple(blocks)

    def records(self, block: Block) -> Iterator[tuple[Record, Body | None]]:
        """Check the records of a block, and return them. Each entry is paired with its body. The ids of entries in
        these bodies are still those in the file.

        :raises InvalidExport: a record is not valid, or not in a permitted position.
        :raises ArgumentError: the file was changed since `scan` or `check`.
        """
        self._blobs.clear()
        self._file.seek(block.offset)
        checked = Block(block.offset, 0, set())
        for number in range(block.lines):
            offset = self._file.tell()
            line = self._file.readline()
            try:
                record = _parse_line(line)
                if isinstance(record, BlobRecord):
                    self._blobs[record.sha256] = offset
                body = checked.add(line, number, record, self._load)
            except Unreadable as error:
                raise InvalidExport from error
            yield record, body
        if (checked.hash, checked.entries) != (block.hash, block.entries):
            raise ArgumentError(f"{self.path} was changed while it was being imported; import it again.")

    def check_block(self, block: Block) -> None:
        """Check the records of a block.

        :raises InvalidExport: a record is not valid, or not in a permitted position.
        """
        for _ in self.records(block):
            pass

    def _next_line(self, most_bytes: int, words: str) -> bytes:
        line = self._file.readline(most_bytes + 1)
        if len(line) > most_bytes:
            raise Unreadable(f"it is {words}")
        if not line.endswith(b"\n"):
            raise Unreadable(
                "the file is truncated: its last line is missing" if line or self._file.tell() else "it is empty"
            )
        return line

    def _load(self, name: str) -> bytes | None:
        offset = self._blobs.get(name)
        if offset is None:
            return None
        self._blob_file.seek(offset)
        record = _parse_line(self._blob_file.readline())
        return _blob_data(record) if isinstance(record, BlobRecord) else None


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file. A pipe is refused at once, even if no program is writing to it.

    :raises ArgumentError: the file cannot be read, or is a pipe, device or directory.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ArgumentError(f"{path} is not a regular file; expected a file with exported sessions.")
    return open(handle, "rb")


class _MisplacedError(Unreadable):
    """An error in a line before the line that is being read."""

    def __init__(self, line: int, words: str) -> None:
        super().__init__(words)
        self.line = line


class Block:
    """A conversation in a file. `add` takes one record after another and checks its position."""

    def __init__(self, offset: int, line: int, sessions_of_file: set[str]) -> None:
        self.offset = offset
        """The position at which the conversation's lines begin, in bytes."""
        self.bytes = 0
        """The size of the part that was read so far."""
        self.lines = 0
        """The number of lines that were read so far."""
        self.entries = 0
        """The number of entries that were read so far."""
        self._line = line
        self._hash = hashlib.sha256()
        self._sessions: dict[str, tuple[int, SessionRecord]] = {}
        self._sessions_of_file = sessions_of_file
        """The ids of all sessions of the file that were read so far, in any conversation."""
        self._has_moves = False

    @property
    def hash(self) -> str:
        """The sha256 (hex) of the conversation's lines."""
        return self._hash.hexdigest()

    @property
    def sessions(self) -> tuple[str, ...]:
        """The ids of the conversation's sessions."""
        return tuple(self._sessions)

    def count(self, line: bytes) -> None:
        """Count the line of an entry or a blob. The line is not parsed."""
        self._hash.update(line)
        self.bytes += len(line)
        self.lines += 1
        self.entries += line.startswith(_ENTRY_START)

    def add(self, line: bytes, number: int, record: Record, load: Load) -> Body | None:
        """Check a record, and return its body if it is an entry.

        :raises Unreadable: the record is not valid, or not in a permitted position.
        """
        self._hash.update(line)
        self.bytes += len(line)
        self.lines += 1
        match record:
            case SessionRecord():
                if self.entries or self._has_moves:
                    raise Unreadable("session: it comes after an entry or a move; expected all sessions before them")
                if record.id in self._sessions_of_file:
                    raise Unreadable(
                        f'session: id is "{record.id:.80}"; expected an id that no other session of the file has'
                    )
                self._sessions[record.id] = (number, record)
                self._sessions_of_file.add(record.id)
            case BlobRecord():
                _blob_data(record)
            case EntryRecord():
                self._check_entry(record)
                self.entries = record.id
                return _body(record, load)
            case MoveRecord():
                self._has_moves = True
                self._check_writer("move", record.session)
                for name, leaf in (("from_leaf", record.from_leaf), ("to_leaf", record.to_leaf)):
                    if leaf is not None and leaf > self.entries:
                        raise Unreadable(f"move: {name} is {leaf}, but the conversation has {self.entries} entries")
            case Header():
                raise Unreadable("a second header; expected a conversation, a record of a conversation, or the end")
        return None

    def check_end(self) -> None:
        """:raises Unreadable: the conversation is not complete."""
        if not self._sessions:
            raise _MisplacedError(self._line, "conversation: it has no session")
        for line, session in self._sessions.values():
            if session.leaf is not None and session.leaf > self.entries:
                words = f"leaf is {session.leaf}, but the conversation has {self.entries} entries"
                raise _MisplacedError(line, f'session "{session.id}": {words}')

    def check_relatives(self, others: Collection[str]) -> None:
        """Check that `parent_id` and `forked_from` name only sessions in the file or in `others`. Another id could
        belong to a session that the importing user already has.

        :raises Unreadable: a session names another id.
        """
        for line, session in self._sessions.values():
            for relative in (session.parent_id, session.forked_from):
                if relative is not None and relative not in self._sessions_of_file and relative not in others:
                    words = f'parent_id or forked_from is "{relative:.80}", which is not a session of this file'
                    raise _MisplacedError(line, f'session "{session.id}": {words}')

    def _check_entry(self, record: EntryRecord) -> None:
        if self._has_moves:
            raise Unreadable("entry: it comes after a move; expected all entries before the moves")
        if record.id != self.entries + 1:
            raise Unreadable(f"entry: id is {record.id}; expected {self.entries + 1}, the next number")
        if record.parent is not None and not 0 < record.parent < record.id:
            raise Unreadable(f"entry: parent is {record.parent}; expected an entry before {record.id}, or null")
        if record.session is not None:
            self._check_writer("entry", record.session)

    def _check_writer(self, kind: str, session: str) -> None:
        if session not in self._sessions:
            raise Unreadable(f'{kind}: session is "{session:.80}", which is not a session of this conversation')


def _last(blocks: Sequence[Block]) -> Block:
    if not blocks:
        raise Unreadable("it comes before any conversation")
    return blocks[-1]


def _check_header(line: bytes) -> None:
    try:
        record = _parse_line(line)
    except Unreadable:
        record = None
    if not isinstance(record, Header):
        raise Unreadable('it is not a crow export; expected {"type":"crow","format":1}')
    if record.format > FORMAT:
        raise Unreadable(f"format is {record.format}, but this version of crow only knows {FORMAT}: upgrade crow")


def _check_end(end: End, lines: int, digest: str, rest: bytes) -> None:
    if end.lines != lines:
        raise Unreadable(
            f"end: lines is {end.lines}, but {lines} lines come before it: lines are missing or were added"
        )
    if end.sha256 is not None and end.sha256 != digest:
        raise Unreadable(
            "end: sha256 does not match the lines before it: the file is damaged or was edited (if you edited it, set"
            " sha256 to null)"
        )
    if rest:
        raise Unreadable("end: something comes after it; expected the end of the file")


def _body(record: EntryRecord, load: Load) -> Body:
    """Return the body of an entry.

    :raises Unreadable: the body is damaged, or a newer version of crow wrote it.
    """
    try:
        body = decode_value(record.kind, dict(record.body), load)
    except Unreadable as error:
        raise Unreadable(f"entry {record.id} ({record.kind:.80}): {error}") from error
    name = "compaction_id" if isinstance(body, Checkpoint) else "message_id"
    value = getattr(body, name, "")
    if len(value) > _MAX_ID_CHARS or not value.isprintable():
        words = f"expected at most {_MAX_ID_CHARS} characters, all of them visible"
        raise Unreadable(f"entry {record.id}: {name} is {show(value)}; {words}")
    if isinstance(body, Started | File | ToolResult) and not 0 <= body.call.index < _MAX_CALLS:
        raise Unreadable(f"entry {record.id}: call.index is {body.call.index}; expected an index of 0 or more")
    _check_integers(body, f"entry {record.id} ({record.kind})")
    return body


def _check_integers(value: object, name: str) -> None:
    """Check the integers in a body. `name` is the place of the value, for the error message.

    :raises Unreadable: an integer takes more than 64 bits. Crow writes no such integers, and the largest of them cannot
        be converted to floats.
    """
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise Unreadable(f"{name} is {show(value)}; expected at most 64 bits")
    if isinstance(value, tuple):
        for item in value:
            _check_integers(item, name)
    elif is_dataclass(value):
        for field in fields(value):
            _check_integers(getattr(value, field.name), f"{name}: {field.name}")
