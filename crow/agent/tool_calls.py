"""The tool calls of one step: announced, asked about, started, run, their results stored as they land.

Strategy: every call is announced before anything runs. Calls that write files are barriers in call order; what stands
between two barriers is asked about in call order and then runs at once. `started` is stored before a call runs, so
that whatever may have touched the world is known after a crash; for one that only reads files, together with its
result if that comes soon. Knows tools, permissions and the log; not who is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import anyio

from crow.agent import Client, PermissionQuestion
from crow.agent.branch import Branch
from crow.agent.permissions import Allow, Ask, Refuse, Rule, decide, rule_for, rule_words, rules_in
from crow.agent.session import AfterDelay
from crow.domain.entries import Assistant, CallRef, Entry, NewEntry, Skill, Started, ToolResult
from crow.domain.errors import StoreError
from crow.domain.events import CallAnnounced, CallEnded, CallProgressed
from crow.domain.messages import ToolCall
from crow.store import SessionChanges
from crow.tools import Outcome, PlannedCall, Toolbox

__all__ = ["CallDecision", "Calls", "Permissions"]

CANCELLED_SHOWN = "Cancelled."

SOON_S = 0.05
"""A call that only reads and takes longer than this is stored as started while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """An announced call without a result."""

    ref: CallRef
    call: ToolCall
    offer: PlannedCall


class Calls:
    """Runs the calls of one turn, step by step.

    `seen_by_model(text, beside)` is how many characters of a result, one of `beside` in its step, the model may see.
    `ran` tells whether any call of the turn was started, `dismissed` that the user was asked and cancelled the turn.
    """

    def __init__(
        self, branch: Branch, permissions: Permissions, toolbox: Toolbox, seen_by_model: Callable[[str, int], int]
    ) -> None:
        self.ran = False
        self.dismissed = False
        self._branch = branch
        self._permissions = permissions
        self._toolbox = toolbox
        self._seen_by_model = seen_by_model
        self._beside = 1
        self._open: dict[CallRef, OpenCall] = {}
        self._results: dict[CallRef, ToolResult] = {}
        self._failure: StoreError | None = None

    async def look(self, calls: Sequence[ToolCall]) -> tuple[PlannedCall, ...]:
        """What each call is about to do. What is to be shown of it is stored with the answer, before it is shown."""
        return tuple([await self._toolbox.offer(call) for call in calls])

    async def run(
        self, entry: Entry, answer: Assistant, offers: Sequence[PlannedCall]
    ) -> tuple[tuple[ToolCall, ToolResult], ...]:
        """Run all calls of `answer`, which `entry` holds; they and their results, in call order.

        :raises ~crow.domain.errors.StoreError: a result could not be stored.
        """
        changed = False
        self._beside = len(answer.calls)
        for group in grouped(await self._announce(entry, answer, offers)):
            allowed = []
            for call in group:
                judged = await self._allowed(call, look_again=changed)
                if self.dismissed:
                    return ()
                if judged is not None:
                    allowed.append((call, *judged))
            async with anyio.create_task_group() as tasks:
                for call, why, offer in allowed:
                    tasks.start_soon(self._run_one, call, why, offer)
            if self._failure is not None:
                raise self._failure
            changed = changed or any(call.offer.access not in ("none", "read") for call in group)
        results, self._results = self._results, {}
        return tuple((answer.calls[ref.index], results[ref]) for ref in sorted(results, key=lambda ref: ref.index))

    async def end_open(self) -> None:
        """Tell the client that announced calls without a result are over."""
        for call in self._open.values():
            await self._branch.publish(CallEnded(call=call.ref, text=CANCELLED_SHOWN))
        self._open = {}

    async def _announce(self, entry: Entry, answer: Assistant, offers: Sequence[PlannedCall]) -> list[OpenCall]:
        calls = []
        for index, (call, offer) in enumerate(zip(answer.calls, offers, strict=True)):
            opened = OpenCall(ref=CallRef(assistant=entry.id, index=index), call=call, offer=offer)
            self._open[opened.ref] = opened
            calls.append(opened)
            await self._branch.publish(
                CallAnnounced(
                    call=opened.ref, name=call.name, arguments=call.arguments, announcement=offer.announcement
                )
            )
        return calls

    async def _allowed(self, opened: OpenCall, *, look_again: bool) -> tuple[str, PlannedCall] | None:
        """Why the call may run, and as what; None when it may not and was answered so."""
        offer = opened.offer
        if look_again:  # an earlier call of this step changed something: what was seen before may be out of date
            offer = await self._toolbox.offer(opened.call)
        if offer.fault is not None:
            await self._answer(opened, Outcome(text=offer.fault, is_error=True))
            return None
        verdict = await self._permissions.judge(opened.ref, opened.call, offer)
        if verdict.dismissed:
            self.dismissed = True
        elif verdict.why is None:
            await self._answer(opened, Outcome(text=verdict.words, is_error=True))
        return None if verdict.why is None else (verdict.why, offer)

    async def _run_one(self, opened: OpenCall, why: str, offer: PlannedCall) -> None:
        started = NewEntry(body=Started(call=opened.ref, why=why))
        try:
            if offer.access != "read":
                await self._branch.record([started])
                self.ran = True
                outcome, duration_ms = await self._timed(opened, offer)
                await self._answer(opened, outcome, duration_ms=duration_ms)
                return
            unstored, self.ran = [started], True
            async with AfterDelay(SOON_S, partial(self._start_late, unstored)):
                outcome, duration_ms = await self._timed(opened, offer)
            await self._answer(opened, outcome, duration_ms=duration_ms, before=unstored)
        except StoreError as error:
            self._failure = error  # raised by run(), outside of task groups that would wrap it

    async def _start_late(self, unstored: list[NewEntry]) -> None:
        """Store that a call runs which takes its time. If that fails, its result is the next to try."""
        with suppress(StoreError):
            await self._branch.record(unstored)
            unstored.clear()

    async def _timed(self, opened: OpenCall, offer: PlannedCall) -> tuple[Outcome, int]:
        """What the call gave, and how many milliseconds it took."""
        begun = time.monotonic()

        async def progressed(text: str) -> None:
            await self._branch.publish(CallProgressed(call=opened.ref, text=text))

        outcome = await self._toolbox.run(opened.call, opened.ref.call_id, progressed, judged=offer)
        return outcome, round((time.monotonic() - begun) * 1000)

    async def _answer(
        self, opened: OpenCall, outcome: Outcome, *, duration_ms: int = 0, before: Sequence[NewEntry] = ()
    ) -> None:
        """Store the result, after the entries `before` it, which are not stored yet."""
        seen = self._seen_by_model(outcome.text, self._beside)
        result = ToolResult(
            call=opened.ref,
            name=opened.call.name,
            text=outcome.text,
            is_error=outcome.is_error,
            duration_ms=duration_ms,
            announcement=outcome.announcement or opened.offer.announcement,
            cut=seen if seen < len(outcome.text) else None,
            images=outcome.images,
            attachments=outcome.attachments,
            plan=outcome.plan,
            raw_output=outcome.raw_output,
        )
        entries = [*before, NewEntry(body=result, usage=outcome.usage, cost=outcome.cost)]
        if outcome.skill is not None:
            name, text = outcome.skill
            entries.append(NewEntry(body=Skill(name=name, text=text)))
        await self._branch.record(entries)
        self._results[opened.ref] = result
        self._open.pop(opened.ref, None)


def grouped(calls: Sequence[OpenCall]) -> list[list[OpenCall]]:
    """Runs of calls that may run at once; each barrier stands alone."""
    groups: list[list[OpenCall]] = [[]]
    for call in calls:
        if call.offer.is_barrier:
            groups += [[call], []]
        else:
            groups[-1].append(call)
    return [group for group in groups if group]


# FROM agent.asking: May this call run: the policy applied to a session as it stands, and the user asked where it says
# so.
#
# Strategy: mode and rules are looked up at each call, so that a change counts from the next one on; sub-agents share
# the
# instance of their session, and so its mode, its rules and its user. What an "always" answer means is stored with the
# session. Knows the policy and the user; not tools.


REJECTED = "The user did not allow this call. Do not try it again unasked; ask them what they want instead."
CANNOT_ASK = (
    "This call needs the user's permission, and their editor cannot ask for it. Do it another way, or tell them: they "
    "can choose another mode, type /permissions allow, or allow it in config.toml under [permissions]."
)

UNANSWERED = (
    "The user was asked whether this call may run, and did not answer in time, so it did not run. Do not try it again "
    "unasked; say what it was for, so that they can come back to it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDecision:
    """`why` it may run; else `words` for the model. `dismissed`: the user cancelled instead of answering."""

    why: str | None = None
    words: str = ""
    dismissed: bool = False


class Permissions:
    """Judges the calls of one session. `rules` are those of the user's file, and may be replaced between turns."""

    def __init__(self, branch: Branch, client: Client, rules: Sequence[Rule] = ()) -> None:
        self._branch = branch
        self._client = client
        self.rules = tuple(rules)

    async def judge(self, ref: CallRef, call: ToolCall, offer: PlannedCall) -> CallDecision:
        """Whether an announced call may run."""
        row = self._branch.row
        decision = decide(call.name, offer, row.mode, (*self.rules, *rules_in(row.permissions)))
        match decision:
            case Allow(why=why):
                return CallDecision(why=why)
            case Refuse(words=words):
                return CallDecision(words=words)
            case Ask():
                return await self._ask(ref, call, offer)
            case _ as never:
                assert_never(never)

    async def _ask(self, ref: CallRef, call: ToolCall, offer: PlannedCall) -> CallDecision:
        can_last = not offer.is_protected and not offer.asks_once
        answer = await self._client.ask(
            PermissionQuestion(
                call=ref,
                name=call.name,
                arguments=call.arguments,
                offer=offer,
                always=rule_words(rule_for(call.name, offer, allow=True)) if can_last else "",
            )
        )
        if answer == "cancelled":
            return CallDecision(dismissed=True)
        allows = answer in ("allow_once", "allow_always")
        if (can_last and answer in ("allow_always", "reject_always")) or (allows and offer.asks_once):
            await self._remember(rule_for(call.name, offer, allow=allows))
        if allows:
            return CallDecision(why=f"{answer.replace('_', ' ')} by the user")
        return CallDecision(words={"cannot_ask": CANNOT_ASK, "unanswered": UNANSWERED}.get(answer, REJECTED))

    async def _remember(self, rule: Rule) -> None:
        known = self._branch.row.permissions
        if rule.as_json() not in known:
            await self._branch.change(SessionChanges(permissions=(*known, rule.as_json())))
