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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

__all__ = ["Recorder"]

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
