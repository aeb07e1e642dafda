"""The built-in tools and the in-process MCP server that offers them.

Calls of built-in tools use MCP like all other calls. Data for which MCP has no field (the call's id, the diff, the
plan) is sent in `_meta`. Progress messages carry the output so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, replace
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
from crow.tools.builtin.session import RECALL, TASK, UPDATE_PLAN
from crow.tools.builtin.shell import SHELL, SHELL_KILL, SHELL_OUTPUT
from crow.tools.builtin.skill import SKILL
from crow.tools.builtin.tool import Builtin, ToolContext, ToolInvocation, check, describe_error, parse_call

__all__ = ["SPECS", "arguments_of", "build_server", "from_result", "meta_for", "plan", "slot_for"]

META = "crow"
CALL_ID = "crow/call_id"
PATH = "crow/path"
ARGUMENT = "crow/argument"
EXCLUDED = "crow/excluded"

TOOLS: Mapping[str, Builtin] = {
    tool.spec.name: tool
    for tool in (
        *(READ_FILE, WRITE_FILE, EDIT_FILE, LIST_FILES, GREP, SHELL, SHELL_OUTPUT, SHELL_KILL, FETCH),
        *(UPDATE_PLAN, RECALL, SKILL, TASK),
    )
}

SPECS: tuple[ToolSpec, ...] = tuple(tool.spec for tool in TOOLS.values())
"""The built-in tools in their order."""

# The listing omits descriptions and schemas: the toolbox takes them from SPECS, and `check` checks the calls.
LISTING = mcp.ListToolsResult(tools=[mcp.Tool(name=name, input_schema={"type": "object"}) for name in TOOLS])


async def plan(call: ToolCall, context: ToolContext) -> PlannedCall:
    """Plan a call of a built-in tool without running it. The result for an invalid call has a `fault`."""
    tool = TOOLS[call.name]
    try:
        planned = await tool.plan(context, arguments_of(call))
        return planned if planned.fault is None else replace(planned, fault=with_name(call.name, planned.fault))
    except (ArgumentError, OSError) as error:
        fault = describe_error(error) if call.fault is not None else with_name(call.name, describe_error(error))
    announcement = Announcement(title=call.name, kind=tool.kind)
    return PlannedCall(announcement=announcement, access=tool.access, fault=fault, is_barrier=tool.access == "write")


def meta_for(call_id: str, planned: PlannedCall | None = None) -> mcp.RequestParamsMeta:
    """The `_meta` of a request: the call's id, and the path, argument and exclusions of the planned call that was
    allowed."""
    path = planned.rule_paths[0] if planned is not None and planned.rule_paths else None
    argument = planned.argument if planned is not None else None
    excluded = list(planned.excluded_paths) if planned is not None else []
    return cast(mcp.RequestParamsMeta, {CALL_ID: call_id, PATH: path, ARGUMENT: argument, EXCLUDED: excluded})


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """The checked arguments of a call. :raises ~crow.domain.errors.ArgumentError: they are missing or wrong."""
    spec = TOOLS[call.name].spec
    return check(call.name, spec.input_schema, parse_call(call, spec))


def slot_for(name: str, arguments: Mapping[str, Any], context: ToolContext) -> AbstractAsyncContextManager[None]:
    """Waits until a call may run. Background commands do not wait: their number is limited for each session."""
    limiter = TOOLS[name].limiter
    if limiter is None or arguments.get("background", False):
        return nullcontext()
    return limiter.slot(context.workspace)


def build_server(context: ToolContext, ports: Ports) -> Server[Any]:
    """An MCP server with the built-in tools, for one session."""

    async def list_tools(
        _request: ServerRequestContext[Any], _params: mcp.PaginatedRequestParams | None
    ) -> mcp.ListToolsResult:
        return LISTING

    async def call_tool(request: ServerRequestContext[Any], params: mcp.CallToolRequestParams) -> mcp.CallToolResult:
        async def on_output(text: str) -> None:
            await request.session.report_progress(float(len(text)), message=text)

        meta: Mapping[str, Any] = request.meta or {}
        invocation = ToolInvocation(
            context=context,
            ports=ports,
            call_id=meta.get(CALL_ID, ""),
            on_output=on_output,
            allowed_path=meta.get(PATH),
            allowed_argument=meta.get(ARGUMENT),
            excluded_paths=tuple(meta.get(EXCLUDED, ())),
        )
        try:
            outcome = await TOOLS[params.name].run(invocation, params.arguments or {})
        except (ArgumentError, OSError) as error:
            outcome = Outcome(text=with_name(params.name, describe_error(error)), is_error=True)
        return to_result(outcome)

    return Server("crow", on_list_tools=list_tools, on_call_tool=call_tool)


def with_name(tool: str, message: str) -> str:
    """The message with the tool's name before it. Messages of `check` and `parse` already begin with the name."""
    return message if message.startswith(f"{tool}: ") else f"{tool}: {message}"


def to_result(outcome: Outcome) -> mcp.CallToolResult:
    """An outcome as an MCP result. `_meta["crow"]` has its `announcement`, `plan`, `raw_output` and `skill`."""
    fields = asdict(outcome)
    meta = {name: fields[name] for name in ("announcement", "plan", "raw_output", "skill")}
    images = [mcp.ImageContent(data=image.data, mime_type=image.mime_type) for image in outcome.images]
    return mcp.CallToolResult(
        content=[mcp.TextContent(text=outcome.text), *images], is_error=outcome.is_error, _meta={META: meta}
    )


def from_result(result: mcp.CallToolResult) -> Outcome:
    """The outcome in a result of the built-in server: the inverse of `to_result`."""
    block, *images = result.content
    assert isinstance(block, mcp.TextContent)
    meta: Mapping[str, Any] = (result.meta or {})[META]
    announcement, plan, skill = meta["announcement"], meta["plan"], meta["skill"]
    return Outcome(
        text=block.text,
        is_error=result.is_error,
        announcement=None if announcement is None else announcement_from(announcement),
        plan=None if plan is None else tuple(PlanItem(**item) for item in plan),
        raw_output=meta["raw_output"],
        images=tuple(Image(data=each.data, mime_type=each.mime_type) for each in images if each.type == "image"),
        skill=None if skill is None else tuple(skill),
    )


def announcement_from(fields: Mapping[str, Any]) -> Announcement:
    locations = tuple(Location(**location) for location in fields["locations"])
    return Announcement(**{**fields, "locations": locations, "diffs": tuple(Diff(**diff) for diff in fields["diffs"])})
