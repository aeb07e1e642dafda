"""What confined commands may see and change, and the interface of the sandboxes that hold them to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from crow.tools import CommandAccess, SandboxStatus
from crow.tools.process import Process

ConfinedAccess: TypeAlias = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What one command may see and change. All paths are absolute, with links resolved.

    `masked`: directories that the command sees as empty, such as /home, /run and /tmp. `readable` and `writable`:
    trees that are visible, also where they are inside a masked directory; what is neither masked nor listed can be read
    but not written. `read_only`: existing protected paths inside a writable tree. `hidden`: files and directories
    inside a visible tree that the command must not see, such as keys and crow's own files. `throwaway`: trees in which
    the command sees its own writes, but which are discarded at its end, if the sandbox can do that; elsewhere they are
    read-only. `temporary`: the session's private directory for temporary files, which is writable too.

    `has_network`: the command may reach more than the loopback interface.
    """

    access: ConfinedAccess
    masked: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    read_only: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    throwaway: tuple[Path, ...] = ()
    temporary: Path
    has_network: bool = False


class Sandbox(Protocol):
    """A way in which the kernel confines commands."""

    @property
    def name(self) -> str:
        """The sandbox's name for users: bubblewrap, Landlock or Seatbelt."""

    async def start(
        self,
        argv: Sequence[str],
        confinement: Confinement,
        *,
        cwd: Path,
        env: Mapping[str, str],
        on_output: Callable[[bytes], None],
    ) -> Process:
        """Start a confined command in its own process group. See :func:`crow.tools.process.start`.

        :raises OSError: the command cannot be started, or cannot be confined. It never runs unconfined.
        """


__all__ = ["CommandAccess", "ConfinedAccess", "Confinement", "Sandbox", "SandboxStatus"]
