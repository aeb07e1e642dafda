"""Names the files whose changes were thrown away with the layer of a command that may only read."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from crow.domain.text import plural

_MAX_ENTRIES = 3_000
"""At most this many entries of the layers are looked at."""
_MAX_NAMES = 10
_MAX_SINGLE = 3
"""If more files of a directory were thrown away, only their number is named."""
_COMPARED_BYTES = 1_000_000
_CACHES = frozenset(
    {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".cache", ".import_linter_cache"}
)
"""Programs write these whatever they do, and nobody misses them."""


def describe_discarded(layers: Path) -> tuple[str, ...]:
    """Return a sentence about the changes in `layers`, or nothing if there are none that matter."""
    names: list[str] = []
    more = 0
    for number, name in enumerate(_changes(layers)):
        if number >= _MAX_ENTRIES:
            more = 1
            break
        names.append(name)
    if not names:
        return ()
    counts = Counter(map(_folder, names))
    shown: dict[str, None] = {}
    for name in names:
        folder = _folder(name)
        is_git = f"/{folder}".endswith("/.git")
        many = is_git or (folder and counts[folder] > _MAX_SINGLE)
        shown[f"{folder}/ ({plural(counts[folder], 'file')})" if many else name] = None
    listed = ", ".join([*shown][:_MAX_NAMES])
    rest = len(shown) - _MAX_NAMES
    others = " and more" if more else f" and {rest} more" if rest > 0 else ""
    return (f'Discarded, because access was "read": {listed}{others}. Use access "write" to keep changes.',)


def _folder(name: str) -> str:
    """Return the directory with which a file is counted. All files below `.git` are counted together."""
    before, git, _ = f"/{name}".partition("/.git/")
    return f"{before}/.git"[1:] if git else os.path.dirname(name)


def _changes(layers: Path) -> Iterator[str]:
    """Yield the paths, relative to the directory below the layer, of files that were written or deleted."""
    for upper in sorted(layers.glob("*-upper")):
        tree = os.path.realpath(upper.with_name(upper.name.removesuffix("-upper") + "-tree"))
        for directory, folders, files in os.walk(upper):
            folders[:] = sorted(set(folders) - _CACHES)
            for name in sorted(files):
                path = os.path.join(directory, name)
                relative = os.path.relpath(path, upper)
                below = os.path.join(tree, relative)
                if os.path.dirname(relative) == ".git" and name.startswith("index"):
                    continue  # `git status` refreshes the index
                try:
                    if _is_deletion(path):
                        yield f"{relative} (deleted)"
                    elif not _is_same(path, below):
                        yield relative
                except OSError:
                    yield relative


def _is_deletion(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_same(path: str, below: str) -> bool:
    """Return whether a file of a layer has the content of the file below it, as after `touch`."""
    mine = os.lstat(path)
    if not os.path.lexists(below):
        return False
    theirs = os.lstat(below)
    if stat.S_ISLNK(mine.st_mode) and stat.S_ISLNK(theirs.st_mode):
        return os.readlink(path) == os.readlink(below)
    if not (stat.S_ISREG(mine.st_mode) and stat.S_ISREG(theirs.st_mode)):
        return False
    if mine.st_size != theirs.st_size or mine.st_size > _COMPARED_BYTES:
        return False
    with open(path, "rb") as one, open(below, "rb") as other:
        return one.read() == other.read()
