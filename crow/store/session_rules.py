"""Rules for the rows of sessions, for both engines: which values a row gets, and which requests are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.store.codec import changed_config, from_json, merged_metadata, to_json
from crow.store.rows import JSON_COLUMNS, is_plain, plain, title_of_fork
from crow.store.values import NewSession, SessionChanges, SessionRow

LARGEST_ID = 2**63 - 1
"""The largest id that an entry can have."""


def is_entry_id(number: int) -> bool:
    """Return whether an entry can have this id."""
    return 0 < number <= LARGEST_ID


def check_new_id(session_id: str) -> None:
    """:raises ArgumentError: the id of a new session has characters that the database cannot store."""
    if not is_plain(session_id):
        raise ArgumentError(f"Session id {session_id!r} has characters that the database cannot store.")


def id_taken(session_id: str) -> ArgumentError:
    """Return the error for a new session with the id of another session, perhaps of a deleted one."""
    return ArgumentError(f"Session id {session_id} is taken; ids are never used twice.")


def alias_taken(alias: str, other: str) -> ArgumentError:
    """Return the error for an alias that belongs to the session `other`."""
    return ArgumentError(f'Alias "{alias}" belongs to session {other}; choose another alias.')


def check_alias_to_move(session_id: str, alias: str | None) -> str:
    """Return the alias that the session `session_id` gives to another session.

    :raises ArgumentError: the session has no alias.
    """
    if alias is None:
        raise ArgumentError(f"Session {session_id} has no alias any more. Another process moved or removed the alias.")
    return alias


def not_in_conversation(entry: int, conversation: int) -> ArgumentError:
    """Return the error for a fork from an entry of another conversation, or from an entry that does not exist."""
    return ArgumentError(f"Entry {entry} is not in conversation {conversation}; fork from an entry that is.")


def not_in_session(entry: int, session_id: str) -> ArgumentError:
    """Return the error for a move of a session to an entry that is not in its conversation."""
    return ArgumentError(f"Entry {entry} is not in the conversation of session {session_id}.")


def check_page_limit(limit: int) -> None:
    """:raises ArgumentError: `limit` is less than 1."""
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; expected 1 or more.")


def check_share(session_id: str, principal: str, *, parent: str | None, owner: str | None) -> None:
    """Check that a session can be shared with a principal. `parent` and `owner` are the session's parent and principal.

    :raises ArgumentError: the session is a subagent, or belongs to this principal.
    """
    if parent is not None:
        raise ArgumentError(f"Session {session_id} is a subagent. Share the session that started it, {parent}.")
    if owner == principal:
        raise ArgumentError(f"Session {session_id} belongs to {principal} already.")


def token_taken(token_id: str) -> ArgumentError:
    """Return the error for a new token with the id of another token."""
    return ArgumentError(f"Token id {token_id} is taken; make another.")


def fork_of(
    row: SessionRow,
    new_id: str,
    *,
    entry: int | None,
    cwd: str,
    additional_directories: tuple[str, ...],
    metadata: JsonObject | None,
    principal: str | None,
    titles: Sequence[str | None],
) -> NewSession:
    """Return the fork of the session `row`. `titles` are the titles of the sessions that `principal` has in the
    conversation. For the other parameters, see `SessionStore.fork_session`."""
    return NewSession(
        id=new_id,
        cwd=cwd,
        additional_directories=additional_directories,
        forked_from=row.id,
        conversation=row.conversation,
        leaf=row.leaf if entry is None else entry,
        model=row.model,
        mode=row.mode,
        config=row.config,
        title=title_of_fork(row.title, titles),
        principal=principal,
        metadata=merged_metadata(row.metadata, metadata or {}),
    )


def columns_of_new(
    new: NewSession, *, conversation: int, principal: str | None, turn: int, has_prompt: bool, now_ms: int
) -> dict[str, Any]:
    """Return the columns of a new session's row. `turn` is that of the entry `new.leaf`, and `has_prompt` says whether
    a prompt is on the path to this entry."""
    return {field.name: _column(field.name, getattr(new, field.name)) for field in fields(new)} | {
        "conversation": conversation,
        "principal": _column("principal", principal),
        "turn": turn,
        "has_prompt": has_prompt,
        "newest_entry": new.leaf or 0,
        "created_ms": now_ms,
        "updated_ms": now_ms,
    }


def changed_columns(changes: SessionChanges, *, is_title_by_user: bool, config: str) -> Mapping[str, Any]:
    """Return the columns to set in the row of a session, without `updated_ms`. A title that the user chose
    (`is_title_by_user`) is replaced only by another title that the user chose. `config` is the JSON of the session's
    configuration."""
    values: dict[str, Any] = dict(changes)
    if is_title_by_user and not changes.get("title_by_user"):
        values.pop("title", None)
    if "config" in changes:
        values["config"] = changed_config(from_json(config, {}), changes["config"])
    return {name: _column(name, value) for name, value in values.items()}


def is_update(changed: Mapping[str, Any]) -> bool:
    """Return whether setting these columns changes `updated_ms`. Archiving does not."""
    return changed.keys() != {"archived"}


def _column(name: str, value: object) -> object:
    """Return a value of a session as its column holds it."""
    if name in JSON_COLUMNS:
        return to_json(value)
    return plain(value) if isinstance(value, str) else value
