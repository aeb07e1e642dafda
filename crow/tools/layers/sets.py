"""Change sets on disk: what to move into the workspace, and how much of that is done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from crow.tools.layers.changes import Operation
from crow.tools.layers.place import Place, discard, new_directory
from crow.tools.layers.states import ABSENT, OPEN_DIRECTORY, State, digest_of, mount_of

SetState: TypeAlias = Literal["prepared", "applying", "kept", "taken back"]
_STATES: tuple[SetState, ...] = get_args(SetState)

_VERSION = 1
IMAGE_BYTES = 256 * 1024 * 1024
"""If git ignores a removed or replaced path, and it has more bytes than this on the disk, no undo can restore it."""
_MAX_DIGESTS = 200
_DIGEST_BYTES = 1_000_000
_STAGING = ".crow-keep-"
"""The beginning of the name of the directory that crow makes in a workspace's root while it moves files there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSet:
    """A change of the workspace that was at least prepared, with everything that is needed to undo it."""

    id: str
    directory: Path
    operations: tuple[Operation, ...]
    bases: Mapping[str, str]
    """For each root, a directory in the root's file system. New files are moved from there into the root, and replaced
    files from the root to there."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the caller wants to find again, such as the id of the call."""
    lock: int = field(default=-1, compare=False)
    """An open file. Its lock says that a living process is about to apply the change set."""
    skipped: tuple[tuple[str, str], ...] = ()
    """The absolute paths that an undo leaves as they are, each with the reason, as the rest of a sentence. Only set by
    :func:`crow.tools.layers.invert`: `read_set` does not restore it."""

    @property
    def without_image(self) -> tuple[Operation, ...]:
        """The operations that no undo can take back."""
        return tuple(each for each in self.operations if not has_image(each))

    def image(self, number: int) -> Path:
        """Return the path at which the file that an operation replaces is kept."""
        return self.directory / "before" / str(number)


def has_image(operation: Operation) -> bool:
    """Return whether the file or directory that an operation replaces or removes is kept for an undo."""
    return not (operation.is_ignored and operation.before.size > IMAGE_BYTES)


@contextmanager
def new_set(place: Place, roots: Sequence[str], about: Mapping[str, str] | None) -> Iterator[ChangeSet]:
    """Make the directories of a change set. They are removed if the block fails."""
    directory, lock = new_directory(place.changes)
    bases: dict[str, str] = {}
    try:
        (directory / "before").mkdir()
        own = mount_of(directory)
        for root in roots:
            is_here = mount_of(root) == own
            bases[root] = str(directory) if is_here else os.path.join(root, f"{_STAGING}{directory.name}")
        # written before the directories in the roots are made, so that they are found after a kill
        (directory / "bases").write_text(json.dumps(bases), encoding="utf-8", errors="surrogateescape")
        for root, base in bases.items():
            if base != str(directory):
                with _same_time(root):
                    Path(base, "before").mkdir(mode=0o700, parents=True)
        yield ChangeSet(
            id=directory.name, directory=directory, operations=(), bases=bases, about=about or {}, lock=lock
        )
    except BaseException:
        remove_bases(bases, directory)
        with suppress(OSError):
            discard(directory)
        os.close(lock)
        raise


def write_manifest(made: ChangeSet, operations: Sequence[Operation]) -> ChangeSet:
    made = replace(made, operations=_with_digests(operations))
    data = {
        "version": _VERSION,
        "about": dict(made.about),
        "bases": dict(made.bases),
        "skipped": [" ".join(skipped) for skipped in made.skipped],  # for people who look into the file
        "operations": [_operation_data(each) for each in made.operations],
    }
    with open(made.directory / "manifest", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(json.dumps(data))  # `json.dump` takes ten times as long
    write_state(made.directory, "prepared")
    return made


def _with_digests(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operations with digests of short new files, unless there are many. A digest shows that a file is
    unchanged even if a tool has written the same content again."""
    chosen = [each for each in operations if each.after.kind == "file" and each.after.size <= _DIGEST_BYTES]
    if len(chosen) > _MAX_DIGESTS:
        return tuple(operations)
    made = []
    for each in operations:
        if each.after.kind == "file" and each.after.size <= _DIGEST_BYTES and each.source:
            with suppress(OSError), directory_of(Path(each.source)) as parent:
                digest = digest_of(os.path.basename(each.source), parent)
                made.append(replace(each, after=replace(each.after, digest=digest)))
                continue
        made.append(each)
    return tuple(made)


@contextmanager
def directory_of(path: Path) -> Iterator[int]:
    """Open the directory of one of crow's own files."""
    handle = os.open(path.parent, OPEN_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def read_set(directory: Path) -> ChangeSet:
    """Read a change set. :raises ValueError: it is damaged. :raises OSError: it cannot be read."""
    data: Any = json.loads((directory / "manifest").read_text(encoding="utf-8", errors="surrogateescape"))
    try:
        operations = tuple(map(_read_operation, data["operations"]))
        return ChangeSet(
            id=directory.name,
            directory=directory,
            operations=operations,
            bases=dict(data["bases"]),
            about=dict(data["about"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory}/manifest is damaged: {error!r}") from error


def _operation_data(operation: Operation) -> list[Any]:
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
    if state.kind == "absent":
        return None
    own = (state.kind, state.mode, state.size, state.mtime_ns, state.uid, state.gid, state.target, state.tree)
    return [*own, state.files, state.xattrs, state.digest]


def _read_operation(data: list[Any]) -> Operation:
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
    kind, mode, size, mtime_ns, uid, gid, target, tree, files, xattrs, digest = data
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
        digest=digest,
    )


def find_set(place: Place, identifier: str) -> ChangeSet | None:
    """Return a change set by its id; None if it was not kept, or is no longer on this machine. If it was taken back, it
    has no operations, so there is nothing to undo."""
    directory = place.changes / os.path.basename(identifier)
    try:
        match read_state(directory) if identifier else "":
            case "kept":
                return read_set(directory)
            case "taken back":
                return ChangeSet(id=directory.name, directory=directory, operations=(), bases={})
            case _:
                return None
    except (OSError, ValueError):
        return None


def write_state(directory: Path, state: SetState) -> None:
    """Record the state of a change set as the name of a file. No flush is needed, because the file system's journal
    keeps renames in order."""
    old = read_state(directory)
    if old:
        (directory / old).rename(directory / state)
    else:
        (directory / state).touch()


def read_state(directory: Path) -> SetState | Literal[""]:
    """Return the state of a change set; empty if its preparation was never finished."""
    return next((state for state in _STATES if os.path.lexists(directory / state)), "")


def remove_bases(bases: Mapping[str, str], directory: Path) -> None:
    """Remove the directories that a change set has made in workspaces."""
    for root, base in bases.items():
        if base != str(directory):
            with suppress(FileNotFoundError), _same_time(root):
                discard(Path(base))


@contextmanager
def _same_time(directory: str) -> Iterator[None]:
    """Set the times of a directory back after the block, so that the change in it leaves no trace there."""
    status = os.stat(directory)
    yield
    os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))
