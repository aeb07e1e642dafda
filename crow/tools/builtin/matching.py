"""Finds the place in a file that an edit means, and makes the edit there: see `replace_text`."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from crow.domain.errors import ArgumentError
from crow.domain.text import quote
from crow.tools.builtin.fitting import Indents, Unclear, describe_difference, merged_lines
from crow.tools.builtin.folding import Lines, Place, fold
from crow.tools.builtin.mismatch import already_made, ambiguous, applied_at, excerpt, not_found, unclear
from crow.tools.builtin.slips import Meant, without_slips

MAX_LINES_COMPARED = 1_000_000
"""The search for places with similar lines ends when it has compared about this many lines."""
_MAX_PLACES = 15
"""At most this many places are named if several match."""

_CUT = re.compile(r"(?=.*\w).{4,}")
"""Matches the part of a line before or after a match, if it is long enough. A short part, such as `f(` in `f(f(`, may
be repeated on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The result of an edit."""

    text: str
    """The whole new text of the file."""
    count: int
    """How many places were replaced."""
    line: int
    """The first replaced line, counted from 1."""
    remark: str = ""
    """A note for the model: how old_text matched, if the match was not exact, and whether a line end was kept."""


def replace_text(text: str, old: str, new: str, *, every: bool, name: str) -> Replacement:
    """Replace `old` with `new` in `text`, the text of the file `name`.

    Three ways are tried, the most certain one first. The first way that finds `old` decides:

    1. `old` occurs exactly. CRLF and LF count as the same, because a model does not see which of them a file has.
    2. `old` occurs exactly after a slip, such as line numbers in both texts, has been undone
       (:mod:`crow.tools.builtin.slips`).
    3. The folded lines of `old` occur: white space and look-alike characters do not count
       (:mod:`crow.tools.builtin.folding`). `new` is then fitted to the file (:mod:`crow.tools.builtin.fitting`).

    None of these ways guesses which place is meant: it is an error if several places match, except that the first two
    ways replace all of them if `every` is set. The second and third way tell the model how its text differed. Text
    outside the replaced places stays as it is.

    :raises ~crow.domain.errors.ArgumentError: nothing matches, or several places match and `every` is false, or the
        edit would probably damage the text around it. The message shows the text of the file.
    """
    if not old:
        raise ArgumentError("old_text is empty; expected text from the file. Use write_file for a new file")
    if old == new:
        raise ArgumentError("old_text and new_text are the same; nothing would change")
    for meant in chain([Meant(old=old, new=new)], without_slips(old, new)):
        exact = _replace_exactly(text, meant, every=every, name=name)
        if exact is not None:
            return exact
    return _replace_folded(Lines(text), old, new, name=name)


# The first and the second way: exact matches.


def _replace_exactly(text: str, meant: Meant, *, every: bool, name: str) -> Replacement | None:
    """Replace the old text where it occurs exactly. Return None if it does not occur, or if it is indented less than
    the file, so that the new text must be indented first.

    :raises ~crow.domain.errors.ArgumentError: see `replace_text`.
    """
    old = meant.old
    crlf = [] if "\r" in old else _crlf_indexes(text)
    plain = text.replace("\r\n", "\n") if crlf else text
    starts = [at for at in _occurrences(plain, old) if not meant.is_whole_lines or _are_whole_lines(plain, at, old)]
    if not starts:
        return None
    if (not every or len(starts) == 1) and _begins_within_indentation(plain, starts[0]):
        return None  # _replace_folded indents the new text
    if every:
        _check_indentation(plain, starts, meant, name)
    elif plain.find(old, starts[0] + 1) >= 0:  # a second match may overlap the first
        raise ArgumentError(_ambiguous_exactly(plain, old, name))
    else:
        _check_edges(plain, starts[0], old, _with_line_end(plain, starts[0], meant, name)[0], name)
    pieces, end, remark = list[str](), 0, ""
    for at in starts:
        made, each_remark = _with_line_end(plain, at, meant, name)
        start, stop = (index + bisect_left(crlf, index) for index in (at, at + len(old)))  # in `text`
        if crlf and "\r" not in made:
            made = _with_ends_of(made, text[start:stop], _line_end_at(text, start))
        pieces += [text[end:start], made]
        end, remark = stop, remark or each_remark
    return Replacement(
        text="".join([*pieces, text[end:]]),
        count=len(starts),
        line=plain.count("\n", 0, starts[0]) + 1,
        remark="; ".join(filter(None, (meant.remark, remark))),
    )


def _crlf_indexes(text: str) -> list[int]:
    """Return where the CRLF line ends of `text` would be if all of them were LF."""
    return [found.start() - number for number, found in enumerate(re.finditer("\r\n", text))]


def _occurrences(text: str, wanted: str) -> Iterator[int]:
    """Yield where `wanted` occurs. Occurrences do not overlap."""
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + len(wanted))


def _are_whole_lines(text: str, at: int, wanted: str) -> bool:
    """Return whether the match at `at` consists of whole lines, apart from indentation."""
    stop = at + len(wanted)
    is_end = wanted.endswith("\n") or stop == len(text) or text.startswith(("\n", "\r\n"), stop)
    return is_end and not text[text.rfind("\n", 0, at) + 1 : at].strip()


def _begins_within_indentation(text: str, at: int) -> bool:
    """Return whether the text at `at` begins with a part of its line's indentation, but not with all of it."""
    start = text.rfind("\n", 0, at) + 1
    return start < at and text[at] in " \t" and not text[start:at].strip()


def _check_indentation(text: str, starts: Sequence[int], meant: Meant, name: str) -> None:
    """Check that an edit of all places gives each new line the indentation that is meant.

    :raises ~crow.domain.errors.ArgumentError: there are several new lines, and the old text begins with only a part of
        the indentation of a place, so that all new lines but the first would be indented too little there.
    """
    place = next((at for at in starts if _begins_within_indentation(text, at)), None)
    if place is not None and "\n" in meant.new.strip("\n"):
        raise ArgumentError(
            "old_text is indented less than a place where it occurs, so the lines of new_text would be, too; edit the "
            f"places one by one. {name} has:\n{_matched_lines(text, place, meant.old)}"
        )


def _with_line_end(text: str, at: int, meant: Meant, name: str) -> tuple[str, str]:
    """Return the text to write in place of the match at `at`, and a remark, which may be empty. The text to write is
    the new text. If only the old text ends with a line end, one is added, because otherwise the next line would be
    joined to the new text. None is added if the edit does nothing but remove a line end, or if the new text is empty
    and replaces whole lines.

    :raises ~crow.domain.errors.ArgumentError: the match begins within a line, so a joined line may be meant.
    """
    old, new = meant.old, meant.new
    end = "\r\n" if old.endswith("\r\n") else "\n"
    if not old.endswith(end) or new.endswith("\n") or new + end == old:
        return new, ""
    is_line_start = at == 0 or text[at - 1] == "\n"
    if is_line_start and not new:
        return new, ""
    if not is_line_start and at + len(old) < len(text):
        shown = _matched_lines(text, at, old, more=1)
        raise ArgumentError(
            "old_text ends with a line end and new_text does not, so that the next line would be joined to it; write "
            f"the line end, or the next line, too. {name} has:\n{shown}"
        )
    return new + end, "the line end at its end was kept"


def _with_ends_of(made: str, replaced: str, other: str) -> str:
    """Return the text `made` with the line ends of the text that it replaces, one by one. If the two do not have
    equally many lines, all line ends become `other`."""
    lines, ends = made.split("\n"), re.findall("\r?\n", replaced)
    if len(ends) != len(lines) - 1:
        ends = [other] * (len(lines) - 1)
    return "".join(chain.from_iterable(zip_longest(lines, ends, fillvalue="")))


def _line_end_at(text: str, at: int) -> str:
    """Return the line end of the line at `at`. If that is the last line and has no line end, return the line end of the
    line before it."""
    end = text.find("\n", at)
    end = end if end >= 0 else text.rfind("\n", 0, at)
    return "\r\n" if end > 0 and text[end - 1] == "\r" else "\n"


def _check_edges(text: str, at: int, wanted: str, given: str, name: str) -> None:
    """Check that an edit does not write a part of a line twice, as it would if `wanted`, the old text, is only a part
    of a line and `given`, the new text, has the whole line.

    :raises ~crow.domain.errors.ArgumentError: a part would be written twice. The message shows the whole lines.
    """
    stop = at + len(wanted)
    line_end = text.find("\n", stop)
    before = text[text.rfind("\n", 0, at) + 1 : at].lstrip()
    after = "" if wanted.endswith("\n") else text[stop : line_end if line_end >= 0 else len(text)].rstrip()
    is_cut = _CUT.search(before) or (before and re.match(r"\w\w", before[-1] + wanted[0]))
    if is_cut and given.lstrip().startswith(before) and not wanted.lstrip().startswith(before):
        where, twice = "begins", before
    elif _CUT.search(after) and given.rstrip().endswith(after) and not wanted.rstrip().endswith(after):
        where, twice = "ends", after
    else:
        return
    raise ArgumentError(
        f"old_text {where} within a line, and new_text has the rest of it, {quote(twice)}, which would be written "
        f"twice; write whole lines. {name} has:\n{_matched_lines(text, at, wanted)}"
    )


def _matched_lines(text: str, at: int, wanted: str, *, more: int = 0) -> str:
    """Show the whole lines of a match, and `more` lines after them."""
    first = text.count("\n", 0, at)
    return excerpt(text.split("\n"), first, first + wanted.removesuffix("\n").count("\n") + 1 + more)


def _ambiguous_exactly(text: str, wanted: str, name: str) -> str:
    """Return the error message for an exact match in several places."""
    firsts: list[int] = []
    line = at = 0
    while len(firsts) < _MAX_PLACES and (found := text.find(wanted, at)) >= 0:
        line += text.count("\n", at, found)
        firsts.append(line)
        line, at = line + (text[found] == "\n"), found + 1
    count = max(len(firsts), text.count(wanted))
    return ambiguous(text.split("\n"), firsts, wanted.removesuffix("\n").count("\n") + 1, name, times=count)


# The third way: folded lines.


def _replace_folded(lines: Lines, old: str, new: str, *, name: str) -> Replacement:
    """Replace the only place that matches `old` when lines are folded.

    :raises ~crow.domain.errors.ArgumentError: no place matches, or several do, or `new` cannot be fitted to the file
        without a guess.
    """
    for old_lines, new_lines in _readings(old, new):
        found = _folded_place(lines, old_lines, name, ends_line=old.endswith("\n"))
        if found is None:
            continue
        place, indents = found
        applied = applied_at(lines, new, old)
        if applied is not None and not (place.first <= applied[1] and applied[0] <= place.last):
            raise ArgumentError(already_made(lines, applied, name))
        return _merge(lines, place, indents, old_lines, new_lines, name)
    raise ArgumentError(not_found(lines, old, new, name))


def _folded_place(lines: Lines, wanted: Sequence[str], name: str, *, ends_line: bool) -> tuple[Place, Indents] | None:
    """Return the only place with the `wanted` lines, and how they are indented there. Places that nest the lines in
    another way do not count. With `ends_line`, places that end within a line do not count either. Return None if there
    is no place.

    :raises ~crow.domain.errors.ArgumentError: there are several places, or too many to compare.
    """
    folded = [fold(line) for line in wanted]
    if not any(folded):
        return None
    found: list[tuple[Place, Indents]] = []
    for number, place in enumerate(lines.find(folded)):
        if ends_line and not place.is_whole_end:
            continue
        if number * len(folded) > MAX_LINES_COMPARED:
            raise ArgumentError(f"too many places in {name} are similar to old_text; copy it exactly")
        indents = Indents.between(wanted, lines.at(place), skips_first=not place.is_whole_start, unit=lines.unit)
        if indents is not None:
            found.append((place, indents))
        if len(found) > 1:
            firsts = [each.first for each, _ in zip(lines.find(folded), range(_MAX_PLACES), strict=False)]
            raise ArgumentError(ambiguous(lines.contents, firsts, len(wanted), name, is_exact=False))
    return found[0] if found else None


def _readings(old: str, new: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the lines of old and new text: first as given, then without the blank lines that both have at their
    beginning and end, if there are any."""
    given_old, given_new = _content_lines(old), _content_lines(new) if new else []
    if new.endswith("\n") and not old.endswith("\n"):
        given_new.append("")  # as in an exact match, this makes a blank line
    yield given_old, given_new
    before, after = _blank_ends(given_old)
    has_same = _blank_ends(given_new) == (before, after)
    if (before or after) and has_same and before + after < len(given_old):
        yield given_old[before : len(given_old) - after], given_new[before : len(given_new) - after]


def _content_lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _blank_ends(lines: Sequence[str]) -> tuple[int, int]:
    """Count the blank lines at the beginning and at the end. Return zeros if all lines are blank."""
    filled = [index for index, line in enumerate(lines) if line.strip()]
    return (filled[0], len(lines) - 1 - filled[-1]) if filled else (0, 0)


def _merge(
    lines: Lines, place: Place, indents: Indents, old: Sequence[str], new: Sequence[str], name: str
) -> Replacement:
    """Make the edit at `place`. Where `old` and `new` are the same, the file keeps its own characters."""
    actual = lines.at(place)
    before, after = lines.contents[place.first][: place.start], lines.contents[place.last][place.end :]
    try:
        merged = merged_lines(old, actual, new, indents)
    except Unclear as error:
        raise ArgumentError(unclear(lines.contents, place.first, place.last, name, str(error))) from None
    last_end = lines.ends[place.last]
    if not merged and place.is_whole_start and place.is_whole_end:
        placed = ""
    else:
        end = lines.ends[place.first] or (lines.ends[place.first - 1] if place.first else "\n")
        # Each line keeps its own line end if the edit does not change the number of lines.
        ends = lines.ends[place.first : place.last] if len(merged) == len(actual) else [end] * (len(merged) - 1)
        merged = merged or [""]
        body = "".join(line + end for line, end in zip(merged[:-1], ends, strict=True))
        placed = before + body + merged[-1] + after + last_end
    pieces = [line + end for line, end in zip(lines.contents, lines.ends, strict=True)]
    return Replacement(
        text="".join([*pieces[: place.first], placed, *pieces[place.last + 1 :]]),
        count=1,
        line=place.first + 1,
        remark=describe_difference(old, actual, indents),
    )
