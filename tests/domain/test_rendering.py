"""Titles show every character of a name, also in editors that draw Markdown."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from crow.domain.rendering import SecretMask, code, in_title

MARKDOWN = MarkdownIt("commonmark").enable("strikethrough")
TEXTS = st.text(
    st.one_of(st.sampled_from("*_`~<>[]()\\&;#!a1 ./"), st.characters(codec="utf-8", categories=["L", "P"]))
)


def drawn(title: str) -> str:
    """What a reader of the title as Markdown sees."""
    return "".join(
        piece.content
        for token in MARKDOWN.parse(title)
        for piece in token.children or ()
        if piece.type in ("text", "code_inline", "html_inline")
    )


def test_a_plain_name_stays_as_it_is() -> None:
    names = ["src/app.py", "snake_case_name.py", "http://127.0.0.1:9/a_b?c=1&d=2", "app/[slug]/page.tsx", "sleep 60"]
    assert [in_title(name) for name in names] == names


def test_text_that_markdown_would_change_is_in_backticks() -> None:
    assert in_title("src/__init__.py") == "`src/__init__.py`"
    assert in_title("**/*_*.py") == "`**/*_*.py`"
    assert in_title("C:\\work\\*.py") == "`C:\\work\\*.py`"
    assert in_title("a`b") == "`` a`b ``"


@given(TEXTS)
def test_every_character_of_a_name_is_drawn(text: str) -> None:
    name = f"/{text}.py"
    assert drawn(f"Read {in_title(name)} lines 1-2") == f"Read {name} lines 1-2"
    assert drawn(f"Search {code(name)}") == f"Search {name}"


SECRET = "sk-nest-0123456789"
MASKED = SecretMask([SECRET, "abc"], mask="[hidden]", is_guessing=False)


def test_only_the_given_secrets_are_masked_in_results() -> None:
    text = f"{SECRET}{SECRET} abc sk-other-0123456789 Bearer token"
    assert MASKED(text) == "[hidden][hidden] abc sk-other-0123456789 Bearer token"


@given(st.binary(max_size=8), st.binary(max_size=8), st.booleans())
def test_a_secret_is_masked_wherever_base64_encodes_it(before: bytes, after: bytes, is_for_urls: bool) -> None:
    encode = base64.urlsafe_b64encode if is_for_urls else base64.b64encode
    whole = encode(before + SECRET.encode() + after).decode()
    masked = MASKED(whole)
    rest = masked.split("[hidden]")
    assert len(rest) == 2
    assert len(whole) - sum(map(len, rest)) >= 22, "at most two of 24 characters are shared with other bytes"


@given(st.text(max_size=5), st.integers(0, len(SECRET) - 1))
def test_the_beginning_and_the_end_of_a_secret_at_the_edges_are_found(other: str, size: int) -> None:
    beginning, end = SECRET[:size], SECRET[len(SECRET) - size :]
    expected = size if size >= 4 else 0
    assert MASKED.unfinished(f"{other}x {beginning}") == expected
    assert MASKED.cut_off(f"{end} x{other}") == expected
