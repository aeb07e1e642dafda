"""Tests of the fake endpoint in a thread of its own, as tests that drive a process use it."""

from __future__ import annotations

import anyio
import anyio.to_thread

from crow.domain.messages import Text, UserMessage
from crow.llm import Request, TextDelta
from crow.llm.client import EndpointClient
from crow.llm.endpoint import Endpoint
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply, text

ASK = Request(messages=(UserMessage(parts=(Text(text="Hi"),)),))


async def test_a_gate_holds_the_reply_until_another_thread_opens_it() -> None:
    gate = Gate()
    with FakeEndpoint.in_thread() as endpoint:
        endpoint.script(text("a", "b", between=(gate,)))
        model = EndpointClient(Endpoint(base_url=endpoint.base_url, model="fake-model"))
        with anyio.fail_after(60):
            async with model.stream(ASK) as stream:
                deltas = aiter(stream)
                assert await anext(deltas) == TextDelta(text="a")
                assert await anyio.to_thread.run_sync(gate.wait_reached)
                gate.open()
                assert [delta async for delta in deltas] == [TextDelta(text="b")]
        await model.close()


async def test_a_reply_may_depend_on_the_request() -> None:
    def echo(request: Recorded) -> Reply:
        return text(request.body["messages"][-1]["content"][::-1])

    with FakeEndpoint.in_thread(otherwise=echo) as endpoint:
        model = EndpointClient(Endpoint(base_url=endpoint.base_url, model="fake-model"))
        with anyio.fail_after(60):
            async with model.stream(ASK) as stream:
                assert [delta async for delta in stream] == [TextDelta(text="iH")]
        await model.close()
    assert [request.path for request in endpoint.asked] == ["/v1/chat/completions"]
