"""A child that another thread has started behaves like one that asyncio has started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from crow.tools import process as processes
from crow.tools.process import Process, ProcessState
from crow.tools.sandbox.transport import start_in_thread

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs process groups and pipes")
Start = Callable[..., Awaitable[Process]]


async def start_elsewhere(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    on_output: Callable[[bytes], None],
    on_errors: Callable[[bytes], None] | None = None,
    takes_input: bool = False,
) -> Process:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            bufsize=0,
            stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if on_errors is None else subprocess.PIPE,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )

    process = Process(on_output, on_errors)
    await start_in_thread(start, process)
    return process


@pytest.fixture(params=["asyncio", "thread", "thread without pidfd"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """A way to start a shell command in a temporary directory."""
    if request.param == "thread without pidfd":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    starter: Any = processes.start if request.param == "asyncio" else start_elsewhere

    async def start(script: str, on_output: Callable[[bytes], None] = lambda _: None, **options: Any) -> Process:
        argv = options.pop("argv", ["/bin/sh", "-c", script])
        found: Process = await starter(
            argv, **{"cwd": tmp_path, "env": dict(os.environ)} | options, on_output=on_output
        )
        return found

    return start


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9)])
async def test_the_exit_code_and_the_output_arrive(start: Start, script: str, code: int) -> None:
    output = bytearray()
    process = await start(f"printf a; printf b >&2; printf c; {script}", output.extend)
    await process.exited.wait()
    await process.output_ended.wait()
    process.close()
    assert (process.returncode, bytes(output)) == (code, b"abc")


async def test_input_output_and_errors_are_separate(start: Start) -> None:
    output, errors = bytearray(), bytearray()
    process = await start("cat; echo problem >&2", output.extend, on_errors=errors.extend, takes_input=True)
    process.write(b"one ")
    process.write(b"x" * 200_000)
    process.close_input()
    await process.exited.wait()
    await process.output_ended.wait()
    await process.wait()
    process.close()
    assert (bytes(output), bytes(errors)) == (b"one " + b"x" * 200_000, b"problem\n")


async def test_megabytes_arrive_whole_and_reading_can_pause(start: Start) -> None:
    sizes: list[int] = []
    process = await start("head -c 7000000 /dev/zero", lambda data: sizes.append(len(data)))
    process.read_output(False)
    paused = sum(sizes)
    process.read_output(True)
    await process.output_ended.wait()
    await process.exited.wait()
    process.close()
    assert paused < sum(sizes) == 7_000_000


async def test_the_end_is_seen_while_a_grandchild_holds_the_output_open(start: Start) -> None:
    process = await start("sleep 60 & echo done")
    await process.exited.wait()
    assert not process.output_ended.is_set()
    assert await process.is_alive()
    await process.end(1)
    assert not await process.is_alive()


async def test_a_child_that_ignores_sigterm_is_killed(start: Start) -> None:
    ready = anyio.Event()
    process = await start("trap '' TERM; echo ready; while :; do sleep 1; done", lambda _: ready.set())
    await ready.wait()
    await process.end(0.1)
    await process.exited.wait()
    assert process.returncode == -signal.SIGKILL


async def test_closing_kills_a_running_child(start: Start) -> None:
    process = await start("exec sleep 60")
    process.close()
    process.close()
    await process.exited.wait()
    assert process.returncode == -signal.SIGKILL


async def test_a_missing_program_or_directory_raises_an_error(start: Start, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await start("", argv=["/no/such/program"])
    with pytest.raises(FileNotFoundError):
        await start("true", cwd=tmp_path / "missing")
    with pytest.raises(ValueError, match="null byte"):
        await start("", argv=["/bin/echo", "a\0b"])


async def test_the_child_leads_its_own_session_and_inherits_no_file(start: Start) -> None:
    output = bytearray()
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    process = await start(f"cut -d' ' -f6 /proc/$$/stat; readlink /proc/$$/fd/{reader}", output.extend)
    await process.wait()
    process.close()
    os.close(reader)
    os.close(writer)
    assert bytes(output) == f"{process.pid}\n".encode()


def test_a_child_is_reaped_if_the_event_loop_ends_first(tmp_path: Path) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(["sleep", "60"], bufsize=0, stdout=subprocess.PIPE, start_new_session=True))
        return children[0]

    async def main() -> None:
        process = Process(lambda _: None, None)
        await start_in_thread(start, process)
        process.close()

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "wait for a child":
            thread.join()
    assert children[0].returncode == -signal.SIGKILL


async def test_a_child_dies_if_its_starter_is_cancelled(tmp_path: Path) -> None:
    may_start, children = threading.Event(), []

    def start() -> subprocess.Popen[bytes]:
        may_start.wait()
        children.append(subprocess.Popen(["sleep", "60"], bufsize=0, stdout=subprocess.PIPE, start_new_session=True))
        return children[0]

    starting = asyncio.ensure_future(start_in_thread(start, Process(lambda _: None, None)))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_start.set()
    while not children or children[0].returncode is None:  # noqa: ASYNC110 - a thread sets it
        await anyio.sleep(0.01)
    assert children[0].returncode == -signal.SIGKILL


async def test_all_processes_of_a_child_die_if_its_starter_is_cancelled_while_the_pipes_are_connected() -> None:
    background: list[int] = []

    def start() -> subprocess.Popen[bytes]:
        argv = ["/bin/sh", "-c", "sleep 1000 & echo $!; wait"]
        child = subprocess.Popen(
            argv, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        background.append(int(child.stdout.readline()))
        return child

    process = Process(lambda _: None, None)
    starting = asyncio.ensure_future(start_in_thread(start, process))
    while not process.pid:  # noqa: ASYNC110 - a pipe is being connected from then on
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    try:
        with anyio.fail_after(30):
            while (state := ProcessState.of(background[0])) is not None and state.is_running:  # noqa: ASYNC110
                await anyio.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
