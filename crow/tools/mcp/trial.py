"""Tries one MCP server: starts it, reads its listings, and measures the time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from mcp.client import Client
from mcp.shared.exceptions import MCPError

from crow import tools
from crow.domain.text import on_one_line
from crow.tools.mcp.calls import describe_error
from crow.tools.mcp.client import ToolSettings, keys_with_tokens
from crow.tools.mcp.connection import ServerConnection, ServerSetup
from crow.tools.mcp.listing import pages
from crow.tools.mcp.logins import LoginFolder
from crow.tools.mcp.names import prefixes
from crow.tools.servers import McpServer, ServerListing, ServerReport

_CLOSE_S = 2.0


async def try_server(server: McpServer, workspace: tools.Workspace, settings: ToolSettings) -> ServerReport:
    """Start the server, read all its listings, and stop it. Failures are part of the report."""
    logins = LoginFolder(settings.login_folder, settings.on_secrets) if settings.login_folder is not None else None
    keys = settings.keys if logins is None else lambda: keys_with_tokens(settings.keys, logins)
    setup = ServerSetup(
        server=server,
        prefix=prefixes([server.name])[0],
        workspace=workspace,
        keys=keys,
        start_timeout_s=server.options.start_timeout_s or settings.start_timeout_s,
        call_timeout_s=server.options.call_timeout_s or settings.call_timeout_s,
        places=settings.server_places,
        logins=logins,
        asker=settings.asker,
    )
    connection = ServerConnection(setup)
    began = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connection.serve)
        await connection.settled.wait()
        started_s, client = time.monotonic() - began, connection.client
        if client is None:
            report = ServerReport(name=server.name, seconds=started_s, problem=connection.failure)
        else:
            report = await _inspect(connection, client, started_s)
        connection.stop()
        tasks.cancel_scope.deadline = anyio.current_time() + _CLOSE_S
    return report


async def _inspect(connection: ServerConnection, client: Client, started_s: float) -> ServerReport:
    """Read all listings of a server that has started."""
    able = client.server_capabilities
    listings = [await _listing("tools", client.list_tools, "tools", "name")]
    if able.prompts is not None:
        listings.append(await _listing("prompts", client.list_prompts, "prompts", "name"))
    if able.resources is not None:
        listings.append(await _listing("resources", client.list_resources, "resources", "uri"))
        fetch = client.list_resource_templates
        listings.append(await _listing("resource templates", fetch, "resource_templates", "uri_template"))
    info = client.server_info
    return ServerReport(
        name=connection.name,
        seconds=started_s,
        implementation="" if info is None else on_one_line(f"{info.name} {info.version}").strip(),
        protocol=str(client.protocol_version),
        listings=listings,
        offered=[tool.spec.name for tool in connection.offers.tools],
        faults=[f"{name}: {fault}" for name, fault in connection.offers.left_out.items()],
    )


async def _listing(kind: str, fetch: Callable[..., Awaitable[Any]], key: str, name: str) -> ServerListing:
    """Read all pages of a listing. `key` is the attribute of a page that holds the entries. `name` is the attribute of
    an entry that holds the entry's name."""
    began = time.monotonic()
    names: list[str] = []
    problem = ""
    try:
        async for page in pages(fetch):
            names += (on_one_line(str(getattr(entry, name))) for entry in getattr(page, key))
    except (MCPError, TimeoutError, RuntimeError, ValueError) as error:
        problem = describe_error(error)
    return ServerListing(kind=kind, names=names, seconds=time.monotonic() - began, problem=problem)
