"""Tool calls that a model wrote into its answer because its server did not recognise them.

Strategy: only where tools were offered and no real call came, and only if the block is whole, ends the text, stands
outside code, and every call in it names an offered tool and has an object of arguments; else the text stays as it is.
Where a block may begin is decided here, how it is read in `leaked_forms`. A form without a marker of its own (bare
JSON, a call in Python) counts only if it is the whole answer and fits the tool's schema. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from crow.domain.messages import ToolCall, ToolSpec
from crow.llm.arguments import Fault, fits, json_text, read_arguments
from crow.llm.calls import tool_name
from crow.llm.leaked_forms import STARTS, Found, read_bare, read_marked

__all__ = ["recovered_calls"]

_MOST_STARTS = 20
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_OPEN_CODE = tuple((re.compile(rf"<{tag}\b"), re.compile(rf"</{tag}>")) for tag in ("pre", "code"))
_TURN_TOKENS = ("<|end|>", "<|start|>assistant")
_TAG_ALONE = re.compile(r"<[^<>]+>[ \t]*\n")


def recovered_calls(
    text: str, tools: Mapping[str, ToolSpec], *, mint: Callable[[], str]
) -> tuple[str, tuple[ToolCall, ...]]:
    """`(text without the block, its calls)`, or `text` as it is and no calls."""
    schemas = {name: tool.input_schema for name, tool in tools.items()}
    for count, start in enumerate(STARTS.finditer(text)):
        if count >= _MOST_STARTS:
            break
        before, block = text[: start.start()], text[start.start() :]
        if _is_spoken_of(before, block):
            continue
        calls = _calls(read_marked(block, lambda name: schemas.get(tool_name(name, tools))), tools, mint)
        if calls:
            return _before(before), calls
    bare = read_bare(text)
    if all(_fits_exactly(each, tools) for each in bare):
        calls = _calls(bare, tools, mint)
        if calls:
            return "", calls
    return text, ()


def _before(text: str) -> str:
    """The words before a block, without what only ends them."""
    text = text.rstrip()
    while text.endswith(_TURN_TOKENS):
        for token in _TURN_TOKENS:
            text = text.removesuffix(token).rstrip()
    return text


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


def _is_spoken_of(before: str, block: str) -> bool:
    """Whether the block is quoted or explained: inside code, in a quotation, or in the middle of a line."""
    line = before[before.rfind("\n") + 1 :]
    if "`" in line or line.lstrip().startswith((">", "<!--")) or line.startswith(("    ", "\t")) or _is_in_code(before):
        return True
    # Special tokens are not written by accident, nor is a tag with a line break after it; other tags within a line are.
    is_tag = block.startswith("<") and not block.startswith(("<|", "<｜"))
    return bool(line.strip()) and is_tag and not _TAG_ALONE.match(block)


def _is_in_code(before: str) -> bool:
    """Whether a fence or an element of code is open at the end of `before`."""
    if any(len(opening.findall(before)) > len(closing.findall(before)) for opening, closing in _OPEN_CODE):
        return True
    fence = ""
    for line in before.split("\n"):
        match = _FENCE.match(line)
        if match is None:
            continue
        mark, rest = match.groups()
        if not fence:
            # Backticks after backticks make a line of code and no fence.
            fence = "" if mark[0] == "`" and "`" in rest else mark
        elif mark[0] == fence[0] and len(mark) >= len(fence) and not rest.strip():
            fence = ""
    return bool(fence)
