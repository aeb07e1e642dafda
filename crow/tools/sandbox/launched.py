"""Starts confined commands with the help of :mod:`crow.tools.sandbox.launcher`."""

from __future__ import annotations

import marshal
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

import anyio
import anyio.to_thread

from crow.tools.helper import Helper
from crow.tools.network import LISTENER_PORT
from crow.tools.process import KILL, Process, starting
from crow.tools.sandbox import Confinement
from crow.tools.sandbox.bubblewrap import descendants_of, mount_options, overlays_of
from crow.tools.sandbox.seccomp import missing_architecture, namespace_filter
from crow.tools.sandbox.transport import adopt

_PROGRAM = str(Path(__file__).with_name("launcher.py"))
"""The helper's program. Crow does not import it, because that would import modules that crow does not need."""

_TIMEOUT_S = 10.0
_REPORT_BYTES = 2_048


class NotLaunchedError(OSError):
    """The helper could not start a command, so the command did not begin. Another sandbox may be able to start it."""


class _NoProgramError(NotLaunchedError):
    """The helper works, but there is no such program or working directory."""


class Launcher:
    """The helper process of one session. `close` ends it."""

    def __init__(self) -> None:
        self.works = not missing_architecture()
        """Whether the helper has never failed. After its first failure, bubblewrap starts the commands."""
        self._helper = Helper(_PROGRAM, {})  # without variables: commands are started from a copy of this process

    @asynccontextmanager
    async def reserved(self, *, has_network: bool) -> AsyncIterator[Reservation]:
        """Let the helper prepare a sandbox. `Reservation.start` starts a command in it. If that has not happened when
        the block ends, the sandbox is ended.

        :raises NotLaunchedError: the helper does not work here.
        """
        report, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report.setblocking(False)
        reservation = Reservation(report)
        with starting():
            try:
                with other:
                    request = b"no network" if has_network else b"own network"
                    try:
                        socket.send_fds(await self._helper.connection(), [request], [other.fileno()])
                    except OSError as error:
                        raise NotLaunchedError(f"the helper of the sandbox does not run: {error}") from error
                yield reservation
            except NotLaunchedError as error:
                if not isinstance(error, _NoProgramError):
                    self.works = False
                    await self.close()
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await reservation.close()

    async def close(self) -> None:
        """End the helper process. Commands that it has started go on."""
        await self._helper.close()


class Reservation:
    """A sandbox that the helper prepares.

    On `report`, the helper sends the id of the sandbox's first process. Then this process receives the plan of a
    command on the same socket, and reports that the command has begun, has failed, or has ended.
    """

    def __init__(self, report: socket.socket) -> None:
        self._report = report
        self._has_started = False
        """Whether a command has begun. Its `_Child` then owns `report`."""
        self._pid = 0
        """The id of the sandbox's first process; 0 if it is not known yet."""

    async def start(
        self,
        argv: Sequence[str],
        confinement: Confinement,
        *,
        cwd: Path,
        env: Mapping[str, str],
        on_output: Callable[[bytes], None],
        on_errors: Callable[[bytes], None] | None = None,
        takes_input: bool = False,
        on_listener: Callable[[socket.socket], None] | None = None,
    ) -> Process:
        """Start a confined command. See :meth:`crow.tools.sandbox.Confiner.start`.

        :raises NotLaunchedError: this is not possible. The command has not begun.
        """
        process = LaunchedProcess(on_output, on_errors)
        port = 0 if on_listener is None else LISTENER_PORT
        plan = _plan_of(argv, confinement, cwd=cwd, env=process.marked(env), port=port)
        # Cancelling the start would leave a command behind that nobody ends.
        with anyio.CancelScope(shield=True):
            streams = _Streams(takes_input=takes_input, has_errors=on_errors is not None)
            try:
                with streams, _file_with(plan) as file:
                    await self._find_pid()
                    with suppress(ConnectionError):  # the sandbox has failed already, and `_begun` gets the reason
                        socket.send_fds(self._report, [b"plan"], (file, *streams.inner))
                await self._begun(on_listener)
                child = _Child(self._pid, streams, self._report)
                self._has_started = True
                await adopt(child, process)
            except BaseException:
                streams.close()
                raise
        return process

    async def _find_pid(self) -> None:
        """Get the id of the first process of the sandbox from the helper.

        :raises NotLaunchedError: the helper could not make the process, or the process has failed already.
        """
        if self._pid:
            return
        answer, _ = await self._answer()
        failure = answer if answer.startswith(b"failed ") else b""  # sent before the helper could send the id
        if failure:
            answer, _ = await self._answer()
        self._pid = int(answer or b"-1")
        if self._pid <= 0:
            raise NotLaunchedError(-self._pid, f"no namespaces: {os.strerror(-self._pid)}")
        if failure:
            raise NotLaunchedError(failure.decode(errors="replace").removeprefix("failed "))

    async def _begun(self, on_listener: Callable[[socket.socket], None] | None) -> None:
        """Wait until the command has begun. :raises NotLaunchedError: it could not be confined, or there is no such
        program."""
        answer, handles = await self._answer()
        if answer != b"ready":
            kind, _, reason = answer.decode(errors="replace").partition(" ")
            raise (_NoProgramError if kind == "missing" else NotLaunchedError)(reason or "the sandbox was ended")
        if handles and on_listener is not None:
            listener = socket.socket(fileno=handles[0])
            listener.set_inheritable(False)
            listener.setblocking(False)
            on_listener(listener)

    async def _answer(self) -> tuple[bytes, Sequence[int]]:
        """Return the next message of the helper or the sandbox, and the open files in it. The message is empty if both
        have ended. :raises NotLaunchedError: there is none within `_TIMEOUT_S`."""
        with anyio.move_on_after(_TIMEOUT_S):
            await anyio.wait_readable(self._report)
        try:
            answer, handles, _, _ = socket.recv_fds(self._report, _REPORT_BYTES, 1)
        except OSError as error:
            raise NotLaunchedError(f"the helper of the sandbox does not answer: {error}") from error
        return answer, handles

    async def close(self) -> None:
        """End the sandbox, if no command was started in it."""
        if self._has_started:
            return
        with suppress(NotLaunchedError):
            await self._find_pid()
        self._report.close()
        if self._pid > 0:
            with suppress(ProcessLookupError):
                os.kill(self._pid, KILL)
            await anyio.to_thread.run_sync(_reap, self._pid)


def _reap(pid: int) -> None:
    """Wait for the end of a child of crow. This call blocks."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _plan_of(argv: Sequence[str], confinement: Confinement, *, cwd: Path, env: Mapping[str, str], port: int) -> bytes:
    """Return the plan that the first process of a sandbox needs to start a command, in the form of `marshal`. `port` is
    the port to listen on for crow, or 0."""
    overlays = overlays_of(confinement)
    options = mount_options(confinement, "mounted" if overlays else "none", overlays)
    plan = {
        "overlays": [(str(each.root), str(each.upper), str(each.work)) for each in overlays],
        "mounts": list(options),
        "port": port,
        "filter": namespace_filter(has_unix_sockets=bool(confinement.sockets)),
        "cwd": os.path.realpath(cwd),
        "argv": [*argv],
        "env": {**env},
    }
    return marshal.dumps(plan)


@contextmanager
def _file_with(data: bytes) -> Iterator[int]:
    """Open a file in memory with this content, and close it at the end. Yield its descriptor."""
    with open(os.memfd_create("crow-plan"), "wb") as file:
        file.write(data)
        file.flush()
        file.seek(0)
        yield file.fileno()


class _Streams:
    """The pipes for standard input, output and error of a command. When used as a context manager, it closes the
    command's ends of the pipes at the end; `close` closes crow's ends."""

    def __init__(self, *, takes_input: bool, has_errors: bool) -> None:
        self.stdin: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        if takes_input:
            stdin, writer = os.pipe()
            self.stdin = open(writer, "wb", buffering=0)  # noqa: SIM115 - closed by the transport
        else:
            stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reader, stdout = os.pipe()
        self.stdout: IO[bytes] = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed by the transport
        stderr = stdout
        if has_errors:
            reader, stderr = os.pipe()
            self.stderr = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed by the transport
        self.inner = (stdin, stdout, stderr)
        """The command's ends."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> Literal[False]:
        for handle in {*self.inner}:
            os.close(handle)
        return False

    def close(self) -> None:
        """Close crow's own ends."""
        for file in filter(None, (self.stdin, self.stdout, self.stderr)):
            file.close()


class _Child:
    """The first process of a sandbox, which is crow's child. See :class:`crow.tools.sandbox.transport.Child`."""

    def __init__(self, pid: int, streams: _Streams, report: socket.socket) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = streams.stdin
        self.stdout: IO[bytes] | None = streams.stdout
        self.stderr: IO[bytes] | None = streams.stderr
        self.returncode: int | None = None
        self.left_others = False
        self._report = report

    def poll(self) -> int | None:
        """Return how the command ended, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the sandbox, and return how the command ended."""
        return self._wait(0) or 0

    def _wait(self, options: int) -> int | None:
        if self.returncode is not None:
            return self.returncode
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:
            pid, status = self.pid, 0xFF00
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
            with suppress(OSError, ValueError):
                words = self._report.recv(_REPORT_BYTES).split()
                if words[:1] == [b"ended"]:
                    self.returncode, self.left_others = int(words[1]), words[2] == b"1"
            self._report.close()
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        """Signal the first process. It ignores everything but SIGKILL, which ends the whole sandbox."""
        if self.poll() is None:
            os.kill(self.pid, sig)


class LaunchedProcess(Process):
    """A command in a sandbox of the helper. `pid` is the first process of the sandbox."""

    @property
    def command_pid(self) -> int:
        """The id of a process of the command, whose namespaces can be entered; 0 if there is none."""
        return next(iter(descendants_of(self.pid)), 0)

    @property
    def left_others(self) -> bool:
        """Whether other processes in the sandbox were still running when the command ended. If so, they ended with the
        sandbox."""
        return bool(self._transport.get_extra_info("child").left_others)

    def signal(self, number: signal.Signals) -> None:
        """Send SIGKILL to the whole sandbox, and any other signal to all processes inside it."""
        inside = [] if number == KILL else descendants_of(self.pid)
        if not inside:  # the signal is SIGKILL, or the command has not begun yet
            self._transport.send_signal(KILL)
        for pid in inside:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    async def is_alive(self) -> bool:
        """Return whether the sandbox still runs."""
        return not self.exited.is_set()
