"""What crow adds between an endpoint's bytes and the agent: µs a chunk, and µs a request of so many messages.

Figures only, each the best of several rounds beside the floor of the same run (`json.loads` alone, a plain join).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from crow.domain.messages import AssistantMessage, Message, SystemMessage, Text, ToolSpec, UserMessage
from crow.llm import Request
from crow.llm.dialect import Dialect
from crow.llm.encode import Encoder
from crow.llm.parser import StreamParser
from crow.llm.sse import SseDecoder

CHUNKS = 20_000
ROUNDS = 5
TOOL = ToolSpec(name="read_file", description="Read.", input_schema={"type": "object", "properties": {"path": {}}})


def best_us(function: Callable[[], object], times: int) -> float:
    """µs for one of `times` things that `function` does."""
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        took.append(time.perf_counter() - started)
    return min(took) / times * 1e6


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
        for event in decoder.feed(piece):
            parser.feed(event)


def floor(events: list[str]) -> None:
    for event in events:
        json.loads(event)


def chunks() -> None:
    kinds = {
        "text": {"content": " word"},
        "text, not ASCII": {"content": " wörd"},
        "reasoning": {"reasoning_content": " word"},
        "arguments": {"tool_calls": [{"index": 0, "function": {"arguments": "abc"}}]},
    }
    print(f"{'parser and SSE, each chunk by itself':<44}{'µs a chunk':>12}{'json.loads':>12}")
    for name, delta in kinds.items():
        piece = chunk(delta)
        first = chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "read_file"}}]})
        stream = [first, *[piece] * CHUNKS] if name == "arguments" else [piece] * CHUNKS
        events = [piece[6:-2].decode()] * CHUNKS
        lowest = best_us(lambda events=events: floor(events), CHUNKS)
        print(f"  {name:<42}{best_us(lambda stream=stream: read(stream), CHUNKS):>12.2f}{lowest:>12.2f}")
    burst = [b"".join([chunk(kinds["text"])] * CHUNKS)]
    print(f"  {'text, in one read':<42}{best_us(lambda: read(burst), CHUNKS):>12.2f}")


def conversation(messages: int) -> tuple[Message, ...]:
    turns: list[Message] = [SystemMessage(text="Be brief. " * 200)]
    for number in range(messages // 2):
        turns.append(UserMessage(parts=(Text(text=f"Question {number}: " + "words " * 100),)))
        turns.append(AssistantMessage(text=f"Answer {number}: " + "words " * 300))
    return (*turns, UserMessage(parts=(Text(text="Next?"),)))


def requests() -> None:
    print(f"\n{'a request':<44}{'µs, first':>12}{'µs, next':>12}{'bytes':>12}{'µs, join':>12}")
    for count in (10, 100, 1_000):
        messages = conversation(count)

        def body(encoder: Encoder, messages: tuple[Message, ...] = messages) -> bytes:
            request = Request(messages=messages, tools=(TOOL,))
            return encoder.body(request, model="m", endpoint="here m", dialect=Dialect(), limit=1000)

        kept = Encoder()
        size = len(body(kept))
        sent = kept.messages(messages, endpoint="here m", dialect=Dialect())
        first = best_us(lambda body=body: body(Encoder()), 1)
        later = best_us(lambda body=body, kept=kept: [body(kept) for _ in range(100)], 100)
        join = best_us(lambda sent=sent: [b",".join(sent) for _ in range(100)], 100)
        print(f"  {f'of {count:,} messages':<42}{first:>12.0f}{later:>12.1f}{size:>12,}{join:>12.1f}")


if __name__ == "__main__":
    chunks()
    requests()
