"""Whatever a network does at whatever byte, the editor's transcript equals the server's log."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bridged import BridgedEditor, QuickTimes
from tests.support.fake_endpoint import FakeEndpoint, Recorded, Reply, calls, text
from tests.support.fake_server import FakeServer
from tests.support.fault_proxy import FaultProxy
from tests.support.server import ServerProcess, server_environment


class FaultTimes(QuickTimes):
    """Notices a stalled connection soon."""

    ping, pong, connect = 0.1, 0.15, 0.3


class PatientTimes(QuickTimes):
    """The same for a whole server, which has more to do."""

    ping, pong, connect = 0.2, 0.5, 2.0
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


async def run_real_turns(folder: Path, *, seed: int, faults: int) -> dict[str, int]:
    """The same with `crow serve`, whose model also runs commands. Each command leaves a line in a file."""
    choice, path, ran = random.Random(seed), folder / "crow.sock", folder / "ran"
    async with FakeEndpoint(otherwise=answer_to) as endpoint:
        env = server_environment(
            folder / "home", CROW_SANDBOX="off", CROW_MODEL="fake-model", OPENAI_BASE_URL=endpoint.base_url
        )
        async with ServerProcess("--listen", str(path), env=env, cwd=folder) as server:
            async with (
                FaultProxy(path, seed=seed, median_bytes=6000) as proxy,
                BridgedEditor(proxy.url, times=PatientTimes) as editor,
            ):
                proxy.is_hostile = False
                sessions = [await editor.new_session(folder) for _ in range(2)]
                proxy.is_hostile = True
                commands: list[str] = []
                while proxy.faults.total() < faults:
                    running: list[Any] = []
                    for session in sessions:
                        number = len(commands) + len(running)
                        words = f"{choice.randrange(1, 40)} w{number}-" if choice.random() < 0.6 else f"run r{number}"
                        commands += [words] if words.startswith("run") else [""]
                        running.append(await editor.start_prompt(session, words))
                    for answer in running:
                        assert (await answer).get("result", {}).get("stopReason") == "end_turn"
                shown = {session: transcript(editor, session) for session in sessions}
                asked = len(editor.asks())
                assert not [each for each in editor.log if kind_of(each) == "user_message_chunk"]
            async with BridgedEditor(path) as reader:
                await reader.request("initialize", protocolVersion=1)
                for session in sessions:
                    await reader.request("session/load", sessionId=session, cwd=str(folder), mcpServers=[])
                    assert shown[session] == transcript(reader, session)
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


def kind_of(message: dict[str, Any]) -> str | None:
    """The kind of an update; None for another message."""
    update = message.get("params", {}).get("update", {}) if message.get("method") == "session/update" else {}
    kind: str | None = update.get("sessionUpdate")
    return kind


async def test_any_fault_at_any_byte_leaves_the_transcript_equal_to_the_log(folder: Path) -> None:
    assert sum((await run_turns(folder / "crow.sock", seed=1, faults=60)).values()) >= 60


async def test_a_server_runs_each_command_once_whatever_the_network_does(folder: Path) -> None:
    assert sum((await run_real_turns(folder, seed=1, faults=25)).values()) >= 25
