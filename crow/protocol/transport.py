"""Carries messages over stdin and stdout, as a transport for the protocol's SDK."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from crow.domain.errors import EditorError
from crow.protocol import frames
from crow.protocol.frames import FrameError, LineSplitter, Message

Observer: TypeAlias = Callable[[Literal["in", "out"], bytes], None]
"""A function that crow calls with each line that it receives or sends. The line comes without the newline, and before
crow handles it. The function must not raise an exception."""

_CHUNK_BYTES = 256 * 1024

MAX_WAITING_BYTES = 16 * 1024 * 1024
"""While the editor has left more bytes than this unread, crow handles no further request."""

_LINE_OVERHEAD_BYTES = 4096
"""The number of bytes that is added to the size of each waiting line, because the task that sends the line takes memory
too."""

_MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""While the editor does not read crow's output, crow still reads about this many bytes of input in advance. Otherwise,
crow would not notice the end of stdin."""

_GIVE_UP_S = 0.3
"""If the editor has closed stdin and does not read crow's output, crow waits this many seconds for the editor to read,
and then ends the connection."""

CLOSE_S = 0.2
"""`close` waits this many seconds for all waiting lines to be written."""

FINISH_S = 3.0
"""If the editor keeps reading, `close` has this many seconds in total to finish a line and to write the last
responses."""

STALLED_S = 0.5
"""An editor that has read nothing for this many seconds counts as no longer reading."""

FAIR_S = 0.005
"""After a task has sent messages without a pause for this many seconds, other tasks may run."""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def claim_stdio() -> Iterator[tuple[int, int]]:
    """Move stdin and stdout to private descriptors, which child processes do not inherit. Close these descriptors at
    the end.

    Yield the descriptor to read from and the descriptor to write to. From then on, descriptor 0 is empty, and
    descriptor 1 and `sys.stdout` discard their output, so that a stray `print` cannot break the protocol.

    :raises EditorError: stdin or stdout is closed.
    """
    problem = "stdin or stdout is closed. An editor must start `crow acp` with a pipe for each of them."
    if sys.__stdin__ is None or sys.__stdout__ is None:  # other files may have these descriptors now
        raise EditorError(problem)
    try:
        source, sink = os.dup(0), os.dup(1)
    except OSError as error:
        raise EditorError(problem) from error
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        if sys.stdout is not None:
            sys.stdout.flush()
        yield source, sink
    finally:
        os.close(source)
        os.close(sink)


class Transport(Protocol):
    """The transport of a connection. It has the methods of the SDK's `Transport`, and a method to stop it."""

    async def receive(self) -> Message | None:
        """Return the next message, or None if the client is gone. Never raise for an invalid message."""
        ...

    async def send(self, message: Message) -> None:
        """Send a message. Wait while the client reads more slowly than crow sends.

        If the client is gone, responses and notifications are discarded.

        :raises ConnectionError: `message` is a request, and the client is gone.
        """
        ...

    def stop(self, reason: str = "") -> None:
        """Act as if the client were gone, but still send pending output. Send `reason` to the client if the
        transport can do so."""
        ...

    async def close(self) -> None:
        """Send pending output for a limited time, and close the connection."""
        ...


class Wire:
    """Converts between messages and lines of JSON, and matches responses with requests."""

    def __init__(self, observe: Observer | None = None) -> None:
        self._observe: Observer = observe or (lambda _direction, _line: None)
        self._open_requests: set[int | str] = set()

    def encode(self, message: Message) -> bytes:
        """Return `message` as a line.

        :raises TypeError: a request or notification contains a value that JSON cannot represent.
        :raises RecursionError: a request or notification is nested too deeply.
        """
        if "method" in message and "id" in message:
            self._open_requests.add(message["id"])
        try:
            line = frames.encode(message)
        except (TypeError, RecursionError):
            if "method" in message or "id" not in message:
                raise
            # Every request gets a response, even if a bug in crow makes the result impossible to encode.
            logger.exception("The response to request %r cannot be encoded as JSON", message["id"])
            error = FrameError(frames.INTERNAL_ERROR, "Internal error: see crow's log.", message["id"])
            line = frames.encode(error.response())
        self._observe("out", line[:-1])
        return line

    def decode(self, line: bytes | FrameError) -> Message | FrameError | None:
        """Return the message in `line`. If the line is invalid, return the error to send as the answer. Return None
        if there is nothing to handle."""
        if isinstance(line, bytes):
            self._observe("in", line)
        message = frames.parse(line) if isinstance(line, bytes) else line
        return self._match_response(message) if isinstance(message, dict) and "method" not in message else message

    def _match_response(self, response: Message) -> Message | FrameError | None:
        """Return the response, with its id replaced by the exact id of the request. This is needed because some
        clients send a number back as a string."""
        given = response["id"]
        number = int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 20 else given
        for request_id in (given, number):
            if request_id in self._open_requests:
                self._open_requests.discard(request_id)
                return response | {"id": request_id}
        if "result" in response or "error" in response:
            return None
        return FrameError(frames.INVALID_REQUEST, "The object has no method.", given)


class FairSending:
    """Lets other tasks run while one task sends many messages without waiting."""

    def __init__(self) -> None:
        self._since: float | None = None

    async def rest(self) -> None:
        """Let other tasks run if this task has been sending for more than `FAIR_S`. Must be called after each message
        that was sent without waiting."""
        if self._since is None:
            self._since = time.monotonic()
            asyncio.get_running_loop().call_soon(self._reset)
        elif time.monotonic() - self._since > FAIR_S:
            await asyncio.sleep(0)

    def _reset(self) -> None:
        self._since = None


class StdioTransport:
    """A `Transport` over two file descriptors of any kind. Does not close the descriptors. Must be created inside the
    event loop.

    The transport itself answers lines that are not valid messages. Each task that sends a message waits until the line
    is written. So a slow editor slows down the turn, and memory use stays bounded.
    """

    def __init__(self, source: int, sink: int, *, observe: Observer | None = None) -> None:
        self._source = _open_source(source)
        self._sink = _Sink(sink, on_gone=self._source.end)
        self._wire = Wire(observe)
        self._splitter = LineSplitter(frames.MAX_LINE_BYTES)
        self._lines: deque[bytes | FrameError] = deque()
        """The lines that were received and not handled yet."""
        self._reading: asyncio.Task[bytes] | None = None
        """A read from stdin that has not ended. It began while the editor was behind with reading crow's output."""
        self._at_end = False
        """Whether stdin has ended."""
        self._stopped = False
        """Whether no more lines are handled, although stdin may not have ended."""
        self._sending = FairSending()

    async def receive(self) -> Message | None:
        """Return the next message, or None if stdin has ended or the editor has stopped reading.

        Never raise for an invalid line.
        """
        while True:
            while self._lines and not self._stopped and not self._sink.is_behind:
                message = self._message(self._lines.popleft())
                if message is not None:
                    return message
            if (self._at_end and not self._lines) or self._stopped or self._sink.is_gone:
                return None
            if self._sink.is_behind:
                data = await self._read_while_behind()
            else:
                data = await (self._reading or self._source.read())
                self._reading = None
            if data is not None:
                self._lines.extend(self._splitter.feed(data) if data else self._splitter.finish())
                self._at_end = not data

    async def send(self, message: Message) -> None:
        """Write one line, and return when the line is written. If the caller is cancelled, the whole line is still
        written.

        If the editor is gone, notifications and responses are discarded.

        :raises ConnectionError: `message` is a request, and the editor is gone.
        """
        if "method" in message and "id" in message and self._sink.is_gone:
            raise ConnectionError("The editor has closed the connection.")
        waiting = self._write(message)
        if waiting is not None:
            await waiting
        else:
            await self._sending.rest()

    def stop(self, reason: str = "") -> None:  # noqa: ARG002 - editors get no reason
        """Act as if stdin had ended, but still write pending output. May be called by a signal handler of the event
        loop."""
        self._stopped = True
        self._source.end()
        self._sink.release_waiters()

    async def close(self) -> None:
        """Write pending output for a limited time, and make the output descriptor blocking again."""
        self._source.end()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await self._sink.close()

    async def _read_while_behind(self) -> bytes | None:
        """Wait until the editor reads crow's output again or new input arrives. Return the new input, or None if
        there is none.

        Crow reads ahead to notice the end of stdin, but only up to a limit. After that end, the wait is limited.
        """
        caught_up = self._sink.caught_up()
        if self._at_end:
            await asyncio.wait([caught_up], timeout=_GIVE_UP_S)
            self._stopped = self._stopped or self._sink.is_behind
            return None
        waiting: list[asyncio.Future[Any]] = [caught_up]
        if sum(len(line) for line in self._lines if isinstance(line, bytes)) <= _MAX_UNREAD_BYTES:
            self._reading = self._reading or asyncio.ensure_future(self._source.read())
            waiting.append(self._reading)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._reading is None or not self._reading.done():
            return None
        data, self._reading = self._reading.result(), None
        return data

    def _write(self, message: Message) -> asyncio.Future[None] | None:
        return self._sink.write(self._wire.encode(message), is_response="method" not in message)

    def _message(self, line: bytes | FrameError) -> Message | None:
        """Return the message in `line`, or None if there is no message to handle. Answer an invalid line with an
        error."""
        message = self._wire.decode(line)
        if isinstance(message, FrameError):
            self._write(message.response())
            return None
        return message


@dataclass(slots=True, eq=False)
class _WaitingLine:
    """A line, or the rest of a line, that is not written yet."""

    rest: memoryview
    """The bytes that are not written yet."""
    end: asyncio.Future[None]
    """Done when the line was written or dropped."""
    is_begun: bool
    """Whether a part of the line was written. If so, its rest must be written, too."""
    is_response: bool
    """Whether the line is a response."""


class _Sink:
    """Writes whole lines to a descriptor, in order. If the reader is slow, lines wait in memory."""

    def __init__(self, fd: int, *, on_gone: Callable[[], None]) -> None:
        self._fd = fd
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_WaitingLine] = deque()
        self._waiting_bytes = 0
        self._last_read_at = self._loop.time()
        """When the reader last took some bytes."""
        self._is_ending = False
        """Whether `close` has begun to write only responses."""
        self._caught_up: asyncio.Future[None] | None = None
        self.is_gone = False
        mode = os.fstat(fd).st_mode
        # Terminals and files stay blocking. A terminal may share its flags with the shell, and a file never blocks.
        can_watch = _can_watch(fd, self._loop.add_writer, self._loop.remove_writer)
        self._was_blocking = (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and can_watch and os.get_blocking(fd)
        if self._was_blocking:
            os.set_blocking(fd, False)
        # The writing end of a pipe becomes readable only when the reading end is closed.
        self._is_watched = stat.S_ISFIFO(mode) and can_watch
        if self._is_watched:
            self._loop.add_reader(fd, self._lose_reader)

    def write(self, line: bytes, *, is_response: bool) -> asyncio.Future[None] | None:
        """Write `line`. Return None if the line could be written at once. Otherwise return a future that is done
        when the line has been written.

        `close` may discard lines that are not responses.
        """
        if self.is_gone or (self._is_ending and not is_response):
            return None
        rest = memoryview(line)
        if not self._waiting:
            self._last_read_at = self._loop.time()
            rest = self._write_some(rest)
            if not rest:
                return None
            self._loop.add_writer(self._fd, self._drain)
        end: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(_WaitingLine(rest, end, len(rest) < len(line), is_response))
        self._waiting_bytes += len(rest) + _LINE_OVERHEAD_BYTES
        return end

    @property
    def is_behind(self) -> bool:
        """Whether more bytes wait for the reader than the limit allows."""
        return self._waiting_bytes > MAX_WAITING_BYTES

    def caught_up(self) -> asyncio.Future[None]:
        """Return a future that is done when `is_behind` becomes false, or when `release_waiters` is called."""
        if self._caught_up is None or self._caught_up.done():
            self._caught_up = self._loop.create_future()
        return self._caught_up

    def release_waiters(self) -> None:
        """Complete the future that `caught_up` returned."""
        if self._caught_up is not None:
            _complete(self._caught_up)

    async def close(self) -> None:
        """Write the waiting lines.

        After `CLOSE_S`, finish the line that is partly written, and then write only responses. Stop writing if the
        reader stops reading.
        """
        started = self._loop.time()
        if self._waiting:
            await asyncio.wait([self._waiting[-1].end], timeout=CLOSE_S)
            self._is_ending = True
            self._drop([line for line in self._waiting if not (line.is_begun or line.is_response)])
        while self._waiting:
            now = self._loop.time()
            timeout_s = min(started + FINISH_S - now, self._last_read_at + STALLED_S - now)
            if timeout_s <= 0:
                break
            await asyncio.wait([self._waiting[-1].end], timeout=timeout_s)
        self._abandon()
        if self._was_blocking:
            self._was_blocking = False
            with contextlib.suppress(OSError):
                os.set_blocking(self._fd, True)

    def _write_some(self, rest: memoryview) -> memoryview:
        """Write as much of `rest` as the reader takes now, and return the remainder."""
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                return rest
            except OSError:
                self._lose_reader()
                return rest[len(rest) :]
        return rest

    def _drain(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            rest = self._write_some(line.rest)
            if self.is_gone:
                return
            written = len(line.rest) - len(rest)
            self._waiting_bytes -= written
            if written:
                self._last_read_at, line.is_begun, line.rest = self._loop.time(), True, rest
            if rest:
                break
            self._drop([line])
        if not self.is_behind:
            self.release_waiters()

    def _drop(self, lines: list[_WaitingLine]) -> None:
        """Remove lines that were written or will never be written, and let their senders continue."""
        for line in lines:
            self._waiting.remove(line)
            self._waiting_bytes -= len(line.rest) + _LINE_OVERHEAD_BYTES
            _complete(line.end)
        if lines and not self._waiting:
            self._loop.remove_writer(self._fd)

    def _lose_reader(self) -> None:
        self._abandon()
        self._on_gone()

    def _abandon(self) -> None:
        self.is_gone = True
        if self._is_watched:
            self._loop.remove_reader(self._fd)
        self._drop(list(self._waiting))
        self.release_waiters()


def _open_source(fd: int) -> _WatchedSource | _ThreadSource:
    """Return a `_WatchedSource` if the event loop can watch this kind of descriptor, else a `_ThreadSource`."""
    loop = asyncio.get_running_loop()
    # Some loops accept a file to watch, but never report the file's end.
    if stat.S_ISREG(os.fstat(fd).st_mode) or not _can_watch(fd, loop.add_reader, loop.remove_reader):
        return _ThreadSource(fd)
    return _WatchedSource(fd)


def _can_watch(fd: int, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object]) -> bool:
    """Whether the event loop can watch this descriptor. This is not possible on Windows, or if the descriptor is a
    device that is always ready."""
    try:
        add(fd, lambda: None)
        remove(fd)
    except (NotImplementedError, OSError):
        return False
    return True


class _WatchedSource:
    """Reads a pipe, socket or terminal whenever the event loop reports that there is input.

    A blocking descriptor stays blocking, because making it non-blocking would affect every process that shares it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] | None = None
        self._ended = False

    async def read(self) -> bytes:
        """Return the next bytes, or empty bytes at the end of the input. Only one task may read at a time."""
        while not self._ended:
            self._ready = self._loop.create_future()
            self._loop.add_reader(self._fd, self._wake)
            try:
                await self._ready
            finally:
                self._loop.remove_reader(self._fd)
                self._ready = None
            try:
                return b"" if self._ended else os.read(self._fd, _CHUNK_BYTES)
            except BlockingIOError:
                continue  # the parent process made the descriptor non-blocking
            except OSError:
                break  # a reset socket, or a terminal that hung up
        return b""

    def end(self) -> None:
        """Act as if the end of the input had been reached, and wake the reading task."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._ready is not None:
            _complete(self._ready)


class _ThreadSource:
    """Reads a descriptor that the event loop cannot watch. A daemon thread reads each chunk, so a read that blocks does
    not keep the process from exiting."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._chunk: asyncio.Future[bytes] | None = None
        self._ended = False

    async def read(self) -> bytes:
        """See `_WatchedSource.read`."""
        if self._ended:
            return b""
        self._chunk = self._loop.create_future()
        threading.Thread(target=self._read_chunk, name="crow-stdin", daemon=True).start()
        return await self._chunk

    def end(self) -> None:
        """See `_WatchedSource.end`."""
        self._ended = True
        self._deliver(b"")

    def _read_chunk(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except OSError:
            data = b""
        with contextlib.suppress(RuntimeError):  # the loop may have closed while this thread was blocked
            self._loop.call_soon_threadsafe(self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        if self._chunk is not None and not self._chunk.done():
            self._chunk.set_result(data)


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
