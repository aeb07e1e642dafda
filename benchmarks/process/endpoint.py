"""Starts the benchmark endpoint and reads its notes."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT

__all__ = ["Endpoint", "Served", "prompt"]


@dataclass(frozen=True)
class Served:
    """One request, like `endpoint_program.Noted`. Times are those of `time.monotonic`."""

    id: int
    asked: float
    bytes: int
    tools: int
    result_chars: int
    first: float
    last: float
    gap: float
    left: bool


def prompt(**script: object) -> str:
    """A prompt that asks for a certain answer; see `endpoint_program.Script`."""
    return f"bench {json.dumps(script)}"


class Endpoint:
    """`base_url` is the endpoint; `wait` returns its notes in order."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._read = b""
        self.base_url = f"http://127.0.0.1:{int(self._line(30))}/v1"

    def wait(self, state: str = "done", timeout_s: float = 30) -> Served:
        """The next request that reached `state`, `asked` or `done`; skips notes of the other state."""
        while True:
            noted: dict[str, Any] = json.loads(self._line(timeout_s))
            if noted.pop("state") == state:
                return Served(**noted)

    def _line(self, timeout_s: float) -> bytes:
        while b"\n" not in self._read:
            if not select.select([self._lines], [], [], timeout_s)[0]:
                raise TimeoutError("The endpoint was not asked.")
            self._read += self._lines.read1(65536)  # type: ignore[attr-defined]
        line, _, self._read = self._read.partition(b"\n")
        return line


@contextmanager
def endpoint(keep: Path | None = None) -> Iterator[Endpoint]:
    """An endpoint in its own process. It writes the body of each request to `keep` as `ID.json`."""
    command = [sys.executable, "-m", "benchmarks.process.endpoint_program", *([str(keep)] if keep else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield Endpoint(process)
        finally:
            process.kill()
