"""Sessions after `kill -9`, and one session in two processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NO_ANSWER, NOT_RUN
from tests.stdio.conftest import StartCrow
from tests.stdio.test_turns import opened, read_pid, reloaded, wait_for_draft
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, RpcError
from tests.support.fake_endpoint import FakeEndpoint, Gate


def named(agent: CrowProcess) -> str:
    """The process as errors and remarks name it."""
    return f"process {agent.pid} on {socket.gethostname()}"


def told(endpoint: FakeEndpoint) -> list[dict[str, Any]]:
    """The messages of the newest request, without the system message."""
    return list(endpoint.asked[-1].body["messages"][1:])


def stored(home: Path, session: str) -> list[tuple[str, Any]]:
    """Kind and body of every entry of the session."""
    with closing(sqlite3.connect(home / "crow.db")) as connection:
        rows = connection.execute("SELECT kind, body FROM entry_bodies WHERE session = ? ORDER BY id", (session,))
        return [(kind, json.loads(body)) for kind, body in rows if kind != "prompt"]


def texts(agent: CrowProcess, session: str) -> list[str]:
    """The replayed texts, one for each message."""
    chunks = agent.updates(session, "user_message_chunk", "agent_message_chunk")
    return [chunk["content"]["text"].strip() for chunk in chunks]


async def never(_: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


async def test_kill_during_streaming_marks_the_text_as_interrupted(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    read = fake.calls(("read_file", {"path": "README.md"}), say="I look.")
    endpoint.script(read, fake.text("first words ", "never", between=[gate]))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.start_prompt(session, "hello")
        await agent.wait_for_text(session, "first words")
        await wait_for_draft(home / "crow.db", "first words ")
        killed = named(agent)
        await agent.kill()
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        assert texts(agent, session) == [
            "hello",
            "I look.",
            f"first words \n\n{INTERRUPTED}",
            f"({killed} ended in the middle of this turn)",
        ]
        (call,) = agent.updates(session, "tool_call")
        assert (call["status"], call["title"]) == ("completed", "Read README.md")
        await agent.prompt(session, "go on")
        _, _, result, partial, _ = told(endpoint)
        assert "Twigs and string." in result["content"]
        assert partial == {"role": "assistant", "content": f"first words \n\n{INTERRUPTED}"}


async def test_kill_during_a_tool_reports_its_effects_as_unknown(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(fake.calls(("shell", {"command": "echo $$ > pid; sleep 600"}), say="I run it."))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.start_prompt(session, "run it")
        pid = await read_pid(place / "pid")
        await agent.kill()
        os.killpg(pid, 9)
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        (call,) = agent.updates(session, "tool_call")
        assert (call["status"], call["kind"]) == ("failed", "execute")
        assert call["content"][0]["content"]["text"] == EFFECTS_UNKNOWN
        await agent.prompt(session, "go on")
        assert [message["content"] for message in told(endpoint) if message["role"] == "tool"] == [EFFECTS_UNKNOWN]


async def test_kill_during_a_permission_request_means_the_call_did_not_run(
    crow: StartCrow, place: Path, endpoint: FakeEndpoint
) -> None:
    edit = ("edit_file", {"path": "README.md", "old_text": "Twigs", "new_text": "Moss"})
    write = ("write_file", {"path": "a.txt", "content": "one"})
    look = ("read_file", {"path": "README.md", "line": 2})
    endpoint.script(fake.calls(edit, write, look, ("shell", {"command": "echo hi"}), say="I write."))
    async with crow(endpoint=endpoint, answers={"session/request_permission": never}) as agent:
        session = await opened(agent, place)
        await agent.start_prompt(session, "write it")
        await agent.wait_for(lambda message: message.get("method") == "session/request_permission")
        announced = agent.updates(session, "tool_call")
        await agent.kill()
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        calls = agent.updates(session, "tool_call")
        words = {"type": "content", "content": {"type": "text", "text": NOT_RUN}}
        assert calls == [
            call | {"status": "failed", "content": [*call.get("content", []), words]} for call in announced
        ]
        assert [(call["kind"], len(call["locations"]), len(call["content"])) for call in calls] == [
            ("edit", 1, 2),
            ("edit", 1, 2),
            ("read", 1, 1),
            ("execute", 0, 1),
        ]
        await agent.prompt(session, "go on")
        assert [message["content"] for message in told(endpoint) if message["role"] == "tool"] == [NOT_RUN] * 4
        assert not (place / "a.txt").exists()


async def test_a_call_killed_before_it_began_is_replayed_as_it_was_shown(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    edit = ("edit_file", {"path": "README.md", "old_text": "Twigs", "new_text": "Moss"})
    answer = fake.calls(edit, say="first.")
    begun = fake.sse(fake.chunk({"role": "assistant", "content": "I look "}), done=False)
    endpoint.script(replace(answer, steps=(begun, *answer.steps)))
    gate = asyncio.Event()

    async def slowly(params: dict[str, Any]) -> Any:
        await gate.wait()
        return {"content": "Twigs, unsaved\n"}

    answers = {"session/request_permission": never, "fs/read_text_file": slowly}
    async with crow(endpoint=endpoint, answers=answers) as agent:
        session = await opened(agent, place, fs={"readTextFile": True, "writeTextFile": True})
        await agent.start_prompt(session, "write it")
        await agent.wait_for(lambda message: message.get("method") == "fs/read_text_file")
        await wait_for_draft(home / "crow.db", "I look first.")
        gate.set()
        await agent.wait_for(lambda message: message.get("method") == "session/request_permission")
        (announced,) = agent.updates(session, "tool_call")
        await agent.kill()
    assert announced["content"][0]["oldText"] == "Twigs, unsaved\n"
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        (call,) = agent.updates(session, "tool_call")
        fields = ("title", "kind", "locations", "rawInput")
        assert [call[field] for field in fields] == [announced[field] for field in fields]
        assert call["content"][0] == announced["content"][0]
        assert agent.text(session).startswith("I look first.")


async def test_a_call_cancelled_while_the_editor_is_slow_did_not_run(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    edit = ("edit_file", {"path": "README.md", "old_text": "Twigs", "new_text": "Moss"})
    endpoint.script(fake.calls(edit, say="I look first."))
    async with crow(endpoint=endpoint, answers={"fs/read_text_file": never}) as agent:
        session = await opened(agent, place, fs={"readTextFile": True, "writeTextFile": True})
        prompted = await agent.start_prompt(session, "write it")
        await agent.wait_for(lambda message: message.get("method") == "fs/read_text_file")
        await agent.notify("session/cancel", {"sessionId": session})
        assert (await prompted.result())["stopReason"] == "cancelled"
        shown = agent.updates(session, "tool_call", "tool_call_update")
        assert [update["status"] for update in shown] == ["pending", "failed"]  # as a load shows it
        (assistant,) = [body for kind, body in stored(home, session) if kind == "assistant"]
        assert (assistant["text"], assistant["finish"], len(assistant["calls"])) == ("I look first.", "tool_calls", 1)
        await agent.prompt(session, "go on")
        assert [message["content"] for message in told(endpoint) if message["role"] == "tool"] == [NOT_RUN]


async def test_prompts_queued_at_a_kill_are_shown_and_not_run(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.Reply(steps=(gate,)))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.start_prompt(session, "first")
        await gate.reached()
        for text in ("second", "third"):
            await agent.start_prompt(session, text)
        await queued(home, 2)
        killed = named(agent)
        await agent.kill()
    async with crow(endpoint=endpoint) as agent:
        await reloaded(agent, session, place)
        waited = f"({killed} ended before it ran this prompt)"
        assert texts(agent, session) == [
            "first",
            f"({killed} ended in the middle of this turn)",
            "second",
            waited,
            "third",
            waited,
        ]
        assert len(endpoint.asked) == 1
        assert (await agent.prompt(session, "fourth"))["stopReason"] == "end_turn"
        assert len(endpoint.asked) == 2
        assert [(message["role"], message["content"]) for message in told(endpoint)] == [
            ("user", "first"),
            ("assistant", NO_ANSWER),
            ("user", "second"),
            ("assistant", NO_ANSWER),
            ("user", "third"),
            ("assistant", NO_ANSWER),
            ("user", "fourth"),
        ]


async def queued(home: Path, wanted: int) -> None:
    """Wait until the inbox has this many prompts; no message reports that."""

    def count() -> int:
        with closing(sqlite3.connect(f"{(home / 'crow.db').as_uri()}?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM inbox").fetchone()[0])

    while await asyncio.to_thread(count) < wanted:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_two_processes_opening_a_killed_session_repair_it_once(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("partial ", "never", between=[gate]))
    async with crow(endpoint=endpoint) as agent:
        session = await opened(agent, place)
        await agent.start_prompt(session, "first")
        await agent.start_prompt(session, "second")
        await queued(home, 1)
        await agent.wait_for_text(session, "partial")
        await wait_for_draft(home / "crow.db", "partial ")
        await agent.kill()
    async with crow(endpoint=endpoint) as one, crow(endpoint=endpoint) as other:
        both = (one, other)
        await asyncio.gather(*(agent.initialize() for agent in both))
        await asyncio.gather(*(agent.load_session(session, place) for agent in both))
        assert texts(one, session) == texts(other, session)
        assert [kind for kind, _ in stored(home, session)] == ["user", "assistant", "turn_end", "user", "turn_end"]
        assert [(await agent.prompt(session, "on"))["stopReason"] for agent in both] == ["end_turn"] * 2


async def test_two_processes_share_a_session_and_see_each_others_turns(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    endpoint.script(*(fake.text(f"answer {number}") for number in range(1, 5)))
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir()
    async with crow(endpoint=endpoint) as one, crow(endpoint=endpoint) as other:
        session = await opened(one, place)
        await one.prompt(session, "prompt 1")
        await reloaded(other, session, elsewhere)
        assert texts(other, session) == ["prompt 1", "answer 1"]
        await other.prompt(session, "prompt 2")
        await one.prompt(session, "prompt 3")
        await other.prompt(session, "prompt 4")
        said = [message["content"] for message in told(endpoint)]
        assert said == ["prompt 1", "answer 1", "prompt 2", "answer 2", "prompt 3", "answer 3", "prompt 4"]
        for agent in (one, other):
            assert "Another process added messages to this session" in agent.text(session)
        # each client names its own servers
        places = [str(asked.body["messages"][0]["content"]) for asked in endpoint.asked]
        assert [(str(place) in words, str(elsewhere) in words) for words in places] == [
            (True, False),
            (False, True),
        ] * 2
        assert f"worked in {elsewhere} until now; from here on it works in {place}." in one.text(session)
    kinds = [kind for kind, _ in stored(home, session) if kind != "remark"]
    assert kinds == ["user", "assistant", "turn_end"] * 4


async def test_a_prompt_to_a_session_running_elsewhere_names_the_owner_and_takes_over_from_a_dead_one(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    gate = Gate()
    endpoint.script(fake.text("ready"), fake.text("partial ", "never", between=[gate]), fake.text("taken over"))
    async with crow(endpoint=endpoint) as one, crow(endpoint=endpoint) as other:
        session = await opened(one, place)
        await one.prompt(session, "first")
        await reloaded(other, session, place)
        await one.start_prompt(session, "second")
        await one.wait_for_text(session, "partial")
        await wait_for_draft(home / "crow.db", "partial ")
        before = stored(home, session)
        with pytest.raises(RpcError) as raised:
            await other.prompt(session, "me too")
        assert raised.value.message == (
            f"Session {session} is busy: {named(one)} is running a turn in it. "
            "Wait for the turn to end, or end that process."
        )
        assert stored(home, session) == before
        await one.kill()
        assert await other.prompt(session, "me then") == {"stopReason": "end_turn"}
        assert [(message["role"], message["content"]) for message in told(endpoint)][2:] == [
            ("user", "second"),
            ("assistant", f"partial \n\n{INTERRUPTED}"),
            ("user", "me then"),
        ]
        assert "taken over" in other.text(session)


@pytest.mark.parametrize("end", ["answered", "killed"])
async def test_a_repeat_in_another_process_waits_for_the_outcome_of_the_first_one(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint, end: str
) -> None:
    gate = Gate()
    endpoint.script(fake.text("ready"), fake.text("partial ", "rest", between=[gate]), fake.text("after"))
    async with crow(endpoint=endpoint) as one, crow(endpoint=endpoint) as other:
        session = await opened(one, place)
        await one.prompt(session, "first")
        await reloaded(other, session, place)
        words: dict[str, Any] = {"sessionId": session, "prompt": [{"type": "text", "text": "second"}]}
        words["_meta"] = {"crow": {"promptId": "p-1"}}
        first = asyncio.create_task(one.request("session/prompt", words))
        await one.wait_for_text(session, "partial")
        await wait_for_draft(home / "crow.db", "partial ")
        repeat = asyncio.create_task(other.request("session/prompt", words))
        again = asyncio.create_task(other.request("session/prompt", words))
        with pytest.raises(RpcError, match="is busy"):  # after the repeats were read
            await other.prompt(session, "me too")
        assert not repeat.done()
        if end == "answered":
            gate.open()
            assert await first == await repeat == await again
        else:
            await one.kill()
            for each in (repeat, again):
                with pytest.raises(RpcError, match="was interrupted"):
                    await each
        assert len(endpoint.asked) == 2
        assert (await other.prompt(session, "third"))["stopReason"] == "end_turn"
    assert [kind for kind, _ in stored(home, session)].count("user") == 3
