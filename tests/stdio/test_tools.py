"""Tools in the real process: MCP servers, elicitation, permission rules, subagents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import RpcError, allow_once
from tests.support.fake_endpoint import FakeEndpoint

SERVERS = Path(__file__).parents[1] / "tools" / "servers"


def configured(home: Path, toml: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(toml, "utf-8")


def server(script: str, argument: str) -> str:
    return (
        f'command = "{sys.executable}"\nargs = ["-I", "-S", "{SERVERS / script}", "{argument}"]\n'
        "start_timeout_s = 300\n"
    )


def shown(updates: list[dict[str, Any]]) -> str:
    """All text of the agent."""
    return "".join(update["content"]["text"] for update in updates if update["sessionUpdate"] == "agent_message_chunk")


def ended(updates: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Status and text of the finished calls, in the order in which they were announced. Calls may run in parallel."""
    calls = [update for update in updates if update["sessionUpdate"] in ("tool_call", "tool_call_update")]
    found: dict[str, tuple[str, str] | None] = {call["toolCallId"]: None for call in calls}
    for call in calls:
        if call["status"] in ("completed", "failed"):
            text = "".join(part["content"].get("text", "") for part in call.get("content", ()))
            found[call["toolCallId"]] = call["status"], text
    return [each for each in found.values() if each is not None]


async def test_a_configured_server_asks_the_user_through_the_editor(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, f'[mcp_servers.nest]\n{server("various.py", "asks")}[permissions]\nallow = ["nest__*"]\n')
    asked: list[dict[str, Any]] = []

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return {"action": "accept", "content": {"name": "Ada"}}

    endpoint.script(fake.calls(("nest__ask", {})), fake.text("Thanks."))
    async with crow(endpoint=endpoint, answers={"elicitation/create": answer}) as agent:
        await agent.initialize(elicitation={"form": {}})
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "/mcp"))["stopReason"] == "end_turn"
        await agent.prompt(session, "go")
        updates = agent.updates(session)
    (question,) = asked
    assert (question["message"], question["mode"]) == ("nest: Who are you?", "form")
    assert question["toolCallId"] in {update.get("toolCallId") for update in updates}
    assert ended(updates) == [("completed", '{"action": "accept", "content": {"name": "Ada"}}')]
    assert "- **nest**: " in shown(updates)


async def test_a_missing_server_is_named_and_started_by_mcp_restart(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    configured(home, f'[mcp_servers.late]\ncommand = "{late}"\n')
    endpoint.script(fake.text("Without it."), fake.text("With it."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        assert f"MCP server late is not available: No such file or directory: {late}" in shown(agent.updates(session))
        late.write_text(f"#!/bin/sh\nexec {sys.executable} -I -S {SERVERS / 'tiny.py'}\n")
        late.chmod(0o755)
        await agent.prompt(session, "/mcp restart late")
        assert shown(agent.updates(session)).endswith("Restarted: late.\n\n- **late**: ready, 14 tools")
        await agent.prompt(session, "go on")
    offered = [[tool["function"]["name"] for tool in request.body["tools"]] for request in endpoint.asked]
    assert ["late__echo" in names for names in offered] == [False, True]


async def test_an_editor_without_forms_declines_with_a_message(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    def refuse(_params: dict[str, Any]) -> Any:
        raise RpcError(-32601, "Method not found")

    endpoint.script(fake.calls(("shell", {"command": "touch made"})), fake.text("I could not."))
    async with crow(endpoint=endpoint, answers={"session/request_permission": refuse}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        ((status, words),) = ended(agent.updates(session))
    assert status == "failed"
    assert "the user's editor cannot ask for it" in words
    assert "[permissions]" in words
    assert not (place / "made").exists()


async def test_configured_rules_allow_and_deny_without_asking(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, '[permissions]\nallow = ["shell(echo *)"]\ndeny = ["read_file(README.md)"]\n')
    steps = [
        ("shell", {"command": "echo hi"}),
        ("shell", {"command": "echo hi > made"}),
        ("read_file", {"path": "./sub/../README.md"}),
    ]
    endpoint.script(fake.calls(*steps), fake.text("ok"))
    asked: list[str] = []

    def reject(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params["toolCall"]["title"])
        return {"outcome": {"outcome": "selected", "optionId": "reject_once"}}

    async with crow(endpoint=endpoint, answers={"session/request_permission": reject}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        statuses = sorted(status for status, _ in ended(agent.updates(session)))
    assert asked == ["echo hi > made"]
    assert statuses == ["completed", "failed", "failed"]
    assert not (place / "made").exists()


async def test_a_task_is_one_call_and_its_calls_belong_to_the_session(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    endpoint.script(
        fake.calls(("task", {"description": "Read", "prompt": "Read README.md."})),
        fake.calls(("read_file", {"path": "README.md"}), prefix="sub"),
        fake.text("It is about a nest."),
        fake.text("A nest."),
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "go"))["stopReason"] == "end_turn"
        updates = agent.updates(session)
        titles = [update["title"] for update in updates if update["sessionUpdate"] == "tool_call"]
        listed = await agent.request("session/list", {})
        told = shown(updates)
    assert titles == ["Task: Read", "Read README.md"]
    assert [entry["sessionId"] for entry in listed["sessions"]] == [session]
    assert told == "A nest."
    assert "It is about a nest." in ended(updates)[0][1]


async def test_a_session_searches_brings_and_remembers_with_one_question_each(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return allow_once(params)

    endpoint.script(fake.text("The nest needs string."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        earlier = await agent.new_session(place)
        await agent.prompt(earlier, "What does the nest need?")
    search = ("recall", {"query": "nest", "scope": "workspace"})
    read = ("recall", {"entry": 1, "scope": "workspace"})
    endpoint.script(fake.calls(search), fake.calls(read), fake.text("String."), fake.text("A nest was planned."))
    async with crow(endpoint=endpoint, answers={"session/request_permission": allow}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "Look it up")
        (found, whole) = [words for _, words in ended(agent.updates(session))]
        await agent.prompt(session, f"/bring {earlier}")
        await agent.prompt(session, "/remember Use string.")
        await agent.prompt(session, "/remember --user Be brief.")
        since = len(agent.log)
        await agent.load_session(session, place)
        replayed = shown(agent.updates(session, since=since))
    assert [one["toolCall"]["title"] for one in asked] == [
        f"Recall `nest` from the sessions of {place}",
        "Remember in AGENTS.md",
        f"Remember in {home}/AGENTS.md",
    ]
    assert f'session {earlier} "What does the nest need?" in {place}' in found
    assert "(assistant, " in found
    assert "Entry 1 (user):\nWhat does the nest need?" in whole
    assert f"(`{earlier}`), as the model sees it:\n\nA nest was planned." in replayed
    assert (place / "AGENTS.md").read_text() == "- Use string.\n"
    assert (home / "AGENTS.md").read_text() == "- Be brief.\n"


async def test_a_prompt_brings_a_resource_and_a_server_uses_the_model(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    tables = f'[mcp_servers.docs]\n{server("library.py", "classic")}[permissions]\nallow = ["docs__*"]\n'
    configured(home, f"[limits]\nmcp_wait_s = 300\n{tables}")
    asked: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return {"outcome": {"outcome": "selected", "optionId": "allow_always"}}

    endpoint.script(
        fake.calls(("read_resource", {"server": "docs", "uri": "issue://me/7"}), ("docs__ask_model", {})),
        fake.text("It is a crow."),
        fake.calls(("docs__ask_model", {}), prefix="again"),
        fake.text("Still a crow."),
        fake.text("Done."),
    )
    async with crow(endpoint=endpoint, answers={"session/request_permission": allow}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "What is in @docs:docs:///a.md?")
        updates = agent.updates(session)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        replayed = agent.updates(session, "user_message_chunk")
    first, sampled, second, again, _ = endpoint.asked
    assert {"list_resources", "read_resource"} <= {tool["function"]["name"] for tool in first.body["tools"]}
    assert "# Notes\nsk-secret-0123456789" in str(first.body["messages"][-1]["content"]).replace("\\n", "\n")
    assert "tools" not in sampled.body
    assert [message["role"] for message in sampled.body["messages"]] == ["system", "user"]
    assert second.body["messages"][: len(first.body["messages"])] == first.body["messages"]
    assert "What is in" not in json.dumps(again.body)
    (question,) = asked
    (text,) = [part["content"]["text"] for part in question["toolCall"]["content"]]
    assert text.startswith("MCP server docs sends this request to your model and gets the answer:\n\n```\n")
    assert [option["name"] for option in question["options"]][1] == (
        "Always allow requests of `docs` to your model in this directory and session"
    )
    texts = [json.loads(text)["answer"]["content"]["text"] for status, text in ended(updates) if text.startswith("{")]
    assert texts == ["It is a crow.", "Still a crow."]
    assert ("completed", "    Issue 7") in ended(updates)
    assert [block["content"]["type"] for block in replayed] == ["text", "resource"]


async def test_a_server_learns_of_directories_that_are_added_when_a_session_is_opened_again(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, tmp_path: Path
) -> None:
    configured(home, f'[mcp_servers.nest]\n{server("various.py", "where")}[permissions]\nallow = ["nest__*"]\n')
    added = tmp_path / "added"
    added.mkdir()
    endpoint.script(fake.calls(("nest__where", {})), fake.text("."), fake.calls(("nest__where", {})), fake.text("."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        again = {"sessionId": session, "cwd": str(place), "additionalDirectories": [str(added)], "mcpServers": []}
        await agent.request("session/resume", again)
        await agent.prompt(session, "go")
        told = [json.loads(text) for _, text in ended(agent.updates(session))]
    roots = [[root["uri"] for root in each["roots"]] for each in told]
    assert roots == [[place.as_uri()], [place.as_uri(), added.as_uri()]]


async def test_the_tools_of_a_late_server_join_the_running_turn(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    configured(
        home,
        f"[limits]\nmcp_wait_s = 0\n[mcp_servers.nest]\n{server('slow.py', str(gate))}"
        f"[mcp_servers.gone]\ncommand = {json.dumps(str(tmp_path / 'no-such-program'))}\n"
        '[permissions]\nallow = ["nest__*"]\n',
    )
    tools: list[list[str]] = []

    def answer(request: fake.Recorded) -> fake.Reply:
        gate.touch()
        tools.append([tool["function"]["name"] for tool in request.body["tools"]])
        if "nest__ping" not in tools[-1]:
            return fake.calls(("list_files", {"pattern": f"*{len(tools)}"}))
        return fake.text("Done.") if len(tools) > 1 and "nest__ping" in tools[-2] else fake.calls(("nest__ping", {}))

    endpoint.answer_with(answer)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(session={"notices": {}})
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "go"))["stopReason"] == "end_turn"
        ready = [one for one in agent.updates(session, "notice") if "is ready" in one["title"]]
        assert [(one["severity"], one["title"], one["description"]) for one in ready] == [
            ("info", "MCP server nest is ready", "The model can use 1 tool of it now.")
        ]
        assert ended(agent.updates(session))[-1] == ("completed", "pong")
        await agent.prompt(session, "/context")
        assert "the tools changed (new: nest__ping)" in agent.text(session)
        await agent.prompt(session, "again")
    assert "nest__ping" not in tools[0]
    joined = ["nest__ping" in names for names in tools]
    assert joined == sorted(joined), "they stay"


PATCH = """\
*** Begin Patch
*** Update File: a.txt
@@
-old
+new
*** Add File: b.txt
+more
*** Delete File: c.txt
*** End Patch
"""


async def test_a_patch_is_offered_asked_about_once_and_shown_with_every_file(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, '[model]\nedit_tool = "apply_patch"\n')
    (place / "a.txt").write_text("old\n")
    (place / "c.txt").write_text("gone\n")
    asked: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return {"outcome": {"outcome": "selected", "optionId": "allow_once"}}

    edit = ("edit_file", {"path": "b.txt", "old_text": "more", "new_text": "most"})
    endpoint.script(fake.calls(("apply_patch", {"input": PATCH})), fake.calls(edit), fake.text("Done."))
    async with crow(endpoint=endpoint, answers={"session/request_permission": allow}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        updates = agent.updates(session)
    names = [tool["function"]["name"] for tool in endpoint.asked[0].body["tools"]]
    assert "apply_patch" in names
    assert "edit_file" not in names
    shown_files = [str(place / f"{name}.txt") for name in "abc"]
    first = next(update for update in updates if update["sessionUpdate"] == "tool_call")
    assert [location["path"] for location in first["locations"]] == shown_files
    assert [part["path"] for part in first["content"] if part["type"] == "diff"] == shown_files
    assert [params["toolCall"]["title"] for params in asked] == ["Patch a.txt, b.txt, c.txt", "Edit b.txt"]
    assert [status for status, _ in ended(updates)] == ["completed", "completed"]
    assert (place / "a.txt").read_text() == "new\n"
    assert (place / "b.txt").read_text() == "most\n"
    assert not (place / "c.txt").exists()


async def test_a_call_of_no_tool_is_answered_with_the_tools_that_the_model_was_offered(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path
) -> None:
    calls = fake.calls(("read_fiel", {"path": "README.md"}), ("apply_a_patch", {"input": ""}))
    endpoint.script(calls, fake.text("Sorry."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
    first, second = (request.body for request in endpoint.asked)
    names = [tool["function"]["name"] for tool in first["tools"]]
    assert "apply_patch" not in names
    told = f"The tools are: {', '.join(names)}."
    assert [message["content"] for message in second["messages"][-2:]] == [
        f'No tool "read_fiel". Did you mean read_file? {told}',
        f'No tool "apply_a_patch". {told}',
    ]
