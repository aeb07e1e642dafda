"""The prompts that MCP servers offer, as the agent sees them: templates that the server fills in when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from crow.domain.messages import Part

__all__ = ["PromptArgument", "ServerPrompt", "ServerPrompts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptArgument:
    """What a prompt is filled in with."""

    name: str
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPrompt:
    """A prompt on offer. `name` is `server:prompt`, unique in the session, without blanks; `server` is for people."""

    name: str
    server: str
    description: str
    arguments: tuple[PromptArgument, ...] = ()


class ServerPrompts(Protocol):
    """The prompts of a session's servers."""

    def prompts(self) -> tuple[ServerPrompt, ...]:
        """What is offered now, in the order of the servers; only of those that are ready."""
        ...

    async def prompt(self, name: str) -> ServerPrompt | None:
        """The prompt of this name. A server that is still starting is waited for, one that has failed is started
        again; None: no server has it, or its server is not there."""
        ...

    async def fill(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """What the prompt says with these arguments; not empty.

        :raises ~crow.domain.errors.ToolServerError: the server is gone, refused, or gave nothing that can be used.
        """
        ...
