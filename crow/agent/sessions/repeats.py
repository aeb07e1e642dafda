"""Answers prompts that a client repeats, for example after it has lost its connection.

A repeated prompt has the name of an earlier one, and never runs. It gets the outcome of the earlier one. If that prompt
is in the queue of this process, the repeat waits for it there. Otherwise another process runs it, or its turn is over,
and the store has its outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from crow.agent.sessions.conversation import Conversation
from crow.agent.sessions.pending import PendingPrompt
from crow.domain.entries import StopReason
from crow.domain.errors import TurnError
from crow.store import NamedPrompt

_POLL_S = 0.5
"""If processes do not notify each other, crow asks the store at this interval, in seconds, for the outcome of a prompt
that another process runs."""


async def answer_of_first(
    conversation: Conversation, queue: Sequence[PendingPrompt], prompt: PendingPrompt
) -> StopReason:
    """Wait for the outcome of the prompt in `queue` that `prompt` repeats. If the queued prompt turns out to repeat a
    stored one, wait for the outcome of the stored one.

    :raises ~crow.domain.errors.CrowError: the turn of the first prompt failed.
    """
    first = prompt.repeat.queued
    assert first is not None
    await first.done.wait()
    if first.repeat.is_refused:
        return await stored_outcome(conversation, queue, prompt)
    prompt.stop, prompt.error, prompt.usage = first.stop, first.error, first.usage
    if prompt.error is not None:
        raise prompt.error
    return prompt.stop


async def stored_outcome(
    conversation: Conversation, queue: Sequence[PendingPrompt], prompt: PendingPrompt
) -> StopReason:
    """Wait for the outcome of the stored prompt that `prompt` repeats. Another process may run the stored one.

    :raises ~crow.domain.errors.TurnError: the turn of the stored prompt failed, or was interrupted.
    :raises ~crow.domain.errors.ArgumentError: the stored prompt has other content.
    """
    prompt.repeat.is_refused, prompt.scope = True, anyio.CancelScope()
    with prompt.scope:
        known = await _stored(conversation, prompt)
        prompt.message_id = known.message_id
        prompt.repeat.on_joined(known)
        if known.end is None:  # opening the session ends the turn and the queued prompts of a process that died
            await conversation.adapters.store.open_session(conversation.id)
            known = await _stored(conversation, prompt)
        while known.end is None:
            if known.is_own and not queue:  # the stored prompt was cancelled when the session was closed
                return _cancelled(prompt)
            await _until_changed(conversation, queue)
            known = await _stored(conversation, prompt)
        if conversation.follower is not None and known.end_entry is not None:
            await conversation.follower.reached(known.end_entry)
        return _outcome(prompt, known)
    stored = prompt.repeat.stored
    if stored is not None and stored.turn is not None and stored.end is None:
        await conversation.cancel_elsewhere()
    return _cancelled(prompt)


async def _until_changed(conversation: Conversation, queue: Sequence[PendingPrompt]) -> None:
    """Wait until something may have happened in the session, but only for a limited time if another process works on
    the session."""
    if conversation.follower is not None:
        await conversation.follower.until_free()
    elif queue:
        await queue[0].done.wait()
    else:  # nothing notifies this process
        await anyio.sleep(_POLL_S)
        await conversation.adapters.store.open_session(conversation.id)  # ends the turn of a process that died


async def _stored(conversation: Conversation, prompt: PendingPrompt) -> NamedPrompt:
    """Read the stored prompt. :raises ~crow.domain.errors.TurnError: it could never be stored."""
    assert prompt.name is not None
    known = await conversation.adapters.store.named_prompt(conversation.id, prompt.name)
    if known is None:
        raise TurnError(f'The first try of the prompt "{prompt.name.id}" could not be stored. Send it again.')
    prompt.repeat.stored = known
    return known


def _cancelled(prompt: PendingPrompt) -> StopReason:
    prompt.stop = "cancelled"
    return prompt.stop


def _outcome(prompt: PendingPrompt, known: NamedPrompt) -> StopReason:
    """Return how the turn of the stored prompt ended. :raises TurnError: the turn failed, or was interrupted."""
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
