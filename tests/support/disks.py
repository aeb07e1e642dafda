"""Full, read-only and network-like disks for tests, which work on any machine.

A limit on file sizes works everywhere and can be lifted while the process runs. A small file system is more
realistic, but not every machine may mount one.
"""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FullDisk", "full_disk", "unprivileged", "without_shared_memory"]


class FullDisk:
    """A directory whose disk can be full. `words` is the error text that the system gives."""

    words = "cannot be read or written (disk I/O error)"

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fill(self, pid: int) -> None:
        """From now on no file of the process can grow."""
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    def free(self, pid: int) -> None:
        """From now on files can grow again."""
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class SmallDisk(FullDisk):
    """A file system of a few megabytes."""

    words = "cannot grow: the disk is full"

    def fill(self, pid: int) -> None:
        with (self.directory / "filler").open("wb", buffering=0) as filler:
            for size in (65_536, 4_096, 1):
                try:
                    while filler.write(b"x" * size):
                        pass
                except OSError:
                    continue

    def free(self, pid: int) -> None:
        (self.directory / "filler").unlink()


@contextmanager
def full_disk(directory: Path) -> Iterator[FullDisk]:
    """A directory below `directory` on a disk that can be filled: a real file system if mounting is allowed."""
    place = directory / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield FullDisk(place)
        return
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)


def unprivileged(argv: list[str]) -> list[str]:
    """The command `argv` without root's privilege to ignore file modes."""
    drop = f"import ctypes, os, sys; prctl = ctypes.CDLL(None).prctl; {DROP}; os.execvp(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", drop, *argv]


WITHOUT_PRIVILEGE = """
import ctypes
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for index in range(2):
    sets[index] &= ~0b110
assert libc.capset(header, sets) == 0
"""
"""Code that drops the same capabilities in the process that runs it."""
DROP = "[prctl(24, capability, 0, 0, 0) for capability in (1, 2)]"
"""Drops the capabilities to write (CAP_DAC_OVERRIDE) and read (CAP_DAC_READ_SEARCH) any file."""


def without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make SQLite connect as on a disk without shared memory (VFS `unix-none`), where WAL is impossible."""
    connect = sqlite3.connect

    def connected(path: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(f"{path}&vfs=unix-none" if options.get("uri") else path, **options)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connected)
