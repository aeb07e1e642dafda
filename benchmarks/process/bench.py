"""The endpoint, scratch directory and agents that every scene needs.

Crow and the floors start alike, in an environment that only names the endpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.process.client import Agent
from benchmarks.process.endpoint import Endpoint
from benchmarks.rows import ROOT, Row, flush_ms, of_times
from crow.bridge.resident import socket_path

__all__ = ["FLOORS", "Bench"]

FLOORS = ("raw", "sdk")
"""The smallest agents, without packages and on the SDKs; see `benchmarks/floors`."""

FILES = 40


class Bench:
    """Starts agents in `directory` that use `endpoint`."""

    def __init__(self, endpoint: Endpoint, directory: Path) -> None:
        self.endpoint = endpoint
        self.directory = directory
        self._homes = 0
        self.place = directory / "work"
        self.place.mkdir()
        for number in range(FILES):
            (self.place / f"f{number}.txt").write_text(f"line of file {number}\n" * 100)

    def home(self) -> Path:
        """A new `CROW_HOME`."""
        self._homes += 1
        return self.directory / f"home{self._homes}"

    def flush(self, rest_s: float) -> Row:
        """The disk's share of a row above that has one transaction after the same rest."""
        taken = [ms / 1e3 for ms in flush_ms(self.place, 15, rest_s=rest_s)]
        return of_times(f"  the disk's share: one flush after {rest_s * 1e3:g} ms of rest", taken)

    def environment(self, home: Path, sandbox: str = "off") -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_SANDBOX": sandbox,
            "CROW_MODEL": "fake-model",
            "OPENAI_BASE_URL": self.endpoint.base_url,
            "OPENAI_API_KEY": "none",
        }

    def start(self, home: Path | None = None, *, floor: str | None = None, sandbox: str = "off") -> Agent:
        """Start a process: crow, or a floor. `sandbox` is `sandbox.enabled`: without one, figures can be compared with
        those of agents that confine nothing."""
        command = (
            ["-m", "crow", "acp"] if floor is None else [str(ROOT / "benchmarks" / "floors" / f"{floor}_agent.py")]
        )
        return Agent([sys.executable, *command], self.environment(home or self.home(), sandbox), self.place)

    @contextmanager
    def server(self) -> Iterator[tuple[Path, str]]:
        """A running `crow serve --user`: its home, and the path of its socket."""
        home = self.home()
        environment = self.environment(home) | {"XDG_RUNTIME_DIR": str(self.directory)}
        command = [sys.executable, "-m", "crow", "serve", "--user"]
        subprocess.run([*command, "--start"], env=environment, check=True)
        try:
            yield home, socket_path(environment)
        finally:
            subprocess.run([*command, "--stop"], env=environment, stdout=subprocess.DEVNULL, check=True)

    @contextmanager
    def session(
        self,
        home: Path | None = None,
        *,
        floor: str | None = None,
        servers: Sequence[Mapping[str, object]] = (),
        sandbox: str = "off",
    ) -> Iterator[tuple[Agent, str]]:
        """An agent with an idle session that has had one turn. It runs each command without asking."""
        home = home or self.home()
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text('[permissions]\nallow = ["shell"]\n')
        with self.start(home, floor=floor, sandbox=sandbox) as agent:
            agent.initialize()
            session = self.warm_session(agent, floor=floor, servers=servers)
            agent.settle(0.05)
            yield agent, session

    def warm_session(
        self, agent: Agent, *, floor: str | None = None, servers: Sequence[Mapping[str, object]] = ()
    ) -> str:
        """Another session, after its first turn."""
        _, session = agent.new_session(mcpServers=list(servers))
        if floor is None:
            agent.ask("session/set_mode", {"sessionId": session, "modeId": "auto"})
        agent.prompt(session, "bench {}")
        self.endpoint.wait()
        return session
