"""The stored history as events, in the order in which the client saw them."""

from __future__ import annotations

from dataclasses import dataclass

from crow.domain import entries
from crow.domain.events import CallAnnounced, CallEnded, EntryStored, Event, TextShown, ThoughtShown
from crow.domain.messages import ToolCall
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NOT_RUN, interrupted_text


@dataclass(slots=True)
class WaitingCall:
    """A call that is not replayed yet: its result, or that of an earlier call, is still missing."""

    call: ToolCall
    announcement: entries.Announcement | None
    is_started: bool = False
    result: entries.Entry | None = None


class Replay:
    """Feed a path oldest first, then call `end`. Memory is bounded by one step."""

    def __init__(self) -> None:
        self._assistant = 0
        self._waiting: dict[int, WaitingCall] = {}

    def feed(self, entry: entries.Entry) -> tuple[Event, ...]:
        """The events that `entry` adds. Results come in call order."""
        body = entry.body
        match body:
            case entries.User() | entries.TurnEnd():
                return (*self.end(), EntryStored(entry=entry))
            case entries.Assistant():
                events = (*self.end(), *answer_events(body))
                announcements = dict(enumerate(body.announcements))
                self._assistant = entry.id
                self._waiting = {
                    index: WaitingCall(call, announcements.get(index)) for index, call in enumerate(body.calls)
                }
                return events
            case entries.Started(call=call, announcement=announcement):
                waiting = self._find(call)
                if waiting is not None:
                    waiting.is_started = True
                    waiting.announcement = announcement or waiting.announcement
                return ()
            case entries.ToolResult():
                return self._add_result(entry, body)
            case entries.Checkpoint() | entries.Mask() | entries.Remark() | entries.Command():
                return (EntryStored(entry=entry),)
            case (
                entries.Prompt()
                | entries.File()
                | entries.Restore()
                | entries.Skill()
                | entries.Reminder()
                | entries.Note()
            ):
                return ()

    def pause(self) -> tuple[Event, ...]:
        """The results that wait for an earlier call. For a turn that goes on live: its other calls are not over."""
        events: list[Event] = []
        for waiting in self._waiting.values():
            if waiting.result is not None:
                events += result_events(waiting.call, waiting.result)
        return tuple(events)

    def end(self) -> tuple[Event, ...]:
        """The results that wait for an earlier call, and an end for each call without a result."""
        events: list[Event] = []
        for index, waiting in self._waiting.items():
            if waiting.result is not None:
                events += result_events(waiting.call, waiting.result)
            else:
                ref = entries.CallRef(assistant=self._assistant, index=index)
                announcement = waiting.announcement or entries.Announcement(title=waiting.call.name)
                text = EFFECTS_UNKNOWN if waiting.is_started else NOT_RUN
                events += [announced(ref, waiting.call, announcement), CallEnded(call=ref, text=text)]
        self._waiting = {}
        return tuple(events)

    def _find(self, ref: entries.CallRef) -> WaitingCall | None:
        return self._waiting.get(ref.index) if ref.assistant == self._assistant else None

    def _add_result(self, entry: entries.Entry, body: entries.ToolResult) -> tuple[Event, ...]:
        waiting = self._find(body.call)
        if waiting is None:  # its call has ended, or is not on this path: announced again, so the result is shown
            return result_events(ToolCall(id="", name=body.name, arguments="{}"), entry)
        if waiting.result is not None:
            return ()
        waiting.result = entry
        events: list[Event] = []
        for index, earliest in list(self._waiting.items()):
            if earliest.result is None:
                break
            events += result_events(earliest.call, earliest.result)
            del self._waiting[index]
        return tuple(events)


def answer_events(body: entries.Assistant) -> tuple[Event, ...]:
    """Reasoning and text of an answer."""
    text = body.text
    if body.finish == "interrupted":
        text = interrupted_text(body) if text.strip() else INTERRUPTED
    thought = (ThoughtShown(message_id=body.message_id, text=body.thought),) if body.thought else ()
    return (*thought, *((TextShown(message_id=body.message_id, text=text),) if text else ()))


def result_events(call: ToolCall, result: entries.Entry) -> tuple[Event, ...]:
    """A call that is announced and answered."""
    assert isinstance(result.body, entries.ToolResult)
    return announced(result.body.call, call, result.body.announcement), EntryStored(entry=result)


def announced(ref: entries.CallRef, call: ToolCall, announcement: entries.Announcement) -> CallAnnounced:
    """The announcement of a call."""
    return CallAnnounced(call=ref, name=call.name, arguments=call.arguments, announcement=announcement)
