"""Finds tool calls that a model wrote into its answer as text.

A server that does not recognise a model's call format passes the calls on as text. Such calls are accepted only if
tools were offered and no regular call came. In addition, the block of calls must be complete, stand at the end of the
text and outside of code, and contain only calls of offered tools, each with an object as arguments. Otherwise the text
is left unchanged. A form without a marker (bare JSON, or a call in Python) is accepted only if it is the whole answer
and its arguments fit the tool's schema. `call_forms.py` has the forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from crow.domain.messages import ToolCall, ToolSpec
from crow.llm.arguments import fits, json_text, read_arguments
from crow.llm.call_forms import (
    RECIPIENT,
    STARTS,
    Found,
    may_be_bare,
    may_be_marked,
    names_a_tool,
    read_bare,
    read_marked,
)
from crow.llm.text_before import TextBefore
from crow.llm.tool_calls import tool_name

_END_TOKENS = ("<|return|>", "<|end|>", "<|END_RESPONSE|>", "<|end_of_solution|>")
"""Tokens that end an answer. Formats with these tokens also put tokens before the answer."""

_WATCHED = (*STARTS, *_END_TOKENS)
_PREFIXES = frozenset(token[:length] for token in _WATCHED for length in range(1, len(token)))
_LONGEST = max(map(len, _WATCHED))
_END_OF_ANSWER = re.compile(rf"(?:(?:{'|'.join(map(re.escape, _END_TOKENS))})\s*)+")
_TAG_ALONE = re.compile(r"<[^<>]*(?:>[ \t]*(?:\n|\Z)|\Z)")
_GLM_CALL = re.compile(r"<tool_call>\s*+(?P<name>[\w.:-]*+)\s*+(?P<rest>.{0,9})", re.DOTALL)
_ARG_KEY = "<arg_key>"
_CANDIDATE = re.compile(r"[<\[]")

_MAX_STARTS = 20
"""If this many places in an answer look like calls but are not calls, crow treats the rest of the answer as text."""

_SMALL_CHARS = 1000
"""Held-back text up to this size is examined with each new piece. Longer text is examined again only when its size has
doubled."""


class CallDetector:
    """Finds tool calls in a streamed text, and holds back text that may still become a call.

    Each `feed` returns the text that is certainly not a call. `finish` returns the rest of the text and the calls.

    While `_is_start` is set, the whole answer is held back, because it may consist only of calls. After that, crow
    holds back the text that begins at the first place that may be a block of calls, and examines it again when more has
    arrived. After `_MAX_STARTS` places that turned out to be text, nothing more is held back.
    """

    def __init__(self, tools: Mapping[str, ToolSpec], *, new_id: Callable[[], str]) -> None:
        self._tools = tools
        self._new_id = new_id
        self._held: list[str] = []
        """The pieces of the text that is held back."""
        self._held_chars = 0
        self._examine_at = 0
        """The held-back text is examined again when it has at least this many characters."""
        self._is_start = bool(tools)
        """Whether the answer can still be nothing but calls."""
        self._has_given = False
        """Whether some of the answer has been returned."""
        self._starts_left = _MAX_STARTS
        """How many more places may look like calls without being calls."""
        self._before = TextBefore()
        """The text before the place that is examined."""
        self.drop_end_tokens = False
        """Whether to remove from the text the tokens with which some formats end an answer."""

    @property
    def held(self) -> str:
        """The text that is held back."""
        return "".join(self._held)

    def feed(self, text: str) -> str:
        """Add `text`. Return the text that can be shown now."""
        if not self._held and not (self._starts_left and (self._tools or self.drop_end_tokens)):
            return text
        self._held.append(text)
        self._held_chars += len(text)
        if self._held_chars < self._examine_at:
            return ""
        text = self.held
        # Text that begins with `to=`, or is the beginning of `to=`, can become only a marked call.
        may_be_calls = may_be_marked if text.startswith(RECIPIENT[: len(text)]) else may_be_bare
        if self._is_start and may_be_calls(text, self._tools):
            return self._hold(text, 0)
        self._is_start = False
        for at in self._candidates(text):
            if self._may_be_block(text, at):
                return self._hold(text, at)
        return self._hold(text, len(text))

    def finish(self, *, may_call: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Return `(text, calls)`: the held-back text without its calls, and these calls. If `may_call` is False, calls
        are treated as text."""
        text, self._held = self.held, []
        is_only_call = may_call and self._is_start and text.startswith(RECIPIENT)
        if is_only_call and (calls := self._calls(read_marked(text, self._tools))):
            return "", calls
        for at in self._candidates(text):
            if may_call and self._is_block(text, at):
                if calls := self._calls(read_marked(text[at:], self._tools)):
                    return text[:at] if self._has_given or text[:at].strip() else "", calls
                self._starts_left -= 1
            if self.drop_end_tokens and (end := _END_OF_ANSWER.match(text, at)) and end.end() == len(text):
                return text[:at], ()
        if may_call and self._is_start and (calls := self._calls(read_bare(text), is_bare=True)):
            return "", calls
        return text, ()

    def interrupt(self) -> str:
        """Return the held-back text after the stream broke, or an empty string if this text looks like an incomplete
        call."""
        text, self._held = self.held, []
        is_call = text.lstrip().startswith(STARTS) or names_a_tool(text, self._tools)
        return "" if is_call else text

    def _hold(self, text: str, at: int) -> str:
        """Hold back the part of `text` that begins at `at`, and return the part before it."""
        if not self._has_given and not text[:at].strip():
            # Blanks at the start are held back and shown together with the first word.
            at, self._before = 0, TextBefore()
        self._has_given = self._has_given or at > 0
        self._held = [text[at:]] if at < len(text) else []
        self._held_chars = len(text) - at
        self._examine_at = 0 if self._held_chars <= _SMALL_CHARS else 2 * self._held_chars
        return text[:at]

    def _candidates(self, text: str) -> Iterator[int]:
        """Yield positions at which a block of calls or the end of the answer may begin. Whenever a position is yielded,
        `_before` describes the text before it. A caller that holds text back must stop iterating at the position where
        that text begins, because at the end of the iteration `_before` describes all of the text."""
        added = 0
        for match in _CANDIDATE.finditer(text):
            at = match.start()
            if self._starts_left > 0 and (text.startswith(_WATCHED, at) or _is_prefix(text, at)):
                self._before.add(text[added:at])
                added = at
                yield at
        self._before.add(text[added:])

    def _may_be_block(self, text: str, at: int) -> bool:
        """Return whether the text that begins at `at` can still become a block of calls, or the end of the answer."""
        if self._tools and not self._before.is_quoting and _is_prefix(text, at):
            return True
        is_block = self._is_block(text, at)
        if is_block and may_be_marked(text[at:], self._tools):
            return True
        end = _END_OF_ANSWER.match(text, at) if self.drop_end_tokens else None
        end_at = end.end() if end is not None else at
        if self.drop_end_tokens and (end_at == len(text) or _is_prefix(text, end_at)):
            return True
        if is_block or end is not None:
            self._starts_left -= 1
        return False

    def _is_block(self, text: str, at: int) -> bool:
        """Return whether a block of calls begins at `at` and is neither quoted nor merely mentioned in a sentence."""
        if not self._tools or self._before.is_quoting or not text.startswith(STARTS, at):
            return False
        if self._before.is_in_unknown_form:
            return False
        # Models never write special tokens by accident. But they do mention other tags within a line, so such a tag is
        # accepted only if a line break follows, or if the name of a tool and its first argument follow in GLM's form.
        is_tag = text.startswith("<", at) and not text.startswith(("<|", "<｜"), at)
        is_alone = not (is_tag and self._before.is_in_line) or _TAG_ALONE.match(text, at) is not None
        return is_alone or self._may_be_glm(text, at)

    def _may_be_glm(self, text: str, at: int) -> bool:
        """Return whether the text that begins at `at` is a call in GLM's form, or can still become one."""
        if (call := _GLM_CALL.match(text, at)) is None:
            return False
        name, rest = call["name"], call["rest"]
        if call.end("name") == len(text):
            return any(each.startswith(name) for each in self._tools)
        return name in self._tools and (rest == _ARG_KEY or (call.end() == len(text) and _ARG_KEY.startswith(rest)))

    def _calls(self, found: Found, *, is_bare: bool = False) -> tuple[ToolCall, ...]:
        """Return the calls. If one of them is invalid, return no calls. If `is_bare` is set, the name must match
        exactly and the arguments must fit the schema."""
        calls: list[ToolCall] = []
        for written, text in found:
            name = written if is_bare else tool_name(written, self._tools)
            if (tool := self._tools.get(name)) is None:
                return ()
            try:
                (arguments,) = read_arguments([text], tool.input_schema)
                if is_bare and not fits(arguments, tool.input_schema):
                    return ()
                calls.append(ToolCall(id=self._new_id(), name=name, arguments=json_text(arguments)))
            except ValueError:  # `InvalidArguments`, or `read_arguments` returned several objects
                return ()
        return tuple(calls)


def _is_prefix(text: str, at: int) -> bool:
    """Return whether the text that begins at `at` is an incomplete token."""
    return len(text) - at < _LONGEST and text[at:] in _PREFIXES
