"""Reads recordings of a connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acp_check.errors import CheckError
from acp_check.schema import Side, is_served_by_client


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a recording."""

    line: int
    """The number of the line, from 1."""
    at: float | None
    """When it was sent, in Unix seconds, or None if the recording does not say."""
    sender: Side
    """Who sent the line. It is guessed from the message if the recording does not say."""
    message: Any = None
    """The JSON value, or None if the line is not JSON."""
    text: str | None = None
    """The line, only if it is not JSON."""
    raw: bytes | None = None
    """The bytes of the line, only during a check."""
    purpose: str = ""
    """Why the check sent the line."""


def read_recording(file: Path) -> Iterator[Recorded]:
    """Yield the lines of `file` in order, except blank lines. :raises CheckError: the file cannot be read."""
    senders = _Senders()
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _recorded(number, line, senders)
    except OSError as error:
        raise CheckError(f"{file}: cannot be read: {error.strerror or error}") from error


def _recorded(number: int, line: str, senders: _Senders) -> Recorded:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Recorded(line=number, at=None, sender="agent", text=line.rstrip("\n"))
    at = value.get("at") if isinstance(value, dict) else None
    at = float(at) if isinstance(at, int | float) else None
    match value:
        case {"from": "client" | "agent" as sender, "line": str(text)}:
            return Recorded(line=number, at=at, sender=sender, text=text)
        case {"from": "client" | "agent" as sender, "message": message}:
            pass
        case message:
            sender = senders.guess(message)
    senders.remember(sender, message)
    return Recorded(line=number, at=at, sender=sender, message=message)


class _Senders:
    """Guesses who sent a message if the recording does not name the sender.

    For example, a request for a method that the client serves comes from the agent.
    """

    def __init__(self) -> None:
        self._open: dict[Side, set[Any]] = {"client": set(), "agent": set()}

    def guess(self, message: Any) -> Side:
        """Return the most likely sender of a message."""
        match message:
            case {"method": "$/cancel_request", "params": {"requestId": int() | str() as request_id}}:
                return "agent" if self._is_open_only_for("agent", request_id) else "client"
            case {"method": str(method)}:
                return "agent" if is_served_by_client(method) else "client"
            case {"id": int() | str() as request_id} if self._is_open_only_for("agent", request_id):
                return "client"
            case _:
                return "agent"

    def remember(self, sender: Side, message: Any) -> None:
        """Update the open requests after a request or response."""
        match message:
            case {"method": _, "id": int() | str() as request_id}:
                self._open[sender].add(request_id)
            case {"id": int() | str() as request_id}:
                self._open["client" if sender == "agent" else "agent"].discard(request_id)

    def _is_open_only_for(self, side: Side, request_id: Any) -> bool:
        return request_id in self._open[side] and request_id not in self._open["client" if side == "agent" else "agent"]
