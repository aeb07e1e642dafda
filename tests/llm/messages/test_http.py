"""Tests of the Messages wire over real HTTP, against an endpoint that refuses what the real one refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from crow.domain.errors import (
    AuthError,
    BadRequest,
    ContextOverflow,
    ModelError,
    ModelNotFound,
    Overloaded,
    QuotaExceeded,
)
from crow.domain.messages import (
    Answer,
    AssistantMessage,
    Image,
    Message,
    SystemMessage,
    Text,
    ToolCall,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
)
from crow.llm import Delta, Request, Retrying, TextDelta, ThoughtDelta
from crow.llm.client import EndpointClient
from crow.llm.dialect import Dialect
from crow.llm.endpoint import Endpoint
from crow.llm.facts import learned_refusals
from tests.llm.chat.test_chat_completions import Memory, Waits
from tests.llm.messages.streams import sse
from tests.support.fake_endpoint import CUT, Recorded, Reply, body
from tests.support.messages_endpoint import MessagesEndpoint, says

TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}})
SYSTEM = SystemMessage(text="Be brief. " * 1_000)
READ = {"call": "read_file", "json": ['{"path":', ' "x"}']}


def user(text: str) -> UserMessage:
    return UserMessage(parts=(Text(text=text),))


def error(status: int, kind: str, message: str, **headers: str) -> Reply:
    """An error in the form of this API."""
    content = json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"})
    return replace(body(content.encode(), status=status), headers={"Content-Type": "application/json", **headers})


class Conversation:
    """Asks one model again and again, as a session does."""

    def __init__(self, client: EndpointClient, *messages: Message, level: Any = "medium") -> None:
        self.client = client
        self.messages: list[Message] = [SYSTEM, *messages]
        self.level = level
        self.deltas: list[Delta] = []

    async def ask(self, *messages: Message) -> Answer:
        """Add messages, and the answer to them."""
        self.messages += messages
        request = Request(messages=tuple(self.messages), tools=(TOOL,), cache_key="s", thought_level=self.level)
        async with self.client.stream(request) as stream:
            async for delta in stream:
                self.deltas.append(delta)
        await self.client.settled()
        answer = stream.answer
        info = self.client.info
        self.messages.append(
            AssistantMessage(
                text=answer.text,
                calls=answer.calls,
                thought=answer.thought,
                opaque=answer.opaque,
                endpoint=info.endpoint,
                wire=answer.wire,
            )
        )
        return answer

    async def results(self, answer: Answer, text: str = "twigs") -> Answer:
        """Send a result for each call of an answer."""
        return await self.ask(*(ToolMessage(call_id=call.id, text=text) for call in answer.calls))


@asynccontextmanager
async def asking(
    endpoint: MessagesEndpoint,
    *,
    model: str = "claude-opus-5-5",
    memory: Memory | None = None,
    waits: Waits | None = None,
) -> AsyncIterator[Conversation]:
    client = EndpointClient(
        Endpoint(
            base_url=endpoint.base_url,
            model=model,
            api_key="sk-ant-secret",
            dialect=Dialect(wires=("messages",), marks_failures=True),
        ),
        memory=memory,
        timing=(waits or Waits()).timing(),
    )
    try:
        with anyio.fail_after(60):
            yield Conversation(client)
    finally:
        await client.close()


async def test_a_request_has_the_headers_of_this_api() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        answer = await conversation.ask(user("Hi"))
        assert (answer.text, answer.finish, answer.wire) == ("Hello there.", "stop", "messages")
        assert {type(delta) for delta in conversation.deltas} == {TextDelta}
    (asked,) = endpoint.asked
    assert (asked.method, asked.path) == ("POST", "/v1/messages")
    assert (asked.headers["x-api-key"], asked.headers["anthropic-version"]) == ("sk-ant-secret", "2023-06-01")
    assert asked.sent["max_tokens"] == 64_000


async def test_thoughts_go_back_unchanged_through_a_loop_of_tools() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.answer(
            says({"think": ["Let me ", "see."]}, {"text": ["Looking."]}, READ),
            says({"redacted": "Em=="}, READ, {"think": []}, {**READ, "id": "toolu_x"}),
            says({"think": ["Done."]}, {"text": ["It is a nest."]}),
        )
        answer = await conversation.ask(user("Hi"))
        assert isinstance(conversation.deltas[0], ThoughtDelta)
        answer = await conversation.results(answer)
        answer = await conversation.results(answer)
        assert answer.text == "It is a nest."
        await conversation.ask(user("And now?"))
        assert endpoint.refused == []
        assert endpoint.missing(endpoint.asked[-1].sent) == []
        assert len(endpoint.asked) == 4


async def test_a_changed_signature_is_refused_as_by_the_real_endpoint() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.answer(says({"think": ["Hm."]}, {"text": ["A"]}))
        await conversation.ask(user("Hi"))
        (last,) = conversation.messages[-1:]
        assert isinstance(last, AssistantMessage)
        stored = json.loads(json.dumps(dict(last.opaque)).replace("Er", "Es"))
        conversation.messages[-1] = replace(last, opaque=stored)
        answer = await conversation.ask(user("And now?"))
        # Crow leaves the thought out, so that the session goes on.
        assert answer.text == "Hello there."
        assert "Invalid `signature`" in endpoint.refused[0]
        assert "thinking" not in json.dumps(endpoint.asked[-1].sent["messages"])


async def test_after_a_break_a_strict_endpoint_gets_only_the_thoughts_made_since() -> None:
    memory = Memory()
    async with MessagesEndpoint(binds=True) as endpoint, asking(endpoint, memory=memory) as conversation:
        endpoint.answer(says({"think": ["One."]}, READ), says({"think": ["Two."]}, {"text": ["A"]}))
        await conversation.results(await conversation.ask(user("Hi")))
        # A compaction replaces what came before, and keeps the tail.
        kept = [
            replace(message, is_before_break=True) if isinstance(message, AssistantMessage) else message
            for message in conversation.messages[2:]
        ]
        conversation.messages = [SYSTEM, user("## Goal\nBuild a nest."), *kept]
        endpoint.answer(says({"think": ["Three."]}, READ), says({"think": ["Four."]}, {"text": ["B"]}))
        answer = await conversation.results(await conversation.ask(user("Go on")))
        assert answer.text == "B"
        await conversation.ask(user("And now?"))
        assert len(endpoint.refused) == 1
        assert "bound to a different conversation" in endpoint.refused[0]
        thoughts = [
            block["thinking"]
            for message in endpoint.asked[-1].sent["messages"]
            for block in message["content"]
            if block["type"] == "thinking"
        ]
        assert thoughts == ["Three.", "Four."]
        assert list(learned_refusals(memory.facts)) == ["messages.earlier_thoughts"]


async def test_an_endpoint_that_does_not_bind_gets_all_thoughts_after_a_break() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.answer(says({"think": ["One."]}, READ), says({"think": ["Two."]}, {"text": ["A"]}))
        await conversation.results(await conversation.ask(user("Hi")))
        kept = [
            replace(message, is_before_break=True) if isinstance(message, AssistantMessage) else message
            for message in conversation.messages[2:]
        ]
        conversation.messages = [SYSTEM, user("## Goal\nBuild a nest."), *kept]
        await conversation.ask(user("Go on"))
        assert (endpoint.refused, endpoint.missing(endpoint.asked[-1].sent)) == ([], [])


async def test_thoughts_of_another_model_are_not_sent() -> None:
    async with (
        MessagesEndpoint() as endpoint,
        asking(endpoint) as first,
        asking(endpoint, model="claude-opus-5") as second,
    ):
        endpoint.answer(says({"think": ["Hm."]}, READ))
        await first.ask(user("Hi"))
        second.messages = [*first.messages, ToolMessage(call_id=first_call(first), text="ok")]
        await second.ask()
        assert endpoint.refused == []
        assert "Hm." not in endpoint.asked[-1].raw.decode()


def first_call(conversation: Conversation) -> str:
    (last,) = conversation.messages[-1:]
    assert isinstance(last, AssistantMessage)
    return last.calls[0].id


async def test_a_model_with_a_budget_goes_on_in_a_turn_that_began_elsewhere() -> None:
    async with (
        MessagesEndpoint(forms=["enabled"]) as endpoint,
        asking(endpoint, model="claude-sonnet-4-5") as conversation,
    ):
        call = ToolCall(id="functions.read_file:0", name="read_file", arguments='{"path": "x"}')
        conversation.messages += [
            user("Hi"),
            AssistantMessage(text="Looking.", calls=(call,), endpoint="http://other m"),
        ]
        endpoint.answer(says(READ), says({"text": ["A"]}), says({"think": ["Hm."]}, READ))
        answer = await conversation.ask(ToolMessage(call_id=call.id, text="ok"))
        await conversation.results(answer)
        await conversation.results(await conversation.ask(user("And now?")))
        assert endpoint.refused == []
        assert ["thinking" in asked.sent for asked in endpoint.asked] == [False, False, True, True]


async def test_the_form_of_thinking_that_a_model_refuses_is_replaced_and_remembered() -> None:
    memory = Memory()
    async with MessagesEndpoint(forms=["adaptive"]) as endpoint:
        async with asking(endpoint, model="my-model", memory=memory) as conversation:
            await conversation.ask(user("Hi"))
            await conversation.ask(user("And now?"))
        forms = [asked.sent["thinking"]["type"] for asked in endpoint.asked]
        assert forms == ["enabled", "adaptive", "adaptive"]
        assert list(learned_refusals(memory.facts)) == ["messages.thinking_budget"]


async def test_the_whole_previous_request_is_read_from_the_cache_also_after_many_calls() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        many = [{**READ, "id": f"toolu_m{number}"} for number in range(30)]
        endpoint.answer(says({"think": ["Hm."]}, READ), says({"think": ["Hm."]}, *many), says({"text": ["A"]}))
        answer = await conversation.ask(user("Hi"))
        answer = await conversation.results(answer)
        await conversation.results(answer)
        await conversation.ask(user("And now?"))
        assert endpoint.refused == []
        for before, now in zip(endpoint.usages, endpoint.usages[1:], strict=False):
            assert (
                now["cache_read_input_tokens"]
                == before["cache_read_input_tokens"] + before["cache_creation_input_tokens"]
            )
            assert now["input_tokens"] == 0
        marks = [asked.raw.count(b'"cache_control"') for asked in endpoint.asked]
        assert max(marks) <= 4


async def test_usage_counts_what_was_read_from_the_cache_and_written_to_it() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        first = await conversation.ask(user("Hi"))
        second = await conversation.ask(user("And now?"))
        one, two = endpoint.usages
        assert first.usage == Usage(
            input_tokens=one["cache_creation_input_tokens"],
            output_tokens=9,
            cached_tokens=0,
            cache_write_tokens=one["cache_creation_input_tokens"],
        )
        assert second.usage is not None
        assert second.usage.cached_tokens == one["cache_creation_input_tokens"]
        assert second.usage.input_tokens == sum(value for key, value in two.items() if key != "output_tokens")


async def test_images_go_to_the_model_within_the_result() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.answer(says(READ))
        answer = await conversation.ask(user("Hi"))
        image = Image(data="iVBORw0K", mime_type="image/png")
        await conversation.ask(ToolMessage(call_id=answer.calls[0].id, text="A picture.", images=(image,)))
        assert endpoint.refused == []
        (result,) = endpoint.asked[-1].sent["messages"][-1]["content"]
        assert [block["type"] for block in result["content"]] == ["text", "image"]


@pytest.mark.parametrize(
    ("refusal", "gone"),
    [
        ("cache_control: Extra inputs are not permitted", "cache_control"),
        ("thinking.adaptive.display: Extra inputs are not permitted", '"display"'),
        ("output_config: Extra inputs are not permitted", "output_config"),
        ("tool_choice: Extra inputs are not permitted", "tool_choice"),
        ("thinking: Extra inputs are not permitted", '"thinking"'),
        ("messages.2.content.0.tool_result.is_error: Extra inputs are not permitted", "is_error"),
        ("1 request validation error: unknown field `is_error` in tool_result", "is_error"),
        (
            "messages.2.content.0.image.source.base64: image exceeds 5 MB maximum: 6291456 bytes > 5242880 bytes",
            "base64",
        ),
    ],
)
async def test_a_part_that_the_endpoint_refuses_is_left_out(refusal: str, gone: str) -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:

        def refuse(request: Recorded) -> Reply:
            assert gone in request.raw.decode()
            return error(400, "invalid_request_error", refusal)

        endpoint.answer(refuse)
        image = Image(data="iVBORw0K", mime_type="image/png")
        step = AssistantMessage(text="", calls=(ToolCall(id="c1", name="read_file", arguments="{}"),))
        failed = ToolMessage(call_id="c1", text="No such file.", is_error=True)
        messages = (SYSTEM, UserMessage(parts=(Text(text="Hi"), image)), step, failed)
        request = Request(messages=messages, tools=(TOOL,), tool_choice="none", thought_level="high", cache_key="s")
        async with conversation.client.stream(request) as stream:
            assert {type(delta) async for delta in stream} == {TextDelta}
        assert gone not in endpoint.asked[-1].raw.decode()
        assert len(endpoint.asked) == 2


async def test_a_limit_that_is_too_high_is_lowered_to_the_one_that_the_endpoint_names() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        words = "max_tokens: 64000 > 32000, which is the maximum allowed number of output tokens for claude-opus-5-5"
        endpoint.answer(lambda _: error(400, "invalid_request_error", words))
        await conversation.ask(user("Hi"))
        assert [asked.sent["max_tokens"] for asked in endpoint.asked] == [64_000, 32_000]


@pytest.mark.parametrize(
    ("status", "kind", "message", "raised", "says_so"),
    [
        (401, "authentication_error", "invalid x-api-key", AuthError, "refused the key"),
        (403, "permission_error", "Your API key does not have permission", AuthError, "refused access"),
        (402, "billing_error", "There is an issue with your payment", QuotaExceeded, "no credit"),
        (400, "invalid_request_error", "Your credit balance is too low", QuotaExceeded, "credit balance"),
        (400, "invalid_request_error", "You have reached your specified API usage limits.", QuotaExceeded, "limits"),
        (404, "not_found_error", "model: claude-opus-9", ModelNotFound, "does not serve"),
        (413, "request_too_large", "Request exceeds the maximum size", ContextOverflow, "too long"),
        (
            400,
            "invalid_request_error",
            "prompt is too long: 210,000 tokens > 200,000 maximum",
            ContextOverflow,
            "too long",
        ),
        (
            400,
            "invalid_request_error",
            "messages: at least one message is required",
            BadRequest,
            "at least one message",
        ),
    ],
)
async def test_an_error_says_what_is_wrong_and_is_not_tried_again(
    status: int, kind: str, message: str, raised: type[ModelError], says_so: str
) -> None:
    waits = Waits()
    async with MessagesEndpoint() as endpoint, asking(endpoint, waits=waits) as conversation:
        endpoint.answer(lambda _: error(status, kind, message))
        with pytest.raises(raised, match=says_so) as failed:
            await conversation.ask(user("Hi"))
        assert "sk-ant-secret" not in str(failed.value)
        assert (len(endpoint.asked), waits.seconds) == (1, [])
        if isinstance(failed.value, ContextOverflow) and status == 400:
            assert (failed.value.limit, failed.value.size) == (200_000, 210_000)


async def test_a_rate_limit_waits_as_long_as_the_endpoint_asks() -> None:
    waits = Waits()
    async with MessagesEndpoint() as endpoint, asking(endpoint, waits=waits) as conversation:
        limited = error(429, "rate_limit_error", "This request would exceed your rate limit", **{"retry-after": "7"})
        endpoint.answer(lambda _: limited, lambda _: error(529, "overloaded_error", "Overloaded"))
        answer = await conversation.ask(user("Hi"))
        assert answer.text == "Hello there."
        assert waits.seconds[0] >= 7
        assert len(waits.seconds) == 2
        assert [type(delta) for delta in conversation.deltas[:2]] == [Retrying, Retrying]


async def test_an_overload_in_the_stream_is_tried_again_unless_words_were_shown() -> None:
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}}
    word = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Half"}}
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.answer(lambda _: Reply(steps=(sse(start, overloaded),)))
        assert (await conversation.ask(user("Hi"))).text == "Hello there."
        endpoint.answer(lambda _: Reply(steps=(sse(start, word, overloaded),)))
        with pytest.raises(Overloaded, match="Overloaded"):
            await conversation.ask(user("And now?"))
        assert conversation.deltas[-1] == TextDelta(text="Half")
        assert len(endpoint.asked) == 3


async def test_a_cut_connection_is_tried_again() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        start = sse({"type": "message_start", "message": {"usage": {"input_tokens": 10}}})
        endpoint.answer(lambda _: Reply(steps=(start, CUT)))
        assert (await conversation.ask(user("Hi"))).text == "Hello there."
        assert len(endpoint.asked) == 2


async def test_an_endpoint_that_does_not_stream_is_asked_for_one_piece() -> None:
    whole = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "A"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 10, "output_tokens": 5},
    }
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.answer(
            lambda _: error(400, "invalid_request_error", "`stream` must be false: streaming is not supported"),
            lambda _: body(json.dumps(whole).encode()),
        )
        answer = await conversation.ask(user("Hi"))
        assert (answer.text, answer.thought) == ("A", "Hm.")
        assert [asked.sent["stream"] for asked in endpoint.asked] == [True, False]


async def test_the_list_of_models_gives_the_window_and_the_output_limit() -> None:
    async with MessagesEndpoint() as endpoint, asking(endpoint) as conversation:
        endpoint.models = [
            {"type": "model", "id": "claude-opus-5-5", "max_input_tokens": 1_000_000, "max_tokens": 128_000}
        ]
        (offered,) = await conversation.client.models()
        assert (offered.name, offered.context_window, offered.max_output_tokens) == (
            *("claude-opus-5-5", 1_000_000, 128_000),
        )
        listed = next(request for request in endpoint.requests if request.path.endswith("/models"))
        assert (listed.headers["x-api-key"], listed.headers["anthropic-version"]) == ("sk-ant-secret", "2023-06-01")
