"""Directories in memory, for tests that write much and test no disk: no flush waits for one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

__all__ = ["folder", "new_directory"]

_SHARED = "/dev/shm"
_ROOMY_BYTES = 1 << 30


@cache
def folder() -> str | None:
    """Return a directory of a file system in memory with room and with user's attributes; None if there is none."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=_SHARED) as file:
        os.setxattr(file.name, "user.crow", b"1")
        return _SHARED if shutil.disk_usage(_SHARED).free > _ROOMY_BYTES else None
    return None


@contextmanager
def new_directory() -> Iterator[Path]:
    """Make a directory, in memory if possible, and remove it at the end."""
    made = tempfile.mkdtemp(prefix="crow-tests-", dir=folder())
    try:
        yield Path(made).resolve()
    finally:
        shutil.rmtree(made, ignore_errors=True)
