"""Whatever a network does at whatever byte, the editor's transcript equals the server's log."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.acp_v2 import SessionView
from tests.support.bridged import BridgedEditor, QuickTimes
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply, calls, text
from tests.support.fake_server import FakeServer
from tests.support.fault_proxy import FaultProxy
from tests.support.server import ServerProcess, server_environment


class FaultTimes(QuickTimes):
    """Notices a stalled connection soon."""

    ping, pong, connect = 0.1, 0.15, 5.0


class PatientTimes(QuickTimes):
    """The same for a whole server, which has more to do."""

    ping, pong, connect = 0.2, 0.5, 5.0
    ask_again = 5.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a short path, as sockets need it."""
    directory = tempfile.mkdtemp(prefix="crow-")
    yield Path(directory)
    shutil.rmtree(directory)


async def run_turns(path: Path, *, seed: int, faults: int) -> dict[str, int]:
    """Runs turns in two sessions until there were this many faults. Returns the faults by kind."""
    choice = random.Random(seed)
    async with (
        FakeServer(path) as server,
        FaultProxy(path, seed=seed) as proxy,
        BridgedEditor(proxy.url, times=FaultTimes) as editor,
    ):
        proxy.is_hostile = False
        sessions = [await editor.new_session() for _ in range(2)]
        proxy.is_hostile = True
        sent = 0
        while proxy.faults.total() < faults:
            running = []
            for session in sessions:
                sent += 1
                words = f"{choice.randrange(1, 40)} w{sent}-" if choice.random() < 0.8 else "ask"
                running.append(await editor.start_prompt(session, words))
            for answer in running:
                assert (await answer)["result"] == {"stopReason": "end_turn"}
            assert "result" in await editor.request("session/list")
        for session in sessions:
            assert editor.text(session) == server.text(session)
        assert server.prompts.total() == sent
        assert len(editor.asks()) == server.prompts["ask"]
    return dict(proxy.faults)


async def run_real_turns(folder: Path, *, seed: int, faults: int, is_v2: bool = False) -> dict[str, int]:
    """The same with `crow serve`, whose model also runs commands. Each command leaves a line in a file.

    With `is_v2`, the editor speaks version 2 of the protocol.
    """
    choice, path, ran = random.Random(seed), folder / "crow.sock", folder / "ran"
    told: Callable[[BridgedEditor, str], object] = items if is_v2 else transcript
    async with FakeEndpoint(otherwise=answer_to) as endpoint:
        env = server_environment(
            folder / "home", CROW_SANDBOX="off", CROW_MODEL="fake-model", OPENAI_BASE_URL=endpoint.base_url
        )
        options = ("--listen", str(path), *(["--experimental-v2"] if is_v2 else []))
        async with ServerProcess(*options, env=env, cwd=folder) as server:
            async with (
                FaultProxy(path, seed=seed, median_bytes=6000) as proxy,
                BridgedEditor(proxy.url, times=PatientTimes) as editor,
            ):
                proxy.is_hostile = False
                open_session = editor.new_session_v2 if is_v2 else editor.new_session
                sessions = [await open_session(folder) for _ in range(2)]
                proxy.is_hostile = True
                commands: list[str] = []
                while proxy.faults.total() < faults:
                    running: list[Any] = []
                    for session in sessions:
                        number = len(commands) + len(running)
                        words = f"{choice.randrange(1, 40)} w{number}-" if choice.random() < 0.6 else f"run r{number}"
                        commands += [words] if words.startswith("run") else [""]
                        running.append(await editor.start_prompt(session, words))
                    for session, answer in zip(sessions, running, strict=True):
                        result = (await answer).get("result", {})
                        if is_v2:
                            result = await editor.turn_end(session, result["messageId"])
                        assert result.get("stopReason") == "end_turn"
                known = {session: told(editor, session) for session in sessions}
                asked = len(editor.asks())
                assert not [each for each in editor.log if kind_of(each) == "user_message_chunk"]
            async with BridgedEditor(path) as reader:
                if is_v2:
                    await reader.new_session_v2(folder)
                else:
                    await reader.request("initialize", protocolVersion=1)
                load = {"replayFrom": {"type": "start"}} if is_v2 else {}
                for session in sessions:
                    method = "session/resume" if is_v2 else "session/load"
                    await reader.request(method, sessionId=session, cwd=str(folder), mcpServers=[], **load)
                    assert known[session] == told(reader, session)
            server.is_checked = False
    expected = [command.removeprefix("run ") for command in commands if command]
    assert sorted(ran.read_text().split() if expected else ()) == sorted(expected)
    assert asked == len(expected)
    return dict(proxy.faults)


def answer_to(request: Recorded) -> Reply:
    """ "5 x" is answered with five pieces, "run x" with a command and then a sentence."""
    last = request.body["messages"][-1]
    if last["role"] == "tool":
        return text("Done", ". ")
    words = last["content"] if isinstance(last["content"], str) else json.dumps(last["content"])
    count, _, word = words.partition(" ")
    if count == "run":
        return calls(("shell", {"command": f"echo {word} >> ran"}))
    pieces = [f"{word}{number} " for number in range(int(count) if count.isdigit() else 1)]
    return text(*pieces, between=[0.002] * len(pieces))


def transcript(editor: BridgedEditor, session: str) -> tuple[str, list[str]]:
    """What the agent said in a session, and its tool calls with their last status."""
    states: dict[str, str] = {}
    for message in editor.log:
        if kind_of(message) in ("tool_call", "tool_call_update") and message["params"]["sessionId"] == session:
            update = message["params"]["update"]
            states[update["toolCallId"]] = update.get("status", states.get(update["toolCallId"], ""))
    return editor.text(session), [f"{call} {status}" for call, status in states.items()]


def items(editor: BridgedEditor, session: str) -> dict[Any, Any]:
    """What a client of version 2 knows of a session: the texts of the messages and the states of the calls."""
    view = SessionView(editor.updates(session))
    messages = {key: "".join(part["text"] for part in item) for key, item in view.items.items() if key[0] != "call"}
    return messages | {key: item["status"] for key, item in view.items.items() if key[0] == "call"}


def kind_of(message: dict[str, Any]) -> str | None:
    """The kind of an update; None for another message."""
    update = message.get("params", {}).get("update", {}) if message.get("method") == "session/update" else {}
    kind: str | None = update.get("sessionUpdate")
    return kind


async def test_any_fault_at_any_byte_leaves_the_transcript_equal_to_the_log(folder: Path) -> None:
    assert sum((await run_turns(folder / "crow.sock", seed=1, faults=60)).values()) >= 60


@pytest.mark.long
@pytest.mark.parametrize(("is_v2", "faults"), [(False, 15), (True, 8)])
async def test_a_server_runs_each_command_once_whatever_the_network_does(
    folder: Path, *, is_v2: bool, faults: int
) -> None:
    assert sum((await run_real_turns(folder, seed=1, faults=faults, is_v2=is_v2)).values()) >= faults


async def test_a_client_of_version_2_learns_how_a_turn_ended_and_is_asked_once(folder: Path) -> None:
    path, gate = folder / "crow.sock", Gate()
    async with FakeEndpoint() as endpoint:
        endpoint.script(text("one ", "two", between=[gate]), calls(("shell", {"command": "echo nest"})), text("Built."))
        env = server_environment(
            folder / "home", CROW_SANDBOX="off", CROW_MODEL="fake-model", OPENAI_BASE_URL=endpoint.base_url
        )
        async with (
            ServerProcess("--listen", str(path), "--experimental-v2", env=env, cwd=folder),
            FaultProxy(path, seed=1) as proxy,
            BridgedEditor(proxy.url, times=PatientTimes) as editor,
            BridgedEditor(path) as watcher,
        ):
            proxy.is_hostile = editor.answers_asks = watcher.answers_asks = False
            session = await editor.new_session_v2(folder)
            await watcher.new_session_v2(folder)
            await watcher.request("session/resume", sessionId=session, cwd=str(folder), mcpServers=[])
            prompt = (await editor.prompt(session, "Count"))["result"]["messageId"]
            await editor.until(lambda: "one " in editor.text(session))
            proxy.go_away()
            gate.open()
            await watcher.turn_end(session, prompt)
            proxy.come_back()
            assert (await editor.turn_end(session, prompt))["stopReason"] == "end_turn"
            assert editor.text(session) == "one two"

            prompt = (await editor.prompt(session, "Build"))["result"]["messageId"]
            await editor.until(editor.asks)
            for _ in range(2):
                proxy.go_away()
                proxy.come_back()
                await editor.request("session/list")
            outcome = {"outcome": {"outcome": "selected", "optionId": "allow_once"}}
            await editor.send({"id": editor.asks()[0]["id"], "result": outcome})
            assert (await editor.turn_end(session, prompt))["stopReason"] == "end_turn"
            assert len(editor.asks()) == 1
            assert not [each for each in editor.log if each.get("method") == "$/cancel_request"]
            assert items(editor, session) == items(watcher, session)


async def test_a_prompt_of_a_killed_server_is_not_run_again_by_the_next_one(folder: Path) -> None:
    path, gate = folder / "crow.sock", Gate()
    async with FakeEndpoint() as endpoint:
        endpoint.script(text("one ", "two", between=[gate]), text("Again."))
        env = server_environment(
            folder / "home", CROW_SANDBOX="off", CROW_MODEL="fake-model", OPENAI_BASE_URL=endpoint.base_url
        )
        async with FaultProxy(path, seed=1) as proxy, AsyncExitStack() as stack:
            proxy.is_hostile = False
            async with ServerProcess("--listen", str(path), env=env, cwd=folder) as server:
                editor = await stack.enter_async_context(BridgedEditor(proxy.url, times=PatientTimes))
                session = await editor.new_session(folder)
                answer = await editor.start_prompt(session, "Count")
                await editor.until(lambda: "one " in editor.text(session))
                server.is_checked = False
                server.process.kill()
                await server.wait()
            async with ServerProcess("--listen", str(path), env=env, cwd=folder):
                assert "was interrupted" in (await answer)["error"]["message"]
                assert (await editor.prompt(session, "Go on"))["result"]["stopReason"] == "end_turn"
                assert editor.text(session).startswith("one ")
                await stack.aclose()
        asked = [each.body["messages"][-1]["content"] for each in endpoint.requests if each.body]
        assert asked == ["Count", "Go on"]
