"""The interface through which MCP servers use the session's model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from crow.domain.entries import Announcement, CallRef
from crow.domain.messages import AssistantMessage, UserMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """A request of an MCP server to the session's model. The server sends it while it works on a call from crow."""

    server: str
    prefix: str
    """The server's name in permission rules: `sampling(prefix)`."""
    call: CallRef
    """The call that the server works on."""
    name: str
    """The tool's name in that call."""
    arguments: str
    """The arguments of that call."""
    announcement: Announcement
    """The announcement of that call, as it was shown to the user."""
    system: str
    """The system prompt. May be empty."""
    messages: tuple[UserMessage | AssistantMessage, ...]
    """The roles of the messages alternate."""
    max_tokens: int
    """The answer has at most this many tokens."""
    stop_sequences: tuple[str, ...] = ()
    """The answer ends before the first occurrence of one of these."""
    is_read_only: bool = False
    """If set, the user's settings allow the server to send requests to the model in plan mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAnswer:
    """The model's answer to a server."""

    text: str
    model: str
    """The model's name."""
    stop: Literal["end", "length", "stop_sequence"] = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRefusal:
    """The reason why a server gets no answer from the model."""

    words: str
    """The reason, for the server."""
    is_users: bool = False
    """If set, the user refused. Otherwise, something else prevents an answer."""


class Sampler(Protocol):
    """Lets the session's model answer MCP servers."""

    async def sample(
        self, request: SamplingRequest, on_progress: Callable[[int], Awaitable[None]]
    ) -> SamplingAnswer | SamplingRefusal:
        """Ask the user for permission, and then ask the model. `on_progress` is called with the length of the answer so
        far, in characters."""
