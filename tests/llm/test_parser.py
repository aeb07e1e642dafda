"""Tests of the parser and the decoder over every fixture, whole and in any split."""

from __future__ import annotations

import collections
import itertools
import json
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.errors import AnswerTooLong, ProtocolError
from crow.domain.messages import Answer, ToolCall, Usage
from crow.llm import TextDelta, ThoughtDelta
from crow.llm.chat.parser import ChatParser
from crow.llm.parser import LOOP_CHARS, MAX_CHARS
from crow.llm.reasoning import ThinkSplitter
from crow.llm.tool_calls import new_call_id
from tests.llm.streams import FIXTURES, TOOLS, Fixture, Outcome, outcome_of
from tests.support.amounts import examples

KEYS = (
    *("choices", "delta", "message", "content", "tool_calls", "function", "name", "arguments", "id", "index", "error"),
    *("finish_reason", "usage", "prompt_tokens", "prompt_tokens_details", "cached_tokens", "reasoning", "text", "type"),
    *("reasoning_details", "function_call", "refusal", "x_groq", "code", "metadata"),
)


def plain(outcome: Outcome) -> tuple[Answer | None, type[object], str, str, str]:
    return outcome.answer, type(outcome.error), str(outcome.error), outcome.text, outcome.thought


def described(call: ToolCall, expected: dict[str, Any]) -> dict[str, Any]:
    """The members of a call that the fixture mentions."""
    fault = expected.get("fault")
    said = call.fault if fault is None or call.fault is None or fault not in call.fault else fault
    is_exact = call.fault is None or call.raw is not None
    assert is_exact
    return {
        "id": call.id,
        "name": call.name,
        "arguments": json.loads(call.arguments),
        **({"fault": said} if fault is not None or said is not None else {}),
        **({"extra": call.extra} if call.extra else {}),
    }


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
    wanted = {key: value for key, value in expect.items() if key not in {"calls", "usage"}}
    usage = Usage(**expect["usage"]) if "usage" in expect else None
    assert answer == Answer(calls=answer.calls, usage=usage, **wanted)


def check_splits(fixture: Fixture) -> None:
    stream = fixture.stream
    whole = plain(outcome_of(fixture, [stream]))
    if len(stream) < 20_000:
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


@given(
    answer=st.text(alphabet="<>/think \n`ab[THINK]", max_size=40),
    opening=st.sampled_from(["", "<think>", "\n<think>\n", "[THINK]", "<thinking>"]),
    cuts=st.lists(st.integers(0, 60), max_size=12),
)
@settings(max_examples=examples(20))
def test_any_split_of_the_content_gives_the_same_thought_and_text(answer: str, opening: str, cuts: list[int]) -> None:
    content = opening + answer

    def separated(pieces: list[str]) -> tuple[str, str]:
        splitter = ThinkSplitter()
        parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
        return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)

    at = sorted(min(cut, len(content)) for cut in cuts)
    pieces = [content[start:end] for start, end in zip([0, *at], [*at, len(content)], strict=True)]
    assert separated(pieces) == separated([content]) == separated(list(content))


@given(data=st.text(max_size=200))
@settings(max_examples=examples(20))
def test_any_split_of_arguments_gives_the_same_object(data: str) -> None:
    wanted = {"path": data, "content": data[::-1]}
    text = json.dumps(wanted, ensure_ascii=bool(len(data) % 2))
    parser = ChatParser(tuple(TOOLS.values()))
    size = max(1, len(data) % 7)
    for at in range(0, len(text), size):
        fragment = {"index": 0, "id": "a", "function": {"name": "write_file", "arguments": text[at : at + size]}}
        parser.feed([json.dumps({"choices": [{"delta": {"tool_calls": [fragment]}}]})])
    parser.feed(["[DONE]"])
    (call,) = parser.finish().calls
    assert (json.loads(call.arguments), call.fault) == (json.loads(json.dumps(wanted)), None)


def test_the_first_piece_is_shown_at_once() -> None:
    parser = ChatParser()
    assert parser.feed(['{"choices":[{"delta":{"content":"Hi"}}]}']) == [TextDelta(text="Hi")]
    assert parser.feed(['{"choices":[{"delta":{"content":"<think>"}}]}']) == [TextDelta(text="<think>")]


def test_thoughts_come_before_the_text_of_the_same_delta() -> None:
    parser = ChatParser()
    deltas = parser.feed(['{"choices":[{"delta":{"content":"A","reasoning_content":"T"}}]}'])
    assert deltas == [ThoughtDelta(text="T"), TextDelta(text="A")]


def test_a_partial_answer_has_no_calls_and_is_interrupted() -> None:
    parser = ChatParser(tuple(TOOLS.values()))
    parser.feed(['{"choices":[{"delta":{"content":"Now","tool_calls":[{"id":"a","function":{"name":"shell"}}]}}]}'])
    assert parser.partial() == Answer(text="Now", finish="interrupted")


TWIGS = "".join(f"twig {number} " for number in range(600))
"""Longer than a passage whose repetition is noticed."""

ENDLESS = {
    "text": {"content": TWIGS},
    "a thought in its own field": {"reasoning_content": TWIGS},
    "a thought in tags": {"content": "<think>" + TWIGS},
    "details": {"reasoning_details": [{"type": "reasoning.encrypted", "index": 0, "data": TWIGS}]},
    "arguments": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "shell", "arguments": TWIGS}}]},
    "a call with ever new members": {"tool_calls": [{"index": 0, "id": "a", "extra": TWIGS}]},
    "a call in text": {"content": '<tool_call>{"name": "shell", "arguments": {"command": "' + TWIGS},
    "an old call": {"function_call": {"name": "shell", "arguments": TWIGS}},
}


@pytest.mark.parametrize("delta", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_answer_is_cut_at_the_limit(delta: dict[str, Any]) -> None:
    parser = ChatParser(tuple(TOOLS.values()))
    parser.feed([json.dumps({"choices": [{"delta": {"content": "Now. "}}]})])
    event = json.dumps({"choices": [{"delta": delta}]})
    with pytest.raises(AnswerTooLong, match="cut off after 4,000,000 characters"):
        collections.deque(map(parser.feed, itertools.repeat([event], 1000)))
    parser.flush()
    shown = parser.partial()
    assert shown.text.startswith("Now. ")
    assert len(shown.text) + len(shown.thought) <= MAX_CHARS
    with pytest.raises(AnswerTooLong):
        parser.finish()


@pytest.mark.parametrize(
    ("member", "what"), [("content", "answer"), ("reasoning_content", "reasoning")], ids=["text", "thought"]
)
@pytest.mark.parametrize("passage", ["\n", "twigs ", "Wait, twigs break. " * 2, "x".join(TWIGS)[:2000]])
def test_an_answer_that_repeats_one_passage_is_cut_off_soon(passage: str, member: str, what: str) -> None:
    parser = ChatParser(tuple(TOOLS.values()))
    parser.feed([json.dumps({"choices": [{"delta": {member: "Now. "}}]})])
    events = [json.dumps({"choices": [{"delta": {member: passage}}]})]
    with pytest.raises(AnswerTooLong, match=f"The {what} from .* was cut off, because its last 16,384 characters"):
        collections.deque(map(parser.feed, itertools.repeat(events, 30_000 // len(passage))))
    parser.flush()
    shown = parser.partial().text + parser.partial().thought
    assert (shown[:5], shown[5:].replace(passage, "")) == ("Now. ", "")
    assert LOOP_CHARS <= len(shown) <= LOOP_CHARS + 4_096 + len(passage)


def test_repetition_with_differences_or_in_a_complete_answer_is_no_loop() -> None:
    numbered, parser = "".join(f"| row {number} | ok |\n" for number in range(5_000)), ChatParser()
    parser.feed(
        [json.dumps({"choices": [{"delta": {"content": line}}]}) for line in numbered.splitlines(keepends=True)]
    )
    parser.feed(['{"choices":[{"delta":{},"finish_reason":"stop"}]}'])
    assert parser.finish().text == numbered
    parser = ChatParser()
    parser.feed([json.dumps({"choices": [{"message": {"content": "-" * 50_000}, "finish_reason": "stop"}]})])
    assert parser.finish().text == "-" * 50_000


def test_endless_tool_calls_are_cut_at_the_limit() -> None:
    parser = ChatParser(tuple(TOOLS.values()))
    parser.feed([json.dumps({"choices": [{"delta": {"content": "Now. "}}]})])

    def event(number: int) -> str:
        call = {"index": number, "id": f"c{number}", "function": {"name": "shell", "arguments": "{}"}}
        return json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]})

    for number in range(1000):
        parser.feed([event(number)])
    with pytest.raises(AnswerTooLong, match="cut off after 1,000 tool calls; the model may be repeating itself"):
        parser.feed([event(1000)])
    assert parser.partial().text == "Now. "
    with pytest.raises(AnswerTooLong):
        parser.finish()


@pytest.mark.long
def test_fragments_with_a_new_id_each_are_one_call() -> None:
    parser = ChatParser(tuple(TOOLS.values()))
    text = json.dumps({"path": "x", "content": "The nest is built of twigs. " * 16_000})
    fragments = [
        {"id": f"id{at}", "function": {"arguments": text[at : at + 4], **({} if at else {"name": "write_file"})}}
        for at in range(0, len(text), 4)
    ]
    for fragment in fragments:
        parser.feed([json.dumps({"choices": [{"delta": {"tool_calls": [fragment]}}]})])
    parser.feed(["[DONE]"])
    (call,) = parser.finish().calls
    assert json.loads(call.arguments) == json.loads(text)


@pytest.mark.long
def test_reasoning_details_in_many_pieces_are_joined_in_linear_time() -> None:
    parser, pieces = ChatParser(), range(50_000)
    for number in pieces:
        detail = {"type": "reasoning.text", "index": 0, "text": f"twig {number} "}
        parser.feed([json.dumps({"choices": [{"delta": {"reasoning_details": [detail]}}]})])
    parser.feed(['{"choices":[{"delta":{"content":"A"},"finish_reason":"stop"}]}'])
    text = "".join(f"twig {number} " for number in pieces)
    joined = {"type": "reasoning.text", "index": 0, "text": text}
    assert parser.finish().opaque == {"reasoning_details": [joined]}


def test_new_call_ids_are_nine_letters_or_digits() -> None:
    ids = {new_call_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in ids)


@given(
    chunk=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(KEYS),
                inner,
                max_size=5,
            )
        ),
        max_leaves=25,
    )
)
@settings(max_examples=examples(20))
def test_a_chunk_of_any_shape_raises_nothing_but_a_model_error(chunk: object) -> None:
    fixture = Fixture(
        name="",
        stream=f"data: {json.dumps({'choices': [{'delta': chunk, 'message': chunk}], 'usage': chunk})}\n\n"
        f"data: {json.dumps(chunk)}\n\n".encode(),
        tools=tuple(TOOLS.values()),
        expect={},
    )
    outcome = outcome_of(fixture, [fixture.stream])
    if outcome.answer is not None:
        for call in outcome.answer.calls:
            assert isinstance(json.loads(call.arguments), dict)
            assert call.name
            assert call.id


@pytest.mark.parametrize(
    "filler", [" ", "\n", "<tool_call>", "<function=shell>", "[TOOL_CALLS]a", "<arg_key>", "```\n"]
)
def test_a_repetitive_answer_is_read_in_linear_time(filler: str) -> None:
    """Quadratic time would take minutes here."""
    text = "wait " + filler * (100_000 // len(filler)) + "."
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    parser = ChatParser(tuple(TOOLS.values()))
    parser.feed([json.dumps(chunk)])
    assert parser.finish().text == text


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ('{{"path": {0}}}', "a number with too many digits"),
        ("{0}", "a number with too many digits"),
        ('```json\n{{"path": [{0}]}}\n```', "a number with too many digits"),
        ("{{'path': {0}}}", "not valid JSON"),
    ],
)
def test_arguments_with_too_many_digits_are_a_fault_that_the_model_is_told(arguments: str, fault: str) -> None:
    function = {"name": "read_file", "arguments": arguments.format("1" * 5_000)}
    parser = ChatParser(tuple(TOOLS.values()))
    delta = {"tool_calls": [{"index": 0, "id": "c1", "function": function}]}
    parser.feed([json.dumps({"choices": [{"delta": delta, "finish_reason": "tool_calls"}]}), "[DONE]"])
    (call,) = parser.finish().calls
    assert fault in str(call.fault)
    assert call.raw == function["arguments"]


@pytest.mark.parametrize("depth", [200, 600, 900])
def test_parts_that_nest_deeply_are_read_or_refused(depth: int) -> None:
    nested = "[" * depth + '"A"' + "]" * depth
    parser = ChatParser()
    with suppress(ProtocolError):
        deltas = parser.feed([f'{{"choices":[{{"delta":{{"content":{{"type":"text","text":{nested}}}}}}}]}}'])
        assert deltas == [TextDelta(text="A")]
