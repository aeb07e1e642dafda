"""Checks the order of messages while a test runs, and raises at the first fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from acp_check.schema import Side, violation

FINAL = ("completed", "failed")
OPENING = ("session/new", "session/load", "session/resume", "session/fork")
SUBAGENT_UPDATES = ("subagent_update", "session_message", "session_message_chunk")
TURN_UPDATES = ("agent_message_chunk", "agent_thought_chunk", "user_message_chunk", "tool_call", "tool_call_update")


@dataclass(slots=True)
class _SessionTrace:
    """The state of a session so far: the status of each call, and the number of unanswered prompts and loads.

    `before` is the state that the newest load replaces. It is restored if that load fails. `parent` is set for a
    subagent; its updates may come at any time after it was announced.
    """

    calls: dict[str, str] = field(default_factory=dict)
    prompts: int = 0
    loading: int = 0
    before: _SessionTrace | None = None
    parent: str | None = None


class OrderChecker:
    """Checks the order of the messages of one connection.

    A session must be known before it is used. Each tool call is announced once, updated only after that, and has a
    final status when its turn ends. Updates that belong to a turn come only while a prompt or a load is unanswered.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _SessionTrace] = {}
        self._requests: dict[Any, tuple[str, Any]] = {}
        self._shows_subagents = False

    def check(self, sender: Side, message: Any) -> None:
        """Checks the next message. Malformed messages are ignored. :raises Violation: the message came too early or too
        late."""
        if not isinstance(message, dict):
            return
        params: Any = message["params"] if isinstance(message.get("params"), dict) else {}
        session_id, method = params.get("sessionId"), message.get("method")
        if sender == "client":
            if isinstance(method, str) and "id" in message and isinstance(session_id, str | None):
                self._requests[message["id"]] = (method, session_id)
                if method == "initialize" and isinstance(offered := params.get("clientCapabilities"), dict):
                    self._shows_subagents = isinstance(offered.get("subagents"), dict)
                self._on_request(method, session_id)
        elif method == "session/update":
            self._on_update(self._known(session_id, message), params["update"], message)
        elif method == "session/request_permission":
            call_id = params["toolCall"]["toolCallId"]
            if self._known(session_id, message).calls.get(call_id) not in ("pending", "in_progress"):
                raise violation(message, "a permission request for a tool call that is not open")
        elif method is None and message.get("id") is not None:
            self._on_response(*self._requests.pop(message["id"], ("", None)), message)

    def _on_request(self, method: str, session_id: Any) -> None:
        session = self._sessions.get(session_id)
        if method == "session/load":
            prompts, loading = (0, 0) if session is None else (session.prompts, session.loading)
            self._sessions[session_id] = _SessionTrace(prompts=prompts, loading=loading + 1, before=session)
        elif method == "session/prompt" and session is not None:
            session.prompts += 1

    def _on_response(self, method: str, session_id: Any, message: dict[str, Any]) -> None:
        if method in OPENING and "result" in message:
            session = self._sessions.setdefault(message["result"].get("sessionId", session_id), _SessionTrace())
            if not session.prompts:  # a running turn continues after the replay
                _check_all_final(session, message)
            if method == "session/load":
                session.loading -= 1
                session.before = None
                if session.loading:  # another load is unanswered, and its replay starts from nothing
                    session.calls = {}
        elif method == "session/load":
            session = self._sessions.pop(session_id)
            if session.before is not None:
                session.before.prompts, session.before.loading = session.prompts, session.loading - 1
                session.before.calls |= session.calls
                self._sessions[session_id] = session.before
        elif method == "session/prompt" and session_id in self._sessions:
            session = self._sessions[session_id]
            session.prompts -= 1
            if session.prompts == 0 and session.parent is None:  # no prompt of the client's ends a subagent's turn
                _check_all_final(session, message)

    def _on_update(self, session: _SessionTrace, update: dict[str, Any], message: dict[str, Any]) -> None:
        kind = update["sessionUpdate"]
        if kind in SUBAGENT_UPDATES:
            self._on_subagent_update(session, update, message)
        is_subagent = session.parent is not None
        if kind in TURN_UPDATES and not (session.prompts or session.loading or is_subagent):
            raise violation(message, "this message belongs to a turn, but no turn is running")
        if kind == "user_message_chunk" and not self._is_loading(session):
            raise violation(message, "the user's own message was sent back, but no session is being loaded")
        if kind not in ("tool_call", "tool_call_update"):
            return
        for content in update.get("content") or ():
            if isinstance(content, dict) and content.get("type") == "session":
                self._known(content["sessionId"], message)
                if not self._shows_subagents:
                    raise violation(message, "the client did not say that it supports subagents")
        call_id = update["toolCallId"]
        known = session.calls.get(call_id)
        if kind == "tool_call" and known is not None:
            raise violation(message, "a tool call announced twice")
        if kind == "tool_call_update" and known is None:
            raise violation(message, "an update of a tool call that was not announced")
        status = update.get("status") or known or "pending"
        if known in FINAL and status not in FINAL:
            raise violation(message, "an update of a tool call that has ended")
        session.calls[call_id] = status

    def _on_subagent_update(self, session: _SessionTrace, update: dict[str, Any], message: dict[str, Any]) -> None:
        if not self._shows_subagents:
            raise violation(message, "the client did not say that it supports subagents")
        if update["sessionUpdate"] == "session_message":
            for name in ("senderSessionId", "recipientSessionId"):
                if update.get(name) is not None:
                    self._known(update[name], message)
        elif update["sessionUpdate"] == "subagent_update":
            parent = message["params"]["sessionId"]
            known = self._sessions.get(update["sessionId"])
            if known is None or (session.loading and known.parent == parent):  # a replay starts from nothing
                self._sessions[update["sessionId"]] = _SessionTrace(parent=parent)
            elif known.parent is None:
                known.parent = parent
            elif known.parent != parent:
                raise violation(message, "a subagent that belongs to another session")
            elif isinstance(state := update.get("state"), dict) and state.get("state") == "idle":
                _check_all_final(known, message)

    def _is_loading(self, session: _SessionTrace) -> bool:
        if session.loading or session.parent is None:
            return bool(session.loading)
        parent = self._sessions.get(session.parent)
        return parent is not None and self._is_loading(parent)

    def _known(self, session_id: Any, message: dict[str, Any]) -> _SessionTrace:
        if session_id not in self._sessions:
            raise violation(message, "the client does not know this session yet")
        return self._sessions[session_id]


def _check_all_final(session: _SessionTrace, message: dict[str, Any]) -> None:
    open_calls = [call_id for call_id, status in session.calls.items() if status not in FINAL]
    if open_calls:
        raise violation(message, f"the turn ends, but these tool calls have not ended: {open_calls}")
