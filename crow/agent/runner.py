"""What a session does when a prompt or a command has its turn: everything that only then is needed.

Strategy: imported with the first of them, together with the packages that they need anyway. What can be looked up
without writing (skills, AGENTS.md, the window) is looked up while the store still flushes the prompt. Knows the
session's parts, never the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import anyio
import anyio.abc

from crow.agent import Adapters, Client, new_message_id
from crow.agent.branch import Branch
from crow.agent.commands import CommandContext, Typed
from crow.agent.commands.handlers import answer
from crow.agent.compaction.budget import gauge_on
from crow.agent.compaction.compactor import Compactor, Helpers
from crow.agent.compaction.hooks import Hooks
from crow.agent.prompt import Briefing
from crow.agent.recall import BranchLog
from crow.agent.session import BackgroundTask, PendingPrompt, PendingTurnEnd, SessionStatus, set_mode, set_model
from crow.agent.subagents import SubAgents
from crow.agent.templates import CalledPrompt, filled
from crow.agent.tool_calls import Permissions
from crow.agent.turn import Turn
from crow.domain.entries import Command, NewEntry, PlanItem, Remark, StopReason, TurnEnd, User
from crow.domain.errors import ArgumentError, CrowError, ToolServerError
from crow.domain.events import CommandsChanged, NoticeShown
from crow.llm import Model
from crow.tools import McpServer, Ports, ServerPrompt, ServerPrompts, ServerStatus, Toolbox, Workspace

__all__ = ["CurrentPlan", "Toolset", "TurnRunner", "WaitableToolbox"]

SERVER_GRACE_S = 1.0


class TurnRunner:
    """Runs prompts and commands on one branch. `turn` is the one that runs; `want_tools` has the tools opened."""

    def __init__(
        self,
        adapters: Adapters,
        client: Client,
        workspace: Workspace,
        servers: Sequence[McpServer],
        branch: Branch,
        unstored: PendingTurnEnd,
        standing: SessionStatus,
        *,
        want_tools: Callable[[], None],
    ) -> None:
        self.turn: Turn | None = None
        self._briefing = standing.briefing = Briefing(branch)
        self.tools = Toolset(adapters, client, workspace, servers, branch, want=want_tools)
        self._adapters = adapters
        self._client = client
        self._workspace = workspace
        self._branch = branch
        self._unstored = unstored
        self._standing = standing
        self._hooks = adapters.hooks() if adapters.hooks is not None else Hooks()
        self._permissions = Permissions(branch, client)
        self.tools.delegate = self._delegate = SubAgents(
            store=adapters.store,
            parent=branch,
            client=client,
            log=self.tools.log,
            permissions=self._permissions,
            model=adapters.model,
            compactor=self._make_compactor,
            steps=lambda: adapters.settings().steps_per_turn,
        )
        self._prefetch: BackgroundTask | None = None

    @property
    def sub_agents(self) -> Sequence[str]:
        """The sessions of sub-agents that run now."""
        return tuple(self._delegate.running)

    def look(self, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to look up what the next turn needs."""
        self._prefetch = BackgroundTask(tasks, self._look)

    def cancel_prefetch(self) -> None:
        """Nobody needs what is being looked up."""
        if self._prefetch is not None:
            self._prefetch.cancel()
        self._prefetch = None

    async def run(self) -> StopReason:
        """Answer the prompt that stands at the end of the branch."""
        compactor, toolbox = await self._prepare()
        settings = self._adapters.settings()
        self._permissions.rules = settings.rules
        steps, bounded_by = settings.steps_per_turn, "limits.steps_per_turn"
        most = self._branch.row.config.get("max_turns")
        if isinstance(most, int) and 0 < most <= steps:
            steps, bounded_by = most, "maxTurns, as the editor asked for this session"
        self.turn = Turn(
            self._branch,
            compactor,
            toolbox,
            steps=steps,
            bounded_by=bounded_by,
            briefing=self._briefing,
            permissions=self._permissions,
        )
        return await self.turn.run()

    async def run_called(self, waiter: PendingPrompt, typed: CalledPrompt) -> StopReason:
        """Prompt with what a server makes of `/server:prompt`; with the words as they are where no server has it."""
        prompt = User(parts=tuple(waiter.parts), message_id=waiter.message_id)
        try:
            parts = await filled(await self.tools.toolbox(), typed, waiter.parts)
        except (ArgumentError, ToolServerError) as error:
            body = Command(text=waiter.text, answer=str(error), message_id=waiter.message_id)
            await self._branch.record([NewEntry(body=body)])
            await self._adapters.store.drop_prompt(self._branch.row.id, waiter.message_id)
            return "end_turn"
        except BaseException:
            self._unstored.keep([NewEntry(body=prompt)])  # what the user said stays in the history
            raise
        return await self._run_prompt(replace(prompt, parts=parts, cut=await self._standing.cut(parts)))

    async def run_command(self, text: str, typed: Typed) -> StopReason:
        """Answer a slash command, typed as `text`."""

        async def compactor() -> Compactor:
            return (await self._prepare())[0]

        desk = CommandContext(
            branch=self._branch,
            store=self._adapters.store,
            client=self._client,
            workspace=self._workspace,
            models=self._adapters.models,
            rules=self._adapters.settings().rules,
            compactor=compactor,
            set_mode=partial(set_mode, self._branch),
            set_model=partial(set_model, self._branch),
            move=self._standing.move,
            run_prompt=self._run_prompt,
            toolbox=self.tools.toolbox,
        )
        body = Command(text=text, answer=await answer(desk, typed), message_id=new_message_id())
        (entry,) = await self._branch.record([NewEntry(body=body)])
        return "end_turn" if desk.follow_up is None else await desk.follow_up(entry)

    def leave(self, end: TurnEnd) -> Turn | None:
        """The turn is over: keep its end and what is left of it, to be stored. The turn, whose tools may still run."""
        turn, self.turn = self.turn, None
        left = [*turn.leftover(), *turn.unseen()] if turn is not None else []
        self._unstored.keep([*left, NewEntry(body=end)])
        return turn

    async def _run_prompt(self, prompt: User) -> StopReason:
        await self._branch.record([NewEntry(body=prompt, model=self._branch.row.model)])
        await self._standing.name()
        return await self.run()

    async def _prepare(self) -> tuple[Compactor, WaitableToolbox]:
        """What a turn and a compaction need: a model that can be asked, open tools, a prompt entry."""
        await self._adapters.load()
        model = await self._adapters.model(self._branch.row.model)
        model.check()
        toolbox = await self.tools.toolbox()
        await self._seen()
        await self.tools.name_failed(toolbox.servers())
        await self._briefing.begin_turn(toolbox.specs(), toolbox.servers(), toolbox.skills())
        return await self._make_compactor(self._branch, model, self._briefing), toolbox

    async def _seen(self) -> None:
        """Wait for what `look` began to look up; look it up now if it did not."""
        glance, self._prefetch = self._prefetch, None
        if glance is None:
            await self._look()
        else:
            await glance.wait()

    async def _look(self) -> None:
        toolbox = await self.tools.toolbox()
        await toolbox.wait_ready(SERVER_GRACE_S, beside=self._briefing.read)
        await self._standing.window.look_up(self._adapters.info(self._branch.row.model))

    async def _make_compactor(self, branch: Branch, model: Model, briefing: Briefing) -> Compactor:
        settings = self._adapters.settings().compaction
        gauge = await gauge_on(branch, lambda: model.info, settings, self._standing.window)
        other = gauge.settings.compact_model if gauge.settings.compact_model != branch.row.model else ""
        helpers = Helpers(
            fresh_prompt=briefing.fresh_prompt,
            compact_model=await self._adapters.model(other) if other else None,
            hooks=self._hooks,
        )
        return Compactor(gauge, model, helpers)


# FROM agent.toolset: The tools of one session: opened when they are first wanted, and closed in the task that opened
# them.
#
# Strategy: the task of `keep` is a child of the session's own, outside of any turn's scope, because a cancel scope of
# a
# turn must not enclose what outlives the turn. What became of the servers is told to the user once each time.


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
