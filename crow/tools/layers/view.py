"""The files of a workspace as the commands in a layer see them, for crow's own process.

Each access looks a path up in the layer first, and then in the workspace. So changes by others in the workspace are
seen at once, except in files that the layer has changed. No command may run in the layer while crow writes to it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from crow.tools.layers.place import Layer, Overlay
from crow.tools.layers.states import (
    EXCHANGE,
    OPEN_DIRECTORY,
    OWN_XATTRS,
    UNSUPPORTED,
    copy_meta,
    has_xattr,
    is_whiteout,
    proc_path,
    renameat2,
)

_MAX_LINKS = 40
_WHITEOUT_MODE = stat.S_IFCHR


class View:
    """The merged files of a layer and of the trees below it."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._read: dict[Path, int] = {}
        """For each file that was read, the time of the last change of the workspace's version (ctime, in ns), as it was
        when the file was read. 0 if the layer's version was read, or there was no file."""

    def resolve(self, path: Path) -> Path:
        """Return an absolute path with its links resolved, as a command in the layer would. The file need not exist.

        :raises OSError: there are too many links.
        """
        waiting = [part for part in reversed(path.parts) if part != os.sep]
        done, links = Path(os.sep), 0
        while waiting:
            part = waiting.pop()
            if part in (".", ".."):
                done = done.parent if part == ".." else done
                continue
            place = self.locate(done / part)
            try:
                target = None if place is None else os.readlink(place)
            except OSError:  # it is no link, or there is nothing
                target = None
            if target is None:
                done /= part
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if target.startswith(os.sep):
                done = Path(os.sep)
            waiting += [each for each in reversed(Path(target).parts) if each != os.sep]
        return done

    def locate(self, path: Path) -> Path | None:
        """Return where the content of an absolute path is on the disk; None if the layer has deleted it. Links on the
        way must be resolved."""
        return self._layer.locate(path)

    def located(self, path: Path) -> Path:
        """Return where the content of a resolved path is. :raises FileNotFoundError: the layer has deleted it."""
        place = self.locate(path)
        if place is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return place

    def note_read(self, path: Path) -> None:
        """Remember which version of the workspace's file is read now."""
        self._read[path] = _changed_ns(path) if self._is_below(path) else 0

    def prepare_write(self, path: Path) -> tuple[Path, int | None]:
        """Make the directories for the layer's version of a file. Return the path of this version, and the mode that it
        must get if it replaces the workspace's version; None if it does not.

        :raises OSError: somebody else has changed the workspace's file since it was read, the path is a directory or is
            outside the workspace, or a directory cannot be made.
        """
        overlay, parts = self._split(path)
        mode = None
        if self._is_below(path):
            status = path.lstat()
            if self._read.get(path, status.st_ctime_ns) != status.st_ctime_ns:
                raise OSError(errno.EBUSY, "somebody else has changed the file meanwhile; read it again", str(path))
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            mode = stat.S_IMODE(status.st_mode)
        _make_folders(overlay, parts[:-1])
        return overlay.upper.joinpath(*parts), mode

    def remove(self, path: Path) -> None:
        """Remove a file from the view. :raises OSError: there is none, or it cannot be removed."""
        overlay, parts = self._split(path)
        place = self.located(path)
        if place.is_dir() and not place.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not _shows_below(overlay, parts):
            place.unlink()
            return
        _make_folders(overlay, parts[:-1])
        whiteout = overlay.upper.parent / _new_name()
        os.mknod(whiteout, _WHITEOUT_MODE, 0)
        os.replace(whiteout, overlay.upper.joinpath(*parts))

    def _is_below(self, path: Path) -> bool:
        """Return whether the content of a path is the workspace's."""
        return self.locate(path) == path and os.path.lexists(path)

    def _split(self, path: Path) -> tuple[Overlay, Sequence[str]]:
        for overlay in self._layer.overlays:
            if path != overlay.root and path.is_relative_to(overlay.root):
                return overlay, path.relative_to(overlay.root).parts
        raise PermissionError(errno.EACCES, "the path is outside the workspace", str(path))


def _changed_ns(path: Path) -> int:
    """Return when a file was last changed in any way; 0 if there is none."""
    try:
        return path.lstat().st_ctime_ns
    except OSError:
        return 0


def _shows_below(overlay: Overlay, parts: Sequence[str]) -> bool:
    """Return whether the tree below a layer has something at a path, and no directory of the layer hides it."""
    above = overlay.upper
    for part in parts[:-1]:
        above /= part
        try:
            status = above.lstat()
        except (FileNotFoundError, NotADirectoryError):
            break
        if not stat.S_ISDIR(status.st_mode) or has_xattr(str(above), "opaque"):
            return False
    return os.path.lexists(overlay.root.joinpath(*parts))


def _make_folders(overlay: Overlay, parts: Sequence[str]) -> None:
    """Make directories in the layer, as copies of those below it. :raises OSError: one of them is a file, or it cannot
    be made."""
    above, below, shows = overlay.upper, overlay.root, True
    # Each directory is made beside the layer's files, then moved in, so that a killed crow leaves no unfinished one.
    layer = os.open(overlay.upper.parent, OPEN_DIRECTORY)
    try:
        for part in parts:
            parent = os.open(above, OPEN_DIRECTORY)
            try:
                above, below = above / part, below / part
                _make_folder(layer, parent, part, below if shows else None)
            finally:
                os.close(parent)
            shows = shows and not has_xattr(str(above), "opaque") and below.is_dir() and not below.is_symlink()
    finally:
        os.close(layer)


def _make_folder(layer: int, parent: int, name: str, below: Path | None) -> None:
    try:
        status = os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        status = None
    if status is not None and stat.S_ISDIR(status.st_mode):
        return
    if status is not None and not is_whiteout(status):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
    is_hidden = status is not None
    is_copy = not is_hidden and below is not None and os.path.lexists(below)
    if is_copy and below is not None and (below.is_symlink() or not below.is_dir()):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(below))
    new = _new_name()
    os.mkdir(new, 0o777, dir_fd=layer)
    try:
        if is_hidden:  # what the workspace has there was deleted in the layer
            os.setxattr(proc_path(layer, new), f"{OWN_XATTRS}opaque", b"y")
            _replace_whiteout(layer, new, parent, name)
            return
        if is_copy and below is not None:
            _with_meta(below, layer, new)
        os.rename(new, name, src_dir_fd=layer, dst_dir_fd=parent)
    except BaseException:
        with suppress(OSError):
            os.rmdir(new, dir_fd=layer)
        raise


def _replace_whiteout(layer: int, new: str, parent: int, name: str) -> None:
    """Put a directory where a whiteout is, at one instant. A kill must not bring back what the whiteout hides."""
    try:
        renameat2(new, layer, name, parent, EXCHANGE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        os.unlink(name, dir_fd=parent)
        os.rename(new, name, src_dir_fd=layer, dst_dir_fd=parent)
    else:
        os.unlink(new, dir_fd=layer)


def _new_name() -> str:
    return f"new-{secrets.token_hex(8)}"


def _with_meta(below: Path, parent: int, name: str) -> None:
    """Give a new directory the mode, times and attributes of the workspace's one."""
    source = os.open(below.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        copy_meta(below.name, source, name, parent, below.lstat())
    finally:
        os.close(source)
