"""A recording as a person reads it: one line for each message, time and direction in front.

Strategy: requests and responses show their method and how long the answer took; pieces of one message are joined; of
everything else the members that tell most, cut to the width of a line. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from crow.trace.record import Recorded
from crow.trace.schema import Side

__all__ = ["shown"]

WIDTH = 160


@dataclass(slots=True)
class Run:
    """Pieces of one message that follow each other."""

    key: tuple[Any, ...]
    first: Recorded
    texts: list[str]


def shown(recording: Iterable[Recorded]) -> Iterator[str]:
    """The lines to print."""
    start: float | None = None
    asked: dict[tuple[Side, Any], tuple[str, float | None]] = {}
    run: Run | None = None
    for recorded in recording:
        if start is None:
            start = recorded.at
        key, text = _piece(recorded)
        if run is not None and run.key != key:
            yield _run_line(run, start)
            run = None
        if key is not None:
            run = run or Run(key, recorded, [])
            run.texts.append(text)
            continue
        yield _front(recorded, start) + _cut(_words(recorded, asked))
    if run is not None:
        yield _run_line(run, start)


def _piece(recorded: Recorded) -> tuple[tuple[Any, ...] | None, str]:
    match recorded.message:
        case {
            "method": "session/update",
            "params": {
                "sessionId": session,
                "update": {"sessionUpdate": str(kind), "content": {"type": "text", "text": str(text)}} as update,
            },
        } if kind.endswith("_chunk"):
            return (str(session), kind, str(update.get("messageId"))), text
        case _:
            return None, ""


def _run_line(run: Run, start: float | None) -> str:
    count = f" x{len(run.texts)}" if len(run.texts) > 1 else ""
    return _front(run.first, start) + _cut(f"{run.key[1]}{count} {json.dumps(''.join(run.texts), ensure_ascii=False)}")


def _front(recorded: Recorded, start: float | None) -> str:
    time = f"{recorded.at - start:9.3f} " if recorded.at is not None and start is not None else ""
    return f"{recorded.line:5} {time}{'->' if recorded.sender == 'client' else '<-'} "


def _words(recorded: Recorded, asked: dict[tuple[Side, Any], tuple[str, float | None]]) -> str:
    message, sender = recorded.message, recorded.sender
    if not isinstance(message, dict):
        return f"(no message) {recorded.text if recorded.text is not None else _json(message)}"
    method, number = message.get("method"), message.get("id")
    if isinstance(method, str):
        params = message.get("params")
        if method == "session/update" and isinstance(params, dict) and isinstance(params.get("update"), dict):
            update = dict(params["update"])
            return f"{update.pop('sessionUpdate', '?')} {_json(update)}"
        if "id" not in message:
            return f"{method} {_json(params)}"
        asked[sender, str(number)] = method, recorded.at
        return f"{method} #{number} {_json(params)}"
    other: Side = "agent" if sender == "client" else "client"
    of, since = asked.pop((other, str(number)), ("?", None))
    took = f" after {recorded.at - since:.3f} s" if recorded.at is not None and since is not None else ""
    if "error" in message:
        return f"{of} #{number} failed{took}: {_json(message['error'])}"
    return f"{of} #{number} answered{took}: {_json(message.get('result'))}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
