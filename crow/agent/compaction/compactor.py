"""Keeps the context of one turn small enough: decides by the plan, writes a mask or a checkpoint.

Strategy: everything is decided and written on the branch as it stands; nothing is replaced before a valid checkpoint
exists, and that is one append. A cancelled pass leaves nothing behind. Automatic passes that do not help for long end
the turn with words instead of burning tokens. Knows the model and the branch as protocols only.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

import anyio

from crow.agent.branch import Branch
from crow.agent.compaction.limits import (
    CompactionSettings,
    Limits,
    Measure,
    cut_for,
    limits_for,
    measure,
    recalibrated,
)
from crow.agent.compaction.outcome import (
    CompactionResult,
    compacted,
    masked,
    nothing_done,
    too_fast,
    too_small,
    undone_not,
)
from crow.agent.compaction.planner import (
    Draft,
    MaskOutputs,
    Noop,
    Reason,
    Summarise,
    TooSmall,
    acceptable,
    plan,
    with_bodies,
)
from crow.agent.compaction.summary import Head, Summary, notes, summarise
from crow.agent.compaction.window import learn_window, window_of
from crow.agent.cost import cost_of
from crow.domain.conversation import Context
from crow.domain.entries import Assistant, Body, Checkpoint, Entry, Mask, NewEntry, Prompt, Restore
from crow.domain.errors import ContextOverflow, TurnError
from crow.domain.events import CompactionChanged, ContextMeasured
from crow.llm import Model
from crow.store import SessionChanges

__all__ = ["Compactor"]

DEADLINE_S = 120.0
PUBLISH_S = 2.0
ANSWERS_BETWEEN = 4
"""Three passes in a row need at least so many answers between the first and the third."""


class Compactor:
    """Compaction on one branch for one turn, with the model that the turn asks.

    `fresh_prompt` builds the prompt entry that goes with a checkpoint. `compact_model` writes the summary when the
    session's model did not. `deadline_s` bounds each question.
    """

    def __init__(
        self,
        branch: Branch,
        model: Model,
        settings: CompactionSettings,
        fresh_prompt: Callable[[], Awaitable[Prompt | None]] | None = None,
        *,
        compact_model: Model | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.model = model
        self._branch = branch
        self._settings = settings
        self._fresh_prompt = fresh_prompt
        self._compact_model = compact_model
        self._deadline_s = deadline_s
        self._passes: list[int] = []

    async def make_room(self) -> None:
        """See that the next request fits, before it is made.

        :raises ~crow.domain.errors.TurnError: it cannot be made to fit, or compaction does not help for long.
        """
        if not self._settings.auto or self.used() < self.limits().threshold:
            return
        self._guard()
        result = await self.compact("threshold")
        if result.outcome == "too_small":
            raise TurnError(result.words)

    async def overflowed(self, error: ContextOverflow) -> bool:
        """Learn from a request that was refused as too long, and compact; false if that changes nothing.

        :raises ~crow.domain.errors.TurnError: it cannot be made to fit, or compaction does not help for long.
        """
        if not self._settings.auto:
            return False
        await self._learn(error)
        self._guard()
        result = await self.compact("overflow")
        if result.outcome == "too_small":
            raise TurnError(result.words) from error
        return result.outcome in ("masked", "compacted")

    async def on_command(self, focus: str = "") -> str:
        """Compact because the user asks, with room for `focus` in the summary, or `undo` it; the answer for them."""
        if focus.strip() == "undo":
            return await self._undo()
        return (await self.compact("command", focus)).words

    async def tell(self) -> None:
        """Tell the client how full the context is, and what the session cost if prices are known."""
        cost = self._branch.row.cost if self.model.info.input_price is not None else None
        await self._branch.publish(ContextMeasured(used=self.used(), size=self.window(), cost=cost))

    def window(self) -> int:
        """The model's context window in tokens: as declared, lowered by what refused requests have shown."""
        return window_of(self.model.info, self._branch.row.metadata)

    def used(self) -> int:
        """Tokens that the next request would have."""
        return self.measured().used

    def estimate(self) -> int:
        """Estimated tokens of the request as it stands, uncalibrated: `NewEntry.estimate` of the answer to it."""
        return self._branch.context().estimate

    def measured(self) -> Measure:
        """How full the context is."""
        branch = self._branch
        return measure(branch.context(), branch.entries, self.model.info.endpoint, branch.row.calibration)

    def limits(self) -> Limits:
        """How full it may be."""
        return self._limits(self.measured().fixed)

    def max_output_tokens(self) -> int | None:
        """The limit to send with a request; None leaves it to the endpoint."""
        return self.limits().output

    def cut_chars(self, text: str | None = None, *, beside: int = 1) -> int:
        """How many characters of `text`, one of `beside` results of a step, the model may see; of plain ASCII text if
        it is None."""
        limits, scale = self.limits(), self.measured().scale
        if text is not None:
            chars = cut_for(text, limits, scale, beside=beside)
            return len(text) if chars is None else chars
        return int(min(limits.room // 4, limits.room // 2 // max(1, beside)) / scale * 4)

    async def compact(self, reason: Reason, focus: str = "") -> CompactionResult:
        """One pass.

        :raises ~crow.domain.errors.StoreError: it could not be stored; nothing has changed.
        """
        found, projection = self.measured(), self._branch.projection
        limits = self._limits(found.fixed)
        match plan(projection, limits, found, reason):
            case Noop(why=why):
                return nothing_done(found, why)
            case TooSmall():
                return too_small(self.model.info.name, limits, found)
            case MaskOutputs(before=before, tokens_after=after):
                body = Mask(before=before, tokens_before=found.used, tokens_after=after)
                (entry,) = await self._store([NewEntry(body=body)], found)
                return masked(entry, body)
            case Summarise(drafts=drafts):
                return await self._summarise(drafts, limits, found, reason, focus)

    def _limits(self, fixed: int) -> Limits:
        return limits_for(self.window(), self.model.info.max_output_tokens, fixed, self._settings)

    async def _summarise(
        self, drafts: tuple[Draft, ...], limits: Limits, found: Measure, reason: Reason, focus: str
    ) -> CompactionResult:
        """Summarise, verify, commit; the client hears how it went, whatever happens."""
        compaction_id = f"compaction_{secrets.token_hex(8)}"
        await self._publish(compaction_id, "in_progress")
        status: Literal["completed", "failed", "cancelled"] = "cancelled"
        detail = ""
        try:
            result = await self._write(compaction_id, drafts, limits, found, reason, focus)
        except Exception as error:
            status, detail = "failed", str(error)
            raise
        else:
            status, detail = ("completed" if result.entry else "failed"), result.words
            return result
        finally:
            kept = self._branch.projection.checkpoint
            if kept is not None and isinstance(kept.body, Checkpoint) and kept.body.compaction_id == compaction_id:
                status, detail = "completed", kept.body.summary  # committed, even if cancelled just after
            with anyio.move_on_after(PUBLISH_S, shield=True):
                await self._publish(compaction_id, status, detail)

    async def _write(
        self,
        compaction_id: str,
        drafts: tuple[Draft, ...],
        limits: Limits,
        found: Measure,
        reason: Reason,
        focus: str,
    ) -> CompactionResult:
        context, leaf = self._branch.context(), self._branch.entries[-1].id
        summary = await self._ask(context, drafts[0], limits, found, focus)
        prompt = None if self._fresh_prompt is None else await self._fresh_prompt()
        checkpoint = self._verified(compaction_id, context, leaf, drafts, summary, prompt, found)
        if checkpoint is None:
            return self._gave_nothing(limits, found, reason)
        return await self._commit(checkpoint, summary, prompt, found)

    async def _ask(self, context: Context, draft: Draft, limits: Limits, found: Measure, focus: str) -> Summary:
        checkpoint = self._branch.projection.checkpoint
        previous = checkpoint.body.summary if checkpoint and isinstance(checkpoint.body, Checkpoint) else ""
        head = Head(
            tools=context.tools,
            messages=context.messages[: draft.start],
            estimate=context.tools_estimate + sum(context.estimates[: draft.start]),
            previous=previous,
        )
        return await summarise(
            head,
            self.model,
            replace(limits, summary=draft.summary_tokens),
            found.scale,
            compact_model=self._compact_model,
            focus=focus,
            cache_key=self._branch.row.id,
            deadline_s=self._deadline_s,
        )

    def _verified(
        self,
        compaction_id: str,
        context: Context,
        leaf: int,
        drafts: tuple[Draft, ...],
        summary: Summary,
        prompt: Prompt | None,
        found: Measure,
    ) -> Checkpoint | None:
        """The first draft that, rendered with what will really be stored, is small enough and less than before."""
        entries = self._branch.entries
        newer = next((entry.id for entry in entries if entry.id > leaf), None)
        for draft in drafts:
            text = summary.text
            if draft is not drafts[0]:  # what this draft covers beyond the first was not summarised
                budget = int(draft.summary_tokens / found.scale)
                text = notes(text, context.messages[drafts[0].start : draft.start], budget)
            body = replace(
                draft.body,
                compaction_id=compaction_id,
                summary=text,
                # entries that came while the summary was written are no part of it
                first_kept=newer if draft.body.first_kept is None else draft.body.first_kept,
                mode=self._branch.row.mode,
                method=summary.method,
                model_calls=summary.model_calls,
            )
            bodies: tuple[Body, ...] = (body,) if prompt is None else (prompt, body)
            after = with_bodies(entries, *bodies)
            tokens = round(after.estimate * found.scale)
            limits = self._limits(round(after.fixed_estimate * found.scale))
            if tokens < found.used and acceptable(tokens, draft, limits, len(context.messages)):
                return replace(body, tokens_after=tokens)
        return None

    async def _commit(
        self, checkpoint: Checkpoint, summary: Summary, prompt: Prompt | None, found: Measure
    ) -> CompactionResult:
        asked = self._compact_model if self._compact_model and summary.method == "serialised" else self.model
        new = NewEntry(
            body=checkpoint, model=summary.model, usage=summary.usage, cost=cost_of(summary.usage, asked.info)
        )
        prompts = [] if prompt is None else [NewEntry(body=prompt)]
        stored = await self._store([*prompts, new], found)
        return compacted(stored[-1], checkpoint)

    async def _store(self, entries: list[NewEntry], found: Measure) -> tuple[Entry, ...]:
        calibration = recalibrated(self._branch.row.calibration, found)
        stored = await self._branch.record(entries, changes=SessionChanges(calibration=calibration))
        self._passes.append(stored[-1].id)
        return stored

    async def _publish(
        self, compaction_id: str, status: Literal["in_progress", "completed", "failed", "cancelled"], detail: str = ""
    ) -> None:
        await self._branch.publish(CompactionChanged(compaction_id=compaction_id, status=status, detail=detail))

    async def _undo(self) -> str:
        """Make the newest checkpoint count no longer, if what it stands for still fits."""
        entry = self._branch.projection.checkpoint
        if entry is None or not isinstance(entry.body, Checkpoint):
            return "There is no compaction to undo."
        limits = self.limits()
        before = self.used()
        tokens = entry.body.tokens_before + max(0, before - entry.body.tokens_after)
        if tokens >= limits.threshold:
            return undone_not(tokens, limits)
        await self._branch.record([NewEntry(body=Restore(entry=entry.id))])
        return f"Undone: {before:,} → {self.used():,} tokens. The model sees the conversation as it was before."

    def _guard(self) -> None:
        """End the turn when the third automatic pass in a row is due too soon."""
        if len(self._passes) < 2:
            return
        since = self._passes[-2]
        answers = sum(1 for entry in self._branch.entries if entry.id > since and isinstance(entry.body, Assistant))
        if answers < ANSWERS_BETWEEN:
            raise TurnError(too_fast(self.model.info.name, self.limits(), answers))

    async def _learn(self, error: ContextOverflow) -> None:
        """Lower the window to what the refusal shows, and raise the calibration to what it counted."""
        found, row = self.measured(), self._branch.row
        counted = (error.size or error.limit or 0) / max(1, self.estimate())
        changes = SessionChanges(
            metadata=learn_window(self.model.info, row.metadata, error, found),
            calibration=min(4.0, max(row.calibration, counted)),
        )
        await self._branch.change(changes)

    def _gave_nothing(self, limits: Limits, found: Measure, reason: Reason) -> CompactionResult:
        if reason == "command":
            return nothing_done(found, "The conversation is already so short that a summary would be longer.")
        return too_small(self.model.info.name, limits, found)
