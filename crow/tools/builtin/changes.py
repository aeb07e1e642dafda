"""Keeps what a command has changed in a layer, or drops it, and says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import anyio.to_thread

from crow.domain.entries import Announcement, Diff, Location
from crow.tools.builtin.tool import ToolInvocation
from crow.tools.jobs import Job, JobLayer
from crow.tools.layers import Changes, Conflict, Layer
from crow.tools.layers.describe import MB, diffs_of, named, some
from crow.tools.layers.session import Layers
from crow.tools.layers.snapshots import Snapshot, confirm


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What became of a layer."""

    words: str = ""
    """For the model."""
    diffs: tuple[Diff, ...] = ()
    """What was kept."""

    def announced(self, announcement: Announcement) -> Announcement | None:
        """Return the announcement with the diffs; None if there are none."""
        locations = tuple(Location(path=diff.path) for diff in self.diffs)
        return replace(announcement, diffs=self.diffs, locations=locations) if self.diffs else None


async def settle_job(invocation: ToolInvocation, job: Job) -> Settled:
    """Do the same as :func:`settle` for a command in the background, which may still run. Changes that
    were rejected before are not asked about again until they change."""
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
    """Look at what the command has changed, and keep it if the session allows it."""
    changes = await layers.look(layer, is_live=is_live)
    if own is not None:
        found = [(each.name, each.after) for each in changes.operations]
        is_known = all(each in own.refused for each in found)
        if is_known and (is_live or found):
            return Settled()
        own.refused = found
    reviewer = invocation.ports.reviewer
    if not changes.operations and not changes.problem and not changes.dropped:
        return Settled()
    names = named(changes)
    if changes.problem or reviewer is None:
        return Settled(words=f"[None of the changes was kept: {changes.problem or 'there is no session'}.]")
    if changes.conflicts:
        return Settled(words=_conflict_words(changes.conflicts))
    if changes.operations:
        refusal = await reviewer.review(invocation.call_id, changes, None if own is None else own.plan)
        if refusal:
            where = f" Not changed: {names}." if names else ""
            return Settled(words=f"[{refusal}{where}]" if names or changes.ignored else "")
    diffs = await anyio.to_thread.run_sync(diffs_of, changes)
    try:
        words = await _keep(invocation, layers, layer, changes)
    except Conflict as error:
        return Settled(words=_conflict_words(error.paths))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Settled(words=f"[None of the changes was kept: {reason}. Not changed: {names}.]")
    return Settled(words=words, diffs=diffs)


async def _keep(invocation: ToolInvocation, layers: Layers, layer: Layer, changes: Changes) -> str:
    """Move the changes into the workspace. What undoes them is recorded first. Return what the model should know."""
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
    """Enter while a command runs without a layer. If it may change files, what it changes is stored afterwards, so that
    it can be undone. The list then has what the model should know."""
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
    """Store what has changed since a snapshot. Return what the model should know."""
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


def _conflict_words(paths: Sequence[str]) -> str:
    return (
        f"[None of the command's changes was kept, because somebody else has changed the same files meanwhile: "
        f"{some(paths)}. Look at them, and run the command again.]"
    )
