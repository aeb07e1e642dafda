"""Rules of the user: what they cover, and that a deny rule wins."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crow.agent.permissions import MODES, Allow, Ask, Refuse, Rule, decide, mentions, rule_for, simple_words, user_rules
from crow.domain.entries import Announcement
from crow.tools import Access, PlannedCall

SHOWN = Announcement(title="t")


def command(line: str) -> PlannedCall:
    return PlannedCall(announcement=SHOWN, access="execute", argument=line)


def file(*names: str, access: Access = "write", outside: bool = False) -> PlannedCall:
    return PlannedCall(announcement=SHOWN, access=access, rule_paths=names, is_outside=outside)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("git status", True),
        ("  git   status  --short", True),
        ("git 'status' \"src/a b.py\"", True),
        ("git status; rm -rf x", False),
        ("git status && rm x", False),
        ("git status & rm x", False),
        ("git status | sh", False),
        ("git status\nrm x", False),
        ("git status\r\nrm x", False),
        ("git status > ~/.bashrc", False),
        ("git status < x", False),
        ("git status $(rm x)", False),
        ("git status `rm x`", False),
        ('git status "$(rm x)"', False),
        ('git status "`rm x`"', False),
        ("git status $HOME", False),
        ("git status *", False),
        ("git status {a,b}", False),
        ("git status 'half", False),
        ("git status \\\nx", False),
        ("git status # all of it", False),
        ("git\u00a0status", False),
        ("git  statusx", False),
        ("git stat'us'", True),
        ("GIT_PAGER=sh git status", False),
        ("sudo git status", False),
        ("git", False),
        ("", False),
    ],
)
def test_an_allow_rule_covers_one_plain_command_with_these_first_words(line: str, allowed: bool) -> None:
    decision = decide("shell", command(line), "ask", user_rules(["shell(git status)"], []))
    assert isinstance(decision, Allow if allowed else Ask)


@pytest.mark.parametrize(
    ("line", "denied"),
    [
        ("git push", True),
        ("cd x && git push --force", True),
        ("/usr/bin/git push", True),
        ("echo $(git push)", True),
        ("sh -c 'git push'", True),
        ("g'i't pu\\sh", True),
        ("true\ngit   push", True),
        ("git pull", False),
        ("git status pushes", False),
    ],
)
def test_a_deny_rule_covers_the_command_anywhere_in_the_line(line: str, denied: bool) -> None:
    rules = user_rules(["shell"], ["shell(git push)"])
    assert isinstance(decide("shell", command(line), "auto", rules), Refuse if denied else Allow)


@given(st.text(alphabet=";&|<>()$`\n\\'\"*?[]{}#~! ab=-/", max_size=30))
def test_a_shell_reads_a_simple_command_the_same_way(line: str) -> None:
    words = simple_words(line)
    if words is not None:
        assert list(words) == shlex.split(line, comments=False)
        assert not set(line) & set(";&|<>()`$\n") or any(quote in line for quote in "'\"")


@given(st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), min_size=1, max_size=4), st.text(max_size=10))
def test_words_are_found_in_a_line_whatever_surrounds_them(words: list[str], around: str) -> None:
    assert mentions(f"{around}; {' '.join(words)} ;{around}", words)


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("docs/**", "docs/a/b.md", True),
        ("docs/**", "src/docs/a.md", False),
        ("docs/", "docs/a.md", True),
        ("docs/*.md", "docs/a/b.md", False),
        ("*.md", "deep/down/a.md", True),
        ("**/test_*.py", "test_a.py", True),
        ("**/test_*.py", "x/y/test_a.py", True),
        ("/srv/**", "/srv/x", True),
        ("a?c", "x/abc", True),
        ("docs/**", "docs/../src/a", True),  # paths come resolved: this one names a directory called ".."
        (".env", "a/.env\n", False),
        ("a+(b)", "a+(b)", True),
    ],
)
def test_globs_of_paths(pattern: str, path: str, covered: bool) -> None:
    rules = user_rules([f"edit_file({pattern})"], [])
    decision = decide("edit_file", file(path), "ask", rules)
    assert isinstance(decision, Allow) is covered


def test_a_deny_rule_for_a_path_holds_in_every_mode_and_any_letter_case() -> None:
    rules = user_rules(["read_file"], ["read_file(.env)"])
    for mode in MODES:
        for name in (".env", "deep/.ENV"):
            assert isinstance(decide("read_file", file(f"/w/{name}", name, access="read"), mode, rules), Refuse)
    assert isinstance(decide("read_file", file("/w/env", "env", access="read"), "ask", rules), Allow)


@pytest.mark.parametrize("mode", MODES)
def test_a_write_to_a_protected_path_asks_in_every_mode_and_despite_rules(mode: str) -> None:
    there = PlannedCall(
        announcement=SHOWN, access="write", rule_paths=("/w/.git/config", ".git/config"), is_protected=True
    )
    rules = (
        *user_rules(["write_file", "write_file(.git/**)", "write_file(/w/.git/config)", "*"], []),
        Rule(tool="write_file", argument=None, allow=True),
        Rule(tool="write_file", argument="/w/.git/config", allow=True, is_pattern=True),
    )
    assert isinstance(decide("write_file", there, mode, rules), Refuse if mode == "plan" else Ask)
    assert isinstance(decide("write_file", there, mode, user_rules([], ["write_file(.git/**)"])), Refuse)


@pytest.mark.parametrize("mode", MODES)
def test_a_skill_of_a_workspace_loads_only_with_consent_to_its_content(mode: str) -> None:
    def skill(argument: str) -> PlannedCall:
        return PlannedCall(
            announcement=SHOWN,
            access="read",
            argument=argument,
            rule_paths=("/w/.crow/skills/a/SKILL.md",),
            asks_once=True,
        )

    wide = (
        *user_rules(["skill", "skill(*)", "*", "skill(/w/**)", "read_file"], []),
        Rule(tool="skill", argument=None, allow=True),
        Rule(tool="skill", argument="skills of /w", allow=True),
    )
    assert decide("skill", skill("one"), mode, wide) == Ask()
    consent = rule_for("skill", skill("one"), allow=True)
    assert isinstance(decide("skill", skill("one"), mode, [consent]), Allow)
    assert decide("skill", skill("one, changed"), mode, [consent]) == Ask()
    for deny in ("skill", "skill(SKILL.md)", "read_file", "read_file(.crow/)", "read_file(/w/.crow/)"):
        covered = deny != "read_file(.crow/)"  # relative to a cwd that this offer does not lie in
        decision = decide("skill", skill("one"), mode, (consent, *user_rules([], [deny])))
        assert isinstance(decision, Refuse if covered else Allow), deny


def test_only_a_rule_for_the_place_allows_access_outside_the_workspace() -> None:
    there = file("/srv/notes/a", access="read", outside=True)
    assert decide("read_file", there, "auto", user_rules(["read_file"], [])) == Ask()
    assert isinstance(decide("read_file", there, "ask", user_rules(["read_file(/srv/notes/**)"], [])), Allow)
    assert isinstance(decide("read_file", there, "ask", user_rules([], ["read_file"])), Refuse)


def test_an_always_answer_about_a_file_outside_is_about_that_file() -> None:
    rule = rule_for("read_file", file("/srv/a", access="read", outside=True), allow=True)
    assert isinstance(decide("read_file", file("/srv/a", access="read", outside=True), "ask", [rule]), Allow)
    assert decide("read_file", file("/srv/b", access="read", outside=True), "ask", [rule]) == Ask()


def test_a_rule_may_name_tools_by_a_glob_and_urls_too() -> None:
    external = PlannedCall(announcement=SHOWN, access="external")
    assert isinstance(decide("github__get", external, "ask", user_rules(["github__get*"], [])), Allow)
    assert decide("gitlab__get", external, "ask", user_rules(["github__get*"], [])) == Ask()
    rules = user_rules(["fetch(https://docs.python.org/*)"], [])
    page = PlannedCall(announcement=SHOWN, access="fetch", argument="https://docs.python.org/3/")
    trap = PlannedCall(announcement=SHOWN, access="fetch", argument="https://docs.python.org.evil.example/3/")
    assert isinstance(decide("fetch", page, "ask", rules), Allow)
    assert decide("fetch", trap, "ask", rules) == Ask()


def test_a_tool_called_through_another_tool_is_judged_by_its_own_name() -> None:
    inner = PlannedCall(announcement=SHOWN, access="external", rule_tool="db__drop")
    assert isinstance(decide("call_tool", inner, "auto", user_rules(["call_tool"], ["db__drop"])), Refuse)
    assert rule_for("call_tool", inner, allow=True).tool == "db__drop"


def test_plan_mode_asks_for_external_tools_that_the_users_file_marks_read_only() -> None:
    assert decide("db__get", PlannedCall(announcement=SHOWN, access="external", is_read_only=True), "plan", ()) == Ask()
    assert isinstance(decide("db__get", PlannedCall(announcement=SHOWN, access="external"), "plan", ()), Refuse)
