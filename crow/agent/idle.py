"""Decides when a process is idle, so that it can tidy up."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

from crow.domain.errors import StoreError

logger = logging.getLogger(__name__)

_IDLE_S = 3.0
"""The store is tidied this many seconds after the last turn. Usually the user is still reading the answer then."""


class IdleTimer:
    """Calls `tidy` once, `after_s` seconds after the last turn has ended, or when `tidy_soon` is called. If a turn
    begins, or another call is scheduled, the scheduled or running call is cancelled.

    The owner must run `run` as a task.
    """

    def __init__(self, tidy: Callable[[], Awaitable[None]], *, after_s: float = _IDLE_S) -> None:
        self._tidy = tidy
        self._after_s = after_s
        self._turns = 0
        self._delay_s = 0.0
        self._wanted = anyio.Event()
        self._waiting = anyio.CancelScope()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context manager that must enclose each turn."""
        self._turns += 1
        self._waiting.cancel()
        try:
            yield
        finally:
            self._turns -= 1
            self._schedule(self._after_s)

    def tidy_soon(self) -> None:
        """Tidy without delay if no turn is running, and otherwise `after_s` seconds after the last one has ended."""
        self._schedule(0.0)

    def stop(self) -> None:
        """Cancel a running or scheduled call of `tidy`, and prevent later calls. Must be called before the store is
        closed."""
        self._turns += 1  # like a turn that never ends
        self._waiting.cancel()

    async def run(self) -> None:
        """Tidy at each scheduled time. Run until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            with anyio.CancelScope() as self._waiting:
                await anyio.sleep(self._delay_s)
                if self._turns:  # the end of the turn schedules the tidying again
                    continue
                try:
                    await self._tidy()
                except StoreError as error:
                    logger.warning("Tidying failed: %s", error)
                except Exception:  # sessions must go on
                    logger.exception("Tidying failed")

    def _schedule(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._waiting.cancel()
        self._wanted.set()
