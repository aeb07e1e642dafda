"""The turn that runs, as those see it who cancel it.

Strategy: a turn is run in a scope of its own. One that only listens to the model when it is cancelled shows nothing
more from that instant on, so its end can be stored by a task of its own while the connection is still being closed;
any other is ended by whoever runs it, once it has let go of what it holds. Knows neither the turn nor the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from crow.agent.aside import Aside

__all__ = ["Running"]

HEAD_START_S = 0.0005
"""The store needs the interpreter for about as long until it waits for the disk; all else can be done meanwhile."""


class Running:
    """`hush` has the turn show nothing more, and tells whether it does nothing else either until it is cancelled;
    `end`, one of `tasks`, then stores that it was cancelled."""

    def __init__(
        self, tasks: anyio.abc.TaskGroup, *, hush: Callable[[], bool], end: Callable[[], Awaitable[None]]
    ) -> None:
        self._scope = anyio.CancelScope()
        self._tasks = tasks
        self._hush = hush
        self._end = end
        self._ending: Aside | None = None

    @property
    def is_ended(self) -> bool:
        """Whether its end is stored, or being stored."""
        return self._ending is not None

    def cancel(self) -> None:
        """End the turn; without effect on one that was cancelled or is over."""
        if self._ending is None and self._hush():
            self._ending = Aside(self._tasks, self._end)
            asyncio.get_running_loop().call_later(HEAD_START_S, self._scope.cancel)
        else:
            self._scope.cancel()

    async def run(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Run it. When this returns it has let go of what it held, and if its end was begun here, that is stored.

        :raises Exception: what `turn` or `end` raised.
        """
        try:
            with self._scope:
                await turn()
        finally:
            if self._ending is not None:
                with anyio.CancelScope(shield=True):
                    await self._ending.wait()
