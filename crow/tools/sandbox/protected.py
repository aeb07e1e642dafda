"""Restores protected files after a command has run. This is needed if the kernel cannot prevent changes to these
files."""

from __future__ import annotations

import errno
import os
import shutil
import stat as modes
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crow.domain.protected_names import DEFAULT_NAMES, ProtectedNames, fold_name
from crow.tools.disk import open_folder, replace_file
from crow.tools.git import GitFiles
from crow.tools.layers.states import kind_of
from crow.tools.sandbox.scan import FileState, Listing, Scan, is_inside, is_related, opened
from crow.tools.trees import remove_tree

_ROUNDS = 6
_MAX_DEPTH = 100
_MAX_SEARCHED = 100_000
_CHECK_SHARE = 20
"""Of the time that a command runs, checks take at most one part in this many."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """The states of the protected paths before a command. Commands that run at the same time share these states."""

    states: dict[str, FileState] = field(repr=False)
    named: set[str] = field(repr=False)
    """The paths that settings of git and links named before the command. Paths that only a repository or link of the
    command's own names are not protected."""
    suspected: set[str] = field(default_factory=set, repr=False)
    """The paths that differed at a check while the command ran."""


class ProtectedFiles:
    """The protected files of a workspace, which commands under a weak sandbox could change.

    This class watches the files whose `names` are protected. It searches each root and the folders up to four levels
    below it, at most 4,000 folders. In a repository's own directory, and in those of its submodules and worktrees, the
    watched names are config, hooks, info, remotes and branches. Commands may change objects, refs, HEAD, index and
    info/refs, and an unfinished rebase as long as git would run no command for it. The class also watches the paths
    that the settings of the repositories name, and the targets of links with protected names. Protected files and
    repositories that a command creates are watched too.

    Not watched: deeper folders, folders of dependencies and build results (`SKIPPED`), anything behind a link,
    protected entries after the first 5,000, and extended attributes. Changes to files over 1 MB, and to files beyond
    the first 20 MB in total, are reported but cannot be undone.

    The files that commands wrote are moved to the directory `kept`. Commands must not be able to write there. All
    methods block, and may be called from several threads.
    """

    def __init__(self, roots: Iterable[Path], kept: Path, names: ProtectedNames = DEFAULT_NAMES) -> None:
        self._roots = tuple(dict.fromkeys(os.path.realpath(root) for root in roots))
        self._names = names
        self._git = GitFiles()
        self._kept = kept
        self._states: dict[str, FileState] = {}
        self._listings: dict[str, Listing] = {}
        self._active: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._next_check = 0.0

    def snapshot(self) -> Snapshot:
        """Remember the state of all protected paths. Call this before a command starts, and `put_back` after its end.

        If another command is already running, this call reuses the states from before that command. Otherwise
        `put_back` would not undo what that command has already changed.
        """
        with self._lock:
            running = next(iter(self._active), None)
            states, named = self._scan() if running is None else (running.states, running.named)
            snapshot = Snapshot(states, named)
            self._active.add(snapshot)
            return snapshot

    def put_back(self, snapshot: Snapshot, *, only_created: bool = False) -> tuple[str, ...]:
        """Undo all changes since the snapshot. Return one sentence for each changed path.

        With `only_created`, undo only the creation of files and folders. The caller uses this if the sandbox kept the
        command from changing or removing other paths. Links are the exception: changed and removed links are put back
        too. The files that the command wrote are moved to `kept`.
        """
        with self._lock:
            undo = _Undo(self._roots, self._kept, snapshot.states, only_created=only_created)
            for _ in range(_ROUNDS):
                if not undo.run(self._scan_again(snapshot)):
                    break
            else:
                undo.report_unstable(self._scan_again(snapshot))
            self._active.discard(snapshot)
            return tuple(undo.sentences.values())

    def check(self, snapshot: Snapshot, *, only_created: bool = False) -> tuple[str, ...]:
        """Undo changes while the command runs. Return one sentence for each changed path. See `put_back`.

        A change is undone at the second check that sees the path changed: many programs create such files for a
        moment, for example in a test of their own. A path that was changed once is undone at each later check.
        """
        with self._lock:
            began = time.monotonic()
            if began < self._next_check:
                return ()
            undo = _Undo(self._roots, self._kept, snapshot.states, only_created=only_created)
            current = self._scan_again(snapshot)
            self._next_check = began + _CHECK_SHARE * (time.monotonic() - began)
            due = undo.differences(current) & snapshot.suspected
            snapshot.suspected.update(undo.differences(current))
            if due:
                undo.run(current, only=due)
            return tuple(undo.sentences.values())

    def accept(self, path: Path | None = None) -> None:
        """Record that the user allowed a change while commands run. `put_back` will leave the path as it is now. If
        `path` is None, this applies to all paths."""
        with self._lock:
            if not self._active:
                return
            active = next(iter(self._active))
            states = active.states
            current, named = self._scan()
            new, known = named - active.named, set(active.named)
            active.named.update(named)
            for changed in states.keys() | current.keys():
                is_new = any(is_inside(changed, one) for one in new) and not any(
                    is_inside(changed, one) for one in known
                )
                if path is None or is_related(changed, str(path)) or is_new:
                    if changed in current:
                        states[changed] = current[changed]
                    else:
                        del states[changed]

    def _scan(self) -> tuple[dict[str, FileState], set[str]]:
        """Return the current states of the protected paths, and the paths that settings of git and links name now."""
        scan = Scan(self._states, self._listings, self._names, opens_folders=False)
        for root in self._roots:
            scan.add_root(root)
        named = set(scan.find_named(self._roots, self._git))
        scan.add_named(named)
        self._states, self._listings = scan.states, scan.listings
        return dict(scan.states), named

    def _scan_again(self, snapshot: Snapshot) -> dict[str, FileState]:
        """Return the current states of the protected paths, including the paths of the snapshot that still exist."""
        scan = Scan(self._states, self._listings, self._names, opens_folders=True)
        for root in self._roots:
            scan.add_root(root)
        scan.add_named(snapshot.named)
        scan.add_known(snapshot.states)
        self._states, self._listings = scan.states, scan.listings
        return dict(scan.states)


class _Undo:
    """Undoes the changes since a snapshot, in several rounds, because one change can hide others.

    Whether a directory has a file called HEAD decides which of its other files are protected. Therefore changes to
    files called HEAD are undone first.
    """

    def __init__(
        self, roots: Sequence[str], kept: Path, before: Mapping[str, FileState], *, only_created: bool
    ) -> None:
        self.sentences: dict[str, str] = {}
        """Maps each path that was undone to a sentence about it."""
        self._roots = roots
        self._kept = kept
        self._before = before
        self._only_created = only_created
        self._given_up: set[str] = set()
        """The paths whose changes cannot be undone. They no longer count as differences."""

    def run(self, current: Mapping[str, FileState], *, only: Set[str] | None = None) -> bool:
        """Undo the differences, or `only` those at these paths. Return whether there were any. If there were, another
        round must check the result."""
        if not self._only_created and self._restore_moved_repositories(current):
            return True
        differences = sorted(self.differences(current) if only is None else only)
        heads = [path for path in differences if fold_name(os.path.basename(path)) == "head"]
        replaced: set[str] = set()
        for path in heads or differences:
            if not any(is_inside(path, done) for done in self._given_up | replaced):
                self._undo(path, current.get(path))
                before, now = self._before.get(path), current.get(path)
                if before is not None and now is not None and before.kind != now.kind:
                    replaced.add(path)  # what was below this path was moved away with it
        return bool(differences)

    def report_unstable(self, current: Mapping[str, FileState]) -> None:
        """Report the paths that still differ after the last round."""
        for path in sorted(self.differences(current)):
            self._say(path, "the command keeps changing {}: a process that it started still runs, so end that process")

    def differences(self, current: Mapping[str, FileState]) -> set[str]:
        """Return the paths whose changes must be undone. The content of a created folder is left out, because it moves
        with the folder."""
        created = {path for path in current if path not in self._before}
        differences = {path for path in created if os.path.dirname(path) not in created}
        for path, before in self._before.items():
            now = current.get(path)
            is_changed = now is None or not before.is_like(now) or (before.mode != now.mode and before.kind != "link")
            if before.commands is not None:  # a finished rebase removes its files
                is_changed = now is not None and not before.is_like(now)
            elif self._only_created and before.kind != "link" and not before.has_other_names:
                is_changed = False
            if is_changed:
                differences.add(path)
        return differences - self._given_up

    def _undo(self, path: str, now: FileState | None) -> None:
        """Give a path its former state. `now` is its current state, or None if there is no file."""
        before = self._before.get(path)
        try:
            if before is None:
                self._say(path, f"the command created {{}}; it was moved to {self._keep(path)}")
            elif now is None:
                self._restore(path, before, None)
                self._say(path, "the command removed {}; it was put back")
            elif not before.is_like(now):
                self._put_back(path, before, now)
            else:
                _set_mode(path, before)
                self._say(path, "the command changed the mode of {}; the former mode was put back")
        except OSError as error:
            if os.path.lexists(path) or before is not None:
                self._given_up.add(path)
                self._say(path, f"the command changed {{}}, which could not be put back: {error.strerror}")

    def _put_back(self, path: str, before: FileState, now: FileState) -> None:
        """Give a path its former content, and keep the new one."""
        if before.kind in ("file", "link") and before.content is None:
            self._given_up.add(path)
            self._say(path, "the command changed {}; it is too large to be put back, so check it yourself")
            return
        if before.kind == now.kind == "file":
            _set_mode(path, before)  # the command may have made it unreadable
        written = self._keep(path, stays=before.kind == now.kind == "file")
        self._restore(path, before, now)
        self._say(path, f"the command changed {{}}; the former content was put back; the new one is in {written}")

    def _restore(self, path: str, before: FileState, now: FileState | None) -> None:
        """Create a path as it was before. :raises OSError: this is not possible, or its content was not kept."""
        place = Path(path)
        if before.kind == "file" and before.content is not None:
            replace_file(place, before.content)
            _set_mode(path, before)
        elif before.kind == "link" and before.content is not None:
            with open_folder(place.parent) as folder:
                os.symlink(os.fsdecode(before.content), place.name if folder is not None else path, dir_fd=folder)
        elif before.kind == "directory":
            place.parent.mkdir(parents=True, exist_ok=True)
            with open_folder(place.parent) as folder:
                os.mkdir(place.name if folder is not None else path, dir_fd=folder)
            _set_mode(path, before)
        else:
            state = "" if now is None else "Changed; "
            raise OSError(errno.EFBIG, f"{state}Its content was not kept")

    def _restore_moved_repositories(self, current: Mapping[str, FileState]) -> bool:
        """If the command renamed repositories' directories, move them back. Return whether it renamed any."""
        is_changed = False
        for path, before in self._before.items():
            if before.kind != "directory" or not before.is_repository or path in self._given_up:
                continue
            now = current.get(path)
            if now is not None and now.stamp[:2] == before.stamp[:2]:
                continue
            found = self._find_folder(before.stamp[:2])
            if found is None or found == path:
                continue
            is_changed = True
            try:
                if os.path.lexists(path):
                    self._keep(path)
                _move(found, path)
                self._say(path, f"the command moved {{}} to {self._shown(found)}; it was moved back")
            except OSError as error:
                self._given_up.add(path)
                self._say(
                    path, f"the command moved {{}} to {self._shown(found)}; it stays there, because: {error.strerror}"
                )
        return is_changed

    def _find_folder(self, identity: tuple[int, ...]) -> str | None:
        """Find a repository's directory by device and inode."""
        device, inode = identity
        queue, searched = deque(self._roots), 0
        while queue and searched < _MAX_SEARCHED:
            searched += 1
            with suppress(OSError), os.scandir(queue.popleft()) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if entry.inode() == inode and entry.stat(follow_symlinks=False).st_dev == device:
                        is_one = os.path.lexists(os.path.join(entry.path, "HEAD"))  # inode numbers are reused
                        return entry.path if is_one else None
                    queue.append(entry.path)
        return None

    def _keep(self, path: str, *, stays: bool = False) -> str:
        """Move the file or folder at the path to the directory `kept`. With `stays`, copy the file instead, so that the
        path still exists when the caller puts the former content there. Return the new path, in the form that is shown
        to the model."""
        root = next((root for root in self._roots if is_inside(path, root)), os.sep)
        relative = os.path.relpath(path, root)
        target, number = self._kept / relative, 1
        # a file that was moved here before may have this name, or the name of one of the folders
        while not _make_folder(target.parent) or os.path.lexists(target):
            number += 1
            target = self._kept / str(number) / relative
        if stays:
            _copy(path, str(target))
        else:
            _move(path, str(target))
        return _escape(str(target))

    def _say(self, path: str, sentence: str) -> None:
        """Add a sentence about a path. `{}` in it stands for the path."""
        said = sentence.replace("{}", self._shown(path))
        self.sentences[path] = said if path not in self.sentences else f"{self.sentences[path]}; then {said}"

    def _shown(self, path: str) -> str:
        """Return a path for the model: relative if it is in the first root."""
        root = next((root for root in self._roots if is_inside(path, root)), os.sep)
        return _escape(os.path.relpath(path, root) if root == self._roots[0] else path)


def _make_folder(path: Path) -> bool:
    """Make a folder and those above it. Return False if a file is in the place of one of them."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError):
        return False
    return True


def _escape(text: str) -> str:
    """Return the text with everything that cannot be printed escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "replace").decode() for char in text)


def _set_mode(path: str, state: FileState) -> None:
    """Give a file or folder its former mode and, if possible, its former owner."""
    with opened(path) as handle:
        found, place = os.fstat(handle), f"/proc/self/fd/{handle}"
        if kind_of(found.st_mode) != state.kind:
            raise OSError(errno.ELOOP, "The path now leads elsewhere", path)
        if not hasattr(os, "O_PATH"):  # without O_PATH, `opened` returns an ordinary handle
            os.fchmod(handle, state.mode)
            return
        if (found.st_uid, found.st_gid) != state.owner:
            with suppress(OSError):
                os.chown(place, *state.owner)
        os.chmod(place, state.mode)


def _move(path: str, target: str) -> None:
    """Move a file or folder. Links in its path and links inside the folder are not followed."""
    place = Path(path)
    with open_folder(place.parent) as folder:
        name = place.name if folder is not None else path
        try:
            os.rename(name, target, src_dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copy(path, target)
            if modes.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                remove_tree(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)


def _copy(path: str, target: str, depth: int = 0) -> None:
    """Copy a file, link or folder to a new path. Pipes, sockets and devices are left out, and so is everything that is
    nested more than `_MAX_DEPTH` folders deep."""
    found = os.lstat(path)
    match kind_of(found.st_mode):
        case "link":
            os.symlink(os.readlink(path), target)
        case "directory":
            os.mkdir(target, 0o700)
            for name in os.listdir(path) if depth < _MAX_DEPTH else ():
                _copy(os.path.join(path, name), os.path.join(target, name), depth + 1)
        case "file":
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            with open(os.open(path, flags), "rb") as source, open(target, "xb") as file:
                if modes.S_ISREG(os.fstat(source.fileno()).st_mode):
                    shutil.copyfileobj(source, file)
