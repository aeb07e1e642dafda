"""Parses one streamed response: takes the data of events and returns deltas and one complete answer.

Servers repeat what they stream: each delta is followed by events with the whole text, the whole part, the whole item
and the whole response. A server may leave any of them out, send them twice, or number items differently. So the parser
takes from each event only those parts that have not arrived yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from crow.domain.errors import ContextOverflow, Overloaded, ProtocolError
from crow.domain.messages import FinishReason, JsonObject, ToolCall, ToolSpec, WireName
from crow.llm.arguments import json_text
from crow.llm.errors import ErrorBody, Origin, find_error, model_error
from crow.llm.items import Item, stored_items
from crow.llm.parser import AnswerParser
from crow.llm.responses.output import CALL_TYPES, Output, Outputs, Part, freeform_property, text_parts
from crow.llm.tool_calls import PartialCall, finished_calls, new_call_id, tool_name
from crow.llm.usage import read_usage

_TEXT, _ARGUMENTS, _INPUT = (
    "response.output_text.delta",
    "response.function_call_arguments",
    "response.custom_tool_call_input",
)
_DELTAS = frozenset(
    {
        *(_TEXT, f"{_ARGUMENTS}.delta", "response.reasoning_summary_text.delta", "response.reasoning_text.delta"),
    }
)
"""The kinds of events that may come thousands of times in an answer. They are read on a faster path."""

_RECENT = 100
"""At least this many events are remembered, to notice those that a server sends twice."""

_ENDS = {
    "response.completed": "completed",
    "response.done": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
    "response.cancelled": "cancelled",
}
"""Events that end a response, each with the response's status if the event states none."""

_NEEDS_OUTPUT = frozenset(
    {"local_shell_call", "shell_call", "apply_patch_call", "computer_call", "mcp_approval_request"}
)
"""Types of items that ask the client for a result, unless the answer contains the server's own result. Crow offers none
of these tools, so it cannot answer such an item. A request that repeats the item without a result would be refused."""


class ResponsesParser(AnswerParser):
    """Parses the events of one response. `is_done` means that an event ended the response, or that `[DONE]` arrived."""

    wire: ClassVar[WireName] = "responses"
    kind: ClassVar[str] = "a response"
    plain_ends: ClassVar[frozenset[str | None]] = frozenset({None, "completed"})

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__(tools, origin=origin, new_id=new_id)
        self._offered = {tool.name: tool for tool in tools}
        self._new_id = new_id
        self._outputs = Outputs()
        self._hash = 0
        """The hash of the data of the event that is being read."""
        self._recent: dict[int, int] | None = {}
        """The hashes of the newest events, by sequence number. None once two different events have had the same
        number."""
        self._older: dict[int, int] = {}
        """The hashes of the events before those in `_recent`."""
        self._open: Part | Output | None = None
        """The part or call to which the last event added a piece. None if the next delta must look up its part or
        call."""
        self._open_at: tuple[object, ...] | None = None
        """The kind, item id and indexes of that event. A delta with the same values continues `_open`."""
        self._status: str | None = None
        self._reason: str | None = None
        self._made: dict[PartialCall, int] = {}
        """For each `PartialCall`, the index of its first call among the calls of the answer."""

    @property
    def is_finished(self) -> bool:
        return self.is_done or self._status is not None

    @property
    def _size(self) -> int:
        return self._chars + self._outputs.size

    @property
    def _has_too_many_calls(self) -> bool:
        return self._outputs.has_too_many_calls

    @property
    def _end_word(self) -> str | None:
        return self._reason or self._status

    def _read(self, event_data: str) -> None:
        self._hash = hash(event_data)
        super()._read(event_data)

    def _read_event(self, event: dict[str, object]) -> None:
        number = event.get("sequence_number")
        if type(number) is int and self._recent is not None and self._is_repeated(number):
            return
        kind = event.get("type")
        if type(kind) is str and kind in _DELTAS:
            self._read_delta(kind, event)
        elif type(kind) is str:
            self._open = None
            self._read_kind(kind, event)
        elif type(event.get("output")) is list or event.get("object") == "response":
            self._read_end(event, str(event.get("status") or "completed"))
        else:
            self._raise_error(event)
            self._refuse_other_wire(event)

    def _read_delta(self, kind: str, event: dict[str, object]) -> None:
        """Read a piece of text, reasoning or a call's arguments. Most pieces continue the piece before them."""
        piece, known = event.get("delta"), self._open
        at = (
            kind,
            event.get("item_id"),
            event.get("output_index"),
            event.get("content_index"),
            event.get("summary_index"),
        )
        if known is None or at != self._open_at or type(piece) is not str:
            self._open_at = at
            if kind == _TEXT:
                self._open = self._read_text(event, "output_text", piece)
            elif kind == f"{_ARGUMENTS}.delta":
                self._open = self._read_input(kind, event)
            else:
                self._open = self._read_reasoning(kind, event)
        elif type(known) is Output:
            self._outputs.add_input(known, piece)
        elif type(known) is Part:
            known.pieces.append(piece)
            if kind == _TEXT:
                self._content.append(piece)
            else:
                self._read_thought(piece)

    def _is_repeated(self, number: int) -> bool:
        """Return whether this event has arrived before. If two different events have the same number, the numbers mean
        nothing, and no later event counts as repeated."""
        assert self._recent is not None
        # Wrongly framed data may contain several events. Each of them gets a hash of its own.
        found, self._hash = self._hash, self._hash + 1
        known = self._recent.get(number, self._older.get(number))
        if known is None:
            self._recent[number] = found
            if len(self._recent) > _RECENT:
                self._recent, self._older = {}, self._recent
        elif known == found:
            return True
        else:
            self._recent, self._older = None, {}
        return False

    def _read_kind(self, kind: str, event: dict[str, object]) -> None:
        """Read an event that is not a delta of the answer's text. Unknown events are skipped."""
        if kind in _ENDS:
            response = event.get("response")
            self._read_end(response if isinstance(response, dict) else event, _ENDS[kind])
        elif kind in {"error", "response.error"} or (event.get("error") and not kind.startswith("response.")):
            self._raise_error(event)
        elif kind in {"response.output_item.added", "response.output_item.done"}:
            item = event.get("item")
            if isinstance(item, dict):
                self._read_item(item, event, is_done=kind.endswith("done"))
        elif kind in {"response.content_part.added", "response.content_part.done"}:
            part = event.get("part")
            if isinstance(part, dict) and kind.endswith("done"):
                self._read_part(part, event)
        elif "reasoning" in kind:
            self._read_reasoning(kind, event)
        elif kind == "response.output_text.done":
            self._read_text(event, "output_text", event.get("text"), is_end=True)
        elif kind.startswith("response.refusal."):
            is_end = kind.endswith(".done")
            self._read_text(event, "refusal", event.get("refusal" if is_end else "delta"), is_end=is_end)
        elif kind.startswith((_ARGUMENTS, _INPUT)):
            self._read_input(kind, event)
        elif isinstance(response := event.get("response"), dict):
            self._has_deltas = True  # the endpoint may charge for the answer from now on
            self._add_usage(read_usage(response.get("usage")))
            if response.get("error"):
                self._raise_error(response)

    def _read_text(
        self, event: JsonObject, kind: str, text: object, *, is_end: bool = False, output: Output | None = None
    ) -> Part | None:
        """Add a piece of a text. If `is_end` is set, `text` is the whole text, and its missing end is added. Return the
        part if more pieces may follow, else None."""
        if type(text) is not str:
            return None
        output = output or self._outputs.find(event, "message")
        part = output.part(event.get("content_index"), kind)
        if is_end or not part.is_whole:
            self._show(output, part, part.missing_of(text) if is_end else text)
        part.is_whole = part.is_whole or is_end
        return None if part.is_whole else part

    def _show(self, output: Output, part: Part, text: str) -> None:
        if not text:
            return
        self._has_deltas = True
        if part.kind == "refusal":
            self._is_refused = True
        if not output.has_text:
            output.has_text = True
            if self._outputs.has_text:
                # Two messages of one answer are two paragraphs.
                self._content.append("\n\n")
            self._outputs.has_text = True
        part.pieces.append(text)
        self._content.append(text)

    def _read_part(self, part: Mapping[str, object], event: JsonObject, output: Output | None = None) -> None:
        """Read a whole part, which belongs to `output` or to the item that the event names."""
        kind = str(part.get("type"))
        if kind in {"output_text", "text"}:
            self._read_text(event, "output_text", part.get("text"), is_end=True, output=output)
        elif kind == "refusal":
            self._read_text(event, "refusal", part.get("refusal"), is_end=True, output=output)
        elif kind in {"reasoning_text", "summary_text"}:
            self._read_reasoning(f"response.{kind}.done", {**event, "text": part.get("text")})

    def _read_reasoning(self, kind: str, event: JsonObject) -> Part | None:
        """Read a piece of reasoning or of its summary. If an item has both, only the kind that arrived first is shown.
        Return the part if its pieces are shown and more may follow, else None."""
        is_end = kind.endswith(".done")
        text = event.get("delta") or event.get("part") or event.get("text")
        if isinstance(text, Mapping):
            text = text.get("text")
        if type(text) is not str or not text:
            return None
        form = "summary" if "summary" in kind else "content"
        output = self._outputs.find(event, "reasoning")
        index = event.get("summary_index") if form == "summary" else event.get("content_index")
        part = output.part(index, form)
        self._think(output, part, text, is_end=is_end)
        return part if output.shown == form and not part.is_whole else None

    def _think(self, output: Output, part: Part, text: str, *, is_end: bool) -> None:
        text = part.missing_of(text) if is_end else "" if part.is_whole else text
        part.is_whole = part.is_whole or is_end
        if not text:
            return
        self._has_deltas = True
        is_new = not part.pieces
        part.pieces.append(text)
        output.shown = output.shown or part.kind
        if output.shown == part.kind:
            # Two parts of a summary are two paragraphs.
            self._read_thought(f"\n\n{text}" if is_new and self._outputs.has_thought else text)
            self._outputs.has_thought = True

    def _read_input(self, kind: str, event: JsonObject) -> Output:
        """Read a piece of the input of a call, or its whole input. Return the call."""
        is_custom = kind.startswith(_INPUT)
        output = self._outputs.find(event, "custom_tool_call" if is_custom else "function_call")
        self._has_deltas = True
        if kind.endswith(".done"):
            whole = event.get("input") if is_custom else event.get("arguments")
            self._outputs.complete_call(output, {**event, "arguments": whole})
        else:
            self._outputs.add_input(output, event.get("delta"))
        return output

    def _read_item(self, item: dict[str, object], event: JsonObject, *, is_done: bool) -> None:
        """Read an item at its start or at its end."""
        kind = item.get("type")
        if type(kind) is not str:
            return
        output = self._outputs.open(item, event, is_done=is_done)
        if output is not None:
            self._read_into(output, item, is_done=is_done)

    def _read_into(self, output: Output, item: JsonObject, *, is_done: bool) -> None:
        """Add to an output those parts of `item` that have not arrived yet."""
        kind = output.kind
        self._has_deltas = True
        if kind in CALL_TYPES:
            whole = item.get("input") if kind == "custom_tool_call" else item.get("arguments")
            self._outputs.complete_call(output, {**item, "arguments": whole}, is_done=is_done)
        elif kind == "message" and is_done:
            for index, part in enumerate(text_parts(item)):
                self._read_part(part, {"content_index": index}, output)
        elif kind == "reasoning" and is_done:
            for form, member in (("content", item.get("content")), ("summary", item.get("summary"))):
                for index, part in enumerate(member if isinstance(member, list) else ()):
                    text = part.get("text") if isinstance(part, Mapping) else part
                    if type(text) is str and (output.shown in {None, form}):
                        self._think(output, output.part(index, form), text, is_end=True)
        if is_done:
            self._outputs.close(output, item)

    def _read_end(self, response: dict[str, object], status: str) -> None:
        """Read the whole response at its end."""
        if self.is_finished:
            return
        stated = response.get("status")
        status = stated if isinstance(stated, str) and stated not in {"in_progress", "queued"} else status
        output = response.get("output")
        for item, known in self._outputs.unread(output if isinstance(output, list) else ()):
            self._read_into(known, item, is_done=True)
        self._add_usage(read_usage(response.get("usage")))
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, Mapping) else None
        self._reason = reason if isinstance(reason, str) else None
        if status == "failed" or (response.get("error") and status != "completed"):
            self.error_body = find_error(response) or ErrorBody(message=self._reason or "", code="server_error")
            raise model_error(self.error_body, self._origin)
        self._status = status
        self.is_done = True

    def _raise_error(self, event: object) -> None:
        if not self.is_finished:
            super()._raise_error(event)

    def _finish_reason(self) -> FinishReason:
        who, status, reason = self._origin.endpoint, self._status, self._reason
        if status is None and not self.is_done:
            raise ProtocolError(f"The answer from {who} broke off: the stream ended before the response was complete.")
        if status in {"cancelled", "canceled"}:
            raise Overloaded(f'{who} stopped before the answer was complete (status "{status}").')
        if status == "incomplete" and not self._is_refused:
            word = (reason or "").lower()
            if "content_filter" in word or "safety" in word:
                return "refusal"
            if "context" in word:
                raise ContextOverflow(f'The request is too long for the model (reason "{reason}").')
            return "length"
        return "refusal" if self._is_refused else "stop"

    def _finish_calls(self, *, is_cut: bool) -> tuple[ToolCall, ...]:
        answered = self._answered()
        outputs = [each for each in self._outputs.in_order() if each.call is not None and each.call.id not in answered]
        calls: list[PartialCall] = []
        for each in outputs:
            assert each.call is not None
            if each.early and not "".join(each.call.pieces).strip():
                each.call.pieces = [each.early]
            if each.kind == "custom_tool_call":
                tool = self._offered.get(tool_name(each.call.name, self._offered))
                text = "".join(each.call.pieces)
                # A server may also send the JSON arguments of an ordinary tool in this form.
                if tool is None or tool.freeform is not None or not text.lstrip().startswith("{"):
                    text = json_text({freeform_property(tool): text})
                each.call = PartialCall(id=each.call.id, name=each.call.name, pieces=[text])
            calls.append(each.call)
        last = outputs[-1] if outputs else None
        cut = last.call if last is not None and is_cut and not last.is_whole else None
        finished = finished_calls(calls, self._offered, new_id=self._new_id, cut=cut)
        for index, (partial, _) in enumerate(finished):
            self._made.setdefault(partial, index)
        return tuple(call for _, call in finished)

    def _answered(self) -> frozenset[str]:
        """Return the ids of the calls that the server has run itself: their results are items of the answer."""
        done = (each.data for each in self._outputs.in_order() if each.data and each.kind.endswith("_output"))
        return frozenset(call_id for data in done if (call_id := _call_id(data)))

    def _opaque(self) -> JsonObject:
        items: list[Item] = []
        answered = self._answered()
        for output in self._outputs.in_order():
            data = output.data
            is_answered = data is not None and _call_id(data) in answered
            if data is None or (output.kind in _NEEDS_OUTPUT and not is_answered):
                continue
            if output.call is None or is_answered:
                items.append(Item(data=data))
            elif (index := self._made.get(output.call)) is not None:
                kept = {key: value for key, value in data.items() if key not in CALL_TYPES[output.kind]}
                items.append(Item(data=kept, call=index))
        return stored_items(items)


def _call_id(item: JsonObject) -> str:
    call_id = item.get("call_id")
    return call_id if isinstance(call_id, str) else ""
