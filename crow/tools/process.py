"""Child processes: what they are started with, and the process group that each leads.

asyncio's subprocess protocol tells the end of a process and the end of its pipes apart, so that a grandchild that holds
a pipe open delays nobody. Every child leads a session of its own: signals reach all that it started, and no terminal
can be asked for anything. Standard input is /dev/null unless the child is spoken to.
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

__all__ = ["HiddenKeys", "KeySource", "Process", "child_environment", "found_program", "start"]

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows knows one way to end a process
KILL_S = 0.3  # for the loop to hear of a killed child; only an unkillable one takes so long
POLL_S = 0.01
DRAIN_S = 0.2
KEY_CHARS = 8
"""A key shorter than that may stand in any variable by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenKeys:
    """The keys of endpoints, which no child process gets.

    `variables` are the names of environment variables that hold one, `values` the keys themselves: a variable that
    contains one of them is hidden too, whatever it is called.
    """

    variables: frozenset[str] = frozenset({"OPENAI_API_KEY"})
    values: tuple[str, ...] = field(default=(), repr=False)

    def hides(self, name: str, value: str) -> bool:
        """Whether a variable must not reach a child."""
        return name in self.variables or any(len(key) >= KEY_CHARS and key in value for key in self.values)

    def names(self) -> tuple[str, ...]:
        """The variables to hide from what others start for us: those named, and those here that hold a key."""
        return tuple(sorted(self.variables | {name for name, value in os.environ.items() if self.hides(name, value)}))


KeySource: TypeAlias = Callable[[], HiddenKeys]
"""Gives the keys as they are now: the user may change their settings while a session is open."""


def child_environment(
    keys: HiddenKeys, *, only: Iterable[str] | None = None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment for a child process: this process's own, without the keys of endpoints.

    `only` names the variables to pass on (None: all). `more` is added as it is: what the user or crow gives on purpose.
    """
    passed = os.environ if only is None else {name: os.environ[name] for name in only if name in os.environ}
    kept = {name: value for name, value in passed.items() if not keys.hides(name, value)}
    return kept | dict(more or {})


class Process(asyncio.SubprocessProtocol):
    """A running child. Made by :func:`start`; whoever starts it must see `end` through."""

    def __init__(self, on_output: Callable[[bytes], None], on_errors: Callable[[bytes], None] | None) -> None:
        self.pid = 0
        self.exited = anyio.Event()
        self.output_ended = anyio.Event()
        self._on_output = on_output
        self._on_errors = on_errors
        self._transport: asyncio.SubprocessTransport | None = None

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, or None while it runs."""
        return self._opened().get_returncode()

    def write(self, data: bytes) -> int:
        """Send to standard input without waiting; returns how many bytes the child has not taken yet."""
        pipe = self._opened().get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        if not pipe.is_closing():
            pipe.write(data)
        return pipe.get_write_buffer_size()

    def close_input(self) -> None:
        """Close standard input once what was written is through."""
        pipe = self._opened().get_pipe_transport(0)
        if pipe is not None:
            pipe.close()

    def pause(self) -> None:
        """Take no more output until `resume`."""
        pipe = self._opened().get_pipe_transport(1)
        if isinstance(pipe, asyncio.ReadTransport) and not pipe.is_closing():
            pipe.pause_reading()

    def resume(self) -> None:
        """Take output again."""
        pipe = self._opened().get_pipe_transport(1)
        if isinstance(pipe, asyncio.ReadTransport) and not pipe.is_closing():
            pipe.resume_reading()

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group, or where there are no groups the child; one that is gone is fine."""
        # gone, or become somebody else's by a set-uid program
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.pid, number)
            else:
                self._opened().send_signal(number)

    async def is_alive(self) -> bool:
        """Whether anything of the group still runs."""
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
        """SIGTERM, SIGKILL after `grace_s` to what is left, and the pipes closed. Takes at most 0.3 s longer."""
        self.signal(signal.SIGTERM)
        gone = False
        try:
            with anyio.move_on_after(grace_s):
                await self._wait_gone()
                gone = True
        finally:
            if not gone:
                self.signal(KILL)
                with anyio.move_on_after(KILL_S, shield=True):
                    await self.exited.wait()
            self.close()

    async def wait(self) -> None:
        """Until the child has ended, and then for what it still had to say; one who holds its pipe open is not waited
        for."""
        await self.exited.wait()
        with anyio.move_on_after(DRAIN_S):
            await self.output_ended.wait()

    async def _wait_gone(self) -> None:
        await self.exited.wait()
        while await self.is_alive():  # noqa: ASYNC110 - nobody tells of the end of a grandchild
            await anyio.sleep(POLL_S)

    def close(self) -> None:
        """Close the pipes. A child that still runs is killed."""
        self._opened().close()

    def _opened(self) -> asyncio.SubprocessTransport:
        assert self._transport is not None, "start() connects before it returns"
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: the child runs."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """asyncio's: a piece of standard output (1) or error (2)."""
        if fd == 1:
            self._on_output(data)
        elif self._on_errors is not None:
            self._on_errors(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """asyncio's: a pipe ended."""
        if fd == 1:
            self.output_ended.set()

    def process_exited(self) -> None:
        """asyncio's: the child is over and reaped."""
        self.exited.set()


async def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    on_output: Callable[[bytes], None],
    on_errors: Callable[[bytes], None] | None = None,
    takes_input: bool = False,
) -> Process:
    """Start `argv` in a process group of its own. Without `on_errors`, errors go where output goes, in order.

    :raises OSError: no such program, no such directory, too long a command line.
    :raises ValueError: a NUL in an argument.
    """
    loop = asyncio.get_running_loop()
    _, process = await loop.subprocess_exec(
        lambda: Process(on_output, on_errors),
        *argv,
        stdin=asyncio.subprocess.PIPE if takes_input else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if on_errors is None else asyncio.subprocess.PIPE,
        cwd=cwd,
        env=dict(env),
        start_new_session=True,
    )
    return process


def has_running_member(group: int) -> bool:
    """Whether a process of the group is more than a zombie that its parent has not collected; True where the system
    cannot tell."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return True
    if "self" not in names:
        return True
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _parent, process_group = file.read().rpartition(b")")[2].split()[:3]
        except OSError:
            continue  # it ended meanwhile
        if int(process_group) == group and state not in (b"Z", b"X"):
            return True
    return False


# FROM tools.programs: Programs that crow runs of its own accord, found where no repository could have put them.
#
# Strategy: the directories of PATH in order, without those that are relative or lie inside the workspace; of what is
# found there, a link that leads into the workspace does not count either. Knows no program.


def found_program(name: str, is_inside: Callable[[Path], bool]) -> str | None:
    """The absolute path of the first program of this name on PATH that is not inside the workspace, None without one.

    Where the workspace is the whole file system, everything on PATH counts.
    """
    is_everything = is_inside(Path(os.sep))
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if not os.path.isabs(directory):
            continue
        path = os.path.join(directory, name)
        if not os.access(path, os.X_OK) or not os.path.isfile(path):
            continue
        places = (Path(os.path.realpath(directory)), Path(os.path.realpath(path)))
        if is_everything or not any(map(is_inside, places)):
            return path
    return None
