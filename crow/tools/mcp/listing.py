"""Reads the lists that an MCP server offers, removes invalid items, and gives tools and prompts unique names."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import anyio
import mcp_types as mcp
from anyio.abc import ObjectReceiveStream
from mcp.client import Client
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolSpec
from crow.domain.tokens import estimate_tools
from crow.tools.mcp.calls import describe_error
from crow.tools.mcp.names import checked_uri, unique_names
from crow.tools.mcp.schemas import plain_schema
from crow.tools.mcp.structured import result_fault
from crow.tools.servers import PromptArgument, ServerOptions, ServerPrompt

logger = logging.getLogger(__name__)

_Page = TypeVar("_Page", bound=mcp.PaginatedResult)

_MAX_PAGES = 50
_MAX_TOOLS = 2_000
_MAX_PROMPTS = 100
MAX_RESOURCES = 2_000
MAX_TEMPLATES = 200
_PROMPTS_S = 10.0
_RELIST_S = 1.0
"""The shortest wait between two fetches of a listing that keeps changing, in seconds. Each further wait is twice as
long, up to `_MAX_RELIST_S`."""
_MAX_RELIST_S = 60.0
_PROMPT_DESCRIPTION_CHARS = 200
_DESCRIPTION_CHARS = 8_000
_DEFINITION_CHARS = 8_000
_SCHEMA_CHARS = 50_000
_MAX_DEPTH = 32
_OUTPUT_SCHEMA = "crow/outputSchema"
"""The key in a tool's `_meta` that has the schema of its results. Crow moves the schema there, because the library
would evaluate it: see :mod:`crow.tools.mcp.structured`."""

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_LISTS: Mapping[str, tuple[type[mcp.Resource | mcp.ResourceTemplate], str, int]] = {
    "resources": (mcp.Resource, "uri", MAX_RESOURCES),
    "resourceTemplates": (mcp.ResourceTemplate, "uriTemplate", MAX_TEMPLATES),
}
"""Maps the name of each list in a server's answer to three values: the type of the list's items, the member of an item
that holds its URI, and the maximum number of items to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalTool:
    """A tool of an external server."""

    name: str
    """The server's own name for the tool. The model uses `spec.name`."""
    title: str
    """The name that people see."""
    spec: ToolSpec
    tokens: int
    """The estimated size of the tool in a request."""
    is_read_only: bool = False
    """The user's settings declare the tool read-only."""
    output_schema: Mapping[str, Any] | None = None
    """The schema of the tool's structured results. None if there is none, or it is too long to check."""

    @property
    def fingerprint(self) -> str:
        """A hash of what the user and the model are told about the tool."""
        told = json.dumps([self.title, self.spec.description, self.spec.input_schema], sort_keys=True)
        return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def definition(self) -> str:
        """What the user and the model are told about the tool, as text."""
        schema = json.dumps(self.spec.input_schema, ensure_ascii=False, indent=1, sort_keys=True)
        told = f"{' '.join(self.title.split())}\n{self.spec.description}\n{schema}"[:_DEFINITION_CHARS]
        # a database refuses half a surrogate pair, and PostgreSQL a NUL
        return told.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


async def list_tools(client: Client, prefix: str, options: ServerOptions) -> tuple[ExternalTool, ...]:
    """Return the tools of a server that the user's settings allow, in the server's order."""
    tools: dict[str, mcp.Tool] = {}
    async for page in pages(client.list_tools):
        for tool in page.tools:
            if is_offered(tool.name, options):
                tools.setdefault(tool.name, tool)
        if len(tools) >= _MAX_TOOLS:
            break
    chosen = tuple(tools.values())[:_MAX_TOOLS]
    names = unique_names(prefix, "__", [tool.name for tool in chosen])
    return tuple(external_tool(tool, name, options) for tool, name in zip(chosen, names, strict=True))


async def list_prompts(client: Client, server: str, prefix: str) -> dict[ServerPrompt, str]:
    """Map each prompt of a server to the server's own name for the prompt. The result is empty or incomplete if the
    listing fails."""
    if client.server_capabilities.prompts is None:
        return {}
    found: dict[str, mcp.Prompt] = {}
    try:
        with anyio.fail_after(_PROMPTS_S):
            async for page in pages(client.list_prompts):
                for prompt in page.prompts:
                    found.setdefault(prompt.name, prompt)
    except Exception as error:  # noqa: BLE001 - the server's tools must stay usable, whatever fails here
        logger.warning("MCP server %s did not list its prompts: %s", server, describe_error(error))
    chosen = list(found.values())[:_MAX_PROMPTS]
    names = unique_names(prefix, ":", [prompt.name for prompt in chosen])
    return {_server_prompt(prompt, name, server): prompt.name for prompt, name in zip(chosen, names, strict=True)}


def _server_prompt(prompt: mcp.Prompt, name: str, server: str) -> ServerPrompt:
    required = {argument.name: argument.required is True for argument in prompt.arguments or ()}
    return ServerPrompt(
        name=name,
        server=server,
        description=" ".join((prompt.description or prompt.title or prompt.name).split())[:_PROMPT_DESCRIPTION_CHARS],
        arguments=tuple(PromptArgument(name=name, required=is_required) for name, is_required in required.items()),
    )


async def pages(fetch: Callable[..., Awaitable[_Page]]) -> AsyncIterator[_Page]:
    """Yield the pages of a listing, at most `_MAX_PAGES`. `fetch` asks the server for the page at a cursor, which is
    None for the first page."""
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await fetch(cursor=cursor)
        yield page
        cursor = page.next_cursor
        if cursor is None:
            return


def is_offered(tool: str, options: ServerOptions) -> bool:
    """Return whether the user's settings offer a tool with this name."""
    return (not options.allow or matches(tool, options.allow)) and not matches(tool, options.deny)


def matches(tool: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the globs matches the name."""
    return any(fnmatchcase(tool, pattern) for pattern in patterns)


def external_tool(tool: mcp.Tool, name: str, options: ServerOptions) -> ExternalTool:
    """Convert a listed tool. `name` is the name for the model."""
    # providers require an object schema with properties, even for a tool without arguments
    schema = {"properties": {}, **tool.input_schema, "type": "object"}
    description = (tool.description or tool.title or tool.name)[:_DESCRIPTION_CHARS]
    spec = ToolSpec(name=name, description=description, input_schema=schema)
    return ExternalTool(
        name=tool.name,
        title=tool.title or (tool.annotations.title if tool.annotations else None) or tool.name,
        spec=spec,
        tokens=estimate_tools([spec]),
        is_read_only=matches(tool.name, options.read_only),
        output_schema=(tool.meta or {}).get(_OUTPUT_SCHEMA),
    )


def output_fault(tool: ExternalTool, result: mcp.CallToolResult) -> str | None:
    """Return how a result breaks the schema that the server declared for the tool's results, or None if it does not."""
    if tool.output_schema is None or result.is_error:
        return None
    if result.structured_content is None and "structured_content" not in result.model_fields_set:
        return "there is none"
    return result_fault(tool.output_schema, result.structured_content)


# Changes


class Changes:
    """Records the server's reports that a listing has changed.

    After the first report, the listing may be fetched again at once. If the server keeps sending reports, the wait
    before each fetch grows.
    """

    def __init__(self) -> None:
        self._reported = anyio.Event()
        self._listed_at = -math.inf
        self._wait_s = 0.0

    def report(self) -> None:
        """Record that the listing has changed."""
        self._reported.set()

    async def next(self) -> None:
        """Wait until the listing has changed and may be fetched again."""
        await self._reported.wait()
        since_s = anyio.current_time() - self._listed_at
        self._wait_s = 0.0 if since_s > _MAX_RELIST_S else min(max(_RELIST_S, 2 * self._wait_s), _MAX_RELIST_S)
        await anyio.sleep(max(0.0, self._wait_s - since_s))
        self._reported = anyio.Event()
        self._listed_at = anyio.current_time()


# Invalid tools


@asynccontextmanager
async def filter_invalid_tools(
    transport: AbstractAsyncContextManager[Any],
    server: str,
    on_message: Callable[[], None],
    on_fault: Callable[[str, str], None],
) -> AsyncIterator[tuple[ObjectReceiveStream[SessionMessage | Exception], Any]]:
    """Wrap `transport` so that invalid tools and resources are removed from each listing. `on_message` is called for
    each message of the server. `on_fault` is called for each invalid tool, with the tool's name and a text that says
    what is wrong with it.

    Without this filter, a single invalid tool would make the library refuse the whole listing, or a provider refuse the
    whole request.
    """
    async with transport as (incoming, outgoing):
        yield _ValidTools(incoming, server, on_message, on_fault), outgoing


class _ValidTools(ObjectReceiveStream[SessionMessage | Exception]):
    """The messages of a server, with invalid tools and resources removed from its listings."""

    def __init__(
        self,
        messages: ObjectReceiveStream[SessionMessage | Exception],
        server: str,
        on_message: Callable[[], None],
        on_fault: Callable[[str, str], None],
    ) -> None:
        self._messages = messages
        self._server = server
        self._on_message = on_message
        self._on_fault = on_fault

    async def receive(self) -> SessionMessage | Exception:
        message = await self._messages.receive()
        self._on_message()
        answer = message.message if isinstance(message, SessionMessage) else None
        if isinstance(answer, mcp.JSONRPCResponse) and isinstance(answer.result, dict):
            tools = answer.result.get("tools")
            if isinstance(tools, list):
                answer.result["tools"] = [tool for tool in tools[:_MAX_TOOLS] if self._is_valid(tool)]
                if len(tools) > _MAX_TOOLS:
                    logger.warning("MCP server %s: only %s tools are offered", self._server, f"{_MAX_TOOLS:,}")
            _keep_valid_resources(answer.result, self._server)
        return message

    async def aclose(self) -> None:
        await self._messages.aclose()

    def _is_valid(self, tool: object) -> bool:
        if (fault := tool_fault(tool)) is not None:
            name = tool.get("name") if isinstance(tool, dict) else None
            self._on_fault(str(name), fault)
        return fault is None


def tool_fault(tool: object) -> str | None:
    """Return why a listed tool cannot be offered, or None if it can. Changes the tool's schema so that its root has the
    type `object` and every endpoint accepts it."""
    if not isinstance(tool, dict):
        return "it is not an object"
    schema = tool.get("inputSchema")
    if not isinstance(schema, dict):
        return "it has no inputSchema"
    tool["inputSchema"] = schema = {**schema, "type": "object"}
    _hide_output_schema(tool)
    fault = schema_fault(schema)
    if fault is not None:
        return f"its inputSchema is not a JSON Schema: {fault}"
    size = len(json.dumps(schema, ensure_ascii=False))
    if size > _SCHEMA_CHARS:
        return (
            f"its inputSchema has {size:,} characters, more than {_SCHEMA_CHARS:,}, and would fill the model's context"
        )
    tool["inputSchema"] = plain_schema(schema)
    try:
        mcp.Tool.model_validate(tool, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None


def _hide_output_schema(tool: dict[str, Any]) -> None:
    """Move the schema of a tool's results to `_OUTPUT_SCHEMA` in its `_meta`, where the library does not look. Drop the
    schema if it is too long to check, and everything that the server has put at that key."""
    schema, meta = tool.pop("outputSchema", None), tool.pop("_meta", None)
    kept = {key: value for key, value in meta.items() if key != _OUTPUT_SCHEMA} if isinstance(meta, dict) else {}
    if isinstance(schema, dict) and len(json.dumps(schema, ensure_ascii=False)) <= _SCHEMA_CHARS:
        kept[_OUTPUT_SCHEMA] = schema
    tool["_meta"] = kept


def schema_fault(schema: object, where: str = "the schema", depth: int = 0) -> str | None:
    """Return what is wrong with a JSON Schema, or None if nothing is wrong. Checks only for faults that make providers
    refuse the schema.

    The library `jsonschema` would take forty times as long (4 ms for ten properties), and would block the event loop
    for each tool of a server.
    """
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, Mapping):
        return f"{where} is not an object"
    if depth > _MAX_DEPTH:
        return f"{where} is nested too deeply"
    types, required = schema.get("type", []), schema.get("required", [])
    if not all(isinstance(kind, str) and kind in _TYPES for kind in (types if isinstance(types, list) else [types])):
        return f"{where} has a type that does not exist"
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f'{where} has a "required" that is not a list of names'
    if not isinstance(schema.get("enum", []), list):
        return f'{where} has an "enum" that is not a list'
    faults = (schema_fault(inner, place, depth + 1) for inner, place in _inner_schemas(schema, where))
    return next((fault for fault in faults if fault is not None), None)


def _inner_schemas(schema: Mapping[str, Any], where: str) -> Iterator[tuple[object, str]]:
    """Yield the schemas directly inside a schema, each with its path. If a container of schemas, such as `properties`,
    has the wrong type, yield None in place of its schemas."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key, {})
        named = inner.items() if isinstance(inner, Mapping) else [("", None)]
        yield from ((one, f"{where}/{key}/{name}") for name, one in named)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key, [])
        yield from ((one, f"{where}/{key}") for one in (inner if isinstance(inner, list) else [None]))
    items = schema.get("items", True)
    yield from ((one, f"{where}/items") for one in (items if isinstance(items, list) else [items]))


# Invalid resources


def _keep_valid_resources(result: dict[str, Any], server: str) -> None:
    """Remove invalid and surplus resources from an answer of a server.

    Otherwise the library would refuse a whole listing because of one invalid resource, and would spend seconds on a
    listing with hundreds of thousands of resources.
    """
    for key, (model, uri_key, most) in _LISTS.items():
        listed = result.get(key)
        if not isinstance(listed, list):
            continue
        faults = [_resource_fault(one, model, uri_key) for one in listed[:most]]
        result[key] = [one for one, fault in zip(listed, faults, strict=False) if fault is None]
        left_out = len(listed) - len(result[key])
        if left_out:
            first = next(filter(None, faults), f"there are more than {most:,}")
            logger.warning("MCP server %s: %s of its %s are left out: %s", server, f"{left_out:,}", key, first)


def _resource_fault(one: object, model: type[mcp.Resource | mcp.ResourceTemplate], uri_key: str) -> str | None:
    """Return why a listed resource cannot be offered, or None if it can."""
    if not isinstance(one, dict):
        return "it is not an object"
    try:
        checked_uri(one.get(uri_key))
        model.model_validate(one, by_name=False)
    except ArgumentError as error:
        return str(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None
