"""What a view shows of a log, and of live items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from crow.domain.entries import Entry
from crow.domain.events import EntryStored
from crow.frontend.view import View
from crow.protocol.params import ClientCapabilities

__all__ = ["Params", "read_log", "reading", "texts"]

Params = dict[str, Any]


def reading(caps: ClientCapabilities | None = None, **options: Any) -> View:
    """A view that reads a log from its beginning."""
    return View(caps or ClientCapabilities(), session_id="s", is_reading=True, **options)


def read_log(entries: Iterable[Entry], caps: ClientCapabilities | None = None) -> list[Params]:
    """The updates with a whole log."""
    view = reading(caps)
    shown = [each for entry in entries for each in view.apply(EntryStored(entry=entry))]
    return [each.update for each in (*shown, *view.end_reading(is_running=False))]


def texts(updates: Sequence[Params], kind: str = "agent_message_chunk") -> dict[str, str]:
    """The text of each message of a kind."""
    found: dict[str, str] = {}
    for update in updates:
        if update["sessionUpdate"] == kind:
            found[update["messageId"]] = found.get(update["messageId"], "") + update["content"]["text"]
    return found
