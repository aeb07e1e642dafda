"""The parts of an answer as its endpoint sent them: stored with the answer, and sent back unchanged and in order.

Responses calls them output items, Messages calls them content blocks. They hold what only the endpoint can read, such
as encrypted reasoning, signatures and ids. They are stored in the answer's opaque member `items`. A tool call is stored
without its id, name and arguments, because a request may have to repeat a call with another id or shortened arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crow.domain.messages import AssistantMessage, JsonObject, ToolCall, WireName
from crow.llm.sse import replace_lone_in

ITEMS = "items"
"""The opaque member that holds the items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of an answer."""

    data: JsonObject
    """The provider's object. If `call` is set, it lacks the id, name and arguments of the call."""
    call: int | None = None
    """The index of the call in the answer that this item makes, or None if the item is no call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Text that takes the place of items that no longer match the answer's text."""

    text: str


def stored_items(items: Sequence[Item]) -> JsonObject:
    """Return the opaque fields with these items. The result is empty if there are none."""
    if not items:
        return {}
    clean = ({"data": replace_lone_in(item.data), "call": item.call} for item in items)
    return {ITEMS: [each if each["call"] is not None else {"data": each["data"]} for each in clean]}


def items_of(
    message: AssistantMessage, *, endpoint: str, wire: WireName, text_of: Callable[[JsonObject], str | None]
) -> tuple[Item | PlainText | ToolCall, ...] | None:
    """Return what to send for `message` in the provider's order, or None if no items are stored with it, or another
    endpoint or wire made it.

    Every call of the message comes exactly once. A call without an item comes as a `ToolCall` at the end. `text_of`
    returns the text of an item that holds text of the answer, and None for other items. If the items' text is not that
    of the message (crow removed a tool call written as text, or a repetition), one `PlainText` replaces these items. If
    there is no such item, it stands before the first call. Without a text in the message, these items are left out.
    """
    if message.endpoint != endpoint or message.wire != wire:
        return None
    stored = message.opaque.get(ITEMS)
    items = [item for each in stored if (item := _item(each)) is not None] if isinstance(stored, (list, tuple)) else []
    if not items:
        return None
    texts = [text for item in items if item.call is None and (text := text_of(item.data)) is not None]
    is_same = "".join("".join(texts).split()) == "".join(message.text.split())  # crow trims blanks of the answer
    found: list[Item | PlainText | ToolCall] = []
    left = dict(enumerate(message.calls))
    needs_text = not is_same and bool(message.text.strip())
    for item in items:
        if item.call is not None:
            if left.pop(item.call, None) is not None:
                found.append(item)
        elif is_same or text_of(item.data) is None:
            found.append(item)
        elif needs_text:
            needs_text = False
            found.append(PlainText(text=message.text))
    if needs_text:
        calls = (at for at, each in enumerate(found) if isinstance(each, Item) and each.call is not None)
        found.insert(next(calls, len(found)), PlainText(text=message.text))
    return (*found, *left.values())


def _item(stored: object) -> Item | None:
    """Read one stored item. Return None if it is malformed."""
    if not isinstance(stored, Mapping) or not isinstance(data := stored.get("data"), Mapping):
        return None
    if not isinstance(data.get("type"), str):
        return None
    call = stored.get("call")
    return Item(data=data, call=call if isinstance(call, int) and not isinstance(call, bool) else None)
