"""Compares command lines with the patterns of rules, such as `git add *`."""

from __future__ import annotations

import re

from crow.agent.permissions.command_line import simple_words
from crow.agent.permissions.command_risks import find_risk
from crow.tools import CommandAccess


def kind_of_command(line: str) -> str:
    """Return the pattern that covers commands of the same kind, such as `git add *`; empty if `line` is not a plain
    command, or if such a pattern would not cover it."""
    words = simple_words(line)
    if words is None or not re.fullmatch(r"[\w.+-]+", words[0]):
        return ""
    count = 2 if len(words) > 1 and re.fullmatch(r"[a-z][a-z0-9:_-]*", words[1]) else 1
    pattern = f"{' '.join(words[:count])} *"
    return pattern if allows_command(pattern, line, "write") else ""


def allows_command(pattern: str, line: str, access: CommandAccess) -> bool:
    """Return whether an allow rule covers a command line. Only a single plain command is ever covered.

    If the pattern does not end with `*`, the command must consist of exactly the pattern's words. If the pattern ends
    with `*`, the command may have more words after those of the pattern. If such a command can change something, it is
    covered only if `find_risk` finds no risk among the additional words.
    """
    wanted, words = first_words(pattern), simple_words(line)
    if not wanted or words is None:
        return False
    if not has_star(pattern):
        return words == wanted
    if words[: len(wanted)] != wanted:
        return False
    return access == "read" or find_risk(words, len(wanted)) is None


def has_star(pattern: str) -> bool:
    """Return whether a command pattern ends with a `*`, which stands for any further words."""
    return pattern.rstrip().endswith((" *", ":*"))


def first_words(pattern: str) -> tuple[str, ...] | None:
    """Return the words of a command pattern, without a `*` at its end. Every command line that the pattern covers
    begins with these words. Return None if the pattern is not a plain command."""
    pattern = pattern.rstrip()
    return simple_words(pattern[:-2] if has_star(pattern) else pattern)
