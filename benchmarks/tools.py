"""Measures tools: `python -m benchmarks.tools [--files N]`.

Each row does what a session does (the toolbox with a real directory; for steps a session on SQLite with a model
that answers at once) many times. The limit is for the median on an idle machine; a floor is the same work without
crow.
"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from benchmarks.questions.repository import make_area
from benchmarks.rows import ROOT, Row, arguments, of_times, report
from crow.agent.compaction.budget import CompactionPolicy
from crow.agent.permissions.rules import user_rules
from crow.agent.sessions.session import Session
from crow.agent.turns.adapters import Adapters, SessionSettings
from crow.domain.messages import Text, ToolCall
from crow.programs import SYSTEM_PROGRAMS, Programs
from crow.store import NewSession
from crow.store.sqlite.store import SqliteStore
from crow.tools import CommandAccess, Ports
from crow.tools.mcp.client import McpToolbox, open_toolbox
from crow.tools.no_session import NoSession
from crow.tools.sandbox import Sandbox
from crow.tools.sandbox.bubblewrap import Bubblewrap
from crow.tools.sandbox.confiner import Choice, KernelConfiner, Sandboxes, choose_sandbox
from crow.tools.sandbox.landlock import Landlock
from crow.tools.sandbox.policy import SandboxOptions
from crow.tools.workspace import DiskWorkspace
from tests.agent.harness import NoteTaker
from tests.support.scripted_model import Say, ScriptedModel
from tests.tools.conftest import FixedPlan

__all__: Sequence[str] = ()

STEPS = 200
LINES = 120_000
COMMANDS = 40


def call(tool: str, /, **arguments: object) -> ToolCall:
    return ToolCall(id="c", name=tool, arguments=json.dumps(arguments))


ROWS: list[Row] = []
"""The rows so far."""


def row(what: str, times: Sequence[float], limit_ms: float | None, floor_ms: float | None = None) -> None:
    """Add a row; times are in seconds."""
    ROWS.append(of_times(what, times, limit=limit_ms, floor=floor_ms))


async def timed(times: int, work: Callable[[], Awaitable[object]]) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        taken.append(time.perf_counter() - began)
    return taken


async def unwatched(_text: str) -> None:
    """Ignores the output."""


@asynccontextmanager
async def toolbox(root: Path) -> AsyncIterator[McpToolbox]:
    workspace = DiskWorkspace(root)
    async with open_toolbox(workspace, Ports(log=NoSession(), plan=FixedPlan()), ()) as box:
        yield box
        await workspace.reap()


async def steps(name: str, step: Callable[[int], ToolCall], limit_ms: float, *, sandbox: Sandbox | None = None) -> None:
    """The time of a durable step without the model: a turn with steps minus the same turn without; no two steps are
    the same."""
    taken = {}
    for count in (0, STEPS):
        model = ScriptedModel(*(Say(calls=(step(index),)) for index in range(count)), Say(text=["ok"]))
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "a.txt").write_text("one\n" * 100)
            with confined(Path(directory), sandbox) as workspace:
                taken[count] = await turn(Path(directory), model, workspace)
    row(f"a step with {name}, durable, mean of {STEPS}", [(taken[STEPS] - taken[0]) / STEPS], limit_ms)


async def turn(root: Path, model: ScriptedModel, workspace: DiskWorkspace) -> float:
    async def load() -> None: ...

    async def choose(_: str) -> ScriptedModel:
        return model

    store = await SqliteStore.open(root / "crow.db")
    await store.create_session(NewSession(id="s", cwd=str(root), model="m", mode="auto"))
    adapters = Adapters(
        store=store,
        load=load,
        model=choose,
        info=lambda _: model.info,
        open_toolbox=open_toolbox,
        settings=lambda: SessionSettings(
            steps_per_turn=STEPS + 2,
            compaction=CompactionPolicy(auto=False),
            rules=user_rules(["shell"], []),
        ),
    )
    session = Session(adapters, NoteTaker(), workspace, (), await store.open_session("s"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        began = time.perf_counter()
        await session.prompt((Text(text="go"),))
        took = time.perf_counter() - began
        await session.close()
    await store.close()
    return took


@contextmanager
def confined(root: Path, sandbox: Sandbox | None) -> Iterator[DiskWorkspace]:
    """A workspace whose commands this sandbox confines; None: none."""
    if sandbox is None:
        yield DiskWorkspace(root)
        return
    with tempfile.TemporaryDirectory() as caches:
        place = Path(caches)
        options = SandboxOptions(caches=place, layers=place / "layers")
        yield DiskWorkspace(root, confiner=KernelConfiner([root], options, Chosen(sandbox)))


class Chosen(Sandboxes):
    """Finds always this sandbox, whichever crow would choose."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._sandbox = sandbox

    def choose(self, programs: Programs = SYSTEM_PROGRAMS) -> Choice:  # noqa: ARG002
        """Return the sandbox."""
        return Choice(self._sandbox)


def sandboxes() -> dict[str, Sandbox]:
    """What can confine commands on this machine, by its name in the rows. bubblewrap stands there with and without a
    throwaway layer over the workspace."""
    found: dict[str, Sandbox] = {}
    best = choose_sandbox().sandbox
    if isinstance(best, Bubblewrap):
        found["bubblewrap"] = replace(best, overlay="none")
        if best.has_overlay:
            found["bubblewrap with a layer"] = best
    landlock = Landlock()
    if not landlock.probe():
        found["Landlock"] = landlock
    return found


async def commands() -> None:
    """The cost of a command in each way. The floor is the same command unconfined; all of them take turns."""
    with tempfile.TemporaryDirectory() as directory:
        make_area(Path(directory))
        await take_turns(Path(directory, "work"), "")
    with tempfile.TemporaryDirectory() as directory:
        for number in range(100_000):
            place = Path(directory) / f"d{number % 400}"
            place.mkdir(exist_ok=True)
            (place / f"f{number}").write_text("")
        await take_turns(Path(directory), ", in a tree of 100,000 files")
    script = (
        "import time; from crow.tools.sandbox.confiner import choose_sandbox as choose; began = time.perf_counter()"
    )
    probes = [printed_number(f"{script}; choose(); print(time.perf_counter() - began)") for _ in range(5)]
    row("finding out what confines commands, once in each process", probes, None)


async def take_turns(root: Path, where: str) -> None:
    """Rows of the time and the processor time of a command in each way."""
    async with AsyncExitStack() as stack:
        runs: dict[str, Callable[[], Awaitable[object]]] = {}
        for name, sandbox in {"unconfined": None, **sandboxes()}.items():
            workspace = stack.enter_context(confined(root, sandbox))
            stack.push_async_callback(workspace.close)
            for access in accesses(sandbox):
                runs[name if sandbox is None else f"{access}, {name}"] = partial(run_true, workspace, access)
                await run_true(workspace, access)
            if sandbox is not None and sandbox.has_overlay:
                runs["kept in a layer, bubblewrap"] = partial(run_in_layer, workspace)
                await run_in_layer(workspace)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        computed = dict.fromkeys(runs, 0.0)
        for _ in range(COMMANDS):
            for name, run in runs.items():
                before = cpu_s()
                taken[name] += await timed(1, run)
                computed[name] += cpu_s() - before
    floor_ms = statistics.median(taken["unconfined"]) * 1e3
    for name, times in taken.items():
        floor = None if name == "unconfined" else floor_ms
        ROWS.append(of_times(f"a command, {name}{where}", times, floor=floor, cpu=computed[name] / COMMANDS * 1e3))


def accesses(sandbox: Sandbox | None) -> tuple[CommandAccess, ...]:
    if sandbox is None:
        return ("full",)
    return ("read",) if sandbox.has_overlay else ("read", "write")


async def run_true(workspace: DiskWorkspace, access: CommandAccess) -> None:
    code, output = await workspace.run("true", access=access, timeout_s=60, on_output=unwatched)
    assert (code, output) == (0, ""), output


async def run_in_layer(workspace: DiskWorkspace, line: str = "true", *, keeps: bool = False) -> tuple[float, float]:
    """Run a command in a layer, find out what it changed, and perhaps keep that. Return how long the search and the
    keeping took, in seconds."""
    layers = workspace.layers
    assert layers is not None
    layer = await layers.open()
    assert layer is not None
    await workspace.run(line, access="write", timeout_s=600, on_output=unwatched, layer=layer)
    began = time.perf_counter()
    changes = await layers.look(layer)
    found = time.perf_counter()
    if keeps:
        await layers.apply(await layers.prepare(layer, changes, {}))
    kept = time.perf_counter()
    await layers.drop(layer)
    return found - began, kept - found


async def keeping() -> None:
    """The time to keep 10,000 new files, beside that of `cp -a` of the same files."""
    line = "mkdir -p {0}; cd {0}; for i in $(seq 10000); do echo text $i > {1}$i; done"
    for sandbox in sandboxes().values():
        if not sandbox.has_overlay:
            continue
        taken: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
        floors = []
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory, "work")
            await anyio.Path(root, "old").mkdir(parents=True)
            with confined(root, sandbox) as workspace:
                for number in range(4):
                    for kind, folder in (("old", "old"), ("new", f"new{number}")):
                        taken[kind] += [await run_in_layer(workspace, line.format(folder, number), keeps=True)]
                    began = time.perf_counter()
                    await anyio.run_process(["/bin/cp", "-a", str(root / f"new{number}"), f"{directory}/copy{number}"])
                    floors.append(time.perf_counter() - began)
                await workspace.close()
        floor_ms = statistics.median(floors) * 1e3
        for kind, where in (("new", "in a new directory"), ("old", "in a directory that exists")):
            searches, keepings = zip(*taken[kind], strict=True)
            row(f"keeping 10,000 new files {where}; floor: cp -a", keepings, 1.5 * floor_ms, floor_ms)
            row("  finding and listing them before", searches, None)


def cpu_s() -> float:
    """CPU time of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def printed_number(code: str) -> float:
    """The number that a new Python prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return float(done.stdout)


def printed(*argv: str, cwd: str) -> tuple[float, int]:
    """Seconds that a program takes by itself, and the bytes it prints."""
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=cwd, check=False, capture_output=True)
    return time.perf_counter() - began, len(done.stdout)


async def small_calls() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with toolbox(Path(directory)) as box:
            plan = call("update_plan", items=[{"content": "a", "status": "pending"}])
            row("an in-process MCP call", await timed(2_000, lambda: box.run(plan, "call_1_0", unwatched)), 0.2)

            async def four() -> None:
                async with anyio.create_task_group() as tasks:
                    for _ in range(4):
                        tasks.start_soon(box.run, call("shell", command="sleep 1"), "call_1_0", unwatched)

            row("four times `sleep 1` at once", await timed(3, four), 1_100)
            (Path(directory) / "many").write_text("a line of many, which go on and on until there are enough\n" * LINES)
            floor_s, size = printed("cat", "many", cwd=directory)
            flood = call("shell", command="cat many")
            taken = await timed(7, lambda: box.run(flood, "call_1_0", unwatched))
            row(f"a command that prints {size / 1e6:.1f} MB", taken, 100, floor_s * 1e3)


async def large_edit() -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        text = "".join(f"line {number} of a long file\n" for number in range(190_000))
        (root / "a.txt").write_text(text)
        words = ["line 100000 of a", "line 100000 OF A"]
        async with toolbox(root) as box:

            async def edit() -> None:
                edit = call("edit_file", path="a.txt", old_text=words[0], new_text=words[1])
                assert not (await box.run(edit, "call_1_0", unwatched)).is_error
                words.reverse()

            row(f"edit_file on {len(text) / 1e6:.1f} MB", await timed(15, edit), 50)


async def search(files: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for number in range(files):
            place = root / f"d{number % 250}" / f"e{number % 17}"
            place.mkdir(parents=True, exist_ok=True)
            needle = "the needle\n" if number % 1_000 == 0 else ""
            (place / f"f{number}.txt").write_text("some words in a line\n" * 20 + needle)
        ripgrep = shutil.which("rg")
        async with toolbox(root) as box:
            for pattern in ("the needle", "the ne+dle$"):
                floor_ms = None
                if ripgrep is not None:
                    floor_ms = printed(ripgrep, "--line-number", pattern, cwd=directory)[0] * 1e3
                grep = call("grep", pattern=pattern)
                times = await timed(3, partial(box.run, grep, "call_1_0", unwatched))
                row(f"grep `{pattern}` over {files:,} files, ripgrep's floor", times, None, floor_ms)


async def main(files: int) -> None:
    await steps("read_file", lambda index: call("read_file", path="a.txt", limit=index + 1), 5)
    await steps("shell, unconfined", lambda index: call("shell", command=f"echo {index}"), 8)
    for name, sandbox in sandboxes().items():
        limit_ms = 10 if isinstance(sandbox, Landlock) else 20
        await steps(f"shell, {name}", lambda index: call("shell", command=f"echo {index}"), limit_ms, sandbox=sandbox)
    await commands()
    await keeping()
    await small_calls()
    await large_edit()
    await search(files)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--files", type=int, default=50_000, help="how many files grep searches")
    options = parser.parse_args()
    asyncio.run(main(options.files))
    report(ROWS, options.json)
