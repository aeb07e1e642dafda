"""Child processes: their environment, their process group and how they end.

Every child leads its own session, so signals reach all processes that it started, and none of them can ask for input on
a terminal. asyncio's subprocess protocol reports the end of a process separately from the end of its pipes, so crow
does not wait for a grandchild that holds a pipe open.

A process that a child starts may leave the child's process group with `setsid`, and may outlive its parent. On Linux,
crow then becomes its parent. Crow recognises such a process by a mark that the process inherited in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, TypeAlias

import anyio
import anyio.to_thread

from crow.domain.rendering import RESULT_MASK, SecretMask
from crow.domain.secret_values import holds_secret
from crow.runtime import adopt_orphans

logger = logging.getLogger(__name__)

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has only one way to end a process
_KILL_S = 0.3  # time for the event loop to notice that a killed child has ended; only an unkillable child takes longer
_POLL_S = 0.01
"""The time between two checks of processes whose end raises no event."""
_EXEC_READS = 5
"""How many times in a row crow reads the environment of a process that is in the middle of an `exec`."""

_EXEC_POLLS = 50
"""How many times crow checks an orphan that is in the middle of an `exec`. Until the `exec` is done, crow cannot tell
which command the orphan belongs to."""

_DRAIN_S = 0.2
"""How long crow waits for the rest of the output of a child that has ended."""
_KEY_CHARS = 8
"""Crow does not search texts for keys with fewer characters, because any text may contain a short key by chance."""

_PLACEHOLDERS = frozenset(
    (
        *("lm-studio", "not-needed", "not-required", "no-key-needed", "no-key-required", "sk-no-key-required"),
        *("anything", "dummy-key", "placeholder", "undefined", "localhost", "llama.cpp"),
    )
)
"""Texts that users enter as a key if the endpoint needs no key. They are no secrets, so crow does not search texts for
them."""

_MARK = "CROW_STARTED"
"""The environment variable by which crow recognises processes that it started. If one crow process
starts another, the variable holds the marks of both, separated by a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenKeys:
    """The keys of endpoints, which no child process gets, and further secrets."""

    variables: frozenset[str] = frozenset({"OPENAI_API_KEY"})
    """The names of environment variables that hold a key of an endpoint."""
    values: tuple[str, ...] = field(default=(), repr=False)
    """The keys of endpoints. A variable whose value contains one of them is hidden too, whatever its name."""
    others: tuple[str, ...] = field(default=(), repr=False)
    """Further secrets, such as tokens of MCP servers. The results of tools do not show them, but child processes may
    get them."""
    passed: tuple[str, ...] = ()
    """Globs of the names of variables that commands get although they hold secrets other than the keys above."""
    kept: frozenset[str] = frozenset()
    """The names of variables that no command gets, not even if `passed` matches: they hold the credentials that crow
    adds to requests of commands."""

    def withholds(self, name: str, value: str) -> bool:
        """Return whether commands do not get a variable, because it holds a secret of any kind."""
        if self.hides(name, value) or name in self.kept:
            return True
        is_passed = any(fnmatchcase(name, pattern) for pattern in self.passed)
        return not is_passed and holds_secret(name, value, os.path.lexists)

    def hides(self, name: str, value: str) -> bool:
        """Return whether no child process gets a variable, because it holds a key of an endpoint."""
        return name in self.variables or any(_is_searched(key) and key in value for key in self.values)

    @property
    def mask(self) -> SecretMask:
        """The mask that hides the keys and the other secrets in the results of tools."""
        return _result_mask((*self.values, *self.others))

    def names(self) -> tuple[str, ...]:
        """Return the names of the variables to hide from commands that other programs, such as the editor, start for
        crow."""
        return tuple(sorted(self.variables | self.withheld()))

    def withheld(self) -> frozenset[str]:
        """Return the names of this process's own variables that commands do not get."""
        return frozenset(name for name, value in os.environ.items() if self.withholds(name, value))


@lru_cache(maxsize=8)
def _result_mask(values: tuple[str, ...]) -> SecretMask:
    return SecretMask(filter(_is_searched, values), mask=RESULT_MASK, is_guessing=False)


def _is_searched(key: str) -> bool:
    return len(key) >= _KEY_CHARS and key.casefold() not in _PLACEHOLDERS


KeySource: TypeAlias = Callable[[], HiddenKeys]
"""Returns the current keys. They can change while a session is open, because the user may change the settings."""


def child_environment(
    keys: HiddenKeys, *, only: Iterable[str] | None = None, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a child process: this process's own, without variables that contain API keys.

    `only` names the variables to pass on (None: all). The variables in `more` are added even if they contain API keys,
    because the user or crow sets them on purpose.
    """
    passed = os.environ if only is None else {name: os.environ[name] for name in only if name in os.environ}
    allowed = {name: value for name, value in passed.items() if not keys.hides(name, value)}
    return allowed | dict(more or {})


def command_environment(keys: HiddenKeys, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a command: this process's own, without variables that hold secrets of any kind. The
    variables in `more` are added."""
    withheld = keys.withheld()
    return child_environment(keys, only=[name for name in os.environ if name not in withheld], more=more)


async def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    on_output: Callable[[bytes], None],
    on_errors: Callable[[bytes], None] | None = None,
    takes_input: bool = False,
    inherited: Sequence[int] = (),
    make: Callable[[Callable[[bytes], None], Callable[[bytes], None] | None], Process] | None = None,
) -> Process:
    """Start `argv` in its own process group. Without `on_errors`, `on_output` gets standard output and standard error
    in the order of writing.

    If `takes_input` is not set, standard input is /dev/null. The child inherits the open files in `inherited`. `make`
    creates the returned object.

    :raises OSError: there is no such program or directory, or the command line is too long.
    :raises ValueError: an argument contains a NUL.
    """
    process = (make or Process)(on_output, on_errors)
    # Cancelling the start would kill the child, but not the processes that the child has already started.
    with starting(), anyio.CancelScope(shield=True):
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process,
            *argv,
            stdin=asyncio.subprocess.PIPE if takes_input else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT if on_errors is None and make is None else asyncio.subprocess.PIPE,
            cwd=cwd,
            env=process.marked(env),
            pass_fds=inherited,
            start_new_session=True,
        )
    return process


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Enter this context while a child is being started. Until asyncio calls `Process.connection_made`, crow cannot
    tell the child from an orphan."""
    Process.starts += 1
    try:
        yield
    finally:
        Process.starts -= 1
        if not Process.starts and Process.reap_later is not None:
            reap, Process.reap_later = Process.reap_later, None
            reap()


class Process(asyncio.SubprocessProtocol):
    """A running child, made by :func:`start`. The caller must call `end` or `close`."""

    starts: ClassVar[int] = 0
    """How many children are being started now, in the whole process."""
    not_reaped: ClassVar[set[int]] = set()
    """The ids of all children in the whole process that have not been reaped yet."""
    reap_later: ClassVar[Callable[[], None] | None] = None
    """Reaps the orphans that ended while children were being started."""
    _transport: asyncio.SubprocessTransport  # set before `start` returns

    def __init__(self, on_output: Callable[[bytes], None], on_errors: Callable[[bytes], None] | None) -> None:
        self.pid = 0
        """Also the id of the process group."""
        self.exited = anyio.Event()
        """Set when the child has ended. Its output may still be incomplete."""
        self.output_ended = anyio.Event()
        """Set when no process holds the pipe of standard output open any more."""
        self._errors_ended = anyio.Event()
        """The same for standard error, if it has a pipe of its own."""
        self._on_output = on_output
        self._on_errors = on_errors
        self._mark = f"{os.getpid()}-{secrets.token_hex(6)}"
        """Identifies this child. It is in the environment of all processes that the child starts."""
        if on_errors is None:
            self._errors_ended.set()

    def marked(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the child, with a mark. All processes that the child starts inherit the mark.

        If a process has left the process group and lost its parent, crow recognises it by the mark: see
        :class:`Orphans`.
        """
        return {**env, _MARK: f"{os.environ.get(_MARK, '')} {self._mark}".strip()}

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the child; None while it runs."""
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
        """Wait until the child has ended. Then wait a short time for the rest of its output."""
        await self.exited.wait()
        await self.drain()

    async def drain(self) -> None:
        """Wait a short time for the rest of the output. This method does not wait longer, because another process may
        hold the pipes open."""
        with anyio.move_on_after(_DRAIN_S):
            await self.output_ended.wait()
            await self._errors_ended.wait()

    @property
    def left_others(self) -> bool:
        """Whether processes that the child had started were still running when the child ended, and were ended with
        it. Only some sandboxes report this; for other children, the value is False."""
        return False

    @property
    def failure(self) -> str:
        """Why the command did not begin, although a sandbox was started for it. Empty if the command began."""
        return ""

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole group and all processes that have left it, or only the child if the system has no process
        groups. Do nothing if they have already ended."""
        strays, _ = self._find_strays()  # done first, because the children of a process that ends get another parent
        # PermissionError: a set-uid program in the group runs as another user
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.pid, number)
            else:
                self._transport.send_signal(number)
        for stray in strays:
            stray.signal(number)

    async def is_alive(self) -> bool:
        """Return whether the child, or any process that it started, still runs."""
        if not self.exited.is_set() or not hasattr(os, "killpg"):
            return not self.exited.is_set()
        # Check the group before the strays: a process may leave the group meanwhile, but never comes back.
        if await self._has_group():
            return True
        for _ in range(_EXEC_POLLS):
            strays, is_complete = self._find_strays()
            if strays or is_complete:
                return bool(strays)
            await anyio.sleep(_POLL_S)
        return False

    async def _has_group(self) -> bool:
        """Return whether a process of the group still runs."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return await anyio.to_thread.run_sync(_has_running_member, self.pid)

    def _find_strays(self) -> tuple[list[Relative], bool]:
        """Return the descendants of the child that have left its group, and whether the list is complete. While an
        orphan is in the middle of an `exec`, the list may not be complete, because crow cannot tell yet whether the
        orphan belongs to the child."""
        orphans = {each: each.has_mark(self._mark) for each in adopted() if each.pid not in self.not_reaped}
        roots = [] if self.exited.is_set() else [Relative(pid=self.pid, parent=os.getpid())]
        roots += [each for each, is_marked in orphans.items() if is_marked]
        strays = [each for each in _families(roots) if each.is_running_outside(self.pid)]
        return strays, None not in orphans.values()

    async def end(self, grace_s: float) -> None:
        """Send SIGTERM. After `grace_s`, send SIGKILL to all processes that still run. Then close the pipes. Return at
        most 0.3 s after `grace_s`."""
        self.signal(signal.SIGTERM)
        is_gone = False
        try:
            with anyio.move_on_after(grace_s):
                await self.exited.wait()
                while await self.is_alive():  # noqa: ASYNC110 - the end of a grandchild raises no event
                    await anyio.sleep(_POLL_S)
                is_gone = True
        finally:
            if not is_gone:
                self.signal(KILL)
                with anyio.move_on_after(_KILL_S, shield=True):
                    await self.exited.wait()
                    while await self.is_alive():  # new processes may have been started since the signal was sent
                        self.signal(KILL)
                        await anyio.sleep(_POLL_S)
            self.close()

    def close(self) -> None:
        """Close the pipes. A child that still runs is killed."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the child runs. Called by asyncio."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()
        self.not_reaped.add(self.pid)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take a piece of standard output (1) or error (2). Called by asyncio."""
        if fd == 1:
            self._on_output(data)
        elif self._on_errors is not None:
            self._on_errors(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Note that a pipe has ended. Called by asyncio."""
        if fd == 1:
            self.output_ended.set()
        elif fd == 2:
            self._errors_ended.set()

    def process_exited(self) -> None:
        """Note that the child has ended and was reaped. Called by asyncio."""
        self.not_reaped.discard(self.pid)
        self.exited.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """A line of /proc/PID/stat."""

    state: bytes
    """One letter."""
    parent: int
    """The id of the parent."""
    group: int
    """The id of the process group."""
    session: int
    """The id of the session."""
    has_empty_environment: bool
    """Whether the environment is empty. False in the middle of an `exec`, because this is not known then."""

    @classmethod
    def of(cls, pid: int | str) -> ProcessState | None:
        """Return the state of a process; None if the process has ended, or if the system does not show its state."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, *fields = file.read().rpartition(b")")[2].split()
            parent, group, session = map(int, fields[:3])
            start_code, env_start, env_end = fields[22], *fields[46:48]
        except (OSError, ValueError):
            return None
        # An `exec` sets start_code last. Until then, the system shows 0 or 1.
        is_empty = env_start == env_end and start_code not in (b"0", b"1")
        return cls(state=state, parent=parent, group=group, session=session, has_empty_environment=is_empty)

    @property
    def is_running(self) -> bool:
        """Whether the process still runs. A zombie does not."""
        return self.state not in (b"Z", b"X")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """A descendant of this process."""

    pid: int
    parent: int
    """The id of its parent when crow found it."""

    def has_mark(self, mark: str) -> bool | None:
        """Return whether the process was started with this mark in its environment. None means that the process is in
        the middle of an `exec`. During an `exec`, the system does not show the environment."""
        try:
            for _ in range(_EXEC_READS):
                if environment := self._environment():
                    return mark.encode() in environment
                found = ProcessState.of(self.pid)
                if found is None or not found.is_running or found.has_empty_environment:
                    return False
        except OSError:
            return False
        return None

    def _environment(self) -> bytes:
        with open(f"/proc/{self.pid}/environ", "rb") as file:
            return file.read()

    def is_running_outside(self, group: int) -> bool:
        """Return whether the process still runs, in a group other than `group`."""
        found = ProcessState.of(self.pid)
        return found is not None and found.is_running and found.group != group

    def signal(self, number: signal.Signals) -> None:
        """Signal the process. Do nothing if its id now belongs to another process."""
        with contextlib.suppress(OSError):  # the process has ended, or runs as another user
            handle = os.pidfd_open(self.pid)
            try:
                found = ProcessState.of(self.pid)
                if found is not None and found.parent in (self.parent, os.getpid()):
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def adopted() -> list[Relative]:
    """Return the children of the main thread. These are the orphans, because the system makes the main thread their
    parent, and most commands, because the main thread starts them."""
    pid = os.getpid()
    return [Relative(pid=child, parent=pid) for child in _children_of(pid, pid)]


def _families(roots: Iterable[Relative]) -> Iterator[Relative]:
    """Yield `roots` and all their descendants."""
    waiting = list(roots)
    while waiting:
        yield (found := waiting.pop())
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{found.pid}/task"):
                waiting += [Relative(pid=child, parent=found.pid) for child in _children_of(found.pid, thread)]


def _children_of(pid: int, thread: int | str) -> list[int]:
    """Return the children of a thread; empty if the system does not show them."""
    try:
        with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


@contextlib.asynccontextmanager
async def orphans_ended() -> AsyncIterator[None]:
    """Adopt orphans and reap those that end. When the block is left, kill all orphans that remain.

    A process may enter this context only once. The code in the block must end its own children.
    """
    orphans, loop = Orphans(), asyncio.get_running_loop()
    if orphans.is_adopting:
        loop.add_signal_handler(signal.SIGCHLD, orphans.reap)
    try:
        yield
    finally:
        await orphans.end()
        if orphans.is_adopting:
            loop.remove_signal_handler(signal.SIGCHLD)


class Orphans:
    """Descendants of this process that have lost their parent. On Linux, this process becomes their parent.

    If this process replaced another program (by `exec`), it has inherited that program's children. Crow leaves these
    children alone. `reap` must be called when a child has ended.
    """

    def __init__(self) -> None:
        self.is_adopting = adopt_orphans()
        """Whether the system gives orphans to this process."""
        self._foreign = {child.pid for child in adopted()}

    def reap(self) -> None:
        """Reap the orphans that have ended. Do not reap the children that crow itself started, because other code waits
        for them."""
        if Process.starts:
            Process.reap_later = self.reap
            return
        for child in self._orphans():
            if child.pid not in Process.not_reaped:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)

    async def end(self) -> None:
        """Kill all processes that commands and servers have left behind, within 0.3 s. Call this after all commands and
        servers have ended."""
        left: list[Relative] = []
        with anyio.move_on_after(_KILL_S, shield=True):
            while left := [each for each in _families(self._certain_orphans()) if each.is_running_outside(0)]:
                for each in left:
                    each.signal(KILL)
                self.reap()
                await anyio.sleep(_POLL_S)
        if left:
            logger.warning("These processes cannot be killed: %s", ", ".join(str(each.pid) for each in left))

    def _certain_orphans(self) -> list[Relative]:
        """Return the orphans that certainly come from crow. If this process has inherited children of another program,
        only the orphans with crow's mark are certain."""
        mark = f"{os.getpid()}-"
        return [each for each in self._orphans() if not self._foreign or each.has_mark(mark)]

    def _orphans(self) -> list[Relative]:
        if not self.is_adopting:
            return []
        own = os.getsid(0)
        states = [(child, ProcessState.of(child.pid)) for child in adopted() if child.pid not in self._foreign]
        return [child for child, state in states if state is not None and state.session != own]


def _has_running_member(group: int) -> bool:
    """Return whether the group has a process that is not a zombie. True if the system cannot tell."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return True
    if "self" not in names:
        return True
    states = map(ProcessState.of, filter(str.isdigit, names))
    return any(found is not None and found.group == group and found.is_running for found in states)
