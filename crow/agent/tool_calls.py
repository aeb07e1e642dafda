"""Announces, permits, runs and stores the tool calls of one step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from crow.agent import Client, PermissionQuestion
from crow.agent.background import after_delay
from crow.agent.branch import Branch
from crow.agent.compaction.budget import Gauge
from crow.agent.hooks import BranchHooks, Denial
from crow.agent.permissions import (
    Allow,
    Ask,
    PermissionRule,
    Refuse,
    allowing_rule,
    change_of_tool,
    current_rules,
    decide,
    doubt,
    excluded_paths,
    is_path_rule,
    may_attach,
    named_places,
    narrower_mode,
    outdated_rule,
    replaces,
    rule_for_writes,
    rule_words,
    rules_at,
    rules_for,
    url_rules,
)
from crow.domain.entries import Assistant, CallRef, NewEntry, Skill, Started, ToolResult
from crow.domain.errors import StoreError
from crow.domain.events import CallAnnounced, CallEnded, CallProgressed
from crow.domain.messages import ToolCall
from crow.store import SessionChanges
from crow.tools import Outcome, PlannedCall, SamplingRequest, Toolbox, Workspace

CUT_CHARS = 48_000
"""The model sees at most this many characters of a result."""
SOON_S = 0.05
"""If a call only reads, its `started` entry is stored together with the result. But if the call still runs after this
many seconds, the entry is stored at once."""
REJECTED = (
    "The user did not allow this call. Do not try it again unasked; ask the user what they want instead. If they "
    "change their mind, they can allow the call when you ask again, or with /permissions."
)
CANNOT_ASK = (
    "This call needs the user's permission, and the user's editor cannot ask for it. Do it another way, or tell the "
    "user: they can choose another mode, type /permissions allow, or allow the call in config.toml under "
    "[permissions]. Protected paths always need an editor that asks."
)
CANCELLED_BY_USER = (
    "The user cancelled this call while it ran. It may have had effects. Do not run it again unasked; go on without it."
)
UNANSWERED = (
    "The user was asked whether this call may run, and did not answer in time. So the call did not run. Do not try it "
    "again unasked; say what it was for, so that the user can come back to it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """An announced call that has no result yet. `is_changed` means that a hook has changed the announced arguments."""

    ref: CallRef
    call: ToolCall
    plan: PlannedCall
    is_changed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PermittedCall:
    """A call that may run with this plan. `why` is the reason for the permission, such as `mode auto`."""

    opened: OpenCall
    why: str
    plan: PlannedCall


class Calls:
    """Runs the calls of one turn, step by step.

    A call that writes files is a barrier: it runs alone, after all calls that precede it in the answer and before all
    that follow. The calls between two barriers run in parallel. `ran` means that at least one call of the turn was
    started. `dismissed` means that the user cancelled the turn when asked for permission. `running` maps the id of each
    running call to the scope that cancels it.
    """

    def __init__(
        self, branch: Branch, permissions: Permissions, toolbox: Toolbox, gauge: Gauge, hooks: BranchHooks
    ) -> None:
        self.ran = False
        self.dismissed = False
        self.running: dict[str, anyio.CancelScope] = {}
        self._branch = branch
        self._hooks = hooks
        self._permissions = permissions
        self.toolbox = toolbox
        self._gauge = gauge
        self._calls_in_step = 1
        self._open: dict[CallRef, OpenCall] = {}
        self._results: dict[CallRef, ToolResult] = {}
        self._failure: StoreError | None = None

    async def prepare(self) -> None:
        """Let the tools get ready while the model answers."""
        self.toolbox.prepare()

    def understood(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """Return the calls in terms of the tools on offer."""
        return tuple(map(self.toolbox.understood, calls))

    async def plan(self, calls: Sequence[ToolCall]) -> tuple[PlannedCall, ...]:
        """Plan what each call will do. The plans are stored with the model's answer before any call is announced."""
        return tuple([await self.toolbox.plan(call) for call in calls])

    async def run(
        self, entry: int, answer: Assistant, plans: Sequence[PlannedCall]
    ) -> tuple[tuple[ToolCall, ToolResult], ...]:
        """Run all calls of `answer`, which is stored as `entry`. Returns the calls with their results, in order.

        :raises ~crow.domain.errors.StoreError: a result could not be stored.
        """
        self._calls_in_step = len(answer.calls)
        has_changes = False
        groups = grouped(await self._announce(entry, answer, plans), lambda call: call.plan.is_barrier)
        changing = [
            number for number, group in enumerate(groups) if group[0].plan.is_barrier and not group[0].plan.fault
        ]
        for number, group in enumerate(groups):
            is_followed = number < max(changing, default=0)
            allowed = []
            for call in group:
                permitted = await self._permit(call, plan_again=has_changes)
                if self.dismissed:
                    return ()
                if permitted is not None:
                    allowed.append(replace(permitted, plan=replace(permitted.plan, is_followed=is_followed)))
            for batch in grouped(allowed, lambda each: each.plan.is_barrier):  # hooks may have added barriers
                async with anyio.create_task_group() as tasks:
                    for each in batch:
                        tasks.start_soon(self._run_one, each)
                if self._failure is not None:
                    raise self._failure
            planned = (*(call.plan for call in group), *(each.plan for each in allowed))
            has_changes = (
                has_changes or self._hooks.are_used or any(plan.access not in ("none", "read") for plan in planned)
            )
        results, self._results = self._results, {}
        return tuple((answer.calls[ref.index], results[ref]) for ref in sorted(results, key=lambda ref: ref.index))

    async def end_open(self) -> None:
        """Tell the client that the announced calls without a result have ended."""
        for ref in self._open:
            await self._branch.publish(CallEnded(call=ref, text="Cancelled."))
        self._open = {}

    async def _announce(self, entry: int, answer: Assistant, plans: Sequence[PlannedCall]) -> list[OpenCall]:
        calls = []
        for index, (call, plan) in enumerate(zip(answer.calls, plans, strict=True)):
            ref = CallRef(assistant=entry, index=index)
            self._open[ref] = opened = OpenCall(ref=ref, call=call, plan=plan)
            calls.append(opened)
            await self._branch.publish(
                CallAnnounced(call=ref, name=call.name, arguments=call.arguments, announcement=plan.announcement)
            )
        return calls

    async def _permit(self, opened: OpenCall, *, plan_again: bool) -> PermittedCall | None:
        """Return the call if it may run. If the call may not run, store a result that says so and return None. If the
        user cancels the turn, set `dismissed` and return None.

        Hooks run before permission is checked, and may change the arguments."""
        plan = opened.plan
        if plan_again:  # an earlier call of this step changed something, so the plan may be out of date
            plan = await self.toolbox.plan(opened.call)
        left = await self._hooks.before_tool(opened.ref.call_id, opened.call, plan, self.toolbox.plan)
        if isinstance(left, Denial):
            await self._answer(opened, Outcome(text=left.words, is_error=True))
            return None
        call, plan = left
        if call is not opened.call:
            self._open[opened.ref] = opened = replace(opened, call=call, plan=plan, is_changed=True)
        if plan.fault is not None:
            # The words may quote a file, which the user's rules may forbid to read.
            refusal = self._permissions.refusal_to_read(plan)
            words = plan.fault if refusal is None else refusal.words
            await self._answer(opened, Outcome(text=words, is_error=True))
            return None
        plan = await self._permissions.complete(opened.call, plan)
        match await self._permissions.judge(opened.ref, opened.call, plan):
            case Allow(why=why):
                return PermittedCall(opened=opened, why=why, plan=plan)
            case Refuse(words=words):
                await self._answer(opened, Outcome(text=words, is_error=True))
            case None:
                self.dismissed = True
        return None

    async def _run_one(self, permitted: PermittedCall) -> None:
        """Run one call, and then the hooks that follow it. If the call may have effects, first store a `started` entry:
        after a crash, this entry shows that the call may have changed something."""

        opened, plan = permitted.opened, permitted.plan
        announcement = plan.announcement if opened.is_changed else None
        started = [NewEntry(body=Started(call=opened.ref, why=permitted.why, announcement=announcement))]

        shown = ""

        async def publish_progress(text: str) -> None:
            nonlocal shown
            shown = text
            await self._branch.publish(CallProgressed(call=opened.ref, text=text))

        outcome: Outcome | None = None
        self.running[opened.ref.call_id] = scope = anyio.CancelScope()
        try:
            if plan.access != "read":
                await self._branch.record(started)
                started = []
            self.ran = True
            begun = time.monotonic()
            async with after_delay(SOON_S, partial(self._store_started, started)):
                with scope:
                    outcome = await self.toolbox.run(opened.call, opened.ref.call_id, publish_progress, planned=plan)
                duration_ms = round((time.monotonic() - begun) * 1000)
            if outcome is None:
                text = f"{CANCELLED_BY_USER} Its output until then:\n\n{shown}" if shown else CANCELLED_BY_USER
                outcome = Outcome(text=text, is_error=True, raw_output={"cancelled": True})
            await self._answer(opened, outcome, duration_ms=duration_ms, before=started)
            await self._hooks.after_tool(opened.call, plan, self._results[opened.ref])
        except StoreError as error:
            self._failure = error  # raised in `run`, because the task group would wrap it in an exception group
        finally:
            del self.running[opened.ref.call_id]

    async def _store_started(self, started: list[NewEntry]) -> None:
        """Store the `started` entry of a slow call. If this fails, the entry is stored later, together with the
        result."""
        with suppress(StoreError):
            if started:
                await self._branch.record(started)
                started.clear()

    async def _answer(
        self, opened: OpenCall, outcome: Outcome, *, duration_ms: int = 0, before: Sequence[NewEntry] = ()
    ) -> None:
        """Store the result of a call. The entries in `before` are stored in the same transaction, ahead of the
        result."""
        fitting = self._gauge.cut_result(outcome.text, beside=self._calls_in_step)
        cut = min(each for each in (CUT_CHARS, fitting, outcome.max_chars) if each is not None)
        result = ToolResult(
            call=opened.ref,
            name=opened.call.name,
            text=outcome.text,
            is_error=outcome.is_error,
            duration_ms=duration_ms,
            announcement=outcome.announcement or opened.plan.announcement,
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
        await self._branch.record(entries)
        self._results[opened.ref] = result
        self._open.pop(opened.ref, None)


GroupedCall = TypeVar("GroupedCall", OpenCall, PermittedCall)


def grouped(calls: Sequence[GroupedCall], is_barrier: Callable[[GroupedCall], bool]) -> list[list[GroupedCall]]:
    """Split calls into groups, in order. The calls of a group may run in parallel. A barrier is a group of its own."""
    groups: list[list[GroupedCall]] = [[]]
    for call in calls:
        if is_barrier(call):
            groups += [[call], []]
        else:
            groups[-1].append(call)
    return [group for group in groups if group]


class Permissions:
    """Decides whether calls of one session may run, and asks the user where needed.

    The mode and the rules are read for each call, so a change applies from the next call on. A sub-agent uses its
    session's instance, or an instance that allows less. `rules` are the rules of the user's file.
    """

    def __init__(
        self,
        branch: Branch,
        client: Client,
        workspace: Workspace,
        rules: Sequence[PermissionRule] = (),
        *,
        limit: str = "",
        whole: Permissions | None = None,
    ) -> None:
        self._branch = branch
        self._client = client
        self._workspace = workspace
        self.rules = tuple(rules)
        self._limit = limit
        self._whole = whole or self

    def narrowed(self, mode: str) -> Permissions:
        """Return the session's permissions, limited to what `mode` allows. Later changes of the session's mode and
        rules also change the returned permissions."""
        limit = narrower_mode(self._limit, mode) if self._limit else mode
        return Permissions(self._branch, self._client, self._workspace, limit=limit, whole=self._whole)

    def asking(self, client: Client) -> Permissions:
        """Return the same permissions, but ask this client."""
        return Permissions(self._branch, client, self._workspace, limit=self._limit, whole=self._whole)

    @property
    def _mode(self) -> str:
        mode = self._branch.row.mode
        return narrower_mode(mode, self._limit) if self._limit else mode

    def may_read(self) -> Callable[[Path], bool]:
        """Return a function that takes the path of a file in the workspace. It returns whether crow may give this file
        to the model without a tool call. It reads the disk, so call it in a thread."""
        return partial(may_attach, workspace=self._workspace, rules=current_rules(self._whole.rules, self._branch.row))

    async def complete(self, call: ToolCall, plan: PlannedCall) -> PlannedCall:
        """Add to the plan all names of a file with hard links, because a rule may name any of them. Also add the paths
        that the rules hide from a search or a confined command, and the rules for redirects."""
        name = plan.rule_tool or call.name
        rules = current_rules(self._whole.rules, self._branch.row)
        if plan.parts:
            parts = tuple([await self.complete(call, part) for part in plan.parts])
            return replace(plan, parts=parts, excluded=excluded_paths(name, rules))
        if plan.has_hard_links and any(is_path_rule(rule, name, *plan.like, "read_file") for rule in rules):
            path = Path(plan.rule_paths[0])
            places = [place for place in named_places(rules) if os.path.isabs(place)]
            names, is_complete = (await self._workspace.find_names([path], places))[path]
            root = self._workspace.resolve(".")
            inside = [str(Path(name).relative_to(root)) for name in names if Path(name).is_relative_to(root)]
            others = (*plan.other_paths, *names, *inside)
            plan = replace(plan, other_paths=others, has_unknown_names=not is_complete)
        return replace(plan, excluded=excluded_paths(name, rules), url_rules=url_rules(name, self._mode, rules))

    async def refusal(self, call: ToolCall, plan: PlannedCall) -> str:
        """Return why a deny rule or plan mode forbids a call that the user makes. Return an empty string if the call
        may run."""
        row = self._branch.row
        plan = await self.complete(call, plan)
        rules, is_bounded = current_rules(self._whole.rules, row), self._workspace.is_bounded
        decision = decide(call.name, plan, self._mode, rules, is_bounded=is_bounded)
        return decision.words if isinstance(decision, Refuse) else ""

    async def judge(self, ref: CallRef, call: ToolCall, plan: PlannedCall) -> Allow | Refuse | None:
        """Decide whether an announced call may run. Return None if the user cancelled the turn instead of answering."""
        row = self._branch.row
        rules, is_bounded = current_rules(self._whole.rules, row), self._workspace.is_bounded
        decision = decide(call.name, plan, self._mode, rules, is_bounded=is_bounded)
        return await self._ask(ref, call, plan, decision) if isinstance(decision, Ask) else decision

    def refusal_to_read(self, plan: PlannedCall) -> Refuse | None:
        """Return the refusal if the user's rules forbid to read one of the files that a call touches, else None."""
        rules = current_rules(self._whole.rules, self._branch.row)
        for part in plan.each:
            if part.rule_paths:
                reading = replace(part, access="read", rule_tool=None, like=(), parts=())
                decision = decide("read_file", reading, self._mode, rules, is_bounded=self._workspace.is_bounded)
                if isinstance(decision, Refuse):
                    return decision
        return None

    async def judge_sampling(self, request: SamplingRequest, text: str) -> Allow | Refuse | None:
        """Decide whether the model may answer a request of a server. `text` is what the model would get."""
        plan = PlannedCall(
            announcement=request.announcement,
            access="external",
            rule_tool="sampling",
            argument=request.prefix,
            is_read_only=request.is_read_only,
            review_text=text,
        )
        return await self.judge(request.call, ToolCall(id="", name=request.name, arguments=request.arguments), plan)

    async def _ask(self, ref: CallRef, call: ToolCall, plan: PlannedCall, ask: Ask) -> Allow | Refuse | None:
        can_last = not plan.is_protected and not plan.asks_once and ask.doubtful is None
        cwd = self._branch.row.cwd
        asked = replace(plan, parts=ask.parts) if ask.parts else plan
        always, never = (
            " and ".join(map(rule_words, rules_for(call.name, asked, allow=allow, cwd=cwd))) for allow in (True, False)
        )
        reason, changes = doubt(ask.doubtful) if ask.doubtful is not None else "", ""
        outdated = outdated_rule(call.name, plan, rules_at(self._branch.row.permissions, cwd))
        if outdated is not None and not reason:
            reason, changes = change_of_tool(outdated, plan)
        offers_writes = can_last and plan.access == "execute" and plan.command_access == "write"
        is_inner = plan.inner_arguments is not None
        answer = await self._client.ask(
            PermissionQuestion(
                call=ref,
                name=(plan.rule_tool if is_inner else None) or call.name,
                arguments=call.arguments if plan.inner_arguments is None else plan.inner_arguments,
                plan=plan,
                always=always if can_last else "",
                never=never if can_last else "",
                reason=reason,
                offers_writes=offers_writes,
                rule="" if reason else allowing_rule(call.name, asked),
                changes=changes,
            )
        )
        if answer == "cancelled":
            return None
        allows = answer.startswith("allow")
        rules: tuple[PermissionRule, ...] = ()
        if offers_writes and answer == "allow_writes":
            rules = (rule_for_writes(cwd),)
        elif (can_last and answer in ("allow_always", "reject_always")) or (allows and plan.asks_once):
            rules = rules_for(call.name, asked, allow=allows, cwd=cwd)
        known = self._branch.row.permissions
        # A rule with a fingerprint replaces the answer about the tool as it was before.
        known = tuple(value for value in known if not any(rule.fingerprint and replaces(rule, value) for rule in rules))
        new = [stored for rule in rules if (stored := rule.as_json()) not in known]
        if new:
            await self._branch.change(SessionChanges(permissions=(*known, *new)))
        if allows:
            return Allow(why=f"{answer.replace('_', ' ')} by the user")
        return Refuse(words={"cannot_ask": CANNOT_ASK, "unanswered": UNANSWERED}.get(answer, REJECTED))
