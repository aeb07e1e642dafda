"""A chat program behind a webhook: takes what crow-channels sends, and can fail."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import aiohttp
from aiohttp import web

from crow_channels.webhook_chat import SIGNATURE, TIMESTAMP, signature
from tests.crow import SECRETS

SECRET = SECRETS["HOOK_SECRET"]


class Hook:
    """Recognises repeated ids, as a receiver must. Use as `async with Hook() as hook`."""

    def __init__(self) -> None:
        self.shown: dict[str, dict[str, Any]] = {}
        """The messages by id, as they are now."""
        self.requests = 0
        self.failures: deque[int] = deque()
        """The status codes of the next answers. 0 takes the message and breaks the connection."""
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession
        self.port = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=64_000_000)
        app.router.add_post("/hook", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    def settings(self, name: str, port: int, more: str = "") -> str:
        return (
            f'[chats.{name}]\ntype = "webhook"\nlisten = "127.0.0.1:{port}"\nurl = "{self.url}"\n{more}\n'
            f'secret_env = "HOOK_SECRET"\n[chats.{name}.users]\nann = "ann"\nbob = "ann"\n[chats.{name}.channels."*"]\n'
        )

    def texts(self, place: str = "p") -> list[str]:
        return [each["text"] for each in self.shown.values() if each["place"] == place]

    async def wait(self, condition: Callable[[], Any]) -> Any:
        async with asyncio.timeout(60):
            while not (value := condition()):
                self._changed.clear()
                await self._changed.wait()
        return value

    async def post(
        self, port: int, path: str, values: object, *, secret: str = SECRET, age_s: int = 0, body: bytes | None = None
    ) -> tuple[int, str]:
        """Send a signed request to crow-channels. Tries until it listens. Returns the status and the message."""
        body = json.dumps(values).encode() if body is None else body
        timestamp = str(int(time.time()) - age_s)
        headers = {TIMESTAMP: timestamp, SIGNATURE: signature(secret, timestamp, body)}
        async with asyncio.timeout(60):
            while True:
                try:
                    url = f"http://127.0.0.1:{port}{path}"
                    async with self._session.post(url, data=io.BytesIO(body), headers=headers) as response:
                        text = await response.text()
                        return response.status, json.loads(text)["message"] if response.status != 413 else text
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.02)

    async def write(
        self, port: int, number: str, text: str, *, user: str = "ann", place: str = "p", **more: Any
    ) -> int:
        """Somebody writes a message. Returns the status."""
        values = {"id": number, "place": place, "user": user, "text": text} | more
        return (await self.post(port, "/messages", values))[0]

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        assert request.headers[SIGNATURE] == signature(SECRET, request.headers[TIMESTAMP], body)
        self.requests += 1
        status = self.failures.popleft() if self.failures else 200
        if status in (0, 200):
            event = json.loads(body)
            if event["type"] == "edit" or event["id"] not in self.shown:
                self.shown[event["id"]] = event
            self._changed.set()
        if status == 0:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 200, headers={"Retry-After": "0"})
