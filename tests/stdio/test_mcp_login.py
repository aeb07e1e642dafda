"""Logins to MCP servers in the real process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from tests.stdio.conftest import StartCrow
from tests.stdio.test_tools import configured, ended, shown
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint
from tests.support.fork_server import command
from tests.support.oauth_server import OAuthServer, oauth_server, visit


def settings(server: OAuthServer) -> str:
    return f'[mcp_servers.web]\nurl = "{server.url}"\n[permissions]\nallow = ["web__*"]\n'


def places_of(text: str, folder: Path) -> list[str]:
    """The files below `folder` that contain a text."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return sorted(str(file.relative_to(folder).parts[0]) for file in files if text.encode() in file.read_bytes())


async def test_a_login_through_the_editor_leaves_its_tokens_in_one_file(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        visit(params["url"])
        return {"action": "accept"}

    with oauth_server() as server:
        configured(home, settings(server))
        endpoint.script(fake.calls(("web__whoami", {})), fake.text("Thanks."))
        trace = {"CROW_TRACE": str(home / "trace.jsonl"), "CROW_LOG": "debug"}
        async with crow(endpoint=endpoint, answers={"elicitation/create": answer}, env=trace) as agent:
            await agent.initialize(elicitation={"url": {}})
            session = await agent.new_session(place)
            with anyio.fail_after(60):
                while "ready" not in shown(agent.updates(session)):
                    await agent.prompt(session, "/mcp")
            await agent.prompt(session, "Who am I?")
            updates = agent.updates(session)
            completed = [line for line in agent.log if line.message.get("method") == "elicitation/complete"]
        token = next(iter(server.valid))
    ((status, text),) = ended(updates)
    assert (status, text.startswith("you are "), token in text) == ("completed", True, False)
    assert len(asked) == len(completed) == 1
    assert asked[0]["mode"] == "url"
    assert completed[0].message["params"] == {"elicitationId": asked[0]["elicitationId"]}
    assert await anyio.to_thread.run_sync(places_of, token, home) == ["mcp-logins"]
    assert token not in str([request.body for request in endpoint.requests])


async def test_an_editor_that_opens_no_pages_is_told_the_command(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    with oauth_server() as server:
        configured(home, settings(server))
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize(elicitation={"form": {}})
            session = await agent.new_session(place)
            with anyio.fail_after(60):
                while "failed" not in shown(agent.updates(session)):
                    await agent.prompt(session, "/mcp")
            assert "it needs you to log in; run `crow mcp login web`" in shown(agent.updates(session))


async def test_crow_run_names_the_command(endpoint: FakeEndpoint, home: Path, place: Path) -> None:
    endpoint.script(fake.calls(("web__whoami", {})), fake.text("I could not."))
    with oauth_server() as server:
        configured(home, settings(server))
        env = {
            "PATH": os.environ["PATH"],
            "CROW_HOME": str(home),
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": "sk-test-0123456789",
            "CROW_MODEL": "fake-model",
        }
        argv = [*command(), "run", "Who am I?"]
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(argv, env=env, cwd=place, capture_output=True, text=True, timeout=120)
        )
    assert "it needs you to log in; run `crow mcp login web`" in done.stderr + done.stdout
