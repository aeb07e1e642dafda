"""Tells whether a position in a streamed text is inside code or a quotation."""

from __future__ import annotations

import re


class TextBefore:
    """Reads the text before a position. Tells whether the position is inside code or a quotation, and whether there is
    other text before it in its line."""

    _FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
    _ELEMENT = re.compile(r"<(/?)(pre|code)(?=[\s>])")
    _ELEMENT_CHARS = 8
    _LINE_CHARS = 1000
    _UNKNOWN_FORM = re.compile(
        r"[<\[](?!/)[^<>\[\]]*(?:call|tool|function|invoke|action)[^<>\[\]]*[>\]]\s*\Z", re.IGNORECASE
    )
    _RECENT_CHARS = 100

    def __init__(self) -> None:
        self._line = ""
        self._has_backtick = False
        self._fence = ""
        self._open = {"pre": 0, "code": 0}
        self._tail = ""
        self._recent = ""

    @property
    def is_in_unknown_form(self) -> bool:
        """Whether a tag directly before this position begins a call in a form that crow does not know. This tag was
        already shown as text. The text after it must be shown too, because crow never shows only a part of a call."""
        return self._UNKNOWN_FORM.search(self._recent) is not None

    @property
    def is_quoting(self) -> bool:
        """Whether the text that follows is inside code or quoted."""
        return (
            self._has_backtick
            or bool(self._fence)
            or self._line.startswith(("    ", "\t"))
            or self._line.lstrip().startswith((">", "<!--"))
            or any(count > 0 for count in self._open.values())
        )

    @property
    def is_in_line(self) -> bool:
        """Whether there is text in the current line before this position."""
        return bool(self._line.strip())

    def add(self, text: str) -> None:
        """Move the position to the end of `text`."""
        if not text:
            return
        self._recent = (self._recent + text)[-self._RECENT_CHARS :]
        seen = len(self._tail)
        self._tail += text
        for match in self._ELEMENT.finditer(self._tail):
            if match.end() >= seen:
                self._open[match[2]] += -1 if match[1] else 1
        self._tail = self._tail[-self._ELEMENT_CHARS :]
        for number, piece in enumerate(text.split("\n")):
            if number:
                self._end_line()
            self._has_backtick = self._has_backtick or "`" in piece
            if len(self._line) < self._LINE_CHARS:
                self._line = (self._line + piece)[: self._LINE_CHARS]

    def _end_line(self) -> None:
        if match := self._FENCE.match(self._line):
            mark, rest = match.groups()
            if not self._fence:
                # If more backticks follow in the line, this is inline code and not a fence.
                self._fence = "" if mark[0] == "`" and "`" in rest else mark
            elif mark[0] == self._fence[0] and len(mark) >= len(self._fence) and not rest.strip():
                self._fence = ""
        self._line = ""
        self._has_backtick = False
