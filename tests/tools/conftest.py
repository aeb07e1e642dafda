"""A workspace in a temporary directory, small ports, and an open toolbox."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.domain.entries import PlanItem
from crow.domain.messages import ToolCall
from crow.programs import Programs
from crow.tools import ElicitationHandler, Outcome, PlannedCall, Ports, RecallQuery, SubagentRunner
from crow.tools.in_context import CallPart
from crow.tools.mcp.client import McpToolbox, ToolSettings, open_toolbox
from crow.tools.servers import McpServer, ServerOptions, StdioServer
from crow.tools.workspace import DiskWorkspace

OPTIONS = ServerOptions()
SERVERS = Path(__file__).with_name("servers")


class RecordingLog:
    """A log that records changes and answers `recall` with its arguments."""

    def __init__(self) -> None:
        self.out_of_context: set[CallPart] = set()
        self.changes: list[tuple[str, Path, bytes | None, bytes | None]] = []
        self.queries: list[RecallQuery] = []
        self.kept: list[tuple[str, str, Path]] = []

    def in_context(self, part: CallPart, _reader: str) -> bool:
        return part not in self.out_of_context

    async def recall(self, query: RecallQuery, *, limit: int) -> str:
        self.queries.append(query)
        return f"words={query.words} entry={query.entry} limit={limit}"

    async def before_change(
        self, call_id: str, path: Path, before: bytes | None, after: bytes | None, *, mode: int | None = None
    ) -> None:
        on_disk = await anyio.Path(path).read_bytes() if await anyio.Path(path).exists() else None
        assert on_disk == before, "called before the file changes"
        self.changes.append((call_id, path, before, after))

    async def before_keeping(self, call_id: str, change_set: str, directory: Path) -> None:
        self.kept.append((call_id, change_set, directory))


class FixedPlan:
    """A plan that never changes."""

    def __init__(self, *items: PlanItem) -> None:
        self._items = items

    def current(self) -> tuple[PlanItem, ...]:
        return self._items


class Box:
    """An open toolbox with shortcuts for calls."""

    def __init__(self, toolbox: McpToolbox, log: RecordingLog, workspace: DiskWorkspace) -> None:
        self.toolbox = toolbox
        self.log = log
        self.workspace = workspace
        self.shown: list[str] = []

    async def run(self, tool: str, /, **arguments: object) -> Outcome:
        return await self.toolbox.run(call(tool, **arguments), "call_7_0", self.show)

    async def plan(self, tool: str, /, **arguments: object) -> PlannedCall:
        return await self.toolbox.plan(call(tool, **arguments))

    async def show(self, text: str) -> None:
        self.shown.append(text)


OpenBox = Callable[..., AbstractAsyncContextManager[Box]]


def call(tool: str, /, **arguments: object) -> ToolCall:
    return ToolCall(id="c", name=tool, arguments=json.dumps(arguments))


def stdio(
    script: str,
    *args: str,
    name: str = "srv",
    env: tuple[tuple[str, str], ...] = (),
    options: ServerOptions = OPTIONS,
) -> StdioServer:
    """One of the servers beside this file."""
    command = (sys.executable, "-I", "-S", str(SERVERS / script), *args)
    return StdioServer(name=name, command=command[0], args=command[1:], env=env, options=options)


async def pids_in(path: Path) -> list[int]:
    """Wait for a file in which another process writes process ids."""
    file = anyio.Path(path)
    with anyio.fail_after(60):
        while not await file.exists():  # noqa: ASYNC110 - written by another process
            await anyio.sleep(0.005)
    return [int(pid) for pid in (await file.read_text()).split()]


def skip_time(seconds: float) -> None:
    """Advance the clock of the running event loop: timeouts of this length expire now."""
    loop = asyncio.get_running_loop()
    real = loop.time
    loop.time = lambda: real() + seconds  # type: ignore[method-assign]


async def until_gone(pid: int) -> None:
    """Wait until a process has ended; a zombie counts as ended."""
    with anyio.fail_after(60):
        while runs(pid):  # noqa: ASYNC110 - the end of another process's child raises no event
            await anyio.sleep(0.005)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return Path("/proc/self").exists() is False


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The session's working directory."""
    root = tmp_path / "project"
    root.mkdir()
    return root


@pytest.fixture
def open_box(root: Path, tmp_path: Path) -> OpenBox:
    """Opens a toolbox for the working directory with the given servers."""

    @asynccontextmanager
    async def opened(
        *servers: McpServer,
        plan: tuple[PlanItem, ...] = (),
        subagents: SubagentRunner | None = None,
        elicitation: ElicitationHandler | None = None,
        on_change: Callable[[], Awaitable[None]] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Box]:
        """`settings` are fields of `ToolSettings`."""
        log, workspace = RecordingLog(), DiskWorkspace(root, programs=Programs(tmp_path / "untrusted-programs"))
        ports = Ports(
            log=log, plan=FixedPlan(*plan), subagents=subagents, elicitation=elicitation, in_context=log.in_context
        )
        async with open_toolbox(workspace, ports, servers, ToolSettings(**settings), on_change=on_change) as toolbox:
            try:
                yield Box(toolbox, log, workspace)
            finally:
                await workspace.reap()

    return opened


def nest(directory: Path) -> None:
    """Make directories in each other, many more than functions can call each other in Python, and their path longer
    than a path may be."""
    folder = os.open(directory, os.O_RDONLY)
    for _ in range(2_100):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
