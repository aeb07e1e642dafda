"""Submitted prompts, and the answers to prompts that a client repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import anyio

from crow.agent.templates import ParsedCommand
from crow.agent.turns.mentions import Mention
from crow.domain.entries import PromptName, StopReason
from crow.domain.errors import SessionBusy, TurnError
from crow.domain.messages import JsonObject, Part, Usage
from crow.domain.trace_context import current_trace_context
from crow.store import NamedPrompt
from crow.store.prompts import check_same

if TYPE_CHECKING:  # circular if imported at run time
    from crow.agent.sessions.session import Session


@dataclass(slots=True, kw_only=True, eq=False)
class PendingPrompt:
    """A submitted prompt, and the state of its turn.

    `command` is set if the prompt is a slash command. `called` is set if the text may name a prompt of an MCP server.
    `mentions` are the resources of servers that the text mentions. `ready` is set when the parts are complete.
    `in_inbox` means that the prompt is in the store's inbox under `message_id`, for example because it waits for an
    earlier turn. `usage` is what the turn used. It is set at the end of the turn, and stays None if the turn made no
    request.
    """

    parts: Sequence[Part]
    text: str
    message_id: str
    command: ParsedCommand | None = None
    called: ParsedCommand | None = None
    mentions: tuple[Mention, ...] = ()
    metadata: JsonObject = field(default_factory=dict)
    name: PromptName | None = None
    """The name that the client gave to the prompt."""
    first: PendingPrompt | None = None
    """The prompt that this one repeats, if this process has that prompt in its queue."""
    is_repeat: bool = False
    """Whether the store has refused the prompt because it repeats a stored one."""
    known: NamedPrompt | None = None
    """The stored prompt that this one repeats, as it was last read."""
    on_joined: Callable[[NamedPrompt], object] = lambda _known: None
    """Called with the stored prompt when the store has refused this one as its repeat."""
    trace_context: Mapping[str, str] = field(default_factory=current_trace_context)
    in_inbox: bool = False
    ready: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    stop: StopReason = "end_turn"
    error: Exception | None = None
    usage: Usage | None = None

    @property
    def needs_servers(self) -> bool:
        """Whether MCP servers add content to the prompt. If so, the prompt is stored only after they have added the
        content."""
        return self.called is not None or bool(self.mentions)

    @property
    def is_only_in_memory(self) -> bool:
        """Whether the prompt is complete but still only in memory. Such a prompt is stored when its turn is claimed."""
        return self.ready.is_set() and self.command is None and not self.in_inbox


class TurnListener(Protocol):
    """A listener that is told when turns begin and end. The session's task calls the methods, and the same task
    publishes the events of the turns. So the listener is told of a turn before its first event and after its last."""

    async def turn_began(self, prompt: PendingPrompt) -> None:
        """Called when the turn of this prompt has been claimed. By then, the prompt has been stored, unless it is a
        command or calls a server's prompt."""

    async def turn_ended(self, prompt: PendingPrompt) -> None:
        """Called when the turn has ended, or could not begin. The prompt's `stop` and `error` are already set."""


def first_with(name: PromptName, queue: Iterable[PendingPrompt]) -> PendingPrompt | None:
    """Return the queued prompt with this name, or None.

    :raises ~crow.domain.errors.ArgumentError: it has other content.
    """
    for each in queue:
        if each.name is not None and each.name.id == name.id:
            check_same(name, each.name.digest)
            return each
    return None


async def answer_of_first(session: Session, prompt: PendingPrompt) -> StopReason:
    """Wait for the outcome of the prompt in the session's queue that this one repeats.

    :raises ~crow.domain.errors.CrowError: that prompt failed.
    """
    first = prompt.first
    assert first is not None
    await first.done.wait()
    if first.is_repeat:
        return await stored_outcome(session, prompt)
    prompt.stop, prompt.error, prompt.usage = first.stop, first.error, first.usage
    if prompt.error is not None:
        raise prompt.error
    return prompt.stop


async def stored_outcome(session: Session, prompt: PendingPrompt) -> StopReason:
    """Wait for the outcome of the stored prompt that this one repeats. Another process may run it.

    :raises ~crow.domain.errors.TurnError: its turn failed, or was interrupted.
    :raises ~crow.domain.errors.SessionBusy: another process runs it, and processes do not notify each other.
    :raises ~crow.domain.errors.ArgumentError: it has other content.
    """
    prompt.is_repeat, prompt.scope = True, anyio.CancelScope()
    with prompt.scope:
        known = await _stored(session, prompt)
        prompt.message_id = known.message_id
        prompt.on_joined(known)
        if known.end is None:  # if a process died, its turn and its queued prompts end now
            await session.adapters.store.open_session(session.id)
            known = await _stored(session, prompt)
        while known.end is None:
            if known.is_own and not session.has_turn:  # it was cancelled when the session was closed
                return _cancelled(prompt)
            await _change(session)
            known = await _stored(session, prompt)
        if session.follower is not None and known.end_entry is not None:
            await session.follower.reached(known.end_entry)
        return _outcome(prompt, known)
    if prompt.known is not None and prompt.known.turn is not None and prompt.known.end is None:
        await session.cancel_elsewhere()
    return _cancelled(prompt)


async def _change(session: Session) -> None:
    """Wait until something has happened in the session. With a follower, wait only for a limited time.

    :raises SessionBusy: only another process works on the session, and this process is not notified.
    """
    if session.follower is not None:
        await session.follower.until_free()
    elif session.current is not None:
        await session.current.done.wait()
    else:
        raise SessionBusy(session.id, (await session.adapters.store.session(session.id)).owner or "another process")


async def _stored(session: Session, prompt: PendingPrompt) -> NamedPrompt:
    assert prompt.name is not None
    known = await session.adapters.store.named_prompt(session.id, prompt.name)
    if known is None:
        raise TurnError(f'The first try of the prompt "{prompt.name.id}" could not be stored. Send it again.')
    prompt.known = known
    return known


def _cancelled(prompt: PendingPrompt) -> StopReason:
    prompt.stop = "cancelled"
    return prompt.stop


def _outcome(prompt: PendingPrompt, known: NamedPrompt) -> StopReason:
    """:raises TurnError: the turn failed, or was interrupted."""
    assert known.end is not None
    prompt.usage = known.usage
    match known.end.stop:
        case "error":
            raise TurnError(known.end.detail or "The turn failed.")
        case "interrupted":
            raise TurnError(
                f"The turn of this prompt was interrupted{known.end.detail and f': {known.end.detail}'}. The session"
                " has everything up to then. Send another prompt to continue."
            )
        case stop:
            prompt.stop = stop
            return stop
