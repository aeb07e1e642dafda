"""Rules of the user: what they cover, and that a deny rule wins."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from crow.agent.permissions.decisions import Allow, Ask, Refuse, decide
from crow.agent.permissions.rules import MODES, PermissionRule, rule_for, user_rules
from crow.domain.entries import Announcement
from crow.tools import Access, CommandAccess, Coverage, PlannedCall, Touched
from crow.tools.urls import lenient_urls, normalize_url

SHOWN = Announcement(title="t")


def command(line: str, access: CommandAccess = "full") -> PlannedCall:
    return PlannedCall(announcement=SHOWN, access="execute", command_access=access, coverage=Coverage(argument=line))


def file(*names: str, access: Access = "write", outside: bool = False) -> PlannedCall:
    return PlannedCall(announcement=SHOWN, access=access, touched=Touched(rule_paths=names, is_outside=outside))


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("git status", True),
        ("  git   status ", True),
        ("git 'status'", True),
        ("git status --short", False),
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
def test_an_allow_rule_without_star_covers_exactly_this_command(line: str, allowed: bool) -> None:
    decision = decide("shell", command(line), "ask", user_rules(["shell(git status)"], []))
    assert isinstance(decision, Allow if allowed else Ask)


@pytest.mark.parametrize(
    ("pattern", "line", "allowed"),
    [
        ("git log *", "git log", True),
        ("git log *", 'git log -5 "src/a b.py"', True),
        ("git log:*", "git log -5", True),
        ("git log *", "git status", False),
        ("git log *", "git log -5; rm -rf x", False),
        ("git log *", "git log --output=x", False),
        ("git log --output=x *", "git log --output=x -5", True),
        ("*", "git log", False),
    ],
)
def test_an_allow_rule_with_a_star_covers_more_words(pattern: str, line: str, allowed: bool) -> None:
    decision = decide("shell", command(line), "ask", user_rules([f"shell({pattern})"], []))
    assert isinstance(decision, Allow if allowed else Ask)


def test_a_star_covers_dangerous_options_of_commands_that_are_confined_to_read() -> None:
    rules = user_rules(["shell(git log *)"], [])
    for access in ("write", "full"):
        assert decide("shell", command("git log --output=x", access), "ask", rules) == Ask()
    assert isinstance(decide("shell", command("git log --output=x", "read"), "ask", rules), Allow)


def test_a_line_that_may_run_a_denied_command_asks_each_time_even_if_it_is_allowed() -> None:
    rules = user_rules(["shell"], ["shell(git push)"])
    for mode in ("ask", "accept-edits", "auto"):
        for access in ("read", "write", "full"):
            assert decide("shell", command("$(echo git) push", access), mode, rules) == Ask(doubtful=rules[0])
    assert isinstance(decide("shell", command("git push", "read"), "auto", rules), Refuse)
    assert isinstance(decide("shell", command("git pull"), "ask", rules), Allow)


def test_a_denied_file_is_closed_to_searches_and_to_skills() -> None:
    rules = user_rules([], ["read_file(.env)"])
    for name in ("read_file", "grep", "list_files", "skill"):
        assert isinstance(decide(name, file("/w/.env", ".env", access="read"), "auto", rules), Refuse), name
    assert isinstance(decide("grep", file("/w/src", "src", access="read"), "ask", rules), Allow)
    tool = user_rules([], ["read_file"])
    assert isinstance(decide("grep", file("/w/src", "src", access="read"), "ask", tool), Allow)


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        *(
            (f"{line}", True)
            for line in ("cat .env", "cat ./conf/.ENV", "cat <.env", "sh -c 'cat .env'", "x --file=.env")
        ),
        *((line, False) for line in ("cat .env.example", "echo 'see .env'", "make env", "cat README.md")),
    ],
)
def test_a_command_that_names_a_file_which_may_not_be_read_asks(line: str, asks: bool) -> None:
    for deny in ("read_file(.env)", "*(.env)"):
        rules = user_rules(["shell"], [deny])
        decision = decide("shell", command(line, "read"), "auto", rules)
        assert decision == Ask(doubtful=rules[0]) if asks else isinstance(decision, Allow)


def test_a_deny_rule_holds_for_every_name_of_a_file() -> None:
    rules = user_rules([], ["read_file(.env)"])
    call = file("/w/a.txt", "a.txt", access="read")
    given = replace(call, touched=replace(call.touched, other_paths=("/w/.env", ".env")))
    assert isinstance(decide("read_file", given, "ask", rules), Refuse)
    assert decide(
        "read_file", replace(call, touched=replace(call.touched, has_unknown_names=True)), "auto", rules
    ) == Ask(doubtful=rules[0])
    assert isinstance(
        decide("read_file", replace(call, touched=replace(call.touched, has_unknown_names=True)), "auto", ()), Allow
    )


@pytest.mark.parametrize(
    ("rule", "name", "covered"),
    [
        ("write_file(*.md)", "/srv/a.md", False),
        ("write_file(**/a.md)", "/srv/a.md", False),
        ("write_file(/srv/*.md)", "/srv/a.md", True),
        ("write_file(/**)", "/srv/a.md", True),
        ("write_file(~/notes/*)", os.path.expanduser("~/notes/a"), True),
        ("*(a.md)", "/srv/a.md", False),
    ],
)
def test_a_rule_reaches_outside_the_workspace_only_by_an_absolute_pattern(rule: str, name: str, covered: bool) -> None:
    decision = decide("write_file", file(name, outside=True), "auto", user_rules([rule], []))
    assert isinstance(decision, Allow) is covered


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
        ("./.env", ".env", True),
        ("././docs/", "docs/a.md", True),
        ("./.env", "a/.env", False),
        ("./", "/srv/x", False),
        ("./**/x", "/srv/x", False),
    ],
)
def test_globs_of_paths(pattern: str, path: str, covered: bool) -> None:
    rules = user_rules([f"edit_file({pattern})"], [])
    decision = decide("edit_file", file(path), "ask", rules)
    assert isinstance(decision, Allow) is covered


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("migrations/**", "/w/proj/migrations/1.sql", True),
        ("migrations/", "/w/proj/migrations/deep/1.sql", True),
        ("./migrations/", "/w/proj/migrations/1.sql", True),
        ("/w/proj/migrations/", "/w/proj/migrations/1.sql", True),
        ("*.sql", "/w/proj/migrations/1.sql", True),
        ("migrations/**", "/w/proj/src/migrations/1.sql", False),
        ("migrations/**", "/w/project/migrations/1.sql", False),
        ("./**", "/w/other/1.sql", False),
    ],
)
def test_rules_for_changes_name_files_relative_to_the_sessions_directory(
    pattern: str, path: str, covered: bool
) -> None:
    changed = replace(command("make"), changed=(path,), changed_below="/w/proj")
    rule = f"shell_changes({pattern})"
    assert isinstance(decide("shell", changed, "auto", user_rules([], [rule])), Refuse) is covered
    assert isinstance(decide("shell", changed, "ask", user_rules([rule], [])), Allow) is covered


def test_a_deny_rule_for_changes_holds_for_files_that_nobody_is_asked_about() -> None:
    changed = replace(command("make"), changed=("/w/a",), silently_changed=("/w/.env", "/w/b"), changed_below="/w")
    assert isinstance(decide("shell", changed, "auto", user_rules([], ["shell_changes(./.env)"])), Refuse)
    assert decide("shell", changed, "ask", ()) == Ask()
    # such files need no allow rule
    assert isinstance(decide("shell", changed, "ask", user_rules(["shell_changes(/w/a)"], [])), Allow)


def test_a_deny_rule_for_a_path_holds_in_every_mode_and_any_letter_case() -> None:
    rules = user_rules(["read_file"], ["read_file(.env)"])
    for mode in MODES:
        for name in (".env", "deep/.ENV"):
            assert isinstance(decide("read_file", file(f"/w/{name}", name, access="read"), mode, rules), Refuse)
    assert isinstance(decide("read_file", file("/w/env", "env", access="read"), "ask", rules), Allow)


@pytest.mark.parametrize("mode", MODES)
def test_a_write_to_a_protected_path_asks_in_every_mode_and_despite_rules(mode: str) -> None:
    there = PlannedCall(
        announcement=SHOWN,
        access="write",
        touched=Touched(rule_paths=("/w/.git/config", ".git/config"), is_protected=True),
    )
    rules = (
        *user_rules(["write_file", "write_file(.git/**)", "write_file(/w/.git/config)", "*"], []),
        PermissionRule(tool="write_file", argument=None, allow=True),
        PermissionRule(tool="write_file", argument="/w/.git/config", allow=True, is_pattern=True),
    )
    assert isinstance(decide("write_file", there, mode, rules), Refuse if mode == "plan" else Ask)
    assert isinstance(decide("write_file", there, mode, user_rules([], ["write_file(.git/**)"])), Refuse)


@pytest.mark.parametrize("mode", MODES)
def test_a_skill_of_a_workspace_loads_only_with_consent_to_its_content(mode: str) -> None:
    def skill(argument: str) -> PlannedCall:
        return PlannedCall(
            announcement=SHOWN,
            access="read",
            coverage=Coverage(argument=argument, asks_once=True),
            touched=Touched(rule_paths=("/w/.crow/skills/a/SKILL.md",)),
        )

    wide = (
        *user_rules(["skill", "skill(*)", "*", "skill(/w/**)", "read_file"], []),
        PermissionRule(tool="skill", argument=None, allow=True),
        PermissionRule(tool="skill", argument="skills of /w", allow=True),
    )
    assert decide("skill", skill("one"), mode, wide) == Ask()
    consent = rule_for("skill", skill("one"), allow=True, cwd="/w")
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
    rule = rule_for("read_file", file("/srv/a", access="read", outside=True), allow=True, cwd="/w")
    assert isinstance(decide("read_file", file("/srv/a", access="read", outside=True), "ask", [rule]), Allow)
    assert decide("read_file", file("/srv/b", access="read", outside=True), "ask", [rule]) == Ask()
    starred = file("/srv/a*", access="read", outside=True)
    rule = rule_for("read_file", starred, allow=True, cwd="/w")
    assert isinstance(decide("read_file", starred, "ask", [rule]), Allow)
    assert decide("read_file", file("/srv/ab", access="read", outside=True), "ask", [rule]) == Ask()


def test_a_rule_may_name_tools_by_a_glob_and_urls_too() -> None:
    external = PlannedCall(announcement=SHOWN, access="external")
    assert isinstance(decide("github__get", external, "ask", user_rules(["github__get*"], [])), Allow)
    assert decide("gitlab__get", external, "ask", user_rules(["github__get*"], [])) == Ask()
    rules = user_rules(["fetch(https://docs.python.org/*)"], [])
    page = PlannedCall(announcement=SHOWN, access="fetch", coverage=Coverage(argument="https://docs.python.org/3/"))
    trap = PlannedCall(
        announcement=SHOWN, access="fetch", coverage=Coverage(argument="https://docs.python.org.evil.example/3/")
    )
    assert isinstance(decide("fetch", page, "ask", rules), Allow)
    assert decide("fetch", trap, "ask", rules) == Ask()


def test_a_tool_called_through_another_tool_is_judged_by_its_own_name() -> None:
    inner = PlannedCall(announcement=SHOWN, access="external", coverage=Coverage(rule_tool="db__drop"))
    assert isinstance(decide("call_tool", inner, "auto", user_rules(["call_tool"], ["db__drop"])), Refuse)
    assert rule_for("call_tool", inner, allow=True, cwd="/w").tool == "db__drop"


def test_plan_mode_asks_for_external_tools_that_the_users_file_marks_read_only() -> None:
    assert (
        decide(
            "db__get",
            PlannedCall(announcement=SHOWN, access="external", coverage=Coverage(is_read_only=True)),
            "plan",
            (),
        )
        == Ask()
    )
    assert isinstance(decide("db__get", PlannedCall(announcement=SHOWN, access="external"), "plan", ()), Refuse)


@pytest.mark.parametrize(
    "spelling",
    [
        *("http://h.example/secret", "http://h.example/docs/../secret", "http://h.example/x/../secret"),
        *("http://h.example/./secret", "http://h.example/x/%2e%2e/secret", "http://h.example/x/.%2E/secret/a"),
        *(
            "http://h.example/%73ecret",
            "HTTP://H.Example:80/secret",
            "http://h.example./secret",
            "http:\\\\h.example\\secret",
        ),
        *(
            "http://h.example/sec\nret",
            "http://h%2eexample/secret",
            "http://h.example/SECRET",
            "http://h.example//secret",
        ),
        *(
            "http://ｈ.example/secret",
            "http://h。example/secret",
            "http://h.example/%2573ecret",
            "http://h.example/%2fsecret",
        ),
    ],
)
def test_no_spelling_of_a_url_gets_past_a_deny_rule_or_into_an_allow_rule(spelling: str) -> None:
    url = normalize_url(spelling)
    call = PlannedCall(
        announcement=SHOWN, access="fetch", coverage=Coverage(argument=url, narrower_arguments=lenient_urls(url))
    )
    denying = user_rules(["fetch"], ["fetch(http://h.example/secret*)"])
    allowing = user_rules(["fetch(http://h.example/docs/*)"], [])
    assert isinstance(decide("fetch", call, "ask", denying), Refuse)
    assert decide("fetch", call, "ask", allowing) == Ask()


@pytest.mark.parametrize(
    ("rule", "url", "is_covered"),
    [
        ("https://*.a.example/*", "https://www.a.example/x", True),
        ("https://*.a.example/*", "https://evil.example/.a.example/", False),
        ("https://a.example/*", "https://a.example:8443/", False),
        ("https://a.example", "https://a.example/", True),
        ("https://a.example", "https://a.example/x", False),
        ("https://a.example*", "https://a.example/x/y", True),
        ("HTTPS://Bücher.example:443/a b/%7E*", "https://xn--bcher-kva.example/a%20b/~x/y?z", True),
        ("http://[::1]:8080/*", "http://[::1]:8080/x", True),
        ("http://[0:0::1]/*", "http://[::1]/x", True),
        ("http://127.1/*", "http://127.0.0.1/x", True),
        ("http*://a.example/x?y=*", "https://a.example/x?y=1", True),
        ("*a.example*", "https://a.example/x", True),
    ],
)
def test_a_rule_for_urls_is_read_like_a_url(rule: str, url: str, is_covered: bool) -> None:
    call = PlannedCall(announcement=SHOWN, access="fetch", coverage=Coverage(argument=normalize_url(url)))
    assert isinstance(decide("fetch", call, "ask", user_rules([f"fetch({rule})"], [])), Allow) is is_covered
    assert isinstance(decide("fetch", call, "ask", user_rules([], [f"fetch({rule})"])), Refuse) is is_covered
