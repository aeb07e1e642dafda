"""Measures the parsers in µs per chunk and the encoders in µs per request, on each wire.

Requests have 10 to 10,000 messages. Each figure is the best of several rounds, next to a floor from the same run: for
Chat Completions `json.loads` alone or a plain join, for the other wires the same answer or request on Chat Completions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

from benchmarks.rows import Row, arguments, report
from crow.domain.messages import AssistantMessage, Message, SystemMessage, Text, ToolSpec, UserMessage, WireName
from crow.llm import Request
from crow.llm.chat.encode import ChatEncoder
from crow.llm.dialect import Dialect
from crow.llm.sse import SseDecoder
from crow.llm.wires import AnyEncoder, wire_named

CHUNKS = 20_000
ROUNDS = 5
TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}})


def times_us(function: Callable[[], object], times: int) -> list[float]:
    """µs per item, one figure for each round; `function` processes `times` items."""
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        took.append((time.perf_counter() - started) / times * 1e6)
    return took


def best(what: str, function: Callable[[], object], times: int, floor_us: float) -> Row:
    """The best round: other programs can only make a round slower."""
    took = times_us(function, times)
    return Row(what, min(took), max(took), "µs", floor=floor_us)


def chunk(delta: dict[str, object]) -> bytes:
    event = {
        "id": "chatcmpl-0123456789",
        "object": "chat.completion.chunk",
        "created": 1_795_000_000,
        "model": "some-model",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def read(stream: list[bytes], wire: WireName = "chat") -> None:
    decoder, parser = SseDecoder(), wire_named(wire).parser((TOOL,))
    for piece in stream:
        parser.feed(decoder.feed(piece))


def floor(events: list[str]) -> None:
    for event in events:
        json.loads(event)


def chunks() -> list[Row]:
    kinds: dict[str, Callable[[int], dict[str, object]]] = {
        "text": lambda number: {"content": f" {number}"},
        "text, not ASCII": lambda number: {"content": f" ö{number}"},
        "reasoning": lambda number: {"reasoning_content": f" {number}"},
        "arguments": lambda number: {"tool_calls": [{"index": 0, "function": {"arguments": f"{number},"}}]},
    }
    rows = []
    for name, delta in kinds.items():
        # the pieces differ, because crow cuts off an answer that repeats itself
        pieces = [chunk(delta(number)) for number in range(CHUNKS)]
        first = chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "read_file"}}]})
        stream = [first, *pieces] if name == "arguments" else pieces
        events = [piece[6:-2].decode() for piece in pieces]
        lowest = min(times_us(partial(floor, events), CHUNKS))
        rows.append(best(f"parse a chunk: {name}", partial(read, stream), CHUNKS, lowest))
    pieces = [chunk(kinds["text"](number)) for number in range(CHUNKS)]
    lowest = min(times_us(partial(floor, [piece[6:-2].decode() for piece in pieces]), CHUNKS))
    return [*rows, best("parse a chunk: text, all in one read", partial(read, [b"".join(pieces)]), CHUNKS, lowest)]


def events_of(wire: WireName, kind: str, words: list[str]) -> list[bytes]:
    """An answer on a wire, whose pieces are of one kind: `text`, `reasoning` or `arguments`."""
    if wire == "chat":
        members = {"text": "content", "reasoning": "reasoning_content"}
        function = {"name": "read_file"}
        start = chunk({"tool_calls": [{"index": 0, "id": "a", "function": function}]})
        if kind == "arguments":
            return [start, *(chunk({"tool_calls": [{"index": 0, "function": {"arguments": word}}]}) for word in words)]
        return [chunk({members[kind]: word}) for word in words]
    return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in _EVENTS[wire](kind, words)]


def responses_events(kind: str, words: list[str]) -> list[dict[str, object]]:
    names = {"text": "output_text", "reasoning": "reasoning_summary_text", "arguments": "function_call_arguments"}
    items = {"text": "message", "reasoning": "reasoning", "arguments": "function_call"}
    item = {"id": "item_0123456789", "type": items[kind], "call_id": "a", "name": "read_file"}
    where = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    start: dict[str, object] = {"type": "response.output_item.added", "output_index": 0, "item": item}
    delta = {"type": f"response.{names[kind]}.delta", **where}
    pieces = ({**delta, "sequence_number": at, "delta": word} for at, word in enumerate(words, 1))
    return [{**start, "sequence_number": 0}, *pieces]


def messages_events(kind: str, words: list[str]) -> list[dict[str, object]]:
    names = {"text": "text", "reasoning": "thinking", "arguments": "partial_json"}
    blocks = {"text": "text", "reasoning": "thinking", "arguments": "tool_use"}
    deltas = {"text": "text_delta", "reasoning": "thinking_delta", "arguments": "input_json_delta"}
    block = {"type": blocks[kind], "text": "", "id": "a", "name": "read_file", "input": {}}
    pieces = ({"type": deltas[kind], names[kind]: word} for word in words)
    return [
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": piece} for piece in pieces),
    ]


_EVENTS = {"responses": responses_events, "messages": messages_events}


def chunks_of_other_wires() -> list[Row]:
    """The parsers of the other wires, compared with that of Chat Completions in alternating rounds."""
    rows, words = [], [f" {number}" for number in range(CHUNKS)]
    for kind in ("text", "reasoning", "arguments"):
        for is_one in (False, True):
            streams = {wire: events_of(wire, kind, words) for wire in ALL}
            took: dict[WireName, list[float]] = {wire: [] for wire in streams}
            for _ in range(ROUNDS):
                for wire, events in streams.items():
                    began = time.process_time()
                    read([b"".join(events)] if is_one else events, wire)
                    took[wire].append((time.process_time() - began) / CHUNKS * 1e6)
            for wire in OTHERS:
                what = f"parse a chunk on {wire}: {kind}{', all in one read' if is_one else ''}"
                rows.append(Row(what, min(took[wire]), max(took[wire]), "µs", floor=min(took["chat"])))
    return rows


OTHERS: tuple[WireName, ...] = ("responses", "messages")
ALL: tuple[WireName, ...] = ("chat", *OTHERS)


def encode_again(encoder: AnyEncoder, wire: WireName, messages: tuple[Message, ...], times: int) -> None:
    request, dialect = Request(messages=messages, tools=(TOOL,)), Dialect(wires=(wire,))
    for _ in range(times):
        encoder.body(request, model="m", endpoint="here m", dialect=dialect, limit=1000)


def requests_on_other_wires() -> list[Row]:
    """The encoders of the other wires, compared with that of Chat Completions in alternating rounds."""
    rows, times = [], 100
    for count in (10, 1_000):
        messages = conversation(count)
        kept = {wire: wire_named(wire).encoder() for wire in ALL}
        took: dict[WireName, list[float]] = {wire: [] for wire in ALL}
        for _ in range(ROUNDS):
            for wire, encoder in kept.items():
                began = time.process_time()
                encode_again(encoder, wire, messages, times)
                took[wire].append((time.process_time() - began) / times * 1e6)
        for wire in OTHERS:
            what = f"encode the next request of {count:,} messages on {wire}"
            rows.append(Row(what, min(took[wire]), max(took[wire]), "µs", floor=min(took["chat"])))
    return rows


def conversation(messages: int) -> tuple[Message, ...]:
    turns: list[Message] = [SystemMessage(text="Be brief. " * 200)]
    for number in range(messages // 2):
        turns.append(UserMessage(parts=(Text(text=f"Question {number}: " + "words " * 100),)))
        turns.append(AssistantMessage(text=f"Answer {number}: " + "words " * 300))
    return (*turns, UserMessage(parts=(Text(text="Next?"),)))


def encode(messages: tuple[Message, ...], encoder: ChatEncoder | None = None, times: int = 1) -> bytes:
    """The last body. Without `encoder` a new one is used."""
    encoder, sent = encoder or ChatEncoder(), b""
    for _ in range(times):
        request = Request(messages=messages, tools=(TOOL,))
        sent = encoder.body(request, model="m", endpoint="here m", dialect=Dialect(), limit=1000)
    return sent


def join(sent: list[bytes], times: int) -> None:
    for _ in range(times):
        b",".join(sent)


def requests() -> list[Row]:
    rows = []
    for count in (10, 100, 1_000, 10_000):
        messages, kept = conversation(count), ChatEncoder()
        size = len(encode(messages, kept))
        sent = kept.messages(messages, endpoint="here m", dialect=Dialect())
        lowest = min(times_us(partial(join, sent, 100), 100))
        what = f"encode a request of {count:,} messages ({size / 1e6:.2f} MB)"
        rows += [
            best(f"{what}, first", partial(encode, messages), 1, lowest),
            best("  the next one", partial(encode, messages, kept, 100), 100, lowest),
        ]
    return rows


if __name__ == "__main__":
    report(
        [*chunks(), *chunks_of_other_wires(), *requests(), *requests_on_other_wires()],
        arguments(__doc__).parse_args().json,
    )
