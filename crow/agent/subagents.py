"""Sub-agents: each runs a task as one turn in a conversation of its own."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from crow.agent import Adapters, Client, new_message_id
from crow.agent.accounts import Budget
from crow.agent.agent_kinds import Speciality
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.hooks import BranchHooks
from crow.agent.prompt import Briefing
from crow.agent.recall import BranchLog
from crow.agent.tool_calls import Permissions
from crow.agent.turn import Standby, Turn
from crow.domain.entries import Assistant, Entry, Started, ToolResult, TurnEnd
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession, StoreError
from crow.domain.events import CallAnnounced, CallEnded, CallProgressed, ElicitationKind, EntryStored, Event, TextShown
from crow.domain.messages import Text, ToolCall, ToolSpec, Usage
from crow.llm import Model
from crow.store import NewSession, SessionChanges
from crow.tools import OnOutput, PlannedCall, SkillInfo, SubagentResult, Task, Toolbox, Workspace
from crow.tools.limits import FairLimiter

ONLY_FOR_THE_SESSION = frozenset({"task", "update_plan", "recall"})
TASKS_PER_TURN = 50
SLOTS = FairLimiter(32, each=8)
"""Limits how many sub-agents run at the same time, in the whole process and for each session. Each session's branch is
a holder of slots."""

PROGRESS_EVERY_S = 0.1
PROGRESS_CHARS = 2_000
ROLE = (
    "You are a sub-agent: another agent gave you this task and reads your last answer, nothing else of what you do. "
    "Answer with all that it needs to know, and do not ask back."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgents:
    """Runs the tasks of one session. Implements :class:`crow.tools.SubagentRunner`.

    A task's conversation is stored like a session, with `parent_id`. Its calls are announced under the session's id,
    and the session's permissions apply to them. `running` holds the ids of the tasks that run now. `started` counts
    the tasks of each turn.
    """

    adapters: Adapters
    parent: Branch
    client: Client
    workspace: Workspace
    log: BranchLog
    permissions: Permissions
    hooks: Callable[[Branch], BranchHooks]
    compactor: Callable[[Branch, Model, Briefing, BranchHooks], Awaitable[Compactor]]
    budget: Budget
    standby: Callable[[Branch], Standby]
    running: set[str] = field(default_factory=set)
    started: Counter[int] = field(default_factory=Counter)

    async def delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:  # noqa: ARG002
        """See :class:`crow.tools.SubagentRunner`."""
        turn = self.parent.turn
        if self.started[turn] >= TASKS_PER_TURN:
            raise ArgumentError(
                f"task: this turn has started {TASKS_PER_TURN} tasks, and no turn may start more; do the rest yourself"
            )
        self.started[turn] += 1
        async with SLOTS.slot(self.parent):
            return await self._delegate(task, toolbox, on_output)

    async def _delegate(self, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        kind = await self._kind(task)
        tools = ToolSubset(toolbox, allowed_specs(kind.specs(toolbox.specs()), task.tools))
        client = SubAgentClient(self.client, self.log, on_output)
        client.branch = branch = await self._open(task, client, kind)
        self.running.add(branch.row.id)
        cost = branch.row.cost
        try:
            end = await self._run(branch, task, tools, kind.permissions(self.permissions))
            spent = round(branch.row.cost - cost, 12)
            return client.result(branch.row.id, end, branch.turn_usage, spent or None)
        finally:
            self.running.discard(branch.row.id)
            self.log.forget(client.answers)
            await self._count(branch)

    async def _count(self, branch: Branch) -> None:
        """Add the usage of a task to the turn that started the task. The store has already added it to the session's
        row."""
        if branch.turn_usage is not None:
            self.parent.add_usage(branch.turn_usage)
            with anyio.CancelScope(shield=True), suppress(StoreError):
                await self.parent.refresh_cost()

    async def _kind(self, task: Task) -> Speciality:
        """Return what the kind of a task sets. A resumed task keeps its kind; if there is no such task, `_open` raises
        the error."""
        if task.resume is None:
            return Speciality.of(task, self.adapters.models)
        try:
            return Speciality.stored((await self.adapters.store.session(task.resume)).config)
        except NoSuchSession:
            return Speciality()

    async def _open(self, task: Task, client: Client, kind: Speciality) -> Branch:
        """Open the branch of a new task, or of the task to resume.

        :raises ~crow.domain.errors.ArgumentError: there is no such task, or it is still running.
        """
        store, row = self.adapters.store, self.parent.row
        extra = row.config.get("system_prompt_append")
        append = f"{extra}\n\n{ROLE}" if isinstance(extra, str) and extra else ROLE
        config = kind.config({**row.config, "system_prompt_append": append})
        mode, model = kind.mode_in(row.mode), kind.model or row.model
        if task.resume is None:
            new = NewSession(
                id=f"task-{secrets.token_hex(8)}",
                cwd=row.cwd,
                model=model,
                mode=mode,
                additional_directories=row.additional_directories,
                config=config,
                parent_id=row.id,
                title=task.title,
            )
            await store.create_session(new)
            return Branch(store, client, await store.open_session(new.id))
        if task.resume in self.running:
            raise ArgumentError(f"task: {task.resume} is still running; wait for it to end")
        unknown = ArgumentError(f'task: this session has no task "{task.resume}" to resume')
        try:
            tail = await store.open_session(task.resume)
        except NoSuchSession:
            raise unknown from None
        if tail.row.parent_id != row.id:
            raise unknown
        branch = Branch(store, client, tail)
        await branch.change(SessionChanges(mode=mode, model=model, config=config))
        return branch

    async def _run(self, branch: Branch, task: Task, tools: ToolSubset, permissions: Permissions) -> TurnEnd:
        """Run one turn on the branch, and end it even if it is cancelled or fails."""
        with anyio.CancelScope(shield=True):
            await branch.claim(new_message_id(), parts=(Text(text=task.prompt),))
        turn: Turn | None = None
        end = TurnEnd(stop="error", detail="Internal error")
        try:
            model = await self.adapters.model(branch.row.model)
            briefing = Briefing(branch, contains=self.workspace.contains, user_file=self.adapters.user_instructions)
            await anyio.to_thread.run_sync(briefing.read, permissions.may_read())
            await briefing.begin_turn(tools.specs(), tools.servers(), tools.skills())
            hooks = self.hooks(branch)
            compactor = await self.compactor(branch, model, briefing, hooks)
            steps = self.adapters.settings().steps_per_turn
            turn = Turn(
                branch,
                compactor,
                tools,
                briefing=briefing,
                permissions=permissions,
                hooks=hooks,
                steps=steps,
                budget=self.budget,
                standby=self.standby(branch),
            )
            end = TurnEnd(stop=await turn.run())
        except anyio.get_cancelled_exc_class():
            end = TurnEnd(stop="cancelled")
            raise
        except CrowError as error:
            end = TurnEnd(stop="error", detail=str(error))
        finally:
            await (branch.end_turn(end) if turn is None else turn.end(end))
        return end


class ToolSubset:
    """Some of the tools of a toolbox."""

    def __init__(self, toolbox: Toolbox, specs: Sequence[ToolSpec]) -> None:
        self._toolbox = toolbox
        self._specs = tuple(specs)
        self._names = frozenset(spec.name for spec in specs)
        self.servers = toolbox.servers
        self.agents = toolbox.agents
        self.restart = toolbox.restart
        self.prepare = toolbox.prepare
        self.run = toolbox.run

    def specs(self) -> tuple[ToolSpec, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._specs

    def skills(self) -> tuple[SkillInfo, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._toolbox.skills() if "skill" in self._names else ()

    async def plan(self, call: ToolCall) -> PlannedCall:
        """See :class:`crow.tools.Toolbox`."""
        plan = await self._toolbox.plan(call)
        if call.name in self._names:
            return plan
        fault = f'This task has no tool "{call.name}". It has: {", ".join(spec.name for spec in self._specs)}.'
        return PlannedCall(announcement=plan.announcement, access="none", fault=fault)


class SubAgentClient:
    """The client of a sub-agent. It passes on the sub-agent's calls, and shows its text as progress of the call that
    started the task."""

    def __init__(self, client: Client, log: BranchLog, on_output: OnOutput) -> None:
        self.ask = client.ask
        self.elicit = client.elicit
        self.finish_question = client.finish_question
        self.takes_notices = False
        self.answers: list[int] = []
        self.branch: Branch | None = None
        self._client = client
        self._log = log
        self._on_output = on_output
        self._lines: list[str] = []
        self._text = ""
        self._answer = ""
        self._shown_at = 0.0

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        return self._client.question_kinds

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
        match event:
            case CallAnnounced(announcement=announcement):
                self._lines += [line for line in (self._text.strip(), f"● {announcement.title}") if line]
                self._text = ""
                await self._client.publish(event)
                await self._show()
            case CallProgressed() | CallEnded() | EntryStored(entry=Entry(body=Started() | ToolResult())):
                await self._client.publish(event)
            case EntryStored(entry=entry):
                self._add(entry)
            case TextShown(text=text):
                self._text += text
                if time.monotonic() - self._shown_at >= PROGRESS_EVERY_S:
                    await self._show()
            case _:
                pass

    def _add(self, entry: Entry) -> None:
        if isinstance(entry.body, Assistant):
            assert self.branch is not None, "the branch is set before the turn runs"
            self.answers.append(entry.id)
            self._log.adopt(entry.id, self.branch)
            self._answer = entry.body.text

    async def _show(self) -> None:
        self._shown_at = time.monotonic()
        text = "\n".join([*self._lines[-50:], self._text.strip()]).strip()
        await self._on_output(text[-PROGRESS_CHARS:])

    def result(self, task_id: str, end: TurnEnd, usage: Usage | None, cost: float | None) -> SubagentResult:
        """The result of the task, for the agent that delegated it. `usage` and `cost` (USD) are for this run only."""
        text = self._answer
        if end.stop == "error":
            text = f"{text}\n\nThe task failed: {end.detail}".strip()
        elif end.stop != "end_turn":
            text = f"{text}\n\n[the task ended early: {end.stop}]".strip()
        return SubagentResult(
            id=task_id,
            text=text,
            is_error=end.stop != "end_turn",
            steps=len(self.answers),
            usage=usage,
            cost=cost,
        )


def allowed_specs(specs: Sequence[ToolSpec], names: Sequence[str] | None) -> tuple[ToolSpec, ...]:
    """The tools that a task may use. :raises ~crow.domain.errors.ArgumentError: a task cannot use one of `names`."""
    allowed = {spec.name: spec for spec in specs if spec.name not in ONLY_FOR_THE_SESSION}
    if names is None:
        return tuple(allowed.values())
    for name in names:
        if name not in allowed:
            raise ArgumentError(f'task: tools contains "{name}"; a task can only use {", ".join(allowed)}')
    return tuple(spec for name, spec in allowed.items() if name in names)
