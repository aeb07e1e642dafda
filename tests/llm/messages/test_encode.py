"""Tests of how requests of the Messages API are encoded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crow.domain.messages import (
    AssistantMessage,
    Image,
    Link,
    Message,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)
from crow.llm import Request, ThoughtLevel
from crow.llm.dialect import Dialect
from crow.llm.items import Item, stored_items
from crow.llm.messages import schema
from crow.llm.messages.claude import claude
from crow.llm.messages.encode import MessagesEncoder as Encoder
from tests.support.amounts import examples
from tests.support.messages_endpoint import shape_faults

HERE = "https://api.anthropic.com/v1 claude-opus-5-5"
DIALECT = Dialect(wires=("messages",))
SYSTEM = SystemMessage(text="Be brief.")
LONG = SystemMessage(text="Be brief. " * 2_000)
TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}})
CALL = ToolCall(id="toolu_1", name="read_file", arguments='{"path": "x"}')
PNG = Image(data="iVBORw0K", mime_type="image/png")
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "Er=="}
HIDDEN = {"type": "redacted_thinking", "data": "Em=="}


def user(*texts: str) -> UserMessage:
    return UserMessage(parts=tuple(Text(text=text) for text in texts))


def own(*items: Item, text: str = "", calls: tuple[ToolCall, ...] = (), **more: Any) -> AssistantMessage:
    """An answer of this endpoint on this wire."""
    opaque = stored_items(items)
    return AssistantMessage(text=text, calls=calls, opaque=opaque, endpoint=HERE, wire="messages", **more)


def body(
    *messages: Message,
    model: str = "claude-opus-5-5",
    dialect: Dialect = DIALECT,
    limit: int | None = None,
    **more: Any,
) -> Any:
    request = Request(messages=messages, **more)
    return json.loads(Encoder().body(request, model=model, endpoint=HERE, dialect=dialect, limit=limit))


def sent(*messages: Message, dialect: Dialect = DIALECT) -> list[Any]:
    encoded = Encoder().messages(messages, endpoint=HERE, dialect=dialect)
    decoded: list[Any] = json.loads(b"[" + b",".join(encoded) + b"]")
    return decoded


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def asks(*blocks: object) -> dict[str, object]:
    return {"role": "user", "content": list(blocks)}


def test_a_request_has_the_members_that_the_api_needs() -> None:
    assert body(SYSTEM, user("Hi"), tools=(TOOL,), limit=100) == {
        "model": "claude-opus-5-5",
        "max_tokens": 100,
        "stream": True,
        "thinking": {"type": "adaptive", "display": "summarized"},
        "tools": [{"name": "read_file", "description": "Read.", "input_schema": TOOL.input_schema}],
        "system": [said("Be brief.")],
        "messages": [asks(said("Hi"))],
    }


def test_results_of_a_step_are_one_message_with_their_images() -> None:
    second = replace(CALL, id="toolu_2")
    step = AssistantMessage(text="Looking.", calls=(CALL, second))
    results = (ToolMessage(call_id="toolu_1", text="twigs"), ToolMessage(call_id="toolu_2", text="", images=(PNG,)))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}
    assert sent(user("Hi"), step, *results, user("Go on.")) == [
        asks(said("Hi")),
        {
            "role": "assistant",
            "content": [
                said("Looking."),
                {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"path": "x"}},
                {"type": "tool_use", "id": "toolu_2", "name": "read_file", "input": {"path": "x"}},
            ],
        },
        asks(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [said("twigs")]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [image]},
        ),
        asks(said("Go on.")),
    ]


def test_a_failed_result_is_marked_unless_it_has_an_image_or_the_endpoint_refuses_the_mark() -> None:
    def result(dialect: Dialect, **more: Any) -> Any:
        step = AssistantMessage(text="", calls=(CALL,))
        failed = ToolMessage(call_id="toolu_1", text="No such file.", is_error=True, **more)
        return sent(user("Hi"), step, failed, dialect=dialect)[-1]["content"][0]

    marking = replace(DIALECT, marks_failures=True)
    assert result(marking) == {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [said("No such file.")],
        "is_error": True,
    }
    assert "is_error" not in result(marking, images=(PNG,))
    assert result(replace(marking, takes_images=False), images=(PNG,))["is_error"] is True
    assert "is_error" not in result(marking.refusing("messages.is_error"))
    assert "is_error" not in result(DIALECT)


def test_a_block_of_text_without_text_is_not_sent() -> None:
    call = Item(data={"type": "tool_use"}, call=0)
    for empty in ({"type": "text"}, {"type": "text", "citations": []}, {"type": "text", "text": " "}):
        step = own(Item(data=THOUGHT), Item(data=empty), call, calls=(CALL,))
        blocks = sent(user("Hi"), step, ToolMessage(call_id="toolu_1", text="twigs"))[1]["content"]
        assert [block["type"] for block in blocks] == ["thinking", "tool_use"]


def test_images_that_the_endpoint_does_not_take_become_texts() -> None:
    svg = Image(data="PHN2Zz4=", mime_type="image/svg+xml")
    (message,) = sent(UserMessage(parts=(Text(text="See"), svg, Link(uri="file:///a", name="a"))))
    jpg = sent(UserMessage(parts=(replace(PNG, mime_type="image/jpg"),)))[0]["content"][0]
    assert jpg["source"]["media_type"] == "image/jpeg"
    assert message["content"][1] == said("[An image was left out: its type image/svg+xml is not supported.]")
    none = replace(DIALECT, left_out=frozenset({"images"}))
    (message, _, result) = sent(
        UserMessage(parts=(PNG,)),
        AssistantMessage(text="", calls=(CALL,)),
        ToolMessage(call_id="toolu_1", text="", images=(PNG,)),
        dialect=none,
    )
    assert "was left out" in message["content"][0]["text"]
    assert "was left out" in result["content"][0]["content"][0]["text"]


def test_blocks_go_back_unchanged_and_in_place() -> None:
    second = replace(CALL, id="toolu_2")
    message = own(
        Item(data=THOUGHT),
        Item(data=HIDDEN),
        Item(data=said("Looking.")),
        Item(data={"type": "tool_use", "caller": {"type": "direct"}}, call=0),
        Item(data={**THOUGHT, "signature": "Es=="}),
        Item(data={"type": "tool_use"}, call=1),
        text="Looking.",
        calls=(CALL, second),
    )
    assert sent(user("Hi"), message)[1]["content"] == [
        THOUGHT,
        HIDDEN,
        said("Looking."),
        {
            "type": "tool_use",
            "caller": {"type": "direct"},
            "id": "toolu_1",
            "name": "read_file",
            "input": {"path": "x"},
        },
        {**THOUGHT, "signature": "Es=="},
        {"type": "tool_use", "id": "toolu_2", "name": "read_file", "input": {"path": "x"}},
    ]


@pytest.mark.parametrize(
    "elsewhere",
    [{"endpoint": "https://api.anthropic.com/v1 claude-sonnet-5"}, {"wire": "chat"}, {"endpoint": "http://other/v1 m"}],
)
def test_blocks_of_another_endpoint_model_or_wire_are_left_out(elsewhere: dict[str, Any]) -> None:
    message = own(Item(data=THOUGHT), Item(data=said("A")), text="A", calls=(CALL,))
    assert sent(user("Hi"), replace(message, **elsewhere))[1]["content"] == [
        said("A"),
        {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"path": "x"}},
    ]


def test_refused_thoughts_are_left_out_before_a_break_or_everywhere() -> None:
    old = own(Item(data=THOUGHT), Item(data=said("A")), text="A", is_before_break=True)
    new = own(Item(data=THOUGHT), Item(data=said("B")), text="B")
    earlier, every = (replace(DIALECT, left_out=frozenset({part})) for part in ("earlier_thoughts", "opaque"))
    assert [message["content"] for message in sent(user("1"), old, user("2"), new)[1::2]] == [
        [THOUGHT, said("A")],
        [THOUGHT, said("B")],
    ]
    assert [message["content"] for message in sent(user("1"), old, user("2"), new, dialect=earlier)[1::2]] == [
        [said("A")],
        [THOUGHT, said("B")],
    ]
    assert [message["content"] for message in sent(user("1"), old, user("2"), new, dialect=every)[1::2]] == [
        [said("A")],
        [said("B")],
    ]


def test_an_answer_never_ends_with_a_thought_and_has_no_blank_text() -> None:
    message = own(Item(data=said("\n\n")), Item(data=THOUGHT), Item(data=said("A")), Item(data=HIDDEN), text="\n\nA")
    assert sent(user("Hi"), message)[1]["content"] == [THOUGHT, said("A"), HIDDEN, said("(empty message)")]
    assert sent(user("Hi"), AssistantMessage(text=""))[1]["content"] == [said("(empty message)")]


def test_a_tool_of_the_server_goes_back_only_with_its_result() -> None:
    use = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
    items = (Item(data=said("Searching.")), Item(data=use), Item(data=found), Item(data={**use, "id": "srv_2"}))
    assert sent(user("Hi"), own(*items, text="Searching."))[1]["content"] == [said("Searching."), use, found]


def test_items_whose_type_or_id_is_damaged_do_not_stop_the_session() -> None:
    found = {"type": "web_search_tool_result", "tool_use_id": [], "content": []}
    opaque = {"items": [{"data": {"x": 1}}, {"data": {"type": []}}, {"data": said("A")}, {"data": found}]}
    message = replace(own(text="A"), opaque=opaque)
    assert sent(user("Hi"), message)[1]["content"] == [said("A"), found]


def test_the_system_prompt_of_an_earlier_request_is_not_sent_again() -> None:
    encoder, requests = Encoder(), (Request(messages=(SYSTEM, user("Hi"))), Request(messages=(user("Hi"),)))
    bodies = [encoder.body(each, model="m", endpoint=HERE, dialect=DIALECT, limit=None) for each in requests]
    assert [json.loads(each).get("system") for each in bodies] == [[said("Be brief.")], None]


def test_arguments_that_json_does_not_have_become_null() -> None:
    call = replace(CALL, arguments='{"a": NaN, "b": [-Infinity]}')
    (block,) = sent(user("Hi"), AssistantMessage(text="", calls=(call,)))[1]["content"]
    assert block["input"] == {"a": None, "b": [None]}


def test_a_damaged_thought_has_the_members_that_the_api_requires() -> None:
    message = own(Item(data={"type": "thinking"}), Item(data=said("A")), text="A")
    assert sent(user("Hi"), message)[1]["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}


def test_a_conversation_begins_and_ends_with_the_user() -> None:
    found = body(AssistantMessage(text="A"))["messages"]
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert [message["role"] for message in body(SYSTEM)["messages"]] == ["user"]


def test_names_and_ids_of_other_providers_are_mended_alike_in_call_and_result() -> None:
    calls = tuple(replace(CALL, id=each, name="a.b") for each in ("functions.x:0", "functions.x/0", "call_1|fc_1"))
    results = (ToolMessage(call_id=call.id, text="ok") for call in calls)
    _, step, answers = sent(user("Hi"), AssistantMessage(text="", calls=calls), *results)
    ids = [block["id"] for block in step["content"]]
    assert ids == [block["tool_use_id"] for block in answers["content"]]
    assert len(set(ids)) == 3
    assert ids[0].startswith("functions_x_0_")
    assert {block["name"] for block in step["content"]} == {"a_b"}


def test_schemas_that_would_fail_the_request_are_mended() -> None:
    spec = ToolSpec(
        name="odd",
        description=" ",
        input_schema={
            "$schema": "http://json-schema.org/draft-04/schema#",
            "properties": {
                "a": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
                "b": {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
                "not allowed": {"type": "string"},
                "id": {"type": "string", "default": {"items": [1]}},
            },
            "required": ["a", "not allowed"],
            "anyOf": [{"properties": {"c": {"type": "string"}}, "required": ["c"]}],
            "allOf": [{"properties": {"d": {}}, "required": ["d"]}],
        },
    )
    assert schema.tool(spec) == {
        "name": "odd",
        "input_schema": {
            "properties": {
                "a": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
                "b": {"type": "integer", "exclusiveMinimum": 1},
                "id": {"type": "string", "default": {"items": [1]}},
                "c": {"type": "string"},
                "d": {},
            },
            "type": "object",
            "required": ["a", "d"],
        },
    }
    assert list(shape_faults(body(user("Hi"), tools=(spec,)))) == []


@pytest.mark.parametrize("value", [None, [], "x", {"type": ["object", "null"]}, {"properties": [1], "required": "a"}])
def test_a_schema_of_any_shape_becomes_an_object(value: Any) -> None:
    found = schema.tool(ToolSpec(name="x", description="", input_schema=value))["input_schema"]
    assert found == {"type": "object", "properties": {}}


CACHE = {"type": "ephemeral"}


def marks(request: Any) -> list[str]:
    """Where the cache marks stand."""
    found = ["system" for block in request.get("system", ()) if "cache_control" in block]
    return found + [
        f"{at}.{number}"
        for at, message in enumerate(request["messages"])
        for number, block in enumerate(message["content"])
        if "cache_control" in block
    ]


def test_marks_stand_after_the_system_prompt_and_the_two_newest_messages_of_the_user() -> None:
    step = own(Item(data=THOUGHT), Item(data={"type": "tool_use"}, call=0), calls=(CALL,))
    result = ToolMessage(call_id="toolu_1", text="ok")
    assert marks(body(LONG, user("Hi"))) == ["system", "0.0"]
    assert marks(body(LONG, user("Hi"), step, result)) == ["system", "0.0", "2.0"]
    assert marks(body(LONG, user("Hi"), step, result, AssistantMessage(text="A"), user("B"))) == [
        "system",
        "2.0",
        "4.0",
    ]
    assert marks(body(LONG, user("Hi"), step, result, user("B"), AssistantMessage(text="A"), user("C"))) == [
        *("system", "3.0", "5.0")
    ]
    marked = body(LONG, user("Hi"), step, result)["messages"][-1]["content"][-1]
    assert (marked["type"], marked["cache_control"]) == ("tool_result", CACHE)


def test_no_mark_stands_below_the_minimum_of_the_model() -> None:
    kilo = SystemMessage(text="word " * 820)  # about a thousand tokens
    assert claude("claude-haiku-4-5").min_cached_tokens == 4_096
    assert marks(body(kilo, user("Hi"), model="claude-haiku-4-5")) == []
    assert marks(
        body(kilo, user("word " * 2_000), AssistantMessage(text="A"), user("x " * 3_000), model="claude-haiku-4-5")
    ) == ["2.0"]
    assert marks(body(kilo, user("Hi"), model="claude-opus-5-5")) == ["system", "0.0"]
    assert marks(body(kilo, user("Hi"), dialect=replace(DIALECT, left_out=frozenset({"cache_marker"})))) == []


def adaptive(effort: str) -> dict[str, Any]:
    return {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": effort}}


@pytest.mark.parametrize(
    ("model", "level", "expected"),
    [
        ("claude-opus-5-5", None, {"thinking": {"type": "adaptive", "display": "summarized"}}),
        ("claude-opus-5-5", "off", {"output_config": {"effort": "low"}}),
        ("claude-opus-5-5", "high", adaptive("high")),
        ("claude-sonnet-5-5", "off", {"thinking": {"type": "between_tools"}}),
        ("claude-opus-5", "off", {"thinking": {"type": "disabled"}}),
        ("claude-haiku-5-5", "off", {"thinking": {"type": "disabled"}}),
        ("claude-fable-5-1", "off", {"output_config": {"effort": "low"}}),
        ("anthropic/claude-opus-4.6", "medium", adaptive("medium")),
        ("us.anthropic.claude-opus-4-6-v1:0", None, {}),
        ("claude-sonnet-4-5-20250929", "high", {"thinking": {"type": "enabled", "budget_tokens": 24_576}}),
        ("claude-sonnet-4-20250514", "low", {"thinking": {"type": "enabled", "budget_tokens": 2_048}}),
        ("claude-3-7-sonnet-20250219", "off", {}),
        ("claude-3-5-haiku-20241022", "high", {}),
        *((name, "high", {}) for name in ("claude-2.1", "claude-2", "anthropic.claude-v2:1", "claude-instant-v1-100k")),
        ("claude-opus-41", "low", {"thinking": {"type": "enabled", "budget_tokens": 2_048}}),
        ("claude-sonnet4", "low", {"thinking": {"type": "enabled", "budget_tokens": 2_048}}),
        ("claude-sonnet-4-1m", "low", {"thinking": {"type": "enabled", "budget_tokens": 2_048}}),
        ("claude-opus-20300102", "low", adaptive("low")),
        ("claude-20300102", "off", {"thinking": {"type": "disabled"}}),
        ("claude-mythos-preview", "low", adaptive("low")),
        ("qwen3", "medium", {"thinking": {"type": "enabled", "budget_tokens": 7_168}}),
        ("qwen3", "off", {"thinking": {"type": "disabled"}}),
        ("qwen3", None, {}),
    ],
)
def test_each_model_is_asked_to_think_in_its_own_form(
    model: str, level: ThoughtLevel | None, expected: dict[str, Any]
) -> None:
    found = body(user("Hi"), model=model, thought_level=level)
    assert {key: value for key, value in found.items() if key in {"thinking", "output_config"}} == expected
    assert list(shape_faults(found)) == []


@pytest.mark.parametrize(
    ("model", "left_out", "expected"),
    [
        ("claude-opus-5", {"thinking_display"}, {**adaptive("high"), "thinking": {"type": "adaptive"}}),
        ("claude-opus-5", {"effort", "thinking_display"}, {"thinking": {"type": "adaptive"}}),
        ("my-claude-5", {"adaptive_thinking"}, {"thinking": {"type": "enabled", "budget_tokens": 24_576}}),
        ("my-model", {"thinking_budget"}, adaptive("high")),
        ("my-model", {"thinking_budget", "adaptive_thinking"}, {}),
        ("claude-opus-5", {"thought_level"}, {}),
    ],
)
def test_a_refused_form_of_thinking_gives_way_to_the_other(
    model: str, left_out: set[str], expected: dict[str, Any]
) -> None:
    dialect = replace(DIALECT, left_out=frozenset(left_out))
    found = body(user("Hi"), model=model, thought_level="high", dialect=dialect, limit=64_000)
    assert {key: value for key, value in found.items() if key in {"thinking", "output_config"}} == expected


def test_a_small_limit_leaves_no_room_for_a_budget() -> None:
    assert "thinking" not in body(user("Hi"), model="claude-haiku-4-5", thought_level="high", limit=2_000)
    found = body(user("Hi"), model="claude-haiku-4-5", thought_level="high", limit=4_000)
    assert found["thinking"] == {"type": "enabled", "budget_tokens": 2_976}


def test_a_turn_that_began_without_a_thought_goes_on_without_thinking() -> None:
    other = AssistantMessage(text="", calls=(CALL,), endpoint="http://other/v1 m")
    mine = own(Item(data=THOUGHT), Item(data={"type": "tool_use"}, call=0), calls=(replace(CALL, id="toolu_2"),))
    first, second = ToolMessage(call_id="toolu_1", text="ok"), ToolMessage(call_id="toolu_2", text="ok")

    def thinks(*messages: Message) -> bool:
        return "thinking" in body(*messages, model="claude-sonnet-4-5", thought_level="high", limit=64_000)

    assert thinks(user("Hi"))
    assert not thinks(user("Hi"), other, first)
    assert not thinks(user("Hi"), other, first, user("Also this."))
    assert not thinks(user("Hi"), other, first, mine, second)
    assert thinks(user("Hi"), mine, second)
    assert thinks(user("Hi"), mine, second, other, first)
    assert thinks(user("Hi"), other, first, AssistantMessage(text="Done."), user("Next."))


def test_tool_choice_and_parallel_calls() -> None:
    assert "tool_choice" not in body(user("Hi"), tools=(TOOL,))
    assert body(user("Hi"), tools=(TOOL,), tool_choice="none")["tool_choice"] == {"type": "none"}
    assert "tool_choice" not in body(user("Hi"), tool_choice="none")
    single = replace(DIALECT, parallel_calls=False)
    assert body(user("Hi"), tools=(TOOL,), dialect=single)["tool_choice"] == {
        "type": "auto",
        "disable_parallel_tool_use": True,
    }


def test_members_of_the_user_replace_crows_own_but_not_the_conversation() -> None:
    request = Request(messages=(SYSTEM, user("Hi")))
    extra = {"max_tokens": 7, "metadata": {"user_id": "u"}, "messages": [], "system": "x", "stream": False, "tools": []}
    found = json.loads(Encoder().body(request, model="m", endpoint=HERE, dialect=DIALECT, limit=5, extra=extra))
    assert (found["max_tokens"], found["metadata"], found["stream"]) == (7, {"user_id": "u"}, True)
    assert (found["system"], found["messages"]) == ([said("Be brief.")], [asks(said("Hi"))])
    assert "tools" not in found


def test_lone_surrogates_are_replaced() -> None:
    assert body(user("a\ud83e"))["messages"] == [asks(said("a\ufffd"))]


# Properties

TEXTS = st.sampled_from(["", " ", "Hi", "word " * 50])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A conversation as `for_model` gives it: the system message, then users, answers and their results."""
    messages: list[Message] = [draw(st.sampled_from([SYSTEM, LONG]))]
    for turn in range(draw(st.integers(1, 6))):
        messages.append(user(draw(TEXTS)))
        for step in range(draw(st.integers(0, 3))):
            calls = tuple(
                replace(CALL, id=f"{draw(st.sampled_from(['toolu', 'a.b']))}_{turn}_{step}_{number}")
                for number in range(draw(st.integers(0, 2)))
            )
            text = draw(TEXTS)
            items = [Item(data={**THOUGHT, "signature": f"s{turn}{step}"})] if draw(st.booleans()) else []
            items += [Item(data=said(text))] if text and items else []
            items += [Item(data={"type": "tool_use"}, call=number) for number in range(len(calls))] if items else []
            if text.strip() or calls:
                message = own(*items, text=text, calls=calls)
                is_own = draw(st.booleans())
                messages.append(message if is_own else replace(message, endpoint="http://other/v1 m"))
                messages += [ToolMessage(call_id=call.id, text=draw(TEXTS)) for call in calls]
                if not calls:
                    break
    return messages


def unmarked(raw: bytes) -> bytes:
    return raw.replace(b',"cache_control":{"type":"ephemeral"}', b"")


@given(messages=conversations(), dialect=st.sampled_from([DIALECT, replace(DIALECT, left_out=frozenset({"opaque"}))]))
@settings(max_examples=examples(40))
def test_each_request_is_a_prefix_of_the_next_and_has_a_valid_shape(messages: list[Message], dialect: Dialect) -> None:
    encoder, before = Encoder(), b""
    for end in range(2, len(messages) + 1):
        waits = isinstance(messages[end - 1], ToolMessage) and isinstance([*messages, None][end], ToolMessage)
        if waits or isinstance(messages[end - 1], AssistantMessage):
            continue
        request = Request(messages=tuple(messages[:end]), tools=(TOOL,), thought_level="medium")
        raw = encoder.body(request, model="claude-opus-5-5", endpoint=HERE, dialect=dialect, limit=None)
        assert list(shape_faults(json.loads(raw))) == []
        fresh = Encoder().body(request, model="claude-opus-5-5", endpoint=HERE, dialect=dialect, limit=None)
        assert fresh == raw
        plain = unmarked(raw)
        prompt = plain[plain.index(b'"tools":[') :].removesuffix(b"]}")
        assert prompt.startswith(before)
        before = prompt
