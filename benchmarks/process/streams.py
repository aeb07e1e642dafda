"""Measures long answers, many sessions at once, and memory."""

from __future__ import annotations

import statistics

from benchmarks.process.bench import Bench
from benchmarks.process.client import Agent, Turn
from benchmarks.process.endpoint import Served, prompt
from benchmarks.process.endpoint_program import token
from benchmarks.rows import Row, of_times

__all__ = ["chunks", "many", "paced", "stream"]

TOKENS = 20_000
SESSIONS = 64
EACH = 500
RATE = 50
PACED_TOKENS = 300


def exact(turn: Turn, tokens: int) -> bool:
    return turn.text == "".join(map(token, range(tokens)))


def stream(bench: Bench) -> list[Row]:
    """20,000 tokens at the endpoint's full speed."""
    wall: dict[str | None, list[float]] = {}
    cpu: dict[str | None, list[float]] = {}
    gaps: list[float] = []
    counts: list[int] = []
    wrong = 0
    for floor, times in ((None, 5), ("raw", 3), ("sdk", 2)):
        wall[floor], cpu[floor] = [], []
        with bench.start(floor=floor) as agent:
            agent.initialize()
            for _ in range(times):
                session = bench.warm_session(agent, floor=floor)
                agent.settle(0.05)
                before = agent.cpu_s()
                turn = agent.prompt(session, prompt(tokens=TOKENS))
                wall[floor].append(turn.answered - turn.sent)
                cpu[floor].append(agent.cpu_s() - before)
                bench.endpoint.wait()
                if floor is None:
                    gaps.append(turn.largest_gap())
                    counts.append(len(turn.lines))
                    wrong += not exact(turn, TOKENS)
    floors = {
        name: {floor: statistics.median(taken[floor]) for floor in ("raw", "sdk")}
        for name, taken in (("wall", wall), ("cpu", cpu))
    }
    return [
        Row(
            f"{TOKENS:,} tokens at full speed, wall",
            statistics.median(wall[None]),
            max(wall[None]),
            "s",
            0.35,
            floor=floors["wall"]["raw"],
            sdk=floors["wall"]["sdk"],
        ),
        Row(
            "  CPU",
            statistics.median(cpu[None]),
            max(cpu[None]),
            "s",
            0.35,
            floor=floors["cpu"]["raw"],
            sdk=floors["cpu"]["sdk"],
        ),
        of_times("  largest gap between two chunks", gaps, limit=50),
        Row("  updates", statistics.median(counts), max(counts), ""),
        Row("  rounds with text that is not exact", wrong, wrong, "", 0),
    ]


def chunks(bench: Bench) -> list[Row]:
    """20,000 tokens, each in its own HTTP chunk, as servers send them; crow and the client library alternate."""
    wall: dict[str | None, list[float]] = {None: [], "library": []}
    cpu: dict[str | None, list[float]] = {None: [], "library": []}
    wrong = 0
    with bench.session() as (crow, session), bench.session(floor="library") as (library, other):
        for _ in range(7):
            for floor, agent, where in ((None, crow, session), ("library", library, other)):
                agent.settle(0.05)
                before = agent.cpu_s()
                turn = agent.prompt(where, prompt(tokens=TOKENS, block=1))
                wall[floor].append(turn.answered - turn.sent)
                cpu[floor].append(agent.cpu_s() - before)
                bench.endpoint.wait()
                wrong += floor is None and not exact(turn, TOKENS)
    what = f"{TOKENS:,} tokens, an HTTP chunk each"
    rows = []
    for name, taken in ((f"{what}, wall", wall), ("  CPU", cpu)):
        median, floor_s = statistics.median(taken[None]), statistics.median(taken["library"])
        rows.append(Row(name, median, max(taken[None]), "s", floor=floor_s))
        ratios = [ours / theirs for ours, theirs in zip(taken[None], taken["library"], strict=True)]
        rows.append(Row("  of the client library alone", statistics.median(ratios), max(ratios), "×", 1.5))
    return [*rows, Row("  rounds with text that is not exact", wrong, wrong, "", 0)]


def together(bench: Bench, agent: Agent, sessions: list[str], **script: object) -> tuple[list[Turn], list[Served]]:
    """One prompt in each session, all at once."""
    turns = [agent.begin(session, prompt(**script)) for session in sessions]
    for turn in turns:
        agent.end(turn)
    return turns, [bench.endpoint.wait() for _ in turns]


def wall_s(turns: list[Turn]) -> float:
    return max(turn.answered for turn in turns) - min(turn.sent for turn in turns)


def many(bench: Bench) -> list[Row]:
    """64 sessions that answer at once at full speed; memory with one session and with all."""
    wall: dict[str | None, list[float]] = {}
    cpu: list[float] = []
    wrong = 0
    memory = {}
    for floor, times in ((None, 3), ("raw", 2), ("sdk", 1)):
        wall[floor] = []
        with bench.session(floor=floor) as (agent, session):
            agent.settle(1)
            memory[floor, 1] = agent.memory_mb()
            sessions = [session, *(bench.warm_session(agent, floor=floor) for _ in range(SESSIONS - 1))]
            for _ in range(times):
                before = agent.cpu_s()
                turns, _ = together(bench, agent, sessions, tokens=EACH)
                wall[floor].append(wall_s(turns))
                if floor is None:
                    cpu.append(agent.cpu_s() - before)
                    wrong += sum(not exact(turn, EACH) for turn in turns)
            memory[floor, SESSIONS] = agent.memory_mb()
    what = f"{SESSIONS} sessions, {EACH} tokens each at full speed"
    return [
        Row(
            what,
            statistics.median(wall[None]),
            max(wall[None]),
            "s",
            1.5,
            statistics.median(cpu) * 1e3,
            statistics.median(wall["raw"]),
            statistics.median(wall["sdk"]),
        ),
        Row("  answers with text that is not exact", wrong, wrong, "", 0),
        *(
            Row(
                f"memory after {'one session' if count == 1 else f'{count} sessions'}",
                memory[None, count],
                memory[None, count],
                "MB",
                limit,
                floor=memory["raw", count],
                sdk=memory["sdk", count],
            )
            for count, limit in ((1, 100), (SESSIONS, 160))
        ),
    ]


def paced(bench: Bench) -> list[Row]:
    """64 sessions at 50 tokens per second each, next to the endpoint's own largest gap."""
    gaps: dict[str | None, list[float]] = {}
    wrong, cpu, sent, walls = 0, 0.0, [0.0], [0.0]
    for floor in (None, "raw"):
        with bench.session(floor=floor) as (agent, session):
            sessions = [session, *(bench.warm_session(agent, floor=floor) for _ in range(SESSIONS - 1))]
            before = agent.cpu_s()
            turns, served = together(bench, agent, sessions, tokens=PACED_TOKENS, rate=RATE)
            gaps[floor] = [turn.largest_gap() for turn in turns]
            if floor is None:
                cpu = agent.cpu_s() - before
                wrong = sum(not exact(turn, PACED_TOKENS) for turn in turns)
                sent = [each.gap for each in served]
                walls = [wall_s(turns)]
    what = f"{SESSIONS} sessions at {RATE} tokens/s: largest gap"
    largest, lowest = max(gaps[None]) * 1e3, max(gaps["raw"]) * 1e3
    return [
        Row(what, largest, largest, "ms", 40, floor=lowest),
        of_times("  of which the median session", gaps[None]),
        of_times("  the endpoint's own largest gap", [max(sent)]),
        Row(f"  wall (ideally {PACED_TOKENS / RATE:g})", walls[0], walls[0], "s", cpu=cpu * 1e3),
        Row("  answers with text that is not exact", wrong, wrong, "", 0),
    ]
