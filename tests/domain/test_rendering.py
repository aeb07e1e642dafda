"""Titles and questions show every character of a name, also in editors that draw Markdown."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from crow.domain.messages import ToolCall
from crow.domain.rendering import CUT_NOTES_CHARS, SecretMask, code, cut_arguments, cut_calls, in_title
from crow.domain.text import safe, title_line
from tests.support.amounts import examples

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


def test_a_text_that_looks_like_a_key_is_masked_and_words_are_not() -> None:
    mask = SecretMask([])
    assert mask("Bearer +aaaabbbbcccc, sk-0123456789") == "Bearer …, …"
    assert mask("the bearer of bad news about my-sk-learn-notes") == "the bearer of bad news about my-sk-learn-notes"


def test_half_of_a_secrets_base64_is_found_at_the_edges() -> None:
    whole = base64.b64encode(SECRET.encode()).decode()
    assert MASKED.unfinished(f"x {whole[:12]}") == 12
    assert MASKED.cut_off(f"{whole[12:24]} x") == 12


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2K\x00\x7f\x9b", r"\x1b[2K\x00\x7f\x9b"),
        ("a\rb\r\nc\n\td", "a\\rb\r\nc\n\td"),
        ("rm\u202ecod\u2066x\u200f", r"rm\u202ecod\u2066x\u200f"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("z\u200bw\u2060\ufeff\xad\u3164", r"z\u200bw\u2060\ufeff\xad\u3164"),
        ("t\U000e0072\U000e006d\ufe0f\U000e0101", r"t\U000e0072\U000e006d\ufe0f\U000e0101"),
        ("a\u200db\u200c", r"a\u200db\u200c"),
        ("\ud83d", r"\ud83d"),
    ],
)
def test_a_character_that_hides_reorders_or_forges_text_is_escaped(text: str, shown: str) -> None:
    assert safe(text) == shown


def test_text_of_any_script_and_emoji_stay_as_they_are() -> None:
    for text in (
        "größer",
        "你好\u3000世界",
        "می\u200cخواهم",
        "क\u094d\u200dष",
        "👩\u200d💻 ❤\ufe0f\u200d🔥",
        "a\u00a0b €",
    ):
        assert safe(text) == text
    assert safe("م\u200c\u200cم") == r"م\u200c\u200cم", "a run of joiners could carry a message"


@given(st.text(st.one_of(st.characters(), st.sampled_from("\u200d\u202e\x1b\ufe0f\r\n❤a"))))
def test_escaped_text_has_nothing_left_to_escape_and_loses_nothing(text: str) -> None:
    shown = safe(text)
    assert safe(shown) == shown
    assert [char for char in shown if char not in text and not char.isascii()] == []
    assert not set(shown) & set("\x1b\u202e\u2028")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("make test", "make test"),
        ("  make  test \n", "make  test"),
        ("echo a\nrm -rf b", "echo a … (+1 line)"),
        ("\n\necho a\r\n\n b\n c", "echo a … (+2 lines)"),
        ("x" * 250, f"{'x' * 200} … (+50 characters)"),
        ("x" * 250 + "\ny", f"{'x' * 200} … (+50 characters, +1 line)"),
        ("a\tb\u202ec", r"a b\u202ec"),
        (" \n ", ""),
    ],
)
def test_a_title_is_one_line_and_says_how_much_is_left_out(text: str, title: str) -> None:
    assert title_line(text) == title


@given(st.text(), st.integers(20, 60))
def test_a_title_has_no_line_end_and_is_short(text: str, limit: int) -> None:
    title = title_line(text * 5, limit)
    assert len(title) <= limit + 60
    assert len(title.splitlines()) <= 1


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=20), inner, max_size=8),
    max_leaves=30,
)
ARGUMENTS = st.dictionaries(st.text(max_size=40), JSON_VALUES, max_size=40)


@settings(max_examples=examples(20))
@given(ARGUMENTS, st.integers(0, 2_000))
def test_shortened_arguments_are_a_json_object_of_bounded_size(arguments: dict[str, object], chars: int) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    shown = cut_arguments(text, chars, 7)
    assert isinstance(json.loads(shown), dict)
    assert len(shown) <= chars + CUT_NOTES_CHARS
    assert shown == text or len(text) > chars


@pytest.mark.parametrize(
    "arguments",
    [
        {"content": "\x01" * 900_000, "path": "a.txt"},
        {"edits": [{"old_text": "a" * 50, "new_text": "b" * 50}] * 9_000},
        {f"member {number}": number for number in range(50_000)},
        {"x" * 900_000: 1},
    ],
    ids=["control characters", "a list", "many members", "a long name"],
)
def test_huge_arguments_of_every_shape_are_cut(arguments: dict[str, object]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    shown = cut_arguments(text, 10_000, 7)
    assert 3_000 < len(shown) <= 10_000 + CUT_NOTES_CHARS
    assert "left out here; recall with entry 7 gives all of it" in shown
    assert isinstance(json.loads(shown), dict)


def test_only_the_longest_member_of_the_longest_call_is_cut() -> None:
    short = ToolCall(id="a", name="read_file", arguments=json.dumps({"path": "a.txt"}))
    long = ToolCall(id="b", name="write_file", arguments=json.dumps({"path": "b.txt", "content": "x" * 9_000}))
    first, second = cut_calls((short, long), 1_000, 7)
    assert first == short
    shown = json.loads(second.arguments)
    assert shown["path"] == "b.txt"
    head, note, tail = shown["content"].splitlines()
    kept = 1_000 - len(short.arguments) - len("b.txt")
    assert (head, tail) == ("x" * (kept * 2 // 3), "x" * (kept - kept * 2 // 3))
    assert note == f"[... {9_000 - kept} of 9000 characters are left out here; recall with entry 7 gives all of it ...]"
