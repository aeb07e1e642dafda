"""The example adapter, with a small server of its protocol and a real crow."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.crow import Crow, bridge, configure

EXAMPLES = Path(__file__).parents[1] / "examples"
PASSWORD = "open sesame"


class Relay:
    """The server. It keeps all messages, and breaks connections on request."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._keys: dict[str, int] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()
        self.breaks = 0
        """So many of the next messages are taken, but not answered: the connection breaks instead."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in tuple(self._writers):
            writer.close()

    def write(self, user: str, text: str, room: str = "room") -> None:
        self._add(user, text, room)
        for writer in self._writers:
            writer.write(self._line(self.messages[-1]))

    def answers(self) -> list[str]:
        return [each["text"] for each in self.messages if each["user"] == "crow"]

    async def wait(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _add(self, user: str, text: str, room: str) -> None:
        self.messages.append({"id": len(self.messages) + 1, "room": room, "user": user, "text": text})
        self._changed.set()

    def _line(self, message: dict[str, Any]) -> bytes:
        return json.dumps(message).encode() + b"\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        assert hello["password"] == PASSWORD
        for message in self.messages:
            if message["id"] > hello["since"] and message["user"] != "crow":
                writer.write(self._line(message))
        self._writers.add(writer)
        while line := await reader.readline():
            message = json.loads(line)
            if message["key"] not in self._keys:
                self._add("crow", message["text"], message["room"])
                self._keys[message["key"]] = len(self.messages)
            if self.breaks:
                self.breaks -= 1
                break
            writer.write(self._line({"key": message["key"], "sent": self._keys[message["key"]]}))
        self._writers.discard(writer)
        writer.close()


async def test_the_example_adapter_needs_a_hundred_lines_and_loses_nothing(
    crow: Crow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try:
        async with Relay() as relay:
            chat = (
                f'[chats.relay]\ntype = "relay_chat:RelayChat"\naddress = "{relay.address}"\n'
                'password_env = "PASSWORD"\n'
                '[chats.relay.users]\nann = "ann"\n[chats.relay.channels.room]\n'
            )
            path = configure(tmp_path, crow, chat)
            relay.breaks = 2
            relay.write("eve", "say no")
            relay.write("ann", "say one")
            async with bridge(path, {"PASSWORD": PASSWORD}):
                await relay.wait(lambda: relay.answers() == ["one"])
                relay.write("ann", "write relay.txt: hi")
                await relay.wait(lambda: len(relay.answers()) == 2)
                assert "1. Allow" in relay.answers()[1]
                relay.write("eve", "1")
                relay.write("ann", "1")
                await relay.wait(lambda: len(relay.answers()) == 3)
                assert (crow.workspace / "relay.txt").read_text() == "hi\n"
            relay.write("ann", "say two")
            async with bridge(path, {"PASSWORD": PASSWORD}):
                await relay.wait(lambda: relay.answers()[3:] == ["two"])
    finally:
        sys.modules.pop("relay_chat", None)
    assert crow.prompts("relay:room") == ["say one", "write relay.txt: hi", "say two"]
    assert len((EXAMPLES / "relay_chat.py").read_text().splitlines()) <= 100
