"""Measures the size of a database after a month of use: `python -m benchmarks.month`.

Each day, sessions are created, older ones go on, and two thirds as many are deleted at random, as a person would. Then
crow tidies, as it does when it is idle. The size of all files is compared with the content that is left: the bodies of
entries, and each output, file and image once.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.giant import Writer, corpus
from benchmarks.rows import Row, arguments, report
from crow.store import NewSession
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore

__all__: Sequence[str] = ()

LIMIT = 1.3
DRAFT_PIECES = 20


@dataclass(frozen=True, kw_only=True)
class DaySize:
    """Bytes at the end of a day: of all files, of the content, and of what could be given back."""

    files: int
    content: int
    free: int
    drafts: int
    log: int

    @property
    def ratio(self) -> float:
        return self.files / self.content


async def live(path: Path, *, days: int, sessions: int, mean: int, seed: int = 3) -> list[DaySize]:
    """Use a new database for some days, with this many new sessions a day and outputs of `mean` bytes."""
    store = await SqliteStore.open(path)
    lines, chance, writers, sizes = corpus(), random.Random(seed), dict[str, Writer](), list[DaySize]()
    try:
        for day in range(days):
            for number in range(sessions):
                writer, name = Writer(store, lines, 1_000 * day + number), f"day{day}-{number}"
                new = NewSession(id=name, cwd="/repo", model="offline", mode="ask", title=writer.words(4))
                await store.create_session(new)
                writers[name] = writer
                for _ in range(1 + int(chance.expovariate(0.5))):
                    await writer.run_turn(name, steps=6, mean=mean)
            for name in chance.sample(sorted(writers), max(1, sessions // 3)):
                await go_on(writers[name], name, mean)
            for name in chance.sample(sorted(writers), sessions * 2 // 3):
                await store.delete_session(name)
                del writers[name]
            await store.tidy()
            sizes.append(await size_of(store))
    finally:
        await store.close()
    return sizes


async def go_on(writer: Writer, session: str, mean: int) -> None:
    """Run another turn, whose first answer is saved while it is streamed."""
    await writer.store.take_turn(session, None, leaf=writer.leaf)
    for _ in range(DRAFT_PIECES):
        text = writer.words(80)
        leaf, turn = writer.leaf, writer.turn
        await writer.store.save_draft(session, after_leaf=leaf, turn=turn, message_id="m", text=text, thought="")
    await writer.run_turn(session, steps=6, mean=mean)


async def size_of(store: SqliteStore) -> DaySize:
    path = store.database.path
    uses = {use.what: use.bytes for use in await SessionAdmin(store).disk_use()}
    return DaySize(
        files=sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*") if not file.name.endswith("-shm")),
        content=sum(size for what, size in uses.items() if what.startswith(("entries: ", "blobs: "))),
        free=uses["free pages"],
        drafts=uses["drafts"],
        log=uses.get("write-ahead log", 0),
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--mean", type=int, default=6_000)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="crow-bench-"))
    since, cpu_since = time.perf_counter(), time.process_time()
    try:
        sizes = asyncio.run(
            live(directory / "crow.db", days=options.days, sessions=options.sessions, mean=options.mean)
        )
    finally:
        shutil.rmtree(directory)
    taken, last = (time.perf_counter() - since) * 1e3, sizes[-1]
    settled = [size.ratio for size in sizes[len(sizes) // 3 :]]
    rows = [
        Row(f"{options.days} days", taken, taken, "ms", cpu=(time.process_time() - cpu_since) * 1e3),
        Row("content that is left", last.content / 1e6, last.content / 1e6, "MB"),
        Row("all files", last.files / 1e6, last.files / 1e6, "MB"),
        Row("  for each byte of content", last.ratio, max(settled), "", LIMIT),
        Row("  free pages, drafts and write-ahead log", last.free + last.drafts + last.log, 0.0, "bytes", 0),
    ]
    report(rows, options.json)


if __name__ == "__main__":
    main()
