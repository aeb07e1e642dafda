"""The requests of one connection that have no response yet, and how they end early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio

from crow.domain.entries import Entry
from crow.protocol import RequestParams
from crow.protocol.errors import REQUEST_CANCELLED, request_error
from crow.protocol.frames import INTERNAL_ERROR, RequestId

DRAIN_S = 0.5
"""The number of seconds for which unfinished requests may still run after stdin has ended."""

_SHORT_ENTRIES = 30
"""If a client closes or deletes a session while crow sends the session's history, crow stops sending only if the
history has more than this many entries. Sending a shorter history takes only a moment."""

OPENING = frozenset({"session/new", "session/fork", "session/load", "session/resume"})
"""Requests that open a session."""

_CANCELLABLE = OPENING | {"session/list"}
"""In addition to prompts, `$/cancel_request` can cancel these requests. All other requests end too quickly to be
cancelled."""

Method: TypeAlias = Callable[[RequestParams], Awaitable[dict[str, Any]]]


class Requests:
    """The requests of one connection that have no response yet."""

    def __init__(self) -> None:
        self.is_closing = False
        self._running: dict[asyncio.Task[Any], anyio.CancelScope] = {}
        self._prompting: set[asyncio.Task[Any]] = set()
        self._cancel_by_id: dict[RequestId, Callable[[], object]] = {}
        self._cancelled_early: set[RequestId] = set()
        """The prompts that were cancelled before they were submitted."""
        self._loading: dict[RequestId, Load] = {}

    async def answer(self, method: str, params: RequestParams, answer: Method) -> dict[str, Any]:
        """Carry out a request in the current task. :raises RequestError: the request was cancelled."""
        task = asyncio.current_task()
        assert task is not None
        if method == "session/prompt":
            self._prompting.add(task)
            task.add_done_callback(self._prompting.discard)
            with self.cancelled_by(params.request_id, partial(self._cancelled_early.add, params.request_id)):
                try:
                    return await answer(params)
                finally:
                    self._cancelled_early.discard(params.request_id)
        with anyio.CancelScope() as scope:
            self._running[task] = scope
            # The task counts as running until it has sent the response.
            task.add_done_callback(self._running.pop)
            if method not in _CANCELLABLE:
                return await answer(params)
            with self.cancelled_by(params.request_id, scope.cancel):
                return await answer(params)
        if self.is_closing:
            problem = f"The connection was closed before {method} had ended. Start crow again and repeat the request."
            raise request_error(INTERNAL_ERROR, problem)
        raise request_error(REQUEST_CANCELLED, f"The client cancelled {method}.")

    @contextmanager
    def cancelled_by(self, request_id: RequestId, action: Callable[[], object]) -> Iterator[None]:
        """Call `action` when the client cancels the request during the block. Call it at once if the request is a
        prompt that the client has already cancelled."""
        self._cancel_by_id[request_id] = action
        if request_id in self._cancelled_early:
            action()
        try:
            yield
        finally:
            self._cancel_by_id.pop(request_id, None)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request. Do nothing if the request cannot be cancelled."""
        if (cancel := self._cancel_by_id.get(request_id)) is not None:
            cancel()

    @contextmanager
    def loading(self, session_id: str, request_id: RequestId) -> Iterator[Load]:
        """Remember during the block that the request loads a session."""
        self._loading[request_id] = load = Load(session_id, partial(self.cancel, request_id))
        try:
            yield load
        finally:
            del self._loading[request_id]

    def cancel_loading(self, session_id: str) -> bool:
        """Cancel the requests that load this session, if its history is long. Return whether any request was loading
        this session."""
        loads = [load for load in self._loading.values() if load.session_id == session_id]
        for load in loads:
            load.end()
        return bool(loads)

    async def drain(self) -> None:
        """Wait at most `DRAIN_S` seconds for requests other than prompts, and then cancel them."""
        if self._running:
            await asyncio.wait(self._running, timeout=DRAIN_S)
        self.cancel_all()

    def cancel_all(self) -> None:
        """Cancel all requests other than prompts. They end with an error that says that the connection was closed."""
        self.is_closing = True
        for scope in tuple(self._running.values()):
            scope.cancel()

    async def prompts_answered(self) -> None:
        """Wait until all prompts have their responses. Their turns must have ended."""
        if self._prompting:
            await asyncio.wait(self._prompting, timeout=DRAIN_S)


class Load:
    """A running request that loads a session. `cancel` is the function that cancels the request."""

    def __init__(self, session_id: str, cancel: Callable[[], None]) -> None:
        self.session_id = session_id
        self._cancel = cancel
        self._is_long = False
        self._is_unwanted = False

    async def watch(self, history: AsyncIterator[Sequence[Entry]]) -> AsyncIterator[Sequence[Entry]]:
        """Yield the batches of `history` unchanged, and note when more than `_SHORT_ENTRIES` entries have been
        loaded."""
        count = 0
        async for batch in history:
            self._is_long = count >= _SHORT_ENTRIES
            if self._is_long and self._is_unwanted:
                self._cancel()
            yield batch
            count += len(batch)

    def end(self) -> None:
        """Cancel the request once more than `_SHORT_ENTRIES` entries have been loaded. A request that loads fewer
        entries is not cancelled."""
        self._is_unwanted = True
        if self._is_long:
            self._cancel()
