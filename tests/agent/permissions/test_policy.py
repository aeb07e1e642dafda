"""The permission policy, as a table and as laws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.permissions.decisions import Allow, Ask, Refuse, decide
from crow.agent.permissions.rules import (
    MODES,
    PermissionRule,
    bind_rules,
    rule_for,
    rule_for_writes,
    rule_from,
    rule_text,
    rule_words,
    rules_at,
    scope_text,
    typed_rule,
    user_rules,
)
from crow.domain.entries import Announcement
from crow.tools import Access, CommandAccess, Coverage, PlannedCall, Touched

ACCESSES: tuple[Access, ...] = ("none", "read", "write", "execute", "fetch", "external")


def offer(
    access: Access,
    *,
    outside: bool = False,
    protected: bool = False,
    argument: str | None = None,
    command_access: CommandAccess | None = None,
    **coverage: Any,
) -> PlannedCall:
    return PlannedCall(
        announcement=Announcement(title="t"),
        access=access,
        command_access=command_access,
        touched=Touched(is_outside=outside, is_protected=protected),
        coverage=Coverage(argument=argument, **coverage),
    )


CASES: Mapping[str, PlannedCall] = {
    "session": offer("none"),
    "read": offer("read"),
    "read command": offer("execute", argument="x", command_access="read"),
    "write": offer("write"),
    "write command": offer("execute", argument="x", command_access="write"),
    "full command": offer("execute", argument="x", command_access="full"),
    "command of unknown access": offer("execute", argument="x"),
    "fetch": offer("fetch", argument="https://a.example/"),
    "MCP": offer("external"),
    "read-only MCP": offer("external", is_read_only=True),
    "read outside": offer("read", outside=True),
    "write outside": offer("write", outside=True),
    "read secret": offer("read", protected=True),
    "write protected": offer("write", protected=True),
    "skill": offer("read", argument="text", asks_once=True),
}
FREE = {"session", "read", "read command"}
NEVER_IN_PLAN = {
    *("write", "write command", "full command", "command of unknown access", "fetch", "MCP", "write outside"),
    *("read secret", "write protected"),
}


@pytest.mark.parametrize(
    ("mode", "free", "never"),
    [
        ("plan", FREE, NEVER_IN_PLAN),
        ("ask", FREE, set[str]()),
        ("accept-edits", FREE | {"write"}, set[str]()),
        ("auto", FREE | {"write", "write command"}, set[str]()),
    ],
)
def test_each_mode_allows_asks_and_refuses_exactly_this(mode: str, free: set[str], never: set[str]) -> None:
    decided = {name: decide("tool", call, mode, ()) for name, call in CASES.items()}
    assert {name for name, decision in decided.items() if isinstance(decision, Allow)} == free
    assert {name for name, decision in decided.items() if isinstance(decision, Refuse)} == never
    assert all(decision == Ask() for name, decision in decided.items() if name not in free | never)


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_for_the_whole_tool_allows_what_is_inside_and_unprotected(mode: str) -> None:
    rules = user_rules(["*"], [])
    allowed = {name for name, call in CASES.items() if isinstance(decide("tool", call, mode, rules), Allow)}
    special = {"read outside", "write outside", "read secret", "write protected", "skill"}
    in_plan = FREE | {"fetch", "read-only MCP"}
    assert allowed == (in_plan if mode == "plan" else CASES.keys() - special)


def test_plan_mode_allows_fetch_only_by_the_users_file() -> None:
    page = CASES["fetch"]
    assert isinstance(decide("fetch", page, "plan", user_rules(["fetch(https://a.example/*)"], [])), Allow)
    session = typed_rule("fetch(https://a.example/*)", allow=True, cwd="/w")
    refused = decide("fetch", page, "plan", [session])
    assert isinstance(refused, Refuse)
    assert "config.toml allows the address" in refused.words


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("write", "the user leaves plan mode when they agree"),
        ("full command", "A command with read access may run if crow can confine it"),
        ("MCP", "lists the tool in read_only"),
        ("write protected", "for protected paths"),
    ],
)
def test_a_refusal_in_plan_mode_says_what_would_allow_the_call(case: str, words: str) -> None:
    refused = decide("tool", CASES[case], "plan", ())
    assert isinstance(refused, Refuse)
    assert words in refused.words


def test_plan_mode_refuses_changes_even_when_always_allowed() -> None:
    rules = [PermissionRule(tool="tool", argument=None, allow=True)]
    for access in ("write", "execute", "fetch", "external"):
        assert isinstance(decide("tool", offer(access), "plan", rules), Refuse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("access", ["read", "write"])
def test_a_path_outside_the_workspace_is_never_free(mode: str, access: Access) -> None:
    rules = [PermissionRule(tool="tool", argument=None, allow=True)]
    assert not isinstance(decide("tool", offer(access, outside=True), mode, rules), Allow)


def test_an_always_answer_about_a_command_covers_that_command_alone() -> None:
    rule = rule_for("shell", offer("execute", argument="git status"), allow=True, cwd="/w")
    assert isinstance(decide("shell", offer("execute", argument="git status"), "ask", [rule]), Allow)
    assert decide("shell", offer("execute", argument="git status; rm -rf x"), "ask", [rule]) == Ask()
    assert decide("other", offer("execute", argument="git status"), "ask", [rule]) == Ask()


def test_an_always_answer_about_a_command_covers_no_more_access_than_was_asked() -> None:
    def command(access: CommandAccess) -> PlannedCall:
        return offer("execute", argument="make test", command_access=access)

    rule = rule_for("shell", command("write"), allow=True, cwd="/w")
    assert isinstance(decide("shell", command("write"), "ask", [rule]), Allow)
    assert decide("shell", command("full"), "ask", [rule]) == Ask()
    assert isinstance(decide("shell", command("full"), "ask", user_rules(["shell(make *)"], [])), Allow)
    assert rule_words(rule) == "`make test` with access write in this directory and session"


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
def test_one_rule_allows_all_commands_that_are_confined_to_write_and_nothing_else(mode: str) -> None:
    def command(line: str, access: CommandAccess | None, **more: Any) -> PlannedCall:
        return offer("execute", argument=line, command_access=access, **more)

    rule = rule_for_writes("/w/")
    assert rule_from(rule.as_json()) == rule == typed_rule("shell --access write", allow=True, cwd="/w")
    for line in ("make", "rm -rf src; echo $X > a", "python -c 1"):
        assert isinstance(decide("shell", command(line, "write"), mode, [rule]), Allow)
        assert decide("shell", command(line, "full"), mode, [rule]) == Ask(), "nothing confines it, or it asks for more"
        assert decide("shell", command(line, None), mode, [rule]) == Ask()
    assert decide("shell", command("make", "write", protected=True), mode, [rule]) == Ask()
    assert decide("other", command("make", "write"), mode, [rule]) == Ask()
    denied = [rule, *user_rules([], ["shell(git push)", "read_file(.env)"])]
    assert isinstance(decide("shell", command("git push", "write"), mode, denied), Refuse)
    assert isinstance(decide("shell", command("$X push", "write"), mode, denied), Ask), "a deny rule may cover it"
    assert isinstance(decide("shell", command("cat .env", "write"), mode, denied), Ask)
    assert isinstance(decide("shell", command("make", "write"), "plan", [rule]), Refuse)
    assert rules_at([rule.as_json()], "/w") == (rule,)
    assert rules_at([rule.as_json()], "/w/below") == ()
    assert (rule_text(rule), scope_text(rule, "/w")) == ("`shell --access write`", "in /w")


def test_allow_rules_of_a_session_count_only_in_their_directory_and_deny_rules_everywhere() -> None:
    allow = rule_for("write_file", offer("write"), allow=True, cwd="/w/")
    deny = rule_for("write_file", offer("write"), allow=False, cwd="/w")
    stored = [allow.as_json(), deny.as_json()]
    assert rules_at(stored, "/w") == (allow, deny)
    assert rules_at(stored, "/other") == (deny,)


def test_allow_rules_without_a_directory_stay_in_the_one_that_the_session_had() -> None:
    old: list[dict[str, object]] = [
        {"tool": "shell", "argument": "ls", "allow": True},
        {"tool": "fetch", "argument": None, "allow": False},
    ]
    assert len(rules_at(old, "/w")) == 2
    moved = bind_rules(old, "/w")
    assert [rule.tool for rule in rules_at(moved, "/other")] == ["fetch"]
    assert [rule.tool for rule in rules_at(moved, "/w")] == ["shell", "fetch"]
    assert bind_rules(moved, "/other") == moved


@given(
    access=st.sampled_from(ACCESSES),
    mode=st.sampled_from([*MODES, "unheard-of"]),
    outside=st.booleans(),
    rules=st.lists(
        st.builds(
            PermissionRule,
            tool=st.sampled_from(["a", "b"]),
            argument=st.sampled_from([None, "x", "y"]),
            allow=st.booleans(),
        )
    ),
)
def test_a_deny_rule_always_wins(access: Access, mode: str, outside: bool, rules: list[PermissionRule]) -> None:
    denied = [*rules, PermissionRule(tool="a", argument="x", allow=False)]
    assert isinstance(decide("a", offer(access, outside=outside, argument="x"), mode, denied), Refuse)


def test_an_unknown_mode_is_as_strict_as_ask() -> None:
    assert [decide("t", offer(access), "unheard-of", ()) for access in ACCESSES] == [
        decide("t", offer(access), "ask", ()) for access in ACCESSES
    ]


@given(
    st.builds(
        PermissionRule,
        tool=st.text(),
        argument=st.none() | st.text(),
        allow=st.booleans(),
        is_pattern=st.booleans(),
        access=st.sampled_from([None, "read", "write", "full"]),
        cwd=st.none() | st.text(),
    )
)
def test_a_rule_survives_being_stored(rule: PermissionRule) -> None:
    assert rule_from(rule.as_json()) == rule


def test_damaged_rules_are_ignored() -> None:
    assert [
        rule_from(value)
        for value in ({}, {"tool": 1}, {"tool": "a", "allow": "yes"}, {"tool": "a", "allow": True, "argument": 3})
    ] == [None] * 4
    assert rule_from({"tool": "a", "argument": None, "allow": True, "access": "root"}) is None
    assert rule_from({"tool": "a", "argument": None, "allow": True, "cwd": 1}) is None


def test_a_rule_is_described_on_one_line() -> None:
    assert (
        rule_words(PermissionRule(tool="write_file", argument=None, allow=True))
        == "every write_file call in this session"
    )
    assert rule_words(PermissionRule(tool="shell", argument="make\ntest", allow=True)) == "`make test` in this session"
    here = PermissionRule(tool="write_file", argument=None, allow=True, cwd="/w")
    assert rule_words(here) == "every write_file call in this directory and session"
    assert len(rule_words(PermissionRule(tool="shell", argument="x" * 500, allow=True))) < 90
