"""Moves files into the workspace and out of it, in steps that the next process can recognise after a kill."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from crow.tools.layers.changes import Operation
from crow.tools.layers.sets import ChangeSet
from crow.tools.layers.states import (
    ABSENT,
    EXCHANGE,
    OPEN_DIRECTORY,
    UNSUPPORTED,
    State,
    proc_path,
    rename_new,
    renameat2,
    status_of,
)


class Conflict(Exception):
    """Somebody else has changed files of the workspace, so crow has changed nothing. `paths` are absolute."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(f"changed meanwhile: {', '.join(paths)}")
        self.paths = tuple(paths)


def image_path(change_set: ChangeSet, number: int, operation: Operation) -> str:
    """Return the path to which the file that an operation replaces is moved."""
    return f"{change_set.bases[operation.root]}/before/{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """One operation, with the open directories of the paths that it moves."""

    operation: Operation
    image: str
    """The path to which the replaced file is moved."""
    parent: int
    """The open directory in the workspace in which the path is."""
    name: str
    """The path's name in `parent`."""
    source_parent: int = -1
    """The open directory in which the new file is. -1 if there is no new file."""
    source_name: str = ""
    """The new file's name in `source_parent`."""

    def conflict(self) -> Conflict:
        """Return the error that says that somebody else has changed the path."""
        return Conflict([self.operation.name])

    def source_inode(self) -> int:
        """Return the inode of the file that is now at the new file's original path; 0 if there is none."""
        status = status_of(self.source_name, self.source_parent)
        return 0 if status is None else status.st_ino

    def has_image(self) -> bool:
        """Return whether the replaced file has been moved away."""
        return self.operation.before.kind != "absent" and os.path.lexists(self.image)

    def put(self) -> None:
        """Move the new file into the workspace. :raises Conflict: the path is taken."""
        try:
            with _movable(self.operation.after, self.source_name, self.source_parent):
                rename_new(self.source_name, self.source_parent, self.name, self.parent)
        except FileExistsError:
            raise self.conflict() from None

    def take(self) -> None:
        """Move the new file out of the workspace again."""
        with _movable(self.operation.after, self.name, self.parent):
            rename_new(self.name, self.parent, self.source_name, self.source_parent)

    def exchange(self) -> None:
        """Swap the file in the workspace and the new one atomically."""
        # this is also called to swap the files back, so either of them may be at either path
        each = self.operation.after if self.operation.after.kind == "directory" else self.operation.before
        with _movable(each, self.source_name, self.source_parent), _movable(each, self.name, self.parent):
            renameat2(self.source_name, self.source_parent, self.name, self.parent, EXCHANGE)

    def save(self) -> None:
        """Move the replaced file away, after it was exchanged with the new one."""
        with _movable(self.operation.before, self.source_name, self.source_parent):
            rename_new(self.source_name, self.source_parent, self.image, -1)

    def remove(self) -> None:
        """Move the workspace's file away. :raises Conflict: it is not the expected one."""
        if not _is_top_expected(self.operation.before, status_of(self.name, self.parent)):
            raise self.conflict()
        with _movable(self.operation.before, self.name, self.parent):
            rename_new(self.name, self.parent, self.image, -1)
        if not _is_top_expected(self.operation.before, os.lstat(self.image)):
            self.put_back()
            raise self.conflict()

    def put_back(self) -> None:
        """Move the replaced file back into the workspace."""
        with _movable(self.operation.before, self.image, -1):
            rename_new(self.image, -1, self.name, self.parent)


class Movers:
    """Opens the directories that operations need."""

    def __init__(self) -> None:
        self._parents = Parents(changes=True)
        self._sources = Parents(changes=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._parents.close()
        self._sources.close()

    def mover(self, change_set: ChangeSet, number: int) -> Mover:
        """Return the mover of an operation. :raises OSError: one of its directories is gone."""
        operation = change_set.operations[number]
        parent, name = self._parents.open(operation.root, operation.path)
        image = image_path(change_set, number, operation)
        if not operation.source:
            return Mover(operation=operation, image=image, parent=parent, name=name)
        folder, _, own = operation.source.rpartition("/")
        source, own = self._sources.open(folder, own)
        return Mover(operation=operation, image=image, parent=parent, name=name, source_parent=source, source_name=own)


def move(mover: Mover) -> None:
    """Do one operation, or the rest of it if a killed process has begun it.

    :raises Conflict: the path is not in the state that was expected.
    """
    operation = mover.operation
    if operation.after.kind == "absent":
        if not mover.has_image():
            mover.remove()
        return
    inode = mover.source_inode()
    if not inode:
        return  # it has been moved into the workspace
    if inode != operation.inode:
        mover.save()  # the two files have been exchanged, so the source is the old one
    elif operation.before.kind == "absent" or mover.has_image():
        mover.put()
    else:
        _replace_file(mover)


def _replace_file(mover: Mover) -> None:
    """Put the new file where the old one is."""
    if not _is_top_expected(mover.operation.before, status_of(mover.name, mover.parent)):
        raise mover.conflict()
    try:
        mover.exchange()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        mover.remove()
        mover.put()
        return
    if not _is_top_expected(mover.operation.before, status_of(mover.source_name, mover.source_parent)):
        mover.exchange()
        raise mover.conflict()
    mover.save()


def move_back(mover: Mover) -> None:
    """Undo one operation, as far as it has been done."""
    operation = mover.operation
    if operation.after == ABSENT:
        if mover.has_image():
            mover.put_back()
        return
    inode = mover.source_inode()
    if not inode:
        mover.take()
        inode = operation.inode
    if inode != operation.inode:
        mover.exchange()
    elif mover.has_image():
        mover.put_back()


def _is_top_expected(expected: State, status: os.stat_result | None) -> bool:
    """Return whether a path is as expected, judged without the content of a file or directory."""
    if status is None or expected == ABSENT:
        return (status is None) == (expected == ABSENT)
    if stat.S_IMODE(status.st_mode) != expected.mode:
        return False
    if expected.kind != "file":
        return stat.S_ISDIR(status.st_mode) == (expected.kind == "directory")
    return (status.st_size, status.st_mtime_ns) == (expected.size, expected.mtime_ns)


@contextmanager
def _movable(state: State, name: str, parent: int) -> Iterator[None]:
    """Let the owner of a directory write to it until the block ends, because the kernel refuses to move a directory
    that its owner cannot write to. Do nothing if `state`, the state expected at the path, is not that of a
    directory."""
    if state.kind != "directory":
        yield
        return
    handle = -1
    with suppress(OSError):
        path = name if parent == -1 else proc_path(parent, name)
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
            os.chmod(path, stat.S_IMODE(status.st_mode) | 0o700)
            handle = os.open(path, OPEN_DIRECTORY)
    try:
        yield
    finally:
        if handle != -1:
            os.fchmod(handle, stat.S_IMODE(status.st_mode))
            os.close(handle)


class Parents:
    """Opens the directories of operations, without following links. The directory that was opened last stays open, for
    the next operation in it. With `changes`, the owner of this directory can write to it while it is open, even if
    commands have made it read-only."""

    def __init__(self, *, changes: bool = False) -> None:
        self._changes = changes
        self._place: tuple[str, str] | None = None
        self._handle = -1
        self._mode = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def open(self, root: str, path: str) -> tuple[int, str]:
        """Return the open directory of a path below a root, and the path's name in it.

        :raises OSError: there is no such directory.
        """
        folder, _, name = path.rpartition("/")
        if self._place != (root, folder):
            self.close()
            handle = os.open(root, OPEN_DIRECTORY)
            try:
                for each in filter(None, folder.split("/")):
                    inner = os.open(each, OPEN_DIRECTORY, dir_fd=handle)
                    os.close(handle)
                    handle = inner
                status = os.fstat(handle)
                mode = stat.S_IMODE(status.st_mode)
                if self._changes and mode & 0o300 != 0o300 and status.st_uid == os.geteuid():
                    os.fchmod(handle, mode | 0o300)
                    self._mode = mode
            except BaseException:
                os.close(handle)
                raise
            self._handle, self._place = handle, (root, folder)
        return self._handle, name or "."

    def close(self) -> None:
        """Close the directory that is open."""
        handle, mode = self._handle, self._mode
        self._place, self._handle, self._mode = None, -1, -1
        if mode != -1:
            os.fchmod(handle, mode)
        if handle != -1:
            os.close(handle)
