"""Measures one session: prompts, first chunks, tool steps, loads."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from benchmarks.process.bench import Bench
from benchmarks.process.client import Agent
from benchmarks.process.endpoint import prompt
from benchmarks.process.endpoint_program import token
from benchmarks.rows import Row, of_times

__all__ = ["first_chunks", "history", "outputs", "steps"]

TURNS = 200
PAUSE_S = 0.02
STEPS = 20
READ = {"tool": "read_file", "arguments": '{"path": "f{i}.txt"}'}
SHELL = {"tool": "shell", "arguments": '{"command": "echo {i}"}'}


def history(bench: Bench) -> list[Row]:
    """Prompt to request while a session grows to 200 turns, with a pause before each; then loads by new processes."""
    home = bench.home()
    with bench.session(home) as (agent, session):
        crow, cpu = turns(bench, agent, session)
    floors = {}
    for floor in ("raw", "sdk"):
        with bench.session(floor=floor) as (agent, other):
            floors[floor] = turns(bench, agent, other)[0]
    rows = []
    for at, limit in ((10, 3), (TURNS, 4)):
        window = slice(at - 6, min(at + 5, TURNS))
        rows.append(
            of_times(
                f"prompt → request to the model, turn {at}",
                crow[window],
                limit=limit,
                cpu=statistics.mean(cpu[window]) * 1e3,
                floor=statistics.median(floors["raw"][window]) * 1e3,
                sdk=statistics.median(floors["sdk"][window]) * 1e3,
            )
        )
    rows.append(bench.flush(PAUSE_S))
    taken = []
    for _ in range(5):
        with bench.start(home) as agent:
            agent.initialize()
            replay = agent.listen(session)
            params = {"sessionId": session, "cwd": str(agent.cwd), "mcpServers": []}
            taken.append(agent.ask("session/load", params)[0])
        asked = sum(update["sessionUpdate"] == "user_message_chunk" for _, update in replay.updates())
        if asked != TURNS + 1 or replay.text != "".join(map(token, range(3))) * asked:
            raise RuntimeError(f"The load told of {asked} turns: {replay.text[:100]!r}")
    return [*rows, of_times(f"session/load of {TURNS} turns, a fresh process", taken, limit=50)]


def turns(bench: Bench, agent: Agent, session: str) -> tuple[list[float], list[float]]:
    """Seconds from prompt to request and seconds of CPU, of each turn."""
    delays, computed = [], []
    for _ in range(TURNS):
        agent.settle(PAUSE_S)
        before = agent.cpu_s()
        turn = agent.prompt(session, prompt())
        delays.append(bench.endpoint.wait().asked - turn.sent)
        computed.append(agent.cpu_s() - before)
    return delays, computed


def first_chunks(bench: Bench) -> list[Row]:
    """The endpoint's first byte of text to the first chunk; its last byte to the prompt's answer."""
    first: dict[str | None, list[float]] = {}
    last: dict[str | None, list[float]] = {}
    for floor in (None, "raw", "sdk"):
        with bench.session(floor=floor) as (agent, session):
            first[floor], last[floor] = [], []
            for _ in range(20):
                agent.settle(PAUSE_S)
                turn = agent.prompt(session, prompt(tokens=3, rate=100))
                served = bench.endpoint.wait()
                first[floor].append(turn.chunks()[0][0] - served.first)
                last[floor].append(turn.answered - served.last)
    return [
        of_times(what, times[None], limit=limit, floor=middle(times["raw"]), sdk=middle(times["sdk"]))
        for what, times, limit in (
            ("the model's first byte → first chunk", first, 1),
            ("the model's last byte → the prompt's answer", last, None),
        )
    ]


def steps(bench: Bench) -> list[Row]:
    """A durable tool step without the model: from the end of one answer of the model to the next request."""
    taken: dict[tuple[str | None, str], list[float]] = {}
    for floor in (None, "raw", "sdk"):
        with bench.session(floor=floor) as (agent, session):
            for tool in (READ, SHELL):
                agent.prompt(session, prompt(calls=1, **tool))
                for _ in range(2):
                    bench.endpoint.wait()
                agent.settle(PAUSE_S)
                agent.prompt(session, prompt(calls=STEPS, **tool))
                served = [bench.endpoint.wait() for _ in range(STEPS + 1)]
                gaps = [later.asked - before.last for before, later in itertools.pairwise(served)]
                taken[floor, tool["tool"]] = gaps
    return [
        of_times(
            f"a tool step: {tool}",
            taken[None, tool],
            limit=limit,
            floor=middle(taken["raw", tool]),
            sdk=middle(taken["sdk", tool]),
        )
        for tool, limit in (("read_file", 5), ("shell", 8))
    ] + confined_steps(bench)


def confined_steps(bench: Bench) -> list[Row]:
    """Tool steps with commands that the kernel confines, in the way that is found on this machine; and the first
    command of a process, which waits until that way has been tried."""
    first = []
    for _ in range(5):
        with bench.session(sandbox="auto") as (agent, session):
            first.append(shell_steps(bench, agent, session, 1, "read")[0])
    rows = [of_times("a tool step: the first shell command of a process, confined", first)]
    with bench.session(sandbox="auto") as (agent, session):
        shell_steps(bench, agent, session, 1, "read")
        for access in ("read", "write"):
            agent.settle(PAUSE_S)
            taken = shell_steps(bench, agent, session, STEPS, access)
            rows.append(of_times(f"a tool step: shell, confined to {access}", taken, limit=20))
    return rows


def shell_steps(bench: Bench, agent: Agent, session: str, steps: int, access: str) -> list[float]:
    """Seconds from the end of each answer that calls `shell` to the next request."""
    agent.prompt(
        session, prompt(calls=steps, tool="shell", arguments=f'{{"command": "echo {{i}}", "access": "{access}"}}')
    )
    served = [bench.endpoint.wait() for _ in range(steps + 1)]
    return [later.asked - before.last for before, later in itertools.pairwise(served)]


def outputs(bench: Bench) -> list[Row]:
    """A command that prints 7 MB: the time of the step, and how much of the output the model gets."""
    (bench.place / "big.txt").write_text("".join(f"{number}\n" for number in range(1_000_000)))
    taken: dict[str | None, list[float]] = {}
    chars: list[float] = []
    for floor, times in ((None, 5), ("raw", 3)):
        taken[floor] = []
        with bench.session(floor=floor) as (agent, session):
            for _ in range(times):
                agent.settle(PAUSE_S)
                agent.prompt(session, prompt(calls=1, tool="shell", arguments='{"command": "cat big.txt"}'))
                before, after = bench.endpoint.wait(), bench.endpoint.wait()
                taken[floor].append(after.asked - before.last)
                if floor is None:
                    chars.append(after.result_chars / 1000)
    return [
        of_times("a tool output of 7 MB, the step", taken[None], limit=100, floor=middle(taken["raw"])),
        Row("  what the model is given of it", statistics.median(chars), max(chars), "kB", 50),
    ]


def middle(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3
