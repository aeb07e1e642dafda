"""A transport for the protocol's SDK over WebSocket, and limits that protect uvicorn from hostile clients."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from starlette.websockets import WebSocket
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from crow.bridge.wire import peer
from crow.protocol import frames
from crow.protocol.frames import FrameError, Message
from crow.protocol.transport import FairSending, Wire

_MIB = 1024 * 1024

_FRAME_OVERHEAD_BYTES = 512
"""Crow adds this many bytes to the size of each waiting message, because the objects that hold the message take memory
too."""

MAX_PONG_BYTES = _MIB
"""While more bytes than this wait for a client, the server does not answer the client's pings. Otherwise a client that
sends pings and reads nothing could fill the server's memory."""

_MAX_REASON_BYTES = 123
"""The size of the longest text that fits into a close frame."""

_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

_EndReason = Literal[
    "client", "shutdown", "too_slow", "stalled", "silent", "no_initialize", "invalid", "replaced", "revoked"
]
"""The reason for the end of a connection, as shown in logs and metrics. `client` means that the client closed the
connection or lost it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of one connection."""

    handshake_s: float = 10.0
    """The client has this long to send its HTTP request, and then the same time to send `initialize`."""
    message_bytes: int = frames.MAX_LINE_BYTES
    """The largest message that the client may send."""
    buffered_bytes: int = 64 * _MIB
    """A client is disconnected when it has left more bytes than this unread."""
    pause_bytes: int = _MIB
    """While the client has left more bytes than this unread, replays pause, and new messages from the client are not
    read."""
    stall_s: float = 60.0
    """A client is disconnected if messages wait for it and it reads nothing for this long."""
    ping_s: float = 20.0
    """The time between two pings from the server."""
    silent_s: float = 60.0
    """A client is disconnected if it sends nothing, not even the answer to a ping, for this long."""
    unanswered: int = 1_000
    """The client may have this many requests without a response."""
    goodbye_s: float = 2.0
    """At the end, the client has this long to read the remaining messages and the close frame."""


@dataclass(slots=True)
class Traffic:
    """Counters for the messages and bytes of all connections."""

    messages_in: int = 0
    """How many messages were received."""
    messages_out: int = 0
    """How many messages were sent."""
    bytes_in: int = 0
    """How many bytes were received."""
    bytes_out: int = 0
    """How many bytes were sent."""


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """How and why a connection ends."""

    code: CloseCode
    """The code in the close frame."""
    text: str
    """The reason in the close frame, for the client's user."""
    reason: _EndReason
    """The reason in logs and metrics."""


class WebSocketTransport:
    """A :class:`crow.protocol.transport.Transport` over a WebSocket.

    Each message is one text frame. The client's first message must be `initialize`. If the client reads slowly, `send`
    waits until the client has caught up, but `post` never waits.
    """

    def __init__(self, websocket: WebSocket, limits: ConnectionLimits, traffic: Traffic) -> None:
        self._websocket = websocket
        self._socket: SocketProtocol = websocket.scope[_SOCKET]
        self._limits = limits
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._wire = Wire()
        self._sending = FairSending()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._unanswered: set[int | str] = set()
        self._initialize_by: float | None = self._loop.time() + limits.handshake_s
        self._written = 0
        self._progress = (0, 0)
        self._progress_at = 0.0
        self._stall_check: asyncio.TimerHandle | None = None
        self._is_empty: asyncio.Future[None] | None = None
        self._is_stopped = False
        self._is_gone = False
        self.end = ConnectionEnd(CloseCode.NORMAL_CLOSURE, "", "client")
        """How this connection ends. If the client ends the connection, the default stays."""
        self._socket.attach(self)

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes that wait for the client to read them."""
        return self._waiting_bytes + self._socket.unsent_bytes

    async def receive(self) -> Message | None:
        """See `Transport`."""
        while True:
            await self._has_room.wait()
            if self._is_stopped or self._is_gone:
                return None
            try:
                async with asyncio.timeout_at(self._initialize_by):
                    event = await self._websocket.receive()
            except TimeoutError:
                self.drop(ConnectionEnd(CloseCode.POLICY_VIOLATION, "No initialize came in time.", "no_initialize"))
                return None
            if event["type"] == "websocket.disconnect":
                return None
            message = self._message(event.get("text"))
            if message is not None:
                return message

    async def send(self, message: Message) -> None:
        """See `Transport`. This method waits while the client has left more than `pause_bytes` unread."""
        self.post(message)
        if self._has_room.is_set():
            await self._sending.rest()
        else:
            await self._has_room.wait()

    def post(self, message: Message) -> None:
        """Send a message without waiting. If the client now has more than `buffered_bytes` to read, disconnect it.

        :raises ConnectionError: the connection has ended.
        """
        if self._is_gone:
            if "method" in message and "id" in message:
                raise ConnectionError("The client has closed the connection.")
            return
        line = self._wire.encode(message)
        if "method" not in message:
            self._unanswered.discard(message["id"])
        self._traffic.messages_out += 1
        self._traffic.bytes_out += len(line)
        self._waiting.append(line)
        self._waiting_bytes += len(line) + _FRAME_OVERHEAD_BYTES
        self.write_waiting()
        if self._waiting_bytes and self.buffered_bytes > self._limits.buffered_bytes:
            text = f"More than {self._limits.buffered_bytes // _MIB} MiB waited for this client to read them."
            self.drop(ConnectionEnd(CloseCode.TRY_AGAIN_LATER, text, "too_slow"))

    def stop(self, reason: str = "") -> None:
        """See `Transport`."""
        if reason:
            self.drop(ConnectionEnd(CloseCode.TRY_AGAIN_LATER, reason, "too_slow"))
        self._is_stopped = True
        self._has_room.set()
        self._socket.wake_reader()

    def finish(self, end: ConnectionEnd) -> None:
        """Receive nothing more. `close` will then end the connection with `end`, once the waiting messages are sent or
        `goodbye_s` seconds have passed. Do nothing if the connection is already stopped."""
        if not self._is_stopped:
            self.end = end
            self.stop()

    def drop(self, end: ConnectionEnd) -> None:
        """End the connection at once. Discard the waiting messages."""
        if not self._is_gone:
            self.finish(end)
            self.lose()
            self._socket.say_goodbye(self.end)

    async def close(self) -> None:
        """Send the waiting messages for at most `goodbye_s` seconds, then close the connection."""
        if self._is_gone:
            return
        self._is_stopped = True
        if self._waiting:
            self._is_empty = self._loop.create_future()
            await asyncio.wait([self._is_empty], timeout=self._limits.goodbye_s)
        self.drop(self.end)

    def note_mistake(self) -> None:
        """Record that the client has violated the WebSocket protocol. The WebSocket library sends the close frame."""
        if not self._is_stopped:
            self.end = ConnectionEnd(CloseCode.PROTOCOL_ERROR, "", "invalid")

    def lose(self) -> None:
        """Mark the connection as lost, and discard the waiting messages."""
        self._is_gone = True
        self._waiting.clear()
        self._waiting_bytes = 0
        self._has_room.set()
        if self._is_empty is not None and not self._is_empty.done():
            self._is_empty.set_result(None)
        if self._stall_check is not None:
            self._stall_check.cancel()

    def write_waiting(self) -> None:
        """Write as many of the waiting messages as the client takes."""
        while self._waiting and self._socket.is_writable:
            line = self._waiting.popleft()
            self._waiting_bytes -= len(line) + _FRAME_OVERHEAD_BYTES
            self._written += 1
            self._socket.write_text(line[:-1])
        if self._is_empty is not None and not self._waiting and not self._is_empty.done():
            self._is_empty.set_result(None)
        if self.buffered_bytes <= self._limits.pause_bytes or self._is_gone:
            self._has_room.set()
        else:
            self._has_room.clear()
        if self._stall_check is None and not self._is_gone and self.buffered_bytes:
            self._progress_at = self._loop.time()
            self._check_progress()

    def _message(self, text: str | None) -> Message | None:
        """Return the message in a frame, or None if there is nothing to handle. If the frame is invalid, send the error
        response."""
        if text is None:
            # The protocol says that binary frames are ignored. The error helps the client's author to find the mistake.
            problem = "Binary frames are ignored; send each message as a text frame."
            self.post(FrameError(frames.INVALID_REQUEST, problem).response())
            return None
        line = text.encode()
        self._traffic.messages_in += 1
        self._traffic.bytes_in += len(line)
        message = self._wire.decode(line)
        if isinstance(message, FrameError):
            self.post(message.response())
        elif message is not None and (problem := self._problem_with(message)):
            if "method" in message and "id" in message:
                self.post(FrameError(frames.INVALID_REQUEST, problem, message["id"]).response())
        else:
            return message
        return None

    def _problem_with(self, message: Message) -> str:
        """Return the reason why the message cannot be handled now, or an empty string if it can be handled."""
        is_request = "method" in message and "id" in message
        if self._initialize_by is not None:
            if not is_request or message["method"] != "initialize":
                problem = "The first message of a connection must be an initialize request."
                self.finish(ConnectionEnd(CloseCode.PROTOCOL_ERROR, problem, "invalid"))
                return problem
            self._initialize_by = None
        if is_request:
            if len(self._unanswered) >= self._limits.unanswered:
                return f"{self._limits.unanswered} requests have no response yet. Wait for some of the responses."
            self._unanswered.add(message["id"])
        return ""

    def _check_progress(self) -> None:
        """Disconnect the client if it has read nothing for `stall_s`. As long as the client has unread messages, repeat
        this check."""
        self._stall_check = None
        if self._is_gone or not self.buffered_bytes:
            return
        progress, now = (self._written, self._socket.unsent_bytes), self._loop.time()
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        if now - self._progress_at >= self._limits.stall_s:
            text = f"This client read nothing for {self._limits.stall_s:g} s, although messages waited for it."
            self.drop(ConnectionEnd(CloseCode.TRY_AGAIN_LATER, text, "stalled"))
            return
        self._stall_check = self._loop.call_later(self._limits.stall_s / 4, self._check_progress)


_SOCKET = "crow.socket"
"""The key of the connection's `SocketProtocol` in the ASGI scope."""


class SocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, with limits on the memory that a hostile client can use up."""

    def __init__(self, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self._heard_at = self.loop.time()
        self._crow: WebSocketTransport | None = None
        self._has_bad_text = False
        """Whether the client has sent text that is not UTF-8."""

    def attach(self, transport: WebSocketTransport) -> None:
        """Set the transport that uses this socket."""
        self._crow = transport

    @property
    def unsent_bytes(self) -> int:
        """The number of written bytes that the operating system has not accepted yet."""
        return self.transport.get_write_buffer_size()

    @property
    def is_writable(self) -> bool:
        """Whether more bytes may be written. This is false while too many bytes are unsent, and after the connection
        was closed."""
        return self.writable.is_set() and not self.close_sent and not self.disconnected

    def write_text(self, text: bytes) -> None:
        """Write a text frame."""
        self.conn.send_text(text)
        self._flush()

    def wake_reader(self) -> None:
        """Make `receive` return as if the client had disconnected."""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.GOING_AWAY})

    def say_goodbye(self, end: ConnectionEnd) -> None:
        """Send a close frame. Abort the connection if the client does not answer the frame within `goodbye_s`."""
        if not (self.close_sent or self.disconnected or self.transport.is_closing()):
            self.conn.send_close(end.code, end.text.encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))
            self._flush()
            self.close_sent = True
            if self.read_paused:
                self.read_paused = False
                self.transport.resume_reading()
        if self.close_timer is None and not self.disconnected:
            self.close_timer = self.loop.call_later(self._limits.goodbye_s, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the client. Note the time at which they arrive, and tell the transport if the client has
        closed the connection or violated the protocol."""
        self._heard_at = self.loop.time()
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_request()
        if self._crow is not None and self.conn.state is not State.OPEN:
            if self.conn.parser_exc is not None or self._has_bad_text:
                self._crow.note_mistake()
            self._crow.lose()

    def _refuse_request(self) -> None:
        """Refuse a request that the library cannot read, such as one with a body. Without this method, uvicorn would
        send no answer and would keep the connection open without a time limit."""
        self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
        self.transport.close()

    def resume_writing(self) -> None:
        """Continue to write."""
        super().resume_writing()
        if self._crow is not None:
            self._crow.write_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the transport that the connection is lost."""
        super().connection_lost(exc)
        if self._crow is not None:
            self._crow.lose()

    async def run_asgi(self) -> None:
        """Run the application. If the connection is still open afterwards, abort it after `goodbye_s` seconds."""
        scope: Any = self.scope
        scope[_SOCKET] = self
        try:
            await super().run_asgi()
        finally:
            if not self.disconnected and self.close_timer is None:
                self.close_timer = self.loop.call_later(self._limits.goodbye_s, self.transport.abort)

    async def send(self, message: Any) -> None:
        """Send an event from the application. If the application refuses the connection, mark the handshake as
        complete, so that uvicorn does not log an error."""
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True

    def handle_text(self, event: Frame) -> None:
        """Collect the fragments of a message in one buffer. A list of tiny fragments would take far more memory."""
        super().handle_text(event)
        self._collect(event)

    def handle_bytes(self, event: Frame) -> None:
        """See `handle_text`."""
        super().handle_bytes(event)
        self._collect(event)

    def _collect(self, event: Frame) -> None:
        if not event.fin:
            self.frames: list[Any] = [bytearray(event.data)]

    def handle_cont(self, event: Frame) -> None:
        """See `handle_text`."""
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Pass a complete message to the application, or end the connection if the message is not UTF-8. Without this
        check, uvicorn would log a traceback."""
        if self.conn.state is not State.OPEN:
            self.frames = []  # the client continues to send after its mistake or after a close frame
            return
        if self.curr_msg_data_type == "text":
            try:
                for part in self.frames:
                    part.decode()
            except UnicodeDecodeError:
                self._has_bad_text = True
                self.conn.send_close(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping, unless the client leaves too many bytes unread."""
        if self.unsent_bytes > MAX_PONG_BYTES:
            self.conn.data_to_send()
        else:
            super().handle_ping()

    def send_keepalive_ping(self) -> None:
        """Send a ping, or disconnect the client if it has sent nothing for `silent_s`."""
        # While bytes are unsent, a ping waits behind them, so the client may have nothing to answer. Meanwhile, the
        # transport checks whether the client reads.
        if self._crow is not None and not self.unsent_bytes:
            silent_s = self.loop.time() - self._heard_at
            if silent_s > self._limits.silent_s:
                self._crow.drop(
                    ConnectionEnd(
                        CloseCode.TRY_AGAIN_LATER, f"This client sent nothing for {silent_s:.0f} s.", "silent"
                    )
                )
                return
        super().send_keepalive_ping()

    def _flush(self) -> None:
        self.transport.write(b"".join(self.conn.data_to_send()))


class PendingHandshakes:
    """The connections that have not sent a complete HTTP request yet, in the order in which they were opened."""

    def __init__(self, *, places: int, limits: ConnectionLimits) -> None:
        self._places = places
        """At most this many connections are kept. A further connection replaces the oldest connection, which had the
        most time to send its request."""
        self._waiting: dict[HttpProtocol, None] = {}
        self.limits = limits
        self.expired = 0
        """The number of connections that were closed because they took too long, or because there were too many."""

    def enter(self, connection: HttpProtocol) -> None:
        """Add a connection."""
        if len(self._waiting) >= self._places:
            self.expired += 1
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.transport.abort()
        self._waiting[connection] = None

    def leave(self, connection: HttpProtocol) -> None:
        """Remove a connection."""
        self._waiting.pop(connection, None)


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with a time limit for the upgrade. If a connection does not become a WebSocket in time,
    crow ends it, unless the client reads a long response."""

    def __init__(self, handshakes: PendingHandshakes, *, only_this_user: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._only_this_user = only_this_user
        """If this is true, crow also ends the connections of other users. This works only if the system tells which
        user has connected."""
        self._handshakes = handshakes
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        """How many bytes of a response were unsent when the time limit was last checked."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit. Refuse other users if `only_this_user` is set."""
        super().connection_made(transport)
        self._handshakes.enter(self)
        self._start_limit()
        owner = peer(transport.get_extra_info("socket")) if self._only_this_user else None
        if owner is not None and owner[1] != os.getuid():
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._leave()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Stop the time limit. From now on, the limits of the WebSocket transport apply."""
        self._leave()
        super().handle_websocket_upgrade(event)

    def _start_limit(self) -> None:
        self._deadline = self.loop.call_later(self._handshakes.limits.handshake_s, self._expire)

    def _expire(self) -> None:
        """End the connection. But if a long response is being sent and the client reads it, start the time limit
        again."""
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        if self._unread_bytes not in (0, before):
            self._start_limit()
            return
        self._handshakes.expired += 1
        self.transport.abort()

    def _leave(self) -> None:
        self._handshakes.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
