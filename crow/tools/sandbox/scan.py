"""Finds the protected files of a workspace and reads their states. :mod:`crow.tools.sandbox.protected` uses them."""

from __future__ import annotations

import os
import stat as modes
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from crow.domain.protected_names import REPOSITORY_PARTS, SKIPPED, WORKING_PARTS, ProtectedNames, fold_name
from crow.tools.disk import open_folder, read_file
from crow.tools.git import (
    UNFINISHED,
    GitFiles,
    Repository,
    commands_in,
    contains_any,
    find_repository,
    repositories_above,
    steps,
)
from crow.tools.layers.states import Kind, kind_of

FOLDER_DEPTH = 4
MAX_FOLDERS = 4_000
_MAX_ENTRIES = 5_000
FILE_BYTES = 1_000_000
"""The content of a larger file is not kept, so a change to it cannot be undone."""
_ALL_BYTES = 20_000_000
"""The contents of all files together are kept up to this size."""
SETTLED_NS = 50_000_000
"""The clocks of some file systems advance only in steps of this length. So if a file changes twice within one step, its
time of change may stay the same."""

GIT_FOLDERS = frozenset({".git", "git~1"})
_REMOTE_FOLDERS = frozenset({"remotes", "branches"})
_GIT_FILES = frozenset({"config", "config.worktree", "commondir", "gitdir"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """The state of one protected path."""

    kind: Kind
    mode: int
    owner: tuple[int, int]
    """The ids of the user and of the group."""
    stamp: tuple[int, ...]
    """Device, inode, size, and the times of modification and change."""
    content: bytes | None = field(default=None, repr=False)
    """A file's content or a link's target. None if it is not kept."""
    is_settled: bool = True
    """Any later change of the content also changes the stamp. This is not certain for a file that changed a moment
    ago."""
    is_repository: bool = False
    """The path is a repository's own directory."""
    is_mutable: bool = False
    """The content may change, and only the existence of the path is protected. HEAD of a repository is an example."""
    commands: frozenset[bytes] | None = None
    """The lines that make git run a command, if only these lines of the file are protected. Otherwise None."""
    has_other_names: bool = False
    """The file has hard links, so its content can be changed by another name."""

    def is_like(self, other: FileState) -> bool:
        """Return whether two states have the same kind and content. The mode is not compared, and neither is content
        that may change."""
        if self.kind != other.kind:
            return False
        if self.commands is not None and other.commands is not None:
            return other.commands <= self.commands
        if self.is_mutable or self.kind in ("directory", "other"):
            return True
        if self.content is None or other.content is None:
            return self.stamp == other.stamp
        return self.content == other.content


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The paths that a scan found in an ordinary folder."""

    stamp: tuple[int, ...] | None
    """None if the folder must be read again, because it may have changed unnoticed."""
    folders: tuple[str, ...]
    """The folders that must be searched too."""
    watched: tuple[str, ...]
    """The protected files and folders."""
    is_repository: bool
    """Whether the folder is a repository's own directory, such as a bare repository."""


class Scan:
    """One pass over the roots. It reads again only what has changed since the previous pass.

    With `opens_folders`, folders that cannot be listed get the mode u+rwx. Otherwise a command could hide files in such
    folders.
    """

    def __init__(
        self,
        states: Mapping[str, FileState],
        listings: Mapping[str, Listing],
        names: ProtectedNames,
        *,
        opens_folders: bool,
    ) -> None:
        self._names = names
        self.states: dict[str, FileState] = {}
        self.listings: dict[str, Listing] = {}
        self._earlier_states = states
        self._earlier_listings = listings
        self._opens_folders = opens_folders
        self._bytes_left = _ALL_BYTES
        self._now = time.time_ns()

    def add_root(self, root: str) -> None:
        """Add the protected paths in and below a root, folders close to the root first."""
        level, folders_left = [root], MAX_FOLDERS
        for _ in range(FOLDER_DEPTH + 1):
            below: list[str] = []
            for folder in level[:folders_left]:
                listing = self._list_folder(folder)
                for path in listing.watched:
                    self._add(path, is_in_repository=listing.is_repository)
                below += listing.folders
            folders_left -= min(len(level), folders_left)
            level = below

    def find_named(self, roots: Sequence[str], git: GitFiles) -> frozenset[str]:
        """Find what git would run in the repositories around and below the roots, and what links with protected names
        lead to. Call this after `add_root`. The paths are inside the roots, and need not exist."""
        tops = [os.path.dirname(path) for path, state in self.states.items() if state.is_repository]
        tops += [folder for folder, listing in self.listings.items() if listing.is_repository]
        below = (find_repository(top) for top in tops)
        around = (repository for root in roots for repository in repositories_above(root))
        found: dict[Repository, None] = dict.fromkeys([*around, *filter(None, below)])
        linked = {place for path, state in self.states.items() if state.kind == "link" for place in steps(path)}
        named = git.named(found) | linked
        inside = (path for path in named if any(is_inside(path, root) for root in roots))
        return frozenset(path for path in inside if not contains_any(path, roots))

    def add_named(self, named: Set[str]) -> None:
        """Add those of these paths that exist, with everything below them."""
        for path in sorted(named - self.states.keys()):
            self._add_tree(path)

    def add_known(self, before: Mapping[str, FileState]) -> None:
        """Add the paths in `before` that still exist. The search may have missed these paths, because the command may
        have created so many files that the limits were reached."""
        for path in before.keys() - self.states.keys():
            known = before[path]
            if known.commands is None:
                self._add_one(path, is_repository=known.is_repository, is_mutable=known.is_mutable)

    def _list_folder(self, folder: str) -> Listing:
        """Return the listing of an ordinary folder. The folder is read only if it has changed since the last pass."""
        earlier = self._earlier_listings.get(folder)
        try:
            found = os.lstat(folder)
        except OSError:
            return Listing(stamp=None, folders=(), watched=(), is_repository=False)
        stamp = make_stamp(found)
        if earlier is None or earlier.stamp != stamp:
            earlier = self._read_folder(folder, stamp if self._is_settled(found) else None)
        self.listings[folder] = earlier
        return earlier

    def _read_folder(self, folder: str, stamp: tuple[int, ...] | None) -> Listing:
        """Read a folder and divide its entries into those to watch and the folders to search."""
        entries = {entry.name: entry.is_dir(follow_symlinks=False) for entry in self._entries(folder)}
        is_repository = "HEAD" in entries and "objects" in entries and "refs" in entries
        parts = REPOSITORY_PARTS if "HEAD" in entries else frozenset()
        above = [fold_name(part) for part in Path(folder).parts]
        folders, watched = [], []
        for name, is_folder in entries.items():
            folded = fold_name(name)
            if folded in parts or (self._names.may_name(folded) and self._names.names([*above, folded])):
                watched.append(os.path.join(folder, name))
            elif is_folder and folded not in SKIPPED and not (is_repository and folded == "logs"):
                folders.append(os.path.join(folder, name))
        # the repository comes first, so that its files are kept even if `_ALL_BYTES` does not suffice for all
        watched.sort(key=lambda path: (fold_name(os.path.basename(path)) not in GIT_FOLDERS, path))
        return Listing(stamp=stamp, folders=tuple(sorted(folders)), watched=tuple(watched), is_repository=is_repository)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        """Return the entries of a folder; none if it cannot be listed."""
        for _ in range(2):
            try:
                with os.scandir(folder) as entries:
                    return list(entries)
            except PermissionError:
                if not self._opens_folders or not _open_up(folder):
                    return []
            except OSError:
                return []
        return []

    def _add(self, path: str, *, is_in_repository: bool) -> None:
        """Add a protected path with everything below it that is watched."""
        folded = fold_name(os.path.basename(path))
        if is_in_repository and folded in ("head", "objects", "refs"):
            self._add_one(path, is_mutable=True)
        elif is_in_repository and folded in ("modules", "worktrees"):
            self._add_repositories(path)
        elif is_in_repository and folded == "info":
            self._add_info(path)
        elif folded in (*UNFINISHED, *_REMOTE_FOLDERS):
            self._add_changing(path)
        elif folded in GIT_FOLDERS:
            self._add_repository(path)
        else:
            self._add_tree(path)

    def _add_tree(self, path: str) -> None:
        """Add a path and everything below it, up to `_MAX_ENTRIES` in total. A folder in `WORKING_PARTS`, which
        commands may change, is searched like an ordinary folder."""
        stack = [path]
        while stack:
            path = stack.pop()
            state = self._add_one(path) if len(self.states) < _MAX_ENTRIES else None
            if state is None or state.kind != "directory":
                continue
            folded = fold_name(os.path.basename(path))
            for entry in self._entries(path):
                if (folded, fold_name(entry.name)) not in WORKING_PARTS:
                    stack.append(entry.path)
                elif folded not in SKIPPED and entry.is_dir(follow_symlinks=False):
                    self.add_root(entry.path)

    def _add_repository(self, path: str) -> None:
        """Add a repository's own directory, or the file or link `.git` in its place."""
        state = self._add_one(path, is_repository=True)
        if state is None or len(self.states) >= _MAX_ENTRIES or state.kind != "directory":
            return
        for entry in sorted(self._entries(path), key=lambda entry: entry.name):
            folded = fold_name(entry.name)
            if folded in ("modules", "worktrees"):
                self._add_repositories(entry.path)
            elif folded == "info":
                self._add_info(entry.path)
            elif folded in (*UNFINISHED, *_REMOTE_FOLDERS):
                self._add_changing(entry.path)
            elif folded in _GIT_FILES or folded == "hooks":
                self._add_tree(entry.path)

    def _add_info(self, path: str) -> None:
        """Add a repository's folder `info`, except for the list of refs that `git gc` writes."""
        if os.path.islink(path) or not os.path.isdir(path):
            self._add_tree(path)
            return
        self._add_one(path, is_mutable=True)
        for entry in self._entries(path):
            folded = fold_name(entry.name)
            if folded != "refs" and not folded.startswith("refs_"):
                self._add_tree(entry.path)

    def _add_changing(self, path: str) -> None:
        """Add the protected content of a folder that commands may create and remove: definitions of remotes, and the
        lines of an unfinished rebase that git would run."""
        if os.path.islink(path) or not os.path.isdir(path):
            self._add_tree(path)
            return
        names = UNFINISHED.get(fold_name(os.path.basename(path)))
        for entry in self._entries(path):
            if names is None:
                self._add_tree(entry.path)
            elif fold_name(entry.name) in names:
                content = None
                with suppress(OSError):
                    content = None if entry.is_symlink() else self._read(entry.path, os.lstat(entry.path))
                if commands := commands_in(fold_name(entry.name), content):
                    self._add_one(entry.path, commands=commands)

    def _add_repositories(self, path: str) -> None:
        """Add the repositories in a folder. Those of submodules may be several folders deep."""
        stack = [path]
        while stack:
            path = stack.pop()
            state = self._add_one(path) if len(self.states) < _MAX_ENTRIES else None
            if state is None or state.kind != "directory":
                continue
            for entry in self._entries(path):
                if os.path.lexists(os.path.join(entry.path, "HEAD")):
                    self._add_repository(entry.path)
                else:
                    stack.append(entry.path)

    def _add_one(
        self,
        path: str,
        *,
        is_repository: bool = False,
        is_mutable: bool = False,
        commands: frozenset[bytes] | None = None,
    ) -> FileState | None:
        """Add one path and return its state; None if there is no file."""
        try:
            found = os.lstat(path)
        except OSError:
            return None
        stamp, earlier = make_stamp(found), self._earlier_states.get(path)
        content = None
        if not is_mutable:
            is_known = earlier is not None and earlier.stamp == stamp and earlier.is_settled and not earlier.is_mutable
            content = earlier.content if earlier is not None and is_known else self._read(path, found)
        if content is not None:
            self._bytes_left -= len(content)
        state = FileState(
            kind=kind_of(found.st_mode),
            mode=modes.S_IMODE(found.st_mode),
            owner=(found.st_uid, found.st_gid),
            stamp=stamp,
            content=content,
            is_settled=self._is_settled(found),
            is_repository=is_repository,
            is_mutable=is_mutable,
            commands=commands,
            has_other_names=modes.S_ISREG(found.st_mode) and found.st_nlink > 1,
        )
        self.states[path] = state
        return state

    def _read(self, path: str, found: os.stat_result) -> bytes | None:
        """Return a file's content or a link's target; None if it is too large or cannot be read."""
        with suppress(OSError):
            if modes.S_ISLNK(found.st_mode):
                return os.fsencode(os.readlink(path))
            if modes.S_ISREG(found.st_mode) and found.st_size <= min(FILE_BYTES, self._bytes_left):
                content = read_file(Path(path), 0, FILE_BYTES + 1)
                return content if len(content) <= min(FILE_BYTES, self._bytes_left) else None
        return None

    def _is_settled(self, found: os.stat_result) -> bool:
        return self._now - found.st_ctime_ns > SETTLED_NS


def is_inside(path: str, folder: str) -> bool:
    """Return whether the path is the folder or below it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def is_related(path: str, other: str) -> bool:
    """Return whether one path is the other or contains it."""
    return is_inside(path, other) or is_inside(other, path)


def make_stamp(found: os.stat_result) -> tuple[int, ...]:
    """Return the metadata that shows whether a file has changed: see `FileState.stamp`."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _open_up(folder: str) -> bool:
    """Give the owner all rights in a folder. Return whether that was possible."""
    with suppress(OSError), opened(folder) as handle:
        found = os.fstat(handle)
        if modes.S_ISDIR(found.st_mode):
            os.chmod(f"/proc/self/fd/{handle}", modes.S_IMODE(found.st_mode) | 0o700)
            return True
    return False


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a file or folder without following links, only to change its mode."""
    flags = getattr(os, "O_PATH", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)) | getattr(os, "O_NOFOLLOW", 0)
    place = Path(path)
    with open_folder(place.parent) as folder:
        handle = os.open(place.name if folder is not None else path, flags, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)
