"""Decides whether the files that a command changed in its layer are kept, and tells the model the result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import anyio.to_thread

from crow.domain.entries import Announcement, Diff, Location
from crow.tools import PlannedCall
from crow.tools.builtin.tool import ToolInvocation
from crow.tools.jobs import Job, JobLayer
from crow.tools.layers import Changes, Conflict, Layer
from crow.tools.layers.describe import MB, diffs_of, named, some
from crow.tools.layers.session import Layers
from crow.tools.layers.snapshots import Snapshot, confirm


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The result of a decision about the changes in a layer."""

    words: str = ""
    """The text for the model. Empty if there is nothing to tell."""
    diffs: tuple[Diff, ...] = ()
    """The diffs of kept text files."""
    is_refused: bool = False
    """The changes were not kept."""

    def announced(self, announcement: Announcement) -> Announcement | None:
        """Return `announcement` with the diffs of the kept files, or None if there are no diffs."""
        locations = tuple(Location(path=diff.path) for diff in self.diffs)
        return replace(announcement, diffs=self.diffs, locations=locations) if self.diffs else None


async def settle_job(invocation: ToolInvocation, job: Job) -> Settled:
    """Do the same as :func:`settle` for a command in the background, which may still run. Changes that were refused
    before are skipped until they change again. If the command has ended, remove its layer."""
    if job.own is None:
        return Settled()
    async with job.own.lock:
        if not job.own.is_open:
            return Settled()
        is_live = job.is_running
        settled = await settle(invocation, job.own.layers, job.own.layer, job.own, is_live=is_live)
        if not is_live:
            await job.own.drop()
        return settled


async def settle(
    invocation: ToolInvocation, layers: Layers, layer: Layer, own: JobLayer | None = None, *, is_live: bool = False
) -> Settled:
    """Find the changes in a layer, and keep them if the session allows it. `own` is None for a command in the
    foreground. `is_live` says whether the command still runs."""
    changes = await layers.look(layer, is_live=is_live)
    if not changes.operations and not changes.problem and not changes.dropped:
        return Settled()
    if own is None:
        return await _decide(invocation, layers, layer, changes, None)
    found = [(each.name, each.after) for each in changes.operations]
    is_known = all(each in own.refused for each in found)
    if is_known and (is_live or found):
        return Settled()
    own.refused = ()  # if the question is cancelled, it is asked again
    settled = await _decide(invocation, layers, layer, changes, own.plan)
    own.refused = found if settled.is_refused else ()
    return settled


async def _decide(
    invocation: ToolInvocation, layers: Layers, layer: Layer, changes: Changes, command: PlannedCall | None
) -> Settled:
    """Keep or refuse changes. `command` is the plan of a command in the background, otherwise None."""
    names, reviewer = named(changes), invocation.ports.reviewer
    if changes.problem or reviewer is None:
        return _refused(f"None of the changes was kept: {changes.problem or 'there is no session'}.")
    if changes.conflicts:
        return _conflict(changes.conflicts)
    if changes.operations:
        refusal = await reviewer.review(invocation.call_id, changes, command)
        if refusal:
            where = f" Not changed: {names}." if names else ""
            return _refused(f"{refusal}{where}") if names or changes.ignored else Settled(is_refused=True)
    diffs = await anyio.to_thread.run_sync(diffs_of, changes)
    try:
        words = await _keep(invocation, layers, layer, changes)
    except Conflict as error:
        return _conflict(error.paths)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _refused(f"None of the changes was kept: {reason}. Not changed: {names}.")
    return Settled(words=words, diffs=diffs)


async def _keep(invocation: ToolInvocation, layers: Layers, layer: Layer, changes: Changes) -> str:
    """Move the changes into the workspace. First record how to undo them. Return a text for the model about changes
    that cannot be undone or were not kept. It is empty if there are none."""
    sentences = []
    if changes.operations:
        with anyio.CancelScope(shield=True):
            change_set = await layers.prepare(layer, changes, {"call": invocation.call_id})
            workspace = invocation.context.workspace
            await invocation.ports.log.before_keeping(invocation.call_id, change_set.id, workspace.cwd)
            await layers.apply(change_set, layer if changes.is_live else None)
        large = [f"{each.name} ({each.before.size // MB} MB)" for each in change_set.without_image]
        if large:
            sentences.append(f"No undo can restore these, which were too large to keep: {', '.join(large)}.")
    if changes.dropped:
        sentences.append(f"Sockets, devices and named pipes were not kept: {some(changes.dropped)}.")
    return f"[{' '.join(sentences)}]" if sentences else ""


@asynccontextmanager
async def undoable(invocation: ToolInvocation, *, is_needed: bool) -> AsyncIterator[list[str]]:
    """Make it possible to undo the changes of a command that runs without a layer. The command must run inside this
    context. With `is_needed`, the state of the workspace is saved first, and the changes are stored when the command
    has ended. If the command is cancelled, they are not stored. After the block, the list has the sentences for the
    model about changes that cannot be undone.
    """
    layers, words = invocation.context.workspace.layers, list[str]()
    if layers is None or not is_needed:
        yield words
        return
    snapshot = await layers.snapshot()
    if isinstance(snapshot, str):
        yield words
        words.append(f"[What this command changed cannot be undone: {snapshot}.]")
        return
    try:
        yield words
        words += await _stored_changes(invocation, snapshot)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(snapshot.remove)


async def _stored_changes(invocation: ToolInvocation, snapshot: Snapshot) -> list[str]:
    """Store what has changed since a snapshot, so that it can be undone. Return the sentences for the model about
    changes that cannot be undone."""
    try:
        with anyio.CancelScope(shield=True):
            changed = await anyio.to_thread.run_sync(snapshot.changes, {"call": invocation.call_id})
            if changed is not None:
                cwd = invocation.context.workspace.cwd
                await invocation.ports.log.before_keeping(invocation.call_id, changed.id, cwd)
                await anyio.to_thread.run_sync(confirm, changed)
    except OSError as error:
        return [f"[What this command changed cannot be undone: {error.strerror or error}.]"]
    return [f"[No undo can restore these: {some(snapshot.lost)}.]"] if snapshot.lost else []


def _refused(words: str) -> Settled:
    return Settled(words=f"[{words}]", is_refused=True)


def _conflict(paths: Sequence[str]) -> Settled:
    return _refused(
        f"None of the command's changes was kept, because somebody else has changed the same files meanwhile: "
        f"{some(paths)}. Look at them, and run the command again."
    )
