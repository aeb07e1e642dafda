"""First use: a session opened before anything was configured, and settings made later."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import ROOT, StartCrow
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.fork_server import command

NOTHING = {"CROW_MODEL": None}


async def failed(awaitable: Any) -> tuple[int, str]:
    """Code and message of the error that is expected."""
    with pytest.raises(RpcError) as raised:
        await awaitable
    return raised.value.code, raised.value.message


async def opened(agent: CrowProcess, place: Path) -> str:
    await agent.initialize()
    return await agent.new_session(place)


def model_option(options: list[dict[str, Any]]) -> tuple[str, list[str]] | None:
    """The current model and the offered ones; None without that option."""
    found = next((option for option in options if option["id"] == "model"), None)
    return None if found is None else (found["currentValue"], [one["value"] for one in found["options"]])


def settings(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text, "utf-8")


def with_endpoint(endpoint: FakeEndpoint, text: str = "") -> str:
    return f'{text}\n[model]\nbase_url = "{endpoint.base_url}"\napi_key = "zz-key-0123456789"\n'


async def log_in(home: Path, *answers: str) -> None:
    """Run `crow login` in its own process."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home)}
    typed = "".join(f"{answer}\n" for answer in answers)
    done = await asyncio.to_thread(
        subprocess.run,
        [*command(), "login"],
        input=typed,
        env=env,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def model_told(agent: CrowProcess, model: str) -> int:
    """Wait until the client is told that this is the current model: by an update, or by the answer that opened the
    session, if the endpoint had listed its models by then."""

    def wanted(message: dict[str, Any]) -> bool:
        told = message.get("params", {}).get("update") or message.get("result") or {}
        return (model_option(told.get("configOptions") or []) or ("",))[0] == model

    return await agent.wait_for(wanted)


async def test_a_session_opened_before_login_works_afterwards_in_the_same_process(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(env=NOTHING) as agent:
        session = await opened(agent, place)
        code, words = await failed(agent.prompt(session, "hello"))
        assert (code, "Crow has no model to ask" in words) == (-32000, True)
        assert (await failed(agent.request("authenticate", {"methodId": "configured"})))[0] == -32000
        await log_in(home, endpoint.base_url, "sk-login-0123456789", "fake-model")
        assert await agent.request("authenticate", {"methodId": "configured"}) == {}
        assert (await agent.prompt(session, "hello"))["stopReason"] == "end_turn"
        assert agent.text(session).endswith("Hello there.")
        await model_told(agent, "fake-model")
        second = await agent.request("session/new", {"cwd": str(place), "mcpServers": []})
        assert model_option(second["configOptions"]) == ("fake-model", ["fake-model"])
    asked = endpoint.asked[-1]
    assert (asked.body["model"], asked.headers["authorization"]) == ("fake-model", "Bearer sk-login-0123456789")


async def test_a_session_opened_before_login_works_afterwards_in_another_process(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(env=NOTHING) as agent:
        session = await opened(agent, place)
        await failed(agent.prompt(session, "hello"))
    await log_in(home, endpoint.base_url, "sk-login-0123456789", "fake-model")
    async with crow(env=NOTHING) as agent:
        await agent.initialize()
        loaded = await agent.load_session(session, place)
        assert model_option(loaded["configOptions"]) == ("fake-model", ["fake-model"])
        assert (await agent.prompt(session, "hello"))["stopReason"] == "end_turn"
    assert endpoint.asked[-1].body["model"] == "fake-model"


@pytest.mark.parametrize("how", ["set_config_option", "/model"])
async def test_a_model_offered_later_can_be_chosen_in_an_older_session(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, how: str
) -> None:
    async with crow(env=NOTHING) as agent:
        session = await opened(agent, place)
        await failed(agent.prompt(session, "hello"))
        settings(home, with_endpoint(endpoint, 'models = ["small", "large"]'))
        if how == "/model":
            await agent.prompt(session, "/model large")
            assert agent.text(session).endswith("The model is `large` from the next prompt on.")
        else:
            params = {"sessionId": session, "configId": "model", "value": "large"}
            answer = await agent.request("session/set_config_option", params)
            assert model_option(answer["configOptions"]) == ("large", ["small", "large"])
        assert (await agent.prompt(session, "hello"))["stopReason"] == "end_turn"
    assert endpoint.asked[-1].body["model"] == "large"


async def test_without_a_model_the_endpoints_models_are_offered_and_none_is_preselected(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.models = ["first", "second"]
    async with crow(endpoint=endpoint, env=NOTHING) as agent:
        session = await opened(agent, place)
        await model_told(agent, "none")
        code, words = await failed(agent.prompt(session, "hello"))
        assert (code, words.startswith("No model is set. Run `crow login`")) == (-32603, True)
        params = {"sessionId": session, "configId": "model", "value": "second"}
        answer = await agent.request("session/set_config_option", params)
        assert model_option(answer["configOptions"]) == ("second", ["first", "second"])
        assert (await agent.prompt(session, "hello"))["stopReason"] == "end_turn"
    assert [request.body["model"] for request in endpoint.asked] == ["second"]


async def test_a_model_can_be_typed_while_none_is_offered(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    endpoint.models = []
    async with crow(endpoint=endpoint, env=NOTHING) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "/model mine")
        assert (await agent.prompt(session, "hello"))["stopReason"] == "end_turn"
    assert endpoint.asked[-1].body["model"] == "mine"


async def test_a_repaired_config_file_applies_from_the_next_prompt(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    settings(home, "[model\n")
    async with crow(env={"CROW_MODEL": "offline"}) as agent:
        session = await opened(agent, place)
        assert "not valid TOML" in (await failed(agent.prompt(session, "write a.txt: one")))[1]
        settings(home, '[permissions]\ndeny = ["write_file"]\n')
        assert (await agent.prompt(session, "write a.txt: one"))["stopReason"] == "end_turn"
    assert not (place / "a.txt").exists()


async def test_an_unreadable_config_change_keeps_the_old_settings(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    settings(home, with_endpoint(endpoint, 'models = ["small"]'))
    async with crow(env=NOTHING) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
        settings(home, "[model\n")
        assert (await agent.prompt(session, "two"))["stopReason"] == "end_turn"
        settings(home, with_endpoint(endpoint, 'models = ["small"]').replace("zz-key", "zz-new"))
        assert (await agent.prompt(session, "three"))["stopReason"] == "end_turn"
    keys = [request.headers["authorization"] for request in endpoint.asked]
    assert keys == ["Bearer zz-key-0123456789"] * 2 + ["Bearer zz-new-0123456789"]
    assert "The previous settings stay in effect" in (home / "crow.log").read_text()


async def test_a_key_added_later_is_masked_in_the_recording(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    async with crow(env={**NOTHING, "CROW_TRACE": str(trace)}) as agent:
        session = await opened(agent, place)
        settings(home, with_endpoint(endpoint, 'models = ["small"]'))
        await agent.prompt(session, "hello")
        await agent.prompt(session, "my key is zz-key-0123456789")
    recorded = trace.read_text()
    assert "my key is …" in recorded
    assert "zz-key-0123456789" not in recorded


@pytest.mark.parametrize(("client", "code"), [("CodeCompanion.nvim", -32603), ("zed", -32000), ("", -32000)])
async def test_the_sentence_of_the_first_run_is_whole_in_message_and_details(
    crow: StartCrow, place: Path, client: str, code: int
) -> None:
    """Toad and acpx show only the details, Zed and the chat of CodeCompanion only the message. For every error but an
    internal one, CodeCompanion also shows the object with both. It shows no sentence if it cannot authenticate."""
    async with crow(env=NOTHING) as agent:
        info = {"clientInfo": {"name": client, "version": "1.0.0"}} if client else {}
        files = {"fs": {"readTextFile": True, "writeTextFile": True}}
        await agent.request("initialize", {"protocolVersion": 1, "clientCapabilities": files, **info})
        if client == "CodeCompanion.nvim":
            assert await agent.request("authenticate", {"methodId": "configured"}) == {}
        session = await agent.new_session(place)
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "hello")
        error = raised.value
        assert (error.code, "Crow has no model to ask" in error.message) == (code, True)
        assert error.data == {"details": error.message, "authRequired": True}
        with pytest.raises(RpcError) as raised:
            await agent.load_session("crow-none", place)
        assert raised.value.code == (code if client == "CodeCompanion.nvim" else -32002)
