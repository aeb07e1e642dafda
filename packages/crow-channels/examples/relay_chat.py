"""An adapter for a small chat server that speaks JSON, one object on each line, over TCP.

The server numbers its messages. A client says which was the last one that it has seen, and gets all later ones. If the
server gets a key that it knows, it answers as it did the first time, so nothing is sent twice.

    type = "relay_chat:RelayChat"
    address = "chat.example:7000"
    password_env = "RELAY_PASSWORD"
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

from crow_channels.chat import Inbox, Incoming, Limits, Outgoing, Settings
from crow_channels.errors import ChatRefused, ChatUnavailable


class RelayChat:
    """See `crow_channels.chat.Chat`. Without buttons, people answer questions with a number."""

    def __init__(self, settings: Settings) -> None:
        host, _, port = settings.text("address").rpartition(":")
        self._host, self._port = host, int(port)
        self._password = settings.secret("password_env")
        self.limits = Limits(chars=1000, file_bytes=0)
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def run(self, inbox: Inbox) -> None:
        """Connect, and connect again whenever the connection breaks."""
        while True:
            try:
                reader, self._writer = await asyncio.open_connection(self._host, self._port)
                # The inbox knows which message of each room was the last.
                since = max((int(number) for number in inbox.places().values() if number), default=0)
                self._write({"password": self._password, "since": since})
                while line := await reader.readline():
                    await self._take(json.loads(line), inbox)
            except (OSError, ValueError):
                pass
            finally:
                self._disconnect()
            await asyncio.sleep(0.1)

    async def _take(self, message: dict[str, Any], inbox: Inbox) -> None:
        if "sent" in message or "refused" in message:
            waiting = self._answers.pop(message["key"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            return
        await inbox.message(
            Incoming(id=str(message["id"]), place=message["room"], user=message["user"], text=message["text"])
        )

    async def send(self, place: str, message: Outgoing) -> str:
        """Send a message. The same key is sent again after a broken connection."""
        if self._writer is None:
            raise ChatUnavailable("not connected")
        waiting = self._answers[message.key] = asyncio.get_running_loop().create_future()
        self._write({"key": message.key, "room": place, "text": message.text})
        answer = await waiting
        if "refused" in answer:
            raise ChatRefused(str(answer["refused"]))
        return str(answer["sent"])

    async def edit(self, place: str, message_id: str, message: Outgoing) -> None:
        """Never called, because `limits.can_edit` is false."""
        raise ChatRefused("messages of this chat cannot be changed")

    async def find(self, place: str, message: Outgoing, known: Collection[str]) -> str | None:
        """The server recognises repeated keys, so nothing has to be looked for."""
        return None

    def _write(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(ChatUnavailable("the connection broke"))
        self._answers.clear()
