"""The layers and change sets of one session."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import anyio
import anyio.to_thread

from crow.tools.layers.changes import Changes, LookRules
from crow.tools.layers.children import UNNEEDED_S, ChildLayer, children, has_child, open_child, remove_child, surplus
from crow.tools.layers.comparison import is_untouched, look
from crow.tools.layers.keep import Recovered, apply, forget, invert, old_sets, prepare, recover
from crow.tools.layers.merge import Merge, merge, prepare_merge
from crow.tools.layers.place import Layer, Place
from crow.tools.layers.sets import ChangeSet, find_set
from crow.tools.layers.snapshots import Snapshot

_MAX_REMOVALS = 4
"""How many layers are removed at the same time. More would slow the disk down for the next commands."""
_CLOSE_S = 0.3


class Layers:
    """Calls the functions of this package in threads, so that they do not block the event loop.

    `open_layer` opens a layer, or returns None if no command can run in one. `rules_for` returns what the user's
    settings say about the paths in a layer; it blocks. `roots` are the directories of the workspace.
    """

    def __init__(
        self,
        place: Place,
        open_layer: Callable[[], Awaitable[Layer | None]],
        rules_for: Callable[[Layer], LookRules],
        roots: Sequence[str] = (),
    ) -> None:
        self._place = place
        self._roots = roots
        self._open_layer = open_layer
        self._rules_for = rules_for
        self._works: bool | None = None
        self._removals: set[threading.Thread] = set()

    async def works(self) -> bool:
        """Return whether commands can run in layers here. The first call tries it."""
        if self._works is None:
            layer = await self.open()
            if layer is not None:
                await self.drop(layer)
        return bool(self._works)

    async def open(self) -> Layer | None:
        """Open a layer, which the caller must drop. None if commands cannot run in layers here."""
        try:
            layer = None if self._works is False else await self._open_layer()
        except OSError:
            layer = None
        if self._works is None:
            self._works = layer is not None
        return layer

    async def look(self, layer: Layer, *, is_live: bool = False) -> Changes:
        """Return what commands have changed in a layer. The commands must have ended, unless `is_live`. If the layer or
        the workspace cannot be read, for example because the workspace was removed, the changes have a `problem`."""

        def find() -> Changes:
            try:
                # most commands change nothing, and to find the rules takes longer than to look
                rules = LookRules() if is_untouched(layer) else self._rules_for(layer)
                return look(layer, rules, is_live=is_live)
            except OSError as error:
                path = f"{error.filename}: " if isinstance(error.filename, str) else ""
                return Changes(layer=layer.id, problem=f"{path}{error.strerror or error}")

        return await anyio.to_thread.run_sync(find)

    async def drop(self, layer: Layer) -> None:
        """Begin to remove a layer with everything in it. A thread does it; `close` waits for this thread."""
        self._removals = {thread for thread in self._removals if thread.is_alive()}
        if len(self._removals) >= _MAX_REMOVALS:
            await self._wait_for_removals()
        removal = threading.Thread(target=layer.drop, name="remove a layer", daemon=True)
        self._removals.add(removal)
        removal.start()

    async def _wait_for_removals(self) -> None:
        for removal in [*self._removals]:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(removal.join)

    async def close(self) -> None:
        """Wait up to 0.3 s until dropped layers are removed. The next start of crow removes what is left."""

        def wait() -> None:
            end = time.monotonic() + _CLOSE_S
            for removal in self._removals:
                removal.join(max(0.0, end - time.monotonic()))

        if self._removals:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(wait)

    async def prepare(self, layer: Layer, changes: Changes, about: Mapping[str, str]) -> ChangeSet:
        """Write a change set to disk. See :func:`crow.tools.layers.prepare`."""
        return await anyio.to_thread.run_sync(prepare, self._place, layer, changes, about)

    async def apply(self, change_set: ChangeSet, layer: Layer | None = None) -> None:
        """Move the files of a change set into the workspace. A cancellation takes effect only afterwards. See
        :func:`crow.tools.layers.apply`."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(apply, change_set, layer)

    async def snapshot(self) -> Snapshot | str:
        """Copy the workspace's files before a command that runs without a layer. Return the reason, in words for the
        user, if that is not possible. The caller must remove the snapshot."""
        if not sys.platform.startswith("linux"):
            return "this needs Linux"
        try:
            return await anyio.to_thread.run_sync(Snapshot, self._place, self._roots)
        except OSError as error:
            return error.strerror or str(error)

    async def open_child(self, identifier: str, *, is_new: bool = True) -> ChildLayer | None:
        """Open the layer of a subagent, which the caller must close. Return None if layers do not work here, or if
        `is_new` is false and the subagent has no layer.

        :raises LayerBusy: another process uses it. :raises RootsChanged: it belongs to other directories.
        :raises OSError: it cannot be created, or cannot be kept on this file system.
        """
        if not is_new and not await anyio.to_thread.run_sync(has_child, self._place, identifier):
            return None
        layer = await self.open()
        if layer is None:
            return None
        await self.drop(layer)
        if layer.directory.parent != self._place.layers:
            raise OSError(errno.EXDEV, "the file system of crow's data cannot hold layers")
        roots = [overlay.root for overlay in layer.overlays]
        return await anyio.to_thread.run_sync(open_child, self._place, identifier, roots)

    async def merge(self, child: ChildLayer, *, merges_texts: bool) -> Merge:
        """Return what can be kept of a subagent's changes. See :func:`crow.tools.layers.merge.merge`."""

        def find() -> Merge:
            return merge(child, self._rules_for(child.layer), merges_texts=merges_texts)

        return await anyio.to_thread.run_sync(find)

    async def prepare_merge(self, child: ChildLayer, made: Merge, about: Mapping[str, str]) -> ChangeSet:
        """Write the change set of a merge to disk. The layer stays as it is."""
        return await anyio.to_thread.run_sync(prepare_merge, self._place, child, made, dict(about))

    async def prune_children(self, is_needed: Callable[[str], Awaitable[bool]]) -> None:
        """Remove the layers of subagents that have not been used for a week and are not needed any more; `is_needed`
        takes the subagent's id. Also remove those that have not been used for a month, and the oldest ones if all
        together take too much space."""
        too_many = await anyio.to_thread.run_sync(surplus, self._place)
        old = await anyio.to_thread.run_sync(partial(children, self._place, unused_s=UNNEEDED_S))
        for identifier in dict.fromkeys((*too_many, *old)):
            if identifier in too_many or not await is_needed(identifier):
                await anyio.to_thread.run_sync(remove_child, self._place, identifier)

    async def find(self, identifier: str) -> ChangeSet | None:
        """Return a change set that was kept, by its id; None if it is no longer on this machine."""
        return await anyio.to_thread.run_sync(find_set, self._place, identifier)

    async def invert(self, change_set: ChangeSet, about: Mapping[str, str]) -> ChangeSet:
        """Write the change set that undoes another one to disk. See :func:`crow.tools.layers.invert`."""
        return await anyio.to_thread.run_sync(partial(invert, self._place, change_set, about))

    async def prune(self, is_needed: Callable[[Mapping[str, str]], Awaitable[bool]]) -> None:
        """Remove the change sets that are older than a week and not needed any more. `is_needed` takes the `about` with
        which a change set was prepared."""
        for change_set in await anyio.to_thread.run_sync(old_sets, self._place):
            if not await is_needed(change_set.about):
                await anyio.to_thread.run_sync(forget, self._place, [change_set.id])

    async def recover(self) -> tuple[Recovered, ...]:
        """Complete or take back what killed processes have left. See :func:`crow.tools.layers.recover`."""
        return await anyio.to_thread.run_sync(recover, self._place)
