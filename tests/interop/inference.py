"""The real crow process with the published server of llama.cpp: streams, tool calls, refusals, limits, usage.

It was chosen because it is the most used inference server that one package installs in seconds, without a compiler or
a download of weights (llama_server.py). It tokenises, parses calls and counts by itself, and publishes its counts.
"""

from __future__ import annotations

import base64
import os
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import KEY, WINDOW, RunLlama, StartCrow, free_port
from tests.stdio.conftest import ROOT
from tests.support.acp_client import RpcError

PLAIN = "A plain answer from a real server — naïve, 日."
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def served(url: str, **more: str) -> dict[str, str]:
    """The environment of a crow that uses the server at `url`."""
    return {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY, "CROW_MODEL": "tiny"} | more


def configure(home: Path, toml: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(toml, "utf-8")


def stored(home: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(home / "crow.db")) as sql:
        return sql.execute(query).fetchall()


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the server counted since it started, in tokens."""

    prompt: int
    cached: int
    answer: int

    @classmethod
    def read(cls, url: str) -> Ledger:
        request = urllib.request.Request(
            url.removesuffix("/v1") + "/metrics", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        counts = dict(line.removeprefix("llamacpp:").split() for line in lines if not line.startswith("#"))
        names = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
        return cls(*(int(counts[name]) for name in names))

    def usage_since(self, before: Ledger) -> dict[str, int]:
        """What a client should have counted since `before`."""
        cached = self.cached - before.cached
        counts = {"inputTokens": self.prompt - before.prompt + cached, "outputTokens": self.answer - before.answer}
        total = {"totalTokens": sum(counts.values())}
        return total | counts | {"cachedReadTokens": cached}


async def test_answers_arrive_whole_and_their_usage_equals_the_counts_of_the_server(
    crow: StartCrow, place: Path, llama: str
) -> None:
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for turn in range(3):
            before = Ledger.read(llama)
            call = await agent.start_prompt(session, f"Hello, number {turn}.")
            assert await call.result() == {"stopReason": "end_turn"}
            assert agent.usage(call) == Ledger.read(llama).usage_since(before)
        assert agent.usage(call)["cachedReadTokens"] > 0.9 * agent.usage(call)["inputTokens"]
        assert agent.text(session) == PLAIN * 3
        size = agent.updates(session, "usage_update")[-1]
        assert (size["size"], size["used"]) == (WINDOW, agent.usage(call)["totalTokens"])


@pytest.mark.parametrize(("prompt", "said", "tools"), [("Read it.", "Looking.\n", 1), ("Read both.", "", 2)])
async def test_calls_that_the_server_parses_run_and_their_results_go_back(
    crow: StartCrow, place: Path, llama: str, prompt: str, said: str, tools: int
) -> None:
    (place / "zzz Twigs and string.").touch()  # the last result has these words, too
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        before = Ledger.read(llama)
        call = await agent.start_prompt(session, prompt)
        assert await call.result() == {"stopReason": "end_turn"}
        assert agent.usage(call) == Ledger.read(llama).usage_since(before)
        assert agent.text(session) == f"{said}It is a nest."
        finished = [update["status"] for update in agent.updates(session, "tool_call_update")]
        assert finished.count("completed") == tools


@pytest.mark.parametrize("wire", ["responses", "messages"])
@pytest.mark.parametrize(("prompt", "said", "tools"), [("Read it.", "Looking.\n", 1), ("Read both.", "", 2)])
async def test_calls_thoughts_and_usage_arrive_on_the_other_wires(
    crow: StartCrow, home: Path, place: Path, llama: str, wire: str, prompt: str, said: str, tools: int
) -> None:
    configure(home, f'[model]\nname = "tiny"\nwire = "{wire}"\n')
    (place / "zzz Twigs and string.").touch()  # the last result has these words, too
    async with crow(env=served(llama) | {"CROW_MODEL": ""}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        before = Ledger.read(llama)
        call = await agent.start_prompt(session, prompt)
        assert await call.result() == {"stopReason": "end_turn"}
        assert agent.usage(call) == Ledger.read(llama).usage_since(before)
        assert agent.text(session) == f"{said}It is a nest."
        finished = [update["status"] for update in agent.updates(session, "tool_call_update")]
        assert finished.count("completed") == tools
        assert (await agent.prompt(session, "Think."))["stopReason"] == "end_turn"
        assert agent.text(session).endswith("Because of the twigs.")
        assert agent.text(session, "agent_thought_chunk").strip() == "The user wants to know why."
        assert (await agent.prompt(session, "Hello."))["stopReason"] == "end_turn"
        assert agent.text(session).endswith(PLAIN)


async def test_sessions_at_once_share_the_server_and_each_gets_its_own_usage(
    crow: StartCrow, place: Path, llama: str
) -> None:
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        prompts = ("Hello.", "Read it.", "Think.", "Hello again.")
        sessions = [await agent.new_session(place) for _ in prompts]
        before = Ledger.read(llama)
        calls = [await agent.start_prompt(*each) for each in zip(sessions, prompts, strict=True)]
        assert [await call.result() for call in calls] == [{"stopReason": "end_turn"}] * 4
        used = [agent.usage(call) for call in calls]
        assert {name: sum(each[name] for each in used) for name in used[0]} == Ledger.read(llama).usage_since(before)
        said = [PLAIN, "Looking.\nIt is a nest.", "Because of the twigs.", PLAIN]
        assert [agent.text(session) for session in sessions] == said


@pytest.mark.parametrize("level", ["high", "off"])
async def test_a_thought_level_does_not_make_the_server_refuse_prompts(
    crow: StartCrow, place: Path, llama: str, level: str
) -> None:
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        option = {"sessionId": session, "configId": "thought_level", "value": level}
        await agent.request("session/set_config_option", option)
        assert await agent.prompt(session, "Hello.") == {"stopReason": "end_turn"}
        assert agent.text(session) == PLAIN


async def test_reasoning_is_shown_as_a_thought(crow: StartCrow, place: Path, llama: str) -> None:
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(2):  # the thought goes back to the server
            await agent.prompt(session, "Think.")
        assert agent.text(session, "agent_thought_chunk").split("\n") == ["The user wants to know why."] * 2 + [""]
        assert agent.text(session) == "Because of the twigs." * 2


async def test_a_cancelled_answer_ends_at_the_server_too(crow: StartCrow, place: Path, llama: str) -> None:
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "Go on and on.")
        await agent.wait_for_text(session, "hop skip jump hop")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        # the server answers one request at a time
        assert await agent.prompt(session, "Hello.") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith(PLAIN)


async def test_an_answer_without_end_is_stopped(crow: StartCrow, home: Path, place: Path, llama: str) -> None:
    configure(home, "[models.tiny]\nmax_output_tokens = 60\n")
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "Go on and on.")
        assert await call.result() == {"stopReason": "max_tokens"}
        assert agent.usage(call)["outputTokens"] == 60
        assert agent.text(session) == "hop skip jump " * 20


async def test_a_long_conversation_is_compacted_before_the_server_refuses_it(
    crow: StartCrow, home: Path, place: Path, llama: str
) -> None:
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        before = Ledger.read(llama)
        calls = [await agent.start_prompt(session, f"Hello. {'nest ' * 600}") for _ in range(8)]
        assert [await call.result() for call in calls] == [{"stopReason": "end_turn"}] * 8
        totals = [agent.usage(call)["totalTokens"] for call in calls]
        assert sum(totals) == Ledger.read(llama).usage_since(before)["totalTokens"]
        assert agent.text(session).count(PLAIN) == 8
    query = (
        "SELECT json_extract(body, '$.method'), json_extract(body, '$.summary') FROM entries WHERE kind = 'checkpoint'"
    )
    assert set(stored(home, query)) == {("prefix", "## Goal\nBuild a nest.\n## Next\nFind twigs.")}


async def test_a_server_that_comes_back_with_a_smaller_window_is_believed(
    crow: StartCrow, home: Path, place: Path, run_llama: RunLlama
) -> None:
    port = free_port()
    async with crow(env=served(f"http://127.0.0.1:{port}/v1")) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        with run_llama(port=port):
            for _ in range(3):
                await agent.prompt(session, f"Hello. {'nest ' * 900}")
        with run_llama(port=port, n_ctx=8192):
            assert await agent.prompt(session, "Hello again.") == {"stopReason": "end_turn"}
            assert agent.text(session).count(PLAIN) == 4
    query = "SELECT json_extract(body, '$.reason') FROM entries WHERE kind = 'checkpoint' ORDER BY id DESC LIMIT 1"
    assert stored(home, query) == [("overflow",)]


async def test_a_prompt_that_fits_no_window_is_refused_in_words_and_the_session_goes_on(
    crow: StartCrow, place: Path, run_llama: RunLlama
) -> None:
    with run_llama(n_ctx=2048) as url:
        async with crow(env=served(url)) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            with pytest.raises(RpcError) as failed:
                await agent.prompt(session, "Hello.")
            assert "exceeds the available context size (2048 tokens)" in str(failed.value)
            assert "start the server with a larger window" in str(failed.value)


@pytest.mark.parametrize(
    ("config", "env", "words"),
    [
        ("", {"OPENAI_API_KEY": "sk-wrong"}, "refused the key: Invalid API Key"),
        ("[models.tiny.extra_body]\nlogprobs = true\n", {}, "logprobs is not supported with tools + stream"),
        ("[models.tiny.extra_body]\ntop_k = 'x'\n", {}, "Field 'top_k'"),
        ('[models.tiny.extra_body.response_format]\ntype = "nonsense"\n', {}, "nonsense"),
    ],
)
async def test_a_refusal_is_told_in_the_words_of_the_server(
    crow: StartCrow, home: Path, place: Path, llama: str, config: str, env: dict[str, str], words: str
) -> None:
    configure(home, config)
    async with crow(env=served(llama, **env)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        with pytest.raises(RpcError) as failed:
            await agent.prompt(session, "Hello.")
        assert words in str(failed.value)


async def test_an_image_that_the_server_refuses_is_left_out(crow: StartCrow, place: Path, llama: str) -> None:
    image = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(PIXEL).decode()}
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        prompt = [{"type": "text", "text": "Hello."}, image]
        answer = await agent.request("session/prompt", {"sessionId": session, "prompt": prompt})
        assert answer["stopReason"] == "end_turn"
        assert agent.text(session) == PLAIN
        await agent.prompt(session, "/context")
        assert "image input is not supported" in agent.text(session)


async def test_odd_tools_of_an_mcp_server_do_not_make_the_server_refuse_prompts(
    crow: StartCrow, place: Path, llama: str
) -> None:
    arguments = [str(ROOT / "tests/tools/servers/various.py"), "faulty"]
    server = {"name": "odd", "command": sys.executable, "args": arguments, "env": []}
    async with crow(env=served(llama)) as agent:
        await agent.initialize()
        session = await agent.new_session(place, mcpServers=[server])
        assert await agent.prompt(session, "Hello.") == {"stopReason": "end_turn"}
        assert agent.text(session) == PLAIN


async def test_a_server_without_templates_is_named_as_unable_to_call_tools(
    crow: StartCrow, place: Path, run_llama: RunLlama
) -> None:
    with run_llama(use_jinja=False) as url:
        async with crow(env=served(url)) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            with pytest.raises(RpcError) as failed:
                await agent.prompt(session, "Hello.")
            assert "start the server with this flag" in str(failed.value)
            assert agent.updates(session, "agent_message_chunk") == []  # crow did not try again


def test_doctor_and_models_speak_with_the_server(home: Path, llama: str) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home)} | served(llama)
    home.mkdir()

    def run(*arguments: str, model: str = "tiny") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "crow", *arguments]
        more = {"CROW_MODEL": model}
        return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=60, cwd=home)

    unknown = run("doctor", model="other")  # this server answers all the same
    assert "the endpoint does not list other" in unknown.stdout
    assert "Did you mean tiny?" in unknown.stdout
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "16,384 tokens" in done.stdout
    assert run("models").stdout.splitlines() == ["tiny\t16384\t\t"]
