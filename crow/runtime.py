"""Tunes this process: its garbage collection, its free memory, and its protection from other processes."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_ENV_START = 47
"""The position of the environment's first address in /proc/self/stat, counted from 0 at the first field after the
program's name."""

_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK_BYTES = 1024 * 1024


def own_command(*arguments: str) -> list[str]:
    """Return the command that starts crow once more, with the Python that runs this process.

    Python must not import anything from the directory in which it starts, which may be a workspace. If crow runs from
    an archive with its own Python, that Python must ignore PYTHONPATH, too.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "crow", *arguments]


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection while packages are imported, and exclude the imported objects from later collections.

    The imported objects exist until the process ends, so collections find no garbage among them. Visiting these objects
    would take a tenth of the start time, and 250 ms at exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def models_built_on_use() -> Iterator[None]:
    """Make pydantic work later: a model that is defined during the block is built when it is first used.

    The protocol's SDK defines 280 models, and a connection uses about ten. Building all of them takes a seventh of the
    time until `initialize` is answered.
    """
    from pydantic import BaseModel  # takes 60 ms, and only the protocol's SDK is imported in this way

    BaseModel.model_config["defer_build"] = True  # every model inherits this setting
    try:
        yield
    finally:
        del BaseModel.model_config["defer_build"]


def free_large_blocks_at_once() -> None:
    """Make glibc return each large block of memory to the system as soon as it is freed.

    By default, after the first large block has been freed, glibc takes large blocks from its heap, which never shrinks.
    Without this function, 100 MB stayed allocated after an answer of 12 MB.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def trim() -> None:
    """Return free memory to the system. This takes some milliseconds, but other threads continue meanwhile."""
    _call_glibc("malloc_trim", 0)


def forbid_inspection() -> None:
    """Prevent other processes of this user from reading the memory and the initial environment of this process.

    This also prevents core files. Programs that this process starts can be inspected. But they write no core files
    either, unless they raise their own limit. Root can still read the memory and the environment. The protection from
    other processes works only on Linux.
    """
    _call_glibc("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has no such module

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def wipe_environment(is_secret: Callable[[str, str], bool]) -> None:
    """Overwrite the values of secret variables in the memory that /proc/PID/environ shows. This works only on Linux.

    `is_secret` is called with the name and the value of each variable. `os.environ` has copies of the values, so it
    still contains them.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = map(int, fields[_ENV_START : _ENV_START + 2])
    except (OSError, ValueError):
        return
    if not 0 < start < end:
        return
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if value and is_secret(os.fsdecode(name), os.fsdecode(value)):
            ctypes.memset(at + len(name) + len(equals), ord("*"), len(value))
        at += len(entry) + 1


def adopt_orphans() -> bool:
    """Make this process the new parent of every descendant whose own parent has ended. Return whether that worked. This
    works only on Linux."""
    return _call_glibc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _call_glibc(name: str, *arguments: int) -> int | None:
    """Call a function of the C library. Return its result, or None if there is no such function."""
    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library, or Windows, where CDLL needs a name
        return None
    result: int = function(*map(ctypes.c_long, arguments))
    return result
