"""Confines commands with bubblewrap, which gives each command its own view of the file system and of the processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import anyio

from crow.programs import helper_environment
from crow.tools.layers import Overlay
from crow.tools.process import KILL, Process, start
from crow.tools.sandbox import Confinement
from crow.tools.sandbox.probe import try_confinement
from crow.tools.sandbox.seccomp import missing_architecture, namespace_filter

_NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_PROBE_S = 10.0
_OVERLAY_VERSION = (0, 11)
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - the command's own directory is mounted there
_RUN = """trap : HUP INT QUIT TERM
echo started >&2
("$@") 2>&1
code=$?
set -- /proc/[0-9]*
[ $# -le 2 ] || echo left >&2
exit $code"""
"""The shell script that runs the command inside the sandbox. bubblewrap's exit code does not show whether the command
began, left processes running, or was ended by a signal. The script reports all three on its own standard error, and
names the signal."""

_MOUNT = """set -e
mount=$1
count=$2
shift 2
while [ "$count" -gt 0 ]; do
    cd -- "$1"
    "$mount" -t overlay -o "userxattr,volatile,lowerdir=.,upperdir=$2,workdir=$3" overlay .
    shift 3
    count=$((count - 1))
done
cd /
exec "$@\""""
"""The shell script that mounts overlays in a separate mount namespace, for versions of bubblewrap that cannot mount
overlays themselves."""

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

_View = Literal["mask", "read", "write", "deny", "throwaway"]
"""How a command sees a path: empty, read-only, writable, not at all, or writable until the command ends."""


class _ConfinedProcess(Process):
    """A command under bubblewrap.

    The process that crow started is bubblewrap's outer process. When that process dies, all processes in the sandbox
    die at once.
    """

    def __init__(self, on_output: Callable[[bytes], None], on_errors: Callable[[bytes], None] | None) -> None:
        super().__init__(on_output, on_errors or self._note)
        self.is_reported = on_errors is None
        """Whether the script `_RUN` reports how the command begins and ends."""
        self._notes = bytearray()
        """What bubblewrap and the script have written to standard error."""

    def _note(self, data: bytes) -> None:
        self._notes += data[: 65_536 - len(self._notes)]

    @property
    def _lines(self) -> list[str]:
        return self._notes.decode("utf-8", "replace").splitlines()

    @property
    def failure(self) -> str:
        """Why the command never began. Empty if it began, or as long as that is not certain."""
        if not self.is_reported or not self.exited.is_set() or "started" in self._lines:
            return ""
        code = self._transport.get_returncode()
        # If bubblewrap itself fails, it says why. If it says nothing and was not killed, the command has read what the
        # script reported: a process in the sandbox can read the script's standard error from /proc.
        return " ".join(self._lines) or ("bubblewrap was ended" if code is None or code < 0 else "")

    @property
    def returncode(self) -> int | None:
        """See :class:`crow.tools.process.Process`."""
        code = self._transport.get_returncode()
        if code is None or code <= 128 or self.failure:
            return code
        is_signalled = any(line not in ("started", "left", "") for line in self._lines)
        return 128 - code if is_signalled else code

    @property
    def left_others(self) -> bool:
        """Whether other processes in the sandbox were still running when the command ended. If so, they ended with the
        sandbox."""
        return "left" in self._lines

    def signal(self, number: signal.Signals) -> None:
        """Send SIGKILL to bubblewrap, and any other signal to all processes inside the sandbox."""
        inside = [] if number == KILL else _processes_inside(self.pid)
        if not inside:  # the signal is SIGKILL, or the command has not begun yet
            super().signal(KILL)
            return
        for pid in inside:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    async def is_alive(self) -> bool:
        """Return whether the sandbox still runs."""
        return not self.exited.is_set()


def _processes_inside(outer: int) -> list[int]:
    """Return the processes in the sandbox of the bubblewrap process `outer`, except for bubblewrap's own inner
    process."""
    return [pid for inner in _children_of(outer, _child_table(outer)) for pid in descendants_of(inner)]


def descendants_of(pid: int) -> list[int]:
    """Return all processes below a process."""
    table = _child_table(pid)
    found: list[int] = []
    level = _children_of(pid, table)
    while level:
        found += level
        level = [child for parent in level for child in _children_of(parent, table)]
    return found


def _children_of(pid: int, table: Mapping[int, Sequence[int]] | None) -> Sequence[int]:
    if table is not None:
        return table.get(pid, ())
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _child_table(pid: int) -> dict[int, list[int]] | None:
    """Map each process to its children, if the kernel does not list the children of a process such as `pid`."""
    if os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return None
    table: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            table.setdefault(parent, []).append(int(name))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """The :class:`crow.tools.sandbox.Sandbox` of bubblewrap."""

    program: str
    """The absolute path of bubblewrap."""
    name: str
    """The sandbox with its version, such as `bubblewrap 0.8.0`."""
    unshare: str = ""
    """The absolute path of `unshare`, or empty if there is none."""
    mount: str = ""
    """The absolute path of `mount`, or empty if there is none."""
    overlay: Literal["none", "native", "mounted"] = "none"
    """How commands with the access `read` get a throwaway layer over the workspace. With `native`, bubblewrap makes the
    layer. With `mounted`, the layer is mounted before bubblewrap starts. With `none`, there is no layer."""

    @property
    def programs(self) -> tuple[str, ...]:
        """See :class:`crow.tools.sandbox.Sandbox`."""
        return (self.program, *((self.unshare, self.mount) if self.overlay == "mounted" else ()))

    @property
    def protects_files(self) -> bool:
        """See :class:`crow.tools.sandbox.Sandbox`."""
        return True

    @property
    def has_overlay(self) -> bool:
        """See :class:`crow.tools.sandbox.Sandbox`."""
        return self.overlay != "none"

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
        before: Callable[[int], Awaitable[None]] | None = None,
    ) -> Process:
        """See :class:`crow.tools.sandbox.Sandbox`. `before` gets the id of the first process in the sandbox. The
        command begins when `before` returns."""
        command = [*argv] if on_errors is not None else ["/bin/sh", "-c", _RUN, "sh", *argv]
        kept, loaders = helper_environment(env)
        with _filter_file(confinement) as inherited, _held(before is not None) as hold:
            line = self.command_line(
                command, confinement, cwd=cwd, variables=loaders, filters=inherited, options=hold.options
            )
            process = await start(
                line,
                cwd=cwd,
                env=kept,
                on_output=on_output,
                on_errors=on_errors,
                takes_input=takes_input,
                inherited=(*inherited, *hold.inherited),
                make=_ConfinedProcess,
            )
            if before is not None:
                with anyio.CancelScope(shield=True):  # the caller has to get the process, to end it
                    await hold.release(before)
            return process

    def problem(self) -> str:
        """Try to confine a command. Return an empty string if that works, otherwise the problem in words. This call
        blocks."""
        return try_confinement(partial(self.run, cwd=Path("/")), has_overlay=self.has_overlay)

    def run(self, argv: Sequence[str], confinement: Confinement, *, cwd: Path) -> subprocess.CompletedProcess[bytes]:
        """Run a confined command to its end. This call blocks. For errors, see :func:`_run`."""
        with _filter_file(confinement) as inherited:
            return _run(self.command_line(argv, confinement, cwd=cwd, filters=inherited), inherited)

    def command_line(
        self,
        argv: Sequence[str],
        confinement: Confinement,
        *,
        cwd: Path,
        variables: Mapping[str, str] = _NO_VARIABLES,
        filters: Sequence[int] = (),
        options: Sequence[str] = (),
    ) -> list[str]:
        """Return the command line that starts a confined command. Only the command gets the `variables`. `filters` are
        open files with filters of system calls, and `options` more options of bubblewrap."""
        overlays = overlays_of(confinement)
        overlay = self.overlay if overlays else "none"
        before: list[str] = []
        if overlay == "mounted":
            before = [self.unshare, "--user", "--map-root-user", "--mount"]
            before += ["/bin/sh", "-c", _MOUNT, "sh", self.mount, str(len(overlays))]
            before += [str(part) for each in overlays for part in (each.root, each.upper, each.work)]
        mounts = [argument for each in mount_options(confinement, overlay, overlays) for argument in each]
        return [
            *before,
            self.program,
            *options,
            *_NAMESPACES,
            *(("--uid", str(os.getuid()), "--gid", str(os.getgid())) if before else ()),
            *(() if confinement.has_network else ("--unshare-net",)),
            *("--die-with-parent", "--cap-drop", "ALL"),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *mounts,
            *(part for name, value in variables.items() for part in ("--setenv", name, value)),
            *(part for handle in filters for part in ("--seccomp", str(handle))),
            *("--chdir", os.path.realpath(cwd), "--"),
            *argv,
        ]


def overlays_of(confinement: Confinement) -> tuple[Overlay, ...]:
    """Return the overlays for the throwaway trees: those of a layer, or else new ones, whose content is discarded when
    the command ends."""
    if confinement.overlays or confinement.layers is None:
        return confinement.overlays
    return tuple(_make_layer(confinement.layers, number, tree) for number, tree in enumerate(confinement.throwaway))


def mount_options(confinement: Confinement, overlay: str, overlays: Sequence[Overlay]) -> Iterator[tuple[str, ...]]:
    """Return bubblewrap's options for the file system. The option for a directory comes before the options for its
    content."""
    layers = {each.root: each for each in overlays}
    views = _path_views(confinement, has_overlay=overlay != "none")
    masks = []
    for path, view in sorted(views.items(), key=lambda item: len(item[0].parts)):
        parent = next((parent for parent in path.parents if parent in views), None)
        outer = "read" if parent is None else "write" if _is_temporary(parent, views) else views[parent]
        place = str(path)
        match view:
            case "mask" if _is_temporary(path, views):
                yield "--bind", str(confinement.temporary), place
            case "mask" if outer == "mask":
                yield "--dir", place
            case "mask":
                masks.append(place)
                yield "--tmpfs", place
            case "read" if outer == "mask" or (outer != "read" and not path.is_symlink()):
                yield "--ro-bind", place, place
            case "write":
                yield "--bind", place, place
            case "throwaway" if overlay == "native":
                yield "--overlay-src", place, "--overlay", str(layers[path].upper), str(layers[path].work), place
            case "throwaway":
                yield "--bind", place, place
            case "deny" if path.is_dir():
                masks.append(place)
                yield "--perms", "0000", "--tmpfs", place
            case "deny":
                yield "--ro-bind", str(confinement.blank), place
    for place in masks:
        yield "--remount-ro", place
    if os.geteuid() == 0:  # root may write many files in /proc, such as those in /proc/sys
        yield "--remount-ro", "/proc"


def _is_temporary(path: Path, views: Mapping[Path, _View]) -> bool:
    """Return whether this directory is replaced by the command's own directory for temporary files."""
    return path in _TEMPORARY and views[path] == "mask"


def _path_views(confinement: Confinement, *, has_overlay: bool) -> dict[Path, _View]:
    """Return how the command sees each path. If a path is in several lists of the confinement, the last of these lists
    decides."""
    views: dict[Path, _View] = {}
    views |= dict.fromkeys(confinement.masked, "mask")
    views |= dict.fromkeys(confinement.readable, "read")
    views |= dict.fromkeys(confinement.throwaway, "throwaway" if has_overlay else "read")
    views |= dict.fromkeys((*confinement.writable, confinement.temporary), "write")
    views |= dict.fromkeys((*confinement.read_only, *confinement.fixed), "read")
    views |= dict.fromkeys(confinement.hidden, "deny")
    return views


def _make_layer(layers: Path, number: int, tree: Path) -> Overlay:
    """Make two directories for one overlay over `tree`: one for the files that the command writes, and one for the
    kernel's own use."""
    upper, work = layers / f"{number}-upper", layers / f"{number}-work"
    upper.mkdir(parents=True)
    work.mkdir()
    return Overlay(tree, upper, work)


def probe(program: str, *, unshare: str | None = None, mount: str | None = None) -> Bubblewrap | str:
    """Try bubblewrap with real commands. Return a sandbox that works, or a text that says why bubblewrap does not work.
    This call blocks for about 20 ms."""
    try:
        name = _run([program, "--version"]).stdout.decode(errors="replace").strip() or "bubblewrap"
        version = tuple(int(part) for part in name.split()[-1].split(".") if part.isdigit())
        plain = Bubblewrap(program=program, name=name, unshare=unshare or "", mount=mount or "")
        if version >= _OVERLAY_VERSION and not (native := replace(plain, overlay="native")).problem():
            return native
        if unshare and mount and not (mounted := replace(plain, overlay="mounted")).problem():
            return mounted
        problem = plain.problem()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        problem = str(error)
    return f"{program} does not work here: {problem}" if problem else plain


@contextmanager
def _filter_file(confinement: Confinement) -> Iterator[tuple[int, ...]]:
    """Open a file in memory with the filter of system calls, and yield its descriptor. Yield none if crow has no filter
    for this machine."""
    if missing_architecture():
        yield ()
        return
    handle = os.memfd_create("crow-filter")
    try:
        os.write(handle, namespace_filter(has_unix_sockets=bool(confinement.sockets)))
        os.lseek(handle, 0, os.SEEK_SET)
        yield (handle,)
    finally:
        os.close(handle)


class _Hold:
    """Lets a command begin only after something was done in its namespaces. It consists of two pipes. Without pipes, it
    holds nothing back."""

    def __init__(self, pipes: Sequence[int]) -> None:
        self._pipes = pipes
        self.inherited = tuple(pipes[1:3])
        """What bubblewrap inherits: the end to which it writes the process id, and the end on which it waits."""
        information, wait = self.inherited or (0, 0)
        self.options = ("--info-fd", str(information), "--block-fd", str(wait)) if pipes else ()

    async def release(self, before: Callable[[int], Awaitable[None]]) -> None:
        """Call `before` with the id of the first process in the sandbox, and then let it go on. Do nothing if
        bubblewrap has failed."""
        reading, *others, writing = self._pipes
        for handle in others:
            os.close(handle)
        self._pipes = (reading, writing)
        text = b""
        with anyio.move_on_after(_PROBE_S):
            while not text.rstrip().endswith(b"}"):
                await anyio.wait_readable(reading)
                if not (data := os.read(reading, 4_096)):
                    break
                text += data
        try:
            if found := re.search(rb'"child-pid": *([0-9]+)', text):
                await before(int(found[1]))
        finally:
            with suppress(BrokenPipeError):
                os.write(writing, b"x")

    def close(self) -> None:
        """Close the pipes."""
        for handle in self._pipes:
            os.close(handle)
        self._pipes = ()


@contextmanager
def _held(is_needed: bool) -> Iterator[_Hold]:
    """Open the pipes for a hold, if it is needed, and close them at the end."""
    hold = _Hold((*os.pipe(), *os.pipe()) if is_needed else ())
    try:
        yield hold
    finally:
        hold.close()


def _run(argv: Sequence[str], inherited: Sequence[int] = ()) -> subprocess.CompletedProcess[bytes]:
    """Run a command line to its end. It inherits these open files. :raises OSError: the command cannot be started.
    :raises subprocess.SubprocessError: the command took too long."""
    return subprocess.run(  # noqa: S603
        argv,
        check=False,
        env=helper_environment(os.environ)[0],
        pass_fds=inherited,
        # bubblewrap leaves a process behind, which crow inherits and reaps only if it is in another session
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_PROBE_S,
    )
