"""The feed of a session: everything that its clients are told, in order.

Each item has a position, so a view can apply it twice, or after a newer item, without harm. The position of a stored
entry is its id. The position of a piece of text is the id of the entry that its message follows, and the offset of the
piece in the message. The position of a command's output is its length.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from crow.domain import entries
from crow.domain.entries import CallRef
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
    TurnBegan,
    TurnEnded,
)


@dataclass(slots=True)
class _UnfinishedCall:
    """The items that show the present state of a call that has not ended."""

    announced: CallAnnounced
    """Its announcement."""
    started: EntryStored | None = None
    """The entry that says that the call has started."""
    linked: SubagentLinked | None = None
    """The subagent that carries out the call."""
    progress: CallProgressed | None = None
    """Its whole output so far."""


@dataclass(slots=True)
class _OpenMessage:
    """The answer that is being streamed."""

    message_id: str = ""
    """The id of the answer. Empty if none is being streamed."""
    text: list[str] = field(default_factory=list)
    """The pieces of its text."""
    text_chars: int = 0
    """The length of the text in characters."""
    thought: list[str] = field(default_factory=list)
    """The pieces of its thought."""
    thought_chars: int = 0
    """The length of the thought in characters."""


class Feed:
    """The items of a session that are not in its log yet: the unfinished message, calls and compaction.

    `put` must be called with each item of the session. Then the log up to `entry`, followed by `open_items`, is
    everything that clients have been told.
    """

    def __init__(self, session_id: str, entry: int = 0) -> None:
        self._session_id = session_id
        self.entry = entry
        """The id of the newest stored entry."""
        self.last_turn: TurnBegan | TurnEnded | None = None
        """The turn that runs, or how the last turn ended. None if no turn has run since the session was opened."""
        self._message = _OpenMessage()
        self._calls: dict[CallRef, _UnfinishedCall] = {}
        self._compaction: CompactionChanged | None = None
        """The progress of the compaction that is running. None if none is running."""

    def put(self, item: Event) -> Event:
        """Add the next item. Return it with its position."""
        if isinstance(item, TextShown | ThoughtShown):
            item = replace(item, after=self.entry)
        match item:
            case TextShown(message_id=message_id, text=text):
                message = self._open(message_id)
                message.text.append(text)
                message.text_chars += len(text)
            case ThoughtShown(message_id=message_id, text=text):
                message = self._open(message_id)
                message.thought.append(text)
                message.thought_chars += len(text)
            case CallAnnounced(call=call):
                self._calls.setdefault(call, _UnfinishedCall(item)).announced = item
            case CompactionChanged(status=status):
                self._compaction = item if status == "in_progress" else None
            case CallProgressed(call=call) if call in self._calls:
                self._calls[call].progress = item
            case CallEnded(call=call):
                self._calls.pop(call, None)
            case SubagentLinked(call_id=call_id):
                for ref, opened in self._calls.items():
                    if ref.call_id == call_id:
                        opened.linked = item
            case EntryStored(entry=entry):
                self._store(item, entry)
            case TurnBegan() | TurnEnded():
                self.last_turn = item
            case _:
                pass
        return item

    def open_items(self) -> tuple[Event, ...]:
        """Return, in order, the items that a reader of the log still needs to know the present state."""
        items: list[Event | None] = [self._compaction]
        for call in self._calls.values():
            items += [call.announced, call.started, call.linked, call.progress]
        message = self._message
        message_id, after = message.message_id, self.entry
        if message.thought:
            thought = "".join(message.thought)
            items.append(ThoughtShown(message_id=message_id, offset=0, text=thought, after=after))
        if message.text:
            items.append(TextShown(message_id=message_id, offset=0, text="".join(message.text), after=after))
        return tuple(item for item in items if item is not None)

    def growth(self, message_id: str, *, text: str, thought: str) -> tuple[Event, ...]:
        """Return items with the new part of an unfinished answer that another process streams. `text` and `thought`
        are the whole answer so far."""
        is_open = message_id == self._message.message_id
        text_at, thought_at = (self._message.text_chars, self._message.thought_chars) if is_open else (0, 0)
        items: list[Event] = []
        if len(thought) > thought_at:
            items.append(ThoughtShown(message_id=message_id, offset=thought_at, text=thought[thought_at:]))
        if len(text) > text_at:
            items.append(TextShown(message_id=message_id, offset=text_at, text=text[text_at:]))
        return tuple(items)

    def _open(self, message_id: str) -> _OpenMessage:
        if self._message.message_id != message_id:
            self._message = _OpenMessage(message_id)
        return self._message

    def _store(self, item: EntryStored, entry: entries.Entry) -> None:
        match entry.body:
            case entries.Assistant(calls=calls):
                self._message = _OpenMessage()
                self._calls = (
                    {announced.call: _UnfinishedCall(announced) for announced in announcements(entry.id, entry.body)}
                    if calls
                    else {}
                )
            case entries.Started(call=call) if call in self._calls:
                self._calls[call].started = item
            case entries.ToolResult(call=call):
                self._calls.pop(call, None)
            case entries.Checkpoint():
                self._compaction = None
            case entries.TurnEnd():
                self._compaction = None
                self._message, self._calls = _OpenMessage(), {}
            case _:
                pass
        if entry.session == self._session_id:  # otherwise a subagent has stored it
            self.entry = max(self.entry, entry.id)


def announcements(entry_id: int, answer: entries.Assistant) -> tuple[CallAnnounced, ...]:
    """Return an announcement of each call of an answer. `entry_id` is the id of the entry that stores the answer."""
    planned = dict(enumerate(answer.announcements))
    return tuple(
        CallAnnounced(
            call=CallRef(assistant=entry_id, index=index),
            name=call.name,
            arguments=call.arguments,
            announcement=planned.get(index, entries.Announcement(title=call.name)),
        )
        for index, call in enumerate(answer.calls)
    )
