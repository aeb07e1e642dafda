"""A workspace on the local disk. Its commands run as local processes.

Paths are checked after links and `..` are resolved; :mod:`crow.tools.disk` opens them. A cancelled command gets SIGTERM
at once, and `reap` waits for its end later.
"""

from __future__ import annotations

import codecs
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread

from crow.domain.errors import ArgumentError
from crow.domain.protected_names import DEFAULT_NAMES, ProtectedNames
from crow.domain.rendering import SecretMask
from crow.programs import SYSTEM_PROGRAMS, Programs, named_program, own_trees, trusted_path
from crow.tools import (
    NOTHING_EXCLUDED,
    BackgroundCommand,
    CommandAccess,
    ExcludedPaths,
    FileStat,
    OnOutput,
    ProgramResult,
    Protection,
    SandboxStatus,
)
from crow.tools.disk import (
    all_names,
    as_on_disk,
    file_id,
    file_stat,
    names_in,
    read_file,
    remove_file,
    replace_file,
    shared_inode,
)
from crow.tools.layers import Layer, LookRules
from crow.tools.layers.rules import rules_for
from crow.tools.layers.session import Layers
from crow.tools.network import CommandNetwork
from crow.tools.process import HiddenKeys, KeySource, Process, child_environment, command_environment, start
from crow.tools.protection import ProtectedPaths, is_secret, secret_places
from crow.tools.sandbox import CHECK_S, Confiner
from crow.tools.truncate import OutputBuffer

logger = logging.getLogger(__name__)

_PATH_CHARS = 16_384
"""Longer paths are refused, because no system accepts them. The length is checked before the path is resolved, because
resolving a path reads every directory on the way."""

RETAINED_CHARS = 10_000_000
"""If an output is longer, only its beginning and its end are kept."""
SHOWN_CHARS = 65_536
"""While a command runs, the user is shown at most this many characters of its newest output."""
_SHOWN_EVERY_S = 0.1
_MAX_NAMED = 3
TERM_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a command."""
_PROGRAM_TERM_S = 0.3
"""Seconds between SIGTERM and SIGKILL for a program that the user configured, if it took too long."""

_OFF = SandboxStatus(setting="off", problem='`sandbox.enabled` is "off".')
LEFT_RUNNING = "\n[background processes that the command left running were ended]\n"
_QUIET = dict.fromkeys(("GIT_PAGER", "MANPAGER", "PAGER"), "cat")
_QUIET |= {"GIT_TERMINAL_PROMPT": "0", "PIP_NO_INPUT": "1", "DEBIAN_FRONTEND": "noninteractive"}
_QUIET |= {"NO_COLOR": "1", "TERM": "dumb"}
_MAX_SECRET_ENTRIES = 2_000


class DiskWorkspace:
    """A :class:`crow.tools.Workspace` on this machine.

    - `keys`: the keys of endpoints and other secrets, which commands do not get in their environment.
    - `own`: crow's own files. A path that begins with one of these paths is crow's, too, such as the log beside a
      database.
    - `own_folders`, `own_readable`: crow's own folders. Tools can read none of crow's files except those in
      `own_readable`.
    - `names`: the names of protected files.
    - `confiner`: confines commands. If None, all commands have full access.
    - `is_bounded`: tools can never read or change anything outside the workspace, even if a user or a rule allows it.
    - `programs`: finds the programs that crow starts for itself.
    - `keeps_ignored`: nobody is asked about files that commands changed in a layer and that git ignores.
    """

    def __init__(
        self,
        cwd: str | Path,
        additional_directories: Sequence[str | Path] = (),
        *,
        keys: KeySource = HiddenKeys,
        own: Sequence[Path] = (),
        own_folders: Sequence[Path] = (),
        own_readable: Sequence[Path] = (),
        names: ProtectedNames = DEFAULT_NAMES,
        confiner: Confiner | None = None,
        is_bounded: bool = False,
        programs: Programs = SYSTEM_PROGRAMS,
        keeps_ignored: bool = True,
    ) -> None:
        self.is_bounded = is_bounded
        """See :meth:`crow.tools.Workspace.is_bounded`."""
        self.cwd = Path(cwd)
        """Where relative paths and commands start, as given: links are not resolved."""
        self.directories = (self.cwd, *map(Path, additional_directories))
        """See :meth:`crow.tools.Workspace.directories`."""
        self._roots = tuple(Path(os.path.realpath(root)) for root in (cwd, *additional_directories))
        self._protected = ProtectedPaths(roots=tuple(map(str, self._roots)), names=names)
        self._names = names
        self._keeps_ignored = keeps_ignored
        self._keys = keys
        self._confiner = confiner
        self._own = (*_folded_places(own), *_folded_places([*own_folders, *own_readable], is_folder=True))
        self._own_readable = _folded_places(own_readable, is_folder=True)
        self._own_files = tuple(own)
        self._own_trees = own_trees(self._roots)
        self.find_program = programs.find
        """See :meth:`crow.tools.Workspace.find_program`."""
        bash = SYSTEM_PROGRAMS.find("bash")  # models write their commands for bash
        plain = ("cmd", "/c") if os.name == "nt" else ("/bin/sh", "-c")
        self._shell = plain if bash is None else (bash, "-c")
        self._left: list[tuple[Process, float]] = []
        """The processes that got SIGTERM and that `reap` must end, each with the monotonic time of the signal."""
        self.layers: Layers | None = None
        """See :meth:`crow.tools.Workspace.layers`."""
        if confiner is not None and confiner.place is not None:
            roots = [*map(str, self._roots)]
            self.layers = Layers(confiner.place, confiner.open_layer, self._look_rules, roots)

    def resolve(self, path: str) -> Path:
        """See :meth:`crow.tools.Workspace.resolve`."""
        if not path or "\0" in path:
            raise ArgumentError(f"path is {path!r}; expected the path of a file or directory")
        if len(path) > _PATH_CHARS:
            raise ArgumentError(f"path has {len(path):,} characters; expected at most {_PATH_CHARS:,}")
        return Path(as_on_disk(os.path.realpath(self.cwd / path)))

    def contains(self, path: Path) -> bool:
        """See :meth:`crow.tools.Workspace.contains`."""
        return any(path.is_relative_to(root) for root in self._roots)

    def protection(self, path: Path) -> Protection:
        """See :meth:`crow.tools.Workspace.protection`."""
        if f"{path}/".casefold().startswith(self._own) or self._is_out_of_bounds(path):
            return "never"
        is_program = any(map(path.is_relative_to, self._own_trees))
        return "ask" if is_program or self._protected.covers(path) else "none"

    def read_protection(self, path: Path) -> Protection:
        """See :meth:`crow.tools.Workspace.read_protection`."""
        name = f"{path}/".casefold()
        if not name.startswith(self._own_readable) and (name.startswith(self._own) or self._is_out_of_bounds(path)):
            return "never"
        if is_secret(path):
            return "ask"
        inode = shared_inode(path)
        if inode is None:
            return "none"
        if any(inode == file_id(Path(f"{file}{end}")) for file in self._own_files for end in ("", "-wal", "-shm")):
            return "never"
        return "ask" if names_in(secret_places(), {inode: 1}, _MAX_SECRET_ENTRIES)[inode] else "none"

    def _look_rules(self, layer: Layer) -> LookRules:
        """Return the rules that say which files in a layer are protected, and which ones git ignores."""
        rules = rules_for(layer, self._protected, self._names, self._own, self._own_trees)
        return rules if self._keeps_ignored else LookRules(is_protected=rules.is_protected)

    def _is_out_of_bounds(self, path: Path) -> bool:
        return self.is_bounded and not self.contains(path)

    async def find_names(
        self, paths: Collection[Path], places: Sequence[str] = ()
    ) -> Mapping[Path, tuple[tuple[str, ...], bool]]:
        """See :meth:`crow.tools.Workspace.find_names`."""
        tops = [*map(str, self._roots), *places]
        return await anyio.to_thread.run_sync(all_names, tops, paths)

    async def stat(self, path: Path, *, head: int = 0) -> FileStat:
        """See :meth:`crow.tools.Workspace.stat`."""
        return await anyio.to_thread.run_sync(file_stat, path, head)

    async def read_bytes(self, path: Path, limit: int | None = None, start: int = 0) -> bytes:
        """See :meth:`crow.tools.Workspace.read_bytes`."""
        return await anyio.to_thread.run_sync(read_file, path, start, limit)

    async def read_text(self, path: Path) -> str:
        """See :meth:`crow.tools.Workspace.read_text`."""
        return (await self.read_bytes(path)).decode("utf-8", "replace")

    async def write_text(self, path: Path, text: str) -> str:
        """See :meth:`crow.tools.Workspace.write_text`."""
        await anyio.to_thread.run_sync(self._replace, path, text.encode("utf-8"))
        return text

    async def restore(self, path: Path, content: bytes | None, *, mode: int | None = None) -> None:
        """See :meth:`crow.tools.Workspace.restore`."""
        await anyio.to_thread.run_sync(self._replace, path, content, mode)

    def _replace(self, path: Path, content: bytes | None, mode: int | None = None) -> None:
        if self._is_out_of_bounds(path):
            raise PermissionError(errno.EACCES, "tools may not change anything outside the workspace", str(path))
        if content is None:
            remove_file(path)
        else:
            replace_file(path, content, mode)
        if self._confiner is not None and self._protected.covers(path):
            self._confiner.accept(path)

    @property
    def confines(self) -> bool:
        """See :meth:`crow.tools.Workspace.confines`."""
        return self._confiner is not None and self._confiner.confines

    @property
    def credential_hosts(self) -> tuple[str, ...]:
        """See :class:`crow.tools.Workspace`."""
        return () if self._confiner is None else self._confiner.credential_hosts

    async def sandbox_status(self) -> SandboxStatus:
        """See :meth:`crow.tools.Workspace.sandbox_status`."""
        status = _OFF if self._confiner is None else await self._confiner.status()
        keys = self._keys()
        withheld = sorted(name for name in keys.withheld() if not keys.hides(name, os.environ[name]))
        return replace(status, withheld=tuple(withheld))

    def explain_failure(self, access: CommandAccess, output: str, *, has_failed: bool = True) -> str:
        """See :meth:`crow.tools.Workspace.explain_failure`."""
        explained = "" if self._confiner is None else self._confiner.explain(access, output, has_failed=has_failed)
        if explained or not has_failed:
            return explained
        missed = [name for name in sorted(self._keys().withheld()) if name in output]
        if not missed:
            return ""
        return (
            f"[Commands do not get the environment variable {', '.join(missed[:_MAX_NAMED])}, because it holds a "
            "secret. If the command needs it, tell the user: `pass_env` in [sandbox] of config.toml passes it.]"
        )

    async def run(
        self,
        command: str,
        *,
        access: CommandAccess,
        timeout_s: float,
        on_output: OnOutput,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> tuple[int | None, str]:
        """See :meth:`crow.tools.Workspace.run`. Runs bash, or sh if there is no bash.

        Processes that the command leaves in the background are ended when the command ends. Each call of `on_output`
        gets the newest `SHOWN_CHARS` characters of the output.

        :raises OSError: the command could not be started (no such directory, or the command line is too long).
        """
        retained = OutputBuffer(RETAINED_CHARS)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        listeners: list[socket.socket] = []
        process = await self._start(
            command,
            access,
            lambda data: retained.feed(decoder.decode(data)),
            excluded,
            layer,
            None if network is None else listeners.append,
        )
        try:
            sentences: list[str] = []

            async def check() -> None:
                sentences.extend(await self._check(process))

            with anyio.move_on_after(timeout_s) as timeout:
                async with _connected(network, listeners, timeout, self._confiner):
                    await _show_output(process, retained, on_output, check)
            if timeout.cancelled_caught:
                await process.end(TERM_S)
            sentences += await self._finish(process)
        except BaseException:
            self._leave(process)
            raise
        retained.feed(decoder.decode(b"", final=True))
        notes = "".join(f"\n[{sentence}]\n" for sentence in sentences)
        if timeout.cancelled_caught:
            return None, retained.text() + notes
        if process.failure:
            process.close()
            raise PermissionError(
                errno.EPERM, f"The command was not run, because it could not be confined: {process.failure}"
            )
        code = process.returncode
        if is_left := await process.is_alive():
            self._leave(process)
        else:
            process.close()
        return code, retained.text() + (LEFT_RUNNING if is_left or process.left_others else "") + notes

    async def spawn(
        self,
        command: str,
        on_output: Callable[[str], None],
        *,
        access: CommandAccess,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        network: CommandNetwork | None = None,
    ) -> BackgroundCommand:
        """See :meth:`crow.tools.Workspace.spawn`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        listeners: list[socket.socket] = []
        process = await self._start(
            command,
            access,
            lambda data: on_output(decoder.decode(data)),
            excluded,
            layer,
            None if network is None else listeners.append,
        )
        return _SpawnedCommand(process, self._confiner, on_output, network, listeners)

    async def run_program(self, argv: Sequence[str], data: bytes, *, timeout_s: float, max_bytes: int) -> ProgramResult:
        """See :meth:`crow.tools.Workspace.run_program`."""
        path = argv[0] if os.path.isabs(argv[0]) else named_program(argv[0], self.contains)
        if path is None:
            raise FileNotFoundError(
                errno.ENOENT, f"program {argv[0]} is not on PATH (programs in the workspace do not count)"
            )
        output, errors = _LimitedBytes(max_bytes), _LimitedBytes(max_bytes)
        env = child_environment(
            self._keys(), more={**_QUIET, "PWD": str(self.cwd), "PATH": trusted_path(self.contains)}
        )
        process = await start(
            [path, *argv[1:]],
            cwd=self.cwd,
            env=env,
            on_output=output.add,
            on_errors=errors.add,
            takes_input=True,
        )
        try:
            process.write(data)
            process.close_input()
            with anyio.move_on_after(timeout_s) as timeout:
                await process.wait()
            if timeout.cancelled_caught:
                await process.end(_PROGRAM_TERM_S)
            is_left = await process.is_alive()
        except BaseException:
            self._leave(process)
            raise
        if is_left:
            self._leave(process)
        else:
            process.close()
        code = None if timeout.cancelled_caught else process.returncode
        mask = self._keys().mask
        return ProgramResult(code=code, output=output.masked(mask), errors=errors.masked(mask), is_cut=output.is_cut)

    async def start_confined(
        self,
        argv: Sequence[str],
        *,
        access: Literal["read", "write"],
        cwd: Path,
        directory: Path,
        env: Mapping[str, str],
        on_output: Callable[[bytes], None],
        on_errors: Callable[[bytes], None],
    ) -> Process:
        """See :meth:`crow.tools.Workspace.start_confined`."""
        status = await self.sandbox_status()
        if self._confiner is None or not status.name:
            raise PermissionError(errno.EPERM, status.problem)
        return await self._confiner.start(
            argv,
            access,
            cwd=cwd,
            env=env,
            on_output=on_output,
            on_errors=on_errors,
            takes_input=True,
            directory=directory,
        )

    async def end_confined(self, process: Process, grace_s: float) -> None:
        """See :meth:`crow.tools.Workspace.end_confined`."""
        await process.end(grace_s)
        await self._finish(process)

    async def _start(
        self,
        command: str,
        access: CommandAccess,
        on_output: Callable[[bytes], None],
        excluded: ExcludedPaths,
        layer: Layer | None = None,
        on_listener: Callable[[socket.socket], None] | None = None,
    ) -> Process:
        env = command_environment(self._keys(), {**_QUIET, "PWD": str(self.cwd)})
        argv = [*self._shell, command]
        if access == "full":
            return await start(argv, cwd=self.cwd, env=env, on_output=on_output)
        if self._confiner is None:
            raise PermissionError(errno.EPERM, _OFF.problem)
        return await self._confiner.start(
            argv,
            access,
            cwd=self.cwd,
            env=env,
            on_output=on_output,
            excluded=excluded,
            layer=layer,
            on_listener=on_listener,
        )

    async def _check(self, process: Process) -> tuple[str, ...]:
        return () if self._confiner is None else await self._confiner.check(process)

    async def _finish(self, process: Process) -> tuple[str, ...]:
        return () if self._confiner is None else await self._confiner.finish(process)

    def _leave(self, process: Process) -> None:
        """Send SIGTERM to the process. `reap` waits for its end later."""
        process.signal(signal.SIGTERM)
        self._left.append((process, time.monotonic()))

    @property
    def has_leftovers(self) -> bool:
        """See :meth:`crow.tools.Workspace.has_leftovers`."""
        return bool(self._left)

    async def reap(self) -> None:
        """See :meth:`crow.tools.Workspace.reap`."""
        left, self._left = self._left, []
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for process, signalled in left:
                    tasks.start_soon(self.end_confined, process, max(0.0, TERM_S - (time.monotonic() - signalled)))

    async def close(self) -> None:
        """See :meth:`crow.tools.Workspace.close`."""
        if self.layers is not None:
            await self.layers.close()
        if self._confiner is not None:
            await self._confiner.close()


class _LimitedBytes:
    """Keeps the first `limit` bytes of an output."""

    def __init__(self, limit: int) -> None:
        self.is_cut = False
        self._left = limit
        self._pieces: list[bytes] = []

    def add(self, data: bytes) -> None:
        self.is_cut = self.is_cut or len(data) > self._left
        if self._left:
            self._pieces.append(data[: self._left])
            self._left -= len(self._pieces[-1])

    def masked(self, mask: SecretMask) -> bytes:
        """Return the kept bytes, with secrets masked. If the output was cut, the beginning of a secret at the end is
        left out."""
        text = b"".join(self._pieces).decode("utf-8", "surrogateescape")
        end = len(text) - (mask.unfinished(text) if self.is_cut else 0)
        return mask(text[:end]).encode("utf-8", "surrogateescape")


class _SpawnedCommand:
    """The :class:`crow.tools.BackgroundCommand` of a process."""

    def __init__(
        self,
        process: Process,
        confiner: Confiner | None,
        on_output: Callable[[str], None],
        network: CommandNetwork | None,
        listeners: list[socket.socket],
    ) -> None:
        self._process = process
        self._confiner = confiner
        self._on_output = on_output
        self._network = network
        self._listeners = listeners
        self._is_failure_shown = False

    @property
    def returncode(self) -> int | None:
        """See :class:`crow.tools.BackgroundCommand`."""
        return self._process.returncode

    async def wait(self) -> None:
        """See :class:`crow.tools.BackgroundCommand`."""
        await self._process.wait()
        await self._settle()

    async def check(self) -> None:
        """See :class:`crow.tools.BackgroundCommand`."""
        for sentence in () if self._confiner is None else await self._confiner.check(self._process):
            self._on_output(f"\n[{sentence}]\n")

    async def serve(self) -> None:
        """See :class:`crow.tools.BackgroundCommand`."""
        listeners, self._listeners = self._listeners, []
        try:
            # a scope without a deadline, because a background command has no time limit
            async with _connected(self._network, listeners, anyio.CancelScope(), self._confiner):
                await self._process.wait()
        except Exception:  # the command continues without its network
            logger.exception("A command in the background lost its network")

    async def refresh(self) -> None:
        """See :class:`crow.tools.BackgroundCommand`."""
        if self._confiner is not None:
            await self._confiner.refresh(self._process)

    async def end(self, grace_s: float) -> None:
        """See :class:`crow.tools.BackgroundCommand`."""
        await self._process.end(grace_s)
        await self._settle()

    async def _settle(self) -> None:
        while self._listeners:  # `serve` was never called, so they are still open here
            self._listeners.pop().close()
        if self._process.failure and not self._is_failure_shown:
            self._is_failure_shown = True
            self._on_output(f"\n[the command was not run, because it could not be confined: {self._process.failure}]\n")
        for sentence in () if self._confiner is None else await self._confiner.finish(self._process):
            self._on_output(f"\n[{sentence}]\n")


def _connected(
    network: CommandNetwork | None,
    listeners: Sequence[socket.socket],
    clock: anyio.CancelScope,
    confiner: Confiner | None,
) -> AbstractAsyncContextManager[None]:
    """Serve the network of a command, if it has one. The clock stops while the user is asked about a host."""
    if network is None or confiner is None or not listeners:
        return nullcontext()
    return network.serving(listeners[0], clock, confiner.credentials)


async def _show_output(
    process: Process, retained: OutputBuffer, on_output: OnOutput, check: Callable[[], Awaitable[None]]
) -> None:
    """Show the output while it grows, at most ten times a second, and call `check` every `CHECK_S`. Return when the
    process and its output have ended. If another process keeps the pipe open, return 0.2 s after the end of
    `process`."""
    shown, checked_at = 0, anyio.current_time()
    while not process.exited.is_set():
        with anyio.move_on_after(_SHOWN_EVERY_S):
            await process.exited.wait()
        if retained.total_chars > shown and not process.exited.is_set():
            shown = retained.total_chars
            await on_output(retained.newest(SHOWN_CHARS))
        if anyio.current_time() > checked_at + CHECK_S and not process.exited.is_set():
            await check()
            checked_at = anyio.current_time()
    await process.drain()


def _folded_places(paths: Sequence[Path], *, is_folder: bool = False) -> tuple[str, ...]:
    """Return the given paths, and the same paths with links resolved. All of them are case-folded path prefixes, ready
    for comparison."""
    end = "/" if is_folder else ""
    return tuple({place.casefold() + end for path in paths for place in (str(path), os.path.realpath(path))})
