"""Opens the store of a server. If the database cannot be reached yet, the server waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio

from crow.domain.errors import StoreUnreachable
from crow.store import Store

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0

logger = logging.getLogger(__name__)

_OpenStore = Callable[[], Awaitable[Store]]


async def open_when_reachable(
    open_store: _OpenStore, meanwhile: Callable[[], AbstractAsyncContextManager[object]], signals: asyncio.Queue[int]
) -> Store | None:
    """Open the store. While the database cannot be reached, enter the context of `meanwhile`, and try again after
    growing pauses.

    Return None if a signal ended the wait.

    :raises StoreError: the store cannot be used for another reason, such as a wrong password.
    """
    store: Store | None = None
    is_ended = False

    async def end() -> None:
        nonlocal is_ended
        await signals.get()
        is_ended = True
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        store = await _open(open_store, meanwhile)
        tasks.cancel_scope.cancel()
    if is_ended and store is not None:
        await store.close()
    return None if is_ended else store


async def _open(open_store: _OpenStore, meanwhile: Callable[[], AbstractAsyncContextManager[object]]) -> Store:
    try:
        return await open_store()
    except StoreUnreachable as error:
        problem = error
    pause_s = _FIRST_PAUSE_S
    async with meanwhile():
        while True:
            details = {"problem": str(problem), "seconds": pause_s}
            logger.warning("The server waits for its database", extra=details)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                return await open_store()
            except StoreUnreachable as error:
                problem = error
