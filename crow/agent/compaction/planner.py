"""Decides whether to compact, and how: a pure function of a projection and its limits.

If hiding old tool outputs is enough, the plan is to do only that. Otherwise the planner chooses where to cut. It
renders each candidate as the model would see it, with the longest summary allowed, and measures the result. So the
decision holds for any summary that the model writes. Messages that the model has not answered yet are kept if they fit.
Later candidates keep fewer of these messages, and the last candidate keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from crow.agent.compaction import Reason
from crow.agent.compaction.budget import Limits, Measure
from crow.agent.compaction.checkpoint import (
    files_in_use,
    files_touched,
    masking_order,
    reads_in_use,
    select_pins,
    select_skills,
)
from crow.domain.conversation import Context, Projection
from crow.domain.entries import Assistant, Body, Checkpoint, Entry, Mask, ToolResult, User
from crow.domain.messages import AssistantMessage, ToolMessage, UserMessage
from crow.domain.rendering import elided_message, is_maskable
from crow.domain.tokens import estimate_message

_MIN_HEAD = 400
"""`/compact` writes a summary only if it would replace at least this many estimated tokens."""

_MIN_SUMMARY = 120
_MIN_PINS = 240
"""If there is hardly any room, the summary may have up to `_MIN_SUMMARY` tokens, and the pinned user messages up to
`_MIN_PINS` tokens even if their normal limit is lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop:
    """There is nothing to do."""

    why: str
    """A sentence for the user."""
    is_too_short: bool = False
    """The conversation is too short to be compacted within the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint without its summary."""

    start: int
    """The index of the first message that is kept."""
    summary_tokens: int
    """The summary may take up to this many tokens."""
    body: Checkpoint
    """`body.first_kept` is the id of the entry with the first kept message."""
    max_tokens: int | None = None
    """The size that the whole request may have after the compaction. If None, the request may take up to the target of
    the limits, or up to their ceiling if no message is kept."""


Decision: TypeAlias = Noop | Mask | tuple[CheckpointDraft, ...]
"""What the planner decides. `Noop` means that there is nothing to do. A `Mask` must be stored. A tuple of drafts means
that the messages before `drafts[0].start` must be summarised. The later drafts keep fewer messages, in case the first
does not fit. An empty tuple means that no compaction shortens the request enough, because the window is too small."""


def plan(projection: Projection, limits: Limits, measured: Measure, reason: Reason) -> Decision:
    """Decide what to do with `projection`. If the reason is `threshold` or `model`, and the context is smaller than the
    threshold, do nothing."""
    if reason in ("threshold", "model") and measured.used < limits.threshold:
        return Noop(why="There is enough room.")
    cuts = _Cuts(projection, limits, measured, reason)
    if reason == "command" and not (limits.is_size_chosen or cuts.has_news()):
        return Noop(why="Nothing is new since the last compaction.")
    if limits.is_configured and limits.is_tiny:
        return ()
    if reason != "command" and (mask := cuts.mask()) is not None:
        return mask
    drafts = cuts.drafts()
    if reason == "command" and not drafts:
        return Noop(why="The conversation is too short to compact.", is_too_short=True)
    return drafts


def with_bodies(entries: Sequence[Entry], *bodies: Body) -> Context:
    """Return what the model would see if `bodies` were appended to `entries`."""
    path = list(entries)
    for body in bodies:
        leaf = path[-1]
        path.append(replace(leaf, id=leaf.id + 1, parent=leaf.id, body=body, usage=None, estimate=None))
    return Projection(path).context()


def fits(tokens: int, draft: CheckpointDraft, limits: Limits, count: int) -> bool:
    """Return whether the compaction with `draft` makes the request small enough. `tokens` is the size of the request
    after the compaction, and `count` is the number of messages before the compaction."""
    if draft.max_tokens is not None:
        return tokens <= draft.max_tokens
    return tokens <= (limits.target if draft.start < count else limits.ceiling)


class _Cuts:
    """Finds where a projection can be cut. Messages are identified by index."""

    def __init__(self, projection: Projection, limits: Limits, measured: Measure, reason: Reason) -> None:
        self.projection = projection
        self.limits = limits
        self.measured = measured
        self.reason = reason
        self.context = projection.context()
        self.count = len(self.context.messages)
        self.checkpoint = projection.checkpoint
        self.checkpoint_body = projection.checkpoint_body
        self.first = 1 if self.checkpoint is None else 2
        """The index of the first message that a checkpoint can cover."""
        self.kinds = {entry.id: type(entry.body) for entry in projection.entries}
        self.suffix = [0] * (self.count + 1)
        """Estimated tokens from each message to the end."""
        for index in reversed(range(self.count)):
            self.suffix[index] = self.suffix[index + 1] + self.context.estimates[index]
        self._boundaries = self._find_boundaries()
        self.keep = self.estimated(self.keep_tokens())

    def keep_tokens(self) -> int:
        """Return how many tokens of recent messages to keep verbatim. Usually this is `limits.keep`. It may be less,
        down to half of `limits.keep`, to make room for the files in use."""
        limits, files = self.limits, files_in_use(self.checkpoint_body, self.projection.entries)
        if limits.is_keep_chosen:
            return limits.keep
        wanted = min(limits.files, round(sum(file.tokens for file in files) * self.measured.scale))
        missing = wanted + limits.keep + limits.summary + limits.pins // 2 - (limits.target - limits.fixed)
        return max(limits.keep // 2, limits.keep - max(0, missing))

    def _find_boundaries(self) -> list[int]:
        """Return the indexes at which the kept messages may start. The message at each index is the first one of an
        entry, and neither a tool result nor the rest of a paused answer. Before each index, there is at least one
        message that a checkpoint can cover."""
        boundaries: list[int] = []
        newest = 0
        for index in range(self.first, self.count):
            origin = self.context.origins[index]
            message, before = self.context.messages[index], self.context.messages[index - 1]
            goes_on = isinstance(message, AssistantMessage) and isinstance(before, AssistantMessage)
            if origin > newest and index > self.first and not isinstance(message, ToolMessage) and not goes_on:
                boundaries.append(index)
            newest = max(newest, origin)
        return boundaries

    def has_news(self) -> bool:
        """Return whether anything follows the checkpoint."""
        newest = max(self.context.origins[self.first :], default=0)
        return newest > (self.checkpoint.id if self.checkpoint else 0)

    def mask(self) -> Mask | None:
        """Return the mask that hides just enough to reach the target, or None if no mask reaches the target. Unanswered
        messages and the files in use stay visible."""
        scale, target = self.measured.scale, self.limits.target
        gains = self._gains(min(self.tail(self.keep), self.unanswered()))
        in_use = reads_in_use(self.checkpoint_body, self.projection.entries, self.estimated(self.limits.files))
        hidden: set[int] = set()
        estimate = self.context.estimate
        for entry in masking_order(self.projection.entries):
            if hidden and round(estimate * scale) <= target:
                break
            if entry in gains and entry not in in_use:
                hidden.add(entry)
                estimate -= gains[entry]
        if not hidden:
            return None
        before = max(hidden) + 1
        exceptions = tuple(sorted(entry for entry in gains if entry < before and entry not in hidden))
        mask = Mask(
            before=before,
            exceptions=exceptions,
            tokens_before=self.measured.used,
            reason=self.reason,
            threshold=self.limits.threshold,
            window=self.limits.window,
        )
        after = round(with_bodies(self.projection.entries, mask).estimate * scale)
        return replace(mask, tokens_after=after) if after < self.measured.used and after <= target else None

    def _gains(self, start: int) -> dict[int, int]:
        """For each tool output before index `start`, return how many estimated tokens would become free if it were
        hidden. The keys are entry ids."""
        results = {entry.id: entry.body for entry in self.projection.entries if isinstance(entry.body, ToolResult)}
        gains: dict[int, int] = {}
        for index in range(self.first, start):
            message, entry = self.context.messages[index], self.context.origins[index]
            if isinstance(message, ToolMessage) and entry in results and is_maskable(results[entry]):
                hidden = elided_message(results[entry], entry, message.call_id)
                gain = self.context.estimates[index] - estimate_message(hidden)
                if gain > 0:
                    gains[entry] = gain
        return gains

    def drafts(self) -> tuple[CheckpointDraft, ...]:
        """Return a draft for each cut that fits even with the longest summary allowed. The draft that keeps the most
        messages comes first."""
        if self.first >= self.count:
            return ()
        candidates, pins, max_tokens = self._candidates(), self.limits.pins, None
        # a tiny window was not configured by anybody and may be wrong, so any shorter request is worth a try
        if self.limits.is_tiny:
            candidates = [(start, _MIN_SUMMARY) for start in (self.unanswered(), self.count)]
            pins, max_tokens = max(pins, _MIN_PINS), self.measured.used * 9 // 10
        drafts: list[CheckpointDraft] = []
        gain = self.limits.room // 10 if self.reason == "early" else 0  # a smaller gain is not worth a request
        for start, summary_tokens in candidates:
            if self.reason == "command" and self.suffix[self.first] - self.suffix[start] < _MIN_HEAD:
                continue
            body = self.body(start, pins)
            draft = CheckpointDraft(start=start, summary_tokens=summary_tokens, body=body, max_tokens=max_tokens)
            longest = replace(body, summary="word" * self.estimated(summary_tokens))
            tokens = round(with_bodies(self.projection.entries, longest).estimate * self.measured.scale)
            is_shorter = self.reason == "command" or tokens + gain < self.measured.used
            if is_shorter and fits(tokens, draft, self.limits, self.count):
                drafts.append(draft)
        return tuple(drafts)

    def _candidates(self) -> list[tuple[int, int]]:
        """Return possible cuts. Each cut is a pair: the index at which the kept messages start, and the largest number
        of tokens that the summary may have.

        If the usual cuts would not keep all unanswered messages, cuts that do so come first. Each of the usual cuts
        keeps fewer messages than the one before it.
        """
        keep, summary = self.keep, self.limits.summary
        if self.limits.is_keep_chosen:
            return [(self.tail(keep), summary)]
        starts = dict.fromkeys((self._preferred_tail(keep), self.tail(keep // 2), self.tail(keep // 8), self.count))
        candidates = [(start, summary) for start in starts]
        unanswered = self.unanswered()
        if self.first < unanswered < candidates[0][0]:
            candidates = [(unanswered, summary), (unanswered, summary // 2), *candidates]
        return candidates

    def body(self, start: int, pins: int) -> Checkpoint:
        """Return a checkpoint that keeps the message at `start` and all later messages. Its summary is still empty."""
        entries = self.projection.entries
        previous = self.checkpoint_body
        first_kept = self.context.origins[start] if start < self.count else None
        covered = [entry for entry in entries if first_kept is None or entry.id < first_kept]
        first_covered = previous.first_covered if previous is not None else None
        read, modified = files_touched(previous, entries)
        return Checkpoint(
            compaction_id="",
            summary="",
            first_kept=first_kept,
            pins=select_pins(previous, covered, self.estimated(pins)),
            files_read=read,
            files_modified=modified,
            mode=self.projection.mode,
            plan=self.projection.plan,
            reason=self.reason,
            tokens_before=self.measured.used,
            lists_cut=self.estimated(self.limits.lists) * 4,
            skills=select_skills(previous, covered, self.estimated(self.limits.skills)),
            first_covered=covered[0].id if first_covered is None and covered else first_covered,
            last_covered=covered[-1].id if covered else None,
            threshold=self.limits.threshold,
            window=self.limits.window,
        )

    def tail(self, tokens: int) -> int:
        """Return the start index of the longest tail that has at most `tokens` estimated tokens, or `count` if no tail
        is that small."""
        return next((index for index in self._boundaries if self.suffix[index] <= tokens), self.count)

    def _preferred_tail(self, tokens: int) -> int:
        """Do the same as `tail`, but if a shorter tail starts at a user message and has at least half of `tokens`,
        return the start of that tail."""
        start = self.tail(tokens)
        for index in self._boundaries:
            if index >= start and self.suffix[index] * 2 >= tokens and self.is_prompt(index):
                return index
        return start

    def unanswered(self) -> int:
        """Return the index of the first message that the model has not answered yet: the start of the newest prompt or
        step."""
        for index in reversed(self._boundaries):
            if self.is_prompt(index) or self.kinds.get(self.context.origins[index]) is Assistant:
                return index
        return self.first

    def is_prompt(self, index: int) -> bool:
        """Return whether the message at `index` is a user message, or a fixed line that crow inserted directly before a
        user message."""
        if isinstance(self.context.messages[index], AssistantMessage):
            index += self.kinds.get(self.context.origins[index]) is not Assistant
        if index == self.count or not isinstance(self.context.messages[index], UserMessage):
            return False
        is_user = self.kinds.get(self.context.origins[index]) is User
        return is_user or not isinstance(self.context.messages[index - 1], ToolMessage)

    def estimated(self, tokens: int) -> int:
        """Convert the provider's tokens to estimated tokens."""
        return int(tokens / self.measured.scale)
