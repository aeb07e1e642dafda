"""The mode, the model and other options of a session: how they change, and how going back restores them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from crow.agent.history.branch import Branch
from crow.domain.entries import NewEntry, Note
from crow.domain.errors import LeafMoved, SessionBusy
from crow.domain.events import ModeChanged, OptionsChanged
from crow.llm import THOUGHT_LEVELS
from crow.store import SessionChanges, SessionRow, Store

logger = logging.getLogger(__name__)

Options: TypeAlias = Mapping[Literal["model", "thought_level"], str]
"""Maps options to their values. These are the options that are restored when the user goes back in the conversation.
Each change of one of them is stored as an entry."""


async def set_mode(branch: Branch, mode: str) -> None:
    """Change the permission mode, starting with the next call."""
    if mode != branch.row.mode:
        await branch.change(SessionChanges(mode=mode))
    await branch.publish(ModeChanged(mode=mode))


async def set_model(branch: Branch, name: str) -> None:
    """Change the model, starting with the next turn."""
    if name != branch.row.model:
        note = Note(about="model", value=name, previous=branch.row.model)
        await _change_option(branch, note, SessionChanges(model=name))
    await branch.publish(OptionsChanged())


async def set_option(branch: Branch, name: str, value: str | bool) -> None:
    """Change an option in the session's configuration. The change takes effect with the next turn."""
    if branch.row.config.get(name) != value:
        changes = SessionChanges(config={name: value})
        if name == "thought_level":
            previous = _option(branch.row, "thought_level")
            await _change_option(branch, Note(about="thought_level", value=str(value), previous=previous), changes)
        else:
            await branch.change(changes)
    await branch.publish(OptionsChanged())


async def _change_option(branch: Branch, note: Note, changes: SessionChanges) -> None:
    """Change the session's row and store `note`, in one transaction.

    If another process has added entries or is running a turn, change the row without storing `note`. Do the same if
    the session has no entries, because then the user cannot go back in it.
    """
    if branch.leaf is not None:
        try:
            await branch.record([NewEntry(body=note)], changes=changes)
        except (LeafMoved, SessionBusy):
            logger.info("Session %s: the %s was changed without an entry", branch.row.id, note.about)
        else:
            return
    await branch.change(changes)


async def adopt_options(branch: Branch, options: Options, offered: Collection[str], *, keep: bool) -> Options:
    """After a move, set the `options` that applied at the new leaf. Skip options with unusable values, such as a model
    that is not in `offered`. If `keep` is true, skip all options. For each skipped option, store a `Note` with the
    value that the session keeps. Return the options that were set."""
    adopted = {} if keep else usable_options(options, offered)
    if adopted:
        await branch.change(option_changes(adopted))
        await branch.publish(OptionsChanged())
    kept = [
        NewEntry(body=Note(about=about, value=_option(branch.row, about), previous=value))
        for about, value in options.items()
        if about not in adopted
    ]
    if kept:
        await branch.record(kept)
    return adopted


async def options_at(store: Store, row: SessionRow, leaf: int | None, to: int | None) -> Options:
    """For each option whose value at the entry `to` differs from the session's value at `leaf`, return the value at
    `to`."""
    found: dict[Literal["model", "thought_level"], str] = {}
    for entry in await store.entries_beyond(leaf, to, ("note",)):
        match entry.body:
            case Note(about="model" | "thought_level" as about, previous=previous):
                found.setdefault(about, previous)
    for entry in await store.entries_beyond(to, leaf, ("note",)):
        match entry.body:
            case Note(about="model" | "thought_level" as about, value=value):
                found[about] = value
    return {about: value for about, value in found.items() if value != _option(row, about)}


def usable_options(options: Options, offered: Collection[str]) -> Options:
    """Return those of `options` that can be set now: the model if it is offered, and the thought level if it exists.
    Both are checked because the options may come from an imported file, and the user's settings may have changed."""
    valid = {"model": offered, "thought_level": ("", *THOUGHT_LEVELS)}
    return {about: value for about, value in options.items() if value in valid[about]}


def option_changes(options: Options) -> SessionChanges:
    """Return the changes to the session's row that set these options."""
    changes = SessionChanges()
    if "model" in options:
        changes["model"] = options["model"]
    if "thought_level" in options:
        changes["config"] = {"thought_level": options["thought_level"]}
    return changes


def _option(row: SessionRow, about: Literal["model", "thought_level"]) -> str:
    return row.model if about == "model" else str(row.config.get("thought_level") or "")
