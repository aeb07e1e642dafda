"""Requests of the Responses API: their shape, what goes back to whom, and the prefix law."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseInputItemParam, response_create_params, tool_param
from pydantic import TypeAdapter

from crow.domain.messages import (
    AssistantMessage,
    Freeform,
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
from crow.llm import Request, ThoughtLevel
from crow.llm.dialect import Dialect
from crow.llm.items import Item, stored_items
from crow.llm.responses.encode import ResponsesEncoder as Encoder
from crow.llm.responses.encode import is_strict
from tests.support.amounts import examples

HERE = "https://here/v1 gpt-x"
PLAIN = Dialect(wires=("responses",))
CACHED = Dialect(wires=("responses",), cache="key")
SYSTEM = SystemMessage(text="Be brief.")
ASKED = UserMessage(parts=(Text(text="Hi"),))
PICTURE = Image(data="aGVsbG8=", mime_type="image/png")
PATCH = {"type": "object", "properties": {"patch": {"type": "string"}}, "required": ["patch"]}
TOOLS = (
    ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}}),
    ToolSpec(name="apply_patch", description="Patch.", input_schema=PATCH, freeform=Freeform()),
    ToolSpec(
        name="grammar", description="G.", input_schema=PATCH, freeform=Freeform(syntax="lark", grammar="start: WORD")
    ),
)
REASONING = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "sealed"}
SAID = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "phase": "commentary",
    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
}
CALLS = (
    ToolCall(id="call_1", name="read_file", arguments='{"path": "a"}'),
    ToolCall(id="call_2", name="apply_patch", arguments='{"patch": "*** Begin"}'),
)
ITEMS = (
    Item(data=REASONING),
    Item(data=SAID),
    Item(data={"id": "fc_1", "type": "function_call", "status": "completed"}, call=0),
    Item(data={"id": "ctc_1", "type": "custom_tool_call", "status": "completed"}, call=1),
)
OWN = AssistantMessage(
    text="I look.", calls=CALLS, thought="Hm", opaque=stored_items(ITEMS), endpoint=HERE, wire="responses"
)
RESULTS = (
    ToolMessage(call_id="call_1", text="x", images=(PICTURE,)),
    ToolMessage(call_id="call_2", text=""),
)
CHECK_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
CHECK_TOOL: TypeAdapter[Any] = TypeAdapter(tool_param.ToolParam)
CHECK_REQUEST: TypeAdapter[Any] = TypeAdapter(response_create_params.ResponseCreateParamsStreaming)


def body(
    *messages: Message,
    dialect: Dialect = PLAIN,
    model: str = "gpt-x",
    tools: Sequence[ToolSpec] = TOOLS,
    level: ThoughtLevel | None = None,
    extra: Mapping[str, object] | None = None,
    encoder: Encoder | None = None,
    raw: bool = False,
) -> Any:
    request = Request(messages=messages, tools=tuple(tools), cache_key="s1", thought_level=level)
    sent = (encoder or Encoder()).body(request, model=model, endpoint=HERE, dialect=dialect, limit=100, extra=extra)
    return sent if raw else json.loads(sent)


def test_an_answer_goes_back_to_its_endpoint_item_by_item() -> None:
    assert body(SYSTEM, ASKED, OWN, *RESULTS)["input"] == [
        {"type": "message", "role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "Hi"},
        REASONING,
        SAID,
        {
            "id": "fc_1",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "read_file",
            "arguments": '{"path": "a"}',
        },
        {
            "id": "ctc_1",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": "*** Begin",
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [
                {"type": "input_text", "text": "x"},
                {"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8=", "detail": "auto"},
            ],
        },
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "(no output)"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        replace(OWN, endpoint="https://there/v1 gpt-x"),
        replace(OWN, endpoint="https://here/v1 gpt-y"),
        replace(OWN, wire="messages"),
        replace(OWN, wire="chat"),
    ],
)
def test_no_other_endpoint_model_or_wire_gets_the_items(message: AssistantMessage) -> None:
    sent = body(SYSTEM, ASKED, message, *RESULTS)["input"]
    assert sent[2:5] == [
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "call_1", "name": "read_file", "arguments": '{"path": "a"}'},
        {"type": "function_call", "call_id": "call_2", "name": "apply_patch", "arguments": '{"patch": "*** Begin"}'},
    ]
    assert [each["type"] for each in sent[5:]] == ["function_call_output"] * 2
    assert "sealed" not in json.dumps(sent)


def test_items_that_no_longer_match_the_text_are_replaced_by_the_text() -> None:
    sent = body(SYSTEM, ASKED, replace(OWN, text="look."), *RESULTS)["input"]
    assert [each.get("id") for each in sent[2:6]] == ["rs_1", None, "fc_1", "ctc_1"]
    assert sent[3] == {"type": "message", "role": "assistant", "content": "look."}


def test_renamed_and_shortened_calls_keep_their_items() -> None:
    calls = (replace(CALLS[0], id="call_9", arguments='{"path": "..."}'), CALLS[1])
    sent = body(SYSTEM, ASKED, replace(OWN, calls=calls), *RESULTS)["input"]
    assert (sent[4]["id"], sent[4]["call_id"], sent[4]["arguments"]) == ("fc_1", "call_9", '{"path": "..."}')


def test_reasoning_that_the_endpoint_could_only_look_up_is_not_sent() -> None:
    bare = {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    own = replace(OWN, opaque=stored_items((Item(data=bare), *ITEMS[1:])))
    assert [each.get("id") for each in body(SYSTEM, ASKED, own)["input"][2:]] == ["msg_1", "fc_1", "ctc_1"]
    open_text = {**bare, "content": [{"type": "reasoning_text", "text": "Hm"}]}
    own = replace(OWN, opaque=stored_items((Item(data=open_text), *ITEMS[1:])))
    assert body(SYSTEM, ASKED, own)["input"][2] == open_text


@pytest.mark.parametrize(
    "opaque",
    [
        {"items": []},
        {"items": "x"},
        {"items": [None, 1, {"data": 1}, {"call": 0}]},
        {"items": [{"data": {"type": "function_call"}, "call": 7}, {"data": {"type": "function_call"}, "call": -1}]},
        {"items": [{"data": {"type": "function_call"}, "call": 0}] * 2},
        {"items": [{"data": {"type": "message", "content": [1, {"text": 2}]}}]},
    ],
)
def test_damaged_items_still_give_every_call_once(opaque: Mapping[str, object]) -> None:
    sent = body(SYSTEM, ASKED, replace(OWN, opaque=opaque), *RESULTS)["input"]
    calls = [each["call_id"] for each in sent if each["type"] == "function_call"]
    assert calls == ["call_1", "call_2"]
    assert "I look." in json.dumps(sent)


def test_a_custom_call_with_damaged_arguments_is_sent_with_their_text() -> None:
    item = {"data": {"type": "custom_tool_call"}, "call": 0}
    own = replace(OWN, calls=(replace(OWN.calls[0], arguments="{"),), opaque={"items": [item]})
    (sent,) = [each for each in body(SYSTEM, ASKED, own)["input"] if each["type"] == "custom_tool_call"]
    assert (sent["call_id"], sent["input"]) == ("call_1", "{")


def test_nothing_is_stored_at_the_endpoint() -> None:
    extra = {"store": True, "previous_response_id": "resp_1", "conversation": "c", "background": True, "top_p": 0.5}
    sent = body(SYSTEM, ASKED, extra=extra)
    assert (sent["store"], sent["include"], sent["top_p"]) == (False, ["reasoning.encrypted_content"], 0.5)
    assert sent.keys().isdisjoint({"previous_response_id", "conversation", "background"})


@pytest.mark.parametrize(
    ("level", "reasoning"),
    [
        (None, {"summary": "auto"}),
        ("off", {"effort": "none"}),
        ("low", {"effort": "low", "summary": "auto"}),
        ("high", {"effort": "high", "summary": "auto"}),
    ],
)
def test_the_thought_level_is_the_effort(level: ThoughtLevel | None, reasoning: Mapping[str, str]) -> None:
    assert body(SYSTEM, ASKED, level=level)["reasoning"] == reasoning


@pytest.mark.parametrize(
    ("part", "gone"),
    [
        ("include", "include"),
        ("store", "store"),
        ("output_limit", "max_output_tokens"),
        ("prompt_cache_key", "prompt_cache_key"),
    ],
)
def test_a_refused_part_is_left_out(part: str, gone: str) -> None:
    assert gone in body(SYSTEM, ASKED, dialect=CACHED)
    assert gone not in body(SYSTEM, ASKED, dialect=CACHED.refusing(f"responses.{part}"))
    assert gone in body(SYSTEM, ASKED, dialect=CACHED.refusing(part)), (
        "a refusal on Chat Completions means nothing here"
    )


def test_refused_opaque_items_images_and_custom_tools_are_written_plainly() -> None:
    plain = PLAIN.refusing("responses.opaque")
    assert [each.get("id") for each in body(SYSTEM, ASKED, OWN, dialect=plain)["input"]] == [None] * 5
    no_images = body(SYSTEM, UserMessage(parts=(PICTURE,)), dialect=PLAIN.refusing("responses.images"))
    assert "was left out" in no_images["input"][1]["content"]
    no_custom = PLAIN.refusing("responses.custom_tools")
    sent = body(SYSTEM, ASKED, OWN, *RESULTS, dialect=no_custom)
    assert {tool["type"] for tool in sent["tools"]} == {"function"}
    assert not any(each["type"].startswith("custom") for each in sent["input"])


def test_the_system_message_is_a_cache_breakpoint_where_the_model_takes_one() -> None:
    marked = body(SYSTEM, ASKED, dialect=CACHED, model="gpt-5.6-nest")["input"][0]["content"]
    assert marked == [{"type": "input_text", "text": "Be brief.", "prompt_cache_breakpoint": {"mode": "explicit"}}]
    for dialect, model in ((CACHED, "gpt-5.4"), (PLAIN, "gpt-5.6"), (CACHED, "grok-9")):
        assert body(SYSTEM, ASKED, dialect=dialect, model=model)["input"][0]["content"] == "Be brief."
    refused = CACHED.refusing("responses.cache_retention")
    assert body(SYSTEM, ASKED, dialect=refused, model="gpt-5.6")["input"][0]["content"] == "Be brief."


def test_tools_are_strict_only_where_their_schemas_allow() -> None:
    strict = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert is_strict(strict)
    assert is_strict({**strict, "properties": {"a": {"type": "array", "items": {"type": ["string", "null"]}}}})
    for loose in (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {**strict, "required": []},
        {**strict, "properties": {"a": {}}},
        {**strict, "properties": {"a": {"type": "array"}}},
        {**strict, "properties": {"a": {"type": "string", "default": "x"}}},
        {**strict, "properties": {"a": {"type": "object", "properties": {}}}},
        {"type": "string"},
        {"anyOf": [strict]},
        {},
        "x",
    ):
        assert not is_strict(loose), loose
    sent = body(SYSTEM, ASKED, tools=(ToolSpec(name="t", description="", input_schema=strict), TOOLS[0]))["tools"]
    assert [tool["strict"] for tool in sent] == [True, False]


PARTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda text: Text(text=text), st.text(max_size=20)),
    st.just(PICTURE),
    st.just(Link(uri="file:///a", name="a")),
    st.just(Resource(uri="file:///b", text="b")),
)
STEPS: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda parts: (UserMessage(parts=tuple(parts)),), st.lists(PARTS, max_size=3)),
    st.just((OWN, *RESULTS)),
    st.just((replace(OWN, endpoint="other m"), *RESULTS)),
    st.just((AssistantMessage(text="Done.", endpoint=HERE, wire="responses"),)),
    st.just((AssistantMessage(text=""),)),
    st.just((replace(OWN, opaque={"items": [{"data": {"type": "function_call"}, "call": 5}]}), *RESULTS)),
)


@given(steps=st.lists(STEPS, max_size=6), level=st.sampled_from([None, "off", "low", "high"]))
@settings(max_examples=examples(20))
def test_requests_are_valid_by_the_published_types_and_prefixes_of_the_next(
    steps: list[tuple[Message, ...]], level: ThoughtLevel | None
) -> None:
    messages: tuple[Message, ...] = (SYSTEM, ASKED)
    encoder, before = Encoder(), b""
    for step in [(), *steps]:
        messages = (*messages, *step)
        raw = body(*messages, dialect=CACHED, level=level, encoder=encoder, raw=True)
        assert raw == body(*messages, dialect=CACHED, level=level, raw=True)
        assert raw.startswith(before)
        before = raw.removesuffix(b"]}")
        sent = json.loads(raw)
        CHECK_REQUEST.validate_python(sent)
        for item in sent["input"]:
            CHECK_ITEM.validate_python(item)
        for tool in sent["tools"]:
            CHECK_TOOL.validate_python(tool)
