"""Measures the store on PostgreSQL: `python -m benchmarks.postgres [--json FILE] [--seconds N]`.

It starts the server that the tests use, on a directory of its own and with its defaults, or uses the one of
`CROW_TEST_DATABASE_URL`. A durable step is an answer with a call, the start of the call and its result: three entries
and the new leaf, flushed to disk. The watchers run in a process of their own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import ROOT, Row, arguments, report
from crow.domain.entries import Announcement, Assistant, CallRef, NewEntry, Started, ToolResult, TurnEnd
from crow.domain.messages import Text, ToolCall, Usage
from crow.store import NewSession, Store
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.store import SqliteStore
from tests.support.postgres import new_database

__all__: Sequence[str] = ()

MOST_MS_PER_STEP = 0.5
MOST_MS_UNTIL_SEEN = 100
WATCHED = 8
ANNOUNCED = Announcement(title="Read notes.txt", kind="read")
USAGE = Usage(input_tokens=9_000, output_tokens=90, cached_tokens=8_000)
CALL = ToolCall(id="c", name="read_file", arguments='{"path":"notes.txt"}')


def step(user: int) -> list[NewEntry]:
    call = CallRef(assistant=user, index=0)
    answer = Assistant(text="I will look at the file, then change it as you asked. ", message_id="a", calls=(CALL,))
    result = ToolResult(call=call, name="read_file", text="a line of text\n" * 30, announcement=ANNOUNCED)
    return [
        NewEntry(body=answer, model="m", usage=USAGE, cost=0.01),
        NewEntry(body=Started(call=call, why="free", announcement=ANNOUNCED)),
        NewEntry(body=result),
    ]


async def begin(store: Store, session: str) -> int:
    """Create a session and take a turn; returns the id of its user entry."""
    await store.create_session(NewSession(id=session, cwd="/repo", model="m", mode="ask"))
    await store.enqueue(session, (Text(text="Please change the notes."),), "u")
    return (await store.take_turn(session, "u", leaf=None)).entries[-1].id


async def write(store: Store, name: str, sessions: int, seconds: float) -> list[float]:
    """Store steps in all sessions at once, each after the one before; returns how many seconds each took."""
    users = {f"{name}-{number}": await begin(store, f"{name}-{number}") for number in range(sessions)}
    taken: list[float] = []
    until = time.monotonic() + seconds

    async def run(session: str, user: int) -> None:
        leaf = user
        while time.monotonic() < until:
            since = time.perf_counter()
            leaf = (await store.append(session, leaf=leaf, turn=1, entries=step(user)))[-1].id
            taken.append(time.perf_counter() - since)
        await store.append(session, leaf=leaf, turn=1, entries=[NewEntry(body=TurnEnd(stop="end_turn"))], release=True)

    await asyncio.gather(*(run(session, user) for session, user in users.items()))
    return taken


async def steps_rows(store: Store, engine: str, sessions: int, seconds: float) -> list[Row]:
    since, cpu_since = time.perf_counter(), time.process_time()
    taken = sorted(await write(store, f"{engine}{sessions}", sessions, seconds))
    elapsed, cpu = time.perf_counter() - since, time.process_time() - cpu_since
    limit = MOST_MS_PER_STEP if (engine, sessions) == ("PostgreSQL", 64) else None
    each = elapsed / len(taken) * 1e3
    what = f"{engine}, {sessions} sessions at once: {len(taken) / elapsed:,.0f} steps/s"
    return [
        Row(what, each, each, "ms", limit, cpu / len(taken) * 1e3),
        Row("  one step waits", statistics.median(taken) * 1e3, taken[int(len(taken) * 0.99)] * 1e3, "ms"),
    ]


WATCHERS = """
import asyncio, json, sys, time
from crow.store.postgres.store import PostgresStore

async def watch(store, name, seen):
    async for news in store.watch(name):
        now = time.time() * 1000
        seen += [now - entry.created_ms for entry in news.entries]
        if news.row.state == "idle":
            return

async def main(url, *names):
    store, seen = await PostgresStore.open(url), []
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(watch(store, name, seen) for name in names))
    await store.close()
    print(json.dumps(seen))

asyncio.run(main(*sys.argv[1:]))
"""


async def watchers_row(store: Store, url: str, seconds: float) -> Row:
    """How long after it was stored a watcher in another process has an entry, while 64 sessions write."""
    names = [f"watched-{number}" for number in range(WATCHED)]
    command = [sys.executable, "-c", WATCHERS, url, *names]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()
    writing = asyncio.create_task(write(store, "watched", 64, seconds))
    await asyncio.sleep(seconds / 4)  # the watchers find a backlog, which does not count
    process.stdin.write(b"\n")
    await writing
    told, _ = await process.communicate()
    seen = json.loads(told)
    late = sorted(seen[len(seen) // 2 :])
    median, p99 = statistics.median(late), late[int(len(late) * 0.99)]
    what = f"64 sessions write, {WATCHED} are watched: seen after (median {median:.0f} ms) p99"
    return Row(what, p99, late[-1], "ms", MOST_MS_UNTIL_SEEN)


async def prompt_rows(postgres: Store, sqlite: Store) -> list[Row]:
    """What the store does between a prompt and its request: open the session, keep the prompt, take the turn."""
    times: dict[str, list[float]] = {"SQLite": [], "PostgreSQL": []}
    stores = {"SQLite": sqlite, "PostgreSQL": postgres}
    for number in range(300):
        for engine, store in stores.items():
            session = f"prompt-{number % 5}"
            if number < 5:
                await store.create_session(NewSession(id=session, cwd="/repo", model="m", mode="ask"))
            since = time.perf_counter()
            leaf = (await store.open_session(session)).row.leaf
            await store.enqueue(session, (Text(text="Please change the notes."),), f"u{number}")
            start = await store.take_turn(session, f"u{number}", leaf=leaf)
            times[engine].append(time.perf_counter() - since)
            end = [*step(start.entries[-1].id), NewEntry(body=TurnEnd(stop="end_turn"))]
            await store.append(session, leaf=start.entries[-1].id, turn=start.turn, entries=end, release=True)
    taken = {engine: statistics.median(found[20:]) * 1e3 for engine, found in times.items()}
    limit = 2 * taken["SQLite"]
    return [
        Row("prompt to request, SQLite", taken["SQLite"], max(times["SQLite"]) * 1e3, "ms"),
        Row("  PostgreSQL, at most twice that", taken["PostgreSQL"], max(times["PostgreSQL"]) * 1e3, "ms", limit),
    ]


async def measure(directory: Path, seconds: float) -> list[Row]:
    async with new_database(on_disk=True) as url:
        postgres, sqlite = await PostgresStore.open(url), await SqliteStore.open(directory / "crow.db")
        try:
            rows = []
            for sessions in (1, 16, 64):
                rows += await steps_rows(sqlite, "SQLite", sessions, seconds / 2)
                rows += await steps_rows(postgres, "PostgreSQL", sessions, seconds)
            rows.append(await watchers_row(postgres, url, seconds))
            return [*rows, *await prompt_rows(postgres, sqlite)]
        finally:
            await postgres.close()
            await sqlite.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each load lasts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crow-bench-") as directory:
        rows = asyncio.run(measure(Path(directory), options.seconds))
    report(rows, options.json)


if __name__ == "__main__":
    main()
