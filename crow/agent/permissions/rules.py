"""Permission rules: what each covers, how the user writes and reads them, and how they are stored with a session."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from crow.agent.permissions.command_patterns import (
    Certainty,
    allows_command,
    first_words,
    has_star,
    kind_of_command,
    runs,
)
from crow.agent.permissions.path_patterns import is_absolute, names_path
from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.domain.text import shorten
from crow.store import SessionRow
from crow.tools import AGENT_MODES, CommandAccess, PlannedCall
from crow.tools.network.hosts import REGISTRIES, covers_host, is_host_pattern
from crow.tools.urls import covers_url

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
KEPT_CHANGES = "shell_changes"
"""The name in rules for the changes that commands make in their layers."""
NETWORK = "network"
"""The name in rules for the hosts that commands reach."""
NETWORK_WRITE = "network_write"
"""The name in rules for the changes that commands may make at hosts with the user's credential."""
ASKED_BY_CONTENT = ("skill", "task")
"""Tools that load a file of the workspace, such as a skill, only if the user allows it. If the file's content changes,
crow asks the user again."""


def narrower_mode(first: str, second: str) -> str:
    """Return whichever of the two modes allows less. An unknown mode is treated as `ask`."""
    return min(first, second, key=lambda mode: AGENT_MODES.index(mode if mode in AGENT_MODES else "ask"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionRule:
    """A permission rule of the user."""

    tool: str
    """The name of a tool, or a glob of names."""
    argument: str | None
    """The exact argument of the call or, if `is_pattern` is true, a command line, a glob of paths, or a glob of other
    arguments; see `allows` and `forbids`. With None, the rule covers every call of the tool inside the workspace."""
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
    """Set if the rule comes from an answer about an MCP tool: the rule covers the tool only as the server described it
    then."""
    definition: str = ""
    """The title, description and schema of that tool."""
    is_typed: bool = False
    """The user typed the name of an MCP tool in this rule. So the rule covers the tool by its name, even after the
    server has changed the tool."""

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
            if self.is_pattern and name in ASKED_BY_CONTENT:  # a pattern could match files that the user has not seen
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
        """Return whether the called MCP tool has changed since the user's answer that made this rule. Older versions of
        crow stored no fingerprints, so their rules about MCP tools always count as outdated."""
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


def is_path_rule(rule: PermissionRule, *tools: str) -> bool:
    """Return whether this is a deny rule that has an argument and applies to one of `tools`."""
    return not rule.allow and rule.argument is not None and any(fnmatchcase(tool, rule.tool) for tool in tools)


def named_places(rules: Iterable[PermissionRule]) -> tuple[str, ...]:
    """Return the paths in deny rules. Each path is cut before its first component that contains a wildcard. A path is
    either absolute or relative to cwd."""
    patterns = (os.path.expanduser(rule.argument) for rule in rules if not rule.allow and rule.argument is not None)
    return tuple(place for pattern in patterns if (place := re.split(r"[^/]*[*?]", pattern)[0]))


def outdated_rule(name: str, call: PlannedCall, rules: Iterable[PermissionRule]) -> PermissionRule | None:
    """Return the rule that allowed this MCP tool before its server changed it, or before crow stored fingerprints."""
    name = call.coverage.rule_tool or name
    outdated = (rule for rule in rules if rule.allow and rule.tool == name and rule.is_outdated(call))
    return max(outdated, key=lambda rule: bool(rule.fingerprint), default=None)


def change_of_tool(rule: PermissionRule, call: PlannedCall) -> tuple[str, str]:
    """Explain to the user why crow asks again about an MCP tool. Also return the changes that the server has made to
    the tool, as a diff."""
    if not rule.fingerprint or not call.coverage.fingerprint:
        words = "You allowed this tool before crow recorded its definition. From now on, crow asks again if it changes."
        return words, ""
    lines = unified_diff(rule.definition.split("\n"), call.coverage.definition.split("\n"), lineterm="", n=2)
    changes = "\n".join([*lines][2:]) or "The difference is in the part that is not shown."
    return "You allowed this tool always, but its server has changed it since. The changes:", changes


def current_rules(users: Sequence[PermissionRule], row: SessionRow) -> tuple[PermissionRule, ...]:
    """Return the rules that apply in a session: first the rules of the user's file, then the rules stored with the
    session."""
    return (*users, *rules_at(row.permissions, row.cwd))


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
    """Return the rules to store when the user answers "always" for this call: one for each part, without duplicates."""
    name = call.coverage.rule_tool or name
    return tuple(dict.fromkeys(rule_for(name, part, allow=allow, cwd=cwd) for part in call.each))


def rule_for(name: str, call: PlannedCall, *, allow: bool, cwd: str) -> PermissionRule:
    """Return the rule to store when the user answers "always" for this call.

    For a file outside the workspace, the rule covers only that file. For a command, the rule covers only the same
    command line with at most the same access. If the answer is about the changes that a plain command has made, the
    rule covers all commands of the same kind (see `kind_of_command`). An allow rule applies only in `cwd`.
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
    """Return the rule to store when the user allows commands to change anything below a folder. The rule applies only
    in `cwd`."""
    argument = f"{folder}/**"
    return PermissionRule(tool=KEPT_CHANGES, argument=argument, allow=True, is_pattern=True, cwd=_normal_cwd(cwd))


def rule_for_writes(cwd: str) -> PermissionRule:
    """Return the rule to store when the user allows all commands that are confined to `write` access. The rule applies
    only in `cwd`."""
    return PermissionRule(tool="shell", argument=None, allow=True, access="write", cwd=_normal_cwd(cwd))


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
