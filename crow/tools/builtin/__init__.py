"""The built-in tools, and the in-process MCP server that offers them.

Strategy: schemas are built once. A call crosses MCP as any other would; what MCP has no field for (the call's id, the
announcement with the diff, the plan) travels in `_meta` under `crow`, in the shape that `to_result` writes and
`from_result` reads. Progress messages carry the output so far. Knows no other server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import mcp_types as mcp
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server

from crow.domain.entries import Announcement, Diff, Location, PlanItem
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image, ToolCall, ToolSpec
from crow.tools import Outcome, PlannedCall, Ports
from crow.tools.builtin.edit import EDIT_FILE
from crow.tools.builtin.fetch import FETCH
from crow.tools.builtin.files import READ_FILE, WRITE_FILE
from crow.tools.builtin.search import GREP, LIST_FILES
from crow.tools.builtin.session import RECALL, UPDATE_PLAN
from crow.tools.builtin.shell import SHELL, SHELL_KILL, SHELL_OUTPUT
from crow.tools.builtin.skill import SKILL
from crow.tools.builtin.task import TASK
from crow.tools.builtin.tool import Builtin, ToolContext, ToolInvocation, check, parse, system_words, with_expectation

__all__ = ["SPECS", "arguments_of", "build_server", "from_result", "meta_for", "offer"]

META = "crow"
CALL_ID = "crow/call_id"
PLACE = "crow/place"
ALLOWED = "crow/allowed"

TOOLS: Mapping[str, Builtin] = {
    tool.spec.name: tool
    for tool in (
        *(READ_FILE, WRITE_FILE, EDIT_FILE, LIST_FILES, GREP, SHELL, SHELL_OUTPUT, SHELL_KILL, FETCH),
        *(UPDATE_PLAN, RECALL, SKILL, TASK),
    )
}

SPECS: tuple[ToolSpec, ...] = tuple(tool.spec for tool in TOOLS.values())
"""The built-in tools in their order."""

# No descriptions and schemas: the toolbox has SPECS, calls are checked by `check`, and every session's client asks.
LISTING = mcp.ListToolsResult(tools=[mcp.Tool(name=spec.name, input_schema={"type": "object"}) for spec in SPECS])


async def offer(call: ToolCall, around: ToolContext) -> PlannedCall:
    """Look at a call of a built-in tool; a bad one has its fault in the offer."""
    tool = TOOLS[call.name]
    try:
        return await tool.look(around, arguments_of(call))
    except ArgumentError as error:
        fault = named(call.name, str(error)) if call.fault is None else with_expectation(call.fault, tool.spec)
    except OSError as error:
        fault = system_words(call.name, error)
    announcement = Announcement(title=call.name, kind=tool.kind)
    return PlannedCall(announcement=announcement, access=tool.access, fault=fault, is_barrier=tool.is_barrier)


def meta_for(call_id: str, judged: PlannedCall | None = None) -> mcp.RequestParamsMeta:
    """What a request to the built-in server carries in `_meta`: the id that the ports are told, and of the offer that
    was allowed the file that it touches and its argument."""
    place = judged.paths[0] if judged is not None and judged.paths else None
    allowed = judged.argument if judged is not None else None
    return cast(mcp.RequestParamsMeta, {CALL_ID: call_id, PLACE: place, ALLOWED: allowed})


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """The checked arguments of a built-in call. :raises ~crow.domain.errors.ArgumentError: they cannot be used."""
    spec = TOOLS[call.name].spec
    if call.fault is not None:
        raise ArgumentError(with_expectation(call.fault, spec))
    try:
        given = parse(call.name, call.arguments)
    except ArgumentError as error:
        raise ArgumentError(with_expectation(f"{error}.", spec)) from None
    return check(call.name, spec.input_schema, given)


def build_server(around: ToolContext, ports: Ports) -> Server[Any]:
    """An MCP server with the built-in tools, for one session."""

    async def list_tools(
        _context: ServerRequestContext[Any], _params: mcp.PaginatedRequestParams | None
    ) -> mcp.ListToolsResult:
        return LISTING

    async def call_tool(context: ServerRequestContext[Any], params: mcp.CallToolRequestParams) -> mcp.CallToolResult:
        async def on_output(text: str) -> None:
            await context.session.report_progress(float(len(text)), message=text)

        meta: Mapping[str, Any] = context.meta or {}
        running = ToolInvocation(
            around=around,
            log=ports.log,
            plan=ports.plan,
            call_id=meta.get(CALL_ID, ""),
            on_output=on_output,
            place=meta.get(PLACE),
            allowed=meta.get(ALLOWED),
        )
        return to_result(await run(params.name, params.arguments or {}, running))

    return Server("crow", on_list_tools=list_tools, on_call_tool=call_tool)


async def run(name: str, arguments: Mapping[str, Any], running: ToolInvocation) -> Outcome:
    """Run a call; what cannot be done is an error outcome."""
    tool = TOOLS.get(name)
    if tool is None:
        return Outcome(text=f"No built-in tool {name}.", is_error=True)
    try:
        return await tool.run(running, check(name, tool.spec.input_schema, arguments))
    except ArgumentError as error:
        return Outcome(text=named(name, str(error)), is_error=True)
    except OSError as error:
        return Outcome(text=system_words(name, error), is_error=True)


def named(tool: str, words: str) -> str:
    """The words of an error, beginning with the tool's name; those of the workspace do not."""
    return words if words.startswith(f"{tool}: ") else f"{tool}: {words}"


def to_result(outcome: Outcome) -> mcp.CallToolResult:
    """An outcome as MCP carries it. `_meta["crow"]` holds `announcement` and `plan` (null if there is none) with the
    fields of their classes, `raw_output` and `skill`."""
    meta = {
        "announcement": None if outcome.announcement is None else asdict(outcome.announcement),
        "plan": None if outcome.plan is None else [asdict(item) for item in outcome.plan],
        "raw_output": dict(outcome.raw_output),
        "skill": outcome.skill,
    }
    images = [mcp.ImageContent(data=image.data, mime_type=image.mime_type) for image in outcome.images]
    return mcp.CallToolResult(
        content=[mcp.TextContent(text=outcome.text), *images], is_error=outcome.is_error, _meta={META: meta}
    )


def from_result(result: mcp.CallToolResult) -> Outcome:
    """The outcome in a result of the built-in server."""
    block, *images = result.content
    assert isinstance(block, mcp.TextContent)
    meta: Mapping[str, Any] = (result.meta or {})[META]
    plan = meta["plan"]
    return Outcome(
        text=block.text,
        is_error=result.is_error,
        announcement=announcement_from(meta["announcement"]),
        plan=None if plan is None else tuple(PlanItem(**item) for item in plan),
        raw_output=meta["raw_output"],
        images=tuple(
            Image(data=image.data, mime_type=image.mime_type) for image in images if isinstance(image, mcp.ImageContent)
        ),
        skill=None if meta["skill"] is None else tuple(meta["skill"]),
    )


def announcement_from(fields: Mapping[str, Any] | None) -> Announcement | None:
    if fields is None:
        return None
    return Announcement(
        title=fields["title"],
        kind=fields["kind"],
        locations=tuple(Location(**location) for location in fields["locations"]),
        diffs=tuple(Diff(**diff) for diff in fields["diffs"]),
    )
