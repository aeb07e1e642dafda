"""Assembles tool calls from the fragments of a stream.

Endpoints use IDs and indexes differently, so no single key is reliable. All members of a fragment together decide to
which call the fragment belongs. A new ID with a name opens a call. Otherwise the index decides. Without an index, the
fragment continues the call that was opened last. Arguments are read at the end. Each finished call has a name, a unique
ID, and either an object of arguments or the reason why there is none.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from crow.domain.messages import ToolCall, ToolSpec
from crow.llm.arguments import InvalidArguments, begins_object, is_whole, json_text, read_arguments
from crow.llm.sse import replace_lone, replace_lone_in

_ARGUMENTS_KEYS = ("arguments", "parameters", "input", "args")
_KNOWN_KEYS = frozenset({"index", "id", "type", "function", "name", *_ARGUMENTS_KEYS})
_PREFIX = re.compile(
    r"\A(?:assistant(?=<))?(?:<\|channel\|>(?:commentary|analysis)\s*)?(?:to=)?(?:<function=)?"
    r"(?:(?:functions?|tools|default_api)[.:/])?"
)
_SUFFIX = re.compile(r"(?:<\|.*|(?<!\s)\s++json|:\d{0,4}|\(\)|>)\Z", re.DOTALL)
_PARALLEL = "multi_tool_use.parallel"
MAX_CALLS = 1000
_MAX_KEYS = 100_000
"""Some servers send a new ID or index with each fragment. At most this many IDs and this many indexes are
remembered."""
_MAX_PIECES = 10_000


def new_call_id() -> str:
    """Return a new ID of nine letters and digits. Every endpoint accepts IDs of this form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def tool_name(name: str, offered: Mapping[str, ToolSpec]) -> str:
    """Return the name of the offered tool that `name` must mean. If there is no such tool, return `name` reduced to
    characters that a request may contain.

    Decoration is removed (`functions.x`, `x<|channel|>commentary`, `x json`, `x:0`). Case and separators are ignored if
    only one tool fits. Crow does not guess between similar names.
    """
    name = name.strip()
    if name in offered:
        return name
    name = _PREFIX.sub("", name).strip("`\"' ")
    name = _SUFFIX.sub("", name).strip("`\"' ")
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
    for candidate in (name, plain):
        if candidate in offered:
            return candidate
    for normalised in (str.lower, _letters):
        meant = [each for each in offered if normalised(each) == normalised(name)]
        if meant:
            return meant[0] if len(meant) == 1 else plain
    return plain


def _letters(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", name).lower()


@dataclass(slots=True, eq=False)
class PartialCall:
    """A call that is being assembled."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    """The arguments as they arrived."""
    extra: dict[str, object] = field(default_factory=dict)
    """The members of the call's fragments that crow does not know."""
    function_extra: dict[str, object] = field(default_factory=dict)
    """The members of `function` in these fragments that crow does not know."""

    def add(self, arguments: str) -> None:
        """Add the next piece of the arguments."""
        if len(self.pieces) >= _MAX_PIECES:
            # If the pieces are snapshots of a growing text, `read_arguments` needs to know where each piece ends. But
            # so many pieces cannot be snapshots, so they can be joined.
            self.pieces = ["".join(self.pieces)]
        self.pieces.append(arguments)


class CallAssembler:
    """Assembles the calls of one answer. Call `add` with fragments (`delta.tool_calls[i]`) as they arrive, then
    `finish`. `size` is the number of characters stored. `has_too_many` means that calls beyond `MAX_CALLS` were left
    out."""

    def __init__(self, tools: Sequence[ToolSpec], *, new_id: Callable[[], str] = new_call_id) -> None:
        self._offered = {tool.name: tool for tool in tools}
        self._new_id = new_id
        self._calls: list[PartialCall] = []
        self._by_index: dict[object, PartialCall] = {}
        self._by_id: dict[str, PartialCall] = {}
        self.size = 0
        self.has_too_many = False

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add_all(self, fragments: object) -> None:
        """Add `delta.tool_calls`. This is usually a list of fragments, but may also be a single fragment or a mapping
        of fragments."""
        if isinstance(fragments, Mapping):
            values = list(fragments.values())
            is_one = not fragments.keys().isdisjoint({"function", "name", "arguments"})
            fragments = [fragments] if is_one or not all(isinstance(each, Mapping) for each in values) else values
        for fragment in fragments if isinstance(fragments, list) else ():
            if isinstance(fragment, list):
                self.add_all(fragment)
            else:
                self.add(fragment)

    def add(self, fragment: object) -> None:
        """Add one fragment of any shape."""
        if not isinstance(fragment, Mapping) or self._add_arguments(fragment):
            return
        function = fragment.get("function")
        function = function if isinstance(function, Mapping) else {}
        name = _text(function.get("name")) or _text(fragment.get("name"))
        arguments = _arguments_text(function, fragment)
        call_id = _text(fragment.get("id")).strip()
        index = _index(fragment.get("index"))
        if (call := self._call_for(index, call_id, name.strip(), arguments)) is None:
            if len(self._calls) >= MAX_CALLS:
                self.has_too_many = True
                return
            call = PartialCall()
            self._calls.append(call)
        if index is not None and len(self._by_index) < _MAX_KEYS:
            self._by_index[index] = call
        if call_id:
            call.id = call.id or call_id
            if len(self._by_id) < _MAX_KEYS:
                self._by_id.setdefault(call_id, call)
        if name.strip() and not (call.name and call.pieces):
            call.name = _joined_name(call.name, name)
            self.size += len(name)
        if arguments:
            call.add(arguments)
            self.size += len(arguments)
        for known, members in ((call.extra, fragment), (call.function_extra, function)):
            for key in members.keys() - _KNOWN_KEYS:
                if members[key] is not None:
                    known[key] = members[key]
                    self.size += len(key) + len(str(members[key]))

    def finish(self, *, is_cut: bool = False) -> tuple[ToolCall, ...]:
        """Return the calls in order of arrival. `is_cut` means that the stream ended because of the output limit. In
        this case, the last call is marked as faulty and must not run."""
        calls = [call for call in self._calls if not _is_nothing(call)]
        cut = calls[-1] if calls and is_cut else None
        return tuple(each for _, each in finished_calls(calls, self._offered, new_id=self._new_id, cut=cut))

    def _add_arguments(self, fragment: Mapping[str, object]) -> bool:
        """Add a fragment of the usual kind, which has only a known index and arguments. If the fragment is of another
        kind, return False without adding it."""
        index, function = fragment.get("index"), fragment.get("function")
        if len(fragment) != 2 or type(index) is not int or type(function) is not dict or len(function) != 1:
            return False
        call, arguments = self._by_index.get(index), function.get("arguments")
        if call is None or type(arguments) is not str:
            return False
        if arguments:
            call.add(arguments)
            self.size += len(arguments)
        return True

    def _call_for(self, index: object, call_id: str, name: str, arguments: str) -> PartialCall | None:
        """Return the call that a fragment continues, or None if the fragment opens a new call."""
        last = self._calls[-1] if self._calls else None
        known = self._by_id.get(call_id) if call_id else None
        at_index = self._by_index.get(index) if index is not None else None
        if known is not None:
            if at_index is not None and at_index.id == call_id:
                known = at_index
            if not name:
                return known
            # If parallel calls share one ID, a new index tells them apart.
            is_new = index is not None and at_index is None
            return None if is_new or self._opens_anew(known, name, arguments, same_index=at_index is known) else known
        if index is not None and at_index is None:
            # Some servers use the index to number fragments instead of calls. So a fragment from the middle of
            # arguments continues the last call, although its index is new.
            if last is None or call_id or name or not (last.name and last.pieces) or not arguments:
                return None
            return None if begins_object(arguments) or is_whole(last.pieces) else last
        if (call := at_index or last) is None:
            return None
        is_other_id = bool(call_id and call.id)
        if not name:
            if not is_other_id:
                return call
            # Some servers send a new ID with each fragment. So a new ID without a name opens a new call only if the
            # arguments of the current call are complete, or if the fragment has no index and the current call has no
            # arguments yet. At a known index, a fragment without arguments never opens a call.
            goes_on = (bool(call.pieces) or index is not None) and not is_whole(call.pieces)
            return call if goes_on or (index is not None and not arguments.strip()) else None
        if is_other_id:
            # Some servers send a new ID and the name with each fragment. So a fragment from the middle of arguments
            # continues the call at its index.
            is_same = name == call.name and not begins_object(arguments) and bool(arguments) and index is not None
            return call if is_same and call.pieces and not is_whole(call.pieces) else None
        return None if self._opens_anew(call, name, arguments, same_index=index is not None) else call

    def _opens_anew(self, call: PartialCall, name: str, arguments: str, *, same_index: bool) -> bool:
        """Return whether a fragment with a name begins a new call, although its ID, its index or its position suggests
        that it continues `call`. `same_index` means that the fragment has the index of `call`."""
        if not call.name:
            return False
        if name != call.name.strip():
            if call.pieces:
                return is_whole(call.pieces) or name in self._offered
            return name in self._offered and call.name.strip() in self._offered and not name.startswith(call.name)
        if not same_index and not arguments:
            return is_whole(call.pieces)
        if not begins_object(arguments) or not is_whole(call.pieces):
            return False
        # A complete call that is sent twice is one call. A call that contains only `{}` is not complete yet, because
        # some gateways open calls in this way.
        return "".join(call.pieces).strip() not in {arguments.strip(), "{}"}


def _is_nothing(call: PartialCall) -> bool:
    """Return whether a call has neither a name nor arguments. An empty object without an ID does not count as
    arguments: LiteLLM may send `{}` in a call that it adds to a thought."""
    arguments = "".join(call.pieces).strip()
    return not call.name.strip() and (not arguments or (arguments == "{}" and not call.id))


def finished_calls(
    calls: Sequence[PartialCall],
    offered: Mapping[str, ToolSpec],
    *,
    new_id: Callable[[], str],
    cut: PartialCall | None = None,
) -> list[tuple[PartialCall, ToolCall]]:
    """Return the finished calls in order, each with the `PartialCall` that it was made from. The IDs of the finished
    calls are unique. `cut` is the call that the output limit cut; it is marked as faulty and must not run."""
    found: list[tuple[PartialCall, ToolCall]] = []
    seen: set[str] = set()
    for call in calls:
        for each in _finished(call, offered, is_cut=call is cut):
            call_id = replace_lone(each.id)
            while not call_id or call_id in seen:
                call_id = new_id()
            seen.add(call_id)
            found.append((call, replace(each, id=call_id)))
    return found


def _finished(call: PartialCall, offered: Mapping[str, ToolSpec], *, is_cut: bool) -> list[ToolCall]:
    """Return the finished call. If `call` has several objects as arguments, return one call for each object; only the
    first keeps the ID. If it is `multi_tool_use.parallel`, return the calls in its arguments, without IDs."""
    name = tool_name(replace_lone(call.name), offered)
    tool = offered.get(name)
    extra = replace_lone_in(call.extra | ({"function": call.function_extra} if call.function_extra else {}))
    raw = replace_lone("".join(call.pieces))
    unread = ToolCall(id=call.id, name=name or "unnamed", arguments="{}", raw=raw, extra=extra)
    if not name:
        return [replace(unread, fault="the call has no name")]
    fault = "the answer reached its output limit within this call" if is_cut else None
    try:
        objects = read_arguments(call.pieces, tool.input_schema if tool is not None else None)
        texts = [json_text(each) for each in objects]
    except InvalidArguments as error:
        return [replace(unread, fault=f"{fault}: {error}" if fault else str(error))]
    is_wrapper = call.name.strip() == _PARALLEL and tool is None and len(objects) == 1 and not fault
    if is_wrapper and (unpacked := _unpacked(objects[0], offered)):
        return unpacked
    first = replace(unread, arguments=texts[0], fault=fault, raw=raw if fault else None)
    return [first, *(replace(first, id="", arguments=text, extra={}) for text in texts[1:])]


def _unpacked(wrapped: Mapping[str, object], offered: Mapping[str, ToolSpec]) -> list[ToolCall]:
    """Return the calls inside `multi_tool_use.parallel`. Return no calls if one of them has no valid name or
    arguments."""
    uses = wrapped.get("tool_uses")
    calls: list[ToolCall] = []
    for use in uses if isinstance(uses, list) else ():
        name = use.get("recipient_name") if isinstance(use, Mapping) else None
        parameters = use.get("parameters") if isinstance(use, Mapping) else None
        if not isinstance(name, str) or not isinstance(parameters, Mapping):
            return []
        calls.append(ToolCall(id="", name=tool_name(name, offered), arguments=json_text(parameters)))
    return calls


def _joined_name(name: str, piece: str) -> str:
    """Return the name extended by `piece`. Servers may repeat the name, send it again in a longer form, or send it in
    pieces."""
    if not name or piece.startswith(name):
        return piece
    return name if name.strip() == piece.strip() else name + piece


def _index(value: object) -> int | str | None:
    """Return the index of a fragment. A number in quotes, or a number such as `1.0`, is treated as an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def _arguments_text(*places: Mapping[str, object]) -> str:
    """Return the arguments as text. They are taken from the first of `places` that contains arguments."""
    value = next((place[key] for place in places for key in _ARGUMENTS_KEYS if place.get(key) is not None), "")
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "["
