"""Keeps one turn's context small enough by writing masks and checkpoints.

One compaction is called a pass. A pass appends its entries in one write, and nothing is replaced before a valid
checkpoint exists. A cancelled pass leaves nothing behind. If the context fills up again soon after each pass, crow
stops making passes, to save tokens. If the user configured the window, the turn then ends with an error. Otherwise crow
sends the request and the endpoint decides.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import anyio

from crow.agent.compaction import Reason
from crow.agent.compaction.budget import Gauge, Limits, Measure, recalibrated
from crow.agent.compaction.planner import CheckpointDraft, Noop, plan
from crow.agent.compaction.summary import Summary, ignore
from crow.agent.compaction.wish import CompactionWish
from crow.agent.compaction.writer import CheckpointWriter, Helpers, Pass, PreparedCheckpoint
from crow.agent.hooks import CompactionAdvice
from crow.domain.entries import BREAKS, Checkpoint, Entry, Mask, NewEntry, Prompt, Restore
from crow.domain.errors import BadRequest, ContextOverflow, TurnError
from crow.domain.events import CompactionChanged, SummaryShown
from crow.llm import Model
from crow.store import SessionChanges

logger = logging.getLogger(__name__)

_PUBLISH_S = 2.0
MIN_ANSWERS = 4
"""With fewer answers than this since the first of the last two passes, crow does not make another pass. With fewer
since the first of the last `2 * _MAX_RETRIES` passes, it gives up on a request that is refused."""
_MAX_RETRIES = 2
"""If a request is still refused after this many passes without an answer in between, crow gives up."""

_Status = Literal["in_progress", "completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """The result of a pass."""

    outcome: Literal["noop", "masked", "compacted", "too_small"]
    words: str
    """A message for the user."""
    entry: Entry | None = None
    """The stored mask or checkpoint, if any."""


class Compactor:
    """Compacts one branch for one turn, with the turn's model."""

    def __init__(self, gauge: Gauge, model: Model, helpers: Helpers | None = None) -> None:
        self.gauge = gauge
        self.model = model
        self._branch = gauge.branch
        self._settings = gauge.settings
        helpers = helpers or Helpers()
        self._hooks = helpers.hooks
        self._writer = CheckpointWriter(gauge, helpers)
        """Makes the checkpoints that this class stores and announces."""
        self._passes: list[int] = []
        """For each pass of this turn, the value of `Branch.answers` when it ended."""
        self.prepared: PreparedCheckpoint | None = None
        """If set, this checkpoint is used before the first request of the turn, provided that it still fits the
        branch."""

    async def use(self, model: Model) -> None:
        """Switch to another model."""
        self.model = model
        await self.gauge.use(lambda: model.info)

    async def make_room(self) -> None:
        """Make sure that the next request fits, before it is sent.

        :raises ~crow.domain.errors.TurnError: the request cannot be made to fit, or the context fills up again soon
            after each pass.
        """
        if self.prepared is not None:
            is_used = await self._use(self.prepared)
            # after a cancel or an error this line is not reached, and the next turn can use the checkpoint
            self.prepared = None
            if is_used:
                return
        if not self._settings.auto or not self.gauge.is_full():
            return
        self.gauge.context_window.test_if_due(self.model.info)
        if not self.gauge.is_full():
            return
        limits = self.gauge.limits()
        answers = self._answers_since(2)
        if answers is not None and answers < MIN_ANSWERS:
            if limits.is_configured:
                raise TurnError(_fills_too_fast(self.model.info.name, limits, answers))
            return
        result = await self.compact("model" if self.gauge.is_switched() else "threshold")
        if result.entry is not None:
            await self.gauge.context_window.on_compaction(self.model.info)
        elif result.outcome == "too_small" and limits.is_configured:
            raise TurnError(result.words)

    async def prepare(self) -> PreparedCheckpoint | None:
        """Write the summary that the next prompt may use. Nothing is shown to the client, and only the usage of the
        requests is stored.

        Return None in these cases: hiding old tool outputs is enough (this takes no time and can wait), nothing can be
        compacted, a hook forbids the compaction, or no model writes a summary.
        """
        current = self._early_pass()
        drafts = plan(self._branch.projection, current.limits, current.measured, "early")
        if isinstance(drafts, (Noop, Mask)) or not drafts:
            return None
        advice = await self._call_before_hooks(current, "summary")
        if advice.deny:
            return None
        prepared = await self._writer.prepare(self.model, drafts, replace(current, advice=advice), show=ignore)
        return None if prepared.summary.method == "fallback" else prepared

    async def _use(self, prepared: PreparedCheckpoint) -> bool:
        """Store the prepared checkpoint and return True. Return False, and store nothing, if the session has changed
        since the checkpoint was prepared, or if the checkpoint does not make the next request small enough."""
        projection, newer = self._branch.projection, self._branch.projection.entries_after(prepared.leaf)
        is_current = projection is prepared.projection and self.model.info.endpoint == prepared.endpoint
        if self.gauge.early_level() is None or not is_current:
            return False
        if any(isinstance(entry.body, BREAKS) for entry in newer):
            return False
        compaction_id = _new_compaction_id()
        current = self._early_pass()
        fitting = await self._writer.fit(compaction_id, prepared, current)
        if fitting is None:
            return False
        store = partial(self._store_checkpoint, *fitting, prepared.summary, current.measured)
        result = await self._announce(compaction_id, "early", store)
        assert result.entry is not None
        await self._finish(result.entry, "early")
        await self.gauge.context_window.on_compaction(self.model.info)
        return True

    def _early_pass(self) -> Pass:
        measured = self.gauge.measured()
        limits = self.gauge.limits(measured.fixed)
        return Pass(reason="early", wish=CompactionWish(), measured=measured, limits=limits)

    async def overflowed(self, error: ContextOverflow) -> None:
        """Learn from a request that was refused as too long, and shorten the request.

        :raises ~crow.domain.errors.ContextOverflow: automatic compaction is off, the request cannot be shortened, or
            it was refused too often. The message says what the user can do.
        """
        window = await self.gauge.on_refusal(error)
        measured = self.gauge.measured()
        if not self._settings.auto:
            raise _with_advice(error, measured, "off") from error
        if self._is_refused_too_often():
            raise _with_advice(error, measured, "often") from error
        result = await self.compact("overflow", window=window)
        if result.entry is None:
            raise _with_advice(error, measured, "nothing") from error

    async def refused_unclearly(self, error: BadRequest) -> bool:
        """Shorten a request that was refused without a clear reason, if it may have been too long. Return whether to
        send the request again."""
        measured = self.gauge.measured()
        is_large = self.gauge.context_window.is_larger_than_accepted(self.model.info, measured.used)
        if not self._settings.auto or not is_large or self._is_refused_too_often():
            return False
        try:
            await self.overflowed(ContextOverflow(str(error)))
        except ContextOverflow:
            return False
        return True

    async def on_command(self, argument: str = "") -> str:
        """Compact because the user asked, with the argument of `/compact`. If it is `undo`, undo the newest compaction
        instead. Return the answer for the user.

        :raises ~crow.domain.errors.ArgumentError: the argument asks for too much or too little.
        """
        if argument.strip() == "undo":
            return await self._undo()
        return (await self.compact("command", CompactionWish.parse(argument))).words

    async def compact(
        self, reason: Reason, wish: CompactionWish | None = None, *, window: int | None = None
    ) -> CompactionResult:
        """Run one pass with its hooks. `window` (tokens) replaces the model's window.

        :raises ~crow.domain.errors.ArgumentError: the wish cannot be fulfilled in this window.
        :raises ~crow.domain.errors.StoreError: the result could not be stored; nothing has changed.
        """
        wish = wish or CompactionWish()
        measured = self.gauge.measured()
        limits = self._writer.limits(measured.fixed, window, wish)
        current = Pass(reason=reason, wish=wish, measured=measured, limits=limits)
        decision = plan(self._branch.projection, limits, measured, reason)
        if isinstance(decision, Noop):
            why = wish.why_not(measured) if decision.is_too_short else ""
            return CompactionResult(outcome="noop", words=why or decision.why)
        if not decision:
            return _too_small(self.model.info.name, limits, measured)
        advice = await self._call_before_hooks(current, "mask" if isinstance(decision, Mask) else "summary")
        if advice.deny:
            return CompactionResult(outcome="noop", words=advice.deny)
        if isinstance(decision, Mask):
            result = await self._mask(decision, measured)
        else:
            result = await self._summarise(decision, replace(current, advice=advice))
        if result.entry is not None:
            await self._finish(result.entry, reason)
        return result

    async def _finish(self, entry: Entry, reason: Reason) -> None:
        """Tell the client and the hooks about a stored compaction."""
        await self.gauge.tell()
        await self._call_after_hooks(entry, reason)

    async def _call_before_hooks(self, current: Pass, kind: Literal["mask", "summary"]) -> CompactionAdvice:
        if self._hooks is None:
            return CompactionAdvice()
        return await self._hooks.before_compact(
            {
                "kind": kind,
                "reason": current.reason,
                "focus": current.wish.focus,
                "tokens": current.measured.used,
                "threshold": current.limits.threshold,
                "window": current.limits.window,
                "previous_summary": self._writer.previous_summary(),
            }
        )

    async def _call_after_hooks(self, entry: Entry, reason: Reason) -> None:
        body = entry.body
        assert isinstance(body, (Mask, Checkpoint))
        if self._hooks is None:
            return
        facts: dict[str, object] = {
            "kind": "summary" if isinstance(body, Checkpoint) else "mask",
            "reason": reason,
            "entry": entry.id,
            "tokens_before": body.tokens_before,
            "tokens_after": body.tokens_after,
        }
        if isinstance(body, Checkpoint):
            files = list(body.files_modified)
            facts |= {"summary": body.summary, "method": body.method, "files_modified": files}
        await self._hooks.after_compact(facts)

    async def _mask(self, body: Mask, measured: Measure) -> CompactionResult:
        (entry,) = await self._store([NewEntry(body=body)], measured)
        words = f"Hid old tool outputs from the model: {_tokens_saved(body)}. The model can recall them."
        return CompactionResult(outcome="masked", words=words, entry=entry)

    async def _summarise(self, drafts: Sequence[CheckpointDraft], current: Pass) -> CompactionResult:
        """Write and store a checkpoint, and tell the client about it."""
        compaction_id = _new_compaction_id()
        work = partial(self._write_checkpoint, compaction_id, drafts, current)
        return await self._announce(compaction_id, current.reason, work)

    async def _announce(
        self, compaction_id: str, reason: Reason, work: Callable[[], Awaitable[CompactionResult]]
    ) -> CompactionResult:
        """Run `work`, which stores a checkpoint. Tell the client when the compaction starts and how it ends, even if it
        fails or is cancelled."""
        event = CompactionChanged(compaction_id=compaction_id, status="in_progress", is_command=reason == "command")
        await self._branch.publish(event)
        status: _Status = "cancelled"
        detail = ""
        try:
            result = await work()
        except Exception as error:
            status, detail = "failed", str(error)
            raise
        else:
            status, detail = ("completed" if result.entry else "failed"), result.words
            return result
        finally:
            newest = self._branch.projection.checkpoint_body
            if newest is not None and newest.compaction_id == compaction_id:
                # the checkpoint was stored, even if the pass was cancelled right after
                status, detail = "completed", newest.summary
            with anyio.move_on_after(_PUBLISH_S, shield=True):
                await self._branch.publish(replace(event, status=status, detail=detail))

    async def _write_checkpoint(
        self, compaction_id: str, drafts: Sequence[CheckpointDraft], current: Pass
    ) -> CompactionResult:
        """Write a summary and store a checkpoint with it, if that makes the request small enough."""

        async def show(text: str) -> None:
            await self._branch.publish(SummaryShown(compaction_id=compaction_id, text=text))

        prepared = await self._writer.prepare(self.model, drafts, current, show=show)
        fitting = await self._writer.fit(compaction_id, prepared, current)
        if fitting is not None:
            return await self._store_checkpoint(*fitting, prepared.summary, current.measured)
        if current.reason == "command":
            words = current.wish.why_not(current.measured)
            words = words or "The conversation is already so short that a summary would be longer."
            return CompactionResult(outcome="noop", words=words)
        self._passes.append(self._branch.answers)
        return _too_small(self.model.info.name, current.limits, current.measured)

    async def _store_checkpoint(
        self, body: Checkpoint, prompt: Prompt | None, summary: Summary, measured: Measure
    ) -> CompactionResult:
        entries = [] if prompt is None else [NewEntry(body=prompt)]
        entries.append(NewEntry(body=body, model=summary.model))
        stored = await self._store(entries, measured)
        how = "notes taken without the model" if body.method == "fallback" else "a summary"
        words = f"Compacted to {how}: {_tokens_saved(body)}. Nothing is deleted; the model can recall everything."
        return CompactionResult(outcome="compacted", words=words, entry=stored[-1])

    async def _store(self, entries: list[NewEntry], measured: Measure) -> tuple[Entry, ...]:
        calibration = recalibrated(self._branch.row.calibration, measured)
        stored = await self._branch.record(entries, changes=SessionChanges(calibration=calibration))
        self._passes.append(self._branch.answers)
        return stored

    async def _undo(self) -> str:
        """Revoke the newest checkpoint, if the messages that it replaced still fit."""
        entry, body = self._branch.projection.checkpoint, self._branch.projection.checkpoint_body
        if entry is None or body is None:
            return "There is no compaction to undo."
        if body.method == "unread":
            return "Not undone: the conversation before it is too long to be read at once."
        limits, before = self.gauge.limits(), self.gauge.used()
        tokens = body.tokens_before + max(0, before - body.tokens_after)
        if tokens >= limits.threshold:
            return (
                f"Not undone: the conversation would have {tokens:,} tokens again, and crow compacts at "
                f"{limits.threshold:,} (context window: {limits.window:,})."
            )
        await self._branch.record([NewEntry(body=Restore(entry=entry.id))])
        await self.gauge.tell()
        return (
            f"Undone: {before:,} → {self.gauge.used():,} tokens. The model sees the conversation as it was before the "
            "compaction."
        )

    def _is_refused_too_often(self) -> bool:
        """Return whether compaction has failed to help. This is true if there was no answer since the first of the last
        `_MAX_RETRIES` passes. It is also true if there were fewer than `MIN_ANSWERS` answers since the first of the
        last `2 * _MAX_RETRIES` passes."""
        newest, all_of_them = self._answers_since(_MAX_RETRIES), self._answers_since(2 * _MAX_RETRIES)
        return newest == 0 or (all_of_them is not None and all_of_them < MIN_ANSWERS)

    def _answers_since(self, passes: int) -> int | None:
        """Return how many answers came after the oldest of the last `passes` passes, or None if this turn has had fewer
        passes."""
        if len(self._passes) < passes:
            return None
        return self._branch.answers - self._passes[-passes]


def _new_compaction_id() -> str:
    """Return a random id for a compaction."""
    return f"compaction_{secrets.token_hex(8)}"


def _too_small(model: str, limits: Limits, measured: Measure) -> CompactionResult:
    """Return the result for a request that is too large even after compaction. The result ends a turn only if the user
    configured the window."""
    words = (
        f"The request does not fit {model} and cannot be compacted further: context_window is {limits.window:,} tokens "
        f"in your configuration. System prompt and tools take {limits.fixed:,}; the request has {measured.used:,}, and "
        f"at most {limits.threshold:,} fit. Raise or remove context_window (in [model] or [models.NAME] of "
        f"config.toml), choose a model with a larger window, or disable MCP servers that you do not need."
    )
    return CompactionResult(outcome="too_small", words=words)


def _fills_too_fast(model: str, limits: Limits, answers: int) -> str:
    return (
        f"The context fills up faster than compaction can empty it: there were only {answers} answers since the "
        f"earlier of the last 2 compactions. {model} has a window of {limits.window:,} tokens, and system prompt and "
        f"tools take {limits.fixed:,}. Ask for smaller steps, or use a model with a larger window."
    )


def _with_advice(error: ContextOverflow, measured: Measure, why: Literal["off", "often", "nothing"]) -> ContextOverflow:
    """Return the endpoint's error with advice for the user. `why` is the reason why compaction did not help: it is
    turned off (`off`), there were too many compactions (`often`), or nothing is left to compact (`nothing`)."""
    sent = f"The request had about {measured.used:,} tokens, {measured.fixed:,} of them system prompt and tools"
    advice = {
        "off": f"{sent}. Automatic compaction is off (compaction.auto); /compact makes room.",
        "often": (
            f"{sent}, after several compactions. Send another prompt to compact further, or start over with /clear."
        ),
        "nothing": (
            f"{sent}, and nothing in it can be compacted. If the endpoint may be wrong, send the prompt again. "
            "Otherwise send a shorter prompt, choose a model with a larger window (/model), start the server with a "
            "larger window, or disable MCP servers that you do not need."
        ),
    }
    return ContextOverflow(f"{error} {advice[why]}", limit=error.limit, size=error.size)


def _tokens_saved(body: Mask | Checkpoint) -> str:
    return f"{body.tokens_before:,} → {body.tokens_after:,} tokens"
