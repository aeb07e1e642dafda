"""Tests of how requests are encoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.messages import (
    AssistantMessage,
    Image,
    Link,
    Message,
    Resource,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from crow.llm import Request
from crow.llm.chat.encode import ChatEncoder as Encoder
from crow.llm.dialect import Dialect
from tests.support.amounts import examples

HERE = "http://here/v1 m"
SYSTEM = SystemMessage(text="Be brief.")
PNG = Image(data="iVBORw0K", mime_type="image/png")
CALL = ToolCall(id="c1", name="read_file", arguments='{"path": "x"}')


def user(*texts: str) -> UserMessage:
    return UserMessage(parts=tuple(Text(text=text) for text in texts))


def sent(*messages: Message, dialect: Dialect | None = None) -> list[Any]:
    encoded = Encoder().messages(messages, endpoint=HERE, dialect=dialect or Dialect())
    decoded: list[Any] = json.loads(b"[" + b",".join(encoded) + b"]")
    return decoded


def test_the_parts_of_a_prompt_keep_their_order() -> None:
    link = Link(uri="file:///w/a.py", name="a.py")
    resource = Resource(uri="file:///w/b.py", text="x = 1")
    message = UserMessage(
        parts=(Text(text="See "), link, Text(text=" and"), resource, Text(text="Why?"), Text(text="P"))
    )
    assert sent(message) == [
        {
            "role": "user",
            "content": 'See [a.py](file:///w/a.py) and\n<resource uri="file:///w/b.py">\nx = 1\n</resource>\nWhy?\n\nP',
        }
    ]


def test_images_are_separate_parts() -> None:
    message = UserMessage(parts=(Text(text="What is "), PNG, Text(text="this?")))
    assert sent(message) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0K"}},
                {"type": "text", "text": "this?"},
            ],
        }
    ]


def test_an_image_is_described_to_a_model_that_takes_none() -> None:
    (message,) = sent(UserMessage(parts=(Text(text="What?"), PNG)), dialect=Dialect(takes_images=False))
    assert message["content"] == "What?\n[An image (image/png, 1 KB) was left out: this model takes no images.]"


def test_calls_and_results_are_encoded() -> None:
    assistant = AssistantMessage(text="", calls=(CALL,), endpoint=HERE)
    assert sent(assistant, ToolMessage(call_id="c1", text="")) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "x"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "(no output)"},
    ]


@pytest.mark.parametrize(("empty", "expected"), [("omitted", {}), ("blank", {"content": " "})])
def test_empty_content_beside_calls_follows_the_dialect(empty: Any, expected: dict[str, str]) -> None:
    (message,) = sent(AssistantMessage(text="", calls=(CALL,)), dialect=Dialect(empty_content=empty))
    assert {key: message[key] for key in message if key == "content"} == expected


def test_images_of_results_follow_their_block_and_stay_apart_from_the_prompt() -> None:
    first, second = ToolMessage(call_id="c1", text="a", images=(PNG,)), ToolMessage(call_id="c2", text="b")
    roles = [message["role"] for message in sent(first, second, user("Next"))]
    assert roles == ["tool", "tool", "user", "assistant", "user"]
    blind = sent(first, second, user("Next"), dialect=Dialect(takes_images=False))
    assert [message["role"] for message in blind] == ["tool", "tool", "user"]
    assert "takes no images" in blind[0]["content"]


def test_reasoning_goes_back_in_its_field_to_its_own_endpoint_only() -> None:
    here = AssistantMessage(
        text="A",
        thought="T",
        reasoning_field="reasoning",
        endpoint=HERE,
        opaque={"reasoning_details": [1], "role": "x"},
    )
    there = AssistantMessage(text="A", thought="T", reasoning_field="reasoning", endpoint="x", opaque={"o": 1})
    assert sent(here, there) == [
        {"role": "assistant", "content": "A", "reasoning": "T", "reasoning_details": [1]},
        {"role": "assistant", "content": "A"},
    ]
    assert sent(here, dialect=Dialect(reasoning="none", opaque=False)) == [{"role": "assistant", "content": "A"}]


def test_required_reasoning_is_sent_even_if_empty() -> None:
    (message,) = sent(AssistantMessage(text="A", endpoint=HERE), dialect=Dialect(reasoning="always"))
    assert message == {"role": "assistant", "content": "A", "reasoning_content": ""}


def test_reasoning_from_the_content_does_not_go_back() -> None:
    for field in ("content", "role"):  # the second only in a damaged log
        message = AssistantMessage(text="A", thought="T", reasoning_field=field, endpoint=HERE)
        assert sent(message) == [{"role": "assistant", "content": "A"}]


def test_unknown_keys_of_a_call_go_back_to_their_own_endpoint_only() -> None:
    extra = {"extra_content": {"google": {"thought_signature": "s"}}, "function": {"note": 1, "name": "evil"}}
    call = ToolCall(id="c1", name="read_file", arguments="{}", extra=extra)
    here, there = sent(
        AssistantMessage(text="", calls=(call,), endpoint=HERE), AssistantMessage(text="", calls=(call,), endpoint="x")
    )
    function = {"name": "read_file", "arguments": "{}"}
    assert here["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {**function, "note": 1},
            "extra_content": {"google": {"thought_signature": "s"}},
        }
    ]
    assert there["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]


def test_a_refused_system_message_is_sent_as_a_user_message() -> None:
    assert sent(SYSTEM, user("Hi"), dialect=Dialect(system_role="user")) == [
        {"role": "user", "content": "Be brief."},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "Hi"},
    ]


def test_lone_surrogates_are_replaced() -> None:
    assert sent(user("a\ud83d\ude00b\ud83dc")) == [{"role": "user", "content": "a😀b�c"}]


def body(request: Request, dialect: Dialect, *, limit: int | None = None) -> Any:
    return json.loads(Encoder().body(request, model="m", endpoint=HERE, dialect=dialect, limit=limit))


def test_the_body_contains_only_what_the_dialect_allows() -> None:
    tool = ToolSpec(name="t", description="d", input_schema={"type": "object"})
    request = Request(messages=(SYSTEM,), tools=(tool,), tool_choice="none", cache_key="k")
    messages = [{"role": "system", "content": "Be brief."}]
    tools = [{"type": "function", "function": {"name": "t", "description": "d", "parameters": {"type": "object"}}}]
    bare = Dialect(limit_field=None, usage_option=False, tool_choice=False)
    assert body(request, bare, limit=5) == {"model": "m", "stream": True, "tools": tools, "messages": messages}
    rich = Dialect(limit_field="max_completion_tokens", cache="key", parallel_calls=False)
    assert body(request, rich, limit=5) == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 5,
        "prompt_cache_key": "k",
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "tools": tools,
        "messages": messages,
    }


TURN = st.tuples(st.text(max_size=5), st.integers(0, 3), st.booleans(), st.text(max_size=5))


@given(turns=st.lists(TURN, max_size=6), takes_images=st.booleans(), system_role=st.sampled_from(["system", "user"]))
@settings(max_examples=examples(20))
def test_the_messages_of_one_request_are_a_prefix_of_the_next(
    turns: list[tuple[str, int, bool, str]], takes_images: bool, system_role: Any
) -> None:
    dialect = Dialect(takes_images=takes_images, system_role=system_role)
    kept, messages, before = Encoder(), [SYSTEM], list[bytes]()
    history: list[Message] = list(messages)

    def ask() -> None:
        nonlocal before
        now = kept.messages(tuple(history), endpoint=HERE, dialect=dialect)
        assert now[: len(before)] == before
        assert now == Encoder().messages(tuple(history), endpoint=HERE, dialect=dialect)
        before = now

    for words, count, has_image, answer in turns:
        history.append(user(words))
        ask()
        calls = tuple(ToolCall(id=f"c{len(history)}{n}", name="t", arguments="{}") for n in range(count))
        history.append(AssistantMessage(text=answer, calls=calls, endpoint=HERE))
        images = (PNG,) if has_image else ()
        history.extend(ToolMessage(call_id=call.id, text=answer, images=images) for call in calls)
        if calls:
            ask()


def test_equal_messages_are_not_encoded_again() -> None:
    encoder = Encoder()
    first = encoder.messages((SYSTEM, user("a")), endpoint=HERE, dialect=Dialect())
    second = encoder.messages((SystemMessage(text="Be brief."), user("a"), user("b")), endpoint=HERE, dialect=Dialect())
    assert [a is b for a, b in zip(first, second, strict=False)] == [True, True]


def test_parallel_calls_are_split_for_an_endpoint_that_accepts_only_one() -> None:
    calls = tuple(ToolCall(id=name, name="read_file", arguments="{}") for name in "abc")
    messages: tuple[Message, ...] = (
        UserMessage(parts=(Text(text="go"),)),
        AssistantMessage(text="I look.", calls=calls),
        *(ToolMessage(call_id=call.id, text=f"result {call.id}") for call in calls),
    )
    dialect = Dialect().refusing("parallel_calls")
    sent = [json.loads(each) for each in Encoder().messages(messages, endpoint="e", dialect=dialect)]
    assert [(each["role"], each["content"], [call["id"] for call in each.get("tool_calls", ())]) for each in sent] == [
        ("user", "go", []),
        ("assistant", "I look.", ["a"]),
        ("tool", "result a", []),
        ("assistant", None, ["b"]),
        ("tool", "result b", []),
        ("assistant", None, ["c"]),
        ("tool", "result c", []),
    ]
