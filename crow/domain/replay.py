"""The whole history as events, as it was shown.

Strategy: entries are fed oldest first and come out as the events that the client knows from a live turn; of a step
only the calls that wait for their results are kept, so memory is bounded by one step. Compacted entries are entries
like any other. Knows nothing of the protocol.
"""

from __future__ import annotations

from typing import assert_never

from crow.domain.entries import (
    Announcement,
    Assistant,
    CallRef,
    Checkpoint,
    Command,
    Entry,
    File,
    Mask,
    Note,
    Prompt,
    Remark,
    Reminder,
    Restore,
    Skill,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.events import CallAnnounced, CallEnded, EntryStored, Event, TextShown, ThoughtShown
from crow.domain.messages import ToolCall
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NOT_RUN, interrupted_text

__all__ = ["Replay"]


class Replay:
    """Feed a path oldest first, then end it."""

    def __init__(self) -> None:
        self._assistant = 0
        self._waiting: dict[int, ToolCall] = {}
        self._announced: dict[int, Announcement] = {}
        self._started: set[int] = set()
        self._results: dict[int, Entry] = {}

    def feed(self, entry: Entry) -> tuple[Event, ...]:
        """The events that `entry` adds. Results are told in call order."""
        body = entry.body
        match body:
            case User():
                return (*self.end(), EntryStored(entry=entry))
            case Assistant():
                events = (*self.end(), *shown(body))
                self._assistant = entry.id
                self._waiting = dict(enumerate(body.calls))
                self._announced = dict(enumerate(body.announcements))
                return events
            case Started(call=call, announcement=announcement):
                if call.assistant == self._assistant and call.index in self._waiting:
                    self._started.add(call.index)
                    if announcement is not None:
                        self._announced[call.index] = announcement
                return ()
            case ToolResult():
                return self._result(entry, body)
            case TurnEnd():
                return (*self.end(), EntryStored(entry=entry))
            case Checkpoint() | Mask() | Remark() | Command():
                return (EntryStored(entry=entry),)
            case Prompt() | File() | Restore() | Skill() | Reminder() | Note():
                return ()
            case _ as never:
                assert_never(never)

    def pause(self) -> tuple[Event, ...]:
        """Results that wait for an earlier call, where the turn goes on live: the other calls are not over."""
        return tuple(
            event
            for index, call in self._waiting.items()
            if index in self._results
            for event in told(call, self._results[index])
        )

    def end(self) -> tuple[Event, ...]:
        """Results that wait for an earlier call, and an end for each call without one."""
        events: list[Event] = []
        for index, call in self._waiting.items():
            if index in self._results:
                events += told(call, self._results[index])
                continue
            ref = CallRef(assistant=self._assistant, index=index)
            events += [
                announced(ref, call, self._announced.get(index) or Announcement(title=call.name)),
                CallEnded(call=ref, text=EFFECTS_UNKNOWN if index in self._started else NOT_RUN),
            ]
        self._waiting, self._announced, self._started, self._results = {}, {}, set(), {}
        return tuple(events)

    def _result(self, entry: Entry, body: ToolResult) -> tuple[Event, ...]:
        index = body.call.index
        if body.call.assistant != self._assistant or index not in self._waiting:
            # Its call was ended before, or is not on this path; announced again, the client sees what it gave.
            return told(ToolCall(id="", name=body.name, arguments="{}"), entry)
        if index in self._results:
            return ()
        self._results[index] = entry
        events: list[Event] = []
        for earliest in list(self._waiting):
            if earliest not in self._results:
                break
            events += told(self._waiting.pop(earliest), self._results.pop(earliest))
        return tuple(events)


def shown(body: Assistant) -> tuple[Event, ...]:
    """Reasoning and text of an answer."""
    events: list[Event] = []
    if body.thought:
        events.append(ThoughtShown(message_id=body.message_id, text=body.thought))
    if body.finish == "interrupted":
        text = interrupted_text(body) if body.text.strip() else INTERRUPTED
        events.append(TextShown(message_id=body.message_id, text=text))
    elif body.text:
        events.append(TextShown(message_id=body.message_id, text=body.text))
    return tuple(events)


def told(call: ToolCall, result: Entry) -> tuple[Event, ...]:
    assert isinstance(result.body, ToolResult)
    return announced(result.body.call, call, result.body.announcement), EntryStored(entry=result)


def announced(ref: CallRef, call: ToolCall, announcement: Announcement) -> CallAnnounced:
    return CallAnnounced(call=ref, name=call.name, arguments=call.arguments, announcement=announcement)
