"""Work that runs in parallel with a block of code and is awaited at the end of the block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc


class BackgroundTask:
    """Runs `work` in a task group. If `work` raises an exception, `wait` raises it."""

    def __init__(self, tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        self._scope = anyio.CancelScope()
        self._done = anyio.Event()
        self._failure: Exception | None = None
        tasks.start_soon(self._run, work)

    def cancel(self) -> None:
        """Cancel the work."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Wait until the work is done. :raises Exception: the exception that `work` raised."""
        if not self._done.is_set():
            await self._done.wait()
        if self._failure is not None:
            raise self._failure

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._scope:
                await work()
        except Exception as error:  # noqa: BLE001  # `wait` raises it
            self._failure = error
        finally:
            self._done.set()


@asynccontextmanager
async def after_delay(
    after_s: float, work: Callable[[], Coroutine[Any, Any, None]], *, again: bool = False
) -> AsyncIterator[None]:
    """Start `work` if the `with` block takes longer than `after_s` seconds. If `again` is true, start `work` again
    every `after_s` seconds. If `work` is still running at the end of the block, wait until `work` ends. `work` has to
    handle its own errors: they are only logged.

    A block that ends within `after_s` seconds needs only a timer, and no task. The timer's callback starts an asyncio
    task for `work`, because anyio's primitives do not work in callbacks.
    """
    loop = asyncio.get_running_loop()
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle

    def start() -> None:
        nonlocal task, timer
        if task is None or task.done():
            task = loop.create_task(work())
        if again:
            timer = loop.call_later(after_s, start)

    timer = loop.call_later(after_s, start)
    try:
        yield
    finally:
        timer.cancel()
        if task is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
