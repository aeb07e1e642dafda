"""How full the context of one branch is for one model, and how full it may be.

Branch, model and window are read anew each time; only the measure of one and the same context is kept, since a step
asks for it often.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias, assert_never

from crow.domain.conversation import Context, Projection
from crow.domain.entries import Assistant, Checkpoint, Entry, Mask, Prompt, Restore
from crow.domain.errors import StoreError
from crow.domain.events import ContextMeasured
from crow.domain.messages import AssistantMessage, Message, SystemMessage, ToolMessage, UserMessage
from crow.domain.tokens import estimate_text
from crow.store import SessionChanges

if TYPE_CHECKING:
    from crow.agent.branch import Branch
    from crow.domain.conversation import Context
    from crow.domain.errors import ContextOverflow
    from crow.llm import EndpointMemory, ModelInfo

__all__ = [
    "BELIEVED",
    "DEFAULT_WINDOW",
    "KINDS",
    "MIN_ROOM",
    "CompactionPolicy",
    "ContextWindow",
    "Gauge",
    "Kind",
    "LearnedWindow",
    "Limits",
    "Measure",
    "Report",
    "believed_input",
    "breakdown",
    "clamped",
    "cut_for",
    "gauge_on",
    "learned_in",
    "limits_for",
    "measure",
    "picture",
    "recalibrated",
    "reports_since_break",
    "silent_cut",
]

UNKNOWN_FIXED = 6_000
"""Tokens assumed of system message and tools before there is a prompt entry; a sixth of a small window."""


class Gauge:
    """Sizes in tokens. `info` gives what is known of the model now; `window` knows what its endpoint has shown."""

    def __init__(
        self, branch: Branch, info: Callable[[], ModelInfo], settings: CompactionPolicy, window: ContextWindow
    ) -> None:
        self.branch = branch
        self.settings = settings
        self._info = info
        self._window = window
        self._measured: tuple[Context, str, float, Measure] | None = None

    @property
    def info(self) -> ModelInfo:
        """What is known of the model now."""
        return self._info()

    def window(self) -> int:
        """The model's context window: as declared, lowered by what its endpoint has shown."""
        return self._window.tokens(self.info)

    def window_words(self) -> str:
        """Where that number comes from, for the user."""
        return self._window.words(self.info)

    def used(self) -> int:
        """What the next request would have."""
        return self.measured().used

    def estimate(self) -> int:
        """Estimate of the request as it stands, uncalibrated: `NewEntry.estimate` of the answer to it."""
        return self.branch.context().estimate

    def measured(self) -> Measure:
        """How full the context is."""
        context, endpoint, calibration = self.branch.context(), self.info.endpoint, self.branch.row.calibration
        known = self._measured
        if known is None or known[0] is not context or known[1:3] != (endpoint, calibration):
            found = measure(context, self.branch.entries, endpoint, calibration)
            known = self._measured = (context, endpoint, calibration, found)
        return known[3]

    def limits(self, fixed: int | None = None, *, window: int | None = None) -> Limits:
        """How full it may be; with another system message and tools than now, of `fixed` tokens, or another window."""
        info = self.info
        fixed = self.measured().fixed if fixed is None else fixed
        window = self.window() if window is None else window
        is_configured = info.is_window_configured and window >= self._window.declared(info)
        return limits_for(window, info.max_output_tokens, fixed, self.settings, is_configured=is_configured)

    def max_output_tokens(self) -> int | None:
        """The limit to send with a request; None leaves it to the endpoint."""
        return self._cautious_limits(self.measured().fixed).output

    def _cautious_limits(self, fixed: int) -> Limits:
        """For what is better too small while a larger window is tried."""
        return self.limits(fixed, window=self._window.cautious_tokens(self.info))

    def is_full(self) -> bool:
        """Whether compaction is due."""
        found = self.measured()
        return found.used >= self.limits(found.fixed).threshold

    def is_switched(self) -> bool:
        """Whether the newest answer came from another model than will be asked now."""
        for entry in reversed(self.branch.entries):
            if isinstance(entry.body, Assistant) and entry.body.endpoint:
                return entry.body.endpoint != self.info.endpoint
        return False

    def cut_result(self, text: str, *, beside: int = 1) -> int | None:
        """How many characters of `text`, one of `beside` results of a step, the model may see; None: all of them."""
        found = self.measured()
        return cut_for(text, self._cautious_limits(found.fixed), found.scale, beside=beside)

    def cut_prompt(self, text: str) -> int | None:
        """The same for a prompt of the user, which may come before anything else is there."""
        found = self.measured()
        fixed = found.fixed
        if self.branch.prompt is None:
            fixed = min(UNKNOWN_FIXED, self.window() // 6)
        return cut_for(text, self._cautious_limits(fixed), found.scale)

    def reading(self) -> ContextMeasured:
        """How full the context is, and what the session cost if prices are known."""
        cost = self.branch.row.cost if self.info.input_price is not None else None
        return ContextMeasured(used=self.used(), size=self.window(), cost=cost)

    async def tell(self) -> None:
        """Tell the client."""
        await self.branch.publish(self.reading())

    async def refused(self, error: ContextOverflow) -> int:
        """Learn from a refused request: its window, and how far the estimate was off. Returns the window to compact
        for now."""
        calibration = self.branch.row.calibration
        counted = (error.size or error.limit or 0) / max(1, self.estimate())
        if calibration < counted <= clamped(calibration) * BELIEVED[1]:
            await self.branch.change(SessionChanges(calibration=clamped(counted)))
        found = self.measured()
        return await self._window.refused(self.info, error, used=found.used, fixed=found.fixed)

    async def answered(self) -> None:
        """Learn from the answer that was just stored: a window that is larger than was learned, or a server that cuts
        without a word."""
        entries, calibration, info = self.branch.entries, self.branch.row.calibration, self.info
        newest = next((entry for entry in reversed(entries) if isinstance(entry.body, Assistant)), None)
        if newest is None or newest.estimate is None:
            return
        counted = believed_input(newest, info.endpoint, calibration)
        sent = round(newest.estimate * clamped(calibration))
        if counted is None and newest.usage is not None and newest.usage.input_tokens:
            sent = 0  # a count that cannot be believed says nothing, and makes the estimate doubtful
        await self._window.answered(info, sent=sent, counted=counted)
        tokens = silent_cut(reports_since_break(entries, info.endpoint), calibration)
        if tokens is not None and tokens < self.window():
            await self._window.cut(info, tokens, fixed=self.measured().fixed)

    async def compacted(self) -> None:
        """A compaction was made because the context was full."""
        await self._window.compacted(self.info)

    async def forget_window(self) -> LearnedWindow | None:
        """Drop what was learned of the window; what that was."""
        return await self._window.forget(self.info)


async def gauge_on(
    branch: Branch, info: Callable[[], ModelInfo], settings: CompactionPolicy, window: ContextWindow
) -> Gauge:
    """The gauge of a session's branch; `settings` hold unless the session was told otherwise."""
    if not window.is_of(info()):
        await window.look_up(info())
    auto = branch.row.config.get("auto_compact")
    return Gauge(branch, info, replace(settings, auto=auto) if isinstance(auto, bool) else settings, window)


# FROM agent.compaction.limits: How full the context may be.
#
# Strategy: sizes are the provider's tokens. The limits are formulas over the window and the fixed part alone, so that
# they hold from 4 k to 2 M tokens. Pure.


MIN_ROOM = 2_000
"""With less room than this between the fixed part and the threshold, compaction cannot help."""

SAMPLE_CHARS = 100_000
"""Head and tail of a larger text tell what its characters weigh; they are what is shown of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """`auto` false means never, except on command. `threshold`: part of the window at which compaction starts.
    `keep_tokens`: how much of the tail stays verbatim, at most. `target`: part of the room that may be full after.
    `instruction`: asks the model for the summary instead of crow's own; `{words}` in it becomes the limit in words.
    `compact_model`: name of the model that writes the summary when the session's own did not; empty: itself."""

    auto: bool = True
    threshold: float | None = None
    keep_tokens: int | None = None
    target: float | None = None
    instruction: str = ""
    compact_model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens. `window` is the whole; `fixed` is system message and tool specs; from `threshold` on there is
    compaction, which aims at `target`; `room` is threshold less fixed. `keep`, `pins`, `summary`, `lists` and `skills`
    bound the verbatim tail, the pinned messages, the summary, plan and files, and the skills in use. `output` is sent
    as the limit; None: unknown. `is_configured`: the user set this window, so a request that cannot fit is refused.
    """

    window: int
    is_configured: bool
    output: int | None
    fixed: int
    threshold: int
    room: int
    target: int
    keep: int
    pins: int
    summary: int
    lists: int
    skills: int

    @property
    def ceiling(self) -> int:
        """The most that is accepted when nothing is kept verbatim."""
        return self.fixed + self.room * 4 // 5

    @property
    def is_tiny(self) -> bool:
        """Whether the fixed part leaves too little room to work in."""
        return self.room < MIN_ROOM


def limits_for(
    window: int, max_output: int | None, fixed: int, settings: CompactionPolicy, *, is_configured: bool = False
) -> Limits:
    """The limits for a window and a fixed part, in tokens. `max_output` None: the endpoint has not told."""
    output = None if max_output is None else min(max_output, window // 4)
    share = 0.85 if settings.threshold is None else settings.threshold
    threshold = min(int(window * share), window - max(min(20_000, window // 5), output or 0))
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
    )


def cut_for(text: str, limits: Limits, scale: float, *, beside: int = 1) -> int | None:
    """How many characters of `text` the model may see as one message: a quarter of the room, less when it is one of
    `beside` results of a step that share half of it. None: all of them."""
    room = max(limits.room, MIN_ROOM)  # a cut is for good, the window may be wrong
    tokens = min(room // 4, room // 2 // max(1, beside)) / scale
    sample = text if len(text) <= SAMPLE_CHARS else text[: SAMPLE_CHARS // 2] + text[-SAMPLE_CHARS // 2 :]
    whole = estimate_text(sample) * len(text) / max(1, len(sample))
    if whole <= tokens:
        return None
    return int(len(text) * tokens / whole)


# FROM agent.compaction.window: The context window of a model: configured, listed or assumed, lowered by what its
# endpoint has shown.
#
# Only a configured window may refuse a request. A learned one causes compaction, nothing else, so a wrong number
# costs
# work, never the session. It is kept in the store with the endpoint, since other sessions will meet the same limit.


logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 128_000
"""Tokens assumed of a model whose window nobody has told."""

FACT = "window"
WORDS_CHARS = 300
FIRST_PATIENCE = 4
MOST_PATIENCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWindow:
    """A window that an endpoint has shown.

    It holds for `session` until it was shown twice (`times`), then for every session of the endpoint. After it has
    caused `patience` compactions, crow tries whether the endpoint takes more. `source`: the words it was taken from;
    `learned_on`: a date, in UTC; `is_silent`: the endpoint refuses nothing, but cuts longer requests.
    """

    tokens: int
    source: str
    learned_on: str
    session: str
    times: int = 1
    is_silent: bool = False
    compactions: int = 0
    patience: int = FIRST_PATIENCE


def learned_in(facts: Mapping[str, object]) -> LearnedWindow | None:
    """What `facts` say was learned; None also for what an older version wrote, which believed any number."""
    fact = facts.get(FACT)
    if not isinstance(fact, Mapping):
        return None
    known = {field.name: fact[field.name] for field in fields(LearnedWindow) if field.name in fact}
    try:
        learned = LearnedWindow(**known)
    except TypeError:
        return None
    numbers = (learned.tokens, learned.times, learned.compactions, learned.patience)
    texts = (learned.source, learned.learned_on, learned.session)
    is_valid = (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(type(text) is str for text in texts)
        and type(learned.is_silent) is bool
        and learned.tokens > 0
    )
    return learned if is_valid else None


@dataclass(slots=True)
class EndpointWindow:
    """What a session knows of one endpoint, while a window is `configured` or none is.

    `worked`: the most tokens it took since it last refused a request. `refusals`: how many it refused since it last
    answered; `was_refused`: it ever did. `trying`: what was learned is left aside, to see whether it still holds.
    """

    configured: int | None = None
    learned: LearnedWindow | None = None
    listed: int | None = None
    worked: int = 0
    refusals: int = 0
    was_refused: bool = False
    trying: bool = False


class ContextWindow:
    """What one session knows of the windows of its models. Without a `memory`, nothing outlasts this object."""

    def __init__(self, memory: EndpointMemory | None = None, session: str = "") -> None:
        self._memory = memory
        self._session = session
        self._seen: dict[str, EndpointWindow] = {}
        self._looked_up: set[str] = set()

    async def look_up(self, info: ModelInfo) -> None:
        """Read what was learned of the model; a configured window makes that void."""
        self._looked_up.add(info.endpoint)
        seen = self._of(info)
        if seen.configured != configured_in(info):
            seen.learned, seen.trying, seen.configured = None, False, configured_in(info)
        if self._memory is None:
            return
        facts = await self._memory.learned(*endpoint_and_model(info))
        if info.is_window_configured:
            if facts.get(FACT) is not None:
                await self._store(info, None)
            return
        seen.listed = listed_in(facts)
        seen.learned = learned_in(facts)
        seen.trying = seen.trying and seen.learned is not None

    def is_of(self, info: ModelInfo) -> bool:
        """Whether it has looked up this model, configured as it is now."""
        return info.endpoint in self._looked_up and self._of(info).configured == configured_in(info)

    def declared(self, info: ModelInfo) -> int:
        """The window as configured, else as the endpoint lists it, else a guess."""
        return info.context_window or self._of(info).listed or DEFAULT_WINDOW

    def tokens(self, info: ModelInfo) -> int:
        """The window to go by now."""
        return self.declared(info) if self._of(info).trying else self.cautious_tokens(info)

    def cautious_tokens(self, info: ModelInfo) -> int:
        """The same, but what was learned also counts while it is tried whether it still holds."""
        learned = self.learned(info)
        return self.declared(info) if learned is None else min(self.declared(info), learned.tokens)

    def learned(self, info: ModelInfo) -> LearnedWindow | None:
        """What was learned and counts in this session."""
        learned = self._of(info).learned
        return learned if learned is not None and (learned.times > 1 or learned.session == self._session) else None

    async def refused(self, info: ModelInfo, error: ContextOverflow, *, used: int, fixed: int) -> int:
        """Learn from a refused request of `used` tokens, `fixed` of them system message and tools. Returns the window
        to compact for now: smaller than the request, and perhaps than what is learned."""
        await self.look_up(info)
        seen, declared = self._of(info), self.declared(info)
        old, worked, limit = self.learned(info), seen.worked, error.limit
        seen.refusals += 1
        seen.worked = 0
        size = error.size if error.size is not None and used / 4 <= error.size <= used * 4 else used
        # A limit that is named again for a shorter request, and still above it, cannot be the reason.
        is_named = limit is not None and fixed < limit < declared and (limit < size or seen.refusals == 1)
        tokens: int | None = None
        if limit is not None and is_named and limit >= worked:
            tokens = limit
        elif worked < used:
            kept = old is not None and worked <= old.tokens < used
            tokens = old.tokens if old is not None and kept else max(size * 9 // 10, worked)
            if tokens * 4 // 5 - fixed < MIN_ROOM and not seen.was_refused:
                tokens = None  # one refusal of a short request is no reason to work in so little room
        seen.was_refused = True
        if tokens is not None and tokens < declared:
            words = "".join(char if char.isprintable() else " " for char in str(error))[:WORDS_CHARS]
            await self._learn(info, tokens, f'a refused request of about {used:,} tokens: "{words}"')
        elif seen.trying and old is not None:
            seen.trying = False
            await self._keep(info, waiting_longer(old))
        return min(declared, used * 9 // 10, tokens or declared)

    async def cut(self, info: ModelInfo, tokens: int, *, fixed: int) -> None:
        """The endpoint counts `tokens` whatever is sent: it cuts longer requests without a word."""
        if fixed < tokens < self.declared(info):
            source = f"token counts: requests grew, and the endpoint counted {tokens:,} input tokens at most"
            await self._learn(info, tokens, source, is_silent=True)

    async def answered(self, info: ModelInfo, *, sent: int, counted: int | None) -> None:
        """A request of about `sent` tokens was answered; the endpoint `counted` so many, None if that is not known."""
        seen, learned = self._of(info), self.learned(info)
        seen.refusals = 0
        seen.worked = max(seen.worked, sent // 2 if counted is None else counted)
        if learned is None:
            return
        if counted is not None:
            is_disproved = counted > learned.tokens * (1.05 if learned.is_silent else 1)
        else:
            is_disproved = not learned.is_silent and sent > learned.tokens * 1.1
        if is_disproved:
            seen.trying = False
            await self._keep(info, None)
        elif seen.trying and counted is not None and sent > learned.tokens * 1.2:
            seen.trying = False
            await self._keep(info, waiting_longer(learned))

    async def compacted(self, info: ModelInfo) -> None:
        """A compaction was made because the window is full. After some, what was learned is left aside once."""
        seen, learned = self._of(info), self.learned(info)
        if learned is None or seen.trying:
            return
        seen.trying = learned.compactions + 1 >= learned.patience
        await self._keep(info, replace(learned, compactions=0 if seen.trying else learned.compactions + 1))

    async def forget(self, info: ModelInfo) -> LearnedWindow | None:
        """Drop what was learned, for this session and for the endpoint; what that was."""
        await self.look_up(info)
        seen = self._of(info)
        learned, seen.trying = seen.learned, False
        if learned is not None:
            await self._keep(info, None)
        return learned

    def words(self, info: ModelInfo) -> str:
        """Where the number comes from, in sentences for the user."""
        learned = self.learned(info)
        if learned is not None:
            reach = "for every session of this endpoint" if learned.times > 1 else "for this session only"
            left = learned.patience - learned.compactions
            trial = (
                "Crow is trying whether the endpoint takes more now."
                if self._of(info).trying
                else f"After {left} more compaction{'s' * (left != 1)} crow tries whether the endpoint takes more."
            )
            return (
                f"A window of {learned.tokens:,} tokens was learned on {learned.learned_on}, {reach}, from "
                f"{learned.source}. It only causes compaction. {trial} `/context forget` drops it."
            )
        if info.is_window_configured:
            return "You configured this window."
        if info.context_window or self._of(info).listed:
            return "The endpoint gives this window."
        return f"The endpoint has not told its window: {DEFAULT_WINDOW:,} tokens are assumed."

    async def _learn(self, info: ModelInfo, tokens: int, source: str, *, is_silent: bool = False) -> None:
        seen = self._of(info)
        old, was_trial, seen.trying = seen.learned, seen.trying, False
        learned = LearnedWindow(
            tokens=tokens,
            source=source,
            learned_on=datetime.now(UTC).date().isoformat(),
            session=self._session,
            # Refusals in a row are one event.
            times=1 if old is None else old.times + (seen.refusals < 2),
            is_silent=is_silent,
            patience=FIRST_PATIENCE if old is None else old.patience,
        )
        await self._keep(info, waiting_longer(learned) if was_trial else learned)

    async def _keep(self, info: ModelInfo, learned: LearnedWindow | None) -> None:
        self._of(info).learned = learned
        if not info.is_window_configured:
            await self._store(info, None if learned is None else asdict(learned))

    async def _store(self, info: ModelInfo, fact: Mapping[str, object] | None) -> None:
        if self._memory is None:
            return
        try:
            await self._memory.learn(*endpoint_and_model(info), {FACT: fact})
        except StoreError as error:  # it is learned again another time; no turn fails for it
            logger.warning("What %s showed of its window could not be stored: %s", info.endpoint, error)

    def _of(self, info: ModelInfo) -> EndpointWindow:
        return self._seen.setdefault(info.endpoint, EndpointWindow())


def waiting_longer(learned: LearnedWindow) -> LearnedWindow:
    """It was tried, and holds: the next trial comes after twice as many compactions."""
    return replace(learned, compactions=0, patience=min(MOST_PATIENCE, learned.patience * 2))


def configured_in(info: ModelInfo) -> int | None:
    return info.context_window if info.is_window_configured else None


def listed_in(facts: Mapping[str, object]) -> int | None:
    """The window that the endpoint's list of models told."""
    listed = facts.get("listed")
    tokens = listed.get("context_window") if isinstance(listed, Mapping) else None
    return tokens if type(tokens) is int and tokens > 0 else None


def endpoint_and_model(info: ModelInfo) -> tuple[str, str]:
    """The two halves of `ModelInfo.endpoint`: base URL and model."""
    base_url, _, model = info.endpoint.partition(" ")
    return base_url, model


# FROM agent.compaction.measuring: How full the context is: what the provider counted, where that can be believed, and
# an estimate of the rest.
#
# Strategy: the newest answer since the last break says what its request had; what came after is estimated and scaled
# by
# how far the estimates of this endpoint were off. Between two breaks every request extends the one before, so a count
# that shrinks is wrong, or the server cuts silently. Pure.


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


# FROM agent.compaction.breakdown: What fills the context, by kind, and the picture of it that a person reads.
#
# Strategy: each message belongs to one kind by its role, the checkpoint to the summary; estimates are stretched so
# that
# together they are what the whole was measured to have. Pure.


Kind: TypeAlias = Literal["system", "tools", "summary", "user", "assistant", "tool output"]

KINDS: tuple[Kind, ...] = ("system", "tools", "summary", "user", "assistant", "tool output")

CELLS = 40
FULL, PART, EMPTY, MARK = "█", "▌", "░", "│"


def breakdown(projection: Projection, used: int) -> Mapping[Kind, int]:
    """Tokens by kind, of `used` tokens in all; every kind is there."""
    context = projection.context()
    summary = 0 if projection.checkpoint is None else projection.checkpoint.id
    estimates: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    estimates["tools"] = context.tools_estimate
    for message, origin, estimate in zip(context.messages, context.origins, context.estimates, strict=True):
        estimates["summary" if summary and origin == summary else kind_of(message)] += estimate
    whole = max(1, sum(estimates.values()))
    return {kind: round(estimate * used / whole) for kind, estimate in estimates.items()}


def kind_of(message: Message) -> Kind:
    match message:
        case SystemMessage():
            return "system"
        case UserMessage():
            return "user"
        case AssistantMessage():
            return "assistant"
        case ToolMessage():
            return "tool output"
        case _ as never:
            assert_never(never)


def picture(model: str, tokens: Mapping[Kind, int], used: int, limits: Limits) -> str:
    """Lines of Markdown: one bar for the window, then one for each kind. From the mark on, compaction is due."""
    window = max(1, limits.window)
    lines = [f"{bar(used, window, limits.threshold)}  {used:>9,}  {percent(used, window)}  all of it"]
    lines += [
        f"{bar(tokens[kind], window)}  {tokens[kind]:>9,}  {percent(tokens[kind], window)}  {kind}" for kind in KINDS
    ]
    free = max(0, limits.threshold - used)
    lines.append(f"{' ' * CELLS}  {free:>9,}  {percent(free, window)}  free until compaction (at {MARK})")
    head = f"Context of {model}: about {used:,} of {limits.window:,} tokens."
    return "\n".join([head, "", "```text", *lines, "```"])


def bar(tokens: int, window: int, mark: int | None = None) -> str:
    """`CELLS` cells that stand for the window, filled by `tokens`, with a sign at `mark`."""
    halves = min(2 * CELLS, -(-2 * CELLS * tokens // window)) if tokens > 0 else 0
    cells = list(FULL * (halves // 2) + PART * (halves % 2))
    cells += EMPTY * (CELLS - len(cells))
    if mark is not None:
        cells[min(CELLS - 1, CELLS * mark // window)] = MARK
    return "".join(cells)


def percent(tokens: int, window: int) -> str:
    return f"{round(100 * tokens / window):>3} %"
