"""Subagents: each runs a task as one turn in a conversation of its own.

The call that gives a task waits until the task has ended (`_run`) or returns at once (`_start`). In both cases, the
task is opened, begun, worked on, ended and forgotten. The answer of a task in the background goes into the session's
inbox.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread

from crow.agent import Client
from crow.agent.background import after_delay
from crow.agent.history.branch import Branch
from crow.agent.history.recall import BranchLog
from crow.agent.permissions.judge import Permissions
from crow.agent.subagents.clients import SubagentClient, client_for
from crow.agent.subagents.context import attached_files, state_part
from crow.agent.subagents.kinds import SUBAGENT_ROLE, Speciality
from crow.agent.subagents.tool_subset import ToolSubset, tools_for
from crow.agent.turns.adapters import Adapters
from crow.agent.turns.factory import TurnFactory
from crow.agent.turns.inbox import Inbox
from crow.agent.turns.turn import Turn
from crow.domain.entries import TurnEnd
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession, SessionBusy, StoreError
from crow.domain.messages import Part, Text
from crow.domain.rendering import parts_text
from crow.domain.subagents import TASK_WORDS, resume_hint
from crow.domain.text import title_line
from crow.store import NewSession, SessionChanges
from crow.tools import OnOutput, SubagentResult, Task, Toolbox
from crow.tools.limits import FairLimiter

logger = logging.getLogger(__name__)

_TASKS_PER_TURN = 50
_SLOTS = FairLimiter(32, each=8)
"""Limits how many subagents run at the same time: one limit is for the whole process, the other for each session. A
session is identified by its branch."""

_MAX_BACKGROUND = 8
"""At most this many subagents of a session work in the background at the same time."""

_RENEW_S = 20.0
"""The lease of a subagent in the background is renewed at this interval, in seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningTask:
    """A subagent at work, from `Subagents._open` until it is forgotten.

    The task is opened, then begun (its turn is claimed and its prompt stored), then worked on, then ended (`client.end`
    and `ended` are set). A task in the background may have to wait for a slot after it has begun.
    """

    branch: Branch
    kind: Speciality
    tools: ToolSubset
    client: SubagentClient
    is_background: bool = False
    """Whether the turn that gave the task goes on without waiting for it."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelling this scope ends the subagent's work, but not the turn that gave the task."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when the work has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subagents:
    """Runs the tasks of one session. Implements :class:`crow.tools.SubagentRunner`.

    A task's conversation is stored as a session whose `parent_id` is the id of this session. The permissions of this
    session apply to the subagent's calls. An editor that shows subagents shows each as a session of its own. For other
    editors, the subagent's calls are announced under this session's id.
    """

    adapters: Adapters
    parent: Branch
    """The branch of the session."""
    client: Client
    log: BranchLog
    permissions: Permissions
    turns: TurnFactory
    inbox: Inbox
    """Gets the answers of the tasks that run in the background."""
    tasks: anyio.abc.TaskGroup
    """The task group of the session, in which background tasks run."""
    running: dict[str, RunningTask] = field(default_factory=dict)
    """Maps ids to the tasks that run now."""
    started: Counter[int] = field(default_factory=Counter)
    """Counts the tasks of each turn."""
    opening: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    """Held while a task is opened, because the calls of one step may open tasks at the same time."""

    async def delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        """See :class:`crow.tools.SubagentRunner`."""
        turn = self.parent.turn
        if self.started[turn] >= _TASKS_PER_TURN:
            raise ArgumentError(
                f"task: this turn has started {_TASKS_PER_TURN} tasks, and no turn may start more; do the rest yourself"
            )
        self.started[turn] += 1
        if task.background:
            return await self._start(call_id, task, toolbox, on_output)
        async with _SLOTS.slot(self.parent):
            return await self._run(call_id, task, toolbox, on_output)

    async def _run(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        running = await self._open(call_id, task, toolbox, on_output)
        branch, cost = running.branch, running.branch.row.cost
        try:
            with running.scope:
                await self._begin(running, task)
                await self._work(running)
            spent = round(branch.row.cost - cost, 12)
            changes = await self._changes(running)
            return replace(running.client.result(branch.row.id, branch.usage.turn, spent or None), changes=changes)
        finally:
            await self._forget(running)

    async def _start(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
        """Start a task in the background."""
        running = await self._open(call_id, task, toolbox, on_output)
        task_id = running.branch.row.id
        try:
            words = f'{TASK_WORDS}"{task.title}" ({task_id}), which you started in the background,'
            with anyio.CancelScope(shield=True):
                await self.inbox.expect(
                    call_id,
                    f"{words} was interrupted, because crow ended while it worked.{resume_hint(task_id)}",
                )
            await self._begin(running, task)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.inbox.drop(call_id)
                await self._forget(running)
            raise
        self.tasks.start_soon(self._work_in_background, call_id, words, running)
        return SubagentResult(id=task_id, text="", is_running=True)

    async def _work_in_background(self, call_id: str, words: str, running: RunningTask) -> None:
        branch, client = running.branch, running.client
        try:
            async with after_delay(_RENEW_S, partial(self._renew_lease, branch.row.id), again=True):
                with running.scope:
                    async with _SLOTS.slot(self.parent):
                        await self._work(running)
                # the task was cancelled while it waited for a slot
                if running.scope.cancelled_caught and client.end is None:
                    await self._end(running, None, TurnEnd(stop="cancelled"))
        except StoreError as error:
            client.end = TurnEnd(stop="error", detail=str(error))
        except Exception:
            logger.exception("The subagent %s failed", branch.row.id)
            client.end = TurnEnd(stop="error", detail="Internal error")
        finally:
            with anyio.CancelScope(shield=True):
                text, remark = client.report(words, await self._changes(running))
                await self._forget(running)
                await self.inbox.add(call_id, text, title=title_line(remark), remark=f"({remark})")

    async def _open(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> RunningTask:
        """Open a new task, or the task to resume, and add it to the running tasks.

        :raises ~crow.domain.errors.ArgumentError: the kind does not allow the task, too many tasks work in the
            background, there is no task to resume, or the task to resume is still running.
        """
        kind = await self._kind(task)
        tools = tools_for(task, kind, Speciality.stored(self.parent.row.config), toolbox)
        client = client_for(self.client, self.log, call_id, on_output, is_background=task.background)
        async with self.opening:
            if task.background and sum(each.is_background for each in self.running.values()) >= _MAX_BACKGROUND:
                raise ArgumentError(
                    f"task: {_MAX_BACKGROUND} tasks already work in the background; wait until one ends"
                )
            client.branch = branch = await self._branch(task, client, kind)
            self.running[branch.row.id] = running = RunningTask(
                branch=branch, kind=kind, tools=tools, client=client, is_background=task.background
            )
        return running

    async def _begin(self, running: RunningTask, task: Task) -> None:
        """Claim the turn, store the task's prompt, and show that the subagent starts."""
        branch, client = running.branch, running.client
        parts = await self._parts(task, branch)
        try:
            with anyio.CancelScope(shield=True):
                await branch.claim(client.message_id, parts=parts)
        except SessionBusy as error:
            raise ArgumentError(f"task: {branch.row.id} is in use: {error}") from error
        try:
            await client.begin(branch, parts_text(parts))
        except BaseException:
            await self._end(running, None, TurnEnd(stop="cancelled"))
            raise

    async def _work(self, running: RunningTask) -> None:
        """Run the turn that has begun, and end it even if it is cancelled or fails."""
        branch, turn = running.branch, None
        end = TurnEnd(stop="error", detail="Internal error")
        try:
            async with self._own_tools(running) as own:
                permissions = running.kind.permissions(running.client.permissions(self.permissions))
                model = await self.adapters.model(branch.row.model)
                worker = self.turns.worker(branch, permissions)
                await anyio.to_thread.run_sync(worker.briefing.read, permissions.may_read())
                await self.turns.offer(worker, own)
                compactor = await self.turns.compactor(worker, model)
                turn = self.turns.turn(worker, compactor, own, steps=self.adapters.settings().steps_per_turn)
                end = TurnEnd(stop=await turn.run())
        except anyio.get_cancelled_exc_class():
            end = TurnEnd(stop="cancelled")
            raise
        except CrowError as error:
            end = TurnEnd(stop="error", detail=str(error))
        finally:
            await self._end(running, turn, end)

    async def _end(self, running: RunningTask, turn: Turn | None, end: TurnEnd) -> None:
        """Store and show how the work has ended. `turn` is None if no turn was made."""
        branch, client = running.branch, running.client
        client.end = end
        try:
            await (branch.end_turn(end) if turn is None else turn.end(end))
        except StoreError as error:
            client.end = TurnEnd(stop="error", detail=str(error))
        self._set_ended(running)
        await client.finish(branch)

    async def _forget(self, running: RunningTask) -> None:
        """Count the usage of a task, and drop the task from the session's memory. What is stored stays."""
        running.client.close()
        self.log.forget(running.client.answers)
        await self._count(running.branch)
        self._set_ended(running)

    def _set_ended(self, running: RunningTask) -> None:
        if self.running.get(running.branch.row.id) is running:  # otherwise, the task was resumed meanwhile
            del self.running[running.branch.row.id]
            running.ended.set()

    async def _count(self, branch: Branch) -> None:
        """Add the usage of a task to the running turn of the session, or to its next turn if no turn is running. The
        store has already added this usage to the session's row."""
        used = branch.usage.turn
        if used is not None:
            is_idle = self.parent.claimed_to is None
            (self.parent.usage.add_idle if is_idle else self.parent.usage.add)(used)
            with anyio.CancelScope(shield=True), suppress(StoreError):
                await self.parent.refresh_cost()

    def cancel(self, task_id: str) -> bool:
        """Cancel the work of one subagent. Return False if the subagent is not running."""
        running = self.running.get(task_id)
        if running is not None:
            running.scope.cancel()
        return running is not None

    def cancel_background(self) -> None:
        """Cancel the tasks that run in the background."""
        for running in self.running.values():
            if running.is_background:
                running.scope.cancel()

    async def wait_ended(self) -> None:
        """Wait until no task is running."""
        while self.running:
            await next(iter(self.running.values())).ended.wait()

    async def check_ended(self, task_id: str) -> None:
        """See :class:`crow.tools.SubagentRunner`."""
        if task_id in self.running:
            raise ArgumentError(f"task: {task_id} is still running; wait for it to end")
        try:
            row = await self.adapters.store.session(task_id)
        except NoSuchSession:
            row = None
        if row is None or row.parent_id != self.parent.row.id:
            raise ArgumentError(f'task: this session has no task "{task_id}"')

    async def _kind(self, task: Task) -> Speciality:
        """Return the settings that a task gets from its kind. A resumed task keeps its kind. If the task to resume does
        not exist, `_open` raises the error."""
        if task.resume is None:
            kind = Speciality.of(task, self.adapters.models)
        else:
            try:
                kind = Speciality.stored((await self.adapters.store.session(task.resume)).config)
            except NoSuchSession:
                kind = Speciality()
        kind.check_context(task)
        return kind

    async def _branch(self, task: Task, client: Client, kind: Speciality) -> Branch:
        """Return the branch of a new task, or of the task to resume. See `_open` for the errors."""
        store, row = self.adapters.store, self.parent.row
        extra = row.config.get("system_prompt_append")
        append = f"{extra}\n\n{SUBAGENT_ROLE}" if isinstance(extra, str) and extra else SUBAGENT_ROLE
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
        replaced = {**dict.fromkeys(branch.row.config), **config}
        await branch.change(SessionChanges(mode=mode, model=model, config=replaced))
        return branch

    async def _parts(self, task: Task, branch: Branch) -> tuple[Part, ...]:
        """Return the prompt of a task, with the files and the state that the caller gives to the subagent."""
        window = self.adapters.info(branch.row.model).context_window
        files = await attached_files(task.files, self.turns.read_file, window=window)
        state = (state_part(self.parent.projection),) if task.state else ()
        return (Text(text=task.prompt), *files, *state)

    @asynccontextmanager
    async def _own_tools(self, running: RunningTask) -> AsyncIterator[ToolSubset]:
        """Open the tools of a subagent. If the subagent is isolated, the tools work in its layer."""
        if not running.kind.isolated:
            yield running.tools
            return
        async with running.tools.isolated(running.branch.row.id) as own:
            yield ToolSubset(own, running.tools.specs())

    async def _changes(self, running: RunningTask) -> str:
        """Return a text for the model about the changes in the subagent's layer. Return "" if the subagent has no
        layer."""
        if not running.kind.isolated:
            return ""
        try:
            return await running.tools.changes_of(running.branch.row.id)
        except Exception as error:  # the answer is useful even without the changes
            logger.warning("The changes of the subagent %s cannot be shown", running.branch.row.id, exc_info=True)
            return f"[Its changes cannot be shown: {error}.]"

    async def _renew_lease(self, task_id: str) -> None:
        with suppress(StoreError):
            await self.adapters.store.renew_lease(task_id)
