"""Rules for prompts with names, for both engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from crow.domain.entries import Body, Command, Entry, ModelRequest, PromptName, TurnEnd, User
from crow.domain.errors import ArgumentError, RepeatedPrompt
from crow.domain.messages import Usage
from crow.store.values import NamedPrompt


class PromptRow(NamedTuple):
    """Columns of a row of `prompts`."""

    digest: str
    """See `PromptName.digest`."""
    message_id: str
    """The id of the prompt's message."""
    turn: int | None
    """The number of the turn that runs the prompt, or None if no turn has taken it."""
    entry: int | None
    """The id of the prompt's entry. For a slash command, the id of the newest entry that the session wrote before the
    turn, or 0. The end of the turn has a higher id. None if no turn has taken the prompt."""


def named_prompt_in(body: Body) -> tuple[PromptName, str] | None:
    """Return the name and the message id of the prompt in a body, or None if the body is not a prompt with a name."""
    return (body.name, body.message_id) if isinstance(body, User | Command) and body.name is not None else None


def check_same(name: PromptName, digest: str) -> None:
    """Check that the prompt `name` has the same content as the earlier prompt with this id. `digest` is the digest of
    the earlier prompt.

    :raises ArgumentError: the prompt has other content.
    """
    if digest != name.digest:
        raise ArgumentError(
            f'_meta.crow.promptId is "{name.id}", the id of an earlier prompt of this session with other content. Give '
            "each prompt an id of its own; only a repeat of the same prompt may have the same id."
        )


def check_new(name: PromptName, row: PromptRow | None) -> None:
    """Check that no prompt of the session has this name. `row` is the row with this name.

    :raises RepeatedPrompt: the same prompt was stored before.
    :raises ArgumentError: a prompt with other content has this name.
    """
    if row is not None:
        check_same(name, row.digest)
        raise RepeatedPrompt(name.id, row.message_id)


def waiting_prompt(row: PromptRow, sender: str | None, owner: str) -> NamedPrompt:
    """Return a prompt that has no turn. `sender` is the owner that put the prompt into the inbox. It is None if the
    prompt is no longer in the inbox, because the prompt was cancelled. `owner` is this store."""
    end = TurnEnd(stop="cancelled") if sender is None else None
    return NamedPrompt(message_id=row.message_id, end=end, is_own=sender == owner)


def ended_prompt(row: PromptRow, end_entry: int, entries: Sequence[Entry]) -> NamedPrompt:
    """Return a prompt whose turn has ended. `entries` are the entries of the turn that have a usage, followed by the
    entry that ends the turn."""
    body = entries[-1].body if entries else None
    return NamedPrompt(
        message_id=row.message_id,
        turn=row.turn,
        end=body if isinstance(body, TurnEnd) else TurnEnd(stop="interrupted"),
        end_entry=end_entry,
        usage=_usage_of_turn(entries),
    )


def _usage_of_turn(entries: Iterable[Entry]) -> Usage | None:
    """Return the sum of the usage of a turn's entries, or None if there is none. The request for a title does not
    belong to the turn. The result of a task counts, because it has the usage of the subagent."""
    found = [
        entry.usage
        for entry in entries
        if entry.usage is not None and not (isinstance(entry.body, ModelRequest) and entry.body.purpose == "title")
    ]
    return reduce(add, found) if found else None
