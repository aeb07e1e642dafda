"""Records the messages of a connection in a file, and reads recordings by crow or by another agent."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from crow.domain.errors import ArgumentError
from crow.domain.rendering import MASK, SecretMask
from crow.trace.schema import Side, is_served_by_client

logger = logging.getLogger(__name__)

_SECRET_NAME = re.compile(r"(?i)(api[-_]?key|secret|password|passwd|credential|authorization|^token$|access[-_]?token)")
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")
_PAIRS = ("env", "headers")
"""The names of members in which every value is secret. Such a member is an object, or a list of objects like
`{"name": ..., "value": ...}`."""


class Recorder:
    """An `Observer` (see :mod:`crow.frontend.transport`) that writes each message to a file. Each line of the file is a
    JSON object with time, sender and message.

    Secrets are masked, but JSON types stay the same, so that the recording can be checked. If the file cannot be
    written, the recording stops, but the connection goes on.
    """

    def __init__(self, file: Path, secrets: Iterable[str] = ()) -> None:
        self._file = file
        self.mask(secrets)
        self._descriptor: int | None = None
        self._is_broken = False

    def mask(self, secrets: Iterable[str]) -> None:
        """Masks these secrets in all lines that are recorded from now on."""
        self._mask = SecretMask(secrets)

    def __call__(self, direction: Literal["in", "out"], line: bytes) -> None:
        """Records one line."""
        if self._is_broken or not line.strip():
            return
        record: dict[str, Any] = {"at": round(time.time(), 6), "from": "client" if direction == "in" else "agent"}
        try:
            record["message"] = self._masked(json.loads(line))
        except (ValueError, RecursionError):
            record["line"] = self._masked_text(line.decode(errors="replace"))
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(self._descriptor, json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
        except OSError as error:
            self._is_broken = True
            logger.warning("The trace %s ends here: %s", self._file, error)

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._is_broken = None, True

    def _masked(self, value: Any, name: str = "") -> Any:
        match value:
            case str():
                return MASK if _SECRET_NAME.search(name) else self._masked_text(value)
            case list():
                is_pairs = name in _PAIRS
                return [
                    item | {"value": MASK} if is_pairs and _has_text_value(item) else self._masked(item)
                    for item in value
                ]
            case dict():
                return {key: self._masked(item, "secret" if name in _PAIRS else key) for key, item in value.items()}
            case _:
                return value

    def _masked_text(self, text: str) -> str:
        return self._mask(_URL_PASSWORD.sub(MASK, text))


def _has_text_value(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("value"), str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a recording: its number (from 1), its time in Unix seconds if recorded, its sender and its message.

    If the line is not JSON, `text` is set instead of `message`. In a check by `crow acp-check`, `raw` contains the
    bytes of the line, and `purpose` says why the check sent it.
    """

    line: int
    at: float | None
    sender: Side
    message: Any = None
    text: str | None = None
    raw: bytes | None = None
    purpose: str = ""


def read_recording(file: Path) -> Iterator[Recorded]:
    """Yields the lines of `file` in order, except blank lines. :raises ArgumentError: the file cannot be read."""
    senders = _Senders()
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _recorded(number, line, senders)
    except OSError as error:
        raise ArgumentError(f"{file}: cannot be read: {error.strerror or error}") from error


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
        """Returns the most likely sender of a message."""
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
        """Updates the open requests after a request or response."""
        match message:
            case {"method": _, "id": int() | str() as request_id}:
                self._open[sender].add(request_id)
            case {"id": int() | str() as request_id}:
                self._open["client" if sender == "agent" else "agent"].discard(request_id)

    def _is_open_only_for(self, side: Side, request_id: Any) -> bool:
        return request_id in self._open[side] and request_id not in self._open["client" if side == "agent" else "agent"]
