"""Finds out which files git ignores, without starting git.

Git in a hostile repository may run programs, and would read the files of a layer. So crow reads the ignore files
itself: `.gitignore` in each directory of a repository, and `info/exclude` in the repository's own directory. The user's
global ignore file is not read. Crow does not know whether git tracks a file although its rules ignore it, so such a
file counts as ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from crow.tools.git import find_repository
from crow.tools.layers.states import read_file

_MAX_BYTES = 1_000_000
"""A longer ignore file is not read."""
_MAX_PATTERNS = 2_000
_MAX_PATTERN_CHARS = 500
_MAX_ANY_DIRECTORIES = 3


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line of an ignore file."""

    expression: re.Pattern[str]
    """Matches a path relative to the ignore file's directory."""
    is_negated: bool
    only_directories: bool


@dataclass(frozen=True, slots=True)
class _Folder:
    """The rules for the names in one directory."""

    sources: tuple[tuple[str, tuple[Pattern, ...]], ...] = ()
    """The patterns of each ignore file that counts here, with the directory to which they are relative. Files that take
    precedence come first. Empty outside of a repository, and in an ignored directory."""
    is_ignored: bool = False
    """Git ignores the directory, and so everything in it."""

    def ignores(self, path: str, is_directory: bool) -> bool:
        """Return whether an absolute path in this directory is ignored. In the first ignore file with a pattern that
        matches, the last such pattern decides."""
        for base, patterns in self.sources:
            relative = path[len(base.rstrip(os.sep)) + 1 :]
            for pattern in reversed(patterns):
                if (is_directory or not pattern.only_directories) and pattern.expression.fullmatch(relative):
                    return not pattern.is_negated
        return self.is_ignored


_NO_RULES = _Folder()


@dataclass(slots=True)
class IgnoreRules:
    """What git ignores in a workspace: in the repository around each root, and in the repositories inside. Each ignore
    file is read once, so these rules are made anew for each command or look. They never read the files of a layer."""

    roots: Sequence[str]
    _folders: dict[str, _Folder] = field(default_factory=dict)

    def ignores(self, path: str, is_directory: bool) -> bool:
        """Return whether git ignores an absolute path. Paths in `.git` and paths outside of the roots are not
        ignored."""
        root = next((root for root in self.roots if path.startswith(f"{root.rstrip(os.sep)}/")), None)
        if root is None or "/.git/" in f"{path[len(root.rstrip(os.sep)) :]}/":
            return False
        return self._folder(os.path.dirname(path), root).ignores(path, is_directory)

    def _folder(self, path: str, root: str) -> _Folder:
        """Return the rules in a directory of a root."""
        unread = []
        while path not in self._folders and path != root:
            unread.append(path)
            path = os.path.dirname(path)
        folder = self._folders.get(path)
        if folder is None:
            folder = self._folders[path] = _rules_of_root(root)
        for path in reversed(unread):
            folder = self._folders[path] = _entered(folder, path)
        return folder


def _rules_of_root(root: str) -> _Folder:
    """Return the rules in a root. If the repository around a root ignores the root itself, no rules apply, because the
    root does not belong to that repository: for example, a repository of the home directory may ignore everything but a
    few files."""
    top, inner = root, list[str]()
    while not (exclude := _exclude_file(top)):
        if _is_end_of_search(top):
            return _NO_RULES
        inner.append(top)
        top = os.path.dirname(top)
    if top != root and not _is_trusted(top, root):
        return _NO_RULES
    folder = _top_of_repository(top, exclude)
    for path in reversed(inner):
        folder = _entered(folder, path)
    return _NO_RULES if folder.is_ignored else folder


def _is_end_of_search(folder: str) -> bool:
    """Return whether git would not search above a folder for a repository, because git stays on one file system."""
    above = os.path.dirname(folder)
    try:
        return above == folder or os.stat(folder).st_dev != os.stat(above).st_dev
    except OSError:
        return True


def _is_trusted(top: str, root: str) -> bool:
    """Return whether the repository around a root may hide changes: it belongs to the user, or to the owner of the
    root. In a directory where every user can write, such as /tmp, anybody can make a repository."""
    try:
        owners = {os.geteuid(), os.stat(root).st_uid}
        return {os.stat(top).st_uid, os.lstat(os.path.join(top, ".git")).st_uid} <= owners
    except OSError:
        return False


def _top_of_repository(path: str, exclude: str) -> _Folder:
    own = _patterns_in(os.path.join(path, ".gitignore"))
    return _Folder(((path, own), (path, _patterns_in(exclude))))


def _entered(around: _Folder, path: str) -> _Folder:
    """Return the rules in a directory, from those in the directory around it. A repository has rules of its own."""
    if around.ignores(path, is_directory=True):
        return _Folder(is_ignored=True)
    exclude = _exclude_file(path)
    if exclude:
        return _top_of_repository(path, exclude)
    if not around.sources:
        return _NO_RULES
    return _Folder(((path, _patterns_in(os.path.join(path, ".gitignore"))), *around.sources))


def _exclude_file(folder: str) -> str:
    """Return the path of `info/exclude` of the repository with this folder at its top; empty if there is none. The
    repository's own directory is `.git`, or the one that a file `.git` names. Like git, do not take a directory without
    `HEAD` and `objects` for a repository."""
    if not os.path.lexists(os.path.join(folder, ".git")):
        return ""
    found = find_repository(folder)
    if found is None or not os.path.lexists(os.path.join(found.directory, "HEAD")):
        return ""
    return os.path.join(found.common, "info/exclude") if os.path.isdir(os.path.join(found.common, "objects")) else ""


def _patterns_in(file: str) -> tuple[Pattern, ...]:
    """Return the patterns in an ignore file; empty if it is not a plain file that can be read. Like git, follow no link
    to a `.gitignore`."""
    text = read_file(file, _MAX_BYTES)
    return _parse_patterns("" if text is None else text.decode(errors="surrogateescape"))


@lru_cache(maxsize=64)
def _parse_patterns(text: str) -> tuple[Pattern, ...]:
    """Return the patterns in the text of an ignore file, in order."""
    lines = text.split("\n")[:_MAX_PATTERNS]
    return tuple(pattern for line in lines if (pattern := parse_pattern(line)) is not None)


def parse_pattern(line: str) -> Pattern | None:
    """Return the pattern in a line; None for an empty line, for a comment, and for a pattern that is too long or not
    valid."""
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
    """Return the regular expression for a pattern of git. The expression matches in linear time. None if the pattern is
    not valid, or has more than `_MAX_ANY_DIRECTORIES` parts `**`."""
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
