"""Makes the changes of commands that run without a layer undoable, as far as that is cheap.

Before such a command, crow lists the files of the workspace and copies the small ones. Afterwards, it stores the
changes as a change set, as if they had come from a layer. Files that git ignores, large files and git's objects are
left out. If somebody else changes files while the command runs, crow cannot tell these changes from the command's own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from crow.tools.layers.changes import Operation
from crow.tools.layers.ignored import IgnoreRules
from crow.tools.layers.moves import Parents
from crow.tools.layers.place import Place, discard, new_directory
from crow.tools.layers.sets import ChangeSet, directory_of, new_set, remove_bases, write_manifest, write_state
from crow.tools.layers.states import (
    ABSENT,
    OPEN_DIRECTORY,
    Copier,
    State,
    TooLargeError,
    check_depth,
    meta_of,
    state_of,
    status_of,
)

MAX_FILES = 10_000
_MAX_BYTES = 64_000_000
"""All copies together have at most this many bytes."""
FILE_BYTES = 2_000_000
"""Larger files are not copied."""
_GIT_SKIPPED = frozenset({"objects", "lfs", "modules", "annex", "hooks"})
"""Folders in a repository's own directory that are left out."""


@dataclass(slots=True)
class _Node:
    """What was at a path."""

    status: os.stat_result
    is_copied: bool = False
    """Whether the content of the file is in `copy`."""
    copy: Path = Path()
    target: str = ""
    """Where a link leads."""
    inner: dict[str, _Node] = field(default_factory=dict)
    """What was in a directory."""
    is_closed: bool = False
    """Whether the directory was not listed, because it is left out or cannot be read."""

    @property
    def mark(self) -> tuple[int, int, int, str]:
        """Properties of a file. If they are all the same as before, the file counts as unchanged."""
        return (self.status.st_mode, self.status.st_size, self.status.st_mtime_ns, self.target)

    @property
    def is_directory(self) -> bool:
        """Whether it was a directory."""
        return stat.S_ISDIR(self.status.st_mode)


class Snapshot:
    """The files of a workspace before a command. `remove` must be called at the end. All calls block."""

    def __init__(self, place: Place, roots: Sequence[str]) -> None:
        """:raises TooLargeError: the workspace has too many files. :raises OSError: it cannot be read or copied."""
        self._place = place
        self._roots = tuple(roots)
        self._ignored = IgnoreRules(roots)
        self._folder, self._lock = new_directory(place.snapshots)
        self._count = self._bytes = 0
        self.lost: list[str] = []
        """The absolute paths of changed files whose old content was not copied."""
        try:
            with directory_of(self._folder / "x") as target:
                self._before = {root: self._tree(root, target) for root in self._roots}
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the copies."""
        with suppress(OSError):
            discard(self._folder)
        os.close(self._lock)

    def changes(self, about: Mapping[str, str]) -> ChangeSet | None:
        """Return the changes since the snapshot, as a change set that is stored but counts only after :func:`confirm`;
        None if nothing has changed.

        :raises TooLargeError: there are too many files now. :raises OSError: it cannot be stored.
        """
        self._count = 0
        now = {root: self._tree(root, -1) for root in self._roots}
        with new_set(self._place, self._roots, about) as made:
            remove_bases(made.bases, made.directory)  # nothing has to be moved
            own = replace(made, bases=dict.fromkeys(self._roots, str(made.directory)))
            operations: list[Operation] = []
            for root in self._roots:
                self._compare(root, "", self._before[root], now[root], own, operations)
            if operations:
                return write_manifest(own, operations)
        os.close(own.lock)
        discard(own.directory)
        return None

    def _tree(self, root: str, target: int) -> _Node:
        handle = os.open(root, OPEN_DIRECTORY)
        try:
            node = _Node(os.fstat(handle))
            self._fill(node, handle, root, target, 0)
        finally:
            os.close(handle)
        return node

    def _fill(self, node: _Node, handle: int, path: str, target: int, depth: int) -> None:
        """List an open directory, whose path is `path`. Copy its files to the open directory `target`, unless it is -1.
        No link is followed, because other commands may still run."""
        check_depth(depth)
        with os.scandir(handle) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            status = status_of(name, handle)
            full = f"{path}/{name}"
            if status is None or self._ignored.ignores(full, stat.S_ISDIR(status.st_mode)):
                continue
            if name in _GIT_SKIPPED and "/.git/" in full:
                node.inner[name] = _Node(status, is_closed=True)
                continue
            self._count += 1
            if self._count > MAX_FILES:
                raise TooLargeError(f"there are more than {MAX_FILES:,} files")
            node.inner[name] = inner = _Node(status)
            if inner.is_directory:
                try:
                    below = os.open(name, OPEN_DIRECTORY, dir_fd=handle)
                except OSError:
                    inner.is_closed = True
                    continue
                try:
                    self._fill(inner, below, full, target, depth + 1)
                finally:
                    os.close(below)
            elif stat.S_ISLNK(status.st_mode):
                inner.target = os.readlink(name, dir_fd=handle)
            elif target != -1 and stat.S_ISREG(status.st_mode):
                self._copy(inner, name, handle, target)

    def _copy(self, node: _Node, name: str, handle: int, target: int) -> None:
        size = min(node.status.st_size, node.status.st_blocks * 512)
        if size > FILE_BYTES or self._bytes + size > _MAX_BYTES:
            return
        self._bytes += size
        to = str(self._count)
        with suppress(OSError):
            node.is_copied = Copier().copy(name, handle, to, target)
            node.copy = self._folder / to

    def _compare(
        self, root: str, path: str, before: _Node, now: _Node, made: ChangeSet, operations: list[Operation]
    ) -> None:
        """Add an operation for each difference between two states of a directory."""
        count = len(operations)
        for name in sorted({*before.inner, *now.inner}):
            below = f"{path}/{name}" if path else name
            old, new = before.inner.get(name), now.inner.get(name)
            if (old is not None and old.is_closed) or (new is not None and new.is_closed):
                continue
            if old is not None and new is not None and old.is_directory and new.is_directory:
                self._compare(root, below, old, new, made, operations)
            elif old is None or new is None or old.mark != new.mark:
                with suppress(FileNotFoundError, NotADirectoryError):  # it was just removed
                    operations.append(self._operation(root, below, old, made, len(operations)))
        modes = [stat.S_IMODE(each.status.st_mode) for each in (before, now)]
        if len(operations) > count or modes[0] != modes[1]:
            states = (meta_of(before.status, ()), meta_of(now.status, ()))
            operations.append(Operation(root=root, path=path, before=states[0], after=states[1], is_meta=True))

    def _operation(self, root: str, path: str, old: _Node | None, made: ChangeSet, number: int) -> Operation:
        with Parents() as parents:
            after = state_of(os.path.basename(path), parents.open(root, path)[0])
        before = ABSENT
        if old is not None:
            image = made.image(number)
            self._put(old, image, f"{root}/{path}")
            with directory_of(image) as folder:
                before = state_of(image.name, folder)
            if before == ABSENT:  # nothing was copied
                before = State(kind="file", mode=stat.S_IMODE(old.status.st_mode), size=old.status.st_size)
        return Operation(root=root, path=path, before=before, after=after)

    def _put(self, node: _Node, image: Path, name: str) -> None:
        """Put the copy of what was at a path at `image`, where the change set keeps it. Files without a copy are added
        to `lost`."""
        if node.is_closed:
            self.lost.append(name)
        elif node.is_directory:
            image.mkdir()
            for each, inner in node.inner.items():
                self._put(inner, image / each, f"{name}/{each}")
            image.chmod(stat.S_IMODE(node.status.st_mode))
            os.utime(image, ns=(node.status.st_atime_ns, node.status.st_mtime_ns))
        elif node.target:
            image.symlink_to(node.target)
        elif node.is_copied:
            node.copy.rename(image)
        else:
            self.lost.append(name)


def confirm(change_set: ChangeSet) -> None:
    """Mark a change set as kept. Call this after its id was stored in the log."""
    write_state(change_set.directory, "kept")
    (change_set.directory / "bases").unlink()  # nothing has to be cleaned up
    os.close(change_set.lock)
