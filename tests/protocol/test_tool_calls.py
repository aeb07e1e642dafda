"""Size limits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.entries import Announcement, Location
from crow.protocol.sizes import json_bytes, limit_json, limit_text, split_text
from crow.protocol.tool_calls import call_fields, raw_input


def test_text_within_the_limit_is_unchanged() -> None:
    assert limit_text("short", 30) == "short"
    assert limit_text("x" * 48_000, 50_000) == "x" * 48_000


def test_long_text_keeps_both_ends_around_a_marker_with_the_count() -> None:
    shown = limit_text("a" * 600 + "b" * 600, 300)
    head, marker, tail = shown.split("\n")
    assert (set(head), set(tail)) == ({"a"}, {"b"})
    assert marker == f"[… {1200 - len(head) - len(tail):,} characters are not shown here …]"


@given(st.text(max_size=400), st.integers(100, 300))
def test_limited_text_is_within_its_limit(text: str, limit: int) -> None:
    assert json_bytes(limit_text(text * 9, limit)) <= limit


@given(st.text(max_size=300), st.integers(12, 200))
def test_pieces_are_within_the_limit_and_lose_nothing(text: str, limit: int) -> None:
    assert "".join(split_text(text, limit)) == text
    assert all(json_bytes(piece) <= limit for piece in split_text(text, limit))
    assert "" not in split_text(text, limit)


def test_limited_json_keeps_its_shape_and_short_values() -> None:
    value = {"path": "/w/a", "content": "x" * 100_000, "lines": [1, 2]}
    small = limit_json(value, 20_000)
    assert isinstance(small, dict)
    assert (small["path"], small["lines"]) == ("/w/a", [1, 2])
    assert json_bytes(small) <= 20_000
    assert limit_json(value, 200_000) is value
    assert json_bytes(limit_json([["y" * 50] * 300] * 300, 5_000)) <= 5_000


@pytest.mark.parametrize(("line", "sent"), [(0, 1), (7, 7), (10**30, 2**32 - 1)])
def test_the_line_of_a_location_is_within_the_protocols_limits(line: int, sent: int) -> None:
    announcement = Announcement(title="Read a", kind="read", locations=(Location(path="/a", line=line),))
    assert call_fields("c", announcement)["locations"] == [{"path": "/a", "line": sent}]


@pytest.mark.parametrize("depth", [150, 300, 600, 900, 5_000])
def test_arguments_of_any_depth_can_be_shown(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    shown = raw_input(arguments)
    assert shown == (json.loads(arguments) if depth < 200 else {"arguments": arguments})
