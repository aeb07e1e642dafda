"""Announces, permits, runs and stores the tool calls of one step."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio
import anyio.to_thread

from crow.agent.background import after_delay
from crow.agent.compaction.budget import Gauge
from crow.agent.history.branch import Branch
from crow.agent.hooks import BranchHooks, Denial
from crow.agent.permissions.decisions import Allow, Refuse
from crow.agent.permissions.judge import Permissions, about_changes
from crow.domain.entries import Announcement, Assistant, CallRef, NewEntry, Restore, Skill, Started, ToolResult
from crow.domain.errors import StoreError
from crow.domain.events import CallAnnounced, CallEnded, CallProgressed
from crow.domain.messages import ToolCall
from crow.tools import Outcome, PlannedCall, Toolbox
from crow.tools.layers import Changes
from crow.tools.layers.describe import diffs_of
from crow.tools.network import Host, HostVerdict, Use

_CUT_CHARS = 48_000
"""The model sees at most this many characters of a result."""
_SOON_S = 0.05
"""If a call only reads, its `started` entry is stored together with the result. But if the call still runs after this
many seconds, the entry is stored at once."""
_DROPPED_IN_PLAN = "In plan mode, commands cannot change files, so all changes were dropped."
_CANCELLED_BY_USER = (
    "The user cancelled this call while it ran. It may have had effects. Do not run it again unasked; go on without it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenCall:
    """An announced call that has no result yet."""

    ref: CallRef
    call: ToolCall
    """The call, with the arguments that the model gave or a hook has set."""
    plan: PlannedCall
    announcement: Announcement
    """The title and the details with which clients show the call until it has a result."""
    is_changed: bool = False
    """A hook has changed the announced arguments."""
    why: str = ""
    """Why the call may run, such as `mode auto`. Empty while it is not permitted."""


class Calls:
    """Runs the calls of one turn, step by step.

    A call that writes files is a barrier: it runs alone, after all calls that precede it in the answer and before all
    that follow. The calls between two barriers run in parallel.
    """

    def __init__(
        self, branch: Branch, permissions: Permissions, toolbox: Toolbox, gauge: Gauge, hooks: BranchHooks
    ) -> None:
        self.ran = False
        """At least one call of the turn was started."""
        self.dismissed = False
        """The user cancelled the turn when asked for permission."""
        self.running: dict[str, anyio.CancelScope] = {}
        """Maps the id of each running call to the scope that cancels it."""
        self._branch = branch
        self._hooks = hooks
        self._permissions = permissions
        self.toolbox = toolbox
        self._gauge = gauge
        self._calls_in_step = 1
        """How many calls the current step has. Their results share the room that is left in the context."""
        self._open: dict[CallRef, _OpenCall] = {}
        self._results: dict[CallRef, ToolResult] = {}
        """The results of the current step."""
        self._failure: StoreError | None = None
        """Why a result of the current step could not be stored. `run` raises it."""
        self._reviewing = anyio.Lock()
        """Held while the user is asked about the changes of a running command, or about a host that it wants to
        reach."""

    async def prepare(self) -> None:
        """Start to prepare the tools for calls, in the background."""
        self.toolbox.prepare()

    def understood(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return the calls, with those that were written for another agent's tools translated to the tools on offer."""
        return tuple(map(self.toolbox.understood, calls))

    async def plan(self, calls: Sequence[ToolCall]) -> tuple[PlannedCall, ...]:
        """Plan what each call will do. The plans are stored with the model's answer before any call is announced."""
        return tuple([await self._plan(call) for call in calls])

    async def run(
        self, entry: int, answer: Assistant, plans: Sequence[PlannedCall]
    ) -> tuple[tuple[ToolCall, ToolResult], ...]:
        """Run all calls of `answer`, which is stored as `entry`. Return the calls with their results, in order. Return
        an empty tuple if the user cancels the turn (see `dismissed`).

        :raises ~crow.domain.errors.StoreError: a result could not be stored.
        """
        self._calls_in_step = len(answer.calls)
        has_changes = False
        groups = _grouped(await self._announce(entry, answer, plans))
        barriers = [at for at, group in enumerate(groups) if group[0].plan.is_barrier and not group[0].plan.fault]
        last_barrier = max(barriers, default=0)
        for at, group in enumerate(groups):
            is_followed = at < last_barrier
            allowed = []
            for call in group:
                permitted = await self._permit(call, plan_again=has_changes)
                if self.dismissed:
                    return ()
                if permitted is not None:
                    allowed.append(replace(permitted, plan=replace(permitted.plan, is_followed=is_followed)))
            for batch in _grouped(allowed):  # hooks may have added barriers
                async with anyio.create_task_group() as tasks:
                    for each in batch:
                        tasks.start_soon(self._run_one, each)
                if self._failure is not None:
                    raise self._failure
                if self.dismissed:
                    return ()
            planned = (*(call.plan for call in group), *(each.plan for each in allowed))
            has_changes = (
                has_changes or self._hooks.are_used or any(plan.access not in ("none", "read") for plan in planned)
            )
        results, self._results = self._results, {}
        return tuple((answer.calls[ref.index], results[ref]) for ref in sorted(results, key=lambda ref: ref.index))

    async def _plan(self, call: ToolCall) -> PlannedCall:
        """Plan a call. If there is no such tool, the fault says which tools the model was offered."""
        plan = await self.toolbox.plan(call)
        if not plan.unknown_tool:
            return plan
        names = [spec.name for spec in self._branch.context().tools]
        known = [*names, *(spec.name for spec in self.toolbox.deferred())]
        near = difflib.get_close_matches(plan.unknown_tool, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return replace(plan, fault=f"{plan.fault}{hint} The tools are: {', '.join(names)}.")

    async def end_open(self) -> None:
        """Tell the client that the announced calls without a result have ended."""
        for ref in self._open:
            await self._branch.publish(CallEnded(call=ref, text="Cancelled."))
        self._open = {}

    async def _announce(self, entry: int, answer: Assistant, plans: Sequence[PlannedCall]) -> list[_OpenCall]:
        calls = []
        for index, (call, plan) in enumerate(zip(answer.calls, plans, strict=True)):
            ref = CallRef(assistant=entry, index=index)
            self._open[ref] = opened = _OpenCall(ref=ref, call=call, plan=plan, announcement=plan.announcement)
            calls.append(opened)
            await self._branch.publish(
                CallAnnounced(call=ref, name=call.name, arguments=call.arguments, announcement=plan.announcement)
            )
        return calls

    async def _permit(self, opened: _OpenCall, *, plan_again: bool) -> _OpenCall | None:
        """Return the call if it may run. If the call may not run, store a result that says so and return None. If the
        user cancels the turn, set `dismissed` and return None.

        Hooks run before permission is checked, and may change the arguments."""
        plan = opened.plan
        if plan_again:  # an earlier call of this step changed something, so the plan may be out of date
            plan = await self._plan(opened.call)
        hooked = await self._hooks.before_tool(opened.ref.call_id, opened.call, plan, self._plan)
        if isinstance(hooked, Denial):
            await self._answer(opened, Outcome(text=hooked.words, is_error=True))
            return None
        call, plan = hooked
        if call is not opened.call:
            self._open[opened.ref] = opened = replace(
                opened, call=call, plan=plan, announcement=plan.announcement, is_changed=True
            )
        plan = await self._permissions.complete(call, plan)
        if plan.fault is not None:
            # The fault may quote a file that the user's rules forbid to read.
            refusal = self._permissions.refusal_to_read(plan)
            words = plan.fault if refusal is None else refusal.words
            await self._answer(opened, Outcome(text=words, is_error=True))
            return None
        match await self._permissions.judge(opened.ref, opened.call, plan):
            case Allow(why=why):
                return replace(opened, plan=plan, why=why)
            case Refuse(words=words):
                await self._answer(opened, Outcome(text=words, is_error=True))
            case None:
                self.dismissed = True
        return None

    async def _run_one(self, opened: _OpenCall) -> None:
        """Run one call, and then the hooks that follow it. If the call may have effects, first store a `started` entry:
        after a crash, this entry shows that the call may have changed something."""
        plan, output = opened.plan, ""
        announcement = opened.announcement if opened.is_changed else None
        started = [NewEntry(body=Started(call=opened.ref, why=opened.why, announcement=announcement))]

        async def publish_progress(text: str) -> None:
            nonlocal output
            output = text
            await self._branch.publish(CallProgressed(call=opened.ref, text=text))

        outcome: Outcome | None = None
        self._permissions.reviews[opened.ref.call_id] = partial(self._review, opened, plan)
        self._permissions.hosts[opened.ref.call_id] = partial(self._review_host, opened, plan)
        self.running[opened.ref.call_id] = scope = anyio.CancelScope()
        try:
            if plan.access != "read":
                await self._branch.record(started)
                started = []
            self.ran = True
            begun = time.monotonic()
            async with after_delay(_SOON_S, partial(self._store_started, started)):
                with scope:
                    outcome = await self.toolbox.run(opened.call, opened.ref.call_id, publish_progress, planned=plan)
                duration_ms = round((time.monotonic() - begun) * 1000)
            if outcome is None:
                text = f"{_CANCELLED_BY_USER} Its output until then:\n\n{output}" if output else _CANCELLED_BY_USER
                outcome = Outcome(text=text, is_error=True, raw_output={"cancelled": True})
            await self._answer(opened, outcome, duration_ms=duration_ms, before=started)
            await self._hooks.after_tool(opened.call, plan, self._results[opened.ref])
        except StoreError as error:
            self._failure = error  # raised in `run`, because the task group would wrap it in an exception group
        finally:
            del self.running[opened.ref.call_id]
            del self._permissions.reviews[opened.ref.call_id]
            del self._permissions.hosts[opened.ref.call_id]

    async def _review(
        self, opened: _OpenCall, plan: PlannedCall, changes: Changes, command: PlannedCall | None = None
    ) -> str:
        """Decide whether the changes that a command made in its layer are kept. If not, return the reason for the
        model, otherwise an empty string. `command` is the plan of the command if an earlier call started it."""
        async with self._reviewing:  # an answer such as "always allow" may also answer the next question
            return await self._judge_changes(opened, command or plan, changes)

    async def _judge_changes(self, opened: _OpenCall, plan: PlannedCall, changes: Changes) -> str:
        diffs = await anyio.to_thread.run_sync(diffs_of, changes) if changes.shown else ()
        reviewed = about_changes(plan, changes, diffs, self._branch.row.cwd)
        if not reviewed.changed:
            return _DROPPED_IN_PLAN if self._permissions.is_planning else self._permissions.refusal_of_changes(reviewed)
        match await self._permissions.judge(opened.ref, opened.call, reviewed):
            case Allow():
                return ""
            case Refuse(words=words):
                return words
            case None:
                self.dismissed = True
                return "The user cancelled, so all changes were dropped."

    async def _review_host(self, opened: _OpenCall, plan: PlannedCall, host: Host, use: Use | None) -> HostVerdict:
        """Decide whether a running command may reach a host, and use a credential there."""
        async with self._reviewing:
            verdict = await self._permissions.judge_host(opened.ref, opened.call, plan, host, use)
        if verdict is None:
            self.dismissed = True
            return HostVerdict(refusal="the user cancelled the turn")
        return verdict

    async def _store_started(self, started: list[NewEntry]) -> None:
        """Store the `started` entry of a slow call. If this fails, the entry is stored later, together with the
        result."""
        with suppress(StoreError):
            if started:
                await self._branch.record(started)
                started.clear()

    async def _answer(
        self, opened: _OpenCall, outcome: Outcome, *, duration_ms: int = 0, before: Sequence[NewEntry] = ()
    ) -> None:
        """Store the result of a call. The entries in `before` are stored in the same transaction, ahead of the
        result."""
        fitting = self._gauge.cut_result(outcome.text, beside=self._calls_in_step)
        cut = min(limit for limit in (_CUT_CHARS, fitting, outcome.max_chars) if limit is not None)
        result = ToolResult(
            call=opened.ref,
            name=opened.call.name,
            text=outcome.text,
            is_error=outcome.is_error,
            duration_ms=duration_ms,
            announcement=outcome.announcement or opened.announcement,
            cut=cut if cut < len(outcome.text) else None,
            images=outcome.images,
            attachments=outcome.attachments,
            plan=outcome.plan,
            raw_output=outcome.raw_output,
        )
        entries = [*before, NewEntry(body=result, usage=outcome.usage, cost=outcome.cost)]
        if outcome.skill is not None:
            name, text = outcome.skill
            entries.append(NewEntry(body=Skill(name=name, text=text)))
        loaded_at = self._branch.projection.loaded_skills().get(outcome.unloads) if outcome.unloads else None
        if loaded_at is not None:
            entries.append(NewEntry(body=Restore(entry=loaded_at, skill=outcome.unloads)))
        await self._branch.record(entries)
        self._results[opened.ref] = result
        self._open.pop(opened.ref, None)


def _grouped(calls: Sequence[_OpenCall]) -> list[list[_OpenCall]]:
    """Split calls into groups, in order. The calls of a group may run in parallel. A barrier is a group of its own."""
    groups: list[list[_OpenCall]] = [[]]
    for call in calls:
        if call.plan.is_barrier:
            groups += [[call], []]
        else:
            groups[-1].append(call)
    return [group for group in groups if group]
