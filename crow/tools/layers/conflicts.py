"""Finds out whether somebody else has changed the workspace since a layer was opened.

While commands in the layer still run, crow itself changes the workspace, too, when it keeps their changes so far.
`Layer.kept` names the changed paths. These are no conflicts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from crow.tools.layers.changes import Operation
from crow.tools.layers.place import Layer
from crow.tools.layers.states import Walked, folders_around


class Conflicts:
    """Compares the times of one root's files with the times at which the layer was opened and its files were kept.

    Paths are relative to the root; empty for the root itself.
    """

    def __init__(self, layer: Layer, root: str) -> None:
        self.paths: list[str] = []
        """The conflicts that were found, as absolute paths."""
        self._layer = layer
        self._root = root
        self._around_kept = folders_around(layer.kept)
        """The directories in which crow kept something while commands ran, and those around them."""
        self._kept_in_ns: dict[str, int] = {}
        """When crow last kept something directly in a directory, in ns since the epoch."""
        for name, kept in layer.kept.items():
            folder = os.path.dirname(name)
            self._kept_in_ns[folder] = max(kept.moved_ns, self._kept_in_ns.get(folder, 0))
        self._late_indexes: list[str] = []
        """Git indexes that somebody else has changed."""

    def full(self, path: str) -> str:
        """Return the absolute path."""
        return f"{self._root}/{path}" if path else self._root

    def is_unchanged(self, walked: Walked, path: str) -> bool:
        """Return whether a walk over a path of the workspace has found no change by somebody else: see
        `Layer.unchanged_since`."""
        return walked.newest_ns <= self._layer.unchanged_since(self.full(path))

    def walked(self, path: str) -> Walked:
        """Return an empty `Walked` for a walk over a path of the workspace. It does not count the files that crow kept
        there while commands ran, nor the directories around them, as changed by somebody else."""
        full = self.full(path)

        def is_own(inner: str, status: os.stat_result) -> bool:
            each = f"{full}/{inner}" if inner else full
            return each in self._around_kept or status.st_ctime_ns <= self._layer.unchanged_since(each)

        return Walked(is_own=is_own) if self._around_kept else Walked()

    def is_late(self, walked: Walked, path: str, *, is_ignored: bool) -> bool:
        """Return whether a walk over a path of the workspace has found a change by somebody else. If so, note this
        change."""
        if self.is_unchanged(walked, path):
            return False
        self.note(f"{path}/{walked.newest}" if walked.newest else path, is_ignored=is_ignored)
        return True

    def has_changed_names(self, below: int, path: str) -> bool:
        """Return whether somebody else has created or removed files in `below`, the open directory of the workspace
        that would contain `path`. If so, and the layer has a copy of a file there but the workspace does not have the
        original, then somebody else has removed the original; otherwise, a command has moved the copy there."""
        full = self.full(path)
        own_ns = max(self._layer.unchanged_since(full), self._kept_in_ns.get(os.path.dirname(full), 0))
        return os.fstat(below).st_ctime_ns > own_ns

    def note(self, path: str, *, is_ignored: bool) -> None:
        """Note that somebody else changed a path. A file that git ignores is no conflict, because it can be made again:
        the workspace's version stays, and the other changes can still be kept."""
        if is_git_index(path):
            self._late_indexes.append(path)
        elif not is_ignored:
            self.paths.append(self.full(path))

    def finish(self, operations: Sequence[Operation]) -> None:
        """Count changed indexes of git as conflicts if the operations also change other files of the same repository.
        If not, somebody else's git has only looked at files, and noted their times in the index."""
        for index in self._late_indexes:
            folder = index.removesuffix("index")
            own = (each.path for each in operations if each.root == self._root and not each.is_meta)
            if any(path.startswith(folder) for path in own):
                self.paths.append(self.full(index))


def is_git_index(path: str) -> bool:
    """Return whether this is git's index, in which git notes the times of files whenever it looks at them."""
    return path == ".git/index" or path.endswith("/.git/index")
