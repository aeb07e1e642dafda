"""Compares the wires in whole processes over stdio: one process for each wire, asked in turn in the same run.

Measured are the time from a prompt to the request at the endpoint, from the first text at the endpoint to the first
chunk at the client, and 20,000 deltas at full speed. The limits are ratios to Chat Completions.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.llm import ALL, OTHERS, events_of
from benchmarks.rows import ROOT, Row, arguments, report
from crow.domain.messages import WireName
from tests.support.acp_client import CrowProcess
from tests.support.fake_endpoint import FakeEndpoint, Gate, Recorded, Reply, sse

__all__ = ["measure"]

TURNS = 150
STREAMS = 6
TOKENS = 20_000
WORDS = [f" {number}" for number in range(TOKENS)]
ENDS: dict[WireName, bytes] = {
    "chat": sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, done=True),
    "responses": sse({"type": "response.completed", "response": {"status": "completed"}}, done=False),
    "messages": sse({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, done=False)
    + sse({"type": "message_stop"}, done=False),
}


class TimedEndpoint(FakeEndpoint):
    """Answers at a gate, with 3 words or with all. `asked_at` is the time of the newest request."""

    def __init__(self) -> None:
        super().__init__()
        self.wires = ALL
        self.asked_at = 0.0
        self.gate = Gate()
        self._short = {wire: tuple(events_of(wire, "text", WORDS[:3])) for wire in ALL}
        self._long = {wire: (b"".join(events_of(wire, "text", WORDS)),) for wire in ALL}

    def _reply(self, request: Recorded) -> Reply:
        if request.method != "POST":
            return super()._reply(request)
        self.asked_at = time.perf_counter()
        events = self._long if b"everything" in request.raw[-400:] else self._short
        wire = next(each for each in ALL if each == request.wire)
        return Reply(steps=(self.gate, *events[wire], ENDS[wire]))


async def ask(agent: CrowProcess, endpoint: TimedEndpoint, session: str, text: str) -> tuple[float, float, float]:
    """Return the seconds to the request, from the gate to the first chunk, and from the gate to the end."""
    agent.log.clear()
    endpoint.gate = Gate()
    began = time.perf_counter()
    endpoint.asked_at = 0.0
    call = await agent.start_prompt(session, text)
    await endpoint.gate.reached()
    await asyncio.sleep(0.02)  # the process has finished what it does beside the request
    opened = time.perf_counter()
    endpoint.gate.open()
    await agent.wait_for(is_chunk)
    shown = time.perf_counter()
    await call.result()
    return endpoint.asked_at - began, shown - opened, time.perf_counter() - opened


def is_chunk(message: dict[str, object]) -> bool:
    return "agent_message_chunk" in str(message.get("params"))[:200]


async def measure(home: Path) -> dict[WireName, tuple[list[float], list[float], list[float]]]:
    """Return the times of each wire: to the request, to the first chunk, and of long answers."""
    taken: dict[WireName, tuple[list[float], list[float], list[float]]] = {wire: ([], [], []) for wire in ALL}
    async with TimedEndpoint() as endpoint, AsyncExitStack() as stack:
        sessions: dict[WireName, tuple[CrowProcess, str]] = {}
        for wire in ALL:
            place = home / wire
            (place / "work").mkdir(parents=True)
            (place / "config.toml").write_text(
                f'[model]\nname = "m"\nwire = "{wire}"\nbase_url = "{endpoint.base_url}"\n'
            )
            env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(place)}
            env |= {"CROW_SANDBOX": "off", "OPENAI_API_KEY": "sk-test-0123456789"}
            start = CrowProcess([sys.executable, "-m", "crow", "acp"], env=env, cwd=place / "work")
            agent = await stack.enter_async_context(start)
            agent.checks_schema = False
            await agent.initialize()
            sessions[wire] = agent, await agent.new_session(place / "work")
            for _ in range(3):
                await ask(agent, endpoint, sessions[wire][1], "Warm up.")
        for number in range(TURNS):
            for wire in ALL[number % 3 :] + ALL[: number % 3]:
                agent, session = sessions[wire]
                to_request, to_chunk, _ = await ask(agent, endpoint, session, "Go on.")
                taken[wire][0].append(to_request)
                taken[wire][1].append(to_chunk)
        for number in range(STREAMS):
            for wire in ALL[number % 3 :] + ALL[: number % 3]:
                agent, session = sessions[wire]
                taken[wire][2].append((await ask(agent, endpoint, session, "Say everything"))[2])
    return taken


def rows_of(taken: dict[WireName, tuple[list[float], list[float], list[float]]]) -> list[Row]:
    names = ("prompt → request", "first text → first chunk", f"{TOKENS:,} deltas at full speed")
    rows = []
    for at, name in enumerate(names):
        medians = {wire: statistics.median(taken[wire][at]) for wire in ALL}
        rows.append(Row(f"{name} on chat", medians["chat"] * 1e3, max(taken["chat"][at]) * 1e3, "ms"))
        for wire in OTHERS:
            pairs = [own / chat for own, chat in zip(taken[wire][at], taken["chat"][at], strict=True)]
            rows.append(Row(f"{name} on {wire}, to chat", statistics.median(pairs), max(pairs), "x", 1.1))
    return rows


if __name__ == "__main__":
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).resolve()) as directory:
        report(rows_of(asyncio.run(measure(Path(directory)))), options.json)
