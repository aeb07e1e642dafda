"""A session of another tool is imported, shown by the real process, and prompted on with a valid request."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.support import foreign_sessions as foreign
from tests.support.fake_endpoint import FakeEndpoint, text
from tests.support.fork_server import command


def imported(source: Path, home: Path) -> str:
    """Import a session with the real command; its id."""
    line = [*command(), "sessions", "import", str(source), "--json"]
    env = {"PATH": os.environ["PATH"], "CROW_HOME": str(home)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    return str(json.loads(done.stdout)["session"])


@pytest.mark.long
@pytest.mark.parametrize("name", foreign.WRITERS)
async def test_an_imported_session_is_shown_and_prompted_on(
    name: str, crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, tmp_path: Path
) -> None:
    source = foreign.WRITERS[name](tmp_path / "other")
    session = imported(source, home)
    endpoint.script(text("Seven it is."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        (listed,) = (await agent.request("session/list", {}))["sessions"]
        assert (listed["sessionId"], listed["title"], listed["cwd"]) == (session, "Eggs", foreign.CWD)
        await agent.load_session(session, place)
        shown = agent.updates(session)
        calls = [(one["title"], one["kind"]) for one in shown if one["sessionUpdate"] == "tool_call"]
        assert [kind for _, kind in calls] == ["read", "execute"]
        replayed = json.dumps(shown)
        for words in (foreign.PROMPT, foreign.THOUGHT, foreign.PLAN, foreign.READ[3], foreign.ANSWER, foreign.LAST):
            assert words in replayed
        assert await agent.prompt(session, "Are you sure?") == {"stopReason": "end_turn"}
    body = endpoint.asked[-1].body
    assert faults(body["messages"]) == []
    sent = json.dumps(body["messages"])
    assert "Are you sure?" in sent
    assert foreign.LAST in sent
    assert (foreign.SUMMARY in sent) is (name != "openai-json")
    assert (foreign.PROMPT in sent) is (name == "openai-json")  # what was compacted stays so
    assert "You count eggs." not in sent  # the system message is crow's


def faults(messages: list[dict[str, Any]]) -> list[str]:
    """Why an endpoint would refuse these messages."""
    found = [] if messages[0]["role"] == "system" else ["no system message first"]
    waiting: list[str] = []
    for last, message in zip([{"role": "system"}, *messages], messages, strict=False):
        role = message["role"]
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                found.append(f"a result of an unknown call: {message}")
            waiting = [one for one in waiting if one != message["tool_call_id"]]
            continue
        if waiting:
            found.append(f"no result of {waiting}")
        if role == "user" and last["role"] == "user":
            found.append(f"two user messages in a row: {message}")
        waiting = [call["id"] for call in message.get("tool_calls", ())]
    return found + [f"no result of {waiting}"] * bool(waiting)
