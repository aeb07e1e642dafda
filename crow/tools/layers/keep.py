"""Moves changes into the workspace so that all of them arrive or none, and keeps what was there before.

A change set is a directory:

- `manifest` says what to move. It is written once, before anything moves.
- `state` is `prepared`, `applying`, `kept` or `taken back`.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from crow.tools.layers.look import Changes, Operation
from crow.tools.layers.place import Layer, Place, discard, new_id, ownerless, take_lock
from crow.tools.layers.states import (
    ABSENT,
    EXCHANGE,
    OPEN_DIRECTORY,
    UNSUPPORTED,
    Copier,
    State,
    apply_meta,
    changeable,
    proc_path,
    rename_new,
    renameat2,
    state_of,
    status_of,
    sync_file_system,
)

SetState: TypeAlias = Literal["prepared", "applying", "kept", "taken back"]

VERSION = 1
IMAGE_BYTES = 256 * 1024 * 1024
"""If git ignores a removed or replaced directory and it is larger, nothing of it is kept for an undo."""
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
    that the layer has changed. :raises OSError: it cannot be written."""
    if changes.conflicts:
        raise Conflict(changes.conflicts)
    with new_set(place, [str(overlay.root) for overlay in layer.overlays], about) as change_set:
        operations = []
        for number, operation in enumerate(changes.operations):
            base = change_set.bases[operation.root]
            is_elsewhere = os.stat(base).st_dev != layer.directory.stat().st_dev
            if operation.source and (changes.is_live or is_elsewhere):
                staged = stage(operation, base, number, Path(operation.source))
                if staged is None:
                    continue
                operations.append(staged)
            else:
                operations.append(operation)
        return write_manifest(change_set, operations)


def invert(place: Place, change_set: ChangeSet, about: Mapping[str, str] | None = None) -> ChangeSet:
    """Write to disk the change set that undoes another one. It leaves out what somebody else has changed since, and
    what cannot be undone: see `skipped`. :raises OSError: it cannot be written."""
    roots = list(dict.fromkeys(each.root for each in change_set.operations))
    with new_set(place, roots, about) as made:
        operations, skipped = [], []
        for number, done in enumerate(change_set.operations):
            operation = replace(done, before=done.after, after=done.before, source="", inode=0)
            problem = "" if done.is_meta else problem_of_undo(change_set, number, done)
            if problem:
                skipped.append(f"{operation.name} {problem}")
                continue
            if not done.is_meta and done.before != ABSENT:
                image = intact_image(change_set, number, done)
                staged = None if image is None else stage(operation, made.bases[done.root], number, image, is_kept=True)
                if staged is None:
                    skipped.append(f"{operation.name} cannot be restored")
                    continue
                operation = replace(staged, after=done.before)
            operations.append(operation)
        return write_manifest(replace(made, skipped=tuple(skipped)), operations)


def problem_of_undo(change_set: ChangeSet, number: int, done: Operation) -> str:
    """Return why an operation cannot be undone, as the rest of a sentence, or an empty string."""
    try:
        with parent_of(done) as (parent, name):
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


def stage(operation: Operation, base: str, number: int, source: Path, *, is_kept: bool = False) -> Operation | None:
    """Copy the new content of an operation to where it can be moved from. None if there is nothing to copy any more.
    `is_kept` means that the source is a file of another change set, which nobody changes."""
    folder = Path(base, "stage")
    folder.mkdir(mode=0o700, exist_ok=True)
    with directory_of(source) as parent, directory_of(folder / "new") as target:
        try:
            status = os.lstat(source.name, dir_fd=parent)
            is_linked = is_kept and stat.S_ISREG(status.st_mode) and status.st_nlink > 1
            if is_linked and status.st_dev == os.fstat(target).st_dev:
                # the file has another name in the workspace, so an undo makes both names one file again
                os.link(source.name, str(number), src_dir_fd=parent, dst_dir_fd=target, follow_symlinks=False)
            elif not Copier().copy(source.name, parent, str(number), target):
                return None
        except FileNotFoundError:
            return None
        state = state_of(str(number), target)
        inode = os.lstat(str(number), dir_fd=target).st_ino
    return replace(operation, after=state, source=str(folder / str(number)), inode=inode)


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
                Path(bases[root], "before").mkdir(mode=0o700, parents=True)
        yield ChangeSet(id=identifier, directory=directory, operations=(), bases=bases, about=about or {})
    except BaseException:
        for base in {*bases.values(), str(directory)}:
            with suppress(OSError):
                discard(Path(base))
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
        "operations": [asdict(each) for each in made.operations],
    }
    with open(made.directory / "manifest", "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
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


def read_operation(data: dict[str, Any]) -> Operation:
    before, after = (read_state_of(data[name]) for name in ("before", "after"))
    return Operation(**{**data, "before": before, "after": after})


def read_state_of(data: dict[str, Any]) -> State:
    return State(**{**data, "xattrs": tuple((name, value) for name, value in data["xattrs"])})


def find_set(place: Place, identifier: str) -> ChangeSet | None:
    """Return a change set that was kept; None if it is not on this machine any more."""
    directory = place.changes / os.path.basename(identifier)
    try:
        return read_set(directory) if identifier and read_state(directory) == "kept" else None
    except (OSError, ValueError):
        return None


def write_state(directory: Path, state: SetState) -> None:
    """Record the state of a change set, durably."""
    new = directory / "state.new"
    with new.open("w") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())
    new.rename(directory / "state")
    handle = os.open(directory, OPEN_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_state(directory: Path) -> str:
    """Return the state of a change set; empty if its preparation was never finished."""
    try:
        return (directory / "state").read_text()
    except FileNotFoundError:
        return ""


def apply(change_set: ChangeSet, layer: Layer | None = None) -> None:
    """Move the files of a change set into the workspace. `layer` is given if its commands still run.

    :raises Conflict: a file has changed since. Nothing has changed then.
    :raises OSError: a file cannot be moved. Nothing has changed then.
    """
    with ownerless(change_set.directory):
        conflicts = [each.name for each in change_set.operations if not is_as_expected(each)]
        if conflicts:
            abandon(change_set)
            raise Conflict(conflicts)
        sync(change_set)
        write_state(change_set.directory, "applying")
        try:
            move_all(change_set)
        except (Conflict, OSError):
            take_back(change_set)
            raise
        finish(change_set)
    if layer is not None:
        now = os.stat(change_set.directory / "state").st_ctime_ns
        layer.kept.update({each.name: now for each in change_set.operations if not each.is_meta})


def is_as_expected(operation: Operation) -> bool:
    """Return whether nobody has changed the path of an operation since the change set was prepared."""
    if operation.is_meta:
        return True
    try:
        with parent_of(operation) as (parent, name):
            return state_of(name, parent).matches(operation.before)
    except (FileNotFoundError, NotADirectoryError):
        return False


def move_all(change_set: ChangeSet, fault: Callable[[int], None] | None = None) -> None:
    """Do those operations that have not been done yet. `fault` is called before each, for tests."""
    for number, operation in enumerate(change_set.operations):
        if fault is not None:
            fault(number)
        if not operation.is_meta:
            with parent_of(operation) as (parent, name):
                move(operation, Mover(change_set, number), parent, name)
    apply_metas(change_set, is_back=False)
    sync(change_set)


def finish(change_set: ChangeSet) -> None:
    """Copy what was replaced to where it stays, remove what is not needed, and record that the changes are kept."""
    for number, operation in enumerate(change_set.operations):
        if operation.is_meta or operation.before == ABSENT:
            continue
        image = Mover(change_set, number).image
        if not has_image(operation):
            discard(image)
            continue
        final = change_set.image(number)
        is_shared = operation.before.kind == "file" and image.exists() and image.lstat().st_nlink > 1
        if image != final and os.path.lexists(image):
            place_copy(image, final)
        elif is_shared:  # somebody may write to the file under its other name
            place_copy(image, final.with_suffix(".copy"))
    for base in set(change_set.bases.values()):
        if base != str(change_set.directory):
            discard(Path(base))
    write_state(change_set.directory, "kept")
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
    for number, operation in reversed([*enumerate(change_set.operations)]):
        if not operation.is_meta:
            with parent_of(operation) as (parent, name):
                move_back(operation, Mover(change_set, number), parent, name)
    apply_metas(change_set, is_back=True)
    sync(change_set)
    abandon(change_set)


def abandon(change_set: ChangeSet) -> None:
    """Remove a change set from which nothing was moved."""
    write_state(change_set.directory, "taken back")
    for base in {*change_set.bases.values(), str(change_set.directory)}:
        with suppress(FileNotFoundError):
            discard(Path(base))


@dataclass(frozen=True, slots=True)
class Mover:
    """The places outside the workspace that belong to one operation."""

    change_set: ChangeSet
    number: int

    @property
    def image(self) -> Path:
        """Where the replaced file is moved."""
        return Path(self.change_set.bases[self.change_set.operations[self.number].root], "before", str(self.number))


def move(operation: Operation, mover: Mover, parent: int, name: str) -> None:
    """Do one operation, as far as it has not been done. `name` is the path's name in the open directory `parent`.

    :raises Conflict: the path is not in the state that was expected.
    """
    image = str(mover.image)
    if operation.after == ABSENT:
        if not os.path.lexists(image):
            move_away(operation, image, parent, name)
        return
    try:
        status = os.lstat(operation.source)
    except FileNotFoundError:
        return  # it has been moved into the workspace
    if status.st_ino != operation.inode:  # it has been exchanged, so this is the replaced file
        move_tree(operation.source, -1, image, -1)
    elif operation.before == ABSENT or os.path.lexists(image):
        try:
            rename_tree(operation.source, parent, name)
        except FileExistsError:
            raise Conflict([operation.name]) from None
    else:
        exchange(operation, image, parent, name)


def move_away(operation: Operation, image: str, parent: int, name: str) -> None:
    if not is_top_expected(operation.before, status_of(name, parent)):
        raise Conflict([operation.name])
    move_tree(name, parent, image, -1)
    if not is_top_expected(operation.before, os.lstat(image)):
        rename_tree(image, parent, name)
        raise Conflict([operation.name])


def exchange(operation: Operation, image: str, parent: int, name: str) -> None:
    """Put the new file where the old one is, at one instant if the kernel can."""
    if not is_top_expected(operation.before, status_of(name, parent)):
        raise Conflict([operation.name])
    try:
        with movable(operation.source, -1), movable(name, parent):
            renameat2(operation.source, -1, name, parent, EXCHANGE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        move_away(operation, image, parent, name)
        try:
            rename_tree(operation.source, parent, name)
        except FileExistsError:
            raise Conflict([operation.name]) from None
        return
    if not is_top_expected(operation.before, os.lstat(operation.source)):
        with movable(operation.source, -1), movable(name, parent):
            renameat2(operation.source, -1, name, parent, EXCHANGE)
        raise Conflict([operation.name])
    move_tree(operation.source, -1, image, -1)


def move_back(operation: Operation, mover: Mover, parent: int, name: str) -> None:
    """Undo one operation, as far as it has been done."""
    image = str(mover.image)
    has_old = os.path.lexists(image)
    if operation.after == ABSENT:
        if has_old:
            rename_tree(image, parent, name)
        return
    try:
        is_new_here = os.lstat(operation.source).st_ino == operation.inode
    except FileNotFoundError:
        move_tree(name, parent, operation.source, -1)
        is_new_here = True
    if not is_new_here:  # it has been exchanged
        with movable(operation.source, -1), movable(name, parent):
            renameat2(operation.source, -1, name, parent, EXCHANGE)
    elif has_old:
        rename_tree(image, parent, name)


def is_top_expected(expected: State, status: os.stat_result | None) -> bool:
    """Return whether a path itself is as expected, without what is in a directory."""
    if status is None or expected == ABSENT:
        return (status is None) == (expected == ABSENT)
    if stat.S_IMODE(status.st_mode) != expected.mode:
        return False
    if expected.kind != "file":
        return stat.S_ISDIR(status.st_mode) == (expected.kind == "directory")
    return (status.st_size, status.st_mtime_ns) == (expected.size, expected.mtime_ns)


def rename_tree(source: str, parent: int, name: str) -> None:
    """Move a file or a directory to a name where there is none."""
    with movable(source, -1):
        rename_new(source, -1, name, parent)


def move_tree(name: str, source: int, to: str, target: int) -> None:
    with movable(name, source):
        rename_new(name, source, to, target)


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
        with suppress(FileNotFoundError, NotADirectoryError), parent_of(operation) as (parent, name):
            handle = os.open(name, OPEN_DIRECTORY, dir_fd=parent)
            try:
                if operation.is_meta:
                    apply_meta(handle, state)
                elif stat.S_IMODE(os.fstat(handle).st_mode) != state.mode:  # killed while it was made movable
                    os.fchmod(handle, state.mode)
            finally:
                os.close(handle)


@contextmanager
def parent_of(operation: Operation) -> Iterator[tuple[int, str]]:
    """Open the directory of an operation's path without following links. Yield it with the path's name."""
    *folders, name = operation.path.split("/") if operation.path else ["."]
    handle = os.open(operation.root, OPEN_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, OPEN_DIRECTORY, dir_fd=handle)
            os.close(handle)
            handle = inner
        with changeable(handle):
            yield handle, name
    finally:
        os.close(handle)


@contextmanager
def directory_of(path: Path) -> Iterator[int]:
    """Open the directory of one of crow's own files."""
    handle = os.open(path.parent, OPEN_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def sync(change_set: ChangeSet) -> None:
    """Write all files of the change set's file systems to the disk."""
    devices: dict[int, str] = {}
    for path in (str(change_set.directory), *change_set.bases.values(), *change_set.bases):
        with suppress(FileNotFoundError):
            devices.setdefault(os.stat(path).st_dev, path)
    for path in devices.values():
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        for base in read_set(directory).bases.values():
            with suppress(OSError):
                discard(Path(base))
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
