"""Runs the prompts and commands of one session. This module is loaded with the session's first prompt or command."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import anyio
import anyio.abc

from crow.agent.background import BackgroundTask
from crow.agent.commands.context import CommandContext
from crow.agent.commands.handlers import answer
from crow.agent.compaction.budget import CompactionPolicy, gauge_on, limits_for
from crow.agent.compaction.checkpoint import READ_TOOL
from crow.agent.compaction.compactor import Compactor, Helpers, PreparedCheckpoint
from crow.agent.compaction.window import MIN_ROOM
from crow.agent.history.branch import Branch
from crow.agent.history.recall import BranchLog
from crow.agent.history.titles import untitled_prompt, write_title
from crow.agent.hooks import BranchHooks, Hooks
from crow.agent.permissions.judge import Permissions
from crow.agent.sessions.pending import PendingPrompt
from crow.agent.sessions.session import Session
from crow.agent.subagents.kinds import OfferedAgents, Speciality
from crow.agent.subagents.subagents import Subagents, ToolSubset
from crow.agent.templates import ParsedCommand, fill_prompt
from crow.agent.turns.adapters import WaitableToolbox
from crow.agent.turns.cost import Budget
from crow.agent.turns.inbox import Inbox
from crow.agent.turns.mentions import Mention, attach_resources
from crow.agent.turns.prompt import Briefing, with_edit_tool
from crow.agent.turns.sampling import ModelSampler
from crow.agent.turns.turn import Standby, Turn
from crow.domain.entries import Command, NewEntry, PlanItem, StopReason, TurnEnd, User
from crow.domain.errors import ArgumentError, CrowError, StoreError, ToolServerError
from crow.domain.events import CommandsChanged
from crow.domain.messages import Part, ToolCall
from crow.domain.text import plural
from crow.domain.tokens import estimate_tools
from crow.llm import Model
from crow.tools import Ports, ServerStatus, Toolbox
from crow.tools.servers import ServerPrompt

logger = logging.getLogger(__name__)

WATCH_S = 0.5
MAX_TOOL_SHARE = 3
"""Tools that leave too little room are dropped if they take more than one part in this many of what a context may
have."""
"""While a summary is written between two turns, crow checks at this interval (in seconds) whether the session has
changed. If so, crow stops writing. Another process writes a summary only after it has run a turn and then waited for
`Session.rest_s` seconds, which is much longer than this interval. So two processes never write a summary of one session
at once."""

Place: TypeAlias = tuple[int | None, str]
"""The id of the newest checkpoint, and the endpoint of the session's model."""


class TurnRunner:
    """Runs turns on the session's branch. `turn` is the turn that is running now."""

    def __init__(self, session: Session) -> None:
        self.turn: Turn | None = None
        self._session = session
        self._adapters = session.adapters
        self._branch = session.branch
        self._briefing = Briefing(
            session.branch, contains=session.workspace.contains, user_file=session.adapters.user_instructions
        )
        self._kind = Speciality.stored(session.branch.row.config)
        """The kind of this session. It sets limits only if the session is a subagent of some kind and a client has
        opened it as a session of its own."""
        self._permissions = Permissions(session.branch, session.client, session.workspace, limit=self._kind.mode)
        self._hooks = self._make_hooks(session.branch)
        self._prefetch: BackgroundTask | None = None
        self._titling: BackgroundTask | None = None
        self._titled = ""  # the message id of the prompt for which a title was requested
        self._budget = Budget(session.branch, session.adapters.settings, session.report)
        self._down: set[str] = set()
        self._late: set[int] = set()
        """The indexes of the servers that were still starting when the turn began."""
        self._told_window = 0
        """The context window, in tokens, for which the user was told that tools do not fit into it."""
        self._compactor: Compactor | None = None
        self._preparation: BackgroundTask | None = None
        self._prepared: PreparedCheckpoint | None = None
        self._attempted_at: Place | None = None
        self._next_attempt = 0
        """A context size in tokens. While the checkpoint and the endpoint are still those in `_attempted_at`, crow
        writes no further summary between turns until the context has reached this size."""
        log = BranchLog(session.adapters.store, session.branch)
        self.inbox = Inbox(
            session.branch,
            session.adapters.store,
            session.ended_before,
            tasks=lambda: session.tasks,
            has_turn=lambda: self.turn is not None,
        )
        self.subagents = Subagents(
            adapters=session.adapters,
            parent=session.branch,
            client=session.client,
            workspace=session.workspace,
            log=log,
            permissions=self._permissions,
            hooks=self._make_hooks,
            compactor=self._make_compactor,
            budget=self._budget,
            standby=self._make_standby,
            inbox=self.inbox,
            tasks=lambda: session.tasks,
        )
        ports = Ports(
            log=log,
            plan=CurrentPlan(session.branch),
            subagents=self.subagents,
            agents=OfferedAgents(adapters=session.adapters, permissions=self._permissions),
            elicitation=session.client,
            sampler=ModelSampler(
                session.branch,
                session.client,
                self._permissions,
                self._budget,
                lambda: session.adapters.model(session.branch.row.model),
            ),
            background=self.inbox,
        )
        self.tools = Toolset(session, ports)

    async def run(self, prompt: PendingPrompt) -> StopReason:
        """Run a claimed prompt or command until its turn ends, and return the stop reason."""
        if prompt.command is not None:
            return await self._run_command(prompt, prompt.command)
        if prompt.called is not None:
            return await self._run_server_prompt(prompt, prompt.called)
        if prompt.mentions:
            return await self._run_with_resources(prompt)
        return await self._run_turn()

    async def end_turn(self, end: TurnEnd) -> None:
        """Store the end of the turn, together with everything that the turn has not stored yet."""
        if self._prefetch is not None:
            self._prefetch.cancel()
            self._prefetch = None
        turn, self.turn = self.turn, None
        if turn is None:
            await self._branch.end_turn(end)
        else:
            await turn.end(end)

    async def _run_turn(self) -> StopReason:
        """Answer the prompt at the end of the branch."""
        compactor, toolbox = await self._prepare()
        compactor.prepared, self._prepared = self._prepared, None
        self._compactor, model = compactor, compactor.model
        settings = self._adapters.settings()
        self._permissions.rules = settings.rules
        steps, bounded_by = settings.steps_per_turn, settings.steps_set_by
        most = self._branch.row.config.get("max_turns")
        if isinstance(most, int) and 0 < most <= steps:
            steps, bounded_by = most, "maxTurns, set by the editor for this session"
        self.turn = Turn(
            self._branch,
            compactor,
            toolbox,
            briefing=self._briefing,
            permissions=self._permissions,
            hooks=self._hooks,
            steps=steps,
            bounded_by=bounded_by,
            budget=self._budget,
            standby=self._make_standby(self._branch),
            inbox=self.inbox,
            find_late_tools=self._find_late_tools,
        )
        self._budget.begin_turn()
        try:
            stop = await self.turn.run()
        finally:
            # if the turn ended before its first request, the next turn can use the checkpoint
            self._prepared = compactor.prepared
            if compactor.model is not model:  # a fallback has answered; the next turn asks the session's own model
                self._compactor = None
        await self._budget.end_turn()
        return stop

    async def _run_user(self, user: User, unread: Sequence[str] = ()) -> StopReason:
        """Store the prompt and answer it. `unread` has texts for the user about resources that could not be
        attached."""
        await self._branch.record([NewEntry(body=user, model=self._branch.row.model)])
        await self._branch.set_default_title()
        for words in unread:
            await self._session.report("A resource could not be attached", words)
        return await self._run_turn()

    async def _run_server_prompt(self, prompt: PendingPrompt, typed: ParsedCommand) -> StopReason:
        """Run `/server:prompt`. The model gets the text that the server returns for this prompt. If no server has the
        prompt, the model gets what the user typed."""
        user = User(parts=tuple(prompt.parts), message_id=prompt.message_id, name=prompt.name)
        try:
            parts = await fill_prompt(await self.tools.toolbox(), typed, prompt.parts)
        except (ArgumentError, ToolServerError) as error:
            body = Command(text=prompt.text, answer=str(error), message_id=prompt.message_id, name=prompt.name)
            await self._branch.record([NewEntry(body=body)])
            await self._adapters.store.drop_prompt(self._branch.row.id, prompt.message_id)
            return "end_turn"
        except BaseException:
            self._branch.store_at_end([NewEntry(body=user)])
            raise
        return await self._run_user(replace(user, parts=parts, cut=await self._session.cut_for(parts)))

    async def _run_with_resources(self, prompt: PendingPrompt) -> StopReason:
        """Run a prompt that mentions resources of MCP servers. The model gets their content with the prompt."""
        user = User(parts=tuple(prompt.parts), message_id=prompt.message_id, name=prompt.name)
        try:
            parts, failures = await self.attach_resources(prompt.parts, prompt.mentions)
        except BaseException:
            self._branch.store_at_end([NewEntry(body=user)])
            raise
        user = replace(user, parts=parts, cut=await self._session.cut_for(parts))
        return await self._run_user(user, failures)

    async def attach_resources(
        self, parts: Sequence[Part], mentions: Sequence[Mention]
    ) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """See :func:`crow.agent.turns.mentions.attach_resources`."""
        self._permissions.rules = self._adapters.settings().rules
        return await attach_resources(parts, mentions, await self.tools.toolbox(), self._permissions.refusal)

    async def _run_command(self, prompt: PendingPrompt, typed: ParsedCommand) -> StopReason:
        """Answer the command `typed`. Then run the follow-up that the command asks for."""

        async def compactor() -> Compactor:
            return (await self._prepare())[0]

        context = CommandContext(
            branch=self._branch,
            store=self._adapters.store,
            client=self._session.client,
            workspace=self._session.workspace,
            models=self._adapters.models,
            rules=self._adapters.settings().rules,
            compactor=compactor,
            set_mode=self._branch.set_mode,
            set_model=self._branch.set_model,
            move=self._session.move,
            run_prompt=self._run_user,
            toolbox=self.tools.toolbox,
            instructions=lambda: self._briefing.sources,
            user_instructions=self._adapters.user_instructions,
        )
        answered = await answer(context, typed)
        body = Command(text=prompt.text, answer=answered, message_id=prompt.message_id, name=prompt.name)
        (entry,) = await self._branch.record([NewEntry(body=body)])
        return "end_turn" if context.follow_up is None else await context.follow_up(entry)

    def prepare_checkpoint(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start to write the summary that the next prompt may need, if the session has become large enough.

        Call this after a turn. Only the process that ran the newest turn writes a summary.
        """
        compactor = self._compactor
        level = None if compactor is None else compactor.gauge.early_level()
        if compactor is None or level is None or self._budget.is_spent():
            return
        used, checkpoint = compactor.gauge.used(), self._branch.projection.checkpoint
        place: Place = (None if checkpoint is None else checkpoint.id, compactor.gauge.info.endpoint)
        # Wait until the context has grown. Otherwise a user who always answers quickly would pay for a summary in every
        # turn.
        if used < level or (place == self._attempted_at and used < self._next_attempt):
            return
        self._prepared = None
        self._preparation = BackgroundTask(tasks, partial(self._prepare_checkpoint, compactor, place))

    def cancel_preparation(self) -> None:
        """Stop writing a summary. This does not wait until the request is closed."""
        if self._preparation is not None:
            self._preparation.cancel()

    async def end_background(self) -> None:
        """Stop writing a summary and a title, and wait until the requests are closed and their usage is known."""
        tasks = [task for task in (self._preparation, self._titling) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            await task.wait()

    async def _prepare_checkpoint(self, compactor: Compactor, place: Place) -> None:
        model = self._branch.row.model
        await anyio.sleep(self._session.rest_s)
        try:
            if await self._has_changed(model):
                return
            self._attempted_at = place
            self._next_attempt = compactor.gauge.used() + compactor.gauge.limits().room // 10
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, model, tasks.cancel_scope)
                self._prepared = await compactor.prepare()
                tasks.cancel_scope.cancel()
            await self._branch.store_requests()
        except StoreError as error:  # usually because another process runs a turn; the usage is stored later
            logger.info("Session %s: no summary was written early: %s", self._branch.row.id, error)
        except Exception:
            logger.exception("Session %s: no summary could be written early", self._branch.row.id)

    async def _watch(self, model: str, scope: anyio.CancelScope) -> None:
        """Cancel `scope` as soon as the session has changed, because the summary would then not be used."""
        while not await self._has_changed(model):  # noqa: ASYNC110  # other processes set no event here
            await anyio.sleep(WATCH_S)
        scope.cancel()

    async def _has_changed(self, model: str) -> bool:
        """Whether another process runs a turn, another process has added entries, or the user has chosen another model
        than `model`. Also true if the store cannot be read."""
        try:
            row = await self._adapters.store.session(self._branch.row.id)
        except StoreError:
            return True
        return row.state != "idle" or row.leaf != self._branch.leaf or row.model != model

    def prefetch(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start to look up what the next turn needs. This runs while the store is still writing that turn's prompt."""
        self._prefetch = BackgroundTask(tasks, self._look_up)

    def title_later(self, tasks: anyio.abc.TaskGroup) -> None:
        """If this was the session's first turn and the user has set a model for titles, ask that model for a title in
        the background."""
        name = "" if self._budget.is_spent() else self._adapters.settings().title_model
        prompt = untitled_prompt(self._branch) if name else None
        if prompt is not None and prompt.message_id != self._titled:
            self._titled = prompt.message_id
            if self._titling is not None:
                self._titling.cancel()
            open_model = partial(self._adapters.model, name)
            self._titling = BackgroundTask(tasks, partial(write_title, self._branch, prompt, open_model))

    def close(self) -> None:
        """Stop watching what runs in the background, and close the tools."""
        self.inbox.close()
        self.tools.close()

    async def _look_up(self) -> None:
        """Read the instruction files and the skills while the servers start. Afterwards, look up what crow has learned
        about the model's context window."""
        toolbox = await self.tools.toolbox()
        self._permissions.rules = self._adapters.settings().rules
        wait_s = self._adapters.settings().server_wait_s
        await toolbox.wait_ready(wait_s, beside=partial(self._briefing.read, self._permissions.may_read()))
        await self._session.window.look_up(self._adapters.info(self._branch.row.model))

    async def _prepare(self) -> tuple[Compactor, Toolbox]:
        """Prepare what a turn or a compaction needs: a usable model, open tools and a prompt entry."""
        await self._adapters.load()
        model = await self._adapters.model(self._branch.row.model)
        model.check()
        toolbox = await self.tools.toolbox()
        prefetch, self._prefetch = self._prefetch, None
        await (self._look_up() if prefetch is None else prefetch.wait())
        await self.tools.report_failures(toolbox.servers())
        self._late = {index for index, one in enumerate(toolbox.servers()) if one.state == "starting"}
        tools = await self._offer(toolbox)
        return await self._make_compactor(self._branch, model, self._briefing, self._hooks), tools

    async def _offer(self, toolbox: Toolbox) -> Toolbox:
        """Tell the model which tools it has now, and return the toolbox with these tools."""
        if self._kind.tools is not None:
            toolbox = ToolSubset(toolbox, self._kind.specs((*toolbox.specs(), *toolbox.deferred())))
        toolbox = await self._fitting(toolbox)
        specs = with_edit_tool(toolbox.specs(), self._adapters.edit_tool(self._branch.row.model))
        await self._briefing.begin_turn(specs, toolbox.servers(), toolbox.skills())
        return toolbox

    async def _fitting(self, toolbox: Toolbox) -> Toolbox:
        """Return `toolbox`, or one without tools if they leave too little of the model's window for a conversation. In
        that case, tell the user."""
        model = self._branch.row.model
        info = self._adapters.info(model)
        tokens, window = estimate_tools(toolbox.specs()), self._session.window.cautious_tokens(info)
        limits = limits_for(window, info.max_output_tokens, tokens, CompactionPolicy())
        if not limits.is_tiny or tokens < limits.threshold // MAX_TOOL_SHARE:
            self._told_window = 0
            return toolbox
        if self._told_window != window:
            self._told_window = window
            needed = -(-(tokens + MIN_ROOM) * 4 // 3 // 1_000) * 1_000
            await self._session.report(
                f"{model} gets no tools: its context window is too small",
                f"The window has {window:,} tokens, of which the tools would take about {tokens:,}. You can chat, but "
                f"the model cannot read files or run commands. Tools need a window of about {needed:,} tokens: start "
                "the model's server with a larger one, raise context_window if you set it, or choose another model.",
            )
        return ToolSubset(toolbox, ())

    async def _find_late_tools(self) -> Toolbox | None:
        """Offer the tools of servers that were still starting when the turn began, and are ready now."""
        if not self._late:
            return None
        toolbox = await self.tools.toolbox()
        servers = toolbox.servers()
        settled = {index for index in self._late if servers[index].state != "starting"}
        if not settled:
            return None
        self._late -= settled
        await self.tools.report_failures(servers)
        ready = [servers[index] for index in sorted(settled) if servers[index].state == "ready"]
        if not ready:
            return None
        offered = await self._offer(toolbox)
        for server in ready:
            count = plural(server.tools, "tool")
            joined = f"The model has {count} of it from now on."
            await self._session.report(f"MCP server {server.name} is ready", joined, severity="info")
        return offered

    def _make_hooks(self, branch: Branch) -> BranchHooks:
        return BranchHooks(self._adapters.hooks or Hooks(), branch, self._session.workspace, self._session.report)

    def _make_standby(self, branch: Branch) -> Standby:
        return Standby(branch, self._adapters, self._down, self._session.report)

    async def _make_compactor(self, branch: Branch, model: Model, briefing: Briefing, hooks: BranchHooks) -> Compactor:
        settings = self._adapters.settings().compaction
        gauge = await gauge_on(branch, lambda: model.info, settings, self._session.window)
        other = gauge.settings.compact_model if gauge.settings.compact_model != branch.row.model else ""
        helpers = Helpers(
            fresh_prompt=briefing.fresh_prompt,
            compact_model=await self._adapters.model(other) if other else None,
            hooks=hooks,
            read_file=self._read_file,
        )
        return Compactor(gauge, model, helpers)

    async def _read_file(self, path: str) -> str | None:
        """Return the text that the tool `read_file` would return for a text file. Return None if the file cannot be
        read, or if reading it needs the user's permission."""
        workspace = self._session.workspace
        try:
            resolved = workspace.resolve(path)
            if not workspace.contains(resolved):
                return None
            if not await anyio.to_thread.run_sync(self._permissions.may_read(), resolved):
                return None
            call = ToolCall(id="", name=READ_TOOL, arguments=json.dumps({"path": str(resolved)}))
            outcome = await (await self.tools.toolbox()).run(call, "", ignore)
        except (CrowError, OSError, ValueError):
            return None
        return None if outcome.is_error or outcome.images else outcome.text


async def ignore(_: str) -> None:
    """Drop the output of a running call."""


class CurrentPlan:
    """See :class:`crow.tools.Plan`."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def current(self) -> tuple[PlanItem, ...]:
        return self._branch.plan


class Toolset:
    """The session's tools. They are opened when they are first needed, in a task of their own.

    That task is a child of the session's task and not of a turn: the tools outlive the turn, so a turn's cancel scope
    must not enclose them.
    """

    def __init__(self, session: Session, ports: Ports) -> None:
        self._session = session
        self._ports = ports
        self._opened = anyio.Event()
        self._retry = anyio.Event()
        self._changed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._is_closed = False
        self._toolbox: WaitableToolbox | None = None
        self._failure: Exception | None = None
        self._reported: dict[int, tuple[bool, int]] = {}

    @property
    def prompts(self) -> tuple[ServerPrompt, ...]:
        """The prompts that the servers offer now."""
        return self._toolbox.prompts() if self._toolbox is not None else ()

    async def run(self) -> None:
        """Open the tools, wait for `close`, then close them. If opening them fails, `toolbox` raises an error, and its
        next call tries again: the system may only have been out of file descriptors or disk space."""
        session = self._session
        while not self._is_closed:
            try:
                await session.adapters.load()
                async with session.adapters.open_toolbox(
                    session.workspace, self._ports, session.servers, on_change=self._on_change
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
            self._session.tools_wanted.set()
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
                await self._session.report(f"MCP server {server.name} is not available", server.detail)
            elif server.state != "failed" and losses < server.losses:
                restarted = "was restarted" if server.state == "ready" else "is being restarted"
                await self._session.report(f"MCP server {server.name} stopped and {restarted}", server.loss)

    async def _on_change(self) -> None:
        self._changed.set()

    async def _publish_commands(self) -> None:
        """Tell the client whenever the prompts of the servers change. A slow client does not delay the servers."""
        known: tuple[ServerPrompt, ...] = ()
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            if self.prompts != known:
                known = self.prompts
                await self._session.branch.publish(CommandsChanged())
