"""Reads the part of a session that a client has missed since its cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crow.domain import entries
from crow.domain.entries import CallRef, Entry
from crow.domain.errors import NoSuchSession
from crow.frontend.cursors import Cursor, CursorGap
from crow.store import Store
from crow.store.codec import KINDS

_MAX_MISSED_TURNS = 500
"""A client that has missed more turns than this cannot resume from its cursor. It must load the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The part of a session that a client has missed."""

    cursor: Cursor
    """The place up to which the client has been sent everything."""
    entries: tuple[Entry, ...]
    """The entries after the cursor."""
    before: tuple[Entry, ...] = ()
    """Earlier entries, among them the answers that made the calls whose results are in `entries`."""
    results: Mapping[CallRef, Entry] = field(default_factory=dict)
    """The results that are stored by now for calls that were open at the cursor and were made by subagents."""


async def missed_since(cursor: Cursor, store: Store, session_id: str, newest: Sequence[Entry]) -> Missed:
    """Return the part of a session that a client has missed since `cursor`. `newest` contains the newest entries of
    the session, which are in memory. The ids of entries increase from the beginning of the history to its end.

    :raises CursorGap: the cursor is not in the current history of the session, or the client has missed too many turns.
    """
    if cursor.entry and await store.entry(cursor.entry, session_id=session_id) is None:
        raise CursorGap(f"entry {cursor.entry} is not in the current history of this session.")
    leaf, place = (await store.session(session_id)).leaf, cursor.entry or None
    if len(await store.entries_beyond(leaf, place, ("turn_end",))) > _MAX_MISSED_TURNS:
        raise CursorGap(f"the client has missed more than {_MAX_MISSED_TURNS} turns.")
    # Calls that were open at the cursor belong to the last answer before the cursor. If that answer is in memory, read
    # the entries from that answer. If not, look up one by one the answers whose calls have results in the missed part.
    answers = (each for each in reversed(newest) if isinstance(each.body, entries.Assistant))
    answer = next((each for each in answers if each.id <= cursor.entry), None)
    every_kind = frozenset(KINDS.values())
    found = await store.entries_beyond(leaf, place if answer is None else answer.parent, every_kind)
    missed = tuple(entry for entry in found if entry.id > cursor.entry)
    before = tuple(entry for entry in found if entry.id <= cursor.entry)
    if answer is None:
        before = await _answers_of_calls(store, session_id, missed)
    ended = {entry.body.call for entry in found if isinstance(entry.body, entries.ToolResult)}
    own = {entry.id for entry in found}
    # calls of answers that are not on this path were made by subagents
    others = [call for call in cursor.calls if call not in ended and call.assistant not in own]
    return Missed(cursor=cursor, entries=missed, before=before, results=await _results(store, session_id, others))


async def _answers_of_calls(store: Store, session_id: str, missed: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the answers before `missed` that made the calls whose results are in `missed`."""
    known = {entry.id for entry in missed}
    calls = (entry.body.call for entry in missed if isinstance(entry.body, entries.ToolResult))
    wanted = sorted({call.assistant for call in calls} - known)
    found = [await store.entry(each, session_id=session_id) for each in wanted]
    return tuple(entry for entry in found if entry is not None)


async def _results(store: Store, session_id: str, calls: Sequence[CallRef]) -> dict[CallRef, Entry]:
    """Return the results of those `calls` that subagents of the session made."""
    found: dict[CallRef, Entry] = {}
    subagents = await store.subagents(session_id) if calls else ()
    for call in calls:
        for row in subagents:
            try:
                result = await store.result(row.id, call)
            except NoSuchSession:
                continue
            if result is not None:
                found[call] = result
                break
    return found
