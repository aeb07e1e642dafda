"""Turns the stored history into events, in the order in which the client saw them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from crow.domain import entries
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    CompactionChanged,
    EntryStored,
    Event,
    SubagentLinked,
    TextShown,
    ThoughtShown,
)
from crow.domain.messages import ToolCall
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NOT_RUN, interrupted_text


@dataclass(slots=True)
class WaitingCall:
    """A call that cannot be replayed yet, because its result or an earlier call's result is still missing."""

    call: ToolCall
    announcement: entries.Announcement | None
    is_started: bool = False
    result: entries.Entry | None = None


class Replay:
    """Turns the entries of a path into events. Call `feed` with each entry, oldest first, and then call `end`. Only the
    calls of one answer are held in memory."""

    def __init__(self) -> None:
        self._waiting: dict[entries.CallRef, WaitingCall] = {}

    def feed(self, entry: entries.Entry) -> tuple[Event, ...]:
        """Return the events that `entry` adds. Results come in call order."""
        body = entry.body
        match body:
            case entries.User() | entries.TurnEnd():
                return (*self.end(), EntryStored(entry=entry))
            case entries.Assistant():
                events = (*self.end(), *answer_events(body))
                announcements = dict(enumerate(body.announcements))
                for index, call in enumerate(body.calls):
                    ref = entries.CallRef(assistant=entry.id, index=index)
                    self._waiting[ref] = WaitingCall(call, announcements.get(index))
                return events
            case entries.Started(call=ref, announcement=announcement):
                if ref in self._waiting:
                    self._waiting[ref].is_started = True
                    self._waiting[ref].announcement = announcement or self._waiting[ref].announcement
                return ()
            case entries.ToolResult():
                return self._add_result(entry, body)
            case entries.Checkpoint() | entries.Mask() | entries.Remark() | entries.Command():
                return (EntryStored(entry=entry),)
            case entries.Custom(is_shown=is_shown):
                return (EntryStored(entry=entry),) if is_shown else ()
            case entries.Prompt() | entries.File() | entries.Restore():
                return ()
            case entries.Skill() | entries.Reminder() | entries.Note() | entries.ModelRequest():
                return ()
            case _ as never:
                assert_never(never)

    @property
    def holds_results(self) -> bool:
        """Whether a result is held back because an earlier call has no result yet."""
        return any(waiting.result is not None for waiting in self._waiting.values())

    def pause(self) -> tuple[Event, ...]:
        """Return the events of the results that are held back because an earlier call has no result yet. While the turn
        is running, call `pause` instead of `end`, because the calls without a result have not ended yet."""
        results = ((waiting.call, waiting.result) for waiting in self._waiting.values())
        return tuple(event for call, result in results if result is not None for event in result_events(call, result))

    def end(self) -> tuple[Event, ...]:
        """Return the events of the results that were held back, and a `CallEnded` for each call without a result."""
        events: list[Event] = []
        for ref, waiting in self._waiting.items():
            if waiting.result is not None:
                events += result_events(waiting.call, waiting.result)
            else:
                announcement = waiting.announcement or entries.Announcement(title=waiting.call.name)
                text = EFFECTS_UNKNOWN if waiting.is_started else NOT_RUN
                events += [announced(ref, waiting.call, announcement), CallEnded(call=ref, text=text)]
        self._waiting = {}
        return tuple(events)

    def _add_result(self, entry: entries.Entry, body: entries.ToolResult) -> tuple[Event, ...]:
        waiting = self._waiting.get(body.call)
        if waiting is None:
            # This call was already reported as ended, or its answer is not on this path. The announcement makes clients
            # show the result.
            return result_events(ToolCall(id="", name=body.name, arguments="{}"), entry)
        if waiting.result is not None:
            return ()
        waiting.result = entry
        events: list[Event] = []
        for ref, earliest in list(self._waiting.items()):
            if earliest.result is None:
                break
            events += result_events(earliest.call, earliest.result)
            del self._waiting[ref]
        return tuple(events)


class RemoteTurn:
    """Turns the entries that another process stores into the same events that the other process shows to its clients.

    Call `feed` with the entries in the order in which they were stored. Call `grow` with the unfinished answer whenever
    the answer has become longer. Pass the returned events to `running`, which knows how much of an answer was shown.
    """

    def __init__(self, running: RunningTurn) -> None:
        self._running = running
        self._calls: dict[entries.CallRef, WaitingCall] = {}

    def grow(self, message_id: str, text: str, thought: str) -> tuple[Event, ...]:
        """Return events for the new part of the unfinished answer. `text` and `thought` are the whole answer so far."""
        shown_thought, shown_text = self._running.shown_of(message_id)
        events: list[Event] = []
        if len(thought) > len(shown_thought) and thought.startswith(shown_thought):
            events.append(ThoughtShown(message_id=message_id, text=thought[len(shown_thought) :]))
        if len(text) > len(shown_text) and text.startswith(shown_text):
            events.append(TextShown(message_id=message_id, text=text[len(shown_text) :]))
        return tuple(events)

    def feed(self, entry: entries.Entry) -> tuple[Event, ...]:
        """Return the events that `entry` adds."""
        body, stored = entry.body, EntryStored(entry=entry)
        match body:
            case entries.User() if not self._calls:
                return (stored,)
            case entries.Assistant():
                shown = answer_events(body)
                text = next((each.text for each in shown if isinstance(each, TextShown)), "")
                events = (*self._end_calls(), *self.grow(body.message_id, text, body.thought), stored)
                announcements = dict(enumerate(body.announcements))
                for index, call in enumerate(body.calls):
                    ref = entries.CallRef(assistant=entry.id, index=index)
                    waiting = WaitingCall(call, announcements.get(index, entries.Announcement(title=call.name)))
                    self._calls[ref] = waiting
                    assert waiting.announcement is not None
                    events += (announced(ref, call, waiting.announcement),)
                return events
            case entries.Started(call=ref) if ref in self._calls:
                self._calls[ref].is_started = True
                return (stored,)
            case entries.ToolResult(call=ref):
                self._calls.pop(ref, None)
                return (stored,)
            case entries.TurnEnd():
                return (*self._end_calls(), stored)
            case entries.Checkpoint(compaction_id=compaction_id, summary=summary):
                return (CompactionChanged(compaction_id=compaction_id, status="completed", detail=summary), stored)
            case _:
                return (stored,)

    def _end_calls(self) -> tuple[Event, ...]:
        ended = tuple(
            CallEnded(call=ref, text=EFFECTS_UNKNOWN if waiting.is_started else NOT_RUN)
            for ref, waiting in self._calls.items()
        )
        self._calls = {}
        return ended


@dataclass(slots=True)
class _RunningCall:
    """An announced call that has not ended: its announcement, and the newest event of each other kind."""

    announced: CallAnnounced
    started: EntryStored | None = None
    linked: SubagentLinked | None = None
    progress: CallProgressed | None = None


@dataclass(slots=True)
class _RunningMessage:
    message_id: str = ""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)


class RunningTurn:
    """The unfinished message and the unfinished calls of a running turn, as far as clients have seen them.

    Call `feed` with all events of the session. `events` returns the events for a client that joins now and has the
    stored history.
    """

    def __init__(self) -> None:
        self._message = _RunningMessage()
        self._calls: dict[entries.CallRef, _RunningCall] = {}

    def feed(self, event: Event) -> None:
        """Take the next event of the session."""
        match event:
            case TextShown(message_id=message_id, text=text):
                self._open(message_id).texts.append(text)
            case ThoughtShown(message_id=message_id, text=text):
                self._open(message_id).thoughts.append(text)
            case CallAnnounced(call=call):
                self._calls[call] = _RunningCall(event)
            case CallProgressed(call=call) if call in self._calls:
                self._calls[call].progress = event
            case CallEnded(call=call):
                self._calls.pop(call, None)
            case SubagentLinked(call_id=call_id):
                for ref, running in self._calls.items():
                    if ref.call_id == call_id:
                        running.linked = event
            case EntryStored(entry=entry):
                self._store(event, entry.body)
            case _:
                pass

    def events(self) -> tuple[Event, ...]:
        """Return the events that lead to the present state, in order."""
        message, thought, text = self._message, "".join(self._message.thoughts), "".join(self._message.texts)
        shown: list[Event | None] = [ThoughtShown(message_id=message.message_id, text=thought)] if thought else []
        shown += [TextShown(message_id=message.message_id, text=text)] if text else []
        for call in self._calls.values():
            shown += [call.announced, call.started, call.linked, call.progress]
        return tuple(event for event in shown if event is not None)

    def shown_of(self, message_id: str) -> tuple[str, str]:
        """Return the thought and the text of an unfinished message, as far as they were shown."""
        if message_id != self._message.message_id:
            return "", ""
        return "".join(self._message.thoughts), "".join(self._message.texts)

    def _open(self, message_id: str) -> _RunningMessage:
        if self._message.message_id != message_id:
            self._message = _RunningMessage(message_id)
        return self._message

    def _store(self, event: EntryStored, body: entries.Body) -> None:
        match body:
            case entries.Started(call=call) if call in self._calls:
                self._calls[call].started = event
            case entries.ToolResult(call=call):
                self._calls.pop(call, None)
            case entries.Assistant():
                self._message = _RunningMessage()
            case _:
                pass


def answer_events(body: entries.Assistant) -> tuple[Event, ...]:
    """Return the events for the reasoning and the text of an answer."""
    text = body.text
    if body.finish == "interrupted":
        text = interrupted_text(body) if text.strip() else INTERRUPTED
    thought = (ThoughtShown(message_id=body.message_id, text=body.thought),) if body.thought else ()
    return (*thought, *((TextShown(message_id=body.message_id, text=text),) if text else ()))


def result_events(call: ToolCall, result: entries.Entry) -> tuple[Event, ...]:
    """Return the events of a call that has a result: first its announcement, then the stored result."""
    assert isinstance(result.body, entries.ToolResult)
    return announced(result.body.call, call, result.body.announcement), EntryStored(entry=result)


def announced(ref: entries.CallRef, call: ToolCall, announcement: entries.Announcement) -> CallAnnounced:
    """Return the event that announces a call."""
    return CallAnnounced(call=ref, name=call.name, arguments=call.arguments, announcement=announcement)
