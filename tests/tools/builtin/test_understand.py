"""Calls that were written for the tools of other agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crow.domain.messages import ToolCall
from crow.tools import builtin
from crow.tools.builtin.shell import MAX_TIMEOUT_S
from crow.tools.builtin.understand import understood
from tests.tools.conftest import OpenBox

SPECS = {spec.name: spec for spec in builtin.SPECS}


def meant(name: str, arguments: dict[str, Any], *others: str) -> tuple[str, dict[str, Any]]:
    """What crow understands of a call, with other tools on offer beside its own."""
    call = understood(ToolCall(id="c", name=name, arguments=json.dumps(arguments)), {*SPECS, *others}, SPECS)
    return call.name, json.loads(call.arguments)


@pytest.mark.parametrize(
    ("name", "given", "tool", "taken"),
    [
        ("Read", {"file_path": "a", "offset": 5, "limit": 2}, "read_file", {"path": "a", "line": 5, "limit": 2}),
        ("read_file", {"filePath": "a", "offset": 0}, "read_file", {"path": "a", "line": 1}),
        ("view", {"path": "a", "view_range": [3, 7]}, "read_file", {"path": "a", "line": 3, "limit": 5}),
        ("read_file", {"path": "a", "start_line": 3, "end_line": 4}, "read_file", {"path": "a", "line": 3, "limit": 2}),
        (
            "Edit",
            {"file_path": "a", "old_string": "x", "new_string": "y", "replace_all": True},
            "edit_file",
            {"path": "a", "old_text": "x", "new_text": "y", "all": True},
        ),
        (
            "str_replace_editor",
            {"command": "str_replace", "path": "a", "old_str": "x", "new_str": "y"},
            "edit_file",
            {"path": "a", "old_text": "x", "new_text": "y"},
        ),
        (
            "str_replace_based_edit_tool",
            {"command": "create", "path": "a", "file_text": "x"},
            "write_file",
            {"path": "a", "content": "x"},
        ),
        ("Bash", {"command": "ls", "timeout": 120_000}, "shell", {"command": "ls", "timeout_s": 120}),
        ("bash", {"command": "ls", "timeout": 60}, "shell", {"command": "ls", "timeout_s": 60}),
        ("exec_command", {"cmd": "ls", "workdir": "."}, "shell", {"command": "ls"}),
        ("shell", {"command": ["bash", "-lc", "ls | wc"]}, "shell", {"command": "ls | wc"}),
        ("shell", {"command": "ls", "timeout_ms": 500}, "shell", {"command": "ls", "timeout_s": 1}),
        ("shell", {"command": ["git", "log", "a b"]}, "shell", {"command": "git log 'a b'"}),
        ("bash", {"command": "make", "workdir": "a b"}, "shell", {"command": "cd 'a b' && { make\n}"}),
        ("bash", {"command": "make", "cwd": "-"}, "shell", {"command": "cd ./- && { make\n}"}),
        (
            "bash",
            {"command": "make", "cwd": "a", "workdir": "b"},
            "shell",
            {"command": "make", "cwd": "a", "workdir": "b"},
        ),
        ("bash", {"command": "ls", "timeout": float("inf")}, "shell", {"command": "ls", "timeout_s": MAX_TIMEOUT_S}),
        ("bash", {"command": "ls", "timeout": 10**400}, "shell", {"command": "ls", "timeout_s": MAX_TIMEOUT_S}),
        ("read", {"path": "a", "start_line": 0, "end_line": 0}, "read_file", {"path": "a", "line": 1, "end_line": 0}),
        (
            "run_terminal_cmd",
            {"command": "ls", "is_background": False, "explanation": "look"},
            "shell",
            {"command": "ls", "background": False, "explanation": "look"},
        ),
        ("Grep", {"pattern": "x", "include": "*.py"}, "grep", {"pattern": "x", "glob": "*.py"}),
        ("grep", {"pattern": "x", "-i": True}, "grep", {"pattern": "x", "ignore_case": True}),
        ("Glob", {"pattern": "*.py"}, "list_files", {"pattern": "*.py"}),
        (
            "todo",
            {"items": [{"step": "a", "title": "b", "status": "todo"}]},
            "update_plan",
            {"items": [{"status": "pending"}]},
        ),
        (
            "TodoWrite",
            {"todos": [{"content": "a", "status": "completed", "activeForm": "A"}, {"step": "b", "status": "done"}]},
            "update_plan",
            {"items": [{"content": "a", "status": "completed"}, {"content": "b", "status": "completed"}]},
        ),
    ],
)
def test_calls_of_other_agents_are_understood(
    name: str, given: dict[str, Any], tool: str, taken: dict[str, Any]
) -> None:
    assert meant(name, given) == (tool, taken)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("read_file", {"path": "a", "file_path": "b"}),
        ("read_file", {"file_path": "a", "filename": "b"}),
        ("str_replace_editor", {"command": "insert", "path": "a", "insert_line": 3, "new_str": "x"}),
        ("deploy", {"file_path": "a"}),
        ("read_file", {"path": "a", "line": 2}),
    ],
)
def test_a_call_that_is_clear_or_has_no_clear_meaning_stays_as_it_is(name: str, given: dict[str, Any]) -> None:
    assert meant(name, given) == (name, given)


def test_a_tool_of_a_server_keeps_its_name_and_arguments() -> None:
    assert meant("Edit", {"file_path": "a"}, "Edit") == ("Edit", {"file_path": "a"})


def test_broken_arguments_stay_as_they_are() -> None:
    for text in ("{", "[]", "[" * 100_000):
        call = ToolCall(id="c", name="Read", arguments=text)
        assert understood(call, set(SPECS), SPECS) is call


async def test_arguments_that_a_tool_does_not_have_are_ignored_with_a_note(open_box: OpenBox, root: Path) -> None:
    (root / "a.txt").write_text("one\n")
    async with open_box() as box:
        shown = await box.run("read_file", path="a.txt", encoding="utf-8")
    assert shown.text == "one\n[ignored: encoding; read_file takes only path, line, limit]"


async def test_places_as_programs_print_them_can_be_read(open_box: OpenBox, root: Path) -> None:
    (root / "src").mkdir()
    (root / "src" / "app.py").write_text("one\ntwo\nthree\n")
    (root / "odd:2").write_text("odd\n")
    async with open_box() as box:
        shown = {
            path: (await box.run("read_file", path=path)).text
            for path in ("src/app.py:2", "src/app.py:2-2", "@src/app.py", "odd:2", "app.py", "lib/app.py")
        }
        planned = await box.plan("read_file", path="src/app.py:2-2")
    assert shown == {
        "src/app.py:2": "[lines 2-3 of 3]\ntwo\nthree",
        "src/app.py:2-2": "[lines 2-2 of 3]\ntwo",
        "@src/app.py": "one\ntwo\nthree",
        "odd:2": "odd",
        "app.py": "read_file: app.py does not exist; similar: src/app.py",
        "lib/app.py": "read_file: lib/app.py does not exist; neither does the directory lib; there is src/app.py",
    }
    assert (planned.announcement.title, planned.touched.rule_paths[-1]) == ("Read src/app.py lines 2-2", "src/app.py")


PATCH = "*** Begin Patch\n*** Delete File: a\n*** End Patch"


def test_a_patch_that_is_not_json_is_understood_if_it_is_whole() -> None:
    broken = ToolCall(id="c", name="apply_patch", arguments="{}", fault="not JSON", raw=f"{PATCH}\n")
    whole = understood(broken, SPECS, SPECS)
    assert (json.loads(whole.arguments), whole.fault) == ({"input": PATCH}, None)
    for cut in (PATCH[:-5], PATCH[4:], None):
        call = ToolCall(id="c", name="apply_patch", arguments="{}", fault="not JSON", raw=cut)
        assert understood(call, SPECS, SPECS) == call
    assert meant("ApplyPatch", {"patch": PATCH}) == ("apply_patch", {"input": PATCH})
    command = {"command": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}
    assert meant("shell", command) == ("shell", command)
