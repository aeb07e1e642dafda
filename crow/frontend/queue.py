"""The queue between a session's feed and one of its clients."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio

from crow.domain.entries import Assistant, CallRef, Entry, ToolResult
from crow.domain.errors import ArgumentError, NoSuchSession
from crow.domain.events import (
    CallProgressed,
    EntryStored,
    Event,
    SummaryShown,
    TextShown,
    ThoughtShown,
    TurnBegan,
)
from crow.domain.trace_context import use_trace_context
from crow.frontend.client import SessionClient
from crow.frontend.workspace import ClientEditor
from crow.store import Access

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""If about this many bytes wait to be sent to a client, crow disconnects the client."""

_PATIENT_BYTES = 64 * 1024
"""If more than this many bytes wait to be sent to a patient connection, the session waits, too."""

_EVENT_BYTES = 500
"""The estimated memory that a waiting item takes in addition to its text, in bytes."""

Origin = object
"""The identity of a client. This is the connection id, which stays the same when the client connects again. A client
without a connection id is identified by its connection object."""


@dataclass(frozen=True, slots=True)
class _WaitingItem:
    """An item that waits to be sent to a client."""

    send: Callable[[], Awaitable[object]]
    """Sends the item."""
    size: int
    """About how many bytes of memory the item takes."""


class ClientQueue:
    """One client of a session, with the queue of items that are still to be sent to it. `run` sends these items.

    A client that does not read delays neither the session nor other clients: if its queue grows too large, the client
    is disconnected. But if `is_patient` is true, crow waits for the client: such a client is connected by a pipe, and
    crow always notices when the pipe closes. `may_write` means that the client may send prompts and answer questions.
    """

    def __init__(
        self,
        client: SessionClient,
        *,
        origin: Origin,
        may_write: bool,
        is_patient: bool,
        drop: Callable[[str], None],
        leave: Callable[[ClientQueue], None],
    ) -> None:
        self.client = client
        self._is_patient = is_patient
        self.origin = origin
        self.may_write = may_write
        self.check: Callable[[Access], Awaitable[None]] | None = None
        """Checks that the client's user has the given access to the session. Raises NoSuchSession if the user may no
        longer see the session, and ArgumentError if the user has less than the given access."""
        self.editor: ClientEditor | None = None
        """The client's editor, or None if it serves neither files nor terminals."""
        self._drop = drop
        self._leave = partial(leave, self)
        self._items: deque[_WaitingItem] = deque()
        self._bytes = 0
        self._progress: dict[CallRef, CallProgressed] = {}
        """The newest output of each call that has output waiting to be sent."""
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._scope = anyio.CancelScope()
        self._flushes: set[anyio.Event] = set()

    @property
    def is_detached(self) -> bool:
        """Whether the client was detached from the session. This is final."""
        return self.client.is_closed

    async def run(self) -> None:
        """Send the waiting items in order, while the client is open. End after `detach`."""
        use_trace_context({})  # the client outlives the request that attached it
        with self._scope:
            while True:
                while self._items:
                    await self.client.is_open.wait()
                    if self.is_detached:
                        return
                    item = self._items[0]
                    try:
                        await item.send()
                    except Exception:
                        logger.exception("An update could not be sent")
                        self._end("Internal error: an update could not be sent.")
                        return
                    if self.is_detached:
                        return
                    self._items.popleft()
                    self._bytes -= item.size
                    if self._bytes <= _PATIENT_BYTES:
                        self._has_room.set()
                self._wake.clear()
                await self._wake.wait()

    def put(self, send: Callable[[], Awaitable[object]], size: int = _EVENT_BYTES) -> None:
        """Add `send` to the end of the queue. It is called after everything that is already in the queue. If too much
        waits for the client, disconnect the client instead."""
        if self.is_detached:
            return
        if self._is_patient:
            if self._bytes + size > _PATIENT_BYTES:
                self._has_room.clear()
        elif self._bytes + size > MAX_WAITING_BYTES and self._items:
            self._end(f"This client read too slowly: {self._bytes // 2**20} MiB waited for it.")
            return
        self._items.append(_WaitingItem(send, size))
        self._bytes += size
        self._wake.set()

    async def room(self) -> None:
        """Wait until a patient connection has sent most of its queue. Return at once for any other connection."""
        await self._has_room.wait()

    def publish(self, client: SessionClient, item: Event, *, is_own: bool) -> None:
        """Add an item to the queue. `client` is the object that will send the item: either this client's own
        `SessionClient`, or the one that shows a subagent to this client."""
        match item:
            case CallProgressed(call=call):
                # Each item has the whole output so far, so it replaces an older item that still waits.
                is_waiting = call in self._progress
                self._progress[call] = item
                if not is_waiting:
                    self.put(partial(self._show_progress, client, call), _size(item))
                return
            case TurnBegan() | EntryStored(entry=Entry(body=Assistant())):
                self._check_access()
        self.put(partial(client.show, item, is_own=is_own), _size(item))

    async def _show_progress(self, client: SessionClient, call: CallRef) -> None:
        await client.show(self._progress.pop(call))

    def _check_access(self) -> None:
        """Add a check to the queue. Before any later event is sent, the check finds out whether the client may still
        see the session."""
        if self.check is not None:
            self.put(partial(self.has_access, "read"))

    async def has_access(self, access: Access) -> bool:
        """Return whether the client's user still has `access` to the session. If the user may no longer see the
        session, detach the client. If the user has less access than `access`, the client may no longer write."""
        try:
            if self.check is not None:
                await self.check(access)
        except NoSuchSession:
            self._leave()
        except ArgumentError:
            self.may_write = False
        else:
            return True
        return False

    async def flushed(self) -> None:
        """Wait until all events that are in the queue now have been sent, or until the client is detached."""
        if self.is_detached or not self._items:
            return
        done = anyio.Event()
        self._flushes.add(done)
        self.put(partial(_set, done), 0)
        try:
            await done.wait()
        finally:
            self._flushes.discard(done)

    def detach(self) -> None:
        """Discard the waiting events, and end `run`."""
        self.client.close()
        self._scope.cancel()
        self._items.clear()
        self._progress.clear()
        self._has_room.set()
        for done in self._flushes:
            done.set()

    def _end(self, reason: str) -> None:
        if not self.is_detached:
            self.detach()
            self._drop(reason)


async def _set(event: anyio.Event) -> None:
    event.set()


def _size(item: Event) -> int:
    match item:
        case TextShown(text=text) | ThoughtShown(text=text) | CallProgressed(text=text) | SummaryShown(text=text):
            return _EVENT_BYTES + len(text)
        case EntryStored(entry=Entry(body=ToolResult(text=text))):
            return _EVENT_BYTES + len(text)
        case _:
            return _EVENT_BYTES
