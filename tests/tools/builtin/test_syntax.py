"""What the model is told of a change that breaks the syntax of a file."""

from __future__ import annotations

import pytest

from crow.tools.builtin.syntax import find_syntax_error


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("settings.py", None, "x = = 1", "It does not parse as Python"),
        ("a.py", None, 'x = f"{{y" +', "It does not parse as Python"),
        ("a.py", "", "(", "It does not parse as Python"),
        ("a.json", "\n", "{", "It does not parse as JSON"),
        ("a.json", "{}", "{", "With this change, it no longer parses as JSON"),
    ],
)
async def test_a_file_that_does_not_parse_is_named(name: str, before: str | None, after: str, words: str) -> None:
    said = await find_syntax_error(name, before, after)
    assert said is not None
    assert said.startswith(words)
    assert "None" not in said


@pytest.mark.parametrize(
    ("name", "after"),
    [("settings.json", "{} // x"), ("a.py", "{{ cookiecutter.name }} ="), ("a.yaml", "{{.x}}: ["), ("a.json", "[{%]")],
)
async def test_new_files_with_comments_and_templates_are_not_checked(name: str, after: str) -> None:
    assert await find_syntax_error(name, None, after) is None
    assert await find_syntax_error(name, "\n", after) is None


async def test_a_zero_byte_is_named_without_a_line() -> None:
    said = await find_syntax_error("a.py", None, "a\0b")
    assert said is None or "line None" not in said
