"""The sockets that the server listens on, and the pages that count as its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from starlette.requests import HTTPConnection

from crow.domain.errors import ConfigError
from crow.serve.listen import TcpAddress, is_own_origin, listening
from tests.support.fork_server import run_script
from tests.support.server import server_environment

LOCAL = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
NOT_HERE = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))
NO_FAMILY = (socket.AF_DECnet, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0))


def resolve_to(monkeypatch: pytest.MonkeyPatch, *found: object) -> None:
    """Let every host name have these addresses."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: list(found))


@pytest.mark.parametrize("missing", [NOT_HERE, NO_FAMILY])
def test_an_address_that_this_machine_does_not_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch, missing: object
) -> None:
    resolve_to(monkeypatch, missing, LOCAL)
    with listening(TcpAddress("localhost", 0)) as sockets:
        assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
        with socket.socket() as client:
            client.connect(sockets[0].getsockname())


def test_an_address_in_use_and_a_host_without_any_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, NOT_HERE, NO_FAMILY)
    with (
        pytest.raises(ConfigError, match="cannot listen on localhost:7431: "),
        listening(TcpAddress("localhost", 7431)),
    ):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        resolve_to(monkeypatch, LOCAL, (*LOCAL[:4], taken.getsockname()))
        with pytest.raises(ConfigError, match="another program listens there"), listening(TcpAddress("localhost", 1)):
            pass


SYSTEMD = """
import os, socket
from crow.domain.errors import ConfigError
from crow.serve.listen import listening
fds = []
for number, fd in enumerate(({})):
    os.dup2(fd, 3 + number)
    fds.append(3 + number)
os.environ |= {{"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds))}}
try:
    with listening(None) as sockets:
        print([each.family.name for each in sockets])
except ConfigError as error:
    print(error)
"""
TCP = 'socket.create_server(("127.0.0.1", 0)).detach(),'


@pytest.mark.parametrize(
    "given",
    [
        "os.pipe()[0],",
        f"{TCP} os.pipe()[0],",
        "socket.socketpair()[0].detach(),",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).detach(),",
        "socket.socket().detach(),",
    ],
)
def test_what_systemd_passes_must_be_sockets_that_listen(tmp_path: Path, given: str) -> None:
    done = run_script(SYSTEMD.format(given), env=server_environment(tmp_path))
    assert "expected only ListenStream=" in done.stdout.decode()


def test_sockets_of_systemd_are_used(tmp_path: Path) -> None:
    done = run_script(SYSTEMD.format(TCP), env=server_environment(tmp_path))
    assert done.stdout.decode() == "['AF_INET']\n"


@pytest.mark.parametrize(
    ("scheme", "origin", "is_own"),
    [
        ("https", "https://crow.example", True),
        ("wss", "https://crow.example", True),
        ("https", "http://crow.example", False),
        ("wss", "HTTP://crow.example", False),
        ("http", "http://crow.example", True),
        ("ws", "https://crow.example", True),  # a proxy in front has the certificate
        ("ws", "https://crow.example:444", False),
        ("ws", "ftp://crow.example", False),
        ("ws", "null", False),
    ],
)
def test_a_page_is_the_servers_own_only_with_its_scheme(scheme: str, origin: str, is_own: bool) -> None:
    headers = [(b"host", b"crow.example"), (b"origin", origin.encode())]
    connection = HTTPConnection({"type": "http", "scheme": scheme, "path": "/", "headers": headers})
    assert is_own_origin(connection) is is_own
