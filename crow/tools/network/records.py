"""Checks what a TLS client sends before it is forwarded: each ClientHello must name the host that was allowed.

It does no I/O. The server may ask the client for a second ClientHello, so all records of the client are checked, not
only the first one.
"""

from __future__ import annotations

from collections.abc import Iterator

from crow.domain.errors import ArgumentError
from crow.tools.urls import is_address

_MAX_HELLO = 65_536
_MAX_RECORD = 16_384 + 2_048
_HANDSHAKE = 22
_TYPES = range(20, 25)
_CLIENT_HELLO = 1
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_SHORTEST_HANDSHAKE = 6
"""Bytes. No client sends shorter handshake records, except to hide what follows."""


class ClientRecords:
    """The records of one TLS client, which may only talk to the host `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = bytearray()
        """The beginning of a record whose end has not arrived."""
        self._hello = bytearray()
        """The beginning of a ClientHello whose end has not arrived. Empty if no ClientHello has begun."""
        self._held = bytearray()
        """The records that `_hello` came in. They are forwarded when the whole ClientHello is checked."""
        self._has_hello = False
        """Whether the first ClientHello was checked."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the client, and return the bytes that may be forwarded.

        :raises ~crow.domain.errors.ArgumentError: this is not TLS, or it names another host.
        """
        self._buffer += data
        passed = bytearray()
        while len(self._buffer) >= 5:
            kind, major, length = self._buffer[0], self._buffer[1], int.from_bytes(self._buffer[3:5])
            if kind not in _TYPES or major != 3 or length > _MAX_RECORD:
                raise ArgumentError("this is not TLS; only HTTPS passes")
            if len(self._buffer) < 5 + length:
                break
            record = bytes(self._buffer[: 5 + length])
            del self._buffer[: 5 + length]
            passed += self._pass(kind, record)
        if self._buffer and self._buffer[0] not in _TYPES:
            raise ArgumentError("this is not TLS; only HTTPS passes")
        return bytes(passed)

    def _pass(self, kind: int, record: bytes) -> bytes:
        """Check one whole record of this kind, and return the records that may be forwarded now.

        :raises ~crow.domain.errors.ArgumentError: the record may not be forwarded.
        """
        payload = record[5:]
        is_first = not self._has_hello
        if is_first and kind != _HANDSHAKE:
            raise ArgumentError("the TLS connection does not begin with a ClientHello")
        if kind != _HANDSHAKE:
            if self._hello:
                raise ArgumentError("the ClientHello is interrupted")
            return record
        if not self._hello and not is_first and not _may_be_hello(payload):
            return record
        self._hello += payload
        self._held += record
        if len(self._hello) > _MAX_HELLO:
            raise ArgumentError("the ClientHello is too long")
        if len(self._hello) < 4 or len(self._hello) < 4 + int.from_bytes(self._hello[1:4]):
            if len(self._hello) >= 4 and int.from_bytes(self._hello[1:4]) > _MAX_HELLO:
                raise ArgumentError("the ClientHello is too long")
            return b""
        _check_hello(bytes(self._hello), self._name)
        self._has_hello = True
        held = bytes(self._held)
        self._hello.clear()
        self._held.clear()
        return held


def _may_be_hello(payload: bytes) -> bool:
    """Return whether a handshake record after the first ClientHello may begin another one. An encrypted record looks
    like one with a probability of 1 in 2**32.

    :raises ~crow.domain.errors.ArgumentError: the record is too short to tell.
    """
    if len(payload) < _SHORTEST_HANDSHAKE:
        raise ArgumentError("a handshake record is too short")
    return payload[0] == _CLIENT_HELLO and payload[1] == 0 and payload[4] == 3


def _check_hello(hello: bytes, name: str) -> None:
    """Check that a handshake message is a ClientHello for the host `name`.

    :raises ~crow.domain.errors.ArgumentError: it is not.
    """
    reader = _Reader(hello)
    if reader.number(1) != _CLIENT_HELLO or reader.number(3) != len(hello) - 4:
        raise ArgumentError("the TLS connection does not begin with a ClientHello")
    reader.take(2 + 32)
    for size in (1, 2, 1):  # the session's id, cipher suites, compression methods
        reader.vector(size)
    found: dict[int, _Reader] = {}
    if not reader.is_at_end:
        extensions = reader.vector(2)
        while not extensions.is_at_end:
            kind, content = extensions.number(2), extensions.vector(2)
            if kind in found:
                raise ArgumentError("the ClientHello has an extension twice")
            found[kind] = content
    reader.end()
    if _ENCRYPTED_HELLO in found:
        raise ArgumentError("the ClientHello is encrypted (ECH), so crow cannot see which host it names")
    if is_address(name):  # a client names no host then
        if _SERVER_NAME in found:
            raise ArgumentError(f"the ClientHello names a host, but {name} is an address")
        return
    if _SERVER_NAME not in found:
        raise ArgumentError(f"the ClientHello names no host; expected {name}")
    names = list(_server_names(found[_SERVER_NAME]))
    if names != [name.encode("ascii")]:
        shown = ", ".join(each.decode("ascii", "replace")[:100] for each in names)
        raise ArgumentError(f"the ClientHello names {shown or 'no host'!r} instead of {name}")


def _server_names(content: _Reader) -> Iterator[bytes]:
    names = content.vector(2)
    content.end()
    while not names.is_at_end:
        if names.number(1) != 0:
            raise ArgumentError("the ClientHello names a host of an unknown kind")
        yield names.vector(2).rest().lower()


class _Reader:
    """Reads numbers and vectors from bytes. :raises ~crow.domain.errors.ArgumentError: there are too few bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise ArgumentError("the ClientHello is cut off")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> _Reader:
        """Read a length of `size` bytes, and return a reader for that many of the following bytes."""
        return _Reader(self.take(self.number(size)))

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        if not self.is_at_end:
            raise ArgumentError("the ClientHello is longer than it says")
