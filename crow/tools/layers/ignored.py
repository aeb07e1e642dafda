"""Finds out which files git ignores, without starting git.

Git in a hostile repository may run programs, and would read the files of a layer. So crow reads the ignore files of the
workspace itself: `.gitignore` in each directory, and `.git/info/exclude`. The user's global ignore file is not read.
Whether git tracks a file that its rules ignore is not known, so such a file counts as ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_MAX_BYTES = 256 * 1024
_MAX_PATTERNS = 2_000
_MAX_PATTERN_CHARS = 500
_MAX_ANY_DIRECTORIES = 3
_IGNORE_FILE = ".gitignore"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line of an ignore file."""

    expression: re.Pattern[str]
    """Matches a path relative to the ignore file's directory."""
    is_negated: bool
    only_directories: bool


@dataclass(slots=True)
class IgnoreRules:
    """What git ignores in the repositories of a workspace. Each ignore file is read once, so these rules are made anew
    for each command or look. They never read the files of a layer."""

    roots: Sequence[str]
    _patterns: dict[str, tuple[Pattern, ...]] = field(default_factory=dict)
    _known: dict[str, bool] = field(default_factory=dict)
    _repositories: dict[str, bool] = field(default_factory=dict)
    """Which of the roots are repositories."""

    def ignores(self, path: str, is_directory: bool) -> bool:
        """Return whether git ignores an absolute path. Git's own directory and what it tracks by default are not
        ignored."""
        root = next((root for root in self.roots if path.startswith(f"{root}/")), None)
        if root is None:
            return False
        if root not in self._repositories:
            self._repositories[root] = os.path.lexists(f"{root}/.git")
        if not self._repositories[root]:
            return False
        parts = path[len(root) + 1 :].split("/")
        if ".git" in parts:
            return False
        folder = root
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            full = f"{folder}/{part}"
            if not is_last and full in self._known:
                found = self._known[full]
            else:
                found = self._matches(root, folder, full, is_directory or not is_last)
                if not is_last or is_directory:
                    self._known[full] = found
            if found:
                return True
            folder = full
        return False

    def _matches(self, root: str, folder: str, path: str, is_directory: bool) -> bool:
        """Return whether the last pattern that matches a path ignores it. Patterns of inner directories decide over
        those of outer ones."""
        while True:
            for pattern in reversed(self._patterns_in(folder, is_root=folder == root)):
                if pattern.only_directories and not is_directory:
                    continue
                if pattern.expression.fullmatch(path[len(folder) + 1 :]):
                    return not pattern.is_negated
            if folder == root:
                return False
            folder = os.path.dirname(folder)

    def _patterns_in(self, folder: str, *, is_root: bool) -> tuple[Pattern, ...]:
        if folder not in self._patterns:
            texts = [_read_ignore_file(f"{folder}/.git/info/exclude")] if is_root else []
            texts.append(_read_ignore_file(f"{folder}/{_IGNORE_FILE}"))
            self._patterns[folder] = _parse_patterns("\n".join(texts))
        return self._patterns[folder]


def _read_ignore_file(path: str) -> str:
    """Return the text of an ignore file; empty if it is not a plain file that can be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="surrogateescape")
    except OSError:
        return ""


@lru_cache(maxsize=64)
def _parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Return the patterns in the text of an ignore file, in order."""
    lines = text.split("\n")[:_MAX_PATTERNS]
    return tuple(pattern for line in lines if (pattern := parse_pattern(line)) is not None)


def parse_pattern(line: str) -> Pattern | None:
    """Return the pattern in a line; None for an empty line and for a comment."""
    line = line.rstrip("\r\n")
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    if not line or line.startswith("#") or len(line) > _MAX_PATTERN_CHARS:
        return None
    is_negated = line.startswith("!")
    line = line[1:] if is_negated else line
    only_directories = line.endswith("/")
    line = line.removesuffix("/")
    if not line.strip("/"):
        return None
    is_anchored = "/" in line
    text = line.lstrip("/")
    expression = _translate(text)
    if expression is None:
        return None
    try:
        compiled = re.compile(expression if is_anchored else f"(?:[^/]*/)*+{expression}", re.DOTALL)
    except re.error:  # such as a range that ends before it begins
        return None
    return Pattern(compiled, is_negated, only_directories)


def _translate(pattern: str) -> str | None:
    """Return the regular expression for a pattern of git. It takes linear time. None if the pattern is not valid, or
    has more parts that match any directories than anybody needs."""
    parts = pattern.split("/")
    if parts.count("**") > _MAX_ANY_DIRECTORIES:
        return None
    made = []
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if part == "**" and len(parts) > 1:
            made.append(".+" if is_last else "(?:[^/]+/)*")
            continue
        pieces = _translate_name(part)
        if pieces is None:
            return None
        made.append(pieces if is_last else f"{pieces}/")
    return "".join(made)


def _translate_name(pattern: str) -> str | None:
    """Return the regular expression for a part of a pattern without slashes."""
    pieces: list[str] = [""]
    """The parts between stars."""
    index = 0
    while index < len(pattern):
        char = pattern[index]
        begin = index + 2 if pattern[index + 1 : index + 2] in ("!", "^") else index + 1
        end = pattern.find("]", begin + 1) if char == "[" else -1  # the first character may be a bracket itself
        if char == "[" and end < 0:
            return None
        if char == "*":
            pieces.append("")
        elif char == "?":
            pieces[-1] += "[^/]"
        elif end > 0:
            inner = pattern[index + 1 : end]
            negated = inner[:1] in ("!", "^")
            chars = "".join(f"\\{each}" if each in "\\[]^&~|" else each for each in inner[negated:])
            pieces[-1] += f"(?!/)[{'^' if negated else ''}{chars}]"
            index = end
        else:
            if char == "\\" and index + 1 < len(pattern):
                index += 1
            pieces[-1] += re.escape(pattern[index])
        index += 1
    first, *others = pieces
    if not others:
        return first
    # each piece matches at the first place where it can, and is not tried again
    inner = "".join(f"(?>[^/]*?{piece})" for piece in others[:-1] if piece)
    return f"{first}{inner}[^/]*{others[-1]}(?![^/])"
