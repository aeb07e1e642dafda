"""Keeps one finding for each cause: one refused request or one dead agent is not the fault of ten rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from acp_check.rules.rule import Finding, Rule, Verdict
from acp_check.run import Connection, Exchange, Run

Cause: TypeAlias = tuple[str, object]
"""What a finding is about: a request, a line, or the end of an agent, each by its number or name."""

_GENERAL = ("jsonrpc.answered", "shape.", "extensibility.no-custom-fields")
"""The ids of the rules that speak last, because each says of all messages what another rule says of one."""


def one_for_each_cause(run: Run, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts without the findings whose cause another rule has already reported. The rule that knows most
    about the message keeps it; a rule that loses all of its findings does not apply."""
    causes = _Causes(run)
    reported: dict[Cause, Rule] = {}
    kept: dict[str, Verdict] = {}
    for verdict in sorted(verdicts, key=lambda each: each.rule.id.startswith(_GENERAL)):
        is_general = verdict.rule.id.startswith(_GENERAL)
        mine: list[Finding] = []
        first: Rule | None = None
        for finding in verdict.findings:
            found = list(causes.of(finding))
            before = next(
                (reported[cause] for cause in found if cause in reported and _is_same(cause, is_general)), None
            )
            if before is None or (before is verdict.rule and found[0][0] != "end"):
                mine.append(finding)
            elif first is None:
                first = before
            for cause in found:
                reported.setdefault(cause, verdict.rule)
        reason = verdict.reason
        if verdict.findings and not mine and first is not None:
            reason = f"the same messages break {first.id}"
        kept[verdict.rule.id] = Verdict(rule=verdict.rule, findings=tuple(mine), reason=reason)
    return [kept[verdict.rule.id] for verdict in verdicts]


def _is_same(cause: Cause, is_general: bool) -> bool:
    """Return whether a second finding with this cause says nothing new. One line may have several faults, but what a
    general rule says of it is what the other rule has said."""
    return is_general or cause[0] != "line"


class _Causes:
    """Finds the causes of findings about one run."""

    def __init__(self, run: Run) -> None:
        self._requests: dict[int, tuple[Connection, Exchange]] = {
            exchange.request.line: (connection, exchange)
            for connection in run.connections
            for exchange in connection.asked
        }

    def of(self, finding: Finding) -> Iterator[Cause]:
        """Yield the causes of a finding: the end of the agent, the requests that failed, and its last line."""
        for connection, exchange in self._asked(finding):
            if exchange.response is None and connection.died_after is not None:
                yield "end", id(connection)
            elif exchange.result is None:
                yield "request", exchange.request.line
        if finding.lines and finding.lines[-1].sender == "agent":
            yield "line", finding.lines[-1].line

    def _asked(self, finding: Finding) -> Iterable[tuple[Connection, Exchange]]:
        return (self._requests[line.line] for line in finding.lines if line.line in self._requests)
