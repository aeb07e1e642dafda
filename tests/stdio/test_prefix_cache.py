"""Between declared breaks, each request of the real process begins with the request before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_turns import opened
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Reply
from tests.support.prefix_cache import CachingEndpoint, run_session, write_config


@pytest.mark.long
@pytest.mark.parametrize(("wire", "seed"), [("chat", 2), ("chat", 3), ("responses", 2), ("messages", 3)])
async def test_scripted_sessions_break_the_prefix_only_where_a_break_is_declared(
    crow: StartCrow, home: Path, tmp_path: Path, seed: int, wire: str
) -> None:
    model = CachingEndpoint(home / "crow.db")
    async with model.endpoint as endpoint:
        write_config(home, endpoint.base_url, wire)
        async with crow(env={"CROW_MODEL": None, "OPENAI_API_KEY": "sk-test-0123456789"}) as agent:
            await agent.initialize()
            said = await run_session(agent, model, tmp_path / "places" / str(seed), seed, prompts=8)
    assert model.found.undeclared == []
    assert model.found.requests > 8
    assert "Last cache break: " in said


async def test_context_names_what_the_endpoint_refused_in_the_middle_of_a_session(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    thought = fake.chunk({"reasoning_content": "Hm.", "content": "Twigs."})
    refusal = fake.failing(400, "messages.2.assistant.reasoning_content: Extra inputs are not permitted")
    endpoint.script(Reply(steps=(fake.sse(thought, fake.chunk(finish="stop")),)), refusal, fake.text("String."))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        for _ in range(3):
            await agent.prompt(session, "What is it made of?")
        since = len(agent.log)
        await agent.prompt(session, "/context")
        said = agent.text(session, since=since)
    assert (
        "Last cache break: the endpoint began to refuse a part of the messages, or to accept it again (reasoning) ("
        in said
    )
    sent = [request.body["messages"] for request in endpoint.asked]
    assert sent[3][: len(sent[2])] == sent[2] != sent[1]
