"""Measures maintenance of a large database: `python -m benchmarks.upkeep`.

The store makes a session of 100,000 entries and 1,000 short ones. Each operation then runs once or a few times:
search, totals, export, import into a database that another process writes to, backup, removal. Rows of commands are
whole processes from start to exit.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, Row, arguments, report
from benchmarks.store import answer, grow, timed
from crow.domain.entries import Assistant, NewEntry, TurnEnd
from crow.domain.messages import Text
from crow.store import NewSession, Scope
from crow.store.admin import ImportDefaults
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore

__all__: Sequence[str] = ()

BYSTANDER = """
import asyncio, json, sys, time
from pathlib import Path
from benchmarks.store import answer
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore

async def main(path):
    store = await SqliteStore.open(Path(path))
    await store.create_session(NewSession(id="bystander", cwd="/repo", model="m", mode="ask"))
    print("ready", flush=True)
    leaf, worst, until = None, 0.0, asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    while not until.done():
        since = time.perf_counter()
        leaf = (await store.append("bystander", leaf=leaf, turn=1, entries=[answer()]))[-1].id
        worst = max(worst, time.perf_counter() - since)
        await asyncio.sleep(0.01)
    await store.close()
    print(json.dumps(worst * 1000))

asyncio.run(main(sys.argv[1]))
"""


async def once(what: str, call: Callable[[], Awaitable[Any]]) -> Row:
    since, cpu_since = time.perf_counter(), time.process_time()
    await call()
    taken = (time.perf_counter() - since) * 1000
    return Row(what, taken, taken, "ms", cpu=(time.process_time() - cpu_since) * 1000)


async def short_sessions(store: SqliteStore, number: int) -> None:
    """Make whole turns of a few words, each in its own session."""
    for index in range(number):
        name = f"s{index}"
        await store.create_session(NewSession(id=name, cwd="/old", model="m", mode="ask"))
        await store.enqueue(name, (Text(text=f"Where does magpie {index} nest?"),), "u")
        start = await store.take_turn(name, "u", leaf=None)
        end = NewEntry(body=TurnEnd(stop="end_turn"))
        leaf = start.entries[-1].id
        await store.append(name, leaf=leaf, turn=1, entries=[answer(), end], release=True)


async def write_export(upkeep: SessionAdmin, path: Path) -> None:
    with path.open("wb") as file:
        async for line in upkeep.export(["long"]):
            file.write(line)


async def import_rows(file: Path, path: Path, entries: int) -> list[Row]:
    """Import into a database to which another process appends a step every 10 ms."""
    store = await SqliteStore.open(path)
    command = [sys.executable, "-c", BYSTANDER, str(path)]
    with subprocess.Popen(  # noqa: ASYNC220  nothing else runs in this loop
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        defaults = ImportDefaults(model="m", mode="ask")
        row = await once(f"import {entries:,} entries", lambda: SessionAdmin(store).import_file(file, defaults))
        worst = json.loads(process.communicate("")[0])
    await store.close()
    return [row, Row("  the longest that another process waited for a step", worst, worst, "ms")]


def command_row(home: Path, *arguments: str) -> Row:
    """A command in its own process."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_MODEL": "offline"}
    taken = []
    for _ in range(5):
        since = time.perf_counter()
        subprocess.run([sys.executable, "-m", "crow", *arguments], env=variables, check=True, capture_output=True)
        taken.append((time.perf_counter() - since) * 1000)
    return Row(f"crow {' '.join(arguments)}", sorted(taken)[2], max(taken), "ms")


async def measure(directory: Path, entries: int, sessions: int) -> list[Row]:
    path, file = directory / "crow.db", directory / "long.jsonl"
    store = await SqliteStore.open(path)
    try:
        upkeep = SessionAdmin(store)
        leaf = await grow(store, "long", entries)
        seen = NewEntry(body=Assistant(text="A jackdaw came by.", message_id="a"), model="m")
        await store.append("long", leaf=leaf, turn=2, entries=[seen])
        await short_sessions(store, sessions)

        def search(words: str, **more: Any) -> Callable[[], Awaitable[Any]]:
            return lambda: store.search(words, **more)

        rows = [
            await timed(f"search {entries:,} entries, a word that one has", 20, search("jackdaw")),
            await timed("  two words that all have", 20, search("twigs whatever")),
            await timed("  two letters, which no index has", 5, search("jz")),
            await timed("  one session's path", 20, search("jackdaw", session_id="long")),
            await timed("  what tools gave, for recall", 5, lambda: store.scan("no such word", session_id="long")),
            await once("sum tokens and cost by day and model", lambda: upkeep.totals(("day", "model"), Scope())),
            await once(f"export {entries:,} entries", lambda: write_export(upkeep, file)),
            *await import_rows(file, directory / "other.db", entries),
            await once("back up and verify", lambda: upkeep.back_up(directory / "copy.db")),
            command_row(directory, "sessions"),
            command_row(directory, "sessions", "search", "jackdaw"),
            await once(f"prune {sessions:,} sessions", lambda: upkeep.prune(time.time_ns() // 1_000_000 + 1, "/old")),
            await once(f"remove a session of {entries:,} entries", lambda: upkeep.remove(["long"])),
        ]
    finally:
        await store.close()
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=1_000)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="crow-bench-"))
    try:
        rows = asyncio.run(measure(directory, options.entries, options.sessions))
    finally:
        shutil.rmtree(directory)
    report(rows, options.json)


if __name__ == "__main__":
    main()
