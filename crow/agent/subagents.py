"""Sub-agents: the delegate port.

Strategy: a sub-agent is a turn on a branch of its own, in the task of the call that wants it. Its conversation is
stored like any other, with `parent_id`; what it calls is announced, judged and asked about as the session's own calls
are, under the session's id; of its words the client sees the newest lines as progress of the call. It cannot delegate.
Knows protocols only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from crow.agent import Client, new_message_id
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.prompt import Briefing
from crow.agent.recall import BranchLog
from crow.agent.tool_calls import Permissions
from crow.agent.turn import Turn
from crow.domain.entries import Assistant, Entry, NewEntry, Started, ToolResult, TurnEnd
from crow.domain.errors import ArgumentError, CrowError, NoSuchSession
from crow.domain.events import CallAnnounced, CallEnded, CallProgressed, ElicitationKind, EntryStored, Event, TextShown
from crow.domain.messages import Text, ToolCall, ToolSpec, Usage
from crow.llm import Model
from crow.store import NewSession, SessionChanges, Store
from crow.tools import OnOutput, Outcome, PlannedCall, ServerStatus, SkillInfo, SubagentResult, Task, Toolbox

__all__ = ["SubAgents"]

OWN_TO_THE_SESSION = frozenset({"task", "update_plan", "recall"})
SHOWN_EVERY_S = 0.1
SHOWN_CHARS = 2_000
END_S = 5.0
WORDS = (
    "You are a sub-agent: another agent gave you this task and reads your last answer, nothing else of what you do. "
    "Answer with all that it needs to know, and do not ask back."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgents:
    """Runs the tasks of one session. `compactor` makes room on a branch; `steps` bounds the requests of a task."""

    store: Store
    parent: Branch
    client: Client
    log: BranchLog
    permissions: Permissions
    model: Callable[[str], Awaitable[Model]]
    compactor: Callable[[Branch, Model, Briefing], Awaitable[Compactor]]
    steps: Callable[[], int]
    running: set[str] = field(default_factory=set)

    async def delegate(self, call_id: str, task: Task, toolbox: Toolbox, on_output: OnOutput) -> SubagentResult:  # noqa: ARG002
        """See :class:`crow.tools.SubagentRunner`."""
        tools = ToolSubset(toolbox, chosen(toolbox.specs(), task.tools))
        watcher = Watcher(self.client, self.log, on_output)
        branch = watcher.branch = await self._open(task, watcher)
        task_id = branch.row.id
        self.running.add(task_id)
        try:
            return await self._run(branch, task, tools, watcher)
        finally:
            self.running.discard(task_id)
            self.log.forget(watcher.answers)

    async def _open(self, task: Task, client: Client) -> Branch:
        """The branch of a new task, or of the one to go on with.

        :raises ~crow.domain.errors.ArgumentError: there is none to go on with.
        """
        row = self.parent.row
        if task.resume is None:
            new = NewSession(
                id=f"task-{secrets.token_hex(8)}",
                cwd=row.cwd,
                model=row.model,
                mode=row.mode,
                additional_directories=row.additional_directories,
                config={**row.config, "system_prompt_append": appended(row.config.get("system_prompt_append"))},
                parent_id=row.id,
                title=task.title,
            )
            await self.store.create_session(new)
            return Branch(self.store, client, await self.store.open_session(new.id))
        unknown = ArgumentError(f'task: there is no task "{task.resume}" of this session to go on with')
        if task.resume in self.running:
            raise ArgumentError(f"task: {task.resume} is still running; wait for it to end")
        try:
            tail = await self.store.open_session(task.resume)
        except NoSuchSession:
            raise unknown from None
        if tail.row.parent_id != row.id:
            raise unknown
        branch = Branch(self.store, client, tail)
        await branch.change(SessionChanges(mode=row.mode, model=row.model))
        return branch

    async def _run(self, branch: Branch, task: Task, tools: ToolSubset, watcher: Watcher) -> SubagentResult:
        """One prompt in the branch, to its end. Cancelled or failed, it is ended all the same."""
        with anyio.CancelScope(shield=True):
            await branch.claim(new_message_id(), parts=(Text(text=task.prompt),))
        turn: Turn | None = None
        failure = ""
        end = TurnEnd(stop="end_turn")
        try:
            model = await self.model(branch.row.model)
            briefing = Briefing(branch)
            await anyio.to_thread.run_sync(briefing.read)
            await briefing.begin_turn(tools.specs(), tools.servers(), tools.skills())
            turn = Turn(
                branch,
                await self.compactor(branch, model, briefing),
                tools,
                steps=self.steps(),
                briefing=briefing,
                permissions=self.permissions,
            )
            end = TurnEnd(stop=await turn.run())
        except anyio.get_cancelled_exc_class():
            await ended(branch, turn, TurnEnd(stop="cancelled"))
            raise
        except CrowError as error:
            failure = str(error)
            end = TurnEnd(stop="error", detail=failure)
        except Exception:
            await ended(branch, turn, TurnEnd(stop="error", detail="Internal error"))
            raise
        await ended(branch, turn, end)
        return watcher.delegated(branch.row.id, end, failure)


class ToolSubset:
    """A toolbox with some of the tools of another."""

    def __init__(self, toolbox: Toolbox, specs: Sequence[ToolSpec]) -> None:
        self._toolbox = toolbox
        self._specs = tuple(specs)
        self._names = frozenset(spec.name for spec in specs)

    def specs(self) -> tuple[ToolSpec, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._specs

    def servers(self) -> tuple[ServerStatus, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._toolbox.servers()

    def skills(self) -> tuple[SkillInfo, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return self._toolbox.skills() if "skill" in self._names else ()

    async def restart(self, name: str | None = None) -> tuple[str, ...]:
        """See :class:`crow.tools.Toolbox`."""
        return await self._toolbox.restart(name)

    async def offer(self, call: ToolCall) -> PlannedCall:
        """See :class:`crow.tools.Toolbox`."""
        offer = await self._toolbox.offer(call)
        if call.name in self._names:
            return offer
        fault = f'No tool "{call.name}" for this task. There are: {", ".join(spec.name for spec in self._specs)}.'
        return PlannedCall(announcement=offer.announcement, access="none", fault=fault)

    async def run(
        self, call: ToolCall, call_id: str, on_output: OnOutput, *, judged: PlannedCall | None = None
    ) -> Outcome:
        """See :class:`crow.tools.Toolbox`."""
        return await self._toolbox.run(call, call_id, on_output, judged=judged)


class Watcher:
    """The client of a sub-agent: its calls go to the session's client, its words become progress of the call."""

    def __init__(self, client: Client, log: BranchLog, on_output: OnOutput) -> None:
        self.ask = client.ask
        self.elicit = client.elicit
        self.elicited = client.elicited
        self.answers: list[int] = []
        self.branch: Branch | None = None
        self._client = client
        self._log = log
        self._on_output = on_output
        self._lines: list[str] = []
        self._text = ""
        self._answer = ""
        self._shown_at = 0.0
        self._cost: float | None = None
        self._usage: list[Usage] = []

    @property
    def takes_notices(self) -> bool:
        """See :class:`crow.agent.Client`."""
        return False

    @property
    def elicits(self) -> frozenset[ElicitationKind]:
        """See :class:`crow.agent.Client`."""
        return self._client.elicits

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
                self._take(entry)
            case TextShown(text=text):
                self._text += text
                if time.monotonic() - self._shown_at >= SHOWN_EVERY_S:
                    await self._show()
            case _:
                pass

    def _take(self, entry: Entry) -> None:
        if entry.cost is not None:
            self._cost = (self._cost or 0.0) + entry.cost
        if entry.usage is not None:
            self._usage.append(entry.usage)
        if isinstance(entry.body, Assistant):
            self.answers.append(entry.id)
            assert self.branch is not None, "set before anything runs"
            self._log.adopt(entry.id, self.branch)
            self._answer = entry.body.text

    async def _show(self) -> None:
        self._shown_at = time.monotonic()
        text = "\n".join([*self._lines[-50:], self._text.strip()]).strip()
        await self._on_output(text[-SHOWN_CHARS:])

    def delegated(self, task_id: str, end: TurnEnd, failure: str) -> SubagentResult:
        """How it ended."""
        text = self._answer
        if end.stop == "error":
            text = f"{text}\n\nThe task failed: {failure}".strip()
        elif end.stop != "end_turn":
            text = f"{text}\n\n[the task ended early: {end.stop}]".strip()
        return SubagentResult(
            id=task_id,
            text=text,
            is_error=end.stop != "end_turn",
            steps=len(self.answers),
            usage=total(self._usage),
            cost=self._cost,
        )


def chosen(specs: Sequence[ToolSpec], names: Sequence[str] | None) -> tuple[ToolSpec, ...]:
    """The tools that a task may use. :raises ~crow.domain.errors.ArgumentError: one that there is not."""
    allowed = {spec.name: spec for spec in specs if spec.name not in OWN_TO_THE_SESSION}
    if names is None:
        return tuple(allowed.values())
    for name in names:
        if name not in allowed:
            raise ArgumentError(f'task: tools names "{name}"; a task can use {", ".join(allowed)}')
    return tuple(spec for name, spec in allowed.items() if name in names)


def appended(extra: object) -> str:
    """What the system message of a sub-agent ends with."""
    return f"{extra}\n\n{WORDS}" if isinstance(extra, str) and extra else WORDS


def total(usages: Sequence[Usage]) -> Usage | None:
    """All of them together; None if there is none."""
    if not usages:
        return None
    return Usage(
        input_tokens=sum(usage.input_tokens or 0 for usage in usages),
        output_tokens=sum(usage.output_tokens or 0 for usage in usages),
        cached_tokens=sum(usage.cached_tokens or 0 for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens or 0 for usage in usages),
    )


async def ended(branch: Branch, turn: Turn | None, end: TurnEnd) -> None:
    """Store what is left of the turn together with its end, and give it back, whatever happens meanwhile."""
    with anyio.move_on_after(END_S, shield=True):
        left = []
        if turn is not None:
            await turn.end_open()
            left = turn.leftover()
        await branch.record([*left, NewEntry(body=end)], release=True)
