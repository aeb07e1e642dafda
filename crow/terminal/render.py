"""Formats prose, diffs, tool calls and plans for a terminal, with colours and other styles."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, TypeAlias

from rich.cells import cell_len, set_cell_size

from crow.domain.diff import diff_lines
from crow.domain.text import on_one_line, plural, safe

_PROSE_COLUMNS = 100
"""Prose is wrapped at this column even in a wider terminal, because long lines are hard to read."""


DIFF_LINES = 40
"""The maximum number of lines that are shown of each diff of a finished call."""

_OUTPUT_LINES = 8
"""Only this many lines at the end of a finished call's output are shown."""

_PLAN_STEPS = 50

Tone: TypeAlias = Literal[
    "", "dim", "bold", "title", "italic", "strike", "code", "added", "removed", "place", "bad", "good"
]

_SGR: Mapping[Tone, tuple[str, str]] = {
    "": ("", ""),
    "dim": ("2", ""),
    "bold": ("1", ""),
    "title": ("1", "36"),
    "italic": ("3", ""),
    "strike": ("9", ""),
    "code": ("", "36"),
    "added": ("", "32"),
    "removed": ("", "31"),
    "place": ("2", "36"),
    "bad": ("1", "31"),
    "good": ("", "32"),
}
"""The SGR codes (escape sequences for text) of each tone: first the style, then the colour."""

_ON_LIGHT = {"31": "38;5;124", "32": "38;5;22", "36": "38;5;24"}
"""Maps colours to the dark colours of the fixed palette that replace them on a light background, because most
terminals' cyan and green are hard to read there. The style `dim` is left out if there is a colour, because it would
make the colour lighter."""

Segment: TypeAlias = "tuple[Tone, str]"


@dataclass(frozen=True, slots=True)
class Look:
    """The way in which text is shown."""

    has_styles: bool = True
    """Whether the text may contain escape sequences."""
    has_colors: bool = True
    is_light: bool = False
    """Whether the terminal has a light background."""
    has_words: bool = False
    """For screen readers: words replace symbols, and crow adds no line breaks."""

    @property
    def columns(self) -> int:
        """The current width of the terminal."""
        return max(20, shutil.get_terminal_size().columns)

    @property
    def prose_columns(self) -> int:
        """The width at which prose is wrapped. If prose is not wrapped, this is a very large number."""
        return 1_000_000 if self.has_words else min(_PROSE_COLUMNS, self.columns - 1)

    def paint(self, tone: Tone, text: str) -> str:
        """Return `text` in this tone, with hidden characters escaped."""
        text = safe(text)
        plain, color = _SGR[tone]
        if self.is_light and self.has_colors and color:
            plain, color = plain.replace("2", ""), _ON_LIGHT[color]
        codes = ";".join(code for code in (plain, color if self.has_colors else "") if code)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.has_styles and codes and text else text

    def symbol(self, symbol: str, word: str) -> str:
        """Return the symbol, or `word` with a colon if the look is for a screen reader."""
        return f"{word}:" if self.has_words else symbol


def look_of(environment: Mapping[str, str], *, is_plain: bool) -> Look:
    """Return the look that TERM, NO_COLOR, COLORFGBG and `--plain` select. Some terminals set COLORFGBG to the numbers
    of their text and background colours, such as `0;15`."""
    has_styles = not is_plain and environment.get("TERM", "dumb") not in ("", "dumb")
    has_colors = has_styles and not environment.get("NO_COLOR")
    is_light = environment.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    return Look(has_styles=has_styles, has_colors=has_colors, is_light=has_colors and is_light, has_words=is_plain)


_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\U00020000-\U0003ffff"
_PIECES = re.compile(rf"([ \t]+|[{_WIDE}])")
_WORD_CHARS = 60
"""The maximum length of a word in characters. A longer word is written in parts of this length."""


class WrappedText:
    """A text that grows only at its end. Line breaks between words make the lines fit the terminal.

    A word is written when it is complete, and written text never changes.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._out: list[Segment] = []
        self._word: list[Segment] = []
        self._size = 0
        self._space = ""
        self.column = 0
        self.lead: Sequence[Segment] = ()
        """The beginning of each line after a break."""

    def put(self, tone: Tone, text: str) -> None:
        """Append text without line ends."""
        for piece in _PIECES.split(text):
            if not piece:
                continue
            if piece[0] in " \t":
                self._end_word()
                self._space += piece.replace("\t", " ")
                continue
            is_wide = len(piece) == 1 and cell_len(piece) > 1
            if is_wide:
                self._end_word()
            rest = piece
            while rest:
                part, rest = rest[: _WORD_CHARS - self._size], rest[_WORD_CHARS - self._size :]
                self._word.append((tone, part))
                self._size += len(part)
                if is_wide or self._size == _WORD_CHARS:
                    self._end_word()

    def put_unbroken(self, tone: Tone, text: str) -> None:
        """Append text without breaking it into lines."""
        self._end_word()
        self._out.append((tone, self._space + text))
        self.column += cell_len(self._space + text)
        self._space = ""

    def end_line(self) -> None:
        """End the line, and drop the spaces at its end."""
        self._end_word()
        self._space = ""
        self._out.append(("", "\n"))
        self.column = 0

    def end(self) -> None:
        """End the line, unless it is empty."""
        self._end_word()
        if self.column:
            self.end_line()

    def take(self) -> str:
        """Return the text that was written since the last call of this method."""
        text = "".join(self._look.paint(tone, part) for tone, part in _joined(self._out))
        self._out.clear()
        return text

    def _end_word(self) -> None:
        if not self._word:
            return
        width = sum(cell_len(safe(text)) for _, text in self._word)
        lead = sum(cell_len(text) for _, text in self.lead)
        if self.column + len(self._space) + width > self._look.prose_columns and self.column > lead:
            self._out += [("", "\n"), *self.lead]
            self.column, self._space = lead, ""
        is_same_tone = self._out and self._out[-1][0] == self._word[0][0]
        self._out += [(self._word[0][0] if is_same_tone else "", self._space), *self._word]
        self.column += len(self._space) + width
        self._word.clear()
        self._size, self._space = 0, ""


def wrapped(look: Look, tone: Tone, text: str) -> str:
    """Return the text in this tone, with line breaks between words and at the end."""
    out = WrappedText(look)
    for line in text.split("\n"):
        out.put(tone, line)
        out.end_line()
    return out.take()


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments. Adjacent segments of the same tone are joined."""
    return [(tone, "".join(text for _, text in same)) for tone, same in groupby(segments, key=itemgetter(0))]


def title_of(look: Look, title: str, state: Literal["running", "completed", "failed"]) -> str:
    """Return the line that shows a tool call and its state."""
    symbols: Mapping[str, tuple[Tone, str, str]] = {
        "running": ("dim", "•", "Running"),
        "completed": ("good", "✓", "Done"),
        "failed": ("bad", "✗", "Failed"),
    }
    tone, symbol, word = symbols[state]
    if not look.has_styles and not look.has_words:
        symbol = {"•": "*", "✓": "+", "✗": "!"}[symbol]
    return f"{look.paint(tone, look.symbol(symbol, word))} {look.paint('', on_one_line(title))}\n"


def diff_of(look: Look, part: Mapping[str, Any], *, most: int, has_path: bool = True) -> tuple[str, int]:
    """Return the first `most` lines of a tool call's diff as text, and the number of lines that are left out."""
    lines = diff_lines(part.get("oldText") or "", part["newText"])
    tones: Mapping[str, tuple[Tone, str]] = {
        "+": ("added", "added: "),
        "-": ("removed", "removed: "),
        " ": ("dim", ""),
        "@": ("place", ""),
    }
    shown = [look.paint("bold", on_one_line(part["path"]))] if has_path else []
    for mark, text in lines[:most]:
        tone, word = tones[mark]
        prefix = word if look.has_words else "" if mark == "@" else mark
        shown.append(look.paint(tone, prefix + text))
    hidden = max(0, len(lines) - most)
    if hidden:
        shown.append(look.paint("dim", f"... ({hidden} more lines)"))
    if not lines:
        shown.append(look.paint("dim", "(the text stays the same)" if part.get("oldText") else "(an empty file)"))
    return "".join(f"{'' if look.has_words else '  '}{line}\n" for line in shown), hidden


def output_of(look: Look, text: str, *, most: int = _OUTPUT_LINES, columns: int | None = None) -> str:
    """Return the last `most` lines of a call's output, cut to `columns` columns (default: the width of the
    terminal)."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    if lines and re.match(r"`{3,}", lines[0]) and lines[-1] == "`" * len(lines[-1]):
        lines = lines[1:-1]
    hidden = max(0, len(lines) - most)
    shown = [f"... ({plural(hidden, 'line')} before)"] if hidden else []
    shown += lines[hidden:]
    if look.has_words:
        return "".join(f"{safe(line)}\n" for line in shown)
    width = (columns or look.columns - 1) - 2
    return "".join(f"  {look.paint('dim', cut(safe(line).expandtabs(4), width))}\n" for line in shown)


def cut(text: str, columns: int) -> str:
    """Return the text, or its beginning with `…` if the text does not fit into this many columns."""
    return text if cell_len(text) <= columns else set_cell_size(text, max(0, columns - 1)) + "…"


def plan_of(look: Look, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a plan as text with one step per line."""
    marks: Mapping[str, tuple[Tone, str, str]] = {
        "completed": ("good", "✓", "done"),
        "in_progress": ("bold", "▸", "now"),
        "pending": ("dim", "○", "open"),
    }
    lines = [look.paint("bold", "Plan")]
    hidden = max(0, len(entries) - _PLAN_STEPS)
    for entry in entries[:_PLAN_STEPS]:
        tone, symbol, word = marks.get(entry.get("status", ""), marks["pending"])
        if not look.has_styles and not look.has_words:
            symbol = {"✓": "[x]", "▸": "[>]", "○": "[ ]"}[symbol]
        mark = f"{word}:" if look.has_words else symbol
        step = on_one_line(str(entry.get("content", "")))
        lines.append(f"  {look.paint(tone, mark)} {look.paint('dim' if word == 'done' else '', step)}")
    lines += [look.paint("dim", f"  ... ({hidden} more steps)")] if hidden else []
    return "".join(f"{line}\n" for line in lines)


def usage_of(used: int, size: int, cost: float | None) -> str:
    """Return how full the context is, and what the session has cost, as text."""
    parts = []
    if size:
        window = f"{round(size / 1000)}k" if size >= 10_000 else str(size)
        parts.append(f"context {round(100 * used / size)}% of {window}")
    if cost:
        parts.append(f"${cost:.4f}" if cost < 1 else f"${cost:.2f}")
    return " · ".join(parts)
