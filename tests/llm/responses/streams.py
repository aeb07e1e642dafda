"""Reads the fixture streams of the Responses API. Their format is described in `fixtures/README.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crow.domain.messages import Freeform, ToolSpec
from tests.llm.streams import TOOLS as JSON_TOOLS
from tests.llm.streams import Fixture

__all__ = ["FIXTURES", "TOOLS", "item_events", "response_stream"]

FOLDER = Path(__file__).parent / "fixtures"
PATCH = {"type": "object", "properties": {"patch": {"type": "string"}}, "required": ["patch"]}
TOOLS = {
    **JSON_TOOLS,
    "apply_patch": ToolSpec(name="apply_patch", description="p", input_schema=PATCH, freeform=Freeform()),
}
USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 15,
}
SHORT = ("say", "refuse", "think", "reason", "call", "custom", "end")


def item_events(short: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one item in its short form."""
    at = short.get("at", 0)
    kind = next(kind for kind in SHORT if kind in short)
    pieces: list[str] = short[kind][1] if kind in {"call", "custom"} else short[kind]
    whole = "".join(pieces)
    item, place = _item(kind, at, short, whole)
    begun = {**item, "status": "in_progress"} | _EMPTY[kind]
    where = {"item_id": item["id"], "output_index": at, **place}
    delta, done, member = _NAMES[kind]
    part = _part(kind, whole)
    every: list[tuple[str, dict[str, Any]]] = [
        ("added", {"type": "response.output_item.added", "output_index": at, "item": begun}),
    ]
    part_kind = "response.reasoning_summary_part" if kind == "think" else "response.content_part"
    if part is not None:
        every.append(("part", {"type": f"{part_kind}.added", **where, "part": _part(kind, "")}))
    every += [("delta", {"type": delta, **where, "delta": piece}) for piece in pieces]
    every.append(("done", {"type": done, **where, member: whole}))
    if part is not None:
        every.append(("part_done", {"type": f"{part_kind}.done", **where, "part": part}))
    item = {**item, **short.get("members", {})}
    every.append(("item_done", {"type": "response.output_item.done", "output_index": at, "item": item}))
    wanted = short.get("only")
    yield from (event for name, event in every if wanted is None or name in wanted)


_NAMES = {
    "say": ("response.output_text.delta", "response.output_text.done", "text"),
    "refuse": ("response.refusal.delta", "response.refusal.done", "refusal"),
    "think": ("response.reasoning_summary_text.delta", "response.reasoning_summary_text.done", "text"),
    "reason": ("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
    "call": ("response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"),
    "custom": ("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "input"),
}
_EMPTY: dict[str, dict[str, Any]] = {
    "say": {"content": []},
    "refuse": {"content": []},
    "think": {"summary": []},
    "reason": {"content": []},
    "call": {"arguments": ""},
    "custom": {"input": ""},
}


def _part(kind: str, text: str) -> dict[str, Any] | None:
    parts: dict[str, dict[str, Any]] = {
        "say": {"type": "output_text", "text": text, "annotations": []},
        "refuse": {"type": "refusal", "refusal": text},
        "think": {"type": "summary_text", "text": text},
        "reason": {"type": "reasoning_text", "text": text},
    }
    return parts.get(kind)


def _item(kind: str, at: int, short: dict[str, Any], whole: str) -> tuple[dict[str, Any], dict[str, int]]:
    match kind:
        case "say" | "refuse":
            message = {"type": "message", "role": "assistant", "status": "completed", "content": [_part(kind, whole)]}
            return {"id": f"msg_{at}", **message}, {"content_index": 0}
        case "think":
            secret = {"summary": [_part(kind, whole)], "encrypted_content": f"sealed{at}"}
            return {"id": f"rs_{at}", "type": "reasoning", **secret}, {"summary_index": 0}
        case "reason":
            return {"id": f"rs_{at}", "type": "reasoning", "content": [_part(kind, whole)], "summary": []}, {
                "content_index": 0
            }
        case _:
            name = short[kind][0]
            of = {"call_id": f"call_{at}", "name": name, "status": "completed"}
            if kind == "custom":
                return {"id": f"ctc_{at}", "type": "custom_tool_call", **of, "input": whole}, {}
            return {"id": f"fc_{at}", "type": "function_call", **of, "arguments": whole}, {}


def _expanded(event: Any) -> Iterator[Any]:
    if isinstance(event, str) or "type" in event or not any(kind in event for kind in SHORT):
        yield event
    elif "end" in event:
        status = event["end"].get("status", "completed")
        response = {
            "id": "resp_1",
            "object": "response",
            "status": status,
            "output": [],
            "usage": USAGE,
            **event["end"],
        }
        yield {"type": f"response.{status}", "response": response}
    else:
        yield from item_events(event)


def response_stream(entry: dict[str, Any]) -> bytes:
    """The bytes of a fixture."""
    if "raw" in entry:
        return str(entry["raw"]).encode("latin-1")
    events = [each for event in entry["events"] for each in _expanded(event)]
    if entry.get("numbered"):
        events = [event | {"sequence_number": at} for at, event in enumerate(events)]
    if entry.get("twice"):
        events = [event for event in events for _ in range(2)]
    datas = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    names = [f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else "" for event in events]
    if entry.get("done"):
        datas.append("[DONE]")
        names.append("")
    text = "".join(f"{name}data: {data}\n\n" for name, data in zip(names, datas, strict=True))
    return (text.replace("\n", "\r\n") if entry.get("crlf") else text).encode()


def _read() -> list[Fixture]:
    fixtures: list[Fixture] = []
    for path in sorted(FOLDER.glob("*.json")):
        for entry in json.loads(path.read_text("utf-8")):
            assert entry["source"], entry["name"]
            tools = tuple(TOOLS[name] for name in entry.get("tools", list(TOOLS)))
            name = f"{path.stem}: {entry['name']}"
            fixtures.append(Fixture(name=name, stream=response_stream(entry), tools=tools, expect=entry["expect"]))
    return fixtures


FIXTURES = _read()
