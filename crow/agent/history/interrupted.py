"""Takes back patches that were cut off when crow was killed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from crow.agent import new_message_id
from crow.agent.history.branch import Branch
from crow.agent.history.rewind import content_of, digest, name_in
from crow.domain.entries import CallRef, Custom, Entry, File, NewEntry, Started, ToolResult, TurnEnd
from crow.domain.rendering import in_title
from crow.store import Store
from crow.tools import Workspace

logger = logging.getLogger(__name__)

_TOLD = "patches"
"""The name of the data of a `Custom` entry that lists the calls which were dealt with."""


async def take_back_patches(branch: Branch, store: Store, workspace: Workspace) -> None:
    """If the turn before was killed while a call changed several files, give those files their old content again. Tell
    the user and the model. Call this at the beginning of a turn.

    A file that is no longer as the call wrote it stays as it is. If the call has changed all of its files, they stay,
    too.
    """
    for call in cut_off_calls(branch.entries, branch.turn):
        first = next(entry for entry in branch.entries if entry.id == call.assistant)
        changes = await store.file_changes(branch.leaf, first.parent)
        files = [entry.body for entry in changes if isinstance(entry.body, File) and entry.body.call == call]
        words = await _take_back([file for file in files if file.recorded_here], workspace)
        logger.warning("Session %s: %s", branch.row.id, words)
        told = Custom(
            namespace="crow",
            text=words,
            is_shown=True,
            for_model=True,
            message_id=new_message_id(),
            data={_TOLD: [call.call_id]},
        )
        await branch.record([NewEntry(body=told)])


def cut_off_calls(entries: Sequence[Entry], turn: int) -> Sequence[CallRef]:
    """Return the calls that changed several files and have no result. Only killed turns directly before `turn` count.
    Calls that a patch entry of a later turn names were dealt with."""
    counts: dict[CallRef, int] = {}
    ended: set[CallRef] = set()
    started: set[CallRef] = set()
    told: set[str] = set()
    for entry in reversed(entries):
        match entry.body:
            case TurnEnd(stop=stop) if entry.turn != turn and stop != "interrupted":
                break
            case Custom(namespace="crow", data=data) if isinstance(names := data.get(_TOLD), list):
                told.update(map(str, names))
            case ToolResult(call=call):
                ended.add(call)
            case Started(call=call) if entry.turn != turn:
                started.add(call)
            case File(call=call):
                counts[call] = counts.get(call, 0) + 1
            case _:
                pass
    cut_off = [call for call, count in counts.items() if count > 1 and call in started - ended]
    known = {entry.id for entry in entries}
    return [call for call in cut_off if call.call_id not in told and call.assistant in known]


async def _take_back(files: Sequence[File], workspace: Workspace) -> str:
    """Restore the files that the call has changed, if it has not changed all. Return words for the user and the
    model."""
    states = {file.path: await _state(file, workspace) for file in files}
    changed = [file for file in files if states[file.path] == "changed"]
    others = [file.path for file in files if states[file.path] == "unknown"]
    names = {file.path: in_title(name_in(workspace, workspace.resolve(file.path))) for file in files}
    begin = "crow was killed while it applied a patch."
    if files and len(changed) == len(files):
        return f"{begin} All of its files have been changed: {_listed(names, [file.path for file in files])}."
    restored: list[str] = []
    for file in changed:
        try:
            await workspace.restore(workspace.resolve(file.path), file.before, mode=file.mode)
            restored.append(file.path)
        except OSError as error:
            logger.warning("%s was not restored: %s", file.path, error)
            others.append(file.path)
    back = f"What it had changed was taken back: {_listed(names, restored)}." if restored else ""
    none = "" if restored or others else "It had not changed any file."
    left = f"Not as the patch or its beginning left them, so check them: {_listed(names, others)}." if others else ""
    return " ".join(part for part in (begin, back, none, left) if part)


async def _state(file: File, workspace: Workspace) -> str:
    """Return whether the file is as the call wrote it (`changed`), as before (`unchanged`), or `unknown`."""
    path = workspace.resolve(file.path)
    if str(path) != file.path:
        return "unknown"
    try:
        now = digest(await content_of(workspace, path))
    except OSError:
        return "unknown"
    if now == digest(file.before):
        return "unchanged"
    return "changed" if now == file.after_hash else "unknown"


def _listed(names: Mapping[str, str], paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 10} more" if len(paths) > 10 else ""
    return ", ".join(names[path] for path in paths[:10]) + more
