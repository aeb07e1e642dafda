"""Measures the parser in µs per chunk and the encoder in µs per request.

Requests have 10 to 10,000 messages. Each figure is the best of several rounds, next to a floor from the same run
(`json.loads` alone, a plain join).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

from benchmarks.rows import Row, arguments, report
from crow.domain.messages import AssistantMessage, Message, SystemMessage, Text, ToolSpec, UserMessage
from crow.llm import Request
from crow.llm.chat.encode import Encoder
from crow.llm.chat.parser import StreamParser
from crow.llm.dialect import Dialect
from crow.llm.sse import SseDecoder

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


def read(stream: list[bytes]) -> None:
    decoder, parser = SseDecoder(), StreamParser((TOOL,))
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


def conversation(messages: int) -> tuple[Message, ...]:
    turns: list[Message] = [SystemMessage(text="Be brief. " * 200)]
    for number in range(messages // 2):
        turns.append(UserMessage(parts=(Text(text=f"Question {number}: " + "words " * 100),)))
        turns.append(AssistantMessage(text=f"Answer {number}: " + "words " * 300))
    return (*turns, UserMessage(parts=(Text(text="Next?"),)))


def encode(messages: tuple[Message, ...], encoder: Encoder | None = None, times: int = 1) -> bytes:
    """The last body. Without `encoder` a new one is used."""
    encoder, sent = encoder or Encoder(), b""
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
        messages, kept = conversation(count), Encoder()
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
    report([*chunks(), *requests()], arguments(__doc__).parse_args().json)
