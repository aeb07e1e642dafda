"""Size limits and changed regions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.frontend.tool_calls import changed_regions, json_bytes, limit_json, limit_text, raw_input, split_text

lines = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "same\n", *(f"{n}\n" for n in range(30))]), max_size=40)


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


@pytest.mark.parametrize("depth", [150, 300, 600, 900, 5_000])
def test_arguments_of_any_depth_can_be_shown(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    shown = raw_input(arguments)
    assert shown == (json.loads(arguments) if depth < 200 else {"arguments": arguments})


def test_two_distant_changes_give_two_regions_with_line_numbers() -> None:
    old = "".join(f"{n}\n" for n in range(1, 101))
    new = old.replace("10\n", "ten\n", 1).replace("90\n", "", 1)
    first, second = changed_regions(old, new)
    assert (first.old_line, first.old_text) == (7, "7\n8\n9\n10\n11\n12\n13\n")
    assert (first.new_line, first.new_text) == (7, "7\n8\n9\nten\n11\n12\n13\n")
    assert (second.old_line, second.old_text) == (87, "87\n88\n89\n90\n91\n92\n93\n")
    assert (second.new_line, second.new_text) == (87, "87\n88\n89\n91\n92\n93\n")


def test_equal_texts_have_no_regions() -> None:
    assert changed_regions("a\nb\n", "a\nb\n") == ()


@settings(max_examples=200)
@given(lines, lines)
def test_applying_the_regions_to_the_old_text_gives_the_new_text(before: list[str], after: list[str]) -> None:
    old, new = "".join(before), "".join(after)
    rebuilt: list[str] = []
    at = 0
    for region in changed_regions(old, new):
        assert "".join(before[region.old_line - 1 :]).startswith(region.old_text)
        rebuilt += before[at : region.old_line - 1]
        assert len(rebuilt) == region.new_line - 1
        rebuilt += region.new_text.splitlines(keepends=True)
        at = region.old_line - 1 + len(region.old_text.splitlines(keepends=True))
    assert "".join([*rebuilt, *before[at:]]) == new
