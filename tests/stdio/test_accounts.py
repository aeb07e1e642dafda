"""Tokens and cost, compared with the accounts that an endpoint keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess
from tests.support.amounts import IS_SOAK
from tests.support.fake_endpoint import FakeEndpoint, Gate
from tests.support.fork_server import command
from tests.support.ledger import Driver, settings_for, stats_of


@pytest.mark.long
@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
async def test_every_request_is_counted_once_as_the_endpoint_reports_it(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, wire: str
) -> None:
    await anyio.Path(home).mkdir()
    await anyio.Path(home / "config.toml").write_text(settings_for(wire))
    async with crow(endpoint=endpoint, env={"CROW_MODEL": "alpha"}) as agent:
        await agent.initialize()
        driver = Driver(agent, endpoint, home, place, seed=5)
        await driver.run(26 if IS_SOAK else 16)
        for mark in ("s0", "s1", "s2"):
            await driver.check_command(mark)
    driver.check_sums(await stats_of({**os.environ, "CROW_HOME": str(home)}))
    assert driver.estimated > 0


def listed(price: float) -> Mapping[str, object]:
    """A model as OpenRouter lists it, with prices in USD per token, as text."""
    pricing = {"prompt": f"{price:.10f}", "completion": f"{2 * price:.10f}", "input_cache_read": "0.0000001"}
    return {"id": "fake-model", "context_length": 64_000, "pricing": pricing}


async def test_a_refreshed_price_list_applies_to_later_requests_only(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    env = {**os.environ, "CROW_HOME": str(home), "OPENAI_BASE_URL": endpoint.base_url, "CROW_MODEL": "fake-model"}
    costs = []
    session = ""
    for price in (0.000001, 0.00001):
        endpoint.models = [listed(price)]
        shown = await anyio.run_process([*command(), "models", "--refresh"], env=env)
        assert b"fake-model" in shown.stdout
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            if session:
                await agent.load_session(session, place)
            else:
                session = await agent.new_session(place)
            await agent.prompt(session, "go on")
            costs.append(agent.updates(session, "usage_update")[-1]["cost"]["amount"])
    assert costs == [20e-6, 220e-6]  # 10 tokens in and 5 out, each time at the price of that moment


async def started(agent: CrowProcess, place: Path) -> str:
    await agent.initialize()
    return await agent.new_session(place)


async def test_a_turn_cancelled_before_any_text_still_reports_what_it_used(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    begun = fake.sse(fake.chunk({"role": "assistant", "content": ""}), fake.usage(700, 0), done=False)
    thought = fake.sse(fake.chunk({"reasoning_content": "Hm."}), done=False)
    endpoint.script(fake.Reply(steps=(begun, thought, gate)))
    async with crow(endpoint=endpoint) as agent:
        session = await started(agent, place)
        call = await agent.start_prompt(session, "hi")
        await agent.wait_for_update("agent_thought_chunk")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        assert agent.usage(call) == {"totalTokens": 700, "inputTokens": 700, "outputTokens": 0}


async def test_a_program_that_runs_agents_finds_tokens_and_cost_where_it_looks(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    """Benchmark runners such as Harbor read the response to the one prompt, and the newest cost."""
    await anyio.Path(home).mkdir()
    await anyio.Path(home / "config.toml").write_text(settings_for("chat"))
    report = {
        "prompt_tokens": 1200,
        "completion_tokens": 80,
        "prompt_tokens_details": {"cached_tokens": 900},
        "completion_tokens_details": {"reasoning_tokens": 30},
    }
    call = {"index": 0, "id": "c", "function": {"name": "read_file", "arguments": '{"path": "README.md"}'}}
    ends = [fake.chunk({"tool_calls": [call]}, finish="tool_calls"), fake.chunk({"content": "Twigs."}, finish="stop")]
    endpoint.script(*(fake.Reply(steps=(fake.sse(end, {"choices": [], "usage": report}),)) for end in ends))
    async with crow(endpoint=endpoint, env={"CROW_MODEL": "alpha"}) as agent:
        session = await started(agent, place)
        prompt = await agent.start_prompt(session, "what is in it?")
        await prompt.result()
        assert agent.usage(prompt) == {
            "totalTokens": 2560,
            "inputTokens": 2400,
            "outputTokens": 160,
            "thoughtTokens": 60,
            "cachedReadTokens": 1800,
        }
        newest = agent.updates(session, "usage_update")[-1]
        assert newest["cost"] == {"amount": pytest.approx(0.00474), "currency": "USD"}


async def test_a_command_without_requests_reports_no_usage(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        session = await started(agent, place)
        call = await agent.start_prompt(session, "/usage")
        assert await call.result() == {"stopReason": "end_turn"}
        assert agent.usage(call) is None
        assert agent.text(session) == "This session used 0 input tokens, 0 output tokens in 0 requests; 0 messages."
