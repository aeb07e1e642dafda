"""Restores what commands and built-in tools changed on a branch that the user leaves, newest first.

The changes of one command form a change set. Undoing a change set makes another change set, so a redo can undo the
undo. If no command has changed anything, :mod:`crow.agent.history.rewind` alone restores the files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import anyio

from crow.agent import Client, PermissionQuestion, new_remark
from crow.agent.history.branch import Branch
from crow.agent.history.rewind import (
    CANCEL_S,
    TOOL_NAME,
    RestoreResult,
    find_restorable_files,
    name_in,
    outcome,
    write_file,
)
from crow.domain.entries import Announcement, CallRef, Entry, File, Location, NewEntry, Started, ToolResult
from crow.domain.events import CallAnnounced, CallEnded
from crow.tools import PlannedCall, Workspace
from crow.tools.layers import ChangeSet, Conflict

_MAX_NAMES = 3
_INVERTS = "inverts"
"""The key in `ChangeSet.about` whose value is the id of the change set that this one undoes."""
_CALL = "call"
"""The key in `ChangeSet.about` whose value is the id of the call that made the change set."""
_GONE = "What a command changed cannot be undone: what was there before is not kept on this machine."


def holds_change_sets(changes: Sequence[Entry]) -> bool:
    """Return whether a command has changed files."""
    return any(isinstance(entry.body, File) and entry.body.change_set for entry in changes)


async def names_of(workspace: Workspace, changes: Sequence[Entry]) -> tuple[str, ...]:
    """Return the names of the changed files and directories, newest first."""
    names: dict[str, None] = {}
    for entry in reversed(changes):
        match entry.body:
            case File(change_set="", path=path):
                names[path] = None
            case File(change_set=identifier):
                found = await _find(workspace, identifier)
                names |= dict.fromkeys(each.name for each in found.operations if not each.is_meta) if found else {}
            case _:
                pass
    return tuple(names)


async def changes_to_undo(workspace: Workspace, left: Sequence[Entry], gained: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the changes to undo when the session moves from one path to another. `left` has the file entries and
    results that are only on the old path, and `gained` those that are only on the new path, both oldest first. Changes
    by an earlier restore are undone only if that restore took back a change in `gained`."""
    restores = {
        entry.body.call
        for entry in (*left, *gained)
        if isinstance(entry.body, ToolResult) and entry.body.name == TOOL_NAME
    }
    again = [entry.body for entry in gained if isinstance(entry.body, File) and entry.body.call not in restores]
    paths = {file.path for file in again if not file.change_set}
    sets = {file.change_set for file in again if file.change_set}
    found = []
    for entry in left:
        body = entry.body
        if isinstance(body, File) and body.call in restores:
            is_wanted = body.path in paths if not body.change_set else await _takes_back(workspace, body, sets)
            if not is_wanted:
                continue
        found.append(entry)
    return tuple(found)


async def _takes_back(workspace: Workspace, restored: File, sets: Collection[str]) -> bool:
    """Return whether a restore, which stored `restored`, undid one of the change sets `sets`. Undo and redo form a
    chain in which each change set inverts the one before it, so every second one is an undo of the first."""
    is_undo, change_set = False, await _find(workspace, restored.change_set)
    while change_set is not None and (inverted := change_set.about.get(_INVERTS)) is not None:
        is_undo = not is_undo
        if is_undo and inverted in sets:
            return True
        change_set = await _find(workspace, inverted)
    return change_set is None and bool(sets)  # a change set is missing, so the answer is not known; assume yes


async def _find(workspace: Workspace, identifier: str) -> ChangeSet | None:
    return None if workspace.layers is None else await workspace.layers.find(identifier)


class Restore:
    """Restores the files that commands and built-in tools changed, as one announced call that belongs to the entry
    `command`."""

    def __init__(self, branch: Branch, client: Client, workspace: Workspace, command: Entry) -> None:
        self._branch = branch
        self._client = client
        self._workspace = workspace
        self._call = CallRef(assistant=command.id, index=0)
        self._lines: list[str] = []
        self._left: list[str] = []

    async def run(self, changes: Sequence[Entry], *, asks: bool) -> RestoreResult:
        """Restore the files of `changes`, which are file entries and results, oldest first. If `asks` is true, ask the
        user first.

        :raises ~crow.domain.errors.StoreError: an entry could not be stored. A file is only changed after its entry is
            stored.
        """
        paths = await names_of(self._workspace, changes)
        names = [name_in(self._workspace, self._workspace.resolve(path)) for path in paths[:_MAX_NAMES]]
        rest = len(paths) - _MAX_NAMES
        title = f"Restore {', '.join(names) or 'files'}{f' and {rest} more' if rest > 0 else ''}"
        announcement = Announcement(
            title=title, kind="edit", locations=tuple(Location(path=path) for path in paths[:50])
        )
        arguments = json.dumps({"paths": paths[:50]})
        is_open = True
        try:
            await self._branch.publish(
                CallAnnounced(call=self._call, name=TOOL_NAME, arguments=arguments, announcement=announcement)
            )
            answer = "allow_once"
            if asks:
                plan = PlannedCall(announcement=announcement, access="write", review_text="\n".join(paths))
                answer = await self._client.ask(
                    PermissionQuestion(call=self._call, name=TOOL_NAME, arguments=arguments, plan=plan, always="")
                )
            if answer == "cancelled":
                return RestoreResult(left=paths, cancelled=True)
            if answer == "allow_once":
                why = "the user agreed" if asks else "the user asked for it"
                started = Started(call=self._call, why=why, announcement=announcement)
                await self._branch.record([NewEntry(body=started)])
                await self._restore(changes)
            else:
                self._lines, self._left = [f"Kept as they are: {', '.join(paths)}."], list(paths)
            await self._store(announcement)
            is_open = False
            return RestoreResult(left=tuple(self._left))
        finally:
            if is_open:
                with anyio.move_on_after(CANCEL_S, shield=True):
                    await self._branch.publish(CallEnded(call=self._call, text="No more files were restored."))

    async def _store(self, announcement: Announcement) -> None:
        text = "\n".join(self._lines) or "Nothing had to be restored."
        result = ToolResult(call=self._call, name=TOOL_NAME, text=text, announcement=announcement)
        entries = [NewEntry(body=result)]
        if self._left:
            entries.append(new_remark(text))
        await self._branch.record(entries)

    async def _restore(self, changes: Sequence[Entry]) -> None:
        results = [entry for entry in changes if isinstance(entry.body, ToolResult)]
        waiting: list[Entry] = []
        for entry in [*reversed(changes), None]:
            body = None if entry is None else entry.body
            if isinstance(body, File) and not body.change_set and entry is not None:
                waiting.insert(0, entry)
                continue
            if isinstance(body, ToolResult):
                continue
            await self._restore_files([*waiting, *results] if waiting else [])
            waiting = []
            if isinstance(body, File):
                await self._undo(body)

    async def _restore_files(self, changes: Sequence[Entry]) -> None:
        """Restore the files that built-in tools changed."""
        for found in await find_restorable_files(self._workspace, changes):
            file = found if found.fault else await write_file(self._branch, self._workspace, found, self._call)
            self._lines.append(outcome(file))
            if file.fault:
                self._left.append(file.name)

    async def _undo(self, changed: File) -> None:
        """Undo one change set."""
        layers = self._workspace.layers
        change_set = await _find(self._workspace, changed.change_set) if changed.recorded_here else None
        if layers is None or change_set is None:
            self._lines.append(_GONE)
            self._left.append(changed.path)
            return
        if not change_set.operations:  # crow was killed before it moved anything
            return
        try:
            made = await layers.invert(change_set, {_INVERTS: change_set.id, _CALL: self._call.call_id})
        except OSError as error:
            self._lines.append(f"Not restored: {changed.path}: {error.strerror or error}.")
            self._left.append(changed.path)
            return
        entry = File(
            call=self._call, path=changed.path, before=None, after_hash="", recorded_here=True, change_set=made.id
        )
        await self._branch.record([NewEntry(body=entry)])
        try:
            await layers.apply(made)
        except Conflict as error:
            self._lines += [f"Not restored: {path} was changed by someone else just now." for path in error.paths]
            self._left += [*error.paths]
        except OSError as error:
            self._lines.append(f"Not restored: {changed.path}: {error.strerror or error}.")
            self._left.append(changed.path)
        else:
            self._lines += [f"Restored: {each.name}." for each in made.operations if not each.is_meta]
        self._lines += [f"Not restored: {path} {reason}." for path, reason in made.skipped]
        self._left += [path for path, _ in made.skipped]
