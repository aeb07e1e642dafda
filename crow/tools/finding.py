"""`find_tools` and `call_tool`: tools that are too many to be offered one by one.

Strategy: offered only beyond a bound on external tools. What is found is told with its schema, and called by its name
through `call_tool`, which stands for that tool in everything: looks, rules, permissions. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolCall, ToolSpec
from crow.tools.builtin.arguments import check, parse

__all__ = ["CALL_TOOL", "FIND_TOOLS", "call_within", "found_text", "query_of"]

MOST_FOUND = 10
SCHEMA_CHARS = 4_000

FIND_TOOLS = ToolSpec(
    name="find_tools",
    description=(
        "Search the tools that are there but not offered by themselves, by words of their names and descriptions. "
        "call_tool calls them."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "query": {
                "type": "string",
                "minLength": 1,
                "maxLength": 300,
                "description": "What the tool should do or be named.",
            }
        },
        "required": ["query"],
    },
)

CALL_TOOL = ToolSpec(
    name="call_tool",
    description="Call a tool that find_tools has found.",
    input_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "The tool's name, exactly."},
            "arguments": {"type": "object", "description": "Its arguments, as its schema says."},
        },
        "required": ["name"],
    },
)


def query_of(call: ToolCall) -> str:
    """What is looked for. :raises ~crow.domain.errors.ArgumentError: nothing."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    query: str = check(call.name, FIND_TOOLS.input_schema, parse(call.name, call.arguments))["query"]
    return query


def call_within(call: ToolCall) -> ToolCall:
    """The call that a `call_tool` call stands for. :raises ~crow.domain.errors.ArgumentError: it names none."""
    if call.fault is not None:
        raise ArgumentError(call.fault)
    given = parse(call.name, call.arguments)
    name, arguments = given.get("name"), given.get("arguments") or {}
    if not isinstance(name, str) or not name:
        raise ArgumentError("call_tool: name is missing; expected the name of a tool that find_tools has found")
    if "__" not in name:
        raise ArgumentError(f"call_tool: {name} is no tool of an MCP server; call it by itself")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=call.id, name=name, arguments=text)


def found_text(query: str, specs: Sequence[ToolSpec]) -> str:
    """The tools that fit the query best, with their schemas."""
    words = [word for word in re.split(r"[^a-z0-9]+", query.lower()) if word]
    scored = [(fit(words, spec), -place, spec) for place, spec in enumerate(specs)]
    best = sorted((found for found in scored if found[0] > 0), key=lambda found: found[:2], reverse=True)
    if not best:
        servers = sorted({spec.name.partition("__")[0] for spec in specs})
        return f'None of {len(specs)} tools fits "{query}". They are of these servers: {", ".join(servers)}.'
    blocks = [
        f"{spec.name}: {spec.description}\n{json.dumps(spec.input_schema, ensure_ascii=False)[:SCHEMA_CHARS]}"
        for _, _, spec in best[:MOST_FOUND]
    ]
    more = f"\n[{len(best) - MOST_FOUND} more fit; narrow the query]" if len(best) > MOST_FOUND else ""
    return "\n\n".join(blocks) + more


def fit(words: Sequence[str], spec: ToolSpec) -> int:
    """How well a tool fits: a word in the name counts for more than one in the description."""
    name, description = spec.name.lower(), spec.description.lower()
    return sum(3 * (word in name) + (word in description) for word in words)
