"""Opens the server's sockets, reads its TLS certificate, and checks the Host and Origin headers of requests.

The sockets and the certificate are checked before any client is served.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection

from crow.domain.errors import ConfigError

_BACKLOG = 2048

_PROBE_S = 1.0
"""When a Unix socket already exists, crow checks whether a server still listens on it. This is the time limit of the
check in seconds."""

_SYSTEMD_FIRST_FD = 3
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
"""The errors for an address that this machine does not have."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host and a port."""

    host: str
    """The name or address of the host."""
    port: int
    """The number of the port."""


def parse_address(text: str) -> TcpAddress | Path | None:
    """Parse the address to listen on. Return a host and a port, the path of a Unix socket, or None for the sockets that
    systemd has opened.

    :raises ConfigError: `text` is not a valid address.
    """
    if text == "systemd":
        return None
    if text.startswith("/"):
        return Path(text)
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isdecimal() and int(port) <= 65_535
    is_host = host and "/" not in host and "]" not in host and (":" not in host or _ip_address(host) is not None)
    if not colon or not is_port or not is_host:
        raise ConfigError(
            f'crow serve cannot listen on "{text}"; expected HOST:PORT, such as 127.0.0.1:7431, the absolute path of a '
            'Unix socket, or "systemd".'
        )
    return TcpAddress(host, int(port))


@contextmanager
def listening(address: TcpAddress | Path | None) -> Iterator[list[socket.socket]]:
    """Open the sockets to listen on, and close them at the end. :raises ConfigError: a socket cannot be opened."""
    if isinstance(address, Path):
        with _unix_socket(address) as opened:
            yield [opened]
        return
    sockets = _systemd_sockets() if address is None else _tcp_sockets(address)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def is_private(sockets: list[socket.socket]) -> bool:
    """Return whether none of these sockets can be reached from another machine."""
    return all(each.family == socket.AF_UNIX or _is_loopback(each.getsockname()[0]) for each in sockets)


def address_of(opened: socket.socket, *, is_tls: bool) -> str:
    """Return the address that a client uses to connect to this socket, such as `ws://127.0.0.1:7431/acp`."""
    name = opened.getsockname()
    if opened.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if opened.family == socket.AF_INET6 else name[0]
    return f"{'wss' if is_tls else 'ws'}://{host}:{name[1]}/acp"


_HOST_HEADER = re.compile(r"(?:\[([0-9A-Fa-f:.]+)(?:%[A-Za-z0-9._~-]+)?\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
"""Matches a Host header. Its groups are: the IPv6 address in brackets, without its zone; the name or IPv4 address; the
port."""


def is_known_host(headers: Sequence[str], names: frozenset[str]) -> bool:
    """Return whether the Host header names this server. `headers` are the values of all Host headers of a request:
    there must be exactly one, whose host is an IP address, localhost, or one of `names`, which are in lower case.

    This check stops DNS rebinding. An attacker's web page can make a browser connect to this server, but the browser
    then sends the attacker's host name in the Host header.
    """
    found = _HOST_HEADER.fullmatch(headers[0]) if len(headers) == 1 else None
    if found is None or int(found[3] or 0) > 65_535:
        return False
    if found[1] is not None:
        return isinstance(_ip_address(found[1]), ipaddress.IPv6Address)
    host = found[2].removesuffix(".").lower()
    return host == "localhost" or host in names or isinstance(_ip_address(host), ipaddress.IPv4Address)


def is_known_origin(headers: Sequence[str], origins: frozenset[str]) -> bool:
    """Return whether the Origin header, if there is one, is one of `origins`, which are in lower case. `headers` are
    the values of all Origin headers of a request."""
    return not headers or (len(headers) == 1 and headers[0].lower() in origins)


def is_own_origin(connection: HTTPConnection) -> bool:
    """Return whether a request comes from a page of this server: its Origin header names the same host as its Host
    header, which has been checked before.

    If the request came over TLS, the page must have come over TLS, too: others in the network could have changed it.
    Otherwise both are possible, because TLS may end at a proxy.
    """
    scheme, _, host = connection.headers.get("origin", "").lower().partition("://")
    schemes = {"https"} if connection.scope["scheme"] in {"https", "wss"} else {"http", "https"}
    return scheme in schemes and bool(host) and host == connection.headers.get("host", "").lower()


def client_address(connection: HTTPConnection) -> str:
    """Return the IP address of the client, or "local" for a Unix socket."""
    return connection.client.host if connection.client is not None and connection.client.host else "local"


def tls_context(cert: Path, key: Path) -> Callable[..., ssl.SSLContext]:
    """Read the certificate. Return a function for uvicorn's `ssl_context_factory`, which returns the TLS context and
    ignores its arguments.

    :raises ConfigError: the certificate or its key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password="")  # without `password`, OpenSSL could ask for one in the terminal
    except OSError as error:  # includes ssl.SSLError
        reason = error.strerror or str(error)
        raise ConfigError(f"The certificate {cert} with the key {key} cannot be used: {reason}.") from error
    return lambda *_: context


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse `host` as an IP address, and drop its zone. Return None if `host` is a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _ip_address(host)
    return address is not None and address.is_loopback


def _tcp_socket(family: int, kind: int, protocol: int, name: Any) -> socket.socket:
    """Open a socket that listens at `name`. :raises OSError: this is not possible."""
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(name)
        opened.listen(_BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _tcp_sockets(address: TcpAddress) -> list[socket.socket]:
    """Open one socket for each IP address of the host that this machine has. Where IPv6 is off, localhost may still
    have an IPv6 address. :raises ConfigError: there is no such address, or one cannot be used."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f'crow serve cannot listen on "{address.host}": {error}.') from error
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, kind, protocol, _, name in dict.fromkeys(found):  # getaddrinfo may repeat an address
            try:
                sockets.append(_tcp_socket(family, kind, protocol, name))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
    except OSError as error:
        for each in sockets:
            each.close()
        words = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        problem = f"crow serve cannot listen on {address.host}:{address.port}: {words}."
        raise ConfigError(problem) from error
    return sockets


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Open a Unix socket with mode 0600. A lock file beside the socket prevents two servers from using the same
    path."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _check_directory(path.parent)
        lock = os.open(
            path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise ConfigError(f"crow serve cannot listen on {path}: {error.strerror or error}.") from error
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"Another crow serve is listening on {path}.") from None
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            opened.bind(str(path))
        except OSError as error:
            raise ConfigError(f"crow serve cannot listen on {path}: {error.strerror or error}.") from error
        finally:
            os.umask(mask)
        inode = path.lstat().st_ino
        opened.listen(_BACKLOG)
        try:
            yield opened
        finally:
            with suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()
    finally:
        opened.close()
        os.close(lock)  # the lock file stays: if it were removed, two servers could lock two files of this name


def _check_directory(directory: Path) -> None:
    """Check that only this user and root can change the directory of a socket. :raises ConfigError: others could
    replace the socket."""
    status = directory.stat()
    if status.st_uid not in {os.getuid(), 0} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"crow serve cannot listen in {directory}, because other users can write there or own it. "
            "Choose a directory that only you can write to, such as $XDG_RUNTIME_DIR."
        )


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that has ended. :raises ConfigError: the path is in use."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(f"crow serve cannot listen on {path}, because the file at this path is not a socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise ConfigError(f"crow serve cannot listen on {path}: another program listens there.")


def _is_listener(fd: int) -> bool:
    """Return whether this file descriptor is a TCP or Unix socket that listens."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            is_known = copy.family in {socket.AF_INET, socket.AF_INET6, socket.AF_UNIX}
            is_stream = copy.type == socket.SOCK_STREAM
            return is_known and is_stream and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _systemd_sockets() -> list[socket.socket]:
    """Return the sockets that systemd passed to this process. :raises ConfigError: systemd passed none, or something
    else than listening TCP and Unix sockets."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal() or int(count) < 1:
        raise ConfigError("crow serve --listen systemd works only in a service that a systemd socket unit starts.")
    sockets = []
    for fd in range(_SYSTEMD_FIRST_FD, _SYSTEMD_FIRST_FD + int(count)):
        if not _is_listener(fd):
            raise ConfigError(
                "crow serve cannot use what the systemd socket unit passes; expected only ListenStream= with TCP "
                "addresses or paths of Unix sockets, and Accept=no."
            )
        os.set_inheritable(fd, False)
        sockets.append(socket.socket(fileno=fd))
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    return sockets


def notify_systemd(state: str) -> None:
    """Tell systemd the state of the service, such as `READY=1`. If the environment variable NOTIFY_SOCKET is not set,
    do nothing."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.connect("\0" + path[1:] if path.startswith("@") else path)
            notifier.sendall(state.encode())
