"""Subagents: each runs a task as one turn in a conversation of its own."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import anyio
import anyio.abc
import anyio.to_thread

from crow.agent import Client, PermissionAnswer, PermissionQuestion, new_message_id
from crow.agent.background import after_delay
from crow.agent.history.branch import Branch
from crow.agent.history.recall import BranchLog
from crow.agent.permissions.judge import Permissions
from crow.agent.subagents.context import attached_files, state_part
from crow.agent.subagents.kinds import SUBAGENT_ROLE, Speciality
from crow.agent.turns.adapters import Adapters
from crow.agent.turns.factory import TurnFactory
from crow.agent.turns.inbox import Inbox
from crow.agent.turns.turn import Turn
from crow.domain.entries import Assistant, Entry, Started, ToolResult, TurnEnd
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession, SessionBusy, StoreError
from crow.domain.events import (
    CallAnnounced,
    CallEnded,
    CallProgressed,
    Elicitation,
    ElicitationAnswer,
    ElicitationKind,
    EntryStored,
    Event,
    SessionMessage,
    SubagentChanged,
    SubagentLinked,
    TextShown,
)
from crow.domain.messages import Part, Text, ToolCall, ToolSpec, Usage
from crow.domain.rendering import parts_text
from crow.domain.subagents import TASK_WORDS, answer_id, order_id, resume_hint
from crow.domain.text import title_line
from crow.store import NewSession, SessionChanges
from crow.tools import OnOutput, PlannedCall, SkillInfo, SubagentResult, Task, Toolbox
from crow.tools.limits import FairLimiter

logger = logging.getLogger(__name__)

_ONLY_FOR_THE_SESSION = frozenset({"task", "update_plan", "recall"})
"""Tools that subagents do not get."""
_CALL_TOOL = "call_tool"
_FINDING = frozenset({"find_tools", _CALL_TOOL})
"""The tools that find and call deferred tools."""

_NO_TOOLS = "There are no tools in this conversation. Answer without them."
_NAMES_TOLD = 50
"""An error names at most this many tools."""
_TASKS_PER_TURN = 50
_SLOTS = FairLimiter(32, each=8)
"""Limits how many subagents run at the same time: one limit is for the whole process, the other for each session. A
session is identified by its branch."""

_MAX_BACKGROUND = 8
"""At most this many subagents of a session work in the background at the same time."""

_RENEW_S = 20.0
"""The lease of a subagent in the background is renewed at this interval, in seconds."""
_PROGRESS_EVERY_S = 0.1
"""The progress of a call is shown at most once in this many seconds, except when the subagent calls a tool."""
_PROGRESS_CHARS = 2_000
"""The progress of a call shows at most this many characters, the newest."""
_END_S = 5.0
"""When a subagent ends, crow waits at most this many seconds for clients to take the news."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningTask:
    """A subagent at work."""

    branch: Branch
    kind: Speciality
    tools: ToolSubset
    client: _SubagentClient
    is_background: bool = False
    """Whether the turn that gave the task goes on without waiting for it."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Cancelling it ends the subagent's work, but not the turn that ordered it."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when the work has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subagents:
    """Runs the tasks of one session. Implements :class:`crow.tools.SubagentRunner`.

    A task's conversation is stored as a session whose `parent_id` is the id of this session. The permissions of this
    session apply to the subagent's calls. An editor that shows subagents shows each as a session of its own. For other
    editors, the calls are announced under the session's id.
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
    """Held while a task is opened. The calls of one step open their tasks at the same time."""

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
            return await self._delegate(call_id, task, toolbox, on_output)

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

    async def _delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:
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
                if running.scope.cancelled_caught and not client.has_ended:
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

    async def _renew_lease(self, task_id: str) -> None:
        with suppress(StoreError):
            await self.adapters.store.renew_lease(task_id)

    async def _forget(self, running: RunningTask) -> None:
        """Count the usage of a task, and remove everything that the session knows of it."""
        running.client.close()
        self.log.forget(running.client.answers)
        await self._count(running.branch)
        if self.running.get(running.branch.row.id) is running:
            del self.running[running.branch.row.id]
            running.ended.set()

    async def _count(self, branch: Branch) -> None:
        """Add the usage of a task to the turn that started the task. The store has already added this usage to the
        session's row."""
        if branch.usage.turn is not None:
            self.parent.usage.add(branch.usage.turn)
            with anyio.CancelScope(shield=True), suppress(StoreError):
                await self.parent.refresh_cost()

    async def _changes(self, running: RunningTask) -> str:
        """Tell the model what a subagent has changed in its layer, if it has one."""
        if not running.kind.isolated:
            return ""
        try:
            return await running.tools.changes_of(running.branch.row.id)
        except Exception as error:  # the answer counts all the same
            logger.warning("The changes of the subagent %s cannot be shown", running.branch.row.id, exc_info=True)
            return f"[Its changes cannot be shown: {error}.]"

    @asynccontextmanager
    async def _own_tools(self, running: RunningTask) -> AsyncIterator[ToolSubset]:
        """Open the tools of a subagent. If it is isolated, they work in its layer."""
        if not running.kind.isolated:
            yield running.tools
            return
        async with running.tools.isolated(running.branch.row.id) as own:
            yield ToolSubset(own, running.tools.specs())

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

    def _tools(self, task: Task, kind: Speciality, toolbox: Toolbox) -> ToolSubset:
        """Return the tools of a task. If the session is itself a subagent with a kind, the limits of that kind apply,
        too."""
        own = Speciality.stored(self.parent.row.config)
        deferred = toolbox.deferred()
        allowed = _allowed_specs(kind.specs(own.specs((*toolbox.specs(), *deferred))), task.tools)
        if _CALL_TOOL in (*(kind.tools or ()), *(task.tools or ())):  # `call_tool` stands for all deferred tools
            allowed = (*allowed, *own.specs(deferred)) if deferred else allowed
        return ToolSubset(toolbox, allowed)

    async def _open(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> RunningTask:
        """Open a new task, or the task to resume, and add it to the running tasks.

        :raises ~crow.domain.errors.ArgumentError: the kind does not allow the task, too many tasks work in the
            background, there is no task to resume, or the task to resume is still running.
        """
        kind = await self._kind(task)
        tools = self._tools(task, kind, toolbox)
        client: _SubagentClient
        if self.client.shows_subagents:
            client = _ShownSubagentClient(self.client, self.log, call_id, is_background=task.background)
        elif task.background:
            client = _HiddenSubagentClient(self.client, self.log, None)
        else:
            client = _SubagentClient(self.client, self.log, on_output)
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

    async def _parts(self, task: Task, branch: Branch) -> tuple[Part, ...]:
        """Return the prompt of a task, with the files and the state that the caller gives to the subagent."""
        window = self.adapters.info(branch.row.model).context_window
        files = await attached_files(task.files, self.turns.read_file, window=window)
        state = (state_part(self.parent.projection),) if task.state else ()
        return (Text(text=task.prompt), *files, *state)

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
        client.end, client.has_ended = end, True
        try:
            await (branch.end_turn(end) if turn is None else turn.end(end))
        except StoreError as error:
            client.end = TurnEnd(stop="error", detail=str(error))
        if self.running.pop(branch.row.id, None) is not None:
            running.ended.set()
        await client.finish(branch)


class ToolSubset:
    """A toolbox with some of the tools of another toolbox."""

    def __init__(self, toolbox: Toolbox, specs: Sequence[ToolSpec]) -> None:
        allowed = {spec.name for spec in specs}
        self._toolbox = toolbox = toolbox.narrowed(allowed)
        self._specs = tuple(spec for spec in toolbox.specs() if spec.name in allowed or spec.name in _FINDING)
        self._names = frozenset(allowed | {spec.name for spec in self._specs})
        self.deferred = toolbox.deferred
        self.narrowed = toolbox.narrowed
        self.isolated = toolbox.isolated
        self.changes_of = toolbox.changes_of
        self.servers = toolbox.servers
        self.agents = toolbox.agents
        self.restart = toolbox.restart
        self.prepare = toolbox.prepare
        self.run = toolbox.run
        self.understood = toolbox.understood

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
        names = ", ".join(spec.name for spec in self._specs)
        fault = f'This task has no tool "{call.name}". It has: {names}.' if names else _NO_TOOLS
        return PlannedCall(announcement=plan.announcement, access="none", fault=fault)


class _SubagentClient:
    """The client of a subagent. It passes the subagent's calls on to the editor, and shows the subagent's text as
    progress of the call that started the task."""

    def __init__(self, client: Client, log: BranchLog, on_output: OnOutput | None) -> None:
        self.answers: list[int] = []
        """The entry ids of the subagent's answers in this run."""
        self.branch: Branch | None = None
        """The subagent's branch. None until it is open."""
        self.end = TurnEnd(stop="cancelled")
        """How the work ended. Until it has ended, how a cancellation would end it."""
        self.has_ended = False
        self.message_id = new_message_id()
        """The message id of the subagent's prompt."""
        self._client = client
        self._log = log
        self._on_output = on_output
        self._lines: list[str] = []
        """The progress so far: a line for each call, and the text before it."""
        self._text = ""
        """The text since the last call."""
        self._answer = ""
        """The text of the subagent's newest answer, which is its result when it ends."""
        self._shown_at = 0.0

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return False

    @property
    def shows_subagents(self) -> bool:
        """See :class:`crow.agent.Client`. A subagent has no subagents."""
        return False

    def open_subagent(self, session_id: str) -> Client:  # noqa: ARG002
        """See :class:`crow.agent.Client`."""
        return self

    def close_subagent(self, session_id: str) -> None:
        """See :class:`crow.agent.Client`."""

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`."""
        return await self._client.ask(question)

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:
        """See :class:`crow.agent.Client`."""
        return await self._client.elicit(question)

    async def finish_question(self, question_id: str) -> None:
        """See :class:`crow.agent.Client`."""
        await self._client.finish_question(question_id)

    def permissions(self, shared: Permissions) -> Permissions:
        """Return what the subagent may do. `shared` are the permissions of the subagent's session, whose mode and
        rules always apply."""
        return shared

    async def begin(self, branch: Branch, prompt: str) -> None:
        """Show that the subagent has received its prompt and starts to work."""

    async def finish(self, branch: Branch) -> None:
        """Show how the work has ended. Cancellation does not interrupt this."""

    def close(self) -> None:
        """Forget the subagent."""

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
                if time.monotonic() - self._shown_at >= _PROGRESS_EVERY_S:
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
        if self._on_output is None:
            return
        self._shown_at = time.monotonic()
        text = "\n".join([*self._lines[-50:], self._text.strip()]).strip()
        await self._on_output(text[-_PROGRESS_CHARS:])

    def result(self, task_id: str, usage: Usage | None, cost: float | None) -> SubagentResult:
        """Return the result of the task, for the agent that delegated the task. `usage` and `cost` (USD) are for this
        run only."""
        text, end = self._answer, self.end
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

    def report(self, words: str, changes: str = "") -> tuple[str, str]:
        """Report how a task in the background has ended. Return a text for the model and a line for the user. Both
        begin with `words`, which name the task. `changes` says what it has changed in its layer."""
        task_id = self.branch.row.id if self.branch is not None else ""
        match self.end.stop:
            case "end_turn":
                remark, more = f"{words} has ended.", f" Its answer:\n{self._answer or '(no answer)'}"
            case "error":
                remark, more = f"{words} has failed: {self.end.detail}", f"\n{self._answer}".rstrip()
            case stop:
                remark, more = f"{words} has ended early: {stop}.", f"\n{self._answer}".rstrip()
        more = "\n".join(filter(None, [more, changes]))
        return f"{remark}{more}{resume_hint(task_id)}", remark.replace(", which you started in the background,", "")


class _HiddenSubagentClient(_SubagentClient):
    """The client of a subagent that works in the background and that the editor cannot show. It never asks the user,
    because a question needs a running turn."""

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
        if isinstance(event, EntryStored):
            self._add(event.entry)

    @property
    def question_kinds(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        return frozenset()

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:  # noqa: ARG002
        """See :class:`crow.agent.Client`."""
        return "cannot_ask"

    async def elicit(self, question: Elicitation) -> ElicitationAnswer:  # noqa: ARG002
        """See :class:`crow.agent.Client`."""
        return ElicitationAnswer(action="cancel")

    def permissions(self, shared: Permissions) -> Permissions:
        """See :class:`_SubagentClient`."""
        return shared.asking(self)


class _ShownSubagentClient(_SubagentClient):
    """The client of a subagent that the editor shows as a session of its own."""

    def __init__(self, client: Client, log: BranchLog, call_id: str, *, is_background: bool = False) -> None:
        super().__init__(client, log, None)
        self.message_id = order_id(call_id)
        self._is_background = is_background
        self._call_id = call_id
        self._session: Client | None = None
        """The editor's session for the subagent. None until the subagent was announced."""
        self._asking = 0
        """How many questions to the user are open."""

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return self._client.takes_notices

    def permissions(self, shared: Permissions) -> Permissions:
        """See :class:`_SubagentClient`. The user is asked in the subagent's session."""
        return shared.asking(self)

    async def begin(self, branch: Branch, prompt: str) -> None:
        """See :class:`_SubagentClient`. Announces the subagent before anything else names it."""
        session_id, parent_id = branch.row.id, branch.row.parent_id or ""
        await self._client.publish(SubagentChanged(session_id=session_id, title=branch.row.title or ""))
        self._session = self._client.open_subagent(session_id)
        order = SessionMessage(message_id=self.message_id, sender=parent_id, recipient=session_id, text=prompt)
        await self._client.publish(order)
        await self._session.publish(order)
        await self._client.publish(SubagentChanged(session_id=session_id, state="running"))
        await self._client.publish(SubagentLinked(call_id=self._call_id, session_id=session_id))

    async def publish(self, event: Event) -> None:
        """See :class:`crow.agent.Client`."""
        if isinstance(event, EntryStored):
            self._add(event.entry)
        if self._session is not None:
            await self._session.publish(event)

    async def ask(self, question: PermissionQuestion) -> PermissionAnswer:
        """See :class:`crow.agent.Client`. While the user is asked, the subagent's state is `requires_action`."""
        assert self._session is not None, "a running subagent was announced"
        assert self.branch is not None, "the branch is set before the turn runs"
        session_id = self.branch.row.id
        self._asking += 1
        try:
            if self._asking == 1:
                await self._client.publish(SubagentChanged(session_id=session_id, state="requires_action"))
            answer = await self._session.ask(question)
        finally:
            self._asking -= 1
        if not self._asking:
            await self._client.publish(SubagentChanged(session_id=session_id, state="running"))
        return answer

    async def finish(self, branch: Branch) -> None:
        """See :class:`_SubagentClient`."""
        if self._session is None:  # the subagent was cancelled before it was announced
            return
        session_id, parent_id = branch.row.id, branch.row.parent_id or ""
        if self.end.stop == "end_turn" and self._answer:
            answer = SessionMessage(
                message_id=answer_id(self._call_id), sender=session_id, recipient=parent_id, text=self._answer
            )
            with anyio.move_on_after(_END_S, shield=True):
                await self._session.publish(answer)
                if self._is_background:  # otherwise, the result of the call shows the answer
                    await self._client.publish(answer)
        with anyio.move_on_after(_END_S, shield=True):
            await self._client.publish(
                SubagentChanged(
                    session_id=session_id,
                    state="idle",
                    stop=self.end.stop,
                    detail=self.end.detail,
                    usage=branch.usage.turn,
                )
            )

    def close(self) -> None:
        """See :class:`_SubagentClient`."""
        if self.branch is not None:
            self._client.close_subagent(self.branch.row.id)


def _allowed_specs(specs: Sequence[ToolSpec], names: Sequence[str] | None) -> tuple[ToolSpec, ...]:
    """Return the tools that a task may use. :raises ~crow.domain.errors.ArgumentError: `names` contains a tool that
    tasks cannot use."""
    allowed = {spec.name: spec for spec in specs if spec.name not in _ONLY_FOR_THE_SESSION}
    if names is None:
        return tuple(allowed.values())
    for name in names:
        if name not in allowed:
            known = ", ".join(islice(allowed, _NAMES_TOLD)) + (", ..." if len(allowed) > _NAMES_TOLD else "")
            raise ArgumentError(f'task: tools contains "{name}"; a task can only use {known}')
    return tuple(spec for name, spec in allowed.items() if name in names)
