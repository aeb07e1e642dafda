"""Credentials that crow adds to requests of commands, and tries to get them out or to use them for something else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.domain.errors import ArgumentError, ConfigError
from crow.tools.builtin import SPECS
from crow.tools.builtin.shell import shell_spec
from crow.tools.network import Host
from crow.tools.network.authority import Authority
from crow.tools.network.credentials import Credential, Credentials
from crow.tools.network.masking import Masked
from crow.tools.network.uses import Use, use_of
from crow.tools.sandbox.confiner import KernelConfiner
from crow.tools.sandbox.policy import SandboxOptions
from crow.tools.workspace import DiskWorkspace
from tests.tools.network.servers import RESPONSE, Client, Server, proxying, serving
from tests.tools.network.test_attacks import SMUGGLED

SECRET = "s3cret-of-the-User"
VALUE = f"Bearer {SECRET}"


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
        return (
            text.replace("{good}", str(self.good.port))
            .replace("{evil}", str(self.evil.port))
            .replace("{secret}", "marker")
            .encode("utf-8", "surrogateescape")
        )

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

    async def throw(self, text: str) -> None:
        """Send something inside of TLS and leave. Return when the proxy has done with it."""
        reader, writer = await asyncio.open_connection(*self.client.address)
        writer.write(f"CONNECT {self.place} HTTP/1.1\r\nHost: {self.place}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        await writer.start_tls(self.trusting, server_hostname="good.test")
        writer.write(self.fill(text))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    def told(self) -> str:
        """Return what the model is told."""
        return self.client.gate.describe()

    def assert_safe(self, about: object) -> None:
        """The secret went nowhere but into one header of whole requests to the host."""
        assert self.evil.received == [], about
        assert SECRET not in self.told(), about
        for received in filter(None, self.good.received):
            http = h11.Connection(h11.SERVER)
            http.receive_data(received)
            request = http.next_event()
            assert isinstance(request, h11.Request), (about, received)
            while not isinstance(event := http.next_event(), h11.EndOfMessage | type):
                assert isinstance(event, h11.Data), (about, received)
            values = {name: [value for other, value in request.headers if other == name] for name, _ in request.headers}
            assert http.trailing_data[0] == b"", (about, received)
            assert values[b"host"] == [self.place.encode()], (about, received)
            assert values.get(b"authorization", [VALUE.encode()]) == [VALUE.encode()], (about, received)
            assert request.method in (b"GET", b"HEAD", b"OPTIONS"), (about, received)
            assert request.target.startswith(b"/"), (about, received)
            assert not any(b"evil" in value for name, value in request.headers if name != b"x"), (about, received)
        self.good.received.clear()


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


HEAD = "Host: good.test:{good}\r\n"
OTHER_TARGETS = (
    *("https://evil.test/", "http://evil.test:{evil}/", "https://good.test:{good}/", "http://good.test:{good}/"),
    *("//evil.test/", "evil.test", "evil.test:{evil}", "*", "?a", "#a", "/a#b", "good.test:{good}", "@evil.test/"),
    *("/..", "/a/../../b", "/%2e%2e/b", "/a/%2e%2e/b", "/%252e%252e/b", "/a\\..\\b", "/a/..;/b", "/%00", "/%0d%0aX:y"),
    *("/\x7f", "/\xff", "/\u0135", "/a b", "/a\tb", "/ HTTP/1.1\r\nHost: evil.test\r\nX: ", "/%0a", "/%85"),
)
OTHER_HEADERS = (
    *("Host: evil.test\r\n", "Host: good.test\r\n", "Host: good.test:{evil}\r\n", "Host: evil.test:{good}\r\n"),
    *("Host:\r\n", "", "Host: good.test:{good}\r\nHost: evil.test\r\n", "Host: evil.test\r\n" + HEAD),
    *("Host: good.test:{good}@evil.test\r\n", "Host: good.test:{good}, evil.test\r\n", "host : evil.test\r\n"),
    *(
        HEAD + "X-Forwarded-Host: evil.test\r\n",
        HEAD + "X-Original-URL: //evil.test\r\n",
        HEAD + "Forwarded: host=evil\r\n",
    ),
    *(HEAD + "X-Rewrite-URL: /evil\r\n", HEAD + "X-HTTP-Method-Override: evil\r\n", HEAD + "X-HTTP-Method: evil\r\n"),
    *(HEAD + "X-Method-Override: evil\r\n", HEAD + "Range: bytes=0-evil\r\n", HEAD + "Accept-Encoding: evil\r\n"),
    *(HEAD + "Connection: Upgrade\r\nUpgrade: websocket-evil\r\n", HEAD + "Upgrade: h2c, evil\r\n"),
    *(
        HEAD + "Connection: authorization\r\n",
        HEAD + "Connection: close, host\r\n",
        HEAD + "Proxy-Authorization: evil\r\n",
    ),
    *(HEAD + "Alt-Svc: evil\r\n", HEAD + "Expect: evil\r\n", HEAD + "TE: evil\r\n", HEAD + "Trailer: evil\r\n"),
)
INSIDE = (
    *(f"GET {target} HTTP/1.1\r\n{HEAD}\r\n" for target in OTHER_TARGETS),
    *(f"GET /a HTTP/1.1\r\n{headers}\r\n" for headers in OTHER_HEADERS),
    *(f"{method} /a HTTP/1.1\r\n{HEAD}\r\n" for method in ("TRACE", "TRACK", "CONNECT", "PRI", "DEBUG", "LINK", "get")),
    *(text.replace("http://good.test:{good}", "", 1) for text in SMUGGLED),
    *SMUGGLED,
)
"""What an attacker may send inside of TLS."""
NAMES = (
    *("evil.test", "sub.good.test", "good.test.evil.test", "test", "xgood.test", "good.tes", "good.test-evil"),
    *("other.test", "127.0.0.1", "localhost", "a.b.good.test", "GOOD.evil.test"),
)
"""Other names in a ClientHello."""
OUTSIDE = (
    "GET http://good.test:{good}/ HTTP/1.1\r\nHost: good.test:{good}\r\n\r\n",
    "GET http://good.test:{evil}/ HTTP/1.1\r\nHost: good.test:{evil}\r\n\r\n",
    "CONNECT good.test:{good} HTTP/1.1\r\nHost: good.test:{good}\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "CONNECT good.test:{good} HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    "CONNECT good.test:{good} HTTP/1.1\r\nHost: good.test:{good}\r\nContent-Length: 3\r\n\r\nabc",
    *(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n" for place in ("good.test:{evil}", "evil.test:{good}")),
    *(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n" for place in ("[::1]:{good}", "127.0.0.1:{good}")),
    *(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n" for place in ("good.test:443", "sub.good.test:{good}")),
)
"""What an attacker may send to the proxy itself."""


@pytest.mark.long
async def test_no_request_inside_of_tls_is_more_than_it_seems(tmp_path: Path) -> None:
    async with scene(tmp_path) as each:
        await each.throw(GET + "\r\n")
        assert len(each.good.received) == 1, "a request that is in order arrives"
        for text in INSIDE:
            await each.throw(text)
            each.assert_safe(text)


async def test_the_credential_is_only_used_for_a_client_that_names_its_host(tmp_path: Path) -> None:
    lenient = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    lenient.check_hostname, lenient.verify_mode = False, ssl.CERT_NONE
    async with scene(tmp_path) as each:
        for name in (*NAMES, ""):
            await each.inside(GET + "\r\n", name=name or "127.0.0.1", tls=lenient)
            assert each.good.received == [], name
        assert "did not begin TLS with HTTP/1.1 and the name of exactly this host" in each.told()
        assert await each.inside(GET + "Connection: close\r\n\r\n", name="GOOD.test", tls=lenient) != b""


async def test_nothing_is_added_outside_of_tls_to_the_host(tmp_path: Path) -> None:
    async with scene(tmp_path, allow=["network(*:*)"]) as each:
        for text in OUTSIDE:
            await each.client.send(each.fill(text))
        assert SECRET.encode() not in b"".join((*each.evil.received, *each.good.received))
        assert SECRET not in each.told()


def test_there_are_more_than_a_hundred_tries() -> None:
    assert len(INSIDE) + len(NAMES) + len(OUTSIDE) > 200


@pytest.mark.parametrize("upstream", ["evil.test", "other.test"])
async def test_a_host_with_the_certificate_of_another_one_does_not_get_it(tmp_path: Path, upstream: str) -> None:
    async with scene(tmp_path, upstream=upstream) as each:
        answer = await each.inside(GET + "\r\n")
        assert each.good.received == [b""] or each.good.received == []
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert "its certificate or connection is not valid: Hostname mismatch" in each.told()


async def test_a_host_with_a_certificate_of_its_own_does_not_get_it(tmp_path: Path) -> None:
    async with scene(tmp_path, ca_file=None) as each:
        await each.inside(GET + "\r\n")
        assert each.good.received in ([b""], [])
    assert "is not valid: unable to get local issuer certificate" in each.told()


async def test_a_host_without_tls_does_not_get_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as each, serving() as plain:
        credential = Credential(host=Host("good.test", plain.port), read=lambda: (SECRET, VALUE))
        credentials = Credentials([credential])
        env = credentials.environment({}, tmp_path)
        trusting = ssl.create_default_context(cafile=env["SSL_CERT_FILE"])
        async with proxying(["network(good.test:*)"], credentials=credentials) as client:
            await replace(each, client=client, good=plain, trusting=trusting).inside(GET + "\r\n")
            told = client.gate.describe()
        assert all(SECRET.encode() not in received for received in plain.received)
    assert "is not valid" in told or "does not answer with TLS" in told


async def test_a_redirect_is_passed_on_and_not_followed(tmp_path: Path) -> None:
    location = f"https://evil.test/?{VALUE}&dev:{SECRET}@evil.test"
    response = f"HTTP/1.1 302 Found {SECRET}\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
    async with scene(tmp_path, response=response) as each:
        answer = await each.inside(GET + "Connection: close\r\n\r\n")
        assert each.evil.received == []
        assert len(each.good.received) == 1
    assert answer.startswith(f"HTTP/1.1 302 Found {'*' * len(SECRET)}\r\n".encode())
    assert SECRET.encode() not in answer


async def test_no_cookie_takes_the_place_of_the_credential(tmp_path: Path) -> None:
    response = b"HTTP/1.1 200 OK\r\nSet-Cookie: session=of-the-user\r\nX: y\r\nContent-Length: 0\r\n\r\n"
    async with scene(tmp_path, response=response) as each:
        answer = await each.inside(GET + "Cookie: a=b\r\nConnection: close\r\n\r\n")
        assert b"cookie" not in each.good.received[0].lower()
    assert b"x: y\r\n" in answer
    assert b"of-the-user" not in answer


@pytest.mark.parametrize("size", [1, 2, 7, 100])
async def test_a_response_that_shows_the_credential_is_masked(tmp_path: Path, size: int) -> None:
    body = f"a {VALUE} b {SECRET}{SECRET} {SECRET[:-1]}".encode()
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in [body[at : at + size] for at in range(0, len(body), size)]
    )
    response = b"HTTP/1.1 200 OK\r\nX: %b\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (VALUE.encode(), chunks)
    async with scene(tmp_path, response=response) as each:
        answer = await each.inside(GET + "Connection: close\r\n\r\n")
    assert SECRET.encode() not in answer
    assert answer.replace(b"\r\n", b"").count(b"*") >= len(VALUE) * 2 + len(SECRET) * 2


@given(st.lists(st.sampled_from([b"a", b"ab", b"abc", b"abcabd", b"abd", b"x", b"ca"]), max_size=30), st.integers(1, 9))
def test_pieces_are_masked_as_the_whole(parts: list[bytes], size: int) -> None:
    secrets = (b"abcabd", b"abd")
    data = b"".join(parts)
    masked = Masked(secrets)
    pieces = b"".join(masked.feed(data[at : at + size]) for at in range(0, len(data), size)) + masked.end()
    assert len(pieces) == len(data)
    assert not any(secret in pieces for secret in secrets)
    assert pieces.replace(b"*", b"") == Masked(secrets).whole(data).replace(b"*", b"")


@pytest.mark.parametrize("name", ["Authorization", "authorization", "AUTHORIZATION", "AuThOrIzAtIoN"])
async def test_a_command_that_authenticates_itself_gets_nothing_added(tmp_path: Path, name: str) -> None:
    async with scene(tmp_path, access="read") as each:
        text = f"POST /a HTTP/1.1\r\n{HEAD}{name}: own\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab"
        await each.inside(text)
        (request,) = each.good.received
    assert request.lower().count(b"authorization: own\r\n") == 1
    assert SECRET.encode() not in request


async def test_a_refused_credential_is_told_and_read_again(tmp_path: Path) -> None:
    read = list[int]()
    response = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"

    def read_again() -> tuple[str, str]:
        read.append(1)
        return SECRET, VALUE

    async with scene(tmp_path, response=response, read=read_again) as each:
        await each.inside(GET + "\r\n", GET + "Connection: close\r\n\r\n")
    assert len(read) == 2
    assert "it did not accept the user's credential (status 401)" in each.told()


async def test_without_a_secret_nothing_is_sent_and_no_output_of_a_program_is_told(tmp_path: Path) -> None:
    def fail() -> tuple[str, str]:
        raise ConfigError(f"token_command ended with code 1: {SECRET}")

    async with scene(tmp_path, read=fail) as each:
        answer = await each.inside(GET + "\r\n")
        assert each.good.received == []
    assert "cannot be read: token_command ended with code 1; `crow doctor` says more" in each.told()
    assert SECRET.encode() not in answer


PUSH = "GET {path}/info/refs?service=git-receive-pack HTTP/1.1\r\n" + HEAD + "Connection: close\r\n\r\n"
SEND = "POST {path}/git-receive-pack HTTP/1.1\r\n" + HEAD + "Content-Length: 0\r\nConnection: close\r\n\r\n"
FETCH = (
    "POST {path}/git-upload-pack HTTP/1.1\r\n" + HEAD + "Content-Type: application/x-git-upload-pack-request\r\n"
    "Content-Length: 0\r\nConnection: close\r\n\r\n"
)


async def test_a_push_is_one_question_with_host_and_repository(tmp_path: Path) -> None:
    async with scene(tmp_path, allow=[], answer=True) as each:
        for path in ("/team/app.git", "/team/app", "//team//app.git", "/team/%61pp", "/other"):
            await each.inside(PUSH.replace("{path}", path))
            await each.inside(SEND.replace("{path}", path))
        await each.inside(FETCH.replace("{path}", "/team/app.git"))
        assert each.client.asked == [f"{each.place}/team/app", f"{each.place}/other"]
        assert len(each.good.received) == 11


async def test_reading_allows_no_push(tmp_path: Path) -> None:
    async with scene(tmp_path) as each:
        await each.inside(FETCH.replace("{path}", "/a.git"))
        assert len(each.good.received) == 1
        for text in (
            PUSH,
            SEND,
            FETCH.replace("upload-pack-request", "other"),
            FETCH.replace("/git-upload-pack", "/x"),
        ):
            answer = await each.inside(text.replace("{path}", "/a.git"))
            assert answer.startswith(b"HTTP/1.1 403 ")
        assert len(each.good.received) == 1
        assert each.client.asked == [f"{each.place}/{name}" for name in ("a", "a.git/git-upload-pack", "a.git/x")]
        for method in ("POST", "DELETE"):
            await each.inside(f"{method} /b?c HTTP/1.1\r\n{HEAD}Content-Length: 0\r\nConnection: close\r\n\r\n")
        assert each.client.asked[3:] == [f"{each.place}/b"] * 2, "each method asks"


@pytest.mark.parametrize(("options", "told"), [
    ({"access": "read"}, "the user's credential for it is only for reading"),
    ({"mode": "plan"}, "network_write is not available in plan mode"),
    ({"mode": "plan", "access": "write"}, "network_write is not available in plan mode"),
    ({"allow": [], "access": "write"}, "the user did not allow it"),
    ({"deny": ["network_write"]}, "The user has forbidden this"),
    ({"deny": ["network(good.test:*)"]}, "The user has forbidden this"),
    ({}, "the user did not allow it"),
])  # fmt: skip
async def test_changes_are_refused_where_they_are_not_allowed(
    tmp_path: Path, options: dict[str, object], told: str
) -> None:
    async with scene(tmp_path, **options) as each:  # type: ignore[arg-type]
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await each.inside(f"{method} /{method} HTTP/1.1\r\n{HEAD}Content-Length: 0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 403 "), method
            assert told in each.told(), method
        assert each.good.received == []


@pytest.mark.parametrize(("options", "asked"), [
    ({"access": "write"}, []),
    ({"allow": ["network_write(good.test:*/team/*)"]}, []),
    ({"allow": ["shell"]}, []),
    ({"allow": ["network(good.test:*)", "network_write(good.test:*/tea/*)"]}, ["/team/a"]),
])  # fmt: skip
async def test_settings_and_rules_save_questions(tmp_path: Path, options: dict[str, object], asked: list[str]) -> None:
    async with scene(tmp_path, answer=True, **options) as each:  # type: ignore[arg-type]
        await each.inside(SEND.replace("{path}", "/team/a.git"))
        assert [place.removeprefix(each.place) for place in each.client.asked] == asked
        assert len(each.good.received) == 1


DENIED = (
    "/team/app.git",
    "/TEAM/app",
    "//team/app",
    "/team/%61pp.git",
    "/team%2Fapp.git",
    "/x/../team/app",
    "/team/./app",
)


async def test_no_spelling_of_a_repository_gets_past_a_deny_rule(tmp_path: Path) -> None:
    async with scene(tmp_path, deny=["network_write(good.test:*/team/app)"], answer=True) as each:
        for path in DENIED:
            answer = await each.inside(SEND.replace("{path}", path))
            assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), path
        assert each.good.received == []


HOST = Host("git.test", 443)
PUSHED = Use("git push to git.test/a, with your credential", "git.test/a")


@pytest.mark.parametrize(("method", "target", "types", "expected"), [
    (b"GET", "/a/info/refs?service=git-upload-pack", [], Use("connect to: git.test, with your credential")),
    (b"GET", "/a.git/info/refs?service=git-receive-pack", [], PUSHED),
    (b"GET", "/a/info/refs?service=git%2Dreceive-pack", [], PUSHED),
    (b"PUT", "/b/c%20d?e=%0a", [], Use("PUT https://git.test/b/c d?e=%0A, with your credential", "git.test/b/c d")),
])  # fmt: skip
def test_the_words_for_a_use(method: bytes, target: str, types: list[tuple[bytes, bytes]], expected: Use) -> None:
    assert use_of(HOST, method, target, types) == expected


@pytest.mark.parametrize("target", ["/%0a", "/a%1bb", "/%e2%80%ae", "/../a", "/%2e%2e%2fa"])
def test_a_path_with_control_characters_or_dots_is_refused(target: str) -> None:
    with pytest.raises(ArgumentError):
        use_of(HOST, b"POST", target, [])


def test_certificates_of_the_user_stay_trusted(tmp_path: Path) -> None:
    own = tmp_path / "own.pem"
    own.write_bytes(Authority(["corp.test"]).pem)
    (tmp_path / "trust").mkdir()
    credentials = Credentials([Credential(host=HOST, read=lambda: (SECRET, VALUE))])
    given = {"REQUESTS_CA_BUNDLE": str(own), "NODE_EXTRA_CA_CERTS": "/nowhere", "GIT_CONFIG_COUNT": "1"}
    found = credentials.environment(given, tmp_path / "trust")
    assert Path(found["REQUESTS_CA_BUNDLE"]).read_text().startswith(own.read_text())
    assert Path(found["NODE_EXTRA_CA_CERTS"]).read_text().count("BEGIN CERTIFICATE") == 1
    assert found["GIT_CONFIG_COUNT"] == "4"
    assert (found["GIT_CONFIG_KEY_2"], found["GIT_CONFIG_VALUE_2"]) == (
        "url.https://git.test/.insteadOf",
        "git@git.test:",
    )
    assert "GIT_SSL_CAINFO" not in found
    assert credentials.environment(given, tmp_path / "trust") == found


async def test_the_certificates_of_crow_are_good_for_these_hosts_alone(tmp_path: Path) -> None:
    authority = Authority(["git.test"])
    (tmp_path / "own.pem").write_bytes(authority.pem)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "own.pem"))
    for name, works in (("git.test", True), ("evil.test", False)):
        context = authority.context(name)
        async with serving(tls=context) as server:
            with nullcontext() if works else pytest.raises(ssl.SSLCertVerificationError, match="subtree violation"):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting, server_hostname=name)
                writer.close()


REFUSED = (
    *(f"{method} / HTTP/1.1\r\n{HEAD}Connection: close\r\n\r\n" for method in ("TRACE", "CONNECT", "TRACK")),
    *(f"GET / HTTP/1.1\r\nHost: {other}\r\nConnection: close\r\n\r\n" for other in ("evil.test", "good.test:{evil}")),
    "GET /\r\n\r\n",
    f"POST / HTTP/1.1\r\n{HEAD}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)


async def test_what_is_no_request_to_the_host_is_refused_even_if_all_is_allowed(tmp_path: Path) -> None:
    async with scene(tmp_path, access="write") as each:
        for text in REFUSED:
            answer = await each.inside(text)
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), text
        assert each.good.received == []


@pytest.mark.parametrize(
    ("options", "expected"), [({}, ("good.test",)), ({"network": True}, ()), ({"enabled": "off"}, ())]
)
def test_the_model_is_told_of_credentials_only_where_commands_have_the_proxy(
    tmp_path: Path, options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    credentials = Credentials([Credential(host=Host("good.test", 443), read=lambda: (SECRET, VALUE))])
    confiner = KernelConfiner([tmp_path], SandboxOptions(caches=tmp_path, credentials=credentials, **options))
    workspace = DiskWorkspace(tmp_path, confiner=confiner)
    assert workspace.credential_hosts == expected
    (plain,) = [spec for spec in SPECS if spec.name == "shell"]
    told = shell_spec(plain, workspace.credential_hosts).description.removeprefix(plain.description)
    assert ("HTTPS to good.test, crow adds" in told) == bool(expected)
    assert bool(told) == bool(expected)
