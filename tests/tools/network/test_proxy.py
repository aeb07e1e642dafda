"""The proxy of a command, with real servers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct

import anyio
import anyio.lowlevel
import pytest

from crow.agent.permissions.host_rules import siblings_at
from crow.agent.permissions.rules import user_rules
from crow.tools.network import Credentials, Host, HostVerdict, Use
from crow.tools.network.gate import Gate
from crow.tools.network.proxy import MAX_CONNECTIONS, Proxy, resolve_host
from crow.tools.network.registries import DEFAULT_REGISTRIES
from tests.tools.conftest import skip_time
from tests.tools.network.servers import (
    CALL,
    RESPONSE,
    Client,
    hello,
    proxying,
    record,
    resolve_to_loopback,
    serving,
)

INDEX, FILES = DEFAULT_REGISTRIES["pip"]


def get(port: int, path: str = "/", host: str = "good.test", more: str = "") -> bytes:
    return f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{more}\r\n".encode()


def connect(port: int, host: str = "good.test") -> bytes:
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()


async def test_requests_to_an_allowed_host_are_answered_over_one_connection() -> None:
    async with serving() as server, proxying([f"network(good.test:{server.port})"]) as client:
        answers = await client.send(get(server.port, "/a"), get(server.port, "/b?c=d", more="Accept: x\r\n"))
        assert answers.count(b"hello") == 2
        start, end = b"HTTP/1.1\r\nHost: good.test:%d\r\n" % server.port, b"Connection: close\r\n\r\n"
        assert server.received == [b"GET /a " + start + end, b"GET /b?c=d " + start + b"accept: x\r\n" + end]
        assert client.gate.describe() == ""


async def test_a_body_is_passed_on_in_either_form() -> None:
    async with serving() as server, proxying([f"network(good.test:{server.port})"]) as client:
        head = f"POST http://good.test:{server.port}/ HTTP/1.1\r\nHost: good.test:{server.port}\r\n".encode()
        await client.send(head + b"Content-Length: 3\r\n\r\nabc")
        await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert [data.partition(b"\r\n\r\n")[2] for data in server.received] == [b"abc", b"3\r\nabc\r\n0\r\n\r\n"]


async def test_a_tunnel_carries_tls_in_any_pieces() -> None:
    first = record(hello(b"good.test")[:9]) + record(hello(b"good.test")[9:])
    async with serving(b"server hello") as server, proxying([f"network(good.test:{server.port})"]) as client:
        data = first + record(b"data" * 4_000, kind=23)
        answers = await client.send(connect(server.port), data)
        assert answers == b"HTTP/1.1 200 Connection established\r\n\r\nserver hello"
        assert server.received == [data]


async def test_a_tunnel_in_which_only_the_server_sends_stays_open_in_both_directions() -> None:
    """As in a long download, after which the client asks for more."""
    parts = anyio.Semaphore(0)

    async def send_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        for _ in range(3):
            await parts.acquire()
            writer.write(b"part")
        writer.write(b"got more" if await reader.read(1_000) else b"end")
        writer.close()

    server = await asyncio.start_server(send_slowly, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, proxying([f"network(good.test:{port})"]) as client:
        reader, writer = await asyncio.open_connection(*client.address)
        writer.write(connect(port))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(record(hello(b"good.test")))
        for _ in range(3):
            parts.release()
            assert await reader.readexactly(4) == b"part"
            skip_time(400)
            await anyio.lowlevel.checkpoint()
        writer.write(record(b"more", kind=23))
        assert await reader.read() == b"got more"
        writer.close()


async def test_a_tunnel_in_which_nothing_passes_is_closed() -> None:
    async with serving() as server, proxying([f"network(good.test:{server.port})"]) as client:
        reader, writer = await asyncio.open_connection(*client.address)
        writer.write(connect(server.port))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(record(hello(b"good.test")))
        assert await reader.readexactly(len(RESPONSE)) == RESPONSE
        skip_time(700)
        assert await reader.read() == b""
        writer.close()


async def test_a_client_that_is_gone_when_its_server_answers_nonsense_ends_only_its_connection() -> None:
    is_gone = anyio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        await is_gone.wait()
        writer.write(b"nonsense\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, serving() as good, proxying(["network(good.test:*)"]) as client:
        with socket.create_connection(client.address) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
            gone.sendall(get(port))
            while not client.gate.has_allowed:
                await anyio.lowlevel.checkpoint()
        is_gone.set()
        assert b"hello" in await client.send(get(good.port))


async def test_a_connection_that_cannot_be_accepted_yet_is_accepted_later() -> None:
    class Full(socket.socket):
        failures = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

    async with serving() as server:
        with Full() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            gate = Gate(allowing)
            with anyio.CancelScope() as clock:
                async with Proxy(gate, resolve_to_loopback).serving(listener, clock, Credentials()):
                    client = Client(listener.getsockname(), gate, [])
                    assert b"hello" in await client.send(get(server.port))


async def allowing(_host: Host, _use: Use | None) -> HostVerdict:
    return HostVerdict(is_named=True)


async def test_an_unknown_host_is_asked_about_once_and_then_reached() -> None:
    async with serving() as server, proxying([], answer=True) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(client.send, get(server.port))
        assert client.asked == [f"good.test:{server.port}"]
        assert len(server.received) == 8


async def test_a_rejected_host_is_named_with_the_reason() -> None:
    async with serving() as server, proxying([], answer=False) as client:
        answer = await client.send(get(server.port))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert answer.endswith(b"crow: the user did not allow it\n")
        await client.send(connect(server.port, "other.test"))
        assert client.gate.describe() == (
            f"[Hosts not reached: good.test:{server.port}: the user did not allow it; "
            f"other.test:{server.port}: the user did not allow it]"
        )
        assert server.received == []


@pytest.mark.parametrize("mode", ["ask", "accept-edits", "auto", "plan"])
async def test_a_deny_rule_wins_and_plan_mode_never_asks(mode: str) -> None:
    async with serving() as server:
        rules = [f"network(good.test:{server.port})"]
        async with proxying(["network"], rules, mode=mode, answer=True) as client:
            assert (await client.send(get(server.port))).startswith(b"HTTP/1.1 403 ")
            assert (client.asked, server.received) == ([], [])
        async with proxying([], mode=mode, answer=True) as client:
            await client.send(get(server.port))
            assert len(client.asked) == (mode != "plan")


async def test_a_private_address_is_reached_only_if_a_rule_names_it() -> None:
    async with serving() as server:
        for host in ("localhost", "127.0.0.1"):
            for rules in ([], ["network(*:*)"], ["network"]):
                async with proxying(rules, resolve=resolve_host, answer=True) as client:
                    assert (await client.send(get(server.port, host=host))).startswith(b"HTTP/1.1 403 ")
                    assert host in client.gate.describe()
            async with proxying([f"network({host}:{server.port})"], resolve=resolve_host) as client:
                assert (await client.send(get(server.port, host=host))).endswith(b"hello")


async def test_registries_are_only_read_where_crow_sees_the_request() -> None:
    async with proxying(["network(registries)"]) as client:
        head = f" http://{INDEX}/ HTTP/1.1\r\nHost: {INDEX}\r\nContent-Length: 0\r\n\r\n".encode()
        for method in (b"POST", b"PUT", b"DELETE", b"PATCH"):
            answer = await client.send(method + head)
            assert answer.startswith(b"HTTP/1.1 403 "), method
        assert "only GET and HEAD are allowed" in client.gate.describe()
        assert client.asked == []


async def test_a_host_that_is_not_there_is_named() -> None:
    async with serving() as server:
        pass
    async with proxying([f"network(good.test:{server.port})"]) as client:
        assert (await client.send(get(server.port))).startswith(b"HTTP/1.1 502 ")
        assert f"good.test:{server.port}: no connection" in client.gate.describe()


async def test_an_answer_that_is_not_http_is_not_passed_on() -> None:
    async with serving(b"SSH-2.0-server\r\n\r\n") as server, proxying([f"network(good.test:{server.port})"]) as client:
        assert (await client.send(get(server.port))).startswith(b"HTTP/1.1 502 ")


async def test_hop_by_hop_headers_of_a_response_are_left_out() -> None:
    response = RESPONSE.replace(b"\r\n\r\n", b"\r\nConnection: X-A\r\nX-A: 1\r\nAlt-Svc: h3=\r\nX-B: 2\r\n\r\n")
    async with serving(response) as server, proxying([f"network(good.test:{server.port})"]) as client:
        head = (await client.send(get(server.port))).lower()
        assert b"x-b: 2" in head
        assert b"x-a" not in head
        assert b"alt-svc" not in head


async def test_a_head_without_end_is_refused() -> None:
    async with serving() as server, proxying([f"network(good.test:{server.port})"]) as client:
        answer = await client.send(get(server.port, more=f"X: {'a' * 70_000}\r\n"))
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert server.received == []


async def test_the_time_limit_of_a_command_stops_while_the_user_is_asked() -> None:
    asked, answered = anyio.Event(), anyio.Event()

    async def judge(_host: Host, _use: Use | None) -> HostVerdict:
        asked.set()
        await answered.wait()
        return HostVerdict()

    gate, clock = Gate(judge), anyio.CancelScope(deadline=anyio.current_time() + 100)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.verdict, Host("a.test", 443), clock)
        await asked.wait()
        assert clock.deadline == float("inf")
        answered.set()
    assert 99 < clock.deadline - anyio.current_time() <= 100


async def test_a_command_cannot_ask_about_any_number_of_hosts() -> None:
    async def judge(_host: Host, _use: Use | None) -> HostVerdict:
        return HostVerdict(refusal="no")

    gate, clock = Gate(judge), anyio.CancelScope()
    verdicts = [await gate.verdict(Host(f"h{number}.test", 443), clock) for number in range(250)]
    assert sum(verdict.refusal == "no" for verdict in verdicts) == 200
    assert gate.describe().endswith("and 195 more]")


async def test_one_answer_covers_the_hosts_of_a_registry_for_this_command() -> None:
    asked = []

    async def judge(host: Host, _use: Use | None) -> HostVerdict:
        asked.append(str(host))
        rules = user_rules([], [f"network({FILES})"] if len(asked) > 2 else [])
        return HostVerdict(also=siblings_at(CALL, host, "ask", rules))

    for expected in ([INDEX], [INDEX] * 2, [INDEX] * 3 + [FILES]):
        gate = Gate(judge)
        for name in (INDEX, FILES):
            await gate.verdict(Host(name, 443), anyio.CancelScope())
        assert asked == expected, "a host that a rule denies is judged by itself"


async def test_an_answer_about_another_host_covers_nothing_else() -> None:
    assert siblings_at(CALL, Host("a.test", 443), "ask", ()) == ()
    assert siblings_at(CALL, Host(INDEX, 8443), "ask", ()) == ()


async def test_connections_beyond_the_limit_wait_outside_of_crow() -> None:
    async with serving() as server, proxying([f"network(good.test:{server.port})"]) as client:
        before = len(os.listdir("/proc/self/fd"))
        idle = [socket.create_connection(client.address) for _ in range(MAX_CONNECTIONS + 100)]
        late = socket.create_connection(client.address)
        late.sendall(get(server.port))
        late.setblocking(False)
        await anyio.wait_all_tasks_blocked()
        assert len(os.listdir("/proc/self/fd")) - before <= len(idle) + 1 + MAX_CONNECTIONS
        for each in idle:
            each.close()
        await anyio.wait_readable(late)
        assert late.recv(12) == b"HTTP/1.1 200"
        late.close()


async def test_an_allowed_host_of_a_command_in_the_background_is_decided_about_again() -> None:
    rules = ["allow"]

    async def judge(_host: Host, _use: Use | None) -> HostVerdict:
        return HostVerdict(refusal="" if rules else "the rule is gone", is_lasting=False)

    gate, clock, host = Gate(judge), anyio.CancelScope(), Host("a.test", 443)
    found = [(await gate.verdict(host, clock)).refusal]
    rules.clear()
    found.append((await gate.verdict(host, clock)).refusal)
    told = [gate.take_refused(), gate.take_refused()]
    rules.append("allow")
    found.append((await gate.verdict(host, clock)).refusal)
    assert found == ["", "the rule is gone", ""]
    assert told == ["[Hosts not reached: a.test: the rule is gone]", ""]
