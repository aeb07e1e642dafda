"""Sessions that programs write, and files that follow sessions: with whole processes, some of them killed."""

# ruff: noqa: ASYNC240  # these tests look at files while nothing else waits

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from crow import Sessions
from tests.sessions.loop import keys, loop_replies
from tests.stdio.conftest import StartCrow
from tests.support.fake_endpoint import FakeEndpoint, Gate
from tests.support.fork_server import command

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs" / "python-api.md").read_text("utf-8")
(LOOP,) = (each for each in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "AsyncOpenAI" in each)


async def test_a_loop_that_was_killed_goes_on_and_an_editor_opens_its_session(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    called, last = loop_replies()
    gate = Gate()
    endpoint.script(called, replace(last, steps=(gate, *last.steps)), called, last)
    env = {**os.environ, "CROW_HOME": str(home), "PYTHONPATH": str(PROJECT), **keys(endpoint)}
    loop = command(LOOP)
    with anyio.fail_after(1200):
        async with await anyio.open_process(loop, cwd=place, env=env) as killed:
            assert await anyio.to_thread.run_sync(gate.wait_reached, 600)
            killed.kill()
        gate.open()
        done = await anyio.run_process(loop, cwd=place, env=env)
    assert done.stdout.decode() == "It has room.\n"
    assert [message["role"] for message in endpoint.asked[-1].sent["messages"]] == [
        *("system", "user", "assistant", "tool"),  # of the process that was killed
        *("user", "assistant", "tool"),
    ]
    async with Sessions.open(home / "crow.db") as sessions:
        (session,) = await sessions.list(tags=["admin"])
    assert (session.title, session.message_count, session.tokens_in) == ("Administration", 5, 30)
    endpoint.clear_script()
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(session={"compaction": {}})
        listed = await agent.request("session/list", {})
        assert [one["sessionId"] for one in listed["sessions"]] == [session.id]
        await agent.load_session(session.id, place)
        assert "It has room." in agent.text(session.id)
        assert len(agent.updates(session.id, "tool_call")) == 2
        assert (await agent.prompt(session.id, "and now?"))["stopReason"] == "end_turn"
        sent = endpoint.asked[-1].sent["messages"]
        assert [message["content"] for message in sent if message["role"] == "tool"] == ["twigs\n"] * 2


async def compactions(home: Path) -> list[Any]:
    async with Sessions.open(home / "crow.db") as sessions:
        return [one.id for one in await sessions.list() if one.is_compacted]


async def test_a_long_session_of_a_program_is_compacted_by_crow(
    crow: StartCrow, home: Path, place: Path, endpoint: FakeEndpoint
) -> None:
    async with Sessions.open(home / "crow.db", write=True) as sessions:
        session = await sessions.create(workspace=place, model="fake-model")
        for index in range(12):
            question = {"role": "user", "content": f"question {index} " + "word " * 400}
            await session.append(question, {"role": "assistant", "content": f"answer {index} " + "word " * 400})
        await session.append({"role": "user", "content": "x " * 500_000}, {"role": "assistant", "content": "long"})
    async with crow(endpoint=endpoint) as agent:
        await agent.initialize(session={"compaction": {}})
        await agent.load_session(session.id, place)
        await agent.prompt(session.id, "/compact the nest")
        assert agent.updates(session.id, "compaction_update")[-1]["status"] == "completed"
        assert (await agent.prompt(session.id, "go on"))["stopReason"] == "end_turn"
    assert await compactions(home) == [session.id]


async def test_the_mirror_is_private_and_complete_after_a_kill(
    crow: StartCrow, home: Path, place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    home.mkdir()
    (home / "config.toml").write_text(f"[store]\nmirror = {json.dumps(str(folder))}\n")
    async with crow() as agent:
        await agent.initialize()
        session = await agent.new_session(place)
        await agent.prompt(session, "hello")
        await agent.kill()
    async with crow() as agent:
        await agent.initialize()
        await agent.load_session(session, place)
        await agent.prompt(session, "again")
    text = (folder / f"{session}.jsonl").read_text("utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    async with Sessions.open(home / "crow.db") as sessions:
        entries = [entry.id async for entry in (await sessions.get(session)).entries()]
    assert [line["id"] for line in found[1:]] == entries
    assert (found[0]["directory"], (folder / f"{session}.jsonl").stat().st_mode & 0o777) == (str(place), 0o600)
    async with crow() as agent:
        await agent.initialize()
        await agent.request("session/delete", {"sessionId": session})
    assert list(folder.glob("*.jsonl")) == []


async def test_a_session_can_be_followed_as_lines_while_another_process_writes(home: Path) -> None:
    async with Sessions.open(home / "crow.db", write=True) as sessions:
        session = await sessions.create(alias="followed")
        hello = {"role": "user", "content": "use sk-1234567890abcdefghij"}
        await session.append(hello, {"role": "assistant", "content": "first"})
        line = [*command(), "sessions", "show", "followed", "--follow", "--format", "jsonl"]
        env = {**os.environ, "CROW_HOME": str(home), "PYTHONPATH": str(PROJECT)}
        with anyio.fail_after(600):
            async with await anyio.open_process(line, env=env, stderr=None) as process:
                assert process.stdout is not None
                data = b""
                while data.count(b"\n") < 3:
                    data += await process.stdout.receive()
                await session.append({"role": "user", "content": "second"})
                while data.count(b"\n") < 5:
                    data += await process.stdout.receive()
                process.send_signal(signal.SIGINT)
                await process.wait()
    found = [json.loads(line) for line in data.splitlines()]
    assert [line["kind"] for line in found] == ["user", "assistant", "turn_end", "user", "turn_end"]
    assert found[0]["body"]["parts"] == [{"type": "text", "text": "use [hidden]"}]
    assert b"sk-1234" not in data
