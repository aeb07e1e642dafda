"""Patches of several files in a session: questions, rules, hooks, undo, and what the model is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crow.agent.compaction.checkpoint import files_changed
from crow.agent.turns.prompt import with_edit_tool
from crow.domain.entries import Prompt, ToolResult
from crow.tools.builtin import SPECS
from crow.tools.mcp.client import open_toolbox
from tests.agent.harness import NoteTaker, opened, text
from tests.agent.history.test_rewind import working
from tests.agent.subagents.test_subagents import Casting, running
from tests.agent.test_hooks import configured, program
from tests.support.hooks import python_hooks
from tests.support.scripted_model import Say, ScriptedModel, call

PATCH = """\
*** Begin Patch
*** Update File: a.txt
@@
-was
+is
*** Add File: b.txt
+new
*** Delete File: c.txt
*** End Patch
"""


def patches(*inputs: str) -> tuple[Say, ...]:
    calls = tuple(call("apply_patch", f"c{number}", input=each) for number, each in enumerate(inputs))
    return Say(calls=calls), Say(text=["done"])


def written(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    (place / "a.txt").write_text("was\n")
    (place / "c.txt").write_text("c\n")
    return place


def files(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.glob("?.txt")}


async def test_undo_and_redo_restore_every_file_of_a_patch(tmp_path: Path) -> None:
    written(tmp_path)
    async with working(tmp_path, patches(PATCH)) as run:
        await run.session.prompt(text("go"))
        (result,) = run.client.stored(ToolResult)
        assert files(tmp_path) == {"a.txt": "is\n", "b.txt": "new\n"}
        assert files_changed(result, "{}") == tuple(str(tmp_path / f"{name}.txt") for name in "abc")
        await run.session.prompt(text("/undo files"))
        assert files(tmp_path) == {"a.txt": "was\n", "c.txt": "c\n"}
        await run.session.prompt(text("/redo files"))
        assert files(tmp_path) == {"a.txt": "is\n", "b.txt": "new\n"}


async def test_always_allow_covers_patches_here_and_the_one_file_elsewhere_that_was_shown(tmp_path: Path) -> None:
    work, outside = written(tmp_path / "work"), tmp_path / "outside.txt"
    outside.write_text("old\n")
    away = f"*** Update File: {outside}\n@@\n-old\n+new\n*** Update File: a.txt\n@@\n-is\n+was\n"
    other = f"*** Update File: a.txt\n@@\n-was\n+x\n*** Add File: {tmp_path}/more.txt\n+x\n"
    model = Casting(go=[*(patches(each)[0] for each in (PATCH, away, other)), Say(text=["done"])])
    client = NoteTaker("allow_always", "allow_always", "reject_once")
    async with running(tmp_path, model, client=client) as run:
        await run.session.prompt(text("go"))
    assert client.questions[0].always == "every apply_patch call in this directory and session"
    assert all(question.always.startswith(f"apply_patch of `{str(tmp_path)[:20]}") for question in client.questions[1:])
    assert [question.rule for question in client.questions][1:] == [
        f"apply_patch({outside})",
        f"apply_patch({tmp_path}/more.txt)",
    ]
    assert outside.read_text() == "new\n"
    assert files(work) == {"a.txt": "was\n", "b.txt": "new\n"}
    assert not (tmp_path / "more.txt").exists()


async def test_a_deny_rule_about_one_file_refuses_the_whole_patch(tmp_path: Path) -> None:
    work = written(tmp_path / "work")
    before = files(work)
    (work / "hard.txt").hardlink_to(work / "c.txt")
    model = Casting(go=[*patches(PATCH)])
    async with running(tmp_path, model, mode="auto", deny=("write_file(hard.txt)",)) as run:
        await run.session.prompt(text("go"))
        (result,) = run.client.stored(ToolResult)
    assert result.is_error
    assert "The user has forbidden this call of apply_patch" in result.text
    assert files(work) == before


@pytest.mark.parametrize(
    ("fields", "is_called"),
    [({"paths": ("c.txt",)}, True), ({"paths": ("d.txt",)}, False), ({"tools": ("edit_file",)}, True)],
)
async def test_a_hook_about_one_file_gets_the_whole_patch(
    tmp_path: Path, fields: dict[str, Any], is_called: bool
) -> None:
    work = written(tmp_path / "work")
    source = "open('seen', 'w').write(chr(10).join(event['paths']))"
    hooks = configured(program(tmp_path, source, event="before_tool", **fields))
    model = Casting(go=[*patches(PATCH)])
    async with running(tmp_path, model, mode="auto", hooks=hooks) as run:
        await run.session.prompt(text("go"))
    seen = work / "seen"
    assert seen.exists() == is_called
    if is_called:
        assert seen.read_text().split() == [str(work / f"{name}.txt") for name in "abc"]


async def test_what_a_hook_changes_in_any_file_of_a_patch_is_undone_with_it(tmp_path: Path) -> None:
    work = written(tmp_path / "work")

    def format_all(event: dict[str, Any]) -> None:
        for path in event["paths"]:
            if Path(path).exists():
                Path(path).write_text("formatted\n")

    model = Casting(go=[*patches(PATCH)])
    async with running(tmp_path, model, mode="auto", hooks=python_hooks({"after_tool": [format_all]})) as run:
        await run.session.prompt(text("go"))
        assert files(work) == {"a.txt": "formatted\n", "b.txt": "formatted\n"}
        await run.session.prompt(text("/undo files"))
        assert files(work) == {"a.txt": "was\n", "c.txt": "c\n"}


async def test_a_model_is_offered_one_of_the_edit_tools_and_may_call_the_other(tmp_path: Path) -> None:
    written(tmp_path)
    edit = Say(calls=(call("edit_file", "e", path="a.txt", old_text="is", new_text="now"),))
    model = ScriptedModel(patches(PATCH)[0], edit, Say(text=["done"]))
    async with opened(tmp_path, model, mode="auto", open_tools=open_toolbox) as run:
        await run.session.prompt(text("go"))
        (prompt,) = run.client.stored(Prompt)
        assert [result.is_error for result in run.client.stored(ToolResult)] == [False, False]
    names = [tool.name for tool in prompt.tools]
    assert "edit_file" in names
    assert "apply_patch" not in names
    assert files(tmp_path)["a.txt"] == "now\n"


def test_the_other_edit_tool_is_left_out_only_if_both_are_there() -> None:
    both = {tool.name for tool in with_edit_tool(SPECS, "apply_patch")}
    assert ("apply_patch" in both, "edit_file" in both) == (True, False)
    alone = [tool for tool in SPECS if tool.name != "apply_patch"]
    assert with_edit_tool(alone, "apply_patch") == tuple(alone)
    (spec,) = [tool for tool in SPECS if tool.freeform is not None]
    assert list(spec.input_schema["properties"]) == ["input"]  # type: ignore[call-overload]


async def test_undo_and_redo_of_a_deleted_program_keep_its_mode(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "c.txt").chmod(0o751)
    async with working(tmp_path, patches(PATCH)) as run:
        await run.session.prompt(text("go"))
        await run.session.prompt(text("/undo files"))
        assert files(tmp_path) == {"a.txt": "was\n", "c.txt": "c\n"}
        assert (tmp_path / "c.txt").stat().st_mode & 0o777 == 0o751
        await run.session.prompt(text("/redo files"))
        assert not (tmp_path / "c.txt").exists()
        await run.session.prompt(text("/undo files"))
        assert (tmp_path / "c.txt").stat().st_mode & 0o777 == 0o751
