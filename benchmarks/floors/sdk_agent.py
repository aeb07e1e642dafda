"""A floor: the smallest agent on the protocol's SDK and the `openai` package, as their documentation shows.

It stores nothing and has two tools, `read_file` and `shell`.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, cast

import acp

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read_file", "shell")
]


class SdkAgent:
    """Sessions are lists of messages."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[Any]] = {}
        self.endpoint: Any = None

    def on_connect(self, conn: Any) -> None:
        self.client = conn

    async def initialize(self, **_: Any) -> acp.InitializeResponse:
        return acp.InitializeResponse(protocol_version=acp.PROTOCOL_VERSION)

    async def new_session(self, **_: Any) -> acp.NewSessionResponse:
        session = f"s{len(self.sessions)}"
        self.sessions[session] = []
        return acp.NewSessionResponse(session_id=session)

    async def prompt(self, prompt: list[Any], session_id: str, **_: Any) -> acp.PromptResponse:
        if self.endpoint is None:
            from openai import AsyncOpenAI

            self.endpoint = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
        messages = self.sessions[session_id]
        messages.append({"role": "user", "content": prompt[0].text})
        while calls := await self.step(session_id, messages):
            for call in calls:
                result = await self.run(call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return acp.PromptResponse(stop_reason="end_turn")

    async def step(self, session: str, messages: list[Any]) -> list[Any]:
        text: list[str] = []
        calls: list[Any] = []
        stream = await self.endpoint.chat.completions.create(
            model="fake-model", messages=messages, tools=TOOLS, stream=True
        )
        async for chunk in stream:
            for choice in chunk.choices:
                calls += [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
                if choice.delta.content:
                    text.append(choice.delta.content)
                    await self.client.session_update(session, acp.update_agent_message_text(choice.delta.content))
        messages.append({"role": "assistant", "content": "".join(text)} | ({"tool_calls": calls} if calls else {}))
        return calls

    async def run(self, function: dict[str, Any]) -> str:
        arguments = json.loads(function["arguments"])
        if function["name"] == "read_file":
            with open(arguments["path"], encoding="utf-8") as file:  # noqa: ASYNC230  a floor takes the shortest way
                return file.read()
        process = await asyncio.create_subprocess_shell(arguments["command"], stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode()


asyncio.run(acp.run_agent(cast(acp.Agent, SdkAgent())))
