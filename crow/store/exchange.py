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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from crow.domain.entries import Body, Checkpoint, File, Mask, Pin, Restore, Started, ToolResult
from crow.domain.messages import JsonObject, Usage
from crow.store.codec import Unreadable
from crow.store.fields import dump, mend

__all__ = [
    "FORMAT",
    "RECORDS",
    "BlobRecord",
    "ConversationRecord",
    "End",
    "EntryRecord",
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
