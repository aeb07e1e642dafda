"""Remembers which lines of which files the model has read or written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crow.tools.in_context import CallPart, InContext, always

_MAX_CHARS = 1_000_000
"""A longer text is remembered only by its fingerprint."""
_MAX_ALL_CHARS = 8_000_000
"""If all texts together are longer, those that were noted longest ago are remembered only by their fingerprints."""
_MAX_SEEN = 200
"""At most this many ranges of lines are noted for one file, the newest ones."""


@dataclass(frozen=True, slots=True)
class _SeenLines:
    """Lines of a file that the model has read or written."""

    lines: range
    """Counted from 0."""
    sources: frozenset[CallPart]
    """The model knows the lines as long as all of these are in its context."""


@dataclass(slots=True)
class _SeenFile:
    """The lines of one file that the model knows."""

    fingerprint: tuple[int, int]
    """The length and the hash of the text that was noted last."""
    seen: list[_SeenLines] = field(default_factory=list)
    """The lines of this text that the model has read or written. They may overlap."""


class SeenFiles:
    """Remembers the text of each file that the model read or wrote, and which lines of it the model knows. So the model
    does not overwrite later changes by others, and does not replace lines that it has never seen.

    The model may edit a file that it has never read, because an edit must match the file's text anyway. `in_context`
    tells whether a part of an earlier call is still in the model's context. A part that was shortened, hidden,
    compacted or undone is no longer there. If `in_context` is None, the model knows all files.
    """

    def __init__(self, in_context: InContext | None = always) -> None:
        self._in_context = in_context
        self._files: dict[Path, _SeenFile] = {}
        self._texts: OrderedDict[Path, str] = OrderedDict()
        self._chars = 0

    def note_read(self, path: Path, text: str, lines: Iterable[range], call_id: str) -> None:
        """Note that a call has read the file, which holds `text`. The result of the call has these `lines` of the text,
        counted from 0."""
        self._follow(path, text)
        sources = frozenset([CallPart(call_id, "result")])
        for each in lines:
            self._add(path, each, sources)

    def note_write(self, path: Path, before: str | None, after: str, call_id: str) -> None:
        """Note that a call has written `after` to a file. `before` is the text that an edit has changed, or None if the
        arguments of the call have the whole new text."""
        source = CallPart(call_id, "arguments")
        if before is None:
            self._follow(path, after)
            self._files[path].seen = []
            self._add(path, range(line_count(after)), frozenset([source]))
            return
        self._follow(path, before)
        old, new = _changed_ranges(before, after)
        old = range(old.start, min(old.stop, line_count(before)))
        around = [each for each in self._files[path].seen if _overlap(each.lines, old)]
        self._follow(path, after)
        # Lines between two places of an edit are known only if they were known before.
        if not _gaps(old, [each.lines for each in around]):
            self._add(path, new, frozenset({source}.union(*(each.sources for each in around))))

    def forget(self, path: Path) -> None:
        """Forget a file that was removed."""
        self._files.pop(path, None)
        self._chars -= len(self._texts.pop(path, ""))

    def unread_lines(self, path: Path, text: str, *, reader: str = "") -> Sequence[range]:
        """Return the lines of the file, which holds `text`, that the model does not know, counted from 0. `reader` is
        the id of a call: only the lines that the model of this call knows count as known. If `reader` is empty, the
        lines that any model of the session knows count."""
        in_context, file = self._in_context, self._files.get(path)
        if in_context is None:
            return []
        if file is None or file.fingerprint != _fingerprint(text):
            return [range(line_count(text))]
        known = [each.lines for each in file.seen if all(in_context(part, reader) for part in each.sources)]
        return _gaps(range(line_count(text)), known)

    def has_changed(self, path: Path, text: str) -> bool:
        """Return whether the file, which now holds `text`, has changed since the model read or wrote it."""
        file = self._files.get(path)
        return file is not None and file.fingerprint != _fingerprint(text)

    def changed_lines(self, path: Path, text: str) -> range | None:
        """Return the lines of `text` (counted from 0) within which the file has changed since the model read or wrote
        it. The range is empty where lines were only removed. Return None if the old text is no longer known."""
        known = self._texts.get(path)
        return None if known is None else _changed_ranges(known, text)[1]

    def _follow(self, path: Path, text: str) -> None:
        """Remember `text` as the file's text. Lines that have changed are no longer known."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _SeenFile(_fingerprint(text))
        elif file.fingerprint != _fingerprint(text):
            known = self._texts.get(path)
            file.seen = [] if known is None else _moved(file.seen, *_changed_ranges(known, text))
            file.fingerprint = _fingerprint(text)
        self._chars -= len(self._texts.pop(path, ""))
        if len(text) <= _MAX_CHARS:
            self._texts[path] = text
            self._chars += len(text)
        while self._chars > _MAX_ALL_CHARS:
            self._chars -= len(self._texts.popitem(last=False)[1])

    def _add(self, path: Path, lines: range, sources: frozenset[CallPart]) -> None:
        """Note lines of the file. Earlier notes stay if they may count when this one does not: for another agent, or
        after this call was undone."""
        seen = self._files[path].seen
        kept = [each for each in seen if _gaps(each.lines, [lines]) or not each.sources >= sources]
        self._files[path].seen = [*kept[1 - _MAX_SEEN :], _SeenLines(lines, sources)]


def line_count(text: str) -> int:
    """Return how many lines `text` has. A line end at the end of the text does not begin another line."""
    return text.count("\n") + (not text.endswith("\n") and text != "")


def _changed_ranges(old: str, new: str) -> tuple[range, range]:
    """Return the range of lines of `old`, counted from 0, that contains all differences from `new`, and the range of
    lines of `new` that takes its place. Either range may be empty."""
    before, after = old.split("\n"), new.split("\n")
    shorter = min(len(before), len(after))
    first = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    same = next((at for at in range(shorter - first) if before[-1 - at] != after[-1 - at]), shorter - first)
    return range(first, len(before) - same), range(first, len(after) - same)


def _moved(seen: Sequence[_SeenLines], old: range, new: range) -> list[_SeenLines]:
    """Return the lines that are still known when the lines `new` have taken the place of the lines `old`."""
    by = new.stop - old.stop
    moved: list[_SeenLines] = []
    for each in seen:
        above = range(each.lines.start, min(each.lines.stop, old.start))
        below = range(max(each.lines.start, old.stop) + by, each.lines.stop + by)
        moved += [_SeenLines(lines, each.sources) for lines in (above, below) if lines]
    return moved


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _gaps(lines: range, known: Iterable[range]) -> list[range]:
    """Return the parts of `lines` that are in none of the `known` ranges."""
    gaps: list[range] = []
    at = lines.start
    for each in sorted((each for each in known if _overlap(lines, each)), key=lambda each: each.start):
        if at < each.start:
            gaps.append(range(at, each.start))
        at = max(at, each.stop)
    if at < lines.stop:
        gaps.append(range(at, lines.stop))
    return gaps


def _fingerprint(text: str) -> tuple[int, int]:
    return len(text), hash(text)
