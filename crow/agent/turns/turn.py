"""One turn: from a stored prompt to its stop reason.

    while True:                                     hooks run before and after most of these lines
        tell the model what is new, and make room   prompts added to the turn, news of background work; compaction
        ask the model                               streamed to the client, saved as a draft, stored whole
        if it calls no tool: return why it stopped
        run its calls                               announced, asked about, started, run, stored

A step is stored before its tools run, and a result before the model sees it. So a turn can be cancelled, fail or be
killed at any moment. A failure of the model is raised; a failure of a tool becomes text for the model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import anyio

from crow.agent import new_remark
from crow.agent.compaction.compactor import Compactor
from crow.agent.history.branch import Branch
from crow.agent.hooks import BranchHooks
from crow.agent.permissions.judge import Permissions
from crow.agent.turns.calls import Calls
from crow.agent.turns.cost import Budget
from crow.agent.turns.news import News, WaitingNews
from crow.agent.turns.prompt import Briefing
from crow.agent.turns.requests import Requests, Standby
from crow.domain import errors
from crow.domain.entries import Assistant, NewEntry, StopReason, TurnEnd, User
from crow.tools import Toolbox

_END_S = 5.0
"""When a turn ends, crow tells the clients about its open calls for at most this many seconds."""
_MAX_PAUSES = 10
"""If the endpoint pauses one answer after another, crow asks it to go on at most this many times in a row."""
_PAUSED = (
    "Stopped: the endpoint paused {count} times in a row while it used tools of its own. Send another prompt to "
    "continue."
)
_ONLY_THOUGHT = (
    "The model reached its output limit before it gave an answer. Raise max_output_tokens (in [model] or "
    "[models.NAME]), lower the thought level, or ask for less."
)

FindLateTools: TypeAlias = Callable[[], Awaitable[Toolbox | None]]
"""A function that is called before each step. If servers have become ready since the turn began, it offers their tools
to the model and returns the toolbox with these tools. Otherwise it returns None."""


class Turn:
    """A running turn."""

    def __init__(
        self,
        branch: Branch,
        compactor: Compactor,
        toolbox: Toolbox,
        *,
        briefing: Briefing,
        permissions: Permissions,
        hooks: BranchHooks,
        steps: int,
        bounded_by: str = "limits.steps_per_turn",
        budget: Budget | None = None,
        standby: Standby | None = None,
        inbox: WaitingNews | None = None,
        find_late_tools: FindLateTools | None = None,
    ) -> None:
        """After `steps` requests, or when `budget` is spent, the turn stops with the reason `max_turn_requests`. When
        the steps are used up, the message to the user names `bounded_by` as the limit. If the endpoint is down,
        `standby` returns another model. The turn tells the model what is in `inbox`."""
        self._branch = branch
        self._compactor = compactor
        self._hooks = hooks
        self._calls = Calls(branch, permissions, toolbox, compactor.gauge, hooks)
        self._requests = Requests(branch, compactor, self._calls, standby)
        self._news = News(branch, briefing, inbox)
        self._steps = steps
        self._steps_taken = 0
        self._pauses = 0
        """The number of paused answers since the last answer that was not paused."""
        self._bounded_by = bounded_by
        self._budget = budget
        self._find_late_tools = find_late_tools

    async def run(self) -> StopReason:
        """Work until the model calls no tool and no hook sends another prompt.

        :raises ~crow.domain.errors.ModelError: the endpoint failed, even after retries.
        :raises ~crow.domain.errors.TurnError: the turn cannot go on.
        :raises ~crow.domain.errors.StoreError: a step could not be stored.
        """
        denial = await self._hooks.before_prompt()
        if denial is not None:
            if self._branch.row.parent_id is not None:  # the agent that gave the task sees nothing but the error
                raise errors.TurnError(denial.words)
            await self._branch.record([new_remark(denial.words)])
            return "refusal"
        while True:
            stop = await self._run_steps()
            is_continued = await self._hooks.turn_end(stop, steps=self._steps_taken)
            has_news = self._news.has_news and stop == "end_turn"  # a prompt may arrive during a hook
            if not is_continued and not has_news:
                return stop

    async def _run_steps(self) -> StopReason:
        """Work until the model calls no tool, or until the turn has reached its limit of steps or of cost."""
        while self._steps_taken < self._steps:
            if words := await self._why_stop():
                return await self._stop(words)
            self._steps_taken += 1
            await self._tell_model()
            entry, answer, plans = await self._requests.ask()
            self._pauses = self._pauses + 1 if answer.finish == "paused" else 0
            if self._pauses > _MAX_PAUSES:
                return await self._stop(_PAUSED.format(count=self._pauses))
            if not answer.calls:
                if self._pauses or (self._news.has_news and answer.finish != "refusal"):
                    continue
                return await self._finish(answer)
            results = await self._calls.run(entry, answer, plans)
            if self._calls.dismissed:
                return "cancelled"
            if words := await self._news.check_repetition(results):
                return await self._stop(words)
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        return await self._stop(f"Stopped after {steps} ({self._bounded_by}). Send another prompt to continue.")

    async def _why_stop(self) -> str:
        """Return why the turn may make no further request, or an empty string."""
        return "" if self._budget is None else await self._budget.why_stop(self._branch, self._requests.model.info)

    async def _tell_model(self) -> None:
        """Store what the model has to know before its next request, and make room for it.

        :raises ~crow.domain.errors.TurnError: a hook forbids the request.
        """
        await self._news.deliver()
        if self._find_late_tools is not None and (toolbox := await self._find_late_tools()) is not None:
            self._calls.toolbox = toolbox
        denial = await self._hooks.before_request(step=self._steps_taken, tokens=self._compactor.gauge.used)
        if denial is not None:
            raise errors.TurnError(denial.words)
        await self._compactor.make_room()
        await self._news.remind()

    @property
    def running_calls(self) -> Mapping[str, anyio.CancelScope]:
        """Maps the id of each running call to the call's cancel scope. Cancelling a scope ends only that call. The turn
        goes on."""
        return self._calls.running

    def steer(self, prompt: User) -> None:
        """Add another prompt by the user, which the model sees at its next step."""
        self._news.steer(prompt)

    def mute(self) -> bool:
        """See :meth:`Requests.mute`."""
        return self._requests.mute()

    @property
    def has_run_calls(self) -> bool:
        """Whether at least one call was started."""
        return self._calls.ran

    async def end(self, end: TurnEnd, *, receipt: Sequence[NewEntry] = ()) -> None:
        """Store the end of the turn, together with everything that the turn has not stored yet, and release the turn.
        Cancellation does not interrupt this.

        :raises ~crow.domain.errors.StoreError: the end could not be stored. :meth:`Branch.settle` tries again to store
        it.
        """
        self._branch.store_at_end([*self._requests.unstored_answer(), *self._news.take_steered(), *receipt])
        with anyio.move_on_after(_END_S, shield=True):
            await self._calls.end_open()
        await self._branch.end_turn(end)

    async def _stop(self, reason: str) -> StopReason:
        await self._branch.record([new_remark(reason)])
        return "max_turn_requests"

    async def _finish(self, answer: Assistant) -> StopReason:
        """Return why the turn stops with this answer, which calls no tool."""
        if answer.finish == "length" and not answer.text.strip():
            await self._branch.record([new_remark(_ONLY_THOUGHT)])
        match answer.finish:
            case "length":
                return "max_tokens"
            # ACP drops the prompt if a turn stops with `refusal`. This turn had effects, so it ends with an error.
            case "refusal" if self._calls.ran:
                raise errors.TurnError(f"The model refused to continue: {answer.text or 'it gave no reason'}")
            case "refusal":
                return "refusal"
            case _:
                return "end_turn"
