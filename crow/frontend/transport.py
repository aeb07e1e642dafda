"""The protocol's two file descriptors, as the SDK's connection wants them: messages in, messages out.

Strategy: stdin and stdout are moved to private descriptors first, so that neither a stray print nor a child process
can touch the protocol. Reading is on demand: a chunk when a message is asked for. A line that is no message is answered
here and goes no further; behind a slow editor each sender waits for its own line, which slows the turn instead of
growing memory, and behind one that reads nothing more no further request is begun. Knows JSON-RPC ids, no method.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from crow.domain.errors import EditorError
from crow.frontend.descriptors import MOST_WAITING_BYTES, Sink, source_of
from crow.frontend.frames import MAX_LINE_BYTES, Fault, LineSplitter, Message, Oversized, encode, parse

__all__ = ["Observer", "StdioTransport", "claim_stdio"]

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
        if isinstance(message, Fault):
            self._write(message.response())
            return None
        return message

    def _expected(self, response: Message) -> Message | Fault | None:
        """The response under the id that was asked; some clients send numbers back as strings."""
        given = response["id"]
        for asked in (given, int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 20 else given):
            if asked in self._asked:
                self._asked.discard(asked)
                return response | {"id": asked}
        if "result" in response or "error" in response:
            return None
        return Fault(code=-32600, words="The object has no method.", id=given)


def _line(message: Message) -> bytes:
    try:
        return encode(message)
    except (TypeError, RecursionError):
        if "method" in message or "id" not in message:
            raise
        # A request is always answered, even where our answer has a fault.
        log.exception("The response to request %r has no JSON", message["id"])
        return encode(Fault(code=-32603, words="Internal error: see crow's log.", id=message["id"]).response())
