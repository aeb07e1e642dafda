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
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "BASE64_ASIDE",
    "BOOL",
    "BYTES_ASIDE",
    "INT",
    "MAYBE_INT",
    "MAYBE_TEXT",
    "OBJECT",
    "TEXT",
    "TEXTS",
    "TEXT_ASIDE",
    "Blobs",
    "Field",
    "Load",
    "Record",
    "Unreadable",
    "dump",
    "json_aside",
    "many",
    "mend",
    "one_of",
    "optional",
    "record",
    "tagged",
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
