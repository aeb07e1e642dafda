"""The tools that a server lists, as the user lets them be offered and the model gets them.

Strategy: all pages within a bound, the first of two with one name, none that the user does not want. Knows a client,
and no connection.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import mcp_types as mcp
from mcp.client import Client

from crow.domain.messages import ToolSpec
from crow.tools import ServerOptions
from crow.tools.mcp_names import tool_names

__all__ = ["ExternalTool", "listed"]

PAGES = 50
MOST_TOOLS = 2_000
DESCRIPTION_CHARS = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTool:
    """A tool of a server: `name` is the server's own, `spec.name` the model's, `title` for people. `weight`: about how
    many characters of a request it takes. `is_read_only`: the user said so, whatever the server says."""

    name: str
    title: str
    spec: ToolSpec
    weight: int
    is_read_only: bool = False


async def listed(client: Client, prefix: str, options: ServerOptions) -> tuple[ExternalTool, ...]:
    """The tools of a server, in its order."""
    tools: dict[str, mcp.Tool] = {}
    cursor: str | None = None
    for _ in range(PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            if is_allowed(tool.name, options.allow, options.deny):
                tools.setdefault(tool.name, tool)
        cursor = page.next_cursor
        if cursor is None or len(tools) >= MOST_TOOLS:
            break
    kept = tuple(tools.values())[:MOST_TOOLS]
    names = tool_names(prefix, [tool.name for tool in kept])
    return tuple(
        external(tool, name, is_read_only=matches(tool.name, options.read_only))
        for tool, name in zip(kept, names, strict=True)
    )


def is_allowed(tool: str, allow: Sequence[str], deny: Sequence[str]) -> bool:
    """Whether the user lets a tool be offered."""
    return (not allow or matches(tool, allow)) and not matches(tool, deny)


def matches(tool: str, patterns: Sequence[str]) -> bool:
    """Whether one of the globs matches the name."""
    return any(fnmatchcase(tool, pattern) for pattern in patterns)


def external(tool: mcp.Tool, name: str, *, is_read_only: bool = False) -> ExternalTool:
    """A tool as the model gets it; providers want an object with properties even where there is no argument."""
    schema = {"properties": {}, **tool.input_schema, "type": "object"}
    description = (tool.description or tool.title or tool.name)[:DESCRIPTION_CHARS]
    title = tool.title or (tool.annotations.title if tool.annotations else None) or tool.name
    return ExternalTool(
        name=tool.name,
        title=title,
        spec=ToolSpec(name=name, description=description, input_schema=schema),
        weight=len(description) + len(json.dumps(schema, ensure_ascii=False)),
        is_read_only=is_read_only,
    )
