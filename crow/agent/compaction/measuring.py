"""How full the context is: what the provider counted, where that can be believed, and an estimate of the rest.

Strategy: the newest answer since the last break says what its request had; what came after is estimated and scaled by
how far the estimates of this endpoint were off. Between two breaks every request extends the one before, so a count
that shrinks is wrong, or the server cuts silently. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from crow.domain.conversation import Context
from crow.domain.entries import Assistant, Checkpoint, Entry, Mask, Prompt, Restore
from crow.domain.messages import AssistantMessage

__all__ = [
    "BELIEVED",
    "Measure",
    "Report",
    "believed_input",
    "clamped",
    "measure",
    "recalibrated",
    "reports_since_break",
    "silent_cut",
]

CALIBRATION = (0.5, 4.0)
BELIEVED = (0.25, 4.0)
"""A count is believed between so many times the calibrated estimate."""

LOOK_BACK = 16
"""So many answers are compared with each other."""

LOOK_FOR = 64
"""Among so many, a count is looked for; a server that counts at all counts in every answer."""

SHRUNK = 1.1
"""A request that extends one of so many times its tokens was counted wrong, or the other was."""

GREW = 1.2
PLATEAU = (0.75, 1.005)
BLOCK = 1_500
"""What a provider that counts uncached tokens only may count beyond what is new: its cache works in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """`used`: tokens of the next request. `scale` turns estimates into tokens; `is_reported`: the provider's counts
    of this endpoint support it. `fixed`: tokens of system message and tool specs."""

    used: int
    fixed: int
    scale: float
    is_reported: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the provider counted of the request that `entry` answers, and how it was estimated, uncalibrated."""

    entry: Entry
    tokens: int
    estimate: int

    def doubt(self, calibration: float) -> float:
        """How far the count is from the calibrated estimate; 0: not at all."""
        return abs(math.log(self.tokens / max(1.0, self.estimate * clamped(calibration))))

    def is_believed(self, calibration: float) -> bool:
        """Whether the count is between a quarter and four times the calibrated estimate."""
        low, high = BELIEVED
        return low <= self.tokens / max(1.0, self.estimate * clamped(calibration)) <= high


def measure(context: Context, entries: Sequence[Entry], endpoint: str, calibration: float) -> Measure:
    """Tokens of `context`, which renders `entries`, for `endpoint`; `calibration` where that has reported nothing, or
    only what it left of the requests."""
    reports = reports_since_break(entries, endpoint)
    if silent_cut(reports, calibration) is not None:
        scale = clamped(calibration)
        whole, fixed = round(context.estimate * scale), round(context.fixed_estimate * scale)
        return Measure(used=whole, fixed=fixed, scale=scale, is_reported=False)
    anchor = trusted(reports, calibration)
    scaling = anchor or newest_believed(entries, endpoint, calibration)
    scale = clamped(scaling.tokens / scaling.estimate if scaling else calibration)
    used = None if anchor is None else anchored(context, anchor, scale)
    return Measure(
        used=round(context.estimate * scale) if used is None else used,
        fixed=round(context.fixed_estimate * scale),
        scale=scale,
        is_reported=scaling is not None,
    )


def recalibrated(calibration: float, found: Measure) -> float:
    """The calibration to keep after `found`: half way to what was reported."""
    return (calibration + found.scale) / 2 if found.is_reported else calibration


def silent_cut(reports: Sequence[Report], calibration: float) -> int | None:
    """The tokens at which the server cuts requests without a word; None if nothing in the `reports` since the last
    break says that it does.

    It does when the requests since the last break grew by a fifth and three counts in a row did not. A provider that
    counts uncached tokens only looks alike for a moment: its counts are those of what is new.
    """
    if len(reports) < 3:
        return None
    newest, *earlier = reports
    added = max(0, newest.estimate - earlier[0].estimate) * clamped(calibration)
    if newest.tokens <= 1.5 * added + BLOCK:
        return None
    most = least = newest.tokens
    for count, report in enumerate(earlier):
        most, least = max(most, report.tokens), min(least, report.tokens)
        if least < PLATEAU[0] * most:
            return None
        is_flat = count > 0 and most <= PLATEAU[1] * report.tokens
        if is_flat and newest.estimate >= GREW * report.estimate and report.is_believed(calibration):
            return most
    return None


def believed_input(entry: Entry, endpoint: str, calibration: float) -> int | None:
    """What `endpoint` counted of the request that `entry` answers, if that can be believed."""
    report = report_of(entry, endpoint)
    return report.tokens if report is not None and report.is_believed(calibration) else None


def reports_since_break(entries: Sequence[Entry], endpoint: str) -> tuple[Report, ...]:
    """Newest first: those of requests that extend each other."""
    reports = []
    left = LOOK_BACK
    for entry in reversed(entries):
        if isinstance(entry.body, (Checkpoint, Mask, Restore, Prompt)) or not left:
            break
        if isinstance(entry.body, Assistant):
            left -= 1
            report = report_of(entry, endpoint)
            if report is not None:
                reports.append(report)
    return tuple(reports)


def report_of(entry: Entry, endpoint: str) -> Report | None:
    """None too for a count of zero, which only says that nobody counted."""
    usage = entry.usage
    if not isinstance(entry.body, Assistant) or usage is None or entry.body.endpoint != endpoint:
        return None
    tokens, cached = usage.input_tokens or 0, usage.cached_tokens or 0
    if not tokens or not entry.estimate:
        return None
    # where more was cached than sent, the one does not include the other
    return Report(entry=entry, tokens=tokens + (cached if cached > tokens else 0), estimate=entry.estimate)


def trusted(reports: Sequence[Report], calibration: float) -> Report | None:
    """The newest count that can be believed, given newest first; of two that contradict each other, the likelier."""
    believed = [report for report in reports if report.is_believed(calibration)]
    if not believed:
        return None
    best = believed[0]
    for older in believed[1:]:
        if older.tokens > best.tokens * SHRUNK and older.doubt(calibration) < best.doubt(calibration):
            best = older
    return best


def newest_believed(entries: Sequence[Entry], endpoint: str, calibration: float) -> Report | None:
    """For the scale alone, a break since then does not matter."""
    answers = (entry for entry in reversed(entries) if isinstance(entry.body, Assistant))
    for entry in islice(answers, LOOK_FOR):
        report = report_of(entry, endpoint)
        if report is not None and report.is_believed(calibration):
            return report
    return None


def anchored(context: Context, anchor: Report, scale: float) -> int | None:
    """What was counted, what was answered, and an estimate of what came after; None if the answer is not in view."""
    index = answer_index(context, anchor.entry.id)
    usage = anchor.entry.usage
    if index is None or usage is None:
        return None
    # reasoning does not go back, or only as a field that the next report will count
    said = (usage.output_tokens or 0) - (usage.reasoning_tokens or 0) if usage.output_tokens else None
    answer = context.estimates[index] * scale if said is None else max(0, said)
    return round(anchor.tokens + answer + sum(context.estimates[index + 1 :]) * scale)


def answer_index(context: Context, entry: int) -> int | None:
    """Where the answer stored as `entry` stands in the request."""
    for index in range(len(context.origins) - 1, 0, -1):
        if context.origins[index] == entry and isinstance(context.messages[index], AssistantMessage):
            return index
    return None


def clamped(calibration: float) -> float:
    """A calibration within its bounds."""
    low, high = CALIBRATION
    return min(high, max(low, calibration))
