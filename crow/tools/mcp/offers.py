"""What an MCP server offers: its tools, prompts and resources, kept up to date while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import anyio
import mcp_types as mcp
from mcp.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import PromptsListChanged, ResourcesListChanged, SubscriptionLost, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from crow.domain.text import on_one_line
from crow.tools.mcp.calls import describe_error
from crow.tools.mcp.listing import Changes, ExternalTool, list_prompts, list_tools
from crow.tools.mcp.resources import ExternalResource, list_resources
from crow.tools.servers import ServerOptions, ServerPrompt

logger = logging.getLogger(__name__)

_LISTEN_AGAIN_S = 1.0
"""The pause before crow listens again after the stream of changes was lost."""
_MAX_LEFT_OUT = 100
_LEFT_OUT_CHARS = 500


class Offers:
    """The listings of one server. They stay as they are when the server ends, until the restarted server lists them
    again.

    `on_change` is called when the tools or prompts have changed.
    """

    def __init__(
        self, server: str, prefix: str, options: ServerOptions, on_change: Callable[[], Awaitable[None]]
    ) -> None:
        self.tools: tuple[ExternalTool, ...] = ()
        self.left_out: dict[str, str] = {}
        """Maps the names of invalid tools of the server to texts that say what is wrong with them."""
        self.prompts: Mapping[ServerPrompt, str] = {}
        """Maps each prompt to the server's own name for it."""
        self.resources: tuple[ExternalResource, ...] = ()
        """The resources and templates."""
        self.prompts_known = anyio.Event()
        """Set when the running server has listed its prompts."""
        self.resources_known = anyio.Event()
        """Set when the running server has listed its resources, and when it has ended."""
        self._server = server
        self._prefix = prefix
        self._options = options
        self._on_change = on_change
        self._tools_changed = Changes()
        self._prompts_changed = Changes()
        self._resources_changed = Changes()

    def note_invalid(self, name: str, fault: str) -> None:
        """Log that a tool of the server is invalid, and why. Do this once for each tool, and for 100 tools at most."""
        name, fault = on_one_line(name[:_LEFT_OUT_CHARS]), on_one_line(fault[:_LEFT_OUT_CHARS])
        if name not in self.left_out and len(self.left_out) < _MAX_LEFT_OUT:
            self.left_out[name] = fault
            logger.warning("MCP server %s: tool %s is left out: %s", self._server, name, fault)

    async def begin(self, client: Client) -> None:
        """List the tools of a server that has just been connected. The other listings come with `follow`."""
        self.tools = await list_tools(client, self._prefix, self._options)
        self.prompts_known, self.resources_known = anyio.Event(), anyio.Event()

    async def follow(self, client: Client) -> None:
        """Keep the listings up to date until cancelled. :raises Exception: the server sent an unusable listing."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_resources, client)
            tasks.start_soon(self._follow_prompts, client)
            tasks.start_soon(self._follow_tools, client)
            if _sends_changes(client):
                tasks.start_soon(self._listen, client)

    def note(self, message: IncomingMessage) -> None:
        """Take a message of the server, which may report that a listing has changed."""
        match message:
            case mcp.ToolListChangedNotification():
                self._tools_changed.report()
            case mcp.PromptListChangedNotification():
                self._prompts_changed.report()
            case mcp.ResourceListChangedNotification():
                self._resources_changed.report()
            case _:
                pass

    async def _follow_tools(self, client: Client) -> None:
        while True:
            await self._tools_changed.next()
            found = await list_tools(client, self._prefix, self._options)
            if found != self.tools:
                self.tools = found
                await self._on_change()

    async def _follow_prompts(self, client: Client) -> None:
        while True:
            found = await list_prompts(client, self._server, self._prefix)
            self.prompts_known.set()
            if found != self.prompts:
                self.prompts = found
                await self._on_change()
            await self._prompts_changed.next()

    async def _follow_resources(self, client: Client) -> None:
        while True:
            self.resources = await list_resources(client, self._server)
            self.resources_known.set()
            await self._resources_changed.next()

    async def _listen(self, client: Client) -> None:
        """Listen for changes of the listings. A server with the newer protocol reports these changes on a separate
        stream."""
        while True:
            try:
                async with client.listen(
                    tools_list_changed=True, prompts_list_changed=True, resources_list_changed=True
                ) as changes:
                    async for change in changes:
                        match change:
                            case ToolsListChanged():
                                self._tools_changed.report()
                            case PromptsListChanged():
                                self._prompts_changed.report()
                            case ResourcesListChanged():
                                self._resources_changed.report()
                            case _:
                                pass
            except SubscriptionLost:
                await anyio.sleep(_LISTEN_AGAIN_S)
                for listing in (self._tools_changed, self._prompts_changed, self._resources_changed):
                    listing.report()  # the listing may have changed while the stream was lost
            except (MCPError, TimeoutError, RuntimeError) as error:
                logger.info(
                    "MCP server %s does not report changes of its listings: %s", self._server, describe_error(error)
                )
                return
            else:
                return


def _sends_changes(client: Client) -> bool:
    """Return whether the server reports changes of its listings on a separate stream, as the newer protocol
    provides."""
    offered = client.server_capabilities
    capabilities = (offered.tools, offered.prompts, offered.resources)
    is_changing = any(listing is not None and listing.list_changed for listing in capabilities)
    return client.protocol_version in MODERN_PROTOCOL_VERSIONS and is_changing
