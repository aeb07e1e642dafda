from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.tools.truncate import OutputBuffer


@given(st.lists(st.text(max_size=20), max_size=60), st.integers(min_value=2, max_value=60))
def test_output_buffer_keeps_head_and_tail_however_the_text_is_split(pieces: list[str], limit: int) -> None:
    retained = OutputBuffer(limit)
    for piece in pieces:
        retained.feed(piece)
    whole, half = "".join(pieces), limit // 2
    assert retained.total_chars == len(whole)
    text = retained.text()
    if text != whole:
        dropped = whole[half : len(whole) - half]
        lines = f" in {dropped.count(chr(10)):,} lines" if "\n" in dropped else ""
        assert text == f"{whole[:half]}\n[... {len(dropped):,} characters{lines} left out ...]\n{whole[-half:]}"
    else:
        assert len(whole) < limit + 20
    assert retained.text() == text


@pytest.mark.parametrize(
    ("limit", "newest"),
    [(6, "abcdef"), (5, "[... 1 characters before this ...]\nbcdef"), (2, "[... 4 characters before this ...]\nef")],
)
def test_newest_is_the_end_of_the_output(limit: int, newest: str) -> None:
    retained = OutputBuffer(1000)
    for piece in ("ab", "cd", "ef"):
        retained.feed(piece)
    assert retained.newest(limit) == newest


def test_newest_reaches_back_into_the_head() -> None:
    retained = OutputBuffer(8)
    for piece in ("abcd", "ef"):
        retained.feed(piece)
    assert retained.newest(3) == "[... 3 characters before this ...]\ndef"
