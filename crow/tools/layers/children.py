"""The layers of subagents: a layer that outlives processes and remembers what the workspace's files were before.

A subagent's layer stays until the session keeps or drops it. Meanwhile the workspace may change. So for each path that
the subagent has changed, its layer remembers the base: what the workspace had there when the subagent changed it.
Bases are noted after each command and each edit. If the workspace's file was changed during that command, nobody knows
which version the command saw, and so the base is unknown.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from crow.tools.layers.place import Layer, Overlay, Place, discard, make_upper, new_id, opened_pair
from crow.tools.layers.sets import directory_of, read_state, read_state_of, state_data
from crow.tools.layers.states import (
    MAX_ENTRIES,
    OPEN_DIRECTORY,
    State,
    TooLargeError,
    Walked,
    changeable,
    check_depth,
    copy_file,
    folders_around,
    has_xattr,
    is_whiteout,
    meta_of,
    opened,
    state_of,
    status_of,
    xattrs_of,
)

if sys.platform != "win32":
    import fcntl

_VERSION = 1
BASE_BYTES = 1_000_000
"""Of longer files, only the state is remembered, so they cannot be merged line by line."""
_ALL_BASES_BYTES = 200_000_000
UNKNOWN = State(kind="other")
"""The base of a path that was changed in the workspace and in the layer at the same time."""
_KEPT_S = 30 * 86_400
"""A layer that was not used for this many seconds is removed."""
UNNEEDED_S = 7 * 86_400
"""A layer stays for this many seconds even if no session of this database names it: its session may be in another
database."""
_NEW_S = 3_600
"""A layer that is still unfinished after this many seconds was left by a killed process."""
_TOTAL_BYTES = 10_000_000_000
"""If all layers of subagents together take more on the disk, the oldest ones are removed."""


class LayerBusy(Exception):
    """Another process uses the layer of a subagent."""


class RootsChanged(Exception):
    """The layer of a subagent belongs to other directories than those of the workspace now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the workspace had at a path when the subagent first changed it."""

    state: State
    copy: str = ""
    """The name of a copy of the file. Empty if there is none."""


@dataclass(slots=True, kw_only=True, eq=False)
class ChildLayer:
    """The layer of one subagent. `close` leaves it on the disk, `remove` does not."""

    layer: Layer
    bases: dict[str, Base] = field(default_factory=dict)
    """The bases of all changed paths, by absolute path. A new or removed directory counts as one path."""
    metas: dict[str, State] = field(default_factory=dict)
    """The modes and attributes that changed directories had in the workspace."""
    copied: int = 0
    """The bytes of all copies of bases."""
    is_closed: bool = field(default=False, init=False)

    @property
    def directory(self) -> Path:
        """Where the layer is."""
        return self.layer.directory

    def begin(self) -> None:
        """Record when a command or an edit begins. Call `note` when it has ended."""
        _write_text(self.directory / "since", str(time.time_ns()))

    def note(self) -> None:
        """Remember the base of each path that was first changed by the last command or edit, and forget the bases of
        paths that are no longer changed. No command may be running.

        :raises TooLargeError: there are too many files.
        """
        found = _Notes(self, int((self.directory / "since").read_text()))
        for overlay in self.layer.overlays:
            found.walk_root(overlay)
        for path, base in self.bases.items():
            if base.copy and path not in found.bases:
                (self.directory / "bases" / base.copy).unlink(missing_ok=True)
        if (found.bases, found.metas) != (self.bases, self.metas):
            self.bases, self.metas = found.bases, found.metas
            self.copied = sum(base.state.size for base in self.bases.values() if base.copy)
            self.save()
        for overlay in self.layer.overlays:  # each command had a work directory of its own
            for work in self.directory.glob(f"{overlay.work.name}-*"):
                discard(work)

    def note_before(self, path: Path) -> None:
        """Remember the base of a path that crow itself is about to change in the layer. Links must be resolved."""
        for overlay in self.layer.overlays:
            if path == overlay.root or not path.is_relative_to(overlay.root):
                continue
            top = _top_of_change(overlay, path.relative_to(overlay.root).parts)
            if str(top) not in self.bases:
                with directory_of(top) as below:
                    # no command runs, so the subagent cannot have seen another version
                    self.bases[str(top)] = _Notes(self, sys.maxsize).base_of(str(top), top.name, below)
                self.save()

    def forget(self, paths: Sequence[str]) -> None:
        """Remove changes from the layer, for example because the workspace has them now. The paths are absolute."""
        for path in paths:
            for overlay in self.layer.overlays:
                if Path(path).is_relative_to(overlay.root):
                    place = overlay.upper / Path(path).relative_to(overlay.root)
                    if place != overlay.upper and os.path.lexists(place):
                        _discard_in(place)
            base = self.bases.pop(path, None)
            if base is not None and base.copy:
                (self.directory / "bases" / base.copy).unlink(missing_ok=True)
        self.save()

    def base_text(self, path: str) -> bytes | None:
        """Return the content that a changed file had in the workspace; None if it is not known."""
        base = self.bases.get(path)
        if base is None or not base.copy:
            return None
        try:
            return (self.directory / "bases" / base.copy).read_bytes()
        except OSError:
            return None

    def save(self) -> None:
        """Write the bases to the disk."""
        data = {
            "version": _VERSION,
            "roots": [str(overlay.root) for overlay in self.layer.overlays],
            "bases": {path: [state_data(base.state), base.copy] for path, base in self.bases.items()},
            "metas": {path: state_data(state) for path, state in self.metas.items()},
        }
        _write_text(self.directory / "child", json.dumps(data))

    def close(self) -> None:
        """Let other processes use the layer. Closing it again does nothing."""
        if not self.is_closed:
            self.is_closed = True
            os.close(self.layer.lock)

    def remove(self) -> None:
        """Remove the layer with everything in it, and close it."""
        with suppress(OSError):
            discard(self.directory)
        self.close()


class _Notes:
    """One walk over the layer of a subagent, which finds the bases."""

    def __init__(self, child: ChildLayer, since_ns: int) -> None:
        self.bases: dict[str, Base] = {}
        self.metas: dict[str, State] = {}
        self._child = child
        self._since_ns = since_ns
        self._around_bases = folders_around(child.bases)
        self._entries = 0

    def walk_root(self, overlay: Overlay) -> None:
        with opened_pair(overlay) as (above, below):
            self._walk(above, below, str(overlay.root), 0, os.fstat(below))

    def _walk(self, above: int, below: int, folder: str, depth: int, own: os.stat_result) -> None:
        check_depth(depth)
        self.metas[folder] = self._child.metas.get(folder) or meta_of(own, xattrs_of(below))
        with os.scandir(above) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            self._entries += 1
            if self._entries > MAX_ENTRIES:
                raise TooLargeError(f"there are more than {MAX_ENTRIES:,} files")
            status, before = os.lstat(name, dir_fd=above), status_of(name, below)
            path = f"{folder.rstrip(os.sep)}/{name}"
            if is_whiteout(status) and before is None:
                with changeable(above):
                    os.unlink(name, dir_fd=above)  # the file is gone in the workspace, too
                continue
            if before is not None and stat.S_ISDIR(status.st_mode) and stat.S_ISDIR(before.st_mode):
                with opened(name, above) as inner:
                    if not has_xattr(inner, "opaque"):
                        with opened(name, below) as lower:
                            self._walk(inner, lower, path, depth + 1, before)
                        continue
            if stat.S_ISDIR(status.st_mode) and (path in self._child.metas or path not in self._child.bases):
                with opened(name, above) as inner:
                    _remove_whiteouts(inner, depth + 1)
            self.bases[path] = self._child.bases.get(path) or self.base_of(path, name, below)

    def base_of(self, path: str, name: str, below: int) -> Base:
        """Return the base of a path, which is a name in an open directory of the workspace."""
        walked = Walked()
        state = state_of(name, below, walked=walked)
        if walked.newest_ns > self._since_ns or self._has_changed_inside(path, below):
            return Base(state=UNKNOWN)
        is_short = state.kind == "file" and state.size <= BASE_BYTES
        if not is_short or self._child.copied + state.size > _ALL_BASES_BYTES:
            return Base(state=state)
        copy, folder = new_id(), self._child.directory / "bases"
        try:
            with directory_of(folder / copy) as target:
                copy_file(name, below, copy, target)
        except OSError:  # for example, nobody may read the file
            return Base(state=state)
        self._child.copied += state.size
        # it may have been replaced while it was copied
        return Base(state=state, copy=copy) if state_of(name, below) == state else Base(state=UNKNOWN)

    def _has_changed_inside(self, path: str, below: int) -> bool:
        """Return whether the subagent has removed a directory after it had changed files in it, and the workspace's
        versions of these files have changed since. The subagent never saw these versions, so it did not mean to remove
        them."""
        bases = self._child.bases.items() if path in self._around_bases else ()
        for other, base in bases:
            if other.startswith(f"{path}/"):
                inner = other[len(path) - len(os.path.basename(path)) :]
                with suppress(OSError):
                    folder, _, name = inner.rpartition("/")
                    handle = os.open(folder, OPEN_DIRECTORY, dir_fd=below)
                    try:
                        if not state_of(name, handle).matches(base.state):
                            return True
                    finally:
                        os.close(handle)
                    continue
                return True
        return False


def _remove_whiteouts(folder: int, depth: int) -> None:
    """Remove the whiteouts in an open directory of a layer that is not merged with one of the workspace, for example
    because that one was removed meanwhile. In such a directory, commands would see the names of the whiteouts."""
    check_depth(depth)
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
    for name in names:
        status = os.lstat(name, dir_fd=folder)
        if is_whiteout(status):
            with changeable(folder):
                os.unlink(name, dir_fd=folder)
        elif stat.S_ISDIR(status.st_mode):
            with opened(name, folder) as inner:
                _remove_whiteouts(inner, depth + 1)


def _top_of_change(overlay: Overlay, parts: Sequence[str]) -> Path:
    """Return the first directory above a path that the layer does not merge with one of the workspace; the path itself
    if there is none. A change anywhere in this directory counts as a change of the directory."""
    above, below = overlay.upper, overlay.root
    for part in parts[:-1]:
        above, below = above / part, below / part
        is_directory = below.is_dir() and not below.is_symlink()
        has_own = os.path.lexists(above) and (
            not above.is_dir() or above.is_symlink() or has_xattr(str(above), "opaque")
        )
        if not is_directory or has_own:
            return below
    return below / parts[-1]


def open_child(place: Place, identifier: str, roots: Sequence[Path]) -> ChildLayer:
    """Open the layer of a subagent. It is created if there is none.

    :raises LayerBusy: another process uses it. :raises RootsChanged: it belongs to other directories.
    :raises OSError: it cannot be created or has too many files. :raises ValueError: its notes are damaged.
    """
    # with links resolved, because the built-in tools refuse paths with links
    directory = Path(os.path.realpath(place.children)) / os.path.basename(identifier)
    if not (directory / "child").exists():
        with suppress(OSError):
            discard(directory)
        _create(directory, roots)
    lock = _lock_of(directory)
    try:
        child = _read_child(directory, lock, roots)
        _finish_keeping(place, child)
        child.note()  # crow may have been killed before it noted the changes of a command
    except BaseException:
        os.close(lock)
        raise
    return child


def _read_child(directory: Path, lock: int, roots: Sequence[Path]) -> ChildLayer:
    data = json.loads((directory / "child").read_text(encoding="utf-8", errors="surrogateescape"))
    if data["roots"] != [str(root) for root in roots]:
        raise RootsChanged(f"its directories were {', '.join(data['roots'])}")
    overlays = tuple(
        Overlay(root, directory / f"{number}-upper", directory / f"{number}-work") for number, root in enumerate(roots)
    )
    # conflicts are found by comparing bases, not by times
    layer = Layer(id=directory.name, directory=directory, overlays=overlays, since_ns=sys.maxsize, lock=lock)
    bases = {path: Base(state=read_state_of(state), copy=copy) for path, (state, copy) in data["bases"].items()}
    metas = {path: read_state_of(state) for path, state in data["metas"].items()}
    copied = sum(base.state.size for base in bases.values() if base.copy)
    return ChildLayer(layer=layer, bases=bases, metas=metas, copied=copied)


def _create(directory: Path, roots: Sequence[Path]) -> None:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = directory.with_name(f"new-{new_id()}")
    new.mkdir(mode=0o700)
    try:
        (new / "bases").mkdir()
        overlays = []
        for number, root in enumerate(roots):
            make_upper(new / f"{number}-upper", root)
            (new / f"{number}-work").mkdir()
            overlays.append(Overlay(root, new / f"{number}-upper", new / f"{number}-work"))
        made = ChildLayer(layer=Layer(id=new.name, directory=new, overlays=tuple(overlays), since_ns=0, lock=-1))
        made.begin()
        made.save()
        new.rename(directory)
    except BaseException:
        discard(new)
        raise


def _lock_of(directory: Path) -> int:
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise LayerBusy(directory.name) from None
    os.utime(directory)
    return lock


def _write_text(path: Path, text: str) -> None:
    """Replace a small file, so that a kill leaves the old or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8", errors="surrogateescape")
    new.rename(path)


def _discard_in(path: Path) -> None:
    """Remove what a layer has at a path, although commands may have made its directory read-only."""
    parent = path.parent
    mode = stat.S_IMODE(parent.stat().st_mode)
    parent.chmod(mode | 0o700)
    try:
        discard(path)
    finally:
        parent.chmod(mode)


@contextmanager
def keeping(child: ChildLayer, change_set: str, paths: Sequence[str]) -> Iterator[None]:
    """Return a context in which the caller must move a change set of the layer into the workspace. At its end, the
    changes at `paths` are removed from the layer. If the process is killed meanwhile, the next one that opens the layer
    removes them. If the block fails, the layer stays as it is."""
    note = child.directory / "keeping"
    _write_text(note, json.dumps({"change_set": change_set, "paths": list(paths)}))
    try:
        yield
    except BaseException:
        note.unlink(missing_ok=True)
        raise
    child.forget(paths)
    note.unlink()


def _finish_keeping(place: Place, child: ChildLayer) -> None:
    """Remove changes from a layer that a killed process has already moved into the workspace."""
    note = child.directory / "keeping"
    try:
        data = json.loads(note.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, ValueError):
        return
    if read_state(place.changes / os.path.basename(data["change_set"])) == "kept":
        child.forget(data["paths"])
    note.unlink()


def has_child(place: Place, identifier: str) -> bool:
    """Return whether a subagent has a layer."""
    return (place.children / os.path.basename(identifier) / "child").exists()


def children(place: Place, *, unused_s: float = 0) -> tuple[str, ...]:
    """Return the ids of the subagents whose layers were not used for `unused_s` seconds, most recently used first."""
    found = []
    with suppress(OSError):
        for path in place.children.iterdir():
            modified = path.stat().st_mtime
            limit_s = max(unused_s, _NEW_S if path.name.startswith("new-") else 0)
            if modified <= time.time() - limit_s:
                found.append((modified, path.name))
    return tuple(name for _, name in sorted(found, reverse=True))


def remove_child(place: Place, identifier: str) -> bool:
    """Remove the layer of a subagent, unless a process uses it. Return whether it was removed."""
    directory = place.children / os.path.basename(identifier)
    try:
        lock = _lock_of(directory)
    except (LayerBusy, OSError):
        return False
    with suppress(OSError):
        discard(directory)
    os.close(lock)
    return True


def _size_of(place: Place, identifier: str) -> int:
    """Return the bytes on the disk that the layer of a subagent takes. Sizes below directories that nobody may read do
    not count."""
    total = 0
    for folder, _, names in os.walk(place.children / os.path.basename(identifier)):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def surplus(place: Place) -> tuple[str, ...]:
    """Return the ids of subagents whose layers have not been used for a month, or are the oldest ones and must go so
    that the others take at most `_TOTAL_BYTES`."""
    found, total, now = [], 0, time.time()
    for name in children(place):
        total += _size_of(place, name)
        with suppress(OSError):
            if (place.children / name).stat().st_mtime < now - _KEPT_S or total > _TOTAL_BYTES:
                found.append(name)
    return tuple(found)
