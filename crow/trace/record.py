"""Records the messages of a connection in a file, and reads such a recording."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from crow.domain.errors import ArgumentError
from crow.domain.rendering import MASK, SecretMask

logger = logging.getLogger(__name__)

_SECRET_NAME = re.compile(r"(?i)(api[-_]?key|secret|password|passwd|credential|authorization|^token$|access[-_]?token)")
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")
_PAIRS = ("env", "headers")
"""The names of members in which every value is secret. Such a member is an object, or a list of objects like
`{"name": ..., "value": ...}`."""


class Recorder:
    """An `Observer` (see :mod:`crow.protocol.transport`) that writes each message to a file. Each line of the file is a
    JSON object with time, sender and message.

    Secrets are masked, but JSON types stay the same, so that the recording can be checked against the protocol. If the
    file cannot be written, the recording stops, but the connection goes on.
    """

    def __init__(self, file: Path, secrets: Iterable[str] = ()) -> None:
        self._file = file
        self.mask(secrets)
        self._descriptor: int | None = None
        self._is_broken = False

    def mask(self, secrets: Iterable[str]) -> None:
        """Mask these secrets in every line that is recorded after this call."""
        self._mask = SecretMask(secrets)

    def __call__(self, direction: Literal["in", "out"], line: bytes) -> None:
        """Record one line."""
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
        """Close the file."""
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
                    item | {"value": MASK} if is_pairs and _has_text_value(item) else self._masked(item, name)
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


Side: TypeAlias = Literal["agent", "client"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a recording."""

    line: int
    """The number of the line, from 1."""
    at: float
    """When the message was sent, in Unix seconds."""
    sender: Side
    """Who sent the message."""
    message: Any = None
    """The message as a JSON value, or None if the line was not JSON."""
    text: str | None = None
    """The line as it was sent, or None if it was JSON."""


def read_recording(file: Path) -> Iterator[Recorded]:
    """Yield the lines of `file` in order, except blank lines.

    :raises ArgumentError: the file cannot be read, or is not a recording.
    """
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _recorded(file, number, line)
    except OSError as error:
        raise ArgumentError(f"{file}: cannot be read: {error.strerror or error}") from error


def _recorded(file: Path, number: int, line: str) -> Recorded:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"at": int() | float() as at, "from": "client" | "agent" as sender, "line": str(text)}:
            return Recorded(line=number, at=at, sender=sender, text=text)
        case {"at": int() | float() as at, "from": "client" | "agent" as sender, "message": message}:
            return Recorded(line=number, at=at, sender=sender, message=message)
    raise ArgumentError(
        f"{file}, line {number}: not a line of a recording: {line.strip()[:80]}. CROW_TRACE=FILE makes recordings."
    )
