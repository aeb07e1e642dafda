"""An external MCP server as the tools use it: sends calls and other requests over the server's connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import anyio
import mcp_types as mcp
from mcp.client import Client
from mcp.shared.exceptions import MCPError

from crow.domain.entries import Announcement, CallKind
from crow.domain.errors import ToolServerError
from crow.domain.messages import Part
from crow.domain.rendering import in_title
from crow.domain.text import on_one_line
from crow.domain.trace_context import current_trace_context
from crow.tools import OnOutput, Outcome, ServerStatus
from crow.tools.limits import FairLimiter
from crow.tools.mcp.calls import describe_error, encodable, outcome_of, parts_of, report_progress
from crow.tools.mcp.connection import ServerConnection
from crow.tools.mcp.listing import ExternalTool, is_offered, matches, output_fault
from crow.tools.mcp.resources import completions_of, outcome_of_resource
from crow.tools.mcp.sampling import RunningCall
from crow.tools.servers import ServerPrompt

_MAX_CALLS = 32
"""At most this many calls of one server run at once. Further calls wait in order."""

_READ_RESOURCE = "read_resource"
"""The user can put this name into the settings for a server, like the name of a tool. It stands for reading
resources."""


class ExternalServer:
    """Sends requests to one server. A request to a failed server starts it again."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        self.name = connection.name
        self.prefix = connection.setup.prefix
        self._slots = FairLimiter(_MAX_CALLS)

    @property
    def status(self) -> ServerStatus:
        """The state of the server now."""
        resources = len(self.connection.offers.resources) if self.offers_resources else 0
        return replace(self.connection.status(), resources=resources)

    @property
    def offers_resources(self) -> bool:
        """Whether the server is ready and has resources that may be read."""
        return self.connection.is_ready and bool(self.connection.offers.resources) and self.may_be_read

    @property
    def may_be_read(self) -> bool:
        """Whether the user's settings let the model read resources of this server."""
        return is_offered(_READ_RESOURCE, self.connection.setup.server.options)

    @property
    def is_reading_read_only(self) -> bool:
        """Whether the user's settings declare that reading resources of this server changes nothing."""
        return matches(_READ_RESOURCE, self.connection.setup.server.options.read_only)

    def announce(self, subject: str, kind: CallKind = "other") -> Announcement:
        """Return the announcement that tells the user about a call."""
        return Announcement(title=self.connection.setup.keys().mask(f"{self.name}: {in_title(subject)}"), kind=kind)

    async def call(
        self, tool: ExternalTool, arguments: Mapping[str, Any], on_output: OnOutput, call_id: str = ""
    ) -> Outcome:
        """Call a tool. A failure is returned as an outcome that names the server."""

        async def send(client: Client) -> Outcome:
            progress = report_progress(on_output)
            result = await client.call_tool(tool.name, dict(arguments), progress_callback=progress, meta=_trace_meta())
            if (fault := output_fault(tool, result)) is not None:
                raise ToolServerError(
                    f"the structured content of the result does not fit the tool's output schema: {fault}"
                )
            return outcome_of(result)

        running = RunningCall.of(call_id, tool.spec.name, arguments, self.announce(tool.title))
        return await self._run(running, tool.name, send)

    async def read_resource(self, uri: str, call_id: str = "") -> Outcome:
        """Read a resource. A failure is returned as an outcome that names the server."""

        async def send(client: Client) -> Outcome:
            return outcome_of_resource(uri, await client.read_resource(uri, meta=_trace_meta()))

        arguments = {"server": self.prefix, "uri": uri}
        running = RunningCall.of(call_id, _READ_RESOURCE, arguments, self.announce(uri, "read"))
        return await self._run(running, on_one_line(uri), send)

    async def complete(self, template: str, variable: str, value: str) -> Outcome:
        """Ask the server for values of a variable of a template. A failure is returned as an outcome that names the
        server."""

        async def send(client: Client) -> Outcome:
            if client.server_capabilities.completions is None:
                return self._failure("suggests no values for templates; fill in the template without it")
            ref = mcp.ResourceTemplateReference(uri=template)
            result = await client.complete(ref, {"name": variable, "value": value})
            return Outcome(text=encodable(completions_of(result, variable)))

        running = RunningCall.of("", _READ_RESOURCE, {}, self.announce(template, "read"))
        return await self._run(running, on_one_line(template), send)

    async def _run(self, running: RunningCall, what: str, send: Callable[[Client], Awaitable[Outcome]]) -> Outcome:
        """Send a request as soon as a slot is free. `what` is the name of the requested tool or resource for error
        messages. A failure is returned as an outcome."""
        await self.connection.available()
        async with self._slots.slot():
            client = self.connection.client
            if client is None:
                return self._failure(f"is not available: {self.connection.failure or 'it was stopped'}")
            with self.connection.questions.running(running):
                try:
                    return await send(client)
                except MCPError as error:
                    return self._failure(self._describe_refusal(what, error))
                except Exception as error:  # noqa: BLE001 - the library may raise any error for a bad answer
                    return self._failure(f"returned an unusable result for {what}: {describe_error(error)}")

    async def list_prompts(self) -> tuple[ServerPrompt, ...]:
        """Wait until the server has started and listed its prompts, and return them."""
        if not await self.connection.available():
            return ()
        with anyio.move_on_after(self.connection.setup.start_timeout_s):
            await self.connection.offers.prompts_known.wait()
        return tuple(self.connection.offers.prompts)

    async def fill_prompt(self, prompt: ServerPrompt, arguments: Mapping[str, str]) -> tuple[Part, ...]:
        """See :meth:`crow.tools.servers.ServerPrompts.fill`."""
        client, prompts = self.connection.client, self.connection.offers.prompts
        if client is None:
            reason = self.connection.failure or "it was stopped"
            raise ToolServerError(f"MCP server {self.name} is not available: {reason}")
        failed = f"`/{prompt.name}` could not be used: MCP server {self.name}"
        if prompt not in prompts:
            raise ToolServerError(f"{failed} no longer has this prompt.")
        try:
            filled = await client.get_prompt(prompts[prompt], dict(arguments), meta=_trace_meta())
        except Exception as error:  # the library may raise any error for a bad answer
            self._notice_loss(error)
            raise ToolServerError(f"{failed} did not return the prompt: {describe_error(error)}") from error
        if not (parts := parts_of(filled)):
            raise ToolServerError(f"{failed} returned an empty prompt.")
        return parts

    def _failure(self, words: str) -> Outcome:
        return Outcome(text=f"MCP server {self.name} {words}", is_error=True)

    def _notice_loss(self, error: Exception) -> None:
        """If this error of a request shows that the server is gone, let the connection end and start again."""
        if isinstance(error, MCPError) and (
            error.code == mcp.CONNECTION_CLOSED or error.message == "Session terminated"
        ):
            self.connection.lose(describe_error(error))

    def _describe_refusal(self, what: str, error: MCPError) -> str:
        self._notice_loss(error)
        if problem := self.connection.login_problem:
            return f"refused {what}: {problem}"
        if error.code == mcp.REQUEST_TIMEOUT:
            return f"did not answer the call of {what} within {self.connection.setup.call_timeout_s:g} s"
        if error.code == mcp.PARSE_ERROR:
            return f"returned an unreadable result for {what}: {describe_error(error)}"
        if error.code == mcp.CONNECTION_CLOSED:
            return f"ended during {what}: {self.connection.describe_end(error)}"
        return f"refused {what}: {describe_error(error)}"


def _trace_meta() -> mcp.RequestParamsMeta | None:
    """Return the `_meta` of a call, which holds the trace context of the client's prompt; None if there is no trace
    context."""
    return cast("mcp.RequestParamsMeta", current_trace_context()) or None
