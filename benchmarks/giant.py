"""Measures a session of a year and a database of months: `python -m benchmarks.giant`.

The store itself writes both, the same from each seed. The session has 40,000 entries on its path, 600 MB of tool
output, 200 compactions and 50 branches that were left. The database has 10,000 more sessions. `--keep DIR` leaves the
database there, and a later run with the same directory uses it again. Rows over ACP are from a real process. With
`--postgres`, they are in a new database of the server that `benchmarks.postgres` uses, and only loads and commands in
the session are measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process.client import TICK_S
from benchmarks.rows import ROOT, Row, arguments, report
from crow.domain.entries import (
    Announcement,
    Assistant,
    CallKind,
    CallRef,
    Checkpoint,
    Diff,
    File,
    Location,
    NewEntry,
    Prompt,
    Started,
    ToolResult,
    TurnEnd,
    User,
)
from crow.domain.messages import Text, ToolCall, Usage
from crow.store import NewSession, Store
from crow.store.postgres.store import PostgresStore
from crow.store.sqlite.admin import SessionAdmin
from crow.store.sqlite.store import SqliteStore
from tests.support.postgres import new_database

__all__: Sequence[str] = ()

SESSION = "giant"
STEPS_PER_TURN = 8
CORPUS_CHARS = 4_000_000
WRITERS = 64
WORDS = (
    *("the", "nest", "heron", "reed", "water", "build", "test", "error", "found", "line", "path", "value", "cache"),
    *("wing", "session", "retry", "request", "branch", "file", "timeout", "parser", "buffer", "index", "reader"),
    *("writer", "lock", "socket", "kernel", "page"),
)


def corpus(seed: int = 0) -> str:
    """Lines that look like a log or a search result. Outputs are pieces of it."""
    source = random.Random(seed)
    lines: list[str] = []
    size = 0
    while size < CORPUS_CHARS:
        words = " ".join(source.choices(WORDS, k=source.randint(3, 14)))
        number = source.randint(0, 10**9)
        lines.append(f'src/{source.choice(WORDS)}_{number % 97}.py:{number % 997}: {words} "{number:x}" é')
        size += len(lines[-1]) + 1
    return "\n".join(lines)


class Writer:
    """Appends turns to one session at a time. The same seed gives the same content."""

    def __init__(self, store: Store, corpus: str, seed: int) -> None:
        self.store = store
        self.corpus = corpus
        self.random = random.Random(seed)
        self.leaf: int | None = None
        self.first_kept: int | None = None
        self.turn = 0
        self.entries = 0
        self.output_bytes = 0
        self.later: list[Any] = []

    def words(self, count: int) -> str:
        return " ".join(self.random.choices(WORDS, k=count)).capitalize() + "."

    def output(self, mean: int) -> str:
        """A piece of the corpus: many are short, a few are twenty times as long as the mean."""
        size = min(int(self.random.lognormvariate(0, 1.2) * mean / 2.05) + 20, CORPUS_CHARS // 2)
        start = self.random.randrange(len(self.corpus) - size)
        return self.corpus[start : start + size]

    async def append(self, session: str, *bodies: Any, release: bool = False) -> int:
        """Append entries, after those that `later` has; returns the id of the first new one."""
        waiting, self.later = self.later, []
        usage = Usage(input_tokens=20_000, output_tokens=300, cached_tokens=19_000)
        new = [
            NewEntry(body=body, model="offline", usage=usage if isinstance(body, Assistant) else None, estimate=20_000)
            for body in (*waiting, *bodies)
        ]
        stored = await self.store.append(session, leaf=self.leaf, turn=self.turn, entries=new, release=release)
        self.leaf = stored[-1].id
        self.entries += len(stored)
        return stored[len(waiting)].id

    async def run_turn(self, session: str, *, steps: int, mean: int) -> None:
        """A prompt, `steps` answers with a call each, and a last answer."""
        self.turn += 1
        name = f"{session}-{self.turn}"
        prompt = User(parts=(Text(text=self.words(self.random.randint(8, 60))),), message_id=f"{name}-u")
        kept = await self.append(session, prompt)
        if self.turn % 5 == 0:
            self.first_kept = kept
        for step in range(steps):
            await self.step(session, f"{name}-{step}", step, mean)
        answer = Assistant(text=self.words(self.random.randint(40, 200)), message_id=f"{name}-a", endpoint="e m")
        await self.append(session, answer, TurnEnd(stop="end_turn"), release=True)

    async def step(self, session: str, name: str, step: int, mean: int) -> None:
        path = f"/repo/src/{self.random.choice(WORDS)}.py"
        kind: CallKind = ("read", "execute", "search", "execute", "edit", "read", "execute", "read")[step % 8]
        tool = {"read": "read_file", "execute": "shell", "search": "grep", "edit": "edit_file"}[kind]
        given = {"command": f"pytest {path} -k {self.words(2)}"} if kind == "execute" else {"path": path}
        if kind == "edit":
            given |= {"old_text": self.words(20), "new_text": self.words(22)}
        title = given.get("command") or f"{tool} {path}"
        diffs: tuple[Diff, ...] = ()
        if kind == "edit":
            before = self.output(6_000)
            diffs = (Diff(path=path, old_text=before, new_text=f"{before}\n{self.words(30)}"),)
        announcement = Announcement(title=title, kind=kind, locations=(Location(path=path, line=1),), diffs=diffs)
        call = ToolCall(id=f"c{step}", name=tool, arguments=json.dumps(given))
        text = self.words(self.random.randint(5, 60)) if self.random.random() < 0.6 else ""
        answer = Assistant(
            text=text,
            message_id=name,
            calls=(call,),
            finish="tool_calls",
            endpoint="e m",
            announcements=(announcement,),
        )
        ref = CallRef(assistant=await self.append(session, answer), index=0)
        more: list[Any] = []
        if kind == "edit":
            more = [
                Started(call=ref, why="allowed"),
                File(call=ref, path=path, before=diffs[0].old_text.encode(), after_hash=""),  # type: ignore[union-attr]
            ]
        elif kind == "execute":
            more = [Started(call=ref, why="reads inside the workspace are free")]
        text = "Replaced one occurrence." if kind == "edit" else self.output(mean)
        self.output_bytes += len(text.encode())
        raw = {"exit_code": 0, "timed_out": False} if kind == "execute" else {}
        more.append(
            ToolResult(
                call=ref, name=tool, text=text, duration_ms=120, announcement=announcement, cut=30_000, raw_output=raw
            )
        )
        self.later = more

    async def compact(self, session: str) -> None:
        system = Prompt(system=self.words(2_000), tools=(), cwd="/repo", model="offline", recorded_here=True)
        body = Checkpoint(
            compaction_id=f"{session}-{self.leaf}",
            summary=self.words(400),
            first_kept=self.first_kept,
            method="prefix",
            tokens_before=100_000,
            tokens_after=40_000,
        )
        await self.append(session, system, body)

    async def leave_branch(self, session: str, *, mean: int) -> None:
        """Run two turns and take them back."""
        leaf, entries, size = self.leaf, self.entries, self.output_bytes
        for _ in range(2):
            await self.run_turn(session, steps=3, mean=mean)
        await self.store.move_leaf(session, leaf=self.leaf, to=leaf, reason="undo")
        self.leaf, self.entries, self.output_bytes = leaf, entries, size


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to make: the session's entries, bytes of output, compactions and branches, and the other sessions with
    their bytes of output in total."""

    entries: int = 40_000
    output_bytes: int = 600_000_000
    compactions: int = 200
    branches: int = 50
    sessions: int = 10_000
    other_bytes: int = 2_000_000_000


async def make(store: Store, size: Size, seed: int = 1) -> dict[str, int]:
    """Write everything; returns what was made."""
    lines = corpus()
    mean = max(100, size.other_bytes // max(1, size.sessions) // 13)

    async def make_some(worker: int) -> int:
        made = 0
        for index in range(worker, size.sessions, WRITERS):
            writer, name = Writer(store, lines, seed + 1 + index), f"s{index:05}"
            new = NewSession(id=name, cwd=f"/repo{index % 20}", model="offline", mode="ask", title=writer.words(4))
            await store.create_session(new)
            for _ in range(1 + int(writer.random.expovariate(0.5))):
                await writer.run_turn(name, steps=6, mean=mean)
            made += writer.output_bytes
        return made

    other_bytes = sum(await asyncio.gather(*map(make_some, range(WRITERS))))  # they share flushes
    writer = Writer(store, lines, seed)
    await store.create_session(NewSession(id=SESSION, cwd="/repo", model="offline", mode="ask", title="A year of work"))
    system = Prompt(system=writer.words(2_000), tools=(), cwd="/repo", model="offline", recorded_here=True)
    await writer.append(SESSION, system)
    per_turn = 2 * STEPS_PER_TURN + 3 + 5
    turns = size.entries // per_turn
    mean = max(100, size.output_bytes // (turns * (STEPS_PER_TURN - 1)))
    compactions = branches = 0
    while writer.entries < size.entries:
        await writer.run_turn(SESSION, steps=STEPS_PER_TURN, mean=mean)
        if writer.entries * size.compactions >= (compactions + 1) * size.entries:
            compactions += 1
            await writer.compact(SESSION)
        if writer.entries * size.branches >= (branches + 1) * size.entries:
            branches += 1
            await writer.leave_branch(SESSION, mean=mean)
    await store.tidy()
    return {
        "entries": writer.entries,
        "output_bytes": writer.output_bytes,
        "compactions": compactions,
        "branches": branches,
        "turns": writer.turn,
        "sessions": size.sessions,
        "other_bytes": other_bytes,
    }


@dataclass
class Answer:
    """What came back for one request: seconds until the first update and until the response, bytes and updates on the
    wire, CPU seconds of the process, and MiB that it grew by at most."""

    first_s: float = 0.0
    whole_s: float = 0.0
    wire: int = 0
    updates: int = 0
    cpu_s: float = 0.0
    grown_mib: float = 0.0
    line: bytes = b""
    kinds: dict[bytes, int] = field(default_factory=dict)


class Server:
    """A `crow acp` whose output is read as fast as it comes."""

    def __init__(self, home: Path, database: str | None) -> None:
        variables = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "CROW_HOME": str(home),
            "CROW_MODEL": "offline",
        }
        if database is not None:
            variables["CROW_DATABASE_URL"] = database
        self.process = subprocess.Popen(
            [sys.executable, "-m", "crow", "acp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout.fileno()
        self._number = 0
        self._rest = b""

    def send(self, method: str, params: object) -> int:
        self._number += 1
        request = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        self._in.write(json.dumps(request).encode() + b"\n")
        return self._number

    def ask(self, method: str, params: object) -> Answer:
        answer = Answer()
        before, cpu_before = self._status("VmRSS"), self._cpu_s()
        self._reset_peak()
        since = time.perf_counter()
        number = self.send(method, params)
        mark = b'"id":%d' % number
        while True:
            data = os.read(self._out, 1 << 20)
            if not data:
                raise RuntimeError("crow has ended")
            answer.wire += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if b'"session/update"' in line:
                    answer.first_s = answer.first_s or time.perf_counter() - since
                    answer.updates += 1
                elif mark in line:
                    answer.line = line
                    answer.whole_s = time.perf_counter() - since
                    answer.cpu_s = self._cpu_s() - cpu_before
                    answer.grown_mib = self._status("VmHWM") - before
                    return answer

    def drain(self, seconds: float) -> None:
        """Read and drop what comes until nothing has come for so long."""
        while select.select([self._out], [], [], seconds)[0]:
            if not os.read(self._out, 1 << 20):
                return
        self._rest = b""

    def settle(self) -> None:
        """Wait until the process has done nothing for a second: it imports packages in the background."""
        before = -1.0
        while self._cpu_s() != before:
            before = self._cpu_s()
            self.drain(1)

    def close(self) -> None:
        self._in.close()
        self.process.wait(30)

    def _status(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{name}:"))

    def _reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S


def load_rows(home: Path, *, is_full: bool, database: str | None = None) -> list[Row]:
    """`session/load` of the session by a process that has already opened the database. `database` is the URL of one on
    PostgreSQL."""
    rows: list[Row] = []
    cwd = str(home)
    ways: list[tuple[str, dict[str, Any]]] = [("session/load", {})]
    if is_full:
        ways.append(("session/load, everything", {"_meta": {"crow": {"replay": "full"}}}))
    for what, more in ways:
        server = Server(home, database)
        try:
            server.ask("initialize", {"protocolVersion": 1})
            server.ask("session/list", {})
            server.settle()
            found = server.ask("session/load", {"sessionId": SESSION, "cwd": cwd, "mcpServers": [], **more})
            assert b'"result"' in found.line, found.line
            is_whole = not more
            rows += [
                Row(f"{what}: first update", found.first_s * 1e3, found.first_s * 1e3, "ms", 100 if is_whole else None),
                Row(
                    f"  all {found.updates:,} updates",
                    found.whole_s * 1e3,
                    found.whole_s * 1e3,
                    "ms",
                    3_000 if is_whole else None,
                    cpu=found.cpu_s * 1e3,
                ),
                Row("  on the wire", found.wire / 1e6, found.wire / 1e6, "MB", 20 if is_whole else None),
                Row("  more memory at its peak", found.grown_mib, found.grown_mib, "MiB", 16 if is_whole else None),
            ]
            server.drain(0.5)
            if is_whole:
                rows += command_rows(server)
        finally:
            server.close()
    return rows


def command_rows(server: Server) -> list[Row]:
    """A prompt and slash commands in the open session."""
    rows = []
    for text in (
        "Hello.",
        "/history",
        "/history all",
        "/tree",
        "/tree all",
        "/search heron timeout",
        "/undo keep",
        "/redo keep",
        "/fork",
    ):
        prompt = {"sessionId": SESSION, "prompt": [{"type": "text", "text": text}]}
        found = server.ask("session/prompt", prompt)
        assert b'"result"' in found.line, found.line
        if text == "Hello.":
            rows += prompt_rows(server, found)
        else:
            rows.append(Row(text, found.whole_s * 1e3, found.whole_s * 1e3, "ms", cpu=found.cpu_s * 1e3))
        rows.append(Row("  more memory at its peak", found.grown_mib, found.grown_mib, "MiB"))
        server.drain(0.3)
    found = server.ask("session/list", {})
    rows.append(Row("session/list", found.whole_s * 1e3, found.whole_s * 1e3, "ms"))
    return rows


def prompt_rows(server: Server, found: Answer) -> list[Row]:
    """The first prompt in the open session. The floor is the first one of a new session in the same process.

    The offline model pauses after each word. In the open session, it also writes a summary first.
    """
    cwd = str(Path.cwd())
    new = json.loads(server.ask("session/new", {"cwd": cwd, "mcpServers": []}).line)["result"]["sessionId"]
    server.drain(0.3)
    short = server.ask("session/prompt", {"sessionId": new, "prompt": [{"type": "text", "text": "Hello."}]})
    first, floor = found.first_s * 1e3, short.first_s * 1e3
    return [
        Row("a prompt, to its first update", first, first, "ms", floor=floor),
        Row(
            "  to its end",
            found.whole_s * 1e3,
            found.whole_s * 1e3,
            "ms",
            cpu=found.cpu_s * 1e3,
            floor=short.whole_s * 1e3,
        ),
    ]


PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
sys.exit(code)
"""


def process_row(home: Path, *command: str) -> list[Row]:
    """A command of `crow` in a process of its own, with its memory."""
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CROW_HOME": str(home), "CROW_MODEL": "offline"}
    since = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, sys.executable, "-m", "crow", *command],
        env=variables,
        capture_output=True,
        check=True,
    )
    taken, peak = (time.perf_counter() - since) * 1e3, float(done.stdout)
    shown = " ".join(part for part in command if not part.startswith("/"))
    return [Row(f"crow {shown}", taken, taken, "ms"), Row("  memory at its peak", peak, peak, "MiB")]


def command_line_rows(home: Path) -> list[Row]:
    out = home / "out"
    out.mkdir(exist_ok=True)
    copy = home / "copy"
    copy.mkdir(exist_ok=True)
    rows = [
        *process_row(home, "sessions"),
        *process_row(home, "sessions", "search", "heron", "timeout"),
        *process_row(home, "sessions", "show", SESSION),
        *process_row(home, "sessions", "export", SESSION, "-o", str(out / "giant.jsonl")),
        *process_row(home, "sessions", "export", SESSION, "--format", "markdown", "-o", str(out / "giant.md")),
        *process_row(home, "sessions", "export", SESSION, "--format", "html", "-o", str(out / "giant.html")),
        *process_row(copy, "sessions", "import", str(out / "giant.jsonl")),
    ]
    for file in sorted(out.iterdir()):
        size = file.stat().st_size / 1e6
        rows.append(Row(f"  size of {file.name}", size, size, "MB"))
    shutil.rmtree(out)
    shutil.rmtree(copy)
    return rows


def disk_rows(home: Path, made: dict[str, int]) -> list[Row]:
    """The database compared with the tool output in it."""
    size = sum(file.stat().st_size for file in home.glob("crow.db*"))
    content = made["output_bytes"] + made["other_bytes"]
    return [
        Row("tool output on the path of the session", made["output_bytes"] / 1e6, made["output_bytes"] / 1e6, "MB"),
        Row(
            f"tool output of {made['sessions']:,} more sessions",
            made["other_bytes"] / 1e6,
            made["other_bytes"] / 1e6,
            "MB",
        ),
        Row("size of the database", size / 1e6, size / 1e6, "MB"),
        Row("  for each byte of tool output", size / content, size / content, ""),
    ]


async def prepare(home: Path, size: Size) -> tuple[dict[str, int], list[Row]]:
    """Make the database, unless it is there already."""
    note = home / "made.json"
    if note.exists():
        return json.loads(note.read_text()), []
    store = await SqliteStore.open(home / "crow.db")
    since, cpu_since = time.perf_counter(), time.process_time()
    try:
        made = await make(store, size)
    finally:
        await store.close()
    taken = (time.perf_counter() - since) * 1e3
    note.write_text(json.dumps(made))
    return made, [
        Row("write all of it, every step durable", taken, taken, "ms", cpu=(time.process_time() - cpu_since) * 1e3)
    ]


async def delete_rows(home: Path) -> list[Row]:
    """Remove the first half of the other sessions, and see what the file gives back."""
    store = await SqliteStore.open(home / "crow.db")
    try:
        admin = SessionAdmin(store)
        chosen = [name for name in await admin.ids() if name.startswith("s")]
        chosen = chosen[: len(chosen) // 2]

        async def remove() -> None:
            await admin.remove(chosen)

        return [await once(f"remove {len(chosen):,} sessions", remove)]
    finally:
        await store.close()


async def once(what: str, call: Callable[[], Awaitable[Any]]) -> Row:
    since, cpu_since = time.perf_counter(), time.process_time()
    await call()
    taken = (time.perf_counter() - since) * 1e3
    return Row(what, taken, taken, "ms", cpu=(time.process_time() - cpu_since) * 1e3)


def measure(home: Path, size: Size, *, only: Sequence[str]) -> list[Row]:
    made, rows = asyncio.run(prepare(home, size))
    if not only or "load" in only:
        rows += load_rows(home, is_full=True)
    if not only or "commands" in only:
        rows += command_line_rows(home)
    rows += disk_rows(home, made)
    if not only or "delete" in only:
        rows += asyncio.run(delete_rows(home))
        size_after = sum(file.stat().st_size for file in home.glob("crow.db*")) / 1e6
        rows.append(Row("  size of the database afterwards", size_after, size_after, "MB"))
    return rows


async def measure_postgres(home: Path, size: Size) -> list[Row]:
    """Write the session to a new database on PostgreSQL, and measure loads and commands in it."""
    async with new_database(on_disk=True) as url:
        store = await PostgresStore.open(url)
        try:

            async def write() -> None:
                await make(store, size)

            rows = [await once("write all of it, every step durable", write)]
        finally:
            await store.close()
        return rows + await asyncio.to_thread(load_rows, home, is_full=True, database=url)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--keep", metavar="DIR", type=Path, help="leave the database in this directory")
    parser.add_argument("--entries", type=int, default=Size.entries)
    parser.add_argument("--output-mb", type=int, default=Size.output_bytes // 1_000_000)
    parser.add_argument("--sessions", type=int, default=Size.sessions)
    parser.add_argument("--other-mb", type=int, default=Size.other_bytes // 1_000_000)
    parser.add_argument("--compactions", type=int, default=Size.compactions, help="0: as an imported session")
    parser.add_argument("--postgres", action="store_true", help="measure the store on PostgreSQL")
    parser.add_argument("--only", nargs="*", choices=("load", "commands", "delete"), default=())
    options = parser.parse_args()
    size = Size(
        entries=options.entries,
        output_bytes=options.output_mb * 1_000_000,
        compactions=options.compactions,
        sessions=options.sessions,
        other_bytes=options.other_mb * 1_000_000,
    )
    home = options.keep or Path(tempfile.mkdtemp(prefix="crow-bench-"))
    home.mkdir(parents=True, exist_ok=True)
    try:
        rows = asyncio.run(measure_postgres(home, size)) if options.postgres else measure(home, size, only=options.only)
    finally:
        if options.keep is None:
            shutil.rmtree(home)
    report(rows, options.json)


if __name__ == "__main__":
    main()
