"""Checks structured results against the schema that their server declared for them.

The library `jsonschema` would evaluate the server's regular expressions on the event loop, where one such as `^(a+)+$`
takes hours. A cyclic or wide schema takes long, too. This module evaluates no expression and counts its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crow.domain.text import on_one_line

_MAX_STEPS = 20_000
_MAX_DEPTH = 64
_NAME_CHARS = 100

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "object": dict,
    "array": list,
    "boolean": bool,
    "null": type(None),
}
_SIZES: Mapping[str, tuple[type, str]] = {"Length": (str, "characters"), "Items": (list, "items")}


class _OutOfSteps(Exception):
    """The check takes too long, so it has no result."""


def result_fault(schema: Mapping[str, Any], value: object) -> str | None:
    """Return what is wrong with a value, or None if nothing is certainly wrong with it.

    Keywords that need a regular expression are ignored. So are keywords such as `not`: the check of the schema inside
    is incomplete, so a correct value could seem to be wrong. Schemas that would take too many steps are ignored, too.
    """
    try:
        return _Check(schema).fault(schema, value, "the value")
    except _OutOfSteps:
        return None


class _Check:
    """One check of a value. `root` is the schema to which references refer."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = _MAX_STEPS

    def fault(self, schema: object, value: object, where: str, depth: int = 0) -> str | None:
        """Return the first fault of `value`, or None. `where` is the path of the value inside the result.

        :raises _OutOfSteps: the check takes too long.
        """
        self._count(1)
        if schema is False:
            return f"{where} is not expected"
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if (fault := self._own_fault(schema, value, where)) is not None:
            return fault
        inner = (self.fault(part, each, path, depth + 1) for part, each, path in self._inner(schema, value, where))
        if (fault := next((fault for fault in inner if fault is not None), None)) is not None:
            return fault
        for key in ("anyOf", "oneOf"):
            choices = schema.get(key)
            if isinstance(choices, list) and choices:
                faults = [self.fault(choice, value, where, depth + 1) for choice in choices]
                if None not in faults:
                    return faults[0] if len(faults) == 1 else f"{where} fits none of {len(faults)} choices"
        return None

    def _count(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _OutOfSteps

    def _own_fault(self, schema: Mapping[str, Any], value: object, where: str) -> str | None:
        """Return how the value itself breaks the schema, apart from the schemas inside it."""
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if kinds and not any(_is_kind(value, kind) for kind in kinds):
            return f"{where} is not of type {on_one_line(' or '.join(map(str, kinds)))[:_NAME_CHARS]}"
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list) and not isinstance(value, (dict, list)):
            self._count(len(listed))
            if value not in listed:
                return f"{where} is not one of the listed values"
        if isinstance(value, dict) and isinstance(required := schema.get("required"), list):
            self._count(len(required))
            missing = next((name for name in required if isinstance(name, str) and name not in value), None)
            if missing is not None:
                return f"{_path(where, missing)} is missing"
        return _bounds_fault(schema, value, where)

    def _inner(self, schema: Mapping[str, Any], value: object, where: str) -> Iterator[tuple[object, object, str]]:
        """Yield the schemas that must all fit, each with a part of the value and its path."""
        if "$ref" in schema:
            yield self._target(schema["$ref"]), value, where
        parts = schema.get("allOf")
        yield from ((part, value, where) for part in (parts if isinstance(parts, list) else ()))
        if isinstance(value, dict):
            known = schema.get("properties")
            known = known if isinstance(known, Mapping) else {}
            # An expression could allow a name that no property has.
            others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            for name, each in value.items():
                yield known.get(name, others), each, _path(where, name)
        if isinstance(value, list):
            first, others = schema.get("prefixItems"), schema.get("items", True)
            if isinstance(others, list):  # up to draft 2019-09
                first, others = others, schema.get("additionalItems", True)
            first = first if isinstance(first, list) else []
            for at, each in enumerate(value):
                yield first[at] if at < len(first) else others, each, f"{where}[{at}]"

    def _target(self, reference: object) -> object:
        """Return the part of a schema to which a reference in the same schema points. Any other reference allows all
        values."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        part: object = self._root
        names = reference.split("/")[1:]
        self._count(len(names))
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(part, Mapping) and key in part:
                part = part[key]
            elif isinstance(part, list) and key.isdecimal() and len(key) < 7 and int(key) < len(part):
                part = part[int(key)]
            else:
                return True
        return part


def _is_kind(value: object, kind: object) -> bool:
    """Return whether the value has this type. An unknown type allows all values."""
    match kind:
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and (isinstance(value, int) or _is_whole(value))
        case str() if kind in _KINDS:
            return isinstance(value, _KINDS[kind])
    return True


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _bounds_fault(schema: Mapping[str, Any], value: object, where: str) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = _number(schema.get("minimum")), _number(schema.get("maximum"))
        above, below = _number(schema.get("exclusiveMinimum")), _number(schema.get("exclusiveMaximum"))
        is_low = (low is not None and value < low) or (above is not None and value <= above)
        is_high = (high is not None and value > high) or (below is not None and value >= below)
        if is_low or is_high:
            return f"{where} is too {'small' if is_low else 'large'}"
    for suffix, (kind, unit) in _SIZES.items():
        if isinstance(value, kind) and isinstance(value, Sequence):
            fewest, most = _number(schema.get(f"min{suffix}")), _number(schema.get(f"max{suffix}"))
            if (fewest is not None and len(value) < fewest) or (most is not None and len(value) > most):
                return f"{where} has {len(value):,} {unit}, too {'few' if fewest and len(value) < fewest else 'many'}"
    return None


def _number(bound: object) -> int | float | None:
    return bound if isinstance(bound, (int, float)) and not isinstance(bound, bool) else None


def _path(where: str, name: str) -> str:
    shown = on_one_line(name[:_NAME_CHARS])
    return shown if where == "the value" else f"{where}.{shown}"
