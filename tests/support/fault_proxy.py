"""A proxy on loopback that cuts, half-closes, stalls, delays and splits what passes, at bytes that a seed decides."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Self

KINDS = ("cut", "cut", "reset", "half-close", "half-close back", "stall")


class FaultProxy:
    """Forwards TCP connections to a Unix socket. Each connection ends in one fault, while `is_hostile`."""

    def __init__(self, target: Path, *, seed: int, kinds: tuple[str, ...] = KINDS, median_bytes: int = 2500) -> None:
        self._target, self._kinds, self._median = target, kinds, median_bytes
        self._random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.is_hostile = True
        self._is_away = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}/acp"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def go_away(self) -> None:
        """Cut all connections, and let no new one through until `come_back`."""
        self._is_away = True
        for writer in tuple(self._writers):
            writer.transport.abort()

    def come_back(self) -> None:
        """Let connections through again."""
        self._is_away = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._is_away:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        link = Link(self, self._random.choice(self._kinds), self._budget())
        try:
            await asyncio.gather(link.forward(reader, far_writer, 0), link.forward(far_reader, writer, 1))
        except (Cut, OSError):
            pass
        finally:
            self._writers -= {writer, far_writer}
            for each in (writer, far_writer):
                if link.kind == "reset":
                    each.transport.abort()
                with suppress(RuntimeError):  # the loop is closing
                    each.close()

    def _budget(self) -> int:
        """After how many bytes the fault comes: sometimes within the first request, sometimes after a whole turn."""
        return int(self._median * self._random.lognormvariate(0, 1))

    def chunk(self, data: bytes) -> list[bytes]:
        """`data`, sometimes in pieces."""
        if len(data) < 2 or self._random.random() < 0.8:
            return [data]
        at = self._random.randrange(1, len(data))
        return [data[:at], data[at:]]

    def delay_s(self) -> float:
        """How long a piece is held back: mostly not at all."""
        return self._random.random() * 0.004 if self._random.random() < 0.1 else 0.0


class Cut(Exception):
    """The connection ends here."""


class Link:
    """One connection through the proxy, and the fault that ends it."""

    def __init__(self, proxy: FaultProxy, kind: str, budget: int) -> None:
        self._proxy, self.kind, self._left = proxy, kind, budget
        self._closed_direction = {"half-close": 0, "half-close back": 1}.get(kind)
        self._is_faulty = False

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        """Carry bytes in one direction until the fault or the end."""
        while data := await reader.read(4096):
            for piece in self._proxy.chunk(data):
                if delay_s := self._proxy.delay_s():
                    await asyncio.sleep(delay_s)
                passed = piece[: max(0, self._left)] if self._proxy.is_hostile else piece
                self._left -= len(piece) if self._proxy.is_hostile else 0
                if passed and not (self._is_faulty and self.kind == "stall"):
                    writer.write(passed)
                if len(passed) < len(piece):
                    await self._fault(writer, direction)
        with suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _fault(self, writer: asyncio.StreamWriter, direction: int) -> None:
        if not self._is_faulty:
            self._is_faulty = True
            self._proxy.faults[self.kind] += 1
        if self.kind == "stall":
            return  # nothing passes any more, and nobody is told
        if self._closed_direction is None or self._closed_direction != direction:
            raise Cut
        with suppress(OSError, RuntimeError):
            writer.write_eof()
