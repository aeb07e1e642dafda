"""When nothing runs: the moment to tidy the store.

Strategy: turns are counted as they come and go; some seconds after the last of them has ended the store is tidied, and
a turn that begins meanwhile stops that between two of its small steps: what is left gets done another time. Knows
neither sessions nor what tidying is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

from crow.domain.errors import StoreError

__all__ = ["Idle"]

logger = logging.getLogger(__name__)

AFTER_S = 3.0
"""A user who reads an answer needs longer than this; one who types ahead is not disturbed."""


class Idle:
    """Calls `tidy` when no turn has run for `after_s`. `run` is its task."""

    def __init__(self, tidy: Callable[[], Awaitable[None]], *, after_s: float = AFTER_S) -> None:
        self._tidy = tidy
        self._after_s = after_s
        self._turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = anyio.Event()
        self._tidying: anyio.CancelScope | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around each turn."""
        self._turns += 1
        self._put_off()
        try:
            yield
        finally:
            self._turns -= 1
            self._plan(self._after_s)

    def tidy_soon(self) -> None:
        """There is something to tidy: as soon as no turn runs."""
        self._plan(0.0)

    def stop(self) -> None:
        """End a tidying that is under way; the store is about to close."""
        self._turns += 1
        self._put_off()

    async def run(self) -> None:
        """Tidy again and again, until cancelled."""
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            if self._turns:  # one has begun in this very moment; its end plans anew
                continue
            with anyio.CancelScope() as self._tidying:
                try:
                    await self._tidy()
                except StoreError as error:
                    logger.warning("Nothing was tidied: %s", error)
            self._tidying = None

    def _plan(self, delay_s: float) -> None:
        self._put_off()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin)

    def _put_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._tidying is not None:
            self._tidying.cancel()

    def _begin(self) -> None:
        if not self._turns:  # else it is planned anew when they end
            self._due.set()
