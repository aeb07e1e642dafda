"""Turns a session's items into the updates for one client. Does no I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, assert_never

from crow.agent.feed import announcements
from crow.domain import entries, events
from crow.domain.entries import CallRef, Entry, ToolResult
from crow.domain.messages import Part
from crow.domain.receipts import NAMESPACE as RECEIPT
from crow.domain.rendering import INTERRUPTED, interrupted_text, parts_text
from crow.domain.subagents import answer_id, call_of_order, order_id
from crow.domain.text import safe, title_line
from crow.frontend.calls import Ended, ShownCalls, ViewLimits
from crow.frontend.cursors import Cursor
from crow.frontend.subagents import Family, message_updates, subagent_update
from crow.protocol.errors import turn_error
from crow.protocol.params import ClientCapabilities
from crow.protocol.sizes import limit_text
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

_COMPACTIONS = (entries.Checkpoint, entries.Mask)
_ENDS = (entries.Assistant, entries.TurnEnd)


class Shown(NamedTuple):
    """An update, and the cursor right after it. The cursor is None if the client uses none."""

    update: Update
    cursor: Cursor | None = None


@dataclass(slots=True, kw_only=True)
class _Place:
    """The place in the log up to which a view has shown everything."""

    entry: int
    """The id of the newest entry that was shown completely. 0 if there is none."""
    pieces: int = 0
    """How many updates of the next entry were shown, if its kind is in `PIECEMEAL` (see `crow.frontend.cursors`)."""
    skipped: int = 0
    """How many updates of the next entry the client got before it connected again."""
    closed: int = 0
    """The id of the newest entry that ended a message. 0 if there is none."""


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
    """The instructions that a subagent got from its parent session for the present turn, and the turn's answer."""

    order: str = ""
    """The id of the `task` call that started the turn. Empty if no such call did."""
    answer: str = ""
    """The text of the newest answer, unless calls came after it."""


class View:
    """The state of a session as one client has been shown it.

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
        self.last_end: entries.TurnEnd | None = None
        """The end of the last turn, if the view has read one."""
        self._caps = caps
        self._family = family
        self._new_id = new_id
        self._place = _Place(entry=entry)
        self._growing = _Growing()
        self.calls = ShownCalls(caps, session_id, cwd, limits or ViewLimits(), family, is_reading=is_reading)
        """The calls that have not ended. This object also holds the view's limits, and whether the view reads the
        log."""
        self._over = Ended()
        """The messages and compactions that have ended."""
        self._compaction_begun = ""
        """The id of the newest compaction that the client was told has begun."""
        self._exchange = _Exchange()
        self._is_answered = True
        """Whether the client was shown anything after the newest prompt."""
        self._shown: list[Shown] = []
        """The updates of the item that is being applied."""

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
        """Return a view that continues to read the log at a cursor. `before` contains entries up to the cursor, among
        them the answers with the calls that are still open."""
        view = cls(caps, session_id=session_id, cwd=cwd, is_reading=True)
        for entry in before:
            view._remember(entry, cursor)
        view.calls.remember_others(cursor.calls)
        view._place = _Place(entry=cursor.entry, pieces=cursor.pieces, skipped=cursor.pieces)
        view._growing = _Growing(message=cursor.message, thought=cursor.thought, text=cursor.text)
        return view

    @property
    def cursor(self) -> Cursor:
        """The place up to which the client has been shown everything."""
        return Cursor(
            entry=self._place.entry,
            pieces=self._place.pieces,
            message=self._growing.message,
            thought=self._growing.thought,
            text=self._growing.text,
            calls=self.calls.positions(),
        )

    @property
    def unfinished(self) -> str:
        """The id of the message that the client has been shown only in part. Empty if there is none."""
        return self._growing.message if self._growing.thought or self._growing.text else ""

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
                self._emit_each(self.calls.progress(item))
            case events.CallEnded(call=call, text=text):
                self._emit_each(self.calls.end(call, text))
            case events.TurnBegan():
                self._begin_turn(item, is_own=is_own)
            case events.TurnEnded():
                self._emit(*([] if is_own else [turn_state_update(self._end_state(item))]))
            case _:
                self._emit_each(self._unstored(item))
        is_compaction = isinstance(item, events.EntryStored) and isinstance(item.entry.body, _COMPACTIONS)
        if self._shown and not is_compaction:
            self._is_answered = self._shown[-1].update["sessionUpdate"] != "user_message_chunk"
        return self._shown

    def end_reading(self, *, is_running: bool) -> list[Shown]:
        """End the reading of the log. Return updates for the calls that have no result in the log: they show the calls
        as running if a turn is running, and as ended otherwise."""
        self._shown = []
        self.calls.end_reading()
        self._emit_each(self.calls.show() if is_running else self.calls.end_all())
        return self._shown

    def end_missed(self, call: CallRef, result: ToolResult | None) -> list[Shown]:
        """Return updates that end a call that the client still shows as running. A subagent made the call, so the call
        is not in the session's own log."""
        self._shown = []
        self._emit_each(self.calls.end_missed(call, result))
        return self._shown

    # The place in the session.

    def _emit(self, *updates: Update) -> None:
        self._emit_each(updates)

    def _emit_each(self, updates: Iterable[Update]) -> None:
        """Add updates. Take each one from `updates` only after adding the previous one, because taking an update may
        move the cursor."""
        for update in updates:
            self._shown.append(Shown(update, self.cursor if self._caps.cursors else None))

    def _emit_pieces(self, *updates: Update) -> None:
        """Add the updates of an entry whose kind is in `PIECEMEAL`, except those that the client got before it
        connected again."""
        skipped = self._place.skipped
        for update in updates[skipped:]:
            self._place.pieces += 1
            self._emit(update)
        if updates:
            self._place.skipped = 0

    def _pass(self, entry: Entry) -> None:
        """Move the cursor to the end of an entry whose updates have all been added."""
        self._place.entry, self._place.pieces = max(self._place.entry, entry.id), 0
        if isinstance(entry.body, _ENDS):
            self._place.closed = entry.id
        if self._growing.message == getattr(entry.body, "message_id", None):
            self._growing = _Growing()
        if self._shown and self._caps.cursors:
            self._shown[-1] = Shown(self._shown[-1].update, self.cursor)

    def _remember(self, entry: Entry, cursor: Cursor) -> None:
        """Note an entry that the client was shown before it connected again."""
        if isinstance(entry.body, entries.Assistant):
            self._over.add(entry.body.message_id)
        self.calls.remember(entry, cursor.calls)

    # Stored entries.

    def _store(self, entry: Entry, *, is_own: bool) -> None:
        # Outside of a load, entries of other sessions come from subagents that the client cannot show as sessions.
        if not self.calls.is_reading and entry.session != self.session_id:
            self._show_stored(entry, is_own=False)
        elif self.calls.is_reading or entry.id > self._place.entry:
            self._show_stored(entry, is_own=is_own)
            self._pass(entry)

    def _show_stored(self, entry: Entry, *, is_own: bool) -> None:
        match entry.body:
            case entries.User(parts=parts, message_id=message_id):
                self._emit_each(self.calls.end_all())
                self._exchange = _Exchange()
                if not is_own or self._place.skipped:  # a load sent a part of the prompt before the connection broke
                    self._emit_pieces(*self._prompt(parts, message_id))
            case entries.Assistant() as answer:
                self._emit_each(self.calls.end_all())
                self._finish_message(entry, answer)
                for announced in announcements(entry.id, answer):
                    self._announce(announced)
            case entries.Started(call=call, announcement=announcement):
                self._emit_each(self.calls.start(call, announcement))
            case ToolResult() as result:
                self._emit_each(self.calls.finish(result))
            case entries.Remark(text=text, message_id=message_id):
                self._emit_each(self.calls.show())
                self._emit_pieces(*self._remark(message_id, text))
            case entries.Custom(is_shown=True, namespace=namespace, text=text, message_id=message_id):
                self._emit_each(self.calls.show())
                words = f"\n\n{text}" if namespace == RECEIPT else text  # separate it from the answer
                self._emit_pieces(*self._remark(message_id, words))
            case entries.Command(text=text, answer=answer, message_id=message_id):
                self._emit_each(self.calls.show())
                is_typed = is_own or message_id in self._over or message_id == self._growing.message
                typed = () if is_typed else command_updates(message_id, text)
                shown = safe(limit_text(answer, self.calls.limits.answer_bytes))
                self._emit_pieces(*typed, *text_updates(message_id, shown))
            case entries.Checkpoint() | entries.Mask() as body:
                self._emit_each(self.calls.show())
                self._emit(*self._compaction(entry, body))
            case entries.TurnEnd() as end:
                self._emit_each(self.calls.end_all())
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
        if self.calls.is_reading and answer.finish == "interrupted":  # live clients learn it from the end of the turn
            text = interrupted_text(answer) if text.strip() else INTERRUPTED
        is_known = self._growing.message == answer.message_id
        self._over.forget(answer.message_id)  # a damaged log may use an id twice
        has_more_text = is_known and len(answer.text) < self._growing.text != len(text)
        self._grow(answer.message_id, answer.thought, 0, "thought")
        if has_more_text or (is_known and self._growing.thought > len(answer.thought)):
            self._tell_lost(entry)
        else:
            self._grow(answer.message_id, text, 0, "text")
        self._exchange.answer = text
        self._over.add(answer.message_id)

    def _tell_lost(self, entry: Entry) -> None:
        """Say that the client has been shown text that is not in the log. The process that streamed the text died
        before storing it."""
        words = (
            "The end of the text above was lost, because the process that wrote it ended. The model does not see it."
        )
        self._emit(*self._remark(f"lost_{entry.id}", f"({words})"))

    def _prompt(self, parts: Sequence[Part], message_id: str) -> tuple[Update, ...]:
        call_id, family = call_of_order(message_id), self._family
        if call_id is None or (family is not None and not family.parent_id):
            return prompt_updates(message_id, parts)
        if family is None:
            return ()  # the client got the prompt as a message from the parent session
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
        self._over.add(compaction_id)
        if self._caps.compaction:
            return (compaction_update(compaction_id, detail=summary),)
        if isinstance(body, entries.Checkpoint) and body.reason == "command":
            return ()  # the command's answer says it
        return self._remark(compaction_id, f"({words}: {token_change(body)}.)")

    def _turn_end(self, entry: Entry, end: entries.TurnEnd) -> tuple[Update, ...]:
        """Return a remark if the turn failed or has no answer. Outside of a load, only a turn whose process has died
        gets a remark, because otherwise the client that sent the prompt learns the outcome from the response.

        Without the remark, nothing would separate this turn's prompt from the next prompt in a loaded session, and
        clients would join the two prompts.
        """
        words = turn_end_words(end.stop, end.detail, is_answered=self._is_answered or bool(self._shown))
        if not words or not (self.calls.is_reading or end.stop == "interrupted"):
            return ()
        return remark_updates(f"turn_end_{entry.id}", f"({words})")

    def _announce(self, announced: events.CallAnnounced) -> None:
        self._exchange.answer = ""  # text before a call is not the turn's answer
        self._emit_each(self.calls.announce(announced))

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

    # Items that are not in the log.

    def _begin_turn(self, item: events.TurnBegan, *, is_own: bool) -> None:
        if item.typed is not None and item.message_id not in self._over:
            if not is_own:
                self._emit_pieces(*command_updates(item.message_id, item.typed))
            self._growing, self._place.pieces = _Growing(message=item.message_id), 0
            self._over.add(item.message_id)
        if not is_own:
            self._emit(turn_state_update({"state": "running"}))

    def _end_state(self, item: events.TurnEnded) -> Mapping[str, Any]:
        """Return how a turn ended. A client of version 2 is also told which turn it was, and why the turn failed."""
        if not self._caps.is_translated:
            return turn_state(item)
        state = {**turn_state(item), "messageId": item.message_id}
        if item.error is None:
            return state
        error = turn_error(item.error)
        return state | {"error": {"code": error.code, "message": str(error), "data": error.data}}

    def _unstored(self, item: events.Event) -> Iterable[Update]:
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
                return self.calls.link(call_id, session_id)
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

    def _compacting(self, item: events.CompactionChanged) -> Iterable[Update]:
        """Return updates for a summary that is being written. Its end is shown once: by the stored checkpoint, by the
        answer of the command that asked for it, or here."""
        if item.compaction_id in self._over:
            return ()
        if item.status != "in_progress":
            self._over.add(item.compaction_id)
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
