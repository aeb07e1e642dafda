"""Credentials that crow adds to requests of commands, and tries to get them out or to use them for something else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from crow.domain.errors import ArgumentError, ConfigError
from crow.tools.network import Host
from crow.tools.network.authority import Authority
from crow.tools.network.credentials import Credential, Credentials
from crow.tools.network.masking import Masked
from crow.tools.network.uses import Use, use_of
from tests.tools.network.servers import RESPONSE, Client, Server, proxying, serving

SECRET = "s3cret-of-the-User"
VALUE = f"Bearer {SECRET}"
ECHO = b"HTTP/1.1 200 OK\r\nX-Echo: %b\r\nContent-Length: 40\r\n\r\n%b" % (VALUE.encode(), VALUE.encode().ljust(40))


@dataclass
class Scene:
    """A proxy, a host with a credential, and an attacker."""

    client: Client
    good: Server
    evil: Server
    trusting: ssl.SSLContext
    """Trusts crow's certificates alone."""

    @property
    def place(self) -> str:
        return f"good.test:{self.good.port}"

    def fill(self, text: str) -> bytes:
        """Return the text with the ports of the servers."""
        return text.replace("{good}", str(self.good.port)).replace("{evil}", str(self.evil.port)).encode("latin-1")

    async def inside(self, *pieces: str, name: str = "good.test", tls: ssl.SSLContext | None = None) -> bytes:
        """Send requests inside of TLS to the host of the credential. Return all that comes back."""
        reader, writer = await asyncio.open_connection(*self.client.address)
        answers = b""
        try:
            writer.write(f"CONNECT {self.place} HTTP/1.1\r\nHost: {self.place}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head:
                return head
            await writer.start_tls(tls or self.trusting, server_hostname=name)
            for piece in pieces:
                writer.write(self.fill(piece))
                answers += await reader.read(65_536)
            while data := await asyncio.wait_for(reader.read(65_536), 60):
                answers += data
        except OSError:
            pass
        finally:
            writer.close()
        return answers

    def told(self) -> str:
        """Return what the model is told."""
        return self.client.gate.describe()

    def leaks(self) -> str:
        """Return where the secret is although it must not be: anywhere but in one header to the good host."""
        others = b"".join(self.evil.received)
        return f"{others!r}" if SECRET.encode() in others or SECRET in self.told() else ""


@asynccontextmanager
async def scene(
    tmp_path: Path,
    *,
    allow: Sequence[str] = ("network(good.test:*)",),
    deny: Sequence[str] = (),
    response: bytes = RESPONSE,
    upstream: str = "good.test",
    mode: str = "ask",
    answer: bool = False,
    **options: object,
) -> AsyncIterator[Scene]:
    """`upstream` is the name in the certificate of the good host."""
    real = Authority(["good.test", "evil.test", "other.test"])
    (tmp_path / "ca.pem").write_bytes(real.pem)
    server_side = real.context(upstream)
    server_side.sni_callback = None
    async with serving(response, server_side) as good, serving() as evil:
        credential = Credential(
            host=Host("good.test", good.port), read=lambda: (SECRET, VALUE), ca_file=tmp_path / "ca.pem"
        )
        credentials = Credentials([replace(credential, **options)])  # type: ignore[arg-type]
        (tmp_path / "trust").mkdir(exist_ok=True)
        env = credentials.environment({}, tmp_path / "trust")
        trusting = ssl.create_default_context(cafile=env["NODE_EXTRA_CA_CERTS"])
        async with proxying(allow, deny, credentials=credentials, mode=mode, answer=answer) as client:
            yield Scene(client, good, evil, trusting)


GET = "GET /file?a=b HTTP/1.1\r\nHost: good.test:{good}\r\n"


async def test_the_credential_is_added_to_requests_and_to_nothing_else(tmp_path: Path) -> None:
    async with scene(tmp_path) as each:
        assert (await each.inside(GET + "Connection: close\r\nX: y\r\n\r\n")).endswith(b"\r\n\r\nhello")
    (request,) = each.good.received
    assert request.decode() == (
        f"GET /file?a=b HTTP/1.1\r\nHost: {each.place}\r\nx: y\r\nAuthorization: {VALUE}\r\n"
        "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
    )
    assert each.told() == ""


async def test_several_requests_of_one_connection_each_get_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as each:
        answers = await each.inside(GET + "\r\n", GET + "\r\n", GET + "Connection: close\r\n\r\n")
    assert answers.count(b"hello") == 3
    assert [request.count(VALUE.encode()) for request in each.good.received] == [1, 1, 1]
