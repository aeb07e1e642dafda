"""Says why an edit cannot be made, and shows the most similar part of the file, so that the next try can succeed.

The file is searched first for the lines of the old text as a formatter may have changed them, then for the same lines
in another order. If neither is found, each line of the old text votes for the places where the text would have to begin
for this line to fit. The places with the most votes are compared with the whole old text, and the most similar one is
shown.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate

from crow.domain.text import shorten
from crow.tools.builtin.folding import Lines, fold

_MAX_EXCERPT_LINES = 30
_MAX_EXCERPT_CHARS = 3_000
_MAX_LINE_CHARS = 300
_MAX_PLACES = 4
_MAX_TINY_LINES = 8
"""A file with at most this many lines is shown as a whole."""
_MAX_CAUSES = 3
_MAX_WORD_CHARS = 60
_MAX_POSITIONS = 50
"""At most this many positions of one line are considered."""
_MAX_SIMILAR = 40
"""At most this many lines are compared character by character."""
_MAX_TOKENS = 600
"""At most this many tokens of each of two texts are compared, because the time grows with the square of this number."""
_MIN_RATIO = 0.6
_MIN_LEFT = 0.8
"""A line that an edit removes counts as still there if its ratio to a line of the file is higher than this."""
_MIN_APPLIED_CHARS = 24
"""A shorter new text may occur in the file by chance, so it does not show that an edit was already made."""
OLD = "old_text"
NEW = "new_text"
"""How messages name the old and the new text, if the edit is a call of edit_file."""
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
_WORD = re.compile(r"\w{2,}")
_FORMAT = re.compile(r"[\s,;'\"`()\\]+")
_ELLIPSIS = r"(?:\.\.\.|…)"
_PHRASE = (
    r"(?:existing|unchanged|remaining|previous|other)\s+(?:code|content|contents|functions?|methods?|imports?|lines?|"
    r"implementation|logic|fields?|tests?)|(?:the\s+)?(?:rest|remainder)\s+of\s+(?:the\s+|this\s+)?"
    r"(?:code|file|function|class|method|implementation|module|content)|unchanged|same\s+as\s+(?:before|above)|omitted|"
    r"(?:code|content|implementation|everything)\s+(?:remains?|stays?|is)\s+(?:the\s+same|unchanged|here)"
)
_PLACEHOLDER = re.compile(
    rf"""\s*(?://|\#|/\*+|<!--|--|;|%|\{{/\*|"|')?\s*\(?\[?\s*
    (?:{_ELLIPSIS}\s*(?:[^.…\n]{{0,40}}\b)?(?:{_PHRASE})\b[^\n]{{0,40}}      # ... rest of the code ...
      |(?:{_PHRASE})\b[^\n.…]{{0,30}}{_ELLIPSIS}[^\n]{{0,20}}               # existing code ...
      |(?:existing\s+code|(?:the\s+)?rest\s+of\s+(?:the\s+)?(?:code|file|function|class|method))
        (?:\s+(?:remains?|stays?|goes|is))?(?:\s+(?:unchanged|the\s+same))?(?:\s+here)?
    )\s*\]?\)?\s*(?:\*+/|-->|\*/\}}|"|')?\s*""",
    re.IGNORECASE | re.VERBOSE,
)
_BARE = re.compile(rf"\s*(?://|\#|/\*+|<!--|--|;)\s*{_ELLIPSIS}\s*(?:\*+/|-->)?\s*")


def placeholder_in(new: str, before: str) -> str | None:
    """Return the first line of `new` that stands for code left out, such as `# ... existing code ...`. Lines that
    `before`, the text of the file, also has do not count. Return None if there is no such line."""
    stubs = [
        line
        for line in map(str.strip, new.split("\n"))
        if 3 <= len(line) <= 120 and (_PLACEHOLDER.fullmatch(line) or _BARE.fullmatch(line))
    ]
    if not stubs:
        return None
    known = {line.strip() for line in before.split("\n")}
    return next((stub for stub in stubs if stub not in known), None)


def ambiguous(
    lines: Sequence[str],
    firsts: Sequence[int],
    count: int,
    name: str,
    *,
    times: int = 0,
    is_exact: bool = True,
    what: str = OLD,
    advice: str = "include more lines so that it occurs once, or set all=true",
) -> str:
    """Return the error message for a text that occurs several times. `what` is the name of the text, and `count` its
    number of lines. `firsts` are some of the lines at which it begins, counted from 0. `times` is the number of
    occurrences; 0 if it is not known. `is_exact` is False if the text is found only when white space is ignored."""
    parts: list[tuple[int, int]] = []
    for first in firsts[:_MAX_PLACES]:
        start, end = max(0, first - 2), first + count + 1
        if parts and start <= parts[-1][1]:
            start, _ = parts.pop()
        parts.append((start, end))
    shown = [excerpt(lines, start, end, most=14) for start, end in parts]
    others = [str(first + 1) for first in firsts[_MAX_PLACES:]]
    if others:
        shown.append(f"(also at line {', '.join(others)}{'' if times == len(firsts) else ', ...'})")
    often = f"{times} times" if times else f"{len(firsts)} times" if len(firsts) <= _MAX_PLACES else "many times"
    message = (
        f"{what} occurs {often} in {name}; {advice}"
        if is_exact
        else f"{what} occurs {often} in {name} if white space is ignored; copy one place with its white space"
    )
    return f"{message}:\n" + "\n--\n".join(shown)


def unclear(lines: Sequence[str], first: int, last: int, name: str, reason: str, *, what: str = OLD) -> str:
    """Return the error message for an edit whose old text is found only when white space is ignored, and whose new text
    cannot be fitted to the file. `reason` says why. `first` and `last` are the indexes of the matching lines."""
    return f"{reason}. Copy {what} exactly; {name} has:\n{excerpt(lines, first, last + 1)}"


def not_found(lines: Lines, old: str, new: str, name: str, *, what: str = OLD, made: str = NEW) -> str:
    """Return the error message for a text `old` that does not occur in the file. It shows the most similar lines.
    `what` and `made` name the old and the new text in the message."""
    wanted = [line.removesuffix("\r") for line in old.strip("\n").split("\n")]
    start = f"{what} does not occur in {name}"
    stub = placeholder_in(old, "")
    if stub is not None and stub not in map(str.strip, lines.contents):
        return f"{start}: `{stub}` stands for lines of the file; write these lines out, or make two edits around them"
    applied = applied_at(lines, new, old)
    if applied is not None:
        return already_made(lines, applied, name, what=what, made=made)
    region = _closest(lines, wanted, new)
    if region is None and 1 < len(lines.contents) <= _MAX_TINY_LINES:
        return f"{start}. The file has:\n{excerpt(lines.contents, 0, len(lines.contents))}"
    if region is None:
        return f"{start}, nor anything like it; read the file again, or look for the text with grep"
    first, last = region
    causes = _explain(wanted, lines.contents[first : last + 1], first, what)
    why = f": {'; '.join(causes)}" if causes else ""
    around = excerpt(lines.contents, max(0, first - 1), last + 2)
    return f"{start}{why}. The file has:\n{around}"


def excerpt(lines: Sequence[str], start: int, end: int, *, most: int = _MAX_EXCERPT_LINES) -> str:
    """Return lines `start` to `end` (exclusive, counted from 0). Each line begins with its number, counted from 1, and
    a tab. Long lines are cut. If there are more than `most` lines or too many characters, a note says which lines are
    not shown."""
    end = min(end, len(lines))
    if end == len(lines) and end > start + 1 and not lines[-1]:
        end -= 1  # the text ends with a line end, so the last, empty line is not one of its lines
    rows: list[str] = []
    kept = list(range(start, end))
    if len(kept) > most:
        kept = [*kept[: most // 2], -1, *kept[-(most - most // 2) :]]
    room = _MAX_EXCERPT_CHARS
    for index in kept:
        if index < 0:
            rows.append(f"[lines {start + most // 2 + 1}-{end - (most - most // 2)} are not shown]")
            continue
        line = lines[index]
        shown = (
            line
            if len(line) <= _MAX_LINE_CHARS
            else f"{line[:_MAX_LINE_CHARS]}[... {len(line) - _MAX_LINE_CHARS:,} more]"
        )
        room -= len(shown)
        if room < 0 and rows:
            rows.append(f"[lines {index + 1}-{end} are not shown]")
            break
        rows.append(f"{index + 1}\t{shown}")
    return "\n".join(rows)


def already_made(lines: Lines, place: tuple[int, int], name: str, *, what: str = OLD, made: str = NEW) -> str:
    """Return the error message for an edit whose new text is already in the file. `place` has the indexes of its first
    and last line."""
    first, last = place
    shown = excerpt(lines.contents, max(0, first - 2), last + 3, most=14)
    start = f"{what} does not occur in {name}, but {made} does, from line {first + 1}"
    return f"{start}. Was the edit already made?\n{shown}"


def applied_at(lines: Lines, new: str, old: str) -> tuple[int, int] | None:
    """Return the indexes of the first and last line of `new` in the file if the edit from `old` to `new` was probably
    already made: `new` is long enough, and occurs once. Otherwise return None. Also return None if the edit removes
    lines and one of them is still close before or after `new`."""
    wanted = [fold(line) for line in new.strip("\n").split("\n")]
    if len("".join(wanted)) < _MIN_APPLIED_CHARS:
        return None
    places = [place for place, _ in zip(lines.find(wanted), range(2), strict=False)]
    if len(places) != 1:
        return None
    first, last = places[0].first, places[0].last
    removed = [line for line in map(fold, old.split("\n")[:_MAX_POSITIONS]) if len(line) > 1 and line not in wanted]
    bare_old, bare_new = ({_FORMAT.sub("", line) for line in text.split("\n")} for text in (old, new))
    is_removal = bare_new <= bare_old or _bare(new) in _bare(old) or len(removed) > len(wanted)
    reach = len(old.split("\n")) + 1
    beside = [*lines.folded[max(0, first - reach) : first], *lines.folded[last + 1 : last + 1 + reach]]
    is_left = any(_ratio(one[:200], other[:200]) > _MIN_LEFT for one in removed for other in beside[:_MAX_POSITIONS])
    return None if is_removal and is_left else (first, last)


def _bare(text: str) -> str:
    return _FORMAT.sub("", text)


def _closest(lines: Lines, wanted: Sequence[str], new: str) -> tuple[int, int] | None:
    """Return the indexes of the first and last line of the part of the file that is most similar to the `wanted` lines,
    or None if no part is similar. Among similar parts, one that shares lines with `new` is preferred."""
    folded = [fold(line) for line in wanted][:400]
    reformatted = _reformatted(lines.folded, folded)
    if reformatted is not None:
        return reformatted
    reordered = _reordered(lines.folded, folded)
    if reordered is not None:
        return reordered
    hints = {fold(line) for line in new.split("\n")[:400]} - set(folded)
    votes = _votes(lines.folded, folded) + _similar_votes(lines.folded, folded)
    best: tuple[float, int, int] | None = None
    for start, _ in votes.most_common(8):
        low = max(0, start - 3 - len(folded) // 4)
        window = lines.folded[low : max(0, start) + len(folded) + 3 + len(folded) // 4]
        blocks = [
            block
            for block in SequenceMatcher(None, folded, window, autojunk=False).get_matching_blocks()
            if any(folded[block.a : block.a + block.size])
        ]
        if blocks:
            score = float(sum(len(line) + 1 for block in blocks for line in folded[block.a : block.a + block.size]))
            first = low + blocks[0].b - blocks[0].a
            last = low + blocks[-1].b + len(folded) - 1 - blocks[-1].a
        else:
            score, first, last = 0.0, start, start + len(folded) - 1
        first, last = max(0, first), min(len(lines.folded) - 1, max(first, last))
        score += sum(len(line) for line in hints.intersection(lines.folded[first : last + 1]))
        # Between two equally similar places, prefer the one with the same indentation.
        score += len(set(wanted).intersection(lines.contents[first : last + 1]))
        given, found = " ".join(folded)[:2_000], " ".join(lines.folded[first : last + 1])[:2_000]
        score += _ratio(_TOKEN.findall(given)[:_MAX_TOKENS], _TOKEN.findall(found)[:_MAX_TOKENS]) * len(given)
        if best is None or score > best[0]:
            best = (score, first, last)
    return None if best is None else best[1:]


def _reformatted(lines: Sequence[str], wanted: Sequence[str]) -> tuple[int, int] | None:
    """Return the indexes of the first and last line of the only place that is the same as `wanted`, apart from what a
    formatter may change: white space, line breaks, commas, semicolons, quotes and round brackets. Return None if there
    is no such place, or several."""
    bare = [_FORMAT.sub("", line) for line in lines]
    pieces = [_FORMAT.sub("", line) for line in wanted]
    text, searched = "".join(bare), "".join(pieces)
    at = text.find(searched) if pieces[0] and pieces[-1] and len(searched) >= _MIN_APPLIED_CHARS else -1
    if at < 0 or text.find(searched, at + 1) >= 0:
        return None
    starts = [0, *accumulate(map(len, bare))]
    return bisect_right(starts, at) - 1, bisect_left(starts, at + len(searched)) - 1


def _reordered(lines: Sequence[str], wanted: Sequence[str]) -> tuple[int, int] | None:
    """Return the indexes of the first and last line of the only place that has the `wanted` lines in another order.
    Blank lines do not count. Return None if there is no such place, or several."""
    filled = [at for at, line in enumerate(lines) if line]
    given = [line for line in wanted if line]
    count, total = len(given), sum(map(hash, given))
    sums = [0, *accumulate(hash(lines[at]) for at in filled)]
    found = [at for at in range(len(filled) - count + 1) if sums[at + count] - sums[at] == total]
    return (filled[found[0]], filled[found[0] + count - 1]) if len(found) == 1 and count > 1 else None


def _votes(lines: Sequence[str], wanted: Sequence[str]) -> Counter[int]:
    """Return a score for each line of the file at which `wanted` could begin. Each line of `wanted` that would then be
    at the right place adds to the score. Rare and long lines add more."""
    positions: defaultdict[str, list[int]] = defaultdict(list)
    known = {line for line in wanted if len(line) > 2}
    for index, line in enumerate(lines):
        if line in known and len(positions[line]) < _MAX_POSITIONS:
            positions[line].append(index)
    votes: Counter[int] = Counter()
    for offset, line in enumerate(wanted):
        for position in positions.get(line, ()):
            votes[position - offset] += 100 * min(len(line), 80) // len(positions[line])
    return votes


def _similar_votes(lines: Sequence[str], wanted: Sequence[str]) -> Counter[int]:
    """Return scores as :func:`_votes` does, but for lines that are only similar. Only the longest lines of `wanted`
    count."""
    longest = sorted(range(len(wanted)), key=lambda index: -len(wanted[index]))[:4]
    words = {index: set(_WORD.findall(wanted[index][:_MAX_LINE_CHARS])) for index in longest}
    searched = set().union(*words.values())
    if not searched:
        return Counter()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        for word in searched.intersection(_WORD.findall(line[:_MAX_LINE_CHARS])):
            if len(found[word]) < 20 * _MAX_POSITIONS:
                found[word].append(number)
    votes: Counter[int] = Counter()
    for index in longest:
        shared = Counter(number for word in words[index] for number in found.get(word, ()))
        for number, _ in shared.most_common(_MAX_SIMILAR):
            ratio = _ratio(wanted[index][:_MAX_LINE_CHARS], lines[number][:_MAX_LINE_CHARS])
            if ratio >= _MIN_RATIO or wanted[index] in lines[number]:
                votes[number - index] += int(100 * ratio * min(len(wanted[index]), 80))
    return votes


def _ratio(one: Sequence[str], other: Sequence[str]) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio() if one and other else 0.0


def _explain(wanted: Sequence[str], actual: Sequence[str], first: int, what: str = OLD) -> list[str]:
    """Say in a few short sentences how the wanted lines differ from the actual ones. `first` is the index of the first
    actual line."""
    mine, theirs = [fold(line) for line in wanted], [fold(line) for line in actual]
    if mine == theirs:
        return ["its lines are indented in another way"]
    if mine != theirs and _FORMAT.sub("", "".join(mine)) == _FORMAT.sub("", "".join(theirs)):
        return ["it differs there in line breaks, commas, quotes or brackets, as after a formatter"]
    if sorted(filter(None, mine)) == sorted(filter(None, theirs)):
        return ["its lines are in another order there"]
    causes: list[str] = []
    for step, from_mine, to_mine, from_theirs, to_theirs in SequenceMatcher(
        None, mine[:400], theirs[:400], autojunk=False
    ).get_opcodes():
        if step == "insert" and any(theirs[from_theirs:to_theirs]):
            causes.append(f"{what} leaves out {name_lines(first + from_theirs + 1, first + to_theirs)}")
        elif step == "insert":
            causes.append(f"line {first + from_theirs + 1} is blank, which {what} leaves out")
        elif step == "delete" and any(mine[from_mine:to_mine]):
            extra = next(line for line in mine[from_mine:to_mine] if line)
            causes.append(f"the file does not have {_shown(extra)} there")
        elif step == "delete":
            causes.append(f"{what} has a blank line that the file does not have")
        elif step == "replace" and to_mine - from_mine == to_theirs - from_theirs:
            pairs = zip(mine[from_mine:to_mine], theirs[from_theirs:to_theirs], strict=True)
            for offset, (one, other) in enumerate(pairs):
                causes.append(_explain_line(one, other, first + from_theirs + offset + 1, what))
        elif step == "replace":
            causes.append(f"{name_lines(first + from_theirs + 1, first + to_theirs)} are different")
    return causes[:_MAX_CAUSES] + (["and more"] if len(causes) > _MAX_CAUSES else [])


def _explain_line(mine: str, theirs: str, number: int, what: str) -> str:
    if not mine or not theirs:
        return f"line {number} is {'blank' if not theirs else _shown(theirs)}"
    old, new = _TOKEN.findall(mine[:_MAX_LINE_CHARS]), _TOKEN.findall(theirs[:_MAX_LINE_CHARS])
    changed = [step for step in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if step[0] != "equal"]
    if not changed:
        return f"line {number} differs"
    first, last = changed[0], changed[-1]
    has, wants = "".join(new[first[3] : last[4]]), "".join(old[first[1] : last[2]])
    if not wants.strip():
        return f"line {number} has {_shown(has.strip())}, which {what} leaves out"
    if not has.strip():
        return f"line {number} does not have {_shown(wants.strip())}"
    return f"line {number} has {_shown(has)} where {what} has {_shown(wants)}"


def name_lines(first: int, last: int) -> str:
    """Return `line 5` or `lines 5-7`."""
    return f"line {first}" if first == last else f"lines {first}-{last}"


def _shown(text: str) -> str:
    return f"`{shorten(text, _MAX_WORD_CHARS)}`"
