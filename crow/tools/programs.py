"""Programs that crow runs of its own accord, found where no repository could have put them.

Strategy: the directories of PATH in order, without those that are relative or lie inside the workspace; of what is
found there, a link that leads into the workspace does not count either. Knows no program.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["found_program"]


def found_program(name: str, is_inside: Callable[[Path], bool]) -> str | None:
    """The absolute path of the first program of this name on PATH that is not inside the workspace, None without one.

    Where the workspace is the whole file system, everything on PATH counts.
    """
    is_everything = is_inside(Path(os.sep))
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if not os.path.isabs(directory):
            continue
        path = os.path.join(directory, name)
        if not os.access(path, os.X_OK) or not os.path.isfile(path):
            continue
        places = (Path(os.path.realpath(directory)), Path(os.path.realpath(path)))
        if is_everything or not any(map(is_inside, places)):
            return path
    return None
