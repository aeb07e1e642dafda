"""The forms in which models write tool calls when nobody reads them for them: text in, names and arguments out.

Strategy: a block is a row of calls with brackets (opening and closing tokens of the formats) between them, read from
left to right; what opens a call tells which reader it gets. JSON is read by a JSON decoder and not by its closing tag,
since tags may stand within its strings. Whatever is not read to its end is no call. Pure; knows no tools but the schema
that says which written values are texts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

from crow.domain.messages import JsonObject

__all__ = ["STARTS", "Found", "read_bare", "read_marked"]

Found: TypeAlias = list[tuple[str, str]]
"""Names and arguments (JSON text), in order."""

SchemaOf: TypeAlias = Callable[[str], JsonObject | None]
"""The schema of the offered tool that a name means, None if there is none."""

# What a model writes is hostile: no expression here may take more than linear time. Hence the possessive quantifiers.
_DECODER = json.JSONDecoder(strict=False)
_MOST_CALLS = 100
_MOST_PYTHON = 50_000
"""Python reads longer texts too, with hundreds of times the memory."""

_WRAPS = (
    r"<(?:seed:|minimax:|longcat_)?tool_calls?>|<function_calls?>|<｜DSML｜(?:function|tool)_calls>|<TOOLCALL>"
    r"|<\|tool_calls?\|>|<\|python_(?:tag|start)\|>|<\|START_ACTION\|>|<\|action_start\|>\s*<\|plugin\|>"
    r"|<\|tools_prefix\|>|<\|tool_calls_section_begin\|>|<｜tool[▁_]calls[▁_]begin｜>|\[TOOL_CALLS\]"
)
STARTS = re.compile(
    rf"{_WRAPS}|<function=|<(?:｜DSML｜|antml:)?invoke name=|<\|tool_call_begin\|>|<｜tool[▁_]call[▁_]begin｜>"
    r"|(?:<\|start\|>assistant\s*)?(?:<\|channel\|>(?:commentary|analysis) |\bto=[\w.-]+<\|channel\|>)"
    r"|<start_function_call>"
)
"""Where a block may begin."""

_BRACKETS = re.compile(
    rf"(?:\s|[,;]|{_WRAPS}|</(?:seed:|minimax:|longcat_)?tool_calls?>|</function_calls?>|</｜DSML｜(?:function|tool)_calls>"
    r"|</TOOLCALL>|<\|/tool_calls?\|>|<\|python_end\|>|<\|END_ACTION\|>|<\|action_end\|>|<\|tools_suffix\|>|\[/TOOL_CALLS\]"
    r"|<\|tool_calls_section_end\|>|<｜tool[▁_]calls[▁_]end｜>|<｜end[▁_]of[▁_]sentence｜>|</s>|<eos>|<end_of_turn>"
    r"|<\|(?:im_end|eot_id|eom_id|end_of_text|endoftext|observation|user|END_OF_TURN_TOKEN|call|end)\|>)+"
)
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
_BARE_ARGUMENTS = frozenset({"arguments", "parameters", "function"})
_BARE_KEYS = _BARE_ARGUMENTS | {"name", "type", "id"}


def read_marked(block: str, schema_of: SchemaOf) -> Found:
    """The calls of a block that begins with a marker, none if anything in it is something else."""
    found: Found = []
    at = 0
    opened = ""
    while at < len(block) and len(found) < _MOST_CALLS:
        brackets = _BRACKETS.match(block, at)
        if brackets is not None:
            opened, at = brackets.group(), brackets.end()
            continue
        read = _one(block, at, schema_of, is_listed="function_calls>" in opened or "<|python_" in opened)
        if read is None:
            return []
        calls, at = read
        found.extend(calls)
    return found if at >= len(block) else []


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
