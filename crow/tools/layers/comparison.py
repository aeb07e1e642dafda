"""Finds what the commands in a layer have changed.

The walk goes through the layer's own directory, `upper`, and in parallel through the workspace's directory. In `upper`,
the kernel has put an entry for each name that was changed:

- a whiteout, if the name was deleted;
- a file or link, if it is new, was changed, or was opened for writing;
- a directory that is merged with the workspace's one, if something in it was changed;
- a directory that is not merged, if it is new or has replaced another one. Such a directory is marked `opaque`, or the
  workspace has no directory there. A directory that was renamed is new at its new path.

Each entry becomes an operation, unless nothing has changed, or somebody else has changed the path meanwhile
(`conflicts.py`). It is also listed for the user, file by file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crow.tools.layers.changes import Action, Change, Changes, LookRules, Operation
from crow.tools.layers.cleaning import SET_ID, Cleaner, plain_mode
from crow.tools.layers.conflicts import Conflicts, is_git_index
from crow.tools.layers.place import Layer, Overlay, opened_pair
from crow.tools.layers.states import (
    ABSENT,
    MAX_ENTRIES,
    Fingerprint,
    State,
    TooLargeError,
    Walked,
    check_depth,
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
    tree_state,
    walk,
    xattrs_of,
)

MAX_LISTED = 5_000
"""At most this many changed files are listed one by one."""
_COMPARED_BYTES = 4_000_000
"""Longer files are not compared: a file with new times counts as changed."""
_MAX_DROPPED = 100


def look(layer: Layer, rules: LookRules | None = None, *, is_live: bool = False) -> Changes:
    """Return the changes in a layer. Unless commands in the layer still run, also remove files and bits from it that
    can never be kept: see `cleaning.py`."""
    changes = Changes(layer=layer.id, is_live=is_live)
    for overlay in layer.overlays:
        try:
            _Comparison(layer, overlay, rules or LookRules(), changes).run()
        except TooLargeError as error:
            changes.problem = str(error)
    if all(map(_changes_only_time, changes.operations)):  # such as after a file was made and removed again
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


def _changes_only_time(operation: Operation) -> bool:
    """Return whether an operation changes nothing but the time of a directory."""
    return operation.is_meta and _has_rights_of(operation.before, operation.after)


def _has_rights_of(one: State | None, other: State) -> bool:
    """Return whether two directories have the same mode and attributes. False if there is only one."""
    return one is not None and (one.mode, one.xattrs) == (other.mode, other.xattrs)


@dataclass(slots=True)
class _Entry:
    """A name in a directory of the layer, and the same name in the workspace."""

    path: str
    """Relative to the root."""
    name: str
    above: int
    """The open directory of the layer."""
    below: int
    """The open directory of the workspace."""
    status: os.stat_result
    """What the layer has."""
    before: os.stat_result | None
    """What the workspace has. None if it has nothing there."""
    is_ignored: bool


class _Comparison:
    """Compares one overlay of a layer with the tree of the workspace below it, and adds what differs to `changes`."""

    def __init__(self, layer: Layer, overlay: Overlay, rules: LookRules, changes: Changes) -> None:
        self._layer = layer
        self._overlay = overlay
        self._root = str(overlay.root)
        self._rules = rules
        self._changes = changes
        self._conflicts = Conflicts(layer, self._root)
        self._cleaner = Cleaner(self._drop)
        self._entries = 0

    def run(self) -> None:
        """:raises TooLargeError: there are too many files, or they are nested too deeply."""
        with opened_pair(self._overlay) as (above, below):
            self._directory(above, below, "", 0, is_ignored=False)
            self._meta(above, below, "", os.fstat(above), os.fstat(below))
        self._conflicts.finish(self._changes.operations)
        self._changes.conflicts += self._conflicts.paths

    def _directory(self, above: int, below: int, prefix: str, depth: int, *, is_ignored: bool) -> None:
        """Look at a directory of the layer that is merged with one of the workspace. `prefix` is its path with a slash
        at the end; empty for the root."""
        check_depth(depth)
        with os.scandir(above) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            self._count()
            status = status_of(name, above)
            if status is None:  # a command that still runs has removed it
                continue
            path, before = f"{prefix}{name}", status_of(name, below)
            is_directory = stat.S_ISDIR((before if is_whiteout(status) and before is not None else status).st_mode)
            ignored = is_ignored or self._is_ignored(path, is_directory)
            entry = _Entry(path, name, above, below, status, before, ignored)
            if is_whiteout(status):
                if before is not None:
                    self._removed(path, name, below, ignored)
            elif stat.S_ISDIR(status.st_mode):
                self._found_directory(entry, depth)
            else:
                self._put(entry)
        if self._layer.kept:
            self._find_removed_again(names, below, prefix, is_ignored=is_ignored)

    def _found_directory(self, entry: _Entry, depth: int) -> None:
        before = entry.before
        with opened(entry.name, entry.above) as inner:
            is_opaque = has_xattr(inner, "opaque")
            if before is not None and stat.S_ISDIR(before.st_mode) and not is_opaque:
                with opened(entry.name, entry.below) as lower:
                    self._directory(inner, lower, f"{entry.path}/", depth + 1, is_ignored=entry.is_ignored)
                    self._meta(inner, lower, entry.path, entry.status, before)
                return
            is_copy = has_xattr(inner, "origin") and not is_opaque
        if before is None and is_copy and self._conflicts.has_changed_names(entry.below, entry.path):
            self._conflicts.note(entry.path, is_ignored=entry.is_ignored)  # somebody else has removed the directory
        else:
            self._put(entry)

    def _find_removed_again(self, names: Sequence[str], below: int, prefix: str, *, is_ignored: bool) -> None:
        """Add the removal of files that commands have removed after crow had kept them. The layer has no whiteouts for
        them, because the workspace did not have them when the layer was mounted. `names` are the names that the layer
        has in a directory."""
        with os.scandir(below) as entries:
            found = sorted({entry.name for entry in entries}.difference(names))
        for name in found:
            path, walked = f"{prefix}{name}", Walked()
            if self._layer.copied_since(f"{self._root}/{path}"):
                state_of(name, below, walked=walked)
                if self._conflicts.is_unchanged(walked, path):
                    is_directory = stat.S_ISDIR(os.lstat(name, dir_fd=below).st_mode)
                    self._removed(path, name, below, is_ignored or self._is_ignored(path, is_directory))

    def _count(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise TooLargeError(f"there are more than {MAX_ENTRIES:,} files")

    def _is_ignored(self, path: str, is_directory: bool) -> bool:
        return self._rules.is_ignored(f"{self._root}/{path}", is_directory)

    def _removed(self, path: str, name: str, below: int, is_ignored: bool) -> None:
        """Add the removal of what the workspace has at a path."""
        kept = self._layer.kept.get(f"{self._root}/{path}")
        if kept is not None and kept.is_removed:  # somebody else has created it since
            return
        walked = self._conflicts.walked(path)
        before = state_of(name, below, walked=walked)
        if self._conflicts.is_late(walked, path, is_ignored=is_ignored):
            return
        self._list_deleted(path, name, below, is_ignored)
        self._changes.operations.append(
            Operation(root=self._root, path=path, before=before, after=ABSENT, is_ignored=is_ignored)
        )

    def _put(self, entry: _Entry) -> None:
        """Add what the layer has at a path, unless that is a directory merged with one of the workspace."""
        kind = kind_of(entry.status.st_mode)
        if kind == "other":
            self._drop(entry.path)
            if entry.before is not None:
                self._removed(entry.path, entry.name, entry.below, entry.is_ignored)
            return
        if entry.before is None and self._was_kept(entry):
            return
        before = self._replaced_state(entry)
        if before is None:
            return
        # a new file or link has no notes of the kernel
        is_clean = kind != "directory" and entry.before is None and not entry.status.st_mode & SET_ID
        if not (is_clean or self._changes.is_live):
            self._cleaner.clean(entry.path, entry.name, entry.above)
            entry.status = os.lstat(entry.name, dir_fd=entry.above)
        after = self._list_directory(entry) if kind == "directory" else self._list_file(entry)
        self._changes.operations.append(
            Operation(
                root=self._root,
                path=entry.path,
                before=before,
                after=after,
                source=f"{self._overlay.upper}/{entry.path}",
                inode=entry.status.st_ino,
                is_ignored=entry.is_ignored,
            )
        )

    def _was_kept(self, entry: _Entry) -> bool:
        """Return whether a file or directory of the layer was kept while commands ran, and was not changed since. If
        the workspace does not have it, somebody else has removed it."""
        copied_ns = self._layer.copied_since(f"{self._root}/{entry.path}")
        if not copied_ns:
            return False
        walked = Walked()
        state_with(entry.status, entry.name, entry.above, walked=walked)
        return walked.newest_ns < copied_ns

    def _replaced_state(self, entry: _Entry) -> State | None:
        """Return what the workspace has at a path that the layer replaces. None if there is nothing to keep: the layer
        has no change, or somebody else has changed the path."""
        path, name, before = entry.path, entry.name, entry.before
        walked = self._conflicts.walked(path)
        state = ABSENT if before is None else state_with(before, name, entry.below, walked=walked)
        if before is not None and self._was_only_opened(entry, before):
            return None
        if self._conflicts.is_late(walked, path, is_ignored=entry.is_ignored):
            return None
        is_new_file = before is None and stat.S_ISREG(entry.status.st_mode)
        is_late = is_new_file and self._conflicts.has_changed_names(entry.below, path)
        if is_late and has_xattr(proc_path(entry.above, name), "origin"):
            self._conflicts.note(path, is_ignored=entry.is_ignored)  # somebody else has removed the file
            return None
        return state

    def _was_only_opened(self, entry: _Entry, before: os.stat_result) -> bool:
        """Return whether a file was only opened for writing, and not changed."""
        status = entry.status
        if (status.st_mode, status.st_size, status.st_mtime_ns) != (
            before.st_mode,
            before.st_size,
            before.st_mtime_ns,
        ):
            return False
        # while commands run, equal times suffice: a file that was kept before is a copy with the same times
        return self._changes.is_live or _has_same_content(entry, before)

    def _drop(self, path: str) -> None:
        if len(self._changes.dropped) < _MAX_DROPPED:
            self._changes.dropped.append(f"{self._root}/{path}")

    def _meta(self, above: int, below: int, path: str, own: os.stat_result, before: os.stat_result) -> None:
        """Add an operation for a directory itself, if its mode, attributes or time differ or something in it has
        changed. If the mode or attributes differ and somebody else has changed the directory, too, that is a conflict,
        because it is unknown who has set them."""
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
            self._conflicts.note(path, is_ignored=False)
            return
        if is_changed:
            self._list("changed", path, own, is_ignored=False)
        self._changes.operations.append(Operation(root=self._root, path=path, before=old, after=new, is_meta=True))

    def _list_file(self, entry: _Entry) -> State:
        """List a file or link of the layer. Return its state."""
        action: Action = "created" if entry.before is None else "changed"
        is_same = entry.before is not None and _has_same_content(entry, entry.before)
        target = os.readlink(entry.name, dir_fd=entry.above) if stat.S_ISLNK(entry.status.st_mode) else ""
        self._list(action, entry.path, entry.status, is_ignored=entry.is_ignored, target=target, is_same=is_same)
        return state_with(entry.status, entry.name, entry.above)

    def _list_directory(self, entry: _Entry) -> State:
        """List the files of a new directory of the layer, and those that it replaces. Return its state."""
        if entry.before is not None:
            self._list_deleted(entry.path, entry.name, entry.below, entry.is_ignored)
        status, fingerprint = os.lstat(entry.name, dir_fd=entry.above), Fingerprint(Walked())
        with opened(entry.name, entry.above) as inner:
            found = self._walk_new(inner, entry.path, fingerprint)
            self._list_tree("created", entry.path, status, inner, found, is_ignored=entry.is_ignored)
            return tree_state(status, inner, fingerprint)

    def _walk_new(self, directory: int, path: str, fingerprint: Fingerprint) -> Iterator[tuple[str, os.stat_result]]:
        """Yield what will be kept of an open new directory, and add it to the fingerprint. See :func:`walk`."""
        for below, found in walk(directory):
            status = found
            if not self._changes.is_live and found.st_mode & SET_ID:
                status = plain_mode(proc_path(directory, below), found)
            elif self._changes.is_live and kind_of(found.st_mode) == "other":
                if not is_whiteout(found):
                    self._drop(f"{path}/{below}")
                continue  # it is not copied with the rest
            fingerprint.add(below, status)
            yield below, status

    def _list_deleted(self, path: str, name: str, below: int, is_ignored: bool) -> None:
        """List a path of the workspace as deleted: a file, or all files in a directory. `below` is the open directory
        that contains it."""
        status = os.lstat(name, dir_fd=below)
        if stat.S_ISDIR(status.st_mode):
            with opened(name, below) as inner:
                self._list_tree("deleted", path, status, inner, walk(inner), is_ignored=is_ignored)
        else:
            target = os.readlink(name, dir_fd=below) if stat.S_ISLNK(status.st_mode) else ""
            self._list("deleted", path, status, is_ignored=is_ignored, target=target)

    def _list_tree(
        self,
        action: Action,
        path: str,
        status: os.stat_result,
        directory: int,
        found: Iterator[tuple[str, os.stat_result]],
        *,
        is_ignored: bool,
    ) -> None:
        """List the files in an open directory, and directories in it that are protected. List the directory itself if
        nothing else is listed. `found` comes from :func:`walk`."""
        count, ignored_below = 0, ""
        for below, each in found:
            self._count()
            full, is_directory = f"{path}/{below}", stat.S_ISDIR(each.st_mode)
            is_inside = bool(ignored_below) and full.startswith(ignored_below)
            is_out = is_ignored or is_inside or self._is_ignored(full, is_directory)
            if is_directory:
                if is_out and not is_inside:
                    ignored_below = f"{full}/"
                if not self._rules.is_protected(f"{self._root}/{full}"):
                    continue
            elif kind_of(each.st_mode) == "other":
                continue
            count += 1
            target = os.readlink(below, dir_fd=directory) if stat.S_ISLNK(each.st_mode) else ""
            self._list(action, full, each, is_ignored=is_out, target=target)
        if not count:
            self._list(action, path, status, is_ignored=is_ignored)

    def _list(
        self,
        action: Action,
        path: str,
        status: os.stat_result,
        *,
        is_ignored: bool,
        target: str = "",
        is_same: bool = False,
    ) -> None:
        """Count a changed path, and list it unless there are too many. `target` is that of a link."""
        changes, full = self._changes, f"{self._root}/{path}" if path else self._root
        changes.files += 1
        if is_ignored:
            changes.ignored += 1
            changes.ignored_bytes += status.st_blocks * 512
        is_protected = self._rules.is_protected(full)
        if len(changes.listed) >= MAX_LISTED and not is_protected:
            return
        changes.listed.append(
            Change(
                action=action,
                path=full,
                source="" if action == "deleted" else f"{self._overlay.upper}/{path}",
                kind=kind_of(status.st_mode),
                size=status.st_size,
                is_ignored=is_ignored,
                is_protected=is_protected,
                is_same=is_same or is_git_index(path),
                target=target,
            )
        )


def _has_same_content(entry: _Entry, before: os.stat_result) -> bool:
    """Return whether a file or link of the layer is the same as the workspace's one, except for its time."""
    status, name, above, below = entry.status, entry.name, entry.above, entry.below
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
