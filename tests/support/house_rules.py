"""Rules that crow follows beyond the protocol because some clients need them."""

from __future__ import annotations

from typing import Any

from acp_check.schema import Side, violation

__all__ = ["HouseRules"]


class HouseRules:
    """Checks that tool updates have a status and chunks a message id.

    A message must not continue after a later tool call, except in a replay.
    """

    def __init__(self) -> None:
        self._begun: dict[str, set[str]] = {}
        self._over: dict[str, set[str]] = {}
        self._subagents: dict[str, set[str]] = {}

    def check(self, sender: Side, message: dict[str, Any]) -> None:
        """Checks the next message. :raises Violation: a rule is broken."""
        if sender == "client" and message.get("method") == "session/load":
            session = str(message["params"].get("sessionId"))
            for one in (session, *self._subagents.get(session, ())):  # a load replays the subagents too
                self._begun.pop(one, None)
                self._over.pop(one, None)
        if sender != "agent" or message.get("method") != "session/update":
            return
        session, update = message["params"]["sessionId"], message["params"]["update"]
        kind = update["sessionUpdate"]
        if kind == "subagent_update":
            self._subagents.setdefault(session, set()).add(update["sessionId"])
        begun, over = self._begun.setdefault(session, set()), self._over.setdefault(session, set())
        if kind == "tool_call":
            over |= begun
            begun.clear()
        elif kind.endswith("_chunk") and kind != "compaction_summary_chunk":
            if update["messageId"] in over:
                raise violation(message, "a message continues after a later tool call")
            begun.add(update["messageId"])
        if kind in ("tool_call", "tool_call_update") and update.get("status") is None:
            raise violation(message, "a tool update without a status")
        if kind.endswith("_message_chunk") and not update.get("messageId"):
            raise violation(message, "a chunk without a message id")
