"""Cursors: places in a session's log, from which a client can resume the session after its connection broke."""

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
"""The name of the member of `_meta` that holds a cursor."""

MAX_CALLS = 64
"""A cursor contains at most this many open calls."""

MAX_MISSED_TURNS = 500
"""A client that has missed more turns than this cannot resume from its cursor. It must load the session."""

MAX_OWN = 50
"""A tracker remembers this many of the session's newest answers. Answers of sub-agents do not count."""

PIECEMEAL = (entries.User, entries.Remark, entries.Custom, entries.Command)
"""The kinds of entries whose updates must not be sent twice, because clients join these updates into one text. For all
other kinds, sending the updates twice does no harm."""

_CURSOR = re.compile(
    r"e(?P<entry>\d{1,18})\.(?P<pieces>\d{1,9})"
    r"(?:;m(?P<message>[\w-]{1,80}):(?P<thought>\d{1,12}):(?P<text>\d{1,12}))?"
    r"(?:;c(?P<calls>\d{1,18}\.\d{1,9}(?:=\d{1,12})?(?:,\d{1,18}\.\d{1,9}(?:=\d{1,12})?)*))?",
    re.ASCII,
)


class CursorGap(ArgumentError):
    """The error for a cursor from which crow cannot resume a session. The client must load the session."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"resume_failed: {problem} Load the session to get its whole history.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A place in the log of a session: the point up to which the client has been sent everything.

    - `entry`: the id of the last entry whose updates were all sent.
    - `pieces`: how many updates were sent of the first entry after `entry` whose kind is in `PIECEMEAL`.
    - `message`: the id of a later message that was sent in part, or of a slash command whose text was sent. Empty if
      there is neither.
    - `thought` and `text`: how many characters were sent of the thought and the text of `message`.
    - `calls`: the calls that have not ended, each with the number of characters that were sent to its terminal.
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
        """Parses the text of a cursor. :raises CursorGap: crow did not make this text."""
        found = _CURSOR.fullmatch(text[:8_000])
        if found is None:
            raise CursorGap("crow did not make this cursor.")
        calls: dict[CallRef, int] = {}
        for call in (found["calls"] or "").split(",") if found["calls"] else ():
            name, _, chars = call.partition("=")
            assistant, _, index = name.partition(".")
            calls[CallRef(assistant=int(assistant), index=int(index))] = int(chars or 0)
        if len(calls) > MAX_CALLS:
            raise CursorGap(f"the cursor has {len(calls)} open calls, but crow's cursors have at most {MAX_CALLS}.")
        return cls(
            entry=int(found["entry"]),
            pieces=int(found["pieces"]),
            message=found["message"] or "",
            thought=int(found["thought"] or 0),
            text=int(found["text"] or 0),
            calls=calls,
        )


class CursorTracker:
    """Keeps the cursor of one client up to date. The caller must call a `pass_...` method before it sends each update.

    Entries of sub-agents never move the cursor. With `is_used=False`, the client gets no cursors, so entries and
    updates of the session do not move the cursor either.
    """

    def __init__(self, cursor: Cursor | None = None, *, is_used: bool = True) -> None:
        self.cursor = cursor or Cursor()
        self._is_used = is_used
        self._own: dict[int, None] = {}

    def copy(self) -> CursorTracker:
        """Returns a tracker at the same place for a new client. The tracker leaves out the unfinished message and
        calls, because the new client will be sent them from the beginning."""
        made = CursorTracker(replace(self.cursor, message="", thought=0, text=0, calls={}))
        made._own = dict(self._own)
        return made

    def pass_entry(self, entry: Entry) -> None:
        """Notes that all updates of this entry and of all earlier entries have been sent."""
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
        """Notes that an answer belongs to the session itself, and not to a sub-agent. Does nothing if `entry` is not an
        answer."""
        if isinstance(entry.body, entries.Assistant):
            self._own[entry.id] = None
            if len(self._own) > MAX_OWN:
                del self._own[next(iter(self._own))]

    def pass_piece(self, body: entries.Body) -> None:
        """Notes that one of several updates of an entry is sent."""
        if self._is_used and isinstance(body, PIECEMEAL):
            self.cursor = replace(self.cursor, pieces=self.cursor.pieces + 1)

    def pass_update(self, event: Event | None, update: Mapping[str, Any]) -> None:
        """Notes that an update of a message or a call is sent. `event` is None if the update shows the current state
        and belongs to no event."""
        if not self._is_used:
            return
        match update:
            case {"sessionUpdate": "tool_call" | "tool_call_update", "toolCallId": call_id, "status": status}:
                self._pass_call(CallRef.parse(call_id), status, update)
            case {"sessionUpdate": "agent_message_chunk" | "agent_thought_chunk" as kind, "messageId": message_id}:
                if isinstance(event, events.TextShown | events.ThoughtShown | None):
                    self._pass_chunk(kind, message_id, len(update["content"]["text"]))

    def pass_prompt(self, *, entry: int | None, command: str = "") -> None:
        """Notes that a turn began. `entry` is the id of the prompt's entry, or of the last entry before the turn. If
        the prompt is a slash command, `command` is its id."""
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
    """The part of a session that a client has missed: the `entries` after its cursor.

    `before` contains earlier entries. It includes the answers that made the calls whose results are in `entries`. The
    cursor may also list calls that sub-agents made. `results` contains the results of those calls.
    """

    cursor: Cursor
    entries: tuple[Entry, ...]
    before: tuple[Entry, ...] = ()
    results: Mapping[CallRef, Entry] = field(default_factory=dict)


def cursor_in(params: Mapping[str, Any]) -> Cursor | None:
    """Reads the cursor in the parameters of a request, or returns None if there is none.

    :raises CursorGap: crow did not make this cursor.
    """
    text = resume_cursor(params)
    return None if text is None else Cursor.parse(text)


async def missed_since(cursor: Cursor, store: Store, session_id: str, newest: Sequence[Entry]) -> Missed:
    """Returns the part of a session that a client has missed since `cursor`. `newest` contains the newest entries of
    the session, which are in memory.

    :raises CursorGap: the cursor is not in the current history of the session, or the client has missed too many turns.
    """
    if cursor.entry and await store.entry(cursor.entry, session_id=session_id) is None:
        raise CursorGap(f"entry {cursor.entry} is not in the current history of this session.")
    leaf, place = (await store.session(session_id)).leaf, cursor.entry or None
    if len(await store.left_behind(leaf, place, ("turn_end",))) > MAX_MISSED_TURNS:
        raise CursorGap(f"the client has missed more than {MAX_MISSED_TURNS} turns.")
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
    """The entries in `missed` may contain results of earlier calls. Returns the model's answers that made those
    calls."""
    known = {entry.id for entry in missed}
    calls = (entry.body.call for entry in missed if isinstance(entry.body, entries.ToolResult))
    wanted = sorted({call.assistant for call in calls} - known)
    found = [await store.entry(each, session_id=session_id) for each in wanted]
    return tuple(entry for entry in found if entry is not None)


async def _results(store: Store, session_id: str, calls: Sequence[CallRef]) -> dict[CallRef, Entry]:
    """Returns the results of those `calls` that sub-agents of the session made."""
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
