"""The real crow process behind the published LiteLLM proxy: plain answers, tool calls, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.conftest import MOCKS, StartCrow
from tests.stdio.conftest import ROOT
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, calls, text
from tests.support.messages_endpoint import MessagesEndpoint, says


def configure(home: Path, *model: str, wire: str = "messages") -> None:
    """Let crow speak a wire with a model."""
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text("\n".join(("[model]", f'wire = "{wire}"', *model, "")), "utf-8")


def shown(agent: CrowProcess, session: str) -> str:
    return "".join(update["content"]["text"] for update in agent.updates(session, "agent_message_chunk"))


async def test_a_plain_answer_arrives_whole(crow: StartCrow, place: Path, environment: dict[str, str]) -> None:
    async with crow(env={**environment, "CROW_MODEL": "plain"}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(2):
            assert (await agent.prompt(session, "Hi"))["stopReason"] == "end_turn"
        assert shown(agent, session) == MOCKS["plain"] * 2
        assert agent.updates(session, "usage_update")[-1]["used"] > 0


async def test_tool_calls_streamed_through_the_gateway_run_and_their_results_go_back(
    crow: StartCrow, place: Path, environment: dict[str, str], upstream: FakeEndpoint
) -> None:
    before = len(upstream.asked)
    upstream.script(
        calls(("read_file", {"path": "README.md"}), ("list_files", {}), say="Looking."), text("It is ", "a nest.")
    )
    async with crow(env={**environment, "CROW_MODEL": "tools"}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "What is this?"))["stopReason"] == "end_turn"
        assert shown(agent, session) == "Looking.It is a nest."
        finished = [update["status"] for update in agent.updates(session, "tool_call_update")]
        assert finished.count("completed") == 2
        second = upstream.asked[before + 1].body["messages"]
        results = [message["content"] for message in second if message["role"] == "tool"]
        assert "Twigs and string." in results[0]
        assert [message["role"] for message in second] == ["system", "user", "assistant", "tool", "tool"]


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("limited", "is rate-limiting requests: litellm.RateLimitError"),
        ("broken", "has trouble: litellm.InternalServerError"),
        ("overflowing", 'too long for the model "overflowing"'),
        ("filtered", "content filter"),
        ("nowhere", "It offers"),
    ],
)
async def test_an_error_of_the_gateway_is_named_and_the_session_goes_on(
    crow: StartCrow, place: Path, environment: dict[str, str], model: str, words: str
) -> None:
    async with crow(env={**environment, "CROW_MODEL": model}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        with pytest.raises(RpcError) as failed:
            await agent.prompt(session, "Hi")
        assert words in str(failed.value)
        await agent.request("session/set_config_option", {"sessionId": session, "configId": "model", "value": "plain"})
        assert (await agent.prompt(session, "And now?"))["stopReason"] == "end_turn"
        assert shown(agent, session).endswith(MOCKS["plain"])


def test_doctor_and_models_speak_with_the_gateway(
    home: Path, config: Path, environment: dict[str, str], upstream: FakeEndpoint
) -> None:
    upstream.script(text("rea", "dy"), calls(("report_word", {"word": "ready"})))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_MODEL": "tools"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "crow", *arguments]
        return subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=60, cwd=home)

    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "48,000 tokens" in done.stdout
    assert {line.split("\t")[0] for line in run("models").stdout.splitlines()} == {*MOCKS, "tools", "claude"}


async def test_claude_behind_the_gateway_gets_its_thoughts_back_on_the_messages_api(
    crow: StartCrow, home: Path, place: Path, environment: dict[str, str], claude: MessagesEndpoint
) -> None:
    configure(home, 'name = "claude"', 'thought_level = "medium"')
    read = {"call": "read_file", "json": ['{"path": "README.md"}']}
    claude.answer(
        says({"think": ["Hm."]}, {"text": ["Looking."]}, read), says({"think": ["So."]}, {"text": ["It is a nest."]})
    )
    async with crow(env=environment | {"CROW_MODEL": None}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "What is this?"))["stopReason"] == "end_turn"
        assert (await agent.prompt(session, "And now?"))["stopReason"] == "end_turn"
        assert shown(agent, session) == "Looking.It is a nest.Hello there."
    assert claude.refused == []
    assert claude.missing(claude.asked[-1].sent) == []
    assert '"cache_control"' in claude.asked[-1].raw.decode()
    assert claude.usages[-1]["cache_read_input_tokens"] > 0


@pytest.mark.parametrize("wire", ["responses", "messages"])
async def test_models_of_other_providers_answer_on_the_other_wires(
    crow: StartCrow, home: Path, place: Path, environment: dict[str, str], upstream: FakeEndpoint, wire: str
) -> None:
    configure(home, 'name = "tools"', wire=wire)
    upstream.wires = ("chat", "responses")  # the gateway translates to either
    before = len(upstream.asked)
    upstream.script(
        calls(("read_file", {"path": "README.md"}), ("list_files", {}), say="Looking."), text("It is ", "a nest.")
    )
    async with crow(env=environment | {"CROW_MODEL": None}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "What is this?"))["stopReason"] == "end_turn"
        assert shown(agent, session) == "Looking.It is a nest."
        second = upstream.asked[before + 1].body["messages"]
        assert "Twigs and string." in json.dumps([each for each in second if each["role"] == "tool"])
