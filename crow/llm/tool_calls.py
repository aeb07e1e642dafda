"""Tool calls, put together from the fragments of a stream.

Fragments are sorted to calls by what they carry (a new id with a name opens a call; else the index; else the call
opened last), because no single key can be relied on; nothing is decided about arguments before the end. At the end
each call gets a name, an id of its own and either an object or a fault.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from crow.domain.messages import ToolCall, ToolSpec
from crow.llm.arguments import InvalidArguments, begins_object, is_whole, json_text, read_arguments
from crow.llm.surrogates import replace_lone, replace_lone_in

__all__ = ["CallAssembler", "new_call_id", "tool_name"]

_LETTERS = string.ascii_letters + string.digits
_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""What the arguments are called, the usual name first."""
_KNOWN_KEYS = frozenset({"index", "id", "type", "function", "name", *_ARGUMENTS})
_NO_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_SEPARATORS = re.compile(r"[^A-Za-z0-9]")
_PREFIX = re.compile(
    r"\A(?:assistant(?=<))?(?:<\|channel\|>(?:commentary|analysis)\s*)?(?:to=)?(?:<function=)?"
    r"(?:(?:functions?|tools|default_api)[.:/])?"
)
_SUFFIX = re.compile(r"(?:<\|.*|(?<!\s)\s++json|:\d{0,4}|\(\)|>)\Z", re.DOTALL)
_PARALLEL = "multi_tool_use.parallel"
_MOST_CALLS = 1000
_MOST_KEYS = 100_000
"""Some servers send a new id or index with each fragment; so many of them are remembered."""
_MOST_PIECES = 10_000


def new_call_id() -> str:
    """Nine letters or digits: the form that every endpoint takes back."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def tool_name(name: str, offered: Mapping[str, ToolSpec]) -> str:
    """`name` as the offered tool that it can only mean, else in characters that a request may hold.

    Decoration falls away (`functions.x`, `x<|channel|>commentary`, `x json`, `x:0`); letter case and separators do not
    count where only one tool fits. Nothing similar is guessed.
    """
    name = name.strip()
    if name in offered:
        return name
    name = _PREFIX.sub("", name).strip("`\"' ")
    name = _SUFFIX.sub("", name).strip("`\"' ")
    plain = _NO_NAME_CHARACTER.sub("_", name)[:64]
    for candidate in (name, plain):
        if candidate in offered:
            return candidate
    for alike in (str.lower, _letters):
        meant = [each for each in offered if alike(each) == alike(name)]
        if len(meant) == 1:
            return meant[0]
        if meant:
            break
    return plain


def _letters(name: str) -> str:
    return _SEPARATORS.sub("", name).lower()


class _Call:
    """A call being put together."""

    __slots__ = ("extra", "function_extra", "id", "name", "pieces")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.pieces: list[str] = []
        self.extra: dict[str, object] = {}
        self.function_extra: dict[str, object] = {}

    def add(self, arguments: str) -> None:
        """Take the next piece of the arguments."""
        if len(self.pieces) >= _MOST_PIECES:
            # More pieces than this are no snapshots of a growing whole, so they need not be kept apart.
            self.pieces = ["".join(self.pieces)]
        self.pieces.append(arguments)


class CallAssembler:
    """Add fragments (`delta.tool_calls[i]`) as they come, then `finish`. `size`: characters that were kept."""

    def __init__(self, tools: Sequence[ToolSpec], *, new_id: Callable[[], str] = new_call_id) -> None:
        self._offered = {tool.name: tool for tool in tools}
        self._new_id = new_id
        self._calls: list[_Call] = []
        self._by_index: dict[object, _Call] = {}
        self._by_id: dict[str, _Call] = {}
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add_all(self, fragments: object) -> None:
        """Take `delta.tool_calls`: a list of fragments, mostly; else one fragment, or a mapping of them."""
        if isinstance(fragments, Mapping):
            values = list(fragments.values())
            is_one = "function" in fragments or "name" in fragments or "arguments" in fragments
            fragments = [fragments] if is_one or not all(isinstance(each, Mapping) for each in values) else values
        for fragment in fragments if isinstance(fragments, list) else ():
            if isinstance(fragment, list):
                self.add_all(fragment)
            else:
                self.add(fragment)

    def add(self, fragment: object) -> None:
        """Take one fragment, whatever it looks like."""
        if not isinstance(fragment, Mapping) or self._continues(fragment):
            return
        function = fragment.get("function")
        function = function if isinstance(function, Mapping) else {}
        name = _text(function.get("name")) or _text(fragment.get("name"))
        arguments = _arguments_text(_arguments_of(function, fragment))
        call_id = _text(fragment.get("id")).strip()
        index = _index_of(fragment.get("index"))
        call = self._call_for(index, call_id, name.strip(), arguments)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                return
            call = _Call()
            self._calls.append(call)
        if index is not None and len(self._by_index) < _MOST_KEYS:
            self._by_index[index] = call
        if call_id:
            call.id = call.id or call_id
            if len(self._by_id) < _MOST_KEYS:
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
        """The calls in order of arrival. `is_cut`: the output limit ended the stream, so the last one is not to run."""
        finished: list[ToolCall] = []
        # A call of which nothing came but an id or an index is noise.
        calls = [call for call in self._calls if call.name.strip() or "".join(call.pieces).strip()]
        for call in calls:
            finished.extend(self._finished(call, is_cut=is_cut and call is calls[-1]))
        return self._with_own_ids(finished)

    def _continues(self, fragment: Mapping[str, object]) -> bool:
        """Take a fragment of the common kind, which has an index and arguments alone; False if it is another."""
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

    def _call_for(self, index: object, call_id: str, name: str, arguments: str) -> _Call | None:
        """The call that a fragment continues, None if it opens one."""
        known = self._by_id.get(call_id) if call_id else None
        at_index = self._by_index.get(index) if index is not None else None
        if known is not None and at_index is not None and at_index.id == call_id:
            known = at_index
        if known is not None:
            if not name:
                return known
            if index is not None and at_index is None:
                # One id on parallel calls: the new index tells them apart.
                return None
            return None if self._opens_anew(known, name, arguments, same_index=at_index is known) else known
        if index is not None:
            call = at_index
            if call is None:
                # An index that counts the fragments: what can only be the middle of arguments goes on with them.
                last = self._calls[-1] if self._calls and not (call_id or name) else None
                goes_on = last is not None and bool(last.name and last.pieces) and not begins_object(arguments)
                return last if last is not None and goes_on and arguments and not is_whole(last.pieces) else None
        elif self._calls:
            call = self._calls[-1]
        else:
            return None
        if not name:
            if not call_id or not call.id:
                return call
            # A random id on each fragment: what is unfinished goes on; an id after the end opens the next call.
            goes_on = (bool(call.pieces) or index is not None) and not is_whole(call.pieces)
            return call if goes_on or (index is not None and not arguments.strip()) else None
        if call_id and call.id:
            is_same = name == call.name and not begins_object(arguments) and bool(arguments) and index is not None
            return call if is_same and call.pieces and not is_whole(call.pieces) else None
        return None if self._opens_anew(call, name, arguments, same_index=index is not None) else call

    def _opens_anew(self, call: _Call, name: str, arguments: str, *, same_index: bool) -> bool:
        """Whether a named fragment, which id or index give to `call`, is really another call."""
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
        # A whole call said twice is one call; `{}` is how some gateways open one.
        so_far = "".join(call.pieces).strip()
        return so_far not in {arguments.strip(), "{}"}

    def _finished(self, call: _Call, *, is_cut: bool) -> list[ToolCall]:
        name = tool_name(replace_lone(call.name), self._offered)
        extra: dict[str, object] = dict(call.extra)
        if call.function_extra:
            extra["function"] = call.function_extra
        extra = replace_lone_in(extra)
        tool = self._offered.get(name)
        raw = replace_lone("".join(call.pieces))
        if not name:
            return [
                ToolCall(id=call.id, name="unnamed", arguments="{}", fault="the call has no name", raw=raw, extra=extra)
            ]
        fault = "the answer reached its output limit within this call" if is_cut else None
        try:
            objects = read_arguments(call.pieces, tool.input_schema if tool is not None else None)
            texts = [json_text(each) for each in objects]
        except InvalidArguments as error:
            fault = f"{fault}: {error}" if fault else str(error)
            return [ToolCall(id=call.id, name=name, arguments="{}", fault=fault, raw=raw, extra=extra)]
        if call.name.strip() == _PARALLEL and tool is None and len(objects) == 1 and not fault:
            unpacked = self._unpacked(objects[0])
            if unpacked:
                return unpacked
        return [
            ToolCall(
                id=call.id if position == 0 else "",
                name=name,
                arguments=text,
                fault=fault,
                raw=raw if fault else None,
                extra=extra if position == 0 else {},
            )
            for position, text in enumerate(texts)
        ]

    def _unpacked(self, wrapped: Mapping[str, object]) -> list[ToolCall]:
        """The calls inside `multi_tool_use.parallel`; none if one of them is unclear."""
        uses = wrapped.get("tool_uses")
        if not isinstance(uses, list):
            return []
        calls: list[ToolCall] = []
        for use in uses:
            name = use.get("recipient_name") if isinstance(use, Mapping) else None
            parameters = use.get("parameters") if isinstance(use, Mapping) else None
            if not isinstance(name, str) or not isinstance(parameters, Mapping):
                return []
            try:
                arguments = json_text(parameters)
            except InvalidArguments:
                return []
            calls.append(ToolCall(id="", name=tool_name(name, self._offered), arguments=arguments))
        return calls

    def _with_own_ids(self, calls: list[ToolCall]) -> tuple[ToolCall, ...]:
        seen: set[str] = set()
        own: list[ToolCall] = []
        for call in calls:
            call_id = replace_lone(call.id)
            while not call_id or call_id in seen:
                call_id = self._new_id()
            seen.add(call_id)
            own.append(call if call.id == call_id else replace(call, id=call_id))
        return tuple(own)


def _joined_name(name: str, piece: str) -> str:
    """A name that comes whole again, grows, or comes in pieces."""
    if not name or piece.startswith(name):
        return piece
    return name if name.strip() == piece.strip() else name + piece


def _index_of(value: object) -> int | str | None:
    """A number in quotes, or with a fraction of nothing, is that number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def _arguments_of(*places: Mapping[str, object]) -> object:
    return next((place[key] for place in places for key in _ARGUMENTS if place.get(key) is not None), None)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def _arguments_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "["
