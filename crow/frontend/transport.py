"""Bytes in and out of file descriptors of any kind, for one event loop.

Strategy: where the loop can watch a descriptor it does, else a thread or a plain call takes its place. A source gives
a chunk when one is asked for. A sink writes with one system call while the reader keeps up; what does not go waits in
order. Knows nothing of lines.
"""

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
from crow.frontend.frames import MAX_LINE_BYTES, FrameError, LineSplitter, Message, Oversized, encode, parse

__all__ = ["MOST_WAITING_BYTES", "Observer", "Sink", "Source", "StdioTransport", "claim_stdio", "source_of"]

CHUNK_BYTES = 256 * 1024

MOST_WAITING_BYTES = 16 * 1024 * 1024
LINE_OVERHEAD_BYTES = 4096
"""A line that waits costs this much beside its bytes: who sends it waits too."""


class Source(Protocol):
    """Where bytes come from. Read by one task."""

    async def read(self) -> bytes:
        """The next bytes, at least one; none at the end."""
        ...

    def end(self) -> None:
        """Act as if the end had come; wakes who reads."""
        ...


def source_of(fd: int) -> Source:
    """The source that suits what `fd` is. To be called inside the running loop."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return FileSource(fd)
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(fd, lambda: None)
        loop.remove_reader(fd)
    except (NotImplementedError, OSError):
        # The loop cannot watch it: Windows, or a device that is always ready.
        return ThreadSource(fd)
    return WatchedSource(fd)


@dataclass(slots=True)
class FileSource:
    """A regular file: always ready."""

    fd: int
    ended: bool = False

    async def read(self) -> bytes:
        return b"" if self.ended else os.read(self.fd, CHUNK_BYTES)

    def end(self) -> None:
        self.ended = True


class WatchedSource:
    """A pipe, socket or terminal. Read when it is ready, so it never has to be made non-blocking: that flag would
    show in every process that shares it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] | None = None
        self._ended = False

    async def read(self) -> bytes:
        if self._ended:
            return b""
        self._ready = self._loop.create_future()
        self._loop.add_reader(self._fd, self._wake)
        try:
            await self._ready
        finally:
            self._loop.remove_reader(self._fd)
            self._ready = None
        if self._ended:
            return b""
        try:
            return os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return await self.read()  # whoever gave us the descriptor had made it non-blocking
        except OSError:
            return b""  # a reset socket or a terminal that hung up: nothing more will come

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


class ThreadSource:
    """What the loop cannot watch: a daemon thread blocks in `read`, one chunk for each that is asked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Semaphore(0)
        self._chunk: asyncio.Future[bytes] | None = None
        self._ended = False
        threading.Thread(target=self._run, name="crow-stdin", daemon=True).start()

    async def read(self) -> bytes:
        if self._ended:
            return b""
        self._chunk = self._loop.create_future()
        self._wanted.release()
        return await self._chunk

    def end(self) -> None:
        self._ended = True
        self._give(b"")
        self._wanted.release()

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._ended:
                return
            try:
                data = os.read(self._fd, CHUNK_BYTES)
            except OSError:
                data = b""
            # The loop may have closed while this thread was blocked.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._give, data)
            if not data:
                return

    def _give(self, data: bytes) -> None:
        if self._chunk is not None and not self._chunk.done():
            self._chunk.set_result(data)


@dataclass(slots=True)
class WaitingLine:
    """A line that has not left yet, or the rest of one. `left` is done when it has."""

    rest: memoryview
    left: asyncio.Future[None]
    is_begun: bool
    is_needed: bool


class Sink:
    """Lines out, whole and in order."""

    def __init__(self, fd: int, *, on_gone: Callable[[], None], most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self._fd = fd
        self._most_waiting_bytes = most_waiting_bytes
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[WaitingLine] = deque()
        self._waiting_bytes = 0
        self._taken_at = self._loop.time()
        self._is_ending = False
        self._relief: asyncio.Future[None] | None = None
        self.is_gone = False
        mode = os.fstat(fd).st_mode
        # A terminal may share its state with the shell and a file never blocks: both are written to as they are.
        self._was_blocking = (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and _can_watch(self._loop, fd)
        if self._was_blocking:
            self._was_blocking = os.get_blocking(fd)
            os.set_blocking(fd, False)
        # The writing end of a pipe has nothing to read but the news that nobody reads at the other.
        self._is_watched = stat.S_ISFIFO(mode) and _can_watch(self._loop, fd)
        if self._is_watched:
            self._loop.add_reader(fd, self._vanish)

    def write(self, line: bytes, *, is_needed: bool = True) -> asyncio.Future[None] | None:
        """Write `line` now (None), or take it and say when it has left. `close` may drop one that is not needed."""
        if self.is_gone or (self._is_ending and not is_needed):
            return None
        rest = memoryview(line)
        if not self._waiting:
            self._taken_at = self._loop.time()
            rest = self._push(rest)
            if not rest:
                return None
            self._loop.add_writer(self._fd, self._drain)
        left: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(WaitingLine(rest, left, len(rest) < len(line), is_needed))
        self._waiting_bytes += len(rest) + LINE_OVERHEAD_BYTES
        return left

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the reader that nothing should be asked of crow meanwhile."""
        return self._waiting_bytes > self._most_waiting_bytes

    def relief(self) -> asyncio.Future[None]:
        """Done when it is no longer behind, or `relieve` was called."""
        if self._relief is None or self._relief.done():
            self._relief = self._loop.create_future()
        return self._relief

    def relieve(self) -> None:
        """Let nobody wait for relief any longer."""
        if self._relief is not None and not self._relief.done():
            self._relief.set_result(None)

    async def close(self, *, timeout_s: float, finish_s: float, stalled_s: float) -> None:
        """Write what waits, for `timeout_s`. After that only the line that is begun and those that are needed are
        written on, for `finish_s` in all, and only while the reader takes some of it every `stalled_s`."""
        begun = self._loop.time()
        if self._waiting:
            await asyncio.wait([self._waiting[-1].left], timeout=timeout_s)
            self._drop_unneeded()
        while self._waiting and (left_s := begun + finish_s - self._loop.time()) > 0:
            patience_s = self._taken_at + stalled_s - self._loop.time()
            if patience_s <= 0:
                break
            await asyncio.wait([self._waiting[-1].left], timeout=min(left_s, patience_s))
        self._give_up()
        if self._was_blocking:
            self._was_blocking = False
            with contextlib.suppress(OSError):
                os.set_blocking(self._fd, True)

    def _drop_unneeded(self) -> None:
        self._is_ending = True
        kept = deque(line for line in self._waiting if line.is_begun or line.is_needed)
        for line in self._waiting:
            if not (line.is_begun or line.is_needed) and not line.left.done():
                line.left.set_result(None)
        self._waiting = kept
        self._waiting_bytes = sum(len(line.rest) + LINE_OVERHEAD_BYTES for line in kept)
        if not kept:
            self._loop.remove_writer(self._fd)

    def _push(self, rest: memoryview) -> memoryview:
        """Write as much as goes; what is left of it."""
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                return rest
            except OSError:
                self._vanish()
                return rest[len(rest) :]
        return rest

    def _vanish(self) -> None:
        self._give_up()
        self._on_gone()

    def _drain(self) -> None:
        while self._waiting:
            line = self._waiting[0]
            rest = self._push(line.rest)
            if self.is_gone:
                return
            taken = len(line.rest) - len(rest)
            self._waiting_bytes -= taken
            if taken:
                self._taken_at, line.is_begun = self._loop.time(), True
            if rest:
                line.rest = rest
                break
            self._waiting.popleft()
            self._waiting_bytes -= LINE_OVERHEAD_BYTES
            if not line.left.done():
                line.left.set_result(None)
        else:
            self._loop.remove_writer(self._fd)
        if not self.is_behind:
            self.relieve()

    def _give_up(self) -> None:
        self.is_gone = True
        if self._is_watched:
            self._loop.remove_reader(self._fd)
        if self._waiting:
            self._loop.remove_writer(self._fd)
        for line in self._waiting:
            if not line.left.done():
                line.left.set_result(None)
        self._waiting.clear()
        self._waiting_bytes = 0
        self.relieve()


def _can_watch(loop: asyncio.AbstractEventLoop, fd: int) -> bool:
    try:
        loop.add_writer(fd, lambda: None)
        loop.remove_writer(fd)
    except (NotImplementedError, OSError):
        return False
    return True


# FROM frontend.transport: The protocol's two file descriptors, as the SDK's connection wants them: messages in,
# messages out.
#
# Strategy: stdin and stdout are moved to private descriptors first, so that neither a stray print nor a child process
# can touch the protocol. Reading is on demand: a chunk when a message is asked for. A line that is no message is
# answered
# here and goes no further; behind a slow editor each sender waits for its own line, which slows the turn instead of
# growing memory, and behind one that reads nothing more no further request is begun. Knows JSON-RPC ids, no method.


Observer: TypeAlias = Callable[[Literal["in", "out"], bytes], None]
"""Told every line of either direction, without its newline, before it is acted on; must not raise."""

HELD_BYTES = 4 * 1024 * 1024
"""What is read, and not looked at, of an editor that does not read itself."""

GIVE_UP_S = 0.3
"""How long the rest of what was asked waits for an editor that has closed stdin and does not read."""

CLOSE_S = 0.2
"""How long `close` waits for everything that was said to leave."""

FINISH_S = 3.0
"""How long in all `close` waits for a begun line and the last answers, while a slow editor goes on reading."""

STALLED_S = 0.5
"""An editor that took nothing for so long reads no more."""

FAIR_S = 0.005
"""A task that sends without ever waiting gives the others a turn this often."""

log = logging.getLogger(__name__)


@contextlib.contextmanager
def claim_stdio(*, stray_output: int | None = None) -> Iterator[tuple[int, int]]:
    """Move stdin and stdout to private descriptors, closed at the end and never inherited: (read, write).

    From here on descriptor 0 is empty and descriptor 1 goes to `stray_output`, a descriptor such as the log file's, or
    nowhere; so does `sys.stdout` with all that it still holds back.

    :raises EditorError: stdin or stdout is closed.
    """
    try:
        source, sink = os.dup(0), os.dup(1)
    except OSError as error:
        raise EditorError(
            "stdin or stdout is closed; crow acp is started by an editor, which talks to it there."
        ) from error
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing if stray_output is None else stray_output, 1)
        os.close(nothing)
        if sys.stdout is not None:
            sys.stdout.flush()
        yield source, sink
    finally:
        os.close(source)
        os.close(sink)


class StdioTransport:
    """The SDK's `Transport` over two descriptors: pipes, sockets, terminals and files alike.

    Neither is closed here. To be made and used inside the running event loop.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        observe: Observer | None = None,
    ) -> None:
        self._source = source_of(source)
        self._sink = Sink(sink, on_gone=self._source.end, most_waiting_bytes=most_waiting_bytes)
        self._observe = observe
        self._splitter = LineSplitter(limit=max_line_bytes)
        self._lines: deque[bytes | Oversized] = deque()
        self._reading: asyncio.Task[bytes] | None = None
        self._at_end = False
        self._stopped = False
        self._asked: set[int | str] = set()
        self._sending_since: float | None = None

    async def receive(self) -> Message | None:
        """The next message; None when stdin has ended or the editor stopped reading. Malformed lines are answered on
        the way and never raise."""
        while True:
            while self._lines and not self._stopped and not self._sink.is_behind:
                message = self._look_at(self._lines.popleft())
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

    async def _read_while_behind(self) -> bytes | None:
        """Wait until the editor reads again; meanwhile read on, within a bound, to see the end of stdin."""
        relief = self._sink.relief()
        if self._at_end:
            await asyncio.wait([relief], timeout=GIVE_UP_S)
            self._stopped = self._stopped or self._sink.is_behind
            return None
        waiting: list[asyncio.Future[Any]] = [relief]
        if sum(len(line) for line in self._lines if isinstance(line, bytes)) <= HELD_BYTES:
            self._reading = self._reading or asyncio.ensure_future(self._source.read())
            waiting.append(self._reading)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._reading is None or not self._reading.done():
            return None
        data, self._reading = self._reading.result(), None
        return data

    def stop(self) -> None:
        """Read no more, as if stdin had ended; what is written still leaves. Callable from a signal handler of the
        loop."""
        self._stopped = True
        self._source.end()
        self._sink.relieve()

    async def send(self, message: Message) -> None:
        """Write one line; returns when it has left. After the editor vanished, notifications and responses go nowhere.

        Cancelled while it waits, the line is still written whole.

        :raises ConnectionError: a request to an editor that has vanished.
        """
        if "method" in message and "id" in message:
            if self._sink.is_gone:
                raise ConnectionError("The editor has closed the connection.")
            self._asked.add(message["id"])
        waiting = self._write(message)
        if waiting is not None:
            await waiting
        elif self._sending_since is None:
            self._sending_since = time.monotonic()
            asyncio.get_running_loop().call_soon(self._others_had_a_turn)
        elif time.monotonic() - self._sending_since > FAIR_S:
            await asyncio.sleep(0)

    def _others_had_a_turn(self) -> None:
        self._sending_since = None

    def _write(self, message: Message) -> asyncio.Future[None] | None:
        line = _line(message)
        if self._observe is not None:
            self._observe("out", line[:-1])
        return self._sink.write(line, is_needed="method" not in message)

    async def close(self) -> None:
        """Write what waits and let go of the descriptors; both are left open and blocking.

        Behind a slow editor, updates that were not begun are dropped after 200 ms; a begun line and the responses have
        3 s while it reads.
        """
        self._source.end()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await self._sink.close(timeout_s=CLOSE_S, finish_s=FINISH_S, stalled_s=STALLED_S)

    def _look_at(self, line: bytes | Oversized) -> Message | None:
        if isinstance(line, Oversized):
            self._write(line.fault().response())
            return None
        if self._observe is not None:
            self._observe("in", line)
        message = parse(line)
        if isinstance(message, dict) and "method" not in message:
            message = self._expected(message)
        if isinstance(message, FrameError):
            self._write(message.response())
            return None
        return message

    def _expected(self, response: Message) -> Message | FrameError | None:
        """The response under the id that was asked; some clients send numbers back as strings."""
        given = response["id"]
        for asked in (given, int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 20 else given):
            if asked in self._asked:
                self._asked.discard(asked)
                return response | {"id": asked}
        if "result" in response or "error" in response:
            return None
        return FrameError(code=-32600, words="The object has no method.", id=given)


def _line(message: Message) -> bytes:
    try:
        return encode(message)
    except (TypeError, RecursionError):
        if "method" in message or "id" not in message:
            raise
        # A request is always answered, even where our answer has a fault.
        log.exception("The response to request %r has no JSON", message["id"])
        return encode(FrameError(code=-32603, words="Internal error: see crow's log.", id=message["id"]).response())
