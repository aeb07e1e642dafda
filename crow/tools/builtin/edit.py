"""`edit_file`: replaces a piece of a file.

The replacement is computed twice: once to show the diff before the call is allowed, and again from the current file
when the call runs. All other bytes of the file stay as they are (byte order mark, line ends, encoding, missing final
newline).
"""

from __future__ import annotations

from dataclasses import replace

import anyio.to_thread

from crow.domain.entries import Diff
from crow.domain.errors import ArgumentError
from crow.domain.rendering import RESULT_MASK, in_title
from crow.tools import Outcome, PlannedCall
from crow.tools.builtin.files import (
    A_FILE,
    PATH,
    THREAD_BYTES,
    WHOLE_BYTES,
    Change,
    apply_change,
    changed_fault,
    check_mask,
    plan_change,
    stat_kind,
)
from crow.tools.builtin.matching import Replacement, replace_text
from crow.tools.builtin.mismatch import excerpt, placeholder_in
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


async def plan_edit(context: ToolContext, args: Arguments) -> PlannedCall:
    target = context.target(args["path"])
    diff, line, fault = None, None, None
    try:
        before, replacement = await prepare_edit(context, target, args)
        diff = Diff(path=target.client_path, old_text=before.shown, new_text=TextFile(text=replacement.text).shown)
        line = replacement.line
    except (ArgumentError, OSError) as error:
        fault = describe_error(error)
    title = f"Edit {in_title(target.name)}"
    return await plan_change(context, target, title, diff=diff, fault=fault, line=line)


async def run_edit(invocation: ToolInvocation, args: Arguments) -> Outcome:
    target = invocation.target(args["path"])
    before, edit = await prepare_edit(invocation.context, target, args)
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


async def prepare_edit(context: ToolContext, target: PathTarget, args: Arguments) -> tuple[TextFile, Replacement]:
    """Return the file, and the replacement.

    :raises ~crow.domain.errors.ArgumentError: the file cannot be edited, or the arguments do not fit the file's text.
    :raises OSError: the file cannot be read.
    """
    workspace, name, old, new = context.workspace, target.name, args["old_text"], args["new_text"]
    stat = await stat_kind(workspace, target, ("file",), A_FILE)
    if stat.size > WHOLE_BYTES:
        raise ArgumentError(f"{name} has {stat.size:,} bytes, more than {WHOLE_BYTES:,}; use shell")
    file = await read_text_file(workspace, target.path)
    if file is None:
        raise ArgumentError(f"{name} is binary ({stat.size:,} bytes); use shell to change it")
    body = file.text.removeprefix("\ufeff")
    if RESULT_MASK in old and RESULT_MASK not in body:
        raise ArgumentError(
            f"old_text contains {RESULT_MASK}, which stands for a secret that you cannot see; choose an old_text "
            "without it"
        )
    stub = placeholder_in(new, body)
    if stub is not None:
        raise ArgumentError(f"`{stub}` in new_text stands for code that would be lost; write out the whole new_text")
    if len(body) > THREAD_BYTES:
        edit = await anyio.to_thread.run_sync(_replaced, body, args, name)
    else:
        edit = _replaced(body, args, name)
    check_mask("new_text", edit.text, body)
    file.encode(edit.text, "new_text")
    return file, replace(
        _checked(context, target, file, edit, old), text=file.text[: len(file.text) - len(body)] + edit.text
    )


def _replaced(body: str, args: Arguments, name: str) -> Replacement:
    return replace_text(body, args["old_text"], args["new_text"], every=args.get("all", False), name=name)


def _checked(context: ToolContext, target: PathTarget, file: TextFile, edit: Replacement, old: str) -> Replacement:
    """Refuse an edit of lines that others have changed since the model saw them, and name other changes.

    :raises ~crow.domain.errors.ArgumentError: the edit touches changed lines.
    """
    seen = context.seen_files
    if not seen.has_changed(target.path, file.text):
        return edit
    changed = seen.changed_lines(target.path, file.text)
    edited = range(edit.line - 1, edit.line + old.strip("\n").count("\n"))
    if changed is None or edit.count > 1 or (edited.start <= changed.stop and changed.start <= edited.stop):
        raise ArgumentError(changed_fault(seen, target, file))
    lines = f"lines {changed.start + 1}-{max(changed.stop, changed.start + 1)}"
    return replace(edit, remark=f"others changed {lines} since you read it")


EDIT_FILE_SPEC = tool_spec(
    "edit_file",
    "Replace text in a file. Copy old_text exactly, without line numbers, with just enough lines that it occurs once.",
    required="path old_text new_text",
    path=PATH,
    old_text={"type": "string"},
    new_text={"type": "string"},
    all=argument("boolean", "Replace every occurrence. Default false."),
)
EDIT_FILE = Builtin(EDIT_FILE_SPEC, "edit", "write", plan_edit, run_edit)
