"""Session management in the real process: branches, forks, names, restored files, loads."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError, allow_once
from tests.support.fake_endpoint import FakeEndpoint, Gate
from tests.support.fork_server import command


async def opened(agent: CrowProcess, place: Path, **capabilities: Any) -> str:
    await agent.initialize(**capabilities)
    return await agent.new_session(place)


def said(body: dict[str, Any]) -> list[str]:
    """The conversation in a request to the model, without crow's reminders."""
    return [
        message["content"]
        for message in body["messages"]
        if message["role"] in ("user", "assistant") and isinstance(message["content"], str)
    ]


async def replayed(agent: CrowProcess, session: str, place: Path) -> list[dict[str, Any]]:
    """The replayed messages, with their chunks joined."""
    joined: list[dict[str, Any]] = []
    call = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
    await call.result()
    for update in agent.updates(session, since=call.index):
        if update["sessionUpdate"] in ("available_commands_update", "usage_update", "session_info_update"):
            continue
        same = joined and joined[-1].get("messageId") == update.get("messageId") is not None
        if same and update["content"]["type"] == "text":
            joined[-1]["content"]["text"] += update["content"]["text"]
        else:
            joined.append({**update, "content": dict(update["content"])} if "messageId" in update else update)
    return joined


# branches


async def test_undo_and_redo_last_into_another_process_and_are_replayed(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("first"), fake.text("second"), fake.text("third"))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
        await agent.prompt(session, "two")
        since = len(agent.log)
        assert await agent.prompt(session, "/undo") == {"stopReason": "end_turn"}
        assert "Took back the last turn, “two”. The model no longer sees it" in agent.text(session, since=since)
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert agent.text(session, "user_message_chunk") == "one/undo"
        await agent.prompt(session, "/redo")
        await agent.prompt(session, "three")
        assert said(endpoint.asked[-1].body) == ["one", "first", "two", "second", "three"]


async def test_the_summary_of_undone_turns_is_shown_and_replayed(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("Tried twigs."), fake.text("Twigs do not hold."), fake.text("String it is."))
    words = "Summary of the work that you left, as the model sees it:\n\nTwigs do not hold.\n\n"
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "build a nest")
        await agent.prompt(session, "/undo summary")
        assert agent.text(session).endswith(words)
        await agent.prompt(session, "again")
        assert "Twigs do not hold." in str(endpoint.asked[-1].body["messages"])
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        assert words in agent.text(session)


def shown_level(agent: CrowProcess, session: str, since: int) -> list[str]:
    """The thought levels in the config option updates."""
    updates = [each for each in agent.updates(session, since=since) if each["sessionUpdate"] == "config_option_update"]
    options = [option for each in updates for option in each["configOptions"] if option["id"] == "thought_level"]
    return [option["currentValue"] for option in options]


async def test_undo_restores_the_thought_level_and_replay_shows_no_change_of_it(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
        change = {"sessionId": session, "configId": "thought_level", "value": "high"}
        await agent.request("session/set_config_option", change)
        await agent.prompt(session, "two")
        assert endpoint.asked[-1].body["reasoning_effort"] == "high"
        since = len(agent.log)
        await agent.prompt(session, "/rewind 1")
        assert shown_level(agent, session, since) == ["default"]
        await agent.prompt(session, "three")
        assert "reasoning_effort" not in endpoint.asked[-1].body
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        shown = await replayed(agent, session, place)
        assert {each["sessionUpdate"] for each in shown} == {"user_message_chunk", "agent_message_chunk"}
        await agent.prompt(session, "/redo")
        since = len(agent.log)
        fork = {"sessionId": session, "cwd": str(place), "mcpServers": []}
        options = (await agent.request("session/fork", fork))["configOptions"]
        assert [option["currentValue"] for option in options if option["id"] == "thought_level"] == ["default"]


async def test_a_model_chosen_while_opening_a_session_is_given_up_by_going_back(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        opening = {"sessionId": session, "cwd": str(place), "mcpServers": [], "_meta": {"model": "another"}}
        await agent.request("session/resume", opening)
        await agent.prompt(session, "two")
        assert endpoint.asked[-1].body["model"] == "another"
        await agent.prompt(session, "/rewind 1")
        assert agent.text(session).endswith("The model is `fake-model` again.")
        await agent.prompt(session, "three")
        assert endpoint.asked[-1].body["model"] == "fake-model"


async def test_a_changed_option_of_another_process_applies_without_a_word(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow(endpoint=endpoint) as first, crow(endpoint=endpoint) as second:
        session = await opened(first, place)
        await first.prompt(session, "one")
        await second.initialize()
        await second.load_session(session, place)
        change = {"sessionId": session, "configId": "thought_level", "value": "high"}
        await first.request("session/set_config_option", change)
        since = len(second.log)
        await second.prompt(session, "two")
        assert shown_level(second, session, since) == ["high"]
        assert endpoint.asked[-1].body["reasoning_effort"] == "high"
        assert "Another process" not in second.text(session)
        await first.prompt(session, "three")
        assert "Another process added messages" in first.text(session)


async def test_retry_asks_again_and_the_tree_keeps_both_answers(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("first"), fake.text("better"))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
        assert await agent.prompt(session, "/retry") == {"stopReason": "end_turn"}
        assert agent.text(session).endswith("better")
        assert said(endpoint.asked[-1].body) == ["one"]
        since = len(agent.log)
        await agent.prompt(session, "/tree")
        assert agent.text(session, since=since).count("1 prompt, last “one”") == 2


async def test_every_command_is_listed_and_answers_in_one_turn(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        index = await agent.wait_for_update("available_commands_update")
        offered = agent.log[index].message["params"]["update"]["availableCommands"]
        names = [command["name"] for command in offered]
        wanted = "undo redo rewind retry fork title history tree label new clear compact help"
        assert set(names) >= set(wanted.split())
        await agent.prompt(session, "say hello")
        for command in ("/history", "/title Nests", "/label here", "/fork", "/rewind here", "/new", "/redo", "/clear"):
            since = len(agent.log)
            assert await agent.prompt(session, command) == {"stopReason": "end_turn"}
            assert agent.text(session, since=since)


async def test_undo_asks_with_a_diff_and_restores_the_files(crow: StartCrow, place: Path) -> None:
    asked: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return allow_once(params)

    async with crow(answers={"session/request_permission": allow}) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "write README.md: other text")
        since = len(agent.log)
        await agent.prompt(session, "/undo")
        question = asked[-1]
        assert [option["kind"] for option in question["options"]] == ["allow_once", "reject_once"]
        assert question["toolCall"]["title"] == "Restore README.md"
        (diff,) = question["toolCall"]["content"]
        assert (diff["oldText"], diff["newText"]) == ("other text\n", "# Nest\nTwigs and string.\n")
        live = agent.updates(session, "tool_call", "tool_call_update", since=since)
        assert [update["status"] for update in live] == ["pending", "in_progress", "completed"]
    assert (place / "README.md").read_text() == "# Nest\nTwigs and string.\n"
    async with crow() as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        (call,) = agent.updates(session, "tool_call")
        assert (call["status"], call["content"]) == ("completed", live[0]["content"])


async def test_undo_restores_files_through_an_editor_that_serves_them(crow: StartCrow, place: Path) -> None:
    written: list[str] = []

    def write(params: dict[str, Any]) -> dict[str, Any]:
        written.append(params["content"])
        Path(params["path"]).write_text(params["content"])
        return {}

    answers = {"fs/read_text_file": lambda p: {"content": Path(p["path"]).read_text()}, "fs/write_text_file": write}
    async with crow(answers=answers) as agent:
        session = await opened(agent, place, fs={"readTextFile": True, "writeTextFile": True})
        await agent.prompt(session, "write README.md: other text")
        await agent.prompt(session, "/undo files")
        assert written == ["other text\n", "# Nest\nTwigs and string.\n"]


async def test_undo_restores_unsaved_editor_text(crow: StartCrow, place: Path) -> None:
    buffer = ["# Nest\nUnsaved words.\n"]

    def write(params: dict[str, Any]) -> dict[str, Any]:
        buffer[0] = params["content"]
        Path(params["path"]).write_text(params["content"])
        return {}

    answers = {"fs/read_text_file": lambda _: {"content": buffer[0]}, "fs/write_text_file": write}
    async with crow(answers=answers) as agent:
        session = await opened(agent, place, fs={"readTextFile": True, "writeTextFile": True})
        await agent.prompt(session, "write README.md: other text")
        await agent.prompt(session, "/undo files")
        assert buffer == ["# Nest\nUnsaved words.\n"]


# forks


async def test_a_fork_answers_like_session_new_and_is_independent(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("first"), fake.text("mine"), fake.text("theirs"))
    async with crow(endpoint=endpoint) as agent:
        capabilities = (await agent.initialize())["agentCapabilities"]["sessionCapabilities"]
        assert capabilities["fork"] == {}
        session = await agent.new_session(place)
        await agent.prompt(session, "one")
        result = await agent.request("session/fork", {"sessionId": session, "cwd": str(place), "mcpServers": []})
        fork = result["sessionId"]
        assert fork != session
        assert result.keys() >= {"modes", "configOptions"}
        await agent.prompt(session, "go on")
        await agent.prompt(fork, "differently")
        assert said(endpoint.asked[-1].body) == ["one", "first", "differently"]
        updates = [update["sessionUpdate"] for update in agent.updates(fork)]
        assert updates[0] == "available_commands_update"
        titles = {one["sessionId"]: one["title"] for one in (await agent.request("session/list", {}))["sessions"]}
        assert titles == {session: "one", fork: "one (fork 1)"}
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        await agent.load_session(fork, place)
        assert agent.text(fork) == "firsttheirs"


async def test_a_fork_from_an_entry_has_the_history_up_to_it(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "say one")
        await agent.prompt(session, "say two")
        await agent.prompt(session, "/history")
        entry = int(agent.text(session).split("“say two” `#")[1].split("`")[0])
        params = {"sessionId": session, "cwd": str(place), "mcpServers": [], "_meta": {"crow": {"entry": entry}}}
        fork = (await agent.request("session/fork", params))["sessionId"]
        since = len(agent.log)
        await agent.load_session(fork, place)
        assert agent.text(fork, "user_message_chunk", since=since) == "say onesay two"
        for wrong, code in ((0, -32602), ("x", -32602), (999_999, -32602)):
            with pytest.raises(RpcError) as raised:
                await agent.request("session/fork", params | {"_meta": {"crow": {"entry": wrong}}})
            assert raised.value.code == code
        with pytest.raises(RpcError) as raised:
            await agent.request("session/fork", params | {"sessionId": "nobody"})
        assert raised.value.code == -32002


# names


async def test_an_alias_opens_or_creates_its_session_and_new_moves_it(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("first"), fake.text("second"), fake.text("fresh"))
    named = {"_meta": {"crow": {"alias": "discord:channel:1"}}}
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        session = await agent.new_session(place, **named)
        await agent.prompt(session, "one")
        assert await agent.new_session(place, **named) == session
        assert await agent.new_session(place) != session
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        assert await agent.new_session(place, **named) == session
        await agent.prompt(session, "two")
        assert said(endpoint.asked[-1].body) == ["one", "first", "two"]
        await agent.prompt(session, "/new")
        other = await agent.new_session(place, **named)
        assert other != session
        await agent.prompt(other, "hello")
        assert said(endpoint.asked[-1].body) == ["hello"]
        listed = [one["sessionId"] for one in (await agent.request("session/list", {}))["sessions"]]
        assert listed == [other, session]
        since = len(agent.log)
        await agent.load_session(session, place)
        assert agent.text(session, "user_message_chunk", since=since) == "onetwo/new"
        with pytest.raises(RpcError, match=r"_meta\.crow\.alias: expected a name"):
            await agent.new_session(place, _meta={"crow": {"alias": ""}})


async def test_programs_keep_metadata_with_a_session(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    at_place: dict[str, Any] = {"cwd": str(place), "mcpServers": []}

    async def send(method: str, metadata: object, **params: object) -> dict[str, Any]:
        answer: dict[str, Any] = await agent.request(method, {"_meta": {"crow": {"metadata": metadata}}, **params})
        return answer

    async def prompt(text: str, metadata: object) -> None:
        await send("session/prompt", metadata, sessionId=session, prompt=[{"type": "text", "text": text}])

    async def listed() -> dict[str, Any]:
        sessions = (await agent.request("session/list", {}))["sessions"]
        return {one["sessionId"]: one["_meta"]["crow"]["metadata"] for one in sessions}

    endpoint.script(*map(fake.text, ("first", "second", "third")))
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        first = {"task": "42", "from": {"bot": "x", "no": None}, "old": 1}
        session = (await send("session/new", first, **at_place))["sessionId"]
        await prompt("one", {"from": {"user": "ann"}, "old": None})
        assert await listed() == {session: {"task": "42", "from": {"bot": "x", "user": "ann"}}}
        await prompt("/usage", {"from": "mail"})
        await send("session/load", {"task": "43"}, sessionId=session, **at_place)
        for command in ("/tag work", "/archive", "/usage"):
            await prompt(command, {})
        assert await listed() == {}
        await prompt("/archive undo", {"tags": {"bot": True}})
        assert await listed() == {session: {"task": "43", "from": "mail", "tags": {"bot": True, "work": True}}}
        deep: object = 1
        for _ in range(9):
            deep = [deep]
        for wrong, words in (
            (["a"], r"_meta\.crow\.metadata is .*; expected an object"),
            ({"x": "y" * 16_384}, r"would take 16,\d+ bytes; at most 16,384 fit"),
            ({"deep": deep}, "nested more than 8 levels deep"),
        ):
            with pytest.raises(RpcError, match=words):
                await send("session/new", wrong, **at_place)
            with pytest.raises(RpcError, match=words):
                await send("session/load", wrong, sessionId=session, **at_place)
            with pytest.raises(RpcError, match=words):
                await prompt("never asked", wrong)
        await prompt("two", {"a": "y" * 9_000})
        with pytest.raises(RpcError, match="at most 16,384 fit"):
            await prompt("never asked", {"b": "y" * 9_000})
        await prompt("three", {"a": None, "tags": None})
        assert said(endpoint.asked[-1].body) == ["one", "first", "two", "second", "three"]
        fork = (await send("session/fork", {"task": None}, sessionId=session, **at_place))["sessionId"]
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize()
        assert await listed() == {fork: {"from": "mail"}, session: {"task": "43", "from": "mail"}}


# load


async def test_a_load_is_the_same_before_and_after_compactions(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        for number in range(4):
            await agent.prompt(session, f"think about {number} then read README.md then say number {number}")
        await agent.prompt(session, "plan: one; two")
    replays = []
    async with crow() as agent:
        await agent.initialize(session={"compaction": {}})
        for turn in range(3):
            replays.append(await replayed(agent, session, place))
            if turn < 2:
                await agent.prompt(session, f"/compact number {turn}")
    compactions = [[u for u in one if u["sessionUpdate"] == "compaction_update"] for one in replays]
    assert [len(one) for one in compactions] == [0, 1, 1]
    assert replays[1][: len(replays[0])] == replays[0]
    assert replays[2][: len(replays[1])] == replays[1]


async def test_a_load_works_without_its_mcp_servers_and_notes_another_directory(
    crow: StartCrow, place: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "say one")
    async with crow() as agent:
        await agent.initialize()
        broken = [{"name": "gone", "command": "/does/not/exist", "args": [], "env": []}]
        await agent.request("session/load", {"sessionId": session, "cwd": str(other), "mcpServers": broken})
        assert agent.text(session) == "one"
        await agent.prompt(session, "say two")
        words = f"This session worked in {place} until now; from here on it works in {other}."
        assert agent.text(session).count(words) == 1
        await agent.prompt(session, "say three")
        assert agent.text(session).count(words) == 1
        (listed,) = (await agent.request("session/list", {"cwd": str(other)}))["sessions"]
        assert listed["sessionId"] == session


async def test_a_load_during_streaming_replays_the_draft_and_continues_live(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("first"), fake.text("so far", ", and the rest", between=[gate]))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "one")
        call = await agent.start_prompt(session, "two")
        await agent.wait_for_text(session, "so far")
        since = len(agent.log)
        await agent.load_session(session, place)
        assert agent.text(session, "user_message_chunk", since=since) == "onetwo"
        assert agent.text(session, since=since) == "firstso far"
        gate.open()
        assert await call.result() == {"stopReason": "end_turn"}
        assert agent.text(session, since=since) == "firstso far, and the rest"


async def test_a_load_shows_a_running_command_and_its_directory(crow: StartCrow, place: Path, tmp_path: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "/title Nests")
        call = await agent.start_prompt(session, "run echo begun; while [ ! -e go ]; do sleep 0.02; done; echo done")
        await agent.wait_for_update("tool_call_update", status="in_progress")
        since = len(agent.log)
        await agent.load_session(session, tmp_path)
        (again,) = agent.updates(session, "tool_call", since=since)
        assert again["status"] == "in_progress"
        words = f"(A turn of this session is running in {place} and continues there. To work in {tmp_path}, load"
        await agent.wait_for_text(session, words, since=since)
        await anyio.to_thread.run_sync((place / "go").touch)
        assert await call.result() == {"stopReason": "end_turn"}
        last = agent.updates(session, "tool_call_update", since=since)[-1]
        assert (last["toolCallId"], last["status"]) == (again["toolCallId"], "completed")


async def test_a_load_during_a_permission_request_shows_the_call_as_pending(crow: StartCrow, place: Path) -> None:
    loaded = anyio.Event()

    async def wait(params: dict[str, Any]) -> dict[str, Any]:
        await loaded.wait()
        return allow_once(params)

    async with crow(answers={"session/request_permission": wait}) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "write a.txt: one")
        await agent.wait_for(lambda message: message.get("method") == "session/request_permission")
        since = len(agent.log)
        await agent.load_session(session, place)
        (again,) = agent.updates(session, "tool_call", since=since)
        assert again["status"] == "pending"
        assert again["content"][0]["type"] == "diff"
        loaded.set()
        assert await call.result() == {"stopReason": "end_turn"}
        assert (place / "a.txt").read_text() == "one\n"


# close and delete


async def test_empty_sessions_of_an_ended_process_are_removed_and_open_ones_work(
    crow: StartCrow, home: Path, place: Path
) -> None:
    async with crow() as agent, crow() as dead:
        await dead.initialize()
        theirs, shared = await dead.new_session(place), await dead.new_session(place)
        mine = await opened(agent, place)
        await agent.load_session(shared, place)
        await dead.kill()
        with closing(sqlite3.connect(home / "crow.db", timeout=60)) as database, database:
            database.execute("UPDATE openings SET opened_ms = opened_ms - 3600000")
        await anyio.run_process([*command(), "sessions", "vacuum"], env={**os.environ, "CROW_HOME": str(home)})
        with pytest.raises(RpcError) as raised:
            await agent.load_session(theirs, place)
        assert raised.value.code == -32002
        assert theirs in str(raised.value)
        for session in (mine, shared):
            assert await agent.prompt(session, "say hello") == {"stopReason": "end_turn"}


async def test_delete_cancels_the_turn_and_succeeds_for_unknown_ids(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("so far", "never", between=[Gate()]))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "one")
        await agent.wait_for_text(session, "so far")
        assert await agent.request("session/delete", {"sessionId": session}) == {}
        assert await call.result() == {"stopReason": "cancelled"}
        assert await agent.request("session/delete", {"sessionId": session}) == {}
        assert await agent.request("session/delete", {"sessionId": "nobody"}) == {}
        assert (await agent.request("session/list", {}))["sessions"] == []
        with pytest.raises(RpcError) as raised:
            await agent.load_session(session, place)
        assert raised.value.code == -32002


async def test_close_cancels_the_turn_and_the_session_can_be_loaded_again(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.text("so far", "never", between=[Gate()]))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "one")
        await agent.wait_for_text(session, "so far")
        await agent.request("session/close", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "two")
        assert raised.value.code == -32002
        since = len(agent.log)
        await agent.load_session(session, place)
        assert agent.text(session, since=since).startswith("so far")
