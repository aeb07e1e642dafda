"""Converts values to JSON and back: bodies of entries, parts of prompts, records of an export.

A dataclass is written as an object with all its fields. When an object is read, a missing field gets the dataclass's
default, because an older version may have written the object. An unknown field is ignored, because a newer version may
have written this field. A field of the wrong type raises `Unreadable`. Large and shared values are stored separately as
blobs, named by their sha256. Pydantic is not used, because it would need 40 ms at the start to build its validators.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, cast, get_args, get_origin, get_type_hints

from crow.domain import entries
from crow.domain.entries import Body
from crow.domain.errors import ArgumentError
from crow.domain.messages import File, Freeform, Image, JsonObject, Link, Part, Resource, Text, ToolSpec

SPILL_BYTES = 32 * 1024
"""A body whose JSON has more bytes than this is stored as a blob."""

SHARED_BYTES = 8 * 1024
"""A tool output or one side of a diff is stored as a blob if it has more bytes than this. Equal blobs are stored only
once."""

_MAX_METADATA_BYTES = 16 * 1024
"""The maximum size of a session's metadata as JSON."""

_MAX_METADATA_DEPTH = 8
"""The maximum number of nested objects and lists in a session's metadata."""

_MAX_TAG_CHARS = 50

Load: TypeAlias = Callable[[str], bytes | None]
"""A function that takes a hash and returns the content of the blob with this hash, or None if there is no such blob."""


class Unreadable(ValueError):
    """The stored data does not have the form that this version writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A body in its stored form."""

    kind: str
    text: str | None
    """The JSON of the body, or None if the JSON is stored as a blob."""
    spilled: str | None
    """The hash of the blob that has the JSON, or None if `text` has it."""
    blobs: Mapping[str, bytes]
    """Maps hashes to contents."""
    body: Body
    """The body that a later read will return. It differs from the given body only if characters or numbers had to be
    replaced (see `dump`)."""


def encode(body: Body, *, shares_texts: bool = True) -> Encoded:
    """Return the stored form of `body`. If `shares_texts` is false, long outputs and diffs stay in the JSON and do not
    become blobs."""
    kind = KINDS[type(body)]
    blobs = Blobs(shares_texts=shares_texts)
    text, was_mended = dump(_BODIES[kind].encode(body, blobs))
    if was_mended or blobs.was_mended:
        body = decode(kind, text, blobs.data.get)
    spilled = None
    # A character takes at most four bytes. So a short text always fits and is not encoded here.
    if len(text) * 4 > SPILL_BYTES and len(data := text.encode()) > SPILL_BYTES:
        spilled = blobs.add(data)
    return Encoded(kind=kind, text=None if spilled else text, spilled=spilled, blobs=blobs.data, body=body)


def decode(kind: str, text: str | bytes | None, load: Load) -> Body:
    """Return the body that was stored as `text`.

    :raises Unreadable: the text is damaged, or this version does not know the kind.
    """
    try:
        # json.loads would first guess the encoding of bytes.
        value = json.loads(str(text, "utf-8", "surrogatepass") if isinstance(text, bytes) else text or "")
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is damaged: {error}") from error
    return decode_value(kind, value, load)


def decode_value(kind: str, value: object, load: Load) -> Body:
    """Return the body that `value` (parsed JSON) describes. `kind` is the kind of the body.

    :raises Unreadable: the value is damaged, or this version does not know the kind.
    """
    if kind not in _BODIES:
        raise Unreadable(f"its kind {kind[:80]!r} is unknown to this version")
    try:
        return cast("Body", _BODIES[kind].decode(value, load))
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"it is damaged: {error}") from error


def stand_in(kind: str, words: str, *, message_id: str, title: str, call: Sequence[object]) -> Body:
    """Return a body with the text `words`, to be used in place of a body that cannot be read.

    For the kinds user, assistant and tool, the new body is of the same kind, so that the conversation with the model
    stays valid. For other kinds, it is a remark. For a tool result, `call` must be a pair of integers: the id of the
    assistant entry, and the index of the call in that entry. If `call` is not such a pair, the new body is a remark.
    `title` is the title of the new result.
    """
    match kind, call:
        case "user", _:
            return entries.User(parts=(Text(text=f"[{words}]"),), message_id=message_id)
        case "assistant", _:
            return entries.Assistant(text=f"[{words}]", message_id=message_id)
        case "tool", (int(assistant), int(index)):
            reference, announcement = (
                entries.CallRef(assistant=assistant, index=index),
                entries.Announcement(title=title),
            )
            return entries.ToolResult(
                call=reference, name="", text=f"[{words}]", is_error=True, announcement=announcement
            )
    return entries.Remark(text=words, message_id=message_id)


def encode_parts(parts: Sequence[Part]) -> str:
    """Return the parts of a prompt as JSON, including images."""
    assert _PARTS.encode is not None
    return dump(_PARTS.encode(parts, Blobs(inline=True)))[0]


def decode_parts(text: str | bytes) -> tuple[Part, ...]:
    """Return the parts that were stored as `text`. If they are damaged, return a text part that says so."""
    try:
        return cast("tuple[Part, ...]", _PARTS.decode(json.loads(text), lambda _: None))
    except (ValueError, TypeError, RecursionError) as error:
        return (Text(text=f"[This prompt could not be read because it is damaged: {error}]"),)


def to_json(value: object) -> str:
    """Return the JSON text for a column."""
    return dump(value)[0]


def from_json(text: str | bytes | None, default: Any) -> Any:
    """Return the value of a JSON column. If the column is damaged or the value does not have the type of `default`,
    return `default`."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return default
    return value if type(value) is type(default) else default


def changed_config(config: JsonObject, changes: JsonObject) -> JsonObject:
    """Return a session's configuration with `changes` applied. If a member of `changes` is None, that member is
    removed."""
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def merged_metadata(metadata: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's metadata with `patch` merged into it. Objects are merged member by member. Null removes a
    member. Any other value replaces the old value (RFC 7396).

    :raises ArgumentError: `patch` is too deep, or the result is too large.
    """
    if _depth(patch) > _MAX_METADATA_DEPTH:
        raise ArgumentError(
            f"The metadata is nested more than {_MAX_METADATA_DEPTH} levels deep; flatten it, or store it as a string."
        )
    merged = _merged(metadata, patch)
    size = len(to_json(merged).encode())
    if size > _MAX_METADATA_BYTES:
        raise ArgumentError(
            f"The session's metadata would take {size:,} bytes; at most {_MAX_METADATA_BYTES:,} fit. Set members to"
            " null to remove them, or store a link to larger data."
        )
    return merged


def _merged(old: object, patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old) if isinstance(old, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value) if isinstance(value, Mapping) else value
    return merged


def tags_of(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a session's tags in alphabetical order and lower case. The member `tags` of its metadata is an object with
    the tags as keys, or a list of tags."""
    return tuple(sorted(set(map(tag_name, _stored_tags(metadata)))))


def _stored_tags(metadata: Mapping[str, Any]) -> list[str]:
    tags = metadata.get("tags")
    names = [name for name, value in tags.items() if value is not False] if isinstance(tags, Mapping) else tags
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def tags_patch(metadata: Mapping[str, Any], *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> JsonObject:
    """Return a patch for `metadata` that adds the tags in `add` and removes those in `remove`."""
    stored = _stored_tags(metadata)
    kept = [] if isinstance(metadata.get("tags"), Mapping) else stored
    removed = [name for name in stored if tag_name(name) in remove]
    return {"tags": {**dict.fromkeys([*kept, *add], True), **dict.fromkeys(removed)}}


def tag_name(text: str) -> str:
    """Return a tag in lower case, without a leading `#`."""
    return text.removeprefix("#").lower()


def new_tag(text: str) -> str:
    """Check a tag that a person adds, and return it in lower case, without a leading `#`.

    :raises ArgumentError: the tag is empty or too long, or has a space, a comma or an invisible character.
    """
    tag = tag_name(text)
    if not 0 < len(tag) <= _MAX_TAG_CHARS or any(sign in tag for sign in " ,") or not tag.isprintable():
        raise ArgumentError(
            f'"{text}" cannot be a tag; expected one word of at most {_MAX_TAG_CHARS} characters, without commas.'
        )
    return tag


def _depth(value: object) -> int:
    """Return the number of levels of objects and lists in a JSON value. Counting stops at one level above the limit."""
    level: list[object] = [value]
    for depth in range(_MAX_METADATA_DEPTH + 1):
        level = [one for one in level if isinstance(one, Mapping | list | tuple)]
        if not level:
            return depth
        level = [inner for one in level for inner in (one.values() if isinstance(one, Mapping) else one)]  # type: ignore[attr-defined]
    return _MAX_METADATA_DEPTH + 1


def dump(value: object) -> tuple[str, bool]:
    """Return the JSON of `value`, and whether something in it was replaced. Lone surrogates become U+FFFD. NaN and
    infinities become null."""
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


def mend(text: str) -> str:
    """Return `text` with U+FFFD in place of each lone surrogate."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def show(value: object) -> str:
    """Return the beginning of a JSON value, for an error message."""
    return mend(f"{json.dumps(value, ensure_ascii=False):.60}")


class Blobs:
    """Collects the blobs of one value while the value is encoded."""

    __slots__ = ("data", "inline", "shares_texts", "was_mended")

    def __init__(self, *, inline: bool = False, shares_texts: bool = False) -> None:
        self.data: dict[str, bytes] = {}
        """Maps hashes to contents."""
        self.inline = inline
        """If this is true, nothing is collected, and images are written into the JSON."""
        self.shares_texts = shares_texts
        """Whether long texts that often recur become blobs."""
        self.was_mended = False

    def add(self, data: bytes) -> str:
        """Store `data` as a blob and return its hash."""
        name = hashlib.sha256(data).hexdigest()
        self.data[name] = data
        return name

    def add_text(self, text: str) -> str:
        """Replace lone surrogates in `text`, store the text as a UTF-8 blob, and return the blob's hash."""
        try:
            return self.add(text.encode())
        except UnicodeEncodeError:
            self.was_mended = True
            return self.add(mend(text).encode())


class Field(NamedTuple):
    """The functions that write and read one value."""

    encode: Callable[[Any, Blobs], object] | None
    """None if the value is written unchanged."""
    decode: Callable[[Any, Load], Any]
    plain: type | None = None
    """A value of exactly this type is read unchanged, without calling `decode`."""


class Record(NamedTuple):
    """The functions that write and read a dataclass."""

    encode: Callable[[Any, Blobs], dict[str, object]]
    decode: Callable[[Any, Load], Any]
    cls: type
    """The dataclass."""


def record(cls: type, *, integer: Field | None = None, **special: Field | str) -> Record:
    """Return functions that write the dataclass `cls` as a JSON object and read it back.

    Fields are written according to their type hints, except for those in `special`. For a `Literal` field, `special`
    may have a string. This string replaces an unknown word when the field is read. `integer` writes and reads all
    fields of type int.
    """
    chosen = {
        name: given if isinstance(given := special.get(name), Field) else _field(hint, given, integer or _INTEGER)
        for name, hint in get_type_hints(cls).items()
    }
    encoders = tuple((name, field.encode) for name, field in chosen.items())
    decoders = tuple((name, field.decode, getattr(field, "plain", None)) for name, field in chosen.items())
    required = {field.name for field in fields(cls) if field.default is field.default_factory is MISSING}

    def encode(value: Any, blobs: Blobs) -> dict[str, object]:
        return {
            name: getattr(value, name) if encode is None else encode(getattr(value, name), blobs)
            for name, encode in encoders
        }

    def decode(value: Any, load: Load) -> Any:
        if type(value) is not dict:
            raise Unreadable("expected an object")
        found = {}
        for name, decode, plain in decoders:
            item = value.get(name, MISSING)
            if type(item) is plain:
                found[name] = item
            elif item is not MISSING:
                try:
                    found[name] = decode(item, load)
                except Unreadable as error:
                    raise Unreadable(f"{name} is {show(item)}; {error}") from error
        if len(found) < len(decoders) and not required <= found.keys():
            raise Unreadable(f"{min(required - found.keys())} is missing")
        return cls(**found)

    return Record(encode, decode, cls)


def expect(words: str, is_valid: Callable[[Any], bool], plain: type | None = None) -> Field:
    """Return a field whose value is written unchanged and checked when it is read. If `is_valid` rejects the value, the
    error message is "expected" followed by `words`. `is_valid` accepts all values of the type `plain`."""

    def decode(value: Any, _load: Load) -> Any:
        if not is_valid(value):
            raise Unreadable(f"expected {words}")
        return value

    return Field(None, decode, plain)


def _field(hint: Any, unknown_word: str | None, integer: Field) -> Field | Record:
    """Return the field for values of this type."""
    if hint is int:
        return integer
    if hint in _PLAIN:
        return _PLAIN[hint]
    if is_dataclass(hint):
        return _SHARED.get(cast("type", hint)) or record(cast("type", hint), integer=integer)
    arguments = get_args(hint)
    if unknown_word is not None:
        words = {word for argument in arguments for word in get_args(argument) or (argument,)}
        return Field(None, lambda value, _load: value if type(value) is str and value in words else unknown_word)
    if NoneType in arguments:
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return optional(_field(inner, None, integer))
    assert get_origin(hint) is tuple, f"no way to write {hint}"
    return _many(_field(arguments[0], None, integer))


def _many(item: Field | Record) -> Field:
    """Return a field for a tuple, which is written as an array."""
    item_encode, item_decode = item.encode, item.decode

    def encode(values: Sequence[Any], blobs: Blobs) -> list[object]:
        return list(values) if item_encode is None else [item_encode(value, blobs) for value in values]

    def decode(values: Any, load: Load) -> tuple[Any, ...]:
        if type(values) is not list:
            raise Unreadable("expected a list")
        return tuple([item_decode(value, load) for value in values]) if values else ()

    return Field(encode, decode)


def optional(field: Field | Record) -> Field:
    """Return a field like the given one that also accepts None, which is written as null."""
    inner_encode, inner_decode = field.encode, field.decode
    encode = inner_encode and (lambda value, blobs: None if value is None else inner_encode(value, blobs))
    return Field(
        encode,
        lambda value, load: None if value is None else inner_decode(value, load),
        getattr(field, "plain", None) or NoneType,
    )


def _tagged(**records: Record) -> Field:
    """Return a field whose value is of one of several dataclasses. In JSON, the key `type` says which one."""
    names = {one.cls: name for name, one in records.items()}

    def encode(value: Any, blobs: Blobs) -> object:
        name = names[type(value)]
        return {"type": name, **records[name].encode(value, blobs)}

    def decode(value: Any, load: Load) -> Any:
        name = value.get("type") if type(value) is dict else None
        if type(name) is not str or name not in records:
            raise Unreadable(f"its type is {show(name)}; expected one of {', '.join(records)}")
        return records[name].decode(value, load)

    return Field(encode, decode)


def _as_blob(field: Field) -> Field:
    """Return a field whose JSON is stored as a blob."""
    inner_encode, inner_decode, _ = field
    assert inner_encode is not None

    def encode(value: Any, blobs: Blobs) -> object:
        text, was_mended = dump(inner_encode(value, blobs))
        blobs.was_mended |= was_mended
        return {"blob": blobs.add_text(text)}

    return Field(encode, lambda value, load: inner_decode(json.loads(_load_blob(value, load)), load))


def check_blob(name: str, data: bytes) -> None:
    """Check that the name of a blob is the hash of its content.

    :raises Unreadable: the name is not the hash.
    """
    if hashlib.sha256(data).hexdigest() != name:
        raise Unreadable(f"blob {name:.12} is damaged: its sha256 is wrong")


def _load_blob(reference: Any, load: Load) -> bytes:
    """Return the content of the blob that `reference` names."""
    name = reference.get("blob") if type(reference) is dict else None
    data = load(name) if type(name) is str else None
    if data is None:
        raise Unreadable(f"the blob for {reference!r:.90} is missing")
    return data


def _encode_base64(text: str, blobs: Blobs) -> object:
    if blobs.inline:
        return text
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    # Several base64 strings decode to the same bytes, and encoding these bytes gives only one of the strings. Only that
    # string is stored as bytes.
    if base64.b64encode(data).decode() != text:
        return {"blob": blobs.add_text(text)}
    return {"blob": blobs.add(data), "encoding": "base64"}


def _encode_shared(text: str, blobs: Blobs) -> object:
    # A character takes at most four bytes.
    is_long = blobs.shares_texts and len(text) * 4 > SHARED_BYTES and len(text.encode(errors="replace")) > SHARED_BYTES
    return {"blob": blobs.add_text(text)} if is_long else text


def _decode_base64(value: Any, load: Load) -> str:
    if type(value) is str:
        return value
    data = _load_blob(value, load)
    return base64.b64encode(data).decode() if value.get("encoding") == "base64" else data.decode()


def _decode_float(value: Any, _load: Load) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Unreadable("expected a number")
    return number


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is not a JSON value")


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

_INTEGER = expect("a whole number", lambda value: type(value) is int, int)
_PLAIN: Mapping[Any, Field] = {
    str: expect("text", lambda value: type(value) is str, str),
    bool: expect("true or false", lambda value: type(value) is bool, bool),
    float: Field(None, _decode_float),
    JsonObject: expect("an object", lambda value: type(value) is dict, dict),
}
_BASE64 = Field(_encode_base64, _decode_base64)
_TEXT_BLOB = Field(
    lambda text, blobs: {"blob": blobs.add_text(text)},
    lambda value, load: value if type(value) is str else _load_blob(value, load).decode(),
)
_SHARED_TEXT = Field(_encode_shared, _TEXT_BLOB.decode, str)
_BYTES_BLOB = Field(lambda data, blobs: {"blob": blobs.add(data)}, _load_blob)

_SHARED: dict[type, Record] = {}
_SHARED[Image] = record(Image, data=_BASE64)
_SHARED[File] = record(File, data=_BASE64)
_SHARED[entries.Attachment] = record(entries.Attachment, data=_BASE64)
_SHARED[entries.Diff] = record(entries.Diff, old_text=optional(_SHARED_TEXT), new_text=_SHARED_TEXT)
_SHARED[entries.Announcement] = record(entries.Announcement, kind="other")
_SHARED[entries.PlanItem] = record(entries.PlanItem, status="pending", priority="medium")
_SHARED[Freeform] = record(Freeform, syntax="text")

_PARTS = _many(
    _tagged(
        text=record(Text),
        image=_SHARED[Image],
        file=_SHARED[File],
        resource=record(Resource),
        link=record(Link),
    )
)

_BODIES: Mapping[str, Record] = {
    "prompt": record(entries.Prompt, system=_TEXT_BLOB, tools=_as_blob(_many(record(ToolSpec)))),
    "user": record(entries.User, parts=_PARTS),
    "assistant": record(entries.Assistant, finish="stop", wire="chat"),
    "started": record(entries.Started),
    "file": record(entries.File, before=optional(_BYTES_BLOB)),
    "tool": record(entries.ToolResult, text=_SHARED_TEXT),
    "checkpoint": record(entries.Checkpoint, reason="threshold", method="fallback"),
    "mask": record(entries.Mask, reason=""),
    "restore": record(entries.Restore),
    "skill": record(entries.Skill),
    "reminder": record(entries.Reminder),
    "remark": record(entries.Remark),
    "command": record(entries.Command),
    "note": record(entries.Note, about="label"),
    "custom": record(entries.Custom),
    "turn_end": record(entries.TurnEnd, stop="error"),
    "request": record(entries.ModelRequest, purpose="answer"),
}

KINDS: Mapping[type, str] = {shape.cls: kind for kind, shape in _BODIES.items()}
"""Maps each class of body to the stored name of its kind."""
