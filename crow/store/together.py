"""Transactions that wait for the disk at the same moment, made one.

Strategy: a flush costs the same for one change as for a hundred, and the changes of sixty sessions that stream would
queue for it. So a piece of work waits in a list; whichever reaches the writer's thread first takes all that wait there
into its transaction, each inside a savepoint of its own, so that the failure of one stays its own. They are written
together or not at all. Their tasks, which then wake together, go on one by one: sixty that each compute a millisecond
would keep everything else waiting for sixty. Knows no tables.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

__all__ = ["Together", "Turnstile", "Work", "do_each"]

T = TypeVar("T")


class Work(Generic[T]):
    """A function that wants a transaction, and later what it gave or why it failed."""

    def __init__(self, function: Callable[[sqlite3.Connection], T]) -> None:
        self._function = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_done = False

    def do(self, connection: sqlite3.Connection) -> None:
        """Call the function. What it raises is raised here and by `result`."""
        try:
            self._result = self._function(connection)
        except BaseException as error:
            self.fail(error)
            raise
        self.is_done = True

    def fail(self, error: BaseException) -> None:
        """Nothing of it was written; a reason of its own counts for more."""
        self._error = self._error or error
        self.is_done = True

    def result(self) -> T:
        """What the function gave. Only when it is done."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # done without an error: it is a T


class Together:
    """The work that waits for the next transaction. Added to in the event loop, taken in the writer's thread."""

    def __init__(self) -> None:
        self._waiting: deque[Work[object]] = deque()

    def add(self, function: Callable[[sqlite3.Connection], T]) -> Work[T]:
        """Let `function` wait."""
        work = Work(function)
        self._waiting.append(work)  # type: ignore[arg-type]  # whoever takes it passes its result on to nobody
        return work

    def take(self) -> tuple[Work[object], ...]:
        """All that waits, in the order it came."""
        return tuple(self._waiting.popleft() for _ in range(len(self._waiting)))


class Turnstile:
    """Lets one task through in each pass of the event loop, in the order they came. One that comes alone need not
    wait."""

    def __init__(self) -> None:
        self._waiting: deque[anyio.Event] = deque()
        self._is_taken = False

    async def through(self) -> None:
        """Return when it is this task's turn."""
        if self._is_taken:
            mine = anyio.Event()
            self._waiting.append(mine)
            await mine.wait()
        else:
            self._is_taken = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft().set()
            asyncio.get_running_loop().call_soon(self._next)


def do_each(connection: sqlite3.Connection, works: tuple[Work[object], ...]) -> None:
    """Do all of them inside the open transaction.

    :raises Exception: nothing can be written: the only work failed, or SQLite itself ended the transaction.
    """
    if len(works) == 1:
        works[0].do(connection)
        return
    for work in works:
        connection.execute("SAVEPOINT work")
        try:
            work.do(connection)
        except Exception:  # whose it is hears of it
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO work")
        connection.execute("RELEASE work")
