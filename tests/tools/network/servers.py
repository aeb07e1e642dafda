"""Real servers on the loopback interface, and TLS messages, for tests of the proxy."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from crow.agent.permissions.decisions import Allow, Refuse
from crow.agent.permissions.host_rules import decide_about_host, is_named_host, is_read_only_host
from crow.agent.permissions.rules import user_rules
from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.tools import Coverage, PlannedCall
from crow.tools.network import Credentials, Host, HostVerdict, Use
from crow.tools.network.gate import Gate
from crow.tools.network.proxy import Proxy, Resolve

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CALL = PlannedCall(
    announcement=Announcement(title="curl", kind="execute"),
    access="execute",
    command_access="read",
    coverage=Coverage(argument="curl"),
)


@dataclass
class Server:
    """A server that answers each first piece of data with `response`, and notes what it gets."""

    port: int = 0
    response: bytes = RESPONSE
    received: list[bytes] = field(default_factory=list)
    """The bytes of each connection."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.received)
        self.received.append(b"")
        try:
            while data := await reader.read(65_536):
                if not self.received[number]:
                    writer.write(self.response)
                self.received[number] += data
                if data.startswith((b"GET", b"POST", b"HEAD")):
                    await writer.drain()
                    if not writer.can_write_eof():
                        return
                    writer.write_eof()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(response: bytes = RESPONSE, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(response=response)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


async def resolve_to_loopback(name: str, _port: int, allow_private: bool) -> str:
    """Every name leads to this machine, as if by a hostile name server that crow believes to be public. An address
    stays what it is."""
    if Host(name, 1).is_address and not allow_private:
        raise ArgumentError(f"{name} is private")
    return "::1" if name == "::1" else "127.0.0.1"


@dataclass
class Client:
    """Sends bytes to a proxy."""

    address: tuple[str, int]
    gate: Gate
    asked: list[str]
    """The hosts about which the user would have been asked."""

    async def send(self, *pieces: bytes) -> bytes:
        """Send the pieces over one connection, each after an answer to the one before. Return all answers."""
        reader, writer = await asyncio.open_connection(*self.address)
        answers = b""
        try:
            for number, piece in enumerate(pieces):
                writer.write(piece)
                if number + 1 < len(pieces):
                    answers += await reader.read(65_536)
            writer.write_eof()
            while data := await reader.read(65_536):
                answers += data
        except OSError:
            pass
        finally:
            writer.close()
        return answers


@asynccontextmanager
async def proxying(
    allow: Sequence[str],
    deny: Sequence[str] = (),
    *,
    resolve: Resolve = resolve_to_loopback,
    mode: str = "ask",
    answer: bool = False,
    credentials: Credentials | None = None,
) -> AsyncIterator[Client]:
    """A proxy with these rules. Each question is answered with `answer`."""
    rules, asked = user_rules(allow, deny), []

    async def judge(host: Host, use: Use | None) -> HostVerdict:
        decision, plan = decide_about_host("shell", CALL, host, mode, rules, use=use)
        if isinstance(decision, Refuse):
            return HostVerdict(refusal=decision.words)
        if not isinstance(decision, Allow):
            asked.append(plan.coverage.argument or "")
            if not answer:
                return HostVerdict(refusal="the user did not allow it")
        return HostVerdict(is_named=is_named_host(host, rules), is_read_only=is_read_only_host(host, rules))

    listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
    listener.setblocking(False)
    gate = Gate(judge)
    address = listener.getsockname()
    with anyio.CancelScope() as clock:
        async with Proxy(gate, resolve).serving(listener, clock, credentials or Credentials()):
            yield Client(address, gate, asked)


def vector(size: int, data: bytes) -> bytes:
    return len(data).to_bytes(size) + data


def hello(*names: bytes, extensions: bytes = b"", kind: int = 0, secret: bytes = b"") -> bytes:
    """A ClientHello that names these hosts."""
    listed = b"".join(bytes([kind]) + vector(2, name) for name in names)
    server_name = b"\0\0" + vector(2, vector(2, listed)) if names else b""
    body = b"\x03\x03" + secret.ljust(32, b"r")[:32] + vector(1, b"") + vector(2, b"\x13\x01") + vector(1, b"\0")
    body += vector(2, server_name + extensions)
    return b"\x01" + vector(3, body)


def record(payload: bytes, kind: int = 22) -> bytes:
    return bytes([kind, 3, 1]) + vector(2, payload)
