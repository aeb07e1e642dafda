"""Properties of requests for stored paths, however they went on and however damaged they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings

from crow.domain.conversation import for_model
from crow.domain.entries import Assistant, Entry
from crow.domain.messages import AssistantMessage, SystemMessage
from crow.llm import Request
from crow.llm.dialect import Dialect
from crow.llm.items import Item, stored_items
from crow.llm.messages.encode import MessagesEncoder as Encoder
from tests.support.amounts import examples
from tests.support.messages_endpoint import before, check_loop, check_results, shape_faults
from tests.support.paths import breaks, damaged, histories, plain_histories

HERE = "https://api.anthropic.com/v1 claude-sonnet-4-5"
DIALECT = Dialect(wires=("messages",))
STRICT = replace(DIALECT, left_out=frozenset({"earlier_thoughts"}))


def with_thoughts(entries: Sequence[Entry]) -> list[Entry]:
    """The path as if this endpoint had thought before each answer."""
    return [replace(entry, body=_thinking(entry, entry.body)) for entry in entries]


def asked_for(entries: Sequence[Entry]) -> list[Entry]:
    """The path with thoughts, without the answers to no question: crow makes no request there."""
    path: list[Entry] = []
    for entry in with_thoughts(entries):
        last = for_model(path).messages[-1]
        if not isinstance(entry.body, Assistant) or not isinstance(last, (SystemMessage, AssistantMessage)):
            path.append(entry)
    return path


def _thinking(entry: Entry, body: Any) -> Any:
    if not isinstance(body, Assistant):
        return body
    items = [Item(data={"type": "thinking", "thinking": "Hm.", "signature": f"s{entry.id}"})]
    items += [Item(data={"type": "text", "text": body.text})] if body.text else []
    items += [Item(data={"type": "tool_use"}, call=number) for number in range(len(body.calls))]
    return replace(body, opaque=stored_items(items), endpoint=HERE, wire="messages")


def raw(path: Sequence[Entry], dialect: Dialect = DIALECT) -> bytes:
    context = for_model(path)
    request = Request(messages=context.messages, tools=context.tools, thought_level="medium")
    return Encoder().body(request, model="claude-sonnet-4-5", endpoint=HERE, dialect=dialect, limit=None)


@given(entries=damaged())
@settings(max_examples=examples(40))
def test_any_stored_path_gives_a_request_that_the_endpoint_accepts(entries: list[Entry]) -> None:
    asked = json.loads(raw(with_thoughts(entries)))
    assert list(shape_faults(asked)) == []
    check_results(asked["messages"])
    if "thinking" in asked:
        check_loop(asked["messages"])


@given(entries=plain_histories())
@settings(max_examples=examples(40))
def test_between_breaks_each_request_is_a_prefix_of_the_next(entries: list[Entry]) -> None:
    path = asked_for(entries)
    last = b""
    for end in range(1, len(path) + 1):
        if breaks(path[end - 1].body):
            last = b""
        if not isinstance(path[end - 1].body, Assistant):
            continue
        # A request was made before each answer.
        sent = raw(path[: end - 1]).replace(b',"cache_control":{"type":"ephemeral"}', b"")
        prompt = sent[sent.index(b',"system":[') :].removesuffix(b"]}")
        assert prompt.startswith(last)
        last = prompt


@given(entries=histories())
@settings(max_examples=examples(40))
def test_an_endpoint_that_binds_thoughts_gets_only_those_that_are_still_valid(entries: list[Entry]) -> None:
    path = asked_for(entries)
    made: dict[str, str] = {}
    for end, entry in enumerate(path):
        if isinstance(entry.body, Assistant):
            asked = json.loads(raw(path[:end], STRICT))
            made[f"s{entry.id}"] = before(asked, len(asked["messages"]))
    asked = json.loads(raw(path, STRICT))
    for at, message in enumerate(asked["messages"]):
        for block in message["content"]:
            if block["type"] == "thinking":
                assert made[block["signature"]] == before(asked, at)
