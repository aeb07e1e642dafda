"""How full the context of one branch is for one model, and how full it may be.

Branch, model and window are read anew each time; only the measure of one and the same context is kept, since a step
asks for it often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from crow.agent.compaction.limits import CompactionSettings, Limits, cut_for, limits_for
from crow.agent.compaction.measuring import (
    BELIEVED,
    Measure,
    believed_input,
    clamped,
    measure,
    reports_since_break,
    silent_cut,
)
from crow.agent.compaction.window import LearnedWindow, Window
from crow.domain.entries import Assistant
from crow.domain.events import ContextMeasured
from crow.store import SessionChanges

if TYPE_CHECKING:
    from crow.agent.branch import Branch
    from crow.domain.conversation import Context
    from crow.domain.errors import ContextOverflow
    from crow.llm import ModelInfo

__all__ = ["Gauge", "gauge_on"]

UNKNOWN_FIXED = 6_000
"""Tokens assumed of system message and tools before there is a prompt entry; a sixth of a small window."""


class Gauge:
    """Sizes in tokens. `info` gives what is known of the model now; `window` knows what its endpoint has shown."""

    def __init__(
        self, branch: Branch, info: Callable[[], ModelInfo], settings: CompactionSettings, window: Window
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
    branch: Branch, info: Callable[[], ModelInfo], settings: CompactionSettings, window: Window
) -> Gauge:
    """The gauge of a session's branch; `settings` hold unless the session was told otherwise."""
    if not window.is_of(info()):
        await window.look_up(info())
    auto = branch.row.config.get("auto_compact")
    return Gauge(branch, info, replace(settings, auto=auto) if isinstance(auto, bool) else settings, window)
