"""Work that a task of its own does beside another task, which waits for it later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

import anyio
import anyio.abc

__all__ = ["Aside", "IfLong"]


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


class IfLong:
    """Around a block that is mostly short: `work` is begun when the block has taken `after_s` seconds, with `again` as
    often as it has taken as long again. The end of the block waits for what was begun.

    Nothing but a timer is made for a short block. A timer's callback is no task, and only tasks may use anyio.
    """

    def __init__(self, after_s: float, work: Callable[[], Coroutine[Any, Any, None]], *, again: bool = False) -> None:
        self._after_s = after_s
        self._work = work
        self._again = again
        self._timer: asyncio.TimerHandle | None = None
        self._begun: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._begun is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._begun])

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._begin)

    def _begin(self) -> None:
        if self._begun is None or self._begun.done():
            self._begun = asyncio.get_running_loop().create_task(self._work())
        if self._again:
            self._wait()
