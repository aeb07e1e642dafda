"""The forms in which models write tool calls as text: names and arguments out of them.

A block is a row of calls with brackets (opening and closing tokens of the formats) between them, read from left to
right; what opens a call tells which reader it gets. JSON is read by a JSON decoder and not by its closing tag, since
tags may stand within its strings. Whatever is not read to its end is no call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

from crow.domain.messages import JsonObject, ToolCall, ToolSpec
from crow.llm.arguments import InvalidArguments, fits, json_text, read_arguments
from crow.llm.tool_calls import tool_name

__all__ = ["END_TOKENS", "STARTS", "CallDetector", "Found", "may_be_bare", "may_be_marked", "read_bare", "read_marked"]

Found: TypeAlias = list[tuple[str, str]]
"""Names and arguments (JSON text), in order."""

SchemaOf: TypeAlias = Callable[[str], JsonObject | None]
"""The schema of the offered tool that a name means, None if there is none."""

# What a model writes is hostile: no expression here may take more than linear time. Hence the possessive quantifiers.
_DECODER = json.JSONDecoder(strict=False)
_MOST_CALLS = 100
_MOST_PYTHON = 50_000
"""Python reads longer texts too, with hundreds of times the memory."""

_OPENING = (
    *(f"<{family}tool_call{plural}>" for family in ("", "seed:", "minimax:", "longcat_") for plural in ("", "s")),
    *("<function_call>", "<function_calls>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<TOOLCALL>"),
    *("<|tool_call|>", "<|tool_calls|>", "<|python_tag|>", "<|python_start|>", "<|START_ACTION|>", "<|action_start|>"),
    *("<|tools_prefix|>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>"),
    "[TOOL_CALLS]",
)
_CLOSING = (
    *(f"</{family}tool_call{plural}>" for family in ("", "seed:", "minimax:", "longcat_") for plural in ("", "s")),
    *("</function_call>", "</function_calls>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</TOOLCALL>"),
    *("<|/tool_call|>", "<|/tool_calls|>", "<|python_end|>", "<|END_ACTION|>", "<|action_end|>", "<|tools_suffix|>"),
    *("<|tool_calls_section_end|>", "<｜tool▁calls▁end｜>", "<｜tool_calls_end｜>", "<｜end▁of▁sentence｜>"),
    *("<｜end_of_sentence｜>", "[/TOOL_CALLS]", "</s>", "<eos>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|observation|>", "<|user|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|call|>", "<|plugin|>"),
)
_TURN = ("<|end|>", "<|start|>assistant")
"""What ends a message and begins the next one of the same answer, in Harmony."""

_BEGINNING = (
    *(f"<{family}invoke name=" for family in ("", "antml:", "｜DSML｜")),
    *("<function=", "<|tool_call_begin|>", "<｜tool▁call▁begin｜>", "<｜tool_call_begin｜>", "<start_function_call>"),
    *("<|channel|>commentary ", "<|channel|>analysis "),
)
"""What begins a single call."""

_MARKERS = (*_OPENING, *_BEGINNING, "to=")
STARTS = (*_OPENING, *_BEGINNING, *_TURN)
"""What a block may begin with."""

END_TOKENS = ("<|return|>", "<|end|>", "<|END_RESPONSE|>", "<|end_of_solution|>")
"""What ends an answer in the formats that have something before it as well."""

_BRACKETS = re.compile(rf"(?:\s|[,;]|{'|'.join(map(re.escape, (*_OPENING, *_CLOSING, '<|end|>')))})+")
_TURNS = re.compile(rf"(?:\s|{'|'.join(map(re.escape, _TURN))})*")
_TOKENS = (*_OPENING, *_CLOSING, *_TURN, *_BEGINNING)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>(?=\s*(?:<|\Z))", re.DOTALL)
_LAST_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>\s*(?:</(?:seed:)?tool_call>\s*)?\Z", re.DOTALL)
_KEYED = re.compile(r"([\w.:-]++)\s*+(?:<tool_sep>\s*+)?(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>(.*?)</arg_value>\s*+", re.DOTALL)
_KEYED_END = re.compile(r"\s*+</tool_call>")
_INVOKE = re.compile(
    r"<(｜DSML｜|antml:|)invoke name=[\"']?([^\"'>]+)[\"']?>(.*?)</\1invoke>(?=\s*(?:<|\Z))", re.DOTALL
)
_INVOKED = re.compile(
    r"\s*+<(?:｜DSML｜|antml:|)parameter name=[\"']?([^\"'>]{1,200}?)[\"']?(?:\s++string=\"(?:true|false)\")?>"
    r"(.*?)</(?:｜DSML｜|antml:|)parameter>\s*+",
    re.DOTALL,
)
_NAMED = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_DEEPSEEK = re.compile(
    r"<｜tool[▁_]call[▁_]begin｜>(?:function<｜tool[▁_]sep｜>)?([^<\n]+?)(?:<｜tool[▁_]sep｜>|\n)\s*(?:```(?:json)?\s*)?(?=\{)"
)
_DEEPSEEK_END = re.compile(r"\s*+(?:```\s*+)?<｜tool[▁_]call[▁_]end｜>")
_KIMI = re.compile(r"<\|tool_call_begin\|>\s*([^<\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)")
_KIMI_END = re.compile(r"\s*<\|tool_call_end\|>")
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?\s*+(?:to=(?P<first>[\w.-]++)\s*+)?<\|channel\|>(?:commentary|analysis)\s*+"
    r"(?:to=(?P<name>[\w.-]++)\s*+)?(?:<\|constrain\|>)?(?:json|code)?\s*+<\|message\|>\s*+(?=\{)"
)
_GEMMA = re.compile(r"<start_function_call>call:([\w.-]+)\{(.*?)\}<end_function_call>", re.DOTALL)
_GEMMA_ARGUMENT = re.compile(r"\s*+(\w++):(?:<escape>(.*?)<escape>\s*+|([^,<>]*+))(?:,|\Z)", re.DOTALL)
_BARE = re.compile(r"(?:<\|start_header_id\|>assistant<\|end_header_id\|>)?\s*(?:functools\s*(?=\[))?")
_FENCED = re.compile(r"(`{3,}|~{3,})(json|tool_call|tool_code)?[ \t]*\n(.*)\n\1", re.DOTALL)
_SEPARATORS = re.compile(r"[\s;]*")
_BARE_OPENINGS = ("<|start_header_id|>assistant<|end_header_id|>", "functools", "```", "~~~")
_LABELS = ("json", "tool_call", "tool_code")
_FENCE = re.compile(r"(`{3,}|~{3,})(\w*)[ \t]*(\n?)")
_PYTHON_HEAD = re.compile(r"\[?\s*([\w.]*)\s*(\(?)")
_BETWEEN_BARE = re.compile(r"[\s;,\]]*")
_BLANKS_OR_COMMA = re.compile(r"[\s,]*")
_MEMBER = re.compile(r"\"([^\"\\]*)(\"?)\s*(:?)\s*")
_STRING = re.compile(r"\"([^\"\\]*)(\"?)")
_NAME = re.compile(r"[\w.:=-]+\s*(?:[<(\[{]|\Z)")
_WORD = re.compile(r"[\w-]+")
_ARGUMENTS_FIRST = re.compile(r"\[?\s*\{\s*\"(?:arguments|parameters)\"")
_LIST_OF_CALLS = re.compile(r"\[\s*(?:[\w.]+\s*(?:\(|\Z)|\Z)")
_HEAD_CHARS = 200
"""Within so many characters of its beginning a call names its tool."""
_JSON_MARGIN = 12
"""A fault so close to the end of a text may be a word or an escape that is not whole yet."""
_BARE_ARGUMENTS = frozenset({"arguments", "parameters", "function"})
_BARE_KEYS = _BARE_ARGUMENTS | {"name", "type", "id"}


def read_marked(block: str, schema_of: SchemaOf) -> Found:
    """The calls of a block that begins with a marker, none if anything in it is something else."""
    block = _after_turn(block)
    found, end = _read_row(block, schema_of)
    return found if end >= len(block) and block.startswith(_MARKERS) else []


def may_be_marked(block: str, schema_of: SchemaOf, is_offered: Callable[[str], bool]) -> bool:
    """Whether `block`, which begins with a marker and may go on, can still become calls of offered tools."""
    block = _after_turn(block)
    if not any(token.startswith(block[: len(token)]) for token in (*_MARKERS, *_TURN)):
        return False
    found, end = _read_row(block, schema_of, is_partial=True)
    return all(is_offered(name) for name, _ in found) and (end >= len(block) or _may_be_call(block[end:], is_offered))


def _after_turn(block: str) -> str:
    """`block` without the end of the message before it, which says nothing of what follows."""
    return block[_end_of(_TURNS, block) :] if block.startswith(_TURN) else block


def _read_row(block: str, schema_of: SchemaOf, *, is_partial: bool = False) -> tuple[Found, int]:
    """The calls of a row, and where it ends or something else begins. `is_partial`: the block may go on."""
    found: Found = []
    at = 0
    opened = ""
    while at < len(block) and len(found) < _MOST_CALLS:
        brackets = _BRACKETS.match(block, at)
        if brackets is not None:
            opened, at = brackets.group(), brackets.end()
            continue
        if is_partial and _is_open_json(block, at):
            break
        read = _one(block, at, schema_of, is_listed="function_calls>" in opened or "<|python_" in opened)
        if read is None:
            break
        calls, at = read
        found.extend(calls)
    return found, at


def _may_be_call(text: str, is_offered: Callable[[str], bool]) -> bool:
    """Whether `text`, which is no whole call, can be the beginning of one."""
    if text.startswith("<"):
        if not any(token.startswith(text[: len(token)]) for token in _TOKENS):
            return False
    elif text[0] in "{[":
        if not _is_open_json(text, 0) and not _LIST_OF_CALLS.match(text):
            return False
    elif not _NAME.match(text):
        return False
    # What begins a call names its tool soon, unless its arguments come first.
    if len(text) <= _HEAD_CHARS or _ARGUMENTS_FIRST.match(text):
        return True
    return any(map(is_offered, _WORD.findall(text[:_HEAD_CHARS])))


def _is_open_json(text: str, at: int) -> bool:
    """Whether an object or a list begins at `at` whose end may be still to come."""
    if text[at] not in "{[":
        return False
    try:
        _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated") or error.pos > len(text) - _JSON_MARGIN
    except RecursionError:
        return False
    return False


def read_bare(text: str) -> Found:
    """The calls of an answer that is nothing else, without any marker; none if it is anything else."""
    text = text.strip()
    fenced = _FENCED.fullmatch(text)
    label = fenced.group(2) if fenced is not None else None
    body = (fenced.group(3) if fenced is not None else text[_end_of(_BARE, text) :]).strip()
    if label == "tool_code" or body.startswith("["):
        calls = _in_python(body, is_listed=label == "tool_code")
        if calls:
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
        at = _end_of(_SEPARATORS, body, at)
    return found


def may_be_bare(text: str, names: Collection[str]) -> bool:
    """Whether an answer that begins with `text` can be nothing but calls without a marker."""
    text = text.strip()
    if any(opening.startswith(text) for opening in _BARE_OPENINGS):
        return True
    fence = _FENCE.match(text)
    if fence is None:
        return _may_be_bare_calls(text[_end_of(_BARE, text) :], names)
    mark, label, line_end = fence.groups()
    if not line_end:
        return fence.end() == len(text) and any(known.startswith(label) for known in _LABELS)
    if label and label not in _LABELS:
        return False
    code, closing, after = text[fence.end() :].partition(f"\n{mark}")
    code = code if closing else code.rstrip().rstrip(mark[0])
    return not after.strip() and _may_be_bare_calls(code, names, is_python=label == "tool_code")


def _may_be_bare_calls(text: str, names: Collection[str], *, is_python: bool = False) -> bool:
    text = text.strip()
    if is_python or text.startswith("["):
        head = _PYTHON_HEAD.match(text)
        name = head.group(1) if head is not None else ""
        if head is not None and head.group(2):
            return name.removesuffix(".call") in names
        if head is not None and head.end() == len(text):
            return any(f"{known}.call".startswith(name) for known in names)
    at = int(text.startswith("["))
    while (at := _end_of(_BETWEEN_BARE, text, at)) < len(text):
        end = _end_of_bare_call(text, at, names)
        if end is None:
            return False
        at = end
    return True


def _end_of_bare_call(text: str, at: int, names: Collection[str]) -> int | None:
    """Where the object at `at` ends, or `text` if that comes first; None if it is no call."""
    if text[at] != "{":
        return None
    at += 1
    while (at := _end_of(_BLANKS_OR_COMMA, text, at)) < len(text):
        if text[at] == "}":
            return at + 1
        member = _MEMBER.match(text, at)
        if member is None:
            return None
        key, is_whole, colon = member.groups()
        at = member.end()
        if not (key in _BARE_KEYS if is_whole else any(known.startswith(key) for known in _BARE_KEYS)):
            return None
        if at == len(text):
            return at
        name = _STRING.match(text, at) if key == "name" else None
        if not colon or (key == "name" and (name is None or not _may_name(name, names))):
            return None
        at = _json_at(text, at)[1]
    return at


def _may_name(written: re.Match[str], names: Collection[str]) -> bool:
    """Whether a string, which may not be whole yet, is one of `names`."""
    name, is_whole = written.groups()
    return name in names if is_whole else any(known.startswith(name) for known in names)


def _one(block: str, at: int, schema_of: SchemaOf, *, is_listed: bool) -> tuple[Found, int] | None:
    """The call, or the list of calls, at `at`, and where it ends."""
    if block[at] in "{[":
        value, end = _json_at(block, at)
        named = [_named(each) for each in (value if isinstance(value, list) else [value])]
        if named and all(named):
            return [each for each in named if each is not None], end
    for reader in (_function, _invoked, _keyed):
        read = reader(block, at, schema_of)
        if read is not None:
            return read
    for opening, closing in ((_DEEPSEEK, _DEEPSEEK_END), (_KIMI, _KIMI_END), (_HARMONY, None), (_NAMED, None)):
        match = opening.match(block, at)
        if match is None:
            continue
        arguments, end = _json_at(block, match.end())
        name = match.groupdict().get("name") or match.group(1)
        after = closing.match(block, end) if closing is not None else None
        if name is None or not isinstance(arguments, dict) or (closing is not None and after is None):
            return None
        return [(name.strip(), _text(arguments))], after.end() if after is not None else end
    return _gemma(block, at) or _python_at(block, at, is_listed=is_listed)


def _function(block: str, at: int, schema_of: SchemaOf) -> tuple[Found, int] | None:
    # Values may hold such tags themselves; then the last closing tag is the one.
    for pattern in (_FUNCTION, _LAST_FUNCTION):
        match = pattern.match(block, at)
        if match is None:
            continue
        name, body = match.group(1), match.group(2).strip("\n")
        if body.lstrip().startswith("{"):
            return [(name, body.strip())], match.end()
        members = _parameters(body, schema_of(name))
        if members is not None and (match.end() == len(block) or _continues(block, match.end())):
            return [(name, _text(members))], match.end()
    return None


def _continues(block: str, at: int) -> bool:
    """Whether what follows a call is a bracket or a further call."""
    at = _end_of(_BRACKETS, block, at)
    return at >= len(block) or block.startswith("<function=", at)


def _invoked(block: str, at: int, schema_of: SchemaOf) -> tuple[Found, int] | None:
    match = _INVOKE.match(block, at)
    members = _members(_INVOKED, match.group(3), schema_of(match.group(2).strip())) if match is not None else None
    if match is None or members is None:
        return None
    return [(match.group(2).strip(), _text(members))], match.end()


def _keyed(block: str, at: int, schema_of: SchemaOf) -> tuple[Found, int] | None:
    opening = _KEYED.match(block, at)
    if opening is None:
        return None
    schema = schema_of(opening.group(1)) or {}
    members: dict[str, object] = {}
    end = opening.end()
    while (member := _KEY.match(block, end)) is not None:
        members[member.group(1).strip()] = _typed(member.group(2), member.group(1).strip(), schema)
        end = member.end()
    closing = _KEYED_END.match(block, end)
    return ([(opening.group(1), _text(members))], closing.end()) if closing is not None else None


def _parameters(body: str, schema: JsonObject | None) -> dict[str, object] | None:
    """The parameters that make up `body`. One ends where the next one of the schema begins: values may hold such tags
    themselves, and closing tags are at times left out."""
    properties = schema.get("properties") if schema is not None else None
    keys = "|".join(map(re.escape, properties)) if isinstance(properties, Mapping) and properties else r"[^<>\s]{1,200}"
    following = rf"(?=<parameter=(?:{keys})>|\Z)"
    pattern = re.compile(rf"\s*<parameter=({keys})>\n?(.*?)\n?(?:</parameter>\s*)?{following}", re.DOTALL)
    return _members(pattern, body, schema)


def _members(pattern: re.Pattern[str], body: str, schema: JsonObject | None) -> dict[str, object] | None:
    """The parameters that make up the whole of `body`, None if it is something else."""
    members: dict[str, object] = {}
    at = 0
    body = body.rstrip()
    while at < len(body):
        match = pattern.match(body, at)
        if match is None or match.end() == at:
            return None
        key = match.group(1).strip()
        if key in members:
            return None
        members[key] = _typed(match.group(2), key, schema or {})
        at = match.end()
    return members


def _typed(text: str, key: str, schema: JsonObject) -> object:
    """A value written without quotes: a string where the schema says so, else what it is as JSON."""
    properties = schema.get("properties")
    member = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(member, Mapping) or member.get("type") == "string":
        return text
    value, end = _json_at(text.strip(), 0)
    return text if value is None or end < len(text.strip()) else value


def _gemma(block: str, at: int) -> tuple[Found, int] | None:
    match = _GEMMA.match(block, at)
    if match is None:
        return None
    members: dict[str, object] = {}
    body, position = match.group(2), 0
    while position < len(body):
        argument = _GEMMA_ARGUMENT.match(body, position)
        if argument is None or argument.end() == position:
            return None
        key, quoted, plain = argument.groups()
        value = _json_at(plain.strip(), 0)[0] if quoted is None else quoted
        members[key] = plain if value is None else value
        position = argument.end()
    return [(match.group(1), _text(members))], match.end()


def _python_at(block: str, at: int, *, is_listed: bool) -> tuple[Found, int] | None:
    """Calls written as Python: all up to the next token."""
    end = min((found for token in ("<|", "</") if (found := block.find(token, at)) >= 0), default=len(block))
    calls = _in_python(block[at:end], is_listed=is_listed)
    return (calls, end) if calls else None


def _in_python(text: str, *, is_listed: bool) -> Found:
    """The calls of `[name(key=value), ...]`; `is_listed`: or of one call a line."""
    text = text.strip()
    if len(text) > _MOST_PYTHON or not text.endswith(("]", ")")) or not (is_listed or text.startswith("[")):
        return []
    try:
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
    named = [_python_call(value) for value in values]
    return [each for each in named if each is not None] if all(named) else []


def _python_call(value: ast.expr) -> tuple[str, str] | None:
    if not isinstance(value, ast.Call) or value.args:
        return None
    name = ast.unparse(value.func).removesuffix(".call")
    try:
        members = {each.arg: ast.literal_eval(each.value) for each in value.keywords if each.arg is not None}
        return (name, _text(members)) if len(members) == len(value.keywords) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _named(value: object) -> tuple[str, str] | None:
    """`{"name": ..., "arguments" or "parameters": ...}` as name and arguments; or `{name: arguments}`."""
    if not isinstance(value, dict):
        return None
    if len(value) == 1 and isinstance(only := next(iter(value.values())), dict) and "function" not in value:
        return next(iter(value)), _text(only)
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", value.get("tool_name", inner))
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str):
        return None
    return name, arguments if isinstance(arguments, str) else _text(arguments)


def _json_at(text: str, at: int) -> tuple[object, int]:
    """The JSON value at `at` and its end; `(None, len(text))` if there is none."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)
    return value, end


def _text(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False, default=str)


def _end_of(pattern: re.Pattern[str], text: str, at: int = 0) -> int:
    match = pattern.match(text, at)
    return match.end() if match is not None else at


# FROM llm.leaked: Tool calls that a model wrote into its answer because its server did not recognise them.
#
# They count only where tools were offered and no real call came, and only if the block is whole, ends the text,
# stands
# outside code, and every call in it names an offered tool and has an object of arguments; else the text stays as it
# is.
# A form without a marker of its own (bare JSON, a call in Python) counts only if it is the whole answer and fits the
# tool's schema.


_MOST_STARTS = 20
"""After so many places that looked like a call and were none, all that follows is text."""

_SMALL_CHARS = 1000
"""A block up to this size is examined with each piece that comes, a larger one whenever its size has doubled."""

_LINE_CHARS = 1000
"""How much of a line is kept to tell whether it is code or a quotation."""

_CANDIDATE = re.compile(r"[<\[]")
_LEAKED_TOKENS = (*STARTS, *END_TOKENS)
_PREFIXES = frozenset(token[:length] for token in _LEAKED_TOKENS for length in range(1, len(token)))
_LONGEST = max(map(len, _LEAKED_TOKENS))
_ENDING = re.compile(rf"(?:(?:{'|'.join(map(re.escape, END_TOKENS))})\s*)+")
_RECIPIENT = "to="
"""What a call in Harmony begins with, where the server has taken the tokens before it."""

_TAG_ALONE = re.compile(r"<[^<>]*(?:>[ \t]*(?:\n|\Z)|\Z)")
_LEAKED_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
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
            if self._starts_left > 0 and (text.startswith(_LEAKED_TOKENS, at) or _is_prefix(text, at)):
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
        match = _LEAKED_FENCE.match(self._line)
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
    except InvalidArguments:
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
        except InvalidArguments:
            return ()
    return tuple(calls)
