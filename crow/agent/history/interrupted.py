"""Takes back patches that were cut off when crow was killed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import anyio

from crow.agent import new_message_id
from crow.agent.history.branch import Branch
from crow.agent.history.rewind import content_of, digest, name_in
from crow.domain.entries import CallRef, Custom, Entry, File, NewEntry, Started, ToolResult, TurnEnd
from crow.domain.errors import SessionBusy, StoreError
from crow.domain.events import Event
from crow.domain.rendering import in_title
from crow.store import Store, Tail
from crow.tools import Workspace

logger = logging.getLogger(__name__)

_DONE_KEY = "patches"
"""The member of a `Custom` entry's data that lists the ids of calls whose files were taken back or checked."""
_NO_TURN = -1
"""Passed as the number of the running turn when none runs."""


async def take_back_patches(branch: Branch, store: Store, workspace: Workspace) -> tuple[str, ...]:
    """If the previous turn was killed while a call changed several files, give those files their old content again.
    Tell the user and the model, and return the texts. Call this at the beginning of a turn.

    A file that is no longer as the call wrote it stays as it is. If the call has changed all of its files, they stay,
    too.
    """
    texts: list[str] = []
    for call in _cut_off_calls(branch.entries, branch.turn):
        first = next(entry for entry in branch.entries if entry.id == call.assistant)
        changes = await store.file_changes(branch.leaf, first.parent)  # only these are known to be recorded here
        files = [entry.body for entry in changes if isinstance(entry.body, File) and entry.body.call == call]
        text = await _take_back([file for file in files if file.recorded_here], workspace)
        logger.warning("Session %s: %s", branch.row.id, text)
        await branch.record([_notice(text, call.call_id)])
        texts.append(text)
    return tuple(texts)


def _notice(text: str, *call_ids: str) -> NewEntry:
    """Return an entry that tells the user and the model what became of interrupted patches. `call_ids` are the calls in
    the branch that need no more attention."""
    message_id, data = new_message_id(), {_DONE_KEY: list(call_ids)}
    body = Custom(namespace="crow", text=text, is_shown=True, for_model=True, message_id=message_id, data=data)
    return NewEntry(body=body)


class _Nobody:
    """A publisher without clients."""

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Publisher`."""


async def take_back_at_open(store: Store, tail: Tail, open_workspace: Callable[[], Workspace]) -> Tail:
    """Take back the patches that a killed process cut off in the session of `tail`, which is about to be opened, and in
    its subagents. Return the session's tail after that.

    Nothing happens in a session whose turn runs in another process. If the store fails, the next turn tries again.
    """
    if not tail.entries:
        return tail
    subagents = [row for row in await store.subagents(tail.row.id) if row.state == "running"]
    if not subagents and not _cut_off_calls(tail.entries, _NO_TURN):
        return tail
    workspace, session = open_workspace(), Branch(store, _Nobody(), tail)
    try:
        await _take_back_idle(session, store, workspace)
        for row in subagents:
            branch = Branch(store, _Nobody(), await store.open_session(row.id))
            for text in await _take_back_idle(branch, store, workspace):
                whose = f"It was the patch of the subagent {in_title(row.title or row.id)} ({row.id})."
                await session.record([_notice(f"{text} {whose}")])
    except StoreError as error:
        logger.warning("Session %s: patches were not taken back: %s", tail.row.id, error)
    finally:
        await workspace.close()
    return await store.open_session(tail.row.id)


async def _take_back_idle(branch: Branch, store: Store, workspace: Workspace) -> tuple[str, ...]:
    """Do the same as `take_back_patches` for a branch without a running turn. This begins a turn that does nothing
    else."""
    texts: tuple[str, ...] = ()
    if _cut_off_calls(branch.entries, _NO_TURN):
        with suppress(SessionBusy), anyio.CancelScope(shield=True):
            await branch.claim(None)
            try:
                texts = await take_back_patches(branch, store, workspace)
            finally:
                await branch.end_turn(TurnEnd(stop="end_turn"))
    return texts


def _cut_off_calls(entries: Sequence[Entry], turn: int) -> Sequence[CallRef]:
    """Return the calls that changed several files and have no result, in the killed turns since the last turn that
    ended by itself. `turn` is the running turn, which does not count. Calls that a later `Custom` entry lists under
    `_DONE_KEY` are left out."""
    counts: dict[CallRef, int] = {}
    ended: set[CallRef] = set()
    started: set[CallRef] = set()
    done: set[str] = set()
    for entry in reversed(entries):
        match entry.body:
            case TurnEnd(stop=stop) if entry.turn != turn and stop != "interrupted":  # "interrupted" means killed
                break
            case Custom(namespace="crow", data=data) if isinstance(names := data.get(_DONE_KEY), list):
                done.update(map(str, names))
            case ToolResult(call=call):
                ended.add(call)
            case Started(call=call) if entry.turn != turn:
                started.add(call)
            case File(call=call):
                counts[call] = counts.get(call, 0) + 1
            case _:
                pass
    cut_off = [call for call, count in counts.items() if count > 1 and call in started - ended]
    known = {entry.id for entry in entries}  # the answer with the call may be older than what is in memory
    return [call for call in cut_off if call.call_id not in done and call.assistant in known]


async def _take_back(files: Sequence[File], workspace: Workspace) -> str:
    """Restore the files that the call has changed, unless it has changed all of its files. Return a text for the user
    and the model."""
    states = {file.path: await _state(file, workspace) for file in files}
    changed = [file for file in files if states[file.path] == "changed"]
    others = [file.path for file in files if states[file.path] == "unknown"]
    names = {file.path: in_title(name_in(workspace, workspace.resolve(file.path))) for file in files}
    begin = "crow was killed while it applied a patch."
    if not files:
        return f"{begin} The session was imported, so its files were not checked."
    if len(changed) == len(files):
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
    left = f"Check these files, which have changed since or could not be restored: {_listed(names, others)}."
    left = left if others else ""
    return " ".join(part for part in (begin, back, none, left) if part)


async def _state(file: File, workspace: Workspace) -> str:
    """Return whether the file is as the call wrote it (`changed`), as before (`unchanged`), or `unknown`."""
    path = workspace.resolve(file.path)
    if str(path) != file.path:  # a link leads elsewhere by now
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
