"""Reads the arguments of one tool call from the text that was streamed.

Only complete text is accepted, and only text with a single possible meaning is repaired: empty text becomes `{}`, JSON
inside a string is decoded, quotes and words of Python become those of JSON, and code fences and model markup around an
object are removed. Different objects are never merged. Anything that remains ambiguous is reported to the model as an
error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise

from crow.domain.messages import JsonObject
from crow.llm.sse import replace_lone

# Models often put raw control characters into strings. Their meaning is clear, so the decoder accepts them.
_DECODER = json.JSONDecoder(strict=False)
_MARKUP = r"<[|｜][^|｜<>]{1,40}[|｜]>\w{0,20}|</?[A-Za-z_][\w:.-]{0,40}>|\[/?[A-Z_]{3,20}\]"
_LEADING = re.compile(
    rf"\A(?:\ufeff|[`~]{{3,}}[ \t]*(?:(?:json|python)\b)?|`|{_MARKUP}|json(?=\s*[{{\[])|(?:null|\"\")(?=\s*\{{)|\s)+",
    re.IGNORECASE,
)
_TRAILING = re.compile(rf"(?:[\s`~}}\];]|{_MARKUP})*\Z")
# One token of an object in Python's notation: a string, a word that JSON spells differently, or a token that JSON has,
# too.
_PYTHON_TOKEN = re.compile(
    r"""\s*(?:'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)\"|"""
    r"(?P<word>True|False|None)\b|(?P<same>true\b|false\b|null\b|-?\d[\d.eE+-]*|[{}\[\]:,]))",
    re.DOTALL,
)
_IN_STRING = re.compile(r"""\\x(?P<hex>[0-9A-Fa-f]{2})|\\(?P<quote>')|(?P<open>")|\\.""", re.DOTALL)
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_COMMA_AT_END = re.compile(r",(?=\s*[}\]])")
_BLANKS = re.compile(r"\s*")
_EMPTY = frozenset({"", "null", "None", "undefined", '""'})
_MAX_LAYERS = 3
"""An object that was encoded as a string several times over is decoded at most this many times."""

_MAX_COMMAS = 20
"""At most this many commas in front of a closing bracket are removed."""

_MAX_PYTHON_CHARS = 500_000
"""Longer text is not read as Python."""


class InvalidArguments(ValueError):
    """The arguments cannot be used. The message tells the model why."""


def read_arguments(pieces: list[str], schema: JsonObject | None) -> list[dict[str, object]]:
    """Return a list with one object, which contains the arguments of the call. If the text contains the arguments of
    several calls in a row and each object fits `schema`, return all these objects.

    `schema` is the schema of the called tool, or None if no such tool is offered.

    :raises InvalidArguments: the arguments cannot be used.
    """
    text = replace_lone("".join(pieces)).strip()
    if text in _EMPTY:
        return [{}]
    try:
        objects = _objects_in(text)
    except RecursionError:
        raise InvalidArguments("the arguments are nested too deeply") from None
    except InvalidArguments:
        if (newest := _last_snapshot(pieces)) is not None:
            objects = [newest]
        elif (literals := _python_objects_in(text)) is not None:
            objects = literals
        else:
            raise
    # Some gateways open a call with `{}` and send the real object after it.
    objects = [each for each in objects if each] or objects[:1]
    if all(each == objects[0] for each in objects):
        objects = objects[:1]
    if len(objects) > 1 and not all(fits(each, schema) for each in objects):
        raise InvalidArguments(f"the arguments are {len(objects)} objects in a row; send one object per call")
    return [_with_decoded_members(_unwrapped(each, schema), schema) for each in objects]


def json_text(arguments: Mapping[str, object]) -> str:
    """Return the object as JSON that every parser accepts.

    :raises InvalidArguments: the object contains a number that JSON cannot express, or is nested too deeply.
    """
    try:
        return replace_lone(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        raise InvalidArguments("the arguments contain NaN or an infinite number, which JSON does not have") from None
    except RecursionError:
        raise InvalidArguments("the arguments are nested too deeply") from None


def begins_object(text: str) -> bool:
    """Return whether `text` looks like the beginning of an object."""
    return text.lstrip().startswith("{")


def is_whole(pieces: list[str]) -> bool:
    """Return whether the pieces so far form one complete object, so that no further text can belong to it."""
    return bool(pieces) and pieces[-1].rstrip().endswith("}") and isinstance(_decoded("".join(pieces)), dict)


def fits(arguments: Mapping[str, object], schema: JsonObject | None) -> bool:
    """Return whether the object can contain the arguments of a tool: it has no unknown member, and no required member
    is missing.

    Only the names of members are compared. Importing `jsonschema` would delay the first answer by 80 ms. Also,
    `jsonschema` would match text from a model against patterns from a server's schema, and this may take extremely
    long.
    """
    properties = schema.get("properties") if schema is not None else None
    if schema is None or not isinstance(properties, Mapping):
        return False
    required = schema.get("required")
    needed = required if isinstance(required, (list, tuple)) else ()
    return all(key in properties for key in arguments) and all(key in arguments for key in needed)


def _decoded(text: str) -> object:
    """Return the value that `text` encodes, or None if `text` is not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _objects_in(text: str) -> list[dict[str, object]]:
    """Return the objects in `text`. There is at least one.

    :raises InvalidArguments: `text` contains no object, or contains something other than objects.
    :raises RecursionError: the objects are nested too deeply.
    """
    try:
        value = _DECODER.decode(text)
    except ValueError as error:
        broken = error
    else:
        return [_object(value)]
    text = _LEADING.sub("", text, count=1)
    objects: list[dict[str, object]] = []
    at = commas = 0
    while text.startswith("{", at):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            # If a list or an object ends with a comma, the decoder stops at this comma or after it.
            comma = error.pos if text.startswith(",", error.pos) else text.rfind(",", 0, error.pos)
            is_last = comma >= 0 and not text[comma + 1 : error.pos].strip() and _COMMA_AT_END.match(text, comma)
            if not is_last or commas >= _MAX_COMMAS:
                raise InvalidArguments(_describe_fault(error, text)) from None
            text = text[:comma] + text[comma + 1 :]
            commas += 1
            continue
        except ValueError as error:  # an integer has more digits than Python reads
            raise InvalidArguments(_describe_fault(error, text)) from None
        objects.append(value)
        if blanks := _BLANKS.match(text, at):
            at = blanks.end()
    if not objects:
        raise InvalidArguments(_describe_fault(broken, text))
    if not _TRAILING.match(text, at):
        raise InvalidArguments("the arguments object is followed by other text; send one JSON object and nothing else")
    return objects


def _python_objects_in(text: str) -> list[dict[str, object]] | None:
    """Return the objects in `text`, which are written as in Python: `{'all': True}`. Return None if `text` contains
    anything else, or is longer than `_MAX_PYTHON_CHARS`."""
    if len(text) > _MAX_PYTHON_CHARS:
        return None
    text = _LEADING.sub("", text, count=1)
    pieces: list[str] = []
    at = 0
    while token := _PYTHON_TOKEN.match(text, at):
        at = token.end()
        string = token["single"] if token["double"] is None else token["double"]
        if string is not None:
            pieces.append(f'"{_IN_STRING.sub(_json_escape, string)}"')
        else:
            pieces.append(_JSON_WORDS.get(token["word"], token["same"]))
    try:
        return _objects_in(f"{' '.join(pieces)} {text[at:]}")
    except (InvalidArguments, RecursionError):
        return None


def _json_escape(found: re.Match[str]) -> str:
    """Return the JSON form of a match of `_IN_STRING`. Only quotes, and escapes that JSON does not have, change."""
    if found["hex"]:
        return rf"\u00{found['hex']}"
    return "'" if found["quote"] else r"\"" if found["open"] else found[0]


def _object(value: object) -> dict[str, object]:
    for _ in range(_MAX_LAYERS):
        if not isinstance(value, str):
            break
        if value.strip() in _EMPTY:
            return {}
        if (value := _decoded(value)) is None:
            raise InvalidArguments("the arguments are a string; send a JSON object")
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a string" if isinstance(value, str) else "a single value"
        raise InvalidArguments(f"the arguments are {kind}; send a JSON object")
    return value


def _describe_fault(error: ValueError, text: str) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return "the arguments contain a number with too many digits"
    left = len(text.rstrip()) - error.pos
    if left <= 1 or error.msg.startswith("Unterminated") or ("escape" in error.msg and left <= 6):
        return "the arguments break off; send the whole JSON object again"
    return f"the arguments are not valid JSON ({error.msg} at character {error.pos}); send one JSON object"


def _last_snapshot(pieces: list[str]) -> dict[str, object] | None:
    """If the pieces are snapshots of the growing arguments, return the object in the last piece, else None. Pieces are
    snapshots if each piece starts with the whole piece before it."""
    pieces = [piece for piece in pieces if piece]
    if len(pieces) < 2 or not begins_object(pieces[0]):
        return None
    if not all(later.startswith(earlier) for earlier, later in pairwise(pieces)):
        return None
    value = _decoded(pieces[-1])
    return value if isinstance(value, dict) else None


def _unwrapped(arguments: dict[str, object], schema: JsonObject | None) -> dict[str, object]:
    """If `arguments` has the form `{"name": ..., "arguments": {...}}`, return the inner object, provided that the inner
    object fits the tool and the outer object does not. Otherwise return `arguments`."""
    inner = arguments.get("arguments", arguments.get("parameters"))
    if not isinstance(inner, dict) or not arguments.keys() <= {"name", "arguments", "parameters"}:
        return arguments
    return inner if not fits(arguments, schema) and fits(inner, schema) else arguments


def _with_decoded_members(arguments: dict[str, object], schema: JsonObject | None) -> dict[str, object]:
    """Decode each member that should be a list or an object, but was sent as a string of JSON. A member is decoded only
    if the schema allows nothing but lists or nothing but objects for it, and the decoded value has that type."""
    properties = schema.get("properties") if schema is not None else None
    if not isinstance(properties, Mapping):
        return arguments
    decoded = dict(arguments)
    for key, value in arguments.items():
        types = _types_of(properties.get(key)) if isinstance(value, str) else []
        if isinstance(value, str) and types in (["array"], ["object"]):
            inner = _decoded(value.strip())
            if isinstance(inner, list if types == ["array"] else dict):
                decoded[key] = inner
    return decoded


def _types_of(schema: object) -> list[object]:
    """Return the types that a member's schema allows, besides null."""
    if not isinstance(schema, Mapping):
        return []
    types: list[object] = []
    choices = schema.get("anyOf")
    for choice in choices if isinstance(choices, list) else (schema,):
        named = choice.get("type") if isinstance(choice, Mapping) else None
        types.extend(named if isinstance(named, list) else [named])
    return [each for each in types if each != "null"]
