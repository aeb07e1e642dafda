"""When nothing runs: the moment to tidy the store.

Strategy: turns are counted as they come and go; some seconds after the last of them has ended the store is tidied, and
a turn that begins meanwhile stops that between two of its small steps: what is left gets done another time. Knows
neither sessions nor what tidying is.
"""

from __future__ import annotations

import logging
import math
import time
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
        self._due_at = math.inf
        self._scope = anyio.CancelScope()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around each turn."""
        self._turns += 1
        self._scope.cancel()
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
        self._scope.cancel()

    async def run(self) -> None:
        """Tidy again and again, until cancelled."""
        while True:
            with anyio.CancelScope() as self._scope:
                if self._turns or self._due_at == math.inf:
                    await anyio.sleep_forever()
                await anyio.sleep(max(0.0, self._due_at - time.monotonic()))
                self._due_at = math.inf
                try:
                    await self._tidy()
                except StoreError as error:
                    logger.warning("Nothing was tidied: %s", error)

    def _plan(self, delay_s: float) -> None:
        self._due_at = time.monotonic() + delay_s
        self._scope.cancel()
