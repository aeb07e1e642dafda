"""Feeds mutated streams of all wires to the SSE decoder and the parsers: `python -m tests.soak.parser [CASES] [SEED]`.

Each case is a fixture with bytes cut, doubled, flipped, swapped or replaced by those of another fixture, fed in
random pieces. Only the parser's own errors may be raised, no case may take too long, and every call in the result
must come from bytes of the stream. A failure prints its seed and bytes.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from crow.llm.chat.parser import ChatParser
from crow.llm.messages.parser import MessagesParser
from crow.llm.parser import AnswerParser
from crow.llm.responses.parser import ResponsesParser
from crow.llm.sse import SseDecoder
from tests.llm.messages.streams import FIXTURES as MESSAGES
from tests.llm.responses.streams import FIXTURES as RESPONSES
from tests.llm.streams import FIXTURES, Fixture, Outcome, outcome_of

CASES = 200_000
LONGEST_S = 5.0
LARGEST = 30_000
SCRAPS = (
    *(b"data: ", b"\n\n", b"\r\n", b"[DONE]", b"null", b"{}", b"[]", b'"', b"\\", b"\\ud83d", b"\xff", b"\x00"),
    *(b"\xef\xbb\xbf", b"<think>", b"</think>", b"<tool_call>", b"[TOOL_CALLS]"),
    *(b"</tool_call>", b"<function=shell>", b"<parameter=command>", b"</parameter>", b"</function>", b"```"),
    *(b"<|channel|>analysis<|message|>", b"<|end|>", b"<arg_key>", b"</arg_value>", b"<|python_tag|>"),
    *(b"0", b"-1", b"1e999", b"NaN", b"true", b":", b",", b"}"),
    *(b'"index":', b'"finish_reason":', b'"tool_calls":', b'"arguments":', b'"error":', b'"usage":', b'"choices":'),
)  # fmt: skip
VALUES: tuple[object, ...] = (
    *(None, "", " ", "null", "stop", "x", "{}", "{", '"', 0, -1, 7, 1.5, True, False, 10**40),
    *([], {}, [None], [[]], [{}], {"x": {}}, {"path": "x"}, "read_file", "<think>", "\ud83d", "\x00"),
)
DECODER = json.JSONDecoder(strict=False)
ARGUMENTS = ("arguments", "parameters", "input", "args")
PIECES = ("delta", "partial_json")
"""Members with pieces of a call's input on the wires `responses` and `messages`."""
FREEFORM = ("patch", "input")
"""Names of the property that takes a call's plain text."""
LETTERS = re.compile(r"[A-Za-z0-9]+")


def cut(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    start, end = spans(stream, chance)
    return stream[:start] + stream[end:]


def ended(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    return stream[: chance.randrange(len(stream) + 1)]


def doubled(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    start, end = spans(stream, chance)
    return stream[:end] + stream[start:end] + stream[end:]


def flipped(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    changed = bytearray(stream)
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def scrap(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    start, end = spans(stream, chance, longest=chance.choice((0, 0, 8)))
    return stream[:start] + chance.choice(SCRAPS) + stream[end:]


def grafted(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    start, end = spans(stream, chance)
    first, last = spans(other, chance)
    return stream[:start] + other[first:last] + stream[end:]


def reordered(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    events = stream.split(b"\n\n")
    at = chance.randrange(len(events))
    events.insert(chance.randrange(len(events)), events.pop(at))
    return b"\n\n".join(events)


def reshaped(stream: bytes, chance: random.Random, other: bytes) -> bytes:
    """Replace or remove a value in one event: still well-formed, but not what a provider sends."""
    events = stream.split(b"\n\n")
    at = chance.randrange(len(events))
    head, mark, data = events[at].rpartition(b"data: ")
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        return stream
    node: Any = event
    above: list[tuple[Any, Any]] = []
    while isinstance(node, (dict, list)) and node and (not above or chance.random() < 0.8):
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        above.append((node, key))
        node = node[key]
    if not above:
        return stream
    parent, key = above[-1]
    if chance.random() < 0.2:
        del parent[key]
    else:
        parent[key] = chance.choice((*VALUES, node))
    events[at] = head + mark + json.dumps(event).encode()
    return b"\n\n".join(events)


MUTATIONS: tuple[Callable[[bytes, random.Random, bytes], bytes], ...] = (
    *(cut, ended, doubled, flipped, scrap, scrap, grafted, reordered, reshaped, reshaped, reshaped),
)


def spans(stream: bytes, chance: random.Random, longest: int = 200) -> tuple[int, int]:
    start = chance.randrange(len(stream) + 1)
    return start, min(len(stream), start + chance.randrange(longest + 1))


def mutated(chance: random.Random, streams: list[Fixture]) -> Fixture:
    fixture, other = chance.choice(streams), chance.choice(streams)
    stream = fixture.stream
    for _ in range(chance.randrange(1, 5)):
        if stream:
            stream = chance.choice(MUTATIONS)(stream, chance, other.stream)
    tools = fixture.tools if chance.random() < 0.8 else ()
    return Fixture(name=fixture.name, stream=stream, tools=tools, expect={})


def pieces(stream: bytes, chance: random.Random) -> list[bytes]:
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(chance.randrange(8)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


class Said:
    """The letters of names, arguments and content in a stream, read without the parser."""

    def __init__(self, stream: bytes) -> None:
        self.names = self.arguments = self.content = ""
        decoder = SseDecoder()
        for event in (
            *decoder.feed(stream),
            *decoder.finish(),
            *([stream.decode("utf-8", "replace")] * is_body(stream)),
        ):
            for value in objects(event):
                self._walk(value, "")

    def _walk(self, value: object, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if key in ARGUMENTS:
                    self.arguments += letters(name)
                self._walk(inner, "arguments" if key in ARGUMENTS else name)
        elif isinstance(value, list):
            for inner in value:
                self._walk(inner, key)
        elif isinstance(value, (str, int)):
            value = str(value)
            if key in {"name", "recipient_name"}:
                self.names += letters(value)
            elif key in ARGUMENTS or key in PIECES:
                self.arguments += letters(value)
            elif key in {"content", "text", "refusal"}:
                self.content += letters(value)


def is_body(stream: bytes) -> bool:
    """Whether this is a whole body instead of events."""
    return stream.lstrip().startswith(b"{")


def objects(event: str) -> Iterator[object]:
    """All JSON objects in an event, at any depth."""
    at = event.find("{")
    while at >= 0:
        try:
            value, at = DECODER.raw_decode(event, at)
        except (ValueError, RecursionError):
            at += 1
        else:
            yield value
        at = event.find("{", at)


def letters(text: str) -> str:
    return "".join(LETTERS.findall(text)).lower()


def invented(outcome: Outcome, fixture: Fixture) -> str | None:
    """A part of the calls that is not in the stream; None if everything is."""
    calls = [call for call in outcome.answer.calls if call.fault is None] if outcome.answer is not None else []
    said = Said(fixture.stream) if calls else None
    for call in calls:
        assert said is not None
        name = letters(call.name)
        # A piece of text in a broken chunk may be inside a name; the parser does not read it.
        if name not in said.names and name not in said.arguments and not is_within(name, said.content):
            return f"a call of {call.name}, which nobody named"
        arguments = json.loads(call.arguments)
        if not isinstance(arguments, dict):
            return f"a call of {call.name} with {call.arguments!r}, which is no object"
        for text in texts(arguments):
            if text in FREEFORM:
                continue
            if not any(is_within(letters(text), source) for source in (said.arguments, said.content)):
                return f"a call of {call.name} with {text!r}, which nobody said"
    return None


def is_within(word: str, source: str) -> bool:
    """Whether `word`'s letters occur in this order; pieces of several calls may be interleaved."""
    rest = iter(source)
    return word in source or all(letter in rest for letter in word)


def texts(value: object) -> list[str]:
    """All strings in a call's arguments without escapes, which can be written in several ways."""
    if isinstance(value, str):
        return [] if "\\u" in value or not value.isascii() else [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in (*texts(key), *texts(inner))]
    return [text for inner in value for text in texts(inner)] if isinstance(value, list) else []


def main(cases: int, seed: int) -> int:
    wires: tuple[tuple[type[AnswerParser], list[Fixture]], ...] = (
        (ChatParser, FIXTURES),
        (ResponsesParser, RESPONSES),
        (MessagesParser, MESSAGES),
    )
    return max([attack(wire, fixtures, cases, seed) for wire, fixtures in wires])


def attack(wire: type[AnswerParser], fixtures: list[Fixture], cases: int, seed: int) -> int:
    """Feed `cases` mutated streams to one parser. Return 1 if something went wrong."""
    streams = [fixture for fixture in fixtures if 0 < len(fixture.stream) < LARGEST]
    answers = failures = calls = 0
    slowest = 0.0
    began = time.monotonic()
    for number in range(cases):
        chance = random.Random(f"{seed} {number}")
        fixture = mutated(chance, streams)
        started = time.monotonic()
        problem: str | None = None
        try:
            outcome = outcome_of(fixture, pieces(fixture.stream, chance), wire)
            problem = invented(outcome, fixture)
        except Exception as error:  # noqa: BLE001  that is what is looked for
            problem = f"{type(error).__name__}: {error}"
        else:
            answers += outcome.answer is not None
            calls += len(outcome.answer.calls) if outcome.answer is not None else 0
        took = time.monotonic() - started
        slowest = max(slowest, took)
        if took > LONGEST_S:
            problem = problem or f"it took {took:.1f} s"
        if problem is not None:
            failures += 1
            print(f"case {number} of seed {seed} ({fixture.name}): {problem}\n{fixture.stream!r}\n")
            if failures >= 10:
                break
    print(
        f"{wire.wire}: {number + 1:,} cases of {len(streams)} fixtures in {time.monotonic() - began:.0f} s: "
        f"{answers:,} answers with {calls:,} calls, the slowest case {slowest * 1000:.0f} ms, {failures} failures"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:3]]
    sys.exit(main(*(arguments + [CASES, 1][len(arguments) :])))
