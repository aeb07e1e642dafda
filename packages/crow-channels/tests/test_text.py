"""Splitting answers, and taking the effect from mentions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow_channels.text import MIN_CHARS, harmless, settled, split, units

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["```\n", "```py\n", "~~~~\n", "\n", "\n\n", "x = 1\n", "word ", "😀", "e\u0301", "a" * 150, "`" * 25]
        ),
        st.text(max_size=30),
    ),
    max_size=60,
).map("".join)
LIMITS = st.integers(MIN_CHARS, 700)


def is_open(text: str) -> bool:
    """Whether a code block is open at the end of a text, as CommonMark reads it."""
    mark = ""
    for line in text.split("\n"):
        found = re.match(r" {0,3}(`{3,20}|~{3,20})(.*)", line)
        if found is None:
            continue
        if not mark and not (found[1][0] == "`" and "`" in found[2]):
            mark = found[1]
        elif mark and found[1][0] == mark[0] and len(found[1]) >= len(mark) and not found[2].strip(" \t"):
            mark = ""
    return bool(mark)


@given(TEXTS, LIMITS)
def test_no_piece_is_too_long_and_nothing_is_lost(text: str, limit: int) -> None:
    pieces = split(text, limit)
    assert all(0 < units(piece.text) <= limit for piece in pieces)
    assert "".join("".join(piece.body for piece in pieces).split()) == "".join(text.split())


@given(TEXTS, LIMITS)
def test_every_piece_closes_its_code_blocks(text: str, limit: int) -> None:
    assert not [piece for piece in split(text, limit)[:-1] if is_open(piece.text)]


@given(TEXTS, TEXTS, LIMITS)
def test_a_growing_text_changes_only_its_last_piece(text: str, more: str, limit: int) -> None:
    before, after = split(text, limit), split(text + more, limit)
    assert [piece.body for piece in before[:-1]] == [piece.body for piece in after[: max(0, len(before) - 1)]]


def test_a_code_block_goes_on_in_the_next_piece_with_its_language() -> None:
    pieces = split("Look:\n```python\n" + "print('hello')\n" * 40 + "```\nDone.", 300)
    assert len(pieces) == 3
    assert [piece.text.startswith("```python\n") for piece in pieces] == [False, True, True]
    assert pieces[0].text.endswith("print('hello')\n```")
    assert pieces[2].text.endswith("```\nDone.")
    assert sum(piece.text.count("print('hello')") for piece in pieces) == 40


def test_words_and_characters_stay_whole() -> None:
    assert {word for piece in split("word " * 100, 200) for word in piece.text.split()} == {"word"}
    family = "👩\u200d👩\u200d👧"
    assert all(piece.text.count("👧") == piece.text.count("👩") / 2 for piece in split(family * 60, 211))
    with pytest.raises(ValueError, match="at least 200"):
        split("x", 100)


def test_mentions_and_control_characters_lose_their_effect() -> None:
    text = "@everyone @Here <@12> <@!12> <@&3> <#4> \x1b[31m\u202etxt @allison"
    assert harmless(text) == (
        "@\u200beveryone @\u200bHere <\u200b@12> <\u200b@!12> <\u200b@&3> <\u200b#4> [31mtxt @allison"
    )


@given(
    st.lists(st.sampled_from(["@", "everyone", "here", "<", "@1>", " ", "x"]), max_size=12).map("".join),
    st.integers(0, 80),
)
def test_what_is_shown_of_a_growing_text_stays_as_it_is(text: str, at: int) -> None:
    assert harmless(text).startswith(harmless(settled(text[:at])))
