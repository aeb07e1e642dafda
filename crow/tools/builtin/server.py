"""The in-process MCP server that offers the built-in tools.

Calls of built-in tools use MCP like all other calls: MCP carries the name, the arguments, progress messages with the
output so far, cancellation, and whether the call failed. MCP has no fields for the rest, such as the plan, the diff and
the skill. Because client and server share a process, they exchange these through a shared table of notes: the client
adds a note about the call, the message carries the number of the note in `_meta`, and the server writes the outcome
into the note.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

import mcp_types as mcp
from mcp.client import Client
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from crow.domain.errors import ArgumentError
from crow.tools import OnOutput, Outcome, PlannedCall, Ports
from crow.tools.builtin import TOOLS, with_name
from crow.tools.builtin.tool import ToolContext, ToolInvocation, describe_error

_NOTE = "crow/note"
"""The member of `_meta` that names the note of a call."""

# The listing omits descriptions and schemas: the toolbox takes them from SPECS, and crow validates the arguments.
_LISTING = mcp.ListToolsResult(tools=[mcp.Tool(name=name, input_schema={"type": "object"}) for name in TOOLS])


@dataclass(slots=True, kw_only=True)
class _Note:
    """The data of one call that client and server exchange without messages."""

    call_id: str
    planned: PlannedCall | None
    """The call as it was allowed. None if it was not planned."""
    outcome: Outcome | None = None
    """None until the server has run the call."""


_Notes = dict[int, _Note]


class BuiltinClient:
    """Calls the built-in tools through their server. Use `open`."""

    def __init__(self, client: Client, notes: _Notes) -> None:
        self._client = client
        self._notes = notes
        self._numbers = count()

    @classmethod
    @asynccontextmanager
    async def open(cls, context: ToolContext, ports: Ports) -> AsyncIterator[BuiltinClient]:
        """Serve the built-in tools of one session."""
        notes: _Notes = {}
        async with Client(_build_server(context, ports, notes), cache=None, raise_exceptions=True) as client:
            await client.list_tools()  # tells the client that no tool has an output schema, so it validates no result
            yield cls(client, notes)

    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        call_id: str,
        on_output: OnOutput,
        planned: PlannedCall | None,
    ) -> Outcome:
        """Run a tool. `arguments` are valid. `planned` is the call as it was allowed."""

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001
            await on_output(message or "")

        number = next(self._numbers)
        self._notes[number] = note = _Note(call_id=call_id, planned=planned)
        meta = cast(mcp.RequestParamsMeta, {_NOTE: number})
        try:
            await self._client.call_tool(name, arguments, progress_callback=on_progress, meta=meta)
        except MCPError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # a bug in crow: the MCP library wrapped its exception
            raise
        finally:
            del self._notes[number]
        assert note.outcome is not None
        return note.outcome


def _build_server(context: ToolContext, ports: Ports, notes: Mapping[int, _Note]) -> Server[Any]:
    """Return an MCP server with the built-in tools, for one session."""

    async def list_tools(
        _request: ServerRequestContext[Any], _params: mcp.PaginatedRequestParams | None
    ) -> mcp.ListToolsResult:
        return _LISTING

    async def call_tool(request: ServerRequestContext[Any], params: mcp.CallToolRequestParams) -> mcp.CallToolResult:
        async def on_output(text: str) -> None:
            await request.session.report_progress(float(len(text)), message=text)

        meta: Mapping[str, Any] = request.meta or {}
        note = notes.get(meta[_NOTE])
        if note is None:  # cancelled before it began
            return mcp.CallToolResult(content=[], is_error=True)
        invocation = ToolInvocation(
            context=context, ports=ports, call_id=note.call_id, on_output=on_output, planned=note.planned
        )
        try:
            outcome = await TOOLS[params.name].run(invocation, params.arguments or {})
        except (ArgumentError, OSError) as error:
            outcome = Outcome(text=with_name(params.name, describe_error(error)), is_error=True)
        is_followed = note.planned is not None and note.planned.is_followed
        if not is_followed and (checked := await context.checks.run(context.workspace, invocation.excluded)).text:
            raw = {**outcome.raw_output, "checks": list(checked.ran)}
            outcome = replace(outcome, text=f"{outcome.text}\n{checked.text}", raw_output=raw)
        note.outcome = outcome
        return mcp.CallToolResult(content=[], is_error=outcome.is_error)

    return Server("crow", on_list_tools=list_tools, on_call_tool=call_tool)
