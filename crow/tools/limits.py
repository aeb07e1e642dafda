"""Limits on how much work runs at the same time, shared fairly between sessions."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel


class FairLimiter:
    """Gives out slots: at most `total` at once, and at most `each` of them to a single holder.

    Requests of one holder are served in order. Holders that wait take turns, so a holder with hundreds of requests does
    not delay the others.
    """

    def __init__(self, total: int, *, each: int | None = None) -> None:
        self._total = total
        self._each = total if each is None else each
        self._taken: Counter[object] = Counter()
        self._waiting: dict[object, deque[anyio.Event]] = {}
        """The waiting requests of each holder. The next slot goes to the first holder that may have another one."""

    @property
    def taken(self) -> int:
        """How many slots are in use."""
        return self._taken.total()

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, holder: object = None) -> AsyncIterator[None]:
        """Wait for a slot, and hold it during the block. If the wait is cancelled, no slot is taken. A task that is
        already cancelled gets no slot, even if one is free."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self.taken < self._total and self._taken[holder] < self._each:
            self._taken[holder] += 1
        else:
            await self._wait(holder)
        try:
            yield
        finally:
            self._give_back(holder)

    async def _wait(self, holder: object) -> None:
        granted = anyio.Event()
        self._waiting.setdefault(holder, deque()).append(granted)
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self._give_back(holder)
            else:
                self._waiting[holder].remove(granted)
                if not self._waiting[holder]:
                    del self._waiting[holder]
            raise

    def _give_back(self, holder: object) -> None:
        self._taken[holder] -= 1
        if not self._taken[holder]:
            del self._taken[holder]
        while self.taken < self._total:
            eligible = [one for one in self._waiting if self._taken[one] < self._each]
            if not eligible:
                return
            following = eligible[0]
            requests = self._waiting.pop(following)
            requests.popleft().set()
            self._taken[following] += 1
            if requests:
                self._waiting[following] = requests  # moves to the end, behind the other holders


COMMANDS = FairLimiter(16, each=12)
"""Limits how many shell commands run in the foreground at the same time, in the whole process. Each workspace is a
holder of slots."""

SEARCHES = FairLimiter(8, each=6)
"""Limits how many programs list or search files at the same time, in the whole process. Each workspace is a holder of
slots."""

FETCHES = FairLimiter(8, each=6)
"""Limits how many documents are fetched and converted at the same time, in the whole process. Each workspace is a
holder of slots."""
