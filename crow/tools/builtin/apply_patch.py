"""`apply_patch`: changes several files at once, for models that are trained to write patches.

All files of a patch are changed, or none. The changes are computed twice: once to show the diffs before the call is
allowed, and again from the current files when the call runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unicodedata import normalize

import anyio
import anyio.to_thread

from crow.domain.entries import Announcement, Diff
from crow.domain.errors import ArgumentError
from crow.domain.messages import Freeform
from crow.domain.rendering import RESULT_MASK, in_title
from crow.domain.text import plural
from crow.tools import Outcome, PlannedCall, Touched, Workspace
from crow.tools.builtin.edit import MAX_SHOWN_LINES, read_editable, remark_on_others
from crow.tools.builtin.files import (
    WHOLE_BYTES,
    Change,
    Write,
    changed_fault,
    check_mask,
    conclude_write,
    perform_write,
    plan_change,
    prepare_write,
    record_write,
    stat_kind,
)
from crow.tools.builtin.mismatch import excerpt, placeholder_in
from crow.tools.builtin.patch import FileChange, Hunk, parse_patch
from crow.tools.builtin.patching import Patched, apply_hunks
from crow.tools.builtin.text_file import TextFile, read_text_file
from crow.tools.builtin.tool import (
    Arguments,
    Builtin,
    PathTarget,
    ToolContext,
    ToolInvocation,
    describe_error,
    tool_spec,
)

_MAX_NAMED = 3
_MAX_FAULTS = 3
_EDITS, _WRITES, _REMOVES = ("edit_file",), ("write_file",), ("edit_file", "write_file")
"""The tools that would update, create and remove a file (or move it away) without a patch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FilePlan:
    """The planned change of one file."""

    target: PathTarget
    equivalents: tuple[str, ...]
    """The tools that would make this change without a patch. The user's rules for them also apply to the patch."""
    change: Change | None = None
    fault: str | None = None
    """Why the file cannot be changed. `change` is then None."""
    is_moved: bool = False
    """`target` is new, and the file of the plan before this one is moved there."""

    @property
    def diff(self) -> Diff | None:
        """The diff to show before the change."""
        if self.change is None or (self.change.before is None and self.change.after is None):
            return None  # without a change, or the removal of a binary file
        shown = None if self.change.before is None else self.change.before.shown
        return Diff(path=self.target.client_path, old_text=shown, new_text=TextFile(text=self.change.after or "").shown)


async def _plan_patch(context: ToolContext, args: Arguments) -> PlannedCall:
    plans = await _file_plans(context.target, context, parse_patch(args["input"]))
    parts = []
    for plan in plans:
        line = None if plan.change is None else plan.change.line
        title = f"Edit {in_title(plan.target.name)}"
        part = await plan_change(context, plan.target, title, diff=plan.diff, fault=plan.fault, line=line)
        parts.append(replace(part, coverage=replace(part.coverage, like=plan.equivalents)))
    faults = [part.fault for part in parts if part.fault is not None]
    announcements = [part.announcement for part in parts]
    return PlannedCall(
        announcement=Announcement(
            title=_title(plans),
            kind="delete" if all(plan.equivalents == _REMOVES for plan in plans) else "edit",
            locations=tuple(location for each in announcements for location in each.locations),
            diffs=tuple(diff for each in announcements for diff in each.diffs),
        ),
        access="write",
        is_barrier=True,
        fault=_refusal(faults) if faults else None,
        parts=tuple(parts),
        touched=Touched(
            is_outside=any(part.touched.is_outside for part in parts),
            is_protected=any(part.touched.is_protected for part in parts),
            has_hard_links=any(part.touched.has_hard_links for part in parts),
        ),
    )


async def _run_patch(invocation: ToolInvocation, args: Arguments) -> Outcome:
    context = invocation.context
    plans = await _file_plans(invocation.target, context, parse_patch(args["input"]))
    # `allowed_paths` is empty if the call was not planned
    if invocation.allowed_paths and tuple(str(plan.target.path) for plan in plans) != invocation.allowed_paths:
        raise ArgumentError("a path of the patch now leads to another file; repeat the call to use it")
    if faults := [plan.fault for plan in plans if plan.fault is not None]:
        raise ArgumentError(_refusal(faults))
    changes = [(plan, plan.change) for plan in plans if plan.change is not None]
    writes = [await prepare_write(context.workspace, plan.target, change) for plan, change in changes]
    for write in writes:
        await record_write(invocation, write)
    texts = await _write_all(context.workspace, writes)
    conclusions = [await conclude_write(invocation, write, text) for write, text in zip(writes, texts, strict=True)]
    announcement = Announcement(
        title=_title(plans),
        kind="delete" if all(plan.equivalents == _REMOVES for plan in plans) else "edit",
        locations=tuple(
            location
            for write in writes
            for location in write.target.plan("", "edit", "write", line=write.change.line).announcement.locations
        ),
        diffs=tuple(diff for _, diff in conclusions),
    )
    return Outcome(text="\n".join(done for done, _ in conclusions if done), announcement=announcement)


async def _write_all(workspace: Workspace, writes: Sequence[Write]) -> list[str]:
    """Write all files, and remove files last. Return their new texts.

    :raises ~crow.domain.errors.ArgumentError: a file could not be written. The files that were written before have
        their old content again, or the message names them.
    """
    texts: dict[int, str] = {}
    order = sorted(range(len(writes)), key=lambda index: writes[index].data is None)
    try:
        for index in order:
            texts[index] = ""  # if an error is raised now, this file may have been written already
            texts[index] = await perform_write(workspace, writes[index])
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            not_restored = await _put_back(workspace, [writes[index] for index in texts])
        if not isinstance(error, OSError):
            raise
        words = f"{describe_error(error)}. " + (
            f"Not put back: {', '.join(not_restored)}" if not_restored else "No file was changed"
        )
        raise ArgumentError(words) from error
    return [texts[index] for index in range(len(writes))]


async def _put_back(workspace: Workspace, writes: Sequence[Write]) -> list[str]:
    """Give files their old content. Return the names of those for which that fails."""
    left = []
    for write in reversed(writes):
        try:
            kind = (await workspace.stat(write.target.path)).kind
            now = await workspace.read_bytes(write.target.path) if kind == "file" else None
            if now != write.old and kind in ("file", "missing"):
                await workspace.restore(write.target.path, write.old, mode=write.mode)
        except OSError:
            left.append(write.target.name)
    return left


async def _file_plans(
    target_of: Callable[[str], PathTarget], context: ToolContext, changes: Sequence[FileChange]
) -> list[_FilePlan]:
    """Return a plan for each file that the patch touches.

    :raises ~crow.domain.errors.ArgumentError: a path cannot be used, or two paths lead to the same file.
    """
    plans: list[_FilePlan] = []
    for change in changes:
        target = target_of(change.path)
        destination = target_of(change.move_to) if change.move_to else None
        try:
            plans += await _plans_of(context, change, target, destination)
        except (ArgumentError, OSError) as error:
            fault = describe_error(error)
            update = _REMOVES if destination else _EDITS
            equivalents = {"add": _WRITES, "update": update, "delete": _REMOVES}[change.action]
            plans.append(_FilePlan(target=target, equivalents=equivalents, fault=fault))
            if destination is not None:
                plans.append(_FilePlan(target=destination, equivalents=_WRITES, fault=fault))
    seen = set()
    for plan in plans:
        if plan.target.path in seen:
            raise ArgumentError(f"the patch names {plan.target.name} twice; write all changes of a file in one section")
        seen.add(plan.target.path)
    return plans


async def _plans_of(
    context: ToolContext, change: FileChange, target: PathTarget, destination: PathTarget | None
) -> list[_FilePlan]:
    """Return the plans for one section of the patch.

    :raises ~crow.domain.errors.ArgumentError: the section does not fit the files.
    :raises OSError: a file cannot be read.
    """
    match change.action:
        case "add":
            return [
                _FilePlan(target=target, equivalents=_WRITES, change=await _addition(context, target, change.content))
            ]
        case "delete":
            removal = await _removal(context, target, change.hunks)
            return [_FilePlan(target=target, equivalents=_REMOVES, change=removal)]
    edited = await _edit(context, target, change.hunks)
    if destination is None:
        return [_FilePlan(target=target, equivalents=_EDITS, change=edited)]
    _check_no_link(context, target)
    await _check_missing(context, destination)
    mode = (await context.workspace.stat(target.path)).mode
    done = f"Moved {target.name} to {destination.name}."
    moved = replace(edited, before=None, like=edited.before, mode=mode, done=done)
    removed = Change(before=edited.before, after=None, done=edited.done)
    return [
        _FilePlan(target=target, equivalents=_REMOVES, change=removed),
        _FilePlan(target=destination, equivalents=_WRITES, change=moved, is_moved=True),
    ]


async def _check_missing(context: ToolContext, target: PathTarget) -> None:
    """Check that nothing exists at a path. :raises ~crow.domain.errors.ArgumentError: something does."""
    if (await context.workspace.stat(target.path)).kind != "missing":
        raise ArgumentError(
            f"{target.name} exists; change it with `*** Update File: {target.name}`, or delete it first with another "
            "patch"
        )


async def _addition(context: ToolContext, target: PathTarget, content: str) -> Change:
    await _check_missing(context, target)
    check_mask("the patch", content, "")
    count = content.count("\n")
    done = f"Created {target.name}: {plural(count, 'line')}."
    return Change(before=None, after=content, done=done, argument="the patch")


def _check_no_link(context: ToolContext, target: PathTarget) -> None:
    """Check that a path to remove or move is not a link: the link would stay, and the file that it leads to would go.

    :raises ~crow.domain.errors.ArgumentError: it is a link.
    """
    given = target.given_names[0]
    folder, name = os.path.split(given)
    own = context.workspace.resolve(folder) / name
    if normalize("NFC", str(own)) != normalize("NFC", str(target.path)):
        raise ArgumentError(f"{given} is a link to {target.name}; remove or move links with shell")


async def _removal(context: ToolContext, target: PathTarget, hunks: Sequence[Hunk]) -> Change:
    _check_no_link(context, target)
    found = await stat_kind(context.workspace, target, ("file",), "a file")
    if found.size > WHOLE_BYTES:
        raise ArgumentError(f"{target.name} has {found.size:,} bytes, too many to keep for undo; use shell")
    before = await read_text_file(context.workspace, target.path)
    if before is not None and context.seen_files.has_changed(target.path, before.text):
        raise ArgumentError(changed_fault(context.seen_files, target, before))
    if hunks and (before is None or (await _patched(before.text, hunks, target.name)).text.strip()):
        raise ArgumentError(f"the patch deletes {target.name}, but the file has lines that the patch does not remove")
    return Change(before=before, after=None, done=f"Deleted {target.name}.")


async def _patched(text: str, hunks: Sequence[Hunk], name: str) -> Patched:
    """Call `apply_hunks` in a thread: if a hunk does not match exactly, the search for similar lines takes a while."""
    return await anyio.to_thread.run_sync(lambda: apply_hunks(text, hunks, name=name), abandon_on_cancel=True)


async def _edit(context: ToolContext, target: PathTarget, hunks: Sequence[Hunk]) -> Change:
    file = await read_editable(context, target)
    body, name = file.text.removeprefix("\ufeff"), target.name
    if not hunks:  # the file is only moved
        return Change(before=file, after=file.text, done="")
    old = "\n".join(line.text for hunk in hunks for line in hunk.lines if line.mark != "+")
    if RESULT_MASK in old and RESULT_MASK not in body:
        raise ArgumentError(
            f"the patch contains {RESULT_MASK}, which stands for a secret that you cannot see; leave out its line"
        )
    added = "\n".join(line.text for hunk in hunks for line in hunk.lines if line.mark == "+")
    stub = placeholder_in(added, body)
    if stub is not None:
        raise ArgumentError(f"`{stub}` for {name} stands for code that would be lost; write it out")
    patched = await _patched(body, hunks, name)
    if patched.text == body:
        raise ArgumentError(f"the patch changes nothing in {name}")
    check_mask("the patch", patched.text, body)
    others = remark_on_others(context, target, file, patched.changed, patched.known)
    return Change(
        before=file,
        after=file.text[: len(file.text) - len(body)] + patched.text,
        done=_done(name, patched, others),
        line=patched.line,
        argument="the patch",
    )


def _done(name: str, patched: Patched, others: str) -> str:
    """Return a text about the changes in a file. If a hunk did not match exactly, the text also shows the new lines."""
    lines = [changed.start + 1 for changed in patched.changed][:MAX_SHOWN_LINES]
    more = ", ..." if len(patched.changed) > len(lines) else ""
    remarks = "; ".join([*patched.remarks, *([others] if others else [])])
    places = f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}{more}"
    done = f"Edited {name} at {places}{f' ({remarks})' if remarks else ''}."
    if patched.remarks:
        now = excerpt(patched.text.split("\n"), patched.line - 1, patched.line - 1 + MAX_SHOWN_LINES)
        done += f" It now reads:\n{now}\n"
    return done


def _refusal(faults: Sequence[str]) -> str:
    """Return the error message for a patch if some of its files cannot be changed."""
    known = list(dict.fromkeys(faults))
    more = [f"{len(known) - _MAX_FAULTS} more files cannot be changed."] if len(known) > _MAX_FAULTS else []
    return "\n".join([*known[:_MAX_FAULTS], *more, "No file was changed."])


def _title(plans: Sequence[_FilePlan]) -> str:
    verbs = {_EDITS: "Edit", _WRITES: "Create", _REMOVES: "Delete"}
    if len(plans) == 2 and plans[1].is_moved:
        return f"Move {in_title(plans[0].target.name)} to {in_title(plans[1].target.name)}"
    verb = verbs[plans[0].equivalents] if len({plan.equivalents for plan in plans}) == 1 else "Patch"
    names = ", ".join(in_title(plan.target.name) for plan in plans[:_MAX_NAMED])
    return f"{verb} {names}" + (f" and {len(plans) - _MAX_NAMED} more" if len(plans) > _MAX_NAMED else "")


_GRAMMAR = """\
start: "*** Begin Patch" LF file+ "*** End Patch" LF?
file: "*** Add File: " PATH LF added+
    | "*** Delete File: " PATH LF
    | "*** Update File: " PATH LF move? hunk*
move: "*** Move to: " PATH LF
hunk: header+ line+ last?
header: "@@" TEXT? LF
added: "+" TEXT? LF
line: ("+" | "-" | " ") TEXT? LF
last: "*** End of File" LF
PATH: /[^\\r\\n]+/
TEXT: /[^\\r\\n]+/
LF: /\\r?\\n/
"""
_APPLY_PATCH_SPEC = replace(
    tool_spec(
        "apply_patch",
        "Edit, add, move or delete files with a patch from `*** Begin Patch` to `*** End Patch`. Give each change "
        "enough lines around it that its place is clear.",
        required="input",
        input={"type": "string"},
    ),
    freeform=Freeform(syntax="lark", grammar=_GRAMMAR),
)
APPLY_PATCH = Builtin(_APPLY_PATCH_SPEC, "edit", "write", _plan_patch, _run_patch)
