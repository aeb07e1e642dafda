"""A whole recording put to the judges.

Strategy: each message is judged on its own and by its place; a fault is noted with its line and the side whose it is,
and the next message is judged all the same. What was still open when the recording ended is told, not held against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from crow.trace.order import Order
from crow.trace.recording import Recorded
from crow.trace.schema import Judge, WireFault

__all__ = ["Verdict", "check"]

LINE_BYTES = 32 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class Verdict:
    """`faults` of the agent as `line 12: words`, `client_faults` likewise; `unanswered`: the requests without an answer
    at the end, as `method (id)`."""

    messages: int = 0
    faults: list[str] = field(default_factory=list)
    client_faults: list[str] = field(default_factory=list)
    unanswered: tuple[str, ...] = ()


def check(recording: Iterable[Recorded]) -> Verdict:
    """Judge every message of a recording."""
    verdict, judge, order = Verdict(), Judge(), Order()
    for recorded in recording:
        verdict.messages += 1
        if recorded.text is not None:
            if recorded.sender == "agent":  # a client's broken line is the agent's to answer
                verdict.faults.append(f"line {recorded.line}: no JSON from the agent: {recorded.text[:200]}")
            continue
        for rule in (judge, order):
            try:
                rule.check(recorded.sender, recorded.message)
            except WireFault as fault:
                faults = verdict.faults if recorded.sender == "agent" else verdict.client_faults
                faults.append(f"line {recorded.line}: {fault}")
                break
    verdict.unanswered = judge.unanswered()
    return verdict
