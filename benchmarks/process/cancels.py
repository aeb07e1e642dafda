"""Measures a cancelled turn: the time until the prompt is answered and endpoint and command are released."""

from __future__ import annotations

import json
import os
import statistics
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.process.bench import Bench
from benchmarks.process.client import Agent, Turn
from benchmarks.process.endpoint import prompt
from benchmarks.rows import Row, of_times

__all__ = ["cancels"]

BLOCKS = 3
ROUNDS = 7
LIMIT_MS = 3
REST_S = 0.1
NAP = f"60.{os.getpid():06}"
"""Seconds that a command sleeps; the number tells it from other programs."""


def cancels(bench: Bench) -> list[Row]:
    """Cancel while text streams, while a command runs, and before the first token. Crow and the floors alternate in
    blocks, because the time of a flush changes from minute to minute."""
    streams: list[tuple[float, float]] = []
    waits: list[float] = []
    tools: list[tuple[float, float]] = []
    confined: list[tuple[float, float]] = []
    floors: dict[str, tuple[list[float], list[float]]] = {"raw": ([], []), "kept": ([], [])}
    with (
        bench.session() as (agent, session),
        bench.session(sandbox="auto") as sandboxed,
        bench.session(floor="raw") as raw,
        bench.session(floor="kept") as kept,
    ):
        agent.settle(0.5)
        for _ in range(BLOCKS):
            streams += [streaming(bench, agent, session) for _ in range(ROUNDS)]
            waits += [waiting(bench, agent, session) for _ in range(ROUNDS)]
            tools += [running(bench, agent, session) for _ in range(ROUNDS)]
            confined += [running(bench, *sandboxed) for _ in range(ROUNDS)]
            for (while_streaming, while_waiting), floor in zip(floors.values(), (raw, kept), strict=True):
                while_streaming += [streaming(bench, *floor)[0] for _ in range(ROUNDS)]
                while_waiting += [waiting(bench, *floor) for _ in range(ROUNDS)]
    return [
        of_times(
            "cancel while text streams → cancelled",
            [answered for answered, _ in streams],
            limit=LIMIT_MS,
            floor=statistics.median(floors["raw"][0]) * 1e3,
        ),
        of_times("  the floor, with one row flushed to disk", floors["kept"][0]),
        of_times("  until the endpoint saw the connection closed", [closed for _, closed in streams]),
        of_times(
            "cancel before the first token → cancelled",
            waits,
            limit=LIMIT_MS,
            floor=statistics.median(floors["raw"][1]) * 1e3,
        ),
        of_times("  the floor, with one row flushed to disk", floors["kept"][1]),
        of_times("cancel while a command runs → cancelled", [answered for answered, _ in tools], limit=LIMIT_MS),
        of_times("  until the command was gone", [gone for _, gone in tools]),
        of_times(
            "cancel while a confined command runs → cancelled", [answered for answered, _ in confined], limit=LIMIT_MS
        ),
        of_times("  until the command was gone", [gone for _, gone in confined]),
        bench.flush(REST_S),
    ]


def cancelled(agent: Agent, turn: Turn) -> tuple[float, float]:
    """The time of the cancel, and the seconds until the answer. :raises RuntimeError: the turn was not cancelled."""
    at = agent.notify("session/cancel", {"sessionId": turn.session})
    agent.end(turn)
    if turn.stop != "cancelled":
        raise RuntimeError(f"The cancelled turn ended with {turn.stop}.")
    return at, turn.answered - at


def streaming(bench: Bench, agent: Agent, session: str) -> tuple[float, float]:
    agent.settle(0.05)
    turn = agent.begin(session, prompt(tokens=5000, rate=100))
    agent.until(lambda: len(turn.lines) > 20)
    at, took = cancelled(agent, turn)
    return took, bench.endpoint.wait().last - at


def waiting(bench: Bench, agent: Agent, session: str) -> float:
    agent.settle(0.05)
    turn = agent.begin(session, prompt(hang=True))
    bench.endpoint.wait("asked")
    agent.settle(REST_S)
    took = cancelled(agent, turn)[1]
    bench.endpoint.wait()
    return took


def running(bench: Bench, agent: Agent, session: str) -> tuple[float, float]:
    """Start a command that runs until it is cancelled."""
    agent.settle(0.05)
    turn = agent.begin(session, prompt(calls=1, tool="shell", arguments=json.dumps({"command": f"exec sleep {NAP}"})))
    found: list[int] = []
    while not found:
        agent.settle(0.01)
        found = sleepers()
    agent.settle(REST_S)
    at, took = cancelled(agent, turn)
    bench.endpoint.wait()
    with suppress(ProcessLookupError):
        while time.monotonic() < at + 10:
            os.kill(found[0], 0)
            time.sleep(0.0005)
    return took, time.monotonic() - at


def sleepers() -> list[int]:
    """The processes that run the command, also those in a namespace of their own."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):
                if directory.joinpath("cmdline").read_bytes() == f"sleep\0{NAP}\0".encode():
                    found.append(int(directory.name))
    return found
