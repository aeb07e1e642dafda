"""Processes that leave the group or the parent that started them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from crow.tools.mcp.stdio import ServerProcess
from crow.tools.process import Orphans, Process, ProcessState, adopted, orphans_ended, start, starting
from crow.tools.workspace import LEFT_RUNNING, DiskWorkspace
from tests.tools.conftest import SERVERS, pids_in, runs, stdio, until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a chosen process")

STRAY = f"{sys.executable} -I -S {SERVERS / 'stray.py'}"
AGAIN = SERVERS / "again.sh"


async def unwatched(_text: str) -> None: ...


@pytest.fixture
async def orphans() -> AsyncIterator[None]:
    """Orphans of the test become children of this process and are ended with the test."""
    async with orphans_ended():
        yield


@pytest.fixture
def workspace(root: Path, monkeypatch: pytest.MonkeyPatch) -> DiskWorkspace:
    monkeypatch.setattr("crow.tools.workspace.TERM_S", 0.2)
    return DiskWorkspace(root)


@pytest.mark.parametrize("how", ["", "deaf"])
@pytest.mark.usefixtures("orphans")
async def test_a_process_that_left_session_and_parent_ends_with_its_command(workspace: DiskWorkspace, how: str) -> None:
    code, output = await workspace.run(f"{STRAY} {how}", access="full", timeout_s=100, on_output=unwatched)
    pid = output.removesuffix(LEFT_RUNNING)
    assert (code, output) == (0, f"{pid}{LEFT_RUNNING}")
    await workspace.reap()
    await until_gone(int(pid))


@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.usefixtures("orphans")
async def test_it_ends_with_a_command_that_is_ended(workspace: DiskWorkspace, how: str) -> None:
    pids: list[int] = []

    async def on_output(text: str) -> None:
        pids.append(int(text))
        loop, skipped = asyncio.get_running_loop(), 1000
        real = loop.time
        if how == "timeout":
            loop.time = lambda: real() + skipped  # type: ignore[method-assign]
        else:
            scope.cancel()

    with anyio.CancelScope() as scope:
        await workspace.run(f"{STRAY} deaf stay", access="full", timeout_s=500, on_output=on_output)
    assert scope.cancelled_caught is (how == "cancel")
    await workspace.reap()
    await until_gone(pids[0])


@pytest.mark.usefixtures("orphans")
async def test_it_lives_as_long_as_its_background_command(workspace: DiskWorkspace) -> None:
    printed: list[str] = []
    has_printed = anyio.Event()

    def on_output(text: str) -> None:
        printed.append(text)
        has_printed.set()

    job = await workspace.spawn(f"{STRAY} stay", on_output, access="full")
    with anyio.fail_after(60):
        await has_printed.wait()
    pid = int("".join(printed))
    assert await workspace.run(STRAY, access="full", timeout_s=100, on_output=unwatched)
    await workspace.reap()
    assert runs(pid)
    await job.end(0.2)
    await until_gone(pid)


@pytest.mark.usefixtures("orphans")
async def test_it_ends_with_its_server(root: Path, tmp_path: Path) -> None:
    async with ServerProcess(stdio("unruly.py", "leaves-stray", str(tmp_path / "pids")), DiskWorkspace(root)):
        (pid,) = await pids_in(tmp_path / "pids")
        assert runs(pid)
    await until_gone(pid)


@pytest.mark.usefixtures("orphans")
async def test_a_process_that_is_replacing_its_program_counts_as_alive(root: Path) -> None:
    """While `exec` works, the system shows no environment, and so no mark."""
    line = f"setsid -f sh {AGAIN} {AGAIN} >&- 2>&-"
    process = await start(["sh", "-c", line], cwd=root, env=dict(os.environ), on_output=lambda _: None)
    await process.wait()
    assert all([await process.is_alive() for _ in range(2000)])
    await process.end(20)
    assert not await process.is_alive()


async def test_a_process_with_a_new_environment_is_ended_at_the_end(workspace: DiskWorkspace) -> None:
    """It cannot be told which command has started it."""
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from crow.tools.process import orphans_ended\n"
        "from crow.tools.workspace import DiskWorkspace\n"
        "async def unwatched(text): ...\n"
        "async def main():\n"
        "    async with orphans_ended():\n"
        "        workspace = DiskWorkspace(Path.cwd())\n"
        f"        line = {f'{STRAY} deaf naked'!r}\n"
        "        print((await workspace.run(line, access='full', timeout_s=100, on_output=unwatched))[1])\n"
        "asyncio.run(main())\n"
    )
    done = await anyio.run_process([sys.executable, "-c", program], cwd=workspace.cwd, env={**os.environ, **PYTHON})
    await until_gone(int(done.stdout))


PYTHON = {"PYTHONPATH": str(Path(__file__).parents[2])}


async def test_children_that_the_process_had_before_are_left_alone(root: Path) -> None:
    program = (
        "import asyncio\n"
        "from crow.tools.process import orphans_ended\n"
        "async def main():\n"
        "    async with orphans_ended(): pass\n"
        "asyncio.run(main())\n"
    )
    script = 'setsid sleep 1000 >/dev/null 2>&1 & echo $!; exec "$0" -c "$1"'
    done = await anyio.run_process(
        ["sh", "-c", script, sys.executable, program], cwd=root, env={**os.environ, **PYTHON}
    )
    pid = int(done.stdout)
    assert runs(pid)
    os.kill(pid, 9)


@pytest.mark.usefixtures("orphans")
async def test_orphans_that_end_are_released_and_exit_codes_are_not_lost(workspace: DiskWorkspace) -> None:
    codes: list[int | None] = []
    of_others = set(zombies())

    async def run(number: int) -> None:
        line = f"{STRAY} brief; setsid -f true; exit {number}"
        code, _ = await workspace.run(line, access="full", timeout_s=100, on_output=unwatched)
        codes.append(code)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(run, number)
    assert sorted(codes, key=str) == sorted(range(20), key=str)
    assert (await anyio.run_process(["sh", "-c", "exit 7"], check=False)).returncode == 7
    with anyio.fail_after(60):
        while set(zombies()) - of_others:
            await workspace.run("true", access="full", timeout_s=100, on_output=unwatched)
    await workspace.reap()


async def test_children_for_which_crow_waits_are_left_to_it() -> None:
    orphans = Orphans()
    waited_for, started, orphan = [await ended_child() for _ in range(3)]
    Process.not_reaped.add(waited_for.pid)
    with starting():
        orphans.reap()
        assert started.wait() == 7
    orphans.reap()
    assert waited_for.wait() == 7
    Process.not_reaped.discard(waited_for.pid)
    assert not Path(f"/proc/{orphan.pid}").exists()  # noqa: ASYNC240
    orphan.wait()


async def ended_child() -> subprocess.Popen[bytes]:
    """A child in a session of its own that has ended, and for which nobody has waited."""
    child = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)  # noqa: ASYNC220
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def zombies() -> list[int]:
    """The children of this process that have ended and were not released."""
    found = {child.pid: ProcessState.of(child.pid) for child in adopted()}
    return [pid for pid, state in found.items() if state is not None and not state.is_running]
