"""The in-process MCP server that offers the built-in tools.

Calls of built-in tools use MCP like all other calls. Data for which MCP has no field (the call's id, the diff, the
plan) is sent in `_meta`. Progress messages carry the output so far.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import mcp_types as mcp
from mcp.client import Client
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from crow.domain.entries import Announcement, Attachment, Diff, Location, PlanItem
from crow.domain.errors import ArgumentError
from crow.domain.messages import Image
from crow.tools import NOTHING_EXCLUDED, ExcludedPaths, OnOutput, Outcome, PlannedCall, Ports
from crow.tools.builtin import TOOLS, with_name
from crow.tools.builtin.tool import ToolContext, ToolInvocation, describe_error
from crow.tools.urls import NO_URL_RULES, UrlRules

META = "crow"
CALL_ID = "crow/call_id"
PATHS = "crow/paths"
ARGUMENT = "crow/argument"
EXCLUDED = "crow/excluded"
FOLLOWED = "crow/followed"
URL_RULES = "crow/url_rules"

# The listing omits descriptions and schemas: the toolbox takes them from SPECS, and crow validates the arguments.
LISTING = mcp.ListToolsResult(tools=[mcp.Tool(name=name, input_schema={"type": "object"}) for name in TOOLS])


class BuiltinClient:
    """Calls the built-in tools through their server. Use `open`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, context: ToolContext, ports: Ports) -> AsyncIterator[BuiltinClient]:
        """Serve the built-in tools of one session."""
        async with Client(build_server(context, ports), cache=None, raise_exceptions=True) as client:
            await client.list_tools()  # so the client learns that results need no validation
            yield cls(client)

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

        meta = meta_for(call_id, planned)
        try:
            result = await self._client.call_tool(name, arguments, progress_callback=on_progress, meta=meta)
        except MCPError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # a bug in crow: the MCP library wrapped its exception
            raise
        return from_result(result)


def meta_for(call_id: str, planned: PlannedCall | None = None) -> mcp.RequestParamsMeta:
    """Return the `_meta` of a request. It contains the call's id, and the paths, argument, exclusions and URL rules of
    the planned call that was allowed."""
    paths = planned.paths if planned is not None else ()
    argument = planned.coverage.argument if planned is not None else None
    excluded = asdict(planned.excluded if planned is not None else NOTHING_EXCLUDED)
    url_rules = asdict(planned.url_rules if planned is not None else NO_URL_RULES)
    is_followed = planned is not None and planned.is_followed
    meta: dict[str, object] = {CALL_ID: call_id, PATHS: paths, ARGUMENT: argument, FOLLOWED: is_followed}
    meta |= {EXCLUDED: excluded, URL_RULES: url_rules}
    return cast(mcp.RequestParamsMeta, meta)


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
            allowed_paths=tuple(meta.get(PATHS, ())),
            allowed_argument=meta.get(ARGUMENT),
            excluded=ExcludedPaths(**{name: tuple(paths) for name, paths in meta.get(EXCLUDED, {}).items()}),
            url_rules=UrlRules(**{name: tuple(rules) for name, rules in meta.get(URL_RULES, {}).items()}),
        )
        try:
            outcome = await TOOLS[params.name].run(invocation, params.arguments or {})
        except (ArgumentError, OSError) as error:
            outcome = Outcome(text=with_name(params.name, describe_error(error)), is_error=True)
        if (
            not meta.get(FOLLOWED)
            and (checked := await context.checks.run(context.workspace, invocation.excluded)).text
        ):
            raw = {**outcome.raw_output, "checks": list(checked.ran)}
            outcome = replace(outcome, text=f"{outcome.text}\n{checked.text}", raw_output=raw)
        return to_result(outcome)

    return Server("crow", on_list_tools=list_tools, on_call_tool=call_tool)


def to_result(outcome: Outcome) -> mcp.CallToolResult:
    """Convert an outcome to an MCP result. `_meta["crow"]` has those fields of the outcome for which MCP has none."""
    fields = asdict(outcome)
    meta = {name: fields[name] for name in ("announcement", "plan", "raw_output", "skill", "max_chars")}
    meta["attachments"] = fields["attachments"]
    images = [mcp.ImageContent(data=image.data, mime_type=image.mime_type) for image in outcome.images]
    return mcp.CallToolResult(
        content=[mcp.TextContent(text=outcome.text), *images], is_error=outcome.is_error, _meta={META: meta}
    )


def from_result(result: mcp.CallToolResult) -> Outcome:
    """Convert a result of the built-in server back to an outcome. This is the inverse of `to_result`."""
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
        attachments=tuple(Attachment(**file) for file in meta["attachments"]),
        skill=None if skill is None else tuple(skill),
        max_chars=meta["max_chars"],
    )


def announcement_from(fields: Mapping[str, Any]) -> Announcement:
    locations = tuple(Location(**location) for location in fields["locations"])
    return Announcement(**{**fields, "locations": locations, "diffs": tuple(Diff(**diff) for diff in fields["diffs"])})
