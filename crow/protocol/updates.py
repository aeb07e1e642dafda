"""Builds the updates that clients get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from crow.domain import entries, events
from crow.domain.entries import CallRef, PlanItem, ToolResult
from crow.domain.messages import Part, Usage
from crow.domain.text import safe, title_line
from crow.protocol import tool_calls
from crow.protocol.content import blocks
from crow.protocol.sizes import limit_json, limit_text, split_text
from crow.protocol.tool_calls import Fields, shown_text

Update: TypeAlias = dict[str, Any]

TERMINAL_CHARS = 50_000
"""At most this many characters of output are streamed to a client's terminal. The rest is sent when the command
ends, and is shortened if it is long."""

_NOTICE_CHARS = 500
"""At most this many characters of a notice's title are shown."""

_STEP_CHARS = 1_000
"""At most this many characters of each step of the plan are shown."""

_INTERRUPTED_TURN = "The turn was interrupted."

PLAN_ID = "plan"
"""The id of a session's plan. A session has at most one plan."""

PROGRESS_CHARS = 8_000
"""If a running command has no terminal in the client, crow shows at most this many characters from the end of its
output."""


def prompt_updates(message_id: str, parts: Sequence[Part]) -> tuple[Update, ...]:
    """Return updates with a prompt of the user."""
    shown = [block for part in parts for block in blocks(part)]
    return tuple(new_update("user_message_chunk", content=block, messageId=message_id) for block in shown)


def command_updates(message_id: str, text: str) -> tuple[Update, ...]:
    """Return updates with a slash command as the user typed it. `message_id` is the id of the command's answer."""
    return _chunks("user_message_chunk", limit_text(text), messageId=f"{message_id}_typed")


def plan_updates(items: Sequence[PlanItem] | None, *, by_id: bool = False) -> tuple[Update, ...]:
    """Return updates with the complete plan, or no updates if `items` is None.

    With `by_id`, return the protocol's unstable updates for plans with ids, which only some clients support. If the
    plan has become empty, the unstable update says so.
    """
    if items is None:
        return ()
    if by_id and not items:
        return (new_update("plan_removed", planId=PLAN_ID),)
    plan = [
        {"content": title_line(item.content, _STEP_CHARS), "priority": item.priority, "status": item.status}
        for item in items
    ]
    entries = limit_json(plan, tool_calls.OUTPUT_BYTES)
    if by_id:
        return (new_update("plan_update", plan={"type": "items", "planId": PLAN_ID, "entries": entries}),)
    return (new_update("plan", entries=entries),)


def usage_object(usage: Usage) -> Fields:
    """Return the token counts of a turn, for the response to the turn's prompt. Cached tokens count as input, and
    thought tokens count as output."""
    sent, made = usage.input_tokens or 0, usage.output_tokens or 0
    optional = {
        "thoughtTokens": usage.reasoning_tokens,
        "cachedReadTokens": usage.cached_tokens,
        "cachedWriteTokens": usage.cache_write_tokens,
    }
    known = {name: count for name, count in optional.items() if count is not None}
    mark = {"_meta": {"crow": {"estimated": True}}} if usage.is_estimated else {}
    return {"totalTokens": sent + made, "inputTokens": sent, "outputTokens": made, **known, **mark}


def usage_update(event: events.ContextMeasured) -> Update:
    """Return an update with the size of the context, and with the cost if it is known."""
    update = new_update("usage_update", used=max(0, event.used), size=max(0, event.size))
    return update if event.cost is None else update | {"cost": {"amount": event.cost, "currency": "USD"}}


def turn_state(turn: events.TurnBegan | events.TurnEnded | None) -> dict[str, Any]:
    """Return the state of a session, for `_meta["acp/turnState"]`. `turn` is the turn that runs, or the end of the last
    turn. It is None if neither is known."""
    match turn:
        case None:
            return {"state": "idle"}
        case events.TurnBegan():
            return {"state": "running"}
        case events.TurnEnded(stop=stop, error=error):
            return {"state": "idle", "stopReason": stop if error is None else "error"}


def turn_state_update(state: Mapping[str, Any]) -> Update:
    """Return an update with the state of a turn. Clients of version 1 get it for the turns of other clients only: they
    learn the states of their own turns from the responses to their prompts."""
    return new_update("session_info_update", _meta={"acp/turnState": dict(state)})


def list_change_update(event: events.SessionListChanged) -> Update:
    """Return an update about a change in the list of sessions. The update changes nothing in the session to which it is
    sent."""
    changed = {"sessionId": event.session_id, "change": event.change}
    if event.title is not None:
        changed["title"] = title_line(event.title)
    return new_update("session_info_update", _meta={"crow": {"sessionList": changed}})


def notice_updates(severity: str, title: str, description: str = "") -> tuple[Update, ...]:
    """Return an update with a notice, for a client that shows notices."""
    update = new_update("notice", severity=severity, title=title_line(title, _NOTICE_CHARS))
    return (update | ({"description": shown_text(description)} if description else {}),)


def turn_end_words(stop: str, detail: str, *, is_answered: bool) -> str:
    """Return the text of a remark about the end of a turn. It is empty if the turn succeeded and has an answer.
    `detail` is the reason, if crow knows one."""
    match stop:
        case "interrupted":
            return detail or _INTERRUPTED_TURN
        case "error":
            return detail or "The turn ended with an error."
        case _ if is_answered:
            return ""
        case "cancelled":
            return "Cancelled."
        case _:
            return "No answer."


def new_update(kind: str, **fields: Any) -> Update:
    return {"sessionUpdate": kind, **fields}


def _chunks(kind: str, text: str, **ids: str) -> tuple[Update, ...]:
    """Split a text into as many updates as its size requires."""
    return tuple(new_update(kind, content={"type": "text", "text": piece}, **ids) for piece in split_text(text))


def text_updates(message_id: str, text: str) -> tuple[Update, ...]:
    return _chunks("agent_message_chunk", text, messageId=message_id)


def remark_updates(message_id: str, words: str) -> tuple[Update, ...]:
    """Return updates with a remark by crow. The remark ends with an empty line, so that even a client that joins all
    chunks shows the remark as a paragraph of its own.

    The remark may quote hostile text, so hidden characters are escaped.
    """
    return text_updates(message_id, f"{safe(words)}\n\n")


def thought_updates(message_id: str, text: str) -> tuple[Update, ...]:
    """Return updates with a thought. The thought has a message id of its own, because clients join chunks with the
    same id."""
    return _chunks("agent_thought_chunk", text, messageId=f"{message_id}_thought")


def summary_updates(compaction_id: str, text: str) -> tuple[Update, ...]:
    """Return updates with the next part of a summary. An empty `text` removes the parts that were sent before."""
    if not text:
        return (new_update("compaction_update", compactionId=compaction_id, status="in_progress", summary=[]),)
    return _chunks("compaction_summary_chunk", text, compactionId=compaction_id)


def compaction_update(compaction_id: str, status: str = "completed", detail: str = "") -> Update:
    """Return an update with the state of a compaction. `detail` is the summary, or the reason why the compaction
    failed."""
    update = new_update("compaction_update", compactionId=compaction_id, status=status)
    if detail and status == "completed":
        update["summary"] = [{"type": "text", "text": piece} for piece in split_text(limit_text(detail))]
    elif detail and status == "failed":
        update["error"] = shown_text(detail)
    return update


def token_change(body: entries.Checkpoint | entries.Mask) -> str:
    counts = (body.tokens_before, body.tokens_after)
    before, after = (f"{round(count / 1000)}k" if count >= 10_000 else str(count) for count in counts)
    return f"{before} → {after} tokens"


def terminal_output(call: CallRef, text: str) -> Fields:
    return {"terminal_id": call.call_id, "data": text}


def terminal_exit(call: CallRef, code: object) -> Fields:
    """Return the field `terminal_exit`. A negative `code` means that the signal with this number ended the command."""
    exited = isinstance(code, int) and code >= 0
    signal = f"signal {-code}" if isinstance(code, int) and code < 0 else None
    return {"terminal_id": call.call_id, "exit_code": code if exited else None, "signal": signal}


def terminal_end(result: ToolResult, sent: str) -> Fields:
    """Return the exit status, and the part of the output that was not sent to the terminal yet."""
    output = tool_calls.output_text(result)
    rest = output[len(sent) :] if output.startswith(sent) else f"\n{output}"
    meta: Fields = {"terminal_exit": terminal_exit(result.call, result.raw_output.get("exit_code"))}
    if rest.strip():
        meta["terminal_output"] = terminal_output(result.call, limit_text(rest))
    return meta
