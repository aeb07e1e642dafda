"""Makes the changes of a patch in the text of a file.

Each hunk is looked for in the file as it was before the patch: first its exact lines; then its lines as they would be
if the model had left out the space that marks kept lines; then its folded lines (see
:mod:`crow.tools.builtin.folding`). If several places match, the hunk's headers, its mark for the end of the file and
its line number choose one of them. A hunk that matches no place, or still several, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from crow.domain.errors import ArgumentError
from crow.tools.builtin.fitting import Indents, Unclear, describe_difference, merged_lines
from crow.tools.builtin.folding import Lines, fold, indent_width
from crow.tools.builtin.matching import MAX_LINES_COMPARED
from crow.tools.builtin.mismatch import already_made, ambiguous, applied_at, excerpt, not_found, unclear
from crow.tools.builtin.patch import Hunk, HunkLine
from crow.tools.builtin.slips import without_slips

_MAX_PLACES = 15
_MAX_HEADER_LINES = 200
"""At most this many lines that match a header are considered."""
_DEFINITION = re.compile(
    r"(?:[\w<>\[\]]+\s+){0,5}(?:class|def|func|fn|function|interface|impl|struct|enum|trait|module|namespace|object|"
    r"record|protocol|extension|sub|proc)\b"
)
_SAME = Indents({}, unit=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """The result of all hunks of a file."""

    text: str
    """The whole new text of the file."""
    line: int
    """The first changed line, counted from 1."""
    remarks: tuple[str, ...] = ()
    """For each hunk that did not match exactly, how it matched."""
    changed: tuple[range, ...] = ()
    """The lines of the old text that are replaced, counted from 0. Ranges of added lines are empty."""
    known: tuple[range, ...] = ()
    """The lines of the old text that the hunks quote exactly, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splice:
    """New lines in place of a part of the file."""

    start: int
    """The index of the first line that is replaced."""
    stop: int
    """The index after the last line that is replaced. Equal to `start` if lines are only added."""
    lines: tuple[str, ...]
    hunk: int
    """The number of the hunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    """A place where a hunk may belong."""

    first: int
    """The index of the first line in the file."""
    lines: tuple[HunkLine, ...]
    """The lines of the hunk. If they had a slip, it is undone here."""
    indents: Indents
    """Converts the indentation of the hunk to that of the file."""
    is_exact: bool = True
    """False if only the folded lines are the same."""
    remark: str = ""
    """Which slip was undone. Empty if there was none."""

    @property
    def last(self) -> int:
        return self.first + sum(line.mark != "+" for line in self.lines) - 1


def apply_hunks(text: str, hunks: Sequence[Hunk], *, name: str) -> Patched:
    """Make the changes of `hunks` in `text`, the text of the file `name`.

    :raises ~crow.domain.errors.ArgumentError: a hunk has no place, or several, or two hunks change the same lines. The
        message names the hunk and shows the closest text.
    """
    lines = Lines(text)
    splices: list[_Splice] = []
    remarks: list[str] = []
    known: list[range] = []
    for hunk in hunks:
        what = f"hunk {hunk.number}"
        if all(line.mark == "+" for line in hunk.lines):
            splices.append(_insertion(lines, hunk, name))
            continue
        match = _locate(lines, hunk, name)
        try:
            splices += _splices(lines, hunk.number, match)
        except Unclear as error:
            words = unclear(lines.contents, match.first, match.last, name, str(error), what=what)
            raise ArgumentError(f"{what}: {words}") from None
        if match.is_exact and not match.remark:
            known.append(range(match.first, match.last + 1))
        if match.remark:
            remarks.append(f"{what}: {match.remark}")
        if not match.is_exact:
            kept = [line.text for line in match.lines if line.mark != "+"]
            actual = lines.contents[match.first : match.last + 1]
            remarks.append(describe_difference(kept, actual, match.indents, what=what, made="it"))
    splices.sort(key=lambda splice: (splice.start, splice.stop))
    for one, other in pairwise(splices):
        if other.start < one.stop or (one.start == other.start and one.stop == other.stop):
            numbers = sorted((one.hunk, other.hunk))
            where = f"line {other.start + 1} of {name}"
            raise ArgumentError(f"hunks {numbers[0]} and {numbers[1]} both change {where}; make them one hunk")
    return Patched(
        text=_spliced(lines, splices),
        line=splices[0].start + 1,
        remarks=tuple(remarks),
        changed=tuple(range(splice.start, splice.stop) for splice in splices),
        known=tuple(known),
    )


def _locate(lines: Lines, hunk: Hunk, name: str) -> _Match:
    """Return the place of a hunk. :raises ~crow.domain.errors.ArgumentError: there is none, or there are several."""
    what = f"hunk {hunk.number}"
    old = "\n".join(line.text for line in hunk.lines if line.mark != "+")
    new = "\n".join(line.text for line in hunk.lines if line.mark != "-")
    if not old.strip():
        raise ArgumentError(f"{what} has only blank lines of {name}; add the lines before and after")
    matches = _matches(lines, hunk, name)
    if not matches:
        raise ArgumentError(not_found(lines, old, new, name, what=what, made="its result"))
    chosen = _chosen(lines, hunk, matches)
    if len(chosen) != 1:
        firsts = [match.first for match in (chosen or matches)[:_MAX_PLACES]]
        advice = "add lines around it, or `@@` with the line of the function or class above it"
        is_exact = matches[0].is_exact
        count = matches[0].last - matches[0].first + 1
        raise ArgumentError(ambiguous(lines.contents, firsts, count, name, is_exact=is_exact, what=what, advice=advice))
    match = chosen[0]
    _check_header(lines, hunk, match, name)
    applied = applied_at(lines, new, old)
    is_only_added = all(line.mark != "-" for line in hunk.lines)
    is_here = applied is not None and match.first <= applied[1] and applied[0] <= match.last
    if applied is not None and (is_only_added if is_here else not match.is_exact):
        raise ArgumentError(
            already_made(lines, applied, name, what=f"{what} without its added lines", made="its result")
        )
    return match


def _matches(lines: Lines, hunk: Hunk, name: str) -> list[_Match]:
    """Return the places where a hunk matches in the best of the three ways: exactly, without the mark of kept lines, or
    folded."""
    folded: list[_Match] = []
    unmarked: list[_Match] = []
    for reading, slip in _readings(hunk.lines):
        old = [line.text for line in reading if line.mark != "+"]
        exact: list[_Match] = []
        for number, place in enumerate(lines.find([fold(line) for line in old])):
            if number * len(old) > MAX_LINES_COMPARED:
                raise ArgumentError(f"too many places in {name} are similar to hunk {hunk.number}; add more lines")
            if not (place.is_whole_start and place.is_whole_end):
                continue
            actual = lines.contents[place.first : place.last + 1]
            match = _Match(first=place.first, lines=reading, indents=_SAME, remark=slip)
            if actual == old:
                exact.append(match)
            elif slip:
                continue
            elif _is_unmarked(reading, actual):
                unmarked.append(match)
            elif (indents := Indents.between(old, actual, skips_first=False, unit=lines.unit)) is not None:
                folded.append(replace(match, indents=indents, is_exact=False))
        if exact:
            return exact
    found = unmarked or folded
    return [match for match in found if match.lines is found[0].lines]


def _readings(lines: tuple[HunkLine, ...]) -> Iterator[tuple[tuple[HunkLine, ...], str]]:
    """Yield the ways to read the lines of a hunk, each with a remark about the slip that was undone, or "": first as
    given, then without unmarked blank lines at both ends, then without each slip that old and new lines share."""
    yield lines, ""
    filled = [index for index, line in enumerate(lines) if line.mark or line.text]
    inner = lines[filled[0] : filled[-1] + 1]
    if len(inner) < len(lines):
        yield inner, ""
    old, new = ("\n".join(line.text for line in inner if line.mark != mark) for mark in "+-")
    for meant in without_slips(old, new):
        olds, news = iter(meant.old.split("\n")), iter(meant.new.split("\n"))
        if meant.old.count("\n") == old.count("\n") and meant.new.count("\n") == new.count("\n"):
            texts = []
            for line in inner:
                kept = next(olds) if line.mark != "+" else ""
                added = next(news) if line.mark != "-" else ""
                texts.append(added if line.mark == "+" else kept)
            yield tuple(replace(line, text=text) for line, text in zip(inner, texts, strict=True)), meant.remark


def _is_unmarked(reading: Sequence[HunkLine], actual: Sequence[str]) -> bool:
    """Return whether the kept and removed lines are the `actual` lines of the file, if a space in front of a kept line
    is not its mark but a part of its indentation."""
    old = [line for line in reading if line.mark != "+"]
    return all(
        line.text == theirs or (line.mark == " " and f" {line.text}" == theirs)
        for line, theirs in zip(old, actual, strict=True)
    )


def _chosen(lines: Lines, hunk: Hunk, matches: Sequence[_Match]) -> Sequence[_Match]:
    """Return those of several matches that fit the hunk's headers, its mark for the end of the file and its line
    number. A condition that no match fits is ignored. If more than one match is returned, the place is not clear."""
    if len(matches) > 1 and hunk.headers:
        scopes = _scopes(lines, hunk.headers)
        matches = [match for match in matches if any(_is_in(match, scope) for scope in scopes)] or matches
    if len(matches) > 1 and hunk.is_at_end:
        end = len(lines.contents) - (not lines.contents[-1])
        matches = [match for match in matches if match.last >= end - 1] or matches
    if len(matches) > 1 and hunk.line is not None:
        matches = [match for match in matches if match.first + 1 == hunk.line] or matches
    return matches


def _is_in(match: _Match, scope: range) -> bool:
    return match.first in scope or match.first <= scope.start <= match.last


def _scopes(lines: Lines, headers: Sequence[str]) -> list[range]:
    """Return the parts of the file that the headers name. Each header is looked for within the parts of the header
    before it. A part begins with the header's own line."""
    scopes = [range(len(lines.contents))]
    for header in headers:
        found = _header_lines(lines, header)
        scopes = [scope for line in found for outer in scopes if line in outer for scope in [_scope(lines, line)]]
    return scopes


def _header_lines(lines: Lines, header: str) -> list[int]:
    wanted = fold(header)
    whole = [index for index, line in enumerate(lines.folded) if line == wanted]
    begun = re.compile(re.escape(wanted) + r"(?!\w)")
    found = whole or [index for index, line in enumerate(lines.folded) if begun.match(line)]
    return found[:_MAX_HEADER_LINES]


def _scope(lines: Lines, start: int) -> range:
    """Return the lines that belong to the header at line `start`: the header and the lines below it that are indented
    deeper. If no such line follows the header, return the rest of the file."""
    contents = lines.contents
    depth = indent_width(contents[start])
    for index in range(start + 1, len(contents)):
        line = contents[index]
        if line.strip() and indent_width(line) <= depth and line.lstrip()[0] not in "{}])":
            has_inner = any(contents[inner].strip() for inner in range(start + 1, index))
            return range(start, index) if has_inner else range(start, len(contents))
    return range(start, len(contents))


def _check_header(lines: Lines, hunk: Hunk, match: _Match, name: str) -> None:
    """Check that a hunk's only match is below the hunk's headers. If the hunk has a line number, nothing is checked:
    its header then comes from git, whose headers need not enclose the place.

    :raises ~crow.domain.errors.ArgumentError: the file has the headers, but elsewhere.
    """
    scopes = _scopes(lines, hunk.headers) if hunk.headers and hunk.line is None else []
    if not scopes or any(_is_in(match, scope) for scope in scopes):
        return
    is_after = any(scope.start <= match.last for scope in scopes)
    if is_after and not _DEFINITION.match(fold(hunk.headers[-1])):
        return
    here = excerpt(lines.contents, match.first, match.last + 1, most=8)
    there = excerpt(lines.contents, scopes[0].start, scopes[0].stop, most=16)
    raise ArgumentError(
        f"hunk {hunk.number}: its lines are at line {match.first + 1} of {name}, but not below "
        f"`@@ {hunk.headers[-1]}`; say which is meant. The lines:\n{here}\nBelow the header:\n{there}"
    )


def _insertion(lines: Lines, hunk: Hunk, name: str) -> _Splice:
    """Return the splice of a hunk that only adds lines. They are added at the end if the hunk says so, or if the file
    is empty.

    :raises ~crow.domain.errors.ArgumentError: the hunk does not say where.
    """
    new = tuple(line.text for line in hunk.lines)
    end = len(lines.contents) - (not lines.contents[-1])
    if hunk.is_at_end or not any(lines.folded):
        return _Splice(start=end, stop=end, lines=new, hunk=hunk.number)
    found = _header_lines(lines, hunk.headers[-1]) if hunk.headers else []
    near = f"; the file has:\n{excerpt(lines.contents, found[0], found[0] + 8)}" if len(found) == 1 else ""
    raise ArgumentError(
        f"hunk {hunk.number} only adds lines to {name} and does not say where; add the line before or after them, with "
        f"a space in front, or `*** End of File` to append them{near}"
    )


def _splices(lines: Lines, number: int, match: _Match) -> Iterator[_Splice]:
    """Yield the changes that a hunk makes at its place. :raises Unclear: it is not clear how to indent new lines."""
    at = match.first
    for is_kept, group in groupby(match.lines, lambda line: line.mark in (" ", "")):
        part = list(group)
        if is_kept:
            at += len(part)
            continue
        old, new = ([line.text for line in part if line.mark == mark] for mark in ("-", "+"))
        actual = lines.contents[at : at + len(old)]
        made = new if match.is_exact else merged_lines(old, actual, new, match.indents)
        yield _Splice(start=at, stop=at + len(old), lines=tuple(made), hunk=number)
        at += len(old)


def _spliced(lines: Lines, splices: Sequence[_Splice]) -> str:
    """Return the new text. Lines that stay keep their line ends. If the old text ends without a line end, so does the
    new one."""
    made: list[tuple[str, str]] = []
    at = 0
    old = list(zip(lines.contents, lines.ends, strict=True))
    for splice in splices:
        made += old[at : splice.start]
        near = next((end for end in lines.ends[max(0, splice.start - 1) : splice.start + 1][::-1] if end), "\n")
        ends = lines.ends[splice.start : splice.stop]
        ends = ends if len(ends) == len(splice.lines) else [near] * len(splice.lines)
        made += zip(splice.lines, ends, strict=True)
        at = splice.stop
    made += old[at:]
    usual = next((end for end in lines.ends if end), "\n")
    text = "".join(line + (end or usual) for line, end in made[:-1]) + (made[-1][0] if made else "")
    ended = len(lines.contents) > 1 and not lines.contents[-1]
    return text + usual if ended and text and not text.endswith("\n") else text
