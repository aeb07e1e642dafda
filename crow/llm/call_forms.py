"""The forms in which models write tool calls into text, and the functions that read them.

`read_marked` and `read_bare` read whole calls. `may_be_marked` and `may_be_bare` tell whether an incomplete text can
still become calls.

A model's text may be hostile, so no pattern here may take more than linear time. This is why patterns use possessive
quantifiers where backtracking could take longer.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from typing import TypeAlias

from crow.domain.messages import JsonObject, ToolSpec
from crow.llm.tool_calls import tool_name

_Tools: TypeAlias = Mapping[str, ToolSpec]
Found: TypeAlias = list[tuple[str, str]]
"""Names and arguments (JSON text) of calls as the model wrote them, in order."""

_TAGS = ("tool_call>", "tool_calls>")
_OPENING = (
    *(f"<{family}{tag}" for family in ("", "seed:", "minimax:", "longcat_") for tag in _TAGS),
    *("<function_call>", "<function_calls>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<TOOLCALL>"),
    *("<|tool_call|>", "<|tool_calls|>", "<|python_tag|>", "<|python_start|>", "<|START_ACTION|>", "<|action_start|>"),
    *("<|tools_prefix|>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>"),
    "[TOOL_CALLS]",
)
"""Tokens that begin a block of calls."""
CLOSING = (
    *(f"</{family}{tag}" for family in ("", "seed:", "minimax:", "longcat_") for tag in _TAGS),
    *("</function_call>", "</function_calls>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</TOOLCALL>"),
    *("<|/tool_call|>", "<|/tool_calls|>", "<|python_end|>", "<|END_ACTION|>", "<|action_end|>", "<|tools_suffix|>"),
    *("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>", "<｜tool_calls_end｜>", "<｜end▁of▁sentence｜>"),
    *("<｜end_of_sentence｜>", "[/TOOL_CALLS]", "</s>", "<eos>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|observation|>", "<|user|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|call|>", "<|plugin|>"),
)
"""Tokens that end a block of calls, or the answer after it."""
_TURN = ("<|end|>", "<|start|>assistant")
"""In the Harmony format, these tokens end one message of an answer and start the next one."""

_CALL_STARTS = (
    *(f"<{family}invoke name=" for family in ("", "antml:", "｜DSML｜")),
    *("<function=", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "<｜tool_call_begin｜>", "<start_function_call>"),
    *("<|channel|>commentary ", "<|channel|>analysis "),
)
"""The beginnings of single calls."""
STARTS = (*_OPENING, *_CALL_STARTS, *_TURN)
"""Text that begins with one of these may be calls in a marked form."""
RECIPIENT = "to="
"""A Harmony call begins with this word if the server has removed the tokens before it."""

_HEAD_CHARS = 200
"""A call must name its tool within this many characters, unless its arguments come first."""

_WORD = re.compile(r"[\w-]+")
_MAX_CALLS = 100
_MAX_PYTHON_CHARS = 50_000
"""The limit for text that Python's parser reads, because the parser needs hundreds of times as much memory as the
text."""


def _tool(name: str, tools: _Tools) -> ToolSpec | None:
    """Return the offered tool to which a name in the model's text refers."""
    return tools.get(tool_name(name, tools))


def _schema_of(name: str, tools: _Tools) -> JsonObject:
    tool = _tool(name, tools)
    return tool.input_schema if tool is not None else {}


def names_a_tool(text: str, tools: _Tools) -> bool:
    """Return whether the beginning of `text` contains the name of an offered tool."""
    return any(_tool(word, tools) is not None for word in _WORD.findall(text[:_HEAD_CHARS]))


# Marked forms: a block is a sequence of calls with brackets (opening and closing tokens) between them. It is read from
# left to right. The start of a call decides how the call is read. The end of JSON is found by a JSON decoder, not by
# looking for the closing tag, because strings in JSON may contain tags. Anything incomplete is not a call.

_DECODER = json.JSONDecoder(strict=False)
_JSON_MARGIN_CHARS = 12
"""If the decoder fails within this many characters of the end of the text, the cause may be a word or an escape
sequence that is still incomplete."""
_BRACKETS = re.compile(rf"(?:\s|[,;]|{'|'.join(map(re.escape, (*_OPENING, *CLOSING, '<|end|>')))})+")
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


def read_marked(block: str, tools: _Tools) -> Found:
    """Return the calls in a block that begins with a marker. Return no calls if the block contains anything besides
    calls."""
    block = _without_turns(block)
    found, end = _read_row(block, tools)
    return found if end >= len(block) and block.startswith((*_OPENING, *_CALL_STARTS, RECIPIENT)) else []


def may_be_marked(block: str, tools: _Tools) -> bool:
    """Return whether `block`, which may be incomplete, begins with a marker and can still become calls of offered
    tools."""
    block = _without_turns(block)
    if not any(token.startswith(block[: len(token)]) for token in (*STARTS, RECIPIENT)):
        return False
    found, end = _read_row(block, tools, is_partial=True)
    if not all(_tool(name, tools) is not None for name, _ in found):
        return False
    rest = block[end:]
    if not rest:
        return True
    if rest.startswith("<"):
        is_start = any(token.startswith(rest[: len(token)]) for token in (*STARTS, *CLOSING))
    elif rest[0] in "{[":
        is_start = _is_open_json(rest, 0) or _LIST_OF_CALLS.match(rest) is not None
    else:
        is_start = _NAME.match(rest) is not None
    # The name of the tool is near the start of a call, unless the arguments come first.
    is_head = len(rest) <= _HEAD_CHARS or _ARGUMENTS_FIRST.match(rest) is not None
    return is_start and (is_head or names_a_tool(rest, tools))


def _without_turns(block: str) -> str:
    """Return `block` without the tokens at its beginning that end one message and start the next one."""
    return block[_end_of(_TURNS, block) :] if block.startswith(_TURN) else block


def _read_row(block: str, tools: _Tools, *, is_partial: bool = False) -> tuple[Found, int]:
    """Return the calls at the beginning of `block`, and the position at which they end. `is_partial` means that the
    block may be incomplete."""
    found: Found = []
    at = 0
    is_by_line = False
    while at < len(block) and len(found) < _MAX_CALLS:
        if brackets := _BRACKETS.match(block, at):
            # only these formats write Python calls without a list around them
            is_by_line = "function_calls>" in brackets[0] or "<|python_" in brackets[0]
            at = brackets.end()
            continue
        if is_partial and _is_open_json(block, at):
            break
        if (read := _read_call(block, at, tools, is_by_line=is_by_line)) is None:
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


def _read_call(block: str, at: int, tools: _Tools, *, is_by_line: bool) -> tuple[Found, int] | None:
    """Return the call or the list of calls at `at`, and the position of its end. `is_by_line` means that Python calls
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
    calls = _read_python(block[at:end], is_by_line=is_by_line)
    return (calls, end) if calls else None


def _read_function(block: str, at: int, tools: _Tools) -> tuple[Found, int] | None:
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
    """Return the value of the argument `key`, which the model wrote as `text` without quotes. The value is `text`
    itself if the schema does not list `key`, if the types of `key` include string, or if `text` is not valid JSON.
    Otherwise, the value is the decoded JSON. A `null` is also decoded if the types of `key` include both string and
    null."""
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


def _read_python(text: str, *, is_by_line: bool) -> Found:
    """Return the calls in `[name(key=value), ...]`. If `is_by_line` is set, also accept one call per line."""
    text = text.strip()
    if len(text) > _MAX_PYTHON_CHARS or not text.endswith(("]", ")")) or not (is_by_line or text.startswith("[")):
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
    elif not is_by_line:
        return []
    found: Found = []
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


def read_bare(text: str) -> Found:
    """Return the calls in an answer that consists only of calls. Return no calls if the answer contains anything
    else."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    label = fenced[2] if fenced is not None else None
    body = (fenced[3] if fenced is not None else text[_end_of(_BARE_START, text) :]).strip()
    is_python = label == "tool_code"
    if (is_python or body.startswith("[")) and (calls := _read_python(body, is_by_line=is_python)):
        return calls
    found: Found = []
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


def may_be_bare(text: str, tools: _Tools) -> bool:
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
