"""Computes tails, excerpts and outlines from entries, for both engines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from crow.domain.entries import Checkpoint, Entry, File, Pin, Prompt, Restore, ToolResult, User
from crow.domain.messages import Text
from crow.domain.rendering import short_output
from crow.store import BranchPoint, BranchTip, Outline

_PointKind: TypeAlias = Literal["prompt", "label", "checkpoint"]
_POINT_KINDS: Mapping[str, _PointKind] = {"user": "prompt", "checkpoint": "checkpoint"}
"""Maps kinds of entries to their names in an outline. An entry of another kind is in the outline only if it has a
label."""

_MESSAGE_KINDS = ("user", "assistant", "tool", "skill")


TAIL_BYTES = 6 * 1024 * 1024
"""The maximum size of the texts in a tail, in bytes. It is more than a model with a window of a million tokens can
see."""

RESULT_BYTES = 64 * 1024
"""If a tool result does not fit into a tail any more, about this many bytes of it are read."""

PATH_BATCH = 256
"""At most this many entries are read in one call."""

PATH_BATCH_BYTES = 4 * 1024 * 1024
"""A call reads no further entry after it has read this many bytes of bodies and blobs."""

FIRST_BATCH = 16
"""The first batch of a history is small, so that a client soon shows something. Each batch is twice as large as the one
before, up to `PATH_BATCH`."""

HISTORY_BATCH = 1_024
"""The ids of a path are read in batches of this many entries."""

MOST_MOVES = 10_000
PROMPT_CHARACTERS = 200
"""The maximum length of the text of a prompt in an outline."""

_PIN_CHARS = 20_000
_UNREAD = (
    "[Entry {last} and everything before it was left out, because this conversation is too long to be read at once. It"
    " has not been summarised. The tool recall finds what was said and done there.]"
)


def compacted_in(breaks: Iterable[Sequence[Any]], restores: Iterable[Entry]) -> frozenset[str]:
    """Return the sessions with a compaction on their path that was not undone. `breaks` has a row (session id, entry
    id, kind) for each checkpoint, mask and restore on the paths. `restores` are the entries of these restores."""
    revoked = {entry.id: entry.body.entry for entry in restores if isinstance(entry.body, Restore)}
    rows = [(str(session), entry_id, kind) for session, entry_id, kind in breaks]
    undone = {(session, revoked.get(entry_id)) for session, entry_id, kind in rows if kind == "restore"}
    return frozenset(
        session for session, entry_id, kind in rows if kind != "restore" and (session, entry_id) not in undone
    )


class TailPath:
    """The entries of a session's tail, added newest first."""

    def __init__(self) -> None:
        self.room = TAIL_BYTES
        """How many bytes of texts may still be added."""
        self.cut: Entry | None = None
        """The entry that did not fit any more. It and all entries before it are left out."""
        self._newest_first: list[Entry] = []
        self._restored: set[int] = set()
        self._first_kept: int | None = None
        self._has_prompt = False

    def add(self, entry: Entry, size: int = 0) -> bool:
        """Add `entry`, the parent of the entry that was added last. `size` is the number of bytes of its texts. If the
        newest valid checkpoint does not keep `entry`, or if `entry` does not fit, return false and do not add it."""
        if self._first_kept is not None and entry.id < self._first_kept:
            return False
        # A checkpoint keeps only entries that the model can see at once, so all of them are read.
        if size > self.room and self._newest_first and self._first_kept is None:
            self.cut = entry
            return False
        self.room -= size
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
    def restored(self) -> Collection[int]:
        """The ids of the checkpoints and masks that the added restore entries undo."""
        return self._restored

    @property
    def lacks_user(self) -> bool:
        """Whether there is no prompt of the user among the entries."""
        return not any(isinstance(entry.body, User) for entry in self._newest_first)

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

    def entries_after_cut(self, root: int, checkpoint: Entry | None, user: Entry | None) -> tuple[Entry, ...]:
        """Return a new checkpoint, followed by the added entries. The new checkpoint is not stored. It stands for the
        entries that were left out, up to and including `cut`. `checkpoint` and `user` are the newest valid checkpoint
        and the newest prompt among the entries that were left out, or None. The new checkpoint repeats the summary of
        `checkpoint` and the text of `user`. `root` is the id of the first entry of the path."""
        assert self.cut is not None
        words = _UNREAD.format(last=self.cut.id)
        body = Checkpoint(compaction_id=f"unread-{self.cut.id}", summary=words, first_kept=None, method="unread")
        if checkpoint is not None and isinstance(checkpoint.body, Checkpoint):
            summary = f"{checkpoint.body.summary}\n\n{words}"
            body = replace(checkpoint.body, summary=summary, first_kept=None, method="unread")
        pins = body.pins
        if user is not None and isinstance(user.body, User):
            text = "\n".join(part.text for part in user.body.parts if isinstance(part, Text))
            pins = (*pins, Pin(entry=user.id, text=text[:_PIN_CHARS]))
        body = replace(body, pins=pins, first_covered=root, last_covered=self.cut.id)
        unread = replace(self.cut, body=body, usage=None, cost=None, estimate=None)
        return (unread, *self.entries())


def newest_checkpoint(
    path: Iterable[int], checkpoints: Collection[int], restores: Mapping[int, int], restored: Collection[int]
) -> int | None:
    """Return the id of the newest checkpoint that is on a path and was not undone, or None. `path` has the ids of the
    path's entries, newest first. `checkpoints` are the ids of all checkpoints that may be on the path. `restores` maps
    the id of each restore to the id of the entry that it undoes. `restored` are the ids of the entries that later
    restores, after the end of this path, have undone."""
    revoked = set(restored)
    for entry_id in path:
        if entry_id in restores:
            revoked.add(restores[entry_id])
        if entry_id in checkpoints and entry_id not in revoked:
            return entry_id
    return None


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


def _labels_at(labels: Mapping[int, tuple[str, int | None]], known: Collection[int]) -> Mapping[int, tuple[str, ...]]:
    """Map each entry that has labels to its labels. The newest note about a label decides which entry has the label.
    For `labels`, see `outline_of`. `known` are the entries in the outline."""
    places: dict[str, int] = {}
    for note, (label, entry) in sorted(labels.items()):
        places.pop(label, None)
        if entry != 0:
            places[label] = note if entry is None or entry not in known else entry
    found: dict[int, tuple[str, ...]] = {}
    for label, place in places.items():
        found[place] = (*found.get(place, ()), label)
    return found


def outline_of(
    tree: Sequence[tuple[int, int | None, str]],
    ends: Sequence[int],
    leaf: int | None,
    labels: Mapping[int, tuple[str, int | None]],
    prompts: Mapping[int, str],
) -> Outline:
    """Return the outline of a tree of entries. `tree` has the id, parent and kind of each entry, oldest first. `ends`
    are the ends of the branches: first the current leaf, then the ends that the session has left, the most recently
    left first. `labels` maps notes to a label and the entry that gets it (see `Note.entry`). `prompts` maps entries to
    texts."""
    labels_at = _labels_at(labels, {entry_id for entry_id, _, _ in tree})
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
        named = labels_at.get(entry_id, ())
        if named or kind in _POINT_KINDS:
            point_at[entry_id] = entry_id
            text = prompts.get(entry_id, "") if kind in _POINT_KINDS else ", ".join(named)
            points.append(
                BranchPoint(
                    entry=entry_id,
                    before=parent,
                    previous=previous,
                    kind=_POINT_KINDS.get(kind, "label"),
                    text=text,
                    labels=named,
                )
            )
    tips = [BranchTip(entry=leaf, point=point_at.get(leaf), is_current=True)]
    listed = {message_at.get(leaf)}
    for end in ends:
        message = message_at.get(end)
        if message is not None and message not in with_successors and message not in listed:
            listed.add(message)
            tips.append(BranchTip(entry=end, point=point_at.get(end), is_current=False))
    return Outline(points=tuple(points), tips=tuple(tips))
