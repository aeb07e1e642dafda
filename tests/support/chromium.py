"""Drives a headless Chromium by its DevTools protocol: opens a page, runs scripts in it, takes pictures."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from websockets.asyncio.client import ClientConnection, connect

from tests.support.acp_client import WAIT_S

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or ""
"""The path of Chromium, or empty if it is not installed."""

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    "--remote-debugging-port=0",
)


class Chromium:
    """A headless Chromium with one page. Use as `async with Chromium() as browser`."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        self._size = (width, height)
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        """What scripts of the page threw, and what the browser refused to load."""

    async def __aenter__(self) -> Self:
        self._profile = tempfile.mkdtemp(prefix="crow-chromium-")
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *_OPTIONS,
            f"--user-data-dir={self._profile}",
            f"--window-size={self._size[0]},{self._size[1]}",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        with anyio.fail_after(WAIT_S):
            while not (found := re.search(rb"ws://\S+", await self._process.stderr.readline())):
                pass
        self._drain = asyncio.create_task(self._process.stderr.read())
        self._socket: ClientConnection = await connect(found[0].decode(), max_size=None, proxy=None)
        self._reader = asyncio.create_task(self._read())
        self._session = ""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        width, height = self._size
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._socket.close()
        self._process.kill()
        await self._process.wait()
        self._drain.cancel()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._next += 1
        future = self._waiting[self._next] = asyncio.get_running_loop().create_future()
        message = {"id": self._next, "method": method, "params": params}
        await self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        with anyio.fail_after(WAIT_S):
            result: dict[str, Any] = await future
        return result

    async def open(self, url: str) -> None:
        """Load a page."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """Run a script in the page, wait for its promise, and return the value. :raises AssertionError: it threw."""
        done = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, (script, done["exceptionDetails"])
        return done["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        with anyio.fail_after(WAIT_S):
            while not await self.run(f"Boolean({condition})"):
                await self.run("new Promise(requestAnimationFrame)")

    async def picture(self, path: Path) -> None:
        """Write what the page shows as a PNG file."""
        shot = await self.call("Page.captureScreenshot", format="png")
        await anyio.Path(path).write_bytes(base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame)
            if (future := self._waiting.pop(message.get("id"), None)) is not None:
                if not future.done():
                    future.set_result(message.get("result") or {"error": message.get("error")})
            elif message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(str(message["params"]["entry"]["text"]))
