"""The interface of sandboxes, and the description of what a confined command may see and change."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from crow.tools import NOTHING_EXCLUDED, CommandAccess, ExcludedPaths, SandboxStatus
from crow.tools.layers import Layer, Overlay, Place
from crow.tools.network import Credentials
from crow.tools.process import Process

ConfinedAccess: TypeAlias = Literal["read", "write"]


CHECK_S = 2.5
"""While a command runs, `Confiner.check` is called once in this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """The limits of one command: what it may see and change. All paths are absolute, with links resolved. Paths that
    are neither masked nor in a readable or writable tree can be read but not written."""

    access: ConfinedAccess
    masked: tuple[Path, ...] = ()
    """Directories that the command sees as empty, such as /home, /run and /tmp."""
    readable: tuple[Path, ...] = ()
    """Trees that are visible, even inside a masked directory."""
    writable: tuple[Path, ...] = ()
    """Trees that are visible, even inside a masked directory, and that the command may change."""
    read_only: tuple[Path, ...] = ()
    """Existing protected paths in a writable tree, which the command must not change."""
    fixed: tuple[Path, ...] = ()
    """Trees inside a writable tree that no command can change, because crow itself starts programs from them."""
    hidden: tuple[Path, ...] = ()
    """Files and directories inside a visible tree that the command must not see, such as keys and crow's own files."""
    throwaway: tuple[Path, ...] = ()
    """Trees in which the command can write, but everything that it writes is discarded when the command ends. If the
    sandbox cannot discard writes, these trees are read-only."""
    temporary: Path
    """The session's private directory for temporary files, which is writable too."""
    blank: Path = Path(os.devnull)
    """A file to show in place of a hidden file."""
    layers: Path | None = None
    """A new, empty directory for the files that the command writes into throwaway trees. None if these trees are
    read-only."""
    overlays: tuple[Overlay, ...] = ()
    """The overlays of a layer over the throwaway trees. If there are any, the layer keeps everything that the command
    writes into these trees."""
    has_network: bool = False
    """The command may reach more than the loopback interface."""
    sockets: tuple[Path, ...] = ()
    """Unix sockets that the command may use, or directories that contain them. If there are none, the command cannot
    open Unix sockets at all, except for socket pairs."""


class Sandbox(Protocol):
    """A way in which the kernel confines commands."""

    @property
    def name(self) -> str:
        """The sandbox's name and version for users, such as `bubblewrap 0.8.0`."""

    @property
    def programs(self) -> tuple[str, ...]:
        """The absolute paths of the programs that start each confined command, outside the sandbox."""

    @property
    def protects_files(self) -> bool:
        """Whether the sandbox can make paths inside a writable tree read-only. If not, `ProtectedFiles` must undo
        changes to these paths."""

    @property
    def has_overlay(self) -> bool:
        """Whether the sandbox can discard what a command writes into throwaway trees."""

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
    ) -> Process:
        """Start a confined command in its own process group. See :func:`crow.tools.process.start`.

        :raises OSError: the command cannot be started, or cannot be confined. The command never runs unconfined.
        """


class Confiner(Protocol):
    """Confines the commands of one session."""

    @property
    def confines(self) -> bool:
        """See :meth:`crow.tools.Workspace.confines`."""

    @property
    def credentials(self) -> Credentials:
        """The credentials that may be added to requests of commands."""

    @property
    def credential_hosts(self) -> tuple[str, ...]:
        """See :meth:`crow.tools.Workspace.credential_hosts`."""

    async def status(self) -> SandboxStatus:
        """See :meth:`crow.tools.Workspace.sandbox_status`."""

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
        """Start a confined program in `cwd`. `directory` replaces the session's directory for temporary files. The
        program cannot read the `excluded` files. With a `layer`, everything that it writes into the workspace stays in
        the layer. `on_listener` gets a socket that listens on the program's own loopback interface, before the program
        begins; it is not called if there can be no such socket, or if the program has the whole network. The program's
        environment names this socket as the proxy.

        When the process has ended, call `finish`.

        :raises OSError: the program cannot be started, or no sandbox can confine it. The program never runs unconfined.
        """

    async def check(self, process: Process) -> tuple[str, ...]:
        """While a command runs, restore protected files that it changed some seconds ago. Return a sentence for each
        such file. Do nothing for a process that cannot write, or that is not a command."""

    async def refresh(self, process: Process) -> None:
        """Let a command that runs in a layer see the files that were replaced in the workspace meanwhile."""

    async def finish(self, process: Process) -> tuple[str, ...]:
        """Clean up after a command that has ended: discard what it wrote into throwaway trees, and restore protected
        files. Return a sentence for each protected file that the command changed. A second call for the same command
        does nothing."""

    async def open_layer(self) -> Layer | None:
        """Open a layer over everything that commands with the access `write` can change. None if there are no layers
        here. The caller must drop the layer.

        :raises OSError: the layer cannot be created.
        """

    @property
    def place(self) -> Place | None:
        """Where layers and change sets are on disk. None if there are no layers."""

    def accept(self, path: Path) -> None:
        """Record that crow itself changed a protected file, so that `finish` does not undo the change. This call
        blocks."""

    def explain(self, access: CommandAccess, output: str, *, has_failed: bool) -> str:
        """Return a line for the model if the output of a command shows that the command needs more access. Otherwise
        return an empty string."""

    async def close(self) -> None:
        """Remove the session's private directories."""
