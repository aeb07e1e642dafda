"""The three wires behind one session of the real process."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_turns import opened
from tests.support import fake_endpoint as fake
from tests.support.acp_client import RpcError
from tests.support.checking_endpoint import MODELS, WIRES, CheckingEndpoint, RandomTurns, write_settings
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply

NO_MODEL = {"CROW_MODEL": None, "OPENAI_BASE_URL": None, "OPENAI_API_KEY": None}
REFUSAL = (
    "Function tools with reasoning_effort are not supported for gpt-x in /v1/chat/completions. To use function tools, "
    "use /v1/responses or set reasoning_effort to 'none'."
)


def answer_as_the_newest(request: Recorded) -> Reply:
    """Refuse tools on Chat Completions unless the request turns the reasoning off."""
    if request.wire == "chat" and "tools" in request.sent and request.sent.get("reasoning_effort") != "none":
        return fake.failing(400, REFUSAL, type="invalid_request_error", param="reasoning_effort", code=None)
    if request.body["messages"][-1]["role"] == "user":
        return fake.calls(("read_file", {"path": "README.md"}), say="I look.")
    return fake.text("It is ", "a nest.")


async def test_the_newest_models_work_at_the_first_prompt_with_reasoning_on(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.answer_with(answer_as_the_newest)
    endpoint.wires = ("chat", "responses")
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        assert await agent.prompt(session, "What is it?") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("It is a nest.")
        await agent.prompt(session, "And now?")
        since = len(agent.log)
        await agent.prompt(session, "/context")
        said = agent.text(session, since=since)
    assert [request.wire for request in endpoint.asked] == ["chat", *["responses"] * 4]
    assert "API: Responses." in said
    assert "- API Chat Completions: Crow uses another API of this endpoint" in said
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "In another session?")
    assert [request.wire for request in endpoint.asked[5:]] == ["responses", "responses"]


async def test_crow_run_answers_with_a_newest_model(home: Path, place: Path, endpoint: FakeEndpoint) -> None:
    endpoint.answer_with(answer_as_the_newest)
    endpoint.wires = ("chat", "responses")
    env = {**os.environ, "CROW_HOME": str(home), "OPENAI_BASE_URL": endpoint.base_url, "CROW_MODEL": "gpt-x"}
    argv = [sys.executable, "-m", "crow", "run", "What is in README.md?"]
    done = await anyio.run_process(argv, env=env, cwd=place, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, "I look.\n\nIt is a nest.\n")


async def test_an_endpoint_without_any_api_at_its_url_is_named_once_with_advice(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.wires = ()
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        with pytest.raises(RpcError, match="has no chat completions at this URL"):
            await agent.prompt(session, "Hello")
    paths = [request.path for request in endpoint.requests if request.method == "POST"]
    assert paths == ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_opaque_item_comes_back_once_unchanged_and_in_place(
    crow: StartCrow, home: Path, place: Path, seed: int
) -> None:
    chance = random.Random(seed)
    (place / "README.md").write_text("# Nest\n" + "Twigs and string.\n" * 100)
    async with CheckingEndpoint(chance) as endpoint:
        write_settings(home, endpoint.base_url)
        turns = RandomTurns(lambda: crow(env=NO_MODEL), endpoint, place, chance)
        await turns.run(30)
    assert endpoint.faults == []
    assert endpoint.returned.total() > 50
    assert endpoint.plain.total() > 0


@pytest.mark.parametrize("wire", WIRES)
async def test_items_that_the_endpoint_no_longer_accepts_are_left_out_in_the_same_prompt(
    crow: StartCrow, home: Path, place: Path, wire: str
) -> None:
    async with CheckingEndpoint(random.Random(4)) as endpoint:
        write_settings(home, endpoint.base_url)
        model = next(name for name in MODELS if name.endswith(wire))
        async with crow(env={**NO_MODEL, "CROW_MODEL": model}) as agent:
            session = await opened(agent, place)
            for _ in range(3):
                assert await agent.prompt(session, "Go on.") == {"stopReason": "end_turn"}
            endpoint.is_forgetful = True
            assert await agent.prompt(session, "And now?") == {"stopReason": "end_turn"}
    assert endpoint.faults == []
