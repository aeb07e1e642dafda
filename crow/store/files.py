"""Gives a complete file its final name, without replacing another file."""

from __future__ import annotations

import os
from pathlib import Path


def move_to_new(part: Path, target: Path) -> bool:
    """Rename `part` to `target`, unless `target` exists. Return whether `part` was renamed. :raises OSError: `target`
    cannot be created."""
    try:
        os.link(part, target)
    except FileExistsError:
        return False
    except OSError:  # the disk does not support hard links
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        os.replace(part, target)
    else:
        part.unlink()
    return True
