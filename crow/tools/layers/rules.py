"""Decides which files in a layer are protected.

In `.git`, objects, refs and most other files are not protected, because ordinary git commands change them. Only the
files that can make git run programs or read settings from elsewhere are: see `_is_git_protected`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from crow.domain.protected_names import REPOSITORY_PARTS, ProtectedNames, fold_name
from crow.tools.git import UNFINISHED, commands_in, contains_any
from crow.tools.layers.changes import LookRules
from crow.tools.layers.ignored import IgnoreRules
from crow.tools.layers.place import Layer
from crow.tools.layers.states import read_file
from crow.tools.protection import FOLDED_SECRET_PLACES, ProtectedPaths, folded_home_secrets

_GIT_FOLDERS = frozenset({".git", "git~1"})
_GIT_PROTECTED = frozenset({"config", "config.worktree", "commondir", "gitdir", "hooks", "remotes", "branches"})
"""Files and folders in a repository's own directory, usually `.git`, that make git run programs, or read settings from
elsewhere."""
_GIT_DATA = frozenset({"objects", "refs", "logs"})
_INNER = frozenset({"modules", "worktrees"})
"""Folders in a repository's own directory that contain the git directories of submodules and of linked worktrees."""
_SECRETS = re.compile("|".join(f"/{re.escape(place)}/" for place in FOLDED_SECRET_PLACES))
_FILE_BYTES = 1_000_000
_MAX_RECURSION = 100
"""In folders nested deeper than this, each file is checked in full: to check the folder first takes one recursive call
for each folder above it."""


def rules_for(
    layer: Layer, protected: ProtectedPaths, names: ProtectedNames, never: Sequence[str], programs: Sequence[Path]
) -> LookRules:
    """Return the rules that say which files in a layer are protected, and which ones git ignores. `never` has the paths
    that no tool may change, case-folded, as prefixes. `programs` are the directories from which crow runs."""
    roots = [str(overlay.root) for overlay in layer.overlays]
    named = protected.git.named(protected.git.around(f"{roots[0]}/x", protected.roots))
    run_by_git = (place for place in named if not contains_any(place, protected.roots))
    prefixes = tuple(f"{place.rstrip(os.sep)}/".casefold() for place in run_by_git)

    trees = tuple(f"{tree}{os.sep}" for tree in programs)
    secrets = (*folded_home_secrets(os.path.expanduser("~")), *prefixes, *never)

    special = _GIT_FOLDERS | REPOSITORY_PARTS
    ends = special | {
        fold_name(os.path.basename(each.rstrip("/"))) for each in (*secrets, *FOLDED_SECRET_PLACES, *trees)
    }

    @lru_cache(maxsize=64)
    def folded(folder: str) -> tuple[tuple[str, ...], bool]:
        """Return the parts of a folder's path, folded by `fold_name`, and whether a file in the folder can be protected
        only because of its own name. This is so if neither the folder nor one above it is protected or belongs to
        git."""
        parts = tuple(map(fold_name, Path(folder).parts))
        if len(parts) > _MAX_RECURSION or folder == os.sep or not special.isdisjoint(parts):
            return parts, False
        return parts, not is_protected(folder)

    def is_protected(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        inner, is_ordinary = folded(folder or os.sep)
        parts = [*inner, fold_name(name)]
        if is_ordinary and parts[-1] not in ends:
            return names.names(parts)
        start = next((number for number, part in enumerate(parts) if part in _GIT_FOLDERS), len(parts))
        place = f"/{'/'.join(parts[1:])}/"
        if names.covers(parts[:start]) or _SECRETS.search(place) or place.startswith(secrets):
            return True
        if start < len(parts):
            return _is_git_protected(parts[start + 1 :], path, layer)
        if f"{path}/".startswith(trees):
            return True
        return any(
            part in REPOSITORY_PARTS
            and layer.locate(Path(*Path(path).parts[:number], "HEAD")) is not None
            and _is_git_protected(parts[number:], path, layer)
            for number, part in enumerate(parts)
            if number
        )

    return LookRules(is_protected=is_protected, is_ignored=IgnoreRules(roots).ignores)


def _is_git_protected(parts: Sequence[str], path: str, layer: Layer) -> bool:
    """Return whether a file in a repository's own directory is protected. `parts` are the parts of the file's path
    below that directory, folded by `fold_name`."""
    if not parts:
        return True  # the directory itself, or a file or link in its place
    end = next((number for number, part in enumerate(parts) if part in _GIT_DATA), len(parts))
    if parts[0] in _INNER:
        # The directory of a submodule or worktree may have any name, even `objects`. It is recognised by its file
        # `HEAD`, but a command can create this file in any folder above the path. So each folder with a `HEAD` is
        # tried, and the path is protected if it would be for one of them.
        names = Path(path).parts
        before = len(names) - len(parts)
        tops = [at for at in range(2, len(parts)) if layer.locate(Path(*names[: before + at], "HEAD")) is not None]
        if any(_is_git_protected(parts[at:], path, layer) for at in tops):
            return True
        end = 1 if tops else len(parts)
    inner = parts[:end]
    if not _GIT_PROTECTED.isdisjoint(inner):
        return True
    if "info" in inner:
        return not parts[-1].startswith("refs")
    if len(parts) > 1 and parts[-1] in UNFINISHED.get(parts[-2], ()):
        return bool(commands_in(parts[-1], _content_of(path, layer)))
    return False


def _content_of(path: str, layer: Layer) -> bytes | None:
    """Return the content of a file in a layer, empty if the layer has deleted it; None if it is too long or not a plain
    file."""
    place = layer.locate(Path(path))
    if place is None:
        return b""
    return read_file(place, _FILE_BYTES)
