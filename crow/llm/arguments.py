"""The arguments of one tool call, from the text that was streamed to an object, or to a sentence why there is none.

Strategy: read whole text only (a parsable beginning is not a call), mend only what has one meaning: empty is `{}`,
JSON in a string is decoded, fences and model markup around an object fall away. Two different objects are never made
one, and whatever is left unclear is a fault for the model to read. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise

from crow.domain.messages import JsonObject
from crow.llm.surrogates import replace_lone

__all__ = ["InvalidArguments", "begins_object", "fits", "is_whole", "json_text", "read_arguments"]

# Control characters inside strings are common and have one meaning.
_DECODER = json.JSONDecoder(strict=False)
_MARKUP = r"<[|｜][^|｜<>]{1,40}[|｜]>\w{0,20}|</?[A-Za-z_][\w:.-]{0,40}>|\[/?[A-Z_]{3,20}\]"
_LEADING = re.compile(
    rf"\A(?:\ufeff|[`~]{{3,}}[ \t]*(?:json\b)?|`|{_MARKUP}|json(?=\s*[{{\[])|(?:null|\"\")(?=\s*\{{)|\s)+",
    re.IGNORECASE,
)
_TRAILING = re.compile(rf"(?:[\s`~}}\];]|{_MARKUP})*\Z")
_LAST_COMMA = re.compile(r",(?=\s*[}\]])")
_EMPTY = frozenset({"", "null", "None", "undefined", '""'})
_MOST_LAYERS = 3
_MOST_COMMAS = 20


class InvalidArguments(ValueError):
    """Why arguments cannot be used, in words for the model."""


def read_arguments(pieces: list[str], schema: JsonObject | None) -> list[dict[str, object]]:
    """The object of a call; several, where the arguments of different calls ran together and each fits `schema`.

    `schema` is that of the offered tool, None if there is none. :raises Fault:
    """
    text = replace_lone("".join(pieces)).strip()
    if text in _EMPTY:
        return [{}]
    try:
        objects = _objects_in(text)
    except InvalidArguments:
        newest = _last_snapshot(pieces)
        if newest is None:
            raise
        objects = [newest]
    if len(objects) > 1:
        # `{}` is how some gateways open a call; the real object follows.
        objects = [each for each in objects if each] or objects[:1]
    if len(objects) > 1 and all(each == objects[0] for each in objects):
        objects = objects[:1]
    if len(objects) > 1 and not all(fits(each, schema) for each in objects):
        raise InvalidArguments(f"the arguments hold {len(objects)} objects, run together; send one object per call")
    return [_decoded_members(_unwrapped(each, schema), schema) for each in objects]


def json_text(arguments: Mapping[str, object]) -> str:
    """The object as JSON text that any reader takes. :raises Fault: it holds a number that JSON has no word for."""
    try:
        return replace_lone(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        raise InvalidArguments("the arguments hold NaN or an infinite number, which JSON does not have") from None
    except RecursionError:
        raise InvalidArguments("the arguments are nested too deeply") from None


def begins_object(text: str) -> bool:
    """Whether `text` looks like the beginning of an object."""
    return text.lstrip().startswith("{")


def is_whole(pieces: list[str]) -> bool:
    """Whether the text so far is one whole object, so that more cannot belong to it."""
    if not pieces or not pieces[-1].rstrip().endswith("}"):
        return False
    try:
        return isinstance(_DECODER.decode("".join(pieces)), dict)
    except (ValueError, RecursionError):
        return False


def fits(arguments: Mapping[str, object], schema: JsonObject | None) -> bool:
    """Whether the object can be meant for a tool: no unknown member, none missing."""
    properties = schema.get("properties") if schema is not None else None
    if schema is None or not isinstance(properties, Mapping):
        return False
    required = schema.get("required")
    needed = required if isinstance(required, (list, tuple)) else ()
    return all(key in properties for key in arguments) and all(key in arguments for key in needed)


def _objects_in(text: str) -> list[dict[str, object]]:
    """The objects that make up `text`, at least one. :raises Fault:"""
    try:
        return [_object(_DECODER.decode(text))]
    except RecursionError:
        raise InvalidArguments("the arguments are nested too deeply") from None
    except InvalidArguments:
        raise
    except ValueError as error:
        broken = error
    text = _LEADING.sub("", text, count=1)
    objects: list[dict[str, object]] = []
    at = 0
    commas = 0
    while text.startswith("{", at):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise InvalidArguments("the arguments are nested too deeply") from None
        except json.JSONDecodeError as error:
            comma = _last_comma(text, error.pos) if commas < _MOST_COMMAS else None
            if comma is None:
                raise InvalidArguments(_why(error, text)) from None
            text = text[:comma] + text[comma + 1 :]
            commas += 1
            continue
        objects.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    if not objects:
        raise InvalidArguments(_why(broken, text))
    if not _TRAILING.match(text, at):
        raise InvalidArguments("the arguments go on after their object; send one JSON object and nothing else")
    return objects


def _last_comma(text: str, at: int) -> int | None:
    """Where a comma stands with nothing after it in its list or object, at which the decoder stopped at `at`."""
    comma = at if text.startswith(",", at) else text.rfind(",", 0, at)
    between = text[comma + 1 : at]
    return comma if comma >= 0 and not between.strip() and _LAST_COMMA.match(text, comma) else None


def _object(value: object) -> dict[str, object]:
    for _ in range(_MOST_LAYERS):
        if not isinstance(value, str):
            break
        if value.strip() in _EMPTY:
            return {}
        try:
            value = _DECODER.decode(value)
        except (ValueError, RecursionError):
            raise InvalidArguments("the arguments are a text; send a JSON object") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else "a single value"
        raise InvalidArguments(f"the arguments are {kind}; send a JSON object")
    return value


def _why(error: ValueError, text: str) -> str:
    if isinstance(error, json.JSONDecodeError):
        is_cut_escape = "escape" in error.msg and error.pos >= len(text.rstrip()) - 6
        if error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated") or is_cut_escape:
            return "the arguments break off; send the whole JSON object again"
        return f"the arguments are no valid JSON ({error.msg} at character {error.pos}); send one JSON object"
    return "the arguments are no valid JSON; send one JSON object"


def _last_snapshot(pieces: list[str]) -> dict[str, object] | None:
    """The last piece, where every piece repeats the one before and goes on: whole states instead of additions."""
    spoken = [piece for piece in pieces if piece]
    if len(spoken) < 2 or not begins_object(spoken[0]):
        return None
    if not all(later.startswith(earlier) for earlier, later in pairwise(spoken)):
        return None
    try:
        value = _DECODER.decode(spoken[-1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unwrapped(arguments: dict[str, object], schema: JsonObject | None) -> dict[str, object]:
    """What `{"name": ..., "arguments": {...}}` holds, where the tool cannot mean the whole of it."""
    inner = arguments.get("arguments", arguments.get("parameters"))
    if not isinstance(inner, dict) or not arguments.keys() <= {"name", "arguments", "parameters"}:
        return arguments
    return inner if not fits(arguments, schema) and fits(inner, schema) else arguments


def _decoded_members(arguments: dict[str, object], schema: JsonObject | None) -> dict[str, object]:
    """Members that are JSON in a string, where the schema wants a list or an object and cannot mean a string."""
    properties = schema.get("properties") if schema is not None else None
    if not isinstance(properties, Mapping):
        return arguments
    decoded = dict(arguments)
    for key, value in arguments.items():
        wanted = _structure_of(properties.get(key)) if isinstance(value, str) else None
        if wanted is None or not isinstance(value, str):
            continue
        try:
            inner = _DECODER.decode(value.strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(inner, wanted):
            decoded[key] = inner
    return decoded


def _structure_of(schema: object) -> type[list[object]] | type[dict[str, object]] | None:
    """What a member with this schema must be, None where it may be a string or nothing is said."""
    if not isinstance(schema, Mapping):
        return None
    choices = schema.get("anyOf")
    types: list[object] = []
    for choice in choices if isinstance(choices, list) else (schema,):
        named = choice.get("type") if isinstance(choice, Mapping) else None
        types.extend(named if isinstance(named, list) else [named])
    names = [name for name in types if name != "null"]
    if names == ["array"]:
        return list
    return dict if names == ["object"] else None
