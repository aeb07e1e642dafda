"""Commands about the tools of the session."""

from __future__ import annotations

from collections.abc import Mapping

from crow.agent.commands.desk import Desk, Handler
from crow.domain.errors import ArgumentError
from crow.tools import ServerStatus

__all__ = ["TOOL_COMMANDS"]


async def mcp(desk: Desk, argument: str) -> str:
    toolbox = await desk.toolbox()
    servers = toolbox.servers()
    if not servers:
        return "This session has no MCP servers. The editor can give some, or `[mcp_servers.NAME]` in config.toml."
    verb, _, name = argument.partition(" ")
    name = name.strip()
    if verb == "restart":
        names = [server.name for server in servers]
        if name and name not in names:
            raise ArgumentError(f"There is no MCP server {name}. There are: {', '.join(names)}.")
        started = await toolbox.restart(name or None)
        done = f"Started again: {', '.join(started)}.\n\n" if started else "All MCP servers are ready already.\n\n"
        return done + listing(toolbox.servers())
    if argument:
        raise ArgumentError(f"/mcp does not know {argument}. Type /mcp, /mcp restart, or /mcp restart NAME.")
    return listing(servers)


def listing(servers: tuple[ServerStatus, ...]) -> str:
    """The servers and how they are, in Markdown."""
    return "\n".join(f"- **{server.name}**: {state_of(server)}" for server in servers)


def state_of(server: ServerStatus) -> str:
    if server.state == "ready":
        return f"ready, {server.tools} tool{'s' * (server.tools != 1)}"
    if not server.detail:
        return server.state
    return f"failed: {server.detail}" if server.state == "failed" else f"starting again, having failed: {server.detail}"


TOOL_COMMANDS: Mapping[str, Handler] = {"mcp": mcp}
