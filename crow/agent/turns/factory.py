"""Makes turns, for a session and for its subagents alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from crow.agent.compaction.budget import gauge_on
from crow.agent.compaction.compactor import Compactor
from crow.agent.compaction.window import ContextWindow
from crow.agent.compaction.writer import Helpers
from crow.agent.history.branch import Branch
from crow.agent.hooks import BranchHooks, Hooks
from crow.agent.permissions.judge import Permissions
from crow.agent.turns.adapters import Adapters
from crow.agent.turns.cost import Budget
from crow.agent.turns.inbox import Inbox
from crow.agent.turns.prompt import Briefing, with_edit_tool
from crow.agent.turns.requests import Standby
from crow.agent.turns.turn import FindLateTools, Turn
from crow.llm import Model
from crow.tools import Toolbox, Workspace


class Report(Protocol):
    """Shows the user a notice."""

    async def __call__(self, title: str, detail: str = "") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The session or the subagent whose turns are made. Its turns share these objects."""

    branch: Branch
    permissions: Permissions
    briefing: Briefing
    hooks: BranchHooks


class TurnFactory:
    """Makes the turns of one session and of its subagents. They share a budget, and the
    facts that crow has learned about context windows."""

    def __init__(
        self,
        adapters: Adapters,
        workspace: Workspace,
        window: ContextWindow,
        budget: Budget,
        report: Report,
        read_file: Callable[[str], Awaitable[str | None]],
    ) -> None:
        """`read_file` is described at :class:`Helpers`."""
        self._adapters = adapters
        self._workspace = workspace
        self._window = window
        self._budget = budget
        self._report = report
        self.read_file = read_file
        self._down: set[str] = set()
        """The names of the models whose endpoints are down. The user has been told about each of them."""

    def worker(self, branch: Branch, permissions: Permissions) -> Worker:
        """Return the objects that all turns on `branch` share."""
        return Worker(
            branch=branch,
            permissions=permissions,
            briefing=Briefing(branch, contains=self._workspace.contains, user_file=self._adapters.user_instructions),
            hooks=BranchHooks(self._adapters.hooks or Hooks(), branch, self._workspace, self._report),
        )

    async def offer(self, worker: Worker, toolbox: Toolbox) -> None:
        """Tell the worker's model which tools it has from now on."""
        specs = with_edit_tool(toolbox.specs(), self._adapters.edit_tool(worker.branch.row.model))
        await worker.briefing.begin_turn(specs, toolbox.servers(), toolbox.skills())

    async def compactor(self, worker: Worker, model: Model) -> Compactor:
        """Return the compactor for the worker's next turn. `model` answers in that turn."""
        settings = self._adapters.settings().compaction
        gauge = await gauge_on(worker.branch, lambda: model.info, settings, self._window)
        other = gauge.settings.compact_model if gauge.settings.compact_model != worker.branch.row.model else ""
        helpers = Helpers(
            fresh_prompt=worker.briefing.fresh_prompt,
            compact_model=await self._adapters.model(other) if other else None,
            hooks=worker.hooks,
            read_file=self.read_file,
        )
        return Compactor(gauge, model, helpers)

    def turn(
        self,
        worker: Worker,
        compactor: Compactor,
        toolbox: Toolbox,
        *,
        steps: int,
        bounded_by: str = "limits.steps_per_turn",
        inbox: Inbox | None = None,
        find_late_tools: FindLateTools | None = None,
    ) -> Turn:
        """Return a turn at the end of the worker's branch. The other arguments are described at :class:`Turn`."""
        return Turn(
            worker.branch,
            compactor,
            toolbox,
            briefing=worker.briefing,
            permissions=worker.permissions,
            hooks=worker.hooks,
            steps=steps,
            bounded_by=bounded_by,
            budget=self._budget,
            standby=Standby(worker.branch, self._adapters, self._down, self._report),
            inbox=inbox,
            find_late_tools=find_late_tools,
        )
