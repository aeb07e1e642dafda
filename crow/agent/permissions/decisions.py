"""Decides whether a call may run, from the mode, the rules and what the call touches.

The checks run in this order: refusals (a deny rule, plan mode), calls that never need permission, the user's rules, and
what the mode allows. For every other call, crow asks the user. If a call touches a protected path, crow asks each time,
even if a rule allows the call. If a call reaches outside the workspace, crow asks in every mode, unless a rule names
the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

from crow.agent.permissions.command_line import named_files
from crow.agent.permissions.command_patterns import Certainty
from crow.agent.permissions.path_patterns import names_path, path_matcher
from crow.agent.permissions.rules import (
    ASKED_BY_CONTENT,
    KEPT_CHANGES,
    PermissionRule,
    is_path_rule,
    named_places,
    rule_text,
    user_rules,
)
from crow.domain.text import title_line
from crow.tools import NOTHING_EXCLUDED, ExcludedPaths, PlannedCall, Workspace
from crow.tools.urls import NO_URL_RULES, UrlRules, url_expression

_SEARCHES = ("grep", "list_files")

_CHANGES = ("edit_file", "write_file", "apply_patch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """The decision that the call may run."""

    why: str
    """The reason in words, which is stored with the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The decision to ask the user."""

    doubtful: PermissionRule | None = None
    """A deny rule that may cover the call. If there is one, the user's answer is not stored as a rule."""
    parts: tuple[PlannedCall, ...] = ()
    """The parts of the call that nothing allows, if the call has parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The decision that the call may not run."""

    words: str
    """Tells the model why."""


Decision: TypeAlias = Allow | Ask | Refuse


def decide(
    name: str, call: PlannedCall, mode: str, rules: Sequence[PermissionRule], *, is_bounded: bool = False
) -> Decision:
    """Decide whether a call of tool `name` may run. An unknown mode is as strict as `ask`.

    `is_bounded` means that the people who answer crow's questions do not own this machine. In that case, a call that
    leaves the workspace or the sandbox is refused if no rule in config.toml allows it. A call with parts is refused if
    one of them is, and allowed if all are.
    """
    name = call.coverage.rule_tool or name
    if call.parts:
        decisions = [decide(name, part, mode, rules, is_bounded=is_bounded) for part in call.parts]
        return _together(call.parts, decisions)
    if call.changed:
        return _decide_about_changes(name, call, mode, rules)
    doubtful = None
    for rule in rules:
        for tool in (name, *call.coverage.like):
            match _forbids(rule, tool, call):
                case "yes":
                    return Refuse(words=_denial(rule, name))
                case "maybe":
                    doubtful = doubtful or rule
    covering = _do_rules_allow(name, call, rules)
    users = _do_rules_allow(name, call, [rule for rule in rules if rule.is_users])
    is_read_command = call.access == "execute" and call.command_access == "read"
    if is_bounded and not users:
        if call.touched.is_outside:
            return Refuse(words=f"{name}: on this server, calls cannot leave the workspace, and nobody can allow this.")
        if call.access == "execute" and call.command_access not in ("read", "write"):
            return Refuse(words=_NOT_CONFINED)
    if mode == "plan" and (reason := _refusal_in_plan(name, call, is_allowed=users)):
        return Refuse(words=reason)
    if call.access == "none" and not call.coverage.asks_once:
        return Allow(why="touches only the session")
    is_special = call.touched.is_outside or call.touched.is_protected or call.coverage.asks_once
    if doubtful is not None:
        return Ask(doubtful=doubtful)
    if call.is_isolated and call.access == "write" and not call.touched.is_outside:
        return Allow(why="changes only the subagent's own copy")
    if call.access == "read" and not is_special:
        return Allow(why="reads inside the workspace are free")
    if is_read_command:
        return Allow(why="confined: it can change nothing")
    if covering:
        return Allow(why="allowed by the user's rules" if users else "always allowed by the user in this session")
    if is_special:
        return Ask()
    is_confined = call.access == "execute" and call.command_access == "write"
    if (call.access == "write" and mode in ("accept-edits", "auto")) or (is_confined and mode == "auto"):
        return Allow(why=f"mode {mode}")
    return Ask()


def _decide_about_changes(name: str, call: PlannedCall, mode: str, rules: Sequence[PermissionRule]) -> Decision:
    """Decide whether the changes that a command or a subagent made in its layer are kept. The command itself was
    allowed to run. If the answer is no, the changes of a subagent stay in its layer."""
    is_command = call.access == "execute"
    if (refusal := refusal_of_changes(call, rules)) is not None:
        return refusal
    if mode == "plan":
        who = "commands cannot change files, so all changes were dropped" if is_command else "nothing may be changed"
        return Refuse(words=f"In plan mode, {who}.")
    if call.touched.is_protected:
        return Ask()
    if mode in ("accept-edits", "auto"):
        return Allow(why=f"mode {mode}")
    users = [rule for rule in rules if rule.is_users]
    if _do_rules_allow(name, call, users) or _covers_changes(call, users):
        return Allow(why="allowed by the user's rules")
    if _do_rules_allow(name, call, rules) or _covers_changes(call, rules):
        return Allow(why="always allowed by the user in this session")
    return Ask()


def refusal_of_changes(call: PlannedCall, rules: Sequence[PermissionRule]) -> Refuse | None:
    """Return the refusal if a deny rule covers one of the files that a command or a subagent has changed."""
    names = [_names_of(path, call) for path in (*call.changed, *call.silently_changed)]
    for rule in rules:
        if not rule.allow and fnmatchcase(KEPT_CHANGES, rule.tool):
            argument = rule.argument
            if any(argument is None or names_path(argument, each, ignore_case=True) for each in names):
                end = ", so they were dropped." if call.access == "execute" else "."
                return Refuse(words=f"The user's rule {rule_text(rule)} forbids these changes{end}")
    return None


def _names_of(path: str, call: PlannedCall) -> tuple[str, ...]:
    """Return the names by which rules may refer to a changed file: its absolute path and, if the file is inside cwd,
    also its relative path."""
    root = f"{call.changed_below.rstrip('/')}/"
    return (path, path.removeprefix(root)) if call.changed_below and path.startswith(root) else (path,)


def _covers_changes(call: PlannedCall, rules: Sequence[PermissionRule]) -> bool:
    """Return whether the allow rules named `shell_changes` cover all files that a command has changed."""
    allowing = [rule for rule in rules if rule.allow and fnmatchcase(KEPT_CHANGES, rule.tool)]
    return all(
        any(rule.argument is None or names_path(rule.argument, _names_of(path, call)) for rule in allowing)
        for path in call.changed
    )


def common_folder(paths: Sequence[str], cwd: str) -> str:
    """Return the deepest folder that contains all these paths. Return an empty string if it is not below `cwd`, or if
    its name contains a wildcard character."""
    root = os.path.realpath(cwd)
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    return folder if folder.startswith(f"{root}{os.sep}") and not any(sign in folder for sign in "*?") else ""


def _together(parts: Sequence[PlannedCall], decisions: Sequence[Decision]) -> Decision:
    """Return the decision about a call with these parts, from the decisions about each of them."""
    asked, doubtful, reasons = [], None, []
    for part, decision in zip(parts, decisions, strict=True):
        match decision:
            case Refuse():
                return decision
            case Ask(doubtful=rule):
                asked.append(part)
                doubtful = doubtful or rule
            case Allow(why=why):
                reasons.append(why)
    return Ask(doubtful=doubtful, parts=tuple(asked)) if asked else Allow(why="; ".join(dict.fromkeys(reasons)))


def _do_rules_allow(name: str, call: PlannedCall, rules: Sequence[PermissionRule]) -> bool:
    """Return whether the allow rules in `rules` cover a call without parts."""

    def is_allowed(tool: str) -> bool:
        return any(rule.allows(tool, call) for rule in rules)

    return is_allowed(name) or (bool(call.coverage.like) and all(map(is_allowed, call.coverage.like)))


_NOT_CONFINED = (
    "On this server, commands run only if the sandbox confines them, and nobody can allow other commands. Ask for "
    "read or write access, or do it without this command."
)


def _forbids(rule: PermissionRule, name: str, call: PlannedCall) -> Certainty:
    """Return whether a deny rule covers the call.

    A rule that denies a file to `read_file` also denies it to searches, skills and subagents. If a command names a
    file that is denied to `read_file`, the result is "maybe".
    """
    certainty = rule.forbids(name, call)
    reads_too = name in ASKED_BY_CONTENT or (name in _SEARCHES and rule.argument is not None)
    if certainty == "no" and reads_too and call.touched.rule_paths:
        certainty = rule.forbids("read_file", call)
    if certainty == "no" and call.access == "execute" and call.coverage.argument and is_path_rule(rule, "read_file"):
        words = (os.path.expanduser(word).removeprefix("./") for word in named_files(call.coverage.argument))
        certainty = "maybe" if names_path(rule.argument or "", words, ignore_case=True) else "no"
    if certainty == "no" and call.touched.has_unknown_names and is_path_rule(rule, name, *["read_file"] * reads_too):
        certainty = "maybe"
    return certainty


def doubt(rule: PermissionRule) -> str:
    """Explain to the user why crow asks about a call that this deny rule may cover."""
    place = "in config.toml" if rule.is_users else "of this session"
    return f"The deny rule {title_line(rule_text(rule))} {place} may forbid this call; crow cannot tell."


def _denial(rule: PermissionRule, name: str) -> str:
    place = "in config.toml under [permissions]" if rule.is_users else "of this session; see /permissions"
    return (
        f"The user has forbidden this call of {name}. Deny rule: {rule_text(rule)} {place}. Do it another way, "
        "or tell the user, because only the user can remove the rule."
    )


def _refusal_in_plan(name: str, call: PlannedCall, *, is_allowed: bool) -> str | None:
    """Return why plan mode refuses the call, or None if plan mode allows it. `is_allowed` means that a rule of the
    user's file allows the call."""
    plan = "Read files, search, and write the plan; the user leaves plan mode when they agree with the plan."
    start = f"{name} is not available in plan mode"
    if call.touched.is_protected:
        return f"{start} for protected paths, such as keys and settings. {plan}"
    match call.access:
        case "none" | "read":
            return None
        case "execute" if call.command_access == "read":
            return None
        case "execute":
            return (
                f"{start} with {call.command_access or 'full'} access: nothing may be changed. A command with "
                f"read access may run if crow can confine it. {plan}"
            )
        case "external" if call.coverage.is_read_only:
            return None
        case "external":
            return f"{start}, unless its server's table in config.toml lists the tool in read_only. {plan}"
        case "fetch" if is_allowed:
            return None
        case "fetch":
            return f"{start}, unless config.toml allows the address under [permissions]. {plan}"
    return f"{start}: nothing may be changed or run. {plan}"


def excluded_paths(name: str, rules: Sequence[PermissionRule]) -> ExcludedPaths:
    """Return the files that a search must leave out, or that a confined command must not read. Calls that change files
    get them too, because the user's checks run after a change, as confined commands."""
    if name not in (*_SEARCHES, *_CHANGES, "shell"):
        return NOTHING_EXCLUDED
    tools = ("read_file", name) if name in _SEARCHES else ("read_file",)
    denials = [rule for rule in rules if is_path_rule(rule, *tools)]
    patterns = (path_matcher(rule.argument or "", ignore_case=True).pattern for rule in denials)
    return ExcludedPaths(patterns=tuple(patterns), places=named_places(denials))


def url_rules(name: str, mode: str, rules: Sequence[PermissionRule]) -> UrlRules:
    """Return the rules by which a fetch judges its redirects."""
    if name != "fetch":
        return NO_URL_RULES
    about = [rule for rule in rules if fnmatchcase(name, rule.tool)]
    allowed = [rule for rule in about if rule.allow and (rule.is_users or mode != "plan")]
    denied = [rule for rule in about if not rule.allow]
    return UrlRules(allowed=tuple(map(_expression, allowed)), denied=tuple(map(_expression, denied)))


def _expression(rule: PermissionRule) -> str:
    if rule.argument is None:
        return ".*"
    return url_expression(rule.argument) if rule.is_pattern else re.escape(rule.argument)


def may_attach(path: Path, workspace: Workspace, rules: Sequence[PermissionRule]) -> bool:
    """Return whether crow may give the model a file without a tool call. `path` is a resolved path. This call
    blocks."""
    if workspace.read_protection(path) != "none":
        return False
    root = workspace.resolve(".")
    names = (str(path), str(path.relative_to(root))) if path.is_relative_to(root) else (str(path),)
    try:
        return _may_read(names, rules, has_other_names=path.stat().st_nlink > 1 and path.is_file())
    except OSError:
        return False


def _may_read(paths: Sequence[str], rules: Sequence[PermissionRule], *, has_other_names: bool = False) -> bool:
    """Return whether crow may read a file (such as AGENTS.md) on its own, without a tool call. `paths` are the file's
    names, as in `rule_paths`.

    If the file `has_other_names` (hard links), any deny rule for paths forbids reading it, because the rule may be
    about one of those names.
    """
    denials = [rule for rule in rules if rule.argument is not None and is_path_rule(rule, "read_file")]
    return not any(has_other_names or names_path(rule.argument or "", paths, ignore_case=True) for rule in denials)


def allowing_rule(name: str, call: PlannedCall) -> str:
    """Return the narrowest rule that would allow this call if the user's settings contained that rule. Return "" if no
    single rule would."""
    name = call.coverage.rule_tool or name
    arguments = (*reversed(call.each[0].touched.rule_paths), call.coverage.argument)
    for text in (*(f"{name}({argument})" for argument in arguments if argument), name):
        if all(any(rule.allows(name, part) for rule in user_rules([text], ())) for part in call.each):
            return text
    return ""
