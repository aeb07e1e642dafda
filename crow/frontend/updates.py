"""`session/update` payloads: how each kind is built, for what happens now and for what is told again.

Strategy: plain dicts, built once, ready to send; texts come in as many pieces as the bound of a line asks for. Knows
neither what a client has seen nor what it asked for. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from crow.domain.entries import Entry, PlanItem
from crow.domain.events import ContextMeasured
from crow.frontend.bounds import OUTPUT_BYTES, bounded, head_and_tail, pieces

__all__ = [
    "Update",
    "agent_text",
    "agent_thought",
    "aside",
    "chunk",
    "compaction",
    "mask_id",
    "plan",
    "summary_chunks",
    "tool_call",
    "usage",
]

Update: TypeAlias = dict[str, Any]


def aside(message_id: str, words: str) -> tuple[Update, ...]:
    """Crow's own words among the answers: a paragraph of their own also where the client joins all chunks."""
    return agent_text(message_id, f"{words}\n\n")


def agent_text(message_id: str, text: str) -> tuple[Update, ...]:
    """Text of the agent, in as many chunks as the line bound asks for."""
    return tuple(chunk("agent", message_id, {"type": "text", "text": piece}) for piece in pieces(text))


def agent_thought(message_id: str, text: str) -> tuple[Update, ...]:
    """A thought; its message is another than the answer's, as clients join what bears one id."""
    return tuple(
        {
            "sessionUpdate": "agent_thought_chunk",
            "content": {"type": "text", "text": piece},
            "messageId": f"{message_id}_thought",
        }
        for piece in pieces(text)
    )


def plan(items: Sequence[PlanItem] | None) -> tuple[Update, ...]:
    """The complete plan; nothing for None."""
    if items is None:
        return ()
    entries = [{"content": item.content, "priority": item.priority, "status": item.status} for item in items]
    return ({"sessionUpdate": "plan", "entries": bounded(entries, OUTPUT_BYTES)},)


def usage(event: ContextMeasured) -> Update:
    """How full the context is."""
    update: Update = {"sessionUpdate": "usage_update", "used": max(0, event.used), "size": max(0, event.size)}
    return update if event.cost is None else update | {"cost": {"amount": event.cost, "currency": "USD"}}


def compaction(compaction_id: str, status: str = "completed", detail: str = "") -> Update:
    """A compaction's state; `detail` is its summary, or why it failed. Only for clients that asked for it."""
    update: Update = {"sessionUpdate": "compaction_update", "compactionId": compaction_id, "status": status}
    if detail and status == "completed":
        update["summary"] = [{"type": "text", "text": piece} for piece in pieces(head_and_tail(detail))]
    elif detail and status == "failed":
        update["error"] = head_and_tail(detail)
    return update


def summary_chunks(compaction_id: str, text: str) -> tuple[Update, ...]:
    """Pieces of a summary as it is written; an empty one takes back what was shown. Only for clients that asked."""
    if not text:
        return (
            {
                "sessionUpdate": "compaction_update",
                "compactionId": compaction_id,
                "status": "in_progress",
                "summary": [],
            },
        )
    shown = {"sessionUpdate": "compaction_summary_chunk", "compactionId": compaction_id}
    return tuple(shown | {"content": {"type": "text", "text": piece}} for piece in pieces(text))


def chunk(who: Literal["user", "agent"], message_id: str, block: dict[str, Any]) -> Update:
    """One content block of a message."""
    return {"sessionUpdate": f"{who}_message_chunk", "content": block, "messageId": message_id}


def tool_call(status: str) -> Update:
    """The beginning of a call that the client does not know yet; its fields are to be added."""
    return {"sessionUpdate": "tool_call", "status": status}


def mask_id(entry: Entry) -> str:
    """The id under which a mask is shown as a compaction."""
    return f"mask_{entry.id}"
