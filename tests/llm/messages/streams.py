"""Reads the fixture streams of the Messages API. Their format is described in `fixtures/README.md`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from crow.llm.messages.parser import MessagesParser
from tests.llm.streams import TOOLS, Fixture, Outcome
from tests.llm.streams import outcome_of as outcome_on

__all__ = ["FIXTURES", "Fixture", "block_events", "outcome_of", "sse"]

FOLDER = Path(__file__).parent / "fixtures"
STARTED = {"input_tokens": 10, "output_tokens": 1}


def outcome_of(fixture: Fixture, pieces: Iterable[bytes]) -> Outcome:
    """Feed the pieces as the transport does."""
    return outcome_on(fixture, pieces, MessagesParser)


def sse(*events: object) -> bytes:
    """Events as the real endpoint frames them. A string is the data as it is."""
    return b"".join(_framed(event) for event in events)


def _framed(event: object) -> bytes:
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
    return f"{name}data: {data}\n\n".encode()


def block_events(index: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one block in the short form of the fixtures."""
    deltas: list[dict[str, Any]]
    if "text" in block:
        start: dict[str, Any] = {"type": "text", "text": ""}
        deltas = [{"type": "text_delta", "text": piece} for piece in block["text"]]
    elif "think" in block:
        start = {"type": "thinking", "thinking": "", "signature": ""}
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in block["think"]]
        deltas += [{"type": "signature_delta", "signature": block["sign"]}] if "sign" in block else []
    elif "redacted" in block:
        start, deltas = {"type": "redacted_thinking", "data": block["redacted"]}, []
    elif "call" in block:
        start = {"type": "tool_use", "id": block.get("id", "toolu_1"), "name": block["call"], "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in block["json"]]
    else:
        start, deltas = block["block"], block.get("deltas", [])
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _stream(entry: dict[str, Any]) -> bytes:
    if "raw" in entry:
        return str(entry["raw"]).encode("latin-1")
    if "body" in entry:
        return json.dumps(entry["body"], ensure_ascii=False).encode()
    events: list[object] = []
    if (started := entry.get("start", STARTED)) is not False:
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": []}
        events.append({"type": "message_start", "message": {**message, "stop_reason": None, "usage": started}})
    index = 0
    for event in entry["events"]:
        if isinstance(event, dict) and not event.keys().isdisjoint({"text", "think", "redacted", "call", "block"}):
            events += block_events(index, event)
            index += 1
        elif isinstance(event, dict) and "stop" in event:
            delta = {"stop_reason": event["stop"], "stop_sequence": None}
            events.append({"type": "message_delta", "delta": delta, "usage": event.get("usage", {"output_tokens": 5})})
        else:
            events.append(event)
    return sse(*events, *([{"type": "message_stop"}] if entry.get("done", True) else []))


def _read() -> list[Fixture]:
    return [
        Fixture(
            name=f"{path.stem}: {entry['name']}",
            stream=_stream(entry),
            tools=tuple(TOOLS[name] for name in entry.get("tools", list(TOOLS))),
            expect=entry["expect"],
        )
        for path in sorted(FOLDER.glob("*.json"))
        for entry in json.loads(path.read_text("utf-8"))
        if entry["source"]
    ]


FIXTURES = _read()
