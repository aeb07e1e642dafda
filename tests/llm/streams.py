"""Reads the fixture streams. Their format is described in `fixtures/README.md`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow.domain.errors import ModelError
from crow.domain.messages import Answer, ToolSpec
from crow.llm import TextDelta, ThoughtDelta
from crow.llm.chat.parser import ChatParser
from crow.llm.parser import AnswerParser
from crow.llm.sse import SseDecoder

__all__ = ["FIXTURES", "TOOLS", "Fixture", "Outcome", "outcome_of", "read"]

FOLDER = Path(__file__).parent / "fixtures"
TOOLS = {
    name: ToolSpec(name=name, description=name, input_schema=schema)
    for name, schema in json.loads((FOLDER / "tools.json").read_text("utf-8")).items()
}


@dataclass(frozen=True, kw_only=True)
class Fixture:
    """A stream as bytes, the offered tools, and the expected answer."""

    name: str
    stream: bytes
    tools: tuple[ToolSpec, ...]
    expect: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An answer or an error, and the text and thought that were shown."""

    answer: Answer | None
    error: ModelError | None
    text: str
    thought: str


def outcome_of(fixture: Fixture, pieces: Iterable[bytes], wire: type[AnswerParser] = ChatParser) -> Outcome:
    """Feed the pieces as the transport does."""
    numbers = itertools.count(1)
    decoder = SseDecoder()
    parser = wire(fixture.tools, new_id=lambda: f"minted{next(numbers):03d}")
    head: bytes | None = b""
    texts: list[str] = []
    thoughts: list[str] = []

    def note(deltas: Sequence[TextDelta | ThoughtDelta]) -> None:
        for delta in deltas:
            assert delta.text
            (texts if isinstance(delta, TextDelta) else thoughts).append(delta.text)

    answer: Answer | None = None
    failure: ModelError | None = None
    try:
        for piece in pieces:
            events = decoder.feed(piece)
            head = None if events or head is None else head + piece
            note(parser.feed(events))
        last = decoder.finish()
        if not last and head:  # a body that is no event stream
            last = [head.decode("utf-8", "replace").strip()]
        try:
            note(parser.feed(last))
        except ModelError as error:
            if f"other than {parser.kind}" not in str(error):
                raise
        note(parser.flush())
        answer = parser.finish()
    except ModelError as error:
        failure = error
        note(parser.flush())
    shown = ("".join(texts), "".join(thoughts))
    assert (parser.partial().text, parser.partial().thought) == shown
    assert answer is None or (answer.text, answer.thought) == shown
    return Outcome(answer=answer, error=failure, text="".join(texts), thought="".join(thoughts))


def read() -> list[Fixture]:
    """All fixtures."""
    fixtures: list[Fixture] = []
    for path in sorted(FOLDER.glob("*.json")):
        if path.name == "tools.json":
            continue
        for entry in json.loads(path.read_text("utf-8")):
            assert entry["source"], entry["name"]
            offered = entry.get("tools", list(TOOLS))
            fixtures.append(
                Fixture(
                    name=f"{path.stem}: {entry['name']}",
                    stream=_stream(entry),
                    tools=tuple(TOOLS[name] for name in offered),
                    expect=_expect(entry),
                )
            )
    return fixtures


def _stream(entry: dict[str, Any]) -> bytes:
    if "raw" in entry:
        return str(entry["raw"]).encode("latin-1")
    events: list[Any] = entry.get("events") or []
    if "text" in entry:
        # In small deltas, as models stream it.
        text = entry["text"]
        events = [{"delta": {"content": text[at : at + 5]}} for at in range(0, len(text), 5)]
        events.append({"delta": {}, "finish": "stop"})
    if "arguments" in entry:
        events = list(_call_events(entry))
    datas = [event if isinstance(event, str) else json.dumps(_event(event), ensure_ascii=False) for event in events]
    if entry.get("done", True):
        datas.append("[DONE]")
    return "".join(f"data: {data}\n\n" for data in datas).encode()


def _call_events(entry: dict[str, Any]) -> Iterable[dict[str, Any]]:
    pieces = ['{"path":' * 100_000 if piece == "@nested" else piece for piece in entry["arguments"]]
    name = entry.get("tool", "read_file")
    yield {"delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": name}}]}}
    for piece in pieces:
        yield {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}}
    yield {"delta": {}, "finish": entry.get("finish", "tool_calls")}


def _event(event: Any) -> Any:
    if isinstance(event, dict) and event and event.keys() <= {"delta", "finish"}:
        finish = event.get("finish")
        return {"choices": [{"index": 0, "delta": event.get("delta", {}), "finish_reason": finish}]}
    return event


def _expect(entry: dict[str, Any]) -> dict[str, Any]:
    if "arguments" not in entry:
        expect = dict(entry["expect"])
        if "text" in entry and "calls" in expect:
            expect["finish"] = "tool_calls"
        return expect
    name = entry.get("tool", "read_file")
    finish = "length" if entry.get("finish") == "length" else "tool_calls"
    if "fault" in entry:
        call = {"id": "a", "name": name, "arguments": entry.get("kept", {}), "fault": entry["fault"]}
        return {"finish": finish, "calls": [call]}
    calls = [
        {"id": "a" if position == 0 else f"minted{position:03d}", "name": name, "arguments": arguments}
        for position, arguments in enumerate(entry["expect"])
    ]
    return {"finish": finish, "calls": calls}


FIXTURES = read()
