"""One turn: from a stored prompt to its stop reason.

    while True:                                     hooks take part before and after most of these lines
        make room                                   compaction, before every request
        ask the model                               streamed to the client, saved as a draft, stored whole
        if it calls no tool: return why it stopped
        run its calls                               announced, asked about, started, run, stored

A step is stored before its tools run, and a result before the model sees it. So a turn can be cancelled, fail or be
killed at any moment. A failure of the model is raised; a failure of a tool becomes text for the model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

import anyio

from crow.agent import Adapters, new_message_id, new_remark
from crow.agent.accounts import Budget, request_entry, usage_of_answer, usage_of_attempt
from crow.agent.background import after_delay
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.hooks import BranchHooks
from crow.agent.inbox import Inbox
from crow.agent.prompt import Briefing
from crow.agent.stream import AnswerDraft
from crow.agent.tool_calls import Calls, Permissions
from crow.domain import errors
from crow.domain.entries import Assistant, Entry, NewEntry, Note, Reminder, StopReason, ToolResult, TurnEnd, User
from crow.domain.errors import (
    BadRequest,
    ContextOverflow,
    ModelTimeout,
    NetworkError,
    Overloaded,
    ProtocolError,
    RateLimited,
)
from crow.domain.events import EntryStored
from crow.domain.messages import Answer, ToolCall
from crow.llm import Attempt, Model, Request, Stream, cost_of
from crow.tools import PlannedCall, Toolbox

logger = logging.getLogger(__name__)

END_S = 5.0
THINKS_S = 0.05
"""If an answer takes longer than this (in seconds), the tools get ready while the model works. By that time, the
request has been sent, so the tools do not delay the request."""

PLAN_S = 0.05
"""If the calls of an answer take longer to plan than this (in seconds), the answer is saved as a draft. A plan may take
long because the editor has to send a file."""
POINT_OUT = frozenset({3, 10, 20})
"""When the number of repetitions reaches one of these numbers, the model is told that it repeats itself."""
GIVE_UP = 30
"""After this number of repetitions, the turn ends."""
MAX_PAUSES = 10
"""If the endpoint pauses in one answer after another, at most this many of them are sent back so that it goes on."""
MAX_CONTINUED = 3
"""If one answer after another breaks off, at most this many of them are continued. If the next answer breaks off too,
the turn ends."""
CONTINUE = (
    "<reminder>Your last answer was cut off by a broken connection. The user has seen it as it stands. Continue "
    "exactly where it stopped, without repeating anything and without a preamble.</reminder>"
)
DOWN = (NetworkError, ModelTimeout, Overloaded, RateLimited)
"""After one of these errors, crow asks the fallback model."""
BROKE_OFF = (
    "Stopped: each of the last {count} answers broke off before its end. What was shown is kept. Check the connection, "
    "then send another prompt to continue."
)
PAUSED = (
    "Stopped: the endpoint paused {count} times in a row while it used tools of its own. Send another prompt to "
    "continue."
)
ONLY_THOUGHT = (
    "The model reached its output limit before it gave an answer. Raise max_output_tokens (in [model] or "
    "[models.NAME]), lower the thought level, or ask for less."
)
REPEATED = (
    "<reminder>You have called {name} {count} times with the same arguments and the same result. Calling it again will "
    "not change that: use the result, try another way, or say what is in the way.</reminder>"
)


FindLateTools: TypeAlias = Callable[[], Awaitable[Toolbox | None]]
"""A function that is called before each step. If servers have become ready since the turn began, it offers their tools
to the model and returns the toolbox with these tools. Otherwise it returns None."""


class Turn:
    """A running turn. After `steps` requests, or when `budget` is spent, it stops with the reason `max_turn_requests`.
    `bounded_by` is a text that says which setting limits the steps; the message to the user contains this text. If the
    endpoint is down, `standby` returns another model, which answers for the rest of the turn. The turn tells the model
    what is in `inbox`."""

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
        inbox: Inbox | None = None,
        find_late_tools: FindLateTools | None = None,
    ) -> None:
        self._branch = branch
        self._model = compactor.model
        self._compactor = compactor
        self._gauge = compactor.gauge
        self._briefing = briefing
        self._hooks = hooks
        self._calls = Calls(branch, permissions, toolbox, compactor.gauge, hooks)
        self._repetition = Repetition()
        self._draft: AnswerDraft | None = None
        self._answer: Answer | None = None
        self._stream: Stream | None = None
        self._sent = self._counted = 0
        self._is_listening = False
        self._continued = 0
        self._pauses = 0
        self._steps = steps
        self._steps_taken = 0
        self._bounded_by = bounded_by
        self._budget = budget
        self._standby = standby
        self._inbox = inbox
        self._find_late_tools = find_late_tools
        self._steered: list[User] = []

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
            if not is_continued and not (self._has_news and stop == "end_turn"):  # a prompt may arrive during a hook
                return stop

    @property
    def _has_news(self) -> bool:
        """Whether the model has to be told something before the turn may end."""
        return bool(self._steered) or (self._inbox is not None and self._inbox.has_news)

    async def _run_steps(self) -> StopReason:
        """Work until the model calls no tool, or until the turn has reached its limit of steps or of cost."""
        while self._steps_taken < self._steps:
            if self._budget is not None and (words := await self._budget.why_stop(self._branch, self._model.info)):
                return await self._stop(words)
            self._steps_taken += 1
            if self._steered:
                await self._branch.record(self._take_steered())
            if self._inbox is not None:
                await self._inbox.deliver()
            if self._find_late_tools is not None and (toolbox := await self._find_late_tools()) is not None:
                self._calls.toolbox = toolbox
            denial = await self._hooks.before_request(step=self._steps_taken, tokens=self._gauge.used)
            if denial is not None:
                raise errors.TurnError(denial.words)
            await self._compactor.make_room()
            await self._remind()
            entry, answer, plans = await self._ask()
            self._pauses = self._pauses + 1 if answer.finish == "paused" else 0
            if not answer.calls:
                if self._has_news and answer.finish != "refusal":
                    continue
                if self._pauses > MAX_PAUSES:
                    return await self._stop(PAUSED.format(count=self._pauses))
                if self._pauses:
                    continue
                if answer.finish == "length" and not answer.text.strip():
                    await self._branch.record([new_remark(ONLY_THOUGHT)])
                return self._stop_reason(answer)
            self._repetition.add(await self._calls.run(entry, answer, plans))
            if self._calls.dismissed:
                return "cancelled"
            name, count = self._repetition.name, self._repetition.count
            if count >= GIVE_UP:
                return await self._stop(
                    f"Stopped: {name} was called {count} times with the same arguments and the same result. "
                    "Say what should be done differently."
                )
            if count in POINT_OUT:
                text = REPEATED.format(name=name, count=count)
                await self._branch.record([NewEntry(body=Reminder(text=text))])
        steps = "1 step" if self._steps == 1 else f"{self._steps} steps"
        return await self._stop(f"Stopped after {steps} ({self._bounded_by}). Send another prompt to continue.")

    @property
    def running_calls(self) -> Mapping[str, anyio.CancelScope]:
        """Maps the id of each running call to the call's cancel scope. Cancelling a scope ends only that call. The turn
        goes on."""
        return self._calls.running

    def steer(self, prompt: User) -> None:
        """Add another prompt by the user, which the model sees at its next step."""
        self._steered.append(prompt)

    def mute(self) -> bool:
        """Stop showing the answer that the model is giving. Return False if the model is not giving an answer.

        If this returns True, the turn does nothing until it is cancelled, and the caller has to cancel it. In this way,
        the turn's end can be stored while the connection to the model is still being closed.
        """
        if self._draft is None or not self._is_listening:
            return False
        self._draft.mute()
        return True

    async def end(self, end: TurnEnd) -> None:
        """Store the end of the turn, together with everything that the turn has not stored yet, and release the turn.
        Cancellation does not interrupt this.

        :raises ~crow.domain.errors.StoreError: the end could not be stored. It stays pending for :meth:`Branch.settle`.
        """
        self._branch.store_at_end([*self._unstored_answer(), *self._take_steered()])
        with anyio.move_on_after(END_S, shield=True):
            await self._calls.end_open()
        await self._branch.end_turn(end)

    def _unstored_answer(self) -> list[NewEntry]:
        """Return the answer that was shown but not stored. It is marked as interrupted unless it is complete."""
        draft, stream = self._draft, self._stream
        if draft is None:
            return []
        attempts = stream.attempts() if stream is not None else ()
        if self._answer is not None:
            self._count(attempts[:-1])
            return [self._assistant(draft.message_id, self._answer)]
        if not (draft.text or draft.thought):
            self._count(attempts)
            return []
        self._count(attempts[:-1])
        answer = Answer(text=draft.text, thought=draft.thought, finish="interrupted")
        usage = usage_of_attempt(attempts[-1], sent=self._sent) if attempts else None
        return [self._assistant(draft.message_id, replace(answer, usage=usage))]

    def _count(self, attempts: Sequence[Attempt]) -> None:
        """Store the usage of requests that gave no answer. Each request is counted only once."""
        info, new = self._model.info, attempts[self._counted :]
        self._counted += len(new)
        self._branch.store_with_next([request_entry(each, info, sent=self._sent, purpose="answer") for each in new])

    def _take_steered(self) -> list[NewEntry]:
        """Return the prompts that the model has not seen yet. Storing them removes them from the inbox."""
        steered, self._steered = self._steered, []
        return [NewEntry(body=prompt) for prompt in steered]

    async def _stop(self, reason: str) -> StopReason:
        await self._branch.record([new_remark(reason)])
        return "max_turn_requests"

    async def _remind(self) -> None:
        due = self._briefing.reminder()
        if due is not None:
            text, notes = due
            await self._branch.record([*notes, NewEntry(body=Reminder(text=f"<reminder>\n{text}\n</reminder>"))])

    async def _ask(self) -> tuple[int, Assistant, Sequence[PlannedCall]]:
        """Get one answer, store it and show it. Returns its entry id, the answer, and the plans of its calls.

        If a stream breaks after text was shown, the model is asked once to continue. The model is not asked if each of
        the last `MAX_CONTINUED` answers had to be continued. Text that the continuation repeats is left out. If a
        request failed and was too long, or may have been too long, crow compacts the context and sends the request
        again. If the endpoint is down and the user has named a fallback model, the request is sent to the fallback
        model.
        """
        is_continued = False
        before = ""
        while True:
            try:
                asked = await self._ask_once(before)
            except BadRequest as error:
                if not error.is_unclear or not await self._compactor.refused_unclearly(error):
                    raise
            except (ContextOverflow, NetworkError, ModelTimeout, Overloaded, ProtocolError, RateLimited) as error:
                text = self._draft.text if self._draft is not None else ""
                shown = self._unstored_answer()
                if shown:
                    await self._store_answer(*shown)
                    if is_continued:
                        raise
                    if self._continued == MAX_CONTINUED:
                        await self._branch.record([new_remark(BROKE_OFF.format(count=MAX_CONTINUED + 1))])
                        raise
                    is_continued = True
                    self._continued += 1
                if isinstance(error, ContextOverflow):
                    await self._compactor.overflowed(error)
                elif not shown and not await self._fall_back(error):
                    raise
                if text.strip():  # without text there is nothing to continue, so the model is just asked again
                    before = text
                    await self._branch.record([NewEntry(body=Reminder(text=CONTINUE))])
            else:
                self._continued = self._continued if is_continued else 0
                if self._standby is not None:
                    await self._standby.answered()
                return asked

    async def _fall_back(self, error: errors.ModelError) -> bool:
        """If the endpoint is down, use another model for the rest of the turn. Return whether another model is used
        from now on."""
        if self._standby is None or not isinstance(error, DOWN):
            return False
        model = await self._standby.next(error)
        if model is None:
            return False
        self._model = model
        await self._compactor.use(model)
        await self._compactor.make_room()
        return True

    async def _ask_once(self, before: str) -> tuple[int, Assistant, Sequence[PlannedCall]]:
        context = self._branch.context()
        request = Request(
            messages=context.messages,
            tools=context.tools,
            max_output_tokens=self._gauge.max_output_tokens(),
            cache_key=self._branch.row.id,
            thought_level=self._branch.thought_level,
        )
        self._draft = draft = AnswerDraft(self._branch, new_message_id(), before=before)
        self._stream, self._sent, self._counted = None, self._gauge.used(), 0
        self._branch.watch_parts(self._model.info)
        await self._note_parts()
        self._is_listening = True
        try:
            async with after_delay(THINKS_S, self._calls.prepare), self._model.stream(request) as self._stream:
                answer = await draft.follow(self._stream)
        finally:
            if draft.is_muted:  # the caller of `mute` is cancelling this turn; wait for that
                await anyio.sleep_forever()
            self._is_listening = False
        calls = self._calls.understood(answer.calls)
        self._answer = answer = replace(answer, calls=calls, usage=usage_of_answer(answer, sent=self._sent))
        await self._note_parts()
        plans: Sequence[PlannedCall] = ()
        if answer.calls:
            async with after_delay(PLAN_S, self._save_draft):
                plans = await self._calls.plan(answer.calls)
        self._count(self._stream.attempts()[:-1])
        entry = await self._store_answer(self._assistant(draft.message_id, answer, plans))
        await self._gauge.answered()
        await self._gauge.tell()
        assert isinstance(entry.body, Assistant)
        return entry.id, entry.body, plans

    async def _note_parts(self) -> None:
        """Record it if messages are written in another form from now on, because this breaks the cache."""
        if changed := self._branch.changed_parts(self._model.info):
            await self._branch.record([NewEntry(body=Note(about="dialect", value=", ".join(changed)))])

    async def _save_draft(self) -> None:
        """Save the shown text of an answer that cannot be stored yet. Ignore a failure, because the whole answer is
        stored later."""
        if self._draft is not None:
            with suppress(errors.StoreError):
                await self._draft.save()

    async def _store_answer(self, new: NewEntry) -> Entry:
        """Store the answer that was shown, then publish it. If the turn is cancelled while the answer is being
        published, the end of the turn does not store the answer a second time."""
        (entry,) = await self._branch.store_only([new])
        self._draft = self._answer = self._stream = None
        await self._branch.publish(EntryStored(entry=entry))
        return entry

    def _assistant(self, message_id: str, answer: Answer, plans: Sequence[PlannedCall] = ()) -> NewEntry:
        info = self._model.info
        return NewEntry(
            body=Assistant(
                text=answer.text,
                message_id=message_id,
                thought=answer.thought,
                calls=answer.calls,
                finish=answer.finish,
                opaque=answer.opaque,
                reasoning_field=answer.reasoning_field,
                endpoint=info.endpoint,
                wire=answer.wire,
                announcements=tuple(plan.announcement for plan in plans),
                cut=self._gauge.cut_calls(answer.calls) if answer.calls else None,
            ),
            model=info.name,
            usage=answer.usage,
            cost=cost_of(answer.usage, info),
            estimate=self._gauge.estimate(),
        )

    def _stop_reason(self, answer: Assistant) -> StopReason:
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


class Standby:
    """Finds the model that answers for the rest of a turn while the endpoint of the branch's model is down.

    `down` has the names of the models that the user was told are down. All turns of a session share this set.
    """

    def __init__(
        self,
        branch: Branch,
        adapters: Adapters,
        down: set[str],
        report: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._adapters = adapters
        self._down = down
        self._report = report
        self._own = self._name = branch.row.model
        self._is_subagent = branch.row.parent_id is not None

    async def next(self, error: errors.ModelError) -> Model | None:
        """Return the fallback of the model that failed with `error`, and tell the user about the change. Return None if
        the failed model has no usable fallback."""
        name = self._adapters.fallback(self._name)
        if not name:
            return None
        try:
            model = await self._adapters.model(name)
            model.check()
        except errors.CrowError as problem:
            logger.warning("The fallback %s of %s cannot be used: %s", name, self._name, problem)
            return None
        if self._own not in self._down or not self._is_subagent:
            title = f"{self._name} does not answer; {name} answers for the rest of this turn"
            await self._report(title, f"{error} The next prompt goes to {self._own} again.")
        self._down.add(self._own)
        self._name = name
        return model

    async def answered(self) -> None:
        """Tell the user if the branch's own model answers again."""
        if self._name == self._own and self._own in self._down:
            self._down.discard(self._own)
            await self._report(f"{self._own} answers again", "")


Fingerprint: TypeAlias = tuple[str, str, bool, int, int]


class Repetition:
    """Detects a model that makes the same calls again and again.

    A call is a repetition if it gives the same result as before and no other call gave a new result meanwhile. A new
    result restarts the count, so a command that is run again while files change is not a repetition. `count` says how
    often the most repeated call of the last step was made, and `name` is the tool of that call.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._known: set[Fingerprint] = set()
        self._times: Counter[Fingerprint] = Counter()

    def add(self, step: Iterable[tuple[ToolCall, ToolResult]]) -> None:
        """Add a step's calls and results."""
        names = {fingerprint(call, result): call.name for call, result in step}
        if not names.keys() <= self._known:
            self._times.clear()
        self._known |= names.keys()
        self._times.update(names.keys())
        counts = [(self._times[key], name) for key, name in names.items()]
        self.count, self.name = max(counts, default=(0, ""), key=lambda counted: counted[0])


def fingerprint(call: ToolCall, result: ToolResult) -> Fingerprint:
    """Return a value that is equal for calls with the same tool, arguments and result."""
    return call.name, call.arguments, result.is_error, len(result.text), hash(result.text)
