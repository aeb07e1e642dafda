"""Cursors: how much of a session's log a client has been sent, so that it can come back for the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crow.domain import entries, events
from crow.domain.entries import CallRef, Entry
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.domain.events import Event
from crow.frontend.params import resume_cursor
from crow.store import Store
from crow.store.codec import KINDS

CURSOR_KEY = "acp/cursor"
"""The member of `_meta` that holds a cursor."""

MAX_CALLS = 64
"""At most this many open calls are part of a cursor."""

MAX_MISSED_TURNS = 500
"""A client that has missed more turns than this has to load the session."""

MAX_OWN = 50
"""A tracker knows at most this many of the session's newest answers as the session's own."""

PIECEMEAL = (entries.User, entries.Remark, entries.Custom, entries.Command)
"""Entries whose updates a client joins to one text, so no update may be sent twice. The updates of other entries may be
repeated without harm."""

_CURSOR = re.compile(
    r"e(?P<entry>\d{1,18})\.(?P<pieces>\d{1,9})"
    r"(?:;m(?P<message>[\w-]{1,80}):(?P<thought>\d{1,12}):(?P<text>\d{1,12}))?"
    r"(?:;c(?P<calls>\d{1,18}\.\d{1,9}(?:=\d{1,12})?(?:,\d{1,18}\.\d{1,9}(?:=\d{1,12})?)*))?",
    re.ASCII,
)


class CursorGap(ArgumentError):
    """Crow cannot tell what a client has missed since its cursor."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"resume_failed: {problem} Load the session to get its whole history.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the log of a session.

    The client has been sent everything up to `entry`, and the first `pieces` updates of the next entry that a user
    sees. It has also been sent the first characters of the `thought` and the `text` of the message with the id
    `message`, which follows. `message` may also be a slash command whose text the client shows. `calls` are the open
    calls, with the number of characters that were sent to the terminal of each.
    """

    entry: int = 0
    pieces: int = 0
    message: str = ""
    thought: int = 0
    text: int = 0
    calls: Mapping[CallRef, int] = field(default_factory=dict)

    def __str__(self) -> str:
        message = f";m{self.message}:{self.thought}:{self.text}" if self.message else ""
        shown = [
            f"{call.assistant}.{call.index}" + (f"={chars}" if chars else "")
            for call, chars in list(self.calls.items())[-MAX_CALLS:]
        ]
        calls = f";c{','.join(shown)}" if shown else ""
        return f"e{self.entry}.{self.pieces}{message}{calls}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Reads a cursor. :raises CursorGap: it is not one of crow's."""
        found = _CURSOR.fullmatch(text[:8_000])
        if found is None:
            raise CursorGap("the cursor is not one of crow's.")
        calls: dict[CallRef, int] = {}
        for call in (found["calls"] or "").split(",") if found["calls"] else ():
            name, _, chars = call.partition("=")
            assistant, _, index = name.partition(".")
            calls[CallRef(assistant=int(assistant), index=int(index))] = int(chars or 0)
        if len(calls) > MAX_CALLS:
            raise CursorGap(f"the cursor names {len(calls)} open calls; crow names at most {MAX_CALLS}.")
        return cls(
            entry=int(found["entry"]),
            pieces=int(found["pieces"]),
            message=found["message"] or "",
            thought=int(found["thought"] or 0),
            text=int(found["text"] or 0),
            calls=calls,
        )


class CursorTracker:
    """Keeps the cursor of one client up to date. The caller calls a `pass_...` method before it sends each update.

    Entries of sub-agents that the client does not see as sessions never move the cursor. Unless the cursor
    `is_used`, updates do not move it, because no client gets it.
    """

    def __init__(self, cursor: Cursor | None = None, *, is_used: bool = True) -> None:
        self.cursor = cursor or Cursor()
        self._is_used = is_used
        self._own: dict[int, None] = {}

    def copy(self) -> CursorTracker:
        """A tracker at the same place, for a client that is sent the unfinished message and calls from their start."""
        made = CursorTracker(replace(self.cursor, message="", thought=0, text=0, calls={}))
        made._own = dict(self._own)
        return made

    def pass_entry(self, entry: Entry) -> None:
        """Everything up to this entry has been sent."""
        if not self._is_used:
            return
        match entry.body:
            case entries.Started(call=call) | entries.ToolResult(call=call) if call.assistant not in self._own:
                return
            case _:
                self.note_answer(entry)
        self.cursor = replace(self.cursor, entry=entry.id, pieces=0)
        if getattr(entry.body, "message_id", "") == self.cursor.message:
            self.cursor = replace(self.cursor, message="", thought=0, text=0)

    def note_answer(self, entry: Entry) -> None:
        """Learns that an answer belongs to the session, and not to a sub-agent."""
        if isinstance(entry.body, entries.Assistant):
            self._own[entry.id] = None
            if len(self._own) > MAX_OWN:
                del self._own[next(iter(self._own))]

    def pass_piece(self, body: entries.Body) -> None:
        """One of several updates of an entry has been sent."""
        if self._is_used and isinstance(body, PIECEMEAL):
            self.cursor = replace(self.cursor, pieces=self.cursor.pieces + 1)

    def pass_update(self, event: Event | None, update: Mapping[str, Any]) -> None:
        """An update of a message or a call has been sent. `event` is None if it repeats the present state."""
        if not self._is_used:
            return
        match update:
            case {"sessionUpdate": "tool_call" | "tool_call_update", "toolCallId": call_id, "status": status}:
                self._pass_call(CallRef.parse(call_id), status, update)
            case {"sessionUpdate": "agent_message_chunk" | "agent_thought_chunk" as kind, "messageId": message_id}:
                if isinstance(event, events.TextShown | events.ThoughtShown | None):
                    self._pass_chunk(kind, message_id, len(update["content"]["text"]))

    def pass_prompt(self, *, entry: int | None, command: str = "") -> None:
        """A turn has begun, and its prompt is known: the entry with this id, or the slash command with this id."""
        self.cursor = replace(self.cursor, entry=entry or 0, pieces=0, message=command, thought=0, text=0)

    def _pass_chunk(self, kind: str, message_id: str, chars: int) -> None:
        is_thought = kind == "agent_thought_chunk"
        message = message_id.removesuffix("_thought") if is_thought else message_id
        is_new = self.cursor.message != message
        thought, text = (0, 0) if is_new else (self.cursor.thought, self.cursor.text)
        thought, text = (thought + chars, text) if is_thought else (thought, text + chars)
        self.cursor = replace(self.cursor, message=message, thought=thought, text=text)

    def _pass_call(self, call: CallRef | None, status: str, update: Mapping[str, Any]) -> None:
        if call is None:
            return
        calls = dict(self.cursor.calls)
        if status in ("pending", "in_progress"):
            match update:
                case {"_meta": {"terminal_output": {"data": str(data)}}}:
                    calls[call] = calls.get(call, 0) + len(data)
                case _:
                    calls.setdefault(call, 0)
        else:
            calls.pop(call, None)
        if calls != self.cursor.calls:
            self.cursor = replace(self.cursor, calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What a client has missed: the `entries` after its cursor.

    `before` are the entries from the last answer before the cursor on; their calls may end in `entries`. `results` are
    the results of those open calls of the cursor that belong to sub-agents.
    """

    cursor: Cursor
    entries: tuple[Entry, ...]
    before: tuple[Entry, ...] = ()
    results: Mapping[CallRef, Entry] = field(default_factory=dict)


def cursor_in(params: Mapping[str, Any]) -> Cursor | None:
    """The cursor with which a client comes back; None if it has none. :raises CursorGap: it is not one of crow's."""
    text = resume_cursor(params)
    return None if text is None else Cursor.parse(text)


async def missed_since(cursor: Cursor, store: Store, session_id: str, newest: Sequence[Entry]) -> Missed:
    """What a client has missed. `newest` are entries of the session's path that are in memory.

    :raises CursorGap: the cursor is not a place in the session's present history, or too much was missed.
    """
    if cursor.entry and await store.entry(cursor.entry, session_id=session_id) is None:
        raise CursorGap(f"entry {cursor.entry} is not in the current history of this session.")
    leaf, place = (await store.session(session_id)).leaf, cursor.entry or None
    if len(await store.left_behind(leaf, place, ("turn_end",))) > MAX_MISSED_TURNS:
        raise CursorGap(f"more than {MAX_MISSED_TURNS} turns were missed.")
    answers = (each for each in reversed(newest) if isinstance(each.body, entries.Assistant))
    answer = next((each for each in answers if each.id <= cursor.entry), None)
    found = await store.left_behind(leaf, place if answer is None else answer.parent, frozenset(KINDS.values()))
    missed = tuple(entry for entry in found if entry.id > cursor.entry)
    before = tuple(entry for entry in found if entry.id <= cursor.entry)
    if answer is None:
        before = await _answers_of_calls(store, session_id, missed)
    ended = {entry.body.call for entry in found if isinstance(entry.body, entries.ToolResult)}
    own = {entry.id for entry in found}
    others = [call for call in cursor.calls if call not in ended and call.assistant not in own]
    return Missed(cursor=cursor, entries=missed, before=before, results=await _results(store, session_id, others))


async def _answers_of_calls(store: Store, session_id: str, missed: Sequence[Entry]) -> tuple[Entry, ...]:
    """The answers before the cursor whose calls end after it, if they are no longer in memory."""
    known = {entry.id for entry in missed}
    calls = (entry.body.call for entry in missed if isinstance(entry.body, entries.ToolResult))
    wanted = sorted({call.assistant for call in calls} - known)
    found = [await store.entry(each, session_id=session_id) for each in wanted]
    return tuple(entry for entry in found if entry is not None)


async def _results(store: Store, session_id: str, calls: Sequence[CallRef]) -> dict[CallRef, Entry]:
    """The results of calls that sub-agents of the session have made."""
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
