"""A recording as it is read: crow's own, or the bare messages of any agent, one JSON object a line.

Strategy: where a line does not say who sent it, the message does: a method by the side that serves it, a response by
the side that was asked. Reads line by line; what is no message stays, as text, so that it can be shown and judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crow.domain.errors import ArgumentError
from crow.trace.schema import Side, served_by

__all__ = ["Recorded", "read_recording"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line: its number from 1, Unix seconds (None: not recorded), who sent it, and the message, or the text of
    what is none."""

    line: int
    at: float | None
    sender: Side
    message: Any = None
    text: str | None = None


def read_recording(file: Path) -> Iterator[Recorded]:
    """The messages of `file` in order. :raises ArgumentError: it cannot be read, or holds no recording."""
    guess = Senders()
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _recorded(number, line, guess)
    except OSError as error:
        raise ArgumentError(f"{file}: cannot be read: {error.strerror or error}") from error


def _recorded(number: int, line: str, guess: Senders) -> Recorded:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Recorded(line=number, at=None, sender="agent", text=line.rstrip("\n"))
    match value:
        case {"from": "client" | "agent" as sender, "message": message}:
            guess.saw(sender, message)
            return Recorded(line=number, at=_time(value), sender=sender, message=message)
        case {"from": "client" | "agent" as sender, "line": str(text)}:
            return Recorded(line=number, at=_time(value), sender=sender, text=text)
        case _:
            sender = guess.of(value)
            guess.saw(sender, value)
            return Recorded(line=number, at=None, sender=sender, message=value)


def _time(record: dict[str, Any]) -> float | None:
    at = record.get("at")
    return float(at) if isinstance(at, int | float) else None


class Senders:
    """Who sent what, from the messages alone."""

    def __init__(self) -> None:
        self._open: dict[Side, set[Any]] = {"client": set(), "agent": set()}

    def of(self, message: Any) -> Side:
        """The likeliest sender."""
        if not isinstance(message, dict):
            return "agent"
        method, request_id = message.get("method"), _id(message)
        if not isinstance(method, str):
            return "client" if request_id in self._open["agent"] and request_id not in self._open["client"] else "agent"
        if method == "$/cancel_request":
            params = message.get("params")
            named = params.get("requestId") if isinstance(params, dict) else None
            return "agent" if named in self._open["agent"] and named not in self._open["client"] else "client"
        return "agent" if served_by(method) == "client" else "client"

    def saw(self, sender: Side, message: Any) -> None:
        """Remember what was asked and answered."""
        if not isinstance(message, dict) or _id(message) is None:
            return
        if "method" in message:
            self._open[sender].add(_id(message))
        else:
            self._open["client" if sender == "agent" else "agent"].discard(_id(message))


def _id(message: dict[str, Any]) -> int | str | None:
    given = message.get("id")
    return given if isinstance(given, int | str) else None
