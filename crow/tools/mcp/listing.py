"""The tools that a server lists, as the user lets them be offered and the model gets them.

Strategy: all pages within a bound, the first of two with one name, none that the user does not want. Knows a client,
and no connection.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import anyio
import mcp_types as mcp
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client import Client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from crow.domain.messages import ToolSpec
from crow.tools import ServerOptions

__all__ = [
    "ExternalTool",
    "filter_invalid_tools",
    "listed",
    "prefixes",
    "prompt_names",
    "schema_fault",
    "tool_fault",
    "tool_names",
]

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


# FROM tools.mcp_sieve: What a server lists as its tools, before the library judges the list as a whole.
#
# Strategy: a transport around a transport. Of a `tools/list` result, each tool is judged alone: one that the library,
# or
# a provider that gets its schema, would refuse is left out and named, so that it costs its server nothing else. All
# other
# messages pass untouched.


DEEPEST = 32
SCHEMA_CHARS = 50_000
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


@asynccontextmanager
async def filter_invalid_tools(
    transport: AbstractAsyncContextManager[Any], on_dropped: Callable[[str, str], None]
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], Any]]:
    """`transport` with faulty tools left out of every listing; `on_dropped` is told their names and faults."""
    failure: Exception | None = None
    async with transport as (incoming, outgoing):
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)

        async def pump() -> None:
            async with to_client:
                async for message in incoming:
                    if isinstance(message, SessionMessage):
                        sift(message, on_dropped)
                    try:
                        await to_client.send(message)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        return  # the client is gone

        async with from_server, anyio.create_task_group() as tasks:
            tasks.start_soon(pump)
            try:
                yield from_server, outgoing
            except Exception as error:  # noqa: BLE001 - raised below, outside the task group that would wrap it
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def sift(message: SessionMessage, on_dropped: Callable[[str, str], None]) -> None:
    """Leave the faulty tools out of a listing; any other message stays as it is."""
    answer = message.message
    if not isinstance(answer, mcp.JSONRPCResponse) or not isinstance(answer.result, dict):
        return
    tools = answer.result.get("tools")
    if not isinstance(tools, list):
        return
    kept = []
    for tool in tools:
        fault = tool_fault(tool)
        if fault is None:
            kept.append(tool)
        else:
            name = tool.get("name") if isinstance(tool, dict) else None
            on_dropped(str(name), fault)
    answer.result["tools"] = kept


def tool_fault(tool: object) -> str | None:
    """Why a listed tool cannot be offered, None if it can. A missing or odd root type of its schema is mended."""
    if not isinstance(tool, dict):
        return "it is no object"
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict):
        return "it has no inputSchema"
    if schema.get("type") != "object":
        tool["inputSchema"] = schema = {**schema, "type": "object"}
    if not isinstance(tool.get("outputSchema", {}), dict):
        del tool["outputSchema"]
    fault = schema_fault(schema)
    if fault is not None:
        return f"its inputSchema is no JSON Schema: {fault}"
    size = len(json.dumps(schema, ensure_ascii=False))
    if size > SCHEMA_CHARS:
        return (
            f"its inputSchema has {size:,} characters, more than {SCHEMA_CHARS:,}, and would fill the model's context"
        )
    try:
        mcp.Tool.model_validate(tool, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None


def schema_fault(schema: object, where: str = "", depth: int = 0) -> str | None:
    """What is wrong with a JSON Schema, as far as providers refuse a request for it; None if nothing is."""
    at = where or "the schema"
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"{at} is no object"
    if depth > DEEPEST:
        return f"{at} is nested too deeply"
    kinds = schema.get("type", "object")
    if not all(isinstance(kind, str) and kind in TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
        return f"{at} has a type that does not exist"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"{at} has a required that is no list of names"
    if not isinstance(schema.get("enum", []), list):
        return f"{at} has an enum that is no list"
    for inner, place in inner_schemas(schema, where):
        fault = schema_fault(inner, place, depth + 1)
        if fault is not None:
            return fault
    return None


def inner_schemas(schema: Mapping[str, Any], where: str) -> list[tuple[object, str]]:
    """The schemas within a schema, with their places; a container of the wrong kind stands for itself."""
    found: list[tuple[object, str]] = []
    for key in SCHEMA_MAPS:
        inside = schema.get(key, {})
        if isinstance(inside, Mapping):
            found += [(inner, f"{where}/{name}") for name, inner in inside.items()]
        else:
            found.append((None, f"{where}/{key}"))
    for key in SCHEMA_LISTS:
        inside = schema.get(key, [])
        if isinstance(inside, list):
            found += [(inner, f"{where}/{key}") for inner in inside]
        else:
            found.append((None, f"{where}/{key}"))
    items = schema.get("items", True)
    found += [(inner, f"{where}/items") for inner in (items if isinstance(items, list) else [items])]
    return found


# FROM tools.mcp_names: Names of external tools as the model sees them, and of prompts as the user types them: valid,
# unique, and the same
# for the same server list.
#
# Strategy: `server__tool`, `server:prompt`. A server's prefix holds no double underscore and does not end in one, so
# no
# two servers can meet; what had to be bent or shortened gets a hash where it would otherwise meet another. Pure.


NAME_CHARS = 64
PREFIX_CHARS = 30
HASH_CHARS = 8


def prefixes(servers: Sequence[str]) -> tuple[str, ...]:
    """One prefix for each server name, unique, in order; two servers of one name are told apart by their place."""
    taken: list[str] = []
    for place, server in enumerate(servers):
        plain = re.sub(r"_+", "_", bent(server)).strip("_")[:PREFIX_CHARS].rstrip("_")
        if not plain or plain in taken:
            plain = f"{plain or 'server'}-{short_hash(server, str(place))}"
        taken.append(plain)
    return tuple(taken)


def tool_names(prefix: str, tools: Sequence[str]) -> tuple[str, ...]:
    """The name of each tool of a server, in order; `tools` has no name twice."""
    return _joined(prefix, "__", tools)


def prompt_names(prefix: str, prompts: Sequence[str]) -> tuple[str, ...]:
    """The name of each prompt of a server, in order; `prompts` has no name twice."""
    return _joined(prefix, ":", prompts)


def _joined(prefix: str, joint: str, given: Sequence[str]) -> tuple[str, ...]:
    plain = [bent(one) for one in given]
    alike = Counter(plain)
    wholes = [f"{prefix}{joint}{name}" for name in plain]
    is_plain = [
        bool(name) and len(whole) <= NAME_CHARS and (name == one or alike[name] == 1)
        for one, name, whole in zip(given, plain, wholes, strict=True)
    ]
    taken = {whole for whole, stays in zip(wholes, is_plain, strict=True) if stays}
    names = []
    for one, whole, stays in zip(given, wholes, is_plain, strict=True):
        salt, name = 0, whole
        while not stays and (name in taken or name == whole):  # one may be named as another's hash would name it
            name = f"{whole[: NAME_CHARS - HASH_CHARS - 1]}-{short_hash(prefix, one, *[str(salt)] * (salt > 0))}"
            salt += 1
        taken.add(name)
        names.append(name)
    return tuple(names)


def bent(name: str) -> str:
    """`name` with only the characters that a model's tool name may have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:HASH_CHARS]
