"""Splits a text into commands and words, as bash would.

Values that exist only while the text runs, such as those of variables, are unknown here. `UNKNOWN` or `UNKNOWN_WORDS`
stands for them. `simple_words` is for allow rules: it accepts too little rather than too much. `read_text` is for deny
rules: it finds every command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

Words: TypeAlias = tuple[str, ...]
"""The words of a command, with quotes removed. They may contain `UNKNOWN` and `UNKNOWN_WORDS`."""

UNKNOWN = "\0"
"""Stands for unknown text in a word."""
UNKNOWN_WORDS = "\1"
"""Stands for unknown text that may also be several words."""
MAX_DEPTH = 12
"""Substitutions are read down to this depth. A command that runs another command adds to the depth, too."""
_MAX_TRIES = 20
"""Crow looks for the end of `((` at most this many times in one text."""

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


@dataclass(slots=True)
class ShellText:
    """The commands and the redirections in a text."""

    commands: list[tuple[Words, int]] = field(default_factory=list)
    """The commands, with their depths, in the order in which they end. Commands in substitutions are among them."""
    files: list[str] = field(default_factory=list)
    """The targets of redirections."""
    is_clear: bool = True
    """False if a part of the text could not be read."""
    has_input: bool = False
    """Whether any input is redirected or piped."""


def read_text(text: str, depth: int = 0) -> ShellText:
    """Return the commands and the redirections in a text. `depth` is the depth of the text itself."""
    found = ShellText()
    _Reader(text, found, depth).read()
    return found


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`?", re.DOTALL)
_ANSI_QUOTED = re.compile(r"\$'(?:[^'\\]|\\.)*'?", re.DOTALL)
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<>|<&|>&|>>|>\||<\(|>\(|<|>")
_HERE_MARK = re.compile(r"""[ \t]*((?:'[^'\n]*'|"[^"\n]*"|\\.|[^\s;&|<>()'"\\])+)""")
_CASE = re.compile(r"\bcase\b.*\bin\b", re.DOTALL)
_FILE_VARIABLE = re.compile(r"\{[^{} ]+\}")


@dataclass(frozen=True, slots=True)
class _HereDocument:
    """A here-document whose operator was read. Its text begins on the next line."""

    mark: str
    """The line that ends the text."""
    may_indent: bool
    """Whether tabs may come before the mark."""
    is_expanded: bool
    """Whether bash expands substitutions in the text."""


class _Reader:
    """Splits one text into commands and adds them to `found`. Each substitution gets a reader of its own.

    The reader is between two words (`_pieces` is None) or in a word. Characters become pieces, pieces a word
    (`_end_word`), and words a command (`_end_command`).
    """

    def __init__(self, text: str, found: ShellText, depth: int) -> None:
        self._text = text
        self._found = found
        self._depth = depth
        self._at = 0  # the index of the next character
        self._words: list[str] = []  # the finished words of the current command
        self._pieces: list[str] | None = None  # the parts of the current word, or None between two words
        self._is_target = False  # whether the current or next word is the target of a redirection
        self._has_brace = False  # whether the current word has a `{` outside of quotes
        self._here: list[_HereDocument] = []  # the here-documents that begin on the next line
        self._tries = 0  # see `_MAX_TRIES`

    def read(self) -> None:
        """Read the whole text."""
        if self._depth > MAX_DEPTH:
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
            self._read_expansion(UNKNOWN_WORDS)
        elif char == "#" and self._pieces is None:
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        elif char in "<>" or self._text.startswith("&>", self._at):
            self._read_redirection()
        elif self._text.startswith("((", self._at) and (inner := self._arithmetic()) is not None:
            self._end_command()
            # some shells read `((...))` as commands in nested subshells, so look for commands in it
            self._nest(inner.replace("<<", " "))
        elif char in ";&|()\n":
            self._found.has_input |= char == "|" and not self._text.startswith("||", self._at)
            self._end_command()
            self._at = rest_at + (self._text[self._at : self._at + 2] in ("||", "&&", ";;", "|&"))
            if char == "\n":
                self._skip_here_documents()
        elif char in "*?" or (char == "[" and (self._pieces is not None or self._peek(rest_at) not in " [\t\n")):
            self._add(UNKNOWN_WORDS)
            self._at = rest_at
        else:
            self._has_brace = self._has_brace or char == "{"
            self._add(char)
            self._at = rest_at

    def _arithmetic(self) -> str | None:
        """If `((...))` with arithmetic begins here, read it and return the text inside, where `<<` is an operator.
        Otherwise return None."""
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
        """Read double-quoted text up to and including the character `end`. If `end` is empty, read to the end of
        the text."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == end:
                self._at += 1
                return
            if char in "$`":
                self._read_expansion(UNKNOWN)
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
        if self._depth > MAX_DEPTH:
            self._found.is_clear = False
            return
        self._read_double("")

    def _read_expansion(self, unknown: str) -> None:
        """Read a substitution or a variable, which begins with a dollar sign or a backquote. Add `unknown` to the word
        in place of the value, or `UNKNOWN_WORDS` if the value may be several words even in quotes."""
        text, start = self._text, self._at
        if text[start] == "`":
            inner = _BACKQUOTED.match(text, start)
            assert inner is not None
            self._at = inner.end()
            self._nest(re.sub(r"\\([`\\$])", r"\1", inner[1]))
            self._add(unknown)
            return
        after = text[start + 1 : start + 2]
        self._at = start + 2
        if after == "(":
            inner_text = self._balanced("(", ")")
            is_arithmetic = inner_text.startswith("(") and inner_text.endswith(")")
            self._nest(inner_text.replace("<<", " ") if is_arithmetic else inner_text)
            self._add(unknown)
        elif after == "[":
            self._nested(self._balanced("[", "]")).read_substitutions()
            self._add(unknown)
        elif after == "{":
            inner_text = self._balanced("{", "}")
            self._nested(inner_text).read_substitutions()
            self._add(UNKNOWN_WORDS if "@" in inner_text else unknown)
        elif after == "'" and unknown == UNKNOWN_WORDS:
            inner = _ANSI_QUOTED.match(text, start)
            assert inner is not None
            self._at = inner.end()
            self._add(UNKNOWN)
        elif name := _NAME.match(text, start + 1):
            self._at = name.end()
            self._add(UNKNOWN_WORDS if name[0] == "@" else unknown)
        else:
            self._at = start + 1
            if after != '"' or unknown == UNKNOWN:
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

    def _nested(self, text: str) -> _Reader:
        return _Reader(text, self._found, self._depth + 1)

    def _nest(self, text: str) -> None:
        self._nested(text).read()

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
                self._add(UNKNOWN)
                return
            case "<<" | "<<-":
                self._begin_here_document(may_indent=operator[0] == "<<-", word_before=word_before)
                return
            case "<" | "<<<" | "<>" | "<&":
                self._found.has_input = True
        self._is_target = True

    def _begin_here_document(self, *, may_indent: bool, word_before: str) -> None:
        self._found.has_input = True
        word = _HERE_MARK.match(self._text, self._at)
        if word is None:
            self._found.is_clear = False
            return
        self._at = word.end()
        is_odd = "$" in word[1] or "`" in word[1] or ("\\" in word[1] and bool(set(word[1]) & set("'\"")))
        # in `a[1<<E]`, the operator `<<` begins no here-document
        if is_odd or self._peek(self._at) not in " \t\n;&|<>()" or UNKNOWN_WORDS in word_before:
            self._found.is_clear = False
        mark = re.sub(r"['\"\\]", "", word[1])
        self._here.append(_HereDocument(mark, may_indent=may_indent, is_expanded=mark == word[1]))

    def _skip_here_documents(self) -> None:
        """Skip the texts of here-documents. If bash would expand a text, read the substitutions in it. If an end mark
        is missing, `is_clear` becomes false, because the text may then contain no here-document at all."""
        waiting, self._here = self._here, []
        for document in waiting:

            def is_end(line: str, document: _HereDocument = document) -> bool:
                return (line.lstrip("\t") if document.may_indent else line) == document.mark

            body: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if is_end(line):
                    break
                body.append(line)
            else:
                self._found.is_clear = False
            if document.is_expanded:
                text = "\n".join(body)
                if any(map(is_end, text.replace("\\\n", "").split("\n"))):
                    self._found.is_clear = False
                self._nested(text).read_substitutions()

    def _end_word(self) -> None:
        if self._pieces is None:
            return
        word, self._pieces = "".join(self._pieces), None
        if self._has_brace:  # bash may expand it to several words, as in {a,b}
            self._has_brace = False
            inner = word[word.find("{") : word.rfind("}") + 1]
            word = UNKNOWN_WORDS if "," in inner or ".." in inner else word
        if self._is_target:
            self._is_target = False
            self._found.files.append(word)
        else:
            self._words.append(word)

    def _end_command(self) -> None:
        self._end_word()
        self._is_target = False
        if self._words:
            self._found.commands.append((tuple(self._words), self._depth))
            self._words = []
