"""Tests of the parser of the Messages API over every fixture, whole and in any split."""

from __future__ import annotations

import collections
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.errors import AnswerTooLong
from crow.domain.messages import Answer, Usage
from crow.llm import TextDelta, ThoughtDelta
from crow.llm.items import ITEMS
from crow.llm.messages.parser import MessagesParser
from crow.llm.parser import LOOP_CHARS, MAX_CHARS
from tests.llm.messages.streams import FIXTURES, Fixture, block_events, outcome_of, sse
from tests.llm.streams import TOOLS
from tests.llm.test_parser import TWIGS, described, plain
from tests.support.amounts import examples

KEYS = (
    *("type", "index", "delta", "content_block", "message", "usage", "content", "text", "thinking", "signature", "id"),
    *("name", "input", "partial_json", "stop_reason", "stop_details", "error", "input_tokens", "cache_creation"),
)
KINDS = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message"),
    *("text", "text_delta", "thinking", "thinking_delta", "signature_delta", "tool_use", "input_json_delta", "error"),
    *("citations_delta", "redacted_thinking", "server_tool_use", "other"),
)


def items_in(answer: Answer) -> list[Any]:
    """The items of an answer as the fixtures write them."""
    stored: Any = answer.opaque.get(ITEMS, [])
    return [_short(item["data"], item.get("call")) for item in stored]


def _short(data: dict[str, Any], call: int | None) -> Any:
    if call is None:
        return data
    return call if data == {"type": "tool_use"} else [data, call]


def check_whole(fixture: Fixture) -> None:
    outcome = outcome_of(fixture, [fixture.stream])
    expect = fixture.expect
    if "error" in expect:
        assert (type(outcome.error).__name__, outcome.answer) == (expect["error"], None)
        assert expect["says"] in str(outcome.error)
        assert outcome.text == expect["shown"]
        return
    assert outcome.error is None
    answer = outcome.answer
    assert answer is not None
    calls = [described(call, wanted) for call, wanted in zip(answer.calls, expect.get("calls", []), strict=False)]
    assert (calls, len(answer.calls)) == (expect.get("calls", []), len(calls))
    assert items_in(answer) == expect.get("items", [])
    wanted = {key: value for key, value in expect.items() if key not in {"calls", "usage", "items"}}
    usage = Usage(**expect["usage"]) if "usage" in expect else None
    assert answer == Answer(calls=answer.calls, usage=usage, opaque=answer.opaque, wire="messages", **wanted)


def check_splits(fixture: Fixture) -> None:
    stream = fixture.stream
    whole = plain(outcome_of(fixture, [stream]))
    assert plain(outcome_of(fixture, [stream[at : at + 1] for at in range(len(stream))])) == whole
    chance = random.Random(len(stream))
    for _ in range(examples(2)):
        cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(1, 30)))
        pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        assert plain(outcome_of(fixture, pieces)) == whole


@pytest.mark.long
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)
def test_a_stream_gives_what_its_fixture_expects_in_any_split(fixture: Fixture) -> None:
    check_whole(fixture)
    check_splits(fixture)


def test_the_fixtures_are_many() -> None:
    assert len(FIXTURES) >= 120
    assert len({fixture.name for fixture in FIXTURES}) == len(FIXTURES)


def test_each_piece_is_shown_at_once() -> None:
    parser = MessagesParser()
    events = [json.dumps(event) for event in block_events(0, {"think": ["Hm."], "sign": "s"})]
    assert parser.feed(events) == [ThoughtDelta(text="Hm.")]
    events = [json.dumps(event) for event in block_events(1, {"text": ["Hi", " there"]})]
    assert parser.feed(events[:2]) == [TextDelta(text="Hi")]
    assert parser.feed(events[2:]) == [TextDelta(text=" there")]


def test_a_partial_answer_has_no_calls_and_nothing_to_send_back() -> None:
    parser = MessagesParser(tuple(TOOLS.values()))
    for block in ({"think": ["Hm."], "sign": "s"}, {"text": ["Now"]}, {"call": "shell", "json": ["{}"]}):
        parser.feed(json.dumps(event) for event in block_events(0, block))
    assert parser.partial() == Answer(text="Now", thought="Hm.", finish="interrupted", wire="messages")


ENDLESS: dict[str, dict[str, Any]] = {
    "text": {"type": "text_delta", "text": TWIGS},
    "a thought": {"type": "thinking_delta", "thinking": TWIGS},
    "a signature": {"type": "signature_delta", "signature": TWIGS},
    "input": {"type": "input_json_delta", "partial_json": TWIGS},
    "a citation": {"type": "citations_delta", "citation": {"cited_text": TWIGS}},
}


@pytest.mark.parametrize("delta", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_answer_is_cut_at_the_limit(delta: dict[str, Any]) -> None:
    parser = MessagesParser(tuple(TOOLS.values()))
    parser.feed(json.dumps(event) for event in block_events(0, {"text": ["Now. "]}))
    event = json.dumps({"type": "content_block_delta", "index": 1, "delta": delta})
    events = ([event.replace("twig 7 ", f"twig {number} ")] for number in range(2000))
    with pytest.raises(AnswerTooLong, match="cut off after 4,000,000 characters"):
        collections.deque(map(parser.feed, events))
    parser.flush()
    shown = parser.partial()
    assert shown.text.startswith("Now. ")
    assert len(shown.text) + len(shown.thought) <= MAX_CHARS
    with pytest.raises(AnswerTooLong):
        parser.finish()


def test_endless_blocks_of_an_unknown_kind_are_cut_at_the_limit() -> None:
    parser = MessagesParser()
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "note", "text": TWIGS}}
    events = ([json.dumps({**start, "index": number})] for number in range(1000))
    with pytest.raises(AnswerTooLong):
        collections.deque(map(parser.feed, events))


def test_endless_empty_blocks_need_little_memory_and_the_text_after_them_arrives() -> None:
    parser = MessagesParser()
    for number in range(30_000):
        block = {"type": "text", "text": ""}
        parser.feed([json.dumps({"type": "content_block_start", "index": number, "content_block": block})])
    parser.feed([json.dumps(event) for event in block_events(30_000, {"text": ["A"]})])
    parser.feed(['{"type":"message_stop"}'])
    assert parser.finish().text == "A"
    assert len(parser._blocks) <= 10_000


@pytest.mark.parametrize("kind", ["text", "thinking"])
def test_an_answer_that_repeats_one_passage_is_cut_off_soon(kind: str) -> None:
    parser = MessagesParser()
    events = [json.dumps({"type": "content_block_delta", "index": 0, "delta": {"type": f"{kind}_delta", kind: "ab "}})]
    with pytest.raises(AnswerTooLong, match="repeat"):
        collections.deque(map(parser.feed, itertools.repeat(events, 30_000)))
    parser.flush()
    shown = parser.partial().text + parser.partial().thought
    assert LOOP_CHARS <= len(shown) <= LOOP_CHARS + 5_000


def test_endless_tool_calls_are_cut_at_the_limit() -> None:
    parser = MessagesParser(tuple(TOOLS.values()))
    blocks = (
        [json.dumps(event) for event in block_events(number, {"call": "shell", "id": f"t{number}", "json": ["{}"]})]
        for number in range(1100)
    )
    with pytest.raises(AnswerTooLong, match="1,000 tool calls"):
        collections.deque(map(parser.feed, blocks))


@given(
    event=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(KINDS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        max_leaves=25,
    ),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=examples(40))
def test_an_event_of_any_shape_raises_nothing_but_a_model_error(event: object, kind: str) -> None:
    events = [
        {"type": kind, "index": event, "delta": event, "content_block": event, "message": event, "usage": event},
        {"type": "content_block_start", "index": 0, "content_block": {"type": kind, "text": event, "input": event}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": kind, "text": event, "partial_json": event}},
        {"type": "content_block_delta", "index": 0, "delta": event},
        event,
        {"type": "message_delta", "delta": {"stop_reason": event}, "usage": event},
    ]
    outcome_of(Fixture(name="", stream=sse(*events), tools=tuple(TOOLS.values()), expect={}), [sse(*events)])


@pytest.mark.long
def test_signatures_after_many_blocks_of_text_are_read_in_linear_time() -> None:
    parser, numbers = MessagesParser(), range(110_000)
    signed = {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "x"}}
    for number in numbers:
        text = {"type": "text", "text": f"twig {number} "}
        parser.feed([json.dumps({"type": "content_block_start", "index": 0, "content_block": text})])
        if number >= 10_000:
            parser.feed([json.dumps(signed)])
    parser.feed(['{"type":"message_stop"}'])
    assert parser.finish().text.replace("\n", "") == "".join(f"twig {number} " for number in numbers)


@pytest.mark.long
def test_blocks_in_many_pieces_are_joined_in_linear_time() -> None:
    parser, pieces = MessagesParser(), range(50_000)
    for number in pieces:
        delta = {"type": "thinking_delta", "thinking": f"twig {number} "}
        parser.feed([json.dumps({"type": "content_block_delta", "index": 0, "delta": delta})])
    parser.feed(json.dumps(event) for event in block_events(1, {"text": ["A"]}))
    cite = {"type": "content_block_delta", "index": 1, "delta": {"type": "citations_delta", "citation": {}}}
    parser.feed([json.dumps(cite)] * 400_000)
    for number in pieces:
        delta = {"type": "thinking_delta", "thinking": f"leaf {number} ", "signature": "x"}
        parser.feed([json.dumps({"type": "content_block_delta", "index": 2, "delta": delta})])
    parser.feed(['{"type":"message_stop"}'])
    thought = "".join(f"twig {number} " for number in pieces)
    assert items_in(parser.finish())[0] == {"type": "thinking", "thinking": thought}
