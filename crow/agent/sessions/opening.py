"""Prepares the stored row of a session that is about to be opened."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from crow.agent import new_session_id
from crow.agent.history.options import option_changes, options_at, usable_options
from crow.agent.permissions.rules import bind_rules
from crow.agent.subagents.kinds import changes_of_own
from crow.domain.entries import NewEntry, Note
from crow.domain.errors import LeafMoved, SessionBusy, StoreUnavailable
from crow.domain.messages import JsonObject
from crow.store import NewSession, SessionChanges, SessionRow, SessionSetup, Store, Tail
from crow.store.codec import changed_config, merged_metadata

logger = logging.getLogger(__name__)


def new_session(setup: SessionSetup, *, model: str, mode: str, alias: str | None) -> NewSession:
    """Return a session to create. `model` is the default model."""
    return NewSession(
        id=new_session_id(),
        cwd=setup.cwd,
        model=setup.model or model,
        mode=mode,
        additional_directories=setup.directories,
        alias=alias,
        config=changed_config({}, setup.config),
        metadata=merged_metadata({}, setup.metadata),
    )


async def store_fork(
    store: Store, session_id: str, setup: SessionSetup, *, entry: int | None, models: Collection[str]
) -> Tail:
    """Store a session that continues another session from `entry`, and return it. If `entry` is None, continue from the
    last entry. Otherwise, the new session gets the options that applied at `entry`, except for a model that is not in
    `models`."""
    row = await store.fork_session(
        session_id,
        new_session_id(),
        entry=entry,
        cwd=setup.cwd,
        additional_directories=setup.directories,
        metadata=setup.metadata,
    )
    if entry is not None:
        original = await store.session(session_id)
        options = usable_options(await options_at(store, original, original.leaf, entry), models)
        if options:
            row = await store.update_session(row.id, option_changes(options))
    await _store_config(store, row, {**changes_of_own(row.config), **setup.config})
    return await store.open_session(row.id)


async def store_setup(store: Store, tail: Tail, setup: SessionSetup, *, model: str) -> Tail:
    """Store the directories, model and configuration of `setup` in a session, and return the changed session. `model`
    is the default model.

    A change of the model is also stored as an entry.

    If the database cannot be written, the new directories and the new model are not stored, but the returned
    session has them.

    :raises StoreUnavailable: the configuration cannot be stored.
    """
    own = {} if tail.row.parent_id is None else changes_of_own(tail.row.config)
    row = await _store_config(store, tail.row, {**own, **setup.config})
    tail = replace(tail, row=row)
    cwd, directories = setup.cwd, setup.directories
    model = setup.model or row.model or model
    if (row.cwd, row.additional_directories, row.model) == (cwd, directories, model):
        return tail
    rules = bind_rules(row.permissions, row.cwd) if cwd != row.cwd else row.permissions
    changes = SessionChanges(model=model)
    if (row.cwd, row.additional_directories) != (cwd, directories):
        changes |= SessionChanges(cwd=cwd, additional_directories=directories, permissions=rules)
    try:
        if row.model not in ("", model) and tail.entries:
            with suppress(LeafMoved, SessionBusy):
                note = NewEntry(body=Note(about="model", value=model, previous=row.model))
                turn = tail.entries[-1].turn
                stored = await store.append(row.id, leaf=row.leaf, turn=turn, entries=[note], changes=changes)
                return replace(tail, row=await store.session(row.id), entries=(*tail.entries, *stored))
        return replace(tail, row=await store.update_session(row.id, changes))
    except StoreUnavailable as error:
        logger.warning("The directory %s of session %s could not be stored: %s", cwd, row.id, error)
        row = replace(row, cwd=cwd, additional_directories=directories, model=model, permissions=rules)
        return replace(tail, row=row)


async def _store_config(store: Store, row: SessionRow, config: JsonObject) -> SessionRow:
    """Change the configuration of a session, unless it already has these values. Return the session's row."""
    if changed_config(row.config, config) == row.config:
        return row
    return await store.update_session(row.id, SessionChanges(config=config))
