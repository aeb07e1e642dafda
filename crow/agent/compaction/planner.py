"""Whether to compact, and how: a pure decision over a projection and its limits.

Old tool outputs are hidden if that alone is enough, else a cut is chosen. Every candidate is rendered as the model
would see it, with a summary as long as is allowed, and measured; so what is decided here holds whatever the model
answers. What the model has not answered yet is kept if it fits, then less and less, at last nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from crow.agent.compaction.budget import Limits, Measure
from crow.agent.compaction.checkpoint import files_touched, hiding_order, pins_of, skills_of
from crow.domain.conversation import Context, Projection
from crow.domain.entries import Assistant, Body, Checkpoint, Entry, Mask, ToolResult, User
from crow.domain.messages import AssistantMessage, ToolMessage, UserMessage
from crow.domain.rendering import elided_message, is_maskable
from crow.domain.tokens import estimate_message

__all__ = [
    "CheckpointDraft",
    "Decision",
    "MaskOutputs",
    "Noop",
    "Reason",
    "Summarise",
    "TooSmall",
    "acceptable",
    "plan",
    "with_bodies",
]

Reason: TypeAlias = Literal["threshold", "overflow", "command", "model"]
"""Why to compact: the threshold was reached, a request was refused as too long, the user or a change of model asks."""

MIN_HEAD = 400
"""A head of fewer estimated tokens is not worth a summary on command."""

LEAST_SUMMARY = 120
LEAST_PINS = 240
"""Tokens of the summary, and of the user's messages, where there is hardly any room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noop:
    """Nothing is to be done; `why` is a sentence for the user."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOutputs:
    """Hide the tool outputs of entries before `before`, but for `exceptions`; the request then has `tokens_after`."""

    before: int
    exceptions: tuple[int, ...]
    tokens_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint without its summary, which may have `summary_tokens`. The messages from index `start` on stay;
    `body.first_kept` is their entry. `most_tokens` of the whole request are accepted; None: what the limits say."""

    start: int
    summary_tokens: int
    body: Checkpoint
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarise:
    """Summarise what stands before `drafts[0].start`. The later drafts keep less, should the first not fit."""

    drafts: tuple[CheckpointDraft, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TooSmall:
    """No compaction makes the request fit, or a shorter one."""


Decision: TypeAlias = Noop | MaskOutputs | Summarise | TooSmall


def plan(projection: Projection, limits: Limits, found: Measure, reason: Reason) -> Decision:
    """What to do with `projection`, measured as `found`. `threshold` and `model` wait for the threshold."""
    if reason in ("threshold", "model") and found.used < limits.threshold:
        return Noop(why="There is enough room.")
    view = View(projection)
    if reason == "command" and not view.has_news():
        return Noop(why="Nothing is new since the last compaction.")
    if limits.is_configured and limits.is_tiny:
        return TooSmall()
    if reason != "command":
        mask = view.mask(limits, found)
        if mask is not None:
            return mask
    drafts = view.drafts(limits, found, reason)
    if drafts:
        return Summarise(drafts=drafts)
    if reason == "command":
        return Noop(why="The conversation is too short to gain by it.")
    return TooSmall()


def with_bodies(entries: Sequence[Entry], *bodies: Body) -> Context:
    """What the model would see after `bodies` were appended to `entries`."""
    path = list(entries)
    for body in bodies:
        leaf = path[-1]
        path.append(replace(leaf, id=leaf.id + 1, parent=leaf.id, body=body, usage=None, estimate=None))
    return Projection(path).context()


def acceptable(tokens: int, draft: CheckpointDraft, limits: Limits, count: int) -> bool:
    """Whether a request of `tokens` after compaction is small enough; `count` is the messages there were before."""
    if draft.most_tokens is not None:
        return tokens <= draft.most_tokens
    return tokens <= (limits.target if draft.start < count else limits.ceiling)


class View:
    """A projection, looked at for cuts. Messages are named by their index; `first` is the first that can be covered."""

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self.context = projection.context()
        self.count = len(self.context.messages)
        self.checkpoint = projection.checkpoint
        self.first = 1 if self.checkpoint is None else 2
        self.kinds = {entry.id: type(entry.body) for entry in projection.entries}
        self.suffix = [0] * (self.count + 1)
        for index in reversed(range(self.count)):
            self.suffix[index] = self.suffix[index + 1] + self.context.estimates[index]
        self.boundaries = self.find_boundaries()

    def has_news(self) -> bool:
        """Whether there is anything after the checkpoint."""
        newest = max(self.context.origins[self.first :], default=0)
        return newest > (self.checkpoint.id if self.checkpoint else 0)

    def find_boundaries(self) -> list[int]:
        """Where a tail may start: at the first message of an entry, with no call open, and something before it."""
        boundaries: list[int] = []
        newest = 0
        for index in range(self.first, self.count):
            origin = self.context.origins[index]
            if origin > newest and index > self.first and not isinstance(self.context.messages[index], ToolMessage):
                boundaries.append(index)
            newest = max(newest, origin)
        return boundaries

    def is_prompt(self, index: int) -> bool:
        """Whether a message of the user starts here (or the fixed line before one)."""
        if isinstance(self.context.messages[index], AssistantMessage):
            index += self.kinds.get(self.context.origins[index]) is not Assistant
        return (
            index < self.count
            and isinstance(self.context.messages[index], UserMessage)
            and (
                self.kinds.get(self.context.origins[index]) is User
                or not isinstance(self.context.messages[index - 1], ToolMessage)
            )
        )

    def unanswered(self) -> int:
        """Where that starts which the model has not answered yet: the newest prompt, or the newest step."""
        for index in reversed(self.boundaries):
            if self.is_prompt(index) or self.kinds.get(self.context.origins[index]) is Assistant:
                return index
        return self.first

    def tail(self, tokens: int) -> int:
        """Where the longest tail of at most so many estimated tokens starts; `count` if there is none."""
        return next((index for index in self.boundaries if self.suffix[index] <= tokens), self.count)

    def preferred_tail(self, tokens: int) -> int:
        """As `tail`, but from a message of the user on, if at least half of the tokens are then kept."""
        start = self.tail(tokens)
        for index in self.boundaries:
            if index >= start and self.suffix[index] * 2 >= tokens and self.is_prompt(index):
                return index
        return start

    def mask(self, limits: Limits, found: Measure) -> MaskOutputs | None:
        """The mask that hides just enough to reach the target, if any. What was not answered yet stays in view."""
        start = min(self.tail(int(limits.keep / found.scale)), self.unanswered())
        gains = self.gains(start)
        hidden: set[int] = set()
        estimate = self.context.estimate
        for entry in hiding_order(self.projection.entries):
            if hidden and round(estimate * found.scale) <= limits.target:
                break
            if entry in gains:
                hidden.add(entry)
                estimate -= gains[entry]
        if not hidden:
            return None
        before = max(hidden) + 1
        exceptions = tuple(sorted(entry for entry in gains if entry < before and entry not in hidden))
        context = with_bodies(self.projection.entries, Mask(before=before, exceptions=exceptions))
        after = round(context.estimate * found.scale)
        if after < found.used and after <= limits.target:
            return MaskOutputs(before=before, exceptions=exceptions, tokens_after=after)
        return None

    def gains(self, start: int) -> dict[int, int]:
        """Estimated tokens that hiding each output before index `start` would free, by entry."""
        results = {entry.id: entry.body for entry in self.projection.entries if isinstance(entry.body, ToolResult)}
        gains: dict[int, int] = {}
        for index in range(self.first, start):
            message, entry = self.context.messages[index], self.context.origins[index]
            if isinstance(message, ToolMessage) and entry in results and is_maskable(results[entry]):
                hidden = elided_message(results[entry], entry, message.call_id)
                gains[entry] = self.context.estimates[index] - estimate_message(hidden)
        return {entry: gain for entry, gain in gains.items() if gain > 0}

    def drafts(self, limits: Limits, found: Measure, reason: Reason) -> tuple[CheckpointDraft, ...]:
        """The cuts that fit with the longest summary allowed, the one that keeps most first."""
        if self.first >= self.count:
            return ()
        rungs, most_tokens = self.rungs(limits, found), None
        if limits.is_tiny:  # only of a window that was learned: anything shorter is worth a try
            rungs, most_tokens = (
                [(start, LEAST_SUMMARY) for start in (self.unanswered(), self.count)],
                found.used * 9 // 10,
            )
            limits = replace(limits, pins=max(limits.pins, LEAST_PINS))
        drafts: list[CheckpointDraft] = []
        for start, summary_tokens in rungs:
            if reason == "command" and self.suffix[self.first] - self.suffix[start] < MIN_HEAD:
                continue
            draft = replace(self.draft(start, summary_tokens, limits, found, reason), most_tokens=most_tokens)
            longest = replace(draft.body, summary="word" * int(summary_tokens / found.scale))
            tokens = round(with_bodies(self.projection.entries, longest).estimate * found.scale)
            if acceptable(tokens, draft, limits, self.count) and (reason == "command" or tokens < found.used):
                drafts.append(draft)
        return tuple(drafts)

    def rungs(self, limits: Limits, found: Measure) -> list[tuple[int, int]]:
        """Where the tail may start and how long the summary may then be: first all that was not answered yet, if that
        is more than what is kept anyway, then less and less."""
        keep = int(limits.keep / found.scale)
        starts = dict.fromkeys((self.preferred_tail(keep), self.tail(keep // 2), self.tail(keep // 8), self.count))
        rungs = [(start, limits.summary) for start in starts]
        unanswered = self.unanswered()
        if self.first < unanswered < rungs[0][0]:
            rungs = [(unanswered, limits.summary), (unanswered, limits.summary // 2), *rungs]
        return rungs

    def draft(self, start: int, summary_tokens: int, limits: Limits, found: Measure, reason: Reason) -> CheckpointDraft:
        """The checkpoint that keeps what stands from `start` on."""
        entries = self.projection.entries
        previous = self.checkpoint.body if self.checkpoint else None
        assert previous is None or isinstance(previous, Checkpoint)
        first_kept = self.context.origins[start] if start < self.count else None
        covered = [entry for entry in entries if first_kept is None or entry.id < first_kept]
        read, modified = files_touched(previous, entries)
        return CheckpointDraft(
            start=start,
            summary_tokens=summary_tokens,
            body=Checkpoint(
                compaction_id="",
                summary="",
                first_kept=first_kept,
                pins=pins_of(previous, covered, int(limits.pins / found.scale)),
                files_read=read,
                files_modified=modified,
                mode=self.projection.mode,
                plan=self.projection.plan,
                reason=reason,
                tokens_before=found.used,
                lists_cut=int(limits.lists / found.scale) * 4,
                skills=skills_of(previous, covered, int(limits.skills / found.scale)),
                first_covered=first_covered(previous, covered),
                last_covered=covered[-1].id if covered else None,
            ),
        )


def first_covered(previous: Checkpoint | None, covered: Sequence[Entry]) -> int | None:
    """The id at the beginning of all that a checkpoint stands for, what the one before stood for included."""
    if previous is not None and previous.first_covered is not None:
        return previous.first_covered
    return covered[0].id if covered else None
