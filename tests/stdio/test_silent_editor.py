"""An editor that does not answer: requests time out, can be cancelled, and are withdrawn."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import CrowProcess, allow_once
from tests.support.fake_endpoint import FakeEndpoint

SERVER = Path(__file__).parents[1] / "tools" / "servers" / "various.py"
NEST = (
    f'[mcp_servers.nest]\ncommand = "{sys.executable}"\nargs = ["-I", "-S", "{SERVER}", "asks"]\n'
    "start_timeout_s = 300\n"
)
ALL = {"fs": {"readTextFile": True, "writeTextFile": True}, "elicitation": {"form": {}}}
LATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "session/request_permission": allow_once,
    "elicitation/create": lambda _: {"action": "accept", "content": {"name": "Ada"}},
    "fs/read_text_file": lambda _: {"content": "late"},
    "fs/write_text_file": lambda _: {},
    "terminal/create": lambda _: {"terminalId": "t1"},
    "terminal/wait_for_exit": lambda _: {"exitCode": 0},
    "terminal/output": lambda _: {"output": "hi", "truncated": False},
    "terminal/kill": lambda _: {},
    "terminal/release": lambda _: {},
}


class Editor:
    """Answers at once, except for the methods in `silent`, which wait for `wake`."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self._woken = anyio.Event()

    def answers(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        def answer(method: str) -> Callable[[dict[str, Any]], Any]:
            async def late(params: dict[str, Any]) -> Any:
                if method in self.silent:
                    await self._woken.wait()
                return LATE[method](params)

            return late

        return {method: answer(method) for method in LATE}

    def wake(self) -> None:
        self._woken.set()
        self._woken = anyio.Event()


def configured(home: Path, more: str) -> None:
    home.mkdir()
    (home / "config.toml").write_text(f"{more}\n[limits]\nmcp_wait_s = 300\n{NEST}", "utf-8")


def asked(agent: CrowProcess, method: str, since: int) -> list[Any]:
    """The ids of the requests of this method."""
    sent = (logged.message for logged in agent.log[since:] if logged.sender == "agent")
    return [message["id"] for message in sent if message.get("method") == method]


async def wait_for_cancels(agent: CrowProcess, method: str, since: int) -> None:
    """Wait until each request of this method was cancelled."""
    for request_id in asked(agent, method, since):
        taken_back = {"jsonrpc": "2.0", "method": "$/cancel_request", "params": {"requestId": request_id}}
        await agent.wait_for(partial(operator.eq, taken_back), since=since)


def results(agent: CrowProcess, session: str, since: int) -> list[tuple[str, str]]:
    """Status and text of the finished calls."""
    return [
        (update["status"], "".join(part.get("content", {}).get("text", "") for part in update.get("content", ())))
        for update in agent.updates(session, "tool_call", "tool_call_update", since=since)
        if update["status"] in ("completed", "failed")
    ]


async def session_in(agent: CrowProcess, place: Path, mode: str, **capabilities: Any) -> str:
    """Open a session in this mode for a client with these capabilities."""
    await agent.initialize(**capabilities)
    session = await agent.new_session(place)
    await agent.request("session/set_mode", {"sessionId": session, "modeId": mode})
    return session


@pytest.mark.long
async def test_an_unanswered_editor_request_fails_with_a_message_and_a_late_answer_is_ignored(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(
        home, "[editor]\nterminals = true\nanswer_timeout_s = 0.5\nuser_timeout_s = 0.5\n[receipts]\nshow = false\n"
    )
    editor = Editor()

    async def run(session: str, silent: set[str], *calls: tuple[str, dict[str, Any]]) -> list[tuple[str, str]]:
        """The results of the calls if the editor does not answer these methods in time."""
        endpoint.script(fake.calls(*calls), fake.text("went on"), fake.text("and on"))
        editor.silent, since = silent, len(agent.log)
        assert await agent.prompt(session, "go") == {"stopReason": "end_turn"}
        found = results(agent, session, since)
        for method in silent:
            assert asked(agent, method, since), method
            await wait_for_cancels(agent, method, since)
        editor.wake()
        assert await agent.prompt(session, "go on") == {"stopReason": "end_turn"}
        assert results(agent, session, since) == found
        assert agent.text(session, since=since) == "went onand on"
        return found

    async with crow(endpoint=endpoint, answers=editor.answers()) as agent:
        ask = await session_in(agent, place, "ask", **ALL)
        auto = await session_in(agent, place, "auto", **ALL)
        ((status, words),) = await run(ask, {"session/request_permission"}, ("shell", {"command": "touch made"}))
        assert (status, "did not answer in time" in words) == ("failed", True)
        assert not (place / "made").exists()
        ((status, words),) = await run(auto, {"elicitation/create"}, ("nest__ask", {}))
        assert (status, words) == ("completed", '{"action": "cancel"}')
        ((status, words),) = await run(auto, {"fs/read_text_file"}, ("read_file", {"path": "README.md"}))
        assert (status, "Twigs" in words) == ("completed", True)
        ((status, words),) = await run(
            auto, {"fs/write_text_file"}, ("write_file", {"path": "new.txt", "content": "one"})
        )
        assert (status, "within 0.5 s; the file may or may not have been written" in words) == ("failed", True)
        terminal = await session_in(agent, place, "auto", terminal=True)
        ((status, words),) = await run(terminal, {"terminal/create"}, ("shell", {"command": "echo hi"}))
        assert (status, "within 0.5 s; the command may be running" in words) == ("failed", True)
        silent = {"terminal/wait_for_exit", "terminal/output", "terminal/kill", "terminal/release"}
        ((status, words),) = await run(terminal, silent, ("shell", {"command": "echo hi", "timeout_s": 1}))
        assert (status, "1 s" in words) == ("failed", True)


@pytest.mark.long
async def test_cancel_withdraws_every_request_to_the_editor(
    crow: StartCrow, endpoint: FakeEndpoint, home: Path, place: Path
) -> None:
    configured(home, "[editor]\nterminals = true\n[receipts]\nshow = false\n")
    editor = Editor()

    async def cancel(session: str, silent: str, call: tuple[str, dict[str, Any]]) -> None:
        """Cancel while the editor does not answer this method; the next prompt must work."""
        endpoint.script(fake.calls(call), fake.text("went on"))
        editor.silent, since = {silent}, len(agent.log)
        turn = await agent.start_prompt(session, "go")
        await agent.wait_for(lambda message: message.get("method") == silent, since=since)
        await agent.notify("session/cancel", {"sessionId": session})
        assert await turn.result() == {"stopReason": "cancelled"}
        assert results(agent, session, since) == [("failed", "Cancelled.")]
        await wait_for_cancels(agent, silent, since)
        editor.wake()
        assert await agent.prompt(session, "go on") == {"stopReason": "end_turn"}
        assert agent.text(session, since=since) == "went on"

    async with crow(endpoint=endpoint, answers=editor.answers()) as agent:
        ask = await session_in(agent, place, "ask", **ALL)
        auto = await session_in(agent, place, "auto", **ALL)
        await cancel(ask, "session/request_permission", ("shell", {"command": "touch made"}))
        await cancel(auto, "elicitation/create", ("nest__ask", {}))
        await cancel(auto, "fs/read_text_file", ("read_file", {"path": "README.md"}))
        await cancel(auto, "fs/write_text_file", ("write_file", {"path": "new.txt", "content": "one"}))
        terminal = await session_in(agent, place, "auto", terminal=True)
        for method in ("terminal/create", "terminal/wait_for_exit", "terminal/output", "terminal/release"):
            await cancel(terminal, method, ("shell", {"command": "echo hi"}))
    assert not (place / "made").exists()
