"""Memory use: a replay holds one batch, a stream its text."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from crow.domain.conversation import Projection
from crow.domain.entries import Assistant
from crow.domain.events import EntryStored, Event
from crow.frontend.view import View
from crow.llm.chat.parser import ChatParser
from crow.llm.sse import SseDecoder
from crow.protocol.params import client_capabilities
from crow.store.codec import encode
from crow.store.paths import TAIL_BYTES
from crow.store.sqlite.store import SqliteStore
from tests.guards.long import SESSION, grow
from tests.guards.test_updates import END, Shown, followed
from tests.store.scenes import add, begin, new_session, result, said
from tests.support.fake_endpoint import chunk, sse

CHUNKS = 20_000
HELD, STREAMED, WRITTEN = 2.3, 3.4, 4.4
"""Multiples of the answer's size: what stays after it (the answer and its shown text, until it is stored), and the
peaks while it streams and while it is stored."""

PER_ENTRY = 20
"""Bytes for each entry id of a path, which are kept in a growing array."""


class Told(Shown):
    """A client that drops every update."""

    def __init__(self, live: View) -> None:
        super().__init__()
        self._live = live

    async def publish(self, event: Event) -> None:
        self._live.apply(event)


class Memory:
    """Bytes allocated since the start of the measurement."""

    def __init__(self) -> None:
        self._before = tracemalloc.get_traced_memory()[0]

    @property
    def held(self) -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - self._before

    @property
    def peak(self) -> int:
        return tracemalloc.get_traced_memory()[1] - self._before


@contextmanager
def watched() -> Iterator[Memory]:
    gc.collect()
    tracemalloc.start()
    try:
        yield Memory()
    finally:
        tracemalloc.stop()


async def replayed(path: Path, entries: int) -> tuple[int, int]:
    """The peak in bytes while a session of this many entries is replayed, and the number of updates."""
    await grow(path, entries)
    store = await SqliteStore.open(path)
    try:
        with watched() as memory:
            view = View(client_capabilities({"clientCapabilities": {}}), session_id=SESSION, is_reading=True)
            count = 0
            async for batch in store.history(SESSION):
                for entry in batch:
                    count += len(view.apply(EntryStored(entry=entry)))
            return memory.peak, count
    finally:
        await store.close()


@pytest.mark.long
async def test_a_replay_needs_memory_for_one_batch_and_the_ids(tmp_path: Path) -> None:
    short, few = await replayed(tmp_path / "short.db", 2_000)
    long, many = await replayed(tmp_path / "long.db", 6_000)
    assert (few, many) == (1_201, 3_601)  # the remark about the checkpoint is one of them
    assert short <= 1024 * 1024
    assert long - short <= 4_000 * PER_ENTRY + 64 * 1024


async def test_a_long_answer_needs_a_small_multiple_of_its_size() -> None:
    size, piece = 2_000_000, "".join(f"The nest is built of {number} twigs. " for number in range(80))
    reads = [sse(chunk({"content": piece}), done=False)] * (size // len(piece))
    live = View(client_capabilities({}), session_id="s")
    with watched() as memory:
        answer = await followed([*reads, END], Told(live))
        streamed = memory.peak
        assert memory.held <= HELD * size
        tracemalloc.reset_peak()
        stored = encode(Assistant(text=answer.text, message_id="m"))
        written = memory.peak
    assert answer.text == piece * len(reads)
    assert [len(data) > size * 0.9 for data in stored.blobs.values()] == [True]
    assert streamed <= STREAMED * size
    assert written <= WRITTEN * size


@pytest.mark.long
def test_a_stream_keeps_nothing_but_its_text() -> None:
    burst = [sse(chunk({"content": f"t{number} "}), done=False) for number in range(CHUNKS)]
    text = "".join(f"t{number} " for number in range(CHUNKS))
    decoder, parser = SseDecoder(), ChatParser(())
    with watched() as memory:
        for piece in burst:
            parser.feed(decoder.feed(piece))
        pieces = memory.held
        assert parser.partial().text == text
    assert pieces <= CHUNKS * 80  # a short string and its place in a list


async def opened(path: Path, steps: int) -> tuple[int, int]:
    """The peak in bytes while a session that was never compacted is opened, and the number of entries in its tail."""
    store = await SqliteStore.open(path)
    try:
        await store.create_session(new_session())
        await begin(store, "s1", "go")
        for number in range(steps):
            (answer,) = await add(store, "s1", said(f"look {number}", calls=1))
            await add(store, "s1", result(answer.id, f"{number} twigs ".ljust(100_000, "x")))
        with watched() as memory:
            tail = await store.open_session("s1")
            Projection(tail.entries).context()
            return memory.peak, len(tail.entries)
    finally:
        await store.close()


@pytest.mark.long
async def test_a_session_that_was_never_compacted_opens_in_bounded_memory(tmp_path: Path) -> None:
    long, kept = await opened(tmp_path / "long.db", 150)
    longer, kept_of_longer = await opened(tmp_path / "longer.db", 300)
    assert kept_of_longer == kept
    assert kept < 200
    assert long <= 2.5 * TAIL_BYTES
    assert abs(longer - long) <= 256 * 1024
