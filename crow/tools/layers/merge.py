"""Says which changes of a subagent can be kept, although the workspace may have changed meanwhile.

Each changed path has three versions: the base, which is what the subagent began with, the workspace's now, and the
subagent's. If only the subagent has changed it, its version counts. If both have, short texts are merged line by line.
Anything else is a conflict: the workspace's version stays, and the conflict is named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crow.domain.merge import merged_text
from crow.tools.layers.changes import Change, Changes, LookRules, Operation
from crow.tools.layers.children import BASE_BYTES, UNKNOWN, ChildLayer
from crow.tools.layers.cleaning import clean_layer
from crow.tools.layers.comparison import look
from crow.tools.layers.keep import prepare
from crow.tools.layers.moves import Conflict
from crow.tools.layers.place import Place, discard
from crow.tools.layers.sets import ChangeSet, directory_of, remove_bases
from crow.tools.layers.states import (
    TooLargeError,
    read_file,
    state_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """What can be kept of a subagent's changes."""

    changes: Changes
    """Without the conflicts."""
    conflicts: tuple[str, ...] = ()
    """Absolute paths that the workspace and the subagent have both changed."""
    merged: tuple[str, ...] = ()
    """Absolute paths of files that were merged line by line."""


def merge(child: ChildLayer, rules: LookRules | None = None, *, merges_texts: bool = True) -> Merge:
    """Return what can be kept of a layer now. No command may be running in it. This call blocks."""
    try:
        dropped = [path for overlay in child.layer.overlays for path in clean_layer(overlay)]
        child.note()
    except TooLargeError as error:
        return Merge(changes=Changes(problem=str(error)))
    changes = look(child.layer, rules, is_live=True)
    changes.dropped = dropped
    if changes.problem:
        return Merge(changes=changes)
    folder = child.directory / "merged"
    if folder.exists():
        discard(folder)
    operations, conflicts, merged = [], [], []
    is_done = False  # whether some of the changes need not be kept
    for operation in changes.operations:
        made = operation if operation.is_meta else _decide(child, operation, folder, merges_texts=merges_texts)
        match made:
            case None:
                is_done = True
            case "conflict":
                conflicts.append(operation.name)
            case Operation():
                operations.append(_with_own_meta(child, made) if made.is_meta else made)
                if made.source != operation.source:
                    merged.append(made.name)
    kept = {each.name: each for each in operations if not each.is_meta or _changed_metas([each])}
    changes.operations[:] = operations if any(not each.is_meta for each in operations) else _changed_metas(operations)
    changes.listed[:] = list(_listed(changes.listed, kept))
    changes.files = len(changes.listed) if conflicts or is_done else changes.files
    return Merge(changes=changes, conflicts=tuple(conflicts), merged=tuple(merged))


def _decide(child: ChildLayer, operation: Operation, folder: Path, *, merges_texts: bool) -> Operation | str | None:
    """Return the operation that keeps a changed path, or "conflict", or None if there is nothing to keep."""
    base = child.bases.get(operation.name)
    known = UNKNOWN if base is None else base.state
    if operation.before == operation.after or _is_same(operation):
        return None
    if known.matches(operation.before) and known != UNKNOWN:
        return operation
    before = child.base_text(operation.name)
    if operation.before.kind != "file" or operation.after.kind != "file" or before is None:
        return "conflict"
    own, theirs = read_file(operation.source, BASE_BYTES), read_file(operation.name, BASE_BYTES)
    if own is None or theirs is None:
        return "conflict"
    if own == before and operation.after.mode == known.mode:
        return None  # the subagent has only opened it, or changed it back
    mode = _merged_mode(known.mode, operation.before.mode, operation.after.mode)
    text = merged_text(before, theirs, own) if merges_texts else None
    if text is None or mode is None:
        return "conflict"
    return _write_merged(child, operation, folder, text, mode)


def _is_same(operation: Operation) -> bool:
    """Return whether the workspace already has the same file or link."""
    now, made = operation.before, operation.after
    if (now.kind, now.mode) != (made.kind, made.mode):
        return False
    if made.kind == "link":
        return now.target == made.target
    if made.kind != "file" or now.size != made.size:
        return False
    own = read_file(operation.source, BASE_BYTES)
    return own is not None and own == read_file(operation.name, BASE_BYTES)


def _merged_mode(base: int, theirs: int, own: int) -> int | None:
    """Return the mode after a merge; None if both sides have changed it."""
    if own == theirs or theirs == base:
        return own
    return theirs if own == base else None


def _write_merged(child: ChildLayer, operation: Operation, folder: Path, content: bytes, mode: int) -> Operation:
    """Write a merged file where `prepare` finds it: below `folder` in a directory for its root, at its path in this
    root."""
    number = [str(overlay.root) for overlay in child.layer.overlays].index(operation.root)
    place = folder / str(number) / operation.path
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.write_bytes(content)
    place.chmod(mode)
    with directory_of(place) as parent:
        after = state_of(place.name, parent)
    return replace(operation, source=str(place), after=after, inode=place.lstat().st_ino)


def _with_own_meta(child: ChildLayer, operation: Operation) -> Operation:
    """Return an operation on a directory itself. It changes the mode and attributes only if the subagent has changed
    them."""
    base = child.metas.get(operation.name)
    if base is None or (base.mode, base.xattrs) == (operation.after.mode, operation.after.xattrs):
        before = operation.before
        return replace(operation, after=replace(operation.after, mode=before.mode, xattrs=before.xattrs))
    return operation


def _changed_metas(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations on directories that change more than a time."""
    return [
        each for each in operations if (each.before.mode, each.before.xattrs) != (each.after.mode, each.after.xattrs)
    ]


def _listed(changes: Sequence[Change], kept: dict[str, Operation]) -> Iterator[Change]:
    """Yield the changes that belong to the operations in `kept`. A merged file has the merged content as its source."""
    for change in changes:
        path = change.path
        while path not in kept and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        operation = kept.get(path)
        if operation is None or (operation.is_meta and path != change.path):
            continue
        is_file = path == change.path and not operation.is_meta and operation.after.kind == "file"
        yield replace(change, source=operation.source) if is_file else change


def prepare_merge(place: Place, child: ChildLayer, merge: Merge, about: dict[str, str]) -> ChangeSet:
    """Write the change set of a merge to disk. The layer stays as it is. See :func:`crow.tools.layers.prepare`."""
    made = prepare(place, child.layer, merge.changes, about)
    wanted = {each.name for each in merge.changes.operations}
    missing = wanted - {each.name for each in made.operations}
    if missing:
        with suppress(OSError):
            remove_bases(made.bases, made.directory)
            discard(made.directory)
        os.close(made.lock)
        raise Conflict(sorted(missing))
    return made
