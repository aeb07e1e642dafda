"""A running session towards one client: events as `session/update` payloads.

Strategy: what is open (announced calls, the message that streams) is remembered, so that each update says only what is
new and a client that loads the session meanwhile can be told what goes on; every tool update carries a status. Kinds
that a client must have asked for are sent to those alone and said otherwise to the rest. Sends nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, assert_never

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
    PlanItem,
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
from crow.frontend.content import blocks
from crow.frontend.params import ClientCapabilities
from crow.frontend.tool_calls import (
    OUTPUT_BYTES,
    Fields,
    announcement_of,
    bounded,
    call_fields,
    console_block,
    diff_contents,
    head_and_tail,
    output_text,
    pieces,
    raw_output,
    result_contents,
    text_content,
)

__all__ = [
    "LiveUpdates",
    "ReplayUpdates",
    "Update",
    "agent_text",
    "agent_thought",
    "aside",
    "chunk",
    "compaction",
    "mask_id",
    "plan",
    "summary_chunks",
    "tool_call",
    "usage",
]

TERMINAL_CHARS = 50_000
"""Output shown in a client's terminal while a command runs; of what comes after, the end is shown when it is over."""

PROGRESS_CHARS = 8_000
"""Output shown of a running command where there is no such terminal: its end."""


@dataclass(slots=True)
class _OpenCall:
    """An announced call. `in_terminal`: what of its output the client's terminal has; None without a terminal.
    `content`: what the client shows of it."""

    announcement: Announcement
    name: str = ""
    arguments: str | None = None
    in_terminal: str | None = None
    content: list[Fields] = field(default_factory=list)
    has_started: bool = False


@dataclass(slots=True)
class _Streamed:
    """The message that streams now, as far as it was shown."""

    message_id: str
    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)


class LiveUpdates:
    """A running session towards one client. `cwd` is told to terminals; `new_id` names messages that are not stored."""

    def __init__(
        self, caps: ClientCapabilities, *, cwd: str = "", new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        self._caps = caps
        self._cwd = cwd
        self._new_id = new_id
        self._open: dict[CallRef, _OpenCall] = {}
        self._streamed: _Streamed | None = None

    def updates(self, event: Event) -> tuple[Update, ...]:
        """What `event` shows, in order. Lists of options and commands are the sender's to add."""
        match event:
            case EntryStored(entry=entry):
                return self._stored(entry)
            case TextShown(message_id=message_id, text=text):
                self._streams(message_id).text.append(text)
                return agent_text(message_id, text)
            case ThoughtShown(message_id=message_id, text=text):
                self._streams(message_id).thought.append(text)
                return agent_thought(message_id, text)
            case CallAnnounced():
                return (self._announced(event),)
            case CallProgressed():
                return self._progressed(event)
            case CallEnded():
                return self._ended(event)
            case ContextMeasured():
                return (usage(event),)
            case CompactionChanged():
                return self._compaction(event)
            case SummaryShown(compaction_id=compaction_id, text=text):
                return summary_chunks(compaction_id, text) if self._caps.compaction else ()
            case NoticeShown():
                return self._notice(event)
            case PlanChanged(plan=items):
                return plan(items)
            case TitleChanged(title=title):
                return ({"sessionUpdate": "session_info_update", "title": title},)
            case ModeChanged(mode=mode):
                return ({"sessionUpdate": "current_mode_update", "currentModeId": mode},)
            case OptionsChanged() | CommandsChanged():
                return ()
            case _:
                assert_never(event)

    def again(self, *, ended: Collection[CallRef], message_id: str) -> tuple[Update, ...]:
        """What goes on, for a client that was just told the history: the message that streams, and the open calls.

        Without the calls that `ended`, and the message if it is in the history under this id already.
        """
        for call in ended:
            self._open.pop(call, None)
        streamed = self._streamed
        updates: list[Update] = []
        if streamed is not None and streamed.message_id != message_id:
            updates += agent_thought(streamed.message_id, "".join(streamed.thought))
            updates += agent_text(streamed.message_id, "".join(streamed.text))
        for call, opened in self._open.items():
            updates += self._opening(call, opened)
        return tuple(updates)

    def _streams(self, message_id: str) -> _Streamed:
        if self._streamed is None or self._streamed.message_id != message_id:
            self._streamed = _Streamed(message_id)
        return self._streamed

    def _stored(self, entry: Entry) -> tuple[Update, ...]:
        if isinstance(entry.body, Assistant):
            self._streamed = None
        match entry.body:
            case Started(call=call, announcement=announcement):
                return self._started(call, announcement)
            case ToolResult() as result:
                return self._finished(result)
            case Remark(text=text, message_id=message_id):
                return aside(message_id, text)
            case Command(answer=answer, message_id=message_id):
                return agent_text(message_id, answer)
            case Checkpoint() as checkpoint:
                if self._caps.compaction or checkpoint.reason == "command":
                    return ()  # CompactionChanged tells it, or the command's answer
                words = f"(Context compacted: {_tokens(checkpoint)}.)"
                return aside(checkpoint.compaction_id, words)
            case Mask() as mask:
                if self._caps.compaction:
                    return (compaction(mask_id(entry)),)
                return aside(mask_id(entry), f"(Older tool outputs put aside: {_tokens(mask)}.)")
            # The client has its user's words already, and the answer's text came as it streamed.
            case User() | Assistant() | Prompt() | File() | Restore() | Skill() | Reminder() | Note() | TurnEnd():
                return ()
            case _:
                assert_never(entry.body)

    def _announced(self, event: CallAnnounced) -> Update:
        opened = self._open[event.call] = _OpenCall(event.announcement, event.name, event.arguments)
        if event.announcement.kind == "execute" and self._caps.terminal_output:
            opened.in_terminal = ""
        return self._opening(event.call, opened)[0]

    def _opening(self, call: CallRef, opened: _OpenCall) -> tuple[Update, ...]:
        """The call as it stands, towards a client that does not know it."""
        announcement = opened.announcement
        fields = call_fields(call.call_id, announcement, name=opened.name, arguments=opened.arguments)
        content = diff_contents(announcement.diffs)
        if opened.in_terminal is not None:
            terminal = {"terminal_id": call.call_id}
            fields["_meta"] = fields.get("_meta", {}) | {
                "terminal_info": terminal | ({"cwd": self._cwd} if self._cwd else {})
            }
            content = [_terminal(call)]
        if content:
            fields["content"] = content
        opened.content = content
        status = "in_progress" if opened.has_started else "pending"
        update = tool_call(status) | fields
        if not opened.in_terminal:
            return (update,)
        output = {"_meta": {"terminal_output": _output(call, opened.in_terminal)}}
        return update, _call_update(call, status) | output

    def _started(self, call: CallRef, announcement: Announcement | None) -> tuple[Update, ...]:
        opened = self._open.get(call)
        if opened is None and announcement is None:  # it was told as over already
            return ()
        if opened is None:
            assert announcement is not None
            self._open[call] = _OpenCall(announcement, has_started=True)
            fields = call_fields(call.call_id, announcement)
            return (tool_call("in_progress") | fields,)
        opened.has_started = True
        changed = self._changed(call, announcement) if announcement is not None else {}
        return (_call_update(call, "in_progress") | changed,)

    def _progressed(self, event: CallProgressed) -> tuple[Update, ...]:
        opened = self._open.get(event.call)
        if opened is None:
            return ()
        update = _call_update(event.call, "in_progress")
        if opened.in_terminal is None:
            opened.content = [text_content(console_block(event.text[-PROGRESS_CHARS:]))]
            return (update | {"content": opened.content},)
        shown = opened.in_terminal
        if not event.text.startswith(shown) or len(shown) >= TERMINAL_CHARS:
            return ()
        opened.in_terminal = event.text[:TERMINAL_CHARS]
        added = opened.in_terminal[len(shown) :]
        return (update | {"_meta": {"terminal_output": _output(event.call, added)}},) if added else ()

    def _finished(self, result: ToolResult) -> tuple[Update, ...]:
        status = "failed" if result.is_error else "completed"
        opened = self._open.get(result.call)
        shown_in_terminal = opened is not None and opened.in_terminal is not None
        if opened is None:
            fields = call_fields(result.call.call_id, result.announcement, name=result.name)
            update = tool_call(status) | fields
        else:
            update = _call_update(result.call, status) | self._changed(result.call, result.announcement)
        if opened is not None and opened.in_terminal is not None:
            update["_meta"] = _rest_of_terminal(result, opened.in_terminal)
        else:
            content = result_contents(result)
            if opened is None or opened.content != content:  # some clients show again what is sent again
                update["content"] = content
        output = raw_output(result, with_text=not shown_in_terminal)
        if output is not None:
            update["rawOutput"] = output
        self._open.pop(result.call, None)
        return (update, *plan(result.plan))

    def _ended(self, event: CallEnded) -> tuple[Update, ...]:
        opened = self._open.pop(event.call, None)
        if opened is None:
            return ()
        update = _call_update(event.call, "failed")
        content = [text_content(head_and_tail(event.text))] if event.text else []
        if opened.in_terminal is not None:
            content = [_terminal(event.call), *content]
            update["_meta"] = {"terminal_exit": _exit(event.call, None)}
        return (update | {"content": content},)

    def _changed(self, call: CallRef, announcement: Announcement) -> Update:
        """Title, kind and locations where they are no longer what the client knows."""
        opened = self._open[call]
        known = call_fields(call.call_id, opened.announcement)
        opened.announcement = announcement
        return {key: value for key, value in call_fields(call.call_id, announcement).items() if known[key] != value}

    def _compaction(self, event: CompactionChanged) -> tuple[Update, ...]:
        if self._caps.compaction:
            return (compaction(event.compaction_id, event.status, event.detail),)
        if event.status == "failed" and event.detail:
            return aside(self._new_id(), f"({event.detail})")
        return ()

    def _notice(self, event: NoticeShown) -> tuple[Update, ...]:
        title = event.title or event.description
        if not title:
            return ()
        if self._caps.notices:
            update: Update = {"sessionUpdate": "notice", "severity": event.severity, "title": head_and_tail(title)}
            return (update | ({"description": head_and_tail(event.description)} if event.description else {}),)
        if event.severity == "info":
            return ()
        words = f"{title} {event.description}" if event.description and event.description != title else title
        return aside(self._new_id(), f"({words})")


def _call_update(call: CallRef, status: str) -> Update:
    return {"sessionUpdate": "tool_call_update", "toolCallId": call.call_id, "status": status}


def _terminal(call: CallRef) -> dict[str, Any]:
    return {"type": "terminal", "terminalId": call.call_id}


def _output(call: CallRef, text: str) -> dict[str, Any]:
    return {"terminal_id": call.call_id, "data": text}


def _exit(call: CallRef, code: object) -> dict[str, Any]:
    exited = isinstance(code, int) and code >= 0
    signal = f"signal {-code}" if isinstance(code, int) and code < 0 else None
    return {"terminal_id": call.call_id, "exit_code": code if exited else None, "signal": signal}


def _rest_of_terminal(result: ToolResult, shown: str) -> dict[str, Any]:
    whole = output_text(result)
    rest = whole[len(shown) :] if whole.startswith(shown) else f"\n{whole}"
    meta: dict[str, Any] = {"terminal_exit": _exit(result.call, result.raw_output.get("exit_code"))}
    if rest.strip():
        meta["terminal_output"] = _output(result.call, head_and_tail(rest))
    return meta


def _tokens(body: Checkpoint | Mask) -> str:
    return f"{_short(body.tokens_before)} → {_short(body.tokens_after)} tokens"


def _short(tokens: int) -> str:
    return f"{round(tokens / 1000)}k" if tokens >= 10_000 else str(tokens)


# FROM frontend.updates: `session/update` payloads: how each kind is built, for what happens now and for what is told
# again.
#
# Strategy: plain dicts, built once, ready to send; texts come in as many pieces as the bound of a line asks for.
# Knows
# neither what a client has seen nor what it asked for. Sends nothing.


Update: TypeAlias = dict[str, Any]


def aside(message_id: str, words: str) -> tuple[Update, ...]:
    """Crow's own words among the answers: a paragraph of their own also where the client joins all chunks."""
    return agent_text(message_id, f"{words}\n\n")


def agent_text(message_id: str, text: str) -> tuple[Update, ...]:
    """Text of the agent, in as many chunks as the line bound asks for."""
    return tuple(chunk("agent", message_id, {"type": "text", "text": piece}) for piece in pieces(text))


def agent_thought(message_id: str, text: str) -> tuple[Update, ...]:
    """A thought; its message is another than the answer's, as clients join what bears one id."""
    return tuple(
        {
            "sessionUpdate": "agent_thought_chunk",
            "content": {"type": "text", "text": piece},
            "messageId": f"{message_id}_thought",
        }
        for piece in pieces(text)
    )


def plan(items: Sequence[PlanItem] | None) -> tuple[Update, ...]:
    """The complete plan; nothing for None."""
    if items is None:
        return ()
    entries = [{"content": item.content, "priority": item.priority, "status": item.status} for item in items]
    return ({"sessionUpdate": "plan", "entries": bounded(entries, OUTPUT_BYTES)},)


def usage(event: ContextMeasured) -> Update:
    """How full the context is."""
    update: Update = {"sessionUpdate": "usage_update", "used": max(0, event.used), "size": max(0, event.size)}
    return update if event.cost is None else update | {"cost": {"amount": event.cost, "currency": "USD"}}


def compaction(compaction_id: str, status: str = "completed", detail: str = "") -> Update:
    """A compaction's state; `detail` is its summary, or why it failed. Only for clients that asked for it."""
    update: Update = {"sessionUpdate": "compaction_update", "compactionId": compaction_id, "status": status}
    if detail and status == "completed":
        update["summary"] = [{"type": "text", "text": piece} for piece in pieces(head_and_tail(detail))]
    elif detail and status == "failed":
        update["error"] = head_and_tail(detail)
    return update


def summary_chunks(compaction_id: str, text: str) -> tuple[Update, ...]:
    """Pieces of a summary as it is written; an empty one takes back what was shown. Only for clients that asked."""
    if not text:
        return (
            {
                "sessionUpdate": "compaction_update",
                "compactionId": compaction_id,
                "status": "in_progress",
                "summary": [],
            },
        )
    shown = {"sessionUpdate": "compaction_summary_chunk", "compactionId": compaction_id}
    return tuple(shown | {"content": {"type": "text", "text": piece}} for piece in pieces(text))


def chunk(who: Literal["user", "agent"], message_id: str, block: dict[str, Any]) -> Update:
    """One content block of a message."""
    return {"sessionUpdate": f"{who}_message_chunk", "content": block, "messageId": message_id}


def tool_call(status: str) -> Update:
    """The beginning of a call that the client does not know yet; its fields are to be added."""
    return {"sessionUpdate": "tool_call", "status": status}


def mask_id(entry: Entry) -> str:
    """The id under which a mask is shown as a compaction."""
    return f"mask_{entry.id}"


# FROM frontend.replayed: A stored history as `session/update` payloads.
#
# Strategy: the events of :class:`crow.domain.replay.Replay` become the same updates as live ones, but each call only
# one,
# with its final status, and nothing that was passing. Sends nothing.


class ReplayUpdates:
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
