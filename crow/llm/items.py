"""Items: the parts of an answer as its endpoint sent them. They are stored with the answer, and sent back in order.

Responses calls them output items, Messages calls them content blocks. They contain data that only the endpoint can
read, such as encrypted reasoning and signatures. They are stored in the answer's opaque member `items`. The item of a
tool call is stored without the call's id, name and arguments, because a later request may have to repeat the call with
another id or shortened arguments.
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
    """If the item is a tool call, its index among the calls of the answer, else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """The text of a message, in place of items whose text is no longer that of the message."""

    text: str


def stored_items(items: Sequence[Item]) -> JsonObject:
    """Return the opaque fields of an answer with these items. They are empty if there are no items."""
    if not items:
        return {}
    clean = ({"data": replace_lone_in(item.data), "call": item.call} for item in items)
    return {ITEMS: [each if each["call"] is not None else {"data": each["data"]} for each in clean]}


def items_of(
    message: AssistantMessage, *, endpoint: str, wire: WireName, text_of: Callable[[JsonObject], str | None]
) -> tuple[Item | PlainText | ToolCall, ...] | None:
    """Return the items to send for `message`, in the provider's order. Return None if the message has no stored items,
    or came from another endpoint or wire.

    Every call of the message comes exactly once. A call without an item comes as a `ToolCall` at the end. `text_of`
    returns the text of an item that holds text of the answer, and None for other items.

    The items' text may differ from that of the message, because crow has removed a tool call written as text, or a
    repetition. In this case, one `PlainText` replaces all items with text; if there are none, it stands before the
    first call. If the message has no text, the items with text are left out.
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
