"""The helper that starts confined commands in namespaces of their own, as bubblewrap does, but without new programs.

The helper is a separate process that imports only the standard library, because only a process with one thread may
enter a user namespace, and a small process is copied fast. For each command it clones a child, as a sibling of itself,
so crow is the parent. This child is the first process of the sandbox: it mounts what the command may see, gives up all
rights, starts the command and reports its end. If it dies, the kernel kills everything in the sandbox. The helper holds
no secrets and no files of crow, and it ends when crow closes the connection.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import marshal
import os
import signal
import socket
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

_HANDLES = 4
"""How many open files come with a plan: the plan itself, and the command's standard input, output and error."""
_BACKLOG = 128

_MAX_REASON = 1_000
"""The reason of a failure is cut to this many bytes."""

_CLONE_PARENT, _CLONE_NEWUSER, _CLONE_NEWNET = 0x8000, 0x10000000, 0x40000000
# the namespaces of mounts, cgroups, host names, System V objects and processes
_NAMESPACES = _CLONE_NEWUSER | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000
# these numbers are the same on all architectures
_OPEN_TREE, _MOVE_MOUNT, _CLONE3, _MOUNT_SETATTR = 428, 429, 435, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_FROM_HANDLE, _MOVE_FOLLOWS_LINKS = 0x4, 0x10 | 0x20
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8  # the same for mount and mount_setattr
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION = 0x20080522
_MAX_CAPABILITIES = 64
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}


class _Kernel:
    """System calls that Python does not have. Each raises OSError if it fails."""

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
        self._libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)
        self._libc.syscall.restype = ctypes.c_long
        self.uid, self.gid = os.getuid(), os.getgid()
        """The user and group of crow."""
        self.proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        """The /proc that crow sees, for use after the sandbox has one of its own."""

    def clone(self, flags: int) -> int:
        """Copy this process. Return the id of the copy, or 0 in the copy."""
        arguments = (ctypes.c_uint64 * 8)(flags)
        return self._call("clone3", _CLONE3, arguments, ctypes.sizeof(arguments))

    def mount(self, kind: str | None, place: str, flags: int, options: str = "") -> None:
        """Mount a new file system, or change the mounts at a place if there is no `kind`."""
        name = None if kind is None else kind.encode()
        if self._libc.mount(name, os.fsencode(place), name, flags, os.fsencode(options)):
            raise _last_error(f"mount {kind or ''} {place}")

    def tree(self, path: str, *, is_recursive: bool = True) -> int:
        """Return an open copy of the mounts at a path, which is mounted nowhere."""
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if is_recursive else 0)
        return self._call(path, _OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)

    def limit(self, handle: int, path: str, attributes: int, *, is_recursive: bool = True) -> None:
        """Add attributes to an open tree, or to the mounts at a path."""
        wanted = (ctypes.c_uint64 * 4)(attributes)
        flags = (_AT_EMPTY_PATH if handle != _AT_FDCWD else 0) | (_AT_RECURSIVE if is_recursive else 0)
        self._call(path, _MOUNT_SETATTR, handle, os.fsencode(path), flags, wanted, ctypes.sizeof(wanted))

    def put(self, tree: int, place: str) -> None:
        """Mount an open tree at a place, and close it."""
        flags = _MOVE_FROM_HANDLE | _MOVE_FOLLOWS_LINKS
        self._call(place, _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(place), flags)
        os.close(tree)

    def enter_user_namespace(self) -> None:
        """Move this process into a new user namespace."""
        if self._libc.unshare(_CLONE_NEWUSER):
            raise _last_error("unshare")

    def control(self, option: int, first: int = 0, second: int = 0) -> None:
        """Set an option of this process. See `man 2 prctl`."""
        if self._libc.prctl(option, first, second, 0, 0):
            raise _last_error(f"prctl {option}")

    def drop_capabilities(self) -> None:
        """Give up all capabilities, for this process and for all programs that it starts."""
        for number in range(_MAX_CAPABILITIES):
            try:
                self.control(_PR_CAPBSET_DROP, number)
            except OSError:  # the kernel has no more of them
                break
        self.control(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        if self._libc.capset(header, none):
            raise _last_error("capset")

    def filter_calls(self, program: bytes) -> None:
        """Install a filter of system calls, for this process and for all programs that it starts."""
        code = ctypes.create_string_buffer(program, len(program))
        # the variables keep both buffers until the kernel has read them
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
        self.control(_PR_SET_SECCOMP, 2, ctypes.addressof(header))

    def _call(self, what: str, number: int, *arguments: object) -> int:
        """Make a system call. `what` names the call or its path in the error. :raises OSError: the kernel refused."""
        wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        result = int(self._libc.syscall(ctypes.c_long(number), *wide))
        if result < 0:
            raise _last_error(f"call {number} {what}")
        return result


def _last_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def main() -> None:
    """Serve requests on the socket whose number is the first argument, until crow closes its end.

    Each request is `own network` or `no network`, and brings a socket. Over this socket, crow gets the id of a new
    sandbox's first process, or a negative error number, and then talks to this process: see `_begin`.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that no command can interrupt the first process of its sandbox
    kernel = _Kernel()
    gc.disable()
    gc.freeze()
    while True:
        request, handles = _received(connection, 1)
        if not handles:
            return
        with socket.socket(fileno=handles[0]) as report:
            network = _CLONE_NEWNET if request == b"own network" else 0
            try:
                pid = kernel.clone(_CLONE_PARENT | _NAMESPACES | network)
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                connection.close()
                _begin(kernel, report, has_own_network=bool(network))
            with suppress(OSError):  # crow no longer needs the sandbox
                report.send(b"%d" % pid)


def _received(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Return the next message and the open files in it, which no command may inherit."""
    message, handles, _, _ = socket.recv_fds(connection, 16, count)
    for handle in handles:
        os.set_inheritable(handle, False)
    return message, handles


def _begin(kernel: _Kernel, report: socket.socket, *, has_own_network: bool) -> NoReturn:
    """Run the first process of a sandbox. It waits for a plan on `report`, starts the command, and reports `ready`.
    When the command has ended, it reports `ended CODE OTHERS`. If something fails before that, it reports why."""
    try:
        command, listener = _set_up(kernel, report, has_own_network=has_own_network)
        # if crow has died meanwhile, sending fails; then this process ends, and the command with it
        socket.send_fds(report, [b"ready"], [] if listener is None else [listener.fileno()])
        _keep_only(report.fileno())
        _follow(report, command)
    except BaseException as error:  # noqa: BLE001 - crow raises it
        kind = "missing" if isinstance(error, _NotStartedError) else "failed"
        report.send(f"{kind} {error}".encode(errors="replace")[:_MAX_REASON])
    finally:
        os._exit(1)


class _NotStartedError(Exception):
    """The sandbox works, but the command cannot be started in it."""


def _set_up(kernel: _Kernel, report: socket.socket, *, has_own_network: bool) -> tuple[int, socket.socket | None]:
    """Make the sandbox of this process and start the command in it. Return the command's process id, and a socket that
    listens for crow, if crow wants one."""
    os.setsid()
    mask = os.umask(0)
    _map_ids(kernel.proc, 0, kernel.uid, 0, kernel.gid)
    kernel.mount(None, "/", _MS_REC | _MS_SLAVE)
    devices = {name: kernel.tree(f"/dev/{name}", is_recursive=False) for name in _DEVICES}
    if has_own_network:
        _start_loopback()
    # while this process did all that, crow has prepared the plan
    _, handles = _received(report, _HANDLES)
    with open(handles[0], "rb") as file:
        plan = marshal.loads(file.read())  # noqa: S302 - from crow, which runs in the same Python
    _mount_all(kernel, plan, devices)
    os.umask(mask)
    listener = _listening(plan["port"]) if plan["port"] else None
    _give_up(kernel, plan["filter"])
    try:
        return _start_command(plan, handles[1:]), listener
    except (OSError, ValueError) as error:
        raise _NotStartedError(error) from error


def _map_ids(proc: int, inner_uid: int, outer_uid: int, inner_gid: int, outer_gid: int) -> None:
    """Map one user id and one group id of this process's new user namespace to ids outside of it. `proc` is
    `_Kernel.proc`."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_uid} {outer_uid} 1"),
        ("gid_map", f"{inner_gid} {outer_gid} 1"),
    ):
        handle = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


def _mount_all(kernel: _Kernel, plan: Mapping[str, Any], devices: Mapping[str, int]) -> None:
    """Mount what the command may see. Everything is read-only, except where the plan's `mounts` say otherwise. These
    are options of bubblewrap, with the same order and meaning."""
    for root, upper, work in plan["overlays"]:
        os.chdir(root)  # in the options of an overlay, characters such as `:` in the root's name would have a meaning
        kernel.mount("overlay", ".", 0, f"userxattr,volatile,lowerdir=.,upperdir={upper},workdir={work}")
    os.chdir("/")
    # Open all sources before a mount hides them: writable ones before everything becomes read-only, the others after.
    trees: dict[int, int] = {}
    for number, (option, *arguments) in enumerate(plan["mounts"]):
        if option == "--bind":
            trees[number] = kernel.tree(arguments[0])
            kernel.limit(trees[number], "", _NO_SUID | _NO_DEVICES)
    kernel.limit(_AT_FDCWD, "/", _NO_SUID | _NO_DEVICES | _READ_ONLY)
    for number, (option, *arguments) in enumerate(plan["mounts"]):
        if option == "--ro-bind":
            trees[number] = kernel.tree(arguments[0])
    _mount_devices(kernel, devices)
    kernel.mount("proc", "/proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)
    for number, (option, *arguments) in enumerate(plan["mounts"]):
        place = arguments[-1]
        match option:
            case "--bind" | "--ro-bind":
                _make_place(place, is_directory=stat.S_ISDIR(os.fstat(trees[number]).st_mode))
                kernel.put(trees[number], place)
            case "--dir":
                _make_place(place, is_directory=True)
            case "--tmpfs" | "--perms":
                _make_place(place, is_directory=True)
                mode = arguments[0] if option == "--perms" else "0755"
                kernel.mount("tmpfs", place, _NO_SUID | _NO_DEVICES, f"mode={mode}")
            case "--remount-ro":
                kernel.limit(_AT_FDCWD, place, _READ_ONLY, is_recursive=False)
            case _:
                raise ValueError(f"unknown option {option}")


def _mount_devices(kernel: _Kernel, devices: Mapping[str, int]) -> None:
    """Make a /dev with the devices that every program may use, and terminals of its own."""
    kernel.mount("tmpfs", "/dev", _NO_SUID | _NO_DEVICES, "mode=0755")
    for name, tree in devices.items():
        os.close(os.open(f"/dev/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        kernel.limit(tree, "", _NO_SUID)
        kernel.put(tree, f"/dev/{name}")
    for name, target in _LINKS.items():
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.symlink("/proc/kcore", "/dev/core")
    os.mkdir("/dev/shm", 0o755)  # noqa: S108 - the sandbox's own
    os.mkdir("/dev/pts", 0o755)
    kernel.mount("devpts", "/dev/pts", _NO_SUID | _NO_EXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")


def _make_place(path: str, *, is_directory: bool) -> None:
    """Make the file or directory on which something is mounted, if there is none."""
    if os.path.exists(path):
        return
    os.makedirs(path if is_directory else os.path.dirname(path), 0o755, exist_ok=True)
    if not is_directory:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))


def _start_loopback() -> None:
    """Switch the loopback interface of this network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        (flags,) = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0)), 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _listening(port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


def _give_up(kernel: _Kernel, call_filter: bytes) -> None:
    """Give up all rights: from now on, this process may do no more than the command."""
    # another user namespace, which has no rights over the mounts
    kernel.enter_user_namespace()
    _map_ids(kernel.proc, kernel.uid, 0, kernel.gid, 0)
    os.close(kernel.proc)
    kernel.control(_PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    kernel.control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.control(_PR_SET_DUMPABLE, 0)  # the command cannot look into this process, nor change it
    kernel.filter_calls(call_filter)


def _start_command(plan: Mapping[str, Any], streams: Sequence[int]) -> int:
    """Start the command and return its process id. :raises OSError: there is no such program or directory."""
    os.chdir(plan["cwd"])
    argv, env = plan["argv"], plan["env"]
    places = [""] if "/" in argv[0] else env.get("PATH", os.defpath).split(":")
    programs = [os.path.join(place, argv[0]) for place in places]
    return os.posix_spawn(
        next(filter(os.path.isfile, programs), argv[0]),
        argv,
        env,
        file_actions=[(os.POSIX_SPAWN_DUP2, handle, number) for number, handle in enumerate(streams)],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
    )


def _keep_only(handle: int) -> None:
    """Close all open files except one."""
    # `closerange` up to the limit would take minutes in a container without a limit, if the C library is an old one
    for number in map(int, os.listdir("/proc/self/fd")):
        if number != handle:
            with suppress(OSError):  # the list itself was open, too
                os.close(number)


def _follow(report: socket.socket, command: int) -> None:
    """Wait for the end of the command. Report its exit code, and whether other processes of the sandbox still run."""
    ended, status = os.wait()
    while ended != command:
        ended, status = os.wait()
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        others = 1
    except ChildProcessError:
        others = 0
    report.send(b"ended %d %d" % (os.waitstatus_to_exitcode(status), others))


if __name__ == "__main__":
    main()
