"""What a server lists as its tools, before the library judges the list as a whole.

Strategy: a transport around a transport. Of a `tools/list` result, each tool is judged alone: one that the library, or
a provider that gets its schema, would refuse is left out and named, so that it costs its server nothing else. All other
messages pass untouched.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import mcp_types as mcp
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

__all__ = ["schema_fault", "sifted", "tool_fault"]

DEEPEST = 32
SCHEMA_CHARS = 50_000
TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


@asynccontextmanager
async def sifted(
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
