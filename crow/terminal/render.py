"""Writes Markdown, diffs, tool calls and questions as text for a terminal."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, TypeAlias

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table

from crow.domain.diff import diff_lines
from crow.domain.text import on_one_line, plural, safe

_PROSE_COLUMNS = 100
"""Prose is wrapped at this column even in a wider terminal, because long lines are hard to read."""

_HELD_CHARS = 200
"""The maximum number of characters that are held back while it is not clear whether they are Markdown."""

_LINK_CHARS = 800
_TABLE_ROWS = 200
_TABLE_CHARS = 50_000
"""The maximum number of characters in a formatted table. A table that is longer, or that has more than `_TABLE_ROWS`
rows, is shown as the model wrote it."""

DIFF_LINES = 40
"""The maximum number of lines that are shown of each diff of a finished call."""

_OUTPUT_LINES = 8
"""The maximum number of lines that are shown of a finished call's output. They are its last lines."""

_PLAN_STEPS = 50

_Tone: TypeAlias = Literal[
    "", "dim", "bold", "title", "italic", "strike", "code", "added", "removed", "place", "bad", "good"
]

_SGR: Mapping[_Tone, tuple[str, str]] = {
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
"""On a light background, dark colours of the fixed palette take the place of these, because cyan and green of most
terminals can hardly be read there. In place of `dim`, which makes a colour lighter, there is only the colour."""

_Segment: TypeAlias = "tuple[_Tone, str]"


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

    def paint(self, tone: _Tone, text: str) -> str:
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
    """Return the look that TERM, NO_COLOR, COLORFGBG and `--plain` select. Some terminals set COLORFGBG, such as
    `0;15`: the numbers of their colours for text and background."""
    has_styles = not is_plain and environment.get("TERM", "dumb") not in ("", "dumb")
    has_colors = has_styles and not environment.get("NO_COLOR")
    is_light = environment.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    return Look(has_styles=has_styles, has_colors=has_colors, is_light=has_colors and is_light, has_words=is_plain)


_WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\U00020000-\U0003ffff"
_PIECES = re.compile(rf"([ \t]+|[{_WIDE}])")
_WORD_CHARS = 60
"""The maximum length of a word in characters. A longer word is written in parts of this length."""


class _WrappedText:
    """A text that grows only at its end. Line breaks between words make the lines fit the terminal.

    A word is written when it is complete, and written text never changes.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._out: list[_Segment] = []
        self._word: list[_Segment] = []
        self._size = 0
        self._space = ""
        self.column = 0
        self.lead: Sequence[_Segment] = ()
        """The beginning of each line after a break."""

    def put(self, tone: _Tone, text: str) -> None:
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

    def put_unbroken(self, tone: _Tone, text: str) -> None:
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


def wrapped(look: Look, tone: _Tone, text: str) -> str:
    """Return the text in this tone, with line breaks between words and at the end."""
    out = _WrappedText(look)
    for line in text.split("\n"):
        out.put(tone, line)
        out.end_line()
    return out.take()


def _joined(segments: Sequence[_Segment]) -> list[_Segment]:
    """Return the segments. Adjacent segments of the same tone are joined."""
    return [(tone, "".join(text for _, text in same)) for tone, same in groupby(segments, key=itemgetter(0))]


_SPECIAL = re.compile(r"[`*_~\[\\]")
_CODE = re.compile(r"(`{1,9})(?!`)(.+?)(?<!`)\1(?!`)")
_LINK = re.compile(r"\[([^\[\]\n]{1,200})\]\(<?([^()\s<>]{1,500})>?(?: \"[^\"\n]{0,80}\")?\)")
_SPANS: Sequence[tuple[str, _Tone]] = (
    ("***", "bold"),
    ("**", "bold"),
    ("__", "bold"),
    ("~~", "strike"),
    ("*", "italic"),
    ("_", "italic"),
)


def _span_pattern(mark: str) -> re.Pattern[str]:
    char, whole = re.escape(mark[0]), re.escape(mark)
    after = r"(?!\w)" if mark[0] == "_" else ""
    return re.compile(rf"{whole}(?=[^\s{char}])(.+?)(?<=\S)(?<!{char}){whole}(?!{char}){after}")


_SPAN_PATTERNS = [(mark, tone, _span_pattern(mark)) for mark, tone in _SPANS]


def inline(text: str, *, before: str = "", is_end: bool = True, depth: int = 0) -> tuple[list[_Segment], int]:
    """Read emphasis, code and links in a line. Return the segments, and the number of characters of `text` that they
    cover. If `is_end` is false, more text may follow. The segments then leave out the last characters if the following
    text may change their meaning. `before` is the character before `text`."""
    segments: list[_Segment] = []
    at = 0
    while at < len(text):
        found = _SPECIAL.search(text, at)
        if found is None:
            segments.append(("", text[at:]))
            return segments, len(text)
        if found.start() > at:
            segments.append(("", text[at : found.start()]))
            at = found.start()
        last = text[at - 1] if at else before
        span = _span_at(text, at, last, depth)
        is_unclear = span[1] == len(text) if span is not None else _may_continue(text, at, last)
        most = _LINK_CHARS if text[at] == "[" else _HELD_CHARS
        if is_unclear and not is_end and len(text) - at < most:
            return segments, at
        if span is None:
            run = re.compile(re.escape(text[at]) + "+").match(text, at)
            end = run.end() if run else at + 1
            segments.append(("", text[at:end]))
            at = end
        else:
            segments += span[0]
            at = span[1]
    return segments, at


def _may_continue(text: str, at: int, last: str) -> bool:
    """Return whether the character at `at` may begin a span whose end has not arrived yet."""
    following = text[at + 1 : at + 2]
    match text[at]:
        case "[":
            rest = text[at:]
            close = rest.find("]")
            return close < 0 or close == len(rest) - 1 or (rest[close + 1] == "(" and ")" not in rest[close:])
        case "\\":
            return not following
        case "_" if last.isalnum():
            return False
        case "`":
            return True
        case _:
            return not following or not following.isspace()


def _span_at(text: str, at: int, last: str, depth: int) -> tuple[list[_Segment], int] | None:
    """Return the segments of the span that begins at `at`, and the index of its end. Return None if no span begins
    there."""
    char = text[at]
    if char == "\\":
        following = text[at + 1 : at + 2]
        return ([("", following)], at + 2) if following and not following.isalnum() and following != " " else None
    if char == "`":
        code = _CODE.match(text, at, at + _HELD_CHARS * 4)
        return ([("code", code[2].strip() or code[2])], code.end()) if code else None
    if char == "[":
        link = _LINK.match(text, at)
        if link is None:
            return None
        words, address = link[1], link[2]
        shown: list[_Segment] = [("", words)] if words == address else [("", words), ("dim", f" ({address})")]
        return shown, link.end()
    if depth > 3 or (char == "_" and last.isalnum()):
        return None
    for mark, tone, pattern in _SPAN_PATTERNS:
        if text.startswith(mark, at):
            found = pattern.match(text, at, at + _HELD_CHARS)
            if found is None:
                continue
            inner, _ = inline(found[1], before=mark[-1], depth=depth + 1)
            return [(tone if each == "" else each, words) for each, words in inner], found.end()
    return None


_FENCE = re.compile(r"( {0,12})(`{3,}|~{3,})[ \t]*([\w+#.{}=\t -]*)$")
_HEADING = re.compile(r" {0,3}(#{1,6})(?:[ \t]+|$)")
_ITEM = re.compile(r"([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+")
_QUOTE = re.compile(r" {0,3}(?:> ?)+")
_RULE = re.compile(r" {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$")
_UNCLEAR = re.compile(r"[ \t]*(?:[-*_+#>~`|\d.) \t]{0,40})$")
_DIVIDER = re.compile(r"[\s|:-]+$")


class MarkdownStream:
    """A Markdown text that is shown while it arrives. `feed` and `end` return the next part to write. Text that was
    written is never changed."""

    def __init__(self, look: Look, *, tone: _Tone = "") -> None:
        self._look = look
        self._tone: _Tone = tone
        """Applies to all of the text. For example, thoughts are dim."""
        self._text = _WrappedText(look)
        self._held = self._return = ""
        self._line_tone: _Tone = tone
        self._is_in_line = False
        self._last = ""
        self._fence = ""
        self._is_drawing = False
        self._table: list[str] = []
        self._has_text = False
        self._blank = False

    def feed(self, text: str) -> str:
        """Add a part of the text. Return what can be shown now."""
        text = self._return + text
        self._return = "\r" if text.endswith("\r") else ""  # the other half of a line end may follow
        for line in io.StringIO(text.removesuffix("\r").replace("\r\n", "\n"), newline="\n"):
            self._held += line
            self._read(is_end=False)
        return self._text.take()

    def end(self) -> str:
        """End the text, and return the rest of it. If anything was shown, the shown text then ends with a line end."""
        self._held += "\n" if self._return else ""
        self._read(is_end=True)
        self._show_table()
        self._text.end()
        return self._text.take()

    def _read(self, *, is_end: bool) -> None:
        while self._held:
            if not self._is_in_line and not self._begin_line(is_end=is_end):
                return
            if self._is_in_line and not self._continue_line(is_end=is_end):
                return

    def _begin_line(self, *, is_end: bool) -> bool:
        """Read the beginning of a line. If the beginning does not show what kind of line it is, read the whole line.
        Return False if more text has to arrive first."""
        newline = self._held.find("\n")
        is_whole = newline >= 0 or is_end
        line = self._held[:newline] if newline >= 0 else self._held
        start = line.lstrip(" \t")
        is_row = start.startswith("|") and not self._fence
        needs_whole = self._fence or is_row or start.startswith(("```", "~~~"))
        if not is_whole and (needs_whole or _UNCLEAR.match(line)) and len(line) < _TABLE_CHARS:
            return False
        if self._table and not is_row:
            self._show_table()
        if is_whole and (needs_whole or not start.strip() or _RULE.match(line)):
            self._held = self._held[newline + 1 :] if newline >= 0 else ""
            self._show_line(line)
            return True
        self._begin_block(line)
        return True

    def _show_line(self, line: str) -> None:
        """Show a whole line: a line of code, a row of a table, a fence, a rule or an empty line."""
        fence = _FENCE.match(line)
        if self._fence:
            closes = fence is not None and fence[2].startswith(self._fence) and not fence[3].strip()
            if closes:
                self._fence = ""
            self._show_code(line, is_fence=closes)
        elif fence is not None:
            self._fence = fence[2]
            self._space_out()
            self._show_code(line, is_fence=True)
        elif line.lstrip(" \t").startswith("|"):
            self._table.append(line.strip())
            if len(self._table) > _TABLE_ROWS or sum(map(len, self._table)) > _TABLE_CHARS:
                self._show_rows_unchanged()
        elif not line.strip():
            self._blank = True
        elif _RULE.match(line):
            self._space_out()
            self._text.put_unbroken("dim", "---" if not self._look.has_styles else "─" * 20)
            self._text.end_line()
        else:  # not a fence after all: more backticks follow in the line
            self._held = f"{line}\n{self._held}"
            self._begin_block(line)

    def _show_code(self, line: str, *, is_fence: bool) -> None:
        tone: _Tone = self._tone or ("dim" if is_fence else "code")
        language = line.strip("`~ \t")
        if is_fence and self._fence:
            self._is_drawing = language == "text"
        if is_fence and self._is_drawing and self._look.has_styles:
            return  # a drawing needs no marks around it, as code does that may be copied
        if is_fence and self._look.has_words:
            line = f"Code{f', {language}' if language else ''}:" if self._fence else "End of code."
        self._text.put_unbroken(tone, line)
        self._text.end_line()

    def _space_out(self) -> None:
        """Write an empty line before the next block if the Markdown has one there."""
        if self._blank and self._has_text:
            self._text.end_line()
        self._blank, self._has_text = False, True

    def _begin_block(self, line: str) -> None:
        """Begin a line of prose: read the marks of a heading, a list item or a quotation."""
        self._space_out()
        self._is_in_line, self._last, self._line_tone = True, "", self._tone
        taken, lead, marks = 0, "", ""
        tone = self._tone
        if found := _HEADING.match(line):
            taken, self._line_tone = found.end(), self._tone or "title"
            marks = "Heading: " if self._look.has_words else "" if self._look.has_styles else f"{found[1]} "
        elif found := _QUOTE.match(line):
            taken = found.end()
            lead = "│ " if self._look.has_styles else "> "
            marks = "Quote: " if self._look.has_words else lead
            tone = "dim"
        elif found := _ITEM.match(line):
            taken = found.end()
            bullet = found[2] if found[2][0].isdigit() or self._look.has_words or not self._look.has_styles else "•"
            indent = found[1].replace("\t", "    ")[:40]
            marks = f"{indent}{bullet} "
            lead = " " * len(marks)
        else:
            spaces = len(line) - len(line.lstrip(" \t"))
            taken, marks = spaces, line[:spaces].replace("\t", "    ")[:40]
            lead = marks
        self._text.lead = [(tone, lead)] if lead else ()
        if marks:
            self._text.put_unbroken(tone, marks)
        self._held = self._held[taken:]

    def _continue_line(self, *, is_end: bool) -> bool:
        """Show the part of the line whose meaning is already clear. Return False if more text is needed."""
        newline = self._held.find("\n")
        line = self._held[:newline] if newline >= 0 else self._held
        segments, taken = inline(line, before=self._last, is_end=is_end or newline >= 0)
        for tone, text in segments:
            self._text.put(self._tone or tone or self._line_tone, text)
        if newline < 0:
            self._last = line[taken - 1] if taken else self._last
            self._held = self._held[taken:]
            return False
        self._held = self._held[newline + 1 :]
        self._text.end_line()
        self._is_in_line, self._text.lead = False, ()
        return True

    def _show_rows_unchanged(self) -> None:
        self._space_out()
        for row in self._table:
            self._text.put_unbroken(self._tone, row)
            self._text.end_line()
        self._table.clear()

    def _show_table(self) -> None:
        """Show the rows that were held back: as a table if they form one, otherwise unchanged."""
        if not self._table:
            return
        if len(self._table) < 2 or not _DIVIDER.match(self._table[1]):
            self._show_rows_unchanged()
            return
        head, _, *rows = [_cells(row) for row in self._table]
        self._table.clear()
        self._space_out()
        for line in _table_lines(self._look, head, rows):
            self._text.put_unbroken(self._tone, line)
            self._text.end_line()


def _cells(row: str) -> list[str]:
    """Return the cells of a table row, without Markdown."""
    inner = row.strip().removeprefix("|").removesuffix("|")
    cells = re.split(r"(?<!\\)\|", inner)[:50]
    return ["".join(text for _, text in inline(cell.strip().replace("\\|", "|"))[0]) for cell in cells]


def _table_lines(look: Look, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if look.has_words:
        return ["; ".join(f"{name}: {cell}" for name, cell in zip(head, row, strict=False)) + "." for row in rows]
    table = Table(*(safe(name) for name in head), box=box.ASCII2 if not look.has_styles else box.SQUARE)
    for row in rows:
        cells = [safe(cell) for cell in row[: len(head)]]
        table.add_row(*cells)
    for column in table.columns:
        column.overflow = "fold"
    console = Console(file=io.StringIO(), width=look.columns - 1, color_system=None, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table, highlight=False)
    return [line.rstrip() for line in captured.get().splitlines()]


def title_of(look: Look, title: str, state: Literal["running", "completed", "failed"]) -> str:
    """Return the line that shows a tool call and its state."""
    symbols: Mapping[str, tuple[_Tone, str, str]] = {
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
    tones: Mapping[str, tuple[_Tone, str]] = {
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
    """Return the last `most` lines of a call's output, cut to so many columns (default: those of the terminal)."""
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
    marks: Mapping[str, tuple[_Tone, str, str]] = {
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
