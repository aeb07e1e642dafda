"""Shell completions and the manual page, made from the argument parser.

The scripts are crow's own, because they also complete sessions, by alias, id or a part of the title, and show the
titles.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from crow.cli.arguments import whole_parser
from crow.domain.errors import ArgumentError
from crow.version import __version__

_SHELLS = ("bash", "zsh", "fish")
_MAX_SESSIONS = 200
"""The maximum number of sessions that are searched to complete the name of a session, newest first."""

_Kind: TypeAlias = Literal["words", "files", "directories", "sessions", "none"]
"""The kind of values that the shell offers for an argument."""

_KINDS: Mapping[str, _Kind] = {
    "FILE": "files",
    "PATH": "files",
    "DIR": "directories",
    "SESSION": "sessions",
}
"""The kind of values that the shell offers for each metavar. It offers nothing for a metavar that is missing here."""

_WORDS: Mapping[str, Sequence[str]] = {
    "MODE": ("ask", "accept-edits", "plan", "auto"),
    "LEVEL": ("debug", "info", "warning", "error"),
    "TOOL": ("claude-code", "codex", "pi", "opencode", "goose", "openai-json"),
    "GROUPS": ("session", "model", "day"),
}
"""The words to offer for a metavar if the parser defines no `choices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """An argument of a command: an option, or a positional argument."""

    flags: tuple[str, ...]
    """Empty for a positional argument."""
    metavar: str
    """Empty if an option takes no value."""
    help: str
    words: tuple[str, ...] = ()
    nargs: str | int | None = None

    @property
    def kind(self) -> _Kind:
        return "words" if self.words else _KINDS.get(self.metavar, "none")

    @property
    def value(self) -> str:
        """The value as a synopsis shows it, such as `FILE`, `[DIR]` or `[SESSION ...]`. It is empty if the option takes
        no value."""
        match self.nargs:
            case "?":
                return f"[{self.metavar}]"
            case "*":
                return f"[{self.metavar} ...]"
            case "+":
                return f"{self.metavar} ..."
            case _:
                return self.metavar


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommandReference:
    """A command of the parser."""

    path: tuple[str, ...]
    """The words of the command, such as `("crow", "sessions", "list")`."""
    aliases: tuple[str, ...]
    """Words that can replace the last word of `path`."""
    summary: str
    description: str
    epilog: str
    options: tuple[_Argument, ...]
    positionals: tuple[_Argument, ...]
    commands: tuple[_CommandReference, ...]
    needs_command: bool
    """Whether one of `commands` has to follow."""

    def all(self) -> Iterator[_CommandReference]:
        """Yield this command and all its sub-commands, in the order of the help."""
        yield self
        for command in self.commands:
            yield from command.all()


def reference_of(parser: argparse.ArgumentParser) -> _CommandReference:
    """Return the root command of `parser`, with all its sub-commands."""
    return _command(parser, path=(parser.prog,), aliases=(), summary="")


def _command(
    parser: argparse.ArgumentParser, *, path: tuple[str, ...], aliases: tuple[str, ...], summary: str
) -> _CommandReference:
    options: list[_Argument] = []
    positionals: list[_Argument] = []
    commands: list[_CommandReference] = []
    needs_command = False
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to read a parser
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            needs_command = action.required
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for name, child in action.choices.items():
                if name in summaries:
                    others = tuple(key for key, value in action.choices.items() if value is child and key != name)
                    commands.append(_command(child, path=(*path, name), aliases=others, summary=summaries[name]))
        elif action.help != argparse.SUPPRESS:
            (options if action.option_strings else positionals).append(_argument(action))
    return _CommandReference(
        path=path,
        aliases=aliases,
        summary=summary,
        description=parser.description or "",
        epilog=parser.epilog or "",
        options=tuple(options),
        positionals=tuple(positionals),
        commands=tuple(commands),
        needs_command=needs_command,
    )


def _argument(action: argparse.Action) -> _Argument:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    words = tuple(map(str, action.choices)) if action.choices is not None else tuple(_WORDS.get(metavar, ()))
    return _Argument(
        flags=tuple(action.option_strings),
        metavar="" if action.nargs == 0 else metavar,
        help=(action.help or "").replace("%%", "%"),
        words=words,
        nargs=action.nargs,
    )


def completion(shell: str, command: _CommandReference) -> str:
    """Return the completion script for bash, zsh or fish."""
    match shell:
        case "bash":
            return _table(command) + _BASH
        case "zsh":
            return f"#compdef crow\n{_table(command)}{_ZSH}"
        case _:
            return "".join(f"{line}\n" for line in _fish_lines(command))


def _table(root: _CommandReference) -> str:
    """Return the text of two functions for bash and zsh. `_crow_step` processes one of the words before the cursor.
    `_crow_offer` sets `kind` and `lines`, which say what the shell can offer at the cursor."""
    steps, values, offers = [], [], []
    for command in root.all():
        where = " ".join(command.path)
        for child in command.commands:
            names = "|".join(_quote(f"{where} {name}") for name in (child.path[-1], *child.aliases))
            steps.append(f"        {names}) where={_quote(' '.join(child.path))} ;;")
        offers.append(
            _offer(f"{where} -", "words", [(flag, one.help) for one in command.options for flag in one.flags])
        )
        for option in command.options:
            if option.metavar:
                values += [_quote(f"{where} {flag}") for flag in option.flags]
                offers += [_offer(f"{where} {f}", option.kind, [(w, "") for w in option.words]) for f in option.flags]
        words = [(name, child.summary) for child in command.commands for name in (child.path[-1], *child.aliases)]
        words += [(word, "") for one in command.positionals for word in one.words]
        kinds = [one.kind for one in command.positionals if one.kind != "words"]
        offers.append(_offer(where, kinds[0] if kinds and not words else "words", words))
    return f"""\
_crow_step() {{
    if [[ -n $option ]]; then
        [[ $1 == "=" ]] && return
        option=
        [[ $1 != -* ]] && return
    fi
    case "$where $1" in
{chr(10).join(steps)}
        {"|".join(values)}) option=$1 ;;
    esac
}}

_crow_offer() {{
    case "$1" in
{chr(10).join(filter(None, offers))}
    esac
    if [[ $kind == sessions ]]; then
        lines=$(command crow completion "--sessions=$2" 2>/dev/null)
    fi
}}

"""


def _offer(place: str, kind: _Kind, words: Sequence[tuple[str, str]]) -> str:
    if kind == "none" or (kind == "words" and not words):
        return ""
    lines = "\n".join(f"{word}\t{text}" for word, text in words)
    return f"        {_quote(place)}) kind={kind} lines={_quote(lines)} ;;"


def _quote(text: str) -> str:
    """Quote `text` as one word for bash or zsh, without line breaks."""
    if re.fullmatch(r"[\w./-]+", text):
        return text
    for plain, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f"${quoted}" if "\\" in (quoted := f"'{text}'") else quoted


# macOS has bash 3.2, which lacks `mapfile` and `compopt`.
_BASH = r"""_crow() {
    local current=${COMP_WORDS[COMP_CWORD]} where=crow option= kind= lines= word text i
    local -a shown=()
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do _crow_step "${COMP_WORDS[i]}"; done
    [[ $current == "=" ]] && current=
    if [[ $current == -* ]]; then _crow_offer "$where -"
    elif [[ -n $option ]]; then _crow_offer "$where $option" "$current"
    else _crow_offer "$where" "$current"
    fi
    case $kind in
        files|directories)
            compopt -o filenames 2>/dev/null
            [[ $kind == files ]] && kind=-f || kind=-d
            while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "$kind" -- "$current") ;;
        sessions)
            while IFS=$'\t' read -r word text; do
                [[ -n $word ]] && COMPREPLY+=("$word") && shown+=("$word  $text")
            done <<< "$lines"
            if ((${#shown[@]} > 1)); then
                COMPREPLY=("${shown[@]}")
                # Sessions that match by title: without a common beginning, bash lists them and keeps the typed word.
                [[ ${shown[0]} == "$current"* ]] || COMPREPLY+=(" ")
            fi ;;
        words)
            while IFS=$'\t' read -r word text; do
                [[ $word == "$current"* ]] && COMPREPLY+=("$word")
            done <<< "$lines" ;;
    esac
}

complete -F _crow crow
"""

_ZSH = r"""_crow() {
    local where=crow option= kind= lines= line i
    local -a values shown
    for ((i = 2; i < CURRENT; i++)); do _crow_step "${words[i]}"; done
    if [[ -z $option && $PREFIX == --*=* ]]; then
        option=${PREFIX%%=*}
        compset -P '*='
    fi
    if [[ $PREFIX == -* ]]; then _crow_offer "$where -"
    elif [[ -n $option ]]; then _crow_offer "$where $option" "$PREFIX"
    else _crow_offer "$where" "$PREFIX"
    fi
    case $kind in
        files) _files ;;
        directories) _files -/ ;;
        sessions|words)
            for line in "${(@f)lines}"; do
                [[ -n $line ]] || continue
                values+=("${line%%$'\t'*}")
                shown+=("${line/$'\t'/  }")
            done
            # crow has already chosen the sessions; some of them match by title.
            if [[ $kind == sessions ]]; then compadd -U -l -d shown -a values
            else compadd -l -d shown -a values
            fi ;;
    esac
}

if [[ ${funcstack[1]} == _crow ]]; then _crow "$@"; else compdef _crow crow; fi
"""


def _fish_lines(root: _CommandReference) -> Iterator[str]:
    yield "complete -c crow -f"
    words = {command.path: " ".join((command.path[-1], *command.aliases)) for command in root.all()}
    for command in root.all():
        place = _fish_place(command, words)
        for child in command.commands:
            yield f"complete -c crow -n {place} -a {_fish(child.path[-1])} -d {_fish(child.summary)}"
        for option in command.options:
            flags = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = f" {_fish_value(option)}" if option.metavar else ""
            yield f"complete -c crow -n {place} {flags}{value} -d {_fish(option.help)}"
        for positional in command.positionals:
            if positional.kind != "none":
                yield f"complete -c crow -n {place} {_fish_value(positional)}"


def _fish_place(command: _CommandReference, words: Mapping[tuple[str, ...], str]) -> str:
    """Return a condition for fish. It is true if the command line contains the words of `command`, or aliases of them,
    but none of its sub-commands. `words` maps the path of each command to the last word of the path and the aliases of
    that word."""
    if not command.path[1:]:
        return "__fish_use_subcommand"
    ends = range(2, len(command.path) + 1)
    tests = [f"__fish_seen_subcommand_from {words[command.path[:end]]}" for end in ends]
    if names := [name for child in command.commands for name in (child.path[-1], *child.aliases)]:
        tests.append(f"not __fish_seen_subcommand_from {' '.join(names)}")
    return _fish("; and ".join(tests))


def _fish_value(argument: _Argument) -> str:
    needs_value = "" if not argument.flags or argument.nargs == "?" else "-r "
    match argument.kind:
        case "files":
            return f"{needs_value}-F"
        case "directories":
            return f"{needs_value}-f -a '(__fish_complete_directories)'"
        case "sessions":
            return f"{needs_value}-f -a '(command crow completion --sessions=(commandline -ct) 2>/dev/null)'"
        case _:
            return f"{needs_value}-f -a {_fish(' '.join(argument.words))}".removesuffix(" -a ''")


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def manual(root: _CommandReference) -> str:
    """Return the manual page in roff format."""
    lines = [
        f'.TH CROW 1 "" "crow {_roff(__version__)}"',
        ".SH NAME",
        f"crow \\- {_roff(root.description.removesuffix('.'))}",
        ".SH SYNOPSIS",
        f".B {_roff(_synopsis(root))}",
        ".SH DESCRIPTION",
        _roff(root.epilog),
        *_roff_options(root),
        ".SH COMMANDS",
    ]
    for command in list(root.all())[1:]:
        lines += [f'.SS "{_roff(_synopsis(command))}"', _roff(command.description)]
        if command.aliases:
            lines += [".PP", _roff(f"Also: {', '.join(command.aliases)}.")]
        lines += _roff_options(command)
        if command.epilog:
            lines += [".PP", ".nf", _roff(command.epilog.strip()), ".fi"]
    return "\n".join([*lines, ""])


def _synopsis(command: _CommandReference) -> str:
    words = [*command.path]
    if len(command.options) > 1:  # more options than --help
        words.append("[OPTION ...]")
    words += [each.value for each in command.positionals]
    if command.commands:
        words.append("COMMAND" if command.needs_command or len(command.path) == 1 else "[COMMAND]")
    return " ".join(words)


def _roff_options(command: _CommandReference) -> Iterator[str]:
    for each in (*command.positionals, *command.options):
        if each.help and ("--help" not in each.flags or len(command.path) == 1):
            value = each.value if each.flags else each.metavar
            yield from (".TP", f".B {_roff(' '.join(filter(None, [', '.join(each.flags), value])))}", _roff(each.help))


def _roff(text: str) -> str:
    """Escape `text` for roff, so that roff reads none of its lines as a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n"))


def print_completion(options: argparse.Namespace) -> None:
    """`crow completion`: print the script for a shell, or the sessions that a word may name."""
    if options.sessions is not None:  # the completion scripts run this command while the user types
        from crow.cli.sessions import session_names  # takes 200 ms, and the scripts do not need it

        for name, title in _matching_sessions(asyncio.run(session_names(_MAX_SESSIONS)), options.sessions):
            print(f"{name}\t{title}")
        return
    if options.shell is None:
        raise ArgumentError("crow completion needs the name of a shell: bash, zsh or fish.")
    print(completion(options.shell, reference_of(whole_parser())), end="")


def print_manual(_options: argparse.Namespace) -> None:
    """`crow man`: print the manual page."""
    print(manual(reference_of(whole_parser())), end="")


def _matching_sessions(sessions: Sequence[tuple[str, str | None, str]], word: str) -> Iterator[tuple[str, str]]:
    """Yield the aliases and ids that begin with `word`, each with the title of its session. If there are none, yield
    the id and title of each session whose title contains `word`. Each item of `sessions` is a tuple (id, alias, title).

    Aliases and ids with characters that a shell would have to quote are left out.
    """

    def is_plain(name: str) -> bool:
        return re.fullmatch(r"[\w.@+-]+", name, re.ASCII) is not None

    named = [(name, title) for key, alias, title in sessions for name in (alias, key) if name and is_plain(name)]
    begun = [(name, title) for name, title in named if name.startswith(word)]
    titled = [(key, title) for key, _, title in sessions if is_plain(key) and word.casefold() in title.casefold()]
    return iter(begun or titled)
