"""An editor that stops reading while an answer streams: nothing piles up inside, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crow.store.sqlite.store import SqliteStore
from tests.stdio.conftest import ROOT
from tests.store.scenes import converse, new_session
from tests.support import fake_endpoint as fake
from tests.support.fake_endpoint import FakeEndpoint, Gate

PIECES = [f"[{number}]".ljust(4_000, "x") for number in range(400)]
PADDING = "x" * 50_000
"""Fills what the system keeps between endpoint and crow, without making the answer longer."""

MOST_INSIDE_MB = 16

CROW = (sys.executable, "-m", "crow", "acp")

ENDS_AT_ONCE = """
import sys
from crow.cli import main
from crow.frontend import agent, transport
agent.DRAIN_S, transport.CLOSE_S, transport.FINISH_S, transport.STALLED_S = 0.0, 0.0, 60.0, 60.0
sys.exit(main(["acp"]))
"""
"""Starts the process as it is, but that it gives no time to what was asked before the end of stdin."""


class Reader:
    """A client that reads when it is told to."""

    def __init__(self, home: Path, endpoint: FakeEndpoint | None, command: Sequence[str] = CROW) -> None:
        model = {"CROW_MODEL": "offline"}
        if endpoint is not None:
            model = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": "sk-test-0", "CROW_MODEL": "fake-model"}
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), **model}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        )
        self.text = ""
        self._asked = 0

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: dict[str, Any]) -> int:
        self._asked += 1
        self.say({"id": self._asked, "method": method, "params": params})
        return self._asked

    def answer(self, request_id: int) -> Any:
        """Read until the answer is there; the agent's words on the way are kept."""
        while (message := self.next()).get("id") != request_id:
            pass
        return message["result"]

    def next(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        update = message.get("params", {}).get("update", {})
        if update.get("sessionUpdate") == "agent_message_chunk":
            self.text += update["content"]["text"]
        return message

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status")
        if not status.exists():
            return 0.0  # this system does not say
        return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if "VmRSS" in line)


def stalled(gates: Sequence[Gate]) -> int:
    """How many gates the endpoint has passed once it gets no further."""
    passed, since = 0, time.monotonic()
    while time.monotonic() - since < 0.3 or passed == 0:
        now = sum(gate.wait_reached(0) for gate in gates)
        if now != passed:
            passed, since = now, time.monotonic()
        time.sleep(0.01)
    return passed


def wait_until_gone(path: Path) -> None:
    while path.exists():
        time.sleep(0.001)


def streaming() -> tuple[fake.Reply, list[Gate]]:
    """A long answer, and what tells how much of it has left."""
    gates = [Gate() for _ in PIECES]
    steps: list[bytes | Gate] = []
    for piece, gate in zip(PIECES, gates, strict=True):
        gate.open()
        steps += [fake.sse(fake.chunk({"content": piece}, padding=PADDING), done=False), gate]
    return fake.Reply(steps=(*steps, fake.sse(fake.chunk(finish="stop")))), gates


def test_a_slow_reader_slows_the_turn_and_gets_everything_or_cancels(home: Path, place: Path) -> None:
    with FakeEndpoint.in_thread() as endpoint:
        reader = Reader(home, endpoint)
        try:
            reader.answer(reader.ask("initialize", {"protocolVersion": 1}))
            session = reader.answer(reader.ask("session/new", {"cwd": str(place), "mcpServers": []}))["sessionId"]
            prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "go"}]}
            endpoint.script(fake.text("ready"))
            reader.answer(reader.ask("session/prompt", prompt))

            reply, gates = streaming()
            endpoint.script(reply)
            before, reader.text = reader.memory_mb(), ""
            asked = reader.ask("session/prompt", prompt)
            assert stalled(gates) < len(gates)
            assert reader.memory_mb() - before < MOST_INSIDE_MB
            assert reader.answer(asked) == {"stopReason": "end_turn"}
            assert reader.text == "".join(PIECES)

            session = reader.answer(reader.ask("session/new", {"cwd": str(place), "mcpServers": []}))["sessionId"]
            prompt["sessionId"] = session  # where nothing was said that would have to be compacted first
            reply, gates = streaming()
            endpoint.script(reply)
            reader.text = ""
            asked = reader.ask("session/prompt", prompt)
            assert stalled(gates) < len(gates)
            reader.say({"method": "session/cancel", "params": {"sessionId": session}})
            assert endpoint.asked[-1].left.wait(5)
            assert reader.answer(asked) == {"stopReason": "cancelled"}
            assert "".join(PIECES).startswith(reader.text)
            assert 0 < len(reader.text) < len("".join(PIECES))
        finally:
            _, errors = reader.process.communicate(timeout=20)
        assert (reader.process.returncode, errors) == (0, b"")


async def test_a_load_interrupted_by_eof_leaves_whole_lines_and_an_answer(home: Path, place: Path) -> None:
    store = await SqliteStore.open(home / "crow.db")
    await store.create_session(new_session(cwd=str(place)))
    await converse(store, "s1", *(f"{number} " + "x" * 300_000 for number in range(10)))
    await store.close()
    reader = Reader(home, None, [sys.executable, "-c", ENDS_AT_ONCE])
    try:
        reader.answer(reader.ask("initialize", {"protocolVersion": 1}))
        asked = reader.ask("session/load", {"sessionId": "s1", "cwd": str(place), "mcpServers": []})
        assert reader.process.stdin is not None
        assert reader.process.stdout is not None
        beginning = os.read(reader.process.stdout.fileno(), 1)
        assert (home / "crow.db-wal").exists()
        reader.process.stdin.close()
        wait_until_gone(home / "crow.db-wal")  # the store is closed last
    finally:
        reader.process.stdin = None
        rest, errors = reader.process.communicate(timeout=20)
    output = beginning + rest
    assert output.endswith(b"\n")
    messages = [json.loads(line) for line in output.splitlines()]
    (answer,) = [message for message in messages if message.get("id") == asked]
    assert answer["error"]["message"].startswith("The connection was closed before session/load was done.")
    assert (reader.process.returncode, errors) == (0, b"")
