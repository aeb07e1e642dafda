"""Kinds of subagents in the real process: offered, asked about, restricted, resumed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, allow_once, reject_once
from tests.support.fake_endpoint import FakeEndpoint, Reply

REVIEWER = "---\ndescription: Reviews a change\ntools: Read, Grep\nmodel: small\nmode: plan\n---\nLook for twigs.\n"


def write_agent(folder: Path, name: str, text: str) -> Path:
    """Writes an agent file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.md"
    path.write_text(text)
    return path


def task(**arguments: object) -> Reply:
    """An answer that gives a task to a subagent."""
    return fake.calls(("task", {"description": "Look", "prompt": "Look into it", **arguments}))


def task_spec(body: Any) -> dict[str, Any]:
    """The tool `task` in a request."""
    (function,) = [tool["function"] for tool in body["tools"] if tool["function"]["name"] == "task"]
    return dict(function)


def names_of_tools(body: Any) -> list[str]:
    return [tool["function"]["name"] for tool in body["tools"]]


def answers(body: Any) -> list[str]:
    """The results of tools in a request."""
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


def task_id(body: Any) -> str:
    return str(answers(body)[-1]).rpartition("resume=")[2].rstrip("]")


def children(home: Path) -> list[tuple[Any, ...]]:
    """The mode, model and kind of each subagent."""
    with sqlite3.connect(home / "crow.db") as database:
        rows = database.execute(
            "SELECT mode, model, config FROM sessions WHERE parent_id IS NOT NULL ORDER BY conversation"
        ).fetchall()
    return [(mode, model, json.loads(config).get("agent", {}).get("name")) for mode, model, config in rows]


async def opened(agent: CrowProcess, place: Path, mode: str = "ask") -> str:
    await agent.initialize()
    session = await agent.new_session(place)
    await agent.request("session/set_mode", {"sessionId": session, "modeId": mode})
    return session


def asked(agent: CrowProcess) -> list[dict[str, Any]]:
    """The permission requests so far."""
    method = "session/request_permission"
    return [each.message["params"] for each in agent.log if each.message.get("method") == method]


async def test_a_kind_of_the_user_sets_prompt_tools_model_and_mode_also_when_resumed(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    file = write_agent(home / "agents", "reviewer", REVIEWER)
    (home / "config.toml").write_text("[models.small]\ncontext_window = 100000\n")
    (place / "AGENTS.md").write_text("Be kind.")
    denied = fake.calls(("write_file", {"path": "a.txt", "content": "x"}))
    endpoint.script(task(agent="reviewer"), denied, fake.text("No twigs."), fake.text("Reviewed."))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place, "auto")
        assert await agent.prompt(session, "review it") == {"stopReason": "end_turn"}
        first, child, second, last = (request.body for request in endpoint.asked)
        offered = "The argument agent chooses a kind of subagent:\n- reviewer (model small): Reviews a change"
        assert task_spec(first)["description"].endswith(offered)
        assert (child["model"], names_of_tools(child)) == ("small", ["read_file", "grep"])
        assert child["messages"][0]["content"].endswith("\n\nLook for twigs.")
        assert "Mode plan" in str(child["messages"])
        assert answers(second) == ['This task has no tool "write_file". It has: read_file, grep.']
        assert (last["model"], answers(last)[0].partition("\n")[0]) == ("fake-model", "No twigs.")
        assert children(home) == [("plan", "small", "reviewer")]
        file.unlink()
        endpoint.script(task(resume=task_id(last)), denied, fake.text("Still none."), fake.text("Done."))
        await agent.prompt(session, "again")
        changed, child, second, last = (request.body for request in endpoint.asked[4:])
        assert "agent" not in task_spec(changed)["parameters"]["properties"]
        assert (child["model"], names_of_tools(child)) == ("small", ["read_file", "grep"])
        assert child["messages"][0]["content"].endswith("\n\nLook for twigs.")
        assert answers(second)[-1].startswith('This task has no tool "write_file"')
        assert children(home) == [("plan", "small", "reviewer")]
        assert asked(agent) == []
        assert not (place / "a.txt").exists()


async def test_a_kind_of_the_workspace_is_asked_about_once_for_each_content(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    text = "---\ndescription: Theirs\n---\nTheir way."
    file = write_agent(place / ".claude/agents", "theirs", text)
    async with crow(endpoint=endpoint, answers={"session/request_permission": reject_once}) as agent:
        session = await opened(agent, place, "auto")
        endpoint.script(task(agent="theirs"), fake.text("Not allowed."))
        await agent.prompt(session, "do it")
        assert answers(endpoint.asked[-1].body)[0].startswith("The user did not allow this call.")
        (question,) = asked(agent)
        assert "Their way." in json.dumps(question["toolCall"]["content"])
        assert question["toolCall"]["title"] == "Task for theirs from this workspace: Look"
        assert {option["kind"] for option in question["options"]} == {"allow_once", "reject_once"}
        assert children(home) == []
        agent.answers["session/request_permission"] = allow_once
        for times, words in ((2, "Their way."), (2, "Their way."), (3, "Another way.")):
            file.write_text(text.replace("Their way.", words))
            endpoint.script(task(agent="theirs"), fake.text("Did it."), fake.text("Done."))
            await agent.prompt(session, "do it")
            assert len(asked(agent)) == times
            assert endpoint.asked[-2].body["messages"][0]["content"].endswith(words)
    # The permission belongs to the session.
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        endpoint.script(task(agent="theirs"), fake.text("Did it."), fake.text("Done."))
        await agent.prompt(session, "do it")
        assert asked(agent) == []
        other = await agent.new_session(place)
        endpoint.script(task(agent="theirs"), fake.text("Did it."), fake.text("Done."))
        await agent.prompt(other, "do it")
        assert len(asked(agent)) == 1


async def test_a_mode_can_only_narrow_what_the_session_may_do(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    for mode in ("plan", "ask", "accept-edits", "auto"):
        write_agent(home / "agents", mode, f"---\ndescription: x\nmode: {mode}\n---\nx")
    writing = fake.calls(("write_file", {"path": "a.txt", "content": "x"}))
    expected = {
        ("ask", "auto"): ("ask", 1),
        ("ask", "plan"): ("plan", 0),
        ("plan", "auto"): ("plan", 0),
        ("auto", "ask"): ("ask", 1),
        ("auto", "accept-edits"): ("accept-edits", 0),
        ("accept-edits", "auto"): ("accept-edits", 0),
    }
    async with crow(endpoint=endpoint) as agent:
        for (mode, kind), (effective, questions) in expected.items():
            (place / "a.txt").unlink(missing_ok=True)
            before = len(asked(agent))
            session = await opened(agent, place, mode)
            endpoint.script(task(agent=kind), writing, fake.text("Wrote it."), fake.text("Done."))
            await agent.prompt(session, "do it")
            assert (children(home)[-1][0], len(asked(agent)) - before) == (effective, questions)
            assert (place / "a.txt").exists() is (effective != "plan")


async def test_a_denied_file_is_not_offered_and_a_missing_model_or_tool_is_reported(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    for name in ("open", "hidden"):
        write_agent(place / ".agents/agents", name, f"---\ndescription: {name}\nmodel: sonnet\n---\nx")
    write_agent(home / "agents", "tooled", "---\ndescription: tooled\ntools: db__*\n---\nx")
    broken = write_agent(home / "agents", "broken", "---\ndescription: broken\nmode: yolo\n---\nx")
    (home / "config.toml").write_text('[permissions]\ndeny = ["read_file(hidden.md)"]\n')
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        endpoint.script(task(agent="hidden"), task(agent="tooled"), task(agent="open"), fake.text("x"), fake.text("y"))
        await agent.prompt(session, "do it")
        first, second, third, child, _ = (request.body for request in endpoint.asked)
        assert task_spec(first)["description"].endswith("subagent:\n- open: open\n- tooled: tooled")
        assert answers(second) == ['task: there is no agent "hidden"; agents: open, tooled']
        assert (
            answers(third)[-1] == "task: the agent tooled may only use db__*, but none of these tools is available now"
        )
        assert child["model"] == "fake-model"
        since = len(agent.log)
        await agent.prompt(session, "/context")
        shown = agent.text(session, since=since)
    assert f"- `broken` (`{broken}`): not offered, because its mode is yolo; expected one of plan, ask," in shown
    assert "it uses the session's model, because `sonnet` is not among the models to choose from" in shown
    assert "hidden" not in shown


async def test_a_change_of_the_kinds_changes_requests_only_at_the_start_of_a_turn(
    crow: StartCrow, place: Path, home: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
        write_agent(home / "agents", "reviewer", REVIEWER)
        reading = fake.calls(("read_file", {"path": "README.md"}))
        endpoint.script(reading, fake.text("read"))
        await agent.prompt(session, "two")
        await agent.prompt(session, "three")
        tools = [json.dumps(request.body["tools"]) for request in endpoint.asked]
        assert tools[0] != tools[1] == tools[2] == tools[3]
        messages = [request.body["messages"] for request in endpoint.asked]
        assert messages[3][: len(messages[2])] == messages[2]
        since = len(agent.log)
        await agent.prompt(session, "/context")
        assert "the tools changed (changed: task)" in agent.text(session, since=since)
