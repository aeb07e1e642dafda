"""How values are written as JSON and read back: the parts that `codec` composes.

Strategy: a field is a pair of functions; a record is a dataclass declared as named fields. Every field is written;
when reading, a missing one takes the dataclass's default (an older file), an unknown one is ignored (a newer one), one
of the wrong type makes the value `Unreadable`. Large or shared values are put aside as blobs, named by their sha256.
Knows no entry and no SQL.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, cast

from crow.domain.entries import (
    Announcement,
    Assistant,
    Attachment,
    Body,
    CallRef,
    Checkpoint,
    Command,
    Diff,
    File,
    KeptSkill,
    Location,
    Mask,
    Note,
    Pin,
    PlanItem,
    Prompt,
    Remark,
    Reminder,
    Restore,
    Skill,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import Image, Link, Part, Resource, Text, ToolCall, ToolSpec

__all__ = [
    "BASE64_ASIDE",
    "BOOL",
    "BYTES_ASIDE",
    "INT",
    "KINDS",
    "MAYBE_INT",
    "MAYBE_TEXT",
    "OBJECT",
    "SPILL_BYTES",
    "TEXT",
    "TEXTS",
    "TEXT_ASIDE",
    "Blobs",
    "Encoded",
    "Field",
    "Load",
    "Record",
    "Unreadable",
    "decode",
    "decode_parts",
    "decode_value",
    "dump",
    "encode",
    "encode_parts",
    "from_json",
    "json_aside",
    "many",
    "mend",
    "one_of",
    "optional",
    "record",
    "tagged",
    "to_json",
]

Load: TypeAlias = Callable[[str], bytes | None]
"""Gives the blob with a hash, None if there is none."""


class Unreadable(ValueError):
    """Stored data that is not what this version would have written."""


class Blobs:
    """What is put aside while one value is written: `data` by hash. With `inline`, nothing is."""

    __slots__ = ("data", "inline", "was_mended")

    def __init__(self, *, inline: bool = False) -> None:
        self.data: dict[str, bytes] = {}
        self.inline = inline
        self.was_mended = False

    def add(self, data: bytes) -> str:
        """Put `data` aside; returns its hash."""
        name = hashlib.sha256(data).hexdigest()
        self.data[name] = data
        return name

    def add_text(self, text: str) -> str:
        """Put `text` aside as UTF-8, mended if it must be; returns its hash."""
        try:
            return self.add(text.encode())
        except UnicodeEncodeError:
            self.was_mended = True
            return self.add(mend(text).encode())


class Field(NamedTuple):
    """How one value is written (None: as it is) and read."""

    encode: Callable[[Any, Blobs], object] | None
    decode: Callable[[Any, Load], Any]


class Record(NamedTuple):
    """How one dataclass is written and read."""

    encode: Callable[[Any, Blobs], dict[str, object]]
    decode: Callable[[Any, Load], Any]


def mend(text: str) -> str:
    """`text` with U+FFFD in place of each lone surrogate."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def dump(value: object) -> tuple[str, bool]:
    """JSON of `value`, and whether it had to be mended: lone surrogates (U+FFFD), NaN and infinities (null)."""
    was_mended = False
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        text, was_mended = _ENCODER.encode(_finite(value)), True
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            text, was_mended = mend(text), True
    return text, was_mended


def one_of(*words: str, otherwise: str) -> Field:
    """A word; one that is not known here reads as `otherwise`."""
    return Field(None, lambda value, _load: value if type(value) is str and value in words else otherwise)


def record(cls: type, **fields: Field | Record) -> Record:
    """The dataclass `cls`, a JSON object."""
    encoders = tuple((name, field.encode) for name, field in fields.items())
    decoders = tuple((name, field.decode) for name, field in fields.items())

    def encode(value: Any, blobs: Blobs) -> dict[str, object]:
        return {
            name: getattr(value, name) if encode is None else encode(getattr(value, name), blobs)
            for name, encode in encoders
        }

    def decode(value: Any, load: Load) -> Any:
        if type(value) is not dict:
            raise Unreadable(f"{value!r:.60} where a {cls.__name__} belongs")
        return cls(**{name: decode(value[name], load) for name, decode in decoders if name in value})

    return Record(encode, decode)


def tagged(**records: tuple[type, Record]) -> Field:
    """One of several dataclasses, told apart by the key `type`."""
    names = {cls: name for name, (cls, _) in records.items()}

    def encode(value: Any, blobs: Blobs) -> object:
        name = names[type(value)]
        return {"type": name, **records[name][1].encode(value, blobs)}

    def decode(value: Any, load: Load) -> Any:
        name = value.get("type") if type(value) is dict else None
        if type(name) is not str or name not in records:
            raise Unreadable(f"a part of unknown type {name!r:.60}")
        return records[name][1].decode(value, load)

    return Field(encode, decode)


def many(item: Field | Record) -> Field:
    """A tuple, a JSON array."""
    item_encode, item_decode = item.encode, item.decode

    def encode(values: Sequence[Any], blobs: Blobs) -> list[object]:
        return list(values) if item_encode is None else [item_encode(value, blobs) for value in values]

    def decode(values: Any, load: Load) -> tuple[Any, ...]:
        if type(values) is not list:
            raise Unreadable(f"{values!r:.60} where a list belongs")
        return tuple(item_decode(value, load) for value in values)

    return Field(encode, decode)


def optional(field: Field | Record) -> Field:
    """The field or None, which is null."""
    encode, decode = field
    assert encode is not None
    return Field(
        lambda value, blobs: None if value is None else encode(value, blobs),
        lambda value, load: None if value is None else decode(value, load),
    )


def json_aside(field: Field) -> Field:
    """The field's JSON as a blob."""
    inner_encode, inner_decode = field
    assert inner_encode is not None

    def encode(value: Any, blobs: Blobs) -> object:
        text, was_mended = dump(inner_encode(value, blobs))
        blobs.was_mended |= was_mended
        return {"blob": blobs.add_text(text)}

    return Field(encode, lambda value, load: inner_decode(json.loads(_aside(value, load)), load))


def _exact(*types: type) -> Field:
    def decode(value: Any, _load: Load) -> Any:
        if type(value) not in types:
            raise Unreadable(f"{value!r:.60} where {types[0].__name__} belongs")
        return value

    return Field(None, decode)


def _aside(reference: Any, load: Load) -> bytes:
    """The blob that `reference` names."""
    name = reference.get("blob") if type(reference) is dict else None
    data = load(name) if type(name) is str else None
    if data is None:
        raise Unreadable(f"no blob for {reference!r:.90}")
    return data


def _encode_text(text: str, blobs: Blobs) -> object:
    return text if blobs.inline else {"blob": blobs.add_text(text)}


def _decode_text(value: Any, load: Load) -> str:
    return value if type(value) is str else _aside(value, load).decode()


def _encode_base64(text: str, blobs: Blobs) -> object:
    if blobs.inline:
        return text
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return {"blob": blobs.add_text(text)}
    # base64 has several spellings of the same bytes; only the usual one can be made again from them.
    if base64.b64encode(data).decode() != text:
        return {"blob": blobs.add_text(text)}
    return {"blob": blobs.add(data), "encoding": "base64"}


def _decode_base64(value: Any, load: Load) -> str:
    if type(value) is str:
        return value
    data = _aside(value, load)
    return base64.b64encode(data).decode() if value.get("encoding") == "base64" else data.decode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is no JSON value")


def _finite(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)

TEXT = _exact(str)
MAYBE_TEXT = _exact(str, NoneType)
INT = _exact(int)
MAYBE_INT = _exact(int, NoneType)
BOOL = _exact(bool)
OBJECT = _exact(dict)
TEXTS = many(TEXT)
TEXT_ASIDE = Field(_encode_text, _decode_text)
BASE64_ASIDE = Field(_encode_base64, _decode_base64)
BYTES_ASIDE = optional(Field(lambda data, blobs: {"blob": blobs.add(data)}, _aside))


# FROM store.codec: Bodies of entries as JSON, and back.
#
# Strategy: each dataclass is declared once, as a record of fields. Pictures, file contents and prompts go into blobs,
# and
# so does a whole body over 32 KiB. What is read back is what was given, but for what no JSON file can hold: lone
# surrogates become U+FFFD, NaN and the infinities null. A damaged or unknown body raises `Unreadable`: whoever reads
# decides what stands in its place. Explicit code, since a schema library would cost more at start than the whole
# store.
# Knows no SQL.


SPILL_BYTES = 32 * 1024
"""A body whose JSON is longer than this becomes a blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A body as it is stored: `text` is its JSON, or None when it is the blob `spilled`; `blobs` by hash.

    `body` is what will be read back: the body given, unless it had to be mended.
    """

    kind: str
    text: str | None
    spilled: str | None
    blobs: Mapping[str, bytes]
    body: Body


def encode(body: Body) -> Encoded:
    """The stored form of `body`."""
    kind = KINDS[type(body)]
    blobs = Blobs()
    text, was_mended = dump(_RECORDS[kind].encode(body, blobs))
    if was_mended or blobs.was_mended:
        body = decode(kind, text, blobs.data.get)
    spilled = None
    # A character takes at most four bytes: short texts need no count.
    if len(text) * 4 > SPILL_BYTES and len(data := text.encode()) > SPILL_BYTES:
        spilled = blobs.add(data)
    return Encoded(kind=kind, text=None if spilled else text, spilled=spilled, blobs=blobs.data, body=body)


def decode(kind: str, text: str | bytes | None, load: Load) -> Body:
    """The body that was stored as `text`.

    :raises Unreadable: it is damaged, or of a kind that this version does not know.
    """
    shape = _shape(kind)
    try:
        return cast("Body", shape.decode(json.loads(text or ""), load))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"it is damaged: {error}") from error


def decode_value(kind: str, value: object, load: Load) -> Body:
    """As `decode`, of JSON that is parsed already."""
    shape = _shape(kind)
    try:
        return cast("Body", shape.decode(value, load))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"it is damaged: {error}") from error


def _shape(kind: str) -> Record:
    shape = _RECORDS.get(kind)
    if shape is None:
        raise Unreadable(f"its kind {kind!r} is unknown to this version")
    return shape


def encode_parts(parts: Sequence[Part]) -> str:
    """The parts of a prompt as JSON, pictures included."""
    assert _PARTS.encode is not None
    return dump(_PARTS.encode(parts, Blobs(inline=True)))[0]


def decode_parts(text: str | bytes) -> tuple[Part, ...]:
    """The parts that were stored as `text`; damaged ones read as a text that says so."""
    try:
        return cast("tuple[Part, ...]", _PARTS.decode(json.loads(text), lambda _: None))
    except (ValueError, TypeError, RecursionError) as error:
        return (Text(text=f"[This prompt could not be read, it is damaged: {error}]"),)


def to_json(value: object) -> str:
    """The JSON of a column."""
    return dump(value)[0]


def from_json(text: str | bytes | None, otherwise: Any) -> Any:
    """The value of a JSON column; `otherwise` if it is damaged or of another type than `otherwise`."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return otherwise
    return value if type(value) is type(otherwise) else otherwise


_IMAGE = record(Image, data=BASE64_ASIDE, mime_type=TEXT, uri=MAYBE_TEXT)
_PARTS: Field = many(
    tagged(
        text=(Text, record(Text, text=TEXT)),
        image=(Image, _IMAGE),
        resource=(Resource, record(Resource, uri=TEXT, text=TEXT, mime_type=MAYBE_TEXT)),
        link=(Link, record(Link, uri=TEXT, name=TEXT, mime_type=MAYBE_TEXT)),
    )
)
_CALL = record(ToolCall, id=TEXT, name=TEXT, arguments=TEXT, fault=MAYBE_TEXT, raw=MAYBE_TEXT, extra=OBJECT)
_CALL_REF = record(CallRef, assistant=INT, index=INT)
_PLAN = many(
    record(
        PlanItem,
        content=TEXT,
        status=one_of("pending", "in_progress", "completed", otherwise="pending"),
        priority=one_of("high", "medium", "low", otherwise="medium"),
    )
)
_ANNOUNCEMENT = record(
    Announcement,
    title=TEXT,
    kind=one_of("read", "edit", "delete", "move", "search", "execute", "think", "fetch", "other", otherwise="other"),
    locations=many(record(Location, path=TEXT, line=MAYBE_INT)),
    diffs=many(record(Diff, path=TEXT, old_text=MAYBE_TEXT, new_text=TEXT)),
)

_BODIES: dict[str, tuple[type, Record]] = {
    "prompt": (
        Prompt,
        record(
            Prompt,
            system=TEXT_ASIDE,
            tools=json_aside(many(record(ToolSpec, name=TEXT, description=TEXT, input_schema=OBJECT))),
            cwd=TEXT,
            model=TEXT,
        ),
    ),
    "user": (User, record(User, parts=_PARTS, message_id=TEXT, cut=MAYBE_INT)),
    "assistant": (
        Assistant,
        record(
            Assistant,
            text=TEXT,
            message_id=TEXT,
            thought=TEXT,
            calls=many(_CALL),
            finish=one_of("stop", "tool_calls", "length", "refusal", "interrupted", otherwise="stop"),
            opaque=OBJECT,
            reasoning_field=MAYBE_TEXT,
            endpoint=TEXT,
            announcements=many(_ANNOUNCEMENT),
        ),
    ),
    "started": (Started, record(Started, call=_CALL_REF, why=TEXT, announcement=optional(_ANNOUNCEMENT))),
    "file": (File, record(File, call=_CALL_REF, path=TEXT, before=BYTES_ASIDE, after_hash=TEXT, recorded_here=BOOL)),
    "tool": (
        ToolResult,
        record(
            ToolResult,
            call=_CALL_REF,
            name=TEXT,
            text=TEXT,
            is_error=BOOL,
            duration_ms=INT,
            announcement=_ANNOUNCEMENT,
            cut=MAYBE_INT,
            images=many(_IMAGE),
            attachments=many(record(Attachment, name=TEXT, uri=MAYBE_TEXT, mime_type=MAYBE_TEXT, data=BASE64_ASIDE)),
            plan=optional(_PLAN),
            raw_output=OBJECT,
        ),
    ),
    "checkpoint": (
        Checkpoint,
        record(
            Checkpoint,
            compaction_id=TEXT,
            summary=TEXT,
            first_kept=MAYBE_INT,
            pins=many(record(Pin, entry=INT, text=TEXT)),
            files_read=TEXTS,
            files_modified=TEXTS,
            mode=TEXT,
            plan=_PLAN,
            reason=one_of("threshold", "overflow", "command", "model", otherwise="threshold"),
            method=one_of("prefix", "serialised", "fallback", "hook", otherwise="fallback"),
            tokens_before=INT,
            tokens_after=INT,
            model_calls=INT,
            lists_cut=MAYBE_INT,
            skills=many(record(KeptSkill, entry=INT, name=TEXT, text=TEXT)),
            first_covered=MAYBE_INT,
            last_covered=MAYBE_INT,
        ),
    ),
    "mask": (Mask, record(Mask, before=INT, exceptions=many(INT), tokens_before=INT, tokens_after=INT)),
    "restore": (Restore, record(Restore, entry=INT)),
    "skill": (Skill, record(Skill, name=TEXT, text=TEXT)),
    "reminder": (Reminder, record(Reminder, text=TEXT)),
    "remark": (Remark, record(Remark, text=TEXT, message_id=TEXT)),
    "command": (Command, record(Command, text=TEXT, answer=TEXT, message_id=TEXT)),
    "note": (Note, record(Note, about=one_of("model", "mode", "title", "label", otherwise="label"), value=TEXT)),
    "turn_end": (
        TurnEnd,
        record(
            TurnEnd,
            stop=one_of(
                "end_turn",
                "max_tokens",
                "max_turn_requests",
                "refusal",
                "cancelled",
                "interrupted",
                "error",
                otherwise="error",
            ),
            detail=TEXT,
        ),
    ),
}
_RECORDS = {kind: shape for kind, (_, shape) in _BODIES.items()}

KINDS: Mapping[type, str] = {cls: kind for kind, (cls, _) in _BODIES.items()}
"""The kind, as stored, of each body."""
