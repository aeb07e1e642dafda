"""URLs: the normal form, and that no spelling has another one."""

from __future__ import annotations

from urllib.parse import quote

import httpx2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crow.domain.errors import ArgumentError
from crow.tools.urls import join_url, normalize_url

TEXT = st.text(st.sampled_from("ab.%/\\?#:@[]2eEfF5cC0 ü\u2024\u3002\t-~;"), max_size=40)
SEGMENTS = st.lists(st.text("abcXYZ019-_~!$", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (" HTTPS://EXAMPLE.com:443#top\n", "https://example.com/"),
        ("http://a.example./x", "http://a.example/x"),
        ("http://a.example:080/x/../../y/.", "http://a.example/y/"),
        ("http://0x7f.1/", "http://127.0.0.1/"),
        ("http://017700000001:8080", "http://127.0.0.1:8080/"),
        ("http://2130706433?x", "http://127.0.0.1/?x"),
        ("http://１２７.0.0.1/", "http://127.0.0.1/"),
        ("http://[::FFFF:127.0.0.1]/", "http://127.0.0.1/"),
        ("http://[0:0:0:0::1]:80/", "http://[::1]/"),
        ("https://ＥＸ．com／x".replace("／", "/"), "https://ex.com/x"),
        ("https://faß.example/", "https://xn--fa-hia.example/"),
        ("https://ex%61mple.com/%7e%2f%zz", "https://example.com/~%2F%25zz"),
        ("ht\ntp://a.exa\tmple/b", "http://a.example/b"),
        ("https:\\\\a.example\\b\\..\\c?d\\e", "https://a.example/c?d\\e"),
        ("https://a.example?x=../y", "https://a.example/?x=../y"),
        ("https://a.example/ü\ud800", "https://a.example/%C3%BC%3F"),
    ],
)
def test_spellings_have_one_normal_form(text: str, url: str) -> None:
    assert normalize_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "a.example", "//a.example", "ftp://a.example", "http:a.example", "http:/a.example", "http:///a.example"),
        *("http://", "http://a@b.example", "http://@b.example", "http://a:b@c.example", "http://a.example:x"),
        *(
            "http://a.example:0",
            "http://a.example:65536",
            "http://a.example:٨٠",
            "http://a..example",
            "http://.example",
        ),
        *("http://256.0.0.1", "http://1.2.3.4.5", "http://a.example.1", "http://09", "http://4294967296"),
        *("http://[::1", "http://::1", "http://[::1].evil.example", "http://[::1%25lo]", "http://[127.0.0.1]"),
        *("http://a%2fb", "http://a%40b", "http://a b", "http://℀.example", "http://a%ff", "http://" + "a" * 64),
        *("http://" + "é" * 300 + ".example", "http://a.example/" + "x" * 9_000, "http://a.example/..%2fx"),
        *("http://a.example/%252e%252e/x", "http://a.example/..;/x", "http://a.example/%5c..%5cx"),
        "http://a.example/%" + "25" * 20 + "2e",
    ],
)
def test_what_clients_and_servers_read_differently_is_no_url(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^url "):
        normalize_url(text)


@given(TEXT)
@example("a.example/;")
def test_the_normal_form_is_final_and_sent_as_it_is(text: str) -> None:
    try:
        url = normalize_url(f"http://{text}")
    except ArgumentError:
        return
    assert normalize_url(url) == url
    assert str(httpx2.URL(url)) == url
    assert join_url("http://base.example/x/y", url) == url


@given(SEGMENTS, st.data())
def test_any_spelling_of_a_path_has_the_same_normal_form(segments: list[str], data: st.DataObject) -> None:
    path = ""
    for segment in segments:
        path += data.draw(st.sampled_from(["/", "/./", "/x/../", "/%2E/", "/x/.%2e/", "\\"]))
        for char in segment:
            escape = f"%{ord(char):02x}" if char.isalnum() or char in "-_~" else char
            path += data.draw(st.sampled_from([char, escape, escape.upper() if escape != char else char]))
    assert normalize_url(f"http://a.example{path}") == "http://a.example/" + "/".join(segments)


@pytest.mark.parametrize(
    ("reference", "url"),
    [
        ("../c", "https://a.example/c"),
        ("\\\\b.example\\x", "https://b.example/x"),
        ("/\t/b.example/x", "https://b.example/x"),
        ("//b.example", "https://b.example/"),
        ("?q=" + quote("ü"), "https://a.example/x/y?q=%C3%BC"),
    ],
)
def test_a_reference_is_joined_as_browsers_do(reference: str, url: str) -> None:
    assert join_url("https://a.example/x/y", reference) == url


@pytest.mark.parametrize("reference", ["javascript:alert(1)", "http://[::1", "file:///etc/passwd", "//user@b.example"])
def test_a_reference_to_anything_else_is_an_error(reference: str) -> None:
    with pytest.raises(ArgumentError, match=r"^url "):
        join_url("https://a.example/x/y", reference)
