"""Keeps the context of one turn small enough: decides by the plan, writes a mask or a checkpoint.

Everything is decided and written on the branch as it stands; nothing is replaced before a valid checkpoint exists, and
that is one append. A cancelled pass leaves nothing behind. Passes that do not help for long stop instead of burning
tokens: under a window that the user configured the turn ends with words, else the endpoint decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

import anyio

from crow.agent.branch import Branch
from crow.agent.compaction.budget import Gauge, Limits, Measure, recalibrated
from crow.agent.compaction.hooks import Advice, Done, Hooks, Proposal
from crow.agent.compaction.planner import (
    CheckpointDraft,
    MaskOutputs,
    Noop,
    Reason,
    Summarise,
    TooSmall,
    acceptable,
    plan,
    with_bodies,
)
from crow.agent.compaction.summary import CoveredContext, Summary, SummaryOptions, notes, summarise, usable_text
from crow.domain.conversation import Context
from crow.domain.entries import Assistant, Body, Checkpoint, Entry, Mask, NewEntry, Prompt, Restore
from crow.domain.errors import ContextOverflow, TurnError
from crow.domain.events import CompactionChanged, NoticeShown, SummaryShown
from crow.llm import Model, cost_of
from crow.store import SessionChanges

__all__ = [
    "CompactionResult",
    "Compactor",
    "Helpers",
    "compacted",
    "masked",
    "nothing_done",
    "too_fast",
    "too_long",
    "too_small",
    "undone_not",
    "vetoed",
]

DEADLINE_S = 120.0
PUBLISH_S = 2.0
ANSWERS_BETWEEN = 4
"""Three passes in a row need at least so many answers between the first and the third."""
PASSES_BETWEEN = 2
"""At most so many passes for one request that is refused again and again."""


async def no_fresh_prompt() -> Prompt | None:
    """The prompt entry in force stays."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """What a compaction uses beside the model. `fresh_prompt` builds the prompt entry that goes with a checkpoint;
    `compact_model` writes the summary when the session's model did not; `deadline_s` bounds each question."""

    fresh_prompt: Callable[[], Awaitable[Prompt | None]] = no_fresh_prompt
    compact_model: Model | None = None
    hooks: Hooks = field(default_factory=Hooks)
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Why and how a pass is made: what was found, what is allowed in which window, what hooks said."""

    reason: Reason
    focus: str
    found: Measure
    limits: Limits
    advice: Advice = field(default_factory=Advice)


class Compactor:
    """Compaction on one branch for one turn, with the model that the turn asks."""

    def __init__(self, gauge: Gauge, model: Model, helpers: Helpers | None = None) -> None:
        self.gauge = gauge
        self.model = model
        self._branch: Branch = gauge.branch
        self._settings = gauge.settings
        self._helpers = helpers or Helpers()
        self._passes: list[int] = []
        self._told_of_hooks: set[str] = set()

    async def make_room(self) -> None:
        """See that the next request fits, before it is made.

        :raises ~crow.domain.errors.TurnError: it cannot be made to fit, or compaction does not help for long.
        """
        if not self._settings.auto or not self.gauge.is_full():
            return
        limits = self.gauge.limits()
        answers = self._answers_since(2)
        if answers is not None and answers < ANSWERS_BETWEEN:
            if limits.is_configured:
                raise TurnError(too_fast(self.model.info.name, limits, answers))
            return
        result = await self.compact("model" if self.gauge.is_switched() else "threshold")
        if result.entry is not None:
            await self.gauge.compacted()
        elif result.outcome == "too_small" and limits.is_configured:
            raise TurnError(result.words)

    async def overflowed(self, error: ContextOverflow) -> None:
        """Learn from a request that was refused as too long, and make it shorter.

        :raises ~crow.domain.errors.ContextOverflow: it is as short as it can be, or was refused too often; the words
            say what the user can do.
        """
        window = await self.gauge.refused(error)
        found = self.gauge.measured()
        if not self._settings.auto:
            raise too_long(error, found, "off") from error
        if self._is_refused_too_often():
            raise too_long(error, found, "often") from error
        result = await self.compact("overflow", window=window)
        if result.entry is None:
            raise too_long(error, found, "nothing") from error

    async def on_command(self, focus: str = "") -> str:
        """Compact because the user asks, with room for `focus` in the summary, or `undo` it; the answer for them."""
        if focus.strip() == "undo":
            return await self._undo()
        return (await self.compact("command", focus)).words

    async def compact(self, reason: Reason, focus: str = "", *, window: int | None = None) -> CompactionResult:
        """One pass, and the hooks around it; for another `window` than the model is taken to have.

        :raises ~crow.domain.errors.StoreError: it could not be stored; nothing has changed.
        """
        found = self.gauge.measured()
        limits = self.gauge.limits(found.fixed, window=window)
        going = Pass(reason=reason, focus=focus, found=found, limits=limits)
        match plan(self._branch.projection, limits, found, reason):
            case Noop(why=why):
                return nothing_done(found, why)
            case TooSmall():
                return too_small(self.model.info.name, limits, found)
            case MaskOutputs() as decision:
                advice = await self._before(going, "mask")
                result = vetoed(found, advice.veto) if advice.veto else await self._mask(decision, going)
            case Summarise(drafts=drafts):
                advice = await self._before(going, "summary")
                going = replace(going, advice=advice)
                result = vetoed(found, advice.veto) if advice.veto else await self._summarise(drafts, going)
        if result.entry is not None:
            await self.gauge.tell()
            await self._after(result.entry, reason)
        return result

    async def _before(self, going: Pass, kind: Literal["mask", "summary"]) -> Advice:
        row = self._branch.row
        return await self._helpers.hooks.before(
            Proposal(
                session_id=row.id,
                cwd=row.cwd,
                model=self.model.info.name,
                kind=kind,
                reason=going.reason,
                focus=going.focus,
                tokens=going.found.used,
                threshold=going.limits.threshold,
                window=going.limits.window,
                previous_summary=self._previous_summary(),
            ),
            self._tell_of_hook,
        )

    async def _after(self, entry: Entry, reason: Reason) -> None:
        row, body = self._branch.row, entry.body
        assert isinstance(body, (Mask, Checkpoint))
        done = Done(
            session_id=row.id,
            cwd=row.cwd,
            model=self.model.info.name,
            kind="mask",
            reason=reason,
            entry=entry.id,
            tokens_before=body.tokens_before,
            tokens_after=body.tokens_after,
        )
        if isinstance(body, Checkpoint):
            files = body.files_modified
            done = replace(done, kind="summary", summary=body.summary, method=body.method, files_modified=files)
        await self._helpers.hooks.after(done, self._tell_of_hook)

    async def _tell_of_hook(self, words: str) -> None:
        """Tell the user of a hook that was passed over, once a turn: a turn may be compacted often."""
        if words not in self._told_of_hooks:
            self._told_of_hooks.add(words)
            await self._branch.publish(NoticeShown(severity="warning", title=words))

    def _previous_summary(self) -> str:
        checkpoint = self._branch.projection.checkpoint
        return checkpoint.body.summary if checkpoint and isinstance(checkpoint.body, Checkpoint) else ""

    async def _mask(self, decision: MaskOutputs, going: Pass) -> CompactionResult:
        body = Mask(
            before=decision.before,
            exceptions=decision.exceptions,
            tokens_before=going.found.used,
            tokens_after=decision.tokens_after,
        )
        (entry,) = await self._store([NewEntry(body=body)], going.found)
        return masked(entry, body)

    async def _summarise(self, drafts: tuple[CheckpointDraft, ...], going: Pass) -> CompactionResult:
        """Summarise, verify, commit; the client hears how it went, whatever happens."""
        compaction_id = f"compaction_{secrets.token_hex(8)}"
        await self._publish(compaction_id, "in_progress")
        status: Literal["completed", "failed", "cancelled"] = "cancelled"
        detail = ""
        try:
            result = await self._write(compaction_id, drafts, going)
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

    async def _write(self, compaction_id: str, drafts: tuple[CheckpointDraft, ...], going: Pass) -> CompactionResult:
        context, leaf = self._branch.context(), self._branch.entries[-1].id
        summary = await self._summary(compaction_id, context, drafts[0], going)
        prompt = await self._helpers.fresh_prompt()
        checkpoint = self._verified(compaction_id, context, leaf, drafts, summary, prompt, going)
        if checkpoint is None:
            return self._gave_nothing(going)
        return await self._commit(checkpoint, summary, prompt, going.found)

    async def _summary(self, compaction_id: str, context: Context, draft: CheckpointDraft, going: Pass) -> Summary:
        """That of a hook if it can be used, else the model's."""
        limits = replace(going.limits, summary=draft.summary_tokens)
        given = usable_text(going.advice.summary, int(limits.summary / going.found.scale))
        if given:
            return Summary(text=given, method="hook")

        async def show(text: str) -> None:
            await self._branch.publish(SummaryShown(compaction_id=compaction_id, text=text))

        head = CoveredContext(
            tools=context.tools,
            messages=context.messages[: draft.start],
            estimate=context.tools_estimate + sum(context.estimates[: draft.start]),
            previous=self._previous_summary(),
        )
        asking = SummaryOptions(
            deadline_s=self._helpers.deadline_s,
            instruction=self._settings.instruction,
            focus=going.focus,
            context=going.advice.context,
            cache_key=self._branch.row.id,
            show=show,
        )
        return await summarise(
            head, self.model, limits, going.found.scale, asking, compact_model=self._helpers.compact_model
        )

    def _verified(
        self,
        compaction_id: str,
        context: Context,
        leaf: int,
        drafts: tuple[CheckpointDraft, ...],
        summary: Summary,
        prompt: Prompt | None,
        going: Pass,
    ) -> Checkpoint | None:
        """The first draft that, rendered with what will really be stored, is small enough and less than before."""
        entries, found = self._branch.entries, going.found
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
            limits = self.gauge.limits(round(after.fixed_estimate * found.scale), window=going.limits.window)
            if tokens < found.used and acceptable(tokens, draft, limits, len(context.messages)):
                return replace(body, tokens_after=tokens)
        return None

    async def _commit(
        self, checkpoint: Checkpoint, summary: Summary, prompt: Prompt | None, found: Measure
    ) -> CompactionResult:
        other = self._helpers.compact_model
        asked = other if other is not None and summary.method == "serialised" else self.model
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
        limits, before = self.gauge.limits(), self.gauge.used()
        tokens = entry.body.tokens_before + max(0, before - entry.body.tokens_after)
        if tokens >= limits.threshold:
            return undone_not(tokens, limits)
        await self._branch.record([NewEntry(body=Restore(entry=entry.id))])
        await self.gauge.tell()
        return f"Undone: {before:,} → {self.gauge.used():,} tokens. The model sees the conversation as it was before."

    def _is_refused_too_often(self) -> bool:
        """Whether one request was refused after so many passes, or twice as many brought hardly any answers."""
        newest, all_of_them = self._answers_since(PASSES_BETWEEN), self._answers_since(2 * PASSES_BETWEEN)
        return newest == 0 or (all_of_them is not None and all_of_them < ANSWERS_BETWEEN)

    def _answers_since(self, passes: int) -> int | None:
        """How many answers came since the first of the last so many passes of this turn; None if there were fewer."""
        if len(self._passes) < passes:
            return None
        since = self._passes[-passes]
        return sum(1 for entry in self._branch.entries if entry.id > since and isinstance(entry.body, Assistant))

    def _gave_nothing(self, going: Pass) -> CompactionResult:
        if going.reason == "command":
            return nothing_done(going.found, "The conversation is already so short that a summary would be longer.")
        self._passes.append(self._branch.entries[-1].id)
        return too_small(self.model.info.name, going.limits, going.found)


# FROM agent.compaction.outcome: How a pass ended, in words for the user. Numbers are tokens of the whole request.


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """`entry` is the mask or checkpoint that was stored; None: nothing was."""

    outcome: Literal["noop", "masked", "compacted", "too_small"]
    words: str
    tokens_before: int
    tokens_after: int
    model_calls: int = 0
    entry: Entry | None = None


def nothing_done(found: Measure, why: str) -> CompactionResult:
    return CompactionResult(outcome="noop", words=why, tokens_before=found.used, tokens_after=found.used)


def vetoed(found: Measure, why: str) -> CompactionResult:
    return nothing_done(found, f"A hook kept the conversation from being compacted: {why}")


def masked(entry: Entry, body: Mask) -> CompactionResult:
    return CompactionResult(
        outcome="masked",
        words=f"Hid old tool outputs from the model: {arrow(body)}. It can recall them.",
        tokens_before=body.tokens_before,
        tokens_after=body.tokens_after,
        entry=entry,
    )


def compacted(entry: Entry, body: Checkpoint) -> CompactionResult:
    how = "notes taken without the model" if body.method == "fallback" else "a summary"
    return CompactionResult(
        outcome="compacted",
        words=f"Compacted to {how}: {arrow(body)}. Nothing is deleted; the model can recall it.",
        tokens_before=body.tokens_before,
        tokens_after=body.tokens_after,
        model_calls=body.model_calls,
        entry=entry,
    )


def too_small(model: str, limits: Limits, found: Measure) -> CompactionResult:
    """Stops a turn only where the user configured the window."""
    words = (
        f"The request does not fit {model} and cannot be compacted further: context_window is {limits.window:,} tokens "
        f"in your configuration, of which system prompt and tools take {limits.fixed:,}; {found.used:,} would be sent, "
        f"{limits.threshold:,} are possible. Raise or remove context_window (in [model] or [models.NAME] of "
        f"config.toml), choose a model with a larger window, or disable MCP servers that are not needed."
    )
    return CompactionResult(outcome="too_small", words=words, tokens_before=found.used, tokens_after=found.used)


def too_fast(model: str, limits: Limits, answers: int) -> str:
    return (
        f"The context fills up faster than compaction can empty it: 2 compactions and only {answers} answers since. "
        f"The window of {model} is taken as {limits.window:,} tokens, of which system prompt and tools take "
        f"{limits.fixed:,}. Ask for smaller steps, or use a model with a larger window."
    )


def too_long(error: ContextOverflow, found: Measure, why: Literal["off", "often", "nothing"]) -> ContextOverflow:
    """The endpoint's error with what the user can do: compaction is `off`, came too `often`, or `nothing` is left."""
    sent = f"About {found.used:,} tokens were sent, {found.fixed:,} of them system prompt and tools"
    match why:
        case "off":
            advice = f"{sent}. Automatic compaction is off (compaction.auto): /compact makes room."
        case "often":
            advice = f"{sent}, after several compactions. Prompt again to compact further, or begin anew with /clear."
        case "nothing":
            advice = (
                f"{sent}, and nothing of it can be compacted. Prompt again if the endpoint may have been wrong. Else "
                "send a shorter prompt, choose a model with a larger window (/model), start the server with a larger "
                "one, or disable MCP servers that are not needed."
            )
        case _ as never:
            assert_never(never)
    return ContextOverflow(f"{error} {advice}", limit=error.limit, size=error.size)


def undone_not(tokens: int, limits: Limits) -> str:
    return (
        f"Not undone: the conversation would have {tokens:,} tokens again, and from {limits.threshold:,} on it is "
        f"compacted (window {limits.window:,})."
    )


def arrow(body: Mask | Checkpoint) -> str:
    return f"{body.tokens_before:,} → {body.tokens_after:,} tokens"
