"""Shows a recording to a person: one line per message, with time and direction."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from crow.domain.text import on_one_line, shorten
from crow.trace.record import Recorded, Side

_WIDTH = 160


def format_recording(recording: Iterable[Recorded]) -> Iterator[str]:
    """Yield the lines to print. Consecutive chunks of one message share a line."""
    start: float | None = None
    requests: dict[tuple[Side, str], tuple[str, float]] = {}
    for key, group in itertools.groupby(recording, _chunk_key):
        for recorded in group:
            start = recorded.at if start is None else start
            if key is None:
                text = _describe(recorded, requests)
            else:
                chunks = [chunk.message["params"]["update"]["content"]["text"] for chunk in (recorded, *group)]
                count = f" x{len(chunks)}" if len(chunks) > 1 else ""
                text = f"{key[1]}{count} {_json(''.join(chunks))}"
            arrow = "->" if recorded.sender == "client" else "<-"
            text = on_one_line(shorten(text, _WIDTH))
            yield f"{recorded.line:5} {recorded.at - start:9.3f} {arrow} {text}"


def _chunk_key(recorded: Recorded) -> tuple[str, str, str] | None:
    """Return session, kind and message id of a chunk of text, or None for every other message."""
    match recorded.message:
        case {"method": "session/update", "params": {"sessionId": session, "update": update}}:
            match update:
                case {"sessionUpdate": str(kind), "content": {"type": "text", "text": str()}} if kind.endswith(
                    "_chunk"
                ):
                    return str(session), kind, str(update.get("messageId"))
    return None


def _describe(recorded: Recorded, requests: dict[tuple[Side, str], tuple[str, float]]) -> str:
    """Describe a message in words.

    `requests` maps the sender and id of each unanswered request to its method and time.
    """
    message = recorded.message
    if not isinstance(message, dict):
        return f"(not a message) {recorded.text if recorded.text is not None else _json(message)}"
    method, number = message.get("method"), message.get("id")
    if isinstance(method, str):
        match message.get("params"):
            case {"update": {"sessionUpdate": kind, **fields}} if method == "session/update":
                return f"{kind} {_json(fields)}"
            case params if "id" not in message:
                return f"{method} {_json(params)}"
            case params:
                requests[recorded.sender, str(number)] = method, recorded.at
                return f"{method} #{number} {_json(params)}"
    receiver: Side = "agent" if recorded.sender == "client" else "client"
    of, since = requests.pop((receiver, str(number)), ("?", None))
    took = "" if since is None else f" after {recorded.at - since:.3f} s"
    if "error" in message:
        return f"{of} #{number} failed{took}: {_json(message['error'])}"
    return f"{of} #{number} answered{took}: {_json(message.get('result'))}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
