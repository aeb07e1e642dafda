"""What crow promises beyond the protocol, for the sake of clients that need it. Judged on every line of its tests."""

from __future__ import annotations

from typing import Any

from crow.trace.schema import Side, violation

__all__ = ["HouseRules"]


class HouseRules:
    """Every update of a tool call bears a status, every piece of a message the message's id; and no message goes on
    behind a tool call that came after its beginning, but in a replay."""

    def __init__(self) -> None:
        self._begun: dict[str, set[str]] = {}
        self._over: dict[str, set[str]] = {}

    def check(self, sender: Side, message: dict[str, Any]) -> None:
        """:raises Violation: a promise is broken."""
        if sender == "client" and message.get("method") == "session/load":
            session = str(message["params"].get("sessionId"))
            self._begun.pop(session, None)
            self._over.pop(session, None)
        if sender != "agent" or message.get("method") != "session/update":
            return
        session, update = message["params"]["sessionId"], message["params"]["update"]
        kind = update["sessionUpdate"]
        begun, over = self._begun.setdefault(session, set()), self._over.setdefault(session, set())
        if kind == "tool_call":
            over |= begun
            begun.clear()
        elif kind.endswith("_chunk") and kind != "compaction_summary_chunk":
            if update["messageId"] in over:
                raise violation(message, "a message that goes on behind a tool call")
            begun.add(update["messageId"])
        if kind in ("tool_call", "tool_call_update") and update.get("status") is None:
            raise violation(message, "a tool update without a status")
        if kind.endswith("_message_chunk") and not update.get("messageId"):
            raise violation(message, "a piece of a message without its id")
