"""How full the context may be.

Strategy: sizes are the provider's tokens. The limits are formulas over the window and the fixed part alone, so that
they hold from 4 k to 2 M tokens. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from crow.domain.tokens import estimate_text

__all__ = ["MIN_ROOM", "CompactionSettings", "Limits", "cut_for", "limits_for"]

MIN_ROOM = 2_000
"""With less room than this between the fixed part and the threshold, compaction cannot help."""

SAMPLE_CHARS = 100_000
"""Head and tail of a larger text tell what its characters weigh; they are what is shown of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionSettings:
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
    window: int, max_output: int | None, fixed: int, settings: CompactionSettings, *, is_configured: bool = False
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
