"""Bodies of entries as JSON, and back.

Strategy: each dataclass is declared once, as a record of fields. Pictures, file contents and prompts go into blobs, and
so does a whole body over 32 KiB. What is read back is what was given, but for what no JSON file can hold: lone
surrogates become U+FFFD, NaN and the infinities null. A damaged or unknown body raises `Unreadable`: whoever reads
decides what stands in its place. Explicit code, since a schema library would cost more at start than the whole store.
Knows no SQL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
from crow.store.fields import (
    BASE64_ASIDE,
    BOOL,
    BYTES_ASIDE,
    INT,
    MAYBE_INT,
    MAYBE_TEXT,
    OBJECT,
    TEXT,
    TEXT_ASIDE,
    TEXTS,
    Blobs,
    Field,
    Load,
    Record,
    Unreadable,
    dump,
    json_aside,
    many,
    one_of,
    optional,
    record,
    tagged,
)

__all__ = [
    "KINDS",
    "SPILL_BYTES",
    "Encoded",
    "Unreadable",
    "decode",
    "decode_parts",
    "decode_value",
    "encode",
    "encode_parts",
    "from_json",
    "to_json",
]

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
