from __future__ import annotations

import pytest

from crow.domain.errors import ArgumentError
from crow.tools import builtin
from crow.tools.builtin.tool import check, parse

SCHEMAS = {name: tool.spec.input_schema for name, tool in builtin.TOOLS.items()}


@pytest.mark.parametrize(
    ("tool", "given", "taken"),
    [
        ("read_file", {"path": "a"}, {"path": "a"}),
        ("read_file", {"path": "a", "line": "5", "limit": 3.0}, {"path": "a", "line": 5, "limit": 3}),
        ("read_file", {"path": "a", "line": None}, {"path": "a"}),
        (
            "edit_file",
            {"path": "a", "old_text": "", "new_text": "x", "all": "true"},
            {"path": "a", "old_text": "", "new_text": "x", "all": True},
        ),
        ("update_plan", {"items": []}, {"items": []}),
    ],
)
def test_arguments_are_converted_to_the_types_of_the_schema(
    tool: str, given: dict[str, object], taken: dict[str, object]
) -> None:
    assert check(tool, SCHEMAS[tool], given) == taken


@pytest.mark.parametrize(
    ("tool", "given", "words"),
    [
        ("read_file", {"path": "a", "line": "x"}, 'read_file: line is "x"; expected a whole number from 1'),
        ("read_file", {"path": "a", "line": "--5"}, 'read_file: line is "--5"; expected a whole number from 1'),
        ("read_file", {"path": "a", "line": 0}, "read_file: line is 0; expected a whole number from 1"),
        ("read_file", {"path": "a", "line": True}, "read_file: line is true; expected a whole number from 1"),
        ("read_file", {"path": "a", "line": 1.5}, "read_file: line is 1.5; expected a whole number from 1"),
        ("read_file", {}, "read_file: path is missing; expected text that is not empty"),
        ("read_file", {"path": None}, "read_file: path is null; expected text that is not empty"),
        ("read_file", {"path": ["a"]}, 'read_file: path is ["a"]; expected text that is not empty'),
        ("read_file", {"name": "a"}, "read_file: path is missing; expected text that is not empty, not name"),
        (
            "shell",
            {"command": "ls", "timeout_s": 9999},
            "shell: timeout_s is 9999; expected a whole number from 1 to 3600",
        ),
        (
            "edit_file",
            {"path": "a", "old_text": "", "new_text": "", "all": 1},
            "edit_file: all is 1; expected true or false",
        ),
        (
            "write_file",
            {"path": "a", "content": "ab\ud83d"},
            (
                "write_file: content holds half a surrogate pair, \\ud83d, at character 2; "
                "expected text that UTF-8 can encode"
            ),
        ),
        (
            "update_plan",
            {"items": [{"content": "x", "status": "pending"}, {"content": "y", "status": "done"}]},
            'update_plan: items[1].status is "done"; expected one of pending, in_progress, completed',
        ),
        (
            "update_plan",
            {"items": [{"content": "x"}]},
            "update_plan: items[0].status is missing; expected one of pending, in_progress, completed",
        ),
        (
            "update_plan",
            {"items": "x" * 200},
            (
                f'update_plan: items is "{"x" * 79}…; expected a list (at most 100 items, each an object with '
                "content, status, priority)"
            ),
        ),
    ],
)
def test_a_wrong_argument_is_reported_with_its_value_and_what_is_expected(
    tool: str, given: dict[str, object], words: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        check(tool, SCHEMAS[tool], given)
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "grep: the arguments are [1]; expected a JSON object"),
        ('{"a": ', "grep: the arguments are not valid JSON: Expecting value: line 1 column 7 (char 6)"),
        ("[" * 100_000, "grep: the arguments are nested too deeply; expected at most 200 levels"),
    ],
)
def test_arguments_that_are_not_an_object_are_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse("grep", text)
    assert str(error.value) == words


def test_no_arguments_are_an_empty_object() -> None:
    assert parse("list_files", "") == {}
