"""A small agent on the published Python SDK, for `acp-check`: each prompt gets a line and a tool call."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import acp
from acp import helpers, schema


class SmallAgent:
    """It has no model: a tool call needs a permission, and "hang" waits to be cancelled."""

    def __init__(self) -> None:
        self._prompts: dict[str, asyncio.Event] = {}

    def on_connect(self, conn: acp.Client) -> None:
        self._client = conn

    async def initialize(self, protocol_version: int, **_: Any) -> acp.InitializeResponse:
        return acp.InitializeResponse(
            protocol_version=acp.PROTOCOL_VERSION,
            agent_capabilities=schema.AgentCapabilities(),
            agent_info=schema.Implementation(name="interop", version="1.0.0"),
        )

    async def new_session(self, **_: Any) -> acp.NewSessionResponse:
        session_id = uuid.uuid4().hex
        self._prompts[session_id] = asyncio.Event()
        return acp.NewSessionResponse(session_id=session_id)

    async def prompt(self, prompt: list[Any], session_id: str, **_: Any) -> acp.PromptResponse:
        if session_id not in self._prompts:
            raise acp.RequestError(-32002, f"No session {session_id}")
        cancelled = self._prompts[session_id] = asyncio.Event()
        text = "".join(getattr(block, "text", "") for block in prompt)
        await self._client.session_update(session_id, helpers.update_agent_message_text("On it. "))
        if "hang" in text:
            await cancelled.wait()
        elif "tool" in text:
            await self._change_file(session_id)
        return acp.PromptResponse(stop_reason="cancelled" if cancelled.is_set() else "end_turn")

    async def _change_file(self, session_id: str) -> None:
        call = uuid.uuid4().hex
        opened = helpers.start_tool_call(call, "Change a file", kind="edit", status="pending")
        await self._client.session_update(session_id, opened)
        options = [
            schema.PermissionOption(option_id="yes", name="Allow", kind="allow_once"),
            schema.PermissionOption(option_id="no", name="Reject", kind="reject_once"),
        ]
        is_allowed = False
        try:
            answer = await self._client.request_permission(
                session_id=session_id, tool_call=schema.ToolCallUpdate(tool_call_id=call), options=options
            )
            is_allowed = getattr(answer.outcome, "option_id", "") == "yes"
        finally:
            if is_allowed:
                running = helpers.update_tool_call(call, status="in_progress")
                await self._client.session_update(session_id, running)
            ended = helpers.update_tool_call(call, status="completed" if is_allowed else "failed")
            await self._client.session_update(session_id, ended)

    async def cancel(self, session_id: str, **_: Any) -> None:
        if session_id in self._prompts:
            self._prompts[session_id].set()

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        raise acp.RequestError.method_not_found(f"_{method}")


if __name__ == "__main__":
    asyncio.run(acp.run_agent(cast("acp.Agent", SmallAgent())))
