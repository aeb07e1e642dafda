"""Measures how full a branch's context is, and calculates how full it may be.

Sizes are in the provider's tokens, except for estimates, which :mod:`crow.domain.tokens` makes without a tokenizer.

`measure` finds two things in the token counts that the provider reported with its answers:

- The anchor is the newest believable count since the last break (see `crow.domain.entries.BREAKS`). The next request
  repeats the counted request, so its size is this count plus the later messages. Without an anchor, the whole request
  is estimated.
- The scale converts an estimate to the provider's tokens. It is the anchor's count divided by the estimate of the same
  request. Without an anchor, it comes from an older believable count, or else from the calibration that is stored with
  the session.

If the counts show that the server truncates requests (see `silent_cut`), neither comes from them.

`limits_for` divides a window: the fixed part (system message and tools), then the room for messages, then the threshold
at which compaction starts, and then a reserve for the answer. Most other limits are shares of the room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from crow.agent.compaction.window import MIN_ROOM, ContextWindow
from crow.agent.history.branch import Branch
from crow.domain.conversation import Context
from crow.domain.entries import BREAKS, Assistant, Body, Entry, Restore
from crow.domain.errors import ContextOverflow
from crow.domain.events import ContextMeasured
from crow.domain.messages import AssistantMessage, JsonObject, ToolCall, Usage
from crow.domain.tokens import estimate_text
from crow.llm import ModelInfo
from crow.store import SessionChanges

_THRESHOLD = 0.85
"""Compaction starts at this share of the window, if the user has set nothing else."""

_RESERVE = 20_000
"""This many tokens of a window, but at most a fifth of it, are left free."""

_ASSUMED_FIXED = 6_000
"""While there is no prompt entry, crow assumes that the system message and the tools take this many tokens, or a sixth
of the window if that is less."""

_MIN_PART = 8_000
"""Crow uses at least this many tokens of a window, or all of it, whatever share the user wants."""

_SAMPLE_CHARS = 100_000
"""A text with more characters than this is estimated from its head and tail, because the model will see only these
parts."""

_CALIBRATION = (0.5, 4.0)
"""The lowest and the highest number of tokens that crow expects for one estimated token."""
_BELIEVED = (0.25, 4.0)
"""Crow believes the provider's token count if the count divided by the calibrated estimate lies between these two
numbers."""

_ANSWERS_COMPARED = 16
"""Of the answers since the last break, at most this many are compared with each other."""
_ANSWERS_SEARCHED = 64
"""Crow looks for the provider's token counts in at most this many answers. If these answers have no counts, older
answers have none either, because a server reports counts with every answer or never."""

_SHRUNK = 1.1
"""A request that extends an earlier request cannot have fewer tokens than the earlier one. If the provider's earlier
count is more than this many times the later one, one of the two counts is wrong."""

_GREW = 1.2
_PLATEAU = (0.75, 1.005)
"""A server truncates requests if its counts stop growing while crow's estimate grows by the factor `_GREW`. Counts have
stopped growing if the largest is at most `_PLATEAU[1]` times the oldest, and each is at least `_PLATEAU[0]` times the
largest."""
_BLOCK = 1_500
"""Some providers count only the input that was not read from their cache. Because these caches work in blocks, such a
count may be larger than the new messages by this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """The settings for compaction."""

    auto: bool = True
    """If false, crow compacts only on command."""
    threshold: float | None = None
    """Where compaction starts: a fraction of the window or, as an integer, a number of tokens."""
    window: float | None = None
    """How much of the model's window to use: a fraction of it or, as an integer, a number of tokens. If None, all."""
    keep_tokens: int | None = None
    """At most this many tokens of recent messages are kept verbatim."""
    target: float | None = None
    """The fraction of the room (see `Limits`) that may be full after a compaction."""
    instruction: str = ""
    """Replaces crow's summary prompt. Crow replaces `{words}` in it with the maximum number of words."""
    compact_model: str = ""
    """If set, crow asks this model for the summary first. If that fails, crow asks the session's own model."""
    early: float | None = None
    """A fraction of the threshold. If the context of an idle session is larger than this fraction, crow writes the
    summary before the next prompt needs it. If None, crow never writes a summary early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a context, in tokens."""

    window: int
    is_configured: bool
    """The user configured `window`. Crow then refuses a request that cannot fit."""
    output: int | None
    """The output limit to send, or None if it is unknown."""
    fixed: int
    """The size of the system message and the tools."""
    threshold: int
    """The size at which compaction starts."""
    room: int
    """`threshold` minus `fixed`."""
    target: int
    """The size that compaction aims at."""
    keep: int
    """The limit for messages kept verbatim."""
    pins: int
    """The limit for pinned messages."""
    summary: int
    """The limit for the summary."""
    lists: int
    """The limit for the plan and the file lists together."""
    skills: int
    """The limit for the skills in use."""
    files: int
    """The limit for the files in use."""
    is_keep_chosen: bool = False
    """The user has chosen `keep` for this compaction, so nothing makes it smaller."""
    is_size_chosen: bool = False
    """The user has chosen the size after this compaction, so it may summarise again what it has just kept."""

    @property
    def ceiling(self) -> int:
        """The largest size that the next request may have after a compaction that keeps no message verbatim."""
        return self.fixed + self.room * 4 // 5

    @property
    def files_ceiling(self) -> int:
        """The largest size that the next request may have after a compaction that shows files in use."""
        return self.target + self.room // 5

    @property
    def is_tiny(self) -> bool:
        """Whether the fixed part leaves too little room to work in."""
        return self.room < MIN_ROOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How full a context is."""

    used: int
    """The size of the next request in tokens."""
    fixed: int
    """The part of `used` that the system message and the tools take."""
    scale: float
    """To convert an estimate to tokens, multiply it by this number."""
    is_reported: bool
    """The scale comes from the provider's own counts."""


class Gauge:
    """Measures one branch's context for one model. `info` returns what is currently known about the model."""

    def __init__(
        self, branch: Branch, info: Callable[[], ModelInfo], settings: CompactionPolicy, window: ContextWindow
    ) -> None:
        self.branch = branch
        self.settings = settings
        self._info = info
        self.context_window = window
        self._measured: tuple[Context, str, float, Measure] | None = None
        """The last result of `measured`, after the values that it was made from."""

    @property
    def info(self) -> ModelInfo:
        """What is currently known about the model."""
        return self._info()

    async def use(self, info: Callable[[], ModelInfo]) -> None:
        """Switch to another model."""
        self._info = info
        if not self.context_window.is_loaded_for(info()):
            await self.context_window.look_up(info())

    def window(self) -> int:
        """Return the model's context window in tokens, lowered if the endpoint has shown that it accepts less, or if
        the user wants to use less."""
        return self._used_part(self.context_window.tokens(self.info))

    def _used_part(self, window: int) -> int:
        return used_part(window, self.context_window.declared(self.info), self.settings)

    def used(self) -> int:
        """Return the tokens of the next request."""
        return self.measured().used

    def estimate(self) -> int:
        """Return the uncalibrated estimate of the next request. It is stored with the answer to that request, as
        `NewEntry.estimate`."""
        return self.branch.context().estimate

    def measured(self) -> Measure:
        """Return how full the context is. The result is cached for each context, because each step asks several
        times."""
        context, endpoint, calibration = self.branch.context(), self.info.endpoint, self.branch.row.calibration
        cached = self._measured
        if cached is None or cached[0] is not context or cached[1:3] != (endpoint, calibration):
            measured = measure(context, self.branch.entries, endpoint, calibration)
            cached = self._measured = (context, endpoint, calibration, measured)
        return cached[3]

    def limits(self, fixed: int | None = None, *, window: int | None = None) -> Limits:
        """Return how full the context may be. `fixed` and `window` (tokens) replace the current values."""
        info = self.info
        fixed = self.measured().fixed if fixed is None else fixed
        window = self.window() if window is None else window
        is_configured = info.is_window_configured and window >= self.context_window.declared(info)
        return limits_for(window, info.max_output_tokens, fixed, self.settings, is_configured=is_configured)

    def max_output_tokens(self) -> int | None:
        """Return the output limit to send with a request, or None to leave it to the endpoint."""
        return self._cautious_limits(self.measured().fixed).output

    def _cautious_limits(self, fixed: int) -> Limits:
        """Return limits that respect the learned window, even while crow tests whether the endpoint accepts a larger
        window."""
        return self.limits(fixed, window=self._used_part(self.context_window.cautious_tokens(self.info)))

    def recorded(self) -> JsonObject:
        """Return what the limits are computed from, except for the context: the windows in tokens, the calibration, and
        the user's settings that are not the default. A replay computes the limits again from this."""
        info, policy, window = self.info, self.settings, self.window()
        cautious = self._used_part(self.context_window.cautious_tokens(info))
        values = {
            "window": window,
            "cautious": None if cautious == window else cautious,
            "configured": self.limits(0).is_configured or None,
            "output": info.max_output_tokens,
            "calibration": self.branch.row.calibration,
            "manual": not policy.auto or None,
            "threshold": policy.threshold,
            "target": policy.target,
            "keep_tokens": policy.keep_tokens,
        }
        return {name: value for name, value in values.items() if value is not None}

    def is_full(self) -> bool:
        """Return whether compaction is due."""
        measured = self.measured()
        return measured.used >= self.limits(measured.fixed).threshold

    def early_level(self) -> int | None:
        """Return the context size, in tokens, at which crow writes the summary of an idle session early. Return None if
        crow should not write a summary early now.

        After a compaction, the context must first grow by a tenth of the room. Crow does not write a summary early if
        the user undid a compaction. If a test of a larger window is due, crow does not do so either, because the test
        needs a full context.
        """
        early, info = self.settings.early, self.info
        if early is None or not self.settings.auto or info.is_local or self.context_window.is_test_due(info):
            return None
        limits, checkpoint = self.limits(), self.branch.projection.checkpoint_body
        if limits.is_tiny or any(_revokes_compaction(entry.body) for entry in self.branch.entries):
            return None
        grown = 0 if checkpoint is None else checkpoint.tokens_after + limits.room // 10
        return max(int(limits.threshold * early), grown)

    def is_switched(self) -> bool:
        """Return whether the newest answer came from another model than the current one."""
        answers = (entry.body for entry in reversed(self.branch.entries) if isinstance(entry.body, Assistant))
        endpoint = next((answer.endpoint for answer in answers if answer.endpoint), self.info.endpoint)
        return endpoint != self.info.endpoint

    def cut_result(self, text: str, *, beside: int = 1) -> int | None:
        """Return how many characters of a tool result the model may see, or None for all. `beside` is the number of
        results in the same step, including this one."""
        measured = self.measured()
        return cut_for(text, self._cautious_limits(measured.fixed), measured.scale, beside=beside)

    def cut_calls(self, calls: Sequence[ToolCall]) -> int | None:
        """Return how many characters of the arguments in one answer's `calls` the model may see, or None for all."""
        measured = self.measured()
        text = "".join(call.arguments for call in calls)
        return cut_for(text, self._cautious_limits(measured.fixed), measured.scale)

    def cut_prompt(self, text: str) -> int | None:
        """Return how many characters of a user prompt the model may see, or None for all. This also works for the first
        entry, before there is a prompt entry."""
        measured = self.measured()
        fixed = measured.fixed if self.branch.projection.prompt is not None else min(_ASSUMED_FIXED, self.window() // 6)
        return cut_for(text, self._cautious_limits(fixed), measured.scale)

    def reading(self) -> ContextMeasured:
        """Return how full the context is and, if prices are known, what the session has cost."""
        cost = self.branch.row.cost if self.info.input_price is not None else None
        return ContextMeasured(used=self.used(), size=self.window(), cost=cost)

    async def tell(self) -> None:
        """Tell the client how full the context is."""
        await self.branch.publish(self.reading())

    async def on_refusal(self, error: ContextOverflow) -> int:
        """Learn from a refused request how large the window is and how wrong the estimate was. Return the window that
        the next compaction should assume."""
        calibration = self.branch.row.calibration
        counted = (error.size or error.limit or 0) / max(1, self.estimate())
        if calibration < counted <= _clamped(calibration) * _BELIEVED[1]:
            await self.branch.change(SessionChanges(calibration=_clamped(counted)))
        measured = self.measured()
        return await self.context_window.on_refusal(self.info, error, used=measured.used, fixed=measured.fixed)

    async def answered(self) -> None:
        """Learn from the answer that was just stored. The answer may show that the window is larger than the learned
        one, or that the server truncates requests."""
        entries, calibration, info = self.branch.entries, self.branch.row.calibration, self.info
        newest = next((entry for entry in reversed(entries) if isinstance(entry.body, Assistant)), None)
        if newest is None or newest.estimate is None:
            return
        report = _report_of(newest, info.endpoint)
        counted = report.tokens if report is not None and report.is_believed(calibration) else None
        sent = round(newest.estimate * _clamped(calibration))
        usage = newest.usage
        if counted is None and usage is not None and usage.input_tokens and not usage.is_input_estimated:
            sent = 0  # if the count is not believable, the estimate may be wrong too
        await self.context_window.on_answer(info, sent=sent, counted=counted)
        tokens = silent_cut(reports_since_break(entries, info.endpoint), calibration)
        if tokens is not None and tokens < self.window():
            await self.context_window.on_truncation(info, tokens, fixed=self.measured().fixed)


def _revokes_compaction(body: Body) -> bool:
    return isinstance(body, Restore) and not body.skill


async def gauge_on(
    branch: Branch, info: Callable[[], ModelInfo], settings: CompactionPolicy, window: ContextWindow
) -> Gauge:
    """Return the gauge of a session's branch. The session's own `auto_compact` option overrides `settings`."""
    if not window.is_loaded_for(info()):
        await window.look_up(info())
    auto = branch.row.config.get("auto_compact")
    return Gauge(branch, info, replace(settings, auto=auto) if isinstance(auto, bool) else settings, window)


def limits_for(
    window: int, max_output: int | None, fixed: int, settings: CompactionPolicy, *, is_configured: bool = False
) -> Limits:
    """Return the limits for a window of `window` tokens (4,000 to 2 million). The system message and the tools take
    `fixed` tokens. `max_output` is None if it is unknown."""
    output = None if max_output is None else min(max_output, window // 4)
    wanted = _tokens_of(_THRESHOLD if settings.threshold is None else settings.threshold, window)
    if isinstance(settings.threshold, int):  # a number of tokens may be less than any conversation needs
        wanted = max(wanted, fixed + 2 * MIN_ROOM)
    threshold = min(wanted, window - max(min(_RESERVE, window // 5), output or 0))
    room = max(0, threshold - fixed)
    target = 0.5 if settings.target is None else settings.target
    keep = 20_000 if settings.keep_tokens is None else settings.keep_tokens
    return Limits(
        window=window,
        is_configured=is_configured,
        output=output,
        fixed=fixed,
        threshold=threshold,
        room=room,
        target=fixed + int(room * target),
        keep=min(keep, room // 5),
        pins=min(20_000, room // 8),
        summary=min(6_000, room // 10),
        lists=min(4_000, room // 20),
        skills=min(8_000, room // 16),
        files=room * 9 // 20,
    )


def used_part(window: int, declared: int, settings: CompactionPolicy) -> int:
    """Return how many tokens of a window the user wants to use. A share is a share of the `declared` window."""
    if settings.window is None:
        return window
    return min(window, max(_MIN_PART, _tokens_of(settings.window, declared)))


def _tokens_of(limit: float, whole: int) -> int:
    """Return a limit in tokens. A float is a share of `whole`, an integer is a number of tokens."""
    return limit if isinstance(limit, int) else int(whole * limit)


def cut_for(text: str, limits: Limits, scale: float, *, beside: int = 1) -> int | None:
    """Return how many characters of `text` the model may see as one message, or None for all. One message may fill a
    quarter of the room. `beside` is the number of tool results in the same step. Together, these results may fill half
    of the room."""
    room = max(limits.room, MIN_ROOM)  # a cut is permanent, and the window may be wrong
    tokens = min(room // 4, room // 2 // max(1, beside)) / scale
    sample = text if len(text) <= _SAMPLE_CHARS else text[: _SAMPLE_CHARS // 2] + text[-_SAMPLE_CHARS // 2 :]
    whole = estimate_text(sample) * len(text) / max(1, len(sample))
    return None if whole <= tokens else int(len(text) * tokens / whole)


def measure(context: Context, entries: Sequence[Entry], endpoint: str, calibration: float) -> Measure:
    """Measure `context`, which was rendered from `entries`, in the tokens of `endpoint`. `calibration` is used as the
    scale if the endpoint reported nothing or truncates requests."""
    reports = reports_since_break(entries, endpoint)
    anchor = scaling = None
    if silent_cut(reports, calibration) is None:
        anchor = _trusted(reports, calibration)
        scaling = anchor or _newest_believed(entries, endpoint, calibration)
    scale = _clamped(scaling.tokens / scaling.estimate if scaling else calibration)
    used = None if anchor is None else _anchored(context, anchor, scale)
    return Measure(
        used=round(context.estimate * scale) if used is None else used,
        fixed=round(context.fixed_estimate * scale),
        scale=scale,
        is_reported=scaling is not None,
    )


def recalibrated(calibration: float, measured: Measure) -> float:
    """Return the calibration to store: halfway between the old one and the scale that the provider's counts give."""
    return (calibration + measured.scale) / 2 if measured.is_reported else calibration


def _clamped(calibration: float) -> float:
    """Limit a calibration to the range `_CALIBRATION`."""
    low, high = _CALIBRATION
    return min(high, max(low, calibration))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """The size of the request that an entry answers."""

    entry: Entry
    tokens: int
    """The provider's count."""
    estimate: int
    """Crow's uncalibrated estimate in tokens."""

    def ratio(self, calibration: float) -> float:
        """Return the count as a multiple of the calibrated estimate."""
        return self.tokens / max(1.0, self.estimate * _clamped(calibration))

    def doubt(self, calibration: float) -> float:
        """Return how far the count is from the calibrated estimate. The result is 0 if both are equal."""
        return abs(math.log(self.ratio(calibration)))

    def is_believed(self, calibration: float) -> bool:
        low, high = _BELIEVED
        return low <= self.ratio(calibration) <= high


def _report_of(entry: Entry, endpoint: str) -> RequestSize | None:
    """Return the token count that the provider reported with an answer from `endpoint`, or None if there is no such
    count. A count of zero means that the provider did not count. Counts that crow estimated are ignored."""
    usage = entry.usage
    if not isinstance(entry.body, Assistant) or usage is None or entry.body.endpoint != endpoint:
        return None
    if usage.is_input_estimated:
        return None
    tokens, cached = usage.input_tokens or 0, usage.cached_tokens or 0
    if not tokens or not entry.estimate:
        return None
    # if this count is larger than the input count, the input count does not include the cached tokens
    return RequestSize(entry=entry, tokens=tokens + (cached if cached > tokens else 0), estimate=entry.estimate)


def reports_since_break(entries: Sequence[Entry], endpoint: str) -> tuple[RequestSize, ...]:
    """Return the reports since the last break, newest first."""
    extending = takewhile(lambda entry: not isinstance(entry.body, BREAKS), reversed(entries))
    answers = islice((entry for entry in extending if isinstance(entry.body, Assistant)), _ANSWERS_COMPARED)
    return tuple(report for answer in answers if (report := _report_of(answer, endpoint)) is not None)


def _newest_believed(entries: Sequence[Entry], endpoint: str, calibration: float) -> RequestSize | None:
    """Return the newest believable report, from which the scale is computed. The report may be older than the last
    break, because a break does not change the scale."""
    answers = (entry for entry in reversed(entries) if isinstance(entry.body, Assistant))
    reports = (_report_of(entry, endpoint) for entry in islice(answers, _ANSWERS_SEARCHED))
    return next((report for report in reports if report is not None and report.is_believed(calibration)), None)


def _trusted(reports: Sequence[RequestSize], calibration: float) -> RequestSize | None:
    """Return the newest believable report. `reports` are sorted newest first. If two reports contradict each other,
    return the likelier one."""
    best: RequestSize | None = None
    for report in reports:
        if report.is_believed(calibration) and (
            best is None
            or (report.tokens > best.tokens * _SHRUNK and report.doubt(calibration) < best.doubt(calibration))
        ):
            best = report
    return best


def silent_cut(reports: Sequence[RequestSize], calibration: float) -> int | None:
    """Return the size in tokens to which the server silently truncates requests, or None if there is no sign of
    truncation.

    The sign is that the provider's token counts of at least three requests in a row are almost equal, although these
    requests grew by a fifth. If a provider counts only uncached tokens, its counts may briefly stay the same too. Such
    counts are not a sign of truncation: they match the size of the new messages.
    """
    if len(reports) < 3:
        return None
    newest, *earlier = reports
    added = max(0, newest.estimate - earlier[0].estimate) * _clamped(calibration)
    if newest.tokens <= 1.5 * added + _BLOCK:
        return None
    most = least = newest.tokens
    for count, report in enumerate(earlier):
        most, least = max(most, report.tokens), min(least, report.tokens)
        if least < _PLATEAU[0] * most:
            return None
        is_flat = count > 0 and most <= _PLATEAU[1] * report.tokens
        if is_flat and newest.estimate >= _GREW * report.estimate and report.is_believed(calibration):
            return most
    return None


def _anchored(context: Context, anchor: RequestSize, scale: float) -> int | None:
    """Return the tokens of the next request. This is the sum of the provider's count for the `anchor` request, the
    tokens of the answer to it, and an estimate of all later messages. Return None if that answer is not in the
    context."""
    usage = anchor.entry.usage or Usage()
    for index in reversed(range(1, len(context.origins))):
        if context.origins[index] == anchor.entry.id and isinstance(context.messages[index], AssistantMessage):
            break
    else:
        return None
    # reasoning is not sent back, or only as an opaque field that the next report will count
    is_reported = usage.output_tokens and not usage.is_output_estimated
    said = (usage.output_tokens or 0) - (usage.reasoning_tokens or 0) if is_reported else None
    if isinstance(anchor.entry.body, Assistant) and anchor.entry.body.cut is not None:
        said = None  # the answer is shortened before it is sent back
    answer = context.estimates[index] * scale if said is None else max(0, said)
    return round(anchor.tokens + answer + sum(context.estimates[index + 1 :]) * scale)
