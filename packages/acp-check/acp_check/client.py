"""The client's end of a connection to an agent."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from acp_check.process import AgentIO
from acp_check.recording import Recorded
from acp_check.rules.settings import options_of
from acp_check.run import Connection, EndpointLog

Answer: TypeAlias = Literal["allow", "reject", "hold", "fail"]
"""The client's answer to a permission request: an option that allows the call (`allow`) or rejects it (`reject`), no
answer until the prompt is cancelled (`hold`), or an error (`fail`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits of the check, in seconds."""

    answer_s: float = 30.0
    """The wait for an answer, for a turn to begin, and for a process to exit."""
    settle_s: float = 0.3
    """The wait for late messages."""
    optional_s: float = 2.0
    """The wait for an answer that an agent need not give."""
    slow_s: float = 1.5
    """The pause in which a slow client does not read."""
    total_s: float = 600.0
    """The whole check."""

    @classmethod
    def of(cls, answer_s: float) -> TimeLimits:
        """Return limits that are all in proportion to the wait for an answer."""
        return cls(
            answer_s=answer_s,
            settle_s=max(0.3, answer_s / 100),
            optional_s=answer_s / 15,
            slow_s=answer_s / 20,
            total_s=max(600.0, 20 * answer_s),
        )


class OutOfTime(Exception):
    """The whole check exceeded its time limit."""


class CheckStopped(Exception):
    """The error when the user stops the check with a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        """The number of the signal."""


@dataclass(slots=True, kw_only=True)
class SentRequest:
    """A request that the client has sent."""

    line: int
    """The number of the request's line."""
    response: dict[str, Any] | None = None
    """None until the response arrives."""

    @property
    def result(self) -> dict[str, Any] | None:
        """The result if it is an object, otherwise None."""
        result = (self.response or {}).get("result")
        return result if isinstance(result, dict) else None


class Clock:
    """Counts the lines and the remaining time of a check. All connections of the check share one clock."""

    def __init__(self, limits: TimeLimits, trace: Callable[[bytes], None] | None, signalled: Callable[[], int]) -> None:
        self.limits = limits
        self.trace = trace
        self._signalled = signalled
        self.numbers = itertools.count(1)
        self.is_deaf = False
        """Whether the agent has left a request with an unknown method unanswered."""
        self._end = time.monotonic() + limits.total_s

    def answer_s(self) -> float:
        """Return how many seconds to wait for the next answer. :raises OutOfTime: the time for the whole check is
        up."""
        if time.monotonic() > self._end:
            raise OutOfTime
        return self.limits.answer_s

    def check_signal(self) -> None:
        """Ask whether a signal has arrived. :raises CheckStopped: a signal has arrived."""
        if number := self._signalled():
            raise CheckStopped(number)


class CheckClient:
    """The client's end of a connection. Records the lines of both sides, and answers the agent's requests."""

    def __init__(self, name: str, io: AgentIO, clock: Clock, endpoint: EndpointLog, workspace: Path) -> None:
        self.connection = Connection(name=name)
        self.io = io
        self.answer: Answer = "allow"
        """How permission requests are answered."""
        self.fails = False
        """If this is true, all requests but those for permission are answered with errors."""
        self.has_ended = False
        self.questions = 0
        """The number of permission requests so far."""
        self._is_closed = False
        self.offered: dict[str, Any] = {}
        """The capabilities that the client offers."""
        self.initialized: dict[str, Any] = {}
        """The result of `initialize`, or {} if there is none."""
        self.opened: dict[str, dict[str, Any]] = {}
        """Maps the ids of sessions to the results of the requests that opened them."""
        self.called: set[str] = set()
        """The methods that the agent has called."""
        self._joined: bytearray | None = None
        """The lines to write in one piece. None if each line is written at once."""
        self._clock = clock
        self._endpoint = endpoint
        self._workspace = workspace
        self._ids = itertools.count(1)
        self._open: dict[str, SentRequest] = {}
        self._held: list[Any] = []
        """The ids of the permission requests that wait for an answer."""
        self._terminals = itertools.count(1)
        self._updates: dict[str, int] = {}

    def send(self, message: Any, purpose: str = "") -> int:
        """Send a message and return the number of its line."""
        return self.send_bytes(json.dumps(message, ensure_ascii=False).encode(), purpose)

    def send_bytes(self, raw: bytes, purpose: str = "", cut: int = 0) -> int:
        """Send a line and return the number of this line. If `cut` is set, the line is written in two pieces."""
        number = self._record("client", raw, purpose)
        data = raw + b"\n"
        if self._joined is not None:
            self._joined += data
            return number
        for piece in (data[:cut], data[cut:]) if cut else (data,):
            self.io.write(piece)
        return number

    @contextmanager
    def single_write(self) -> Iterator[None]:
        """Collect everything sent inside the block, and write it to stdin in one piece when the block ends."""
        self._joined = bytearray()
        try:
            yield
        finally:
            joined, self._joined = bytes(self._joined), None
            self.io.write(joined)

    def request(self, method: str, params: Any, purpose: str = "", request_id: Any = None, cut: int = 0) -> SentRequest:
        """Send a request without waiting for its response."""
        request_id = next(self._ids) + 100 if request_id is None else request_id
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        return self.request_bytes(json.dumps(message, ensure_ascii=False).encode(), request_id, purpose, cut)

    def request_bytes(self, raw: bytes, request_id: Any, purpose: str, cut: int = 0) -> SentRequest:
        """Send `raw`, a request with the id `request_id`, without waiting for its response."""
        pending = SentRequest(line=0)
        self._open[json.dumps(request_id)] = pending
        pending.line = self.send_bytes(raw, purpose, cut)
        return pending

    def notify(self, method: str, params: Any, purpose: str = "") -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params}, purpose)

    def ask(self, method: str, params: Any, purpose: str = "", request_id: Any = None) -> dict[str, Any] | None:
        """Send a request and wait for its response. Return the result if that is an object, otherwise None."""
        pending = self.request(method, params, purpose, request_id)
        self.wait(pending)
        return pending.result

    def wait(self, *pending: SentRequest) -> None:
        """Wait until all these requests are answered, the agent has ended, or the time is up."""
        self.pump(lambda: all(each.response is not None for each in pending), self._clock.answer_s())
        for each in pending:
            if each.response is None and each.line not in self.connection.gave_up:
                self.connection.gave_up.add(each.line)

    def barrier(self) -> None:
        """Send a request with an unknown method and wait for the error. When the error arrives, the agent has read all
        earlier lines. After one that was not answered, only wait until the agent is quiet: it answers none of them."""
        if self._clock.is_deaf:
            self.settle()
            return
        pending = self.request("_acp_check/barrier", {})
        self.wait(pending)
        self._clock.is_deaf = pending.response is None and not self.has_ended

    def settle(self) -> None:
        """Handle messages until none arrives for `settle_s` seconds."""
        while self._take(self._clock.limits.settle_s):
            pass

    def pump(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Handle messages until `until()` is true, the agent has ended, or the time is up. Return the last value of
        `until()`."""
        end = time.monotonic() + timeout_s
        while not until():
            self._clock.check_signal()
            left = end - time.monotonic()
            if not self._take(min(left, 0.1)) and (self.has_ended or left <= 0.1):
                return until()
        return True

    def watch(self, session: str) -> Callable[[], bool]:
        """Return a function that says whether a prompt has begun since `watch` was called.

        If the agent uses the check's endpoint, a prompt has begun when a request arrives there. Otherwise, a prompt has
        begun when the session gets an update.
        """
        updates, hung = self._updates.get(session, 0), self._endpoint.hung
        if self._endpoint.requests:
            return lambda: self._endpoint.hung > hung
        return lambda: self._updates.get(session, 0) > updates

    def release_held(self) -> None:
        """Answer all permission requests that were held back. The answer is `cancelled`, because their prompt was
        cancelled."""
        for request_id in self._held:
            self._respond(request_id, {"outcome": {"outcome": "cancelled"}})
        self._held.clear()

    def close(self, *, at_once: bool = False) -> None:
        """Close the agent's stdin, wait for the process to exit, and read the rest of its output. Later calls do
        nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        ended = self.io.close(0.0 if at_once else self._clock.limits.answer_s)
        self.connection.exit = None if at_once else ended
        while self._take(0.0):
            pass

    def _take(self, timeout_s: float) -> bool:
        """Read and handle one line. Return False if no line came in time."""
        line = self.io.read_line(max(0.0, timeout_s))
        if not line:
            if line == b"" and not self.has_ended:
                self.has_ended = True
                if not self._is_closed:
                    self.connection.died_after = self.connection.lines[-1].line if self.connection.lines else 0
            return False
        if line.endswith(b"\n"):
            self._record("agent", line[:-1])
        else:
            self.connection.unfinished_line = line
            self._record("agent", line)
        message = self.connection.lines[-1].message
        if isinstance(message, dict):
            self._handle(message)
        return True

    def _record(self, sender: Literal["agent", "client"], raw: bytes, purpose: str = "") -> int:
        number, at = next(self._clock.numbers), round(time.time(), 6)
        text, message = None, None
        try:
            message = json.loads(raw.decode(), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            text = raw.decode(errors="replace")
        line = Recorded(line=number, at=at, sender=sender, message=message, text=text, raw=raw, purpose=purpose)
        self.connection.lines.append(line)
        if self._clock.trace is not None:
            kept = {"line": text} if text is not None else {"message": message}
            head = {"at": at, "from": sender, "connection": self.connection.name}
            self._clock.trace(json.dumps(head | kept, ensure_ascii=False).encode(errors="replace") + b"\n")
        return number

    def _handle(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params")
        params = params if isinstance(params, dict) else {}
        if isinstance(method, str) and "id" in message:
            self.called.add(method)
            self._serve(message["id"], method, params)
        elif method == "session/update":
            session = str(params.get("sessionId"))
            kind = params["update"].get("sessionUpdate") if isinstance(params.get("update"), dict) else ""
            if str(kind).endswith("_chunk") or str(kind).startswith("tool_call"):
                self._updates[session] = self._updates.get(session, 0) + 1
        elif method is None and message.get("id") is not None:
            pending = self._open.pop(json.dumps(message["id"]), None)
            if pending is not None:
                pending.response = message

    def _serve(self, request_id: Any, method: str, params: dict[str, Any]) -> None:
        offered = self.offered
        fs = offered.get("fs") or {}
        if method == "session/request_permission":
            self.questions += 1
            self._decide(request_id, params)
        elif self.fails:
            self._fail(request_id, -32603, "The test client refuses every request at this point of the check.")
        elif method == "fs/read_text_file" and fs.get("readTextFile"):
            self._read(request_id, params)
        elif method == "fs/write_text_file" and fs.get("writeTextFile"):
            self._write(request_id, params)
        elif method.startswith("terminal/") and offered.get("terminal"):
            self._respond(request_id, self._terminal(method))
        elif method == "elicitation/create" and offered.get("elicitation"):
            self._respond(request_id, {"action": "cancel"})
        else:
            self._fail(request_id, -32601, f"This client does not have {method}.")

    def _decide(self, request_id: Any, params: dict[str, Any]) -> None:
        options = options_of(params.get("options"))
        if self.answer == "hold":
            self._held.append(request_id)
        elif self.answer == "fail":
            self._fail(request_id, -32603, "The test client has no user to ask.")
        else:
            wanted = [option for option in options if str(option.get("kind")).startswith(self.answer)]
            chosen = next((option for option in wanted if str(option.get("kind")).endswith("once")), None)
            chosen = chosen or next(iter(wanted), None)
            outcome = (
                {"outcome": "selected", "optionId": chosen.get("optionId")} if chosen else {"outcome": "cancelled"}
            )
            self._respond(request_id, {"outcome": outcome})

    def _read(self, request_id: Any, params: dict[str, Any]) -> None:
        path = self._inside(params.get("path"))
        try:
            if path is None:
                raise FileNotFoundError
            lines = path.read_text("utf-8").splitlines(keepends=True)
        except (OSError, ValueError):
            self._fail(request_id, -32002, f"{params.get('path')}: no such file")
            return
        start, limit = params.get("line"), params.get("limit")
        start = start - 1 if isinstance(start, int) and start > 0 else 0
        end = start + limit if isinstance(limit, int) else None
        self._respond(request_id, {"content": "".join(lines[start:end])})

    def _write(self, request_id: Any, params: dict[str, Any]) -> None:
        path, content = self._inside(params.get("path")), params.get("content")
        try:
            if path is None or not isinstance(content, str):
                raise PermissionError
            path.write_text(content, "utf-8")
        except OSError:
            self._fail(request_id, -32603, f"{params.get('path')}: cannot be written")
            return
        self._respond(request_id, {})

    def _inside(self, path: Any) -> Path | None:
        """Return the resolved path if it is inside the workspace of the check, otherwise None."""
        if not isinstance(path, str) or "\0" in path:
            return None
        resolved = Path(path).resolve()
        return resolved if resolved.is_relative_to(self._workspace.resolve()) else None

    def _terminal(self, method: str) -> dict[str, Any]:
        """Return the result of a terminal request. The client does not run commands, but answers as if each command had
        printed one line."""
        status = {"exitCode": 0, "signal": None}
        match method:
            case "terminal/create":
                return {"terminalId": f"terminal-{next(self._terminals)}"}
            case "terminal/output":
                return {"output": "acp-check\n", "truncated": False, "exitStatus": status}
            case "terminal/wait_for_exit":
                return status
        return {}

    def _respond(self, request_id: Any, result: dict[str, Any]) -> None:
        self.send({"jsonrpc": "2.0", "id": request_id, "result": result})

    def _fail(self, request_id: Any, code: int, words: str) -> None:
        self.send({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": words}})


def _no_constant(name: str) -> None:
    raise ValueError(name)
