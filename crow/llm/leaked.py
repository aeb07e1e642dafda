"""Tool calls that a model wrote into its answer because its server did not recognise them.

Strategy: only where tools were offered and no real call came, and only if the block is whole, ends the text, stands
outside code, and every call in it names an offered tool and has an object of arguments; else the text stays as it is.
One reader per known form. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from crow.domain.messages import JsonObject, ToolCall, ToolSpec
from crow.llm.arguments import Fault, json_text, read_arguments
from crow.llm.calls import tool_name

__all__ = ["recovered_calls"]

_DECODER = json.JSONDecoder(strict=False)
_MOST_STARTS = 20

_Found: TypeAlias = list[tuple[str, str]]
"""Names and arguments (JSON text), in order."""

_STARTS = re.compile(
    r"<tool_call>|<function=|<function_calls>|<minimax:tool_call>|<invoke name=|\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|<｜tool▁calls▁begin｜>|<\|tool_calls_section_begin\|>|(?:<\|start\|>assistant)?<\|channel\|>commentary to="
)
_JSON_BLOCK = re.compile(r"\s*<tool_call>\s*(\{.*?\})\s*</tool_call>\s*", re.DOTALL)
_TAG_BLOCK = re.compile(r"\s*(?:<tool_call>\s*)?<function=([^>\s]+)>(.*?)</function>\s*(?:</tool_call>\s*)?", re.DOTALL)
_TAG_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_KEY_BLOCK = re.compile(r"\s*<tool_call>\s*([\w.:-]+)\s*(.*?)</tool_call>\s*", re.DOTALL)
_KEY_PARAMETER = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_INVOKE_WRAP = re.compile(r"\A\s*<(function_calls|minimax:tool_call)>(.*)</\1>\s*\Z", re.DOTALL)
_INVOKE_BLOCK = re.compile(r"\s*<invoke name=[\"']?([^\"'>]+)[\"']?>(.*?)</invoke>\s*", re.DOTALL)
_INVOKE_PARAMETER = re.compile(r"\s*<parameter name=[\"']?([^\"'>]+)[\"']?>(.*?)</parameter>\s*", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_DEEPSEEK_WRAP = re.compile(
    r"\A\s*<｜tool▁calls▁begin｜>(.*)<｜tool▁calls▁end｜>(?:<｜end▁of▁sentence｜>)?\s*\Z", re.DOTALL
)
_DEEPSEEK_BLOCK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^<\n]+?)(?:<｜tool▁sep｜>|\n)(.*?)<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)
_KIMI_WRAP = re.compile(
    r"\A\s*<\|tool_calls_section_begin\|>(.*)<\|tool_calls_section_end\|>(?:<\|im_end\|>)?\s*\Z", re.DOTALL
)
_KIMI_BLOCK = re.compile(
    r"\s*<\|tool_call_begin\|>\s*([^<\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)
_HARMONY_BLOCK = re.compile(
    r"\s*(?:<\|start\|>assistant)?<\|channel\|>commentary to=([\w.-]+)\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
    r"(.*?)(?:<\|call\|>|\Z)\s*",
    re.DOTALL,
)


def recovered_calls(
    text: str, tools: Mapping[str, ToolSpec], *, mint: Callable[[], str]
) -> tuple[str, tuple[ToolCall, ...]]:
    """`(text without the block, its calls)`, or `text` as it is and no calls."""
    for count, start in enumerate(_STARTS.finditer(text)):
        if count >= _MOST_STARTS:
            break
        before, block = text[: start.start()], text[start.start() :]
        if _is_spoken_of(before, block):
            continue
        for found in (
            *(reader(block) for reader in _READERS),
            *(reader(block, tools) for reader in _TYPED_READERS),
        ):
            calls = _calls(found, tools, mint)
            if calls:
                return before.rstrip(), calls
    return text, ()


def _calls(found: _Found, tools: Mapping[str, ToolSpec], mint: Callable[[], str]) -> tuple[ToolCall, ...]:
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


def _is_spoken_of(before: str, block: str) -> bool:
    """Whether the block is quoted or explained: inside a fence, beside a backtick, or in the middle of a line."""
    line = before[before.rfind("\n") + 1 :]
    if before.count("```") % 2 == 1 or "`" in line or line.startswith((">", "    ")):
        return True
    # Special tokens are not written by accident; tags in the middle of a line are.
    return bool(line.strip()) and block.startswith("<") and not block.startswith(("<|", "<｜"))


def _blocks(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]] | None:
    """The matches of `pattern` if they make up the whole of `text`."""
    matches: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None or match.end() == at:
            return None
        matches.append(match)
        at = match.end()
    return iter(matches) if matches else None


def _named_object(value: object) -> tuple[str, str] | None:
    """`{"name": ..., "arguments" or "parameters": ...}` as name and arguments."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _decoded(text: str) -> object:
    try:
        value: object = _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return None
    return value


def _json_tags(block: str) -> _Found:
    found = [_named_object(_decoded(match.group(1))) for match in _blocks(_JSON_BLOCK, block) or ()]
    return [each for each in found if each is not None] if all(found) else []


def _function_tags(block: str, tools: Mapping[str, ToolSpec]) -> _Found:
    return _tagged(_TAG_BLOCK, _TAG_PARAMETER, block, tools)


def _key_tags(block: str, tools: Mapping[str, ToolSpec]) -> _Found:
    return _tagged(_KEY_BLOCK, _KEY_PARAMETER, block, tools)


def _invoke_tags(block: str, tools: Mapping[str, ToolSpec]) -> _Found:
    wrap = _INVOKE_WRAP.match(block)
    return _tagged(_INVOKE_BLOCK, _INVOKE_PARAMETER, wrap.group(2) if wrap else block, tools)


def _tagged(pattern: re.Pattern[str], parameter: re.Pattern[str], text: str, tools: Mapping[str, ToolSpec]) -> _Found:
    found: _Found = []
    for match in _blocks(pattern, text) or ():
        name, body = match.group(1).strip(), match.group(2)
        tool = tools.get(tool_name(name, tools))
        members: dict[str, object] = {}
        parameters = _blocks(parameter, body)
        if parameters is None and body.strip():
            return []
        for each in parameters or ():
            key = each.group(1).strip()
            members[key] = _typed(each.group(2), key, tool.input_schema if tool is not None else {})
        found.append((name, json.dumps(members, ensure_ascii=False)))
    return found


def _typed(text: str, key: str, schema: JsonObject) -> object:
    """A value written without quotes: a string where the schema says so, else what it is as JSON."""
    properties = schema.get("properties")
    member = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(member, Mapping) or member.get("type") == "string":
        return text
    value = _decoded(text)
    return text if value is None else value


def _mistral(block: str) -> _Found:
    if not block.startswith("[TOOL_CALLS]"):
        return []
    body = block.removeprefix("[TOOL_CALLS]").strip()
    listed = _decoded(body)
    if isinstance(listed, list):
        named = [_named_object(each) for each in listed]
        return [each for each in named if each is not None] if all(named) else []
    found: _Found = []
    at = 0
    while at < len(body):
        match = _MISTRAL_NAMED.match(body, at)
        if match is None:
            return []
        try:
            value, at = _DECODER.raw_decode(body, match.end())
        except (ValueError, RecursionError):
            return []
        found.append((match.group(1), json.dumps(value, ensure_ascii=False)))
    return found


def _llama(block: str) -> _Found:
    if not block.startswith("<|python_tag|>"):
        return []
    body = re.sub(r"<\|(?:eom_id|eot_id)\|>\s*\Z", "", block.removeprefix("<|python_tag|>"))
    named = [_named_object(_decoded(part)) for part in body.split(";\n")]
    return [each for each in named if each is not None] if all(named) else []


def _deepseek(block: str) -> _Found:
    wrap = _DEEPSEEK_WRAP.match(block)
    return _pairs(_DEEPSEEK_BLOCK, wrap.group(1)) if wrap else []


def _kimi(block: str) -> _Found:
    wrap = _KIMI_WRAP.match(block)
    return _pairs(_KIMI_BLOCK, wrap.group(1)) if wrap else []


def _harmony(block: str) -> _Found:
    return _pairs(_HARMONY_BLOCK, block)


def _pairs(pattern: re.Pattern[str], text: str) -> _Found:
    return [(match.group(1).strip(), match.group(2)) for match in _blocks(pattern, text) or ()]


_READERS: tuple[Callable[[str], _Found], ...] = (_json_tags, _mistral, _llama, _deepseek, _kimi, _harmony)
_TYPED_READERS: tuple[Callable[[str, Mapping[str, ToolSpec]], _Found], ...] = (_function_tags, _key_tags, _invoke_tags)
