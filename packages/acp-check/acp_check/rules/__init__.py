"""The rules of the protocol, by area."""

from __future__ import annotations

from acp_check.rules import client, handshake, sessions, settings, shapes, tools, turns, wire
from acp_check.rules.causes import one_for_each_cause
from acp_check.rules.rule import Finding, Rule, Severity, Verdict
from acp_check.run import Run

__all__ = ["RULES", "Finding", "Rule", "Severity", "Verdict", "judge"]

RULES: tuple[Rule, ...] = (
    *wire.RULES,
    *handshake.RULES,
    *sessions.RULES,
    *settings.RULES,
    *turns.RULES,
    *tools.RULES,
    *client.RULES,
    *shapes.RULES,
)


def judge(run: Run, rules: tuple[Rule, ...] = RULES) -> list[Verdict]:
    """Apply the rules to a run, and return one verdict for each rule.

    Findings are dropped if they only show that the agent requires authentication, or that no prompt worked at all. If
    all findings of a rule are dropped, the rule does not apply. Only the rule `prompt.text` still reports that no
    prompt worked.
    """
    turns = run.turns()
    are_all_prompts_lost = run.is_live and bool(turns) and all(turn.exchange.result is None for turn in turns)
    verdicts = []
    for rule in rules:
        outcome = rule.check(run)
        reason = outcome if isinstance(outcome, str) else ""
        findings = [] if isinstance(outcome, str) else outcome
        wanted = [finding for finding in findings if not _wants_authentication(finding)]
        if are_all_prompts_lost and rule.id != _FIRST_PROMPT:
            wanted = [finding for finding in wanted if not _is_lost_prompt(finding)]
        if findings and not wanted:
            reason = "the agent requires authentication, or no prompt worked"
        verdicts.append(Verdict(rule=rule, findings=tuple(wanted), reason=reason))
    return one_for_each_cause(run, verdicts)


_FIRST_PROMPT = "prompt.text"


def _wants_authentication(finding: Finding) -> bool:
    return any(_error_code(line.message) == -32000 for line in finding.lines)


def _is_lost_prompt(finding: Finding) -> bool:
    match [line.message for line in finding.lines]:
        case [{"method": "session/prompt", "id": request_id}, {"error": _, "id": answered_id}]:
            return bool(request_id == answered_id)
    return False


def _error_code(message: object) -> object:
    match message:
        case {"error": {"code": code}}:
            return code
    return None
