"""Removes from a layer what is never kept: sockets, devices and pipes, set-user-id bits, and the kernel's own notes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from crow.tools.layers.place import Overlay, opened_pair
from crow.tools.layers.states import (
    MAX_ENTRIES,
    TooLargeError,
    changeable,
    check_depth,
    has_xattr,
    is_whiteout,
    kind_of,
    opened,
    proc_path,
    status_of,
    strip_xattrs,
)

SET_ID = stat.S_ISUID | stat.S_ISGID


def plain_mode(path: str, status: os.stat_result) -> os.stat_result:
    """Remove the bits of a file that would let it run as its owner or group. Return its new status."""
    if not stat.S_ISREG(status.st_mode) or not status.st_mode & SET_ID:
        return status
    os.chmod(path, stat.S_IMODE(status.st_mode) & ~SET_ID)
    return os.lstat(path)


class Cleaner:
    """Cleans files and directories that a change set will move from a layer into the workspace. No command may be
    running in the layer.

    `on_drop` is called with the path of each socket, device or pipe, relative to the root.
    """

    def __init__(self, on_drop: Callable[[str], None]) -> None:
        self._on_drop = on_drop
        self._entries = 0

    def clean(self, path: str, name: str, above: int) -> None:
        """Clean a name in an open directory. Files in a directory keep their set-user-id bits, which the caller removes
        when it lists the files. :raises TooLargeError: there are too many files, or they are nested too deeply."""
        place = proc_path(above, name)
        strip_xattrs(place)
        status = os.lstat(place)
        if stat.S_ISDIR(status.st_mode):
            self._clean_inside(path, name, above, 1)
        else:
            plain_mode(place, status)

    def _clean_inside(self, path: str, name: str, above: int, depth: int) -> None:
        check_depth(depth)
        with opened(name, above) as inner:
            times, base = os.fstat(inner), proc_path(inner)
            others, folders = [], []
            with os.scandir(inner) as entries:
                for entry in entries:
                    self._entries += 1
                    if self._entries > MAX_ENTRIES:
                        raise TooLargeError(f"there are more than {MAX_ENTRIES:,} files")
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                        others.append(entry.name)
                        continue
                    strip_xattrs(f"{base}/{entry.name}")
            for each in others:
                if not is_whiteout(os.lstat(each, dir_fd=inner)):
                    self._on_drop(f"{path}/{each}")
                with changeable(inner):
                    os.unlink(each, dir_fd=inner)
            for each in folders:
                self._clean_inside(f"{path}/{each}", each, inner, depth + 1)
            if others:
                os.utime(inner, ns=(times.st_atime_ns, times.st_mtime_ns))


def clean_layer(overlay: Overlay) -> list[str]:
    """Clean an overlay of a layer that commands will use again. The kernel's notes stay, and so do the whiteouts,
    except those that hide nothing. No command may be running in the layer. Return the absolute paths of the dropped
    files in the workspace.

    :raises TooLargeError: directories are nested too deeply.
    """
    dropped: list[str] = []

    def walk(above: int, below: int | None, folder: str, depth: int) -> None:
        check_depth(depth)
        with os.scandir(above) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            status = os.lstat(name, dir_fd=above)
            path, kind = f"{folder}/{name}", kind_of(status.st_mode)
            if kind == "directory":
                before = status_of(name, below)
                with opened(name, above) as inner:
                    if before is None or not stat.S_ISDIR(before.st_mode) or has_xattr(inner, "opaque"):
                        walk(inner, None, path, depth + 1)
                    else:
                        with opened(name, below if below is not None else above) as lower:
                            walk(inner, lower, path, depth + 1)
            elif kind == "file":
                plain_mode(proc_path(above, name), status)
            elif kind == "other" and (below is None or not is_whiteout(status)):
                if not is_whiteout(status):
                    dropped.append(path)
                with changeable(above):
                    os.unlink(name, dir_fd=above)

    with opened_pair(overlay) as (above, below):
        walk(above, below, str(overlay.root), 0)
    return dropped
