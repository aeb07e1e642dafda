"""What the editor's files and terminals share: how a request is sent, and what a refusal says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from acp import RequestError

__all__ = ["Ask", "refusal_words"]

Ask: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Sends a request to the editor and gives its result. Raises RequestError for its error, ConnectionError without it."""


def refusal_words(error: RequestError) -> str:
    """What the editor says: some put the sentence into `data`, under a message that says nothing."""
    match error.data:
        case {"details": str(words)} | {"error": str(words)} | str(words) if words:
            return words
        case _:
            return str(error)
