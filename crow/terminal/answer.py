"""Finds the JSON in an answer of the model, and checks it against the schema of `crow run --schema`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import islice
from typing import Any

from crow.domain.errors import ArgumentError
from crow.terminal.prompt import read_text

_MAX_VALUES = 100
_MAX_STARTS = 10_000
"""The maximum number of braces and brackets that are tried as the start of JSON. Each try may read much text."""


class AnswerSchema:
    """A JSON Schema that the last answer has to match. References to other files are not followed."""

    def __init__(self, schema: Any) -> None:
        from jsonschema.validators import validator_for  # takes 40 ms, and only --schema needs it
        from referencing.jsonschema import EMPTY_REGISTRY

        kind = validator_for(schema)
        kind.check_schema(schema)
        self.schema = schema
        self._validator = kind(schema, registry=EMPTY_REGISTRY)

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with `value`, in one line, or None if the schema accepts `value`."""
        error = next(self._validator.iter_errors(value), None)
        if error is None:
            return None
        place = "/".join(str(step) for step in error.absolute_path)
        return f"at /{place}: {error.message[:500]}"


def read_schema(path: str) -> AnswerSchema:
    """Read the file of --schema. :raises ArgumentError: the file contains no usable JSON Schema."""
    try:
        schema = json.loads(read_text("--schema", path))
        checked = AnswerSchema(schema)
        checked.problem(None)  # resolves the references
    except ArgumentError:
        raise
    except Exception as error:  # noqa: BLE001 - jsonschema and referencing raise many kinds
        words = getattr(error, "message", None) or str(error)
        raise ArgumentError(f"--schema {path} is not a usable JSON Schema: {words}") from None
    return checked


def json_in(answer: str) -> Any:
    """Return the JSON value in an answer. The value may be in a code fence or between sentences. If the answer contains
    several values, return the longest.

    :raises ValueError: the answer contains no JSON value.
    """
    text = answer.strip()
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    found: list[Any] = []
    decoder, end = json.JSONDecoder(), 0
    for start in islice((match.start() for match in re.finditer(r"[{[]", text)), _MAX_STARTS):
        if start < end or len(found) > _MAX_VALUES:
            continue  # inside the last value found, or enough values were found
        with suppress(ValueError, RecursionError):
            value, end = decoder.raw_decode(text, start)
            found.append(value)
    if not found:
        raise ValueError("the answer contains no JSON")
    return max(found, key=lambda value: len(json.dumps(value)))
