"""Confines commands on macOS by Seatbelt, through sandbox-exec.

This module was written from documentation, and only the text that it generates is tested; no Mac was available to run
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from crow.tools.process import Process, start
from crow.tools.sandbox import Confinement
from crow.tools.sandbox.paths import folders_above
from crow.tools.sandbox.probe import try_confinement

PROGRAM = "/usr/bin/sandbox-exec"
_TRY_S = 10
_BASICS = """\
(version 1)
(deny default)
(allow process-fork)
(allow process-exec)
(allow process-info* (target same-sandbox))
(allow signal (target same-sandbox))
(allow sysctl-read)
(allow ipc-posix-sem)
(allow ipc-posix-shm)
(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))
(allow mach-lookup (global-name "com.apple.system.logger"))
(allow mach-lookup (global-name "com.apple.system.notification_center"))
(allow file-read*)
"""
_DEVICES = """\
(allow file-write-data (literal "/dev/null") (literal "/dev/zero") (literal "/dev/tty") (subpath "/dev/fd"))
(allow file-ioctl (literal "/dev/null") (literal "/dev/zero") (literal "/dev/tty"))
(deny file-write-setugid)
"""
_NETWORK = """\
(allow network*)
(allow system-socket)
(allow mach-lookup (global-name "com.apple.dnssd.service"))
(allow mach-lookup (global-name "com.apple.SystemConfiguration.configd"))
(allow mach-lookup (global-name "com.apple.trustd.agent"))
(deny network-outbound (remote unix-socket))
(allow network-outbound (literal "/private/var/run/mDNSResponder"))
"""


class Seatbelt:
    """A :class:`crow.tools.sandbox.Sandbox` for macOS.

    `throwaway` trees are read-only. Masked directories refuse access instead of being empty. Without network, programs
    cannot use the loopback interface either, because it would reach the user's other programs. There is no process
    namespace: a process that leaves its group outlives the command. Seatbelt does not stop a command from creating new
    protected files in a writable tree: see :class:`crow.tools.sandbox.protected.ProtectedFiles`.
    """

    name = "Seatbelt"
    programs = ()
    protects_files = True
    has_overlay = False

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
        """See :meth:`crow.tools.sandbox.Sandbox.start`. For `on_errors` and `takes_input`, see
        :func:`crow.tools.process.start`."""
        command = confined_command(argv, confinement)
        return await start(command, cwd=cwd, env=env, on_output=on_output, on_errors=on_errors, takes_input=takes_input)

    def probe(self) -> str:
        """Try to confine a command. Return an empty string if that works, otherwise the problem in words. This call
        blocks."""
        if sys.platform != "darwin":
            return "Seatbelt is a part of macOS"
        if not os.access(PROGRAM, os.X_OK):
            return f"there is no {PROGRAM}"
        return try_confinement(_run_confined)


def _run_confined(argv: Sequence[str], confinement: Confinement) -> subprocess.CompletedProcess[bytes]:
    """Run a confined command to its end."""
    try:
        return subprocess.run(  # noqa: S603 - a fixed command
            confined_command(argv, confinement),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TRY_S,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(0, f"it did not end within {_TRY_S} s") from None


def confined_command(argv: Sequence[str], confinement: Confinement) -> list[str]:
    """Return the command line that runs `argv` confined. Paths are passed as parameters, so that no path can be
    mistaken for a rule."""
    profile, parameters = make_profile(confinement)
    definitions = [part for name, path in parameters.items() for part in ("-D", f"{name}={path}")]
    return [PROGRAM, "-p", profile, *definitions, "--", *argv]


def make_profile(confinement: Confinement) -> tuple[str, dict[str, str]]:
    """Return the profile, and its parameters as a mapping from names to paths. If several rules match an operation, the
    last one decides."""
    profile = _Profile()
    profile.add("deny file-read-data file-read-xattr", "subpath", confinement.masked)
    writable = (*confinement.writable, confinement.temporary)
    readable = (*confinement.readable, *confinement.throwaway, *writable)
    profile.add("allow file-read-data file-read-xattr", "subpath", readable)
    profile.add("allow file-write*", "subpath", writable)
    profile.add("deny file-write*", "subpath", (*confinement.read_only, *confinement.fixed))
    profile.add("deny file-read-data file-read-xattr file-write*", "subpath", confinement.hidden)
    # if a command could rename a directory above a protected path, the rules would no longer cover that path
    above = set(folders_above((*confinement.read_only, *confinement.fixed, *confinement.hidden), writable))
    profile.add("deny file-write-unlink", "literal", sorted(above))
    text = _BASICS + "".join(profile.rules) + _DEVICES + (_NETWORK if confinement.has_network else "")
    return text, profile.parameters


class _Profile:
    """Collects the rules for paths, and the parameters that hold the paths."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self.parameters: dict[str, str] = {}

    def add(self, rule: str, match: str, paths: Iterable[Path]) -> None:
        """Add a rule for these paths. Without paths, add none."""
        filters = []
        for path in paths:
            name = f"PATH_{len(self.parameters)}"
            self.parameters[name] = str(path)
            filters.append(f'({match} (param "{name}"))')
        if filters:
            self.rules.append(f"({rule} {' '.join(filters)})\n")
