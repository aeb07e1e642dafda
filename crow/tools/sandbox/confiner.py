"""Confines the commands of one session: finds a sandbox, prepares each command, and cleans up after it."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import anyio.to_thread

from crow.programs import SYSTEM_PROGRAMS, Programs
from crow.tools import NOTHING_EXCLUDED, CommandAccess, ExcludedPaths, SandboxStatus
from crow.tools.layers import Layer, Place
from crow.tools.network import Credentials
from crow.tools.network.environment import proxy_environment
from crow.tools.network.listeners import Listeners
from crow.tools.process import Process
from crow.tools.protection import is_protected
from crow.tools.sandbox import ConfinedAccess, Confinement, Sandbox, bubblewrap
from crow.tools.sandbox.denied import DeniedFiles
from crow.tools.sandbox.launched import LaunchedProcess, Launcher, NotLaunchedError
from crow.tools.sandbox.paths import is_inside_any
from crow.tools.sandbox.policy import MAX_READ_ONLY, Policy, PrivateDirectories, SandboxOptions
from crow.tools.sandbox.protected import ProtectedFiles, Snapshot
from crow.tools.sandbox.seatbelt import Seatbelt
from crow.tools.sandbox.seccomp import missing_architecture
from crow.tools.sandbox.variables import PYTEST_CACHE, REMOVED
from crow.tools.temporary import TemporaryDirectory
from crow.tools.trees import remove_tree

logger = logging.getLogger(__name__)

_KEPT_S = 30 * 86_400
"""The caches of a workspace are removed if no session has used them for this many seconds."""
_RETRY_S = 30.0
"""After this many seconds, a sandbox that did not work is tried again: the cause, such as a full /tmp, may be gone."""
_CLOSE_S = 0.3
_SEARCHED_CHARS = 20_000
"""How much of the end of a command's output is searched for known error messages."""

_NO_WRITE = (
    r"read-only (?:file ?system|directory)|permission denied|operation not permitted|device or resource busy"
    r"|\b(?:EROFS|EACCES|EPERM)\b|PermissionError|unable to create .*lock|cannot create|attempt to write a readonly"
)
_NO_NETWORK = (
    r"network is unreachable|could not resolve|couldn't resolve|name or service not known|failed to lookup address"
    r"|temporary failure in name resolution|no address associated|unknown host|failed to establish a new connection"
    r"|\b(?:ENETUNREACH|ENOTFOUND|EAI_AGAIN)\b|getaddrinfo|dial tcp|dns error|no such host|connectionerror"
    r"|connection refused|could(?:n't| not) connect|\bECONNREFUSED\b"
)
_UNCHANGED = re.compile(r"device or resource busy|^\[the command (?:changed|removed|moved)", re.IGNORECASE)
"""Matches two kinds of output lines. One says that the command could not replace a protected file, the other that crow
put a protected file back."""
_NAME = re.compile(r"[^\s'\":;]+")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """The sandbox that works on this machine."""

    sandbox: Sandbox | None
    """None if no sandbox works."""
    problem: str = ""
    """If there is no sandbox, why."""


class Sandboxes:
    """Finds a sandbox that works. Each kind of sandbox is tried until it works once, but at most every `_RETRY_S`."""

    def __init__(self) -> None:
        self._probed: dict[str, tuple[Sandbox | str, float]] = {}
        """The result of each probe: the sandbox, or why it does not work, and the monotonic time of the probe in
        seconds. The keys are `Landlock`, `Seatbelt` and the paths of bubblewrap and its helpers."""
        self._probing = threading.Lock()

    def choose(self, programs: Programs = SYSTEM_PROGRAMS) -> Choice:
        """Return the sandbox that works. This call blocks."""
        probes: list[tuple[str, Callable[[], Sandbox | str]]] = []
        if sys.platform == "darwin":
            probes = [("Seatbelt", _probe_seatbelt)]
        elif sys.platform.startswith("linux"):
            program, unshare, mount = map(programs.find, ("bwrap", "unshare", "mount"))
            if program is not None:
                probes.append((f"{program} {unshare} {mount}", partial(_probe_bubblewrap, program, unshare, mount)))
            probes.append(("Landlock", _probe_landlock))
        else:
            return Choice(None, f"Nothing can confine commands on {sys.platform}.")
        problems = [] if probes[0][0] != "Landlock" else ["bubblewrap is not installed."]
        for key, probe in probes:
            found = self._result_of(key, probe)
            if not isinstance(found, str):
                return Choice(found)
            problems.append(f"{found}.")
        return Choice(None, " ".join(problems))

    def _result_of(self, key: str, probe: Callable[[], Sandbox | str]) -> Sandbox | str:
        """Return the result of the last probe, or of a new one if there was none or it failed long enough ago."""
        with self._probing:
            found, probed_at = self._probed.get(key, ("", -math.inf))
            if isinstance(found, str) and time.monotonic() - probed_at >= _RETRY_S:
                found = probe()
                self._probed[key] = found, time.monotonic()
            return found


SANDBOXES = Sandboxes()
"""What this process has found out about the machine."""

choose_sandbox = SANDBOXES.choose


def _probe_bubblewrap(program: str, unshare: str | None, mount: str | None) -> Sandbox | str:
    return bubblewrap.probe(program, unshare=unshare, mount=mount)


def _probe_landlock() -> Sandbox | str:
    from crow.tools.sandbox.landlock import Landlock  # imports ctypes, which takes 10 ms

    sandbox = Landlock()
    problem = sandbox.probe()
    return f"Landlock: {problem}" if problem else sandbox


def _probe_seatbelt() -> Sandbox | str:
    sandbox = Seatbelt()
    problem = sandbox.probe()
    return f"Seatbelt: {problem}" if problem else sandbox


def _filter_problems(sandbox: Sandbox, options: SandboxOptions) -> Iterator[str]:
    """Yield what the filter of system calls cannot do here, one sentence each."""
    if not isinstance(sandbox, bubblewrap.Bubblewrap):
        if options.sockets:
            yield f"sandbox.sockets has no effect under {sandbox.name}, because only bubblewrap can hide other sockets"
    elif reason := missing_architecture():
        yield f"{reason}, so confined commands can use all Unix sockets that they see"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The preparations for one command."""

    confinement: Confinement
    env: Mapping[str, str]
    """The command's variables."""
    snapshot: Snapshot | None
    """The protected paths before the command."""
    places: PrivateDirectories
    """The command's private directories."""


class KernelConfiner:
    """The :class:`crow.tools.sandbox.Confiner` of one session.

    `directories` are the directories of the workspace.
    """

    def __init__(self, directories: Sequence[Path], options: SandboxOptions, sandboxes: Sandboxes = SANDBOXES) -> None:
        roots = tuple(dict.fromkeys(Path(os.path.realpath(directory)) for directory in directories))
        self.options = options
        self._sandboxes = sandboxes
        self._policy = Policy(roots, options)
        self._denied = DeniedFiles(roots[0], roots)
        self._choice: Choice | None = None
        """The sandbox to use. None until it is first needed."""
        self._private: Private | None = None
        """The session's private directories. None until the first command, and after `close`."""
        self._protected: ProtectedFiles | None = None
        """None until the first command."""
        self._has_overlay: bool | None = None
        """Whether overlays for `read` commands work over this workspace. None until that was tried."""
        self._has_layers: bool | None = None
        """Whether layers work over this workspace. None until that was tried."""
        self._scratch: Path | None = None
        """The directory for layers if they do not work in crow's data directory."""
        self._prepared: dict[Process, _Prepared] = {}
        """The preparations for each command that has started and for which `finish` was not called yet."""
        self._numbers = count(1)
        self._lock = threading.Lock()
        """Held by threads that set or use the values above."""
        self._listeners = Listeners()
        self._launcher = Launcher()

    @property
    def confines(self) -> bool:
        """See :class:`crow.tools.sandbox.Confiner`."""
        if self.options.enabled == "auto":
            return self._choice is not None and self._choice.sandbox is not None
        return self.options.enabled == "required"

    @property
    def credentials(self) -> Credentials:
        """See :class:`crow.tools.sandbox.Confiner`."""
        return self.options.credentials

    @property
    def credential_hosts(self) -> tuple[str, ...]:
        """See :class:`crow.tools.sandbox.Confiner`."""
        has_proxy = self.options.enabled != "off" and not self.options.network
        return self.options.credentials.hosts if has_proxy else ()

    async def status(self) -> SandboxStatus:
        """See :class:`crow.tools.sandbox.Confiner`."""
        options = self.options
        status = SandboxStatus(
            setting=options.enabled,
            has_network=options.network,
            readable=options.readable,
            writable=options.writable,
        )
        if options.enabled == "off":
            return replace(status, problem='`sandbox.enabled` is "off".')
        choice = await self._choose()
        if choice.sandbox is None:
            return replace(status, problem=choice.problem)
        problem = "; ".join((*self._policy.problems(), *_filter_problems(choice.sandbox, options)))
        return replace(status, name=choice.sandbox.name, problem=problem, has_overlay=choice.sandbox.has_overlay)

    async def start(
        self,
        argv: Sequence[str],
        access: ConfinedAccess,
        *,
        cwd: Path,
        env: Mapping[str, str],
        on_output: Callable[[bytes], None],
        on_errors: Callable[[bytes], None] | None = None,
        takes_input: bool = False,
        directory: Path | None = None,
        excluded: ExcludedPaths = NOTHING_EXCLUDED,
        layer: Layer | None = None,
        on_listener: Callable[[socket.socket], None] | None = None,
    ) -> Process:
        """See :class:`crow.tools.sandbox.Confiner`."""
        choice = await self._choose()
        if choice.sandbox is None or self.options.enabled == "off":
            problem = choice.problem if self.options.enabled != "off" else '`sandbox.enabled` is "off".'
            raise PermissionError(
                errno.EPERM,
                f'The command was not run, because no sandbox can limit it to the access "{access}": {problem} '
                'Use the access "full"; the user will be asked.',
            )
        has_network = access == "write" and self.options.network
        is_connected = False
        begin: Callable[..., Awaitable[Process]] = choice.sandbox.start
        if isinstance(choice.sandbox, bubblewrap.Bubblewrap) and on_listener is not None and not has_network:
            is_connected = True
            begin = partial(choice.sandbox.start, before=partial(self._listen, on_listener))
        prepare = partial(self._prepare, choice.sandbox, access, directory, excluded, layer)

        async def run(begin: Callable[..., Awaitable[Process]]) -> Process:
            prepared = await anyio.to_thread.run_sync(prepare)
            variables = {name: value for name, value in env.items() if name not in REMOVED} | dict(prepared.env)
            if is_connected:
                variables |= proxy_environment(variables, self._policy.download_variables(prepared.places))
                if self.credentials:
                    trusting = partial(self.credentials.environment, variables, prepared.places.trust)
                    variables |= await anyio.to_thread.run_sync(trusting)
            process = await begin(
                argv,
                prepared.confinement,
                cwd=cwd,
                env=variables,
                on_output=on_output,
                on_errors=on_errors,
                takes_input=takes_input,
            )
            self._prepared[process] = prepared
            return process

        if isinstance(choice.sandbox, bubblewrap.Bubblewrap) and self._launcher.works:
            try:
                async with self._launcher.reserved(has_network=has_network) as reservation:
                    return await run(partial(reservation.start, on_listener=on_listener if is_connected else None))
            except NotLaunchedError as error:
                logger.warning("The sandbox's helper could not start a command, so bubblewrap starts it: %s", error)
        return await run(begin)

    async def _listen(self, on_listener: Callable[[socket.socket], None], pid: int) -> None:
        """Open the listening socket for the proxy in the network namespace of `pid`. Without it, the command has no
        network."""
        try:
            on_listener(await self._listeners.open(pid))
        except OSError as error:
            logger.warning("A command gets no network: %s", error)

    async def check(self, process: Process) -> tuple[str, ...]:
        """See :class:`crow.tools.sandbox.Confiner`."""
        prepared = self._prepared.get(process)
        if prepared is None or prepared.snapshot is None or self._protected is None:
            return ()
        check = partial(self._protected.check, prepared.snapshot, only_created=self._blocks_changes(prepared))
        return await anyio.to_thread.run_sync(check)

    async def refresh(self, process: Process) -> None:
        """See :class:`crow.tools.sandbox.Confiner`."""
        prepared = self._prepared.get(process)
        roots = () if prepared is None else [each.root for each in prepared.confinement.overlays]
        if roots and not process.exited.is_set():
            try:
                # in a sandbox of the helper, the namespaces of the first process cannot be entered
                pid = process.command_pid if isinstance(process, LaunchedProcess) else process.pid
                await self._listeners.refresh(pid, roots)
            except (OSError, TimeoutError) as error:
                logger.warning("A command in the background may see old files: %s", error)

    async def finish(self, process: Process) -> tuple[str, ...]:
        """See :class:`crow.tools.sandbox.Confiner`."""
        prepared = self._prepared.pop(process, None)
        if prepared is None:
            return ()
        layers = prepared.confinement.layers
        if layers is not None:
            _remove_later(layers)
            return ()
        if prepared.snapshot is None or self._protected is None:
            return ()
        put_back = partial(self._protected.put_back, prepared.snapshot, only_created=self._blocks_changes(prepared))
        return await anyio.to_thread.run_sync(put_back)

    def _blocks_changes(self, prepared: _Prepared) -> bool:
        """Return whether the sandbox makes all protected files read-only that existed before the command. If so, the
        command can only have created protected files, not changed or removed any."""
        sandbox = None if self._choice is None else self._choice.sandbox
        are_all_listed = len(prepared.confinement.read_only) < MAX_READ_ONLY
        return sandbox is not None and sandbox.protects_files and are_all_listed

    def accept(self, path: Path) -> None:
        """See :class:`crow.tools.sandbox.Confiner`."""
        if self._protected is not None:
            self._protected.accept(path)

    def explain(self, access: CommandAccess, output: str, *, has_failed: bool) -> str:
        """See :class:`crow.tools.sandbox.Confiner`."""
        if access == "full" or not self.confines:
            return ""
        text = output[-_SEARCHED_CHARS:]
        if access == "write" and (names := self._unchanged(text)):
            return (
                f"[Protected files stayed as they were: {', '.join(names)}. So the command may have done only part of "
                'its work, for example when git checks out another branch. To change these files, use access "full".]'
            )
        if not has_failed:
            return ""
        has_network = access == "write" and self.options.network
        if not has_network and re.search(_NO_NETWORK, text, re.IGNORECASE):
            setting = "" if access == "write" else ' and access "write"'
            return (
                "[Confined commands have no network and cannot reach services of this machine either; in a "
                "layer, HTTP and HTTPS work through the proxy in $HTTPS_PROXY. If the command needs another way, use "
                'access "full". The user can allow it with `network = true` in '
                f"[sandbox] of config.toml{setting}, and Unix sockets with `sockets`.]"
            )
        if not re.search(_NO_WRITE, text, re.IGNORECASE):
            return ""
        hidden = " The user's deny rules hide some files from the command." if self._denied.has_found else ""
        if access == "read":
            return (
                f'[Access was "read", which lets a command change only $TMPDIR.{hidden} To change files in the '
                'workspace, use access "write"; for anything else, use "full".]'
            )
        return (
            "[Confined commands can change only the workspace and $TMPDIR and, without a layer, no protected files "
            f'such as .git/config or AGENTS.md.{hidden} If the command needs more, use access "full". '
            "The user can allow more directories with `writable` in [sandbox] of config.toml.]"
        )

    def _unchanged(self, text: str) -> Sequence[str]:
        """Return the protected files of the workspace that a command could not change, judging by its output. If there
        are many, only some are returned."""
        names: dict[str, None] = {}
        for line in list(filter(_UNCHANGED.search, text.splitlines()))[:_MAX_NAMED]:
            for word in _NAME.findall(line):
                path = Path(os.path.normpath(self._policy.roots[0] / word))
                is_known = is_inside_any(path, self._policy.writable_roots()) and os.path.lexists(path)
                if is_known and is_protected(path, self.options.names):
                    names[word] = None
        return tuple(names)

    async def close(self) -> None:
        """See :class:`crow.tools.sandbox.Confiner`."""
        await self._listeners.close()
        await self._launcher.close()
        private, self._private = self._private, None
        if private is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_S):
                await anyio.to_thread.run_sync(private.own.remove, abandon_on_cancel=True)

    async def _choose(self) -> Choice:
        programs, choice = self.options.programs, self._choice
        # since the choice, commands of another session may have replaced one of the sandbox's programs
        if choice is None or choice.sandbox is None or not all(map(programs.trusts, choice.sandbox.programs)):
            self._choice = choice = await anyio.to_thread.run_sync(self._sandboxes.choose, programs)
        return choice

    def _prepare(
        self,
        sandbox: Sandbox,
        access: ConfinedAccess,
        directory: Path | None,
        excluded: ExcludedPaths,
        layer: Layer | None = None,
    ) -> _Prepared:
        """Prepare a command. For the arguments, see `start`. This call blocks. :raises OSError: a directory cannot be
        made, or too many files would have to be hidden."""
        private = self._own_directories()
        with self._lock:
            if self._protected is None:
                self._protected = ProtectedFiles(self._policy.writable_roots(), private.kept, self.options.names)
            protected = self._protected
        snapshot = protected.snapshot() if access == "write" and layer is None else None
        places = private.directories if directory is None else replace(private.directories, temporary=directory)
        denied = self._denied.find(excluded, self._policy.searched_trees())
        overlays = () if layer is None else layer.renew()
        confinement = self._policy.confinement(access, places, snapshot, denied, overlays)
        if access == "read" and sandbox.has_overlay and self._overlay_works(sandbox, confinement, private):
            confinement = replace(confinement, layers=private.new_layers(next(self._numbers)))
        if directory is not None:  # a server runs as long as the session; the user may create protected files meanwhile
            snapshot = None
        env = self._policy.environment(access, places, has_overlay=confinement.layers is not None)
        return _Prepared(confinement=confinement, env=env, snapshot=snapshot, places=places)

    def _own_directories(self) -> Private:
        """Return the session's private directories. The first call creates them."""
        with self._lock:
            if self._private is None:
                self._policy.create_own()
                self._private = Private.create(self.options.caches, self._policy.roots)
            return self._private

    @property
    def place(self) -> Place | None:
        """See :class:`crow.tools.sandbox.Confiner`."""
        return None if self.options.layers is None else Place(self.options.layers, self._scratch)

    async def open_layer(self) -> Layer | None:
        """See :class:`crow.tools.sandbox.Confiner`."""
        if self.options.enabled == "off" or self.options.layers is None:
            return None
        # only the start of a command has to know whether the sandbox can still be trusted
        sandbox = (self._choice or await self._choose()).sandbox
        if sandbox is None or not sandbox.has_overlay:
            return None
        return await anyio.to_thread.run_sync(self._open_layer, sandbox)

    def _open_layer(self, sandbox: Sandbox) -> Layer | None:
        """Open a layer. The first call checks where layers work: in crow's data directory, or else in the
        session's temporary directory."""
        private, trees, place = self._own_directories(), self._policy.layered_trees(), self.place
        if place is None or not trees:
            return None
        with self._lock:
            if self._has_layers is None:
                works = self._layer_works(sandbox, private, trees, place)
                if not works:
                    self._scratch = private.own.path / "layers"
                    works = self._layer_works(sandbox, private, trees, Place(place.directory, self._scratch))
                self._has_layers = works
        return Place(place.directory, self._scratch).open(trees) if self._has_layers else None

    def _layer_works(self, sandbox: Sandbox, private: Private, trees: Sequence[Path], place: Place) -> bool:
        """Return whether a command can run in a layer over `trees` that is kept at `place`."""
        assert isinstance(sandbox, bubblewrap.Bubblewrap)
        try:
            layer = place.open(trees)
        except OSError:
            return False
        try:
            tried = self._policy.confinement("write", private.directories, overlays=layer.renew())
            return sandbox.run(["/bin/sh", "-c", ":"], tried, cwd=self._policy.roots[0]).returncode == 0
        finally:
            layer.drop()

    def _overlay_works(self, sandbox: Sandbox, confinement: Confinement, private: Private) -> bool:
        """Return whether an overlay can be mounted over the file system of this workspace. Only the first call tries to
        mount one."""
        with self._lock:
            if self._has_overlay is None:
                assert isinstance(sandbox, bubblewrap.Bubblewrap)
                tried = replace(confinement, layers=private.new_layers(next(self._numbers)))
                ended = sandbox.run(["/bin/sh", "-c", ":"], tried, cwd=self._policy.roots[0])
                self._has_overlay = ended.returncode == 0
            return self._has_overlay


@dataclass(frozen=True, slots=True, kw_only=True)
class Private:
    """The private directories of one session."""

    own: TemporaryDirectory
    directories: PrivateDirectories
    kept: Path
    """When a protected file is put back, the content that a command wrote there is moved to this directory."""

    @classmethod
    def create(cls, caches: Path | None, roots: Sequence[Path]) -> Private:
        """Create the directories, and remove the directories of sessions whose process died. :raises OSError: they
        cannot be created."""
        own = TemporaryDirectory.create("session")
        try:
            directories, kept = cls._make_directories(own.path, caches, roots)
        except BaseException:  # the next command tries again
            own.remove()
            raise
        return cls(own=own, directories=directories, kept=kept)

    @staticmethod
    def _make_directories(root: Path, caches: Path | None, roots: Sequence[Path]) -> tuple[PrivateDirectories, Path]:
        """Create the directories in `root`, and those for the caches of the workspace. Return them, and the one for
        `Private.kept`. :raises OSError: a directory cannot be created."""
        name = hashlib.sha256(b"\0".join(os.fsencode(path) for path in roots[:1])).hexdigest()[:16]
        place = root if caches is None else Path(os.path.realpath(caches)) / name
        caches_of_commands = place / "caches"
        for path in (root / "temporary", root / "trust", caches_of_commands / PYTEST_CACHE, place / "kept"):
            _create_private(path)
        if caches is not None:
            _remove_unused(place.parent, name)
        _make_private((place, caches_of_commands, place / "kept"))
        _make_private(caches_of_commands.iterdir())
        with suppress(OSError):
            os.utime(place)
        (root / "hidden").touch(mode=0o000)
        directories = PrivateDirectories(
            temporary=root / "temporary", caches=caches_of_commands, blank=root / "hidden", trust=root / "trust"
        )
        return directories, place / "kept"

    def new_layers(self, number: int) -> Path:
        """Create a new directory for the overlays of one command."""
        path = self.own.path / "layers" / str(number)
        path.mkdir(mode=0o700, parents=True)
        return path


def _create_private(path: Path) -> None:
    """Create a directory and its missing parents. Nobody else can access any of them, so nobody can replace them."""
    for folder in reversed([each for each in (path, *path.parents) if not each.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)


def _make_private(folders: Iterable[Path]) -> None:
    """Give the mode 0700 to those of these directories that other users can access, whatever the umask is. Links are
    left alone, because a command may have made them."""
    for folder in folders:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                if stat.S_IMODE(status.st_mode) != 0o700 and status.st_uid == os.geteuid():
                    os.fchmod(handle, 0o700)
            finally:
                os.close(handle)


def _remove_unused(caches: Path, used: str) -> None:
    """Remove the caches of workspaces that have not been used for a month, and make the others private."""
    with suppress(OSError):
        places = list(caches.iterdir())
        _make_private((caches, *places))
        for path in places:
            with suppress(OSError):
                if path.name != used and path.stat().st_mtime < time.time() - _KEPT_S:
                    remove_tree(path)


def _remove_later(path: Path) -> None:
    """Remove a directory in a daemon thread. Crow exits without waiting for this thread. If the thread has not removed
    everything by then, the next session removes the rest."""

    def remove() -> None:
        with suppress(OSError):
            remove_tree(path)

    threading.Thread(target=remove, daemon=True).start()
