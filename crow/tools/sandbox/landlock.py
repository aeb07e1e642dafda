"""Confines commands with Landlock and a seccomp filter, which the Linux kernel offers without any extra program.

Before starting a command, a thread gives up most of its own rights for good. The command inherits only the remaining
rights. The thread ends as soon as the command runs; crow's other threads keep their rights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat as modes
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from crow.tools.process import Process, starting
from crow.tools.sandbox import Confinement
from crow.tools.sandbox.probe import try_confinement
from crow.tools.sandbox.seccomp import landlock_filter, missing_architecture
from crow.tools.sandbox.transport import start_in_thread

# The names and numbers are those of the kernel's headers linux/landlock.h, prctl.h and seccomp.h.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_GET_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_CAPABILITY_VERSION = 0x20080522
_MAX_RULESETS = 8

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV, _RESOLVE_UNIX = 1 << 13, 1 << 14, 1 << 15, 1 << 16
_FILE_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV, 9: _RESOLVE_UNIX}
"""The rights that each ABI, a version of Landlock, has added."""
_TCP_RIGHTS = 0b11  # bind and connect; the seccomp filter refuses internet sockets as well
_TCP_ABI = 4
_SCOPES = 0b11  # abstract unix sockets and signals
_SCOPES_ABI = 6
_TRUNCATE_ABI = 3

_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = (1 << 15) - 1 & ~(_MAKE_CHAR | _MAKE_BLOCK)  # all of ABI 3 but making device files
_DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
_RIGHTS_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV | _RESOLVE_UNIX
"""The rights that a rule for a file may contain. All others concern what is in a directory."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a fixed place for semaphores and shared memory


class Landlock:
    """A :class:`crow.tools.sandbox.Sandbox` for Linux 5.13 and newer.

    It is weaker than bubblewrap:

    - `throwaway` trees are read-only, and `read_only` paths inside writable trees stay writable: see
      :class:`crow.tools.sandbox.protected.ProtectedFiles`.
    - Masked directories refuse access instead of being empty. Commands can still find out whether a path exists, the
      size and times of the file there, and which processes run.
    - If a file is hidden, nothing can be created directly in the directories that lead to it. If a directory is hidden,
      the directories that lead to it cannot be listed either. Nothing can be created in the directories that lead to a
      `fixed` tree, either.
    - Without network there are no internet sockets at all, so programs cannot use the loopback interface either. Even
      with network, there are no unix sockets except socket pairs, and no new pseudo-terminals. `sockets` has no effect.
    - `write` commands can change the modes, owners and times of all files of the user; `read` commands can change only
      the times.
    - /dev/shm and System V IPC are shared with the user's other programs.
    - Before ABI 6 (Linux 6.12), commands can signal the user's other processes, even crow.
    - There is no process namespace: a process that leaves its group and changes its environment outlives the command.

    `abi` limits the ABI, for tests.
    """

    programs = ()
    protects_files = False
    has_overlay = False

    def __init__(self, *, abi: int = sys.maxsize) -> None:
        self._max_abi = abi
        self._rulesets: OrderedDict[Confinement, _Ruleset] = OrderedDict()
        """The rulesets of the last confinements, the newest at the end. They are kept because most commands have the
        same confinement."""
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The sandbox's name for users, with the version of the kernel's Landlock."""
        return f"Landlock {min(landlock_abi(), self._max_abi)}"

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

        process = Process(on_output, on_errors)
        variables = process.marked(env)

        def start() -> subprocess.Popen[bytes]:
            self._restrict_thread(confinement)
            return subprocess.Popen(  # noqa: S603 - the model's command
                argv,
                bufsize=0,
                stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if on_errors is None else subprocess.PIPE,
                cwd=cwd,
                env=variables,
                start_new_session=True,
            )

        with starting():
            await start_in_thread(start, process)
        return process

    def probe(self) -> str:
        """Try to confine a command. Return an empty string if that works, otherwise the problem in words. This call
        blocks for about 10 ms."""
        if not sys.platform.startswith("linux"):
            return "Landlock is a part of Linux"
        reason = missing_architecture() or _missing_landlock()
        if reason:
            return reason
        return try_confinement(self._run)

    def _run(self, argv: Sequence[str], confinement: Confinement) -> subprocess.CompletedProcess[bytes]:
        """Run a confined command to its end."""
        found: list[subprocess.CompletedProcess[bytes] | OSError] = []

        def run() -> None:
            try:
                self._restrict_thread(confinement)
                found.append(
                    subprocess.run(  # noqa: S603 - a fixed command
                        argv, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                    )
                )
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=run, name="try Landlock")
        thread.start()
        thread.join()
        if isinstance(found[0], OSError):
            raise found[0]
        return found[0]

    def _restrict_thread(self, confinement: Confinement) -> None:
        """Confine the current thread, and all processes that it starts. This cannot be undone.

        :raises OSError: the thread cannot be confined.
        """
        abi = min(landlock_abi(), self._max_abi)
        if abi < 1:
            raise OSError(errno.EOPNOTSUPP, "Landlock does not work on this system")
        program = landlock_filter(
            confinement.access, has_network=confinement.has_network, checks_truncate=abi >= _TRUNCATE_ABI
        )
        with self._lock:
            ruleset = self._find_ruleset(confinement, abi)
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)
            _syscall(_RESTRICT_SELF, ruleset.handle, 0)
        _drop_capabilities()
        instructions = ctypes.create_string_buffer(program, len(program))
        pointer = ctypes.addressof(instructions)
        program_header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, pointer))
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program_header))

    def _find_ruleset(self, confinement: Confinement, abi: int) -> _Ruleset:
        """Return the kernel's rules for a confinement. New rules are made if a path now leads to another file."""
        ruleset = self._rulesets.pop(confinement, None)
        if ruleset is not None and not ruleset.is_current():
            ruleset.close()
            ruleset = None
        if ruleset is None:
            ruleset = _make_ruleset(confinement, abi)
        self._rulesets[confinement] = ruleset
        if len(self._rulesets) > _MAX_RULESETS:
            self._rulesets.popitem(last=False)[1].close()
        return ruleset


@dataclass(slots=True)
class _Ruleset:
    """A ruleset of the kernel, which any number of threads can apply. Rules belong to files, not to paths."""

    handle: int
    """Its file descriptor."""
    rights: int
    """All rights that this kernel knows. The ruleset refuses each of them where no rule allows it."""
    stamps: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Show whether each path still leads to the same file. In some directories, each entry has its own rule. The stamps
    of these directories also show whether the entries are still the same."""

    def is_current(self) -> bool:
        """Return whether the rules still fit the paths."""
        return all(
            _directory_stamp(path, is_listed=len(stamp or ()) > 2) == stamp for path, stamp in self.stamps.items()
        )

    def close(self) -> None:
        """Free the ruleset. Confined processes keep their confinement."""
        os.close(self.handle)

    def allow(self, path: str, rights: int, excluded: Sequence[str]) -> None:
        """Allow `rights` for everything at and below a path, except for what is at and below the excluded paths. The
        directories above an excluded path may only be listed.

        No rule is added if the path does not exist, contains a link, or is itself below an excluded path. In the first
        two cases, it is still watched.
        """
        if any(path.startswith(f"{name.rstrip(os.sep)}{os.sep}") for name in excluded):
            return  # a rule would allow access although a directory above is excluded
        self.stamps.setdefault(path, _directory_stamp(path, is_listed=False))
        try:
            handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if path == os.sep or os.readlink(f"/proc/self/fd/{handle}") == path:
                self._allow(handle, path, rights, excluded)
        finally:
            os.close(handle)

    def _add_rule(self, handle: int, rights: int) -> None:
        rule = struct.pack("=Qi", rights & self.rights, handle)
        _syscall(_ADD_RULE, self.handle, _PATH_BENEATH, rule, 0)

    def _allow(self, handle: int, path: str, rights: int, excluded: Sequence[str]) -> None:
        """Do what `allow` does for a path that is open as `handle`. If something below it is excluded, go through its
        entries one by one."""
        mode = os.fstat(handle).st_mode
        if path in excluded or modes.S_ISLNK(mode):
            return
        inner = [name for name in excluded if name.startswith(path.rstrip(os.sep) + os.sep)]
        if not inner:
            self._add_rule(handle, rights if modes.S_ISDIR(mode) else rights & _RIGHTS_OF_FILES)
            return
        if not modes.S_ISDIR(mode):
            return
        if not any(map(os.path.isdir, inner)):  # the right to list would also hold for excluded directories below
            self._add_rule(handle, rights & _READ_DIR)
        self.stamps[path] = _directory_stamp(path, is_listed=True)
        for name in _list_directory(handle):
            try:
                child = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            except OSError:
                continue
            try:
                self._allow(child, os.path.join(path, name), rights, inner)
            finally:
                os.close(child)


def _make_ruleset(confinement: Confinement, abi: int) -> _Ruleset:
    """Make the rules for a confinement. The last part of a path need not exist.

    Landlock cannot take away what a rule allows. So a directory that leads to an excluded path gets no rule, or only a
    rule that allows listing the directory. Instead, the entries that do not lead to an excluded path get rules of their
    own. A file that a command creates in this directory has no rule yet, so only later commands can access the file.
    """
    rights = sum(bits for since, bits in _FILE_RIGHTS_BY_ABI.items() if since <= abi)
    network = 0 if confinement.has_network or abi < _TCP_ABI else _TCP_RIGHTS
    scopes = _SCOPES if abi >= _SCOPES_ABI else 0
    fields = 1 if abi < _TCP_ABI else 2 if abi < _SCOPES_ABI else 3
    attributes = struct.pack("=QQQ", rights, network, scopes)[: 8 * fields]
    ruleset = _Ruleset(_syscall(_CREATE_RULESET, attributes, len(attributes), 0), rights)
    hidden = [str(path) for path in confinement.hidden]
    fixed = [str(path) for path in confinement.fixed]
    try:
        ruleset.allow("/", _READ, [*hidden, *map(str, confinement.masked), "/dev"])
        writable = (*confinement.writable, confinement.temporary)
        for path in (*confinement.readable, *confinement.throwaway, *(writable if fixed else ())):
            ruleset.allow(str(path), _READ, hidden)
        for path in writable:
            rights_here = _WRITE | (_IOCTL_DEV if path.is_relative_to("/dev") else 0)
            ruleset.allow(str(path), rights_here, [*hidden, *fixed])
        for device in _DEVICES:
            ruleset.allow(device, _DEVICE, ())
        ruleset.allow(_SHARED_MEMORY, _WRITE, ())
    except BaseException:
        ruleset.close()
        raise
    return ruleset


def _directory_stamp(path: str, *, is_listed: bool) -> tuple[int, ...] | None:
    """Return the device and inode number of the file at a path, or None if there is no file. With `is_listed`, also
    return the time when the entries of the directory last changed."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns) if is_listed else (found.st_dev, found.st_ino)


def _list_directory(handle: int) -> list[str]:
    """Return the names in a directory; none if it cannot be read."""
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    except OSError:
        return []
    try:
        return os.listdir(readable)
    finally:
        os.close(readable)


def _missing_landlock() -> str:
    """Return why the kernel has no Landlock, or an empty string if it has."""
    try:
        _syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    except OSError as error:
        match error.errno:
            case errno.ENOSYS:
                return "the kernel has no Landlock; Linux 5.13 and newer have it"
            case errno.EOPNOTSUPP:
                return "Landlock is switched off; add landlock to the kernel's parameter lsm="
            case errno.EPERM:
                return "the container that crow runs in forbids Landlock"
            case _:
                return f"Landlock does not work: {error.strerror}"
    return ""


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock; 0 if there is none."""
    try:
        return _syscall(_CREATE_RULESET, None, 0, _GET_VERSION)
    except OSError:
        return 0


def _drop_capabilities() -> None:
    """Give up all capabilities of the current thread. Programs that it starts get none either, because
    PR_SET_NO_NEW_PRIVS is set."""
    header, data = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if _libc().capset(header, data) != 0:
        _raise_error("capset")


def _prctl(option: int, value: int, pointer: int = 0) -> None:
    """Set an attribute of the current thread. :raises OSError: the kernel refused."""
    if _libc().prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(pointer), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        _raise_error("prctl")


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call. :raises OSError: the kernel refused."""
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = _libc().syscall(ctypes.c_long(number), *converted)
    if result < 0:
        _raise_error("landlock")
    return result


@cache
def _libc() -> ctypes.PyDLL:
    """Return the C library. Its calls do not release the interpreter's lock, because they are short."""
    library = ctypes.PyDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library


def _raise_error(name: str) -> None:
    """Raise an OSError for the last call of the C library. `name` is the call's name in the message."""
    number = ctypes.get_errno()
    raise OSError(number, f"{name}: {os.strerror(number)}")
