"""`fetch`: documents as text, and the addresses it must not reach."""

from __future__ import annotations

import base64
import codecs
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from crow.agent.permissions.decisions import url_rules
from crow.agent.permissions.rules import typed_rule, user_rules
from crow.domain.entries import Announcement
from crow.domain.messages import Image
from crow.tools import Coverage, Outcome, PlannedCall
from crow.tools.html import CODECS, codec_of, document_text, page_text
from crow.tools.urls import UrlRules, normalize_url
from crow.tools.web import MAX_BYTES, is_public, may_follow
from tests.support.fork_server import run_script
from tests.tools.conftest import OpenBox, call

PICTURE = b"\x89PNG\r\n\x1a\n"
PAGE = "<!doctype html><title>Nests</title><p>Twigs &amp; <b>string</b>.</p>"


class Web(BaseHTTPRequestHandler):
    """Serves a few documents."""

    def do_GET(self) -> None:
        match self.path:
            case "/page":
                self._give(200, "text/html; charset=utf-8", PAGE.encode())
            case "/latin":
                self._give(200, "text/plain; charset=iso-8859-1", "déjà".encode("latin-1"))
            case "/json":
                self._give(200, "application/json", b'{"a":[1.50,1E400],"a":"\\ud800"}')
            case "/gone":
                self._give(404, "text/plain", b"no such page")
            case "/picture":
                self._give(200, "image/png", PICTURE)
            case "/no-picture":
                self._give(200, "image/png", b"<svg/>")
            case "/charset":
                self._give(200, "text/plain; charset=idna", b"xn--")
            case "/meta":
                self._give(200, "text/html", b'<meta charset="windows-1252"><p>\x93hi\x94')
            case "/tangled":
                self._give(200, "text/html", b"<p>It begins</p>" + b"<!--" * 200_000)
            case "/punycode":
                self._give(200, "text/html; charset=punycode", b"<p>It begins</p>" + b"a" * 3_000_000)
            case "/reference":
                self._give(200, "text/html", b"<p>one &#" + b"9" * 5_000 + b"; two")
            case "/heavy":
                self._give(200, "text/html", b"<p>It begins</p>" + b"<p>" * 100_000)
            case "/program":
                self._give(200, "application/octet-stream", b"\0\1\2")
            case "/large":
                self._give(200, "text/plain", b"x" * (MAX_BYTES + 100))
            case "/host":
                self._give(200, "text/plain", self.headers["Host"].encode())
            case "/near":
                self._move("/page")
            case "/far":
                self._move("http://other.example/page")
            case "/inside":
                self._move("http://169.254.169.254/latest/meta-data/")
            case "/round":
                self._move("/round")
            case "/folder":
                self._move("/folder/")
            case "/folder/":
                self._give(200, "text/plain", b"a folder")
            case "/docs/away":
                self._move("/docs/../secret")
            case "/docs/on":
                self._move("/docs/page")
            case "/docs/page" | "/secret":
                self._give(200, "text/plain", self.path.encode())
            case _ if self.path.startswith("/echo/"):
                self._give(200, "text/plain", self.requestline.encode())

    def _give(self, status: int, media: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # the client may have enough
            self.wfile.write(data)

    def _move(self, where: str) -> None:
        self.send_response(302)
        self.send_header("Location", where)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def web() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_documents_become_text_images_or_an_error_message(open_box: OpenBox) -> None:
    with web() as url:
        async with open_box(fetches_private=True) as box:
            said = {
                name: await box.run("fetch", url=f"{url}/{name}")
                for name in ("page", "latin", "json", "gone", "picture", "program", "near", "round", "host")
            }
            large = await box.run("fetch", url=f"{url}/large")
    texts = {name: (outcome.text.replace(url, "URL"), outcome.is_error) for name, outcome in said.items()}
    assert texts == {
        "page": ("Nests\n\nTwigs & string.", False),
        "latin": ("déjà", False),
        "json": (r'{"a":[1.50,1E400],"a":"\ud800"}', False),
        "gone": ("[HTTP status 404]\nno such page", True),
        "picture": ("(an image)", False),
        "program": (
            "fetch: URL/program is application/octet-stream (3 bytes); only text and images can be read",
            True,
        ),
        "near": ("URL/near redirects to URL/page. To follow it, fetch that URL.", False),
        "round": ("fetch: URL/round was redirected more than 5 times", True),
        "host": (url.removeprefix("http://"), False),
    }
    assert said["picture"].images == (Image(data=base64.b64encode(PICTURE).decode(), mime_type="image/png"),)
    assert said["page"].raw_output == {"url": f"{url}/page", "status": 200, "media_type": "text/html"}
    assert large.text.endswith(f"x\n[only the first {MAX_BYTES:,} bytes]")


@pytest.mark.long
async def test_a_hostile_document_does_no_harm(open_box: OpenBox) -> None:
    with web() as url:
        async with open_box(fetches_private=True) as box:
            said = {
                name: await box.run("fetch", url=f"{url}/{name}")
                for name in ("no-picture", "charset", "meta", "tangled", "punycode", "reference")
            }
    punycode = said.pop("punycode").text
    assert {name: outcome.text.replace(url, "URL") for name, outcome in said.items()} == {
        "no-picture": "fetch: URL/no-picture is image/png (6 bytes); only text and images can be read",
        "charset": "xn--",
        "meta": "“hi”",
        "tangled": "It begins",
        "reference": "one \ufffd two",
    }
    assert said["no-picture"].images == ()
    assert punycode == "It begins\n\n" + "a" * 3_000_000


async def test_a_large_document_is_converted_like_a_small_one(open_box: OpenBox) -> None:
    with web() as url:
        async with open_box(fetches_private=True) as box:
            heavy = await box.run("fetch", url=f"{url}/heavy")
    assert heavy == Outcome(
        text="It begins", raw_output={"url": f"{url}/heavy", "status": 200, "media_type": "text/html"}
    )


async def test_a_conversion_that_does_not_end_is_stopped(
    open_box: OpenBox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("while True: pass\n")
    monkeypatch.setattr("crow.tools.html.__file__", str(endless))
    monkeypatch.setattr("crow.tools.builtin.fetch.CONVERT_S", 0.1)
    with web() as url:
        async with open_box(fetches_private=True) as box:
            heavy = await box.run("fetch", url=f"{url}/heavy")
    assert heavy == Outcome(
        text=f"fetch: {url}/heavy (300,016 bytes) cannot be converted to text: the conversion took more than 0.1 s",
        is_error=True,
    )


PIECES = (
    *(
        "<pre> ",
        "<pre>\n",
        " ",
        " \n",
        "\t\n",
        "<",
        "</",
        "<!",
        "<!--",
        "<!-- --",
        "<![CDATA[",
        "<?",
        "<a",
        "<a ",
        "<p>",
    ),
    *(
        '<a href="',
        "<a href='",
        "<a href=",
        "<a =",
        '<a "',
        "x='\"",
        "<svg>",
        "</svg>",
        "<svg></p>",
        "<script>",
        "</script",
    ),
    *(
        "<title>",
        "<a></a>",
        "</pre>",
        "&",
        "&#",
        "&#9",
        "&#x1",
        "&amp",
        "&aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "<h6>",
        "[",
        '{"":',
    ),
)


@pytest.mark.long
def test_any_document_is_converted_in_linear_time() -> None:
    program = """
import json, sys
from crow.tools.html import CODECS, document_text
pieces, size = json.loads(sys.argv[1])
for piece in pieces:
    for opening in ("", "<pre>"):
        html = opening + piece * (size // len(piece))
        document_text(html.encode(), "text/html", "")
    document_text((piece * (size // len(piece))).encode(), "application/json", "")
for codec in sorted(CODECS):
    for byte in (b"\\x80", b"\\xff", b"\\x1b", b"\\x8f"):
        document_text(byte * size, "text/plain", codec)
"""
    # A step with quadratic time would run for hours, all of this takes seconds.
    run_script(program, json.dumps([PIECES, 60_000]))


@pytest.mark.parametrize(
    ("charset", "codec"),
    [
        ("utf-8", "utf_8"),
        ("ISO-8859-1", "latin_1"),
        ("x-sjis", "shift_jis"),
        ("ks_c_5601-1987", "euc_kr"),
        ("macintosh", "mac_roman"),
        ("windows-1252", "cp1252"),
        ("punycode", "utf_8"),
        ("idna", "utf_8"),
        ("unicode_escape", "utf_8"),
        ("utf-7", "utf_8"),
        ("rot13", "utf_8"),
        ("zlib", "utf_8"),
        ("../../x", "utf_8"),
        ("", "utf_8"),
    ],
)
def test_an_unknown_charset_counts_as_utf_8(charset: str, codec: str) -> None:
    assert codec_of(charset) == codec


def test_python_has_every_listed_codec() -> None:
    assert [codec for codec in CODECS if not codecs.lookup(codec)._is_text_encoding] == []


async def test_a_redirect_to_another_host_is_not_followed(open_box: OpenBox) -> None:
    with web() as url:
        async with open_box(fetches_private=True) as box:
            far = await box.run("fetch", url=f"{url}/far")
            inside = await box.run("fetch", url=f"{url}/inside")
    assert far.text.endswith("redirects to http://other.example/page. To follow it, fetch that URL.")
    assert "http://169.254.169.254/latest/meta-data/" in inside.text


async def test_private_addresses_are_refused_unless_the_user_allows_them(open_box: OpenBox) -> None:
    with web() as url:
        async with open_box() as box:
            refused = [
                (await box.run("fetch", url=place)).text
                for place in (
                    f"{url}/page",
                    url.replace("127.0.0.1", "localhost") + "/page",
                    url.replace("127.0.0.1", "2130706433") + "/page",
                    "http://[::1]:9/",
                    "http://[::ffff:10.0.0.1]/",
                    "http://0.0.0.0/",
                )
            ]
    assert ["a private address; the user can allow such addresses" in words for words in refused] == [True] * 6


async def test_a_planned_fetch_names_the_normalized_url_for_rules(open_box: OpenBox) -> None:
    async with open_box() as box:
        offer = await box.plan("fetch", url=" https://EXAMPLE.com:443#top ")
        bad = [
            (await box.plan("fetch", url=url)).fault
            for url in (
                "ftp://a/b",
                "https://user:pw@host/",
                "file:///etc/passwd",
                "https://",
                "nonsense",
                "http://a:x/",
            )
        ]
    assert offer == PlannedCall(
        announcement=Announcement(title="Fetch https://example.com/", kind="fetch"),
        access="fetch",
        coverage=Coverage(argument="https://example.com/"),
    )
    assert [fault is not None and fault.startswith("fetch: url is ") for fault in bad] == [True] * 6


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::", False),
        ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
    ],
)
def test_an_address_inside_another_one_is_checked_too(address: str, public: bool) -> None:
    assert is_public(address) is public


def rules(*allow: str, deny: Sequence[str] = ()) -> UrlRules:
    return url_rules(
        "fetch", "ask", user_rules([f"fetch({each})" for each in allow], [f"fetch({each})" for each in deny])
    )


def test_a_redirect_is_followed_on_the_same_host_or_to_https() -> None:
    here = normalize_url("http://a.example/x")
    everything = rules("*")
    assert may_follow(here, normalize_url("https://a.example/y"), everything)
    assert not may_follow(here, normalize_url("http://a.example:8080/"), everything)
    assert not may_follow(normalize_url("https://a.example"), here, everything)
    assert not may_follow(here, normalize_url("http://b.example/x"), everything)


def test_a_redirect_is_judged_by_the_rules_like_a_fetch_of_its_target() -> None:
    here, secure, slash = "http://a.example/x", "https://a.example/x", "http://a.example/x/"
    elsewhere = "http://a.example/secret"
    assert [may_follow(here, target, rules()) for target in (secure, slash, elsewhere)] == [True, True, False]
    denied = rules("*", deny=["http*://a.example/SECRET*", "https://a.example/*"])
    assert [may_follow(here, target, denied) for target in (secure, slash, elsewhere)] == [False, True, False]
    assert not may_follow(here, "http://a.example//%73ecret".replace("%73", "%2573"), denied)
    session = typed_rule("fetch(*)", allow=True, cwd="/w")
    assert may_follow(here, elsewhere, url_rules("fetch", "ask", [session]))
    assert not may_follow(here, elsewhere, url_rules("fetch", "plan", [session]))


async def test_a_redirect_below_an_allowed_path_does_not_lead_out_of_it(open_box: OpenBox) -> None:
    with web() as url:
        async with open_box(fetches_private=True) as box:
            texts = []
            for path in ("docs/on", "docs/away", "folder"):
                plan = replace(await box.plan("fetch", url=f"{url}/{path}"), url_rules=rules(f"{url}/docs/*"))
                fetch = call("fetch", url=f"{url}/{path}")
                texts.append((await box.toolbox.run(fetch, "call_7_0", box.show, planned=plan)).text)
    assert texts == [
        "/docs/page",
        f"{url}/docs/away redirects to {url}/secret. To follow it, fetch that URL.",
        "a folder",
    ]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/echo/a b",
            "/echo/%7euser",
            "/echo/x/../y",
            "/echo/x/%2e%2E/y",
            "/echo\\x\\..\\y",
            '/echo/%zz%41?q=%20 "<ü>',
        ),
        *("/echo/a%2fb", "/echo/ü", "/echo//x", "/echo/[x]|^`{}", "/echo/a?b=../c#d", "/./echo/a\tb\nc"),
    ],
)
async def test_what_is_sent_is_what_rules_and_titles_see(open_box: OpenBox, path: str) -> None:
    with web() as url:
        async with open_box(fetches_private=True) as box:
            plan = await box.plan("fetch", url=url + path)
            sent = await box.run("fetch", url=url + path)
    assert plan.coverage.argument is not None
    assert sent.text == f"GET {plan.coverage.argument.removeprefix(url)} HTTP/1.1"
    assert plan.coverage.argument in plan.announcement.title


def test_a_page_becomes_the_text_that_a_reader_sees() -> None:
    html = """<html><head><title> A  page </title><style>p {}</style><script>steal()</script></head><body>
      <nav><ul><li><a href="https://a.example/">One</a></li><li>Two</li></ul></nav>
      <h2>Part</h2><p>Some   <i>words</i><br>and more.</p>
      <pre>  kept
    as is</pre><table><tr><td>1</td><td>2</td></tr></table><script>x</body></html>"""
    assert page_text(html) == (
        "A page\n\n- One (https://a.example/)\n- Two\n\n## Part\n\nSome words\nand more.\n\n"
        "```\n  kept\n    as is\n```\n\n | 1 | 2"
    )


async def test_an_unknown_host_and_a_refused_connection_are_reported(open_box: OpenBox) -> None:
    async with open_box(fetches_private=True) as box:
        missing = await box.run("fetch", url="http://no-such-host.invalid/")
        closed = await box.run("fetch", url="http://127.0.0.1:1/")
    assert missing == Outcome(text="fetch: there is no host no-such-host.invalid", is_error=True)
    assert closed.is_error
    assert closed.text.startswith("fetch: http://127.0.0.1:1/: ")


def test_a_head_without_an_end_tag_ends_before_the_text() -> None:
    assert page_text("<!doctype html><head><title>T</title><style>p {}</style><h1>A</h1><p>text") == "T\n\n# A\n\ntext"


@pytest.mark.parametrize(
    ("data", "charset"),
    [(b"<meta charset='utf-16'><p>\xc3\xa9", ""), (codecs.BOM_UTF8 + b"<p>\xc3\xa9", "iso-8859-1")],
)
def test_a_wrong_charset_is_recognised(data: bytes, charset: str) -> None:
    assert document_text(data, "text/html", charset) == "\u00e9"
