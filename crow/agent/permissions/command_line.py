"""Reads command lines: finds the words of a plain command, and the commands that any line runs.

An allow rule uses `simple_words`, which accepts too little rather than too much. A deny rule uses `runs`, which finds
the commands in a line as bash would. Values that exist only while a line runs, such as those of variables, are unknown
here; if the answer depends on such a value, `runs` returns "maybe".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, TypeAlias

Words: TypeAlias = tuple[str, ...]
"""The words of a command, with quotes removed. `_ONE` stands for unknown text in a word, `_MANY` for unknown text that
may also be several words."""

_ONE, _MANY = "\0", "\1"
_MAX_DEPTH = 12
_MAX_COMMANDS = 1_000
_MAX_TRIES = 20
"""In one text, crow looks for the end of `((` at most this many times."""
MAX_CHARS = 32_000
"""Crow does not read lines with more characters than this. The commands in such a line are unknown."""
_MAX_WORDS = 256
"""If a wrapper such as `env` runs a command, at most this many words of that command are examined."""

_BARE = r"[^\s;&|<>()$`\0*?\[\]{}!#~^\\'\"]"
"""Matches a character that has no special meaning for the shell outside of quotes."""
_PIECE = re.compile(rf"""(?P<blank>[ \t]+)|'(?P<single>[^'\n\0]*)'|"(?P<double>[^"\n\0$`\\!]*)"|(?P<bare>{_BARE}+)""")


def simple_words(line: str) -> Words | None:
    """Return the words of a single plain command, with quotes removed. Return None if the line contains anything else
    that a shell could act on: operators, substitutions, redirections, expansions or further lines."""
    words: list[str] = []
    pieces: list[str] = []
    at = 0
    while at < len(line):
        found = _PIECE.match(line, at)
        if found is None or (found["bare"] is not None and not found["bare"].isprintable()):
            return None
        at = found.end()
        if found["blank"] is None:
            pieces.append(found[found.lastgroup or 0])
        elif pieces:
            words.append("".join(pieces))
            pieces = []
    return tuple([*words, "".join(pieces)] if pieces else words)


class CommandList:
    """The commands of a line, in the order in which they end. `files` are the targets of redirections. `is_clear` is
    false if a part of the line could not be read, or if the line runs text that it computes. `has_input` is true if any
    input is redirected or piped, and `runs_input` if a shell may run its input."""

    def __init__(self) -> None:
        self.commands: list[Words] = []
        self.files: list[str] = []
        self.is_clear = True
        self.has_input = False
        self.runs_input = False


@lru_cache(maxsize=16)
def read_commands(line: str) -> CommandList:
    """Return the commands that a line runs, including those in substitutions, in `sh -c` and after wrappers such as
    `env`."""
    found = CommandList()
    if len(line) > MAX_CHARS:
        found.is_clear = False
    else:
        _LineReader(line, found, 0).read()
    if found.has_input and found.runs_input:
        found.is_clear = False
    return found


ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]]*\])?\+?=.*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`?", re.DOTALL)
_ANSI_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'?", re.DOTALL)
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<>|<&|>&|>>|>\||<\(|>\(|<|>")
_HERE_MARK = re.compile(r"""[ \t]*((?:'[^'\n]*'|"[^"\n]*"|\\.|[^\s;&|<>()'"\\])+)""")
_CASE = re.compile(r"\bcase\b.*\bin\b", re.DOTALL)
_FILE_VARIABLE = re.compile(r"\{[^{} ]+\}")
_KEYWORDS = frozenset(
    ("if", "then", "else", "elif", "while", "until", "do", "!", "{", "time", "coproc", "fi", "done", "esac", "}")
)


class _LineReader:
    """Splits one text into commands and adds them to `found`. Each substitution gets a reader of its own.

    Characters become pieces, pieces a word (`_end_word`), and words a command (`_end_command`)."""

    def __init__(self, text: str, found: CommandList, depth: int) -> None:
        self._text = text
        self._found = found
        self._depth = depth
        self._at = 0  # the index of the next character
        self._words: list[str] = []  # the finished words of the current command
        self._pieces: list[str] | None = None  # the parts of the current word, or None between two words
        self._drops_word = False  # whether the next word is the target of a redirection
        self._has_brace = False  # whether the current word has a `{` outside of quotes
        self._here: list[tuple[str, bool, bool]] = []  # here-documents of this line: mark, may_indent, is_expanded
        self._tries = 0  # see `_MAX_TRIES`

    def read(self) -> None:
        """Read the whole text."""
        if self._depth > _MAX_DEPTH or len(self._found.commands) > _MAX_COMMANDS:
            self._found.is_clear = False
            return
        while self._at < len(self._text):
            self._read_next(self._text[self._at])
        self._end_command()

    def _read_next(self, char: str) -> None:
        rest_at = self._at + 1
        if char in " \t":
            self._end_word()
            self._at = rest_at
        elif char == "\\":
            if self._text[rest_at : rest_at + 1] != "\n":
                self._add(self._text[rest_at : rest_at + 1])
            self._at = rest_at + 1
        elif char == "'":
            self._add(self._read_single(rest_at))
        elif char == '"':
            self._add("")
            self._at = rest_at
            self._read_double('"')
        elif char in "$`":
            self._read_expansion(_MANY)
        elif char == "#" and self._pieces is None:
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif char in "<>" or self._text.startswith("&>", self._at):
            self._read_redirection()
        elif self._text.startswith("((", self._at) and (inner := self._arithmetic()) is not None:
            self._end_command()
            # some shells read it as commands in two subshells
            self._nest(inner.replace("<<", " "))
        elif char in ";&|()\n":
            self._found.has_input |= char == "|" and not self._text.startswith("||", self._at)
            self._end_command()
            self._at = rest_at + (self._text[self._at : self._at + 2] in ("||", "&&", ";;", "|&"))
            if char == "\n":
                self._skip_here_documents()
        elif char in "*?" or (char == "[" and (self._pieces is not None or self._peek(rest_at) not in " [\t\n")):
            self._add(_MANY)
            self._at = rest_at
        else:
            self._has_brace = self._has_brace or char == "{"
            self._add(char)
            self._at = rest_at

    def _arithmetic(self) -> str | None:
        """Return the text in `((...))`, where `<<` is an operator. Return None if this is something else."""
        start, is_clear = self._at, self._found.is_clear
        self._tries += 1
        if self._tries > _MAX_TRIES:
            self._found.is_clear = False
            return None
        self._at += 1
        outer = self._balanced("(", ")")
        end, self._at = self._at, start + 2
        inner = self._balanced("(", ")")
        if self._found.is_clear == is_clear and outer == f"({inner})":
            self._at = end
            return inner
        self._at = start
        return None

    def _peek(self, at: int) -> str:
        return self._text[at : at + 1] or "\n"

    def _add(self, piece: str) -> None:
        if self._pieces is None:
            self._pieces = []
        self._pieces.append(piece)

    def _read_single(self, start: int) -> str:
        """Return the text from `start` up to the next single quote. Reading continues after that quote."""
        stop = self._text.find("'", start)
        if stop < 0:
            self._found.is_clear = False
            stop = len(self._text)
        self._at = stop + 1
        return self._text[start:stop]

    def _read_double(self, end: str) -> None:
        """Read double-quoted text up to and including the character `end`. If `end` is empty, read all that is left."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == end:
                self._at += 1
                return
            if char in "$`":
                self._read_expansion(_ONE)
                continue
            if char == "\\" and self._peek(self._at + 1) in '$`"\\\n':
                self._add("" if self._peek(self._at + 1) == "\n" else self._peek(self._at + 1))
                self._at += 2
                continue
            self._add(char)
            self._at += 1
        if end:
            self._found.is_clear = False

    def read_substitutions(self) -> None:
        """Read the commands in substitutions and treat everything else as plain text."""
        if self._depth > _MAX_DEPTH:
            self._found.is_clear = False
            return
        self._read_double("")

    def _read_expansion(self, unknown: str) -> None:
        """Read a substitution or a variable, which begins with a dollar sign or a backquote. Its value is `unknown`."""
        text, start = self._text, self._at
        if text[start] == "`":
            inner = _BACKQUOTED.match(text, start)
            assert inner is not None
            self._at = inner.end()
            self._nest(re.sub(r"\\([`\\$])", r"\1", inner[1]))
            self._add(unknown)
            return
        after = text[start + 1 : start + 2]
        if after == "(":
            self._at = start + 2
            inner_text = self._balanced("(", ")")
            is_arithmetic = inner_text.startswith("(") and inner_text.endswith(")")
            self._nest(inner_text.replace("<<", " ") if is_arithmetic else inner_text)
            self._add(unknown)
        elif after == "[":
            self._at = start + 2
            _LineReader(self._balanced("[", "]"), self._found, self._depth + 1).read_substitutions()
            self._add(unknown)
        elif after == "{":
            self._at = start + 2
            _LineReader(self._balanced("{", "}"), self._found, self._depth + 1).read_substitutions()
            self._add(_MANY if "@" in text[start : self._at] else unknown)
        elif after == "'" and unknown == _MANY:
            inner = _ANSI_QUOTED.match(text, start)
            assert inner is not None
            self._at = inner.end()
            self._add(_ONE)
        elif name := _NAME.match(text, start + 1):
            self._at = name.end()
            self._add(_MANY if name[0] == "@" else unknown)
        else:
            self._at = start + 1
            if after != '"' or unknown == _ONE:
                self._add("$")

    def _balanced(self, opening: str, closing: str) -> str:
        """Return the text up to the bracket that matches the opening bracket just read. Brackets in quotes do not
        count."""
        start, level = self._at, 1
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char == "\\":
                self._at += 2
                continue
            if char == "'" or char == '"':
                quoted = _QUOTED.match(text, self._at)
                if quoted is not None:
                    self._at = quoted.end()
                    continue
            level += (char == opening) - (char == closing)
            self._at += 1
            if not level:
                found = text[start : self._at - 1]
                if opening == "(" and _CASE.search(found):  # this bracket may end a pattern of `case`
                    self._found.is_clear = False
                return found
        self._found.is_clear = False
        return text[start:]

    def _nest(self, text: str) -> None:
        _LineReader(text, self._found, self._depth + 1).read()

    def _read_redirection(self) -> None:
        text = self._text
        word_before = "".join(self._pieces or ())
        if word_before.isdecimal() or _FILE_VARIABLE.fullmatch(word_before):
            self._pieces, self._has_brace = None, False  # this word is a file descriptor, as in `2>file` or `{fd}>file`
        self._end_word()
        operator = _REDIRECTION.match(text, self._at)
        assert operator is not None
        self._at = operator.end()
        match operator[0]:
            case "<(" | ">(":
                self._found.has_input = True
                self._nest(self._balanced("(", ")"))
                self._add(_ONE)
                return
            case "<<" | "<<-":
                self._found.has_input = True
                word = _HERE_MARK.match(text, self._at)
                if word is None:
                    self._found.is_clear = False
                    return
                self._at = word.end()
                is_odd = "$" in word[1] or "`" in word[1] or ("\\" in word[1] and bool(set(word[1]) & set("'\"")))
                # in `a[1<<E]`, the operator `<<` begins no here-document
                if is_odd or self._peek(self._at) not in " \t\n;&|<>()" or _MANY in word_before:
                    self._found.is_clear = False
                mark = re.sub(r"['\"\\]", "", word[1])
                self._here.append((mark, operator[0] == "<<-", mark == word[1]))
                return
            case "<" | "<<<" | "<>" | "<&":
                self._found.has_input = True
        self._drops_word = True

    def _skip_here_documents(self) -> None:
        """Skip the texts of here-documents. If bash would expand a text, read the substitutions in it. If the end mark
        is missing, the line is unclear, because it may contain no here-document."""
        waiting, self._here = self._here, []
        for mark, may_indent, is_expanded in waiting:
            body: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if (line.lstrip("\t") if may_indent else line) == mark:
                    break
                body.append(line)
            else:
                self._found.is_clear = False
            if is_expanded:
                joined = "\n".join(body).replace("\\\n", "").split("\n")
                if mark in [line.lstrip("\t") if may_indent else line for line in joined]:
                    self._found.is_clear = False
                _LineReader("\n".join(body), self._found, self._depth + 1).read_substitutions()

    def _end_word(self) -> None:
        if self._pieces is None:
            return
        word, self._pieces = "".join(self._pieces), None
        if self._has_brace:  # bash may expand it to several words, as in {a,b}
            self._has_brace = False
            inner = word[word.find("{") : word.rfind("}") + 1]
            word = _MANY if "," in inner or ".." in inner else word
        if self._drops_word:
            self._drops_word = False
            self._found.files.append(word)
        else:
            self._words.append(word)

    def _end_command(self) -> None:
        self._end_word()
        self._drops_word = False
        words, self._words = tuple(self._words), []
        _add_command(words, self._found, self._depth)


SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "rbash", "csh", "tcsh"))
WRAPPERS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("builtin", "busybox", "command", "nohup", "pkexec", "prlimit"), ("", 0)),
    **dict.fromkeys(("setpriv", "setsid", "unbuffer"), ("", 0)),
    **dict.fromkeys(("chroot", "setarch", "taskset"), ("", 1)),
    "caffeinate": ("tw", 0),
    "chrt": ("TPD", 1),
    "doas": ("uC", 0),
    "env": ("uCS", 0),
    "exec": ("a", 0),
    "flock": ("wE", 1),
    "ionice": ("cn", 0),
    "ltrace": ("oeupn", 0),
    "nice": ("n", 0),
    "parallel": ("jINPaS", 0),
    "rlwrap": ("", 0),
    "runuser": ("ugGcs", 0),
    "script": ("cEIOBTm", 0),
    "ssh": ("oFEiJlLRDpbBcImOQSwW", 1),
    "stdbuf": ("ioe", 0),
    "strace": ("oeupEasPSUbX", 0),
    "su": ("cgGsw", 0),
    "sudo": ("uCDgRrTtUph", 0),
    "systemd-run": ("pEtuMH", 0),
    "time": ("fo", 0),
    "timeout": ("ks", 1),
    "unshare": ("SGRwm", 0),
    "nsenter": ("tSG", 0),
    "watch": ("n", 0),
    "xargs": ("aEeIiLlnPsd", 0),
}
"""Programs that run another program. Each maps to two values: the letters of the options that take a value, and the
number of operands that come before the other program."""

RUNNERS = frozenset(
    (
        *("bunx", "direnv", "mise", "nix", "nix-shell", "npx", "pipx", "pnpx", "uvx", "toolbox", "firejail", "entr"),
        *("watchexec", "nodemon", "hyperfine", "fakeroot", "gosu", "su-exec", "tini", "dumb-init", "valgrind", "perf"),
        *("faketime", "runcon", "sg", "cgexec", "numactl", "eatmydata", "bwrap", "proxychains", "proxychains4"),
        *("torsocks", "sshpass", "tmux", "screen", "start-stop-daemon", "adb", "dbus-run-session", "xvfb-run"),
        *("linux32", "linux64", "chronic", "chpst", "envdir", "softlimit", "setuidgid", "uftrace", "toybox"),
        *("gchroot", "genv", "gnice", "gnohup", "gstdbuf", "gtimeout", "gxargs"),
    )
)
"""More programs that run another program. Their command lines vary too much for `WRAPPERS`, or they are programs of GNU
under the names that they have on macOS."""
_FIND_RUNS = {
    **dict.fromkeys(("find", "gfind"), frozenset(("-exec", "-execdir", "-ok", "-okdir"))),
    **dict.fromkeys(("fd", "fdfind"), frozenset(("-x", "-X", "--exec", "--exec-batch"))),
}
"""Programs that find files and may run another program for them. Each maps to the options that the other program
follows."""
_REPLACES = re.compile(r"^(?:-[IJ] |-[IiJ]|--replace=)(\S+)")
"""Matches the option of `xargs` that says what is replaced, with the word after it."""
_PLACEHOLDER = re.compile(r"\{[^{} ]*\}")
"""Matches what `find`, `xargs` and others replace with a file name or a part of their input, such as `{}` or `{.}`."""


def program_of(word: str) -> str:
    """Return the name of a program without its directory."""
    return word.rpartition("/")[2]


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


def _add_command(words: Words, found: CommandList, depth: int) -> None:
    """Add a command and the commands that it runs."""
    if len(found.commands) > _MAX_COMMANDS or depth > _MAX_DEPTH:
        found.is_clear = False
        return
    words = _without_assignments(words)
    if not words:
        return
    found.commands.append(words)
    program = program_of(words[0])
    if program in SHELLS:
        _add_shell(words, found, depth)
    elif program == "eval":
        _add_text(" ".join(words[1:]), found, depth)
    elif program == "trap":
        for text in (word for word in words[1:] if word not in ("-", "--")):
            _add_text(text, found, depth)
    elif program in ("source", "."):
        found.is_clear &= not any(map(_may_be_input, words[1:]))
    elif program in WRAPPERS or program in RUNNERS or (words[1:2] and words[1] in ("run", "exec", "dlx")):
        takes_input = program in ("xargs", "gxargs", "parallel")
        words, first, more = (*_with_input(words), (_MANY,)) if takes_input else (words, len(words), ())
        for at in range(1, len(words)):
            if len(found.commands) > _MAX_COMMANDS:
                found.is_clear = False
                return
            _add_joined(words[at : at + _MAX_WORDS], found, depth)
            if any(char in words[at] for char in " \t\n;|&"):
                _add_text(words[at].partition("=")[2] if words[at].startswith("-") else words[at], found, depth)
            elif not words[at].startswith("-") and (at <= first or _ONE not in words[at]):
                inner = (*_without_assignments(words[at : at + _MAX_WORDS]), *more) or words
                found.commands.append(inner)
                if program_of(inner[0]) in ("eval", *_FIND_RUNS, *SHELLS):
                    _add_command(inner, found, depth + 1)
    elif program in _FIND_RUNS:
        for at, word in enumerate(words[:-1]):
            if len(found.commands) > _MAX_COMMANDS:
                found.is_clear = False
                return
            if word in _FIND_RUNS[program]:
                run = (_PLACEHOLDER.sub(_ONE, each) for each in words[at + 1 : at + _MAX_WORDS])
                _add_command((*run, _MANY), found, depth + 1)


def _with_input(words: Words) -> tuple[Words, int]:
    """Return the words of `xargs` or `parallel`, with unknown text in place of what the program replaces, and the index
    of the other program. What follows `:::` is input of `parallel`, so it is left out."""
    words = words[: next((at for at, word in enumerate(words) if word.startswith(":::")), len(words))]
    mark, first = "{}", 1
    while first < len(words) and words[first].startswith("-"):
        mark = "".join(_REPLACES.findall(" ".join(words[first : first + 2]))) or mark
        first += 2 if words[first][1:] in (*WRAPPERS["xargs"][0], *WRAPPERS["parallel"][0]) else 1
    unknown = (word if word.startswith("-") else word.replace(mark, _ONE) for word in words)
    return tuple(_PLACEHOLDER.sub(_ONE, word) for word in unknown), first


def _add_joined(words: Words, found: CommandList, depth: int) -> None:
    """Add the command line in an option of a wrapper, as in `env -S'git push'` or `su -c'git push'`."""
    if words[0].startswith("-") and not words[0].startswith("--"):
        for letter in "cS":
            text = words[0][1:].partition(letter)[2]
            if text:
                _add_text(" ".join((text, *words[1:])) if letter == "S" else text, found, depth)


def _add_shell(words: Words, found: CommandList, depth: int) -> None:
    """Add what a shell runs. With `-c`, the shell runs the text after that option. Without `-c`, it runs a script if
    one is named. Without `-c` and without a script, it runs its input, which is unknown."""
    runs_text = next((at for at, word in enumerate(words) if re.fullmatch(r"[-+][A-Za-z]*c[A-Za-z]*", word)), 0)
    operands = [at for at in range(1, len(words)) if not words[at].startswith(("-", "+"))]
    found.runs_input = found.runs_input or _may_run_input(words)
    if runs_text:
        for word in words[runs_text + 1 :]:
            _add_text(word, found, depth)
    elif operands and not words[1].startswith(("-", "+")):
        found.commands.append(words[operands[0] :])
    elif operands:
        found.commands += [words[at:] for at in operands]


_PLAIN_OPTIONS = frozenset(("--", "--login", "--noprofile", "--norc", "--posix"))


def _may_run_input(words: Words) -> bool:
    """Return whether a shell may run its input: it has no script, `-s`, or a script such as /dev/stdin."""
    values = 0
    for word in words[1:]:
        if word.startswith(("-", "+")):
            if _ONE in word or _MANY in word or (not word.startswith("--") and "s" in word):
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
    is_unknown = _ONE in script or _MANY in script
    return is_unknown or os.path.normpath(f"/{script.lstrip('/')}").startswith(("/dev/", "/proc/"))


def _add_text(text: str, found: CommandList, depth: int) -> None:
    """Add the commands in a text that a program runs as a command line."""
    if _ONE in text or _MANY in text:
        found.is_clear = False
    _LineReader(text.replace(_ONE, "$_").replace(_MANY, "$_"), found, depth + 1).read()


def named_files(line: str) -> Iterator[str]:
    """Return the words of a line that may be paths, including the paths in options such as `--file=PATH`."""
    found = read_commands(line)
    for word in (*(word for command in found.commands for word in command), *found.files):
        yield word
        if "=" in word:
            yield word.partition("=")[2]


Certainty: TypeAlias = Literal["yes", "no", "maybe"]

SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    "git": frozenset(
        ("-C", "-c", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--super-prefix", "--config-env")
    ),
    "docker": frozenset(("-H", "--host", "-c", "--context", "-l", "--log-level", "--config")),
    "podman": frozenset(("--connection", "-c", "--url", "--log-level", "--root")),
    "kubectl": frozenset(("-n", "--namespace", "--context", "--kubeconfig", "-s", "--server", "--cluster", "--user")),
    "helm": frozenset(("-n", "--namespace", "--kube-context", "--kubeconfig")),
    "cargo": frozenset(("-C", "-Z", "--config", "--color")),
    "npm": frozenset(("--prefix", "-C", "--registry", "-w", "--workspace", "--userconfig", "--loglevel")),
    "pnpm": frozenset(("-C", "--dir", "--filter", "-F", "--registry")),
    "yarn": frozenset(("--cwd", "--registry")),
    "gh": frozenset(("-R", "--repo")),
    "go": frozenset(("-C",)),
    **dict.fromkeys(
        (
            *("apt", "apt-get", "aws", "az", "brew", "bundle", "conda", "dnf", "gcloud", "gem", "hg", "jj", "pip"),
            *("pip3", "poetry", "rustup", "snap", "svn", "systemctl", "terraform", "twine", "uv", "yum"),
        ),
        frozenset[str](),
    ),
}
"""Programs whose first operand is a subcommand. Each maps to the options that may come before the subcommand and take
the next word as their value."""


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
    if _ONE in program or _MANY in program:
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
    is_unknown = any(_ONE in word or _MANY in word for word in command[1:])
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
        if _MANY in word:
            is_unknown = True
            if values is not None and is_first:
                return "maybe"
        elif word.startswith("-") and len(word) > 1 and _ONE not in word[:2]:
            if values is not None and is_first and word in values:
                if word in ("-c", "--config-env") and command[at : at + 1] and re.match(r"alias\.|[\0\1]", command[at]):
                    return "maybe"  # git: an alias can have any meaning
                is_unknown = is_unknown or (at < len(command) and _MANY in command[at])
                at += 1
        elif _is_same(word, left[0]):
            left.pop(0)
            is_first = False
        elif _ONE in word:
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
