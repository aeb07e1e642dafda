"""Finds the files that git would run or read as settings, without running git.

These are hooks, the scripts that hooks call, settings files and what they include, and the programs that settings name,
such as aliases, filters and editors. A tool that changes one of these files makes git run other code, so
:mod:`crow.tools.protection` protects them.

This module reads git's files itself, because starting git in a hostile repository could already run something.
Conditions of includes are not evaluated: a file that git might include counts as included.
"""

from __future__ import annotations

import os
import re
import shlex
import stat as modes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from crow.domain.protected_names import SKIPPED

_FILE_BYTES = 1_000_000
_MAX_FILES = 64
_MAX_REPOSITORIES = 64
_MAX_SEARCHED = 300
_SEARCH_DEPTH = 4
_SETTLED_NS = 50_000_000
"""A folder that changed less than this long ago is read again, because some clocks advance in steps."""

_MAX_WORDS = 64
"""At most this many words of a command line are looked at."""
_MAX_LINKS = 40
_MAX_LINES = 500

Setting: TypeAlias = tuple[str, str, str]
"""A section, a name and a value of git's settings. Section and name are in lower case."""

_INCLUDES = frozenset({("include", "path"), ("includeif", "path")})
_FOLDERS = frozenset({("core", "hookspath"), ("init", "templatedir")})
"""The settings that name a folder with hooks."""

_COMMAND_SECTIONS = frozenset({"alias", "pager", "hook", "filter"})
"""The sections in which every setting may be a command line."""

_COMMAND = re.compile(
    r".*(?:command|cmd|program|editor|pager|driver|external|askpass|proxy|difffilter|hook|helper|receive|textconv)"
    r"|clean|smudge|process|path|fsmonitor|update|uploadpack|receivepack|smtpserver|vcs"
)
"""Matches the names of settings whose values are command lines, in any section."""

# Text in command lines that stands for the folder where git starts them, and for the user's home directory.
_HOME_OF_REPOSITORY = re.compile(
    r"\$\(git rev-parse [^)]*\)|`git rev-parse [^`]*`|\$\(pwd\)|\$\{?(?:PWD|GIT_[A-Z_]+)\}?"
)
_HOME_OF_USER = re.compile(r"\$\{?HOME\}?(?![A-Za-z0-9_])")
_MODULE = re.compile(r"(?<!\S)-[A-Za-z]{0,8}?m[ '\"]*([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*){0,8})")
_FOLDER_CHANGE = re.compile(r"(?:\bcd|-C|--prefix|--directory)[ =]+['\"]?([^\s'\";|&]+)")
_WORD = re.compile(r"[^\s'\"`;|&<>(){}=,]+")
_HOOKS = (
    *("applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg"),
    *("commit-msg", "post-commit", "pre-rebase", "post-checkout", "post-merge", "pre-push", "pre-receive", "update"),
    *("proc-receive", "post-receive", "post-update", "reference-transaction", "push-to-checkout", "pre-auto-gc"),
    *("post-rewrite", "sendemail-validate", "fsmonitor-watchman", "post-index-change", "p4-changelist"),
    *("p4-prepare-changelist", "p4-post-changelist", "p4-pre-submit"),
)
"""The names of git's hooks."""

_SCRIPTS = (".sh", ".bash", ".zsh", ".py", ".pl", ".rb", ".js", ".cjs", ".mjs", ".ts")
_SETTING = re.compile(r"\s*([A-Za-z][A-Za-z0-9-]*)\s*(=)?")
_SECTION = re.compile(r'\s*\[\s*([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\s*\]')
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A git repository, as found on disk. All paths are absolute, with links resolved."""

    top: str
    """The folder in which git starts hooks and commands: the worktree, or the repository's own folder."""

    directory: str
    """The folder that git calls GIT_DIR."""

    common: str
    """The folder with the settings and hooks. It differs from `directory` in linked worktrees."""


@dataclass(frozen=True, slots=True, eq=False)
class GitFiles:
    """Finds the files that git would run in repositories. Remembers the files and folders that it has read, until they
    change."""

    env: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    _read: dict[str, tuple[tuple[int, ...], tuple[Setting, ...]]] = field(default_factory=dict, repr=False)
    _folders: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict, repr=False)
    _trees: set[str] = field(default_factory=set, repr=False)

    def named_around(self, path: str, roots: Sequence[str]) -> frozenset[str]:
        """Return the files and folders that git would run or read as settings (see `named`), and git's own folders, for
        the repositories of `around`."""
        found = self.around(path, roots)
        own = {folder for one in found for folder in (one.directory, one.common) if not contains_any(folder, roots)}
        return self.named(found) | own

    def around(self, path: str, roots: Sequence[str]) -> list[Repository]:
        """Return the repositories whose trees contain `path` or a root, and the repositories below the
        roots."""
        found = list(repositories_above(os.path.dirname(path)))
        for root in roots:
            found += [] if contains_any(root, [path]) else repositories_above(root)
            found += self._repositories_below(root)
        return found

    def named(self, repositories: Iterable[Repository]) -> frozenset[str]:
        """Return the files and folders that git would run, or would read as settings, in these repositories. The paths
        are absolute. They need not exist: git would also run a file that is created later."""
        chosen = list(dict.fromkeys(repositories))[:_MAX_REPOSITORIES]
        return frozenset(path for repository in chosen for path in self._named(repository))

    def _repositories_below(self, root: str) -> Iterator[Repository]:
        """Return the repositories in the folders of a root, up to four levels deep. Only a limited number of folders is
        searched."""
        level, left = [os.path.realpath(root)], _MAX_SEARCHED
        for _ in range(_SEARCH_DEPTH + 1):
            searched = level[:left]
            left -= len(searched)
            level = [below for folder in searched for below in self._folders_in(folder)]
            for folder in searched:
                if folder in self._trees and (found := find_repository(folder)) is not None:
                    yield found

    def _folders_in(self, folder: str) -> tuple[str, ...]:
        """Return the folders in a folder, except those in which tools keep dependencies. Add `folder` to `_trees` if it
        is the top of a repository."""
        try:
            changed_ns = os.stat(folder).st_mtime_ns
            known = self._folders.get(folder)
            if known is not None and known[0] == changed_ns and time.time_ns() - changed_ns > _SETTLED_NS:
                return known[1]
            with os.scandir(folder) as entries:
                found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            return ()
        (self._trees.add if ".git" in found else self._trees.discard)(folder)
        names = (name for name, is_folder in found.items() if is_folder and name != ".git" and name not in SKIPPED)
        self._folders[folder] = (changed_ns, tuple(os.path.join(folder, name) for name in sorted(names)))
        return self._folders[folder][1]

    def _named(self, repository: Repository) -> Iterator[str]:
        hooks = os.path.join(repository.common, "hooks")
        yield from _link_targets(hooks)
        yield from self._called_by(hooks, (repository.top, repository.directory))
        found = [*self._settings(repository)]
        for file in {file for file, _ in found}:
            yield from steps(file)
        trees = [value for _, (section, name, value) in found if (section, name) == ("core", "worktree")]
        top = os.path.realpath(os.path.join(repository.directory, trees[0])) if trees else repository.top
        bases = (top, repository.directory)
        for file, (section, name, value) in found:
            if (section, name) in _INCLUDES:
                yield from _places(value, (os.path.dirname(file),))
            elif (section, name) == ("core", "attributesfile"):
                yield from _places(value, bases)
            elif (section, name) in _FOLDERS:
                for place in _places(value, bases):
                    yield from _hooks_in(place, top)
                    yield from self._called_by(place, bases)
            elif section in _COMMAND_SECTIONS or _COMMAND.fullmatch(name):
                yield from _named_by_command(section, value, bases)

    def _called_by(self, folder: str, bases: Sequence[str]) -> Iterator[str]:
        """Return the scripts and Python modules that the hooks in a folder call by their paths."""
        for hook in _HOOKS:
            for _, _, value in self._read_file(os.path.join(folder, hook), _parse_script):
                line = _command_line(value)
                yield from _modules_in(line, bases)
                named = _words_in(line, bases, is_alias=True)
                yield from (path for path in named if path.endswith(_SCRIPTS) or os.access(path, os.X_OK))

    def _settings(self, repository: Repository) -> Iterator[tuple[str, Setting]]:
        """Return the settings of a repository, each with its file. Included files follow the file that includes
        them."""
        read: set[str] = set()
        waiting = [os.path.join(repository.common, "config"), os.path.join(repository.directory, "config.worktree")]
        waiting += self._outer_files()
        while waiting and len(read) < _MAX_FILES:
            file = waiting.pop(0)
            if file in read:
                continue
            read.add(file)
            for setting in self._read_file(file, parse_settings):
                yield file, setting
                if setting[:2] in _INCLUDES:
                    waiting += _places(setting[2], (os.path.dirname(file),))

    def _outer_files(self) -> list[str]:
        home = os.path.expanduser("~")
        config = self.env.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
        own = self.env.get("GIT_CONFIG_GLOBAL")
        users = [own] if own else [os.path.join(config, "git", "config"), os.path.join(home, ".gitconfig")]
        return [*users, self.env.get("GIT_CONFIG_SYSTEM") or "/etc/gitconfig"]

    def _read_file(self, file: str, parse: Callable[[str], Iterable[Setting]]) -> tuple[Setting, ...]:
        try:
            found = os.stat(file)
            if not modes.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
                return ()
            stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
            known = self._read.get(file)
            if known is None or known[0] != stamp:
                with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:
                    text = os.fsdecode(opened.read(_FILE_BYTES))
                known = self._read[file] = (stamp, tuple(parse(text)))
        except OSError:
            return ()
        return known[1]


def repositories_above(folder: str) -> Iterator[Repository]:
    """Yield each repository whose tree contains `folder`, innermost first, and after each one the repositories of its
    submodules and linked worktrees."""
    folder = os.path.realpath(folder)
    while True:
        found = find_repository(folder)
        if found is not None:
            yield from (found, *_inner_repositories(found))
        if os.path.dirname(folder) == folder:
            return
        folder = os.path.dirname(folder)


def find_repository(folder: str) -> Repository | None:
    """Return the repository whose worktree has this folder as its top, or the bare repository in this folder."""
    place = os.path.join(folder, ".git")
    if os.path.isdir(place):
        return _repository_at(os.path.realpath(place), folder)
    if os.path.isfile(place):
        text = _first_line(place)
        if text.startswith("gitdir:"):
            directory = os.path.realpath(os.path.join(folder, text.removeprefix("gitdir:").strip()))
            return _repository_at(directory, folder)
    if os.path.isfile(os.path.join(folder, "HEAD")) and os.path.isdir(os.path.join(folder, "objects")):
        return _repository_at(folder, folder)
    return None


def _repository_at(directory: str, top: str) -> Repository:
    common = _first_line(os.path.join(directory, "commondir"))
    shared = os.path.realpath(os.path.join(directory, common)) if common else directory
    return Repository(top=top, directory=directory, common=shared)


def _inner_repositories(repository: Repository) -> Iterator[Repository]:
    """Return the repositories of the submodules that a repository keeps in its own folder, and those of linked
    worktrees with settings of their own."""
    for part in ("modules", "worktrees"):
        folder = os.path.join(repository.common, part)
        with suppress(OSError), os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(_MAX_REPOSITORIES), strict=False):
                needed = "HEAD" if part == "modules" else "config.worktree"
                if os.path.lexists(os.path.join(entry.path, needed)):
                    yield _repository_at(os.path.realpath(entry.path), repository.top)


def _first_line(file: str) -> str:
    """Return the first line of a small file that git wrote; empty if there is no such file."""
    try:
        if not modes.S_ISREG(os.stat(file).st_mode):
            return ""
        with open(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as opened:
            line = os.fsdecode(opened.read(16_384)).partition("\n")[0].rstrip("\r")
    except OSError:
        return ""
    return "" if "\0" in line else line


def _link_targets(path: str) -> Iterator[str]:
    """Yield the target of a link, and all links on the way to it. For a folder, also yield those of each link in it."""
    if os.path.islink(path):
        yield from steps(path)
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield from steps(entry.path)


def steps(path: str) -> Iterator[str]:
    """Return the links that the system follows to open a path, and then the path with links resolved. `path` is
    absolute."""
    place, waiting, links = os.sep, [*reversed(path.split(os.sep))], 0
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            place = os.path.dirname(place)
            continue
        following = os.path.join(place, part)
        target = _link_target(following) if links < _MAX_LINKS else ""
        if not target:
            place = following
            continue
        links += 1
        yield following
        place = os.sep if os.path.isabs(target) else place
        waiting += reversed(target.split(os.sep))
    yield place


def _link_target(path: str) -> str:
    """Return the target that is written in a link; empty if `path` is no link."""
    try:
        return os.readlink(path)
    except (OSError, ValueError):
        return ""


def _hooks_in(place: str, top: str) -> Iterator[str]:
    """Return the paths to protect if `place` is git's folder of hooks. The whole folder is returned, because hooks call
    other files in it. But if the folder contains the worktree, only the hooks themselves are returned. The targets of
    links are returned, too."""
    if (top + os.sep).startswith(place.rstrip(os.sep) + os.sep):
        yield from (os.path.join(place, hook) for hook in _HOOKS)
    else:
        yield place
    yield from _link_targets(place)


def _places(value: str, bases: Sequence[str]) -> Iterator[str]:
    """Return the paths that a value may mean if it is relative to one of the folders `bases`, with all links on the
    way: see `steps`."""
    value = os.path.expanduser(value)
    if value and "\0" not in value:
        for base in bases:
            yield from steps(os.path.join(base, value))


def _named_by_command(section: str, value: str, bases: Sequence[str]) -> Iterator[str]:
    """Return the files to which a command line in git's settings refers."""
    if section != "alias" or value.startswith("!"):
        line = _command_line(value)
        yield from _modules_in(line, bases)
        yield from _words_in(line, bases, is_alias=section == "alias")


def _command_line(value: str) -> str:
    """Return a command line in git's settings, with `.` for the folder where git starts it, and with the user's home
    directory filled in."""
    line = _HOME_OF_REPOSITORY.sub(".", value.removeprefix("!"))
    return _HOME_OF_USER.sub(lambda _: os.path.expanduser("~"), line)


def _modules_in(line: str, bases: Sequence[str]) -> Iterator[str]:
    """Return the files of the modules that `python -m` would run. Python first looks for them in the folder where it
    starts."""
    for module in _MODULE.findall(line):
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            path = os.sep.join(parts[:count])
            for name in (f"{path}.py", f"{path}/__init__.py", f"{path}/__main__.py"):
                yield from _places(name, bases)


def _words_in(line: str, bases: Sequence[str], *, is_alias: bool = False) -> Iterator[str]:
    """Yield the files to which the words of a command line refer. A word without a slash counts if the file exists, or
    if the word looks like the name of a file. A folder counts only if the word has a slash, because any plain word may
    happen to be the name of a folder. In an alias, no folder counts."""
    folders = [place for folder in _FOLDER_CHANGE.findall(line) for place in _places(folder, bases)]
    bases = [*bases, *filter(os.path.isdir, folders)]
    words = dict.fromkeys(_WORD.findall(line))
    with suppress(ValueError):
        words |= dict.fromkeys(shlex.split(line))
    for word in [*words][:_MAX_WORDS]:
        if word.startswith("-") or "://" in word:
            continue
        for path in _places(word, bases):
            is_path = "/" in word and not (is_alias and os.path.isdir(path))
            is_named = is_path or ("." in word and not os.path.lexists(path))
            if os.path.isfile(path) or (is_named and not contains_any(path, bases)):
                yield path


def contains_any(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of the folders or contains one."""
    return any((folder + os.sep).startswith(path.rstrip(os.sep) + os.sep) for folder in folders)


def parse_settings(text: str) -> Iterator[Setting]:
    """Return the settings in one of git's files. Only the lines that git would refuse are skipped, not the whole file,
    because another version of git may accept them."""
    section = ""
    lines = iter(text.lstrip("\ufeff").replace("\r\n", "\n").split("\n"))
    for line in lines:
        start = 0
        while found := _SECTION.match(line, start):
            section, start = found[1].partition(".")[0].lower(), found.end()
        setting = _SETTING.match(line, start)
        if setting is None:
            continue
        rest = line[setting.end() :] if setting[2] else ""
        value, continues = _parse_value(rest, is_quoted=False)
        pieces = [value]
        while continues is not None and (following := next(lines, None)) is not None:
            value, continues = _parse_value(following, is_quoted=continues)
            pieces.append(value)
        yield section, setting[1].lower(), "".join(pieces).strip()


def _parse_value(text: str, *, is_quoted: bool) -> tuple[str, bool | None]:
    """Return the value in the rest of a line. If the value continues on the next line, also return whether it is inside
    quotes there; otherwise return None."""
    value: list[str] = []
    characters = iter(text)
    for char in characters:
        if char == "\\":
            escaped = next(characters, None)
            if escaped is None:
                return "".join(value), is_quoted
            value.append(_ESCAPES.get(escaped, escaped))
        elif char == '"':
            is_quoted = not is_quoted
        elif char in "#;" and not is_quoted:
            break
        else:
            value.append(char)
    return "".join(value), None


def _parse_script(text: str) -> Iterator[Setting]:
    """Return the lines of a shell script that are not comments, in the form of settings."""
    lines = text.split("\n")[:_MAX_LINES] if text.startswith("#!") and "\0" not in text else []
    return (("", "", line) for line in lines if line.strip() and not line.lstrip().startswith("#"))


_TODO_COMMAND = re.compile(rb"^[ \t]*(?:exec|x)(?=[ \t])", re.MULTILINE)
_USUAL_STRATEGIES = frozenset({b"ort", b"recursive", b"resolve", b"octopus", b"ours", b"subtree"})


def commands_in(name: str, content: bytes | None) -> frozenset[bytes]:
    """Return those lines of a file that git would run later. The file belongs to an unfinished rebase or another
    unfinished operation.

    `name` is the name of the file. Lines of a `git-rebase-todo` that pick commits are left out. A file whose content is
    not known counts as one unknown command.
    """
    if content is None:
        return frozenset({b"?"})
    lines = content.replace(b"\r", b"\n").split(b"\n")
    if name == "git-rebase-todo":
        return frozenset(line.strip() for line in lines if _TODO_COMMAND.match(line))
    if name == "strategy":
        return frozenset(line.strip() for line in lines) - _USUAL_STRATEGIES - {b""}
    named = (line.partition(b"=")[2].strip() for line in lines if line.strip().lower().startswith(b"strategy"))
    return frozenset(named) - _USUAL_STRATEGIES


UNFINISHED = {"rebase-merge": ("git-rebase-todo", "strategy"), "sequencer": ("opts",)}
"""Folders in which git keeps unfinished operations, with the files in them whose lines git would run later."""
