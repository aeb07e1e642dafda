"""A floor: an agent that stores nothing, checks nothing and uses no package.

It speaks enough of the protocol for the same scenes: streamed prompts, `read_file` and `shell`, `session/cancel`.
It writes one line for each token.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read_file", "shell")
]


def send(message: dict[str, Any]) -> None:
    data = memoryview(json.dumps({"jsonrpc": "2.0"} | message).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


class RawAgent:
    """Sessions are lists of messages; each turn takes a free connection."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[dict[str, Any]]] = {}
        self.turns: dict[str, asyncio.Task[None]] = {}
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        address = urlsplit(os.environ["OPENAI_BASE_URL"])
        self.host, self.port, self.path = address.hostname or "", address.port, address.path

    def handle(self, message: dict[str, Any]) -> None:
        params = message.get("params") or {}
        match message["method"]:
            case "initialize":
                send({"id": message["id"], "result": {"protocolVersion": 1}})
            case "session/new":
                session = f"s{len(self.sessions)}"
                self.sessions[session] = []
                send({"id": message["id"], "result": {"sessionId": session}})
            case "session/prompt":
                session, words = params["sessionId"], params["prompt"][0]["text"]
                self.turns[session] = asyncio.create_task(self.prompt(message["id"], session, words))
            case "session/cancel":
                self.turns[params["sessionId"]].cancel()

    async def prompt(self, request: int, session: str, words: str) -> None:
        messages = self.sessions[session]
        messages.append({"role": "user", "content": words})
        stop = "end_turn"
        try:
            while calls := await self.step(session, messages):
                for call in calls:
                    result = await self.run(call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        except asyncio.CancelledError:
            stop = "cancelled"
        await self.keep(session, stop)
        send({"id": request, "result": {"stopReason": stop}})

    async def keep(self, session: str, stop: str) -> None:
        """Stores nothing."""

    async def step(self, session: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = json.dumps({"model": "fake-model", "stream": True, "tools": TOOLS, "messages": messages}).encode()
        reader, writer = self.free.pop() if self.free else await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(
                b"POST %b/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b"
                % (self.path.encode(), len(body), body)
            )
            text, calls = await self.read(session, reader)
        except asyncio.CancelledError:
            writer.close()
            raise
        self.free.append((reader, writer))
        messages.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
        return calls

    async def read(self, session: str, reader: asyncio.StreamReader) -> tuple[str, list[dict[str, Any]]]:
        await reader.readuntil(b"\r\n\r\n")
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        while size := int(await reader.readline(), 16):
            for event in (await reader.readexactly(size + 2)).split(b"\n\n"):
                if not event.startswith(b"data: {"):
                    continue
                for choice in json.loads(event[6:])["choices"]:
                    calls += choice["delta"].get("tool_calls", ())
                    if words := choice["delta"].get("content"):
                        text.append(words)
                        block = {"type": "text", "text": words}
                        update = {"sessionUpdate": "agent_message_chunk", "content": block}
                        send({"method": "session/update", "params": {"sessionId": session, "update": update}})
        await reader.readline()
        return "".join(text), calls

    async def run(self, function: dict[str, Any]) -> str:
        arguments = json.loads(function["arguments"])
        if function["name"] == "read_file":
            with open(arguments["path"], encoding="utf-8") as file:  # noqa: ASYNC230  a floor takes the shortest way
                return file.read()
        process = await asyncio.create_subprocess_shell(arguments["command"], stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode()


async def serve(agent: RawAgent) -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        agent.handle(json.loads(line))


if __name__ == "__main__":
    asyncio.run(serve(RawAgent()))
