"""Finds the git repository around a workspace. Commands see the whole tree of this repository.

Git reads and writes there although the workspace is only a subfolder, such as a package of a monorepo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from crow.tools.sandbox.paths import is_inside_any, with_real_parent


@dataclass(frozen=True, slots=True)
class OuterRepository:
    """A repository around a root of the workspace."""

    tree: Path
    """The worktree of the repository, which contains the root."""
    common: Path
    """The git directory of the repository, which is outside of all roots."""


def find_outer(root: Path, roots: Iterable[Path], may_show: Callable[[Path], bool]) -> OuterRepository | None:
    """Return the repository that git would use in a root of the workspace. None if there is no such repository, or if
    its git directory is inside one of the `roots`. Also None if its worktree belongs to somebody else, or `may_show`
    says that commands may not see the whole of it."""
    tree = next((folder for folder in (root, *root.parents) if os.path.lexists(f"{folder}/.git")), None)
    if tree is None or (tree != root and not (may_show(tree) and _has_owner_of(tree, root))):
        return None
    common = tree / ".git" if _is_repository(tree / ".git") else linked_repository(tree)
    if common is None or is_inside_any(common, roots):
        return None
    return OuterRepository(tree, common)


def _has_owner_of(tree: Path, root: Path) -> bool:
    """Return whether a worktree and its repository belong to this user, to the superuser, or to the owner of `root`,
    which is a directory in the worktree."""
    try:
        owners = {os.geteuid(), 0, root.stat().st_uid}
        return {tree.stat().st_uid, (tree / ".git").lstat().st_uid} <= owners
    except OSError:
        return False


def _is_repository(path: Path) -> bool:
    """Return whether this is a repository's own directory, and not a link to one."""
    return not path.is_symlink() and os.path.isfile(path / "HEAD")


def linked_repository(tree: Path) -> Path | None:
    """Return the repository of a linked worktree, if the repository itself confirms that the worktree belongs to it.

    The `.git` file in the worktree alone proves nothing, because the workspace may be hostile.
    """
    try:
        own = _linked_path(tree / ".git", "gitdir: ")
        if own is None or _linked_path(own / "gitdir") != tree / ".git":
            return None
        common = _linked_path(own / "commondir")
    except (OSError, ValueError):
        return None
    if common is None or own.parent != common / "worktrees" or not os.path.isfile(common / "HEAD"):
        return None
    return common


def _linked_path(file: Path, prefix: str = "") -> Path | None:
    """Return the path in a file that git wrote; None if the file contains no path. Links are resolved, except for the
    last part of the path."""
    if os.path.islink(file) or not os.path.isfile(file):
        return None
    with file.open("rb") as opened:
        text = os.fsdecode(opened.read(16_384)).rstrip("\r\n")
    if not text.startswith(prefix) or len(text) == len(prefix) or "\0" in text:
        return None
    return with_real_parent(os.path.join(os.path.dirname(file), text[len(prefix) :]))
