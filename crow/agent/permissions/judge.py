"""Decides whether the calls of a session may run, and asks the user where needed."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import anyio.to_thread

from crow.agent import Client, PermissionAnswer, PermissionQuestion
from crow.agent.history.branch import Branch
from crow.agent.permissions.decisions import (
    Allow,
    Ask,
    Refuse,
    allowing_rule,
    common_folder,
    decide,
    doubt,
    excluded_paths,
    may_attach,
    refusal_of_changes,
    url_rules,
)
from crow.agent.permissions.host_rules import (
    decide_about_host,
    is_named_host,
    is_read_only_host,
    rules_for_hosts,
    siblings_at,
)
from crow.agent.permissions.rules import (
    KEPT_CHANGES,
    NETWORK,
    PermissionRule,
    change_of_tool,
    current_rules,
    is_path_rule,
    named_places,
    narrower_mode,
    outdated_rule,
    rule_for_changes,
    rule_for_writes,
    rule_words,
    rules_at,
    rules_for,
    with_answer,
)
from crow.domain.entries import CallRef, Diff
from crow.domain.messages import ToolCall
from crow.tools import Coverage, PlannedCall, Workspace
from crow.tools.layers import Changes
from crow.tools.layers.describe import summary_of
from crow.tools.network import Host, HostVerdict, Use
from crow.tools.network.registries import Registries, find_registries
from crow.tools.sampling import SamplingRequest

_REJECTED = (
    "The user did not allow this call. Do not try it again unasked; ask the user what they want instead. If they "
    "change their mind, they can allow the call when you ask again, or with /permissions."
)


CANNOT_ASK = (
    "This call needs the user's permission, and the user's editor cannot ask for it. Do it another way, or tell the "
    "user: they can choose another mode, type /permissions allow, or allow the call in config.toml under "
    "[permissions]. Protected paths always need an editor that asks."
)


_UNANSWERED = (
    "The user was asked whether this call may run, and did not answer in time. So the call did not run. Do not try it "
    "again unasked; say what it was for, so that the user can come back to it."
)


_CHANGES_REJECTED = (
    "The command ran, but the user did not allow its changes, so they were dropped. Do not try it again unasked; ask "
    "the user what they want instead."
)


_FAULT_NOT_SHOWN = "This call cannot run. The reason is not shown, because it may quote a file of the call."

_HOST_REJECTED = "the user did not allow it; do not try it again unasked"
_HOST_IN_BACKGROUND = (
    "nobody is asked for a command in the background; run a command that reaches the host in the foreground first, so "
    "that the user can allow it always"
)


_Review: TypeAlias = Callable[[Changes, PlannedCall | None], Awaitable[str]]
"""Takes the changes of a command, and the command's plan if an earlier call started the command. Returns the reason for
the model if the changes are not kept, otherwise an empty string."""


def about_changes(plan: PlannedCall, changes: Changes, diffs: Sequence[Diff], cwd: str) -> PlannedCall:
    """Return the plan of a command that has run in a layer, with the changes that it made there. The user is asked
    about this plan."""
    shown = tuple(change.path for change in changes.shown)
    silent = {change.path for change in changes.listed if not change.is_same} - set(shown)
    return replace(
        plan,
        announcement=replace(plan.announcement, diffs=tuple(diffs)),
        command_access="write",
        changed=shown,
        silently_changed=tuple(sorted(silent)),
        changed_below=os.path.realpath(cwd),
        touched=replace(plan.touched, is_protected=bool(changes.protected)),
        review_text=summary_of(changes),
    )


class Permissions:
    """Decides whether calls of one session may run, and asks the user where needed.

    The mode and the rules are read for each call, so a change applies from the next call on. A subagent uses its
    session's instance, or an instance that allows less.
    """

    def __init__(
        self,
        branch: Branch,
        client: Client,
        workspace: Workspace,
        *,
        limit: str = "",
        session: Permissions | None = None,
    ) -> None:
        self._branch = branch
        self._client = client
        self._workspace = workspace
        self.rules: tuple[PermissionRule, ...] = ()
        """The rules of the user's file."""
        self._limit = limit
        """A mode that limits these permissions: nothing is allowed that this mode does not allow. Empty if only the
        mode of the session counts."""
        self._session = session or self
        """The permissions of the session itself, which have the rules of the user's file. They may be this object."""
        self.reviews: dict[str, _Review] = {} if session is None else session.reviews
        """Maps the id of each running call to the function that decides whether the changes of its command are kept."""
        self.hosts: dict[str, Callable[[Host, Use | None], Awaitable[HostVerdict]]] = (
            {} if session is None else session.hosts
        )
        """Maps the id of each running call to the function that decides whether its command may reach a host, and use a
        credential there."""

    def narrowed(self, mode: str) -> Permissions:
        """Return the session's permissions, limited to what `mode` allows. Later changes of the session's mode and
        rules also change the returned permissions."""
        limit = narrower_mode(self._limit, mode) if self._limit else mode
        return Permissions(self._branch, self._client, self._workspace, limit=limit, session=self._session)

    def asking(self, client: Client) -> Permissions:
        """Return the same permissions, but ask this client."""
        return Permissions(self._branch, client, self._workspace, limit=self._limit, session=self._session)

    @property
    def _mode(self) -> str:
        mode = self._branch.row.mode
        return narrower_mode(mode, self._limit) if self._limit else mode

    @property
    def is_planning(self) -> bool:
        """Whether the mode is `plan`."""
        return self._mode == "plan"

    def may_read(self) -> Callable[[Path], bool]:
        """Return a function that takes the path of a file in the workspace. It returns whether crow may give this file
        to the model without a tool call. It reads the disk, so call it in a thread."""
        return partial(
            may_attach, workspace=self._workspace, rules=current_rules(self._session.rules, self._branch.row)
        )

    async def complete(self, call: ToolCall, plan: PlannedCall) -> PlannedCall:
        """Add to the plan all names of a file with hard links, because a rule may name any of them. Also add the paths
        that the rules hide from a search or a confined command, and the rules for redirects."""
        name = plan.coverage.rule_tool or call.name
        rules = current_rules(self._session.rules, self._branch.row)
        if plan.parts:
            parts = tuple([await self.complete(call, part) for part in plan.parts])
            return replace(plan, parts=parts, excluded=excluded_paths(name, rules))
        if plan.touched.has_hard_links and any(
            is_path_rule(rule, name, *plan.coverage.like, "read_file") for rule in rules
        ):
            path = Path(plan.touched.rule_paths[0])
            places = [place for place in named_places(rules) if os.path.isabs(place)]
            names, is_complete = (await self._workspace.find_names([path], places))[path]
            root = self._workspace.resolve(".")
            inside = [str(Path(name).relative_to(root)) for name in names if Path(name).is_relative_to(root)]
            others = (*plan.touched.other_paths, *names, *inside)
            plan = replace(plan, touched=replace(plan.touched, other_paths=others, has_unknown_names=not is_complete))
        return replace(plan, excluded=excluded_paths(name, rules), url_rules=url_rules(name, self._mode, rules))

    async def review(self, call_id: str, changes: Changes, command: PlannedCall | None = None) -> str:
        """See :class:`crow.tools.ChangeReviewer`."""
        decide_about = self.reviews.get(call_id)
        if decide_about is None:
            return "The call has ended, so its changes were dropped."
        return await decide_about(changes, command)

    async def review_host(self, call_id: str, host: Host, use: Use | None = None) -> HostVerdict:
        """See :class:`crow.tools.ChangeReviewer`."""
        decide_about = self.hosts.get(call_id)
        return HostVerdict(refusal="the call has ended") if decide_about is None else await decide_about(host, use)

    async def decide_host(self, command: PlannedCall, host: Host, use: Use | None = None) -> HostVerdict:
        """See :class:`crow.tools.ChangeReviewer`."""
        rules = current_rules(self._session.rules, self._branch.row)
        is_bounded = self._workspace.is_bounded
        decision, _ = decide_about_host("shell", command, host, self._mode, rules, use=use, is_bounded=is_bounded)
        match decision:
            case Ask():
                return HostVerdict(refusal=_HOST_IN_BACKGROUND, is_lasting=False)
            case Refuse(words=words):
                return HostVerdict(refusal=words, is_lasting=False)
        is_read_only, is_named = is_read_only_host(host, rules), is_named_host(host, rules)
        return HostVerdict(is_named=is_named, is_read_only=is_read_only, is_lasting=False)

    async def judge_host(
        self, ref: CallRef, call: ToolCall, plan: PlannedCall, host: Host, use: Use | None = None
    ) -> HostVerdict | None:
        """Decide whether the command of a call may reach a host, and use a credential there. Return None if the user
        cancelled the turn instead of answering."""
        row, is_bounded = self._branch.row, self._workspace.is_bounded
        rules = current_rules(self._session.rules, row)
        decision, asked = decide_about_host(call.name, plan, host, self._mode, rules, use=use, is_bounded=is_bounded)
        also: tuple[Host, ...] = ()
        if isinstance(decision, Ask):
            also = siblings_at(plan, host, self._mode, rules)
            name = asked.coverage.rule_tool or NETWORK
            about = ToolCall(id=call.id, name=name, arguments=json.dumps({"host": asked.coverage.argument}))
            found = await self._ask(ref, about, asked, decision)
            if found is None:
                return None
            decision = found
        match decision:
            case Refuse(words=words):
                return HostVerdict(refusal=_HOST_REJECTED if words == _REJECTED else words)
            case _:
                is_read_only = is_read_only_host(host, rules)
                is_named = is_named_host(host, rules)
                return HostVerdict(is_named=is_named, is_read_only=is_read_only, also=also)

    async def refusal(self, call: ToolCall, plan: PlannedCall) -> str:
        """Return why a call that the user has requested is refused, for example by a deny rule or in plan mode. Return
        an empty string if the call may run."""
        row = self._branch.row
        plan = await self.complete(call, plan)
        rules, is_bounded = current_rules(self._session.rules, row), self._workspace.is_bounded
        decision = decide(call.name, plan, self._mode, rules, is_bounded=is_bounded)
        return decision.words if isinstance(decision, Refuse) else ""

    async def judge(self, ref: CallRef, call: ToolCall, plan: PlannedCall) -> Allow | Refuse | None:
        """Decide whether an announced call may run. Return None if the user cancelled the turn instead of answering."""
        row = self._branch.row
        rules, is_bounded = current_rules(self._session.rules, row), self._workspace.is_bounded
        decision = decide(call.name, plan, self._mode, rules, is_bounded=is_bounded)
        return await self._ask(ref, call, plan, decision) if isinstance(decision, Ask) else decision

    def refusal_of_changes(self, plan: PlannedCall) -> str:
        """Return why a deny rule forbids the changes of a command. Return an empty string if none does."""
        refusal = refusal_of_changes(plan, current_rules(self._session.rules, self._branch.row))
        return "" if refusal is None else refusal.words

    def refusal_to_read(self, plan: PlannedCall) -> Refuse | None:
        """Return the refusal if the user's rules forbid, or may forbid, reading one of the files that a call touches.
        Return None otherwise. `plan` comes from `complete`."""
        rules = current_rules(self._session.rules, self._branch.row)
        for part in plan.each:
            if part.touched.rule_paths:
                reading = replace(
                    part, access="read", parts=(), coverage=replace(part.coverage, rule_tool=None, like=())
                )
                match decide("read_file", reading, self._mode, rules, is_bounded=self._workspace.is_bounded):
                    case Refuse() as refusal:
                        return refusal
                    case Ask(doubtful=PermissionRule() as rule):
                        return Refuse(words=f"{_FAULT_NOT_SHOWN} {doubt(rule)}")
        return None

    async def judge_sampling(self, request: SamplingRequest, text: str) -> Allow | Refuse | None:
        """Decide whether the model may answer a request of a server. `text` is the text that the model would
        get."""
        plan = PlannedCall(
            announcement=request.announcement,
            access="external",
            review_text=text,
            coverage=Coverage(rule_tool="sampling", argument=request.prefix, is_read_only=request.is_read_only),
        )
        return await self.judge(request.call, ToolCall(id="", name=request.name, arguments=request.arguments), plan)

    async def _registries(self, asked: PlannedCall) -> Registries:
        """Return the registries of the session's project, if a planned call wants to connect to one of them."""
        if asked.coverage.rule_tool != NETWORK:
            return Registries()
        found = await anyio.to_thread.run_sync(find_registries, [self._workspace.resolve(".")])
        return found if asked.coverage.argument in found.hosts else Registries()

    async def _ask(self, ref: CallRef, call: ToolCall, plan: PlannedCall, ask: Ask) -> Allow | Refuse | None:
        asked = replace(plan, parts=ask.parts) if ask.parts else plan
        can_last = not plan.touched.is_protected and not plan.coverage.asks_once and ask.doubtful is None
        below = common_folder(plan.changed, self._branch.row.cwd) if can_last else ""
        registries = await self._registries(asked) if can_last else Registries()
        lasting = self._lasting_answers(call, plan, asked, below, registries, can_last=can_last)
        always, never = (
            " and ".join(map(rule_words, lasting.get(answer, ()))) for answer in ("allow_always", "reject_always")
        )
        reason, changes = doubt(ask.doubtful) if ask.doubtful is not None else "", ""
        outdated = outdated_rule(call.name, plan, rules_at(self._branch.row.permissions, self._branch.row.cwd))
        if outdated is not None and not reason:
            reason, changes = change_of_tool(outdated, plan)
        is_inner = plan.coverage.inner_arguments is not None
        answer = await self._client.ask(
            PermissionQuestion(
                call=ref,
                name=(plan.coverage.rule_tool if is_inner else None) or call.name,
                arguments=call.arguments if plan.coverage.inner_arguments is None else plan.coverage.inner_arguments,
                plan=plan,
                always=always,
                never=never,
                reason=reason,
                offers_writes="allow_writes" in lasting,
                below=below,
                registries=registries.words() if registries.hosts else "",
                rule="" if reason else allowing_rule(call.name, asked),
                changes=changes,
            )
        )
        if answer == "cancelled":
            return None
        if answer in lasting:
            await self._branch.change_rules(partial(with_answer, lasting[answer]))
        if answer.startswith("allow"):
            return Allow(why=f"{answer.replace('_', ' ')} by the user")
        if plan.changed and plan.access == "execute" and answer.startswith("reject"):
            return Refuse(words=_CHANGES_REJECTED)
        return Refuse(words={"cannot_ask": CANNOT_ASK, "unanswered": _UNANSWERED}.get(answer, _REJECTED))

    def _lasting_answers(
        self,
        call: ToolCall,
        plan: PlannedCall,
        asked: PlannedCall,
        below: str,
        registries: Registries,
        *,
        can_last: bool,
    ) -> Mapping[PermissionAnswer, tuple[PermissionRule, ...]]:
        """Return the answers that add rules to the session, each with the rules that it adds. `asked` has the parts of
        the call that the question is about."""
        cwd = self._branch.row.cwd
        lasting: dict[PermissionAnswer, tuple[PermissionRule, ...]] = {}
        if plan.coverage.asks_once:
            lasting["allow_once"] = rules_for(call.name, asked, allow=True, cwd=cwd)
        # a rule for a subagent's changes would name a subagent that has ended
        if can_last and plan.coverage.rule_tool != KEPT_CHANGES:
            lasting["allow_always"] = rules_for(call.name, asked, allow=True, cwd=cwd)
            lasting["reject_always"] = rules_for(call.name, asked, allow=False, cwd=cwd)
        if can_last and plan.access == "execute" and plan.command_access == "write":
            lasting["allow_writes"] = (rule_for_writes(cwd),)
        if below:
            lasting["allow_below"] = (rule_for_changes(below, cwd),)
        if registries.hosts:
            lasting["allow_registries"] = rules_for_hosts(registries.hosts, cwd)
        return lasting
