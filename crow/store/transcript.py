"""Renders a session as Markdown, for a file, a pipe or a terminal.

The caller passes one entry at a time, oldest first, so that even a long session takes little memory. A
:class:`Transcript` leaves out the system message and reminders, because a person who reads the session does not need
them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, assert_never

from crow.domain import entries
from crow.domain.diff import diff_text
from crow.domain.entries import Assistant, Entry, ToolResult
from crow.domain.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from crow.domain.rendering import interrupted_text, parts_text
from crow.domain.text import on_one_line
from crow.store import SessionRow, Share
from crow.store.codec import tags_of

_RESULT_LINES = 12
_RESULT_CHARS = 2_000


class Transcript:
    """Produces the Markdown of one session."""

    def __init__(self, *, is_full: bool) -> None:
        self._is_full = is_full
        """Whether the Markdown includes thoughts, diffs and complete tool results."""

    def head(self, row: SessionRow, shares: Sequence[Share] = ()) -> str:
        """Return the title and a list of facts about the session. The list names the principals in `shares`."""
        title, directory = on_one_line(row.title or "Untitled session"), on_one_line(row.cwd)
        created, changed = time_text(row.created_ms), time_text(row.updated_ms)
        facts = (
            f"- session: {on_one_line(row.id)}\n- directory: {directory}\n- created: {created}\n- changed: {changed}"
        )
        if tags := tags_of(row.metadata):
            facts += f"\n- tags: {on_one_line(', '.join(tags))}"
        if row.principal is not None:
            facts += f"\n- principal: {on_one_line(row.principal)}"
        if shares:
            facts += f"\n- shared with: {', '.join(f'{on_one_line(one.principal)} ({one.access})' for one in shares)}"
        return f"# {title}\n\n{facts}\n\n"

    def feed(self, entry: Entry) -> str:
        """Return the Markdown of one entry, or an empty string if a person does not need the entry."""
        body = entry.body
        match body:
            case entries.User(parts=parts):
                return _section(f"## You, {time_text(entry.created_ms)}", parts_text(parts))
            case entries.Assistant():
                return self._answer(body, entry.model)
            case entries.ToolResult():
                return self._result(body)
            case entries.Command(text=text, answer=answer):
                return _section(f"## You, {time_text(entry.created_ms)}", text) + _section("", answer)
            case entries.Remark(text=text):
                return _quoted(text)
            case entries.Custom(namespace=namespace, text=text, is_shown=is_shown):
                return _quoted(f"{on_one_line(namespace)}: {text}") if is_shown else ""
            case entries.Checkpoint(summary=summary):
                return _quoted(f"Compaction (summary): the model continues from this text.\n\n{summary}")
            case entries.Mask():
                return _quoted("Compaction (hidden outputs): from here on, the model does not see older tool results.")
            case entries.Restore(skill=name) if name:
                return _quoted(f"The skill {on_one_line(name)} was unloaded.")
            case entries.Restore():
                return _quoted("The last compaction was undone.")
            case entries.Skill(name=name):
                return _quoted(f"Skill: {on_one_line(name)}")
            case entries.TurnEnd(stop=stop, detail=detail):
                return "" if stop == "end_turn" else _quoted(f"The turn ended: {stop}. {detail}".strip())
            case entries.Prompt() | entries.Started() | entries.File() | entries.Reminder():
                return ""
            case entries.Note(about="label", value=label):
                return _quoted(label_words(body, on_one_line(label)))
            case entries.Note() | entries.ModelRequest():
                return ""
            case _ as never:
                assert_never(never)

    def _answer(self, body: Assistant, model: str) -> str:
        text = interrupted_text(body) if body.finish == "interrupted" else body.text
        thought = _quoted(body.thought) if self._is_full and body.thought else ""
        if not text.strip() and not thought:
            return ""
        return f"## {on_one_line(model) or 'The model'}\n\n{thought}{_section('', text)}"

    def _result(self, body: ToolResult) -> str:
        mark = "failed" if body.is_error else "done"
        line = (
            f"- **{on_one_line(body.announcement.title or body.name)}** ({mark}, {body.duration_ms / 1000:.1f} s)\n\n"
        )
        parts = [line]
        if self._is_full:
            parts += [fenced(diff_text(diff.old_text or "", diff.new_text), "diff") for diff in body.announcement.diffs]
        text = body.text if self._is_full else _bounded(body.text)
        return "".join([*parts, fenced(text) if text.strip() else ""])


def label_words(note: entries.Note, label: str) -> str:
    """Return a sentence about a label. `label` is the text of the label in the form in which it is shown."""
    if note.entry == 0:
        return f"The label {label} was removed."
    return f"Label: {label}" if note.entry is None else f"Entry {note.entry} got the label {label}."


def message_text(message: Message) -> str:
    """Return one message as Markdown, with all the text that the model gets."""
    match message:
        case SystemMessage(text=text):
            return _section("## system", fenced(text))
        case UserMessage(parts=parts):
            return _section("## user", parts_text(parts))
        case AssistantMessage(text=text, calls=calls, thought=thought):
            called = "".join(fenced(f"{call.id}: {call.name} {call.arguments}") for call in calls)
            return _section("## assistant", (_quoted(thought) if thought else "") + text) + called
        case ToolMessage(call_id=call_id, text=text):
            return _section(f"## tool {on_one_line(call_id)}", fenced(text))
        case _ as never:
            assert_never(never)


def time_text(unix_ms: int, precision: Literal["minutes", "seconds"] = "minutes") -> str:
    """Return a time in local time with its UTC offset, such as `2026-11-01 09:30+01:00`."""
    return local_time(unix_ms).isoformat(sep=" ", timespec=precision)


def local_time(unix_ms: int) -> datetime:
    """Return a time in local time. If the local time is already in the year 10000, return the time one day earlier,
    because Python has no such year. An imported session can have such a time."""
    moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    try:
        return moment.astimezone()
    except (ValueError, OverflowError):
        return (moment - timedelta(days=1)).astimezone()


def _section(head: str, text: str) -> str:
    return (f"{head}\n\n" if head else "") + (f"{_trimmed(text)}\n\n" if text.strip() else "")


def _trimmed(text: str) -> str:
    """Return the text without blank lines at its beginning and end. The first line stays indented: it may be code."""
    return re.sub(r"\A(?:[ \t]*\r?\n)++", "", text).rstrip()


def _quoted(text: str) -> str:
    return "".join(f"> {line}".rstrip() + "\n" for line in text.strip().splitlines()) + "\n"


def fenced(text: str, language: str = "") -> str:
    """Return `text` in a fenced code block. The fence is longer than every run of backticks in `text`."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n\n"


def _bounded(text: str) -> str:
    """Return the first lines of the text. If characters are left out, add the number of these characters."""
    text = text.rstrip()
    head = "".join(text[:_RESULT_CHARS].splitlines(keepends=True)[:_RESULT_LINES])
    rest = len(text) - len(head)
    return head if not rest else f"{head.rstrip()}\n... {rest:,} more {'character' if rest == 1 else 'characters'}"
