"""Sorts the messages of a check or a recording into requests, updates and turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from acp_check.recording import Recorded

FINAL = ("completed", "failed")
OPENING = ("session/new", "session/load", "session/resume", "session/fork")
_TURN_KINDS = ("agent_message_chunk", "agent_thought_chunk", "user_message_chunk", "tool_call", "tool_call_update")
CHUNKS = _TURN_KINDS[:3]
_NO_CODE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of an agent's process after its stdin was closed."""

    code: int | None
    """The exit code, or None if the process had to be killed."""
    leftovers: bool = False
    """Whether other processes of the agent's group were still running after the agent had exited."""


@dataclass(slots=True, kw_only=True)
class EndpointLog:
    """The counters of the check's endpoint."""

    requests: int = 0
    """All requests."""
    hung: int = 0
    """The answers that never end."""
    left: int = 0
    """Those endless answers whose connection the agent closed."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A request and its response."""

    method: str
    request: Recorded
    response: Recorded | None = None
    gave_up: bool = False
    """Whether the check stopped waiting for the response."""

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, or {} if they are not an object."""
        return _object(self.request.message.get("params"))

    @property
    def session(self) -> str:
        """The session that the request names, or "null" if it names none."""
        return _as_text(self.params.get("sessionId"))

    @property
    def opened(self) -> str:
        """The session that the response names. If it names none, the session that the request names."""
        return _as_text((self.result or {}).get("sessionId", self.params.get("sessionId")))

    @property
    def is_answered(self) -> bool:
        """Whether a response arrived."""
        return self.response is not None

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, or None after an error or without a response."""
        if self.response is None or "result" not in self.response.message:
            return None
        return _object(self.response.message["result"])

    @property
    def error(self) -> dict[str, Any] | None:
        """The error, or None after a result or without a response."""
        if self.response is None or "error" not in self.response.message:
            return None
        return _object(self.response.message["error"])

    @property
    def code(self) -> int:
        """The code of the error, or `_NO_CODE` if there is no error."""
        code = (self.error or {}).get("code")
        return code if isinstance(code, int) else _NO_CODE

    @property
    def is_of_later_version(self) -> bool:
        """Whether this is an `initialize` whose result has the form of a later version of the protocol."""
        version = (self.result or {}).get("protocolVersion")
        return self.method == "initialize" and isinstance(version, int) and version > 1

    @property
    def lines(self) -> tuple[Recorded, ...]:
        """The request and the response."""
        return (self.request,) if self.response is None else (self.request, self.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One `session/update`."""

    line: Recorded
    session: str
    """The id of the session."""
    body: dict[str, Any]
    """The member `update`."""

    @property
    def kind(self) -> str:
        """The value of `sessionUpdate`."""
        return str(self.body.get("sessionUpdate"))

    @property
    def child(self) -> str:
        """The session that a `subagent_update` is about."""
        return _as_text(self.body.get("sessionId"))

    @property
    def text(self) -> str:
        """The text of a chunk."""
        text = _object(self.body.get("content")).get("text")
        return text if isinstance(text, str) else ""

    @property
    def lines(self) -> tuple[Recorded, ...]:
        """The line of the update."""
        return (self.line,)


@dataclass(slots=True, kw_only=True)
class RecordedTurn:
    """A prompt or a load, with the updates of its session."""

    exchange: Exchange
    updates: list[Update] = field(default_factory=list)
    """The updates up to the response."""
    late: list[Update] = field(default_factory=list)
    """The updates of this turn that came after its response. What a later request caused is not among them."""
    cancels: list[Recorded] = field(default_factory=list)
    """The client's `session/cancel` notifications."""
    permissions: list[Exchange] = field(default_factory=list)
    """The agent's permission requests."""

    @property
    def purpose(self) -> str:
        """The purpose for which the check sent the prompt."""
        return self.exchange.request.purpose

    @property
    def stop_reason(self) -> Any:
        """The stop reason of the response."""
        return (self.exchange.result or {}).get("stopReason")

    @property
    def lines(self) -> tuple[Recorded, ...]:
        """The request and the response."""
        return self.exchange.lines

    def text(self, kind: str = "agent_message_chunk") -> str:
        """Return the text of all chunks of this kind, joined."""
        return "".join(update.text for update in self.updates if update.kind == kind)

    def statuses(self) -> dict[str, list[str]]:
        """Map the id of each tool call to its statuses, in order."""
        found: dict[str, list[str]] = {}
        for update in self.updates:
            if update.kind in ("tool_call", "tool_call_update"):
                seen = found.setdefault(str(update.body.get("toolCallId")), [])
                status = update.body.get("status") or ("pending" if update.kind == "tool_call" else None)
                if isinstance(status, str):
                    seen.append(status)
        return found


@dataclass(kw_only=True)
class Connection:
    """One connection, from start to end."""

    name: str = ""
    """What a check used the connection for. It is empty in a recording."""
    lines: list[Recorded] = field(default_factory=list)
    gave_up: set[int] = field(default_factory=set)
    """The numbers of the lines of requests for whose response the check stopped waiting."""
    exit: Exit | None = None
    died_after: int | None = None
    """The number of the last line before the agent ended by itself, or None if it ended only with its stdin."""
    unfinished_line: bytes = b""
    """The last line of stdout, if it had no newline."""

    @property
    def is_live(self) -> bool:
        """Whether this connection is from a live check, not from a recording."""
        return bool(self.name)

    @property
    def agent_lines(self) -> Iterator[Recorded]:
        """The lines that the agent wrote."""
        return (line for line in self.lines if line.sender == "agent")

    @property
    def agent_messages(self) -> Iterator[Recorded]:
        """The agent's lines that are JSON objects."""
        return (line for line in self.agent_lines if isinstance(line.message, dict))

    @cached_property
    def _sorted(self) -> _Sorted:
        return _Sorted(self)

    @property
    def asked(self) -> list[Exchange]:
        """The client's requests."""
        return self._sorted.asked

    @property
    def called(self) -> list[Exchange]:
        """The agent's requests."""
        return self._sorted.called

    @property
    def notified(self) -> list[Recorded]:
        """The agent's notifications."""
        return self._sorted.notified

    @property
    def updates(self) -> list[Update]:
        """The updates, in order."""
        return self._sorted.updates

    @property
    def turns(self) -> list[RecordedTurn]:
        """The prompts and loads, in order."""
        return self._sorted.turns

    @property
    def strays(self) -> list[tuple[Recorded, str]]:
        """The agent's responses that belong to no open request. Each comes with its problem: `twice` (the request was
        already answered), `unknown` (no such request) or `type` (an open request has this id as another JSON type)."""
        return self._sorted.strays

    @property
    def reused_ids(self) -> list[Recorded]:
        """The agent's requests with an id that another open request of the agent already had."""
        return self._sorted.reused

    def asked_for(self, *methods: str) -> Iterator[Exchange]:
        """Return the client's requests with one of these methods."""
        return (each for each in self.asked if each.method in methods)

    @property
    def initialize(self) -> Exchange | None:
        """The first `initialize` request."""
        return next(self.asked_for("initialize"), None)

    @property
    def offered(self) -> dict[str, Any]:
        """The client's capabilities."""
        return _object(self.initialize.params.get("clientCapabilities")) if self.initialize else {}

    @property
    def agent_capabilities(self) -> dict[str, Any]:
        """The agent's capabilities."""
        return _object((self.initialize.result or {}).get("agentCapabilities")) if self.initialize else {}

    @property
    def auth_methods(self) -> list[dict[str, Any]]:
        """The authentication methods that the agent offers."""
        initialize = self.initialize
        if initialize is None or initialize.is_of_later_version:
            return []
        methods = (initialize.result or {}).get("authMethods")
        return [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []

    def reactions(self, purpose: str) -> list[tuple[Recorded, list[Recorded], Exchange]]:
        """For each line that the client sent for this purpose, return the line, the lines that the agent wrote before
        it answered the client's next request, and that next request."""
        found = []
        for place, line in enumerate(self.lines):
            if line.sender == "client" and line.purpose == purpose:
                barrier = next((each for each in self.asked if each.request.line > line.line), None)
                if barrier is not None:
                    wrote = []
                    for later in self.lines[place + 1 :]:
                        if later is barrier.response:
                            break
                        if later.sender == "agent":
                            wrote.append(later)
                    found.append((line, wrote, barrier))
        return found


@dataclass(kw_only=True)
class Run:
    """All connections of a check, or of a recording. For a recording, the other members keep their defaults."""

    connections: list[Connection]
    endpoint: EndpointLog | None = None
    servers_started: list[dict[str, Any]] | None = None
    """An item for each start of the check's MCP server: the arguments and the environment variable."""
    stderr: str = ""
    """The last part of the agent's stderr."""
    is_complete: bool = True
    """False if the check ran out of time."""

    @property
    def is_live(self) -> bool:
        """Whether this is the run of a live check, not of a recording."""
        return any(connection.is_live for connection in self.connections)

    def named(self, name: str) -> Connection | None:
        """Return the connection with this name, or None."""
        return next((each for each in self.connections if each.name == name), None)

    def exchanges(self, *purposes: str) -> list[Exchange]:
        """Return the client's requests that the check sent for one of these purposes."""
        return [
            each for connection in self.connections for each in connection.asked if each.request.purpose in purposes
        ]

    def asked_for(self, *methods: str) -> list[Exchange]:
        """Return the client's requests with one of these methods."""
        return [each for connection in self.connections for each in connection.asked_for(*methods)]

    def called(self, *methods: str) -> list[Exchange]:
        """Return the agent's requests with one of these methods."""
        return [each for connection in self.connections for each in connection.called if each.method in methods]

    def updates(self, *kinds: str) -> list[Update]:
        """Return the updates of these kinds."""
        return [each for connection in self.connections for each in connection.updates if each.kind in kinds]

    def turns(self, *purposes: str) -> list[RecordedTurn]:
        """Return the prompts with one of these purposes, or all prompts if no purpose is given. Loads are left out."""
        return [
            turn
            for connection in self.connections
            for turn in connection.turns
            if turn.exchange.method == "session/prompt" and (not purposes or turn.purpose in purposes)
        ]

    def loads(self) -> list[RecordedTurn]:
        """Return the loads that were answered with a result."""
        return [
            turn
            for connection in self.connections
            for turn in connection.turns
            if turn.exchange.method == "session/load" and turn.exchange.result is not None
        ]


class _Sorted:
    """Sorts the lines of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.asked: list[Exchange] = []
        """The client's requests."""
        self.called: list[Exchange] = []
        """The agent's requests."""
        self.notified: list[Recorded] = []
        """The agent's notifications."""
        self.updates: list[Update] = []
        self.turns: list[RecordedTurn] = []
        self.strays: list[tuple[Recorded, str]] = []
        """The agent's responses that belong to no open request. See `Connection.strays`."""
        self.reused: list[Recorded] = []
        """The agent's requests with an id that another open request of the agent already had."""
        self._open: dict[tuple[str, str], Exchange] = {}
        """Requests that are not answered yet, by sender and id."""
        self._closed: set[tuple[str, str]] = set()
        self._turns_of: dict[str, list[RecordedTurn]] = {}
        self._children: set[str] = set()
        self._asked_since: set[str] = set()
        """The sessions about which the client has asked for something else since their last turn began."""
        self._unusual: set[str] = set()
        """The ids in broken requests and batches."""
        for line in connection.lines:
            if isinstance(line.message, dict):
                self._sort(line, line.message)
            elif isinstance(line.message, list) and line.sender == "client":
                self._unusual |= {_key(each["id"]) for each in line.message if isinstance(each, dict) and "id" in each}
        for exchange in self.asked:
            exchange.gave_up = exchange.request.line in connection.gave_up

    def _sort(self, line: Recorded, message: dict[str, Any]) -> None:
        method = message.get("method")
        if isinstance(method, str) and "id" in message:
            self._request(line, Exchange(method=method, request=line))
        elif isinstance(method, str):
            self._notification(line, method, _object(message.get("params")))
        elif "method" not in message and ("result" in message or "error" in message):
            self._response(line, message)
        elif line.sender == "client" and "id" in message:
            self._unusual.add(_key(message["id"]))

    def _request(self, line: Recorded, exchange: Exchange) -> None:
        key = (line.sender, _key(line.message["id"]))
        if line.sender == "agent" and key in self._open:
            self.reused.append(line)
        self._open[key] = exchange
        (self.asked if line.sender == "client" else self.called).append(exchange)
        session = exchange.session
        if line.sender == "client" and exchange.method in ("session/prompt", "session/load"):
            turn = RecordedTurn(exchange=exchange)
            self.turns.append(turn)
            before = self._turns_of.get(session, [])
            self._turns_of[session] = [*(each for each in before if not each.exchange.is_answered), turn]
            self._asked_since.discard(session)
        elif exchange.method == "session/request_permission" and (current := self._turn(exchange.session)) is not None:
            current.permissions.append(exchange)
        elif line.sender == "client":
            self._asked_since.add(session)

    def _notification(self, line: Recorded, method: str, params: dict[str, Any]) -> None:
        turn = self._turn(_as_text(params.get("sessionId")))
        if line.sender == "client":
            if method == "session/cancel" and turn is not None and not turn.exchange.is_answered:
                turn.cancels.append(line)
            return
        self.notified.append(line)
        if method == "session/update" and isinstance(params.get("update"), dict):
            update = Update(line=line, session=_as_text(params.get("sessionId")), body=params["update"])
            self.updates.append(update)
            if turn is not None and not turn.exchange.is_answered:
                turn.updates.append(update)
            elif turn is not None and update.kind in _TURN_KINDS and self._is_late(turn, update):
                turn.late.append(update)
            if update.kind == "subagent_update":
                self._children.add(update.child)  # a subagent may send updates outside a turn of its own

    def _is_late(self, turn: RecordedTurn, update: Update) -> bool:
        """Return whether an update that came after a turn belongs to it. What comes after a later request, such as a
        change of the model, belongs to that request, unless it continues a message or tool call of the turn."""
        if update.session in self._children:
            return False
        names = {update.body.get(name) for name in ("messageId", "toolCallId")} - {None}
        shown = {each.body.get(name) for each in turn.updates for name in ("messageId", "toolCallId")}
        return update.session not in self._asked_since or bool(names & shown)

    def _turn(self, session: str) -> RecordedTurn | None:
        """Return the running turn of a session. If no turn is running, return the session's last turn, or None if
        there was none.

        While a load runs, all updates of its session are counted as part of the load, because a replay looks like the
        updates of a prompt.
        """
        turns = self._turns_of.get(session, [])
        running = [turn for turn in turns if not turn.exchange.is_answered]
        loads = [turn for turn in running if turn.exchange.method == "session/load"]
        return next(iter(loads or running or turns[-1:]), None)

    def _response(self, line: Recorded, message: dict[str, Any]) -> None:
        if message.get("id") is None:
            return
        key = ("client" if line.sender == "agent" else "agent", _key(message["id"]))
        exchange = self._open.pop(key, None)
        if exchange is not None:
            exchange.response = line
            self._closed.add(key)
        elif line.sender == "agent" and key[1] not in self._unusual:
            loose = {(side, json.loads(text)) for side, text in self._open if text.startswith('"')}
            loose |= {(side, text) for side, text in self._open if not text.startswith('"')}
            is_type = ("client", str(message["id"])) in loose
            self.strays.append((line, "twice" if key in self._closed else "type" if is_type else "unknown"))


def split(lines: Iterable[Recorded]) -> list[Connection]:
    """Split a recording into connections. A new connection begins at each `initialize` request."""
    connections = [Connection()]
    for line in lines:
        is_start = (
            line.sender == "client" and isinstance(line.message, dict) and line.message.get("method") == "initialize"
        )
        if is_start and connections[-1].lines:
            connections.append(Connection())
        connections[-1].lines.append(line)
    return connections


def _as_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else _key(value)


def _key(value: Any) -> str:
    """Return a value as JSON. So values of different types, such as 7 and "7", never get the same key."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
