"""`edit_file`: replaces a piece of a file.

The replacement is computed twice: once to show the diff before the call is allowed, and again from the current file
when the call runs. All other bytes of the file stay as they are (byte order mark, line ends, encoding, missing final
newline).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio.to_thread

from crow.domain.entries import Diff
from crow.domain.errors import ArgumentError
from crow.domain.rendering import RESULT_MASK, in_title
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.files import (
    A_FILE,
    PATH,
    WHOLE_BYTES,
    Change,
    apply_change,
    changed_fault,
    check_mask,
    plan_change,
    stat_kind,
)
from crow.tools.builtin.matching import Replacement, replace_text
from crow.tools.builtin.mismatch import excerpt, name_lines, placeholder_in
from crow.tools.builtin.text_file import TextFile, read_text_file
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    PathTarget,
    ToolContext,
    ToolInvocation,
    argument,
    describe_error,
    tool_spec,
)

MAX_SHOWN_LINES = 12
"""A result shows at most this many of the changed lines."""


async def _plan_edit(context: ToolContext, args: Arguments) -> PlannedCall:
    target = context.target(args["path"])
    diff, line, fault = None, None, None
    try:
        before, replacement = await _prepare_edit(context, target, args)
        diff = Diff(path=target.client_path, old_text=before.shown, new_text=TextFile(text=replacement.text).shown)
        line = replacement.line
    except (ArgumentError, OSError) as error:
        fault = describe_error(error)
    title = f"Edit {in_title(target.name)}"
    return await plan_change(context, target, title, diff=diff, fault=fault, line=line)


async def _run_edit(invocation: ToolInvocation, args: Arguments) -> Outcome:
    target = invocation.target(args["path"])
    before, edit = await _prepare_edit(invocation.context, target, args)
    where = "1 place, at line" if edit.count == 1 else f"{edit.count} places, the first at line"
    done = f"Edited {target.name} in {where} {edit.line}{f' ({edit.remark})' if edit.remark else ''}."
    if edit.remark:
        lines = edit.text.split("\n")
        count = args["new_text"].strip("\n").count("\n") + 1
        shown = excerpt(lines, edit.line - 1, edit.line - 1 + count, most=MAX_SHOWN_LINES)
        done += f" It now reads:\n{shown}\n"
    change = Change(
        before=before,
        after=edit.text,
        title=f"Edit {in_title(target.name)}",
        done=done,
        line=edit.line,
        argument="new_text",
    )
    return await apply_change(invocation, target, change)


async def _prepare_edit(context: ToolContext, target: PathTarget, args: Arguments) -> tuple[TextFile, Replacement]:
    """Return the file as it is now, and the replacement of its text.

    :raises ~crow.domain.errors.ArgumentError: the file cannot be edited, or the arguments do not fit the file's text.
    :raises OSError: the file cannot be read.
    """
    name, old, new = target.name, args["old_text"], args["new_text"]
    file = await read_editable(context, target)
    body = file.text.removeprefix("\ufeff")
    if RESULT_MASK in old and RESULT_MASK not in body:
        raise ArgumentError(
            f"old_text contains {RESULT_MASK}, which stands for a secret that you cannot see; choose an old_text "
            "without it"
        )
    stub = placeholder_in(new, body)
    if stub is not None:
        raise ArgumentError(f"`{stub}` in new_text stands for code that would be lost; write out the whole new_text")
    try:
        # If old_text does not match exactly, the search for it may take some seconds.
        edit = await anyio.to_thread.run_sync(_replaced, body, args, name, abandon_on_cancel=True)
    except ArgumentError as error:
        if context.seen_files.has_changed(target.path, file.text):
            raise ArgumentError(f"{error}\nOthers have changed {name} since you read it.") from None
        raise
    check_mask("new_text", edit.text, body)
    file.encode(edit.text, "new_text")
    # The model knows the lines of old_text only if it wrote them exactly as they are in the file.
    wanted = [line.removesuffix("\r") for line in old.strip("\n").split("\n")]
    edited = range(edit.line - 1, edit.line - 1 + len(wanted))
    actual = body.split("\n")[edited.start : edited.stop]
    known = [edited] if wanted == [line.removesuffix("\r") for line in actual] else []
    remark = remark_on_others(context, target, file, None if edit.count > 1 else [edited], known)
    mark = file.text[: len(file.text) - len(body)]
    return file, replace(edit, text=mark + edit.text, remark=remark or edit.remark)


async def read_editable(context: ToolContext, target: PathTarget) -> TextFile:
    """Return a file that can be edited as text.

    :raises ~crow.domain.errors.ArgumentError: there is no such file, or it is too large, or binary.
    :raises OSError: the file cannot be read.
    """
    stat = await stat_kind(context.workspace, target, ("file",), A_FILE)
    if stat.size > WHOLE_BYTES:
        raise ArgumentError(f"{target.name} has {stat.size:,} bytes, more than {WHOLE_BYTES:,}; use shell")
    file = await read_text_file(context.workspace, target.path)
    if file is None:
        raise ArgumentError(f"{target.name} is binary ({stat.size:,} bytes); use shell to change it")
    return file


def _replaced(body: str, args: Arguments, name: str) -> Replacement:
    return replace_text(body, args["old_text"], args["new_text"], every=args.get("all", False), name=name)


def remark_on_others(
    context: ToolContext, target: PathTarget, file: TextFile, edited: Sequence[range] | None, known: Sequence[range]
) -> str:
    """Return a remark for the model that others have changed the file since the model saw it, or "" if nobody has.
    `edited` are the lines that an edit replaces, counted from 0; None means that they may be anywhere. `known` are the
    lines that the call quotes exactly as they are now.

    :raises ~crow.domain.errors.ArgumentError: the edit touches changed lines that the model does not know.
    """
    seen = context.seen_files
    if not seen.has_changed(target.path, file.text):
        return ""
    changed = seen.changed_lines(target.path, file.text)
    if changed is None or edited is None:
        raise ArgumentError(changed_fault(seen, target, file))
    is_touched = any(lines.start <= changed.stop and changed.start <= lines.stop for lines in edited)
    # If others only removed lines, `changed` is empty. The model knows about this if it quotes the lines before and
    # after the removed ones as one piece.
    margin = 0 if changed else 1
    is_known = any(lines.start + margin <= changed.start and changed.stop + margin <= lines.stop for lines in known)
    if is_touched and not is_known:
        raise ArgumentError(changed_fault(seen, target, file, edited))
    lines = name_lines(changed.start + 1, max(changed.stop, changed.start + 1))
    return f"others changed {lines} since you read it"


_EDIT_FILE_SPEC = tool_spec(
    "edit_file",
    "Replace text in a file. Copy old_text exactly, with just enough lines that it occurs once.",
    required="path old_text new_text",
    path=PATH,
    old_text={"type": "string"},
    new_text={"type": "string"},
    all=argument("boolean", "Replace every occurrence. Default false."),
)
EDIT_FILE = Builtin(_EDIT_FILE_SPEC, "edit", "write", _plan_edit, _run_edit)
