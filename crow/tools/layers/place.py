"""The directories of layers and change sets on disk."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from crow.tools.layers.states import OPEN_DIRECTORY, State, has_xattr, is_whiteout, meta_of, xattrs_of
from crow.tools.temporary import make_owned
from crow.tools.trees import remove_tree

_UNUSABLE = frozenset(",:\\")
"""Characters with a meaning in the options of a mount."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """One tree of the workspace, and the directories of the layer over it."""

    root: Path
    upper: Path
    """Holds what commands have written."""
    work: Path
    """For the kernel's own use. `Layer.renew` makes it."""
    made: State | None = None
    """The mode and attributes that the directory `upper` had when crow made it: they show whether a command changed
    them. None if they were not recorded, as for the layers of subagents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How a path was kept while commands in its layer still ran. Times are in ns since the epoch."""

    copied_ns: int
    """When the copy of the layer's version began."""
    moved_ns: int
    """When this version was in the workspace."""
    is_removed: bool
    """The path was removed from the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """A layer over the trees of a workspace. `drop` must be called at the end."""

    id: str
    directory: Path
    overlays: tuple[Overlay, ...]
    since_ns: int
    """When the layer was opened, in ns since the epoch. A file that was changed in the layer, and later than this in
    the workspace, is a conflict."""
    lock: int
    """An open file. Its lock says that a living process owns the layer."""
    kept: dict[str, Kept] = field(default_factory=dict)
    """How crow has kept changed paths while commands in the layer still ran, by absolute path."""

    def unchanged_since(self, path: str) -> int:
        """Return when the layer was opened, or when crow last moved an absolute path into the workspace if that was
        later, in ns since the epoch. If the workspace's file has changed after this time, somebody else has changed
        it."""
        return max([self.since_ns, *(kept.moved_ns for kept in self._kept_around(path))])

    def copied_since(self, path: str) -> int:
        """Return when crow last began to copy an absolute path from the layer to keep it, in ns since the epoch; 0 if
        it never did."""
        return max((kept.copied_ns for kept in self._kept_around(path)), default=0)

    def _kept_around(self, path: str) -> Iterator[Kept]:
        """Yield how a path and the directories around it were kept, if they were."""
        while path not in ("", os.sep) and self.kept:
            if path in self.kept:
                yield self.kept[path]
            path = os.path.dirname(path)

    def renew(self) -> tuple[Overlay, ...]:
        """Return the overlays with new work directories, because each mount needs one of its own."""
        number, overlays = secrets.token_hex(4), []
        for overlay in self.overlays:
            work = overlay.work.with_name(f"{overlay.work.name}-{number}")
            work.mkdir()
            overlays.append(replace(overlay, work=work))
        return tuple(overlays)

    def locate(self, path: Path) -> Path | None:
        """Return where the content of an absolute path is: in the layer, or in the workspace below it. None if the
        layer has deleted it. Links are not followed: the caller must have resolved those in the path of the root."""
        for overlay in self.overlays:
            if path != overlay.root and path.is_relative_to(overlay.root):
                return _locate_in(overlay, path.relative_to(overlay.root).parts)
        return path

    def drop(self) -> None:
        """Remove the layer with everything in it. Processes that use it must have ended."""
        with suppress(OSError):
            discard(self.directory)
        with suppress(OSError):
            os.close(self.lock)


@contextmanager
def opened_pair(overlay: Overlay) -> Iterator[tuple[int, int]]:
    """Open the layer's directory of an overlay, and the tree of the workspace below it."""
    above = os.open(overlay.upper, OPEN_DIRECTORY)
    try:
        below = os.open(overlay.root, OPEN_DIRECTORY)
        try:
            yield above, below
        finally:
            os.close(below)
    finally:
        os.close(above)


def _locate_in(overlay: Overlay, parts: Sequence[str]) -> Path | None:
    above, below = overlay.upper, overlay.root
    has_below = True
    for number, part in enumerate(parts, 1):
        above, below = above / part, below / part
        try:
            status = above.lstat()
        except (FileNotFoundError, NotADirectoryError):
            below = below.joinpath(*parts[number:])
            return below if has_below and os.path.lexists(below) else None
        if is_whiteout(status):
            return None
        if not stat.S_ISDIR(status.st_mode) or has_xattr(str(above), "opaque"):
            has_below = False
    return above


@dataclass(frozen=True, slots=True)
class Place:
    """Where layers and change sets are on disk."""

    directory: Path
    """Has the change sets, and the layers if they can be in it."""
    scratch: Path | None = None
    """The directory of layers, if they cannot be in `directory`."""

    @property
    def layers(self) -> Path:
        """The directory of all layers."""
        return (self.scratch or self.directory) / "open"

    @property
    def changes(self) -> Path:
        """The directory of all change sets."""
        return self.directory / "changes"

    @property
    def snapshots(self) -> Path:
        """The directory of the copies that are made before a command runs without a layer."""
        return self.directory / "snapshots"

    @property
    def children(self) -> Path:
        """The directory of the layers of subagents. They outlive processes."""
        return self.directory / "children"

    def open(self, roots: Sequence[Path]) -> Layer:
        """Open a new layer over directories, whose links must be resolved. :raises OSError: it cannot be created."""
        if _UNUSABLE & set(str(self.layers)):
            raise OSError(f"{self.layers} cannot hold a layer, because its name contains a comma, colon or backslash")
        directory, lock = new_directory(self.layers)
        overlays = []
        try:
            for number, root in enumerate(roots):
                upper, work = directory / f"{number}-upper", directory / f"{number}-work"
                overlays.append(Overlay(root, upper, work, make_upper(upper, root)))
        except BaseException:
            os.close(lock)
            discard(directory)
            raise
        return Layer(
            id=directory.name, directory=directory, overlays=tuple(overlays), since_ns=time.time_ns(), lock=lock
        )


def make_upper(upper: Path, root: Path) -> State:
    """Make the directory of a layer over a root, with the owner, mode, time and attributes of the root, because
    commands in the layer see those of this directory. Return its state, which may lack attributes that the file system
    cannot store."""
    upper.mkdir()
    status = root.stat()
    with suppress(OSError):
        os.chown(upper, status.st_uid, status.st_gid)
    for name, value in xattrs_of(str(root)):
        with suppress(OSError):
            os.setxattr(upper, name, bytes.fromhex(value))
    upper.chmod(stat.S_IMODE(status.st_mode))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
    return meta_of(upper.stat(), xattrs_of(str(upper)))


def new_directory(folder: Path) -> tuple[Path, int]:
    """Make a new directory in a folder of a place. Return its path and its open lock file: see `make_owned`.

    :raises OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = folder / new_id()
    return directory, make_owned(directory)


def new_id() -> str:
    """Return a name for a layer or a change set. Names sort by time."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def discard(path: Path) -> None:
    """Remove a file or a directory with everything in it, see `remove_tree`. :raises OSError: something is left."""
    if not path.is_dir() or path.is_symlink():
        with suppress(FileNotFoundError):
            path.unlink()
        return
    gone = path.with_name(f"gone-{secrets.token_hex(8)}")
    os.utime(path)  # so that other processes see that it is being removed now, see `is_unfinished`
    path.rename(gone)
    remove_tree(gone)
