"""Describes changes for the user and for the model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from crow.domain.entries import Diff
from crow.domain.text import plural, safe
from crow.tools.layers.changes import Change, Changes
from crow.tools.layers.states import read_file

_MAX_NAMES = 12
_MAX_SINGLE = 3
"""If more files of a directory have changed, only their number is named."""
_MAX_DIFFS = 20
_DIFF_BYTES = 100_000
"""Longer files are shown by their size."""
MB = 1_000_000


def _shown(path: str) -> str:
    """Return a path on one line. A name with line breaks must not look like several files."""
    return safe(path.encode(errors="backslashreplace").decode().replace("\n", "\\n").replace("\t", "\\t"))


def some(paths: Sequence[str]) -> str:
    """Name paths in one line. If there are many, only the first are named."""
    rest = len(paths) - _MAX_NAMES
    return ", ".join(map(_shown, paths[:_MAX_NAMES])) + (f" and {rest} more" if rest > 0 else "")


def named(changes: Changes) -> str:
    """Name the changed files in one line. Many files of one directory are counted instead."""
    return "; ".join(_described(changes.shown))


def _described(changes: Iterable[Change]) -> list[str]:
    """Describe changes, one text for each file, or for each directory with many of them."""
    changes = list(changes)
    counts = Counter((change.action, os.path.dirname(change.path)) for change in changes if not change.is_protected)
    found: dict[str, bool] = {}
    """The texts, each with whether the file is protected."""
    for change in changes:
        folder = os.path.dirname(change.path)
        count = counts[change.action, folder]
        if count > _MAX_SINGLE and not change.is_protected:
            found[f"{change.action} {plural(count, 'file')} in {_shown(folder)}/"] = False
        else:
            target = f" (a link to {_shown(change.target)})" if change.kind == "link" else ""
            text = f"{change.action} {_shown(change.path)}{target}{' (protected)' if change.is_protected else ''}"
            found[text] = found.get(text, False) or change.is_protected
    listed = sorted(found, key=lambda text: not found[text])
    rest = len(listed) - _MAX_NAMES
    return [*listed[:_MAX_NAMES], *([f"{rest} more"] if rest > 0 else [])]


def summary_of(changes: Changes) -> str:
    """Return the changes in words for the user: one line for each file, or for each directory with many of them."""
    lines = _described(changes.shown)
    if changes.ignored:
        lines.append(f"{plural(changes.ignored, 'file')} that git ignores ({changes.ignored_bytes / MB:.1f} MB)")
    if len(changes.listed) < changes.files:
        lines.append(f"{plural(changes.files, 'file')} in all")
    return "\n".join(lines)


def diffs_of(changes: Changes) -> tuple[Diff, ...]:
    """Return the diffs of the first changed text files that are not too long. This call blocks."""
    found: list[Diff] = []
    for change in changes.shown[: 10 * _MAX_DIFFS]:
        if change.kind == "file" and len(found) < _MAX_DIFFS:
            old = "" if change.action == "created" else _text_at(change.path)
            new = "" if change.action == "deleted" else _text_at(change.source)
            if old is not None and new is not None:
                created = change.action == "created"
                found.append(Diff(path=change.path, old_text=None if created else old, new_text=new))
    return tuple(found)


def _text_at(path: str) -> str | None:
    """Return the text of a file; None if it is not a short text file."""
    data = read_file(path, _DIFF_BYTES)
    if data is None or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
