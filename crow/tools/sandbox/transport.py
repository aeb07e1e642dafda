"""Lets the event loop use a child process that another thread has started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, Protocol

from crow.tools.process import Process


class Child(Protocol):
    """The members of a child process that this module uses. A :class:`subprocess.Popen` with unbuffered pipes has
    them."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    returncode: int | None
    """The exit code, or the negative number of the signal that ended the child. None until `poll` or `wait` has seen
    its end."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the child runs."""

    def wait(self) -> int:
        """Wait for the end of the child."""

    def send_signal(self, sig: int, /) -> None:
        """Signal the child, unless it has ended."""


async def adopt(child: Child, process: Process) -> None:
    """Connect a child to the running event loop. The child's pipes must be unbuffered.

    :raises OSError: the child's pipes cannot be used; the child is killed with its process group.
    """
    transport = _ChildTransport(child, process)
    process.connection_made(transport)
    try:
        await transport.connect()
    except BaseException:
        process.signal(signal.SIGKILL)  # `close` kills only the child
        transport.close()
        raise


class _ChildTransport(asyncio.SubprocessTransport):
    """The transport of a :class:`~crow.tools.process.Process` for a child that another thread started.

    asyncio's own transport works only for children that asyncio itself started.
    """

    def __init__(self, child: Child, process: Process) -> None:
        super().__init__({"child": child})
        self._child = child
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._pipes: dict[int, asyncio.BaseTransport] = {}
        self._is_closing = False
        self._watch()

    async def connect(self) -> None:
        """Start reading the child's output."""
        child = self._child
        for fd, output in ((1, child.stdout), (2, child.stderr)):
            if output is not None:
                protocol = partial(_PipeProtocol, self._process, fd)
                self._pipes[fd], _ = await self._loop.connect_read_pipe(protocol, output)
        if child.stdin is not None:
            self._pipes[0], _ = await self._loop.connect_write_pipe(asyncio.Protocol, child.stdin)

    def _watch(self) -> None:
        """Watch for the child's end: with a pidfd if the system has it, otherwise in a thread."""
        try:
            handle = os.pidfd_open(self._child.pid)
        except (AttributeError, OSError):
            threading.Thread(target=self._wait, name="wait for a child", daemon=True).start()
            return

        def end() -> None:
            if self._child.poll() is not None:
                self._loop.remove_reader(handle)
                os.close(handle)
                self._process.process_exited()

        self._loop.add_reader(handle, end)

    def _wait(self) -> None:
        self._child.wait()
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._process.process_exited)

    def get_pid(self) -> int:
        """Return the child's process id."""
        return self._child.pid

    def get_returncode(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the child; None while it runs."""
        return self._child.returncode

    def get_pipe_transport(self, fd: int) -> asyncio.BaseTransport | None:
        """Return the transport of the child's standard input (0), output (1) or error (2)."""
        return self._pipes.get(fd)

    def send_signal(self, signal: int) -> None:
        """Signal the child. Do nothing if it has ended."""
        self._child.send_signal(signal)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._child.send_signal(signal.SIGKILL)

    def is_closing(self) -> bool:
        """Return whether `close` was called."""
        return self._is_closing

    def close(self) -> None:
        """Close the pipes. A child that still runs is killed."""
        if self._is_closing:
            return
        self._is_closing = True
        for fd, pipe in ((0, self._child.stdin), (1, self._child.stdout), (2, self._child.stderr)):
            connected = self._pipes.get(fd)
            if connected is not None:
                connected.close()
            elif pipe is not None:
                pipe.close()
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGKILL)
            # the event loop may be closed before it notices that the child has ended
            threading.Thread(target=self._child.wait, name="wait for a child", daemon=True).start()


class _PipeProtocol(asyncio.Protocol):
    """Passes the output of one pipe on to the process."""

    def __init__(self, process: Process, fd: int) -> None:
        self._process = process
        self._fd = fd

    def data_received(self, data: bytes) -> None:
        """Pass on a piece of output. Called by asyncio."""
        self._process.pipe_data_received(self._fd, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on that the pipe is closed. Called by asyncio."""
        self._process.pipe_connection_lost(self._fd, exc)


async def start_in_thread(start: Callable[[], subprocess.Popen[bytes]], process: Process) -> None:
    """Start a child in a new thread, and connect it to the event loop. The thread ends as soon as the child runs.

    A change that the thread makes to itself, such as giving up rights, affects the child but no other thread.

    :raises OSError: the child could not be started.
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()

    def run() -> None:
        child = None
        try:
            child = start()
            loop.call_soon_threadsafe(started.set_result, child)
        except BaseException as error:  # noqa: BLE001 - the event loop raises it
            if child is None:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(started.set_exception, error)
            else:  # the event loop was closed meanwhile
                _discard(child)

    threading.Thread(target=run, name="start a confined command", daemon=True).start()
    try:
        child = await asyncio.shield(started)
    except asyncio.CancelledError:
        started.add_done_callback(_kill_child)
        raise
    await adopt(child, process)


def _kill_child(started: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Kill a child if its caller was cancelled while the child was being started."""
    if started.exception() is None:
        threading.Thread(target=_discard, args=(started.result(),), name="end a child", daemon=True).start()


def _discard(child: subprocess.Popen[bytes]) -> None:
    """Kill a child with its process group, and wait for its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with child:  # closes the pipes and waits
        pass
