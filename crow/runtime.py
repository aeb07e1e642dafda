"""Python's garbage collector while packages are imported.

What an import makes stays for the life of the process. Left alone, the collector walks all of it again and again: a
tenth of the time to start, and at the end a quarter of a second of the exit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["importing", "keep_little", "trim"]


@contextmanager
def importing() -> Iterator[None]:
    """The collector rests inside; what there is at the end is never walked again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# FROM heap: Memory that the C library keeps for itself, where that can be told otherwise.
#
# glibc takes the freeing of one large block as a sign that more of that size will come, and cuts such blocks from
# then on
# out of a heap that it does not give back: behind an answer of 12 MB a hundred megabytes stood empty for the rest of
# the
# process. With a fixed bound each large block is mapped by itself, and gone when it is freed; what small ones leave
# is
# given back when nothing runs.


M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1024 * 1024


def keep_little() -> None:
    """Have large blocks go back to the system as soon as they are freed."""
    _call("mallopt", M_MMAP_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Give back what lies free, for some milliseconds; other threads go on meanwhile."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of glibc; does nothing where the C library is another."""
    import ctypes

    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # on Windows there is no library without a name
        return
    function(*arguments)
