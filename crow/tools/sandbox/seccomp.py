"""Makes a seccomp filter that refuses the system calls that confined commands must not use.

The filter refuses what neither namespaces nor Landlock cover: Unix sockets and the sockets of virtual machines, through
which a command would reach the services of this machine. Like the filters of containers, it also refuses calls that
would needlessly enlarge the kernel's attack surface. Under Landlock, it refuses more: all sockets, changes of modes and
owners, and the limits of other processes.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from functools import cache

from crow.tools.sandbox import ConfinedAccess

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}
_X32_BIT = 0x40000000

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _JUMP_IF_BITS, _RETURN, _KEEP_BITS = (
    0x20,
    0x15,
    0x35,
    0x45,
    0x06,
    0x54,
)
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_CLONE_NEWUSER = 0x10000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000
_NETLINK_ROUTE = 0
_SOCKET_TYPE_BITS = 0xF  # the other bits are flags

# Name: number on x86_64, number on aarch64. None: the architecture does not have the call.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "kill": (62, 129),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "openat": (257, 56),
    "fchownat": (260, 54),
    "fchmodat": (268, 53),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "prlimit64": (302, 261),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "clone3": (435, 435),
    "openat2": (437, 437),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "fchmodat2": (452, 452),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "open_tree_attr": (467, 467),
    "file_setattr": (469, 469),
}

_ALWAYS_REFUSED = (
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),  # these can open sockets that no filter sees
    *("add_key", "request_key", "keyctl"),  # the user's keys are in the kernel's keyrings
    *("bpf", "perf_event_open", "userfaultfd", "setns", "open_by_handle_at", "pidfd_getfd"),
    *("mount", "umount2", "pivot_root", "open_tree", "open_tree_attr", "move_mount", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "swapon", "swapoff"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
)
# Refused to commands with the access `read`: calls that change the mode, owner or attributes of files.
_REFUSED_TO_READ = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "file_setattr"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)


def missing_architecture() -> str:
    """Return why there is no filter for this machine, or an empty string if there is one."""
    machine = platform.machine()
    known = " and ".join(_ARCHITECTURES)
    return "" if machine in _ARCHITECTURES else f"crow has system call filters for {known}, not for {machine}"


@cache
def landlock_filter(access: ConfinedAccess, *, has_network: bool, checks_truncate: bool) -> bytes:
    """Return the filter that is used together with Landlock, for this machine, as an array of BPF instructions.

    `checks_truncate` says that Landlock itself checks calls of `truncate`, which it does since ABI 3. Without network,
    the filter refuses all internet sockets, because Landlock's rules for TCP miss TCP Fast Open, Multipath TCP and
    `listen` without `bind`.
    """
    program = _basic_program((socket.AF_INET, socket.AF_INET6) if has_network else ())
    # a filter cannot read the struct to which the argument of this call points
    refused = {"openat2": errno.ENOSYS}
    if access == "read":
        refused |= dict.fromkeys(_REFUSED_TO_READ, errno.EPERM)
    if not checks_truncate:
        refused |= {"truncate": errno.EPERM}
    for name, error in refused.items():
        program.refuse(name, error)
    program.refuse_values("kill", 0, (0xFFFFFFFF,))  # -1, which signals every process of the user
    program.limits_of_others()
    program.truncating_read("open", 1)
    program.truncating_read("openat", 2)
    return program.end()


@cache
def namespace_filter(*, has_unix_sockets: bool) -> bytes:
    """Return the filter inside bubblewrap's namespaces, for this machine, as an array of BPF instructions.

    Internet sockets are allowed, because the network namespace limits them. `has_unix_sockets` says that the command
    may use Unix sockets. A filter cannot read the path to which a call connects, so it can only allow all or none.
    """
    families = (socket.AF_INET, socket.AF_INET6, *((socket.AF_UNIX,) if has_unix_sockets else ()))
    return _basic_program(families).end()


def _basic_program(families: tuple[int, ...]) -> _Program:
    """Return a program that refuses the calls that no confined command may make, and all sockets but those of
    `families`.

    Unix sockets are refused even with network: through them, D-Bus or Docker would run commands outside the sandbox. A
    command may always make pairs of connected sockets, and read the network interfaces by netlink.
    """
    program = _Program(_ARCHITECTURES[platform.machine()])
    # a filter cannot read the struct to which the argument of clone3 points
    for name, error in {**dict.fromkeys(_ALWAYS_REFUSED, errno.EPERM), "clone3": errno.ENOSYS}.items():
        program.refuse(name, error)
    program.socket(families)
    if socket.AF_UNIX not in families:
        program.connected_pairs()
    program.refuse_bits("clone", _CLONE_NEWUSER)
    program.refuse_bits("unshare", _CLONE_NEWUSER)
    program.refuse_values("ioctl", 1, (_TIOCSTI, _TIOCLINUX))
    return program


class _Program:
    """A BPF program under construction. At the start of each block, the accumulator holds the call's number."""

    def __init__(self, architecture: int) -> None:
        self._column = 0 if architecture == _X86_64 else 1
        self._code: list[tuple[int, int, int, int]] = []
        self._add(_LOAD, _ARCHITECTURE)
        self._add(_JUMP_IF_EQUAL, architecture, 1, 0)
        self._add(_RETURN, _KILL)
        self._add(_LOAD, _NUMBER)
        if architecture == _X86_64:
            self._add(_JUMP_IF_GREATER_OR_EQUAL, _X32_BIT, 0, 1)
            self._add(_RETURN, _FAIL | errno.ENOSYS)

    def refuse(self, name: str, error: int) -> None:
        """Refuse a call, whatever its arguments are."""
        self._block(name, [(_RETURN, _FAIL | error, 0, 0)])

    def refuse_bits(self, name: str, bits: int) -> None:
        """Refuse a call if its first argument has one of these bits."""
        self._block(name, [self._load(0), (_JUMP_IF_BITS, bits, 0, 1), *self._verdicts()])

    def refuse_values(self, name: str, argument: int, values: tuple[int, ...]) -> None:
        """Refuse a call if an argument has one of these values."""
        jumps = [(_JUMP_IF_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
        self._block(name, [self._load(argument), *jumps, *reversed(self._verdicts())])

    def socket(self, families: tuple[int, ...]) -> None:
        """Allow only sockets of these families, and netlink sockets that list the network interfaces. Other sockets
        fail with ENETUNREACH, so that programs report the network as the cause."""
        # a match jumps over the remaining comparisons, the two other instructions for netlink, and the refusal
        jumps = [(_JUMP_IF_EQUAL, int(family), len(families) - index + 3, 0) for index, family in enumerate(families)]
        self._block(
            "socket",
            [
                self._load(0),
                *jumps,
                (_JUMP_IF_EQUAL, int(socket.AF_NETLINK), 0, 2),
                self._load(2),
                (_JUMP_IF_EQUAL, _NETLINK_ROUTE, 1, 0),
                (_RETURN, _FAIL | errno.ENETUNREACH, 0, 0),
                (_RETURN, _ALLOW, 0, 0),
            ],
        )

    def connected_pairs(self) -> None:
        """Allow only pairs of sockets that stay connected to each other. A datagram socket could be connected to any
        other Unix socket afterwards."""
        types = (int(socket.SOCK_STREAM), int(socket.SOCK_SEQPACKET))
        jumps = [(_JUMP_IF_EQUAL, value, len(types) - index, 0) for index, value in enumerate(types)]
        block = [self._load(1), (_KEEP_BITS, _SOCKET_TYPE_BITS, 0, 0), *jumps]
        self._block("socketpair", [*block, (_RETURN, _FAIL | errno.ENETUNREACH, 0, 0), (_RETURN, _ALLOW, 0, 0)])

    def limits_of_others(self) -> None:
        """Refuse to set the resource limits of another process, because a limit on processor time could kill that
        process."""
        block = [self._load(0), (_JUMP_IF_EQUAL, 0, 5, 0)]
        block += [self._load(2), (_JUMP_IF_EQUAL, 0, 0, 2), self._load(2, upper=True), (_JUMP_IF_EQUAL, 0, 1, 0)]
        self._block("prlimit64", [*block, *self._verdicts()])

    def truncating_read(self, name: str, argument: int) -> None:
        """Refuse to open a file for reading if the call would also truncate the file. Landlock before ABI 3 treats such
        a call as a mere read."""
        block = [self._load(argument), (_JUMP_IF_BITS, _O_ACCMODE, 2, 0), (_JUMP_IF_BITS, _O_TRUNC, 0, 1)]
        self._block(name, [*block, *self._verdicts()])

    def end(self) -> bytes:
        """Complete the program and return it. It allows every call that no block refuses."""
        self._add(_RETURN, _ALLOW)
        return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, value, yes, no in self._code)

    def _block(self, name: str, block: list[tuple[int, int, int, int]]) -> None:
        """Add instructions for one call. They must end with a verdict."""
        number = _NUMBERS[name][self._column]
        if number is not None:
            self._add(_JUMP_IF_EQUAL, number, 0, len(block))
            self._code += block

    def _add(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        self._code.append((code, value, yes, no))

    @staticmethod
    def _load(argument: int, *, upper: bool = False) -> tuple[int, int, int, int]:
        """Load the lower or upper half of a call's argument. If the argument is an int, the kernel ignores the upper
        half."""
        return (_LOAD, _ARGUMENTS + 8 * argument + (4 if upper else 0), 0, 0)

    @staticmethod
    def _verdicts() -> list[tuple[int, int, int, int]]:
        return [(_RETURN, _FAIL | errno.EPERM, 0, 0), (_RETURN, _ALLOW, 0, 0)]
