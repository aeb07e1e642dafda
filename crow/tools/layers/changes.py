"""Finds what the commands in a layer have changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from crow.tools.layers.place import Layer, Overlay
from crow.tools.layers.states import (
    ABSENT,
    MAX_DEPTH,
    MAX_ENTRIES,
    OPEN_DIRECTORY,
    Fingerprint,
    State,
    TooLargeError,
    Walked,
    changeable,
    has_xattr,
    is_whiteout,
    kind_of,
    meta_of,
    opened,
    proc_path,
    same_content,
    state_of,
    state_with,
    status_of,
    strip_xattrs,
    tree_state,
    walk,
    xattrs_of,
)

MAX_LISTED = 5_000
"""At most so many changed files are listed one by one."""
_COMPARED_BYTES = 4_000_000
_MAX_DROPPED = 100
_SET_ID = stat.S_ISUID | stat.S_ISGID


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A file that commands have created, changed or deleted."""

    action: Literal["created", "changed", "deleted"]
    path: str
    """The absolute path in the workspace."""
    source: str = ""
    """The path of the new content, in the layer. Empty for a deleted file."""
    kind: str = "file"
    """What the path is now, or was before it was deleted: see `Kind` in `states.py`."""
    size: int = 0
    """In bytes."""
    is_ignored: bool = False
    """Git ignores the file."""
    is_protected: bool = False
    is_same: bool = False
    """Only times have changed, or git's index, in which git notes the times of files."""
    target: str = ""
    """Where a link leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path that has to be replaced, moved or removed to keep a change. A new or removed directory is one operation
    with everything in it."""

    root: str
    path: str
    """Relative to the root. Empty for the root itself."""
    before: State
    after: State
    source: str = ""
    """Where the new content is. Empty if there is none."""
    inode: int = 0
    """The number of the source's file, by which it is recognised wherever it is moved."""
    is_meta: bool = False
    """Only the mode, the time and the attributes of a directory change."""
    is_ignored: bool = False
    """Git ignores everything in it."""

    @property
    def name(self) -> str:
        """The absolute path."""
        return os.path.join(self.root, self.path) if self.path else self.root


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRules:
    """What the user's settings say about paths. Both functions take an absolute path."""

    is_protected: Callable[[str], bool] = lambda _path: False
    is_ignored: Callable[[str, bool], bool] = lambda _path, _is_directory: False
    """Takes also whether the path is a directory. It must not depend on what the layer contains."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """What the commands in a layer have changed."""

    layer: str = ""
    listed: list[Change] = field(default_factory=list)
    """The changed files, at most `MAX_LISTED` of them. Protected files are always listed."""
    operations: list[Operation] = field(default_factory=list)
    files: int = 0
    """How many files have changed."""
    ignored: int = 0
    """How many of them git ignores."""
    ignored_bytes: int = 0
    conflicts: list[str] = field(default_factory=list)
    """Paths that somebody else has changed since the layer was opened."""
    dropped: list[str] = field(default_factory=list)
    """Sockets, devices and named pipes, which are never kept."""
    problem: str = ""
    """Why the changes cannot be kept at all."""
    is_live: bool = False
    """Commands in the layer still run, so its files must be copied."""

    @property
    def shown(self) -> list[Change]:
        """The changes that a user would want to know about."""
        return [change for change in self.listed if not (change.is_same or change.is_ignored) or change.is_protected]

    @property
    def protected(self) -> list[Change]:
        """The changes to protected files."""
        return [change for change in self.listed if change.is_protected]


def look(layer: Layer, rules: LookRules | None = None, *, is_live: bool = False) -> Changes:
    """Return the changes in a layer. Unless commands in it still run, also remove what can never be kept from it."""
    changes = Changes(layer=layer.id, is_live=is_live)
    for overlay in layer.overlays:
        try:
            _Look(layer, overlay, rules or LookRules(), changes).run()
        except TooLargeError as error:
            changes.problem = str(error)
    if all(_is_time(each) for each in changes.operations):  # such as a directory with a file that was removed again
        changes.operations.clear()
    return changes


def is_untouched(layer: Layer) -> bool:
    """Return whether commands have changed nothing in a layer, judged by its top directories. If something was kept
    before, return False: commands may have removed it again."""
    if layer.kept:
        return False
    for overlay in layer.overlays:
        if os.listdir(overlay.upper) or not _has_rights_of(
            overlay.made, meta_of(os.lstat(overlay.upper), xattrs_of(str(overlay.upper)))
        ):
            return False
    return True


def _is_time(operation: Operation) -> bool:
    """Return whether nothing but the time of a directory has changed."""
    return operation.is_meta and _has_rights_of(operation.before, operation.after)


def _has_rights_of(one: State | None, other: State) -> bool:
    """Return whether two directories have the same mode and attributes. False if there is only one."""
    return one is not None and (one.mode, one.xattrs) == (other.mode, other.xattrs)


class _Look:
    """Finds what has changed in one overlay of a layer, and adds it to `changes`."""

    def __init__(self, layer: Layer, overlay: Overlay, rules: LookRules, changes: Changes) -> None:
        self._layer = layer
        self._overlay = overlay
        self._root = str(overlay.root)
        self._rules = rules
        self._changes = changes
        self._entries = 0
        self._around_kept = {str(folder) for kept in layer.kept for folder in Path(kept).parents}
        """The directories in which crow kept something while commands ran."""
        self._late_indexes: list[str] = []
        """Git indexes that somebody else has changed since the layer was opened. Relative to the root."""

    def run(self) -> None:
        """:raises TooLargeError: there are too many files, or they are nested too deeply."""
        above = os.open(self._overlay.upper, OPEN_DIRECTORY)
        try:
            below = os.open(self._overlay.root, OPEN_DIRECTORY)
            try:
                self._merged(above, below, "", 0, is_ignored=False)
                self._meta(above, below, "", os.fstat(above), os.fstat(below))
                self._check_indexes()
            finally:
                os.close(below)
        finally:
            os.close(above)

    def _merged(self, above: int, below: int, prefix: str, depth: int, *, is_ignored: bool) -> None:
        """Look at a directory of the layer that lies over one of the workspace."""
        if depth > MAX_DEPTH:
            raise TooLargeError(f"directories are nested more than {MAX_DEPTH} deep")
        with os.scandir(above) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            self._count()
            path = f"{prefix}{name}"
            status = status_of(name, above)
            if status is None:
                continue
            before = status_of(name, below)
            ignored = is_ignored or self._is_ignored(path, status, before)
            if is_whiteout(status):
                if before is not None:
                    self._removed(path, name, below, ignored)
            elif stat.S_ISDIR(status.st_mode):
                with opened(name, above) as inner:
                    if before is not None and stat.S_ISDIR(before.st_mode) and not has_xattr(inner, "opaque"):
                        with opened(name, below) as lower:
                            self._merged(inner, lower, f"{path}/", depth + 1, is_ignored=ignored)
                            self._meta(inner, lower, path, status, before)
                        continue
                    is_copied = has_xattr(inner, "origin") and not has_xattr(inner, "opaque")
                    if before is None and is_copied and self._is_changed_below(below, path):
                        self._conflict(path, ignored)  # the directory was removed meanwhile
                        continue
                self._put(path, name, above, below, before, ignored)
            else:
                self._put(path, name, above, below, before, ignored, status)
        if self._layer.kept:
            self._find_removed_again(names, below, prefix, is_ignored=is_ignored)

    def _find_removed_again(self, names: Sequence[str], below: int, prefix: str, *, is_ignored: bool) -> None:
        """Add what commands have removed after it was kept. `names` are those that the layer has in a directory. There
        is no whiteout for the others, because the workspace did not have them when the layer was mounted."""
        with os.scandir(below) as entries:
            found = sorted({entry.name for entry in entries}.difference(names))
        for name in found:
            path, walked = f"{prefix}{name}", Walked()
            if self._layer.copied_since(f"{self._root}/{path}"):
                state_of(name, below, walked=walked)
                if walked.newest_ns <= self._layer.unchanged_since(f"{self._root}/{path}"):
                    status = os.lstat(name, dir_fd=below)
                    self._removed(path, name, below, is_ignored or self._is_ignored(path, status, status))

    def _count(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise TooLargeError(f"there are more than {MAX_ENTRIES:,} files")

    def _is_ignored(self, path: str, status: os.stat_result, before: os.stat_result | None) -> bool:
        is_directory = stat.S_ISDIR((before if is_whiteout(status) and before is not None else status).st_mode)
        return self._rules.is_ignored(f"{self._root}/{path}", is_directory)

    def _removed(self, path: str, name: str, below: int, is_ignored: bool) -> None:
        kept = self._layer.kept.get(f"{self._root}/{path}")
        if kept is not None and kept.is_removed:  # somebody else has created it since
            return
        walked = self._walked(path)
        before = state_of(name, below, walked=walked)
        if self._is_late(walked, path, is_ignored):
            return
        self._list_below(path, name, below, "deleted", is_ignored)
        self._add(Operation(root=self._root, path=path, before=before, after=ABSENT, is_ignored=is_ignored))

    def _put(
        self,
        path: str,
        name: str,
        above: int,
        below: int,
        before: os.stat_result | None,
        is_ignored: bool,
        status: os.stat_result | None = None,
    ) -> None:
        """Add what the layer has at a path where it does not lie over a directory. `status` is that of a file."""
        status = status or os.lstat(name, dir_fd=above)
        kind = kind_of(status.st_mode)
        if kind == "other":
            self._drop(path)
            if before is not None:
                self._removed(path, name, below, is_ignored)
            return
        if before is None and self._was_kept(path, name, above, status):
            return
        walked = self._walked(path)
        old = ABSENT if before is None else state_with(before, name, below, walked=walked)
        if before is not None and self._is_same_file(name, above, below, status, before):
            return
        if self._is_late(walked, path, is_ignored):
            return
        is_late = before is None and kind == "file" and self._is_changed_below(below, path)
        if is_late and has_xattr(proc_path(above, name), "origin"):
            self._conflict(path, is_ignored)  # the file was removed meanwhile
            return
        if not self._changes.is_live and (kind == "directory" or before is not None or status.st_mode & 0o6000):
            self._clean(name, above)
            status = os.lstat(name, dir_fd=above)
        is_same = before is not None and self._has_same_content(name, above, below, status, before)
        after = None
        if kind == "directory":
            if before is not None:
                self._list_below(path, name, below, "deleted", is_ignored)
            after = self._list_below(path, name, above, "created", is_ignored)
        else:
            action: Literal["created", "changed"] = "created" if before is None else "changed"
            self._list(action, path, status, is_ignored, name, above, is_same=is_same)
        self._add(
            Operation(
                root=self._root,
                path=path,
                before=old,
                after=after or state_with(status, name, above),
                source=f"{self._overlay.upper}/{path}",
                inode=status.st_ino,
                is_ignored=is_ignored,
            )
        )

    def _was_kept(self, path: str, name: str, above: int, status: os.stat_result) -> bool:
        """Return whether a file or directory of the layer was kept while commands ran, and was not changed since. If
        the workspace does not have it, somebody else has removed it."""
        copied_ns = self._layer.copied_since(f"{self._root}/{path}")
        if not copied_ns:
            return False
        walked = Walked()
        state_with(status, name, above, walked=walked)
        return walked.newest_ns < copied_ns

    def _is_same_file(self, name: str, above: int, below: int, status: os.stat_result, before: os.stat_result) -> bool:
        """Return whether a file was only opened for writing, and not changed."""
        if (status.st_mode, status.st_size, status.st_mtime_ns) != (
            before.st_mode,
            before.st_size,
            before.st_mtime_ns,
        ):
            return False
        # what was kept while the command ran is a copy with the same times
        return self._changes.is_live or self._has_same_content(name, above, below, status, before)

    def _has_same_content(
        self, name: str, above: int, below: int, status: os.stat_result, before: os.stat_result
    ) -> bool:
        if status.st_mode != before.st_mode or status.st_size != before.st_size:
            return False
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(name, dir_fd=above) == os.readlink(name, dir_fd=below)
        if not stat.S_ISREG(status.st_mode):
            return False
        if xattrs_of(proc_path(above, name)) != xattrs_of(proc_path(below, name)):
            return False
        try:
            return same_content(above, name, below, name, _COMPARED_BYTES)
        except OSError:
            return False

    def _walked(self, path: str) -> Walked:
        """Return what a walk over the workspace's path fills in. What crow kept in it while commands ran is no change
        by somebody else, and neither is the time of a directory around that."""
        full = f"{self._root}/{path}"

        def is_own(inner: str, status: os.stat_result) -> bool:
            each = f"{full}/{inner}" if inner else full
            return each in self._around_kept or status.st_ctime_ns <= self._layer.unchanged_since(each)

        return Walked(is_own=is_own) if self._around_kept else Walked()

    def _is_late(self, walked: Walked, path: str, is_ignored: bool) -> bool:
        """Record a conflict if the workspace's file was changed after the layer was opened."""
        if walked.newest_ns <= self._layer.unchanged_since(f"{self._root}/{path}"):
            return False
        self._conflict(f"{path}/{walked.newest}" if walked.newest else path, is_ignored)
        return True

    def _is_changed_below(self, below: int, path: str) -> bool:
        """Return whether somebody else has created or removed files in an open directory of the workspace. Then a copy
        in the layer whose original is not there was not moved there by a command: its original is gone."""
        full = f"{self._root}/{path}"
        own = [
            kept.moved_ns for name, kept in self._layer.kept.items() if os.path.dirname(name) == os.path.dirname(full)
        ]
        return os.fstat(below).st_ctime_ns > max([self._layer.unchanged_since(full), *own])

    def _conflict(self, path: str, is_ignored: bool) -> None:
        """Note that somebody else changed a path. What git ignores can be made again: there the workspace's file stays,
        and that is no reason to refuse the rest."""
        if _is_git_index(path):
            self._late_indexes.append(path)
        elif not is_ignored:
            self._changes.conflicts.append(f"{self._root}/{path}" if path else self._root)

    def _check_indexes(self) -> None:
        """If somebody else changed git's index, it is a conflict only if the layer has other changes of git."""
        for path in self._late_indexes:
            folder = path.removesuffix("index")
            if any(each.path.startswith(folder) for each in self._changes.operations if not each.is_meta):
                self._changes.conflicts.append(f"{self._root}/{path}")

    def _drop(self, path: str) -> None:
        if len(self._changes.dropped) < _MAX_DROPPED:
            self._changes.dropped.append(f"{self._root}/{path}")

    def _clean(self, name: str, above: int) -> None:
        """Remove the kernel's notes from what will be moved into the workspace, and what cannot be kept there."""
        place = proc_path(above, name)
        strip_xattrs(place)
        status = os.lstat(place)
        if stat.S_ISDIR(status.st_mode):
            self._clean_inside(name, above)
        else:
            _plain_mode(place, status)

    def _clean_inside(self, name: str, above: int) -> None:
        """Remove the same from everything in a directory, except for bits of modes: `_list_below` removes these, as it
        has to find out the modes anyway."""
        with opened(name, above) as inner:
            times, base = os.fstat(inner), proc_path(inner)
            others, folders = [], []
            with os.scandir(inner) as entries:
                for entry in entries:
                    self._count()
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                        others.append(entry.name)
                        continue
                    strip_xattrs(f"{base}/{entry.name}")
            for each in others:
                if not is_whiteout(os.lstat(each, dir_fd=inner)):
                    self._drop(f"{self._relative(inner)}/{each}")
                with changeable(inner):
                    os.unlink(each, dir_fd=inner)
            for each in folders:
                self._clean_inside(each, inner)
            if others:
                os.utime(inner, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _relative(self, directory: int) -> str:
        return os.path.relpath(os.readlink(proc_path(directory)), self._overlay.upper)

    def _meta(self, above: int, below: int, path: str, own: os.stat_result, before: os.stat_result) -> None:
        """Add what has changed of a directory itself. Its time counts only if something in it has changed. If the mode
        or the attributes differ and somebody else has changed the directory, too, nobody knows who has set them."""
        old, new = meta_of(before, xattrs_of(below)), meta_of(own, xattrs_of(above))
        if not path and _has_rights_of(self._overlay.made, new):
            new = replace(new, mode=old.mode, xattrs=old.xattrs)  # no command has changed these
        is_changed = not _has_rights_of(old, new)
        prefix = f"{path}/" if path else ""
        last = self._changes.operations[-1] if self._changes.operations else None
        has_changes = last is not None and last.root == self._root and last.path.startswith(prefix)
        if not is_changed and not has_changes and own.st_mtime_ns == before.st_mtime_ns:
            return
        has_kept = self._changes.is_live or bool(self._layer.kept)  # then crow itself may have changed the directory
        if is_changed and not has_kept and before.st_ctime_ns > self._layer.since_ns:
            self._conflict(path, is_ignored=False)
            return
        if is_changed:
            self._list("changed", path, own, False, "", above, is_same=False)
        self._changes.operations.append(Operation(root=self._root, path=path, before=old, after=new, is_meta=True))

    def _add(self, operation: Operation) -> None:
        self._changes.operations.append(operation)

    def _list_below(
        self, path: str, name: str, directory: int, action: Literal["created", "deleted"], is_ignored: bool
    ) -> State | None:
        """List a file, or all files in a directory. Return the state of a directory."""
        status = os.lstat(name, dir_fd=directory)
        if not stat.S_ISDIR(status.st_mode):
            self._list(action, path, status, is_ignored, name, directory)
            return None
        with opened(name, directory) as inner:
            count = 0
            ignored_below = ""
            fingerprint = Fingerprint(Walked())
            for below, found in walk(inner):
                self._count()
                each = found
                if action == "created" and not self._changes.is_live and found.st_mode & _SET_ID:
                    each = _plain_mode(proc_path(inner, below), found)
                full = f"{path}/{below}"
                if action == "created" and self._changes.is_live and kind_of(each.st_mode) == "other":
                    if not is_whiteout(each):
                        self._drop(full)
                    continue  # it is not copied with the rest
                fingerprint.add(below, each)
                is_directory = stat.S_ISDIR(each.st_mode)
                is_inside = bool(ignored_below) and full.startswith(ignored_below)
                is_out = is_ignored or is_inside or self._rules.is_ignored(f"{self._root}/{full}", is_directory)
                if is_directory:
                    if is_out and not is_inside:
                        ignored_below = f"{full}/"
                    if self._rules.is_protected(f"{self._root}/{full}"):
                        self._list(action, full, each, is_out, below, inner)
                        count += 1
                    continue
                if kind_of(each.st_mode) == "other":
                    continue
                count += 1
                self._list(action, full, each, is_out, below, inner)
            if not count:
                self._list(action, path, status, is_ignored, name, directory)
            return tree_state(status, inner, fingerprint)

    def _list(
        self,
        action: Literal["created", "changed", "deleted"],
        path: str,
        status: os.stat_result,
        is_ignored: bool,
        name: str,
        directory: int,
        *,
        is_same: bool = False,
    ) -> None:
        changes, full = self._changes, f"{self._root}/{path}" if path else self._root
        changes.files += 1
        if is_ignored:
            changes.ignored += 1
            changes.ignored_bytes += status.st_blocks * 512
        is_protected = self._rules.is_protected(full)
        if len(changes.listed) >= MAX_LISTED and not is_protected:
            return
        kind = kind_of(status.st_mode)
        changes.listed.append(
            Change(
                action=action,
                path=full,
                source="" if action == "deleted" else f"{self._overlay.upper}/{path}",
                kind=kind,
                size=status.st_size,
                is_ignored=is_ignored,
                is_protected=is_protected,
                is_same=is_same or _is_git_index(path),
                target=os.readlink(name, dir_fd=directory) if kind == "link" else "",
            )
        )


def _plain_mode(path: str, status: os.stat_result) -> os.stat_result:
    """Remove the bits of a file that would let it run as its owner or group. Return its new status."""
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & _SET_ID:
        return status
    os.chmod(path, stat.S_IMODE(status.st_mode) & ~_SET_ID)
    return os.lstat(path)


def _is_git_index(path: str) -> bool:
    """Return whether this is git's index, in which git notes the times of files whenever it looks at them."""
    return path == ".git/index" or path.endswith("/.git/index")
