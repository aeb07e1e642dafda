"""Moves changes into the workspace, either all or none, and keeps the files that they replace.

A change set is a directory:

- `manifest` says what to move. It is written once, before anything moves.
- An empty file called `prepared`, `applying`, `kept` or `taken back` says how far the change set has got.
- `before` has the files that were replaced or removed. They are moved there rather than copied, if the file system can
  do that.
- `stage` has copies of the new files, if they cannot be moved from where they are.

A process may be killed at any instant. The files always show which steps were done, so `recover` in the next process
can complete the change set or take it back.

Files can only be moved within a file system. If the workspace and crow's data are on different ones, the new files are
first copied to a directory in the workspace's root, and moved from there. Replaced files are moved to that directory,
and copied to `before` at the end.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crow.tools.layers.changes import Changes, Operation
from crow.tools.layers.moves import Conflict, Movers, Parents, image_path, move, move_back
from crow.tools.layers.place import Kept, Layer, Place, discard
from crow.tools.layers.sets import (
    ChangeSet,
    directory_of,
    has_image,
    new_set,
    read_set,
    read_state,
    remove_bases,
    write_manifest,
    write_state,
)
from crow.tools.layers.states import (
    ABSENT,
    Copier,
    State,
    apply_meta,
    digest_of,
    mount_of,
    open_directory,
    state_of,
    status_of,
    sync_file_system,
)
from crow.tools.temporary import is_unfinished, ownerless

_KEPT_S = 7 * 86_400
_NOTED_S = 365 * 86_400
"""For this many seconds, crow remembers that a change set was taken back."""
_CLOCK_NS = 20_000_000
"""The times of files may be this many nanoseconds behind the clock."""
_MAX_FLUSHED = 4
"""If more files or directories than this must be flushed to the disk, one call flushes the whole file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A change set whose process died while it moved files."""

    id: str
    about: Mapping[str, str]
    is_kept: bool
    """Whether all files were moved. If not, and there is no `problem`, none are."""
    paths: tuple[str, ...]
    problem: str = ""
    """Why the change set could be neither completed nor taken back. Empty if one of these was possible."""


def prepare(place: Place, layer: Layer, changes: Changes, about: Mapping[str, str] | None = None) -> ChangeSet:
    """Write the change set of a layer to disk. Nothing is moved yet. :raises Conflict: somebody else has changed files
    that the layer has changed. :raises ValueError: the changes have a `problem`. :raises OSError: it cannot be
    written."""
    if changes.problem:
        raise ValueError(changes.problem)
    if changes.conflicts:
        raise Conflict(changes.conflicts)
    with new_set(place, [str(overlay.root) for overlay in layer.overlays], about) as change_set:
        operations = []
        own = mount_of(layer.directory)
        elsewhere = {root for root, base in change_set.bases.items() if mount_of(base) != own}
        for number, operation in enumerate(changes.operations):
            if operation.source and (changes.is_live or operation.root in elsewhere):
                base, upper = change_set.bases[operation.root], operation.source.removesuffix(f"/{operation.path}")
                staged = _stage(operation, base, number, (upper, operation.path))
                # a running program may have changed the file since `changes` was made; the next comparison finds it
                if staged is not None and staged.after.matches(operation.after):
                    operations.append(staged)
            else:
                operations.append(operation)
        return write_manifest(change_set, operations)


def invert(place: Place, change_set: ChangeSet, about: Mapping[str, str] | None = None) -> ChangeSet:
    """Write to disk the change set that undoes another one. Paths that somebody else has changed since, or that cannot
    be restored, are left out: see `skipped`. :raises OSError: it cannot be written."""
    roots = list(dict.fromkeys(each.root for each in change_set.operations))
    with new_set(place, roots, about) as made, Parents() as parents:
        operations, skipped = [], []
        for number, done in enumerate(change_set.operations):
            now = done.after if done.is_meta else _state_now(done, parents)
            problem = "" if done.is_meta else _problem_of_undo(change_set, number, done, now)
            if problem:
                skipped.append((done.name, problem))
                continue
            operation = replace(done, before=now, after=done.before, source="", inode=0)
            if not done.is_meta and done.before != ABSENT:
                image = _intact_image(change_set, number, done)
                staged = None
                if image is not None:
                    base, source = made.bases[done.root], (str(image.parent), image.name)
                    staged = _stage(operation, base, number, source, is_kept=True)
                if staged is None:
                    skipped.append((operation.name, "cannot be restored"))
                    continue
                operation = replace(staged, after=done.before)
            operations.append(operation)
        return write_manifest(replace(made, skipped=tuple(skipped)), operations)


def _state_now(done: Operation, parents: Parents) -> State:
    """Return the current state of an operation's path. If its other properties differ from those of the file that was
    kept, the state has a digest, which can still show that the content is the same."""
    try:
        parent, name = parents.open(done.root, done.path)
        now = state_of(name, parent)
        if now.kind == "file" and done.after.digest and not now.matches(done.after):
            now = replace(now, digest=digest_of(name, parent))
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError:
        return State(kind="other")
    return now


def _problem_of_undo(change_set: ChangeSet, number: int, done: Operation, now: State) -> str:
    """Return why an operation cannot be undone, as the rest of a sentence that begins with the path. Empty if it can be
    undone."""
    if not now.matches(done.after):
        return "was removed since" if now == ABSENT else "was changed by someone else since"
    if not has_image(done):
        return f"was too large to keep ({done.before.size // 1_000_000} MB)"
    if done.before != ABSENT and _intact_image(change_set, number, done) is None:
        is_there = os.path.lexists(change_set.image(number))
        return f"cannot be restored, because its old content {'is damaged' if is_there else 'was not kept'}"
    return ""


def _intact_image(change_set: ChangeSet, number: int, done: Operation) -> Path | None:
    """Return the path at which the file that an operation replaced is kept; None if it is gone or has changed."""
    image = change_set.image(number)
    for path in (image, image.with_suffix(".copy")):
        with directory_of(path) as parent:
            if state_of(path.name, parent).matches(done.before):
                return path
    return None


def _stage(
    operation: Operation, base: str, number: int, source: tuple[str, str], *, is_kept: bool = False
) -> Operation | None:
    """Copy the new content of an operation to the directory `stage` in `base`, from which it can be moved. Return the
    operation with the copy as its source; None if there is nothing to copy any more.

    `source` is a directory and a path below it. Links in this path are not followed, because a program that still runs
    may have put them there. With `is_kept`, the source is in another change set, where nobody changes it.
    """
    folder, name = Path(base, "stage"), str(number)
    folder.mkdir(mode=0o700, exist_ok=True)
    with Parents() as parents, directory_of(folder / name) as target:
        try:
            parent, own = parents.open(*source)
            status = os.lstat(own, dir_fd=parent)
            is_linked = is_kept and stat.S_ISREG(status.st_mode) and status.st_nlink > 1
            if is_linked and mount_of(source[0]) == mount_of(folder):
                # the file has a hard link in the workspace; if it is linked here, too, both are one file again after
                # the undo
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


def apply(change_set: ChangeSet, layer: Layer | None = None) -> None:
    """Move the files of a change set into the workspace. If commands still run in its layer, `layer` is that layer.

    :raises Conflict: somebody else has changed one of the files. The workspace stays as it was.
    :raises OSError: a file cannot be moved. Those that were moved before are moved back.
    """
    try:
        with Parents() as parents:
            conflicts = [each.name for each in change_set.operations if not _is_as_expected(each, parents)]
        if conflicts:
            _abandon(change_set)
            raise Conflict(conflicts)
        _sync_sources(change_set)
        write_state(change_set.directory, "applying")
        if any(base != str(change_set.directory) for base in change_set.bases.values()):
            # the workspace's file system has its own journal, so this state must be on the disk before files move
            _flush(change_set.directory)
        try:
            _keep_all(change_set)
        except (Conflict, OSError):
            _take_back(change_set)
            raise
        _clean_up(change_set)
    finally:
        os.close(change_set.lock)
    if layer is not None:
        begun, now = int(change_set.id.partition("-")[0]) - _CLOCK_NS, time.time_ns()
        for each in change_set.operations:
            if not each.is_meta:
                layer.kept[each.name] = Kept(copied_ns=begun, moved_ns=now, is_removed=each.after == ABSENT)


def _is_as_expected(operation: Operation, parents: Parents) -> bool:
    """Return whether nobody has changed the path of an operation since the change set was prepared."""
    if operation.is_meta:
        return True
    try:
        parent, name = parents.open(operation.root, operation.path)
        if operation.before.kind == "absent":
            return status_of(name, parent) is None
        return state_of(name, parent).matches(operation.before)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _keep_all(change_set: ChangeSet) -> None:
    """Do the operations that have not been done yet, copy replaced files that are not safe where they are, and record
    that the changes are kept."""
    with Movers() as movers:
        for number, operation in enumerate(change_set.operations):
            if not operation.is_meta:
                move(movers.mover(change_set, number))
    _apply_metas(change_set, is_back=False)
    _sync_moves(change_set)
    for number, operation in enumerate(change_set.operations):
        if operation.is_meta or operation.before.kind == "absent" or not has_image(operation):
            continue
        image, final = Path(image_path(change_set, number, operation)), change_set.image(number)
        is_shared = operation.before.kind == "file" and image.exists() and image.lstat().st_nlink > 1
        if image != final and os.path.lexists(image):
            _place_copy(image, final)
        elif is_shared:  # somebody may write to the file under its other name
            _place_copy(image, final.with_suffix(".copy"))
    write_state(change_set.directory, "kept")


def _clean_up(change_set: ChangeSet) -> None:
    """Remove what a kept change set does not need any more. If this fails or the process is killed, the file `bases`
    stays there. It tells the next process to clean up."""
    with suppress(OSError):
        _flush(change_set.directory)
        for number, operation in enumerate(change_set.operations):
            if not has_image(operation):
                discard(Path(image_path(change_set, number, operation)))
        remove_bases(change_set.bases, change_set.directory)
        if (change_set.directory / "stage").is_dir():
            discard(change_set.directory / "stage")
        (change_set.directory / "bases").unlink(missing_ok=True)


def _place_copy(source: Path, to: Path) -> None:
    """Copy a file or a tree to the path `to`. A copy that was left there before is replaced."""
    new = to.with_name(f"{to.name}.new")
    if os.path.lexists(new):
        discard(new)
    if os.path.lexists(to):
        discard(to)
    with directory_of(source) as parent, directory_of(to) as target:
        Copier().copy(source.name, parent, new.name, target)
    new.rename(to)


def _take_back(change_set: ChangeSet) -> None:
    """Undo the operations that have been done, the last one first. :raises OSError: an operation cannot be undone."""
    with Movers() as movers:
        for number, operation in reversed([*enumerate(change_set.operations)]):
            if not operation.is_meta:
                move_back(movers.mover(change_set, number))
    _apply_metas(change_set, is_back=True)
    _sync_moves(change_set)
    _abandon(change_set)


def _abandon(change_set: ChangeSet) -> None:
    """Remove a change set that has moved nothing, or has moved everything back."""
    remove_bases(change_set.bases, change_set.directory)
    empty(change_set.directory)


def empty(directory: Path) -> None:
    """Remove everything in a change set but the note that it was taken back. The note is needed because the log may
    name the change set already."""
    write_state(directory, "taken back")
    for path in directory.iterdir():
        if path.name != "taken back":
            discard(path)


def _apply_metas(change_set: ChangeSet, *, is_back: bool) -> None:
    """Give directories their modes and times, after everything in them has been moved. Inner directories come first in
    the operations, and the root last."""
    for operation in change_set.operations:
        state = operation.before if is_back else operation.after
        if state.kind != "directory":
            continue
        with suppress(FileNotFoundError, NotADirectoryError), Parents() as parents:
            parent, name = parents.open(operation.root, operation.path)
            handle = open_directory(name, parent)
            try:
                if operation.is_meta:
                    apply_meta(handle, state)
                elif stat.S_IMODE(os.fstat(handle).st_mode) != state.mode:  # made writable to be moved, before a kill
                    os.fchmod(handle, state.mode)
            finally:
                os.close(handle)


def _sync_sources(change_set: ChangeSet) -> None:
    """Write the manifest and the new files to the disk."""
    sources = [each for each in change_set.operations if each.source]
    if len(sources) > _MAX_FLUSHED or any(each.after.kind == "directory" for each in sources):
        _sync(change_set)
        return
    try:
        _flush(change_set.directory / "manifest")
        for each in sources:
            if each.after.kind == "file":
                _flush(Path(each.source))
    except PermissionError:  # nobody may read the file
        _sync(change_set)


def _sync_moves(change_set: ChangeSet) -> None:
    """Write the changed directories to the disk."""
    changed = [each for each in change_set.operations if not each.is_meta]
    folders = {os.path.dirname(each.name) for each in changed}
    if len(folders) > _MAX_FLUSHED:
        _sync(change_set)
        return
    for folder in folders:
        with suppress(FileNotFoundError):
            _flush(Path(folder))


def _flush(path: Path) -> None:
    """Write one file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(change_set: ChangeSet) -> None:
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
    """Complete the change sets whose process was killed while it moved files, or else take them back. Remove layers and
    change sets that nobody needs. Return the change sets that were completed, were taken back, or have a `problem`."""
    found = []
    needed: list[str] = []
    for directory in _listed(place.changes):
        state, is_clean = read_state(directory), not (directory / "bases").exists()
        if (state == "kept" and is_clean) or (state == "taken back" and _is_young(directory)):
            continue
        with ownerless(directory) as is_free:
            if not is_free:
                continue
            if read_state(directory) == "applying":
                try:
                    change_set = read_set(directory)
                except (OSError, ValueError) as error:
                    paths, problem = (str(directory),), str(error)
                    found.append(Recovered(id=directory.name, about={}, is_kept=False, paths=paths, problem=problem))
                    continue
                found.append(_recover_set(change_set))
                if found[-1].problem:
                    needed += [each.source for each in change_set.operations]
            elif read_state(directory) == "taken back":
                with suppress(OSError):  # the next process tries again
                    discard(directory)
            elif read_state(directory) == "kept":
                with suppress(OSError, ValueError):
                    _clean_up(read_set(directory))
            else:
                _remove_unused(directory)
    # these come last, because the new files of the change sets may still have been in them
    for directory in (*_listed(place.layers), *_listed(place.snapshots)):
        with ownerless(directory) as is_free:
            if is_free and not any(source.startswith(f"{directory}{os.sep}") for source in needed):
                with suppress(OSError):
                    discard(directory)
    return tuple(found)


def _listed(folder: Path) -> list[Path]:
    """Return the directories in a folder, oldest first, without those that a process is making or removing now."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not is_unfinished(path))
    except OSError:
        return []


def _is_young(directory: Path) -> bool:
    """Return whether to leave a change set that was taken back as it is: the note is all that it has, and may still be
    needed."""
    with suppress(OSError):
        return os.listdir(directory) == ["taken back"] and directory.stat().st_mtime > time.time() - _NOTED_S
    return False


def _remove_unused(directory: Path) -> None:
    """Remove a change set that was never applied, and its directories in workspaces."""
    with suppress(OSError, ValueError):
        bases: dict[str, str] = json.loads((directory / "bases").read_text(encoding="utf-8", errors="surrogateescape"))
        remove_bases(bases, directory)
    with suppress(OSError):
        if (directory / "manifest").exists():
            empty(directory)
        else:
            discard(directory)


def _recover_set(change_set: ChangeSet) -> Recovered:
    paths = tuple(each.name for each in change_set.operations if not each.is_meta)
    made = Recovered(id=change_set.id, about=change_set.about, is_kept=True, paths=paths)
    try:
        _keep_all(change_set)
    except (Conflict, OSError) as error:
        try:
            _take_back(change_set)
        except (Conflict, OSError) as worse:
            return replace(made, is_kept=False, problem=f"{error}; {worse}")
        return replace(made, is_kept=False)
    _clean_up(change_set)
    return made


def forget(place: Place, identifiers: Sequence[str]) -> None:
    """Remove change sets for good. They can no longer be undone."""
    for identifier in identifiers:
        with suppress(OSError):
            discard(place.changes / os.path.basename(identifier))


def old_sets(place: Place) -> tuple[ChangeSet, ...]:
    """Return the change sets that were kept more than a week ago."""
    found = []
    for directory in _listed(place.changes):
        with suppress(OSError, ValueError):
            if (directory / "kept").stat().st_mtime < time.time() - _KEPT_S:
                found.append(read_set(directory))
    return tuple(found)
