"""The fields of a form that an MCP server sends and the user fills in at the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from crow.terminal.answer import AnswerSchema

_CHECKED = (
    *("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "items"),
    *("oneOf", "anyOf", "const"),
)
"""The keywords of JSON Schema that crow checks. The server has to check all other keywords, because checking some of
them (such as `pattern`) may take long."""

_MAX_DEPTH = 8
"""Crow checks schemas inside of schemas down to this depth."""

_KINDS = ("string", "number", "integer", "boolean", "array")
_YES, _NO = ("y", "yes", "true"), ("n", "no", "false")


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form."""

    name: str
    """The key of the field's value in the answer."""
    title: str
    """Shown when the value is asked for."""
    description: str
    """Shown above the title. May be empty."""
    kind: str
    """The JSON type of the value: one of `_KINDS`."""
    is_required: bool
    """Whether the field must have a value."""
    default: Any
    """The server's default as JSON. None if there is none."""
    choices: tuple[tuple[str, str], ...]
    """The allowed values, each with a name for the user. Without choices, every value of `kind` is allowed."""
    schema: Mapping[str, Any]
    """The field's JSON Schema, as the server sent it."""

    @property
    def default_text(self) -> str:
        """The default as the user would type it."""
        match self.default:
            case None:
                return ""
            case bool():
                return "y" if self.default else "n"
            case list():
                return ", ".join(map(str, self.default))
            case _:
                return str(self.default)

    def value_of(self, typed: str) -> Any:
        """Return the value for the typed text, or None if the user typed nothing and the field is not required.

        :raises ValueError: the field does not accept the text; the message says what it accepts.
        """
        text = typed.strip()
        if not text:
            if self.is_required:
                raise ValueError("This field is required.")
            return None
        value = self._convert(text)
        try:
            problem = AnswerSchema(_checked_part(self.schema)).problem(value)
        except Exception:  # noqa: BLE001 - it is no valid JSON Schema, so only the server can check the value
            problem = None
        if problem is not None:
            raise ValueError(problem.partition(": ")[2])
        return value

    def takes(self, typed: str) -> bool:
        """Return whether the field accepts what was typed."""
        try:
            self.value_of(typed)
        except ValueError:
            return False
        return True

    def _convert(self, text: str) -> Any:
        match self.kind:
            case "boolean":
                if text.lower() not in (*_YES, *_NO):
                    raise ValueError("Type y or n.")
                return text.lower() in _YES
            case "integer":
                return _number(int, text, "a whole number")
            case "number":
                return _number(float, text, "a number")
            case "array":
                return [self._chosen(part.strip()) for part in text.split(",") if part.strip()]
            case _:
                return self._chosen(text) if self.choices else text

    def _chosen(self, text: str) -> str:
        """Return the value of the choice with this number, name or value. Without choices, return the text itself."""
        for number, (value, name) in enumerate(self.choices, 1):
            if text in (value, name, str(number)):
                return value
        if not self.choices:
            return text
        raise ValueError(f"Type a number from 1 to {len(self.choices)}, or one of the names.")


def fields_of(schema: Mapping[str, Any]) -> list[FormField]:
    """Return the fields of a form, in order. If a field does not accept its own default, the default is left out."""
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    properties = schema.get("properties")
    found = []
    for name, field in properties.items() if isinstance(properties, dict) else ():
        kind, items = (field.get("type", "string"), field.get("items")) if isinstance(field, dict) else (None, None)
        if kind not in _KINDS:
            continue
        choices = _choices(items if kind == "array" and isinstance(items, dict) else field)
        title, description = str(field.get("title") or name), str(field.get("description") or "")
        default = field.get("default")
        one = FormField(name, title, description, kind, name in names, default, choices, field)
        found.append(one if one.takes(one.default_text) else replace(one, default=None))
    return found


def _number(parse: Callable[[str], float], text: str, words: str) -> float:
    """Return the number that `parse` reads. :raises ValueError: the text is not a number, or JSON cannot hold the
    number."""
    with suppress(ValueError):
        number = parse(text)
        if isinstance(number, int) or math.isfinite(number):  # JSON has no NaN and no infinity
            return number
    raise ValueError(f"Type {words}.")


def _checked_part(schema: Any, depth: int = 0) -> Any:
    """Return the part of a schema that crow checks, at every depth."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema if isinstance(schema, bool) else {}
    part = {key: schema[key] for key in _CHECKED if key in schema}
    for key in ("items", "oneOf", "anyOf"):
        if isinstance(inner := part.get(key), list):
            part[key] = [_checked_part(one, depth + 1) for one in inner]
        elif inner is not None:
            part[key] = _checked_part(inner, depth + 1)
    return part


def _choices(field: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    named = field.get("oneOf") or field.get("anyOf")
    if isinstance(named, list):
        pairs = [(one["const"], one.get("title")) for one in named if isinstance(one, dict) and "const" in one]
        return tuple((str(value), str(name or value)) for value, name in pairs)
    values = field.get("enum")
    if not isinstance(values, list):
        return ()
    names = field.get("enumNames")
    shown: Sequence[Any] = names if isinstance(names, list) and len(names) == len(values) else values
    return tuple((str(value), str(name)) for value, name in zip(values, shown, strict=True))
