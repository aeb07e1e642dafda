"""Moves changes into the workspace so that all of them arrive or none, and keeps what was there before.

A change set is a directory:

- `manifest` says what to move. It is written once, before anything moves.
- An empty file called `prepared`, `applying`, `kept` or `taken back` says how far it is.
- `before` has the files that were replaced or removed. They are moved there, not copied, where the file system can.
- `stage` has copies of the new files, if they cannot be moved from where they are.

A process may be killed at any instant. Each step leaves the files so that the next process can see whether the step was
done. So `recover` can go on from there, or go back.

Files can only be moved within a file system. If the workspace is on another one than crow's data, the files are first
copied to a directory in the workspace's root, moved from there, and what was replaced is copied away at the end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

from crow.tools.layers.changes import Changes, Operation
from crow.tools.layers.place import Layer, Place, discard, new_id, ownerless, take_lock
from crow.tools.layers.states import (
    ABSENT,
    EXCHANGE,
    OPEN_DIRECTORY,
    UNSUPPORTED,
    Copier,
    State,
    apply_meta,
    proc_path,
    rename_new,
    renameat2,
    state_of,
    status_of,
    sync_file_system,
)

SetState: TypeAlias = Literal["prepared", "applying", "kept", "taken back"]
STATES: tuple[SetState, ...] = get_args(SetState)

VERSION = 1
IMAGE_BYTES = 256 * 1024 * 1024
"""If git ignores a removed or replaced directory and it is larger, nothing of it is kept for an undo."""
MAX_FLUSHED = 4
"""More files than these are written to the disk by one call for the whole file system."""
STAGING = ".crow-keep-"
"""The beginning of the name of the directory in a workspace's root that is there while files are moved."""


class Conflict(Exception):
    """Files have changed underneath, so nothing was changed. `paths` are absolute."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(f"changed meanwhile: {', '.join(paths)}")
        self.paths = tuple(paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSet:
    """A prepared change of the workspace, with everything that undoes it."""

    id: str
    directory: Path
    operations: tuple[Operation, ...]
    bases: Mapping[str, str]
    """For each root, the directory in its file system from which and into which files are moved."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the caller wants to find again, such as the session."""
    skipped: tuple[str, ...] = ()
    """Why some paths are left as they are: absolute paths, each with the reason."""

    @property
    def without_image(self) -> tuple[Operation, ...]:
        """The operations that no undo can take back."""
        return tuple(each for each in self.operations if not has_image(each))

    def image(self, number: int) -> Path:
        """Return where the file is that an operation has replaced."""
        return self.directory / "before" / str(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A change set whose process died while it moved files."""

    id: str
    about: Mapping[str, str]
    is_kept: bool
    """Whether all files were moved. If not, none are."""
    paths: tuple[str, ...]
    problem: str = ""
    """Why neither was possible."""


def prepare(place: Place, layer: Layer, changes: Changes, about: Mapping[str, str] | None = None) -> ChangeSet:
    """Write the change set of a layer to disk. Nothing is moved yet. :raises Conflict: somebody else has changed files
    that the layer has changed. :raises ValueError: there are too many changes. :raises OSError: it cannot be
    written."""
    if changes.problem:
        raise ValueError(changes.problem)
    if changes.conflicts:
        raise Conflict(changes.conflicts)
    with new_set(place, [str(overlay.root) for overlay in layer.overlays], about) as change_set:
        operations = []
        own = layer.directory.stat().st_dev
        elsewhere = {root for root, base in change_set.bases.items() if os.stat(base).st_dev != own}
        for number, operation in enumerate(changes.operations):
            if operation.source and (changes.is_live or operation.root in elsewhere):
                base, upper = change_set.bases[operation.root], operation.source.removesuffix(f"/{operation.path}")
                staged = stage(operation, base, number, (upper, operation.path))
                # a running program may have changed it since it was shown; the next look finds it
                if staged is not None and staged.after.matches(operation.after):
                    operations.append(staged)
            else:
                operations.append(operation)
        return write_manifest(change_set, operations)


def invert(place: Place, change_set: ChangeSet, about: Mapping[str, str] | None = None) -> ChangeSet:
    """Write to disk the change set that undoes another one. It leaves out what somebody else has changed since, and
    what cannot be undone: see `skipped`. :raises OSError: it cannot be written."""
    roots = list(dict.fromkeys(each.root for each in change_set.operations))
    with new_set(place, roots, about) as made, Parents() as parents:
        operations, skipped = [], []
        for number, done in enumerate(change_set.operations):
            operation = replace(done, before=done.after, after=done.before, source="", inode=0)
            problem = "" if done.is_meta else problem_of_undo(change_set, number, done, parents)
            if problem:
                skipped.append(f"{operation.name} {problem}")
                continue
            if not done.is_meta and done.before != ABSENT:
                image = intact_image(change_set, number, done)
                staged = None
                if image is not None:
                    base, source = made.bases[done.root], (str(image.parent), image.name)
                    staged = stage(operation, base, number, source, is_kept=True)
                if staged is None:
                    skipped.append(f"{operation.name} cannot be restored")
                    continue
                operation = replace(staged, after=done.before)
            operations.append(operation)
        return write_manifest(replace(made, skipped=tuple(skipped)), operations)


def problem_of_undo(change_set: ChangeSet, number: int, done: Operation, parents: Parents) -> str:
    """Return why an operation cannot be undone, as the rest of a sentence, or an empty string."""
    try:
        parent, name = parents.open(done.root, done.path)
        now = state_of(name, parent)
    except (FileNotFoundError, NotADirectoryError):
        return "was removed since, or its directory was"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not now.matches(done.after):
        return "was removed since" if now == ABSENT else "was changed by someone else since"
    if not has_image(done):
        return f"was too large to keep ({done.before.size // 1_000_000} MB)"
    if done.before != ABSENT and intact_image(change_set, number, done) is None:
        return "cannot be restored, because its old content is damaged"
    return ""


def intact_image(change_set: ChangeSet, number: int, done: Operation) -> Path | None:
    """Return where the file is that an operation replaced, if it is as it was."""
    image = change_set.image(number)
    for path in (image, image.with_suffix(".copy")):
        with directory_of(path) as parent:
            if state_of(path.name, parent).matches(done.before):
                return path
    return None


def has_image(operation: Operation) -> bool:
    """Return whether what an operation replaces or removes is kept for an undo."""
    return not (operation.is_ignored and operation.before.size > IMAGE_BYTES)


def stage(
    operation: Operation, base: str, number: int, source: tuple[str, str], *, is_kept: bool = False
) -> Operation | None:
    """Copy the new content of an operation to where it can be moved from. None if there is nothing to copy any more.

    `source` is a directory and a path below it, whose links are not followed: a program that still runs may put them
    there. `is_kept` means that the source is a file of another change set, which nobody changes.
    """
    folder, name = Path(base, "stage"), str(number)
    folder.mkdir(mode=0o700, exist_ok=True)
    with Parents() as parents, directory_of(folder / name) as target:
        try:
            parent, own = parents.open(*source)
            status = os.lstat(own, dir_fd=parent)
            is_linked = is_kept and stat.S_ISREG(status.st_mode) and status.st_nlink > 1
            if is_linked and status.st_dev == os.fstat(target).st_dev:
                # the file has another name in the workspace, so an undo makes both names one file again
                os.link(own, name, src_dir_fd=parent, dst_dir_fd=target, follow_symlinks=False)
            elif not Copier().copy(own, parent, name, target):
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return None
        state = state_of(name, target)
        inode = os.lstat(name, dir_fd=target).st_ino
    return replace(operation, after=state, source=str(folder / name), inode=inode)


@contextmanager
def new_set(place: Place, roots: Sequence[str], about: Mapping[str, str] | None) -> Iterator[ChangeSet]:
    """Make the directories of a change set. They are removed if the block fails."""
    identifier = new_id()
    directory = place.changes / identifier
    directory.mkdir(mode=0o700, parents=True)
    lock = take_lock(directory)
    bases: dict[str, str] = {}
    try:
        (directory / "before").mkdir()
        own = directory.stat().st_dev
        for root in roots:
            bases[root] = str(directory)
            if os.stat(root).st_dev != own:
                bases[root] = os.path.join(root, f"{STAGING}{identifier}")
                with same_time(root):
                    Path(bases[root], "before").mkdir(mode=0o700, parents=True)
        yield ChangeSet(id=identifier, directory=directory, operations=(), bases=bases, about=about or {})
    except BaseException:
        remove_bases(bases, directory)
        with suppress(OSError):
            discard(directory)
        raise
    finally:
        os.close(lock)


def write_manifest(made: ChangeSet, operations: Sequence[Operation]) -> ChangeSet:
    made = replace(made, operations=tuple(operations))
    data = {
        "version": VERSION,
        "about": dict(made.about),
        "bases": dict(made.bases),
        "skipped": made.skipped,
        "operations": [operation_data(each) for each in made.operations],
    }
    with open(made.directory / "manifest", "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(data, file)
    write_state(made.directory, "prepared")
    return made


def read_set(directory: Path) -> ChangeSet:
    """Read a change set. :raises ValueError: it is damaged. :raises OSError: it cannot be read."""
    data: Any = json.loads((directory / "manifest").read_text(encoding="utf-8", errors="surrogateescape"))
    try:
        operations = tuple(map(read_operation, data["operations"]))
        return ChangeSet(
            id=directory.name,
            directory=directory,
            operations=operations,
            bases=dict(data["bases"]),
            about=dict(data["about"]),
            skipped=tuple(data["skipped"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory}/manifest is damaged: {error!r}") from error


def operation_data(operation: Operation) -> list[Any]:
    """Return an operation for JSON. `asdict` would take longer than everything else together."""
    return [
        operation.root,
        operation.path,
        state_data(operation.before),
        state_data(operation.after),
        operation.source,
        operation.inode,
        operation.is_meta,
        operation.is_ignored,
    ]


def state_data(state: State) -> list[Any] | None:
    if state == ABSENT:
        return None
    own = (state.kind, state.mode, state.size, state.mtime_ns, state.uid, state.gid, state.target, state.tree)
    return [*own, state.files, state.xattrs]


def read_operation(data: list[Any]) -> Operation:
    root, path, before, after, source, inode, is_meta, is_ignored = data
    return Operation(
        root=root,
        path=path,
        before=read_state_of(before),
        after=read_state_of(after),
        source=source,
        inode=inode,
        is_meta=is_meta,
        is_ignored=is_ignored,
    )


def read_state_of(data: list[Any] | None) -> State:
    if data is None:
        return ABSENT
    kind, mode, size, mtime_ns, uid, gid, target, tree, files, xattrs = data
    return State(
        kind=kind,
        mode=mode,
        size=size,
        mtime_ns=mtime_ns,
        uid=uid,
        gid=gid,
        target=target,
        tree=tree,
        files=files,
        xattrs=tuple((name, value) for name, value in xattrs),
    )


def find_set(place: Place, identifier: str) -> ChangeSet | None:
    """Return a change set that was kept; None if it is not on this machine any more."""
    directory = place.changes / os.path.basename(identifier)
    try:
        return read_set(directory) if identifier and read_state(directory) == "kept" else None
    except (OSError, ValueError):
        return None


def write_state(directory: Path, state: SetState) -> None:
    """Record the state of a change set, which is the name of a file. The file system's journal keeps the order of
    changes of names, so this needs no flush of its own."""
    old = read_state(directory)
    if old:
        (directory / old).rename(directory / state)
    else:
        (directory / state).touch()


def read_state(directory: Path) -> SetState | Literal[""]:
    """Return the state of a change set; empty if its preparation was never finished."""
    return next((state for state in STATES if os.path.lexists(directory / state)), "")


def apply(change_set: ChangeSet, layer: Layer | None = None) -> None:
    """Move the files of a change set into the workspace. `layer` is given if its commands still run.

    :raises Conflict: a file has changed since. Nothing has changed then.
    :raises OSError: a file cannot be moved. Nothing has changed then.
    """
    with ownerless(change_set.directory):
        with Parents() as parents:
            conflicts = [each.name for each in change_set.operations if not is_as_expected(each, parents)]
        if conflicts:
            abandon(change_set)
            raise Conflict(conflicts)
        sync_sources(change_set)
        write_state(change_set.directory, "applying")
        if any(base != str(change_set.directory) for base in change_set.bases.values()):
            flush(change_set.directory)  # the workspace has a journal of its own
        try:
            move_all(change_set)
        except (Conflict, OSError):
            take_back(change_set)
            raise
        finish(change_set)
    if layer is not None:
        now = time.time_ns()
        layer.kept.update({each.name: now for each in change_set.operations if not each.is_meta})


def is_as_expected(operation: Operation, parents: Parents) -> bool:
    """Return whether nobody has changed the path of an operation since the change set was prepared."""
    if operation.is_meta:
        return True
    try:
        parent, name = parents.open(operation.root, operation.path)
        return state_of(name, parent).matches(operation.before)
    except (FileNotFoundError, NotADirectoryError):
        return False


def move_all(change_set: ChangeSet) -> None:
    """Do those operations that have not been done yet."""
    with Movers() as movers:
        for number, operation in enumerate(change_set.operations):
            if not operation.is_meta:
                move(movers.mover(change_set, number))
    apply_metas(change_set, is_back=False)
    sync_moves(change_set)


def finish(change_set: ChangeSet) -> None:
    """Copy what was replaced to where it stays, remove what is not needed, and record that the changes are kept."""
    for number, operation in enumerate(change_set.operations):
        if operation.is_meta or operation.before == ABSENT:
            continue
        image = Path(image_path(change_set, number, operation))
        if not has_image(operation):
            discard(image)
            continue
        final = change_set.image(number)
        is_shared = operation.before.kind == "file" and image.exists() and image.lstat().st_nlink > 1
        if image != final and os.path.lexists(image):
            place_copy(image, final)
        elif is_shared:  # somebody may write to the file under its other name
            place_copy(image, final.with_suffix(".copy"))
    remove_bases(change_set.bases, change_set.directory)
    write_state(change_set.directory, "kept")
    flush(change_set.directory)
    if (change_set.directory / "stage").is_dir():
        discard(change_set.directory / "stage")


def place_copy(source: Path, to: Path) -> None:
    """Copy a file or a tree to a place where there may be an unfinished copy."""
    new = to.with_name(f"{to.name}.new")
    if os.path.lexists(new):
        discard(new)
    if os.path.lexists(to):
        discard(to)
    with directory_of(source) as parent, directory_of(to) as target:
        Copier().copy(source.name, parent, new.name, target)
    new.rename(to)


def take_back(change_set: ChangeSet) -> None:
    """Undo those operations that have been done, newest first. :raises OSError: an operation cannot be undone."""
    with Movers() as movers:
        for number, operation in reversed([*enumerate(change_set.operations)]):
            if not operation.is_meta:
                move_back(movers.mover(change_set, number))
    apply_metas(change_set, is_back=True)
    sync_moves(change_set)
    abandon(change_set)


def abandon(change_set: ChangeSet) -> None:
    """Remove a change set from which nothing was moved."""
    write_state(change_set.directory, "taken back")
    remove_bases(change_set.bases, change_set.directory)
    discard(change_set.directory)


def remove_bases(bases: Mapping[str, str], directory: Path) -> None:
    """Remove the directories of a change set in workspaces."""
    for root, base in bases.items():
        if base != str(directory):
            with suppress(FileNotFoundError), same_time(root):
                discard(Path(base))


@contextmanager
def same_time(directory: str) -> Iterator[None]:
    """Give a directory the time afterwards that it had before."""
    status = os.stat(directory)
    yield
    os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))


def image_path(change_set: ChangeSet, number: int, operation: Operation) -> str:
    """Return where the file is moved that an operation replaces."""
    return f"{change_set.bases[operation.root]}/before/{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """One operation, with the open directories of the paths that it moves."""

    operation: Operation
    image: str
    """Where the replaced file is moved."""
    parent: int
    name: str
    """The path in the workspace: its open directory and its name in it."""
    source_parent: int = -1
    source_name: str = ""
    """Where the new file is."""

    def conflict(self) -> Conflict:
        """Return the error that says that somebody else has changed the path."""
        return Conflict([self.operation.name])

    def source_inode(self) -> int:
        """Return the number of the file that is where the new file was; 0 if there is none."""
        status = status_of(self.source_name, self.source_parent)
        return 0 if status is None else status.st_ino

    def has_image(self) -> bool:
        """Return whether the replaced file has been moved away."""
        return self.operation.before != ABSENT and os.path.lexists(self.image)

    def put(self) -> None:
        """Move the new file into the workspace. :raises Conflict: there is a file."""
        try:
            with movable(self.source_name, self.source_parent):
                rename_new(self.source_name, self.source_parent, self.name, self.parent)
        except FileExistsError:
            raise self.conflict() from None

    def take(self) -> None:
        """Move the new file out of the workspace again."""
        with movable(self.name, self.parent):
            rename_new(self.name, self.parent, self.source_name, self.source_parent)

    def exchange(self) -> None:
        """Let the file in the workspace and the new one change places, at one instant."""
        with movable(self.source_name, self.source_parent), movable(self.name, self.parent):
            renameat2(self.source_name, self.source_parent, self.name, self.parent, EXCHANGE)

    def save(self) -> None:
        """Move the replaced file away, after it was exchanged with the new one."""
        with movable(self.source_name, self.source_parent):
            rename_new(self.source_name, self.source_parent, self.image, -1)

    def remove(self) -> None:
        """Move the workspace's file away. :raises Conflict: it is not the expected one."""
        if not is_top_expected(self.operation.before, status_of(self.name, self.parent)):
            raise self.conflict()
        with movable(self.name, self.parent):
            rename_new(self.name, self.parent, self.image, -1)
        if not is_top_expected(self.operation.before, os.lstat(self.image)):
            self.put_back()
            raise self.conflict()

    def put_back(self) -> None:
        """Move the replaced file back into the workspace."""
        with movable(self.image, -1):
            rename_new(self.image, -1, self.name, self.parent)


class Movers:
    """Opens the directories that operations need."""

    def __init__(self) -> None:
        self._parents = Parents()
        self._sources = Parents()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._parents.close()
        self._sources.close()

    def mover(self, change_set: ChangeSet, number: int) -> Mover:
        """Return what moves the files of an operation. :raises OSError: one of its directories is gone."""
        operation = change_set.operations[number]
        parent, name = self._parents.open(operation.root, operation.path)
        image = image_path(change_set, number, operation)
        if not operation.source:
            return Mover(operation=operation, image=image, parent=parent, name=name)
        folder, _, own = operation.source.rpartition("/")
        source, own = self._sources.open(folder, own)
        return Mover(operation=operation, image=image, parent=parent, name=name, source_parent=source, source_name=own)


def move(mover: Mover) -> None:
    """Do one operation, as far as it has not been done.

    :raises Conflict: the path is not in the state that was expected.
    """
    operation = mover.operation
    if operation.after == ABSENT:
        if not mover.has_image():
            mover.remove()
        return
    inode = mover.source_inode()
    if not inode:
        return  # it has been moved into the workspace
    if inode != operation.inode:
        mover.save()  # it has been exchanged, so this is the replaced file
    elif operation.before == ABSENT or mover.has_image():
        mover.put()
    else:
        replace_file(mover)


def replace_file(mover: Mover) -> None:
    """Put the new file where the old one is."""
    if not is_top_expected(mover.operation.before, status_of(mover.name, mover.parent)):
        raise mover.conflict()
    try:
        mover.exchange()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        mover.remove()
        mover.put()
        return
    if not is_top_expected(mover.operation.before, status_of(mover.source_name, mover.source_parent)):
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


def is_top_expected(expected: State, status: os.stat_result | None) -> bool:
    """Return whether a path itself is as expected, without what is in a directory."""
    if status is None or expected == ABSENT:
        return (status is None) == (expected == ABSENT)
    if stat.S_IMODE(status.st_mode) != expected.mode:
        return False
    if expected.kind != "file":
        return stat.S_ISDIR(status.st_mode) == (expected.kind == "directory")
    return (status.st_size, status.st_mtime_ns) == (expected.size, expected.mtime_ns)


@contextmanager
def movable(name: str, parent: int) -> Iterator[None]:
    """Make a directory movable: its owner must be allowed to write to it. Its mode is the same afterwards."""
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


def apply_metas(change_set: ChangeSet, *, is_back: bool) -> None:
    """Give directories their modes and times, after everything in them has been moved. Inner directories come first in
    the operations, and the root last."""
    for operation in change_set.operations:
        state = operation.before if is_back else operation.after
        if state.kind != "directory":
            continue
        with suppress(FileNotFoundError, NotADirectoryError), Parents() as parents:
            parent, name = parents.open(operation.root, operation.path)
            handle = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
            try:
                if operation.is_meta:
                    apply_meta(handle, state)
                elif stat.S_IMODE(os.fstat(handle).st_mode) != state.mode:  # killed while it was made movable
                    os.fchmod(handle, state.mode)
            finally:
                os.close(handle)


class Parents:
    """Opens the directories of operations, without following links. The last one stays open."""

    def __init__(self) -> None:
        self._place: tuple[str, str] | None = None
        self._handle = -1
        self._mode = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def open(self, root: str, path: str) -> tuple[int, str]:
        """Return the open directory of a path below a root, and the path's name in it. The owner may change the
        directory until another one is opened, even if commands have made it read-only.

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
                if mode & 0o300 != 0o300 and status.st_uid == os.geteuid():
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


@contextmanager
def directory_of(path: Path) -> Iterator[int]:
    """Open the directory of one of crow's own files."""
    handle = os.open(path.parent, OPEN_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def sync_sources(change_set: ChangeSet) -> None:
    """Write the manifest and the new files to the disk."""
    sources = [each for each in change_set.operations if each.source]
    if len(sources) > MAX_FLUSHED or any(each.after.kind == "directory" for each in sources):
        sync(change_set)
        return
    try:
        flush(change_set.directory / "manifest")
        for each in sources:
            if each.after.kind == "file":
                flush(Path(each.source))
    except PermissionError:  # nobody may read the file
        sync(change_set)


def sync_moves(change_set: ChangeSet) -> None:
    """Write the changed directories to the disk."""
    changed = [each for each in change_set.operations if not each.is_meta]
    folders = {os.path.dirname(each.name) for each in changed}
    if len(folders) > MAX_FLUSHED:
        sync(change_set)
        return
    for folder in folders:
        with suppress(FileNotFoundError):
            flush(Path(folder))


def flush(path: Path) -> None:
    """Write one file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(change_set: ChangeSet) -> None:
    """Write all files of the change set's file systems to the disk."""
    devices: dict[int, str] = {}
    for place in (str(change_set.directory), *change_set.bases.values(), *change_set.bases):
        with suppress(FileNotFoundError):
            devices.setdefault(os.stat(place).st_dev, place)
    for place in devices.values():
        handle = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sync_file_system(handle)
        finally:
            os.close(handle)


def recover(place: Place) -> tuple[Recovered, ...]:
    """Complete the change sets whose process was killed while it moved files, or else take them back. Remove layers
    and change sets that nobody needs. Return the change sets that were completed or taken back."""
    found = []
    for directory in listed(place.layers):
        with ownerless(directory) as is_free:
            if is_free:
                with suppress(OSError):
                    discard(directory)
    for directory in listed(place.changes):
        state = read_state(directory)
        if state == "kept":
            continue
        with ownerless(directory) as is_free:
            if not is_free:
                continue
            if read_state(directory) == "applying":
                found.append(recover_set(directory))
            elif read_state(directory) != "kept":
                remove_unused(directory)
    return tuple(found)


def listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def remove_unused(directory: Path) -> None:
    """Remove a change set that was never applied, and its directories in workspaces."""
    with suppress(OSError, ValueError):
        remove_bases(read_set(directory).bases, directory)
    with suppress(OSError):
        discard(directory)


def recover_set(directory: Path) -> Recovered:
    change_set = read_set(directory)
    paths = tuple(each.name for each in change_set.operations if not each.is_meta)
    made = Recovered(id=change_set.id, about=change_set.about, is_kept=True, paths=paths)
    try:
        move_all(change_set)
        finish(change_set)
    except (Conflict, OSError) as error:
        try:
            take_back(change_set)
        except (Conflict, OSError) as worse:
            return replace(made, is_kept=False, problem=f"{error}; {worse}")
        return replace(made, is_kept=False)
    return made


def forget(place: Place, identifiers: Sequence[str]) -> None:
    """Remove change sets for good. They can no longer be undone."""
    for identifier in identifiers:
        with suppress(OSError):
            discard(place.changes / os.path.basename(identifier))


def is_full(error: OSError) -> bool:
    """Return whether an error says that there is no space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
