"""The state of a path, and system calls that copy and move files without losing any.

Most functions take a name in an open directory instead of a path, so that nobody can redirect them by swapping a
directory for a link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

if sys.platform != "win32":
    import fcntl

Kind: TypeAlias = Literal["absent", "file", "directory", "link", "other"]

MAX_DEPTH = 200
"""A tree whose directories are nested more deeply is refused: see :class:`TooLargeError`."""
MAX_ENTRIES = 1_000_000
OWN_XATTRS = "user.overlay."
"""The kernel keeps its own notes about an overlay in extended attributes with this prefix."""
_LABELS = tuple(f"security.{name}" for name in ("selinux", "SMACK64", "apparmor", "ima", "evm"))
"""Prefixes of the attributes that the kernel sets itself, some of them depending on the directory of a file. Other
attributes that begin with `security.`, such as a program's capabilities, are set by users."""
OPEN_DIRECTORY = sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))
_COPY_BYTES = 1 << 24
_FICLONE = 0x40049409
_NOREPLACE, EXCHANGE = 1, 2
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class TooLargeError(OSError):
    """A tree has too many entries, or is nested too deeply. Callers treat it like a tree that cannot be read."""


def check_depth(depth: int) -> None:
    """:raises TooLargeError: directories are nested too deeply."""
    if depth > MAX_DEPTH:
        raise TooLargeError(f"directories are nested more than {MAX_DEPTH} deep")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is at a path."""

    kind: Kind = "absent"
    mode: int = 0
    """The permissions."""
    size: int = 0
    """The length of a file, or the bytes that all files in a tree take on the disk."""
    mtime_ns: int = 0
    uid: int = 0
    gid: int = 0
    target: str = ""
    """Where a link leads."""
    tree: str = ""
    """A fingerprint of a directory with everything in it. Empty if only the directory itself counts."""
    files: int = 0
    """The number of files in a tree."""
    xattrs: tuple[tuple[str, str], ...] = ()
    """The extended attributes of a directory, with their values in hexadecimal digits."""
    digest: str = ""
    """The sha256 (hex) of a file's content, if it was read."""

    def matches(self, other: State) -> bool:
        """Return whether two states are those of the same file. Two files are the same if their modes and sizes are
        equal, and their times or digests, too. The times of directories do not count, because they change with every
        new file in the directory."""
        if self.kind != other.kind or self.tree != other.tree or self.target != other.target:
            return False
        if self.kind != "file":
            return self.kind == "link" or self.mode == other.mode
        if (self.mode, self.size) != (other.mode, other.size):
            return False
        return self.mtime_ns == other.mtime_ns or (self.digest != "" and self.digest == other.digest)


ABSENT = State()


@dataclass(slots=True)
class Walked:
    """What a walk over a tree has found."""

    newest_ns: int = 0
    """When something in the tree was changed last, in ns since the epoch."""
    newest: str = ""
    """The path that was changed at this time, relative to the tree."""
    entries: int = 0
    files: int = 0
    size: int = 0
    """In bytes on the disk."""
    is_own: Callable[[str, os.stat_result], bool] = lambda _path, _status: False
    """Returns whether crow itself made the last change of a path. Such a change does not count."""


def kind_of(mode: int) -> Kind:
    """Return the kind of a file with this mode."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


def is_whiteout(status: os.stat_result) -> bool:
    """Return whether this file in a layer stands for a deletion."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def status_of(name: str, directory: int | None) -> os.stat_result | None:
    """Return the status of a name in an open directory; None if there is no such file or directory."""
    if directory is None:
        return None
    try:
        return os.lstat(name, dir_fd=directory)
    except FileNotFoundError:
        return None


def state_of(name: str, directory: int, *, walked: Walked | None = None) -> State:
    """Return the state of a name in an open directory. A directory counts with everything in it."""
    status = status_of(name, directory)
    return ABSENT if status is None else state_with(status, name, directory, walked=walked)


def state_with(status: os.stat_result, name: str, directory: int, *, walked: Walked | None = None) -> State:
    """Return the state of a name in an open directory whose status is known. See :func:`state_of`."""
    walked = walked or Walked()
    _note_change(walked, status, "")
    kind = kind_of(status.st_mode)
    if kind != "directory":
        return State(
            kind=kind,
            mode=stat.S_IMODE(status.st_mode),
            size=0 if kind == "link" else status.st_size,
            mtime_ns=status.st_mtime_ns,
            uid=status.st_uid,
            gid=status.st_gid,
            target=os.readlink(name, dir_fd=directory) if kind == "link" else "",
            files=1,
        )
    with opened(name, directory) as handle:
        fingerprint = Fingerprint(walked)
        for path, each in walk(handle):
            fingerprint.add(path, each)
        return tree_state(status, handle, fingerprint)


class Fingerprint:
    """A digest of the names, kinds, modes, sizes and times in a tree. Of directories, only the names and modes
    count."""

    def __init__(self, walked: Walked) -> None:
        self.walked = walked
        self._digest = hashlib.sha256()

    def add(self, path: str, status: os.stat_result) -> None:
        """Add a path, relative to the tree. They must be added in the order of :func:`walk`."""
        walked, mode = self.walked, status.st_mode
        walked.entries += 1
        _note_change(walked, status, path)
        if stat.S_ISDIR(mode):
            text = f"{path}\0d{mode}\n"
        else:
            walked.files += 1
            walked.size += status.st_blocks * 512
            text = f"{path}\0{mode} {status.st_size} {status.st_mtime_ns if stat.S_ISREG(mode) else 0}\n"
        self._digest.update(os.fsencode(text))

    def hexdigest(self) -> str:
        """Return the digest."""
        return self._digest.hexdigest()


def tree_state(status: os.stat_result, directory: int, fingerprint: Fingerprint) -> State:
    """Return the state of an open directory with everything in it."""
    walked = fingerprint.walked
    own = meta_of(status, xattrs_of(directory))
    return replace(own, tree=fingerprint.hexdigest(), files=walked.files, size=walked.size)


def meta_of(status: os.stat_result, xattrs: tuple[tuple[str, str], ...]) -> State:
    """Return the state of a directory without its entries."""
    return State(
        kind="directory",
        mode=stat.S_IMODE(status.st_mode),
        mtime_ns=status.st_mtime_ns,
        uid=status.st_uid,
        gid=status.st_gid,
        xattrs=xattrs,
    )


def _note_change(walked: Walked, status: os.stat_result, path: str) -> None:
    if status.st_ctime_ns > walked.newest_ns and not walked.is_own(path, status):
        walked.newest_ns, walked.newest = status.st_ctime_ns, path


def walk(directory: int, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, os.stat_result]]:
    """Yield everything below an open directory with its status, directories first.

    :raises TooLargeError: the tree is nested too deeply, or has too many entries.
    """
    check_depth(depth)
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
        if len(found) > MAX_ENTRIES:
            raise TooLargeError(f"there are more than {MAX_ENTRIES:,} files")
        statuses = [(entry.name, entry.stat(follow_symlinks=False)) for entry in found]
    for name, status in statuses:
        path = f"{prefix}{name}"
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            with opened(name, directory) as inner:
                yield from walk(inner, f"{path}/", depth + 1)


@contextmanager
def opened(name: str, directory: int) -> Iterator[int]:
    """Open a directory in an open directory. In the block, the owner of the opened directory may read it whatever its
    mode was, so `fstat` may show another mode."""
    handle = open_directory(name, directory)
    try:
        with _granted(handle, 0o500):
            yield handle
    finally:
        os.close(handle)


def open_directory(name: str, directory: int) -> int:
    """Open a directory in an open directory, even if its owner may not read it."""
    try:
        return os.open(name, OPEN_DIRECTORY, dir_fd=directory)
    except PermissionError:
        path = proc_path(directory, name)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise
        os.chmod(path, stat.S_IMODE(status.st_mode) | 0o700)
        try:
            return os.open(name, OPEN_DIRECTORY, dir_fd=directory)
        finally:
            with suppress(FileNotFoundError):
                os.chmod(path, stat.S_IMODE(status.st_mode))


def changeable(directory: int) -> AbstractContextManager[None]:
    """Let the owner of an open directory change its entries temporarily. Commands may have made it read-only."""
    return _granted(directory, 0o300)


@contextmanager
def _granted(directory: int, rights: int) -> Iterator[None]:
    """Add `rights`, which are bits of a mode, to an open directory of this user until the block ends."""
    status = os.fstat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if mode & rights == rights or status.st_uid != os.geteuid():
        yield
        return
    os.fchmod(directory, mode | rights)
    try:
        yield
    finally:
        os.fchmod(directory, mode)


def proc_path(directory: int, name: str = "") -> str:
    """Return a path that leads to a name in an open directory, whatever the directory is called by now."""
    return f"/proc/self/fd/{directory}/{name}" if name else f"/proc/self/fd/{directory}"


def xattrs_of(handle: int | str) -> tuple[tuple[str, str], ...]:
    """Return the names and values (hex) of a file's extended attributes, without those that the kernel sets: see
    `OWN_XATTRS` and `_LABELS`. `handle` may be a path, whose last link is not followed."""
    with suppress(OSError):
        follow = isinstance(handle, int)
        names = os.listxattr(handle) if follow else os.listxattr(handle, follow_symlinks=False)
        wanted = sorted(name for name in names if not name.startswith((OWN_XATTRS, *_LABELS)))
        if isinstance(handle, int):
            return tuple((name, os.getxattr(handle, name).hex()) for name in wanted)
        return tuple((name, os.getxattr(handle, name, follow_symlinks=False).hex()) for name in wanted)
    return ()


def _own_xattrs(handle: int | str) -> tuple[str, ...]:
    """Return the names of the kernel's own attributes of a file, such as `opaque`."""
    with suppress(OSError):
        names = os.listxattr(handle) if isinstance(handle, int) else os.listxattr(handle, follow_symlinks=False)
        return tuple(name.removeprefix(OWN_XATTRS) for name in names if name.startswith(OWN_XATTRS))
    return ()


def has_xattr(handle: int | str, name: str) -> bool:
    """Return whether a file has one of the kernel's own attributes."""
    return name in _own_xattrs(handle)


def strip_xattrs(path: str) -> None:
    """Remove the kernel's own attributes from a file."""
    for name in _own_xattrs(path):
        with suppress(OSError):
            os.removexattr(path, f"{OWN_XATTRS}{name}", follow_symlinks=False)


def apply_meta(handle: int, state: State) -> None:
    """Give an open directory the mode, the time and the attributes of a state, as far as the user may."""
    status = os.fstat(handle)
    if (status.st_uid, status.st_gid) != (state.uid, state.gid):
        with suppress(OSError):
            os.chown(handle, state.uid, state.gid)
    _set_xattrs(handle, state.xattrs)
    os.chmod(handle, state.mode)
    os.utime(handle, ns=(status.st_atime_ns, state.mtime_ns))


def _set_xattrs(handle: int, wanted: tuple[tuple[str, str], ...]) -> None:
    present = dict(xattrs_of(handle))
    for name, value in wanted:
        if present.pop(name, None) != value:
            with suppress(OSError):
                os.setxattr(handle, name, bytes.fromhex(value))
    for name in present:
        with suppress(OSError):
            os.removexattr(handle, name)


class Copier:
    """Copies files and trees with their modes, times, attributes, holes and the hard links among them. Sockets, devices
    (whiteouts among them) and named pipes are left out."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], tuple[int, str]] = {}
        self._handles: list[int] = []

    def copy(self, name: str, source: int, to: str, target: int) -> bool:
        """Copy `name` in the open directory `source` to the new name `to` in the open directory `target`. Return
        whether there was something to copy."""
        try:
            return self._copy(name, source, to, target, 0)
        finally:
            self._links.clear()
            while self._handles:
                os.close(self._handles.pop())

    def _copy(self, name: str, source: int, to: str, target: int, depth: int) -> bool:
        status = os.lstat(name, dir_fd=source)
        kind = kind_of(status.st_mode)
        if kind == "other":
            return False
        check_depth(depth)
        if kind == "directory":
            self._copy_directory(name, source, to, target, depth, status)
            return True
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self._links:
            handle, first = self._links[key]
            os.link(first, to, src_dir_fd=handle, dst_dir_fd=target, follow_symlinks=False)
            return True
        if kind == "link":
            os.symlink(os.readlink(name, dir_fd=source), to, dir_fd=target)
        else:
            copy_file(name, source, to, target)
        copy_meta(name, source, to, target, status)
        if status.st_nlink > 1 and len(self._handles) < 256:
            self._handles.append(os.dup(target))
            self._links[key] = (self._handles[-1], to)
        return True

    def _copy_directory(self, name: str, source: int, to: str, target: int, depth: int, status: os.stat_result) -> None:
        os.mkdir(to, 0o700, dir_fd=target)
        with opened(name, source) as inner, opened(to, target) as new:
            with os.scandir(inner) as entries:
                names = [entry.name for entry in entries]
            for each in names:
                with suppress(FileNotFoundError):  # a program that still runs may remove files meanwhile
                    self._copy(each, inner, each, new, depth + 1)
        copy_meta(name, source, to, target, status)


def copy_meta(name: str, source: int, to: str, target: int, status: os.stat_result) -> None:
    """Copy owner, attributes, mode and times."""
    own, new = proc_path(source, name), proc_path(target, to)
    made = os.lstat(new)
    if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
        with suppress(OSError):
            os.chown(new, status.st_uid, status.st_gid, follow_symlinks=False)
    for attribute, value in xattrs_of(own):
        with suppress(OSError):
            os.setxattr(new, attribute, bytes.fromhex(value), follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(new, stat.S_IMODE(status.st_mode))
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def copy_file(name: str, source: int, to: str, target: int) -> None:
    """Copy the content of a regular file into a new file, if possible without copying the blocks."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    reader = os.open(name, flags, dir_fd=source)
    try:
        status = os.fstat(reader)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        writer = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            try:
                fcntl.ioctl(writer, _FICLONE, reader)
            except OSError:
                _copy_data(reader, writer, status.st_size)
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _copy_data(reader: int, writer: int, size: int) -> None:
    """Copy the parts of a file that hold data, and leave holes as they are."""
    os.ftruncate(writer, size)
    position = 0
    while position < size:
        try:
            position = os.lseek(reader, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = min(os.lseek(reader, position, os.SEEK_HOLE), size)
        os.lseek(reader, position, os.SEEK_SET)
        os.lseek(writer, position, os.SEEK_SET)
        while position < end:
            moved = os.sendfile(writer, reader, None, min(end - position, _COPY_BYTES))
            if not moved:
                return
            position += moved


def folders_around(paths: Iterable[str]) -> set[str]:
    """Return all directories around absolute paths."""
    found: set[str] = set()
    for path in paths:
        folder = os.path.dirname(path)
        while folder not in found:
            found.add(folder)
            folder = os.path.dirname(folder)
    return found


def read_file(path: str | Path, limit: int) -> bytes | None:
    """Return the content of a regular file. None if it cannot be read, has more than `limit` bytes, or is something
    else, such as a link or a pipe."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(limit + 1)
    except OSError:
        return None
    return content if len(content) <= limit else None


def digest_of(name: str, directory: int) -> str:
    """Return the sha256 (hex) of a regular file. :raises OSError: it cannot be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=directory), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def same_content(one: int, own: str, other: int, theirs: str, limit: int) -> bool:
    """Return whether two regular files of the same size have the same bytes. Files with more than `limit` bytes count
    as different."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(own, flags, dir_fd=one), "rb") as left, open(os.open(theirs, flags, dir_fd=other), "rb") as right:
        if os.fstat(left.fileno()).st_size > limit:
            return False
        return left.read(limit + 1) == right.read(limit + 1)


def mount_of(path: str | Path) -> tuple[int, int]:
    """Return the numbers of a directory's device and mount. Files can be moved between two directories only if both
    numbers are equal: the kernel refuses moves even between two mounts of one device."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{handle}", "rb") as file:
            mount = next((int(line.split()[1]) for line in file if line.startswith(b"mnt_id:")), 0)
        return os.fstat(handle).st_dev, mount
    finally:
        os.close(handle)


def rename_new(name: str, source: int, to: str, target: int) -> None:
    """Rename a file, but never over another one. :raises FileExistsError: there is a file with this name."""
    try:
        renameat2(name, source, to, target, _NOREPLACE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if status_of(to, target) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to) from None
        os.rename(name, to, src_dir_fd=source, dst_dir_fd=target)


def renameat2(name: str, source: int, to: str, target: int, flags: int) -> None:
    """Rename a file with flags of the kernel. :raises OSError: the kernel refused."""
    if _libc().renameat2(source, os.fsencode(name), target, os.fsencode(to), flags) != 0:
        number = _last_error()
        raise OSError(number, os.strerror(number), name)


def sync_file_system(handle: int) -> None:
    """Flush the file system of an open file to the disk."""
    if _libc().syncfs(handle) != 0:
        number = _last_error()
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> Any:
    """Return the C library."""
    import ctypes  # takes 10 ms, and only commands that change files need it

    return ctypes.CDLL(None, use_errno=True)


def _last_error() -> int:
    """Return the error number of the last call of the C library."""
    import ctypes  # see above

    return ctypes.get_errno()
