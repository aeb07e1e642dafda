"""Finds the files that the user's deny rules hide from commands."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unicodedata import normalize

from crow.domain.protected_names import SKIPPED, fold_name
from crow.tools import ExcludedPaths
from crow.tools.disk import shared_inode
from crow.tools.sandbox.scan import (
    FOLDER_DEPTH,
    GIT_FOLDERS,
    MAX_FOLDERS,
    SETTLED_NS,
    is_inside,
    make_stamp,
)

MAX_DENIED = 500
"""The maximum number of paths to hide. It is limited because each hidden path delays a command by up to 1 ms."""

_NOT_SEARCHED = SKIPPED | GIT_FOLDERS
_ANY_NAME = "\1"
"""A name that no rule mentions. If the rules cover this name in a folder, they cover everything in the folder."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A file, folder or link."""

    path: str
    """The path by which the search reached it."""
    real: str
    """That path with links resolved, except for a link in its last part."""
    kind: Literal["file", "folder", "link"]
    inode: int
    is_denied: bool
    """Whether the rules cover the file, or everything that could be in the folder."""


class DeniedFiles:
    """The files of a workspace that deny rules cover.

    The search covers the visible trees and the places that the rules name. In each of them, it goes down at most four
    levels and reads at most 4,000 folders. It enters the folders in `SKIPPED` (git, dependencies, build results) only
    if a rule names them. Within these limits, the search also finds other paths to a denied file: the hard links of the
    file, and the target of a link with a denied name.

    Relative patterns start at the directory `root`. The directories in `kept`, and the directories that contain them,
    are never hidden as a whole. The methods block, and may be called from several threads.
    """

    def __init__(self, root: Path, kept: Iterable[Path]) -> None:
        self.has_found = False
        """Whether the last `find` has returned something."""
        self._root = str(root).rstrip(os.sep) + os.sep
        self._kept = {str(folder) for path in kept for folder in (path, *path.parents)}
        self._patterns: tuple[str, ...] = ()
        self._matches = re.compile("").fullmatch
        self._listings: dict[str, tuple[tuple[int, ...], tuple[_Found, ...]]] = {}
        self._lock = threading.Lock()

    def find(self, excluded: ExcludedPaths, trees: Iterable[Path]) -> tuple[Path, ...]:
        """Return the denied files and folders in `trees` and in the places that the rules name, with links resolved.

        :raises PermissionError: there are too many files and folders to hide.
        """
        with self._lock:
            if self._patterns != excluded.patterns:
                whole = "|".join(f"(?:{pattern})" for pattern in excluded.patterns)
                self._matches = re.compile(whole, re.IGNORECASE | re.DOTALL).fullmatch
                self._patterns, self._listings = excluded.patterns, {}
            places = (os.path.normpath(os.path.join(self._root, place)) for place in excluded.places)
            found = self._search([*map(str, trees), *places]) if excluded.patterns else []
            self.has_found = bool(found)
        if len(found) > MAX_DENIED:
            raise PermissionError(
                errno.EACCES,
                f"The command was not run: the user's deny rules cover {len(found):,} files here, such as {found[0]}. "
                "These are too many to hide one by one. A rule for a whole folder, such as read_file(keys/), hides "
                'the folder in one step. The access "full" hides nothing; the user will be asked',
            )
        return tuple(map(Path, found))

    def _search(self, tops: list[str]) -> list[str]:
        """Return the denied files and folders at and below these paths. What is in a denied folder is left out."""
        seen: dict[str, _Found] = {}
        denied: dict[str, None] = {}
        folders: set[str] = set()
        for top in dict.fromkeys(tops):
            for found in self._walk(top):
                seen[found.real] = found
                if found.is_denied and found.kind == "folder":
                    folders.add(found.real)
                if found.is_denied and (real := _target_of(found, top)):
                    denied[real] = None
        shared = {inode for path in denied if (inode := shared_inode(Path(path))) is not None}
        numbers = {number for _, number in shared}
        linked = [found.real for found in seen.values() if found.inode in numbers and found.kind == "file"]
        denied |= dict.fromkeys(path for path in linked if shared_inode(Path(path)) in shared)
        return [path for path in denied if not any(str(parent) in folders for parent in Path(path).parents)]

    def _walk(self, top: str) -> Iterator[_Found]:
        """Yield the files and folders at and below a path. The content of a denied folder is left out."""
        real = os.path.realpath(top)
        if not os.path.exists(real):
            return
        first = self._found(top, real, "folder" if os.path.isdir(real) else "file", 0)
        yield first
        level, folders_left = [] if first.is_denied or first.kind == "file" else [first], MAX_FOLDERS
        for _ in range(FOLDER_DEPTH + 1):
            below: list[_Found] = []
            for folder in level[:folders_left]:
                entries = self._list_folder(folder)
                yield from entries
                below += (each for each in entries if each.kind == "folder" and not each.is_denied)
            folders_left -= min(len(level), folders_left)
            level = [each for each in below if fold_name(os.path.basename(each.path)) not in _NOT_SEARCHED]

    def _list_folder(self, folder: _Found) -> tuple[_Found, ...]:
        """Return the entries of a folder; empty if the folder cannot be read. The folder is read again only if it has
        changed."""
        known = self._listings.get(folder.path)
        try:
            status = os.stat(folder.real)
            stamp = make_stamp(status)
            if known is None or known[0] != stamp:
                with os.scandir(folder.real) as entries:
                    known = stamp, tuple(self._found_entry(folder, entry) for entry in entries)
        except OSError:
            return ()
        if time.time_ns() - status.st_ctime_ns > SETTLED_NS:
            self._listings[folder.path] = known
        return known[1]

    def _found_entry(self, folder: _Found, entry: os.DirEntry[str]) -> _Found:
        is_folder = entry.is_dir(follow_symlinks=False)
        kind: Literal["file", "folder", "link"] = "link" if entry.is_symlink() else "folder" if is_folder else "file"
        path, real = os.path.join(folder.path, entry.name), os.path.join(folder.real, entry.name)
        return self._found(path, real, kind, entry.inode())

    def _found(self, path: str, real: str, kind: Literal["file", "folder", "link"], inode: int) -> _Found:
        """Return a file, folder or link, judged by both of its paths."""
        names = {path, real, path.removeprefix(self._root), real.removeprefix(self._root)}
        is_denied = real not in self._kept and any(self._covers(normalize("NFC", name), kind) for name in names)
        return _Found(path, real, kind, inode, is_denied)

    def _covers(self, name: str, kind: str) -> bool:
        """Return whether the rules cover a file with this name, or all files in a folder with this name."""
        if kind != "folder":
            return self._matches(name) is not None
        return all(self._matches(f"{name}/{rest}") for rest in (_ANY_NAME, "/".join([_ANY_NAME] * 3)))


def _target_of(found: _Found, top: str) -> str:
    """Return the path to hide. For a link, this is the file that the link leads to. Return an empty string if the link
    does not lead to a file in the searched tree. Without this check, a link in the workspace could make crow hide any
    file of the system."""
    if found.kind != "link":
        return found.real
    target = os.path.realpath(found.real)
    return target if os.path.isfile(target) and is_inside(target, os.path.realpath(top)) else ""
