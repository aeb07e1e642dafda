"""Compares command lines with the patterns of rules, such as `git add *`.

An allow rule covers only a single plain command (`allows_command`). A deny rule covers every line that runs the command
(`runs`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from crow.agent.permissions.command_line import read_commands
from crow.agent.permissions.command_risks import find_risk
from crow.agent.permissions.known_programs import SUBCOMMANDS, program_of
from crow.agent.permissions.shell_text import UNKNOWN, UNKNOWN_WORDS, Words, simple_words
from crow.tools import CommandAccess

Certainty: TypeAlias = Literal["yes", "no", "maybe"]


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


def runs(line: str, pattern: str) -> Certainty:
    """Return whether a line runs a command that `pattern` covers.

    A pattern is a program with options and operands, which may be globs. It covers each command that runs the program
    with all of these options and operands, and perhaps with more. The command may have the options at any place and in
    any order, but it must have the operands in the order of the pattern. If the program has subcommands, the pattern's
    first operand must be the command's first operand. Returns "maybe" if the answer depends on something that the line
    computes.
    """
    wanted = _pattern_words(pattern)
    if wanted is None:
        return "yes" if pattern in line else "no"
    if not wanted:
        return "yes"
    found = read_commands(line)
    answers = {_matches(command, wanted) for command in found.commands}
    if "yes" in answers:
        return "yes"
    return "no" if answers <= {"no"} and found.is_clear else "maybe"


def _pattern_words(pattern: str) -> Words | None:
    """Return the words of a rule's pattern, without a `*` at its end. The words may be globs.

    Return None if the pattern is not a plain command.
    """
    plain = pattern[:-2] if pattern.endswith((" *", ":*")) else pattern
    words = simple_words(plain)
    if words is None and not re.search(r"[;&|<>()`$'\"\\\n]", plain):
        words = tuple(plain.split())
    return words


def _matches(command: Words, wanted: Words) -> Certainty:
    """Return whether a pattern that consists of the words `wanted` covers a command; see `runs`."""
    program = command[0]
    if UNKNOWN in program or UNKNOWN_WORDS in program:
        return "maybe"
    first, *rest = wanted
    if not _is_same(program.removeprefix("./"), first.removeprefix("./")) and not _is_same(program_of(program), first):
        return "no"
    options = [word for word in rest if word.startswith("-") and word != "-"]
    operands = [word for word in rest if word not in options]
    certainties = (_match_options(command, options), _match_operands(command, operands))
    if "no" in certainties:
        return "no"
    return "maybe" if "maybe" in certainties else "yes"


def _is_same(word: str, wanted: str) -> bool:
    return fnmatchcase(word.casefold(), wanted.casefold())


def _match_options(command: Words, wanted: Sequence[str]) -> Certainty:
    """Return whether a command has all wanted options."""
    given = [word for word in command[1:] if word.startswith("-")]
    letters = {char for word in given if not word.startswith("--") for char in word[1:]}
    is_unknown = any(UNKNOWN in word or UNKNOWN_WORDS in word for word in command[1:])
    for option in wanted:
        name = option.partition("=")[0]
        each = [*given, *(f"-{letter}" for letter in letters)]
        has = any(fnmatchcase(word, option) for word in each) or (
            any(len(word) > 3 and option.startswith(word.partition("=")[0]) for word in given if word.startswith("--"))
            or any(word.startswith(f"{name}=") for word in given)
            if option.startswith("--")
            else set(option[1:]) <= letters
        )
        if not has:
            return "maybe" if is_unknown else "no"
    return "yes"


def _match_operands(command: Words, wanted: Sequence[str]) -> Certainty:
    """Return whether a command has all the operands in `wanted`, in this order."""
    if not wanted:
        return "yes"
    program = program_of(command[0]).casefold()
    values = SUBCOMMANDS.get(program)
    left, at, is_first = list(wanted), 1, True
    is_unknown = False
    while at < len(command) and left:
        word = command[at]
        at += 1
        if UNKNOWN_WORDS in word:
            is_unknown = True
            if values is not None and is_first:
                return "maybe"
        elif word.startswith("-") and len(word) > 1 and UNKNOWN not in word[:2]:
            if values is not None and is_first and word in values:
                if word in ("-c", "--config-env") and command[at : at + 1] and re.match(r"alias\.|[\0\1]", command[at]):
                    return "maybe"  # git: an alias can have any meaning
                is_unknown = is_unknown or (at < len(command) and UNKNOWN_WORDS in command[at])
                at += 1
        elif _is_same(word, left[0]):
            left.pop(0)
            is_first = False
        elif UNKNOWN in word:
            is_unknown = True
            is_first = False
        elif values is not None and is_first:
            # this word may be the value of an unknown option before it
            before = command[at - 2]
            is_value = before.startswith("-") and "=" not in before and before not in values and at > 2
            if not is_value or is_unknown:
                return "maybe" if is_unknown else "no"
        else:
            is_first = False
    if not left:
        return "maybe" if is_unknown and values is not None else "yes"
    return "maybe" if is_unknown else "no"
