"""Finds the commands that a command line runs, and the commands that those commands run in turn.

A command can be given the command that it runs in two ways: as a text that a shell reads, as in `sh -c 'git push'`, or
as words, as in `env A=b git push`. If the value of a variable or the output of a command decides which command runs,
the list is not clear.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from crow.agent.permissions.known_programs import FIND_RUNS, RUNNERS, SHELLS, WRAPPERS, program_of
from crow.agent.permissions.shell_text import MAX_DEPTH, UNKNOWN, UNKNOWN_WORDS, Words, read_text

MAX_CHARS = 32_000
"""Crow does not read lines with more characters than this. The commands in such a line are unknown."""
_MAX_COMMANDS = 1_000
_MAX_WORDS = 256
"""If a command such as `env` runs another command, at most this many words of that command are examined."""

ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=.*", re.DOTALL)
_KEYWORDS = frozenset(
    ("if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "coproc", "fi", "done", "esac", "}")
)
_SOURCES = ("source", ".")
_RUN = (("run",), ("exec",), ("dlx",))
"""Subcommands, as in `docker exec`. Most programs that have such a subcommand run another program with it."""
_INPUT_TAKERS = frozenset(("xargs", "gxargs", "parallel"))
"""Wrappers that add words from their input to the command that they run."""
_INPUT_LETTERS = tuple("aEeIiLlnPsdjNS")
"""Their short options that may take the next word as their value."""
_REPLACES = re.compile(r"^(?:-[IJ] |-[IiJ]|--replace=)(\S+)")
"""Matches an option of `xargs` and the text to replace, which is in the option's word or in the next word."""
_PLACEHOLDER = re.compile(r"\{[^{} ]*\}")
"""Matches a text that `find`, `xargs` and others replace with a file name or a part of their input, such as `{}`."""
_PLAIN_OPTIONS = frozenset(("--", "--login", "--noprofile", "--norc", "--posix"))
"""Long options of shells that take no value."""


@dataclass(slots=True)
class CommandList:
    """The commands of a line."""

    commands: list[Words] = field(default_factory=list)
    """In no particular order. The words of a command may contain `UNKNOWN` and `UNKNOWN_WORDS`."""
    files: list[str] = field(default_factory=list)
    """The targets of redirections."""
    is_clear: bool = True
    """False if `commands` may lack a command: a part of the line could not be read, or the line runs text that it
    computes."""


@lru_cache(maxsize=16)
def read_commands(line: str) -> CommandList:
    """Return the commands that a line runs, including those in substitutions, in `sh -c` and after wrappers such as
    `env`."""
    found = CommandList()
    if len(line) > MAX_CHARS:
        found.is_clear = False
        return found
    has_input = runs_input = False
    unread: list[tuple[str | Words, int]] = [(line, 0)]  # texts and commands, with their depths
    while unread:
        item, depth = unread.pop()
        if len(found.commands) > _MAX_COMMANDS:
            found.is_clear = False
            break
        if depth > MAX_DEPTH:
            found.is_clear = False
        elif isinstance(item, str):
            text = read_text(item.replace(UNKNOWN, "$_").replace(UNKNOWN_WORDS, "$_"), depth)
            unread += text.commands
            found.files += text.files
            found.is_clear &= text.is_clear and not _is_unknown(item)
            has_input |= text.has_input
        elif words := _without_assignments(item):
            program = program_of(words[0])
            found.commands.append(words)
            runs_input |= program in SHELLS and _may_run_input(words)
            found.is_clear &= not (program in _SOURCES and any(map(_may_be_input, words[1:])))
            inner = list(islice(_run_by(words), _MAX_COMMANDS + 1))
            found.is_clear &= len(inner) <= _MAX_COMMANDS
            unread += ((each, depth + 1) for each in inner if not isinstance(each, _LastCommand))
            found.commands += (each.words for each in inner if isinstance(each, _LastCommand))
    found.is_clear &= not (has_input and runs_input)
    return found


def named_files(line: str) -> Iterator[str]:
    """Return the words of a line that may be paths, including the paths in options such as `--file=PATH`."""
    found = read_commands(line)
    for word in (*(word for command in found.commands for word in command), *found.files):
        yield word
        if "=" in word:
            yield word.partition("=")[2]


@dataclass(frozen=True, slots=True)
class _LastCommand:
    """A command that a wrapper or a shell runs. It is not searched for further commands, because these are also found
    in the words of the wrapper."""

    words: Words


def _run_by(words: Words) -> Iterator[str | Words | _LastCommand]:
    """Yield the texts and the commands that a command runs. A shell reads the texts."""
    program = program_of(words[0])
    if program in _SOURCES:
        return
    if program in SHELLS:
        yield from _run_by_shell(words)
    elif program == "eval":
        yield " ".join(words[1:])
    elif program == "trap":
        yield from (word for word in words[1:] if word not in ("-", "--"))
    elif program in FIND_RUNS:
        for at, word in enumerate(words[:-1]):
            if word in FIND_RUNS[program]:
                run = (_PLACEHOLDER.sub(UNKNOWN, each) for each in words[at + 1 : at + _MAX_WORDS])
                yield (*run, UNKNOWN_WORDS)
    elif program in WRAPPERS or program in RUNNERS or words[1:2] in _RUN:
        yield from _run_by_wrapper(words)


def _run_by_shell(words: Words) -> Iterator[str | _LastCommand]:
    """Yield the texts and commands that a shell runs. With `-c`, the shell runs the text after that option. Without
    `-c`, it runs a script if one is named. Without `-c` and without a script, it runs its input, which is unknown, so
    nothing is yielded."""
    option = next((at for at, word in enumerate(words) if re.fullmatch(r"[-+][A-Za-z]*c[A-Za-z]*", word)), 0)
    operands = (at for at in range(1, len(words)) if not words[at].startswith(("-", "+")))
    if option:
        yield from words[option + 1 :]
    elif words[1:2] and not words[1].startswith(("-", "+")):
        yield _LastCommand(words[1:])
    else:  # each operand may be the script, because an option may take a value
        yield from (_LastCommand(words[at : at + _MAX_WORDS]) for at in operands)


def _run_by_wrapper(words: Words) -> Iterator[str | Words | _LastCommand]:
    """Yield each command that a wrapper may run. Such a command may begin at any word, because an option of the wrapper
    may take a value. A single word may also be a whole command line."""
    first, more = len(words), Words()
    if program_of(words[0]) in _INPUT_TAKERS:
        words, first = _with_input(words)
        more = (UNKNOWN_WORDS,)
    for at in range(1, len(words)):
        word = words[at]
        if word.startswith("-") and not word.startswith("--"):
            yield from _run_by_option(words[at : at + _MAX_WORDS])
        if any(char in word for char in " \t\n;|&"):
            yield word.partition("=")[2] if word.startswith("-") else word
        elif not word.startswith("-") and (at <= first or UNKNOWN not in word):
            inner = (*_without_assignments(words[at : at + _MAX_WORDS]), *more)
            if inner and program_of(inner[0]) in ("eval", *FIND_RUNS, *SHELLS):
                yield inner
            elif inner:
                yield _LastCommand(inner)


def _run_by_option(words: Words) -> Iterator[str]:
    """Yield the command line in a short option of a wrapper, as in `env -S'git push'` or `su -c'git push'`. The words
    after the option `-S` belong to its command line."""
    _, _, text = words[0].partition("c")
    if text:
        yield text
    _, _, text = words[0].partition("S")
    if text:
        yield " ".join((text, *words[1:]))


def _with_input(words: Words) -> tuple[Words, int]:
    """Return the words of a command of `xargs` or `parallel`, and the index of the word that names the other program.
    Texts that `xargs` or `parallel` would replace are `UNKNOWN` in these words. `:::` and the words after it are input
    of `parallel`, so they are left out."""
    words = words[: next((at for at, word in enumerate(words) if word.startswith(":::")), len(words))]
    mark, first = "{}", 1
    while first < len(words) and words[first].startswith("-"):
        mark = "".join(_REPLACES.findall(" ".join(words[first : first + 2]))) or mark
        first += 2 if words[first][1:] in _INPUT_LETTERS else 1
    unknown = (word if word.startswith("-") else word.replace(mark, UNKNOWN) for word in words)
    return tuple(_PLACEHOLDER.sub(UNKNOWN, word) for word in unknown), first


def _without_assignments(words: Words) -> Words:
    """Return the words of a command, without the keywords and assignments in front of them."""
    at = 0
    while at < len(words):
        if words[at] == "function" or (words[at] == "coproc" and words[at + 2 : at + 3] and words[at + 2] in _KEYWORDS):
            at += 2  # a name follows
        elif words[at] in _KEYWORDS or ASSIGNMENT.fullmatch(words[at]) or (at and words[at] in ("-p", "--")):
            at += 1
        else:
            break
    return words[at:]


def _may_run_input(words: Words) -> bool:
    """Return whether a shell may run its input. A shell does so if it has no script, if it has the option `-s`, or if
    its script is the input itself, such as /dev/stdin."""
    values = 0  # how many of the next words are values of the last option
    for word in words[1:]:
        if word.startswith(("-", "+")):
            if _is_unknown(word) or (not word.startswith("--") and "s" in word):
                return True
            if word.startswith("--"):
                values = int("=" not in word and word not in _PLAIN_OPTIONS)
            else:
                values = word.lower().count("o")
        elif values:
            values -= 1
        else:
            return _may_be_input(word)
    return True


def _may_be_input(script: str) -> bool:
    """Return whether a script may be the shell's input, such as /dev/stdin."""
    return _is_unknown(script) or os.path.normpath(f"/{script.lstrip('/')}").startswith(("/dev/", "/proc/"))


def _is_unknown(word: str) -> bool:
    return UNKNOWN in word or UNKNOWN_WORDS in word
