"""`read_file` and `write_file`, and functions shared by all tools that change files.

Until the user has allowed a call, the call's plan must not tell the model anything about a file outside the workspace
except the file's name.
"""

from __future__ import annotations

import base64
import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import anyio.to_thread

from crow.domain.entries import Attachment, Diff
from crow.domain.errors import ArgumentError
from crow.domain.messages import PDF_BYTES, PDF_START, PDF_TYPE, Image
from crow.domain.rendering import RESULT_MASK, in_title
from crow.domain.text import plural
from crow.tools import FileStat, Outcome, PlannedCall, Protection, Workspace
from crow.tools.builtin.media import IMAGE_BYTES, image_type
from crow.tools.builtin.mismatch import excerpt, name_lines, placeholder_in
from crow.tools.builtin.seen_files import SeenFiles, line_count
from crow.tools.builtin.syntax import find_syntax_error
from crow.tools.builtin.text_file import WIDE_ENCODINGS, TextFile, read_text_file
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    PathTarget,
    ToolContext,
    ToolInvocation,
    argument,
    describe_error,
    display_name,
    tool_spec,
)

PATH = argument("string", minLength=1)
"""A path, absolute or relative to the working directory."""

WHOLE_BYTES = 32_000_000
"""A file with more bytes than this is read in pieces, and the tools do not change it."""

A_FILE = "a file; use list_files for directories"
PIECE_BYTES = 4_000_000
_THREAD_BYTES = 262_144
"""At most this many bytes of a text are split into lines in the event loop. The rest is split in a thread."""

_WINDOW_LINES = 2_000
_WINDOW_CHARS = 47_000
"""A result of more than 48,000 characters would be shortened for the model."""
_LINE_CHARS = 2_000
_ROW_BYTES = 4 * _LINE_CHARS
_SNIFFED_CHARS = 8_192
_SNIFFED_BYTES = 16
_UNREAD_LINES = 60
"""`write_file` refuses to replace a longer file that the model has not read whole."""
_NAMED_GAPS = 3

_PROTECTIONS: tuple[Protection, ...] = get_args(Protection)
_KINDS = {"file": "file", "directory": "directory", "other": "device, pipe or socket"}
_PLACE = re.compile(r"@?(?P<path>[^@].*?)(?::(?P<first>\d{1,9})(?:[-:](?P<last>\d{1,9}))?)?")
"""Matches a path with a line or lines, as other programs print it (`a.py:20`), and a path with `@` in front, as people
mention files in a prompt."""

_SKIPPED = frozenset({"node_modules", "venv", "__pycache__", "target", "build", "dist"})
_MAX_DIRECTORIES = 2_000
_MAX_SAME_NAMES = 3
_MAX_NAMES = 10_000
_MAX_COMPARED_NAMES = 500
_COMPARED_CHARS = 60


async def _with_plain_path(context: ToolContext, args: Arguments) -> Arguments:
    """Return the arguments of `read_file` with a plain path: `@path`, `path:20` and `path:20-40` become `path`, and the
    lines become `line` and `limit`. If there is a file with exactly the given name, return the arguments unchanged."""
    found = _PLACE.fullmatch(args["path"])
    if found is None or (await context.workspace.stat(context.target(args["path"]).path)).kind != "missing":
        return args
    plain = {**args, "path": found["path"]}
    if found["first"] and "line" not in args:
        first, last = int(found["first"]), int(found["last"] or 0)
        plain |= {"line": max(1, first)}
        if last >= first and "limit" not in args:
            plain |= {"limit": last - max(1, first) + 1}
    return plain


async def _plan_read(context: ToolContext, args: Arguments) -> PlannedCall:
    args = await _with_plain_path(context, args)
    target = context.target(args["path"])
    line, limit = args.get("line"), args.get("limit")
    lines = f" from line {line}" if line is not None else ""
    if limit is not None:
        lines = f" lines {line or 1}-{(line or 1) + limit - 1}"
    return target.plan(f"Read {in_title(target.name)}{lines}", "read", "read", line=line)


async def _run_read(invocation: ToolInvocation, args: Arguments) -> Outcome:
    args = await _with_plain_path(invocation.context, args)
    workspace, target = invocation.context.workspace, invocation.target(args["path"])
    stat = await stat_kind(workspace, target, ("file",), A_FILE, head=_SNIFFED_BYTES)
    media = image_type(stat.head)
    if media is not None:
        return await _read_image(workspace, target, stat, media)
    if stat.head.startswith(PDF_START):
        return await _read_pdf(workspace, target, stat)
    file, text, note, may_have_strays = None, None, "", True
    if stat.size > WHOLE_BYTES:
        start = (await workspace.read_bytes(target.path, _SNIFFED_CHARS)).decode("utf-8", "replace")
        is_binary = "\0" in start or start.count("�") * 10 > len(start)
    else:
        file = await read_text_file(workspace, target.path)
        is_binary = file is None
        if file is not None:
            text, may_have_strays = file.shown, file.shown != file.text
            note = "" if file.encoding == "utf-8" else f"\n[the file is {file.encoding}; the tools keep this encoding]"
    if is_binary:
        raise ArgumentError(f"{target.name} is binary ({stat.size:,} bytes); only text, images and PDFs can be read")
    window = LineWindow(first=args.get("line", 1), limit=args.get("limit"))
    if text is not None:
        data = text.encode("utf-8", "replace")
        if window.feed(data[:_THREAD_BYTES]) and len(data) > _THREAD_BYTES:
            await anyio.to_thread.run_sync(window.feed, data[_THREAD_BYTES:])
        size = f"{text.count(chr(10)) + (not text.endswith(chr(10))):,}"
    else:
        at, size = 0, f"a file of {stat.size:,} bytes"
        while piece := await workspace.read_bytes(target.path, PIECE_BYTES, at):
            at += len(piece)
            if not await anyio.to_thread.run_sync(window.feed, piece):
                break
    shown, whole_lines = _format_window(window, target.name, size, may_have_strays=may_have_strays)
    if file is not None:
        invocation.context.seen_files.note_read(target.path, file.text, whole_lines, invocation.call_id)
    return Outcome(text=shown + note)


async def _read_image(workspace: Workspace, target: PathTarget, stat: FileStat, media: str) -> Outcome:
    if stat.size > IMAGE_BYTES:
        raise ArgumentError(
            f"{target.name} is an image of {stat.size:,} bytes; at most {IMAGE_BYTES:,} bytes can be shown"
        )
    data = base64.b64encode(await workspace.read_bytes(target.path)).decode("ascii")
    text = f"{target.name} is an image ({media}, {stat.size:,} bytes)."
    return Outcome(text=text, images=(Image(data=data, mime_type=media),))


async def _read_pdf(workspace: Workspace, target: PathTarget, stat: FileStat) -> Outcome:
    if stat.size > PDF_BYTES:
        raise ArgumentError(
            f"{target.name} is a PDF of {stat.size:,} bytes; at most {PDF_BYTES:,} bytes can be read. A program such "
            "as pdftotext may give its text"
        )
    data = base64.b64encode(await workspace.read_bytes(target.path)).decode("ascii")
    file = Attachment(name=target.name, mime_type=PDF_TYPE, data=data, for_model=True)
    return Outcome(text=f"{target.name} is a PDF ({stat.size:,} bytes).", attachments=(file,))


def _format_window(window: LineWindow, name: str, size: str, *, may_have_strays: bool) -> tuple[str, Sequence[range]]:
    """Return the text to show for the window, and the ranges of lines that it shows whole (counted from 0). Unless the
    window is the whole file, the first line of the text says which lines are shown. If more lines follow that did not
    fit, a line at the end says how to continue. `size` is the number of lines in the file, or a text that says how
    large the file is. `may_have_strays` is False if the file is known to have no bytes that cannot be decoded.

    :raises ~crow.domain.errors.ArgumentError: the file ends before the first line of the window.
    """
    if not window.line_count:
        return f"({name} is empty)", ()
    if not window.rows:
        raise ArgumentError(f"line is {window.first}; {name} has only {plural(window.line_count, 'line')}")
    rows: list[str] = []
    whole: list[range] = []
    chars = 0
    for number, row in enumerate(window.rows, window.first):
        text = row.text().removeprefix(chr(0xFEFF) if number == 1 else "")
        chars += len(text) + 1
        if chars > _WINDOW_CHARS and rows:
            break
        rows.append(text)
        if not row.is_cut:
            start = whole.pop().start if whole and whole[-1].stop == number - 1 else number - 1
            whole.append(range(start, number))
    last = window.first + len(rows) - 1
    is_cut = len(rows) < len(window.rows) or (window.has_more and not window.is_limit_asked)
    has_undecodable = may_have_strays and any("�" in row for row in rows)
    if window.first > 1 or window.has_more or is_cut or not any(rows):
        rows.insert(0, f"[lines {window.first}-{last} of {size}]")
    if is_cut:
        rows.append(f"[continue with line={last + 1}]")
    if has_undecodable:
        rows.append("[bytes that are not UTF-8 are shown as �]")
    return "\n".join(rows), whole


@dataclass(slots=True)
class _Row:
    """The beginning of a line, and the number of bytes that were dropped after it."""

    start: bytes = b""
    dropped: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether the line is too long to be shown whole."""
        return self.dropped > 0 or len(self._decoded()) > _LINE_CHARS

    def _decoded(self) -> str:
        return self.start.decode("utf-8", "replace").removesuffix("\r")

    def text(self) -> str:
        """Return the line without its line end. A long line is cut, with a note that says so."""
        text = self._decoded()
        if not self.is_cut:
            return text
        dropped = self.dropped + len(text[_LINE_CHARS:].encode())
        return f"{text[:_LINE_CHARS]}[... {dropped:,} more bytes in this line]"


class LineWindow:
    """Collects lines of a file, beginning with line `first` (counted from 1): at most `limit`, or at most
    `_WINDOW_LINES` if `limit` is None. Pass the file to `feed` in pieces. Only a limited part of the file is kept in
    memory.

    `has_more` tells whether more lines follow those in `rows`.
    """

    def __init__(self, *, first: int, limit: int | None = None) -> None:
        self.first = first
        self.is_limit_asked = limit is not None
        self.rows: list[_Row] = []
        self.has_more = False
        self._limit = _WINDOW_LINES if limit is None else limit
        self._room = 4 * _WINDOW_CHARS
        self._skipped = 0
        self._is_line_open = False

    @property
    def line_count(self) -> int:
        """How many lines have been fed so far."""
        return self._skipped + (len(self.rows) or self._is_line_open)

    def feed(self, piece: bytes) -> bool:
        """Take the next piece of the file. Return whether another piece is needed."""
        missing = self.first - 1 - self._skipped
        newlines = piece.count(b"\n") if missing else 0
        if newlines < missing:
            self._skipped += newlines
            self._is_line_open = piece[-1:] not in (b"", b"\n")
            return True
        if missing:
            piece = piece.split(b"\n", missing)[-1]
            self._skipped, self._is_line_open = self.first - 1, False
        at = 0
        while at < len(piece):
            if not self._is_line_open:
                if len(self.rows) == self._limit or self._room <= 0:
                    self.has_more = True
                    return False
                self.rows.append(_Row())
            newline = piece.find(b"\n", at)
            self._is_line_open = newline < 0
            end = len(piece) if self._is_line_open else newline
            row = self.rows[-1]
            fitting = piece[at : min(end, at + _ROW_BYTES - len(row.start))]
            row.start += fitting
            row.dropped += end - at - len(fitting)
            self._room -= len(fitting) + 1
            at = end + 1
        return True


async def _plan_write(context: ToolContext, args: Arguments) -> PlannedCall:
    target = context.target(args["path"])
    diff, content = None, args["content"]
    try:
        before, fault = await _read_replaced(context, target, content)
        shown = None if before is None else before.shown
        check_mask("content", content, shown or "")
        diff = Diff(path=target.client_path, old_text=shown, new_text=_in_form_of(before, content))
    except (ArgumentError, OSError) as error:
        fault = describe_error(error)
    return await plan_change(context, target, f"Write {in_title(target.name)}", diff=diff, fault=fault)


async def _run_write(invocation: ToolInvocation, args: Arguments) -> Outcome:
    target, content = invocation.target(args["path"]), str(args["content"])
    context = invocation.context
    before, fault = await _read_replaced(context, target, content, reader=invocation.call_id)
    if fault is not None:
        raise ArgumentError(fault)
    check_mask("content", content, "" if before is None else before.shown)
    lines = content.count("\n") + (not content.endswith("\n") and content != "")
    verb = "Created" if before is None else "Replaced"
    after = _in_form_of(before, content)
    size = len((before or TextFile(text="")).encode(after, "content"))
    done = f"{verb} {target.name}: {plural(lines, 'line')}, {plural(size, 'byte')}."
    if after.count("\r") > content.count("\r"):
        done += " Its line ends are still CRLF."
    if before is not None and before.text.strip():
        unread = context.seen_files.unread_lines(target.path, before.text, reader=invocation.call_id)
        if unread:
            what = "this file" if len(unread[0]) == line_count(before.text) else "all of this file"
            old = excerpt(before.shown.split("\n"), 0, _UNREAD_LINES)
            done += f" You had not read {what}. It contained:\n{old}\n"
    change = Change(before=before, after=after, is_whole=True, title=f"Write {in_title(target.name)}", done=done)
    return await apply_change(invocation, target, change)


def _in_form_of(before: TextFile | None, content: str) -> str:
    """Return `content` with the byte order mark and the CRLF line ends of the file that it replaces. The model sees
    neither when it reads a file. Content with a carriage return of its own keeps its line ends.

    :raises ~crow.domain.errors.ArgumentError: `content` has a � that stands for bytes of the file that are not UTF-8.
    """
    if before is None or not content:
        return content
    if before.shown != before.text and content.count("�") > before.text.count("�"):
        raise ArgumentError(
            "content contains �, which stands for bytes of the file that are not UTF-8; writing it would destroy them. "
            "Use edit_file to change other lines only"
        )
    ends = before.text.count("\n")
    if "\r" not in content and ends and before.text.count("\r\n") == ends:
        content = content.replace("\n", "\r\n")
    mark = "\ufeff" if before.text.startswith("\ufeff") and not content.startswith("\ufeff") else ""
    return f"{mark}{content}"


def check_mask(argument: str, new: str, old: str) -> None:
    """Check that `new` does not contain the mask more often than `old`. The mask is the text shown in place of a
    secret.

    :raises ~crow.domain.errors.ArgumentError: `new` contains the mask more often; the message names `argument`.
    """
    if new.count(RESULT_MASK) > old.count(RESULT_MASK):
        raise ArgumentError(
            f"{argument} contains {RESULT_MASK}, which stands for a secret that you cannot see; "
            "writing this mask would destroy the secret. Use edit_file to change other lines only"
        )


async def _read_replaced(
    context: ToolContext, target: PathTarget, content: str, *, reader: str = ""
) -> tuple[TextFile | None, str | None]:
    """Return the file that a write of `content` would replace, and the reason why it cannot be replaced. The file is
    None if there is none yet, if it is too large, or if the path is not that of a file. The reason is None if the write
    is fine. `reader` is the id of the call that writes; see `SeenFiles.unread_lines`."""
    seen, name = context.seen_files, target.name
    stat = await context.workspace.stat(target.path)
    match stat.kind:
        case "missing":
            return None, None
        case "file" if stat.size <= WHOLE_BYTES:
            pass
        case "file":
            return None, f"{name} has {stat.size:,} bytes, too many to keep for undo; use shell"
        case _:
            return None, f"{name} is a {_KINDS[stat.kind]}; expected the path of a file"
    before = await read_text_file(context.workspace, target.path)
    if before is None:  # a binary file becomes text
        before = TextFile(text=await context.workspace.read_text(target.path))
    if seen.has_changed(target.path, before.text):
        return before, changed_fault(seen, target, before)
    stub = placeholder_in(content, before.shown)
    if stub is not None:
        return before, f"`{stub}` stands for code of {name} that would be lost; write the whole file, or use edit_file"
    unread = seen.unread_lines(target.path, before.text, reader=reader)
    if unread and line_count(before.text) > _UNREAD_LINES:
        return before, _unread_fault(name, before.shown, unread)
    return before, None


def _unread_fault(name: str, text: str, unread: Sequence[range]) -> str:
    """Return the error message for a write to a file with this `text`, of which the model does not know the `unread`
    lines."""
    count, lines = line_count(text), text.split("\n")
    which = "which you have not read or no longer see; read it first"
    if len(unread[0]) < count:
        gaps = [name_lines(each.start + 1, each.stop) for each in unread]
        more = f" and {plural(len(gaps) - _NAMED_GAPS, 'other part')}" if len(gaps) > _NAMED_GAPS else ""
        named = f"{', '.join(gaps[:_NAMED_GAPS])}{more}"
        which = f"but you have not read, or no longer see, {named}; read these lines first"
    if any(len(lines[at]) > _LINE_CHARS for each in unread for at in each):
        which += f" (but lines of more than {_LINE_CHARS:,} characters are never shown whole)"
    return f"{name} exists and has {count:,} lines, {which}, or change a part of it with edit_file"


def changed_fault(seen: SeenFiles, target: PathTarget, now: TextFile, edited: Sequence[range] = ()) -> str:
    """Return the error message for a file that others have changed since the model saw it. The message shows the
    changed lines. `edited` are the lines, counted from 0, that the refused edit would replace. Those that overlap or
    touch the changed lines are shown, too."""
    lines = now.shown.split("\n")
    changed = seen.changed_lines(target.path, now.text)
    if changed is None:
        return f"{target.name} has changed since you read it; read it again first"
    touching = [each for each in edited if each.start <= changed.stop and changed.start <= each.stop]
    start = min([max(0, changed.start - 1), *(each.start for each in touching)])
    stop = max([changed.stop + 1, *(each.stop for each in touching)])
    how = "read it again first" + (", or edit these lines as they are now" if touching else "")
    return f"{target.name} has changed since you read it; {how}. It changed here:\n{excerpt(lines, start, stop)}"


async def plan_change(
    context: ToolContext,
    target: PathTarget,
    title: str,
    *,
    diff: Diff | None,
    fault: str | None,
    line: int | None = None,
) -> PlannedCall:
    """Plan a call that writes to `target`. `fault` is the reason why the call must not run. It is ignored if the file
    is secret or outside the workspace, because it could reveal what the file contains."""
    protection = context.workspace.protection(target.path)
    # An editor may write a file in place, which changes the file under all its names. So the strictest protection of
    # any of these names counts.
    if target.has_hard_links and protection == "none":
        names, _ = (await context.workspace.find_names([target.path])).get(target.path, ((), True))
        protection = max(map(context.workspace.protection, map(Path, names)), key=_PROTECTIONS.index, default="none")
    if target.is_outside or target.read_protection != "none":
        fault = None
    if protection == "never" or target.read_protection == "never":
        diff = None
        own = f"{target.name} belongs to crow itself; ask the user to change it"
        fault = target.refusal if target.is_out_of_bounds else own
    planned = target.plan(title, "edit", "write", line=line, diffs=() if diff is None else (diff,))
    return replace(
        planned,
        fault=fault or planned.fault,
        is_barrier=True,
        touched=replace(planned.touched, is_protected=planned.touched.is_protected or protection == "ask"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a file that is about to be made."""

    before: TextFile | None
    """The file as it was read to make the change, or None for a new file."""
    after: str | None
    """The whole new text, or None to remove the file."""
    title: str = ""
    """The title of the call."""
    done: str
    """The message for the model after the change was made."""
    line: int | None = None
    """The first changed line, counted from 1."""
    argument: str = "content"
    """The argument that the new text comes from, for error messages."""
    is_whole: bool = False
    """Whether the model wrote the whole new text."""
    like: TextFile | None = None
    """The file that is moved to the new place, if the change is a move. The new file gets its encoding."""
    mode: int | None = None
    """The permission bits of the moved file. None if the change is not a move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A change that was checked and can be written."""

    target: PathTarget
    change: Change
    old: bytes | None
    """The content of the file, with changes that the user has not saved. None if there is no file."""
    mode: int | None
    """The file's permission bits. None if there is no file."""
    text: str
    """The new text. Empty if the file is removed."""
    data: bytes | None
    """The new content. None removes the file."""


async def apply_change(invocation: ToolInvocation, target: PathTarget, change: Change) -> Outcome:
    """Record the old content in the log, write the new one, and return an outcome with the diff."""
    write = await prepare_write(invocation.context.workspace, target, change)
    await record_write(invocation, write)
    written = await perform_write(invocation.context.workspace, write)
    done, diff = await conclude_write(invocation, write, written)
    announcement = target.plan(change.title, "edit", "write", line=change.line, diffs=(diff,)).announcement
    return Outcome(text=done, announcement=announcement)


async def prepare_write(workspace: Workspace, target: PathTarget, change: Change) -> Write:
    """Read the content that the change replaces, and encode the new text.

    :raises ~crow.domain.errors.ArgumentError: the new text has a character that the encoding of the file does not have.
    """
    before, form, after = change.before, change.before or change.like, change.after
    if form is not None and after is not None and form.encoding in WIDE_ENCODINGS and not after.startswith("\ufeff"):
        after = f"\ufeff{after}"
    data = None
    if after is not None:
        data = after.encode("utf-8") if form is None else form.encode(after, change.argument)
    old = None
    stat = await workspace.stat(target.path)
    # `before` may exist only in the editor
    if stat.kind == "file":
        old = await workspace.read_bytes(target.path)
        if before is not None and before.is_utf8 and old.decode("utf-8", "replace") != before.text:
            old = before.text.encode("utf-8", "replace")  # the text as the user saw it, with unsaved changes
    return Write(target=target, change=change, old=old, mode=stat.mode, text=after or "", data=data)


async def record_write(invocation: ToolInvocation, write: Write) -> None:
    """Record the replaced content in the session's log, so that the write can be undone."""
    log = invocation.ports.log
    await log.before_change(invocation.call_id, write.target.path, write.old, write.data, mode=write.mode)


async def perform_write(workspace: Workspace, write: Write) -> str:
    """Write or remove the file. Return its new text, which the editor may have changed."""
    form, mode = write.change.before or write.change.like, write.change.mode
    if write.data is not None and mode is None and (form is None or form.is_utf8):
        return await workspace.write_text(write.target.path, write.text)
    # Do not write through the editor, which writes only UTF-8, and sets no mode.
    await workspace.restore(write.target.path, write.data, mode=mode)
    return write.text


async def conclude_write(invocation: ToolInvocation, write: Write, written: str) -> tuple[str, Diff]:
    """Note which lines of the `written` text the model knows. Return the message for the model, and the diff."""
    context, call_id = invocation.context, invocation.call_id
    target, before, done = write.target, write.change.before, write.change.done
    context.checks.note(target.name)
    shown = None if before is None else before.shown
    if write.data is None:
        context.seen_files.forget(target.path)
        return done, Diff(path=target.client_path, old_text=shown, new_text="")
    earlier = before or write.change.like
    old = None if earlier is None or write.change.is_whole else earlier.text
    context.seen_files.note_write(target.path, old, write.text, call_id)
    if written != write.text:
        context.seen_files.note_read(target.path, written, (), call_id)  # the model does not know the lines that differ
        done += " The editor changed it while saving; read it again before the next edit."
    broken = await find_syntax_error(target.path.name, None if earlier is None else earlier.text, written)
    if broken is not None:
        done += f" {broken}"
    return done, Diff(path=target.client_path, old_text=shown, new_text=TextFile(text=written).shown)


async def stat_kind(
    workspace: Workspace, target: PathTarget, kinds: Sequence[str], expected: str, *, head: int = 0
) -> FileStat:
    """Look up the size and kind of the target, and read its first `head` bytes. `kinds` are the allowed kinds, and
    `expected` describes them in the error message.

    :raises ~crow.domain.errors.ArgumentError: the target does not exist, or is of another kind.
    """
    stat = await workspace.stat(target.path, head=head)
    if stat.kind == "missing":
        raise await _missing_error(workspace, target)
    if stat.kind not in kinds:
        raise ArgumentError(f"{target.name} is a {_KINDS[stat.kind]}; expected {expected}")
    return stat


async def _missing_error(workspace: Workspace, target: PathTarget) -> ArgumentError:
    """Return the error for a file that does not exist. It suggests files with similar names in the same directory, or
    else files with the same name elsewhere in the working directory."""
    directory = target.path.parent
    try:
        names = await anyio.to_thread.run_sync(_list_names, directory)
    except OSError:
        elsewhere = await anyio.to_thread.run_sync(_same_names, workspace, target.path)
        where = display_name(workspace, directory)
        also = f"; there is {', '.join(elsewhere)}" if elsewhere else ""
        return ArgumentError(f"{target.name} does not exist; neither does the directory {where}{also}")
    similar = await anyio.to_thread.run_sync(similar_names, target.path.name, names)
    if not similar:
        similar = await anyio.to_thread.run_sync(_same_names, workspace, target.path)
        directory = workspace.resolve(".")
    if not similar:
        return ArgumentError(f"{target.name} does not exist; use list_files to see which files exist")
    shown = ", ".join(display_name(workspace, directory / name) for name in similar)
    return ArgumentError(f"{target.name} does not exist; similar: {shown}")


def _same_names(workspace: Workspace, wanted: Path) -> list[str]:
    """Return up to three files of the working directory with the name of `wanted`, relative to it. Those that share
    more directories with `wanted` come first. Only the first directories of a large tree are searched."""
    root, found = workspace.resolve("."), []
    for number, (directory, folders, names) in enumerate(os.walk(root)):
        folders[:] = sorted(folder for folder in folders if not folder.startswith(".") and folder not in _SKIPPED)
        if wanted.name in names:
            found.append(Path(directory) / wanted.name)
        if number == _MAX_DIRECTORIES:
            break
    found.sort(key=lambda path: -len({*path.parts} & {*wanted.parts}))
    allowed = (path for path in found[:_MAX_COMPARED_NAMES] if workspace.read_protection(path) == "none")
    return [display_name(workspace, path) for path, _ in zip(allowed, range(_MAX_SAME_NAMES), strict=False)]


def _list_names(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry, _ in zip(entries, range(_MAX_NAMES), strict=False)]


def similar_names(wanted: str, names: Sequence[str]) -> list[str]:
    """Return up to three names that are close to `wanted`. Comparing two names takes quadratic time, so only the
    beginnings of long names are compared. If there are many names, only some of them are compared."""
    start = wanted.casefold()[:_COMPARED_CHARS]
    folded = {name.casefold()[:_COMPARED_CHARS]: name for name in names}
    likely = sorted(folded, key=lambda name: (name[:1] != start[:1], abs(len(name) - len(start))))[:_MAX_COMPARED_NAMES]
    return [folded[name] for name in difflib.get_close_matches(start, likely, n=3, cutoff=0.6)]


_READ_FILE_SPEC = tool_spec(
    "read_file",
    "Read a text file, or look at an image or a PDF.",
    required="path",
    path=argument("string", "Absolute, or relative to the working directory.", minLength=1),
    line=argument("integer", "First line, counted from 1.", minimum=1),
    limit=argument("integer", "Number of lines.", minimum=1),
)
READ_FILE = Builtin(_READ_FILE_SPEC, "read", "read", _plan_read, _run_read)

_WRITE_FILE_SPEC = tool_spec(
    "write_file",
    "Create a file, with missing directories, or replace its whole content. To change a part, edit it.",
    required="path content",
    path=PATH,
    content=argument("string"),
)
WRITE_FILE = Builtin(_WRITE_FILE_SPEC, "edit", "write", _plan_write, _run_write)
