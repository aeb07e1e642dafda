"""Computes tails, excerpts and outlines from entries, for both engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from crow.domain.entries import Checkpoint, Entry, File, Prompt, Restore, ToolResult
from crow.domain.rendering import short_output
from crow.store import BranchPoint, BranchTip, Outline

_PointKind: TypeAlias = Literal["prompt", "label", "checkpoint"]
_POINT_KINDS: Mapping[str, _PointKind] = {"user": "prompt", "note": "label", "checkpoint": "checkpoint"}
"""Maps kinds of entries to their names in an outline. A note is in the outline only if it is a label."""

_MESSAGE_KINDS = ("user", "assistant", "tool", "skill")


class TailPath:
    """The entries of a session's tail, added newest first."""

    def __init__(self) -> None:
        self._newest_first: list[Entry] = []
        self._restored: set[int] = set()
        self._first_kept: int | None = None
        self._has_prompt = False

    def add(self, entry: Entry) -> bool:
        """Add `entry`, the parent of the entry that was added last. If the newest valid checkpoint does not keep
        `entry`, return false and do not add it."""
        if self._first_kept is not None and entry.id < self._first_kept:
            return False
        self._newest_first.append(entry)
        match entry.body:
            case Prompt():
                self._has_prompt = True
            case Restore(entry=checkpoint):
                self._restored.add(checkpoint)
            case Checkpoint(first_kept=kept) if self._first_kept is None and entry.id not in self._restored:
                # The first entry that a checkpoint keeps is never newer than the checkpoint. A larger id can only come
                # from damage.
                self._first_kept = entry.id if kept is None else min(kept, entry.id)
        return True

    @property
    def lacks_prompt(self) -> bool:
        """Whether there are entries, but no prompt entry among them."""
        return bool(self._newest_first) and not self._has_prompt

    @property
    def before(self) -> int | None:
        """The parent of the entry that was added last. Read this only after at least one entry was added."""
        return self._newest_first[-1].parent

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries, oldest first."""
        return tuple(reversed(self._newest_first))


def with_excerpt(entry: Entry, most_bytes: int) -> Entry:
    """Return the entry. If it is a tool result, shorten its text to about `most_bytes` bytes."""
    if not isinstance(entry.body, ToolResult):
        return entry
    text = short_output(entry.body.text, most_bytes, entry.body.call.call_id)
    return entry if text is entry.body.text else replace(entry, body=replace(entry.body, text=text))


def recorded_here(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries, with `recorded_here` set in each file entry. The entries must belong to a conversation that
    was not imported.

    Older versions did not store where a file was recorded. But every file in a conversation that was not imported was
    recorded on this machine.
    """
    return tuple(
        replace(entry, body=replace(entry.body, recorded_here=True)) if isinstance(entry.body, File) else entry
        for entry in entries
    )


def outline_of(
    tree: Sequence[tuple[int, int | None, str]],
    ends: Sequence[int],
    leaf: int | None,
    labels: Mapping[int, str],
    prompts: Mapping[int, str],
) -> Outline:
    """Return the outline of a tree of entries. `tree` has the id, parent and kind of each entry, oldest first. `ends`
    are the ends of the branches: first the current leaf, then the ends that the session has left, starting with the one
    that it left last. `labels` and `prompts` map entries to texts."""
    # `point_at` and `message_at` map each entry to the newest branch point and the newest message on the entry's path.
    point_at: dict[int | None, int | None] = {None: None}
    message_at: dict[int | None, int | None] = {None: None}
    with_successors: set[int | None] = set()
    points: list[BranchPoint] = []
    for entry_id, parent, kind in tree:
        previous = point_at[entry_id] = point_at.get(parent)
        message_at[entry_id] = message_at.get(parent)
        if kind in _MESSAGE_KINDS:
            with_successors.add(message_at[entry_id])
            message_at[entry_id] = entry_id
        if entry_id in labels or (kind in _POINT_KINDS and kind != "note"):
            point_at[entry_id] = entry_id
            name, text = _POINT_KINDS[kind], labels.get(entry_id) or prompts.get(entry_id) or ""
            points.append(BranchPoint(entry=entry_id, before=parent, previous=previous, kind=name, text=text))
    tips = [BranchTip(entry=leaf, point=point_at.get(leaf), is_current=True)]
    listed = {message_at.get(leaf)}
    for end in ends:
        message = message_at.get(end)
        if message is not None and message not in with_successors and message not in listed:
            listed.add(message)
            tips.append(BranchTip(entry=end, point=point_at.get(end), is_current=False))
    return Outline(points=tuple(points), tips=tuple(tips))
