"""Data of events that is not one JSON object: the end, nothing at all, or chunks whose framing is amiss. Pure."""

from __future__ import annotations

import json
import re

__all__ = ["chunks_in", "is_end", "is_filler"]

_DECODER = json.JSONDecoder(strict=False)
_FILLERS = frozenset({"ping", "pong", "keep-alive", "keepalive", "heartbeat", "connected"})
_BETWEEN = re.compile(r"(?:\s|,|\ufeff|data:)*")
_END = re.compile(r"\[DONE\]", re.IGNORECASE)


def is_end(data: str) -> bool:
    """Whether nothing follows."""
    return _END.match(data) is not None


def is_filler(data: str) -> bool:
    """Whether the event only keeps the connection open."""
    return data.lower() in _FILLERS


def chunks_in(data: str) -> tuple[list[dict[str, object]], bool]:
    """`(chunks, whether the end follows)` of data that holds several, or one with something around; none if it is
    anything else besides."""
    chunks: list[dict[str, object]] = []
    at = 0
    while True:
        between = _BETWEEN.match(data, at)
        at = between.end() if between is not None else at
        if at >= len(data) or _END.match(data, at):
            return chunks, at < len(data)
        try:
            value, at = _DECODER.raw_decode(data, at)
        except (ValueError, RecursionError):
            return [], False
        if not isinstance(value, dict):
            return [], False
        chunks.append(value)
