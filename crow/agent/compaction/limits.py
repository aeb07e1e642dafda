"""How full the context is, and how full it may be.

Strategy: sizes are the provider's tokens. What it counted itself is taken where it can be believed; the rest is
estimated and scaled by how far the estimates of this endpoint were off. The limits are formulas over the window and
the fixed part alone, so that they hold from 4 k to 2 M tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crow.domain.conversation import Context
from crow.domain.entries import Assistant, Checkpoint, Entry, Mask, Prompt, Restore
from crow.domain.messages import AssistantMessage
from crow.domain.tokens import estimate_text

__all__ = [
    "DEFAULT_WINDOW",
    "CompactionSettings",
    "Limits",
    "Measure",
    "cut_for",
    "limits_for",
    "measure",
    "recalibrated",
]

DEFAULT_WINDOW = 128_000
"""Tokens assumed of a model whose window nobody has told."""

MIN_ROOM = 2_000
"""With less room than this between the fixed part and the threshold, compaction cannot help."""

SAMPLE_CHARS = 100_000
"""Head and tail of a larger text tell what its characters weigh; they are what is shown of it."""

CALIBRATION = (0.5, 4.0)
BELIEVED = (0.25, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
    """`auto` false means never, except on command. `threshold`: part of the window at which compaction starts.
    `keep_tokens`: how much of the tail stays verbatim, at most. `target`: part of the room that may be full after."""

    auto: bool = True
    threshold: float | None = None
    keep_tokens: int | None = None
    target: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens. `window` is the whole; `fixed` is system message and tool specs; from `threshold` on there is
    compaction, which aims at `target`; `room` is threshold less fixed. `keep`, `pins`, `summary` and `lists` bound the
    verbatim tail, the pinned messages, the summary, and plan and files. `output` is sent as the limit; None: unknown.
    """

    window: int
    output: int | None
    fixed: int
    threshold: int
    room: int
    target: int
    keep: int
    pins: int
    summary: int
    lists: int

    @property
    def ceiling(self) -> int:
        """The most that is accepted when nothing is kept verbatim."""
        return self.fixed + self.room * 4 // 5

    @property
    def is_too_small(self) -> bool:
        """Whether the fixed part leaves too little room to work in."""
        return self.room < MIN_ROOM


def limits_for(window: int, max_output: int | None, fixed: int, settings: CompactionSettings) -> Limits:
    """The limits for a window and a fixed part, in tokens. `max_output` None: the endpoint has not told."""
    output = None if max_output is None else min(max_output, window // 4)
    share = 0.85 if settings.threshold is None else settings.threshold
    threshold = min(int(window * share), window - max(min(20_000, window // 5), output or 0))
    room = max(0, threshold - fixed)
    target = 0.5 if settings.target is None else settings.target
    keep = 20_000 if settings.keep_tokens is None else settings.keep_tokens
    return Limits(
        window=window,
        output=output,
        fixed=fixed,
        threshold=threshold,
        room=room,
        target=fixed + int(room * target),
        keep=min(keep, room // 5),
        pins=min(20_000, room // 8),
        summary=min(6_000, room // 10),
        lists=min(4_000, room // 20),
    )


def cut_for(text: str, limits: Limits, scale: float, *, beside: int = 1) -> int | None:
    """How many characters of `text` the model may see as one message: a quarter of the room, less when it is one of
    `beside` results of a step that share half of it. None: all of them."""
    tokens = min(limits.room // 4, limits.room // 2 // max(1, beside)) / scale
    sample = text if len(text) <= SAMPLE_CHARS else text[: SAMPLE_CHARS // 2] + text[-SAMPLE_CHARS // 2 :]
    whole = estimate_text(sample) * len(text) / max(1, len(sample))
    if whole <= tokens:
        return None
    return int(len(text) * tokens / whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """`used`: tokens of the next request. `scale` turns estimates into tokens; `is_reported`: the provider's counts
    of this endpoint support it. `fixed`: tokens of system message and tool specs."""

    used: int
    fixed: int
    scale: float
    is_reported: bool


def measure(context: Context, entries: Sequence[Entry], endpoint: str, calibration: float) -> Measure:
    """Tokens of `context`, which renders `entries`, for `endpoint`; `calibration` where that has reported nothing.

    A report that is less than a quarter or more than four times the calibrated estimate is not believed.
    """
    scale, is_reported = reported_scale(entries, endpoint, calibration)
    used = anchored(context, entries, endpoint, calibration, scale)
    return Measure(
        used=round(context.estimate * scale) if used is None else used,
        fixed=round(context.fixed_estimate * scale),
        scale=scale,
        is_reported=is_reported,
    )


def recalibrated(calibration: float, found: Measure) -> float:
    """The calibration to keep after `found`: half way to what was reported."""
    return (calibration + found.scale) / 2 if found.is_reported else calibration


def reported_scale(entries: Sequence[Entry], endpoint: str, calibration: float) -> tuple[float, bool]:
    """Reported by estimated tokens of the newest request that has both. A break since then does not matter here."""
    for entry in reversed(entries):
        reported = input_tokens(entry, endpoint)
        if reported and entry.estimate and is_believed(reported, entry.estimate, calibration):
            return clamped(reported / entry.estimate), True
    return clamped(calibration), False


def anchored(context: Context, entries: Sequence[Entry], endpoint: str, calibration: float, scale: float) -> int | None:
    """What the newest answer after the last break reported, and an estimate of what came after; None if it reported
    nothing that can be believed."""
    for entry in reversed(entries):
        if isinstance(entry.body, (Checkpoint, Mask, Restore, Prompt)):
            return None
        reported = input_tokens(entry, endpoint)
        if not reported:
            continue
        index = answer_index(context, entry.id)
        if index is None:
            continue
        if not is_believed(reported, context.tools_estimate + sum(context.estimates[:index]), calibration):
            return None
        assert entry.usage is not None
        output = entry.usage.output_tokens
        # reasoning does not go back, or only as a field that the next report will count
        said = context.estimates[index] * scale if not output else output - (entry.usage.reasoning_tokens or 0)
        return round(reported + max(0, said) + sum(context.estimates[index + 1 :]) * scale)
    return None


def input_tokens(entry: Entry, endpoint: str) -> int | None:
    """What `endpoint` reported for the request that this answer ended."""
    if not isinstance(entry.body, Assistant) or entry.usage is None or entry.body.endpoint != endpoint:
        return None
    return entry.usage.input_tokens


def answer_index(context: Context, entry: int) -> int | None:
    """Where the answer stored as `entry` stands in the request."""
    for index in range(len(context.origins) - 1, 0, -1):
        if context.origins[index] == entry and isinstance(context.messages[index], AssistantMessage):
            return index
    return None


def is_believed(reported: int, estimate: int, calibration: float) -> bool:
    low, high = BELIEVED
    return low <= reported / max(1.0, estimate * clamped(calibration)) <= high


def clamped(calibration: float) -> float:
    low, high = CALIBRATION
    return min(high, max(low, calibration))
