"""Shows subagents as sessions of their own, if the client supports this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from crow.domain.entries import CallRef, ToolResult
from crow.domain.events import SessionMessage, SubagentChanged
from crow.domain.subagents import answer_id, answer_text, order_id, task_of
from crow.domain.text import title_line
from crow.protocol.sizes import limit_text, split_text
from crow.protocol.tool_calls import Fields, parsed_arguments, shown_text
from crow.protocol.updates import Update

_ERROR_CODE = -32603
_STOP_REASONS = frozenset({"end_turn", "max_tokens", "max_turn_requests", "refusal", "cancelled", "error"})
MAX_REPLAYED = 200
"""A replay of a session sends the histories of at most this many of its newest subagents. Older subagents are only
announced."""

_CAPABILITIES: Mapping[str, Any] = {"cancel": {}}
"""The capabilities of a subagent's session, as they are announced to the client."""


@dataclass(slots=True, kw_only=True)
class Family:
    """The subagents that a replay of a session has found. Replaying a subagent adds to `tasks` and `answers`."""

    session_id: str
    """The id of the session."""
    parent_id: str = ""
    """The id of the parent session, if the session is a subagent and is replayed together with its parent, else
    empty."""
    tasks: dict[str, str] = field(default_factory=dict)
    """The ids of the subagents that carried out `task` calls, by the ids of these calls."""
    answers: dict[str, str] = field(default_factory=dict)
    """The answers of these subagents, by the ids of the calls."""
    known: set[str] = field(default_factory=set)
    """The ids of the subagents that were announced."""

    def task(self, call: CallRef, result: ToolResult | None = None) -> str | None:
        """Return the id of the subagent that carried out a call, or None if the client does not know that
        subagent."""
        named = task_of(result) if result is not None else None
        return self.tasks.get(call.call_id) or (named if named in self.known else None)


def merged_state(known: SubagentChanged | None, event: SubagentChanged) -> SubagentChanged:
    """Return the state of a subagent after `event`. `known` is the state before `event`, or None if there is none."""
    if known is None:
        return event
    title = known.title if event.title is None else event.title
    return replace(event, title=title, state=event.state or known.state)


def link(session_id: str) -> Fields:
    """Return a link to a session, as content of a tool call."""
    return {"type": "session", "sessionId": session_id}


def subagent_update(event: SubagentChanged, usage: Fields | None = None) -> Update:
    """Return an update that tells the session's client about a subagent. `usage` has the token counts of the
    subagent's last turn."""
    update: Update = {"sessionUpdate": "subagent_update", "sessionId": event.session_id}
    if event.title is not None:
        update |= {"title": title_line(event.title), "capabilities": dict(_CAPABILITIES)}
    match event.state:
        case None:
            return update
        case "idle":
            used = {} if usage is None else {"usage": usage}
            return update | {"state": {"state": "idle", **_stop(event.stop, event.detail), **used}}
        case "running" | "requires_action" | "unknown" as state:
            return update | {"state": {"state": state}}
        case _ as never:
            assert_never(never)


def _stop(stop: str, detail: str) -> Fields:
    if stop == "error" and detail:
        return {"stopReason": "error", "error": {"code": _ERROR_CODE, "message": shown_text(detail)}}
    return {"stopReason": stop} if stop in _STOP_REASONS else {}


def message_updates(message: SessionMessage, seen_by: str) -> tuple[Update, ...]:
    """Return updates that show a message from one session to another. `seen_by` is the session that gets the updates:
    either the sender or the recipient of the message. A long text is split."""
    other = "recipientMessageId" if seen_by == message.sender else "senderMessageId"
    first, *rest = split_text(limit_text(message.text)) or [""]
    update: Update = {
        "sessionUpdate": "session_message",
        "messageId": message.message_id,
        "senderSessionId": message.sender,
        "recipientSessionId": message.recipient,
        other: message.message_id,
        "content": [{"type": "text", "text": first}],
    }
    more = (
        {
            "sessionUpdate": "session_message_chunk",
            "messageId": message.message_id,
            "content": {"type": "text", "text": piece},
        }
        for piece in rest
    )
    return (update, *more)


def order_of(call: CallRef, arguments: str | None, sender: str, recipient: str) -> SessionMessage | None:
    """Return the instructions that a `task` call gave to the subagent, or None if the call's arguments have no
    prompt."""
    prompt = (parsed_arguments(arguments or "") or {}).get("prompt")
    if not isinstance(prompt, str):
        return None
    return SessionMessage(message_id=order_id(call.call_id), sender=sender, recipient=recipient, text=prompt)


def answer_of(result: ToolResult, sender: str, recipient: str, later: str | None = None) -> SessionMessage | None:
    """Return a message with the subagent's answer to a `task` call. The answer is taken from the call's result, or
    from `later` if the result has no answer. Return None if neither has one."""
    text = answer_text(result) or later
    if text is None:
        return None
    return SessionMessage(message_id=answer_id(result.call.call_id), sender=sender, recipient=recipient, text=text)
