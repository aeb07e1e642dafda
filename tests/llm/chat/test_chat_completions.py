"""Tests of transport, retries and adaptation, against a real server on the loopback."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import date

import anyio
import pytest

from crow.domain.errors import (
    AnswerTooLong,
    AuthError,
    BadRequest,
    ContextOverflow,
    ModelError,
    ModelNotFound,
    ModelTimeout,
    NetworkError,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    RateLimited,
)
from crow.domain.messages import Answer, SystemMessage, Text, ToolSpec, Usage, UserMessage
from crow.domain.trace_context import use_trace_context
from crow.llm import Delta, Request, Retrying, TextDelta, ThoughtDelta
from crow.llm import stream as exchange
from crow.llm.client import EndpointClient
from crow.llm.endpoint import Endpoint, EndpointTimeouts
from crow.llm.facts import learned_refusals, utc_today
from crow.llm.parser import MAX_CHARS
from crow.llm.stream import RetryTiming
from tests.support.fake_endpoint import (
    CUT,
    HANG,
    FakeEndpoint,
    Gate,
    Reply,
    body,
    calls,
    chunk,
    failing,
    sse,
    text,
    usage,
)

TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}})
ASK = Request(
    messages=(SystemMessage(text="Be brief."), UserMessage(parts=(Text(text="Hi"),))),
    tools=(TOOL,),
    max_output_tokens=100,
    cache_key="session-1",
)
USAGE = Usage(input_tokens=10, output_tokens=5)
PATIENT = EndpointTimeouts()
QUICK = EndpointTimeouts(connect_s=2, first_byte_s=0.3, idle_s=0.15, grace_s=0.1)
"""For tests in which the server stalls."""


class Memory:
    """An endpoint memory in a dict."""

    def __init__(self, facts: Mapping[str, object] | None = None) -> None:
        self.facts = dict(facts or {})

    async def learned(self, base_url: str, model: str) -> Mapping[str, object]:
        return dict(self.facts)

    async def learn(self, base_url: str, model: str, facts: Mapping[str, object]) -> None:
        self.facts.update(facts)


def refusals(memory: Memory) -> dict[str, tuple[int, bool]]:
    """For each part of a request that the endpoint refused: how often, and whether that still holds."""
    return {part: (each.times, each.holds) for part, each in learned_refusals(memory.facts).items()}


class Waits:
    """Retry timing that does not wait and records the seconds; chance is always a half."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await anyio.lowlevel.checkpoint()

    def timing(self) -> RetryTiming:
        return RetryTiming(sleep=self.sleep, chance=lambda: 0.5)


@asynccontextmanager
async def asking(
    endpoint: FakeEndpoint,
    *,
    memory: Memory | None = None,
    waits: Waits | None = None,
    timeouts: EndpointTimeouts = PATIENT,
    api_key: str | None = None,
    window: int | None = None,
    hang_s: float = 60,
    today: Callable[[], date] = utc_today,
) -> AsyncIterator[EndpointClient]:
    model = EndpointClient(
        Endpoint(
            base_url=endpoint.base_url, model="fake-model", api_key=api_key, context_window=window, timeouts=timeouts
        ),
        memory=memory,
        learned=dict(memory.facts) if memory is not None else None,
        timing=(waits or Waits()).timing(),
        today=today,
    )
    try:
        with anyio.fail_after(hang_s):
            yield model
    finally:
        await model.close()


async def ask(model: EndpointClient, request: Request = ASK) -> tuple[list[Delta], Answer]:
    async with model.stream(request) as stream:
        deltas = [delta async for delta in stream]
    await model.settled()
    return deltas, stream.answer


async def failure_of(model: EndpointClient) -> tuple[ModelError, list[Delta], Answer]:
    deltas: list[Delta] = []
    async with model.stream(ASK) as stream:
        try:
            async for delta in stream:
                deltas.append(delta)
        except ModelError as error:
            return error, deltas, stream.partial()
    raise AssertionError(f"no error: {deltas}")


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


async def test_a_plain_answer_is_streamed() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        gate = Gate()
        endpoint.script(text("Hel", "lo", between=(gate,)))
        async with model.stream(ASK) as stream:
            deltas = aiter(stream)
            assert await anext(deltas) == TextDelta(text="Hel")
            assert stream.partial() == Answer(text="Hel", finish="interrupted")
            gate.open()
            assert [delta async for delta in deltas] == [TextDelta(text="lo")]
            assert stream.answer == Answer(text="Hello", usage=USAGE)
        sent = endpoint.asked[0]
        assert sent.body == {
            "model": "fake-model",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 100,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "read_file", "description": "Read.", "parameters": TOOL.input_schema},
                }
            ],
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        }
        assert sent.headers["accept-encoding"] == "identity"
        assert sent.headers["user-agent"].startswith("crow/")
        assert not any("stainless" in name.lower() for name in sent.headers)


async def test_tool_calls_come_with_the_answer_not_as_text() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(calls(("read_file", {"path": "a"}), ("read_file", {"path": "b"}), say="Looking."))
        deltas, answer = await ask(model)
        assert text_of(deltas) == "Looking."
        assert answer.finish == "tool_calls"
        assert [(call.id, call.name, call.arguments, call.fault) for call in answer.calls] == [
            ("call0", "read_file", '{"path": "a"}', None),
            ("call1", "read_file", '{"path": "b"}', None),
        ]


async def test_requests_reuse_the_connection() -> None:
    seen: set[str] = set()
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        for _ in range(3):
            await ask(model)
        connections = endpoint.connections
        seen.update(request.path for request in endpoint.requests)
    assert (connections, seen) == (1, {"/v1/chat/completions", "/v1/models"})


async def test_a_refused_key_is_reported_but_never_shown() -> None:
    key = "sk-secret-0123456789"
    async with FakeEndpoint() as endpoint, asking(endpoint, api_key=key) as model:
        endpoint.script(failing(401, f"Incorrect API key provided: {key}", code="invalid_api_key"))
        error, deltas, _ = await failure_of(model)
        assert endpoint.asked[0].headers["authorization"] == f"Bearer {key}"
    assert isinstance(error, AuthError)
    assert deltas == []
    assert key not in str(error)
    assert "Incorrect API key provided: [secret] (HTTP 401, invalid_api_key)" in str(error)
    assert "OPENAI_API_KEY" in str(error)


async def test_an_unknown_model_error_suggests_similar_names() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.models = ["other", "fake-model-2", "fake-model-1"]
        endpoint.script(failing(404, 'model "fake-model" not found, try pulling it first'))
        error, _, _ = await failure_of(model)
    assert isinstance(error, ModelNotFound)
    assert 'does not serve the model "fake-model"' in str(error)
    assert "It offers fake-model-2, fake-model-1" in str(error)


async def test_a_rate_limit_waits_as_long_as_asked_and_tells_the_user() -> None:
    waits = Waits()
    async with FakeEndpoint() as endpoint, asking(endpoint, waits=waits) as model:
        endpoint.script(failing(429, "Rate limit reached", headers={"Retry-After": "3"}), text("ok"))
        deltas, answer = await ask(model)
    assert waits.seconds == [3.125]
    assert isinstance(deltas[0], Retrying)
    assert "is rate-limiting requests: Rate limit reached (HTTP 429)" in deltas[0].reason
    assert (text_of(deltas), answer.text) == ("ok", "ok")


async def test_a_rate_limit_of_more_than_a_minute_is_raised_at_once() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(failing(429, "Rate limit reached", headers={"Retry-After": "3600"}))
        error, deltas, _ = await failure_of(model)
        assert len(endpoint.asked) == 1
    assert isinstance(error, RateLimited)
    assert (error.retry_after_s, deltas) == (3600.0, [])


async def test_missing_credit_is_not_retried() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(failing(429, "You exceeded your current quota", code="insufficient_quota"))
        error, _, _ = await failure_of(model)
        assert len(endpoint.asked) == 1
    assert isinstance(error, QuotaExceeded)


async def test_a_failing_server_is_asked_four_times_with_growing_waits() -> None:
    waits = Waits()
    async with FakeEndpoint(otherwise=failing(503, "busy")) as endpoint, asking(endpoint, waits=waits) as model:
        error, deltas, _ = await failure_of(model)
        assert len(endpoint.asked) == 4
    assert isinstance(error, Overloaded)
    assert waits.seconds == [0.5, 1.0, 2.0]
    assert [delta.wait_s for delta in deltas if isinstance(delta, Retrying)] == [0.5, 1.0, 2.0]


async def test_an_html_error_is_reduced_to_its_title() -> None:
    page = b"<!DOCTYPE html><html><head><title>502 Bad\n Gateway</title></head><body>" + b"x" * 5000 + b"</body></html>"
    async with (
        FakeEndpoint(otherwise=body(page, content_type="text/html", status=502)) as endpoint,
        asking(endpoint) as model,
    ):
        error, _, _ = await failure_of(model)
    assert isinstance(error, Overloaded)
    assert str(error) == f"{endpoint.base_url} has trouble: 502 Bad Gateway (HTTP 502)."


async def test_an_error_body_without_end_is_read_only_in_part() -> None:
    pieces = itertools.count()

    def endless() -> Iterator[bytes]:
        while True:
            next(pieces)
            yield b"no such thing " * 5_000

    async with FakeEndpoint(otherwise=Reply(steps=endless(), status=400)) as endpoint, asking(endpoint) as model:
        error, _, _ = await failure_of(model)
        await anyio.to_thread.run_sync(endpoint.asked[0].left.wait, 5)
        assert endpoint.asked[0].left.is_set()
    assert next(pieces) < 300, "a few pieces, and those that were on their way"
    assert isinstance(error, BadRequest)
    assert "no such thing" in str(error)
    assert len(str(error)) < 2_000


async def test_an_error_body_that_hangs_is_used_as_far_as_it_came() -> None:
    reply = Reply(steps=(b"no such thing", HANG), status=400)
    async with FakeEndpoint(otherwise=reply) as endpoint, asking(endpoint, timeouts=QUICK) as model:
        error, _, _ = await failure_of(model)
    assert isinstance(error, BadRequest)
    assert "no such thing" in str(error)


@pytest.mark.long
@pytest.mark.parametrize("opening", [b"[", b'{"error":'])
@pytest.mark.parametrize("depth", [400, 900, 5_000])
async def test_an_error_that_nests_without_end_is_an_error_like_others(opening: bytes, depth: int) -> None:
    closing = b"]" if opening == b"[" else b"}"
    nested = opening * depth + b"1" + closing * depth
    async with FakeEndpoint(otherwise=body(nested, status=400)) as endpoint, asking(endpoint) as model:
        error, _, _ = await failure_of(model)
        endpoint.script(Reply(steps=(b"data: " + nested + b"\n\ndata: [DONE]\n\n",)))
        streamed, _, _ = await failure_of(model)
    assert isinstance(error, BadRequest)
    assert isinstance(streamed, ModelError)


async def test_an_error_in_the_stream_after_text_keeps_the_text() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half"}), {"error": {"code": 502, "message": "gone"}}),)))
        error, deltas, partial = await failure_of(model)
        assert len(endpoint.asked) == 1
    assert isinstance(error, Overloaded)
    assert deltas == [TextDelta(text="Half")]
    assert partial == Answer(text="Half", finish="interrupted")


async def test_an_error_in_the_stream_before_text_is_retried() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse({"error": {"message": "overloaded"}}, done=False),)), text("ok"))
        deltas, _ = await ask(model)
    assert [type(delta) for delta in deltas] == [Retrying, TextDelta]


async def test_a_completion_that_is_not_streamed_is_accepted() -> None:
    whole = {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "All at once", "reasoning_content": "Hm."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(body(json.dumps(whole, indent=2).encode()))
        deltas, answer = await ask(model)
    assert deltas == [ThoughtDelta(text="Hm."), TextDelta(text="All at once")]
    assert answer == Answer(
        text="All at once",
        thought="Hm.",
        reasoning_field="reasoning_content",
        usage=Usage(input_tokens=3, output_tokens=2),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"<html><title>Log in</title></html>", 'a web page ("Log in") instead of a chat completion'),
        (b"", "sent an empty response"),
        (b"data: [DONE]\n\n", "sent an empty answer"),
        (b'{"status": "ok"}', "broke off"),
        (b"It works!", "something other than a chat completion: It works!"),
        (b'{"choices": [{"message": {"content"', "something other than a chat completion"),
    ],
)
async def test_a_successful_body_that_is_not_an_answer_is_described_after_one_retry(
    content: bytes, expected: str
) -> None:
    async with (
        FakeEndpoint(otherwise=body(content, content_type="text/html")) as endpoint,
        asking(endpoint) as model,
    ):
        error, _, _ = await failure_of(model)
        assert len(endpoint.asked) == 2
    assert isinstance(error, ProtocolError)
    assert expected in str(error)


async def test_an_error_with_status_200_is_raised() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(body(b'{"error": {"message": "Invalid API key", "code": 401}}'))
        error, _, _ = await failure_of(model)
    assert isinstance(error, AuthError)


async def test_a_connection_cut_after_text_keeps_the_text() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        gate = Gate()
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half"}), done=False), gate, CUT)))
        async with model.stream(ASK) as stream:
            deltas = aiter(stream)
            assert await anext(deltas) == TextDelta(text="Half")
            gate.open()
            with pytest.raises(NetworkError, match="broke"):
                await anext(deltas)
            assert stream.partial() == Answer(text="Half", finish="interrupted")
            with pytest.raises(RuntimeError, match="not complete"):
                _ = stream.answer


async def test_a_connection_cut_before_text_is_retried() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"role": "assistant"}), done=False), CUT)), text("ok"))
        deltas, answer = await ask(model)
    assert [type(delta) for delta in deltas] == [Retrying, TextDelta]
    assert answer.text == "ok"


async def test_a_cut_after_the_finish_reason_loses_nothing() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "All"}, finish="stop"), done=False), CUT)))
        assert (await ask(model))[1] == Answer(text="All")


async def test_a_stream_without_finish_reason_is_incomplete() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half"}), done=False),)))
        error, _, partial = await failure_of(model)
    assert isinstance(error, ProtocolError)
    assert "broke off" in str(error)
    assert partial.text == "Half"


async def test_a_stall_after_text_times_out() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint, timeouts=QUICK) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half"}), done=False), HANG)))
        error, deltas, _ = await failure_of(model)
        await anyio.to_thread.run_sync(endpoint.asked[0].left.wait, 5)
        assert endpoint.asked[0].left.is_set()
    assert isinstance(error, ModelTimeout)
    assert str(error) == f"{endpoint.base_url} sent nothing for 0.15 s, so the answer was abandoned."
    assert deltas == [TextDelta(text="Half")]


async def test_a_stall_before_the_first_event_is_retried_once() -> None:
    async with (
        FakeEndpoint(otherwise=Reply(steps=(HANG,))) as endpoint,
        asking(endpoint, timeouts=QUICK) as model,
    ):
        error, _, _ = await failure_of(model)
        assert len(endpoint.asked) == 2
    assert isinstance(error, ModelTimeout)


async def test_keep_alives_prevent_a_timeout() -> None:
    pings: tuple[bytes | float, ...] = (b": ping\n\n", 0.1) * 4
    async with FakeEndpoint() as endpoint, asking(endpoint, timeouts=QUICK) as model:
        endpoint.script(Reply(steps=(*pings, sse(chunk({"content": "ok"}), chunk(finish="stop")))))
        assert (await ask(model))[1].text == "ok"


async def test_after_the_finish_reason_the_answer_does_not_wait_for_done() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint, timeouts=QUICK) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "All"}, finish="stop"), done=False), HANG)))
        assert (await ask(model))[1] == Answer(text="All")


async def test_usage_after_the_finish_reason_is_waited_for() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint, timeouts=QUICK) as model:
        late = sse(usage(), done=False)
        endpoint.script(Reply(steps=(sse(chunk({"content": "All"}, finish="stop"), done=False), 0.03, late, HANG)))
        assert (await ask(model))[1] == Answer(text="All", usage=USAGE)


async def test_chunks_that_arrived_together_are_one_delta() -> None:
    pieces = [f"t{number} " for number in range(1000)]
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        chunks = tuple(sse(chunk({"content": piece}), done=False) for piece in pieces)
        endpoint.script(Reply(steps=(chunks, sse(chunk(finish="stop")))))
        deltas, answer = await ask(model)
    assert text_of(deltas) == answer.text == "".join(pieces)
    assert len(deltas) <= 100


async def test_a_broken_stream_releases_held_text() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half of a <"}), done=False), CUT)))
        error, deltas, partial = await failure_of(model)
    assert isinstance(error, NetworkError)
    assert text_of(deltas) == partial.text == "Half of a <"


async def test_a_stream_that_breaks_while_all_text_is_held_is_retried() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "<tool_call>"}), done=False), CUT)), text("ok"))
        deltas, answer = await ask(model)
    assert [type(delta) for delta in deltas] == [Retrying, TextDelta]
    assert answer.text == text_of(deltas) == "ok"


async def test_an_endless_answer_is_stopped_and_not_retried() -> None:
    piece = sse(chunk({"content": "".join(f"twig {number} " for number in range(6_000))}), done=False)
    async with (
        FakeEndpoint(otherwise=Reply(steps=itertools.repeat(piece))) as endpoint,
        asking(endpoint) as model,
    ):
        error, deltas, partial = await failure_of(model)
        await anyio.to_thread.run_sync(endpoint.asked[0].left.wait, 5)
        assert (len(endpoint.asked), endpoint.asked[0].left.is_set()) == (1, True)
    assert isinstance(error, AnswerTooLong)
    assert str(error).startswith(f"The answer from {endpoint.base_url} was cut off after 4,000,000 characters")
    assert text_of(deltas) == partial.text
    assert len(partial.text) == MAX_CHARS


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 100_000, b": ping\n\n" * 10_000], ids=["a line", "comments"])
async def test_an_endless_body_without_events_is_stopped_and_not_retried(piece: bytes) -> None:
    async with (
        FakeEndpoint(otherwise=Reply(steps=itertools.repeat(piece))) as endpoint,
        asking(endpoint) as model,
    ):
        error, _, _ = await failure_of(model)
        assert len(endpoint.asked) == 1
    assert isinstance(error, AnswerTooLong)
    assert "more than 8,388,608 bytes" in str(error)


async def test_endless_empty_events_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BYTES", 1_000_000)
    piece = sse(chunk({}), done=False)
    async with (
        FakeEndpoint(otherwise=Reply(steps=itertools.repeat(piece))) as endpoint,
        asking(endpoint) as model,
    ):
        error, deltas, _ = await failure_of(model)
        assert len(endpoint.asked) == 1
    assert isinstance(error, AnswerTooLong)
    assert "more than 1,000,000 bytes" in str(error)
    assert deltas == []


async def test_cancelling_closes_the_connection_at_once() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half"}), done=False), HANG)))
        started = anyio.Event()

        async def follow() -> None:
            async with model.stream(ASK) as stream:
                async for _ in stream:
                    started.set()

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await started.wait()
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(endpoint.asked[0].left.wait, 5)
        assert endpoint.asked[0].left.is_set()
        assert (await ask(model))[1].text == "Hello there."


async def test_leaving_the_block_early_closes_the_connection() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(Reply(steps=(sse(chunk({"content": "Half"}), done=False), HANG)))
        async with model.stream(ASK) as stream:
            assert await anext(aiter(stream)) == TextDelta(text="Half")
        await anyio.to_thread.run_sync(endpoint.asked[0].left.wait, 5)
        assert endpoint.asked[0].left.is_set()


@pytest.mark.parametrize(
    ("status", "message", "missing", "present", "refused"),
    [
        (400, "Unknown parameter: 'stream_options'", "stream_options", None, "stream_options"),
        (422, "body.stream_options: Extra inputs are not permitted", "stream_options", None, "stream_options"),
        (
            400,
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'.",
            "max_tokens",
            "max_completion_tokens",
            "max_tokens",
        ),
    ],
)
async def test_a_refused_parameter_is_left_out_and_remembered(
    status: int, message: str, missing: str, present: str | None, refused: str
) -> None:
    memory = Memory()
    async with FakeEndpoint() as endpoint:
        endpoint.script(failing(status, message))
        async with asking(endpoint, memory=memory) as model:
            deltas, answer = await ask(model)
        async with asking(endpoint, memory=memory) as model:
            await ask(model)
        assert answer.text == "Hello there."
        assert [delta for delta in deltas if isinstance(delta, Retrying)] == []
        first, second, later = [request.body for request in endpoint.asked]
        assert missing in first
        assert missing not in second
        assert present is None or present in second
        assert later == second
    assert refusals(memory) == {refused: (1, True)}
    assert memory.facts["listed"] == {}


async def test_an_endpoint_that_cannot_stream_is_asked_for_the_whole_answer() -> None:
    memory = Memory()
    whole = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Whole."}, "finish_reason": "stop"}]}
    async with (
        FakeEndpoint(otherwise=body(json.dumps(whole).encode())) as endpoint,
        asking(endpoint, memory=memory) as model,
    ):
        endpoint.script(failing(400, "Unsupported value: 'stream' does not support true with this model."))
        _, answer = await ask(model)
        assert (answer.text, [request.body["stream"] for request in endpoint.asked]) == ("Whole.", [True, False])
    assert refusals(memory) == {"stream": (1, True)}


@pytest.mark.parametrize(("accepted", "remembered"), [(4_096, True), (64, False)])
async def test_an_output_limit_that_is_too_large_is_lowered(accepted: int, remembered: bool) -> None:
    memory = Memory()
    request = replace(ASK, max_output_tokens=8_000)
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory) as model:
        words = f"max_tokens is too large: 8000. This model supports at most {accepted} completion tokens, not 8000."
        for _ in range(2):  # a second session
            endpoint.script(failing(400, words))
            await ask(model, request)
            request = replace(request, cache_key="session-2")
        assert [sent.body["max_tokens"] for sent in endpoint.asked] == [8_000, accepted] * 2
        assert model.info.max_output_tokens == (accepted if remembered else None)
    assert refusals(memory) == ({"max_output_tokens": (2, True)} if remembered else {})


async def test_a_refusal_without_a_removable_part_is_raised() -> None:
    async with FakeEndpoint(otherwise=failing(400, "temperature must be 1")) as endpoint, asking(endpoint) as model:
        error, _, _ = await failure_of(model)
        assert len(endpoint.asked) == 1
    assert isinstance(error, BadRequest)
    assert "temperature must be 1" in str(error)


async def test_an_overflow_reports_its_numbers_and_stores_nothing() -> None:
    memory = Memory()
    words = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens."
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory) as model:
        endpoint.script(failing(400, words, code="context_length_exceeded"))
        error, _, _ = await failure_of(model)
        assert len(endpoint.asked) == 1
        assert (model.info.context_window, model.info.is_window_configured) == (None, False)
    assert isinstance(error, ContextOverflow)
    assert (error.limit, error.size) == (8192, 9001)
    assert memory.facts == {}


async def test_a_listed_window_is_used_and_forgotten_when_an_answer_disproves_it() -> None:
    memory = Memory({"listed": {"context_window": 8}, "context_window": 5})  # the second is an older version's
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory) as model:
        async with model.stream(ASK) as stream:
            deltas = aiter(stream)
            await anext(deltas)
            assert model.info.context_window == 8
            async for _ in deltas:
                pass
        await model.settled()
        assert model.info.context_window is None
    assert memory.facts["listed"] == {}


async def test_a_configured_window_wins_over_a_listed_one() -> None:
    memory = Memory({"listed": {"context_window": 8}})
    async with FakeEndpoint() as endpoint, asking(endpoint, memory=memory, window=128_000) as model:
        await ask(model)
        assert (model.info.context_window, model.info.is_window_configured) == (128_000, True)


async def test_a_refused_connection_asks_whether_the_server_is_running() -> None:
    async with FakeEndpoint() as endpoint:
        base_url = endpoint.base_url
    gone = FakeEndpoint()
    gone.base_url = base_url
    async with asking(gone) as model:
        error, deltas, _ = await failure_of(model)
    assert isinstance(error, NetworkError)
    assert len(deltas) == 3
    assert str(error).startswith(f"No connection to {base_url}: ")
    assert str(error).endswith("Is the server running?")


async def test_offered_models_are_listed() -> None:
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.models = ["b", "a"]
        assert [offered.name for offered in await model.models()] == ["b", "a"]
        assert not any("stainless" in name.lower() for name in endpoint.requests[-1].headers)


def test_a_remote_endpoint_without_a_key_says_how_to_set_one() -> None:
    model = EndpointClient(Endpoint(base_url="https://api.example.com/v1", model="m"))
    with pytest.raises(AuthError, match="OPENAI_API_KEY"):
        model.check()


def test_a_local_endpoint_needs_no_key() -> None:
    for base_url in ("http://127.0.0.1:1/v1", "http://localhost:11434/v1", "http://[::1]:1/v1", "http://ollama:11434"):
        EndpointClient(Endpoint(base_url=base_url, model="m")).check()


def test_the_repr_of_an_endpoint_has_no_key() -> None:
    assert "sk-1" not in repr(Endpoint(base_url="http://localhost/v1", model="m", api_key="sk-1"))


async def test_requests_carry_the_trace_context_but_configured_headers_win() -> None:
    use_trace_context({"traceparent": "00-1", "baggage": "a=1"})
    try:
        async with FakeEndpoint() as endpoint:
            configured = (("Baggage", "mine"), ("X-A", "b"))
            settings = Endpoint(base_url=endpoint.base_url, model="fake-model", headers=configured)
            model = EndpointClient(settings)
            endpoint.script(text("ok"))
            await ask(model)
            await model.models()
            await model.close()
            for asked in endpoint.requests:
                assert {name: asked.headers.get(name) for name in ("traceparent", "baggage", "x-a")} == {
                    "traceparent": "00-1",
                    "baggage": "mine",
                    "x-a": "b",
                }
            assert {asked.path for asked in endpoint.requests} == {"/v1/chat/completions", "/v1/models"}
    finally:
        use_trace_context({})
