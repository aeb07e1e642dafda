from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.tools.truncate import OutputBuffer, head_and_tail


def test_text_within_its_budget_is_unchanged():
    assert head_and_tail("abc\ndef", 7, "nowhere") == "abc\ndef"


def test_marker_states_what_is_left_out_and_where_it_is():
    text = "".join(f"line {number}\n" for number in range(1000))
    cut = head_and_tail(text, 200, "recall entry 12")
    assert cut == (
        "".join(f"line {number}\n" for number in range(9))
        + "\n[... 8,764 characters in 984 lines left out; recall entry 12 ...]\n"
        + "".join(f"line {number}\n" for number in range(993, 1000))
    )


@given(
    st.text(alphabet=st.sampled_from("ab\n é\ud83d\ude00"), max_size=400),
    st.integers(min_value=0, max_value=300),
)
def test_cut_text_fits_adds_up_and_parts_no_surrogate_pair(text: str, budget: int):
    cut = head_and_tail(text, budget, "")
    if len(text) <= budget:
        assert cut == text
        return
    found = re.search(r"\n\[\.\.\. ([\d,]+) characters(?: in ([\d,]+) lines)? left out \.\.\.\]\n", cut)
    assert found is not None
    head, tail = cut[: found.start()], cut[found.end() :]
    left_out = text[len(head) : len(text) - len(tail)]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(found[1].replace(",", "")) == len(left_out)
    assert int((found[2] or "0").replace(",", "")) == left_out.count("\n")
    assert len(cut) <= max(budget, len(found[0]) + 2)
    for edge in (head[-1:] + left_out[:1], left_out[-1:] + tail[:1]):
        assert edge != "\ud83d\ude00"


@given(st.lists(st.text(max_size=20), max_size=60), st.integers(min_value=2, max_value=60))
def test_retained_keeps_head_and_tail_whatever_the_pieces(pieces: list[str], limit: int):
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
def test_newest_output_is_the_end_of_it(limit: int, newest: str):
    retained = OutputBuffer(1000)
    for piece in ("ab", "cd", "ef"):
        retained.feed(piece)
    assert retained.newest(limit) == newest


def test_newest_output_reaches_back_into_the_head():
    retained = OutputBuffer(8)
    for piece in ("abcd", "ef"):
        retained.feed(piece)
    assert retained.newest(3) == "[... 3 characters before this ...]\ndef"
