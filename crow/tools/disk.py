"""Files of the local disk, by paths whose links and `..` were resolved before.

Strategy: what was judged is what is opened: a path that has come to lead elsewhere, by a link put into it meanwhile, is
refused, as is anything that could be waited for. A write goes to a temporary file beside the target, in a directory
held open, and takes its place in one step. All of it blocks; knows nothing of who asks.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat as modes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crow.tools import FileStat

__all__ = ["file_stat", "read_file", "replace_file"]

TRIES = 3
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
FILE = os.O_RDONLY | NO_LINK | getattr(os, "O_NONBLOCK", 0)
FOLDER = getattr(os, "O_DIRECTORY", 0) | NO_LINK | getattr(os, "O_PATH", os.O_RDONLY)
HOLDS_FOLDERS = hasattr(os, "O_DIRECTORY") and os.open in os.supports_dir_fd
"""Whether this system keeps a directory open, to do things in it wherever its path leads by then."""


def file_stat(path: Path, head: int = 0) -> FileStat:
    """What is at `path`, with the first `head` bytes of a file. :raises OSError:"""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return FileStat(path=path, kind="missing")
    if modes.S_ISDIR(found.st_mode):
        return FileStat(path=path, kind="directory", mtime_ns=found.st_mtime_ns)
    if not modes.S_ISREG(found.st_mode):
        return FileStat(path=path, kind="other", mtime_ns=found.st_mtime_ns)
    start = read_file(path, 0, head) if head else b""
    return FileStat(path=path, kind="file", size=found.st_size, mtime_ns=found.st_mtime_ns, head=start)


def read_file(path: Path, start: int, limit: int | None) -> bytes:
    """At most `limit` bytes from `start` on. :raises OSError: also of what is no regular file."""
    with opened(path, FILE) as handle:
        if not modes.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "It is no regular file", str(path))
        with open(handle, "rb", closefd=False) as file:
            file.seek(start)
            return file.read() if limit is None else file.read(limit)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path` in one step, with its mode and owner, making parent directories.

    :raises OSError: nothing has changed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with held(path.parent) as folder:
        temporary, target = f".{path.name[:60]}.{secrets.token_hex(4)}.tmp", path.name
        if folder is None:
            temporary, target = str(path.parent / temporary), str(path)
        try:
            write_whole(temporary, folder, data, like=present(target, folder))
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            if isinstance(error, OSError):  # of the file that is meant, not of the one on the way
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise


@contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """A directory, open; None where the system opens none. :raises OSError: as `opened`."""
    if HOLDS_FOLDERS:
        with opened(folder, FOLDER) as handle:
            yield handle
    else:
        yield None


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """What `path` leads to, without any link on the way. :raises OSError: by now there is one."""
    for _ in range(TRIES):  # it may just be replaced by another one, as editors save
        handle = os.open(path, flags)
        try:
            if os.path.realpath(path) == str(path) and is_still_at(path, handle):
                yield handle
                return
        finally:
            os.close(handle)
    raise OSError(errno.ELOOP, "It leads elsewhere by now", str(path))


def is_still_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def present(name: str, folder: int | None) -> os.stat_result | None:
    """The regular file of this name in a directory (None: a whole path), None if there is none."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if modes.S_ISREG(found.st_mode) else None


def write_whole(name: str, folder: int | None, data: bytes, *, like: os.stat_result | None) -> None:
    """Make a file that is on disk when this returns, with the mode and as far as possible the owner of another."""
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    with open(handle, "wb") as file:
        file.write(data)
        if like is not None and hasattr(os, "fchown"):
            made = os.fstat(handle)
            if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
                with suppress(PermissionError):
                    os.fchown(handle, like.st_uid, like.st_gid)
            os.fchmod(handle, modes.S_IMODE(like.st_mode))
        file.flush()
        os.fsync(handle)
