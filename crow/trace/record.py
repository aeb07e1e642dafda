"""Writes what crosses the wire to a file, as it crosses it.

Strategy: one JSON object a line: when, who sent it, the message. Secrets are masked by where they stand (headers, the
environment of servers, members named like one) and by what they are; types stay, so that a recording can be judged. A
file that cannot be written ends the recording and nothing else.
"""

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
from crow.trace.schema import Side, served_by

__all__ = ["Recorded", "Recorder", "read_recording"]

logger = logging.getLogger(__name__)

MASK = "…"
_SECRET_NAME = re.compile(r"(?i)(api[-_]?key|secret|password|passwd|credential|authorization|^token$|access[-_]?token)")
_LOOKS_SECRET = re.compile(r"(?i)\b(?:sk-[a-z0-9_-]{8,}|(?<=bearer )[^\s\"',]+)")
_PAIRS = ("env", "headers")


class Recorder:
    """See `Observer` in :mod:`crow.frontend.transport`. `secrets` are masked wherever they stand."""

    def __init__(self, file: Path, secrets: Iterable[str] = ()) -> None:
        self._file = file
        self.mask(secrets)
        self._descriptor: int | None = None
        self._is_broken = False

    def mask(self, secrets: Iterable[str]) -> None:
        """Mask these from now on."""
        self._secrets = sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True)

    def __call__(self, direction: Literal["in", "out"], line: bytes) -> None:
        """Record one line."""
        if self._is_broken or not line.strip():
            return
        record: dict[str, Any] = {"at": round(time.time(), 6), "from": "client" if direction == "in" else "agent"}
        try:
            record["message"] = self._masked(json.loads(line))
        except (ValueError, RecursionError):
            record["line"] = self._plain(line.decode(errors="replace"))
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
                return MASK if _SECRET_NAME.search(name) else self._plain(value)
            case list() if name in _PAIRS:
                return [self._pair(item) for item in value]
            case list():
                return [self._masked(item) for item in value]
            case dict():
                inner = "secret" if name in _PAIRS else ""
                return {key: self._masked(item, inner or key) for key, item in value.items()}
            case _:
                return value

    def _pair(self, item: Any) -> Any:
        if isinstance(item, dict) and isinstance(item.get("value"), str):
            return item | {"value": MASK}
        return self._masked(item)

    def _plain(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return _LOOKS_SECRET.sub(MASK, text)


# FROM trace.recording: A recording as it is read: crow's own, or the bare messages of any agent, one JSON object a
# line.
#
# Strategy: where a line does not say who sent it, the message does: a method by the side that serves it, a response
# by
# the side that was asked. Reads line by line; what is no message stays, as text, so that it can be shown and judged.


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
