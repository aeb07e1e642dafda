"""Finds the Unix sockets on which other programs listen."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

_TABLE = Path("/proc/net/unix")
_FIELDS_BEFORE_PATH = 7


def listening_sockets(allowed: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths of all Unix sockets on this machine that a program has open now, except those that are in
    `allowed` or in a directory in `allowed`. Sockets of other network namespaces are not found. This call blocks."""
    found = dict.fromkeys(Path(os.path.realpath(path)) for path in _bound_paths())
    return tuple(path for path in found if not any(map(path.is_relative_to, allowed)))


def _bound_paths() -> Iterator[str]:
    """Yield the paths in the kernel's table of Unix sockets at which there still is a socket."""
    try:
        lines = _TABLE.read_bytes().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split(None, _FIELDS_BEFORE_PATH)
        path = os.fsdecode(fields[-1])
        try:
            if len(fields) > _FIELDS_BEFORE_PATH and os.path.isabs(path) and stat.S_ISSOCK(os.stat(path).st_mode):
                yield path
        except OSError:
            continue
