"""Writes Markdown as text for a terminal, while it arrives."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from crow.domain.text import safe
from crow.terminal.render import Look, Segment, Tone, WrappedText

_HELD_CHARS = 200
"""The maximum number of characters that are held back while it is not clear whether they are Markdown."""

_LINK_CHARS = 800

_TABLE_ROWS = 200

_TABLE_CHARS = 50_000
"""The maximum number of characters in a formatted table. A table that is longer, or that has more than `_TABLE_ROWS`
rows, is shown as the model wrote it."""

_SPECIAL = re.compile(r"[`*_~\[\\]")

_CODE = re.compile(r"(`{1,9})(?!`)(.+?)(?<!`)\1(?!`)")

_LINK = re.compile(r"\[([^\[\]\n]{1,200})\]\(<?([^()\s<>]{1,500})>?(?: \"[^\"\n]{0,80}\")?\)")

_SPANS: Sequence[tuple[str, Tone]] = (
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


def inline(text: str, *, before: str = "", is_end: bool = True, depth: int = 0) -> tuple[list[Segment], int]:
    """Read emphasis, code and links in a line. Return the segments, and the number of characters of `text` that they
    cover. If `is_end` is false, more text may follow. The segments then leave out the last characters if the following
    text may change their meaning. `before` is the character before `text`."""
    segments: list[Segment] = []
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


def _span_at(text: str, at: int, last: str, depth: int) -> tuple[list[Segment], int] | None:
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
        shown: list[Segment] = [("", words)] if words == address else [("", words), ("dim", f" ({address})")]
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

    def __init__(self, look: Look, *, tone: Tone = "") -> None:
        self._look = look
        self._tone: Tone = tone
        """Applies to all of the text. For example, thoughts are dim."""
        self._text = WrappedText(look)
        self._held = self._return = ""
        self._line_tone: Tone = tone
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
        tone: Tone = self._tone or ("dim" if is_fence else "code")
        language = line.strip("`~ \t")
        if is_fence and self._fence:
            self._is_drawing = language == "text"
        if is_fence and self._is_drawing and self._look.has_styles:
            return  # unlike code, which the user may copy, a drawing needs no marks around it
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
