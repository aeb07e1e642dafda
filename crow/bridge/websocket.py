"""The client's side of the WebSocket protocol (RFC 6455), without I/O.

Crow has its own implementation, because the published packages take 60 to 150 ms to import, and the bridge must start
in less time. This module imports only modules that Python always loads when it starts.
"""

import binascii
import os

try:
    from _sha1 import sha1 as _sha1  # type: ignore[import-not-found]
except ImportError:  # hashlib takes 3 ms, because it loads OpenSSL
    from hashlib import sha1 as _sha1

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The size of the largest message that the bridge accepts from a server."""

MAX_HEAD_BYTES = 32 * 1024
"""The size limit of the status line and headers of an HTTP response."""

TEXT, _BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10

NORMAL, GOING_AWAY, PROTOCOL_ERROR, _NOT_UTF8, POLICY, _TOO_BIG = 1000, 1001, 1002, 1007, 1008, 1009

NO_STATUS = 1005
"""The code that stands for a close frame without a code. This code is never sent."""

_MAX_CONTROL_BYTES = 125
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def short_hash(data: bytes) -> str:
    """Return a name for `data`: 16 hexadecimal digits."""
    return str(_sha1(data).hexdigest()[:16])  # noqa: S324  not a secret


class WebSocketError(Exception):
    """The error for a violation of the WebSocket protocol by the server."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """The close code to send to the server."""


class BadAddress(Exception):
    """The address of a server cannot be used."""


class Address:
    """The address of a server: the path of a Unix socket, or a host and a port, with or without TLS."""

    def __init__(self, text: str) -> None:
        """Parse `text`. :raises BadAddress: `text` is neither a ws:// or wss:// URL nor the path of a socket."""
        self.text = text
        self.path = ""
        """The path of the Unix socket, or an empty string if the address is a host."""
        self.is_tls = False
        self.host, self.port, self.resource = "localhost", 0, "/acp"
        scheme, separator, rest = text.partition("://")
        if not separator or scheme == "unix":
            self.path = rest if separator else text.removeprefix("unix:")
            if not self.path or "\0" in self.path:
                raise BadAddress(f"{text!r} is not an address: expected a ws:// or wss:// URL or the path of a socket.")
            return
        if scheme not in ("ws", "wss"):
            raise BadAddress(f"{text!r} starts with {scheme}://; expected ws://, wss:// or the path of a socket.")
        self.is_tls = scheme == "wss"
        end = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
        place, resource = rest[:end], rest[end:].partition("#")[0]
        if "@" in place:
            raise BadAddress(
                "The URL contains a user name or password. Remove them and put a token into CROW_TOKEN or --token-file."
            )
        if not all("!" <= character <= "~" for character in rest):
            raise BadAddress(f"{text!r} contains a character that is not allowed in a URL. Write the character as %XX.")
        if resource.rstrip("/"):
            self.resource = resource if resource.startswith("/") else f"/acp{resource}"
        self.host, self.port = _host_and_port(place, 443 if self.is_tls else 80, text)

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine. If so, messages do not travel over a network."""
        is_127 = self.host.startswith("127.") and self.host.replace(".", "").isdigit()
        return bool(self.path) or self.host in ("localhost", "::1") or is_127

    @property
    def host_header(self) -> str:
        """The value of the `Host` header."""
        if self.path:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def _host_and_port(place: str, default: int, text: str) -> tuple[str, int]:
    host, bracket, after = place.partition("]")
    if bracket:  # an IPv6 address
        host, separator, port = host.removeprefix("["), after[:1], after[1:]
    else:
        host, separator, port = place.partition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if not host or separator not in ("", ":") or (separator and not is_port):
        raise BadAddress(
            f"{text!r} has no valid host and port: expected a URL such as wss://crow.example.org:7431/acp."
        )
    return host, int(port) if separator else default


def upgrade_request(address: Address, key: bytes, headers: list[tuple[str, str]]) -> bytes:
    """Return the HTTP request that opens a WebSocket. `key` is 16 random bytes."""
    lines = [
        f"GET {address.resource} HTTP/1.1",
        f"Host: {address.host_header}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {binascii.b2a_base64(key, newline=False).decode()}",
        "Sec-WebSocket-Version: 13",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return "\r\n".join((*lines, "", "")).encode("latin-1")


class Response:
    """The status line and headers of an HTTP response."""

    def __init__(self, head: bytes) -> None:
        """Parse `head`, the part of an HTTP response before the body. :raises WebSocketError: `head` is not HTTP."""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise WebSocketError(PROTOCOL_ERROR, "The program that listens at this address does not speak HTTP.")
        self.status = int(status[:3])
        self.headers: dict[str, str] = {}
        """Maps names in lower case to values. The values of a repeated header are joined with newlines."""
        for line in lines:
            name, _, value = line.partition(":")
            name, value = name.strip().lower(), value.strip()
            self.headers[name] = f"{self.headers[name]}\n{value}" if name in self.headers else value

    def check_upgrade(self, key: bytes) -> None:
        """Check that the response accepts the request that was sent with this key. :raises WebSocketError: the response
        does not accept the request."""
        wanted = _sha1(binascii.b2a_base64(key, newline=False) + _GUID).digest()  # noqa: S324  the protocol says so
        accepted = self.headers.get("sec-websocket-accept", "")
        tokens = [token.strip().lower() for token in self.headers.get("connection", "").split(",")]
        if (
            self.headers.get("upgrade", "").lower() != "websocket"
            or "upgrade" not in tokens
            or accepted != binascii.b2a_base64(wanted, newline=False).decode()
            or "sec-websocket-extensions" in self.headers
            or "sec-websocket-protocol" in self.headers
        ):
            raise WebSocketError(PROTOCOL_ERROR, "The server's HTTP response does not open a WebSocket.")


def frame(opcode: int, payload: bytes) -> bytes:
    """Return a whole message as one frame, masked with a new key."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    key = os.urandom(4)
    return head + key + _mask(payload, key)


def _mask(data: bytes, key: bytes) -> bytes:
    """Return `data` XORed with the four bytes of `key`, which are repeated as often as needed. A second call with the
    same key restores the data."""
    size = len(data)
    keys = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(keys, "little")).to_bytes(size, "little")


def close_payload(code: int, reason: str = "") -> bytes:
    """Return the payload of a close frame. If `reason` is too long for the frame, its end is cut off."""
    return code.to_bytes(2, "big") + reason.encode()[: _MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()


def close_reason(payload: bytes) -> tuple[int, str]:
    """Return the code and the reason in a close frame. :raises WebSocketError: the payload is not valid."""
    if not payload:
        return NO_STATUS, ""
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or not (code in _CODES or 3000 <= code < 5000):
        raise WebSocketError(PROTOCOL_ERROR, "The server closed the connection with an invalid code.")
    return code, payload[2:].decode(errors="replace")


_CODES = frozenset((1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014))


class Decoder:
    """Decodes the bytes from a server into messages. A decoder never holds more than one incomplete message and one
    chunk of bytes."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._parts: list[bytes] = []
        self._size = 0
        self._opcode = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add `data`, and return the messages and control frames that are now complete, each as a pair of opcode and
        payload.

        :raises WebSocketError: the server violated the protocol, or sent a message over the limit.
        """
        self._data += data
        found: list[tuple[int, bytes]] = []
        at = 0
        while (read := self._frame(at)) is not None:
            is_last, opcode, start, end = read
            payload, at = bytes(memoryview(self._data)[start:end]), end
            if opcode >= CLOSE:
                found.append((opcode, payload))
                if opcode == CLOSE:
                    break
                continue
            self._opcode = opcode or self._opcode
            self._parts.append(payload)
            self._size += len(payload)
            if is_last:
                found.append((self._opcode, self._message()))
        del self._data[:at]
        return found

    def _message(self) -> bytes:
        message = b"".join(self._parts)
        is_text = self._opcode == TEXT
        self._parts, self._size, self._opcode = [], 0, 0
        if is_text and not message.isascii():
            try:
                message.decode()
            except UnicodeDecodeError:
                raise WebSocketError(_NOT_UTF8, "The server sent text that is not UTF-8.") from None
        return message

    def _frame(self, at: int) -> tuple[bool, int, int, int] | None:
        """Read the frame at the offset `at`. Return None if the frame is not complete. Otherwise return four values:
        whether the frame is the last one of its message, the opcode, and the offsets at which the payload starts and
        ends."""
        data, have = self._data, len(self._data) - at
        if have < 2:
            return None
        first, second = data[at], data[at + 1]
        is_last, opcode, size, start = bool(first & 0x80), first & 0x0F, second & 0x7F, at + 2
        self._check_head(first, second)
        if size >= 126:
            width = 2 if size == 126 else 8
            if have < 2 + width:
                return None
            size, start = int.from_bytes(data[start : start + width], "big"), start + width
        if self._size + size > _MAX_MESSAGE_BYTES:
            raise WebSocketError(_TOO_BIG, f"The server sent a message of more than {_MAX_MESSAGE_BYTES >> 20} MiB.")
        return (is_last, opcode, start, start + size) if len(data) >= start + size else None

    def _check_head(self, first: int, second: int) -> None:
        opcode = first & 0x0F
        is_control = opcode >= CLOSE
        continues = bool(self._opcode)
        if (
            first & 0x70
            or second & 0x80
            or opcode not in (0, TEXT, _BINARY, CLOSE, PING, PONG)
            or (is_control and (not first & 0x80 or second > _MAX_CONTROL_BYTES))
            or (not is_control and (opcode == 0) is not continues)
        ):
            raise WebSocketError(PROTOCOL_ERROR, "The server sent an invalid WebSocket frame.")
