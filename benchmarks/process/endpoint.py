"""The endpoint for measuring, as whoever measures sees it: started, and its notes read."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import ROOT

__all__ = ["Endpoint", "Served", "prompt"]


@dataclass(frozen=True)
class Served:
    """One request, as `endpoint_program.Noted` has it. Times are those of `time.monotonic`."""

    id: int
    asked: float
    bytes: int
    result_chars: int
    first: float
    last: float
    gap: float
    left: bool


def prompt(**script: object) -> str:
    """A prompt that asks for an answer; see `endpoint_program.Script`."""
    return f"bench {json.dumps(script)}"


class Endpoint:
    """`base_url` answers; `wait` gives its notes in order."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._read = b""
        self.base_url = f"http://127.0.0.1:{int(self._line(30))}/v1"

    def wait(self, state: str = "done", timeout_s: float = 30) -> Served:
        """The next request that got into `state`, `asked` or `done`; notes of the other state are dropped."""
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
def endpoint() -> Iterator[Endpoint]:
    """An endpoint in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.process.endpoint_program"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield Endpoint(process)
        finally:
            process.kill()
