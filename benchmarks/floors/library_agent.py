"""A floor: an agent that reads an answer like the `openai` package and ignores its content.

It shows how long that package's HTTP client takes to deliver the bytes of a stream.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import openai

from benchmarks.floors.raw_agent import TOOLS, RawAgent, serve


class LibraryAgent(RawAgent):
    """Answers nothing; it counts bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.client = openai.DefaultAsyncHttpx2Client(timeout=None)
        self.url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self.bytes = 0

    async def step(self, _session: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = json.dumps({"model": "fake-model", "stream": True, "tools": TOOLS, "messages": messages}).encode()
        async with self.client.stream("POST", self.url, content=body) as response:
            async for piece in response.aiter_bytes():
                self.bytes += len(piece)
        messages.append({"role": "assistant", "content": ""})
        return []


if __name__ == "__main__":
    asyncio.run(serve(LibraryAgent()))
