"""One turn: from a stored prompt to its stop reason.

    while True:
        make room                                   compaction, before every request
        answer = ask the model                      streamed to the client, saved as a draft, stored whole
        if it calls no tool: return why it stopped
        run its calls                               announced, asked about, started, run, stored

Strategy: each step is durable before its tools run, and each result before the model hears of it, so that the turn
can end at any instant: cancelled, failed or killed. What was shown but not stored is in `leftover`. Failures of the
model are raised; failures of tools are text for the model. Knows protocols only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, get_args

import anyio

from crow.agent import new_message_id
from crow.agent.branch import Branch
from crow.agent.compaction.compactor import Compactor
from crow.agent.prompt import Briefing
from crow.agent.session import AfterDelay
from crow.agent.stream import AnswerDraft
from crow.agent.tool_calls import Calls, Permissions
from crow.domain.entries import Assistant, Entry, NewEntry, Remark, Reminder, StopReason, ToolResult, User
from crow.domain.errors import (
    ContextOverflow,
    ModelTimeout,
    NetworkError,
    Overloaded,
    ProtocolError,
    RateLimited,
    StoreError,
    TurnError,
)
from crow.domain.events import EntryStored
from crow.domain.messages import Answer, JsonObject, ToolCall
from crow.llm import Request, ThoughtLevel, cost_of
from crow.tools import PlannedCall, Toolbox

__all__ = ["GIVE_UP", "POINT_OUT", "Repetition", "Turn"]

THOUGHT_LEVELS: tuple[ThoughtLevel, ...] = get_args(ThoughtLevel)
CUT_CHARS = 48_000
LOOK_S = 0.05
"""An editor may take long to say what its files hold; what was shown of the answer is saved meanwhile."""
CONTINUE = (
    "<reminder>Your last answer was cut off by a broken connection. The user has seen it as it stands. Continue "
    "exactly where it stopped, without repeating anything and without a preamble.</reminder>"
)
REPEATED = (
    "<reminder>You have called {name} {count} times with the same arguments and the same result. Calling it again will "
    "not change that: use the result, try another way, or say what is in the way.</reminder>"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStep:
    """A stored model response, and what its calls are about to do."""

    entry: Entry
    answer: Assistant
    offers: Sequence[PlannedCall]


class Turn:
    """A running turn. `steps` bounds the requests; beyond it the turn stops with `max_turn_requests` and names what
    `bounded_by`."""

    def __init__(
        self,
        branch: Branch,
        compactor: Compactor,
        toolbox: Toolbox,
        *,
        steps: int,
        bounded_by: str = "limits.steps_per_turn",
        briefing: Briefing,
        permissions: Permissions,
    ) -> None:
        self._branch = branch
        self._model = compactor.model
        self._compactor = compactor
        self._gauge = compactor.gauge
        self._calls = Calls(branch, permissions, toolbox, self._seen_by_model)
        self._repetition = Repetition()
        self._draft: AnswerDraft | None = None
        self._answer: Answer | None = None
        self._listens = False
        self._steps = steps
        self._bounded_by = bounded_by
        self._briefing = briefing
        self._steered: list[User] = []

    def steer(self, prompt: User) -> None:
        """Let the model see a further prompt of the user at its next step."""
        self._steered.append(prompt)

    async def run(self) -> StopReason:
        """Work until the model calls no tool.

        :raises ~crow.domain.errors.ModelError: the endpoint failed, retries included.
        :raises ~crow.domain.errors.TurnError: the turn cannot go on.
        :raises ~crow.domain.errors.StoreError: a step could not be stored.
        """
        for _ in range(self._steps):
            await self._take_steering()
            await self._compactor.make_room()
            await self._remind()
            step = await self._ask()
            if not step.answer.calls:
                if self._steered and step.answer.finish != "refusal":
                    continue
                return self._stop_reason(step.answer)
            self._repetition.add(await self._calls.run(step.entry, step.answer, step.offers))
            if self._calls.dismissed:
                return "cancelled"
            if self._repetition.count >= GIVE_UP:
                what = f"{self._repetition.name} was called {self._repetition.count} times alike, with the same result"
                return await self._stopped(f"Stopped: {what}. Say what should be done differently.")
            await self._point_out()
        count = "1 step" if self._steps == 1 else f"{self._steps} steps"
        return await self._stopped(f"Stopped after {count} ({self._bounded_by}). Send another prompt to go on.")

    async def _stopped(self, words: str) -> StopReason:
        await self._branch.record([NewEntry(body=Remark(text=words, message_id=new_message_id()))])
        return "max_turn_requests"

    async def _point_out(self) -> None:
        """Tell the model that it repeats itself."""
        if self._repetition.count in POINT_OUT:
            text = REPEATED.format(name=self._repetition.name, count=self._repetition.count)
            await self._branch.record([NewEntry(body=Reminder(text=text))])

    def _seen_by_model(self, text: str, beside: int) -> int:
        chars = self._gauge.cut_result(text, beside=beside)
        return min(CUT_CHARS, len(text) if chars is None else chars)

    def mute(self) -> bool:
        """Show nothing more of the answer that the model is giving; whether it is giving one.

        If it is, the turn does nothing more at all until it is cancelled, which has to follow: so its end can be stored
        while the connection is still being closed.
        """
        if self._draft is None or not self._listens:
            return False
        self._draft.mute()
        return True

    async def end_open(self) -> None:
        """Tell the client that the calls which have no result yet are over."""
        await self._calls.end_open()

    def leftover(self) -> list[NewEntry]:
        """What was shown of an answer but is not stored: as an interrupted one, unless it is whole."""
        draft = self._draft
        if draft is not None and self._answer is not None:
            return [self._assistant(draft.message_id, self._answer)]
        if draft is None or not (draft.text or draft.thought):
            return []
        return [self._assistant(draft.message_id, Answer(text=draft.text, thought=draft.thought, finish="interrupted"))]

    async def _take_steering(self) -> None:
        if self._steered:
            await self._branch.record(self.unseen())

    def unseen(self) -> list[NewEntry]:
        """What the user said meanwhile and the model has not seen; storing it takes it out of the inbox."""
        steered, self._steered = self._steered, []
        return [NewEntry(body=prompt) for prompt in steered]

    async def _remind(self) -> None:
        due = self._briefing.reminder()
        if due is not None:
            text, notes = due
            await self._branch.record([*notes, NewEntry(body=Reminder(text=f"<reminder>\n{text}\n</reminder>"))])

    async def _ask(self) -> TurnStep:
        """One model response, stored and shown. A stream that broke after text was shown is continued once, without
        what it repeats; a request that was too long is sent again after a compaction."""
        continued = False
        before = ""
        while True:
            try:
                return await self._ask_once(before)
            except (ContextOverflow, NetworkError, ModelTimeout, Overloaded, ProtocolError, RateLimited) as error:
                text = self._draft.text if self._draft is not None else ""
                shown = self.leftover()
                if shown:
                    await self._record_draft(*shown)
                    if continued:
                        raise
                    continued = True
                if isinstance(error, ContextOverflow):
                    await self._compactor.overflowed(error)
                elif not shown:
                    raise
                if text.strip():  # of reasoning alone the model has nothing to go on from: it is simply asked again
                    before = text
                    await self._branch.record([NewEntry(body=Reminder(text=CONTINUE))])

    async def _ask_once(self, before: str) -> TurnStep:
        context = self._branch.context()
        request = Request(
            messages=context.messages,
            tools=context.tools,
            max_output_tokens=self._gauge.max_output_tokens(),
            cache_key=self._branch.row.id,
            thought_level=thought_level_in(self._branch.row.config),
        )
        self._draft = draft = AnswerDraft(self._branch, new_message_id(), before=before)
        self._listens = True
        try:
            async with self._model.stream(request) as stream:
                answer = await draft.follow(stream)
        finally:
            if draft.is_hushed:  # the cancellation is on its way: it is over, however the stream ended in that instant
                await anyio.sleep_forever()
            self._listens = False
        self._answer = answer
        offers = await self._look(draft, answer.calls) if answer.calls else ()
        entry = await self._record_draft(self._assistant(draft.message_id, answer, offers))
        await self._gauge.answered()
        await self._gauge.tell()
        assert isinstance(entry.body, Assistant)
        return TurnStep(entry=entry, answer=entry.body, offers=offers)

    async def _look(self, draft: AnswerDraft, calls: Sequence[ToolCall]) -> tuple[PlannedCall, ...]:
        async with AfterDelay(LOOK_S, partial(save_shown, draft)):
            return await self._calls.look(calls)

    async def _record_draft(self, new: NewEntry) -> Entry:
        """Store what was shown; nothing is left over of it then, even if a cancellation meets the telling."""
        (entry,) = await self._branch.store_only([new])
        self._draft = self._answer = None
        await self._branch.publish(EntryStored(entry=entry))
        return entry

    def _assistant(self, message_id: str, answer: Answer, offers: Sequence[PlannedCall] = ()) -> NewEntry:
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
                announcements=tuple(offer.announcement for offer in offers),
            ),
            model=info.name,
            usage=answer.usage,
            cost=cost_of(answer.usage, info),
            estimate=self._gauge.estimate(),
        )

    def _stop_reason(self, answer: Assistant) -> StopReason:
        if answer.finish == "length":
            return "max_tokens"
        if answer.finish == "refusal":
            if self._calls.ran:  # ACP drops the prompt of a refused turn; this one has changed the world
                raise TurnError(f"The model refused to go on: {answer.text or 'it gave no reason'}")
            return "refusal"
        return "end_turn"


async def save_shown(draft: AnswerDraft) -> None:
    """Save what was shown of an answer that cannot be stored yet. If that fails, storing it is the next to try."""
    with suppress(StoreError):
        await draft.save()


def thought_level_in(config: JsonObject) -> ThoughtLevel | None:
    """How much the model is to think by the session's own choice; None leaves it to the configuration."""
    level = config.get("thought_level")
    return next((known for known in THOUGHT_LEVELS if known == level), None)


# FROM agent.repetition: Notices a model that goes round in circles.
#
# Strategy: a call counts as repeated when it gives the result that it gave before, for as long as the turn brings
# nothing new; one call with a result not seen in this turn starts the counting anew. So a command that is repeated
# while
# files change is no circle, nor is one whose output differs; two calls in turns are. Knows fingerprints alone.


POINT_OUT = frozenset({3, 10, 20})
"""After so many times the model is told."""

GIVE_UP = 30
"""After so many the turn ends."""

Fingerprint: TypeAlias = tuple[str, str, bool, int, int]


class Repetition:
    """The calls of one turn with their results. `count` is how often the newest step's most repeated one was made,
    and `name` its tool."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._known: set[Fingerprint] = set()
        self._times: Counter[Fingerprint] = Counter()

    def add(self, step: Iterable[tuple[ToolCall, ToolResult]]) -> None:
        """Take a step's calls and results."""
        names = {fingerprint(call, result): call.name for call, result in step}
        if not names.keys() <= self._known:
            self._times.clear()
        self._known |= names.keys()
        self._times.update(names.keys())
        self.count, self.name = max(
            ((self._times[key], name) for key, name in names.items()), default=(0, ""), key=lambda found: found[0]
        )


def fingerprint(call: ToolCall, result: ToolResult) -> Fingerprint:
    """Two calls are the same if tool, arguments and result are; Python's own hash is the quickest of a long text."""
    return call.name, call.arguments, result.is_error, len(result.text), hash(result.text)
