"""Which wire an endpoint gets: found within a request, learned once, tested again, never against the settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import date, timedelta

import anyio
import pytest

from crow.domain.errors import BadRequest
from crow.domain.messages import ToolSpec, WireName
from crow.llm import Request
from crow.llm.client import EndpointClient
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint, EndpointTimeouts
from crow.llm.errors import parse_error_response, refuses_wire
from crow.llm.facts import describe_facts
from tests.llm.chat.test_chat_completions import ASK, Memory, Waits, ask, failure_of, refusals
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, chunk, failing, sse, text

TOOL = ToolSpec(name="shell", description="Run.", input_schema={"type": "object"})
WITH_TOOLS = replace(ASK, tools=(TOOL,))
NO_TOOLS_HERE = (
    "Function tools with reasoning_effort are not supported for gpt-x in /v1/chat/completions. To use function tools, "
    "use /v1/responses or set reasoning_effort to 'none'."
)
ALL: tuple[WireName, ...] = ("chat", "responses", "messages")


class Days:
    def __init__(self) -> None:
        self.today = date(2026, 1, 1)

    def __call__(self) -> date:
        return self.today


@asynccontextmanager
async def asking(
    endpoint: FakeEndpoint, *, memory: Memory | None = None, wires: Sequence[WireName] = ALL, days: Days | None = None
) -> AsyncIterator[EndpointClient]:
    model = EndpointClient(
        Endpoint(base_url=endpoint.base_url, model="fake-model", api_key="sk-1", dialect=Dialect(wires=tuple(wires))),
        memory=memory,
        learned=dict(memory.facts) if memory is not None else None,
        timing=Waits().timing(),
        today=days or Days(),
    )
    try:
        yield model
    finally:
        await model.close()


async def wires_of(model: EndpointClient, endpoint: FakeEndpoint, request: Request = WITH_TOOLS) -> list[str]:
    """Send a request that works, and return the wires that it was tried on."""
    before = len(endpoint.requests)
    async with model.stream(request) as stream:
        async for _ in stream:
            pass
    assert stream.answer.text == "Hello there."
    return [each.wire for each in endpoint.requests[before:] if each.method == "POST"]


def refuse_tools_on_chat(request: Recorded) -> Reply:
    is_refused = request.wire == "chat" and "tools" in request.sent
    return failing(400, NO_TOOLS_HERE) if is_refused else text("Hello", " there", ".")


async def test_the_next_wire_answers_in_the_same_request_and_is_the_first_one_from_then_on() -> None:
    memory = Memory()
    async with FakeEndpoint(otherwise=refuse_tools_on_chat) as endpoint:
        endpoint.wires = ALL
        async with asking(endpoint, memory=memory) as model:
            assert await wires_of(model, endpoint) == ["chat", "responses"]
            assert model.info.wire == "responses"
            assert await wires_of(model, endpoint, replace(WITH_TOOLS, cache_key="another")) == ["responses"]
        async with asking(endpoint, memory=memory) as model:
            assert (model.info.wire, await wires_of(model, endpoint)) == ("responses", ["responses"])
    (fact, *_) = describe_facts(memory.facts)
    assert (fact.about, fact.words.partition(" (")[0]) == (
        "API Chat Completions",
        "Crow uses another API of this endpoint",
    )


SILENT: Mapping[WireName, tuple[dict[str, object], ...]] = {
    "chat": (chunk({"role": "assistant", "content": ""}), chunk({"content": "Hello"}, finish="stop")),
    "responses": (
        {"type": "response.created", "response": {"status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "Hello"},
        {"type": "response.completed", "response": {}},
    ),
    "messages": (
        {"type": "message_start", "message": {"role": "assistant", "usage": {"input_tokens": 1}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ),
}


@pytest.mark.parametrize("wire", ALL)
async def test_a_model_may_think_in_silence_after_the_event_that_announces_an_answer(wire: WireName) -> None:
    first, *others = SILENT[wire]
    reply = Reply(steps=(sse(first, done=False), 0.3, sse(*others)), headers={"Content-Type": "text/event-stream"})
    async with FakeEndpoint(otherwise=reply) as endpoint:
        endpoint.wires = (wire,)
        settings = Endpoint(base_url=endpoint.base_url, model="fake-model", dialect=Dialect(wires=(wire,)))
        model = EndpointClient(replace(settings, timeouts=EndpointTimeouts(idle_s=0.05, grace_s=60)))
        with anyio.fail_after(60):
            assert (await ask(model))[1].text == "Hello"
        await model.close()


async def test_a_wire_is_tested_after_a_day_by_a_request_with_tools_only() -> None:
    memory, days = Memory(), Days()
    async with FakeEndpoint(otherwise=refuse_tools_on_chat) as endpoint:
        endpoint.wires = ALL
        async with asking(endpoint, memory=memory, days=days) as model:
            await wires_of(model, endpoint)
            days.today += timedelta(days=1)
            assert await wires_of(model, endpoint, replace(ASK, tools=(), cache_key="title")) == ["responses"]
            assert refusals(memory) == {"chat_wire": (2, True)}
            assert await wires_of(model, endpoint, replace(WITH_TOOLS, cache_key="a")) == ["chat", "responses"]
            assert await wires_of(model, endpoint, replace(WITH_TOOLS, cache_key="b")) == ["responses"]
            endpoint.answer_with(text("Hello", " there", "."))
            days.today += timedelta(days=2)
            assert await wires_of(model, endpoint, replace(WITH_TOOLS, cache_key="c")) == ["chat"]
            assert model.info.wire == "chat"
    assert refusals(memory)["chat_wire"][1] is False


async def test_a_wire_that_is_not_served_is_skipped() -> None:
    async with FakeEndpoint() as endpoint:
        endpoint.wires = ("messages",)
        async with asking(endpoint) as model:
            assert await wires_of(model, endpoint) == ["chat", "responses", "messages"]
            assert endpoint.asked[-1].headers["x-api-key"] == "sk-1"
            assert endpoint.asked[-1].headers["anthropic-version"] == "2023-06-01"


async def test_the_messages_api_may_have_a_url_of_its_own() -> None:
    async with FakeEndpoint() as endpoint:
        endpoint.wires = ALL
        own = endpoint.base_url.replace("/v1", "/anthropic/v1")
        at = Endpoint(base_url=endpoint.base_url, messages_url=own, model="m", dialect=Dialect(wires=("messages",)))
        model = EndpointClient(at, timing=Waits().timing())
        try:
            async with model.stream(WITH_TOOLS) as stream:
                async for _ in stream:
                    pass
            await model.models()
        finally:
            await model.close()
        paths = {request.path for request in endpoint.requests}
        assert paths == {"/anthropic/v1/messages", "/v1/models"}


async def test_a_refusal_within_the_stream_also_leads_to_the_next_wire() -> None:
    async with FakeEndpoint(otherwise=text("Hello", " there", ".")) as endpoint:
        endpoint.wires = ALL
        error = {"error": {"message": NO_TOOLS_HERE, "code": 400}}
        endpoint.script(Reply(steps=(sse(error),)))
        async with asking(endpoint) as model:
            assert await wires_of(model, endpoint) == ["chat", "responses"]


async def test_the_only_wire_in_the_settings_is_never_left() -> None:
    async with FakeEndpoint(otherwise=refuse_tools_on_chat) as endpoint:
        endpoint.wires = ALL
        async with asking(endpoint, wires=("chat",)) as model, model.stream(WITH_TOOLS) as stream:
            with pytest.raises(BadRequest, match="use /v1/responses"):
                async for _ in stream:
                    pass
        assert {each.wire for each in endpoint.requests} == {"chat"}


async def test_if_no_wire_works_the_reason_of_the_first_one_is_given_and_nothing_is_learned() -> None:
    memory = Memory()
    async with FakeEndpoint() as endpoint:
        endpoint.wires = ()
        async with asking(endpoint, memory=memory) as model:
            error, _, _ = await failure_of(model)
            assert "has no Chat Completions API at this URL" in str(error)
    assert refusals(memory) == {}


@pytest.mark.parametrize(
    ("status", "body", "wire"),
    [
        (404, b'{"detail":"Not Found"}', "chat"),
        (404, b"", "messages"),
        (404, b"404 page not found", "responses"),
        (404, b"<html><head><title>404 Not Found</title></head></html>", "responses"),
        (405, b'{"detail":"Method Not Allowed"}', "messages"),
        (404, b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}', "responses"),
        (400, b'{"error":{"message":"This model is only supported in v1/responses, not here."}}', "chat"),
        (400, b'{"error":{"message":"Please use the Responses API for this model."}}', "chat"),
        (400, b'{"error":{"message":"This model does not support tools"}}', "chat"),
        (400, b'{"type":"error","error":{"message":"use /v1/chat/completions for this model"}}', "messages"),
    ],
)
def test_these_refusals_are_of_a_wire(status: int, body: bytes, wire: WireName) -> None:
    assert refuses_wire(parse_error_response(status, body), wire)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"error":{"message":"The model `gpt-x` does not exist","code":"model_not_found"}}'),
        (404, b'{"error":{"message":"model \'x\' not found"}}'),
        (401, b'{"error":{"message":"use /v1/responses"}}'),
        (429, b'{"error":{"message":"Rate limit reached; try /v1/responses"}}'),
        (500, b'{"error":{"message":"tools param requires --jinja flag"}}'),
        (400, b'{"error":{"message":"Unknown parameter: stream_options"}}'),
        (400, b'{"error":{"message":"The response was filtered"}}'),
        (400, b"{}"),
    ],
)
def test_these_are_not(status: int, body: bytes) -> None:
    assert not refuses_wire(parse_error_response(status, body), "chat")


@pytest.mark.parametrize(
    ("wire", "kind"), [("chat", "a chat completion"), ("responses", "a response"), ("messages", "a Messages stream")]
)
async def test_a_stream_without_end_is_named_in_the_words_of_its_wire(wire: WireName, kind: str) -> None:
    async with FakeEndpoint(otherwise=Reply(steps=(b"x" * 9_000_000,))) as endpoint:
        endpoint.wires = ALL
        async with asking(endpoint, wires=(wire,)) as model:
            error, _, _ = await failure_of(model)
    assert f"as one event, which is not {kind}. Check the base URL" in str(error)
