"""The output items of a response while they arrive."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from crow.domain.messages import JsonObject, ToolSpec
from crow.llm.tool_calls import MAX_CALLS, PartialCall

CALL_TYPES: dict[str, frozenset[str]] = {
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "custom_tool_call": frozenset({"call_id", "name", "input"}),
}
"""The types of items that are tool calls. The members listed for each are stored in the `ToolCall`, so the stored item
lacks them."""

_MAX_OUTPUTS = 10_000
_MAX_PARTS = 10_000
_MAX_COMPARED = 20
"""An item with an unknown id is compared with at most this many items that have begun."""

_COMPARED_CHARS = 1_000
"""Only this many characters at the beginning of two texts are compared."""


def freeform_property(tool: ToolSpec | None) -> str:
    """Return the name of the property that holds the input of a freeform tool."""
    properties = tool.input_schema.get("properties") if tool is not None else None
    names = list(properties) if isinstance(properties, Mapping) else []
    return str(names[0]) if len(names) == 1 else "input"


@dataclass(slots=True, eq=False)
class Part:
    """A part of an item's text."""

    kind: str
    """`output_text` or `refusal`; for reasoning `content` or `summary`."""
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = False
    """Whether an event has ended the part. That event contained the whole text, so pieces that arrive later are
    ignored."""

    def missing_of(self, whole: str) -> str:
        """Return the rest of `whole` after the pieces that have arrived. Return an empty text if `whole` does not begin
        with these pieces."""
        if not self.pieces:
            return whole
        so_far = "".join(self.pieces)
        self.pieces = [so_far]
        return whole[len(so_far) :] if whole.startswith(so_far) else ""


@dataclass(slots=True, eq=False)
class Output:
    """An output item. An event announces it, pieces arrive, and an event with the whole item ends it. Any of these may
    be missing."""

    kind: str
    """The type of the item, such as `message`."""
    id: str = ""
    index: int | None = None
    """The position that the server gives the item in the response."""
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    """The parts of the text by their kind and index."""
    call: PartialCall | None = None
    """The call that the item makes, or None if it is not a call."""
    data: JsonObject | None = None
    """The whole item, from the event that ended it. None until then."""
    has_text: bool = False
    """Whether text of the message has been shown."""
    shown: str | None = None
    """For reasoning, the kind of the parts that are shown: `content` or `summary`. None until a part is shown."""
    is_announced: bool = False
    """Whether an event that announces or ends the item has arrived."""
    is_whole: bool = False
    """Whether the input of a call is complete."""
    early: str = ""
    """The input that a call had when it was announced. It is used only if no other input arrives."""

    def part(self, index: object, kind: str) -> Part:
        """Return the part at this index, which is 0 if the server sends none."""
        place = index if type(index) is int and len(self.parts) < _MAX_PARTS else 0
        return self.parts.setdefault((kind, place), Part(kind))


class Outputs:
    """The output items of one response. `size` is the number of characters in calls and opaque items."""

    def __init__(self) -> None:
        self._all: list[Output] = []
        self._unended: dict[str, dict[Output, None]] = {}
        """The items that have not arrived as a whole, by kind and in order of arrival."""
        self._by_id: dict[tuple[str, str], Output] = {}
        self._by_index: dict[tuple[str, int], Output] = {}
        self.size = 0
        self.has_text = False
        self.has_thought = False
        self.has_too_many_calls = False
        self._calls = 0

    def in_order(self) -> list[Output]:
        """Return the items in the order of the server's indexes. If an index is missing or repeated, return them in
        order of arrival."""
        indexes = [each.index for each in self._all]
        if None in indexes or len(set(indexes)) < len(indexes):
            return list(self._all)
        return sorted(self._all, key=lambda each: each.index or 0)

    def find(self, event: JsonObject, kind: str) -> Output:
        """Return the output to which an event with a piece belongs. If no known output fits, add a new one."""
        item_id, index = _id(event.get("item_id")), _index(event.get("output_index"))
        known = self._by_id.get((kind, item_id)) if item_id else None
        if index is not None and (known is None or known.index != index):
            # Some servers give an item another id with each event, or several items the same id.
            known = self._by_index.get((kind, index)) or known
        if known is None and index is None and not item_id:
            known = next(reversed(self._unended.get(kind, {})), None)
        return known or self._add(kind, item_id, index)

    def open(self, item: JsonObject, event: JsonObject, *, is_done: bool) -> Output | None:
        """Return the output to which an event with an item belongs. If no known output fits, add a new one. Return None
        if the output has ended already. `is_done` means that the event ends the item; otherwise it announces the
        item."""
        kind, item_id = str(item["type"]), _id(item.get("id")) or _id(event.get("item_id"))
        # llama.cpp sends items of calls without an id of their own, so the id of the call identifies the item.
        item_id = item_id or (_id(item.get("call_id")) if kind in CALL_TYPES else "")
        index = _index(event.get("output_index"))
        known = self._by_id.get((kind, item_id)) if item_id else None
        if known is not None and known.data is not None and known.index != index:
            # A server may give several items the same id.
            known = known if _is_same(_without_id(known.data), _without_id(item)) else None
        if known is None and index is not None and (at_index := self._by_index.get((kind, index))) is not None:
            # Some servers give all items the same index.
            if at_index.data is not None:
                is_other = not is_done or not _is_same(_without_id(at_index.data), _without_id(item))
            else:
                is_other = not is_done and at_index.is_announced and item_id != at_index.id
            known = None if is_other else at_index
        if known is None and is_done:
            is_nameless = index is None and not item_id
            begun = islice(self._unended.get(kind, {}), _MAX_COMPARED)
            known = next((each for each in begun if _may_end(each, item, is_nameless=is_nameless)), None)
        if known is None:
            known = self._add(kind, item_id, index)
        else:
            self._name(known, item_id, index)
        known.is_announced = True
        return None if known.data is not None else known

    def _name(self, output: Output, item_id: str, index: int | None) -> None:
        """Remember an id and an index of an output, which may have begun with another id or without an index."""
        if item_id:
            self._by_id.setdefault((output.kind, item_id), output)
        if output.index is None and index is not None:
            output.index = index
            self._by_index.setdefault((output.kind, index), output)

    def close(self, output: Output, item: JsonObject) -> None:
        """End an output with the whole item."""
        output.data = item
        self._unended.get(output.kind, {}).pop(output, None)
        if output.kind != "message" and output.call is None:
            self.size += len(json.dumps(item, default=str))

    def unread(self, items: Sequence[object]) -> Iterator[tuple[JsonObject, Output]]:
        """Match the items in the list that ends the response with the outputs that have arrived. Yield each item whose
        output has not ended, and this output. If an item matches no output, add a new output for it.

        Ids decide first. The other items are matched in order: each with the output at its place in the list if this
        output fits, else with the first output that fits, else with the output at its place anyway.
        """
        listed = [(at, item) for at, item in enumerate(items) if type(item) is dict and type(item.get("type")) is str]
        order, named = self.in_order(), self._names()
        found: dict[int, Output] = {}
        taken: set[Output] = set()
        for at, item in listed:
            if (same := _named(item, named, taken)) is not None:
                found[at] = same
                taken.add(same)
        left: dict[str, list[Output]] = {}
        for each in order:
            if each not in taken:
                left.setdefault(each.kind, []).append(each)
        for at, item in listed:
            if at in found:
                continue
            kind = str(item["type"])
            rest = left.get(kind, [])
            if (same := _named(item, named, taken)) is not None:  # an earlier item of the list has the same id
                found[at] = same
                continue
            place = self._by_index.get((kind, at)) or (order[at] if at < len(order) and order[at].data else None)
            at_place = [place] if place is not None and place.kind == kind and place not in taken else []
            meant = next((each for each in (*at_place, *rest[:_MAX_COMPARED]) if _fits(each, item)), None)
            meant = meant or next(iter(at_place), None)
            if meant is None:
                meant = self._add(kind, _id(item.get("id")), at)
                for name in {_id(item.get("id")), _id(item.get("call_id"))} - {""}:
                    named[kind, name] = deque([meant])
            elif meant in rest:
                rest.remove(meant)
            found[at] = meant
            taken.add(meant)
        for at, item in listed:
            if found[at].data is None:
                yield item, found[at]

    def _names(self) -> dict[tuple[str, str], deque[Output]]:
        """Return the outputs by kind and id. An output may have several ids, and the id of its call is one of them."""
        named: dict[tuple[str, str], deque[Output]] = {}
        for each in self._all:
            for name in {each.id, each.call.id if each.call is not None else ""} - {""}:
                named.setdefault((each.kind, name), deque()).append(each)
        for (kind, name), each in self._by_id.items():
            if each not in (known := named.setdefault((kind, name), deque())):
                known.append(each)
        return named

    def add_input(self, output: Output, piece: object) -> None:
        """Add a piece of a call's input."""
        if output.call is not None and type(piece) is str and piece and not output.is_whole:
            output.call.add(piece)
            self.size += len(piece)

    def complete_call(self, output: Output, members: JsonObject, *, is_done: bool = True) -> None:
        """Add the id, the name and the input in `members`, an event or item with a call. `is_done` means that this
        event or item ends the call: its input replaces the pieces that have arrived, unless it is empty, `{}` or
        `null`. Otherwise it announces the call, and its input is kept in `early`."""
        call = output.call
        if call is None:
            return
        call.id = call.id or _id(members.get("call_id"))
        name = members.get("name")
        if isinstance(name, str) and name.strip() and not call.name:
            call.name = name
            self.size += len(name)
        whole = members.get("arguments")
        if isinstance(whole, (Mapping, list)) and output.kind == "function_call":
            whole = json.dumps(whole, default=str)
        if isinstance(whole, str) and whole and not output.is_whole:
            if not is_done:
                output.early = whole
            elif whole.strip() not in {"{}", "null"} or not call.pieces:
                self.size += max(0, len(whole) - sum(map(len, call.pieces)))
                call.pieces = [whole]
        if is_done:
            output.is_whole = str(members.get("status")) not in {"incomplete", "in_progress"}

    def _add(self, kind: str, item_id: str, index: int | None) -> Output:
        output = Output(kind, item_id, index)
        if kind in CALL_TYPES:
            output.call = PartialCall()
            self._calls += 1
            self.has_too_many_calls = self._calls > MAX_CALLS
        if len(self._all) >= _MAX_OUTPUTS:
            return output
        self._all.append(output)
        self._unended.setdefault(kind, {})[output] = None
        if item_id:
            self._by_id[kind, item_id] = output
        if index is not None:
            self._by_index[kind, index] = output
        return output


def text_parts(item: JsonObject) -> list[JsonObject]:
    """Return the parts of a message item. A content that is a text counts as one part."""
    content = item.get("content")
    if isinstance(content, str):
        return [{"type": "output_text", "text": content}]
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _named(item: JsonObject, named: dict[tuple[str, str], deque[Output]], taken: set[Output]) -> Output | None:
    """Return the output that has the id of the item's call, or else the id of the item. If there are several, return
    the first that is not taken, or the last one if all are taken."""
    for key in ("call_id", "id"):
        same = named.get((str(item["type"]), _id(item.get(key))))
        while same and len(same) > 1 and same[0] in taken:
            same.popleft()
        if same:
            return same[0]
    return None


def _may_end(output: Output, item: JsonObject, *, is_nameless: bool) -> bool:
    """Return whether `item` may be the whole item of this output, which has the same kind. No output was found by the
    id or index of `item`. `is_nameless` means that the item has neither id nor index."""
    if is_nameless:
        return True
    if output.call is not None and output.call.id:
        return output.call.id == item.get("call_id")
    return not output.id and output.index is None and _fits(output, item)


def _fits(output: Output, item: JsonObject) -> bool:
    """Return whether this output can be the beginning of `item`, which has the same kind. Calls are compared by name
    and id, messages by their text."""
    if output.call is not None:
        name, call_id = item.get("name"), item.get("call_id")
        return output.call.name in {"", name} and (not call_id or output.call.id in {"", call_id})
    if output.kind != "message":
        return True
    whole = _head(part.get("text") or part.get("refusal") for part in text_parts(item))
    so_far = _head(piece for part in output.parts.values() for piece in part.pieces)
    return whole.startswith(so_far) or so_far.startswith(whole)


def _head(pieces: Iterable[object]) -> str:
    """Return about the first `_COMPARED_CHARS` characters of the joined pieces, without blanks."""
    head = ""
    for piece in pieces:
        head += piece[:_COMPARED_CHARS] if isinstance(piece, str) else ""
        if len(head) >= _COMPARED_CHARS:
            break
    return "".join(head.split())


def _is_same(one: JsonObject, other: JsonObject) -> bool:
    """Return whether two JSON objects are equal. Objects that are nested too deeply to be compared count as
    different."""
    try:
        return one == other
    except RecursionError:
        return False


def _without_id(item: JsonObject) -> dict[str, object]:
    return {key: value for key, value in item.items() if key != "id"}


def _id(value: object) -> str:
    return value if isinstance(value, str) else ""


def _index(value: object) -> int | None:
    return value if type(value) is int else None
