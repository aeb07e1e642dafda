"""Writes tools and calls in the form that Anthropic accepts.

A single tool with another form would fail the whole request.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from crow.domain.messages import JsonObject, ToolSpec

_CHOICES = ("oneOf", "anyOf", "allOf")
_PROPERTY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_ID = re.compile(r"[a-zA-Z0-9_-]{1,256}")
_NOT_IN_ID = re.compile(r"[^a-zA-Z0-9_-]")
_NOT_IN_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_VALUES = frozenset({"default", "const", "enum", "examples"})
"""Members of a schema that hold values instead of schemas."""

_MAX_DEPTH = 40


def tool(spec: ToolSpec) -> dict[str, object]:
    """Return the definition of a tool."""
    sent: dict[str, object] = {"name": name(spec.name)}
    if spec.description.strip():
        sent["description"] = spec.description
    return {**sent, "input_schema": _root(spec.input_schema)}


def name(text: str) -> str:
    """Return the name of a tool with only those characters that Anthropic accepts."""
    return _NOT_IN_NAME.sub("_", text)[:128] or "unnamed"


def call_id(text: str) -> str:
    """Return the id of a call in a form that Anthropic accepts. An id with characters that only other providers use is
    rewritten and gets a checksum, so that different ids stay different."""
    if _ID.fullmatch(text):
        return text
    return f"{_NOT_IN_ID.sub('_', text)[:200]}_{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def _root(schema: JsonObject) -> dict[str, object]:
    """Return the schema of a tool's input. At the top level, it must be an object without alternatives, and the names
    of its properties are restricted. All alternatives of the top level become optional properties."""
    root = _modern(schema, 0)
    sent: dict[str, object] = dict(root) if isinstance(root, Mapping) else {}
    found = dict(_members(sent, "properties"))
    required = _names(sent.get("required"))
    for key in _CHOICES:
        options = sent.pop(key, None)
        for option in options if isinstance(options, list) else ():
            for property_name, value in _members(option, "properties").items():
                found.setdefault(property_name, value)
            if key == "allOf" and isinstance(option, Mapping):
                required += _names(option.get("required"))
    kept = {key: value for key, value in found.items() if _PROPERTY.fullmatch(key)}
    sent.update(type="object", properties=kept)
    sent.pop("required", None)
    if needed := [each for each in dict.fromkeys(required) if each in kept]:
        sent["required"] = needed
    return sent


def _members(schema: object, key: str) -> Mapping[str, object]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _names(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, (list, tuple)) else []


def _modern(schema: object, depth: int) -> object:
    """Return the schema in draft 2020-12 of JSON Schema, which Anthropic requires. Older drafts have another form for
    the schemas of a tuple and for exclusive limits."""
    if depth > _MAX_DEPTH:
        return {}
    if isinstance(schema, (list, tuple)):
        return [_modern(each, depth + 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    sent = {
        str(key): value if key in _VALUES else _modern(value, depth + 1)
        for key, value in schema.items()
        if key not in {"$schema", "id"}
    }
    if isinstance(schema.get("id"), Mapping):  # a property of this name, and not the name of the schema
        sent["id"] = _modern(schema["id"], depth + 1)
    if isinstance(items := sent.get("items"), list):
        sent["prefixItems"] = items
        del sent["items"]
    for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(sent.get(exclusive), bool):
            is_exclusive = sent.pop(exclusive)
            if is_exclusive and limit in sent:
                sent[exclusive] = sent.pop(limit)
    return sent
