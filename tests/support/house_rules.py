"""What crow promises beyond the protocol, for the sake of clients that need it. Judged on every line of its tests."""

from __future__ import annotations

from typing import Any

from crow.trace.schema import Side, fault

__all__ = ["HouseRules"]


class HouseRules:
    """Every update of a tool call bears a status, every piece of a message the message's id."""

    def check(self, sender: Side, message: dict[str, Any]) -> None:
        """:raises WireFault: a promise is broken."""
        if sender != "agent" or message.get("method") != "session/update":
            return
        update = message["params"]["update"]
        kind = update["sessionUpdate"]
        if kind in ("tool_call", "tool_call_update") and update.get("status") is None:
            raise fault(message, "a tool update without a status")
        if kind.endswith("_message_chunk") and not update.get("messageId"):
            raise fault(message, "a piece of a message without its id")
