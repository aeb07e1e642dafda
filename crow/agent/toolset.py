"""The tools of one session: opened when they are first wanted, and closed in the task that opened them.

Strategy: the task of `keep` is a child of the session's own, outside of any turn's scope, because a cancel scope of a
turn must not enclose what outlives the turn. What became of the servers is told to the user once each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from crow.agent import Client, new_message_id
from crow.agent.adapters import Adapters
from crow.agent.branch import Branch
from crow.agent.delegate import SubAgents
from crow.agent.recall import BranchLog
from crow.domain.entries import NewEntry, PlanItem, Remark
from crow.domain.errors import CrowError
from crow.domain.events import CommandsChanged, NoticeShown
from crow.tools import McpServer, Ports, ServerStatus, Toolbox, Workspace
from crow.tools.prompts import ServerPrompt, ServerPrompts

__all__ = ["CurrentPlan", "Toolset", "WaitableToolbox"]


class WaitableToolbox(Toolbox, ServerPrompts, Protocol):
    """A toolbox whose servers start in the background."""

    async def wait_ready(self, timeout_s: float, *, beside: Callable[[], None] | None = None) -> None:
        """Wait until every server is ready or has failed, at most so long. `beside` is called in the thread in which
        the toolbox looks at files."""
        ...


class CurrentPlan:
    """The plan port: the newest plan on the branch."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def current(self) -> tuple[PlanItem, ...]:
        return self._branch.plan


class Toolset:
    """What the session of `branch` may call. `want` has `keep` run; `delegate` is set before that."""

    def __init__(
        self,
        adapters: Adapters,
        client: Client,
        workspace: Workspace,
        servers: Sequence[McpServer],
        branch: Branch,
        *,
        want: Callable[[], None],
    ) -> None:
        self._want = want
        self.log = BranchLog(adapters.store, branch)
        self.delegate: SubAgents | None = None
        self._adapters = adapters
        self._client = client
        self._workspace = workspace
        self._servers = servers
        self._branch = branch
        self._named: dict[int, tuple[bool, int]] = {}
        self._there = anyio.Event()
        self._unwanted = anyio.Event()
        self._changed = anyio.Event()
        self._toolbox: WaitableToolbox | None = None
        self._failure: Exception | None = None

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the servers offer now."""
        return self._toolbox.prompts() if self._toolbox is not None else ()

    async def keep(self) -> None:
        """Open the tools, and close them after `close`. A failure is raised by each turn that needs the tools."""
        ports = Ports(log=self.log, plan=CurrentPlan(self._branch), delegate=self.delegate, asker=self._client)
        try:
            await self._adapters.load()
            async with (
                self._adapters.open_toolbox(
                    self._workspace, ports, self._servers, on_change=self._offers_changed
                ) as self._toolbox,
                anyio.create_task_group() as telling,
            ):
                self._there.set()
                telling.start_soon(self._tell_offers)
                await self._unwanted.wait()
                telling.cancel_scope.cancel()
        except Exception as error:
            if self._toolbox is not None:
                raise
            self._failure = error
        finally:
            self._there.set()

    def close(self) -> None:
        """Let `keep` end."""
        self._unwanted.set()

    async def toolbox(self) -> WaitableToolbox:
        """The tools, once they are open. :raises ~crow.domain.errors.CrowError: they could not be opened."""
        if not self._there.is_set():
            self._want()
            await self._there.wait()
        if self._toolbox is None:
            raise CrowError(f"The tools of this session could not be opened: {self._failure}")
        return self._toolbox

    async def name_failed(self, servers: Sequence[ServerStatus]) -> None:
        """Tell the user once of each failure of a server, also of one that it has got over by now."""
        for place, server in enumerate(servers):
            was_failed, losses = self._named.get(place, (False, 0))
            is_failed = server.state == "failed" or (server.state == "starting" and was_failed)
            self._named[place] = (is_failed, server.losses)
            if server.state == "failed" and not (was_failed and losses == server.losses):
                await self._tell(f"MCP server {server.name} is not available", server.detail)
            elif server.state != "failed" and losses < server.losses:
                done = "was" if server.state == "ready" else "is being"
                await self._tell(f"MCP server {server.name} had ended and {done} started again", server.loss)

    async def _offers_changed(self) -> None:
        self._changed.set()

    async def _tell_offers(self) -> None:
        """Tell the client when there are other commands than before. A slow client holds up no server."""
        known: tuple[ServerPrompt, ...] = ()
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            if self.prompts != known:
                known = self.prompts
                await self._branch.publish(CommandsChanged())

    async def _tell(self, title: str, detail: str) -> None:
        """Tell the user something of this moment; where the editor has no place for that, in the history."""
        if self._client.takes_notices:
            await self._client.publish(NoticeShown(severity="warning", title=title, description=detail))
        else:
            await self._branch.record([NewEntry(body=Remark(text=f"{title}: {detail}", message_id=new_message_id()))])
