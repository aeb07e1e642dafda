"""Streams that no endpoint should send: on every wire, one process reads them all and answers the next request."""

from __future__ import annotations

import json
from collections.abc import Mapping

import anyio
import pytest

from crow.domain.errors import ModelError
from crow.domain.messages import WireName
from crow.domain.text import safe
from tests.llm.test_wires import ALL, WITH_TOOLS, asking
from tests.support.fake_endpoint import FakeEndpoint, Reply, text

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}
"""Not the fake endpoint's own headers, so that it sends the same bytes on every wire."""

MAX_WORDS = 2_000
DEEP = "[" * 50_000 + "]" * 50_000
HUGE = 10**30


def event(data: object) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def wrong_types() -> bytes:
    """Events of every wire, with each member replaced by values of wrong types."""
    sound: list[dict[str, object]] = [
        {"choices": [{"index": 0, "delta": {"content": "a", "tool_calls": [{"index": 0, "function": {}}]}}]},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "content": []}},
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "a"},
        {"type": "response.completed", "response": {"output": [], "usage": {}, "status": "completed"}},
        {"type": "message_start", "message": {"content": [], "usage": {}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
    ]
    wrong: tuple[object, ...] = (None, 7, -1, HUGE, 1.5, True, "x", [], [[]], {}, {"type": []})
    return b"".join(event({**each, key: value}) for each in sound for key in each for value in wrong)


STREAMS: Mapping[str, bytes | tuple[bytes, ...]] = {
    "nothing": b"",
    "blank lines": b"\n" * 100_000,
    "comments": b": ping\n\n" * 20_000,
    "binary": bytes(range(256)) * 400,
    "no UTF-8": b'data: {"choices":[{"delta":{"content":"\xff\xfe\xc3"}}]}\n\n',
    "lone surrogates": event('{"choices":[{"delta":{"content":"\\ud800"},"finish_reason":"stop"}]}'),
    "NUL and line ends": b"\xef\xbb\xbfdata: {}\r\rdata: \0\r\n\r\ndata\n\n\r",
    "a page": b"<!doctype html><title>Sign in</title>" + b"<p>x</p>" * 5_000,
    "no objects": b"".join(map(event, ("null", "3", '"x"', "[]", "NaN", "{", "}"))),
    "nesting": event(DEEP) + event(f'{{"choices":{DEEP},"item":{DEEP},"delta":{DEEP}}}'),
    "numbers": event(f'{{"usage":{{"prompt_tokens":{"9" * 5_000}}},"created":1e999999,"index":-{"9" * 400}}}'),
    "wrong types": wrong_types(),
    "far indexes": b"".join(
        event(each)
        for each in (
            {"choices": [{"delta": {"tool_calls": [{"index": HUGE, "id": "a", "function": {"name": "f"}}]}}]},
            {"type": "response.output_item.added", "output_index": HUGE, "item": {"type": "function_call"}},
            {"type": "content_block_start", "index": HUGE, "content_block": {"type": "tool_use", "id": "a"}},
        )
    ),
    "unknown events": b"".join(event({"type": f"response.x{number}", "y": [number]}) for number in range(5_000)),
    "many open blocks": b"".join(
        event({"type": kind, "index": number, "output_index": number, name: {"type": "text", "text": ""}})
        for number in range(2_000)
        for kind, name in (("content_block_start", "content_block"), ("response.output_item.added", "item"))
    ),
    "a hostile error": event({"type": "error", "error": {"type": "x", "message": "\x1b]0;\a\u202e" + "e" * 500_000}}),
    "the end first": event("[DONE]") + event({"choices": [{"delta": {"content": "late"}}]}) + event("[DONE]"),
    "a line without end": (b"data: ", *[b"x" * 1_000_000] * 10),
}


@pytest.mark.long
async def test_one_process_survives_hostile_streams_on_every_wire() -> None:
    async with FakeEndpoint(otherwise=text("Hello", " there", ".")) as endpoint:
        for wire in ALL:
            endpoint.wires = (wire,)
            for name, sent in STREAMS.items():
                await read_one(endpoint, wire, name, Reply(steps=(sent,), headers=HEADERS))


async def read_one(endpoint: FakeEndpoint, wire: WireName, name: str, reply: Reply) -> None:
    """Read one hostile stream, which ends with an answer or a readable error. Then ask the same client again."""
    async with asking(endpoint, wires=(wire,)) as model:
        endpoint.answer_with(reply)
        try:
            with anyio.fail_after(60):
                async with model.stream(WITH_TOOLS) as stream:
                    async for _ in stream:
                        pass
                assert not stream.answer.calls, (wire, name)
        except ModelError as error:
            words = str(error)
            assert 0 < len(words) <= MAX_WORDS, (wire, name, len(words))
            assert safe(words) == words, (wire, name)
        endpoint.answer_with(text("Hello", " there", "."))
        async with model.stream(WITH_TOOLS) as stream:
            async for _ in stream:
                pass
        assert stream.answer.text == "Hello there.", (wire, name)
