"""Shows, keeps, merges or drops the changes that a subagent has made in its own layer, for the tool `task`.

In texts for the model, the layer of a task is called its copy of the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import anyio
import anyio.to_thread

from crow.domain.diff import diff_text
from crow.domain.entries import Announcement, Diff, Location
from crow.domain.errors import ArgumentError
from crow.domain.rendering import in_title
from crow.domain.text import plural
from crow.tools import Coverage, Outcome, PlannedCall, Workspace
from crow.tools.builtin.tool import ToolInvocation
from crow.tools.layers import ChildLayer, Conflict, LayerBusy, Merge, RootsChanged
from crow.tools.layers.children import keeping
from crow.tools.layers.describe import diffs_of, named, some
from crow.tools.layers.session import Layers

Decision: TypeAlias = Literal["keep", "merge", "drop"]
"""`keep` takes all changes, or none if one is in conflict with the workspace. `merge` joins changed lines of text files
where it can, and takes all changes that are not in conflict. `drop` deletes the layer."""
_VERBS: Mapping[str, str] = {"keep": "Keep", "merge": "Merge", "drop": "Drop"}
_DIFF_CHARS = 12_000
"""The model sees at most this many characters of the diffs of a task. It can ask the subagent for more."""

_NO_LAYERS = (
    "task: isolated work needs layers, which do not work here; see docs/sandbox.md. Leave isolated out, or do the work "
    "yourself"
)


async def _open_layer(layers: Layers | None, task_id: str, *, is_new: bool) -> ChildLayer | None:
    """Open the layer of a subagent. If there is none, create it if `is_new` is set, otherwise return None.

    :raises ~crow.domain.errors.ArgumentError: there are no layers here, or the layer cannot be used.
    """
    if layers is None or not await layers.works():
        raise ArgumentError(_NO_LAYERS)
    try:
        return await layers.open_child(task_id, is_new=is_new)
    except LayerBusy:
        raise ArgumentError(f"task: the copy of {task_id} is in use by another process") from None
    except RootsChanged as error:
        raise ArgumentError(f"task: the copy of {task_id} belongs to other directories: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"task: the copy of {task_id} cannot be opened: {reason}") from error


async def new_layer(layers: Layers | None, task_id: str) -> ChildLayer:
    """Open the layer of a subagent, and create it if there is none. The caller must close it. :raises
    ~crow.domain.errors.ArgumentError: see :func:`_open_layer`."""
    child = await _open_layer(layers, task_id, is_new=True)
    if child is None:
        raise ArgumentError(_NO_LAYERS)
    return child


async def describe_changes(workspace: Workspace, task_id: str) -> str:
    """Return a text for the model about the changes of a subagent in its layer. Remove the layer if there are none.

    :raises ~crow.domain.errors.ArgumentError: the layer cannot be used.
    """
    layers = workspace.layers
    child = await _open_layer(layers, task_id, is_new=False)
    if child is None or layers is None:
        return "[It has changed nothing.]"
    try:
        made = await layers.merge(child, merges_texts=True)
        if not made.changes.operations and not made.conflicts and not made.changes.problem:
            child.remove()
            return "[It has changed nothing.]"
        diffs = await anyio.to_thread.run_sync(diffs_of, made.changes)
    finally:
        child.close()
    if made.changes.problem:
        return f"[Its changes cannot be kept: {made.changes.problem}.]"
    names = named(made.changes) or plural(made.changes.files, "ignored file")
    sentences = [f"It worked on a copy, and the workspace is unchanged. Its changes: {names}."]
    if made.merged:
        sentences.append(
            f"The workspace has changed meanwhile, too, and merge would join the lines: {some(made.merged)}."
        )
    if made.conflicts:
        sentences.append(
            f"In conflict with the workspace, so neither keep nor merge takes them: {some(made.conflicts)}."
        )
    sentences.append(f"Now call task with resume={task_id} and changes=keep, merge or drop.")
    return "\n".join([f"[{' '.join(sentences)}]", *_shown_diffs(diffs)])


def _shown_diffs(diffs: tuple[Diff, ...]) -> list[str]:
    """Return the diffs as text, up to `_DIFF_CHARS` characters, and a note about those that are left out."""
    shown: list[str] = []
    left = _DIFF_CHARS
    for number, diff in enumerate(diffs):
        text = f"--- {diff.path}\n{diff_text(diff.old_text or '', diff.new_text)}"
        if len(text) > left:
            return [*shown, f"[the diffs of {plural(len(diffs) - number, 'file')} are left out]"]
        shown.append(text)
        left -= len(text)
    return shown


def plan_settling(args: Mapping[str, Any]) -> PlannedCall:
    """Plan a call that decides about the changes of a task. :raises ~crow.domain.errors.ArgumentError: the call names
    no task."""
    task_id = args.get("resume")
    if not task_id:
        raise ArgumentError("changes is given without resume; expected the id of the task whose changes are meant")
    return PlannedCall(
        announcement=Announcement(title=f"{_VERBS[args['changes']]} the changes of {in_title(task_id)}", kind="edit"),
        access="none",
        # the user's rules about changes that commands make in layers also apply here
        coverage=Coverage(rule_tool="shell_changes", narrower_arguments=(task_id,)),
        is_barrier=True,
    )


async def settle_task(invocation: ToolInvocation, args: Mapping[str, Any]) -> Outcome:
    """Keep, merge or drop the changes that a subagent has made in its layer.

    :raises ~crow.domain.errors.ArgumentError: there is no such task, it still works, or it has no layer.
    """
    task_id, decision, layers = args["resume"], args["changes"], invocation.context.workspace.layers
    if invocation.ports.subagents is not None:
        await invocation.ports.subagents.check_ended(task_id)
    child = await _open_layer(layers, task_id, is_new=False)
    if child is None or layers is None:
        raise ArgumentError(f"task: {task_id} has no copy with changes")
    try:
        if decision == "drop":
            await anyio.to_thread.run_sync(child.remove)
            return Outcome(text=f"The changes of {task_id} were dropped.")
        made = await layers.merge(child, merges_texts=decision == "merge")
        return await _take_over(invocation, layers, child, made, all_or_none=decision == "keep")
    finally:
        child.close()


async def _take_over(
    invocation: ToolInvocation, layers: Layers, child: ChildLayer, made: Merge, *, all_or_none: bool
) -> Outcome:
    """Move the changes of a merge into the workspace, if the session allows it."""
    changes = made.changes
    if changes.problem:
        return _refused(f"{changes.problem}.")
    if made.conflicts and (all_or_none or not changes.operations):
        more = " changes=merge takes the others, and joins changed lines where it can." if all_or_none else ""
        return _refused(f"The workspace and the task have both changed {some(made.conflicts)}.{more}")
    if not changes.operations:
        await anyio.to_thread.run_sync(child.remove)
        return Outcome(text="The workspace already has all changes of the task.")
    if invocation.ports.reviewer is None:
        return _refused("There is no session.")
    refusal = await invocation.ports.reviewer.review(invocation.call_id, changes)
    if refusal:
        return _refused(refusal)
    diffs = await anyio.to_thread.run_sync(diffs_of, changes)
    names = named(changes) or plural(changes.files, "ignored file")
    try:
        await _move_in(invocation, layers, child, made)
    except Conflict as error:
        return _refused(f"Somebody has just changed {some(error.paths)}.")
    except (OSError, ValueError) as error:
        return _refused(f"{getattr(error, 'strerror', None) or error}.")
    return Outcome(
        text="\n".join([f"Kept: {names}.", *_remarks(made)]),
        announcement=Announcement(
            title=f"Keep the changes of {child.layer.id}",
            kind="edit",
            diffs=diffs,
            locations=tuple(Location(path=diff.path) for diff in diffs),
        ),
        raw_output={"kept": changes.files, "conflicts": list(made.conflicts)},
    )


def _refused(reason: str) -> Outcome:
    """Return the result of a call that has kept nothing."""
    return Outcome(text=f"Nothing was kept, and the task's copy stays. {reason}", is_error=True)


def _remarks(made: Merge) -> list[str]:
    """Return sentences for the model about merged files, conflicts and files that cannot be kept."""
    found = []
    if made.merged:
        found.append(f"Merged with changes of the workspace, so check them: {some(made.merged)}.")
    if made.conflicts:
        found.append(
            f"Not kept, because the workspace has changed them, too: {some(made.conflicts)}. The task's copy still has "
            "its versions."
        )
    if made.changes.dropped:
        found.append(f"Sockets, devices and named pipes were not kept: {some(made.changes.dropped)}.")
    return found


async def _move_in(invocation: ToolInvocation, layers: Layers, child: ChildLayer, made: Merge) -> None:
    """Move changes into the workspace. First record how to undo them. The layer is removed, unless conflicts are left
    in it. See :func:`crow.tools.layers.apply` for the errors."""
    paths = [each.name for each in made.changes.operations if not each.is_meta]
    with anyio.CancelScope(shield=True):
        change_set = await layers.prepare_merge(child, made, {"call": invocation.call_id})
        workspace = invocation.context.workspace
        await invocation.ports.log.before_keeping(invocation.call_id, change_set.id, workspace.cwd)
        with keeping(child, change_set.id, paths):
            await layers.apply(change_set)
        if not made.conflicts:
            await anyio.to_thread.run_sync(child.remove)
