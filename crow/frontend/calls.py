"""The calls that a client is shown: their state, the updates that change it, and how much a load shows of them. Does
no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from crow.agent.feed import announcements
from crow.domain.entries import Announcement, Assistant, CallRef, Entry, Started, ToolResult, TurnEnd, User
from crow.domain.events import CallAnnounced, CallProgressed
from crow.domain.rendering import EFFECTS_UNKNOWN, NOT_RUN
from crow.frontend.subagents import Family, answer_of, link, message_updates, order_of
from crow.protocol import tool_calls
from crow.protocol.params import ClientCapabilities
from crow.protocol.tool_calls import CallLimits, Fields, call_fields, diff_contents, shown_text, text_content
from crow.protocol.updates import (
    PROGRESS_CHARS,
    TERMINAL_CHARS,
    Update,
    new_update,
    plan_updates,
    terminal_end,
    terminal_exit,
    terminal_output,
)

REPLAY_RESULTS_BYTES = 4_600_000
"""A replay sends at most about this many bytes of tool results in all, or more if each result would otherwise get less
than `REPLAY_RESULT_BYTES`."""

REPLAY_RESULT_BYTES = 400
"""However long the history is, a replay sends at least this many bytes of each tool result, or all of a shorter one."""

_REPLAY_ANSWER_BYTES = 10_000_000

_MAX_REMEMBERED = 250
"""A view remembers at least this many ended messages and at least this many ended calls, the newest of each."""


class ViewLimits:
    """The limits for the parts of each call that a view shows. The longer the log that the view reads, the lower the
    limits.

    If several logs are read one after the other, such as those of subagents, their total length so far counts.
    `is_full` means that the client asked for whole results.
    """

    def __init__(self, *, is_full: bool = False) -> None:
        self._is_full = is_full
        self._entries = 0
        self.calls = tool_calls.FULL if is_full else tool_calls.STANDARD
        self.answer_bytes = _REPLAY_ANSWER_BYTES
        """The limit for the answer of a slash command, in bytes."""

    def result_bytes(self, entries: int) -> int | None:
        """Set the limits for the next history. `entries` is the number of entries in that history.

        Return the maximum number of bytes to read of each tool result, or None to read whole results.
        """
        self._entries += entries
        most = REPLAY_RESULTS_BYTES * 3 // max(1, self._entries)  # about every third entry is a result
        if self._is_full or most >= tool_calls.STANDARD.text:
            return None
        most = max(REPLAY_RESULT_BYTES, most)
        self.calls = tool_calls.short_limits(most)
        self.answer_bytes = max(2_000, 4 * most)
        return most


@dataclass(slots=True)
class _ShownCall:
    """A call that has not ended, as one client has been shown it."""

    ref: CallRef
    """The reference to the call."""
    name: str
    """The name of the tool, if it is known."""
    arguments: str | None
    """The arguments as JSON, if they are known."""
    announcement: Announcement
    """How the call is described to the client."""
    is_announced: bool = False
    """Whether the client knows the call. While the log is read, a call is announced together with its result."""
    status: Literal["pending", "in_progress"] = "pending"
    """The status that the client shows."""
    in_terminal: str | None = None
    """The output that was sent to the client's terminal, or None if the call has no terminal."""
    unread: int = 0
    """The number of characters that the client's terminal already had when the client connected again. The next output
    tells crow which characters these are."""
    content: list[Fields] = field(default_factory=list)
    """The content that the client shows."""
    subagent: str = ""
    """The id of the subagent that carries out the call, if the client knows that subagent."""

    @property
    def terminal_chars(self) -> int:
        """The number of characters that the client's terminal has."""
        return self.unread or len(self.in_terminal or "")

    def describe(self) -> None:
        """Describe the call by its arguments if it has no announcement: older versions of crow stored only the
        call."""
        if self.announcement == Announcement(title=self.name):
            self.announcement = tool_calls.announcement_from(self.name, self.arguments or "")

    def announced(self, limits: CallLimits, cwd: str) -> Update:
        """Return an update that announces the call in its present state. `cwd` is the directory to show in a
        terminal."""
        self.is_announced = True
        self.describe()
        fields = call_fields(
            self.ref.call_id, self.announcement, name=self.name, arguments=self.arguments, limits=limits
        )
        self.content = diff_contents(self.announcement.diffs, limits.diffs)
        if self.in_terminal is not None:
            terminal = {"terminal_id": self.ref.call_id} | ({"cwd": cwd} if cwd else {})
            fields["_meta"] = fields.get("_meta", {}) | {"terminal_info": terminal}
            self.content = [_terminal_content(self.ref)]
        if self.content:
            fields["content"] = self.content
        return new_update("tool_call", status=self.status) | fields

    def started(self, announcement: Announcement | None) -> Update | None:
        """Note that the call has started. Return an update that says so, or None if the client needs none. Unless
        `announcement` is None, it replaces the call's earlier announcement."""
        was_pending, self.status = self.status == "pending", "in_progress"
        if not self.is_announced:
            self.announcement = announcement or self.announcement
        if not (self.is_announced and was_pending):
            return None
        changed = self._changed_fields(announcement) if announcement is not None else {}
        if self.in_terminal is not None and self.content != [_terminal_content(self.ref)]:
            # Remove the content of the permission request, which has been answered.
            self.content = changed["content"] = [_terminal_content(self.ref)]
        return _call_update(self.ref, "in_progress") | changed

    def linked(self, session_id: str) -> Update:
        """Return an update that links the call to the session of the subagent that carries it out."""
        self.subagent, self.content = session_id, [link(session_id)]
        return _call_update(self.ref, self.status) | {"content": self.content}

    def progressed(self, text: str) -> Update | None:
        """Return an update with the new part of the output, or None if there is none. `text` is the whole output."""
        update = _call_update(self.ref, "in_progress")
        if self.in_terminal is None:
            content = [text_content(tool_calls.console_block(text[-PROGRESS_CHARS:]))]
            if content == self.content:
                return None
            self.content = content
            return update | {"content": content}
        if self.unread:
            self.in_terminal, self.unread = text[: self.unread], 0
        sent = self.in_terminal
        if not text.startswith(sent):
            return None
        self.in_terminal = text[: max(TERMINAL_CHARS, len(sent))]
        added = self.in_terminal[len(sent) :]
        return update | {"_meta": {"terminal_output": terminal_output(self.ref, added)}} if added else None

    def finished(self, result: ToolResult, limits: CallLimits) -> Update:
        """Return an update with the result of an announced call."""
        update = _call_update(self.ref, "failed" if result.is_error else "completed")
        update |= self._changed_fields(result.announcement)
        if self.in_terminal is not None:
            sent = self.in_terminal or tool_calls.output_text(result)[: self.unread]
            update["_meta"] = terminal_end(result, sent)
        else:
            content = tool_calls.result_contents(result, limits)
            if self.subagent:
                content = [link(self.subagent), *content]
            if content != self.content:  # some clients would show the same content twice
                update["content"] = content
        return update | tool_calls.raw_output(result, with_text=self.in_terminal is None, limit=limits.raw_output)

    def ended(self, text: str, status: str, limits: CallLimits) -> Update:
        """Return an update of a call that has ended without a result. `text` says why."""
        content = [text_content(shown_text(text))] if text else []
        if not self.is_announced:
            self.describe()
            call_id, announcement = self.ref.call_id, self.announcement
            fields = call_fields(call_id, announcement, name=self.name, arguments=self.arguments, limits=limits)
            content = [*diff_contents(announcement.diffs, limits.diffs), *content]
            return new_update("tool_call", status=status) | fields | {"content": content}
        update = _call_update(self.ref, status)
        if self.subagent:
            content = [link(self.subagent), *content]
        if self.in_terminal is not None:
            content = [_terminal_content(self.ref), *content]
            update["_meta"] = {"terminal_exit": terminal_exit(self.ref, None)}
        return update | {"content": content}

    def _changed_fields(self, announcement: Announcement) -> Fields:
        """Replace the announcement. Return those of the fields title, kind and locations that are new to the client."""
        known = call_fields(self.ref.call_id, self.announcement)
        self.announcement = announcement
        new = call_fields(self.ref.call_id, announcement)
        return {key: value for key, value in new.items() if known[key] != value}


class Ended:
    """Remembers the newest messages or calls that have ended, so that late items about them add nothing."""

    def __init__(self) -> None:
        self._known: dict[object, None] = {}

    def __contains__(self, one: object) -> bool:
        return one in self._known

    def add(self, one: object) -> None:
        """Remember that a message or a call has ended."""
        self._known[one] = None
        if len(self._known) > 2 * _MAX_REMEMBERED:
            self._known = dict.fromkeys(list(self._known)[-_MAX_REMEMBERED:])

    def forget(self, one: object) -> None:
        """Act as if the message or the call had not ended."""
        self._known.pop(one, None)


class ShownCalls:
    """The calls of a session that one client has been shown and that have not ended.

    The methods yield the updates that the client still needs, and note that the client has them: the caller must send
    each one. While a log is read, each call is shown as one update with its result.
    """

    def __init__(
        self,
        caps: ClientCapabilities,
        session_id: str,
        cwd: str,
        limits: ViewLimits,
        family: Family | None,
        *,
        is_reading: bool,
    ) -> None:
        self._caps = caps
        self._session_id = session_id
        self._cwd = cwd
        self.limits = limits
        self._family = family
        self.is_reading = is_reading
        """Whether the log is read. Then each call is shown as one update with its result."""
        self._open: dict[CallRef, _ShownCall] = {}
        self._over = Ended()

    def positions(self) -> dict[CallRef, int]:
        """Return the announced calls, each with the number of characters in its terminal."""
        return {call: opened.terminal_chars for call, opened in self._open.items() if opened.is_announced}

    def knows(self, call: CallRef | None) -> bool:
        """Whether the call was announced here and has not ended."""
        return call in self._open and self._open[call].is_announced

    def remember(self, entry: Entry, known: Mapping[CallRef, int]) -> None:
        """Update the calls for an entry that the client was shown before it connected again. `known` contains the calls
        that the client knows, each with the number of characters in its terminal."""
        match entry.body:
            case Assistant() as answer:
                self._open.clear()  # an answer ends all earlier calls
                for each in announcements(entry.id, answer):
                    opened = self._add(each)
                    opened.is_announced = each.call in known
                    opened.unread = known.get(each.call, 0)
            case User() | TurnEnd():
                self._open.clear()
            case Started(call=call, announcement=announcement) if call in self._open:
                self._open[call].status = "in_progress"
                self._open[call].announcement = announcement or self._open[call].announcement
            case ToolResult(call=call):
                self._open.pop(call, None)
                self._over.add(call)
            case _:
                pass

    def remember_others(self, known: Iterable[CallRef]) -> None:
        """Add the calls that the client knows but that are not in the log, because a subagent made them."""
        for call in known:
            if call not in self._open:
                self._open[call] = _ShownCall(call, "", None, Announcement(title=call.call_id), is_announced=True)

    def end_reading(self) -> None:
        """From now on, show calls in full, and show them as soon as they are announced."""
        self.is_reading, self.limits = False, ViewLimits()

    def announce(self, announced: CallAnnounced) -> Iterator[Update]:
        """Announce a call."""
        if announced.call in self._open or announced.call in self._over:
            return
        opened = self._add(announced)
        if not self.is_reading:
            yield from self._announcement(opened)

    def show(self) -> Iterator[Update]:
        """Announce the calls that the client does not know yet."""
        for opened in self._open.values():
            yield from self._announcement(opened)

    def start(self, call: CallRef, announcement: Announcement | None) -> Iterator[Update]:
        """Show that a call has started. `announcement` replaces the call's announcement, unless it is None."""
        opened = self._open.get(call)
        if opened is not None:
            yield from filter(None, [opened.started(announcement)])
        elif not self.is_reading and announcement is not None and call not in self._over:
            # Any other unknown call will be shown together with its result, or the client knows that it has ended.
            opened = self._open[call] = _ShownCall(call, "", None, announcement, is_announced=True)
            opened.status = "in_progress"
            yield new_update("tool_call", status="in_progress") | call_fields(call.call_id, announcement)

    def link(self, call_id: str, session_id: str) -> Iterator[Update]:
        """Link a running call to the session of the subagent that carries it out."""
        opened = next((each for each in self._open.values() if each.ref.call_id == call_id), None)
        if opened is not None and self._caps.subagents and opened.subagent != session_id:
            yield opened.linked(session_id)

    def progress(self, item: CallProgressed) -> Iterator[Update]:
        """Show the new part of a call's output."""
        if (opened := self._open.get(item.call)) is not None:
            yield from filter(None, [opened.progressed(item.text)])

    def finish(self, result: ToolResult) -> Iterator[Update]:
        """Show the result of a call."""
        if self.is_reading:  # show calls in call order, even if a later call ends first
            for call, earlier in self._open.items():
                if call == result.call:
                    break
                yield from self._announcement(earlier)
        opened = self._open.pop(result.call, None)
        self._over.add(result.call)
        if opened is None or not opened.is_announced:
            arguments = None if opened is None else opened.arguments
            yield from self._with_messages(self._whole(result, arguments), result.call, arguments, result)
            return
        yield opened.finished(result, self.limits.calls)
        answer = answer_of(result, opened.subagent, self._session_id) if opened.subagent else None
        yield from message_updates(answer, self._session_id) if answer is not None else ()
        yield from plan_updates(result.plan, by_id=self._caps.plans)

    def end(self, call: CallRef, text: str) -> Iterator[Update]:
        """End a call without a result. `text` says why it has none."""
        opened = self._open.pop(call, None)
        if opened is None:
            return
        self._over.add(call)
        update = opened.ended(text, self._ended_status, self.limits.calls)
        yield from (update,) if opened.is_announced else self._with_messages((update,), call, opened.arguments)

    def end_all(self) -> Iterator[Update]:
        """End all calls, because the conversation goes on without their results."""
        for call, opened in tuple(self._open.items()):
            yield from self.end(call, EFFECTS_UNKNOWN if opened.status == "in_progress" else NOT_RUN)

    def end_missed(self, call: CallRef, result: ToolResult | None) -> Iterator[Update]:
        """End a call that the client still shows as running. A subagent made the call, so the call is not in the
        session's own log."""
        self._open.pop(call, None)
        self._over.add(call)
        yield from (_call_update(call, self._ended_status),) if result is None else self._whole(result)

    def question_content(self, call: CallRef, content: list[Fields]) -> list[Fields]:
        """Return the content of a permission request for an announced call: first `content`, then the call's terminal,
        if the call has one. Clients show this content in place of the earlier content of the call."""
        opened = self._open.get(call)
        if opened is None:
            return content
        if opened.in_terminal is not None:
            content = [*content, _terminal_content(call)]
        opened.content = content
        return content

    @property
    def _ended_status(self) -> str:
        """The status of an ended call that has no result."""
        return "cancelled" if self._caps.cancelled_calls else "failed"

    def _add(self, announced: CallAnnounced) -> _ShownCall:
        opened = _ShownCall(announced.call, announced.name, announced.arguments, announced.announcement)
        if announced.announcement.kind == "execute" and self._caps.terminal_output:
            opened.in_terminal = ""
        self._open[announced.call] = opened
        return opened

    def _announcement(self, opened: _ShownCall) -> Iterator[Update]:
        """Announce a call in its present state, unless the client knows the call already."""
        if not opened.is_announced:
            update = opened.announced(self.limits.calls, self._cwd)
            yield from self._with_messages((update,), opened.ref, opened.arguments)

    def _whole(self, result: ToolResult, arguments: str | None = None) -> tuple[Update, ...]:
        update = _whole_call(result, arguments, self.limits.calls)
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
        if call in self._open:
            self._open[call].subagent, self._open[call].content = task, shown["content"]
        order = order_of(call, arguments, family.session_id, task)
        later = family.answers.get(call.call_id)
        answer = answer_of(result, task, family.session_id, later) if result is not None else None
        before, after = (
            message_updates(message, family.session_id) if message is not None else () for message in (order, answer)
        )
        return (*before, shown, *after, *rest)


def _whole_call(result: ToolResult, arguments: str | None, limits: CallLimits) -> Update:
    """Return an update with a call that the client does not know yet, and the call's result."""
    call_id, announcement = result.call.call_id, result.announcement
    fields = call_fields(call_id, announcement, name=result.name, arguments=arguments, limits=limits)
    content = tool_calls.result_contents(result, limits)
    status = "failed" if result.is_error else "completed"
    update = new_update("tool_call", status=status) | fields | {"content": content}
    # A client that shows no content shows the raw output instead.
    has_text = limits.repeats_output or not content
    return update | tool_calls.raw_output(result, with_text=has_text, limit=limits.raw_output)


def _call_update(call: CallRef, status: str) -> Update:
    """Return an update of a call that the client knows. Every update of a call has a status."""
    return new_update("tool_call_update", toolCallId=call.call_id, status=status)


def _terminal_content(call: CallRef) -> Fields:
    """Return the terminal of a call, as content of the call."""
    return {"type": "terminal", "terminalId": call.call_id}
