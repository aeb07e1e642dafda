"""The tools of a session: opened when they are first needed, offered to the model, closed with the session."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from crow.agent.compaction.budget import CompactionPolicy, limits_for
from crow.agent.compaction.window import MIN_ROOM
from crow.agent.sessions.conversation import Conversation
from crow.agent.subagents.kinds import Speciality
from crow.agent.subagents.tool_subset import ToolSubset
from crow.agent.turns.adapters import WaitableToolbox
from crow.agent.turns.factory import TurnFactory, Worker
from crow.domain.errors import CrowError
from crow.domain.events import CommandsChanged
from crow.domain.messages import ToolSpec
from crow.domain.tokens import estimate_tools
from crow.tools import Ports, ServerStatus, Toolbox
from crow.tools.servers import McpServer, ServerPrompt

_MAX_TOOL_SHARE = 3
"""In a tiny context window, tools are dropped if they take more than the compaction threshold divided by this."""


class Toolset:
    """The session's tools. They are opened when they are first needed, in a task of their own.

    That task is a child of the session's task and not of a turn: the tools outlive the turn, so a turn's cancel scope
    must not enclose them.

    The tools are first closed. `run` makes them open (`_toolbox` is set) or failed (`_failure` is set); if they are
    failed, the next call of `toolbox` makes `run` try again. `close` ends `run` in each of these states.
    """

    def __init__(
        self, conversation: Conversation, servers: Sequence[McpServer], ports: Ports, wanted: anyio.Event
    ) -> None:
        """`wanted` is set when the tools are needed for the first time; `run` is called then."""
        self._conversation = conversation
        self._servers = servers
        self._ports = ports
        self._wanted = wanted
        self._opened = anyio.Event()
        """Set when the tools are open or could not be opened."""
        self._retry = anyio.Event()
        """Makes `run` try again, or return if the tools are closed."""
        self._changed = anyio.Event()
        """Set when a server may offer other prompts than before."""
        self._scope = anyio.CancelScope()
        """Cancelling it closes the open tools."""
        self._is_closed = False
        self._toolbox: WaitableToolbox | None = None
        self._failure: Exception | None = None
        self._reported: dict[int, tuple[bool, int]] = {}
        """Maps the index of each server to what the user was told: whether the server has failed, and how often its
        connection was lost."""

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the servers offer now."""
        return self._toolbox.prompts() if self._toolbox is not None else ()

    async def run(self) -> None:
        """Open the tools, wait for `close`, then close them. If opening them fails, `toolbox` raises an error, and its
        next call tries again: the system may only have been out of file descriptors or disk space."""
        conversation = self._conversation
        while not self._is_closed:
            try:
                await conversation.adapters.load()
                async with conversation.adapters.open_toolbox(
                    conversation.workspace, self._ports, self._servers, on_change=self._on_change
                ) as self._toolbox:
                    self._opened.set()
                    with self._scope:
                        await self._publish_commands()
            except Exception as error:
                if self._toolbox is not None:
                    raise
                self._failure = error
            finally:
                self._opened.set()
            await self._retry.wait()
            self._retry = anyio.Event()

    def close(self) -> None:
        """Make `run` close the tools and return."""
        self._is_closed = True
        self._scope.cancel()
        self._retry.set()

    async def toolbox(self) -> WaitableToolbox:
        """Return the open tools. :raises ~crow.domain.errors.CrowError: they could not be opened."""
        if self._failure is not None and not self._is_closed:
            self._failure, self._opened = None, anyio.Event()
            self._retry.set()
        if not self._opened.is_set():
            self._wanted.set()
            await self._opened.wait()
        if self._toolbox is None:
            raise CrowError(f"The tools of this session could not be opened: {self._failure}")
        return self._toolbox

    async def report_failures(self, servers: Sequence[ServerStatus]) -> None:
        """Tell the user about each failure of a server once, even if the server has recovered meanwhile."""
        for index, server in enumerate(servers):
            was_failed, losses = self._reported.get(index, (False, 0))
            is_failed = server.state == "failed" or (server.state == "starting" and was_failed)
            self._reported[index] = (is_failed, server.losses)
            if server.state == "failed" and not (was_failed and losses == server.losses):
                await self._conversation.report(f"MCP server {server.name} is not available", server.detail)
            elif server.state != "failed" and losses < server.losses:
                restarted = "was restarted" if server.state == "ready" else "is being restarted"
                await self._conversation.report(f"MCP server {server.name} stopped and {restarted}", server.loss)

    async def _on_change(self) -> None:
        self._changed.set()

    async def _publish_commands(self) -> None:
        """Tell the client whenever the prompts of the servers change. A slow client does not delay the servers, because
        they only set an event."""
        known: tuple[ServerPrompt, ...] = ()
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            if self.prompts != known:
                known = self.prompts
                await self._conversation.branch.publish(CommandsChanged())


class ToolOffer:
    """Decides which of the session's tools the model has, and tells the model."""

    def __init__(
        self, conversation: Conversation, tools: Toolset, factory: TurnFactory, worker: Worker, kind: Speciality
    ) -> None:
        self._conversation = conversation
        self._tools = tools
        self._factory = factory
        self._worker = worker
        self._kind = kind
        self._late: set[int] = set()
        """The indexes of the servers that were still starting when the turn began."""
        self._told_window = 0
        """The context window, in tokens, that the user was told is too small for the tools. 0 if the tools fit."""
        self._measured: tuple[tuple[ToolSpec, ...], int] = ((), 0)
        """The tools that were offered last, and their tokens. Most turns have the same tools as the turn before."""

    async def begin(self, toolbox: Toolbox) -> Toolbox:
        """Offer the tools with which a turn begins. Tell the user which servers have failed."""
        await self._tools.report_failures(toolbox.servers())
        self._late = {index for index, one in enumerate(toolbox.servers()) if one.state == "starting"}
        return await self._offer(toolbox)

    async def find_late(self) -> Toolbox | None:
        """Offer the tools of servers that were still starting when the turn began, and are ready now."""
        if not self._late:
            return None
        toolbox = await self._tools.toolbox()
        servers = toolbox.servers()
        settled = {index for index in self._late if servers[index].state != "starting"}
        if not settled:
            return None
        self._late -= settled
        await self._tools.report_failures(servers)
        ready = [servers[index] for index in sorted(settled) if servers[index].state == "ready"]
        if not ready:
            return None
        offered = await self._offer(toolbox)
        for server in ready:
            count = f"{server.tools} tool{'s' * (server.tools != 1)}"
            joined = f"The model can use {count} of it now."
            await self._conversation.report(f"MCP server {server.name} is ready", joined, severity="info")
        return offered

    async def _offer(self, toolbox: Toolbox) -> Toolbox:
        """Tell the model which tools it has now, and return the toolbox with these tools."""
        if self._kind.tools is not None:
            toolbox = ToolSubset(toolbox, self._kind.specs((*toolbox.specs(), *toolbox.deferred())))
        toolbox = await self._fitting(toolbox)
        await self._factory.offer(self._worker, toolbox)
        return toolbox

    async def _fitting(self, toolbox: Toolbox) -> Toolbox:
        """Return `toolbox`, or one without tools if they leave too little of the model's window for a conversation. In
        that case, tell the user."""
        model = self._worker.branch.row.model
        info = self._conversation.adapters.info(model)
        specs = toolbox.specs()
        if specs != self._measured[0]:
            self._measured = (specs, estimate_tools(specs))
        tokens, window = self._measured[1], self._conversation.window.cautious_tokens(info)
        limits = limits_for(window, info.max_output_tokens, tokens, CompactionPolicy())
        if not limits.is_tiny or tokens < limits.threshold // _MAX_TOOL_SHARE:
            self._told_window = 0
            return toolbox
        if self._told_window != window:
            self._told_window = window
            needed = -(-(tokens + MIN_ROOM) * 4 // 3 // 1_000) * 1_000
            await self._conversation.report(
                f"{model} gets no tools: its context window is too small",
                f"The window has {window:,} tokens, of which the tools would take about {tokens:,}. You can chat, but "
                f"the model cannot read files or run commands. Tools need a window of about {needed:,} tokens: start "
                "the model's server with a larger one, raise context_window if you set it, or choose another model.",
            )
        return ToolSubset(toolbox, ())
