"""Submitted prompts, and the queue in which they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from crow.agent.templates import ParsedCommand
from crow.agent.turns.mentions import Mention
from crow.domain.entries import PromptName, StopReason
from crow.domain.messages import JsonObject, Part, Usage
from crow.domain.trace_context import current_trace_context
from crow.store import NamedPrompt
from crow.store.prompts import check_same


@dataclass(slots=True, kw_only=True, eq=False)
class Repeat:
    """For a prompt that repeats an earlier prompt with the same name: the state of the earlier prompt."""

    queued: PendingPrompt | None = None
    """The earlier prompt, if this process has it in its queue."""
    is_refused: bool = False
    """Whether the store has refused the later prompt because the earlier one is stored."""
    stored: NamedPrompt | None = None
    """The stored prompt, as it was last read."""
    on_joined: Callable[[NamedPrompt], object] = lambda _stored: None
    """Called with the stored prompt when the store has refused the later one."""


@dataclass(slots=True, kw_only=True, eq=False)
class PendingPrompt:
    """A submitted prompt, and the state of its turn."""

    parts: Sequence[Part]
    text: str
    """The first part of the prompt if it is a text, else empty. If the prompt is a command, this is the command."""
    message_id: str
    command: ParsedCommand | None = None
    """The parsed command if the prompt is a slash command of crow, else None."""
    called: ParsedCommand | None = None
    """The parsed text if it may name a prompt of an MCP server (`/server:prompt`), else None."""
    mentions: tuple[Mention, ...] = ()
    """The resources of servers that the text mentions."""
    metadata: JsonObject = field(default_factory=dict)
    """Merged into the session's metadata before the turn."""
    name: PromptName | None = None
    """The name that the client gave to the prompt."""
    repeat: Repeat = field(default_factory=Repeat)
    """What is known of the earlier prompt, if this prompt repeats one."""
    trace_context: Mapping[str, str] = field(default_factory=current_trace_context)
    """The trace context of the request, which the turn uses for its own requests."""
    in_inbox: bool = False
    """Whether the prompt is in the store's inbox under `message_id`, for example because it waits for an earlier
    turn."""
    has_begun: bool = False
    """Whether its turn has been claimed, and the clients were told so."""
    end_is_told: bool = False
    """Whether the last news to the clients about this turn was that it has ended."""
    ready: anyio.Event = field(default_factory=anyio.Event)
    """Set when the parts are complete."""
    done: anyio.Event = field(default_factory=anyio.Event)
    """Set when the turn has ended, or when the database delays the end of the turn for too long. By then, `stop`,
    `error` and `usage` are set."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """The turn runs in this scope. Cancelling it cancels the turn."""
    stop: StopReason = "end_turn"
    error: Exception | None = None
    """Why the turn failed. The request with the prompt raises this error."""
    usage: Usage | None = None
    """What the turn used. None if the turn made no request."""

    @property
    def needs_servers(self) -> bool:
        """Whether MCP servers add content to the prompt. If so, the prompt is stored only after they have added the
        content."""
        return self.called is not None or bool(self.mentions)

    @property
    def is_only_in_memory(self) -> bool:
        """Whether the prompt is complete but still only in memory. Such a prompt is stored when its turn is claimed."""
        return self.ready.is_set() and self.command is None and not self.in_inbox


class PromptQueue(deque[PendingPrompt]):
    """The prompts of a session, in order. The turn of the first one runs or is next."""

    def named(self, name: PromptName) -> PendingPrompt | None:
        """Return the prompt with this name, or None.

        :raises ~crow.domain.errors.ArgumentError: it has other content.
        """
        for each in self:
            if each.name is not None and each.name.id == name.id:
                check_same(name, each.name.digest)
                return each
        return None

    @property
    def waiting(self) -> tuple[PendingPrompt, ...]:
        """The prompts that wait for an earlier turn."""
        return tuple(self)[1:]

    def revoke(self, prompt: PendingPrompt) -> bool:
        """Take back a prompt that waits for an earlier turn. Return False if the prompt's own turn is next or has
        begun.

        The prompt may already be in the store's inbox. In that case, the caller removes it from there when
        `Session.answer` has returned.
        """
        return prompt in self.waiting and self.drop(prompt)

    def drop(self, prompt: PendingPrompt) -> bool:
        """Remove a prompt, which ends as `cancelled`. Return False if it is not in the queue."""
        if prompt not in self:
            return False
        self.remove(prompt)
        prompt.stop = "cancelled"
        prompt.done.set()
        return True
