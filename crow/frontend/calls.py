"""The calls that a client is shown: their state, the updates that change it, and how much a load shows of them. Does
no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from crow.domain.entries import Announcement, CallRef, ToolResult
from crow.frontend.subagents import link
from crow.protocol import tool_calls
from crow.protocol.tool_calls import CallLimits, Fields, call_fields, diff_contents, shown_text, text_content
from crow.protocol.updates import (
    PROGRESS_CHARS,
    TERMINAL_CHARS,
    Update,
    new_update,
    terminal_end,
    terminal_exit,
    terminal_output,
)

REPLAY_RESULTS_BYTES = 4_600_000
"""A replay sends about this many bytes of tool results in total."""

REPLAY_RESULT_BYTES = 400
"""A replay sends at least this many bytes of each tool result, however long the history is."""

_REPLAY_ANSWER_BYTES = 10_000_000


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
class ShownCall:
    """What one client has been shown of a call that has not ended."""

    ref: CallRef
    """Which call it is."""
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
    """The number of characters that the terminal had before the client came back. The text of these characters becomes
    known with the next output."""
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
            self.content = [terminal_content(self.ref)]
        if self.content:
            fields["content"] = self.content
        return new_update("tool_call", status=self.status) | fields

    def started(self, announcement: Announcement | None) -> Update | None:
        """Return an update that says that the call has started, unless the client knows that. `announcement` replaces
        the announcement, unless it is None."""
        was_pending, self.status = self.status == "pending", "in_progress"
        if not self.is_announced:
            self.announcement = announcement or self.announcement
        if not (self.is_announced and was_pending):
            return None
        changed = self._changed_fields(announcement) if announcement is not None else {}
        if self.in_terminal is not None and self.content != [terminal_content(self.ref)]:
            # Remove the content of the permission request, which has been answered.
            self.content = changed["content"] = [terminal_content(self.ref)]
        return call_update(self.ref, "in_progress") | changed

    def linked(self, session_id: str) -> Update:
        """Return an update that links the call to the session of the subagent that carries it out."""
        self.subagent, self.content = session_id, [link(session_id)]
        return call_update(self.ref, self.status) | {"content": self.content}

    def progressed(self, text: str) -> Update | None:
        """Return an update with the new part of the output, or None if there is none. `text` is the whole output."""
        update = call_update(self.ref, "in_progress")
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
        update = call_update(self.ref, "failed" if result.is_error else "completed")
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
        update = call_update(self.ref, status)
        if self.subagent:
            content = [link(self.subagent), *content]
        if self.in_terminal is not None:
            content = [terminal_content(self.ref), *content]
            update["_meta"] = {"terminal_exit": terminal_exit(self.ref, None)}
        return update | {"content": content}

    def _changed_fields(self, announcement: Announcement) -> Fields:
        """Return the fields title, kind and locations. Leave out those that have not changed since they were last
        sent to the client."""
        known = call_fields(self.ref.call_id, self.announcement)
        self.announcement = announcement
        new = call_fields(self.ref.call_id, announcement)
        return {key: value for key, value in new.items() if known[key] != value}


def whole_call(result: ToolResult, arguments: str | None, limits: CallLimits) -> Update:
    """Return an update with a call that the client does not know yet, and the call's result."""
    call_id, announcement = result.call.call_id, result.announcement
    fields = call_fields(call_id, announcement, name=result.name, arguments=arguments, limits=limits)
    content = tool_calls.result_contents(result, limits)
    status = "failed" if result.is_error else "completed"
    update = new_update("tool_call", status=status) | fields | {"content": content}
    # A client that shows no content shows the raw output instead.
    has_text = limits.repeats_output or not content
    return update | tool_calls.raw_output(result, with_text=has_text, limit=limits.raw_output)


def call_update(call: CallRef, status: str) -> Update:
    """Return an update of a call that the client knows. Every update of a call has a status."""
    return new_update("tool_call_update", toolCallId=call.call_id, status=status)


def terminal_content(call: CallRef) -> Fields:
    """Return the terminal of a call, as content of the call."""
    return {"type": "terminal", "terminalId": call.call_id}
