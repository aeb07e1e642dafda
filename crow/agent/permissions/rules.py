"""Decides whether a call may run, from the mode, the rules and what the call touches.

The checks run in this order: refusals (a deny rule, plan mode), calls that never need permission, the user's rules, and
what the mode allows. For every other call, crow asks the user. If a call touches a protected path, crow asks each time,
even if a rule allows the call. If a call reaches outside the workspace, crow asks in every mode, unless a rule names
the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from crow.agent.permissions.command_line import named_files
from crow.agent.permissions.command_patterns import (
    Certainty,
    allows_command,
    first_words,
    has_star,
    kind_of_command,
    runs,
)
from crow.agent.permissions.path_patterns import is_absolute, names_path, path_matcher
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.domain.text import shorten, title_line
from crow.store import SessionRow
from crow.tools import AGENT_MODES, NOTHING_EXCLUDED, CommandAccess, ExcludedPaths, PlannedCall, Workspace
from crow.tools.network.hosts import REGISTRIES, covers_host, is_host_pattern
from crow.tools.urls import NO_URL_RULES, UrlRules, covers_url, url_expression

Mode: TypeAlias = Literal["ask", "accept-edits", "plan", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
_ACCESSES: tuple[CommandAccess, ...] = get_args(CommandAccess)

_RULE = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)
_TYPED = re.compile(r"([A-Za-z0-9_*?-]{1,64})(?:\((\s*+\S.*)\))?", re.DOTALL)
_PLAIN_NAME = re.compile(r"[^*?]+")
_WITH_ARGUMENT = (
    *("shell", "read_file", "write_file", "edit_file", "apply_patch", "list_files", "grep", "fetch", "recall"),
    "sampling",
    "shell_changes",
    "network",
    "network_write",
)
_SEARCHES = ("grep", "list_files")
_CHANGES = ("edit_file", "write_file", "apply_patch")
KEPT_CHANGES = "shell_changes"
"""The name in rules for what commands change in their layers."""
NETWORK = "network"
"""The name in rules for the hosts that commands reach."""
NETWORK_WRITE = "network_write"
"""The name in rules for what commands may change at hosts with the user's credential."""
_ASKED_BY_CONTENT = ("skill", "task")
"""Tools that load a file of the workspace, such as a skill, only if the user allows it. If the file's content changes,
crow asks the user again."""


def narrower_mode(first: str, second: str) -> str:
    """Of the two modes, return the one that allows less. An unknown mode is treated as `ask`."""
    return min(first, second, key=lambda mode: AGENT_MODES.index(mode if mode in AGENT_MODES else "ask"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionRule:
    """A permission rule of the user."""

    tool: str
    """The name of a tool, or a glob of names."""
    argument: str | None
    """The exact argument of the call or, if `is_pattern` is true, a command line, a glob of paths, or a glob of other
    arguments; see `allows` and `_forbids`. With None, the rule covers every call of the tool inside the workspace."""
    allow: bool
    is_pattern: bool = False
    is_users: bool = False
    """The rule comes from the user's file and not from the session."""
    access: CommandAccess | None = None
    """The most access with which the rule allows a command. None means any access."""
    cwd: str | None = None
    """The only directory in which an allow rule of a session applies. None in rules of the user's file, and in rules
    that an older version of crow stored."""
    fingerprint: str = ""
    """Set if the rule comes from an answer about an MCP tool: the rule covers the tool only as it was then."""
    definition: str = ""
    """The title, description and schema of that tool."""
    is_typed: bool = False
    """The user typed the rule. So it covers an MCP tool by its name, also after its server has changed the tool."""

    def as_json(self) -> JsonObject:
        """Return the rule as it is stored in the session's row."""
        stored: dict[str, object] = {"tool": self.tool, "argument": self.argument, "allow": self.allow}
        optional = {"pattern": self.is_pattern or None, "access": self.access, "cwd": self.cwd}
        optional |= {"fingerprint": self.fingerprint or None, "definition": self.definition or None}
        optional |= {"typed": self.is_typed or None}
        return stored | {name: value for name, value in optional.items() if value is not None}

    def allows(self, name: str, call: PlannedCall) -> bool:
        """Return whether this is an allow rule that covers the call.

        A rule covers no protected path. A rule covers a path outside the workspace only if the rule's pattern is
        absolute. A command pattern covers a command that consists of exactly the pattern's words. If the pattern ends
        with `*`, the command may have more words after those of the pattern.
        """
        touched, coverage = call.touched, call.coverage
        if not self.allow or not fnmatchcase(name, self.tool) or touched.is_protected or self.is_outdated(call):
            return False
        if coverage.asks_once:
            if self.is_pattern and name in _ASKED_BY_CONTENT:  # a pattern could match files that the user has not seen
                return False
            return self.argument is not None and self.argument in (coverage.argument, *coverage.wider_arguments)
        asked = call.command_access or "full"
        if self.access is not None and _ACCESSES.index(asked) > _ACCESSES.index(self.access):
            return False
        if self.argument is None:
            return not touched.is_outside
        if name == NETWORK:
            return covers_host(self.argument, coverage.argument or "")
        if call.access == "execute" and self.is_pattern and coverage.argument is not None:
            return allows_command(self.argument, coverage.argument, asked)
        if not self.is_pattern:
            return self.argument in (coverage.argument, *touched.rule_paths)
        if touched.rule_paths:
            return (not touched.is_outside or is_absolute(self.argument)) and names_path(
                self.argument, touched.rule_paths
            )
        if call.access == "fetch" and coverage.argument is not None:
            return covers_url(self.argument, coverage.argument)
        return coverage.argument is not None and fnmatchcase(coverage.argument, self.argument)

    def is_outdated(self, call: PlannedCall) -> bool:
        """Return whether the called MCP tool is not the one that the user's answer was about. An older version of crow
        stored no fingerprints, so what its rules were about is unknown."""
        is_by_name = self.is_users or self.is_typed or _PLAIN_NAME.fullmatch(self.tool) is None
        return not is_by_name and self.fingerprint != call.coverage.fingerprint

    def forbids(self, name: str, call: PlannedCall) -> Certainty:
        """Return whether this is a deny rule that covers the call.

        A command is covered if it runs the pattern's command; see
        :func:`crow.agent.permissions.command_patterns.runs`. A file is covered if any of its names matches.
        """
        if self.allow or not fnmatchcase(name, self.tool):
            return "no"
        if self.argument is None:
            return "yes"
        if name == NETWORK:
            return "yes" if covers_host(self.argument, call.coverage.argument or "") else "no"
        paths = (*call.touched.rule_paths, *call.touched.other_paths)
        own, narrower = call.coverage.argument, call.coverage.narrower_arguments
        arguments = narrower if own is None else (own, *narrower)
        if not self.is_pattern:
            return "yes" if self.argument in (*arguments, *paths) else "no"
        if call.access == "execute" and call.coverage.argument is not None:
            return runs(call.coverage.argument, self.argument)
        if paths:
            return "yes" if names_path(self.argument, paths, ignore_case=True) else "no"
        if call.access == "fetch":
            return "yes" if any(covers_url(self.argument, url, ignore_case=True) for url in arguments) else "no"
        return "yes" if any(fnmatchcase(argument, self.argument) for argument in arguments) else "no"


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
    """Decide whether what a command or a subagent has changed in its layer is kept. The command itself was allowed to
    run. If the answer is no, the changes of a subagent stay in its layer."""
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
    """Return the names of a changed file in rules: its absolute path and, inside cwd, also the relative one."""
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
    """Return the folder below `cwd` that contains all these paths; empty if there is none."""
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
    reads_too = name in _ASKED_BY_CONTENT or (name in _SEARCHES and rule.argument is not None)
    if certainty == "no" and reads_too and call.touched.rule_paths:
        certainty = rule.forbids("read_file", call)
    if certainty == "no" and call.access == "execute" and call.coverage.argument and is_path_rule(rule, "read_file"):
        words = (os.path.expanduser(word).removeprefix("./") for word in named_files(call.coverage.argument))
        certainty = "maybe" if names_path(rule.argument or "", words, ignore_case=True) else "no"
    if certainty == "no" and call.touched.has_unknown_names and is_path_rule(rule, name, *["read_file"] * reads_too):
        certainty = "maybe"
    return certainty


def is_path_rule(rule: PermissionRule, *tools: str) -> bool:
    """Return whether this is a deny rule that has an argument and applies to one of `tools`."""
    return not rule.allow and rule.argument is not None and any(fnmatchcase(tool, rule.tool) for tool in tools)


def named_places(rules: Iterable[PermissionRule]) -> tuple[str, ...]:
    """Return the paths in deny rules. Each path is cut before its first component that contains a wildcard. A path is
    either absolute or relative to cwd."""
    patterns = (os.path.expanduser(rule.argument) for rule in rules if not rule.allow and rule.argument is not None)
    return tuple(place for pattern in patterns if (place := re.split(r"[^/]*[*?]", pattern)[0]))


def doubt(rule: PermissionRule) -> str:
    """Explain to the user why crow asks about a call that this deny rule may cover."""
    place = "in config.toml" if rule.is_users else "of this session"
    return f"The deny rule {title_line(rule_text(rule))} {place} may forbid this call; crow cannot tell."


def outdated_rule(name: str, call: PlannedCall, rules: Iterable[PermissionRule]) -> PermissionRule | None:
    """Return the rule that allowed this MCP tool before its server changed it, or before crow stored fingerprints."""
    name = call.coverage.rule_tool or name
    outdated = (rule for rule in rules if rule.allow and rule.tool == name and rule.is_outdated(call))
    return max(outdated, key=lambda rule: bool(rule.fingerprint), default=None)


def change_of_tool(rule: PermissionRule, call: PlannedCall) -> tuple[str, str]:
    """Explain to the user why crow asks again about an MCP tool. Also return what its server changed, as a diff."""
    if not rule.fingerprint or not call.coverage.fingerprint:
        return "You allowed this tool before crow noted what it is. From now on, crow asks again if it changes.", ""
    lines = unified_diff(rule.definition.split("\n"), call.coverage.definition.split("\n"), lineterm="", n=2)
    changes = "\n".join([*lines][2:]) or "The difference is in the part that is not shown."
    return "You allowed this tool always, but its server has changed it since. The changes:", changes


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
    """Return the files that a search must leave out, or that a confined command must not read. A change of a file runs
    the user's checks, which are such commands."""
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


def current_rules(users: Sequence[PermissionRule], row: SessionRow) -> tuple[PermissionRule, ...]:
    """Return the rules that apply in a session: first the rules of the user's file, then the rules stored with the
    session."""
    return (*users, *rules_at(row.permissions, row.cwd))


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


def user_rules(allow: Sequence[str], deny: Sequence[str]) -> tuple[PermissionRule, ...]:
    """Parse the rules of the user's file, such as `grep`, `shell(git status)` or `edit_file(docs/**)`."""
    return tuple(
        PermissionRule(tool=found[1], argument=found[2], allow=allows, is_pattern=found[2] is not None, is_users=True)
        for texts, allows in ((deny, False), (allow, True))
        for text in texts
        if (found := _RULE.fullmatch(text.strip())) is not None
    )


def typed_rule(text: str, *, allow: bool, cwd: str) -> PermissionRule:
    """Parse a session rule that the user typed. An allow rule applies only in `cwd`.

    :raises ~crow.domain.errors.ArgumentError: the text is not a rule, or the rule would have no effect.
    """
    if allow and text.split() == ["shell", "--access", "write"]:
        return rule_for_writes(cwd)
    found = _TYPED.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(
            f"`{text}` is not a rule. A rule is a tool, such as `write_file`, or a tool with an argument, such as "
            "`shell(git status)`, `edit_file(docs/**)` or `fetch(https://example.com/*)`."
        )
    tool, argument = found.groups()
    if argument is not None and _PLAIN_NAME.fullmatch(tool) and tool not in _WITH_ARGUMENT:
        raise ArgumentError(
            f"A rule about `{tool}` takes no argument; write `{tool}` alone. Tools with an argument: "
            f"{', '.join(f'`{name}`' for name in _WITH_ARGUMENT)}."
        )
    if tool == NETWORK and argument is not None and argument != REGISTRIES and not is_host_pattern(argument):
        raise ArgumentError(
            f"`{text}` names no host: write a name, such as `network(api.example.com)`, `network(*.example.com)` or "
            "`network(localhost:8000)`, or `network(registries)` for the usual registries of packages."
        )
    if allow and tool == "skill":
        raise ArgumentError(
            f"`{text}` would allow nothing: crow asks about each skill of a workspace separately, and again when the "
            "skill has changed. A rule can only deny skills."
        )
    if allow and tool == "recall" and argument not in ("workspace", "all"):
        raise ArgumentError(
            f"`{text}` would allow nothing: write `recall(workspace)` for the sessions of this directory, or "
            "`recall(all)` for all sessions. Searching the current session needs no permission."
        )
    if allow and tool == "shell" and argument is not None and not first_words(argument):
        raise ArgumentError(
            f"`{text}` would allow nothing: give the words of a command without operators and variables, such as "
            "`shell(git status)`, or `shell(make *)` for any words after `make`."
        )
    scope = _normal_cwd(cwd) if allow else None
    is_pattern, is_typed = argument is not None, allow and "__" in tool
    return PermissionRule(
        tool=tool, argument=argument, allow=allow, is_pattern=is_pattern, cwd=scope, is_typed=is_typed
    )


def rule_text(rule: PermissionRule) -> str:
    """Return the rule as the user would type it. A rule about one exact argument is described in words."""
    if rule.argument is None:
        return f"`{rule.tool}{f' --access {rule.access}' if rule.access else ''}`"
    argument = " ".join(rule.argument.split())
    return f"`{rule.tool}({argument})`" if rule.is_pattern else f"`{rule.tool}`, exactly `{argument}`"


def scope_text(rule: PermissionRule, cwd: str) -> str:
    """Describe the limits of an allow rule that its text does not show, such as its directory. Return "" if there are
    none."""
    if not rule.allow:
        return ""
    limits = []
    if rule.argument is not None and fnmatchcase("shell", rule.tool):
        if rule.is_pattern:
            limits.append("these words and more" if has_star(rule.argument) else "exactly these words")
        limits.append("any access" if rule.access in (None, "full") else f"access {rule.access}")
    if rule.cwd is not None:
        if rule.fingerprint:
            limits.append("until its server changes it")
        limits.append(f"in {rule.cwd}" if rule.cwd == _normal_cwd(cwd) else f"only in {rule.cwd}, so not here")
    return ", ".join(limits)


def rules_for(name: str, call: PlannedCall, *, allow: bool, cwd: str) -> tuple[PermissionRule, ...]:
    """Return the rules to store when the user answers "always" for this call: one for each kind of part."""
    name = call.coverage.rule_tool or name
    return tuple(dict.fromkeys(rule_for(name, part, allow=allow, cwd=cwd) for part in call.each))


def rule_for(name: str, call: PlannedCall, *, allow: bool, cwd: str) -> PermissionRule:
    """Return the rule to store when the user answers "always" for this call.

    For a file outside the workspace, the rule covers only that file. For a command, it covers only the same command
    line with at most the same access. If the answer is about what a plain command has changed, the rule covers this
    kind of command. An allow rule applies only in `cwd`.
    """
    rule = PermissionRule(
        tool=call.coverage.rule_tool or name,
        argument=call.coverage.argument,
        allow=allow,
        access=call.command_access if allow else None,
        cwd=_normal_cwd(cwd) if allow else None,
        fingerprint=call.coverage.fingerprint if allow else "",
        definition=call.coverage.definition if allow else "",
    )
    if allow and call.changed and rule.argument and (pattern := kind_of_command(rule.argument)):
        return replace(rule, argument=pattern, is_pattern=True)
    if not call.touched.is_outside or not call.touched.rule_paths:
        return rule
    path = call.touched.rule_paths[0]
    return replace(rule, argument=path, is_pattern="*" not in path and "?" not in path)


def rule_for_changes(folder: str, cwd: str) -> PermissionRule:
    """Return the rule to store when the user allows what commands change below a folder. It applies only in `cwd`."""
    argument = f"{folder}/**"
    return PermissionRule(tool=KEPT_CHANGES, argument=argument, allow=True, is_pattern=True, cwd=_normal_cwd(cwd))


def rule_for_writes(cwd: str) -> PermissionRule:
    """Return the rule to store when the user allows all commands that are confined to `write` access. The rule applies
    only in `cwd`."""
    return PermissionRule(tool="shell", argument=None, allow=True, access="write", cwd=_normal_cwd(cwd))


def allowing_rule(name: str, call: PlannedCall) -> str:
    """Return the narrowest rule that would allow this call if the user's settings contained that rule. Return "" if no
    single rule would."""
    name = call.coverage.rule_tool or name
    arguments = (*reversed(call.each[0].touched.rule_paths), call.coverage.argument)
    for text in (*(f"{name}({argument})" for argument in arguments if argument), name):
        if all(any(rule.allows(name, part) for rule in user_rules([text], ())) for part in call.each):
            return text
    return ""


def _normal_cwd(cwd: str) -> str:
    return os.path.normpath(cwd)


def rule_words(rule: PermissionRule) -> str:
    """Describe what the rule covers, for the label of the option that the user picks."""
    place = "in this session" if rule.cwd is None else "in this directory and session"
    if rule.argument is None:
        return f"every {rule.tool} call {place}"
    line = " ".join(rule.argument.split())
    shown = f"`{shorten(line, 60)}`"
    if rule.tool == NETWORK:
        return f"commands to connect to {shown} {place}"
    if rule.tool == NETWORK_WRITE:
        return f"commands to change {shown} with your credential {place}"
    if rule.tool == "sampling":
        return f"requests of {shown} to your model {place}"
    limit = f" with access {rule.access}" if rule.access in ("read", "write") else ""
    return f"{rule.tool} of {shown} {place}" if rule.is_pattern else f"{shown}{limit} {place}"


def with_answer(rules: Sequence[PermissionRule], known: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
    """Return the stored rules `known`, and after them the `rules` that come from an answer of the user. An answer about
    an MCP tool replaces earlier answers about it, because the tool may have changed since."""
    others = [value for value in known if not any(rule.fingerprint and _replaces(rule, value) for rule in rules)]
    return (*others, *(stored for rule in rules if (stored := rule.as_json()) not in others))


def _replaces(rule: PermissionRule, value: JsonObject) -> bool:
    """Return whether a stored rule is an earlier answer about the same MCP tool in the same directory."""
    other = rule_from(value)
    is_same = other is not None and (other.tool, other.argument) == (rule.tool, rule.argument)
    return is_same and other is not None and other.allow and not other.is_typed and other.cwd in (None, rule.cwd)


def rules_in(values: Iterable[JsonObject]) -> tuple[PermissionRule, ...]:
    """Return the valid rules of a session's row, in order."""
    return tuple(rule for value in values if (rule := rule_from(value)) is not None)


def rules_at(values: Iterable[JsonObject], cwd: str) -> tuple[PermissionRule, ...]:
    """Return the rules of a session's row that apply in `cwd`: all deny rules, and the allow rules for `cwd`. An allow
    rule without a directory applies too, because it can only have been stored for `cwd`: when a session moves to
    another directory, `bind_rules` first limits these rules to the directory that the session leaves."""
    here = _normal_cwd(cwd)
    return tuple(rule for rule in rules_in(values) if not rule.allow or rule.cwd in (None, here))


def bind_rules(values: Sequence[JsonObject], cwd: str) -> tuple[JsonObject, ...]:
    """Return the rules to store when a session moves from `cwd` to another directory. Older versions of crow stored
    rules that allow a call in any directory. After the move, such a rule applies only in `cwd`."""
    return tuple(
        {**value, "cwd": _normal_cwd(cwd)} if value.get("allow") is True and not value.get("cwd") else value
        for value in values
    )


def rule_from(value: JsonObject) -> PermissionRule | None:
    """Parse a rule of the session's row. Return None if the rule is invalid."""
    tool, argument, allow = value.get("tool"), value.get("argument"), value.get("allow")
    access, cwd = value.get("access"), value.get("cwd")
    if (
        isinstance(tool, str)
        and isinstance(allow, bool)
        and (argument is None or isinstance(argument, str))
        and (access is None or access in _ACCESSES)
        and (cwd is None or isinstance(cwd, str))
    ):
        fingerprint, definition = value.get("fingerprint"), value.get("definition")
        return PermissionRule(
            tool=tool,
            argument=argument,
            allow=allow,
            is_pattern=value.get("pattern") is True,
            access=access,
            cwd=cwd,
            fingerprint=fingerprint if isinstance(fingerprint, str) else "",
            definition=definition if isinstance(definition, str) else "",
            is_typed=value.get("typed") is True,
        )
    return None
