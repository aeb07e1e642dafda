"""Rewrites the JSON Schema of a tool so that every endpoint accepts it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# The keywords of JSON Schema by the kind of their value: schemas by name, lists, one schema, counts, and numbers.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "enum", "type")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_DEPTH = 64
_MAX_HOPS = 16
"""A reference is followed through at most this many further references."""
_INDEX_DIGITS = 6


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that allows what `schema` allows, and that strict servers accept.

    llama.cpp refuses every request if the schema of one tool contains one of these: `true` instead of `{}`, an empty
    `enum` or `anyOf`, a limit that is not a finite number, or a reference other than `#/name/name`. Empty lists, such
    limits, and references that cannot be rewritten are left out. The schema then allows any value in their place. The
    MCP server checks the value anyway.
    """
    rewriter = _Rewriter(schema)
    plain = rewriter.rewrite(schema)
    if rewriter.refers_to_root:
        root = {key: value for key, value in plain.items() if key not in {"$defs", "definitions"}}
        plain["$defs"] = {**plain.get("$defs", {}), rewriter.root_name: root}
    return plain


class _Rewriter:
    """Rewrites the parts of one schema. A reference to the root becomes a reference to `$defs/root`, which is a copy of
    the root."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.root_name = "root"
        while self.root_name in root.get("$defs", {}):
            self.root_name += "_"
        self.refers_to_root = False

    def rewrite(self, schema: object, depth: int = 0) -> dict[str, Any]:
        """Return the plain form of a schema. Parts that are nested too deeply become `{}`, which allows any value."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return {"not": {}} if schema is False else {}
        plain = {key: value for key, value in schema.items() if _is_usable(key, value)}
        for key in _NAMED:
            if isinstance(named := plain.get(key), Mapping):
                plain[key] = {name: self.rewrite(part, depth + 1) for name, part in named.items()}
        for key in _SINGLE:
            part = plain.get(key)
            if isinstance(part, Mapping) or (key == "items" and isinstance(part, bool)):
                plain[key] = self.rewrite(part, depth + 1)
        for key in _LISTS:
            if key not in {"enum", "type"} and isinstance(parts := plain.get(key), list):
                plain[key] = [self.rewrite(part, depth + 1) for part in parts]
        if "$ref" in plain and (reference := self._reference(plain.pop("$ref"))) is not None:
            plain["$ref"] = reference
        return plain

    def _reference(self, reference: object) -> str | None:
        """Return the reference in a form that every server can resolve, or None if there is no such form."""
        followed: set[str] = set()
        target: object = {"$ref": reference}
        while isinstance(target, Mapping) and "$ref" in target:
            following = target["$ref"]
            if not isinstance(following, str) or following in followed or len(followed) == _MAX_HOPS:
                return None
            followed.add(following)
            target = self._root if following == "#" else self._part(following)
        if not isinstance(target, (Mapping, bool)):
            return None
        if reference == "#":
            self.refers_to_root = True
            return f"#/$defs/{self.root_name}"
        return str(reference)

    def _part(self, reference: str) -> object:
        """Return the part of the schema at `reference`, without following further references."""
        first, *names = reference.split("/")
        if first != "#":
            return None
        part: object = self._root
        for name in names:
            if isinstance(part, Mapping):
                part = part.get(name)
            elif isinstance(part, Sequence) and not isinstance(part, str) and _is_index(name):
                part = part[int(name)] if int(name) < len(part) else None
            else:
                return None
        return part


def _is_usable(key: str, value: object) -> bool:
    """Return whether a member of a schema can be kept. Empty lists and limits that are not finite numbers cannot be
    kept."""
    if key in _LISTS:
        return value != []
    if key in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return key not in _BOUNDS or (is_finite and not isinstance(value, bool))


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= _INDEX_DIGITS
