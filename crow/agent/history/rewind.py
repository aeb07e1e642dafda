"""Restores files that the built-in tools changed on a branch that the user leaves.

File entries record the content of each file before a change, and the hash of what was written. A restore writes a
file's first recorded content back. It does not touch a file that somebody else changed after crow's last edit or
between two of crow's edits. Imported entries are never used, because a session file made by others could use them to
write any content anywhere. A restore is announced and stored like any other edit. The content that the restore replaces
is stored too, so the restore itself can be undone. Version control is never touched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import anyio

from crow.agent import Client, PermissionQuestion, new_remark
from crow.agent.history.branch import Branch
from crow.domain.entries import Announcement, CallRef, Diff, Entry, File, Location, NewEntry, Started, ToolResult
from crow.domain.events import CallAnnounced, CallEnded
from crow.tools import PlannedCall, Workspace

TOOL_NAME = "put_back_files"
ABSENT = ""
CANCEL_S = 2.0
"""After a cancellation, telling the client that a restore has ended may take this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorableFile:
    """A changed file."""

    path: Path
    name: str
    """The path, relative to the workspace if it is inside."""
    now: bytes | None = None
    """The content that the file has. None if it does not exist."""
    then: bytes | None = None
    """The content that a restore gives the file. None if a restore removes it."""
    now_mode: int | None = None
    """The permission bits that the file has."""
    then_mode: int | None = None
    """The permission bits of the file if a restore creates it. None if they are not known."""
    fault: str = ""
    """Why the file cannot be restored, as the rest of a sentence that begins with the file's name. Empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The result of a restore."""

    left: tuple[str, ...] = ()
    """The files that were not restored."""
    cancelled: bool = False
    """The user cancelled the turn."""


async def find_restorable_files(workspace: Workspace, changes: Sequence[Entry]) -> tuple[RestorableFile, ...]:
    """Find the files whose content differs from the content that they had before `changes`. The changes are file
    entries and results, oldest first."""
    by_path, results = group_by_path(changes)
    found = [await _inspect_file(workspace, path, files, results) for path, files in by_path.items()]
    return tuple(file for file in found if file.fault or file.now != file.then)


def group_by_path(changes: Sequence[Entry]) -> tuple[Mapping[str, Sequence[File]], Mapping[CallRef, ToolResult]]:
    """Return the changes of each file, oldest first, and the results of their calls."""
    by_path: dict[str, list[File]] = {}
    results: dict[CallRef, ToolResult] = {}
    for entry in changes:
        match entry.body:
            case File(path=path) as file:
                by_path.setdefault(path, []).append(file)
            case ToolResult(call=call) as result:
                results[call] = result
            case _:
                pass
    return by_path, results


async def _inspect_file(
    workspace: Workspace, name: str, changes: Sequence[File], results: Mapping[CallRef, ToolResult]
) -> RestorableFile:
    path = Path(name)
    file = RestorableFile(path=path, name=name_in(workspace, path))
    changes = [change for change in changes if change.recorded_here]
    if not changes:
        return replace(file, fault="was changed before this session was imported")
    then = changes[0].before
    if workspace.resolve(name) != path:
        return replace(file, fault="is now a link to another file")
    if is_changed_between(changes, results):
        return replace(file, fault="was changed by someone else between two edits")
    try:
        now, mode = await content_of(workspace, path), (await workspace.stat(path)).mode
    except OSError as error:
        return replace(file, fault=f"cannot be read ({error.strerror or error})")
    if now != then and digest(now) not in digests_after(changes[-1], results):
        return replace(file, fault="was deleted since" if now is None else "was changed by someone else since")
    return replace(file, now=now, then=then, now_mode=mode, then_mode=changes[0].mode)


def is_changed_between(changes: Sequence[File], results: Mapping[CallRef, ToolResult]) -> bool:
    """Return whether someone else changed the file between two of crow's changes."""
    for earlier, later in pairwise(changes):
        # The content that a restore replaced came from another branch, so `earlier` says nothing about it. The restore
        # checked that content.
        was_restored = later.call in results and results[later.call].name == TOOL_NAME
        if not was_restored and digest(later.before) not in digests_after(earlier, results):
            return True
    return False


def name_in(workspace: Workspace, path: Path) -> str:
    """Return the path, relative to the workspace if it is inside."""
    root = workspace.resolve(str(workspace.cwd))
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


async def restore_files(
    branch: Branch, client: Client, workspace: Workspace, files: Sequence[RestorableFile], *, command: Entry, asks: bool
) -> RestoreResult:
    """Announce the restore as a tool call that belongs to the entry `command`. If `asks` is true, ask the user. Then
    write the files and store the result.

    :raises ~crow.domain.errors.StoreError: an entry could not be stored. A file is only written after its entry is
        stored.
    """
    ready = [file for file in files if not file.fault]
    faulty = [file for file in files if file.fault]
    if not ready:
        await branch.record([new_remark(_outcomes(faulty))])
        return RestoreResult(left=tuple(file.name for file in faulty))
    call = CallRef(assistant=command.id, index=0)
    names = ", ".join(file.name for file in ready[:3]) + (", …" if len(ready) > 3 else "")
    announcement = Announcement(
        title=f"Restore {names}",
        kind="edit",
        locations=tuple(Location(path=str(file.path)) for file in ready),
        diffs=tuple(_diffs(ready)),
    )
    arguments = json.dumps({"paths": [str(file.path) for file in ready]}, ensure_ascii=False)
    is_open = True
    try:
        await branch.publish(CallAnnounced(call=call, name=TOOL_NAME, arguments=arguments, announcement=announcement))
        answer = "allow_once"
        if asks:
            plan = PlannedCall(announcement=announcement, access="write")
            answer = await client.ask(
                PermissionQuestion(call=call, name=TOOL_NAME, arguments=arguments, plan=plan, always="")
            )
        if answer == "cancelled":
            return RestoreResult(left=tuple(file.name for file in files), cancelled=True)
        if answer == "allow_once":
            why = "the user agreed" if asks else "the user asked for it"
            await branch.record([NewEntry(body=Started(call=call, why=why, announcement=announcement))])
            written = [await write_file(branch, workspace, file, call) for file in ready]
            await branch.record(_result_of(call, announcement, [*written, *faulty]))
            left = [file.name for file in (*faulty, *written) if file.fault]
        else:
            shown = replace(announcement, title=f"Kept as is: {names}", diffs=())
            lines = [f"Kept as is: {file.name}." for file in ready] + [outcome(file) for file in faulty]
            result = ToolResult(call=call, name=TOOL_NAME, text="\n".join(lines), announcement=shown)
            await branch.record([NewEntry(body=result)])
            left = [file.name for file in (*faulty, *ready)]
        is_open = False
        return RestoreResult(left=tuple(left))
    finally:
        if is_open:
            with anyio.move_on_after(CANCEL_S, shield=True):
                await branch.publish(CallEnded(call=call, text="No more files were restored."))


async def write_file(branch: Branch, workspace: Workspace, file: RestorableFile, call: CallRef) -> RestorableFile:
    """Store the file's current content, then restore the file. Return the file, with `fault` set if it could not be
    restored.

    Before anything is stored, the file is checked again, because the user may have edited it before answering crow's
    question.
    """
    try:
        if workspace.resolve(str(file.path)) != file.path or await content_of(workspace, file.path) != file.now:
            return replace(file, fault="was changed by someone else just now")
        after = digest(file.then)
        path, mode = str(file.path), file.now_mode
        change = File(call=call, path=path, before=file.now, after_hash=after, mode=mode, recorded_here=True)
        await branch.record([NewEntry(body=change)])
        await workspace.restore(file.path, file.then, mode=file.then_mode)
    except OSError as error:
        return replace(file, fault=f"cannot be written ({error.strerror or error})")
    return file


def _result_of(call: CallRef, announcement: Announcement, files: Sequence[RestorableFile]) -> list[NewEntry]:
    """Return the result with the diffs of the restored files, and a remark about the files without a diff.

    A client that shows diffs does not show the result's text. Without the remark, the user would not learn about the
    files without a diff.
    """
    files = sorted(files, key=lambda file: bool(file.fault))
    shown = tuple(_diffs([file for file in files if not file.fault]))
    result = ToolResult(
        call=call,
        name=TOOL_NAME,
        text=_outcomes(files),
        is_error=all(file.fault for file in files),
        announcement=replace(announcement, diffs=shown),
    )
    without_diff = [file for file in files if str(file.path) not in {diff.path for diff in shown}]
    return [NewEntry(body=result), *([new_remark(_outcomes(without_diff))] if shown and without_diff else [])]


def _outcomes(files: Sequence[RestorableFile]) -> str:
    return "\n".join(map(outcome, files))


def outcome(file: RestorableFile) -> str:
    if file.fault:
        return f"Not restored: {file.name} {file.fault}."
    return f"{'Deleted' if file.then is None else 'Restored'}: {file.name}."


async def content_of(workspace: Workspace, path: Path) -> bytes | None:
    """Return the content as the editor has it, or None if there is no file. :raises OSError: the path is not a file,
    or cannot be read."""
    kind = (await workspace.stat(path)).kind
    if kind == "missing":
        return None
    if kind != "file":
        raise OSError(f"it is now {'a directory' if kind == 'directory' else 'not a file'}")
    saved = await workspace.read_bytes(path)
    try:
        saved.decode()
    except UnicodeDecodeError:
        return saved
    return (await workspace.read_text(path)).encode(errors="replace")


def digests_after(change: File, results: Mapping[CallRef, ToolResult]) -> set[str]:
    """Return the digests of all contents that the file may have after `change`. These are the written content, the
    earlier content (in case the write failed), and the content that the result reports (in case the editor formats
    files when it saves them)."""
    shown = results[change.call].announcement.diffs if change.call in results else ()
    return {change.after_hash, digest(change.before), *(digest(diff.new_text) for diff in shown)}


def digest(content: bytes | str | None) -> str:
    """Return the sha256 (hex) of a content, or `ABSENT` if there is none."""
    if content is None:
        return ABSENT
    return hashlib.sha256(content.encode(errors="replace") if isinstance(content, str) else content).hexdigest()


def _diffs(files: Sequence[RestorableFile]) -> Iterator[Diff]:
    """Yield a diff for each text file."""
    for file in files:
        try:
            now = None if file.now is None else file.now.decode()
            then = "" if file.then is None else file.then.decode()
        except UnicodeDecodeError:
            continue
        yield Diff(path=str(file.path), old_text=now, new_text=then)
