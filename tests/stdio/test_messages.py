"""Whole sessions of an editor on Anthropic's Messages API, with an endpoint that refuses what the real one refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.stdio.conftest import StartCrow
from tests.support.acp_client import CrowProcess
from tests.support.messages_endpoint import MessagesEndpoint, says

READ = {"call": "read_file", "json": ['{"path": "READ', 'ME.md"}']}
LIST = {"call": "list_files", "json": ["{}"]}


@pytest.fixture
async def claude() -> AsyncIterator[MessagesEndpoint]:
    async with MessagesEndpoint() as server:
        yield server


def configure(home: Path, *lines: str) -> None:
    home.mkdir(exist_ok=True)
    settings = ['[model]\nname = "claude-opus-5-5"\nwire = "messages"\nthought_level = "medium"', *lines]
    (home / "config.toml").write_text("\n".join(settings) + "\n", "utf-8")


def start(crow: StartCrow, claude: MessagesEndpoint) -> CrowProcess:
    return crow(endpoint=claude, env={"CROW_MODEL": None})


def thoughts(asked: Any) -> list[str]:
    """The words of the thoughts in a request."""
    blocks = [block for message in asked["messages"] for block in message["content"]]
    return [block["thinking"] for block in blocks if block["type"] == "thinking"]


async def test_a_session_with_tools_and_thoughts_is_shown_stored_and_sent_back_unchanged(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    claude.answer(
        says({"think": ["I should ", "look."]}, {"text": ["Looking."]}, READ, LIST),
        says({"redacted": "EmwK=="}, {"think": ["A nest."]}, {"text": ["It is ", "a nest."]}),
    )
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "What is this?")
        assert await call.result() == {"stopReason": "end_turn"}
        assert agent.text(session) == "Looking.It is a nest."
        assert agent.text(session, "agent_thought_chunk") == "I should look.A nest."
        finished = [update["status"] for update in agent.updates(session, "tool_call_update")]
        assert finished.count("completed") == 2
        assert agent.usage(call)["outputTokens"] == 18
        shown = agent.text(session), agent.text(session, "agent_thought_chunk")
        await agent.kill()
    async with start(crow, claude) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert (agent.text(session), agent.text(session, "agent_thought_chunk")) == shown
        assert (await agent.prompt(session, "And now?"))["stopReason"] == "end_turn"
    first, second, third = (asked.sent for asked in claude.asked)
    assert claude.refused == []
    assert [claude.missing(asked) for asked in (second, third)] == [[], []]
    assert thoughts(third) == ["I should look.", "A nest."]
    assert "Twigs and string." in json.dumps(second["messages"][-1])
    assert first["thinking"] == {"type": "adaptive", "display": "summarized"}
    # Between breaks, each request reads from the cache what the one before has written.
    assert claude.usages[1]["cache_read_input_tokens"] == claude.usages[0]["cache_creation_input_tokens"] > 0


@pytest.mark.parametrize("binds", [False, True])
async def test_thoughts_survive_a_compaction_or_are_left_out_if_the_endpoint_binds_them(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint, binds: bool
) -> None:
    configure(home, "context_window = 24_000")
    claude.binds = binds
    claude.answer(
        *(says({"think": [f"Long {number}."]}, {"text": ["word " * 2_500]}) for number in range(3)),
        says({"think": ["One."]}, READ),
        says({"think": ["Two."]}, {"text": ["Done."]}),
        says({"text": ["## Goal\nBuild a nest.\n## Next\nFind twigs."]}),
        says({"think": ["Three."]}, LIST),
        says({"think": ["Four."]}, {"text": ["Found."]}),
    )
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for prompt in ("Write.", "Write.", "Write.", "Read it.", "/compact", "Find twigs.", "And now?"):
            assert (await agent.prompt(session, prompt))["stopReason"] == "end_turn"
    last = claude.asked[-1].sent
    assert "Build a nest." in json.dumps(last["messages"][0])
    kept = ["Three.", "Four."] if binds else ["One.", "Two.", "Three.", "Four."]
    assert thoughts(last)[-len(kept) :] == kept
    assert not binds or thoughts(last) == kept
    assert len(claude.missing(last)) == binds
    assert len(claude.refused) == binds
    assert all("bound to a different conversation" in words for words in claude.refused)


async def test_a_cancelled_answer_is_repaired_so_that_the_next_prompt_works(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    claude.answer(
        says({"think": ["I should run it."]}, {"call": "shell", "json": ['{"command": "sleep 60", "access": "full"}']})
    )
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "Run it.")
        await agent.wait_for_update("tool_call_update", status="in_progress")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        assert (await agent.prompt(session, "And now?"))["stopReason"] == "end_turn"
    assert claude.refused == []
    assert thoughts(claude.asked[-1].sent) == ["I should run it."]


async def test_another_model_gets_no_thoughts_of_the_first_which_gets_its_own_back(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    claude.models = ["claude-opus-5-5", "claude-sonnet-4-5"]
    claude.answer(
        says({"think": ["One."]}, READ),
        says({"think": ["Two."]}, {"text": ["A."]}),
        says({"think": ["Three."]}, READ),
        says({"text": ["B."]}),
    )
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        for model in ("claude-opus-5-5", "claude-sonnet-4-5", "claude-opus-5-5"):
            option = {"sessionId": session, "configId": "model", "value": model}
            await agent.request("session/set_config_option", option)
            assert (await agent.prompt(session, "Read it."))["stopReason"] == "end_turn"
    assert claude.refused == []
    sent = {asked.sent["model"]: thoughts(asked.sent) for asked in claude.asked}
    assert sent == {"claude-opus-5-5": ["One.", "Two."], "claude-sonnet-4-5": ["Three."]}


SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "nests"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}


def plain(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message without cache marks."""
    return [{key: value for key, value in block.items() if key != "cache_control"} for block in message["content"]]


@pytest.mark.parametrize("first", [({"text": ["Searching."]}, {"block": SEARCH}), ({"block": SEARCH},)])
async def test_a_paused_answer_goes_on_in_the_same_turn_and_is_stored_and_counted(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint, first: tuple[dict[str, Any], ...]
) -> None:
    configure(home)
    claude.answer(
        says(*first, stop="pause_turn"), says({"block": FOUND}, {"text": ["It is a nest."]}), says({"text": ["Yes."]})
    )
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        call = await agent.start_prompt(session, "What is this?")
        assert await call.result() == {"stopReason": "end_turn"}
        usage = agent.usage(call)
        shown = agent.text(session)
        await agent.kill()
    assert shown == ("Searching." if len(first) == 2 else "") + "It is a nest."
    assert usage["outputTokens"] == 18
    async with start(crow, claude) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert agent.text(session) == shown
        assert await agent.prompt(session, "Sure?") == {"stopReason": "end_turn"}
    assert claude.refused == []
    _, second, third = (asked.sent["messages"] for asked in claude.asked)
    said = [{"type": "text", "text": "Searching."}] if len(first) == 2 else []
    assert [message["role"] for message in second] == ["user", "assistant"]
    assert plain(second[-1]) == [*said, SEARCH]
    assert [message["role"] for message in third] == ["user", "assistant", "assistant", "user"]
    assert plain(third[1]) == [*said, SEARCH]
    assert plain(third[2]) == [FOUND, {"type": "text", "text": "It is a nest."}]


async def test_an_endpoint_that_pauses_for_ever_ends_the_turn_and_the_next_prompt_works(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    claude.otherwise = says({"block": SEARCH}, stop="pause_turn")
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert await agent.prompt(session, "What is this?") == {"stopReason": "max_turn_requests"}
        assert len(claude.asked) == 11
        assert "the endpoint paused 11 times in a row" in json.dumps([each.message for each in agent.log])
        claude.answer(says({"text": ["A nest."]}))
        assert await agent.prompt(session, "And now?") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("A nest.")
    assert claude.refused == []


async def test_another_wire_goes_on_after_a_paused_answer(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    with (home / "config.toml").open("a") as file:
        file.write('[models."claude-chat"]\nwire = "chat"\n[models."claude-items"]\nwire = "responses"\n')
    claude.wires = ("chat", "responses", "messages")
    claude.answer(says({"text": ["Searching."]}, {"block": SEARCH}, stop="pause_turn"), says({"text": ["A nest."]}))
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "What is this?")
        for model in ("claude-chat", "claude-items"):
            choice = {"sessionId": session, "configId": "model", "value": model}
            await agent.request("session/set_config_option", choice)
            assert await agent.prompt(session, "And now?") == {"stopReason": "end_turn"}
    chat, items = (request.body["messages"] for request in claude.requests if request.path.endswith(("ions", "ses")))
    for messages in (chat, items):
        assert [(each["role"], each["content"]) for each in messages[2:5]] == [
            ("assistant", "Searching."),
            ("user", "Continue."),
            ("assistant", "A nest."),
        ]


async def test_a_tool_of_the_server_runs_after_the_results_of_the_calls_beside_it(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    claude.answer(says({"block": SEARCH}, READ), says({"block": FOUND}, {"text": ["It is a nest."]}))
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert await agent.prompt(session, "What is this?") == {"stopReason": "end_turn"}
        assert await agent.prompt(session, "Sure?") == {"stopReason": "end_turn"}
    assert claude.refused == []
    last = claude.asked[-1].sent["messages"]
    assert plain(last[1])[0] == SEARCH
    assert plain(last[3])[0] == FOUND


async def test_the_model_is_told_which_results_are_failures_and_the_cache_still_hits(
    crow: StartCrow, home: Path, place: Path, claude: MessagesEndpoint
) -> None:
    configure(home)
    missing = {"call": "read_file", "json": ['{"path": "MISSING.md"}']}
    claude.answer(says(missing, READ), says(READ), says({"text": ["Done."]}))
    async with start(crow, claude) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        assert (await agent.prompt(session, "Read both."))["stopReason"] == "end_turn"
    results = [
        block
        for message in claude.asked[-1].sent["messages"]
        for block in message["content"]
        if block["type"] == "tool_result"
    ]
    assert [result.get("is_error") for result in results] == [True, None, None]
    assert claude.refused == []
    for before, after in pairwise(claude.usages):
        assert (
            after["cache_read_input_tokens"]
            >= before["cache_read_input_tokens"] + before["cache_creation_input_tokens"]
        )
