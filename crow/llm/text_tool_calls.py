"""Finds tool calls that a model wrote into its answer as text.

A server that does not recognise a model's call format passes the calls on as text. Such calls are accepted only if
tools were offered and no regular call came. In addition, the block of calls must be complete, stand at the end of the
text and outside of code, and contain only calls of offered tools, each with an object as arguments. Otherwise the text
is left unchanged. A form without a marker (bare JSON, or a call in Python) is accepted only if it is the whole answer
and its arguments fit the tool's schema.

A model's text may be hostile, so no pattern here may take more than linear time. This is why patterns use possessive
quantifiers where backtracking could take longer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

from crow.domain.messages import JsonObject, ToolCall, ToolSpec
from crow.llm.arguments import fits, json_text, read_arguments
from crow.llm.text_before import TextBefore
from crow.llm.tool_calls import tool_name

_Tools: TypeAlias = Mapping[str, ToolSpec]
_Found: TypeAlias = list[tuple[str, str]]
"""Names and arguments (JSON text) of calls as the model wrote them, in order."""

_TAGS = ("tool_call>", "tool_calls>")
_OPENING = (
    *(f"<{family}{tag}" for family in ("", "seed:", "minimax:", "longcat_") for tag in _TAGS),
    *("<function_call>", "<function_calls>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<TOOLCALL>"),
    *("<|tool_call|>", "<|tool_calls|>", "<|python_tag|>", "<|python_start|>", "<|START_ACTION|>", "<|action_start|>"),
    *("<|tools_prefix|>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>"),
    "[TOOL_CALLS]",
)
_CLOSING = (
    *(f"</{family}{tag}" for family in ("", "seed:", "minimax:", "longcat_") for tag in _TAGS),
    *("</function_call>", "</function_calls>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</TOOLCALL>"),
    *("<|/tool_call|>", "<|/tool_calls|>", "<|python_end|>", "<|END_ACTION|>", "<|action_end|>", "<|tools_suffix|>"),
    *("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>", "<｜tool_calls_end｜>", "<｜end▁of▁sentence｜>"),
    *("<｜end_of_sentence｜>", "[/TOOL_CALLS]", "</s>", "<eos>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|observation|>", "<|user|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|call|>", "<|plugin|>"),
)
_TURN = ("<|end|>", "<|start|>assistant")
"""In the Harmony format, these tokens end one message of an answer and start the next one."""

_CALL_STARTS = (
    *(f"<{family}invoke name=" for family in ("", "antml:", "｜DSML｜")),
    *("<function=", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "<｜tool_call_begin｜>", "<start_function_call>"),
    *("<|channel|>commentary ", "<|channel|>analysis "),
)
_STARTS = (*_OPENING, *_CALL_STARTS, *_TURN)
_RECIPIENT = "to="
"""A Harmony call begins with this word if the server has removed the tokens before it."""

_END_TOKENS = ("<|return|>", "<|end|>", "<|END_RESPONSE|>", "<|end_of_solution|>")
"""Tokens that end an answer. Formats with these tokens also put tokens before the answer."""

_WATCHED = (*_STARTS, *_END_TOKENS)
_PREFIXES = frozenset(token[:length] for token in _WATCHED for length in range(1, len(token)))
_LONGEST = max(map(len, _WATCHED))
_END_OF_ANSWER = re.compile(rf"(?:(?:{'|'.join(map(re.escape, _END_TOKENS))})\s*)+")
_TAG_ALONE = re.compile(r"<[^<>]*(?:>[ \t]*(?:\n|\Z)|\Z)")
_GLM_CALL = re.compile(r"<tool_call>\s*+(?P<name>[\w.:-]*+)\s*+(?P<rest>.{0,9})", re.DOTALL)
_ARG_KEY = "<arg_key>"
_WORD = re.compile(r"[\w-]+")
_CANDIDATE = re.compile(r"[<\[]")

_MAX_STARTS = 20
"""If this many places in an answer look like calls but are not calls, crow treats the rest of the answer as text."""

_SMALL_CHARS = 1000
"""Held-back text up to this size is examined with each new piece. Longer text is examined again only when its size has
doubled."""

_HEAD_CHARS = 200
"""A call must name its tool within this many characters, unless its arguments come first."""

_MAX_CALLS = 100
_MAX_PYTHON_CHARS = 50_000
"""The limit for text that Python's parser reads, because the parser needs hundreds of times as much memory as the
text."""


class CallDetector:
    """Finds tool calls in a streamed text, and holds back text that may still become a call.

    Each `feed` returns the text that is certainly not a call. `finish` returns the rest of the text and the calls.

    While `_is_start` is set, the whole answer is held back, because it may consist only of calls. After that, text is
    held back from the first place on that may be a block of calls, and is examined again when more has arrived.
    After `_MAX_STARTS` places that turned out to be text, nothing more is held back.
    """

    def __init__(self, tools: Mapping[str, ToolSpec], *, new_id: Callable[[], str]) -> None:
        self._tools = tools
        self._new_id = new_id
        self._held: list[str] = []
        """The pieces of the text that is held back."""
        self._held_chars = 0
        self._examine_at = 0
        """The number of held-back characters from which on the text is examined again."""
        self._is_start = bool(tools)
        """Whether the answer can still be nothing but calls."""
        self._has_given = False
        """Whether some of the answer has been returned."""
        self._starts_left = _MAX_STARTS
        """How many more places may look like calls without being calls."""
        self._before = TextBefore()
        """The text before the place that is examined."""
        self.drop_end_tokens = False
        """Whether to remove the tokens with which some formats end an answer from the text."""

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
        # The text so far may begin with `to=`, or may be only the beginning of `to=`.
        may_be_calls = _may_be_marked if text.startswith(_RECIPIENT[: len(text)]) else _may_be_bare
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
        is_only_call = may_call and self._is_start and text.startswith(_RECIPIENT)
        if is_only_call and (calls := self._calls(_read_marked(text, self._tools))):
            return "", calls
        for at in self._candidates(text):
            if may_call and self._is_block(text, at):
                if calls := self._calls(_read_marked(text[at:], self._tools)):
                    return text[:at] if self._has_given or text[:at].strip() else "", calls
                self._starts_left -= 1
            if self.drop_end_tokens and (end := _END_OF_ANSWER.match(text, at)) and end.end() == len(text):
                return text[:at], ()
        if may_call and self._is_start and (calls := self._calls(_read_bare(text), is_bare=True)):
            return "", calls
        return text, ()

    def interrupt(self) -> str:
        """Return the held-back text after the stream broke, or an empty string if this text looks like an incomplete
        call."""
        text, self._held = self.held, []
        is_call = text.lstrip().startswith(_STARTS) or _names_a_tool(text[:_HEAD_CHARS], self._tools)
        return "" if is_call else text

    def _hold(self, text: str, at: int) -> str:
        """Hold `text` back from position `at` on, and return the text before this position."""
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
        `_before` describes the text before it. Stop at the position from which text is held back; otherwise `_before`
        describes all of the text."""
        added = 0
        for match in _CANDIDATE.finditer(text):
            at = match.start()
            if self._starts_left > 0 and (text.startswith(_WATCHED, at) or _is_prefix(text, at)):
                self._before.add(text[added:at])
                added = at
                yield at
        self._before.add(text[added:])

    def _may_be_block(self, text: str, at: int) -> bool:
        """Return whether the text from `at` on can still become a block of calls, or the end of the answer."""
        if self._tools and not self._before.is_quoting and _is_prefix(text, at):
            return True
        is_block = self._is_block(text, at)
        if is_block and _may_be_marked(text[at:], self._tools):
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
        if not self._tools or self._before.is_quoting or not text.startswith(_STARTS, at):
            return False
        if self._before.is_in_unknown_form:
            return False
        # Models never write special tokens by accident. But they do mention other tags within a line, so such a tag
        # is accepted only if a line break follows, or the name of a tool and its first argument as GLM writes them.
        is_tag = text.startswith("<", at) and not text.startswith(("<|", "<｜"), at)
        is_alone = not (is_tag and self._before.is_in_line) or _TAG_ALONE.match(text, at) is not None
        return is_alone or self._may_be_glm(text, at)

    def _may_be_glm(self, text: str, at: int) -> bool:
        """Return whether the text from `at` on is a call in GLM's form, or can still become one."""
        if (call := _GLM_CALL.match(text, at)) is None:
            return False
        name, rest = call["name"], call["rest"]
        if call.end("name") == len(text):
            return any(each.startswith(name) for each in self._tools)
        return name in self._tools and (rest == _ARG_KEY or (call.end() == len(text) and _ARG_KEY.startswith(rest)))

    def _calls(self, found: _Found, *, is_bare: bool = False) -> tuple[ToolCall, ...]:
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
    """Return whether the text from `at` on is an incomplete token."""
    return len(text) - at < _LONGEST and text[at:] in _PREFIXES


def _tool(name: str, tools: _Tools) -> ToolSpec | None:
    """Return the offered tool to which a name in the model's text refers."""
    return tools.get(tool_name(name, tools))


def _schema_of(name: str, tools: _Tools) -> JsonObject:
    tool = _tool(name, tools)
    return tool.input_schema if tool is not None else {}


def _names_a_tool(text: str, tools: _Tools) -> bool:
    return any(_tool(word, tools) is not None for word in _WORD.findall(text))


# Marked forms: a block is a sequence of calls with brackets (opening and closing tokens) between them. It is read from
# left to right. The start of a call decides how the call is read. The end of JSON is found by a JSON decoder, not by
# looking for the closing tag, because strings in JSON may contain tags. Anything incomplete is not a call.

_DECODER = json.JSONDecoder(strict=False)
_JSON_MARGIN_CHARS = 12
"""If the decoder fails within this many characters of the end of the text, the cause may be a word or an escape
sequence that is still incomplete."""
_BRACKETS = re.compile(rf"(?:\s|[,;]|{'|'.join(map(re.escape, (*_OPENING, *_CLOSING, '<|end|>')))})+")
_TURNS = re.compile(rf"(?:\s|{'|'.join(map(re.escape, _TURN))})*")
_NAME = re.compile(r"[\w.:=-]+\s*(?:[<(\[{]|\Z)")
_ARGUMENTS_FIRST = re.compile(r"\[?\s*\{\s*\"(?:arguments|parameters)\"")
_LIST_OF_CALLS = re.compile(r"\[\s*(?:[\w.]+\s*(?:\(|\Z)|\Z)")

_DSML = "(?:｜DSML｜|antml:|)"
_DSML_KEY = r"[\"']?(?P<key>[^\"'>]{1,200}?)[\"']?(?:\s++string=\"(?:true|false)\")?"
_GEMMA_VALUE = r"(?:<escape>(?P<string>.*?)<escape>\s*+|(?P<text>[^,<>]*?))"
_DEEPSEEK_NAME = r"(?:function<｜tool[▁_]sep｜>)?(?P<name>[^<\n]+?)(?:<｜tool[▁_]sep｜>|\n)"
_HARMONY_START = r"(?:<\|start\|>assistant)?\s*+"
_HARMONY_CHANNEL = r"<\|channel\|>(?:commentary|analysis)\s*+"
_HARMONY_TO = r"to=(?P<name>[\w.-]++)\s*+"
_HARMONY_END = r"(?:<\|constrain\|>)?(?:json|code)?\s*+<\|message\|>\s*+(?=\{)"
_FORMS = tuple(
    (re.compile(opening), re.compile(member, re.DOTALL), re.compile(closing))
    for opening, member, closing in (
        # Claude, DeepSeek
        (
            rf"<{_DSML}invoke name=[\"']?(?P<name>[^\"'>]+)[\"']?>",
            rf"\s*+<{_DSML}parameter name={_DSML_KEY}>(?P<text>.*?)</{_DSML}parameter>",
            rf"\s*+</{_DSML}invoke>(?=\s*(?:<|\Z))",
        ),
        # GLM
        (
            r"(?P<name>[\w.:-]++)\s*+(?:<tool_sep>\s*+)?(?=<arg_key>|</tool_call>)",
            r"\s*+<arg_key>(?P<key>[^<]*+)</arg_key>\s*+<arg_value>(?P<text>.*?)</arg_value>",
            r"\s*+</tool_call>",
        ),
        # Gemma
        (
            r"<start_function_call>call:(?P<name>[\w.-]+)\{",
            rf"\s*+(?P<key>\w++):{_GEMMA_VALUE}(?:,|(?=\}}<end_function_call>))",
            r"\s*+\}<end_function_call>",
        ),
        # DeepSeek
        (
            rf"<｜tool[▁_]call[▁_]begin｜>{_DEEPSEEK_NAME}\s*(?:```(?:json)?\s*)?(?=\{{)",
            "",
            r"\s*+(?:```\s*+)?<｜tool[▁_]call[▁_]end｜>",
        ),
        # Kimi
        (
            r"<\|tool_call_begin\|>\s*(?P<name>[^<\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)",
            "",
            r"\s*<\|tool_call_end\|>",
        ),
        # In Harmony, the recipient comes before or after the channel.
        (_HARMONY_START + _HARMONY_TO + _HARMONY_CHANNEL + _HARMONY_END, "", ""),
        (_HARMONY_START + _HARMONY_CHANNEL + _HARMONY_TO + _HARMONY_END, "", ""),
        # Mistral and other formats write the name before the object.
        (r"(?P<name>[\w.-]++)\s*+(?:\[CALL_ID\]\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)", "", ""),
    )
)
"""Each form has three patterns: the opening of a call, a member of its arguments ("" if the arguments are a JSON
object), and the closing of the call."""

_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>(?=\s*(?:<|\Z))", re.DOTALL)
_LAST_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>\s*(?:</(?:seed:)?tool_call>\s*)?\Z", re.DOTALL)


def _read_marked(block: str, tools: _Tools) -> _Found:
    """Return the calls in a block that begins with a marker. Return no calls if the block contains anything else."""
    block = _without_turns(block)
    found, end = _read_row(block, tools)
    return found if end >= len(block) and block.startswith((*_OPENING, *_CALL_STARTS, _RECIPIENT)) else []


def _may_be_marked(block: str, tools: _Tools) -> bool:
    """Return whether `block`, which may be incomplete, begins with a marker and can still become calls of offered
    tools."""
    block = _without_turns(block)
    if not any(token.startswith(block[: len(token)]) for token in (*_STARTS, _RECIPIENT)):
        return False
    found, end = _read_row(block, tools, is_partial=True)
    if not all(_tool(name, tools) is not None for name, _ in found):
        return False
    rest = block[end:]
    if not rest:
        return True
    if rest.startswith("<"):
        is_start = any(token.startswith(rest[: len(token)]) for token in (*_STARTS, *_CLOSING))
    elif rest[0] in "{[":
        is_start = _is_open_json(rest, 0) or _LIST_OF_CALLS.match(rest) is not None
    else:
        is_start = _NAME.match(rest) is not None
    # The name of the tool is near the start of a call, unless the arguments come first.
    is_head = len(rest) <= _HEAD_CHARS or _ARGUMENTS_FIRST.match(rest) is not None
    return is_start and (is_head or _names_a_tool(rest[:_HEAD_CHARS], tools))


def _without_turns(block: str) -> str:
    """Return `block` without the tokens that end the previous message."""
    return block[_end_of(_TURNS, block) :] if block.startswith(_TURN) else block


def _read_row(block: str, tools: _Tools, *, is_partial: bool = False) -> tuple[_Found, int]:
    """Return the calls at the beginning of `block`, and the position at which they end. `is_partial` means that the
    block may be incomplete."""
    found: _Found = []
    at = 0
    is_listed = False
    while at < len(block) and len(found) < _MAX_CALLS:
        if brackets := _BRACKETS.match(block, at):
            # only these formats write Python calls without a list around them
            is_listed = "function_calls>" in brackets[0] or "<|python_" in brackets[0]
            at = brackets.end()
            continue
        if is_partial and _is_open_json(block, at):
            break
        if (read := _read_call(block, at, tools, is_listed=is_listed)) is None:
            break
        calls, at = read
        found.extend(calls)
    return found, at


def _is_open_json(text: str, at: int) -> bool:
    """Return whether an object or a list begins at `at` and may be incomplete."""
    if text[at] not in "{[":
        return False
    try:
        _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated") or error.pos > len(text) - _JSON_MARGIN_CHARS
    except (ValueError, RecursionError):  # an integer has too many digits, or the value nests too deeply
        pass
    return False


def _read_call(block: str, at: int, tools: _Tools, *, is_listed: bool) -> tuple[_Found, int] | None:
    """Return the call or the list of calls at `at`, and the position of its end. `is_listed` means that Python calls
    may be written one per line, without a list around them."""
    if block[at] in "{[":
        value, end = _json_at(block, at)
        named = [_named(each) for each in (value if isinstance(value, list) else [value])]
        if named and all(named):
            return [each for each in named if each is not None], end
    if (read := _read_function(block, at, tools)) is not None:
        return read
    for opening, member, closing in _FORMS:
        if match := opening.match(block, at):
            name = match["name"].strip()
            arguments: object
            if member.pattern:
                arguments, end = _members(member, block, match.end(), _schema_of(name, tools))
            else:
                arguments, end = _json_at(block, match.end())
            after = closing.match(block, end)
            if isinstance(arguments, dict) and after is not None:
                return [(name, _dump(arguments))], after.end()
            if not member.pattern:  # no other form begins like this one
                return None
    end = min((found for token in ("<|", "</") if (found := block.find(token, at)) >= 0), default=len(block))
    calls = _read_python(block[at:end], is_listed=is_listed)
    return (calls, end) if calls else None


def _read_function(block: str, at: int, tools: _Tools) -> tuple[_Found, int] | None:
    # Values may contain `</function>` themselves. If so, the last closing tag is the right one.
    for pattern in (_FUNCTION, _LAST_FUNCTION):
        if (match := pattern.match(block, at)) is None:
            continue
        name, body, end = match[1], match[2].strip("\n"), match.end()
        if body.lstrip().startswith("{"):
            return [(name, body.strip())], end
        members = _parameters(body, _schema_of(name, tools))
        following = _end_of(_BRACKETS, block, end)
        if members is not None and (following >= len(block) or block.startswith("<function=", following)):
            return [(name, _dump(members))], end
    return None


def _parameters(body: str, schema: JsonObject) -> dict[str, object] | None:
    """Return the parameters in `body`, or None if `body` contains anything else. Each parameter ends where the next
    parameter of the schema begins, because values may contain tags and closing tags may be missing."""
    properties = schema.get("properties")
    keys = "|".join(map(re.escape, properties)) if isinstance(properties, Mapping) and properties else r"[^<>\s]{1,200}"
    pattern = re.compile(
        rf"\s*<parameter=(?P<key>{keys})>\n?(?P<text>.*?)\n?(?:</parameter>\s*)?(?=<parameter=(?:{keys})>|\Z)",
        re.DOTALL,
    )
    body = body.rstrip()
    members, end = _members(pattern, body, 0, schema)
    return members if end == len(body) else None


def _members(pattern: re.Pattern[str], text: str, at: int, schema: JsonObject) -> tuple[dict[str, object] | None, int]:
    """Return the arguments that begin at `at`, and the position of their end. If an argument appears twice, return None
    instead of the arguments."""
    members: dict[str, object] = {}
    while match := pattern.match(text, at):
        key, value, string = match["key"].strip(), match["text"], match.groupdict().get("string")
        if key in members:
            return None, at
        members[key] = string if string is not None else _typed(value, key, schema)
        at = match.end()
    return members, at


def _typed(text: str, key: str, schema: JsonObject) -> object:
    """Return the value of the argument `key`, which the model wrote as `text` without quotes. If `text` is valid JSON
    and the schema lists `key` without the type string, the value is the decoded `text`. It is also decoded if it is
    `null` and the schema allows that. In all other cases, it is `text` itself."""
    properties = schema.get("properties")
    member = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(member, Mapping):
        return text
    listed = member.get("type")
    kinds = listed if isinstance(listed, list | tuple) else [listed]
    if "string" in kinds and not ("null" in kinds and text.strip() == "null"):
        return text
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text


def _named(value: object) -> tuple[str, str] | None:
    """Return the name and arguments in `{"name": ..., "arguments" or "parameters": ...}` or `{name: arguments}`."""
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and isinstance(only := next(iter(value.values())), dict) and "function" not in value:
        return next(iter(value)), _dump(only)
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", value.get("tool_name", inner))
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str):
        return None
    return name, arguments if isinstance(arguments, str) else _dump(arguments)


def _read_python(text: str, *, is_listed: bool) -> _Found:
    """Return the calls in `[name(key=value), ...]`. If `is_listed` is set, also accept one call per line."""
    text = text.strip()
    if len(text) > _MAX_PYTHON_CHARS or not text.endswith(("]", ")")) or not (is_listed or text.startswith("[")):
        return []
    try:
        # Python 3.12 and newer print a warning about each unknown escape sequence to stderr, which editors show.
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    values = [statement.value for statement in body if isinstance(statement, ast.Expr)]
    if len(values) != len(body):
        return []
    if len(values) == 1 and isinstance(values[0], ast.List):
        values = values[0].elts
    elif not is_listed:
        return []
    found: _Found = []
    for value in values:
        if not isinstance(value, ast.Call) or value.args or any(each.arg is None for each in value.keywords):
            return []
        try:
            members = {str(each.arg): ast.literal_eval(each.value) for each in value.keywords}
            if len(members) < len(value.keywords):  # an argument appears twice
                return []
            found.append((ast.unparse(value.func).removesuffix(".call"), _dump(members)))
        except (ValueError, TypeError, RecursionError):
            return []
    return found


def _json_at(text: str, at: int) -> tuple[object, int]:
    """Return the JSON value at `at` and the position of its end, or `(None, len(text))` if there is no valid JSON."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)


def _dump(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False, default=str)


def _end_of(pattern: re.Pattern[str], text: str, at: int = 0) -> int:
    match = pattern.match(text, at)
    return match.end() if match is not None else at


# Bare forms: the answer consists only of JSON or Python calls, perhaps in a code fence.

_BARE_START = re.compile(r"(?:<\|start_header_id\|>assistant<\|end_header_id\|>)?\s*(?:functools\s*(?=\[))?")
_BARE_OPENINGS = ("<|start_header_id|>assistant<|end_header_id|>", "functools", "```", "~~~")
_LABELS = ("json", "tool_call", "tool_code")
_FENCED = re.compile(r"(`{3,}|~{3,})(json|tool_call|tool_code)?[ \t]*\n(.*)\n\1", re.DOTALL)
_FENCE = re.compile(r"(`{3,}|~{3,})(\w*)[ \t]*(\n?)")
_PYTHON_HEAD = re.compile(r"\[?\s*([\w.]*)\s*(\(?)")
_BARE_SEPARATORS = re.compile(r"[\s;]*")
_BARE_BRACKETS = re.compile(r"[\s;,\]]*")
_BLANKS_OR_COMMA = re.compile(r"[\s,]*")
_MEMBER = re.compile(r"\"([^\"\\]*)(\"?)\s*(:?)\s*")
_STRING = re.compile(r"\"([^\"\\]*)(\"?)")
_BARE_ARGUMENTS = frozenset({"arguments", "parameters", "function"})
_BARE_KEYS = _BARE_ARGUMENTS | {"name", "type", "id"}


def _read_bare(text: str) -> _Found:
    """Return the calls in an answer that consists only of calls. Return no calls if the answer contains anything
    else."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    label = fenced[2] if fenced is not None else None
    body = (fenced[3] if fenced is not None else text[_end_of(_BARE_START, text) :]).strip()
    is_python = label == "tool_code"
    if (is_python or body.startswith("[")) and (calls := _read_python(body, is_listed=is_python)):
        return calls
    found: _Found = []
    at = 0
    while at < len(body):
        value, at = _json_at(body, at)
        for each in value if isinstance(value, list) and value else (value,):
            keys = each.keys() if isinstance(each, dict) else frozenset[str]()
            named = _named(each) if keys <= _BARE_KEYS and not keys.isdisjoint(_BARE_ARGUMENTS) else None
            if named is None:
                return []
            found.append(named)
        at = _end_of(_BARE_SEPARATORS, body, at)
    return found


def _may_be_bare(text: str, tools: _Tools) -> bool:
    """Return whether an answer that begins with `text` may turn out to consist only of calls without a marker."""
    text = text.strip()
    if any(opening.startswith(text) for opening in _BARE_OPENINGS):
        return True
    if (fence := _FENCE.match(text)) is None:
        return _may_be_bare_calls(text[_end_of(_BARE_START, text) :], tools)
    mark, label, line_end = fence.groups()
    if not line_end:
        return fence.end() == len(text) and any(known.startswith(label) for known in _LABELS)
    if label and label not in _LABELS:
        return False
    code, closing, after = text[fence.end() :].partition(f"\n{mark}")
    code = code if closing else code.rstrip().rstrip(mark[0])
    return not after.strip() and _may_be_bare_calls(code, tools, is_python=label == "tool_code")


def _may_be_bare_calls(text: str, tools: _Tools, *, is_python: bool = False) -> bool:
    text = text.strip()
    if (is_python or text.startswith("[")) and (head := _PYTHON_HEAD.match(text)):
        if head[2]:
            return head[1].removesuffix(".call") in tools
        if head.end() == len(text):
            return any(f"{known}.call".startswith(head[1]) for known in tools)
    at = int(text.startswith("["))
    while (at := _end_of(_BARE_BRACKETS, text, at)) < len(text):
        if (end := _end_of_bare_call(text, at, tools)) is None:
            return False
        at = end
    return True


def _end_of_bare_call(text: str, at: int, tools: _Tools) -> int | None:
    """Return the end of the object at `at`, or the end of `text` if the object is incomplete or a value in it is not
    JSON. Return None if the object is not a call."""
    if text[at] != "{":
        return None
    at += 1
    while (at := _end_of(_BLANKS_OR_COMMA, text, at)) < len(text):
        if text[at] == "}":
            return at + 1
        member = _MEMBER.match(text, at)
        if member is None or not _begins_one_of(_BARE_KEYS, member[1], is_whole=bool(member[2])):
            return None
        at = member.end()
        if at == len(text):
            return at
        if not member[3]:
            return None
        if member[1] == "name":
            name = _STRING.match(text, at)
            if name is None or not _begins_one_of(tools, name[1], is_whole=bool(name[2])):
                return None
        at = _json_at(text, at)[1]
    return at


def _begins_one_of(words: Collection[str], text: str, *, is_whole: bool) -> bool:
    """Return whether `text` is one of `words`. If `is_whole` is False, `text` may also be the beginning of one of
    them."""
    return text in words if is_whole else any(word.startswith(text) for word in words)
