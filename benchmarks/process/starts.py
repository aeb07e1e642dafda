"""Measures starts, new sessions, exits and an idle process."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.process.bench import FLOORS, Bench
from benchmarks.process.client import Agent, Turn
from benchmarks.process.endpoint import prompt
from benchmarks.rows import ROOT, Row, of_times

__all__ = ["exits", "first_requests", "idle", "resident", "sessions", "starts"]

ROUNDS = 7
PAIRS = 30
IMPORT = "import acp"
IMPORT_ALL = "import acp, openai, mcp.client, mcp.server.lowlevel"
IDLE_S = 2.0
SERVER = ROOT / "tests" / "tools" / "servers" / "various.py"


def starts(bench: Bench) -> list[Row]:
    """Start to answered `initialize`, alternating with `import acp` alone."""
    crow, imports, imported, raw, sdk = (list[float]() for _ in range(5))
    for number in range(ROUNDS + 1):
        whole, ready = import_alone(bench.place)
        times = [whole, ready, *(started(bench, floor) for floor in (None, *FLOORS))]
        if number:  # the first round compiles changed modules
            for kept, took in zip((imports, imported, crow, raw, sdk), times, strict=True):
                kept.append(took)
    ratios = [mine / alone for mine, alone in zip(crow, imports, strict=True)]
    narrow = [mine / alone for mine, alone in zip(crow, imported, strict=True)]
    return [
        of_times(
            "start: spawn → initialize answered",
            crow,
            floor=statistics.median(raw) * 1e3,
            sdk=statistics.median(sdk) * 1e3,
        ),
        of_times("start: a Python that imports the protocol's SDK and exits", imports),
        Row("start: the first, as multiple of the second", statistics.median(ratios), max(ratios), "×", 1.1),
        Row("start: the same until the import is done", statistics.median(narrow), max(narrow), "×"),
    ]


def import_alone(place: Path) -> tuple[float, float]:
    """Seconds of a whole process that imports `acp`, and of another one until the import is done."""
    since = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORT], cwd=place, check=True)
    whole = time.monotonic() - since
    since = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", f"{IMPORT}; print(flush=True)"], stdout=subprocess.PIPE, cwd=place
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return whole, time.monotonic() - since


def first_requests(bench: Bench) -> list[Row]:
    """Spawn to the first request at the endpoint, alternating with a Python that imports every SDK; and the help."""
    imports, runs, agents, bare, helps = (list[float]() for _ in range(5))
    for number in range(ROUNDS + 1):
        times = [
            process_s(bench, "-c", IMPORT_ALL),
            asked_by_run(bench),
            asked_by_agent(bench),
            process_s(bench, "-c", "pass"),
            process_s(bench, str(Path(sys.executable).with_name("crow")), "--help"),
        ]
        if number:  # the first round compiles changed modules
            for kept, took in zip((imports, runs, agents, bare, helps), times, strict=True):
                kept.append(took)
    return [
        of_times("first request: a Python that imports acp, openai and mcp", imports),
        of_times("first request: spawn of crow run → the endpoint is asked", runs),
        ratio("  as multiple of the imports", runs, imports, 0.55),
        of_times("first request: spawn of crow acp → the same, back to back", agents),
        ratio("  as multiple of the imports", agents, imports, 0.75),
        of_times("crow --help", helps),
        ratio("  as multiple of a bare Python", helps, bare, 1.5),
    ]


def resident(bench: Bench) -> list[Row]:
    """Through `crow acp --connect` to a running server: spawn to answered `initialize`, and to the first request at the
    endpoint. Each alternates with a Python that starts and exits."""
    bare, started, asked = (list[float]() for _ in range(3))
    with bench.server() as (home, address):
        for number in range(PAIRS + 1):
            environment = bench.environment(home)
            times = [process_s(bench, "-c", "pass")]
            with Agent([sys.executable, "-m", "crow", "acp", "--connect", address], environment, bench.place) as agent:
                times.append(agent.initialize())
            with Agent([sys.executable, "-m", "crow", "acp", "--connect", address], environment, bench.place) as agent:
                agent.initialize()
                agent.begin(agent.new_session()[1], "bench {}")
                times.append(bench.endpoint.wait("asked").asked - agent.spawned)
                bench.endpoint.wait()
            if number:
                for kept, took in zip((bare, started, asked), times, strict=True):
                    kept.append(took)
    return [
        of_times("resident: spawn of crow acp --connect → initialize answered", started),
        ratio("  as multiple of a bare Python", started, bare, 2.0),
        of_times("resident: the same → the endpoint is asked", asked),
        ratio("  as multiple of a bare Python", asked, bare, 2.0),
    ]


def ratio(what: str, mine: list[float], floor: list[float], limit: float) -> Row:
    """The median ratio of times that were measured one after the other."""
    ratios = [one / other for one, other in zip(mine, floor, strict=True)]
    return Row(what, statistics.median(ratios), max(ratios), "×", limit)


def process_s(bench: Bench, *arguments: str) -> float:
    """Seconds of a whole Python process."""
    since = time.monotonic()
    environment = bench.environment(bench.home())
    subprocess.run(
        [sys.executable, *arguments], cwd=bench.place, env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.monotonic() - since


def asked_by_run(bench: Bench) -> float:
    """Seconds from the start of `crow run` until the endpoint has its request."""
    with Agent([sys.executable, "-m", "crow", "run", "bench {}"], bench.environment(bench.home()), bench.place) as run:
        assert run.process.stdin is not None
        run.process.stdin.close()
        asked = bench.endpoint.wait("asked").asked
        bench.endpoint.wait()
        return asked - run.spawned


def asked_by_agent(bench: Bench) -> float:
    """Seconds from the start of `crow acp` until the endpoint has the request of a prompt that was sent at once."""
    with bench.start() as agent:
        agent.initialize()
        agent.begin(agent.new_session()[1], "bench {}")
        asked = bench.endpoint.wait("asked").asked
        bench.endpoint.wait()
        return asked - agent.spawned


def started(bench: Bench, floor: str | None) -> float:
    with bench.start(floor=floor) as agent:
        return agent.initialize()


def sessions(bench: Bench) -> list[Row]:
    """`session/new`: the first in a new home, right after the start; and later ones."""
    first, warm = [], []
    for _ in range(5):
        with bench.start() as agent:
            agent.initialize()
            first.append(agent.new_session()[0])
            agent.settle(1.5)
            warm += [agent.new_session()[0] for _ in range(5)]
    return [
        of_times("session/new, the first in a fresh home", first, limit=30),
        of_times("session/new, later", warm, limit=30),
    ]


def exits(bench: Bench) -> list[Row]:
    """From the end of stdin to the end of the process."""
    floor = []
    for _ in range(3):
        with bench.session(floor="raw") as (agent, _):
            floor.append(agent.close())
    alone, busy = [], []
    for _ in range(5):
        with bench.session() as (agent, _):
            agent.settle(0.5)
            alone.append(agent.close())
    server = {"name": "various", "command": sys.executable, "args": ["-I", "-S", str(SERVER), "calm"], "env": []}
    for _ in range(3):
        with bench.session(servers=[server]) as (agent, session):
            turn = agent.begin(session, prompt(calls=1, tool="shell", arguments='{"command": "sleep 60"}'))
            agent.until(partial(is_running, turn))
            agent.settle(0.3)
            busy.append(agent.close())
    return [
        of_times("exit after stdin closed, alone", alone, limit=100, floor=statistics.median(floor) * 1e3),
        of_times("exit, with an MCP server and a running command", busy, limit=1000),
    ]


def is_running(turn: Turn) -> bool:
    return any(b'"in_progress"' in line for _, line in turn.lines)


def idle(bench: Bench) -> list[Row]:
    """CPU and wake-ups of an idle process, after it has tidied the store."""
    with bench.session() as (agent, _):
        agent.settle(7)
        wakeups, cpu = agent.wakeups(), agent.cpu_s()
        agent.settle(IDLE_S)
        woke, computed = agent.wakeups() - wakeups, agent.cpu_s() - cpu
    return [
        Row(f"idle: CPU in {IDLE_S:g} s", computed * 1e3, computed * 1e3, "ms", 0),
        Row(f"idle: wake-ups in {IDLE_S:g} s", woke, woke, "", 0),
    ]
