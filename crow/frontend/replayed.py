"""A stored history as `session/update` payloads.

Strategy: the events of :class:`crow.domain.replay.Replay` become the same updates as live ones, but each call only one,
with its final status, and nothing that was passing. Sends nothing.
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
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    CommandsChanged,
    CompactionChanged,
    ContextMeasured,
    EntryStored,
    Event,
    ModeChanged,
    NoticeShown,
    OptionsChanged,
    PlanChanged,
    SummaryShown,
    TextShown,
    ThoughtShown,
    TitleChanged,
)
from crow.frontend.bounds import head_and_tail
from crow.frontend.content import blocks
from crow.frontend.params import ClientCapabilities
from crow.frontend.tool_calls import (
    announcement_of,
    call_fields,
    diff_contents,
    raw_output,
    result_contents,
    text_content,
)
from crow.frontend.updates import Update, agent_text, agent_thought, aside, chunk, compaction, mask_id, plan, tool_call

__all__ = ["Replayed"]


class Replayed:
    """A stored history towards one client: give it every event of :class:`crow.domain.replay.Replay` in order.

    A call becomes one update with its final status: its announcement waits here for the result or the end that follows.
    A turn that showed nothing ends with a word of crow's own.
    """

    def __init__(self, caps: ClientCapabilities) -> None:
        self._caps = caps
        self._announced: dict[CallRef, CallAnnounced] = {}
        self._is_answered = True

    def updates(self, event: Event) -> tuple[Update, ...]:
        """What `event` showed."""
        updates = self._told(event)
        for update in updates:
            self._is_answered = update["sessionUpdate"] != "user_message_chunk"
        return updates

    def _told(self, event: Event) -> tuple[Update, ...]:
        match event:
            case EntryStored(entry=entry):
                return self._stored(entry)
            case TextShown(message_id=message_id, text=text):
                return agent_text(message_id, text)
            case ThoughtShown(message_id=message_id, text=text):
                return agent_thought(message_id, text)
            case CallAnnounced(call=call):
                self._announced[call] = event
                return ()
            case CallEnded():
                return self._ended(event)
            # What was passing is over, and the answer to the load tells what holds now.
            case (
                CallProgressed()
                | ContextMeasured()
                | CompactionChanged()
                | SummaryShown()
                | NoticeShown()
                | PlanChanged()
                | TitleChanged()
                | ModeChanged()
                | OptionsChanged()
                | CommandsChanged()
            ):
                return ()
            case _:
                assert_never(event)

    def _stored(self, entry: Entry) -> tuple[Update, ...]:
        match entry.body:
            case User(parts=parts, message_id=message_id):
                return tuple(chunk("user", message_id, block) for part in parts for block in blocks(part))
            case ToolResult() as result:
                return self._finished(result)
            case Remark(text=text, message_id=message_id):
                return aside(message_id, text)
            case Command(text=text, answer=answer, message_id=message_id):
                typed = chunk("user", f"{message_id}_typed", {"type": "text", "text": head_and_tail(text)})
                return (typed, *agent_text(message_id, answer))
            case Checkpoint(compaction_id=compaction_id, summary=summary):
                return (compaction(compaction_id, "completed", summary),) if self._caps.compaction else ()
            case Mask():
                return (compaction(mask_id(entry)),) if self._caps.compaction else ()
            case TurnEnd() as end:
                return told_end(entry, end, is_answered=self._is_answered)
            case Assistant() | Started() | Prompt() | File() | Restore() | Skill() | Reminder() | Note():
                return ()
            case _:
                assert_never(entry.body)

    def _finished(self, result: ToolResult) -> tuple[Update, ...]:
        announced = self._announced.pop(result.call, None)
        arguments = None if announced is None else announced.arguments
        update = tool_call("failed" if result.is_error else "completed")
        update |= call_fields(result.call.call_id, result.announcement, name=result.name, arguments=arguments)
        update["content"] = result_contents(result)
        output = raw_output(result)
        if output is not None:
            update["rawOutput"] = output
        return (update, *plan(result.plan))

    def _ended(self, event: CallEnded) -> tuple[Update, ...]:
        announced = self._announced.pop(event.call, None)
        if announced is None:
            return ()
        announcement = announced.announcement
        if announcement == Announcement(title=announced.name):  # an older version stored nothing of it but the call
            announcement = announcement_of(announced.name, announced.arguments)
        fields = call_fields(event.call.call_id, announcement, name=announced.name, arguments=announced.arguments)
        content = [*diff_contents(announcement.diffs), text_content(head_and_tail(event.text))]
        return (tool_call("failed") | fields | {"content": content},)


def told_end(entry: Entry, end: TurnEnd, *, is_answered: bool) -> tuple[Update, ...]:
    """How a turn ended, where that must be told: a client joins two prompts with nothing between them into one."""
    match end.stop:
        case "interrupted":
            words = end.detail or "The turn was interrupted."
        case "error":
            words = end.detail or "The turn ended with an error."
        case "cancelled" if not is_answered:
            words = "Cancelled."
        case _ if not is_answered:
            words = "No answer."
        case _:
            return ()
    return aside(f"turn_end_{entry.id}", f"({words})")
