"""An ACP client that drives a process and notes when each line arrives.

It has one thread, reads only while it waits for something, and parses updates after the measurement, so its own
cost does not show. `tests/support/acp_client.py` is the client that checks every line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Agent", "Turn"]

UPDATE = b'"session/update"'
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Turn:
    """One prompt, with the times when it was sent and answered. `lines` are its updates with their times."""

    session: str
    request: int
    sent: float
    answered: float = 0.0
    stop: str = ""
    lines: list[tuple[float, bytes]] = field(default_factory=list)

    def updates(self) -> list[tuple[float, dict[str, Any]]]:
        """The updates with their times."""
        return [(at, json.loads(line)["params"]["update"]) for at, line in self.lines]

    def chunks(self) -> list[tuple[float, str]]:
        """The chunks of text with their times."""
        return [
            (at, update["content"]["text"])
            for at, update in self.updates()
            if update["sessionUpdate"] == "agent_message_chunk"
        ]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.chunks())

    def largest_gap(self) -> float:
        """The longest time between two chunks of text, in seconds."""
        times = [at for at, _ in self.chunks()]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request of the agent: a question for permission is allowed, if possible for good; nothing else is
    known."""
    if message["method"] != "session/request_permission":
        return {"error": {"code": -32601, "message": "Method not found"}}
    options = {option["kind"]: option["optionId"] for option in message["params"]["options"]}
    chosen = options.get("allow_always", options.get("allow_once"))
    outcome = {"outcome": "cancelled"} if chosen is None else {"outcome": "selected", "optionId": chosen}
    return {"result": {"outcome": outcome}}


class Agent:
    """A running agent. `spawned` is when it was started."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, *, stderr: int = subprocess.DEVNULL
    ) -> None:
        self.cwd = cwd
        self.spawned = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            cwd=cwd,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._rest = b""
        self._next = 0
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}
        self._turns: dict[str, Turn] = {}

    def initialize(self) -> float:
        """Seconds from the start of the process to the response."""
        number = self.send_request("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        return self._answer(number)[0] - self.spawned

    def ask(self, method: str, params: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Seconds until the response, and its result. :raises RuntimeError: it is an error."""
        since = time.monotonic()
        at, result = self._answer(self.send_request(method, params))
        return at - since, result

    def send_request(self, method: str, params: Mapping[str, Any]) -> int:
        """Sends a request without waiting; returns its id."""
        self._next += 1
        self._send({"id": self._next, "method": method, "params": params})
        return self._next

    def new_session(self, **more: object) -> tuple[float, str]:
        """Opens a session; returns seconds and the session's id."""
        took, result = self.ask("session/new", {"cwd": str(self.cwd), "mcpServers": [], **more})
        return took, result["sessionId"]

    def begin(self, session: str, text: str) -> Turn:
        """Sends a prompt. It collects the session's updates until the next prompt."""
        params = {"sessionId": session, "prompt": [{"type": "text", "text": text}]}
        self._turns[session] = turn = Turn(session, self._next + 1, time.monotonic())
        self.send_request("session/prompt", params)
        return turn

    def end(self, turn: Turn) -> Turn:
        """Waits for the response. :raises RuntimeError: it is an error."""
        turn.answered, result = self._answer(turn.request)
        turn.stop = result["stopReason"]
        return turn

    def prompt(self, session: str, text: str) -> Turn:
        """Runs a whole turn. :raises RuntimeError: the response is an error or not `end_turn`."""
        turn = self.end(self.begin(session, text))
        if turn.stop != "end_turn":
            raise RuntimeError(f"The turn ended with {turn.stop}.")
        return turn

    def notify(self, method: str, params: Mapping[str, Any]) -> float:
        """Sends a notification; returns the time."""
        now = time.monotonic()
        self._send({"method": method, "params": params})
        return now

    def listen(self, session: str) -> Turn:
        """Collects the session's updates from now on, without a prompt."""
        self._turns[session] = turn = Turn(session, 0, time.monotonic())
        return turn

    def until(self, holds: Callable[[], bool], timeout_s: float = 60) -> None:
        """Reads until `holds` returns true."""
        end = time.monotonic() + timeout_s
        while not holds():
            self._read(end - time.monotonic())

    def settle(self, seconds: float) -> None:
        """Reads for this many seconds."""
        end = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            self.until(lambda: False, end - time.monotonic())

    def cpu_s(self) -> float:
        """CPU time of the process and of the children that it waited for."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) * TICK_S

    def memory_mb(self) -> float:
        """Resident memory of the process."""
        return self._status("VmRSS") / 1024

    def wakeups(self) -> int:
        """The number of times that its threads have waited."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(self._status("voluntary_ctxt_switches", f"task/{task.name}/status") for task in tasks)

    def close(self) -> float:
        """Closes stdin; returns the seconds until the process has ended."""
        assert self.process.stdin is not None
        since = time.monotonic()
        self.process.stdin.close()
        while select.select([self._out], [], [], 30)[0] and os.read(self._out, 1 << 20):
            pass
        self.process.wait(30)
        took = time.monotonic() - since
        assert self.process.stdout is not None
        self.process.stdout.close()
        return took

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.close()

    def _status(self, name: str, file: str = "status") -> int:
        for line in Path(f"/proc/{self.process.pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise RuntimeError(f"{file} has no {name}.")

    def _send(self, message: Mapping[str, Any]) -> None:
        os.write(self._in, json.dumps({"jsonrpc": "2.0"} | dict(message)).encode() + b"\n")

    def _answer(self, number: int) -> tuple[float, dict[str, Any]]:
        self.until(lambda: number in self._answers)
        at, message = self._answers.pop(number)
        if "error" in message:
            raise RuntimeError(f"The agent answered with an error: {message['error']}")
        return at, message["result"]

    def _read(self, timeout_s: float) -> None:
        if timeout_s <= 0 or not select.select([self._out], [], [], timeout_s)[0]:
            raise TimeoutError("The agent wrote nothing in time.")
        data = os.read(self._out, 1 << 20)
        now = time.monotonic()
        if not data:
            raise RuntimeError("The agent has ended.")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if UPDATE in line:
                self._update(now, line)
                continue
            try:
                message = json.loads(line)
            except ValueError:  # some agents print notices to stdout
                continue
            if "method" not in message:
                self._answers[message["id"]] = now, message
            elif "id" in message:
                self._send({"id": message["id"]} | answer(message))

    def _update(self, now: float, line: bytes) -> None:
        found = line.find(b'"sessionId":')
        session = (
            json.loads(line)["params"]["sessionId"] if found < 0 else line[found + 12 :].split(b'"', 2)[1].decode()
        )
        if session in self._turns:
            self._turns[session].lines.append((now, line))
