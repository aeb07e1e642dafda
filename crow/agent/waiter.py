"""A prompt that was given to a session, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from crow.domain.entries import StopReason
from crow.domain.messages import Part

if TYPE_CHECKING:
    from crow.agent.server_prompts import CalledPrompt

__all__ = ["Waiter"]


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A prompt that somebody waits for: in the inbox, under `message_id`, once `seq` is set. `called` is the prompt of
    a server that it may be."""

    parts: Sequence[Part]
    text: str
    message_id: str
    called: CalledPrompt | None = None
    seq: int | None = None
    stored: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    cancelled: bool = False
    stop: StopReason = "end_turn"
    error: Exception | None = None
