"""What the commands in a layer have changed: as a user reads it (`Change`), and as it is kept (`Operation`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from crow.tools.layers.states import State

Action: TypeAlias = Literal["created", "changed", "deleted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A file that commands have created, changed or deleted."""

    action: Action
    path: str
    """The absolute path in the workspace."""
    source: str = ""
    """The path of the new content, in the layer. Empty for a deleted file."""
    kind: str = "file"
    """What the path is now, or was before it was deleted: see `Kind` in `states.py`."""
    size: int = 0
    """In bytes."""
    is_ignored: bool = False
    """Git ignores the file."""
    is_protected: bool = False
    is_same: bool = False
    """Only the file's times have changed, or the file is git's index, in which git notes the times of files."""
    target: str = ""
    """Where a link leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path that has to be replaced, moved or removed to keep a change. A new or removed directory is one operation
    with everything in it."""

    root: str
    path: str
    """Relative to the root. Empty for the root itself."""
    before: State
    after: State
    source: str = ""
    """Where the new content is. Empty if there is none."""
    inode: int = 0
    """The source's inode number, by which it is recognised wherever it was moved."""
    is_meta: bool = False
    """Only the mode, the time and the attributes of a directory change."""
    is_ignored: bool = False
    """Git ignores the path, and so everything in it."""

    @property
    def name(self) -> str:
        """The absolute path."""
        return os.path.join(self.root, self.path) if self.path else self.root


@dataclass(frozen=True, slots=True, kw_only=True)
class LookRules:
    """What the user's settings say about paths. Both functions take an absolute path."""

    is_protected: Callable[[str], bool] = lambda _path: False
    is_ignored: Callable[[str, bool], bool] = lambda _path, _is_directory: False
    """Also takes whether the path is a directory. The answer must not depend on what the layer contains."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """What the commands in a layer have changed."""

    layer: str = ""
    listed: list[Change] = field(default_factory=list)
    """The changed files, at most `MAX_LISTED` of them. Protected files are always listed."""
    operations: list[Operation] = field(default_factory=list)
    files: int = 0
    """How many files have changed."""
    ignored: int = 0
    """How many of them git ignores."""
    ignored_bytes: int = 0
    conflicts: list[str] = field(default_factory=list)
    """Paths that somebody else has changed since the layer was opened."""
    dropped: list[str] = field(default_factory=list)
    """Sockets, devices and named pipes, which are never kept."""
    problem: str = ""
    """Why the changes cannot be kept at all."""
    is_live: bool = False
    """Commands in the layer still run, so its files must be copied."""

    @property
    def shown(self) -> list[Change]:
        """The changes that a user would want to know about."""
        return [change for change in self.listed if not (change.is_same or change.is_ignored) or change.is_protected]

    @property
    def protected(self) -> list[Change]:
        """The changes to protected files."""
        return [change for change in self.listed if change.is_protected]
