"""A whole recording put to the judges.

Strategy: each message is judged on its own and by its place; a fault is noted with its line and the side whose it is,
and the next message is judged all the same. What was still open when the recording ended is told, not held against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from crow.trace.record import Recorded
from crow.trace.schema import Judge, SchemaViolation, Side, fault

__all__ = ["CheckResult", "Order", "check"]

LINE_BYTES = 32 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class CheckResult:
    """`faults` of the agent as `line 12: words`, `client_faults` likewise; `unanswered`: the requests without an answer
    at the end, as `method (id)`."""

    messages: int = 0
    faults: list[str] = field(default_factory=list)
    client_faults: list[str] = field(default_factory=list)
    unanswered: tuple[str, ...] = ()


def check(recording: Iterable[Recorded]) -> CheckResult:
    """Judge every message of a recording."""
    verdict, judge, order = CheckResult(), Judge(), Order()
    for recorded in recording:
        verdict.messages += 1
        if recorded.text is not None:
            if recorded.sender == "agent":  # a client's broken line is the agent's to answer
                verdict.faults.append(f"line {recorded.line}: no JSON from the agent: {recorded.text[:200]}")
            continue
        for rule in (judge, order):
            try:
                rule.check(recorded.sender, recorded.message)
            except SchemaViolation as fault:
                faults = verdict.faults if recorded.sender == "agent" else verdict.client_faults
                faults.append(f"line {recorded.line}: {fault}")
                break
    verdict.unanswered = judge.unanswered()
    return verdict


# FROM trace.order: The ordering rules of ACP that a schema cannot say.
#
# Strategy: one pass over the messages of a connection with the little state that the rules need. A session is known
# from
# the response that creates it (or from the request that loads it); tool calls are announced once, updated after that,
# and final when their turn ends; nothing turn-like comes outside a turn.


FINAL = ("completed", "failed")
OPENING = ("session/new", "session/load", "session/resume", "session/fork")
TURN_LIKE = ("agent_message_chunk", "agent_thought_chunk", "user_message_chunk", "tool_call", "tool_call_update")


@dataclass(slots=True)
class SessionTrace:
    """What a session has shown: the status of each call, how many prompts wait and how many replays run or wait (and
    what the newest replaces, in case it fails)."""

    calls: dict[str, str] = field(default_factory=dict)
    prompts: int = 0
    loading: int = 0
    before: SessionTrace | None = None


class Order:
    """Checks every message of one connection in the order they were sent."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionTrace] = {}
        self._asked: dict[Any, tuple[str, Any]] = {}

    def check(self, sender: Side, message: Any) -> None:
        """:raises WireFault: a message that came too early or too late. What is malformed is no matter of order."""
        if not isinstance(message, dict):
            return
        given = message.get("params")
        params: dict[str, Any] = given if isinstance(given, dict) else {}
        session_id, method = params.get("sessionId"), message.get("method")
        if sender == "client":
            if isinstance(method, str) and "id" in message and isinstance(session_id, str | None):
                self._asked[message["id"]] = (method, session_id)
                self._client_asks(method, session_id)
        elif method == "session/update":
            self._updated(self._known(session_id, message), params["update"], message)
        elif method == "session/request_permission":
            call_id = params["toolCall"]["toolCallId"]
            if self._known(session_id, message).calls.get(call_id) not in ("pending", "in_progress"):
                raise fault(message, "a permission request for a call that is not announced, or is over")
        elif method is None and message.get("id") is not None:
            self._answered(*self._asked.pop(message["id"], ("", None)), message)

    def _client_asks(self, method: str, session_id: Any) -> None:
        if method == "session/load":
            before = self._sessions.get(session_id)
            running, loading = (0, 0) if before is None else (before.prompts, before.loading)
            self._sessions[session_id] = SessionTrace(loading=loading + 1, prompts=running, before=before)
        elif method == "session/prompt" and session_id in self._sessions:
            self._sessions[session_id].prompts += 1

    def _answered(self, method: str, session_id: Any, message: dict[str, Any]) -> None:
        if method in OPENING and "result" in message:
            opened = self._sessions.setdefault(message["result"].get("sessionId", session_id), SessionTrace())
            if not opened.prompts:  # a turn that runs goes on behind the replay
                self._all_final(opened, message)
            if method == "session/load":
                opened.loading -= 1
                opened.before = None
                if opened.loading:  # the next replay begins anew
                    opened.calls = {}
        elif method == "session/load":
            seen = self._sessions.pop(session_id)
            if seen.before is not None:  # with what went on beside the replay
                seen.before.prompts, seen.before.loading = seen.prompts, seen.loading - 1
                seen.before.calls |= seen.calls
                self._sessions[session_id] = seen.before
        elif method == "session/prompt" and session_id in self._sessions:
            seen = self._sessions[session_id]
            seen.prompts -= 1
            if seen.prompts == 0:
                self._all_final(seen, message)

    def _known(self, session_id: Any, message: dict[str, Any]) -> SessionTrace:
        if session_id not in self._sessions:
            raise fault(message, "it names a session that the client does not know yet")
        return self._sessions[session_id]

    def _updated(self, seen: SessionTrace, update: dict[str, Any], message: dict[str, Any]) -> None:
        kind = update["sessionUpdate"]
        if kind in TURN_LIKE and not (seen.prompts or seen.loading):
            raise fault(message, "a part of a turn outside any turn")
        if kind == "user_message_chunk" and not seen.loading:
            raise fault(message, "the user's own words, sent back while live")
        if kind not in ("tool_call", "tool_call_update"):
            return
        call_id = update["toolCallId"]
        if kind == "tool_call" and call_id in seen.calls:
            raise fault(message, "a tool call announced twice")
        if kind == "tool_call_update" and call_id not in seen.calls:
            raise fault(message, "an update of a tool call that was not announced")
        status = update.get("status") or seen.calls.get(call_id, "pending")
        if seen.calls.get(call_id) in FINAL and status not in FINAL:
            raise fault(message, "an update of a tool call that is over")
        seen.calls[call_id] = status

    def _all_final(self, seen: SessionTrace, message: dict[str, Any]) -> None:
        left = [call_id for call_id, status in seen.calls.items() if status not in FINAL]
        if left:
            raise fault(message, f"the turn ends, but these calls do not: {left}")
