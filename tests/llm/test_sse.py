"""Tests of the event decoder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.llm import sse
from crow.llm.sse import EventTooLarge, SseDecoder
from tests.support.amounts import examples


def decoded(pieces: list[bytes]) -> list[str]:
    decoder = SseDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.finish()


@given(
    stream=st.lists(
        st.sampled_from([b"data: a", b"data:b", b"data", b":c", b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", b"\xff", b"x"]),
        max_size=30,
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 100), max_size=8),
)
@settings(max_examples=examples(20))
def test_any_split_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    at = sorted(min(cut, len(stream)) for cut in cuts)
    pieces = [stream[start:end] for start, end in zip([0, *at], [*at, len(stream)], strict=True)]
    single = [stream[at : at + 1] for at in range(len(stream))]
    assert decoded(pieces) == decoded([stream]) == decoded(single)


def test_an_event_is_complete_before_the_lf_of_its_last_crlf() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\r\n\r") == ["a"]
    assert decoder.feed(b"\ndata: b\n\n") == ["b"]


def test_only_one_space_after_the_colon_is_dropped() -> None:
    assert decoded([b"data:  a \n\n"]) == [" a "]


def test_data_lines_are_joined_by_line_feeds() -> None:
    assert decoded([b"data: a\rdata:\r\ndata: b\n\n"]) == ["a\n\nb"]


def test_a_byte_order_mark_is_dropped_only_at_the_start() -> None:
    assert decoded([b"\xef", b"\xbb", b"\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"]) == ["a"]


@pytest.mark.parametrize(
    ("piece", "times"), [(b"data: " + b"x" * 44 + b"\n", 19), (b"x" * 50, 19), (b"data:\n", 190), (b"data\n", 240)]
)
def test_an_endless_event_raises(monkeypatch: pytest.MonkeyPatch, piece: bytes, times: int) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    decoder = SseDecoder()
    for _ in range(times):
        decoder.feed(piece)
    with pytest.raises(EventTooLarge, match="more than 1,000 bytes"):
        decoder.feed(piece * 20)


def test_a_large_event_in_small_pieces_is_complete() -> None:
    event = b"data: " + b"x" * 4_000_000 + b"\n\n"
    decoder = SseDecoder()
    events = [each for at in range(0, len(event), 100) for each in decoder.feed(event[at : at + 100])]
    assert [len(each) for each in events] == [4_000_000]
