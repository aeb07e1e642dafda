"""Whether a call may run: one pure policy over mode, rules and what the call touches.

Refusals come first (a deny rule, plan mode), then what is free, then rules of the user, then what the mode allows;
whatever is left is asked. A write to a protected path is asked each time, and no rule allows it. Everything outside the
workspace is asked in every mode, unless a rule names just that place. A rule speaks of a tool, or of a tool and an
argument: paths by glob, command lines by their first words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args
from unicodedata import normalize

from crow.domain.errors import ArgumentError

if TYPE_CHECKING:
    from crow.domain.messages import JsonObject
    from crow.tools import PlannedCall

__all__ = [
    "MODES",
    "Allow",
    "Ask",
    "Decision",
    "Mode",
    "Refuse",
    "Rule",
    "decide",
    "mentions",
    "rule_for",
    "rule_from",
    "rule_text",
    "rule_words",
    "rules_in",
    "simple_words",
    "typed_rule",
    "user_rules",
]

RULE = re.compile(r"([^()]+)(?:\((.*)\))?", re.DOTALL)
TYPED = re.compile(r"([A-Za-z0-9_*?-]{1,64})(?:\((\s*+\S.*)\))?", re.DOTALL)
PLAIN_NAME = re.compile(r"[^*?]+")
WITH_ARGUMENT = ("shell", "read_file", "write_file", "edit_file", "list_files", "grep", "fetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the user said once and for all. `tool` is a name, or a glob of names.

    `argument` None covers every call of the tool inside the workspace. Else it is the call's argument itself, or with
    `is_pattern` the first words of a command line, a glob of paths, or a glob of what else the argument may be.
    `is_users` tells a rule of the user's file from one of the session.
    """

    tool: str
    argument: str | None
    allow: bool
    is_pattern: bool = False
    is_users: bool = False

    def as_json(self) -> JsonObject:
        """As it is kept in the session's row."""
        plain = {"tool": self.tool, "argument": self.argument, "allow": self.allow}
        return plain | {"pattern": True} if self.is_pattern else plain

    def covers(self, name: str, offer: PlannedCall) -> bool:
        """Whether the rule is about this call."""
        if not fnmatchcase(name, self.tool):
            return False
        if self.allow and offer.is_protected:
            return False
        if self.allow and offer.asks_once:
            return not self.is_pattern and self.argument is not None and self.argument == offer.argument
        if self.argument is None:
            return not (self.allow and offer.outside)
        if not self.is_pattern:
            return self.argument == offer.argument
        if offer.access == "execute" and offer.argument is not None:
            return covers_command(self.argument, offer.argument, allow=self.allow)
        if offer.paths:
            matcher = path_matcher(self.argument, ignore_case=not self.allow)
            return any(matcher.fullmatch(normalize("NFC", path)) for path in offer.paths)
        return offer.argument is not None and fnmatchcase(offer.argument, self.argument)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """It runs; `why` is stored with it."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The user decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """It does not run; `words` tell the model why."""

    words: str


Decision: TypeAlias = Allow | Ask | Refuse


def decide(name: str, offer: PlannedCall, mode: str, rules: Sequence[Rule]) -> Decision:
    """The decision for a call of tool `name`; an unknown mode is as strict as `ask`."""
    name = offer.tool or name
    covering = [rule for rule in rules if rule.covers(name, offer)]
    if any(not rule.allow for rule in covering) or (name == "skill" and is_unreadable(offer, rules)):
        return Refuse(words=f"The user has forbidden this call of {name}. Do it another way, or ask them.")
    is_harmless = offer.access in ("none", "read") or (offer.access == "external" and offer.is_read_only)
    if mode == "plan" and not is_harmless:
        return Refuse(
            words=f"{name} is not available in plan mode: nothing may be changed or run. "
            "Read, search and write the plan; the user leaves plan mode when they agree with it."
        )
    if offer.access == "none":
        return Allow(why="touches only the session")
    if offer.access == "read" and not offer.outside and not offer.asks_once:
        return Allow(why="reads inside the workspace are free")
    if covering:
        users = any(rule.is_users for rule in covering)
        return Allow(why="allowed by the user's rules" if users else "always allowed by the user in this session")
    if offer.outside or offer.is_protected or offer.asks_once:
        return Ask()
    if mode == "auto":
        return Allow(why="mode auto")
    if mode == "accept-edits" and offer.access == "write":
        return Allow(why="mode accept-edits")
    return Ask()


def is_unreadable(offer: PlannedCall, rules: Sequence[Rule]) -> bool:
    """Whether the user has forbidden to read the file that a call reads under another name."""
    return bool(offer.paths) and any(not rule.allow and rule.covers("read_file", offer) for rule in rules)


def covers_command(pattern: str, line: str, *, allow: bool) -> bool:
    """Whether a command line begins with the pattern's words, or for a denial mentions them anywhere."""
    wanted = first_words(pattern)
    if wanted is None:
        return not allow and pattern in line
    if not allow:
        return mentions(line, wanted)
    words = simple_words(line)
    return bool(wanted) and words is not None and words[: len(wanted)] == wanted


def first_words(pattern: str) -> tuple[str, ...] | None:
    """The words that a command line is to begin with; a `*` behind them says what holds anyway."""
    return simple_words(pattern[:-2] if pattern.endswith((" *", ":*")) else pattern)


@lru_cache(maxsize=256)
def path_matcher(pattern: str, *, ignore_case: bool) -> re.Pattern[str]:
    """A glob of paths as an expression. Without a slash it is about names anywhere; `**` spans directories; one that
    ends in a slash covers what is below. A denial ignores case, as some disks do; accents are compared composed."""
    pattern = normalize("NFC", os.path.expanduser(pattern))
    if pattern.endswith("/"):
        pattern += "**"
    source = "" if "/" in pattern else "(?:.*/)?"
    at = 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            source, at = source + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            source, at = source + ".*", at + 2
        elif pattern[at] == "*":
            source, at = source + "[^/]*", at + 1
        elif pattern[at] == "?":
            source, at = source + "[^/]", at + 1
        else:
            source, at = source + re.escape(pattern[at]), at + 1
    return re.compile(source, re.DOTALL | (re.IGNORECASE if ignore_case else 0))


def user_rules(allow: Sequence[str], deny: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of the user's file, such as `grep`, `shell(git status)` or `edit_file(docs/**)`."""
    rules = []
    for texts, allows in ((deny, False), (allow, True)):
        for text in texts:
            found = RULE.fullmatch(text.strip())
            if found is not None:
                tool, argument = found.groups()
                rules.append(
                    Rule(tool=tool, argument=argument, allow=allows, is_pattern=argument is not None, is_users=True)
                )
    return tuple(rules)


def typed_rule(text: str, *, allow: bool) -> Rule:
    """A rule of the session as the user types it. :raises ~crow.domain.errors.ArgumentError: it would mean nothing."""
    found = TYPED.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(
            f"`{text}` is no rule. A rule is a tool, such as `write_file`, or a tool and what it is about, such as "
            "`shell(git status)`, `edit_file(docs/**)` or `fetch(https://example.com/*)`."
        )
    tool, argument = found.groups()
    if argument is not None and PLAIN_NAME.fullmatch(tool) and tool not in WITH_ARGUMENT:
        raise ArgumentError(
            f"A rule about `{tool}` takes no argument; write `{tool}` alone. Those that take one: "
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
    """The rule as it is typed, or for one about exactly one argument, in words."""
    if rule.argument is None:
        return f"`{rule.tool}`"
    argument = " ".join(rule.argument.split())
    return f"`{rule.tool}({argument})`" if rule.is_pattern else f"`{rule.tool}`, exactly `{argument}`"


def rule_for(name: str, offer: PlannedCall, *, allow: bool) -> Rule:
    """The rule that an "always" answer about this call makes; of a file outside the workspace, about that file."""
    name = offer.tool or name
    if offer.outside and offer.paths and "*" not in offer.paths[0] and "?" not in offer.paths[0]:
        return Rule(tool=name, argument=offer.paths[0], allow=allow, is_pattern=True)
    return Rule(tool=name, argument=offer.argument, allow=allow)


def rule_words(rule: Rule) -> str:
    """What the rule covers, for the option the user picks."""
    if rule.argument is None:
        return f"every {rule.tool} call in this session"
    line = " ".join(rule.argument.split())
    shown = f"`{line if len(line) <= 60 else line[:57] + '...'}` in this session"
    return f"{rule.tool} of {shown}" if rule.is_pattern else shown


def rules_in(values: Iterable[JsonObject]) -> tuple[Rule, ...]:
    """The rules of a session's row, in order; what is none is passed over."""
    return tuple(rule for value in values if (rule := rule_from(value)) is not None)


def rule_from(value: JsonObject) -> Rule | None:
    """Read a rule back from the row; None for anything that is not one."""
    tool, argument, allow = value.get("tool"), value.get("argument"), value.get("allow")
    if isinstance(tool, str) and isinstance(allow, bool) and (argument is None or isinstance(argument, str)):
        return Rule(tool=tool, argument=argument, allow=allow, is_pattern=value.get("pattern") is True)
    return None


# FROM agent.command_words: A command line, as far as a rule may judge it without running it.
#
# Strategy: two readings that err on opposite sides. `simple_words` gives the words of a line that is one plain
# command
# and nothing else: whatever a shell could make more of (operators, substitutions, redirections, expansions, further
# lines) gives None, so that a rule that allows never covers more than it says. `mentions` finds words anywhere in a
# line, in quotes and behind operators, so that a rule that denies covers rather too much. Pure.


ACTIVE = frozenset(";&|<>()$`\n\r\0*?[]{}!#~^")
"""What a shell may make something of outside of quotes. A word with one of them is more than it shows."""

ACTIVE_IN_QUOTES = frozenset("$`\\!\0")
BLANKS = frozenset(" \t")
SEPARATORS = re.compile(r"[\s;&|<>()`{}$'\"\\]+")


def simple_words(line: str) -> tuple[str, ...] | None:
    """The words of a single plain command, quotes removed; None for any other line."""
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(line):
        char = line[at]
        if char in BLANKS:
            if word is not None:
                words.append(word)
            word = None
            at += 1
        elif char in "'\"":
            end = line.find(char, at + 1)
            inside = line[at + 1 : end]
            if end < 0 or "\n" in inside or "\0" in inside or (char == '"' and ACTIVE_IN_QUOTES & set(inside)):
                return None
            word = (word or "") + inside
            at = end + 1
        elif char in ACTIVE or char == "\\" or (char.isspace() or not char.isprintable()):
            return None
        else:
            word = (word or "") + char
            at += 1
    return tuple(words if word is None else [*words, word])


def mentions(line: str, words: Sequence[str]) -> bool:
    """Whether `words` stand next to each other anywhere in the line; a program also by its path."""
    if not words:
        return True
    for pieces in (SEPARATORS.split(line), SEPARATORS.split(re.sub(r"['\"\\]", "", line))):
        named = [piece.rpartition("/")[2] for piece in pieces]
        for start in range(len(pieces) - len(words) + 1):
            rest = list(words[1:])
            if words[0] in (pieces[start], named[start]) and pieces[start + 1 : start + len(words)] == rest:
                return True
    return False


# FROM agent.modes: The permission modes: what a session may do unasked. `permission` says what each means.


Mode: TypeAlias = Literal["ask", "accept-edits", "plan", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
