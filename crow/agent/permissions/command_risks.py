"""Finds words that make a command run another program or write to another place.

An allow rule that ends with `*` does not cover a command with one of these words, unless the user wrote the word into
the rule. `risk_table.py` lists the words of most programs; this module has the rules for programs for which a list of
words is not enough, such as wrappers and interpreters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from crow.agent.permissions.command_line import ASSIGNMENT
from crow.agent.permissions.known_programs import RUNNERS, SHELLS, SUBCOMMANDS, WRAPPERS, Wrapper, program_of
from crow.agent.permissions.risk_table import ALIASES, OF_OTHERS, RISKS, Risks
from crow.agent.permissions.shell_text import Words, simple_words

_SED = re.compile(
    r"(?:(?:\d+|\$|/[^/\\\n]*/)(?:,(?:\d+|\$|/[^/\\\n]*/))?!?)?"
    r"(?:[pdq=]|s([/|#,])(?:(?!\1)[^\\\n]|\\[^\n])*\1(?:(?!\1)[^\\\n]|\\[^\n])*\1[gpiI0-9]*)?"
)
"""Matches a sed command that can only print: p, d, q or = with an optional address, or a substitution without the flags
e and w."""
_SED_LONG = {"e": "--expression", "f": "--file", "l": "--line-length"}
"""Options of sed that take a value. The long ones may be shortened."""
_GIT_SAFE = frozenset(("--no-pager", "--no-optional-locks", "--literal-pathspecs", "--version", "--help", "-h", "-v"))
"""Harmless options that may come between `git` and its subcommand."""
_RUN = frozenset(("run", "exec", "dlx", "x", "eval", "repl", "shell", "exec-env", "exec-file"))
"""Subcommands with which the programs in `_EXECUTORS` run another program."""
_BUN_RUNS = _RUN | {"test", "bench", "serve"}
"""Subcommands of Bun and Deno that run a script, so that options come before it."""
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
    if start := _inner_start(program, words):
        if start >= fixed:  # the rule does not say which program runs
            return next(iter(more), None)
        if program in WRAPPERS and WRAPPERS[program].joins:
            return _joined_risk(words[start:fixed], more)
        return find_risk(words[start:], fixed - start)
    if _INTERPRETERS.fullmatch(program) and f"{program} {''.join(words[1:2])}" not in RISKS:
        return _interpreter_option(words, fixed)
    if program == "git" and (option := next(_git_options(words, fixed), None)):
        return option
    if program == "sed" and (script := next((word for word in _sed_scripts(words) if word in more), None)):
        return script
    rows = [RISKS.get(program, OF_OTHERS), RISKS.get(f"{program} {_subcommand(words)}", Risks())]
    return next((word for word in more if any(_is_risky(word, risks) for risks in rows)), None)


def _inner_start(program: str, words: Words) -> int:
    """Return the index of the program that a command runs, such as 3 for `sudo -u root ls`. Return 0 if the command is
    not known to run another program, and the number of words if the index is unknown."""
    if wrapper := WRAPPERS.get(program):
        return _wrapped_start(words, wrapper, 1)
    if (wrapper := WRAPPERS.get(f"{program} exec")) and "exec" in words:  # as in `docker compose exec web ls`
        return _wrapped_start(words, wrapper, words.index("exec") + 1)
    if program not in _EXECUTORS:
        return 0
    subcommands = _RUN - {"run"} if program in _SCRIPTED else _RUN
    at = 1
    if words[1:2] and words[1].startswith("-"):  # as in `poetry -C sub run ls`
        at = next((at for at, word in enumerate(words) if word in ("run", "exec")), 1)
    if words[at : at + 1] == () or words[at] not in subcommands:
        return 0
    operands = words[at + 1 : at + 1 + _EXECUTORS[program]]
    start = at + 1 + len(operands)  # as in `lxc exec box ls`
    if words[start : start + 1] == ("--",):  # as in `lxc exec box -- ls`
        start += 1
    # options may take values, so that the program is somewhere after them: `lxc exec -t box ls`
    has_options = any(word.startswith("-") for word in (*operands, *words[start : start + 1]))
    return len(words) if has_options else start


def _wrapped_start(words: Words, wrapper: Wrapper, at: int) -> int:
    """Return the index of the program that a wrapper runs, or the number of words if the index is unknown. The words
    from `at` on are options and operands of the wrapper."""
    operands = wrapper.operands
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
        elif word.startswith("--"):
            if "=" not in word or wrapper.lines:
                break  # the next word may be a value, or the value may be a command line
            at += 1
        elif word.startswith("-"):  # a single `-` is an option of env
            letter, value = _option_value(word, wrapper.letters + wrapper.attached + wrapper.lines)
            if letter and letter in wrapper.lines:
                break
            takes_next = letter and letter in wrapper.letters and not value  # `-u root`; `-uroot` has its value with it
            at += 2 if takes_next else 1
        elif ASSIGNMENT.fullmatch(word):
            at += 1
        elif operands:
            operands, at = operands - 1, at + 1
        else:
            return at
    return len(words)


def _option_value(word: str, letters: str) -> tuple[str, str]:
    """Split a word of short options at the first that takes a value, one of `letters`. Return this option and the rest
    of the word, which is its value, such as `u` and `root` for `-nuroot`. Without such an option, both are empty."""
    at = next((at for at, letter in enumerate(word) if at and letter in letters), len(word))
    return word[at : at + 1], word[at + 1 :]


def _joined_risk(fixed: Words, more: Words) -> str | None:
    """Return the first risky word of a command whose words are joined and read by a shell: a word of `more` that the
    shell would change or split, or that is risky for the program."""
    command = simple_words(" ".join(fixed))
    if command is None:
        return next(iter(more), None)
    changed = next((word for word in more if simple_words(word) != (word,)), None)
    return find_risk((*command, *more), len(command)) if changed is None else changed


def _interpreter_option(words: Words, fixed: int) -> str | None:
    """Return the first option with which an interpreter may run other code, or the script if it is a URL. The words
    after the script or the module are its arguments, so they are not risky."""
    program = program_of(words[0])
    kind = "python" if program.startswith(("python", "pypy", "ipython")) else program
    safe = _INTERPRETER_SAFE.get(kind, frozenset()) | _ALWAYS_SAFE
    has_subcommand = words[1:2] and words[1] in (_BUN_RUNS if kind in ("deno", "bun") else _RUN)
    start = 2 if has_subcommand else 1  # `deno run`
    may_be_value = False  # whether the word may be the value of the option before it, as in `python -W ignore`
    for at, word in enumerate(words[start:], start):
        is_code = kind == "python" and word in ("-m", "-c")  # arguments of the code follow
        if is_code and at + 1 < fixed and word == "-m":
            return find_risk(words[at + 1 :], fixed - at - 1)  # `python -m pytest` is `pytest`
        if is_code and (word == "-m" or at < fixed):
            break
        if word.startswith("-"):
            is_safe = word.partition("=")[0] in safe
            if at >= fixed and not is_safe:
                return word
            may_be_value = not is_safe and "=" not in word
        elif at >= fixed and "://" in word:
            return word
        elif may_be_value:
            may_be_value = False
        else:
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
    has_script = False  # whether `-e` or `-f` was read, or the first operand
    takes_next = ""  # the option whose value is the next word: `e`, `f` or `l`
    has_options = True  # false after `--`
    for word in words[1:]:
        script = None
        option, value = "", ""
        if takes_next:
            # BSD's `-l` takes no value, so that the word may be the script
            script, takes_next = (None if takes_next == "f" else word), ""
        elif has_options and word == "--":
            has_options = False
        elif has_options and word.startswith("--"):
            name, equals, value = word.partition("=")
            option = next((each for each, long in _SED_LONG.items() if long.startswith(name)), "")
            takes_next = "" if equals else option
        elif has_options and word.startswith("-") and word != "-":
            option, value = _option_value(word, "efli")
            takes_next = option if not value and option != "i" else ""
        elif word and not has_script:  # BSD's `-i` may be followed by an empty word
            script, has_script = word, True
        if option in ("e", "f"):
            has_script = True
        if option == "e" and not takes_next:
            script = value
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
