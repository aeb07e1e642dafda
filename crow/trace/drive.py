"""Drives an agent through everything that the rules look at."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from crow.trace.process import AgentIO
from crow.trace.record import Recorded
from crow.trace.rules.settings import choices, options_of
from crow.trace.run import Connection, EndpointLog, Run

Answer: TypeAlias = Literal["allow", "reject", "hold", "fail"]
"""What the client does with a permission request."""

MAX_SILENCES = 5
"""After this many requests without an answer, the check waits a third of the time for the next ones."""

EVERYTHING: dict[str, Any] = {
    "fs": {"readTextFile": True, "writeTextFile": True},
    "terminal": True,
    "elicitation": {"form": {}, "url": {}},
    "session": {"configOptions": {"boolean": {}}, "notices": {}, "compaction": {}},
    "_meta": {"acp-check": True},
}
CLIENT_INFO = {"name": "acp-check", "title": "ACP check", "version": "1"}
NOWHERE = "acp-check-no-such-session"
_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_AUDIO = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="
_WITHHELD = (
    ("session/load", "loadSession"),
    ("session/resume", "sessionCapabilities.resume"),
    ("session/list", "sessionCapabilities.list"),
    ("session/close", "sessionCapabilities.close"),
    ("session/delete", "sessionCapabilities.delete"),
    ("session/fork", "sessionCapabilities.fork"),
    ("logout", "auth.logout"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the check waits, in seconds: for an answer, for late messages, for the end of a process, for a turn to
    begin, before a slow client reads on, and in all."""

    answer_s: float = 30.0
    settle_s: float = 0.3
    exit_s: float = 10.0
    begin_s: float = 10.0
    slow_s: float = 1.5
    total_s: float = 600.0


class OutOfTime(Exception):
    """The check took longer than it may take in all."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A request that was sent. `response` is its answer."""

    line: int
    response: dict[str, Any] | None = None

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, if it is an object."""
        result = (self.response or {}).get("result")
        return result if isinstance(result, dict) else None


class Clock:
    """The numbers of the lines and the time that is left, shared by all connections of a check."""

    def __init__(self, limits: Limits, trace: Callable[[bytes], None]) -> None:
        self.limits = limits
        self.trace = trace
        self.numbers = itertools.count(1)
        self._silences = 0
        self._end = time.monotonic() + limits.total_s

    def answer_s(self) -> float:
        """How long to wait for an answer now. :raises OutOfTime: the time for the whole check is up."""
        if time.monotonic() > self._end:
            raise OutOfTime
        return self.limits.answer_s if self._silences < MAX_SILENCES else self.limits.answer_s / 3

    def count_silence(self) -> None:
        """Called for each request without an answer."""
        self._silences += 1


class Client:
    """The client's end of a connection. Records each line, and answers the agent's requests."""

    def __init__(self, name: str, io: AgentIO, clock: Clock, endpoint: EndpointLog, workspace: Path) -> None:
        self.connection = Connection(name=name)
        self.io = io
        self.answer: Answer = "allow"
        self.fails = False
        self.has_ended = False
        self.questions = 0
        self.offered: dict[str, Any] = {}
        self.initialized: dict[str, Any] = {}
        self.opened: dict[str, dict[str, Any]] = {}
        self.called: set[str] = set()
        self._joined: bytearray | None = None
        self._clock = clock
        self._endpoint = endpoint
        self._workspace = workspace
        self._ids = itertools.count(1)
        self._open: dict[str, Pending] = {}
        self._held: list[Any] = []
        self._terminals = itertools.count(1)
        self._updates: dict[str, int] = {}

    def send(self, message: Any, purpose: str = "") -> int:
        """Sends a message; returns the number of its line."""
        return self.send_bytes(json.dumps(message, ensure_ascii=False).encode(), purpose)

    def send_bytes(self, raw: bytes, purpose: str = "", cut: int = 0) -> int:
        """Sends a line, in two pieces if `cut` is set; returns its number."""
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
        """What is sent within is written at once at the end."""
        self._joined = bytearray()
        try:
            yield
        finally:
            joined, self._joined = bytes(self._joined), None
            self.io.write(joined)

    def request(self, method: str, params: Any, purpose: str = "", request_id: Any = None, cut: int = 0) -> Pending:
        """Sends a request without waiting for its response."""
        request_id = next(self._ids) + 100 if request_id is None else request_id
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        return self.request_bytes(json.dumps(message, ensure_ascii=False).encode(), request_id, purpose, cut)

    def request_bytes(self, raw: bytes, request_id: Any, purpose: str, cut: int = 0) -> Pending:
        """Sends the line of a request."""
        pending = Pending(line=0)
        self._open[json.dumps(request_id)] = pending
        pending.line = self.send_bytes(raw, purpose, cut)
        return pending

    def notify(self, method: str, params: Any, purpose: str = "") -> None:
        """Sends a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params}, purpose)

    def ask(self, method: str, params: Any, purpose: str = "", request_id: Any = None) -> dict[str, Any] | None:
        """Sends a request and waits. Returns the result if it is an object."""
        pending = self.request(method, params, purpose, request_id)
        self.wait(pending)
        return pending.result

    def wait(self, *pending: Pending) -> None:
        """Waits until these requests are answered, the agent has ended, or the time is up."""
        self.pump(lambda: all(each.response is not None for each in pending), self._clock.answer_s())
        for each in pending:
            if each.response is None and each.line not in self.connection.gave_up:
                self.connection.gave_up.add(each.line)
                self._clock.count_silence()

    def barrier(self) -> None:
        """Sends a request that the agent refuses, and waits: what was sent before has been read then."""
        self.ask("_acp_check/barrier", {})

    def settle(self) -> None:
        """Reads what arrives until there is a pause."""
        while self._take(self._clock.limits.settle_s):
            pass

    def pump(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Reads and answers until a condition holds. Returns whether it does."""
        end = time.monotonic() + timeout_s
        while not until():
            left = end - time.monotonic()
            if not self._take(min(left, 0.1)) and (self.has_ended or left <= 0.1):
                return until()
        return True

    def watch(self, session: str) -> Callable[[], bool]:
        """Whether a prompt has begun since: at the endpoint if the agent uses it, else by an update."""
        updates, hung = self._updates.get(session, 0), self._endpoint.hung
        if self._endpoint.requests:
            return lambda: self._endpoint.hung > hung
        return lambda: self._updates.get(session, 0) > updates

    def release_held(self) -> None:
        """Answers the permission requests that were held: the prompt was cancelled."""
        for request_id in self._held:
            self._respond(request_id, {"outcome": {"outcome": "cancelled"}})
        self._held.clear()

    def close(self) -> None:
        """Closes stdin, reads the rest and waits for the end of the process. Does nothing the second time."""
        if self.connection.exit is not None:
            return
        self.connection.exit = self.io.close(self._clock.limits.exit_s)
        while self._take(0.0):
            pass

    def _take(self, timeout_s: float) -> bool:
        """Reads and handles one line. Returns False if there was none."""
        line = self.io.read_line(max(0.0, timeout_s))
        if not line:
            self.has_ended = self.has_ended or line == b""
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
            self._fail(request_id, -32603, "The client of the check refuses everything now.")
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
            self._fail(request_id, -32603, "The client of the check cannot ask its user.")
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
        """The path, if it is in the workspace of the check."""
        if not isinstance(path, str) or "\0" in path:
            return None
        resolved = Path(path).resolve()
        return resolved if resolved.is_relative_to(self._workspace.resolve()) else None

    def _terminal(self, method: str) -> dict[str, Any]:
        """A terminal of the check runs nothing; each command prints one line."""
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


@dataclass(kw_only=True)
class Drive:
    """A check of one agent. `start` starts its process anew for each connection."""

    start: Callable[[str], AgentIO]
    workspace: Path
    endpoint: EndpointLog
    limits: Limits = field(default_factory=Limits)
    server: dict[str, Any] | None = None
    trace: Callable[[bytes], None] = lambda _: None
    report: Callable[[str], None] = lambda _: None

    def run(self) -> Run:
        """Drives the agent through all connections."""
        self._clock = Clock(self.limits, self.trace)
        self._clients: list[Client] = []
        is_complete = False
        try:
            self._connect()
            is_complete = True
        except OutOfTime:
            self.report(f"The check ends early: it took more than {self.limits.total_s:g} s.")
        finally:
            for client in self._clients:
                client.close()
        connections = [client.connection for client in self._clients]
        return Run(connections=connections, endpoint=self.endpoint, is_complete=is_complete)

    def _connect(self) -> None:
        session, resumed = self._main()
        self._versions()
        self._bare()
        self._broken()
        if session is not None:
            self._load(session)
        if resumed is not None:
            self._resume(resumed)

    def _open(self, name: str) -> Client:
        self.report(name)
        client = Client(name, self.start(name), self._clock, self.endpoint, self.workspace)
        self._clients.append(client)
        return client

    def _initialize(self, client: Client, purpose: str, offered: dict[str, Any], version: int = 1) -> bool:
        params = {"protocolVersion": version, "clientCapabilities": offered, "clientInfo": CLIENT_INFO}
        client.offered = offered
        client.initialized = client.ask("initialize", params, purpose) or {}
        return bool(client.initialized)

    def _new(self, client: Client, purpose: str, **more: Any) -> str | None:
        params = {"cwd": str(self.workspace), "mcpServers": []} | more
        result = client.ask("session/new", params, purpose)
        session = (result or {}).get("sessionId")
        if result is None or not isinstance(session, str):
            return None
        client.opened[session] = result
        return session

    def _prompt(
        self, client: Client, session: str, word: str, purpose: str, *more: dict[str, Any], **members: Any
    ) -> Pending:
        text = f"acp-check:{word} This is a check of the protocol. ({purpose})"
        blocks = [{"type": "text", "text": text}, *more]
        return client.request("session/prompt", {"sessionId": session, "prompt": blocks} | members, purpose)

    def _finish(
        self, client: Client, session: str, word: str, purpose: str, *more: dict[str, Any], **members: Any
    ) -> None:
        client.wait(self._prompt(client, session, word, purpose, *more, **members))

    def _main(self) -> tuple[str | None, str | None]:
        """The connection with everything offered. Returns the sessions to load and to resume."""
        client = self._open("main")
        if not self._initialize(client, "initialize", EVERYTHING):
            client.close()
            return None, None
        capabilities = client.initialized.get("agentCapabilities")
        capabilities = capabilities if isinstance(capabilities, dict) else {}
        servers = [self.server] if self.server is not None else []
        first = self._new(client, "new-with-server", mcpServers=servers)
        second = self._new(client, "new")
        third = self._new(client, "new-with-meta", _meta={"acp-check": {"any": ["content", 1, None]}})
        can_load, can_resume = _has(capabilities, "loadSession"), _has(capabilities, "sessionCapabilities.resume")
        if _has(capabilities, "sessionCapabilities.additionalDirectories"):
            self._new(client, "new-with-directories", additionalDirectories=[str(self.workspace.parent)])
        self._requests(client, first)
        self._unknown_sessions(client, capabilities)
        if first is not None:
            self._prompts(client, first, capabilities)
            self._cancels(client, first, second)
            self._lists(client, capabilities)
        if second is not None:
            self._settings(client, second)
            self._close(client, second, capabilities)
        if third is not None:
            self._deletes(client, third, capabilities)
            self._withheld(client, capabilities)
        if first is not None and _has(capabilities, "sessionCapabilities.fork"):
            client.ask("session/fork", {"sessionId": first, "cwd": str(self.workspace), "mcpServers": []}, "fork")
        client.close()
        return (first if can_load else None), (first if can_resume else None)

    def _requests(self, client: Client, session: str | None) -> None:
        """Ids, unknown methods and invalid params."""
        for purpose, request_id in (
            ("id-zero", 0),
            ("id-large", (1 << 53) - 1),
            ("id-string", "request-a"),
            ("id-number-string", "7"),
            ("id-unicode", "é漢字🐦\u2028"),
        ):
            client.ask("_acp_check/id", {}, purpose, request_id)
        client.ask("session/acp_check_unknown", {}, "unknown-method")
        client.ask("_acp_check/unknown", {}, "unknown-extension")
        for method in ("_acp_check/note", "session/acp_check_note"):
            client.notify(method, {}, "unknown-notification")
            client.barrier()
        client.send({"jsonrpc": "2.0", "id": 987654, "result": {}}, "unknown-response")
        client.barrier()
        client.ask("session/new", {"mcpServers": []}, "missing-params")
        client.ask("session/new", {"cwd": ["no", "text"], "mcpServers": []}, "wrong-params")
        if session is not None:
            client.ask("session/prompt", {"sessionId": session}, "missing-params")
            client.ask("session/prompt", {"sessionId": session, "prompt": "no array"}, "wrong-params")
        if client.initialized.get("authMethods"):
            client.ask("authenticate", {"methodId": "acp-check-no-such-method"}, "auth-unknown")

    def _unknown_sessions(self, client: Client, capabilities: dict[str, Any]) -> None:
        client.wait(self._prompt(client, NOWHERE, "say", "unknown-session"))
        opening = {"sessionId": NOWHERE, "cwd": str(self.workspace), "mcpServers": []}
        if _has(capabilities, "loadSession"):
            client.ask("session/load", opening, "load-unknown")
        if _has(capabilities, "sessionCapabilities.resume"):
            client.ask("session/resume", opening, "resume-unknown")
        client.notify("session/cancel", {"sessionId": NOWHERE}, "cancel-unknown")
        client.barrier()

    def _prompts(self, client: Client, session: str, capabilities: dict[str, Any]) -> None:
        self._finish(client, session, "say", "prompt-say")
        client.settle()
        link = {"type": "resource_link", "uri": (self.workspace / "acp-check.txt").as_uri(), "name": "acp-check.txt"}
        self._finish(client, session, "say", "prompt-link", link)
        self._finish(client, session, "say", "prompt-with-meta", _meta={"acp-check": {"any": ["content", 1, None]}})
        self._finish(client, session, "tool", "prompt-tool")
        self._finish(client, session, "say", "prompt-again")
        if client.questions:
            client.answer = "reject"
            self._finish(client, session, "tool", "prompt-reject")
            client.answer = "fail"
            self._finish(client, session, "tool", "prompt-question-fails")
        client.answer, client.fails = "allow", True
        if client.called & {"fs/read_text_file", "fs/write_text_file"}:
            self._finish(client, session, "tool", "prompt-client-fails")
        client.fails = False
        self._finish(client, session, "plan", "prompt-plan")
        resource = {"uri": "file:///acp-check/notes.txt", "mimeType": "text/plain", "text": "notes"}
        for kind, capability, block in (
            ("image", "image", {"type": "image", "mimeType": "image/png", "data": _IMAGE}),
            ("audio", "audio", {"type": "audio", "mimeType": "audio/wav", "data": _AUDIO}),
            ("resource", "embeddedContext", {"type": "resource", "resource": resource}),
        ):
            if _has(capabilities, f"promptCapabilities.{capability}"):
                self._finish(client, session, "say", f"prompt-{kind}", block)
        if self.endpoint.requests:
            client.io.pause()
            flood = self._prompt(client, session, "flood", "prompt-slow")
            end = time.monotonic() + self.limits.slow_s
            client.pump(lambda: time.monotonic() >= end, self.limits.slow_s)
            client.io.resume()
            client.wait(flood)

    def _begin(self, client: Client, session: str, word: str, purpose: str) -> Pending:
        """Sends a prompt and waits until it has begun."""
        begun = client.watch(session)
        sent = self._prompt(client, session, word, purpose)
        client.pump(lambda: sent.response is not None or begun(), self.limits.begin_s)
        return sent

    def _cancels(self, client: Client, session: str, other: str | None) -> None:
        hanging = self._begin(client, session, "hang", "prompt-cancel")
        if hanging.response is None:
            client.ask("_acp_check/while_prompt", {}, "while-prompt")
        waiting = [] if other is None else [self._prompt(client, other, "say", "prompt-other")]
        for _ in range(2):
            client.notify("session/cancel", {"sessionId": session})
        client.wait(hanging, *waiting)
        client.settle()
        self._finish(client, session, "say", "prompt-after-cancel")
        client.notify("session/cancel", {"sessionId": session}, "cancel-idle")
        client.barrier()
        self._finish(client, session, "say", "prompt-after-idle-cancel")
        if client.questions:
            client.answer = "hold"
            asked = client.questions
            held = self._prompt(client, session, "tool", "prompt-cancel-permission")
            client.pump(lambda: held.response is not None or client.questions > asked, self._clock.answer_s())
            client.settle()  # an agent that does not wait for the answer shows it now
            client.notify("session/cancel", {"sessionId": session})
            client.release_held()
            client.answer = "allow"
            client.wait(held)
            client.settle()
        hanging = self._begin(client, session, "hang", "prompt-cancel-request")
        request_id = next(each.message["id"] for each in client.connection.lines if each.line == hanging.line)
        client.notify("$/cancel_request", {"requestId": request_id})
        client.pump(lambda: hanging.response is not None, min(2.0, self._clock.answer_s()))
        if hanging.response is None:  # agents may ignore it; this prompt must end all the same
            client.notify("session/cancel", {"sessionId": session})
        client.wait(hanging)
        client.settle()

    def _lists(self, client: Client, capabilities: dict[str, Any]) -> None:
        if _has(capabilities, "sessionCapabilities.list"):
            client.ask("session/list", {}, "list")
            client.ask("session/list", {"cwd": str(self.workspace)}, "list-cwd")
            client.ask("session/list", {"cwd": str(self.workspace / "nothing" / "here")}, "list-empty")
            client.ask("session/list", {"cursor": "acp-check-no-such-cursor"}, "list-bad-cursor")

    def _settings(self, client: Client, session: str) -> None:
        """Sets each mode and each option, and then what they were before."""
        opened = client.opened[session]
        modes = opened.get("modes")
        if isinstance(modes, dict):
            ids = [mode.get("id") for mode in options_of(modes.get("availableModes"))]
            for mode in [*ids, modes.get("currentModeId")]:
                client.ask("session/set_mode", {"sessionId": session, "modeId": mode}, "set-mode")
                client.barrier()
            client.ask("session/set_mode", {"sessionId": session, "modeId": "acp-check-none"}, "set-unknown-mode")
        selects = [option for option in options_of(opened.get("configOptions")) if len(choices(option)) > 1]
        for option in selects[:8]:
            before = option.get("currentValue")
            for value in (next((each for each in choices(option) if each != before), before), before):
                client.ask(
                    "session/set_config_option",
                    {"sessionId": session, "configId": option.get("id"), "value": value},
                    "set-option",
                )
        if selects:
            for purpose, name, value in (
                ("set-unknown-option", "acp-check-none", "on"),
                ("set-unknown-value", selects[0].get("id"), "acp-check-none"),
            ):
                params = {"sessionId": session, "configId": name, "value": value}
                client.ask("session/set_config_option", params, purpose)
        client.settle()

    def _close(self, client: Client, session: str, capabilities: dict[str, Any]) -> None:
        if _has(capabilities, "sessionCapabilities.close"):
            hanging = self._begin(client, session, "hang", "prompt-close")
            closing = client.request("session/close", {"sessionId": session}, "close")
            client.wait(hanging, closing)

    def _deletes(self, client: Client, session: str, capabilities: dict[str, Any]) -> None:
        if _has(capabilities, "sessionCapabilities.delete"):
            self._finish(client, session, "say", "prompt-before-delete")
            client.ask("session/delete", {"sessionId": session}, "delete")
            if _has(capabilities, "sessionCapabilities.list"):
                client.ask("session/list", {"cwd": str(self.workspace)}, "list-after-delete")
            client.ask("session/delete", {"sessionId": session}, "delete-again")
            client.ask("session/delete", {"sessionId": NOWHERE}, "delete-unknown")

    def _withheld(self, client: Client, capabilities: dict[str, Any]) -> None:
        missing = [method for method, capability in _WITHHELD if not _has(capabilities, capability)]
        session = self._new(client, "") if missing else None
        for method in missing if session is not None else ():
            opening: dict[str, Any] = {"sessionId": session, "cwd": str(self.workspace), "mcpServers": []}
            client.ask(method, {} if method in ("session/list", "logout") else opening, "unadvertised")

    def _versions(self) -> None:
        """Versions that no agent speaks."""
        for name, version, purpose, offered in (
            ("newer", 65535, "initialize-newer", {"acpCheckFuture": {"any": True}}),
            ("older", 0, "initialize-zero", {}),
        ):
            client = self._open(name)
            self._initialize(client, purpose, offered, version)
            client.close()

    def _bare(self) -> None:
        """A connection with nothing offered, that ends during a prompt."""
        client = self._open("bare")
        client.ask("initialize", {"protocolVersion": 1}, "initialize-minimal")
        session = self._new(client, "new")
        if session is not None:
            self._finish(client, session, "say", "prompt-say")
            self._finish(client, session, "tool", "prompt-tool")
            self._begin(client, session, "hang", "prompt-left")
        client.close()

    def _broken(self) -> None:
        """Unusual and broken lines. An agent that ends at one is started again for the next."""
        client: Client | None = None
        for number, line in enumerate(self._lines(), 1):
            if client is None or client.has_ended:
                if client is not None:
                    client.close()
                client = self._open("broken" if number == 1 else f"broken-{number}")
                self._initialize(client, "", {})
            line(client)
            client.barrier()
        if client is not None:
            client.close()

    def _lines(self) -> Iterator[Callable[[Client], object]]:
        unknown = "_acp_check/line"
        spaced = b'  { "params" : { } ,\t"method":"_acp\\u005fcheck/line" , "id" : 31 ,"jsonrpc" : "2.0" }  '
        yield lambda client: client.wait(client.request(unknown, {}, "in-pieces", cut=20))
        yield self._at_once
        yield lambda client: client.wait(client.request_bytes(spaced, 31, "spaced"))
        yield lambda client: client.ask(unknown, {"text": "x" * (1 << 20)}, "long-line")
        yield lambda client: client.send_bytes(b"", "blank-line")
        yield lambda client: client.send_bytes(b'{"jsonrpc": "2.0", "id": 32, "method": ', "broken-json")
        yield lambda client: client.send({"jsonrpc": "2.0", "id": 33, "method": 5}, "bad-method")
        yield lambda client: client.send("a text", "not-an-object")
        calls: list[dict[str, Any]] = [
            {"jsonrpc": "2.0", "id": number, "method": unknown, "params": {}} for number in (34, 35)
        ]
        yield lambda client: client.send(calls, "batch")
        yield lambda client: client.send_bytes(b'{"jsonrpc": "2.0", "method": "_\xff\xfe"}', "bad-bytes")

    def _at_once(self, client: Client) -> None:
        with client.single_write():
            pending = [client.request("_acp_check/line", {}, "at-once") for _ in range(3)]
        client.wait(*pending)

    def _load(self, session: str) -> None:
        client = self._open("load")
        if self._initialize(client, "", EVERYTHING):
            params = {"sessionId": session, "cwd": str(self.workspace), "mcpServers": []}
            if client.ask("session/load", params, "load") is not None:
                client.settle()
                self._finish(client, session, "say", "prompt-after-load")
        client.close()

    def _resume(self, session: str) -> None:
        client = self._open("resume")
        if self._initialize(client, "", EVERYTHING):
            params = {"sessionId": session, "cwd": str(self.workspace), "mcpServers": []}
            if client.ask("session/resume", params, "resume") is not None:
                client.settle()
                self._finish(client, session, "say", "prompt-after-resume")
        client.close()


def _has(capabilities: dict[str, Any], path: str) -> bool:
    value: Any = capabilities
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value is not None and value is not False
