"""All tools of one session behind one MCP client: the built-in server in this process, the others beside it.

Strategy: `open_toolbox` enters the built-in client in the session's task and gives every external server a task of its
own; none is waited for, and closing waits for none longer than half a second. Names lead to servers: built-in ones
are plain, external ones carry their server's prefix, so that nothing can stand in for a built-in tool. Looking at a
call asks no server.
"""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from mcp.client import Client
from mcp.shared.exceptions import MCPError

from crow.domain.entries import Announcement
from crow.domain.errors import ArgumentError
from crow.domain.messages import ToolCall, ToolSpec
from crow.tools import Log, McpServer, Offer, OnOutput, Outcome, Plan, ServerStatus, Workspace, builtin
from crow.tools.builtin.arguments import parse_foreign
from crow.tools.mcp_connection import Connection, ExternalTool, OnChange
from crow.tools.mcp_names import prefixes

__all__ = ["McpToolbox", "open_toolbox"]

CALL_TIMEOUT_S = 600.0
CLOSE_S = 0.5
BUILTIN_NAMES = frozenset(spec.name for spec in builtin.SPECS)


class McpToolbox:
    """The :class:`crow.tools.Toolbox` of a session. Made by :func:`open_toolbox`."""

    def __init__(self, workspace: Workspace, client: Client, connections: Sequence[Connection]) -> None:
        self._workspace = workspace
        self._client = client
        self._connections = tuple(connections)

    def specs(self) -> tuple[ToolSpec, ...]:
        """See :meth:`crow.tools.Toolbox.specs`; only of servers that are ready."""
        ready = (connection for connection in self._connections if connection.status.state == "ready")
        return builtin.SPECS + tuple(tool.spec for connection in ready for tool in connection.tools)

    def servers(self) -> tuple[ServerStatus, ...]:
        """See :meth:`crow.tools.Toolbox.servers`."""
        return tuple(connection.status for connection in self._connections)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every server is ready or has failed, at most `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            for connection in self._connections:
                await connection.settled.wait()

    async def offer(self, call: ToolCall) -> Offer:
        """See :meth:`crow.tools.Toolbox.offer`."""
        if call.name in BUILTIN_NAMES:
            return await builtin.offer(call, self._workspace)
        found = await self._find(call.name)
        title = call.name if found is None else f"{found[0].name}: {found[1].title}"
        return Offer(announcement=Announcement(title=title), access="external", fault=self._fault(call, found))

    async def run(self, call: ToolCall, call_id: str, on_output: OnOutput) -> Outcome:
        """See :meth:`crow.tools.Toolbox.run`."""
        if call.name in BUILTIN_NAMES:
            return await self._run_builtin(call, call_id, on_output)
        found = await self._find(call.name)
        fault = self._fault(call, found)
        if found is None or fault is not None:
            return Outcome(text=fault or "", is_error=True)
        connection, tool = found
        return await connection.call(tool, parse_foreign(call.name, call.arguments), on_output)

    async def _run_builtin(self, call: ToolCall, call_id: str, on_output: OnOutput) -> Outcome:
        async def progressed(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001
            await on_output(message or "")

        try:
            arguments = builtin.arguments_of(call)
        except ArgumentError as error:
            return Outcome(text=str(error), is_error=True)
        try:
            result = await self._client.call_tool(
                call.name, arguments, progress_callback=progressed, meta=builtin.meta_for(call_id)
            )
        except MCPError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None  # a bug of ours, which MCP has wrapped
            raise
        return builtin.from_result(result)

    async def _find(self, name: str) -> tuple[Connection, ExternalTool] | None:
        """The server and tool of a name; one whose server is still starting is waited for."""
        for connection in self._connections:
            if name.startswith(f"{connection.prefix}__"):
                await connection.settled.wait()
                for tool in connection.tools:
                    if tool.spec.name == name:
                        return connection, tool
        return None

    def _fault(self, call: ToolCall, found: tuple[Connection, ExternalTool] | None) -> str | None:
        if call.fault is not None:
            return call.fault
        if found is None:
            return self._unknown(call.name)
        if found[0].status.state == "failed":
            return f"MCP server {found[0].name} is not available: {found[0].status.detail}"
        try:
            parse_foreign(call.name, call.arguments)
        except ArgumentError as error:
            return str(error)
        return None

    def _unknown(self, name: str) -> str:
        for connection in self._connections:
            if name.startswith(f"{connection.prefix}__") and connection.status.state == "failed":
                return f'No tool "{name}": MCP server {connection.name} is not available: {connection.status.detail}'
        names = [spec.name for spec in self.specs()]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f'No tool "{name}".{hint} There are: {", ".join(names)}.'


@asynccontextmanager
async def open_toolbox(
    workspace: Workspace,
    log: Log,
    plan: Plan,
    servers: Sequence[McpServer],
    *,
    start_timeout_s: float = 10.0,
    call_timeout_s: float = CALL_TIMEOUT_S,
    on_change: OnChange | None = None,
) -> AsyncIterator[McpToolbox]:
    """The tools of a session. Enter and leave it in the session's task; leaving takes less than a second.

    The servers start in the background, each with `start_timeout_s` to answer; see `McpToolbox.servers` for how they
    fare and `on_change` to hear of it. A call of an external tool may take `call_timeout_s`.
    """
    names = prefixes([server.name for server in servers])
    connections = [
        Connection(
            server,
            prefix=prefix,
            cwd=workspace.cwd,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
            on_change=on_change,
        )
        for server, prefix in zip(servers, names, strict=True)
    ]
    server = builtin.build_server(workspace, log, plan)
    failure: Exception | None = None
    async with Client(server, cache=None, raise_exceptions=True) as client:
        await client.list_tools()  # the client learns here that results need no validation
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.serve)
            try:
                yield McpToolbox(workspace, client, connections)
            except Exception as error:  # noqa: BLE001 - raised below, outside the task groups that would wrap it
                failure = error
            finally:
                for connection in connections:
                    connection.stop()
                tasks.cancel_scope.deadline = anyio.current_time() + CLOSE_S
    if failure is not None:
        raise failure
