"""Converts the events of a session into the updates that a client gets, both live and in a replay."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, assert_never

from crow.domain import entries, events
from crow.domain.entries import Announcement, CallRef, Entry, PlanItem, ToolResult
from crow.domain.events import Event
from crow.domain.messages import Part, Usage
from crow.domain.rendering import parts_text, safe, title_line
from crow.domain.subagents import answer_id, call_of_order, order_id
from crow.frontend import tool_calls
from crow.frontend.content import blocks
from crow.frontend.cursors import Cursor
from crow.frontend.params import ClientCapabilities
from crow.frontend.subagents import Family, answer_of, link, message_updates, order_of, subagent_update
from crow.frontend.tool_calls import (
    CallLimits,
    Fields,
    call_fields,
    diff_contents,
    limit_text,
    shown_text,
    split_text,
    text_content,
)

Update: TypeAlias = dict[str, Any]

TERMINAL_CHARS = 50_000
"""At most this many characters of output are streamed to a client's terminal. The rest is sent when the command
ends, and is shortened if it is long."""

NOTICE_CHARS = 500
"""At most this many characters of a notice's title are shown."""

STEP_CHARS = 1_000
"""At most this many characters of each step of the plan are shown."""

REPLAY_RESULTS_BYTES = 4_600_000
"""A replay sends about this many bytes of tool results in total."""

REPLAY_RESULT_BYTES = 400
"""A replay sends at least this many bytes of each tool result, however long the history is."""

REPLAY_ANSWER_BYTES = 10_000_000

INTERRUPTED_TURN = "The turn was interrupted."

PLAN_ID = "plan"
"""The id of a session's plan. A session has at most one plan."""

PROGRESS_CHARS = 8_000
"""If a running command has no terminal in the client, crow shows at most this many characters from the end of its
output."""


@dataclass(slots=True)
class _OpenCall:
    """An announced call that has not ended.

    `in_terminal` is the output that was sent to the client's terminal, or None if the call has no terminal. `content`
    is the content that the client shows. `subagent` is the id of the sub-agent that carries out the call. It is empty
    if there is no such sub-agent, or if the client does not know the sub-agent.
    """

    announcement: Announcement
    name: str = ""
    arguments: str | None = None
    in_terminal: str | None = None
    content: list[Fields] = field(default_factory=list)
    status: Literal["pending", "in_progress"] = "pending"
    subagent: str = ""


@dataclass(slots=True)
class _OpenMessage:
    """The message that is being streamed, with the text and the thought that were sent so far."""

    message_id: str
    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)


class LiveUpdates:
    """Converts events of a running session into updates for one client.

    This class remembers the unfinished calls and the unfinished message. So each update contains only changes, and
    `catch_up` can return the calls and the message for a client that has just loaded the session. Every update of a
    tool call has a status. `cwd` is the directory to show in terminals. `new_id` makes ids for messages that are not
    stored.
    """

    def __init__(
        self,
        caps: ClientCapabilities,
        *,
        cwd: str = "",
        session_id: str = "",
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self._caps = caps
        self._cwd = cwd
        self._session_id = session_id
        self._new_id = new_id
        self._calls: dict[CallRef, _OpenCall] = {}
        self._message = _OpenMessage("")

    def updates(self, event: Event) -> tuple[Update, ...]:
        """Returns the updates for `event`, in order. They do not include lists of options and commands, which
        `SessionClient` adds."""
        match event:
            case events.EntryStored(entry=entry):
                return self._stored(entry)
            case events.TextShown(message_id=message_id, text=text):
                self._open_message(message_id).text.append(text)
                return _text_updates(message_id, text)
            case events.ThoughtShown(message_id=message_id, text=text):
                self._open_message(message_id).thought.append(text)
                return _thought_updates(message_id, text)
            case events.CallAnnounced(call=call):
                self._calls[call] = opened = _OpenCall(event.announcement, event.name, event.arguments)
                if event.announcement.kind == "execute" and self._caps.terminal_output:
                    opened.in_terminal = ""
                return self._call_updates(call, opened)
            case events.CallProgressed():
                return self._progressed(event)
            case events.CallEnded():
                return self._ended(event)
            case events.ContextMeasured():
                return (usage_update(event),)
            case events.CompactionChanged(compaction_id=compaction_id, status=status, detail=detail):
                if self._caps.compaction:
                    return (_compaction_update(compaction_id, status, detail),)
                return self._remark(self._new_id(), f"({detail})") if status == "failed" and detail else ()
            case events.SummaryShown(compaction_id=compaction_id, text=text):
                return _summary_updates(compaction_id, text) if self._caps.compaction else ()
            case events.NoticeShown():
                return self._notice(event)
            case events.PlanChanged(plan=items):
                return plan_updates(items, by_id=self._caps.plans)
            case events.TitleChanged(title=title):
                return (_update("session_info_update", title=None if title is None else title_line(title)),)
            case events.ModeChanged(mode=mode):
                return (_update("current_mode_update", currentModeId=mode),)
            case events.OptionsChanged() | events.CommandsChanged():
                return ()
            case events.SubagentChanged():
                usage = None if event.usage is None else usage_object(event.usage)
                return (subagent_update(event, usage),) if self._caps.subagents else ()
            case events.SubagentLinked(call_id=call_id, session_id=session_id):
                return self._linked(call_id, session_id)
            case events.SessionMessage():
                return message_updates(event, self._session_id) if self._caps.subagents else ()
            case _:
                assert_never(event)

    def knows(self, call: CallRef | None) -> bool:
        """Whether the call was announced here and has not ended."""
        return call in self._calls

    @property
    def message(self) -> tuple[str, str, str]:
        """The id, thought and text of the unfinished message. All three are empty if there is no unfinished message."""
        return self._message.message_id, "".join(self._message.thought), "".join(self._message.text)

    def catch_up(
        self, *, ended: Iterable[CallRef] = (), shown: Collection[str] = (), cursor: Cursor | None = None
    ) -> tuple[Update, ...]:
        """Returns updates with the unfinished message and calls, for a client that just received the stored history.

        Leaves out the calls in `ended`, which have ended in that history. Leaves out the message if `shown` contains
        its id. With `cursor`, also leaves out the text and the output that the client was sent before the cursor.
        """
        for call in ended:
            self._calls.pop(call, None)
        updates: list[Update] = []
        message_id, thought, text = self.message
        if message_id not in shown:
            is_known = cursor is not None and cursor.message == message_id
            updates += _thought_updates(message_id, thought[cursor.thought :] if cursor and is_known else thought)
            updates += _text_updates(message_id, text[cursor.text :] if cursor and is_known else text)
        for call, opened in self._calls.items():
            sent = cursor.calls.get(call) if cursor is not None else None
            if sent is None or opened.in_terminal is None:
                updates += self._call_updates(call, opened)
            elif rest := opened.in_terminal[sent:]:
                output = {"terminal_output": _terminal_output(call, rest)}
                updates.append(_call_update(call, opened.status) | {"_meta": output})
        return tuple(updates)

    def ended_elsewhere(self, call: CallRef, result: ToolResult | None) -> tuple[Update, ...]:
        """Returns updates that end a call that the client still shows as running. The call has ended, but its result is
        not in the session's own log."""
        if result is not None:
            return _finished_call(result, by_id=self._caps.plans)
        return (_call_update(call, _ended_status(self._caps)),)

    def question_content(self, call: CallRef, content: list[Fields]) -> list[Fields]:
        """Returns the content of a permission request for an announced call: first `content`, then the call's terminal,
        if the call has one. Clients show this content in place of the earlier content of the call."""
        opened = self._calls.get(call)
        if opened is None:
            return content
        if opened.in_terminal is not None:
            content = [*content, _terminal_content(call)]
        opened.content = content
        return content

    def _open_message(self, message_id: str) -> _OpenMessage:
        if self._message.message_id != message_id:
            self._message = _OpenMessage(message_id)
        return self._message

    def _stored(self, entry: Entry) -> tuple[Update, ...]:
        match entry.body:
            case entries.Started(call=call, announcement=announcement):
                return self._started(call, announcement)
            case ToolResult() as result:
                return self._finished(result)
            case entries.Remark(text=text, message_id=message_id):
                return self._remark(message_id, text)
            case entries.Custom(is_shown=True, text=text, message_id=message_id):
                return self._remark(message_id, text)
            case entries.Command(answer=answer, message_id=message_id):
                return _text_updates(message_id, safe(answer))
            case entries.Checkpoint(compaction_id=compaction_id, reason=reason) as checkpoint:
                if self._caps.compaction or reason == "command":
                    return ()  # already shown by CompactionChanged or by the command's answer
                return self._remark(compaction_id, f"(Context compacted: {_token_change(checkpoint)}.)")
            case entries.Mask() as mask:
                if self._caps.compaction:
                    return (_compaction_update(f"mask_{entry.id}"),)
                return self._remark(f"mask_{entry.id}", f"(Older tool outputs elided: {_token_change(mask)}.)")
            case entries.Assistant():
                self._message = _OpenMessage("")
                return ()  # the text of the answer was streamed
            case entries.TurnEnd(stop="interrupted", detail=detail):  # the process that ran the turn has died
                return _remark_updates(f"turn_end_{entry.id}", f"({detail or INTERRUPTED_TURN})")
            case _:
                return ()  # the client already shows the prompt of its user, and no other entry is shown

    def _call_updates(self, call: CallRef, opened: _OpenCall) -> tuple[Update, ...]:
        """Returns updates with the current state of the call, for a client that does not know the call yet."""
        fields = call_fields(call.call_id, opened.announcement, name=opened.name, arguments=opened.arguments)
        opened.content = [link(opened.subagent)] if opened.subagent else diff_contents(opened.announcement.diffs)
        if opened.in_terminal is not None:
            terminal = {"terminal_id": call.call_id} | ({"cwd": self._cwd} if self._cwd else {})
            fields["_meta"] = fields.get("_meta", {}) | {"terminal_info": terminal}
            opened.content = [_terminal_content(call)]
        if opened.content:
            fields["content"] = opened.content
        update = _update("tool_call", status=opened.status) | fields
        if not opened.in_terminal:
            return (update,)
        output = {"terminal_output": _terminal_output(call, opened.in_terminal)}
        return update, _call_update(call, opened.status) | {"_meta": output}

    def _started(self, call: CallRef, announcement: Announcement | None) -> tuple[Update, ...]:
        opened = self._calls.get(call)
        if opened is not None:
            opened.status = "in_progress"
            changed = _changed_fields(call, opened, announcement) if announcement is not None else {}
            if opened.in_terminal is not None and opened.content != [_terminal_content(call)]:
                # Remove the content of the permission request, which has been answered.
                opened.content = changed["content"] = [_terminal_content(call)]
            return (_call_update(call, "in_progress") | changed,)
        if announcement is None:  # the client already knows that the call has ended
            return ()
        self._calls[call] = _OpenCall(announcement, status="in_progress")
        return (_update("tool_call", status="in_progress") | call_fields(call.call_id, announcement),)

    def _linked(self, call_id: str, session_id: str) -> tuple[Update, ...]:
        """Returns an update that links a running call to the session of the sub-agent that carries it out."""
        found = next((each for each in self._calls.items() if each[0].call_id == call_id), None)
        if found is None or not self._caps.subagents:
            return ()
        call, opened = found
        opened.subagent, opened.content = session_id, [link(session_id)]
        return (_call_update(call, opened.status) | {"content": opened.content},)

    def _progressed(self, event: events.CallProgressed) -> tuple[Update, ...]:
        opened = self._calls.get(event.call)
        if opened is None:
            return ()
        update = _call_update(event.call, "in_progress")
        if opened.in_terminal is None:
            opened.content = [text_content(tool_calls.console_block(event.text[-PROGRESS_CHARS:]))]
            return (update | {"content": opened.content},)
        sent = opened.in_terminal
        if not event.text.startswith(sent):
            return ()
        opened.in_terminal = event.text[: max(TERMINAL_CHARS, len(sent))]
        added = opened.in_terminal[len(sent) :]
        return (update | {"_meta": {"terminal_output": _terminal_output(event.call, added)}},) if added else ()

    def _finished(self, result: ToolResult) -> tuple[Update, ...]:
        opened = self._calls.pop(result.call, None)
        if opened is None:
            return _finished_call(result, by_id=self._caps.plans)
        update = _call_update(result.call, _final_status(result))
        update |= _changed_fields(result.call, opened, result.announcement)
        if opened.in_terminal is not None:
            update["_meta"] = _terminal_end(result, opened.in_terminal)
        else:
            content = tool_calls.result_contents(result)
            if opened.subagent:
                content = [link(opened.subagent), *content]
            if content != opened.content:  # some clients would show the same content twice
                update["content"] = content
        output = tool_calls.raw_output(result, with_text=opened.in_terminal is None)
        answer = answer_of(result, opened.subagent, self._session_id) if opened.subagent else None
        answered = message_updates(answer, self._session_id) if answer is not None else ()
        return (update | output, *answered, *plan_updates(result.plan, by_id=self._caps.plans))

    def _ended(self, event: events.CallEnded) -> tuple[Update, ...]:
        opened = self._calls.pop(event.call, None)
        if opened is None:
            return ()
        update = _call_update(event.call, _ended_status(self._caps))
        content = [text_content(shown_text(event.text))] if event.text else []
        if opened.subagent:
            content = [link(opened.subagent), *content]
        if opened.in_terminal is not None:
            content = [_terminal_content(event.call), *content]
            update["_meta"] = {"terminal_exit": _terminal_exit(event.call, None)}
        return (update | {"content": content},)

    def _remark(self, message_id: str, words: str) -> tuple[Update, ...]:
        """Returns updates with a remark by crow. If the client can tell remarks from answers, the updates are marked as
        a remark."""
        mark = {"_meta": {"crow": {"remark": True}}} if self._caps.marked_remarks else {}
        return tuple(update | mark for update in _remark_updates(message_id, words))

    def _notice(self, event: events.NoticeShown) -> tuple[Update, ...]:
        title = event.title or event.description
        if not title:
            return ()
        if self._caps.notices:
            update = _update("notice", severity=event.severity, title=title_line(title, NOTICE_CHARS))
            return (update | ({"description": shown_text(event.description)} if event.description else {}),)
        if event.severity == "info":
            return ()
        words = f"{title} {event.description}" if event.description and event.description != title else title
        return self._remark(self._new_id(), f"({words})")


class ReplayLimits:
    """The limits for the parts of each call in a replay. The longer the history, the lower the limits.

    If several histories are replayed one after the other, such as those of sub-agents, the total length of all
    histories so far counts. `is_full` means that the client asked for whole results.
    """

    def __init__(self, *, is_full: bool = False) -> None:
        self._is_full = is_full
        self._entries = 0
        self.calls = tool_calls.FULL if is_full else tool_calls.STANDARD
        self.answer_bytes = REPLAY_ANSWER_BYTES
        """The limit for the answer of a slash command, in bytes."""

    def result_bytes(self, entries: int) -> int | None:
        """Sets the limits for the next history. `entries` is the number of entries in that history.

        Returns the maximum number of bytes to read of each tool result, or None to read whole results.
        """
        self._entries += entries
        most = REPLAY_RESULTS_BYTES * 3 // max(1, self._entries)  # about every third entry is a result
        if self._is_full or most >= tool_calls.STANDARD.text:
            return None
        most = max(REPLAY_RESULT_BYTES, most)
        self.calls = tool_calls.short_limits(most)
        self.answer_bytes = max(2_000, 4 * most)
        return most


class ReplayUpdates:
    """Converts a stored history into updates for one client.

    `updates` must be called with every event of `crow.domain.replay.Replay`, in order. A call becomes one update with
    its final status. If a turn has no answer, a remark is added at the end of the turn.

    With `family`, the messages between the session and its sub-agents are shown too.
    """

    def __init__(
        self, caps: ClientCapabilities, limits: ReplayLimits | None = None, family: Family | None = None
    ) -> None:
        self._caps = caps
        self._limits = limits or ReplayLimits()
        self._family = family
        self._order = self._text = ""
        self.stop = self.detail = ""
        """The stop reason of the last turn."""
        self._announced: dict[CallRef, events.CallAnnounced] = {}
        self._is_answered = True

    def updates(self, event: Event) -> tuple[Update, ...]:
        """Returns the updates for `event`."""
        match event:
            case events.EntryStored(entry=entry):
                updates = self._stored(entry)
            case events.TextShown(message_id=message_id, text=text):
                self._text = text
                updates = _text_updates(message_id, text)
            case events.ThoughtShown(message_id=message_id, text=text):
                updates = _thought_updates(message_id, text)
            case events.CallAnnounced(call=call):
                self._text = ""  # text before a call is not the turn's answer
                self._announced[call] = event
                updates = ()
            case events.CallEnded():
                updates = self._ended(event)
            case _:
                updates = ()  # not stored; the response to session/load contains the present state
        if updates:
            self._is_answered = updates[-1]["sessionUpdate"] != "user_message_chunk"
        return updates

    def note_sent(self) -> None:
        """Notes that the client has already been sent a part of the answer to the current prompt."""
        self._is_answered = True

    def _stored(self, entry: Entry) -> tuple[Update, ...]:
        match entry.body:
            case entries.User(parts=parts, message_id=message_id):
                self._order = self._text = ""
                family, call_id = self._family, call_of_order(message_id)
                if family is not None and family.parent_id and call_id is not None:
                    return self._ordered(family, call_id, parts)
                return prompt_updates(message_id, parts)
            case ToolResult() as result:
                announced = self._announced.pop(result.call, None)
                arguments = None if announced is None else announced.arguments
                limits = self._limits.calls
                shown_call = _finished_call(result, arguments=arguments, limits=limits, by_id=self._caps.plans)
                return self._with_messages(shown_call, result.call, arguments, result)
            case entries.Remark(text=text, message_id=message_id):
                return _remark_updates(message_id, text)
            case entries.Custom(is_shown=True, text=text, message_id=message_id):
                return _remark_updates(message_id, text)
            case entries.Command(text=text, answer=answer, message_id=message_id):
                shown = safe(limit_text(answer, self._limits.answer_bytes))
                return (*command_updates(message_id, text), *_text_updates(message_id, shown))
            case entries.Checkpoint(compaction_id=compaction_id, summary=summary):
                return (_compaction_update(compaction_id, detail=summary),) if self._caps.compaction else ()
            case entries.Mask():
                return (_compaction_update(f"mask_{entry.id}"),) if self._caps.compaction else ()
            case entries.TurnEnd(stop=stop, detail=detail):
                self.stop, self.detail = stop, detail
                return (*self._turn_end(f"turn_end_{entry.id}", stop, detail), *self._answered(stop))
            case _:
                return ()

    def _ordered(self, family: Family, call_id: str, parts: Sequence[Part]) -> tuple[Update, ...]:
        """Returns updates with the prompt that a sub-agent got from its parent session."""
        self._order = call_id
        family.tasks[call_id] = family.session_id
        order = events.SessionMessage(
            message_id=order_id(call_id),
            sender=family.parent_id,
            recipient=family.session_id,
            text=parts_text(parts),
        )
        return message_updates(order, family.session_id)

    def _answered(self, stop: str) -> tuple[Update, ...]:
        """Returns updates with the answer that a sub-agent sent to its parent session."""
        if self._family is None or not self._order or stop != "end_turn" or not self._text:
            return ()
        self._family.answers[self._order] = self._text
        answer = events.SessionMessage(
            message_id=answer_id(self._order),
            sender=self._family.session_id,
            recipient=self._family.parent_id,
            text=self._text,
        )
        return message_updates(answer, self._family.session_id)

    def _with_messages(
        self, updates: tuple[Update, ...], call: CallRef, arguments: str | None, result: ToolResult | None = None
    ) -> tuple[Update, ...]:
        """Adds three things to the updates of a `task` call: a link to the sub-agent, the sub-agent's instructions and
        its answer."""
        family = self._family
        task = family.task(call, result) if family is not None else None
        if family is None or task is None:
            return updates
        shown, *rest = updates
        shown = shown | {"content": [link(task), *shown.get("content", ())]}
        order = order_of(call, arguments, family.session_id, task)
        later = family.answers.get(call.call_id)
        answer = answer_of(result, task, family.session_id, later) if result is not None else None
        before, after = (
            message_updates(message, family.session_id) if message is not None else () for message in (order, answer)
        )
        return (*before, shown, *after, *rest)

    def _ended(self, event: events.CallEnded) -> tuple[Update, ...]:
        announced = self._announced.pop(event.call, None)
        if announced is None:
            return ()
        announcement = announced.announcement
        if announcement == Announcement(title=announced.name):  # an older version of crow stored only the call
            announcement = tool_calls.announcement_from(announced.name, announced.arguments)
        limits = self._limits.calls
        fields = call_fields(
            event.call.call_id, announcement, name=announced.name, arguments=announced.arguments, limits=limits
        )
        content = [*diff_contents(announcement.diffs, limits.diffs), text_content(shown_text(event.text))]
        update = _update("tool_call", status=_ended_status(self._caps)) | fields | {"content": content}
        return self._with_messages((update,), event.call, announced.arguments)

    def _turn_end(self, message_id: str, stop: str, detail: str) -> tuple[Update, ...]:
        """Returns updates with a remark if the turn failed or has no answer, else no updates.

        Without the remark, nothing would separate this turn's prompt from the next prompt, and clients would join the
        two prompts.
        """
        match stop:
            case "interrupted":
                words = detail or INTERRUPTED_TURN
            case "error":
                words = detail or "The turn ended with an error."
            case _ if self._is_answered:
                return ()
            case "cancelled":
                words = "Cancelled."
            case _:
                words = "No answer."
        return _remark_updates(message_id, f"({words})")


def prompt_updates(message_id: str, parts: Sequence[Part]) -> tuple[Update, ...]:
    """Returns updates with a prompt of the user."""
    shown = [block for part in parts for block in blocks(part)]
    return tuple(_update("user_message_chunk", content=block, messageId=message_id) for block in shown)


def command_updates(message_id: str, text: str) -> tuple[Update, ...]:
    """Returns updates with a slash command as the user typed it. `message_id` is the id of the command's answer."""
    return _chunks("user_message_chunk", limit_text(text), messageId=f"{message_id}_typed")


def plan_updates(items: Sequence[PlanItem] | None, *, by_id: bool = False) -> tuple[Update, ...]:
    """Returns updates with the complete plan, or no updates if `items` is None.

    With `by_id`, returns the protocol's unstable updates for plans with ids, which only some clients support. If the
    plan has become empty, the unstable update says so.
    """
    if items is None:
        return ()
    if by_id and not items:
        return (_update("plan_removed", planId=PLAN_ID),)
    plan = [
        {"content": title_line(item.content, STEP_CHARS), "priority": item.priority, "status": item.status}
        for item in items
    ]
    entries = tool_calls.limit_json(plan, tool_calls.OUTPUT_BYTES)
    if by_id:
        return (_update("plan_update", plan={"type": "items", "planId": PLAN_ID, "entries": entries}),)
    return (_update("plan", entries=entries),)


def usage_object(usage: Usage) -> Fields:
    """Returns the token counts of a turn, for the response to the turn's prompt. Cached tokens count as input, and
    thought tokens count as output."""
    sent, made = usage.input_tokens or 0, usage.output_tokens or 0
    optional = {
        "thoughtTokens": usage.reasoning_tokens,
        "cachedReadTokens": usage.cached_tokens,
        "cachedWriteTokens": usage.cache_write_tokens,
    }
    known = {name: count for name, count in optional.items() if count is not None}
    mark = {"_meta": {"crow": {"estimated": True}}} if usage.is_estimated else {}
    return {"totalTokens": sent + made, "inputTokens": sent, "outputTokens": made, **known, **mark}


def usage_update(event: events.ContextMeasured) -> Update:
    """Returns an update with the size of the context, and with the cost if it is known."""
    update = _update("usage_update", used=max(0, event.used), size=max(0, event.size))
    return update if event.cost is None else update | {"cost": {"amount": event.cost, "currency": "USD"}}


def _update(kind: str, **fields: Any) -> Update:
    return {"sessionUpdate": kind, **fields}


def _chunks(kind: str, text: str, **ids: str) -> tuple[Update, ...]:
    """Splits a text into as many updates as its size requires."""
    return tuple(_update(kind, content={"type": "text", "text": piece}, **ids) for piece in split_text(text))


def _text_updates(message_id: str, text: str) -> tuple[Update, ...]:
    return _chunks("agent_message_chunk", text, messageId=message_id)


def _remark_updates(message_id: str, words: str) -> tuple[Update, ...]:
    """Returns updates with a remark by crow. The remark ends with an empty line, so that even a client that joins all
    chunks shows the remark as a paragraph of its own.

    The remark may quote hostile text, so hidden characters are escaped.
    """
    return _text_updates(message_id, f"{safe(words)}\n\n")


def _thought_updates(message_id: str, text: str) -> tuple[Update, ...]:
    """Returns updates with a thought. The thought has a message id of its own, because clients join chunks with the
    same id."""
    return _chunks("agent_thought_chunk", text, messageId=f"{message_id}_thought")


def _summary_updates(compaction_id: str, text: str) -> tuple[Update, ...]:
    """Returns updates with the next part of a summary. An empty `text` removes the parts that were sent before."""
    if not text:
        return (_update("compaction_update", compactionId=compaction_id, status="in_progress", summary=[]),)
    return _chunks("compaction_summary_chunk", text, compactionId=compaction_id)


def _compaction_update(compaction_id: str, status: str = "completed", detail: str = "") -> Update:
    """Returns an update with the state of a compaction. `detail` is the summary, or the reason why the compaction
    failed."""
    update = _update("compaction_update", compactionId=compaction_id, status=status)
    if detail and status == "completed":
        update["summary"] = [{"type": "text", "text": piece} for piece in split_text(limit_text(detail))]
    elif detail and status == "failed":
        update["error"] = shown_text(detail)
    return update


def _token_change(body: entries.Checkpoint | entries.Mask) -> str:
    counts = (body.tokens_before, body.tokens_after)
    before, after = (f"{round(count / 1000)}k" if count >= 10_000 else str(count) for count in counts)
    return f"{before} → {after} tokens"


def _terminal_content(call: CallRef) -> Fields:
    return {"type": "terminal", "terminalId": call.call_id}


def _call_update(call: CallRef, status: str) -> Update:
    return _update("tool_call_update", toolCallId=call.call_id, status=status)


def _ended_status(caps: ClientCapabilities) -> str:
    """Returns the status of an ended call that has no result."""
    return "cancelled" if caps.cancelled_calls else "failed"


def _final_status(result: ToolResult) -> str:
    return "failed" if result.is_error else "completed"


def _finished_call(
    result: ToolResult,
    *,
    arguments: str | None = None,
    limits: CallLimits = tool_calls.STANDARD,
    by_id: bool,
) -> tuple[Update, ...]:
    """Returns updates with a call that the client does not know yet, and the call's result. For `by_id`, see
    `plan_updates`."""
    fields = call_fields(result.call.call_id, result.announcement, name=result.name, arguments=arguments, limits=limits)
    content = tool_calls.result_contents(result, limits)
    update = _update("tool_call", status=_final_status(result)) | fields | {"content": content}
    # A client that shows no content shows the raw output instead.
    has_text = limits.repeats_output or not content
    output = tool_calls.raw_output(result, with_text=has_text, limit=limits.raw_output)
    return (update | output, *plan_updates(result.plan, by_id=by_id))


def _changed_fields(call: CallRef, opened: _OpenCall, announcement: Announcement) -> Fields:
    """Returns the fields title, kind and locations. Leaves out those that have not changed since they were last sent to
    the client."""
    known = call_fields(call.call_id, opened.announcement)
    opened.announcement = announcement
    return {key: value for key, value in call_fields(call.call_id, announcement).items() if known[key] != value}


def _terminal_output(call: CallRef, text: str) -> Fields:
    return {"terminal_id": call.call_id, "data": text}


def _terminal_exit(call: CallRef, code: object) -> Fields:
    """Returns the field `terminal_exit`. A negative `code` means that the signal with this number ended the command."""
    exited = isinstance(code, int) and code >= 0
    signal = f"signal {-code}" if isinstance(code, int) and code < 0 else None
    return {"terminal_id": call.call_id, "exit_code": code if exited else None, "signal": signal}


def _terminal_end(result: ToolResult, sent: str) -> Fields:
    """Returns the exit status, and the part of the output that was not sent to the terminal yet."""
    output = tool_calls.output_text(result)
    rest = output[len(sent) :] if output.startswith(sent) else f"\n{output}"
    meta: Fields = {"terminal_exit": _terminal_exit(result.call, result.raw_output.get("exit_code"))}
    if rest.strip():
        meta["terminal_output"] = _terminal_output(result.call, limit_text(rest))
    return meta
