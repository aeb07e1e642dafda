"""Tests of HTTP responses: bodies that are not streamed, compressed or endless, and headers about limits."""

from __future__ import annotations

import json
import zlib

import anyio
import pytest

from crow.domain.errors import ModelError, ModelTimeout, ProtocolError
from crow.llm import Retrying, client
from tests.llm.chat.test_chat_completions import ASK, ask, asking, failure_of
from tests.support.fake_endpoint import FakeEndpoint, Gate, Reply, body, chunk, failing, sse


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085: b"])
async def test_line_separators_within_an_answer_that_is_not_streamed_are_kept(text: str) -> None:
    answer = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    content = b": waiting\n" + json.dumps(answer, ensure_ascii=False).encode()
    async with FakeEndpoint(otherwise=body(content)) as endpoint, asking(endpoint) as model:
        assert (await ask(model))[1].text == text


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_complete_answer_counts_although_the_compressed_body_ends_with_a_fault(is_done: bool) -> None:
    packer, gate = zlib.compressobj(wbits=31), Gate()
    events = packer.compress(sse(chunk({"content": "Hello"}, finish="stop"), done=is_done))
    steps = (events + packer.flush(zlib.Z_SYNC_FLUSH), gate, packer.flush()[:-8] + bytes(8))
    headers = {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"}
    async with FakeEndpoint(otherwise=Reply(steps=steps, headers=headers)) as endpoint, asking(endpoint) as model:
        async with model.stream(ASK) as stream:
            async for _ in stream:
                gate.open()
        assert (stream.answer.text, len(endpoint.asked)) == ("Hello", 1)


async def test_an_overload_is_tried_again_whenever_the_rate_limit_resets() -> None:
    reply = failing(503, "busy", headers={"x-ratelimit-reset-requests": "1h", "x-ratelimit-reset": "86400"})
    async with FakeEndpoint() as endpoint, asking(endpoint) as model:
        endpoint.script(reply)
        assert (await ask(model))[1].text == "Hello there."


async def test_an_endpoint_that_refuses_many_forms_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ADAPTATIONS", 1)
    reply = failing(400, "stream_options is not supported")
    async with FakeEndpoint(otherwise=reply) as endpoint, asking(endpoint) as model:
        _, deltas, _ = await failure_of(model)
    (retry,) = [each for each in deltas if isinstance(each, Retrying)]
    assert retry.reason.endswith("in 1 forms. The last reason: stream_options is not supported (HTTP 400).")


async def failure_to_list(endpoint: FakeEndpoint) -> ModelError:
    async with asking(endpoint) as model:
        with pytest.raises(ModelError) as caught:
            await model.models()
    return caught.value


async def test_a_list_of_models_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LISTING_S", 0.05)
    async with FakeEndpoint() as endpoint:
        endpoint.listing.clear()
        with anyio.fail_after(60):
            error = await failure_to_list(endpoint)
    assert isinstance(error, ModelTimeout)
    assert str(error) == f"{endpoint.base_url}/models did not answer within 0.05 s."


@pytest.mark.parametrize("listed", [["m" * 2_000], [{"id": "m", "more": json.loads("[" * 900 + "]" * 900)}]])
async def test_a_list_of_models_that_is_too_large_or_nests_too_deeply_is_an_error(
    monkeypatch: pytest.MonkeyPatch, listed: list[str]
) -> None:
    monkeypatch.setattr(client, "MAX_LISTING_BYTES", 1_000)
    async with FakeEndpoint() as endpoint:
        endpoint.models = [*listed]
        assert isinstance(await failure_to_list(endpoint), ProtocolError)
