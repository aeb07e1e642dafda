"""Five hundred MCP tools and small context windows in the real process."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.stdio.test_agents import task, write_agent
from tests.stdio.test_tools import configured, server
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply
from tests.support.tool_catalogue import request_tokens, with_servers


@pytest.mark.long
async def test_one_of_500_tools_is_found_and_called_in_two_steps_of_a_small_request(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, with_servers(home, 500))
    questions: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        questions.append(params)
        return {"outcome": {"outcome": "selected", "optionId": "allow_always"}}

    wanted = {"account": "a", "title": "Moss"}
    endpoint.script(
        fake.calls(("find_tools", {"query": "add a new invoice"})),
        fake.calls(("call_tool", {"name": "stripe__create_invoice", "arguments": wanted})),
        fake.text("Done."),
        fake.calls(("stripe__create_invoice", wanted), prefix="again"),
        fake.text("Done again."),
    )
    async with crow(endpoint=endpoint, answers={"session/request_permission": allow}) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for prompt in ("Bill them for moss.", "Once more."):
            assert (await agent.prompt(session, prompt))["stopReason"] == "end_turn"
        updates = agent.updates(session)
    asked = [request.body for request in endpoint.asked]
    assert request_tokens(endpoint.asked[0].body) <= 2_500
    assert "stripe__create_invoice: Create a new invoice" in asked[1]["messages"][-1]["content"]
    assert asked[2]["messages"][-1]["content"] == f"create_invoice {json.dumps(wanted)}"
    for before, after in pairwise(asked):
        assert after["tools"] == before["tools"]
        assert after["messages"][: len(before["messages"])] == before["messages"]
    (question,) = questions  # the answer holds for the direct call, too: its rule names the tool
    assert question["toolCall"]["title"] == "stripe: create_invoice"
    assert "every stripe__create_invoice call" in [option["name"] for option in question["options"]][1]
    titles = [update["title"] for update in updates if update["sessionUpdate"] == "tool_call"]
    assert titles == ["Find tools: add a new invoice", "stripe: create_invoice", "stripe: create_invoice"]


async def test_a_rule_for_a_deferred_tool_decides_a_call_through_call_tool(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    rules = '[permissions]\nallow = ["github__get_*"]\ndeny = ["github__delete_*"]\n'
    configured(home, with_servers(home, 50) + rules)
    endpoint.script(
        fake.calls(
            ("call_tool", {"name": "github__get_issue", "arguments": {"repository": "a"}}),
            ("call_tool", {"name": "github__delete_issue", "arguments": {"repository": "a"}}),
        ),
        fake.text("Done."),
    )
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "go")
        assert "session/request_permission" not in str(agent.log)
    got, refused = (message["content"] for message in endpoint.asked[1].body["messages"][-2:])
    assert got == 'get_issue {"repository": "a"}'
    assert "github__delete_*" in refused


async def test_a_deferred_tool_uses_the_model_with_the_same_question_as_a_direct_one(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return {"outcome": {"outcome": "selected", "optionId": "allow_once"}}

    for limits in ("offered_tool_tokens = 100_000\n", "offered_tool_tokens = 0\n"):
        settings = f"[limits]\nmcp_wait_s = 300\n{limits}"
        configured(home, settings + f"[mcp_servers.docs]\n{server('library.py', 'classic')}")
        is_direct = len(asked) == 0
        call = ("docs__ask_model", {}) if is_direct else ("call_tool", {"name": "docs__ask_model"})
        endpoint.script(fake.calls(call), fake.text("A crow."), fake.text("Done."))
        async with crow(endpoint=endpoint, answers={"session/request_permission": allow}) as agent:
            await agent.initialize()
            await agent.prompt(await agent.new_session(place), "Who is it?")
        names = [tool["function"]["name"] for tool in endpoint.asked[-1].body["tools"]]
        assert ("docs__ask_model" in names, "call_tool" in names) == (is_direct, not is_direct)
        assert "A crow." in endpoint.asked[-1].body["messages"][-1]["content"]
    shown = [
        (question["toolCall"]["title"], question["toolCall"].get("content"), [o["name"] for o in question["options"]])
        for question in asked
    ]
    assert len(shown) == 4
    assert shown[:2] == shown[2:]


async def test_a_kind_of_subagent_finds_and_calls_only_the_tools_that_it_names(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, with_servers(home, 100) + '[permissions]\nallow = ["jira__*", "github__*"]\n')
    write_agent(home / "agents", "planner", "---\ndescription: Plans\ntools: Read, jira__*\n---\nPlan.\n")
    write_agent(home / "agents", "all", "---\ndescription: All\ntools: Read, find_tools, call_tool\n---\nDo it.\n")
    wanted = {"repository": "a"}
    steps = (
        fake.calls(("find_tools", {"query": "list issue"})),
        fake.calls(("call_tool", {"name": "github__list_issue", "arguments": wanted}), prefix="again"),
        fake.text("Planned."),
    )
    endpoint.script(task(agent="planner"), *steps, fake.text("."), task(agent="all"), *steps, fake.text("."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "plan it")
        await agent.prompt(session, "do it")
    first, found, called = (request.body for request in endpoint.asked[1:4])
    assert [tool["function"]["name"] for tool in first["tools"]] == ["read_file", "find_tools", "call_tool"]
    assert "github" not in str(found["messages"][-1]["content"])
    assert called["messages"][-1]["content"].startswith('No tool "github__list_issue".')
    assert endpoint.asked[8].body["messages"][-1]["content"] == f"list_issue {json.dumps(wanted)}"


async def test_found_definitions_can_be_found_again_after_a_compaction(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, with_servers(home, 50))
    find = fake.calls(("find_tools", {"query": "create label"}))
    endpoint.script(find, fake.text("Found."), fake.text("## Goal\nLabels."), find, fake.text("Found again."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for prompt in ("Find it.", "/compact", "Find it again."):
            await agent.prompt(session, prompt)
    after = endpoint.asked[-2].body
    assert "github (50): " in next(
        tool["function"]["description"] for tool in after["tools"] if tool["function"]["name"] == "find_tools"
    )
    assert "github__create_label: " in endpoint.asked[-1].body["messages"][-1]["content"]


class Small:
    """Answers requests that fit a window, and refuses others. `reply` gets the number of the request."""

    def __init__(self, window: int, replies: list[Reply]) -> None:
        self.window, self.replies = window, replies
        self.refused: list[int] = []
        self.largest = 0

    def __call__(self, request: Recorded) -> Reply:
        size = len(request.raw) // 4 + int(request.body.get("max_tokens") or 0)
        if size > self.window:
            self.refused.append(size)
            return fake.failing(400, f"This model's maximum context length is {self.window} tokens, not {size}.")
        self.largest = max(self.largest, size)
        if "tools" not in request.body and "will replace the conversation" in str(request.body["messages"][-1]):
            return fake.text("## Goal\nBuild a nest.")
        return self.replies.pop(0) if self.replies else fake.text("A nest is made of twigs and string. " * 20)


@pytest.mark.long
async def test_a_long_task_with_500_tools_fits_8192_tokens(crow: StartCrow, home: Path, place: Path) -> None:
    (place / "long.txt").write_text("".join(f"line {n}: twigs and string\n" for n in range(2_000)))
    steps = [
        fake.calls(("read_file", {"path": "long.txt", "line": 1 + 60 * n, "limit": 60}), prefix=f"read{n}")
        for n in range(16)
    ]
    steps[3:3] = [fake.calls(("find_tools", {"query": f"{verb} invoice"})) for verb in ("create", "list", "remove")]
    configured(home, with_servers(home, 500) + '[model]\nname = "fake-model"\ncontext_window = 8192\n')
    small = Small(8_192, [*steps, fake.text("Read it.")])
    async with FakeEndpoint(otherwise=small) as endpoint, crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for _ in range(3):
            assert (await agent.prompt(session, "Read on."))["stopReason"] == "end_turn"
        assert "gets no tools" not in agent.text(session)
    assert small.refused == []
    assert small.replies == []
    assert small.largest > 4_000


async def test_a_chat_without_tools_fits_4096_tokens_and_the_user_is_told_why(
    crow: StartCrow, home: Path, place: Path
) -> None:
    configured(home, '[model]\nname = "fake-model"\ncontext_window = 4096\n')
    small = Small(4_096, [])
    async with FakeEndpoint(otherwise=small) as endpoint, crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for number in range(16):
            assert (await agent.prompt(session, f"What is nest {number} made of? " * 10))["stopReason"] == "end_turn"
        said = agent.text(session)
        first_request = endpoint.asked[0].body
    assert small.refused == []
    assert not any("tools" in request.body for request in endpoint.asked)
    assert "you have none" in first_request["messages"][0]["content"]
    assert said.count("fake-model gets no tools: its context window is too small: The window has 4,096 tokens") == 1
    assert "Tools need a window of about 5,000 tokens" in said


async def test_tools_come_back_when_the_window_grows(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    for window, has_tools in ((4_096, False), (8_192, True)):
        configured(home, f'[model]\nname = "fake-model"\ncontext_window = {window}\n')
        async with crow(endpoint=endpoint) as agent:
            await agent.initialize()
            session = await agent.new_session(place)
            await agent.prompt(session, "hi")
        body = endpoint.asked[-1].body
        assert ("tools" in body) is has_tools
        assert ("you have none" in body["messages"][0]["content"]) is not has_tools


async def test_a_call_in_a_chat_without_tools_is_answered_in_words(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    configured(home, '[model]\nname = "fake-model"\ncontext_window = 4096\n')
    endpoint.script(fake.calls(("shell", {"command": "touch here"})), fake.text("Ah."))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "go"))["stopReason"] == "end_turn"
    (answer,) = [m["content"] for m in endpoint.asked[1].body["messages"] if m["role"] == "tool"]
    assert answer == "There are no tools in this conversation. Answer without them."
    assert not (place / "here").exists()
