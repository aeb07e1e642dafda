"""What all requests to the editor share: how one is sent, how long its answer may take, and what a refusal says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from acp import RequestError

__all__ = ["Ask", "Timeouts", "refusal_words"]

Ask: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""Sends a request to the editor and gives its result. Raises RequestError for its error, ConnectionError without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long an answer may take, in seconds: `editor_s` one of the editor itself, about a file or a terminal;
    `user_s` one that a person gives: nobody waits for ever, and a lunch break is no answer."""

    editor_s: float = 30.0
    user_s: float = 24 * 3600.0


def refusal_words(error: RequestError) -> str:
    """What the editor says: some put the sentence into `data`, under a message that says nothing."""
    match error.data:
        case {"details": str(words)} | {"error": str(words)} | str(words) if words:
            return words
        case _:
            return str(error)
