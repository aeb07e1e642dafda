"""An idle process sleeps: no timer is due and nothing polls."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crow.agent.idle import IdleTimer
from crow.app import Wiring
from crow.frontend.agent import serve
from crow.protocol.connection import EditorConnection
from crow.protocol.transport import StdioTransport
from crow.settings import load_settings

LONGEST_S = 24 * 3600
"""The longest wait of asyncio's selector, also used when no timer is set."""


class Watched(selectors.DefaultSelector):
    """The event loop's selector. `timeout` is that of the current wait in seconds, None for a wait without one."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.timeout: float | None = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waits += 1
        self.timeout = timeout
        found = super().select(timeout)
        self.timeout = 0
        return found

    def rests(self) -> bool:
        """Whether the loop is in a wait without a timer and stays there."""
        waits = self.waits
        time.sleep(0.05)  # polling would wake it more often
        is_long = self.timeout is None or self.timeout >= LONGEST_S
        return is_long and self.waits == waits


class Client:
    """An editor in a thread, connected by two pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self._lines = os.fdopen(source, "rb")
        self._sink = os.fdopen(sink, "wb", buffering=0)

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        message = {"jsonrpc": "2.0", "id": method, "method": method, "params": params}
        self._sink.write(json.dumps(message).encode() + b"\n")
        while (answer := json.loads(self._lines.readline())).get("id") != method:
            pass
        return answer["result"]

    def close(self) -> None:
        self._sink.close()
        self._lines.read()
        self._lines.close()


def run(home: Path, selector: Watched, session: Callable[[Client], None]) -> None:
    """Serve crow on pipes in this thread and run `session` in another."""
    to_crow, from_crow = os.pipe(), os.pipe()
    client = Client(from_crow[0], to_crow[1])

    async def main() -> None:
        wiring = Wiring(load_settings({}, {"CROW_HOME": str(home), "CROW_MODEL": "offline"}))
        await serve(EditorConnection(StdioTransport(to_crow[0], from_crow[1])), wiring.dependencies())
        await wiring.close()

    thread = threading.Thread(target=session, args=(client,))
    thread.start()
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            runner.run(main())
    finally:
        os.close(to_crow[0])
        os.close(from_crow[1])
        thread.join()


def test_after_a_turn_no_timer_is_due_and_nothing_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = IdleTimer.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "after_s", 0.0)
    selector = Watched()
    rested: list[bool] = []

    def session(client: Client) -> None:
        try:
            client.ask("initialize", {"protocolVersion": 1})
            made = client.ask("session/new", {"cwd": str(tmp_path), "mcpServers": []})
            prompt = {"sessionId": made["sessionId"], "prompt": [{"type": "text", "text": "say hello"}]}
            assert client.ask("session/prompt", prompt)["stopReason"] == "end_turn"
            end = time.monotonic() + 60
            while not rested and time.monotonic() < end:
                rested.extend([True] if selector.rests() else [])
        finally:
            client.close()

    run(tmp_path / "home", selector, session)
    assert rested
