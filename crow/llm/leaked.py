"""Tool calls that a model wrote into its answer because its server did not recognise them.

They count only where tools were offered and no real call came, and only if the block is whole, ends the text, stands
outside code, and every call in it names an offered tool and has an object of arguments; else the text stays as it is.
A form without a marker of its own (bare JSON, a call in Python) counts only if it is the whole answer and fits the
tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from crow.domain.messages import JsonObject, ToolCall, ToolSpec
from crow.llm.arguments import Fault, fits, json_text, read_arguments
from crow.llm.calls import tool_name
from crow.llm.leaked_forms import END_TOKENS, STARTS, Found, may_be_bare, may_be_marked, read_bare, read_marked

__all__ = ["CallDetector"]

_MOST_STARTS = 20
"""After so many places that looked like a call and were none, all that follows is text."""

_SMALL_CHARS = 1000
"""A block up to this size is examined with each piece that comes, a larger one whenever its size has doubled."""

_HEAD_CHARS = 200
_WORD = re.compile(r"[\w-]+")
_LINE_CHARS = 1000
"""How much of a line is kept to tell whether it is code or a quotation."""

_CANDIDATE = re.compile(r"[<\[]")
_TOKENS = (*STARTS, *END_TOKENS)
_PREFIXES = frozenset(token[:length] for token in _TOKENS for length in range(1, len(token)))
_LONGEST = max(map(len, _TOKENS))
_ENDING = re.compile(rf"(?:(?:{'|'.join(map(re.escape, END_TOKENS))})\s*)+")
_RECIPIENT = "to="
"""What a call in Harmony begins with, where the server has taken the tokens before it."""

_TAG_ALONE = re.compile(r"<[^<>]*(?:>[ \t]*(?:\n|\Z)|\Z)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_ELEMENT = re.compile(r"<(/?)(pre|code)(?=[\s>])")
_ELEMENT_CHARS = 8


class CallDetector:
    """Finds tool calls in a text that streams, and holds back what may still become one.

    Each `feed` gives what is text for certain; `finish` gives the rest, and the calls that were written instead of it.
    `drop_end_tokens`: the tokens that end an answer in some formats are none of its text.
    """

    def __init__(self, tools: Mapping[str, ToolSpec], *, mint: Callable[[], str]) -> None:
        self._tools = tools
        self._mint = mint
        self._held: list[str] = []
        self._held_chars = 0
        self._examine_at = 0
        self._is_start = bool(tools)
        self._has_given = False
        self._starts_left = _MOST_STARTS
        self._surroundings = _Surroundings()
        self.drop_end_tokens = False

    @property
    def held(self) -> str:
        """The text that waits to be decided."""
        return "".join(self._held)

    def feed(self, text: str) -> str:
        """What can be given out now."""
        if not self._held and not (self._starts_left and (self._tools or self.drop_end_tokens)):
            return text
        self._held.append(text)
        self._held_chars += len(text)
        if self._held_chars < self._examine_at:
            return ""
        text = self.held
        if self._is_start and self._may_be_whole_answer(text):
            return self._hold(text, 0)
        self._is_start = False
        for at in self._candidates(text):
            if self._may_be_block(text, at):
                return self._hold(text, at)
        return self._hold(text, len(text))

    def finish(self, *, may_call: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """The text has ended: what was held back, without the calls in it. `may_call`: they may be run."""
        text, self._held = self.held, []
        if may_call and self._is_start and text.startswith(_RECIPIENT):
            calls = self._calls_in(text)
            if calls:
                return "", calls
        for at in self._candidates(text):
            if may_call and self._is_start_of_block(text, at):
                calls = self._calls_in(text[at:])
                if calls:
                    return text[:at] if self._has_given or text[:at].strip() else "", calls
                self._starts_left -= 1
            if self.drop_end_tokens and (end := _ENDING.match(text, at)) is not None and end.end() == len(text):
                return text[:at], ()
        if may_call and self._is_start:
            bare = read_bare(text)
            if all(_fits_exactly(each, self._tools) for each in bare):
                calls = _calls(bare, self._tools, self._mint)
                if calls:
                    return "", calls
        return text, ()

    def interrupt(self) -> str:
        """The stream broke: what was held back and is text. Half a call is dropped, in whatever form it came."""
        text, self._held = self.held, []
        is_named = any(map(self._is_offered, _WORD.findall(text[:_HEAD_CHARS])))
        return "" if is_named or text.lstrip().startswith(STARTS) else text

    def _hold(self, text: str, at: int) -> str:
        """Keep `text` from `at` on, and give what stands before."""
        if not self._has_given and not text[:at].strip():
            # Blanks at the very start are given out together with a word.
            at, self._surroundings = 0, _Surroundings()
        self._has_given = self._has_given or at > 0
        self._held = [text[at:]] if at < len(text) else []
        self._held_chars = len(text) - at
        self._examine_at = 0 if self._held_chars <= _SMALL_CHARS else 2 * self._held_chars
        return text[:at]

    def _candidates(self, text: str) -> Iterator[int]:
        """Where in `text` a block or an end may begin; `_surroundings` then knows what stands before."""
        noted = 0
        for match in _CANDIDATE.finditer(text):
            at = match.start()
            if self._starts_left > 0 and (text.startswith(_TOKENS, at) or _is_prefix(text, at)):
                self._surroundings.add(text[noted:at])
                noted = at
                yield at
        self._surroundings.add(text[noted:])

    def _may_be_whole_answer(self, text: str) -> bool:
        if _RECIPIENT.startswith(text) or text.startswith(_RECIPIENT):
            return may_be_marked(text, self._schema_of, self._is_offered)
        return may_be_bare(text, self._tools)

    def _may_be_block(self, text: str, at: int) -> bool:
        """Whether what begins at `at` can still become calls, or the end of the answer."""
        if self._tools and not self._surroundings.are_quotation and _is_prefix(text, at):
            return True
        is_start = self._is_start_of_block(text, at)
        if is_start and may_be_marked(text[at:], self._schema_of, self._is_offered):
            return True
        end = _ENDING.match(text, at) if self.drop_end_tokens else None
        end_at = end.end() if end is not None else at
        if self.drop_end_tokens and (end_at == len(text) or _is_prefix(text, end_at)):
            return True
        if is_start or end is not None:
            self._starts_left -= 1
        return False

    def _is_start_of_block(self, text: str, at: int) -> bool:
        """Whether a block begins here that is neither quoted nor spoken of."""
        if not self._tools or self._surroundings.are_quotation or not text.startswith(STARTS, at):
            return False
        # Special tokens are not written by accident, nor is a tag with a line break after it; other tags within a
        # line are.
        is_tag = text.startswith("<", at) and not text.startswith(("<|", "<｜"), at)
        return not (is_tag and self._surroundings.are_words) or _TAG_ALONE.match(text, at) is not None

    def _calls_in(self, block: str) -> tuple[ToolCall, ...]:
        return _calls(read_marked(block, self._schema_of), self._tools, self._mint)

    def _schema_of(self, name: str) -> JsonObject | None:
        tool = self._tools.get(tool_name(name, self._tools))
        return tool.input_schema if tool is not None else None

    def _is_offered(self, name: str) -> bool:
        return tool_name(name, self._tools) in self._tools


class _Surroundings:
    """What stands before a place in a text: code, a quotation, words in the same line."""

    def __init__(self) -> None:
        self._line = ""
        self._has_backtick = False
        self._fence = ""
        self._open = {"pre": 0, "code": 0}
        self._tail = ""

    @property
    def are_quotation(self) -> bool:
        """Whether what follows is code or quoted."""
        line = self._line
        return (
            self._has_backtick
            or bool(self._fence)
            or line.startswith(("    ", "\t"))
            or line.lstrip().startswith((">", "<!--"))
            or any(count > 0 for count in self._open.values())
        )

    @property
    def are_words(self) -> bool:
        """Whether the line has begun."""
        return bool(self._line.strip())

    def add(self, text: str) -> None:
        """Go on behind `text`."""
        if not text:
            return
        self._count_elements(text)
        first, *others = text.split("\n")
        self._go_on(first)
        for line in others:
            self._end_line()
            self._go_on(line)

    def _go_on(self, piece: str) -> None:
        self._has_backtick = self._has_backtick or "`" in piece
        if len(self._line) < _LINE_CHARS:
            self._line = (self._line + piece)[:_LINE_CHARS]

    def _end_line(self) -> None:
        match = _FENCE.match(self._line)
        if match is not None:
            mark, rest = match.groups()
            if not self._fence:
                # Backticks after backticks make a line of code and no fence.
                self._fence = "" if mark[0] == "`" and "`" in rest else mark
            elif mark[0] == self._fence[0] and len(mark) >= len(self._fence) and not rest.strip():
                self._fence = ""
        self._line = ""
        self._has_backtick = False

    def _count_elements(self, text: str) -> None:
        """Elements of code that `text` opens and closes, perhaps begun by the text before it."""
        text = self._tail + text
        for match in _ELEMENT.finditer(text):
            if match.end() >= len(self._tail):
                self._open[match.group(2)] += -1 if match.group(1) else 1
        self._tail = text[-_ELEMENT_CHARS:]


def _is_prefix(text: str, at: int) -> bool:
    """Whether the text ends here with the beginning of a token."""
    return len(text) - at < _LONGEST and text[at:] in _PREFIXES


def _fits_exactly(found: tuple[str, str], tools: Mapping[str, ToolSpec]) -> bool:
    """Whether a name without any marker is an offered tool, letter by letter, and its arguments are what it takes."""
    tool = tools.get(found[0])
    if tool is None:
        return False
    try:
        objects = read_arguments([found[1]], tool.input_schema)
    except Fault:
        return False
    return len(objects) == 1 and fits(objects[0], tool.input_schema)


def _calls(found: Found, tools: Mapping[str, ToolSpec], mint: Callable[[], str]) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for written, arguments in found:
        name = tool_name(written, tools)
        tool = tools.get(name)
        if tool is None:
            return ()
        try:
            objects = read_arguments([arguments], tool.input_schema)
            if len(objects) != 1:
                return ()
            calls.append(ToolCall(id=mint(), name=name, arguments=json_text(objects[0])))
        except Fault:
            return ()
    return tuple(calls)
