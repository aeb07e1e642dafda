"""Child processes: their environment, their process group and how they end.

Every child leads its own session, so signals reach all processes that it started, and none of them can ask for input on
a terminal. asyncio's subprocess protocol reports the end of a process separately from the end of its pipes, so a
grandchild that holds a pipe open delays nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.to_thread

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has only one way to end a process
KILL_S = 0.3  # time for the event loop to notice that a killed child has ended; only an unkillable child takes longer
POLL_S = 0.01
DRAIN_S = 0.2
KEY_CHARS = 8
"""Shorter keys are not searched for in the values of variables, because any variable may contain one by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenKeys:
    """The keys of endpoints, which no child process gets.

    `variables` are the names of environment variables that hold a key; `values` are the keys themselves. A variable
    whose value contains a key is hidden too, whatever its name.
    """

    variables: frozenset[str] = frozenset({"OPENAI_API_KEY"})
    values: tuple[str, ...] = field(default=(), repr=False)

    def hides(self, name: str, value: str) -> bool:
        """Whether a variable must not reach a child."""
        return name in self.variables or any(len(key) >= KEY_CHARS and key in value for key in self.values)

    def names(self) -> tuple[str, ...]:
        """The names of the variables to hide from processes that other programs start for crow."""
        return tuple(sorted(self.variables | {name for name, value in os.environ.items() if self.hides(name, value)}))


KeySource: TypeAlias = Callable[[], HiddenKeys]
"""Returns the current keys: the user may change the settings while a session is open."""


def child_environment(
    keys: HiddenKeys, *, only: Iterable[str] | None = None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment for a child process: this process's own, without the keys of endpoints.

    `only` names the variables to pass on (None: all). `more` is added without a check for keys, because the user or
    crow sets these variables on purpose.
    """
    passed = os.environ if only is None else {name: os.environ[name] for name in only if name in os.environ}
    allowed = {name: value for name, value in passed.items() if not keys.hides(name, value)}
    return allowed | dict(more or {})


def found_program(name: str, is_inside: Callable[[Path], bool]) -> str | None:
    """The absolute path of the first program with this name on PATH that is not in the workspace; None if there is
    none.

    Programs that are links into the workspace, and relative directories on PATH, do not count. If the workspace is the
    whole file system, everything in absolute directories on PATH counts.
    """
    is_everything = is_inside(Path(os.sep))
    for directory in filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)):
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            places = (Path(os.path.realpath(directory)), Path(os.path.realpath(path)))
            if is_everything or not any(map(is_inside, places)):
                return path
    return None


async def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    on_output: Callable[[bytes], None],
    on_errors: Callable[[bytes], None] | None = None,
    takes_input: bool = False,
    make: Callable[[Callable[[bytes], None], Callable[[bytes], None] | None], Process] | None = None,
) -> Process:
    """Start `argv` in its own process group. Without `on_errors`, standard error goes to `on_output` too, in the order
    of writing.

    Standard input is /dev/null unless `takes_input`. `make` creates the returned object.

    :raises OSError: there is no such program or directory, or the command line is too long.
    :raises ValueError: an argument contains a NUL.
    """
    _, process = await asyncio.get_running_loop().subprocess_exec(
        lambda: (make or Process)(on_output, on_errors),
        *argv,
        stdin=asyncio.subprocess.PIPE if takes_input else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if on_errors is None and make is None else asyncio.subprocess.PIPE,
        cwd=cwd,
        env=dict(env),
        start_new_session=True,
    )
    return process


class Process(asyncio.SubprocessProtocol):
    """A running child, made by :func:`start`. The caller must call `end` or `close`."""

    _transport: asyncio.SubprocessTransport  # set before `start` returns

    def __init__(self, on_output: Callable[[bytes], None], on_errors: Callable[[bytes], None] | None) -> None:
        self.pid = 0
        self.exited = anyio.Event()
        self.output_ended = anyio.Event()
        self.errors_ended = anyio.Event()
        self._on_output = on_output
        self._on_errors = on_errors
        if on_errors is None:
            self.errors_ended.set()

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._transport.get_returncode()

    def write(self, data: bytes) -> int:
        """Send data to standard input without waiting. Return how many bytes are still waiting to be sent."""
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        if not pipe.is_closing():
            pipe.write(data)
        return pipe.get_write_buffer_size()

    def close_input(self) -> None:
        """Close standard input after all written data has been sent."""
        pipe = self._transport.get_pipe_transport(0)
        if pipe is not None:
            pipe.close()

    def read_output(self, is_wanted: bool) -> None:
        """Continue reading standard output if `is_wanted`, otherwise pause reading."""
        pipe = self._transport.get_pipe_transport(1)
        if isinstance(pipe, asyncio.ReadTransport) and not pipe.is_closing():
            (pipe.resume_reading if is_wanted else pipe.pause_reading)()

    async def wait(self) -> None:
        """Wait until the child has ended, and a short time for the rest of its output."""
        await self.exited.wait()
        await self.drain()

    async def drain(self) -> None:
        """Wait a short time for the rest of the output. Another process may hold the pipes open."""
        with anyio.move_on_after(DRAIN_S):
            await self.output_ended.wait()
            await self.errors_ended.wait()

    @property
    def left_others(self) -> bool:
        """Whether the child left processes running that have already been ended."""
        return False

    @property
    def failure(self) -> str:
        """Why the command never began, although a child was started for it; empty if it did."""
        return ""

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group, or only the child if the system has no process groups. Do nothing if they have
        already ended."""
        # PermissionError: a set-uid program in the group runs as another user
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.pid, number)
            else:
                self._transport.send_signal(number)

    async def is_alive(self) -> bool:
        """Whether any process of the group still runs."""
        if not self.exited.is_set() or not hasattr(os, "killpg"):
            return not self.exited.is_set()
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return await anyio.to_thread.run_sync(has_running_member, self.pid)

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL to what remains after `grace_s`, and close the pipes. Returns at most 0.3 s after
        `grace_s`."""
        self.signal(signal.SIGTERM)
        is_gone = False
        try:
            with anyio.move_on_after(grace_s):
                await self.exited.wait()
                while await self.is_alive():  # noqa: ASYNC110 - the end of a grandchild raises no event
                    await anyio.sleep(POLL_S)
                is_gone = True
        finally:
            if not is_gone:
                self.signal(KILL)
                with anyio.move_on_after(KILL_S, shield=True):
                    await self.exited.wait()
            self.close()

    def close(self) -> None:
        """Close the pipes. A child that still runs is killed."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the child runs."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by asyncio with a piece of standard output (1) or error (2)."""
        if fd == 1:
            self._on_output(data)
        elif self._on_errors is not None:
            self._on_errors(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Called by asyncio when a pipe has ended."""
        if fd == 1:
            self.output_ended.set()
        elif fd == 2:
            self.errors_ended.set()

    def process_exited(self) -> None:
        """Called by asyncio when the child has ended and was reaped."""
        self.exited.set()


def has_running_member(group: int) -> bool:
    """Whether the group has a process that is not a zombie; True if the system cannot tell."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return True
    if "self" not in names:
        return True
    for name in filter(str.isdigit, names):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _parent, process_group = file.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue  # it has ended meanwhile
        if int(process_group) == group and state not in (b"Z", b"X"):
            return True
    return False
