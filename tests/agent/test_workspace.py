"""What is said about a workspace that is new to the user, and about what confines commands."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from crow.agent.instructions import read_instructions
from crow.agent.workspace import (
    TRY,
    WorkspaceContents,
    describe_sandbox,
    describe_workspace,
    inspect_workspace,
    notice_of_sandbox,
    notice_of_workspace,
)
from crow.domain.events import NoticeShown
from crow.tools import AgentKind, SandboxStatus, SkillInfo

MISSING = "bubblewrap is not installed."
SETTINGS = '`[sandbox]` in config.toml changes this: `enabled` is "auto"'

CHECK = "Check this before you trust the workspace; `/permissions` shows more."


def readable(_path: Path) -> bool:
    return True


def test_what_concerns_an_agent_is_found_without_opening_a_file(tmp_path: Path) -> None:
    place = tmp_path / "work"
    for name in (".crow/skills/one", ".crow/skills/empty", ".claude/skills/two", ".claude/commands"):
        (place / name).mkdir(parents=True)
    for name in (".crow/skills/one/SKILL.md", ".claude/skills/two/SKILL.md", ".mcp.json", "AGENTS.md"):
        (place / name).write_text("12345")
    (tmp_path / "AGENTS.md").write_text("123")
    (tmp_path / ".git").mkdir()
    (tmp_path / "CLAUDE.md").write_text("1234")
    os.mkfifo(place / "CLAUDE.md")  # opening it would wait for ever
    (place / "sub").mkdir()
    (place / "sub" / "AGENTS.md").symlink_to("../../AGENTS.md")
    (place / ".agents").symlink_to("loop")
    (place / "loop").symlink_to(".agents")
    found = inspect_workspace(str(place), readable)
    assert found.instructions == ((str(place / "AGENTS.md"), 5), (str(tmp_path / "AGENTS.md"), 3))
    assert found.left_out == ((str(tmp_path / "CLAUDE.md"), "AGENTS.md is used instead"),)
    below = inspect_workspace(str(place / "sub"), readable)
    assert below.instructions == found.instructions, "a link that leads out of its directory does not count"
    assert (found.skills, found.ignored) == (2, (".claude/commands", ".mcp.json"))


def test_huge_folders_and_impossible_paths_cost_nothing(tmp_path: Path) -> None:
    skills = tmp_path / ".crow" / "skills"
    for number in range(300):
        (skills / str(number)).mkdir(parents=True)
        (skills / str(number) / "SKILL.md").write_text("x")
    (tmp_path / "AGENTS.md").mkdir()
    assert inspect_workspace(str(tmp_path), readable).skills == 200
    for cwd in ("/nowhere", "/" + "x" * 5000, "/a\0b"):
        assert inspect_workspace(cwd, readable) == WorkspaceContents(cwd=cwd)


def test_instructions_that_the_model_does_not_get_are_named_with_the_reason(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    place = shared / "place"
    place.mkdir(parents=True)
    for folder in (tmp_path, shared, place):
        (folder / "AGENTS.md").write_text("12345")
    (tmp_path / ".git").mkdir()
    shared.chmod(0o1777)
    found = inspect_workspace(str(place), lambda path: path.parent != tmp_path)
    assert found.instructions == ((str(place / "AGENTS.md"), 5),)
    reasons = ("all users can write to its directory", "a rule forbids reading it, or it may hold keys")
    folders = (shared, tmp_path)
    assert found.left_out[:2] == tuple(
        (str(folder / "AGENTS.md"), reason) for folder, reason in zip(folders, reasons, strict=True)
    )
    first, second = (f"`{path}` ({reason})" for path, reason in found.left_out[:2])
    assert f"as text. It does not get {first}, {second}." in notice_of_workspace(found).description
    told = describe_workspace(found, (), is_known=True)
    assert told[2] == f"- `{shared}/AGENTS.md`: left out, because {reasons[0]}"
    text = read_instructions(place, lambda path: path.parent != tmp_path).text
    assert [reason in text for reason in reasons] == [True, True], "the model is told the same"
    (place / "AGENTS.md").chmod(0o666)
    alone = inspect_workspace(str(place), readable)
    assert alone.left_out[0] == (str(place / "AGENTS.md"), "all users can write to it")
    nothing = WorkspaceContents(cwd="/w", left_out=(("/w/AGENTS.md", "it belongs to another user, with the id 7"),))
    assert nothing.concerns_agents
    assert notice_of_workspace(nothing).description == (
        f"The model does not get `/w/AGENTS.md` (it belongs to another user, with the id 7). {CHECK}"
    )


def test_a_new_workspace_is_named_with_what_counts_in_it() -> None:
    contents = WorkspaceContents(
        cwd="/w", instructions=(("/w/AGENTS.md", 1234),), skills=2, ignored=(".mcp.json", ".claude/commands")
    )
    assert notice_of_workspace(contents) == NoticeShown(
        severity="info",
        title="You have not worked in `/w` with crow before",
        description="The model gets `/w/AGENTS.md` (1,234 bytes) as text. "
        "There are 2 skills; crow asks before the model may load them. Ignored: `.mcp.json`, `.claude/commands`; "
        "a workspace cannot set servers, commands, endpoints, keys or permissions. "
        f"{CHECK}",
    )
    assert notice_of_workspace(WorkspaceContents(cwd="/w")).description == ""
    skills = (
        SkillInfo(name="mine", description="", source="/home/SKILL.md"),
        SkillInfo(name="deploy", description="", source="/w/.crow/skills/deploy/SKILL.md", is_from_workspace=True),
    )
    assert describe_workspace(contents, skills, is_known=False) == [
        "The workspace is `/w`, where you have not worked with crow before. For an agent, it holds:",
        "- `/w/AGENTS.md` (1,234 bytes): the model gets it as text",
        "- skill `deploy` (`/w/.crow/skills/deploy/SKILL.md`): crow asks before it is loaded",
        "- `.mcp.json`: ignored; a workspace cannot set servers, commands, endpoints, keys or permissions",
        "- `.claude/commands`: ignored; a workspace cannot set servers, commands, endpoints, keys or permissions",
    ]
    assert describe_workspace(WorkspaceContents(cwd="/w"), (), is_known=True) == [
        "The workspace is `/w`. It holds nothing for an agent."
    ]


def test_kinds_of_subagents_of_a_workspace_are_named(tmp_path: Path) -> None:
    for name in ("a.md", "b.md", "c.txt"):
        (tmp_path / ".claude/agents").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".claude/agents" / name).write_text("x")
    contents = inspect_workspace(str(tmp_path), readable)
    assert contents == WorkspaceContents(cwd=str(tmp_path), agents=2)
    assert contents.concerns_agents
    words = f"There are 2 kinds of subagents; crow asks before the model may use them. {CHECK}"
    assert notice_of_workspace(contents).description == words
    agents = (
        AgentKind(name="mine", source="/home/mine.md"),
        AgentKind(name="a", source="/w/a.md", is_from_workspace=True),
        AgentKind(name="b", source="/w/b.md", is_from_workspace=True, problem="it is broken"),
    )
    assert describe_workspace(WorkspaceContents(cwd="/w"), (), agents, is_known=True)[1:] == [
        "- subagent `a` (`/w/a.md`): crow asks before it is used"
    ]


@pytest.mark.parametrize(
    ("status", "notice"),
    [
        (SandboxStatus(name="bubblewrap 0.8.0", has_overlay=True), None),
        (
            SandboxStatus(name="Landlock"),
            NoticeShown(
                severity="info",
                title="Commands run without layers",
                description="Landlock confines commands, but not in layers. So commands name their access before "
                "they run, and an undo restores only files that crow could copy before. `crow doctor` says what would "
                "give layers.",
            ),
        ),
        (SandboxStatus(setting="off", problem="It is off."), None),
        (
            SandboxStatus(problem=MISSING),
            NoticeShown(
                severity="warning",
                title="Nothing confines commands",
                description=f"{MISSING} So every command has full access, and needs your permission unless a rule "
                f"allows it. {TRY}",
            ),
        ),
        (
            SandboxStatus(setting="required", problem=MISSING),
            NoticeShown(
                severity="error",
                title="Commands cannot be confined",
                description=f"{MISSING} So commands with the access `read` or `write` fail. {TRY}",
            ),
        ),
        (
            SandboxStatus(name="bubblewrap 0.8.0", problem="/x does not exist."),
            NoticeShown(severity="warning", title="[sandbox] in config.toml", description="/x does not exist."),
        ),
    ],
)
def test_the_user_is_warned_unless_commands_are_confined_or_it_is_off(
    status: SandboxStatus, notice: NoticeShown | None
) -> None:
    assert notice_of_sandbox(status) == notice


def test_permissions_say_what_each_access_means() -> None:
    confined = SandboxStatus(name="bubblewrap 0.8.0", has_network=True, readable=("/data",), problem="/x is missing.")
    assert describe_sandbox(confined) == [
        "bubblewrap 0.8.0 holds each command to the access that it asked for:",
        (
            "- `read`: sees the system, the workspace and your toolchains; it can write nothing, "
            "and has no network access"
        ),
        "- `write`: can also change files in the workspace, except protected ones; it has network access",
        "- `full`: is not confined, and can do everything that you can",
        f"{SETTINGS}; `network` is true; `readable` adds `/data`. `crow doctor` tries it out.",
        "Not used: /x is missing.",
    ]
    assert "in a layer over the workspace" in describe_sandbox(SandboxStatus(name="x", has_overlay=True))[0]
    assert describe_sandbox(SandboxStatus(problem=MISSING)) == [
        f"Nothing confines commands: {MISSING}",
        "Every command has `full` access: it can do everything that you can.",
        f"{SETTINGS}. {TRY}",
    ]
    assert describe_sandbox(SandboxStatus(setting="required", problem=MISSING))[:2] == [
        f"Nothing can confine commands: {MISSING}",
        "Commands with the access `read` or `write` fail; commands with `full` need your permission.",
    ]


def test_variables_that_commands_do_not_get_are_named() -> None:
    plain = SandboxStatus(name="bubblewrap 1", setting="auto")
    lines = describe_sandbox(replace(plain, withheld=("GITHUB_TOKEN", "PGPASSWORD")))
    words = "Commands do not get `GITHUB_TOKEN`, `PGPASSWORD`: these variables hold secrets."
    assert lines == [*describe_sandbox(plain), f"{words} `pass_env` in `[sandbox]` passes some."]


def test_in_the_home_directory_the_users_own_settings_of_other_agents_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text("")
    assert inspect_workspace(str(tmp_path), lambda _: True).ignored == (".codex/config.toml",)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert inspect_workspace(str(tmp_path), lambda _: True).ignored == ()
