"""Work that runs beside a block of code and is awaited at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

import anyio
import anyio.abc


class BackgroundTask:
    """Runs `work` in a task group and keeps its exception for `wait`."""

    def __init__(self, tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        self._scope = anyio.CancelScope()
        self._done = anyio.Event()
        self._failure: Exception | None = None
        tasks.start_soon(self._run, work)

    def cancel(self) -> None:
        """Cancel the work."""
        self._scope.cancel()

    async def wait(self) -> None:
        """Wait until the work is done. :raises Exception: what `work` raised."""
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


class AfterDelay:
    """Starts `work` if the block takes longer than `after_s`; with `again`, every `after_s`. The exit waits for it.

    A short block costs one timer and no task. The timer starts an asyncio task because anyio needs one: its primitives
    do not work in callbacks.
    """

    def __init__(self, after_s: float, work: Callable[[], Coroutine[Any, Any, None]], *, again: bool = False) -> None:
        self._after_s = after_s
        self._work = work
        self._again = again
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._task is not None:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._task])

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        if self._again:
            self._timer = loop.call_later(self._after_s, self._start)
