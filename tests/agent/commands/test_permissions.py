"""Tests `/permissions`: rules apply from the next call, stay with the session, and can be removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from crow.agent.permissions.decisions import Allow, Refuse, decide
from crow.agent.permissions.rules import rule_from, rule_text, typed_rule, user_rules
from crow.domain.entries import Announcement, Command, ToolResult
from crow.domain.errors import ArgumentError
from crow.tools import Coverage, PlannedCall, Touched
from tests.agent.harness import NoteTaker, text
from tests.agent.subagents.test_subagents import Casting, running
from tests.support.scripted_model import Say, call

SHOWN = Announcement(title="t")


async def test_rules_are_listed_added_removed_and_apply_at_once(tmp_path: Path) -> None:
    calls = (
        call("shell", "c0", command="echo one"),
        call("shell", "c1", command="echo one; echo two"),
        call("shell", "c2", command="echo two"),
        call("write_file", "c3", path="docs/a.md", content="a"),
    )
    model = Casting(go=[Say(calls=calls), Say(text=["ok"])], again=[Say(calls=calls[:1]), Say(text=["ok"])])
    client = NoteTaker("reject_once", "reject_once")
    async with running(tmp_path, model, client=client, deny=("shell(git push)",)) as run:
        for typed in (
            "/permissions allow shell(echo one)",
            "/permissions deny shell(echo two)",
            "/permissions allow write_file(docs/**)",
            "/permissions allow  shell(echo one)",
            "/permissions deny srv__*",
            "/permissions",
        ):
            await run.session.prompt(text(typed))
        await run.session.prompt(text("go"))
        results = sorted(run.client.stored(ToolResult), key=lambda result: result.call.index)
        await run.session.prompt(text("/permissions forget 1"))
        stored = (await run.store.open_session("s1")).row.permissions
        await run.session.prompt(text("/permissions forget all"))
        await run.session.prompt(text("/permissions"))
        answers = [command.answer for command in run.client.stored(Command)]
    assert [result.text.split(",")[0].split(".")[0] for result in results] == [
        "one",
        "The user has forbidden this call of shell",
        "The user has forbidden this call of shell",
        "Created docs/a",
    ]
    assert client.questions == []
    take_back = "`/permissions forget {}` removes it."
    assert answers[:5] == [
        f"From now on in this session: allow `shell(echo one)`. {take_back.format(1)}",
        f"From now on in this session: deny `shell(echo two)`. {take_back.format(2)}",
        f"From now on in this session: allow `write_file(docs/**)`. {take_back.format(3)}",
        "This rule exists already: 1. allow `shell(echo one)`",
        f"From now on in this session: deny `srv__*`. No tool has such a name at present. {take_back.format(4)}",
    ]
    assert answers[5].splitlines()[:10] == [
        "The mode is `ask`. Deny rules win over everything else.",
        "",
        "Rules in config.toml:",
        "- deny `shell(git push)`",
        "",
        "Rules of this session:",
        f"1. allow `shell(echo one)` (exactly these words, any access, in {tmp_path / 'work'})",
        "2. deny `shell(echo two)`",
        f"3. allow `write_file(docs/**)` (in {tmp_path / 'work'})",
        "4. deny `srv__*`",
    ]
    assert stored == (
        {"tool": "shell", "argument": "echo two", "allow": False, "pattern": True},
        {
            "tool": "write_file",
            "argument": "docs/**",
            "allow": True,
            "pattern": True,
            "cwd": str(tmp_path / "work"),
        },
        {"tool": "srv__*", "argument": None, "allow": False},
    )
    assert answers[6:8] == ["Removed: allow `shell(echo one)`.", "Removed: 3 rules of this session."]
    assert "Rules of this session" not in answers[8]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("allow", "`/permissions` shows the rules; "),
        ("permit shell", "`/permissions` shows the rules; "),
        ("forget 1", "This session has no rule `1`; it has no rules."),
        (f"forget {'1' * 5_000}", "This session has no rule"),
        ("allow shell(", "`shell(` is not a rule. A rule is a tool, such as `write_file`, "),
        ("allow rm -rf x", "`rm -rf x` is not a rule. "),
        (
            "deny shel(git push)",
            "A rule about `shel` takes no argument; write `shel` alone. Tools with an argument: `shell`",
        ),
        ("deny shel", "There is no tool `shel`; the tools are `read_file`, "),
        (
            "allow shell(git status; ls)",
            "`shell(git status; ls)` would allow nothing: give the words of a command",
        ),
        ("allow shell(*)", "`shell(*)` would allow nothing: "),
        ("allow task(x)", "A rule about `task` takes no argument; "),
        ("allow recall", "`recall` would allow nothing: write `recall(workspace)` for the sessions of this directory"),
        ("allow skill", "`skill` would allow nothing: crow asks about each skill of a workspace separately"),
    ],
)
async def test_useless_rule_is_refused_with_an_explanation(tmp_path: Path, typed: str, words: str) -> None:
    async with running(tmp_path, Casting()) as run:
        await run.session.prompt(text(f"/permissions {typed}"))
        (told,) = run.client.stored(Command)
        assert (await run.store.open_session("s1")).row.permissions == ()
    assert told.answer.startswith(words)


def test_typed_rule_is_stored_shown_and_applied_as_typed() -> None:
    for typed in (
        "shell(git status)",
        "shell(git log *)",
        "edit_file(docs/**)",
        "mcp__*",
        "fetch(https://a.example/*)",
    ):
        rule = typed_rule(f" {typed} ", allow=True, cwd="/w")
        assert rule_from(rule.as_json()) == rule
        assert rule_text(rule) == f"`{typed}`"
    with pytest.raises(ArgumentError, match="is not a rule"):
        typed_rule("", allow=True, cwd="/w")


def test_star_after_a_command_matches_any_arguments() -> None:
    def decided(line: str) -> object:
        offer = PlannedCall(announcement=SHOWN, access="execute", coverage=Coverage(argument=line))
        return type(
            decide("shell", offer, "ask", user_rules(["shell(git log *)", "shell(ls:*)"], ["shell(git push *)"]))
        )

    allowed, refused = ("git log -1", "git log", "ls", "ls -l x"), ("git push x", "git log; git push x")
    assert [decided(line) for line in allowed] == [Allow] * 4
    assert [decided(line) for line in refused] == [Refuse] * 2
    assert decided("git log; rm x") not in (Allow, Refuse)


def test_denied_name_is_denied_in_any_unicode_normalisation() -> None:
    (rule,) = user_rules([], ["read_file(schlüssel)"])
    offer = PlannedCall(
        announcement=SHOWN, access="read", touched=Touched(rule_paths=("/w/schlu\u0308ssel", "schlu\u0308ssel"))
    )
    assert isinstance(decide("read_file", offer, "auto", [rule]), Refuse)
