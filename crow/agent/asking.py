"""May this call run: the policy applied to a session as it stands, and the user asked where it says so.

Strategy: mode and rules are looked up at each call, so that a change counts from the next one on; sub-agents share the
instance of their session, and so its mode, its rules and its user. What an "always" answer means is stored with the
session. Knows the policy and the user; not tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from crow.agent import Client, PermissionQuestion
from crow.agent.branch import Branch
from crow.agent.permission import Allow, Ask, Refuse, Rule, decide, rule_for, rule_words, rules_in
from crow.domain.entries import CallRef
from crow.domain.messages import ToolCall
from crow.store import SessionChanges
from crow.tools import Offer

__all__ = ["Permissions", "Verdict"]

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
class Verdict:
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

    async def judge(self, ref: CallRef, call: ToolCall, offer: Offer) -> Verdict:
        """Whether an announced call may run."""
        row = self._branch.row
        decision = decide(call.name, offer, row.mode, (*self.rules, *rules_in(row.permissions)))
        match decision:
            case Allow(why=why):
                return Verdict(why=why)
            case Refuse(words=words):
                return Verdict(words=words)
            case Ask():
                return await self._ask(ref, call, offer)
            case _ as never:
                assert_never(never)

    async def _ask(self, ref: CallRef, call: ToolCall, offer: Offer) -> Verdict:
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
            return Verdict(dismissed=True)
        allows = answer in ("allow_once", "allow_always")
        if (can_last and answer in ("allow_always", "reject_always")) or (allows and offer.asks_once):
            await self._remember(rule_for(call.name, offer, allow=allows))
        if allows:
            return Verdict(why=f"{answer.replace('_', ' ')} by the user")
        return Verdict(words={"cannot_ask": CANNOT_ASK, "unanswered": UNANSWERED}.get(answer, REJECTED))

    async def _remember(self, rule: Rule) -> None:
        known = self._branch.row.permissions
        if rule.as_json() not in known:
            await self._branch.change(SessionChanges(permissions=(*known, rule.as_json())))
