"""Finds words that make a command run another program or write to another place.

An allow rule that ends with `*` does not cover a command with one of these words, unless the user wrote the word into
the rule. `risk_table.py` lists the words of most programs; this module has the rules for programs for which a list of
words is not enough, such as wrappers and interpreters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from crow.agent.permissions.command_line import ASSIGNMENT
from crow.agent.permissions.known_programs import RUNNERS, SHELLS, SUBCOMMANDS, WRAPPERS, program_of
from crow.agent.permissions.risk_table import ALIASES, OF_OTHERS, RISKS, Risks
from crow.agent.permissions.shell_text import Words

_SED = re.compile(
    r"(?:(?:\d+|\$|/[^/\\\n]*/)(?:,(?:\d+|\$|/[^/\\\n]*/))?!?)?"
    r"(?:[pdq=]|s([/|#,])(?:(?!\1)[^\\\n]|\\[^\n])*\1(?:(?!\1)[^\\\n]|\\[^\n])*\1[gpiI0-9]*)?"
)
"""Matches a sed command that can only print: p, d, q or = with an optional address, or a substitution without the flags
e and w."""
_GIT_SAFE = frozenset(("--no-pager", "--no-optional-locks", "--literal-pathspecs", "--version", "--help", "-h", "-v"))
"""Harmless options that may come between `git` and its subcommand."""
_RUN = frozenset(("run", "exec", "dlx", "x", "eval", "repl", "shell", "exec-env", "exec-file"))
"""Subcommands with which the programs in `_EXECUTORS` run another program."""
_EXECUTORS: Mapping[str, int] = {
    **dict.fromkeys(("poetry", "pipenv", "pdm", "rye", "hatch", "pixi", "conda", "mamba", "micromamba", "bundle"), 0),
    **dict.fromkeys(("uv", "pnpm", "npm", "yarn", "bun", "deno", "lerna", "nx", "opam", "rbenv", "pyenv", "nodenv"), 0),
    **dict.fromkeys(("asdf", "volta", "op", "doppler", "infisical", "dotenv", "teller", "flatpak", "snap", "fly"), 0),
    **dict.fromkeys(("rustup", "lxc", "incus", "limactl", "multipass", "machinectl", "heroku"), 1),
    **dict.fromkeys(("aws-vault", "chamber", "sops"), 1),
}
"""Package managers, container tools and secret managers that run another program with a subcommand in `_RUN`. Each maps
to the number of operands before the other program, such as the name of the container."""
_SCRIPTED = frozenset(("npm", "pnpm", "yarn", "bun", "deno", "lerna", "nx"))
"""Package managers whose subcommand `run` only runs scripts of the project. So a rule such as `npm run *` is no riskier
than `python *`."""
_INTERPRETERS = re.compile(
    r"(?:i?python|pypy)[\d.]*|node|deno|bun|perl[\d.]*|ruby[\d.]*|php[\d.]*|lua[\d.]*|R|Rscript|julia|elixir|iex|escript|"
    r"groovy|scala|kotlin|raku|guile|racket|sbcl|octave|swipl|runghc"
)
_INTERPRETER_SAFE = {
    "python": frozenset(("-u", "-b", "-B", "-O", "-OO", "-s", "-q", "-V")),
    "node": frozenset(
        ("--test", "--watch", "--no-warnings", "--enable-source-maps", "--max-old-space-size", "--trace-warnings")
    ),
}
"""Options of interpreters that neither run other code nor write files. Any other option may do so, or may have a value
that looks like the script."""
_ALWAYS_SAFE = frozenset(("-v", "-h", "-w", "--version", "--help"))
"""Harmless options of every interpreter."""


def find_risk(words: Words, fixed: int) -> str | None:
    """Return the first word that may make a command run another program or write to another place, or None if there is
    no such word. The first `fixed` words are not examined, because the user wrote them into the rule. If the program
    runs whatever follows it, the first examined word is risky."""
    if words and ASSIGNMENT.fullmatch(words[0]):
        return words[0] if fixed < 1 else find_risk(words[1:], fixed - 1)
    if fixed < 1:
        return words[0] if words else None
    program = program_of(words[0])
    program = ALIASES.get(program, program)
    more = words[fixed:]
    if program in SHELLS or program in RUNNERS or program == "eval":
        return next(iter(more), None)
    if program in WRAPPERS:
        start = _wrapped_start(words)
        if start is None or start >= fixed:
            return next(iter(more), None)
        return find_risk(words[start:], fixed - start)
    if program in _EXECUTORS and words[1:2] and words[1] in _RUN and not (words[1] == "run" and program in _SCRIPTED):
        start = 2 + _EXECUTORS[program]
        start += words[start : start + 1] == ("--",)
        has_options = any(word.startswith("-") and word != "--" for word in words[2 : start + 1])
        if fixed <= start or has_options:  # the rule does not say which program runs
            return next(iter(more), None)
        return find_risk(words[start:], fixed - start)
    if _INTERPRETERS.fullmatch(program):
        return _interpreter_option(words, fixed)
    if program == "git" and (option := next(_git_options(words, fixed), None)):
        return option
    if program == "sed" and (script := next((word for word in _sed_scripts(words) if word in more), None)):
        return script
    rows = [RISKS.get(program, OF_OTHERS), RISKS.get(f"{program} {_subcommand(words)}", Risks())]
    return next((word for word in more if any(_is_risky(word, risks) for risks in rows)), None)


def _interpreter_option(words: Words, fixed: int) -> str | None:
    """Return the first option with which an interpreter may run other code, or the script if it is a URL. The words
    after the script or the module are its arguments, so they are not risky."""
    program = program_of(words[0])
    kind = "python" if program.startswith(("python", "pypy")) else program
    safe = _INTERPRETER_SAFE.get(kind, frozenset()) | _ALWAYS_SAFE
    start = 2 if words[1:2] and words[1] in _RUN else 1  # `deno run`
    for at, word in enumerate(words[start:], start):
        is_option = word.startswith("-")
        if at >= fixed and (word.partition("=")[0] not in safe if is_option and word != "-m" else "://" in word):
            return word
        if not is_option or word == "-m":
            break
    return None


def _operands_start(words: Words) -> int:
    """Return the index of the first word that is neither an option of the program nor the value of one."""
    takes_value, at = SUBCOMMANDS.get(program_of(words[0]), frozenset[str]()), 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in takes_value else 1
    return at


def _subcommand(words: Words) -> str:
    return "".join(words[_operands_start(words) :][:1])


def _git_options(words: Words, fixed: int) -> Iterator[str]:
    """Yield the options between `git` and its subcommand, because they can name programs to run, and the option of
    `git format-patch` that names the directory to write to. Harmless options, and options among the first `fixed`
    words, are left out."""
    before = words[fixed : _operands_start(words)]
    yield from (word for word in before if word.startswith("-") and word not in _GIT_SAFE)
    if "format-patch" in words:
        yield from (word for word in words[fixed:] if word.startswith("-o"))


def _sed_scripts(words: Words) -> Iterator[str]:
    """Yield the words of a sed command that contain a script, if the script may do more than print."""
    is_script_next, has_script = False, False
    for word in words[1:]:
        script = None
        name, equals, value = word.partition("=")
        if is_script_next:
            script, is_script_next = word, False
        elif word.startswith("--"):
            if "--expression".startswith(name):  # long options may be shortened
                has_script, is_script_next, script = True, not equals, value if equals else None
        elif word.startswith("-") and word != "-":
            _, e, rest = word.partition("e")  # short options may be combined, and `-es/a/b/` contains its script
            if e:
                has_script, is_script_next, script = True, not rest, rest or None
        elif not has_script:
            script, has_script = word, True
        if script is not None and not all(_SED.fullmatch(part.strip()) for part in script.split(";")):
            yield word


def _is_risky(word: str, risks: Risks) -> bool:
    name = word.partition("=")[0]
    if word in risks.words.split():
        return True
    if name in risks.harmless.split():
        pass
    elif word.startswith("--"):
        if len(name) > 2 and any(f"--{option}".startswith(name) for option in risks.long.split()):
            return True
    elif word.startswith("-") and any(letter in name[1:] for letter in risks.letters):
        return True
    return bool(risks.pattern) and re.search(risks.pattern, word, re.DOTALL) is not None


def _wrapped_start(words: Words) -> int | None:
    """Find the program that a wrapper runs. Return the index of its word in `words`, or None if the index is
    unknown."""
    letters, operands = WRAPPERS[program_of(words[0])]
    at = 1
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
        elif word.startswith("--"):
            if "=" not in word:
                return None
            at += 1
        elif word.startswith("-") and len(word) > 1:
            if "S" in word or ("c" in word and "c" in letters):
                return None  # env -S and su -c take a command line
            at += 2 if word[-1] in letters else 1
        elif ASSIGNMENT.fullmatch(word):
            at += 1
        elif operands:
            operands, at = operands - 1, at + 1
        else:
            return at
    return None
