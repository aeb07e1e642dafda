"""Tests of the Responses parser over every fixture, whole and in any split."""

from __future__ import annotations

import collections
import itertools
import json
import random
import re
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.errors import AnswerTooLong
from crow.domain.messages import Answer, Usage
from crow.llm import TextDelta
from crow.llm.items import ITEMS
from crow.llm.parser import MAX_CHARS
from crow.llm.responses.parser import ResponsesParser
from tests.llm.responses.streams import FIXTURES, TOOLS
from tests.llm.streams import Fixture, Outcome, outcome_of
from tests.llm.test_parser import described, plain
from tests.support.amounts import examples

COUNTED = {
    "input_tokens": 10,
    "output_tokens": 5,
    "cached_tokens": 4,
    "reasoning_tokens": 2,
    "cache_write_tokens": 0,
}
KEYS = (
    *("type", "delta", "item", "item_id", "output_index", "content_index", "summary_index", "part", "text", "summary"),
    *("arguments", "input", "name", "call_id", "id", "response", "output", "status", "usage", "error", "content"),
    *("encrypted_content", "incomplete_details", "reason", "sequence_number", "refusal", "role", "message", "code"),
)


def read(fixture: Fixture, pieces: list[bytes]) -> Outcome:
    return outcome_of(fixture, pieces, ResponsesParser)


def items_of(answer: Answer, wanted: Sequence[object]) -> list[object]:
    """The items of an answer as the fixture writes them: whole, or in short."""
    stored: Any = answer.opaque.get(ITEMS, [])
    return [
        _described(each["data"], [each["call"]] if "call" in each else [], in_short=not isinstance(want, dict))
        for each, want in itertools.zip_longest(stored, wanted[: len(stored)])
    ]


def _described(data: dict[str, Any], call: list[int], *, in_short: bool) -> object:
    return [data["type"], data.get("id"), *call] if in_short else {**data, **({"call": call[0]} if call else {})}


def test_the_fixtures_are_many_and_have_names_of_their_own() -> None:
    names = [fixture.name for fixture in FIXTURES]
    assert len(names) >= 120
    assert len(set(names)) == len(names)


def check_whole(fixture: Fixture) -> None:
    outcome = read(fixture, [fixture.stream])
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
    assert items_of(answer, expect.get("items", [])) == expect.get("items", [])
    counted = expect.get("usage", COUNTED)
    usage = None if counted is None else Usage(**counted)
    wanted = {key: value for key, value in expect.items() if key not in {"calls", "usage", "items"}}
    assert answer == Answer(calls=answer.calls, usage=usage, opaque=answer.opaque, wire="responses", **wanted)


def check_splits(fixture: Fixture) -> None:
    stream = fixture.stream
    whole = plain(read(fixture, [stream]))
    assert plain(read(fixture, [stream[at : at + 1] for at in range(len(stream))])) == whole
    chance = random.Random(len(stream))
    for _ in range(examples(2)):
        cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(1, 30)))
        pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        assert plain(read(fixture, pieces)) == whole


def check_cuts(fixture: Fixture) -> None:
    chance = random.Random(len(fixture.stream))
    for _ in range(examples(2)):
        cut = fixture.stream[: chance.randrange(len(fixture.stream))]
        outcome = read(fixture, [cut])
        is_ended = any(
            word in cut for word in (b"response.completed", b"response.incomplete", b"response.done", b"[DONE]")
        )
        assert outcome.error is not None or is_ended
        assert (outcome.answer is None) == (outcome.error is not None)


@pytest.mark.long
@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)
def test_a_stream_gives_what_its_fixture_expects_in_any_split_and_runs_no_call_if_cut(fixture: Fixture) -> None:
    check_whole(fixture)
    check_splits(fixture)
    check_cuts(fixture)


def test_an_opaque_item_is_kept_to_the_last_character() -> None:
    item = {
        "id": "rs_1",
        "type": "reasoning",
        "encrypted_content": "gAAAA\u00e9==" * 100,
        "summary": [{"type": "summary_text", "text": "Hm"}],
        "new_member": {"b": [1, 2.5, None], "a": ""},
    }
    parser = ResponsesParser()
    parser.feed([json.dumps({"type": "response.output_item.done", "output_index": 0, "item": item})])
    parser.feed([json.dumps({"type": "response.output_text.delta", "item_id": "m", "output_index": 1, "delta": "Hi"})])
    parser.feed([json.dumps({"type": "response.completed", "response": {"status": "completed"}})])
    assert json.dumps(parser.finish().opaque[ITEMS]) == json.dumps([{"data": item}])


@pytest.mark.parametrize("depth", [100, 800, 2_000])
def test_items_that_nest_deeply_are_kept_or_refused(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    item = f'{{"type":"reasoning","encrypted_content":"x","summary":[],"deep":{deep}}}'
    event = f'{{"type":"response.output_item.done","output_index":0,"sequence_number":1,"item":{item}}}'
    text = json.dumps({"type": "response.output_text.delta", "item_id": "m", "output_index": 1, "delta": "Hi"})
    end = json.dumps({"type": "response.completed", "response": {"status": "completed"}})
    stream = "".join(f"data: {each}\n\n" for each in (event, event, text, end)).encode()
    outcome = read(Fixture(name="deep", stream=stream, tools=(), expect={}), [stream])
    assert (outcome.error is None) == (depth < 1_000)


@pytest.mark.parametrize(
    "event",
    [
        {"type": []},
        {"type": {}},
        {"type": "response.content_part.done", "part": {"type": []}},
        {"type": "response.output_item.done", "item": {"type": "message", "content": [{"type": {}}], "status": []}},
        {"type": "response.completed", "response": {"status": [], "output": [{"type": []}, {"type": "message"}]}},
    ],
)
def test_members_of_a_wrong_type_are_skipped(event: dict[str, Any]) -> None:
    parser = ResponsesParser()
    parser.feed([json.dumps(event)])
    parser.feed([json.dumps({"type": "response.output_text.delta", "item_id": "m", "output_index": 1, "delta": "Hi"})])
    assert parser.partial().text in {"Hi", ""}


def test_the_first_piece_is_shown_at_once() -> None:
    event = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "content_index": 0, "delta": "Hi"}
    assert ResponsesParser().feed([json.dumps(event)]) == [TextDelta(text="Hi")]


TWIGS = "".join(f"twig {number} " for number in range(600))
WHERE = {"item_id": "x", "output_index": 0}
ENDLESS = {
    "text": {"type": "response.output_text.delta", **WHERE, "content_index": 0, "delta": TWIGS},
    "a refusal": {"type": "response.refusal.delta", **WHERE, "content_index": 0, "delta": TWIGS},
    "a summary": {"type": "response.reasoning_summary_text.delta", **WHERE, "summary_index": 0, "delta": TWIGS},
    "arguments": {"type": "response.function_call_arguments.delta", **WHERE, "delta": TWIGS},
    "input": {"type": "response.custom_tool_call_input.delta", **WHERE, "delta": TWIGS},
}


@pytest.mark.parametrize("event", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_answer_is_cut_at_the_limit(event: dict[str, Any]) -> None:
    parser = ResponsesParser(tuple(TOOLS.values()))
    with pytest.raises(AnswerTooLong, match="cut off after 4,000,000 characters"):
        collections.deque(map(parser.feed, itertools.repeat([json.dumps(event)], 1000)))
    parser.flush()
    assert len(parser.partial().text) + len(parser.partial().thought) <= MAX_CHARS
    with pytest.raises(AnswerTooLong):
        parser.finish()


def ended(index: int, item: dict[str, Any]) -> list[str]:
    return [json.dumps({"type": "response.output_item.done", "output_index": index, "item": item})]


def test_endless_items_are_cut_at_the_limit() -> None:
    secret = "s" * 10_000
    items = ({"id": f"rs_{n}", "type": "reasoning", "encrypted_content": secret, "summary": []} for n in range(1000))
    parser = ResponsesParser()
    with pytest.raises(AnswerTooLong, match="cut off after 4,000,000 characters"):
        collections.deque(map(parser.feed, map(ended, itertools.count(), items)))


def test_endless_calls_are_cut_at_the_limit() -> None:
    parser = ResponsesParser(tuple(TOOLS.values()))
    call = {"type": "function_call", "name": "shell", "arguments": "{}"}
    items = ({**call, "id": f"fc_{n}", "call_id": f"c{n}"} for n in range(2000))
    with pytest.raises(AnswerTooLong, match="cut off after 1,000 tool calls"):
        collections.deque(map(parser.feed, map(ended, itertools.count(), items)))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "message", "function_call", "reasoning"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)
KINDS = sorted(
    {
        kind.decode()
        for fixture in FIXTURES
        for kind in re.findall(rb'^data: {"type": ?"([\w.]+)"', fixture.stream, re.M)
    }
)


@given(
    events=st.lists(
        st.builds(
            lambda kind, members: {**members, "type": kind},
            st.sampled_from(KINDS) | JSON,
            st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6),
        ),
        max_size=6,
    )
)
@settings(max_examples=examples(40))
def test_events_of_any_shape_give_an_answer_or_an_error(events: list[dict[str, Any]]) -> None:
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    outcome = read(Fixture(name="any", stream=stream, tools=tuple(TOOLS.values()), expect={}), [stream])
    assert (outcome.answer is None) == (outcome.error is not None)


def test_events_with_one_number_in_one_piece_of_data_are_all_read() -> None:
    parser, kind = ResponsesParser(), "response.output_text.delta"
    events = [json.dumps({"type": kind, "sequence_number": 0, "item_id": "m", "delta": text}) for text in ("A", "B")]
    parser.feed(["\n".join(events)])
    assert parser.partial().text == "AB"


def test_large_events_of_unknown_kinds_are_not_kept() -> None:
    parser = ResponsesParser()
    tracemalloc.start()
    try:
        for number in range(50):
            event = {"type": "response.unknown", "sequence_number": number, "more": [f"{number}"] * 100_000}
            parser.feed([json.dumps(event)])
        assert tracemalloc.get_traced_memory()[0] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_items_that_no_event_has_announced_are_read_in_linear_time() -> None:
    parser, numbers = ResponsesParser(), range(40_000)
    for kind in ("output_item.added", "output_item.done"):
        for number in numbers:
            item = {"type": "reasoning", "id": f"{kind}{number}", "summary": []}
            parser.feed([json.dumps({"type": f"response.{kind}", "item": item})])
    parser.feed([json.dumps({"type": "response.output_text.delta", "delta": "A"})])
    parser.feed([json.dumps({"type": "response.completed", "response": {}})])
    assert parser.finish().text == "A"
