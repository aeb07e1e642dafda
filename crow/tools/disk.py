"""Reads, replaces and removes files on the local disk at paths that were resolved and checked before.

A path whose links were resolved contains no link. If somebody has put a link into it since then, it now leads to
another file. The functions here notice that, and raise an error instead of using the other file.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat as modes
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from unicodedata import normalize

from crow.tools import FileStat

_MAX_LINK_ENTRIES = 100_000
_MAX_NAMES = 10_000
"""In larger directories, names are not compared."""
_MAX_RESPELLED = 40
"""At most this many names in one path are replaced, because links may lead back to a replaced name without end."""
_MAX_TRIES = 3
"""How many times opening a path is tried, if the path leads elsewhere at the first try."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0) | _NO_LINK | getattr(os, "O_PATH", os.O_RDONLY)
_OPENS_FOLDERS = hasattr(os, "O_DIRECTORY") and os.open in os.supports_dir_fd
"""Whether this system can open a directory, and then work in it even if the directory's path changes."""


def as_on_disk(path: str) -> str:
    """Return `path` with its names spelled as on the disk. `path` contains no links.

    If a name in the path does not exist, but its directory has exactly one name that differs from it only in the
    Unicode normalization form, the path gets that name. If that name is a link, the link is resolved, too.
    """
    found = path
    for _ in range(_MAX_RESPELLED):
        if found.isascii() or os.path.lexists(found):
            return found
        rest: list[str] = []
        folder, name = os.path.split(found)
        while name and not os.path.lexists(folder):
            rest.insert(0, name)
            folder, name = os.path.split(folder)
        if (own := _same_name(folder, name)) is None:
            return found
        found = os.path.realpath(os.path.join(folder, own, *rest))
    return path


def _same_name(folder: str, name: str) -> str | None:
    """Return the only name in `folder` that is `name` in another Unicode normalization form, or None."""
    if name.isascii():
        return None
    wanted = normalize("NFC", name)
    try:
        with os.scandir(folder) as entries:
            first = [entry.name for entry in islice(entries, _MAX_NAMES + 1)]
    except OSError:
        return None
    same = [each for each in first if normalize("NFC", each) == wanted] if len(first) <= _MAX_NAMES else []
    return same[0] if len(same) == 1 else None


def file_id(path: Path) -> tuple[int, int] | None:
    """Return the device and inode number of a file; None if there is no such file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino)


def shared_inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode number of a regular file that has several names (hard links); None for anything
    else."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if modes.S_ISREG(found.st_mode) and found.st_nlink > 1 else None


def all_names(tops: Sequence[str], paths: Collection[Path]) -> Mapping[Path, tuple[tuple[str, ...], bool]]:
    """Map each of the `paths` that has several hard links to two values: its names at or below `tops`, and whether
    these are all of its names."""
    inodes = {path: inode for path in paths if (inode := shared_inode(path)) is not None}
    if not inodes:
        return {}
    found = names_in(tops, {inode: path.stat().st_nlink for path, inode in inodes.items()})
    return {path: (tuple(found[inode]), len(found[inode]) >= path.stat().st_nlink) for path, inode in inodes.items()}


def names_in(
    tops: Sequence[str], wanted: Mapping[tuple[int, int], int], limit: int = _MAX_LINK_ENTRIES
) -> Mapping[tuple[int, int], list[str]]:
    """Find the names of some files at or below `tops`. `wanted` maps the device and inode number of each file to the
    number of names to look for. Map the device and inode number of each file to the names that were found. Read at most
    `limit` directory entries, in the order of `tops`."""
    found: dict[tuple[int, int], list[str]] = {inode: [] for inode in wanted}
    numbers = {number for _, number in wanted}
    missing, left = sum(wanted.values()), limit
    seen: set[str] = set()

    def note(name: str, inode: tuple[int, int] | None) -> int:
        real = os.path.realpath(name)
        if inode not in found or real in seen:
            return 0
        seen.add(real)
        found[inode].append(real)
        return 1

    missing -= sum(note(top, file_id(Path(top))) for top in tops)
    waiting = [*reversed(dict.fromkeys(tops))]
    while waiting and left > 0 and missing > 0:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.inode() in numbers:
                        status = entry.stat(follow_symlinks=False)
                        missing -= note(entry.path, (status.st_dev, status.st_ino))
                    if left <= 0:
                        break
        except OSError:
            continue
    return found


def file_stat(path: Path, head: int = 0) -> FileStat:
    """Return the state of `path`, which need not exist. The state of a file includes its first `head` bytes.

    :raises OSError: the path cannot be read.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return FileStat(path=path, kind="missing")
    if not modes.S_ISREG(found.st_mode):
        return FileStat(path=path, kind="directory" if modes.S_ISDIR(found.st_mode) else "other")
    start = read_file(path, 0, head) if head else b""
    mode = modes.S_IMODE(found.st_mode)
    return FileStat(path=path, kind="file", size=found.st_size, mtime_ns=found.st_mtime_ns, mode=mode, head=start)


def read_file(path: Path, start: int, limit: int | None) -> bytes:
    """Return at most `limit` bytes of the file, beginning at byte `start`.

    :raises OSError: the file cannot be read, or is not a regular file.
    """
    with _open_resolved(path, FILE) as handle:
        if not modes.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        with open(handle, "rb", closefd=False) as file:
            file.seek(start)
            return file.read(-1 if limit is None else limit)


def replace_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace the file with `data` in one step. Keep the file's mode and owner, and create missing parent directories.
    If there is no file, the new one gets the permission bits `mode`.

    :raises OSError: the file could not be replaced; it is unchanged.
    """
    make_directories(path.parent)
    with open_folder(path.parent) as folder:
        temporary, target = f".{path.name[:60]}.{secrets.token_hex(4)}.tmp", path.name
        if folder is None:
            temporary, target = str(path.parent / temporary), str(path)
        try:
            _write_new_file(temporary, target, folder, data, mode)
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            if isinstance(error, OSError):  # the error must name the target, not the temporary file
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise


def make_directories(directory: Path) -> list[Path]:
    """Create `directory` and its missing parents. Return the new directories, outermost first. :raises OSError: see
    `_open_resolved`."""
    missing = list(takewhile(lambda path: not os.path.isdir(path), (directory, *directory.parents)))
    made = []
    for path in reversed(missing):
        with open_folder(path.parent) as folder, suppress(FileExistsError):
            os.mkdir(path if folder is None else path.name, dir_fd=folder)
            made.append(path)
    return made


def remove_file(path: Path) -> None:
    """Remove a file. :raises OSError: the file cannot be removed, or a link has been put into its path."""
    with open_folder(path.parent) as folder:
        os.unlink(path if folder is None else path.name, dir_fd=folder)


def _write_new_file(name: str, model: str, folder: int | None, data: bytes, mode: int | None) -> None:
    """Write a new file and flush it to disk. If the file `model` exists, copy its mode and, if possible, its owner.
    Otherwise the file gets the permission bits `mode`, if given. `name` and `model` are names in `folder`, or paths if
    `folder` is None."""
    try:
        like = os.stat(model, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        like = None
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    with open(handle, "wb") as file:
        file.write(data)
        if like is not None and modes.S_ISREG(like.st_mode) and hasattr(os, "fchown"):
            made = os.fstat(handle)
            if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
                with suppress(PermissionError):
                    os.fchown(handle, like.st_uid, like.st_gid)
            os.fchmod(handle, modes.S_IMODE(like.st_mode))
        elif mode is not None and hasattr(os, "fchmod"):
            os.fchmod(handle, mode & 0o777)
        file.flush()
        os.fsync(handle)


@contextmanager
def open_folder(path: Path) -> Iterator[int | None]:
    """Open the directory at a resolved path, and yield its handle, or None if this system cannot work in an open
    directory. :raises OSError: see `_open_resolved`."""
    if _OPENS_FOLDERS:
        with _open_resolved(path, _FOLDER) as handle:
            yield handle
    else:
        yield None


@contextmanager
def _open_resolved(path: Path, flags: int) -> Iterator[int]:
    """Open the file or directory at a resolved path, and yield its handle. :raises OSError: it cannot be opened, or a
    link has been put into the path."""
    for _ in range(_MAX_TRIES):  # try again: an editor may be replacing the file right now
        handle = os.open(path, flags)
        try:
            if os.path.realpath(path) == str(path) and _is_still_at(path, handle):
                yield handle
                return
        finally:
            os.close(handle)
    raise OSError(errno.ELOOP, "The path now leads elsewhere", str(path))


def _is_still_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False
