"""Turns a session's items into the updates for one client. Does no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, assert_never

from crow.agent.feed import announcements
from crow.domain import entries, events
from crow.domain.entries import Announcement, CallRef, Entry, ToolResult
from crow.domain.messages import Part
from crow.domain.receipts import NAMESPACE as RECEIPT
from crow.domain.rendering import EFFECTS_UNKNOWN, INTERRUPTED, NOT_RUN, interrupted_text, parts_text
from crow.domain.subagents import answer_id, call_of_order, order_id
from crow.domain.text import safe, title_line
from crow.frontend.calls import ShownCall, ViewLimits, call_update, terminal_content, whole_call
from crow.frontend.cursors import Cursor
from crow.frontend.subagents import Family, answer_of, link, message_updates, order_of, subagent_update
from crow.protocol.errors import turn_error
from crow.protocol.params import ClientCapabilities
from crow.protocol.sizes import limit_text
from crow.protocol.tool_calls import Fields, call_fields
from crow.protocol.updates import (
    Update,
    command_updates,
    compaction_update,
    list_change_update,
    new_update,
    notice_updates,
    plan_updates,
    prompt_updates,
    remark_updates,
    summary_updates,
    text_updates,
    thought_updates,
    token_change,
    turn_end_words,
    turn_state,
    turn_state_update,
    usage_object,
    usage_update,
)

MAX_REMEMBERED = 500
"""A view remembers at least this many of the newest messages and calls that have ended."""


COMPACTIONS = (entries.Checkpoint, entries.Mask)
ENDS = (entries.Assistant, entries.TurnEnd)


class Shown(NamedTuple):
    """An update, and the place in the session right after it. The place is None if the client uses no cursors."""

    update: Update
    cursor: Cursor | None = None


@dataclass(slots=True, kw_only=True)
class _Place:
    """The place in the log up to which a view has shown everything."""

    entry: int
    """The newest entry."""
    pieces: int = 0
    """How many updates of the next entry were shown, if that entry takes several."""
    skipped: int = 0
    """How many updates of the next entry the client got before it came back."""
    closed: int = 0
    """The newest entry that ended a message."""


@dataclass(slots=True, kw_only=True)
class _Growing:
    """The message that is being shown."""

    message: str = ""
    """Its id. Empty if there is none."""
    thought: int = 0
    """How many characters of its thought were shown."""
    text: int = 0
    """How many characters of its text were shown."""


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """The instructions that a turn of a subagent got from its parent session, and its answer."""

    order: str = ""
    """The id of the `task` call that started the turn. Empty if no such call did."""
    answer: str = ""
    """The text of the newest answer, unless calls came after it."""


class View:
    """What one client has been shown of a session.

    `apply` takes the session's items in order and returns the updates that are still missing. An item that was already
    applied adds nothing, and neither does one that is older than the view. So the log, the unfinished part of a turn
    and the live items may overlap.

    A view that reads the log shows each call as one update with its final status. `end_reading` ends this.
    """

    def __init__(
        self,
        caps: ClientCapabilities,
        *,
        session_id: str,
        cwd: str = "",
        entry: int = 0,
        is_reading: bool = False,
        limits: ViewLimits | None = None,
        family: Family | None = None,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        self.session_id = session_id
        self.is_reading = is_reading
        self.last_end: entries.TurnEnd | None = None
        """The end of the last turn, if the view has read one."""
        self._caps = caps
        self._cwd = cwd
        self._limits = limits or ViewLimits()
        self._family = family
        self._new_id = new_id
        self._place = _Place(entry=entry)
        self._growing = _Growing()
        self._calls: dict[CallRef, ShownCall] = {}
        self._over: dict[object, None] = {}
        self._compaction_begun = ""
        self._exchange = _Exchange()
        self._is_answered = True
        self._shown: list[Shown] = []

    @classmethod
    def at(
        cls,
        cursor: Cursor,
        before: Sequence[Entry],
        caps: ClientCapabilities,
        *,
        session_id: str,
        cwd: str = "",
    ) -> View:
        """Return a view that reads the log on from a cursor. `before` contains entries up to the cursor, among them
        the answers with the calls that are still open."""
        view = cls(caps, session_id=session_id, cwd=cwd, is_reading=True, limits=ViewLimits(is_full=True))
        for entry in before:
            view._remember(entry, cursor)
        for call in cursor.calls:
            if call not in view._calls:  # a subagent made it
                view._calls[call] = ShownCall(call, "", None, Announcement(title=call.call_id), is_announced=True)
        view._place = _Place(entry=cursor.entry, pieces=cursor.pieces, skipped=cursor.pieces)
        view._growing = _Growing(message=cursor.message, thought=cursor.thought, text=cursor.text)
        return view

    @property
    def cursor(self) -> Cursor:
        """The place up to which the client has been shown everything."""
        calls = {call: opened.terminal_chars for call, opened in self._calls.items() if opened.is_announced}
        return Cursor(
            entry=self._place.entry,
            pieces=self._place.pieces,
            message=self._growing.message,
            thought=self._growing.thought,
            text=self._growing.text,
            calls=calls,
        )

    @property
    def unfinished(self) -> str:
        """The id of the message of which the client has been shown a part."""
        return self._growing.message if self._growing.thought or self._growing.text else ""

    def knows(self, call: CallRef | None) -> bool:
        """Whether the call was announced here and has not ended."""
        return call in self._calls and self._calls[call].is_announced

    def apply(self, item: events.Event, *, is_own: bool = False) -> list[Shown]:
        """Return the updates for `item`, in order. They do not include lists of options and commands, which
        `SessionClient` adds. `is_own` means that this client sent the prompt that the item shows."""
        self._shown = []
        is_own = is_own and not self._caps.is_translated
        match item:
            case events.EntryStored(entry=entry):
                self._store(entry, is_own=is_own)
            case events.TextShown(message_id=message_id, offset=offset, text=text, after=after):
                if after is None or after >= self._place.closed:  # otherwise the message has ended
                    self._grow(message_id, text, offset, "text")
            case events.ThoughtShown(message_id=message_id, offset=offset, text=text, after=after):
                if after is None or after >= self._place.closed:
                    self._grow(message_id, text, offset, "thought")
            case events.CallAnnounced():
                self._announce(item)
            case events.CallProgressed():
                self._progress(item)
            case events.CallEnded(call=call, text=text):
                self._end(call, text)
            case events.TurnBegan():
                self._begin_turn(item, is_own=is_own)
            case events.TurnEnded():
                self._emit(*([] if is_own else [turn_state_update(self._end_state(item))]))
            case _:
                self._emit(*self._unstored(item))
        is_compaction = isinstance(item, events.EntryStored) and isinstance(item.entry.body, COMPACTIONS)
        if self._shown and not is_compaction:
            self._is_answered = self._shown[-1].update["sessionUpdate"] != "user_message_chunk"
        return self._shown

    def end_reading(self, *, is_running: bool) -> list[Shown]:
        """Return updates with the calls that have no result in the log. If a turn is running, they go on; else they
        have ended."""
        self._shown, self.is_reading, self._limits = [], False, ViewLimits()
        if is_running:
            self._show_calls()
        else:
            self._end_calls()
        return self._shown

    def end_missed(self, call: CallRef, result: ToolResult | None) -> list[Shown]:
        """Return updates that end a call that the client still shows as running. The call was a subagent's, so it is
        not in the session's own log."""
        self._shown = []
        self._calls.pop(call, None)
        self._end_here(call)
        if result is not None:
            self._emit(*self._whole_call(result))
        else:
            self._emit(call_update(call, self._ended_status()))
        return self._shown

    def question_content(self, call: CallRef, content: list[Fields]) -> list[Fields]:
        """Return the content of a permission request for an announced call: first `content`, then the call's terminal,
        if the call has one. Clients show this content in place of the earlier content of the call."""
        opened = self._calls.get(call)
        if opened is None:
            return content
        if opened.in_terminal is not None:
            content = [*content, terminal_content(call)]
        opened.content = content
        return content

    # The place in the session.

    def _emit(self, *updates: Update) -> None:
        for update in updates:
            self._shown.append(Shown(update, self.cursor if self._caps.cursors else None))

    def _emit_pieces(self, *updates: Update) -> None:
        """Add the updates of an entry whose kind is in `PIECEMEAL`, except those that the client got before it came
        back."""
        skipped = self._place.skipped
        for update in updates[skipped:]:
            self._place.pieces += 1
            self._emit(update)
        if updates:
            self._place.skipped = 0

    def _pass(self, entry: Entry) -> None:
        """Move behind an entry whose updates have all been added."""
        self._place.entry, self._place.pieces = max(self._place.entry, entry.id), 0
        if isinstance(entry.body, ENDS):
            self._place.closed = entry.id
        if self._growing.message == getattr(entry.body, "message_id", None):
            self._growing = _Growing()
        if self._shown and self._caps.cursors:
            self._shown[-1] = Shown(self._shown[-1].update, self.cursor)

    def _end_here(self, ended: object) -> None:
        """Remember that a message or a call has ended, so that late items about it add nothing."""
        self._over[ended] = None
        if len(self._over) > 2 * MAX_REMEMBERED:
            self._over = dict.fromkeys(list(self._over)[-MAX_REMEMBERED:])

    def _remember(self, entry: Entry, cursor: Cursor) -> None:
        """Take an entry that the client has been shown."""
        if isinstance(entry.body, entries.Assistant | entries.User | entries.TurnEnd):
            self._calls.clear()  # it ended the calls before it
        match entry.body:
            case entries.Assistant() as answer:
                self._end_here(answer.message_id)
                for each in announcements(entry.id, answer):
                    opened = self._open(each)
                    opened.is_announced = each.call in cursor.calls
                    opened.unread = cursor.calls.get(each.call, 0)
            case entries.Started(call=call, announcement=announcement) if call in self._calls:
                self._calls[call].status = "in_progress"
                self._calls[call].announcement = announcement or self._calls[call].announcement
            case ToolResult(call=call):
                self._calls.pop(call, None)
                self._end_here(call)
            case _:
                pass

    # Stored entries.

    def _store(self, entry: Entry, *, is_own: bool) -> None:
        if not self.is_reading and entry.session != self.session_id:  # a subagent that has no session of its own
            self._show_stored(entry, is_own=False)
        elif self.is_reading or entry.id > self._place.entry:
            self._show_stored(entry, is_own=is_own)
            self._pass(entry)

    def _show_stored(self, entry: Entry, *, is_own: bool) -> None:
        match entry.body:
            case entries.User(parts=parts, message_id=message_id):
                self._end_calls()
                self._exchange = _Exchange()
                if not is_own or self._place.skipped:  # a part of it was shown by a load
                    self._emit_pieces(*self._prompt(parts, message_id))
            case entries.Assistant() as answer:
                self._end_calls()
                self._finish_message(entry, answer)
                for announced in announcements(entry.id, answer):
                    self._announce(announced)
            case entries.Started(call=call, announcement=announcement):
                self._start(call, announcement)
            case ToolResult() as result:
                self._finish(result)
            case entries.Remark(text=text, message_id=message_id):
                self._show_calls()
                self._emit_pieces(*self._remark(message_id, text))
            case entries.Custom(is_shown=True, namespace=namespace, text=text, message_id=message_id):
                self._show_calls()
                words = f"\n\n{text}" if namespace == RECEIPT else text  # a receipt follows an answer
                self._emit_pieces(*self._remark(message_id, words))
            case entries.Command(text=text, answer=answer, message_id=message_id):
                self._show_calls()
                is_typed = is_own or message_id in self._over or message_id == self._growing.message
                typed = () if is_typed else command_updates(message_id, text)
                shown = safe(limit_text(answer, self._limits.answer_bytes))
                self._emit_pieces(*typed, *text_updates(message_id, shown))
            case entries.Checkpoint() | entries.Mask() as body:
                self._show_calls()
                self._emit(*self._compaction(entry, body))
            case entries.TurnEnd() as end:
                self._end_calls()
                if self.unfinished:
                    self._tell_lost(entry)
                    self._growing = _Growing()
                self.last_end = end
                self._emit(*self._turn_end(entry, end), *self._answered(end.stop))
            case _:
                pass  # clients are not shown the other entries

    def _finish_message(self, entry: Entry, answer: entries.Assistant) -> None:
        """Show the part of an answer that the client has not been shown yet."""
        if self.unfinished not in ("", answer.message_id):
            self._tell_lost(entry)
        text = answer.text
        if self.is_reading and answer.finish == "interrupted":  # live, the end of the turn says it
            text = interrupted_text(answer) if text.strip() else INTERRUPTED
        is_known = self._growing.message == answer.message_id
        self._over.pop(answer.message_id, None)  # a damaged log may use an id twice
        has_more_text = is_known and len(answer.text) < self._growing.text != len(text)
        self._grow(answer.message_id, answer.thought, 0, "thought")
        if has_more_text or (is_known and self._growing.thought > len(answer.thought)):
            self._tell_lost(entry)
        else:
            self._grow(answer.message_id, text, 0, "text")
        self._exchange.answer = text
        self._end_here(answer.message_id)

    def _tell_lost(self, entry: Entry) -> None:
        """Say that the client has been shown text that is not in the log. The process that streamed it has died before
        it could store the text."""
        words = (
            "The end of the text above was lost, because the process that wrote it ended. The model does not see it."
        )
        self._emit(*self._remark(f"lost_{entry.id}", f"({words})"))

    def _prompt(self, parts: Sequence[Part], message_id: str) -> tuple[Update, ...]:
        call_id, family = call_of_order(message_id), self._family
        if call_id is None or (family is not None and not family.parent_id):
            return prompt_updates(message_id, parts)
        if family is None:
            return ()  # it was shown as a message from the session that gave the order
        self._exchange.order = call_id
        family.tasks[call_id] = family.session_id
        order = events.SessionMessage(
            message_id=order_id(call_id),
            sender=family.parent_id,
            recipient=family.session_id,
            text=parts_text(parts),
        )
        return message_updates(order, family.session_id)

    def _answered(self, stop: str) -> tuple[Update, ...]:
        """Return updates with the answer that a subagent sent to its parent session."""
        order, text = self._exchange.order, self._exchange.answer
        if self._family is None or not order or stop != "end_turn" or not text:
            return ()
        self._family.answers[order] = text
        answer = events.SessionMessage(
            message_id=answer_id(order),
            sender=self._family.session_id,
            recipient=self._family.parent_id,
            text=text,
        )
        return message_updates(answer, self._family.session_id)

    def _compaction(self, entry: Entry, body: entries.Checkpoint | entries.Mask) -> tuple[Update, ...]:
        if isinstance(body, entries.Mask):
            compaction_id, summary, words = f"mask_{entry.id}", "", "Older tool outputs elided"
        else:
            compaction_id, summary, words = body.compaction_id, body.summary, "Context compacted"
        self._end_here(compaction_id)
        if self._caps.compaction:
            return (compaction_update(compaction_id, detail=summary),)
        if isinstance(body, entries.Checkpoint) and body.reason == "command":
            return ()  # the command's answer says it
        return self._remark(compaction_id, f"({words}: {token_change(body)}.)")

    def _turn_end(self, entry: Entry, end: entries.TurnEnd) -> tuple[Update, ...]:
        """Return a remark if the turn failed or has no answer. Live, the client that sent the prompt learns this from
        the response, so only a turn whose process has died gets a remark.

        Without the remark, nothing would separate this turn's prompt from the next prompt in a loaded session, and
        clients would join the two prompts.
        """
        words = turn_end_words(end.stop, end.detail, is_answered=self._is_answered or bool(self._shown))
        if not words or not (self.is_reading or end.stop == "interrupted"):
            return ()
        return remark_updates(f"turn_end_{entry.id}", f"({words})")

    # The unfinished message.

    def _grow(self, message_id: str, text: str, offset: int, kind: Literal["text", "thought"]) -> None:
        if message_id in self._over:
            return
        if message_id != self._growing.message:
            self._growing = _Growing(message=message_id)
        shown = self._growing.text if kind == "text" else self._growing.thought
        if offset > shown:
            return  # the text before is missing; the stored answer will show the rest
        new = text[shown - offset :]
        for update in text_updates(message_id, new) if kind == "text" else thought_updates(message_id, new):
            if kind == "text":
                self._growing.text += len(update["content"]["text"])
            else:
                self._growing.thought += len(update["content"]["text"])
            self._emit(update)

    # Calls.

    def _open(self, announced: events.CallAnnounced) -> ShownCall:
        opened = ShownCall(announced.call, announced.name, announced.arguments, announced.announcement)
        if announced.announcement.kind == "execute" and self._caps.terminal_output:
            opened.in_terminal = ""
        self._calls[announced.call] = opened
        return opened

    def _announce(self, announced: events.CallAnnounced) -> None:
        self._exchange.answer = ""  # text before a call is not the turn's answer
        if announced.call in self._calls or announced.call in self._over:
            return
        opened = self._open(announced)
        if not self.is_reading:
            self._show_call(opened)

    def _show_calls(self) -> None:
        """Announce the calls that the client does not know yet."""
        for opened in self._calls.values():
            self._show_call(opened)

    def _show_call(self, opened: ShownCall) -> None:
        """Announce a call in its present state, unless the client knows the call already."""
        if not opened.is_announced:
            update = opened.announced(self._limits.calls, self._cwd)
            self._emit(*self._with_messages((update,), opened.ref, opened.arguments))

    def _start(self, call: CallRef, announcement: Announcement | None) -> None:
        opened = self._calls.get(call)
        if opened is not None:
            self._emit(*filter(None, [opened.started(announcement)]))
        elif not self.is_reading and announcement is not None and call not in self._over:
            # Otherwise the call is shown with its result, or the client knows that it has ended.
            opened = self._calls[call] = ShownCall(call, "", None, announcement, is_announced=True)
            opened.status = "in_progress"
            self._emit(new_update("tool_call", status="in_progress") | call_fields(call.call_id, announcement))

    def _link(self, call_id: str, session_id: str) -> None:
        """Link a running call to the session of the subagent that carries it out."""
        opened = next((each for each in self._calls.values() if each.ref.call_id == call_id), None)
        if opened is not None and self._caps.subagents and opened.subagent != session_id:
            self._emit(opened.linked(session_id))

    def _progress(self, item: events.CallProgressed) -> None:
        if (opened := self._calls.get(item.call)) is not None:
            self._emit(*filter(None, [opened.progressed(item.text)]))

    def _finish(self, result: ToolResult) -> None:
        if self.is_reading:  # calls stay in call order, whichever ends first
            for call, earlier in self._calls.items():
                if call == result.call:
                    break
                self._show_call(earlier)
        opened = self._calls.pop(result.call, None)
        self._end_here(result.call)
        if opened is None or not opened.is_announced:
            arguments = None if opened is None else opened.arguments
            self._emit(*self._with_messages(self._whole_call(result, arguments), result.call, arguments, result))
            return
        update = opened.finished(result, self._limits.calls)
        answer = answer_of(result, opened.subagent, self.session_id) if opened.subagent else None
        answered = message_updates(answer, self.session_id) if answer is not None else ()
        self._emit(update, *answered, *plan_updates(result.plan, by_id=self._caps.plans))

    def _whole_call(self, result: ToolResult, arguments: str | None = None) -> tuple[Update, ...]:
        update = whole_call(result, arguments, self._limits.calls)
        return (update, *plan_updates(result.plan, by_id=self._caps.plans))

    def _with_messages(
        self, updates: tuple[Update, ...], call: CallRef, arguments: str | None, result: ToolResult | None = None
    ) -> tuple[Update, ...]:
        """Add three things to the updates of a `task` call in a log: a link to the subagent, the subagent's
        instructions and its answer."""
        family = self._family
        task = family.task(call, result) if family is not None else None
        if family is None or task is None:
            return updates
        shown, *rest = updates
        shown = shown | {"content": [link(task), *shown.get("content", ())]}
        if call in self._calls:
            self._calls[call].subagent, self._calls[call].content = task, shown["content"]
        order = order_of(call, arguments, family.session_id, task)
        later = family.answers.get(call.call_id)
        answer = answer_of(result, task, family.session_id, later) if result is not None else None
        before, after = (
            message_updates(message, family.session_id) if message is not None else () for message in (order, answer)
        )
        return (*before, shown, *after, *rest)

    def _end_calls(self) -> None:
        """End all calls, because the conversation goes on without their results."""
        for call, opened in tuple(self._calls.items()):
            self._end(call, EFFECTS_UNKNOWN if opened.status == "in_progress" else NOT_RUN)

    def _end(self, call: CallRef, text: str) -> None:
        opened = self._calls.pop(call, None)
        if opened is None:
            return
        self._end_here(call)
        update = opened.ended(text, self._ended_status(), self._limits.calls)
        self._emit(*([update] if opened.is_announced else self._with_messages((update,), call, opened.arguments)))

    def _ended_status(self) -> str:
        """The status of an ended call that has no result."""
        return "cancelled" if self._caps.cancelled_calls else "failed"

    # Items that are not in the log.

    def _begin_turn(self, item: events.TurnBegan, *, is_own: bool) -> None:
        if item.typed is not None and item.message_id not in self._over:
            if not is_own:
                self._emit_pieces(*command_updates(item.message_id, item.typed))
            self._growing, self._place.pieces = _Growing(message=item.message_id), 0
            self._end_here(item.message_id)
        if not is_own:
            self._emit(turn_state_update({"state": "running"}))

    def _end_state(self, item: events.TurnEnded) -> Mapping[str, Any]:
        """Return how a turn ended. A translated client is also told which turn it was, and why it failed."""
        if not self._caps.is_translated:
            return turn_state(item)
        state = {**turn_state(item), "messageId": item.message_id}
        if item.error is None:
            return state
        error = turn_error(item.error)
        return state | {"error": {"code": error.code, "message": str(error), "data": error.data}}

    def _unstored(self, item: events.Event) -> Collection[Update]:
        match item:
            case events.ContextMeasured():
                return (usage_update(item),)
            case events.CompactionChanged():
                return self._compacting(item)
            case events.SummaryShown(compaction_id=compaction_id, text=text):
                return summary_updates(compaction_id, text) if self._caps.compaction else ()
            case events.NoticeShown():
                return self._notice(item)
            case events.PlanChanged(plan=plan):
                return plan_updates(plan, by_id=self._caps.plans)
            case events.TitleChanged(title=title):
                return (new_update("session_info_update", title=None if title is None else title_line(title)),)
            case events.SessionListChanged():
                return (list_change_update(item),)
            case events.ModeChanged(mode=mode):
                return (new_update("current_mode_update", currentModeId=mode),)
            case events.OptionsChanged() | events.CommandsChanged():
                return ()
            case events.SubagentChanged():
                usage = None if item.usage is None else usage_object(item.usage)
                return (subagent_update(item, usage),) if self._caps.subagents else ()
            case events.SubagentLinked(call_id=call_id, session_id=session_id):
                self._link(call_id, session_id)
                return ()
            case events.SessionMessage():
                return message_updates(item, self.session_id) if self._caps.subagents else ()
            case (
                events.EntryStored()
                | events.TextShown()
                | events.ThoughtShown()
                | events.CallAnnounced()
                | events.CallProgressed()
                | events.CallEnded()
                | events.TurnBegan()
                | events.TurnEnded()
            ):
                return ()  # `apply` handles these
            case _:
                assert_never(item)

    def _compacting(self, item: events.CompactionChanged) -> Collection[Update]:
        """Return updates for a summary that is being written. Its end is shown once: by the stored checkpoint, by the
        answer of the command that asked for it, or here."""
        if item.compaction_id in self._over:
            return ()
        if item.status != "in_progress":
            self._end_here(item.compaction_id)
        elif self._compaction_begun == item.compaction_id:
            return ()
        else:
            self._compaction_begun = item.compaction_id
        if self._caps.compaction:
            return (compaction_update(item.compaction_id, item.status, item.detail),)
        match item.status:
            case "in_progress":
                words = "Writing a summary of the conversation so far."
            case "failed" if item.detail and not item.is_command:
                words = item.detail
            case "cancelled":
                words = "The summary was cancelled."
            case _:
                return ()
        if self._caps.notices:
            return notice_updates("info", words)
        return self._remark(self._new_id(), f"({words})")

    def _remark(self, message_id: str, words: str) -> tuple[Update, ...]:
        """Return updates with a remark by crow. If the client can tell remarks from answers, the updates are marked as
        a remark."""
        mark = {"_meta": {"crow": {"remark": True}}} if self._caps.marked_remarks else {}
        return tuple(update | mark for update in remark_updates(message_id, words))

    def _notice(self, item: events.NoticeShown) -> tuple[Update, ...]:
        title = item.title or item.description
        if not title:
            return ()
        if self._caps.notices:
            return notice_updates(item.severity, title, item.description)
        if item.severity == "info":
            return ()
        words = f"{title} {item.description}" if item.description and item.description != title else title
        return self._remark(self._new_id(), f"({words})")
