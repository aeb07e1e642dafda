"""Removes directories that commands and servers filled."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIRECTORY = sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))


def remove_tree(path: str | Path, *, dir_fd: int | None = None) -> None:
    """Remove a directory, as far as possible: however deeply it is nested, and even parts that its owner cannot read.
    The kernel makes such parts for each overlay. Links are not followed, not even those that a running program puts in
    meanwhile. `path` may be relative to the open directory `dir_fd`. :raises OSError: something is left."""
    if os.rename not in os.supports_dir_fd:
        shutil.rmtree(path, dir_fd=dir_fd)
        return
    errors: list[OSError] = []
    with _opened(path, dir_fd) as top:
        waiting = _empty(top, top, errors)
        while waiting:
            name = waiting.pop()
            try:
                with _opened(name, top) as folder:
                    waiting += _empty(folder, top, errors)
                os.rmdir(name, dir_fd=top)
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    os.rmdir(path, dir_fd=dir_fd)


@contextmanager
def _opened(path: str | Path, dir_fd: int | None) -> Iterator[int]:
    """Open a directory whose content is to be removed. Its owner gets all rights in it."""
    try:
        handle = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    except PermissionError:
        _open_up(path, dir_fd)
        handle = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) & 0o700 != 0o700:
            os.fchmod(handle, 0o700)
        yield handle
    finally:
        os.close(handle)


def _open_up(path: str | Path, dir_fd: int | None) -> None:
    """Give the owner of a directory all rights in it, even if it cannot be opened."""
    if not hasattr(os, "O_PATH"):  # as on macOS, where `chmod` can be told not to follow links instead
        os.chmod(path, 0o700, dir_fd=dir_fd, follow_symlinks=False)
        return
    handle = os.open(path, _DIRECTORY | os.O_PATH, dir_fd=dir_fd)
    try:
        os.chmod(f"/proc/self/fd/{handle}", 0o700)
    finally:
        os.close(handle)


def _empty(folder: int, top: int, errors: list[OSError]) -> list[str]:
    """Remove the files of an open directory, and move its directories up to `top`, so that no path becomes too long.
    Return the names of the directories."""
    names = []
    with os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_directory in entries:
        try:
            if not is_directory:
                os.unlink(name, dir_fd=folder)
                continue
            moved = name if folder == top else secrets.token_hex(8)
            if moved != name:
                try:
                    os.rename(name, moved, src_dir_fd=folder, dst_dir_fd=top)
                except PermissionError:  # the kernel refuses to move a directory that its owner cannot write to
                    _open_up(name, folder)
                    os.rename(name, moved, src_dir_fd=folder, dst_dir_fd=top)
            names.append(moved)
        except OSError as error:
            errors.append(error)
    return names
