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
    ProtocolError,
    Response,
    frame,
    upgrade_request,
)

TYPE_CHECKING = False  # like `typing.TYPE_CHECKING`; importing `typing` would take 10 ms
if TYPE_CHECKING:
    from ssl import SSLSocket

CHUNK_BYTES = 256 * 1024


class NotConnected(Exception):
    """There is no connection. With an `exit_code`, trying again would not help."""

    def __init__(self, message: str, exit_code: int = 0, *, is_absent: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_absent = is_absent
        """Whether no server listens."""


class WebSocket:
    """An open WebSocket. `connect` makes one; afterwards nothing blocks."""

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
        """Whether there are bytes that `poll` does not report."""
        pending = getattr(self._socket, "pending", None)
        return bool(self._unread) or (pending is not None and pending() > 0)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait for the network."""
        return len(self._unsent)

    def send(self, opcode: int, payload: bytes) -> None:
        """Queue a message; `flush` sends it."""
        self._unsent += frame(opcode, payload)

    def flush(self) -> None:
        """Send as much as the network takes. :raises OSError: the connection is broken."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[:CHUNK_BYTES])
            except OSError as error:
                if _is_not_ready(error):
                    return
                raise
            del self._unsent[:sent]

    def read(self) -> bytes | None:
        """The next bytes; empty at the end, None if there are none yet. :raises OSError: the connection is broken."""
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
        """Whether the process at the other end of a Unix socket does. True where the system cannot tell."""
        owner = peer(self._socket)
        return owner is None or owner[1] == os.getuid()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def peer(socket: _socket.socket | SSLSocket) -> tuple[int, int] | None:
    """The process id and user id at the other end of a Unix socket; None where the system cannot tell."""
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
    """Open a WebSocket. Blocks. :raises NotConnected: there is none."""
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
    except ProtocolError as error:
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
    """TLS over `plain`, with the server's certificate checked."""
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
    """The head of an HTTP response, and the bytes that came after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > MAX_HEAD_BYTES:
            raise ProtocolError(PROTOCOL_ERROR, "The head of the server's answer is too long.")
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
            f"{address.text}: the server's certificate cannot be trusted: {words}. If it is your own, name its CA in "
            "SSL_CERT_FILE."
        )
    return f"Cannot reach {address.text}: {error.strerror or error}."


def _exit_code(error: OSError) -> int:
    is_untrusted = type(error).__name__ == "SSLCertVerificationError"
    return USERS_FAULT if is_untrusted or isinstance(error, PermissionError) else 0


def _refusal(address: Address, response: Response) -> NotConnected:
    place, status = address.text, response.status
    match status:
        case 401:
            return NotConnected(f"{place} refused the token (401). Set CROW_TOKEN or --token-file.", USERS_FAULT)
        case 403:
            return NotConnected(f"{place} does not admit this user or this client (403).", USERS_FAULT)
        case 404:
            return NotConnected(f"{place} has no such path (404); the usual one is /acp.", USERS_FAULT)
        case 429 | 502 | 503 | 504:
            return NotConnected(f"{place} is busy or not ready ({status}).")
        case _:
            return NotConnected(f"{place} answered with HTTP status {status}; crow serve would answer 101.", FAILED)
