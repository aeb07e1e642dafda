"""What one connection may take from the server: the limits, each tried by a client that breaks it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from crow.serve.http import MAX_REQUESTS_EACH
from crow.serve.websocket import MAX_PONG_BYTES, ConnectionLimits
from tests.serve.conftest import Service
from tests.support.amounts import IS_SOAK

KIB = 1024
LIMIT = 1000 if IS_SOAK else 100
"""How many clients may be connected, in the test of this limit."""
INITIALIZE = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":1}}'
CLOSE_FRAME = b"\x88\x80\0\0\0\0"
TEXT, PING, CONTINUATION = 0x1, 0x9, 0x0


class Peer:
    """A client without a library: it sends any bytes, and reads only when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def upgrade(self, *headers: str) -> None:
        """Sends the request for a WebSocket."""
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET /acp HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade", *headers]
        lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}", "", ""]
        self.writer.write("\r\n".join(lines).encode())

    def frame(self, opcode: int, data: bytes, *, is_last: bool = True, times: int = 1) -> None:
        """Sends a frame, masked with zeros, any number of times."""
        size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + struct.pack("!Q", len(data))
        self.writer.write((bytes([opcode | (0x80 if is_last else 0)]) + size + b"\0\0\0\0" + data) * times)

    def call(self, method: str, **params: Any) -> None:
        """Sends a request."""
        self.frame(TEXT, json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode())

    async def open(self) -> None:
        """Upgrades and initializes."""
        self.upgrade()
        await self.reader.readuntil(b"\r\n\r\n")
        self.frame(TEXT, INITIALIZE)
        await self.reader.readuntil(b"}}")

    async def sees(self, wanted: bytes) -> bool:
        """Reads until these bytes or the end of the connection; returns whether they came."""
        seen = b""
        with anyio.fail_after(60), suppress(ConnectionError):
            while wanted not in seen and (data := await self.reader.read(64 * KIB)):
                seen = seen[-len(wanted) :] + data
        return wanted in seen


@asynccontextmanager
async def peer(port: int) -> AsyncIterator[Peer]:
    """A connected peer with a small receive buffer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * KIB)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=16 * KIB)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def client(port: int, **options: Any) -> AsyncIterator[ClientConnection]:
    """An initialized client."""
    async with connect(f"ws://127.0.0.1:{port}/acp", compression=None, proxy=None, max_size=None, **options) as opened:
        await opened.send(INITIALIZE.decode())
        await opened.recv()
        yield opened


async def call(opened: ClientConnection, method: str, **params: Any) -> Any:
    """Sends a request and returns the response, skipping notifications."""
    await opened.send(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))
    with anyio.fail_after(60):
        while True:
            message = json.loads(await opened.recv())
            if "id" in message:
                return message


async def test_a_client_that_falls_too_far_behind_is_dropped_with_a_reason() -> None:
    service = Service(ConnectionLimits(buffered_bytes=8 * KIB * KIB))
    async with service.running() as port, peer(port) as slow, client(port) as other:
        await slow.open()
        slow.call("flood", count=400, size=64 * KIB, waits=False)
        await service.wait_until(lambda: service.acp.metrics.ended.samples[(("reason", "too_slow"),)] == 1)
        assert (await call(other, "echo", a=1))["result"] == {"a": 1}
        assert await slow.sees(b"More than 8 MiB waited for this client to read them.")


async def test_a_client_that_reads_nothing_is_dropped_although_little_waits() -> None:
    service = Service(ConnectionLimits(stall_s=0.2))
    async with service.running() as port, peer(port) as slow, client(port) as other:
        await slow.open()
        slow.call("flood", count=200, size=64 * KIB, waits=True)
        await service.wait_until(lambda: service.acp.metrics.ended.samples[(("reason", "stalled"),)] == 1)
        assert (await call(other, "echo", a=1))["result"] == {"a": 1}
        assert await slow.sees(b"This client read nothing for 0.2 s")


async def test_a_slow_client_delays_its_own_replay_and_loses_nothing() -> None:
    service = Service(ConnectionLimits(pause_bytes=256 * KIB))
    async with service.running() as port, client(port, max_queue=1) as opened:
        await opened.send('{"jsonrpc":"2.0","id":1,"method":"flood","params":{"count":300,"size":65536,"waits":true}}')
        await service.wait_until(lambda: next(iter(service.acp.clients.values())).transport.buffered_bytes > 256 * KIB)
        (reading,) = service.acp.clients.values()
        assert reading.transport.buffered_bytes < 1024 * KIB
        messages = [json.loads(await opened.recv()) for _ in range(301)]
        assert [len(each["params"]["text"]) for each in messages[:300]] == [65536] * 300
        assert messages[300]["id"] == 1


async def test_a_silent_client_is_dropped() -> None:
    service = Service(ConnectionLimits(ping_s=0.05, silent_s=0.2))
    async with service.running() as port, peer(port) as silent, client(port) as other:
        await silent.open()
        assert await silent.sees(b"This client sent nothing for")
        assert service.acp.metrics.ended.samples == {(("reason", "silent"),): 1}
        assert (await call(other, "echo", a=1))["result"] == {"a": 1}  # its library has answered the pings


async def test_a_client_that_never_initializes_is_closed() -> None:
    service = Service(ConnectionLimits(handshake_s=0.2))
    async with service.running() as port, peer(port) as mute:
        mute.upgrade()
        assert await mute.sees(b"No initialize came in time.")
        assert service.acp.metrics.ended.samples == {(("reason", "no_initialize"),): 1}


async def test_a_request_that_trickles_in_is_cut_off() -> None:
    service = Service(ConnectionLimits(handshake_s=0.3))
    async with service.running() as port, peer(port) as slow, peer(port) as reused:
        reused.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"ok\n" in await reused.reader.readuntil(b"ok\n")
        reused.writer.write(b"GET /healthz HTTP/1.1\r\n")
        slow.writer.write(b"GET /acp HTTP/1.1\r\n")
        with anyio.fail_after(60):
            while not slow.reader.at_eof():
                try:
                    slow.writer.write(b"X-Header: 1\r\n")
                    await slow.writer.drain()
                    await asyncio.wait_for(slow.reader.read(1), 0.02)
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
        assert not await reused.sees(b"ok")
        assert service.acp.handshakes.expired == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((f"X-Long: {'a' * 9_000}",), b"431"),
        (tuple(f"X-{number}: a" for number in range(200)), b"431"),
        (("Content-Length: 5",), b"400"),
        (("Transfer-Encoding: chunked",), b"400"),
    ],
)
async def test_an_upgrade_that_cannot_be_read_is_refused_and_closed(headers: tuple[str, ...], status: bytes) -> None:
    service = Service(ConnectionLimits(handshake_s=60))
    async with service.running() as port, peer(port) as sloppy:
        sloppy.upgrade(*headers)
        with anyio.fail_after(60):
            assert (await sloppy.reader.read()).startswith(b"HTTP/1.1 " + status)


async def test_a_slow_client_may_read_a_long_page_until_it_stops_reading() -> None:
    size = 32 * KIB * KIB
    page = Route("/page", lambda _request: PlainTextResponse("x" * size))
    service = Service(ConnectionLimits(handshake_s=60), more_routes=[page])
    async with service.running() as port, peer(port) as slow:
        slow.writer.write(b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await slow.reader.readexactly(KIB)
        (connection,) = service.acp.handshakes._waiting
        for _ in range(3):
            unread = connection.transport.get_write_buffer_size()
            connection._expire()  # as if its time was over
            while connection.transport.get_write_buffer_size() == unread:
                await slow.reader.readexactly(64 * KIB)
        assert not connection.transport.is_closing()
        connection._expire()
        connection._expire()
        assert connection.transport.is_closing()


async def test_many_unfinished_requests_make_way_for_clients() -> None:
    service = Service(ConnectionLimits(handshake_s=60))
    async with service.running() as port:
        places = service.acp.handshakes._places
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(places + 20)]
        async with client(port) as opened:
            assert (await call(opened, "echo", a=1))["result"] == {"a": 1}
        assert len(service.acp.handshakes._waiting) <= places
        assert service.acp.handshakes.expired >= 20
        for _, writer in idle:
            writer.transport.abort()


async def test_connections_beyond_the_limit_are_refused_until_one_ends() -> None:
    service = Service(ConnectionLimits(handshake_s=60), max_connections=LIMIT)
    async with service.running() as port, AsyncExitStack() as connected:
        first = await connected.enter_async_context(peer(port))
        await first.open()
        for _ in range(LIMIT - 1):
            each = await connected.enter_async_context(peer(port))
            each.upgrade()
            assert (await each.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 101 ")
        assert len(service.acp.clients) == LIMIT
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}/acp", proxy=None)
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "5"
        assert b"%d clients are connected" % LIMIT in bytes(refused.value.response.body)
        first.call("echo", a=1)
        assert await first.sees(b'"result":{"a":1}')
        each.writer.transport.abort()
        await service.wait_until(lambda: len(service.acp.clients) == LIMIT - 1)
        async with client(port):
            pass


async def test_clients_that_are_admitted_at_the_same_moment_do_not_exceed_the_limit() -> None:
    service = Service(ConnectionLimits(handshake_s=60), max_connections=1)
    service.access.is_open.clear()
    async with service.running() as port, peer(port) as first, peer(port) as second:
        for each in (first, second):
            each.upgrade()
        await service.wait_until(lambda: len(service.access.asked) == 2)
        service.access.is_open.set()
        answers = [await each.reader.readuntil(b"\r\n") for each in (first, second)]
    assert sorted(answer[:12] for answer in answers) == [b"HTTP/1.1 101", b"HTTP/1.1 503"]


@pytest.mark.parametrize("token", [None, "ann"])
async def test_a_client_whose_old_connection_broke_may_connect_again_at_the_limit(token: str | None) -> None:
    service = Service(ConnectionLimits(), max_connections=1)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with service.running() as port, client(port, additional_headers=headers) as old:
        assert old.response is not None
        known = {"Acp-Connection-Id": old.response.headers["acp-connection-id"]}
        async with client(port, additional_headers=headers | known) as again:
            assert (await call(again, "echo", a=1))["result"] == {"a": 1}
            assert len(service.acp.clients) == 1


async def test_the_bytes_of_received_messages_are_counted_as_bytes() -> None:
    service = Service(ConnectionLimits())
    async with service.running() as port, client(port) as opened:
        before = service.acp._traffic.bytes_in
        message = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "echo", "params": {"a": "é"}}, ensure_ascii=False)
        await opened.send(message)
        await opened.recv()
        assert service.acp._traffic.bytes_in - before == len(message.encode())


async def test_pings_of_a_client_that_reads_nothing_fill_no_memory() -> None:
    service = Service(ConnectionLimits())
    async with service.running() as port, peer(port) as pinging, client(port) as other:
        await pinging.open()
        (_, watched) = service.acp.clients.values()
        for _ in range(50):  # more than the system buffers
            pinging.frame(PING, b"x" * 125, times=1000)
            await pinging.writer.drain()
        pinging.call("last")
        await service.wait_until(lambda: "last" in service.methods)
        assert watched.transport.buffered_bytes <= MAX_PONG_BYTES + 256 * KIB
        assert (await call(other, "echo", a=1))["result"] == {"a": 1}


async def test_a_message_of_many_fragments_is_one_message_and_bounded() -> None:
    service = Service(ConnectionLimits(message_bytes=64 * KIB))
    async with service.running() as port, peer(port) as patient:
        await patient.open()
        text = b'{"jsonrpc":"2.0","id":5,"method":"echo","params":{"a":"\xc3\xa9"}}'
        patient.frame(TEXT, text[:1], is_last=False)
        for _ in range(1000):
            patient.frame(CONTINUATION, b"", is_last=False)
        for byte in text[1:]:
            patient.frame(CONTINUATION, bytes([byte]), is_last=False)
        patient.frame(CONTINUATION, b"")
        assert b'{"jsonrpc":"2.0","id":5,"result":{"a":"\xc3\xa9"}}' in await patient.reader.readuntil(b"}}")
        for index in range(80):
            patient.frame(CONTINUATION if index else TEXT, b" " * KIB, is_last=False)
        assert await patient.sees(struct.pack("!H", 1009))


async def test_requests_without_end_are_refused_one_by_one() -> None:
    service = Service(ConnectionLimits(unanswered=0))
    async with service.running() as port, peer(port) as eager:
        eager.upgrade()
        await eager.reader.readuntil(b"\r\n\r\n")
        eager.frame(TEXT, INITIALIZE)
        assert b"0 requests have no response yet. Wait for some of the responses." in await eager.reader.readuntil(
            b"}}"
        )


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x81\x05hello", 1002),  # not masked
        (b"\x83\x80\0\0\0\0", 1002),  # an unknown opcode
        (b"\xf1\x80\0\0\0\0", 1002),  # reserved bits
        (b"\x80\x80\0\0\0\0", 1002),  # a continuation of nothing
        (b"\x81\x82\0\0\0\0\xff\xfe" * 2, 1007),  # not UTF-8, twice
        (b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0", 1009),  # a length of 2^63
        (b"\x89\xfe\x00\xff\0\0\0\0" + b"x" * 255, 1002),  # a ping that is too long
    ],
)
async def test_broken_frames_end_the_connection_and_nothing_else(
    data: bytes, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(ConnectionLimits())
    async with service.running() as port, peer(port) as broken, client(port) as other:
        await broken.open()
        broken.writer.write(data)
        assert await broken.sees(struct.pack("!H", code))
        assert (await call(other, "echo", a=1))["result"] == {"a": 1}
        await service.wait_until(lambda: len(service.acp.clients) == 1)
        assert service.acp.metrics.ended.samples == {(("reason", "invalid"),): 1}
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_nothing_is_sent_to_a_client_that_has_just_closed() -> None:
    service = Service(ConnectionLimits())
    async with service.running() as port, peer(port) as leaving:
        await leaving.open()
        ((transport, socket),) = [(each.transport, each.transport._socket) for each in service.acp.clients.values()]
        socket.data_received(CLOSE_FRAME)  # as the event loop does, so that the message comes before the loop goes on
        transport.post({"jsonrpc": "2.0", "method": "filler", "params": {}})
        assert not await leaving.sees(b"filler")
        await service.wait_until(lambda: not service.acp.clients)


async def test_a_client_that_closes_and_never_reads_is_forgotten() -> None:
    service = Service(ConnectionLimits(goodbye_s=0.1))
    async with service.running() as port, peer(port) as rude:
        await rude.open()
        rude.call("flood", count=200, size=64 * KIB, waits=True)
        await service.wait_until(lambda: next(iter(service.acp.clients.values())).transport.buffered_bytes > KIB * KIB)
        rude.writer.write(CLOSE_FRAME)
        await service.wait_until(lambda: not service.acp.clients)
        assert not await rude.sees(b"the answer")


async def test_a_client_that_leaves_during_the_upgrade_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(ConnectionLimits())
    async with service.running() as port:
        service.access.is_open.clear()
        async with peer(port) as leaving:
            leaving.upgrade()
            await service.wait_until(lambda: len(service.access.asked) == 1)
        async with peer(port) as other:
            other.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await other.sees(b"ok\n")
        service.access.is_open.set()
        await service.wait_until(lambda: service.acp.metrics.ended.samples[(("reason", "client"),)] == 1)
        assert service.acp.clients == {}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_sessions_that_one_client_opens_by_the_hundred_delay_no_other_client() -> None:
    service = Service(ConnectionLimits())

    def count(cwd: str) -> int:
        return service.opening.count(cwd)

    async def ask(opened: ClientConnection, cwd: str, times: int) -> None:
        for number in range(times):
            params = {"cwd": cwd, "mcpServers": []}
            request = {"jsonrpc": "2.0", "id": number, "method": "session/new", "params": params}
            await opened.send(json.dumps(request))

    def token(name: str) -> dict[str, dict[str, str]]:
        return {"additional_headers": {"Authorization": f"Bearer {name}"}}

    async with (
        service.running() as port,
        client(port, **token("ada")) as first,
        client(port, **token("ada")) as second,
        client(port, **token("bob")) as other,
    ):
        await ask(first, "/many", 300)
        await service.wait_until(lambda: count("/many") == MAX_REQUESTS_EACH)
        await ask(second, "/too", 1)
        await ask(other, "/one", 1)
        await service.wait_until(lambda: count("/one") == 1)
        assert (await call(second, "echo", a=1))["result"] == {"a": 1}
        assert (count("/many"), count("/too")) == (MAX_REQUESTS_EACH, 0), "one principal has one share"
        service.may_open.set()
        await service.wait_until(lambda: (count("/many"), count("/too")) == (300, 1))
        for _ in range(300):
            await first.recv()  # a client that leaves answers unread waits seconds for the end of its connection
