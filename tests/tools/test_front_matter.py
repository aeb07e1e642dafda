"""Front matter is read as YAML, or as plain text if it is not YAML, and never blocks a session."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.tools.front_matter import MAX_CHARS, front_matter

BODY = "\nText.\n"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("plain words", "plain words"),
        ("words # and a comment", "words"),
        ("C# and a#b", "C# and a#b"),
        (">\n  folded\n  words\n\n  of two paragraphs", "folded words\nof two paragraphs"),
        ("|\n  line\n  line", "line\nline"),
        (">-  # as one line\r\n  folded\r\n  words\r", "folded words"),
        ("'it''s # quoted: text'", "it's # quoted: text"),
        ('"a \\"caf\\u00e9\\"" # quoted', 'a "café"'),
        ("on\n  several\n  lines", "on several lines"),
        ("", ""),
        ("yes", "yes"),
        ("2026-11-01", "2026-11-01"),
        ("007", "007"),
        # not text in YAML, or not YAML: as written
        ("Use this: when it fits", "Use this: when it fits"),
        ("[file] [line]", "[file] [line]"),
        ("[file]", "[file]"),
        ("\n  - one\n  - two", "- one - two"),
        ("@me, `code`", "@me, `code`"),
        (">\n  a\x07bell\n  rings", "a\x07bell rings"),
        ("!!python/object/apply:os.system [id]", "!!python/object/apply:os.system [id]"),
        ("*nowhere", "*nowhere"),
        ("&a [*a, *a]", "&a [*a, *a]"),
        ("{<<: &a {<<: [*a, *a]}}", "{<<: &a {<<: [*a, *a]}}"),
    ],
)
def test_a_value_is_read_as_its_author_meant_it(written: str, value: str) -> None:
    text = f"---\nname: x\ndescription: {written}\nmodel: [y\n---{BODY}"
    fields, end = front_matter(text, ("name", "description", "missing"))
    assert fields == {"name": "x", "description": value}
    assert text[end:] == BODY[1:]


@pytest.mark.parametrize(
    "text", ["", "no front matter", "---\nname: x", "--- x\n---\n", f"---\n{'#' * MAX_CHARS}\n---\n"]
)
def test_a_file_without_front_matter_is_only_text(text: str) -> None:
    assert front_matter(text, ("name",)) == ({}, 0)


def test_a_byte_order_mark_empty_front_matter_and_quoted_keys_are_accepted() -> None:
    assert front_matter("\ufeff---\r\n'name' : x\r\n---\r\nText", ("name",)) == ({"name": "x"}, 23)
    assert front_matter("---\n---\nText", ("name",)) == ({}, 8)
    assert front_matter("---\nname: a\nname: b\n---\n", ("name",)) == ({"name": "b"}, 24)


SOME = 7_000


@pytest.mark.parametrize(
    "value",
    [
        "[" * SOME,
        "{" * SOME,
        f"x\n? {'[' * SOME}",
        f"'x'\n  {'[' * SOME}",
        "\n" + " ? a\n" * (SOME // 5),
        "\n " + "- " * (SOME // 2),
        ">\n" + " a\n\n" * (SOME // 4),
        '"' + "\\u0041" * (SOME // 6),
        " " * SOME + "x",
        "# c\n" * (SOME // 4),
        "[&a x," + "*a," * (SOME // 3) + "]",
        ">" + " " * SOME + "x",
        "? a\n " * 900,
        "\n " + "- " * 1_900,
    ],
)
def test_a_hostile_value_is_read_in_linear_time(value: str) -> None:
    """Quadratic time would take minutes."""
    text = f"---\ndescription: {value}\n---\n"
    for _ in range(10):
        fields, end = front_matter(text, ("name", "description"))
    assert (list(fields), end) == (["description"], len(text))


@given(st.text(alphabet=st.sampled_from("-\n\r :>|'\"#[]{}&*!?ab\t\ufeff\0\u2028\ud800"), max_size=200))
def test_any_file_is_read_without_an_error(text: str) -> None:
    for written in (text, f"---\nname: {text}\n---\nBody"):
        fields, end = front_matter(written, ("name", "a"))
        assert 0 <= end <= len(written)
        assert all(isinstance(value, str) for value in fields.values())
