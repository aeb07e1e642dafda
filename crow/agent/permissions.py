"""Whether a call may run, decided from the mode, the rules and what the call touches.

The checks run in this order: refusals (a deny rule, plan mode), calls that never need permission, the user's rules,
what the mode allows. Every other call asks the user. A write to a protected path asks each time, even if a rule allows
it. A call outside the workspace asks in every mode, unless a rule names its path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, TypeAlias, get_args
from unicodedata import normalize

from crow.domain.errors import ArgumentError
from crow.domain.messages import JsonObject
from crow.tools import PlannedCall

Mode: TypeAlias = Literal["ask", "accept-edits", "plan", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)

RULE = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)
TYPED = re.compile(r"([A-Za-z0-9_*?-]{1,64})(?:\((\s*+\S.*)\))?", re.DOTALL)
PLAIN_NAME = re.compile(r"[^*?]+")
WITH_ARGUMENT = ("shell", "read_file", "write_file", "edit_file", "list_files", "grep", "fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A permission rule of the user. `tool` is the name of a tool or a glob of names.

    Without an `argument` the rule covers every call of the tool inside the workspace. Otherwise `argument` is the exact
    argument of the call. With `is_pattern` it is the first words of a command line, a glob of paths, or a glob of other
    arguments. `is_users` means that the rule comes from the user's file and not from the session.
    """

    tool: str
    argument: str | None
    allow: bool
    is_pattern: bool = False
    is_users: bool = False

    def as_json(self) -> JsonObject:
        """The rule as it is stored in the session's row."""
        plain = {"tool": self.tool, "argument": self.argument, "allow": self.allow}
        return plain | {"pattern": True} if self.is_pattern else plain

    def covers(self, name: str, call: PlannedCall) -> bool:
        """Whether the rule applies to this call."""
        if not fnmatchcase(name, self.tool) or (self.allow and call.is_protected):
            return False
        if self.allow and call.asks_once:
            return not self.is_pattern and self.argument is not None and self.argument == call.argument
        if self.argument is None:
            return not (self.allow and call.is_outside)
        if not self.is_pattern:
            return self.argument == call.argument
        if call.access == "execute" and call.argument is not None:
            return covers_command(self.argument, call.argument, allow=self.allow)
        if call.rule_paths:
            matcher = path_matcher(self.argument, ignore_case=not self.allow)
            return any(matcher.fullmatch(normalize("NFC", path)) for path in call.rule_paths)
        return call.argument is not None and fnmatchcase(call.argument, self.argument)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """The call may run. `why` is stored with the call."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The user has to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """The call may not run. `words` tells the model why."""

    words: str


Decision: TypeAlias = Allow | Ask | Refuse


def decide(name: str, call: PlannedCall, mode: str, rules: Sequence[Rule]) -> Decision:
    """Decide whether a call of tool `name` may run. An unknown mode is as strict as `ask`."""
    name = call.rule_tool or name
    covering = [rule for rule in rules if rule.covers(name, call)]
    if any(not rule.allow for rule in covering) or (name == "skill" and is_unreadable(call, rules)):
        return Refuse(words=f"The user has forbidden this call of {name}. Do it another way, or ask them.")
    is_harmless = call.access in ("none", "read") or (call.access == "external" and call.is_read_only)
    if mode == "plan" and not is_harmless:
        return Refuse(
            words=f"{name} is not available in plan mode: nothing may be changed or run. "
            "Read, search and write the plan; the user leaves plan mode when they agree with it."
        )
    if call.access == "none":
        return Allow(why="touches only the session")
    if call.access == "read" and not call.is_outside and not call.asks_once:
        return Allow(why="reads inside the workspace are free")
    if covering:
        users = any(rule.is_users for rule in covering)
        return Allow(why="allowed by the user's rules" if users else "always allowed by the user in this session")
    if call.is_outside or call.is_protected or call.asks_once:
        return Ask()
    if mode == "auto" or (mode == "accept-edits" and call.access == "write"):
        return Allow(why=f"mode {mode}")
    return Ask()


def is_unreadable(call: PlannedCall, rules: Sequence[Rule]) -> bool:
    """Whether a deny rule for `read_file` covers the file that this call of another tool reads."""
    return bool(call.rule_paths) and any(not rule.allow and rule.covers("read_file", call) for rule in rules)


def covers_command(pattern: str, line: str, *, allow: bool) -> bool:
    """Whether a command line begins with the pattern's words or, for a deny rule, contains them anywhere."""
    wanted = first_words(pattern)
    if wanted is None:
        return not allow and pattern in line
    if not allow:
        return mentions(line, wanted)
    words = simple_words(line)
    return bool(wanted) and words is not None and words[: len(wanted)] == wanted


def first_words(pattern: str) -> tuple[str, ...] | None:
    """The words that a command line must begin with. A `*` at the end adds nothing."""
    return simple_words(pattern[:-2] if pattern.endswith((" *", ":*")) else pattern)


BARE = r"[^\s;&|<>()$`\0*?\[\]{}!#~^\\'\"]"
"""Matches a character that has no special meaning for the shell outside of quotes."""
PIECE = re.compile(rf"""(?P<blank>[ \t]+)|'(?P<single>[^'\n\0]*)'|"(?P<double>[^"\n\0$`\\!]*)"|(?P<bare>{BARE}+)""")
SEPARATORS = re.compile(r"[\s;&|<>()`{}$'\"\\]+")


def simple_words(line: str) -> tuple[str, ...] | None:
    """The words of a single plain command, with quotes removed. None for any line in which a shell could see more than
    that.

    Allow rules use this function, so they never cover operators, substitutions, redirections, expansions or further
    lines.
    """
    words: list[str] = []
    pieces: list[str] = []
    at = 0
    while at < len(line):
        found = PIECE.match(line, at)
        if found is None or (found["bare"] is not None and not found["bare"].isprintable()):
            return None
        at = found.end()
        if found["blank"] is None:
            pieces.append(found[found.lastgroup or 0])
        elif pieces:
            words.append("".join(pieces))
            pieces = []
    return tuple([*words, "".join(pieces)] if pieces else words)


def mentions(line: str, words: Sequence[str]) -> bool:
    """Whether `words` occur next to each other anywhere in the line, also in quotes or behind operators.

    Deny rules use this function, so they cover too much rather than too little. A program also matches if the line
    gives its path.
    """
    if not words:
        return True
    first, *rest = words
    for pieces in (SEPARATORS.split(line), SEPARATORS.split(re.sub(r"['\"\\]", "", line))):
        for start in range(len(pieces) - len(rest)):
            is_first = first in (pieces[start], pieces[start].rpartition("/")[2])
            if is_first and pieces[start + 1 : start + len(words)] == rest:
                return True
    return False


GLOB = re.compile(r"\*\*/|\*\*|\*|\?|[^*?]+")
GLOB_MEANINGS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@lru_cache(maxsize=256)
def path_matcher(pattern: str, *, ignore_case: bool) -> re.Pattern[str]:
    """A glob of paths as a regular expression.

    A pattern without a slash matches names in any directory. `**` matches across directories. A pattern that ends with
    a slash matches everything below that directory. A deny rule ignores case, as some file systems do. Unicode is
    compared in its composed form (NFC).
    """
    pattern = normalize("NFC", os.path.expanduser(pattern))
    if pattern.endswith("/"):
        pattern += "**"
    source = "".join(GLOB_MEANINGS.get(part) or re.escape(part) for part in GLOB.findall(pattern))
    anywhere = "" if "/" in pattern else "(?:.*/)?"
    return re.compile(anywhere + source, re.DOTALL | (re.IGNORECASE if ignore_case else 0))


def user_rules(allow: Sequence[str], deny: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of the user's file, such as `grep`, `shell(git status)` or `edit_file(docs/**)`."""
    return tuple(
        Rule(tool=found[1], argument=found[2], allow=allows, is_pattern=found[2] is not None, is_users=True)
        for texts, allows in ((deny, False), (allow, True))
        for text in texts
        if (found := RULE.fullmatch(text.strip())) is not None
    )


def typed_rule(text: str, *, allow: bool) -> Rule:
    """Parse a rule for the session that the user typed.

    :raises ~crow.domain.errors.ArgumentError: the text is not a rule, or the rule would have no effect.
    """
    found = TYPED.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(
            f"`{text}` is not a rule. A rule is a tool, such as `write_file`, or a tool with an argument, such as "
            "`shell(git status)`, `edit_file(docs/**)` or `fetch(https://example.com/*)`."
        )
    tool, argument = found.groups()
    if argument is not None and PLAIN_NAME.fullmatch(tool) and tool not in WITH_ARGUMENT:
        raise ArgumentError(
            f"A rule about `{tool}` takes no argument; write `{tool}` alone. Tools with an argument: "
            f"{', '.join(f'`{name}`' for name in WITH_ARGUMENT)}."
        )
    if allow and tool == "skill":
        raise ArgumentError(
            f"`{text}` would allow nothing: each skill of a workspace is asked about by itself, and again when it has "
            "changed. A rule can only deny skills."
        )
    if allow and tool == "shell" and argument is not None and not first_words(argument):
        raise ArgumentError(
            f"`{text}` would allow nothing: a command is allowed by its first words, without operators, variables or "
            "wildcards, such as `shell(git status)`."
        )
    return Rule(tool=tool, argument=argument, allow=allow, is_pattern=argument is not None)


def rule_text(rule: Rule) -> str:
    """The rule as the user would type it. A rule about one exact argument is described in words."""
    if rule.argument is None:
        return f"`{rule.tool}`"
    argument = " ".join(rule.argument.split())
    return f"`{rule.tool}({argument})`" if rule.is_pattern else f"`{rule.tool}`, exactly `{argument}`"


def rule_for(name: str, call: PlannedCall, *, allow: bool) -> Rule:
    """The rule to store when the user answers "always" for this call. For a file outside the workspace, the rule covers
    only that file."""
    name = call.rule_tool or name
    if call.is_outside and call.rule_paths and "*" not in call.rule_paths[0] and "?" not in call.rule_paths[0]:
        return Rule(tool=name, argument=call.rule_paths[0], allow=allow, is_pattern=True)
    return Rule(tool=name, argument=call.argument, allow=allow)


def rule_words(rule: Rule) -> str:
    """What the rule covers, for the label of the option that the user picks."""
    if rule.argument is None:
        return f"every {rule.tool} call in this session"
    line = " ".join(rule.argument.split())
    shown = f"`{line if len(line) <= 60 else line[:57] + '...'}` in this session"
    return f"{rule.tool} of {shown}" if rule.is_pattern else shown


def rules_in(values: Iterable[JsonObject]) -> tuple[Rule, ...]:
    """The valid rules of a session's row, in order."""
    return tuple(rule for value in values if (rule := rule_from(value)) is not None)


def rule_from(value: JsonObject) -> Rule | None:
    """A rule of the session's row; None if it is invalid."""
    tool, argument, allow = value.get("tool"), value.get("argument"), value.get("allow")
    if isinstance(tool, str) and isinstance(allow, bool) and (argument is None or isinstance(argument, str)):
        return Rule(tool=tool, argument=argument, allow=allow, is_pattern=value.get("pattern") is True)
    return None
