"""Turns in the real process: tools, permissions, cancels, kills and replays."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError, reject_once
from tests.support.fake_endpoint import FakeEndpoint, Gate

FS = {"fs": {"readTextFile": True, "writeTextFile": True}}


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def wait_until_gone(pid: int) -> None:
    """Wait until the process is gone; no event reports the end of another process's child."""
    with anyio.fail_after(60):
        while alive(pid):  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def read_pid(path: Path) -> int:
    """Wait for a pid in a file that a command writes."""
    with anyio.fail_after(60):
        while not (pid := await anyio.to_thread.run_sync(read_line, path)):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return int(pid)


def read_line(path: Path) -> str:
    """The first line of a file; empty until it is complete."""
    text = path.read_text() if path.exists() else ""
    return text if text.endswith("\n") else ""


def drafted(database: Path) -> str:
    """The text of the stored drafts."""
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        return "".join(text for (text,) in connection.execute("SELECT text FROM drafts ORDER BY rowid"))


async def wait_for_draft(database: Path, wanted: str) -> None:
    """Wait until the drafts have this text; no message reports when they are saved."""
    with anyio.fail_after(60):
        while await anyio.to_thread.run_sync(drafted, database) != wanted:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def opened(agent: CrowProcess, place: Path, **capabilities: Any) -> str:
    await agent.initialize(**capabilities)
    return await agent.new_session(place)


async def reloaded(agent: CrowProcess, session: str, place: Path) -> None:
    await agent.initialize()
    await agent.load_session(session, place)


def statuses(agent: CrowProcess, session: str) -> list[tuple[str, str]]:
    """(kind of update, status) of every tool update."""
    updates = agent.updates(session, "tool_call", "tool_call_update")
    return [(update["sessionUpdate"], update["status"]) for update in updates]


async def test_a_write_is_announced_with_its_diff_then_asked_then_done(crow: StartCrow, place: Path) -> None:
    asked: list[dict[str, Any]] = []

    def allow(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return {"outcome": {"outcome": "selected", "optionId": "allow_once"}}

    async with crow(answers={"session/request_permission": allow}) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "write notes.txt: some text")
        assert (place / "notes.txt").read_text() == "some text\n"
        diff = {"type": "diff", "path": str(place / "notes.txt"), "oldText": "", "newText": "some text\n"}
        (announced,) = agent.updates(session, "tool_call")
        assert (announced["kind"], announced["content"]) == ("edit", [diff])
        assert announced["rawInput"] == {"path": "notes.txt", "content": "some text\n"}
        assert announced["locations"][0]["path"] == str(place / "notes.txt")
        (question,) = asked
        assert question["toolCall"]["content"] == [diff]
        assert question["toolCall"]["toolCallId"] == announced["toolCallId"]
        assert not any("content" in update for update in agent.updates(session, "tool_call_update"))
        assert statuses(agent, session) == [
            ("tool_call", "pending"),
            ("tool_call_update", "in_progress"),
            ("tool_call_update", "completed"),
        ]


async def test_a_rejected_write_does_not_happen_and_the_turn_goes_on(crow: StartCrow, place: Path) -> None:
    async with crow(answers={"session/request_permission": reject_once}) as agent:
        session = await opened(agent, place)
        assert (await agent.prompt(session, "write notes.txt: some text"))["stopReason"] == "end_turn"
        assert not (place / "notes.txt").exists()
        assert statuses(agent, session)[-1] == ("tool_call_update", "failed")


async def test_an_always_answer_is_stored_with_the_session(crow: StartCrow, place: Path) -> None:
    asked: list[str] = []

    def always(params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params["toolCall"]["title"])
        return {"outcome": {"outcome": "selected", "optionId": "allow_always"}}

    async with crow(answers={"session/request_permission": always}) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "write a.txt: one")
        await agent.prompt(session, "write b.txt: two")
    async with crow(answers={"session/request_permission": always}) as agent:
        await reloaded(agent, session, place)
        await agent.prompt(session, "write c.txt: three")
    assert len(asked) == 1
    assert [(place / name).read_text() for name in ("a.txt", "b.txt", "c.txt")] == ["one\n", "two\n", "three\n"]


async def test_a_permission_error_or_invalid_answer_means_no(crow: StartCrow, place: Path) -> None:
    def broken(_: dict[str, Any]) -> Any:
        raise RpcError(-32603, "No dialog here")

    async with crow(answers={"session/request_permission": broken}) as agent:
        session = await opened(agent, place)
        assert (await agent.prompt(session, "write a.txt: one"))["stopReason"] == "end_turn"
        assert not (place / "a.txt").exists()


async def test_output_of_a_client_terminal_appears_only_there(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place, _meta={"terminal_output": True})
        await agent.prompt(session, "run echo one; exit 3")
        first, *_, last = agent.updates(session, "tool_call", "tool_call_update")
        assert first["content"] == [{"type": "terminal", "terminalId": first["toolCallId"]}]
        assert first["_meta"]["terminal_info"] == {"terminal_id": first["toolCallId"], "cwd": str(place)}
        assert last["_meta"]["terminal_exit"]["exit_code"] == 3
        outputs = [u["_meta"]["terminal_output"]["data"] for u in agent.updates(session, "tool_call_update")
                   if "terminal_output" in u.get("_meta", {})]  # fmt: skip
        assert "".join(outputs) == "one\n[exit code 3]"
        assert "content" not in last


async def test_cancel_during_streaming_keeps_what_was_shown_and_closes_the_request(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("partial ", "never", between=[gate]), fake.text("after"))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "hello")
        await agent.wait_for_text(session, "partial")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        assert await asyncio.to_thread(endpoint.asked[0].left.wait, 5)
        assert (await agent.prompt(session, "again"))["stopReason"] == "end_turn"
        sent = endpoint.asked[1].body["messages"]
        assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
        assert "partial" in sent[2]["content"]
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        assert agent.text(session, "user_message_chunk") == "helloagain"
        assert "partial" in agent.text(session)
        assert agent.text(session).endswith("after")


async def test_cancel_before_the_first_token_answers_cancelled(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.Reply(steps=(gate,)))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "hello")
        await gate.reached()
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        assert (await agent.prompt(session, "again"))["stopReason"] == "end_turn"


async def test_cancel_during_a_tool_stops_its_process_and_fails_its_call(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "run echo $$ > pid; sleep 600")
        pid = await read_pid(place / "pid")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        assert statuses(agent, session)[-1] == ("tool_call_update", "failed")
        await wait_until_gone(pid)
        assert (await agent.prompt(session, "say next"))["stopReason"] == "end_turn"


async def test_cancel_during_a_permission_request_withdraws_it(crow: StartCrow, place: Path) -> None:
    never = asyncio.Event()

    async def silent(_: dict[str, Any]) -> Any:
        await never.wait()

    async with crow(answers={"session/request_permission": silent}) as agent:
        session = await opened(agent, place)
        call = await agent.start_prompt(session, "write a.txt: one")
        asked = await agent.wait_for(lambda message: message.get("method") == "session/request_permission")
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        withdrawn = await agent.wait_for(lambda message: message.get("method") == "$/cancel_request")
        assert agent.log[withdrawn].message["params"] == {"requestId": agent.log[asked].message["id"]}
        assert not (place / "a.txt").exists()


async def test_cancel_while_idle_changes_nothing(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.notify("session/cancel", {"sessionId": session})
        assert (await agent.prompt(session, "say hello"))["stopReason"] == "end_turn"
        await agent.notify("session/cancel", {"sessionId": session})
        assert (await agent.prompt(session, "say again"))["stopReason"] == "end_turn"
        assert agent.text(session) == "helloagain"


async def test_cancel_ends_queued_prompts_too(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    gate = Gate()
    endpoint.script(fake.text("one", "two", between=[gate]))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        calls = [await agent.start_prompt(session, text) for text in ("first", "second")]
        await agent.wait_for_text(session, "one")
        await agent.notify("session/cancel", {"sessionId": session})
        assert [await call.result() for call in calls] == [{"stopReason": "cancelled"}] * 2
        assert len(endpoint.asked) == 1


async def test_kill_before_the_first_token_keeps_the_prompt(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.Reply(steps=(gate,)))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.start_prompt(session, "remember me")
        await gate.reached()
        await agent.kill()
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        assert agent.text(session, "user_message_chunk") == "remember me"
        assert (await agent.prompt(session, "go on"))["stopReason"] == "end_turn"
        contents = [str(message["content"]) for message in endpoint.asked[-1].body["messages"]]
        assert any("remember me" in content for content in contents)


async def test_load_replays_everything_shown_and_resume_replays_nothing(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "think about nests then read README.md then say bye")
        await agent.prompt(session, "plan: one; two")
        live = {kind: agent.text(session, kind) for kind in ("agent_message_chunk", "agent_thought_chunk")}
        calls = [update["toolCallId"] for update in agent.updates(session, "tool_call")]
        plan = agent.updates(session, "plan")
    async with crow() as agent:
        await agent.initialize()
        call = await agent.start("session/load", {"sessionId": session, "cwd": str(place), "mcpServers": []})
        result = await call.result()
        assert result.keys() >= {"modes", "configOptions"}
        assert {kind: agent.text(session, kind) for kind in live} == live
        assert [(u["toolCallId"], u["status"]) for u in agent.updates(session, "tool_call")] == [
            (call_id, "completed") for call_id in calls
        ]
        assert agent.updates(session, "plan") == plan
        assert agent.updates(session, "tool_call_update") == []
    async with crow() as agent:
        await agent.initialize()
        await agent.request("session/resume", {"sessionId": session, "cwd": str(place), "mcpServers": []})
        await agent.wait_for_update("available_commands_update")
        assert agent.updates(session, "user_message_chunk", "agent_message_chunk", "tool_call", "plan") == []
        assert (await agent.prompt(session, "say hello"))["stopReason"] == "end_turn"
        full = agent.updates(session, "usage_update")[-1]
        for command, expected in (
            ("/undo", []),
            ("/undo", [{"sessionUpdate": "plan", "entries": []}]),
            ("/redo", plan),
        ):
            since = len(agent.log)
            await agent.prompt(session, command)
            assert agent.updates(session, "plan", since=since) == expected
            (measured,) = agent.updates(session, "usage_update", since=since)
            assert (measured["used"] < full["used"], measured["size"]) == (True, full["size"])


async def test_unsaved_editor_text_is_read_and_a_refused_write_is_final(crow: StartCrow, place: Path) -> None:
    def refuse(_: dict[str, Any]) -> Any:
        raise RpcError(-32603, "Internal error", {"details": "Permission denied for fs/write_text_file"})

    answers = {"fs/read_text_file": lambda _: {"content": "unsaved words\n"}, "fs/write_text_file": refuse}
    async with crow(answers=answers) as agent:
        session = await opened(agent, place, **FS)
        await agent.prompt(session, "read README.md")
        assert "unsaved words" in agent.text(session)
        await agent.prompt(session, "write a.txt: one")
        assert not (place / "a.txt").exists()
        assert "Permission denied for fs/write_text_file" in agent.text(session)


async def test_a_large_output_stays_below_the_line_limit(crow: StartCrow, place: Path) -> None:
    async with crow() as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "run seq 1 200000")
        done = agent.updates(session, "tool_call_update")[-1]
        assert done["status"] == "completed"
        assert "not shown here" in done["content"][0]["content"]["text"]


async def test_usage_shows_the_sessions_usage_so_far(crow: StartCrow, place: Path, endpoint: FakeEndpoint) -> None:
    endpoint.script(fake.calls(("read_file", {"path": "README.md"})), fake.text("Twigs."))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.prompt(session, "what is in it?")
        await agent.prompt(session, "/usage")
        first = agent.text(session).partition("\n\n")[0]
        await agent.prompt(session, "again")
        since = len(agent.log)
        await agent.prompt(session, "/usage")
        second = agent.text(session, since=since).partition("\n\n")[0]
    assert first == "Twigs.This session used 20 input tokens, 10 output tokens in 2 requests; 3 messages."
    assert second == "This session used 30 input tokens, 15 output tokens in 3 requests; 5 messages."


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (fake.failing(401, "Incorrect API key provided"), -32000),
        (fake.failing(404, "The model does not exist", code="model_not_found"), -32603),
        (fake.failing(400, "That is no good"), -32603),
    ],
)
async def test_a_failing_endpoint_gives_a_useful_error_and_the_next_prompt_works(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint, reply: fake.Reply, code: int
) -> None:
    endpoint.script(reply)
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        with pytest.raises(RpcError) as raised:
            await agent.prompt(session, "hello")
        assert raised.value.code == code
        assert "sk-test" not in str(raised.value.data)
        assert raised.value.data["details"] == raised.value.message
        assert (await agent.prompt(session, "again"))["stopReason"] == "end_turn"
