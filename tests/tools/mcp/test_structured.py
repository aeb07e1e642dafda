"""Structured results are checked against the server's schema, in a bounded number of steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from crow.tools.mcp.structured import result_fault

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        (POINT, {"x": 1, "y": 0.5, "z": None}, None),
        (POINT, {"x": 1.0}, None),
        (POINT, {"y": 1}, "x is missing"),
        (POINT, {"x": True}, "x is not of type integer"),
        (POINT, [1], "the value is not of type object"),
        ({**POINT, "additionalProperties": False}, {"x": 1, "z": 2}, "z is not expected"),
        ({**POINT, "additionalProperties": False, "patternProperties": {"^z$": {}}}, {"x": 1, "z": 2}, None),
        (
            {"properties": {"a": {"items": {"enum": ["b", "c"]}}}},
            {"a": ["b", "d"]},
            "a[1] is not one of the listed values",
        ),
        ({"prefixItems": [{"type": "string"}], "items": False}, ["a", "b"], "the value[1] is not expected"),
        ({"items": [{"type": "string"}], "additionalItems": False}, ["a", "b"], "the value[1] is not expected"),
        ({"const": 3}, 4, "the value is not one of the listed values"),
        ({"minimum": 1, "exclusiveMaximum": 3}, 3, "the value is too large"),
        ({"exclusiveMinimum": 1}, 1, "the value is too small"),
        ({"minLength": 2}, "a", "the value has 1 characters, too few"),
        ({"maxItems": 1}, [1, 2], "the value has 2 items, too many"),
        ({"type": ["string", "null"]}, None, None),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}}, 1, "the value is not of type string"),
        ({"$ref": "https://evil.example/schema"}, 1, None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1, "the value fits none of 2 choices"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "a", None),
        ({"not": {}}, 1, None),
        (
            {"type": "object", "properties": {"a\x1b[2J": {"type": "null"}}},
            {"a\x1b[2J": 1},
            "a\\x1b[2J is not of type null",
        ),
    ],
)
def test_faults_are_named(schema: dict[str, Any], value: object, fault: str | None) -> None:
    assert result_fault(schema, value) == fault


LEAVES = st.sampled_from([None, True, 0, 1, 2.5, "", "aa"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner), max_leaves=6
)
SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["string", "integer", "number", "object", "array", "null", "boolean"]),
            "enum": st.lists(st.sampled_from([None, "aa", 7, 2.5]), min_size=1),
            "minLength": st.integers(0, 3),
            "maxItems": st.integers(0, 2),
            "minimum": st.integers(-1, 2),
            "pattern": st.just("^a"),
            "required": st.lists(st.sampled_from("ab"), unique=True),
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("ab"), inner),
            "patternProperties": st.dictionaries(st.sampled_from(["^a"]), inner),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            **{key: st.lists(inner, min_size=1, max_size=3) for key in ("anyOf", "oneOf", "allOf")},
            "not": inner,
        },
    ),
    max_leaves=8,
)


@given(SCHEMAS, VALUES)
def test_a_fault_is_certain(schema: Any, value: object) -> None:
    if result_fault(schema, value) is not None:
        assert not Draft202012Validator(schema).is_valid(value)
