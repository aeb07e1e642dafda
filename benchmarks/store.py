"""Measures the store as sessions grow: `python -m benchmarks.store [--json FILE] [--entries N]`.

The store fills the database once (a session of 100,000 entries with a checkpoint every 400, and 10,000 sessions to
list). Each row then times one call many times. Times include the switch to the store's thread and back, and the
flush of a write. The ACP row measures a real process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, Row, arguments, flush_ms, report
from crow.domain.entries import Assistant, Checkpoint, NewEntry, Prompt, TurnEnd, User
from crow.domain.messages import Text, Usage
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore

__all__: Sequence[str] = ()

PER_CHECKPOINT = 400
WORDS = "The nest is built of twigs, string and whatever else the wind has left. " * 4


def prompt() -> NewEntry:
    return NewEntry(body=User(parts=(Text(text=WORDS),), message_id="u"), model="m")


def answer() -> NewEntry:
    return NewEntry(body=Assistant(text=WORDS, message_id="a"), model="m", usage=Usage(input_tokens=9, output_tokens=9))


async def grow(store: SqliteStore, session: str, entries: int) -> int:
    """Make a session of this many entries; returns its leaf."""
    await store.create_session(NewSession(id=session, cwd="/repo", model="m", mode="ask"))
    system = Prompt(system=WORDS * 20, tools=(), cwd="/repo", model="m")
    leaf = (await store.append(session, leaf=None, turn=1, entries=[NewEntry(body=system)]))[-1].id
    end = NewEntry(body=TurnEnd(stop="end_turn"))
    made = 1
    while made < entries:
        chain = [entry for _ in range(PER_CHECKPOINT // 3) for entry in (prompt(), answer(), end)]
        summary = Checkpoint(
            compaction_id="c", summary=WORDS, first_kept=leaf, method="prefix", tokens_before=9, tokens_after=1
        )
        chain = [NewEntry(body=system), NewEntry(body=summary), *chain]
        stored = await store.append(session, leaf=leaf, turn=1, entries=chain[: entries - made])
        leaf, made = stored[-1].id, made + len(stored)
    await store.tidy()
    return leaf


async def timed(
    what: str,
    times: int,
    call: Callable[[], Awaitable[Any]],
    *,
    limit: float | None = None,
    after: Callable[[], Awaitable[Any]] | None = None,
) -> Row:
    """Milliseconds of `times` calls after a warm-up call. `after` resets the state and is not timed."""
    await call()
    if after is not None:
        await after()
    taken, computed = [], []
    for _ in range(times):
        since, cpu_since = time.perf_counter(), time.process_time()
        await call()
        taken.append((time.perf_counter() - since) * 1000)
        computed.append((time.process_time() - cpu_since) * 1000)
        if after is not None:
            await after()
    return Row(what, statistics.median(taken), max(taken), "ms", limit, statistics.median(computed))


def flush_row(directory: Path) -> Row:
    """The disk's time for one page; every write below takes at least one of these."""
    taken = flush_ms(directory, 100)
    return Row("flush one page to this disk, for comparison", statistics.median(taken), max(taken), "ms")


async def open_and_take(store: SqliteStore, session: str) -> None:
    """Open the session, add a prompt to the inbox, start its turn."""
    tail = await store.open_session(session)
    await store.enqueue(session, (Text(text=WORDS),), "u")
    await store.take_turn(session, "u", leaf=tail.row.leaf)


async def give_back(store: SqliteStore, session: str) -> None:
    row = await store.session(session)
    end = NewEntry(body=TurnEnd(stop="end_turn"))
    await store.append(session, leaf=row.leaf, turn=1, entries=[end], release=True)


async def append_rows(store: SqliteStore, long: str, entries: int) -> list[Row]:
    """Append steps alternately to a short and a long session, so a busy machine affects both alike."""
    taken: dict[str, list[float]] = {"short": [], long: []}
    for _ in range(200):
        for session, times in taken.items():
            row = await store.session(session)
            since = time.perf_counter()
            await store.append(session, leaf=row.leaf, turn=1, entries=[answer()])
            times.append((time.perf_counter() - since) * 1000)
    return [
        Row(f"append a step at entry {at:,}", statistics.median(times), max(times), "ms")
        for at, times in zip((100, entries), taken.values(), strict=True)
    ]


async def sessions_rows(store: SqliteStore, long: str, entries: int) -> list[Row]:
    """A long session compared with a short one."""
    await grow(store, "short", 100)
    rows = [
        *await append_rows(store, long, entries),
        await timed(f"open a session of {entries:,} entries", 50, lambda: store.open_session(long), limit=20),
        await timed(
            "open it and take a prompt (two flushes)",
            50,
            lambda: open_and_take(store, long),
            limit=20,
            after=lambda: give_back(store, long),
        ),
    ]
    source, names = await store.session(long), iter(range(10_000))

    async def fork() -> None:
        new = NewSession(
            id=f"fork{next(names)}",
            cwd="/repo",
            model="m",
            mode="ask",
            conversation=source.conversation,
            leaf=source.leaf,
        )
        await store.create_session(new)

    return [*rows, await timed(f"fork a session of {entries:,} entries", 50, fork, limit=20)]


async def replay_row(store: SqliteStore, session: str, entries: int) -> list[Row]:
    """Time and memory of reading a whole history, in batches."""
    batch: Sequence[Any] = ()
    since, count = time.perf_counter(), 0
    async for batch in store.history(session):
        count += len(batch)
    batch = ()
    taken = (time.perf_counter() - since) * 1000
    tracemalloc.start()
    async for batch in store.history(session):
        assert batch
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count >= entries
    return [
        Row(f"replay all {count:,} entries", taken, taken, "ms"),
        Row("  memory at its peak", peak / 2**20, peak / 2**20, "MiB", 16),
    ]


async def many(store: SqliteStore, number: int) -> None:
    """Make many short sessions in few transactions. They are only listed."""
    for index in range(number):
        if index == 0:
            await store.create_session(NewSession(id="s0", cwd="/repo", model="m", mode="ask"))
            await store.enqueue("s0", (Text(text="hello"),), "u")
            start = await store.take_turn("s0", "u", leaf=None)
            await store.append("s0", leaf=start.entries[-1].id, turn=1, entries=[], release=True)
    template = await store.session("s0")

    def copy(sql: Any) -> None:
        columns = [row[1] for row in sql.execute("PRAGMA table_info(sessions)") if row[1] not in ("number", "id")]
        values = ", ".join("newest_entry + value" if name == "newest_entry" else name for name in columns)
        sql.execute(
            f"INSERT INTO sessions (id, {', '.join(columns)}) SELECT 's' || value, {values} FROM sessions,"
            f" (WITH RECURSIVE n (value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < {number - 1})"
            f" SELECT value FROM n) WHERE id = '{template.id}'"
        )

    await store.database.write(copy)  # the public way would take minutes


async def list_rows(store: SqliteStore, number: int) -> list[Row]:
    def query(_: object = None) -> Awaitable[Any]:
        return store.sessions(limit=50)

    page = await store.sessions(limit=50)
    for _ in range(number // 100):
        page = await store.sessions(limit=50, cursor=page.cursor)
    cursor = page.cursor
    return [
        await timed(f"list 50 of {number:,} sessions", 200, query, limit=2),
        await timed("  the same from the middle", 200, lambda: store.sessions(limit=50, cursor=cursor), limit=2),
    ]


def acp_row(home: Path, number: int) -> Row:
    """`session/list` of a real process, from the first byte of the request to the last of the answer."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_MODEL": "offline"}
    command = [sys.executable, "-m", "crow", "acp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as process:

        def ask(method: str, params: object) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())["result"]

        ask("initialize", {"protocolVersion": 1})
        ask("session/list", {})
        time.sleep(3)  # until the background imports are done
        taken = []
        for _ in range(100):
            since = time.perf_counter()
            assert len(ask("session/list", {})["sessions"]) == 50
            taken.append((time.perf_counter() - since) * 1000)
        assert process.stdin is not None
        process.stdin.close()
    return Row(f"  the same asked over ACP ({number:,})", statistics.median(taken), max(taken), "ms", 5)


WRITER = """
import asyncio, json, sys, time
from pathlib import Path
from benchmarks.store import answer
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore

async def main(path, name, seconds):
    store = await SqliteStore.open(Path(path))
    await store.create_session(NewSession(id=name, cwd="/repo", model="m", mode="ask"))
    leaf, taken, until = None, [], time.monotonic() + seconds
    while time.monotonic() < until:
        since = time.perf_counter()
        leaf = (await store.append(name, leaf=leaf, turn=1, entries=[answer()]))[-1].id
        taken.append((time.perf_counter() - since) * 1000)
        since = time.perf_counter()
        await store.sessions()
        await store.tail(name)
        taken.append((time.perf_counter() - since) * 1000)
    await store.close()
    print(json.dumps(taken))

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


def contention_row(path: Path, processes: int, seconds: float) -> Row:
    """Waits of processes that write and read as fast as they can."""
    command = [sys.executable, "-c", WRITER, str(path)]
    started = [
        subprocess.Popen([*command, f"p{number}", str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for number in range(processes)
    ]
    taken = [value for process in started for value in json.loads(process.communicate()[0])]
    what = f"append or read, {processes} processes at once ({len(taken):,} calls)"
    return Row(what, statistics.median(taken), max(taken), "ms")


async def measure(directory: Path, entries: int, sessions: int) -> list[Row]:
    path = directory / "crow.db"
    store = await SqliteStore.open(path)
    try:
        await grow(store, "long", entries)
        rows = [flush_row(directory)]
        rows += await sessions_rows(store, "long", entries)
        rows += await replay_row(store, "long", entries)
        await many(store, sessions)
        rows += await list_rows(store, sessions)
    finally:
        await store.close()
    rows.append(acp_row(directory, sessions))
    rows.append(contention_row(directory / "shared.db", 4, 5.0))
    size = path.stat().st_size / 2**20
    rows.append(Row("size of the database", size, size, "MiB"))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(Row("memory of this process, at most", most, most, "MiB"))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=10_000)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="crow-bench-"))
    try:
        rows = asyncio.run(measure(directory, options.entries, options.sessions))
    finally:
        shutil.rmtree(directory)
    report(rows, options.json)


if __name__ == "__main__":
    main()
