"""A prompt that was given to a session, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from crow.agent.commands import Typed
from crow.domain.entries import StopReason
from crow.domain.messages import Part

if TYPE_CHECKING:
    from crow.agent.server_prompts import CalledPrompt

__all__ = ["Waiter"]


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A prompt that somebody waits for, or a `command`, which is stored with its answer. `called` is the prompt of a
    server that it may be. `ready`: its parts are whole; `waits`: it is in the inbox, under `message_id`."""

    parts: Sequence[Part]
    text: str
    message_id: str
    command: Typed | None = None
    called: CalledPrompt | None = None
    waits: bool = False
    ready: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    cancelled: bool = False
    stop: StopReason = "end_turn"
    error: Exception | None = None

    @property
    def is_nowhere(self) -> bool:
        """Whether it is a prompt that only memory holds, until its turn is claimed."""
        return self.ready.is_set() and self.command is None and not self.waits
