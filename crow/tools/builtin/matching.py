"""Finds the place in a file that an edit means, and makes the edit there.

An exact match comes first. Next, slips that old and new text share are undone, such as line numbers in front of each
line. Last, lines are compared without regard to white space and look-alike characters. If several places match, the
edit is refused, unless it asks for all exact matches. Text that the edit does not change keeps the file's own
characters.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import accumulate, pairwise

from crow.domain.errors import ArgumentError
from crow.domain.text import quote
from crow.tools.builtin.folding import LOOK_ALIKES, Lines, Place, fold, is_look_alike, look_alikes_in, places_of
from crow.tools.builtin.mismatch import NEW, OLD, already_made, ambiguous, applied_at, excerpt, not_found, unclear

_MAX_COMPARED = 4_000_000
"""Old and new text are compared line by line, or word by word, only if the product of their numbers of lines or words
is at most this."""

MAX_LINES_COMPARED = 1_000_000
"""The search for places with similar lines ends when it has compared about this many lines."""
_MAX_PLACES = 15
"""At most this many places are named if several match."""

_CUT = re.compile(r"(?=.*\w).{4,}")
"""Matches the rest of a line if it is long enough. A short rest, such as `f(` in `f(f(`, may be repeated on purpose."""

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


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
    """How old_text matched, if the match was not exact. The model is told."""


def replace_text(text: str, old: str, new: str, *, every: bool, name: str) -> Replacement:
    """Replace `old` with `new` in `text`, the text of the file `name`.

    :raises ~crow.domain.errors.ArgumentError: nothing matches, or several places match and `every` is false. The
        message shows the closest text.
    """
    if not old:
        raise ArgumentError("old_text is empty; expected text from the file. Use write_file for a new file")
    if old == new:
        raise ArgumentError("old_text and new_text are the same; nothing would change")
    exact = _replace_exactly(text, old, new, every=every, name=name)
    if exact is not None:
        return exact
    for meant in (each for slip in SLIPS for each in slip(old, new)):
        if not meant.old or meant.old == meant.new:
            continue
        exact = _replace_exactly(
            text, meant.old, meant.new, every=every, name=name, is_whole_lines=meant.is_whole_lines
        )
        if exact is not None:
            return replace(exact, remark="; ".join(each for each in (meant.remark, exact.remark) if each))
    return _replace_folded(Lines(text), old, new, name=name)


def _replace_exactly(
    text: str, old: str, new: str, *, every: bool, name: str, is_whole_lines: bool = False
) -> Replacement | None:
    """Replace `old`, with the line ends as given or with those of the file. Return None if it does not occur or, with
    `is_whole_lines`, if it does not occur as whole lines.

    :raises ~crow.domain.errors.ArgumentError: several places match and `every` is false.
    """
    for wanted, given in _spellings(text, old, new):
        places = [at for at in _occurrences(text, wanted) if not is_whole_lines or _are_whole_lines(text, at, wanted)]
        if not places:
            continue
        at = places[0]
        if not every and _begins_within_indentation(text, at):
            continue  # old_text is indented less than the file, so new_text must be indented first: _replace_folded
        if not every and text.find(wanted, at + 1) >= 0:  # a second match may overlap the first
            raise ArgumentError(_ambiguous_exactly(text, wanted, name))
        has_lf_end = "\n" not in old and not every and _line_end_at(text, at) == "\n"
        replacing = new if has_lf_end else given
        if not every:
            _check_edges(text, at, wanted, _with_line_end(text, at, wanted, replacing, name)[0], name)
        pieces, end, remark = list[str](), 0, ""
        for place in places:
            made, each_remark = _with_line_end(text, place, wanted, replacing, name)
            pieces += [text[end:place], made]
            end, remark = place + len(wanted), remark or each_remark
        return Replacement(
            text="".join([*pieces, text[end:]]), count=len(places), line=text.count("\n", 0, at) + 1, remark=remark
        )
    return None


def _occurrences(text: str, wanted: str) -> Iterator[int]:
    """Yield where `wanted` occurs. Occurrences do not overlap."""
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + len(wanted))


def _are_whole_lines(text: str, at: int, wanted: str) -> bool:
    """Return whether the match at `at` has whole lines, apart from indentation."""
    stop = at + len(wanted)
    is_end = wanted.endswith("\n") or stop == len(text) or text.startswith(("\n", "\r\n"), stop)
    return is_end and not text[text.rfind("\n", 0, at) + 1 : at].strip()


def _begins_within_indentation(text: str, at: int) -> bool:
    """Return whether the text at `at` begins with a part of its line's indentation, but not with all of it."""
    start = text.rfind("\n", 0, at) + 1
    return start < at and text[at] in " \t" and not text[start:at].strip()


def _with_line_end(text: str, at: int, wanted: str, given: str, name: str) -> tuple[str, str]:
    """Return the text to write in place of the match `wanted` at `at`, and a remark, which may be empty. This is the
    new text `given`. If only `wanted` ends with a line end, the new text gets one, too, because otherwise the next line
    would be joined to it. It gets none if it only leaves out the line end, or is empty and replaces whole lines.

    :raises ~crow.domain.errors.ArgumentError: the match begins within a line, so a joined line may be meant.
    """
    end = "\r\n" if wanted.endswith("\r\n") else "\n"
    if not wanted.endswith(end) or given.endswith("\n") or given + end == wanted:
        return given, ""
    is_line_start = at == 0 or text[at - 1] == "\n"
    if is_line_start and not given:
        return given, ""
    if not is_line_start and at + len(wanted) < len(text):
        shown = _matched_lines(text, at, wanted, more=1)
        raise ArgumentError(
            "old_text ends with a line end and new_text does not, so that the next line would be joined to it; write "
            f"the line end, or the next line, too. {name} has:\n{shown}"
        )
    return given + end, "the line end at its end was kept"


def _check_edges(text: str, at: int, wanted: str, given: str, name: str) -> None:
    """Check that an edit does not write a part of a line twice, as it would if `wanted`, the old text, is only a part
    of a line and `given`, the new text, has the whole line.

    :raises ~crow.domain.errors.ArgumentError: a part would stand there twice. The message shows the whole lines.
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
        f"old_text {where} within a line, and new_text has the rest of it, {quote(twice)}, which would stand there "
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


def _spellings(text: str, old: str, new: str) -> list[tuple[str, str]]:
    """Return the pairs of old and new text to try: the texts as given and, if the file has CRLF line ends, also the
    texts with CRLF."""
    if "\r\n" not in text or "\r" in old:
        return [(old, new)]
    new_crlf = re.sub(r"\r?\n", "\r\n", new)
    return [(old.replace("\n", "\r\n"), new_crlf), (old, new)] if "\n" in old else [(old, new_crlf)]


def _line_end_at(text: str, at: int) -> str:
    """Return the line end of the line at `at`. If that is the last line and has no line end, return the line end of the
    line before it."""
    end = text.find("\n", at)
    end = end if end >= 0 else text.rfind("\n", 0, at)
    return "\r\n" if end > 0 and text[end - 1] == "\r" else "\n"


# A slip is a change that both old and new text have, such as line numbers in front of each line. Each of these
# functions undoes one kind of slip. It yields the texts without the slip, or nothing if they do not have it.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meant:
    """Old and new text without a slip."""

    old: str
    new: str
    remark: str
    is_whole_lines: bool = False
    """The slip is possible only in whole lines: within a line, `-` and numbers are likely to be meant."""


_NUMBER = re.compile(r"\A[ \t]*(\d+)(?:\t|→|\||:)")
_SPACED_NUMBER = re.compile(r"\A[ \t]*(\d+)(?:→|\||:) ")
_FENCE = re.compile(r"\A\s*(```+|~~~+)[^\n`]*\n(.*?)\n?\1[ \t]*\n?\Z", re.DOTALL)
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|nbsp|#\d{1,6}|#[xX][0-9a-fA-F]{1,5});")
_ESCAPE = re.compile(r"\\([nt\"'\\])")
_ESCAPED = {"n": "\n", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def _without_numbers(old: str, new: str) -> Iterator[_Meant]:
    """Undo line numbers in front of each line, as grep and other agents show them. Some put a space after them."""
    found = [_NUMBER.match(line) for line in old.removesuffix("\n").split("\n")]
    numbers = [int(match[1]) if match else -1 for match in found]
    if -1 in numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return
    lines = new.split("\n")
    matches = [_NUMBER.match(line) for line in lines]
    if any(matches) and not all(match or not line for match, line in zip(matches, lines, strict=True)):
        return
    for number in (_NUMBER, _SPACED_NUMBER):
        bare_old, bare_new = (
            "\n".join(number.sub("", line, count=1) for line in text.split("\n")) for text in (old, new)
        )
        yield _Meant(old=bare_old, new=bare_new, remark="the line numbers were left out", is_whole_lines=True)


def _without_fence(old: str, new: str) -> Iterator[_Meant]:
    """Undo a Markdown fence around the text, and line numbers in it."""
    fenced, fenced_new = _FENCE.match(old), _FENCE.match(new)
    if fenced is None or (fenced_new is None and "```" in new):
        return
    bare_old, bare_new = fenced[2], fenced_new[2] if fenced_new else new
    yield _Meant(old=bare_old, new=bare_new, remark="the code fence was left out")
    yield from _without_numbers(bare_old, bare_new)


def _without_diff_marks(old: str, new: str) -> Iterator[_Meant]:
    """Undo the marks of a diff: `-` in front of old lines, `+` in front of new ones, and a space before the others."""
    olds, news = old.removesuffix("\n").split("\n"), new.removesuffix("\n").split("\n") if new else []
    is_marked = (
        all(line[:1] in ("-", " ", "") for line in olds)
        and all(line[:1] in ("+", " ", "") for line in news)
        and any(line.startswith("-") for line in olds)
        and (any(line.startswith("+") for line in news) or not news)
    )
    if is_marked:
        yield _Meant(
            old="\n".join(line[1:] for line in olds) + "\n" * old.endswith("\n"),
            new="\n".join(line[1:] for line in news) + "\n" * (new.endswith("\n") and bool(news)),
            remark="the diff markers were left out",
            is_whole_lines=True,
        )


def _without_entities(old: str, new: str) -> Iterator[_Meant]:
    """Undo HTML entities. Only those that occur in the old text are known to be a slip."""
    kinds = {match[0] for match in _ENTITY.finditer(old)}
    if kinds and not {match[0] for match in _ENTITY.finditer(new)} - kinds:
        plain_old, plain_new = (_ENTITY.sub(lambda match: html.unescape(match[0]), each) for each in (old, new))
        yield _Meant(old=plain_old, new=plain_new, remark="HTML entities were decoded")


def _without_escapes(old: str, new: str) -> Iterator[_Meant]:
    """Undo one level of backslash escapes. Only those that occur in the old text are known to be a slip."""
    kinds = {match[1] for match in _ESCAPE.finditer(old)}
    if kinds and not {match[1] for match in _ESCAPE.finditer(new)} - kinds:
        plain_old, plain_new = (_ESCAPE.sub(lambda match: _ESCAPED[match[1]], each) for each in (old, new))
        yield _Meant(old=plain_old, new=plain_new, remark="one level of backslash escapes was undone")


def _without_blank_lines(old: str, new: str) -> Iterator[_Meant]:
    """Leave out the blank lines before and after the old text, and as many before and after the new text."""
    # The first line end at the end belongs to the last line.
    before, after = len(old) - len(old.lstrip("\n")), max(0, len(old) - len(old.rstrip("\n")) - 1)
    is_shared = new.startswith("\n" * before) and new.endswith("\n" * (after + 1)) and len(new) > before + after
    is_shared = is_shared or (not after and new.startswith("\n" * before))
    if (before or after) and is_shared and old.strip("\n"):
        yield _Meant(
            old=old[before : len(old) - after],
            new=new[before : len(new) - after],
            remark="blank lines around the text were left out",
        )


def _without_look_alikes(old: str, new: str) -> Iterator[_Meant]:
    """Write plain characters for look-alikes and odd spaces. Only those that occur in the old text are known to be a
    slip."""
    plain = {ord(each): LOOK_ALIKES.get(ord(each), " ") for each in set(old) if is_look_alike(each)}
    if plain:
        yield _Meant(
            old=old.translate(plain), new=new.translate(plain), remark="characters that look alike were written plainly"
        )


SLIPS: tuple[Callable[[str, str], Iterator[_Meant]], ...] = (
    _without_numbers,
    _without_fence,
    _without_diff_marks,
    _without_entities,
    _without_escapes,
    _without_blank_lines,
    _without_look_alikes,
)


def _replace_folded(lines: Lines, old: str, new: str, *, name: str) -> Replacement:
    """Replace the only place that matches `old` when lines are folded.

    :raises ~crow.domain.errors.ArgumentError: no place matches, or several do, or the indentation of `new` cannot be
        derived from the file.
    """
    for old_lines, new_lines in _readings(old, new):
        wanted = [fold(line) for line in old_lines]
        if not any(wanted):
            continue
        found: list[tuple[Place, Indents]] = []
        for number, place in enumerate(lines.find(wanted)):
            if old.endswith("\n") and not place.is_whole_end:
                continue  # old_text says that the line ends here
            if number * len(wanted) > MAX_LINES_COMPARED:
                raise ArgumentError(f"too many places in {name} are similar to old_text; copy it exactly")
            indents = Indents.between(old_lines, lines.at(place), skips_first=not place.is_whole_start, unit=lines.unit)
            if indents is not None:
                found.append((place, indents))
            if len(found) > 1:
                places = [each.first for each, _ in zip(lines.find(wanted), range(_MAX_PLACES), strict=False)]
                raise ArgumentError(ambiguous(lines.contents, places, len(old_lines), name, is_exact=False))
        if found:
            place, _ = found[0]
            applied = applied_at(lines, new, old)
            if applied is not None and not (place.first <= applied[1] and applied[0] <= place.last):
                raise ArgumentError(already_made(lines, applied, name))
            return _merge(lines, *found[0], old_lines, new_lines, name)
    raise ArgumentError(not_found(lines, old, new, name))


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
    """Count the blank lines at the beginning and at the end."""
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


def merged_lines(old: Sequence[str], actual: Sequence[str], new: Sequence[str], indents: Indents) -> list[str]:
    """Apply the change from `old` to `new` to `actual`, which has as many lines as `old`."""
    bare_old, bare_new = [line.rstrip() for line in old], [line.rstrip() for line in new]
    if len(old) * len(new) > _MAX_COMPARED:
        steps = [("replace", 0, len(old), 0, len(new))]
    else:
        steps = list(SequenceMatcher(None, bare_old, bare_new, autojunk=False).get_opcodes())
    merged: list[str] = []
    for step, old_from, old_to, new_from, new_to in steps:
        if step == "equal":
            merged += actual[old_from:old_to]
        elif step == "replace" and old_to - old_from == new_to - new_from:
            merged += map(indents.merged, old[old_from:old_to], actual[old_from:old_to], new[new_from:new_to])
        else:
            merged += map(indents.placed, new[new_from:new_to])
    return merged


class Unclear(Exception):
    """The edit cannot be made without a guess. The message says why."""


class Indents:
    """Converts the indentation of old_text and new_text to the indentation of the file. `pairs` maps the indentations
    of the lines of old_text to those of the same lines in the file."""

    def __init__(self, pairs: dict[str, str], unit: int) -> None:
        self._pairs = pairs
        self._unit = unit

    @classmethod
    def between(cls, old: Sequence[str], actual: Sequence[str], *, skips_first: bool, unit: int) -> Indents | None:
        """Return the indentation that turns `old` into `actual`, or None if there is none that keeps the nesting.
        `unit` is the width of one level of indentation in the file."""
        pairs: dict[str, str] = {}
        for number, (mine, theirs) in enumerate(zip(old, actual, strict=True)):
            if mine.strip() and not (skips_first and number == 0):
                indent = _indent_of(theirs)
                if not indent.isascii():  # odd spaces are not copied to other lines
                    indent = "".join(each if each.isascii() else " " for each in indent)
                if pairs.setdefault(_indent_of(mine), indent) != indent:
                    return None
        widths = sorted((_width(mine), _width(theirs)) for mine, theirs in pairs.items())
        is_nested_alike = all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(widths))
        return cls(pairs, unit) if is_nested_alike or len(pairs) < 2 else None

    @property
    def changes(self) -> bool:
        """Whether any line is indented differently."""
        return any(mine != theirs for mine, theirs in self._pairs.items())

    def placed(self, line: str) -> str:
        """Return a line of new_text with the indentation of the file."""
        if not line.strip():
            return line
        indent = _indent_of(line)
        return self._of(indent) + line[len(indent) :]

    def merged(self, old: str, actual: str, new: str) -> str:
        """Return a line of the file, changed as `old` became `new`."""
        if not new.strip():
            return new
        if not old.strip():
            return self.placed(new)
        old_body, actual_body, new_body = (line.strip() for line in (old, actual, new))
        body = new_body if old_body == actual_body else _merged_body(old_body, actual_body, new_body)
        end = new[len(new.rstrip()) :]
        return (_indent_of(actual) if _indent_of(new) == _indent_of(old) else self._of(_indent_of(new))) + body + end

    def _of(self, indent: str) -> str:
        """Return the indentation in the file for `indent` in new_text."""
        if not self.changes:
            return indent
        if (known := self._pairs.get(indent)) is not None:
            return known
        found = [each for each in (self._shifted(indent), self._scaled(indent)) if each is not None]
        if len(set(found)) > 1:  # only one of them may fit to the levels of the file
            widths = {_width(theirs) for theirs in self._pairs.values()}
            found = [each for each in found if any((_width(each) - width) % self._unit == 0 for width in widths)]
        if not found:
            raise Unclear(
                f"the indentation {indent!r} of a new line has no counterpart in the old lines, which are indented "
                "otherwise than the file"
            )
        return found[0]

    def _shifted(self, indent: str) -> str | None:
        """If all lines of the file are indented by the same text more, or less, than those of old_text, return `indent`
        with this text added or removed. Otherwise return None."""
        shifts = set()
        for mine, theirs in self._pairs.items():
            if theirs.endswith(mine):
                shifts.add(("", theirs.removesuffix(mine)))
            elif mine.endswith(theirs):
                shifts.add((mine.removesuffix(theirs), ""))
            else:
                return None
        if len(shifts) != 1:
            return None
        removed, added = shifts.pop()
        return added + indent[len(removed) :] if indent.startswith(removed) else None

    def _scaled(self, indent: str) -> str | None:
        """Convert between tabs and spaces, or between widths of indentation, in the ratio of the known lines. Return
        None if they have no common ratio."""
        known = {mine: theirs for mine, theirs in self._pairs.items() if mine or theirs}
        units = {character for theirs in known.values() for character in theirs}
        own = {character for mine in (*known, indent) for character in mine}
        if len(units) != 1 or len(own) > 1:
            return None
        points = sorted((len(mine), len(theirs)) for mine, theirs in self._pairs.items())
        points = points if len(points) > 1 else [(0, 0), *points]
        (x0, y0), (x1, y1) = points[0], points[-1]
        if x0 == x1:
            return None
        slope = Fraction(y1 - y0, x1 - x0)
        if any(y != y0 + slope * (x - x0) for x, y in points):
            return None
        width = y0 + slope * (len(indent) - x0)
        return units.pop() * int(width) if width.denominator == 1 and width >= 0 else None


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _width(indent: str) -> int:
    return len(indent.expandtabs(8))


def _merged_body(old: str, actual: str, new: str) -> str:
    """Apply the change from `old` to `new` to `actual`, which differs from `old` in white space and look-alikes."""
    old_places, actual_places = places_of(old), places_of(actual)
    old_tokens, new_tokens = (_TOKEN.findall(text) for text in (old, new))
    if old_places is None or actual_places is None or len(old_tokens) * len(new_tokens) > _MAX_COMPARED:
        raise Unclear("a line of the file differs in characters that look alike")

    def index_of(place: int) -> int:
        """Return the index of the first compared character at `place` in `old` or after it."""
        index = bisect_left(old_places, place)
        is_between = index < len(old_places) and not fold(old[place : old_places[index]])
        # One character of the file may stand for several of old_text. It cannot be kept in part.
        if not is_between or (index and actual_places[index] == actual_places[index - 1]):
            raise Unclear("the edit would cut a character of the file that it spells otherwise")
        return index

    def counterpart(start: int, end: int) -> str:
        return actual[actual_places[index_of(start)] : actual_places[index_of(end)]]

    starts = [0, *accumulate(map(len, old_tokens))]
    merged = []
    for step, old_from, old_to, new_from, new_to in SequenceMatcher(
        None, old_tokens, new_tokens, autojunk=False
    ).get_opcodes():
        if step == "equal":
            merged.append(counterpart(starts[old_from], starts[old_to]))
        else:
            merged += new_tokens[new_from:new_to]
    return "".join(merged)


def describe_difference(
    old: Sequence[str], actual: Sequence[str], indents: Indents, *, what: str = OLD, made: str = NEW
) -> str:
    """Say how `old` differs from `actual`."""
    names = look_alikes_in("\n".join(actual), "\n".join(old))
    how = f"white space and look-alikes: the file has {names}" if names else "white space"
    return f"{what} differed only in {how}" + (f"; {made} was indented to match" if indents.changes else "")
