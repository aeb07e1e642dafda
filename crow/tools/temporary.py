"""Temporary directories that do not stay for ever if their process is killed.

The process that made a directory holds the lock of a file in it until it ends. The next process that makes such a
directory removes those whose lock nobody holds. A process id in the name would not do: a crow in a container may share
/tmp, but not the ids.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from crow.tools.trees import remove_tree

if sys.platform != "win32":
    import fcntl

Kind: TypeAlias = Literal["output", "probe", "server", "session"]
_UNFINISHED = "crow-new-"
"""The name of a directory whose lock is not held yet begins with this."""
_UNFINISHED_S = 3_600
"""A directory that has had such a name for so long was left over by a process that was killed while it made it."""


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
        _remove_left_over(folder, kind)
        new = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
        try:
            lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            _lock(lock)
            # the directory gets the name that other processes search for only after the lock is held
            return cls(new.rename(folder / f"crow-{kind}-{new.name.removeprefix(_UNFINISHED)}"), lock)
        except OSError:
            remove_tree(new)
            raise

    def remove(self) -> None:
        """Remove the directory with everything in it, as far as possible."""
        with suppress(OSError):
            remove_tree(self.path)
        os.close(self.lock)


def _lock(handle: int) -> bool:
    """Return whether this process has got the lock of an open file. False on file systems without locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left_over(folder: Path, kind: Kind) -> None:
    """Remove the user's directories whose process has died."""
    if sys.platform == "win32":
        return
    for path in (*folder.glob(f"crow-{kind}-*"), *folder.glob(f"{_UNFINISHED}*")):
        with suppress(OSError):
            status = path.lstat()
            is_being_made = path.name.startswith(_UNFINISHED) and status.st_mtime > time.time() - _UNFINISHED_S
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or is_being_made:
                continue
            # a process may have removed this file, but not all of the rest
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                if _lock(lock):
                    remove_tree(path)
            finally:
                os.close(lock)
