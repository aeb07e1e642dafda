"""Sends the spans and metrics of each turn to a collector when the turn ends, in a separate thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, cast

import anyio.to_thread

from crow.domain.entries import Entry
from crow.domain.trace_context import current_trace_context
from crow.runtime import importing
from crow.store import Store, Tail
from crow.telemetry.spans import Redact
from crow.telemetry.turns import Turn, Turns

logger = logging.getLogger(__name__)

_TURNS = 64
"""At most this many turns wait for the collector. Further turns are dropped."""
_START_S = 0.5
"""The SDK is imported this long after the first entry was stored, because crow then waits for the model anyway."""
_IMPORT_S = 10.0
_EXIT_S = 0.5


class Collector(Protocol):
    """A destination of spans and metrics."""

    @property
    def is_failing(self) -> bool:
        """Whether the last request failed."""
        ...

    def send(self, turn: Turn, redact: Redact | None) -> None:
        """Send the spans and the metrics of a turn. This method blocks."""
        ...


class Sender:
    """Sends turns from a thread, which starts with the first of them. `connect` is called in this thread."""

    def __init__(self, connect: Callable[[], Collector], redact: Redact | None) -> None:
        self._connect = connect
        self._redact = redact
        self._waiting: queue.Queue[Turn | threading.Event] = queue.Queue(_TURNS)
        """The turns to send. If the thread finds an event among them, it sets the event."""
        self._collector: Collector | None = None
        self._thread: threading.Thread | None = None
        self._is_connected = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            # A daemon, because a collector that does not answer must not delay the exit.
            thread = threading.Thread(target=self._run, name="crow-telemetry", daemon=True)
            thread.start()
            self._thread = thread

    def put(self, turn: Turn) -> None:
        """Send a turn later. Drop it if too many turns wait or no thread can be started. This never raises, because the
        turn was already stored and must not fail now."""
        try:
            self.start()
        except RuntimeError as error:
            logger.warning("A turn was not traced: %s", error)
            return
        with suppress(queue.Full):
            self._waiting.put_nowait(turn)

    async def close(self) -> None:
        """Wait up to half a second until all turns are sent, unless the collector fails. Before that, wait until the
        SDK is imported, because Python may abort if it exits during an import."""
        if self._thread is None:
            return
        await anyio.to_thread.run_sync(self._is_connected.wait, _IMPORT_S)
        if self._collector is not None and not self._collector.is_failing:
            are_sent = threading.Event()
            with suppress(queue.Full):
                self._waiting.put_nowait(are_sent)
            await anyio.to_thread.run_sync(are_sent.wait, _EXIT_S)

    def _run(self) -> None:
        try:
            with importing():
                self._collector = collector = self._connect()
            self._is_connected.set()
            while True:
                turn = self._waiting.get()
                if isinstance(turn, threading.Event):
                    turn.set()
                    continue
                try:
                    collector.send(turn, self._redact)
                except Exception:
                    logger.exception("A turn was not traced")
        except Exception:
            logger.exception("No more traces are sent")
        finally:
            self._is_connected.set()


class TracedStore:
    """Wraps a store, and passes the turns that this process stores to a `Sender`."""

    def __init__(self, inner: Store, sender: Sender) -> None:
        self._inner = inner
        self._sender = sender
        self._turns = Turns()
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open_session(self, session_id: str) -> Tail:
        """See :meth:`crow.store.LogStore.open_session`."""
        tail = await self._inner.open_session(session_id)
        self._turns.know(tail.row)
        return tail

    async def append(self, session_id: str, **options: Any) -> tuple[Entry, ...]:
        """See :meth:`crow.store.LogStore.append`."""
        stored = await self._inner.append(session_id, **options)
        self._note(stored)
        return stored

    async def take_turn(self, session_id: str, *arguments: Any, **options: Any) -> Any:
        """See :meth:`crow.store.ClaimStore.take_turn`."""
        start = await self._inner.take_turn(session_id, *arguments, **options)
        self._note(start.entries)
        return start

    async def close(self) -> None:
        """See :meth:`crow.store.Store.close`."""
        await self._inner.close()
        await self._sender.close()

    def _note(self, stored: tuple[Entry, ...]) -> None:
        for turn in self._turns.add(stored, current_trace_context().get("traceparent", "")):
            self._sender.put(turn)
        if not self._has_begun:
            self._has_begun = True
            asyncio.get_running_loop().call_later(_START_S, self._sender.start)


def traced(store: Store, sender: Sender) -> Store:
    """Return the store wrapped in a `TracedStore`."""
    return cast(Store, TracedStore(store, sender))
