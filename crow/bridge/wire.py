"""Opens WebSockets to a server: over a Unix socket, TCP or TLS."""

from __future__ import annotations

import _socket
import os
import sys

from crow.bridge import FAILED, USERS_FAULT
from crow.bridge.websocket import (
    MAX_HEAD_BYTES,
    PROTOCOL_ERROR,
    Address,
    Decoder,
    Response,
    WebSocketError,
    frame,
    upgrade_request,
)

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from ssl import SSLSocket

CHUNK_BYTES = 256 * 1024


class NotConnected(Exception):
    """The error for a connection that could not be opened."""

    def __init__(self, message: str, exit_code: int = 0, *, is_absent: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code with which the bridge must end, because another attempt would fail too. 0 if another attempt
        may succeed."""
        self.is_absent = is_absent
        """Whether no server listens at the address."""


class WebSocket:
    """An open WebSocket, as returned by `connect`. None of its methods blocks."""

    def __init__(self, socket: _socket.socket | SSLSocket, response: Response, rest: bytes) -> None:
        self._socket = socket
        self.response = response
        self.decoder = Decoder()
        self.fd = socket.fileno()
        self._unsent = bytearray()
        self._unread = rest
        socket.settimeout(0)

    @property
    def is_readable(self) -> bool:
        """Whether this object already holds bytes that `read` can return. `poll` does not report these bytes."""
        pending = getattr(self._socket, "pending", None)
        return bool(self._unread) or (pending is not None and pending() > 0)

    @property
    def unsent_bytes(self) -> int:
        """The number of queued bytes that have not been sent yet."""
        return len(self._unsent)

    def send(self, opcode: int, payload: bytes) -> None:
        """Queue a message. `flush` sends it."""
        self._unsent += frame(opcode, payload)

    def flush(self) -> None:
        """Send as many queued bytes as the network takes now. :raises OSError: the connection is broken."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[:CHUNK_BYTES])
            except OSError as error:
                if _is_not_ready(error):
                    return
                raise
            del self._unsent[:sent]

    def read(self) -> bytes | None:
        """Return the next bytes, None if there are none yet, or empty bytes if the server has closed the connection.

        :raises OSError: the connection is broken.
        """
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        try:
            return self._socket.recv(CHUNK_BYTES)
        except OSError as error:
            if _is_not_ready(error):
                return None
            raise

    @property
    def belongs_to_this_user(self) -> bool:
        """Whether the process at the other end of a Unix socket runs as this user. The result is also True if the
        system does not tell which user runs the process."""
        owner = peer(self._socket)
        return owner is None or owner[1] == os.getuid()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def peer(socket: _socket.socket | SSLSocket) -> tuple[int, int] | None:
    """Return the process id and the user id of the program at the other end of a Unix socket, or None if the system
    cannot tell."""
    option = getattr(_socket, "SO_PEERCRED", None)  # Linux
    if option is None:
        return None
    data = socket.getsockopt(_socket.SOL_SOCKET, option, 12)  # three numbers: process, user and group
    return int.from_bytes(data[:4], sys.byteorder), int.from_bytes(data[4:8], sys.byteorder)


def _is_not_ready(error: OSError) -> bool:
    return isinstance(error, BlockingIOError | InterruptedError) or type(error).__name__ in (
        "SSLWantReadError",
        "SSLWantWriteError",
    )


def connect(address: Address, headers: list[tuple[str, str]], timeout_s: float) -> WebSocket:
    """Open a WebSocket. Each step blocks for at most about `timeout_s` seconds. :raises NotConnected: no WebSocket was
    opened."""
    try:
        socket = _open_socket(address, timeout_s)
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | ConnectionRefusedError)
        raise NotConnected(_reason(address, error), _exit_code(error), is_absent=is_absent) from error
    try:
        key = os.urandom(16)
        socket.sendall(upgrade_request(address, key, headers))
        head, rest = _read_head(socket)
        response = Response(head)
        if response.status != 101:
            raise _refusal(address, response)
        response.check_upgrade(key)
        return WebSocket(socket, response, rest)
    except WebSocketError as error:
        socket.close()
        raise NotConnected(f"{address.text}: {error}", FAILED) from error
    except OSError as error:
        socket.close()
        raise NotConnected(_reason(address, error)) from error
    except NotConnected:
        socket.close()
        raise


def _open_socket(address: Address, timeout_s: float) -> _socket.socket | SSLSocket:
    if address.path:
        plain = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            plain.settimeout(timeout_s)
            plain.connect(address.path)
        except BaseException:
            plain.close()
            raise
        return plain
    last: OSError | None = None
    found = _socket.getaddrinfo(address.host, address.port, 0, _socket.SOCK_STREAM)
    for family, kind, protocol, _, place in found:
        plain = _socket.socket(family, kind, protocol)
        plain.settimeout(timeout_s)
        try:
            plain.connect(place)
            plain.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            return _encrypted(address, plain, timeout_s) if address.is_tls else plain
        except OSError as error:
            plain.close()
            last = error
    raise last or OSError(f"the host name {address.host} has no address")


def _encrypted(address: Address, plain: _socket.socket, timeout_s: float) -> SSLSocket:
    """Start TLS on the socket `plain`, and check the server's certificate."""
    import socket  # these two take 15 ms, and only wss:// needs them
    import ssl

    full = socket.socket(fileno=plain.detach())
    full.settimeout(timeout_s)
    try:
        return ssl.create_default_context().wrap_socket(full, server_hostname=address.host)
    except BaseException:
        full.close()
        raise


def _read_head(socket: _socket.socket | SSLSocket) -> tuple[bytes, bytes]:
    """Read the status line and headers of an HTTP response. Return two byte strings: the status line with the headers,
    and the bytes that were received after the headers."""
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > MAX_HEAD_BYTES:
            raise WebSocketError(PROTOCOL_ERROR, "The headers of the server's HTTP response are too long.")
        if not (more := socket.recv(8192)):
            raise OSError("the server closed the connection before it answered")
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _reason(address: Address, error: OSError) -> str:
    if address.path and isinstance(error, FileNotFoundError):
        return f"No server listens on {address.path}: there is no such socket."
    if type(error).__name__ == "SSLCertVerificationError":
        words = getattr(error, "verify_message", "") or str(error)
        return (
            f"The certificate of {address.text} is not trusted: {words}. If the server is your own, set SSL_CERT_FILE "
            "to the file of its certificate authority."
        )
    return f"Cannot reach {address.text}: {error.strerror or error}."


def _exit_code(error: OSError) -> int:
    is_untrusted = type(error).__name__ == "SSLCertVerificationError"
    return USERS_FAULT if is_untrusted or isinstance(error, PermissionError) else 0


def _refusal(address: Address, response: Response) -> NotConnected:
    place, status = address.text, response.status
    match status:
        case 401:
            problem = f"{place} refused the token (401). Give a valid one with CROW_TOKEN or --token-file."
            return NotConnected(problem, USERS_FAULT)
        case 403:
            return NotConnected(f"{place} refused this user or this client (403).", USERS_FAULT)
        case 404:
            return NotConnected(f"{place} does not exist on the server (404). The usual path is /acp.", USERS_FAULT)
        case 429 | 502 | 503 | 504:
            return NotConnected(f"{place} is busy or not ready ({status}).")
        case _:
            problem = f"{place} answered with HTTP status {status}, so it is probably not crow serve."
            return NotConnected(problem, FAILED)
