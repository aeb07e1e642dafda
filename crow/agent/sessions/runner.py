"""Runs the prompts and commands of one session. This module is loaded with the session's first prompt or command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread

from crow.agent import new_remark
from crow.agent.background import BackgroundTask
from crow.agent.commands.context import CommandContext
from crow.agent.commands.handlers import answer
from crow.agent.compaction.checkpoint import READ_TOOL
from crow.agent.compaction.compactor import Compactor
from crow.agent.history.branch import Branch
from crow.agent.history.options import set_mode, set_model
from crow.agent.history.recall import BranchLog, reading_of
from crow.agent.history.titles import set_default_title
from crow.agent.permissions.judge import Permissions
from crow.agent.sessions.between import BetweenTurns
from crow.agent.sessions.conversation import Conversation
from crow.agent.sessions.pending import PendingPrompt
from crow.agent.sessions.receipts import TurnReceipts
from crow.agent.sessions.toolset import ToolOffer, Toolset
from crow.agent.subagents.kinds import OfferedAgents, Speciality
from crow.agent.subagents.subagents import Subagents
from crow.agent.templates import ParsedCommand, fill_prompt
from crow.agent.turns.cost import Budget
from crow.agent.turns.factory import TurnFactory
from crow.agent.turns.inbox import Inbox
from crow.agent.turns.mentions import Mention, attach_resources
from crow.agent.turns.sampling import ModelSampler
from crow.agent.turns.turn import Turn
from crow.domain.entries import Command, NewEntry, PlanItem, StopReason, TurnEnd, User
from crow.domain.errors import ArgumentError, CrowError, ToolServerError
from crow.domain.messages import Part, Resource, Text, ToolCall
from crow.store import QueuedPrompt
from crow.tools import Ports, Toolbox
from crow.tools.servers import McpServer

_CUT = (
    "This prompt has {whole:,} characters, which is too much for the model's context window of {window:,} tokens. The "
    "model sees about {shown:,} of them: the beginning and the end of each long text. It is told that it can read the "
    "rest with recall (entry {id})."
)


class TurnRunner:
    """Prepares and runs the turns and commands of one session. It owns the things that they share: tools, subagents,
    the inbox of background work, permissions and the cost limits."""

    def __init__(
        self,
        conversation: Conversation,
        servers: Sequence[McpServer],
        tasks: anyio.abc.TaskGroup,
        *,
        ended_before: Sequence[QueuedPrompt],
        tools_wanted: anyio.Event,
    ) -> None:
        """`ended_before` are texts about background work that ended before the session was opened. `tools_wanted` is
        set when the tools are needed for the first time."""
        adapters, branch = conversation.adapters, conversation.branch
        self.turn: Turn | None = None
        """The turn that is running now."""
        self._conversation = conversation
        self._adapters = adapters
        self._branch = branch
        self._tasks = tasks
        # The kind sets limits only if this session was a subagent that a client has opened as a session of its own.
        kind = Speciality.stored(branch.row.config)
        self._permissions = Permissions(branch, conversation.client, conversation.workspace, limit=kind.mode)
        self._budget = Budget(branch, adapters.settings, conversation.report)
        self._factory = TurnFactory(
            adapters, conversation.workspace, conversation.window, self._budget, conversation.report, self._read_file
        )
        self._worker = self._factory.worker(branch, self._permissions)
        self._prefetch: BackgroundTask | None = None
        """Runs `_look_up` for the next turn. None if it was not started, or if the turn has taken its result."""
        self.inbox = Inbox(branch, adapters.store, ended_before, tasks=tasks, has_turn=lambda: self.turn is not None)
        log = BranchLog(adapters.store, branch)
        self.subagents = Subagents(
            adapters=adapters,
            parent=branch,
            client=conversation.client,
            log=log,
            permissions=self._permissions,
            turns=self._factory,
            inbox=self.inbox,
            tasks=tasks,
        )
        self._receipts = TurnReceipts(branch, adapters.store, self.subagents)
        self.between = BetweenTurns(conversation, self._budget, tasks)
        self.tools = Toolset(conversation, servers, self._ports(log), tools_wanted)
        self._offer = ToolOffer(conversation, self.tools, self._factory, self._worker, kind)

    def _ports(self, log: BranchLog) -> Ports:
        """Return what the session gives to its tools."""
        client, branch = self._conversation.client, self._branch
        return Ports(
            log=log,
            plan=_CurrentPlan(branch),
            subagents=self.subagents,
            agents=OfferedAgents(adapters=self._adapters, permissions=self._permissions),
            reviewer=self._permissions,
            elicitation=client,
            sampler=ModelSampler(
                branch,
                client,
                self._permissions,
                self._budget,
                lambda: self._adapters.model(branch.row.model),
            ),
            background=self.inbox,
            in_context=log.in_context,
        )

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
            changed = turn.has_run_calls or self.subagents.running
            await turn.end(end, receipt=await self._receipts.of_turn(self._adapters.settings()) if changed else ())

    async def _run_turn(self) -> StopReason:
        """Answer the prompt at the end of the branch."""
        compactor, toolbox = await self._prepare()
        await self._tell_cut(compactor.gauge.window())
        model, settings = compactor.model, self._adapters.settings()
        self.between.begin_turn(compactor)
        self._permissions.rules = settings.rules
        steps, bounded_by = settings.steps_per_turn, settings.steps_set_by
        most = self._branch.row.config.get("max_turns")
        if isinstance(most, int) and 0 < most <= steps:
            steps, bounded_by = most, "maxTurns, set by the editor for this session"
        self.turn = self._factory.turn(
            self._worker,
            compactor,
            toolbox,
            steps=steps,
            bounded_by=bounded_by,
            inbox=self.inbox,
            find_late_tools=self._offer.find_late,
        )
        self._budget.begin_turn()
        self._receipts.begin()
        try:
            stop = await self.turn.run()
        finally:
            self.between.end_turn(compactor, has_fallen_back=compactor.model is not model)
        await self._budget.end_turn()
        return stop

    async def _tell_cut(self, window: int) -> None:
        """If the model gets the turn's prompt shortened, tell the user."""
        entry = self._branch.projection.newest_user()
        body = entry.body if entry is not None and entry.turn == self._branch.turn else None
        if entry is not None and isinstance(body, User) and body.cut is not None:
            whole = sum(len(part.text) for part in body.parts if isinstance(part, Text | Resource))
            words = _CUT.format(whole=whole, shown=body.cut, window=window, id=entry.id)
            await self._branch.record([new_remark(words)])

    async def _run_user(self, user: User, unread: Sequence[str] = ()) -> StopReason:
        """Store the prompt and answer it. `unread` has texts for the user about resources that could not be
        attached."""
        await self._branch.record([NewEntry(body=user, model=self._branch.row.model)])
        await set_default_title(self._branch)
        for words in unread:
            await self._conversation.report("A resource could not be attached", words)
        return await self._run_turn()

    async def _run_server_prompt(self, prompt: PendingPrompt, typed: ParsedCommand) -> StopReason:
        """Run `/server:prompt`. The model gets the text that the server returns for this prompt. If no server has the
        prompt, the model gets what the user typed."""
        user = User(parts=tuple(prompt.parts), message_id=prompt.message_id, name=prompt.name)
        try:
            parts = await fill_prompt(await self.tools.toolbox(), typed, prompt.parts)
            cut = await self._conversation.cut_for(parts)
        except (ArgumentError, ToolServerError) as error:
            body = Command(text=prompt.text, answer=str(error), message_id=prompt.message_id, name=prompt.name)
            await self._branch.record([NewEntry(body=body)])
            await self._adapters.store.drop_prompt(self._branch.row.id, prompt.message_id)
            return "end_turn"
        except BaseException:
            self._branch.store_at_end([NewEntry(body=user)])
            raise
        return await self._run_user(replace(user, parts=parts, cut=cut))

    async def _run_with_resources(self, prompt: PendingPrompt) -> StopReason:
        """Run a prompt that mentions resources of MCP servers. The model gets their content with the prompt."""
        user = User(parts=tuple(prompt.parts), message_id=prompt.message_id, name=prompt.name)
        try:
            parts, failures = await self.attach_resources(prompt.parts, prompt.mentions)
            cut = await self._conversation.cut_for(parts)
        except BaseException:
            self._branch.store_at_end([NewEntry(body=user)])
            raise
        return await self._run_user(replace(user, parts=parts, cut=cut), failures)

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
            client=self._conversation.client,
            workspace=self._conversation.workspace,
            models=self._adapters.models,
            rules=self._adapters.settings().rules,
            compactor=compactor,
            set_mode=partial(set_mode, self._branch),
            set_model=partial(set_model, self._branch),
            move=self._conversation.move,
            run_prompt=self._run_user,
            toolbox=self.tools.toolbox,
            instructions=lambda: self._worker.briefing.sources,
            links=self._adapters.links,
            user_instructions=self._adapters.user_instructions,
        )
        answered = await answer(context, typed)
        body = Command(text=prompt.text, answer=answered, message_id=prompt.message_id, name=prompt.name)
        (entry,) = await self._branch.record([NewEntry(body=body)])
        return "end_turn" if context.follow_up is None else await context.follow_up(entry)

    def prefetch(self) -> None:
        """Start to look up what the next turn needs. This runs while the store is still writing that turn's prompt."""
        self._prefetch = BackgroundTask(self._tasks, self._look_up)

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
        await toolbox.wait_ready(wait_s, beside=partial(self._worker.briefing.read, self._permissions.may_read()))
        await self._conversation.window.look_up(self._adapters.info(self._branch.row.model))

    async def _prepare(self) -> tuple[Compactor, Toolbox]:
        """Prepare what a turn or a compaction needs: a usable model, open tools and a prompt entry."""
        await self._adapters.load()
        model = await self._adapters.model(self._branch.row.model)
        model.check()
        toolbox = await self.tools.toolbox()
        prefetch, self._prefetch = self._prefetch, None
        await (self._look_up() if prefetch is None else prefetch.wait())
        tools = await self._offer.begin(toolbox)
        return await self._factory.compactor(self._worker, model), tools

    async def _read_file(self, path: str) -> str | None:
        """Return the text that the tool `read_file` would return for a text file. Return None if the file cannot be
        read, or if reading it needs the user's permission."""
        workspace = self._conversation.workspace
        try:
            resolved = workspace.resolve(path)
            if not workspace.contains(resolved):
                return None
            if not await anyio.to_thread.run_sync(self._permissions.may_read(), resolved):
                return None
            call = ToolCall(id="", name=READ_TOOL, arguments=json.dumps({"path": str(resolved)}))
            outcome = await (await self.tools.toolbox()).run(call, reading_of(path), _ignore)
        except (CrowError, OSError, ValueError):
            return None
        return None if outcome.is_error or outcome.images else outcome.text


async def _ignore(_: str) -> None:
    """Drop the output of a running call."""


class _CurrentPlan:
    """See :class:`crow.tools.Plan`."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def current(self) -> tuple[PlanItem, ...]:
        return self._branch.projection.plan
