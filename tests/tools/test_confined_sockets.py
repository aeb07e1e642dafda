"""The sockets that commands have under bubblewrap, as root and as an ordinary user."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crow import programs
from crow.programs import SYSTEM_PROGRAMS
from crow.tools import CommandAccess
from tests.tools.confined import USERS, Place, as_user, run

users = pytest.mark.parametrize("user", USERS)

BEFORE = """
import ctypes, errno, mmap, multiprocessing, os, socket, sys
def attempt(function, *arguments):
    try:
        function(*arguments)
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    print("done" if result >= 0 else errno.errorcode[ctypes.get_errno()])
def pair(kind, path):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.connect(path)
"""

PYTHON = SYSTEM_PROGRAMS.find("python3") or sys.executable  # every user can start the one of the system

ACCESSES: tuple[CommandAccess, ...] = ("read", "write")
STREAM, DATAGRAM = "listening.sock", "datagrams.sock"

FORBIDDEN = f"""
attempt(lambda: socket.socket(socket.AF_UNIX).connect("{STREAM}"))
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect("{DATAGRAM}"))
attempt(pair, socket.SOCK_DGRAM, "{DATAGRAM}")
attempt(pair, socket.SOCK_RAW, "{DATAGRAM}")
attempt(pair, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, "{DATAGRAM}")
attempt(socket.socket, socket.AF_VSOCK)
attempt(socket.socket, 38, socket.SOCK_SEQPACKET)
attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 15)
"""

USEFUL = """
one, other = socket.socketpair()
one.send(b"x")
assert other.recv(1) == b"x"
socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
reader, writer = os.pipe()
os.write(writer, b"x")
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname())
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
print("useful")
"""


def python(code: str) -> str:
    return f"{shlex.quote(PYTHON)} -I -S -c {shlex.quote(BEFORE + code)}"


@contextmanager
def listening(folder: Path) -> Iterator[None]:
    """A service and a receiver of datagrams in a folder, for everybody."""
    with socket.socket(socket.AF_UNIX) as stream, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        for bound, name in ((stream, STREAM), (datagram, DATAGRAM)):
            bound.bind(str(folder / name))
            (folder / name).chmod(0o777)
        stream.listen()
        yield


@pytest.mark.long
@users
@pytest.mark.parametrize("network", [False, True], ids=["alone", "network"])
def test_a_command_reaches_no_service_by_any_kind_of_socket(user: str, network: bool) -> None:
    async def scenario(place: Place) -> Any:
        with listening(place.root):
            workspace = place.open(network=network)
            found = [await run(workspace, access, python(FORBIDDEN + USEFUL)) for access in ACCESSES]
            full = await run(workspace, "full", python(FORBIDDEN))
            await workspace.close()
            return [text.split() for _, text in (*found, full)]

    *confined, full = as_user(user, scenario, needs="bubblewrap")
    assert confined == [[*["ENETUNREACH"] * 9, "useful"]] * 2
    assert full[:5] == ["done"] * 5, "without a sandbox, each of these attempts succeeds"


@users
def test_a_command_has_no_dangerous_system_calls_under_bubblewrap(user: str) -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        calls = "".join(f"call({number}, 0, 0, 0, 0)\n" for number in (425, 426, 427, 435, 272 if X86 else 97))
        user_namespace = f"call({272 if X86 else 97}, 0x10000000)\n"
        found = await run(workspace, "write", python(calls + user_namespace))
        await workspace.close()
        return found[1].split()

    assert as_user(user, scenario, needs="bubblewrap") == [*["EPERM"] * 3, "ENOSYS", "done", "EPERM"]


X86 = platform.machine() == "x86_64"
OTHER_CALLS = """
call(0x40000000 | 41, 1, 1, 0)
sys.stdout.flush()
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


@pytest.mark.skipif(not X86, reason="the other calling conventions belong to x86_64")
@users
def test_other_calling_conventions_are_no_way_around_the_filter_of_bubblewrap(user: str) -> None:
    async def scenario(place: Place) -> Any:
        workspace = place.open()
        found = await run(workspace, "write", python(OTHER_CALLS))
        await workspace.close()
        return found

    code, output = as_user(user, scenario, needs="bubblewrap")
    assert (code, output.split()[0]) == (-31, "ENOSYS"), "SIGSYS ends a process that makes 32-bit calls"


@users
def test_a_setting_opens_the_sockets_that_it_names_and_no_others(user: str) -> None:
    async def scenario(place: Place) -> Any:
        named, hidden = place.outside / "named", place.root / "hidden"
        for folder in (named, hidden):
            folder.mkdir()
        with listening(named), listening(hidden):
            workspace = place.open(sockets=(str(named),))
            code = "".join(
                f"attempt(lambda: socket.socket(socket.AF_UNIX).connect({str(path)!r}))\n"
                for path in (named / STREAM, hidden / STREAM, hidden / DATAGRAM)
            )
            own = (
                "listener = socket.socket(socket.AF_UNIX); attempt(listener.bind, '/tmp/own-' + os.urandom(4).hex())\n"
            )
            found = [(await run(workspace, access, python(code + own)))[1].split() for access in ("read", "write")]
            await workspace.close()
            status = await workspace.sandbox_status()
            return found, status.problem

    found, problem = as_user(user, scenario, needs="bubblewrap")
    assert found == [["done", "EACCES", "EACCES", "done"]] * 2
    assert "sockets" not in problem


@users
def test_a_setting_may_allow_only_sockets_that_commands_make_themselves(user: str) -> None:
    async def scenario(place: Place) -> Any:
        with listening(place.root), listening(place.outside):
            workspace = place.open(sockets=("/tmp",))
            code = f"""
attempt(lambda: socket.socket(socket.AF_UNIX).connect("{STREAM}"))
print(os.path.exists({str(place.outside)!r}))
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/own")
listener.listen()
attempt(lambda: socket.socket(socket.AF_UNIX).connect("/tmp/own"))
"""
            found = await run(workspace, "write", python(code))
            await workspace.close()
            return found[1].split()

    assert as_user(user, scenario, needs="bubblewrap") == ["EACCES", "False", "done"]


def test_sockets_of_the_settings_are_reported_where_they_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SYSTEM_PLACES", ())  # no bubblewrap

    async def scenario(place: Place) -> Any:
        workspace = place.open(sockets=("/nowhere", "/tmp"))
        with listening(place.root):
            found = await run(workspace, "write", python(FORBIDDEN))
            await workspace.close()
            return (await workspace.sandbox_status()).problem, found[1].split()

    problem, found = as_user(USERS[0], scenario, needs="Landlock")
    assert "sandbox.sockets: /nowhere does not exist" in problem
    assert "sandbox.sockets has no effect under Landlock" in problem
    assert found == ["ENETUNREACH"] * 9
    assert os.path.exists("/tmp")
