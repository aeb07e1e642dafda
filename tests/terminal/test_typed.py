"""What is typed during a turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from crow.terminal.typed import TypedText


@pytest.mark.parametrize(
    ("keys", "line", "queue", "sent"),
    [
        (["a", "b", "\x7f", "c"], "ac", [], []),
        (["one\r"], "", ["one"], []),
        (["one", "\n"], "", ["one"], []),
        (["one\r", "two\r", "thr"], "thr", ["one", "two"], []),
        (["one\r", "two\r", "\r"], "", ["two"], ["one"]),
        (["one\r", "two\r", "\r", "\r", "\r"], "", [], ["one", "two"]),
        (["one\r", "two\r", "x", "\x1b"], "two\nx", ["one"], []),
        (["one\r", "\x1b", "\r"], "", ["one"], []),
        (["text", "\x1b"], "", [], []),
        (["/undo\r", "\r"], "", ["/undo"], []),
        (["pasted\rin\none\r\ngo\r"], "", ["pasted\nin\none\ngo"], []),
        (["a", "\x1b[D", "\x1b[1;5C", "\x1bOP", "\x1bf", "b"], "ab", [], []),
        (["one two  three", "\x17"], "one two  ", [], []),
        (["one two", "\x15"], "", [], []),
        (["  ", "\r"], "", [], []),
        (["a\x00\x07\tb"], "a b", [], []),
    ],
)
def test_keys_edit_the_line_queue_it_send_it_and_take_it_back(
    keys: list[str], line: str, queue: list[str], sent: list[str]
) -> None:
    typed = TypedText()
    steered = [text for key in keys for text in typed.feed(key.encode())]
    assert (typed.line, typed.queue, steered) == (line, queue, sent)


@pytest.mark.parametrize(
    ("lines", "queue", "sent"),
    [
        ([b"one\n", b"two\n"], ["one", "two"], []),
        ([b"one\n", b"\n"], [], ["one"]),
        ([b"one\n", b"two\n", b"\x1b\n"], ["one"], []),
        ([b"one\nstill one\n"], ["one\nstill one"], []),
    ],
)
def test_whole_lines_do_the_same(lines: list[bytes], queue: list[str], sent: list[str]) -> None:
    typed = TypedText()
    steered = [text for line in lines for text in typed.feed_lines(line)]
    assert (typed.line, typed.queue, steered) == ("", queue, sent)


@given(st.lists(st.binary(max_size=12)), st.integers(min_value=1, max_value=200))
def test_whatever_is_typed_is_shown_on_short_lines_without_control_characters(
    chunks: list[bytes], columns: int
) -> None:
    typed = TypedText()
    for chunk in chunks:
        typed.feed(chunk)
    lines = typed.shown(columns)
    assert bool(lines) is bool(typed.line or typed.queue)
    for line in lines:
        assert line.isprintable()
        assert cell_len(line) <= columns


def test_a_character_that_arrives_in_pieces_is_typed_whole() -> None:
    typed = TypedText()
    for byte in "é🐦".encode():
        typed.feed(bytes([byte]))
    assert typed.line == "é🐦"


@pytest.mark.parametrize(
    ("keys", "is_asked"),
    [
        (["\x1b"], True),
        (["a", "\x1b"], False),
        (["a", "\x1b", "\x1b"], True),
        (["a\r", "\x1b"], False),
        (["\x1b[A"], False),
    ],
)
def test_escape_without_any_text_asks_for_the_end_of_the_turn(keys: list[str], is_asked: bool) -> None:
    typed = TypedText()
    for each in keys:
        typed.feed(each.encode())
    assert typed.is_stop_asked is is_asked
