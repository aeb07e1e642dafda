"""An editor that stops reading: memory stays bounded and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.process.client import Agent
from crow.store.sqlite.store import SqliteStore
from tests.stdio.conftest import FRESH, ROOT
from tests.store.scenes import converse, new_session
from tests.support import fake_endpoint as fake
from tests.support import fork_server
from tests.support.fake_endpoint import FakeEndpoint, Gate

PIECES = [f"[{number}]".ljust(4_000, "x") for number in range(400)]
PADDING = "x" * 50_000
"""Fills the socket buffers between endpoint and crow without making the answer longer."""

MOST_INSIDE_MB = 16

ENDS_AT_ONCE = """
import sys
from crow.cli import main
from crow.frontend import requests
from crow.protocol import transport
requests.DRAIN_S, transport.CLOSE_S, transport.FINISH_S, transport.STALLED_S = 0.0, 0.0, 3_600.0, 3_600.0
sys.exit(main(["acp"]))
"""
"""Starts a process that drops open requests as soon as stdin ends."""


def start(home: Path, place: Path, endpoint: FakeEndpoint | None = None, command: Sequence[str] = FRESH) -> Agent:
    """A process whose output is only read while the test waits for an answer."""
    model = {"CROW_MODEL": "offline"}
    if endpoint is not None:
        model = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": "sk-test-0", "CROW_MODEL": "fake-model"}
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), **model}
    return Agent(command, env, place, stderr=subprocess.PIPE)


def memory_mb(agent: Agent) -> float:
    return agent.memory_mb() if sys.platform == "linux" else 0.0


def stalled(gates: Sequence[Gate]) -> int:
    """The number of gates the endpoint has passed when it makes no more progress."""
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
    """A long answer, and gates that show how much of it was sent."""
    gates = [Gate() for _ in PIECES]
    steps: list[bytes | Gate] = []
    for piece, gate in zip(PIECES, gates, strict=True):
        gate.open()
        steps += [fake.sse(fake.chunk({"content": piece}, padding=PADDING), done=False), gate]
    return fake.Reply(steps=(*steps, fake.sse(fake.chunk(finish="stop")))), gates


@pytest.mark.long
def test_a_slow_reader_slows_the_turn_and_gets_everything_or_cancels(home: Path, place: Path) -> None:
    with FakeEndpoint.in_thread() as endpoint, start(home, place, endpoint) as agent:
        agent.initialize()
        _, session = agent.new_session()
        # the first tool call makes the process import what it had not needed yet
        endpoint.script(fake.calls(("read_file", {"path": "missing"})), fake.text("ready"))
        agent.prompt(session, "go")

        reply, gates = streaming()
        endpoint.script(reply)
        before = memory_mb(agent)
        turn = agent.begin(session, "go")
        assert stalled(gates) < len(gates)
        assert memory_mb(agent) - before < MOST_INSIDE_MB
        assert agent.end(turn).stop == "end_turn"
        assert turn.text == "".join(PIECES)

        _, session = agent.new_session()  # short enough that nothing is compacted first
        reply, gates = streaming()
        endpoint.script(reply)
        turn = agent.begin(session, "go")
        assert stalled(gates) < len(gates)
        agent.until(lambda: turn.text != "")
        agent.notify("session/cancel", {"sessionId": session})
        assert endpoint.asked[-1].left.wait(60)
        assert agent.end(turn).stop == "cancelled"
        assert "".join(PIECES).startswith(turn.text)
        assert 0 < len(turn.text) < len("".join(PIECES))

        assert agent.process.stderr is not None
        agent.close()
        assert (agent.process.returncode, agent.process.stderr.read()) == (0, b"")
        agent.process.stderr.close()


async def test_a_load_interrupted_by_eof_leaves_whole_lines_and_an_answer(home: Path, place: Path) -> None:
    store = await SqliteStore.open(home / "crow.db")
    await store.create_session(new_session(cwd=str(place)))
    await converse(store, "s1", *(f"{number} " + "x" * 300_000 for number in range(10)))
    await store.close()
    agent = start(home, place, command=fork_server.command(ENDS_AT_ONCE))
    try:
        agent.initialize()
        request_id = agent.send_request("session/load", {"sessionId": "s1", "cwd": str(place), "mcpServers": []})
        assert agent.process.stdin is not None
        assert agent.process.stdout is not None
        beginning = os.read(agent.process.stdout.fileno(), 1)
        assert (home / "crow.db-wal").exists()
        agent.process.stdin.close()
        wait_until_gone(home / "crow.db-wal")  # the store is closed last
    finally:
        agent.process.stdin = None
        rest, errors = agent.process.communicate(timeout=60)
    output = beginning + rest
    assert output.endswith(b"\n")
    messages = [json.loads(line) for line in output.splitlines()]
    (answer,) = [message for message in messages if message.get("id") == request_id]
    assert answer["error"]["message"].startswith("The connection was closed before session/load had ended.")
    assert (agent.process.returncode, errors) == (0, b"")
