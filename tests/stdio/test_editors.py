"""Editors that draw titles as Markdown, embed terminals, or kill the agent to end it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.stdio.conftest import StartCrow
from tests.support import fake_endpoint as fake
from tests.support.acp_client import Call, CrowProcess, RpcError, allow_once
from tests.support.fake_endpoint import FakeEndpoint

INITIALIZE = {
    "protocolVersion": 1,
    "clientCapabilities": {
        "fs": {"readTextFile": True, "writeTextFile": True},
        "terminal": True,
        "auth": {"terminal": True},
        "session": {"configOptions": {"boolean": {}}},
        "elicitation": {"form": {}, "url": {}},
        "_meta": {"terminal_output": True, "terminal-auth": True},
    },
    "clientInfo": {"name": "editor", "title": "Editor", "version": "1.0.0"},
}


def draw(updates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls as an editor shows them: each update replaces fields, the first one creates terminals.

    Fails where an editor would show "not found" instead of a call or a terminal.
    """
    calls: dict[str, dict[str, Any]] = {}
    terminals: dict[str, str] = {}
    for update in updates:
        meta = update.get("_meta") or {}
        if update["sessionUpdate"] == "tool_call":
            assert update["toolCallId"] not in calls
            calls[update["toolCallId"]] = {"content": []}
            if "terminal_info" in meta:
                terminals[meta["terminal_info"]["terminal_id"]] = ""
        calls[update["toolCallId"]] |= {
            key: update[key] for key in ("title", "kind", "status", "content") if key in update
        }
        for part in update.get("content", ()):
            assert part["type"] != "terminal" or part["terminalId"] in terminals
        if "terminal_output" in meta:
            terminals[meta["terminal_output"]["terminal_id"]] += meta["terminal_output"]["data"]
    for call in calls.values():
        for part in call["content"]:
            if part["type"] == "terminal":
                part["output"] = terminals[part["terminalId"]]
    return list(calls.values())


class Dialogs:
    """The answers of such an editor: dialogs are allowed while `are_answered`; files are outside its project."""

    def __init__(self) -> None:
        self.are_answered = asyncio.Event()
        self.are_answered.set()

    async def permit(self, params: dict[str, Any]) -> dict[str, Any]:
        await self.are_answered.wait()
        return allow_once(params)

    def read(self, params: dict[str, Any]) -> Any:
        raise RpcError(-32002, "Resource not found", {"uri": params["path"]})


async def asking(agent: CrowProcess, session: str) -> Call:
    """Send a prompt and return once a dialog is open."""
    since = len(agent.log)
    call = await agent.start_prompt(session, "go on")
    await agent.wait_for(lambda message: message.get("method") == "session/request_permission", since=since)
    return call


async def opened(agent: CrowProcess, opening: dict[str, Any]) -> str:
    """A session whose options the editor sets without waiting, after its first prompt."""
    session = (await agent.request("session/new", opening))["sessionId"]
    level = {"sessionId": session, "configId": "thought_level", "value": "high"}
    await asyncio.gather(
        agent.request("session/set_mode", {"sessionId": session, "modeId": "ask"}),
        agent.request("session/set_config_option", level),
        agent.prompt(session, "go on"),
    )
    return str(session)


def drawn(agent: CrowProcess, session: str) -> list[dict[str, Any]]:
    return draw(agent.updates(session, "tool_call", "tool_call_update"))


async def test_an_editor_that_cancels_kills_and_loads_draws_nothing_wrong(
    crow: StartCrow, endpoint: FakeEndpoint, place: Path, tmp_path: Path
) -> None:
    (place / "__init__.py").write_text("# one\n")
    ide = {"name": "idea", "command": sys.executable, "args": ["-c", ""], "env": [{"name": "IDE_PORT", "value": "1"}]}
    opening = {"cwd": str(place), "mcpServers": [ide], "additionalDirectories": [str(tmp_path)]}
    step = fake.calls(("read_file", {"path": "__init__.py"}), ("shell", {"command": "echo hi"}))
    dialogs = Dialogs()
    answers = {"session/request_permission": dialogs.permit, "fs/read_text_file": dialogs.read}
    endpoint.script(fake.text("Hello."), step, fake.text("Done."))
    endpoint.script(*(fake.calls(("shell", {"command": f"sleep {seconds}"})) for seconds in (50, 51)))
    async with crow(endpoint=endpoint, answers=answers) as agent:
        await agent.request("initialize", INITIALIZE)
        session = await opened(agent, opening)
        await agent.prompt(session, "go on")
        read, echo = drawn(agent, session)
        assert (read["title"], echo["title"]) == ("Read `__init__.py`", "echo hi")
        assert read["content"] == [{"type": "content", "content": {"type": "text", "text": "    # one"}}]
        assert [part.get("output") for part in echo["content"]] == ["hi"]
        dialogs.are_answered.clear()
        call = await asking(agent, session)
        await agent.notify("session/cancel", {"sessionId": session})
        assert await call.result() == {"stopReason": "cancelled"}
        await asking(agent, session)
        shown = drawn(agent, session)
        assert [(call["title"], call["status"]) for call in shown[2:]] == [
            ("sleep 50", "failed"),
            ("sleep 51", "pending"),
        ]
        await agent.kill()
    async with crow(endpoint=endpoint, answers=answers) as agent:
        await agent.request("initialize", INITIALIZE)
        await agent.request("session/load", opening | {"sessionId": session})
        loaded = drawn(agent, session)
        assert [(call["title"], call["kind"]) for call in loaded] == [(call["title"], call["kind"]) for call in shown]
        assert [call["status"] for call in loaded] == ["completed", "completed", "failed", "failed"]
        await agent.request("session/close", {"sessionId": session})
        await agent.request("session/delete", {"sessionId": session})
        assert await agent.request("session/list", {"cwd": str(place)}) == {"sessions": []}
