"""The permission policy, as a table and as laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.permissions import MODES, Allow, Ask, Refuse, Rule, decide, rule_for, rule_from, rule_words
from crow.domain.entries import Announcement
from crow.tools import Access, PlannedCall

ACCESSES: tuple[Access, ...] = ("none", "read", "write", "execute", "fetch", "external")


def offer(access: Access, *, outside: bool = False, argument: str | None = None) -> PlannedCall:
    return PlannedCall(announcement=Announcement(title="t"), access=access, is_outside=outside, argument=argument)


@pytest.mark.parametrize(
    ("mode", "free"),
    [
        ("ask", {"none", "read"}),
        ("accept-edits", {"none", "read", "write"}),
        ("plan", {"none", "read"}),
        ("auto", set(ACCESSES)),
    ],
)
def test_each_mode_allows_exactly_its_accesses(mode: str, free: set[str]) -> None:
    assert {access for access in ACCESSES if isinstance(decide("tool", offer(access), mode, ()), Allow)} == free


def test_plan_mode_refuses_changes_even_when_always_allowed() -> None:
    rules = [Rule(tool="tool", argument=None, allow=True)]
    for access in ("write", "execute", "fetch", "external"):
        assert isinstance(decide("tool", offer(access), "plan", rules), Refuse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("access", ["read", "write"])
def test_a_path_outside_the_workspace_is_never_free(mode: str, access: Access) -> None:
    rules = [Rule(tool="tool", argument=None, allow=True)]
    assert not isinstance(decide("tool", offer(access, outside=True), mode, rules), Allow)


def test_an_always_answer_about_a_command_covers_that_command_alone() -> None:
    rule = rule_for("shell", offer("execute", argument="git status"), allow=True)
    assert isinstance(decide("shell", offer("execute", argument="git status"), "ask", [rule]), Allow)
    assert decide("shell", offer("execute", argument="git status; rm -rf x"), "ask", [rule]) == Ask()
    assert decide("other", offer("execute", argument="git status"), "ask", [rule]) == Ask()


@given(
    access=st.sampled_from(ACCESSES),
    mode=st.sampled_from([*MODES, "unheard-of"]),
    outside=st.booleans(),
    rules=st.lists(
        st.builds(
            Rule, tool=st.sampled_from(["a", "b"]), argument=st.sampled_from([None, "x", "y"]), allow=st.booleans()
        )
    ),
)
def test_a_deny_rule_always_wins(access: Access, mode: str, outside: bool, rules: list[Rule]) -> None:
    denied = [*rules, Rule(tool="a", argument="x", allow=False)]
    assert isinstance(decide("a", offer(access, outside=outside, argument="x"), mode, denied), Refuse)


def test_an_unknown_mode_is_as_strict_as_ask() -> None:
    assert [decide("t", offer(access), "unheard-of", ()) for access in ACCESSES] == [
        decide("t", offer(access), "ask", ()) for access in ACCESSES
    ]


@given(st.builds(Rule, tool=st.text(), argument=st.none() | st.text(), allow=st.booleans()))
def test_a_rule_survives_being_stored(rule: Rule) -> None:
    assert rule_from(rule.as_json()) == rule


def test_damaged_rules_are_ignored() -> None:
    assert [
        rule_from(value)
        for value in ({}, {"tool": 1}, {"tool": "a", "allow": "yes"}, {"tool": "a", "allow": True, "argument": 3})
    ] == [None] * 4


def test_a_rule_is_described_on_one_line() -> None:
    assert rule_words(Rule(tool="write_file", argument=None, allow=True)) == "every write_file call in this session"
    assert rule_words(Rule(tool="shell", argument="make\ntest", allow=True)) == "`make test` in this session"
    assert len(rule_words(Rule(tool="shell", argument="x" * 500, allow=True))) < 90
