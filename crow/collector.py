"""Python's garbage collector while packages are imported.

What an import makes stays for the life of the process. Left alone, the collector walks all of it again and again: a
tenth of the time to start, and at the end a quarter of a second of the exit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]


@contextmanager
def importing() -> Iterator[None]:
    """The collector rests inside; what there is at the end is never walked again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
