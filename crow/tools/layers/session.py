"""The layers and change sets of one session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio
import anyio.to_thread

from crow.tools.layers.changes import Changes, LookRules, look
from crow.tools.layers.keep import Recovered, apply, forget, invert, old_sets, prepare, recover
from crow.tools.layers.place import Layer, Place
from crow.tools.layers.sets import ChangeSet, find_set


class Layers:
    """Opens layers and keeps what is in them, without blocking the event loop.

    `open_layer` opens a layer, or returns None if no command can run in one. `rules_for` returns what the user's
    settings say about the paths in a layer.
    """

    def __init__(
        self,
        place: Place,
        open_layer: Callable[[], Awaitable[Layer | None]],
        rules_for: Callable[[Layer], LookRules],
    ) -> None:
        self._place = place
        self._open_layer = open_layer
        self._rules_for = rules_for
        self._works: bool | None = None

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

    async def look(self, layer: Layer) -> Changes:
        """Return what commands have changed in a layer. They must have ended."""
        return await anyio.to_thread.run_sync(lambda: look(layer, self._rules_for(layer)))

    async def drop(self, layer: Layer) -> None:
        """Remove a layer with everything in it."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(layer.drop)

    async def prepare(self, layer: Layer, changes: Changes, about: Mapping[str, str]) -> ChangeSet:
        """Write a change set to disk. See :func:`crow.tools.layers.prepare`."""
        return await anyio.to_thread.run_sync(prepare, self._place, layer, changes, about)

    async def apply(self, change_set: ChangeSet) -> None:
        """Move the files of a change set into the workspace. See :func:`crow.tools.layers.apply`. It is not
        cancelled."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(apply, change_set)

    async def find(self, identifier: str) -> ChangeSet | None:
        """Return a change set that was kept; None if it is no longer on this machine."""
        return await anyio.to_thread.run_sync(find_set, self._place, identifier)

    async def invert(self, change_set: ChangeSet, about: Mapping[str, str]) -> ChangeSet:
        """Write to disk what undoes a change set. See :func:`crow.tools.layers.invert`."""
        return await anyio.to_thread.run_sync(partial(invert, self._place, change_set, about))

    async def prune(self, is_needed: Callable[[Mapping[str, str]], Awaitable[bool]]) -> None:
        """Remove the change sets that are older than a week and that nobody needs any more, judged by what was said
        about them when they were prepared."""
        for change_set in await anyio.to_thread.run_sync(old_sets, self._place):
            if not await is_needed(change_set.about):
                await anyio.to_thread.run_sync(forget, self._place, [change_set.id])

    async def recover(self) -> tuple[Recovered, ...]:
        """Complete or take back what killed processes have left. See :func:`crow.tools.layers.recover`."""
        return await anyio.to_thread.run_sync(recover, self._place)
