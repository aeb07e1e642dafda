"""Directories that belong to a living process. If this process is killed, the next one removes them.

The process that made a directory holds the lock of a file in it until it ends. A process id in the directory's name
would not be enough: a crow in a container may share /tmp, but its process ids are different.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from crow.tools.trees import remove_tree

if sys.platform != "win32":
    import fcntl

Kind: TypeAlias = Literal["output", "probe", "server", "session"]
_UNFINISHED_S = 3_600


@dataclass(frozen=True, slots=True)
class TemporaryDirectory:
    """A directory that only this user can access. `remove` must be called at the end."""

    path: Path
    """With links resolved."""
    lock: int
    """The open lock file."""

    @classmethod
    def create(cls, kind: Kind, place: Path | None = None) -> TemporaryDirectory:
        """Make a directory in `place`, by default among the system's temporary files. Remove those of the same kind
        whose process has died. :raises OSError: it cannot be made."""
        folder = Path(os.path.realpath(place or tempfile.gettempdir()))
        _remove_left_over(folder, f"crow-{kind}-")
        path = folder / f"crow-{kind}-{secrets.token_hex(8)}"
        return cls(path, make_owned(path))

    def remove(self) -> None:
        """Remove the directory with everything in it, as far as possible."""
        with suppress(OSError):
            remove_tree(self.path)
        os.close(self.lock)


def make_owned(directory: Path) -> int:
    """Make a directory that only this user can access. Return its open lock file, which says that a living process owns
    the directory. :raises OSError: it cannot be made."""
    # other processes leave a directory with this name alone, so none removes it before the lock is held
    new = directory.with_name(f"new-{directory.name}")
    new.mkdir(mode=0o700)
    try:
        lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _lock(lock)
        new.rename(directory)
    except OSError:
        remove_tree(new)
        raise
    return lock


def is_unfinished(path: Path) -> bool:
    """Return whether a process is making or removing a directory now. After an hour it is taken for the left-over of a
    killed process."""
    if not path.name.startswith(("new-", "gone-")):
        return False
    try:
        return path.stat().st_mtime > time.time() - _UNFINISHED_S
    except OSError:  # it has been renamed or removed
        return True


@contextmanager
def ownerless(directory: Path) -> Iterator[bool]:
    """Yield whether no living process owns a directory. If so, this process owns it until the block ends."""
    try:
        # a process may have removed this file, but not all of the rest
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _lock(lock)
    finally:
        os.close(lock)


def _lock(handle: int) -> bool:
    """Return whether this process has got the lock of an open file. False on systems and file systems without locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left_over(folder: Path, prefix: str) -> None:
    """Remove the user's directories whose process has died."""
    if sys.platform == "win32":
        return
    for path in (*folder.glob(f"{prefix}*"), *folder.glob(f"new-{prefix}*")):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not is_unfinished(path):
                with ownerless(path) as is_free:
                    if is_free:
                        remove_tree(path)
