"""Makes system calls of a process fail, as on disks without locks or without free inodes.

`python -m tests.support.failing_calls CALL BITS ERRNO MODULE ...` runs a module in a process in which the call fails
whose argument has one of these bits. It needs no privileges and cannot be undone. Linux only.
"""

from __future__ import annotations

import ctypes
import platform
import runpy
import struct
import sys
from collections.abc import Mapping

CALLS: Mapping[str, tuple[int, int, int]] = {
    "fcntl": (72, 25, 1),
    "flock": (73, 32, 1),
    "openat": (257, 56, 2),
    "landlock_create_ruleset": (444, 444, 2),
}
"""Maps calls to their numbers on x86_64 and on aarch64, and to the position of the argument that is compared."""

LOAD, EQUAL, HAS_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2


class Program(ctypes.Structure):
    """The struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def fail(call: str, bits: int, error: int) -> None:
    """From now on, `call` fails in this process with `error` if its argument has one of these bits."""
    on_x86, on_arm, position = CALLS[call]
    number = on_x86 if platform.machine() == "x86_64" else on_arm
    code = [
        (LOAD, 0, 0, 0),
        (EQUAL, 0, 3, number),
        (LOAD, 0, 0, 16 + 8 * position),
        (HAS_BITS, 0, 1, bits),
        (RETURN, 0, 0, FAIL | error),
        (RETURN, 0, 0, ALLOW),
    ]
    program = Program(len(code), b"".join(struct.pack("HBBI", *one) for one in code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0)):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    name, given, number, module, *rest = sys.argv[1:]
    fail(name, int(given), int(number))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__")
