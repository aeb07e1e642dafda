"""Compares crow with the other agents on this machine: `python -m benchmarks.compare`, which is `make compare`.

Agents of `benchmarks/peers.toml` are found on PATH. `CROW_COMPARE="NAME=COMMAND; ..."` says where others are: a known
name keeps its settings, an unknown one is given the endpoint in `OPENAI_BASE_URL`. Each round starts every agent once,
in turn, over stdio and in a scratch home that it keeps; the first round is not counted. The table goes to the top of
BENCHMARKS.md. Needs Linux's /proc for memory.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.process.client import Agent, Turn
from benchmarks.process.endpoint import Endpoint, Served, endpoint, prompt
from benchmarks.process.endpoint_program import token
from benchmarks.rows import ROOT, number
from benchmarks.write import written
from crow.domain.tokens import estimate_text

__all__ = ["BEGIN", "END", "Measured", "Peer", "known", "named", "peers", "request_tokens", "shell_call", "text"]

BEGIN, END = "<!-- compare: begin -->\n", "<!-- compare: end -->\n"
DELTAS = 2_000
STEPS = 5
GENERIC = {"OPENAI_BASE_URL": "{url}", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "fake-model"}
COLUMNS = {
    "start": "spawn → initialize, ms",
    "request": "first prompt → request, ms",
    "first": "first byte → first chunk, ms",
    "stream": f"{DELTAS:,} deltas, ms",
    "step": "tool step, ms",
    "memory": "memory, MB",
    "tokens": "first request, tokens",
}
Figures = dict[str, float]
"""What one process was measured at, by the names of COLUMNS; without what it cannot do."""


@dataclass(frozen=True)
class Peer:
    """An agent that can be started. `version` prints its version. `environment` and `files` (by path below its home)
    name the endpoint. Strings may have the names in braces that peers.toml explains."""

    name: str
    command: Sequence[str]
    version: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: GENERIC)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Measured:
    """An agent's version, and its figures in each counted round."""

    version: str
    rounds: list[Figures] = field(default_factory=list)


def known() -> dict[str, Peer]:
    """The agents of peers.toml, by name."""
    table = tomllib.loads((ROOT / "benchmarks" / "peers.toml").read_text("utf-8"))
    return {
        name: Peer(
            name,
            shlex.split(entry["command"]),
            shlex.split(entry.get("version", "")),
            entry.get("environment", {}),
            entry.get("files", {}),
        )
        for name, entry in table.items()
    }


def named(setting: str) -> dict[str, list[str]]:
    """The commands in `CROW_COMPARE`, by name. :raises ValueError: a part is not `NAME=COMMAND`."""
    found = {}
    for part in filter(None, map(str.strip, setting.split(";"))):
        name, _, command = part.partition("=")
        words = shlex.split(command)
        if not name.strip() or not words:
            raise ValueError(f"CROW_COMPARE must be NAME=COMMAND; NAME=COMMAND: {part!r} is not.")
        found[name.strip()] = words
    return found


def peers(setting: str, path: str) -> list[Peer]:
    """Crow, then the other agents on `path` or in `setting`, by name."""
    commands, table = named(setting), known()
    crow = table.pop("crow")
    found = [peer for name, peer in table.items() if name not in commands and shutil.which(peer.command[0], path=path)]
    found += [replace(table.get(name, Peer(name, ())), command=words) for name, words in commands.items()]
    return [crow, *sorted(found, key=lambda peer: peer.name)]


def request_tokens(body: Mapping[str, Any]) -> int:
    """Crow's estimate of the tokens in a request's messages and tools."""
    parts = {key: body[key] for key in ("instructions", "messages", "input", "tools") if key in body}
    return estimate_text(json.dumps(parts, ensure_ascii=False))


def shell_call(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """A call of the first tool that runs commands, as its name and its arguments in JSON; None if there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {}
        name = next((name for name in ("command", "cmd") if name in properties), None)
        if name is None:
            continue
        needed = [key for key in schema.get("required", ()) if properties.get(key, {}).get("type") == "string"]
        words: dict[str, Any] = dict.fromkeys(needed, "echo")
        words[name] = ["echo", "{i}"] if properties[name].get("type") == "array" else "echo {i}"
        return function["name"], json.dumps(words)
    return None


class Scratch:
    """Starts `peer` in a home of its own below `directory`. `told` is the version in its answer to `initialize`."""

    def __init__(self, peer: Peer, fake: Endpoint, directory: Path) -> None:
        self.peer, self.fake, self.told = peer, fake, ""
        self.home, self.place, self.bodies = directory / peer.name / "home", directory / "work", directory / "bodies"
        self._values = {"url": fake.base_url, "home": str(self.home), "python": sys.executable, "root": str(ROOT)}
        (self.home / "tmp").mkdir(parents=True)
        for name, content in peer.files.items():
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / name).write_text(self._filled(content), "utf-8")
        self.command = [self._filled(word) for word in peer.command]
        program = Path(shutil.which(self.command[0]) or self.command[0]).absolute()
        # Proxies that are not there: whoever follows the rules reaches nothing but the endpoint.
        nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
        self.environment = {
            "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "LANG": "C.UTF-8",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **nowhere,
            **{name: self._filled(value) for name, value in peer.environment.items()},
        }

    def _filled(self, value: str) -> str:
        for name, content in self._values.items():
            value = value.replace(f"{{{name}}}", content)
        return value

    def version(self) -> str:
        """What it told in its session and what its version command prints, if that is something else: an adapter and
        the agent that it starts."""
        command, printed = [self._filled(word) for word in self.peer.version], None
        if command and (program := shutil.which(command[0], path=self.environment["PATH"])):
            command = [program, *command[1:]]
            with suppress(subprocess.SubprocessError, OSError):
                done = subprocess.run(
                    command,
                    env=self.environment,
                    cwd=self.place,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                printed = re.search(r"\d+\.\d+[\w.+-]*", done.stdout + done.stderr)
        return " / ".join(dict.fromkeys(filter(None, (self.told, printed and printed[0]))))

    @contextmanager
    def started(self) -> Iterator[Agent]:
        """The running agent. All of its processes are gone at the end."""
        agent = Agent(self.command, self.environment, self.place)
        try:
            yield agent
        finally:
            end(agent)

    def round(self) -> Figures:
        """Measure one process until it cannot do something; that goes to stderr."""
        figures: Figures = {}
        try:
            with self.started() as agent:
                self._session(agent, figures)
        except (RuntimeError, TimeoutError, OSError, LookupError, ValueError) as error:
            print(f"{self.peer.name}: {', '.join(COLUMNS.keys() - figures.keys())}: {error}", file=sys.stderr)
        return figures

    def _session(self, agent: Agent, figures: Figures) -> None:
        """A session: its first turn, five short answers, long ones, and a turn with tool calls."""
        _, result = agent.ask("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        figures["start"] = (time.monotonic() - agent.spawned) * 1e3
        self.told = (result.get("agentInfo") or {}).get("version") or ""
        _, session = agent.new_session()
        turn = agent.prompt(session, prompt())
        served = self.served(turn)
        figures["request"] = (served.asked - turn.sent) * 1e3
        body = json.loads((self.bodies / f"{served.id}.json").read_bytes())
        figures["tokens"] = request_tokens(body)
        firsts, streams = [], []
        for _ in range(5):
            agent.settle(0.05)
            turn = agent.prompt(session, prompt(tokens=3, rate=100))
            firsts.append(first_chunk(turn) - self.served(turn).first)
        figures["first"] = statistics.median(firsts) * 1e3
        for _ in range(2):
            agent.settle(0.05)
            turn = agent.prompt(session, prompt(tokens=DELTAS, block=1))
            agent.settle(0.05)  # some agents answer before their last update
            if not turn.text.rstrip().endswith("".join(map(token, range(DELTAS))).rstrip()):  # notices may come before
                raise RuntimeError(f"The text is not what was sent: {turn.text[-100:]!r}")
            streams.append(max(turn.answered, turn.chunks()[-1][0]) - self.served(turn).first)
        figures["stream"] = statistics.median(streams) * 1e3
        agent.settle(1)
        figures["memory"] = sum(map(shared_memory_mb, tree(agent.process.pid)))
        if (call := shell_call(body.get("tools") or ())) is None:
            raise RuntimeError("It offers no tool that runs commands.")
        turn = agent.prompt(session, prompt(calls=STEPS, tool=call[0], arguments=call[1]))
        steps = [self.served(turn) for _ in range(STEPS + 1)]
        figures["step"] = statistics.median(b.asked - a.last for a, b in itertools.pairwise(steps)) * 1e3

    def served(self, turn: Turn) -> Served:
        """The turn's next request. Requests without tools are for titles and the like."""
        while True:
            served = self.fake.wait()
            if served.tools and served.asked >= turn.sent:
                return served


def first_chunk(turn: Turn) -> float:
    """When the first chunk with text of the model came; some agents send notices of their own before it."""
    for at, words in turn.chunks():
        if token(0).strip() in words:
            return at
    raise RuntimeError("No chunk came.")


def tree(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            children.setdefault(int(status.read_text().rpartition(")")[2].split()[1]), []).append(
                int(status.parent.name)
            )
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def shared_memory_mb(pid: int) -> float:
    """Resident memory of a process; pages that several share count by their share. 0 if it has ended."""
    with suppress(OSError):
        found = re.search(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) / 1024 if found else 0
    return 0


def end(agent: Agent) -> None:
    """Close an agent's stdin, and kill what is left of it after five seconds."""
    processes = tree(agent.process.pid)
    assert agent.process.stdin is not None
    assert agent.process.stdout is not None
    with suppress(OSError):
        agent.process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        agent.process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(agent.process.pid, signal.SIGKILL)
    for pid in processes[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.process.wait()
    agent.process.stdout.close()


def text(found: Mapping[str, Measured], day: datetime.date, loads: Sequence[float]) -> str:
    """The table, with what it was made of. Crow is among `found`; agents without figures are named below."""
    crow = found["crow"].rounds
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for name, measured in found.items():
        if any(measured.rounds):
            cells = [cell(name, key, measured.rounds, crow) for key in COLUMNS]
            lines.append(f"| {name} {measured.version}".rstrip() + " | " + " | ".join(cells) + " |")
    cores = os.cpu_count() or 1
    busy = " The machine was busy, so only the ratios count." if max(loads) > cores / 2 else ""
    about = (
        f"{day.isoformat()}, {len(crow)} rounds, {platform.system()} {platform.machine()}, {cores} cores, Python"
        f" {platform.python_version()}; load average {min(loads):.1f} to {max(loads):.1f}.{busy}"
    )
    missing = [name for name, measured in found.items() if not any(measured.rounds)]
    parts = [
        about,
        "\n".join(lines),
        *([f"Not measured, because no session began: {', '.join(missing)}."] if missing else []),
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def cell(name: str, key: str, rounds: Sequence[Figures], crow: Sequence[Figures]) -> str:
    """The median over the rounds, and the median of the ratios to crow in the same round."""
    values = [figures[key] for figures in rounds if key in figures]
    if not values:
        return "-"
    value = (
        f"{statistics.median(values):,.1f}"
        if statistics.median(values) < 100
        else number(round(statistics.median(values)))
    )
    ratios = [a[key] / b[key] for a, b in zip(rounds, crow, strict=True) if key in a and b.get(key)]
    return value if name == "crow" or not ratios else f"{value} ({statistics.median(ratios):.1f} ×)"


def measured(found: Sequence[Peer], rounds: int) -> tuple[dict[str, Measured], list[float]]:
    """The figures of all agents, and the load average after each round."""
    with tempfile.TemporaryDirectory(prefix="crow-compare-", ignore_cleanup_errors=True) as name:
        directory = Path(name).resolve()
        (directory / "bodies").mkdir()
        (directory / "work").mkdir()
        (directory / "work" / "README.md").write_text("A place to compare agents in.\n")
        loads = []
        with endpoint(directory / "bodies") as fake:
            scratches = [Scratch(peer, fake, directory) for peer in found]
            alive = {scratch.peer.name for scratch in scratches if "request" in scratch.round()}
            figures = {scratch.peer.name: Measured(scratch.version()) for scratch in scratches}
            for at in range(rounds):
                for scratch in scratches:
                    figures[scratch.peer.name].rounds.append(scratch.round() if scratch.peer.name in alive else {})
                loads.append(os.getloadavg()[0])
                print(f"round {at + 1} of {rounds}", file=sys.stderr, flush=True)
        return figures, loads


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="starts of each agent that count")
    options = parser.parse_args()
    try:
        found = peers(os.environ.get("CROW_COMPARE", ""), os.environ["PATH"])
    except ValueError as error:
        parser.error(str(error))
    if len(found) == 1:
        print(f"None of {', '.join(known())} is on PATH, and CROW_COMPARE names no other agent.", file=sys.stderr)
        return 1
    figures, loads = measured(found, options.rounds)
    new = text(figures, datetime.datetime.now(datetime.UTC).date(), loads)
    print(new)
    document = ROOT / "BENCHMARKS.md"
    document.write_text(written(document.read_text("utf-8"), new, BEGIN, END), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
