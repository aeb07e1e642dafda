"""What crow adds between an endpoint's bytes and the agent: µs a chunk, and µs a request of so many messages.

Figures only, each the best of several rounds beside the floor of the same run (`json.loads` alone, a plain join).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from benchmarks.rows import Row, arguments, report
from crow.domain.messages import AssistantMessage, Message, SystemMessage, Text, ToolSpec, UserMessage
from crow.llm import Request
from crow.llm.dialect import Dialect
from crow.llm.encode import Encoder
from crow.llm.parser import StreamParser
from crow.llm.sse import SseDecoder

CHUNKS = 20_000
ROUNDS = 5
TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}})


def times_us(function: Callable[[], object], times: int) -> list[float]:
    """µs for one of `times` things that `function` does, in each round."""
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        took.append((time.perf_counter() - started) / times * 1e6)
    return took


def best(what: str, function: Callable[[], object], times: int, floor_us: float) -> Row:
    """The best round counts: whatever else runs can only make it longer."""
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
    kinds = {
        "text": {"content": " word"},
        "text, not ASCII": {"content": " wörd"},
        "reasoning": {"reasoning_content": " word"},
        "arguments": {"tool_calls": [{"index": 0, "function": {"arguments": "abc"}}]},
    }
    rows = []
    for name, delta in kinds.items():
        piece = chunk(delta)
        first = chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "read_file"}}]})
        stream = [first, *[piece] * CHUNKS] if name == "arguments" else [piece] * CHUNKS
        events = [piece[6:-2].decode()] * CHUNKS
        lowest = min(times_us(lambda events=events: floor(events), CHUNKS))
        rows.append(best(f"parse a chunk: {name}", lambda stream=stream: read(stream), CHUNKS, lowest))
    burst = [b"".join([chunk(kinds["text"])] * CHUNKS)]
    lowest = min(times_us(lambda: floor([chunk(kinds["text"])[6:-2].decode()] * CHUNKS), CHUNKS))
    return [*rows, best("parse a chunk: text, all in one read", lambda: read(burst), CHUNKS, lowest)]


def conversation(messages: int) -> tuple[Message, ...]:
    turns: list[Message] = [SystemMessage(text="Be brief. " * 200)]
    for number in range(messages // 2):
        turns.append(UserMessage(parts=(Text(text=f"Question {number}: " + "words " * 100),)))
        turns.append(AssistantMessage(text=f"Answer {number}: " + "words " * 300))
    return (*turns, UserMessage(parts=(Text(text="Next?"),)))


def requests() -> list[Row]:
    rows = []
    for count in (10, 100, 1_000, 10_000):
        messages = conversation(count)

        def body(encoder: Encoder, messages: tuple[Message, ...] = messages) -> bytes:
            request = Request(messages=messages, tools=(TOOL,))
            return encoder.body(request, model="m", endpoint="here m", dialect=Dialect(), limit=1000)

        kept = Encoder()
        size = len(body(kept))
        sent = kept.messages(messages, endpoint="here m", dialect=Dialect())
        join = min(times_us(lambda sent=sent: [b",".join(sent) for _ in range(100)], 100))
        what = f"encode a request of {count:,} messages ({size / 1e6:.2f} MB)"
        rows += [
            best(f"{what}, first", lambda body=body: body(Encoder()), 1, join),
            best("  the next one", lambda body=body, kept=kept: [body(kept) for _ in range(100)], 100, join),
        ]
    return rows


if __name__ == "__main__":
    report([*chunks(), *requests()], arguments(__doc__).parse_args().json)
