"""Work that a task of its own does beside another task, which waits for it later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

__all__ = ["Aside"]


class Aside:
    """What `work` does, begun now as one of `tasks`."""

    def __init__(self, tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        self._scope = anyio.CancelScope()
        self._done = anyio.Event()
        self._failure: Exception | None = None
        tasks.start_soon(self._do, work)

    def cancel(self) -> None:
        """Nobody needs it any more."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Until it is done. :raises Exception: what `work` raised."""
        if not self._done.is_set():
            await self._done.wait()
        if self._failure is not None:
            raise self._failure

    async def _do(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await work()
        except Exception as error:  # noqa: BLE001  # whoever waits for it raises it
            self._failure = error
        finally:
            self._done.set()
