"""Texts are shortened, quoted, counted and described in the same way everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.text import (
    base32,
    describe,
    first_line,
    is_number,
    plural,
    quote,
    shorten,
    shorten_end,
    shorten_middle,
)

TEXTS = st.text(max_size=60)
LIMITS = st.integers(min_value=1, max_value=70)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


@given(TEXTS, LIMITS)
def test_a_shortened_text_fits_and_begins_as_the_text_does(text: str, chars: int) -> None:
    short = shorten(text, chars)
    assert len(short) <= chars
    assert short == text if len(text) <= chars else text.startswith(short[:-1]) and short.endswith("…")


@given(TEXTS, LIMITS)
def test_a_shortened_end_says_how_much_is_not_shown(text: str, chars: int) -> None:
    note = f"\n[… {len(text) - chars} of {len(text)} characters are not shown]"
    assert shorten_end(text, chars) == (text if len(text) <= chars else text[:chars] + note)


@given(TEXTS, LIMITS)
def test_a_shortened_middle_keeps_both_ends_and_says_how_much_is_not_shown(text: str, chars: int) -> None:
    short = shorten_middle(text, chars)
    if len(text) <= chars:
        assert short == text
        return
    half = chars // 2
    marker = f"\n[… {len(text) - 2 * half} characters are not shown here …]\n"
    assert short == text[:half] + marker + (text[-half:] if half else "")


@given(TEXTS)
def test_the_first_line_is_the_first_that_is_not_blank(text: str) -> None:
    assert first_line(text) == next(iter([line.strip() for line in text.splitlines() if line.strip()]), "")


@given(TEXTS, LIMITS)
def test_the_first_line_of_a_text_is_quoted(text: str, chars: int) -> None:
    assert quote(text, chars) == f"“{shorten(first_line(text), chars)}”"


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "file", "0 files"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
        (2, "day", "2 days"),
        (2, "branch", "2 branches"),
        (10_000, "earlier session", "10,000 earlier sessions"),
    ],
)
def test_a_number_stands_before_its_noun(number: int, noun: str, words: str) -> None:
    assert plural(number, noun) == words


@given(JSON, LIMITS)
def test_a_value_is_described_as_json_that_fits(value: object, chars: int) -> None:
    assert describe(value, chars) == shorten(
        json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode(), chars
    )


@pytest.mark.parametrize(
    ("data", "text"), [(b"", ""), (b"f", "my"), (b"foobar", "mzxw6ytboi"), (b"\xff" * 5, "77777777")]
)
def test_base32_has_lower_case_and_no_padding(data: bytes, text: str) -> None:
    assert base32(data) == text


def test_a_value_that_is_nested_too_deeply_is_described_all_the_same() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert describe(value) == "nested too deeply to show"


def test_a_number_has_ascii_digits_that_fit_into_64_bits() -> None:
    assert [
        text
        for text in ("0", "017", "9" * 18, "9" * 19, "9" * 5000, "", "-1", "1.0", " 1", "³", "٣")
        if is_number(text)
    ] == [
        "0",
        "017",
        "9" * 18,
    ]
