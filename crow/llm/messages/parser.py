"""Parses one answer of Anthropic's Messages: takes the data of events and returns deltas and one complete answer.

An answer is a list of blocks: text, thoughts, tool calls, and blocks of kinds that crow does not know. If there is
anything besides text and calls that later requests have to repeat, all blocks are stored as the items of the answer.
The parser does not rely on declared types: it uses known members if they have the right type and ignores everything
else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from crow.domain.errors import ContextOverflow, Overloaded, ProtocolError
from crow.domain.messages import FinishReason, JsonObject, ToolCall, ToolSpec, Usage, WireName
from crow.llm.errors import Origin
from crow.llm.items import Item, stored_items
from crow.llm.parser import AnswerParser
from crow.llm.tool_calls import CallAssembler, new_call_id
from crow.llm.usage import first_count

_Kind: TypeAlias = Literal["text", "thinking", "call", "other"]
_KINDS: Mapping[object, _Kind] = {"text": "text", "thinking": "thinking", "tool_use": "call"}
_DELTA_KINDS = (("text", "text_delta"), ("thinking", "thinking_delta"), ("partial_json", "input_json_delta"))
"""Members by which a delta without a type is recognised."""
_CALL_KEYS = frozenset({"type", "id", "name", "input"})
_MAX_BLOCKS = 10_000
_PARAGRAPH = "\n\n"


@dataclass(slots=True)
class _Block:
    """A block that is being received."""

    kind: _Kind
    index: object
    """The block's index in the stream, as `_key` returns it. None if the server sends none."""
    members: dict[str, object] = field(default_factory=dict)
    """The members that did not arrive in pieces, most of them at the start of the block."""
    growing: dict[str, list[str]] = field(default_factory=dict)
    """The pieces of members that arrive in several deltas, by member."""
    call: int = 0
    """The number of the call in the assembler."""
    has_words: bool = False
    """Whether text of the block, or a piece of its thought, has been shown."""
    thought_chars: int = 0
    """The length of the thought so far."""

    def add(self, key: str, piece: str) -> None:
        """Add a piece of the member `key`."""
        self.growing.setdefault(key, []).append(piece)

    def is_started_again_by(self, content: Mapping[str, object]) -> bool:
        """Return whether `content` starts this block a second time instead of a new one."""
        match self.kind:
            case "text":
                return not content.get("text")
            case "thinking":
                return not content.get("thinking") and "signature" not in self.growing
            case "call":
                is_named = bool(self.members.get("name")) and bool(content.get("id"))
                return is_named and content.get("id") == self.members.get("id")
            case "other":
                return content == self.members

    def whole(self) -> dict[str, object]:
        """Return all members of the block. Members that arrived in pieces are joined."""
        joined: dict[str, object] = {}
        for key, pieces in self.growing.items():
            before = self.members.get(key)
            joined[key] = "".join(pieces if not isinstance(before, str) else [before, *pieces])
        return {**self.members, **joined}


class MessagesParser(AnswerParser):
    """Parses the events of one answer. `is_done` means that `message_stop` arrived."""

    wire: ClassVar[WireName] = "messages"
    kind: ClassVar[str] = "a Messages stream"
    plain_ends: ClassVar[frozenset[str | None]] = frozenset({None, "end_turn", "tool_use", "stop_sequence"})

    def __init__(
        self, tools: Sequence[ToolSpec] = (), *, origin: Origin | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        super().__init__(tools, origin=origin, new_id=new_id)
        self._calls = CallAssembler(tools, new_id=new_id)
        self._blocks: list[_Block] = []
        """All blocks in order of arrival, except those beyond `_MAX_BLOCKS`."""
        self._open: dict[object, _Block] = {}
        """The blocks that have not ended, by index."""
        self._latest: dict[object, _Block] = {}
        """The newest block with each index, also if it has ended."""
        self._newest: dict[_Kind, _Block] = {}
        """The newest block of each kind."""
        self._started: dict[tuple[object, str], _Block] = {}
        """The tool calls by index and id, to notice a call that is started twice."""
        self._counts: dict[str, int] = {}
        self._stop_word: str | None = None
        self._explanation = ""
        self._opaque_chars = 0
        self._call_count = 0
        self._text_ends_in_words = False

    @property
    def is_finished(self) -> bool:
        """Whether a stop reason or `message_stop` announced the end. Usage may still follow."""
        return self.is_done or self._stop_word is not None

    @property
    def _size(self) -> int:
        return self._chars + self._calls.size + self._opaque_chars

    @property
    def _has_too_many_calls(self) -> bool:
        return self._calls.has_too_many

    @property
    def _end_word(self) -> str | None:
        return self._stop_word

    def _read_event(self, event: dict[str, object]) -> None:
        kind = event.get("type") or _kind_of(event)
        if kind == "content_block_delta":
            self._read_delta(event.get("index"), event.get("delta"))
        elif kind == "content_block_start":
            self._start_block(event.get("index"), event.get("content_block"))
        elif kind == "content_block_stop":
            self._open.pop(_key(event.get("index")), None)
        elif kind == "message_start":
            self._has_deltas = True  # the endpoint may charge for the answer from now on
            self._read_head(event.get("message"))
        elif kind == "message_delta":
            self._read_head(event.get("delta"))
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self._count(event.get("usage"))
            self.is_done = True
        elif kind == "message":
            self._read_message(event)
        elif kind != "ping" and not self.is_finished:
            # Events of unknown kinds are skipped unless they report an error.
            self._raise_error(event)
            self._refuse_other_wire(event)

    def _read_head(self, message: object) -> None:
        """Read what an event says about the whole answer: usage and the stop reason."""
        if not isinstance(message, Mapping):
            return
        self._count(message.get("usage"))
        word = message.get("stop_reason")
        if isinstance(word, str) and word.strip() and self._stop_word is None:
            self._stop_word = word.strip().lower()
        details = message.get("stop_details")
        words = details.get("explanation") if isinstance(details, Mapping) else None
        if isinstance(words, str):
            self._explanation = words.strip()

    def _read_message(self, message: dict[str, object]) -> None:
        """Read a whole answer, which came in one piece."""
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not self._blocks:  # else the server repeats the streamed answer at the end
            for block in content if isinstance(content, list) else ():
                self._start_block(None, block)
                self._open.clear()
        self._read_head(message)
        if message.get("error"):
            self._raise_error(message)
        self.is_done = True

    def _count(self, report: object) -> None:
        """Add a report of token counts. Reports are cumulative, so the newest count of each kind is used. A zero does
        not replace a count, because some servers fill in a count only at the start or only at the end."""
        for key, value in _counts_in(report).items():
            if value or key not in self._counts:
                self._counts[key] = value
        if self._counts:
            self._usage = _usage_of(self._counts)

    # Blocks

    def _start_block(self, index: object, content: object) -> None:
        if not isinstance(content, dict) or not isinstance(content.get("type"), str):
            return
        kind = _KINDS.get(content["type"], "other")
        known = self._open.get(_key(index))
        if known is not None and known.kind == kind and known.is_started_again_by(content):
            return
        if kind == "call":
            self._start_call(index, content)
            return
        block = self._new_block(kind, index, content)
        match kind:
            case "text":
                self._read_text(block, block.members.pop("text", None))
            case "thinking":
                signature = block.members.pop("signature", None)
                self._read_thought_of(block, block.members.pop("thinking", None))
                self._add_signature(block, signature)
            case "other":
                self._opaque_chars += _size_of(content)

    def _new_block(self, kind: _Kind, index: object, content: Mapping[str, object] | None = None) -> _Block:
        self._has_deltas = True
        block = _Block(kind, _key(index), dict(content or {"type": kind}))
        if len(self._blocks) < _MAX_BLOCKS:  # the text of further blocks is read, but it is not sent back as blocks
            self._blocks.append(block)
        self._newest[kind] = block
        self._open[block.index] = self._latest[block.index] = block
        return block

    def _at(self, index: object) -> _Block | None:
        """Return the newest block with this index. A proxy may send deltas after the end of their block."""
        return self._latest.get(_key(index))

    def _block(self, kind: _Kind, index: object) -> _Block:
        """Return the block of this kind that a delta continues. A delta without such a block opens one."""
        block = self._at(index)
        if block is not None and block.kind == kind:
            return block
        if index is None and self._blocks and self._blocks[-1].kind == kind:
            return self._blocks[-1]
        return self._new_block(kind, index)

    def _read_delta(self, index: object, delta: object) -> None:
        if not isinstance(delta, dict):
            return
        match delta.get("type") or next((kind for member, kind in _DELTA_KINDS if member in delta), None):
            case "text_delta":
                self._read_text(self._block("text", index), delta.get("text"))
            case "thinking_delta":
                self._read_thinking(self._block("thinking", index), delta)
            case "signature_delta":
                self._read_signature(index, delta.get("signature"))
            case "input_json_delta":
                self._read_input(index, delta.get("partial_json"))
            case "citations_delta":
                self._read_citation(index, delta.get("citation"))
            case _:
                self._read_other_delta(index, delta)

    def _read_text(self, block: _Block, text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        if not block.has_words and not text.isspace():
            block.has_words = True
            # Text after another kind of block is a new paragraph.
            if self._text_ends_in_words and self._is_after_other(block) and not text[0].isspace():
                self._content.append(_PARAGRAPH)
        self._content.append(text)
        block.add("text", text)
        self._text_ends_in_words = not text[-1].isspace()

    def _is_after_other(self, block: _Block) -> bool:
        """Return whether a block that is not text stands directly before `block`."""
        return len(self._blocks) > 1 and self._blocks[-1] is block and self._blocks[-2].kind != "text"

    def _read_thinking(self, block: _Block, delta: Mapping[str, object]) -> None:
        thought, signature = delta.get("thinking"), delta.get("signature")
        # Some gateways send the signature here, and a few repeat the whole thought with it. The lengths are compared
        # first, because joining the pieces for each signature would take quadratic time.
        is_repeated = bool(signature) and isinstance(thought, str) and len(thought) == block.thought_chars
        if not is_repeated or thought != "".join(block.growing.get("thinking", ())):
            self._read_thought_of(block, thought)
        self._add_signature(block, signature)

    def _read_thought_of(self, block: _Block, thought: object) -> None:
        if not isinstance(thought, str):
            return
        block.add("thinking", thought)
        block.thought_chars += len(thought)
        if thought:
            # Each block is a paragraph of its own.
            self._read_thought(thought if block.has_words or not self._has_thought else _PARAGRAPH + thought)
            block.has_words = True

    def _read_signature(self, index: object, signature: object) -> None:
        block = self._at(index)
        if block is None or block.kind != "thinking":
            block = self._newest.get("thinking")
        self._add_signature(block or self._new_block("thinking", index), signature)

    def _add_signature(self, block: _Block, signature: object) -> None:
        # A signature that comes twice is one signature.
        if isinstance(signature, str) and signature and block.growing.get("signature") != [signature]:
            block.add("signature", signature)
            self._opaque_chars += len(signature)

    def _start_call(self, index: object, content: Mapping[str, object]) -> None:
        same = (_key(index), str(content.get("id") or ""))
        known = self._started.get(same) if same[1] else None
        if known is None:
            known = self._started[same] = self._new_call(index, content)
        self._open[known.index] = self._latest[known.index] = known
        function: dict[str, object] = {"name": content.get("name")}
        arguments = content.get("input")
        if arguments not in ({}, None, ""):
            function["arguments"] = arguments
        self._calls.add({"index": known.call, "id": content.get("id"), "function": function})

    def _new_call(self, index: object, content: Mapping[str, object] | None = None) -> _Block:
        block = self._new_block("call", index, content)
        self._call_count += 1
        block.call = self._call_count
        return block

    def _read_input(self, index: object, piece: object) -> None:
        if not isinstance(piece, str):
            return
        block = self._at(index)
        if block is not None and block.kind == "other":
            block.add("input", piece)
            self._opaque_chars += len(piece)
            return
        if block is None or block.kind != "call":
            block = self._newest.get("call")
        block = block or self._new_call(index)
        self._calls.add({"index": block.call, "function": {"arguments": piece}})

    def _read_citation(self, index: object, citation: object) -> None:
        block = self._block("text", index)
        if isinstance(citation, Mapping):
            known = block.members.get("citations")
            if not isinstance(known, list):
                block.members["citations"] = known = []
            known.append(citation)
            self._opaque_chars += _size_of(citation)

    def _read_other_delta(self, index: object, delta: Mapping[str, object]) -> None:
        """Keep the members of a delta of an unknown kind in its block."""
        block = self._at(index)
        if block is None or block.kind != "other":
            return
        for key, value in delta.items():
            if key == "type":
                continue
            self._opaque_chars += len(key) + _size_of(value)
            if isinstance(value, str):
                block.add(key, value)
            else:
                block.members[key] = value

    # The end

    def _finish_reason(self) -> FinishReason:
        who, word = self._origin.endpoint, self._stop_word
        if word is None and not self.is_done:
            raise ProtocolError(f"The answer from {who} broke off: the stream ended without a stop reason.")
        match word:
            case "max_tokens" | "length":  # LiteLLM sends `length` for some models
                return "length"
            case "model_context_window_exceeded":
                if not (self._text.getvalue().strip() or self._calls):
                    raise ContextOverflow(f'The request is too long for the model (stop reason "{word}").')
                return "length"
            case "pause_turn":
                return "paused"
            case "refusal" | "content_filter":
                self._explain_refusal()
                return "refusal"
            case "error" | "failed" | "aborted" | "cancelled" | "overloaded_error" | "api_error":
                raise Overloaded(f'{who} stopped before the answer was complete (stop reason "{word}").')
        return "stop"

    def _explain_refusal(self) -> None:
        """Add the provider's explanation to the text, where the user can read it."""
        if self._explanation:
            before = _PARAGRAPH if self._text.getvalue().strip() else ""
            self._add_text(self._detector.feed(before + self._explanation))

    def _finish_calls(self, *, is_cut: bool) -> tuple[ToolCall, ...]:
        return self._calls.finish(is_cut=is_cut)

    def _opaque(self) -> JsonObject:
        blocks = self._in_order()
        finish, calls = self._ending or ("stop", ())
        # If crow has split, joined or dropped a call, no item stands for a call. Requests then send all calls after the
        # other blocks.
        has_calls = sum(block.kind == "call" for block in blocks) == len(calls)
        is_cut = finish in {"length", "refusal"}
        items: list[Item] = []
        for block in blocks:
            match block.kind:
                case "call":
                    if has_calls:
                        members = {key: value for key, value in block.members.items() if key not in _CALL_KEYS}
                        items.append(Item(data={"type": "tool_use", **members}, call=block.call - 1))
                case "thinking" if is_cut and block is blocks[-1] and "signature" not in block.growing:
                    pass  # incomplete reasoning has no signature, and the endpoint would refuse it
                case _:
                    items.append(Item(data=_with_input(block.whole())))
        return {} if _are_plain(items) else stored_items(items)

    def _in_order(self) -> list[_Block]:
        """Return the blocks in the order of their indexes. If an index is missing or repeated, return the blocks in
        order of arrival."""
        indexes = [block.index for block in self._blocks]
        if all(type(index) is int for index in indexes) and len(set(indexes)) == len(indexes):
            return sorted(self._blocks, key=lambda block: int(str(block.index)))
        return self._blocks


def _are_plain(items: Sequence[Item]) -> bool:
    """Return whether the items are only text, followed by calls. They need not be stored then, because messages without
    items are sent in this order, too."""
    kinds = [str(item.data.get("type")) for item in items]
    has_more = any(
        value is not None for item in items for key, value in item.data.items() if key not in {"type", "text"}
    )
    return not has_more and {"text", "tool_use"}.issuperset(kinds) and kinds == sorted(kinds)


def _kind_of(event: Mapping[str, object]) -> str:
    """Return the kind of an event that does not state its kind."""
    if isinstance(event.get("content_block"), Mapping):
        return "content_block_start"
    if isinstance(event.get("message"), Mapping):
        return "message_start"
    if isinstance(delta := event.get("delta"), Mapping):
        return "message_delta" if "stop_reason" in delta else "content_block_delta"
    if isinstance(event.get("content"), list) and event.get("role") == "assistant":
        return "message"
    return ""


def _key(index: object) -> object:
    """Return the key of a block with this index: a number, also if the server sent it as text or as 1.0."""
    if isinstance(index, str) and index.isdecimal() and len(index) < 10:
        return int(index)
    return index if isinstance(index, (int, float, str)) else None


def _with_input(block: dict[str, object]) -> dict[str, object]:
    """Return the block with its input decoded. The input of a call that the server runs itself arrives as pieces of
    JSON."""
    if isinstance(block.get("input"), str):
        try:
            block["input"] = json.loads(str(block["input"]))
        except (ValueError, RecursionError):
            block["input"] = {}
    return block


def _size_of(value: object) -> int:
    return len(str(value))


def _counts_in(report: object) -> dict[str, int]:
    """Return the token counts in one report."""
    if not isinstance(report, Mapping):
        return {}
    writes = report.get("cache_creation")
    found = {
        "fresh": first_count(report, "input_tokens", "prompt_tokens"),
        "read": first_count(report, "cache_read_input_tokens"),
        "written": first_count(report, "cache_creation_input_tokens"),
        "made": first_count(report, "output_tokens", "completion_tokens"),
        "thought": first_count(report.get("output_tokens_details"), "thinking_tokens", "reasoning_tokens"),
    }
    if found["written"] is None and isinstance(writes, Mapping):
        found["written"] = sum(first_count(writes, key) or 0 for key in writes if str(key).endswith("input_tokens"))
    return {key: value for key, value in found.items() if value is not None}


def _usage_of(counts: Mapping[str, int]) -> Usage:
    """Return the counts as crow's usage. Anthropic's input count does not include the tokens that were read from the
    cache or written to it."""
    fresh = counts.get("fresh")
    return Usage(
        input_tokens=None if fresh is None else fresh + counts.get("read", 0) + counts.get("written", 0),
        output_tokens=counts.get("made"),
        cached_tokens=counts.get("read"),
        reasoning_tokens=counts.get("thought"),
        cache_write_tokens=counts.get("written"),
    )
